"""The recipe One kernel, several GPUs: its kernels between ranks that share memory of the CPU, and its exercises."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from collect_cases import require
from compiled import Ask, compiled
from project import ROOT
from ranks import run_ranks

PATH = "several_gpus/peer_memory.py"
require(PATH.removesuffix(".py"))
# Answers and the kernels of the page, between ranks; `p` is the recipe
CHECKS = """
import os
import torch
import triton
import triton.language as tl
import peer_memory as p

@triton.jit
def first_alone_kernel(buffers_ptr, out_ptr, N, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    peer_ptr = tl.load(buffers_ptr).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + offs, tl.load(peer_ptr + offs, mask=offs < N), mask=offs < N)

assert p.check_sum(p.sum_answer_kernel)
assert p.check_push(p.push_answer_kernel)
assert p.check_sum(first_alone_kernel) == (p.RANKS == 1)
assert not p.check_sum(None)
for N in (1, 7, 2049, 5000):
    for turn in range(3):
        p.x.mine[:N] = p.numbers_of(p.RANK, N) + turn
        assert torch.equal(p.exchange_at_once(p.x, N), p.numbers_of(p.NEXT, N) + turn)
assert p.late.item() == 0
p.meet_ranks()
if p.RANK == 0:
    p.TRIES = 100
    p.barrier(p.x)  # where no other rank comes
assert p.late.item() == (p.RANK == 0 and p.RANKS > 1)
p.meet_ranks()
print(f"checked {p.RANK}\\n", end="")
"""


def run(gallery: Path, folder: Path, ranks: int, checks: str | None = None) -> str:
    """Run the recipe, or checks that import it, in ranks without a GPU; return what they printed."""
    script = folder / "peer_memory.py"
    script.write_text((gallery / PATH).read_text())
    if checks:
        script = folder / "checks.py"
        script.write_text(checks)
    return run_ranks(script, ranks)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
def test_kernels_between_ranks(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """A wrong kernel is called wrong, and a barrier that a rank misses is not waited at forever."""
    said = run(gallery, tmp_path, ranks, CHECKS)
    assert sorted(re.findall(r"checked (\d)", said)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_planted_delays_show(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """Each barrier that is missing gives a number that is too old or too new."""
    said = run(gallery, tmp_path, ranks)
    assert "no barrier: all ranks wrote 1, and rank 0 read 0" in said
    assert "a barrier before: all ranks wrote 1, and rank 0 read 1" in said
    assert "a barrier before: in the first round rank 0 read 2" in said
    assert said.count("barriers before and after") == 2
    assert said.count("not solved yet") == 2


def code(recipe: ModuleType) -> list[str]:
    """Return the PTX of the barrier, and of the first kernel."""
    tables = {"buffers_ptr": "i64", "pads_ptr": "i64", "late_ptr": "i32"}
    of_barrier = compiled(recipe.barrier_kernel, "fp32", 1, **{k: tables[k] for k in ("pads_ptr", "late_ptr")}, RANKS=4)
    of_read = compiled(recipe.read_peer_kernel, "fp32", 8, ["N"], buffers_ptr="i64", BLOCK=2048)
    return [of_barrier.asm["ptx"], of_read.asm["ptx"]]


def test_compiled_as_the_page_says(on_h100: Ask) -> None:
    """Flags are set and seen by instructions that hold for all GPUs; a thread loads 16 bytes at once."""
    ((barrier, read),) = on_h100(ROOT / "gallery" / PATH, code)
    found = set(re.findall(r"atom\.\S+", barrier))
    assert found == {"atom.global.release.sys.cas.b32", "atom.global.acquire.sys.cas.b32"}
    assert "ld.global.v4" in read
