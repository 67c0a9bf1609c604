"""The op of the recipe Top-k, with every plan of its launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, accumulator, check
from compiled import Ask, ptx, stack
from inputs import DEVICE, FLOATS
from largest import EDGES, OF_ALL, assert_copied, largest, refused, rows, shapes, special

LONGEST = 8192


# Columns of one element and of more, sorted once, twice and three times; more rows than a program has, and fewer
SIZES = [((5, 300), 5, "ties"), ((9, 77), 3, "any"), ((4, 501), 6, "equal"), ((3, 1000), 8, "falling")]
SIZES += [((1, LONGEST - 5), 20, "ties"), ((2, 2, 130), 9, "rising"), ((1, 300), 128, "any"), ((), 1, "any"), *EDGES]
SIZES += [((1, LONGEST), 3, "any"), ((4, 501), 6, "rising"), *(((1, 300), k, "any") for k in (1, 2, 33))]
SIZES += [((9, 3000), 128, "ties"), ((2, LONGEST), 64, "any")]


def with_softmax(draw: Draw, *size: Any) -> tuple[Any, ...]:
    """Make rows of some kind, and ask for the softmax of the largest."""
    return *rows(draw, *size), True


def softmax_of_largest(x: torch.Tensor, k: int, apply_softmax: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax of the k largest, and their indices."""
    values, indices = largest(x, k)
    return values.softmax(-1), indices


def exact_softmax(*arguments: Any) -> list[Exact]:
    """Return weights and indices."""
    weights, indices = softmax_of_largest(*arguments)
    return [Exact(weights, made_by_torch=True), Exact(indices, dtype=torch.int64)]


def softmax_gradient(grad: torch.Tensor, *arguments: Any) -> list[Exact]:
    """Return the gradient of rows: weights are rounded before."""
    weights, indices = softmax_of_largest(*arguments)
    value, terms = (
        weights * combine(grad, (grad * weights).sum(-1, keepdim=True))
        for combine, grad in ((torch.sub, grad), (torch.add, grad.abs()))
    )
    value, terms = (torch.zeros_like(arguments[0]).scatter(-1, indices, t) for t in (value, terms))
    return [Exact(value, terms, narrow=terms)]


