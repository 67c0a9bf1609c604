"""What attention has to be, its log-sum-exp and its gradients: shared by the tests of the ops that compute it.

A score adds up products, is scaled and has the row's maximum or log-sum-exp subtracted: a weight is off by roundings of
all that. It is rounded to the dtype of the case for its product with the values, and so is the gradient of a score.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from case import Draw, Exact, Refused, accumulator
from hypothesis import strategies as st
from inputs import sizes

Change = Callable[[torch.Tensor], torch.Tensor]
LEAST = 2.0**-14  # a weight that is smaller has fewer bits in float16


class Weights(NamedTuple):
    """Those of a softmax.

    Attributes:
        p: the weights, 0 in a row that sees nothing.
        terms: of each, times its score's magnitudes.
        lse: the log-sum-exp of each row in base 2; infinite where it sees nothing.
        most: the largest of a row's magnitudes.
    """

    p: torch.Tensor
    terms: torch.Tensor
    lse: torch.Tensor
    most: torch.Tensor


def scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return scores, -inf where a query does not see a key, the magnitudes that each adds up, and the scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = for_heads(k, q)
    s, terms = q @ k.mT * scale, q.abs() @ k.mT.abs() * abs(scale)
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s, terms, scale


def for_heads(t: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return keys or values for each head of queries."""
    return t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def of_group(t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the sum over the heads of queries that share a head of keys."""
    return t.unflatten(1, (k.shape[1], t.shape[1] // k.shape[1])).sum(2)


def weights(s: torch.Tensor, terms: torch.Tensor, sinks: torch.Tensor | None = None) -> Weights:
    """Return what softmax makes of scores, and of a sink for each head, which has no part in the result."""
    sinks = s.new_full(s.shape[1:2], -torch.inf) if sinks is None else sinks
    sinks = sinks[:, None, None].expand(*s.shape[:3], 1)
    s, terms = torch.cat([s, sinks], -1), torch.cat([terms, sinks.abs()], -1)
    m = s.amax(-1, keepdim=True).clamp(min=-1e300)
    total = (s - m).exp().sum(-1, keepdim=True)
    p = (s - m).exp() / total.masked_fill(total == 0, 1)
    lse = ((m + total.log()) * math.log2(math.e)).masked_fill(total == 0, torch.inf)[..., 0]
    most = terms.masked_fill(p == 0, 0).amax(-1)
    return Weights(p[..., :-1], rounded(p, terms + most[..., None])[..., :-1], lse, most)


def rounded(p: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Return the terms of weights, given those of their scores, which are infinite where a weight may be 0."""
    return (p * (1 + terms)).masked_fill(p == 0, 0)


def exact_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> list[Exact]:
    """Return attention, and the log-sum-exp of each row."""
    return of_softmax(weights(*scores(q, k, causal, scale)[:2]), for_heads(v, q))


def of_softmax(softmax: Weights, v: torch.Tensor) -> list[Exact]:
    """Return the same, given weights and values of each head of queries."""
    out = Exact(softmax.p @ v, softmax.terms @ v.abs(), narrow=(softmax.p + LEAST) @ v.abs())
    return [out, Exact(softmax.lse, 1 + softmax.lse.abs() + softmax.most, accumulator)]


def exact(*arguments: Any) -> list[Exact]:
    """Return attention."""
    return exact_with_lse(*arguments)[:1]


def exact_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> list[Exact]:
    """Return the gradients of queries, keys and values, given any result and log-sum-exp."""
    s, terms, scale = scores(q, k, causal, scale)
    p = torch.exp2(s * math.log2(math.e) - lse[..., None])
    return of_weights(grad, q, k, v, out, p, rounded(p, terms + lse.abs()[..., None]), scale)


def of_weights(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    p: torch.Tensor,
    terms: torch.Tensor,
    scale: float,
    slope: float | torch.Tensor = 1.0,
    lost: float | torch.Tensor = 0.0,
) -> list[Exact]:
    """Return the same, given weights and their terms, the slope of each score, of up to 1, and what results lose."""
    k_by_head, v = for_heads(k, q), for_heads(v, q)
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * slope
    ds_terms = terms * (grad.abs() @ v.mT.abs() + (grad * out).abs().sum(-1, keepdim=True))
    ds = ds * scale, ds_terms * abs(scale), (ds.abs() + p * lost + LEAST) * abs(scale)
    of_q = [t @ keys for t, keys in zip(ds, (k_by_head, k_by_head.abs(), k_by_head.abs()), strict=True)]
    of_k = [of_group(t.mT @ rows, k) for t, rows in zip(ds, (q, q.abs(), q.abs()), strict=True)]
    of_v = [of_group(t.mT @ rows, k) for t, rows in ((p, grad), (terms, grad.abs()), (p + LEAST, grad.abs()))]
    return [Exact(value, size, narrow=narrow) for value, size, narrow in (of_q, of_k, of_v)]


def exact_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> list[Exact]:
    """Return the gradients of queries, keys and values, given a result that is rounded to the dtype of the case."""
    s, terms, scale = scores(q, k, causal, scale)
    softmax, v_by_head = weights(s, terms), for_heads(v, q)
    lost = (grad.abs() * (softmax.p @ v_by_head.abs())).sum(-1, keepdim=True)
    return of_weights(grad, q, k, v, softmax.p @ v_by_head, softmax.p, softmax.terms, scale, lost=lost)


def filled(first: int, end: int, value: float) -> Change:
    """Return what fills some queries or keys with a number."""
    return lambda t: t.index_fill(2, torch.arange(first, end, device=t.device), value)


def near(value: float) -> Change:
    """Return what takes some queries or keys near a number."""
    return lambda t: t * 0.01 + value


def positive(t: torch.Tensor) -> torch.Tensor:
    """Return queries above 1."""
    return t.abs() + 1


def rising(t: torch.Tensor) -> torch.Tensor:
    """Return keys of even numbers, each larger than the one before."""
    return 2 * torch.arange(t.shape[2], dtype=t.dtype, device=t.device)[:, None].expand(t.shape)


def falling(t: torch.Tensor) -> torch.Tensor:
    """Return the same from the last to the first."""
    return rising(t).flip(2)


# Keys without a weight, and queries that see none but such keys; a query with NaN, and a key
SPECIAL = [
    (1, 1, 1, 150, 170, 32, causal, None, torch.abs, filled(*hidden, -torch.inf))
    for hidden in ((0, 90), (0, 170), (60, 140))
    for causal in (True, False)
]
SPECIAL += [(1, 1, 1, 300, 300, 32, True, None, filled(7, 8, torch.nan))]
SPECIAL += [(1, 1, 1, 300, 300, 32, True, None, None, filled(290, 291, torch.nan))]
# Scores in the thousands that rise or fall along the keys: the maximum changes in every block, or never
SPECIAL += [(1, 1, 1, 3, 300, 64, False, None, torch.ones_like, along) for along in (rising, falling)]


def of_heads(draw: Draw, B: int, heads: int, L: int, D: int, of: Change | None = None) -> torch.Tensor:
    """Make heads; where there are several in a batch, they lie side by side, as a projection leaves them."""
    return draw(B, L, heads, D).transpose(1, 2) if B > 1 else draw(B, heads, L, D, of=of)


def arguments(
    draw: Draw,
    B: int,
    heads: int,
    shared: int,
    LQ: int,
    LK: int,
    D: int,
    causal: bool = False,
    scale: float | None = None,
    of_q: Change | None = None,
    of_k: Change | None = None,
) -> tuple[Any, ...]:
    """Make queries, keys and values, of which the first two may become others."""
    q, k, v = (of_heads(draw, B, *size) for size in ((heads, LQ, D, of_q), (shared, LK, D, of_k), (shared, LK, D)))
    return q, k, v, causal, scale


def of_backward(draw: Draw, B: int, heads: int, shared: int, LQ: int, *size: Any) -> tuple[Any, ...]:
    """Make a gradient, and what a forward takes and returns."""
    grad = of_heads(draw, B, heads, LQ, size[1])
    q, k, v, causal, scale = arguments(draw, B, heads, shared, LQ, *size)
    out, lse = (result.value for result in exact_with_lse(q.double(), k.double(), v.double(), causal, scale))
    return grad, q, k, v, draw(*out.shape, of=lambda _: out), lse.to(accumulator(draw.dtype)), causal, scale


def shapes(heads: list[int], most: int = 140) -> st.SearchStrategy[tuple[Any, ...]]:
    """Sizes of any lengths and groups of heads, whose size is one of these; causal or not, of any scale."""
    groups = st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)])
    lengths = st.tuples(sizes(32, most), sizes(64, most))
    drawn = st.tuples(
        st.integers(0, 2), groups, lengths, st.sampled_from(heads), st.booleans(), st.sampled_from([None, 0.3])
    )
    return drawn.map(lambda drawn: (drawn[0], *drawn[1], *drawn[2], *drawn[3:]))


