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


def scored(
    q: torch.Tensor, k: torch.Tensor, score: Named, span: Named, scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Return the scores of a variant, -inf where a query does not see a key, their magnitudes and their slopes."""
    s, terms, _ = scores(q, k, False, scale)
    i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    slope = torch.ones_like(s)
    if score[0] == "alibi":
        bias = score[1][:, None, None] * (i - j)
        s, terms = s - bias, terms + bias.abs()
    elif score[0] == "softcap":
        tanh = torch.tanh(s / score[1])
        s, terms, slope = score[1] * tanh, terms + score[1], 1 - tanh**2
    begins = {"window": lambda: i + 1 - span[1], "documents": lambda: span[1].long()[: len(i), None]}
    begin, end = begins.get(span[0], lambda: 0 * i)(), k.shape[2] if span[0] == "all" else i + 1
    return s.masked_fill((j < begin) | (j >= end), -torch.inf), terms, slope


def exact_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> list[Exact]:
    """Return the result, and the log-sum-exp of each row."""
    score, span, sinks, scale = named(*asked)
    return of_softmax(weights(*scored(q, k, score, span, scale)[:2], sinks), for_heads(v, q))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *variant: Any) -> list[Exact]:
    """Return the result."""
    return exact_with_lse(q, k, v, *split(*variant))[:1]


def exact_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *asked: Any,
) -> list[Exact]:
    """Return the gradients, given any result and log-sum-exp, and the sum of each query's products for them."""
    score, span, _, scale = named(*asked[:-1], None, asked[-1])
    s, terms, slope = scored(q, k, score, span, scale)
    p = torch.exp2(s * math.log2(math.e) - lse[..., None])
    terms = rounded(p, terms + lse.abs()[..., None])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    delta = Exact((grad * out).sum(-1), (grad * out).abs().sum(-1), accumulator)
    return [*of_weights(grad, q, k, v, out, p, terms, scale, slope), delta]


def exact_gradients(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> list[Exact]:
    """Return the gradients of queries, keys, values and, where there are some, of sinks."""
    out, lse = (result.value for result in exact_with_lse(q, k, v, *asked))
    *grads, delta = exact_backward(grad, q, k, v, out, lse, *asked[:-2], asked[-1])
    sinks = asked[-2]
    if sinks is None:
        return grads
    base_2 = sinks[:, None] * math.log2(math.e)
    p = torch.exp2(base_2 - lse)
    terms = rounded(p, base_2.abs() + lse.abs()) * delta.terms
    return [*grads, Exact(-(p * delta.value).sum((0, 2)), terms.sum((0, 2)))]


def split(score: Named, span: Named, sinks: torch.Tensor | None, scale: float | None) -> tuple[Any, ...]:
    """Return a variant as the op takes it: names, each with its tensors and its numbers."""
    parts = []
    for name, *values in (score, span):
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        parts += [name, tensors, [value for value in values if not isinstance(value, torch.Tensor)]]
    return *parts, sinks, scale


def named(*asked: Any) -> tuple[Named, Named, torch.Tensor | None, float | None]:
    """Return a variant as the function takes it."""
    return (asked[0], *asked[1], *asked[2]), (asked[3], *asked[4], *asked[5]), *asked[6:]


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
    score: Named = ("plain",),
    span: Named = ("all",),
    sinks: float | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Make queries, keys, values and a variant, of slopes, of documents' lengths, and of sinks about a number."""
    q, k, v, _, scale = attentions.arguments(draw, B, heads, shared, LQ, LK, D, False, scale)
    if score[0] == "alibi":
        score = "alibi", torch.tensor(score[1:], device=q.device)[:heads]
    if span[0] == "documents":
        span = "documents", begins_of(span[1:], LQ).to(q.device)
    if sinks is not None:
        sinks = draw(heads, dtype=accumulator(draw.dtype), of=lambda t: t + sinks)
    return q, k, v, score, span, sinks, scale


def of_the_op(draw: Draw, *size: Any) -> tuple[Any, ...]:
    """Make what the op behind the function takes."""
    q, k, v, *variant = arguments(draw, *size)
    return q, k, v, *split(*variant)


def of_backward(draw: Draw, B: int, heads: int, shared: int, LQ: int, *size: Any) -> tuple[Any, ...]:
    """Make a gradient, and what a forward takes and returns."""
    grad = attentions.of_heads(draw, B, heads, LQ, size[1])
    q, k, v, *asked = of_the_op(draw, B, heads, shared, LQ, *size)
    out, lse = (result.value for result in exact_with_lse(*in_float64((q, k, v, *asked))))
    saved = draw(*out.shape, of=lambda _: out), lse.to(accumulator(draw.dtype))
    return grad, q, k, v, *saved, *asked[:-2], asked[-1]


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
LENGTH = sizes(32, 70)
GROUPS = st.sampled_from([(1, 1), (2, 1), (4, 2)])
WHICH = st.tuples(st.sampled_from(SCORES), st.sampled_from(SPANS), st.sampled_from([None, 0.0]))
SHAPES = st.tuples(st.integers(0, 2), GROUPS, LENGTH, LENGTH, st.sampled_from([16, 40, 64]), WHICH)
OF_ALL = {
    "small": (1, 2, 1, 3, 3, 2, SCORES[2], ("window", 2), 0.0),
    "in_layouts": (2, 2, 1, 37, 20, 20, SCORES[1], SPANS[3], 0.0),
    "many": (16, 24, 8, 263, 131, 24, SCORES[2], ("window", 100)),
    "shapes": SHAPES.map(lambda drawn: (drawn[0], *drawn[1], *drawn[2:5], *drawn[5])),
}


def variant(score: Named = ("plain",), span: Named = ("all",)) -> Callable[[Draw], tuple[Any, ...]]:
    """Return what makes a call of a score and a span."""
    return lambda draw: (*(draw(2, 4, 3, 16) for _ in range(3)), score, span)


CONTRACT = [
    Case(
        "attention_variants",
        arguments,
        exact,
        autocast="asked",
        sizes=SIZES[:3],
        plain=True,
        gradients=lambda grad, q, k, v, *variant: exact_gradients(grad, q, k, v, *split(*variant)),
        with_gradients=(0, 1, 2, 5),
        refused=[
            *refused("attention_variants", 0, 257),
            Refused(
                lambda draw: (*variant()(draw), draw(4).to("meta")), TypeError, "attention_variants takes .* one device"
            ),
            Refused(
                lambda draw: (*variant()(draw), draw(3)), ValueError, "attention_variants takes a sink for each head"
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
]


def check_both(taken: ModuleType, dtype: torch.dtype, *size: Any) -> None:
    """Assert all of a forward and a backward at a size."""
    for case in CONTRACT[1:]:
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
    for span in (("all",), ("window", 9)):
        asked = split(("plain",), span, None, None)
        check(CONTRACT[1], taken, dtype, (x, x, x, *asked))
        out, lse = taken.attention_variants_with_lse(x, x, x, *asked)
        check(CONTRACT[2], taken, dtype, (x, x, x, x, out, lse, *asked[:-2], None))


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
    """Return the graphs of a call with tensors and numbers, forward and backward."""
    q = torch.randn(2, 4, 40, 64, dtype=torch.float16, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)

    def call(q: Any, slopes: Any, sinks: Any) -> Any:
        return recipe.attention_variants(q * 2, q, q, ("alibi", slopes), ("window", 30), sinks)

    return [graphs(call, q, torch.ones(4), sinks)]


def test_torch_compile_calls_the_op(gallery: Path, on_h100: Ask) -> None:
    """One op forward, one backward; no graph break."""
    (((forward, backward),),) = on_h100(gallery / RECIPE, traced)
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
                *(x, x, x, x, lse, lse, given, (tl.constexpr(1024),), 1024, 1024, 4),
                *(4096 * D, 1024 * D, D) * 3,
                SCORE=recipe.ATTENTION_VARIANTS_SCORES[score][0],
                SPAN=recipe.ATTENTION_VARIANTS_SPANS["window"],
                GROUP=1,
                D=D,
                SCALE=D**-0.5,
                ACC=tl.float32,
                LOWEST=torch.finfo(torch.float32).min,
                BLOCK_M=M,
                BLOCK_N=N,
                BLOCK_D=max(16, triton.next_power_of_2(D)),
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
        "    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_d\n    grad_ptrs",
        "    v_ptrs = v_ptr + batch * stride_vb + offs_d\n    grad_ptrs",
    ),
    ("a row of nothing is divided by 0", "divisor = tl.where(total == 0, 1.0, total)", "divisor = total"),
    ("the sink's gradient has the wrong sign", "d_sinks = -(torch.exp2", "d_sinks = (torch.exp2"),
]
