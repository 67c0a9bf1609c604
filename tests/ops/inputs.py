"""Inputs as they come in practice: strategies for shapes, and tensors in every layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def first_quickly(*values: Any) -> list[Any]:
    """Return the values of a parameter, of which a quick run of the tests takes the first alone."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.thorough) for value in values[1:])]


NAMES = ["contiguous", "offset", "transposed", "strided", "expanded"]
LAYOUTS = ("contiguous", "apart", *NAMES[1:], "padded", "unfolded")  # those of the contract
GAPS = [1, 2, 4, 8, 3, 16]  # elements between rows that lie apart


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory, and the seed of its values; small, so that a failing example prints well."""

    name: str
    seed: int

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of random values in this layout (as far as the shape has room for it)."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.name == "offset":  # by one element, so that no address is aligned to 16 bytes
            return values((math.prod(shape) + 1,), dtype, generator).to(device)[1:].view(shape)
        if self.name == "transposed" and shape:
            return values(shape[::-1], dtype, generator).to(device).permute(*reversed(range(len(shape))))
        if self.name == "strided" and shape:
            return values((*shape[:-1], 3 * shape[-1]), dtype, generator).to(device)[..., 1::3]
        if self.name == "apart" and shape:
            gap = GAPS[self.seed % len(GAPS)]
            room = values((*shape[:-1], shape[-1] + gap), dtype, generator).to(device)
            return room[..., gap // 2 :][..., : shape[-1]]
        if self.name == "padded" and shape:  # rows of any length begin at multiples of 16 bytes, with a gap between
            room = shape[-1] + 32 - shape[-1] % 16
            return values((*shape[:-1], room), dtype, generator).to(device)[..., : shape[-1]]
        if self.name == "unfolded" and len(shape) > 1 and math.prod(shape):  # each row begins one after the row before
            return values((*shape[:-2], sum(shape[-2:]) - 1), dtype, generator).to(device).unfold(-1, shape[-1], 1)
        if self.name == "expanded" and shape:
            axis = self.seed % len(shape)
            narrow = (*shape[:axis], 1, *shape[axis + 1 :])
            return values(narrow, dtype, generator).to(device).expand(shape)
        return values(shape, dtype, generator).to(device)


def like(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value in the dtype and layout of a tensor, which may be overwritten; or apart, if its rows overlap."""
    if 0 in t.stride():
        value = value.to(t.dtype)[tuple(slice(0, None if stride else 1) for stride in t.stride())]
        return value.expand(t.shape)
    steps = [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
    overlaps = len(set(steps)) < len(steps)
    return value.to(t.dtype) if overlaps else t.copy_(value)


def values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random values: a normal distribution, all integers of the dtype, or truth values."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator)


def layouts(names: Sequence[str] = NAMES) -> st.SearchStrategy[Layout]:
    """Ways to lay out a tensor."""
    return st.builds(Layout, name=st.sampled_from(names), seed=st.integers(0, 2**31))


def sizes(block: int, most: int) -> st.SearchStrategy[int]:
    """Sizes up to `most`, above all those at which a kernel with blocks of `block` elements may go wrong."""
    edges = [0, 1, 2, 3, 7, 16, 17, block - 1, block, block + 1, 2 * block, 2 * block + 1, 3 * block - 5, most]
    return st.sampled_from([size for size in edges if 0 <= size <= most]) | st.integers(0, most)


@st.composite
def shapes(draw: st.DrawFn, block: int, most: int) -> tuple[int, ...]:
    """Shapes of any rank, up to `most` elements in all."""
    size = draw(sizes(block, most))
    rank = draw(st.integers(0, 4))
    if rank == 0:
        return ()
    shape = [1] * rank
    for axis in draw(st.permutations(range(rank))):
        extent = draw(st.integers(1, max(1, min(size, 64))))
        shape[axis] = extent
        size = size // extent if size else 0
    shape[draw(st.integers(0, rank - 1))] *= size
    return tuple(shape)


def amid(t: torch.Tensor) -> torch.Tensor:
    """Return the same tensor between NaNs: an op that reads beside it gives NaN."""
    around = torch.full((t.numel() + 60000,), torch.nan, dtype=t.dtype, device=DEVICE)
    around[30000:-30000] = t.flatten()
    return around[30000:-30000].view(t.shape)
