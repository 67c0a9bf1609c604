"""The op of the recipe Attention with your own score: values and gradients of each variant."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attentions
import pytest
import torch
from attentions import for_heads, of_softmax, of_weights, refused, rounded, scores, weights
from case import Case, Draw, Exact, Refused, accumulator, check, in_float64
from compiled import Ask, graphs
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
RECIPE = "attention/attention_variants.py"
each_kind = pytest.mark.parametrize("dtype", FLOATS, ids=str)
Named = tuple[Any, ...]
Score = Named | list[Named]


def scored(
    q: torch.Tensor,
    k: torch.Tensor,
    score: Score,
    span: Named,
    scale: float | None,
    bottom_right: bool,
    seqlens_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return the scores of a variant, -inf where a query does not see a key, their magnitudes and their slopes."""
    s, terms, _ = scores(q, k, False, scale)
    LQ, LK = q.shape[2], k.shape[2]
    i, j = torch.arange(LQ, device=q.device)[:, None], torch.arange(LK, device=q.device)
    ends = torch.full((len(q),), LK, device=q.device) if seqlens_k is None else seqlens_k.long().clamp(max=LK)
    starts = torch.zeros_like(ends) if leftpad_k is None else leftpad_k.long()
    ends, starts = (t[:, None, None, None] for t in (ends, starts))
    i = i + (ends - LQ) * bottom_right
    slope = torch.ones_like(s)
    for name, *values in score if isinstance(score, list) else [score]:
        if name.endswith("alibi"):
            distance = (i - j).abs() if name == "symmetric_alibi" else i - j
            bias = values[0][..., None, None] * distance
            s, terms = s - bias, terms + bias.abs()
        elif name == "softcap":
            tanh = torch.tanh(s / values[0])
            s, terms, slope = values[0] * tanh, terms + values[0], slope * (1 - tanh**2)
    begin, end = {
        "all": lambda: (0 * i, 0 * i + LK),
        "causal": lambda: (0 * i, i + 1),
        "window": lambda size: (i + 1 - size, i + 1),
        "local": lambda left, right: (i - left if left >= 0 else 0 * i, i + right + 1 if right >= 0 else 0 * i + LK),
        "documents": lambda begins: (begins.long()[:LQ, None], i + 1),
    }[span[0]](*span[1:])
    hidden = (j < begin) | (j >= end) | (j < starts) | (j >= ends)
    return s.masked_fill(hidden, -torch.inf), terms, slope


def exact_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> list[Exact]:
    """Return the result, and the log-sum-exp of each row."""
    score, span, sinks, *options = named(*asked)
    return of_softmax(weights(*scored(q, k, score, span, *options)[:2], sinks), for_heads(v, q))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *variant: Any) -> list[Exact]:
    """Return the result, and the log-sum-exp to base e where it is asked for."""
    *asked, return_lse = split(*variant)
    out, lse = exact_with_lse(q, k, v, *asked)
    natural = (lse.value * math.log(2)).masked_fill(lse.value == torch.inf, -torch.inf)
    return [out, lse._replace(value=natural, made_by_torch=True)] if return_lse else [out]


def exact_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *asked: Any,
) -> list[Exact]:
    """Return the gradients, given any result and log-sum-exp, and the sum of each query's products for them.

    The gradient of the log-sum-exp is like that of one more column, where all values are 1 and all results 0.
    """
    *asked, grad_lse = asked
    D_V = v.shape[-1]
    if grad_lse is not None:
        more = grad_lse.masked_fill(lse == torch.inf, 0)[..., None] * math.log2(math.e)
        grad, v = torch.cat([grad, more], -1), torch.cat([v, torch.ones_like(v[..., :1])], -1)
        out = torch.cat([out, torch.zeros_like(more)], -1)
    score, span, _, scale, *options = named(*asked[:6], None, *asked[6:])
    s, terms, slope = scored(q, k, score, span, scale, *options)
    p = torch.exp2(s * math.log2(math.e) - lse[..., None])
    terms = rounded(p, terms + lse.abs()[..., None])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = grad * out if grad_lse is None else torch.cat([(grad * out)[..., :-1], -more], -1)
    delta = Exact(products.sum(-1), products.abs().sum(-1), accumulator)
    dq, dk, (dv, dv_terms, _, narrow, *_) = of_weights(grad, q, k, v, out, p, terms, scale, slope)
    return [dq, dk, Exact(dv[..., :D_V], dv_terms[..., :D_V], narrow=narrow[..., :D_V]), delta]


