# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Normalize rows with a variance that does not cancel, from registers, and add
# up the gradients of weight and bias without a lock."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = """
# a long row is two blocks, two gradients go across the rows, and few rows want
# one launch"""
#
# [tool.triton-gallery.not_for]  # with an H100's stages; others get fewer
# _layer_norm_backward_kernel = ["sm_89", "sm_120"]
# ///
r"""
LayerNorm
=========

LayerNorm gives each row the mean 0 and the variance 1. Then it scales and
shifts the columns. The variance needs the mean first, so one sum waits for
another. A kernel that holds its row in registers takes both sums and still
reads each number once.

After this page you can

* compute a variance that stays right where the mean is large;
* save for the backward what would cost more to compute again;
* add up two gradients over all rows without a lock, and say why;
* put two kinds of work into one launch, if neither waits for the other.
"""

# sphinx_gallery_tags = ["autograd", "reduction", "memory bound"]
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
from triton_gallery.counting import Traffic

# %%
# In PyTorch
# ----------
#
# For each row :math:`x` of :math:`N` numbers, with a weight :math:`w` and a
# bias :math:`b`,
#
# .. math:: y_n = (x_n - \mu)\,r\,w_n + b_n, \quad
#    \mu = \tfrac{1}{N} \sum_k x_k, \quad
#    r = 1 \Big/ \sqrt{\tfrac{1}{N} \sum_k (x_k - \mu)^2 + \epsilon}.
#
# Models compute this in float32. We write it with PyTorch's operators.
# ``Traffic``, in the opening of this page, is a *dispatch mode*: it sees each
# of them, and adds up what all of them move. The *floor* is two times the bytes
# of ``x``: to read ``x`` and to write ``y``.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def layer_norm_torch(x, weight, bias, eps):
    wide = x.float()
    d = wide - wide.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    return (d * r * weight + bias).to(x.dtype)


if __name__ == "__main__":
    x = torch.randn(99, 4096, generator=generator, device=DEVICE).bfloat16()
    ones = torch.ones_like(x[0])
    with Traffic() as traffic:
        layer_norm_torch(x, ones, ones, 1e-5)
    operators, times = len(traffic.operators), traffic.moved / x.nbytes
    print(f"{operators} operators: {times:.1f} times the bytes of x")

# %%
# The first kernel
# ----------------
#
# One program loads one row, once, and passes over it twice in registers. The
# first pass adds up the elements, the second one their squared differences from
# the mean. A block's length is a power of two. Past the row's end it is masked:
#
# .. code-block:: text
#
#     N = 5, BLOCK_N = 8
#
#     mask     1    1    1    1    1    0    0    0
#     x       x0   x1   x2   x3   x4    0    0    0   -> sum -> mean
#     d      x0-m x1-m x2-m x3-m x4-m   0    0    0   -> sum of squares -> r
#     y      d*r*w+b   ...              not stored
#
# A masked element is loaded as 0. Its difference from the mean is not 0, so the
# kernel sets this difference to 0 before it squares it.


@triton.jit
def row_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    # Past the row's end x - mean is not 0, and would count as a difference.
    d = tl.where(mask, x - mean, 0)  # (BLOCK_N,)
    r = tl.rsqrt(tl.sum(d * d, axis=0) / N + eps)
    w = tl.load(w_ptr + offs, mask=mask, other=0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + start + offs, d * r * w + b, mask=mask)


def norm_rows(x, weight, bias, kernel=row_kernel, num_warps=4):
    """Return the norm of each row of a contiguous matrix."""
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    args = x, weight, bias, y, N, 1e-5
    kernel[(M,)](*args, BLOCK_N=BLOCK_N, num_warps=num_warps)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum goes through ten levels of a tree, and each may
# round. A result may cancel with the bias, so the tolerance is absolute:
# :math:`2 \cdot 10^{-6}`, 34 roundings of a number near 1.

