"""The op of the recipe MXFP8, MXFP4 and NVFP4 with tl.dot_scaled."""

# ruff: noqa: N806 - dimensions have the names of the recipe

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused
from compiled import TRITON, Ask
from hypothesis import strategies as st
from inputs import DEVICE

E4M3, E5M2, FP4, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
BF16, FP16, PACKED = torch.bfloat16, torch.float16, torch.uint8
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
# NumPy's, of NaN and infinities, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
# What tl.dot_scaled is asked of: Triton interprets it from 3.8 on, and its scales of NVFP4 as powers of two
HAS_DOT_SCALED = TRITON >= (3, 8) if DEVICE.type == "cpu" else torch.cuda.get_device_capability() >= (8, 9)


def matrix(draw: Draw, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Make numbers; of those of 4 bits, two in a byte."""
    if dtype == PACKED:
        return draw(*shape[:-1], shape[-1] // 2, dtype=PACKED)
    return draw(*shape, dtype=torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)


def scales_for(draw: Draw, *shape: int, nv: bool) -> torch.Tensor:
    """Make scales that differ from block to block."""
    if nv:
        return draw(*shape, dtype=torch.float32, of=lambda x: x.abs() + 0.5).to(E4M3)
    return (draw(*shape, dtype=PACKED) % 16 + 120).view(E8M0)


def arguments(
    draw: Draw,
    M: tuple[int, ...],
    N: int,
    K: int,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    nv: bool = False,
    bias: bool = False,
) -> tuple[Any, ...]:
    """Make matrices, their scales, and a bias or none; the result has the dtype of the case."""
    x, weight = matrix(draw, *M, K, dtype=dtypes[0]), matrix(draw, N, K, dtype=dtypes[1])
    GROUP = 16 if nv else 32
    scale_x = scales_for(draw, *M, K // GROUP, nv=nv) if dtypes[0].itemsize == 1 else None
    scale_weight = scales_for(draw, N, K // GROUP, nv=nv)
    one = partial(draw, 1, dtype=torch.float32, of=lambda x: x.abs() + 0.5)
    tensor = (None if scale_x is None else one()[0], one()) if nv else (None, None)
    return x, weight, scale_x, scale_weight, draw(N) if bias else None, draw.dtype, *tensor


def unpack(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in float64, those of 4 bits from their bytes."""
    if numbers.dtype != PACKED:
        return numbers.double()
    table = torch.tensor(MAGNITUDES + [-number for number in MAGNITUDES], dtype=torch.float64, device=numbers.device)
    return table[torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2).int()]


def scaled(numbers: torch.Tensor, scale: torch.Tensor | None, tensor: torch.Tensor | None) -> torch.Tensor:
    """Return what numbers and scales stand for, in float64."""
    x = unpack(numbers)
    if scale is not None and scale.numel():
        x = x * scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1)
    return x if tensor is None else x * tensor


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tensor_x: torch.Tensor | None,
    tensor_weight: torch.Tensor | None,
) -> list[Exact]:
    """Return the product of what the matrices stand for."""
    x, weight = scaled(x, scale_x, tensor_x), scaled(weight, scale_weight, tensor_weight)
    value, terms = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        value, terms = value + bias, terms + bias.abs()
    return [Exact(value, terms)]


SIZES = [((5,), 40, 64), ((1,), 5, 32, (PACKED, PACKED)), ((130,), 70, 224, (E4M3, PACKED), False, True)]
SIZES += [((2, 3), 7, 48, (PACKED, PACKED), True, True), ((17,), 33, 160, (E5M2, E4M3)), ((0,), 5, 32), ((3,), 7, 0)]
SIZES += [((65,), 129, 96, (BF16, PACKED)), ((3,), 9, 32, (FP16, PACKED)), ((20,), 9, 80, (BF16, PACKED), True)]
SIZES += [((1,), 0, 32), ((1,), 5000, 1792, (PACKED, E5M2)), ((5000,), 3, 32), ((3,), 8, 64, (FP16, E5M2), False, True)]
PAIRS = [(a, b) for a in (E4M3, E5M2, PACKED, BF16, FP16) for b in (E4M3, E5M2, PACKED)]
SHAPES = st.tuples(
    st.tuples(st.integers(1, 140)),
    st.integers(1, 200),
    st.integers(1, 12).map(lambda n: 32 * n),
    st.sampled_from(PAIRS),
    st.just(value=False),
    st.booleans(),
) | st.tuples(
    st.tuples(st.integers(1, 140)),
    st.integers(1, 200),
    st.integers(1, 12).map(lambda n: 16 * n),
    st.sampled_from([(PACKED, PACKED), (BF16, PACKED), (FP16, PACKED)]),
    st.just(value=True),
    st.booleans(),
)
X, WEIGHT, SCALE_X, SCALE_WEIGHT, BIAS, OUT_DTYPE, TENSOR_X, TENSOR_WEIGHT = range(8)


