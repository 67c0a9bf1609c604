"""The op of the recipe Linear cross entropy, its gradients, and what it holds in memory."""

# ruff: noqa: N806 - T tokens, D features, V words, as in the recipe

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, at, check
from compiled import Ask, ptx, stack
from hypothesis import given
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes
from losses import (
    capped,
    class_weights,
    exact_gradient,
    exact_loss,
    of_targets,
    predictions,
    rows_of_equals,
    targets,
    zeros,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter


def inputs(
    draw: Draw,
    lead: tuple[int, ...],
    D: int,
    V: int,
    share: float = 0.2,
    wrong: int | None = None,
    ignored: int = -100,
) -> tuple[torch.Tensor, ...]:
    """Make x, a weight that makes logits of about 1, and targets, of which a share is no word, but wrong or ignored."""
    return (
        draw(*lead, D),
        draw(V, D, of=lambda w: w * D**-0.5),
        targets(draw, lead, V, share, ignored if wrong is None else wrong),
    )


class Options(NamedTuple):
    """What the loss takes besides tensors and the index to ignore."""

    smoothing: float = 0.0
    reduction: str = "mean"
    biased: bool = False
    softcap: float | None = None
    lse_square_scale: float = 0.0
    weighted: bool = False
    accum_dtype: torch.dtype | None = None
    token_scaling: bool = False


NO_OPTIONS = Options()


def with_options(draw: Draw, *size: Any, options: Options, ignored: int = -100) -> tuple[Any, ...]:
    """Make all arguments of the function."""
    tensors, V = inputs(draw, *size, ignored=ignored), size[2]
    smoothing, reduction, biased, *others, weighted, accum_dtype, scaling = options
    bias, ce_weight = draw(V) if biased else None, class_weights(draw, V) if weighted else None
    return *tensors, ignored, smoothing, reduction, bias, *others, ce_weight, accum_dtype, scaling


def for_the_op(
    draw: Draw, *size: Any, ignored: int, of_x: bool, of_weight: bool, options: Options = NO_OPTIONS
) -> tuple[Any, ...]:
    """Make what the op behind the function takes: besides, which gradients are wanted."""
    arguments = with_options(draw, *size, options=options, ignored=ignored)
    *first, smoothing, reduction, bias = arguments[:7]
    return *first, of_x, of_weight, bias, options.biased, smoothing, reduction, *arguments[7:]


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    of_x: bool = True,
    of_weight: bool = True,
    bias: torch.Tensor | None = None,
    of_bias: bool = False,
    smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    ce_weight: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
    token_scaling: bool = False,
    grad: torch.Tensor | None = None,
    chunk: int = 2048,
) -> list[Exact]:
    """Return the loss and all gradients, of logits and gradients of logits that are rounded.

    Without the gradient of the loss, they are what the op returns: divided by the tokens for a sum, none for no
    reduction.

    A logit is off by its own rounding, which its exponential multiplies; then each chunk is rounded. A product over the
    words rounds each of its sums: those errors grow with the root of their number.
    """
    (V, D), T, target_shape = weight.shape, target.numel(), target.shape
    rows, target = x.reshape(T, D), target.flatten()
    product = rows @ weight.T
    logits = product if bias is None else product + bias
    options = smoothing, reduction, softcap, lse_square_scale, ce_weight
    loss, _ = exact_loss(logits, target, ignore_index, *options)
    if grad is None:
        of_x, of_weight, of_bias = (of and reduction != "none" for of in (of_x, of_weight, of_bias))
        grad = torch.ones_like(loss) / (max(T, 1) if reduction == "sum" else 1)
    if token_scaling:
        known = target.where((target >= 0) & (target < V), 0)
        share = (
            torch.softmax(capped(logits, softcap), -1).gather(-1, known[:, None])[:, 0].where(target != ignore_index, 0)
        )
        count = (target != ignore_index).sum() if reduction == "mean" else 1
        options = smoothing, "none", softcap, lse_square_scale, ce_weight
        loss = exact_loss(logits, target, ignore_index, *options)[0] * share
        loss = loss if reduction == "none" else loss.sum() / count
        grad = grad.flatten() * share / count
    elif reduction == "none":
        grad = grad.flatten()
    (d,) = exact_gradient(grad, logits, target, ignore_index, *options)
    assert d.terms is not None
    # Without a token that counts, the mean is that of none.
    terms = d.terms.nan_to_num(0)
    size = torch.stack([product, logits]).abs().max() + torch.tensor(V).log() if T else logits.new_zeros(())
    size = size * (1 + 2 * lse_square_scale * size)
    if ce_weight is not None:
        size = size * ce_weight.max()
        counts = target != ignore_index
        if reduction == "mean" and counts.any():
            size = size / (of_targets(ce_weight, target, ignore_index).sum() / counts.sum())
    narrow = 3 + size + D - (-T // chunk)
    pairs = [
        (loss, (size * T if reduction == "sum" else size).expand(loss.shape)),
        ((d.value @ weight).view(x.shape), (terms @ weight.abs()).view(x.shape)),
        (d.value.T @ rows, terms.T @ rows.abs()),
        (d.value.sum(0), terms.sum(0)),
    ]
    right = [
        Exact(value, V**0.5 * magnitude, accumulator if value is loss else None, narrow * magnitude, value is loss)
        for value, magnitude in pairs
    ]
    if reduction == "none":
        right[0] = right[0]._replace(value=loss.view(target_shape), terms=right[0].terms.view(target_shape))
        right[0] = right[0]._replace(narrow=right[0].narrow.view(target_shape), made_by_torch=False)
    none = Exact(x.new_zeros(0))
    gradients = (one if of else none for one, of in zip(right[1:], (of_x, of_weight, of_bias), strict=True))
    return [right[0], *gradients, Exact(target.new_zeros(0), dtype=torch.int64, made_by_torch=True)]


def exact_with_options(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    bias: torch.Tensor | None,
    *options: Any,
    grad: torch.Tensor | None = None,
) -> list[Exact]:
    """Return the same, given all arguments of the function."""
    biased = bias is not None
    return exact(x, weight, target, ignore_index, True, True, bias, biased, smoothing, reduction, *options, grad=grad)


# One block of words and two, 16 dividing their number or not; tokens that count, that do not, and with wrong targets
SIZES = [((7,), 5, 4096), ((7,), 5, 4097), ((2, 3), 6, 50), ((8,), 16, 100), ((), 3, 17), ((0,), 4, 33)]
SIZES += [((8,), 16, 100, 0.4, 100), ((5,), 4, 9, 1.0), ((8,), 16, 100, 0.4, -1), ((8,), 16, 100, 0.4, 2**40)]
SIZES += [((1,), 1, 1), ((9,), 20, 8999), ((3,), 7, 16), ((4,), 2, 15)]
SHAPES = st.tuples(
    st.sampled_from([(), (4,), (2, 3)]) | st.integers(0, 9).map(lambda T: (T,)),
    st.integers(1, 20),
    sizes(4096, 9000).filter(bool),
    st.sampled_from([0.2, 1.0]),
)
# Each option alone where that is enough, and all at once, in each reduction
OPTIONS = {
    "mean": Options(0.1, "mean", True, 2.0, 0.01),
    "sum": Options(0.0, "sum"),
    "none": Options(0.1, "none", True, 2.0, 0.01),
    "plain none": Options(0.0, "none"),
    "small logits": Options(0.0, "none", softcap=1000.0),
    "weighted mean": Options(0.1, "mean", True, 2.0, 0.01, True),
    "weighted sum": Options(0.0, "sum", lse_square_scale=0.01, weighted=True),
    "weighted none": Options(0.1, "none", weighted=True),
    "scaled mean": Options(0.1, "mean", True, 2.0, 0.01, accum_dtype=torch.float64, token_scaling=True),
    "scaled none": Options(0.0, "none", accum_dtype=torch.float64, token_scaling=True),
}
TYPES = "linear_cross_entropy takes x, weight and bias of one float dtype and int64"
FORMS = r"linear_cross_entropy takes x \(\.\.\., D\), weight \(V, D\) with V"
CONTRACT = [
    Case(
        "linear_cross_entropy",
        inputs,
        lambda *given: exact(*given)[:1],
        sizes=SIZES[:3],
        small=((3,), 4, 5, 0.0),
        many=((1031,), 24, 2053),
        shapes=SHAPES,
        roundings=2,
        floor=lambda dtype: 4 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
        gradients=lambda grad, *given: exact(*given, grad=grad)[1:3],
        with_gradients=2,
        once=True,
        plain=True,
        autocast="asked",
        refused=[
            Refused(lambda draw: (draw(4, 8), draw(9, 8).half(), zeros(draw, 4)), TypeError, TYPES),
            Refused(lambda draw: (draw(4, 8).long(), draw(9, 8).long(), zeros(draw, 4)), TypeError, TYPES),
            Refused(lambda draw: (draw(4, 8), draw(9, 8), zeros(draw, 4).int()), TypeError, TYPES),
            Refused(lambda draw: (draw(4, 8), draw(9, 7), zeros(draw, 4)), ValueError, FORMS),
            Refused(lambda draw: (draw(4, 8), draw(8), zeros(draw, 4)), ValueError, FORMS),
            Refused(lambda draw: (draw(4, 8), draw(9, 8), zeros(draw, 3)), ValueError, FORMS),
            Refused(lambda draw: (draw(4, 8), draw(0, 8), zeros(draw, 4)), ValueError, FORMS),
            Refused(lambda draw: (draw(4, 0), draw(9, 0), zeros(draw, 4)), ValueError, FORMS),
            Refused(
                lambda draw: (draw(4, 8), draw(9, 8).to("meta"), zeros(draw, 4)), ValueError, f"{FORMS}.* on one device"
            ),
            Refused(
                lambda draw: (
                    *(draw(4, 8).requires_grad_(), draw(9, 8), zeros(draw, 4)),
                    *(-100, 0.0, "mean", None, None, 0.0, draw(9).requires_grad_()),
                ),
                ValueError,
                "linear_cross_entropy has no gradient for ce_weight",
            ),
            *(
                Refused(
                    lambda draw, options=options: (draw(4, 8), draw(9, 8), zeros(draw, 4), -100, *options(draw)),
                    error,
                    match,
                )
                for error, match, options in (
                    (TypeError, TYPES, lambda draw: (0.0, "mean", draw(9).half())),
                    (ValueError, FORMS, lambda draw: (0.0, "mean", draw(8))),
                    (ValueError, FORMS, lambda draw: (0.0, "mean", draw(9, 1))),
                    (ValueError, f"{FORMS}.* on one", lambda draw: (0.0, "mean", draw(9).to("meta"))),
                    (ValueError, "linear_cross_entropy takes a reduction mean", lambda draw: (0.0, "max")),
                    (
                        TypeError,
                        "linear_cross_entropy takes a float accum_dtype or None, not torch.int32",
                        lambda draw: (0.0, "mean", None, None, 0.0, None, torch.int32),
                    ),
                    *(
                        (
                            error,
                            f"linear_cross_entropy takes a {text}",
                            lambda draw, bad=bad: (0.0, "mean", None, None, 0.0, bad(draw)),
                        )
                        for error, text, bad in (
                            (TypeError, "float ce_weight, not torch.int64", lambda draw: zeros(draw, 9)),
                            (ValueError, r"ce_weight \(V,\) where x is, not \(8,\)", lambda draw: draw(8)),
                            (ValueError, "ce_weight .* on meta", lambda draw: draw(9).to("meta")),
                        )
                    ),
                )
            ),
            *(
                Refused(
                    lambda draw, options=options: (draw(4, 8), draw(9, 8), zeros(draw, 4), -100, *options),
                    ValueError,
                    "linear_cross_entropy takes label_smoothing from 0 to 1, a softcap above 0",
                )
                for bad in (-0.1, torch.nan, torch.inf)
                for options in ((bad,), (0.0, "mean", None, bad), (0.0, "mean", None, None, bad))
            ),
        ],
    ),
    *(
        Case(
            "linear_cross_entropy",
            partial(with_options, options=options),
            lambda *given: exact_with_options(*given)[:1],
            sizes=SIZES,
            small=((3,), 4, 5, 0.0),
            many=((1031,), 24, 2053),
            shapes=SHAPES,
            roundings=2,
            floor=lambda dtype: 4 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
            gradients=lambda grad, *given: exact_with_options(*given, grad=grad)[1 : 3 + (given[6] is not None)],
            with_gradients=(0, 1, 6),
            once=options.reduction != "none",
            plain=True,
            autocast="asked",
            name=f"linear_cross_entropy {name}",
        )
        for name, options in OPTIONS.items()
        # Differences of losses know nothing of a factor that has no gradient.
        if name != "scaled none"
    ),
    *(
        Case(
            "_linear_cross_entropy_forward",
            partial(for_the_op, ignored=ignored, of_x=of_x, of_weight=of_weight),
            exact,
            sizes=SIZES,
            small=((3,), 4, 5, 0.0),
            many=((1031,), 24, 2053),
            shapes=SHAPES if of_x and of_weight else None,
            roundings=2,
            floor=lambda dtype: 4 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
            autocast="asked",
        )
        for ignored, of_x, of_weight in ((-100, True, True), (7, True, False), (0, False, True), (-100, False, False))
    ),
    *(
        Case(
            "_linear_cross_entropy_forward",
            partial(for_the_op, ignored=7, of_x=True, of_weight=False, options=options),
            exact,
            sizes=SIZES,
            small=((3,), 4, 5, 0.0),
            many=((1031,), 24, 2053),
            roundings=2,
            floor=lambda dtype: 4 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
            autocast="asked",
            name=f"_linear_cross_entropy_forward {name}",
        )
        for name, options in OPTIONS.items()
    ),
]
# The op with both gradients
(OP,) = (case for case in CONTRACT if case.call.startswith("_") and case.shapes is not None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_chunks(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of three tokens it is all the same."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 3)
    for options in (NO_OPTIONS, *(OPTIONS[name] for name in ("sum", "none", "weighted mean", "scaled mean"))):
        make = partial(for_the_op, ignored=-100, of_x=True, of_weight=True, options=options)
        case = replace(OP, arguments=make, exact=partial(exact, chunk=3))
        for size in SIZES:
            with at(size, options):
                check(case, taken, dtype, case.arguments(Draw(dtype), *size))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_predictions(taken: ModuleType, dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the loss come the first of the largest logits and how often that is the target, as far as wanted."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 3)
    for V in (1, 17, 300, 5003):
        weight, target = rows_of_equals(dtype, V)
        weight = weight.masked_fill(weight.isinf(), 1).T.contiguous().requires_grad_()
        x = torch.eye(7, dtype=dtype, device=DEVICE)
        accuracy, tokens = predictions(weight.T, target, reduction)
        loss = taken.linear_cross_entropy(x, weight, target, -1, reduction=reduction)
        call = partial(taken.linear_cross_entropy, x, weight, target, -1, reduction=reduction)
        assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
        assert_equal(call(return_token_accuracy=True, return_predicted_tokens=True), (loss, accuracy, tokens))
        assert_equal(call(return_token_accuracy=True), (loss, accuracy))
        assert_equal(call(return_predicted_tokens=True), (loss, tokens))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_scaling_of_weighted_tokens(taken: ModuleType, reduction: str) -> None:
    """A token's loss is multiplied by its probability; the mean divides by the weights alone."""
    x, weight, target = inputs(Draw(torch.float64), (9,), 4, 50)
    ce_weight = class_weights(Draw(torch.float64), 50)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    actual = taken.linear_cross_entropy(
        *leaves, target, reduction=reduction, ce_weight=ce_weight, use_token_scaling=True
    )
    losses = torch.nn.functional.cross_entropy(x @ weight.T, target, ce_weight, reduction="none")
    shares = torch.softmax(x @ weight.T, -1).gather(-1, target.clamp(min=0)[:, None])[:, 0].detach()
    expected = losses * shares
    if reduction != "none":
        expected = expected.sum() / (of_targets(ce_weight, target, -100).sum() if reduction == "mean" else 1)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_summed_in_float32(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many chunks it loses less than in half precision."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 8)
    x, weight, target = inputs(Draw(dtype), (256,), 8, 40)
    expected = exact(x.double(), weight.double(), target)[2].value
    errors = []
    for accum_dtype in (None, torch.float32):
        leaf = weight.detach().requires_grad_()
        (of_weight,) = torch.autograd.grad(taken.linear_cross_entropy(x, leaf, target, accum_dtype=accum_dtype), leaf)
        assert of_weight.dtype == dtype
        errors.append((of_weight.double() - expected).norm())
    assert 1.5 * errors[1] < errors[0]


def op_results(taken: ModuleType, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Return the op's loss and both gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    loss = taken.linear_cross_entropy(*leaves, target)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_alone(taken: ModuleType, dtype: torch.dtype) -> None:
    """Without one of the gradients, or without both, the rest is the same bits."""
    x, weight, target = inputs(Draw(dtype), (8,), 16, 100)
    loss, of_x, of_weight = op_results(taken, x, weight, target)
    assert torch.equal(taken.linear_cross_entropy(x, weight, target), loss)
    leaf = x.clone().requires_grad_()
    actual = taken.linear_cross_entropy(leaf, weight, target)
    assert torch.equal(actual, loss)
    assert torch.equal(torch.autograd.grad(actual, leaf)[0], of_x)
    leaf = weight.clone().requires_grad_()
    actual = taken.linear_cross_entropy(x, leaf, target)
    assert torch.equal(torch.autograd.grad(actual, leaf)[0], of_weight)
    with torch.no_grad():
        assert not taken.linear_cross_entropy(x, leaf, target).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_special_logits(taken: ModuleType, dtype: torch.dtype) -> None:
    """Logits of 1e4 do not overflow; NaN and infinities stay in their row, but for the weight's gradient."""
    x, weight, target = inputs(Draw(dtype), (6,), 4, 5000, 0.0)
    check(OP, taken, dtype, (1e4 * x, weight, target, -100, True, True))
    x[1, 0], x[3, 1] = torch.nan, torch.inf
    loss, of_x, _ = op_results(taken, x, weight, target)
    assert loss.isnan()
    assert of_x.isnan().any(1).tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_small_probabilities(
    taken: ModuleType, dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided by many tokens, a gradient is still no zero in float16, whoever divides."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 256)
    x, weight, _ = inputs(Draw(dtype), (1024,), 1, 2000)
    x = x.abs() + 1
    target = torch.zeros(1024, dtype=torch.int64, device=DEVICE)
    leaf = weight.detach().requires_grad_()
    loss = taken.linear_cross_entropy(x, leaf, target, reduction=reduction)
    grad = torch.full_like(loss, 1 if reduction == "mean" else 1 / 1024)
    (of_weight,) = torch.autograd.grad(loss, leaf, grad)
    expected = exact(x.double(), weight.double(), target)[2].value
    torch.testing.assert_close(of_weight.double()[1:], expected[1:], rtol=2e-2, atol=2**-22)
    assert (of_weight[1:] != 0).all()


def test_gradient_of_the_loss(taken: ModuleType) -> None:
    """A gradient other than one multiplies both; a second backward of one loss is refused."""
    x, weight, target = inputs(Draw(torch.float64), (8,), 16, 100)
    _, *expected = op_results(taken, x, weight, target)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    loss = taken.linear_cross_entropy(*leaves, target)
    grads = torch.autograd.grad(-2.5 * loss, leaves, retain_graph=True)
    for actual, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, -2.5 * other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: f"{dtype} by torch.float32")
@given(size=sizes(4096, 9000), factor=st.sampled_from([1.0, 0.3, 2.0**17]))
def test_scale(taken: ModuleType, dtype: torch.dtype, size: int, factor: float) -> None:
    """A gradient is multiplied in the loss's precision, in which its factor is finite; what is behind is kept."""
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(size)
    room = torch.randn(size + 5000, generator=generator, dtype=torch.float64).mul(0.1).to(dtype).to(DEVICE)
    grad = torch.tensor(factor, dtype=acc_dtype, device=DEVICE)
    expected = room[:size].to(acc_dtype) * grad
    behind = room[size:].clone()
    taken._linear_cross_entropy_scale(room[:size], grad)
    torch.testing.assert_close(room[:size], expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(room[size:], behind)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_few_that_count(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of many: what its gradient is multiplied by on the way is still a number of float16."""
    scales = []

    class Seen:
        """Stands where the kernel stands: a program for each of so many tokens would take minutes here."""

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **known: scales.append(arguments[3].item())

    monkeypatch.setattr(taken, "_linear_cross_entropy_kernel", Seen())
    T = 2**17
    x, weight = (torch.ones(size, 1, dtype=dtype, device=DEVICE) for size in (T, 2))
    target = torch.full((T,), -100, device=DEVICE)
    target[7] = 0
    taken._linear_cross_entropy_launch(x, weight, target, -100, True, True)
    assert set(scales) == {2.0**15}


class Largest(TorchDispatchMode):
    """Keeps the size of the largest storage that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Look at what an operator returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return out


def test_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is larger than the logits of a chunk, with or without gradients."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 8)
    x, weight, target = inputs(Draw(torch.float32), (64,), 4, 1001)
    for wanted in (False, True):
        with Largest() as largest:
            taken._linear_cross_entropy_launch(x, weight, target, -100, wanted, wanted)
        assert largest.size == 8 * 1008 * 4


def test_backward_takes_no_memory(taken: ModuleType) -> None:
    """It multiplies in place, and nothing is made for the results that have no gradient."""
    x, weight, target = (t.requires_grad_(t.is_floating_point()) for t in inputs(Draw(torch.float32), (64,), 400, 101))
    loss = taken.linear_cross_entropy(x, weight, target)
    with Largest() as largest:
        torch.autograd.grad(2 * loss, (x, weight))
    assert largest.size <= 8


def at_launch(taken: ModuleType, dtype: str) -> dict[str, Any]:
    """Return what the kernel is compiled with at a launch."""
    import triton.language as tl

    acc = tl.float64 if dtype == "fp64" else tl.float32
    known = {"ACC": acc, "GRADIENT": True, "BLOCK_V": taken.LINEAR_CROSS_ENTROPY_BLOCK}
    pointers = {"targets_ptr": "i64", "losses_ptr": str(acc), "scale_ptr": str(acc)}
    known |= {"EACH": False, "SMOOTHING": 0.0, "SOFTCAP": 0.0, "LSE_SQUARE_SCALE": 0.0, "ce_weight_ptr": None}
    known |= {"predicted_ptr": None, "TOKEN_SCALING": False}
    options = {"num_warps": taken.LINEAR_CROSS_ENTROPY_WARPS, "multiples": ["room"]}
    return {"dtype": dtype} | known | pointers | options


def compiled_code(taken: ModuleType) -> dict[str, tuple[bool, bool, int]]:
    """Return, for each dtype, whether it loads and stores 16 bytes at once, and the bytes it spills."""
    results = {}
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        known = at_launch(taken, dtype)
        code = ptx(taken._linear_cross_entropy_kernel, **known)
        wide_accesses = (re.search(rf"{way}\.global\.v[24]\.b(32|64)", code) is not None for way in ("ld", "st"))
        results[dtype] = (*wide_accesses, stack(taken._linear_cross_entropy_kernel, **known))
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """A vocabulary of any size is loaded and stored 16 bytes at once, and no register spills."""
    (results,) = on_h100(gallery.resolve() / "fusion" / "linear_cross_entropy.py", compiled_code)
    assert results == dict.fromkeys(("fp16", "bf16", "fp32", "fp64"), (True, True, 0))


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "sums over the room",
        'return tl.where(offs < V, z, -float("inf"))',
        "return z",
    ),
    (
        "sums that are not corrected",
        "s = s * tl.exp(m - larger) + tl.sum(tl.exp(z - larger), axis=0)\n        m = larger\n        if",
        "s = s + tl.sum(tl.exp(z - larger), axis=0)\n        m = larger\n        if",
    ),
    ("no one at the target", "            d -= hit\n", ""),
    ("ignored tokens in the gradients", "d = tl.where(counts, d * scale, 0.0)", "d = d * scale"),
    ("ignored tokens multiplied by zero", "d = tl.where(counts, d * scale, 0.0)", "d = d * scale * counts.to(ACC)"),
    (
        "ignored tokens in the loss",
        "tl.store(losses_ptr + pid, tl.where(counts, loss, 0.0))",
        "tl.store(losses_ptr + pid, loss)",
    ),
    ("wrong targets read", "known = counts & (target >= 0) & (target < V)", "known = counts"),
    ("wrong targets have gradients", 's = tl.where(chosen == chosen, s, float("nan"))', "s = s * 1.0"),
    (
        "the last chunk alone",
        "sum_weight[some].addmm_(d.T, x[part], alpha=alpha)",
        "sum_weight[some].addmm_(d.T, x[part], beta=0, alpha=alpha)",
    ),
    (
        "the last words left out of the gradient of x",
        "words = [slice(*edge) for edge in edges]\n    buffer",
        "words = [slice(*edge) for edge in edges[:1]]\n    buffer",
    ),
    ("ignored tokens in the mean", "count = counts.sum()", "count = torch.ones_like(targets).sum()"),
    ("too large for float16", "return min(max(tokens, 1), 2**15)", "return max(tokens, 1)"),
    ("smoothing left out of the gradient", "hit = hit * (1 - SMOOTHING) + even", "hit *= 1 - SMOOTHING"),
    ("smoothing over the room", "tl.where(offs < V, z, 0)", "z"),
    ("small logits that cancel", "tl.where(s < 0.25, x * p / q, large)", "large"),
    ("a softcap without its slope", "d *= 1 - (z * (1 / SOFTCAP)) * (z * (1 / SOFTCAP))", "d *= 1.0"),
    ("no softcap at the target", "    chosen = _linear_cross_entropy_cap(chosen, SOFTCAP)\n", ""),
    ("no gradient of the z-loss", "            of_lse += 2 * factor * lse\n", "            of_lse += 0.0\n"),
    ("the last of equals", "best = tl.where(larger > m, first, best)", "best = tl.where(larger >= m, first, best)"),
    ("predictions where ignored", "tl.where(counts, tl.where(best < V, best, 0), -1)", "tl.where(best < V, best, 0)"),
    ("a loss that is not scaled", "        loss *= probability\n", ""),
    ("gradients that are not scaled", "            scale *= probability\n", ""),
    ("a wide sum of the last chunk alone", "sum_weight[some] += torch.addmm(", "sum_weight[some] = torch.addmm("),
    ("weights left out at the target", "        loss *= w_t\n", ""),
    ("a target's gradient without its weight", "hit *= w_t", "hit *= 1.0"),
    ("weights left out of the smoothing", "z *= tl.load(ce_weight_ptr + offs, mask=offs < V, other=0)", "z *= 1.0"),
    ("no weights in the gradient", "even *= tl.load(", "even += 0 * tl.load("),
    ("a weighted z-loss", "            factor *= tl.load(ce_weight_ptr + V + 1)\n", ""),
    ("weights of ignored targets", "padded[torch.where(known, targets, V)]", "padded[torch.where(known, targets, 0)]"),
    ("one gradient for all tokens", "tl.load(scale_ptr + pid if EACH else scale_ptr)", "tl.load(scale_ptr)"),
    ("the mean's gradient for a sum", 'grad * ctx.total if ctx.reduction == "sum" else grad', "grad"),
    ("a bias left out", "torch.addmm(bias[some], *factors, out=out)", "torch.mm(*factors, out=out)"),
    (
        "the bias of the last chunk alone",
        "sums.add_(logits.sum(0, dtype=wide)",
        "sums.zero_().add_(logits.sum(0, dtype=wide)",
    ),
    ("each token's gradient divided alone", "            _linear_cross_entropy_scale(d, size)\n", "            pass\n"),
    ("the loss's gradient left out", "if factor != 1.0:", "if factor != factor:"),
    (
        "a gradient multiplied past its end",
        "tl.store(d_ptr + offs, d * factor, mask=offs < numel)",
        "tl.store(d_ptr + offs, d * factor)",
    ),
    (
        "multiplied in half precision",
        "d = tl.load(d_ptr + offs, mask=offs < numel).to(factor.dtype)",
        "d = tl.load(d_ptr + offs, mask=offs < numel)\n        factor = factor.to(d.dtype)",
    ),
]
