"""Liger-Kernel: test/transformers/test_rms_norm.py, test_fused_add_rms_norm.py, test_layer_norm.py.

Liger's in_place has the backward overwrite the gradient of the output. It changes no result: ours has its own memory.
"""

import pytest
import torch
from comparing import check
from setting import BF16, F16, F32, F64, each, light, randn

from triton_gallery_ops.layer_norm import layer_norm
from triton_gallery_ops.norms_long import norms_long_layer_norm, norms_long_rms_norm
from triton_gallery_ops.rms_norm import rms_norm, rms_norm_residual

SHAPES = [(2, 128, 512), (5, 123, 123), (2, 2, 8), (9, 7, 41)]
EPS = 1e-6
in_dtypes = each("dtype, atol, rtol", (F32, 1e-4, 1e-6), (BF16, 2e-1, 2e-2))


def norm(x, weight, mode):
    weight = torch.ones_like(x[0, 0]) if weight is None else weight
    if mode == "none":
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))
    wide = x if x.dtype == F64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1 + weight.to(wide.dtype))).to(x.dtype) if mode == "gemma" else weight * wide.to(x.dtype)


def options_of(mode):
    """Ours computes "none" as gemma, which differs by roundings."""
    return {"casting_mode": "llama" if mode == "llama" else "gemma", "offset": float(mode == "gemma")}


def problem(shape, dtype):
    light(shape[0] * shape[1] * shape[2], 1 << 13)
    small = shape[0] * shape[1] < 100  # their functional tests draw the weight, the others begin with ones
    weight = randn(shape[-1], dtype=dtype)
    return randn(*shape, dtype=dtype), weight if small else torch.ones_like(weight)


@each("kind", "llama", "llama without weight", "llama in_place", "gemma", "none", "norms_long")
@each("shape", *SHAPES)
@in_dtypes
def test_rms_norm(kind, shape, dtype, atol, rtol):
    mode = kind.partition(" ")[0]
    x, weight = problem(shape, dtype)
    inputs, options = [x, weight], {} if mode == "norms_long" else options_of(mode)
    call = norms_long_rms_norm if mode == "norms_long" else rms_norm
    if "without" in kind:
        inputs.pop()
    check(lambda x, w=None: call(x, w, EPS, **options), lambda x, w=None: norm(x, w, mode), inputs, atol, rtol)


@each("shape", *SHAPES)
@each("kind", "gemma", "without weight")
def test_rms_norm_float16(shape, kind):
    """The same two in float16, which theirs has in bfloat16 and float32 alone."""
    x, weight = problem(shape, F16)
    inputs, mode = ([x, weight], "gemma") if kind == "gemma" else ([x], "llama")
    call = lambda x, w=None: rms_norm(x, w, EPS, **options_of(mode))  # noqa: E731
    check(call, lambda x, w=None: norm(x, w, mode), inputs, 2e-2, 2e-3)


@each("shape", *SHAPES)
@in_dtypes
@each("kind", "llama", "gemma", "none", "llama in_place")
def test_fused_add_rms_norm(shape, dtype, atol, rtol, kind):
    mode = kind.partition(" ")[0]
    x, weight = problem(shape, dtype)
    call = lambda *given: rms_norm_residual(*given, EPS, **options_of(mode))  # noqa: E731
    inputs = x, randn(*shape, dtype=dtype), weight
    check(call, lambda x, r, w: [norm(x + r, w, mode), x + r], inputs, atol, rtol)


@pytest.mark.parametrize("call", [layer_norm, norms_long_layer_norm], ids=["layer_norm", "norms_long"])
@each("shape", (2, 8, 64), (4, 16, 128), (1, 1, 1023), (3, 7, 256), (1, 1, 1500), (3, 512, 128))
@each("dtype, tol", (F32, 1e-5), (BF16, 2e-2))
def test_layer_norm(call, shape, dtype, tol):
    x, _ = problem(shape, dtype)
    weight, bias = randn(shape[-1], dtype=dtype), randn(shape[-1], dtype=dtype)
    # Sums over the rows are larger than their tests' results, which have few rows or are compared with themselves.
    many = max(1, (shape[0] * shape[1]) ** 0.5)
    check(
        lambda *given: call(*given, EPS),
        lambda x, w, b: torch.nn.functional.layer_norm(x, shape[-1:], w, b, EPS),
        (x, weight, bias),
        tol,
        tol,
        factors=[4.0, many, many],
    )
