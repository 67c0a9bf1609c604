"""The op of the recipe Linear attention: outputs, final states and gradients."""

# ruff: noqa: N806 - lengths and dimensions have the recipe's names

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, check
from compiled import Ask, compiled, graphs, narrow
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, amid, sizes
from recurrences import OF_ALL, SIZES, SMALL, SMALL_WITHOUT_STATE, shapes
from torch.nn.functional import logsigmoid

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/linear_attention.py"
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
Tensors = tuple[torch.Tensor, ...]
CHANGED = "value", "terms", "narrow"  # what differs between sequences


def by_token(
    grad: torch.Tensor,
    back: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None,
    first: torch.Tensor | None,
) -> Tensors:
    """Return outputs, the last state and all gradients in float64, by the recurrence and its own."""
    grad, back, q, k, v, g = (t.double() for t in (grad, back, q, k, v, g))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    a, states = g.exp()[..., None, None], [torch.zeros_like(back) if first is None else first.double()]
    for t in range(q.shape[1]):
        states.append(states[-1] * a[:, t] + k[:, t, :, :, None] * v[:, t, :, None, :])
    out, dq, dk, dv, dg = (torch.zeros_like(t) for t in (v, q, k, v, g))
    for t in reversed(range(q.shape[1])):
        out[:, t] = scale * (q[:, t, :, None] @ states[t + 1])[:, :, 0]
        dq[:, t] = scale * (states[t + 1] @ grad[:, t, :, :, None])[..., 0]
        back = back + scale * q[:, t, :, :, None] * grad[:, t, :, None, :]
        dk[:, t] = (back @ v[:, t, :, :, None])[..., 0]
        dv[:, t] = (k[:, t, :, None] @ back)[:, :, 0]
        back = back * a[:, t]
        dg[:, t] = (back * states[t]).sum((-1, -2))
    return out, states[-1], dq, dk, dv, dg, back


def later(x: torch.Tensor) -> torch.Tensor:
    """Return sums over a token and all after it, from the CPU: on a GPU, PyTorch may refuse to make them."""
    return x.cpu().flip(1).cumsum(1).flip(1).to(x.device)


def exact_of_padded(*arguments: Any) -> list[Exact]:
    """Return both results and all gradients: three roundings of what is added up, to the dtype of q.

    In the accumulator a log decay is off by a rounding of the sum that it is a difference of.
    """
    *tensors, scale, first = arguments
    g = tensors[5]
    tensors[:5] = (t.abs() for t in tensors[:5])
    state = None if first is None else first.abs()
    terms = [*by_token(*tensors, None if scale is None else abs(scale), state)]
    _, _, q, k, *_ = tensors
    # Terms of the gradient of g cancel: pairs of two tokens that are both later. What keys have from later chunks
    # cancels, too, but for its rounding in the accumulator.
    terms[5] = terms[5] + later((terms[2] * q).sum(-1))
    far = later((terms[3] * k).sum(-1))
    decays = g.abs().clamp(max=850).sum(1).max() if g.numel() else 0.0
    # Numbers below 2**-14 lose bits in float16: weights as well as results.
    one_more = [t + 1 for t in tensors[:5]]
    lost = by_token(*one_more, torch.zeros_like(g), 1.0, one_more[1] if state is None else state + 1)
    results = []
    for i, (value, size, few) in enumerate(zip(by_token(*arguments), terms, lost, strict=True)):
        of_state = i in (1, 5, 6)
        results.append(
            Exact(
                value,
                size * (1 + decays / 7) + (far / 7 if i == 5 else 0),
                dtype=accumulator if of_state else None,
                narrow=3 * size + 2.0**-14 * few,
                # The interpreter has bfloat16 as float32; without tokens, the state is a copy.
                made_by_torch=not (of_state and q.numel()),
            )
        )
    return results


def joined(parts: Sequence[Exact], axis: int) -> Exact:
    """Return a result of packed sequences, given those of each."""
    values, terms, narrow = (torch.cat([getattr(part, name) for part in parts], axis) for name in CHANGED)
    return parts[0]._replace(
        value=values, terms=terms, narrow=narrow, made_by_torch=all(p.made_by_torch for p in parts)
    )


