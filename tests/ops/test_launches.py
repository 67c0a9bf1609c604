"""What is noted of a recipe's launches, by Triton's interpreter and on a GPU alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = [triton.Config({"BLOCK": 64}, num_warps=1), triton.Config({"BLOCK": 128}, num_warps=2)]


@triton.jit
def same(x):
    return x


@triton.jit
def copy_kernel(x_ptr, out_ptr, N, change: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N).to(ACC)
    tl.store(out_ptr + offs, change(x).to(out_ptr.dtype.element_ty), mask=offs < N)


def clock(call, quantiles):
    call()
    return [next(TIMES)] * 3


@triton.autotune(CONFIGS, key=["N"], do_bench=clock)
@triton.jit
def tuned_kernel(x_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, offs, mask=offs < N)


TIMES = iter([2.0, 1.0])
for dtype in (torch.float32, torch.float16):
    x = torch.arange(100, dtype=dtype, device=DEVICE)
    out = torch.empty_like(x)
    copy_kernel[(2,)](x, out, 100, same, tl.float32, BLOCK=64, num_warps=2)
    assert torch.equal(x, out)
whole = torch.empty(100, dtype=torch.int32, device=DEVICE)
for _ in range(2):
    tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](whole, 100)
"""
PROGRAM = """
import msgspec, runpy, sys, torch, os
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from pathlib import Path
from triton_gallery.execute.launch_trace import Watch

watch = Watch(Path.cwd())
runpy.run_path(str(Path.cwd() / "recipe.py"), run_name="__main__")
print(msgspec.json.encode(watch.launches).decode())
"""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Return what is noted, by the names of kernels."""
    folder = tmp_path_factory.mktemp("launches").resolve()
    (Path(folder) / "recipe.py").write_text(RECIPE)
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return {launch["kernel"]: launch for launch in json.loads(process.stdout)}


def test_types_constants_and_options(launches: dict[str, dict]) -> None:
    """Of the launches in float32 and float16, the one with the type that models use."""
    assert launches["copy_kernel"] == {
        "kernel": "copy_kernel",
        "signature": {
            **{"x_ptr": "*fp16", "out_ptr": "*fp16", "N": "i32"},
            **dict.fromkeys(("change", "ACC", "BLOCK"), "constexpr"),
        },
        "constants": [[[3], {"function": "same"}], [[4], {"dtype": "fp32"}], [[5], 64]],
        "aligned": [[0], [1]],
        "options": {"num_warps": 2},
    }


def test_of_what_was_tuned_the_best(launches: dict[str, dict]) -> None:
    """The config that won, though it was compiled while it was tried."""
    tuned = launches["tuned_kernel"]
    assert (tuned["constants"], tuned["options"]) == ([[[2], 128]], {"num_warps": 2})
    assert [*launches] == ["copy_kernel", "tuned_kernel"]
