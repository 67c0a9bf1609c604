# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute the cumulative sums of many rows, and their gradient with the same
# kernel, from right to left."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Cumulative sum
==============

Each element of a cumulative sum depends on all elements before it. A loop adds
them one after another. A GPU computes them side by side, block by block, and
reads each number once.

After this page you can

* scan a block with ``tl.cumsum``, and hand a carry from block to block;
* choose the type of the carry by an error that you measure;
* give a program one long row, or several short ones;
* run the same kernel from right to left, for the gradient.
"""

# sphinx_gallery_tags = ["scan", "memory bound", "autograd"]
import math
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

# %%
# In PyTorch
# ----------
#
# .. math:: y_n = \sum_{k \le n} x_k
#
# This is also called a *scan* of :math:`x`. To compute it in parallel, add to
# each element its left neighbour, then the number two places to the left, then
# four places:
#
# .. code-block:: text
#
#     x          1   2   3   4   5   6   7   8
#     shift 1    1   3   5   7   9  11  13  15
#     shift 2    1   3   6  10  14  18  22  26
#     shift 4    1   3   6  10  15  21  28  36
#
# With PyTorch's operators each step goes through memory. We count the bytes:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def cumsum_torch(x):
    """Return the cumulative sums of rows, and the bytes that were moved."""
    moved, shift = 0, 1
    while shift < x.shape[-1]:
        left, right = x[..., :-shift], x[..., shift:]
        both = left + right
        x = torch.cat([x[..., :shift], both], dim=-1)
        # The sum reads two tensors and writes one, and cat copies all of x.
        moved += 3 * both.nbytes + 2 * x.nbytes
        shift *= 2
    return x, moved


if __name__ == "__main__":
    print(cumsum_torch(torch.arange(1, 9, device=DEVICE))[0].tolist())
    x = torch.rand(64, 4096, generator=generator, device=DEVICE)
    y, moved = cumsum_torch(x)
    print(f"rows of 4096: {moved / x.nbytes:.1f} times the bytes of x;")
    print(f"reading x and writing y: {(x.nbytes + y.nbytes) / x.nbytes:.1f}")

# %%
# The *floor* is two: to read ``x`` and to write ``y``. PyTorch has one function
# for the scan, ``torch.cumsum``. We measure it beside our kernel.

# %%
# The first kernel
# ----------------
#
# A program goes along its row, block by block. ``tl.cumsum`` scans a block in
# registers: the threads of a warp hand each other their numbers by instructions
# called *shuffles*. The program adds the sum of all earlier blocks, the
# *carry*:
#
# .. code-block:: text
#
#     N = 10, BLOCK_N = 4
#
#     x        3  1  4  1 | 5  9  2  6 | 5  3  .  .     . is masked, a zero
#     cumsum   3  4  8  9 | 5 14 16 22 | 5  8  .  .
#     carry          0    |      9     |     31
#     y        3  4  8  9 |14 23 25 31 |36 39  .  .


@triton.jit
def row_kernel(x_ptr, y_ptr, N, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64) * N
    carry = tl.zeros((1,), dtype=ACC)  # (1,)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = offs < N
        # In float16 a sum of ones would stop at 2048.
        x = tl.load(x_ptr + row + offs, mask=mask, other=0).to(tl.float32)
        y = tl.cumsum(x, axis=0) + carry.to(tl.float32)
        tl.store(y_ptr + row + offs, y, mask=mask)
        carry += tl.sum(x, axis=0)


def cumsum_rows(x, ACC=tl.float32, BLOCK_N=1024, num_warps=4):
    """Return the cumulative sums of each row of a contiguous matrix."""
    M, N = x.shape
    y = torch.empty_like(x)
    plan = {"ACC": ACC, "BLOCK_N": BLOCK_N, "num_warps": num_warps}
    row_kernel[(M,)](x, y, N, **plan)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. These numbers are positive, so nothing cancels. In a
# block, a sum takes a few dozen additions one after another on a GPU. In the
# interpreter, where NumPy adds, it takes up to 1024. Then comes an addition for
# each block. Each addition rounds by at most :math:`2^{-24}`, mostly by less,
# and up as often as down. We allow 1024 roundings, as many as a block may have:
# :math:`6 \cdot 10^{-5}`.

if __name__ == "__main__":
    x = torch.rand(5, 3000, generator=generator, device=DEVICE)
    y, expected = cumsum_rows(x).double(), x.double().cumsum(-1)
    rtol = 6e-5
    error = ((y - expected) / expected).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    torch.testing.assert_close(y, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time rows of three lengths in float32, half a gigabyte of each. Beside ours
# are PyTorch's function, ``torch.compile`` of it, and a copy, which is the
# roof. The rate counts the bytes of the floor.

ELEMENTS = 2**27


def random(N, dtype=torch.float32):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    shape = ELEMENTS // N, N
    return torch.rand(shape, generator=generator, device=DEVICE, dtype=dtype)


def eager(x):
    return torch.cumsum(x, dim=-1)


def contestants(ours):
    """Return what is measured, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(function, x):
    out = torch.empty_like(x)
    found = {name: partial(op, x) for name, op in contestants(function).items()}
    return found | {"Roof": partial(out.copy_, x)}


