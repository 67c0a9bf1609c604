# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
Cumulative sum
==============

Every element of a *scan* depends on all before it, and still a GPU can compute
them side by side. With many rows, each has a program of its own. With few, the
programs have to work on one row together, and tell each other how far the sum
has come. Here you learn to

* scan a block with ``tl.cumsum``, and hand a carry from block to block;
* run a scan backwards at no cost, for the gradient;
* have programs wait for each other within one kernel, without a deadlock;
* keep the bits the same in each run, and the error the same at each length.
"""

# sphinx_gallery_tags = ["scan", "memory bound", "autograd"]
import math
import os
import warnings
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.testing import Benchmark, do_bench

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")
# Without a GPU, NumPy computes, and would warn of infinities.
warnings.filterwarnings("ignore", module="triton.runtime.interpreter")

# %%
# The problem in bytes
# --------------------
#
# .. math:: y_n = \sum_{k \le n} x_k
#
# A loop does it with one addition per element, one after another. In parallel
# it takes steps of doubling length: add to each element its left neighbour,
# then the one two to the left, then four.
#
# .. code-block:: text
#
#     x          1   2   3   4   5   6   7   8
#     shift 1    1   3   5   7   9  11  13  15
#     shift 2    1   3   6  10  14  18  22  26
#     shift 4    1   3   6  10  15  21  28  36


def cumsum_plain(x):
    shift = 1
    while shift < x.shape[-1]:
        left, right = x[..., :-shift], x[..., shift:]  # 2 read, 1 written
        x = torch.cat([x[..., :shift], left + right], -1)  # 1 read, 1 written
        shift *= 2
    return x


if __name__ == "__main__":
    print(cumsum_plain(torch.arange(1, 9, device=DEVICE)).tolist())

# %%
# Five tensors go through memory in each step. A row of 16384 elements has 14
# steps, so 70, and the floor is two: one read, one write. In a kernel the steps
# happen in registers, and the threads of a warp hand each other their numbers,
# in *shuffles*.
#
# Many rows: a carry
# ------------------
#
# A program goes along its row block by block, as in ``cross_entropy.py``, where
# only the last sum counted. ``tl.cumsum`` scans a block, and the sum of all
# blocks before, the *carry*, is added to it:
#
# .. code-block:: text
#
#     x        3  1  4  1 | 5  9  2  6 | 5  3  .  .     BLOCK_N = 4
#     cumsum   3  4  8  9 | 5 14 16 22 | 5  8  .  .
#     carry          0    |      9     |     31
#     y        3  4  8  9 |14 23 25 31 |36 39  .  .
#
# * A program has two warps. The threads of a warp scan among themselves, but
#   warps have to wait for each other at barriers. Many small programs share a
#   multiprocessor, and some load while others scan.
# * The carry is float64, one number per row. Additions along the row happen
#   there, so the error is that of a block, however long the row.
# * A block of a short row is no longer than it needs to be. So that a program
#   has enough to load, it takes ``BLOCK_M`` such rows.
# * ``N`` and the stride come in units of ``VEC`` elements, so that a thread
#   loads up to 16 bytes at once: ``unaligned_rows.py`` says why.
#
# And backwards
# -------------
#
# :math:`x_k` is in all :math:`y_n` from :math:`k` on, so its gradient is the
# sum of all gradients *from there to the end*, a scan from right to left.
# ``tl.cumsum`` has a ``reverse``, but it turns the block round across the
# threads and back, and that takes several times the shuffles of a scan. To load
# the elements in reverse order would break up the wide loads.
#
# So load the vectors in reverse order, each one whole, and turn round what each
# thread has. That only renames its registers. No instruction is left of it:
#
# .. code-block:: text
#
#     in memory                  a b c d | e f g h | i j k l       VEC = 4
#     loaded, vectors reversed   i j k l | e f g h | a b c d
#     turned                     l k j i | h g f e | d c b a


@triton.jit
def columns(BLOCK_N: tl.constexpr, VEC: tl.constexpr, REVERSE: tl.constexpr):
    block = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    if REVERSE:
        block = (BLOCK_N // VEC - 1 - block // VEC) * VEC + block % VEC
    return block


@triton.jit
def swapped(x, SIZE: tl.constexpr):
    """Swap neighbouring pieces of SIZE elements."""
    # As tl.flip does, which takes long in the interpreter. The larger and the
    # smaller of a pair, less one of them, is the other; compilers know that.
    INT: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    pairs = tl.reshape(x, (x.numel // SIZE // 2, 2, SIZE))
    pairs = pairs.to(INT, bitcast=True)
    both = tl.max(pairs, 1, keep_dims=True) + tl.min(pairs, 1, keep_dims=True)
    return tl.reshape((both - pairs).to(x.dtype, bitcast=True), x.shape)


@triton.jit
def turned(x, VEC: tl.constexpr, REVERSE: tl.constexpr):
    """Swap the halves of each vector, then their halves, then elements."""
    for log in tl.static_range(0, 3):
        if REVERSE and VEC >> log > 1:
            x = swapped(x, VEC >> log + 1)
    return x


@triton.jit
def cumsum_kernel(
    x_ptr,
    y_ptr,
    M,
    N_vecs,
    stride_vecs,
    VEC: tl.constexpr,
    ACC: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int64, or a row's offset would overflow behind element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    N = N_vecs * VEC
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    x_rows, y_rows = x_ptr + offs_m * stride_vecs * VEC, y_ptr + offs_m * N
    block = columns(BLOCK_N, VEC, REVERSE)[None, :]  # (1, BLOCK_N)
    last = (N - 1) // BLOCK_N * BLOCK_N
    carry = tl.zeros((BLOCK_M, 1), dtype=tl.float64)  # (BLOCK_M, 1)
    for start in range(0, N, BLOCK_N):
        offs = (last - start if REVERSE else start) + block  # (1, BLOCK_N)
        mask = (offs_m < M) & (offs < N)
        x = tl.load(x_rows + offs, mask, 0).to(ACC)  # (BLOCK_M, BLOCK_N)
        y = tl.cumsum(turned(x, VEC, REVERSE), axis=1) + carry.to(ACC)
        tl.store(y_rows + offs, turned(y, VEC, REVERSE), mask)
        carry += tl.sum(x, axis=1, keep_dims=True)


# %%
# Few rows: a chain of programs
# -----------------------------
#
# One long row would keep one program busy and leave the rest of the GPU idle.
# So a row is cut into tiles, a program each. A tile needs the sum of all before
# it. Two passes over the row would do, sums first, then the scans: three
# tensors of traffic, not two. For one pass, a program has to wait for others
# *while it holds its tile*. Each has a word in memory. It writes there
#
# * the sum of its tile, at once;
# * but if it is the last of a group of ``GROUP`` tiles, the sum of everything
#   up to here, as soon as it knows.
#
# .. code-block:: text
#
#     GROUP = 4
#     tile    0    1    2    3    4    5    6    7    8
#     word   s0   s1   s2   P3   s4   s5   s6   P7   s8
#
#     tile 6 adds  P3 + s4 + s5
#     tile 7 adds  P3 + s4 + s5 + s6, and then its own for P7
#
# So a tile reads a group of words at most. Nobody waits for a chain of all
# tiles, only for one with a link per group, and what is added is always the
# same in the same order: the same bits in each run. The *decoupled look-back*
# of Merrill and Garland goes back until it finds any sum of everything. That
# needs no groups, and rounds as chance will have it.
#
# A program that waits keeps its place on a multiprocessor. If all that run
# waited for one that has not started, they would wait for ever. Programs may
# start in any order, so the order of tiles is not that of ``tl.program_id``:
# each program takes a *ticket* when it starts. Those with earlier ones have
# started, too.
#
# Usually one writes a value and then a flag, and has to see to it that nobody
# sees them the other way round (``sem="release"`` and ``"acquire"``). Here the
# word is its own flag, so there is no order to keep. Memory is filled with -1,
# and these 64 bits are a NaN that is never written as a sum.


@triton.jit
def publish(word_ptr, total):
    word = total.to(tl.int64, bitcast=True)
    # Any NaN is written as this one.
    word = tl.where(total == total, word, 0x7FF8000000000000)
    tl.atomic_xchg(word_ptr, word, sem="relaxed")


@triton.jit
def wait(word_ptrs, mask):
    # Volatile: read memory each time, not a register or a near cache.
    words = tl.load(word_ptrs, mask, 0, volatile=True)
    while tl.max((words == -1).to(tl.int32), axis=0) == 1:
        words = tl.load(word_ptrs, mask, 0, volatile=True)
    return words.to(tl.float64, bitcast=True)


@triton.jit
def cumsum_long_kernel(
    x_ptr,
    y_ptr,
    words_ptr,
    tiles,
    N_vecs,
    stride_vecs,
    VEC: tl.constexpr,
    ACC: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The first word counts tickets, from -1. It is int64, as a row has to be.
    ticket = tl.atomic_add(words_ptr, 1, sem="relaxed") + 1
    row, tile = ticket // tiles, (ticket % tiles).to(tl.int32)
    N = N_vecs * VEC
    x_row, y_row = x_ptr + row * stride_vecs * VEC, y_ptr + row * N
    offs = (tiles - 1 - tile if REVERSE else tile) * BLOCK_N
    offs += columns(BLOCK_N, VEC, REVERSE)[None, :]  # (1, BLOCK_N)
    x = tl.load(x_row + offs, offs < N, 0).to(ACC)  # (1, BLOCK_N)
    total = tl.sum(x).to(tl.float64)
    word_ptr = words_ptr + 1 + ticket
    closes = tile % GROUP == GROUP - 1
    if not closes:
        publish(word_ptr, total)
    y = tl.cumsum(turned(x, VEC, REVERSE), axis=1)  # (1, BLOCK_N)
    y = turned(y, VEC, REVERSE)
    before = tile // GROUP * GROUP - 1 + tl.arange(0, GROUP)  # (GROUP,)
    needed = (before >= 0) & (before < tile)
    carry = tl.sum(wait(word_ptr - tile + before, needed), axis=0)
    if closes:
        publish(word_ptr, carry + total)
    tl.store(y_row + offs, y + carry.to(ACC), offs < N)


# %%
# The launcher
# ------------
#
# The number of rows decides: few long ones are scanned by chains. A group is so
# large that to read and write it takes longer than to hand on its sum.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}
BLOCK, TILE = 1024, 8192  # elements that 2 warps scan at a time, or 4
GROUP = 2**20  # elements
FEW = 1024  # fewer rows leave part of a GPU idle, with a program for each


def check(x):
    if x.dtype not in ACC:
        raise TypeError(f"takes floating dtypes, not {x.dtype}")
    if x.shape[-1:].numel() > 2**30:
        raise ValueError("takes rows of up to 2**30 elements")


def matrix(x):
    """Return x as a matrix with contiguous rows, a copy only if need be."""
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return x if x.stride(1) == 1 else x.contiguous()


def scan(x, REVERSE):
    check(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x = matrix(x)
    M, N, stride = x.shape[0], int(x.shape[1]), int(x.stride(0))
    VEC = math.gcd(N, stride, 16 // x.element_size())
    sizes = N // VEC, stride // VEC, VEC, ACC[x.dtype], REVERSE
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if M < FEW and N > TILE:
            # Twice the bytes in each register, half the elements.
            tile = TILE // 2 if x.dtype == torch.float64 else TILE
            tiles = triton.cdiv(N, tile)
            words = x.new_full((1 + M * tiles,), -1, dtype=torch.int64)
            wrap_triton(cumsum_long_kernel)[(M * tiles,)](
                *(x, y, words, tiles, *sizes),
                GROUP=GROUP // TILE,
                BLOCK_N=tile,
                num_warps=4,
            )
        else:
            block = min(BLOCK, triton.next_power_of_2(N))
            rows = BLOCK // block
            wrap_triton(cumsum_kernel)[(triton.cdiv(M, rows),)](
                *(x, y, M, *sizes),
                BLOCK_M=rows,
                BLOCK_N=block,
                num_warps=2,
            )
    return y


@triton_op("triton_gallery::cumsum", mutates_args={})
def cumsum(x: torch.Tensor) -> torch.Tensor:
    """Return torch.cumsum(x, dim=-1)."""
    return scan(x, False)


@triton_op("triton_gallery::cumsum_backward", mutates_args={})
def cumsum_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the sums of all elements from each one to the end of its row."""
    return scan(grad, True)


