# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
Cross entropy
=============

The loss of a language model compares a row of logits, one for each token of its
vocabulary, with one target. The logits are the largest matrix of the model, and
their gradient is as large again. This page can write it over the logits. As the
mask of ``dropout.py``, probabilities are computed again and not stored.

After ``softmax.py`` and this page you can

* take the logarithm of a sum of exponentials over a row of any length;
* have the loss and the gradient for one read and one write;
* keep loads wide where rows begin at odd addresses;
* write an op that works in place, and say who may use it.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd", "in place"]
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
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton
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
# For a row of logits :math:`x` and its target :math:`t`,
#
# .. math:: \text{loss} = \log \sum_n e^{x_n} - x_t, \qquad
#    \frac{\partial\,\text{loss}}{\partial x_n} = p_n - [n = t], \qquad
#    p_n = \frac{e^{x_n}}{\sum_k e^{x_k}}.
#
# The mean is over the rows whose target is not ``ignore_index``. In PyTorch the
# loss is two operators, and its backward two more. This is what they do, with
# what they read and write in multiples of the logits:


def cross_entropy_plain(logits, target):
    log_p = torch.log_softmax(logits, -1)  # 1 read, 1 written, and kept
    loss = torch.nn.functional.nll_loss(log_p, target)
    # 1 written
    d = torch.zeros_like(log_p).scatter_(1, target[:, None], -1 / len(target))
    return loss, d - log_p.exp() * d.sum(-1, keepdim=True)  # 2 read, 1 written


cross_entropy_torch = torch.nn.functional.cross_entropy


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def targets(M, N, ignored=0.1):
    """Return M targets, some of them to be ignored."""
    target = torch.randint(N, (M,), device=DEVICE)
    return target.masked_fill(torch.rand(M, device=DEVICE) < ignored, -100)


# %%
# (The last line is one operator there.) Six in all, and up to three matrices
# beside the logits. With 4096 tokens, a vocabulary of 128256 and bfloat16 each
# of them is a gigabyte.
#
# The floor for the loss is one read, and for loss and gradient together one
# read and one write. The sum needs the whole row before any element of the
# gradient is known, so a kernel goes over a row twice. But a row of 250 KB can
# still be in the L2 cache the second time.
#
# The kernel
# ----------
#
# A program has a row. The first pass is ``softmax_long.py``'s online softmax:
# columns keep a maximum ``m`` and a sum ``s`` each, combined at the end. The
# second goes from the end of the row to its start, and stores
#
# .. math:: d_n = \Big(p_n - \frac{\epsilon}{N} - (1 - \epsilon)\,[n = t]
#    \Big) \cdot \text{scale}.
#
# *Label smoothing* :math:`\epsilon` makes the target a mixture: :math:`1 -
# \epsilon` of it, and :math:`\epsilon` of all tokens alike. ``scale`` is one
# over the number of rows in the mean.
#
# * ``LOSS`` alone keeps a row's maximum and sum, ``GRADIENT`` alone begins with
#   these. With both, ``d_ptr`` may be ``x_ptr``: nobody else reads that row.
# * Asking at each element whether it is the target's takes three instructions
#   of a dozen. So the target's is stored again, alone, behind a barrier.
#
# GPT-2 has 50257 tokens. Of such rows seven in eight begin at an address that
# is no multiple of 16 bytes, where no thread can load 16 bytes at once. So the
# *body* of a row begins at the first multiple, and ends at the last. What lies
# in front and behind is a block of its own, of up to ``2 * VEC - 2`` elements:
#
# .. code-block:: text
#
#     16 bytes
#     |       |       |       |       |       |
#     . . . x x x x x x x x x x x x x x x x . .
#           edge|      body, in blocks    |edge

