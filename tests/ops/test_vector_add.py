"""The kernels of the lesson Vector addition."""

from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import Layout, layouts, shapes

BLOCK = 1024  # of the lesson


def assert_same(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality, to the last bit."""
    assert out.dtype == expected.dtype
    assert out.device.type == recipe.DEVICE.type
    torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@given(shape=shapes(BLOCK, 40 * BLOCK), of_x=layouts(), of_y=layouts())
def test_sum(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_x: Layout, of_y: Layout) -> None:
    """A float64 sum rounded to the dtype is the correctly rounded sum, so the tolerance is zero."""
    x, y = of_x.make(shape, dtype, recipe.DEVICE), of_y.make(shape, dtype, recipe.DEVICE)
    assert_same(recipe, guarded(recipe.add, x, y), (x.double() + y.double()).to(dtype))


@given(shape=shapes(BLOCK, 40 * BLOCK), of_x=layouts(), of_y=layouts())
def test_relu_of_sum_in_float32(recipe: ModuleType, shape: tuple[int, ...], of_x: Layout, of_y: Layout) -> None:
    x, y = of_x.make(shape, torch.float32, recipe.DEVICE), of_y.make(shape, torch.float32, recipe.DEVICE)
    assert_same(recipe, guarded(recipe.add_relu, x, y), torch.relu(x + y))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values_in_float32(recipe: ModuleType) -> None:
    """Infinities, NaN, signed zeros, subnormal numbers."""
    tiny = torch.finfo(torch.float32).smallest_normal
    special = [0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, tiny, tiny / 2, -tiny / 2]
    x = torch.tensor(special, device=recipe.DEVICE).repeat(len(special))
    y = x.view(len(special), -1).T.reshape(-1)
    out = recipe.add(x, y)
    assert_same(recipe, out, x + y)
    assert torch.equal(out.signbit()[x == 0], (x + y).signbit()[x == 0])
    assert_same(recipe, recipe.add_relu(x, y), torch.relu(x + y))


def test_checks_of_exercises(recipe: ModuleType) -> None:
    """They tell a right answer from a wrong one, and from none."""
    for check, hole, answer in [
        (recipe.check_scale_add, recipe.scale_add, recipe.scale_add_answer),
        (recipe.check_reverse, recipe.reverse, recipe.reverse_answer),
    ]:
        assert check(hole) == "not solved yet"
        assert check(answer) == "right"
        assert check(lambda *args, answer=answer: answer(*args) + 1) == "wrong"


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("add", lambda normal, M, N: (normal(M, N), normal(M, N))),
    ("add_relu", lambda normal, M, N: (normal(M, N), normal(M, N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "sum stored without a mask",
        "tl.store(out_ptr + offs, x + y, mask=mask)",
        "tl.store(out_ptr + offs, x + y)",
    ),
    (
        "ReLU stored without a mask",
        "tl.store(out_ptr + offs, relu, mask=mask)",
        "tl.store(out_ptr + offs, relu)",
    ),
]
