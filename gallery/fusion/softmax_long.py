# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Take the softmax of rows too long for registers: maximum and sum in one
# pass, then a second pass that a cache can serve."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "rows stay in registers, take two passes, or are cut into parts"
#
# [tool.triton-gallery.not_for]  # with 32 warps; the launcher gives it 16
# online_kernel = ["gfx942"]
# columns_kernel = ["gfx942"]
# _softmax_long_kernel = ["gfx942"]
# _softmax_long_backward_kernel = ["gfx942"]
# ///
r"""
Softmax of long rows
====================

A language model's row of logits can have a hundred thousand numbers, too
many for the registers of one program. The *online* softmax gets the maximum and
the sum in one pass over the row. A second pass writes the result, and a cache
can serve it.

After this page you can

* find a row's maximum and its sum of exponentials in a single pass;
* keep reductions, which make threads wait, out of a loop;
* choose how many rows are under way, so that their second pass finds them in
  the L2 cache;
* avoid the ``-inf`` that fills a row with NaN.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd"]
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

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.counting import statements

# %%
# In PyTorch
# ----------
#
# The sum needs the maximum of the whole row. But it may start with the maximum
# so far, and be corrected when the maximum grows from :math:`m` to :math:`m'`:
#
# .. math:: s' = s\,e^{m - m'} + \sum_{k \in \text{block}} e^{x_k - m'}
#
# Then the row can come in blocks. This function counts what it reads:

generator = torch.Generator(device=DEVICE).manual_seed(0)
LOWEST = torch.finfo(torch.float32).min


def softmax_blocks(x, size):
    """Return the softmax of a float32 matrix, and the bytes that it read."""
    m = torch.full_like(x[:, :1], LOWEST)
    s, read, blocks = torch.zeros_like(m), 0, x.split(size, dim=1)
    for block in blocks:
        larger = torch.maximum(m, block.amax(1, keepdim=True))
        s = s * (m - larger).exp() + (block - larger).exp().sum(1, keepdim=True)
        m, read = larger, read + block.nbytes
    y = [(block - m).exp() / s for block in blocks]
    return torch.cat(y, dim=1), read + sum(block.nbytes for block in blocks)


if __name__ == "__main__":
    x = torch.randn(3, 20_000, generator=generator, device=DEVICE)
    y, read = softmax_blocks(x, 4096)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    print(f"x is read {read / x.nbytes:.0f} times, y is written once")

# %%
# The floor is one read and one write. Can a cache serve the second read?

# %%
# The first kernel
# ----------------
#
# A program takes a row, and goes over it twice:
#
# .. code-block:: text
#
#     the row       +---------+---------+---------+------+
#     1st pass      | block 0 | block 1 | block 2 | mask |   m, s: two numbers
#                   +---------+---------+---------+------+
#     2nd pass      | block 0 | block 1 | block 2 | mask |   y is stored
#                   +---------+---------+---------+------+


@triton.jit
def online_kernel(
    x_ptr,
    y_ptr,
    N,
    LOWEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32 the product would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64) * N
    # A maximum that starts at -inf can make s NaN: see "Break it".
    m = tl.full((), LOWEST, dtype=tl.float32)
    s = tl.zeros((), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # -inf past the end is never the maximum, and adds nothing to the sum.
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=-float("inf"))
        # In half precision, the sum of many small numbers would stand still.
        x = x.to(tl.float32)  # (BLOCK_N,)
        larger = tl.maximum(m, tl.max(x, axis=0))
        # What is in s was added while the maximum was m.
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), axis=0)
        m = larger
    # No element could be divided earlier: only now s is of the whole row.
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x = tl.load(x_ptr + row + offs, mask=offs < N)
        y = tl.exp(x.to(tl.float32) - m) / s  # (BLOCK_N,)
        tl.store(y_ptr + row + offs, y, mask=offs < N)


def online(x, y, num_warps=8):
    """Store the softmax of each row of x in y, both contiguous matrices."""
    known = {"LOWEST": LOWEST, "BLOCK_N": 512 * num_warps}
    launch = online_kernel[(len(x),)]
    return launch(x, y, x.shape[1], **known, num_warps=num_warps)


def softmax_online(x):
    online(x, y := torch.empty_like(x))
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. ``x - m`` is rounded to 24 bits, and above -20 here.
# So an exponential is off by a relative :math:`20 \cdot 2^{-24}`, and so is the
# sum. Each of five corrections adds a rounding or two. We allow 5e-6.

if __name__ == "__main__":
    x = torch.randn(3, 20_000, generator=generator, device=DEVICE)
    expected = torch.softmax(x.double(), -1)
    y, rtol = softmax_online(x).double(), 5e-6
    error = ((y - expected) / expected).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    torch.testing.assert_close(y, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time 512 MB of bfloat16. The roof is a copy. Rates count the floor.

ELEMENTS = 2**28


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def contestants(function):
    """Return what is measured on a matrix, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    eager = partial(torch.softmax, dim=-1)
    fast = torch.compile(lambda x: eager(x), dynamic=False, fullgraph=True)
    return {"Triton": function, "PyTorch": eager, "torch.compile": fast}


