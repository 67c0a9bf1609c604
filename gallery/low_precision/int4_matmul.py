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
# kernel = "plain_kernel"
# caption = """
# Two rows of x times a 4 x 16 weight, in tiles of 4 rows and groups of 8. A
# word holds the eight codes of a row and a group; here the codes are small, so
# that words are short. Each group has its own scale and zero point."""
# registers = ["words", "codes", "zero", "w", "x", "scale", "acc"]
# call = "plain_launch(x, pack_in_order(codes), scale, zero, 8, 4)"
# expected.y = """x @ (scale.T.repeat_interleave(8, 1)
#     * (codes - zero.T.repeat_interleave(8, 1))).T"""
# start = [0, 2]
# inputs.x = "integers(-1, 2, 2, 16)"
# inputs.first = "(torch.arange(16) % 8 < 3).int()"
# inputs.codes = "integers(0, 4, 4, 16).int() * first"
# inputs.scale = "integers(1, 3, 2, 4)"
# inputs.zero = "integers(1, 2, 2, 4)"
# ///
r"""
4-bit weights, 16-bit activations (W4A16, int4)
===============================================

A language model that writes one token reads all of its weights for it. Weights
of 4 bits are a quarter of the bytes of float16. The model could write four
times as fast, if unpacking cost no time. This page unpacks weights in
registers, on their way to the tensor cores. For many rows at a time, as in
training, arithmetic takes the time, and only memory is saved.

After this page you can

* pack eight codes into a word, and unpack them in a kernel;
* turn integers into floats with an AND and an OR, two at a time;
* order codes in memory so that each thread reads those it multiplies.
"""

# sphinx_gallery_tags = ["matmul", "memory bound", "split-K", "quantization"]
import os
import re
from functools import partial

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

# %%
# In PyTorch
# ----------
#
# Each 128 weights of a row are a *group*. A group has a *scale* and a *zero
# point*, and each weight has a *code* from 0 to 15:
#
# .. math:: w = (\mathrm{code} - \mathrm{zero}) \cdot \mathrm{scale}.
#
# The scale is a step, and the zero point is the code of the weight 0. With few
# rows of ``x``, the *floor*, what any kernel has to move, is little more than
# codes, scales and zero points.

GROUP = 128
# DEVICE, from the folded cell, is the GPU; without one, it is the CPU.
generator = torch.Generator(device=DEVICE).manual_seed(0)


