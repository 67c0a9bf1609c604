# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Write float8 from the kernel that computes an RMSNorm or a SwiGLU: what fusing
# saves in bytes, with a scale for each row or group."""
# dtypes = ["float16", "bfloat16", "float32"]
# backward = false
# deterministic = true
# longer = "two ops, each with rows, groups and known scales, and long rows"
#
# [tool.triton-gallery.not_for]  # float8_e4m3fn needs compute capability 8.9
# norm_kernel = ["sm_80"]
# residual_kernel = ["sm_80"]
# swiglu_kernel = ["sm_80"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "norm_kernel"
# caption = """
# A row of x per program. The root mean square of row 0 is 2, so r is 0.5, and
# the largest y is 14. MAX is 7 here, so the scale is 2. Values stay float32."""
# registers = ["r", "y", "largest", "scale", "values"]
# call = "norm_and_quantize(x, weight, 0.0, torch.float32, 7.0)"
# start = [0, 2]
#
# [tool.triton-gallery.step_through.inputs]
# x = "torch.tensor([[0., 4, 0, -2, 2, 0], [2, -2, 2, 2, -2, 2]])"
# weight = "torch.tensor([1., 7, 4, 2, 6, -5])"
#
# [tool.triton-gallery.step_through.expected]
# values = "torch.tensor([[0., 7, 0, -1, 3, 0], [1, -7, 4, 2, -6, -5]])"
# ///
r"""
Fused RMSNorm and SwiGLU with FP8 quantization
==============================================

A linear layer in 8 bits wants its input in 8 bits, with scales. That input
comes from an RMSNorm or from a SwiGLU, so the kernel that computes it can also
quantize it, while the row is in registers. Inference engines do this between
matrix products. These kernels are for inference: training would also need the
norm in 16 bits, which they do not store.

After this page you can

* count the bytes that a fused kernel saves, before you write it;
* quantize a row inside the kernel that computes it, with a scale for the row or
  for groups of 128;
* round where separate kernels round, so that results agree with theirs.
"""

# sphinx_gallery_tags = ["quantization", "float8", "fusion", "memory bound"]
import os
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.counting import Traffic

generator = torch.Generator(device=DEVICE).manual_seed(0)
randn = partial(torch.randn, generator=generator, device=DEVICE)


def nearly_equal(name, values, expected):
    """Check float8 values of bfloat16 rows against those of two ops."""
    # Kernels may add a row in different orders, so r may differ in its last
    # bit. Then a y near the middle of two bfloat16 numbers may become either,
    # and its float8 value the next one: an eighth away at most, or 2**-9 near 0
    values, expected = values.float(), expected.float()
    torch.testing.assert_close(values, expected, rtol=1 / 8, atol=2**-9)
    count = (values != expected).sum()
    print(f"{name}: {count} of {values.numel()} values differ from two ops'")


def compare_groups(values, scales, exact, allowed=0.01, MAX=448):
    """Compare groups of 128; zeros fill a short last group."""
    fill = partial(torch.nn.functional.pad, pad=(0, -exact.shape[1] % 128))
    shape = *scales.shape, 128
    values, exact = (fill(t.double()).view(shape) for t in (values, exact))
    compare(values, scales[..., None], exact, allowed, MAX)


def counted(*numbers):
    """Print whether these are the bytes an element, in one kernel and two."""
    gate, up = randn(2, 4, 256).bfloat16()
    one = sum(t.nbytes for t in (gate, up, *swiglu_and_quantize(gate, up)))
    two = one + 2 * gate.nbytes  # y is as large as the gate
    right = [number * gate.numel() for number in numbers] == [one, two]
    print("right" if right else "wrong" if any(numbers) else "not solved yet")
    return right


def solved(kernel):
    """Print whether a kernel makes the values and scales of norm_kernel."""
    if kernel is None:
        print("not solved yet")
        return False
    x, weight = randn(20, 1000), randn(1000)
    expected = norm_and_quantize(x, weight, dtype=torch.float32)
    made = [torch.zeros_like(t) for t in expected]
    kernel[(20,)](x, weight, *made, 1000, EPS, 448.0, 1024)
    close = partial(torch.allclose, rtol=1e-4, atol=1e-4)
    right = all(map(close, made, expected))
    print("right" if right else "wrong")
    return right


