"""The op of the recipe Attention with your own score: values and gradients of each variant."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compiled import Ask, graphs
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, first_quickly, layouts, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/attention_variants.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18, torch.float64: 2.0**-45}
each_kind = pytest.mark.parametrize("dtype", KINDS, ids=str)
Tensors = tuple[torch.Tensor, ...]
Named = tuple[Any, ...]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def scored(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, score: Named) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the score of a variant, and its slope."""
    name, *values = score
    if name == "alibi":
        return s - values[0].double()[:, None, None] * (i - j), torch.ones_like(s)
    if name == "softcap":
        tanh = torch.tanh(s / values[0])
        return values[0] * tanh, 1 - tanh**2
    assert name == "plain"
    return s, torch.ones_like(s)


def span_of(i: torch.Tensor, LK: int, span: Named) -> Tensors:
    """Return where the keys that each query sees begin and end."""
    name, *values = span
    begins = {"window": lambda: i + 1 - values[0], "documents": lambda: values[0].long()[: len(i), None]}
    return begins.get(name, lambda: 0 * i)(), 0 * i + LK if name == "all" else i + 1


def by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    score: Named,
    span: Named,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensors, Tensors]:
    """Return the result, its log-sum-exp in base 2 and all gradients in float64, and the sizes of what is added up.

    A probability's size counts how far its score and the log-sum-exp may be rounded, each of them three times.
    """
    eps, wide = KINDS[q.dtype], torch.finfo(torch.promote_types(q.dtype, torch.float32))
    # What is smaller has fewer bits in q's dtype; in the accumulator's, a GPU may take it for zero.
    least = max(torch.finfo(q.dtype).smallest_normal, wide.smallest_normal / eps)
    q, k, v, grad = (t.detach().double() for t in (q, k, v, grad))
    scale, shared = q.shape[-1] ** -0.5 if scale is None else scale, k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // shared, dim=1) for t in (k, v))
    i, j = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
    s, slope = scored(q @ k.mT * scale, i[:, None], j, score)
    begin, end = span_of(i[:, None], k.shape[2], span)
    s = s.masked_fill((j < begin) | (j >= end), -torch.inf)
    sink = q.new_full(q.shape[1:2], -torch.inf) if sinks is None else sinks.double()
    s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    m = s.amax(-1, keepdim=True).clamp(min=-1e300)
    total = (s - m).exp().sum(-1, keepdim=True)
    p = (s - m).exp() / total.masked_fill(total == 0, 1)
    lse = ((m + total.log()) * math.log2(math.e)).masked_fill(total == 0, torch.inf)[..., 0]
    rounded = 3 * wide.eps / 2 / eps * p * (s.masked_fill(s.isinf(), 0).abs() + m.abs())
    p, of_sink, rounded = p[..., :-1], p[..., -1], rounded[..., :-1]
    out = p @ v
    delta, sums = (grad * out).sum(-1), (grad * out).abs().sum(-1) + (grad.abs() * (rounded @ v.abs())).sum(-1)
    ds = p * (grad @ v.mT - delta[..., None]) * slope * scale
    p_size = p + rounded + least
    size = p_size * (grad.abs() @ v.mT.abs() + sums[..., None]) * abs(scale)

    def of_group(t: torch.Tensor) -> torch.Tensor:
        """Return the sum over the heads of queries that share a head of keys."""
        return t.unflatten(1, (shared, -1)).sum(2)

    values = out, lse, ds @ k, of_group(ds.mT @ q), of_group(p.mT @ grad), -(of_sink * delta).sum((0, 2))
    terms = p_size @ v.abs(), lse.abs() + 1, size @ k.abs(), of_group(size.mT @ q.abs())
    terms = *terms, of_group(p_size.mT @ grad.abs()), (of_sink * sums).sum((0, 2))
    return values, tuple(t + least for t in terms)


