"""The op of the recipe Cross entropy in place, with every plan of its launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, check
from compiled import Ask, ptx, stack
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes
from losses import (
    FLUSHED,
    class_weights,
    exact_gradient,
    exact_loss,
    ignored_rows,
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


@contextmanager
def processors(taken: ModuleType, number: int) -> Iterator[None]:
    """Have the launcher decide as for a GPU of so many multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_cross_entropy_in_place_processors", lambda device: number)
        yield


class Options(NamedTuple):
    """What the op takes besides tensors, and how rows and targets are made."""

    label_smoothing: float = 0.0
    ignore_index: int = -100
    share: float = 0.3  # of the rows, for which the target is no class
    wrong: int | None = None  # that target; None is the one to ignore
    gap: int = 0  # elements between rows
    reduction: str = "mean"
    softcap: float | None = None
    lse_square_scale: float = 0.0
    weighted: bool = False


def rows(draw: Draw, lead: tuple[int, ...], N: int, options: Options) -> tuple[Any, ...]:
    """Make logits, targets with gaps between them, and options."""
    smoothing, ignored, share, wrong, gap, *others, weighted = options
    x = draw(*lead, gap + N)[..., gap:]
    target = targets(draw, (*lead, 2), N, share, ignored if wrong is None else wrong)[..., 1]
    return x, target, ignored, smoothing, *others, class_weights(draw, N) if weighted else None


def exact(
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str = "mean",
    *others: Any,
) -> list[Exact]:
    """Return the loss, and the gradient that takes the place of the logits."""
    options = ignore_index, smoothing, reduction, *others
    loss, size = exact_loss(x, target, *options)
    gradient = exact_gradient(torch.ones_like(loss), x, target, *options)
    return [Exact(loss, size, accumulator, made_by_torch=reduction != "none"), *gradient]


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make rows with NaN, infinities and the lowest numbers, together and, as one NaN is enough for a mean, apart."""
    options = [(0.0,), (0.1,), (0.1, "sum"), (0.1, "none", 2.0)]
    options += [(0.1, way, None, 0.01, class_weights(draw, 1000)) for way in ("mean", "none")]
    inputs = [(*pair, -1, *some) for pair in ignored_rows(draw) for some in options]
    for x, target in special_rows(draw.dtype):
        inputs += [(x, target, -100, 0.0, "none"), (x, target, -100, 0.1, "none", 2.0, 0.01)]
        for smoothing, count in ((0.0, 12), (0.2, 9)):
            parts = [slice(row, row + 1) for row in range(count)]
            inputs += [(x[part], target[part], -100, smoothing) for part in (slice(0, count), *parts)]
    return inputs


def loss_and_gradient(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Return those of PyTorch."""
    leaf = x.detach().requires_grad_()
    loss = reference(leaf, *rest)
    return loss.detach(), *torch.autograd.grad(loss, leaf, torch.ones_like(loss))


