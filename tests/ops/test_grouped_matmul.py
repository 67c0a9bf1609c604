"""The op of the recipe Grouped GEMM."""

# ruff: noqa: N806 - K and N are sizes, as in the recipe

import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_model
import hypothesis
import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import Ask, graphs
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS
from op_fixtures import end_ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPE = Path("experts") / "grouped_matmul.py"
HALVES = FLOATS[:2]
ROOM = 227 * 1024  # bytes of shared memory

Lengths = tuple[int, ...]


def ends(lengths: Lengths) -> torch.Tensor:
    """Return where groups of these lengths end."""
    return torch.tensor([*accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def arguments(
    draw: Draw, lengths: Lengths, past: int, K: int, N: int, transposed: bool, has_bias: bool
) -> tuple[Any, ...]:
    """Make x with some rows past the last group, a weight, offsets, and a bias or None."""
    E = len(lengths)
    x = draw(sum(lengths) + past, K)
    weight = draw(E, N, K).mT if transposed else draw(E, K, N)
    return x, weight, ends(lengths), draw(E, N) if has_bias else None


def lengths_of(offsets: torch.Tensor, rows: int) -> list[int]:
    """Return the lengths of groups, and last how many rows are past them."""
    return torch.tensor([0, *offsets.tolist(), rows]).diff().tolist()


def products(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the products of groups, group by group; rows past the last are zeros."""
    *parts, past = x.split(lengths_of(offsets, len(x)))
    made = [part @ matrix for part, matrix in zip(parts, weight, strict=True)]
    return torch.cat([*made, past.new_zeros(len(past), weight.shape[2])])


def exact(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> list[Exact]:
    """Return that with a bias, in K sums one after another."""
    value, terms = products(x, weight, offsets), products(x.abs(), weight.abs(), offsets)
    if bias is not None:
        lengths = torch.tensor(lengths_of(offsets, len(x)), device=x.device)
        rows = torch.cat([bias, bias.new_zeros(1, bias.shape[1])]).repeat_interleave(lengths, 0)
        value, terms = value + rows, terms + rows.abs()
    return [Exact(value, terms, roundings=x.shape[1] + 1)]


def exact_sums(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor) -> list[Exact]:
    """Return the products of x.T and grad in each group, in as many sums as it has rows."""

    def sums(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        lengths = lengths_of(offsets, len(x))
        parts = zip(x.split(lengths), grad.split(lengths), strict=True)
        made = [part.T @ other for part, other in parts][:-1]
        return torch.stack(made) if made else x.new_zeros(0, x.shape[1], grad.shape[1])

    return [Exact(sums(x, grad), sums(x.abs(), grad.abs()), roundings=len(x) + 1)]


def exact_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> list[Exact]:
    """Return the gradients of x and weight, and of a bias."""
    found = exact(grad, weight.mT, offsets) + exact_sums(x, grad, offsets)
    if bias is not None:
        ones = torch.ones_like(grad[:, :1])
        found += [Exact(*(t[:, 0] for t in right[:2])) for right in exact_sums(ones, grad, offsets)]
    return found


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make NaN and infinities, which spoil the rows of their group or row alone, and NaN past the last group."""
    made = []
    for transposed in (False, True):
        x, weight, offsets, bias = arguments(draw, (70, 0, 3, 140), 5, 40, 136, transposed, True)
        x.fill_(1), weight.fill_(1), bias.fill_(1)
        x[69, 39], x[70, 0], x[80, 3] = torch.nan, torch.inf, -torch.inf
        x[213:] = torch.nan
        weight[1], weight[2, 5, 7], bias[3, 135] = torch.nan, torch.inf, torch.nan
        made.append((x, weight, offsets, bias))
    return made


def special_sums(draw: Draw) -> list[tuple[Any, ...]]:
    """Make NaN and infinities in rows beside other groups, and past the last group."""
    x, grad, offsets = draw(218, 40), draw(218, 72), ends((70, 0, 3, 140))
    x.fill_(1), grad.fill_(1)
    x[69, 39], grad[70, 5], x[73, 3], grad[212, 71] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[213:], grad[213:] = torch.nan, torch.nan
    return [(x, grad, offsets)]


# Groups, rows past them, K, N, a transposed weight, a bias: what the engine takes, and what it does not
SIZES = [((70, 0, 3, 140), 5, 40, 136, False, True), ((0, 0, 300), 0, 72, 264, True, False)]
SIZES += [((1, 2, 0), 9, 21, 50, False, True), ((5, 64, 65, 128, 129), 0, 130, 17, True, False)]
SIZES += [((0, 0), 7, 16, 24, False, True), ((3, 4), 0, 0, 8, False, True), ((9,), 1, 1792, 8, True, False)]
SIZES += [((), 3, 8, 8, False, False), ((0,), 0, 8, 16, True, True), ((2, 3), 1, 8, 0, False, True)]
SIZES += [((1,) * 70, 3, 8, 16, True, False), ((1024, 31), 0, 8, 8, False, True), ((2, 1), 0, 1, 1, False, True)]
SIZES += [((1, 200, 1), 2, 24, 520, True, True), ((40, 90), 0, 65, 5000 // 8, False, False)]
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 64, 65, 130]), min_size=1, max_size=6)
SHAPES = st.tuples(
    LENGTHS.map(tuple),
    st.sampled_from([0, 1, 70]),
    st.sampled_from([1, 8, 17, 40, 72, 130]),
    st.sampled_from([1, 8, 24, 65, 136, 264]),
    st.booleans(),
    st.booleans(),
)
SMALL = ((2, 0, 4), 1, 8, 3, True, True)
MANY = (tuple(37 * n % 411 for n in range(70)), 1000, 65, 1031, False, True)
KINDS = "grouped_matmul takes float tensors of one dtype, not .*torch."
FORMS = r"grouped_matmul takes x \(R, K\) and weight \(E, K, N\), not"


def changed(place: int, value: Any) -> Any:
    """Return what makes arguments of which one is what a function makes of it."""

    def made(draw: Draw) -> tuple[Any, ...]:
        given = [*arguments(draw, *SMALL)]
        given[place] = value(given[place])
        return (*given,)

    return made


X, WEIGHT, OFFSETS, BIAS = range(4)
PRODUCT = Case(
    "grouped_matmul",
    arguments,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=SMALL,
    in_layouts=((70, 0, 3, 60), 5, 40, 72, False, True),
    many=MANY,
    shapes=SHAPES,
    reference=lambda *given: exact(*given)[0].value,
    special=special,
    gradients=exact_gradients,
    with_gradients=(X, WEIGHT, BIAS),
    second_gradients=True,
    refused=[
        Refused(changed(X, lambda t: t.int()), TypeError, f"{KINDS}int32"),
        Refused(changed(X, lambda t: t.half()), TypeError, f"{KINDS}float16"),
        Refused(changed(WEIGHT, lambda t: t.half()), TypeError, f"{KINDS}float16"),
        Refused(changed(BIAS, lambda t: t.half()), TypeError, f"{KINDS}float16"),
        Refused(
            changed(OFFSETS, lambda t: t.long()), TypeError, "grouped_matmul takes offsets of int32, not torch.int64"
        ),
        Refused(changed(X, lambda t: t[:, 1:]), ValueError, FORMS),
        Refused(changed(X, lambda t: t[None]), ValueError, FORMS),
        Refused(changed(WEIGHT, lambda t: t[0]), ValueError, FORMS),
        Refused(
            changed(OFFSETS, lambda t: t[1:]),
            ValueError,
            r"grouped_matmul takes offsets of shape \(3,\), one for each group, not \(2,\)",
        ),
        Refused(
            changed(BIAS, lambda t: t[1:]),
            ValueError,
            r"grouped_matmul takes a bias of shape \(3, 3\), not \(2, 3\)",
        ),
        Refused(
            changed(OFFSETS, lambda t: t.to("meta")),
            ValueError,
            "grouped_matmul takes tensors on one device, not on .*meta",
        ),
    ],
)
NAME = "grouped_matmul_weight_gradient"


def for_sums(draw: Draw, lengths: Lengths, past: int, K: int, N: int) -> tuple[Any, ...]:
    """Make two matrices of as many rows, and offsets."""
    rows = sum(lengths) + past
    return draw(rows, K), draw(rows, N), ends(lengths)


def changed_sums(place: int, value: Any) -> Any:
    """Return what makes arguments of the sums, of which one is what a function makes of it."""

    def made(draw: Draw) -> tuple[Any, ...]:
        given = [*for_sums(draw, *SMALL[:4])]
        given[place] = value(given[place])
        return (*given,)

    return made


SUMS = Case(
    NAME,
    for_sums,
    exact_sums,
    autocast="asked",
    sizes=[size[:4] for size in SIZES],
    small=SMALL[:4],
    in_layouts=((70, 0, 3, 60), 5, 40, 72),
    many=MANY[:4],
    shapes=SHAPES.map(lambda size: size[:4]),
    reference=lambda *given: exact_sums(*given)[0].value,
    special=special_sums,
    gradients=lambda grad, x, g, offsets: exact(g, grad.mT, offsets) + exact(x, grad, offsets),
    with_gradients=2,
    second_gradients=True,
    refused=[
        Refused(changed_sums(0, lambda t: t.int()), TypeError, f"{NAME} takes float tensors of one dtype, not"),
        Refused(changed_sums(1, lambda t: t.half()), TypeError, f"{NAME} takes float tensors of one dtype, not"),
        Refused(changed_sums(2, lambda t: t.long()), TypeError, f"{NAME} takes offsets of int32, not torch.int64"),
        Refused(changed_sums(0, lambda t: t[1:]), ValueError, rf"{NAME} takes x \(R, K\) and grad \(R, N\), not"),
        Refused(changed_sums(1, lambda t: t[0]), ValueError, rf"{NAME} takes x \(R, K\) and grad \(R, N\), not"),
        Refused(changed_sums(2, lambda t: t[0]), ValueError, f"{NAME} takes offsets of one dimension, not"),
        Refused(changed_sums(2, lambda t: t.to("meta")), ValueError, f"{NAME} takes tensors on one device, not .*meta"),
    ],
)
FP8 = "grouped_matmul_fp8"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SQUARE = 128


def for_fp8(
    draw: Draw,
    lengths: Lengths,
    past: int,
    K: int,
    N: int,
    scales: str = "blocks",
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
) -> tuple[Any, ...]:
    """Make float8 matrices, offsets, and scales; the result has the dtype of the case."""

    def positive(x: torch.Tensor) -> torch.Tensor:
        return x.abs() + 0.5

    R, E, squares = sum(lengths) + past, len(lengths), -(-N // SQUARE)
    x = draw(R, K, dtype=torch.float32).to(dtypes[0])
    weight = draw(E, N, K, dtype=torch.float32).to(dtypes[1])
    shapes = {
        "blocks": ((R, K // SQUARE), (E, squares, K // SQUARE)),
        "rows": ((R, 1), (E, N)),
        "tensors": ((1,), (E,)),
        "rows of x": ((R,), (E,)),
        "rows of the weight": ((1,), (E, N)),
    }
    return x, weight, ends(lengths), *(draw(*s, dtype=torch.float32, of=positive) for s in shapes[scales]), draw.dtype


def exact_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    out_dtype: torch.dtype,
) -> list[Exact]:
    """Return the products; a term of float8 sums in tensor cores loses more than float32 does."""
    if scale_weight.ndim == 3:
        scale_x = scale_x.repeat_interleave(SQUARE, 1)
        scale_weight = scale_weight.repeat_interleave(SQUARE, 1)[:, : weight.shape[1]].repeat_interleave(SQUARE, 2)
    else:
        scale_x = scale_x.reshape(-1, 1)
        scale_weight = scale_weight.reshape(*scale_weight.shape, *[1] * (3 - scale_weight.ndim))
    (right,) = exact(x * scale_x, (weight * scale_weight).mT, offsets)
    # Hopper's tensor cores keep 13 bits of what they add.
    return [right._replace(terms=right.terms * (2**11 if DEVICE.type == "cuda" else 1))]


FP8_SIZES = [((70, 0, 3, 140), 5, 384, 200), ((70, 0, 3, 140), 5, 48, 300, "rows", (E5M2, E4M3))]
FP8_SIZES += [((0, 0, 300), 0, 272, 264, "tensors", (E4M3, E5M2)), ((1, 2, 0), 9, 128, 7, "blocks", (E5M2, E5M2))]
FP8_SIZES += [((5, 64, 65, 129), 0, 144, 17, "rows of x"), ((9,), 1, 16, 1, "rows of the weight"), ((), 3, 128, 8)]
FP8_SIZES += [((2, 0), 1, 0, 8, "rows"), ((0,), 0, 128, 16), ((0, 0), 7, 128, 24), ((2, 3), 1, 256, 0)]
FP8_SIZES += [((1,) * 70, 3, 128, 16), ((1, 200, 1), 2, 1792, 129), ((1,), 0, 128, 128, "rows")]
FP8_SCALES = ["rows", "tensors", "rows of x", "rows of the weight"]
FP8_PAIRS = st.sampled_from([(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
FP8_PLACES = LENGTHS.map(tuple), st.sampled_from([0, 1, 70])
FP8_COLUMNS = st.sampled_from([1, 8, 24, 65, 136, 264])
FP8_SHAPES = st.one_of(
    st.tuples(*FP8_PLACES, st.sampled_from([128, 256, 512]), FP8_COLUMNS, st.just("blocks"), FP8_PAIRS),
    st.tuples(*FP8_PLACES, st.sampled_from([16, 48, 144]), FP8_COLUMNS, st.sampled_from(FP8_SCALES), FP8_PAIRS),
)


def changed_fp8(place: int, value: Any, K: int = 128, scales: str = "blocks") -> Any:
    """Return what makes arguments for float8, of which one is what a function makes of it."""

    def made(draw: Draw) -> tuple[Any, ...]:
        given = [*for_fp8(draw, (2, 0, 4), 1, K, 130, scales)]
        given[place] = value(given[place])
        return (*given,)

    return made


def same(value: Any) -> Any:
    """Return what is given."""
    return value


OF_BLOCKS = rf"{FP8} takes scale_x of shape \(7, 1\) with scale_weight of shape \(3, 2, 1\), not"
OF_ROWS = rf"{FP8} takes scale_x of shape \(\) or \(1,\) or \(7,\) or \(7, 1\) with scale_weight of shape"
FP8_FORMS = rf"{FP8} takes x \(R, K\) and weight \(E, N, K\), not"
FLOAT8 = Case(
    FP8,
    for_fp8,
    exact_fp8,
    sizes=FP8_SIZES,
    small=((2, 0, 4), 1, 128, 8),
    many=(*MANY[:2], 128, 1031),
    shapes=FP8_SHAPES,
    dtypes=[torch.bfloat16, torch.float16, torch.float32],
    layouts=["contiguous"],
    contiguous=False,
    refused=[
        Refused(changed_fp8(0, lambda t: t.half()), TypeError, f"{FP8} takes float8_e4m3fn and float8_e5m2, not"),
        Refused(changed_fp8(1, lambda t: t.half()), TypeError, f"{FP8} takes float8_e4m3fn and float8_e5m2, not"),
        Refused(changed_fp8(2, lambda t: t.long()), TypeError, f"{FP8} takes offsets of int32, not torch.int64"),
        Refused(changed_fp8(3, lambda t: t.half()), TypeError, f"{FP8} takes scales of float32, not torch.float16"),
        Refused(changed_fp8(4, lambda t: t.half()), TypeError, f"{FP8} takes scales of float32, not .*float16"),
        Refused(changed_fp8(5, lambda _: torch.float64), TypeError, f"{FP8} returns bfloat16, float16 or float32, not"),
        Refused(
            changed_fp8(4, lambda t: t.to("meta")), ValueError, f"{FP8} takes tensors on one device, not on .*meta"
        ),
        Refused(changed_fp8(0, lambda t: t[:, :16]), ValueError, FP8_FORMS),
        Refused(changed_fp8(0, lambda t: t[None]), ValueError, FP8_FORMS),
        Refused(changed_fp8(1, lambda t: t[0]), ValueError, FP8_FORMS),
        Refused(
            changed_fp8(2, lambda t: t[1:]), ValueError, rf"{FP8} takes offsets of shape \(3,\), one for each group"
        ),
        Refused(
            changed_fp8(3, same, 144),
            ValueError,
            f"{FP8} takes K that is a multiple of 128 with scales of blocks, not 144",
        ),
        Refused(changed_fp8(3, same, 24, "rows"), ValueError, f"{FP8} takes K that is a multiple of 16, not 24"),
        Refused(changed_fp8(3, lambda t: t[1:]), ValueError, OF_BLOCKS),
        Refused(changed_fp8(4, lambda t: t[:, 1:]), ValueError, OF_BLOCKS),
        Refused(changed_fp8(3, lambda t: t[1:], 16, "rows"), ValueError, OF_ROWS),
        Refused(changed_fp8(4, lambda t: t[:, 1:], 16, "rows"), ValueError, OF_ROWS),
    ],
)
OLDER = {"_grouped_matmul_gpu": lambda device: (3, 64 * 1024, 0)}  # a GPU without an engine
CONTRACT = [
    PRODUCT,
    SUMS,
    FLOAT8,
    replace(PRODUCT, name="grouped_matmul through pointers", settings=OLDER, dtypes=HALVES, refused=()),
    replace(SUMS, name=f"{NAME} through pointers", settings=OLDER, dtypes=HALVES, refused=()),
]


def assert_right(case: Case, out: torch.Tensor, *given: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    wide = [t.double() if t.is_floating_point() else t for t in given]
    assert_close(case, out.dtype, out, *case.exact(*wide))


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: f"{dtype}, its accumulator float32")
def test_engine_or_pointers(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The engine gets what it can address, an x of other strides by a copy; pointers get the rest."""
    if DEVICE.type == "cuda" and not taken._grouped_matmul_gpu(torch.device("cuda", 0))[2]:
        pytest.skip("no copy engine")
    asked: list[bool] = []
    plan = taken._grouped_matmul_plan

    def look(*given: Any) -> Any:
        asked.append(bool(given[-1]))
        return plan(*given)

    monkeypatch.setattr(taken, "_grouped_matmul_plan", look)
    draw, offsets = Draw(dtype), ends((3, 30))
    x, weight, grad = draw(40, 48), draw(2, 48, 64), draw(40, 64)
    shifted = draw(40 * 48 + 1)[1:].view(40, 48)
    for some in (x, draw(48, 40).T, shifted, draw(40, 56)[:, :48], draw(40, 51)[:, :48], x[:1].expand(40, 48)):
        for matrix in (weight, draw(2, 64, 48).mT, draw(3, 48, 72)[1:, :, :64]):
            out = taken.grouped_matmul(some, matrix, offsets)
            assert_right(PRODUCT, out, some, matrix, offsets)
        assert_right(SUMS, taken.grouped_matmul_weight_gradient(some, grad, offsets), some, grad, offsets)
    assert asked == [True] * 24
    asked.clear()
    for K, N in ((48, 63), (47, 64), (1, 64)):
        taken.grouped_matmul(x[:, :K], weight[:, :K, :N], offsets)
        taken.grouped_matmul_weight_gradient(x[:, :K], grad[:, :N], offsets)
    taken.grouped_matmul(x, draw(2, 48, 65)[:, :, :64], offsets)
    taken.grouped_matmul(x, weight[:1].expand(2, 48, 64), offsets)
    taken.grouped_matmul(x.float(), weight.float(), offsets)
    assert asked == [False] * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offsets_past_the_rows(taken: ModuleType, dtype: torch.dtype) -> None:
    """They count as the number of rows: nothing past the tensors is read or written; its accumulator is float32."""
    draw = Draw(dtype)
    x, weight, grad = draw(70, 40), draw(3, 40, 72), draw(70, 72)
    offsets, within = ends((5, 100, 40)), torch.tensor([5, 70, 70], dtype=torch.int32, device=DEVICE)
    out = guarded(taken.grouped_matmul, x, weight, offsets)
    assert_right(PRODUCT, out, x, weight, within)
    out = guarded(taken.grouped_matmul_weight_gradient, x, grad, offsets)
    assert_right(SUMS, out, x, grad, within)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_lie_as_the_weight(taken: ModuleType, dtype: torch.dtype) -> None:
    """So an optimizer gets that of a linear layer's weight, which is transposed, without a copy."""
    x, offsets = Draw(dtype)(30, 40), ends((2, 0, 20))
    for weight in (Draw(dtype)(3, 40, 24), Draw(dtype)(3, 24, 40).mT):
        y = taken.grouped_matmul(x, weight.requires_grad_(), offsets)
        (grad,) = torch.autograd.grad(y.sum(), weight)
        assert grad.stride() == weight.stride()
        assert not grad[1].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Sums of many ones are not the 2048 or 256 at which half precision stays, along K and along rows."""
    x, weight = (torch.ones(s, dtype=dtype, device=DEVICE) for s in ((3, 4608), (1, 4608, 8)))
    assert (taken.grouped_matmul(x, weight, ends((3,))) == 4608).all()
    x = torch.ones(4608, 8, dtype=dtype, device=DEVICE)
    assert (taken.grouped_matmul_weight_gradient(x, x, ends((4608,))) == 4608).all()


def has_float8(taken: ModuleType) -> tuple[int, int, int]:
    """Return what is known of the GPU, if it has an engine."""
    known = taken._grouped_matmul_gpu(DEVICE if DEVICE.type == "cpu" else torch.device("cuda", 0))
    if not known[2]:
        pytest.skip("no copy engine")
    return known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", ["blocks", "rows"])
def test_fp8_of_any_strides(taken: ModuleType, dtype: torch.dtype, scales: str) -> None:
    """Scales may lie anyhow, a part of the columns of a weight stays where it is, and other matrices are copied."""
    has_float8(taken)
    x, weight, offsets, scale_x, scale_weight, _ = for_fp8(Draw(dtype), (30, 0, 70), 3, 256, 200, scales)
    (right,) = exact_fp8(
        *(t.double() if t.is_floating_point() else t for t in (x, weight)),
        offsets,
        scale_x.double(),
        scale_weight.double(),
        dtype,
    )
    wider = torch.cat([x, x], 1)[:, 16:]  # rows of 496 bytes
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)
    columns = torch.cat([weight, weight.flip(1)], 1)[:, : weight.shape[1]]
    across = weight.mT.contiguous().mT
    scaled = scale_x.mT.contiguous().mT, scale_weight.mT.contiguous().mT
    for some, matrix, scale in (
        (wider[:, 240:], columns, scaled),
        (shifted, across, (scale_x, scale_weight)),
        (x.T.contiguous().T, weight, scaled),
    ):
        out = guarded(lambda *given: taken.grouped_matmul_fp8(*given, dtype), some, matrix, offsets, *scale)
        assert_close(FLOAT8, dtype, out, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", ["blocks", "rows"])
def test_fp8_keeps_groups_apart(taken: ModuleType, dtype: torch.dtype, scales: str) -> None:
    """NaN in rows, a weight or scales spoils no other rows; offsets past the rows count as their number."""
    has_float8(taken)
    x, weight, _, scale_x, scale_weight, _ = for_fp8(Draw(dtype), (30, 0, 70), 20, 128, 136, scales)
    offsets = torch.tensor([30, 30, 300], dtype=torch.int32, device=DEVICE)
    first = taken.grouped_matmul_fp8(x, weight, offsets, scale_x, scale_weight, dtype)
    # 0x7F is NaN, but in the interpreter a number
    x.view(torch.uint8)[31], weight.view(torch.uint8)[1] = 0x7F, 0x7F
    scale_x[33:], scale_weight[1] = torch.nan, torch.nan
    out = guarded(lambda *given: taken.grouped_matmul_fp8(*given, dtype), x, weight, offsets, scale_x, scale_weight)
    assert out[33:].isnan().all()
    kept = [*range(31), 32]
    assert torch.equal(out[kept], first[kept])


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon, on a Hopper GPU of two multiprocessors."""
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled_grouped_matmul.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_grouped_matmul_gpu", lambda _: (2, gluon_model.ROOM, 90))
        patch.setattr(recipe, "_grouped_matmul_fp8_is_hopper", lambda *_: True)
        patch.setattr(recipe, "GROUPED_MATMUL_FP8_BLOCKS", [])  # else few rows would not go to Gluon
        yield recipe
    end_ops(recipe)  # PyTorch 2.11 refuses a second one


MODELLED = st.tuples(*FP8_PLACES, st.sampled_from([128, 256, 512]), FP8_COLUMNS, st.just("blocks"), FP8_PAIRS)


@hypothesis.settings(max_examples=20)
@hypothesis.given(size=MODELLED, dtype=st.sampled_from(FLOAT8.dtypes), seed=st.integers(0, 2**31))
def test_fp8_accumulator_by_a_model(modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, seed: int) -> None:
    """Whatever happens first, the kernel for Hopper is right: no wait is for ever, and no buffer changes too soon."""
    assert_modelled(modelled, size, dtype, seed)


@pytest.mark.parametrize("size", [((130, 0, 300, 1), 9, 1024, 400), ((700, 70), 0, 256, 130), ((1,) * 40, 3, 1920, 30)])
@pytest.mark.parametrize("seed", range(3))
def test_fp8_accumulator_of_many_tiles_by_a_model(modelled: ModuleType, size: tuple[Any, ...], seed: int) -> None:
    """Two programs have several tiles each, of more and of fewer steps than buffers."""
    assert_modelled(modelled, size, torch.bfloat16, seed)


def assert_modelled(modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, seed: int) -> None:
    """Assert that the kernel for Hopper gives the products."""
    gluon_model.SEEDS[0] = seed
    x, weight, offsets, *scales, _ = for_fp8(Draw(dtype, device=torch.device("cpu"), seed=seed), *size)
    offsets = offsets.cpu()
    (right,) = exact_fp8(x.double(), weight.double(), offsets, *(t.double() for t in scales), dtype)
    for tile in modelled.GROUPED_MATMUL_FP8_HOPPER:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modelled, "GROUPED_MATMUL_FP8_HOPPER", [tile])
            modelled._grouped_matmul_fp8_plan.cache_clear()
            out = guarded(
                lambda *inputs: modelled._grouped_matmul_fp8_launch(*inputs, dtype), x, weight, offsets, *scales
            )
        modelled._grouped_matmul_fp8_plan.cache_clear()
        assert_close(FLOAT8, dtype, out, right)


def test_fp8_without_an_engine(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other way to multiply float8."""
    monkeypatch.setattr(taken, "_grouped_matmul_gpu", OLDER["_grouped_matmul_gpu"])
    with pytest.raises(RuntimeError, match="grouped_matmul_fp8 takes tensors on NVIDIA GPUs"):
        taken.grouped_matmul_fp8(*for_fp8(Draw(torch.bfloat16), (2, 3), 0, 128, 8)[:5])


def test_fp8_plan(taken: ModuleType) -> None:
    """The tile grows with the rows of a group and fits; there are never more programs than tiles may be."""
    plan = taken._grouped_matmul_fp8_plan.__wrapped__
    for blocks, hopper in ((False, True), (True, False), (True, True)):
        many = (1, 16, 64, 256, 1024, 4096)
        plans = [plan(64, 64 * n, 4096, 2, (132, ROOM, 90), blocks, hopper) for n in many]
        rows = [tile[0] for _, tile, *_ in plans]
        assert rows == sorted(rows)
        assert rows[0] == (128 if blocks and hopper else 64)
        assert rows[-1] >= 128
        assert {specialized for *_, specialized in plans} == {blocks and hopper}
        assert plan(2, 5, 64, 2, (132, ROOM, 90), blocks, hopper)[0] == 2
        for (room, engine), R, N in itertools.product(
            ((ROOM, 90), (ROOM, 100), (99 * 1024, 120)), (1, 70, 5000, 200_000), (1, 128, 5000)
        ):
            for size in (2, 4):
                gpu = 132, room, engine
                programs, tile, stages, _ = plan(40, R, N, size, gpu, blocks, hopper and engine == 90)
                held = (tile[0] + tile[1]) * tile[2] * stages
                held += tile[0] * tile[1] * size // (1 if blocks or engine >= 100 else 2)
                assert held + 1024 <= room
                assert stages >= 3
                assert 1 <= programs <= 132


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["BLOCKS", "ENGINE"])
def test_every_fp8_tile(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each is right, with one program for all tiles and with many; accumulators are float32."""
    _, *known = has_float8(taken)
    for tile, programs in itertools.product(getattr(taken, f"GROUPED_MATMUL_FP8_{kind}"), (1, 5)):
        monkeypatch.setattr(taken, f"GROUPED_MATMUL_FP8_{kind}", [tile])
        monkeypatch.setattr(taken, "_grouped_matmul_gpu", lambda _, programs=programs: (programs, *known))
        taken._grouped_matmul_fp8_plan.cache_clear()
        lengths = (tile[0] + 3, 0, 2, 2 * tile[0])
        scales = "blocks" if kind == "BLOCKS" else "rows"
        *given, _ = for_fp8(Draw(torch.bfloat16), lengths, 4, 384, tile[1] + 72, scales)
        (right,) = exact_fp8(*(t.double() if t.is_floating_point() else t for t in given), torch.bfloat16)
        assert_close(FLOAT8, torch.bfloat16, guarded(taken.grouped_matmul_fp8, *given), right)
    taken._grouped_matmul_fp8_plan.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_plan(taken: ModuleType, dtype: torch.dtype) -> None:
    """The tile grows with the rows of a group and fits; there are never more programs than tiles may be."""
    plan = taken._grouped_matmul_plan.__wrapped__
    h100, a100 = (132, ROOM, 90), (108, 163 * 1024, 0)
    rows = [plan(64, 64 * n, 4096, False, 2, h100, True, 90)[1][0] for n in (1, 16, 64, 256, 1024, 4096)]
    assert rows == sorted(rows)
    assert (rows[0], rows[-1]) == (64, 128)
    assert plan(8, 32768, 2048, False, 2, h100, True, 90)[1:] == ((128, 256, 64, 8, 4), 4)
    assert plan(256, 7168, 2048, True, 2, h100, True, 90)[1:] == ((128, 256, 64, 8, 4), 4)
    assert plan(2, 5, 64, False, 2, h100, True, 90)[0] == 2
    few = [plan(64, 64 * n, 4096, False, 2, a100, True, 0)[1][0] for n in (1, 32, 512)]
    assert few == sorted(few)
    assert (few[0], few[-1]) == (16, 128)
    rooms = (ROOM, 90), (ROOM, 100), (99 * 1024, 120), (163 * 1024, 0), (99 * 1024, 0), (64 * 1024, 0)
    for (room, engine), M, N in itertools.product(rooms, (1, 70, 5000, 200_000), (1, 128, 5000)):
        for sums, vector, size in itertools.product((False, True), (False, True), (2, dtype.itemsize, 8)):
            has = engine if size == 2 and vector else 0
            programs, tile, stages = plan(40, M, N, sums, size, (132, room, engine), vector, has)
            held = (tile[0] + tile[1]) * tile[2] * size * stages
            held += tile[0] * tile[1] * size // (1 if sums and has >= 100 else 2) if has else 0
            assert held + 1024 <= room
            assert stages >= (3 if has else 2)
            assert 1 <= programs <= 264


@pytest.mark.parametrize(("backend", "arch", "engine"), [("cuda", 80, 0), ("cuda", 90, 90), ("hip", "x", 0)])
def test_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, backend: str, arch: int | str, engine: int) -> None:
    """NVIDIA's GPUs have an engine from compute capability 9.0 on."""
    target = SimpleNamespace(backend=backend, arch=arch)
    known = {"multiprocessor_count": 9, "max_shared_mem": 7}
    utils = SimpleNamespace(get_device_properties=lambda _: known)
    active = SimpleNamespace(get_current_target=lambda: target, utils=utils)
    monkeypatch.setattr(taken.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: pytest.MonkeyPatch.context())
    assert taken._grouped_matmul_gpu.__wrapped__(torch.device("cuda", 0)) == (9, 7, engine)


def every_tile(taken: ModuleType) -> list[tuple[torch.dtype, bool, tuple[int, ...]]]:
    """Return all tiles, with a dtype that has them and whether they are for the engine."""
    halves = [(dtype, True, tile) for dtype in HALVES for tile in taken.GROUPED_MATMUL_ENGINE]
    through_pointers = *taken.GROUPED_MATMUL_POINTERS, *taken.GROUPED_MATMUL_ODD
    halves += [(dtype, False, tile) for dtype in HALVES for tile in through_pointers]
    return halves + [(dtype, False, tile) for dtype in FLOATS[2:] for tile in taken.GROUPED_MATMUL_WIDE]


@pytest.mark.thorough
@pytest.mark.parametrize("transposed", [False, True])
def test_every_tile(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    """Each is right, with one program for all tiles and with many; accumulators are float32."""
    _, shared, has = taken._grouped_matmul_gpu(DEVICE if DEVICE.type == "cpu" else torch.device("cuda", 0))
    for (dtype, engine, tile), programs in itertools.product(every_tile(taken), (1, 5)):
        if engine and not has:
            continue
        for kind in ("ENGINE", "POINTERS", "ODD", "WIDE"):
            monkeypatch.setattr(taken, f"GROUPED_MATMUL_{kind}", [tile])
        monkeypatch.setattr(
            taken, "_grouped_matmul_gpu", lambda _, known=(programs, shared, has if engine else 0): known
        )
        taken._grouped_matmul_plan.cache_clear()
        lengths = (tile[0] + 3, 0, 2, 2 * tile[0])
        K, N = 2 * tile[2] + 24, tile[1] + 72
        x, weight, offsets, bias = arguments(Draw(dtype), lengths, 4, K, N, transposed, True)
        assert_right(PRODUCT, guarded(taken.grouped_matmul, x, weight, offsets, bias), x, weight, offsets, bias)
        x, grad = Draw(dtype)(len(x), tile[0] + 8), Draw(dtype)(len(x), N)
        assert_right(SUMS, guarded(taken.grouped_matmul_weight_gradient, x, grad, offsets), x, grad, offsets)
    taken._grouped_matmul_plan.cache_clear()


@needs_a_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [64, 5000, 40_000])
def test_large(taken: ModuleType, dtype: torch.dtype, rows: int) -> None:
    """Programs of many tiles each give the same again and again, at odd sizes too."""
    chosen = torch.randint(0, 100, (rows,)).square() // 100  # a third of the groups is empty
    offsets = chosen.bincount(minlength=100).cumsum(0).int().to(DEVICE)
    for K, N in ((1792, 5000), (768, 2880), (130, 1001)):
        x, weight, grad = Draw(dtype)(rows, K), Draw(dtype)(100, N, K).mT, Draw(dtype)(rows, N)
        for call, given in (("grouped_matmul", (x, weight)), (NAME, (x, grad))):
            op, case = getattr(taken, call), PRODUCT if call == "grouped_matmul" else SUMS
            out = op(*given, offsets)
            assert_right(case, out, *given, offsets)
            for _ in range(3):
                assert torch.equal(op(*given, offsets), out)


@pytest.mark.needs_gpu_memory(14)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements, of the result, x and the weight: the last rows and groups are right."""
    rows, N = 2**16 + 8, 2**15 + 8
    lengths = (rows - 300, 0, 290)
    x, weight, offsets = Draw(torch.bfloat16)(rows, 64), Draw(torch.bfloat16)(3, 64, N), ends(lengths)
    out = taken.grouped_matmul(x, weight, offsets)
    assert out.numel() > 2**31
    last = torch.tensor([0, 0, 290], dtype=torch.int32, device=DEVICE)
    assert_right(PRODUCT, out[-300:], x[-300:], weight, last)
    back = taken.grouped_matmul(out, weight.mT, offsets)
    assert_right(PRODUCT, back[-300:], out[-300:], weight.mT, last)
    sums = taken.grouped_matmul_weight_gradient(x, out, offsets)
    assert_right(SUMS, sums[1:], x[-300:], out[-300:], last[1:])


@pytest.mark.needs_gpu_memory(12)
def test_weight_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements of the weight, and of its gradient."""
    E, K, N = 66, 4096, 8192
    weight = torch.ones(E, K, N, dtype=torch.bfloat16, device=DEVICE)
    weight[-1] = 2
    x = torch.ones(2 * E, K, dtype=torch.bfloat16, device=DEVICE)
    offsets = ends((2,) * E)
    out = taken.grouped_matmul(x, weight, offsets)
    assert (out[:-2] == K).all()
    assert (out[-2:] == 2 * K).all()
    del weight
    assert (taken.grouped_matmul_weight_gradient(x, out, offsets)[-1] == 4 * K).all()


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    from triton_gallery_ops.grouped_matmul import grouped_matmul

    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((16, 24), (3, 24, 16), (3, 16)))
    return graphs(grouped_matmul, x, weight, torch.tensor([2, 5, 16], dtype=torch.int32), bias)


def test_graphs(gallery: Path, on_h100: Ask) -> None:
    """The op is one call, and each gradient is another."""
    ((forward, backward),) = on_h100(gallery / RECIPE, traced)
    assert forward == ["triton_gallery.grouped_matmul.default"]
    assert backward.count("triton_gallery.grouped_matmul.default") == 1
    assert backward.count(f"triton_gallery.{NAME}.default") == 2


def code(op: ModuleType, kernel: str, tile: tuple[int, ...], stages: int, **constants: Any) -> dict[str, Any]:
    """Return what the compiler says of a kernel of the copy engine."""
    import triton
    from compiled import _said
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    m, n, k, num_warps, _ = tile
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": stages}
    if "GROUPS" in constants:
        options = {"num_warps": 4, "maxnreg": op.GROUPED_MATMUL_FP8_REGISTERS[num_warps][0]}
    if kernel == "_grouped_matmul_engine_kernel":
        weight = [1, n, k] if constants["W_T"] else [1, k, n]
        blocks = {"x_desc": [m, k], "weight_desc": weight, "y_desc": [1, 1, m, n // 2]}
        types = {"y_ptr": "*bf16", "bias_ptr": "*bf16"}
    elif "fp8" in kernel:
        m //= constants.get("GROUPS", 1)
        columns = n // 2 if "PER_ROW" in constants else n
        blocks = {"x_desc": [m, k], "weight_desc": [1, n, k], "y_desc": [1, 1, m, columns]}
        types = {"y_ptr": "*bf16", "scale_x_ptr": "*fp32", "scale_weight_ptr": "*fp32"}
    else:
        blocks = {"x_desc": [1, 1, k, m], "y_desc": [1, 1, k, n], "out_desc": [1, m, n // 2]}
        types = {"R": "i32"}
    for name, block in blocks.items():
        is_float8 = "fp8" in kernel and name != "y_desc"
        kind, layout = ("fp8e4nv" if is_float8 else "bf16"), ""
        if "GROUPS" in constants:
            layout = f",{gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv if is_float8 else gl.bfloat16)!r}"
        types[name] = f"tensordesc<{kind}{block}{layout}>"
    types |= {"offsets_ptr": "*i32", "E": "i32"}
    constants = {"BLOCK_E": 512} | constants
    types |= dict.fromkeys(constants, "constexpr")
    function = getattr(op, kernel)
    types = {name: types.get(name, "i32") for name in function.arg_names}
    by_16 = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name.endswith("_ptr")}
    source = (GluonASTSource if "GROUPS" in constants else triton.compiler.ASTSource)(function, types, constants, by_16)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options=options)
    usage = _said(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin=made.asm["cubin"])
    return {
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": made.metadata.shared,
        "wgmma": re.findall(r"wgmma\.mma_async\S*?(m64n\d+k\d+)", made.asm["ptx"]),
        "loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*global\.mbarrier", made.asm["ptx"])),
    }


def codes(taken: ModuleType) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that for all tiles, of both kernels."""
    from triton_gallery_ops import grouped_matmul as op

    found = {}
    for tile in op.GROUPED_MATMUL_ENGINE:
        stages = op._grouped_matmul_stages(tile, 2, ROOM, False, 90)
        assert stages == op._grouped_matmul_stages(tile, 2, ROOM, True, 90)
        for transposed in (False, True):
            given = "_grouped_matmul_engine_kernel", tile, stages
            found[*given, transposed] = code(op, *given, W_T=transposed, ZEROS=op.GROUPED_MATMUL_ZEROS)
        given = "_grouped_matmul_engine_sums_kernel", tile, stages
        found[given] = code(op, *given)
    return found


def fp8_codes(taken: ModuleType) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that for all tiles of float8."""
    from triton_gallery_ops import grouped_matmul as op

    found = {}
    every = {True: op.GROUPED_MATMUL_FP8_BLOCKS, False: op.GROUPED_MATMUL_FP8_ENGINE}
    for blocks, tiles in every.items():
        for tile in tiles:
            op.GROUPED_MATMUL_FP8_BLOCKS = op.GROUPED_MATMUL_FP8_ENGINE = [tile]
            plan = op._grouped_matmul_fp8_plan.__wrapped__
            _, _, stages, _ = plan(8, 8192, 4096, 2, (132, ROOM, 90), blocks, False)
            name = "_grouped_matmul_fp8_blocks_kernel" if blocks else "_grouped_matmul_fp8_kernel"
            scales = {} if blocks else {"PER_ROW": True, "PER_COLUMN": True}
            found[name, tile, stages] = code(op, name, tile, stages, ZEROS=op.GROUPED_MATMUL_ZEROS, **scales)
    op.GROUPED_MATMUL_FP8_BLOCKS, op.GROUPED_MATMUL_FP8_ENGINE = [], every[False]
    hopper = op.GROUPED_MATMUL_FP8_HOPPER
    for tile in hopper:
        op.GROUPED_MATMUL_FP8_HOPPER = [tile]
        _, _, stages, _ = plan(128, 8192, 4096, 2, (132, ROOM, 90), True, True)
        known = {"GROUPS": tile[3], "STAGES": stages, "REGISTERS": op.GROUPED_MATMUL_FP8_REGISTERS[tile[3]][1]}
        name = "_grouped_matmul_fp8_hopper_kernel"
        known |= {"BLOCK_E": 128, "ZEROS": op.GROUPED_MATMUL_ZEROS}
        found[name, tile, stages] = code(op, name, tile, stages, **known)
    op.GROUPED_MATMUL_FP8_BLOCKS, op.GROUPED_MATMUL_FP8_HOPPER = every[True], hopper
    return found


def test_fp8_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """As for the other kernels: nothing spills, all fits, and loads are as many steps ahead as there are stages."""
    (found,) = on_h100(gallery / RECIPE, fp8_codes)
    assert len(found) == 10
    for (kernel, tile, stages), known in found.items():
        assert known["spilled"] == 0, (kernel, tile)
        assert known["shared"] <= ROOM, (kernel, tile)
        count = tile[0] // 64 * tile[2] // 32
        if "hopper" in kernel:
            assert known["loads"] == tile[3] + 1, (kernel, tile)
        else:
            count //= tile[3] // 4
            assert known["loads"] == 2 * stages, (kernel, tile)
        assert known["wgmma"] == [f"m64n{tile[1]}k32"] * count, (kernel, tile)


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Nothing spills, all fits, and loads are as many steps ahead as there are stages, in tiles of any length."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert len(found) == 18
    for (kernel, tile, stages, *_), known in found.items():
        assert known["spilled"] == 0, (kernel, tile)
        assert known["shared"] <= ROOM, (kernel, tile)
        count = tile[0] // 64 * tile[2] // 16 // (tile[3] // 4)
        assert known["wgmma"] == [f"m64n{tile[1]}k16"] * count, (kernel, tile)
        assert known["loads"] == 2 * stages, (kernel, tile)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("rows past x", "end = tl.minimum(tl.load(offsets_ptr + group), R)", "end = tl.load(offsets_ptr + group)"),
    (
        "every second tile",
        "is stored.\n    for tile in tl.range(first, tiles, programs, flatten=True):",
        "is stored.\n    for tile in tl.range(first, tiles, 2 * programs, flatten=True):",
    ),
    ("the next group", "    begun = before <= tile  #", "    begun = before < tile + 2  #"),
    ("tiles of the groups before", "tile -= tl.max(tl.where(begun, before, 0), axis=0)", "tile -= before.shape[0] * 0"),
    (
        "rows of tiles that overlap",
        "first = tile // (8 * tiles_n) * 8\n    height = tl.",
        "first = tile // (8 * tiles_n) * 7\n    height = tl.",
    ),
    ("no sum over K", "return tl.dot(a, b, acc, input_precision", "return tl.dot(a, b, input_precision"),
    ("the interpreter's bfloat16", "        a, b = a.to(ACC), b.to(ACC)\n", "        pass\n"),
    (
        "both halves are the left one",
        "y = left if side == 0 else right\n            off = off_n + side * HALF\n            if bias_ptr",
        "y = left\n            off = off_n + side * HALF\n            if bias_ptr",
    ),
    ("both halves of sums are the left one", "off_n + HALF], right)", "off_n + HALF], left)"),
    (
        "a row of the next group",
        "return MOST, start + rows, row - rows + MOST",
        "return MOST, start + rows + 1, row - rows - 1 + MOST",
    ),
    (
        "nothing past the last group",
        "    _grouped_matmul_zeros(y_ptr, offsets_ptr, E, R, N, ZEROS)\n\n\n@triton.jit\ndef _grouped_matmul_steps",
        "\n\n@triton.jit\ndef _grouped_matmul_steps",
    ),
    (
        "zeros in half of the rows",
        "    size = (R - last) * N\n    first = tl.",
        "    size = (R - last) * N // 2\n    first = tl.",
    ),
    ("no step for an empty group", "- starts, BLOCK_K), 1)", "- starts, BLOCK_K), 0)"),
    ("steps of another program", "end = ((groups + 1) * tiles - first", "end = ((groups + 1) * tiles - 1 - first"),
    (
        "one bias for all",
        "bias_ptr + group.to(tl.int64) * N + offs_n\n                bias =",
        "bias_ptr + offs_n\n                bias =",
    ),
    ("one weight for all", "= weight_ptr + group.to(tl.int64) * stride_we", "= weight_ptr + 0 * stride_we"),
    ("pointers to the next group's rows", "mask_m = offs_m < rows\n", "mask_m = offs_m < rows + 1\n"),
    ("pointers to columns past N", "mask_n = offs_n < N_Y\n", "mask_n = offs_n < N_Y + 1\n"),
    ("sums of the next group's row", "some = offs_k < rows - row\n", "some = offs_k <= rows - row\n"),
    (
        "sums past K",
        "mask = (offs_m < K)[:, None] & (offs_n < N_OUT)",
        "mask = (offs_m <= K)[:, None] & (offs_n < N_OUT)",
    ),
    ("rows of any length", "even = all(n % unit == 0 for n in (length, *x.stride()[:-1]))", "even = True"),
    ("rows that overlap", "apart = all(stride >= length > 0", "apart = all(length > 0 <= stride"),
    ("any address", "x.stride(-1) == 1 and x.data_ptr() % 16 == 0", "x.stride(-1) == 1"),
    ("gradients by rows", "if by_weight and weight.stride(1) == 1 and weight.stride(2) != 1:", "if False:"),
    ("no gradient of the bias", "ones = grad.new_ones(1, 1)", "ones = grad.new_zeros(1, 1)"),
    ("a second gradient of zero", "d_grad = grouped_matmul(x, grad_out, offsets)", "d_grad = 0 * grad"),
    ("one stage too many", "(shared - stored - 2048) // stage)", "shared // stage)"),
    ("a tile for long groups", "        return rounds * (tile[0] * tile[1] + edges)\n", "        return rounds\n"),
    (
        "float8, both halves are the left one",
        "y = left if side == 0 else right\n            off = off_n + side * HALF\n            if PER_COLUMN",
        "y = left\n            off = off_n + side * HALF\n            if PER_COLUMN",
    ),
    ("float8, scales of rows of the first group", "scale_x_ptr + start + offs_m", "scale_x_ptr + offs_m"),
    (
        "float8, scales of columns of the first group",
        "scale_weight_ptr + group.to(tl.int64) * N",
        "scale_weight_ptr + 0 * N",
    ),
    ("float8, one scale for all groups", "y *= tl.load(scale_weight_ptr + group)", "y *= tl.load(scale_weight_ptr)"),
    ("float8, rows not scaled", "            acc *= scale[:, None]\n", ""),
    ("float8, the tensor not scaled", "            acc *= tl.load(scale_x_ptr)\n", "            pass\n"),
    (
        "float8, blocks of x of other rows",
        "scale_x_ptr + (start + offs_m).to(tl.int64)",
        "scale_x_ptr + offs_m.to(tl.int64)",
    ),
    ("float8, one block of x for all of K", "of_rows + k // SQUARE * stride_xk", "of_rows"),
    ("float8, one square for all of K", "of_square + k // SQUARE * stride_wk", "of_square"),
    (
        "float8, squares of the first group",
        "of_group = scale_weight_ptr + group.to(tl.int64) * stride_we",
        "of_group = scale_weight_ptr",
    ),
    ("float8, squares of other columns", "of_group + (off_n // SQUARE).to(tl.int64)", "of_group + pid_n.to(tl.int64)"),
    (
        "float8, the accumulator is scaled again",
        "            acc += part * scale[:, None]\n        y =",
        "            acc = (acc + part) * scale[:, None]\n        y =",
    ),
    (
        "float8, zeros past the last group, in rows without padding",
        "E, R, stride_yr, ZEROS)\n\n\n@triton.jit\ndef _grouped_matmul_fp8_blocks",
        "E, R, N, ZEROS)\n\n\n@triton.jit\ndef _grouped_matmul_fp8_blocks",
    ),
    (
        "float8, rows without padding",
        "    columns = -(-N // unit) * unit\n",
        "    columns = N\n",
    ),
    ("float8, matrices as they lie", "    if _grouped_matmul_vec(x) == 1:\n", "    if False:\n"),
    (
        "float8 on Hopper, tiles of the groups before",
        "    tile -= gl.max(gl.where(begun, before, 0), axis=0)\n",
        "",
    ),
    (
        "float8 on Hopper, scales of rows of the first group of warps",
        "        off_m += NUMBER * ROWS\n",
        "        off_m += 0\n",
    ),
    ("float8 on Hopper, scales of rows of the first group", "(start + offs_m).to(gl.int64)", "offs_m.to(gl.int64)"),
    ("float8 on Hopper, squares of the first group", "group.to(gl.int64) * stride_we", "0 * stride_we"),
    ("float8 on Hopper, the accumulator has the scale of the first step", "            scale = later\n", ""),
    ("float8 on Hopper, one weight for all", "place = [group, pid_n * BLOCK_N, k]", "place = [0, pid_n * BLOCK_N, k]"),
    (
        "float8 on Hopper, the accumulator reads a buffer that is given back",
        "            part = warpgroup_mma_wait(0, deps=(part,))\n            mbarrier.arrive(empty.index(stage))\n",
        "            mbarrier.arrive(empty.index(stage))\n            part = warpgroup_mma_wait(0, deps=(part,))\n",
    ),
    (
        "float8 on Hopper, the accumulator is stored over a store",
        "        tma.store_wait(0)  # the store of the last tile has read the buffer\n",
        "",
    ),
    (
        "float8 on Hopper, the accumulator of rows of the next group",
        "place = [MOST, start + rows, off_m - rows + MOST, pid_n * BLOCK_N]",
        "place = [MOST, start + rows + 1, off_m - rows - 1 + MOST, pid_n * BLOCK_N]",
    ),
    (
        "float8 on Hopper, nothing past the last group",
        "    _grouped_matmul_fp8_zeros(y_ptr, offsets_ptr, E, R, stride_yr, ZEROS)\n",
        "",
    ),
    (
        "no launcher for GPUs",
        'impl("grouped_matmul", _grouped_matmul_launch, "CUDA")',
        'impl("grouped_matmul", _grouped_matmul_launch, "XPU")',
    ),
]
