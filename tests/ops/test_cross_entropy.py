"""The op of the recipe Cross entropy and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, check
from compiled import TRITON, Ask, graphs, ptx, stack
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes
from losses import (
    FLUSHED,
    capped,
    class_weights,
    exact_gradient,
    exact_loss,
    ignored_rows,
    of_targets,
    predictions,
    reference,
    rising_rows,
    rows_of_equals,
    special_rows,
    targets,
    zeros,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter

torch_loss = torch.nn.functional.cross_entropy
REDUCTIONS = ["mean", "sum", "none"]
LEADS = st.sampled_from([(), (0,), (1,), (7,), (2, 3)])


@contextmanager
def processors(taken: ModuleType, number: int) -> Iterator[None]:
    """Have the launcher decide as for a GPU of so many multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_cross_entropy_processors", lambda device: number)
        yield


class Options(NamedTuple):
    """What the ops take besides tensors, and how rows and targets are made."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    ignore_index: int = -100
    share: float = 0.3  # of the rows, for which the target is no class
    wrong: int | None = None  # that target; None is the one to ignore
    gap: int = 0  # elements between rows
    softcap: float | None = None
    lse_square_scale: float = 0.0
    weighted: bool = False


USUAL = Options()


def rows(draw: Draw, lead: tuple[int, ...], N: int, options: Options = USUAL) -> tuple[Any, ...]:
    """Make logits, targets and options."""
    reduction, smoothing, ignored, share, wrong, gap, *others, weighted = options
    x = draw(*lead, gap + N)[..., gap:]
    target = targets(draw, lead, N, share, ignored if wrong is None else wrong)
    return x, target, ignored, smoothing, reduction, *others, class_weights(draw, N) if weighted else None


def gradient_and_rows(draw: Draw, lead: tuple[int, ...], N: int, options: Options) -> tuple[Any, ...]:
    """Make the gradient of a loss, what it is the loss of, and what the forward keeps of that."""
    x, target, ignored, *rest = rows(draw, lead, N, options)
    grad = draw(*(lead if options.reduction == "none" else ()), dtype=accumulator(draw.dtype))
    stats = kept(x, target, ignored, options.reduction, options.softcap, rest[-1])
    return grad, x, target, stats, ignored, *rest


def kept(
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    softcap: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return maxima, sums and one over the rows that count, as the forward does; where a row is ignored, NaN."""
    acc_dtype, used = accumulator(x.dtype), target != ignore_index
    top, total = maxima_and_sums(capped(x.double(), softcap))
    parts = [part.where(used, torch.nan).flatten() for part in (top, total)]
    parts.append(sums(target, ignore_index, reduction, None if weight is None else weight.double()))
    return torch.cat(parts).to(acc_dtype)


def sums(target: torch.Tensor, ignore_index: int, reduction: str, weight: torch.Tensor | None) -> torch.Tensor:
    """Return one over the rows that count, or the sums of class weights: what the stats end with."""
    one, count = torch.ones((), dtype=torch.float64, device=DEVICE), (target != ignore_index).sum()
    if weight is None:
        return one[None] / count if reduction == "mean" else one.new_zeros(0)
    total = of_targets(weight, target, ignore_index).sum()
    return torch.stack([*((1 / total, total / count) if reduction == "mean" else (one, one)), weight.mean()])


