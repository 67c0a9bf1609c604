"""The op of the recipe Flash attention."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import DEVICE, FLOATS, Layout, layouts, shapes
from tolerance import assert_within

BLOCK = 1024  # of the recipe


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("attention/flash_attention.py")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(shape=shapes(BLOCK, 40 * BLOCK), layout=layouts())
def test_value(taken: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], layout: Layout) -> None:
    """The value is right for any shape and layout, and its dtype is that of the argument."""
    x = layout.make(shape, dtype, DEVICE)
    out = guarded(taken.flash_attention, x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    expected = x.double() * x.double()
    assert_within(out, expected, expected, roundings=1, floor=torch.finfo(torch.float32).tiny)


def test_gradient(taken: ModuleType) -> None:
    """It is that of finite differences."""
    x = torch.randn(5, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(taken.flash_attention, x)


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    with pytest.raises(TypeError, match=r"flash_attention takes a float tensor, not torch\.int64"):
        taken.flash_attention(torch.ones(3, dtype=torch.int64, device=DEVICE))


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [
    ("flash_attention", lambda normal, M, N: (normal(M, N),), lambda x: x * x),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "stored without a mask",
        "tl.store(out_ptr + offs, x * x, mask=mask)\n\n\n@triton_op",
        "tl.store(out_ptr + offs, x * x)\n\n\n@triton_op",
    ),
]
