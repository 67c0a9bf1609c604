"""The op of the recipe Linear attention: outputs, final states and gradients."""

# ruff: noqa: N806 - lengths and dimensions have the recipe's names

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, check
from compiled import Ask, compiled, graphs, narrow
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, amid
from recurrences import OF_ALL, SIZES, SMALL, SMALL_WITHOUT_STATE, shapes
from torch.nn.functional import logsigmoid

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/linear_attention.py"
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
Tensors = tuple[torch.Tensor, ...]


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


def exact(*arguments: Any) -> list[Exact]:
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


def roundings(out: torch.Tensor) -> int:
    """Return how many roundings of the accumulator that is, besides those to the dtype."""
    return 90 if out.dtype == torch.float64 else 42


def of_forward(
    draw: Draw,
    batch: int,
    T: int,
    heads: int,
    K: int,
    V: int,
    gate: float = 2.0,
    scale: float | None = None,
    started: bool = True,
) -> tuple[Any, ...]:
    """Make queries, keys, values, log decays, the scale and, if there is one, a state."""
    acc_dtype = accumulator(draw.dtype)
    q, k, v = draw(batch, T, heads, K), draw(batch, T, heads, K), draw(batch, T, heads, V)
    g = draw(batch, T, heads, dtype=acc_dtype, of=lambda x: logsigmoid(x + gate))
    return q, k, v, g, scale, draw(batch, heads, K, V, dtype=acc_dtype) if started else None


def of_backward(draw: Draw, batch: int, T: int, heads: int, K: int, V: int, *options: Any) -> tuple[Any, ...]:
    """Make the gradients of both results, and what they are the results of."""
    grads = draw(batch, T, heads, V), draw(batch, heads, K, V, dtype=accumulator(draw.dtype))
    return *grads, *of_forward(draw, batch, T, heads, K, V, *options)


def exact_forward(*tensors: Any) -> list[Exact]:
    """Return both results."""
    _, _, v, *_ = tensors
    batch, _, heads, K = tensors[0].shape
    return exact(torch.zeros_like(v), v.new_zeros(batch, heads, K, v.shape[3]), *tensors)[:2]


def fitting(draw: Draw) -> Tensors:
    """Make arguments that fit each other."""
    q, k, v, g, _, first = of_forward(draw, 2, 5, 3, 16, 32)
    return q, k, v, g, first


def refused(way: Callable[..., tuple[Any, ...]], error: type[Exception], text: str) -> Refused:
    """Return a call that raises, given what makes its arguments of some that fit."""
    return Refused(lambda draw: way(*fitting(draw)), error, f"linear_attention takes {text}")


def misfit(way: Callable[..., tuple[Any, ...]]) -> Refused:
    """Return a call with shapes that do not fit, which are named."""
    names = "q", "k", "v", "g", "", "initial_state"
    given = zip(names, way(*fitting(Draw(torch.float32))), strict=False)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given if t is not None)
    return refused(way, ValueError, rf"q and k of .* to 256, not {re.escape(shapes)}$")


KINDS = r"q, .* of torch\.float32, .* not q torch\.float32"
REFUSED = [
    refused(lambda q, k, v, g, first: (q.int(), k, v, g), TypeError, r"float16, .* not torch\.int32"),
    refused(lambda q, k, v, g, first: (q, k.bfloat16(), v, g), TypeError, KINDS),
    refused(lambda q, k, v, g, first: (q, k, v, g.half()), TypeError, KINDS),
    refused(lambda q, k, v, g, first: (q, k, v, g, None, first.half()), TypeError, KINDS),
    misfit(lambda q, k, v, g, first: (q[0], k[0], v[0], g[0])),
    misfit(lambda q, k, v, g, first: (q, k[:, :4], v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v[:, :4], g)),
    misfit(lambda q, k, v, g, first: (q, k, v[:, :, :2], g)),
    misfit(lambda q, k, v, g, first: (q, k, v, g[..., None])),
    misfit(lambda q, k, v, g, first: (q[..., :8], k, v, g)),
    misfit(lambda q, k, v, g, first: (q[..., :0], k[..., :0], v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v[..., :0], g)),
    misfit(lambda q, k, v, g, first: (q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v, g)),
    misfit(lambda q, k, v, g, first: (q, k, v.repeat(1, 1, 1, 9), g)),
    misfit(lambda q, k, v, g, first: (q, k, v, g, None, first.mT)),
    misfit(lambda q, k, v, g, first: (q, k, v, g, None, first[:1])),
]
SEGMENTS = [*SIZES[:2], (1, 600, 1, 16, 16, 5.0), *SIZES[2:], (1, 256, 2, 32, 32, 5.0), (1, 257, 2, 32, 32, 5.0)]
CONTRACT = [
    Case(
        "linear_attention",
        of_forward,
        exact_forward,
        autocast="asked",
        sizes=SEGMENTS,
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
        sizes=SEGMENTS,
        small=SMALL_WITHOUT_STATE,
        shapes=shapes(),
        roundings=roundings,
        **OF_ALL,
    ),
]
FORWARD, BACKWARD = CONTRACT


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
    chunks = {tile[0] for tiles in taken.LINEAR_ATTENTION_TILES.values() for tile in tiles[:2]}
    for batch, heads, T in itertools.product((1, 3, 64), (1, 16, 200), (1, 255, 256, 257, 8192, 65536, 100_001)):
        cut = taken._linear_attention_cut(torch.empty(batch, T, heads, 128, device="meta"))
        assert (cut["segments"] - 1) * cut["length"] < T <= cut["segments"] * cut["length"]
        assert cut["segments"] == 1 or cut["segments"] * batch * heads <= 128
        assert all(cut["length"] % chunk == 0 for chunk in chunks)
    assert taken._linear_attention_cut(torch.empty(1, 8192, 16, 128, device="meta")) == {"segments": 8, "length": 1024}


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
    for case in CONTRACT:
        op, given = getattr(taken, case.call), case.arguments(Draw(dtype), 1, 75, 1, 20, 40)
        actual = op(*(amid(value) if isinstance(value, torch.Tensor) else value for value in given))
        torch.testing.assert_close(actual, op(*given), rtol=0, atol=0)


