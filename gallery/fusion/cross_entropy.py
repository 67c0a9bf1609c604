# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute a language model's loss with one read of its logits, and the gradient
# with one more read and one write."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "class weights, smoothing, a softcap, z-loss, predictions"
# ///
r"""
Cross entropy
=============

The loss of a language model compares a row of *logits*, one for each token of
the vocabulary, with one target. The logits are often the largest tensor of a
training step. PyTorch stores a second tensor of that size for the backward.
This op stores two numbers for each row instead, and computes the probabilities
again in the backward.

After this page you can

* compute a loss over rows of any length, and read each logit once;
* take the mean over the rows that are not ignored, in one more launch;
* give a row more threads if there are few rows;
* write a backward for which the forward saves two numbers of each row.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd"]
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
from triton_gallery.counting import Traffic, statements

# %%
# In PyTorch
# ----------
#
# For a row of logits :math:`x` and its target :math:`t`,
#
# .. math:: \text{loss} = \log \sum_n e^{x_n} - x_t.
#
# A batch has the mean over the rows. Those with the target ``ignore_index`` are
# *ignored*. A *dispatch mode*, ``Traffic`` in the opening of this page, sees
# which operators PyTorch has for it:

generator = torch.Generator(device=DEVICE).manual_seed(0)
eager = torch.nn.functional.cross_entropy


def random(M, N, dtype=torch.bfloat16):
    """Return logits and targets, a tenth of which is ignored."""
    kind = {"device": DEVICE, "generator": generator}
    ignored = torch.rand(M, **kind) < 0.1
    targets = torch.randint(N, (M,), **kind).masked_fill(ignored, -100)
    return torch.randn(M, N, **kind).to(dtype), targets


if __name__ == "__main__":
    x, targets = random(64, 32000)
    print(f"The logits are {x.nbytes:,} bytes.")
    with Traffic() as traffic:
        loss = eager(x.requires_grad_(), targets)
        torch.autograd.grad(loss, x)
    for name, _, made in traffic.operators:
        print(f"{name:40} makes {made:9,} bytes")

# %%
# Three tensors are as large as the logits. The first is kept for the backward,
# the last is the gradient. The *floor* is one read of the logits for the loss,
# and one more read and one write for the gradient.

# %%
# The first kernel
# ----------------
#
# A program goes over a row in blocks. It keeps the maximum ``m`` so far and the
# sum ``s`` of :math:`e^{x_n - m}`, as in ``softmax_long.py``. At the end, the
# logarithm of the row's sum is :math:`m + \log s`:
#
# .. code-block:: text
#
#     the row     +---------+---------+---------+------+
#                 | block 0 | block 1 | block 2 | mask |   -> m, s
#                 +---------+---------+---------+------+
#     the target               x_t                     loss = m + log s - x_t


@triton.jit
def loss_kernel(
    x_ptr,
    targets_ptr,
    losses_ptr,
    N,
    ignore_index,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)  # row * N may pass 2**31
    x_row_ptr = x_ptr + row * N
    # The lowest number. With -inf, m - larger could be NaN.
    m = tl.full((), -3.4028234663852886e38, dtype=tl.float32)
    s = tl.zeros((), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # -inf past the end is never the maximum, and adds nothing to the sum.
        x = tl.load(x_row_ptr + offs, mask=offs < N, other=-float("inf"))
        # In half precision, the sum of many small numbers would stand still.
        x = x.to(tl.float32)  # (BLOCK_N,)
        larger = tl.maximum(m, tl.max(x, axis=0))
        # What is in s was added while the maximum was m.
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), axis=0)
        m = larger
    target = tl.load(targets_ptr + row)
    # A wrong target would read another row's logit. It makes the loss NaN.
    known = (target >= 0) & (target < N)
    x_t = tl.load(x_row_ptr + target, mask=known, other=float("nan"))
    # log(s) is small. It is lost if it is added to a large m first.
    loss = tl.log(s) + (m - x_t.to(tl.float32))
    tl.store(losses_ptr + row, tl.where(target != ignore_index, loss, 0.0))


def first_loss(x, targets, num_warps=8):
    """Return the mean loss of a contiguous matrix."""
    losses = torch.empty(len(x), device=x.device)
    args = x, targets, losses, x.shape[1], -100
    known = {"BLOCK_N": 512 * num_warps, "num_warps": num_warps}
    loss_kernel[(len(x),)](*args, **known)
    return losses.sum() / (targets != -100).sum()


# %%
# Is it right?
# ------------
#
# We compare with float64. ``x - m`` is rounded to 24 bits, and above -20 here.
# So an exponential is off by a relative :math:`20 \cdot 2^{-24}`, and the sum
# too. Its logarithm is off by as much in absolute terms. We allow 5e-6.

if __name__ == "__main__":
    x, targets = random(40, 5003, torch.float32)
    expected = eager(x.double(), targets)
    loss = first_loss(x, targets).double()
    print(f"error {(loss - expected).abs():.1e}, allowed 5.0e-06")
    torch.testing.assert_close(loss, expected, rtol=0, atol=5e-6)

# %%
# How fast?
# ---------
#
# We time 4096 rows in bfloat16, or 1024 on a small GPU. The roof is a copy that
# moves as many bytes as the floor: half of them are read, half are written.

LARGE = DEVICE.type == "cuda" and torch.cuda.mem_get_info()[1] > 2**35
ROWS = 4096 if LARGE else 1024


def contestants(ours):
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(ours, N, M=ROWS):
    x, targets = random(M, N)
    half = x.view(-1)[: M * N // 2]
    out = torch.empty_like(half)
    ops = contestants(ours).items()
    found = {name: partial(op, x, targets) for name, op in ops}
    return found | {"Roof": partial(out.copy_, half)}


def rate(found, N, M=ROWS, tensors=1):
    """Return GB/s, if ``tensors`` logits are read or written."""
    return 2e-6 * tensors * M * N / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (32000, 50257, 128256):
        found = gpu_time(calls(first_loss, N)).items()
        rates = [f"{who} {rate(times, N):.0f}" for who, times in found]
        print(f"N = {N:6}: {', '.join(rates)} GB/s")

# %%
# Which launches make a mean?
# ---------------------------
#
# In our first version, the losses of the rows take one launch. The mean takes
# several operators of PyTorch besides:

if __name__ == "__main__":
    losses = torch.empty(8, device=DEVICE)
    targets = random(8, 1000)[1]
    with Traffic() as traffic:
        losses.sum() / (targets != -100).sum()
    for name, _, made in traffic.operators:
        print(f"{name:40} makes {made:9,} bytes")

# %%
# Each operator waits for the one before, however few numbers it works on. On a
# GPU, the run prints two times in microseconds: that of the kernel alone, and
# that of the kernel and the mean.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (8, ROWS):
        x, targets = random(M, 32000)
        args = x, targets, torch.empty(M, device=DEVICE), 32000, -100
        rows = partial(loss_kernel[(M,)], *args, BLOCK_N=4096, num_warps=8)
        tried = {"rows": rows, "and mean": partial(first_loss, x, targets)}
        found = gpu_time(tried, turns=20).items()
        print(f"{M:4}:", {who: round(1e3 * t[0], 1) for who, t in found})

# %%
# In place of these operators, the op launches a second kernel, of one program.
# This program adds up the losses, counts the targets that are not ignored, and
# divides. It adds in a fixed order, so the result is deterministic.

# %%
# A maximum for each column
# -------------------------
#
# In the loop, ``tl.max`` and ``tl.sum`` make all threads of a program wait for
# each other, at each block. The op lays a block out in several lines, and its
# loop keeps a maximum and a sum for each *column*. The columns are combined
# once, after the loop. The page ``softmax_long.py`` takes this step, together
# with ``tl.exp2`` in place of ``tl.exp``.
#
# .. code-block:: text
#
#     columns   0   1   2  ...  BLOCK_N - 1
#             +-----------------------------+
#             | x0  x1  x2  ...             |
#             |            ...              |   LINES x BLOCK_N elements
#             |                             |
#             +-----------------------------+
#        m, s   *   *   *   ...           *     a maximum and a sum each

# %%
# Few rows, many rows
# -------------------
#
# One program takes one row. With fewer rows than multiprocessors, some
# multiprocessors have nothing to do. The others should have as many loads in
# flight as they can, so their programs have up to 32 warps. With many rows,
# several programs share a multiprocessor, and four warps for each program are
# enough. A table after the op compares the numbers of warps.
#
# The loss of an ignored row needs none of its logits. The op does not read
# them.

# %%
# A vocabulary of 50257
# ---------------------
#
# GPT-2's vocabulary is an odd number. In half precision, seven of eight such
# rows begin at an address that 16 does not divide. There no thread can load 16
# bytes at once. So the op's blocks cover a row's *body*, from its first
# multiple of 16 bytes to its last. The *edges*, before and after the body, are
# a small block of their own. ``unaligned_rows.py`` explains this step by step:
#
# .. code-block:: text
#
#     16 bytes
#     |       |       |       |       |       |
#     . . . x x x x x x x x x x x x x x x x . .
#           edge|      body, in blocks    |edge

# %%
# The backward
# ------------
#
# The gradient of a row's loss is its softmax, less one at the target:
#
# .. math:: \frac{\partial\,\text{loss}}{\partial x_n} = p_n - [n = t], \qquad
#    p_n = \frac{e^{x_n - m}}{s}.
#
# The forward saves ``m`` and ``s`` of each row. With both numbers, an element
# of the gradient needs one logit alone. The backward sums up nothing, and a
# program can take any part of a row. So for few rows the op gives each row to
# several programs. For the mean, each row's gradient is multiplied by one over
# the number of rows that are not ignored. The kernel of the mean saves this
# factor.
#
# *Label smoothing* :math:`\epsilon` replaces the target by a mixture: a weight
# of :math:`1 - \epsilon` for the target, and another :math:`\epsilon / N` for
# every token. The loss then needs the mean of the row's logits too, and the
# gradient is
#
# .. math:: p_n - \frac{\epsilon}{N} - (1 - \epsilon)\,[n = t].

# %%
# The op
# ------
#
# The op takes logits of any shape and layout. The last dimension is the
# vocabulary. Rows with gaps between them are read where they are. The loss is
# float32, also for half precision: a loss of 11 in bfloat16 could only change
# in steps of 0.0625. The op is registered as on the page
# ``what_a_call_costs.py``.

from triton_gallery_ops.cross_entropy import (
    CROSS_ENTROPY_ACC,
    _cross_entropy_backward_kernel,
    _cross_entropy_backward_launch,
    _cross_entropy_kernel,
    _cross_entropy_plan,
    cross_entropy,
)

# %%
# What did each step gain? A rate counts the bytes of the floor: the logits once
# for the loss, and twice for the backward. The statements are those of the
# kernel that goes over the rows. The registers are those of a thread at the
# last length. *Spilled* registers are those that a thread keeps in memory.


def rows_alone(x, targets, **changes):
    """Launch the op's kernel of rows."""
    M, N = x.shape
    losses = torch.empty(M, device=x.device)
    stats = torch.empty(2 * M, device=x.device)
    plan = _cross_entropy_plan(x, M) | changes
    args = x, targets, losses, stats, M, N, N, -100
    # No class weights, no predictions, no smoothing, z-loss or soft cap
    options = {"weight_ptr": None, "predicted_at": None}
    options |= {"SMOOTHING": 0.0, "LSE_SQUARE_SCALE": 0.0, "SOFTCAP": 0.0}
    return _cross_entropy_kernel[(M,)](*args, **options, **plan)