def rate(found, size=4):
    """Return GB/s, for one read and one write of ELEMENTS."""
    return 2e-6 * size * ELEMENTS / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (256, 4096, 32000):
        found = gpu_time(calls(cumsum_rows, random(N))).items()
        rates = [f"{who} {rate(times):.0f}" for who, times in found]
        print(f"N = {N:5}: {', '.join(rates)} GB/s")

# %%
# How far does the error grow?
# ----------------------------
#
# The carry takes an addition for each block, so a longer row has more
# roundings. Let the carry be float64, one number a row. That takes an addition
# in float64 for each block, not for each element. The last line of the output
# has ones after a huge number:

LONG = 2**24 if DEVICE.type == "cuda" else 2**15  # interpreted, it takes long

if __name__ == "__main__":
    print("largest relative error   float32 carry   float64 carry")
    for N in sorted({2**12, 2**15, LONG}):
        x = torch.rand(1, N, generator=generator, device=DEVICE)
        exact, line = x.double().cumsum(-1), f"N = {N:18}"
        for ACC in (tl.float32, tl.float64):
            y = cumsum_rows(x, ACC=ACC).double()
            line += f"{((y - exact) / exact).abs().max().item():16.1e}"
        print(line)
    ones = torch.ones(1, 2**14, device=DEVICE)
    ones[0, 0] = 2**31  # from here on float32 goes in steps of 256
    ends = [
        cumsum_rows(ones, ACC=ACC, BLOCK_N=128)[0, -1].item() - 2**31
        for ACC in (tl.float32, tl.float64)
    ]
    print(f"2**31, then {ones.numel() - 1} ones in blocks of 128 add {ends}")

# %%
# The roundings of random numbers mostly cancel. The ones of the last line
# always round the same way: the float32 carry loses each block of ones. The op
# has a float64 carry. With it, the error of a row is that of one block and of
# one more rounding, however long the row is.

# %%
# How long a block, how many warps?
# ---------------------------------
#
# The threads of a warp scan among themselves, but warps have to wait for each
# other. A program with few warps has fewer to wait for, and each thread scans
# more elements. A short block has few loads in flight, and then more programs
# have to share a multiprocessor. We try both:

if __name__ == "__main__" and DEVICE.type == "cuda":
    tiles = [(512, 1), (1024, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4)]
    tiles += [(4096, 4), (4096, 8)]
    print("GB/s,  N", *(f"{block:5}/{warps}" for block, warps in tiles))
    for N in (1024, 4096, 16384, 128256):
        x, line = random(N), f"{N:8}"
        tried = {
            (block, warps): partial(
                cumsum_rows,
                x,
                ACC=tl.float64,
                BLOCK_N=block,
                num_warps=warps,
            )
            for block, warps in tiles
        }
        found = gpu_time(tried, turns=20)
        print(line, *(f"{rate(found[tile]):7.0f}" for tile in tiles))

# %%
# A column's name is the elements of a block / the warps. All matrices have the
# same number of elements, so longer rows are fewer: the last line has a
# thousand rows. The op has blocks of 1024 and two warps. If there are fewer
# than 2048 rows and loads are wide (see below), it has blocks of 4096 and four
# warps, which give each of the few programs more loads in flight. In the
# record, these larger blocks lose at 128256, in the table after the op, too. At
# one length of block, more warps are mostly as fast or faster.

