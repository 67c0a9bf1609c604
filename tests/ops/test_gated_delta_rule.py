"""The op of the recipe Gated delta rule: outputs, final states and gradients."""

# ruff: noqa: N806 - lengths and dimensions have the recipe's names

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, check
from compiled import Ask, compiled, graphs, narrow
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, amid
from recurrences import OF_ALL, SIZES, SMALL, SMALL_WITHOUT_STATE, shapes
from torch.nn.functional import logsigmoid, normalize, softplus

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


class Options(NamedTuple):
    """Options of a call, for `of_forward`.

    Attributes:
        lengths: of packed sequences; None is a batch.
        group: how many heads of values there are for one of queries and keys.
        unit: whether queries and keys are normalized.
        gated: whether log decays come from `A_log`.
        biased: whether they come from `dt_bias` too.
        sigmoid: whether the factors come from logits.
        negative: whether these factors are up to 2.
        v_first: whether states are (V, K).
    """

    lengths: tuple[int, ...] | None = None
    group: int = 1
    unit: bool = False
    gated: bool = False
    biased: bool = True
    sigmoid: bool = False
    negative: bool = False
    v_first: bool = False


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    first: torch.Tensor,
    *options: Any,
) -> Tensors:
    """Return what the recurrence takes for a call of the op with any options: of tokens, and the first state."""
    _, _, unit, gated, A_log, dt_bias, sigmoid, negative, v_first = (*options, *[None] * 8)[:9]
    if unit:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if v.shape[2] != q.shape[2]:
        q, k = (t.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for t in (q, k))
    if gated:
        g = -A_log.exp() * softplus(g if dt_bias is None else g + dt_bias)
    if sigmoid:
        beta = beta.sigmoid() * (2 if negative else 1)
    return q, k, v, g, beta, first.mT if v_first else first


def with_sizes(*arguments: Any) -> tuple[Tensors, list[torch.Tensor]]:
    """Return what `by_token` does, and the size that the roundings of each result are relative to."""
    grad, _, q, _, _, _, _, _, scale = arguments
    values, terms = by_token(*arguments)
    if q.numel():  # tokens shrink what comes from later ones, and not its rounding
        terms["dfirst"] = q.abs().max() * grad.abs().max() * (q.shape[3] ** -0.5 if scale is None else abs(scale))
    sizes = [
        (value.abs().max() if value.numel() else value.new_zeros(())) + terms.get(name, 0.0)
        for name, value in zip(NAMES, values, strict=True)
    ]
    return values, sizes


