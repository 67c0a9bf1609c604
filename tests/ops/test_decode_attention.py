"""The op of the recipe Decode attention with a paged cache."""

# ruff: noqa: N806 - head dimensions have the recipe's names

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, assert_close, check, in_float64
from compiled import Ask, compiled, graphs
from hypothesis import given
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, like

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/decode_attention.py"
FLOAT8 = torch.float8_e4m3fn


def arguments(
    draw: Draw,
    lengths: tuple[int, ...],
    page: int = 16,
    queries: int = 1,
    heads: tuple[int, int] = (4, 2),
    D: int = 32,
    bound: int | None = None,
    scale: float | None = None,
    scales: int = 0,
    lies: str = "",
    small: bool = False,
    window: int | None = None,
    leftpad: bool = False,
) -> tuple[Any, ...]:
    """Make queries, caches, a shuffled table and lengths, and no scales of caches, one, or one for each head.

    What no query may read is NaN: pages that belong to nobody, and the slots before the first key that a query of the
    sequence sees and past its last. Where no query sees a key of a page, the table holds a number that is no page.
    """
    of_q, shared = heads
    width = max((math.ceil(n / page) for n in lengths), default=0) + 1
    count = len(lengths) * width + 2
    q = draw(len(lengths), queries, of_q, D)
    table = draw(len(lengths), width, dtype=torch.int32, of=lambda x: x.flatten().argsort().view(x.shape))
    lens = draw(len(lengths), dtype=torch.int32, of=lambda x: torch.tensor(lengths).to(x))
    both = [draw(shared if scales == 2 else 1, dtype=torch.float32, of=lambda x: (x / 2).exp2()) for _ in range(2)]
    pads = draw(len(lengths), dtype=torch.int32, of=lambda x: x.abs() % (lens + 4)) if leftpad else None
    seen = torch.zeros(count, page, dtype=torch.bool, device=q.device)
    for row, length, first in zip(table, lens.tolist(), first_keys(q, lens, window, pads), strict=True):
        keys = torch.arange(first, length, device=q.device)
        seen[row[keys // page].long(), keys % page] = True
        if 0 not in table.stride():
            row[: first // page] = row[math.ceil(length / page) :] = -(2**30)
            if first == length:
                row[:] = -(2**30)
    dtype = FLOAT8 if small and draw.dtype.itemsize == 2 else draw.dtype
    if lies == "sides":
        caches = draw(count, page, 2, shared, D, dtype=dtype).unbind(2)
    elif lies == "heads outside":
        caches = tuple(draw(count, shared, page, D, dtype=dtype).transpose(1, 2) for _ in range(2))
    else:
        caches = tuple(draw(count, page, shared, D, dtype=dtype) for _ in range(2))
    if any(t.stride(-1) != 1 or 0 in t.stride() for t in caches):
        caches = tuple(t.contiguous() for t in caches)
    for t in caches:
        like(t, t.double().masked_fill(~seen[..., None, None], torch.nan))
    leftpads = (pads,) if leftpad else ()
    return q, *caches, table, lens, bound, scale, *(both if scales else (None, None)), *leftpads


def first_keys(q: torch.Tensor, seq_lens: torch.Tensor, window: int | None, leftpad: torch.Tensor | None) -> list[int]:
    """Return the first key of each sequence that any of its queries sees, or its length."""
    first = torch.zeros_like(seq_lens) if leftpad is None else leftpad
    if window is not None:
        first = first.maximum(seq_lens - q.shape[1] - window)
    return first.clamp(min=0).minimum(seq_lens).tolist()


def with_options(draw: Draw, size: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Make arguments of a size, and the options that are asked for."""
    window = options.get("window")
    leftpad = options.get("leftpad", False)
    x = arguments(draw, *size, window=window, leftpad=leftpad)
    sinks = draw(x[0].shape[2]) if options.get("sinks") else None
    of_slopes = {0: None, 1: x[0].shape[2:3], 2: x[0].shape[:3:2]}[options.get("slopes", 0)]
    slopes = None if of_slopes is None else draw(*of_slopes, dtype=torch.float32, of=lambda x: (x / 2).exp2() / 8)
    mask = *(x[9:] or [None]), options.get("causal", True)
    return *x[:9], window, options.get("softcap"), sinks, *mask, slopes


def exact_with_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    _: int | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    leftpad: torch.Tensor | None = None,
    causal: bool = True,
    slopes: torch.Tensor | None = None,
) -> list[Exact]:
    """Return the attention by its formula, key by key of the table, and the log-sum-exp of scores.

    A query that sees nothing gives 0. A weight is rounded to the dtype of q, and so is the result. It is off by the
    roundings of its score's products.
    """
    outs, sums, terms = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q)
    lses, sizes = (torch.zeros_like(q[..., 0].mT.contiguous()) for _ in range(2))
    page, group = k_cache.shape[1], q.shape[2] // k_cache.shape[2]
    for b, (length, first) in enumerate(zip(seq_lens.tolist(), first_keys(q, seq_lens, window, leftpad), strict=True)):
        keys = torch.arange(first, length, device=q.device)
        rows = block_table[b, keys // page].long()
        k, v = (
            (cache[rows, keys % page] * (1 if factor is None else factor[:, None])).repeat_interleave(group, dim=1)
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        factor = q.shape[3] ** -0.5 if scale is None else scale
        s, size = (torch.einsum("qhd,khd->hqk", *pair) * factor for pair in ((q[b], k), (q[b].abs(), k.abs())))
        if softcap is not None:
            s, size = softcap * (s / softcap).tanh(), size + softcap
        place = length - q.shape[1] + torch.arange(q.shape[1], device=q.device)[:, None]
        if slopes is not None:
            bias = slopes.expand(len(q), -1)[b, :, None, None] * (place - keys).abs()
            s, size = s - bias, size.abs() + bias
        hidden = (keys > (place if causal else length)) | (keys < place - (length if window is None else window))
        # Last comes a score whose value is 0, the sink.
        sink = torch.full_like(q[b, :, :, 0].T, -torch.inf) if sinks is None else sinks[:, None].expand(-1, q.shape[1])
        s = torch.cat([s.masked_fill(hidden, -torch.inf), sink[..., None]], -1)
        size = torch.cat([size.abs(), sink.abs().nan_to_num(posinf=0)[..., None]], -1).amax(-1, keepdim=True)
        p = s.softmax(-1).nan_to_num(0)[..., :-1]
        lses[b], sizes[b] = s.logsumexp(-1), 1 + 2 * size[..., 0]
        off = p * (1 + 2 * size)  # of a score, and of the largest
        outs[b], sums[b], terms[b] = (
            torch.einsum("hqk,khd->qhd", *pair) for pair in ((p, v), (p, v.abs()), (off, v.abs()))
        )
    out = Exact(outs, terms + outs.abs(), narrow=sums)
    return [out, Exact(lses, sizes + lses.abs().nan_to_num(posinf=0), accumulator)]


def exact(*arguments: Any) -> list[Exact]:
    """Return the attention alone."""
    return exact_with_lse(*arguments)[:1]


def changed(draw: Draw, **others: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    """Make arguments of which some were changed."""
    names = ("q", "k_cache", "v_cache", "table", "lens", "bound", "scale", "k_scale", "v_scale", "window", "softcap")
    names += ("sinks", "leftpad", "causal", "slopes")
    options = {"sinks": True, "leftpad": True, "slopes": 2}
    made = zip(names, with_options(draw, ((5, 3), 16, 1, (4, 2), 32, None, None, 1), options), strict=True)
    return tuple(others.get(name, lambda x: x)(x) for name, x in made)


def refused(
    error: type[Exception], text: str, *others: dict[str, Callable[[torch.Tensor], torch.Tensor | None]]
) -> list[Refused]:
    """Return calls that raise as some of their arguments were changed."""
    return [Refused(partial(changed, **other), error, f"decode_attention {text}") for other in others]


def both(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a change of both caches."""
    return {"k_cache": change, "v_cache": change}


KINDS = "takes a float q, two caches of its dtype, .* on one device, not .*"
FORMS = r"takes q of \(batch, queries, heads, D\), .* no or two scales .* not q \(.*seq_lens \(.*\)"
REFUSED = [
    *refused(TypeError, f"{KINDS}q torch.int32", {"q": torch.Tensor.int}),
    *refused(TypeError, f"{KINDS}q torch.bfloat16", {"q": torch.Tensor.bfloat16}),
    *refused(TypeError, f"{KINDS}v_cache torch.float8", {"v_cache": lambda x: x.to(FLOAT8)}),
    *refused(TypeError, f"{KINDS}k_cache torch.float64", both(torch.Tensor.double)),
    *refused(TypeError, f"{KINDS}k_cache torch.float8", both(lambda x: x.to(FLOAT8))),
    *refused(TypeError, f"{KINDS}block_table torch.int64", {"table": torch.Tensor.long}),
    *refused(TypeError, f"{KINDS}seq_lens torch.int64", {"lens": torch.Tensor.long}),
    *refused(TypeError, f"{KINDS}k_scale torch.float64", {"k_scale": torch.Tensor.double}),
    *refused(ValueError, FORMS, {"q": lambda x: x[0]}, {"q": lambda x: x[..., :8]}, {"q": lambda x: x[:, :, :3]}),
    *refused(ValueError, FORMS, {"k_cache": lambda x: x[:, :8]}, both(lambda x: x[:, :0]), both(lambda x: x[:, :, :0])),
    *refused(ValueError, FORMS, both(lambda x: x[..., :0]) | {"q": lambda x: x[..., :0]}),
    *refused(ValueError, FORMS, {"table": lambda x: x[0]}, {"table": lambda x: x[:1]}, {"lens": lambda x: x[:1]}),
    *refused(ValueError, rf"{FORMS}, v_scale \(", {"k_scale": lambda _: None}),
    *refused(ValueError, rf"{FORMS}, k_scale \(", {"v_scale": lambda _: None}, {"v_scale": lambda x: x.expand(3)}),
    *refused(
        ValueError,
        "takes caches that are contiguous along D",
        *({name: lambda x: x.mT.contiguous().mT} for name in ("k_cache", "v_cache")),
    ),
    *refused(
        ValueError,
        "has no gradient: detach",
        *({name: torch.Tensor.requires_grad_} for name in ("q", "k_cache", "v_cache", "k_scale")),
    ),
]

# Lengths, slots of a page, queries, heads of queries and of keys, D, a bound of lengths, a scale, scales of caches, and
# how caches lie: a sequence without keys, queries before the first key, and up to 64 rows
SIZES = [((0, 1, 16, 33, 65), 16, 2, (4, 2), 24), ((130, 5), 5, 1, (3, 3), 32), ((32, 2), 16, 4, (1, 1), 1)]
SIZES += [((1, 3, 200), 1, 4, (6, 2), 40, None, -0.3, 2), ((0, 129), 32, 4, (16, 1), 64, 1, 0.0, 1, "sides")]
SIZES += [((17, 150), 256, 3, (5, 1), 128, 10**6, 2.5, 2, "heads outside"), ((), 16), ((64, 2), 64, 4, (16, 1), 200)]
SIZES += [((5,), 16, 0), ((5,), 16, 1, (0, 2)), ((129,), 16, 4, (16, 1), 256), ((32, 129), 16, 3, (5, 1), 16)]
SHAPES = st.tuples(
    st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 128, 200]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([1, 5, 16, 32, 64, 256]),
    st.integers(1, 4),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3), (6, 2)]),
    st.sampled_from([16, 24, 32, 64]),
    st.sampled_from([None, 1, 10**6]),
    st.none(),
    st.integers(0, 2),
    st.sampled_from(["", "sides", "heads outside"]),
)
WHOLE = Case(
    "decode_attention",
    arguments,
    exact,
    sizes=SIZES,
    small=((70, 3), 16, 1, (4, 2), 32, None, None, 1),
    in_layouts=((40, 21), 16, 2, (4, 2), 24, None, None, 2),
    many=(tuple(n % 97 for n in range(515)), 16, 1, (8, 8), 64),
    shapes=SHAPES,
    roundings=lambda out: 512 if out.dtype == torch.float64 else 128,
    # What is lost of weights that are too small for the dtype of q
    floor=lambda dtype: 256 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
    refused=REFUSED,
)
# Two or three parts of few keys each, and in half precision a cache of float8
IN_PARTS = replace(
    WHOLE,
    name="decode_attention in parts",
    arguments=partial(arguments, small=True),
    sizes=[((0, 1, 33, 65), 48, 2, (4, 2), 24), ((70, 15), 5, 1, (3, 3), 40, None, None, 2), *SIZES[1:]],
    settings={
        "DECODE_ATTENTION_KEYS": 16,
        "DECODE_ATTENTION_PARTS": 3,
        "DECODE_ATTENTION_STEPS": dict.fromkeys((16, 32, 64, 128, 256), 16),
        "_decode_attention_processors": lambda device: 10_000,
    },
    refused=(),
)
CAPS = (lambda _: 0.0, lambda _: math.inf, lambda _: math.nan)  # that are refused
OPTIONS = [{"window": window} for window in (0, 1, 15, 40)]
OPTIONS += [{"softcap": 2.0}, {"softcap": 0.1, "window": 20}, {"softcap": 50.0}]
OPTIONS += [{"causal": False}, {"causal": False, "window": 8}, {"causal": False, "leftpad": True, "sinks": True}]
OPTIONS += [{"slopes": 1}, {"slopes": 2, "causal": False, "softcap": 1.5}]
OPTIONS += [{"leftpad": True}, {"leftpad": True, "window": 12, "sinks": True}]
OPTIONS += [{"sinks": True}, {"sinks": True, "softcap": 1.0, "window": 9}]
WITH_OPTIONS = replace(
    WHOLE,
    name="decode_attention with options",
    arguments=with_options,
    sizes=[
        (((0, 1, 16, 33, 65), 16, 2, (4, 2), 24), {"window": 14}),
        (((130, 5, 200), 5, 4, (3, 3), 16, None, None, 1, "sides"), {"window": 0}),
        (((70, 3), 16, 1, (4, 1), 16, 10**6), {"window": 3, "softcap": 0.5}),
        (((0, 1, 50), 16, 3, (6, 2), 16), {"sinks": True}),
        (((0, 1, 50, 200, 90), 16, 2, (2, 2), 16), {"leftpad": True}),
        (((0, 2, 50, 200, 90), 16, 4, (4, 2), 16), {"causal": False, "window": 30}),
        (((0, 2, 50, 200), 16, 4, (4, 2), 16), {"slopes": 2}),
        (((0, 2, 50), 16, 4, (6, 2), 16), {"causal": False, "slopes": 1, "softcap": 1.0}),
        (((40, 129), 256, 3, (5, 1), 16), {"window": 200}),
    ],
    small=(((70, 3), 16, 1, (4, 2), 32), {"window": 33, "softcap": 4.0, "sinks": True}),
    in_layouts=(
        ((40, 21), 16, 2, (4, 2), 24, None, None, 2),
        {"window": 17, "sinks": True, "leftpad": True, "slopes": 2},
    ),
    many=((tuple(n % 97 for n in range(515)), 16, 1, (8, 8), 64), {"window": 30}),
    shapes=st.tuples(SHAPES, st.sampled_from(OPTIONS)),
    refused=[
        *refused(ValueError, "takes a window of 0 or more, not -1", {"window": lambda _: -1}),
        *refused(ValueError, r"takes a softcap above 0, not (0.0|inf|nan)", *({"softcap": value} for value in CAPS)),
        *refused(TypeError, f"{KINDS}sinks torch.int32", {"sinks": torch.Tensor.int}),
        *refused(TypeError, f"{KINDS}cache_leftpad torch.int64", {"leftpad": torch.Tensor.long}),
        *refused(ValueError, rf"{FORMS}, .* cache_leftpad \(", {"leftpad": lambda x: x[:1]}),
        *refused(TypeError, f"{KINDS}alibi_slopes torch.float64", {"slopes": torch.Tensor.double}),
        *refused(
            ValueError, rf"{FORMS}, .* alibi_slopes \(", {"slopes": lambda x: x[:1]}, {"slopes": lambda x: x[0, 0]}
        ),
        *refused(ValueError, rf"{FORMS}, .* sinks \(", {"sinks": lambda x: x[:2]}, {"sinks": lambda x: x[None]}),
        *refused(ValueError, "has no gradient: detach", {"sinks": torch.Tensor.requires_grad_}),
    ],
)
# In tiles of 16 rows: a row more, a query in two tiles, more queries than keys
IN_TILES = replace(
    WITH_OPTIONS,
    call="decode_attention_with_lse",
    name="decode_attention_with_lse in tiles",
    exact=exact_with_lse,
    sizes=[
        (((0, 1, 33, 65, 130), 16, 17, (2, 2), 16), {}),
        (((0, 40, 9), 5, 9, (6, 2), 24, None, None, 1), {"window": 7, "softcap": 3.0, "slopes": 2}),
        (((70, 20), 16, 40, (1, 1), 16), {"leftpad": True, "sinks": True, "causal": False}),
        (((70, 3), 256, 1, (40, 2), 16), {"window": 20, "causal": False}),
        (((70, 35), 16, 33, (4, 1), 16), {"window": 0}),
    ],
    small=(((30, 9), 16, 9, (4, 2), 16), {"window": 11}),
    in_layouts=(((40, 21), 16, 9, (4, 2), 24, None, None, 2), {"window": 17, "sinks": True, "leftpad": True}),
    settings={"DECODE_ATTENTION_ROWS": 16},
    refused=(),
)
WITH_LSE = replace(WITH_OPTIONS, call="decode_attention_with_lse", name="", exact=exact_with_lse)
CONTRACT = [
    WHOLE,
    IN_PARTS,
    WITH_OPTIONS,
    WITH_LSE,
    IN_TILES,
    replace(
        IN_TILES, name="decode_attention_with_lse in tiles and parts", settings=IN_TILES.settings | IN_PARTS.settings
    ),
    replace(WITH_LSE, name="decode_attention_with_lse in parts", settings=IN_PARTS.settings, refused=()),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_parts(taken: ModuleType, dtype: torch.dtype, parts: int) -> None:
    """One key matters more than all others, in any part; or scores in the thousands rise, or fall, along the keys."""
    q, k, v, table, lens, *_ = arguments(Draw(dtype), (300, 130), 48, 1, (1, 1), 16)
    steps = torch.arange(7 * 48, device=DEVICE)
    for keys in (*(steps == key for key in (0, 70, 299)), steps, steps.flip(0)):
        k[table[0, :7].long()] = 8 * keys.view(7, 48, 1, 1) * q[0, 0]
        out = taken._decode_attention_launch(q, k, v, table, lens, parts=parts)
        assert_close(WHOLE, dtype, out, *exact(*in_float64((q, k, v, table, lens))))


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("parts", [1, 3])
def test_pages_outside_are_not_read(taken: ModuleType, queries: int, parts: int) -> None:
    """A window and padding leave out pages that hold NaN, or whose entries in the table are no pages."""
    draw = Draw(torch.float32)
    size = (200, 200), 16, queries, (4, 2), 16
    q, k_cache, v_cache, table, lens, *_ = arguments(draw, *size)
    outs = []
    for broken in (False, True):
        if broken:
            for t in (k_cache, v_cache):
                t[table[:, : (200 - queries - 20) // 16].long()] = torch.nan
            table[0, : (200 - queries - 20) // 16] = 2**30
            table[1, : 176 // 16] = -(2**30)
        pads = torch.tensor([3, 176], dtype=torch.int32, device=DEVICE)
        outs.append(
            taken._decode_attention_launch(q, k_cache, v_cache, table, lens, window=20, cache_leftpad=pads, parts=parts)
        )
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_by_index(taken: ModuleType, dtype: torch.dtype) -> None:
    """In a cache without pages, a table of one column has the row of each sequence (cache_batch_idx)."""
    draw = Draw(dtype)
    q, k_cache, v_cache = draw(3, 2, 4, 16), draw(5, 70, 2, 16), draw(5, 70, 2, 16)
    index, lens = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ((4, 0, 2), (70, 33, 1)))
    x = q, k_cache, v_cache, index[:, None], lens
    out = taken.decode_attention(*x)
    assert_close(WHOLE, dtype, out, *exact(*in_float64(x)))
    order = torch.arange(3, dtype=torch.int32, device=DEVICE)[:, None]
    assert torch.equal(out, taken.decode_attention(q, k_cache[index.long()], v_cache[index.long()], order, lens))


@pytest.mark.parametrize("parts", [1, 3])
def test_states_are_merged(taken: ModuleType, parts: int) -> None:
    """Attention to the keys before a split, and to those after it, makes that to all by the log-sum-exp (cascade).

    One sequence has no key before the split, and one none after it.
    """
    q, k, v, table, _, *_ = arguments(Draw(torch.float32), (96, 96, 96), 16, 1, (4, 2), 16)
    lens = torch.tensor([70, 48, 9], dtype=torch.int32, device=DEVICE)
    split = torch.tensor([48, 48, 0], dtype=torch.int32, device=DEVICE)
    attend = partial(taken._decode_attention_launch, q, k, v, parts=parts, with_lse=True)
    rest = table.gather(1, (torch.arange(4, device=DEVICE) + split[:, None] // 16).clamp(max=6))
    states = [attend(table, split), attend(rest, lens - split)]
    lse = torch.logaddexp(*(lse for _, lse in states))
    merged = sum(out * (part - lse).exp().mT[..., None] for out, part in states)
    out, right = attend(table, lens)
    torch.testing.assert_close((merged, lse), (out, right))


def test_rule_of_parts(taken: ModuleType) -> None:
    """Enough programs, more of them with float8, but not more parts than pay, and at least one."""
    small = torch.empty(1, dtype=torch.float8_e4m3fn)
    parts, of_small = (partial(taken._decode_attention_parts, cache=cache) for cache in (torch.empty(1), small))
    assert [parts(programs, 100_000) for programs in (1, 2, 5, 16, 17, 1000)] == [32, 16, 6, 2, 2, 1]
    assert [of_small(programs, 100_000) for programs in (1, 2, 5, 16, 17, 1000)] == [48, 24, 9, 3, 2, 1]
    # In a last wave that is at most half full, sequences have two parts.
    assert [parts(programs, 100_000) for programs in (24, 25, 32, 33, 56, 57, 64, 65)] == [2, 1, 1, 2, 2, 1, 1, 1]
    least, long = taken.DECODE_ATTENTION_KEYS, taken.DECODE_ATTENTION_LONG
    assert [parts(programs, 2 * long - 1) for programs in (1, 2, 5, 16, 17, 1000)] == [16, 8, 3, 1, 1, 1]
    assert [of_small(programs, 2 * long - 1) for programs in (1, 2, 5, 16, 17, 1000)] == [31, 16, 6, 2, 1, 1]
    assert [parts(1, longest) for longest in (0, 1, least, 2 * least - 1, 2 * least)] == [1, 1, 1, 1, 2]


@given(
    programs=st.integers(1, 600),
    longest=st.integers(0, 300_000),
    processors=st.sampled_from([16, 108, 132]),
    dtype=st.sampled_from([torch.float16, torch.float8_e4m3fn]),
)
def test_parts_fill_the_gpu(
    taken: ModuleType, programs: int, longest: int, processors: int, dtype: torch.dtype
) -> None:
    """Few programs on a multiprocessor, or even waves, and parts are as many and as long as promised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_decode_attention_processors", lambda _: processors)
        parts = taken._decode_attention_parts(programs, longest, torch.empty(1, dtype=dtype))
    assert 1 <= parts <= taken.DECODE_ATTENTION_PARTS
    assert parts == 1 or longest // parts >= taken.DECODE_ATTENTION_KEYS
    long, each = taken.DECODE_ATTENTION_LONG, 2 if dtype.itemsize == 1 else 1
    if parts > 1 and programs * parts > each * processors:
        assert longest // parts >= long
    if parts > 1 and programs * parts > (each + 1) * processors:  # else a wave would be half empty
        assert (parts, programs // processors < taken.DECODE_ATTENTION_WAVES) == (2, True)
        assert -(-2 * programs // processors) == 2 * -(-programs // processors) - 1
    # One part more would be too many programs, too short, or more than can be combined.
    wanted = processors * (each + (longest // (parts + 1) >= long))
    assert (
        programs * (parts + 1) > wanted
        or longest // (parts + 1) < taken.DECODE_ATTENTION_KEYS
        or parts == taken.DECODE_ATTENTION_PARTS
    )


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so is PyTorch's."""
    x = recipe.problem([200, 17, 64], heads=8, D=64)
    doubles = in_float64(x)
    (right,) = exact(*doubles)
    for step in (*(step for step, *_ in recipe.STEPS.values()), recipe.attention_torch):
        assert_close(WHOLE, x[0].dtype, step(*x), right)
    assert [recipe.statements(*step[1:]) for step in recipe.STEPS.values()] == [25, 91, 110]
    for actual, expected in zip(recipe.reference(*x), (right.value, right.narrow), strict=True):
        torch.testing.assert_close(actual, expected)
    x = recipe.problem([40, 40], heads=8, D=16)
    q, k, v = recipe.unpaged(*x)
    out = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :40], v[:, :, :40], enable_gqa=True)
    assert_close(WHOLE, q.dtype, out.transpose(1, 2), *exact(*in_float64(x)))


def test_bytes_of_the_variants(recipe: ModuleType) -> None:
    """The page's rates count the bytes of the keys that a sequence has."""
    call, size = recipe.variant(lengths=(40, 5), dtype=FLOAT8, heads=8, D=16, queries=2)
    assert size == 2 * 45 * 2 * 16
    assert call().shape == (2, 2, 8, 16)
    assert sum(recipe.UNEQUAL) == 32 * 8192
    assert recipe.moved(1) == 2 * 8 * 128 * 2e-6


def at_launch(taken: ModuleType, dtype: str, cache: str, D: int, rows: int, split: bool) -> dict[str, object]:
    """Return what the launcher passes on for strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    BLOCK_M = max(16, 1 << (rows - 1).bit_length())
    strides = [f"stride_{suffix}" for suffix in ("qb", "ql", "qh", "kp", "kl", "kh", "vp", "vl", "vh", "tb")]
    return {
        "dtype": "fp32",
        "num_warps": 8 if BLOCK_M == 64 else 4,
        "multiples": strides,
        "q_ptr": dtype,
        "k_ptr": cache,
        "v_ptr": cache,
        "table_ptr": "i32",
        "lens_ptr": "i32",
        "sinks_ptr": None,
        "leftpad_ptr": None,
        "slopes_ptr": None,
        "stride_slopes": None,
        "out_ptr": "fp32" if split and dtype != "fp64" else dtype,
        "queries": None,
        "QUERIES": max(1, rows // 4),
        "HEADS": 32,
        "GROUP": 4,
        "PAGE": 16,
        "D": D,
        "SCALE": D**-0.5 * math.log2(math.e),
        "SCALED": cache != dtype,
        "CAUSAL": True,
        "WINDOW": None,
        "SOFTCAP": 0.0,
        "SPLIT": split,
        "DOT": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp64": tl.float64}[dtype],
        "ACC": tl.float64 if dtype == "fp64" else tl.float32,
        "LOWEST": torch.finfo(torch.float32).min,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": 16 if dtype == "fp64" else taken.DECODE_ATTENTION_STEPS[BLOCK_D],
        "BLOCK_D": BLOCK_D,
    }


CACHES = [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "fp8e4nv"), ("bf16", "fp8e4nv")]


def codes(taken: ModuleType) -> dict[str, tuple[set[str], set[str], bool]]:
    """Return the bytes of asynchronous copies, the matrix instructions, and whether exp2 is one instruction."""
    results = {}
    for dtype, cache in CACHES[::2]:
        for rows in (4, 64):
            text = compiled(taken._decode_attention_kernel, **at_launch(taken, dtype, cache, 128, rows, True)).asm[
                "ptx"
            ]
            widths = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
            kinds = set(re.findall(r"(wgmma|mma)\.\S*?m\d+", text))
            results[f"{cache} {rows}"] = widths, kinds, "ex2.approx.ftz" in text
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Keys come in copies of 16 bytes; few rows take the instruction of earlier GPUs, 64 rows that of Hopper."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert {name: kinds for name, (_, kinds, _) in results.items()} == {
        "fp16 4": {"mma"},
        "fp16 64": {"wgmma"},
        "fp8e4nv 4": {"mma"},
        "fp8e4nv 64": {"wgmma"},
    }
    assert all("0x10" in widths and power for widths, _, power in results.values())


def constants(taken: ModuleType) -> list[float]:
    """Return the constants between 0 and 1 of the kernel for float64."""
    made = compiled(taken._decode_attention_kernel, **at_launch(taken, "fp64", "fp64", 64, 4, False))
    literals = re.findall(r"arith\.constant (?:dense<)?([\d.E+-]+)>? : \S*f64", made.asm["ttir"])
    return [number for number in map(float, literals) if 0 < number < 1]


def test_float64_stays(gallery: Path, on_h100: Ask) -> None:
    """The scale is not rounded to float32 first, which the interpreter would not show."""
    (results,) = on_h100(gallery / RECIPE, constants)
    assert results
    assert results == [pytest.approx(0.125 * math.log2(math.e), rel=1e-15)] * len(results)


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a call."""
    q, cache = torch.randn(2, 1, 4, 64).half(), torch.randn(2, 40, 16, 2, 64).half()
    table, lens = torch.zeros(2, 20, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return graphs(recipe.decode_attention, q, *cache, table, lens)


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """It is one kernel or two, which copy no cache."""
    ((graph,),) = on_h100(gallery / RECIPE, traced)
    assert [call for call in graph if call.startswith("triton_kernel")]
    assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


@pytest.mark.needs_gpu_memory(14)
def test_beyond_int32(taken: ModuleType) -> None:
    """A cache of more than 2**31 elements: a page at its end is right."""
    pages = 2**31 // (16 * 2 * 128) + 2
    k, v = (torch.zeros(pages, 16, 2, 128, dtype=torch.float16, device=DEVICE) for _ in range(2))
    k[-1], v[-1] = (torch.randn(16, 2, 128, device=DEVICE).half() for _ in range(2))
    table = torch.tensor([[0, pages - 1]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 1, 4, 128, device=DEVICE).half()
    small = torch.stack([k[0], k[-1]]), torch.stack([v[0], v[-1]])
    near = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    assert torch.equal(taken.decode_attention(q, k, v, table, lens), taken.decode_attention(q, *small, near, lens))


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_long(taken: ModuleType, dtype: torch.dtype, D: int) -> None:
    """Many keys, in many parts, and in float8."""
    for case in CONTRACT:
        twice = replace(case, settings={}, roundings=1024)
        for size in (((5000,), 16, 8, (8, 1), D), ((0, 3001, 777, 4096), 64, 3, (32, 8), D)):
            given = (size, case.small[1]) if case.arguments is with_options else size
            check(twice, taken, dtype, twice.arguments(Draw(dtype), *given))


@needs_a_gpu
def test_lengths_are_read_at_each_replay(taken: ModuleType) -> None:
    """The CPU never asks for them, so that a CUDA graph serves others."""
    x = arguments(Draw(torch.float16), (900, 900))
    taken.decode_attention(*x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = taken.decode_attention(*x)
    for lengths in ((900, 1), (0, 333)):
        x[4].copy_(torch.tensor(lengths))
        graph.replay()
        assert_close(WHOLE, out.dtype, out, *exact(*in_float64(x)))


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sums of before not rescaled", "        acc = acc * rescale\n", "        acc = acc * 1.0\n"),
    ("keys past the last are seen", "seen = offs_n <= last", "seen = offs_n <= last + 1"),
    ("queries all see the same", "place = (length - queries + query)", "place = (length - 1 + query * 0)"),
    ("no cap of large scores", "s = CAP - 2.0 * CAP", "s = s * 0 + CAP - 1.5 * CAP"),
    ("a sink for each part", "sink = tl.where(part == 0, sink", "sink = tl.where(part >= 0, sink"),
    ("sinks of the first heads", "sinks_ptr + offs_h", "sinks_ptr + offs_h % GROUP"),
    ("a log-sum-exp in base 2", "lse /= DECODE_ATTENTION_LOG2E", "lse /= 1.0"),
    ("the log-sum-exp of another query", "at = (row // heads // queries * heads + head)", "at = (row * 0 + head)"),
    ("padding on the left is read", "tl.load(leftpad_ptr + batch), begin)", "tl.load(leftpad_ptr + batch) - 1, begin)"),
    ("a tile ends early", "tl.minimum(final + 1, length)", "tl.minimum(final, length)"),
    ("a bias of ALiBi that grows", "s -= slope *", "s += slope *"),
    ("slopes of the first sequence", "slopes_ptr + batch * stride_slopes", "slopes_ptr + batch * 0"),
    ("queries of the first tile in each", "rows = first + tl.arange", "rows = first * 0 + tl.arange"),
    ("one key too many in a window", "offs_n >= place - WINDOW", "offs_n >= place - WINDOW - 1"),
    ("keys before a window are read", "first - WINDOW, 0)", "first - WINDOW - 1, 0)"),
    ("a slot of the next page", "slot = (offs_n % PAGE)[:, None]", "slot = ((offs_n + 1) % PAGE)[:, None]"),
    ("pages by a wrong stride", "k_page = k_ptrs + page * stride_kp", "k_page = k_ptrs + page * stride_vp * 2"),
    (
        "parts end late",
        "end = tl.minimum(begin + keys, end)",
        "end = tl.minimum(begin + keys + 1, length)",
    ),
    ("heads mixed up", "head * GROUP + rows % GROUP", "head * GROUP + rows // QUERIES"),
    ("two parts in any last wave", "0 < 2 * last <= processors", "0 < last <= processors"),
    ("two programs with float8", "min((each + 1) * processors //", "min(2 * processors //"),
    ("parts without weights", "weight = tl.exp2(lse - m)  #", "weight = tl.exp2((lse - m) * 0)  #"),
    ("a row of nothing is divided by 0", "some = tl.where(total == 0, 1.0, total)  #", "some = total  #"),
    ("scale of the values left out", "acc * (v_factor / some)", "acc * (1.0 / some)"),
    ("scale of the first head for all", "k_scale_ptr + head * stride_ks", "k_scale_ptr"),
    (
        "padding of a head is read",
        "there = inside[:, None] & (offs_d < D)",
        "there = inside[:, None] & (offs_d < D + 8)",
    ),
]
