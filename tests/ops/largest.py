"""What the k largest of a row have to be: shared by the tests of the top-k ops."""

# ruff: noqa: N806 - a row has N elements, as in the recipes

from collections.abc import Callable
from typing import Any

import torch
from case import Draw, Exact, Refused, bits
from hypothesis import strategies as st
from inputs import DEVICE, sizes


def rising(x: torch.Tensor) -> torch.Tensor:
    """Return rows of which each element is the largest so far."""
    N = x.shape[-1]
    return (torch.arange(N, device=x.device) - N // 2).expand(x.shape)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "any": None,
    "ties": lambda x: (2 * x).round(),
    "rising": rising,
    "falling": lambda x: -rising(x),
    "equal": torch.zeros_like,
}


def rows(draw: Draw, shape: tuple[int, ...], k: int, kind: str) -> tuple[torch.Tensor, int]:
    """Make rows of some kind."""
    return draw(*shape, of=KINDS[kind]), k


def largest(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest and their indices, of equals the lowest; -0.0 equals 0.0, and NaN is the largest.

    On the CPU: on a GPU, torch.sort of rows beyond some length puts NaN with a sign bit last,
    https://github.com/pytorch/pytorch/issues/190781.
    """
    row = x.cpu()
    indices = torch.sort(row, dim=-1, descending=True, stable=True).indices
    indices = indices[..., :k] if x.ndim else indices
    return row.gather(-1, indices).to(x.device), indices.to(x.device)


def exact(x: torch.Tensor, k: int) -> list[Exact]:
    """Return values and indices."""
    values, indices = largest(x, k)
    return [Exact(values), Exact(indices, dtype=torch.int64)]


def exact_gradient(grad: torch.Tensor, x: torch.Tensor, k: int) -> list[Exact]:
    """Return the gradient of rows: that of the values, each at its index."""
    return [Exact(torch.zeros_like(x).scatter(-1, largest(x, k)[1], grad))]


def special(draw: Draw) -> list[tuple[torch.Tensor, int]]:
    """Make NaN and zeros of either sign, and rows with little or nothing but -inf; no number else is positive."""
    inputs = []
    for N in (150, 37):
        x = torch.linspace(-3, -1, 7 * N, dtype=torch.float64, device=DEVICE).view(7, N)
        x[0, 9::16], x[1, 30], x[1, 34], x[1, 36] = -0.0, torch.nan, -torch.nan, torch.inf
        x[0, 4::16], x[2], x[3, : N - 5] = 0.0, -torch.inf, -torch.inf
        x[4, ::2], x[5] = -torch.nan, torch.nan
        x[6, 20:30], x[6, 35] = torch.finfo(draw.dtype).max, -torch.finfo(draw.dtype).max
        x = x.to(draw.dtype)
        inputs += [(x, 7), (x[:, 3:8], 5)]
    return inputs


def shapes(block: int, most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Sizes with rows of up to so many elements, of any kind."""
    leads, kinds = st.sampled_from([(), (1,), (0,), (3,), (2, 2), (9,)]), st.sampled_from(["any", "ties"])
    return sizes(block, most).flatmap(
        lambda N: st.tuples(leads.map(lambda lead: (*lead, N)), st.integers(0, min(N, 9)), kinds)
    )


# No dimension, no rows, no columns, and none or all of a row's elements
EDGES = [((), 0, "any"), ((), 1, "any"), ((0, 5), 3, "any"), ((4, 0), 0, "any"), ((2, 7), 0, "any"), ((0,), 0, "any")]
EDGES += [((1, k), k, "any") for k in (1, 2, 33, 128)]


def refused(name: str, longest: int, limit: str) -> list[Refused]:
    """Return the calls of an op that raise, given the longest row that it takes and what it says of longer ones."""
    return [
        Refused(lambda draw: (draw(2, 200).int(), 3), TypeError, rf"{name} takes a float tensor, not torch\.int32"),
        *(
            Refused(
                lambda draw, k=k: (draw(2, 200), k),
                ValueError,
                f"{name} takes k from 0 to the row's length 200, and up to 128, not {k}",
            )
            for k in (-1, 201, 129)
        ),
        Refused(lambda draw: (draw().expand(longest + 1), 1), ValueError, f"{name} takes rows of up to {limit}"),
    ]


OF_ALL = {
    "arguments": rows,
    "exact": exact,
    "small": ((2, 6), 3, "any"),
    "reference": largest,
    "special": special,
    "gradients": exact_gradient,
    "second_gradients": True,
}


def assert_copied(op: Callable[[torch.Tensor, int], Any], dtype: torch.dtype) -> None:
    """Assert that values are elements to the bit, to the sign of a zero; a GPU may give one NaN for another."""
    for x, k in special(Draw(dtype)):
        values, indices = op(x, k)
        assert torch.equal(*(bits(t.masked_fill(t.isnan(), 0)) for t in (values, x.gather(-1, indices))))
