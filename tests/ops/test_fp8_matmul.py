"""The ops of the recipe FP8 matrix products, scaled per tensor and per row."""

from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused
from hypothesis import strategies as st
from inputs import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PRECISE = {"per tensor": (), "per row": ("rows", "rows")}


def arguments(
    draw: Draw,
    M: tuple[int, ...],
    N: int,
    K: int,
    scales: str = "rows",
    bias: bool = True,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    fast: bool = False,
) -> tuple[Any, ...]:
    """Make matrices, scales, and a bias or none; the result has the dtype of the case."""
    rows = scales == "rows"

    def positive(x: torch.Tensor) -> torch.Tensor:
        return x.abs() + 0.5

    x, weight = draw(*M, K, dtype=torch.float32).to(dtypes[0]), draw(N, K, dtype=torch.float32).to(dtypes[1])
    scale_x = draw(*M, 1, dtype=torch.float32, of=positive) if rows else draw(1, dtype=torch.float32, of=positive)
    scale_weight = draw(N, dtype=torch.float32, of=positive) if rows else draw(1, dtype=torch.float32, of=positive)[0]
    return x, weight, scale_x, scale_weight, draw(N) if bias else None, draw.dtype, fast


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> list[Exact]:
    """Return the product; a term of float8 sums in tensor cores loses more than float32 does."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * scale_x) @ (weight * scale_weight.reshape(-1, 1)).T

    value, terms = product(x, weight), product(x.abs(), weight.abs())
    if bias is not None:
        value, terms = value + bias, terms + bias.abs()
    # Hopper's tensor cores keep 13 bits of what they add; a sum of 128 is then added in float32.
    return [Exact(value, terms * (2**11 if DEVICE.type == "cuda" else 1))]


SIZES = [((5,), 40, 32), ((130,), 300, 144, "tensor", False), ((2, 3), 7, 1792, "rows", True, (E5M2, E4M3))]
SIZES += [((64,), 128, 128, "tensor"), ((1,), 1, 16), ((0,), 5, 16), ((3,), 7, 0), ((129,), 257, 272, "rows", False)]
SHAPES = st.tuples(
    st.tuples(st.integers(1, 140)),
    st.integers(1, 300),
    st.integers(1, 20).map(lambda n: 16 * n),
    st.sampled_from(["rows", "tensor"]),
    st.booleans(),
    st.tuples(st.sampled_from([E4M3, E5M2]), st.sampled_from([E4M3, E5M2])),
)


def fitting(draw: Draw) -> list[Any]:
    return list(arguments(draw, (4,), 8, 32))


def refused(error: type[Exception], match: str, place: int, change: Any) -> Refused:
    """Return a call that raises, with one argument changed."""

    def make(draw: Draw) -> tuple[Any, ...]:
        given = fitting(draw)
        given[place] = change(given[place])
        return tuple(given)

    return Refused(make, error, match)


REFUSED = [
    refused(TypeError, "fp8_matmul takes float8_e4m3fn and float8_e5m2, not", 0, lambda x: x.float()),
    refused(TypeError, "fp8_matmul takes scales of float32, not", 2, lambda s: s.half()),
    refused(TypeError, "fp8_matmul returns bfloat16, float16 or float32", 5, lambda _: torch.float64),
    refused(TypeError, "fp8_matmul returns bfloat16, float16 or float32", 4, lambda b: b.double()),
    refused(ValueError, r"fp8_matmul takes x \(\.\.\., K\) and weight \(N, K\), not", 0, lambda x: x[:, :16]),
    refused(ValueError, "fp8_matmul takes scale_x of one number or of shape", 2, lambda s: s[:2]),
    refused(ValueError, "fp8_matmul takes scale_weight of one number or of shape", 3, lambda s: s[:2]),
    refused(ValueError, "fp8_matmul takes a bias of shape", 4, lambda b: b[:3]),
    Refused(
        lambda draw: arguments(draw, (4,), 8, 24),
        ValueError,
        "fp8_matmul takes rows of a multiple of 16 numbers, not 24",
    ),
]

# What tests/contract asks for.
CONTRACT = [
    Case(
        "fp8_matmul",
        arguments,
        exact,
        sizes=SIZES,
        small=((3,), 8, 32),
        many=((1031,), 2053, 64),
        shapes=SHAPES,
        dtypes=[torch.bfloat16, torch.float16, torch.float32],
        layouts=["contiguous"],
        roundings=lambda _: 2048,
        contiguous=False,
        refused=REFUSED,
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_float32(taken: ModuleType, dtype: torch.dtype) -> None:
    """The layer is what its parts come to: quantized matrices, multiplied, in all three products."""
    generator = torch.Generator().manual_seed(0)
    x, w, b, g = (
        torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for shape in ((2, 16, 48), (64, 48), (64,), (2, 16, 64))
    )
    given = [t.clone().requires_grad_() for t in (x, w, b)]
    y = taken.fp8_matmul_linear(*given)
    found = [y, *torch.autograd.grad(y, given, g)]

    def rounded(t: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        scale = t.float().abs().max() / torch.finfo(kind).max
        return (t.float() * (1 / scale)).to(kind).double() * scale

    x8, w8, g8 = rounded(x, E4M3), rounded(w, E4M3), rounded(g, E5M2)
    rows = g8.flatten(0, 1)
    expected = [x8 @ w8.T + b.double(), g8 @ w8, rows.T @ x8.flatten(0, 1), g.double().sum((0, 1))]
    for out, value in zip(found, expected, strict=True):
        assert out.dtype == dtype
        rtol = 2**-7 if dtype == torch.bfloat16 else 2**-9 if DEVICE.type == "cuda" else 1e-5
        torch.testing.assert_close(out.double(), value, rtol=rtol, atol=rtol * value.abs().max().item())


def test_layer_refuses(taken: ModuleType) -> None:
    x, w = torch.ones(16, 32, device=DEVICE), torch.ones(16, 32, device=DEVICE)
    with pytest.raises(ValueError, match="fp8_matmul_linear takes multiples of 16 tokens, outputs and inputs"):
        taken.fp8_matmul_linear(x[:5], w)
    with pytest.raises(TypeError, match="fp8_matmul_linear takes bfloat16, float16 or float32 tensors of one dtype"):
        taken.fp8_matmul_linear(x, w.half())
    with pytest.raises(ValueError, match=r"fp8_matmul_linear takes x \(\.\.\., K\) and weight \(N, K\)"):
        taken.fp8_matmul_linear(x, w[:, :16])


@pytest.mark.parametrize(("backend", "arch"), [("cuda", 80), ("cuda", 89), ("hip", "gfx942")])
def test_refuses_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, backend: str, arch: int | str) -> None:
    """A GPU without a copy engine is named, and MI300's own float8 is refused on each."""
    target = SimpleNamespace(backend=backend, arch=arch)
    utils = SimpleNamespace(get_device_properties=lambda _: {"multiprocessor_count": 9, "max_shared_mem": 7})
    active = SimpleNamespace(get_current_target=lambda: target, utils=utils)
    monkeypatch.setattr(taken.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    look = partial(taken._fp8_matmul_gpu.__wrapped__, torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match=rf"takes tensors on NVIDIA GPUs .* 9\.0 .* this is {backend} {arch}$"):
        look()
    target.backend, target.arch = "cuda", 90
    assert look() == (9, 7)


def test_fnuz_is_refused(taken: ModuleType) -> None:
    """The float8 of MI300 has another bias, and is named where it is refused."""
    x, weight, *rest = arguments(Draw(torch.bfloat16), (3,), 16, 32)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        for pair in ((x.float().to(dtype), weight), (x, weight.float().to(dtype))):
            with pytest.raises(TypeError, match=rf"^fp8_matmul takes float8_e4m3fn and float8_e5m2, not .*{dtype}"):
                taken.fp8_matmul(*pair, *rest)


def test_tiles_that_fit(taken: ModuleType) -> None:
    """Where programs are fewer than multiprocessors, a step is of 256, or of 128 where shared memory is small."""
    for given in ((16, 2048, 2), (64, 2048, 4), (40, 7000, 2)):
        assert taken._fp8_matmul_plan(*given, 132, 227 * 1024)[1][:3] == (64, 64, 256)
        assert taken._fp8_matmul_plan(*given, 132, 99 * 1024)[1][:3] == (64, 64, 128)


@pytest.mark.parametrize("fast", [False, True])
def test_layer_accumulates(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Only the gradient of the weight is added up as use_fast_accum says; the other products always are fast."""
    called, product = [], taken.fp8_matmul

    def recorded(*given: Any) -> Any:
        called.append(given[6] if len(given) > 6 else True)
        return product(*given)

    monkeypatch.setattr(taken, "fp8_matmul", recorded)
    x, w = (torch.ones(16, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    y = taken.fp8_matmul_linear(x, w, use_fast_accum=True) if fast else taken.fp8_matmul_linear(x, w)
    y.sum().backward()
    assert called == [True, True, fast]


@pytest.mark.parametrize("fast", [False, True])
def test_tiles_of_precise_sums(taken: ModuleType, fast: bool) -> None:
    """Sums of 128 have a large tile of more rows than columns, and 8 warps for 128 x 128; a small GPU, a small tile."""
    plan = partial(taken._fp8_matmul_plan, itemsize=2, multiprocessors=132, fast=fast)
    large = (128, 256, 128, 8, 4) if fast else (256, 128, 128, 8, 4)
    assert plan(14336, 4096, shared=227 * 1024) == (132, large, 4)
    assert plan(1024, 2048, shared=227 * 1024)[1:] == ((128, 128, 128, 4 if fast else 8, 5), 5)
    assert plan(14336, 4096, shared=99 * 1024)[1] == (64, 128, 128, 4, 6)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "scales of other rows",
        "scale = tl.load(ptr + offs, mask=offs < length, other=0.0)",
        "scale = tl.load(ptr + offs - offs)",
    ),
    ("no bias", "y += bias.to(tl.float32)[None, :]", "y += 0"),
]
