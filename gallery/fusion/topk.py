# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Find the k largest of each row and where they are: sort a small part of the
# row, and leave the rest alone."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Top-k
=====

Top-k finds the ``k`` largest elements of each row, and where they are. A router
of a mixture of experts picks experts by top-k. A language model picks the
tokens that it samples from. Sorting the whole row would be too much work. With
``k = 8``, the op of this page sorts less than a twentieth of a row of 4096.

After this page you can

* pack a float and its index into one integer, and sort such integers;
* decide where NaN belongs in the order, and which of two equals comes first;
* rule out most of a row by the maxima of its columns;
* let one warp take several short rows.
"""

# sphinx_gallery_tags = ["selection", "sorting", "memory bound", "autograd"]
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
# The simplest way takes the maximum of each row, removes it, and starts again.
# This function counts what it reads:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def topk_by_maxima(x, k):
    """Return the k largest of each row, where they are, and bytes read."""
    left, found, read = x.clone(), [], 0
    for _ in range(k):
        found.append(left.max(-1, keepdim=True))
        left.scatter_(-1, found[-1].indices, -torch.inf)
        read += left.nbytes
    values, indices = zip(*found, strict=True)
    return torch.cat(values, -1), torch.cat(indices, -1), read


if __name__ == "__main__":
    x = torch.tensor([[3.0, 1, 4, 1, 5, 9, 2, 6]], device=DEVICE)
    values, indices, read = topk_by_maxima(x, 3)
    print(values.tolist(), indices.tolist())
    print(f"x is read {read / x.nbytes:.0f} times; the floor is once")

# %%
# One integer for both
# --------------------
#
# A sort has to move each value with its index. Both fit into one integer, a
# *word*:
#
# .. code-block:: text
#
#     63                         32 31                         0
#     +----------------------------+----------------------------+
#     |  the float, as an integer  |    2**31 - 1 - the index   |
#     +----------------------------+----------------------------+
#
# The bits of positive floats, read as integers, are in the order of the floats.
# The bits of negative floats are in reverse order, so we invert all of them but
# the sign. As in PyTorch, NaN is larger than any number, and ``-0.0`` equals
# ``0.0``. Of two equal floats, the one with the lower index makes the larger
# word. So no two words are equal, and the result is deterministic.

# %%
# The first kernel
# ----------------
#
# A program takes a row, and ``tl.topk`` sorts its words:
#
# .. code-block:: text
#
#     N = 5, BLOCK_N = 8, k = 2
#
#     x       3     1     4     1     5     .     .     .
#     words   3|0   1|1   4|2   1|3   5|4   low   low   low
#     best    5|4   4|2                     tl.topk(words, 2)
#
# ``3|0`` is the word of 3 at index 0. ``low`` is below the word of any float.


@triton.jit
def sort_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    N,
    k,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0)
    bits = x.to(tl.int32, bitcast=True)
    # The bits of negative floats are in reverse order.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # The two zeros are equal, and so are all NaN.
    key = tl.where(x == 0, 0, key)
    key = tl.where(x == x, key, 0x7FFFFFFF)
    words = (key.to(tl.int64) << 32) | (0x7FFFFFFF - offs)  # (BLOCK_N,)
    # Zeros past the end would win over negative numbers.
    best = tl.topk(tl.where(offs < N, words, -(2**63)), K)  # (K,)
    index = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    # K is a power of two, so the last words may not be asked for.
    offs_k = tl.arange(0, K)  # (K,)
    mask = offs_k < k
    # Loaded again: a key lacks the sign of a zero, and the bits of a NaN.
    values = tl.load(x_ptr + row * N + index, mask=mask)
    tl.store(values_ptr + row * k + offs_k, values, mask=mask)
    tl.store(indices_ptr + row * k + offs_k, index, mask=mask)


def sort_rows(x, k):
    """Return the k largest of each row of a contiguous float32 matrix."""
    M, N = x.shape
    out = x.new_empty(M, k), x.new_empty(M, k, dtype=torch.int64)
    known = {"K": max(2, triton.next_power_of_2(k))}
    known["BLOCK_N"] = triton.next_power_of_2(N)
    warps = max(1, min(16, known["BLOCK_N"] // 128))
    sort_kernel[(M,)](x, *out, N, k, **known, num_warps=warps)
    return out


# %%
# Is it right?
# ------------
#
# Nothing is rounded, so we allow no error. PyTorch's stable sort also has the
# lower index first among equals. We run this sort on the CPU, in float64.

if __name__ == "__main__":
    x = torch.randn(3, 300, generator=generator, device=DEVICE)
    x[1] = x[1].round()  # many equals
    values, indices = (t.cpu() for t in sort_rows(x, 5))
    order = x.cpu().double().sort(descending=True, stable=True)
    error = (values - order.values[:, :5]).abs().max().item()
    print(f"largest error {error}, allowed 0.0")
    exactly = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(values.double(), order.values[:, :5], **exactly)
    torch.testing.assert_close(indices, order.indices[:, :5], **exactly)

# %%
# How fast?
# ---------
#
# We time three lengths in float32. The rate counts the bytes of the floor: the
# input, and twelve for each element found. The roof is a copy of half of it.

ELEMENTS = 2**27


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    return torch.randn(ELEMENTS // N, N, generator=generator, device=DEVICE)


def measure(ours, N, k):
    """Time a function and the others."""
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(torch.topk, dynamic=False, fullgraph=True)
    x = random(N)
    half = x[: len(x) // 2]
    ops = {"Triton": ours, "PyTorch": torch.topk, "torch.compile": fast}
    calls = {name: partial(op, x, k) for name, op in ops.items()}
    calls["Roof"] = partial(torch.empty_like(half).copy_, half)
    return gpu_time(calls, turns=10)


def moved(N, k):
    """Return the bytes of the floor, in millions."""
    return (4 * N + 12 * k) * (ELEMENTS // N) * 1e-6


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (128, 1000, 4096):
        found = measure(sort_rows, N, 8).items()
        rates = [f"{who} {moved(N, 8) / t[0]:.0f}" for who, t in found]
        print(f"N = {N:4}: {', '.join(rates)} GB/s")

# %%
# Where is the time?
# ------------------
#
# ``tl.topk`` sorts with a *bitonic network*, which compares words in pairs and
# exchanges them, in fixed steps. For ``k = 8``, the network first sorts groups
# of eight words. It then halves the number of groups, again and again, and
# sorts what is left. The run prints in how many comparisons a word takes part:


def comparisons(words, K):
    """Return how many comparisons and exchanges tl.topk makes."""
    log_k = K.bit_length() - 1
    count = words * log_k * (log_k + 1) // 2
    while words > K:
        words //= 2
        count += words * (1 + log_k)
    return count


if __name__ == "__main__":
    for N in (128, 1024, 4096):
        print(f"{N:4} words: {comparisons(N, 8) / N:.1f} comparisons for each")

# %%
# Such a comparison takes several instructions, and often an exchange between
# threads. A maximum takes far less. So the op first finds out where it need not
# look. It lays the row out in columns:
#
# .. code-block:: text
#
#     a row of 4096, k = 8
#
#     columns   0    1    2   ...   63
#             +------------------------+
#             | x0   x1   x2  ...  x63 |    LENGTH = 64 elements
#             | x64  x65  ...          |    in a column
#             |                        |
#             +------------------------+
#     maxima    m0   m1   m2  ...  m63     64 words -> tl.topk -> 8 columns
#
#     8 columns, in parts of 8 elements    64 words -> tl.topk -> 8 parts
#     8 parts, one element a word          64 words -> tl.topk -> the result
#
# The eight largest elements are in the eight columns with the largest maxima,
# because an element of another column has eight maxima above it. For the same
# reason, they are in the eight parts of these columns with the largest maxima.
# So three small sorts take the place of a large one.
#
# Equals need care. The op keeps with a maximum the index of its *first*
# occurrence in the column. Then the word of the maximum is the largest word of
# the column. So the argument above holds for words, of which no two are equal.
#
# A thread keeps the maxima of its columns in registers, while it goes down the
# columns. The elements of the winning columns are loaded again. They are few.

# %%
# Which columns?
# --------------
#
# More columns make the first sort larger, and longer columns make the second
# sort larger. The launcher tries all powers of two, and takes those with the
# least cost. A word to sort costs one, and a word of the first sort costs two,
# because a column is read for it. Each sort costs another 32. A table after the
# op has the times of other columns.

if __name__ == "__main__":
    print("N: words to sort in one sort, in three")
    for N, columns, length, part in ((1024, 32, 32, 4), (4096, 64, 64, 8)):
        words = columns + 8 * length // part + 8 * part
        print(f"{N:4}: {N}, {words}")

# %%
# Short rows
# ----------
#
# For ``k = 8``, a row of 256 has 32 columns of 8 elements. This is little to
# load for a program. So a program takes several rows, up to 128 columns in all
# and at most 4096 elements. Such a program has one warp, because a warp needs
# no barrier to exchange words.
#
# In half precision a float has 16 bits, and an index below 8192 has 13. Both
# fit into a word of 32 bits, which is compared and exchanged in fewer
# instructions.
#
# In float64 a word has no room for an index. The op takes float64 so that
# ``gradcheck`` can test the gradient. A kernel of its own keeps the row in
# registers, and takes one maximum after the other, ``k`` times.

# %%
# The backward
# ------------
#
# A value's gradient goes to the element that the value came from. All other
# elements have a gradient of zero. With the values :math:`v_j` and their
# indices :math:`i_j`,
#
# .. math:: \mathrm{d}x_n = \sum_{j < k} \mathrm{d}v_j\,[n = i_j].
#
# No element is found twice, so nothing is added up. Two calls of PyTorch
# compute the gradient: one makes zeros, and ``scatter`` writes to them.

# %%
# The op
# ------
#
# The op takes rows of up to 8192 elements. ``topk_long`` takes longer ones.
# Rows with gaps between them, as in ``x[:, :1000]``, are read where they are.
# Other layouts are copied first. The op is registered as on the page
# ``what_a_call_costs.py``.

from triton_gallery_ops.topk import TOPK_FLOATS, _topk_kernel, _topk_plan, topk

# %%
# What did each step gain? The table has the rates with ``k = 8`` in float32,
# and in its last line those in bfloat16. The registers are those of the longest
# row. Rows of 64 gain by several rows in a program, rows of 4096 by columns. In
# bfloat16 a row has half the bytes: a call is faster, though its rate is lower
# in most columns.


def launch(x, k, **changes):
    """Run the op's kernel by its plan, but for the changes."""
    M, N = x.shape
    plan = _topk_plan(N, max(2, triton.next_power_of_2(k))) | changes
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    out = x.new_empty(M, k), x.new_empty(M, k, dtype=torch.int64)
    sizes = M, N, N, k
    compiled = _topk_kernel[grid](x, *out, *sizes, SOFTMAX=False, **plan)
    return compiled, out


