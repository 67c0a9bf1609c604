# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply float8 matrices that have a scale for each block, as DeepSeek-V3
# does, and see how block scales keep an outlier from spoiling other numbers."""
# dtypes = ["float8_e4m3fn", "float8_e5m2"]
# backward = false
# deterministic = true
# longer = "the product, and the ops that it is made of"
#
# [[tool.triton-gallery.step_through]]
# kernel = "block_kernel"
# caption = """
# Two programs compute a tile of the result each. Here a block is four numbers
# wide, so K has two blocks: each product of two blocks is scaled, then added.
# The tile of w is transposed. The tile's fourth row is past the end of x, and
# the second tile's last two columns are past the end of w: they are masked."""
# registers = ["x", "w", "part", "scale", "acc"]
# call = "product(x, w, scale_x, scale_w, BLOCK_M=4, BLOCK_N=4, GROUP=4)"
# expected = { y = "exact(x, w, scale_x, scale_w, GROUP=4)" }
# start = [0, 7]
#
# [tool.triton-gallery.not_for]
# _block_scaled_matmul_hopper_kernel = [
#   "sm_80", "sm_89", "sm_100", "sm_120", "gfx942"
# ]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(-2, 3, 3, 8)"
# w = "integers(-3, 3, 6, 8).flip(0)"
# scale_x = "integers(1, 4, 3, 2)"
# scale_w = "integers(2, 6, 2, 2).flip(1)"
# ///
r"""
FP8 with 1 x 128 and 128 x 128 block scales
===========================================

DeepSeek-V3 multiplies float8 matrices with a scale for each group of 128
numbers of a token, and one for each square of 128 x 128 of a weight. An outlier
then spoils only the numbers of its own block. Unless outliers are many thousand
times the rest, a scale for each row is almost as exact, and simpler: see
``fp8_matmul.py``.

After this page you can

* multiply float8 matrices with block scales, and say why each block of K is
  scaled before it is added;
* say what an outlier costs with one scale and with many;
* load tiles through the copy engine, and compare with cuBLAS.
"""

# sphinx_gallery_tags = ["matmul", "float8", "quantization", "compute bound"]
import math
import os
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table

# %%
# In PyTorch
# ----------
#
# ``x`` is (M, K) and has a scale for each *group* of 128 in a row. The weight
# ``w`` is (N, K) and has a scale for each *square* of 128 x 128. Both are
# *blocks*: a float8 number stands for itself times the scale of its block.
# PyTorch has the product as ``torch.nn.functional.scaled_mm``. Our reference,
# ``exact``, computes it in float64. The run prints how many bytes scales add:

E4M3, GROUP = torch.float8_e4m3fn, 128
generator = torch.Generator(device=DEVICE).manual_seed(0)


def exact(x, w, scale_x, scale_w, GROUP=GROUP):
    """Return the product in float64."""
    x = x.double() * scale_x.repeat_interleave(GROUP, 1)
    scale_w = scale_w.repeat_interleave(GROUP, 0)[: len(w)]
    w = w.double() * scale_w.repeat_interleave(GROUP, 1)
    return x @ w.T


def make_inputs(M, N, K):
    """Return x (M, K) and w (N, K) in float8, and their scales."""
    kind = {"generator": generator, "device": DEVICE}
    x = torch.randn(M, K, **kind).to(E4M3)
    w = torch.randn(N, K, **kind).to(E4M3)
    scale_x = torch.rand(M, K // GROUP, **kind) + 0.5
    scale_w = torch.rand(triton.cdiv(N, GROUP), K // GROUP, **kind) + 0.5
    return x, w, scale_x, scale_w


if __name__ == "__main__":
    x, w, *scales = make_inputs(8192, 2048, 4096)
    share = sum(s.nbytes for s in scales) / (x.nbytes + w.nbytes)
    print(f"{2e-9 * 8192 * w.numel():.0f} GFLOP; scales add {share:.1%}")

# %%
# The first kernel
# ----------------
#
# The scale of a row is the same for all terms of the sum over K, so it can wait
# until the sum is done. The scale of a block is not:
#
# .. math:: y_{mn} = \sum_{\text{block } b} s_{mb} \, t_{nb}
#    \sum_{k \in b} x_{mk} w_{nk}.
#
# Here :math:`s` is the scale of ``x``, and :math:`t` that of ``w``, the same
# for 128 rows n. So ``tl.dot``, which multiplies tiles on the tensor cores,
# computes the inner sum, over one block. The program multiplies it by both
# scales and adds it to ``acc`` in float32. BLOCK_N divides 128, so the rows of
# ``w`` in a tile lie in one square and share its scale.


@triton.jit
def block_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    tl.static_assert(GROUP % BLOCK_N == 0)
    # In int32 the offset of a row would overflow past element 2**31.
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    off_n = tl.program_id(axis=1).to(tl.int64) * BLOCK_N
    offs_n = off_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, GROUP)  # (GROUP,)
    mask_m = offs_m < M
    mask_n = offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]  # (BLOCK_M, GROUP)
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]  # (GROUP, BLOCK_N)
    groups = K // GROUP
    scale_w_ptr += (off_n // GROUP) * groups
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        start = group * GROUP
        x = tl.load(x_ptrs + start, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs + start, mask=mask_n[None, :], other=0.0)
        part = tl.dot(x, w)  # (BLOCK_M, BLOCK_N), of this block alone
        scale_x_ptrs = scale_x_ptr + offs_m * groups + group  # (BLOCK_M,)
        scale = tl.load(scale_x_ptrs, mask=mask_m, other=0.0)
        scale *= tl.load(scale_w_ptr + group)  # one for all columns
        acc += part * scale[:, None]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)  # y's dtype


