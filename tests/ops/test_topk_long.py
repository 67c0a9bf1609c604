"""The op of the recipe Top-k of long rows, with parts of several lengths."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from case import Case, Draw, check
from inputs import DEVICE, FLOATS
from largest import EDGES, OF_ALL, assert_copied, refused, rows, shapes


def cut(part: int, programs: int, merge: int) -> dict[str, int]:
    """Return what rows are shared by: elements worth a program, programs that fill a GPU, words that one merges."""
    return {"TOPK_LONG_PART": part, "TOPK_LONG_PROGRAMS": programs, "TOPK_LONG_MERGE": merge}


# Rows as the launcher plans them: one part and several, of which the last has fewer elements than are asked for
SIZES = [((5, 300), 5, "ties"), ((9, 77), 3, "any"), ((1, 4099), 8, "rising"), ((2, 2, 130), 9, "falling")]
SIZES += [((2, 501), 6, "equal"), ((1, 4500), 128, "any"), ((1, 9001), 20, "ties"), ((), 1, "any"), *EDGES]
SIZES += [((2, 501), 6, "rising"), ((1, 50_257), 64, "ties"), *(((1, 300), k, "any") for k in (1, 33, 128))]
# Short rows in parts, the words of which are merged at once, or few at a time and then again
PARTS = [((2, 300), 5, "ties"), ((3, 77), 3, "any"), ((2, 259), 6, "rising"), ((2, 259), 6, "falling")]
PARTS += [((2, 259), 6, "equal"), ((1, 300), 1, "any"), ((2, 2, 130), 9, "any"), ((7, 33), 7, "any"), *EDGES]
CONTRACT = [
    Case(
        "topk_long",
        sizes=SIZES,
        many=((2003, 9001), 8, "ties"),
        shapes=shapes(64, 300),
        refused=refused("topk_long", 2**30, r"2\*\*30 elements"),
        **OF_ALL,
    ),
    Case(
        "topk_long",
        name="topk_long in parts",
        sizes=PARTS,
        in_layouts=((2, 133), 5, "ties"),
        many=((31, 4999), 8, "ties"),
        shapes=shapes(64, 150),
        settings=cut(32, 2**20, 64),
        **OF_ALL,
    ),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_are_elements(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied, to the bit, from one part and from several."""
    for case in CONTRACT:
        for name, value in case.settings.items():
            monkeypatch.setattr(taken, name, value)
        assert_copied(taken.topk_long, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_longest_parts(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest parts, which the launcher makes of many rows: in half precision an index has 15 bits."""
    monkeypatch.setattr(taken, "TOPK_LONG_PART", taken.TOPK_LONG_WIDE)
    check(CONTRACT[0], taken, dtype, rows(Draw(dtype), (1, 70_001), 8, "ties"))


def test_plan(taken: ModuleType) -> None:
    """A part has columns for all that is asked for, and an index within it has room in a word."""
    for M, N, K in itertools.product((1, 60, 20_000), (1, 5, 1000, 8193, 50_257, 201_088, 2**30), (2, 8, 128)):
        for size in (2, 4):
            plan = taken._topk_long_plan(M, N, K, size)
            part = plan["SETS"] * plan["LENGTH"]
            assert plan["SETS"] >= K
            assert part <= (2**14 if size == 2 else 2**16)
            assert part >= min(N, 4096)
            assert plan["SHARE"] < plan["LENGTH"] or plan["SHARE"] == plan["LENGTH"] == 1


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(recipe.DEVICE)
    expected = torch.topk(x, 5)
    steps = [*recipe.STEPS.values(), lambda x, k: recipe.sort_parts(x, k, PART=64)]
    steps += [lambda x, k: recipe.with_parts(x, k, 64)]
    for step in steps:
        values, indices = step(x, 5)
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)


@pytest.mark.needs_gpu_memory(8)
@pytest.mark.parametrize(("M", "N"), [(2**17 + 1, 2**14), (3, 2**30 - 8)])
def test_beyond_int32(taken: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last elements of the last row are found."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -2], x[-1, 5], x[-1, -1] = 3, 2, 1
    values, indices = taken.topk_long(x, 3)
    assert values[-1].tolist() == [3, 2, 1]
    assert indices[-1].tolist() == [N - 2, 5, N - 1]
    assert (indices[:-1] == torch.arange(3, device=x.device)).all()


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    read, error, many, long, integers, wrong, right = printed("fusion/topk_long").splitlines()
    assert read == "60,120 numbers are read; x has 60,000"
    assert error == "largest error 0.0, allowed 0.0"
    assert all(line.startswith("ValueError: topk_long takes k from 0 to the row's length") for line in (many, long))
    assert integers == "TypeError: topk_long takes a float tensor, not torch.int32"
    assert wrong == "2 of each part [[15.0, 14.0, 11.0, 10.0]]"
    assert right == "topk_long      [[15.0, 14.0, 13.0, 12.0]]"


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a part that reads the next one", "count = tl.minimum(N - start, SETS * LENGTH)", "count = N - start + 1"),
    ("a maximum's last occurrence", "larger = (~(wide <= top))", "larger = (~(wide < top))"),
    ("NaN that a column leaves out", "(~(wide <= top)) & (top == top)", "wide > top"),
    ("negative floats in reverse", "    key = tl.where(bits < 0, bits ^ TOP, bits)", "    key = bits"),
    ("two zeros", "    key = tl.where(wide == 0, 0, key)\n", ""),
    ("NaN by its bits", "return tl.where(wide == wide, key, TOP)", "return key"),
    ("columns of neighbours", "first = index % SETS + index // GROUP * GROUP", "first = index // LENGTH * LENGTH"),
    ("shares that all begin at the first", "(SETS * SHARE)\n", "0\n"),
    ("indices within the part", "(2**31 - 1 - (start + index))", "(2**31 - 1 - index)"),
    ("words of other rows", "words_row + offs, mask=offs < count, other=-(2**63)", "words_row + offs"),
    ("indices stored without a mask", "index.to(tl.int64), mask=mask)", "index.to(tl.int64))"),
]
