"""The cases of the contract: how to call a public function, and what its results have to be.

The tests of an op list its cases as `CONTRACT`; the tests of this folder ask each promise of every case.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from guard import Guard
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, LAYOUTS, Layout, like
from tolerance import assert_within
from torch.utils._pytree import tree_leaves, tree_map

ON_GPU = DEVICE.type == "cuda"


class Exact(NamedTuple):
    """What a result has to be.

    Attributes:
        value: the result in float64; where it is NaN, the result has to be NaN.
        terms: for each element, the sum of the magnitudes of what is added up; None is the value's magnitude. Where it
            is infinite, any number is right.
        dtype: of the result, or what gives it for the dtype of the case; None is that of the case.
        narrow: for each element, the sum of the magnitudes of what is rounded to the dtype of the case on the way.
        made_by_torch: whether an operator of PyTorch makes the result, so that no guard surrounds it.
        roundings: as those of the case; None is what the case has.
    """

    value: torch.Tensor
    terms: torch.Tensor | None = None
    dtype: torch.dtype | Callable[[torch.dtype], torch.dtype] | None = None
    narrow: torch.Tensor | None = None
    made_by_torch: bool = False
    roundings: int | None = None

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the result in a case of some dtype."""
        return self.dtype(dtype) if callable(self.dtype) else self.dtype or dtype


