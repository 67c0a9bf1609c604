"""The op of the recipe Cumulative sum of a few long rows and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import TRITON, Ask, ptx
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes

# The launcher's decisions: bytes of a tile at most, programs that a GPU should have, tiles of a group.
USUAL = (16 * 1024, 512, 128)
GROUPS = (1024, 1, 4)


def cut(tile: int, places: int, group: int) -> dict[str, int]:
    """Return what the launcher decides by."""
    return {"CUMSUM_LONG_TILE": tile, "CUMSUM_LONG_PLACES": places, "CUMSUM_LONG_GROUP": group}


@contextmanager
def planned(taken: ModuleType, plan: tuple[int, ...]) -> Iterator[None]:
    """Have the launcher decide by other numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cut(*plan).items():
            patch.setattr(taken, name, value)
        yield


def reverse(x: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row."""
    return torch.cumsum(x.flip(-1), -1).flip(-1) if x.ndim else x


SCAN = {"cumsum_long": lambda x: torch.cumsum(x, -1), "cumsum_long_backward": reverse}


def of_rows(draw: Draw, shape: tuple[int, ...], gap: int) -> tuple[torch.Tensor]:
    """Make rows with so many elements between them."""
    return (draw(*shape[:-1], gap + shape[-1])[..., gap:],) if gap else (draw(*shape),)


def exact(name: str, x: torch.Tensor) -> list[Exact]:
    """Return the sums in a direction, from the CPU: on a GPU, PyTorch's may be in another order each time."""
    right, terms = (SCAN[name](t.cpu()).to(x.device) for t in (x, x.abs()))
    return [Exact(right, terms)]


def roundings(tile: int, out: torch.Tensor) -> int:
    """Return how many additions of a tile of so many bytes come one behind another."""
    N, most = out.shape[-1:].numel(), tile // 4
    if out.dtype == torch.float64:  # in which the carry rounds, too, and so does the reference
        return 48 + N
    # NumPy, in the interpreter, makes no tree of them. On a GPU a thread adds vectors, a warp its threads, and then
    # come the parts of a tile, 32 elements or more.
    return 16 + (most // 32 if DEVICE.type == "cuda" else min(N, most))


def special(draw: Draw) -> list[tuple[torch.Tensor]]:
    """Make rows with NaN and infinities, one with the bits of a word that nobody has written, and zeros with a sign."""
    N = 3000
    x = torch.zeros(9, N, dtype=draw.dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 1500], x[3, 7], x[3, 2900] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    x[4, :], x[5, ::2], x[6, 0], x[6, 2000] = torch.nan, torch.inf, torch.inf, torch.nan
    x[7] = torch.full((), -1, dtype=torch.int64).view(torch.float64)
    x[8, ::7] = -0.0
    return [(x,), (x[:, :5],), (x[:, 1024:2900],)]


def shapes(block: int, most: int) -> st.SearchStrategy[tuple[tuple[int, ...], int]]:
    """Rows of up to so many elements, with gaps or without."""
    lead = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
    return st.tuples(st.tuples(lead, sizes(block, most)).map(lambda drawn: (*drawn[0], drawn[1])), st.integers(0, 9))


def refused(name: str) -> list[Refused]:
    """Return the calls of an op that raise."""
    return [
        *(
            Refused(lambda draw, dtype=dtype: (draw(2, 3).to(dtype),), TypeError, f"{name} takes floating .*{dtype}")
            for dtype in (torch.int32, torch.bool, torch.complex64)
        ),
        Refused(
            lambda draw: (draw().expand(2**30 + 1),),
            ValueError,
            f"{name} takes rows of up to {2**30} elements, not {2**30 + 1}",
        ),
    ]


# One tile and several, of which vectors divide a row and the distance between rows, or not
SIZES = [((2, 5000), 0), ((3, 1001), 7), ((2, 2, 1025), 3), ((), 0), ((3, 0), 0), ((5, 3), 0), ((2, 2050), 2)]
SIZES += [((0, 7), 0), ((3, 1000), 8)]
SIZES += [((2, N), 8) for N in (*(4**k for k in range(9)), 3, 100, 1023, 1025, 3000, 8191, 8193, 20_001, 140_001)]
# Several groups of tiles
CHAINS = [((2, 2600), 0), ((3, 1001), 7), ((2, 2, 1025), 3), ((), 0), ((5, 257), 0), ((2, 2052), 4), ((1, 1), 0)]
WHOLE = [
    Case(
        name,
        of_rows,
        partial(exact, name),
        autocast=torch.float32 if name == "cumsum_long" else None,
        sizes=SIZES,
        small=((2, 5), 0),
        in_layouts=((3, 301), 0),
        many=((131, 100_003), 0),
        # Of equal elements the roundings add up: here to no more than a gradient may be off by.
        shapes=shapes(64, 700),
        roundings=partial(roundings, USUAL[0]),
        floor=lambda dtype: torch.finfo(dtype).tiny,
        reference=SCAN[name],
        special=special,
        gradients=lambda grad, _, other=other: exact(other, grad),
        second_gradients=True,
        refused=refused(name),
    )
    for name, other in (("cumsum_long", "cumsum_long_backward"), ("cumsum_long_backward", "cumsum_long"))
]
CONTRACT = [
    *WHOLE,
    *(
        replace(
            case,
            name=f"{case.call} in groups",
            sizes=CHAINS,
            many=((31, 50_003), 0),
            shapes=shapes(256, 2500),
            roundings=partial(roundings, GROUPS[0]),
            settings=cut(*GROUPS),
            refused=(),
        )
        for case in WHOLE
    ),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("plan", [USUAL, GROUPS], ids=["usual", "groups"])
def test_exact(taken: ModuleType, dtype: torch.dtype, plan: tuple[int, ...]) -> None:
    """Small integers leave nothing to rounding: every sum is exact."""
    for N in (8, 40, 1024, 1025, 2050, 5000):
        x = torch.randint(-2, 3, (3, N + 8), device=DEVICE).to(dtype)[:, 8:]
        x = x * (torch.arange(N, device=DEVICE) % 8 == 3)  # half precision has integers up to 256
        with planned(taken, plan):
            for name in SCAN:
                expected = SCAN[name](x.double())
                assert expected.abs().max() <= 256
                assert torch.equal(getattr(taken, name)(x).double(), expected)


def test_plans(taken: ModuleType) -> None:
    """A tile is smaller where programs would be few, and never larger than a short row needs."""
    for shape, tile in (
        ((1, 2**24), 4096),
        ((1024, 2**14), 4096),
        ((1, 2**20), 2048),
        ((1, 2**16), 1024),
        ((4, 60), 64),
        ((10**6, 1), 1),
    ):
        for dtype in FLOATS:
            x = torch.empty(shape, dtype=dtype, device="meta")
            plan = taken._cumsum_long_plan(x, shape[1], False)
            assert plan["BLOCK_N"] == min(tile, 2048 if dtype == torch.float64 else 4096)
            assert shape[1] % plan["VEC"] == 0
            assert plan["VEC"] * dtype.itemsize <= 16
    x = torch.empty(1, 1000, dtype=torch.bfloat16, device="meta")
    assert [taken._cumsum_long_plan(x, stride, True)["VEC"] for stride in (1000, 1004, 1001)] == [8, 4, 1]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    # Triton 3.6 alone does not compile the look-back for one tile.
    one_tile = [] if (DEVICE.type, TRITON) == ("cuda", (3, 6)) else [5]
    for N in (*one_tile, 1000, 4500):
        x = torch.randn(3, N, generator=torch.Generator().manual_seed(N)).to(DEVICE)
        for step in recipe.STEPS.values():
            torch.testing.assert_close(step(x, BLOCK_N=256), x.cumsum(-1), rtol=1e-4, atol=1e-4)
        out = recipe.look_back(x, BLOCK_N=128, WINDOW=4)
        torch.testing.assert_close(out, x.cumsum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Adding up ones does not stand still at the 2048 or 256 where half precision does."""
    x = torch.ones(2, 9000, dtype=dtype, device=DEVICE)
    counts = torch.arange(1, 9001, device=DEVICE).double()
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(taken.cumsum_long(x)[1].double(), counts, rtol=rtol, atol=0)
    torch.testing.assert_close(taken.cumsum_long_backward(x)[1].double(), counts.flip(0), rtol=rtol, atol=0)


@pytest.mark.parametrize("plan", [USUAL, (4096, 1, 16)], ids=["usual", "small"])
def test_carry_accumulator(taken: ModuleType, plan: tuple[int, ...]) -> None:
    """The error does not grow along a row: float32 sums of a large number and ones, far behind the large number."""
    x = torch.zeros(200, 1024, device=DEVICE)
    x[0, 0], x[1:, 5] = 2**26, 1  # which float32 cannot add one by one
    with planned(taken, plan):
        out = taken.cumsum_long(x.view(1, -1)).view(200, 1024)[:, -1]
    torch.testing.assert_close(out.double(), 2**26 + torch.arange(200, device=x.device).double(), rtol=2**-22, atol=0)


@pytest.mark.needs_gpu_memory(11)
@pytest.mark.parametrize(
    ("rows", "N"),
    [(2**17 + 1, 2**14), (33, 2**26), pytest.param(3, 2**30 - 8, marks=pytest.mark.needs_gpu_memory(30))],
)
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, with many rows and with few."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, :: N // 128] = 1
    for name, expected in SCAN.items():
        out = getattr(taken, name)(x)
        assert torch.equal(out[-1], expected(x[-1].float()).bfloat16())
        assert not out[:-1].any()
        del out
    view = x[:, : N // 2 - 3]
    assert torch.equal(taken.cumsum_long(view)[-1], torch.cumsum(view[-1].float(), -1).bfloat16())


@pytest.mark.needs_gpu_memory(8)
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_same_bits(taken: ModuleType, rows: int) -> None:
    """However the programs come to run, the bits are the same; and right, when many are under way."""
    x = torch.randn(rows, 2**26 // rows, device=DEVICE)
    for case in WHOLE:
        op = getattr(taken, case.call)
        first = op(x)
        assert_close(case, x.dtype, first, *case.exact(x.double()))
        for _ in range(20):
            assert torch.equal(op(x), first)


def facts(text: str) -> dict[str, Any]:
    """Return what is looked for in PTX."""
    return {
        "wide": set(re.findall(r"(?:ld|st)\.global\.(?:v4\.b32|b32)", text)),
        "shuffles": text.count("shfl.sync"),
        "barriers": text.count("bar.sync"),
        "atomics": set(re.findall(r"atom\.global\.gpu\.relaxed\.(\w+)", text)),
        "volatile": "ld.volatile.global" in text,
    }


def both_ways(taken: ModuleType) -> list[dict[str, Any]]:
    """Return the facts of the op's kernel, forward and backward."""
    tiles = {"ACC": taken.tl.float32, "VEC": 4, "GROUP": 128, "BLOCK_N": 4096, "num_warps": 4, "words_ptr": "i64"}
    return [facts(ptx(taken._cumsum_long_kernel, "fp32", REVERSE=way, **tiles)) for way in (False, True)]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Backwards costs nothing, loads are wide, and words are read each time."""
    ((forward, backward),) = on_h100(gallery / "fusion" / "cumsum_long.py", both_ways)
    assert forward == backward
    assert forward["wide"] == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert forward["atomics"] == {"add", "exch"}
    assert forward["volatile"]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/cumsum_long")
    moved, two, error, integers, long, in_order, others = out.splitlines()
    assert "5.0 times" in moved
    assert two.endswith(": 2.0")
    assert re.fullmatch(r"largest relative error \d\.\de-0\d, allowed 6\.0e-05", error)
    assert integers.startswith("TypeError: cumsum_long takes floating dtypes")
    assert long.startswith("ValueError: cumsum_long takes rows of up to")
    assert in_order.endswith("{'numbers': True, 'tickets': True}")
    assert others.endswith("{'numbers': False, 'tickets': True}")


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("tiles stored without a mask", "y + carry.to(ACC), mask=mask)", "y + carry.to(ACC))"),
    ("rows taken for adjacent", "x_ptr + row * stride_xm", "x_ptr + row * N"),
    (
        "a group that closes with its own sum",
        "_cumsum_long_publish(word_ptr, carry + total)",
        "_cumsum_long_publish(word_ptr, total)",
    ),
    (
        "a group that leaves out the one before",
        "tile // GROUP * GROUP - 1 + tl.arange(0, GROUP)",
        "tile // GROUP * GROUP + tl.arange(0, GROUP)",
    ),
    (
        "a carry from the row before",
        "needed = (before >= 0) & (before < tile)",
        "needed = (before >= -1) & (before < tile) & (row * tiles + before >= 0)",
    ),
    (
        "a carry rounded to float32",
        "carry = tl.sum(sums, axis=0)",
        "carry = tl.sum(sums.to(tl.float32), axis=0).to(tl.float64)",
    ),
    ("vectors that are not turned", "        x = _cumsum_long_turn(x, VEC)\n", "        x += 0\n"),
    ("sums that are not turned back", "        y = _cumsum_long_turn(y, VEC)\n", "        y += 0\n"),
    ("vectors across rows", '"VEC": math.gcd(N, stride, 16 // x', '"VEC": math.gcd(stride, 16 // x'),
]
