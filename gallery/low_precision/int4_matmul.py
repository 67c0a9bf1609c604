# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply by weights of 4 bits: unpack them in registers, two at a time and
# without a conversion, on their way to the tensor cores."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "it packs weights, of GPTQ and AWQ too, and writes them out"
#
# [[tool.triton-gallery.step_through]]
# kernel = "int4_kernel"
# caption = """
# Two rows of x times a 2 x 16 matrix W, in groups of 8 (a GPU needs larger
# blocks). A word holds the eight codes of a row and a group as hexadecimal
# digits, the first one lowest: 82451 is 0x14213. Codes past the last digit,
# three here, are 0. words[0] has group 0, and words[1] group 1."""
# registers = ["words", "codes", "w", "acc"]
# call = """int4_kernel[1, 1, 1](x, pack_in_order(codes, 8), scale, zero, y,
#     2, 2, 16, 2, 2, 8, unpack_in_order)"""
# expected.y = """x @ (scale.T.repeat_interleave(8, 1)
#     * (codes - zero.T.repeat_interleave(8, 1))).T"""
# start = [0, 2]
# inputs.x = "integers(-1, 2, 2, 16)"
# inputs.first = "(torch.arange(16) % 8 < 5).int()"
# inputs.codes = "integers(1, 5, 2, 16).int() * first"
# inputs.scale = "integers(1, 4, 2, 2)"
# inputs.zero = "integers(0, 4, 2, 2).flip(1)"
# inputs.y = "torch.zeros(2, 2)"
# ///
r"""
4-bit weights, 16-bit activations (W4A16, int4)
===============================================

To write one token, a language model reads all of its weights. With weights of 4
bits instead of 16, it could write up to four times as fast, if unpacking cost
no time (*The result* shows what we reach). This page unpacks weights in
registers, on their way to the tensor cores. With many tokens at a time, as when
a model reads a prompt, arithmetic takes the time: 4-bit weights then save only
memory.

After this page you can

* pack eight integers of 4 bits into a word, and unpack them in a kernel;
* turn integers into floats with an AND and an OR, two at a time;
* order them in memory so that each thread reads those that it multiplies.
"""

# sphinx_gallery_tags = ["matmul", "memory bound", "split-K", "quantization"]
import os
import re
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import linear

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
INSTRUCTIONS = {
    "integer to float": r"cvt\.rn\.f16\.[su]\d+",
    "subtractions of pairs": r"(?:sub|add)\.(?:rn\.)?f16x2",
    "stores to shared memory": r"st\.shared",
    "loads from shared memory": r"ld\.shared",
}


@compile_only
def count_instructions(order):
    """Compile the kernel for an H100, and count in its PTX."""
    half, sizes = [torch.float16], [1, 8192, 8192]
    arguments = half + [torch.int32] + 3 * half + sizes  # types and numbers
    unpack = {"in order": unpack_in_order, "in pairs": unpack_pairs}[order]
    options = {"num_stages": 4, "grid": (1,)}
    compiled = int4_kernel.warmup(*arguments, 16, 64, 128, unpack, **options)
    code = compiled.asm["ptx"]
    return {what: len(re.findall(p, code)) for what, p in INSTRUCTIONS.items()}


