# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply MXFP8, MXFP4 and NVFP4 matrices, see what tl.dot_scaled does with
# their scales, and which instruction it becomes on each GPU."""
# dtypes = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]
# backward = false
# deterministic = true
# longer = "six formats, by an instruction or without"
#
# [[tool.triton-gallery.step_through]]
# kernel = "group_kernel"
# caption = """
# Two programs, a tile of the result each. Here a block is four numbers. Each of
# the two products is scaled twice, by 1, 2 or 4 for a byte of 127, 128 or 129,
# then it is added. The last row and two columns are masked."""
# registers = ["x", "w", "of_x", "of_w", "part", "acc"]
# call = "product(x, w, scale_x, scale_w, tile=(4, 4, 4))"
# expected = { y = "exact((x, scale_x), (w, scale_w), GROUP=4)" }
# start = [1, 0]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(-2, 3, 3, 8)"
# w = "integers(-3, 3, 6, 8).flip(0)"
# scale_x = "integers(127, 130, 3, 2).to(torch.uint8)"
# scale_w = "integers(127, 129, 6, 2).flip(1).to(torch.uint8)"
# ///
r"""
MXFP8, MXFP4 and NVFP4 with tl.dot_scaled
=========================================

*Microscaling* (MX) matrices are of 8 or 4 bits, and each 32 numbers of a row
share a scale, stored in one byte. ``tl.dot_scaled`` multiplies two such tiles
and their scales. NVIDIA's B200 and AMD's MI350 have an instruction for that; on
an H100, Triton turns the numbers into bfloat16 first. Take MX formats for
models that come in them, and for those GPUs. For training and serving in float8
on an H100, see ``fp8_matmul.py`` and ``block_scaled_matmul.py``.

After this page you can

* say what is stored in MXFP8, MXFP4 and NVFP4, and multiply it;
* say why the instruction takes the scales, and what work that saves;
* see what ``tl.dot_scaled`` becomes on a GPU that you do not have.
"""

# sphinx_gallery_tags = ["matmul", "float8", "quantization", "compute bound"]
import math
import os
import re
from functools import partial

import matplotlib.pyplot as plt
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
from triton_gallery.compiling import compile_only

generator = torch.Generator(device=DEVICE).manual_seed(0)
kind = {"generator": generator, "device": DEVICE}
TARGETS = {
    "H100": ("cuda", 90, 32),
    "B200": ("cuda", 100, 32),
    "MI350": ("hip", "gfx950", 64),
}
INSTRUCTION = r"(?:tcgen05\.mma|wgmma\.mma_async|v_mfma_)[\w.:]*"
PAIRS = {  # the formats of x and w, and the numbers of a block
    "MXFP8 x MXFP8": ("e4m3", "e4m3", 32),
    "MXFP8 x MXFP4": ("e4m3", "e2m1", 32),
    "MXFP4 x MXFP4": ("e2m1", "e2m1", 32),
    "NVFP4 x NVFP4": ("e2m1", "e2m1", 16),
}
POINTERS = {"e4m3": "*fp8e4nv", "e2m1": "*u8"}


@compile_only
def show_instructions():
    """Compile scaled_kernel for GPUs; print their matrix instructions."""
    for gpu, target in TARGETS.items():
        print(gpu)
        target = triton.backends.compiler.GPUTarget(*target)
        for name, (X, W, GROUP) in PAIRS.items():
            blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}
            constants = blocks | {"GROUP": GROUP, "X": X, "W": W}
            scale = "*fp8e4nv" if GROUP == 16 else "*u8"
            types = [POINTERS[X], POINTERS[W], scale, scale, "*bf16"]
            types += ["i32"] * 3 + ["constexpr"] * 6
            types = dict(zip(scaled_kernel.arg_names, types, strict=True))
            by_16 = {(i,): [["tt.divisibility", 16]] for i in range(8)}
            given = scaled_kernel, types, constants, by_16
            source = triton.compiler.ASTSource(*given)
            try:
                made = triton.compile(source, target, {"num_warps": 8})
            except RuntimeError:  # a pass of the compiler fails
                found = ["Triton does not compile it"]
            else:
                code = made.asm.get("ptx") or made.asm["amdgcn"]
                found = sorted(set(re.findall(INSTRUCTION, code)))
            print(f"  {name}: {', '.join(found)}")


# %%
# In PyTorch
# ----------
#
# In MXFP8, ``x`` is (M, K) in float8. A *block* is 32 numbers of a row, and has
# a scale. The scale is a power of two, so that a multiplication by it is exact,
# and its exponent fits into a byte: the scale is ``2 ** (byte - 127)``. PyTorch
# calls this dtype ``float8_e8m0fnu``: 8 bits of exponent, and no mantissa.