def with_warps(x, targets, warps):
    lines = 4 if warps == 32 else 8
    changes = {"LINES": lines, "BLOCK_N": 256 * warps, "num_warps": warps}
    return rows_alone(x, targets, **changes)


def backward(x, targets):
    stats = torch.ones(2 * len(x) + 1, device=x.device)
    options = targets, stats, -100, 0.0, "mean"
    return partial(_cross_entropy_backward_launch, stats[0], x, *options)


if __name__ == "__main__" and DEVICE.type == "cuda":
    kernels = {
        "first kernel, PyTorch's mean": loss_kernel,
        "the op": _cross_entropy_kernel,
        "the op's rows": _cross_entropy_kernel,
        "the op's backward": _cross_entropy_backward_kernel,
    }
    ladder = {name: {} for name in kernels}
    for M, N in ((8, 151936), (ROWS, 32000), (ROWS, 50257), (ROWS, 128256)):
        x, targets = random(M, N)
        steps = {
            "first kernel, PyTorch's mean": partial(first_loss, x, targets),
            "the op": partial(cross_entropy, x, targets),
            "the op's rows": partial(rows_alone, x, targets),
            "the op's backward": backward(x, targets),
        }
        for name, times in gpu_time(steps, turns=20).items():
            tensors = 2 if "backward" in name else 1
            figure = round(rate(times, N, M, tensors))
            ladder[name][f"GB/s at {M} x {N}"] = figure
        compiled = rows_alone(x, targets)
    for name, kernel in kernels.items():
        ladder[name]["statements"] = statements(kernel)
    ladder["the op's rows"]["registers"] = compiled.n_regs
    ladder["the op's rows"]["spilled"] = compiled.n_spills
    print(pd.DataFrame(ladder).T.to_string(na_rep=""))