def calls(function, N):
    x = random(N)
    out = torch.empty_like(x)
    ops = contestants(function).items()
    found = {name: partial(op, x) for name, op in ops}
    return found | {"Roof": partial(out.copy_, x)}


def rate(found):
    """Return GB/s, for one read and one write of ELEMENTS."""
    return 4e-6 * ELEMENTS / found[0]


LENGTHS = [32768, 65536, 131072]

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in LENGTHS:
        found = gpu_time(calls(softmax_online, N)).items()
        rates = [f"{who} {rate(times):.0f}" for who, times in found]
        print(f"N = {N:6}: {', '.join(rates)} GB/s")

# %%
# What does the loop wait for?
# ----------------------------
#
# A kernel that reads each row twice from memory moves three matrices instead of
# two. It has 0.67 of the roof at most, and the first kernel is near that. More
# warps help, as the next section explains. But what do they wait for?
#
# ``tl.max`` and ``tl.sum`` go across all threads of a program. Both make every
# thread wait for the slowest, in each block. Instead, let each *column* of a
# block keep a maximum and a sum of its own. The columns are combined once,
# after the loop. A column has four elements of a block, so one correction
# serves four:
#
# .. code-block:: text
#
#     columns   0   1   2  ...  BLOCK_N - 1
#             +-----------------------------+
#             | x0  x1  x2  ...             |
#             |                             |   4 x BLOCK_N elements of a row
#             |                             |
#             |                             |
#             +-----------------------------+
#        m, s   *   *   *   ...           *     a maximum and a sum each
#
# There is a second change: ``tl.exp2`` in place of ``tl.exp``. It makes zero of
# a result that is too small to be a normal float32 number. ``tl.exp`` takes
# instructions to keep it. The figures below are for both changes together. A
# kernel may read a number that is defined outside of it only if that is a
# ``tl.constexpr``: then nobody can change it after the kernel was compiled.

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def exponential(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def columns_kernel(
    x_ptr,
    y_ptr,
    N,
    LOWEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32 the product would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64) * N
    # A line of the block is a stretch of the row. If a column were four
    # neighbours, a thread could load only these at once, 8 bytes in bfloat16.
    block = tl.arange(0, 4)[:, None] * BLOCK_N  # (4, 1)
    block += tl.arange(0, BLOCK_N)[None, :]  # (4, BLOCK_N)
    # One number a row would have all threads wait in each turn of the loop.
    m = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, 4 * BLOCK_N):
        offs = start + block  # (4, BLOCK_N)
        # -inf past the end is never the maximum, and adds nothing to a sum.
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=-float("inf"))
        x = x.to(tl.float32)  # (4, BLOCK_N)
        larger = tl.maximum(m, tl.max(x, axis=0))  # (BLOCK_N,)
        # What is in s was added while the maximum was m.
        s *= exponential(m - larger)
        s += tl.sum(exponential(x - larger[None, :]), axis=0)
        m = larger
    # Only here do threads wait for each other. Columns have unlike maxima, so
    # their sums cannot be added before each is corrected to the row's.
    top = tl.max(m, axis=0)
    total = tl.sum(s * exponential(m - top), axis=0)
    # No element could be divided earlier: only now the row's sum is known.
    for start in range(0, N, 4 * BLOCK_N):
        offs = start + block  # (4, BLOCK_N)
        x = tl.load(x_ptr + row + offs, mask=offs < N).to(tl.float32)
        y = exponential(x - top) / total  # (4, BLOCK_N)
        tl.store(y_ptr + row + offs, y, mask=offs < N)


def columns(x, y, num_warps=8):
    known = {"LOWEST": LOWEST, "BLOCK_N": 256 * num_warps}
    launch = columns_kernel[(len(x),)]
    return launch(x, y, x.shape[1], **known, num_warps=num_warps)