def whole(x, k):
    """Sort whole rows, one a program."""
    block = triton.next_power_of_2(x.shape[1])
    changes = {"SETS": block, "LENGTH": 1, "PART": 1, "BLOCK_M": 1}
    return launch(x, k, **changes, num_warps=max(1, min(16, block // 128)))


def one_row(x, k):
    return launch(x, k, BLOCK_M=1)


STEPS = {
    "whole rows": whole,
    "columns": one_row,
    "the op: and several rows": launch,
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {name: {} for name in (*STEPS, "the op in bfloat16")}
    for N in (64, 256, 1000, 4096):
        x = random(N)
        tried = {name: partial(step, x, 8) for name, step in STEPS.items()}
        tried["the op in bfloat16"] = partial(launch, x.bfloat16(), 8)
        for name, times in gpu_time(tried, turns=20).items():
            compiled, _ = tried[name]()
            short = "bfloat16" in name
            rate = moved(N, 8) / times[0] / (2 if short else 1)
            ladder[name][f"GB/s at {N}"] = round(rate)
            ladder[name]["registers"] = compiled.n_regs
            ladder[name]["spilled"] = compiled.n_spills
    print(pd.DataFrame(ladder).T.to_string())

# %%
# Are there better columns than those of the op? Each line has the number of
# columns, their length, the length of a part, and the time in microseconds. The
# op's own columns come first. At 256 and 4096, others are a little faster:

OTHERS = {  # and how many rows a program takes, with one warp
    64: [(64, 1, 1, 2), (32, 2, 1, 4)],
    256: [(64, 4, 1, 2), (256, 1, 1, 1), (16, 16, 4, 8)],
    4096: [(128, 32, 4, 1), (256, 16, 1, 1)],
}
NAMES = "SETS", "LENGTH", "PART", "BLOCK_M"

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N, others in OTHERS.items():
        plan = _topk_plan(N, 8)
        op = tuple(plan[name] for name in NAMES)
        x, tried = random(N), {}
        for columns in (op, *others):
            changes = dict(zip(NAMES, columns, strict=True))
            tried[columns] = partial(launch, x, 8, **changes, num_warps=1)
        for columns, times in gpu_time(tried, turns=10).items():
            print(f"N = {N:4} {columns[:3]!s:13} {times[0] * 1e3:6.0f} us")

# %%
# Proof
# -----
#
# We compare with a stable sort on the CPU, exactly: values, indices, and the
# gradient of the sum of the values. Some inputs have many equals, one has no
# rows, and some have special values.


def prove(x, k):
    values, indices = topk(x, k)
    assert values.dtype == x.dtype
    order = x.cpu().double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(indices.cpu(), order.indices[..., :k])
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    expected = order.values[..., :k].to(x.dtype)
    torch.testing.assert_close(values.cpu(), expected, **exactly)
    wide = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(topk(wide, k)[0].sum(), wide)
    ones = torch.ones_like(values)
    assert torch.equal(grad, torch.zeros_like(x).scatter(-1, indices, ones))


SHAPES = [((3, 40), 5), ((2, 3, 57), 2), ((0, 5), 2)]

if __name__ == "__main__":
    for dtype in TOPK_FLOATS:
        for shape, k in SHAPES:
            x = torch.randn(shape, generator=generator, device=DEVICE)
            prove(x.to(dtype), k)
            prove(x.round().to(dtype), k)
        special = torch.zeros(3, 90, device=DEVICE, dtype=dtype)
        special[0, ::7], special[0, 3] = -0.0, torch.nan
        special[1], special[1, 40] = -torch.inf, -torch.nan
        special[2], special[2, 50:60] = -1, torch.inf
        prove(special, 6)
    for shape, k in (((2, 257), 2), ((1, 4100), 3)):  # these compile longest
        prove(torch.randn(shape, generator=generator, device=DEVICE), k)
else:  # imported: one case is enough
    prove(torch.randn(3, 40, generator=generator, device=DEVICE), 5)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares the backward with finite differences:

if __name__ == "__main__":
    x = torch.randn(60, 100, generator=generator, device=DEVICE)
    for view in (x[:, :37], x[::20, 3:40], x.T[:5], x[:1].expand(3, 100)):
        prove(view, 4)
    x = x[:2, :6].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk(x, 3)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: topk(x, 3)[0], x)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    row = torch.ones(8193, device=DEVICE)
    for bad, k in ((row, 5), (row[:200], 129), (row[:5].int(), 2)):
        try:
            topk(bad, k)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in float32, with half a gigabyte at each length, and with
# ``k = 8``. A router of a mixture of experts has rows of 64 to 512.

SIZES = [64, 128, 256, 512, 1000, 2048, 4096, 8192]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: measure(topk, N, 8) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: moved(N, 8))
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, ylabel="GB/s")

# %%
# For other ``k``, the table has our rate divided by PyTorch's:

if __name__ == "__main__" and DEVICE.type == "cuda":
    faster = pd.DataFrame()
    for N in (128, 1000, 4096):
        for k in (1, 8, 128):
            x = random(N)
            pair = {"ours": partial(topk, x, k)}
            pair["PyTorch"] = partial(torch.topk, x, k)
            found = gpu_time(pair, turns=10)
            ratio = found["PyTorch"][0] / found["ours"][0]
            faster.loc[f"N = {N}", f"k = {k}"] = round(ratio, 2)
    print(faster.to_string())

# %%
# This is what a call costs the CPU, in microseconds. The GPU works through a
# queue that the CPU fills, so these figures matter where matrices are small.
# Our call costs the CPU several times what PyTorch's costs, so for a few short
# rows PyTorch's call may end first:

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["N"] == 128].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The longer a row and the smaller ``k``, the smaller the part of a row that is
# sorted. With ``k = 8``, three quarters of a row of 64 are sorted. With
# ``k = 128``, nearly a third of a row of 4096 is sorted. The table beside other
# libraries has the same rows with ``k = 8`` and with 64: they are slower with
# 64, while the bytes are nearly the same.
#
# That table counts the bytes of the input alone. The roof of this page moves no
# more than these, but its rate counts the results too. So for short rows the
# rate is higher than the memory's.
#
# Up to 1000 elements, the op comes nearer to the roof as rows grow. For longer
# rows it is further away, though a smaller part is sorted, and PyTorch gains on
# long rows.

