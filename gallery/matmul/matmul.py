# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Build the plainest matrix product that uses the tensor cores: a tile of the
# result per program, so that each number read is used many times."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "two ways, by copy engine and by pointers, chosen by a plan"
#
# [tool.triton-gallery.not_for]
# _persistent_matmul_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "tile_kernel"
# caption = """
# A 6 x 3 matrix times a 3 x 7 matrix, in tiles of 4 x 4 and steps of 2 along K.
# In the second step, one column of a's tile and one row of b's lie past the
# end. They are hatched: masked, and loaded as 0, they add nothing to acc."""
# registers = ["a_mask", "a", "b_mask", "b", "acc"]
# inputs = { a = "integers(1, 4, 6, 3)", b = "integers(1, 3, 3, 7)" }
# call = "tile_matmul(a, b, 4, 4, 2)"
# expected = { c = "a @ b" }
# layout = "product"
# start = [0, 3]
# ///
r"""
Matrix multiplication (matmul)
==============================

A matrix product does far more arithmetic for each number it reads than a
softmax or a norm. The tensor cores are fast enough for that arithmetic, but
only a kernel that uses each number many times can keep them busy. For a plain
product, call ``torch.matmul``. Write your own to fuse more work into it.

After this page you can

* divide a product into tiles, and loop over ``K`` with ``tl.dot``;
* choose a tile and its number of warps, and see when registers run out;
* apply a bias and an activation before the product is stored.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "autograd"]
import os
from functools import partial

import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

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
# .. math:: c_{mn} = \sum_{k=1}^{K} a_{mk}\,b_{kn}
#
# Each element of ``c`` takes ``K`` multiplications and ``K`` additions.
# PyTorch's flop counter counts them. The *floor* of the traffic is to read
# ``a`` and ``b`` once, and to write ``c`` once.

# DEVICE, from the folded cell, is the GPU; without one, it is the CPU.
generator = torch.Generator(device=DEVICE).manual_seed(0)

if __name__ == "__main__":
    print("   N         operations   floor, bytes   operations a byte")
    for N in (128, 1024, 8192):
        a = torch.empty(N, N, dtype=torch.float16, device="meta")  # no data
        with FlopCounterMode(display=False) as counter:
            c = a @ a
        flops, floor = counter.get_total_flops(), 3 * c.nbytes
        print(f"{N:4} {flops:18,} {floor:14,} {flops / floor:19.0f}")

# %%
# According to their data sheets, an H100 and an H200 do 200 to 300 float16
# operations in the time that they take to read a byte from memory. A large
# product has more than that for each byte of the floor. So it should run at the
# speed of the arithmetic, if the kernel reads each matrix only about once.

# %%
# The first kernel
# ----------------
#
# One element of ``c`` needs a whole row of ``a`` and a whole column of ``b``.
# If each program computed one element, programs would read the same rows and
# columns again and again. So each program computes a *tile* of ``c``, and uses
# each element that it loads for a whole row or column of the tile.
#
# The rows of ``a`` are too long to keep, so the program walks along ``K`` in
# steps of ``BLOCK_K``. In each step it loads a tile of ``a`` and a tile of
# ``b``, and ``tl.dot(a, b, acc)`` returns ``acc + a @ b``. The *accumulator*
# ``acc`` is the program's tile of ``c``. It stays in registers, the fastest
# memory of a GPU, until the end. ``tl.dot`` runs on the *tensor cores*, units
# that multiply small matrices; each side of a block has to be 16 or more there.


@triton.jit
def tile_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # In int32, a row times K would overflow past element 2**31.
    pid_m = tl.program_id(axis=0).to(tl.int64)
    pid_n = tl.program_id(axis=1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m * K + offs_k[None, :]  # (BLOCK_M, BLOCK_K)
    b_ptrs = b_ptr + offs_k[:, None] * N + offs_n  # (BLOCK_K, BLOCK_N)
    # In float16, 2048 + 1 is 2048: a long sum would stop growing.
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        # Zeros past K add nothing. Both tiles need them: NaN * 0 is NaN.
        a_mask = (offs_m < M) & (start + offs_k[None, :] < K)
        b_mask = (start + offs_k[:, None] < K) & (offs_n < N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        # PRECISION matters for float32 alone: see Break it.
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K  # to the right
        b_ptrs += BLOCK_K * N  # and down
    c_mask = (offs_m < M) & (offs_n < N)
    # The store rounds to the dtype of c, once.
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


def tile_matmul(
    a, b, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, PRECISION="ieee"
):
    """Return the product of two contiguous matrices."""
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert a.shape[1] == b.shape[0]
    assert a.dtype == b.dtype
    assert a.dtype.itemsize <= 4  # float64 would need a float64 accumulator
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    constants = BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
    tile_kernel[grid](a, b, c, M, N, K, *constants, num_warps=num_warps)
    return c


# %%
# Is it right?
# ------------
#
# The product of two float16 numbers is exact in float32. Each of the ``K``
# additions may be off by :math:`2^{-23}` of the largest sum possible, :math:`s
# = \sum_k |a_{mk}\,b_{kn}|`. The store rounds to the dtype of ``c``, by at most
# half its ``eps``. We allow the sum of both.


def error_bound(a, b):
    """Return a @ b in float64, and how far a product may be off."""
    rounding = torch.finfo(a.dtype).eps / 2
    a, b = a.double(), b.double()
    expected, s = a @ b, a.abs() @ b.abs()
    return expected, a.shape[1] * 2.0**-23 * s + rounding * expected.abs()


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


if __name__ == "__main__":
    a, b = random(100, 300), random(300, 70)
    expected, bound = error_bound(a, b)
    part = (tile_matmul(a, b) - expected).abs() / bound
    print(f"at most {part.max():.2f} of the tolerance")
    torch.testing.assert_close(part, 0 * part, rtol=0, atol=1)

# %%
# How fast?
# ---------
#
# On an NVIDIA GPU, ``torch.matmul`` calls the vendor's library cuBLAS. The rate
# counts :math:`2 M N K` operations.


def tflops(M, N, K, times):
    """Return the rate of a product from what gpu_time returns."""
    return 2e-9 * M * N * K / times[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (1024, 2048, 4096):
        a, b = random(N, N), random(N, N)
        calls = {
            "first kernel": partial(tile_matmul, a, b),
            "cuBLAS": partial(torch.matmul, a, b),
        }
        first, library = (tflops(N, N, N, t) for t in gpu_time(calls).values())
        print(f"N = {N}, TFLOP/s: first kernel {first:.0f}", end=", ")
        print(f"cuBLAS {library:.0f}")

# %%
# Break it
# --------
#
# Leave ``input_precision`` out, and on an NVIDIA GPU a product of float32
# matrices is wrong in the third or fourth digit. The default of ``tl.dot`` is
# *TF32*: the tensor cores leave out the last 13 of the 24 bits of each float32
# number. Our launcher asks for ``"ieee"``, all 24 bits, as PyTorch does by
# default.

if __name__ == "__main__":
    a = random(64, 64, dtype=torch.float32)
    b = random(64, 64, dtype=torch.float32)
    expected, bound = error_bound(a, b)
    for precision in ("ieee", "tf32"):
        c = tile_matmul(a, b, PRECISION=precision)
        part = ((c - expected).abs() / bound).max()
        print(f"{precision}: at most {part:.2f} of the tolerance")

# %%
# Without a GPU the two agree, because Triton's interpreter always multiplies
# all bits. A tolerance of 1 % would hide TF32 on a GPU as well. Derive it from
# ``K`` and the dtype, as above.

# %%
# How large a tile?
# -----------------
#
# ``N / BLOCK_N`` programs load each element of ``a``, and ``M / BLOCK_M``
# programs each element of ``b``. For one step along ``K``, a program loads
# ``BLOCK_M + BLOCK_N`` numbers of 2 bytes, and does ``2 * BLOCK_M * BLOCK_N``
# operations with them:

if __name__ == "__main__":
    for m, n in ((1, 1), (64, 64), (128, 128), (128, 256)):
        rate = 2 * m * n / (2 * (m + n))
        print(f"tiles of {m:3} x {n:3}: {rate:4.1f} operations a byte")

# %%
# A square tile twice as wide needs half the bytes. Not all of them come from
# memory: programs that run at the same time load the same tiles, and the GPU's
# caches serve the repeated loads. So a kernel can be fast with fewer than 200
# operations for each byte that it loads. What limits the tile?

# %%
# How many warps?
# ---------------
#
# The accumulator is spread over the registers of the program's threads. A
# thread has at most 255 registers, each for one float32 number. What does not
# fit is *spilled*: the thread keeps it in memory, and loads and stores it in
# every step. A warp is 32 threads, so with more warps, each thread holds less.
# A launch returns the compiled kernel, here ``kernel``. ``kernel.n_regs``
# counts the registers of a thread, and ``kernel.n_spills`` the float32 numbers
# that it spills:

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps
TILES = [
    (32, 32, 64, 4),
    (64, 64, 64, 4),
    (128, 128, 64, 8),
    (128, 256, 64, 4),
    (128, 256, 64, 8),
    (128, 256, 64, 16),
    (128, 256, 32, 8),
]

if __name__ == "__main__" and DEVICE.type == "cuda":
    N = 4096
    a, b = random(N, N), random(N, N)
    c = torch.empty_like(a)
    calls = {tile: partial(tile_matmul, a, b, *tile) for tile in TILES}
    print(f"At {N} x {N} x {N}:")
    print("tile            warps  TFLOP/s  registers  spilled")
    for tile, times in gpu_time(calls, turns=20).items():
        *block, num_warps = tile
        grid = (triton.cdiv(N, block[0]), triton.cdiv(N, block[1]))
        kernel = tile_kernel[grid](
            a, b, c, N, N, N, *block, "ieee", num_warps=num_warps
        )
        rate = tflops(N, N, N, times)
        print(f"{' x '.join(map(str, block)):14} {num_warps:6}", end=" ")
        print(f"{rate:8.0f} {kernel.n_regs:10} {kernel.n_spills:8}")

# %%
# The last four rows have one tile of ``c``. With 4 warps its accumulator is
# spilled, and with a ``BLOCK_K`` of 32 the loop takes twice as many steps. We
# keep 128 x 256 x 64 with 8 warps.

# %%
# Fuse more work into it
# ----------------------
#
# After the loop, ``acc`` is the finished tile, in registers and in float32. An
# operation on each element of the product costs little there. PyTorch would
# run it as a second kernel, which reads the whole product and writes it again.
# For a bias and a ReLU, give the kernel a ``bias_ptr``, and put three lines
# before the store::
#
#     bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
#     acc += bias  # (1, BLOCK_N), the same for every row
#     acc = tl.where(acc < 0.0, 0.0, acc)  # ReLU; a NaN stays a NaN
#
# ``linear_gelu.py`` is such a layer, with its backward. Exercise 1 fuses more.

# %%
# The backward
# ------------
#
# With the gradient :math:`g` of ``c``, the gradients of ``a`` and ``b`` are
# products too:
#
# .. math:: \nabla a = g\,b^T, \qquad \nabla b = a^T g.
#
# So the backward needs no new kernel. Ours takes contiguous matrices alone, so
# we copy each transposed operand first. To train with it, wrap both directions
# in a ``torch.autograd.Function``, as ``layer_norm.py`` does.

LARGE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8}


def tile_matmul_backward(a, b, grad):
    """Return the gradients of a and b, given that of their product."""
    grad = grad.contiguous()  # that of c.sum(), for one, has strides of 0
    grad_a = tile_matmul(grad, b.T.contiguous(), **LARGE)
    grad_b = tile_matmul(a.T.contiguous(), grad, **LARGE)
    return grad_a, grad_b


if __name__ == "__main__":
    a, b, grad = random(96, 320), random(320, 80), random(96, 80)
    grad_a, grad_b = tile_matmul_backward(a, b, grad)
    for actual, operands in ((grad_a, (grad, b.T)), (grad_b, (a.T, grad))):
        expected, bound = error_bound(*operands)
        assert ((actual - expected).abs() <= bound).all()
    print("both gradients are within the tolerance")

# %%
# The op
# ------
#
# The op takes operands of any strides and sizes in four dtypes, and chooses
# among the ways that the next lessons teach: by counting rounds of tiles and
# bytes, it takes pointers or the copy engine, a tile, and whether sums are
# split. Its source and its figures are on its own page.

from triton_gallery_ops.matmul import matmul

# %%
# Is the op right? It keeps the same bound:

if __name__ == "__main__":
    for dtype in (torch.float16, torch.float32):
        a, b = random(40, 320, dtype=dtype), random(320, 72, dtype=dtype)
        expected, bound = error_bound(a, b)
        assert ((matmul(a, b) - expected).abs() <= bound).all()
    print("the op is within the tolerance in half precision and in float32")

# %%
# The result
# ----------
#
# We multiply tokens by a weight of 4096 x 14336, as in the feed-forward layer
# of a model, in bfloat16. *Triton* is the op. The other two are this page's
# kernel: the *first kernel* has tiles of 64 x 64, the *large tile* is 128 x 256
# with 8 warps. *cuBLAS* is ``torch.matmul``.

TOKENS = [16, 64, 256, 1024, 4096, 8192]
SERIES = {
    "Triton": matmul,
    "Triton, first kernel": tile_matmul,
    "Triton, large tile": partial(tile_matmul, **LARGE),
    "cuBLAS": torch.matmul,
}


def layer_calls(tokens):
    x = random(tokens, 4096, dtype=torch.bfloat16)
    weight = random(4096, 14336, dtype=torch.bfloat16)
    return {name: partial(f, x, weight) for name, f in SERIES.items()}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {tokens: gpu_time(layer_calls(tokens)) for tokens in TOKENS}
    results = rate_table(
        times, "tokens", "TFLOP/s", lambda n: 2e-9 * n * 4096 * 14336
    )
    print(results.to_string())
    rates = results.pivot(index="tokens", columns="series", values="TFLOP/s")
    rates.plot(logx=True)
    part = rates["Triton"] / rates["cuBLAS"]
    print(f"The op has {part.min():.0%} of cuBLAS's rate at", end=" ")
    print(f"{part.idxmin()} tokens, its least, and {part.max():.0%}", end=" ")
    print(f"at {part.idxmax()}, its most.")

# %%
# With few tokens, every line is low: reading the weight takes longer than the
# arithmetic, and ``skinny_matmul.py`` is about that. With many, something is
# left between this page's tiles and cuBLAS. ``tile_order.py`` lists the causes,
# and mends one of them, the order in which programs take their tiles.

# %%
# Exercises
# ---------
#
# 1. Return ``relu(a @ b + bias) + x`` from one kernel, where ``x`` has the
#    shape of the product.


def fused_matmul(a, b, bias, x):
    return None  # your code


def check_fused(function):
    a, b = random(100, 40), random(40, 70)
    bias, x = random(70), random(100, 70)
    y = function(a, b, bias, x)
    if y is None:
        return "not solved yet"
    expected = torch.relu(a.double() @ b.double() + bias) + x
    # The store rounds by 2**-11; sums in float32 are off by less than 1e-4.
    is_right = torch.allclose(y.double(), expected, rtol=2.0**-11, atol=1e-4)
    return "right" if is_right else "wrong"


if __name__ == "__main__":
    print(check_fused(fused_matmul))

# %%
# 2. How many registers of each thread does a float32 accumulator take? Compare
#    your numbers with the table: which launch had to spill?


def accumulator_registers(BLOCK_M, BLOCK_N, num_warps):
    """Return the registers of a thread that the accumulator takes."""
    return None  # your code


def check_registers(function):
    tiles = (64, 64, 4), (128, 256, 8), (128, 256, 4)
    counts = [function(*tile) for tile in tiles]
    if None in counts:
        return "not solved yet"
    return "right" if counts == [32, 128, 256] else "wrong"


if __name__ == "__main__":
    print(check_registers(accumulator_registers))

# %%
# Answers
# -------
#
# **1.** A tile of ``x`` is loaded as the tile of ``c`` is stored.


@triton.jit
def fused_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    x_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_m = tl.program_id(axis=0).to(tl.int64)
    pid_n = tl.program_id(axis=1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_k[:, None] * N + offs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        a_mask = (offs_m < M) & (start + offs_k[None, :] < K)
        b_mask = (start + offs_k[:, None] < K) & (offs_n < N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
    acc += bias  # (1, BLOCK_N), the same for every row
    acc = tl.where(acc < 0.0, 0.0, acc)  # ReLU; a NaN stays a NaN
    c_mask = (offs_m < M) & (offs_n < N)
    acc += tl.load(x_ptr + offs_m * N + offs_n, mask=c_mask, other=0.0)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


def fused_answer(a, b, bias, x):
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
    fused_kernel[grid](a, b, bias, x, c, M, N, K, 64, 64, 32)
    return c


if __name__ == "__main__":
    answer = check_fused(fused_answer)
    print(answer)
    assert answer == "right"

# %%
# **2.** A warp has 32 threads, and a register holds one float32 number. The
# tile of 128 x 256 with 4 warps needs 256 registers for its accumulator alone,
# and a thread has 255.

if __name__ == "__main__":
    answer = check_registers(lambda M, N, warps: M * N // (32 * warps))
    print(answer)
    assert answer == "right"
