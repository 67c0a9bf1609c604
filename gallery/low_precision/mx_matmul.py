# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply MXFP8 and MXFP4 matrices, see what tl.dot_scaled does with their
# scales, and which instruction it becomes on each GPU."""
# dtypes = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]
# backward = false
# deterministic = true
# longer = "six formats, by an instruction or without"
#
# [[tool.triton-gallery.step_through]]
# kernel = "group_kernel"
# caption = """
# The figure opens at the second group, before part is scaled: acc has the first
# group alone. Here a group is four numbers, and bytes of 127, 128 and 129 are
# scales of 1, 2 and 4. Two programs compute a tile of y each. The last row of
# each tile and two columns of the second are masked: they are 0 here."""
# registers = ["x", "w", "of_x", "of_w", "part", "acc"]
# call = "product(x, w, scale_x, scale_w, tile=(4, 4, 4))"
# expected = { y = "decode(x, scale_x, 4) @ decode(w, scale_w, 4).T" }
# start = [0, 7]
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

*Microscaling* (MX) matrices have numbers of 8 or 4 bits, and each 32 numbers of
a row share a scale of one byte. ``tl.dot_scaled`` multiplies two such tiles
with their scales. NVIDIA's B200 and AMD's MI350 have an instruction for that.
For an H100, which has none, Triton compiles ``tl.dot_scaled`` to code that
decodes each tile to bfloat16. There, use MX formats when a model's weights come
in them. If the left matrix has few rows, use this page's op; if many, decode
both matrices once to bfloat16 and call ``torch.matmul`` (*The result* says at
which sizes). For float8 on an H100, see ``fp8_matmul.py`` and
``block_scaled_matmul.py``.

After this page you can

* say what is stored in MXFP8, MXFP4 and NVFP4;
* multiply matrices of MXFP8 and MXFP4, in any combination;
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
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
HAS_DOT_SCALED = DEVICE.type == "cuda" or VERSION >= (3, 8)
TARGETS = {  # the backend, the architecture and the threads of a warp
    "H100": ("cuda", 90, 32),
    "B200": ("cuda", 100, 32),
    "MI350": ("hip", "gfx950", 64),
}
INSTRUCTION = r"(?:tcgen05\.mma|wgmma\.mma_async|v_mfma_)[\w.:]*"
PAIRS = {  # the formats of x and w, and the numbers of a group
    "MXFP8": ("e4m3", "e4m3", 32),
    "MXFP8 x MXFP4": ("e4m3", "e2m1", 32),
    "MXFP4": ("e2m1", "e2m1", 32),
    "NVFP4": ("e2m1", "e2m1", 16),
}
TYPES = {"e4m3": "*fp8e4nv", "e2m1": "*u8"}  # pointers to such numbers


def instructions(target, X_FORMAT, W_FORMAT, GROUP):
    """Return the matrix instructions of scaled_kernel on a GPU."""
    scale = "*fp8e4nv" if GROUP == 16 else "*u8"
    types = [TYPES[X_FORMAT], TYPES[W_FORMAT], scale, scale, "*bf16"]
    types += ["i32"] * 3 + ["constexpr"] * 6
    names = scaled_kernel.arg_names
    values = 128, 128, 128, GROUP, X_FORMAT, W_FORMAT
    types = dict(zip(names, types, strict=True))
    constants = dict(zip(names[8:], values, strict=True))
    # Pointers and sizes are multiples of 16: a hint to the compiler
    by_16 = {(i,): [["tt.divisibility", 16]] for i in range(8)}
    source = triton.compiler.ASTSource(scaled_kernel, types, constants, by_16)
    target = triton.backends.compiler.GPUTarget(*target)
    made = triton.compile(source, target, {"num_warps": 8})
    code = made.asm.get("ptx") or made.asm["amdgcn"]  # NVIDIA's or AMD's
    code = re.sub(r"\.sync\.aligned|\.cta_group::\d", "", code)
    return sorted(set(re.findall(INSTRUCTION, code)))


@compile_only
def show_instructions():
    """Print the matrix instructions of scaled_kernel on each GPU."""
    for gpu, target in TARGETS.items():
        for name, formats in PAIRS.items():
            try:
                found = instructions(target, *formats)
            except RuntimeError:  # a pass of the compiler fails
                found = ["Triton does not compile it"]
            print(f"{gpu:6} {name:14} {', '.join(found)}")