@each_dtype
def test_no_tokens(taken: ModuleType, dtype: torch.dtype) -> None:
    """The state stays, and so does its gradient: as copies, contiguous ones of states of other strides."""
    (*tensors, first), (grad, last) = problem(dtype, 2, 0, 3, 16, 32)
    first, last = (state.mT.contiguous().mT for state in (first, last))
    copies = taken.linear_attention(*tensors, first)[1], taken.linear_attention_backward(grad, last, *tensors, first)[4]
    for copy, state in zip(copies, (first, last), strict=True):
        assert torch.equal(copy, state)
        assert copy.is_contiguous()
        assert copy.data_ptr() != state.data_ptr()


@each_dtype
def test_either_result(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands over what the backward op returns, and asks it as it was asked, for either result."""
    (q, k, v, g, _, first), grads = problem(dtype, 1, 40, 2, 16, 32)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, first)]
    results = taken.linear_attention(*leaves[:4], 0.3, leaves[4])
    for which in ((0, 1), (0,), (1,)):
        actual = torch.autograd.grad([results[i] for i in which], leaves, [grads[i] for i in which], retain_graph=True)
        given_to = [grads[i] if i in which else torch.zeros_like(grads[i]) for i in range(2)]
        expected = taken.linear_attention_backward(*given_to, q, k, v, g, 0.3, first)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so are the page's references."""
    (q, k, v, g, _, first), grads = problem(torch.float16, 1, 128, 2, 64, 64)
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


KERNELS = {
    "out": {"STARTED": True},
    "ends": {"REVERSE": False, "STARTED": False, "ENDS": True},
    "ends, reverse": {"REVERSE": True, "STARTED": False, "ENDS": True},
    "states": {"REVERSE": False, "STARTED": False, "ENDS": False},
    "states, reverse": {"REVERSE": True, "STARTED": True, "ENDS": False},
    "dq": {"REVERSE": False, "GATES": True},
    "dk": {"REVERSE": True, "GATES": True},
    "dv": {"REVERSE": True, "GATES": False},
}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


def at_launch(taken: ModuleType, which: str, dtype: str, K: int, V: int) -> tuple[object, dict[str, object]]:
    """Return a kernel, and what the launchers pass on to it, for lengths and heads that 16 divides."""
    import triton.language as tl

    block = functools.partial(taken._linear_attention_block, itemsize=BYTES[dtype])
    forward, states, tokens = taken.LINEAR_ATTENTION_TILES[BYTES[dtype]]
    acc_type = "fp64" if dtype == "fp64" else "fp32"
    of_wide = "g_ptr", "first_ptr", "last_ptr", "ends_ptr", "sums_ptr", "flow_ptr", "reads_ptr", "dg_ptr"
    known = {"SCALE": K**-0.5, "ACC": getattr(tl, {"fp64": "float64", "fp32": "float32"}[acc_type]), "CHUNK": states[0]}
    if which == "out":
        kernel, (chunk, most_v, num_warps, num_stages) = taken._linear_attention_kernel, forward
        known |= {"K": K, "V": V, "BLOCK_K": block(128, K), "BLOCK_V": block(most_v, V), "CHUNK": chunk}
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
    on_h100(gallery / RECIPE, functools.partial(narrow, at_launch=at_launch, kernels=tuple(KERNELS)))


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, one instruction for an exponential, and no additions to memory."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert set(results) == set(itertools.product((64, 128), KERNELS))
    assert set(map(repr, results.values())) == {repr(({"wgmma"}, True, False))}


def rooms(taken: ModuleType) -> list[int]:
    """Return the bytes of shared memory that the largest dimensions take."""
    return [
        compiled(kernel, **known).metadata.shared
        for dtype, which in itertools.product(BYTES, KERNELS)
        for kernel, known in [at_launch(taken, which, dtype, 128, 256)]
    ]


@pytest.mark.thorough
def test_fits(gallery: Path, on_h100: Ask) -> None:
    """A GPU whose programs may have 99 KiB of shared memory has room for the largest dimensions."""
    (byte_counts,) = on_h100(gallery / RECIPE, rooms)
    assert len(byte_counts) == 32
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
        "            STARTED=first is not None,\n            CHUNK",
        "            STARTED=False,\n            CHUNK",
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
    ("no bound", "    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN\n", ""),
    ("NaN is bounded", "tl.where(g < LOWEST, LOWEST, g)", "tl.where(g >= LOWEST, g, LOWEST)"),
    ("the reverse goes forward", "chunk = chunks - 1 - step if REVERSE else step", "chunk = step"),
    ("tokens past the end are stored", "    inside = offs_t < T\n    rows", "    inside = offs_t < T + 9\n    rows"),
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