# %%
# Short rows share a program
# --------------------------
#
# A row of 64 fills a sixteenth of a block of 1024, and the rest is masked. Let
# a program have as many short rows as make 1024 elements:
#
# .. code-block:: text
#
#     short rows:  BLOCK_N            long rows:  BLOCK_N   BLOCK_N
#                +---------+                    +---------+---------+--
#                |  row 0  |      BLOCK_M = 1   |       row 0, in blocks
#        BLOCK_M |  row 1  |                    +---------+---------+--
#                |  row 2  |
#                +---------+
#
# The scan goes along ``axis=1``, and each row has a carry of its own.

# %%
# Wide loads
# ----------
#
# A row of 1000 in float32 begins at a multiple of 16 bytes, as a row of 1024
# does. A thread could load four elements at once. But the compiler does not
# know that: of an integer argument it knows only whether 16 divides it. Let
# ``VEC`` be how many elements a thread may load at once. ``VEC`` divides ``N``,
# so ``N // VEC * VEC`` is ``N`` again, and now the compiler knows that ``VEC``
# divides ``N``. Wide loads spare shuffles, too: a thread first adds up its own
# ``VEC`` neighbours. (``unaligned_rows.py`` looks into rows of odd lengths.)

# %%
# The backward
# ------------
#
# :math:`x_k` is part of all :math:`y_n` from :math:`k` on. So its gradient is
# the sum of all incoming gradients *from there to the end*, a scan from right
# to left:
#
# .. math:: \mathrm{d}x_k = \sum_{n \ge k} \mathrm{d}y_n
#
# PyTorch turns the rows round, scans, and turns them round again. That moves
# six tensors instead of two. A kernel can scan from right to left itself, in
# three ways:
#
# * ``tl.cumsum`` has an option ``reverse``. It turns the block round across the
#   threads and back, which takes more shuffles than the sums do.
# * Load the elements in reverse order. Then neighbours in a thread are in the
#   wrong order in memory, and no load is wide.
# * Load the *vectors* in reverse order, each one whole, ``VEC`` elements. Then
#   turn round the elements that each thread has. That only renames its
#   registers:
#
# .. code-block:: text
#
#     in memory                  a b c d | e f g h | i j k l       VEC = 4
#     loaded, vectors reversed   i j k l | e f g h | a b c d
#     turned                     l k j i | h g f e | d c b a
#
# To turn a vector, swap its halves, then the halves of each half. Triton has no
# swap. But the sum of two integers, less one of them, is the other, even where
# the sum overflows. The compiler sees through that and adds nothing. The table
# after the op compares all three ways. They differ most in rows of 64.

# %%
# The op
# ------
#
# A row is the last dimension of a tensor of any shape. Rows that lie apart, as
# in ``x[:, :1000]``, are read where they are. Other layouts are copied first.
# The forward and the backward share one kernel, and each is the gradient of the
# other. So gradients have gradients, and nothing is saved. The op is registered
# as on the page ``what_a_call_costs.py``.

from triton_gallery_ops.cumsum import (
    CUMSUM_ACC,
    CUMSUM_BLOCK,
    _cumsum_kernel,
    _cumsum_plan,
    cumsum,
    cumsum_backward,
)

# %%
# What did each step gain? The table has the rates of each step, and the
# registers of a thread in the longest row's kernel. The first six lines go
# forward, and the last five backward. ``tl.cumsum`` with ``reverse`` needs a
# kernel of its own:


@triton.jit
def reverse_kernel(x_ptr, y_ptr, N, VEC: tl.constexpr, BLOCK_N: tl.constexpr):
    N = N // VEC * VEC
    row = tl.program_id(axis=0).to(tl.int64) * N
    carry = tl.zeros((1,), dtype=tl.float64)  # (1,)
    last = (N - 1) // BLOCK_N * BLOCK_N
    for step in range(0, N, BLOCK_N):
        offs = last - step + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=0)
        y = tl.cumsum(x, axis=0, reverse=True) + carry.to(tl.float32)
        tl.store(y_ptr + row + offs, y, mask=offs < N)
        carry += tl.sum(x, axis=0)