# %%
# Nothing is saved, and each op is the gradient of the other one. So gradients
# of gradients come for free.

cumsum.register_autograd(lambda ctx, grad: cumsum_backward(grad))
cumsum_backward.register_autograd(lambda ctx, grad: cumsum(grad))

# %%
# The check
# ---------
#
# The reference is in float64. A sum within a tile has few additions one after
# another: up to 8 in a thread, 5 across a warp, and one for each part that a
# warp scans at once, 128 of 8192 elements here, so 64. The carry adds in
# float64, is rounded once, and added once. These numbers are positive, nothing
# cancels, and the relative error is below :math:`79 \cdot 2^{-24} < 5 \cdot
# 10^{-6}`, however many tiles there are. (At an odd length a warp scans 32
# elements at once. A whole tile then has four times the parts.)

torch.manual_seed(0)
cases = [(torch.float16, 3, 40), (torch.bfloat16, 2, 5, 257)]
cases += [(torch.float16, 1030, 9), (torch.float32, 2, 20_000)]
for dtype, *shape in (*cases, (torch.float32, 5, 0), (torch.float32,)):
    x = torch.rand(shape, device=DEVICE).to(dtype).requires_grad_()
    grad, wide = torch.rand_like(x), x.detach().double().requires_grad_()
    y, expected = cumsum(x), torch.cumsum(wide, -1)
    rtol = 5e-6 + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=0)
    (d,) = torch.autograd.grad(y, x, grad)
    (expected,) = torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(d.double(), expected, rtol=rtol, atol=0)

