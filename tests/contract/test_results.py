"""Results are right: at every size, in every layout and dtype, and for special values."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from case import ON_GPU, Case, Draw, at, check
from cases import QUICK_SIZES, each_case, each_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import Layout, layouts
from torch.utils._pytree import tree_leaves

# NumPy's, of infinities, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
Load = Callable[[Case], ModuleType]


@each_dtype()
def test_sizes(load_op: Load, case: Case, dtype: torch.dtype, whole: bool) -> None:
    """At the sizes at which a mask, a block or a launch may go wrong; at the first, twice."""
    op = load_op(case)
    sizes = [size for size in case.sizes if case.fits(size, dtype)]
    for place, size in enumerate(sizes if whole else sizes[:QUICK_SIZES]):
        with at(size):
            check(case, op, dtype, case.arguments(Draw(dtype), *size), again=ON_GPU or whole or place == 0)


@each_dtype(quick=[torch.float32])
def test_layouts(load_op: Load, case: Case, dtype: torch.dtype, whole: bool) -> None:
    """Each tensor in another layout, and all in the same one; quickly, in one such."""
    op = load_op(case)
    size = case.in_layouts or case.sizes[0]
    each = [*case.layouts]
    mixed = [(each * 8)[start : start + 8] for start in range(len(each))]
    for names in [*mixed, *([name] * 8 for name in each if whole or name == "padded")]:
        with at(names):
            input_layouts = [Layout(name, seed) for seed, name in enumerate(names)]
            check(case, op, dtype, case.arguments(Draw(dtype, input_layouts), *size))


@each_dtype(lambda case: case.shapes is not None)
@settings(max_examples=12)
@given(data=st.data())
def test_drawn(load_op: Load, case: Case, dtype: torch.dtype, data: st.DataObject) -> None:
    """At any size, in any layouts."""
    size = data.draw(case.shapes)
    drawn_layouts = data.draw(st.lists(layouts(case.layouts), min_size=8, max_size=8))
    check(case, load_op(case), dtype, case.arguments(Draw(dtype, drawn_layouts), *size))


@each_dtype(lambda case: case.special)
def test_special_values(load_op: Load, case: Case, dtype: torch.dtype) -> None:
    """NaN, infinities and the lowest and highest numbers do what they do in PyTorch, and to no other row."""
    assert case.special
    assert case.reference
    function = case.on_copies(load_op(case))
    for arguments in case.special(Draw(dtype)):
        with at(*(tuple(value.shape) for value in arguments if isinstance(value, torch.Tensor))):
            torch.testing.assert_close(function(*arguments), tree_leaves(case.reference(*arguments)), equal_nan=True)


@each_case(lambda case: case.refused)
def test_refuses(load_op: Load, case: Case) -> None:
    """What it does not take, it names."""
    function = case.function(load_op(case))
    for refused in case.refused:
        with at(refused.match), pytest.raises(refused.error, match=f"^{refused.match}"):
            function(*refused.arguments(Draw(case.usual)))