def assert_right(
    taken: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    score: Named = ("plain",),
    span: Named = ("all",),
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> Tensors:
    """Assert that the result and the gradients are right, and that nothing is stored elsewhere; return them."""
    asked = [part for named in (score, span) for part in split(named)]
    out, lse = guarded(lambda q, k, v: taken.attention_variants_with_lse(q, k, v, *asked, sinks, scale), q, k, v)
    grads = guarded(lambda *t: taken.attention_variants_backward(*t, *asked, scale)[:3], grad, q, k, v, out, lse)
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    result = taken.attention_variants(*leaves[:3], score, span, *leaves[3:], scale=scale)
    assert torch.equal(result, out)
    found = torch.autograd.grad(result, leaves, grad)
    assert all(map(torch.equal, found, grads))
    dtypes = [q.dtype, torch.promote_types(q.dtype, torch.float32), *(t.dtype for t in leaves)]
    values, terms = by_formula(q, k, v, grad, score, span, sinks, scale)
    names = "out", "lse", "dq", "dk", "dv", "dsinks"
    all_found = out, lse, *found
    for name, one, right, size, dtype in zip(names, all_found, values, terms, dtypes, strict=False):
        assert (one.shape, one.dtype) == (right.shape, dtype), name
        # The gradient of sinks is rounded to their dtype, of what has that of q.
        eps = max(KINDS[q.dtype], KINDS[dtype]) if name == "dsinks" else KINDS[dtype]
        allowed = 2 * eps * (size + right.abs())
        good = ((one.double() - right).abs() <= allowed) | (one == right)
        assert good.all(), f"{name} is off by {((one.double() - right).abs() / allowed).nan_to_num().max():.1f}"
    return all_found


def split(named: Named) -> list[Any]:
    """Return a name, the tensors and the numbers that it is given."""
    name, *values = named
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [name, tensors, [value for value in values if not isinstance(value, torch.Tensor)]]


def some(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return random tensors."""
    return (Layout("contiguous", seed).make(shape, dtype, DEVICE) for seed, shape in enumerate(shapes))


def heads_of(heads: int, shared: int, LQ: int, LK: int, D: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return queries, keys, values, and a gradient."""
    rows, keys = (1, heads, LQ, D), (1, shared, LK, D)
    return some([rows, keys, keys, rows], dtype)


def begins_of(lengths: list[int], LQ: int) -> torch.Tensor:
    """Return where the document of each query begins, for documents of such lengths again and again."""
    begins, start = [], 0
    for length in itertools.cycle(lengths):
        if start >= max(LQ, 1):
            return torch.tensor(begins[: max(LQ, 1)], dtype=torch.int32, device=DEVICE)
        begins += [start] * length
        start += length
    raise AssertionError


def scores_of(heads: int) -> list[Named]:
    """Return every score that the op has."""
    slopes = torch.exp2(-torch.arange(1.0, heads + 1, device=DEVICE))
    return [("plain",), ("alibi", slopes), ("softcap", 1.5)]


def spans_of(LQ: int) -> list[Named]:
    """Return every span that the op has, with windows and documents of some sizes."""
    documents = [("documents", begins_of(lengths, LQ)) for lengths in ([1, 40, 7], [100])]
    return [("all",), ("causal",), ("window", 1), ("window", 24), ("window", 10**6), *documents]


@each_kind
@settings(max_examples=16)
@given(
    LQ=sizes(32, 70),
    LK=sizes(32, 70),
    D=st.sampled_from([16, 40, 64]),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    score=st.integers(0, 2),
    span=st.integers(0, 6),
    with_sinks=st.booleans(),
    of=st.tuples(*[layouts()] * 4),
)
def test_gradients(
    taken: ModuleType,
    dtype: torch.dtype,
    LQ: int,
    LK: int,
    D: int,
    groups: tuple[int, int],
    score: int,
    span: int,
    with_sinks: bool,
    of: tuple[Layout, ...],
) -> None:
    """Values and gradients are right for any variant, lengths, heads and layouts."""
    heads, shared = groups
    shapes = (1, heads, LQ, D), (1, shared, LK, D), (1, shared, LK, D), (1, heads, LQ, D)
    tensors = [layout.make(shape, dtype, DEVICE) for layout, shape in zip(of, shapes, strict=True)]
    sinks = Layout("contiguous", 5).make((heads,), torch.float32, DEVICE) if with_sinks else None
    assert_right(taken, *tensors, scores_of(heads)[score], spans_of(LQ)[span], sinks)


@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("span", range(7))
@pytest.mark.parametrize("score", range(3))
def test_every_pair(taken: ModuleType, dtype: torch.dtype, score: int, span: int) -> None:
    """Each score with each span, over several blocks of queries and keys, with groups and sinks."""
    q, k, v, grad = heads_of(2, 1, 75, 90, 16, dtype)
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    assert_right(taken, q, k, v, grad, scores_of(2)[score], spans_of(75)[span], sinks)


LENGTHS = [(1, 1), (1, 200), (127, 129), (129, 127), (260, 200), (33, 0), (0, 33)]


@pytest.mark.parametrize("D", first_quickly(100, 16, 256))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_tile(taken: ModuleType, lengths: tuple[int, int], D: int) -> None:
    """Each tile, at lengths around its edges; heads side by side in memory, as a projection leaves them."""
    (LQ, LK), kind = lengths, torch.float16
    q, grad = (Layout("contiguous", k).make((1, LQ, 2, D), kind, DEVICE).transpose(1, 2) for k in range(2))
    k, v = Layout("contiguous", 2).make((1, LK, 2, 1, D), kind, DEVICE).permute(2, 0, 3, 1, 4).unbind(0)
    for span in (("all",), ("window", 60), ("documents", begins_of([1, 90, 30], LQ))):
        assert_right(taken, q, k, v, grad, ("softcap", 1.5), span)


@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_small_tiles(taken: ModuleType, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU with little shared memory."""
    taken._attention_variants_tiles.cache_clear()
    monkeypatch.setattr(taken, "ATTENTION_VARIANTS_TILES", taken.ATTENTION_VARIANTS_SMALL)
    for lengths in ((70, 90), (129, 65)):
        tensors = heads_of(2, 1, *lengths, D, torch.float16)
        assert_right(taken, *tensors, scores_of(2)[1], ("window", 40))
    taken._attention_variants_tiles.cache_clear()


# Shared memory of a program, in bytes
GPUS = {"A100": 166_912, "H200": 232_448, "B200": 232_448, "RTX 4090": 101_376, "MI300": None}


@pytest.mark.parametrize("gpu", GPUS)
def test_which_tiles(taken: ModuleType, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs with less shared memory than Hopper's have the small ones."""
    room = GPUS[gpu]
    found = {"shared_memory_per_block_optin": room} if room else {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**found))
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
    table = taken.ATTENTION_VARIANTS_TILES if room == 232_448 else taken.ATTENTION_VARIANTS_SMALL
    for BLOCK_D, tiles in table.items():
        got = taken._attention_variants_tiles.__wrapped__(torch.device("cuda"), BLOCK_D, 2)
        assert [tuple(tile[name] for name in names) for tile in got] == tiles


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


@each_kind
def test_scale(taken: ModuleType, dtype: torch.dtype) -> None:
    """A scale of one's own: zero gives the mean, a negative one turns the order round."""
    for scale in (0.0, -0.3, 1):
        assert_right(taken, *heads_of(2, 2, 40, 50, 32, dtype), ("softcap", 2.0), scale=scale)


@each_kind
def test_sinks(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sink far above all scores takes all weight; one of -inf none; one of -1000 matters to who sees nothing."""
    q, k, v, grad = heads_of(2, 1, 40, 20, 16, dtype)
    for sink in (30.0, -1000.0):
        sinks = torch.full((2,), sink, device=DEVICE)
        assert_right(taken, q, k, v, grad, span=("window", 5), sinks=sinks)
    none = torch.full((2,), -torch.inf, device=DEVICE)
    options = {"span": ("window", 5)}
    right = taken.attention_variants(q, k, v, **options)
    assert torch.equal(taken.attention_variants(q, k, v, sinks=none, **options), right)
    assert not right[:, :, 25:].any()


@each_kind
def test_past_the_end(taken: ModuleType, dtype: torch.dtype) -> None:
    """What pads the last block has no part in a gradient, though ALiBi gives it the largest score of all."""
    q, k, v, grad = heads_of(2, 1, 37, 45, 16, dtype)
    slopes = torch.tensor([30.0, -30.0], device=DEVICE)
    assert_right(taken, q, k, v, grad, ("alibi", slopes), ("all",))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around the inputs stays there."""
    around = torch.full((1, 60, 4, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[:, 5:45, 1:3, 8:88] = Layout("contiguous", 0).make((1, 40, 2, 80), dtype, DEVICE)
    x = around[:, 5:45, 1:3, 8:88].transpose(1, 2)
    for span in (("all",), ("window", 9)):
        assert_right(taken, x, x, x, x, span=span)


def test_flex_attention(taken: ModuleType) -> None:
    """PyTorch's flex_attention, not compiled, gives the same."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, _ = heads_of(2, 1, 150, 150, 32, torch.float32)
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float32, device=DEVICE)
    begins = begins_of([40, 3, 60], 150)

    def biased(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def own(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (j >= begins[i])

    mask = create_block_mask(own, 1, 1, 150, 150, DEVICE.type)
    with pytest.warns(UserWarning, match="without torch.compile"):  # slow
        theirs = flex_attention(q, k, v, biased, mask, enable_gqa=True)
    ours = taken.attention_variants(q, k, v, ("alibi", slopes), ("documents", begins))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gradcheck(taken: ModuleType, fast: bool) -> None:
    """Differences agree with the gradients, those of the sinks too, in one direction or in each."""
    shapes = [(1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (2,)]
    leaves = [t.requires_grad_() for t in some(shapes, torch.float64)]
    for score in scores_of(2):

        def op(q: Any, k: Any, v: Any, sinks: Any, score: Named = score) -> Any:
            return taken.attention_variants(q, k, v, score, ("window", 2), sinks, scale=0.7)

        assert torch.autograd.gradcheck(op, leaves, fast_mode=fast)


def test_layouts_of_gradients(taken: ModuleType) -> None:
    """Gradients lie in memory as their tensors do, where those are dense."""
    x = torch.randn(2, 9, 3, 16, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (x, x, x.contiguous())]
    dq, dk, _ = torch.autograd.grad(taken.attention_variants(*leaves).sum(), leaves)
    assert dq.stride() == dk.stride() == x.stride()


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    op, q = taken.attention_variants, torch.ones(2, 4, 3, 16, dtype=torch.float16, device=DEVICE)
    with pytest.raises(TypeError, match=r"^attention_variants takes float tensors, not torch\.int32"):
        op(*[q.int()] * 3)
    with pytest.raises(TypeError, match="one dtype"):
        op(q, q.bfloat16(), q)
    with pytest.raises(TypeError, match="one device"):
        op(q, q, q, sinks=torch.ones(4, device="meta"))
    for k, v in ((q[:, :3], q[:, :3]), (q[:, :0], q[:, :0]), (q, q[:, :2]), (q[:1], q[:1]), (q[0], q[0])):
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        with pytest.raises(ValueError, match=rf"^attention_variants takes q of .*{re.escape(found)}$"):
            op(q, k, v)
    for D in (0, 257):
        with pytest.raises(ValueError, match="D up to 256"):
            op(*[q.new_ones(1, 1, 3, D)] * 3)
    with pytest.raises(ValueError, match="a sink for each head"):
        op(q, q, q, sinks=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="no score 'linear'"):
        op(q, q, q, "linear")
    with pytest.raises(ValueError, match="no span 'past'"):
        op(q, q, q, span=("past", 3))
    with pytest.raises(ValueError, match="no gradient for what 'alibi' is given"):
        op(q, q, q, ("alibi", torch.ones(4, device=DEVICE, requires_grad=True)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launchers; they do what the ops do."""
    q, k, v, grad = heads_of(2, 1, 40, 50, 16, dtype)
    asked = "softcap", [], [2.0], "window", [], [20]
    inputs = q, k, v, *asked, None, None
    right = taken.attention_variants_with_lse(*inputs)
    assert all(map(torch.equal, at_cuda(taken.attention_variants_with_lse, *inputs), right))
    inputs = grad, q, k, v, *right, *asked, None
    grads = at_cuda(taken.attention_variants_backward, *inputs)
    assert all(map(torch.equal, grads, taken.attention_variants_backward(*inputs)))


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
    found, _ = recipe.reference(q, k, v, ("alibi", slopes), ("window", 100))
    torch.testing.assert_close(found, right)
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

    found = {}
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
        found[f"{D}"] = all("wgmma" in code for code in codes), capped - plain == scores
    return found


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction, and one exponential more for each score of a soft cap."""
    (found,) = on_h100(gallery / RECIPE, compiled_tiles)
    assert found == dict.fromkeys(("64", "128"), (True, True))


@needs_a_gpu
@each_kind
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_long(taken: ModuleType, dtype: torch.dtype, D: int) -> None:
    """Many blocks of any lengths."""
    for LQ, LK in ((1100, 1100), (517, 1300), (1300, 450)):
        for score, span in itertools.product(scores_of(4), spans_of(LQ)):
            assert_right(taken, *heads_of(4, 2, LQ, LK, D, dtype), score, span)


@needs_a_gpu
@each_kind
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """The ops pass the whole of opcheck."""
    q, k, v, _ = (t.requires_grad_() for t in heads_of(4, 2, 70, 90, 64, dtype))
    slopes = torch.ones(4, device=DEVICE)
    asked = "alibi", [slopes], [], "window", [], [30]
    found = torch.library.opcheck(taken.attention_variants_with_lse, (q, k, v, *asked, None, None))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op with a gradient, and other sizes."""
    torch.compiler.reset()

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return taken.attention_variants(q * 2, k, v, ("alibi", slopes), ("window", 30))

    op = torch.compile(call, fullgraph=True, dynamic=dynamic)
    slopes = torch.tensor([0.5, 0.1], device=DEVICE)
    for length in (40, 70, 300):
        q, k, v, grad = heads_of(2, 1, length, length, 64, torch.float16)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        got = torch.autograd.grad(op(*leaves, slopes), leaves, grad)
        assert all(map(torch.equal, got, torch.autograd.grad(call(*leaves, slopes), leaves, grad)))


@needs_a_gpu
def test_same_bits(taken: ModuleType) -> None:
    """Each time, for many blocks of keys."""
    q, k, v, grad = heads_of(8, 4, 1500, 1500, 64, torch.float16)
    asked = "softcap", [], [20.0], "window", [], [300]
    saved = q, k, v, *taken.attention_variants_with_lse(q, k, v, *asked, None, None)
    first, *others = (taken.attention_variants_backward(grad, *saved, *asked, None) for _ in range(5))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def some_heads(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[Any, ...]:
    """Return inputs for the op: of so many queries and keys, but few, and two heads that share one."""
    q, k, v = normal(1, 2, M % 300, 64), normal(1, 1, N % 300, 64), normal(1, 1, N % 300, 64)
    return q, k, v, ("softcap", 2.0), ("window", 20), normal(2)


def through_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Named, span: Named, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the same by PyTorch's operators."""
    (out, *_), _ = by_formula(q, k, v, q, score, span, sinks)
    return out.to(q.dtype)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [("attention_variants", some_heads, through_pytorch)]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
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
