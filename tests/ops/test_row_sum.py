"""The kernels of the lesson Row sum."""

import math
from functools import partial
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout, layouts, sizes

BLOCK_N = 4096  # of the lesson
ROWS = st.sampled_from([0, 1, 2, 3, 8])
CONTIGUOUS_ROWS = layouts(["contiguous", "offset", "apart"])


def assert_sums(recipe: ModuleType, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that the sums of the rows of a float32 matrix are as good as their accumulator."""
    assert out.dtype == torch.float32
    assert out.shape == x.shape[:1]
    assert out.device.type == recipe.DEVICE.type
    in_float64 = x.double()
    # An element takes part in that many additions, each off by half a unit of the sum of magnitudes at most.
    additions = math.ceil(x.shape[1] / BLOCK_N) + 2 * 38  # as the lesson counts them
    allowed = additions * 2**-24 * in_float64.abs().sum(1)
    error = (out.double() - in_float64.sum(1)).abs()
    assert (error <= allowed).all(), f"off by {(error / allowed).max().item():.1f} times the tolerance"


@given(M=ROWS, N=sizes(BLOCK_N, 3 * BLOCK_N + 1), of_x=CONTIGUOUS_ROWS)
def test_row_in_float32(recipe: ModuleType, M: int, N: int, of_x: Layout) -> None:
    x = of_x.make((M, N), torch.float32, recipe.DEVICE)
    assert_sums(recipe, x, guarded(recipe.sum_row, x))


@given(M=sizes(64, 300), N=st.integers(1, 300), of_x=CONTIGUOUS_ROWS)
def test_short_rows_in_float32(recipe: ModuleType, M: int, N: int, of_x: Layout) -> None:
    x = of_x.make((M, N), torch.float32, recipe.DEVICE)
    assert_sums(recipe, x, guarded(recipe.sum_short_rows, x))


@given(M=st.integers(1, 3), parts=st.integers(1, 9), part=st.sampled_from([1, 4, 1000]))
def test_long_rows_in_float32(recipe: ModuleType, M: int, parts: int, part: int) -> None:
    x = Layout("contiguous", parts).make((M, parts * part), torch.float32, recipe.DEVICE)
    assert_sums(recipe, x, guarded(partial(recipe.sum_long_rows, PART=part), x))


@pytest.mark.parametrize("shape", [(40, 16), (3, 8192), (2, 5000), (1025, 4097)], ids=str)
def test_any_shape(recipe: ModuleType, shape: tuple[int, int]) -> None:
    """Whichever kernel is chosen for it."""
    x = Layout("contiguous", 0).make(shape, torch.float32, recipe.DEVICE)
    assert_sums(recipe, x, guarded(recipe.sum_rows, x))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values_stay_in_their_row(recipe: ModuleType) -> None:
    """NaN and infinities reach their own row's sum and no other."""
    x = torch.ones(5, 37, device=recipe.DEVICE)
    x[1, 36], x[2, 0], x[3, 5], x[3, 6] = torch.nan, torch.inf, torch.inf, -torch.inf
    for function in (recipe.sum_row, recipe.sum_short_rows):
        torch.testing.assert_close(function(x), x.sum(1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.needs_gpu_memory(4)
@pytest.mark.parametrize("shape", [(2**17 + 1, 2**14), (2**22, 513)], ids=str)
def test_beyond_int32(recipe: ModuleType, shape: tuple[int, int]) -> None:
    """All rows together may have more than 2**31 elements."""
    x = torch.ones(shape, dtype=torch.int8, device=recipe.DEVICE)
    x[-1, -1] = 7
    expected = torch.full(shape[:1], float(shape[1]), device=recipe.DEVICE)
    expected[-1] += 6
    assert torch.equal(recipe.sum_row(x), expected)


def test_checks_of_exercises(recipe: ModuleType) -> None:
    """They tell a right answer from a wrong one, and from none."""
    for check, hole, answer in [
        (recipe.check_normalize, recipe.normalize, recipe.normalize_answer),
        (recipe.check_sum_columns, recipe.sum_columns, recipe.sum_columns_answer),
    ]:
        assert check(hole) == "not solved yet"
        assert check(answer) == "right"
        assert check(lambda x, answer=answer: answer(x) + 1) == "wrong"


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("sum_row", lambda normal, M, N: (normal(M, N),)),
    ("sum_short_rows", lambda normal, M, N: (normal(M, N // 16),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("load without a mask", "x = tl.load(x_ptrs, mask=offs_n < N, other=0)", "x = tl.load(x_ptrs)"),
    (
        "stride of a contiguous matrix",
        "sum_row_kernel[(M,)](x, out, N, x.stride(0),",
        "sum_row_kernel[(M,)](x, out, N, N,",
    ),
    ("tile stored without a mask", "tl.sum(x, axis=1), mask=offs_m < M)", "tl.sum(x, axis=1))"),
]
