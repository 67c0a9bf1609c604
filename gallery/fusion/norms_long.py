# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# LayerNorm and RMSNorm of rows too long for registers: a variance in one pass
# that does not cancel, by Welford's method and Chan's."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "two norms share its kernels; programs share few rows, backward"
#
# [tool.triton-gallery.not_for]  # with 32 warps; the launcher gives it 16
# blocks_kernel = ["gfx942"]
# columns_kernel = ["gfx942"]
# _norms_long_kernel = ["gfx942"]
# ///
r"""
Norms of long rows
==================

LayerNorm and RMSNorm need a number from the whole row before they can write the
first element. A row of an image's features can have a hundred thousand
elements, too many for the registers of one program. *Welford's method* finds
the mean and the variance in one pass over such a row. A second pass writes the
result, and a cache can serve it.

After this page you can

* compute a mean and a variance in one pass, without cancellation;
* merge the means and variances of two parts of a row;
* keep reductions, which make threads wait, out of a loop;
* add up the gradients of weight and bias in a fixed order.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd"]
import itertools
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
# LayerNorm subtracts a row's mean and divides by its standard deviation.
# RMSNorm divides by the root of the mean square. Let a part of the row have
# :math:`n` elements, the mean :math:`\mu`, and :math:`s = \sum (x_k - \mu)^2`.
# Let the next block have :math:`n'`, :math:`\mu'` and :math:`s'`. They merge by
#
# .. math:: \mu_{\mathrm{both}} = \mu + \delta\,\frac{n'}{n + n'}, \qquad
#    s_{\mathrm{both}} = s + s' + \delta^2\,\frac{n\,n'}{n + n'}, \qquad
#    \delta = \mu' - \mu.
#
# This is Chan's formula. So a row can come in blocks. Here, we count the reads:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def layer_norm_blocks(x, size, eps=1e-5):
    """Return the LayerNorm of a float32 matrix, and the bytes that it read."""
    mean, s, n, read, blocks = 0, 0, 0, 0, x.split(size, dim=1)
    for block in blocks:
        k = block.shape[1]
        variance, middle = torch.var_mean(block, 1, correction=0, keepdim=True)
        delta = middle - mean
        mean = mean + delta * (k / (n + k))
        s = s + variance * k + delta**2 * (n * k / (n + k))
        n, read = n + k, read + block.nbytes
    y = [(block - mean) * torch.rsqrt(s / n + eps) for block in blocks]
    return torch.cat(y, dim=1), read + sum(block.nbytes for block in blocks)


if __name__ == "__main__":
    x = torch.randn(3, 20_000, generator=generator, device=DEVICE)
    y, read = layer_norm_blocks(x, 4096)
    expected = torch.nn.functional.layer_norm(x, (20_000,))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    print(f"x is read {read / x.nbytes:.0f} times, y is written once")

# %%
# The first kernel
# ----------------
#
# A program goes over its row in two passes. Can a cache serve the second one?
#
# .. code-block:: text
#
#     the row     +---------+---------+---------+------+
#     1st pass    | block 0 | block 1 | block 2 | mask |   mean, s: two numbers
#                 +---------+---------+---------+------+
#     2nd pass    | block 0 | block 1 | block 2 | mask |   y is stored
#                 +---------+---------+---------+------+


@triton.jit
def blocks_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64) * N
    mean = tl.zeros((), dtype=tl.float32)
    s = tl.zeros((), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=0).to(tl.float32)
        # The last block may be shorter: zeros past the end are not counted.
        k = tl.minimum(N - start, BLOCK_N)
        mean_block = tl.sum(x, axis=0) / k
        # Past the end the difference is not 0, and would be squared.
        d = tl.where(offs < N, x - mean_block, 0)  # (BLOCK_N,)
        delta = mean_block - mean
        part = k / (start + k)
        mean += delta * part
        # start * k could overflow in int32: so the product is of floats.
        s += tl.sum(d * d, axis=0) + delta * delta * part * start
    # No element could be divided earlier: only now s is of the whole row.
    r = tl.rsqrt(s / N + eps)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x = tl.load(x_ptr + row + offs, mask=offs < N).to(tl.float32)
        w = tl.load(w_ptr + offs, mask=offs < N).to(tl.float32)
        b = tl.load(b_ptr + offs, mask=offs < N).to(tl.float32)
        tl.store(y_ptr + row + offs, (x - mean) * r * w + b, mask=offs < N)


def blocks(x, w, b, y, num_warps=8, kernel=blocks_kernel):
    """Store the norm of each row of x in y, both contiguous matrices."""
    known = {"BLOCK_N": 512 * num_warps, "num_warps": num_warps}
    return kernel[(len(x),)](x, w, b, y, x.shape[1], 1e-5, **known)


def norm_blocks(x, w, b):
    y = torch.empty_like(x)
    blocks(x, w, b, y)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. The largest results are below 32, where a rounding is
# at most :math:`10^{-6}`. We allow :math:`10^{-5}`, ten of these.

if __name__ == "__main__":
    y, atol = norm_blocks(x, x[0], x[1]).double(), 1e-5
    wide = x.double()
    expected = torch.nn.functional.layer_norm(wide, (20_000,), wide[0], wide[1])
    error = (y - expected).abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(y, expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# We time bfloat16. The roof is a copy. Rates count the floor: a read, a write.

ELEMENTS = 2**28


def random(N):
    """Return ELEMENTS numbers in rows of N."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def eager(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def contestants(ours, eager):
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(ours, eager, vectors, N):
    x = random(N)
    out, ops = torch.empty_like(x), contestants(ours, eager).items()
    found = {name: partial(op, x, *x[:vectors]) for name, op in ops}
    return found | {"Roof": partial(out.copy_, x)}


