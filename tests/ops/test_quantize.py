"""The ops of the recipe Quantize to FP8 and INT8: a scale for each row or group."""

# ruff: noqa: N806 - dimensions have the names of the recipe

import math
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Exact, Refused
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts

E4M3, E5M2, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0, FP4: 6.0}
HALF_AND_SINGLE = [torch.float16, torch.bfloat16, torch.float32]
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # what 4 bits have
BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (1, 16), (4, 64)]


def in_blocks(x: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """Return a matrix as (rows of blocks, rows, columns of blocks, columns), zeros added past its end."""
    (M, N), (BM, BN) = x.shape, block_size
    BM, BN = M if BM == -1 else BM, N if BN == -1 else BN
    padded = torch.nn.functional.pad(x, (0, -N % BN, 0, -M % BM))
    return padded.view(padded.shape[0] // BM, BM, -1, BN)


def as_matrix(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return blocks as the matrix that they were made of."""
    whole = blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)
    return whole[: like.shape[0], : like.shape[1]]


def largest(blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each block; of NaN, NaN."""
    return blocks.abs().amax((1, 3))


def quotient(x: torch.Tensor, number: float) -> torch.Tensor:
    """Return the rounded quotient: on a GPU, x / number is x times 1 / number, which is rounded twice."""
    return x / torch.full_like(x, number)


def expected_scales(x: torch.Tensor, block_size: tuple[int, int], dtype: torch.dtype, power: bool) -> torch.Tensor:
    """Return the scales of a matrix of float32."""
    most = largest(in_blocks(x, block_size))
    scales = quotient(most, LARGEST[dtype]).clamp(min=2.0**-126)
    if power:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    scales = torch.where(most == 0, 1.0, torch.where(most.isfinite(), scales, torch.nan))
    return scales[0, 0] if block_size == (-1, -1) else scales


def expected_values(
    x: torch.Tensor, scales: torch.Tensor, block_size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the values of a matrix of float32 by PyTorch, given the scales of its blocks."""
    blocks = in_blocks(x, block_size)
    y = as_matrix(blocks * (1 / scales.view(blocks.shape[0], 1, -1, 1)), x)
    y = y.clamp(-LARGEST[dtype], LARGEST[dtype])
    return y.round().to(dtype) if dtype == torch.int8 else y.to(dtype)


def to_4_bits(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest numbers of 4 bits, of two as near the even code, and bytes of two codes."""
    distance = (y.clamp(-6, 6).abs()[..., None] - GRID.to(y.device)).abs()
    code = distance.argmin(-1)
    tie = (distance == distance.amin(-1, keepdim=True)).sum(-1) == 2
    code += (tie & (code % 2 == 1)).int()
    numbers = torch.copysign(GRID.to(y.device)[code], y)
    code += 8 * torch.signbit(y)
    return numbers, code[..., ::2] | (code[..., 1::2] << 4)


def problem(M: int, N: int, dtype: torch.dtype, seed: int = 0, layout: str = "contiguous") -> torch.Tensor:
    """Return a matrix of magnitudes from 1e-8 to 1e4, with rows and blocks of zeros."""
    shape = Layout(layout, seed)
    spread = torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).mul(3).exp2().to(DEVICE)
    x = shape.make((M, N), dtype, DEVICE)
    x = x if layout == "expanded" else x.copy_(x * spread.to(dtype))
    if layout == "contiguous":
        x[M // 2], x[0, : N // 2] = 0, 0
    return x


def dequantized(taken: ModuleType, values: torch.Tensor, scales: torch.Tensor, *options: Any) -> torch.Tensor:
    """Dequantize between guards: a store past the end would break the process before any test could notice it."""
    return guarded(lambda *tensors: taken.dequantize(*tensors, *options), values, scales)


def equal(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two tensors are equal, in a dtype that PyTorch compares."""
    assert out.dtype == expected.dtype
    if out.is_floating_point():
        out, expected = out.float(), expected.float()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


# What tests/contract asks for. The exact values are those before they are rounded to the narrow dtype.


def exact(x: torch.Tensor, block_size: tuple[int, int], dtype: torch.dtype, transpose: bool = False) -> list[Exact]:
    """Return values and scales of a tensor of any rank, and those of its transpose."""
    results = []
    for t in (x, x.T) if transpose else (x,):
        if t.numel() == 0:
            columns = 1 if block_size[1] == -1 else 0
            shape = (
                () if block_size[0] == -1 else (*t.shape[:-1], columns if t.shape[-1] == 0 else -(-t.shape[-1] // 128))
            )
            results += [Exact(t, dtype=dtype), Exact(t.new_ones(shape), dtype=torch.float32)]
            continue
        rows = t.reshape(-1, t.shape[-1])
        blocks = in_blocks(rows, block_size)
        most = largest(blocks)
        scales = torch.where(most == 0, 1.0, most / LARGEST[dtype])
        values = as_matrix(blocks / scales[:, None, :, None], rows).view(t.shape)
        shape = () if block_size[0] == -1 else (*t.shape[:-1], -1) if block_size[0] == 1 else scales.shape
        results += [Exact(values, dtype=dtype), Exact(scales.reshape(shape), dtype=torch.float32)]
    return results


def case(
    name: str, block_size: tuple[int, int], dtype: torch.dtype, sizes: list[tuple[int, ...]], **more: object
) -> Case:
    """Return the case of one size of a block."""
    return Case(
        more.pop("call", "quantize"),
        lambda draw, *shape: (draw(*shape), block_size, dtype),
        partial(exact, **more.pop("options", {})),
        name=name,
        sizes=sizes,
        small=(2, 32),
        dtypes=HALF_AND_SINGLE,
        roundings=4,
        **more,
    )


REFUSED = [
    Refused(lambda draw: (draw(3, 32).long(), (1, 32)), TypeError, r"quantize takes float16, .* not torch\.int64"),
    Refused(lambda draw: (draw(), (-1, -1)), TypeError, r"quantize takes float16, bfloat16 or float32 of one or more"),
    Refused(
        lambda draw: (draw(3, 32), (1, 32), torch.float16), TypeError, r"quantize takes torch\.float8_e4m3fn, .* not"
    ),
    *(
        Refused(lambda draw, size=size: (draw(3, 96), size), ValueError, "quantize takes a block_size of")
        for size in [(1, 48), (3, 32), (1, 8), (128, 256), (-1, 32), (0, 32), (1,), (16, -1)]
    ),
    Refused(
        lambda draw: (draw(2, 3, 32), (2, 32)), ValueError, "quantize takes blocks of several rows of a matrix alone"
    ),
]
CONTRACT = [
    case(
        "quantize groups",
        (1, 128),
        E4M3,
        [(5, 300), (1, 128), (3, 1), (2, 3, 130), (7, 640), (300,), (0, 128), (40, 1024)],
        refused=REFUSED,
    ),
    case("quantize rows", (1, -1), E4M3, [(5, 300), (1, 4096), (3, 1), (2, 3, 130), (17,), (2, 5000)]),
    case("quantize long rows", (1, -1), E5M2, [(3, 100), (2, 3, 70), (1, 1)], settings={"QUANTIZE_ROW": 64}),
    case("quantize a tensor", (-1, -1), E4M3, [(5, 300), (1, 4096), (3, 1), (2, 3, 130), (17,), (70, 600)]),
    case("quantize blocks", (128, 128), E5M2, [(130, 300), (1, 128), (3, 1), (128, 256), (257, 20)]),
    case(
        "quantize_with_transpose",
        (1, 128),
        E4M3,
        [(130, 300), (1, 128), (3, 1), (128, 256), (257, 20)],
        call="quantize_with_transpose",
        options={"transpose": True},
    ),
]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
@given(
    M=st.integers(1, 140),
    N=st.integers(1, 400),
    block_size=st.sampled_from(BLOCKS),
    power=st.booleans(),
    layout=layouts(),
    kind=st.sampled_from(HALF_AND_SINGLE),
)
def test_as_pytorch(
    taken: ModuleType,
    dtype: torch.dtype,
    M: int,
    N: int,
    block_size: tuple[int, int],
    power: bool,
    layout: Layout,
    kind: torch.dtype,
) -> None:
    """Values and scales are those of PyTorch's division and cast, to the bit."""
    x = problem(M, N, kind, layout.seed, layout.name)
    values, scales = taken.quantize(x, block_size, dtype, power)
    expected = expected_scales(x.float(), block_size, dtype, power)
    equal(scales, expected)
    equal(values, expected_values(x.float(), expected, block_size, dtype))
    factors = (
        in_blocks(torch.ones_like(x).float(), block_size)
        * expected.view(*largest(in_blocks(x, block_size)).shape)[:, None, :, None]
    )
    equal(
        guarded(partial(taken.dequantize, block_size=block_size), values, scales),
        values.float() * as_matrix(factors, x),
    )


@given(
    M=st.integers(1, 140),
    N=st.integers(1, 300),
    block_size=st.sampled_from([BLOCKS[0], *BLOCKS[2:]]),
    power=st.booleans(),
)
def test_transpose_float32(taken: ModuleType, M: int, N: int, block_size: tuple[int, int], power: bool) -> None:
    """Both pairs are those of a call for x, and one for x.T."""
    x = problem(M, N, torch.bfloat16)
    results = taken.quantize_with_transpose(x, block_size, E4M3, power)
    apart = taken.quantize(x, block_size, E4M3, power) + taken.quantize(x.T, block_size, E4M3, power)
    for out, expected in zip(results, apart, strict=True):
        equal(out, expected)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [(-1, -1), (128, 128), (1, 128)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
def test_transpose_of_whole_tiles_float32(
    taken: ModuleType, wide: torch.dtype, block_size: tuple[int, int], dtype: torch.dtype
) -> None:
    """The same in tiles without edges, whose stores ptxas of CUDA 12.9 mixed up."""
    x = problem(512, 256, wide)
    results = taken.quantize_with_transpose(x, block_size, dtype)
    apart = taken.quantize(x, block_size, dtype) + taken.quantize(x.T.contiguous(), block_size, dtype)
    for out, expected in zip(results, apart, strict=True):
        equal(out, expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FP4], ids=str)
@given(M=st.integers(1, 9), half=st.integers(1, 300), layout=layouts())
def test_mx_float32(taken: ModuleType, dtype: torch.dtype, M: int, half: int, layout: Layout) -> None:
    """As section 6.3 of the specification of MX."""
    x = problem(M, 2 * half, torch.float32, layout.seed, layout.name)
    values, scales = taken.quantize_mx(x, dtype)
    blocks = in_blocks(x, (1, 32))
    _, exponent = torch.frexp(largest(blocks))
    emax = math.frexp(LARGEST[dtype])[1]
    exponent = torch.where(largest(blocks) == 0, -127, (exponent - emax).clamp(-127, 127))
    assert torch.equal(scales.view(torch.uint8).int(), exponent.int() + 127)
    y = as_matrix(torch.ldexp(blocks, -exponent[:, None, :, None]), x)
    if dtype == FP4:
        numbers, expected = to_4_bits(y)
        assert torch.equal(values.view(torch.uint8).long(), expected)
    else:
        numbers = y.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float()
        equal(values.float(), numbers)
    factors = torch.ldexp(torch.ones_like(blocks), exponent[:, None, :, None])
    equal(dequantized(taken, values, scales, (1, 32)), numbers * as_matrix(factors, x))


@given(M=st.integers(1, 9), half=st.integers(1, 300), given_scale=st.booleans())
def test_nvfp4_float32(taken: ModuleType, M: int, half: int, given_scale: bool) -> None:
    """Scales of float8 and one of the tensor; the numbers are over the rounded scales."""
    x = problem(M, 2 * half, torch.float32)
    most = x.abs().max()
    tensor_scale = torch.where(most == 0, 1.0, quotient(most, 2688))
    tensor_scale = tensor_scale * 3 if given_scale else tensor_scale
    values, scales, used = taken.quantize_nvfp4(x, tensor_scale if given_scale else None)
    equal(used, tensor_scale)
    blocks = in_blocks(x, (1, 16))
    expected = (quotient(largest(blocks), 6) / tensor_scale).clamp(max=448).to(E4M3)
    equal(scales, expected)
    whole = expected.float() * tensor_scale
    inverse = torch.where(expected.float() == 0, 0.0, 1 / whole)
    numbers, codes = to_4_bits(as_matrix(blocks * inverse[:, None, :, None], x))
    assert torch.equal(values.view(torch.uint8).long(), codes)
    factors = torch.ones_like(blocks) * whole[:, None, :, None]
    equal(dequantized(taken, values, scales, (1, 16), torch.float32, used), numbers * as_matrix(factors, x))


def test_every_number_of_4_bits_float32(taken: ModuleType) -> None:
    """All numbers, all that lie half way between two, what is near, and beyond the largest; both signs."""
    middle = (GRID[1:] + GRID[:-1]) / 2
    below = GRID - 3 * 2**-24 * GRID
    x = torch.cat([GRID, below, middle, middle + 2**-22, middle - 2**-22, torch.tensor([7.0, 6.5, 0])])
    x = torch.cat([x, -x]).to(DEVICE)
    x = x.view(-1, 2)
    x = torch.cat([x, x.new_full((len(x), 1), 4.0), x.new_zeros(len(x), 1)], 1)  # 4 makes the scale 1
    x[x.abs() > 6] = 7.5
    values, scales = taken.quantize_mx(x, FP4)
    assert (scales.view(torch.uint8) == 127).all()
    assert torch.equal(values.view(torch.uint8).long(), to_4_bits(x)[1])


@pytest.mark.parametrize("block_size", [(-1, -1), (1, -1), (1, 16), (4, 16)], ids=str)
def test_not_finite_float32(taken: ModuleType, block_size: tuple[int, int]) -> None:
    """A block with NaN or infinities is NaN, and no other block is changed."""
    x = problem(8, 64, torch.float32)
    x[1, 3], x[6, 40] = torch.nan, -torch.inf
    blocks = in_blocks(x, block_size)
    bad = ~torch.isfinite(blocks).all(3, keepdim=True).all(1, keepdim=True).expand_as(blocks)
    bad = as_matrix(bad, x)
    back = dequantized(taken, *taken.quantize(x, block_size), block_size)
    assert torch.equal(back.isnan(), bad)
    mended = torch.where(bad, 0.0, x)
    if block_size[0] != -1:
        expected = dequantized(taken, *taken.quantize(mended, block_size), block_size)
        equal(back[~bad], expected[~bad])
    for values, scales, *tensor in (
        taken.quantize_mx(x, FP4),
        taken.quantize_nvfp4(mended * 0 + x, torch.ones((), device=DEVICE)),
    ):
        size = (1, 16) if tensor else (1, 32)
        around = ~torch.isfinite(in_blocks(x, size)).all(3, keepdim=True)
        lost = as_matrix(around.expand_as(in_blocks(x, size)), x)
        assert torch.equal(dequantized(taken, values, scales, size, torch.float32, *tensor).isnan(), lost)


def test_tiny_and_large_float32(taken: ModuleType) -> None:
    """The smallest and the largest of float32 have scales that have an inverse."""
    x = torch.tensor([[1e-45, 0.0], [2e-38, 1e-38], [3.4e38, -1e38], [0.0, 0.0]], device=DEVICE)
    for power in (False, True):
        values, scales = taken.quantize(x, (1, -1), E4M3, power)
        equal(scales, expected_scales(x, (1, -1), E4M3, power))
        assert torch.isfinite(values.float()).all()
        assert (values.float().abs() <= 448).all()
    assert scales[3] == 1


def test_static_float32(taken: ModuleType) -> None:
    """What is too large for the dtype becomes its largest number, as does an infinity."""
    x = torch.tensor([[1.0, 500.0, -1000.0, torch.inf], [0.25, 449.0, 2.0, -3.0]], device=DEVICE)
    one, rows = torch.ones((), device=DEVICE), torch.tensor([[2.0], [0.5]], device=DEVICE)
    for dtype in (E4M3, torch.int8):
        for scales in (one, rows):
            y = (x * (1 / scales)).clamp(-LARGEST[dtype], LARGEST[dtype])
            expected = y.round().to(dtype) if dtype == torch.int8 else y.to(dtype)
            equal(taken.quantize_static(x, scales, dtype), expected)
    with pytest.raises(ValueError, match=r"quantize_static takes float32 scales of shape \(\) or \(2, 1\)"):
        taken.quantize_static(x, rows[0], E4M3)


def test_refusals(taken: ModuleType) -> None:
    x = problem(4, 33, torch.float32)
    for function in (partial(taken.quantize_mx, dtype=FP4), taken.quantize_nvfp4):
        with pytest.raises(ValueError, match=r"takes rows of even length, not 33"):
            function(x)
    with pytest.raises(
        ValueError, match="quantize_with_transpose takes a matrix, and one block or blocks of up to 128"
    ):
        taken.quantize_with_transpose(x, (1, 256))
    with pytest.raises(ValueError, match="quantize_nvfp4 takes a tensor_scale of one float32"):
        taken.quantize_nvfp4(x[:, 1:], x[0])
    values, scales = taken.quantize(x, (1, 16))
    with pytest.raises(ValueError, match=r"dequantize takes scales of shape \(4, 2\)"):
        taken.dequantize(values, scales, (1, 32))
    with pytest.raises(TypeError, match="dequantize takes values of"):
        taken.dequantize(x, scales, (1, 16))


@pytest.mark.parametrize(
    ("capability", "hip", "casts"),
    [((8, 0), None, False), ((8, 9), None, False), ((9, 0), None, True), ((9, 4), "7", True)],
)
def test_gpus(
    taken: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, casts: bool
) -> None:
    """Where Triton's cast is not there, or does not round to the nearest, bits are stored; an MI300 has 9.4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    for dtype in (E4M3, E5M2):
        stored, plan = taken._quantize_format(dtype, torch.device("cuda", 0))
        assert (stored, plan["CAST"]) == ((dtype, True) if casts else (torch.uint8, False))


def test_fnuz_is_refused(taken: ModuleType) -> None:
    """The float8 of MI300 has another bias, and is named where it is refused."""
    x = problem(4, 32, torch.float32)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        for name, call in (
            ("quantize", partial(taken.quantize, x, (1, -1))),
            ("quantize_static", partial(taken.quantize_static, x, torch.ones((), device=DEVICE))),
            ("quantize_with_transpose", partial(taken.quantize_with_transpose, x, (-1, -1))),
            ("quantize_mx", partial(taken.quantize_mx, x)),
        ):
            with pytest.raises(TypeError, match=rf"^{name} takes .*float8_e4m3fn, .*, not {dtype}$"):
                call(dtype=dtype)
        with pytest.raises(TypeError, match=rf"^dequantize takes values of .*, not {dtype}"):
            taken.dequantize(x.to(dtype), torch.ones(4, 1, device=DEVICE), (1, -1))


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "values stored without a mask",
        "tl.store(ptrs, y.to(ptr.dtype.element_ty), mask=mask)",
        "tl.store(ptrs, y.to(ptr.dtype.element_ty))",
    ),
    (
        "half of a block's maximum",
        "return (tl.max(tl.max(x, axis=3), axis=1) >> 1)",
        "return (tl.max(tl.max(x, axis=3), axis=1) >> 2)",
    ),
    (
        "zeros have no scale",
        "scale = tl.where(largest == 0, 1.0, scale)\n            scale =",
        "scale = scale\n            scale =",
    ),
    ("rounded as a sum", "large - (large - tl.abs(y))", "(large + tl.abs(y)) - large"),
    ("dequantized past the end", "y.to(out_ptr.dtype.element_ty), mask=mask", "y.to(out_ptr.dtype.element_ty)"),
    ("not clamped", "LAST << DROPPED)\n    if WIDTH", "0x7FFFFFFF)\n    if WIDTH"),
]