# %%
# In PyTorch
# ----------
#
# The numbers of MXFP8 are float8: ``e4m3``, with 4 bits of exponent and 3 of
# mantissa, up to 448, or ``e5m2``, up to 57344. Each 32 numbers of a row are a
# *group* (a *block* in the standard) and share a scale, ``2 ** (byte - 127)``.
# Only the byte is stored; PyTorch's dtype for it is ``float8_e8m0fnu``, and our
# kernels take ``scale.view(torch.uint8)``. MXFP4 has such scales and numbers of
# 4 bits, ``e2m1``, listed below. A byte holds two, the first in its low half.

E4M3 = torch.float8_e4m3fn
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # 2 bits of exponent, 1 of mantissa
E2M1 += [-number for number in E2M1]  # the highest bit is the sign


def decode(numbers, scale, GROUP=32, dtype=torch.float64):
    """Return MXFP8, or MXFP4 in uint8, times its scales."""
    if numbers.dtype == torch.uint8:
        codes = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
        numbers = torch.tensor(E2M1, device=codes.device)[codes.int()]
    scale = torch.exp2(scale.double() - 127)
    return (numbers.double() * scale.repeat_interleave(GROUP, 1)).to(dtype)


def make_mx(rows, K, dtype=E4M3):
    """Return random numbers (uint8: packed MXFP4) and the scales' bytes."""
    numbers = torch.randn(rows, K, **kind)  # kind: the generator and device
    if dtype == torch.uint8:
        numbers = torch.randint(0, 256, (rows, K // 2), **kind)
    scale = torch.randint(122, 132, (rows, K // 32), **kind)
    return numbers.to(dtype), scale.to(torch.uint8)


if __name__ == "__main__":
    x, scale_x = make_mx(8192, 4096)
    share = 8 * scale_x.nbytes / x.numel()
    print(f"{8 + share} bits a number, {share} of them for the scale")

# %%
# The first kernel
# ----------------
#
# ``x`` is (M, K) and ``w`` is (N, K). Scales differ from group to group, so we
# scale the sum of each group. With ``s`` and ``t``, the bytes of the scales:
#
# .. math:: y_{mn} = \sum_{\text{group } g} 2^{s_{mg} - 127} \,
#    2^{t_{ng} - 127} \sum_{k \in g} x_{mk} w_{nk}.
#
# ``tl.dot`` computes the inner sum: on the tensor cores, it multiplies a tile
# (BLOCK_M, GROUP) by one (GROUP, BLOCK_N) of the same dtype and returns
# float32. Threads multiply this sum by both scales and add it to ``acc``. A
# float32 keeps its exponent, plus 127, in bits 23 to 30: shift the byte there,
# and ``bitcast=True`` reads it as float32. (Bytes of 0 and 255: exercise 1.)


@triton.jit
def power_of_two(byte):
    """Return 2 ** (byte - 127), but 0 for 0 and infinity for 255."""
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
    mask_m, mask_n = offs_m < M, offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[:, None] * K + offs_k[None, :]
    groups = K // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        # (BLOCK_M, GROUP), (BLOCK_N, GROUP); masked rows are not stored.
        x = tl.load(x_ptrs + group * GROUP, mask=mask_m[:, None])
        w = tl.load(w_ptrs + group * GROUP, mask=mask_n[:, None])
        part = tl.dot(x, w.T)  # (BLOCK_M, BLOCK_N), of this group alone
        of_x = tl.load(scale_x_ptr + offs_m * groups + group, mask=mask_m)
        of_w = tl.load(scale_w_ptr + offs_n * groups + group, mask=mask_n)
        part *= power_of_two(of_x)[:, None]
        acc += part * power_of_two(of_w)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


def product(x, w, scale_x, scale_w, dtype=torch.float32, tile=(128, 64, 32)):
    """Return x @ w.T for contiguous MXFP8 matrices and their scales."""
    (M, K), N = x.shape, len(w)
    BLOCK_M, BLOCK_N, GROUP = tile
    assert K % GROUP == 0
    assert w.shape[1] == K
    assert scale_x.shape == (M, K // GROUP)
    assert scale_w.shape == (N, K // GROUP)
    assert scale_x.dtype == scale_w.dtype == torch.uint8
    assert all(t.is_contiguous() for t in (x, w, scale_x, scale_w))
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    # 8 warps are 256 threads: each has 32 elements of acc
    group_kernel[grid](x, w, scale_x, scale_w, y, M, N, K, *tile, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# An H100's tensor cores keep fewer bits of a sum of float8 products than the 24
# of float32, so we allow :math:`2^{-12}` of the sum of the terms' magnitudes.


def show_error(y, x, w):
    """Print the largest error, as a part of the sum of magnitudes."""
    x, w = decode(*x), decode(*w)
    off = (y - x @ w.T) / (x.abs() @ w.abs().T)
    print(f"largest error {off.abs().max():.1e}, allowed {2**-12:.1e}")
    torch.testing.assert_close(off, 0 * off, rtol=0, atol=2**-12)


if __name__ == "__main__":
    x, w = make_mx(130, 384), make_mx(200, 384)
    show_error(product(x[0], w[0], x[1], w[1]), x, w)

# %%
# How fast?
# ---------
#
# We count a product as :math:`2MNK` operations. *torch.compile* computes the
# same product: it decodes both matrices to bfloat16 and multiplies them. cuBLAS
# has no groups, but a scale for each row (float8) or none (bfloat16).


def show_rates(ours):
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
    (x, scale_x), (w, scale_w) = make_mx(M, K), make_mx(N, K)
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


if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates({"group_kernel": partial(product, dtype=torch.bfloat16)})

# %%
# What do the scales cost?
# ------------------------
#
# For each group, threads multiply every element of ``part`` by one scale, then
# by the other while they add it to ``acc`` (a multiply-add). `NVIDIA's H100
# <https://www.nvidia.com/en-us/data-center/h100/>`_ and H200 do 1979 TFLOP/s of
# float8 on tensor cores (without sparsity), and 67 of float32 outside them. A
# multiply-add is two operations. A lone multiplication takes as long, so we
# count it as two as well.

if __name__ == "__main__":
    multiplying, scaling = 2 * 32, 2 + 2  # operations on an element of part
    print("At best, in TFLOP/s of the product:")
    print("tensor cores that multiply: 1979")
    print(f"threads that scale: {67 * multiplying / scaling:.0f}")

# %%
# So threads that scale keep any such kernel below the tensor cores' rate. An
# instruction that takes the scales leaves threads nothing to multiply.
# ``acc = tl.dot_scaled(x, scale_x, "e4m3", w.T, scale_w, "e2m1", acc)`` asks
# for it, and adds to ``acc``. After each matrix come its scales and its format:
# ``e4m3``, ``e5m2``, ``e2m1``, or ``bf16`` and ``fp16``, whose scales are None.
# ``w.T`` is (BLOCK_K, BLOCK_N), for ``e2m1`` (BLOCK_K / 2, BLOCK_N). Its scales
# are not transposed: (BLOCK_N, BLOCK_K / 32).


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
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
):
    X_PACK: tl.constexpr = 2 if X_FORMAT == "e2m1" else 1  # numbers in a byte
    W_PACK: tl.constexpr = 2 if W_FORMAT == "e2m1" else 1
    # In int32 the offset of a row would overflow past element 2**31.
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.program_id(axis=1).to(tl.int64) * BLOCK_N
    offs_n += tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    rows_m, rows_n = offs_m[:, None], offs_n[:, None]
    offs_x = tl.arange(0, BLOCK_K // X_PACK)[None, :]  # in bytes
    offs_w = tl.arange(0, BLOCK_K // W_PACK)[None, :]
    x_ptrs = x_ptr + rows_m * (K // X_PACK) + offs_x
    w_ptrs = w_ptr + rows_n * (K // W_PACK) + offs_w
    offs_g = tl.arange(0, BLOCK_K // GROUP)[None, :]
    scale_x_ptrs = scale_x_ptr + rows_m * (K // GROUP) + offs_g
    scale_w_ptrs = scale_w_ptr + rows_n * (K // GROUP) + offs_g
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # (BLOCK_M, BLOCK_K / X_PACK) and (BLOCK_N, BLOCK_K / W_PACK);
        # masked rows are not stored.
        x = tl.load(x_ptrs + k // X_PACK, mask=rows_m < M)
        w = tl.load(w_ptrs + k // W_PACK, mask=rows_n < N)
        # (BLOCK_M, BLOCK_K / GROUP) and (BLOCK_N, BLOCK_K / GROUP)
        scale_x = tl.load(scale_x_ptrs + k // GROUP, mask=rows_m < M)
        scale_w = tl.load(scale_w_ptrs + k // GROUP, mask=rows_n < N)
        acc = tl.dot_scaled(x, scale_x, X_FORMAT, w.T, scale_w, W_FORMAT, acc)
    y_ptrs = y_ptr + rows_m * N + offs_n[None, :]
    mask = (rows_m < M) & (offs_n[None, :] < N)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


FORMATS = {E4M3: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}


def scaled_product(x, w, scale_x, scale_w, dtype=torch.float32):
    """Return x @ w.T for contiguous matrices in MX formats."""
    X_FORMAT, W_FORMAT = FORMATS[x.dtype], FORMATS[w.dtype]
    M, N, BLOCK = len(x), len(w), 128
    K = x.shape[1] * (2 if X_FORMAT == "e2m1" else 1)
    assert K % BLOCK == 0, "K must be a multiple of 128 (for mx_matmul, of 32)"
    assert w.shape[1] * (2 if W_FORMAT == "e2m1" else 1) == K
    assert scale_x.shape == (M, K // 32)
    assert scale_w.shape == (N, K // 32)
    assert scale_x.dtype == scale_w.dtype == torch.uint8
    assert all(t.is_contiguous() for t in (x, w, scale_x, scale_w))
    y = torch.empty(M, N, device=x.device, dtype=dtype)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    given = x, w, scale_x, scale_w, y, M, N, K
    # A step along K is four groups of 32.
    tile = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "BLOCK_K": BLOCK, "GROUP": 32}
    formats = {"X_FORMAT": X_FORMAT, "W_FORMAT": W_FORMAT}
    scaled_kernel[grid](*given, **tile, **formats, num_warps=8)
    return y


# %%
# Without a GPU, this check needs the interpreter of Triton 3.8 or newer: older
# ones lack ``tl.dot_scaled``.

if __name__ == "__main__":
    E2M1_X2 = torch.uint8  # two numbers in a byte
    pairs = (E4M3, E4M3), (E4M3, E2M1_X2), (E2M1_X2, E2M1_X2)
    if not HAS_DOT_SCALED:
        print("not checked: needs a GPU or Triton 3.8")
        pairs = ()
    for pair in pairs:
        x, w = make_mx(130, 384, pair[0]), make_mx(200, 384, pair[1])
        print(" x ".join(FORMATS[dtype] for dtype in pair), end=": ")
        show_error(scaled_product(x[0], w[0], x[1], w[1]), x, w)

# %%
# An H100 or H200 lacks the instruction. There, ``tl.dot_scaled`` decodes to
# bfloat16, as *torch.compile* does. But *torch.compile* decodes each matrix
# once. In ``scaled_kernel``, each program decodes what it loads: all of ``w``
# M / 128 times, and all of ``x`` N / 128 times.

# %%
# Which instruction is it?
# ------------------------
#
# Triton can compile a kernel for a GPU that you do not have (see
# ``compiler_stages.py``). ``show_instructions`` (unfold the first cell to copy
# it) compiles ``scaled_kernel`` for three GPUs and finds the matrix instruction
# in the code: ``wgmma`` on the H100, ``tcgen05.mma`` on the B200, ``v_mfma`` on
# the MI350. Where it prints one name of a format, ``x`` and ``w`` both have it.
# **For the B200 and the MI350, this page only compiles: it has no speed of
# theirs.**

if __name__ == "__main__":
    show_instructions()

# %%
# ``block_scale`` and ``scale`` say that the instruction takes scales. The name
# after ``kind::`` gives the formats: ``f8f6f4`` is any mix of 8, 6 and 4 bits.
# The last part counts the groups that one instruction takes of each row: ``1X``
# one of 32 numbers, ``2X`` two of 32, ``4X`` four of 16. (Triton 3.9 prints the
# size of a group, ``block32``.) On the H100, both operands are bfloat16
# (``bf16.bf16``). Within bfloat16's range, decoding is exact: a number has at
# most 4 significant bits, bfloat16 has 8, and a scale changes the exponent.
#
# *NVFP4* is NVIDIA's format of 4 bits. Each group of 16 numbers in ``e2m1`` has
# a scale in ``e4m3``. Each matrix has one more, in float32: a kernel multiplies
# ``acc`` by both at its end (``scaled_kernel`` does not). ``scaled_kernel``
# compiles for NVFP4: for scales in ``e4m3``, ``tl.dot_scaled`` has groups of 16
# (``GROUP=16``). ``scaled_product`` does not take it, as Triton's interpreter
# reads all scales as powers of two and could not check it.

# %%
# The op
# ------
#
# ``mx_matmul(x, weight, scale_x, scale_weight)`` is this gallery's op. It takes
# what ``quantize_mx`` and ``quantize_nvfp4`` return (``quantize.py``), any K of
# whole groups (past the end of K, it loads zeros), and ``bias``, which it adds
# to the float32 sum. For ``x`` of 16 bits, as models with 4-bit weights have
# it, call ``mx_matmul(x, weight, None, scale_weight)``.
#
# Where the GPU has the instruction, an ``x`` of more than 64 rows goes to
# ``tl.dot_scaled``, in tiles of 128 rows. (The 64 is not tuned: no such GPU was
# measured.) In three cases, the op decodes a tile (exercise 2), scales it,
# rounds it to 16 bits and calls ``tl.dot``: on other GPUs, for ``x`` of 16
# bits, and for fewer rows, which get smaller tiles, so that more programs load
# the weight.

from triton_gallery_ops.mx_matmul import mx_matmul

# %%
# The result
# ----------
#
# The sizes (M, N, K) are of layers of models. *Triton* is the op with MXFP8,
# and *Triton, this page* is ``scaled_kernel``. *Triton, MXFP4 weight* is the op
# with ``x`` in bfloat16, which it need not decode. The others are as above.

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
    x = torch.randn(M, K, **kind).bfloat16()
    w, scale = make_mx(N, K, torch.uint8)
    return partial(mx_matmul, x, w, None, scale)


if __name__ == "__main__" and DEVICE.type == "cuda":
    this_page = partial(scaled_product, dtype=torch.bfloat16)
    ours = {"Triton": mx_matmul, "Triton, this page": this_page}
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
    for other in wide.columns.drop("Triton"):
        ratio = wide["Triton"] / wide[other]
        span = f"{ratio.min():.2f} to {ratio.max():.2f}"
        print(f"Triton: {span} times as fast as {other}")
    ahead = wide["Triton"] > wide["torch.compile"]
    for advice, which in {"use the op": ahead, "decode once": ~ahead}.items():
        rows = {sizes.split(", ")[0]: None for sizes in wide.index[which]}
        print(f"MXFP8, {advice}: M =", ", ".join(rows) or "none of these")

# %%
# The run ends with two lines of advice for its GPU. To *decode once* is
# ``decode(x, scale_x, dtype=torch.bfloat16)``, the same for ``w``, and
# ``torch.matmul``, as *torch.compile* does here.

# %%
# Exercises
# ---------
#
# Write a kernel and run the cell: it says whether the kernel is right. No GPU
# is needed.
#
# **1.** A byte of 0 is the scale :math:`2^{-127}`. Float32 has no exponent that
# small for ordinary numbers; the bits of this one are 0x00400000. A byte of 255
# is NaN. ``power_of_two`` gives 0 and infinity instead. Store the scales of all
# 256 bytes, as PyTorch has them.

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
# **2.** Multiply MXFP8 by MXFP4 without ``tl.dot_scaled``: write a kernel with
# the arguments of ``group_kernel`` whose ``w`` is packed. The highest bit of a
# code is its sign, two are its exponent and the last its mantissa. Exponent and
# mantissa, shifted left by 9, are the bits of a float16: the number's magnitude
# times :math:`2^{-14}`. Code 3, for 1.5, gives 0x0600,
# :math:`1.5 \cdot 2^{-14}`. Convert ``x`` to float16 too, as ``tl.dot`` takes
# two tiles of one dtype. ``tl.join(a, b)`` puts the elements of two tensors
# side by side in a new last axis, of 2; after ``tl.reshape`` to (BLOCK_N,
# GROUP) they alternate.

mixed_kernel = None  # your kernel


def check_mixed(kernel):
    """Say whether a kernel multiplies MXFP8 by MXFP4, to 0.1 %."""
    if kernel is None:
        return "not solved yet"
    M, N, K = 130, 72, 96
    x, w = make_mx(M, K), make_mx(N, K, torch.uint8)
    y = torch.empty(M, N, device=DEVICE)
    blocks = {"BLOCK_M": 128, "BLOCK_N": 64, "GROUP": 32}
    kernel[2, 2](x[0], w[0], x[1], w[1], y, M, N, K, **blocks, num_warps=8)
    expected = decode(*x) @ decode(*w).T
    same = torch.allclose(y.double(), expected, 1e-3, 1e-2)
    return "right" if same else "wrong"


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
# the product, as in ``group_kernel``. Offsets in int32 are enough here.


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
        codes = tl.join(codes & 15, codes >> 4)  # (BLOCK_N, GROUP / 2, 2)
        codes = tl.reshape(codes, (BLOCK_N, GROUP))
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