def exact(*arguments: Any) -> list[Exact]:
    """Return both results and all gradients: with fewer heads of q and k, summed; of packed sequences, joined."""
    grad, back, *tokens, scale, first, cu_seqlens, v_first = arguments
    if v_first:
        results = exact(grad, back.mT, *tokens, scale, None if first is None else first.mT, cu_seqlens, False)
        for i in (1, 6):
            results[i] = results[i]._replace(**{name: getattr(results[i], name).mT for name in CHANGED})
        return results
    q, k, v, _ = tokens
    if q.shape[2] != v.shape[2]:
        group = v.shape[2] // q.shape[2]
        tokens[:2] = (t.repeat_interleave(group, 2) for t in (q, k))
        results = exact(grad, back, *tokens, scale, first, cu_seqlens, False)
        for i in (2, 3):
            sums = {name: getattr(results[i], name).unflatten(2, (-1, group)).sum(3) for name in CHANGED}
            results[i] = results[i]._replace(**sums)
        return results
    if cu_seqlens is None:
        return exact_of_padded(*arguments[:-2])
    parts = []
    for n, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        grad_of, *tokens_of = (t[:, begin:end] for t in (grad, *tokens))
        state = None if first is None else first[n : n + 1]
        parts.append(exact_of_padded(grad_of, back[n : n + 1], *tokens_of, scale, state))
    return [joined(each, axis) for each, axis in zip(zip(*parts, strict=True), (1, 0, 1, 1, 1, 1, 0), strict=True)]


def roundings(out: torch.Tensor) -> int:
    """Return how many roundings of the accumulator that is, besides those to the dtype."""
    return 90 if out.dtype == torch.float64 else 42


def sizes_of(batch: int, T: int | tuple[int, ...]) -> tuple[int, int]:
    """Return how many states there are, and how many tokens: T is the length, or those of packed sequences."""
    return (len(T), sum(T)) if isinstance(T, tuple) else (batch, T)


