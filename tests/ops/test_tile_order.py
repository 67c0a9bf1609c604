"""The recipe Tile order and stages: its kernel in every order, its model of the cache, and what it reads in code."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts, sizes
from tolerance import assert_within


@settings(max_examples=12)
@given(
    M=sizes(16, 90),
    K=sizes(16, 40),
    N=sizes(32, 90),
    of_a=layouts(),
    of_b=layouts(),
    GROUP_M=st.sampled_from([1, 2, 8]),
)
def test_accumulator(recipe: ModuleType, M: int, K: int, N: int, of_a: Layout, of_b: Layout, GROUP_M: int) -> None:
    """In every order the kernel multiplies matrices of any size and layout, and nothing else is read or stored."""
    a, b = of_a.make((M, K), torch.float16, DEVICE), of_b.make((K, N), torch.float16, DEVICE)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return recipe.matmul_in_order(a, b, GROUP_M=GROUP_M, tile=(16, 32, 16), warps=4)

    out = guarded(multiply, a, b)
    a, b = a.double(), b.double()
    assert_within(out, a @ b, a.abs() @ b.abs(), roundings=K + 2)


def in_python(function: Any) -> Callable[..., tuple[int, int]]:
    """Return a jitted function of integers as one of Python's."""
    language = SimpleNamespace(cdiv=lambda n, d: -(-n // d), minimum=min)
    return FunctionType(function.fn.__code__, {"tl": language})


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (8, 3), (3, 20), (64, 32)])
def test_order(recipe: ModuleType, rows: int, columns: int) -> None:
    """Every tile is taken once, in the order that the page draws, whoever computes it."""
    for GROUP_M in (1, 2, 3, 8, 32):
        order = recipe.in_order(rows, columns, GROUP_M).tolist()
        assert sorted(order) == [[m, n] for m in range(rows) for n in range(columns)]
        sizes_ = 16 * rows - 3, 32 * columns - 5, 16, 32, GROUP_M
        assert [[*in_python(recipe.tile_of)(pid, *sizes_)] for pid in range(rows * columns)] == order
    assert recipe.in_order(rows, columns, 1).tolist() == [[m, n] for m in range(rows) for n in range(columns)]
    assert recipe.in_order(rows, columns, rows)[:rows].tolist() == [[m, 0] for m in range(rows)]


def test_simulation(recipe: ModuleType) -> None:
    """A cache that holds all fetches each strip once; one that holds nothing, every tile of every step."""
    tiles = recipe.in_order(8, 4, 3)
    strips = 2 * recipe.SIZE * (8 * recipe.TILE_M + 4 * recipe.TILE_N)
    assert recipe.simulate(tiles, 2**40) == strips
    assert recipe.simulate(tiles, 0) == 2 * recipe.SIZE * 32 * (recipe.TILE_M + recipe.TILE_N)
    assert strips < recipe.simulate(recipe.in_order(64, 32, 1), 50 * 2**20)


def test_places(recipe: ModuleType) -> None:
    """Registers, shared memory or warps limit how many programs a multiprocessor holds."""
    assert recipe.at_a_time({"REG": 255, "shared": 8192}, warps=8) == 1
    assert recipe.at_a_time({"REG": 128, "shared": 8192}, warps=8) == 2
    assert recipe.at_a_time({"REG": 32, "shared": 75 * 1024}, warps=4) == 3
    assert recipe.at_a_time({"REG": 16, "shared": 0}, warps=16) == 4


def test_answer(recipe: ModuleType) -> None:
    """Tiles of 128 x 128 x 64 fit on an L4 with four stages."""
    blocks = recipe.BLOCKS | {"BLOCK_N": 128}
    jobs = {stages: recipe.job(gpu=89, blocks=blocks, stages=stages) for stages in (4, 5)}
    made = recipe.compile_all(jobs, recipe.tile_of, recipe.matmul_kernel)
    assert [metadata["shared"] <= recipe.FITS[89] * 1024 for metadata in made.values()] == [True, False]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("matmul/tile_order")
    lines = [line.split() for line in out.splitlines()]
    strips = [
        tuple(map(int, line[:3])) for line in lines if len(line) == 7 and line[0] in {"1", "2", "4", "8", "16", "32"}
    ]
    assert [(height, width) for _, height, width in strips] == [(5, 32), (6, 32), (8, 32), (8, 17), (16, 9), (32, 5)]
    stages = [line for line in lines if line and line[0].startswith("sm_")]
    assert [line[4] for line in stages] == ["48", "96", "144", "192", "240", "48", "48", "96", "144", "192"]
    assert [line[5] for line in stages] == ["yes"] * 4 + ["no"] + ["yes"] * 3 + ["no"] * 2
    loop = [line[1:] for line in lines if line[:1] == ["loop"]]
    assert [" ".join(step[:2]) for step in loop] == ["wait for", "multiply 128x256", "wait for", *2 * ["copy, does"]]
    assert "copies behind the loop: 0" in out
    issue, multiply = (int(line[-1]) for line in lines if line[:1] == ["cycles"])
    assert issue < multiply


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a last group as high as any", "height = tl.minimum(tiles_m - first_m, GROUP_M)", "height = GROUP_M"),
    ("stored without a mask", "acc.to(tl.float16), mask=in_m & in_n)", "acc.to(tl.float16))"),
    ("stored with a mask of rows alone", "acc.to(tl.float16), mask=in_m & in_n)", "acc.to(tl.float16), mask=in_m)"),
    ("loads of A past K", "mask=in_m & in_k[None, :]", "mask=in_m"),
    ("loads of B past K", "mask=in_k[:, None] & in_n", "mask=in_n"),
    ("a sum of the last step alone", "acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b)"),
    ("rows of A taken for those of a contiguous one", "offs_m[:, None] * stride_am", "offs_m[:, None] * K"),
]
