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
# [[tool.triton-gallery.step_through]]
# kernel = "norm_kernel"
# caption = """
# A row of x per program. y is the norm times the weight; its largest magnitude
# becomes 7 here. A row has 6 elements and a block has 8."""
# registers = ["x", "y", "largest", "scale"]
# call = "norm_and_quantize(x, weight, 0.0, torch.float32, 7.0)"
# start = [1, 0]
#
# [tool.triton-gallery.step_through.inputs]
# x = "torch.tensor([[2., -2, 2, 2, -2, 2], [0, 4, 0, -2, 2, 0]])"
# weight = "torch.tensor([1., 7, 4, 2, 6, -5])"
#
# [tool.triton-gallery.step_through.expected]
# values = "torch.tensor([[1., -7, 4, 2, -6, -5], [0, 7, 0, -1, 3, 0]])"
# ///
r"""
Fused RMSNorm and SwiGLU with FP8 quantization
==============================================

A linear layer in 8 bits wants its input in 8 bits, with scales. That input
comes from an RMSNorm or from a SwiGLU, so the kernel that computes it can also
quantize it, while the row is in registers. This is what inference engines do
between matrix products. It is not for training, where the norm in 16 bits is
needed again in the backward.

After this page you can

* count the bytes that a fused kernel saves, before you write it;
* quantize a row inside the kernel that computes it, with a scale for the row or
  for groups of 128;
* give fused and separate kernels the same results.
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

# %%
# In PyTorch
# ----------
#
# The norm divides each row by its root mean square and multiplies by a weight.
# *Quantize to FP8 and INT8* divides each row by a scale, which brings its
# largest magnitude to 448, the largest ``float8_e4m3fn``.

E4M3 = torch.float8_e4m3fn
EPS = 1e-6
generator = torch.Generator(device=DEVICE).manual_seed(0)
randn = partial(torch.randn, generator=generator, device=DEVICE)


def norm_torch(x, weight):
    """Return the RMSNorm of each row."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def in_torch(x, weight):
    """Return the norm of each row over its scale as float8, and the scales."""
    y = norm_torch(x, weight)
    scales = y.abs().amax(-1, keepdim=True).float() / 448
    return (y.float() * (1 / scales)).to(E4M3), scales


# %%
# One kernel needs the *floor*: it reads ``x`` and the weight, and writes values
# and scales. Of two, the first also writes the norm, and the second reads it.

if __name__ == "__main__":
    x, weight = randn(64, 4096).bfloat16(), randn(4096).bfloat16()
    with Traffic() as traffic:
        values, scales = in_torch(x, weight)
    floor = sum(t.nbytes for t in (x, weight, values, scales))
    moved = {"PyTorch": traffic.moved, "two kernels": floor + 2 * x.nbytes}
    for name, count in (moved | {"one kernel": floor}).items():
        print(
            f"{name:11} {count:10,} bytes, {count / floor:5.2f} times the floor"
        )

# %%
# The first kernel
# ----------------
#
# It is the kernel of an RMSNorm, up to where that would store ``y``. Instead,
# the row's largest magnitude gives the scale, and the row, still in registers,
# is multiplied by its inverse, which is finite for a row of zeros, too.
#
# ``y`` is rounded to the dtype of ``x``, though it is never stored. Without
# that line the result would be slightly more exact, but not that of two
# kernels. vLLM and TensorRT-LLM round there, too.


@triton.jit
def norm_kernel(
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
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)
    x = x.to(tl.float32)  # (BLOCK_N,)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N + EPS)
    y = x * r * weight  # (BLOCK_N,)
    # Rounded as if it were stored and loaded again
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    largest = tl.max(tl.abs(y), axis=0)
    scale = tl.maximum(largest / MAX, 2.0**-126)
    values = y * (1 / scale)  # (BLOCK_N,)
    if values_ptr.dtype.element_ty.is_int():  # known when it is compiled
        values = tl.floor(values + 0.5)  # a cast would cut the fraction off
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * N + offs, values, mask=mask)
    tl.store(scale_ptr + row, scale)