if __name__ == "__main__" and DEVICE.type == "cuda":
    print("GB/s, at the best number of warps")
    for N in LENGTHS:
        x, y, line = random(N), random(N), f"N = {N:6}"
        for step in (online, columns):
            tried = {w: partial(step, x, y, w) for w in (4, 8, 16, 32)}
            found = gpu_time(tried, turns=20)
            best = min(found, key=lambda w: found[w])
            line += (
                f"   {step.__name__}: {rate(found[best]):.0f} ({best} warps)"
            )
        print(line)

# %%
# Does the second pass find its row?
# ----------------------------------
#
# Between its two passes a row should wait in the L2 cache. Each program at work
# has a row *under way*. More of them keep more loads in flight, but the cache
# has to hold their rows. In half precision, a multiprocessor of an H100 holds
# about eight programs of 4 warps, and half as many of twice the warps. So the
# number of warps sets how many rows are under way. The op takes the fewest
# warps with which these rows take about half of L2 at most, and 32 where all
# take more. We chose this by timing. A table after the op has the other
# choices.
#
# The op's loads and stores tell the caches what comes next. These are hints,
# which a cache may ignore. What the first pass loads is to leave the cache last
# (``evict_last``). What the second pass loads or stores is to leave it first
# (``evict_first``). The second pass goes from a row's end to its start, as the
# caches saw the end last.

# %%
# Rows of 50257
# -------------
#
# GPT-2's vocabulary has 50257 tokens. Rows of an odd length begin at any
# address, and no thread can load 16 bytes at once from an address that 16 does
# not divide. So the op's blocks cover a row's *body*, from its first multiple
# of 16 bytes to its last. What is left on both sides are the row's *edges*.
# ``VEC`` elements take 16 bytes, and the edges are fewer than ``2 * VEC``
# elements:
#
# .. code-block:: text
#
#     16 bytes
#     |       |       |       |       |       |
#     . . . x x x x x x x x x x x x x x x x . .
#           edge|      body, in blocks    |edge
#
# Rows of ``x`` and of the result need the same alignment. Where they do not, as
# with rows of 50257 that lie 50264 apart, the op loads each element by itself.
# ``unaligned_rows.py`` explains this step by step.

# %%
# The backward
# ------------
#
# With the incoming gradient :math:`g`, the gradient of ``x`` is
#
# .. math:: d_n = y_n \Big(g_n - \sum_k g_k\,y_k\Big).
#
# The forward saves ``y``. The first pass sums the products :math:`g_k\,y_k`,
# each column its own, and the second pass writes :math:`d`. Both read two
# tensors, so half as many rows fit into the cache. With 16 bytes of each tensor
# for a thread, the kernel needs half the forward's registers. A multiprocessor
# then holds twice as many programs of as many warps. These rows may take seven
# tenths of L2. Where two programs of 32 warps would take more, a thread loads
# 32 bytes of each tensor, and only one program fits.

# %%
# The op
# ------
#
# The op takes rows of any length up to ``2**30``. Rows that fit stay in
# registers, as on the page ``softmax.py``, but always in one block. Rows of
# more than 2048 elements that do not all begin at a multiple of 16 bytes take
# two passes instead: only the two passes split a row into body and edges. If
# there are four or more multiprocessors for each row, and rows have more than
# 64 KB, several programs share a row: the second exercise asks how. The op is
# registered as ``what_a_call_costs.py`` shows.

from triton_gallery_ops.softmax_long import (
    SOFTMAX_LONG_ACC,
    SOFTMAX_LONG_PROGRAMS,
    _softmax_long_backward_kernel,
    _softmax_long_gpu,
    _softmax_long_kernel,
    _softmax_long_plan,
    _softmax_long_whole_backward_kernel,
    _softmax_long_whole_kernel,
    _softmax_long_whole_plan,
    softmax_long,
)

# %%
# What did each step gain? The first two have eight warps here. Where rows fit
# into registers, the table has both ways. The registers and those *spilled*,
# which a thread keeps in memory, are of the longest row in each line. The
# backward moves three matrices instead of two, so its rate counts 1.5 times the
# bytes.


def run(kernel, plan, kind, *tensors, **changes):
    """Launch a kernel of the op as the op does, but for the changes."""
    M, N = tensors[0].shape
    grid, known = plan(tensors[0], M, N, N, *kind)
    known |= {"stride_xm": N} if len(tensors) == 2 else {}
    return kernel[grid](*tensors, N=N, **known | changes)