def one_row(x, y, ACC=tl.float64, num_warps=2):
    plan = {"ACC": ACC, "BLOCK_N": 1024, "num_warps": num_warps}
    return row_kernel[(x.shape[0],)](x, y, x.shape[1], **plan)


def tiles(x, y, REVERSE=False, small=False, **changes):
    M, N = x.shape
    plan = _cumsum_plan(x, N, REVERSE) | changes
    if small:
        block = min(CUMSUM_BLOCK, plan["BLOCK_N"])
        plan |= {"BLOCK_N": block, "num_warps": 2}
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    return _cumsum_kernel[grid](x, y, M, N, N, **plan)


def turned_round(x, y):
    torch.flip(cumsum(torch.flip(x, (-1,))), (-1,))


def language(x, y):
    M, N = x.shape
    plan = {"VEC": math.gcd(N, 4), "BLOCK_N": 1024, "num_warps": 2}
    return reverse_kernel[(M,)](x, y, N, **plan)


STEPS = {
    "a row, 4 warps": partial(one_row, ACC=tl.float32, num_warps=4),
    "and 2 warps": partial(one_row, ACC=tl.float32),
    "and a float64 carry": one_row,
    "short rows together": partial(tiles, VEC=1, small=True),
    "and VEC": partial(tiles, small=True),
    "the op: and blocks by rows": tiles,
    "backward: flip, scan, flip": turned_round,
    "tl.cumsum, reversed": language,
    "elements in reverse": partial(tiles, REVERSE=True, VEC=1, small=True),
    "vectors in reverse": partial(tiles, REVERSE=True, small=True),
    "the op backward": partial(tiles, REVERSE=True),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    for N in (64, 1000, 4096, 16384, 128256):
        x = random(N)
        args = x, torch.empty_like(x)
        tried = {name: partial(step, *args) for name, step in STEPS.items()}
        found = gpu_time(tried, turns=20)
        ladder[f"GB/s at {N}"] = [round(rate(found[name])) for name in STEPS]
    compiled = [step(*args) for step in STEPS.values()]
    for column in ("n_regs", "n_spills"):
        ladder[column] = [getattr(one, column, "-") for one in compiled]
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare values and gradients of every dtype with float64. In half precision
# the result is rounded once more. The terms of a sum may cancel, so an error is
# measured against the sum of their absolute values.


def random_like(shape, dtype):
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.to(dtype).requires_grad_()


def prove(shape, dtype):
    x, dy = random_like(shape, dtype), random_like(shape, dtype).detach()
    y = cumsum(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    eps = torch.finfo(dtype).eps
    wide, turned = x.detach().double(), dy.double().flip(-1)
    for out, terms in ((y, wide), (dx.flip(-1), turned)):
        assert out.dtype == dtype
        expected, most = terms.cumsum(-1), terms.abs().cumsum(-1)
        error = (out.double() - expected).abs()
        assert (error <= 6e-5 * most + eps * expected.abs()).all()


SHAPES = [(3, 40), (2, 5, 257), (70, 16), (2, 5000), (0, 5), (5, 0), (7,)]
if __name__ == "__main__":
    for dtype in CUMSUM_ACC:
        for shape in SHAPES:
            prove(shape, dtype)
else:  # imported: a glance
    prove((3, 40), torch.float32)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares gradients with finite differences, and
# ``gradgradcheck`` compares the gradients of gradients:

if __name__ == "__main__":
    x = torch.randn(60, 100, generator=generator, device=DEVICE)
    for view in (x[:, :37], x[::2, 3:40], x.T, x[:1].expand(9, 100)):
        torch.testing.assert_close(cumsum(view), torch.cumsum(view, -1))
        expected = torch.cumsum(view.flip(-1), -1).flip(-1)
        torch.testing.assert_close(cumsum_backward(view), expected)
    leaf = random_like((4, 7), torch.float64)
    assert torch.autograd.gradcheck(cumsum, leaf)
    assert torch.autograd.gradgradcheck(cumsum, leaf)

# %%
# NaN and infinities reach all elements after them in their row:

if __name__ == "__main__":
    x = torch.zeros(4, 3000, device=DEVICE)
    x[0, 1500], x[1, 30], x[2, 70], x[2, 900] = math.nan, 3e38, -math.inf, 1
    torch.testing.assert_close(cumsum(x), torch.cumsum(x, -1), equal_nan=True)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    row = torch.ones(1, device=DEVICE)
    for bad in (row.int(), row.expand(2**30 + 1)):
        try:
            cumsum(bad)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in float32, with half a gigabyte at each length. The longest
# row has the length of a vocabulary, whose probabilities a sampler adds up. The
# backward is called through autograd. ``Roof`` is a copy.

SIZES = [64, 256, 1000, 4096, 16384, 32000, 50257, 128256]


def calls_backward(x):
    dy, out = torch.rand_like(x), torch.empty_like(x)
    x = x.requires_grad_()
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(cumsum).items()
    found = {name: partial(grad, op(x), x, dy) for name, op in ops}
    return found | {"Roof": partial(out.copy_, dy)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(cumsum, random(N))) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: 8e-6 * ELEMENTS)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls_backward(random(N))) for N in SIZES}
    results_backward = rate_table(times, "N", "GB/s", lambda N: 8e-6 * ELEMENTS)
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="backward")