def exact_gradients(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any
) -> list[Exact]:
    """Return the gradients of queries, keys, values and, where there are some, of sinks."""
    out, lse = (result.value for result in exact_with_lse(q, k, v, *asked))
    *grads, delta = exact_backward(grad, q, k, v, out, lse, *asked[:6], *asked[7:], grad_lse)
    sinks = asked[6]
    if sinks is None:
        return grads
    base_2 = sinks[:, None] * math.log2(math.e)
    p = torch.exp2(base_2 - lse)
    terms = rounded(p, base_2.abs() + lse.abs()) * delta.terms
    return [*grads, Exact(-(p * delta.value).sum((0, 2)), terms.sum((0, 2)))]


def exact_gradients_natural(grad: torch.Tensor, *arguments: Any) -> list[Exact]:
    """Return the same for the function, whose log-sum-exp is to base e if there is one."""
    grad_lse, (q, k, v, *variant) = (arguments[0], arguments[1:]) if arguments[-1] else (None, arguments)
    return exact_gradients(grad, None if grad_lse is None else grad_lse * math.log(2), q, k, v, *split(*variant)[:-1])


def split(score: Score, span: Named, *options: Any) -> tuple[Any, ...]:
    """Return a variant as the op takes it: names, each with its tensors and its numbers."""
    parts = []
    for one in (score, span):
        names, tensors, numbers = [], [], []
        for name, *values in one if isinstance(one, list) else [one]:
            own = [value for value in values if isinstance(value, torch.Tensor)]
            names.append(f"{name}:{len(own)}:{len(values) - len(own)}" if isinstance(one, list) else name)
            tensors += own
            numbers += [value for value in values if not isinstance(value, torch.Tensor)]
        parts += ["|".join(names), tensors, numbers]
    return *parts, *options


def named(*asked: Any) -> tuple[Any, ...]:
    """Return a variant as the function takes it."""
    names, tensors, numbers, *span = asked[:6]
    if "|" not in names:
        return (names, *tensors, *numbers), (span[0], *span[1], *span[2]), *asked[6:]
    tensors, numbers, score = iter(tensors), iter(numbers), []
    for part in names.split("|"):
        name, *counts = part.split(":")
        score.append((name, *itertools.islice(tensors, int(counts[0])), *itertools.islice(numbers, int(counts[1]))))
    return score, (span[0], *span[1], *span[2]), *asked[6:]


def begins_of(lengths: Sequence[int], LQ: int) -> torch.Tensor:
    """Return where the document of each query begins, for documents of such lengths again and again."""
    begins, start = [], 0
    for length in itertools.cycle(lengths):
        if start >= max(LQ, 1):
            return torch.tensor(begins[: max(LQ, 1)], dtype=torch.int32, device=DEVICE)
        begins += [start] * length
        start += length
    raise AssertionError