class Refused(NamedTuple):
    """A call that raises.

    Attributes:
        arguments: makes them, given a `Draw` of the case's usual dtype.
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
        arguments: makes arguments, given a `Draw` and a size, of which options of the function may be a part.
        exact: returns what each result has to be, given the arguments with their tensors in float64.
        sizes: those at which the kernels may go wrong; a quick run takes the first eight.
        small: a size for differences of each element.
        in_layouts: the size of tensors in each layout; None is the first.
        many: a ragged size, for a GPU: more programs than run at a time.
        fits: whether the function takes a size in a dtype.
        shapes: all other sizes; where None, none are drawn, for results or for gradients.
        layouts: the names of those that its tensors may have.
        dtypes: those that it takes.
        roundings: how many a term goes through in the accumulator, one after another; a function is given the result.
        floor: what may be lost besides, given the dtype: for results too small for the accumulator.
        reference: the same by PyTorch, of tensors in the case's dtype.
        special: makes arguments with NaN, infinities and extreme values, for which `reference` has the results.
        gradients: returns what the gradients of the arguments that have some have to be, given those of the results and
            the arguments, all in float64; None where the function has no backward.
        with_gradients: how many the first arguments are that have some; or the places of those that have, where one
            may be None and has none.
        second_gradients: whether the gradients have gradients themselves.
        once: whether a call has one backward alone, and so no differences to compare it with.
        settings: what the names in the op's module are set to: limits of the launcher that no small size would reach.
        prepare: changes what no setting can name, given the op's module; tests may call it again on the same one.
        name: of the case, where a function has several.
        plain: whether the function is no op itself, but calls one.
        launcher: whether a GPU has a function of its own for the op.
        changes: how many arguments it changes in place; they are the last of its results.
        changes_from: how many arguments come before the first of these.
        contiguous: whether results are, whatever the layout of the arguments.
        autocast: the dtype in which it computes under torch.autocast: float32, or "asked", the one that autocast is
            asked for; None is that of its arguments.
        refused: calls that raise.
        recipe: `section/name` of the lesson that hands over the op.
    """

    call: str
    arguments: "Callable[..., tuple[Any, ...]]"
    exact: Callable[..., Sequence[Exact]]
    sizes: Sequence[tuple[Any, ...]]
    small: tuple[Any, ...]
    in_layouts: tuple[Any, ...] | None = None
    many: tuple[Any, ...] = (1031, 2053)
    fits: Callable[[tuple[Any, ...], torch.dtype], bool] = lambda size, dtype: True
    shapes: st.SearchStrategy[tuple[Any, ...]] | None = None
    layouts: Sequence[str] = LAYOUTS
    dtypes: Sequence[torch.dtype] = tuple(FLOATS)
    roundings: int | Callable[[torch.Tensor], int] = 64
    floor: Callable[[torch.dtype], float] = lambda _: 0.0
    reference: Callable[..., Any] | None = None
    special: "Callable[[Draw], Sequence[tuple[Any, ...]]] | None" = None
    gradients: Callable[..., Sequence[Exact]] | None = None
    with_gradients: int | Sequence[int] = 1
    second_gradients: bool = False
    once: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[ModuleType], object] = lambda module: None
    name: str = ""
    plain: bool = False
    launcher: bool = True
    changes: int = 0
    changes_from: int = 0
    contiguous: bool = True
    autocast: torch.dtype | Literal["asked"] | None = None
    refused: Sequence[Refused] = field(default=())
    recipe: str = ""

    @property
    def usual(self) -> torch.dtype:
        """The dtype where one is enough: float32, or the first of those that it takes."""
        return torch.float32 if torch.float32 in self.dtypes else self.dtypes[0]

    def function(self, module: ModuleType) -> Callable[..., Any]:
        """Return the function of an op's module, which was loaded for this case: its settings are changed."""
        for name, value in self.settings.items():
            assert hasattr(module, name), f"no {name} to set"
            setattr(module, name, value)
        self.prepare(module)
        return getattr(module, self.call)

    def on_copies(self, module: ModuleType) -> Callable[..., list[torch.Tensor]]:
        """Return the function as one that returns all results: what it would change are copies of its arguments."""
        function = self.function(module)

        def call(*arguments: Any) -> list[torch.Tensor]:
            changed = [copy(value) for value in self.changed(arguments)]
            return self.results(function(*self.with_changed(arguments, changed)), changed)

        return call

    def changed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments that the function changes in place."""
        return arguments[self.changes_from : self.changes_from + self.changes]

    def with_changed(self, arguments: tuple[Any, ...], changed: Sequence[Any]) -> tuple[Any, ...]:
        """Return all arguments, with others in the place of those that the function changes."""
        return (*arguments[: self.changes_from], *changed, *arguments[self.changes_from + self.changes :])

    @staticmethod
    def results(returned: Any, changed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all results of a call, given what it returned and the arguments that it changed."""
        return [value for value in (*tree_leaves(returned), *changed) if value is not None]


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

    def to_float64(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().to(torch.float64, copy=True) if is_float else value

    return tree_map(to_float64, arguments)


def with_gradients(case: Case, arguments: tuple[Any, ...]) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return the leaves of the arguments that have gradients, and the arguments with them."""
    count = case.with_gradients
    places = range(count) if isinstance(count, int) else [place for place in count if arguments[place] is not None]
    leaves = {place: arguments[place].detach().requires_grad_() for place in places if case.gradients}
    return [*leaves.values()], tuple(leaves.get(place, value) for place, value in enumerate(arguments))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a kernel computes: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def differentiable(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results that have gradients: some are for a backward alone."""
    return [result for result in results if result.requires_grad]


def copy(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements."""
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def check(
    case: Case, module: ModuleType, dtype: torch.dtype, arguments: tuple[Any, ...], again: bool = ON_GPU
) -> list[torch.Tensor]:
    """Assert all that a call promises of its results; return them.

    They are right, written whole and nowhere else, contiguous, and the same in a second call, where one is made; the
    arguments stay, but for those that the function changes.
    """
    function = case.function(module)
    guard = Guard()
    placed = tree_map(lambda value: guard.place(value) if isinstance(value, torch.Tensor) else value, arguments)
    changed = [guard.place(value, changes=True) for value in case.changed(arguments)]
    exact = case.exact(*in_float64(arguments))
    with guard:
        results = case.results(function(*case.with_changed(placed, changed)), changed)
    guarded = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert len(results) == len(exact)
    for out, right in zip(results, exact, strict=True):
        assert right.made_by_torch or out.untyped_storage().data_ptr() in guarded, "a result that no guard surrounds"
        assert out.device.type == DEVICE.type
        assert out.dtype == right.dtype_for(dtype)
        assert out.shape == right.value.shape
        assert out.is_contiguous() or not case.contiguous or any(out is value for value in changed)
        if out.is_floating_point():
            assert_close(case, dtype, out, right)
        else:
            assert torch.equal(out, right.value)
    if not again:
        return results
    # Last: where results are wrong, a call without guards may end the process. Copies begin where those did: a kernel
    # for addresses that 16 divides may add up in another order.
    copies = [Guard().place(value) for value in case.changed(arguments)]
    repeated = case.results(function(*case.with_changed(arguments, copies)), copies)
    for out, again in zip(results, repeated, strict=True):
        assert torch.equal(bits(out), bits(again)), "not deterministic"
    return results


def assert_close(case: Case, dtype: torch.dtype, out: torch.Tensor, right: Exact) -> None:
    """Assert that a result is as good as its accumulator, its dtype and what is rounded on the way."""
    none = right.value.isnan()
    assert torch.equal(out.isnan(), none), "NaN where there is a number, or a number where there is NaN"
    value = right.value.masked_fill(none, 0)
    terms = value.abs() if right.terms is None else right.terms.masked_fill(none, 0)
    roundings = right.roundings or (case.roundings if isinstance(case.roundings, int) else case.roundings(out))
    lost: float | torch.Tensor = case.floor(out.dtype)
    if right.narrow is not None:
        lost = lost + torch.finfo(dtype).eps * right.narrow.masked_fill(none, 0)
    number = out.double().masked_fill(none, 0).to(out.dtype)  # PyTorch does not fill in float8
    assert_within(number, value, terms, roundings, lost)


@contextmanager
def at(*names: object) -> Iterator[None]:
    """Say in a failure for which of several inputs it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"for {' '.join(map(str, names))}")
        raise