# %%
# Break it: bits as they are
# --------------------------
#
# A kernel that does not invert bits is right for probabilities, which have no
# sign. A test notices the error only in rows with fewer than ``k`` positive
# numbers.

if __name__ == "__main__":
    x = torch.tensor([-3.0, 1.0, -0.5, torch.nan, -2.0, -torch.nan])
    order = x.view(torch.int32).argsort(descending=True)
    print("by bits ", x[order].tolist())
    print("by topk ", topk(x.to(DEVICE), 6)[0].tolist())

# %%
# Go further
# ----------
#
# 1. Return the smallest elements, as ``largest=False`` does. What changes, and
#    where does PyTorch put NaN then?
# 2. The op keeps with a maximum the index of its first occurrence. Which row
#    would go wrong if the op kept the number of the column instead?
#
# To read on: Gaihre and others, `Dr. Top-k
# <https://arxiv.org/abs/2109.08219>`_, where maxima stand for parts of a row.

# %%
# Answers
# -------
#
# **1.** Use ``~key``, which is in the reverse order. Then NaN comes last, as in
# PyTorch. The op keeps the minima of the columns, and ``low`` stays below all
# words.
#
# **2.** Let ``k`` be 1, and let two columns have the same maximum. Column 0 has
# it in its second element, column 1 in its first. The first occurrence in the
# row is that of column 1, but column 0 would win.
