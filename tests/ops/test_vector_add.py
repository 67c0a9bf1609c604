"""The op of the recipe Vector addition."""

from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import FLOATS, INTEGERS, Layout, layouts, shapes

BLOCK = 1024  # of the recipe; other blocks would only make these sizes less interesting


def assert_same(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality, to the last bit where the arithmetic allows it."""
    # Triton's interpreter cuts float32 to bfloat16 where a GPU rounds: one unit in the last place.
    rtol = 2**-7 if out.dtype == torch.bfloat16 and recipe.DEVICE.type == "cpu" else 0
    assert out.dtype == expected.dtype
    assert out.device.type == recipe.DEVICE.type
    if out.dtype == torch.bool:
        out, expected = out.view(torch.uint8), expected.view(torch.uint8)  # a bool of 255 is wrong too
    torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(shape=shapes(BLOCK, 40 * BLOCK), of_x=layouts(), of_y=layouts())
def test_floats(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_x: Layout, of_y: Layout) -> None:
    """A float64 sum rounded to the dtype is the correctly rounded sum, so the tolerance is zero."""
    x, y = of_x.make(shape, dtype, recipe.DEVICE), of_y.make(shape, dtype, recipe.DEVICE)
    assert_same(recipe, guarded(recipe.add, x, y), (x.double() + y.double()).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@given(shape=shapes(BLOCK, 40 * BLOCK), of_x=layouts(), of_y=layouts())
def test_integers(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_x: Layout, of_y: Layout) -> None:
    """Integers wrap around, and a sum of truth values is their `or`."""
    x, y = of_x.make(shape, dtype, recipe.DEVICE), of_y.make(shape, dtype, recipe.DEVICE)
    expected = x | y if dtype == torch.bool else (x.long() + y.long()).to(dtype)
    assert_same(recipe, guarded(recipe.add, x, y), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Infinities, NaN, signed zeros, subnormal numbers."""
    tiny = torch.finfo(dtype).smallest_normal
    special = [0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, tiny]
    if dtype != torch.bfloat16 or recipe.DEVICE.type != "cpu":  # those the interpreter stores wrongly
        special += [tiny / 2, -tiny / 2]
    x = torch.tensor(special, dtype=dtype, device=recipe.DEVICE).repeat(len(special))
    y = x.view(len(special), -1).T.reshape(-1)
    out = recipe.add(x, y)
    assert_same(recipe, out, x + y)
    assert torch.equal(out.signbit()[x == 0], (x + y).signbit()[x == 0])


@given(dtype=st.sampled_from(FLOATS + INTEGERS))
def test_aliases(recipe: ModuleType, dtype: torch.dtype) -> None:
    """The two inputs may be the same tensor; the result is a new one."""
    x = Layout("contiguous", 0).make((5, 7), dtype, recipe.DEVICE)
    before = x.clone()
    out = recipe.add(x, x)
    out.zero_()
    assert torch.equal(x, before)


@pytest.mark.needs_gpu_memory(7)
def test_beyond_int32(recipe: ModuleType) -> None:
    """The last elements of a tensor of more than 2**31 elements are right."""
    x = torch.ones(2**31 + 5, dtype=torch.int8, device=recipe.DEVICE)
    out = recipe.add(x, x)
    assert out.eq(2).all()


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    with pytest.raises(ValueError, match=r"does not broadcast: .*\(2, 3\) and \(3,\)"):
        recipe.add(x, x[0])
    with pytest.raises(TypeError, match=r"not torch\.complex64"):
        recipe.add(x.to(torch.complex64), x.to(torch.complex64))
    with pytest.raises(TypeError, match=r"torch\.float32 and torch\.float64"):
        recipe.add(x, x.double())
    with pytest.raises(ValueError, match="device, not meta and meta"):
        recipe.add(x.to("meta"), x.to("meta"))
    with pytest.raises(ValueError, match=r"device, not .* and meta"):
        recipe.add(x, x.to("meta"))
    with pytest.raises(ValueError, match="no backward"):
        recipe.add(x, x.clone().requires_grad_())
    with torch.no_grad():
        recipe.add(x, x.clone().requires_grad_())


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("add", lambda normal, M, N: (normal(M, N), normal(M, N))),
    ("add_op", lambda normal, M, N: (normal(M, N), normal(M, N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("store without a mask", "tl.store(out_ptr + offs, total, mask=mask)", "tl.store(out_ptr + offs, total)"),
    ("truth values added", "total = x | y", "total = x ^ y"),
]