if __name__ == "__main__":
    x = torch.randn(5, 1000, generator=generator, device=DEVICE)
    w, b = torch.randn(2, 1000, generator=generator, device=DEVICE)
    y, atol = norm_rows(x, w, b).double(), 2e-6
    wide = x.double(), (1000,), w.double(), b.double(), 1e-5
    expected = torch.nn.functional.layer_norm(*wide)
    error = (y - expected).abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(y, expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# We time rows of three lengths in bfloat16, a quarter of a gigabyte of each.
# Beside ours are ``torch.nn.functional.layer_norm``, ``torch.compile`` of it,
# and a copy, which is the roof. The rate counts the bytes of the floor.

ELEMENTS = 2**27


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def eager(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def contestants(ours):
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(function, N):
    x = random(N)
    out, ops = torch.empty_like(x), contestants(function).items()
    found = {name: partial(op, x, x[0], x[1]) for name, op in ops}
    return found | {"Roof": partial(out.copy_, x)}


def rate(found, tensors=2):
    """Return GB/s, if ``tensors`` times ELEMENTS are read or written."""
    return tensors * 2e-6 * ELEMENTS / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (1024, 4096, 16384):
        found = gpu_time(calls(norm_rows, N)).items()
        rates = [f"{who} {rate(times):.0f}" for who, times in found]
        print(f"N = {N:5}: {', '.join(rates)} GB/s")

# %%
# Why not both sums at once?
# --------------------------
#
# At each sum, all threads of a program wait for each other. The variance is
# also :math:`\tfrac{1}{N} \sum x^2 - \mu^2`. With this formula, neither sum has
# to wait for the other.


@triton.jit
def one_pass_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    var = tl.sum(x * x, axis=0) / N - mean * mean
    r = tl.rsqrt(tl.maximum(var, 0) + eps)
    w = tl.load(w_ptr + offs, mask=mask, other=0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + start + offs, (x - mean) * r * w + b, mask=mask)


# %%
# Let the mean be 10,000 and the variance 1. The two terms are near
# :math:`10^8`, where neighbours in float32 are 8 apart. Their difference should
# be 1, and no bit of it is left: the terms *cancel*. What comes out may be near
# 8, or negative, which the kernel replaces by 0. The standard deviation of each
# result should be 1:

if __name__ == "__main__":
    one, zero = torch.ones(900, device=DEVICE), torch.zeros(900, device=DEVICE)
    kernels = {"two passes": row_kernel, "one pass": one_pass_kernel}
    for mean in (0, 100, 1000, 10_000):
        x = torch.randn(1, 900, generator=generator, device=DEVICE) + mean
        line = f"mean {mean:6}"
        for name, kernel in kernels.items():
            y = norm_rows(x, one, zero, kernel).double()
            line += f", {name} {y.std(correction=0).item():9.4f}"
        print(line)

# %%
# What would one pass gain, where it is right? Both kernels have eight warps
# here, too many for short rows, as the next section shows:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (1024, 4096, 16384):
        x = random(N)
        tried = {
            name: partial(norm_rows, x, x[0], x[1], kernel, num_warps=8)
            for name, kernel in kernels.items()
        }
        found = gpu_time(tried, turns=20).items()
        rates = [f"{who} {rate(times):.0f}" for who, times in found]
        print(f"N = {N:5}: {', '.join(rates)} GB/s")

# %%
# One pass gains little at 1024, and less at the other two lengths. So the op
# makes two. If a row did not fit into registers, the second pass would read it
# from memory again. For such rows, Welford's method computes both sums in one
# pass that does not cancel: see ``norms_long.py``.

# %%
# How many warps?
# ---------------
#
# The first kernel had four warps, 128 threads. A thread holds eight numbers at
# most of a row of 768, and 128 numbers of a row of 16384. We time lengths that
# models use, with other numbers of warps:

WARPS = [2, 4, 8, 16]

if __name__ == "__main__" and DEVICE.type == "cuda":
    lines = {}
    for N in (768, 2880, 4096, 7168, 12288, 16384):
        x = random(N)
        call = partial(norm_rows, x, x[0], x[1])
        tried = {w: partial(call, num_warps=w) for w in WARPS if 4096 * w >= N}
        found = gpu_time(tried, turns=20)
        lines[N] = {f"{w} warps": round(rate(found[w])) for w in found}
    print(pd.DataFrame(lines).T.to_string(float_format="%.0f", na_rep="-"))

# %%
# The op gives a row of up to 20 KB in float32 four warps, and a longer one
# eight. The backward holds more, so there it gives up to 16.

# %%
# Tiles of other shapes
# ---------------------
#
# The op takes three more steps, which ``rms_norm.py`` draws and explains. The
# table after the op shows what they gain here.
#
# * A program takes several short rows, as many as make 16 KB in float32.
# * A row of more than 8192 elements is two blocks. So is a row of more than
#   4096, if one block would have a quarter or more of it masked. The first of
#   the two blocks is full.
# * ``VEC`` divides the length of rows and the distance between them. The
#   compiler learns that from ``N // VEC * VEC``, and loads ``VEC`` elements at
#   once.

# %%
# A few rows
# ----------
#
# With few rows, a multiprocessor has one program at most, and nothing else to
# run while that program waits. The program waits for ``x``, then for two sums,
# and then for the weight and the bias. The weight and the bias do not depend on
# the sums. If they are loaded first, the program waits for them and for ``x``
# at the same time:
#
# .. code-block:: text
#
#     load x  ->  sum  ->  sum  ->  load w, b  ->  store y
#
#     load x  ->  sum  ->  sum  ->  store y
#     load w, b ----------------------^
#
# In exchange, the weight and the bias take registers during the sums. With long
# rows, fewer programs then fit on a multiprocessor at a time. So the op loads
# them first in two cases: where there are no more rows than multiprocessors, or
# where a row takes no more than 16 KB in float32. A table after the op compares
# both orders.


# %%
# The backward
# ------------
#
# Let :math:`\hat{x} = (x - \mu)\,r` and :math:`g = w\,\mathrm{d}y`. An element
# acts on its row in three ways: directly, through the mean, and through
# :math:`r`. So its gradient has three terms:
#
# .. math:: \mathrm{d}x = r\,\Big(g - \tfrac{1}{N} \sum g
#    - \hat{x}\,\tfrac{1}{N} \sum g\,\hat{x}\Big), \quad
#    \mathrm{d}w = \sum_{\mathrm{rows}} \mathrm{d}y\,\hat{x}, \quad
#    \mathrm{d}b = \sum_{\mathrm{rows}} \mathrm{d}y.
#
# RMSNorm's backward computes :math:`r` again, together with a sum that it needs
# anyway. Here, to compute :math:`\mu` and :math:`r` again would take two more
# sums, one after the other, before the first product. So the forward saves
# :math:`\mu` and :math:`r`, two numbers for each row.
#
# The sums for :math:`\mathrm{d}w` and :math:`\mathrm{d}b` go across the rows.
# Each program goes through several rows, and adds up their terms in registers.
# Then it stores two rows of *partial sums*, one for :math:`\mathrm{d}w` and one
# for :math:`\mathrm{d}b`. A second kernel adds up the partial sums of all
# programs:
#
# .. code-block:: text
#
#     program 0: rows 0, 3, 6 ...  -> sums[:, 0, :] --+
#     program 1: rows 1, 4, 7 ...  -> sums[:, 1, :] --+--> dw[:], db[:]
#     program 2: rows 2, 5, 8 ...  -> sums[:, 2, :] --+
#
# For one shape, dtype and GPU, the number of programs is fixed, and so is the
# order of all additions. So the op is deterministic on one kind of GPU.
#
# For a row of 16384, the sums for :math:`\mathrm{d}w` and :math:`\mathrm{d}b`
# together take half of a multiprocessor's registers. So, if a row is two
# blocks, the kernel does not keep the weight in registers. It loads the weight
# twice for each row, which a cache can serve. The next rows wait in shared
# memory: ``tl.range`` begins to load them two turns ahead, if they fit. A tile
# of four rows or more does without. The table after the op compares no loads
# ahead with those of one turn, which fit for all its lengths and pay only at
# some.
#
# With few rows, both kernels are short, and the second waits for the first. So
# a matrix of up to four rows for each multiprocessor has one launch. Its
# programs are of two kinds, and none waits for another. The first C programs
# have 64 columns each (32 in float64). Each of the others has a row:
#
# .. code-block:: text
#
#     program 0:    columns 0 to 63 of all rows    -> dw[0:64], db[0:64]
#     program 1:    columns 64 to 127 of all rows  -> dw[64:128], db[64:128]
#     ...
#     program C:    row 0                          -> dx[0, :]
#     program C+1:  row 1                          -> dx[1, :]
#     ...
#
# Both kinds read ``x`` and ``dy``, so this reads twice as much. In exchange,
# there are no partial sums. A row is one block, however long: a program keeps
# no sums of other rows in registers. A table after the op has the times of one
# launch and of two.

# %%
# The op
# ------
#
# A row is the last dimension of a tensor of any shape. Rows that lie apart, as
# in ``x[:, :1000]``, are read where they are. Other layouts are copied first.
# The ops are registered as on the page ``what_a_call_costs.py``: on a GPU a
# call goes straight to the launcher, and ``torch.compile`` looks into the
# ``triton_op``.
#
# The op subtracts a row's first element from all others, before anything else.
# A float32 mean of a million may be off by 0.03, and so would be every result
# of that row; the mean of what is left is small. On an H200, that makes some
# sizes up to 5 % slower, and rows of 1024 elements 8 % faster.

from triton_gallery_ops.layer_norm import (
    LAYER_NORM_ACC,
    _layer_norm_backward_kernel,
    _layer_norm_backward_launch,
    _layer_norm_kernel,
    _layer_norm_plan,
    _layer_norm_plan_backward,
    layer_norm,
    layer_norm_with_stats,
)

# %%
# What did each step gain? The table has the rates of each step and, for the
# longest row, the registers of a thread. Rates count the bytes of the floor.
# Backward, the floor is three matrices: ``dy`` and ``x`` are read, and the
# gradient of ``x`` is written. The last two rows are the backward's first
# kernel alone. The op's backward has two kernels, so its registers are left
# out. ``n_spills`` counts values that a thread keeps in memory. With
# ``STAGES=1``, no turn of its loop loads for a later one. With ``STAGES=2``,
# each turn loads for the next one.


def one_row(x, y, num_warps):
    (M, N), block = x.shape, triton.next_power_of_2(x.shape[1])
    args = x, x[0], x[1], y, N, 1e-5
    return row_kernel[(M,)](*args, BLOCK_N=block, num_warps=num_warps)


def tiles(x, y, vectors=None, **changes):
    M, N = x.shape
    plan = _layer_norm_plan(x, N) | changes
    stats = x.new_empty(2, M, dtype=torch.float32)
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    weight, bias = x[:2] if vectors is None else vectors
    args = x, weight, bias, y, stats, M, N, N
    return _layer_norm_kernel[grid](*args, EPS=1e-5, **plan)


def one_block(x, y):
    block = triton.next_power_of_2(x.shape[1])
    return tiles(x, y, VEC=1, BLOCK_N=block, REST=0)


def backward(x, y):
    stats = x.new_ones(2, len(x), dtype=torch.float32)
    _layer_norm_backward_launch(y, x, x[0], stats)


def backward_tiles(x, y, STAGES):
    """Run the first of two kernels, with loads STAGES - 1 turns ahead."""
    (M, N), stats = x.shape, x.new_ones(2, len(x), dtype=torch.float32)
    programs, plan = _layer_norm_plan_backward(x, N)
    sums = x.new_empty(2, programs, N, dtype=torch.float32)
    args = y, x, x[0], stats, torch.empty_like(x), sums, M, N, N
    plan["STAGES"] = STAGES
    return _layer_norm_backward_kernel[(programs,)](*args, **plan)


STEPS = {  # with how many matrices the floor moves
    "a row, 4 warps": (partial(one_row, num_warps=4), 2),
    "a row, 8 warps": (partial(one_row, num_warps=8), 2),
    "several rows": (one_block, 2),
    "two blocks": (partial(tiles, VEC=1), 2),
    "the op: and VEC": (tiles, 2),
    "the op's backward": (backward, 3),
    "backward, no loads ahead": (partial(backward_tiles, STAGES=1), 3),
    "backward, a turn ahead": (partial(backward_tiles, STAGES=2), 3),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    for N in (128, 1000, 5120, 12288, 16384):
        args = random(N), random(N)
        tried = {
            name: partial(step, *args) for name, (step, _) in STEPS.items()
        }
        found = gpu_time(tried, turns=20)
        rates = [rate(found[name], moved) for name, (_, moved) in STEPS.items()]
        ladder[f"GB/s at {N}"] = [round(one) for one in rates]
    compiled = [step(*args) for step, _ in STEPS.values()]
    for column in ("n_regs", "n_spills"):
        ladder[column] = [getattr(one, column, "-") for one in compiled]
    print(ladder.to_string())

# %%
# What does it gain to load weight and bias first? These are GPU times in
# microseconds, for rows of 7168. ``Triton`` is the op, which chooses by the
# number of rows.

if __name__ == "__main__" and DEVICE.type == "cuda":
    full = random(7168)
    vectors = full[-2:].clone()  # no rows of x, which x would bring along
    for M in (1, 16, 128, 4096):
        x, y = full[:M], torch.empty_like(full[:M])
        found = contestants(partial(layer_norm, eps=1e-5)).items()
        tried = {name: partial(op, x, *vectors) for name, op in found}
        tried["loaded first"] = partial(tiles, x, y, vectors, EARLY=True)
        tried["loaded last"] = partial(tiles, x, y, vectors, EARLY=False)
        found = gpu_time(tried).items()
        times = [f"{who} {times[0] * 1e3:.1f}" for who, times in found]
        print(f"{M:5} rows: {', '.join(times)}")

# %%
# And the backward, in one launch and in two? With ``few=M``, all have one
# launch, with ``few=0`` all have two. The op takes one for up to 528 rows on a
# GPU of 132 multiprocessors. Microseconds again:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (768, 7168, 16384):
        full, line = random(N), f"rows of {N:5}"
        for M in (1, 16, 128, 512, 1024):
            dy, x, weight = full[-M:], full[:M], full[M]
            stats = x.new_ones(2, M, dtype=torch.float32)
            both = partial(_layer_norm_backward_launch, dy, x, weight, stats)
            tried = {"one": partial(both, few=M), "two": partial(both, few=0)}
            one, two = (f[0] * 1e3 for f in gpu_time(tried, turns=20).values())
            line += f"; {M}: one {one:.1f}, two {two:.1f}"
        print(line)

# %%
# Proof
# -----
#
# We compare values and gradients of every dtype with float64 autograd. The
# gradients are those of one launch or two, as the op chooses, and of two. The
# terms of a sum may cancel, so there is an ``atol``.


def random_like(*shapes, dtype=torch.float32):
    """Return random tensors that want gradients."""
    made = (
        torch.randn(shape, generator=generator, device=DEVICE)
        for shape in shapes
    )
    return [t.to(dtype).requires_grad_() for t in made]


def prove(shape, dtype):
    leaves = random_like(shape, shape[-1:], shape[-1:], dtype=dtype)
    dy = random_like(shape, dtype=dtype)[0].detach()
    y = layer_norm(*leaves, 1e-5)
    got = y, *torch.autograd.grad(y, leaves, dy)
    x, weight, bias = (t.detach() for t in leaves)
    _, stats = layer_norm_with_stats(x, weight, bias, 1e-5)
    two = _layer_norm_backward_launch(dy, x, weight, stats, few=0)
    leaves = [t.detach().double().requires_grad_() for t in leaves]
    y = torch.nn.functional.layer_norm(leaves[0], shape[-1:], *leaves[1:], 1e-5)
    expected = y, *torch.autograd.grad(y, leaves, dy.double())
    tolerance = 1e-5 + torch.finfo(dtype).eps
    for a, b in zip((*got, *two), expected + expected[1:], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a.double(), b, rtol=tolerance, atol=tolerance
        )


SHAPES = [(3, 40), (2, 5, 257), (999, 16), (2, 5120), (0, 5), (5, 0)]
if __name__ == "__main__":
    for dtype in LAYER_NORM_ACC:
        for shape in SHAPES:
            prove(shape, dtype)
else:  # imported: a glance
    prove((3, 40), torch.float32)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares the backward with finite differences:

if __name__ == "__main__":
    x, w, b = (t.detach() for t in random_like((60, 100), (37,), (37,)))
    for view in (
        x[:, :37],
        x[::2, 3:40],
        x.T[:, :37],
        x[:1, :37].expand(9, 37),
    ):
        expected = torch.nn.functional.layer_norm(view, (37,), w, b, 1e-5)
        torch.testing.assert_close(layer_norm(view, w, b, 1e-5), expected)
    leaves = random_like((4, 7), (7,), (7,), dtype=torch.float64)
    assert torch.autograd.gradcheck(partial(layer_norm, eps=1e-5), leaves)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    x = torch.ones(3, 16385, device=DEVICE)
    for bad in ((x, x[0]), (x.int(), x[0].int()), (x[:, :5], x[0, :4])):
        try:
            layer_norm(*bad, bad[1], 1e-5)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# All inputs are bfloat16, a quarter of a gigabyte at each length. The lengths
# are that of a head, 128, and hidden sizes of models. The backward is called
# through autograd. Forward, ``Roof`` is a copy. Backward it is an addition,
# which has two reads and a write as well.

SIZES = [128, 768, 1024, 2880, 4096, 7168, 12288, 16384]
ours = partial(layer_norm, eps=1e-5)


def calls_backward(N):
    x, dy = random(N), random(N)
    leaves = [t.clone().requires_grad_() for t in (x, x[0], x[1])]
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(ours).items()
    found = {name: partial(grad, op(*leaves), leaves, dy) for name, op in ops}
    out = torch.empty_like(dy)
    return found | {"Roof": partial(torch.add, x, dy, out=out)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(ours, N)) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: 4e-6 * ELEMENTS)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls_backward(N)) for N in SIZES}
    moved = 6e-6 * ELEMENTS
    results_backward = rate_table(times, "N", "GB/s", lambda N: moved)
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="backward")

