# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute a language model's loss and its gradient in one kernel, and write the
# gradient over the logits."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = false
# deterministic = true
# longer = "its kernel is a forward and a backward in one"
#
# [tool.triton-gallery.not_for]  # with 32 warps; the launcher gives it 16
# _cross_entropy_in_place_kernel = ["gfx942"]
# ///
r"""
Cross entropy in place
======================

The logits of a language model are often the largest tensor of a training step,
and their gradient is as large again. Nobody needs the logits once the gradient
is known. This op computes the loss, and writes the gradient over the logits:
one tensor where PyTorch has four.

After this page you can

* compute a loss and its gradient in one launch over the logits;
* let a row wait in the L2 cache between two passes of one program;
* write an op that changes its input, and tell PyTorch so;
* call such an op inside an autograd function, where it is safe.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "in place"]
import gc
import os
import warnings
from functools import partial

import matplotlib.pyplot as plt
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
# For a row of logits :math:`x` with the target :math:`t`, and the mean over
# :math:`R` rows that are not ignored, loss and gradient are
#
# .. math:: \text{loss} = \log \sum_n e^{x_n} - x_t, \qquad
#    d_n = \frac{1}{R}\Big(\frac{e^{x_n}}{\sum_k e^{x_k}} - [n = t]\Big).
#
# A *dispatch mode*, ``Traffic`` in the opening of this page, sees each operator
# of PyTorch and what it makes:

generator = torch.Generator(device=DEVICE).manual_seed(0)
eager = torch.nn.functional.cross_entropy
LARGE = DEVICE.type == "cuda" and torch.cuda.mem_get_info()[1] > 2**35
ROWS = 4096 if LARGE else 1024


def random(M, N, dtype=torch.bfloat16, ignored=0.1):
    """Return logits and targets, of which a part is ignored."""
    kind = {"device": DEVICE, "generator": generator}
    targets = torch.randint(N, (M,), **kind)
    targets.masked_fill_(torch.rand(M, **kind) < ignored, -100)
    return torch.randn(M, N, **kind).to(dtype), targets


def both(op, x, targets):
    x = x.detach().requires_grad_()
    loss = op(x, targets)
    return loss, *torch.autograd.grad(loss, x)


if __name__ == "__main__":
    x, targets = random(64, 32000)
    print(f"The logits are {x.nbytes:,} bytes.")
    with Traffic() as traffic:
        both(eager, x, targets)
    for name, _, made in traffic.operators:
        print(f"{name:40} makes {made:9,} bytes")

# %%
# The *floor* is one read and one write of the logits, and no other matrix.

# %%
# The first kernel
# ----------------
#
# The gradient needs the row's sum, so a program goes over its row twice. The
# first pass is that of ``cross_entropy.py``. The second writes the gradient
# over the logits:
#
# .. code-block:: text
#
#     the row    +---------+---------+---------+------+
#     1st pass   | block 0 | block 1 | block 2 | mask |   m, s, the loss
#                +---------+---------+---------+------+
#     2nd pass   | block 0 | block 1 | block 2 | mask |   each read, and written
#                +---------+---------+---------+------+


@triton.jit
def both_kernel(
    x_ptr, targets_ptr, scale_ptr, losses_ptr, N, BLOCK_N: tl.constexpr
):
    row = tl.program_id(axis=0).to(tl.int64)  # row * N may pass 2**31
    target = tl.load(targets_ptr + row)
    x_row_ptr = x_ptr + row * N
    scale = tl.load(scale_ptr + row)  # 1 / R, or 0 if the row is ignored
    # Read before the second pass writes over it. An ignored target is negative.
    x_t = tl.load(x_row_ptr + target, mask=target >= 0, other=0)
    m = tl.full((), -3.4028234663852886e38, dtype=tl.float32)
    s = tl.zeros((), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # -inf past the end adds nothing to the sum.
        x = tl.load(x_row_ptr + offs, mask=offs < N, other=-float("inf"))
        x = x.to(tl.float32)  # (BLOCK_N,)
        larger = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), axis=0)
        m = larger
    tl.store(losses_ptr + row, (tl.log(s) + m - x_t) * scale)
    for start in range(0, N, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x = tl.load(x_row_ptr + offs, mask=offs < N).to(tl.float32)
        p = tl.exp(x - m) / s  # (BLOCK_N,)
        d = tl.where(offs == target, p - 1, p) * scale
        tl.store(x_row_ptr + offs, d, mask=offs < N)


def first_both(x, targets, num_warps=8):
    """Return the mean loss, and write its gradient over the matrix x."""
    counts, losses = targets != -100, torch.empty(len(x), device=x.device)
    scale = counts / counts.sum()
    known = {"BLOCK_N": 512 * num_warps, "num_warps": num_warps}
    both_kernel[(len(x),)](x, targets, scale, losses, x.shape[1], **known)
    return losses.sum()


# %%
# Is it right?
# ------------
#
# ``x - m`` is above -20 and is rounded to 24 bits, a relative :math:`20 \cdot
# 2^{-24}` of an exponential. We allow four times that of the largest element.

if __name__ == "__main__":
    x, targets = random(40, 5003, torch.float32)
    expected = both(eager, x.double(), targets)
    found = first_both(x, targets), x  # x is the gradient now
    for one, other in zip(found, expected, strict=True):
        one, other = (t.double() / other.abs().max() for t in (one, other))
        print(f"error {(one - other).abs().max():.1e}, allowed 5.0e-06")
        torch.testing.assert_close(one, other, rtol=0, atol=5e-6)

# %%
# How fast?
# ---------
#
# We time 4096 rows in bfloat16, or 1024 on a small GPU. The roof is a copy.


def calls(ours, N, M=ROWS):
    x, targets = random(M, N, ignored=0)
    out = torch.empty_like(x)
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {
        "Triton": partial(ours, x.clone(), targets),
        "PyTorch": partial(both, eager, x, targets),
        "torch.compile": partial(both, fast, x, targets),
        "Roof": partial(out.copy_, x),
    }


def rate(found, N, M=ROWS):
    return 4e-6 * M * N / found[0]  # GB/s, for one read and one write


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (32000, 50257, 128256):
        found = gpu_time(calls(first_both, N)).items()
        rates = [f"{who} {rate(times, N):.0f}" for who, times in found]
        print(f"N = {N:6}: {', '.join(rates)} GB/s")

# %%
# Does the second pass find its row?
# ----------------------------------
#
# The floor has one read, and the kernel has two. If the row is still in the L2
# cache at the second pass, the second read costs no memory traffic. Each
# program that runs has one row under way. A program of more warps takes more of
# a multiprocessor. Then fewer rows are under way, and they need less of the
# cache. The op has eight warps for rows of up to 112 KB, and 32 for longer
# rows, or 16 in float64. It also has 32, or 16, if there are no more rows than
# multiprocessors. A table after the op compares the numbers of warps.
#
# The op's loads and stores tell the caches what comes next. These are hints,
# which a cache may ignore. What the first pass loads is to leave the cache last
# (``evict_last``), what the second pass loads or stores first. The second pass
# goes from a row's end to its start, as the caches saw the end last.
#
# The second pass does not compare each index with the target. Instead, the
# program stores the target's element once more at the end, after a *barrier*.
# At a barrier, all threads of a program wait for each other.
#
# Two steps come from ``cross_entropy.py``: a maximum and a sum for each column
# of a block, and, for rows of 50257, a row's edges apart from its body. *Label
# smoothing* :math:`\epsilon` comes from there, too. The target has a weight of
# :math:`1 - \epsilon` instead of one, and every token has another
# :math:`\epsilon / N`.

# %%
# Who may write over the logits?
# ------------------------------
#
# Only code that made the logits, and that reads them for the last time. An
# accuracy that is computed from them later would be wrong, without an error.
# And the operator that made the logits may have kept them for its backward, as
# ``exp`` and ``tanh`` keep their results. So our op refuses logits that require
# grad. It belongs in an autograd function that makes the logits itself. Such a
# function comes after the op.
#
# The op is a ``custom_op`` that names the argument that it changes. PyTorch
# counts the change. If an operator had saved the logits for its backward, this
# backward raises an error instead of returning a wrong gradient. The underscore
# at the end of the op's name tells people of the change.

# %%
# The op
# ------
#
# The gradient is that of the mean. So the number of rows that are not ignored
# has to be known before the first row is written. The op has three launches: a
# kernel of one program counts these rows, a second kernel goes over the rows,
# and PyTorch adds up the losses.

from triton_gallery_ops.cross_entropy_in_place import (
    CROSS_ENTROPY_IN_PLACE_ACC,
    _cross_entropy_in_place_kernel,
    _cross_entropy_in_place_plan,
    cross_entropy_in_place_,
)

# %%
# This is the function that makes the logits. The op writes the gradient over
# them. The backward multiplies the two products by ``grad``, because they are
# smaller than the logits:


class LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets):
        d = x @ weight.T
        loss = cross_entropy_in_place_(d, targets)  # and now d is the gradient
        ctx.save_for_backward(x, weight, d)
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, weight, d = ctx.saved_tensors

        def product(a, b):
            # In float32: float16 has no 65536, with which GradScaler begins.
            return (grad * (a @ b).float()).to(d.dtype)

        return product(d, weight), product(d.T, x), None


# %%
# What did the steps gain together? A rate counts the bytes of the floor. "Its
# rows alone" is the op without the counting and the sum. The statements and
# registers are those of the kernel for the rows, the registers at the last
# length. Spilled registers are those that a thread keeps in memory.


def rows_alone(x, targets, **changes):
    """Launch the op's kernel of rows."""
    losses = torch.ones(len(x) + 1, device=x.device)
    plan = _cross_entropy_in_place_plan(x, len(x)) | changes
    args = x, targets, losses[-1:], losses, x.shape[1], x.shape[1], -100
    # No class weights, no predictions, no smoothing, z-loss or soft cap
    options = {"weight_ptr": None, "predicted_ptr": None, "MEAN": True}
    options |= {"SMOOTHING": 0.0, "LSE_SQUARE_SCALE": 0.0, "SOFTCAP": 0.0}
    kernel = _cross_entropy_in_place_kernel[(len(x),)]
    return kernel(*args, **options, **plan)


