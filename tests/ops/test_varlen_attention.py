"""The op of the recipe Variable-length attention."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, assert_close, check, in_float64
from compiled import Ask, compiled, graphs
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly
from torch.nn.functional import pad

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/varlen_attention.py"
Lengths = tuple[int, ...]


def cu(lengths: Lengths | list[int]) -> torch.Tensor:
    """Return where sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


class Options(NamedTuple):
    """What a call has beside tensors and lengths.

    Attributes:
        window: how many keys a query sees before and after its own; -1 is all.
        softcap: of scores, or 0.
        slopes: "heads" or "batch", as what alibi_slopes are for; None is none.
        sinks: whether each head has one.
        unused: how many rows of queries and of keys follow each sequence, and are not used; None is none.
        rows: whether each sequence has a row of its own, of one length, in tensors of four dimensions.
        DV: the dimension of values; None is D.
    """

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: str | None = None
    sinks: bool = False
    unused: tuple[Lengths, Lengths] | None = None
    rows: bool = False
    DV: int | None = None


def arguments(
    draw: Draw,
    queries: Lengths,
    keys: Lengths | None,
    heads: tuple[int, int],
    D: int,
    causal: bool = False,
    scale: float | None = None,
    slack: int = 0,
    options: Options = Options(),  # noqa: B008 - it cannot be changed
) -> tuple[Any, ...]:
    """Make q, k and v of sequences, and what is known of them: some longest length, too; None is as many keys."""
    sides = [queries, queries if keys is None else keys]
    wholes = sides
    if options.unused:
        wholes = [
            tuple(length + more for length, more in zip(side, unused, strict=True))
            for side, unused in zip(sides, options.unused, strict=True)
        ]
    if options.rows:
        wholes = [(max(side),) * len(side) for side in sides]
    shapes = [(len(side), side[0]) if options.rows else (sum(side),) for side in wholes]
    dimensions = (heads[0], D), (heads[1], D), (heads[1], options.DV or D)
    q, k, v = (draw(*shapes[place > 0], *dimensions[place]) for place in range(3))
    most = (max(side, default=0) + slack for side in sides)
    used: list[torch.Tensor | None] = [None, None]
    if wholes != sides:
        used = [torch.tensor(side, dtype=torch.int32, device=q.device) for side in sides]
    of_heads = (len(queries), heads[0]) if options.slopes == "batch" else (heads[0],)
    slopes = draw(*of_heads, dtype=torch.float32, of=lambda x: x.abs() / 4) if options.slopes else None
    sinks = draw(heads[0]) if options.sinks else None
    places = [cu(side).to(q.device) for side in wholes]
    return q, k, v, *places, *most, causal, scale, *options.window, options.softcap, slopes, sinks, *used


def of_backward(draw: Draw, *size: Any) -> tuple[Any, ...]:
    """Make a gradient, and what the forward took and returned."""
    q, k, v, *known = arguments(draw, *size)
    out, lse = (right.value for right in exact(*in_float64((q, k, v, *known))))
    do = draw(*out.shape)
    return do, q, k, v, out.to(q.dtype).contiguous(), lse.to(accumulator(q.dtype)), *known


def of_public(draw: Draw, *size: Any) -> tuple[Any, ...]:
    """Make arguments for the public function, which takes both ends of a window as one."""
    made = arguments(draw, *size)
    return *made[:9], made[9:11], *made[11:], True


def attended(
    of_q: list[torch.Tensor],
    of_k: list[torch.Tensor],
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor | None,
) -> Iterator[list[torch.Tensor]]:
    """Yield what each sequence has of some tensors, as (heads, tokens, D); keys for each head of queries."""
    of_q, of_k = ([t.flatten(0, -3) for t in side] for side in (of_q, of_k))
    group = of_q[0].shape[1] // of_k[0].shape[1]
    of_k = [t.repeat_interleave(group, dim=1) for t in of_k]
    parts = []
    for side, places, used in ((of_q, cu_q, used_q), (of_k, cu_k, used_k)):
        lengths = (places.diff() if used is None else used).tolist()
        for t in side:
            split = t.split(places.diff().tolist())
            parts.append([part[:length] for part, length in zip(split, lengths, strict=True)])
    yield from ([part.transpose(0, 1) for part in sequence] for sequence in zip(*parts, strict=True))