WHOLE, PASSES = _softmax_long_whole_plan, _softmax_long_plan
PARTS = {  # kernel, plan, of how many tensors, the longest row
    "two passes": (_softmax_long_kernel, PASSES, [1], 2**30),
    "registers": (_softmax_long_whole_kernel, WHOLE, [], 2**14),
    "backward, two passes": (
        _softmax_long_backward_kernel,
        PASSES,
        [2],
        2**30,
    ),
    "backward, registers": (
        _softmax_long_whole_backward_kernel,
        WHOLE,
        [],
        2**15,
    ),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {}
    for N in (10000, 32000, 50257, 131072):
        x, y, d = random(N), random(N), random(N)
        steps = {"first kernel": partial(online, x, y)}
        steps["columns"] = partial(columns, x, y)
        for name, (*part, longest) in PARTS.items():
            tensors = (x, y, d) if "backward" in name else (x, y)
            if longest >= N:
                steps[name] = partial(run, *part, *tensors)
        for name, times in gpu_time(steps, turns=20).items():
            line, compiled = ladder.setdefault(name, {}), steps[name]()
            parts = 1.5 if "backward" in name else 1
            line[f"GB/s at {N}"] = round(parts * rate(times))
            line["registers"] = compiled.n_regs
            line["spilled"] = compiled.n_spills
    kernels = {"first kernel": online_kernel, "columns": columns_kernel}
    kernels |= {name: part[0] for name, part in PARTS.items()}
    for name, kernel in kernels.items():
        ladder[name]["statements"] = statements(kernel)
    print(pd.DataFrame(ladder).T.to_string(na_rep=""))

# %%
# How many rows should be under way? In front of each rate is the part of L2
# that these rows take. The op takes the first that is at most 0.52 forward, and
# 0.7 backward, or else the last:

if __name__ == "__main__" and DEVICE.type == "cuda":
    processors, cache = _softmax_long_gpu(x.device)
    for name, tensors in (("two passes", 1), ("backward, two passes", 2)):
        print(f"{name}, GB/s")
        for N in LENGTHS:
            x, y, d = random(N), random(N), random(N)
            line, of = f"N = {N:6}", (x, y, d)[: tensors + 1]
            for warps, thread, held in SOFTMAX_LONG_PROGRAMS[tensors][1]:
                changes = {"num_warps": warps, "BLOCK_N": 16 * warps * thread}
                call = partial(run, *PARTS[name][:3], *of, **changes)
                found = rate(gpu_time({1: call}, turns=20)[1])
                part = held * processors * tensors * N * 2 / cache
                line += f"   {part:.2f}: {found * (tensors + 1) / 2:.0f}"
            print(line)

# %%
# Proof
# -----
#
# We compare value and gradient of every dtype with float64, in registers and in
# blocks, with rows that begin anywhere. In half precision the result is rounded
# once more. The terms of a gradient may cancel, so the gradient has an
# ``atol``.

shapes = [(3, 40), (2, 5, 257), (3, 3001), (1, 16_400), (5, 0), (0, 5), ()]


def compare(x, grad):
    """Compare value and gradient with those of float64."""
    wide = x.double().requires_grad_()
    y, expected = softmax_long(x.requires_grad_()), torch.softmax(wide, -1)
    rtol = 5e-6 + (torch.finfo(x.dtype).eps if x.dtype.itemsize == 2 else 0)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=1e-7)
    (d,) = torch.autograd.grad(y, x, grad)
    (expected,) = torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(d.double(), expected, rtol=rtol, atol=rtol)


if __name__ == "__main__":
    # Without a GPU, NumPy computes, and would warn of tiny exponents.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for dtype in SOFTMAX_LONG_ACC:
            for shape in shapes:
                normal = partial(torch.randn, shape, generator=generator)
                x, grad = normal(device=DEVICE), normal(device=DEVICE)
                compare(x.to(dtype), grad.to(dtype))

# %%
# Next come rows that lie apart, a transposed matrix, special values and finite
# differences. As in PyTorch, a row with NaN or inf, or with nothing but
# ``-inf``, becomes NaN. No other row does.

