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
# Two programs, a tile of the result each. Here a block is four numbers wide, so
# two blocks fit into K: each of the two products gets its scales, then it is
# added. The last column is masked."""
# registers = ["x", "w", "part", "scale", "acc"]
# call = "product(x, w, scale_x, scale_w, BLOCKS=SMALL)"
# expected = { y = "exact(x, w, scale_x, scale_w, GROUP=4)" }
# start = [1, 0]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(-2, 3, 4, 8)"
# w = "integers(-2, 3, 7, 8)"
# scale_x = "integers(1, 4, 4, 2)"
# scale_w = "integers(1, 4, 2, 2)"
# ///
r"""
FP8 with 1 x 128 and 128 x 128 block scales
===========================================

DeepSeek-V3 multiplies float8 matrices with a scale for each group of 128
numbers of a token, and one for each square of 128 x 128 of a weight. An outlier
then spoils the numbers of its own block, and no others. If your matrices have
no outliers, a scale for each row is as exact, and simpler: see
``fp8_matmul.py``.

After this page you can

* multiply float8 matrices with block scales, and say why each block of K is
  scaled before it is added;
* say what an outlier costs with one scale and with many;
* give the tiles to the copy engine, and compare with cuBLAS.
"""

# sphinx_gallery_tags = ["matmul", "float8", "quantization", "compute bound"]
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
# blocks. PyTorch has the product as ``scaled_mm``. Written out, in float64:

E4M3 = torch.float8_e4m3fn
generator = torch.Generator(device=DEVICE).manual_seed(0)


def exact(x, w, scale_x, scale_w, GROUP=128):
    """Return the product in float64."""
    x = x.double() * scale_x.repeat_interleave(GROUP, 1)
    scale_w = scale_w.repeat_interleave(GROUP, 0)[: len(w)]
    w = w.double() * scale_w.repeat_interleave(GROUP, 1)
    return x @ w.T


def random(M, N, K):
    """Return x (M, K) and w (N, K) in float8, and their scales."""
    kind = {"generator": generator, "device": DEVICE}
    x, w = (torch.randn(rows, K, **kind).to(E4M3) for rows in (M, N))
    shapes = (M, K // 128), (triton.cdiv(N, 128), K // 128)
    return x, w, *(torch.rand(shape, **kind) + 0.5 for shape in shapes)


if __name__ == "__main__":
    x, w, *scales = random(8192, 2048, 4096)
    print(f"{2e-9 * 8192 * w.numel():.0f} GFLOP, {x.nbytes + w.nbytes:,} bytes")
    print(f"of float8, {sum(s.nbytes for s in scales):,} bytes of scales")

# %%
# The first kernel
# ----------------
#
# A scale of a row is the same for all terms of the sum over K, so it can wait
# until the sum is done. A scale of a block is not:
#
# .. math:: y_{mn} = \sum_{\text{block } b} s_{mb} \, t_{nb}
#    \sum_{k \in b} x_{mk} w_{nk}.
#
# So the tensor cores add up one block, the inner sum. Threads multiply it by
# both scales and add it to ``acc`` in float32. BLOCK_N divides 128, so that a
# tile stays within one square of ``w``, and needs one scale of ``w`` at a time.


@triton.jit
def block_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # GROUP is a multiple of it
    GROUP: tl.constexpr,
):
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    off_n = tl.program_id(axis=1).to(tl.int64) * BLOCK_N
    offs_n = off_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs_n < N  # (BLOCK_N,)
    offs_k = tl.arange(0, GROUP)  # (GROUP,)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        x = tl.load(x_ptrs + group * GROUP)  # (BLOCK_M, GROUP)
        w = tl.load(w_ptrs + group * GROUP, mask=mask[None, :], other=0.0)
        part = tl.dot(x, w)  # (BLOCK_M, BLOCK_N), of this block alone
        scale = tl.load(scale_x_ptr + offs_m * groups + group)  # (BLOCK_M,)
        scale *= tl.load(scale_w_ptr + off_n // GROUP * groups + group)
        acc += part * scale[:, None]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask[None, :])