of = Options
# Whole blocks, one and several, and parts of one; rows that begin and end at any distance from a multiple of 16 bytes;
# targets of all kinds.
ROWS = [((5,), 1000, of(0.1, softcap=2.0)), ((9,), 37, of(0.25, gap=3, reduction="none", softcap=2.0))]
ROWS += [((9,), 5003, of(0.1, lse_square_scale=0.1, weighted=True)), ((7,), 300, of(weighted=True))]
ROWS += [((8,), 300, of(reduction="none", share=0, softcap=1000.0))]  # logits are small beside it
ROWS += [((7,), 4999, of(0.1, reduction="sum")), ((2, 3), 300, of(reduction="none"))]
ROWS += [((5,), 1000, of(0.1)), ((2,), 16_384, of(share=0)), ((4,), 300, of(wrong=-1)), ((9,), 17, of(0.25, gap=3))]
ROWS += [((3,), 20_001, of(gap=5)), ((2, 3), 33, of(ignore_index=7, share=1.0)), ((3,), 8192, of(0.1, share=0))]
ROWS += [((3,), 1, of()), ((0,), 7, of()), ((3, 0), 37, of()), ((2, 3), 0, of()), ((1, 2, 1), 37, of())]
ROWS += [((4,), 100, of(wrong=bad)) for bad in (100, 103, 2**31, 2**32 + 5, -(2**40))]
ROWS += [((4,), 100, of(wrong=100, reduction=way, softcap=3.0)) for way in ("sum", "none")]
ROWS += [((0,), 7, of(reduction=way)) for way in ("sum", "none")]
ROWS += [((7,), 4099, of(0.1, reduction="sum", softcap=2.0, lse_square_scale=0.1, weighted=True))]
ROWS += [((2, 3), 37, of(0.3, reduction="none", lse_square_scale=0.1, weighted=True)), ((0,), 7, of(weighted=True))]
ROWS += [((2, 3), 0, of(weighted=True)), ((2, 3), 33, of(ignore_index=7, share=1.0, weighted=True))]
ROWS += [((4,), 100, of(0.1, wrong=bad, weighted=True, lse_square_scale=0.1)) for bad in (100, -1, 2**40)]
ROWS += [((3,), 0, of(reduction="none")), ((3,), 50_257, of(softcap=2.0, reduction="none"))]
ROWS += [((3,), N, of()) for N in (259, 1027, 3000, 4099, 16_387, 32_768, 50_257, 131_073)]
EDGES = [
    ((N + 7,), N, options)
    for N in (1, 2, 3, 7, 8, 9, 15, 16, 17)
    for options in (of(gap=3, share=0), of(0.25, share=0))
]
SHAPES = st.tuples(
    st.sampled_from([(), (0,), (1,), (2,), (7,)]),
    sizes(1024, 4500),
    st.builds(
        Options,
        label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
        ignore_index=st.sampled_from([-100, 0, 1, 7, 2**40]),
        share=st.sampled_from([0.0, 0.3, 1.0]),
        wrong=st.none(),
        gap=st.integers(0, 9),
        reduction=st.sampled_from(["mean", "sum", "none"]),
        softcap=st.sampled_from([None, 2.0, 30.0]),
        lse_square_scale=st.sampled_from([0.0, 1e-4, 0.1]),
        weighted=st.booleans(),
    ),
)
NAME = "cross_entropy_in_place_"
NOT_TAKEN = [
    (
        TypeError,
        r"float logits and int64 targets, not torch\.\w+ and torch\.",
        lambda draw: (draw(2, 3).int(), zeros(draw, 2)),
        lambda draw: (draw(2, 3), zeros(draw, 2).int()),
        lambda draw: (draw(2, 3), draw(2, 3)),
    ),
    (
        ValueError,
        r"logits \(\.\.\., N\) and targets \(\.\.\.\), not",
        lambda draw: (draw(2, 3), zeros(draw, 1)),
        lambda draw: (draw(1, 2, 3), zeros(draw, 2)),
        lambda draw: (draw(), zeros(draw)),
        lambda draw: (draw(2, 3), zeros(draw, 1, 2)),
    ),
    (
        ValueError,
        "a contiguous tensor, or a matrix of contiguous rows that share",
        lambda draw: (draw(2, 3).T[:2], zeros(draw, 2)),
        lambda draw: (draw(2, 6)[:, ::2], zeros(draw, 2)),
        lambda draw: (draw(1, 3).expand(2, 3), zeros(draw, 2)),
        lambda draw: (draw(2, 4, 6)[:, ::2], zeros(draw, 2, 2)),
    ),
    (
        ValueError,
        "label_smoothing from 0 to 1",
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, -0.1),
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 1.1),
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, torch.nan),
    ),
    (
        ValueError,
        "a reduction mean, sum or none, not 'max'",
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "max"),
    ),
    (
        ValueError,
        "a softcap above 0 or None",
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", 0.0),
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", torch.nan),
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", torch.inf),
    ),
    (
        ValueError,
        "lse_square_scale from 0, not",
        *(lambda draw, bad=bad: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", None, bad) for bad in (-1.0, torch.nan)),
    ),
    (
        TypeError,
        "a float weight, not torch.int64",
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", None, 0.0, zeros(draw, 3)),
    ),
    (
        ValueError,
        r"a weight \(N,\) where the logits are, not",
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", None, 0.0, draw(2)),
        lambda draw: (draw(2, 3), zeros(draw, 2), -100, 0.0, "sum", None, 0.0, draw(3).to("meta")),
    ),
    (
        ValueError,
        "no logits that require grad",
        lambda draw: (draw(2, 3).requires_grad_(), zeros(draw, 2)),
        lambda draw: (draw(2, 3).requires_grad_() * 2, zeros(draw, 2)),
    ),
    (ValueError, r".*up to 2\*\*30 elements", lambda draw: (draw(1).expand(2**30 + 1), zeros(draw))),
    (
        ValueError,
        "logits and targets on one device, not meta and",
        lambda draw: (draw(2, 3).to("meta"), zeros(draw, 2)),
    ),
]
# Exponents are less than 16 and are rounded: 16 roundings in an exponential and in their sum, and the sums have a few
# dozen additions one after another.
CONTRACT = [
    Case(
        NAME,
        rows,
        exact,
        sizes=[*ROWS, *more],
        small=((3,), 5, of(0.3, share=0)),
        many=((1031,), 2053, of()),
        shapes=SHAPES,
        layouts=["contiguous", "apart", "offset", "padded"],
        roundings=96,
        floor=FLUSHED.__getitem__,
        reference=loss_and_gradient,
        special=special,
        settings={"_cross_entropy_in_place_processors": lambda _, number=number: number},
        name=f"{NAME} of {name} rows",
        plain=True,
        changes=1,
        refused=[Refused(call, error, f"{NAME} takes {text}") for error, text, *calls in NOT_TAKEN for call in calls],
    )
    for name, number, more in (("many", 0, EDGES), ("few", 10**6, []))
]
DEFAULTS = -100, 0.0, "mean", None, 0.0, None, None


