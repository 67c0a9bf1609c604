"""Which cells of a tensor the lanes of an access point to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Cell = tuple[int, int]  # a row and a column; all dimensions but the last count as rows
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Named:
    """A tensor that a kernel was given, by the name of its parameter without `_ptr`, and what was in it before."""

    name: str
    tensor: torch.Tensor
    before: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; that of a single number is (1,)."""
        return tuple(self.tensor.shape) or (1,)

    @property
    def strides(self) -> tuple[int, ...]:
        """How many elements apart neighbours in each dimension are."""
        return tuple(self.tensor.stride()) or (1,)

    @property
    def rows(self) -> int:
        """How many rows it has, where all dimensions but the last are rows."""
        return math.prod(self.shape[:-1])

    def index(self, offset: int, is_inside: bool = True) -> tuple[int, ...] | None:
        """Return the index of the element that lies so many elements behind the first one.

        Args:
            offset: how many.
            is_inside: whether the index has to be that of an element; else the largest dimension may run over.
        """
        index = [0] * len(self.shape)
        for dimension in self._by_stride():
            index[dimension], offset = divmod(offset, self.strides[dimension])
        if offset or (is_inside and not all(0 <= i < n for i, n in zip(index, self.shape, strict=True))):
            return None
        return tuple(index)

    def move(self, offset: int) -> tuple[int, ...]:
        """Return by how much an index changes from one lane to the next, which is so many elements further."""
        change = [0] * len(self.shape)
        for dimension in self._by_stride():
            if abs(offset) >= self.strides[dimension]:
                change[dimension], offset = divmod(offset, self.strides[dimension])
        return tuple(change)

    def cell(self, index: Sequence[int]) -> Cell:
        """Return the row and the column of an index."""
        row = 0
        for i, size in zip(index[:-1], self.shape[:-1], strict=True):
            row = row * size + i
        return row, index[-1]

    def _by_stride(self) -> list[int]:
        dimensions = [d for d, stride in enumerate(self.strides) if stride and (self.shape[d] > 1 or stride == 1)]
        return sorted(dimensions, key=lambda d: -self.strides[d])


@dataclass(frozen=True)
class Lanes:
    """Where the lanes of an access point to.

    Attributes:
        tensor: the number of the tensor.
        inside: for each lane, in order, whether it is active and points to an element.
        active: the indices of these lanes.
        masked: the cells where lanes that are masked off would lie, as far as that is known.
        outside: the offsets of active lanes that point to no element of the tensor.
        is_block: whether the active lanes lie in equal steps, and so form a block.
    """

    tensor: int
    inside: Array
    active: list[tuple[int, ...]]
    masked: list[Cell]
    outside: list[int]
    is_block: bool


def locate(pointers: Array, mask: Array, tensors: Sequence[Named], hints: Sequence[str]) -> Lanes:
    """Return where lanes point to.

    A lane that is masked off has an address too, but that lies in another row of the tensor, or past its end. It is
    drawn where the block has it: steps along the block's axes are the differences of addresses, and an active lane is
    the origin.

    Args:
        pointers: the address of each lane.
        mask: which lanes are active.
        tensors: the tensors that the kernel was given.
        hints: names in the statement, for lanes that point to no tensor.
    """
    at, is_active = pointers.reshape(pointers.shape or (1,)), mask.reshape(mask.shape or (1,))
    number = _tensor_of(at, is_active, tensors, hints)
    of = tensors[number]
    offsets = (at.astype(np.int64) - of.tensor.data_ptr()) // of.tensor.element_size()
    indices = {lane: of.index(int(offsets[lane])) for lane in np.ndindex(at.shape)}
    inside = np.array([bool(is_active[lane]) and indices[lane] is not None for lane in indices]).reshape(mask.shape)
    active = {lane: index for lane, index in indices.items() if is_active[lane] and index is not None}
    blocked = _blocked(of, offsets, active)
    masked = []
    for lane, index in blocked.items():
        # In three dimensions, a row past a matrix's last one would lie in the next matrix
        runs_over = len(of.shape) > 2 and not 0 <= index[-2] < of.shape[-2]
        if not is_active[lane] and min(index) >= 0 and not runs_over:
            masked.append(of.cell(index))
    outside = [int(offsets[lane]) for lane in indices if is_active[lane] and indices[lane] is None]
    return Lanes(number, inside, [*active.values()], masked, outside, bool(blocked))


def _tensor_of(at: Array, is_active: Array, tensors: Sequence[Named], hints: Sequence[str]) -> int:
    """Return the number of the tensor that most lanes point to; else one that the statement names, or the nearest."""

    def score(number: int) -> tuple[int, int, bool, float]:
        named = tensors[number]
        first, size = named.tensor.data_ptr(), named.tensor.element_size()
        extent = sum((n - 1) * stride for n, stride in zip(named.shape, named.strides, strict=True)) + 1
        points_here = (at >= first) & (at < first + extent * size)
        distance = abs(int(at.flat[0]) - first)
        is_named = any(hint.removesuffix("_ptr") == named.name for hint in hints)
        return int((points_here & is_active).sum()), int(points_here.sum()), is_named, -distance

    return max(range(len(tensors)), key=score)


def _blocked(
    of: Named, offsets: Array, active: dict[tuple[int, ...], tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the index of every lane, masked ones included; nothing if the lanes do not lie in equal steps."""
    moves = []
    for axis, count in enumerate(offsets.shape):
        steps = np.diff(offsets, axis=axis)
        if count > 1 and not (steps == steps.flat[0]).all():
            return {}
        moves.append(of.move(int(steps.flat[0])) if count > 1 else (0,) * len(of.shape))
    if not active:
        return {}
    lane, index = next(iter(active.items()))
    origin = [i - sum(p * move[d] for p, move in zip(lane, moves, strict=True)) for d, i in enumerate(index)]
    blocked = {
        lane: tuple(o + sum(p * move[d] for p, move in zip(lane, moves, strict=True)) for d, o in enumerate(origin))
        for lane in np.ndindex(offsets.shape)
    }
    return blocked if all(blocked[lane] == index for lane, index in active.items()) else {}
