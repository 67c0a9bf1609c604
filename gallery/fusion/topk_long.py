# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Find the k largest of long rows: many programs share a row, and further
# kernels merge what each of them found."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Top-k of long rows
==================

A language model samples among the ``k`` largest of a hundred thousand logits.
Such rows are long, and often few. So a row is shared by many programs. Each
finds the ``k`` largest of its part, and further kernels merge what the programs
found. This page builds on ``topk.py``.

After this page you can

* divide a row among programs, and merge their results;
* go down a row's columns in a loop, so that a part may have any length;
* choose the length of a part for few rows and for many.
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
# The ``k`` largest of a row are among the ``k`` largest of its parts. This
# function counts what it reads. The floor is to read each number once:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def topk_by_parts(x, k, part):
    """Return the k largest of each row, and how many numbers were read."""
    found = [torch.topk(p, k).values for p in x.split(part, dim=1)]
    found = torch.cat(found, dim=1)
    return torch.topk(found, k).values, x.numel() + found.numel()


if __name__ == "__main__":
    x = torch.randn(3, 20_000, generator=generator, device=DEVICE)
    values, read = topk_by_parts(x, 8, 4096)
    torch.testing.assert_close(values, torch.topk(x, 8).values)
    print(f"{read:,} numbers are read; x has {x.numel():,}")

# %%
# The first kernel
# ----------------
#
# As on the page ``topk.py``, a *word* is an integer that has a float in its
# upper half and its index, in reverse order, in its lower half. ``tl.topk``
# sorts words. The first kernel sorts the words of a part, and keeps the ``k``
# best. The second kernel sorts what all parts of a row have kept:
#
# .. code-block:: text
#
#     a row    +----------+----------+----------+------+
#              |  part 0  |  part 1  |  part 2  |  3   |   a program each
#              +----------+----------+----------+------+
#     words       k best     k best     k best    k best
#                    \          |          |        /
#                     +---------+----------+-------+
#                            k best of the row             one program
#
# A shorter part is filled up with ``LOWEST``.

LOWEST = tl.constexpr(-(2**63))
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def part_kernel(x_ptr, words_ptr, N, K: tl.constexpr, PART: tl.constexpr):
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    part = tl.program_id(axis=1)
    offs = part * PART + tl.arange(0, PART)  # (PART,)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0)
    bits = x.to(tl.int32, bitcast=True)
    # The bits of negative floats are in reverse order.
    key = tl.where(bits < 0, bits ^ LAST, bits)
    # The two zeros are equal, and so are all NaN.
    key = tl.where(x == 0, 0, key)
    key = tl.where(x == x, key, LAST)
    words = (key.to(tl.int64) << 32) | (LAST - offs)  # (PART,)
    best = tl.topk(tl.where(offs < N, words, LOWEST), K)  # (K,)
    place = (row * tl.num_programs(axis=1) + part) * K
    tl.store(words_ptr + place + tl.arange(0, K), best)


@triton.jit
def merge_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    words_ptr,
    N,
    k,
    count,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    words_row = words_ptr + row * count
    words = tl.load(words_row + offs, mask=offs < count, other=LOWEST)
    index = LAST - (tl.topk(words, K) & LAST)  # (K,)
    # K is a power of two, so the last words may not be asked for.
    offs_k = tl.arange(0, K)  # (K,)
    mask = offs_k < k
    # Loaded again: a key lacks the sign of a zero, and the bits of a NaN.
    values = tl.load(x_ptr + row * N + index, mask=mask)
    tl.store(values_ptr + row * k + offs_k, values, mask=mask)
    tl.store(indices_ptr + row * k + offs_k, index, mask=mask)


def sort_parts(x, k, PART=4096):
    """Return the k largest of each row of a contiguous float32 matrix."""
    M, N = x.shape
    K = max(2, triton.next_power_of_2(k))
    parts = triton.cdiv(N, PART)
    count = parts * K
    values = x.new_empty(M, k)
    indices = torch.empty_like(values, dtype=torch.int64)
    words = indices.new_empty(M, count)
    part_kernel[(M, parts)](x, words, N, K=K, PART=PART, num_warps=8)
    BLOCK = triton.next_power_of_2(count)
    out = values, indices
    merge_kernel[(M,)](x, *out, words, N, k, count, K=K, BLOCK=BLOCK)
    return out


# %%
# Is it right?
# ------------
#
# Nothing is rounded, so we allow no error. PyTorch's stable sort also has the
# lower index first among equals. We run this sort on the CPU, in float64.

if __name__ == "__main__":
    x = torch.randn(2, 1000, generator=generator, device=DEVICE)
    x[1] = x[1].round()  # many equals
    values, indices = (t.cpu() for t in sort_parts(x, 5, PART=256))
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
# We time one row, 64 and 1024 rows of a vocabulary of 128256, in float32. The
# rate counts the bytes of the floor: the input, and twelve bytes for each
# element found. The roof is a copy of half of the input, which moves as many
# bytes as one read of the input.


def random(M, N):
    return torch.randn(M, N, generator=generator, device=DEVICE)