LOG2_E = tl.constexpr(math.log2(math.e))
KEEP, DROP = tl.constexpr("evict_last"), tl.constexpr("evict_first")


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def first_pass(x_ptr, x_e, mask_e, x_t, length, N, block, EPS, LOWEST):
    """Return a row's maximum, its sum of exponentials, and its loss."""
    m = tl.full(block.shape[1:], LOWEST, x_e.dtype)  # (BLOCK_N,)
    s, mean = tl.zeros_like(m), tl.zeros_like(m)
    share = 1 / tl.cast(N, x_e.dtype)
    for start in range(0, N, block.numel):
        offs = start + block  # (ROWS, BLOCK_N)
        mask = offs < length
        x = tl.load(x_ptr + offs, mask, float("-inf"), eviction_policy=KEEP)
        x = x.to(x_e.dtype)
        larger = tl.maximum(m, tl.max(x, axis=0))
        s *= exp(m - larger)
        s += tl.sum(exp(x - larger[None, :]), axis=0)
        m = larger
        if EPS > 0:
            mean += tl.sum(tl.where(mask, x, 0) * share, axis=0)
    top = tl.maximum(tl.max(m, axis=0), tl.max(x_e, axis=0))
    s = tl.sum(s * exp(m - top), axis=0) + tl.sum(exp(x_e - top), axis=0)
    loss = (1 - EPS) * (tl.log(s) + (top - x_t))
    if EPS > 0:
        x_e = tl.where(mask_e, x_e, 0) * share
        mean = tl.sum(mean, axis=0) + tl.sum(x_e, axis=0)
        loss += EPS * (tl.log(s) + (top - mean))
    return top, s, loss


@triton.jit
def cross_entropy_kernel(
    x_ptr,
    target_ptr,
    scale_ptr,
    stats_ptr,
    d_ptr,
    M,
    N,
    stride_xm,
    stride_dm,
    ignore_index,
    LOSS: tl.constexpr,
    GRADIENT: tl.constexpr,
    SMOOTHING: tl.constexpr,
    LOWEST: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    x_row, d_row = row * stride_xm, row * stride_dm
    head = ((VEC - x_row % VEC) % VEC).to(tl.int32)
    length = tl.maximum(N - head, 0) // VEC * VEC
    # Multiples of VEC already: rounding down tells the compiler.
    x_body = x_ptr + (x_row + head) // VEC * VEC
    d_body = d_ptr + (d_row + head) // VEC * VEC
    column, edge = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, 2 * VEC)
    block = tl.arange(0, ROWS)[:, None] * BLOCK_N + column  # (ROWS, BLOCK_N)
    offs_e = tl.where(edge < head, edge, edge + length)  # (2 * VEC,)
    mask_e = edge < N - length
    x_e = tl.load(x_ptr + x_row + offs_e, mask_e, float("-inf")).to(ACC)
    target, scale = tl.load(target_ptr + row), tl.load(scale_ptr)
    used, known = target != ignore_index, (target >= 0) & (target < N)
    x_t = tl.load(x_ptr + x_row + target, used & known, float("nan")).to(ACC)
    if LOSS:
        top, s, loss = first_pass(
            x_body, x_e, mask_e, x_t, length, N, block, SMOOTHING, LOWEST
        )
        tl.store(stats_ptr + row, top)
        tl.store(stats_ptr + M + row, s)
        tl.store(stats_ptr + M + M + row, tl.where(used, loss, 0) * scale)
    if GRADIENT:
        if not LOSS:
            top, s = tl.load(stats_ptr + row), tl.load(stats_ptr + M + row)
        # Ignored: exp(0 - 0) * 0 - 0. Out of range: NaN.
        top, x_e = tl.where(used, top, 0), tl.where(used, x_e, 0)
        c = tl.where(used, tl.where(known, scale, float("nan")), 0)
        a, b = tl.where(used, c / s, 0), c * SMOOTHING / N
        tl.store(d_ptr + d_row + offs_e, exp(x_e - top) * a - b, mask_e)
        last = (N - 1) // (ROWS * BLOCK_N) * (ROWS * BLOCK_N)
        for back in range(0, N, ROWS * BLOCK_N):
            offs = last - back + block
            x_ptrs, mask = x_body + offs, offs < length
            x = tl.load(x_ptrs, used & mask, 0, eviction_policy=DROP)
            d = exp(x.to(ACC) - top) * a - b  # (ROWS, BLOCK_N)
            tl.store(d_body + offs, d, mask, eviction_policy=DROP)
        d_t = exp(x_t - top) * a - b - c * (1 - SMOOTHING)
        tl.debug_barrier()  # behind the stores of all threads
        tl.store(d_ptr + d_row + target, d_t, used & known)


# %%
# The ops
# -------
#
# The backward of the functional op gets a row's maximum and sum. They are not
# added up to one number, the logarithm of the sum of exponentials: near 1000
# that would leave :math:`x_n` minus it four of the seven digits of float32.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}