CONTRACT = [
    Case(
        "topk",
        sizes=SIZES,
        many=((3001, 4093), 8, "ties"),
        shapes=shapes(128, 700),
        refused=refused("topk", LONGEST, "8192 elements, not 8193; topk_long takes longer ones"),
        **OF_ALL,
    ),
    Case(
        "topk",
        name="topk, softmax",
        sizes=SIZES,
        many=((3001, 4093), 8, "ties"),
        shapes=shapes(128, 700),
        floor=lambda dtype: torch.finfo(accumulator(dtype)).tiny,  # a GPU may flush what is smaller
        **OF_ALL
        | {
            "arguments": with_softmax,
            "exact": exact_softmax,
            "reference": softmax_of_largest,
            "special": lambda draw: [(*arguments, True) for arguments in special(draw)],
            "gradients": softmax_gradient,
        },
    ),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_are_elements(taken: ModuleType, dtype: torch.dtype) -> None:
    """They are copied, to the bit."""
    assert_copied(taken.topk, dtype)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_columns_with_the_largest_in_one(taken: ModuleType, dtype: torch.dtype) -> None:
    """All that is asked for may be in one column, in one part of it, or in the row's last elements."""
    for N in (1000, 4096, 5000):
        SETS = taken._topk_plan(N, 8)["SETS"]
        x = torch.zeros(3, N, dtype=dtype, device=DEVICE)
        x[0, 3::SETS] = 1
        x[1, 3 : 3 + 4 * SETS : SETS] = 2
        x[2, -8:] = torch.arange(8, device=DEVICE).to(dtype)
        check(CONTRACT[0], taken, dtype, (x, 8))


def test_plan(taken: ModuleType) -> None:
    """Columns cover a row, and there are as many as are asked for; a warp has registers for them."""
    for N, K in itertools.product((1, 5, 64, 100, 256, 1000, 4096, LONGEST), (2, 8, 32, 128)):
        plan = taken._topk_plan(N, K)
        SETS, LENGTH, PART = plan["SETS"], plan["LENGTH"], plan["PART"]
        assert max(N, K) <= SETS * LENGTH
        assert 2 * max(N, K) > SETS * LENGTH
        assert SETS >= K
        assert PART < LENGTH or PART == LENGTH == 1
        assert LENGTH <= 64
        assert plan["BLOCK_M"] == 1 or plan["BLOCK_M"] * SETS <= 128
        assert plan["BLOCK_M"] == 1 or plan["BLOCK_M"] * SETS * LENGTH <= 4096
    assert [taken._topk_plan(4096, 8)[name] for name in ("SETS", "LENGTH", "PART")] == [64, 64, 8]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (64, 300):
        x = torch.randn(9, N, generator=torch.Generator().manual_seed(N)).to(recipe.DEVICE)
        expected = torch.topk(x, 5)
        for step in recipe.STEPS.values():
            _, (values, indices) = step(x, 5)
            assert torch.equal(values, expected.values)
            assert torch.equal(indices, expected.indices)


@pytest.mark.needs_gpu_memory(8)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last elements of the last row are found."""
    x = torch.zeros(2**18 + 1, 2**13, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -2], x[-1, 5], x[-1, -1] = 3, 2, 1
    values, indices = taken.topk(x, 3)
    assert values[-1].tolist() == [3, 2, 1]
    assert indices[-1].tolist() == [2**13 - 2, 5, 2**13 - 1]
    assert (indices[:-1] == torch.arange(3, device=x.device)).all()


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for plans of all kinds."""
    results = {}
    for dtype, N, K in (("fp32", 4096, 8), ("fp32", 1000, 8), ("bf16", 8192, 8), ("bf16", 256, 64)):
        plan = taken._topk_plan(N, K)
        results[f"{dtype} {N}"] = stack(taken._topk_kernel, dtype=dtype, indices_ptr="i64", **plan)
    return results


def widths(taken: ModuleType) -> set[str]:
    """Return how a thread loads elements of its columns."""
    text = ptx(taken._topk_kernel, "fp32", multiples=("N", "stride_xm"), indices_ptr="i64", **taken._topk_plan(4096, 8))
    return set(re.findall(r"ld\.global\.v\d", text))


@pytest.mark.thorough
def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Nothing is spilled, and a thread loads its two columns at once."""
    spilled, loads = on_h100(gallery / "fusion" / "topk.py", spills, widths)
    assert not any(spilled.values())
    assert loads == {"ld.global.v2"}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/topk")
    plain, read, error, *more, long, many, integers, wrong, right = out.splitlines()
    assert plain == "[[9.0, 6.0, 5.0]] [[5, 7, 4]]"
    assert read.startswith("x is read 3 times")
    assert error == "largest error 0.0, allowed 0.0"
    assert more[-1] == "4096: 4096, 192"
    assert long.startswith("ValueError: topk takes rows of up to 8192 elements")
    assert many.endswith("not 129")
    assert integers == "TypeError: topk takes a float tensor, not torch.int32"
    assert wrong == "by bits  [nan, 1.0, nan, -3.0, -2.0, -0.5]"
    assert right == "by topk  [nan, nan, 1.0, -0.5, -2.0, -3.0]"


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("columns without a mask", "mask=offs < N, other=-float", "mask=offs < N + STEP, other=-float"),
    ("padding that wins", "    words = tl.where(first < N, words, LOWEST)\n", ""),
    ("a maximum's last occurrence", "larger = (~(wide <= top))", "larger = (~(wide < top))"),
    ("NaN behind NaN", "(~(wide <= top)) & (top == top)", "~(wide <= top)"),
    ("NaN that a column leaves out", "(~(wide <= top)) & (top == top)", "wide > top"),
    ("negative floats in reverse", "    key = tl.where(bits < 0, bits ^ TOP, bits)", "    key = bits"),
    ("two zeros", "    key = tl.where(wide == 0, 0, key)\n", ""),
    ("NaN by its bits", "return tl.where(wide == wide, key, TOP)", "return key"),
    ("the higher index first", "(key << BITS) | (LAST - index)", "(key << BITS) | (LAST - (index ^ 1))"),
    ("columns of neighbours", "first = index % SETS + index // GROUP * GROUP", "first = index // LENGTH * LENGTH"),
    ("parts that all begin at the first", "(SETS * PART)\n", "0\n"),
    (
        "indices stored without a mask",
        "index.to(tl.int64), mask=mask)\n\n\n@triton.jit\ndef _topk_p",
        "index.to(tl.int64))\n\n\n@triton.jit\ndef _topk_p",
    ),
    ("the softmax has padding", 'tl.where(mask, values.to(tl.float32), -float("inf"))', "values.to(tl.float32)"),
    ("the softmax overflows", "tl.exp(wide - tl.max(wide, axis=1, keep_dims=True))", "tl.exp(wide)"),
    ("rows behind the last", "    offs_m = tl.minimum(offs_m, M - 1)\n", ""),
    ("rows taken for adjacent", "offs_m * stride_xm", "offs_m * N"),
]