def whole(parts: list[torch.Tensor], places: torch.Tensor, unused: float = 0.0) -> torch.Tensor:
    """Return the results of sequences, (..., tokens, D), one after the other with the rows that are not used."""
    lengths = places.diff().tolist()
    padded = [pad(t, (0, 0, 0, n - t.shape[-2]), value=unused) for t, n in zip(parts, lengths, strict=True)]
    return torch.cat(padded, dim=-2)


class Scores(NamedTuple):
    """What scores follow from, beside queries and keys: as the op takes it."""

    causal: bool = False
    scale: float | None = None
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: torch.Tensor | None = None

    def of(self, a: torch.Tensor, b: torch.Tensor, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of a sequence, of which the last query is beside the last key, and their derivative."""
        s = a @ b.mT * self.factor(a)
        derivative = torch.ones_like(s)
        if self.softcap:
            tanh = (s / self.softcap).tanh()
            s, derivative = self.softcap * tanh, 1 - tanh.square()
        queries, keys = (torch.arange(t.shape[1], device=s.device) for t in (a, b))
        distance = queries[:, None] + len(keys) - len(queries) - keys
        if self.slopes is not None:
            slopes = self.slopes if self.slopes.ndim == 1 else self.slopes[sequence]
            s = s - slopes[:, None, None] * distance.abs()
        right = 0 if self.causal else self.right
        hidden = ((distance < -right) & (right >= 0)) | ((distance > self.left) & (self.left >= 0))
        return s.masked_fill(hidden, -torch.inf), derivative

    def factor(self, a: torch.Tensor) -> float:
        """Return what a product of a query and a key is multiplied by."""
        return a.shape[2] ** -0.5 if self.scale is None else self.scale

    def most(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the sums of the magnitudes of what the scores of each query add up, at the most."""
        most = pad(self.factor(a) * (a.abs() @ b.abs().mT), (0, 1)).amax(-1) + self.softcap
        return most if self.slopes is None else most + self.slopes.max() * (a.shape[1] + b.shape[1])


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *asked: Any,
) -> list[Exact]:
    """Return the attention by its formula, and the log-sum-exp of scores; a query that sees nothing has 0 and inf.

    A weight is rounded to the dtype of v. A score is a sum along a head, and of their exponentials there is a sum.
    """
    scores, (sinks, *used) = Scores(*asked[:6]), asked[6:] or (None, None, None)
    results = []
    for sequence, (a, b, c) in enumerate(attended([q], [k, v], cu_q, cu_k, *used)):
        s, _ = scores.of(a, b, sequence)
        lse = s.logsumexp(-1)
        if sinks is not None:
            lse = lse.logaddexp(sinks[:, None])
        p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        results.append((p @ c, p @ c.abs(), lse[..., None], 1 + scores.most(a, b)[..., None]))
    results = results or [tuple(q.new_zeros(q.shape[-2], 0, n) for n in (v.shape[-1], v.shape[-1], 1, 1))]
    places = cu_q if len(cu_q) > 1 else cu_q.new_zeros(2)
    values = (0.0, 0.0, -torch.inf, 0.0)
    out, sums, lse, terms = (
        whole(list(parts), places, value) for parts, value in zip(zip(*results, strict=True), values, strict=True)
    )
    out, sums = (t.transpose(0, 1).reshape(*q.shape[:-1], v.shape[-1]) for t in (out, sums))
    lse, most = lse.masked_fill(lse == -torch.inf, torch.inf) / math.log(2), terms / math.log(2)
    roundings = 64 + q.shape[-1] + longest(cu_k)
    return [
        Exact(out, sums + out.abs(), narrow=sums),
        Exact(lse[..., 0], most[..., 0], accumulator, roundings=roundings),
    ]


def exact_public(*given: Any) -> list[Exact]:
    """Return the attention, and the log-sum-exp to the base e, which is -inf for a query that sees nothing."""
    *asked, (left, right), softcap, slopes, sinks, used_q, used_k, _ = given
    out, lse = exact(*asked, left, right, softcap, slopes, sinks, used_q, used_k)
    value = lse.value.masked_fill(lse.value == torch.inf, -torch.inf) * math.log(2)
    assert lse.terms is not None
    terms, q = lse.terms, given[0]
    if q.ndim == 4:
        value, terms = (t.unflatten(1, q.shape[:2]).transpose(0, 1) for t in (value, terms))
    return [out, lse._replace(value=value, terms=terms, made_by_torch=True)]


def longest(places: torch.Tensor) -> int:
    """Return the length of the longest sequence."""
    return max(places.diff().tolist(), default=0)