def measure(ours, M, N, k):
    """Time a function and the others."""
    torch.compiler.reset()  # past eight shapes it would raise
    fast = torch.compile(torch.topk, dynamic=False, fullgraph=True)
    x = random(M, N)
    half = x.view(-1)[: x.numel() // 2]
    ops = {"Triton": ours, "PyTorch": torch.topk, "torch.compile": fast}
    calls = {name: partial(op, x, k) for name, op in ops.items()}
    calls["Roof"] = partial(torch.empty_like(half).copy_, half)
    return gpu_time(calls, turns=20)


def moved(M, N, k):
    """Return the bytes of the floor, in millions."""
    return (4 * N + 12 * k) * M * 1e-6


if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (1, 64, 1024):
        found = measure(sort_parts, M, 128256, 8).items()
        rates = [f"{who} {moved(M, 128256, 8) / t[0]:.0f}" for who, t in found]
        print(f"{M:4} rows: {', '.join(rates)} GB/s")

# %%
# Columns, in a loop
# ------------------
#
# The page ``topk.py`` finds the ``k`` columns with the largest maxima first,
# and sorts only what is in them. Here a part may be larger than what fits into
# registers. So each thread goes down its columns in a loop. It keeps of each
# column the largest element so far, and its index:
#
# .. code-block:: text
#
#     columns     0     1     2   ...  SETS - 1
#               +------------------------------+
#               |                              |   8 elements of a column are
#     a turn    | ...                          |   loaded in each turn
#               +------------------------------+
#     next turn | ...                          |
#               +------------------------------+
#     top         *     *     *   ...     *        a number and its index each
#
# Then the ``k`` best columns are divided into *shares*, which are called parts
# on the page ``topk.py``. The ``k`` best shares are found, and their elements
# are sorted. The launcher chooses columns and shares as on that page: those
# with the least cost.
#
# In half precision, a program sorts words of 32 bits: 16 for the float, and 15
# for the index within the part. So a part could have 32768 elements there, and
# the op takes at most 16384. The words that a part hands on have 64 bits, and
# the index within the row.

# %%
# How long is a part?
# -------------------
#
# The sorts of a part cost the same, whether much was read before them or
# little. So long parts need fewer sorts, and short parts make more programs.
# The op aims at 1024 programs, with parts of 4096 elements at least and of
# 65536 at most. This rule is not the best everywhere. In a table after the op,
# it is best for one row, and other lengths are faster for many rows.

# %%
# Many parts
# ----------
#
# A row of a million has 245 parts of 4096. With ``k = 128`` the parts keep
# 31360 words, too many for one sort. So a program merges 1024 words. The words
# that are left are merged again, until one program merges all of them:
#
# .. code-block:: text
#
#     words    31360 -> 31 programs ->  3968 -> 4 programs -> 512 -> 1 program
#
# No two words are equal. So the result is the same for any parts, and whichever
# program ends first.

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
# The op takes rows of any length up to ``2**30``. A row of one part needs no
# merging, so the first kernel stores its result. In float64 a word has no room
# for an index. The op takes float64 so that ``gradcheck`` can test the
# gradient. A kernel of its own goes over the row ``k`` times. The op is
# registered as on the page ``what_a_call_costs.py``.

from triton_gallery_ops.topk_long import (
    TOPK_LONG_FLOATS,
    _topk_long_columns,
    _topk_long_launch,
    _topk_long_plan,
    topk_long,
)

# %%
# What did each step gain? The table has the rates of rows of 128256 with
# ``k = 8`` in float32, and in its last line those in bfloat16. For one row
# columns gain nothing, for 1024 rows they are six times as fast. In bfloat16 a
# row has half the bytes: a call takes less time, though its rate is lower.

STEPS = {"the first kernel": sort_parts, "the op: columns": topk_long}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {}
    for M in (1, 64, 1024):
        x = random(M, 128256)
        tried = {name: partial(step, x, 8) for name, step in STEPS.items()}
        tried["the op in bfloat16"] = partial(topk_long, x.bfloat16(), 8)
        for name, times in gpu_time(tried, turns=20).items():
            rate = moved(M, 128256, 8) / times[0]
            rate = rate / 2 if "bfloat16" in name else rate
            ladder.setdefault(name, {})[f"GB/s, {M} rows"] = round(rate)
    print(pd.DataFrame(ladder).T.to_string())

# %%
# How long should a part be? For each length there is the time in microseconds,
# with the op's own length in front:


def with_parts(x, k, part):
    """Launch the op with parts of another length."""
    K = max(2, triton.next_power_of_2(k))
    return _topk_long_launch(x, k, plan=_topk_long_columns(part, K))


if __name__ == "__main__" and DEVICE.type == "cuda":
    for M, N, k in ((1, 151936, 64), (64, 128256, 64), (1024, 50257, 8)):
        x = random(M, N)
        plan = _topk_long_plan(M, N, triton.next_power_of_2(k), 4)
        length = plan["SETS"] * plan["LENGTH"]
        tried = {p: partial(with_parts, x, k, p) for p in (2048, 4096, 16384)}
        tried = {length: partial(topk_long, x, k)} | tried
        found = gpu_time(tried, turns=10).items()
        line = [f"{part}: {times[0] * 1e3:.0f}" for part, times in found]
        print(f"{M:4} rows of {N}, k = {k:2}   {'   '.join(line)}")

# %%
# Proof
# -----
#
# We compare with a stable sort on the CPU, exactly: values, indices, and the
# gradient of the sum of the values. Some inputs have many equals, one has no
# rows, and some have special values.


def prove(x, k):
    values, indices = topk_long(x, k)
    assert values.dtype == x.dtype
    order = x.cpu().double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(indices.cpu(), order.indices[..., :k])
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    expected = order.values[..., :k].to(x.dtype)
    torch.testing.assert_close(values.cpu(), expected, **exactly)
    wide = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(topk_long(wide, k)[0].sum(), wide)
    ones = torch.ones_like(values)
    assert torch.equal(grad, torch.zeros_like(x).scatter(-1, indices, ones))


SHAPES = [((3, 40), 5), ((1, 4200), 2), ((0, 5), 2)]

if __name__ == "__main__":
    for dtype in TOPK_LONG_FLOATS:
        for shape, k in SHAPES:
            x = torch.randn(shape, generator=generator, device=DEVICE)
            prove(x.round().to(dtype), k)
        special = torch.zeros(2, 4200, device=DEVICE, dtype=dtype)
        special[0, ::7], special[0, 4090:4100] = -0.0, torch.nan
        special[1], special[1, 4190] = -torch.inf, -torch.nan
        prove(special, 2)
else:  # imported: one case is enough
    prove(torch.randn(3, 40, generator=generator, device=DEVICE), 5)

# %%
# Next come rows that lie apart and a transposed matrix. ``gradcheck`` compares
# the backward with finite differences:

if __name__ == "__main__":
    x = torch.randn(2, 600, generator=generator, device=DEVICE)
    for view in (x[:, 7:450], x[:, ::2], x.view(600, 2).T):
        prove(view, 4)
    x = x[:2, :6].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk_long(x, 3)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: topk_long(x, 3)[0], x)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    row = torch.ones(200, device=DEVICE)
    for bad, k in ((row, 129), (row, 201), (row.int(), 5)):
        try:
            topk_long(bad, k)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in float32, with ``k = 64``, half a gigabyte at each length.