# %%
# This is what a call costs the CPU, in microseconds. It matters where inputs
# are small:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 4096].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# Forward, the kernel moves the floor's bytes, and the table shows how close it
# comes to the roof. Up to 1024, ``torch.compile`` is as fast or a little
# faster. Backward, the roof is an addition, which sums nothing across rows. In
# two launches, the op has to write its partial sums and read them again, and
# its second kernel cannot begin before the first has ended. Once each program
# has several rows, both costs are the same for any number of rows. With few
# rows, none of them in this table, one launch reads ``x`` and ``dy`` twice.
# None of this explains the low rate at 16384. There, loads two turns ahead do
# not fit into shared memory, so the op has none, and the table after the op has
# spilled registers.

# %%
# Does the lock need a barrier?
# -----------------------------
#
# Could all programs add to one ``dw``? Only one at a time, so they need a *spin
# lock*, a number in memory. The program that changes the number from 0 to 1
# holds the lock, and resets it to 0 later. The others try again until they can
# change it.


@triton.jit
def add_under_lock_kernel(
    sums_ptr,
    total_ptr,
    lock_ptr,
    N,
    BARRIER: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs = tl.arange(0, BLOCK_N)
    mask = offs < N
    row = sums_ptr + tl.program_id(axis=0).to(tl.int64) * N
    acc = tl.load(row + offs, mask=mask)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    acc += tl.load(total_ptr + offs, mask=mask)
    tl.store(total_ptr + offs, acc, mask=mask)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def add_under_lock(sums, barrier=True):
    total, lock = torch.zeros_like(sums[0]), sums.new_zeros(1).int()
    args = sums, total, lock, sums.shape[1]
    grid, constants = (len(sums),), {"BARRIER": barrier, "BLOCK_N": 16384}
    add_under_lock_kernel[grid](*args, **constants)
    return total


# %%
# It does. A program has many threads, and *one* of them releases the lock. Only
# the barrier makes that thread wait for the stores of the others. Without it,
# the next program may read an incomplete total, and the late stores are lost.
# Whether a run shows this race depends on the GPU and on chance. The
# interpreter never shows it: it runs one program after another. We add up ones,
# so the sums are known. Then we add up random numbers twice, with the lock and
# with ``torch.sum``:

if __name__ == "__main__" and DEVICE.type == "cuda":
    ones = torch.ones(2048, 16384, device=DEVICE)
    for barrier in (True, False):
        runs = [add_under_lock(ones, barrier) for _ in range(9)]
        wrong = sum((total != 2048).sum().item() for total in runs)
        print(f"barrier {barrier}: {wrong} wrong sums")
        assert wrong == 0 or not barrier
    noise = torch.randn(ones.shape, generator=generator, device=DEVICE)
    adders = {
        "with a lock": partial(add_under_lock, noise),
        "torch.sum": partial(torch.sum, noise, dim=0),
    }
    for name, found in gpu_time(adders, turns=10).items():
        differ = (adders[name]() != adders[name]()).sum()
        print(f"{name}: {found[0]:.3f} ms, {differ} sums differ in another run")

# %%
# A second line without wrong sums proves nothing: the race need not show in a
# run. With the barrier the sums are correct, but slow, because the programs
# wait for each other. Their order changes from run to run, and with it the last
# bits of the sums.

# %%
# Go further
# ----------
#
# 1. Welford's method adds one element at a time to a mean and to a sum of
#    squared differences from it. How do you merge two such states, one of ``k``
#    and one of ``l`` elements?
# 2. ``tl.atomic_add`` needs no lock. What still speaks against it?
#
# To read on:
#
# * ``rms_norm.py`` leaves out the mean, and adds a residual in front.
# * ``norms_long.py`` is for rows that do not fit into registers.
# * The papers: `LayerNorm <https://arxiv.org/abs/1607.06450>`_, and
#   Welford's, Technometrics 4 (1962)

# %%
# Answers
# -------
#
# **1.** With :math:`\delta = \mu_l - \mu_k`, the mean is
# :math:`\mu_k + \delta\,l / (k + l)`. The sum is
# :math:`s = s_k + s_l + \delta^2\,k\,l / (k + l)`. ``tl.reduce`` takes such a
# function, and merges a block of states at once.
#
# **2.** The order of the additions changes from call to call, and the last bits
# with it. Where that does not matter, use ``tl.atomic_add``.
