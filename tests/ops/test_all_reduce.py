"""The ops of the recipe All-reduce: sums of ranks that share memory of the CPU, and of one rank as any op's."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, Draw, Exact, Refused
from collect_cases import require
from compiled import Ask, compiled
from inputs import first_quickly
from op_fixtures import recipe_in
from project import ROOT
from ranks import run_ranks

from triton_gallery.recipe.op import op_of

PATH = "several_gpus/all_reduce.py"
require(PATH.removesuffix(".py"))
EPS = 1e-6
FLOATS = [torch.float16, torch.bfloat16, torch.float32]


class Memory(NamedTuple):
    """What `all_reduce_memory` returns, of one rank that needs no process group."""

    addresses: torch.Tensor
    late: torch.Tensor
    rank: int
    ranks: int
    numel: int
    dtype: torch.dtype
    half: int
    tries: int
    kept: torch.Tensor


def memory(x: torch.Tensor, numel: int | None = None) -> Memory:
    """Return memory for a tensor, or for a number of elements."""
    half = 2**16 * (x.numel() * x.element_size() // 2**16 + 2)
    buffer = torch.zeros(512 + 2 * half, dtype=torch.uint8, device=x.device)
    late = torch.zeros(1, dtype=torch.int32, pin_memory=x.device.type == "cuda")
    addresses = torch.tensor([buffer.data_ptr(), late.data_ptr()], dtype=torch.int64, device=x.device)
    return Memory(addresses, late, 0, 1, x.numel() if numel is None else numel, x.dtype, half, 1000, buffer)


def arguments(draw: Draw, *shape: int, shots: int | None = None) -> tuple[Any, ...]:
    """Make a tensor, and memory for it."""
    x = draw(*shape)
    return x, memory(x), shots


def with_norm(draw: Draw, *shape: int, shots: int | None = None, wide: bool = False) -> tuple[Any, ...]:
    """Make rows, a residual, a weight of their dtype or of float32, and memory."""
    x, residual = draw(*shape), draw(*shape)
    weight = draw(shape[-1], dtype=torch.float32 if wide else None)
    return x, residual, weight, EPS, memory(x), shots


def exact(x: torch.Tensor, *_: Any) -> list[Exact]:
    """Return the sum of one rank's."""
    return [Exact(x)]


def exact_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any) -> list[Exact]:
    """Return the norm of a sum, which is rounded in it and in its mean square, and the sum."""
    h = x + residual
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
    return [Exact(y, narrow=2 * y.abs()), Exact(h, x.abs() + residual.abs(), roundings=2)]


def too_many(draw: Draw) -> tuple[Any, ...]:
    """Make a tensor that is larger than its memory."""
    x = draw(10)
    return x, memory(x, 9)


def refused_norm(name: str, place: int, **to: Any) -> Refused:
    """Return a call of the norm in which one tensor is another."""

    def make(draw: Draw) -> tuple[Any, ...]:
        given = [*with_norm(draw, 2, 3)]
        given[place] = draw(*to.get("shape", (2, 3)), dtype=to.get("dtype", draw.dtype))
        return tuple(given)

    return Refused(make, ValueError if "shape" in to else TypeError, f"all_reduce_rms_norm takes {name}")