def maxima_and_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest number of each row, at least the lowest of all, and the sum of exponentials relative to it."""
    lowest = torch.finfo(torch.float64).min
    top = torch.cat([x.where(~x.isnan(), lowest), x.new_full((*x.shape[:-1], 1), lowest)], -1).amax(-1)
    return top, torch.exp(x - top[..., None]).sum(-1)


def exact(
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    weight: torch.Tensor | None = None,
) -> list[Exact]:
    """Return the loss and what the backward needs of each row: any number where that is ignored or empty."""
    loss, size = exact_loss(x, target, ignore_index, smoothing, reduction, softcap, lse_square_scale, weight)
    used = target != ignore_index
    top, total = (part.where(used, 0).flatten() for part in maxima_and_sums(capped(x, softcap)))
    known = used.flatten() & (x.shape[-1] > 0)
    numbers, terms = [top, total], [part.abs().where(known, torch.inf) for part in (top, total)]
    factors = sums(target, ignore_index, reduction, weight)
    numbers.append(factors.where(factors.isfinite() | factors.isnan(), 0))
    terms.append(factors)
    return [
        Exact(
            loss, size, accumulator, made_by_torch=reduction == "sum" or (reduction == "mean" and weight is not None)
        ),
        Exact(torch.cat(numbers), torch.cat(terms), accumulator),
    ]


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make rows with NaN, infinities and the lowest numbers; those that are ignored have some, too."""
    rows = special_rows(draw.dtype)
    inputs = [(x, target, -100, 0.0, "none") for x, target in rows]
    inputs += [(x[:9], target[:9], -100, 0.2, "none") for x, target in rows]
    inputs += [(x, target, -100, 0.1, "none", 2.0, 0.01) for x, target in rows]
    inputs += [(x[:9], target[:9], -100, 0.0, "none", None, 0.01) for x, target in rows]
    inputs += [(*pair, -1, 0.1, reduction, 2.0, 0.01) for pair in ignored_rows(draw) for reduction in REDUCTIONS]
    inputs += [
        (*pair, -1, smoothing, reduction, None, 0.01, class_weights(draw, 1000))
        for pair in ignored_rows(draw)
        for smoothing in (0.0, 0.1)
        for reduction in REDUCTIONS
    ]
    return inputs + [
        (*pair, -1, smoothing, reduction)
        for pair in ignored_rows(draw)
        for smoothing in (0.0, 0.1)
        for reduction in REDUCTIONS
    ]


def special_gradients(draw: Draw) -> list[tuple[Any, ...]]:
    """Make the gradient of ones for the same rows."""
    return [
        (
            torch.ones(target.shape if reduction == "none" else (), dtype=accumulator(x.dtype), device=DEVICE),
            x,
            target,
            kept(x, target, ignored, reduction, *others[::2]),
            ignored,
            smoothing,
            reduction,
            *others,
        )
        for x, target, ignored, smoothing, reduction, *others in special(draw)
    ]