def of_forward(
    draw: Draw,
    batch: int,
    T: int | tuple[int, ...],
    heads: int,
    K: int,
    V: int,
    gate: float = 2.0,
    scale: float | None = None,
    started: bool = True,
    group: int = 1,
    v_first: bool = False,
) -> tuple[Any, ...]:
    """Make queries, keys, values, log decays, the scale, the state if there is one, and cu_seqlens if T is lengths.

    The last says whether states are of (V, K). A group of heads of the values shares a head of queries and keys.
    """
    acc_dtype, cu_seqlens = accumulator(draw.dtype), None
    if isinstance(T, tuple):
        ends = [0, *itertools.accumulate(T)]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32 if started else torch.int64, device=DEVICE)
    states, T = sizes_of(batch, T)
    q, k, v = (draw(batch, T, number, D) for number, D in ((heads // group, K), (heads // group, K), (heads, V)))
    g = draw(batch, T, heads, dtype=acc_dtype, of=lambda x: logsigmoid(x + gate))
    first = draw(states, heads, *((V, K) if v_first else (K, V)), dtype=acc_dtype) if started else None
    return q, k, v, g, scale, first, cu_seqlens, v_first


def of_backward(
    draw: Draw, batch: int, T: int | tuple[int, ...], heads: int, K: int, V: int, *options: Any
) -> tuple[Any, ...]:
    """Make the gradients of both results, and what they are the results of."""
    states, tokens = sizes_of(batch, T)
    of_state = (V, K) if options[4:] == (True,) else (K, V)
    grads = draw(batch, tokens, heads, V), draw(states, heads, *of_state, dtype=accumulator(draw.dtype))
    return *grads, *of_forward(draw, batch, T, heads, K, V, *options)


def exact_forward(*tensors: Any) -> list[Exact]:
    """Return both results."""
    q, _, v, *_, cu_seqlens, v_first = tensors
    batch, _, heads, V = v.shape
    states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    back = v.new_zeros(states, heads, q.shape[3], V)
    return exact(torch.zeros_like(v), back.mT if v_first else back, *tensors)[:2]


def fitting(draw: Draw) -> Tensors:
    """Make arguments that fit each other."""
    q, k, v, g, _, first, *_ = of_forward(draw, 2, 5, 3, 16, 32)
    return q, k, v, g, first


def refused(way: Callable[..., tuple[Any, ...]], error: type[Exception], text: str) -> Refused:
    """Return a call that raises, given what makes its arguments of some that fit."""
    return Refused(lambda draw: way(*fitting(draw)), error, f"linear_attention takes {text}")


def misfit(way: Callable[..., tuple[Any, ...]]) -> Refused:
    """Return a call with shapes that do not fit, which are named."""
    names = "q", "k", "v", "g", "", "initial_state", "cu_seqlens"
    given = zip(names, way(*fitting(Draw(torch.float32))), strict=False)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given if t is not None)
    return refused(way, ValueError, rf"q and k of .* V, K\), not {re.escape(shapes)}$")


KINDS = r"q, .* of torch\.float32, .* not q torch\.float32"
REFUSED = [
    refused(lambda q, k, v, g, first: (q.int(), k, v, g), TypeError, r"float16, .* not torch\.int32"),
    refused(lambda q, k, v, g, first: (q, k.bfloat16(), v, g), TypeError, KINDS),
    refused(lambda q, k, v, g, first: (q, k, v, g.half()), TypeError, KINDS),
    refused(lambda q, k, v, g, first: (q, k, v, g, None, first.half()), TypeError, KINDS),
    refused(
        lambda q, k, v, g, first: (q, k, v, g, None, None, g[0, :2, 0]),
        TypeError,
        r"cu_seqlens of int32 or int64, .*, not torch\.float32 on",
    ),
    misfit(lambda q, k, v, g, first: (q, k, v, g, None, None, torch.tensor([0, 2, 5], device=q.device))),
    misfit(lambda q, k, v, g, first: (q[:1], k[:1], v[:1], g[:1], None, None, torch.tensor(0, device=q.device))),
    misfit(
        lambda q, k, v, g, first: (
            q[:1],
            k[:1],
            v[:1],
            g[:1],
            None,
            None,
            torch.tensor([], dtype=torch.int32, device=q.device),
        )
    ),
    misfit(
        lambda q, k, v, g, first: (
            q[:1],
            k[:1],
            v[:1],
            g[:1],
            None,
            first[:1],
            torch.tensor([0, 2, 5], device=q.device),
        )
    ),
    misfit(lambda q, k, v, g, first: (q[0], k[0], v[0], g[0])),
    misfit(lambda q, k, v, g, first: (q, k[:, :4], v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v[:, :4], g)),
    misfit(lambda q, k, v, g, first: (q, k, v[:, :, :2], g)),
    misfit(lambda q, k, v, g, first: (q, k, v[:, :, :2], g[:, :, :2])),
    misfit(lambda q, k, v, g, first: (q[:, :, :2], k[:, :, :2], v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v[:, :, :0], g[:, :, :0])),
    misfit(lambda q, k, v, g, first: (q[:, :, :0], k[:, :, :0], v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v, g[..., None])),
    misfit(lambda q, k, v, g, first: (q[..., :8], k, v, g)),
    misfit(lambda q, k, v, g, first: (q[..., :0], k[..., :0], v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v[..., :0], g)),
    misfit(lambda q, k, v, g, first: (q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v.repeat(1, 1, 1, 9), g)),
    misfit(lambda q, k, v, g, first: (q, k, v, g, None, first.mT)),
    misfit(lambda q, k, v, g, first: (q, k, v, g, None, first, None, True)),
    misfit(lambda q, k, v, g, first: (q, k, v, g, None, first[:1])),
]
SEGMENTS = [*SIZES[:2], (1, 600, 1, 16, 16, 5.0), *SIZES[2:], (1, 256, 2, 32, 32, 5.0), (1, 257, 2, 32, 32, 5.0)]
SEGMENTS += [(1, 70, 1, 256, 100)]
# Fewer heads of queries and keys than of values, and K above 128; with packed sequences, below
SHARED = [
    (1, 70, 2, 200, 32, 2.0, None, True, 2),
    (1, 300, 3, 20, 40, 5.0, 0.3, True, 3, True),
    (1, 0, 2, 8, 16, 2.0, None, True, 2, True),
]
# Packed sequences: empty ones, whole chunks and segments, several of them in one sequence, and one sequence alone
PACKED: list[tuple[Any, ...]] = [(1, (40, 0, 65, 1, 64), 2, 16, 32), (1, (20, 256, 0, 300), 1, 16, 16, 5.0)]
PACKED += [
    (1, (33,), 1, 20, 40, 2.0, None, False),
    (1, (70, 0, 20), 6, 16, 32, 2.0, None, True, 3, True),
    (1, (0, 0), 2, 16, 16),
]
PACKED += [(1, (5,) * 40, 1, 16, 16), (1, (128, 64, 64), 1, 64, 100, -1.0)]
CONTRACT = [
    Case(
        "linear_attention",
        of_forward,
        exact_forward,
        autocast="asked",
        sizes=[*SHARED[:2], *SEGMENTS, *SHARED[2:]],
        small=SMALL,
        shapes=shapes(),
        roundings=roundings,
        gradients=lambda *arguments: exact(*arguments)[2:6],
        with_gradients=4,
        refused=REFUSED,
        **OF_ALL,
    ),
    Case(
        "linear_attention_backward",
        of_backward,
        lambda *arguments: exact(*arguments)[2:],
        sizes=[*SHARED[:2], *SEGMENTS, *SHARED[2:]],
        small=SMALL_WITHOUT_STATE,
        shapes=shapes(),
        roundings=roundings,
        **OF_ALL,
    ),
]
FORWARD, BACKWARD = CONTRACT
LENGTHS = st.lists(sizes(64, 140), min_size=1, max_size=4).map(tuple)
OF_PACKED = {
    "name": "linear_attention, packed",
    "sizes": PACKED,
    "small": (1, (5, 0, 9), 1, 2, 2),
    "shapes": st.tuples(LENGTHS, shapes(), st.integers(1, 3), st.booleans()).map(
        lambda drawn: (1, drawn[0], drawn[2] * drawn[1][2], *drawn[1][3:], *drawn[2:])
    ),
    "in_layouts": (1, (18, 22), 2, 16, 20, 2.0, None, True, 2),
    "many": (1, (701, 0, 1503, 300), 9, 32, 32),
}
CONTRACT += [
    replace(FORWARD, **OF_PACKED, refused=()),
    replace(BACKWARD, **OF_PACKED | {"name": "linear_attention_backward, packed"}),
]


def problem(dtype: torch.dtype, *size: Any) -> tuple[tuple[Any, ...], Tensors]:
    """Return what the op takes, and gradients of its results."""
    grad, back, *tensors = of_backward(Draw(dtype), *size)
    return tuple(tensors), (grad, back)


def assert_right(taken: ModuleType, tensors: tuple[Any, ...], grads: Tensors) -> list[torch.Tensor]:
    """Assert that both ops are right; return what they return."""
    dtype = grads[0].dtype
    return [*check(FORWARD, taken, dtype, tensors), *check(BACKWARD, taken, dtype, (*grads, *tensors))]


def test_cut(taken: ModuleType) -> None:
    """Segments are as many as there is room for, all of them have tokens, and chunks do not cross their borders."""
    cuts = [taken._linear_attention_cut(torch.empty(1, T, 2, 32)) for T in (256, 257, 600)]
    assert [cut["segments"] for cut in cuts] == [1, 2, 3]
    chunks = {tile[0] for K in (128, 256) for size in (2, 4, 8) for tile in taken._linear_attention_tiles(K, size)[:2]}
    for batch, heads, T in itertools.product((1, 3, 64), (1, 16, 200), (1, 255, 256, 257, 8192, 65536, 100_001)):
        cut = taken._linear_attention_cut(torch.empty(batch, T, heads, 128, device="meta"))
        assert (cut["segments"] - 1) * cut["length"] < T <= cut["segments"] * cut["length"]
        assert cut["segments"] == 1 or cut["segments"] * batch * heads <= 128
        assert all(cut["length"] % chunk == 0 for chunk in chunks)
    cut = taken._linear_attention_cut(torch.empty(1, 8192, 16, 128, device="meta"))
    assert (cut["segments"], cut["length"]) == (8, 1024)


@each_dtype
@pytest.mark.parametrize("T", [40, 64, 100])
def test_gates_of_zero(taken: ModuleType, dtype: torch.dtype, T: int) -> None:
    """A log decay of -inf ends what was before: all results are finite, and right."""
    tensors, grads = problem(dtype, 1, T, 2, 16, 32)
    g = tensors[3]
    g[:, [0, 7, T - 1], 0] = -torch.inf
    g[:, 20:, 1] = -torch.inf
    results = assert_right(taken, tensors, grads)
    assert all(t.isfinite().all() for t in results)
    assert not results[-1][:, 0].any()


def test_a_nan_gate_stays_nan_float32(taken: ModuleType) -> None:
    """It is not taken for a strong decay."""
    tensors, _ = problem(torch.float32, 1, 100, 1, 16, 16)
    tensors[3][0, 50] = torch.nan
    out, last = taken.linear_attention(*tensors)
    assert out[:, 64:].isnan().all()
    assert last.isnan().all()
    assert not out[:, :32].isnan().any()


@each_dtype
def test_who_gets_what(taken: ModuleType, dtype: torch.dtype) -> None:
    """A gradient of one output alone reaches its query, and keys and values up to it."""
    tensors, (grad, last) = problem(dtype, 1, 130, 1, 16, 16, 5.0)
    for token in (0, 63, 64, 100, 129):
        alone = torch.zeros_like(grad)
        alone[:, token] = grad[:, token]
        dq, dk, dv, dg, _ = check(BACKWARD, taken, dtype, (alone, torch.zeros_like(last), *tensors))
        assert dq[:, token].any()
        assert not dq[:, :token].any()
        for gradient in (dq, dk, dv, dg):
            assert not gradient[:, token + 1 :].any()
        assert dk[:, : token + 1].any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around contiguous inputs stays there."""
    for case in (FORWARD, BACKWARD):
        op, given = getattr(taken, case.call), case.arguments(Draw(dtype), 1, 75, 1, 20, 40)
        actual = op(*(amid(value) if isinstance(value, torch.Tensor) else value for value in given))
        torch.testing.assert_close(actual, op(*given), rtol=0, atol=0)


@each_dtype
def test_no_tokens(taken: ModuleType, dtype: torch.dtype) -> None:
    """The state stays, and so does its gradient: as copies, contiguous ones of states of other strides."""
    (*tensors, first, _, _), (grad, last) = problem(dtype, 2, 0, 3, 16, 32)
    first, last = (state.mT.contiguous().mT for state in (first, last))
    copies = taken.linear_attention(*tensors, first)[1], taken.linear_attention_backward(grad, last, *tensors, first)[4]
    for copy, state in zip(copies, (first, last), strict=True):
        assert torch.equal(copy, state)
        assert copy.is_contiguous()
        assert copy.data_ptr() != state.data_ptr()


@each_dtype
def test_either_result(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands over what the backward op returns, and asks it as it was asked, for either result."""
    (q, k, v, g, _, first, *_), grads = problem(dtype, 1, 40, 2, 16, 32)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, first)]
    results = taken.linear_attention(*leaves[:4], 0.3, leaves[4])
    for which in ((0, 1), (0,), (1,)):
        actual = torch.autograd.grad([results[i] for i in which], leaves, [grads[i] for i in which], retain_graph=True)
        given_to = [grads[i] if i in which else torch.zeros_like(grads[i]) for i in range(2)]
        expected = taken.linear_attention_backward(*given_to, q, k, v, g, 0.3, first)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_a_column_of_ones_normalizes(taken: ModuleType) -> None:
    """Its output is what to divide by, and its state the sum of the keys."""
    q, k, v, g, *_ = of_forward(Draw(torch.float64), 1, 70, 2, 16, 20)
    q, k = q.abs(), k.abs()
    out, state = taken.linear_attention(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), torch.zeros_like(g))
    weights = torch.einsum("bihk,bjhk->bhij", q, k).tril()
    expected = torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(out[..., :-1] / out[..., -1:], expected)
    torch.testing.assert_close(state[..., -1], k.sum(1))


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so are the page's references."""
    (q, k, v, g, _, first, *_), grads = problem(torch.float16, 1, 128, 2, 64, 64)
    expected = by_token(*grads, q, k, v, g, None, None)
    terms = by_token(*grads, q.abs(), k.abs(), v.abs(), g, None, None)
    ops = {name: step[0] for name, step in recipe.STEPS.items()} | {"PyTorch": recipe.linear_attention_torch}
    for op in ops.values():
        results = op(q, k, v, g)
        assert results.dtype == torch.float16
        assert ((results.double() - expected[0]).abs() <= 4 * 2.0**-11 * terms[0]).all()
    doubles = [t.double() for t in (q, k, v, g, first)]
    results = recipe.results_of(recipe.recurrence, doubles, [t.double() for t in grads], 0.3)
    for actual, right in zip(results, by_token(*grads, q, k, v, g, 0.3, first), strict=True):
        torch.testing.assert_close(actual, right)