def exact(grad: torch.Tensor, back: torch.Tensor, *arguments: Any, looser: float = 1) -> list[Exact]:
    """Return both results and all gradients: four roundings of the largest, to the dtype of q.

    In the accumulator a log decay is off by a rounding of the sum that it is a difference of. Gradients of `A_log` and
    `dt_bias` are the last, if there are any.
    """
    first = torch.zeros_like(back) if arguments[5] is None else arguments[5]
    arguments = tuple(
        t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in (*arguments[:5], first, *arguments[6:])
    )
    q, k, v, _, _, _, scale, cu_seqlens, unit, *_, v_first = (*arguments, *[None] * 8)[:15]
    leaves = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
    prepared = prepare(*arguments)
    *tokens, first = (t.detach() for t in prepared)
    back = back.mT if v_first else back
    spans = [(slice(None), slice(None))]
    if cu_seqlens is not None:
        spans = [(slice(*ends), slice(n, n + 1)) for n, ends in enumerate(itertools.pairwise(cu_seqlens.tolist()))]
    parts = [
        with_sizes(grad[:, span], back[place], *(t[:, span] for t in tokens), first[place], scale)
        for span, place in spans
    ]
    of_values, of_sizes = zip(*parts, strict=True)
    values = [
        torch.cat(each, dim=0 if name in ("last", "dfirst") else 1)
        for name, *each in zip(NAMES, *of_values, strict=True)
    ]
    sizes = [looser * torch.stack(each).max() for each in zip(*of_sizes, strict=True)]
    values[1] = values[1].mT if v_first else values[1]
    # What comes before the recurrence, back: of sizes too, as its derivatives have one sign, apart from a projection.
    values[2:] = torch.autograd.grad(prepared, leaves, values[2:], retain_graph=True)
    spread = [size.expand(t.shape) for size, t in zip(sizes[2:], prepared, strict=True)]
    bounds = [*sizes[:2], *(t.abs() for t in torch.autograd.grad(prepared, leaves, spread))]
    if unit and q.numel():
        for place, t in ((2, q), (3, k)):
            bounds[place] = sizes[place] * (v.shape[2] // q.shape[2]) / t.detach().norm(dim=-1).min()
    g = tokens[3]
    decays = g.abs().clamp(max=850).sum(1).max() if g.numel() else 0.0
    results = []
    for place, (value, bound) in enumerate(zip(values, bounds, strict=True)):
        of_tokens = place in (0, 2, 3, 4)
        results.append(
            Exact(
                value.detach(),
                (bound * (1 + decays / 7)).expand(value.shape),
                dtype=None if of_tokens else accumulator,
                # Numbers below 2**-14 lose bits in float16.
                narrow=(4 * bound + 2.0**-7).expand(value.shape),
                # The interpreter has bfloat16 as float32; without tokens, the state is a copy.
                made_by_torch=of_tokens or not q.numel(),
            )
        )
    return results


def exact_forward(*arguments: Any, looser: float = 1) -> list[Exact]:
    """Return both results."""
    (q, _, v), v_first = arguments[:3], len(arguments) > 14 and arguments[14]
    sequences = len(arguments[7]) - 1 if len(arguments) > 7 and arguments[7] is not None else q.shape[0]
    state = v.shape[3], q.shape[3]
    back = v.new_zeros(sequences, v.shape[2], *(state if v_first else state[::-1]))
    return exact(torch.zeros_like(v), back, *arguments, looser=looser)[:2]


def exact_backward(grad: torch.Tensor, back: torch.Tensor, *arguments: Any, looser: float = 1) -> list[Exact]:
    """Return the gradients that the backward op returns."""
    if len(arguments) > 7:
        *arguments, unit, v_first = arguments
        arguments = [*arguments, unit, False, None, None, False, False, v_first]
    return exact(grad, back, *arguments, looser=looser)[2:]


def exact_gradients(grad: torch.Tensor, back: torch.Tensor, *arguments: Any) -> list[Exact]:
    """Return the gradients of all arguments that have some."""
    results = exact(grad, back, *arguments)[2:]
    if arguments[5] is None:
        del results[5]
    return results


def roundings(out: torch.Tensor) -> int:
    """Return how many roundings of the accumulator that is, besides those to the dtype."""
    return 120 if out.dtype == torch.float64 else 56


def state_shape(batch: int, heads: int, K: int, V: int, options: Options | None) -> tuple[int, ...]:
    """Return the shape of the states, given the heads of queries and keys."""
    lengths, group, *_, v_first = options or Options()
    return batch if lengths is None else len(lengths), heads * group, *((V, K) if v_first else (K, V))


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
    options: Options | None = None,
) -> tuple[Any, ...]:
    """Make queries, keys of length one, values, log decays, betas, a state, if there is one, the scale, and options."""
    lengths, group, unit, gated, biased, sigmoid, negative, v_first = options or Options()
    acc_dtype, each = accumulator(draw.dtype), (batch, T, heads * group)
    q, k = (draw(batch, T, heads, K, of=of) for of in (None, None if unit else lambda x: normalize(x, dim=-1)))
    v = draw(*each, V)
    g = draw(*each, dtype=acc_dtype, of=None if gated else lambda x: logsigmoid(x + gate))
    beta = draw(*each, dtype=acc_dtype, of=None if sigmoid else torch.sigmoid)
    first = draw(*state_shape(batch, heads, K, V, options), dtype=acc_dtype) if started else None
    if options is None:
        return q, k, v, g, beta, first, scale
    ends = None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)], device=q.device)
    A_log, dt_bias = (draw(each[2], dtype=acc_dtype) if gated and has_one else None for has_one in (True, biased))
    return q, k, v, g, beta, first, scale, ends, unit, gated, A_log, dt_bias, sigmoid, negative, v_first