if __name__ == "__main__":
    x = torch.randn(2, 3, 7, device=DEVICE).double().requires_grad_()
    long = torch.randn(2, 5000, device=DEVICE).double().requires_grad_()
    assert torch.autograd.gradcheck(cumsum, x)
    assert torch.autograd.gradgradcheck(cumsum, x, fast_mode=True)
    assert torch.autograd.gradcheck(cumsum, long, fast_mode=True)

# NaN and infinities reach the elements behind them, and no others.
x = torch.zeros(3, 10_000, device=DEVICE)
x[0, 5000], x[1, 30], x[2, 7000], x[2, 9000] = torch.nan, 3e38, -math.inf, 1
torch.testing.assert_close(cumsum(x), torch.cumsum(x, -1), equal_nan=True)

# %%
# Break it: the gradient by subtraction
# -------------------------------------
#
# What comes behind an element is the total, less what comes before. One could
# keep the forward kernel, and subtract:


def backward_by_subtraction(grad):
    before = cumsum(grad) - grad
    return grad.sum(-1, keepdim=True) - before


if __name__ == "__main__":
    for first in (1e8, math.inf):
        grad = torch.tensor([first, 3, 2, 1], device=DEVICE)
        print("grad       ", grad.tolist())
        print("subtracted ", backward_by_subtraction(grad).tolist())
        print("backwards  ", cumsum_backward(grad).tolist())

