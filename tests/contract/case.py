"""The cases of the contract: how to call a public function, and what its results have to be.

The tests of an op list its cases as `CONTRACT`; the tests of this folder ask each promise of every case.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from guard import Guard
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, like
from tolerance import assert_within
from torch.utils._pytree import tree_leaves, tree_map


class Exact(NamedTuple):
    """What a result has to be.

    Attributes:
        value: the result in float64.
        terms: for each element, the sum of the magnitudes of what is added up; None is the value's magnitude.
        dtype: of the result; None is that of the case.
    """

    value: torch.Tensor
    terms: torch.Tensor | None = None
    dtype: torch.dtype | None = None


class Refused(NamedTuple):
    """A call that raises.

    Attributes:
        arguments: makes them, given a `Draw` of float32.
        error: what is raised.
        match: a pattern that the message begins with.
    """

    arguments: "Callable[[Draw], tuple[Any, ...]]"
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class Case:
    """A public function of an op.

    Attributes:
        call: its name in the op's module.
        arguments: makes arguments, given a `Draw` and a size.
        exact: returns what each result has to be, given the arguments with their tensors in float64.
        sizes: those at which the kernels may go wrong; a quick run takes the first eight.
        small: a size for differences of each element.
        many: a ragged size, for a GPU: more programs than run at a time.
        fits: whether the function takes a size in a dtype.
        shapes: all other sizes.
        dtypes: those that it takes.
        roundings: how many a term goes through in the accumulator, one after another; a function is given the result.
        floor: what may be lost besides, given the dtype: for results too small for the accumulator.
        reference: the same by PyTorch, of tensors in the case's dtype.
        special: makes arguments with NaN, infinities and extreme values, for which `reference` has the results.
        gradients: returns what the gradients of the first arguments have to be, given those of the results and the
            arguments, all in float64; None where the function has no backward.
        with_gradients: how many the first arguments are that have some.
        twice: whether gradients have gradients; a second derivative is refused otherwise.
        refused: calls that raise.
        recipe: `section/name` of the lesson that hands over the op.
    """

    call: str
    arguments: "Callable[..., tuple[Any, ...]]"
    exact: Callable[..., Sequence[Exact]]
    sizes: Sequence[tuple[int, ...]]
    small: tuple[int, ...]
    many: tuple[int, ...] = (1031, 2053)
    fits: Callable[[tuple[int, ...], torch.dtype], bool] = lambda size, dtype: True
    shapes: st.SearchStrategy[tuple[int, ...]] | None = None
    dtypes: Sequence[torch.dtype] = tuple(FLOATS)
    roundings: int | Callable[[torch.Tensor], int] = 64
    floor: Callable[[torch.dtype], float] = lambda _: 0.0
    reference: Callable[..., Any] | None = None
    special: "Callable[[Draw], Sequence[tuple[Any, ...]]] | None" = None
    gradients: Callable[..., Sequence[Exact]] | None = None
    with_gradients: int = 1
    twice: bool = False
    refused: Sequence[Refused] = field(default=())
    recipe: str = ""

    def function(self, module: ModuleType) -> Callable[..., Any]:
        """Return the function of an op's module."""
        return getattr(module, self.call)


class Draw:
    """Makes the tensors of a call.

    Attributes:
        dtype: of what has no other.
    """

    def __init__(
        self, dtype: torch.dtype, layouts: Sequence[Layout] = (), device: torch.device = DEVICE, seed: int = 0
    ) -> None:
        """Take the layout of each tensor in turn; from then on they are contiguous, of other values each."""
        self.dtype = dtype
        self._layouts = [*layouts]
        self._device = device
        self._seed = seed
        self._count = 0

    def __call__(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of normally distributed values, or of what a function makes of them in float64."""
        given = self._layouts[self._count] if self._count < len(self._layouts) else None
        layout = given or Layout("contiguous", self._seed + self._count)
        self._count += 1
        tensor = layout.make(shape, dtype or self.dtype, self._device)
        return tensor if of is None else like(tensor, of(tensor.double()))


def in_float64(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with their floats in float64, apart from the ones given."""

    def wide(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().to(torch.float64, copy=True) if is_float else value

    return tree_map(wide, arguments)


def with_gradients(case: Case, arguments: tuple[Any, ...]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return the leaves of the arguments that have gradients, and the arguments with them."""
    count = case.with_gradients if case.gradients else 0
    leaves = [value.detach().requires_grad_() for value in arguments[:count]]
    return leaves, (*leaves, *arguments[count:])


def check(case: Case, module: ModuleType, dtype: torch.dtype, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Assert all that a call promises of its results; return them.

    They are right, written whole and nowhere else, contiguous, and the same in a second call; the arguments stay.
    """
    function = case.function(module)
    guard = Guard()
    placed = tree_map(lambda value: guard.place(value) if isinstance(value, torch.Tensor) else value, arguments)
    with guard:
        results = tree_leaves(function(*placed))
    guarded = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    exact = case.exact(*in_float64(arguments))
    assert len(results) == len(exact)
    for out, again, right in zip(results, tree_leaves(function(*arguments)), exact, strict=True):
        assert out.untyped_storage().data_ptr() in guarded, "a result that no guard surrounds"
        assert out.device.type == DEVICE.type
        assert out.dtype == (right.dtype or dtype)
        assert out.shape == right.value.shape
        assert out.is_contiguous()
        assert torch.equal(out.flatten().view(torch.uint8), again.flatten().view(torch.uint8)), "not deterministic"
        if out.is_floating_point():
            terms = right.value.abs() if right.terms is None else right.terms
            roundings = case.roundings if isinstance(case.roundings, int) else case.roundings(out)
            assert_within(out, right.value, terms, roundings, case.floor(out.dtype))
        else:
            assert torch.equal(out, right.value)
    return results


@contextmanager
def at(*what: object) -> Iterator[None]:
    """Say in a failure for which of several inputs it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"for {' '.join(map(str, what))}")
        raise
