"""The ops that the recipe Benchmarking times, and the counts that it compares them with."""

# ruff: noqa: N806 - a matrix is called A, and its extents M and N, as in the recipe

import math
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import sizes

BLOCK = 1024  # of the recipe; other blocks would only make these sizes less interesting
HALF_UNIT = 2**-24  # of float32, relative


def uniform(recipe: ModuleType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random numbers between 0 and 1, none of which cancel."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(recipe.DEVICE)


@given(N=sizes(BLOCK, 8 * BLOCK), fmas=st.integers(0, 70), block=st.sampled_from([512, BLOCK]), seed=st.integers(0, 99))
def test_add(recipe: ModuleType, N: int, fmas: int, block: int, seed: int) -> None:
    """However the multiply-adds are split into turns of the loop, each rounds twice at most."""
    x, y = uniform(recipe, (2, N), seed)
    out = guarded(lambda x, y: recipe.add(x, y, fmas, block), x, y)
    expected = recipe.add_torch(x.double(), y.double(), fmas)
    torch.testing.assert_close(out.double(), expected, rtol=(2 * fmas + 1) * HALF_UNIT, atol=0)


@given(N=sizes(BLOCK, 4 * BLOCK), seed=st.integers(0, 99))
def test_add_alone_is_exact(recipe: ModuleType, N: int, seed: int) -> None:
    """Without multiply-adds it is an addition, correctly rounded, of numbers of either sign."""
    x, y = uniform(recipe, (2, N), seed) - 0.5
    expected = (x.double() + y.double()).float()
    torch.testing.assert_close(guarded(recipe.add, x, y), expected, rtol=0, atol=0)


@given(M=st.sampled_from([0, 1, 2, 7]), N=sizes(BLOCK, 5000), seed=st.integers(0, 99))
def test_sum_row(recipe: ModuleType, M: int, N: int, seed: int) -> None:
    """A row is one block, summed in a tree."""
    A = uniform(recipe, (M, N), seed)
    out = guarded(recipe.sum_row, A)
    rtol = (math.log2(max(N, 2)) + 2) * HALF_UNIT
    assert out.shape == (M,)
    torch.testing.assert_close(out.double(), A.double().sum(1), rtol=rtol, atol=0)


def test_refuses(recipe: ModuleType) -> None:
    """What the launchers do not take, they name."""
    x = torch.ones(4, 6, device=recipe.DEVICE)
    for wrong in (x.double(), x.half(), x.to("meta"), x[:2], x.T.contiguous().T, x[:, ::2]):
        with pytest.raises(ValueError, match=r"takes contiguous \(torch.float32"):
            recipe.add(x, wrong)
    for wrong in (x.double(), x.to("meta"), x.T):
        with pytest.raises(ValueError, match="takes contiguous"):
            recipe.sum_row(wrong)
    with pytest.raises(ValueError, match="without gradient"):
        recipe.add(x, x.clone().requires_grad_())
    with torch.no_grad():
        recipe.add(x, x.clone().requires_grad_())


def test_work_of_the_tensors(recipe: ModuleType) -> None:
    """Bytes are those of the tensors that an op takes and returns."""
    x, A = torch.ones(7, device=recipe.DEVICE), torch.ones(3, 5, device=recipe.DEVICE)
    assert recipe.add_work(7)[1] == 2 * x.nbytes + recipe.add(x, x).nbytes
    assert recipe.sum_row_work(3, 5)[1] == A.nbytes + recipe.sum_row(A).nbytes
    assert recipe.matmul_work(5)[1] == 3 * torch.ones(5, 5, dtype=torch.bfloat16).nbytes


def test_operations(recipe: ModuleType) -> None:
    """Operations are counted one by one; multiply-adds count twice."""
    assert [recipe.add_work(10, fmas)[0] for fmas in (0, 1, 16)] == [10, 30, 330]
    assert recipe.sum_row_work(3, 5)[0] == 3 * 4
    assert recipe.matmul_work(4)[0] == 4 * 4 * (4 + 4)


@given(
    intensity=st.floats(1e-3, 1e5), bandwidth=st.floats(1e-2, 1e2), peak=st.floats(1e-1, 1e5), more=st.floats(1, 1e3)
)
def test_attainable(recipe: ModuleType, intensity: float, bandwidth: float, peak: float, more: float) -> None:
    """It stays under both roofs, touches one, and bends at the ridge point."""
    rate = recipe.attainable(intensity, bandwidth, peak)
    assert rate <= peak
    assert rate <= intensity * bandwidth
    assert rate in (peak, intensity * bandwidth)
    assert recipe.attainable(more * intensity, bandwidth, peak) >= rate
    ridge = peak / bandwidth
    assert recipe.attainable(ridge, bandwidth, peak) == pytest.approx(peak)
    assert recipe.attainable(ridge * more, bandwidth, peak) == pytest.approx(peak)
    assert recipe.attainable(ridge / more, bandwidth, peak) == pytest.approx(peak / more)


def test_intensity_of_a_product(recipe: ModuleType) -> None:
    """A third of N operations per byte, in a type of two bytes, as the answer to the exercise has it."""
    for N in (3, 256, 8192):
        assert recipe.intensity(recipe.matmul_work(N)) == pytest.approx(N / 3)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("add", lambda normal, M, N: (normal(M, N), normal(M, N))),
    ("sum_row", lambda normal, M, N: (normal(M, N),)),
]
