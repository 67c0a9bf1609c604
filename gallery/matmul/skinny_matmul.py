# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# dtypes = ["float16", "bfloat16", "float32"]
# backward = false
# deterministic = true
# ///
r"""
A product of few rows
=====================

A language model that writes one token at a time multiplies few rows, often a
single one, by each of its weight matrices. Such a product has to read all
weights and does little with each of them, so the memory sets the pace, and not
the tensor cores. The tiles of an ordinary matrix product are too few to keep
the memory busy. This page splits the sum over ``K`` among more programs.

After this page you can

* tell by counting whether memory or arithmetic bounds a product;
* split the sum over ``K`` among programs, and add up what they found;
* do so in one launch, with a counter, and with the same bits each time;
* keep the result of a row independent of the rows beside it.
"""

# sphinx_gallery_tags = ["matmul", "memory bound", "split-K", "atomics"]
import ast
import functools
import inspect
import math
import os
import time
from functools import partial

import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton
from torch.nn.functional import linear

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


def gpu_time(calls, turns=50):
    """Time a dictionary of calls by turns, each with the L2 cache emptied.

    Returns for each the median of its GPU time in milliseconds, the 20th and
    the 80th percentile, its CPU time in microseconds, and whether the GPU had
    to wait for the CPU. The GPU sleeps before a call: that hides the launch.
    """
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    seen = {name: [] for name in calls}
    for turn in range(-5, turns):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(3_000_000)  # cycles of its clock, about 1.5 ms
            cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            cpu = time.perf_counter() - began
            end.record()
            late = start.query()  # the GPU got there before the CPU was done
            torch.cuda.synchronize()
            if turn >= 0:  # those before compile, tune and warm up
                seen[name].append((start.elapsed_time(end), cpu * 1e6, late))
    low, middle, high = turns // 5, turns // 2, turns * 4 // 5
    found = {}
    for name, rows in seen.items():
        gpu, cpu, late = map(sorted, zip(*rows, strict=True))
        found[name] = gpu[middle], gpu[low], gpu[high], cpu[middle], late[high]
    return found


def rate_table(times, x, unit, work):
    """Return a data frame of rates: work(size) for each millisecond.

    ``times`` has, for each size, what ``gpu_time`` returned.
    """
    import pandas as pd

    rows = []
    for size, calls in times.items():
        for name, (median, fast, slow, cpu, late) in calls.items():
            rates = [work(size) / ms for ms in (median, slow, fast)]
            rows.append([size, name, *rates, cpu, late])
    columns = [x, "series", unit, "low", "high", "CPU us", "late"]
    return pd.DataFrame(rows, columns=columns)


# %%
# In PyTorch
# ----------
#
# ``linear(x, weight)`` multiplies ``M`` rows by a weight matrix:
#
# .. math:: y_{mn} = \sum_{k<K} x_{mk}\,w_{nk}, \qquad n < N.
#
# How much does that move, and how much does it compute? Tensors on the device
# ``meta`` have no data, so the count costs nothing. Three layers of models:

SHAPES = [(1, 4096, 14336), (16, 8192, 8192), (64, 7168, 2048)]  # M, K, N
meta = partial(torch.empty, dtype=torch.bfloat16, device="meta")

if __name__ == "__main__":
    for M, K, N in SHAPES:
        x, weight = meta(M, K), meta(N, K)
        with FlopCounterMode(display=False) as counter:
            y = linear(x, weight)
        moved = x.nbytes + weight.nbytes + y.nbytes
        work = counter.get_total_flops() / moved
        print(f"{M:2} x {K} x {N:5}: {moved / 1e6:3.0f} MB to move, ", end="")
        print(f"{weight.nbytes / moved:.1%} weights; {work:2.0f} FLOP a byte")

# %%
# Nearly all bytes are weights. An H200's data sheet has 989 TFLOP/s and 4.8
# TB/s, 206 operations a byte, and these products need a third of that at most.
# So the floor is one *read* of the weights; we measure PyTorch's beside ours.

# %%
# The first kernel
# ----------------
#
# A program takes ``BLOCK_N`` rows of the weights and goes along ``K``.
#
# .. code-block:: text
#
#     grid           weight (N, K)              x.T (K, M)    y.T (N, M)
#
#                  BLOCK_K                        BLOCK_M
#                 +-------+-------+-------+        +----+        +----+
#     program 0   |       |       |       |        |    |        |    |
#                 +-------+-------+-------+        | *  |        +----+
#     program 1   |   *   |   *   |   *   |        | *  |        |acc | BLOCK_N
#                 +-------+-------+-------+        | *  |        +----+
#
# The weights are the first operand of ``tl.dot``; the few rows of ``x`` are the
# columns of the second. On Hopper the matrix instruction takes 64 rows of the
# first operand, and from 8 columns of the second on. Triton uses it from 16
# columns on, and below falls back to one of older GPUs. (A test reads this in
# compiled code.) So ``BLOCK_M`` is at least 16. Columns past ``M`` are masked:
# they are computed, but not loaded or stored.


