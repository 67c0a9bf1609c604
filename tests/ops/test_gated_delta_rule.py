"""The op of the recipe Gated delta rule: outputs, final states and gradients."""

# ruff: noqa: N806 - lengths and dimensions have the recipe's names

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from torch.nn.functional import logsigmoid, normalize

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/gated_delta_rule.py"
NAMES = "out", "last", "dq", "dk", "dv", "dg", "dbeta", "dfirst"
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
Tensors = tuple[torch.Tensor, ...]


def by_token(
    grad: torch.Tensor,
    back: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    first: torch.Tensor | None,
    scale: float | None,
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return outputs, the last state and all gradients in float64, by the recurrence and its own.

    Also return, of what is a sum or difference that may cancel, the largest sum of its terms' magnitudes.
    """
    grad, back, q, k, v, g, beta = (t.double() for t in (grad, back, q, k, v, g, beta))
    first = torch.zeros_like(back) if first is None else first.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    a, states, errors = g.exp()[..., None, None], [first], []
    for t in range(q.shape[1]):
        decayed = states[-1] * a[:, t]
        errors.append(v[:, t] - (k[:, t, :, None] @ decayed)[:, :, 0])
        states.append(decayed + k[:, t, :, :, None] * (beta[:, t, :, None] * errors[-1])[:, :, None])
    out, dq, dk, dv, dg, dbeta = (torch.zeros_like(t) for t in (v, q, k, v, g, beta))
    of_keys, of_betas, added = torch.zeros_like(k), torch.zeros_like(beta), torch.zeros_like(first)
    of_queries = torch.zeros_like(q)
    if q.shape[1]:
        added = decayed.abs() + (states[-1] - decayed).abs()
    for t in reversed(range(q.shape[1])):
        decayed = states[t] * a[:, t]
        out[:, t] = scale * (q[:, t, :, None] @ states[t + 1])[:, :, 0]
        dq[:, t] = scale * (states[t + 1] @ grad[:, t, :, :, None])[..., 0]
        of_queries[:, t] = abs(scale) * (states[t + 1].abs() @ grad[:, t, :, :, None].abs())[..., 0]
        back = back + scale * q[:, t, :, :, None] * grad[:, t, :, None, :]
        written = (k[:, t, :, None] @ back)[:, :, 0]
        dbeta[:, t] = (written * errors[t]).sum(-1)
        of_betas[:, t] = (written * errors[t]).abs().sum(-1)
        dv[:, t] = beta[:, t, :, None] * written
        first_term, second_term = back * (beta[:, t, :, None] * errors[t])[:, :, None], decayed * dv[:, t, :, None]
        dk[:, t] = (first_term - second_term).sum(-1)
        of_keys[:, t] = (first_term.abs() + second_term.abs()).sum(-1)
        back = back - k[:, t, :, :, None] * dv[:, t, :, None, :]
        dg[:, t] = (back * decayed).sum((-1, -2))
        back = back * a[:, t]
    # Terms of the gradient of g: pairs of two tokens that are both later.
    of_gates = (dq * q).abs().sum(-1) + (dk * k).abs().sum(-1)
    terms = {"last": added, "dq": of_queries, "dk": of_keys, "dg": of_gates, "dbeta": of_betas}
    return (out, states[-1], dq, dk, dv, dg, dbeta, back), {
        name: t.max() if t.numel() else torch.zeros(()) for name, t in terms.items()
    }


def exact(*arguments: Any, looser: float = 1) -> list[Exact]:
    """Return both results and all gradients: four roundings of the largest, to the dtype of q.

    In the accumulator a log decay is off by a rounding of the sum that it is a difference of.
    """
    grad, _, q, _, _, g, _, _, scale = arguments
    values, terms = by_token(*arguments)
    if q.numel():  # tokens shrink what comes from later ones, and not its rounding
        terms["dfirst"] = q.abs().max() * grad.abs().max() * (q.shape[3] ** -0.5 if scale is None else abs(scale))
    decays = g.abs().clamp(max=850).sum(1).max() if g.numel() else 0.0
    results = []
    for name, value in zip(NAMES, values, strict=True):
        largest = value.abs().max() if value.numel() else value.new_zeros(())
        size = looser * (largest + terms.get(name, 0.0))
        of_state = name in ("last", "dg", "dbeta", "dfirst")
        results.append(
            Exact(
                value,
                (size * (1 + decays / 7)).expand(value.shape),
                dtype=accumulator if of_state else None,
                # Numbers below 2**-14 lose bits in float16.
                narrow=(4 * size + 2.0**-7).expand(value.shape),
                # The interpreter has bfloat16 as float32; without tokens, the state is a copy.
                made_by_torch=not (of_state and q.numel()),
            )
        )
    return results


def exact_forward(*tensors: Any, looser: float = 1) -> list[Exact]:
    """Return both results."""
    q, _, v, *_ = tensors
    batch, _, heads, K = q.shape
    return exact(torch.zeros_like(v), v.new_zeros(batch, heads, K, v.shape[3]), *tensors, looser=looser)[:2]


def exact_backward(*arguments: Any, looser: float = 1) -> list[Exact]:
    """Return all gradients."""
    return exact(*arguments, looser=looser)[2:]


def roundings(out: torch.Tensor) -> int:
    """Return how many roundings of the accumulator that is, besides those to the dtype."""
    return 120 if out.dtype == torch.float64 else 56


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
    """Make queries, keys of length one, values, log decays, betas, a state, if there is one, and the scale."""
    acc_dtype, each = accumulator(draw.dtype), (batch, T, heads)
    q, k, v = draw(*each, K), draw(*each, K, of=lambda x: normalize(x, dim=-1)), draw(*each, V)
    g = draw(*each, dtype=acc_dtype, of=lambda x: logsigmoid(x + gate))
    beta = draw(*each, dtype=acc_dtype, of=torch.sigmoid)
    return q, k, v, g, beta, draw(batch, heads, K, V, dtype=acc_dtype) if started else None, scale


def of_backward(draw: Draw, batch: int, T: int, heads: int, K: int, V: int, *options: Any) -> tuple[Any, ...]:
    """Make the gradients of both results, and what they are the results of."""
    grads = draw(batch, T, heads, V), draw(batch, heads, K, V, dtype=accumulator(draw.dtype))
    return *grads, *of_forward(draw, batch, T, heads, K, V, *options)


def refused(way: Callable[..., tuple[Any, ...]], error: type[Exception], text: str) -> Refused:
    """Return a call that raises, given what makes its arguments of some that fit."""
    return Refused(lambda draw: way(*of_forward(draw, 2, 5, 3, 16, 32)[:-1]), error, f"gated_delta_rule takes {text}")


def misfit(way: Callable[..., Tensors]) -> Refused:
    """Return a call with shapes that do not fit, which are named."""
    names = "q", "k", "v", "g", "beta", "initial_state"
    given = zip(names, way(*of_forward(Draw(torch.float32), 2, 5, 3, 16, 32)[:-1]), strict=False)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given)
    return refused(way, ValueError, rf"q and k of .* V up to 256, not {re.escape(shapes)}$")


KINDS = r"q, k and v of one .*, not q torch\.float32 on "
REFUSED = [
    refused(lambda q, *others: (q.int(), *others), TypeError, r"float tensors, not torch\.int32"),
    refused(lambda q, k, v, g, beta, first: (q, k.bfloat16(), v, g, beta), TypeError, KINDS),
    refused(lambda q, k, v, g, beta, first: (q, k, v, g.half(), beta), TypeError, KINDS),
    refused(lambda q, k, v, g, beta, first: (q, k, v, g, beta.half()), TypeError, KINDS),
    refused(lambda q, k, v, g, beta, first: (q, k, v, g, beta, first.half()), TypeError, KINDS),
    misfit(lambda q, k, v, g, beta, first: (q[0], k[0], v[0], g[0], beta[0])),
    misfit(lambda q, k, v, g, beta, first: (q, k[:, :4], v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v[:, :4], g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v[:, :, :2], g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g[..., None], beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g, beta[:, :4])),
    misfit(lambda q, k, v, g, beta, first: (q[..., :8], k, v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q[..., :0], k[..., :0], v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v[..., :0], g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v.repeat(1, 1, 1, 9), g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g, beta, first.mT)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g, beta, first[:1])),
    misfit(lambda *given: tuple(t[:, :, :1].expand(2, 5, 65536, *t.shape[3:]) for t in given[:5])),
]
CONTRACT = [
    Case(
        "gated_delta_rule",
        of_forward,
        exact_forward,
        autocast="asked",
        sizes=SIZES,
        small=SMALL,
        shapes=shapes(),
        roundings=roundings,
        gradients=lambda *arguments: exact(*arguments)[2:7],
        with_gradients=5,
        refused=REFUSED,
        **OF_ALL,
    ),
    Case(
        "gated_delta_rule_backward",
        of_backward,
        exact_backward,
        sizes=SIZES,
        small=SMALL_WITHOUT_STATE,
        roundings=roundings,
        shapes=shapes(1),  # without tokens, the gradient of the state has its strides
        **OF_ALL,
    ),
]
FORWARD, BACKWARD = CONTRACT


def problem(dtype: torch.dtype, *size: Any) -> tuple[tuple[Any, ...], Tensors]:
    """Return what the op takes, and gradients of its results."""
    grad, back, *tensors = of_backward(Draw(dtype), *size)
    return tuple(tensors), (grad, back)


def assert_right(taken: ModuleType, tensors: tuple[Any, ...], grads: Tensors, looser: float = 1) -> list[torch.Tensor]:
    """Assert that both ops are right; return what they return."""
    forward, backward = (replace(case, exact=partial(case.exact, looser=looser)) for case in CONTRACT)
    dtype = grads[0].dtype
    return [*check(forward, taken, dtype, tensors), *check(backward, taken, dtype, (*grads, *tensors))]


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
    out, last = taken.gated_delta_rule(*tensors)
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
        dq, dk, dv, dg, dbeta, _ = check(BACKWARD, taken, dtype, (alone, torch.zeros_like(last), *tensors))
        assert dq[:, token].any()
        assert not dq[:, :token].any()
        for gradient in (dq, dk, dv, dg, dbeta):
            assert not gradient[:, token + 1 :].any()
        assert dk[:, token].any()


@each_dtype
def test_beta_of_zero(taken: ModuleType, dtype: torch.dtype) -> None:
    """Such a token writes nothing, and its beta has a gradient all the same."""
    tensors, grads = problem(dtype, 1, 70, 2, 16, 32)
    tensors[4][:, 20:50] = 0
    results = assert_right(taken, tensors, grads)
    assert results[6][:, 20:50].all()
    assert not results[4][:, 20:50].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_keys(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sequence that repeats one token, without decays: no step of the solve leaves the range."""
    (q, k, v, g, beta, *others), grads = problem(dtype, 1, 130, 1, 32, 32)
    k = k[:, :1].expand(k.shape)
    assert_right(taken, (q, k, v, torch.zeros_like(g), torch.ones_like(beta), *others), grads, looser=8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around contiguous inputs stays there."""
    for case in CONTRACT:
        op, given = getattr(taken, case.call), case.arguments(Draw(dtype), 1, 75, 1, 20, 40)
        actual = op(*(amid(value) if isinstance(value, torch.Tensor) else value for value in given))
        torch.testing.assert_close(actual, op(*given), rtol=0, atol=0)


@each_dtype
def test_no_tokens(taken: ModuleType, dtype: torch.dtype) -> None:
    """The state stays, and so does its gradient: as copies."""
    (*tokens, first, scale), (grad, last) = problem(dtype, 2, 0, 3, 16, 32)
    end, dfirst = (
        taken.gated_delta_rule(*tokens, first, scale)[1],
        taken.gated_delta_rule_backward(grad, last, *tokens, first, scale)[5],
    )
    for copy, state in ((end, first), (dfirst, last)):
        assert torch.equal(copy, state)
        assert copy.data_ptr() != state.data_ptr()


@each_dtype
def test_either_result(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands over what the backward op returns, and asks it as it was asked, for either result."""
    (*tensors, _), grads = problem(dtype, 1, 40, 2, 16, 32)
    leaves = [t.clone().requires_grad_() for t in tensors]
    results = taken.gated_delta_rule(*leaves, 0.3)
    for which in ((0, 1), (0,), (1,)):
        actual = torch.autograd.grad([results[i] for i in which], leaves, [grads[i] for i in which], retain_graph=True)
        given_to = [grads[i] if i in which else torch.zeros_like(grads[i]) for i in range(2)]
        expected = taken.gated_delta_rule_backward(*given_to, *tensors, 0.3)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Both kernels are right, and so is the page's reference."""
    (*tokens, _, _), grads = problem(torch.float16, 1, 128, 2, 64, 64)
    expected = by_token(*grads, *tokens, None, None)[0][0]
    for op in (recipe.by_token, recipe.by_chunk):
        results = op(*tokens)
        assert results.dtype == torch.float16
        assert (results.double() - expected).abs().max() <= 4 * 2.0**-11 * expected.abs().max()
    torch.testing.assert_close(recipe.recurrence(*(t.double() for t in tokens)), expected)


def test_exercises_of_the_page(recipe: ModuleType) -> None:
    """Their checks tell right from wrong."""
    for check_answer, answer in (
        (recipe.check_erase, recipe.erase_answer),
        (recipe.check_state, recipe.state_answer),
    ):
        assert check_answer(answer) == "right"
        assert check_answer(lambda *given: given[0]) == "wrong"
        assert check_answer(lambda *given: None) == "not solved yet"


KERNELS = {
    "solve": (0, {}),
    "states": (1, {"STARTED": True}),
    "outputs": (2, {"BACKWARD": False}),
    "outputs, backward": (2, {"BACKWARD": True}),
    "flows": (3, {}),
    "pairs": (4, {}),
    "gradients": (5, {}),
}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
OF_WIDE = [f"{name}_ptr" for name in ["g", "decay", "beta", "first", "last", "grad_last", "dfirst", "dg", "dbeta"]]


def at_launch(taken: ModuleType, which: str, dtype: str, K: int, V: int) -> tuple[object, dict[str, object]]:
    """Return a kernel, and what the launchers pass on to it on an H100, for lengths and heads that 16 divides."""
    import triton
    import triton.language as tl

    number, constants = KERNELS[which]
    kernel = taken.GATED_DELTA_RULE_KERNELS[number]
    half = BYTES[dtype] == 2
    (CHUNK, PRECISION), *tiles = taken.GATED_DELTA_RULE_TILES[BYTES[dtype]]
    most_k, most_v, num_warps, num_stages = (taken.GATED_DELTA_RULE_HOPPER if half else tiles)[number]
    least = 64 if half else 16
    acc_type = "fp64" if dtype == "fp64" else "fp32"
    known = {
        "SCALE": K**-0.5,
        "K": K,
        "V": V,
        "ACC": getattr(tl, {"fp64": "float64", "fp32": "float32"}[acc_type]),
        "PRECISION": PRECISION,
        "CHUNK": CHUNK,
        "BLOCK_K": min(most_k, max(least, triton.next_power_of_2(K))),
        "BLOCK_V": min(most_v, max(least, triton.next_power_of_2(V))),
    } | constants
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    pointers = dict.fromkeys((name for name in OF_WIDE if name in kernel.arg_names), acc_type)
    options = {"dtype": dtype, "num_warps": num_warps, "num_stages": num_stages, "multiples": ["T", "HEADS"]}
    return kernel, options | known | pointers


def codes(taken: ModuleType) -> dict[str, tuple[set[str], bool, bool]]:
    """Return, for each kernel, the types of matrix instructions, whether exp2 is one, and whether any is atomic."""
    results = {}
    for which in KERNELS:
        kernel, known = at_launch(taken, which, "bf16", 128, 128)
        text = compiled(kernel, **known).asm["ptx"]
        matrix = set(re.findall(r"wgmma\.mma_async\S*?m\d+n\d+k\d+\.f32\.(\w+)", text))
        results[which] = matrix, "ex2.approx" in text, bool(re.search(r"\b(atom|red)\.global", text))
    return results


@pytest.mark.thorough
def test_narrow_heads_read_nothing_unwritten(gallery: Path, on_h100: Ask) -> None:
    """On an H100, tiles as narrow as these heads had wrong results: `compiled` looks for the cause."""
    on_h100(gallery / RECIPE, functools.partial(narrow, at_launch=at_launch, kernels=tuple(KERNELS)))


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, in TF32 for inverses, one for an exponential, no additions to memory."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert set(results) == set(KERNELS)
    for which, code in results.items():
        assert code == ({"bf16", "tf32"} if which == "solve" else {"bf16"}, True, False), which


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a call, forward and backward."""
    q, k, v = (torch.randn(2, 40, 3, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    g, beta = (torch.randn(2, 40, 3, requires_grad=True) for _ in range(2))
    first = torch.randn(2, 3, 64, 64, requires_grad=True)
    return graphs(lambda *x: recipe.gated_delta_rule(*x, 0.3), q, k, v, g, beta, first)


def test_torch_compile_looks_into_it(gallery: Path, on_h100: Ask) -> None:
    """It sees three kernels forward and six backward."""
    ((forward, backward),) = on_h100(gallery / RECIPE, traced)
    for graph, number in ((forward, 3), (backward, 6)):
        assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == number
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(40)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last tokens are right."""
    T = 2**18 + 3
    q = torch.zeros(1, T, 65, 128, dtype=torch.float16, device=DEVICE)
    g, beta = (torch.zeros(1, T, 65, device=DEVICE) for _ in range(2))
    g[:, -70] = -torch.inf
    beta[:, -70:] = 0.5
    q[:, -70:] = torch.nn.functional.normalize(torch.randn(70, 65, 128, device=DEVICE), dim=-1)
    out, last = taken.gated_delta_rule(q, q, q, g, beta)
    few = q[:, -70:], g[:, -70:], beta[:, -70:]
    expected, end = taken.gated_delta_rule(*[few[0]] * 3, *few[1:])
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
    """What the page prints without a GPU."""
    out = printed("attention/gated_delta_rule")
    assert re.search(r"(?m)^2048 tokens: states of 4\.3 GB, 127 times the floor$", out)
    assert len(re.findall(r"(?m)^largest error \d\.\de-0\d, allowed \d\.\de-0\d$", out)) == 2
    assert len(re.findall(r"(?m)^not solved yet$", out)) == 2
    assert re.search(r"(?m)^right right$", out)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("the state does not decay", "        state *= tl.exp2(total)\n", ""),
    ("its gradient does not decay", "        flow *= tl.exp2(total)\n", ""),
    ("what a token writes does not decay", "(tl.exp2(total - decay) * beta)", "beta"),
    ("what a token writes has no beta", "(tl.exp2(total - decay) * beta)", "tl.exp2(total - decay)"),
    (
        "the system has no beta",
        "_gated_delta_rule_weights(decay, CHUNK) * beta[None, :]",
        "_gated_delta_rule_weights(decay, CHUNK)",
    ),
    ("the system has beta in rows", "(decay, CHUNK) * beta[None, :]", "(decay, CHUNK) * beta[:, None]"),
    ("a doubling is left out", "for level in range(1, 6):", "for level in range(1, 4):"),
    ("the first doubling is left out", "    inverse -= tl.where(apart == 1, pairs, 0.0)\n", ""),
    ("outputs have no beta", "        p *= tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)[None, :]\n", ""),
    ("no token reads itself", "seen = offs[:, None] >= offs[None, :]", "seen = offs[:, None] > offs[None, :]"),
    (
        "a key reads its own token",
        "tl.where(offs[:, None] > offs[None, :], errors, 0.0)",
        "tl.where(offs[:, None] >= offs[None, :], errors, 0.0)",
    ),
    ("errors do not come from the state", "x = y - tl.dot(w, read,", "x = y - 0 * tl.dot(w, read,"),
    ("the backward forgets what keys read", "f = (-f).to(k.dtype)", "f = (0 * f).to(k.dtype)"),
    ("the system is not transposed", "tl.dot(inverse.T, f,", "tl.dot(inverse, f,"),
    (
        "the gradient of beta is that of a key",
        "dbeta += tl.sum((written + near) * k, axis=1)",
        "dbeta += tl.sum(written * k, axis=1)",
    ),
    ("near has no beta", "        near *= beta[:, None]\n", ""),
    ("the first state is forgotten", "STARTED=started", "STARTED=False"),
    ("the flow through a chunk does not decay", "tl.sum(through, axis=0) * tl.exp2(total)", "tl.sum(through, axis=0)"),
    ("the flow is that of one block", "through += tl.sum(", "through = tl.sum("),
    ("a gate acts on its own token", "tl.cumsum(far, axis=0) - far", "tl.cumsum(far, axis=0)"),
    (
        "what a key reads has no gate",
        "dg += tl.sum(dq * q + read * k, axis=1)",
        "dg += tl.sum(dq * q, axis=1)",
    ),
    ("no bound", "    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN\n", ""),
    ("NaN is bounded", "tl.where(g < LOWEST, LOWEST, g)", "tl.where(g >= LOWEST, g, LOWEST)"),
    (
        "tokens past the end are stored",
        "return begin, rows, tl.arange(0, CHUNK) < T - start",
        "return begin, rows, tl.arange(0, CHUNK) < T - start + 1",
    ),
    ("queries do not weigh by the scale", "(tl.exp2(decay) * SCALE)[:, None]).to", "tl.exp2(decay)[:, None]).to"),
    ("without tokens the state is lost", "g.new_zeros(shape) if first is None else first\n", "g.new_zeros(shape)\n"),
    ("without tokens the gradient of the state is lost", "grad_last.clone()", "torch.zeros_like(grad_last)"),
]
