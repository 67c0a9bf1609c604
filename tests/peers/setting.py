"""Where the cases run, what they are made of, and why some are skipped."""

import os
import tomllib
from pathlib import Path

import pytest
import torch
from inputs import DEVICE

GPU = torch.cuda.is_available()
if not GPU:  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
REASONS = tomllib.loads((Path(__file__).parent / "not_taken.toml").read_text())

composed = pytest.mark.composed
pick = lambda gpu, cpu: gpu if GPU else cpu  # noqa: E731


def each(names, *values, cpu=()):
    """Parametrize a test; without a GPU, with some small cases more."""
    return pytest.mark.parametrize(names, [*values, *([] if GPU else cpu)], ids=str)


def not_taken(which):
    """Skip what no op takes, for a reason of the table."""
    pytest.skip(f"not taken: {REASONS[which]}")


def needs(here, why):
    """Skip what cannot run here."""
    if not here:
        pytest.skip(f"not here: {why}")


def light(work, most=1 << 18):
    """Skip what would take Triton's interpreter too long; PEERS_LARGER=16 takes cases of 16 times the work."""
    most *= float(os.environ.get("PEERS_LARGER") or 1)
    needs(GPU or work <= most, "too much for the interpreter")


def on_hopper(name):
    """Skip an op of Gluon elsewhere than on the GPUs that it is for."""
    needs(HOPPER or not name.startswith("gluon"), f"{name} runs on H100 and H200 alone")


def randn(*shape, dtype=F32, grad=False):
    return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


def rand(*shape, dtype=F32):
    return torch.rand(shape, device=DEVICE, dtype=dtype)


def randint(low, high, shape, dtype=torch.int64):
    return torch.randint(low, high, shape, device=DEVICE, dtype=dtype)