@triton.jit
def first_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32 the offset of a row would overflow past element 2**31.
    pid_n = tl.program_id(axis=0).to(tl.int64)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = tl.arange(0, BLOCK_M)[None, :]  # (1, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)  # (BLOCK_K,)
        # Past the end of K both tiles are zero, so nothing is added there.
        mask_w = (offs_n < N) & (offs_k < K)[None, :]
        mask_x = (offs_m < M) & (offs_k < K)[:, None]
        w_ptrs = w_ptr + offs_n * K + offs_k[None, :]
        x_ptrs = x_ptr + offs_m * K + offs_k[:, None]
        w = tl.load(w_ptrs, mask=mask_w, other=0.0)  # (BLOCK_N, BLOCK_K)
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # (BLOCK_K, BLOCK_M)
        # "ieee": float32 is not rounded to TF32 first.
        acc = tl.dot(w, x, acc, input_precision="ieee")
    y_ptrs = y_ptr + offs_m * N + offs_n  # (BLOCK_N, BLOCK_M)
    tl.store(y_ptrs, acc, mask=(offs_n < N) & (offs_m < M))


def blocks(x):
    """Return the blocks of the first kernels, with 256 bytes of a row."""
    BLOCK_M = max(16, triton.next_power_of_2(x.shape[0]))
    stages = 4 if BLOCK_M < 32 else 3  # what shared memory has room for, twice
    sizes = {"BLOCK_M": BLOCK_M, "BLOCK_N": 64, "num_stages": stages}
    return sizes | {"BLOCK_K": 256 // x.element_size()}


def whole_sum(x, weight):
    """Return linear(x, weight), for two contiguous matrices."""
    (M, K), N = x.shape, weight.shape[0]
    y = x.new_empty(M, N)
    grid = (triton.cdiv(N, 64),)
    first_kernel[grid](x, weight, y, M, N, K, **blocks(x))
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum of ``K`` products is rounded ``K`` times at
# most, each time by :math:`2^{-24}` of the sum of magnitudes at most, and once
# to the dtype of ``x``. The cell prints the error in units of that sum. (With
# bfloat16, the interpreter's ``tl.dot`` is wrong. The op converts it there.)

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(M, K, N, dtype=torch.bfloat16):
    kind = {"dtype": dtype, "device": DEVICE, "generator": generator}
    return torch.randn(M, K, **kind), torch.randn(N, K, **kind)


def check(function, M, K, N, dtype=torch.float16):
    x, weight = random(M, K, N, dtype)
    error = function(x, weight).double() - linear(x.double(), weight.double())
    error /= linear(x.double().abs(), weight.double().abs())
    allowed = K * 2**-24 + torch.finfo(dtype).eps
    print(f"{function.__name__}: {error.abs().max():.1e} of {allowed:.1e}")
    torch.testing.assert_close(error, 0 * error, rtol=0, atol=allowed)


if __name__ == "__main__":
    check(whole_sum, M=20, K=304, N=112)

# %%
# How fast?
# ---------
#
# The rate counts the weights' bytes. ``linear`` calls cuBLAS. The roof is a sum
# of each row of those bytes, taken for float32. The cache is empty before each.


def contestants(function, x, weight):
    torch.compiler.reset()  # past eight shapes it would raise
    fast = torch.compile(lambda *of: linear(*of), dynamic=False, fullgraph=True)
    calls = {"Triton": function, "cuBLAS": linear, "torch.compile": fast}
    calls = {who: partial(call, x, weight) for who, call in calls.items()}
    return calls | {"Roof": partial(torch.sum, weight.view(torch.float32), 1)}


def rates(calls, weight, turns=50):
    """Return GB/s of each call, for one read of the weights."""
    found = gpu_time(calls, turns).items()
    return {who: round(1e-6 * weight.nbytes / times[0]) for who, times in found}


if __name__ == "__main__" and DEVICE.type == "cuda":
    for M, K, N in SHAPES:
        x, weight = random(M, K, N)
        found = rates(contestants(whole_sum, x, weight), weight)
        print(f"{M} x {K} x {N}, GB/s: {found}")

# %%
# Are there enough programs?
# --------------------------
#
# A memory keeps its rate only while enough loads are under way. If a load takes
# a microsecond and the memory gives 4.8 TB/s, 4.8 MB have to be in flight, 36
# KB for each of the 132 multiprocessors of an H200. A program of ours has
# ``num_stages - 1`` blocks of weights in flight, of 16 KB each: the compiler
# copies them into shared memory ahead of the loop (``tile_order.py`` shows
# how). How many programs are there for a multiprocessor?

PROCESSORS = 132  # of an H200

if __name__ == "__main__":
    for M, K, N in SHAPES:
        programs = triton.cdiv(N, 64)
        flight = programs * (blocks(meta(M, K))["num_stages"] - 1) * 64 * 256
        print(f"{M:2} x {K} x {N:5}: {programs:3} programs, ", end="")
        print(f"{flight / PROCESSORS / 1024:2.0f} KB in flight for each")

# %%
# With 2048 rows of weights, three of four multiprocessors have no program.
# Smaller blocks of ``N`` would make more programs. But each program reads all
# of ``x``, out of the L2 cache. With 64 rows of ``x`` and ``BLOCK_N = 64``,
# that is as many bytes of ``x`` as of weights. The other way is to let several
# programs share the sum of a tile.

# %%
# Split K
# -------
#
# The grid gets a second axis. Program ``(n, k)`` adds up part ``k`` of the sum
# of tile ``n``. Then the *partial sums* have to come together.
#
# .. code-block:: text
#
#     weight     K ->                             partial sums
#               +-----------+-----------+
#     tile 0    | (0, 0)    | (0, 1)    |        [0, tile 0]  [1, tile 0]
#               +-----------+-----------+
#     tile 1    | (1, 0)    | (1, 1)    |        [0, tile 1]  [1, tile 1]
#               +-----------+-----------+
#
# In the first way each program stores its part in float32, and a second kernel
# adds the parts. ``ATOMIC`` is for the way after this one.


@triton.jit
def split_kernel(
    x_ptr,
    w_ptr,
    part_ptr,
    M,
    N,
    K,
    steps,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_n = tl.program_id(axis=0).to(tl.int64)
    pid_k = tl.program_id(axis=1)
    # In int64, as in the first kernel.
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = tl.arange(0, BLOCK_M)[None, :]  # (1, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # The loop is as before, over this program's part of K.
    for step in range(pid_k * steps, (pid_k + 1) * steps):
        offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)  # (BLOCK_K,)
        # The last part may reach past K; zeros there add nothing.
        mask_w = (offs_n < N) & (offs_k < K)[None, :]
        mask_x = (offs_m < M) & (offs_k < K)[:, None]
        w_ptrs = w_ptr + offs_n * K + offs_k[None, :]
        x_ptrs = x_ptr + offs_m * K + offs_k[:, None]
        w = tl.load(w_ptrs, mask=mask_w, other=0.0)  # (BLOCK_N, BLOCK_K)
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # (BLOCK_K, BLOCK_M)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    mask = (offs_n < N) & (offs_m < M)
    part_ptrs = part_ptr + offs_m * N + offs_n  # (BLOCK_N, BLOCK_M)
    if ATOMIC:
        # Nobody reads the sum before the kernel ends, so no order is needed.
        tl.atomic_add(part_ptrs, acc, mask=mask, sem="relaxed")
    else:
        tl.store(part_ptrs + pid_k * M * N, acc, mask=mask)


@triton.jit
def add_kernel(
    part_ptr, y_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # The order is fixed, so the bits are the same each time.
    for split in tl.static_range(SPLITS):
        part_ptrs = part_ptr + split * size + offs
        total += tl.load(part_ptrs, mask=offs < size, other=0.0)
    tl.store(y_ptr + offs, total, mask=offs < size)


def split(x, weight, part, splits, ATOMIC=False):
    (M, K), N, tile = x.shape, weight.shape[0], blocks(x)
    steps = triton.cdiv(triton.cdiv(K, tile["BLOCK_K"]), splits)
    grid = (triton.cdiv(N, 64), splits)
    split_kernel[grid](x, weight, part, M, N, K, steps, ATOMIC, **tile)


def two_launches(x, weight, splits=4):
    M, N = x.shape[0], weight.shape[0]
    part = x.new_empty(splits, M, N, dtype=torch.float32)
    split(x, weight, part, splits)
    y = x.new_empty(M, N)
    grid = (triton.cdiv(M * N, 256),)
    add_kernel[grid](part, y, M * N, SPLITS=splits, BLOCK=256)
    return y


if __name__ == "__main__":
    check(two_launches, M=20, K=912, N=112)
    for M, K, N in SHAPES:
        part, weight = meta(8, M, N, dtype=torch.float32), meta(N, K)
        share = part.nbytes / weight.nbytes
        print(f"{M:2} x {K} x {N:5}: 8 parts are {share:.1%} of the weights")

# %%
# The parts are written once and read once, mostly in the L2 cache. For 64 rows
# that counts, so there should be no more splits than fill the GPU.

# %%
# Atomics instead?
# ----------------
#
# In the second way there is one partial sum, and every program adds to it with
# ``tl.atomic_add``. The sum has to be zero before, and to be rounded after:
# that is two more launches. And the programs add in the order in which they
# finish. A sum in float32 depends on its order:


def atomics(x, weight, splits=4):
    M, N = x.shape[0], weight.shape[0]
    y = x.new_zeros(M, N, dtype=torch.float32)
    split(x, weight, y, splits, ATOMIC=True)
    return y.to(x.dtype)


if __name__ == "__main__":
    check(atomics, M=20, K=912, N=112)
    x, weight = random(20, 900, 100, torch.float32)
    part = x.new_empty(4, 20, 100)
    split(x, weight, part, splits=4)
    a, b, c, d = part
    differs = (a + b + c + d) != (d + c + b + a)
    print(f"{differs.float().mean():.0%} of sums differ in the other order")
    assert differs.any()

# %%
# Does the order on a GPU change from call to call? We count the different
# results of 20 calls:


def results_of(function, turns=20):
    found = (function().float().cpu() for _ in range(turns))
    return len({y.numpy().tobytes() for y in found})


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, weight = random(64, 7168, 2048, torch.float32)
    for function in (two_launches, atomics):
        found = results_of(partial(function, x, weight, splits=8))
        print(f"{function.__name__}: {found} different results of 20 calls")

# %%
# One launch with a counter
# -------------------------
#
# In the third way every program stores its part, as in the first way, and then
# raises a *counter* of its tile by one. ``tl.atomic_add`` returns what the
# counter was before. The program that finds ``SPLITS - 1`` came last. All parts
# are there now, and this program adds them, always in the order from 0 to
# ``SPLITS - 1``. So the bits are the same each time.
#
# .. code-block:: text
#
#     program    (0, 1)    (0, 0)    (0, 3)    (0, 2)         time ->
#     stores     part 1    part 0    part 3    part 2
#     finds         0         1         2         3   last: adds 0, 1, 2, 3,
#                                                     sets the counter to 0
#
# Four things make it right:
#
# * **A barrier before the atomic.** One thread of a program raises the counter.
#   ``tl.debug_barrier()`` makes it wait until all threads have stored.
# * **The atomic releases and acquires** (``sem="acq_rel"``). Stores before it
#   and loads after it do not pass it. So other multiprocessors see a part
#   before they see it counted.
# * **Nobody waits for another program,** which might wait for its place.
# * **The last one sets the counter to 0 again.** So the next launch finds
#   zeros, and needs no other launch to write them. The op keeps a set of
#   counters for each stream, as two launches in a stream never overlap. While a
#   CUDA graph is captured, it takes new ones: the graph may run on any stream.

# %%
# Does one row need tl.dot?
# -------------------------
#
# For one row, 15 of 16 columns are masked. The alternative multiplies element
# by element and sums at the end, without shared memory:


@triton.jit
def one_row_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_n = tl.program_id(axis=0).to(tl.int64)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)[None, :]  # (1, BLOCK_K)
        x = tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0)
        mask = (offs_n < N) & (offs_k < K)
        w = tl.load(w_ptr + offs_n * K + offs_k, mask=mask, other=0.0)
        # Products in half precision would be rounded one by one.
        acc += w.to(tl.float32) * x.to(tl.float32)
    y = tl.sum(acc, axis=1, keep_dims=True)  # (BLOCK_N, 1)
    tl.store(y_ptr + offs_n, y, mask=offs_n < N)


