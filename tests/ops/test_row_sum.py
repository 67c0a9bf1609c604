"""The op of the recipe Row sum."""

# ruff: noqa: N806 - a matrix is called A, and its extents M and N, as in the recipe

import math
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import FLOATS, INTEGERS, Layout, layouts, sizes

BLOCK_N = 4096  # of the recipe; other blocks would only make these sizes less interesting
ROWS = st.sampled_from([0, 1, 2, 3, 8])
COLUMNS = sizes(BLOCK_N, 3 * BLOCK_N + 1)


def assert_sums(recipe: ModuleType, A: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that the sums of a floating matrix are as good as their accumulator and their dtype."""
    assert out.dtype == A.dtype
    assert out.shape == A.shape[:1]
    assert out.device.type == recipe.DEVICE.type
    in_float64 = A.double()
    # An element takes part in that many additions, each off by half a unit of the sum of magnitudes at most.
    # (Twice that many: the reference has errors of its own, which matter to float64.)
    additions = 2 * (math.ceil(A.shape[1] / BLOCK_N) + math.log2(BLOCK_N) + 1)
    accumulator = 2**-53 if A.dtype == torch.float64 else 2**-24
    # The last rounding, to the dtype; the interpreter cuts where a GPU rounds, so a whole unit.
    last = torch.finfo(A.dtype).eps
    allowed = additions * accumulator * in_float64.abs().sum(1) + last * in_float64.sum(1).abs()
    error = (out.double() - in_float64.sum(1)).abs()
    assert (error <= allowed).all(), f"off by {(error / allowed).max().item():.1f} times the tolerance"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(M=ROWS, N=COLUMNS, of_A=layouts())
def test_floats(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, of_A: Layout) -> None:
    """Floats come back in their own dtype, accumulated in float32 or better."""
    A = of_A.make((M, N), dtype, recipe.DEVICE)
    assert_sums(recipe, A, guarded(recipe.sum_row, A))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@given(M=ROWS, N=COLUMNS, of_A=layouts())
def test_integers(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, of_A: Layout) -> None:
    """Integers and truth values are counted in int64, exactly."""
    A = of_A.make((M, N), dtype, recipe.DEVICE)
    out = guarded(recipe.sum_row, A)
    assert out.dtype == torch.int64
    assert torch.equal(out, A.sum(1))


@given(M=st.integers(9, 64), N=sizes(64, 200), of_A=layouts())
def test_many_rows(recipe: ModuleType, M: int, N: int, of_A: Layout) -> None:
    """Many short rows."""
    A = of_A.make((M, N), torch.float32, recipe.DEVICE)
    assert_sums(recipe, A, guarded(recipe.sum_row, A))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """In half precision 2048 + 1 is 2048; with an accumulator like that, the ones in the middle would be lost."""
    blocks = torch.tensor([2048, 1, -2048], dtype=dtype, device=recipe.DEVICE)
    A = blocks.repeat_interleave(BLOCK_N).expand(2, 3 * BLOCK_N)
    assert recipe.sum_row(A).tolist() == [BLOCK_N] * 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_stay_in_their_row(recipe: ModuleType, dtype: torch.dtype) -> None:
    """NaN and infinities reach their own row's sum and no other."""
    A = torch.ones(5, 37, dtype=dtype, device=recipe.DEVICE)
    A[1, 36], A[2, 0], A[3, 5], A[3, 6] = torch.nan, torch.inf, torch.inf, -torch.inf
    torch.testing.assert_close(recipe.sum_row(A), A.sum(1), rtol=0, atol=0, equal_nan=True)


def test_row_in_one_block(recipe: ModuleType) -> None:
    """The kernel of the first step, which takes contiguous and other strides too."""
    for layout in ("contiguous", "transposed", "strided"):
        for N in (1, 5, 64, 1000, 5000):
            A = Layout(layout, N).make((3, N), torch.float32, recipe.DEVICE)
            assert_sums(recipe, A, guarded(recipe.sum_row_block, A))


@pytest.mark.needs_gpu_memory(4)
@pytest.mark.parametrize("shape", [(1, 2**31 + 5), (2**17 + 1, 2**14), (2**22, 513)], ids=str)
def test_beyond_int32(recipe: ModuleType, shape: tuple[int, int]) -> None:
    """One row, or all rows together, may have more than 2**31 elements."""
    A = torch.ones(shape, dtype=torch.int8, device=recipe.DEVICE)
    A[-1, -1] = 7
    expected = torch.full(shape[:1], shape[1], device=recipe.DEVICE)
    expected[-1] += 6
    assert torch.equal(recipe.sum_row(A), expected)


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    A = torch.ones(2, 3, device=recipe.DEVICE)
    with pytest.raises(ValueError, match="matrix, not 1 dim"):
        recipe.sum_row(A[0])
    with pytest.raises(ValueError, match="matrix, not 3 dim"):
        recipe.sum_row(A[None])
    with pytest.raises(TypeError, match=r"not torch\.complex64"):
        recipe.sum_row(A.to(torch.complex64))
    with pytest.raises(ValueError, match=r"device, not meta"):
        recipe.sum_row(A.to("meta"))
    with pytest.raises(ValueError, match="no backward"):
        recipe.sum_row(A.clone().requires_grad_())
    with torch.no_grad():
        recipe.sum_row(A.clone().requires_grad_())


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("sum_row", lambda normal, M, N: (normal(M, N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("load without a mask", "mask=offs_n < N, other=0)  # (BLOCK_N,)\n        acc", "other=None)\n        acc"),
    ("half an accumulator", "torch.float16: tl.float32", "torch.float16: tl.float16"),
]