# %%
# In PyTorch
# ----------
#
# The norm of a row is ``y = x / sqrt(mean(x**2) + EPS) * weight``. *Quantize to
# FP8 and INT8* divides each row by a scale, which brings its largest magnitude
# to 448, the largest ``float8_e4m3fn``. With a scale of 0, a row of zeros would
# become NaN, so no scale is below ``2.0**-126``, the smallest normal float32.

E4M3 = torch.float8_e4m3fn
EPS = 1e-6


def norm_torch(x, weight):
    """Return the RMSNorm of each row."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def in_torch(x, weight):
    """Return the norm divided by its scales, as float8, and the scales."""
    y = norm_torch(x, weight)
    scales = (y.abs().amax(-1, keepdim=True).float() / 448).clamp(min=2.0**-126)
    return (y.float() * (1 / scales)).to(E4M3), scales


# %%
# The *floor* is ``x`` and the weight read once, values and scales written once.
# One kernel moves just that; two also write and read ``y``. ``Traffic`` counts
# what PyTorch's operators move; they also write float32 copies of ``y``.

if __name__ == "__main__":
    x, weight = randn(64, 4096).bfloat16(), randn(4096).bfloat16()
    with Traffic() as traffic:
        values, scales = in_torch(x, weight)
    floor = sum(t.nbytes for t in (x, weight, values, scales))
    moved = {f"PyTorch, {len(traffic.operators)} operators": traffic.moved}
    moved |= {"two kernels": floor + 2 * x.nbytes, "one kernel": floor}
    for name, count in moved.items():
        print(f"{name}: {count:,} bytes, {count / floor:.2f} times the floor")

# %%
# The first kernel
# ----------------
#
# As in any RMSNorm, ``r`` is one over the root mean square. But ``y`` stays in
# registers, where its largest magnitude gives the scale. Two kernels would
# store ``y`` in the dtype of ``x``, so this one rounds it to that and back.


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    values_ptr,
    scale_ptr,
    N,
    EPS: tl.constexpr,  # compiled in, as EPS and MAX do not vary
    MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)  # row * N may pass 2**31
    cols = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = cols < N  # elements past the row are 0: no sum or maximum changes
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N + EPS)
    y = x * r * weight  # (BLOCK_N,)
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)  # as if stored in x's dtype
    largest = tl.max(tl.abs(y), axis=0)
    scale = tl.maximum(largest / MAX, 2.0**-126)
    values = y * (1 / scale)  # (BLOCK_N,)
    values = values.to(values_ptr.dtype.element_ty)  # just over MAX becomes MAX
    tl.store(values_ptr + row * N + cols, values, mask=mask)
    tl.store(scale_ptr + row, scale)


def norm_and_quantize(x, weight, eps=EPS, dtype=E4M3, MAX=448.0):
    """Return the norm divided by its scales (one for a row), and the scales."""
    M, N = x.shape
    assert 0 < N <= 16384  # 16 warps: on AMD 16 * 64 = 1024 threads, the most
    assert weight.shape == (N,)
    assert torch.finfo(dtype).max >= MAX  # no int8: a cast drops the fraction
    x, weight = x.contiguous(), weight.contiguous()
    values = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(M, 1, dtype=torch.float32)
    BLOCK_N = triton.next_power_of_2(N)
    warps = max(1, BLOCK_N // 1024)  # 32 threads each, with 32 elements each
    tensors = x, weight, values, scales
    norm_kernel[(M,)](*tensors, N, eps, MAX, BLOCK_N, num_warps=warps)
    return values, scales


# %%
# Is it right?
# ------------
#
# 1. The arithmetic: numbers are random, and values stay in float32.
# 2. The cast to float8, in PyTorch and here. Triton's interpreter may round it
#    wrongly, so each value is a float8 already: ``x * r`` is 1 or -1, weights
#    are float8 numbers, the largest of them is 448, and so the scale is 1.
# 3. The rounding of ``y``: weights are larger by under half a bfloat16 step,
#    which it removes. A kernel that does not round has larger scales and fails.


def compare(values, scales, exact, allowed=0.01, MAX=448):
    """Print and check the largest error of values, and check the scales."""
    expected = (exact.abs().amax(-1, keepdim=True) / MAX).clamp(2.0**-126)
    torch.testing.assert_close(scales.double(), expected, rtol=1e-5, atol=0)
    error = (values.double() - exact / expected).abs().max().item()
    print(f"largest error {error:.4f} of {MAX}, allowed {allowed}")
    assert error <= allowed


if __name__ == "__main__":
    x, weight = randn(1000, 20).T, randn(1000)  # x is not contiguous
    exact = norm_torch(x.double(), weight.double())
    compare(*norm_and_quantize(x, weight, dtype=torch.float32), exact)
    signs = 1024 * randn(20, 1000).sign().bfloat16()  # EPS is nothing to 1024
    signs[3] = 0  # its values must be 0, not NaN
    weights = (200 * randn(1000)).clamp(-448, 448).to(E4M3).bfloat16()
    exact_signs = norm_torch(signs.double(), weights.double())
    for op in (in_torch, norm_and_quantize):
        compare(*op(signs, weights), exact_signs)
    larger = weights.float() * (1 + 2**-10)
    compare(*norm_and_quantize(signs, larger, dtype=torch.float32), exact_signs)

# %%
# How fast?
# ---------
#
# GB/s: the floor's bytes over the time. The *roof* is a copy of as many bytes,
# also measured, so a kernel may be a little above it.

ELEMENTS = 2**28  # of x, for any N: far more than a GPU's caches hold
FLOOR = 3e-6 * ELEMENTS  # megabytes: two bytes read, one written


def calls(ours, N):
    """Return what is timed for rows of N, by name."""
    x, weight = randn(ELEMENTS // N, N).bfloat16(), randn(N).bfloat16()
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(in_torch, dynamic=False, fullgraph=True)
    ops = ours | {"PyTorch": in_torch, "torch.compile": fast}
    made = {name: partial(op, x, weight) for name, op in ops.items()}
    return made | {"Roof": x.view(-1)[: 3 * ELEMENTS // 4].clone}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (1024, 4096, 16384):
        times = gpu_time(calls({"norm_kernel": norm_and_quantize}, N))
        rows[N] = {name: round(FLOOR / t[0]) for name, t in times.items()}
    table = pd.DataFrame(rows).T.rename_axis("N")
    print("GB/s", table.to_string(), sep="\n")

# %%
# Groups of 128
# -------------
#
# The steps after ``y`` serve any kernel, so they become a function, here with a
# scale for each group. One jit function may call another, which is inlined.
# This one reshapes the row to (groups, 128): each row of that block is a group.
# A shape must be known at compile time, so ``GROUPS`` is a ``tl.constexpr``.


@triton.jit
def store_groups(
    y,  # (BLOCK_N,)
    values_ptr,  # to the row's first value
    scale_ptr,  # to the row's first scale
    N,
    MAX: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a row of values, and a scale for each group."""
    BLOCK_N: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    y = tl.reshape(y, (GROUPS, GROUP))
    largest = tl.max(tl.abs(y), axis=1)  # (GROUPS,); NaN is ignored
    scale = tl.maximum(largest / MAX, 2.0**-126)
    values = tl.reshape(y * (1 / scale)[:, None], (BLOCK_N,))
    if values_ptr.dtype.element_ty.is_int():  # decided at compile time
        values = tl.floor(values + 0.5)  # a cast to int8 drops the fraction
    values = values.to(values_ptr.dtype.element_ty)
    cols = tl.arange(0, BLOCK_N)
    tl.store(values_ptr + cols, values, mask=cols < N)
    groups = tl.arange(0, GROUPS)
    tl.store(scale_ptr + groups, scale, mask=groups < tl.cdiv(N, GROUP))