def rate(found):  # in GB/s
    return 4e-6 * ELEMENTS / found[0]


LENGTHS = [32768, 65536, 131072]

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in LENGTHS:
        found = gpu_time(calls(norm_blocks, eager, 2, N)).items()
        rates = [f"{who} {rate(times):.0f}" for who, times in found]
        print(f"N = {N:6}: {', '.join(rates)} GB/s")

# %%
# What does the loop wait for?
# ----------------------------
#
# In each block all threads wait for two sums, one after the other. The page
# ``softmax_long.py`` has a remedy: each *column* of the blocks keeps its own
# numbers. A column gets one element of each block, always by the same thread.
# Welford's method adds an element :math:`x`, the :math:`n`-th of its column, to
# a mean and to a sum of squared differences. It is the formula above for a
# block of this one element:
#
# .. math:: \mu_{\mathrm{new}} = \mu + \frac{x - \mu}{n}, \qquad
#    s_{\mathrm{new}} = s + (x - \mu)(x - \mu_{\mathrm{new}}).
#
# .. code-block:: text
#
#     columns     0   1   2  ...  BLOCK_N - 1
#               +-----------------------------+
#     block 0   | x   x   x   ...           x |
#     block 1   | x   x   x   ...           x |
#     block 2   | x   x   x   ...   . . . . . |   masked past the end
#               +-----------------------------+
#     mean, s     *   *   *   ...           *     two numbers each
#
# No thread waits for another in the loop. The columns are merged once, after
# it. The row's mean is the mean of the columns' means, each weighted with its
# count. A column's mean :math:`\mu_c` differs from the row's :math:`\mu`, so
# each of the :math:`n_c` elements of the column adds :math:`(\mu_c - \mu)^2`:
#
# .. math:: \mu = \frac{1}{N} \sum_c n_c\,\mu_c, \qquad
#    s = \sum_c \big( s_c + n_c\,(\mu_c - \mu)^2 \big).
#
# No term is negative, so :math:`s` cannot cancel.