x = torch.randn(3, 6000, generator=generator, device=DEVICE)
rows = torch.zeros(7, 3001, device=DEVICE)
rows[0, 3], rows[1, 0], rows[2] = torch.nan, torch.inf, -torch.inf
rows[3, :2900], rows[4, 1:] = -torch.inf, -torch.inf
rows[5], rows[6, 7] = LOWEST, -LOWEST
with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    for view in (x[:, 7:5001], x[::2, ::2], x.view(6000, 3).T, rows):
        y, expected = softmax_long(view), torch.softmax(view, -1)
        torch.testing.assert_close(y, expected, equal_nan=True)

if __name__ == "__main__":
    x = x[:2, :5].double().requires_grad_()
    assert torch.autograd.gradcheck(softmax_long, x)

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16, with half a gigabyte at each length. At the
# first length rows stay in registers, and backward at the second as well. The
# others are vocabularies of models. The backward is called through autograd.
# ``Roof`` is a copy. For the backward it is an addition, which has two reads
# and a write as well.

SIZES = [4096, 16384, 32000, 50257, 65536, 128256, 151936, 262144]


def calls_backward(N):
    x, g = random(N).requires_grad_(), random(N)
    out = torch.empty_like(g)
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(softmax_long).items()
    found = {name: partial(grad, op(x), x, g) for name, op in ops}
    return found | {"Roof": partial(torch.add, x.detach(), g, out=out)}


def table(way, moved):
    """Print a table, draw it, and return it."""
    times = {N: gpu_time(way(N)) for N in SIZES}
    found = rate_table(times, "N", "GB/s", lambda N: moved * 1e-6)
    print(found.to_string())
    found.pivot(index="N", columns="series", values="GB/s").plot(logx=True)
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = table(partial(calls, softmax_long), 4 * ELEMENTS)
    results_backward = table(calls_backward, 6 * ELEMENTS)

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 32000].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# In half precision, aligned rows of up to 8192 elements are read once, and
# backward those of more than 12288 up to 16384 too. Other rows are read twice,
# and the second time from L2 if it still holds them. Without that, a forward
# has 0.67 of the roof at most, and a backward, with five matrices for three,
# 0.6. A higher rate shows that L2 served reads.
#
# In the table of the best warps, ``columns`` at 131072 has 32, and so as many
# rows under way as the op, but little more than 0.67 of the roof. The op also
# has the hints, and its second pass goes the other way.
#
# The longer the rows, the fewer fit into L2. The table of rows under way has
# both sides: too few loads in flight, and more rows than L2 holds. Backward two
# tensors are under way. A row of 262144 in bfloat16 is then a megabyte. One
# such row for each of 132 multiprocessors, as an H100 or H200 has, makes 138
# MB, and the L2 of an H100 has 50 MB. So a part of the second pass reads
# memory.

# %%
# Break it: a maximum that starts at -inf
# ---------------------------------------
#
# ``-inf`` seems the natural start of a maximum. This row is padded on the left:

if __name__ == "__main__":
    x = torch.zeros(1, 20_000, device=DEVICE)
    x[0, :10_000] = -torch.inf
    y = torch.empty_like(x)
    for lowest in (-math.inf, LOWEST):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            online_kernel[(1,)](x, y, 20_000, LOWEST=lowest, BLOCK_N=4096)
        print(f"m starts at {lowest:8.2g}: {y.isnan().sum():5} NaN")

# %%
# After the first block ``larger`` is still ``-inf``. So ``m - larger`` is
# ``-inf - -inf``, which is NaN, and ``s`` stays NaN from then on. If the
# maximum starts at the lowest finite number, every difference is a number or
# ``-inf``. A row of nothing but ``-inf`` becomes NaN all the same, as its sum
# is 0 and its result 0 / 0.

# %%
# Go further
# ----------
#
# 1. Cross entropy's gradient is the softmax, less one at the target. What would
#    change in the kernel?
# 2. One program would read a single row of 128256. How can many share it?
#
# To read on: the online softmax's `paper
# <https://arxiv.org/abs/1805.02867>`_, ``cross_entropy.py``, and
# ``few_long_rows.py``, which spreads a row over many programs.

# %%
# Answers
# -------
#
# **1.** The second pass alone changes: it subtracts 1 where the column is the
# target. The loss is :math:`m + \log s - x_t`, and is known between the passes.
#
# **2.** Each program takes a part of the row, and writes its ``m`` and ``s``. A
# second kernel corrects each ``s`` to the largest ``m``, as the loop does, adds
# them up, and writes the result. The op does so.