def prepare(x, GROUP, dtype, MAX):
    """Return empty values and scales of a contiguous x, and launch options."""
    M, N = x.shape
    assert 0 < N <= 16384
    info = torch.finfo if dtype.is_floating_point else torch.iinfo
    assert info(dtype).max >= MAX, f"{dtype} has no {MAX}: pass MAX"
    values = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(M, triton.cdiv(N, GROUP), dtype=torch.float32)
    BLOCK_N = max(GROUP, triton.next_power_of_2(N))
    warps = max(1, BLOCK_N // 1024)
    return values, scales, {"BLOCK_N": BLOCK_N, "num_warps": warps}


# %%
# Add the residual, too
# ---------------------
#
# In a transformer a norm follows an addition: ``h = residual + x`` is
# normalized for this layer, and is also the residual of the next addition. In
# bfloat16, three kernels move 13 bytes an element: the addition 2 + 2 + 2, the
# norm 2 + 2, and quantization 2 + 1. One kernel moves 7, 2 + 2 + 2 + 1: it
# writes ``h`` for later layers, but does not read it again for the norm. Like
# ``y``, ``h`` is rounded before it is used: the norm sees what is stored.


@triton.jit
def residual_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    h_ptr,
    values_ptr,
    scale_ptr,
    N,
    EPS: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = cols < N
    offs = row * N + cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
    h = (x + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + offs, h, mask=mask)
    h = h.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(h * h, axis=0) / N + EPS)
    y = (h * r * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    values_row, scale_row = values_ptr + row * N, scale_ptr + row
    store_groups(y, values_row, scale_row, N, MAX, GROUP=BLOCK_N)


def add_norm_and_quantize(x, residual, weight, eps=EPS, dtype=E4M3, MAX=448.0):
    """Return values and scales of the norm of h = residual + x, and h."""
    M, N = x.shape
    assert residual.shape == x.shape
    assert weight.shape == (N,)
    x, residual = x.contiguous(), residual.contiguous()
    h = torch.empty_like(x)
    values, scales, options = prepare(x, N, dtype, MAX)
    tensors = x, residual, weight.contiguous(), h, values, scales
    residual_kernel[(M,)](*tensors, N, eps, MAX, **options)
    return values, scales, h


if __name__ == "__main__":
    x, residual, weight = randn(20, 1000), randn(20, 1000), randn(1000)
    *quantized, h = add_norm_and_quantize(
        x, residual, weight, dtype=torch.float32
    )
    assert torch.equal(h, x + residual)
    compare(*quantized, norm_torch(h.double(), weight.double()))
    # In bfloat16 1024 + 3.75 is 1024: h must be as without the residual
    residual = torch.zeros_like(signs)
    residual[:, ::10] = signs[:, ::10] * (3.75 / 1024)
    for w, dtype in ((weights, E4M3), (larger, torch.float32)):
        *quantized, h = add_norm_and_quantize(signs, residual, w, dtype=dtype)
        assert torch.equal(h, signs)
        compare(*quantized, exact_signs)

# %%
# SwiGLU
# ------
#
# SwiGLU makes the input of the second product in a feed-forward layer:
# ``silu(gate) * up``, where ``silu(x)`` is ``x * sigmoid(x)``. The kernel
# computes this as its ``y``, rounds it once, as a SwiGLU kernel that stores it
# would, and calls ``store_groups``. (PyTorch's two operators also round
# ``silu(gate)``.) No sum runs over the row, so a program could take a part of
# it, some of its groups; the op does so. A row has ``cdiv(N, GROUP)`` scales.
# ``compare_groups``, in *Imports, device and measurement helpers*, compares as
# ``compare`` does, by groups of 128, after it has filled up the last one with
# zeros.


@triton.jit
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    values_ptr,
    scale_ptr,
    N,
    MAX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = cols < N
    offs = row * N + cols
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up  # (BLOCK_N,)
    y = y.to(gate_ptr.dtype.element_ty).to(tl.float32)
    scale_row = scale_ptr + row * tl.cdiv(N, GROUP)
    store_groups(y, values_ptr + row * N, scale_row, N, MAX, GROUP)


def swiglu_and_quantize(gate, up, dtype=E4M3, GROUP=128, MAX=448.0):
    """Return the SwiGLU, each group divided by its scale, and the scales."""
    M, N = gate.shape
    assert up.shape == gate.shape
    assert triton.next_power_of_2(GROUP) == GROUP <= 16384
    gate, up = gate.contiguous(), up.contiguous()  # copies halves of one tensor
    values, scales, options = prepare(gate, GROUP, dtype, MAX)
    tensors = gate, up, values, scales
    swiglu_kernel[(M,)](*tensors, N, MAX, GROUP, **options)
    return values, scales


if __name__ == "__main__":
    gate, up = randn(9, 900), randn(9, 900)  # seven groups and a short one
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    compare_groups(*swiglu_and_quantize(gate, up, torch.float32), exact)
    in_int8 = swiglu_and_quantize(gate, up, torch.int8, MAX=127.0)
    compare_groups(*in_int8, exact, allowed=0.501, MAX=127)
    # bfloat16 to float8 without rounding: sigmoid(64) is 1, and 64 * 7 is 448
    large = torch.full_like(gate, 64).bfloat16()
    small = up.clamp(-7, 7).to(E4M3).bfloat16()
    small[:, ::128] = 7
    compare_groups(*swiglu_and_quantize(large, small), 64 * small.double())

# %%
# Your own kernel
# ---------------
#
# Compute ``y``, with 0 in masked elements, round it to the dtype of ``x``, and
# call ``store_groups``, as these two kernels do. For RMSNorm by groups, end
# ``norm_kernel`` as ``swiglu_kernel`` ends. For one scale a row, give
# ``store_groups`` the whole block as its group, and ``prepare`` the row, ``N``,
# as ``residual_kernel`` and its function do. For int8, pass ``MAX=127.0``;
# halves are rounded up, where ``torch.round`` takes them to even numbers.
#
# In a LayerNorm, load the bias with ``other=0.0``, and set ``x - mean`` to 0 in
# masked elements before its squares are added up:
# ``tl.where(mask, x - mean, 0.0)``. Another gate than SwiGLU's is another line
# for ``y``; the exact GELU is ``0.5 * gate * (1 + tl.erf(gate * 0.5**0.5))``.
# NaN is ignored, so in int8 a row with NaN looks valid; the op gives it a NaN
# scale. Check with ``compare`` in float32: it expects ``y`` unrounded.

# %%
# The op
# ------
#
# ``fused_quantize_rms_norm``, ``fused_quantize_rms_norm_residual`` and
# ``fused_quantize_swiglu`` are this gallery's ops, three in one file. They
# agree with ``rms_norm`` or ``swiglu``, followed by ``quantize``. To these
# kernels they add
#
# * scales that the caller gives, and scales that are powers of two;
# * several short rows in a program, and long rows of SwiGLU;
# * strides, for gate and up that are two halves of one tensor;
# * ``1 + weight``, which Gemma has;
# * NaN scales for rows with NaN, which ``tl.max`` and ``tl.maximum`` ignore.

from triton_gallery_ops.fused_quantize import (
    fused_quantize_rms_norm,
    fused_quantize_swiglu,
)
from triton_gallery_ops.quantize import quantize
from triton_gallery_ops.rms_norm import rms_norm

# %%
# The ops round to the nearest float8 in the interpreter, too. Near 448, float8
# numbers are 32 apart, so we allow an error of 16, and 0.01 as above.

if __name__ == "__main__":
    compare_groups(*fused_quantize_swiglu(gate, up, (1, 128)), exact, 16.01)
    x, weight = randn(20, 1000), randn(1000)
    op = fused_quantize_rms_norm(x, weight, EPS, (1, -1))  # a scale for a row
    compare(*op, norm_torch(x.double(), weight.double()), 16.01)

# %%
# The result
# ----------
#
# RMSNorm and a scale for each row, in bfloat16: ``2**28 / N`` rows. The table
# at the top has other shapes, and the op's page also SwiGLU and the residual.
# *Triton* is the op, *Triton, this page* is ``norm_kernel``, and *Triton, two
# ops* are ``rms_norm`` and ``quantize``, each in its own kernel. At 2880, 5120
# and 12288, at least a quarter of ``norm_kernel``'s block is masked off; the op
# splits such rows into two blocks.
#
# GB/s count the time on the GPU alone. The CPU time of a call is below the
# chart. With few rows the CPU time decides, unless a CUDA graph launches the
# kernel: with few rows and no graph, take ``norm_and_quantize`` if you need no
# option of the op.
#
# In the printed lines, *PyTorch's best* is the faster of PyTorch and
# ``torch.compile`` at each length. The last two count values that differ from
# those of two ops. Kernels may sum a row in different orders, so ``r`` may
# differ in its last bit. Then a ``y`` about half way between two bfloat16
# numbers may become either, and its value the neighboring float8 number.

SIZES = [1024, 2048, 2880, 4096, 5120, 7168, 12288, 16384]
ROW = 1, -1  # rows x columns that share a scale; -1 is all


def two_ops(x, weight):
    """Return values and scales of two kernels."""
    return quantize(rms_norm(x, weight, EPS), ROW)


OURS = {
    "Triton": partial(fused_quantize_rms_norm, eps=EPS, block_size=ROW),
    "Triton, this page": norm_and_quantize,
    "Triton, two ops": two_ops,
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(OURS, N)) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: FLOOR)
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="RMSNorm to float8, a scale for each row")
    best = wide[["PyTorch", "torch.compile"]].max(axis=1)
    others = {"norm_kernel": wide["Triton, this page"], "PyTorch's best": best}
    others |= {"two ops": wide["Triton, two ops"], "the roof": wide["Roof"]}
    for name, other in others.items():
        ratio = wide["Triton"] / other
        low, high = ratio.min(), ratio.max()
        print(f"the op: {low:.2f} to {high:.2f} times as fast as {name}")
    x, weight = randn(300, 5000).bfloat16(), randn(5000).bfloat16()
    expected, _ = two_ops(x, weight)
    for name in ("Triton", "Triton, this page"):
        nearly_equal(name, OURS[name](x, weight)[0], expected)