OPTIONS = {"GROUP": 3, "cu_ptr": "i32", "sequences_ptr": "i64"}
KERNELS: dict[str, dict[str, Any]] = {
    "out": {"STARTED": True},
    "ends": {"REVERSE": False, "STARTED": False, "ENDS": True},
    "ends, reverse": {"REVERSE": True, "STARTED": False, "ENDS": True},
    "states": {"REVERSE": False, "STARTED": False, "ENDS": False},
    "states, reverse": {"REVERSE": True, "STARTED": True, "ENDS": False},
    "dq": {"REVERSE": False, "GATES": True},
    "dk": {"REVERSE": True, "GATES": True},
    "dv": {"REVERSE": True, "GATES": False},
}
PLAIN = tuple(KERNELS)
KERNELS |= {
    "out, with all options": {"STARTED": True, "V_FIRST": True, **OPTIONS},
    "states, reverse, with all options": {"REVERSE": True, "STARTED": True, "V_FIRST": True, "ENDS": False, **OPTIONS},
    "ends, with all options": {"REVERSE": False, "STARTED": False, "ENDS": True, **OPTIONS},
    "dk, with all options": {"REVERSE": True, "GATES": True, **OPTIONS},
}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


def at_launch(taken: ModuleType, which: str, dtype: str, K: int, V: int) -> tuple[object, dict[str, object]]:
    """Return a kernel, and what the launchers pass on to it, for lengths and heads that 16 divides."""
    import triton.language as tl

    block = functools.partial(taken._linear_attention_block, itemsize=BYTES[dtype])
    forward, states, tokens = taken._linear_attention_tiles(K, BYTES[dtype])
    acc_type = "fp64" if dtype == "fp64" else "fp32"
    of_wide = "g_ptr", "first_ptr", "last_ptr", "ends_ptr", "sums_ptr", "flow_ptr", "reads_ptr", "dg_ptr"
    of_states = {} if "GATES" in KERNELS[which] else {"V_FIRST": False}
    known = (
        dict.fromkeys(("cu_ptr", "sequences_ptr"))
        | of_states
        | {
            "SCALE": K**-0.5,
            "GROUP": 1,
            "ACC": getattr(tl, {"fp64": "float64", "fp32": "float32"}[acc_type]),
            "CHUNK": states[0],
        }
    )
    if which.startswith("out"):
        kernel, (chunk, most_v, num_warps, num_stages) = taken._linear_attention_kernel, forward
        known |= {"K": K, "V": V, "BLOCK_K": block(256, K), "BLOCK_V": block(most_v, V), "CHUNK": chunk}
    elif "ENDS" in KERNELS[which]:
        kernel, (_, most_k, most_v, num_warps, num_stages) = taken._linear_attention_states_kernel, states
        known |= {"K": K, "V": V, "BLOCK_K": block(most_k, K), "BLOCK_V": block(most_v, V)}
    else:
        kernel, (most_x, most_z, num_warps, num_stages) = taken._linear_attention_tokens_kernel, tokens
        X, Z = (V, K) if KERNELS[which]["GATES"] else (K, V)
        blocks = -(-K // block(states[1], K)) * -(-V // block(states[2], V))
        known |= {"X": X, "Z": Z, "BLOCK_X": block(most_x, X), "BLOCK_Z": block(most_z, Z)}
        known["BLOCKS"] = blocks if KERNELS[which]["GATES"] else 1
    pointers = dict.fromkeys((name for name in of_wide if name in kernel.arg_names), acc_type)
    options = {"dtype": dtype, "num_warps": num_warps, "num_stages": num_stages, "multiples": ["T", "HEADS", "length"]}
    return kernel, options | known | KERNELS[which] | pointers


def codes(taken: ModuleType) -> dict[tuple[int, str], tuple[set[str], bool, bool]]:
    """Return, for heads and kernels, the matrix instructions, whether exp2 is one, and whether anything is atomic."""
    results = {}
    for D, which in itertools.product((64, 128), KERNELS):
        kernel, known = at_launch(taken, which, "bf16", D, D)
        text = compiled(kernel, **known).asm["ptx"]
        matrix = set(re.findall(r"(wgmma|mma)\.\S*?m\d+n\d+", text))
        results[D, which] = matrix, "ex2.approx" in text, bool(re.search(r"\b(atom|red)\.global", text))
    return results


@pytest.mark.thorough
def test_narrow_heads_read_nothing_unwritten(gallery: Path, on_h100: Ask) -> None:
    """On an H100, tiles as narrow as these heads had wrong results: `compiled` looks for the cause."""
    on_h100(gallery / RECIPE, functools.partial(narrow, at_launch=at_launch, kernels=PLAIN))


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, one instruction for an exponential, and no additions to memory."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert set(results) == set(itertools.product((64, 128), KERNELS))
    assert set(map(repr, results.values())) == {repr(({"wgmma"}, True, False))}


def rooms(taken: ModuleType) -> list[int]:
    """Return the bytes of shared memory that the largest dimensions take."""
    return [
        compiled(kernel, **known).metadata.shared
        for dtype, which, K in itertools.product(BYTES, PLAIN, (128, 256))
        for kernel, known in [at_launch(taken, which, dtype, K, 256)]
    ]


@pytest.mark.thorough
def test_fits(gallery: Path, on_h100: Ask) -> None:
    """A GPU whose programs may have 99 KiB of shared memory has room for the largest dimensions."""
    (byte_counts,) = on_h100(gallery / RECIPE, rooms)
    assert len(byte_counts) == 8 * len(PLAIN)
    assert max(byte_counts) <= 99 * 1024


def traced(recipe: ModuleType, T: int) -> list[list[str]]:
    """Return the graphs of a call with so many tokens, forward and backward."""
    q, k, v = (torch.randn(2, T, 3, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    g = torch.randn(2, T, 3, requires_grad=True)
    first = torch.randn(2, 3, 64, 64, requires_grad=True)
    return graphs(lambda q, k, v, g, first: recipe.linear_attention(q, k, v, g, 0.3, first), q, k, v, g, first)


def test_torch_compile_looks_into_it(gallery: Path, on_h100: Ask) -> None:
    """It sees a kernel forward and five backward; with segments, one more for each direction of a state."""
    looks = (functools.partial(traced, T=T) for T in (40, 300))
    for pair, numbers in zip(on_h100(gallery / RECIPE, *looks), ((1, 5), (2, 7)), strict=True):
        for graph, number in zip(pair, numbers, strict=True):
            assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == number
            assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(30)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last tokens are right."""
    T = 2**18 + 3
    q = torch.zeros(1, T, 65, 128, dtype=torch.float16, device=DEVICE)
    g = torch.zeros(1, T, 65, device=DEVICE)
    g[:, -70] = -torch.inf
    q[:, -70:] = torch.randn(70, 65, 128, device=DEVICE)
    out, last = taken.linear_attention(q, q, q, g)
    few = q[:, -70:], g[:, -70:]
    expected, end = taken.linear_attention(*[few[0]] * 3, few[1])
    torch.testing.assert_close(out[:, -70:], expected, rtol=2.0**-8, atol=2.0**-5)
    torch.testing.assert_close(last, end, rtol=2.0**-8, atol=2.0**-5)


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=8)
@given(T=st.integers(1, 1200), dims=st.sampled_from([(64, 64), (128, 128), (128, 256), (96, 80)]))
def test_long(taken: ModuleType, dtype: torch.dtype, T: int, dims: tuple[int, int]) -> None:
    """Many chunks."""
    assert_right(taken, *problem(dtype, 1, T, 3, *dims))


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("attention/linear_attention")
    assert re.search(r"(?m)^ 8192 tokens: +17\.2 GB in +8192 steps, floor 0\.13 GB$", out)
    assert re.search(r"(?m)^largest error \d\.\de-04, allowed 2\.0e-03$", out)
    assert re.search(r"(?m)^ 8192 tokens: 64 programs of +128 steps; +2048 chunks in all heads$", out)
    shares = re.findall(r"(?m)^torch\.\w+: at most (\d\.\d\d) of what is allowed$", out)
    assert len(shares) == 4
    assert all(0 < float(share) <= 1 for share in shares)
    assert re.findall(r"(?m)^(TypeError|ValueError): linear_attention takes", out) == [*["TypeError"] * 2, "ValueError"]
    assert re.findall(r"(?m)^log decay (-\d\.\d), split: error nan$", out) == ["-2.0"]


BEFORE = "tl.exp2(tl.load(sums_ptr + slot))"  # of a segment; forward an end follows

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "the state does not decay",
        "state = state * tl.exp2(total)\n        state = tl.dot(k.T",
        "state = tl.dot(k.T",
    ),
    (
        "backward the state does not decay",
        "state = state * tl.exp2(total)\n        state = tl.dot(a.T",
        "state = tl.dot(a.T",
    ),
    ("forward a token does not decay", "(v * tl.exp2(total - decay)[:, None])", "v"),
    (
        "forward the state has no scale",
        "out = out * (tl.exp2(decay) * SCALE)[:, None]",
        "out = out * tl.exp2(decay)[:, None]",
    ),
    (
        "forward no token reads itself",
        "        seen = offs_t[:, None] >= offs_t[None, :]\n        since = tl.where",
        "        seen = offs_t[:, None] > offs_t[None, :]\n        since = tl.where",
    ),
    ("what a token writes does not decay", "weight = tl.exp2(total - decay)\n", "weight = tl.exp2(total - total)\n"),
    (
        "no token reads itself",
        "(CHUNK, CHUNK)\n    seen = offs_t[:, None] >= offs_t[None, :]\n",
        "(CHUNK, CHUNK)\n    seen = offs_t[:, None] > offs_t[None, :]\n",
    ),
    (
        "no token is read by itself",
        "        seen = offs_t[:, None] <= offs_t[None, :]\n",
        "        seen = offs_t[:, None] < offs_t[None, :]\n",
    ),
    ("in reverse a decay grows", "        since = -since\n", "        since = since\n"),
    (
        "tokens past the end decay",
        "g = tl.load(g_ptr + rows, mask=inside, other=0.0) *",
        "g = tl.load(g_ptr + rows, mask=inside, other=-1.0) *",
    ),
    (
        "the first state is forgotten",
        "            STARTED=first is not None,\n            V_FIRST",
        "            STARTED=False,\n            V_FIRST",
    ),
    (
        "the backward forgets the first state",
        "    started = first is not None\n",
        "    started = False\n",
    ),
    ("segments forget earlier ones", f"state * {BEFORE} + added\n    end", "added\n    end"),
    ("the state of a segment does not decay", f"{BEFORE} + added\n    end", "1 + added\n    end"),
    ("a segment has no log decay", "        passed += total\n", ""),
    (
        "the last state is that of the first segment",
        "    if segment == segments - 1:\n        tl.store(last",
        "    if segment == 0:\n        tl.store(last",
    ),
    (
        "the reverse's ends go forward",
        '"REVERSE": reverse, "ENDS": True',
        '"REVERSE": False, "ENDS": True',
    ),
    ("the flow through a chunk does not decay", "tl.sum(state * other) * tl.exp2(total)", "tl.sum(state * other)"),
    ("the flow is that of one block", "for block in range(BLOCKS):", "for block in range(1):"),
    ("a gate acts on its own token", "tl.cumsum(far, axis=0) - far", "tl.cumsum(far, axis=0)"),
    ("what goes behind the chunk counts twice", "near = reads - far\n", "near = reads\n"),
    ("K above 128 is in two blocks", "(tiles if K <= 128 else", "(tiles if K <= 256 else"),
    ("no bound", "    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN\n", ""),
    ("NaN is bounded", "tl.where(g < LOWEST, LOWEST, g)", "tl.where(g >= LOWEST, g, LOWEST)"),
    ("the reverse goes forward", "chunk = chunks - 1 - step if REVERSE else step", "chunk = step"),
    (
        "the last state is of (K, V)",
        "outer, state, mask=mask)\n\n\n@triton.jit(do",
        "tile, state, mask=mask)\n\n\n@triton.jit(do",
    ),
    (
        "each head has keys of its own",
        "shared = tokens * (HEADS // GROUP) + head // GROUP  # of q and k\n        own",
        "shared = rows\n        own",
    ),
    (
        "a head that is shared is that of others",
        "head // GROUP  # of q and k\n        a",
        "head % (HEADS // GROUP)\n        a",
    ),
    (
        "packed sequences share a state",
        "        if segment >= segments:\n            return\n        place = sequence * HEADS + head\n",
        "        place = head\n",
    ),
    ("all sequences begin with the first", "begin = tl.load(cu_ptr + sequence)", "begin = tl.load(cu_ptr)"),
    (
        "a sequence has tokens of the next",
        "tl.load(cu_ptr + sequence + 1) - begin)",
        "tl.load(cu_ptr + sequence + 1) - begin + 9)",
    ),
    (
        "an empty sequence has no state",
        "segments = tl.maximum(tl.cdiv(T, length), 1)\n        if segment >= segments:",
        "segments = tl.cdiv(T, length)\n        if segment >= segments:",
    ),
    (
        "sequences have no room for a part more",
        "begins = cu_seqlens // unit + arange(cu_seqlens.shape[0])",
        "begins = cu_seqlens // unit",
    ),
    (
        "ends of another sequence",
        "ends_ptr += slot * K * V\n        sums_ptr += slot\n    state",
        "ends_ptr += 0\n    state",
    ),
    ("chunks of another sequence", "            slot += first_slot\n", "            slot += 0\n"),
    (
        "tokens past the end are stored",
        "    inside = offs_t < T\n    tokens",
        "    inside = offs_t < T + 9\n    tokens",
    ),
    (
        "padding of values is stored",
        "    mask = inside[:, None] & (offs_z[None, :] < Z)\n",
        "    mask = inside[:, None] & (offs_z[None, :] < Z + 8)\n",
    ),
    (
        "padding of keys is read",
        "own_mask = inside[:, None] & (offs_x[None, :] < X)",
        "own_mask = inside[:, None] & (offs_x[None, :] < X + 4)",
    ),
    ("queries do not weigh by the scale", "weight = tl.exp2(decay) * SCALE\n", "weight = tl.exp2(decay)\n"),
    ("what comes from the state has no scale", "else tl.exp2(decay) * SCALE\n", "else tl.exp2(decay)\n"),
    (
        "without tokens the state is lost",
        "last = g.new_zeros(last.shape) if first is None else first",
        "last = g.new_zeros(last.shape)",
    ),
    (
        "without tokens the gradient of the state is lost",
        "grad_last.clone(memory_format=torch.contiguous_format)",
        "torch.zeros_like(grad_last)",
    ),
]