def draw_words(pack):
    """Draw 32 columns of a row, and the words that they are packed into."""
    words = pack(torch.eye(32, 128))[0]  # row c has a 1 in column c
    colours = ["#a9c9ef", "#f7d394", "#b4dfb4", "#e3bbe3"]
    _, axes = plt.subplots(figsize=(8, 1.5), layout="constrained")
    for column, row in enumerate(words.tolist()):
        (word,) = (w for w, bits in enumerate(row) if bits)
        place = 2 * word + row[word].bit_length() // 4  # word 4 t from 8 t on
        for x, y in ((column, 1), (place, 0)):
            axes.bar(x, 0.8, 0.95, y, color=colours[column // 2 % 4])
            axes.text(x, y + 0.4, column, ha="center", va="center", size=8)
    names = [f"word {word}" for word in (0, 4, 8, 12)]
    axes.set(xticks=[3.5, 11.5, 19.5, 27.5], xticklabels=names)
    axes.set(yticks=[0.4, 1.4], yticklabels=["words", "a row"])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    plt.show()


# %%
# In PyTorch
# ----------
#
# Each 128 weights of a row are a *group*. A group has a *scale* and a *zero
# point*, and each weight has a *code* from 0 to 15:
#
# .. math:: w = (\mathrm{code} - \mathrm{zero}) \cdot \mathrm{scale}.
#
# So a weight has one of 16 values, ``scale`` apart, and the zero point is the
# code of the value 0. With such weights ``W`` (N, K), we compute ``x @ W.T``.

GROUP = 128


def make_weights(N, K):
    """Return random codes (N, K), scales and zero points (K / GROUP, N)."""
    codes = torch.randint(16, (N, K), **kind)  # kind: generator, device
    scale = (torch.rand(K // GROUP, N, **kind) + 0.5).half()
    zero = torch.randint(16, (K // GROUP, N), **kind).half()
    return codes, scale, zero


def dequantize(codes, scale, zero):
    """Return the weights (N, K) in float64, by the formula above."""
    scale = scale.double().T.repeat_interleave(GROUP, 1)
    zero = zero.double().T.repeat_interleave(GROUP, 1)
    return (codes - zero) * scale


# %%
# The first kernel
# ----------------
#
# Eight codes are packed into a *word*, an integer of 32 bits. Here code ``i``
# is in the bits ``4 * i`` to ``4 * i + 3``: a shift brings it to the lowest
# bits, and an AND with 15 clears all others.


def pack_in_order(codes, GROUP=GROUP):
    """Return words (K / GROUP, N, GROUP / 8) of eight codes in a row."""
    codes = codes.long().view(len(codes), -1, GROUP // 8, 8)
    words = (codes << 4 * torch.arange(8, device=codes.device)).sum(3)
    return words.transpose(0, 1).to(torch.int32).contiguous()


@triton.jit
def unpack_in_order(words, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return codes (BLOCK_N, GROUP) of words (BLOCK_N, GROUP // 8)."""
    codes = words[:, :, None] >> (4 * tl.arange(0, 8)[None, None, :])
    return (codes & 15).reshape(BLOCK_N, GROUP)  # >> had copied the sign


# %%
# A program multiplies 64 rows of ``W`` by 16 of ``x``. ``W`` comes first, as
# tensor cores can read the first tile from registers. A turn of the loop takes
# one group. There a row has one scale: it multiplies the product, not weights.


@triton.jit
def int4_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    UNPACK: tl.constexpr,  # a jit function, such as unpack_in_order
):
    # In int32 the offset of a row would overflow past element 2**31.
    pid_n = tl.program_id(axis=0).to(tl.int64)  # rows of W
    pid_k = tl.program_id(axis=1).to(tl.int64)  # part of K; 0 until K is split
    pid_m = tl.program_id(axis=2).to(tl.int64)  # rows of x
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]  # (1, BLOCK_M)
    offs_k = tl.arange(0, GROUP)[:, None]  # (GROUP, 1)
    offs_w = tl.arange(0, GROUP // 8)[None, :]  # (1, GROUP // 8)
    # Past the last row of W, read that row again: its result is not stored.
    rows = tl.minimum(offs_n, N - 1)
    steps = K // GROUP // tl.num_programs(axis=1)  # groups of a program
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(pid_k * steps, (pid_k + 1) * steps):
        words = tl.load(words_ptr + (group * N + rows) * (GROUP // 8) + offs_w)
        scale = tl.load(scale_ptr + group * N + rows)  # (BLOCK_N, 1)
        zero = tl.load(zero_ptr + group * N + rows)  # (BLOCK_N, 1)
        codes = UNPACK(words, BLOCK_N, GROUP)  # (BLOCK_N, GROUP)
        w = codes.to(zero.dtype) - zero  # integers, exact in float16
        x_ptrs = x_ptr + offs_m * K + group * GROUP + offs_k
        x = tl.load(x_ptrs, mask=offs_m < M, other=0.0)  # (GROUP, BLOCK_M)
        acc += tl.dot(w, x) * scale  # w @ x, on the tensor cores
    y_ptrs = y_ptr + pid_k * M * N + offs_m * N + offs_n
    tl.store(y_ptrs, acc, mask=(offs_n < N) & (offs_m < M))


def multiply(x, words, scale, zero, UNPACK=unpack_in_order, splits=1):
    """Return x @ W.T, in the dtype of x; UNPACK must fit the words' order."""
    (M, K), (groups, N) = x.shape, scale.shape
    assert x.dtype == scale.dtype == zero.dtype
    assert all(t.is_contiguous() for t in (x, words, scale, zero))
    assert words.shape == (groups, N, GROUP // 8)
    assert groups * GROUP == K
    assert groups % splits == 0
    dtype = x.dtype if splits == 1 else torch.float32
    y = x.new_empty(splits, M, N, dtype=dtype)
    BLOCK_M, BLOCK_N = 16, 64  # 16 rows of x, even if M is less
    grid = triton.cdiv(N, BLOCK_N), splits, triton.cdiv(M, BLOCK_M)
    given = x, words, scale, zero, y, M, N, K, BLOCK_M, BLOCK_N, GROUP, UNPACK
    int4_kernel[grid](*given, num_stages=4)  # loads run 3 turns ahead
    return y[0] if splits == 1 else y.sum(0).to(x.dtype)


# %%
# Is it right?
# ------------
#
# Each of ``K`` additions in float32 may cut off :math:`2^{-23}` of the sum of
# all ``|x w|``. The store in float16 rounds by :math:`2^{-11}` of a result.


def check(function, pack):
    """Print the largest error divided by its bound: at most 1 passes."""
    x, packed = torch.randn(20, 512, **kind).half(), make_weights(100, 512)
    y = function(x, pack(packed[0]), *packed[1:]).double()
    x, weight = x.double(), dequantize(*packed)
    bound = 512 * 2**-23 * (x.abs() @ weight.abs().T) + 2**-11 * y.abs()
    part = (y - x @ weight.T).abs() / bound
    print(f"at most {part.max():.2f} of the tolerance")
    torch.testing.assert_close(part, 0 * part, rtol=0, atol=1)


if __name__ == "__main__":
    check(multiply, pack_in_order)

# %%
# How fast?
# ---------
#
# One row times ``W`` (N x K). A weight has 4.25 bits: 4 of its code, and 32 /
# 128 of scale and zero point. Rates count these bits even for cuBLAS, which
# reads 16. *Roof* is ``a + b``: its reads and writes are 4.25 bits a weight.


def show_rates(ours):
    columns = {}
    for N, K in ((4096, 4096), (8192, 8192), (14336, 4096)):
        times = gpu_time(calls(ours, 1, N, K)).items()
        moved = 1e-6 * floor_bytes(N, K)
        columns[f"{N} x {K}"] = {who: moved / t[0] for who, t in times}
    print(f"GB/s, for {8 * floor_bytes(N, K) / N / K} bits a weight")
    print(pd.DataFrame(columns).round().astype(int).to_string())


def floor_bytes(N, K):
    return N * K // 2 + 2 * 2 * N * K // GROUP


def weights(N, K):
    """Return random words, scales and zero points, in any order of codes."""
    shape = K // GROUP, N, GROUP // 8
    words = torch.randint(-(2**31), 2**31, shape, device=DEVICE)
    pairs = torch.ones(2, K // GROUP, N, device=DEVICE, dtype=torch.float16)
    return words.to(torch.int32), pairs[0] / 64, 8 * pairs[1]


def calls(ours, M, N, K):
    """Return what is timed, by name; ours are functions of x and weights."""
    x = torch.randn(M, K, **kind).half()
    weight = torch.randn(N, K, **kind).half()
    given = x, *weights(N, K)
    part = floor_bytes(N, K) // 3 // 2  # two are read, one is written
    a, b, out = (torch.randn(part, **kind).half() for _ in range(3))
    timed = {name: partial(function, *given) for name, function in ours.items()}
    timed["cuBLAS"] = partial(linear, x, weight)
    return timed | {"Roof": partial(torch.add, a, b, out=out)}


OURS = {"in order": multiply}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# Floats without a conversion
# ---------------------------
#
# All rates count the same bytes, so a higher rate is a shorter time. cuBLAS
# reads 16 / 4.25 times as many bytes as our kernel. If only bytes took time,
# ours would be several times as fast. The rates above are far from that.
#
# What else does it do? A program's threads, 128 by default, share a tile of 64
# x 128 codes, so in each group a thread converts 64 from integers to floats.
# And ``reshape`` leaves codes in threads that do not multiply them, so they
# move through *shared memory*, which all threads of a program reach. A trick
# with bits avoids the conversion; another order of the codes avoids the moves.
#
# A float16 number has a sign, five bits of exponent and ten of *mantissa* (its
# digits after the first). From 1024 to 2047, neighbouring numbers are 1 apart:
# the last bit of the mantissa counts ones. So an OR of a code into the bits of
# 1024, 0x6400, gives the bits of ``1024 + code``:

if __name__ == "__main__":
    floats = (torch.arange(16, dtype=torch.int16) | 0x6400).view(torch.float16)
    print(floats[:4].tolist(), "to", floats[-1].item())

# %%
# A word has room for two float16 numbers. An AND with 0x000F000F keeps two
# codes, 16 bits apart. An OR makes floats of both, and one instruction
# subtracts 1024 from both. The same on the word shifted by 4, 8 and 12 bits
# unpacks the other six codes.
#
# Which codes should share a word? The tensor cores' instruction fixes which
# thread holds which 16-bit element of the first tile. Four threads, ``t`` from
# 0 to 3, share a row; of every eight columns, thread ``t`` holds ``2 t`` and
# ``2 t + 1``. A word packed in order has codes of all four threads. So instead
# we pack into a word these pairs of one thread, from four times eight columns
# (see the picture below). The codes of a pair are 16 bits apart: one AND keeps
# both. A thread's four words of a group are side by side, as words ``4 t`` to
# ``4 t + 3``: 16 bytes, one load.


def pack_in_pairs(codes, GROUP=GROUP):
    """Return words as pack_in_order, in the order of the tensor cores."""
    # Column 32 i + 8 c + 2 t + h is code c in half h of word i of thread t.
    shape = len(codes), -1, GROUP // 32, 4, 4, 2  # N, group, i, c, t, h
    codes = codes.long().view(shape)
    codes = codes.permute(1, 0, 4, 2, 3, 5)  # group, N, t, i, c, h
    shifts = 4 * torch.arange(4, device=codes.device)[:, None]
    shifts = shifts + 16 * torch.arange(2, device=codes.device)  # (c, h)
    return (codes << shifts).sum((4, 5)).flatten(2).to(torch.int32)


# %%
# The upper line is the first 32 columns of a row, a colour for each thread. The
# lower line is the four words that hold them, from their lowest bits on. Word 0
# has columns 0, 8, 16 and 24 in its low half, and 1, 9, 17 and 25 in its high
# half. Each word has one colour: all its codes are of one thread. (Words 1, 5,
# 9 and 13 hold the next 32 columns.)

if __name__ == "__main__":
    draw_words(pack_in_pairs)

# %%
# A new function for ``UNPACK`` undoes this order. ``tl.join(a, b)`` puts the
# elements of two tensors side by side, in a new last dimension of 2. So joining
# ``[c0, c2]`` and ``[c1, c3]`` gives ``[[c0, c1], [c2, c3]]``: the codes of a
# word are in order. ``permute`` then puts the columns of all words in order.
#
# No code changes its thread (see the count below). ``num_stages=4`` copies
# words to shared memory ahead of their use. Triton knows in which thread
# ``tl.dot`` needs each element, and has that thread read, from this copy, the
# words whose codes it multiplies: in this order, all eight of a word. The
# comments follow word 0 of a row:


@triton.jit
def unpack_pairs(words, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return codes (BLOCK_N, GROUP), as floats, of BLOCK_N rows of words."""
    tl.static_assert(GROUP % 32 == 0)  # whole words of four threads
    c0 = (words & 0x000F000F) | 0x64006400  # word 0: columns 0 and 1
    c1 = ((words >> 4) & 0x000F000F) | 0x64006400  # columns 8 and 9
    c2 = ((words >> 8) & 0x000F000F) | 0x64006400  # columns 16 and 17
    c3 = ((words >> 12) & 0x000F000F) | 0x64006400  # columns 24 and 25
    even = tl.join(c0, c2)  # (BLOCK_N, GROUP // 8, 2)
    odd = tl.join(c1, c3)  # (BLOCK_N, GROUP // 8, 2)
    pairs = tl.join(even, odd)  # (..., 2, 2): c0, c1, c2, c3
    # int16 keeps the lower half of each: columns 0, 8, 16, 24; then the upper
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    codes = tl.join(low, high)  # (..., 2, 2, 2): columns 0, 1, 8, 9, 16, ...
    # The axis of words becomes two: thread t and its word i.
    codes = codes.reshape(BLOCK_N, 4, GROUP // 32, 4, 2)  # row, t, i, c, h
    codes = codes.permute(0, 2, 3, 1, 4)  # row, i, c, t, h: columns in order
    return codes.reshape(BLOCK_N, GROUP) - 1024.0


in_pairs = partial(multiply, UNPACK=unpack_pairs)

if __name__ == "__main__":
    check(in_pairs, pack_in_pairs)
    check(partial(in_pairs, splits=4), pack_in_pairs)  # used below

# %%
# ``count_instructions``, from the folded cell, compiles the kernel for an H100,
# which needs no GPU. In the PTX, NVIDIA's assembly language, it counts a
# thread's instructions: the loop's body once (one group), and those outside it.

if __name__ == "__main__":
    orders = ("in order", "in pairs")
    counts = pd.DataFrame({name: count_instructions(name) for name in orders})
    print(counts.to_string())
    assert counts.loc["integer to float", "in pairs"] == 0

# %%
# *In pairs* converts no code, and stores none to shared memory. It subtracts
# 1024 and then the zero point from each of the thread's 32 pairs. *In order*
# subtracts from one code at a time, so it has no pairs to count. Some loads are
# left: in the loop, of the words of the thread's two rows, 16 bytes each; after
# it, of results, which pass through shared memory to be stored in order. (The
# tensor cores read ``x`` there themselves.)

# %%
# Few programs: split the sum
# ---------------------------
#
# A ``W`` of 8192 rows makes only 128 programs. An H100 or H200 has 132
# multiprocessors, and each has room for several programs, of which some work
# while others wait. So we divide ``K`` among ``splits`` programs (*split-K*).
# Each stores its part of the sum, and PyTorch adds the parts in a fixed order:
# the result is the same on every run. The table has all rows again, measured
# anew. Without splits, its columns have 64, 128 and 224 programs.

OURS["in pairs"] = in_pairs
for splits in (2, 4, 8):
    OURS[f"in pairs, splits={splits}"] = partial(in_pairs, splits=splits)

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# The op
# ------
#
# ``int4_matmul``
#
# * chooses the tile and ``splits`` by the sizes;
# * loads a scale and its zero point as one word, and subtracts once, not twice
#   (exercise 2);
# * takes bfloat16, other groups, and weights of GPTQ and AWQ, two widely used
#   ways of choosing 4-bit weights;
# * has a gradient for ``x``;
# * with more than 512 rows of ``x`` on an H100 or H200, or 64 elsewhere, writes
#   ``W`` in 16 bits, and leaves the product to cuBLAS.

from triton_gallery_ops.int4_matmul import int4_matmul

# %%
# The result
# ----------
#
# We multiply M rows of ``x``, 1 to 16, by a ``W`` of 8192 x 8192. *Triton* is
# the op, *Triton, this page* is ``in_pairs`` with ``splits=4``, whose time
# includes the sum of its parts. Rates are bytes, the same for any M, divided by
# GPU time: where a line is flat, more rows take no longer.

SIZE = 8192


def result_calls(M):
    """Return what the chart times, by name; the op's pairs are made before."""
    timed = calls(
        {"Triton, this page": OURS["in pairs, splits=4"]}, M, SIZE, SIZE
    )
    x, words, scale, zero = timed["Triton, this page"].args
    pairs = torch.stack([scale, zero], -1)
    return {"Triton": partial(int4_matmul, x, words, pairs)} | timed


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: gpu_time(result_calls(M)) for M in (1, 2, 4, 8, 16)}
    moved = 1e-6 * floor_bytes(SIZE, SIZE)
    results = rate_table(times, "M", "GB/s", lambda M: moved)
    print(results.to_string())
    rates = results.pivot(index="M", columns="series", values="GB/s")
    rates.plot(logx=True, title="8192 x 8192, one group has 128 weights")
    faster = rates["Triton"] / rates["cuBLAS"]
    part = rates["Triton"] / rates["Roof"]
    print(f"On the GPU, the op is {faster.min():.1f} to", end=" ")
    print(f"{faster.max():.1f} times as fast as cuBLAS with float16 weights.")
    print(f"It has {part.min():.0%} to {part.max():.0%} of the roof's rate.")

# %%
# The line below the chart is CPU time: how long Python and PyTorch take to
# start a call. Outside a CUDA graph, a call among many takes the longer of its
# CPU and GPU times; in one, the GPU time alone counts (``cuda_graphs.py``). In
# the record the op's GPU time is shorter than that of cuBLAS, but its CPU time
# is longer than both times of cuBLAS: outside a CUDA graph the op is slower.

# %%
# Exercises
# ---------
#
# 1. A bfloat16 number has eight bits of exponent and seven of mantissa. Which
#    bits replace 0x6400, and which number replaces 1024?

bits, number = None, None  # yours


def check_bits(bits, number, dtype, zero=0):
    """Say whether a code in the bits makes number - zero + code."""
    if bits is None:
        return "not solved yet"
    codes = torch.arange(16)
    floats = (codes + bits).to(torch.int16).view(dtype) - number
    return "right" if torch.equal(floats, (codes - zero).to(dtype)) else "wrong"


if __name__ == "__main__":
    print(check_bits(bits, number, torch.bfloat16))

# %%
# 2. The op adds a code to bits that depend on the zero point, reads the sum's
#    bits as a float16 and subtracts 1040, which gives ``code - zero``. Return
#    the bits for a zero point from 0 to 16 (GPTQ has 1 to 16). Why does the op
#    not subtract 1024?


def bits_of(zero):
    return None  # yours


def check_zeros(bits_of, number=1040):
    """Say whether the bits are right for all zero points."""
    tried = [(bits_of(zero), number, torch.float16, zero) for zero in range(17)]
    answers = {check_bits(*one) for one in tried}
    return answers.pop() if len(answers) == 1 else "wrong"


if __name__ == "__main__":
    print(check_zeros(bits_of))

# %%
# Answers
# -------
#
# **1.** With seven bits of mantissa, the last one counts ones from 128 to 255.
# The bits of 128 are 0x4300.

if __name__ == "__main__":
    answer = check_bits(0x4300, 128, torch.bfloat16)
    print(answer)
    assert answer == "right"

# %%
# **2.** They are the bits of ``1040 - zero``. Below 1024 the last bit counts
# halves, so a code would count half as much. With 1040, the largest zero point
# leaves 1024. We try both.


def bits_answer(zero, base=1040):
    return torch.tensor(base - zero).half().view(torch.int16).item()


if __name__ == "__main__":
    for base in (1040, 1024):
        answer = check_zeros(partial(bits_answer, base=base), base)
        print(f"{base}: {answer}")
        assert (answer == "right") == (base == 1040)
