"""The op of the recipe Expert parallelism: between ranks that share memory of the CPU, and alone."""

# ruff: noqa: N806 - T tokens, H numbers of a row, E experts, as in the recipe

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact
from collect_cases import definitions, require
from compiled import Ask, compiled
from inputs import DEVICE
from op_fixtures import recipe_in
from project import ROOT, SOURCES
from ranks import WITHOUT_GPUS, run_ranks

from triton_gallery.recipe.op import op_of

PATH = "several_gpus/expert_all_to_all.py"
require(PATH.removesuffix(".py"))
FLOATS = torch.float16, torch.bfloat16, torch.float32


def permutation(experts: torch.Tensor, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inverse and offsets, as moe_routing_permutation does."""
    flat = experts.flatten().long()
    flat = torch.where((flat >= 0) & (flat < E), flat, E)
    order = flat.sort(stable=True).indices
    offsets = flat.bincount(minlength=E + 1)[:E].cumsum(0)
    return order.argsort().int(), offsets.int()


def there_and_back(
    module: ModuleType,
    memory: Callable[..., Any],
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    _: int = 0,
) -> torch.Tensor:
    """Return what a layer does whose experts return what they get; one rank has them all."""
    T, H = x.shape
    used = memory(max(T, 1), experts.shape[1], H, len(offsets), x.dtype, x.dtype, x.device)
    rows, scales, ends, places = module.expert_all_to_all_dispatch(x, experts, inverse, offsets, used)
    assert scales is None
    out: torch.Tensor = module.expert_all_to_all_combine(rows, weights, places, ends, used)
    return out


def prepare(module: ModuleType) -> None:
    """Give the op's module a function that needs no memory of its caller; a CUDA graph takes what was made before."""

    @lru_cache
    def memory(T: int, k: int, H: int, E: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> Any:
        allocate = lambda size: [torch.empty(size, dtype=torch.uint8, device=device)]  # noqa: E731
        return module.expert_all_to_all_memory(T, k, H, E, dtype, out_dtype, allocate=allocate)

    module._expert_all_to_all_alone = partial(there_and_back, module, memory)  # type: ignore[attr-defined]


def arguments(draw: Draw, T: int, H: int, E: int, k: int) -> tuple[Any, ...]:
    """Make rows, experts of which some are none, weights, and how choices are sorted."""
    x, weights = draw(T, H), draw(T, k, dtype=torch.float32)
    experts = draw(T, k, dtype=torch.int32)
    experts = experts % (E + 2) - 1
    return x, experts, weights, *permutation(experts, E)


def exact(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, inverse: torch.Tensor, offsets: torch.Tensor
) -> Sequence[Exact]:
    """Return the sum of a token's weights times its row."""
    inside = (experts >= 0) & (experts < len(offsets))
    weights = torch.where(inside, weights, 0)
    return [Exact(x * weights.sum(1, keepdim=True), x.abs() * weights.abs().sum(1, keepdim=True))]


CONTRACT = [
    Case(
        "_expert_all_to_all_alone",
        name="expert_all_to_all",
        arguments=arguments,
        exact=exact,
        sizes=[(5, 24, 6, 3), (1, 8, 1, 1), (0, 8, 4, 2), (33, 40, 1024, 2), (7, 4104, 3, 1), (64, 16, 8, 8)],
        small=(6, 16, 4, 2),
        many=(20_011, 1032, 60, 6),
        dtypes=FLOATS,
        layouts=("contiguous", "padded", "transposed"),
        prepare=prepare,
        plain=True,
        launcher=False,
    )
]

# What the scripts below have in common; `op` is the op, of this gallery or of a mutant
BEGIN = """
import datetime, os
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
RANK, RANKS = dist.get_rank(), dist.get_world_size()
import expert_all_to_all_op as op
from triton_gallery.ranks import shared_bytes

def inputs(rank, T, H, E, k, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(T, H, generator=generator)
    return x, torch.randint(-1, E + 1, (T, k), generator=generator), torch.rand(T, k, generator=generator)

def layer(Ts, H, E, k, dtype, out_dtype, groups=0, rounds=2, change=lambda experts: experts):
    memory = op.expert_all_to_all_memory(max(*Ts, 1), k, H, E, dtype, out_dtype, groups, allocate=shared_bytes)
    LOCAL = E // RANKS
    for seed in range(rounds):
        every = [inputs(rank, T, H, E, k, seed) for rank, T in enumerate(Ts[:RANKS])]
        every = [(x.to(dtype), change(experts), weights) for x, experts, weights in every]
        number = lambda r: torch.arange(len(every[r][0]) * groups).float() + 1000 * r
        scales = [number(r).view(-1, max(groups, 1)) for r in range(RANKS)]
        x, experts, weights = every[RANK]
        given = x, experts if seed else experts.int(), *permutation(experts, E)
        rows, got_scales, ends, places = op.expert_all_to_all_dispatch(
            *given, memory, scales[RANK] if groups else None
        )
        wanted, ends_wanted = [], []
        for e in range(RANK * LOCAL, (RANK + 1) * LOCAL):
            wanted += [(r, t) for r in range(RANKS) for t in torch.where(every[r][1] == e)[0].tolist()]
            ends_wanted.append(len(wanted))
        assert ends.tolist() == ends_wanted, (ends, ends_wanted)
        for place, (r, t) in enumerate(wanted):
            assert torch.equal(rows[place].view(torch.uint8), every[r][0][t].view(torch.uint8)), (place, r, t)
            assert not groups or torch.equal(got_scales[place], scales[r][t])
        inside = (experts >= 0) & (experts < E)
        assert torch.equal(places == -1, ~inside)
        y = torch.full((len(rows), H), torch.nan, dtype=out_dtype)  # what no expert returned is not read
        numbers = torch.searchsorted(ends, torch.arange(len(wanted)), right=True) + RANK * LOCAL
        y[: len(wanted)] = rows[: len(wanted)].float() * (numbers[:, None] + 1)
        if seed % 2:
            memory.results.copy_(y)
        out = op.expert_all_to_all_combine(None if seed % 2 else y, weights, places, ends, memory)
        terms = (x.float()[:, None] * (experts[..., None] + 1)).to(out_dtype).float() * weights[..., None]
        exact = torch.where(inside[..., None], terms, 0).sum(1)
        scale = max([1.0, *terms.abs().amax((1, 2)).tolist()]) * k
        torch.testing.assert_close(out.float(), exact, rtol=0, atol=2 * torch.finfo(out_dtype).eps * scale)
    op.expert_all_to_all_check(memory)
    return memory
"""
SIZES = """
single = torch.float32
for Ts in ([5, 5, 5], [7, 0, 1], [0, 0, 0], [1, 2, 3]):
    layer(Ts, 8, 6, 2, single, single)
layer([7, 3, 5], 4100, 6, 3, single, single, rounds=1)
layer([7, 3, 5], 16, 6, 3, torch.bfloat16, torch.bfloat16)
layer([7, 3, 5], 24, 6, 3, torch.float16, single)
layer([7, 3, 5], 256, 12, 3, torch.float8_e4m3fn, torch.bfloat16, groups=2)
layer([7, 3, 5], 16, 12, 3, torch.float8_e5m2, single, groups=1)
layer([9, 3, 5], 8, 6, 2, single, single, change=lambda experts: experts * 0 + 4)  # all to one
layer([9, 3, 5], 8, 6, 2, single, single, change=lambda experts: experts * 0 - 1)  # none at all
layer([4, 4, 4], 8, 996, 2, single, single, rounds=3)  # most experts have no tokens
"""
FULL = """
# Of the two rows for each expert, none of the later ranks' fits
memory = op.expert_all_to_all_memory(2, 1, 8, RANKS, torch.float32, torch.float32, 0, 3, allocate=shared_bytes)
x, experts = torch.full((2, 8), RANK + 1.0), torch.zeros(2, 1, dtype=torch.int32)
rows, _, ends, places = op.expert_all_to_all_dispatch(x, experts, *permutation(experts, RANKS), memory)
assert ends.tolist() == [min(2 * RANKS, 3) if RANK == 0 else 0], ends
lost = torch.arange(2) + 2 * RANK >= 3
assert torch.equal(places[:, 0] == -2, lost), places
out = op.expert_all_to_all_combine(rows, torch.ones(2, 1), places, ends, memory)
assert torch.equal(out.isnan().all(1), lost), out
assert torch.equal(out[~lost], x[~lost])
assert memory.state.tolist() == [2 * RANKS, 0]
if RANKS > 1:
    try:
        op.expert_all_to_all_check(memory)
        raise AssertionError("no error")
    except RuntimeError as error:
        assert f"a capacity of 3 rows, and a rank was to get {2 * RANKS}" in str(error), error
"""
LATE = """
memory = op.expert_all_to_all_memory(2, 1, 8, RANKS, torch.float32, torch.float32, allocate=shared_bytes)
if RANK == 0:  # where no other rank comes
    op.EXPERT_ALL_TO_ALL_TRIES = 100 << 8
    x, experts = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int32)
    rows, _, ends, places = op.expert_all_to_all_dispatch(x, experts, *permutation(experts, RANKS), memory)
    out = op.expert_all_to_all_combine(rows, torch.ones(2, 1), places, ends, memory)
    assert out.isnan().all() == (RANKS > 1)
    try:
        op.expert_all_to_all_check(memory)
        assert RANKS == 1
    except RuntimeError as error:
        assert "waited for a rank that did not come" in str(error), error
dist.barrier()
"""
RACES = """
# Each rank is late at another place, and then all go on at once
import time
memory = op.expert_all_to_all_memory(3, 2, 8, 2 * RANKS, torch.float32, torch.float32, allocate=shared_bytes)
for turn in range(9):
    x, experts, weights = inputs(RANK, 3, 8, 2 * RANKS, 2, turn)
    pause = lambda place: time.sleep(0.1 * (turn % 3 == place and turn // 3 % RANKS == RANK))
    pause(0)
    rows, _, ends, places = op.expert_all_to_all_dispatch(x, experts, *permutation(experts, 2 * RANKS), memory)
    pause(1)
    y = rows * 2
    pause(2)
    out = op.expert_all_to_all_combine(y, weights, places, ends, memory)
    inside = (experts >= 0) & (experts < 2 * RANKS)
    expected = 2 * x * torch.where(inside, weights, 0).sum(1, keepdim=True)
    torch.testing.assert_close(out, expected)
"""
LESSON = """
import torch
import triton
import triton.language as tl
import expert_all_to_all as p

@triton.jit
def first_alone_kernel(counts_ptr, out_ptr, RANKS, E, LOCAL, BLOCK: tl.constexpr):
    rank, offs = tl.program_id(axis=0), tl.arange(0, BLOCK)
    counts = tl.load(counts_ptr + rank * LOCAL + offs, mask=offs < LOCAL, other=0)
    tl.store(out_ptr + rank, tl.sum(counts, axis=0))

@triton.jit
def own_kernel(scales_ptr, experts_ptr, places_ptr, table_ptr, N, k, LOCAL, BLOCK: tl.constexpr):
    choice = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    row = tl.load(places_ptr + choice, mask=choice < N, other=0)
    tl.store(ptr + row, tl.load(scales_ptr + choice // k, mask=choice < N), mask=choice < N)

assert p.judge_scale(p.scale_answer_kernel) == "right"
assert p.judge_load(p.load_answer_kernel) == "right"
assert p.judge_load(first_alone_kernel) == ("right" if p.RANKS == 1 else "wrong")
assert p.judge_scale(own_kernel) == "right" or p.RANKS > 1
assert p.judge_scale(None) == p.judge_load(None) == "not solved yet"
for turn in range(3):
    x, experts, weights = p.make_inputs(5 + p.RANK)
    expected, ends_expected, back = p.dispatch_torch(x, experts)
    got, ends, places = p.dispatch(x, experts)
    assert torch.equal(got[: len(expected)], expected)
    assert torch.equal(ends, ends_expected)
    p.returned.copy_(got)
    out = p.combine(experts, weights, places)
    torch.testing.assert_close(out, p.combine_torch(expected, weights, back))
assert p.late.item() == 0
pad = p.KEPT[1][p.RANK].view(torch.int32)
assert pad.data_ptr() == p.pads[p.RANK]
before = p.rows.clone(), pad.clone()
wrong = (x.half(), experts), (x, experts.long()), (x[:, 1:], experts), (x, experts[:, :1])
for given in (*wrong, (x.repeat(9, 1), experts.repeat(9, 1))):
    refused = False
    try:
        p.dispatch(*given)
    except AssertionError:
        refused = True
    assert refused
p.meet_ranks()  # and nothing was sent
assert torch.equal(before[0], p.rows) and torch.equal(before[1], pad)
p.meet_ranks()
if p.RANK == 0:
    p.TRIES = 100
    p.gpu_barrier()  # where no other rank comes
assert p.late.item() == (p.RANK == 0 and p.RANKS > 1)
p.meet_ranks()
if p.RANK == 0:  # again alone, with the most that other ranks' counts can be on its pad
    pad[p.RANKS :] = max(p.TOKENS) * p.k
    _, ends, places = p.dispatch(*p.make_inputs(8)[:2])
    assert 0 <= places.min() and places.max() < p.CAPACITY, places
    assert ends.max() == p.CAPACITY, ends
p.meet_ranks()
"""


def run(gallery: Path, folder: Path, ranks: int, checks: str | None) -> str:
    """Run checks of the op, or of the lesson that they import, or the lesson, in ranks without a GPU."""
    recipe = recipe_in(gallery / PATH)
    op = op_of(recipe)
    assert op
    (folder / "expert_all_to_all.py").write_text(recipe.text)
    (folder / "expert_all_to_all_op.py").write_text(op.of("ranks").code)
    script = folder / "checks.py" if checks else folder / "expert_all_to_all.py"
    if checks:
        given = inspect.getsource(permutation) if checks != LESSON else ""
        script.write_text(
            f"import torch\n\n{given}\n{checks}\n"
            f'print(f"checked {{{"p.RANK" if checks == LESSON else "RANK"}}}\\n", end="")\n'
        )
    paths = (str(SOURCES.parent), str(ROOT / "tests" / "ops"), *filter(None, sys.path))
    return run_ranks(script, ranks, variables={**WITHOUT_GPUS, "PYTHONPATH": os.pathsep.join(paths)})


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("checks", ["SIZES", "FULL", "LATE", "RACES"])
def test_ranks_float32(gallery: Path, tmp_path: Path, checks: str, ranks: int) -> None:
    """Rows arrive in order, results are summed, and what is lost is NaN, for any number of tokens on a rank."""
    said = run(gallery, tmp_path, ranks, BEGIN + globals()[checks])
    assert sorted(re.findall(r"checked (\d)", said)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_of_the_page(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """They agree with PyTorch's way, also at other sizes; a wrong kernel is called wrong."""
    said = run(gallery, tmp_path, ranks, LESSON)
    assert sorted(re.findall(r"checked (\d)", said)) == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_page(gallery: Path, tmp_path: Path, ranks: int) -> None:
    """A layer on several ranks is that on one."""
    said = run(gallery, tmp_path, ranks, None)
    assert f"{ranks} ranks compute what one GPU does" in said
    assert said.splitlines()[-4:] == ["not solved yet", "not solved yet", "right", "right"]


def made(taken: ModuleType, **changes: Any) -> Any:
    """Return memory for one rank."""
    sizes: dict[str, Any] = {"tokens": 4, "k": 2, "hidden": 16, "num_experts": 4}
    dtypes = {"dtype": torch.float32, "out_dtype": torch.float32}
    return taken.expert_all_to_all_memory(**{**sizes, **dtypes, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"dtype": torch.float64}, TypeError, r"does not take torch\.float64 and torch\.float32"),
        ({"out_dtype": torch.float8_e5m2}, TypeError, r"does not take torch\.float32 and torch\.float8_e5m2"),
        ({"tokens": 0}, ValueError, "takes tokens, k and hidden from 1 on"),
        ({"k": 0}, ValueError, "takes tokens, k and hidden from 1 on"),
        ({"groups": -1}, ValueError, "takes tokens, k and hidden from 1 on"),
        ({"hidden": 6}, ValueError, "takes rows of a multiple of 16 bytes, not 6 numbers of torch.float32"),
        ({"hidden": 8, "dtype": torch.float8_e5m2}, ValueError, "takes rows of a multiple of 16 bytes, not 8 numbers"),
        ({"num_experts": 0}, ValueError, "takes up to 1024 experts, as many on each of 1 ranks, not 0"),
        ({"num_experts": 1025}, ValueError, "takes up to 1024 experts"),
        ({"capacity": 0}, ValueError, r"takes a capacity from 1 to 2\*\*30 / 1, not 0"),
        ({"tokens": 2**30}, ValueError, r"takes a capacity from 1 to 2\*\*30 / 1"),
    ],
)
def test_memory_refuses_float32(taken: ModuleType, changes: dict[str, Any], error: type[Exception], match: str) -> None:
    """Sizes and dtypes that no kernel takes are named."""
    with pytest.raises(error, match=f"^expert_all_to_all_memory {match}"):
        made(taken, **changes)


X = {"x": torch.zeros(3, 16, device=DEVICE), "experts": torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)}
X |= {"inverse": torch.arange(6, device=DEVICE).int(), "offsets": torch.full((4,), 6, device=DEVICE).int()}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": X["x"].half()}, TypeError, r"takes rows of torch\.float32, not torch\.float16"),
        ({"x": X["x"][:, :8]}, ValueError, r"takes rows of \(tokens, 16\), not \(3, 8\)"),
        ({"x": X["x"].to("meta")}, ValueError, "takes tensors on one device"),
        ({"x": X["x"].clone().requires_grad_()}, ValueError, "has no gradient, which an argument requires"),
        ({"experts": X["experts"].short()}, TypeError, r"takes experts of int32 or int64, not torch\.int16"),
        ({"experts": X["experts"][:2]}, ValueError, r"takes experts of \(3, k\), not \(2, 2\)"),
        ({"experts": X["experts"].flatten()}, ValueError, r"takes experts of \(3, k\)"),
        ({"inverse": X["inverse"].long()}, ValueError, "takes inverse and offsets of moe_routing for 6 choices of 4"),
        ({"inverse": X["inverse"][:5]}, ValueError, "takes inverse and offsets of moe_routing"),
        ({"offsets": X["offsets"][:3]}, ValueError, "takes inverse and offsets of moe_routing"),
        ({"scales": X["x"][:, :1]}, ValueError, "takes scales where its memory has them"),
    ],
)
def test_dispatch_refuses_float32(
    taken: ModuleType, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Arguments that do not fit the memory or each other are named."""
    with pytest.raises(error, match=f"^expert_all_to_all_dispatch {match}"):
        taken.expert_all_to_all_dispatch(**{**X, **changes}, memory=made(taken))


@pytest.mark.parametrize("scales", [None, torch.zeros(3, 1), torch.zeros(3, 2).half(), torch.zeros(2, 2)])
def test_scales_refused_float32(taken: ModuleType, scales: torch.Tensor | None) -> None:
    """They are as the memory has them."""
    with pytest.raises(ValueError, match=r"^expert_all_to_all_dispatch takes scales"):
        taken.expert_all_to_all_dispatch(**X, scales=scales, memory=made(taken, groups=2))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"y": torch.zeros(8, 16, device=DEVICE).half()}, TypeError, r"takes rows of torch\.float32, not torch\.float"),
        ({"y": torch.zeros(7, 16, device=DEVICE)}, ValueError, "takes as many rows as its memory has, 8, not 7"),
        ({"y": torch.zeros(8, 8, device=DEVICE)}, ValueError, r"takes rows of \(tokens, 16\)"),
        ({"weights": torch.zeros(3, 2, device=DEVICE).long()}, TypeError, r"takes float weights, not torch\.int64"),
        ({"weights": torch.zeros(3, 1, device=DEVICE)}, ValueError, r"takes weights of \(3, 2\), not \(3, 1\)"),
        ({"weights": torch.zeros(3, 2, device="meta")}, ValueError, "takes tensors on one device"),
        ({"y": torch.zeros(8, 16, device=DEVICE).requires_grad_()}, ValueError, "has no gradient"),
    ],
)
def test_combine_refuses_float32(
    taken: ModuleType, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Arguments that do not fit the memory or each other are named."""
    memory = made(taken)
    rows, _, ends, places = taken.expert_all_to_all_dispatch(**X, memory=memory)
    given = {"y": rows.clone(), "weights": torch.zeros(3, 2, device=DEVICE), "places": places, "ends": ends}
    with pytest.raises(error, match=f"^expert_all_to_all_combine {match}"):
        taken.expert_all_to_all_combine(**{**given, **changes}, memory=memory)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_float32(taken: ModuleType, backend: str) -> None:
    """One graph serves all numbers of tokens; a backend that would copy the memory is told so."""
    memory = made(taken, tokens=64)

    def layer(x: torch.Tensor, experts: torch.Tensor, inverse: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows, _, ends, places = taken.expert_all_to_all_dispatch(2 * x, experts, inverse, offsets, memory)
        out: torch.Tensor = taken.expert_all_to_all_combine(rows * 3, experts.float() + 1, places, ends, memory)
        return out + 1

    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    optimized = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for T in (5, 7, 33, 64):
        draw = Draw(torch.float32)
        x, experts = draw(T, 16), draw(T, 2, dtype=torch.int32) % 4
        given = x, experts, *permutation(experts, 4)
        expected = layer(*given)
        memory.rows.fill_(7)
        if backend == "aot_eager":
            with pytest.raises(RuntimeError, match=r"^expert_all_to_all_dispatch takes the memory that"):
                optimized(*given)
        else:
            torch.testing.assert_close(optimized(*given), expected)
    assert counter.frame_count == 1


def code(recipe: ModuleType) -> list[str]:
    """Return the PTX of the kernels, of the op and of the page."""
    tables = {"addresses_ptr": "i64", "table_ptr": "i64", "pads_ptr": "i64"}
    integers = ("experts_ptr", "inverse_ptr", "bases_ptr", "places_ptr", "state_ptr", "offsets_ptr", "ends_ptr")
    tables |= dict.fromkeys((*integers, "late_ptr"), "i32")

    def ptx(kernel: Any, dtype: str, *multiples: str, **constants: Any) -> str:
        known = {name: kind for name, kind in tables.items() if name in kernel.arg_names}
        return str(compiled(kernel, dtype, multiples=multiples, **known, **constants).asm["ptx"])

    return [
        ptx(recipe._expert_all_to_all_plan_kernel, "i32", BLOCK_R=8, BLOCK_E=256, BLOCK_L=32),
        ptx(recipe._expert_all_to_all_send_kernel, "i32", VEC=4, BLOCK=1024),
        ptx(recipe._expert_all_to_all_copy_kernel, "i32", VEC=4, BLOCK=1024),
        ptx(recipe._expert_all_to_all_sum_kernel, "bf16", CHOICES=8, VEC=8, BLOCK=2048),
        ptx(recipe.send_kernel, "bf16", "H", BLOCK=2048),
    ]


def test_compiled_as_the_page_says(gallery: Path, on_h100: Ask) -> None:
    """Flags are set and seen by instructions that hold for all GPUs; a thread moves 16 bytes at once."""
    ((plan, send, copy, add, first),) = on_h100(gallery / PATH, code)
    found = set(re.findall(r"atom\.\S+", plan))
    assert found == {"atom.global.release.sys.cas.b32", "atom.global.acquire.sys.cas.b32"}
    for moves in (send, copy, add, first):
        assert "ld.global.v4" in moves
        assert "st.global.v4" in moves


def test_definitions_need_no_checks(gallery: Path) -> None:
    """What is left of the page without its checks can still be imported: mutants are."""
    assert "places_torch" in definitions((gallery / PATH).read_text())


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
MEETING = "        _expert_all_to_all_barrier_kernel[(1,)](*meeting, num_warps=1)\n"
BREAKS = [
    ("no barrier after the rows", f"{MEETING}    return ends", "    return ends"),
    ("no barrier before the sums", f"{MEETING}        if T", "        if T"),
    ("the rows of later ranks first", "tl.where(offs_r < rank, counts, 0)", "tl.where(offs_r > rank, counts, 0)"),
    ("rows past the capacity", "fits = there & (row < capacity)", "fits = there"),
    (
        "counts of the first rank's experts",
        "ptrs = own_ptr + RANKS + offs_r * E + e[None, :]",
        "ptrs = own_ptr + RANKS + offs_r * E + offs_l[None, :]",
    ),
    ("a lost row as zero", 'lost = tl.where(place == -1, 0.0, float("nan"))', "lost = 0.0"),
    (
        "results of the first rank",
        "tl.load(addresses_ptr + first + peer).to(out",
        "tl.load(addresses_ptr + first).to(out",
    ),
    ("a choice below zero", "there = (e >= 0) & (e < E)\n        e = tl.where", "there = e < E\n        e = tl.where"),
]
