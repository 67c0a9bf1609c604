"""Gradients reach their arguments through autograd, agree with differences, and have none themselves."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, differentiable, in_float64, with_gradients
from cases import each_case, each_dtype
from collect_cases import is_real
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import layouts
from torch.utils._pytree import tree_leaves

# NumPy's, of infinities, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
Load = Callable[[Case], ModuleType]


@each_dtype(lambda case: case.gradients and case.shapes is not None)
@settings(max_examples=8)
@given(data=st.data())
def test_autograd(load_op: Load, case: Case, dtype: torch.dtype, data: st.DataObject) -> None:
    """In any layout, a gradient is that of float64, but for roundings of what the forward keeps."""
    assert case.gradients
    drawn_layouts = data.draw(st.lists(layouts(case.layouts), min_size=8, max_size=8))
    arguments = case.arguments(Draw(dtype, drawn_layouts), *data.draw(case.shapes))
    leaves, with_leaves = with_gradients(case, arguments)
    results = differentiable(tree_leaves(case.function(load_op(case))(*with_leaves)))
    grads = [drawn_layouts[-1 - i].make(tuple(out.shape), out.dtype, out.device) for i, out in enumerate(results)]
    actual = torch.autograd.grad(results, leaves, grads)
    exact = case.gradients(*(grad.double() for grad in grads), *in_float64(arguments))
    unit = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2**-18
    for out, leaf, right in zip(actual, leaves, exact, strict=True):
        assert (out.dtype, out.shape) == (leaf.dtype, leaf.shape)
        terms = right.value.abs() if right.terms is None else right.terms
        # A result too small for the dtype is lost, and what a whole row adds up of it.
        lost = 8 * torch.finfo(dtype).tiny * (1 + sum(grad.double().abs().sum() for grad in grads))
        assert ((out.double() - right.value).abs() <= 4 * unit * terms + lost).all()


def of_leaves(load_op: Load, case: Case, dtype: torch.dtype) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return the function of the arguments that have gradients, and these."""
    leaves, arguments = with_gradients(case, case.arguments(Draw(dtype), *case.small))
    function = case.function(load_op(case))

    def of_values(*values: Any) -> Any:
        given = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}
        return function(*(given.get(id(value), value) for value in arguments))

    return of_values, leaves


@each_case(lambda case: case.gradients and not case.once)
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gradcheck(load_op: Load, case: Case, fast: bool) -> None:
    """Differences agree with the gradients, and with those that the gradients have."""
    function, leaves = of_leaves(load_op, case, torch.float64)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)
    if case.second_gradients:
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=fast)


@each_case(lambda case: case.gradients and not case.second_gradients)
def test_no_second_derivative_float32(load_op: Load, case: Case) -> None:
    """It is refused, not zero."""
    function, leaves = of_leaves(load_op, case, case.usual)
    out = tree_leaves(function(*leaves))[0]
    if case.once:  # its backward writes over what it keeps, and returns what is no part of a graph
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="does not require grad"):
            sum(grad.sum() for grad in first).backward()
        return
    with pytest.raises(RuntimeError, match=r"no (autograd formula|second derivatives)"):
        sum(grad.sum() for grad in torch.autograd.grad(out.square().sum(), leaves, create_graph=True)).backward()


@each_case(lambda case: not (case.gradients or case.changes or case.plain or case.call.startswith("_")))
def test_no_gradient_float32(load_op: Load, case: Case) -> None:
    """A gradient that there is not is refused, not zero."""
    arguments = case.arguments(Draw(case.usual), *case.small)
    leaves = [value.requires_grad_() if is_real(value) else value for value in arguments]
    with pytest.raises((RuntimeError, ValueError), match=r"no (autograd formula|backward|gradient)"):
        # PyTorch has no sum of float8.
        sum(out.float().sum() for out in tree_leaves(case.function(load_op(case))(*leaves))).backward()