SIZES = [(7,), (1,), (2, 0), (5000,), (), (3, 1000), (2049,), (4096,), (140_000,)]
ROWS = [(5, 100), (1, 1), (3, 0, 7), (70, 33), (2, 2049), (7,), (3, 4096), (130, 8)]
CONTRACT = [
    *(
        Case(
            "all_reduce",
            lambda draw, *shape, shots=shots: arguments(draw, *shape, shots=shots),
            exact,
            sizes=SIZES,
            small=(3, 5),
            in_layouts=(3, 70),
            dtypes=FLOATS,
            roundings=1,
            plain=True,
            name=f"all_reduce, {shots} shots",
            refused=[
                Refused(too_many, ValueError, r"all_reduce takes up to 9 elements, as .* not 10"),
                Refused(
                    lambda draw: (draw(3), memory(draw(3).half())), TypeError, r"all_reduce takes torch\.float16 on"
                ),
                Refused(lambda draw: (*arguments(draw, 3)[:2], 3), ValueError, "all_reduce takes 1 or 2 shots or None"),
            ],
        )
        for shots in (None, 1, 2)
    ),
    *(
        Case(
            "all_reduce_rms_norm",
            lambda draw, *shape, shots=shots, wide=wide: with_norm(draw, *shape, shots=shots, wide=wide),
            exact_norm,
            sizes=ROWS,
            small=(3, 5),
            dtypes=FLOATS,
            plain=True,
            name=f"all_reduce_rms_norm, {shots} shots{', wide weight' if wide else ''}",
            refused=[
                refused_norm("a residual of torch.float32", 1, dtype=torch.float16),
                refused_norm("a residual of torch.float32 and a float weight", 2, dtype=torch.int32),
                refused_norm(r"x and a residual of \(\.\.\., N\)", 1, shape=(3, 2)),
                refused_norm(r"x and a residual of \(\.\.\., N\)", 2, shape=(2,)),
            ],
        )
        for shots, wide in ((1, False), (2, True))
    ),
]
BREAKS = [
    ("one buffer", "launch % 2 * half", "0 * half"),
    ("waits for nobody", "while (count < target) & (left > 0):", "while (count < 0) & (left > 0):"),
    ("one barrier in two shots", "before + 2 * RANKS, left", "before + RANKS, left"),
    ("not NaN where a rank did not come", "tl.where(left > 0, total.to", "tl.where(left > -1, total.to"),
    ("a late rank gets a sum without it", "tl.where(left > 0, total, ", "tl.where(left > -1, total, "),
    ("the first of two barriers is forgotten", "before + 2 * RANKS, left, RANKS", "before + 2 * RANKS, tries, RANKS"),
    ("a late rank is not said", "if left == 0:", "if left == -1:"),
]
START = """
import datetime, os, random, sys, time
import torch
import torch.distributed as dist
import triton

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
import taken as op
from triton.runtime.interpreter import InterpreterBuilder

RANK, RANKS = dist.get_rank(), dist.get_world_size()
ALL, op.ALL_REDUCE_PROGRAMS = op.ALL_REDUCE_PROGRAMS, 4  # the interpreter has one program after another
atomic_rmw = InterpreterBuilder.create_atomic_rmw

def politely(*arguments):
    # A rank that waits leaves the core to those that it waits for
    time.sleep(0.0002)
    return atomic_rmw(*arguments)

InterpreterBuilder.create_atomic_rmw = politely

def part(rank, *shape, dtype=torch.float32, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))
    return made.to(dtype)

def right(out, parts, dtype):
    # In the order of the ranks, in float32; the interpreter cuts off what a GPU rounds
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other.float()
    near = torch.finfo(dtype).eps * total.abs() if dtype != torch.float32 else torch.zeros_like(total)
    assert ((out.float() - total).abs() <= near).all(), "not the sum"
    of_all = [torch.empty_like(out) for _ in range(RANKS)]
    dist.all_gather(of_all, out)
    assert all(torch.equal(other, out) for other in of_all), "ranks have other results"
"""
SUMS = """
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    memory = op.all_reduce_memory(9000, dtype)
    seed = 0
    for N in (1, 1000, 9000):
        for shots in (1, 2):
            seed += 1
            parts = [part(rank, N, dtype=dtype, seed=seed) for rank in range(RANKS)]
            right(op.all_reduce(parts[RANK], memory, shots), parts, dtype)
    x = [part(rank, 2, 301, dtype=dtype)[:, 1:].mT for rank in range(RANKS)]  # of other strides, unaligned
    right(op.all_reduce(x[RANK], memory), x, dtype)
    for rows, H in ((1, 1), (RANKS + 1, 1031)):
        for shots in (1, 2):
            seed += 1
            parts = [part(rank, rows, H, dtype=dtype, seed=seed) for rank in range(RANKS)]
            residual, weight = part(98, rows, H, dtype=dtype), part(99, H, dtype=dtype)
            y, h = op.all_reduce_rms_norm(parts[RANK], residual, weight, 1e-6, memory, shots)
            total = op.all_reduce(parts[RANK], memory)
            right(total, parts, dtype)
            right(h, [total, residual], dtype)
            exact = torch.nn.functional.rms_norm(h.double(), (H,), weight.double(), 1e-6)
            off = (y.double() - exact).abs()
            assert (off <= max(torch.finfo(dtype).eps, 1e-6) * (exact.abs() + 1e-3)).all()
    op.all_reduce_check(memory)

# Tiles of the larger size, and all programs
op.ALL_REDUCE_PROGRAMS = ALL
memory = op.all_reduce_memory(1_100_001, torch.bfloat16)
for shots in (1, 2):
    parts = [part(rank, 1_100_001, dtype=torch.bfloat16, seed=shots) for rank in range(RANKS)]
    right(op.all_reduce(parts[RANK], memory, shots), parts, torch.bfloat16)
print(f"checked {RANK}\\n", end="")
"""
# At each barrier of each rank in turn that rank sleeps, as would a GPU that has something else to do
DELAYS = """
op.ALL_REDUCE_PROGRAMS = 1
number, slow = 0, None

def barrier(_):
    global number
    if (RANK, number) == slow:
        time.sleep(0.15)
    number += 1

InterpreterBuilder.create_barrier = barrier
memory = op.all_reduce_memory(100, torch.float32)
for shots in (1, 2):
    for slow in [(rank, place) for rank in range(RANKS) for place in range(2 * shots)]:
        rounds = [[part(rank, 9, seed=seed) for rank in range(RANKS)] for seed in range(3)]
        dist.barrier()
        sums = []
        for parts in rounds:
            number = 0
            sums.append(op.all_reduce(parts[RANK], memory, shots))
        dist.barrier()
        for total, parts in zip(sums, rounds, strict=True):
            right(total, parts, torch.float32)
op.all_reduce_check(memory)
print(f"checked {RANK}\\n", end="")
"""
# Rank 1 comes when rank 0 has given up the first barrier of two and added up what was there
BETWEEN = """
op.ALL_REDUCE_PROGRAMS = 1
number = 0
come = f"{sys.argv[0]}.come"

def barrier(_):
    global number
    if (RANK, number) == (0, 2):
        open(come, "w").close()
        time.sleep(1)
    number += 1

InterpreterBuilder.create_barrier = barrier
memory = op.all_reduce_memory(4000, torch.float32, tries=None if RANK else 50)
dist.barrier()
while RANK and not os.path.exists(come):
    time.sleep(0.01)
out = op.all_reduce(torch.ones(4000), memory, 2)
off = out.ne(RANKS) & out.isfinite()
assert not off.any(), f"rank {RANK} has {off.sum()} numbers that are no sum"
assert RANK or out.isnan().all()
dist.barrier()
print(f"checked {RANK}\\n", end="")
"""
REFUSALS = """
def refused(error, text, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except error as raised:
        assert text in str(raised), str(raised)
        assert str(raised).startswith("all_reduce"), str(raised)
    else:
        raise AssertionError(f"nothing raised: {text}")

make = op.all_reduce_memory
refused(TypeError, "not torch.float64", make, 10, torch.float64)
refused(ValueError, "not 0", make, 0, torch.float32)
refused(ValueError, "not 2147483648", make, 2**31, torch.float32)
refused(ValueError, "ranks ask for different memory", make, 10 + RANK, torch.float32)
first = dist.new_group([0])
if RANK == 0:
    alone = make(10, torch.float32, first)
    assert op.all_reduce(torch.ones(3), alone).tolist() == [1, 1, 1]
else:
    refused(ValueError, "this process is not in the group", make, 10, torch.float32, first)
last = dist.new_group([RANKS - 1, 0])
memory = make(10, torch.float32, last) if RANK in (0, RANKS - 1) else None
if memory:
    total = op.all_reduce(torch.ones(3), memory)
    assert total.tolist() == [2, 2, 2]
for shots in (1, 2):
    memory = make(10, torch.bfloat16, tries=50)
    if RANK == 0:  # nobody else comes
        began = time.perf_counter()
        out = op.all_reduce(torch.ones(3, dtype=torch.bfloat16), memory, shots)
        assert time.perf_counter() - began < 30
        assert out.isnan().all(), "not NaN"
        refused(RuntimeError, "waited for a rank that did not come", op.all_reduce_check, memory)
        refused(RuntimeError, "waited for a rank", op.all_reduce, torch.ones(3, dtype=torch.bfloat16), memory)
    else:
        op.all_reduce_check(memory)
dist.barrier()
dist.destroy_process_group()
refused(ValueError, "there is none", make, 10, torch.float32)
print(f"checked {RANK}\\n", end="")
"""
# Answers of the exercises, and what the page says of its kernels; `p` is the recipe
LESSON = """
import triton
import triton.language as tl
import all_reduce as p

@triton.jit
def own_alone_kernel(out_ptr, buffers_ptr, rank, PART, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    ptr = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.float32)) + rank * PART
    tl.store(out_ptr + offs, tl.load(ptr + offs, mask=offs < PART), mask=offs < PART)

@triton.jit
def half_kernel(
    out_ptr, buffers_ptr, residual_ptr, weight_ptr, H, eps, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    offs = tl.program_id(axis=0) * H + cols
    h = tl.load(residual_ptr + offs, mask=cols < H, other=0.0)
    for peer in tl.static_range(RANKS):
        ptr = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.float32))
        h += tl.load(ptr + offs, mask=cols < H, other=0.0)
    y = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps) * tl.load(weight_ptr + cols, mask=cols < H)
    tl.store(out_ptr + offs, y, mask=cols < H)

assert p.check_scatter(p.scatter_answer_kernel)
assert p.check_norm(p.norm_answer_kernel)
assert p.check_scatter(own_alone_kernel) == (p.RANKS == 1)
assert not p.check_norm(half_kernel), "it leaves the residual as it was"
assert not p.check_scatter(None)
for turn in range(2):
    for N in (1, 5000):
        p.check_sum(p.one_barrier(p.tensor_of(p.RANK, N)))
        p.x.mine[:N] = p.tensor_of(p.RANK, N)
        p.check_sum(p.one_shot(N))
p.meet_ranks()
if p.RANK == 0:
    p.TRIES = 100
    out = p.one_shot(3)  # where no other rank comes
    assert out.isnan().all() == (p.RANKS > 1)
assert p.late.item() == (p.RANK == 0 and p.RANKS > 1)
p.x = p.symmetric_floats(p.LARGEST)  # counts of the other are off
p.late.zero_()
if p.RANK == 0:
    out = p.two_shots(3 * p.RANKS, tries=100)
    assert out.isnan().all() == (p.RANKS > 1), "a slice of two shots looks right"
assert p.late.item() == (p.RANK == 0 and p.RANKS > 1)
p.meet_ranks()
print(f"checked {p.RANK}\\n", end="")
"""