def of_backward(
    draw: Draw,
    batch: int,
    T: int,
    heads: int,
    K: int,
    V: int,
    gate: float = 2.0,
    scale: float | None = None,
    started: bool = True,
    options: Options | None = None,
) -> tuple[Any, ...]:
    """Make the gradients of both results, and what they are the results of."""
    shape = state_shape(batch, heads, K, V, options)
    grads = draw(batch, T, shape[1], V), draw(*shape, dtype=accumulator(draw.dtype))
    arguments = of_forward(draw, batch, T, heads, K, V, gate, scale, started, options)
    if options is not None:  # it takes log decays and factors as they are
        arguments = (*arguments[:9], arguments[14])
    return *grads, *arguments


OPTIONS = "scale", "cu_seqlens", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias"
OPTIONS += "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first"


def refused(way: Callable[..., tuple[Any, ...]], error: type[Exception], text: str) -> Refused:
    """Return a call that raises, given what makes its arguments of some that fit."""
    return Refused(lambda draw: way(*of_forward(draw, 2, 5, 3, 16, 32)[:-1]), error, f"gated_delta_rule takes {text}")


def refused_option(error: type[Exception], text: str, **options: Any) -> Refused:
    """Return a call that an option makes raise, or one beside those that the test of another needs."""
    defaults = dict(zip(OPTIONS, [None, None, False, False, None, None, False, False, False], strict=True))

    def arguments(draw: Draw) -> tuple[Any, ...]:
        q, *others = of_forward(draw, 1, 5, 3, 16, 32)[:5]
        chosen = {
            name: option.to(q.device) if isinstance(option, torch.Tensor) else option
            for name, option in options.items()
        }
        return q, *others, chosen.pop("initial_state", None), *(defaults | chosen).values()

    return Refused(arguments, error, f"gated_delta_rule takes {text}")


def misfit(way: Callable[..., Tensors]) -> Refused:
    """Return a call with shapes that do not fit, which are named."""
    names = "q", "k", "v", "g", "beta", "initial_state"
    given = zip(names, way(*of_forward(Draw(torch.float32), 2, 5, 3, 16, 32)[:-1]), strict=False)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given)
    return refused(way, ValueError, rf"q and k of .* K and V up to 256, not {re.escape(shapes)}$")


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
    misfit(lambda q, k, v, g, beta, first: (q, k, v[:, :, :2], g[:, :, :2], beta[:, :, :2])),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g[..., None], beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g, beta[:, :4])),
    misfit(lambda q, k, v, g, beta, first: (q[..., :8], k, v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q[..., :0], k[..., :0], v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v[..., :0], g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v, g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v.repeat(1, 1, 1, 9), g, beta)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g, beta, first.mT)),
    misfit(lambda q, k, v, g, beta, first: (q, k, v, g, beta, first[:1])),
    misfit(lambda *given: tuple(t[:, :, :1].expand(2, 5, 65536, *t.shape[3:]) for t in given[:5])),
]
ENDS = torch.tensor([0, 5])
SHAPES = r"q and k of .* K and V up to 256, not q \(1, 5, 3, 16\), .*"
REFUSED_OPTIONS = [
    refused_option(TypeError, KINDS + r".*cu_seqlens torch\.float32", cu_seqlens=ENDS.float()),
    refused_option(
        TypeError, KINDS + r".*A_log torch\.bfloat16", use_gate_in_kernel=True, A_log=torch.zeros(3).bfloat16()
    ),
    refused_option(ValueError, SHAPES + r"cu_seqlens \(1,\)$", cu_seqlens=ENDS[:1]),
    refused_option(ValueError, SHAPES + r"cu_seqlens \(1, 2\)$", cu_seqlens=ENDS[None]),
    refused_option(ValueError, SHAPES + r"A_log \(2,\)$", use_gate_in_kernel=True, A_log=torch.zeros(2)),
    refused_option(
        ValueError, SHAPES + r"dt_bias \(1,\)$", use_gate_in_kernel=True, A_log=torch.zeros(3), dt_bias=torch.zeros(1)
    ),
    refused_option(ValueError, SHAPES, initial_state=torch.zeros(1, 3, 16, 32), state_v_first=True),
    refused_option(ValueError, SHAPES, initial_state=torch.zeros(1, 3, 16, 32), cu_seqlens=torch.tensor([0, 2, 5])),
    refused_option(ValueError, "A_log, .* with use_gate_in_kernel, and not without", use_gate_in_kernel=True),
    refused_option(ValueError, "A_log, .* with use_gate_in_kernel, and not without", A_log=torch.zeros(3)),
    refused_option(ValueError, "A_log, .* with use_gate_in_kernel, and not without", dt_bias=torch.zeros(3)),
    refused_option(ValueError, "allow_neg_eigval with use_beta_sigmoid_in_kernel", allow_neg_eigval=True),
    refused(
        lambda q, k, v, g, beta, first: (q, k, v, g, beta, None, None, ENDS.to(q.device)), ValueError, "q and k of "
    ),
    refused(
        lambda q, k, v, g, beta, first: (q[:, :, :2], k[:, :, :2], v, g, beta),
        ValueError,
        r"q and k of .* not q \(2, 5, 2",
    ),
    refused(
        lambda q, k, v, g, beta, first: (q[:, :, :0], k[:, :, :0], v, g, beta),
        ValueError,
        r"q and k of .* not q \(2, 5, 0",
    ),
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
        gradients=lambda *arguments: exact_gradients(*arguments)[:5],
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
        shapes=shapes(),
        **OF_ALL,
    ),
]
FORWARD, BACKWARD = CONTRACT