# %%
# One large gradient spoils all that come after, though their sums have nothing
# to do with it. The total is near :math:`10^8`, where float32 goes in steps of
# 8, so it has lost the 3, the 2 and the 1. With an infinity the difference is
# ``inf - inf``, which is NaN.
#
# How many rows are few?
# ----------------------
#
# The carry takes a program per row, the chain one per tile. Both on 2 GiB of
# float32, in ever fewer rows:

ELEMENTS = 2**28


def random(N):
    return torch.rand(ELEMENTS // N, N, device=DEVICE)


def rates(call, read_and_written=2 * 4 * ELEMENTS):
    times = do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return [read_and_written * 1e-6 / t for t in times]


if __name__ == "__main__" and DEVICE.type == "cuda":
    usual = FEW
    print(" rows      carry      chain, GB/s")
    for M in (4096, 2048, 1024, 512, 256):
        x = random(ELEMENTS // M)
        FEW = 0
        carry = rates(partial(cumsum, x))[0]
        FEW = math.inf
        chain = rates(partial(cumsum, x))[0]
        print(f"{M:5}{carry:11.0f}{chain:11.0f}")
    FEW = usual

# %%
# With fewer rows than ``FEW`` the carry has too few programs to keep the memory
# busy, and the chain has as many as ever. With more, long rows are as well off
# with the chain, or slightly better. Short ones would fill little of a tile.
#
# The benchmark
# -------------
#
# float32, :math:`2^{28}` elements at each length; the last two have 8 rows and
# one. Two tensors forward and two backward. ``Roof`` is a copy.

NAMES = ["Triton", "PyTorch", "torch.compile", "Roof"]
SIZES = [256, 3000, 16384, 50257, 2**20, 2**25, 2**28]
curve = partial(Benchmark, ["N"], SIZES, "provider", NAMES, NAMES, x_log=True)
CURVES = [curve("cumsum", {"backward": False}, ylabel="GB/s")]
CURVES += [curve("cumsum_backward", {"backward": True}, ylabel="GB/s")]


@triton.testing.perf_report(CURVES)
def benchmark(N, provider, backward):
    x = random(N)
    torch.compiler.reset()  # the ninth shape would raise an error
    eager = partial(torch.cumsum, dim=-1)
    fast = torch.compile(lambda x: eager(x), fullgraph=True, dynamic=False)
    op = [cumsum, eager, fast, None][NAMES.index(provider)]
    if provider == "Roof":
        call = partial(torch.empty_like(x).copy_, x)
    elif not backward:
        call = partial(op, x)
    else:
        y, g = op(x.requires_grad_()), random(N)
        call = partial(torch.autograd.grad, y, x, g, retain_graph=True)
    return rates(call, 8 * x.numel())


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_backward = benchmark.run(True, True, return_df=True)

# %%
# Beside the best of PyTorch and ``torch.compile``, and beside the roof:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for table in (results, results_backward):
        table = table.set_index("N")[[f"{name} (GB/s)" for name in NAMES]]
        table.columns = NAMES
        others = table[NAMES[1:3]].max(axis=1), table["Roof"]
        ratios = [(table["Triton"] / other).round(2) for other in others]
        print(pd.concat(ratios, axis=1, keys=["of the best", "of the roof"]))

# %%
# Reading the result
# ------------------
#
# With many rows the bytes bound it. A row of 256 is one block, with nothing to
# hand on, and forward ``torch.compile`` is as fast. In a longer row a program
# loads a block only when the last one is scanned. PyTorch's backward is three
# kernels, a flip, a scan and a flip, and moves six tensors.
#
# At 50257, an odd length, ``VEC`` is 1: a vector of one element makes four
# times the loads, and a step of the scan between threads for each element, not
# for four. (``cross_entropy.py`` keeps loads wide there.)
#
# The last three lengths are chains, each about as fast as the others. A chain
# hands on its sums one group after another, and each time that takes the way to
# the L2 cache and back. Smaller groups make more of such steps, larger ones
# keep more programs waiting. And a program that waits, with its tile in
# registers, loads nothing. PyTorch has a scan of this kind for a single row.
# Several long rows it scans with one program each.
#
# Go further
# ----------
#
# 1. Let ``cumsum_long_kernel`` take its tile from ``tl.program_id``, without a
#    ticket. When does it hang? Why not under the interpreter?
# 2. An exclusive scan leaves out the element itself: ``y[n]`` is the sum of
#    ``x[:n]``. Why not ``cumsum(x) - x``, and what else?
# 3. Write ``cummax``, the values alone. What are the carry, the masked elements
#    and the words of the chain? What comes before the first tile?
#
# Next is ``topk.py``. To read on: Merrill and Garland, "Single-pass Parallel
# Prefix Scan with Decoupled Look-back", NVIDIA, 2016; Yan, Long and Zhang,
# `StreamScan <https://doi.org/10.1145/2442516.2442539>`_, in which each tile
# waits for the one before it.

# %%
# Answers
# -------
#
# **1.** When the programs that fill the GPU all wait for one that has not been
# started. CUDA promises no order of starting them; mostly it is that of the
# numbers, so it may run for years. The interpreter runs programs one after
# another, each to its end, in order.
#
# **2.** The subtraction rounds, and makes NaN of ``inf - inf``. Shift instead:
# load the element to the left, 0 for the first one, and scan that.
#
# **3.** The largest element so far; ``-inf``; the largest of a tile, or of
# everything, with a NaN that is not -1; ``-inf``. ``tl.associative_scan`` takes
# the function, here ``tl.maximum`` with ``propagate_nan``. A maximum does not
# round, so any order gives the same bits.