def one_row(x, weight):
    N, K = weight.shape
    y, grid = x.new_empty(1, N), (triton.cdiv(N, 8),)
    one_row_kernel[grid](x, weight, y, N, K, BLOCK_N=8, BLOCK_K=512)
    return y


if __name__ == "__main__":
    check(one_row, M=1, K=912, N=112)

# %%
# The table after the op has its rate. The op does not have it: a row that comes
# alone would be added up in another way than the same row among others.

# %%
# Should every program do the same?
# ---------------------------------
#
# The op chooses ``splits`` so that about two programs run on each
# multiprocessor. That seldom comes out even. `Stream-K
# <https://arxiv.org/abs/2301.03598>`_ puts the blocks of all tiles in one line,
# and cuts the line into as many equal pieces as programs run at a time. How
# much would that change?


def division(N, K, places=2 * PROCESSORS):
    """Return splits, blocks of a program, and blocks for each place."""
    tiles, total = triton.cdiv(N, 64), triton.cdiv(K, 128)
    splits = max(1, min(8, total, places // tiles))
    return splits, triton.cdiv(total, splits), tiles * total / places


if __name__ == "__main__":
    for _, K, N in [*SHAPES, (1, 2880, 5120)]:
        splits, steps, even = division(N, K)
        print(f"K = {K}, N = {N:5}: {splits} splits, {steps} blocks ", end="")
        print(f"for a program; stream-K: {even:.1f}")

# %%
# With stream-K a program has fewer blocks where places are empty. That would be
# the gain if each program had a speed of its own. Here all wait for one memory.
# While they keep enough loads in flight, an empty place costs nothing: each of
# the others gets a larger share. So the op has equal splits.

# %%
# The op
# ------
#
# ``x`` may have any shape with up to 64 rows in all. The weights may lie in any
# way, as ``torch.nn.Linear`` keeps them or transposed. The number of splits
# follows from ``N``, ``K`` and the number of multiprocessors, and not from
# ``M``. So each row is added up in the same parts, however many rows there are.
#
# In half precision, rows of weights that do not begin at multiples of 16 bytes
# go through registers into shared memory. Their blocks are half as long, and
# fewer of them are under way, so that the registers suffice.

SKINNY_MATMUL_NAMESPACE = "triton_gallery"
SKINNY_MATMUL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
SKINNY_MATMUL_ROWS = 64  # at most, in all
SKINNY_MATMUL_PROGRAMS = 2  # for each multiprocessor, about
SKINNY_MATMUL_SPLITS = 8  # at most: the last program adds so many parts


@triton.jit
def _skinny_matmul_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    K,
    steps,
    stride_xm,
    stride_wn,
    stride_wk,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,  # the type in which tl.dot gets its tiles
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_n = tl.program_id(axis=0)
    pid_k = tl.program_id(axis=1)
    # In int32 offsets into the weights would overflow past element 2**31.
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    offs_k = pid_k.to(tl.int64) * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_m = tl.arange(0, BLOCK_M)[None, :].to(tl.int64)  # (1, BLOCK_M)
    mask_n = offs_n < N  # (BLOCK_N, 1)
    mask_m = offs_m < M  # (1, BLOCK_M)
    w_ptrs = w_ptr + offs_n * stride_wn + offs_k[None, :] * stride_wk
    x_ptrs = x_ptr + offs_m * stride_xm + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in range(steps):
        # The last split may reach beyond K: zeros there add nothing.
        mask_k = offs_k < K
        w = tl.load(w_ptrs, mask=mask_n & mask_k[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=mask_m & mask_k[:, None], other=0.0)
        acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision="ieee")
        offs_k += BLOCK_K
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * tl.cast(stride_wk, tl.int64)
    y_ptrs = y_ptr + offs_m * N + offs_n  # (BLOCK_N, BLOCK_M)
    if SPLITS == 1:
        tl.store(y_ptrs, acc, mask=mask_n & mask_m)
    else:
        # Parts have whole tiles, so they are aligned whatever N is.
        width = tl.num_programs(axis=0).to(tl.int64) * BLOCK_N
        part_ptrs = part_ptr + offs_m * width + offs_n
        tl.store(part_ptrs + pid_k * M * width, acc, mask=mask_m)
        # One thread counts: it has to wait until all threads have stored.
        tl.debug_barrier()
        # Release: others see the part before the count. Acquire: the last
        # program sees all parts.
        before = tl.atomic_add(count_ptr + pid_n, 1, sem="acq_rel")
        if before == SPLITS - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            # In this order whoever is last, so the bits are always the same.
            for split in tl.static_range(SPLITS):
                # ".cg": from the L2 cache, where all multiprocessors store.
                total += tl.load(
                    part_ptrs + split * M * width,
                    mask=mask_m,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(y_ptrs, total, mask=mask_n & mask_m)
            # The next launch has to find a zero.
            tl.store(count_ptr + pid_n, 0)


@functools.cache
def _skinny_matmul_places(device):
    """Return how many programs the launcher wants to have at a time."""
    if device.type != "cuda":  # the interpreter: few, and yet splits
        return 16
    gpu = torch.cuda.get_device_properties(device)
    return SKINNY_MATMUL_PROGRAMS * gpu.multi_processor_count


@functools.cache
def _skinny_matmul_kept(device, stream):
    """Return a stream's counters. A launch finds and leaves them at zero."""
    # A tile is split only where there are two places for each.
    count = _skinny_matmul_places(device) // 2
    return torch.zeros(count, dtype=torch.int32, device=device)


def _skinny_matmul_counters(x, tiles, keep):
    """Return a counter for each tile, at zero."""
    # A graph that is being captured may later run on any stream.
    if keep and x.is_cuda and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(x.device).cuda_stream
        return _skinny_matmul_kept(x.device, stream)
    return torch.zeros(tiles, dtype=torch.int32, device=x.device)


def _skinny_matmul_plan(M, weight):
    """Return how to launch for M rows. M has no say in the sums."""
    N, K = map(int, weight.shape)
    size = weight.element_size()
    apart = [s * size % 16 for s in weight.stride() if s != 1]
    # Otherwise weights go through registers, which have less room.
    wide = 1 in weight.stride() and not any(apart)
    BLOCK_K = (256 if wide else 128) // size
    blocks = triton.cdiv(K, BLOCK_K)
    places = _skinny_matmul_places(weight.device)
    splits = min(SKINNY_MATMUL_SPLITS, blocks, places // triton.cdiv(N, 64))
    steps = triton.cdiv(blocks, max(1, splits))
    # The interpreter's tl.dot takes the bits of bfloat16 for integers.
    widen = triton.knobs.runtime.interpret and weight.dtype == torch.bfloat16
    # What shared memory has room for, twice
    stages = 4 if M <= 16 else 3
    return {
        "steps": steps,
        "SPLITS": max(1, triton.cdiv(blocks, max(1, steps))),
        "DOT": tl.float32 if widen else SKINNY_MATMUL_DTYPES[weight.dtype],
        "BLOCK_M": 16 if M <= 16 else 32 if M <= 32 else 64,
        "BLOCK_N": 64,
        "BLOCK_K": BLOCK_K,
        "num_stages": stages if wide else 2,
    }


def _skinny_matmul_check(x, weight):
    """Raise for what the op does not take."""
    if weight.dtype not in SKINNY_MATMUL_DTYPES or x.dtype != weight.dtype:
        raise TypeError(
            "skinny_matmul takes two tensors of float16, bfloat16 or float32, "
            f"not {x.dtype} and {weight.dtype}"
        )
    fits = weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[1]
    if not fits or x.device != weight.device:
        raise ValueError(
            "skinny_matmul takes (..., K) and (N, K) on one device, not "
            f"{tuple(x.shape)} and {tuple(weight.shape)} on {x.device} and "
            f"{weight.device}"
        )
    rows = math.prod(x.shape[:-1])
    if rows > SKINNY_MATMUL_ROWS:
        raise ValueError(
            f"skinny_matmul takes up to {SKINNY_MATMUL_ROWS} rows, not {rows}: "
            "linear of torch.nn.functional takes any number"
        )


def _skinny_matmul_launch(
    x, weight, kernel=_skinny_matmul_kernel, keep_counters=True
):
    _skinny_matmul_check(x, weight)
    N, K = weight.shape
    y = x.new_empty((*x.shape[:-1], N))
    if y.numel() == 0:
        return y
    x = x.unsqueeze(0).flatten(0, -2)  # (M, K)
    x = x if x.stride(1) == 1 else x.contiguous()
    M = x.shape[0]
    plan = _skinny_matmul_plan(M, weight)
    grid = (triton.cdiv(N, plan["BLOCK_N"]), plan["SPLITS"])
    part = count = None
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if plan["SPLITS"] > 1:
            shape = (plan["SPLITS"], M, grid[0] * plan["BLOCK_N"])
            part = x.new_empty(shape, dtype=torch.float32)
            count = _skinny_matmul_counters(x, grid[0], keep_counters)
        sizes = (M, N, K, plan.pop("steps"), x.stride(0), *weight.stride())
        kernel[grid](x, weight, y, part, count, *sizes, **plan)
    return y


@triton_op(f"{SKINNY_MATMUL_NAMESPACE}::skinny_matmul", mutates_args={})
def skinny_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T for few rows, as torch.nn.functional.linear.

    Takes ``x`` (..., K) with at most 64 rows in all, and ``weight`` (N, K), of
    one dtype, float16, bfloat16 or float32, in any layout, on one device. The
    result (..., N) has their dtype and is contiguous. Sums are in float32, and
    float32 is not rounded to TF32. The result is the same each time. The parts
    in which a row is summed do not depend on the number of rows. Raises
    TypeError for other dtypes, ValueError for more rows, and for shapes and
    devices that do not fit. Has no gradient: a backward through it raises.
    """
    kernel = wrap_triton(_skinny_matmul_kernel)
    return _skinny_matmul_launch(x, weight, kernel, keep_counters=False)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
SKINNY_MATMUL_LIBRARY = Library(SKINNY_MATMUL_NAMESPACE, "FRAGMENT")
SKINNY_MATMUL_LIBRARY.impl("skinny_matmul", _skinny_matmul_launch, "CUDA")

# %%
# What did each step gain? The table has GB/s of weights for each shape, and the
# statements of the kernels. All steps have the same blocks, and the op's
# splits. "Counter, zeroed" is the op's kernel with new counters in each call,
# which is one launch more.


def statements(*kernels):
    trees = [ast.parse(inspect.getsource(kernel.fn)) for kernel in kernels]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(kernels)


def planned(x, weight, count=None, **changes):
    """Call the op's kernel with another plan, and counters at zero."""
    (M, K), N = x.shape, weight.shape[0]
    plan = _skinny_matmul_plan(M, weight) | changes
    del plan["steps"]
    tiles, splits = triton.cdiv(N, plan["BLOCK_N"]), plan["SPLITS"]
    if count is None:
        count = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    width = tiles * plan["BLOCK_N"]
    part = x.new_empty(splits, M, width, dtype=torch.float32)
    y = x.new_empty(M, N)
    steps = triton.cdiv(triton.cdiv(K, plan["BLOCK_K"]), splits)
    sizes = (M, N, K, steps, K, K, 1)
    _skinny_matmul_kernel[tiles, splits](
        x, weight, y, part, count, *sizes, **plan
    )
    return y


STEPS = {
    "whole sum": (whole_sum, first_kernel),
    "two launches": (two_launches, split_kernel, add_kernel),
    "atomics": (atomics, split_kernel),
    "counter, zeroed": (planned, _skinny_matmul_kernel),
    "the op": (skinny_matmul, _skinny_matmul_kernel),
    "one row, no tl.dot": (one_row, one_row_kernel),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*of) for _, *of in STEPS.values()]
    for M, K, N in SHAPES:
        x, weight = random(M, K, N)
        splits = _skinny_matmul_plan(M, weight)["SPLITS"]
        tried = {who: partial(of[0], x, weight) for who, of in STEPS.items()}
        for who in ("two launches", "atomics"):
            tried[who] = partial(tried[who], splits=splits)
        if M > 1:
            del tried["one row, no tl.dot"]
        name = f"{M} x {K} x {N}, {splits} splits"
        ladder[name] = pd.Series(rates(tried, weight))
    print(ladder.to_string(na_rep="", float_format="%.0f"))

# %%
# On an H200, with 2 splits the counter is faster than two launches. With 8
# parts of 64 rows, two launches are faster, and by more. So over these two
# shapes the counter does not pay; the op has it nevertheless. With enough
# programs, as for the first two shapes, no split is as fast as any.

# %%
# Is the plan right? This table has other blocks and splits for the op's kernel,
# with counters that are kept. A star marks what the op takes.

PLANS = [(32, 1), (32, 4), (64, 1), (64, 2), (64, 4), (64, 8), (128, 8)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = pd.DataFrame(index=[str(of) for of in PLANS])
    for M, K, N in SHAPES:
        x, weight = random(M, K, N)
        count = torch.zeros(N // 32, dtype=torch.int32, device=DEVICE)
        ours = (64, _skinny_matmul_plan(M, weight)["SPLITS"])
        call = partial(planned, x, weight, count)
        tried = {of: partial(call, BLOCK_N=of[0], SPLITS=of[1]) for of in PLANS}
        found = rates(tried, weight, turns=20).items()
        cells = [f"{one}{'*' if of == ours else ' '}" for of, one in found]
        table[f"{M} x {K} x {N}"] = cells
    print("GB/s for (BLOCK_N, splits)", table.to_string(), sep="\n")

# %%
# On an H200, the op's plan is the best or a few percent from it. One rule for
# all shapes costs that.

# %%
# Proof
# -----
#
# We compare every dtype with float64, with sums that are split and sums that
# are not, and without rows, columns or terms. In the interpreter, half
# precision is cut, not rounded, so a whole ``eps`` is allowed.


def prove(x, weight):
    y, magnitude = skinny_matmul(x, weight), x.double().abs()
    expected = linear(x.double(), weight.double())
    unit = linear(magnitude, weight.double().abs())
    eps = torch.finfo(x.dtype).eps
    allowed = (x.shape[-1] + 8) * 2**-24 * unit + eps * expected.abs() + 1e-7
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= allowed).all()


CASES = [(64, 2064, 112), (64, 900, 100), (1, 896, 100), (17, 257, 1030)]
CASES += [(33, 40, 70), (0, 5, 7), (5, 7, 0), (5, 0, 7)]  # M, K, N
if __name__ == "__main__":
    for dtype in SKINNY_MATMUL_DTYPES:
        for case in CASES:
            prove(*random(*case, dtype))

# %%
# Next come other layouts: a vector, more dimensions, rows and columns that lie
# apart, an expanded row, and transposed weights.

if __name__ == "__main__":
    x, weight = random(12, 300, 100, torch.float32)
    for view in (x[0], x.view(3, 4, 300), x[::2], x[:1].expand(9, 300)):
        prove(view, weight)
    prove(weight[:64, ::3], weight[:, 100:200])
    prove(weight[:64, :12], x.T)

# %%
# A row has the same bits each time, and whatever rows come with it. We count
# elements that differ. (Without a GPU, NumPy adds up each block, in an order
# that may depend on the number of rows.)

if __name__ == "__main__" and DEVICE.type == "cuda":
    for dtype in SKINNY_MATMUL_DTYPES:
        x, weight = random(64, 7168, 2048, dtype)
        call = partial(skinny_matmul, x, weight)
        y, rows = call(), (1, 2, 16, 17, 32, 33, 63)
        differ = [(skinny_matmul(x[:M], weight) != y[:M]).sum() for M in rows]
        print(f"{dtype}: {results_of(call)} result of 20 calls; with", end=" ")
        print(f"fewer rows, {sum(differ).item()} elements differ")
        assert results_of(call) == 1

# %%
# An error names what the op does not take. It has no gradient either, and
# PyTorch says so in the backward:

if __name__ == "__main__":
    weight = torch.ones(3, 2, device=DEVICE, requires_grad=True)
    for x in (torch.ones(65, 2), torch.ones(4, 3), torch.ones(2).double()):
        try:
            skinny_matmul(x.to(DEVICE), weight)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    try:
        skinny_matmul(torch.ones(1, 2, device=DEVICE), weight).sum().backward()
    except RuntimeError as error:
        print(f"RuntimeError: {error}")

# %%
# The benchmark
# -------------
#
# First come weights of 8192 x 8192 with more and more rows, then layers of
# models.

ROWS = [1, 2, 4, 8, 16, 32, 64]
LAYERS = [*SHAPES, (16, 2880, 5120), (32, 5120, 151936)]


def measure(M, K, N):
    x, weight = random(M, K, N)
    return gpu_time(contestants(skinny_matmul, x, weight), turns=30)


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: measure(M, 8192, 8192) for M in ROWS}
    results = rate_table(times, "M", "GB/s", lambda M: 2e-6 * 8192**2)
    print("8192 x 8192", results.to_string(), sep="\n")
    wide = results.pivot(index="M", columns="series", values="GB/s")
    wide.plot(logx=True, title="8192 x 8192")

if __name__ == "__main__" and DEVICE.type == "cuda":
    names = {" x ".join(map(str, layer)): layer for layer in LAYERS}
    times = {name: measure(*layer) for name, layer in names.items()}
    moved = {name: 2e-6 * K * N for name, (_, K, N) in names.items()}
    results_layers = rate_table(times, "M x K x N", "GB/s", moved.get)
    print("layers of models", results_layers.to_string(), sep="\n")

# %%
# This is what a call costs the CPU, in microseconds. A model that decodes may
# wait for it; ``cuda_graphs.py`` is about that.

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["M"] == 16].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# Our line lies at PyTorch's read of the weights, or above it. cuBLAS is ahead
# by most for 64 x 7168 x 2048, where the first two of these count:
#
# * **The rows of x.** Each program reads its part of ``x`` out of the L2 cache.
#   With 64 rows that is as many bytes again as the weights have.
# * **The end.** The last program of a tile reads up to 8 parts while little
#   else is left to do. The smaller the weights, the larger that share.
# * **Arithmetic in float32.** Tensor cores do not take all its bits. With 64
#   rows each weight of four bytes costs 128 operations.

# %%
# Go further
# ----------
#
# 1. Exchange the operands: let the rows of ``x`` be the first operand of
#    ``tl.dot``, and the weights, transposed, the second. For how many rows does
#    an H100 now use its own matrix instruction? What may that change?
# 2. Add a bias. In which programs, and how often?
# 3. What goes wrong if two streams share counters? What if a launch is aborted?
#
# To read on:
#
# * ``matmul.py`` and ``tuned_matmul.py`` are about products of many rows.
# * An illegal read of shared memory is `reported
#   <https://github.com/triton-lang/triton/issues/11366>`_ of Triton 3.7.1 on
#   Hopper, for a kernel with several small ``tl.dot``. Ours have one each.

# %%
# Answers
# -------
#
# **1.** From 33 rows on, as that instruction takes 64 rows of its first
# operand. Up to 32 rows the compiler takes the one of older GPUs. The two may
# round sums differently, so a row's bits may change with the number of rows.
#
# **2.** After the sum, in float32: in the last program of each tile, or in the
# only one, before the store. Added to each part, it would count ``SPLITS``
# times.
#
# **3.** Two launches count the same tile. A program may find ``SPLITS - 1``
# before all parts of its launch are there, and add what is not written yet. A
# launch that is aborted leaves counters above zero. CUDA then refuses all
# further work of the process, so no launch meets them.