def packed(*lengths: int, started: bool = True, **options: Any) -> tuple[Any, ...]:
    """Return a size of packed sequences, and other options."""
    return 1, sum(lengths), 2, 16, 20, 2.0, None, started, Options(lengths, **options)


def batched(*size: int, **options: Any) -> tuple[Any, ...]:
    """Return a size of a batch with options."""
    return *size, 2.0, None, True, Options(**options)


@st.composite
def with_options(draw: st.DrawFn, of_op: Sequence[str]) -> tuple[Any, ...]:
    """Draw sizes with any options of an op, which are named."""
    batch, T, heads, *others, _ = draw(shapes())
    lengths = draw(st.none() | st.lists(st.sampled_from([0, 1, 16, 30, 64, 65]), min_size=1, max_size=2))
    if lengths is not None:
        batch, T, lengths = 1, sum(lengths), tuple(lengths)
    chosen = {name: draw(st.booleans()) for name in of_op}
    if not chosen.get("sigmoid"):
        chosen.pop("negative", None)
    return batch, T, min(heads, 2), *others, draw(st.booleans()), Options(lengths, draw(st.integers(1, 2)), **chosen)


OF_BACKWARD = "unit", "v_first"
ALL = {"group": 2, "unit": True, "gated": True, "sigmoid": True, "v_first": True}
SIZES_OF_BACKWARD = [
    packed(30, 0, 64, 1),
    packed(40, 33, group=3, v_first=True),
    packed(65, 16, started=False, group=2, unit=True),
    batched(1, 33, 1, 130, 80),
    batched(1, 33, 1, 20, 20, unit=True),
    batched(2, 0, 1, 16, 20, group=2, v_first=True),
    packed(0, v_first=True),
    batched(2, 70, 2, 16, 32, group=2),
    batched(1, 65, 1, 20, 40, v_first=True),
    batched(1, 33, 1, 256, 20, v_first=True),
    batched(1, 70, 1, 200, 40, unit=True),
]
CONTRACT += [
    Case(
        "gated_delta_rule",
        of_forward,
        exact_forward,
        [
            packed(20, 50, **ALL),
            batched(1, 33, 1, 16, 32, gated=True),
            batched(1, 33, 1, 16, 32, gated=True, biased=False, sigmoid=True, negative=True),
            *SIZES_OF_BACKWARD,
        ],
        small=(1, 17, 1, 2, 3, 2.0, None, True, Options((9, 0, 8), **ALL)),
        many=(1, 1701, 5, 32, 32, 2.0, None, True, Options((701, 0, 1000), **ALL)),
        shapes=with_options([*OF_BACKWARD, "gated", "biased", "sigmoid", "negative"]),
        roundings=roundings,
        gradients=exact_gradients,
        with_gradients=(0, 1, 2, 3, 4, 5, 10, 11),
        name="gated_delta_rule with options",
        autocast="asked",
        refused=REFUSED_OPTIONS,
    ),
    Case(
        "gated_delta_rule_backward",
        of_backward,
        exact_backward,
        SIZES_OF_BACKWARD,
        small=(1, 17, 1, 2, 3, 2.0, None, True, Options((9, 0, 8), 2, unit=True, v_first=True)),
        many=(1, 1701, 5, 32, 32, 2.0, None, True, Options((701, 0, 1000), 2, unit=True, v_first=True)),
        shapes=with_options(OF_BACKWARD),
        roundings=roundings,
        name="gated_delta_rule_backward with options",
    ),
]


