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
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, assert_close, check, in_float64
from compiled import Ask, compiled, graphs
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/varlen_attention.py"
Lengths = tuple[int, ...]


def cu(lengths: Lengths | list[int]) -> torch.Tensor:
    """Return where sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def arguments(
    draw: Draw,
    queries: Lengths,
    keys: Lengths | None,
    heads: tuple[int, int],
    D: int,
    causal: bool = False,
    scale: float | None = None,
    slack: int = 0,
) -> tuple[Any, ...]:
    """Make q, k and v of sequences, and what is known of them: some longest length, too; None is as many keys."""
    keys = queries if keys is None else keys
    q, k, v = (draw(sum(lens), count, D) for lens, count in ((queries, heads[0]), (keys, heads[1]), (keys, heads[1])))
    most = (max(lens, default=0) + slack for lens in (queries, keys))
    return q, k, v, *(cu(lens).to(q.device) for lens in (queries, keys)), *most, causal, scale


def of_backward(draw: Draw, *size: Any) -> tuple[Any, ...]:
    """Make a gradient, and what the forward took and returned."""
    q, k, v, *known = arguments(draw, *size)
    out, lse = (right.value for right in exact(*in_float64((q, k, v, *known))))
    return draw(*q.shape), q, k, v, out.to(q.dtype).contiguous(), lse.to(accumulator(q.dtype)), *known


def attended(
    of_q: list[torch.Tensor], of_k: list[torch.Tensor], cu_q: torch.Tensor, cu_k: torch.Tensor
) -> Iterator[list[torch.Tensor]]:
    """Yield what each sequence has of some tensors, as (heads, tokens, D); keys for each head of queries."""
    group = of_q[0].shape[1] // of_k[0].shape[1]
    parts = [t.split(cu_q.diff().tolist()) for t in of_q]
    parts += [t.repeat_interleave(group, dim=1).split(cu_k.diff().tolist()) for t in of_k]
    yield from ([part.transpose(0, 1) for part in sequence] for sequence in zip(*parts, strict=True))


def scores(a: torch.Tensor, b: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Return the scores of a sequence, of which the last query sees all keys."""
    s = a @ b.mT * scale
    hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + s.shape[2] - s.shape[1])
    return s.masked_fill(hidden, -torch.inf) if causal else s


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool = False,
    scale: float | None = None,
) -> list[Exact]:
    """Return the attention by its formula, and the log-sum-exp of scores; a query that sees nothing has 0 and inf.

    A weight is rounded to the dtype of v. A score is a sum along a head, and of their exponentials there is a sum.
    """
    (_, H, D), scale = q.shape, q.shape[2] ** -0.5 if scale is None else scale
    results = [(q.new_zeros(H, 0, D), q.new_zeros(H, 0, D), q.new_zeros(H, 0), q.new_zeros(H, 0))]
    for a, b, c in attended([q], [k, v], cu_q, cu_k):
        s = scores(a, b, causal, scale)
        lse = s.logsumexp(-1)
        p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        most = torch.nn.functional.pad(scale * (a.abs() @ b.abs().mT), (0, 1)).amax(-1)
        results.append((p @ c, p @ c.abs(), lse, 1 + most))
    out, sums, lse, terms = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    out, sums = out.transpose(0, 1), sums.transpose(0, 1)
    lse, most = lse.masked_fill(lse == -torch.inf, torch.inf) / math.log(2), terms / math.log(2)
    return [Exact(out, sums + out.abs(), narrow=sums), Exact(lse, most, accumulator, roundings=64 + D + longest(cu_k))]


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
    causal: bool,
    scale: float | None,
) -> list[Exact]:
    """Return the gradients of q, k and v, and what each adds up if none cancels.

    A probability, or its product with a difference, is rounded to the dtype of q.
    """
    H, scale = k.shape[1], q.shape[2] ** -0.5 if scale is None else scale
    results = [[q.new_zeros(2, q.shape[1], 0, q.shape[2])] for _ in range(3)]
    each = zip(attended([q, do, out], [k, v], cu_q, cu_k), lse.split(cu_q.diff().tolist(), dim=1), strict=True)
    for (a, d, o, b, c), of_a in each:
        p = (scores(a, b, causal, scale) / math.log(2) - of_a[..., None]).exp2()
        delta, most = (o * d).sum(-1, keepdim=True), (o * d).abs().sum(-1, keepdim=True)
        ds, terms = p * (d @ c.mT - delta), p * (d.abs() @ c.abs().mT + most)
        results[0].append(scale * torch.stack([ds @ b, terms @ b.abs()]))
        results[1].append(scale * torch.stack([ds.mT @ a, terms.mT @ a.abs()]))
        results[2].append(torch.stack([p.mT @ d, p.mT @ d.abs()]))
    dq, dk, dv = (torch.cat(parts, dim=2).transpose(1, 2) for parts in results)  # (2, tokens, heads, D)
    dk, dv = (both.unflatten(2, (H, both.shape[2] // H)).sum(3) for both in (dk, dv))
    return [Exact(value, terms, narrow=terms) for value, terms in (dq, dk, dv)]


def exact_autograd(do: torch.Tensor, *taken: Any) -> list[Exact]:
    """Return the gradients of q, k and v."""
    out, lse = exact(*taken)
    return exact_gradients(do, *taken[:3], out.value, lse.value, *taken[3:])


def of_list(
    _: Draw, lengths: Lengths, other: Lengths, BLOCK: int, down: bool = False, slack: int = 0
) -> tuple[torch.Tensor, torch.Tensor, int, int, int, bool]:
    """Make what the list of tiles follows from; the longest length may be too long, or too short."""
    return cu(lengths), cu(other), sum(lengths), max(lengths) + slack, BLOCK, down


def exact_list(
    cu_lengths: torch.Tensor, other: torch.Tensor, total: int, longest: int, BLOCK: int, down: bool
) -> list[Exact]:
    """Return each tile once, longest work first, and idle entries; tiles past the end of a list too short are lost.

    A sequence has one ragged tile at the most, and no more tiles than the longest one.
    """
    tokens, work = cu_lengths.diff().tolist(), other.diff().tolist()
    tiles = [-(-length // BLOCK) for length in tokens]
    order = sorted(range(len(tokens)), key=lambda seq: (-work[seq], seq))
    rows = [[seq, block] for seq in order for block in range(tiles[seq])[:: -1 if down else 1]]
    slots = min(total // BLOCK + len(tokens), len(tokens) * -(-longest // BLOCK))
    rows = [*rows, *[[0, -1]] * slots][:slots]
    return [Exact(torch.tensor(rows, dtype=torch.int32, device=cu_lengths.device).view(-1, 2), dtype=torch.int32)]


def changed(
    draw: Draw, *changes: tuple[int, Callable[[Any], Any]], D: int = 16, scale: float | None = None
) -> tuple[Any, ...]:
    """Make arguments of which some were changed."""
    made = list(arguments(draw, (2, 4), None, (4, 4), D, False, scale))
    for place, change in changes:
        made[place] = change(made[place])
    return tuple(made)


def refused(error: type[Exception], text: str, *calls: list[tuple[int, Callable[[Any], Any]]]) -> list[Refused]:
    """Return calls that raise as some of their arguments were changed."""
    return [Refused(lambda draw, call=call: changed(draw, *call), error, f"varlen_attention {text}") for call in calls]


def each(change: Callable[[Any], Any], *places: int) -> list[tuple[int, Callable[[Any], Any]]]:
    """Return a change of some arguments."""
    return [(place, change) for place in places]


KINDS = "takes q, k and v of one dtype and cu_seqlens of int32, .*, not .*"
FORMS = r"takes q of \(tokens, heads, D\), .*, with D up to 256, .*, not \("
REFUSED = [
    *refused(TypeError, r"takes float tensors, not torch\.int32", each(torch.Tensor.int, 0, 1, 2)),
    *refused(TypeError, f"{KINDS}torch.bfloat16", each(torch.Tensor.bfloat16, 1)),
    *refused(TypeError, f"{KINDS}torch.int64", each(torch.Tensor.long, 3)),
    *refused(ValueError, FORMS, each(lambda x: x[:, :3], 1, 2), each(lambda x: x[:, :0], 1, 2)),
    *refused(ValueError, FORMS, each(lambda x: x[:, :2], 2), each(lambda x: x[..., :8], 1, 2)),
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
# Of own tokens and of others: a tile's, whether the last of a sequence is the first, and what is wrong with the longest
LISTS = [((5, 0, 33, 20, 33), (7, 9, 0, 7, 9), 16), ((40, 100, 7), (40, 100, 7), 16, False, -84)]
LISTS += [((70, 1, 64), (3, 3, 3), 64, True, 10**6), ((0, 0), (1, 2), 16, True), ((4800,), (1,), 16, True, 1)]
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
    roundings=lambda out: 512 if out.dtype == torch.float64 else 128,
    # What is lost of weights that are too small for the dtype of v
    floor=lambda dtype: 256 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
    gradients=exact_autograd,
    with_gradients=3,
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
        exact=lambda *given: exact(*given)[:1],
        sizes=SIZES[:2],
        shapes=None,
        layouts=["contiguous"],
        gradients=None,
        plain=True,
        refused=REFUSED,
    ),
    FORWARD,
    BACKWARD,
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
        "SCALE": D**-0.5 * math.log2(math.e),
        "CAUSAL": causal,
        "ACC": tl.float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
    }
    of_one = {"LOWEST": torch.finfo(torch.float32).min} if kind == "forward" else {"delta_ptr": "fp32"}
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
    ("queries see the next key", "seen & (offs_n <= offs_m + LK - LQ)", "seen & (offs_n <= offs_m + LK - LQ + 1)"),
    ("the first query sees one key", "seen & (offs_n <= offs_m + LK - LQ)", "seen & (offs_n <= offs_m)"),
    ("the diagonal begins late", "tl.minimum(seen + 1, LK)", "tl.minimum(seen + BLOCK_N, LK)"),
    ("sums of before not rescaled", "acc = acc * rescale\n", "acc = acc * 1.0\n"),
    ("the difference is not subtracted", "ds = p * (dp - delta[None, :])", "ds = p * dp"),
    ("backward, queries see the next key", "<= offs_m[None, :] + LK - LQ\n", "<= offs_m[None, :] + LK - LQ + 1\n"),
    (
        "backward, the diagonal begins late",
        "some = some // BLOCK_M * BLOCK_M",
        "some = tl.cdiv(some, BLOCK_M) * BLOCK_M",
    ),
    ("backward, the diagonal ends early", "(block + 1) * BLOCK_N - 1 + LQ - LK", "block * BLOCK_N + LQ - LK"),
    ("one member of a group counts", "of_q = head * GROUP + member", "of_q = head * GROUP"),
    ("equally long sequences share places", "(other == work) & (offs < seq)", "(other == work) & (offs < 0)"),
    ("what is left over says nothing", "range(count + seq, SLOTS, BATCH)", "range(count + seq, SLOTS - 1, BATCH)"),
    ("tiles past the list are written", "(offs < tiles) & (first + offs < SLOTS)", "offs < tiles"),
]
