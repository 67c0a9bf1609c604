"""No op has wrong second derivatives: they are right, or they are refused, by whatever error."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from inputs import DEVICE
from test_on_gpu import OPS, Op

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of NumPy's infinities, in the interpreter
]
M, N = 5, 40


def second(function: Callable[..., object], inputs: Sequence[object]) -> list[torch.Tensor]:
    """Return the gradient of what the gradients of a weighted sum of the results come to; the weights have none."""
    leaves = [t.detach().clone().requires_grad_() if _is_float(t) else t for t in inputs]
    wanted = [t for t in leaves if _is_float(t)]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    weights = torch.Generator().manual_seed(1)
    total = sum(
        (out * torch.randn(out.shape, generator=weights).to(out)).sum()
        for out in outputs
        if _is_float(out) and out.requires_grad
    )
    first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    penalty = sum(grad.square().sum() for grad in first if grad is not None)
    found = torch.autograd.grad(penalty, wanted, allow_unused=True)
    return [torch.zeros_like(t) if grad is None else grad for grad, t in zip(found, wanted, strict=True)]


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("op", [op for op in OPS if op.reference], ids=lambda op: f"{op.recipe}:{op.name}")
def test_second_derivatives(op: Op, recipe_at: Callable[[str], ModuleType]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = op.make(lambda *shape: torch.randn(shape, generator=generator).to(DEVICE), M, N)
    try:
        found = second(getattr(recipe_at(f"{op.recipe}.py"), op.name), inputs)
    except (RuntimeError, TypeError, ValueError):  # TypeError: where nothing has a gradient, there is no sum
        return
    for one, other in zip(found, second(op.reference, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * (1 + other.abs().max().item()))