def problem(dtype: torch.dtype, *size: Any) -> tuple[tuple[Any, ...], Tensors]:
    """Return what the op takes, and gradients of its results."""
    grad, back, *tensors = of_backward(Draw(dtype), *size)
    return tuple(tensors), (grad, back)


def assert_right(taken: ModuleType, tensors: tuple[Any, ...], grads: Tensors, looser: float = 1) -> list[torch.Tensor]:
    """Assert that both ops are right; return what they return."""
    forward, backward = (replace(case, exact=partial(case.exact, looser=looser)) for case in (FORWARD, BACKWARD))
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradient_of_strong_decays(taken: ModuleType, dtype: torch.dtype) -> None:
    """It is small, and no difference of roundings: what a token reads of its own write cancels."""
    (q, k, v, g, *others), (grad, last) = problem(dtype, 1, 70, 2, 32, 32)
    given = q, k, v, torch.full_like(g, -5), *others
    dg = taken.gated_delta_rule_backward(grad, torch.zeros_like(last), *given)[3]
    expected = by_token(grad, torch.zeros_like(last), *given)[0][5]
    assert (dg - expected).norm() <= 0.005 * expected.norm()


@each_dtype
def test_packed_as_one_by_one(taken: ModuleType, dtype: torch.dtype) -> None:
    """Sequences side by side have the results and gradients, to the last bit, that each has alone."""
    lengths = 65, 0, 30
    arguments = of_forward(Draw(dtype), *packed(*lengths, group=2))
    results = taken.gated_delta_rule(*arguments)
    grads = tuple(torch.randn_like(out) for out in results)
    results += taken.gated_delta_rule_backward(*grads, *arguments[:8])
    ends = [0, *itertools.accumulate(lengths)]
    for n, span in enumerate(slice(*pair) for pair in itertools.pairwise(ends)):
        given = *(t[:, span] for t in arguments[:5]), arguments[5][n : n + 1], None
        alone = taken.gated_delta_rule(*given)
        alone += taken.gated_delta_rule_backward(grads[0][:, span], grads[1][n : n + 1], *given)
        for name, out, of_one in zip(NAMES, results, alone, strict=True):
            assert torch.equal(out[n : n + 1] if name in ("last", "dfirst") else out[:, span], of_one)


def test_gates_as_narrow_as_q_float16(taken: ModuleType) -> None:
    """They are converted before anything is computed of them, and their gradients at the end."""
    given, places = of_forward(Draw(torch.float16), *packed(20, 20, gated=True, sigmoid=True)), (3, 4, 10, 11)
    outcomes = []
    for dtype in (torch.float16, torch.float32):
        arguments = [t.half().to(dtype) if place in places else t for place, t in enumerate(given)]
        leaves = [arguments[place].requires_grad_() for place in places]
        out, last = taken.gated_delta_rule(*arguments)
        grads = torch.autograd.grad(out.float().square().sum() + last.square().sum(), leaves)
        assert [grad.dtype for grad in grads] == [dtype] * 4
        outcomes.append((out.detach(), last.detach(), *(grad.half() for grad in grads)))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


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