@triton.jit
def columns_kernel(x_ptr, w_ptr, b_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    # With one mean for the whole row, all threads would wait in each turn.
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    n = tl.zeros((), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + columns  # (BLOCK_N,)
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=0).to(tl.float32)
        n += 1
        # Past the end d is 0, and so changes neither the mean nor s.
        d = tl.where(offs < N, x - mean, 0)  # (BLOCK_N,)
        mean += d * (1 / n)
        s += d * (x - mean)
    # Only here do threads wait for each other. The columns past the end of the
    # last block have one element less than n.
    count = tl.cdiv(tl.maximum(N - columns, 0), BLOCK_N)  # (BLOCK_N,)
    total = tl.sum(count * mean, axis=0) / N
    d = mean - total  # (BLOCK_N,)
    r = tl.rsqrt(tl.sum(s + count * d * d, axis=0) / N + eps)
    for start in range(0, N, BLOCK_N):
        offs = start + columns  # (BLOCK_N,)
        x = tl.load(x_ptr + row + offs, mask=offs < N).to(tl.float32)
        w = tl.load(w_ptr + offs, mask=offs < N).to(tl.float32)
        b = tl.load(b_ptr + offs, mask=offs < N).to(tl.float32)
        tl.store(y_ptr + row + offs, (x - total) * r * w + b, mask=offs < N)


STEPS = {
    "first kernel": partial(blocks, num_warps=16, kernel=blocks_kernel),
    "columns": partial(blocks, num_warps=16, kernel=columns_kernel),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    print("GB/s, at the best number of warps")
    for N in LENGTHS:
        x, y, line = random(N), random(N), f"N = {N:6}"
        for name, step in STEPS.items():
            call = partial(step, x, x[0], x[1], y)
            tried = {w: partial(call, num_warps=w) for w in (4, 8, 16, 32)}
            found = gpu_time(tried, turns=20)
            best = min(found, key=lambda w: found[w])
            line += f"   {name}: {rate(found[best]):.0f} ({best} warps)"
        print(line)

# %%
# The columns are faster. Those of RMSNorm keep a sum of squares each, no mean.

# %%
# Does the second pass find its row?
# ----------------------------------
#
# Between its two passes a row should wait in the L2 cache. Each program at work
# has a row *under way*. More of them keep more loads in flight, but the cache
# has to hold their rows. With more warps, or more bytes for a thread, fewer
# programs fit on a multiprocessor at a time. So both set how many rows are
# under way. The op asks what part of L2 a row on each multiprocessor takes. Up
# to 0.15, a program has 16 warps, beyond it has 32. In a turn, a thread loads
# 16 bytes of each tensor, or 32 if that part is beyond 0.3. In half precision,
# rows that do not begin at multiples of 16 bytes have 16 warps and 16 bytes at
# any length. We chose this by timing. The table of rows under way, after the
# op, has a faster choice for the forward of LayerNorm at 32768.
#
# The op's loads and stores tell the caches what comes next. These are hints,
# which a cache may ignore. What the first pass loads, and weight and bias, are
# to leave the cache last (``evict_last``). What the second pass loads or stores
# is to leave it first. The second pass goes from a row's end to its start, as
# the caches saw the end last.

# %%
# The backward
# ------------
#
# Let :math:`r` be 1 over the standard deviation,
# :math:`\hat{x} = (x - \mu)\,r`, and :math:`g = w\,\mathrm{d}y`. Then
#
# .. math:: \mathrm{d}x = r\,\Big(g - \tfrac{1}{N} \sum g
#    - \hat{x}\,\tfrac{1}{N} \sum g\,\hat{x}\Big), \quad
#    \mathrm{d}w = \sum_{\mathrm{rows}} \mathrm{d}y\,\hat{x}, \quad
#    \mathrm{d}b = \sum_{\mathrm{rows}} \mathrm{d}y.
#
# For RMSNorm, :math:`\mu` is 0, and the term with :math:`\sum g` is missing.
# The forward saves :math:`r` and :math:`\mu` of each row. One kernel takes the
# two sums of each row. If there are few rows, several programs share one, so
# that the GPU is not idle, and ``torch.sum`` adds up theirs.
#
# The sums for :math:`\mathrm{d}w` and :math:`\mathrm{d}b` run over all rows.
# In ``layer_norm.py`` a program keeps them in registers for a whole row. Here a
# whole row does not fit. So a second kernel cuts the matrix into strips, and
# these into tiles. Each program goes up one strip, from the rows that L2 may
# still hold, and takes some of its tiles. It knows the sums of their rows, so
# it writes :math:`\mathrm{d}x`, and adds to *partial sums* of its columns.
# ``torch.sum`` adds up those of a strip. In half precision a strip is 1024
# elements wide:
#
# .. code-block:: text
#
#     element  0 ...          1024 ...
#            +--------------+--------------+
#     rows   | program 0, 1 | program 1, 1 |  --> sums[:, 1, :] --+--> dw, db
#            | program 0, 0 | program 1, 0 |  --> sums[:, 0, :] --+
#            | program 0, 1 | program 1, 1 |
#            | program 0, 0 | program 1, 0 |
#            +--------------+--------------+
#
# Both kernels read ``x`` and ``dy``. In exchange there is no lock, no atomic
# addition and no row that has to wait in a cache; the order of sums is fixed.

# %%
# The op
# ------
#
# There are two functions, ``norms_long_layer_norm`` and
# ``norms_long_rms_norm``, and they share all kernels. The row is the last
# dimension of a tensor of any shape. Rows that lie apart, as in
# ``x[:, :20000]``, are read where they are. Other layouts are copied first.
# ``VEC`` is how many elements a thread may load at once.
# The op is registered as ``what_a_call_costs.py`` shows.
#
# The op's LayerNorm subtracts a row's first element from all others, before
# anything else. A float32 mean of a million may be off by 0.03, and so would be
# every result of that row; the mean of what is left is small. On an H200 that
# costs up to 3 % of the time, and 5 % with 64 rows.

from triton_gallery_ops.norms_long import (
    NORMS_LONG_ACC,
    NORMS_LONG_PROGRAMS,
    _norms_long_backward_launch,
    _norms_long_gpu,
    _norms_long_kernel,
    _norms_long_plan,
    norms_long_layer_norm,
    norms_long_rms_norm,
    norms_long_with_stats,
)

# %%
# What did each step gain? The first two steps have 16 warps here, and the op
# has the launch of its plan. Beside the best warps of ``columns``, in the table
# above, the op gains at 131072 and loses at the shorter lengths. Two rows of
# ``x`` serve as weight and bias. Registers, and those *spilled* to memory, are
# for the longest row. Statements are those of the kernel. The backward has two
# kernels and a sum: no registers. Its rate counts three matrices, not two.


def forward(x, w, b, y, **changes):
    """Launch the kernel of the op as the op does, but for the changes."""
    (M, N), center = x.shape, b is not None
    plan = _norms_long_plan(x, N, center) | {"CENTER": center, "EPS": 1e-5}
    plan |= {"OFFSET": 0.0, "LLAMA": False}
    stats = x.new_empty(2, M, dtype=torch.promote_types(x.dtype, torch.float32))
    b = w if b is None else b
    args = (x, w, b, y, stats, M, N, N)
    return _norms_long_kernel[(M,)](*args, **plan | changes)


def rms(x, w, b, y):
    return forward(x, w, None, y)


def backward(x, w, b, y, kinds=2):
    stats = x.new_ones(kinds, len(x), dtype=torch.float32)
    _norms_long_backward_launch(y, x, w, stats)


KERNELS = {
    "first kernel": blocks_kernel,
    "columns": columns_kernel,
    "the op": _norms_long_kernel,
    "the op, RMSNorm": _norms_long_kernel,
}
STEPS |= {
    "the op": forward,
    "the op, RMSNorm": rms,
    "the op's backward": backward,
    "RMSNorm's backward": partial(backward, kinds=1),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {name: {} for name in STEPS}
    for N in LENGTHS:
        x, y = random(N), random(N)
        tried = {
            n: partial(step, x, x[0], x[1], y) for n, step in STEPS.items()
        }
        for name, times in gpu_time(tried, turns=20).items():
            parts = 1.5 if "backward" in name else 1
            ladder[name][f"GB/s at {N}"] = round(parts * rate(times))
    for name, kernel in KERNELS.items():
        compiled = tried[name]()
        ladder[name]["registers"] = compiled.n_regs
        ladder[name]["spilled"] = compiled.n_spills
        ladder[name]["statements"] = statements(kernel)
    print(pd.DataFrame(ladder).T.to_string(na_rep=""))

# %%
# How many rows should be under way? Beside each length is the part of L2 that a
# row on each multiprocessor takes. Each rate names the warps of a program, and
# the bytes a thread loads in a turn. From left to right, fewer programs fit.

if __name__ == "__main__" and DEVICE.type == "cuda":
    processors, cache = _norms_long_gpu(x.device)
    for N in (24576, *LENGTHS):
        x, y, tried = random(N), random(N), {}
        for warps, thread in NORMS_LONG_PROGRAMS:
            changes = {"num_warps": warps, "BLOCK_N": 16 * warps * thread}
            call = partial(forward, x, x[0], x[1], y, **changes)
            tried[f"{warps}, {thread} bytes"] = call
        line = f"N = {N:6}, {processors * N * 2 / cache:.2f} of L2"
        for name, times in gpu_time(tried, turns=20).items():
            line += f"   {name}: {rate(times):.0f}"
        print(line, "GB/s")

# %%
# Proof
# -----
#
# We compare values and gradients of every dtype with float64 autograd. The
# terms of a sum may cancel, so there is an ``atol``. The gradients of weight
# and bias are sums over all rows. Their errors grow about as the root of the
# number of rows, and so does what we allow.


def random_like(*shapes, dtype=torch.float32):
    """Return random tensors that want gradients."""
    made = (
        torch.randn(shape, generator=generator, device=DEVICE)
        for shape in shapes
    )
    return [t.to(dtype).requires_grad_() for t in made]


def eager_rms(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


OPS = [  # ours, PyTorch's, and how many vectors they take
    (partial(norms_long_layer_norm, eps=1e-5), eager, 2),
    (partial(norms_long_rms_norm, eps=1e-5), eager_rms, 1),
]


def prove(op, reference, vectors, shape, dtype):
    leaves = random_like(shape, *[shape[-1:]] * vectors, dtype=dtype)
    dy = random_like(shape, dtype=dtype)[0].detach()
    y = op(*leaves)
    got = y, *torch.autograd.grad(y, leaves, dy)
    leaves = [t.detach().double().requires_grad_() for t in leaves]
    y = reference(*leaves)
    expected = y, *torch.autograd.grad(y, leaves, dy.double())
    least = 1e-10 if dtype == torch.float64 else 1e-5
    tolerance = least + torch.finfo(dtype).eps
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        atol = tolerance * math.sqrt(y.numel() / max(b.numel(), 1))
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=atol)


# With this many rows, each program of a strip takes more than one tile
MANY = 70 if DEVICE.type == "cpu" else 5000
SHAPES = [(3, 40), (2, 5, 257), (MANY, 257), (2, 20_001), (0, 5), (5, 0)]
if __name__ == "__main__":
    for dtype in NORMS_LONG_ACC:
        for shape in SHAPES:
            for one in OPS:
                prove(*one, shape, dtype)
else:  # imported: a glance
    for one in OPS:
        prove(*one, (3, 40), torch.float32)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares the backward with finite differences. Rows with NaN or
# infinity come out as in PyTorch on a CPU, and touch no other row. (On a GPU,
# one infinity makes PyTorch's whole row of RMSNorm NaN.)

if __name__ == "__main__":
    x = random_like((60, 100))[0].detach()
    views = [x[:, :37], x[::2, 3:40], x.T[:, :37], x[:1, :37].expand(9, 37)]
    views.append(torch.ones(4, 20_001, device=DEVICE))
    views[-1][1, -1], views[-1][2, 0] = torch.nan, torch.inf
    # Without a GPU, NumPy computes, and would warn of infinities.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for view, (op, reference, vectors) in itertools.product(views, OPS):
            given = torch.ones(vectors, view.shape[-1], device=DEVICE)
            y, expected = op(view, *given), reference(view.cpu(), *given.cpu())
            torch.testing.assert_close(
                y.cpu(), expected, rtol=1e-5, atol=1e-4, equal_nan=True
            )
    for op, _, vectors in OPS:
        leaves = random_like((2, 5), *[(5,)] * vectors, dtype=torch.float64)
        assert torch.autograd.gradcheck(op, leaves)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    x = torch.ones(3, 5, device=DEVICE)
    for bad in ((x.int(), x[0].int()), (x, x[0, :4])):
        try:
            norms_long_rms_norm(*bad, 1e-5)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16, with half a gigabyte at each length. Some models
# norm all features of an image at once: 64 channels of 28 by 28 pixels are
# 50176 elements, 64 of 56 by 56 are 200704. The chart is of LayerNorm, and a
# table of RMSNorm follows. The backward is called through autograd. ``Roof`` is
# a copy. For the backward it is an addition, which has two reads and a write as
# well.

SIZES = [20480, 32768, 50176, 65536, 100352, 131072, 200704, 262144]


def calls_backward(ours, eager, vectors, N):
    x, dy = random(N), random(N)
    leaves = [t.clone().requires_grad_() for t in (x, *x[:vectors])]
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(ours, eager).items()
    found = {name: partial(grad, op(*leaves), leaves, dy) for name, op in ops}
    out = torch.empty_like(dy)
    return found | {"Roof": partial(torch.add, x, dy, out=out)}


def table(way, sizes, moved):
    """Time the calls that a function makes of a size, and print a table."""
    times = {N: gpu_time(way(N)) for N in sizes}
    found = rate_table(times, "N", "GB/s", lambda N: moved * 1e-6)
    print(found.to_string())
    return found


def draw(found, title):
    wide = found.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title=title)


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = table(partial(calls, *OPS[0]), SIZES, 4 * ELEMENTS)
    draw(results, "forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    way = partial(calls_backward, *OPS[0])
    results_backward = table(way, SIZES, 6 * ELEMENTS)
    draw(results_backward, "backward")

# %%
# RMSNorm, forward and backward:

if __name__ == "__main__" and DEVICE.type == "cuda":
    table(partial(calls, *OPS[1]), LENGTHS, 4 * ELEMENTS)
    table(partial(calls_backward, *OPS[1]), LENGTHS, 6 * ELEMENTS)

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 32768].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# Rows are read twice, and the second time from L2 if it still holds them. A
# forward that never finds a row there moves three matrices instead of two, so
# it has 0.67 of the roof at most. A higher rate shows that L2 served reads.
# Weight and bias are as long as a row, so each row reads as much of them as of
# itself. These reads do not count in the rates.
#
# The table of rows under way shows from how many rows on more of them bring
# nothing.
#
# The backward moves at least ``x``, ``dy`` and ``dx``. The op reads ``x`` and
# ``dy`` twice: five matrices, or 0.6 of the roof if nothing else took time. The
# second kernel starts after the whole matrix has gone through, so it can find
# only the last rows in L2.
#
# In the forward no two programs share a row: one row, or a few, leave most of
# the GPU idle. Rows that do not begin at a multiple of 16 bytes are loaded in
# smaller pieces, as ``unaligned_rows.py`` explains.

# %%
# Break it: the mean of the squares
# ---------------------------------
#
# The variance is also :math:`\tfrac{1}{N} \sum x^2 - \mu^2`. That takes two
# sums in one pass, and neither Welford nor Chan. Let the mean be 10,000 and the
# variance 1. The two terms are near :math:`10^8`, where neighbours in float32
# are 8 apart. Their difference of 1 has no bit left: it *cancels*. We print the
# variance that each way finds, and that of float64:

if __name__ == "__main__":
    one = torch.ones(20_000, device=DEVICE)
    for mean in (0, 100, 1000, 10_000):
        x = torch.randn(1, 20_000, generator=generator, device=DEVICE) + mean
        r = norms_long_with_stats(x, one, one, 1e-5)[1][0]
        found = {
            "the op": r**-2 - 1e-5,
            "float64": x.double().var(correction=0),
        }
        found["squares"] = x.square().mean() - x.mean().square()
        line = [f"{name} {float(value):8.4f}" for name, value in found.items()]
        print(f"mean {mean:6}: {', '.join(line)}")

# %%
# In other rows the difference may be negative. A negative variance has no root,
# so such a row would be NaN. Welford's method subtracts the mean before it
# squares. After a column's first element its differences are near 1, and none
# of their squares cancels.

# %%
# Go further
# ----------
#
# 1. ``tl.reduce`` merges numbers by a function of two of them. What would that
#    function be for (count, mean, s), and why does the op do without it?
# 2. GroupNorm norms several channels of an image as one row, and has one weight
#    for each channel. Which lines of the forward change?
#
# To read on:
#
# * ``layer_norm.py`` and ``rms_norm.py`` are for rows that fit into registers.
# * ``few_long_rows.py`` spreads a row over many programs.
# * The papers: `Welford <https://doi.org/10.1080/00401706.1962.10490022>`_, and
#   `Chan, Golub and LeVeque <https://doi.org/10.1080/00031305.1983.10483115>`_

# %%
# Answers
# -------
#
# **1.** It is the formula of the section *In PyTorch*. It divides by the sum of
# two counts in each step of the tree. Two columns past a short row's end make
# that sum 0. The op has all columns at hand, so it takes their mean first. Then
# no step divides.
#
# **2.** The pointers of weight and bias: element ``offs`` of a row belongs to
# channel ``offs // pixels`` of its group, and the group's first channel is
# added.
