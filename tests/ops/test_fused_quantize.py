"""The ops of the recipe Fused RMSNorm and SwiGLU with FP8 quantization."""

# ruff: noqa: N806 - dimensions have the names of the recipe

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused
from hypothesis import given
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
HALF_AND_SINGLE = [torch.float16, torch.bfloat16, torch.float32]
EPS = 1e-5
ROW, GROUPS, TENSOR = (1, -1), (1, 128), (-1, -1)


def equal(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two tensors are equal, in a dtype that PyTorch compares."""
    assert out.dtype == expected.dtype
    if out.is_floating_point():
        out, expected = out.float(), expected.float()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


# What tests/contract asks for. The exact values are those before they are rounded to the narrow dtype.


def quantized(
    y: torch.Tensor,
    block_size: Sequence[int],
    dtype: torch.dtype,
    power_of_two: bool,
    scale: torch.Tensor | None,
    terms: torch.Tensor,
) -> list[Exact]:
    """Return values and scales of rows, which were rounded to the dtype of the case; a scale was given or not."""
    assert not power_of_two
    if scale is not None:
        most = LARGEST[dtype]
        return [
            Exact((y / scale).clamp(-most, most), terms / scale, dtype, 2 * y.abs() / scale),
            Exact(scale.reshape(()), dtype=torch.float32),
        ]
    N = y.shape[-1]
    group = max(1, N) if block_size[1] == -1 else block_size[1]
    count = 1 if block_size[1] == -1 else -(-N // group)
    blocks = torch.nn.functional.pad(y, (0, count * group - N)).reshape(*y.shape[:-1], count, group)
    largest = blocks.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / LARGEST[dtype])
    if y.numel() == 0:
        scales = torch.ones_like(scales)
    every = scales.repeat_interleave(group, -1)[..., :N]
    values = y / every
    # A scale is off by a rounding, so values are by another.
    return [
        Exact(values, terms / every, dtype, 4 * values.abs()),
        Exact(scales, dtype=torch.float32, narrow=2 * scales),
    ]


def exact_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    block_size: Sequence[int],
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> list[Exact]:
    """Return values and scales of the norm of rows."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    factor = torch.ones_like(y) if weight is None else offset + weight
    terms = y.abs() * (1 if weight is None else abs(offset) + weight.abs())
    return quantized(y * factor, block_size, dtype, power_of_two, scale, terms)


def exact_residual(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> list[Exact]:
    """Return values and scales of the norm of a sum, and the sum."""
    h = x + residual
    return [*exact_norm(h, *rest), Exact(h, x.abs() + residual.abs(), roundings=2)]


def exact_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    block_size: Sequence[int],
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    *activation: Any,
) -> list[Exact]:
    """Return values and scales of SwiGLU."""
    assert not activation
    gate, up = (gate.chunk(2, -1)) if up is None else (gate, up)
    y = torch.nn.functional.silu(gate) * up
    return quantized(y, block_size, dtype, power_of_two, scale, y.abs())


def norm_of(count: int, *options: Any, weight: bool = True, scale: bool = False) -> Callable[..., tuple[Any, ...]]:
    """Return what makes arguments: so many tensors of rows, a weight or none, EPS and options."""

    def make(draw: Draw, *shape: int) -> tuple[Any, ...]:
        rows = [draw(*shape) for _ in range(count)]
        known = (False, torch.tensor([0.0078125], device=DEVICE)) if scale else ()
        return (*rows, draw(shape[-1]) if weight else None, EPS, *options, *known)

    return make


def gated(*options: Any, packed: bool = False, scale: bool = False) -> Callable[..., tuple[Any, ...]]:
    """Return what makes a gate and an up, or both as one tensor, and options."""

    def make(draw: Draw, *shape: int) -> tuple[Any, ...]:
        known = (False, torch.tensor(0.015625, device=DEVICE)) if scale else ()
        if packed:
            return (draw(*shape[:-1], 2 * shape[-1]), None, *options, *known)
        return (draw(*shape), draw(*shape), *options, *known)

    return make


SIZES = [(5, 300), (1, 4096), (3, 1), (2, 3, 130), (17,), (2, 5000), (9, 20), (0, 128), (3, 0), (2, 8200)]
SIZES += [(71, 300)]  # more rows than the programs that load ahead
KNOWN = (TENSOR, E4M3)
OF_NORM = [
    Refused(norm, error, f"fused_quantize_rms_norm takes {text}")
    for norm, error, text in [
        (lambda draw: (draw(3, 32).double(), draw(32), EPS, ROW), TypeError, "float16, bfloat16 or float32"),
        (lambda draw: (draw(3, 32), draw(32), EPS, ROW, torch.float16), TypeError, r"torch\.float8_e4m3fn, .* not"),
        (lambda draw: (draw(3, 32), draw(31), EPS, ROW), ValueError, "shapes"),
        (lambda draw: (draw(3, 32), draw(32).long(), EPS, ROW), TypeError, "one float dtype"),
        (lambda draw: (draw(1).expand(16385), None, EPS, ROW), ValueError, "rows of up to 16384"),
        (
            lambda draw: (draw(3, 32), None, EPS, ROW, E4M3, False, None, 0.0, "none"),
            ValueError,
            "casting_mode='gemma' or 'llama', not 'none'",
        ),
        *(
            (lambda draw, size=size: (draw(3, 96), draw(96), EPS, size), ValueError, "a block_size of")
            for size in [(1, 48), (1, 8), (2, 128), (1, 2048), (-1, -1), (1,), (1, 0), (1, -2), ()]
        ),
        *(
            (
                lambda draw, scale=scale, size=size, power=power: (
                    draw(3, 32),
                    draw(32),
                    EPS,
                    size,
                    E4M3,
                    power,
                    scale,
                ),
                ValueError,
                "a scale",
            )
            for scale, size, power in [
                (torch.ones(2, device=DEVICE), TENSOR, False),
                (torch.ones((), device=DEVICE).double(), TENSOR, False),
                (torch.ones((), device=DEVICE), ROW, False),
                (torch.ones((), device=DEVICE), TENSOR, True),
            ]
        ),
    ]
]
OF_SWIGLU = [
    Refused(make, error, f"fused_quantize_swiglu takes {text}")
    for make, error, text in [
        (lambda draw: (draw(3, 33), None, ROW), ValueError, "an even last dimension"),
        (lambda draw: (draw(3, 32), draw(3, 31), ROW), ValueError, "tensors of one shape"),
        (lambda draw: (draw(3, 32), draw(3, 32).half(), ROW), TypeError, "one float dtype"),
        (lambda draw: (draw(3, 32).double(), draw(3, 32).double(), ROW), TypeError, "float16, bfloat16 or float32"),
        (lambda draw: (draw(3, 32), draw(3, 32), (1, 24)), ValueError, "a block_size of"),
        (lambda draw: (draw(3, 32), None, ROW, E4M3, False, None, "relu"), ValueError, "activation='silu'"),
    ]
]
Make = Callable[..., tuple[Any, ...]]


def case(name: str, call: str, arguments: Make, exact: Callable[..., list[Exact]], **more: Any) -> Case:
    """Return the case of some options of a function."""
    options: dict[str, Any] = {"sizes": SIZES, "small": (2, 32), "dtypes": HALF_AND_SINGLE, "roundings": 64} | more
    return Case(f"fused_quantize_{call}", arguments, exact, name=f"fused_quantize_{name}", **options)


CONTRACT = [
    case("rms_norm rows", "rms_norm", norm_of(1, ROW), exact_norm, refused=OF_NORM),
    case("rms_norm groups", "rms_norm", norm_of(1, GROUPS, E5M2, weight=False), exact_norm),
    case("rms_norm with a scale", "rms_norm", norm_of(1, *KNOWN, scale=True), exact_norm),
    case(
        "rms_norm many rows",
        "rms_norm",
        norm_of(1, ROW),
        exact_norm,
        sizes=[(5, 768), (2, 1700), (71, 20), (3, 1025), (0, 700)],
        settings={"FUSED_QUANTIZE_FEW": 0},
    ),
    case("rms_norm_residual rows", "rms_norm_residual", norm_of(2, ROW, E5M2), exact_residual),
    case("rms_norm_residual groups", "rms_norm_residual", norm_of(2, GROUPS), exact_residual),
    case("swiglu rows", "swiglu", gated(ROW), exact_swiglu, refused=OF_SWIGLU),
    case("swiglu groups", "swiglu", gated(GROUPS, E5M2, packed=True), exact_swiglu),
    case("swiglu with a scale", "swiglu", gated(*KNOWN, scale=True), exact_swiglu),
    case(
        "swiglu long rows",
        "swiglu",
        gated(ROW, packed=True),
        exact_swiglu,
        sizes=[(3, 100), (2, 3, 70), (1, 65), (5, 128), (2, 300)],
        settings={"FUSED_QUANTIZE_ROW": 64, "FUSED_QUANTIZE_TILE": 64},
    ),
]


def problem(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> torch.Tensor:
    """Return rows of which some are zeros."""
    x = layout.make(shape, dtype, DEVICE)
    if layout.name == "contiguous":
        x[len(x) // 2] = 0
    return x


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
@given(
    M=st.integers(1, 20),
    N=st.integers(1, 400) | st.sampled_from([1024, 1792, 4097, 5000]),
    block_size=st.sampled_from([ROW, GROUPS, (1, 16), (1, 512), TENSOR]),
    power=st.booleans(),
    layout=layouts(),
    kind=st.sampled_from(HALF_AND_SINGLE),
    seed=st.integers(0, 100),
)
def test_as_separate_ops(
    taken: ModuleType,
    dtype: torch.dtype,
    M: int,
    N: int,
    block_size: tuple[int, int],
    power: bool,
    layout: Layout,
    kind: torch.dtype,
    seed: int,
) -> None:
    """Values and scales are those of the op that makes the rows and then the one that quantizes, to the bit.

    Of the norm on a GPU, a sum in another order may change the last bit.
    """
    x, other = problem((M, N), kind, layout), Layout("contiguous", seed).make((M, N), kind, DEVICE)
    weight = Layout("contiguous", seed + 1).make((N,), kind, DEVICE)
    scale = torch.tensor(0.0123, device=DEVICE) if block_size == TENSOR else None
    options = block_size, dtype, power and scale is None, scale

    def separate(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if scale is not None:
            return taken.quantize_static(y, scale, dtype), scale
        return taken.quantize(y, block_size, dtype, power)

    y, h = taken.rms_norm_residual(x, other, weight, EPS, 1.0, "llama")
    *norm, added = taken.fused_quantize_rms_norm_residual(x, other, weight, EPS, *options, 1.0, "llama")
    equal(added, h)
    pairs = [
        (norm, y),
        (taken.fused_quantize_rms_norm(x, weight, EPS, *options), taken.rms_norm(x, weight, EPS)),
        (taken.fused_quantize_rms_norm(x, None, EPS, *options), taken.rms_norm(x, None, EPS)),
    ]
    for results, rows in pairs:
        if DEVICE.type == "cpu":
            for out, expected in zip(results, separate(rows), strict=True):
                equal(out, expected)
    gpt_oss = "silu", 1.702, 1.0, 7.0
    for activation in ((), gpt_oss, ("gelu_tanh",)):
        results = taken.fused_quantize_swiglu(x, other, *options, *activation)
        for out, expected in zip(results, separate(taken.swiglu(x, other, *activation)), strict=True):
            equal(out, expected)


@pytest.mark.parametrize("kind", HALF_AND_SINGLE, ids=str)
def test_rounded_once_more_than_in_the_accumulator(taken: ModuleType, kind: torch.dtype) -> None:
    """The scale is the largest number that the norm would have stored, over 448: of its dtype, times 448."""
    x = Layout("contiguous", 3).make((50, 96), kind, DEVICE)
    weight = Layout("contiguous", 4).make((96,), kind, DEVICE)
    for _, scales in (
        taken.fused_quantize_rms_norm(x, weight, EPS, ROW, torch.int8),
        taken.fused_quantize_swiglu(x, x.flip(0), ROW, torch.int8),
    ):
        largest = scales * 127
        # A quotient is rounded, so the product is off by less than a bit of float32.
        torch.testing.assert_close(largest, largest.to(kind).float(), rtol=2**-22, atol=0)


def test_not_finite_float32(taken: ModuleType) -> None:
    """A row or a group with NaN or infinities has a scale of NaN, and no other is changed."""
    x = Layout("contiguous", 0).make((6, 300), torch.float32, DEVICE)
    up = Layout("contiguous", 1).make((6, 300), torch.float32, DEVICE)
    bad, bad_up = x.clone(), up.clone()
    bad[1, 3], bad[2, 299], bad[4, 150] = torch.nan, torch.inf, -torch.inf
    bad_up[3, 200] = torch.nan
    makes = [
        (partial(taken.fused_quantize_rms_norm, weight=None, eps=EPS), (x,), (bad,)),
        (partial(taken.fused_quantize_rms_norm_residual, weight=None, eps=EPS), (x, up), (bad, bad_up)),
        (taken.fused_quantize_swiglu, (x, up), (bad, bad_up)),
    ]
    for call, good, broken in makes:
        for block_size in (ROW, GROUPS):
            values, scales, *_ = call(*broken, block_size=block_size)
            expected, expected_scales, *_ = call(*good, block_size=block_size)
            lost = ~torch.isfinite(scales)
            assert scales[lost].isnan().all()
            rows = torch.tensor([1, 2, 3, 4] if len(broken) > 1 else [1, 2, 4], device=DEVICE)
            assert torch.equal(lost.any(1).nonzero()[:, 0], rows)
            # Of an infinity the root mean square is one, and the rest of the norm 0.
            whole = torch.tensor([0, 5], device=DEVICE)
            equal(values[whole], expected[whole])
            equal(scales[whole], expected_scales[whole])
            if call == taken.fused_quantize_swiglu:
                equal(scales[~lost], expected_scales[~lost])


def test_saturates_float32(taken: ModuleType) -> None:
    """With a scale that is known, what is too large becomes the largest number, as does an infinity."""
    gate = torch.full((1, 3), 48.0, device=DEVICE)
    up = torch.tensor([[1.0, -2000.0, torch.inf]], device=DEVICE)
    scale = torch.ones((), device=DEVICE)
    for dtype, most in (LARGEST | {torch.int8: 127.0}).items():
        values, scales = taken.fused_quantize_swiglu(gate, up, TENSOR, dtype, False, scale)
        assert values.float().tolist() == [[48.0, -most, most]]
        assert scales == 1
    values, scales = taken.fused_quantize_rms_norm(gate, None, EPS, TENSOR, E4M3, False, scale / 1024)
    assert (values.float() == 448).all()
    assert scales == 2**-10


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "values stored without a mask",
        "tl.store(out_rows + offs_n, y, mask=offs_n < N)",
        "tl.store(out_rows + offs_n, y)",
    ),
    (
        "scales stored without a mask",
        "tl.store(scale_rows + offs_g, scale, mask=offs_g < groups)",
        "tl.store(scale_rows + offs_g, scale)",
    ),
    ("rows past the last", "offs_m = tl.minimum(offs_m, M - 1)  # as above", "offs_m = offs_m"),
    ("the rows of the first tile again", "later = tile + programs", "later = tile"),
    (
        "a scale of one block of two",
        "given = tl.maximum(given, given_rest)",
        "given = given",
    ),
    (
        "the norm not rounded",
        "y = _rms_norm_scale(x, r, weight, ACC, NARROW).to(DTYPE).to(ACC)",
        "y = _rms_norm_scale(x, r, weight, ACC, NARROW)",
    ),
    ("SwiGLU not rounded", "return y.to(DTYPE).to(tl.float32)", "return y"),
    (
        "a long row's last block decides",
        "most = tl.maximum(most, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)",
        "most = tl.abs(y)",
    ),
    ("not clamped", 'CLAMP: tl.constexpr = SCALING == "static"', "CLAMP: tl.constexpr = False"),
]