# %%
# These are the rates in bfloat16, forward, at three of these lengths:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (256, 4096, 32000):
        found = gpu_time(calls(cumsum, random(N, torch.bfloat16))).items()
        rates = [f"{who} {rate(times, size=2):.0f}" for who, times in found]
        print(f"N = {N:5}: {', '.join(rates)} GB/s")

# %%
# With fewer rows there are fewer programs. Here are fewer and fewer rows of
# 32000, in float32:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (2048, 512, 128, 32):
        x = random(32000)[:M]
        found = gpu_time(calls(cumsum, x), turns=20).items()
        moved = 8e-6 * x.numel()
        rates = [f"{who} {moved / times[0]:.0f}" for who, times in found]
        print(f"{M:4} rows: {', '.join(rates)} GB/s")

# %%
# This is what a call costs the CPU, in microseconds. The GPU works through a
# queue that the CPU fills, so this time matters where matrices are small:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 4096].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# Where our line touches the roof, the kernel moves the floor's bytes and waits
# for nothing else. PyTorch's backward is three kernels, a flip, a scan and a
# flip, and moves six tensors. At 50257, an odd length, ``VEC`` is 1, and each
# thread loads its elements one by one. That alone need not explain the lower
# rate: in the table after the op, the step *and VEC* gains little at 1000.
#
# At 512 and 128 rows, the table of fewer rows shows the limit of this page's
# kernels. A row has one program. If a GPU can run more programs at a time than
# there are rows, a part of it is idle. With fewer than 128 long rows, the op
# has many programs share a row, as the page ``cumsum_long.py`` explains.

# %%
# Break it: the gradient by subtraction
# -------------------------------------
#
# The sum from an element to the end is the total, less the sum of what comes
# before. One could keep the forward kernel, and subtract:


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
# One large gradient spoils all sums after it, though it is not a term of them.
# The total is near :math:`10^8`, where float32 goes in steps of 8, so it has
# lost the 3, the 2 and the 1. With an infinity the difference is ``inf - inf``,
# which is NaN.

# %%
# Go further
# ----------
#
# 1. An exclusive scan leaves out the element itself: ``y[n]`` is the sum of
#    ``x[:n]``. What is wrong with ``cumsum(x) - x``, and what is better?
# 2. Write ``cummax``, the values alone. What are the carry and the masked
#    elements?
#
# To read on: ``cumsum_long.py`` scans one long row with many programs.

# %%
# Answers
# -------
#
# **1.** The subtraction rounds, and makes NaN of ``inf - inf``. Shift instead:
# load the element to the left, or 0 for the first element, and scan these.
#
# **2.** The carry is the largest element so far, and begins as ``-inf``. Masked
# elements are ``-inf`` too. The function that ``tl.associative_scan`` takes is
# ``tl.maximum`` with ``propagate_nan``. A maximum does not round, so a float32
# carry is exact.