# Most lengths are vocabularies of models.

ELEMENTS = 2**27
SIZES = [10000, 16384, 32000, 50257, 128256, 151936, 201088, 2**20]


def rows(N):
    return ELEMENTS // N


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: measure(topk_long, rows(N), N, 64) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: moved(rows(N), N, 64))
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, ylabel="GB/s")

# %%
# For other ``k`` and few rows, the table has our rate divided by PyTorch's:

if __name__ == "__main__" and DEVICE.type == "cuda":
    faster = pd.DataFrame()
    for M in (1, 8, 64, 1024):
        for k in (1, 8, 64, 128):
            x = random(M, 128256)
            pair = {"ours": partial(topk_long, x, k)}
            pair["PyTorch"] = partial(torch.topk, x, k)
            found = gpu_time(pair, turns=10)
            ratio = found["PyTorch"][0] / found["ours"][0]
            faster.loc[f"{M} rows", f"k = {k}"] = round(ratio, 2)
    print(faster.to_string())

# %%
# This is what a call costs the CPU, in microseconds. The GPU works through a
# queue that the CPU fills, so these figures matter where matrices are small:

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["N"] == 32000].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The larger ``k``, the more words there are to sort and to merge, while the
# floor stays nearly the same. From 8 to 64, our lead over PyTorch falls for
# each number of rows. A single row is shared by few programs, and its two or
# three kernels run one after the other.

# %%
# Break it: parts that keep fewer
# -------------------------------
#
# It is tempting to let each of many parts keep fewer than ``k``, as one part
# will hardly have all of the largest. In a sorted row, one part has them all:

if __name__ == "__main__":
    x = torch.arange(16.0)[None]
    kept = [torch.topk(part, 2).values for part in x.split(4, dim=1)]
    print("2 of each part", torch.topk(torch.cat(kept, 1), 4).values.tolist())
    print("topk_long     ", topk_long(x.to(DEVICE), 4)[0].tolist())

# %%
# Go further
# ----------
#
# 1. Sampling needs the probabilities of the ``k`` tokens. What would the first
#    kernel have to keep besides words?
# 2. With ``k`` in the thousands, sorts are too much work. What would find the
#    ``k``-th largest element without a sort?
#
# To read on: Gaihre and others, `Dr. Top-k
# <https://arxiv.org/abs/2109.08219>`_, where maxima stand for parts of a row.

# %%
# Answers
# -------
#
# **1.** Each part's maximum and its sum of exponentials, as in
# ``softmax_long.py``. The merge corrects the sums to the row's maximum.
#
# **2.** A histogram of the words' upper bits tells in which bin the ``k``-th
# largest word is. The next bits are counted for that bin alone, and so on. Then
# one more pass collects that word and all words above it.