# %%
# Exercises
# ---------
#
# Fill a hole and run its cell: it says whether the answer is right. No GPU is
# needed.
#
# **1.** SwiGLU with groups of 128, in bfloat16: how many bytes per element
# does one kernel move, and how many do two, if the first stores ``y`` and the
# second reads it once? Count the scales, too.

in_one, in_two = 0, 0  # your numbers

if __name__ == "__main__":
    counted(in_one, in_two)

# %%
# **2.** In ``norm_kernel``, ``r`` needs the sum, ``y`` needs ``r``, and the
# maximum needs ``y``: one reduction waits for the other. But the whole row has
# the same ``r``. Write a kernel with the arguments of ``norm_kernel`` whose
# maximum needs no ``r``. (All is float32 here. In 16 bits, ``y`` would be
# rounded before its maximum.)

one_wait_kernel = None  # your kernel

if __name__ == "__main__":
    solved(one_wait_kernel)

# %%
# Answers
# -------
#
# **1.** A gate and an up are 2 + 2 bytes, a value is 1, and 128 share a scale,
# 4. Two kernels also write and read ``y``, 2 + 2 more.

if __name__ == "__main__":
    assert counted(5 + 4 / 128, 9 + 4 / 128)

# %%
# **2.** The largest ``abs(x * weight)``, times ``r``, is that of ``abs(y)``.


@triton.jit
def one_wait_answer_kernel(
    x_ptr,
    weight_ptr,
    values_ptr,
    scale_ptr,
    N,
    EPS: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = x * weight
    largest = tl.max(tl.abs(y), axis=0)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N + EPS)
    scale = tl.maximum(largest * r / MAX, 2.0**-126)
    values = (y * (r / scale)).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * N + cols, values, mask=mask)
    tl.store(scale_ptr + row, scale)


if __name__ == "__main__":
    assert solved(one_wait_answer_kernel)