def run(folder: Path, ranks: int, **files: str) -> str:
    """Run the last of some files in ranks without a GPU; return what they printed."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return run_ranks(folder / f"{name}.py", ranks)


def check_op(gallery: Path, folder: Path, ranks: int, checks: str) -> None:
    """Run checks on the op as whoever takes it has it."""
    op = op_of(recipe_in(gallery / PATH))
    assert op
    said = run(folder, ranks, taken=op.of("taken").code, checks=START + checks)
    assert sorted(re.findall(r"checked (\d)", said)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", first_quickly(2, 1, 3))
def test_sums_between_ranks_float32(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """They are right at any size, in each dtype, and agree bit for bit on all ranks."""
    check_op(gallery, tmp_path, ranks, SUMS)


@pytest.mark.parametrize("ranks", first_quickly(2, 3))
def test_late_ranks_float32(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """No barrier and no buffer is missing: whichever rank is late, and where, no number is too old or too new."""
    check_op(gallery, tmp_path, ranks, DELAYS)


@pytest.mark.parametrize("ranks", first_quickly(2, 3))
def test_rank_between_barriers_float32(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """A part without the numbers of a rank that came too late for it is NaN, on the late rank, too."""
    check_op(gallery, tmp_path, ranks, BETWEEN)


@pytest.mark.parametrize("ranks", first_quickly(2, 3))
def test_refusals_between_ranks_float32(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """Groups, sizes and dtypes are checked, and a rank that does not come is waited for no longer than was asked."""
    check_op(gallery, tmp_path, ranks, REFUSALS)


@pytest.mark.parametrize("ranks", first_quickly(2, 1, 3))
def test_kernels_of_the_page(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """A wrong kernel is called wrong, and the kernels of each step are right call after call."""
    said = run(tmp_path, ranks, all_reduce=(gallery / PATH).read_text(), checks=LESSON)
    assert sorted(re.findall(r"checked (\d)", said)) == [str(rank) for rank in range(ranks)]


def test_page_between_ranks(gallery: Path, tmp_path: Path) -> None:
    """A rank that does not come gives NaN, and is told."""
    said = run(tmp_path, 2, all_reduce=(gallery / PATH).read_text())
    assert "all NaN: True late: 1" in said
    assert said.count("not solved yet") == 2


@pytest.mark.parametrize(
    ("nbytes", "ranks", "two"),
    [(2**22, 2, False), (2**23, 2, True), (2**19, 4, False), (2**20, 4, True), (2**17, 8, False), (2**18, 8, True)],
)
def test_choice_of_shots(taken: ModuleType, nbytes: int, ranks: int, two: bool) -> None:
    """More ranks read more in one shot, so the second begins to pay earlier."""
    assert taken._all_reduce_two_shots(nbytes, ranks) == two


def test_sixty_four_programs_count(taken: ModuleType) -> None:
    """Each program counts each launch, whether it has something to do or not: they agree on the buffer."""
    x = torch.ones(5000)
    of_one = memory(x)
    for launch, shots in enumerate((1, 2, 1, 1, 2)):
        taken.all_reduce(x[: 5000 if launch % 2 else 1], of_one, shots)
        counts = of_one.kept[: 8 * taken.ALL_REDUCE_PROGRAMS].view(torch.int64)
        assert counts.eq(2 * (launch + 1)).all()


def code(recipe: ModuleType) -> list[str]:
    """Return the PTX of both kernels of the op, for four ranks, and for an odd number of them."""
    made = []
    for name in ("one", "two"):
        for ranks, lanes in ((4, 4), (3, 4)):
            known = {"residual_ptr": None, "weight_ptr": None, "norm_ptr": None, "addresses_ptr": "i64"}
            known |= {"UNIT": 8, "RANKS": ranks, "LANES": lanes, "WIDTH": 4096, "BLOCK": 4096}
            kernel = getattr(recipe, f"_all_reduce_{name}_shot_kernel")
            made.append(compiled(kernel, "bf16", 16, ["half"], **known, eps=0.0).asm["ptx"])
    return made


def test_compiled_as_the_page_says(on_h100: Ask) -> None:
    """Counts are changed and seen by instructions that hold for all GPUs; a thread moves 16 bytes at once."""
    (made,) = on_h100(ROOT / "gallery" / PATH, code)
    for ptx in made:
        assert re.search(r"(atom|red)\.global\.(sys\.release|release\.sys)\.add", ptx)
        assert re.search(r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)", ptx)
        assert not re.search(r"(ld|st)\.global\.(v\d\.)?b16", ptx)
        assert "ld.global.v4" in ptx
        assert "st.global.v4" in ptx
        assert "multimem" not in ptx