def product(
    x, w, scale_x, scale_w, dtype=torch.float32, kernel=block_kernel, **sizes
):
    """Return the product of contiguous matrices with their scales."""
    sizes = {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP": GROUP} | sizes
    (M, K), N, groups = x.shape, len(w), x.shape[1] // sizes["GROUP"]
    squares = triton.cdiv(N, sizes["GROUP"])
    assert w.shape[1] == K == groups * sizes["GROUP"]
    assert scale_x.numel() == M * groups  # by columns in exercise 1
    assert scale_w.shape in ((squares, groups), (N, groups))  # exercise 2
    assert all(t.is_contiguous() for t in (x, w, scale_x, scale_w))
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    grid = triton.cdiv(M, sizes["BLOCK_M"]), triton.cdiv(N, sizes["BLOCK_N"])
    # 8 warps of 32 threads: each thread holds 64 of a tile's 128 x 128 sums.
    kernel[grid](x, w, scale_x, scale_w, y, M, N, K, **sizes, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# The tensor cores of Hopper (H100, H200) keep fewer bits of a sum of float8
# products than float32 does. Terms can cancel, so we compare the error with the
# sum of their magnitudes, and allow :math:`2^{-12}` of it: a wrong scale would
# err far more. The tensor cores add only the 128 terms of a block, and float32
# adds the blocks, so the bound need not grow with K.


def show_error(product):
    """Print the largest error, as a part of the sum of magnitudes."""
    x, w, *scales = make_inputs(130, 200, 384)
    terms = exact(x.float().abs(), w.float().abs(), *scales)
    off = (product(x, w, *scales) - exact(x, w, *scales)) / terms
    print(f"largest error {off.abs().max():.1e}, allowed {2**-12:.1e}")
    torch.testing.assert_close(off, 0 * off, rtol=0, atol=2**-12)


if __name__ == "__main__":
    show_error(product)

# %%
# How fast?
# ---------
#
# Rates count :math:`2MNK` operations; ``y`` is bfloat16. *cuBLAS* takes the
# same scales, stored by columns; the transposition is not timed. *cuBLAS, per
# row* has a scale for each row of ``x`` and ``w``, *cuBLAS, bfloat16* has none.


def show_rates(ours):
    """Print TFLOP/s at three sizes."""
    columns = {}
    for N in (1024, 4096, 8192):
        times = gpu_time(calls(ours, N, N, N))
        rates = {who: round(2e-9 * N**3 / t[0]) for who, t in times.items()}
        columns[f"M = N = K = {N}"] = rates
    print("TFLOP/s", pd.DataFrame(columns).to_string(), sep="\n")


def cublas(x, w, scale_x, scale_w):
    """Return a call of cuBLAS's product, with the scales in its order."""
    scale_w = torch.nn.functional.pad(scale_w, (0, -scale_w.shape[1] % 4))
    kinds = torch.nn.functional.ScalingType
    scale_x = scale_x.T.contiguous().T, kinds.BlockWise1x128
    scale_w = scale_w.T, kinds.BlockWise128x128
    return partial(torch.nn.functional.scaled_mm, x, w.T, *scale_x, *scale_w)


def calls(ours, M, N, K):
    """Return what is timed for a product, by name."""
    x, w, *scales = make_inputs(M, N, K)
    timed = {name: partial(f, x, w, *scales) for name, f in ours.items()}
    if torch.cuda.get_device_capability()[0] == 9:  # PyTorch has it there
        timed["cuBLAS"] = cublas(x, w, *scales)
    rows = torch.rand(M, 1, device=DEVICE), torch.rand(1, N, device=DEVICE)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    per_row = partial(torch._scaled_mm, x, w.T, *rows, **options)
    plain = partial(torch.matmul, x.bfloat16(), w.bfloat16().T)
    return timed | {"cuBLAS, per row": per_row, "cuBLAS, bfloat16": plain}


OURS = {"block_kernel": partial(product, dtype=torch.bfloat16)}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# cuBLAS shows the price of block scales: at the larger sizes, it is slower with
# them than with a scale for each row.

# %%
# What does an outlier cost?
# --------------------------
#
# We multiply one column of ``x`` by a factor and divide the same column of
# ``w`` by it, so the exact product stays the same. Then we round both to
# float8, with one scale, with a scale for each row, and with block scales. The
# products are computed in float64, so all of the error comes from rounding.


def rounded(x, rows, columns):
    """Round to float8, a scale for each block; return it in float64."""
    M, K = x.shape
    blocks = x.view(M // rows, rows, K // columns, columns)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448  # e4m3's largest
    return ((blocks / scale).to(E4M3).double() * scale).view(M, K)


cpu = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
x, w = torch.randn(2, 256, 4096, **cpu)


def error(factor, of_x, of_w):
    """Return the relative error, with blocks of these shapes."""
    columns = torch.ones(4096, dtype=torch.float64)
    columns[0] = factor
    y = rounded(x * columns, *of_x) @ rounded(w / columns, *of_w).T
    return ((y - x @ w.T).norm() / (x @ w.T).norm()).item()


if __name__ == "__main__":
    factors = pd.Index([4**n for n in (0, 6, 7, 8, 10)], name="factor")
    table = pd.DataFrame(index=factors)
    for name, of_x, of_w in (
        ("one scale", (256, 4096), (256, 4096)),
        ("a scale for each row", (1, 4096), (1, 4096)),
        ("1 x 128 and 128 x 128", (1, 128), (128, 128)),
    ):
        table[name] = [error(factor, of_x, of_w) for factor in factors]
    print("relative error", table.to_string(float_format="%.3f"), sep="\n")

# %%
# With a factor of 1 there is no outlier. This float8 keeps its precision from
# :math:`2^{-6}` to 448, a factor of 28672, so 4096 costs hardly anything. With
# a larger one, the scale that keeps the outlier from overflow rounds the rest
# of its block of ``x`` to zero. In ``w``, the divided column is the small one,
# and rounds to zero. With one scale and the largest factor, hardly anything is
# left: a result of zeros has an error of 1. Block scales lose at most one group
# of 128 in each row, 3 % of K. The error is a ratio of norms, so that makes it
# about :math:`\sqrt{0.03} = 0.17` at most.

# %%
# What does the copy engine bring?
# --------------------------------
#
# In ``block_kernel``, threads compute addresses and masks besides the scaling.
# The GPU's *copy engine* can do this for them: it moves whole tiles between
# memory and a multiprocessor. A *tensor descriptor* tells it the address of a
# matrix, its shape and the shape of a tile (``tensor_descriptors.py``). Past
# the end of a matrix it loads zeros and stores nothing, so only the scales need
# a mask. Each row must begin at a multiple of 16 bytes: for ``y`` in bfloat16,
# N is a multiple of 8.


@triton.jit
def descriptor_kernel(
    x_desc, w_desc, y_desc, scale_x_ptr, scale_w_ptr, GROUP: tl.constexpr
):
    # A descriptor's block_shape is a constant of compilation, its shape is not.
    BLOCK_M: tl.constexpr = y_desc.block_shape[0]
    BLOCK_N: tl.constexpr = y_desc.block_shape[1]
    tl.static_assert(x_desc.block_shape[1] == GROUP)
    tl.static_assert(GROUP % BLOCK_N == 0)  # one scale of w for a tile
    # Descriptors take indices in int32: the copy engine computes the offsets.
    off_m = tl.program_id(axis=0) * BLOCK_M
    off_n = tl.program_id(axis=1) * BLOCK_N
    offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    mask = offs_m < y_desc.shape[0]
    groups = x_desc.shape[1] // GROUP
    scale_x_ptrs = scale_x_ptr + offs_m.to(tl.int64) * groups
    scale_w_ptr += (off_n // GROUP).to(tl.int64) * groups
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        x = x_desc.load([off_m, group * GROUP])  # (BLOCK_M, GROUP)
        w = w_desc.load([off_n, group * GROUP]).T  # (GROUP, BLOCK_N)
        scale = tl.load(scale_x_ptrs + group, mask=mask, other=0.0)
        scale *= tl.load(scale_w_ptr + group)
        acc += tl.dot(x, w) * scale[:, None]
    y_desc.store([off_m, off_n], acc.to(y_desc.dtype))


def descriptor_product(x, w, scale_x, scale_w, dtype=torch.float32):
    """Return the product, as product does."""
    (M, K), N = x.shape, len(w)
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    assert w.shape[1] == K
    assert K % GROUP == 0
    assert N * y.element_size() % 16 == 0  # where the rows of y begin
    grid = triton.cdiv(M, 64), triton.cdiv(N, GROUP)
    assert scale_x.shape == (M, K // GROUP)
    assert scale_w.shape == (grid[1], K // GROUP)
    assert all(t.is_contiguous() for t in (scale_x, scale_w))
    rows = (x, 64), (w, GROUP), (y, 64)  # half the rows and warps of product
    tiles = [TensorDescriptor.from_tensor(t, [n, GROUP]) for t, n in rows]
    stages = 4 if dtype.itemsize == 2 else 3  # fewer where y takes more memory
    descriptor_kernel[grid](*tiles, scale_x, scale_w, GROUP, num_stages=stages)
    return y


if __name__ == "__main__":
    show_error(descriptor_product)

# %%
# The same sizes, measured again. Compare the second row with the others:

OURS["descriptor_kernel"] = partial(descriptor_product, dtype=torch.bfloat16)

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# The tile changed, too. A program waits for each product, and then scales it.
# With half the tile, a multiprocessor has room for two programs: one can scale
# as the other multiplies. No figure here separates this from the copy engine.
# *cuBLAS* shows what is possible. On Hopper, a program of the op does both.

# %%
# The op
# ------
#
# ``block_scaled_matmul(x, weight, scale_x, scale_weight)`` is this gallery's
# op, for Hopper and NVIDIA's later GPUs. It has one program for each
# multiprocessor, which computes several tiles (``persistent_matmul.py``), with
# smaller tiles for few rows, and takes scales that are not contiguous.
#
# On later GPUs, a program computes as ``descriptor_kernel`` does. On Hopper,
# the kernel is in Gluon, a lower level of Triton (``gluon_matmul.py``): the
# warps that multiply form up to three teams of four. A team computes 64 rows of
# a tile and waits for no other, so one can scale while the tensor cores
# multiply for another.

from triton_gallery_ops.block_scaled_matmul import block_scaled_matmul

# %%
# The result
# ----------
#
# The sizes (M, N, K) are of layers of models. *Triton* is the op, and *Triton,
# this page* is ``descriptor_kernel``. The dots of a size are below its label;
# farther right is faster. The table divides the op's rate by each of cuBLAS's:
# above 1, the op is faster.

LAYERS = [
    (64, 7168, 2048),
    (1024, 6144, 4096),
    (4096, 2112, 7168),
    (4096, 7168, 16384),
    (8192, 8192, 8192),
    (16384, 28672, 4096),
]


def work(layer):
    return 2e-9 * math.prod(map(int, layer.split(", ")))


if __name__ == "__main__" and DEVICE.type == "cuda":
    by_descriptors = OURS["descriptor_kernel"]
    ours = {"Triton": block_scaled_matmul, "Triton, this page": by_descriptors}
    times = {}
    for sizes in LAYERS:
        timed = calls(ours, *sizes)
        del timed["cuBLAS, per row"]  # another product
        times[", ".join(map(str, sizes))] = gpu_time(timed)
    results = rate_table(times, "M, N, K", "TFLOP/s", work)
    print(results.to_string())
    wide = results.pivot(index="M, N, K", columns="series", values="TFLOP/s")
    wide = wide.loc[list(times)]
    wide.plot.bar(rot=20, ylabel="TFLOP/s")
    plt.tight_layout()
    verdict = pd.DataFrame(index=wide.index)
    for other in wide.columns.drop(list(ours)):
        verdict[f"op / {other}"] = (wide["Triton"] / wide[other]).round(2)
    best = wide.drop(columns="Triton, this page").idxmax(axis=1)
    verdict["fastest"] = best.replace("Triton", "op")
    print(verdict.to_string())

# %%
# On Hopper, take what the last column names for sizes like yours (``cublas``,
# in the fold of *How fast?*, shows the call). At the first three sizes, a call
# of the op takes longer on the CPU (the line below the chart) than on the GPU,
# and longer than a call of cuBLAS: there, its GPU time counts only in a CUDA
# graph (``cuda_graphs.py``). On other GPUs, PyTorch has no product with these
# scales and raises an error.

# %%
# Exercises
# ---------
#
# Write a kernel with the arguments of ``block_kernel`` and run the cell: it
# says whether the kernel is right. No GPU is needed.
#
# **1.** Read the scales of ``x`` by columns, as cuBLAS does: ``scale_x`` is a
# contiguous matrix of (K / 128, M). Then the scales that a program loads lie
# side by side.

column_kernel = None  # your kernel


def check(kernel, expected, *inputs):
    """Say whether a kernel stores what is expected, to 1 %."""
    if kernel is None:
        return "not solved yet"
    y = product(*inputs, kernel=kernel).double()
    return "right" if torch.allclose(y, expected, 1e-2, 1e-2) else "wrong"


if __name__ == "__main__":
    a, b, scale_a, scale_b = make_inputs(130, 72, 256)
    expected = exact(a, b, scale_a, scale_b)
    by_columns = a, b, scale_a.T.contiguous(), scale_b
    print(check(column_kernel, expected, *by_columns))

# %%
# **2.** In the backward pass, the gradient of a weight is a sum over tokens.
# Both matrices then have a scale for each group of 128 along the sum:
# ``scale_w`` is (N, K / 128). What changes in the loop?

groups_kernel = None  # your kernel

if __name__ == "__main__":
    scale_groups = torch.rand(72, 2, generator=generator, device=DEVICE)
    in_groups = a, b, scale_a, scale_groups
    scaled = b.double() * scale_groups.repeat_interleave(128, 1)
    ones = torch.ones(1, 2, device=DEVICE)  # scaled has its scales in it
    expected_groups = exact(a, scaled, scale_a, ones)
    print(check(groups_kernel, expected_groups, *in_groups))

# %%
# Answers
# -------
#
# Both keep offsets in int32, which is enough for the check.
#
# **1.** One address changes: a group is a row of the scales now.


@triton.jit
def column_answer_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)
    off_n = tl.program_id(axis=1) * BLOCK_N
    offs_n = off_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, GROUP)  # (GROUP,)
    mask_m = offs_m < M
    mask_n = offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        start = group * GROUP
        x = tl.load(x_ptrs + start, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs + start, mask=mask_n[None, :], other=0.0)
        scale_x_ptrs = scale_x_ptr + group * M + offs_m  # (BLOCK_M,)
        scale = tl.load(scale_x_ptrs, mask=mask_m, other=0.0)
        scale *= tl.load(scale_w_ptr + (off_n // GROUP) * groups + group)
        acc += tl.dot(x, w) * scale[:, None]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc, mask=mask_m[:, None] & mask_n[None, :])


if __name__ == "__main__":
    answer = check(column_answer_kernel, expected, *by_columns)
    print(answer)
    assert answer == "right"

# %%
# **2.** The scale of ``w`` becomes a vector, one for each column of the tile,
# with the mask of the columns.


@triton.jit
def groups_answer_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, GROUP)  # (GROUP,)
    mask_m = offs_m < M
    mask_n = offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        start = group * GROUP
        x = tl.load(x_ptrs + start, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs + start, mask=mask_n[None, :], other=0.0)
        scale_x_ptrs = scale_x_ptr + offs_m * groups + group  # (BLOCK_M,)
        scale_w_ptrs = scale_w_ptr + offs_n * groups + group  # (BLOCK_N,)
        of_x = tl.load(scale_x_ptrs, mask=mask_m, other=0.0)
        of_w = tl.load(scale_w_ptrs, mask=mask_n, other=0.0)
        acc += tl.dot(x, w) * of_x[:, None] * of_w[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc, mask=mask_m[:, None] & mask_n[None, :])


if __name__ == "__main__":
    answer = check(groups_answer_kernel, expected_groups, *in_groups)
    print(answer)
    assert answer == "right"