def reference_gradient(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, stats: torch.Tensor, *options: Any
) -> torch.Tensor:
    """Return the gradient of that."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(reference(leaf, target, *options), leaf, grad)[0]


def refused_gradient(draw: Draw, grad: torch.Tensor) -> tuple[Any, ...]:
    """Make a call with a gradient that the loss of two rows does not have."""
    x, target = draw(2, 3), zeros(draw, 2)
    return grad, x, target, kept(x, target, -100, "none"), -100, 0.0, "none"


of = Options
# One block and several, forward and backward; few rows, which have more warps and programs, and many; rows that begin
# and end at any distance from a multiple of 16 bytes, alike in logits and gradient or not; targets of all kinds.
ROWS = [((5,), 1000, of("none", 0.1, softcap=2.0, lse_square_scale=0.1))]
ROWS += [((9,), 37, of(label_smoothing=0.25, gap=3, softcap=2.0)), ((5,), 4999, of("sum", lse_square_scale=0.1))]
ROWS += [((8,), 300, of("none", share=0, softcap=1000.0))]  # logits are small beside it
ROWS += [((5,), 1000, of("none", 0.1)), ((17,), 4999, of()), ((9,), 17, of("none", 0.25, gap=3)), ((3,), 1, of())]
ROWS += [((9,), 4096, of("sum", 0.1)), ((4,), 300, of("none", wrong=-1)), ((2, 3), 33, of(ignore_index=7, share=1.0))]
ROWS += [((0,), 7, of()), ((3,), 0, of("sum"))]
ROWS[3:3] = [((9,), 5003, of("mean", 0.1, lse_square_scale=0.1, weighted=True)), ((7,), 300, of(weighted=True))]
ROWS += [((2, 3), 37, of("none", 0.3, gap=3, softcap=2.0, lse_square_scale=0.1, weighted=True))]
ROWS += [((7,), 4099, of("sum", 0.1, softcap=2.0, weighted=True)), ((0,), 7, of(weighted=True))]
ROWS += [((3,), 0, of("none", weighted=True)), ((2, 3), 33, of(ignore_index=7, share=1.0, weighted=True))]
ROWS += [
    ((4,), 100, of(way, 0.1, wrong=bad, weighted=True)) for way, bad in zip(REDUCTIONS, (100, -1, 2**40), strict=True)
]
ROWS += [((4,), 100, of("none", wrong=bad)) for bad in (100, 103, 2**31, 2**32 + 5, -(2**40))]
ROWS += [((4,), 100, of(way, wrong=100)) for way in ("mean", "sum")]
ROWS += [
    ((max(N, 8),), N, options)
    for N in (1, 2, 3, 7, 8, 9, 15, 16, 17)
    for options in (of(gap=3, share=0), of("none", 0.25, share=0, gap=16 * (N % 2)))
]
ROWS += [((3,), N, of()) for N in (259, 1027, 4099, 16_387, 50_257)]
ROWS += [((M,), N, of("sum", 0.1, share=0)) for M, N in ((1, 16_384), (3, 8192), (9, 8192), (17, 10_000))]
SHAPES = st.tuples(
    LEADS,
    sizes(1024, 4500),
    st.builds(
        Options,
        reduction=st.sampled_from(REDUCTIONS),
        label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
        ignore_index=st.sampled_from([-100, 0, 1, 7, 2**40]),
        share=st.sampled_from([0.0, 0.3, 1.0]),
        wrong=st.none(),
        gap=st.integers(0, 9),
        softcap=st.sampled_from([None, 2.0, 30.0]),
        lse_square_scale=st.sampled_from([0.0, 1e-4, 0.1]),
        weighted=st.booleans(),
    ),
)
SMALL = ((3,), 5, of(label_smoothing=0.3, share=0, softcap=2.0, lse_square_scale=0.1))
MANY = ((1031,), 2053, of())
# Exponents are less than 16 and are rounded: 16 roundings in an exponential and in their sum, and the sums have a few
# dozen additions one after another.
TYPES = r"cross_entropy takes float logits and int64 targets, not torch\.\w+ and"
FORMS = r"cross_entropy takes logits \(\.\.\., N\) and targets \(\.\.\.\) on one device, with N up to 2\*\*30, not"
CONTRACT = [
    Case(
        "cross_entropy",
        lambda draw, *size: rows(draw, *size)[:2],
        lambda x, target: exact(x, target, -100, 0.0, "mean")[:1],
        sizes=[((5,), 1000), ((2, 3), 17)],
        small=((3,), 5, of(share=0)),
        many=MANY,
        roundings=96,
        floor=FLUSHED.__getitem__,
        reference=reference,
        special=special,
        plain=True,
        refused=[
            Refused(lambda draw: (draw(2, 3).int(), zeros(draw, 2)), TypeError, TYPES),
            Refused(lambda draw: (draw(2, 3), zeros(draw, 2).int()), TypeError, TYPES),
            Refused(lambda draw: (draw(2, 3), draw(2, 3)), TypeError, TYPES),
            Refused(lambda draw: (draw(2, 3), zeros(draw, 1)), ValueError, FORMS),
            Refused(lambda draw: (draw(1, 2, 3), zeros(draw, 2)), ValueError, FORMS),
            Refused(lambda draw: (draw(), zeros(draw)), ValueError, FORMS),
            Refused(lambda draw: (draw(2, 3), zeros(draw, 1, 2)), ValueError, FORMS),
            *(
                Refused(
                    lambda draw, bad=bad: (draw(2, 3), zeros(draw, 2), -100, bad),
                    ValueError,
                    "cross_entropy takes label_smoothing from 0 to 1",
                )
                for bad in (-0.1, 1.1, torch.nan)
            ),
            *(
                Refused(
                    lambda draw, bad=bad: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", *bad),
                    ValueError,
                    "cross_entropy takes .* a softcap above 0 or None, and lse_square_scale from 0, not",
                )
                for bad in ((0.0,), (-1.0,), (torch.nan,), (torch.inf,), (None, -1.0), (None, torch.nan))
            ),
            *(
                Refused(
                    lambda draw, bad=bad: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", None, 0.0, bad(draw)),
                    error,
                    f"cross_entropy takes a {text}",
                )
                for error, text, bad in (
                    (TypeError, "float weight, not torch.int64", lambda draw: zeros(draw, 3)),
                    (ValueError, r"weight \(N,\) where the logits are, not \(2,\) on", lambda draw: draw(2)),
                    (ValueError, r"weight .* on meta", lambda draw: draw(3).to("meta")),
                )
            ),
            Refused(
                lambda draw: (
                    draw(2, 3).requires_grad_(),
                    zeros(draw, 2),
                    -100,
                    0.0,
                    "sum",
                    None,
                    0.0,
                    draw(3).requires_grad_(),
                ),
                ValueError,
                "cross_entropy has no gradient for the weight",
            ),
            Refused(
                lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "max"),
                ValueError,
                "cross_entropy takes a reduction mean, sum or none, not 'max'",
            ),
            Refused(
                lambda draw: (draw(1).expand(2**30 + 1), zeros(draw)),
                ValueError,
                FORMS,
            ),
            Refused(lambda draw: (draw(2, 3).to("meta"), zeros(draw, 2)), ValueError, f"{FORMS}.* on meta and"),
        ],
    ),
    Case(
        "cross_entropy_forward",
        rows,
        exact,
        sizes=ROWS,
        small=SMALL,
        many=MANY,
        shapes=SHAPES,
        roundings=96,
        floor=FLUSHED.__getitem__,
        gradients=exact_gradient,
    ),
    Case(
        "cross_entropy_backward",
        gradient_and_rows,
        lambda grad, x, target, stats, *options: exact_gradient(grad, x, target, *options),
        sizes=ROWS,
        small=SMALL,
        many=MANY,
        shapes=SHAPES,
        roundings=96,
        floor=FLUSHED.__getitem__,
        reference=reference_gradient,
        special=special_gradients,
        refused=[
            Refused(
                lambda draw, wrong=wrong: refused_gradient(draw, wrong(draw)),
                ValueError,
                "cross_entropy_backward takes a gradient like the loss",
            )
            for wrong in (lambda draw: draw().double(), lambda draw: draw(3), lambda draw: draw())
        ],
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("M", [1, 1023, 1024, 1025, 20_001])
def test_mean_of_many_rows(taken: ModuleType, dtype: torch.dtype, M: int) -> None:
    """The kernel of the mean goes over any number of rows, and counts those that are not ignored."""
    _, target, *options = rows(Draw(dtype, seed=M), (M,), 5, Options(ignore_index=7))
    losses = torch.rand(M, generator=torch.Generator().manual_seed(M), dtype=dtype).to(DEVICE)
    losses = losses.where(target != 7, 0)
    with pytest.MonkeyPatch.context() as patch:
        # The kernel of the rows is left out: a program for each would take long here.
        class Rows:
            def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
                return lambda x, targets, out, *_, **__: out.copy_(losses)

        patch.setattr(
            taken._cross_entropy_launch,
            "__defaults__",
            (None, 0.0, None, False, Rows(), taken._cross_entropy_mean_kernel),
        )
        loss, stats = taken._cross_entropy_launch(torch.ones(M, 5, device=DEVICE), target, *options)
    used = (target != 7).sum()
    torch.testing.assert_close(loss, (losses.double().sum() / used).to(dtype), equal_nan=True)
    torch.testing.assert_close(stats[-1], (1 / used.double()).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_predictions(taken: ModuleType, dtype: torch.dtype, reduction: str) -> None:
    """Beside the loss come the first of the largest logits and how often that is the target, as far as wanted."""
    for N in (1, 5, 17, 300, 5003):
        x, target = rows_of_equals(dtype, N)
        accuracy, tokens = predictions(x, target, reduction)
        loss = taken.cross_entropy(x.clone(), target, -1, reduction=reduction)

        def call(*wanted: bool, x: torch.Tensor = x, target: torch.Tensor = target) -> tuple[torch.Tensor, ...]:
            return taken.cross_entropy(x.clone(), target, -1, 0.0, reduction, None, 0.0, None, *wanted)

        for wanted, expected in (
            ((True, True), (loss, accuracy, tokens)),
            ((True, False), (loss, accuracy)),
            ((False, True), (loss, tokens)),
        ):
            torch.testing.assert_close(call(*wanted), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum_and_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, or none has; and a sum of ones is not where half precision stands still."""
    target, grad = torch.tensor(123, device=DEVICE), torch.ones((), dtype=accumulator(dtype), device=DEVICE)
    _, forward, backward = CONTRACT
    for row in rising_rows(dtype):
        check(forward, taken, dtype, (row, target, -100, 0.0, "mean"))
        stats = kept(row, target, -100, "mean")
        check(backward, taken, dtype, (grad, row, target, stats, -100, 0.0, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_large_logits(taken: ModuleType, dtype: torch.dtype) -> None:
    """Near 1e6 the sum's logarithm is less than a rounding of the maximum, and still counts."""
    x = torch.full((1, 4), 1e6, dtype=dtype, device=DEVICE, requires_grad=True)
    target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    loss = taken.cross_entropy(x, target)
    (d,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(loss.item(), 1.386294, rtol=1e-6, atol=0)
    torch.testing.assert_close(d.tolist(), [[-0.75, 0.25, 0.25, 0.25]])


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: few rows have more warps forward, and more programs backward."""
    for dtype in FLOATS:
        x = torch.empty(1, dtype=dtype)
        with processors(taken, 132):
            for M, warps in ((1, 32), (66, 32), (67, 16), (132, 16), (133, 8), (264, 8), (265, 4), (10**6, 4)):
                plan = taken._cross_entropy_plan(x, M)
                warps = min(warps, 16) if dtype.itemsize == 8 else warps
                assert plan["num_warps"] == warps
                assert plan["BLOCK_N"] * dtype.itemsize == 32 * 16 * warps
                assert plan["LINES"] == (4 if warps == 32 else 8)
                assert plan["VEC"] * dtype.itemsize == 16
            for M, N in ((1, 10), (1, 10**6), (8, 151936), (4096, 32000)):
                grid, plan = taken._cross_entropy_plan_backward(x, M, N, N)
                assert grid[0] == M
                assert grid[1] == 1 or grid[0] * grid[1] <= 8 * 132
                assert grid[1] == 1 or (grid[1] - 1) * plan["BLOCK_N"] < N
                assert plan["VEC"] * dtype.itemsize == 16
    x = torch.empty(1, dtype=torch.bfloat16)
    vectors = [taken._cross_entropy_plan_backward(x, 2, 20_001, s)[1]["VEC"] for s in (20_001, 20_009, 20_002)]
    assert vectors == [8, 8, 1]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 3000, 20_001):
        x, target = recipe.random(9, N, torch.float32)
        expected = torch_loss(x, target)
        torch.testing.assert_close(recipe.first_loss(x, target), expected)
        torch.testing.assert_close(recipe.cross_entropy(x, target), expected)
        recipe.rows_alone(x, target)
        recipe.with_warps(x, target, 8)
        assert recipe.backward(x, target)().shape == x.shape
    assert recipe.statements(recipe.loss_kernel) == 16


@pytest.mark.needs_gpu_memory(10)
@pytest.mark.parametrize(
    ("M", "N"),
    [
        (2**17 + 1, 2**14),
        (2**16 + 3, 2**15 + 1),
        pytest.param(5, 2**29 + 3, marks=pytest.mark.needs_gpu_memory(24)),
    ],
)
def test_beyond_int32(taken: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, and as the first."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=DEVICE)
    target = torch.full((M,), N - 1, device=DEVICE)
    x[0, ::2] = x[-1, ::2] = 2
    losses, stats = taken.cross_entropy_forward(x, target, -100, 0.0, "none")
    torch.testing.assert_close(losses[0], losses[-1])
    expected = taken.cross_entropy_forward(x[-1:].clone(), target[:1], -100, 0.0, "none")[0]
    torch.testing.assert_close(losses[-1:], expected)
    d = taken.cross_entropy_backward(torch.ones_like(losses), x, target, stats, -100, 0.0, "none")
    torch.testing.assert_close(d[0], d[-1])


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype, M: int, stride: int = 50_257) -> list[tuple[object, dict]]:
    """Return the kernels of rows, each with what is known of its arguments at a launch."""
    x, type_name = torch.empty(1, dtype=dtype), NAMES[str(dtype).removeprefix("torch.")]
    acc_type = "fp64" if dtype == torch.float64 else "fp32"
    types = {"dtype": type_name, "targets_ptr": "i64", "losses_ptr": acc_type, "stats_ptr": acc_type}
    types |= {"SOFTCAP": 0.0, "LSE_SQUARE_SCALE": 0.0, "weight_ptr": None}
    types |= {"predicted_at": None}
    with processors(taken, 132):
        forward = taken._cross_entropy_plan(x, M) | types | {"SMOOTHING": 0.1}
        backward = taken._cross_entropy_plan_backward(x, M, 50_257, stride)[1]
    backward |= types | {"SMOOTHING": 0.1, "MEAN": True, "grad_ptr": acc_type}
    del backward["losses_ptr"], backward["predicted_at"]
    return [(taken._cross_entropy_kernel, forward), (taken._cross_entropy_backward_kernel, backward)]


def widths(taken: ModuleType) -> list[list[set[str]]]:
    """Return how wide the loads and stores of tiles are, for odd rows that begin alike, and for others."""
    return [
        [
            set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b32|b16)\s", ptx(kernel, **known)))
            for kernel, known in launches(taken, torch.bfloat16, 4096, stride)
        ]
        for stride in (50_257, 50_264)
    ]


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill, for few rows and for many."""
    return {
        f"{dtype} {M}": [stack(kernel, **known) for kernel, known in launches(taken, dtype, M)]
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for M in (8, 100, 4096)
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Rows of any length are loaded and stored 16 bytes at a time, if they begin alike; no register spills.

    Triton 3.9 spills two, forward in 100 rows of float32, and backward in float64.
    """
    (alike, others), spilled = on_h100(gallery / "fusion" / "cross_entropy.py", widths, spills)
    assert alike == [{"v4.b32", "b16"}] * 2
    assert others == [{"v4.b32", "b16"}, {"b16"}]
    few = {"torch.float32 100": [8, 0]} | {f"torch.float64 {M}": [0, 8] for M in (8, 100, 4096)}
    expected = few if TRITON >= (3, 9) else {}
    assert {name: bytes_ for name, bytes_ in spilled.items() if any(bytes_)} == expected


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of the op, forward and backward."""
    target = torch.zeros(3, dtype=torch.int64)
    return graphs(recipe.cross_entropy, torch.randn(3, 300, requires_grad=True), target)


def traced_with_options(recipe: ModuleType) -> list[list[str]]:
    """Return the same with every option."""
    target = torch.zeros(3, dtype=torch.int64)

    def loss(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        loss, *others = recipe.cross_entropy(x, target, -100, 0.1, "sum", 2.0, 0.1, weight, True, True)
        return loss + sum(other.sum() for other in others)

    return graphs(loss, torch.randn(3, 300, requires_grad=True), target, torch.rand(300))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way: a store's address must not depend on them."""
    results = on_h100(gallery / "fusion" / "cross_entropy.py", traced, traced_with_options)
    for traced_graphs, forward in zip(results, (2, 1), strict=True):
        counts = [sum(call.startswith("triton_kernel_wrapper") for call in graph) for graph in traced_graphs]
        assert counts == [forward, 1]
        for graph in traced_graphs:
            # Sums of class weights are put into the stats.
            copies = r"aten\.(clone|copy)" if forward == 2 else r"aten\.clone"
            assert not [call for call in graph if re.match(copies, call)]


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "edges left out of the row",
        "    total += tl.sum(_cross_entropy_exp(x_e - top), axis=0)\n",
        "",
    ),
    ("a sum that does not follow its maximum", "        s *= _cross_entropy_exp(m - larger)\n", ""),
    (
        "a row padded with zeros",
        'x_body + offs, mask, -float("inf"), ACC',
        "x_body + offs, mask, 0.0, ACC",
    ),
    ("edges padded with zeros", 'offs_e, read_e, -float("inf")', "offs_e, read_e, 0.0"),
    ("rows taken for adjacent", "    x_row = row * stride_xm\n", "    x_row = row * N\n"),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("ignored rows in the mean", "(mask & (targets != ignore_index)).to(tl.int32)", "mask.to(tl.int32)"),
    (
        "rows of the mean past the end",
        "        mask = offs < M\n        total",
        "        mask = offs < M + 1\n        total",
    ),
    ("ignored rows in the loss", "tl.where(counts, loss, 0.0)", "loss"),
    ("wrong targets read", "counts & (target >= 0) & (target < N)", "counts & (N > 0)"),
    ("wrong targets have gradients", '    grad = tl.where(known, grad, float("nan"))\n', ""),
    ("ignored rows have gradients", "    grad = tl.where(counts, grad, 0.0)\n", ""),
    ("smoothing left out of the gradient", "b = grad * SMOOTHING / N", "b = grad * 0"),
    ("smoothing left out of the edges", "tl.where(mask_e, part, 0)", "tl.where(mask_e, part * 0, 0)"),
    ("a target that is not subtracted", "        d = tl.where(offs + head == target, d - hit, d)\n", ""),
    ("a target that is not subtracted in the edges", "    d_e = tl.where(offs_e == target, d_e - hit, d_e)\n", ""),
    ("a target looked for in the body", "offs + head == target", "offs == target"),
    ("an edge stored without a mask", "offs_e, d_e, mask=mask_e)", "offs_e, d_e)"),
    ("a body stored without a mask", "tl.store(d_body + offs, d, mask=mask)", "tl.store(d_body + offs, d)"),
    ("parts that overlap or leave out", "step = tl.num_programs(axis=1) * BLOCK_N", "step = 2 * BLOCK_N"),
    ("a gradient that is not scaled", "        grad *= tl.load(stats_ptr + 2 * M)\n", "        grad *= 1.0\n"),
    ("one gradient for all rows", "1 if each else 0,", "0,"),
    ("small logits that cancel", "tl.where(s < 0.25, x * p / q, large)", "large"),
    ("a padded row that is capped", "tl.where(mask, SOFTCAP * tanh, other)", "SOFTCAP * tanh"),
    (
        "a softcap without its slope",
        "            d *= 1 - (x * (1 / SOFTCAP)) * (x * (1 / SOFTCAP))\n",
        "            d *= 1.0\n",
    ),
    ("no slope in the edges", "d_e *= 1 - (x_e * (1 / SOFTCAP)) * (x_e * (1 / SOFTCAP))", "d_e *= 1.0"),
    ("no gradient of the z-loss", "        of_lse += of_square\n", ""),
    ("the last of equals", "best = tl.where(larger > m, first, best)", "best = tl.where(larger >= m, first, best)"),
    ("predictions without the body's place", "tl.where(m == top, head + best, N)", "tl.where(m == top, best, N)"),
    (
        "predictions of the body alone",
        "best = tl.minimum(best, tl.min(tl.where(x_e == top, offs_e, N), axis=0))",
        "best = tl.minimum(best, N)",
    ),
    ("predictions where ignored", "tl.where(counts, tl.where(best < N, best, 0), -1)", "tl.where(best < N, best, 0)"),
    ("weights left out at the target", "        loss *= tl.load(weight_ptr + target, mask=known, other=0)\n", ""),
    (
        "weights of the body's classes alone",
        "weight_ptr, head + offs, mask, SMOOTHING",
        "weight_ptr, offs, mask, SMOOTHING",
    ),
    (
        "no weights in the gradient of the body",
        "_cross_entropy_weigh(b, weight_ptr, offs + head, mask, SMOOTHING)",
        "b",
    ),
    ("no weights in the gradient of the edges", "_cross_entropy_weigh(b, weight_ptr, offs_e, mask_e, SMOOTHING)", "b"),
    ("a target's gradient without its weight", "        hit *= w_t\n", ""),
    ("a weighted z-loss", "            square *= tl.load(stats_ptr + 2 * M + 1)\n", ""),
    ("the gradient of a weighted z-loss", "            of_square *= tl.load(stats_ptr + 2 * M + 1)\n", ""),
    ("weights of ignored targets", "padded[torch.where(known, targets, N)]", "padded[torch.where(known, targets, 0)]"),
    ("a z-loss of the maximum", "lse = tl.log(total) + top\n", "lse = top\n"),
    ("one number in place of two", "loss = tl.log(total) + (top - x_t)", "loss = (tl.log(total) + top) - x_t"),
    ("a body where rows do not begin alike", '"VEC": 16 // size if alike else 1', '"VEC": 16 // size'),
    (
        "no launcher for GPUs",
        'CROSS_ENTROPY_LIBRARY.impl("cross_entropy", _cross_entropy_launch, "CUDA")\n',
        "",
    ),
]