def quantize(weight):
    """Return codes (N, K), and scales and zero points (K / GROUP, N)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).half()
    zero = (-low / scale).round()
    codes = (groups / scale[..., None] + zero[..., None]).round()
    codes = codes.clamp(0, 15).flatten(1).int()
    return codes, scale.T.contiguous(), zero.half().T.contiguous()


def spread(t):
    """Return the scale or zero point of each weight (N, K)."""
    return t.double().T.repeat_interleave(GROUP, 1)


def random(*shape):
    return torch.randn(shape, generator=generator, device=DEVICE).half()


if __name__ == "__main__":
    codes, scale, zero = quantize(random(256, 512))
    bits = 4 + 8 * (scale.nbytes + zero.nbytes) / codes.numel()
    print(f"{bits} bits a weight: {bits / 16:.0%} of the bytes of float16")

# %%
# The first kernel
# ----------------
#
# Eight codes are packed into a *word*, an integer of 32 bits. Here code ``i``
# is in the bits ``4 * i`` to ``4 * i + 3``: a shift brings it to the lowest
# bits, and an AND with 15 takes it out.


def pack_in_order(codes):
    """Return words (N, K / 8) of the eight codes after each other."""
    shifts = 4 * torch.arange(8, device=codes.device)
    codes = codes.long().unflatten(1, (-1, 8))
    return (codes << shifts).sum(2).to(torch.int32)  # the lowest 32 bits


# %%
# A program computes ``BLOCK_N`` rows of the transposed result ``y.T``, in steps
# of one group; the few rows of ``x`` are the second operand of ``tl.dot``.
# ``code - zero`` is exact in float16, and the group's sum is scaled.


@triton.jit
def plain_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    # In int32 the offset of a row would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = tl.arange(0, BLOCK_M)[None, :]  # (1, BLOCK_M)
    offs_k = tl.arange(0, GROUP)[:, None]  # (GROUP, 1)
    offs_w = tl.arange(0, GROUP // 8)[None, :]  # (1, GROUP // 8)
    shifts = 4 * tl.arange(0, 8)[None, None, :]  # (1, 1, 8)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(K // GROUP):
        start = group * GROUP
        words = tl.load(w_ptr + offs_n * (K // 8) + start // 8 + offs_w)
        scale = tl.load(scale_ptr + group * N + offs_n)  # (BLOCK_N, 1)
        zero = tl.load(zero_ptr + group * N + offs_n)  # (BLOCK_N, 1)
        codes = (words[:, :, None] >> shifts) & 15
        codes = codes.reshape(BLOCK_N, GROUP)
        w = codes.to(zero.dtype) - zero  # (BLOCK_N, GROUP)
        x_ptrs = x_ptr + offs_m * K + start + offs_k  # (GROUP, BLOCK_M)
        x = tl.load(x_ptrs, mask=offs_m < M, other=0.0)
        acc += tl.dot(w, x) * scale
    tl.store(y_ptr + offs_m * N + offs_n, acc, mask=offs_m < M)


def plain_launch(x, words, scale, zero, GROUP=GROUP, BLOCK_N=64):
    """Return x @ W.T for up to 16 rows of x."""
    (M, K), N = x.shape, words.shape[0]
    assert M <= 16
    assert N % BLOCK_N == 0
    y = x.new_empty(M, N)
    BLOCK_M = 16 if BLOCK_N >= 16 else M  # of tl.dot on a GPU, at least 16
    arguments = x, words, scale, zero, y, M, N, K, BLOCK_M, BLOCK_N, GROUP
    plain_kernel[(N // BLOCK_N,)](*arguments)
    return y


# %%
# Is it right?
# ------------
#
# We compare with the product by the weights that the codes stand for. Each of
# the ``K`` additions may be off by :math:`2^{-23}` of the sum of the terms'
# magnitudes, and the store rounds to float16, by at most half its ``eps``.


def check(function, pack, M=3, N=128, K=512):
    """Print how much of the tolerance a function takes; raise if all."""
    x, (codes, scale, zero) = random(M, K), quantize(random(N, K))
    weight = (codes - spread(zero)) * spread(scale)
    expected = linear(x.double(), weight)
    bound = K * 2.0**-23 * linear(x.double().abs(), weight.abs())
    bound += torch.finfo(x.dtype).eps / 2 * expected.abs()
    part = (function(x, pack(codes), scale, zero) - expected).abs() / bound
    print(f"at most {part.max():.2f} of the tolerance")
    torch.testing.assert_close(part, 0 * part, rtol=0, atol=1)


if __name__ == "__main__":
    check(plain_launch, pack_in_order)

# %%
# How fast?
# ---------
#
# We multiply one row by three sizes of weights. Beside our kernel are cuBLAS
# with weights of 16 bits, and the *roof*, PyTorch's own sum over the bytes of
# the floor. All rates count these bytes alone.


def show_rates(ours, M=1):
    """Print GB/s for three sizes of weights."""
    rows = {}
    for N, K in ((4096, 4096), (8192, 8192), (14336, 4096)):
        times = gpu_time(calls(ours, M, N, K)).items()
        moved = 1e-6 * floor_bytes(N, K)
        rows[f"{N} x {K}"] = {who: moved / t[0] for who, t in times}
    print("GB/s, rows of x:", M)
    print(pd.DataFrame(rows).T.round().to_string())


def floor_bytes(N, K):
    return N * K // 2 + 2 * 2 * N * K // GROUP


def weights(N, K):
    """Return random words, scales and zero points, in any order of codes."""
    words = torch.randint(-(2**31), 2**31, (N * K // 8,), device=DEVICE)
    pairs = torch.ones(2, K // GROUP, N, device=DEVICE, dtype=torch.float16)
    return words.to(torch.int32), pairs[0] / 64, 8 * pairs[1]


def calls(ours, M, N, K):
    """Return what is timed, by name; ours are functions of x and weights."""
    x, (words, scale, zero), weight = random(M, K), weights(N, K), random(N, K)
    floor = torch.ones(floor_bytes(N, K) // 4, device=DEVICE).view(-1, 1024)
    timed = {
        name: partial(f, x, words.view(shape(N, K)), scale, zero)
        for name, (f, shape) in ours.items()
    }
    timed["cuBLAS"] = partial(linear, x, weight)
    return timed | {"Roof": partial(torch.sum, floor, 1)}


OURS = {"plain_kernel": (plain_launch, lambda N, K: (N, K // 8))}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# What does unpacking cost?
# -------------------------
#
# The compiled code says. We compile the kernel for an H100, which needs no GPU,
# and count in its PTX, the assembly language of NVIDIA, what each thread does
# for a group:

PATTERNS = {
    "integer to float": r"cvt\.rn\.f16\.[su]\d+",
    "AND": r"and\.b32",
    "OR": r"or\.b32",
    "two subtractions": r"(?:sub|add)\.(?:rn\.)?f16x2",
    "stores to shared memory": r"st\.shared",
    "loads from shared memory": r"ld\.shared",
}


@compile_only
def plain_code():
    half, sizes = [torch.float16], [1, 8192, 8192]
    arguments = half + [torch.int32] + 3 * half + sizes
    compiled = plain_kernel.warmup(*arguments, 16, 64, 128, grid=(1,))
    return compiled.asm["ptx"]


def count(code):
    return {what: len(re.findall(p, code)) for what, p in PATTERNS.items()}


if __name__ == "__main__":
    for what, number in count(plain_code()).items():
        print(f"{number:4} {what}")

# %%
# A program's 128 threads unpack 64 x 128 codes, so each of them has 64. Each
# code has a conversion of its own. And ``reshape`` leaves codes with threads
# that do not multiply them, so they pass through *shared memory*, which all
# threads of a program reach: they are stored there, and loaded again.

# %%
# Floats without a conversion
# ---------------------------
#
# A float16 number has a sign, five bits of exponent and ten of *mantissa*. For
# numbers from 1024 to 2047, the last bit of the mantissa counts ones. So the
# bits of 1024, 0x6400, with a code in the lowest four, are those of
# ``1024 + code``:

if __name__ == "__main__":
    codes = torch.arange(16, dtype=torch.int16)
    floats = (codes | 0x6400).view(torch.float16)
    print(floats.tolist())
    assert torch.equal(floats - 1024, codes.half())

# %%
# A word has room for two float16 numbers. One AND with 0x000F000F takes out two
# codes, 16 bits apart. One OR makes floats of both, and one instruction
# subtracts 1024 from both. With three shifts, that reaches all eight codes.
#
# Which codes should share a word? The matrix instruction has a fixed place for
# each element of its first operand. Four threads, ``t`` from 0 to 3, share a
# row. Of every eight columns, thread ``t`` holds the columns ``2 t`` and
# ``2 t + 1``: thread 0 has columns 0, 1, 8, 9, 16, 17 and so on. So we pack
# words that hold the columns of one thread alone. Words ``4 t`` to ``4 t + 3``
# have all columns of a group that thread ``t`` multiplies. The two neighbours
# ``2 t`` and ``2 t + 1`` are 16 bits apart, so that one AND takes out both:


def pack_in_pairs(codes):
    """Return words (K / 128, N, 16), in the order of the tensor cores."""
    N = codes.shape[0]
    # Column 32 i + 8 c + 2 t + h is half h of code c in word 4 t + i.
    codes = codes.long().view(N, -1, 4, 4, 4, 2)  # N, group, i, c, t, h
    codes = codes.permute(1, 0, 4, 2, 3, 5)  # group, N, t, i, c, h
    shifts = 4 * torch.arange(4, device=codes.device)[:, None]
    shifts = shifts + 16 * torch.arange(2, device=codes.device)  # (c, h)
    return (codes << shifts).sum((4, 5)).flatten(2).to(torch.int32)


if __name__ == "__main__":
    for word in (0, 1, 4):
        held = [
            column
            for column in range(GROUP)
            if pack_in_pairs(torch.eye(GROUP)[column : column + 1])[0, 0, word]
        ]
        print(f"word {word:2} has the columns {held}")


# %%
# The kernel undoes this order. ``tl.join`` puts two tensors beside each other
# in a new last dimension, the outer of two joins last, so that the codes c0,
# c1, c2, c3 end up in this order. ``permute`` sorts the dimensions. No code
# moves to another thread, because the thread that multiplies it has unpacked
# it. The words of one group lie together for all rows, so a program reads one
# piece of memory. The grid's second axis will be used further below; here it
# is 1.


@triton.jit
def unpack(words, BLOCK_N: tl.constexpr):
    """Return 1024 + code (BLOCK_N, 128) of words (BLOCK_N, 16)."""
    c0 = (words & 0x000F000F) | 0x64006400
    c1 = ((words >> 4) & 0x000F000F) | 0x64006400
    c2 = ((words >> 8) & 0x000F000F) | 0x64006400
    c3 = ((words >> 12) & 0x000F000F) | 0x64006400
    # (BLOCK_N, 16, 2, 2): the last two dimensions count c0 to c3.
    pairs = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    # Dimensions: row, t, i, c, h; then row, i, c, t, h
    codes = tl.join(low, high).reshape(BLOCK_N, 4, 4, 4, 2)
    return codes.permute(0, 2, 3, 1, 4).reshape(BLOCK_N, 128)


@triton.jit
def pairs_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    M,
    N,
    K,
    steps,  # groups for each program
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_n = tl.program_id(axis=0).to(tl.int64)
    pid_k = tl.program_id(axis=1).to(tl.int64)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = tl.arange(0, BLOCK_M)[None, :]  # (1, BLOCK_M)
    offs_k = tl.arange(0, 128)[:, None]  # (128, 1)
    offs_w = tl.arange(0, 16)[None, :]  # (1, 16)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(steps):
        group = pid_k * steps + step
        words = tl.load(w_ptr + (group * N + offs_n) * 16 + offs_w)
        scale = tl.load(scale_ptr + group * N + offs_n)  # (BLOCK_N, 1)
        zero = tl.load(zero_ptr + group * N + offs_n)  # (BLOCK_N, 1)
        # Both differences are exact. One subtraction of 1024 + zero would make
        # the compiler take pairs apart.
        w = unpack(words, BLOCK_N) - 1024.0 - zero  # (BLOCK_N, 128)
        x_ptrs = x_ptr + offs_m * K + group * 128 + offs_k  # (128, BLOCK_M)
        x = tl.load(x_ptrs, mask=offs_m < M, other=0.0)
        acc += tl.dot(w, x) * scale
    # The sum over the groups of this program, which may be all
    y_ptrs = y_ptr + pid_k * M * N + offs_m * N + offs_n
    tl.store(y_ptrs, acc, mask=offs_m < M)


def pairs_launch(x, words, scale, zero, splits=1):
    """Return x @ W.T in float32, for up to 16 rows of x."""
    (M, K), N = x.shape, words.shape[1]
    assert M <= 16
    assert N % 64 == 0
    assert K % (128 * splits) == 0
    steps = K // 128 // splits
    parts = x.new_empty(splits, M, N, dtype=torch.float32)
    arguments = x, words, scale, zero, parts, M, N, K, steps
    pairs_kernel[(N // 64, splits)](*arguments, 16, 64, num_stages=4)
    return parts[0] if splits == 1 else parts.sum(0)


if __name__ == "__main__":
    check(pairs_launch, pack_in_pairs)

# %%
# We count again, and time both kernels:


@compile_only
def pairs_code():
    half, sizes = [torch.float16], [1, 8192, 8192, 64]
    arguments = half + [torch.int32] + 3 * half + sizes
    options = {"grid": (1,), "num_stages": 4}
    return pairs_kernel.warmup(*arguments, 16, 64, **options).asm["ptx"]


if __name__ == "__main__":
    counts = {"plain": count(plain_code()), "pairs": count(pairs_code())}
    print(pd.DataFrame(counts).to_string())
    assert counts["pairs"]["integer to float"] == 0

OURS["pairs_kernel"] = pairs_launch, lambda N, K: (K // 128, N, 16)

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS)

# %%
# No code is converted, and none is stored to shared memory. The loads that are
# left are of words: with ``num_stages``, the compiler copies the next words to
# shared memory while the present ones are multiplied.
#
# The kernel is faster, and still far from the roof. Why?

# %%
# Few programs: split the sum
# ---------------------------
#
# A weight of 8192 rows is 128 programs, and an H100 has 132 multiprocessors. So
# each multiprocessor has one program at most, of four warps. When these warps
# wait, for memory or for the tensor cores, it has nothing else to do, though it
# has room for several programs. So we divide ``K`` among ``splits`` programs
# (*split-K*). Each stores its part of the sum, and PyTorch adds the parts in a
# fixed order: the result is deterministic.

if __name__ == "__main__":
    check(partial(pairs_launch, splits=4), pack_in_pairs)

SPLITS = {
    f"splits={splits}": (
        partial(pairs_launch, splits=splits),
        lambda N, K: (K // 128, N, 16),
    )
    for splits in (1, 2, 4, 8)
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(SPLITS)

# %%
# The op
# ------
#
# The op chooses the tile and the parts by the sizes, and loads a scale and its
# zero point as one word. In place of the OR it adds the bits of the float
# ``1040 - zero`` to the code: as the last bit counts ones, that gives
# ``1040 - zero + code``, and one subtraction less is needed. It takes bfloat16,
# other groups, any number of rows, and the weights of GPTQ and AWQ, two widely
# used ways of choosing 4-bit weights. It has a gradient for ``x``.

from triton_gallery_ops.int4_matmul import int4_matmul, int4_matmul_pack

# %%
# The result
# ----------
#
# We multiply 1 to 16 rows by a weight of 8192 x 8192. *Triton* is the op, and
# *Triton, this page* is ``pairs_launch`` with four parts.

ROWS = [1, 2, 4, 8, 16]
SIZE = 8192


def the_op(x, words, scale, zero):
    """Call the op with scales beside zero points, as it packs them."""
    return int4_matmul(x, words, torch.stack([scale, zero], -1))


if __name__ == "__main__":
    x, (codes, scale, zero) = random(5, 512), quantize(random(128, 512))
    packed, pairs = int4_matmul_pack(codes, scale, zero)
    assert torch.equal(packed, pack_in_pairs(codes))
    assert torch.equal(
        int4_matmul(x, packed, pairs),
        the_op(x, pack_in_pairs(codes), scale, zero),
    )
    check(the_op, pack_in_pairs)


def result_calls(M):
    """Return what the chart times, by name; the op's pairs are made before."""
    timed = calls({"Triton, this page": SPLITS["splits=4"]}, M, SIZE, SIZE)
    x, words, scale, zero = timed["Triton, this page"].args
    pairs = torch.stack([scale, zero], -1)
    return {"Triton": partial(int4_matmul, x, words, pairs)} | timed


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: gpu_time(result_calls(M)) for M in ROWS}
    moved = 1e-6 * floor_bytes(SIZE, SIZE)
    results = rate_table(times, "M", "GB/s", lambda M: moved)
    print(results.to_string())
    rates = results.pivot(index="M", columns="series", values="GB/s")
    rates.plot(logx=True, title="8192 x 8192, one group has 128 weights")
    faster = rates["Triton"] / rates["cuBLAS"]
    part = rates["Triton"] / rates["Roof"]
    print(f"The op is {faster.min():.1f} to {faster.max():.1f} times", end=" ")
    print("as fast as cuBLAS with weights of 16 bits. It has", end=" ")
    print(f"{part.min():.0%} to {part.max():.0%} of the roof's rate.")