def misfits() -> list[Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Return what makes, of queries, keys and values of shapes that do not fit each other."""
    return [
        lambda q: (q, q[:, :3], q[:, :3]),
        lambda q: (q, q[:, :0], q[:, :0]),
        lambda q: (q, q, q[:, :2]),
        lambda q: (q, q[..., :8], q[..., :8]),
        lambda q: (q, q[:1], q[:1]),
        lambda q: (q, q[0], q[0]),
        lambda q: (q, q, q[:, :, :2]),
    ]


def refused(name: str, *sizes: int, takes: str = "float tensors, not", text: str = "D up to 256, not") -> list[Refused]:
    """Return the calls of an op that raise, and what is said: other dtypes, misfits, and heads of other sizes."""

    def shapes_of(make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> str:
        return re.escape(", ".join(str(tuple(t.shape)) for t in make(torch.empty(2, 4, 3, 16))))

    return [
        Refused(lambda draw: (draw(2, 4, 3, 16).int(),) * 3, TypeError, rf"{name} takes {takes} torch\.int32"),
        Refused(
            lambda draw: (draw(2, 4, 3, 16).half(), draw(2, 4, 3, 16).bfloat16(), draw(2, 4, 3, 16).half()),
            TypeError,
            f"{name} takes one dtype",
        ),
        *(
            Refused(
                lambda draw, make=make: make(draw(2, 4, 3, 16)), ValueError, rf"{name} takes q of .*{shapes_of(make)}$"
            )
            for make in misfits()
        ),
        *(Refused(lambda draw, D=D: (draw(1, 1, 3, D),) * 3, ValueError, rf"{name} takes .*{text}") for D in sizes),
    ]