def with_warps(x, targets, warps):
    lines = 4 if warps == 32 else 8
    changes = {"LINES": lines, "BLOCK_N": 256 * warps, "num_warps": warps}
    return rows_alone(x, targets, **changes)


STEPS = {"first kernel": first_both, "the op": cross_entropy_in_place_}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {name: {} for name in (*STEPS, "its rows alone")}
    for M, N in ((8, 151936), (ROWS, 32000), (ROWS, 50257), (ROWS, 128256)):
        x, targets = random(M, N, ignored=0)
        steps = STEPS | {"its rows alone": rows_alone}
        tried = {
            name: partial(step, x, targets) for name, step in steps.items()
        }
        for name, times in gpu_time(tried, turns=20).items():
            ladder[name][f"GB/s at {M} x {N}"] = round(rate(times, N, M))
        compiled = rows_alone(x, targets)
    ladder["first kernel"]["statements"] = statements(both_kernel)
    ladder["the op"]["statements"] = statements(_cross_entropy_in_place_kernel)
    ladder["the op"]["registers"] = compiled.n_regs
    ladder["the op"]["spilled"] = compiled.n_spills
    print(pd.DataFrame(ladder).T.to_string(na_rep=""))

# %%
# How many rows should be under way? The more warps a program has, the fewer.
# These are rates of the op's kernel that goes over the rows. With 32 warps a
# block has four lines of ``BLOCK_N`` elements instead of eight:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (32000, 65536, 128256, 201088):
        x, targets = random(ROWS, N, ignored=0)
        tried = {w: partial(with_warps, x, targets, w) for w in (4, 8, 16, 32)}
        found = gpu_time(tried, turns=20)
        rates = [f"{w:2} warps {rate(t, N):.0f}" for w, t in found.items()]
        print(f"N = {N:6}: {', '.join(rates)} GB/s")