# %%
# With many rows, arithmetic takes longer than reading, and unpacking comes on
# top. Beyond 512 rows the op therefore writes the weights out in 16 bits, and
# leaves the product to cuBLAS. We measure it there, too:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (64, 256, 1024, 4096):
        x, weight = random(M, SIZE), random(SIZE, SIZE)
        words, scale, zero = weights(SIZE, SIZE)
        words, pairs = words.view(-1, SIZE, 16), torch.stack([scale, zero], -1)
        timed = {"the op": partial(int4_matmul, x, words, pairs)}
        timed["cuBLAS"] = partial(linear, x, weight)
        found = gpu_time(timed, turns=20).items()
        rates = [f"{who} {2e-9 * M * SIZE**2 / t[0]:.0f}" for who, t in found]
        print(f"{M:4} rows, TFLOP/s: {', '.join(rates)}")

# %%
# Exercises
# ---------
#
# 1. A bfloat16 number has eight bits of exponent and seven of mantissa. Which
#    bits take the place of 0x6400, and which number that of 1024?


def bfloat16_constants():
    """Return the bits for the OR, and the number to subtract."""
    return None  # your code


def check_constants(function):
    constants = function()
    if constants is None:
        return "not solved yet"
    bits, number = constants
    codes = torch.arange(16, dtype=torch.int16)
    floats = (codes | bits).view(torch.bfloat16).float()
    return "right" if torch.equal(floats - number, codes.float()) else "wrong"