def norm_and_quantize(
    x, weight, eps=EPS, dtype=E4M3, MAX=448.0, kernel=norm_kernel, more=()
):
    """Return the norm of each row over its scale, and the scales."""
    M, N = x.shape
    assert 0 < N <= 16384  # a longer row would not fit into registers
    values = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(M, 1, dtype=torch.float32)
    BLOCK_N = triton.next_power_of_2(N)
    warps = max(1, BLOCK_N // 1024)
    tensors = x.contiguous(), weight, values, scales, *more
    kernel[(M,)](*tensors, N, eps, MAX, BLOCK_N, num_warps=warps)
    return values, scales


# %%
# Is it right?
# ------------
#
# Against float64. An integer may be off by half a step (the scale), and a
# little more for roundings. Values are ``int8`` here, as Triton's interpreter,
# which runs this page without a GPU, has a fault in casts to float8.


def compare(values, scales, exact):
    """Print and check how far int8 values are from exact numbers."""
    exact_scales = exact.abs().amax(-1, keepdim=True).float() / 127
    torch.testing.assert_close(scales, exact_scales, rtol=1e-5, atol=0)
    steps = ((values * scales.double() - exact).abs() / scales).max().item()
    print(f"largest error {steps:.4f} steps, allowed 0.501")
    assert steps <= 0.501


INT8 = {"dtype": torch.int8, "MAX": 127.0}

if __name__ == "__main__":
    x, weight = randn(20, 1000), randn(1000)
    exact = norm_torch(x.double(), weight.double())
    compare(*norm_and_quantize(x, weight, **INT8), exact)

# %%
# How fast?
# ---------
#
# Half a gigabyte of bfloat16. The *roof* copies as many bytes as the floor has.

ELEMENTS = 2**28  # far more than a GPU's caches hold
FLOOR = 3e-6 * ELEMENTS  # megabytes: two bytes read, one written


def calls(ours, N):
    """Return what is timed for rows of N, by name."""
    x, weight = randn(ELEMENTS // N, N).bfloat16(), randn(N).bfloat16()
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(in_torch, dynamic=False, fullgraph=True)
    ours = ours | {"PyTorch": in_torch, "torch.compile": fast}
    copied = torch.empty(3 * ELEMENTS // 2, dtype=torch.int8, device=DEVICE)
    roof = partial(torch.empty_like(copied).copy_, copied)
    made = {name: partial(op, x, weight) for name, op in ours.items()}
    return made | {"Roof": roof}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (1024, 4096, 16384):
        times = gpu_time(calls({"norm_kernel": norm_and_quantize}, N))
        rows[N] = {name: round(FLOOR / t[0]) for name, t in times.items()}
    print("GB/s", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# Add the residual, too
# ---------------------
#
# In a transformer a norm follows an addition: ``h = residual + x`` goes on to
# the next layer, and its norm into this one. A load, an addition and a store
# fuse that as well. ``h`` has to be written, as later layers read it, but it is
# not read again for the norm. Like ``y``, the sum is rounded first.


@triton.jit
def residual_kernel(
    x_ptr,
    weight_ptr,
    values_ptr,
    scale_ptr,
    residual_ptr,
    h_ptr,
    N,
    EPS: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * N + offs, mask=mask, other=0.0)
    h = x.to(tl.float32) + residual.to(tl.float32)  # (BLOCK_N,)
    h = h.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row * N + offs, h, mask=mask)
    h = h.to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(h * h, axis=0) / N + EPS)
    y = (h * r * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), axis=0) / MAX, 2.0**-126)
    values = y * (1 / scale)  # (BLOCK_N,)
    if values_ptr.dtype.element_ty.is_int():
        values = tl.floor(values + 0.5)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * N + offs, values, mask=mask)
    tl.store(scale_ptr + row, scale)


# Bytes an element: an addition, a norm and a quantization; and one kernel
SEPARATE, FUSED = (2 + 2 + 2) + (2 + 2) + (2 + 1), 2 + 2 + 2 + 1

if __name__ == "__main__":
    x, residual, weight = randn(20, 1000), randn(20, 1000), randn(1000)
    h = torch.empty_like(x)
    more = {"kernel": residual_kernel, "more": (residual, h)}
    values, scales = norm_and_quantize(x, weight, **INT8, **more)
    assert torch.equal(h, x + residual)
    assert (norm_and_quantize(0 * x, weight, **INT8)[0] == 0).all()
    compare(values, scales, norm_torch(h.double(), weight.double()))
    print(f"{SEPARATE} bytes an element in three kernels, {FUSED} in one")