def arguments(
    draw: Draw,
    B: int,
    heads: int,
    shared: int,
    LQ: int,
    LK: int,
    D: int,
    score: Score = ("plain",),
    span: Named = ("all",),
    sinks: float | None = None,
    scale: float | None = None,
    bottom_right: bool = False,
    D_V: int | None = None,
    seqlens_k: Sequence[int] | None = None,
    leftpad_k: Sequence[int] | None = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """Make queries, keys, values and a variant, of slopes, of documents' lengths, and of sinks about a number.

    Limits of keys are those of the first sequences, again and again.
    """
    q, k, v, _, scale = attentions.arguments(draw, B, heads, shared, LQ, LK, D, False, scale)
    if D_V is not None:
        v = attentions.of_heads(draw, B, shared, LK, D_V)
    limits = (
        None if limit is None else torch.tensor((limit * (B + 1))[:B], dtype=torch.int32, device=q.device)
        for limit in (seqlens_k, leftpad_k)
    )

    def with_slopes(name: str, *values: Any) -> Named:
        """Take numbers as the slopes of all sequences; of none, draw those of each sequence."""
        if not name.endswith("alibi"):
            return name, *values
        same = torch.tensor(values, device=q.device)[:heads]
        return name, same if values else draw(B, heads, dtype=torch.float32, of=lambda t: t.abs() / 4)

    score = [with_slopes(*one) for one in score] if isinstance(score, list) else with_slopes(*score)
    if span[0] == "documents":
        span = "documents", begins_of(span[1:], LQ).to(q.device)
    if sinks is not None:
        sinks = draw(heads, dtype=accumulator(draw.dtype), of=lambda t: t + sinks)
    return q, k, v, score, span, sinks, scale, bottom_right, *limits, return_lse


def of_the_op(draw: Draw, *size: Any) -> tuple[Any, ...]:
    """Make what the op behind the function takes."""
    q, k, v, *variant = arguments(draw, *size)
    return q, k, v, *split(*variant)[:-1]


def of_backward(draw: Draw, B: int, heads: int, shared: int, LQ: int, *size: Any) -> tuple[Any, ...]:
    """Make a gradient, and what a forward takes and returns."""
    q, k, v, *variant, with_lse = arguments(draw, B, heads, shared, LQ, *size)
    grad, asked = attentions.of_heads(draw, B, heads, LQ, v.shape[3]), split(*variant)
    out, lse = (result.value for result in exact_with_lse(*in_float64((q, k, v, *asked))))
    saved = draw(*out.shape, of=lambda _: out), lse.to(accumulator(draw.dtype))
    grad_lse = draw(B, heads, LQ, dtype=accumulator(draw.dtype)) if with_lse else None
    return grad, q, k, v, *saved, *asked[:6], *asked[7:], grad_lse


SCORES = [("plain",), ("alibi", 0.5, 0.25, 0.125, 0.0625), ("softcap", 1.5)]
DOCUMENTS = [("documents", 1, 40, 7), ("documents", 100)]
SPANS = [("all",), ("causal",), ("window", 1), ("window", 24), ("window", 10**6), *DOCUMENTS]
# First queries past the last key: broken, a span of all keys would go on for hours before a test says anything.
# Around the edges of tiles; queries that see nothing; no keys, no queries; sinks
SIZES = [(2, 2, 1, 90, 75, 16, SCORES[0], SPANS[3]), (1, 4, 2, 37, 45, 40, SCORES[1], SPANS[0], 0.0)]
SIZES += [(1, 2, 1, 75, 40, 16, SCORES[2], SPANS[3]), (1, 2, 1, 75, 90, 64, SCORES[2], DOCUMENTS[0], 0.0)]
SIZES += [(1, 2, 1, 37, 45, 16, ("alibi", 30.0, -30.0)), (1, 2, 1, 33, 0, 16, SCORES[0], SPANS[1], 0.5)]
SIZES += [(1, 2, 2, 65, 67, 100, SCORES[1], SPANS[1]), (1, 2, 1, 0, 33, 16, SCORES[2], SPANS[0])]
# Each score and each span
SIZES += [(1, 2, 1, 75, 90, 16, score, span, 0.0) for score in SCORES for span in SPANS]
SIZES += [(1, 2, 2, 40, 50, 32, SCORES[2], SPANS[0], None, scale) for scale in (0.0, -0.3, 1)]
SIZES += [(1, 2, 1, 40, 20, 16, SCORES[0], ("window", 5), sink) for sink in (30.0, -1000.0, -torch.inf)]
SIZES += [(2, 0, 2, 9, 9, 16), (0, 2, 1, 9, 9, 16), (1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 200, 100, SCORES[2], SPANS[3])]
SIZES += [(1, 2, 1, 129, 127, 100, SCORES[2], span) for span in (SPANS[0], ("window", 60), ("documents", 1, 90, 30))]
SIZES += [(1, 2, 1, *lengths, 256, SCORES[2], ("window", 60)) for lengths in ((127, 129), (130, 70))]
SIZES += [(1, 1, 1, 150, 200, D, SCORES[1], DOCUMENTS[1]) for D in (64, 80, 128, 256)]
# Several scores, slopes of each sequence, later keys, windows to both sides; aligned with the last query; other values;
# limits of keys past both ends, none left, and rows that see nothing; the log-sum-exp and its gradient
BOTH = [("softcap", 1.5), ("symmetric_alibi",)]
LOCAL = [("local", 20, 9), ("local", 0, 3), ("local", -1, 9), ("local", 9, -1), ("local", 10**6, 10**6)]
PLAIN, ALL, CAUSAL = ("plain",), ("all",), ("causal",)
SIZES_OF_OPTIONS: list[Named] = [
    (3, 4, 2, 37, 90, 16, BOTH, LOCAL[0], 0.0, None, True, 40, (70, 95, 0), (5, -3, 50), True),
    (2, 2, 1, 90, 37, 16, [("alibi", 0.5, 0.1), ("softcap", 1.5)], LOCAL[1], None, None, True, 1, None, (3, 40), True),
    (3, 2, 2, 70, 45, 16, ("alibi",), LOCAL[2], 0.5, 0.7, False, None, (45, 20, 1), None, False),
    (1, 2, 1, 45, 130, 40, ("symmetric_alibi", 0.5, 0.25), LOCAL[3], None, None, True, 16, (100,), (33,), True),
    (3, 2, 1, 40, 70, 16, PLAIN, CAUSAL, None, None, False, None, (70, 40, 10), (7, 35, 20), True),
    (2, 2, 1, 75, 33, 16, ("softcap", 1.5), ("window", 9), None, None, True, 70, (20, 33), None, False),
    (1, 2, 1, 75, 33, 16, [("softcap", 2.0), ("softcap", 1.0), PLAIN], ALL, None, None, True),
    (2, 2, 1, 40, 75, 16, [PLAIN, ("alibi",)], ALL, None, None, False, 20, (64, 65), (31, 32), True),
    *(
        (1, 2, 1, *lengths, 16, BOTH, span, None, None, True)
        for lengths, span in zip(((1, 90), (90, 1), (64, 64), (33, 70), (70, 33)), LOCAL, strict=True)
    ),
    (2, 2, 2, 0, 33, 16, BOTH, LOCAL[0], None, None, True, 20, (3, 9), None, True),
    (2, 2, 2, 33, 0, 16, BOTH, LOCAL[0], 0.0, None, True, 20, (3, 9), None, True),
    (2, 2, 2, 33, 50, 16, PLAIN, ("documents", 7, 20), 0.0, None, False, None, (30, 9), (10, 0), True),
    *(
        (2, 2, 1, 70, 100, *D, ("softcap", 1.5), CAUSAL, None, None, True, D_V, (95, 64), (33, 0), True)
        for *D, D_V in ((256, 64), (64, 256), (192, 128), (16, 100))
    ),
]
LENGTH = sizes(32, 70)
GROUPS = st.sampled_from([(1, 1), (2, 1), (4, 2)])
WHICH = st.tuples(st.sampled_from(SCORES), st.sampled_from(SPANS), st.sampled_from([None, 0.0]))
WITH_OPTIONS = st.tuples(
    st.sampled_from([*SCORES, BOTH, ("alibi",), ("symmetric_alibi",)]),
    st.sampled_from([*SPANS[:5], *LOCAL]),
    st.sampled_from([None, 0.0]),
    st.just(None),
    st.booleans(),
    st.sampled_from([None, 1, 24, 70]),
    *[st.none() | st.lists(st.integers(-2, 75), min_size=1, max_size=2).map(tuple)] * 2,
    st.booleans(),
)
SHAPES = st.tuples(st.integers(0, 2), GROUPS, LENGTH, LENGTH, st.sampled_from([16, 40, 64]), WHICH)
OF_ALL = {
    "small": (1, 2, 1, 3, 3, 2, SCORES[2], ("window", 2), 0.0),
    "in_layouts": (2, 2, 1, 37, 20, 20, SCORES[1], SPANS[3], 0.0),
    "many": (16, 24, 8, 263, 131, 24, SCORES[2], ("window", 100)),
    "shapes": SHAPES.map(lambda drawn: (drawn[0], *drawn[1], *drawn[2:5], *drawn[5])),
}
OF_OPTIONS = OF_ALL | {
    "small": (2, 2, 1, 2, 4, 2, BOTH, ("local", 2, 1), 0.0, None, True, 3, (4, 3), (1, 0), True),
    "in_layouts": (2, 2, 1, 37, 20, 20, BOTH, LOCAL[0], 0.0, None, True, 30, (20, 17), (0, 5), True),
    "many": (16, 24, 8, 131, 263, 24, BOTH, LOCAL[0], None, None, True, 40, (200, 263), (100, 0), True),
    "shapes": st.tuples(SHAPES, WITH_OPTIONS).map(lambda drawn: (drawn[0][0], *drawn[0][1], *drawn[0][2:5], *drawn[1])),
}


def variant(score: Score = ("plain",), span: Named = ("all",), *options: Any) -> Callable[[Draw], tuple[Any, ...]]:
    """Return what makes a call of a score and a span."""
    return lambda draw: (*(draw(2, 4, 3, 16) for _ in range(3)), score, span, *options)


CONTRACT = [
    Case(
        "attention_variants",
        arguments,
        exact,
        autocast="asked",
        sizes=SIZES[:3],
        plain=True,
        gradients=exact_gradients_natural,
        with_gradients=(0, 1, 2, 5),
        refused=[
            *refused("attention_variants", 0, 257),
            Refused(
                lambda draw: (*variant()(draw), draw(4).to("meta")), TypeError, "attention_variants takes .* one device"
            ),
            Refused(
                lambda draw: (*variant()(draw), draw(3)), ValueError, "attention_variants takes a sink for each head"
            ),
            Refused(variant([("plain",), ("linear",)]), ValueError, "attention_variants has no score 'linear'"),
            Refused(
                lambda draw: variant(("alibi", draw(4, 2)))(draw),
                ValueError,
                r"attention_variants takes slopes of \(heads,\) or \(batch, heads\), not \(4, 2\)",
            ),
            Refused(
                variant(("plain",), ("documents",), None, None, True),
                ValueError,
                "attention_variants takes no documents with bottom_right",
            ),
            *(
                Refused(
                    lambda draw, place=place, limit=limit: variant(PLAIN, ALL, None, None, False, *limit(place))(draw),
                    error,
                    f"attention_variants takes {name} of {text}",
                )
                for place, name in enumerate(("seqlens_k", "leftpad_k"))
                for limit, error, text in (
                    (lambda place: [None] * place + [torch.zeros(2, device=DEVICE).long()], TypeError, "int32, not"),
                    (
                        lambda place: [None] * place + [torch.zeros(3, device=DEVICE).int()],
                        ValueError,
                        r"\(batch,\), not",
                    ),
                )
            ),
            Refused(
                lambda draw: (draw(2, 4, 3, 16), draw(2, 4, 3, 16), draw(2, 4, 3, 257)),
                ValueError,
                "attention_variants takes .*D_v and D up to 256, not",
            ),
            Refused(variant("linear"), ValueError, "attention_variants has no score 'linear'"),
            Refused(variant(span=("past", 3)), ValueError, "attention_variants has no span 'past'"),
            Refused(
                lambda draw: variant(("alibi", draw(4).requires_grad_()))(draw),
                ValueError,
                "attention_variants has no gradient for what 'alibi' is given",
            ),
        ],
        **OF_ALL,
    ),
    Case(
        "attention_variants_with_lse",
        of_the_op,
        exact_with_lse,
        autocast="asked",
        sizes=SIZES,
        gradients=exact_gradients,
        with_gradients=(0, 1, 2, 9),
        **OF_ALL,
    ),
    Case("attention_variants_backward", of_backward, exact_backward, sizes=SIZES, contiguous=False, **OF_ALL),
    Case(
        "attention_variants",
        arguments,
        exact,
        name="attention_variants with options",
        autocast="asked",
        sizes=SIZES_OF_OPTIONS[:4],
        plain=True,
        gradients=exact_gradients_natural,
        with_gradients=(0, 1, 2, 5),
        **OF_OPTIONS,
    ),
    Case(
        "attention_variants_with_lse",
        of_the_op,
        exact_with_lse,
        name="attention_variants_with_lse with options",
        autocast="asked",
        sizes=SIZES_OF_OPTIONS,
        gradients=exact_gradients,
        with_gradients=(0, 1, 2, 9),
        **OF_OPTIONS,
    ),
    Case(
        "attention_variants_backward",
        of_backward,
        exact_backward,
        name="attention_variants_backward with options",
        sizes=SIZES_OF_OPTIONS,
        contiguous=False,
        **OF_OPTIONS,
    ),
]


def check_both(taken: ModuleType, dtype: torch.dtype, *size: Any) -> None:
    """Assert all of a forward and a backward at a size."""
    for case in CONTRACT[1:3]:
        check(case, taken, dtype, case.arguments(Draw(dtype), *size))


def heads_of(heads: int, shared: int, LQ: int, LK: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values, and a gradient."""
    draw = Draw(dtype)
    return draw(1, heads, LQ, D), draw(1, shared, LK, D), draw(1, shared, LK, D), draw(1, heads, LQ, D)


@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_small_tiles(taken: ModuleType, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU with little shared memory."""
    taken._attention_variants_tiles.cache_clear()
    monkeypatch.setattr(taken, "ATTENTION_VARIANTS_TILES", taken.ATTENTION_VARIANTS_SMALL)
    for lengths in ((70, 90), (129, 65)):
        check_both(taken, torch.float16, 1, 2, 1, *lengths, D, SCORES[1], ("window", 40))
    taken._attention_variants_tiles.cache_clear()


# Shared memory of a program, in bytes
GPUS = {"A100": 166_912, "H200": 232_448, "B200": 232_448, "RTX 4090": 101_376, "MI300": None}


@pytest.mark.parametrize("gpu", GPUS)
def test_which_tiles(taken: ModuleType, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs with less shared memory than Hopper's have the small ones."""
    room = GPUS[gpu]
    properties = {"shared_memory_per_block_optin": room} if room else {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
    table = taken.ATTENTION_VARIANTS_TILES if room == 232_448 else taken.ATTENTION_VARIANTS_SMALL
    for BLOCK_D, tiles in table.items():
        actual = taken._attention_variants_tiles.__wrapped__(torch.device("cuda"), BLOCK_D, 2)
        assert [tuple(tile[name] for name in names) for tile in actual] == tiles


def blocks_seen(begins: torch.Tensor, BLOCK_M: int, BLOCK_N: int) -> int:
    """Return how many blocks of keys the blocks of queries go along, from their first key to their last query."""
    final = [min(first + BLOCK_M, len(begins)) - 1 for first in range(0, len(begins), BLOCK_M)]
    starts = begins[::BLOCK_M].tolist()
    return sum(-(-(last + 1 - start) // BLOCK_N) for start, last in zip(starts, final, strict=True))


@each_kind
def test_skips(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that nobody sees are not computed, forward and in neither pass of the backward; a score counts them."""
    import triton
    import triton.language as tl

    @triton.jit
    def counting(s, batch, head, i, j, count):  # type: ignore[no-untyped-def]
        tl.atomic_add(count, 1)
        return s

    counting.fn.__globals__["tl"] = tl
    monkeypatch.setitem(taken.ATTENTION_VARIANTS_SCORES, "counting", (counting, None))
    begins = begins_of([90, 5, 120], 300)
    q, k, v, grad = heads_of(1, 1, 300, 300, 16, dtype)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    asked = "counting", [count], [], "documents", [begins], []
    out, lse = taken.attention_variants_with_lse(q, k, v, *asked, None, None)
    tiles = taken._attention_variants_tiles(q.device, 16, dtype.itemsize)
    along_keys = [blocks_seen(begins, tile["BLOCK_M"], tile["BLOCK_N"]) for tile in tiles[:2]]
    assert count.item() == along_keys[0]
    count.zero_()
    taken.attention_variants_backward(grad, q, k, v, out, lse, *asked, None)
    BLOCK_M, BLOCK_N = tiles[2]["BLOCK_M"], tiles[2]["BLOCK_N"]
    along_queries = 0
    for first, start in itertools.product(range(0, 300, BLOCK_M), range(0, 300, BLOCK_N)):
        final = min(first + BLOCK_M, 300) - 1
        along_queries += final >= start and begins[first].item() < start + BLOCK_N
    assert count.item() == along_keys[1] + along_queries


@each_kind
def test_masks_nothing_else(taken: ModuleType, dtype: torch.dtype) -> None:
    """A window as long as the keys is a causal mask, bit by bit; so is one document."""
    q, k, v, _ = heads_of(2, 1, 150, 150, 16, dtype)
    right = taken.attention_variants(q, k, v, span="causal")
    for span in (("window", 150), ("documents", begins_of([150], 150))):
        assert torch.equal(taken.attention_variants(q, k, v, span=span), right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around the inputs stays there."""
    around = torch.full((1, 60, 4, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[:, 5:45, 1:3, 8:88] = Layout("contiguous", 0).make((1, 40, 2, 80), dtype, DEVICE)
    x = around[:, 5:45, 1:3, 8:88].transpose(1, 2)
    for span, D in ((("all",), 80), (("window", 9), 80), (("all",), 40)):
        asked = split(("plain",), span, None, None, False, None, None)
        given = x[..., :D], x[..., :D], x
        check(CONTRACT[1], taken, dtype, (*given, *asked))
        out, lse = taken.attention_variants_with_lse(*given, *asked)
        check(CONTRACT[2], taken, dtype, (x, *given, out, lse, *asked[:6], *asked[7:], None))


@each_kind
def test_padding_may_be_nan(taken: ModuleType, dtype: torch.dtype) -> None:
    """What lies before and after a sequence's keys has no influence, not even NaN, and gradients of 0."""
    q, k, v, grad = heads_of(2, 1, 40, 150, 16, dtype)
    limits = [torch.tensor([limit], dtype=torch.int32, device=DEVICE) for limit in (111, 17)]
    for t in (k, v):
        t[..., :17, :] = t[..., 111:, :] = torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = taken.attention_variants(*leaves, "plain", "causal", None, None, True, *limits)
    grads = torch.autograd.grad(out, leaves, grad)
    alone = [t.detach()[:, :, 17 * (t is not q) : 111].requires_grad_() for t in leaves]
    expected = taken.attention_variants(*alone, "plain", "causal", None, None, True)
    rights = torch.autograd.grad(expected, alone, grad)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close([grads[0], *(t[:, :, 17:111] for t in grads[1:])], [*rights])
    assert all(t[:, :, rows].eq(0).all() for t in grads[1:] for rows in (slice(17), slice(111, None)))


def test_flex_attention(taken: ModuleType) -> None:
    """PyTorch's flex_attention, not compiled, gives the same."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, _ = heads_of(2, 1, 150, 150, 32, torch.float32)
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float32, device=DEVICE)
    begins = begins_of([40, 3, 60], 150)

    def biased(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (j >= begins[i])

    mask = create_block_mask(mask_mod, 1, 1, 150, 150, DEVICE.type)
    with pytest.warns(UserWarning, match="without torch.compile"):  # slow
        expected = flex_attention(q, k, v, biased, mask, enable_gqa=True)
    actual = taken.attention_variants(q, k, v, ("alibi", slopes), ("documents", begins))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_layouts_of_gradients(taken: ModuleType) -> None:
    """Gradients lie in memory as their tensors do, where those are dense."""
    x = torch.randn(2, 9, 3, 16, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (x, x, x.contiguous())]
    dq, dk, _ = torch.autograd.grad(taken.attention_variants(*leaves).sum(), leaves)
    assert dq.stride() == dk.stride() == x.stride()


def test_own_variants(recipe: ModuleType) -> None:
    """The page's: a prefix, and a span that moves back, which a score has to hide instead."""
    q, k, v, _ = heads_of(2, 1, 70, 70, 16, torch.float64)
    i, j = torch.arange(70, device=DEVICE)[:, None], torch.arange(70, device=DEVICE)
    for score, span, seen in (
        ("plain", ("prefix", 20), (j <= i) | (j < 20)),
        (("shrinking", 60), "all", j < 60 - i),
    ):
        out = recipe.attention_variants(q, k, v, score, span)
        s = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(out, s.softmax(-1).nan_to_num() @ v.repeat_interleave(2, 1))


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so is the reference; `tiles_of` counts what it draws."""
    q, k, v, _ = heads_of(2, 2, 200, 200, 64, torch.float16)
    slopes = torch.tensor([0.5, 0.1], device=DEVICE)
    right = recipe.alibi_window_torch(*(t.double() for t in (q, k, v)), slopes.double(), 100)
    for step, *_ in recipe.STEPS.values():
        out = step(q, k, v, slopes, 100)
        torch.testing.assert_close(out.double(), right, rtol=0, atol=2**-9 * v.abs().max().item())
    actual, _ = recipe.reference(q, k, v, ("alibi", slopes), ("window", 100))
    torch.testing.assert_close(actual, right)
    assert recipe.tiles_of(torch.zeros(256, dtype=torch.int32)) == (16, 10, 4)


def traced(recipe: ModuleType) -> list[list[list[str]]]:
    """Return the graphs of calls with tensors and numbers, forward and backward; one has all options."""
    q = torch.randn(2, 4, 40, 64, dtype=torch.float16, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)

    def call(q: Any, slopes: Any, sinks: Any) -> Any:
        return recipe.attention_variants(q * 2, q, q, ("alibi", slopes), ("window", 30), sinks)

    def with_options(q: Any, slopes: Any, sinks: Any, limits: Any) -> Any:
        several = [("softcap", 20.0), ("symmetric_alibi", slopes)]
        options = {"bottom_right": True, "seqlens_k": limits, "leftpad_k": limits, "return_lse": True}
        return recipe.attention_variants(q * 2, q, q[..., :30], several, ("local", 9, 3), sinks, **options)

    limits = torch.zeros(2, dtype=torch.int32)
    return [graphs(call, q, torch.ones(4), sinks), graphs(with_options, q, torch.ones(2, 4), sinks, limits)]


def test_torch_compile_calls_the_op(gallery: Path, on_h100: Ask) -> None:
    """One op forward, one backward; no graph break."""
    (calls,) = on_h100(gallery / RECIPE, traced)
    for forward, backward in calls:
        assert sum("attention_variants" in call for call in forward) == 1
        assert sum("attention_variants_backward" in call for call in backward) == 1


def compiled_tiles(recipe: ModuleType) -> dict[str, tuple[bool, bool]]:
    """Return of two lengths of a head whether the code has Hopper's instruction, and one exponential more for a cap."""
    import triton
    import triton.language as tl

    results = {}
    for D in (64, 128):
        codes = []
        for score in ("plain", "softcap"):
            given = (tl.constexpr(50.0),) if score == "softcap" else ()
            x, lse = torch.zeros(1, 4, 16, D, dtype=torch.float16), torch.zeros(16)
            M, N, num_warps, num_stages = recipe.ATTENTION_VARIANTS_TILES[D][0]
            kernel = recipe._attention_variants_kernel.warmup(
                *(x, x, x, x, lse, lse, given, (tl.constexpr(1024),), None, None, 1024, 1024, 4),
                *(4096 * D, 1024 * D, D) * 3,
                SCORE=recipe.ATTENTION_VARIANTS_SCORES[score][0],
                SPAN=recipe.ATTENTION_VARIANTS_SPANS["window"],
                BOTTOM_RIGHT=False,
                GROUP=1,
                D=D,
                D_V=D,
                SCALE=D**-0.5,
                ACC=tl.float32,
                LOWEST=torch.finfo(torch.float32).min,
                BLOCK_M=M,
                BLOCK_N=N,
                BLOCK_D=max(16, triton.next_power_of_2(D)),
                BLOCK_D_V=max(16, triton.next_power_of_2(D)),
                num_warps=num_warps,
                num_stages=num_stages,
                grid=(1,),
            )
            codes.append(kernel.asm["ptx"])
        plain, capped = (code.count("ex2.approx") for code in codes)
        # Each thread has this many scores of a tile: one exponential for each in the loop.
        scores = M * N // (32 * num_warps)
        results[f"{D}"] = all("wgmma" in code for code in codes), capped - plain == scores
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction, and one exponential more for each score of a soft cap."""
    (results,) = on_h100(gallery / RECIPE, compiled_tiles)
    assert results == dict.fromkeys(("64", "128"), (True, True))


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sums of before not rescaled", "        acc = acc * rescale\n", "        acc = acc * 1.0\n"),
    (
        "a tile is full too early",
        "        if (start < latest) | (start + BLOCK_N > every):\n            # Some query",
        "        if start + BLOCK_N > every:\n            # Some query",
    ),
    (
        "a tile is full too long",
        "        if (start < latest) | (start + BLOCK_N > every):\n            # A hidden",
        "        if start < latest:\n            # A hidden",
    ),
    (
        "a tile of the other pass is full too early",
        "            if (begin < latest) | (begin + BLOCK_N > every):\n",
        "            if begin + BLOCK_N > every:\n",
    ),
    ("the first queries are left out", "early = (block < blocks) & (high <= begin)", "early = high <= begin + 16"),
    ("no query is left out", "skipped += tl.sum(early.to(tl.int32))", "skipped += tl.sum(early.to(tl.int32)) * 0"),
    ("the last queries are left out", "(low < begin + BLOCK_N)", "(low < begin)"),
    ("a span is not cut at the last key", "end = tl.minimum(end + i * 0, LK)\n", "end = end + i * 0\n"),
    ("a sink has no weight", "total = tl.exp2(sink - m)\n", "total = tl.exp2(sink - m) * 0.0\n"),
    (
        "no slope for the keys",
        "            if SLOPE is not None:\n                ds *=",
        "            if False:\n                ds *=",
    ),
    (
        "padded queries have a weight",
        'lse_ptr + sums + offs_m, mask=offs_m < LQ, other=float("inf")',
        "lse_ptr + sums + offs_m, mask=offs_m < LQ, other=0.0",
    ),
    (
        "heads do not share keys",
        "    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_v\n    grad_ptrs",
        "    v_ptrs = v_ptr + batch * stride_vb + offs_v\n    grad_ptrs",
    ),
    ("a row of nothing is divided by 0", "divisor = tl.where(total == 0, 1.0, total)", "divisor = total"),
    ("all queries stand at their own places", "LK - LQ  # the last", "LK - LK  # the last"),
    (
        "a score of the pass for keys is of other queries",
        "i = tl.minimum(offs_m, LQ - 1)[None, :] + keys[2]",
        "i = tl.minimum(offs_m, LQ - 1)[None, :]",
    ),
    ("a window has no right side", "end = i + 1 + RIGHT if", "end = i + 1 if"),
    ("slopes of a chain do not multiply", "product *= links", "product = links"),
    ("padding before a sequence is seen", "tl.maximum(begin + i * 0, first)", "tl.maximum(begin + i * 0, 0)"),
    ("padding after a sequence is seen", "LK = tl.minimum(tl.load(seqlens_ptr + batch), LK)\n", "pass\n"),
    ("padding is read", "        held, held_v = inside & own, inside_v & own\n", ""),
    ("the log-sum-exp has no gradient", "delta -= grad_lse *", "delta -= 0.0 *"),
    ("a log-sum-exp of nothing has a gradient", 'some = lse < float("inf")', "some = offs_m < LQ"),
    (
        "values past the last element are read",
        "mask = (row_m < LQ) & (offs_v < D_V)",
        "mask = (row_m < LQ) & (offs_v < BLOCK_D_V)",
    ),
    ("slopes are those of the first sequence", "[heads]\n", "[0]\n"),
    ("the sink's gradient has the wrong sign", "d_sinks = -(torch.exp2", "d_sinks = (torch.exp2"),
]