if __name__ == "__main__":
    print(check_constants(bfloat16_constants))

# %%
# 2. A checkpoint of AWQ packs eight rows of the weight into a word, in another
#    order: the code in the bits ``4 * i`` to ``4 * i + 3`` is that of row
#    ``ORDER[i]`` of the eight. Return the codes (N, K) of its words (K, N / 8).

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def unpack_awq(words):
    return None  # your code


def check_awq(function):
    codes = torch.arange(64).view(16, 4) * 7 % 16  # N = 16, K = 4
    eights = codes.T.unflatten(1, (-1, 8))[..., ORDER]
    words = (eights << 4 * torch.arange(8)).sum(2).to(torch.int32)
    unpacked = function(words)
    if unpacked is None:
        return "not solved yet"
    is_right = unpacked.shape == codes.shape and (unpacked == codes).all()
    return "right" if is_right else "wrong"


if __name__ == "__main__":
    print(check_awq(unpack_awq))

# %%
# Answers
# -------
#
# **1.** With seven bits of mantissa, the last one counts ones from 128 to 255.
# The bits of 128 are 0x4300.

if __name__ == "__main__":
    answer = check_constants(lambda: (0x4300, 128))
    print(answer)
    assert answer == "right"

# %%
# **2.** Row ``n`` of eight is in the bits from ``4 * ORDER.index(n)`` on.


def awq_answer(words):
    shifts = torch.tensor([4 * ORDER.index(n) for n in range(8)])
    return (((words[..., None] >> shifts) & 15).flatten(1)).T


if __name__ == "__main__":
    answer = check_awq(awq_answer)
    print(answer)
    assert answer == "right"
