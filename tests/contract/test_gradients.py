"""Gradients reach their arguments through autograd, agree with differences, and have none themselves."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, in_float64, with_gradients
from cases import each_case, each_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import layouts
from torch.utils._pytree import tree_leaves

Load = Callable[[str], ModuleType]


@each_dtype(lambda case: case.gradients and case.shapes is not None)
@settings(max_examples=8)
@given(data=st.data())
def test_autograd(load_op: Load, case: Case, dtype: torch.dtype, data: st.DataObject) -> None:
    """In any layout, a gradient is that of float64, but for roundings of what the forward keeps."""
    assert case.gradients
    of = data.draw(st.lists(layouts(), min_size=8, max_size=8))
    arguments = case.arguments(Draw(dtype, of), *data.draw(case.shapes))
    leaves, with_leaves = with_gradients(case, arguments)
    results = tree_leaves(case.function(load_op(f"{case.recipe}.py"))(*with_leaves))
    grads = [of[-1 - i].make(tuple(out.shape), out.dtype, out.device) for i, out in enumerate(results)]
    found = torch.autograd.grad(results, leaves, grads)
    exact = case.gradients(*(grad.double() for grad in grads), *in_float64(arguments))
    unit = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2**-18
    for out, leaf, right in zip(found, leaves, exact, strict=True):
        assert (out.dtype, out.shape) == (leaf.dtype, leaf.shape)
        terms = right.value.abs() if right.terms is None else right.terms
        # A result too small for the dtype is lost, and what a whole row adds up of it.
        lost = 8 * torch.finfo(dtype).tiny * (1 + sum(grad.double().abs().sum() for grad in grads))
        assert ((out.double() - right.value).abs() <= 4 * unit * terms + lost).all()


def of_leaves(load_op: Load, case: Case) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return the function of the arguments that have gradients, and these."""
    leaves, arguments = with_gradients(case, case.arguments(Draw(torch.float64), *case.small))
    function = case.function(load_op(f"{case.recipe}.py"))
    return lambda *values: function(*values, *arguments[len(leaves) :]), leaves


@each_case(lambda case: case.gradients)
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gradcheck(load_op: Load, case: Case, fast: bool) -> None:
    """Differences agree with the gradients."""
    assert torch.autograd.gradcheck(*of_leaves(load_op, case), fast_mode=fast)


@each_case(lambda case: case.gradients and case.twice)
def test_second_derivative(load_op: Load, case: Case) -> None:
    """Differences of the gradients agree with theirs."""
    assert torch.autograd.gradgradcheck(*of_leaves(load_op, case), fast_mode=True)


@each_case(lambda case: case.gradients and not case.twice)
def test_no_second_derivative_float32(load_op: Load, case: Case) -> None:
    """It is refused, not zero."""
    function, leaves = of_leaves(load_op, case)
    out = tree_leaves(function(*leaves))[0]
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        sum(grad.sum() for grad in first).backward()