def whole(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of the function as the op takes them: it has no defaults, and a place for predictions."""
    return (*arguments, *DEFAULTS[len(arguments) - 2 :])


CONTRACT += [
    replace(
        CONTRACT[0],
        call="_cross_entropy_in_place_op",
        name="",
        plain=False,
        sizes=ROWS[:8],
        refused=[],
        arguments=lambda *size: whole(rows(*size)),
        exact=lambda *arguments: exact(*arguments[:-1]),
        reference=lambda *arguments: loss_and_gradient(*arguments[:-1]),
        special=lambda draw: [whole(arguments) for arguments in special(draw)],
    )
]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("M", [1, 1023, 1024, 1025, 20_001])
def test_counts_many_rows(taken: ModuleType, dtype: torch.dtype, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that are not ignored are counted, however many there are."""
    scales = []

    class Rows:
        """Stands where the kernel of the rows stands: a program for each would take long here."""

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda x, targets, scale, losses, *_, **__: scales.append(scale.item())

    monkeypatch.setattr(taken, "_cross_entropy_in_place_kernel", Rows())
    x, target, *options = rows(Draw(dtype, seed=M), (M,), 5, Options(ignore_index=7))
    taken._cross_entropy_in_place_launch(x, target, *options)
    torch.testing.assert_close(scales, [1 / (target != 7).sum().item()])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_predictions(taken: ModuleType, dtype: torch.dtype, reduction: str) -> None:
    """Beside the loss come the first of the largest logits and how often that is the target, as far as wanted."""
    for N in (1, 5, 17, 300, 17000):
        x, target = rows_of_equals(dtype, N)
        accuracy, tokens = predictions(x, target, reduction)
        loss = taken.cross_entropy_in_place_(x.clone(), target, -1, reduction=reduction)

        def call(*wanted: bool, x: torch.Tensor = x, target: torch.Tensor = target) -> tuple[torch.Tensor, ...]:
            return taken.cross_entropy_in_place_(x.clone(), target, -1, 0.0, reduction, None, 0.0, None, *wanted)

        for wanted, expected in (
            ((True, True), (loss, accuracy, tokens)),
            ((True, False), (loss, accuracy)),
            ((False, True), (loss, tokens)),
        ):
            torch.testing.assert_close(call(*wanted), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum_and_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, or none has; and a sum of ones is not where half precision stands still."""
    for row in rising_rows(dtype):
        check(replace(CONTRACT[0], settings={}), taken, dtype, (row, torch.tensor(123, device=DEVICE), -100, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_large_logits(taken: ModuleType, dtype: torch.dtype) -> None:
    """Near 1e6 the sum's logarithm is less than a rounding of the maximum, and still counts."""
    x = torch.full((1, 4), 1e6, dtype=dtype, device=DEVICE)
    loss = taken.cross_entropy_in_place_(x, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(loss.item(), 1.386294, rtol=1e-6, atol=0)
    torch.testing.assert_close(x.tolist(), [[-0.75, 0.25, 0.25, 0.25]])


def test_autograd_learns_of_the_change(taken: ModuleType) -> None:
    """Whoever saved the logits for a backward is told that they are gone."""
    x = torch.ones(2, 3, device=DEVICE, requires_grad=True)
    saved = (x * 2).exp()
    taken.cross_entropy_in_place_(saved.detach(), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_refuses_gradients_in_a_forward(taken: ModuleType) -> None:
    """An autograd function's forward is without grad mode: what requires grad is refused there too, and stays."""
    x = torch.ones(2, 3, device=DEVICE, requires_grad=True)
    with torch.no_grad(), pytest.raises(ValueError, match=f"^{NAME} takes no logits that require grad"):
        taken.cross_entropy_in_place_(x, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert (x == 1).all()


def test_linear_loss(recipe: ModuleType) -> None:
    """The page's function has the loss and the gradients of a projection and PyTorch's loss."""
    x, weight = (Layout("contiguous", n).make((n, 8), torch.float32, DEVICE).requires_grad_() for n in (5, 40))
    target = torch.tensor([3, -100, 39, 0, 7], device=DEVICE)
    loss, expected = recipe.LinearLoss.apply(x, weight, target), torch_loss(x @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    for actual, exact in zip(*(torch.autograd.grad(3 * t, (x, weight)) for t in (loss, expected)), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-6)


def test_linear_loss_of_a_large_factor(recipe: ModuleType) -> None:
    """In float16, too, a loss may be multiplied by the 65536 with which GradScaler begins."""
    x, weight = (Layout("contiguous", n).make((n, 8), torch.float16, DEVICE).requires_grad_() for n in (5, 40))
    target = torch.tensor([3, -100, 39, 0, 7], device=DEVICE)
    grads = torch.autograd.grad(65536 * recipe.LinearLoss.apply(x, weight * 1e-3, target), (x,))
    assert all(grad.isfinite().all() for grad in grads)


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: 32 warps for long rows and for few, 8 for others."""
    with processors(taken, 132):
        for M, N, warps in ((4096, 32000, 8), (4096, 57344, 8), (4096, 57345, 32), (132, 100, 32), (133, 100, 8)):
            plan = taken._cross_entropy_in_place_plan(torch.empty(1, N, dtype=torch.bfloat16), M)
            assert plan["num_warps"] == warps
            assert plan["BLOCK_N"] == warps * 256
            assert plan["LINES"] == (4 if warps == 32 else 8)
            assert plan["VEC"] == 8
        x_float64 = torch.empty(1, 32000, dtype=torch.float64)
        assert taken._cross_entropy_in_place_plan(x_float64, 4096)["num_warps"] == 16


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 3000, 20_001):
        x, target = recipe.random(9, N, torch.float32)
        loss, d = recipe.both(torch_loss, x, target)
        for step in recipe.STEPS.values():
            over = x.clone()
            torch.testing.assert_close(step(over, target), loss)
            torch.testing.assert_close(over, d)
        recipe.with_warps(x, target, 4)
    assert recipe.statements(recipe.both_kernel) == 21


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
    row = x[-1:].clone()
    assert taken.cross_entropy_in_place_(x, target).isfinite()
    torch.testing.assert_close(x[0], x[-1])
    taken.cross_entropy_in_place_(row, target[:1])
    torch.testing.assert_close(x[-1].float() * M, row[0].float(), rtol=1e-2, atol=1e-9)


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype) -> list[dict[str, object]]:
    """Return what is known at a launch, for few warps and for many."""
    type_name = NAMES[str(dtype).removeprefix("torch.")]
    acc_type = "fp64" if dtype == torch.float64 else "fp32"
    types = {"dtype": type_name, "targets_ptr": "i64", "losses_ptr": acc_type, "scale_ptr": acc_type, "SMOOTHING": 0.1}
    types |= {"MEAN": True, "SOFTCAP": 0.0, "LSE_SQUARE_SCALE": 0.0, "weight_ptr": None}
    types |= {"predicted_ptr": None}
    with processors(taken, 0):
        rows = [torch.empty(1, N, dtype=dtype, device="meta") for N in (1000, 128_256)]
        return [taken._cross_entropy_in_place_plan(x, 1000) | types for x in rows]


def widths(taken: ModuleType) -> list[set[str]]:
    """Return how wide the loads and stores of tiles are, for rows of any length."""
    return [
        set(re.findall(r"((?:ld|st)\.global)\S*?\.v4\.b32\s", ptx(taken._cross_entropy_in_place_kernel, **known)))
        for known in launches(taken, torch.bfloat16)
    ]


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill."""
    return {
        str(dtype): [stack(taken._cross_entropy_in_place_kernel, **known) for known in launches(taken, dtype)]
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """All lengths are loaded and stored 16 bytes at a time: the compiler is told of no length that 8 divides."""
    wide_accesses, spilled = on_h100(gallery / "fusion" / "cross_entropy_in_place.py", widths, spills)
    assert wide_accesses == [{"ld.global", "st.global"}] * 2
    assert {name: bytes_ for name, bytes_ in spilled.items() if any(bytes_)} == {}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/cross_entropy_in_place")
    logits, *made, first_error, second_error, none, wrong, grad, kept, scaled, in_place = out.splitlines()
    assert logits == "The logits are 4,096,000 bytes."
    assert sum("4,096,000" in line for line in made) == 3
    for error in (first_error, second_error):
        assert re.fullmatch(r"error \d\.\de-\d\d, allowed 5\.0e-06", error)
    assert none == "no rows: nan"
    assert wrong == "a wrong target: nan"
    assert grad.startswith("ValueError: cross_entropy_in_place_ takes no logits that require grad: call it in")
    assert kept.endswith("modified by an inplace operation")
    assert " 0.0%" in scaled
    assert " 0.0%" not in in_place


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("an edge stored without a mask", "offs_e, d_e, mask=mask_e)", "offs_e, d_e)"),
    ("edges left out of the row", "    total += tl.sum(_cross_entropy_in_place_exp(x_e - top), axis=0)\n", ""),
    ("a sum that does not follow its maximum", "        s *= _cross_entropy_in_place_exp(m - larger)\n", ""),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("ignored rows in the mean", "((targets != ignore_index) & (offs < M)).to", "(offs < M).to"),
    ("targets counted past the end", "((targets != ignore_index) & (offs < M)).to", "(targets != ignore_index).to"),
    ("wrong targets read", "known = counts & (target >= 0) & (target < N)", "known = counts & (N > 0)"),
    ("ignored rows have gradients", "    scale = tl.where(counts, scale, 0.0)\n", ""),
    ("a loss where no row counts", "tl.where(counts, loss, 0.0) * scale)", "tl.where(counts, loss * scale, 0.0))"),
    ("smoothing left out of the gradient", "b = scale * SMOOTHING * share", "b = scale * 0"),
    ("a target that is not subtracted", " * a - b_t - hit\n", " * a - b_t\n"),
    ("the last of equals", "best = tl.where(larger > m, first, best)", "best = tl.where(larger >= m, first, best)"),
    ("predictions without the body's place", "tl.where(m == top, head + best, N)", "tl.where(m == top, best, N)"),
    (
        "predictions of the body alone",
        "best = tl.minimum(best, tl.min(tl.where(x_e == top, offs_e, N), axis=0))",
        "best = tl.minimum(best, N)",
    ),
    ("predictions where ignored", "tl.where(counts, tl.where(best < N, best, 0), -1)", "tl.where(best < N, best, 0)"),
    ("weights left out at the target", "        loss *= w_t\n", ""),
    ("a target's gradient without its weight", "        hit *= w_t\n", ""),
    (
        "no weights in the gradient of the body",
        "            b, weight_ptr, head + offs, mask, SMOOTHING",
        "            b, None, head + offs, mask, SMOOTHING",
    ),
    (
        "no weights in the gradient of the edges",
        "        b, weight_ptr, offs_e, mask_e, SMOOTHING",
        "        b, None, offs_e, mask_e, SMOOTHING",
    ),
    ("no weight beside the target", "b, weight_ptr, target, known, SMOOTHING", "b, None, target, known, SMOOTHING"),
    ("weights of the body's classes alone", "x * share, weight_ptr, head + offs", "x * share, weight_ptr, offs"),
    ("a weighted z-loss", "            factor *= tl.load(scale_ptr + 1)\n", ""),
    ("no gradient of the z-loss", "        of_lse += 2 * factor * lse\n", ""),
    ("a z-loss of the maximum", "lse = tl.log(total) + top\n", "lse = top\n"),
    ("weights of ignored targets", "padded[torch.where(known, targets, N)]", "padded[torch.where(known, targets, 0)]"),
    ("a sum scaled as a mean", "tl.load(scale_ptr) if MEAN else tl.full((), 1.0, dtype=ACC)", "tl.load(scale_ptr)"),
    ("small logits that cancel", "tl.where(s < 0.25, x * p / q, large)", "large"),
    ("a padded row that is capped", "tl.where(mask, SOFTCAP * tanh", "tl.where(True, SOFTCAP * tanh"),
    ("a softcap without its slope", "d *= 1 - (x * (1 / SOFTCAP)) * (x * (1 / SOFTCAP))", "d *= 1.0"),
    ("no slope in the edges", "    d_e = _cross_entropy_in_place_slope(d_e, x_e, SOFTCAP)\n", ""),
    ("no slope at the target", "    d_t = _cross_entropy_in_place_slope(d_t, x_t, SOFTCAP)\n", ""),
    ("a wrong target written", "target, d_t, mask=known)", "target, d_t, mask=counts & (N > 0))"),
    ("a body stored without a mask", "tl.store(x_body + offs, d, mask=mask,", "tl.store(x_body + offs, d,"),
    ("rows taken for adjacent", "N if logits.is_contiguous() else logits.stride(0)", "N"),
    (
        "a last block that is empty",
        "    last = (N - 1) // (LINES * BLOCK_N) * (LINES * BLOCK_N)\n",
        "    last = N // (LINES * BLOCK_N) * (LINES * BLOCK_N)\n",
    ),
]