def exact_gradients(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *asked: Any,
) -> list[Exact]:
    """Return the gradients of q, k, v and sinks, and what each adds up if none cancels.

    A probability, or its product with a difference, is rounded to the dtype of q.
    """
    scores, (sinks, *used) = Scores(*asked[:6]), asked[6:] or (None, None, None)
    results, of_sinks = [], [q.new_zeros(2, q.shape[-2])]
    pieces = attended([q, do, out, lse.T[..., None].view(*q.shape[:-1], 1)], [k, v], cu_q, cu_k, *used)
    for sequence, (a, d, o, of_a, b, c) in enumerate(pieces):
        s, derivative = scores.of(a, b, sequence)
        p, scale = (s / math.log(2) - of_a).exp2(), scores.factor(a)
        delta, most = (o * d).sum(-1, keepdim=True), (o * d).abs().sum(-1, keepdim=True)
        ds = scale * derivative * p * (d @ c.mT - delta)
        terms = scale * derivative * p * (d.abs() @ c.abs().mT + most)
        results.append(
            (
                torch.stack([ds @ b, terms @ b.abs()]),
                torch.stack([ds.mT @ a, terms.mT @ a.abs()]),
                torch.stack([p.mT @ d, p.mT @ d.abs()]),
            )
        )
        if sinks is not None:
            power = (sinks[:, None, None] / math.log(2) - of_a).exp2()
            of_sinks.append(torch.stack([-(power * delta).sum((1, 2)), (power * most).sum((1, 2))]))
    results = results or [tuple(q.new_zeros(2, q.shape[-2], 0, t.shape[-1]) for t in (q, k, v))]
    sides = [places if len(places) > 1 else places.new_zeros(2) for places in (cu_q, cu_k, cu_k)]
    dq, dk, dv = (  # (2, heads, tokens, D)
        whole(list(parts), places) for parts, places in zip(zip(*results, strict=True), sides, strict=True)
    )
    dk, dv = (both.unflatten(1, (k.shape[-2], q.shape[-2] // k.shape[-2])).sum(2) for both in (dk, dv))
    pairs = [both.transpose(1, 2).reshape(2, *t.shape) for both, t in ((dq, q), (dk, k), (dv, v))]
    if sinks is None:
        last = Exact(q.new_zeros(0), dtype=accumulator, made_by_torch=True)
    else:
        value, terms = sum(of_sinks)
        last = Exact(value, terms, made_by_torch=True)
    return [*(Exact(value, terms, narrow=terms) for value, terms in pairs), last]


def exact_autograd(do: torch.Tensor, *taken: Any) -> list[Exact]:
    """Return the gradients of q, k and v, and of sinks where there are some."""
    out, lse = exact(*taken)
    gradients = exact_gradients(do, *taken[:3], out.value, lse.value, *taken[3:])
    return gradients if taken[13] is not None else gradients[:3]


def of_list(
    _: Draw, lengths: Lengths, other: Lengths, BLOCK: int, down: bool = False, slack: int = 0, used: str = ""
) -> tuple[Any, ...]:
    """Make what the list of tiles follows from; the longest length may be too long, or too short.

    What is used of a side is all that counts, if it is known.
    """
    known = [
        torch.tensor(side, dtype=torch.int32, device=DEVICE) if name in used else None
        for name, side in (("own", lengths), ("other", other))
    ]
    sides = [
        cu(side) if some is None else cu([length + 5 for length in side])
        for side, some in zip((lengths, other), known, strict=True)
    ]
    return *sides, sum(lengths), max(lengths) + slack, BLOCK, down, *known


def exact_list(
    cu_lengths: torch.Tensor,
    other: torch.Tensor,
    total: int,
    longest: int,
    BLOCK: int,
    down: bool,
    used: torch.Tensor | None,
    used_other: torch.Tensor | None,
) -> list[Exact]:
    """Return each tile once, longest work first, and idle entries; tiles past the end of a list too short are lost.

    A sequence has one ragged tile at the most, and no more tiles than the longest one.
    """
    tokens = (cu_lengths.diff() if used is None else used).tolist()
    work = (other.diff() if used_other is None else used_other).tolist()
    tiles = [-(-length // BLOCK) for length in tokens]
    order = sorted(range(len(tokens)), key=lambda seq: (-work[seq], seq))
    rows = [[seq, block] for seq in order for block in range(tiles[seq])[:: -1 if down else 1]]
    slots = min(total // BLOCK + len(tokens), len(tokens) * -(-longest // BLOCK))
    rows = [*rows, *[[0, -1]] * slots][:slots]
    return [Exact(torch.tensor(rows, dtype=torch.int32, device=cu_lengths.device).view(-1, 2), dtype=torch.int32)]


def changed(
    draw: Draw, *changes: tuple[int, Callable[[Any], Any]], D: int = 16, scale: float | None = None
) -> tuple[Any, ...]:
    """Make arguments of the public function, of which some were changed."""
    made = list(of_public(draw, (2, 4), None, (4, 4), D, False, scale))
    for place, change in changes:
        made[place] = change(made[place])
    return tuple(made)


def refused(error: type[Exception], text: str, *calls: list[tuple[int, Callable[[Any], Any]]]) -> list[Refused]:
    """Return calls that raise as some of their arguments were changed."""
    return [Refused(lambda draw, call=call: changed(draw, *call), error, f"varlen_attention {text}") for call in calls]


def each(change: Callable[[Any], Any], *places: int) -> list[tuple[int, Callable[[Any], Any]]]:
    """Return a change of some arguments."""
    return [(place, change) for place in places]


KINDS = "takes q, k and v of one dtype, and cu_seqlens and seqused of int32, .*, not .*"
FORMS = r"takes q of \(tokens, heads, D\), .*, with D and DV up to 256, .*, not \("
REFUSED = [
    *refused(TypeError, r"takes float tensors, not torch\.int32", each(torch.Tensor.int, 0, 1, 2)),
    *refused(TypeError, f"{KINDS}torch.bfloat16", each(torch.Tensor.bfloat16, 1)),
    *refused(TypeError, f"{KINDS}torch.int64", each(torch.Tensor.long, 3)),
    *refused(ValueError, FORMS, each(lambda x: x[:, :3], 1, 2), each(lambda x: x[:, :0], 1, 2)),
    *refused(ValueError, FORMS, each(lambda x: x[:, :2], 2), each(lambda x: x[..., :8], 1)),
    *refused(ValueError, FORMS, each(lambda x: x[..., :0], 2), each(lambda x: x.repeat(1, 1, 17), 2)),
    *refused(ValueError, FORMS, each(lambda _: cu([1, 1]), 13), each(lambda _: cu([1, 1]), 14)),
    *refused(TypeError, f"{KINDS}torch.int64", each(lambda _: cu([1]).long(), 13), each(lambda _: cu([1]).long(), 14)),
    *refused(ValueError, "takes a window_size of two numbers, .*, not -2 and 0", each(lambda _: (-2, 0), 9)),
    *refused(ValueError, "takes a softcap from 0 on, not", *(each(lambda _, x=x: x, 10) for x in (-1.0, math.inf))),
    *refused(TypeError, r"takes alibi_slopes of floats .*torch\.int32", each(lambda _: cu([1]), 11)),
    *refused(TypeError, r"takes sinks of floats .*torch\.int32", each(lambda _: cu([1]), 12)),
    *refused(
        ValueError, r"takes alibi_slopes of .*, not of \(3, 4\)", each(lambda _: torch.ones(3, 4, device=DEVICE), 11)
    ),
    *refused(ValueError, r"takes sinks of .*, not of \(2, 4\)", each(lambda _: torch.ones(2, 4, device=DEVICE), 12)),
    *refused(
        ValueError,
        "has no gradient for alibi_slopes",
        each(lambda _: torch.ones(4, device=DEVICE, requires_grad=True), 11),
    ),
    *refused(ValueError, FORMS, each(lambda x: x[0], 1, 2), each(lambda x: x[:3], 2)),
    *refused(ValueError, FORMS, each(lambda places: places[:2], 4), each(lambda places: places[None], 4)),
    *(Refused(partial(changed, D=D), ValueError, f"varlen_attention {FORMS}") for D in (0, 257)),
    *(
        Refused(partial(changed, scale=scale), ValueError, f"varlen_attention takes a scale above 0, not {scale}")
        for scale in (0.0, -1.0, math.nan)
    ),
]

# Lengths of queries and of keys, heads of both, D, whether it is causal, a scale, and how much too long the longest is:
# as many keys, more, and fewer; sequences without keys, without queries and without both; tiles of every kind
# With 126 keys more than queries, or 2 fewer, a block that all see begins one after the last that needs a mask.
SIZES = [((37, 0, 1, 20), None, (2, 1), 24, True), ((1, 3, 64, 5, 131), (200, 1, 129, 131, 129), (2, 1), 16, True)]
SIZES += [((70, 33), (1, 64), (1, 1), 40, True, 0.5), ((65, 31), None, (4, 2), 100, False, None, 1)]
SIZES += [
    ((33, 40), (50, 17), (2, 2), 64, False, 1e-3, 10**6),
    ((5, 0, 3), (0, 4, 0), (3, 3), 16),
    ((), (), (2, 2), 16),
]
SIZES += [((35, 0), (70, 0), (2, 1), 100, True), ((5, 0, 3), (0, 4, 0), (2, 1), 64, True), ((0, 0), None, (1, 1), 8)]
SIZES += [((130, 0, 1, 65), None, (2, 2), D, causal) for D in (16, 64, 128, 256) for causal in (False, True)]
# Each option alone and together: windows before, after and around, of less and more than a block; more queries than
# keys; caps; slopes for a head and for a sequence; sinks, of queries without keys, too; rows not used; values
# of another dimension
WITH_OPTIONS = [
    ((150, 0, 40), (170, 3, 25), (2, 1), 16, False, None, 0, Options((20, -1), slopes="heads", sinks=True)),
    ((150, 40), (100, 60), (2, 2), 24, False, None, 0, Options((70, 3), unused=((3, 0), (0, 70)), DV=40)),
    ((140, 1, 0), None, (4, 2), 16, True, None, 0, Options((63, -1), sinks=True)),
    ((40, 33), (1, 70), (1, 1), 16, True, 0.7, 0, Options(softcap=1.5, rows=True, unused=((0, 7), (69, 0)))),
    ((20, 5, 0), (70, 0, 9), (2, 1), 16, False, None, 0, Options((-1, 30), 2.0, "batch", True, rows=True, DV=100)),
    ((70, 33), None, (2, 1), 64, True, None, 0, Options(slopes="batch")),
    ((30, 70), (65, 5), (3, 3), 16, False, None, 0, Options((0, 0), 3.0, unused=((64, 1), (1, 0)))),
    ((9, 66), (70, 66), (2, 1), 100, True, None, 3, Options((32, 5), 2.0, "heads", True, ((1, 2), (3, 4)), DV=16)),
    ((130,), (200,), (2, 1), 64, False, None, 0, Options((128, 64))),
    ((200, 3), (130, 200), (2, 1), 64, False, None, 0, Options((64, 128), sinks=True, slopes="heads")),
]
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65]) | st.integers(0, 70)
PAIRS = st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4).map(lambda pairs: tuple(zip(*pairs, strict=True)))
SHAPES = st.tuples(
    st.lists(LENGTHS, min_size=1, max_size=4).map(lambda lengths: (tuple(lengths), None)) | PAIRS,
    st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    st.sampled_from([16, 32, 40, 64, 80, 128]),
    st.booleans(),
    st.sampled_from([None, 1e-3, 1, 0.5]),
    st.integers(0, 9),
).map(lambda drawn: (*drawn[0], *drawn[1:]))
OPTIONS = st.builds(
    Options,
    st.tuples(*[st.sampled_from([-1, -1, 0, 1, 31, 32, 33, 64]) | st.integers(0, 70)] * 2),
    # Where a cap is far below the scores, their derivative is too small for float32.
    st.sampled_from([0.0, 5.0, 20.0]),
    st.sampled_from([None, "heads", "batch"]),
    st.booleans(),
    unused=st.none(),
    rows=st.booleans(),
    DV=st.sampled_from([None, 16, 40]),
)
SHAPES_WITH_OPTIONS = st.builds(lambda shape, options: (*shape, options), SHAPES, OPTIONS)
# Of own tokens and of others: a tile's, whether the last of a sequence is the first, and what is wrong with the longest
LISTS = [((5, 0, 33, 20, 33), (7, 9, 0, 7, 9), 16), ((40, 100, 7), (40, 100, 7), 16, False, -84)]
LISTS += [((70, 1, 64), (3, 3, 3), 64, True, 10**6), ((0, 0), (1, 2), 16, True), ((4800,), (1,), 16, True, 1)]
LISTS += [((5, 0, 33, 20, 33), (7, 9, 0, 7, 9), 16, True, 0, used) for used in ("own", "other", "own and other")]
LISTS += [(tuple(n % 40 for n in range(260)), tuple(n % 3 for n in range(260)), 16)]
LISTS_DRAWN = st.builds(
    lambda pairs, *rest: (*zip(*pairs, strict=True), *rest),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=300),
    st.sampled_from([16, 64]),
    st.booleans(),
    st.sampled_from([0, 1, 10**6]),
)
FORWARD = Case(
    "varlen_attention_forward",
    arguments,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=((1, 0, 2), (1, 1, 2), (2, 1), 2, True),
    in_layouts=((5, 0, 17), None, (2, 1), 24, True),
    many=(tuple(n % 67 for n in range(400)), tuple(n % 61 for n in range(400)), (8, 4), 64, True),
    shapes=SHAPES,
    # On a GPU a score adds up to 128 products one after another. Then come an exponential and a sum.
    roundings=lambda out: 512 if out.dtype == torch.float64 else 192,
    # What is lost of weights that are too small for the dtype of v
    floor=lambda dtype: 256 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
    gradients=exact_autograd,
    with_gradients=(0, 1, 2, 13),
)
BACKWARD = replace(
    FORWARD,
    call="varlen_attention_backward",
    arguments=of_backward,
    exact=exact_gradients,
    roundings=lambda out: 1024 if out.dtype == torch.float64 else 256,
    gradients=None,
    autocast=None,
)
# First: with a wrong list, the others may read anywhere, and end the process.
CONTRACT = [
    Case(
        "_varlen_attention_list",
        of_list,
        exact_list,
        sizes=LISTS,
        small=((1, 0, 2), (1, 1, 2), 16),
        many=(tuple(n % 67 for n in range(4000)), tuple(n % 61 for n in range(4000)), 16),
        shapes=LISTS_DRAWN,
        layouts=["contiguous"],
        dtypes=[torch.float32],
        plain=True,
    ),
    replace(
        FORWARD,
        call="varlen_attention",
        arguments=of_public,
        exact=exact_public,
        sizes=[*SIZES[:2], WITH_OPTIONS[4]],
        shapes=None,
        layouts=["contiguous"],
        gradients=None,
        plain=True,
        contiguous=False,
        refused=REFUSED,
    ),
    FORWARD,
    BACKWARD,
    *(
        replace(
            case,
            name=f"{case.call} with options",
            sizes=WITH_OPTIONS,
            small=((1, 0, 2), (1, 1, 2), (2, 1), 2, True, None, 0, WITH_OPTIONS[7][-1]._replace(unused=None, DV=3)),
            in_layouts=WITH_OPTIONS[4],
            shapes=SHAPES_WITH_OPTIONS,
            autocast=None,
        )
        for case in (FORWARD, BACKWARD)
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_scores(taken: ModuleType, dtype: torch.dtype) -> None:
    """Scores in the thousands, all of them negative too: no power of 2 overflows where it counts."""
    places = cu([70, 33])
    for start, end in ((0, 1000), (-1000, -900), (-900, -1000)):
        q, v, do = (Layout("contiguous", seed).make((103, 1, 64), dtype, DEVICE) for seed in range(3))
        k = torch.linspace(start, end, 103, dtype=dtype, device=DEVICE)[:, None, None].expand(103, 1, 64)
        x = [t.requires_grad_() for t in (torch.ones_like(q), k.clone(), v)]
        for causal in (False, True):
            out = taken.varlen_attention(*x, places, places, 70, 70, causal)
            right = exact(*in_float64((*x, places, places, 70, 70, causal)))[0].value
            torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-2 if dtype == torch.float32 else 1e-9)
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(out, x, do))


@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_where_it_is(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """In one sequence it reaches no other, neither forward nor backward; nor does what lies around a head."""
    lengths = (17, 20, 0, 40)
    for case in (FORWARD, BACKWARD):
        for start, end in ((0, 17), (17, 37), (37, 77)):
            made = list(case.arguments(Draw(dtype), lengths, None, (2, 2), 24, causal))
            for place, x in enumerate(made[: 4 if case is BACKWARD else 3]):
                around = torch.full((87, 4, 40), torch.nan, dtype=dtype, device=DEVICE)
                made[place] = around[5:-5, 1:3, 8:-8].copy_(x)
                made[place][start:end] = torch.nan
            check(case, taken, dtype, tuple(made))


def test_log_sum_exp_has_no_gradient(taken: ModuleType) -> None:
    """The op's second result is for the backward only."""
    q, k, v, *known = arguments(Draw(torch.float32), (3,), None, (1, 1), 16)
    out, lse = taken.varlen_attention_forward(q.requires_grad_(), k, v, *known)
    assert (out.requires_grad, lse.requires_grad) == (True, False)


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel is right, whatever length is claimed, and the op is with every list; so is PyTorch's loop."""
    lengths = [1, 140, 0, 128, 31]
    q, k, v, *known = arguments(Draw(torch.float16), tuple(lengths), None, (2, 2), 64, True)
    doubles = in_float64((q, k, v))
    right, _ = exact(*doubles, *known)
    for claimed in (140, 1000):
        assert_close(FORWARD, q.dtype, recipe.packed(q, k, v, known[0], claimed), right)
    torch.testing.assert_close(recipe.one_by_one(*doubles, lengths), right.value)
    torch.testing.assert_close(recipe.reference(*doubles, lengths, lengths, True), right.value)
    BLOCK_M = recipe.VARLEN_ATTENTION_TILES["forward"][64][0]
    for tiles in recipe.orders(lengths, BLOCK_M).values():
        given = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
        out, _ = recipe._varlen_attention_launch(q, k, v, *known, listed=lambda *_, given=given: given)
        assert_close(FORWARD, q.dtype, out, right)


def at_launch(taken: ModuleType, kind: str, dtype: str, D: int, causal: bool) -> dict[str, object]:
    """Return what the launcher passes on for strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    BLOCK_M, BLOCK_N, num_warps, _ = taken.VARLEN_ATTENTION_TILES[kind][max(64, BLOCK_D)]
    known = {
        "dtype": dtype,
        "num_warps": num_warps,
        "multiples": ["TOTAL", *(f"stride_{tensor}{along}" for tensor in "qkvd" for along in "th")],
        **dict.fromkeys(("list_ptr", "cu_q_ptr", "cu_k_ptr"), "i32"),
        "lse_ptr": "fp32",
        "GROUP": 1,
        "D": D,
        "DV": D,
        "SCALE": D**-0.5 * math.log2(math.e),
        **dict.fromkeys(("CAP", "LEFT")),
        "RIGHT": 0 if causal else None,
        "ACC": tl.float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_D,
        **dict.fromkeys(("used_q_ptr", "used_k_ptr", "slopes_ptr", "ROW_Q", "ROW_K", "jump_q", "jump_k", "jump_v")),
    }
    of_one: dict[str, object] = {"delta_ptr": "fp32", "jump_d": None}
    if kind == "forward":
        of_one = {"LOWEST": torch.finfo(torch.float32).min, "sinks_ptr": None}
    return known | of_one


def kernels(taken: ModuleType) -> dict[str, object]:
    """Return the three kernels that attend, by the names of their tiles."""
    names = {"forward": "", "dq": "_dq", "dkdv": "_dkdv"}
    return {kind: getattr(taken, f"_varlen_attention{name}_kernel") for kind, name in names.items()}


def codes(taken: ModuleType) -> dict[str, tuple[bool, set[str], bool]]:
    """Return whether rows are copied 16 bytes at a time, the matrix instructions, and whether exp2 is one."""
    results = {}
    for kind, kernel in kernels(taken).items():
        for D in (64, 128):
            text = compiled(kernel, **at_launch(taken, kind, "fp16", D, True)).asm["ptx"]
            widths = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
            results[f"{kind} {D}"] = (
                "0x10" in widths,
                set(re.findall(r"(wgmma|mma)\.\S*?m\d+", text)),
                "ex2.approx" in text,
            )
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Copies of 16 bytes, Hopper's instruction in all products, and one instruction for an exponential."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert results == {f"{kind} {D}": (True, {"wgmma"}, True) for kind in ("forward", "dq", "dkdv") for D in (64, 128)}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a call that is differentiated."""
    x = torch.randn(40, 4, 64, dtype=torch.float16, requires_grad=True)
    k = torch.randn(40, 2, 64, dtype=torch.float16, requires_grad=True)
    places = torch.tensor([0, 15, 40], dtype=torch.int32)
    return graphs(lambda q, k, cu: recipe.varlen_attention(q, k, k, cu, cu, 25, 25, True), x, k, places)


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Two kernels forward and four backward, and nothing is copied."""
    (traced_graphs,) = on_h100(gallery / RECIPE, traced)
    counts = [sum(call == "triton_kernel_wrapper_functional" for call in graph) for graph in traced_graphs]
    assert counts == [2, 4]
    for graph in traced_graphs:
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(18)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last sequence is right."""
    tokens = 2**20 + 40
    q = torch.zeros(tokens, 16, 128, dtype=torch.float16, device=DEVICE)
    q[-40:] = torch.randn(40, 16, 128, device=DEVICE)
    lengths = [*[2**14] * 64, 40]
    keys = [1] * 65
    k = torch.randn(65, 16, 128, device=DEVICE).half()
    out = taken.varlen_attention(q, k, k, cu(lengths), cu(keys), 2**14, 1)
    expected = k[-1:].expand(40, 16, 128)  # a query that sees one key has its value
    torch.testing.assert_close(out[-40:], expected)


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("D", [16, 32, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_long(taken: ModuleType, dtype: torch.dtype, D: int, causal: bool) -> None:
    """Many blocks of any lengths."""
    for case in (FORWARD, BACKWARD):
        for queries, keys in (((1500, 0, 1, 777), None), ((1, 301, 640), (1499, 300, 5))):
            check(case, taken, dtype, case.arguments(Draw(dtype), queries, keys, (4, 2), D, causal))


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("keys past the end are seen", "    seen = offs_n < LK\n", "    seen = offs_n < LK + 64\n"),
    ("tokens of the next sequence are loaded", "mask = mask & (offs < L)", "mask = mask & (offs < L + 64)"),
    ("padding of a head is read", "    mask = offs_d < D\n", "    mask = offs_d < D + 8\n"),
    (
        "queries see the next key",
        "seen & (offs_n <= offs_m + LK - LQ + RIGHT)",
        "seen & (offs_n <= offs_m + LK - LQ + RIGHT + 1)",
    ),
    (
        "the first query sees one key",
        "seen & (offs_n <= offs_m + LK - LQ + RIGHT)",
        "seen & (offs_n <= offs_m + RIGHT)",
    ),
    ("the diagonal begins late", "tl.minimum(seen + 1, LK)", "tl.minimum(seen + BLOCK_N, LK)"),
    ("sums of before not rescaled", "acc = acc * rescale\n", "acc = acc * 1.0\n"),
    ("the difference is not subtracted", "ds = p * (dp - delta[None, :])", "ds = p * dp"),
    ("backward, queries see the next key", "offs_n <= offs + LK - LQ + RIGHT", "offs_n <= offs + LK - LQ + RIGHT + 1"),
    (
        "backward, the diagonal begins late",
        "some = some // BLOCK_M * BLOCK_M",
        "some = tl.cdiv(some, BLOCK_M) * BLOCK_M",
    ),
    ("backward, the diagonal ends early", "(block + 1) * BLOCK_N - 1 + LQ - LK", "block * BLOCK_N + LQ - LK"),
    ("one member of a group counts", "of_q = head * GROUP + member", "of_q = head * GROUP"),
    ("equally long sequences share places", "(other == work) & (offs < seq)", "(other == work) & (offs < 0)"),
    ("what is left over says nothing", "range(count + seq, SLOTS, BATCH)", "range(count + seq, SLOTS - 1, BATCH)"),
    ("a window sees one key more", "(offs_n >= offs_m + LK - LQ - LEFT)", "(offs_n >= offs_m + LK - LQ - LEFT - 1)"),
    ("a window begins late", "first = tl.maximum(seen, 0)", "first = tl.maximum(seen + BLOCK_N, 0)"),
    ("a window needs no mask too early", "tl.maximum(seen + BLOCK_M - 1, 0)", "tl.maximum(seen, 0)"),
    ("backward, a window sees one key more", "offs_n >= offs + LK - LQ - LEFT", "offs_n >= offs + LK - LQ - LEFT - 1"),
    ("backward, a window needs a mask too late", "tl.maximum(seen + 1, 0), LQ)", "tl.maximum(seen + BLOCK_N, 0), LQ)"),
    ("backward, a window ends early", "tl.maximum(seen + BLOCK_N, 0), LQ)", "tl.maximum(seen + 1, 0), LQ)"),
    ("the cap has no derivative", "derivative = 4.0 * power * part * part", "derivative = 1.0"),
    ("later keys get no bias", "tl.abs(distance)", "tl.maximum(distance, 0)"),
    (
        "backward, all sequences have the first one's slopes",
        "slopes_ptr + seq * HEADS * GROUP + of_q",
        "slopes_ptr + of_q",
    ),
    ("a sink does not count", "total = tl.exp2(sink - m)", "total = 0.0 * tl.exp2(sink - m)"),
    ("a sink's gradient is that of its weight", "(torch.exp2(log2 - lse) * delta)", "torch.exp2(log2 - lse)"),
    ("rows that are not used stay", "        out.zero_()\n", "        pass\n"),
    ("gradients of queries that are not used stay", "        dq.zero_()\n", "        pass\n"),
    ("gradients of values that are not used stay", "        dv.zero_()\n", "        pass\n"),
    ("rows lie one after the other", "jump = row[0] - t.shape[1] * along", "jump = 0 * along"),
    ("tiles past the list are written", "(offs < tiles) & (first + offs < SLOTS)", "offs < tiles"),
]