WITHOUT_OPTIONS = {"spans_ptr": None, "offsets_ptr": None, "GROUP": 1, "V_FIRST": False}
WITH_OPTIONS = {"spans_ptr": "i64", "offsets_ptr": "i64", "GROUP": 3, "V_FIRST": True}
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


def at_launch(
    taken: ModuleType, which: str, dtype: str, K: int, V: int, given: Mapping[str, object] = WITHOUT_OPTIONS
) -> tuple[object, dict[str, object]]:
    """Return a kernel, and what the launchers pass on to it on an H100, for lengths and heads that 16 divides."""
    import triton
    import triton.language as tl

    number, constants = KERNELS[which]
    kernel = taken.GATED_DELTA_RULE_KERNELS[number]
    half = BYTES[dtype] == 2
    (CHUNK, PRECISION), *tiles = taken.GATED_DELTA_RULE_TILES[BYTES[dtype]]
    most_k, most_v, num_warps, num_stages = (taken.GATED_DELTA_RULE_HOPPER if half else tiles)[number]
    least = 64 if half else 16
    if K > 128 and number in (0, 1, 3):
        most_k, most_v, num_warps, num_stages = 256, least, 8, 1
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
    }
    known = known | constants | given
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


def with_all_options(taken: ModuleType, dtype: str, K: int) -> None:
    """Compile the kernels for packed sequences of grouped heads and states of (V, K)."""
    for which in KERNELS:
        kernel, known = at_launch(taken, which, dtype, K, 128, WITH_OPTIONS)
        compiled(kernel, **known)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "K"), [("bf16", 128), ("bf16", 256), ("fp32", 128), ("fp64", 64)])
def test_options_read_nothing_unwritten(gallery: Path, on_h100: Ask, dtype: str, K: int) -> None:
    """They compile for an H100, and `compiled` looks for wrong code."""
    on_h100(gallery / RECIPE, functools.partial(with_all_options, dtype=dtype, K=K))


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
    ("without tokens the state is lost", "dtype=wide) if first is None else first\n", "dtype=wide)\n"),
    ("without tokens the gradient of the state is lost", "grad_last.clone(", "torch.zeros_like(grad_last, "),
    (
        "a sequence has the first token of the next",
        "T = start + tl.load(spans_ptr + slot // HEADS * 2 + 1)",
        "T = start + tl.load(spans_ptr + slot // HEADS * 2 + 1) + 1",
    ),
    ("a sequence ends a chunk early", "(end - start + CHUNK - 1) // CHUNK", "(end - start) // CHUNK"),
    ("the first head of a group has the gradient", "t.unflatten(2, (-1, group)).sum(3)", "t[:, :, ::group].clone()"),
    (
        "the gradient keeps its part along the row",
        "out = (grad - out * tl.sum(out * grad, axis=1)[:, None]) * factor",
        "out = grad * factor",
    ),
    (
        "a row too many is normalized",
        "mask = (row < ROWS)[:, None] & (offs_k[None, :] < K)",
        "mask = (row < ROWS + 1)[:, None] & (offs_k[None, :] < K)",
    ),
    ("the next row is a part of a row", "(row < ROWS)[:, None] & (offs_k[None, :] < K)", "(row < ROWS)[:, None]"),
    (
        "softplus has a derivative of 1",
        "dg = dg * -A_log.to(wide).exp() * x.sigmoid()",
        "dg = dg * -A_log.to(wide).exp()",
    ),
    ("logits have the gradient of the factors", "dbeta = dbeta * gates[1] * ", "dbeta = dbeta + 0 * "),
    ("factors up to 2 have half the derivative", "(1 - gates[1] / (1 + ctx.negative))", "(1 - gates[1])"),
]