E4M3 = torch.float8_e4m3fn


def decode(numbers, scale, GROUP=32):
    """Return what numbers and bytes of scales stand for, in float64."""
    scale = torch.exp2(scale.double() - 127)
    return numbers.double() * scale.repeat_interleave(GROUP, 1)


def exact(x, w, GROUP=32):
    """Return the product of two pairs of numbers and scales, in float64."""
    return decode(*x, GROUP) @ decode(*w, GROUP).T


def make_mxfp8(rows, K):
    """Return random numbers in float8, and the bytes of their scales."""
    numbers = torch.randn(rows, K, **kind).to(E4M3)
    scale = torch.randint(122, 132, (rows, K // 32), **kind)
    return numbers, scale.to(torch.uint8)


if __name__ == "__main__":
    x, scale_x = make_mxfp8(8192, 4096)
    print(f"{2e-9 * 8192 * x.numel():.0f} GFLOP for M = N = 8192, K = 4096")
    share = 8 * scale_x.nbytes / x.numel()
    print(f"{8 + share} bits a number, {share} of them for the scale")

# %%
# The first kernel
# ----------------
#
# A scale differs along the sum over K, so it cannot wait until the sum is done:
#
# .. math:: y_{mn} = \sum_{\text{block } b} 2^{s_{mb} - 127} \,
#    2^{t_{nb} - 127} \sum_{k \in b} x_{mk} w_{nk}.
#
# The tensor cores compute the inner sum, over one block. Threads multiply it by
# both scales and add it to ``acc``. A float32 has the same exponent as a scale,
# in its bits 23 to 30, so a shift makes a float of the byte.


@triton.jit
def power_of_two(byte):
    """Return 2 ** (byte - 127), for bytes from 1 to 254."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def group_kernel(
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
    # In int32 the offset of a row would overflow past element 2**31.
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.program_id(axis=1).to(tl.int64) * BLOCK_N
    offs_n += tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, GROUP)  # (GROUP,)
    mask_m = offs_m < M
    mask_n = offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        # (BLOCK_M, GROUP) and (GROUP, BLOCK_N). Masked rows are not stored, so
        # it does not matter what they hold.
        x = tl.load(x_ptrs + group * GROUP, mask=mask_m[:, None])
        w = tl.load(w_ptrs + group * GROUP, mask=mask_n[None, :])
        part = tl.dot(x, w)  # (BLOCK_M, BLOCK_N), of this block alone
        of_x = tl.load(scale_x_ptr + offs_m * groups + group, mask=mask_m)
        of_w = tl.load(scale_w_ptr + offs_n * groups + group, mask=mask_n)
        part *= power_of_two(of_x)[:, None]
        acc += part * power_of_two(of_w)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


def product(
    x, w, *scales, dtype=torch.float32, kernel=group_kernel, tile=(128, 64, 32)
):
    """Return the product of contiguous matrices with their scales."""
    (M, K), N = x.shape, w.shape[0]
    assert K % tile[2] == 0
    assert all(t.is_contiguous() for t in (x, w, *scales))
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    grid = (triton.cdiv(M, tile[0]), triton.cdiv(N, tile[1]))
    sizes = M, N, K, *tile
    kernel[grid](x, w, *scales, y, *sizes, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# Hopper's tensor cores keep fewer bits of a sum of float8 products than float32
# has, so we allow :math:`2^{-12}` of the terms' magnitudes.


def show_error(y, x, w, decode=decode):
    """Print the largest error, as a part of the sum of magnitudes."""
    x, w = decode(*x), decode(*w)
    off = (y - x @ w.T) / (x.abs() @ w.abs().T)
    print(f"largest error {off.abs().max():.1e}, allowed {2**-12:.1e}")
    torch.testing.assert_close(off, 0 * off, rtol=0, atol=2**-12)


if __name__ == "__main__":
    x, w = make_mxfp8(130, 384), make_mxfp8(200, 384)
    show_error(product(x[0], w[0], x[1], w[1]), x, w)

# %%
# How fast?
# ---------
#
# Beside ``torch.compile``, which decodes both matrices and multiplies them in
# bfloat16, and cuBLAS in float8 with scales of rows and in bfloat16. Rates
# count :math:`2MNK` operations.


def show_rates(ours):
    """Print TFLOP/s at three sizes."""
    columns = {}
    for N in (1024, 4096, 8192):
        times = gpu_time(calls(ours, N, N, N))
        rates = {who: round(2e-9 * N**3 / t[0]) for who, t in times.items()}
        columns[f"M = N = K = {N}"] = rates
    print("TFLOP/s", pd.DataFrame(columns).to_string(), sep="\n")


def decoded_product(x, w, *scales):
    """Decode in PyTorch, then multiply."""
    decoded = []
    for t, scale in zip((x, w), scales, strict=True):
        scale = torch.exp2(scale.float() - 127)[..., None]
        decoded.append(t.float().unflatten(1, (-1, 32)) * scale)
    x, w = (t.flatten(1).bfloat16() for t in decoded)
    return x @ w.T


def calls(ours, M, N, K):
    """Return what is timed for a product, by name."""
    (x, scale_x), (w, scale_w) = make_mxfp8(M, K), make_mxfp8(N, K)
    given = x, w, scale_x, scale_w
    timed = {name: partial(f, *given) for name, f in ours.items()}
    torch.compiler.reset()
    compiled = torch.compile(decoded_product, dynamic=False, fullgraph=True)
    rows = torch.rand(M, 1, device=DEVICE), torch.rand(1, N, device=DEVICE)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    per_row = partial(torch._scaled_mm, x, w.T, *rows, **options)
    plain = partial(torch.matmul, x.bfloat16(), w.bfloat16().T)
    others = {"cuBLAS, float8": per_row, "cuBLAS, bfloat16": plain}
    return timed | {"torch.compile": partial(compiled, *given)} | others


OURS = {"group_kernel": partial(product, dtype=torch.bfloat16)}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# Why does the instruction take the scales?
# -----------------------------------------
#
# For each block of K, threads multiply every element of the tile twice and add
# it to ``acc``:

if __name__ == "__main__":
    tile = 128 * 64
    print(f"{tile * 32:,} multiplications by tensor cores for a block,")
    print(f"then {2 * tile:,} by threads, and {tile:,} additions")

# %%
# A scale belongs to 32 numbers of *one* matrix. Inside of the tensor cores it
# could multiply while they add, and no thread would see a sum of 32. That is
# what the instruction does, and how ``tl.dot_scaled`` is written: numbers,
# scales and the name of the format, twice, then the sum so far. ``w`` is
# (K, N), but its scales stay (N, K / 32): a row for each column of the result.
#
# The formats are ``"e4m3"`` and ``"e5m2"`` for float8. ``"e2m1"`` is a float of
# 4 bits, two of them in a byte, the first in its low half.


@triton.jit
def scaled_kernel(
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
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    X: tl.constexpr,  # the formats
    W: tl.constexpr,
):
    PX: tl.constexpr = 2 if X == "e2m1" else 1  # numbers of a byte
    PW: tl.constexpr = 2 if W == "e2m1" else 1
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.program_id(axis=1).to(tl.int64) * BLOCK_N
    offs_n += tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    rows_m, rows_n = offs_m[:, None], offs_n[:, None]
    x_ptrs = x_ptr + rows_m * (K // PX) + tl.arange(0, BLOCK_K // PX)[None, :]
    w_ptrs = w_ptr + rows_n * (K // PW) + tl.arange(0, BLOCK_K // PW)[None, :]
    offs_g = tl.arange(0, BLOCK_K // GROUP)[None, :]
    scale_x_ptrs = scale_x_ptr + rows_m * (K // GROUP) + offs_g
    scale_w_ptrs = scale_w_ptr + rows_n * (K // GROUP) + offs_g
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k // PX, mask=rows_m < M)
        w = tl.load(w_ptrs + k // PW, mask=rows_n < N)
        scale_x = tl.load(scale_x_ptrs + k // GROUP, mask=rows_m < M)
        scale_w = tl.load(scale_w_ptrs + k // GROUP, mask=rows_n < N)
        acc = tl.dot_scaled(x, scale_x, X, w.T, scale_w, W, acc)
    y_ptrs = y_ptr + rows_m * N + offs_n[None, :]
    mask = (rows_m < M) & (offs_n[None, :] < N)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


def scaled_product(x, w, *scales, X="e4m3", W="e4m3", dtype=torch.float32):
    """Return the product of contiguous matrices in MX formats."""
    M, N, K = len(x), len(w), 32 * scales[0].shape[1]
    assert K % 128 == 0
    assert all(t.is_contiguous() for t in (x, w, *scales))
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    grid = (triton.cdiv(M, 128), triton.cdiv(N, 128))
    sizes = M, N, K, 128, 128, 128, 32
    scaled_kernel[grid](x, w, *scales, y, *sizes, X, W, num_warps=8)
    return y


# %%
# Triton interprets ``tl.dot_scaled`` from version 3.8 on. So with an older one
# and without a GPU, the check does not run here. MXFP4 numbers are random
# bytes; a table has the eight magnitudes of ``e2m1``:

SUPPORTED = DEVICE.type == "cuda" or tuple(
    map(int, triton.__version__.split(".")[:2])
) >= (3, 8)
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def unpack(codes):
    """Return the numbers of packed e2m1, in float64."""
    values = MAGNITUDES + [-number for number in MAGNITUDES]
    table = torch.tensor(values, dtype=torch.float64, device=codes.device)
    return table[torch.stack([codes & 15, codes >> 4], 2).flatten(1).int()]


def make_mxfp4(rows, K):
    """Return packed numbers, and the bytes of their scales."""
    _, scale = make_mxfp8(rows, K)
    codes = torch.randint(0, 256, (rows, K // 2), **kind)
    return codes.to(torch.uint8), scale


def decode_any(numbers, scale):
    """Return what MXFP8 or MXFP4 is, in float64."""
    packed = numbers.dtype == torch.uint8
    return decode(unpack(numbers) if packed else numbers, scale)


MAKERS = {"e4m3": make_mxfp8, "e2m1": make_mxfp4}

if __name__ == "__main__" and not SUPPORTED:
    print(f"Triton {triton.__version__} does not interpret tl.dot_scaled")

if __name__ == "__main__" and SUPPORTED:
    for X, W in (("e4m3", "e4m3"), ("e4m3", "e2m1"), ("e2m1", "e2m1")):
        x, w = MAKERS[X](130, 384), MAKERS[W](200, 384)
        y = scaled_product(x[0], w[0], x[1], w[1], X=X, W=W)
        print(f"{X} x {W}:", end=" ")
        show_error(y, x, w, decode_any)

# %%
# The same sizes again:

OURS["scaled_kernel"] = partial(scaled_product, dtype=torch.bfloat16)

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# Which instruction is it?
# ------------------------
#
# ``show_instructions`` of the folded cell compiles ``scaled_kernel`` for GPUs
# that need not be here, and finds the matrix instructions in its code.

if __name__ == "__main__":
    show_instructions()

# %%
# ``block_scale`` and ``scale`` say that the instruction takes scales. **For the
# B200 and the MI350 this page has compiled and not run: it knows no speed of
# theirs.** The H100 has no such instruction. There, threads decode numbers,
# scale them and round to bfloat16, and the product is one of bfloat16.
#
# *NVFP4* is NVIDIA's format of 4 bits: blocks of 16 ``e2m1``, a scale in
# ``e4m3``, and one float32 for the whole tensor, which a kernel multiplies its
# result by. Not every Triton compiles it for every GPU. And even 3.9 interprets
# its scales as powers of two, so ``scaled_kernel`` is not checked with NVFP4.
#
# The B200 wants scales in an order of its own. Triton puts ours into it, which
# are stored plainly; its tutorial *Block Scaled Matrix Multiplication* stores
# them in that order.

# %%
# The op
# ------
#
# ``mx_matmul(x, weight, scale_x, scale_weight)`` is this gallery's op. It takes
# what ``quantize_mx`` and ``quantize_nvfp4`` return, any K of theirs, a bias,
# and ``x`` of 16 bits, as models with 4-bit weights have it. It calls
# ``tl.dot_scaled`` where the GPU has the instruction. Elsewhere it decodes by
# itself, and so runs with every Triton, and on GPUs without float8.

from triton_gallery_ops.mx_matmul import mx_matmul

# %%
# The result
# ----------
#
# Products of models' layers: tokens, outputs, inputs. *Triton* is the op with
# MXFP8, *Triton, MXFP4 weight* the op with bfloat16 tokens, and *Triton, this
# page* is ``scaled_kernel``.

LAYERS = [
    (16, 7168, 2048),
    (64, 6144, 4096),
    (1024, 6144, 4096),
    (4096, 2112, 7168),
    (4096, 7168, 16384),
    (8192, 8192, 8192),
]


def work(layer):
    return 2e-9 * math.prod(map(int, layer.split(", ")))


def weight_only(M, N, K):
    """Return a call of the op for bfloat16 tokens and an MXFP4 weight."""
    x, (w, scale) = torch.randn(M, K, **kind).bfloat16(), make_mxfp4(N, K)
    return partial(mx_matmul, x, w, None, scale)


if __name__ == "__main__" and DEVICE.type == "cuda":
    ours = {"Triton": mx_matmul, "Triton, this page": OURS["scaled_kernel"]}
    times = {}
    for sizes in LAYERS:
        timed = calls(ours, *sizes)
        timed["Triton, MXFP4 weight"] = weight_only(*sizes)
        times[", ".join(map(str, sizes))] = gpu_time(timed)
    results = rate_table(times, "M, N, K", "TFLOP/s", work)
    print(results.to_string())
    wide = results.pivot(index="M, N, K", columns="series", values="TFLOP/s")
    wide = wide.loc[list(times)]
    wide.plot.bar(rot=20, ylabel="TFLOP/s")
    plt.tight_layout()
    for other in wide.columns.drop(list(ours)):
        ratio = wide["Triton"] / wide[other]
        print(f"op / {other}: {ratio.min():.2f} to {ratio.max():.2f}")
    best = wide.drop(columns="Triton, this page").idxmax(axis=1)
    for who, sizes in best.value_counts().items():
        print(f"fastest at {sizes} of {len(best)} sizes: {who}")

# %%
# Exercises
# ---------
#
# Write a kernel and run the cell: it says whether the kernel is right. No GPU
# is needed.
#
# **1.** A byte of 0 is the scale :math:`2^{-127}`, too small for an exponent of
# its own in float32: its bits are 0x00400000. A byte of 255 says that the block
# is not a number. ``power_of_two`` gives 0 and infinity instead. Store all 256
# scales, as PyTorch has them.

scales_kernel = None  # your kernel, of (byte_ptr, scale_ptr)


def check_scales(kernel):
    """Say whether a kernel decodes all bytes."""
    if kernel is None:
        return "not solved yet"
    byte = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    scale = torch.empty(256, device=DEVICE)
    kernel[(1,)](byte, scale)
    expected = byte.view(torch.float8_e8m0fnu).float()
    same = torch.allclose(scale, expected, 0, 0, equal_nan=True)
    return "right" if same else "wrong"


if __name__ == "__main__":
    print(check_scales(scales_kernel))

# %%
# **2.** Multiply MXFP8 by MXFP4 without ``tl.dot_scaled``, as the op does on
# GPUs without an instruction: write a kernel with the arguments of
# ``group_kernel`` whose ``w`` is packed. The three bits of a magnitude are the
# first ones of a float16 after its sign: shifted left by 9 they make it, times
# :math:`2^{-14}`. ``tl.join`` puts two tensors beside each other.

mixed_kernel = None  # your kernel


def check_mixed(kernel):
    """Say whether a kernel multiplies MXFP8 by MXFP4."""
    if kernel is None:
        return "not solved yet"
    x, w = make_mxfp8(130, 96), make_mxfp4(72, 96)
    y = product(x[0], w[0], x[1], w[1], kernel=kernel).double()
    expected = decode(*x) @ decode_any(*w).T
    return "right" if torch.allclose(y, expected, 1e-3, 1e-2) else "wrong"


if __name__ == "__main__":
    print(check_mixed(mixed_kernel))

# %%
# Answers
# -------
#
# **1.** Two bytes are replaced.


@triton.jit
def scales_answer_kernel(byte_ptr, scale_ptr):
    offs = tl.arange(0, 256)  # (256,)
    byte = tl.load(byte_ptr + offs).to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    tl.store(scale_ptr + offs, bits.to(tl.float32, bitcast=True))


if __name__ == "__main__":
    answer = check_scales(scales_answer_kernel)
    print(answer)
    assert answer == "right"

# %%
# **2.** Each number of 4 or 8 bits is exact in float16. The scales come after
# the product, as in ``group_kernel``.


@triton.jit
def mixed_answer_kernel(
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
    mask_m = offs_m < M
    mask_n = offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + tl.arange(0, GROUP)[None, :]
    offs_w = tl.arange(0, GROUP // 2)[None, :]
    w_ptrs = w_ptr + offs_n[:, None] * (K // 2) + offs_w
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        x = tl.load(x_ptrs + group * GROUP, mask=mask_m[:, None])
        codes = tl.load(w_ptrs + group * (GROUP // 2), mask=mask_n[:, None])
        codes = tl.join(codes & 15, codes >> 4).reshape(BLOCK_N, GROUP)
        bits = (codes & 7).to(tl.int16) << 9
        w = bits.to(tl.float16, bitcast=True) * 16384
        w = tl.where(codes > 7, -w, w)
        of_x = tl.load(scale_x_ptr + offs_m * groups + group, mask=mask_m)
        of_w = tl.load(scale_w_ptr + offs_n * groups + group, mask=mask_n)
        part = tl.dot(x.to(tl.float16), w.T) * power_of_two(of_x)[:, None]
        acc += part * power_of_two(of_w)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc, mask=mask_m[:, None] & mask_n[None, :])


if __name__ == "__main__":
    answer = check_mixed(mixed_answer_kernel)
    print(answer)
    assert answer == "right"
