"""The lesson Why is my matmul slower than cuBLAS?: its kernel in every order, and its count of what a wave reads."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, sizes
from tolerance import assert_within


@settings(max_examples=12)
@given(M=sizes(16, 90), K=sizes(16, 40), N=sizes(32, 90), GROUP=st.sampled_from([1, 2, 8]))
def test_accumulator(recipe: ModuleType, M: int, K: int, N: int, GROUP: int) -> None:
    """In every order the kernel multiplies matrices of any size, and nothing else is read or stored."""
    a, b = (Layout("contiguous", k).make(shape, torch.float16, DEVICE) for k, shape in enumerate([(M, K), (K, N)]))

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return recipe.ordered_matmul(a, b, GROUP, blocks=(16, 32, 16), num_warps=4)

    out = guarded(multiply, a, b)
    a, b = a.double(), b.double()
    assert_within(out, a @ b, a.abs() @ b.abs(), roundings=K + 2)


def test_accumulator_of_a_row_beside_nan(recipe: ModuleType) -> None:
    """A row of NaN stays in its row: what a row reads past its end is masked."""
    a, b = (torch.ones(shape, dtype=torch.float16, device=DEVICE) for shape in ((5, 20), (20, 7)))
    a[2] = torch.nan
    expected = torch.full((5, 7), 20.0, dtype=torch.float16, device=DEVICE)
    expected[2] = torch.nan
    out = recipe.ordered_matmul(a, b, blocks=(16, 16, 16), num_warps=4)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (3, 8)])
@pytest.mark.parametrize("GROUP", [1, 2, 3, 8])
def test_order_of_the_kernel(recipe: ModuleType, rows: int, columns: int, GROUP: int) -> None:
    """The first programs of the kernel store the tiles that the page counts, and no others."""
    tiles = rows * columns
    order = [recipe.tile_of(pid, rows, columns, GROUP) for pid in range(tiles)]
    assert sorted(order) == [(m, n) for m in range(rows) for n in range(columns)]
    M, N, K = 16 * rows - 3, 16 * columns - 5, 16
    a, b = (torch.ones(shape, dtype=torch.float16, device=DEVICE) for shape in ((M, K), (K, N)))
    for programs in {1, tiles // 3 + 1, tiles}:
        c = torch.zeros(M, N, dtype=torch.float16, device=DEVICE)
        recipe.ordered_kernel[(programs,)](a, b, c, M, N, K, 16, 16, 16, GROUP)
        expected = torch.zeros_like(c)
        for m, n in order[:programs]:
            expected[16 * m : 16 * m + 16, 16 * n : 16 * n + 16] = K
        assert torch.equal(c, expected)


def test_order(recipe: ModuleType) -> None:
    """With one row in a group the order is row by row, and with all rows column by column."""
    assert [recipe.tile_of(pid, 3, 4, 1) for pid in range(12)] == [(m, n) for m in range(3) for n in range(4)]
    assert [recipe.tile_of(pid, 3, 4, 3) for pid in range(12)] == [(m, n) for n in range(4) for m in range(3)]


def test_wave(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 132 programs at a time, groups of 16 rows need the fewest numbers, as the page says."""
    monkeypatch.setattr(recipe, "PROGRAMS", 132)
    waves = {GROUP: recipe.wave(GROUP) for GROUP in recipe.GROUPS}
    assert waves == {1: (5, 32), 2: (6, 32), 4: (8, 32), 8: (8, 17), 16: (16, 9), 32: (32, 5)}
    numbers = {GROUP: 128 * rows + 256 * columns for GROUP, (rows, columns) in waves.items()}
    assert min(numbers, key=numbers.__getitem__) == 16


def test_exercises(recipe: ModuleType) -> None:
    """Their checks tell a hole, a mistake and the answer apart."""
    assert recipe.check_columns(recipe.tile_in_columns) == "not solved yet"
    assert recipe.check_columns(recipe.columns_answer) == "right"
    assert recipe.check_columns(recipe.tile_of) == "wrong"
    assert recipe.check_group(recipe.best_group) == "not solved yet"
    assert recipe.check_group(recipe.group_answer) == "right"
    assert recipe.check_group(lambda *_: 8) == "wrong"


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a last group as high as any", "height = tl.minimum(tiles_m - first_m, GROUP)", "height = GROUP"),
    ("stored without a mask", "acc, mask=c_mask)", "acc)"),
    ("stored with a mask of rows alone", "c_mask = (offs_m < M) & (offs_n < N)", "c_mask = offs_m < M"),
    ("loads of a past K", "a_mask = (offs_m < M) & (start + offs_k[None, :] < K)", "a_mask = offs_m < M"),
    ("loads of b past K", "b_mask = (start + offs_k[:, None] < K) & (offs_n < N)", "b_mask = offs_n < N"),
    ("a sum of the last step alone", "acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b)"),
    ("a step along K that is too short", "b_ptrs += BLOCK_K * N", "b_ptrs += N"),
]