def refused(error: type[Exception], match: str, changes: dict[int, Callable[[Any], Any]], **options: Any) -> Refused:
    """Return a call that raises, with arguments changed."""

    def make(draw: Draw) -> tuple[Any, ...]:
        given = list(arguments(draw, (4,), 8, 64, **options))
        for place, change in changes.items():
            given[place] = change(given[place])
        return tuple(given)

    return Refused(make, error, match)


NV = {"dtypes": (PACKED, PACKED), "nv": True}
REFUSED = [
    refused(TypeError, "mx_matmul takes float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2", {X: torch.Tensor.float}),
    refused(TypeError, "mx_matmul takes float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2", {WEIGHT: torch.Tensor.half}),
    refused(TypeError, "mx_matmul takes no scale_x for x of torch.float16", {X: torch.Tensor.half}),
    refused(TypeError, "mx_matmul takes scales of float8_e8m0fnu, or of", {SCALE_X: torch.Tensor.float}),
    refused(TypeError, "mx_matmul takes scales of float8_e8m0fnu, or of", {SCALE_X: lambda _: None}),
    refused(TypeError, "mx_matmul takes scales of float8_e8m0fnu, or of", {SCALE_X: lambda s: s.view(E4M3)}),
    refused(
        TypeError,
        "mx_matmul takes scales of float8_e4m3fn for float4_e2m1fn_x2, not",
        dict.fromkeys((SCALE_X, SCALE_WEIGHT), lambda s: s.view(E4M3)),
    ),
    refused(TypeError, "mx_matmul returns bfloat16, float16 or float32", {OUT_DTYPE: lambda _: torch.float64}),
    refused(TypeError, "mx_matmul returns bfloat16, float16 or float32", {BIAS: torch.Tensor.double}, bias=True),
    refused(ValueError, r"mx_matmul takes x \(\.\.\., K\) and weight \(N, K\), half as", {X: lambda x: x[:, :32]}),
    refused(ValueError, r"mx_matmul takes x \(\.\.\., K\) and weight \(N, K\), half as", {WEIGHT: lambda w: w[0]}),
    refused(
        ValueError, "mx_matmul takes K that is a multiple of 32", {X: lambda x: x[:, :48], WEIGHT: lambda w: w[:, :48]}
    ),
    refused(
        ValueError,
        "mx_matmul takes K that is a multiple of 16",
        {X: lambda x: x[:, :12], WEIGHT: lambda w: w[:, :12]},
        **NV,
    ),
    refused(ValueError, r"mx_matmul takes scales of shape \(4, 2\) and \(8, 2\), not", {SCALE_X: lambda s: s[:1]}),
    refused(ValueError, r"mx_matmul takes scales of shape \(4, 2\) and \(8, 2\), not", {SCALE_WEIGHT: lambda s: s[:1]}),
    refused(ValueError, r"mx_matmul takes a bias of shape \(8,\), not", {BIAS: lambda b: b[:3]}, bias=True),
    refused(ValueError, "mx_matmul takes tensor scales of one float32, not", {TENSOR_X: torch.Tensor.double}, **NV),
    refused(
        ValueError, "mx_matmul takes tensor scales of one float32, not", {TENSOR_WEIGHT: lambda s: s.repeat(2)}, **NV
    ),
]