def check(logits, target, smoothing):
    if logits.dtype not in ACC or target.dtype != torch.int64:
        given = f"{logits.dtype} and {target.dtype}"
        raise TypeError(f"takes floating logits and int64 targets, not {given}")
    shapes = tuple(logits.shape), tuple(target.shape)
    if logits.ndim not in (1, 2) or shapes[0][:-1] != shapes[1]:
        raise ValueError(f"takes shapes (M, N) and (M,), not {shapes}")
    if logits.device != target.device or logits.shape[-1] > 2**30:
        raise ValueError("takes one device, and rows of up to 2**30 elements")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"takes smoothing from 0 to 1, not {smoothing}")


def scale_and_stats(x, target, ignore_index):
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = (target != ignore_index).sum(dtype=wide).reciprocal()
    return scale, scale.new_empty(3, target.numel())


def launch(kernel, loss, gradient, x, target, scale, stats, d, ignored, eps):
    M, N, size = target.numel(), int(x.shape[-1]), x.element_size()
    strides = [int(t.stride(0)) if t.ndim == 2 else N for t in (x, d)]
    # Where rows of d are not aligned as those of x, single elements.
    VEC = 16 // size if (strides[0] - strides[1]) * size % 16 == 0 else 1
    # Measured. The longest rows, twice: few programs, which share the cache.
    most = (8 if N * size <= 2**17 else 32) if loss and gradient else 32
    most = most if gradient else 4
    warps = min(most, max(1, triton.next_power_of_2(N * size) // 8192))
    BLOCK_N = warps * 512 // size  # 16 bytes for each thread
    ROWS = min(8, triton.next_power_of_2(triton.cdiv(N, BLOCK_N)))
    tensors = x, target.contiguous(), scale, stats, d
    constants = torch.finfo(scale.dtype).min, ACC[x.dtype], VEC, ROWS, BLOCK_N
    constants = ignored, loss, gradient, eps, *constants
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(M,)](*tensors, M, N, *strides, *constants, num_warps=warps)


@triton_op("triton_gallery::cross_entropy_forward", mutates_args={})
def cross_entropy_forward(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    check(logits, target, label_smoothing)
    scale, stats = scale_and_stats(logits, target, ignore_index)
    if logits.numel() == 0:
        return logits.new_full((), torch.nan), stats
    x = logits if logits.stride(-1) == 1 else logits.contiguous()
    arguments = x, target, scale, stats, x, ignore_index, label_smoothing
    launch(wrap_triton(cross_entropy_kernel), True, False, *arguments)
    return stats[2].sum().to(x.dtype), stats


@triton_op("triton_gallery::cross_entropy_backward", mutates_args={})
def cross_entropy_backward(
    grad: Tensor, x: Tensor, t: Tensor, stats: Tensor, ignored: int, eps: float
) -> Tensor:
    check(x, t, eps)
    d = torch.empty_like(x, memory_format=torch.contiguous_format)
    if d.numel() == 0:
        return d
    x = x if x.stride(-1) == 1 else x.contiguous()
    scale = grad * scale_and_stats(x, t, ignored)[0]
    arguments = x, t, scale, stats, d, ignored, eps
    launch(wrap_triton(cross_entropy_kernel), False, True, *arguments)
    return d


def save(ctx, inputs, output):
    logits, target, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def backward(ctx, grad, _):
    d = cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.options)
    return d, None, None, None


cross_entropy_forward.register_autograd(backward, setup_context=save)


def cross_entropy(logits, target, ignore_index=-100, label_smoothing=0.0):
    """Return the mean loss of logits (M, N) with int64 targets (M,)."""
    options = ignore_index, label_smoothing
    return cross_entropy_forward(logits, target, *options)[0]


def fake(logits, target, ignore_index=-100, label_smoothing=0.0):
    check(logits, target, label_smoothing)
    if logits.requires_grad:
        raise ValueError("cross_entropy_ takes no logits that require grad")
    N = logits.shape[-1]
    apart = target.numel() < 2 or logits.stride(0) >= N
    if logits.stride(-1) != 1 or not apart:
        raise ValueError("cross_entropy_ takes contiguous rows, none twice")
    return logits.new_full((), torch.nan)


@custom_op("triton_gallery::cross_entropy_", mutates_args={"logits"})
def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the mean loss, and write its gradient over the logits."""
    loss = fake(logits, target, ignore_index, label_smoothing)
    scale, stats = scale_and_stats(logits, target, ignore_index)
    if logits.numel() == 0:
        return loss
    arguments = target, scale, stats, logits, ignore_index, label_smoothing
    launch(cross_entropy_kernel, True, True, logits, *arguments)
    return stats[2].sum().to(logits.dtype)


cross_entropy_.register_fake(fake)

# %%
# The check
# ---------
#
# Against float64 autograd. Exponents are less than 16 here and are rounded,
# an error of :math:`16 \cdot 2^{-24}` of an exponential; sums go by columns and
# in trees. :math:`10^{-5}` covers it, then each result is rounded to its dtype.
# ``atol`` is for the target, where :math:`p - 1` may cancel, and for float16.


def compare(dtype, M, N, **options):
    x, target = normal(M, N, dtype=dtype).requires_grad_(), targets(M, N)
    wide, logits = x.detach().double().requires_grad_(), x.detach().clone()
    exact = cross_entropy_torch(wide, target, **options)
    loss = cross_entropy(x, target, **options)
    got = [loss, *torch.autograd.grad(loss, x)]
    got += [cross_entropy_(logits, target, **options), logits]
    exact = [exact, *torch.autograd.grad(exact, wide)] * 2
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    options = {"rtol": 1e-5 + eps, "atol": 1e-4 / N + least * eps}
    options |= {"check_dtype": False, "equal_nan": True}
    torch.testing.assert_close(got, exact, **options)


torch.manual_seed(0)
for dtype in ACC:
    compare(dtype, 5, 1003)
compare(torch.float32, 5, 8, label_smoothing=0.1)

if __name__ == "__main__":
    for dtype in ACC:
        compare(dtype, 3, 50_257, label_smoothing=0.1)
    x, target = normal(3, 7, dtype=torch.float64), targets(3, 7)
    assert torch.autograd.gradcheck(cross_entropy, (x.requires_grad_(), target))

# %%
# Two things differ from PyTorch. An ignored row has no gradient, whatever it
# holds, even NaN. A target out of range makes the mean and its row NaN; there
# PyTorch ends the program on a GPU, and for an exception each call would wait.
#
# Who may write over the logits
# -----------------------------
#
# Whoever made them and reads them last: an accuracy computed from them later is
# wrong, without an error. So ``cross_entropy_`` refuses what requires grad: an
# op in front may have kept it for a backward. It is a ``custom_op`` as in
# ``rope.py``. Its place is a function that makes the logits itself:


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target):
        d = x @ weight.T
        loss = cross_entropy_(d, target)  # and now d is the gradient
        ctx.save_for_backward(x, weight, d)
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, weight, d = ctx.saved_tensors
        return grad * (d @ weight), grad * (d.T @ x), None


if __name__ == "__main__":
    x, weight = (normal(n, 3, dtype=torch.float64) for n in (4, 9))
    arguments = x.requires_grad_(), weight.requires_grad_(), targets(4, 9)
    assert torch.autograd.gradcheck(LinearCrossEntropy.apply, arguments)

# %%
# ``grad`` multiplies the two products, which are smaller than ``d``. The most
# memory that forward and backward take, beside the arguments:

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, weight = (normal(n, 1024).requires_grad_() for n in (4096, 128256))
    target = targets(4096, 128256)
    fast = torch.compile(cross_entropy_torch, fullgraph=True, dynamic=False)
    ops = {"PyTorch": cross_entropy_torch, "torch.compile": fast}
    ops |= {"cross_entropy": cross_entropy, "cross_entropy_": None}
    for name, op in ops.items():
        torch.cuda.reset_peak_memory_stats()
        before, apply = torch.cuda.memory_allocated(), LinearCrossEntropy.apply
        loss = op(x @ weight.T, target) if op else apply(x, weight, target)
        torch.autograd.grad(loss, (x, weight))
        peak, loss = torch.cuda.max_memory_allocated() - before, None
        print(f"{name:15} {peak / 1e9:5.2f} GB")

# %%
# Break it: a scale that comes too late
# -------------------------------------
#
# float16 ends at 6e-8, not at 1e-38 as bfloat16, and a gradient may well be
# smaller. So a ``GradScaler`` multiplies the loss, say by 32768. The functional
# op gets that as ``grad``, and then rounds. The other one has rounded already
# (exercise 1):

if __name__ == "__main__":
    x, target = 2 * normal(32, 20_000, dtype=torch.float16), targets(32, 20_000)
    leaf = x.clone().requires_grad_()
    (d,) = torch.autograd.grad(32768 * cross_entropy(leaf, target), leaf)
    cross_entropy_(x, target)
    for name, gradient in (("scaled loss", d), ("in place", x)):
        lost = (gradient[target != -100] == 0).float().mean()
        print(f"{name:12} {lost:6.1%} of the gradient is zero")

# %%
# The benchmark
# -------------
#
# bfloat16, :math:`2^{29}` logits at each length of a row. First loss and
# gradient, two tensors of traffic: in place (over earlier gradients), beside
# forward and backward of the others. Then the functional op's forward, one
# tensor, and its backward, two. ``Roof`` is a copy of as many bytes.

NAMES = ["Triton", "PyTorch", "torch.compile", "Roof"]
SIZES = [1000, 4096, 32000, 50257, 128256, 256000]
curve = partial(Benchmark, ["N"], SIZES, "provider", NAMES, NAMES, x_log=True)
TASKS = ["_", "", "_backward"]
CURVES = [curve("cross_entropy" + t, {"task": t}, ylabel="GB/s") for t in TASKS]


@triton.testing.perf_report(CURVES)
def benchmark(N, provider, task):
    M, tensors = 2**29 // N, 2 if task else 1
    x, target = normal(M, N).requires_grad_(), targets(M, N, ignored=0)
    torch.compiler.reset()  # the ninth shape would raise an error
    fast = torch.compile(cross_entropy_torch, fullgraph=True, dynamic=False)
    op = [cross_entropy, cross_entropy_torch, fast, None][NAMES.index(provider)]
    if op is None:
        call = x.detach().view(-1)[: tensors * M * N // 2].clone
    elif task == "":
        call = partial(op, x.detach(), target)
    elif task == "_backward":
        call = partial(torch.autograd.grad, op(x, target), x, retain_graph=True)
    elif provider == "Triton":
        call = partial(cross_entropy_, x.detach(), target)
    else:
        call = lambda: torch.autograd.grad(op(x, target), x)  # noqa: E731
    times = do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return [2e-6 * tensors * M * N / t for t in times]


if __name__ == "__main__" and DEVICE.type == "cuda":
    torch._functorch.config.donated_buffer = False  # run it again
    tables = benchmark.run(print_data=True, show_plots=True, return_df=True)
    results, results_forward, results_backward = tables

# %%
# Beside the best of PyTorch and ``torch.compile``, and beside the roof:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for name, table in zip(TASKS, tables, strict=True):
        table = table.set_index("N").set_axis(NAMES, axis=1)
        others = table[NAMES[1:3]].max(axis=1), table["Roof"]
        ratios = [(table["Triton"] / other).round(2) for other in others]
        print(f"cross_entropy{name}")
        print(pd.concat(ratios, axis=1, keys=["of the best", "of the roof"]))

# %%
# Reading the result
# ------------------
#
# Forward and backward go over the logits once, and many programs share a
# multiprocessor: long rows come nearer the roof. In place a program has two
# passes, which do not overlap. While rows are short, others load meanwhile. The
# longest leave room for one program, and the caches less of a row for its
# second pass. Tried without gain: a persistent grid; the gradient of a row and
# the sum of the next in one loop; the next block held in registers. What might
# help is a row in the shared memory of several multiprocessors, a cluster's.
#
# Rows of 1000 pay for what every row has once: edges, statistics, the target,
# and its logit. In place, 50257 elements fill three quarters of their blocks.
# The rest is computed for nothing, twice.
#
# Go further
# ----------
#
# 1. Tell ``cross_entropy_`` the factor by which the loss will be multiplied.
# 2. Give both ops ``reduction="none"``, a loss per row. What does the backward
#    get, and why can the op in place not have it?
# 3. ``LinearCrossEntropy`` could take the tokens in chunks, and never have all
#    logits. What has to be computed in its forward then?
#
# Next is ``cumsum.py``. To read on: the online softmax's `paper
# <https://arxiv.org/abs/1805.02867>`_; one that never stores the logits, `Cut
# Your Losses <https://arxiv.org/abs/2411.09009>`_.

# %%
# Answers
# -------
#
# **1.** Multiply ``scale`` by it for the gradient alone; the loss keeps
# ``scale``. The Function's backward divides ``grad`` by it.
#
# **2.** A gradient per row, which takes the place of ``scale``. In place it is
# not known yet.
#
# **3.** Both products, as a chunk's logits are gone with the next: the gradient
# of ``x`` by chunks, that of ``weight`` added up over them, in float32.