# %%
# How many warps should a row have? These are rates of the op's kernel that goes
# over the rows, without the mean:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M, N in ((8, 151936), (256, 128256), (ROWS, 32000), (ROWS, 128256)):
        x, targets = random(M, N)
        tried = {w: partial(with_warps, x, targets, w) for w in (4, 8, 16, 32)}
        found = gpu_time(tried, turns=20)
        rates = [f"{w} warps {rate(t, N, M):.0f}" for w, t in found.items()]
        print(f"{M:4} x {N:6}: {', '.join(rates)} GB/s")

# %%
# Proof
# -----
#
# We compare loss and gradient of every dtype with those of float64, with each
# reduction, with label smoothing, and with rows that begin anywhere. A gradient
# in half precision is rounded to that dtype, so its tolerance is wider. At the
# target, :math:`p_t - 1` may be small because its terms cancel, so there is an
# ``atol``.


def compare(x, targets, **options):
    """Compare loss and gradient with those of float64."""
    wide = x.detach().double().requires_grad_()
    expected, loss = (
        op(logits, targets, **options)
        for op, logits in ((eager, wide), (cross_entropy, x.requires_grad_()))
    )
    torch.testing.assert_close(
        loss.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    grad = torch.rand(loss.shape, generator=generator, device=DEVICE)
    (d,) = torch.autograd.grad(loss, x, grad.to(loss.dtype))
    (right,) = torch.autograd.grad(expected, wide, grad.double())
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(
        d.double(), right, rtol=1e-5 + eps, atol=1e-6 + 1e-4 * eps
    )


def quietly(function):
    """Call a function. Without a GPU, NumPy would warn of infinities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        function()


def prove():
    for dtype in CROSS_ENTROPY_ACC:
        for reduction in ("mean", "sum", "none"):
            compare(*random(5, 1003, dtype), reduction=reduction)
        compare(*random(3, 50_257, dtype), label_smoothing=0.1)
        x, targets = random(6, 2000, dtype)
        compare(x[:, 7:1010], targets.clamp(max=1002))
        compare(x.T.contiguous().T[:, :9], targets.clamp(max=8))


# When the page is imported, one case is enough.
glance = partial(compare, *random(3, 1003, torch.float32))
quietly(prove if __name__ == "__main__" else glance)

# %%
# Next come finite differences, an ignored row that holds NaN, no rows, and a
# wrong target. At a wrong target, PyTorch's kernel ends with a failed assertion
# on a GPU. For our op to raise an exception, every call would have to wait for
# the GPU. So our op returns NaN:


def special():
    x, targets = random(3, 7, torch.float64)
    targets[1] = -100
    op = partial(cross_entropy, targets=targets)
    assert torch.autograd.gradcheck(op, x.requires_grad_())
    x, targets = random(4, 9, torch.float32)
    targets[:] = torch.tensor([-100, 1, 2, 3])
    x[0, 5] = torch.nan
    loss = cross_entropy(x, targets)
    torch.testing.assert_close(loss, cross_entropy(x[1:], targets[1:]))
    print(f"no rows: {cross_entropy(x[:0], targets[:0]).item()}")
    print(f"a wrong target: {cross_entropy(x, targets + 6).item()}")
    try:
        cross_entropy(x, targets.int())
    except TypeError as error:
        print(f"TypeError: {error}")


if __name__ == "__main__":
    quietly(special)

# %%
# The benchmark
# -------------
#
# The benchmark has the vocabularies of models, in bfloat16. The backward is
# called through autograd. The backward's roof is a copy of the logits.

SIZES = [32000, 50257, 128256, 151936, 201088]


def calls_backward(N):
    x, targets = random(ROWS, N)
    out = torch.empty_like(x)
    roof = partial(out.copy_, x.detach())
    x.requires_grad_()
    grad = partial(torch.autograd.grad, retain_graph=True)
    # Otherwise torch.compile takes its buffers back, and runs only once.
    with torch._functorch.config.patch(donated_buffer=False):
        ops = contestants(cross_entropy).items()
        found = {name: partial(grad, op(x, targets), x) for name, op in ops}
    return found | {"Roof": roof}


def table(way, tensors):
    """Print a table, draw it, and return it."""
    times = {N: gpu_time(way(N), turns=20) for N in SIZES}
    work = 2e-6 * tensors * ROWS
    found = rate_table(times, "N", "GB/s", lambda N: work * N)
    print(found.to_string())
    wide = found.pivot(index="N", columns="series", values="GB/s")
    wide.plot(ylabel="GB/s")
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = table(partial(calls, cross_entropy), 1)
    results_backward = table(calls_backward, 2)

# %%
# With few rows, a call takes this long on the GPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (1, 8, 64):
        found = gpu_time(calls(cross_entropy, 128256, M)).items()
        times = [f"{who} {1e3 * t[0]:.1f}" for who, t in found]
        print(f"{M:2} rows: {', '.join(times)}")

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
# Forward and backward each go over the logits once, and save nothing of their
# size. The roof is a copy, and half of its bytes are written. The forward
# writes next to nothing, so it can be faster than a copy, as it is with long
# rows. Besides its logits, each row has its edges, its target and its columns
# to combine, and the mean waits for the last row. This work weighs more where
# rows are few or short.
#
# In the forward, a single multiprocessor reads a row, however many the GPU has.
# The table of few rows shows what this costs. For vocabularies of fewer than a
# thousand tokens, a program should have several rows, as in ``softmax.py``.

# %%
# Break it: one number in place of two
# ------------------------------------
#
# The forward could save one number of a row in place of two,
# :math:`l = m + \log s`. The probability would then be :math:`e^{x_n - l}`.
# Here are four logits of a million each. Every probability is a quarter:


def a_million():
    x = torch.full((1, 4), 1e6, device=DEVICE, requires_grad=True)
    target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    (d,) = torch.autograd.grad(cross_entropy(x, target), x)
    d[0, 0] += 1  # the gradient at the target is p - 1
    m, s = x.max(), (x - x.max()).exp().sum()
    one = (x - (m + s.log())).exp()
    for name, p in (("two numbers", d), ("one number", one)):
        print(f"{name:11}", [round(each, 3) for each in p[0].tolist()])


if __name__ == "__main__":
    quietly(a_million)

# %%
# Near a million, the numbers of float32 are a sixteenth apart. So the logarithm
# of four is rounded to a multiple of a sixteenth when it is added to a million.
# Subtracting :math:`l` does not bring the lost digits back.

# %%
# Go further
# ----------
#
# 1. Some losses add :math:`z\,(m + \log s)^2` with a constant :math:`z`, which
#    keeps the logits small. What does the forward need for this term, and what
#    does the backward need?
# 2. Nine in ten rows of a batch are ignored. Which rows does the forward read?
#    What does the backward still do for the ignored rows?
#
# Next is ``cross_entropy_in_place.py``, where the gradient takes the logits'
# place. ``linear_cross_entropy.py`` never has all logits at once. To read on:
# the online softmax's `paper <https://arxiv.org/abs/1805.02867>`_.

# %%
# Answers
# -------
#
# **1.** The forward has :math:`m` and :math:`s` already. The derivative of the
# new term is :math:`2 z\,(m + \log s)\,p_n`, so the backward multiplies
# :math:`p_n` by :math:`1 + 2 z\,(m + \log s)`. The backward has both numbers,
# too.
#
# **2.** The forward reads the one row in ten that is not ignored. The backward
# reads no more rows either, but it has to write zeros for the ignored rows.