# %%
# Proof
# -----
#
# We compare every dtype with float64, with label smoothing, and with rows that
# begin anywhere. A gradient in half precision is rounded to that dtype, so its
# tolerance is wider. At the target, :math:`p_t - 1` may be small because its
# terms cancel, so there is an ``atol``.


def compare(x, targets, **options):
    """Compare loss and gradient with those of float64."""
    op = partial(eager, **options)
    loss, d = both(op, x.double(), targets)
    found = cross_entropy_in_place_(x, targets, **options)
    torch.testing.assert_close(
        found.double(), loss, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(
        x.double(), d, rtol=1e-5 + eps, atol=1e-6 + 1e-4 * eps
    )


def quietly(function):
    """Call a function. Without a GPU, NumPy would warn of infinities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        function()


def prove():
    for dtype in CROSS_ENTROPY_IN_PLACE_ACC:
        compare(*random(5, 1003, dtype))
        compare(*random(3, 50_257, dtype), label_smoothing=0.1)
        x, targets = random(6, 2000, dtype)
        before = x.clone()
        compare(x[:, 7:1010], targets.clamp(max=1002))
        # What lies between the rows is as it was.
        assert torch.equal(x[:, :7], before[:, :7])
        assert torch.equal(x[:, 1010:], before[:, 1010:])


# When the page is imported, one case is enough.
glance = partial(compare, *random(3, 1003, torch.float32))
quietly(prove if __name__ == "__main__" else glance)

# %%
# Next come finite differences of ``LinearLoss``, no rows, a wrong target,
# logits that require grad, and logits that ``exp`` kept for its backward:


def special():
    x, targets = random(4, 3, torch.float64)
    weight = random(9, 3, torch.float64)[0]
    leaves = x.requires_grad_(), weight.requires_grad_(), targets
    assert torch.autograd.gradcheck(LinearLoss.apply, leaves)
    x, targets = x.detach().clone(), targets.clamp(min=0)
    print(f"no rows: {cross_entropy_in_place_(x[:0], targets[:0]).item()}")
    print(f"a wrong target: {cross_entropy_in_place_(x, targets + 3).item()}")
    try:
        cross_entropy_in_place_(weight[:4], targets)
    except ValueError as error:
        print(f"ValueError: {error}")
    leaf = torch.ones(4, 3, device=DEVICE, requires_grad=True)
    kept = leaf.exp()
    cross_entropy_in_place_(kept.detach(), targets)
    try:
        kept.sum().backward()
    except RuntimeError as error:
        print(f"RuntimeError: {str(error).partition(':')[0]}")


if __name__ == "__main__":
    quietly(special)

# %%
# The benchmark
# -------------
#
# The benchmark has the vocabularies of models, in bfloat16. Our op is called
# again and again on one tensor, so it writes over its earlier gradients.
# PyTorch and ``torch.compile`` have a forward and a backward.

SIZES = [32000, 50257, 128256, 151936, 201088]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {
        N: gpu_time(calls(cross_entropy_in_place_, N), turns=20) for N in SIZES
    }
    results = rate_table(times, "N", "GB/s", lambda N: 4e-6 * ROWS * N)
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(ylabel="GB/s")

# %%
# This is the memory that a call takes besides its arguments:


def memory(call):
    """Return the most bytes that a call takes, results and all."""
    call()
    gc.collect()  # what the first call left, were it freed by the second
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__" and DEVICE.type == "cuda":
    taken = {}
    for N in SIZES:
        found = calls(cross_entropy_in_place_, N)
        found.pop("Roof")
        taken[N] = {name: memory(call) / 1e9 for name, call in found.items()}
    peaks = pd.DataFrame(taken).T
    print(peaks.round(3).to_string())
    fig, ax = plt.subplots()
    peaks.plot(ax=ax, marker="o")
    ax.set(xlabel="tokens in the vocabulary", ylabel="GB", ylim=(0, None))
    ax.set_title(f"Memory of loss and gradient, {ROWS} rows in bfloat16")

# %%
# With few rows, a call takes this long on the GPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (1, 8, 64):
        found = gpu_time(calls(cross_entropy_in_place_, 128256, M)).items()
        times = [f"{who} {1e3 * t[0]:.1f}" for who, t in found]
        print(f"{M:2} rows: {', '.join(times)}")

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["N"] == 32000].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# A rate counts one read and one write. The second read is not counted, because
# a cache should serve it. Where the cache does not hold all rows that are under
# way, some of the second read is memory traffic after all. The table of warps
# shows both sides: with few rows under way, few loads are in flight, and with
# many, the rows do not fit into the cache.
#
# Our op's rate is lowest at 50257, as is the first kernel's. With one row, the
# op takes the GPU as long as ``torch.compile``.
#
# Our op takes the memory of one number for each row. By the table of memory,
# PyTorch takes three tensors of the logits' size, those that the first section
# lists, and ``torch.compile`` takes one.

# %%
# Break it: a scale that comes too late
# -------------------------------------
#
# The smallest positive number of float16 is 6e-8, and a gradient may well be
# smaller. So a ``GradScaler`` multiplies the loss by a factor, say 32768. (In
# bfloat16, which has the range of float32, there is no need.)
# Autograd multiplies by the factor before it rounds the gradient. The op in
# place rounds the gradient in the forward, before the function's backward gets
# the factor:


def lost():
    x, targets = random(32, 20_000, torch.float16)
    x *= 2
    leaf = x.clone().requires_grad_()
    loss = 32768 * eager(leaf.float(), targets)
    (scaled,) = torch.autograd.grad(loss, leaf)
    cross_entropy_in_place_(x, targets)
    for name, gradient in (("scaled loss", scaled), ("in place", x)):
        zero = (gradient[targets != -100] == 0).float().mean()
        print(f"{name:12} {zero:5.1%} of the gradient is zero")


if __name__ == "__main__":
    quietly(lost)

# %%
# Go further
# ----------
#
# 1. Tell the op the factor by which the loss will be multiplied.
# 2. Could this op return a loss for each row, to be weighted later?
# 3. ``LinearLoss`` could take the tokens in chunks, and never have all logits.
#    What has to be computed in its forward then?
#
# To read on: ``linear_cross_entropy.py``, which answers the third exercise; the
# `paper on Liger Kernel <https://arxiv.org/abs/2410.10989>`_, whose loss writes
# over the logits too; and ``kv_cache_write.py``, another op in place.

# %%
# Answers
# -------
#
# **1.** Multiply ``scale`` by the factor for the gradient alone, after the loss
# is stored. The function's backward divides ``grad`` by the factor.
#
# **2.** Only if the function's backward multiplies each row of the gradient by
# the weight of its loss. When the gradient takes the logits' place, this weight
# is not known yet.
#
# **3.** Both products of the backward, because the next chunk takes the place
# of a chunk's gradient. The gradient of ``x`` is computed by chunks. That of
# ``weight`` is added up over the chunks.