# %%
# Groups of 128, and SwiGLU
# -------------------------
#
# What follows ``y`` does not depend on where ``y`` came from. So we put it into
# a function, here for groups: in the shape (groups, 128), a row has a maximum
# and a scale for each group.


@triton.jit
def store_groups(
    y,  # (BLOCK_N,)
    values_ptr,  # to the row
    scale_ptr,
    N,
    MAX: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a row of values, and a scale for each group."""
    BLOCK_N: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    y = tl.reshape(y, (GROUPS, GROUP))
    largest = tl.max(tl.abs(y), axis=1)  # (GROUPS,)
    scale = tl.maximum(largest / MAX, 2.0**-126)
    values = tl.reshape(y * (1 / scale)[:, None], (BLOCK_N,))
    if values_ptr.dtype.element_ty.is_int():
        values = tl.floor(values + 0.5)
    offs = tl.arange(0, BLOCK_N)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + offs, values, mask=offs < N)
    offs = tl.arange(0, GROUPS)
    tl.store(scale_ptr + offs, scale, mask=offs < tl.cdiv(N, GROUP))


# %%
# A norm with groups is ``norm_kernel`` as far as ``y``, and then this function.
# So is SwiGLU, the input of the second product in a feed-forward layer. It is
# ``silu(gate) * up``, where ``silu(x)`` is ``x * sigmoid(x)``.


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
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    gate = tl.load(gate_ptr + row * N + offs, mask=mask, other=0.0)
    gate = gate.to(tl.float32)
    up = tl.load(up_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up  # (BLOCK_N,)
    y = y.to(gate_ptr.dtype.element_ty).to(tl.float32)
    scale_row = scale_ptr + row * tl.cdiv(N, GROUP)
    store_groups(y, values_ptr + row * N, scale_row, N, MAX, GROUP)


def swiglu_and_quantize(gate, up, dtype=E4M3, MAX=448.0, GROUP=128):
    """Return the SwiGLU of rows, each group over its scale, and the scales."""
    M, N = gate.shape
    assert 0 < N <= 16384
    gate, up = gate.contiguous(), up.contiguous()
    values = torch.empty_like(gate, dtype=dtype)
    shape = M, triton.cdiv(N, GROUP)
    scales = torch.empty(shape, device=gate.device)
    BLOCK_N = max(GROUP, triton.next_power_of_2(N))
    warps = max(1, BLOCK_N // 1024)
    tensors = gate, up, values, scales
    constants = MAX, GROUP, BLOCK_N
    swiglu_kernel[(M,)](*tensors, N, *constants, num_warps=warps)
    return values, scales


if __name__ == "__main__":
    gate, up = randn(9, 896), randn(9, 896)  # seven groups in a row
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    values, scales = swiglu_and_quantize(gate, up, **INT8)
    compare(*(t.view(9, 7, -1) for t in (values, scales, exact)))

# %%
# The op
# ------
#
# ``fused_quantize_rms_norm``, ``fused_quantize_rms_norm_residual`` and
# ``fused_quantize_swiglu`` are this gallery's ops. To these kernels they add
# scales that the caller knows, powers of two, several short rows in a program,
# long rows of SwiGLU, strides such as those of a packed projection, Gemma's
# offset, and NaN. Their results are those of the gallery's ``rms_norm`` or
# ``swiglu``, followed by ``quantize``.

from triton_gallery_ops.fused_quantize import (
    fused_quantize_rms_norm,
    fused_quantize_swiglu,
)
from triton_gallery_ops.quantize import quantize
from triton_gallery_ops.rms_norm import rms_norm

# %%
# What it computes is right, too:

ROW, GROUPS = (1, -1), (1, 128)  # what shares a scale


def two_ops(x, weight):
    """Return values and scales of two kernels."""
    return quantize(rms_norm(x, weight, EPS), ROW)


if __name__ == "__main__":
    exact = norm_torch(x.double(), weight.double())
    op = fused_quantize_rms_norm(x, weight, EPS, ROW, torch.int8)
    compare(*op, exact)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    op = fused_quantize_swiglu(gate, up, GROUPS, torch.int8)
    compare(*(t.view(9, 7, -1) for t in (*op, exact)))

# %%
# On a GPU the order of a sum may differ. Then a ``y`` half way between two
# numbers of bfloat16 may become either, and its value the next float8 number.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, weight = randn(300, 5000).bfloat16(), randn(5000).bfloat16()
    values, _ = fused_quantize_rms_norm(x, weight, EPS, ROW)
    expected, _ = two_ops(x, weight)
    values, expected = values.float(), expected.float()
    torch.testing.assert_close(values, expected, rtol=1 / 8, atol=2**-8)
    print(f"{(values != expected).float().mean():.1e} of the values differ")

# %%
# The result
# ----------
#
# RMSNorm and a scale for each row, in bfloat16. In the chart, *Triton* is the
# op, *Triton, this page* is ``norm_kernel``, and *Triton, two ops* are
# ``rms_norm`` and ``quantize``, each in its own kernel.

SIZES = [1024, 2048, 2880, 4096, 5120, 7168, 12288, 16384]

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
    others = {"two ops": wide["Triton, two ops"], "PyTorch's best": best}
    for name, other in (others | {"the roof": wide["Roof"]}).items():
        ratio = wide["Triton"] / other
        print(f"the op: {ratio.min():.2f} to {ratio.max():.2f} of {name}")

# %%
# Exercises
# ---------
#
# Fill a hole and run its cell: it says whether the answer is right. No GPU is
# needed.
#
# **1.** SwiGLU with groups of 128, in 16 bits: how many bytes an element does
# one kernel move, and how many do two, if the first stores ``y`` and the second
# reads it once? Count the scales, too.

in_one, in_two = None, None  # your numbers

MOVED = {"in one": 2 + 2 + 1 + 4 / 128, "in two": 2 + 2 + 2 + 2 + 1 + 4 / 128}


def counted(*numbers):
    """Print whether these are the bytes an element, in one kernel and two."""
    right = numbers == (*MOVED.values(),)
    print(
        "not solved yet" if None in numbers else "right" if right else "wrong"
    )
    return right


if __name__ == "__main__":
    counted(in_one, in_two)

# %%
# **2.** In ``norm_kernel`` all warps wait twice: for the sum, and for the
# maximum, which needs the sum. But ``r`` is one number for the row. Write a
# kernel with the arguments of ``norm_kernel`` that finds the maximum without
# ``r``, so that one reduction follows the other at once. (With ``y`` in 16
# bits, the scale would no longer be that of the rounded row.)

one_wait_kernel = None  # your kernel


def solved(kernel):
    """Print whether a kernel makes the values and scales of norm_kernel."""
    if kernel is None:
        print("not solved yet")
        return False
    x, weight = randn(20, 1000), randn(1000)
    values, scales = norm_and_quantize(x, weight, **INT8, kernel=kernel)
    expected, expected_scales = norm_and_quantize(x, weight, **INT8)
    # A number half way between two may become either.
    right = (values.float() - expected.float()).abs().max().item() <= 1
    right = right and torch.allclose(scales, expected_scales)
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    solved(one_wait_kernel)

# %%
# Answers
# -------
#
# **1.** ``gate`` and ``up`` are read, 2 + 2 bytes, and a value is written, 1
# byte. A scale of 4 bytes is shared by 128. In two kernels ``y`` is written and
# read, 2 + 2 more.

if __name__ == "__main__":
    assert counted(5 + 4 / 128, 9 + 4 / 128)

# %%
# **2.** The largest ``abs(x * weight)`` times ``r`` is the largest ``abs(y)``,
# but for a rounding.


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
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = x * weight
    squares = tl.sum(x * x, axis=0)
    largest = tl.max(tl.abs(y), axis=0)
    r = tl.rsqrt(squares / N + EPS)
    scale = tl.maximum(largest * r / MAX, 2.0**-126)
    values = tl.floor(y * (r / scale) + 0.5)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * N + offs, values, mask=mask)
    tl.store(scale_ptr + row, scale)


if __name__ == "__main__":
    assert solved(one_wait_answer_kernel)