def by_dot_scaled(op: ModuleType) -> None:
    """Have a launcher take tl.dot_scaled for MX formats, with an instruction or without, where Triton can."""
    if HAS_DOT_SCALED:
        op.MX_MATMUL_FEW = 0
        op._mx_matmul_scaled = lambda architecture, x, weight, GROUP: GROUP == 32 and x not in ("bf16", "fp16")


# What tests/contract asks for.
CONTRACT = [
    Case(
        "mx_matmul",
        arguments,
        exact,
        sizes=SIZES,
        small=((3,), 8, 32),
        many=((1031,), 2053, 64),
        shapes=SHAPES,
        dtypes=[torch.bfloat16, torch.float16, torch.float32],
        roundings=lambda _: 256,
        refused=REFUSED,
    ),
    Case(
        "mx_matmul",
        arguments,
        exact,
        name="mx_matmul by tl.dot_scaled",
        prepare=by_dot_scaled,
        sizes=[
            ((5,), 40, 64),
            ((1,), 5, 32, (PACKED, PACKED)),
            ((130,), 70, 224, (E4M3, PACKED), False, True),
            ((17,), 33, 160, (E5M2, E4M3)),
            ((3,), 7, 1792, (PACKED, E5M2)),
        ],
        small=((3,), 8, 32),
        many=((1031,), 2053, 64),
        dtypes=[torch.bfloat16, torch.float16, torch.float32],
        # Tensor cores keep 13 bits of what they add of float8
        roundings=lambda _: 2048,
    ),
]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FP4], ids=str)
def test_every_number_in_float32(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each of a format's codes is decoded, NaN and infinities too, and spoils no other row."""
    codes = torch.arange(16 if dtype == FP4 else 256, dtype=PACKED, device=DEVICE)
    x = torch.zeros(len(codes), 16 if dtype == FP4 else 32, dtype=PACKED, device=DEVICE)
    x[:, 0] = codes  # and in 4 bits a second number, which is 0
    weight = torch.zeros(1, 32, device=DEVICE)
    weight[0, 0] = 1
    one = torch.full((len(codes), 1), 127, dtype=PACKED, device=DEVICE)
    y = taken.mx_matmul(x.view(dtype), weight.to(E4M3), one, one[:1], out_dtype=torch.float32)
    expected = unpack(codes[:, None])[:, 0] if dtype == FP4 else codes.view(dtype).double()
    torch.testing.assert_close(y[:, 0].double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [E8M0, E4M3], ids=str)
def test_every_scale_in_float32(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each byte of a scale is decoded: 0 of e8m0 too, and 255, which is NaN."""
    # No 0 beside it, as infinity times 0 is NaN, too; and on a GPU no sum of what is too small for an exponent
    scale = torch.arange(8 if DEVICE.type == "cuda" else 0, 256, dtype=PACKED, device=DEVICE).view(dtype)
    GROUP = 32 if dtype == E8M0 else 16
    x = torch.full((len(scale), GROUP // 2), 0x22, dtype=PACKED, device=DEVICE)  # each number is 1
    part = torch.full((1, 1), 1 / GROUP, device=DEVICE).to(dtype)
    y = taken.mx_matmul(x, x[:1], scale[:, None], part, out_dtype=torch.float32)
    torch.testing.assert_close(y[:, 0], scale.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kinds", [(E4M3, E5M2), (FP4, E4M3), (FP4, FP4), ("nv", "nv")], ids=str)
def test_what_quantize_returns(taken: ModuleType, load_op: Callable[[str], ModuleType], kinds: tuple[Any, Any]) -> None:
    """The op takes numbers and scales as quantize_mx and quantize_nvfp4 lay them out."""
    op, made, expected = load_op("low_precision/quantize.py"), [], []
    for rows, kind in zip((33, 20), kinds, strict=True):
        x = torch.randn(rows, 96, device=DEVICE)
        numbers, scale, *tensor = op.quantize_nvfp4(x) if kind == "nv" else op.quantize_mx(x, kind)
        block = (1, 16 if kind == "nv" else 32)
        made.append((numbers, scale, *tensor))
        expected.append(op.dequantize(numbers, scale, block, torch.float32, *tensor).double())
    (x, scale_x, *tensor_x), (weight, scale_weight, *tensor_weight) = made
    given = x, weight, scale_x, scale_weight, None, torch.float32, *tensor_x, *tensor_weight
    y = taken.mx_matmul(*given).double()
    terms = expected[0].abs() @ expected[1].abs().T
    assert ((y - expected[0] @ expected[1].T).abs() <= 2**-18 * terms).all()


def test_nan_stays_in_its_rows_float32(taken: ModuleType) -> None:
    """A scale that is NaN makes a row of NaN, or a column; so does a float8 NaN."""
    x, weight, scale_x, scale_weight, *others = arguments(Draw(torch.float32), (20,), 40, 128)
    scale_x.view(PACKED)[3, 1] = 255
    scale_weight.view(PACKED)[5, 2] = 255
    x.view(PACKED)[7, 127] = 0x7F
    none = taken.mx_matmul(x, weight, scale_x, scale_weight, *others).isnan()
    expected = torch.zeros_like(none)
    expected[3], expected[7], expected[:, 5] = True, True, True
    assert torch.equal(none, expected)


ARCHITECTURES = [80, 89, 90, 100, 120, "gfx942", "gfx950"]
SHARED = dict(zip(ARCHITECTURES, (163, 99, 227, 227, 99, 64, 160), strict=True))
FORMATS = [("e4m3", "e4m3", 32), ("e4m3", "e2m1", 32), ("e2m1", "e2m1", 32), ("e2m1", "e2m1", 16), ("bf16", "e2m1", 32)]


def on_every_gpu(recipe: ModuleType) -> dict[tuple[Any, ...], tuple[str, int]]:
    """Compile the kernel for each GPU, pair of formats and number of rows; return the code and the shared memory."""
    import triton

    from triton_gallery_ops import mx_matmul as op

    kernel = op._mx_matmul_kernel
    types = dict.fromkeys(kernel.arg_names, "constexpr") | {"y_ptr": "*bf16", "bias_ptr": "*bf16"}
    types |= dict.fromkeys(("x_ptr", "weight_ptr", "scale_x_ptr", "scale_weight_ptr"), "*u8")
    types |= dict.fromkeys(("M", "N", "groups"), "i32")
    results = {}
    for architecture in ARCHITECTURES:
        op._mx_matmul_gpu = lambda device, of=architecture: (of, SHARED[of] * 1024)
        nvidia = isinstance(architecture, int)
        target = triton.backends.compiler.GPUTarget("cuda" if nvidia else "hip", architecture, 32 if nvidia else 64)
        for x, weight, GROUP in FORMATS:
            for M in (16, 4096):
                plan = op._mx_matmul_plan(M, x, weight, GROUP, None)
                options = {name: plan.pop(name) for name in ("num_warps", "num_stages")}
                known = plan | {"X": x, "WEIGHT": weight, "GROUP": GROUP}
                known |= {"tensor_x_ptr": None, "tensor_weight_ptr": None}
                known |= {"scale_x_ptr": None} if x == "bf16" else {}
                given = {name: "constexpr" if name in known else kind for name, kind in types.items()}
                given |= {"x_ptr": "*bf16"} if x == "bf16" else {}
                by_16 = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(given.values()) if kind[0] in "*i"}
                source = triton.compiler.ASTSource(kernel, given, known, by_16)
                made = triton.compile(source, target=target, options=options)
                code = made.asm.get("ptx") or made.asm["amdgcn"]
                results[architecture, x, weight, GROUP, M] = (code, made.metadata.shared)
    return results


@pytest.mark.thorough
def test_every_gpu(gallery: Path, on_h100: Ask) -> None:
    """It fits each GPU, and is the instruction with scales where the GPU has one for the formats."""
    (results,) = on_h100(gallery / "low_precision" / "mx_matmul.py", on_every_gpu)
    assert len(results) == 70
    with_scales = set()
    for (architecture, *formats, M), (code, shared) in results.items():
        assert shared <= SHARED[architecture] * 1024, (architecture, formats, M)
        if "block_scale" in code or "v_mfma_scale" in code:
            assert M > 64
            with_scales.add((architecture, *formats))
    expected = {(100, *formats) for formats in FORMATS[:4]} | {("gfx950", *formats) for formats in FORMATS[:3]}
    expected |= {(120, *formats) for formats in (FORMATS[0], *FORMATS[2:4])}
    assert with_scales == expected


@pytest.mark.skipif(DEVICE.type == "cuda" or not HAS_DOT_SCALED, reason="tl.dot_scaled is not interpreted")
def test_interpreter_of_nvfp4(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton interprets the scales of NVFP4 as powers of two: the lesson says so, and a fix changes it."""
    monkeypatch.setattr(taken, "_mx_matmul_scaled", lambda *given: True)
    monkeypatch.setattr(taken, "MX_MATMUL_FEW", 0)
    given = arguments(Draw(torch.float32), (20,), 8, 64, **NV)
    y = taken.mx_matmul(*given)
    (right,) = exact(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given))
    assert not torch.allclose(y.double(), right.value, rtol=0.1)


def test_gpus_with_an_instruction(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's and NVIDIA's GPUs are told apart, and how much a program may hold of their memory."""
    properties = SimpleNamespace(major=12, minor=1, shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert taken._mx_matmul_gpu.__wrapped__(torch.device("cuda", 0)) == (121, 101376)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties.gcnArchName = "gfx950:sramecc+:xnack-"
    assert taken._mx_matmul_gpu.__wrapped__(torch.device("cuda", 0)) == ("gfx950", 101376)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "columns past K",
        "mask = (offs < rows)[:, None] & (offs_k < columns)[None, :]",
        "mask = (offs < rows)[:, None] & (offs_k >= 0)[None, :]",
    ),
    (
        "stored past M",
        "mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]\n    tl.store(y_ptrs, acc.to(y_ptr.dtype",
        "mask = (offs_m >= 0)[:, None] & (offs_n < N)[None, :]\n    tl.store(y_ptrs, acc.to(y_ptr.dtype",
    ),
    (
        "stored past N",
        "mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]\n    tl.store(y_ptrs, acc.to(y_ptr.dtype",
        "mask = (offs_m < M)[:, None] & (offs_n >= 0)[None, :]\n    tl.store(y_ptrs, acc.to(y_ptr.dtype",
    ),
    ("scales of the first block alone", "group = k // GROUP\n", "group = k * 0\n"),
    (
        "halves of a byte exchanged",
        "tl.join(codes & 15, codes >> 4)\n            codes",
        "tl.join(codes >> 4, codes & 15)\n            codes",
    ),
    ("e4m3 without its NaN", 'number = tl.where((codes & 0x7F) == 0x7F, float("nan"), number)', "number = number"),
    ("2**-127 as 0", "bits = tl.where(scales == 0, 0x00400000, bits)", "bits = bits"),
    ("255 as infinity", "bits = tl.where(scales == 255, 0x7FC00000, bits)", "bits = bits"),
    ("4-bit numbers without a sign", "((codes & 8) << 28) |", "((codes & 8) << 20) |"),
    ("without the tensor's scale of x", "acc *= tl.load(tensor_x_ptr)", "acc *= 1"),
    ("without the tensor's scale of the weight", "acc *= tl.load(tensor_weight_ptr)", "acc *= 1"),
    ("without a bias", "acc += bias.to(tl.float32)[None, :]", "acc += 0 * bias.to(tl.float32)[None, :]"),
    (
        "the last block of K left out",
        "for k in range(0, K, BLOCK_K):\n        # Bytes",
        "for k in range(0, K - BLOCK_K, BLOCK_K):\n        # Bytes",
    ),
    ("tiles of eight rows alone", "first = pid // (8 * tiles_n) * 8", "first = 0"),
    (
        "K of NVFP4 that is not whole",
        "if K % GROUP:\n        raise ValueError(",
        "if K % 8:\n        raise ValueError(",
    ),
    (
        "no launcher for GPUs",
        'MX_MATMUL_LIBRARY.impl("mx_matmul", _mx_matmul_launch, "CUDA")\n',
        "",
    ),
]