LARGE, SMALL = (128, 128, 128), (4, 4, 4)


def product(x, w, *scales, BLOCKS=LARGE, dtype=None, kernel=block_kernel):
    """Return the product of contiguous matrices with their scales."""
    (M, K), N = x.shape, w.shape[0]
    assert (M % BLOCKS[0], K % BLOCKS[2]) == (0, 0)
    y = torch.empty(M, N, device=x.device, dtype=dtype or torch.float32)
    grid = (M // BLOCKS[0], triton.cdiv(N, BLOCKS[1]))
    kernel[grid](x, w, *scales, y, N, K, *BLOCKS, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# Hopper's tensor cores keep fewer bits of a sum of float8 products than float32
# has, so we allow :math:`2^{-12}` of the terms' magnitudes. Here they add up
# only 128 terms at a time, however large K is.


def show_error(product):
    """Print the largest error, as a part of the sum of magnitudes."""
    x, w, *scales = random(128, 200, 384)
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
# Beside cuBLAS with the same scales, with scales of rows, and in bfloat16.
# Rates count :math:`2MNK` operations, and M = N = K. cuBLAS wants scales stored
# by columns, those of ``w`` padded to a multiple of four; that is not timed.


def cublas(x, w, scale_x, scale_w):
    """Return a call of cuBLAS's product, with the scales in its order."""
    scale_w = torch.nn.functional.pad(scale_w, (0, -scale_w.shape[1] % 4))
    kinds = torch.nn.functional.ScalingType
    scale_x = scale_x.T.contiguous().T, kinds.BlockWise1x128
    scale_w = scale_w.T, kinds.BlockWise128x128
    return partial(torch.nn.functional.scaled_mm, x, w.T, *scale_x, *scale_w)


def calls(ours, M, N, K):
    """Return what is timed for a product, by name."""
    x, w, *scales = random(M, N, K)
    timed = {name: partial(f, x, w, *scales) for name, f in ours.items()}
    timed["cuBLAS"] = cublas(x, w, *scales)
    rows = torch.rand(M, 1, device=DEVICE), torch.rand(1, N, device=DEVICE)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    per_row = partial(torch._scaled_mm, x, w.T, *rows, **options)
    plain = partial(torch.matmul, x.bfloat16(), w.bfloat16().T)
    return timed | {"cuBLAS, per row": per_row, "cuBLAS, bfloat16": plain}


def show_rates(ours):
    """Print TFLOP/s at three sizes."""
    rows = {}
    for N in (1024, 4096, 8192):
        times = gpu_time(calls(ours, N, N, N))
        rows[N] = {name: round(2e-9 * N**3 / t[0]) for name, t in times.items()}
    print("TFLOP/s", pd.DataFrame(rows).T.to_string(), sep="\n")


in_bfloat16 = partial(product, dtype=torch.bfloat16)

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates({"block_kernel": in_bfloat16})

# %%
# What does an outlier cost?
# --------------------------
#
# We multiply one column of ``x`` by a factor and divide the same column of
# ``w`` by it. The exact product does not change. Then we round both matrices
# to float8: with one scale, with a scale for each row, and with block scales.
# The products are computed in float64, so all of the error comes from rounding.


def rounded(x, rows, columns):
    """Round to float8, a scale for each block; return it in float64."""
    M, K = x.shape
    blocks = x.view(M // rows, rows, K // columns, columns)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448  # e4m3's largest
    return ((blocks / scale).to(E4M3).double() * scale).view(M, K)


ROWS, K = 256, 4096
BLOCKS_OF = {  # of x and of w
    "one scale": ((ROWS, K), (ROWS, K)),
    "a scale for each row": ((1, K), (1, K)),
    "1 x 128 and 128 x 128": ((1, 128), (128, 128)),
}

if __name__ == "__main__":
    kind = {"generator": generator, "device": DEVICE, "dtype": torch.float64}
    x, w = (torch.randn(ROWS, K, **kind) for _ in range(2))
    y = x @ w.T
    rows = {}
    for factor in (4**n for n in range(11)):
        columns = torch.ones(K, dtype=torch.float64, device=DEVICE)
        columns[0] = factor
        rows[factor] = {
            name: ((a @ b.T - y).norm() / y.norm()).item()
            for name, (of_x, of_w) in BLOCKS_OF.items()
            for a in [rounded(x * columns, *of_x)]
            for b in [rounded(w / columns, *of_w)]
        }
    table = pd.DataFrame(rows).T
    print(
        "relative error by factor",
        table.to_string(float_format="%.3f"),
        sep="\n",
    )
    table.plot(logx=True, logy=True, marker="o", ylabel="relative error")
    plt.xlabel("factor")
    plt.tight_layout()

# %%
# Float8 has an exponent, so an outlier up to 4096 times the rest costs hardly
# anything. A larger one does: the scale that keeps it from overflow turns the
# other numbers of its block into zeros. With one scale, these are all numbers
# of the matrix, and with a scale for each row, all of the row. With block
# scales, they are one group of 128 in each row, and the rest of the sum keeps
# its precision.

# %%
# What does the copy engine bring?
# --------------------------------
#
# In ``block_kernel``, threads compute the addresses and the mask of each tile,
# beside the scaling. With a *tensor descriptor* (``tensor_descriptors.py``),
# the copy engine does. Past the end of a matrix it fills with zeros, so only
# the scales need a mask, and M and N may be any number. K has to be a multiple
# of 128 here, and rows have to begin at multiples of 16 bytes.


@triton.jit
def descriptor_kernel(
    x_desc, w_desc, y_desc, scale_x_ptr, scale_w_ptr, GROUP: tl.constexpr
):
    BLOCK_M: tl.constexpr = y_desc.block_shape[0]
    BLOCK_N: tl.constexpr = y_desc.block_shape[1]
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
    """Return the product, as product does, for any M."""
    M, N = x.shape[0], w.shape[0]
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    tiles = [TensorDescriptor.from_tensor(t, [128, 128]) for t in (x, w, y)]
    grid = (triton.cdiv(M, 128), triton.cdiv(N, 128))
    descriptor_kernel[grid](*tiles, scale_x, scale_w, GROUP=128, num_warps=8)
    return y


by_descriptors = partial(descriptor_product, dtype=torch.bfloat16)

if __name__ == "__main__":
    show_error(descriptor_product)

if __name__ == "__main__" and DEVICE.type == "cuda":
    ours = {"block_kernel": in_bfloat16, "descriptor_kernel": by_descriptors}
    show_rates(ours)

# %%
# Block scales have a price: in these kernels, each step waits for its product
# and only then scales and adds it. cuBLAS loses less by block scales, so there
# is room for a better kernel.

# %%
# The op
# ------
#
# ``block_scaled_matmul(x, weight, scale_x, scale_weight)`` is this gallery's
# op. To ``descriptor_kernel`` it adds one program per multiprocessor, which
# begins to load its next tile before it stores the present one
# (``persistent_matmul.py``); smaller tiles for few rows; and scales of any
# strides. ``quantize.py`` makes such matrices.

from triton_gallery_ops.block_scaled_matmul import block_scaled_matmul

# %%
# The result
# ----------
#
# Products of models' layers: tokens, outputs, inputs. In the chart, *Triton* is
# the op, and *Triton, this page* is ``descriptor_kernel``.

LAYERS = {
    "64, 7168, 2048": (64, 7168, 2048),
    "1024, 6144, 4096": (1024, 6144, 4096),
    "4096, 2112, 7168": (4096, 2112, 7168),
    "4096, 7168, 16384": (4096, 7168, 16384),
    "8192, 8192, 8192": (8192, 8192, 8192),
    "16384, 28672, 4096": (16384, 28672, 4096),
}
OURS = {"Triton": block_scaled_matmul, "Triton, this page": by_descriptors}


def work(name):
    M, N, K = LAYERS[name]
    return 2e-9 * M * N * K


if __name__ == "__main__":
    show_error(partial(block_scaled_matmul, out_dtype=torch.float32))

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for name, sizes in LAYERS.items():
        timed = calls(OURS, *sizes)
        del timed["cuBLAS, per row"]  # another product
        times[name] = gpu_time(timed)
    results = rate_table(times, "M, N, K", "TFLOP/s", work)
    print(results.to_string())
    wide = results.pivot(index="M, N, K", columns="series", values="TFLOP/s")
    wide = wide.loc[list(LAYERS)]
    wide.plot.bar(rot=20, ylabel="TFLOP/s")
    plt.tight_layout()
    for name in ("cuBLAS", "cuBLAS, bfloat16"):
        ratio = wide["Triton"] / wide[name]
        print(f"the op: {ratio.min():.2f} to {ratio.max():.2f} of {name}")

# %%
# Exercises
# ---------
#
# Both are kernels with the arguments of ``block_kernel``. Write one and run the
# cell: it says whether the kernel is right. No GPU is needed.
#
# **1.** Read the scales of ``x`` by columns, as cuBLAS does: ``scale_x`` is a
# contiguous matrix of (K / 128, M). Then the scales that a program loads lie
# side by side. The kernel knows how many rows there are from
# ``tl.num_programs``.

column_kernel = None  # your kernel


def check(kernel, expected, *inputs):
    """Print whether a kernel stores what is expected."""
    if kernel is None:
        print("not solved yet")
        return False
    y = product(*inputs, kernel=kernel)
    right = torch.allclose(y.double(), expected, rtol=1e-2, atol=1e-2)
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    x, w, scale_x, scale_w = random(256, 72, 256)
    expected_columns = exact(x, w, scale_x, scale_w)
    for_columns = x, w, scale_x.T.contiguous(), scale_w
    check(column_kernel, expected_columns, *for_columns)

# %%
# **2.** The gradient of a weight sums over tokens. There, both matrices have a
# scale for each group of 128 along the sum. Let ``scale_w`` be (N, K / 128).
# What changes in the loop?

groups_kernel = None  # your kernel


def exact_groups(x, w, scale_x, scale_w):
    """Return the product in float64, with groups in both matrices."""
    w = w.double() * scale_w.repeat_interleave(128, 1)
    return (x.double() * scale_x.repeat_interleave(128, 1)) @ w.T


if __name__ == "__main__":
    scales = torch.rand(72, 2, generator=generator, device=DEVICE) + 0.5
    for_groups = x, w, scale_x, scales
    check(groups_kernel, exact_groups(*for_groups), *for_groups)

# %%
# Answers
# -------
#
# **1.** One address changes: a group is a row of the scales now.


@triton.jit
def column_answer_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    M = tl.num_programs(axis=0) * BLOCK_M
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)
    off_n = tl.program_id(axis=1) * BLOCK_N
    offs_n = off_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k, mask = tl.arange(0, GROUP), offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        x = tl.load(x_ptrs + group * GROUP)  # (BLOCK_M, GROUP)
        w = tl.load(w_ptrs + group * GROUP, mask=mask[None, :], other=0.0)
        scale = tl.load(scale_x_ptr + group * M + offs_m)  # (BLOCK_M,)
        scale *= tl.load(scale_w_ptr + off_n // GROUP * groups + group)
        acc += tl.dot(x, w) * scale[:, None]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc, mask=mask[None, :])


if __name__ == "__main__":
    assert check(column_answer_kernel, expected_columns, *for_columns)

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
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k, mask = tl.arange(0, GROUP), offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        x = tl.load(x_ptrs + group * GROUP)  # (BLOCK_M, GROUP)
        w = tl.load(w_ptrs + group * GROUP, mask=mask[None, :], other=0.0)
        of_x = tl.load(scale_x_ptr + offs_m * groups + group)  # (BLOCK_M,)
        ptrs = scale_w_ptr + offs_n * groups + group  # (BLOCK_N,)
        of_w = tl.load(ptrs, mask=mask, other=0.0)
        acc += tl.dot(x, w) * of_x[:, None] * of_w[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc, mask=mask[None, :])


if __name__ == "__main__":
    assert check(groups_answer_kernel, exact_groups(*for_groups), *for_groups)
