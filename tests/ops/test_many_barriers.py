"""Barriers between ranks hold thousands of times, whoever is late: sums would otherwise be too old or too new."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from collect_cases import require
from op_fixtures import recipe_in
from ranks import WITHOUT_GPUS, run_ranks

from triton_gallery.recipe.op import op_of

PATH = "several_gpus/all_reduce.py"
require(PATH.removesuffix(".py"), torch.cuda.device_count())
# Each rank sleeps before a third of its calls, of a seed of its own, for longer than a call takes. What a call should
# return follows from its number, so no rank asks another: only the op's barriers keep ranks together.
STRESS = """
import datetime
import random
import sys
import time
import torch
import torch.distributed as dist

ON_GPU, CALLS = sys.argv[1] == "cuda", int(sys.argv[2])
dist.init_process_group("nccl" if ON_GPU else "gloo", timeout=datetime.timedelta(seconds=100))
RANK, RANKS = dist.get_rank(), dist.get_world_size()
if ON_GPU:
    torch.cuda.set_device(RANK)
import taken as op

DEVICE = torch.device("cuda", RANK) if ON_GPU else torch.device("cpu")
if not ON_GPU:
    op.ALL_REDUCE_PROGRAMS = 1
numbers, delays = random.Random(0), random.Random(1 + RANK)
memory = op.all_reduce_memory(6000, torch.float32)
wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
barriers = 0
for call in range(CALLS):
    N, shots = numbers.choice((1, 100, 6000)), numbers.choice((1, 2))
    if delays.random() < 1 / 3:
        if ON_GPU:
            torch.cuda._sleep(delays.randrange(100_000))  # cycles: up to about 50 us
        else:
            time.sleep(delays.random() / 500)
    x = torch.full((N,), float(call * (RANK + 1)), device=DEVICE)
    wrong += (op.all_reduce(x, memory, shots) != call * RANKS * (RANKS + 1) // 2).sum()
    barriers += shots
op.all_reduce_check(memory)
assert wrong.item() == 0, f"{wrong.item()} wrong numbers"
print(f"rank {RANK} passed {barriers} barriers or more\\n", end="")
dist.barrier()
dist.destroy_process_group()
"""


def passed(gallery: Path, folder: Path, ranks: int, device: str, calls: int) -> list[int]:
    """Run calls in ranks; return how many barriers each passed at least."""
    op = op_of(recipe_in(gallery / PATH))
    assert op
    (folder / "taken.py").write_text(op.of("taken").code)
    script = folder / "stress.py"
    script.write_text(STRESS)
    on_gpus = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    said = run_ranks(script, ranks, device, str(calls), variables=on_gpus if device == "cuda" else WITHOUT_GPUS)
    return [int(count) for count in re.findall(r"passed (\d+) barriers", said)]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Where there are several, the test between them is no longer skipped."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    skipped = []
    try:
        module = runpy.run_path(__file__)
        skipped = [mark.args[0] for mark in module["test_many_barriers_between_gpus"].pytestmark]
    except pytest.skip.Exception as reason:
        skipped = [str(reason)]
    assert all(skipped) == (gpus == 1), skipped


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_many_barriers_between_gpus(gallery: Path, tmp_path: Path) -> None:
    """Ten thousand barriers with random delays, on as many GPUs as there are."""
    counts = passed(gallery, tmp_path, torch.cuda.device_count(), "cuda", 10_000)
    assert len(counts) == torch.cuda.device_count()
    assert min(counts) > 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="the one between GPUs does more")
def test_some_barriers_without_gpus_float32(gallery: Path, tmp_path: Path) -> None:
    """The same with two ranks of the interpreter, for a hundred calls."""
    assert passed(gallery, tmp_path, 2, "cpu", 100)[1] > 100
