# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Normalize rows in registers, and sum the gradients of weight and bias over all
# rows, across programs, without atomics."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = """
# a long row is two blocks, two gradients go across the rows, and few rows want
# one launch"""
#
# [tool.triton-gallery.not_for]  # with an H100's stages; others get fewer
# _layer_norm_backward_kernel = ["sm_89", "sm_120"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "backward_kernel"
# caption = """
# Two programs share four rows: program 0 has rows 0 and 2. Past a row's end
# x_hat is not 0, but dy is, so nothing is added there. Each program stores its
# sums in a row of its own: three columns for dw, then three for db."""
# registers = ["dy", "x_hat", "dw", "db"]
# call = "gradients(dy, x, w, stats, 2)"
# start = [0, 10]
# [tool.triton-gallery.step_through.inputs]
# dy = "torch.tensor([[1.0, -1, 2], [2, 1, 0], [-1, 1, 1], [1, 2, -2]])"
# x = "torch.tensor([[1.0, 2, 6], [4, 0, 3], [3, 9, 8], [7, 5, 1]])"
# w = "torch.tensor([1.0, 2.0, 3.0])"
# mean = "x.mean(1, keepdim=True)"
# r = "torch.rsqrt(x.var(1, correction=0, keepdim=True) + EPS)"
# stats = "torch.cat([mean, r], 1)"
# h = "(x - mean) * r"
# terms = "torch.cat([dy * h, dy], 1)"
# g = "dy * w"
# [tool.triton-gallery.step_through.expected]
# sums = "torch.stack([terms[0::2].sum(0), terms[1::2].sum(0)])"
# dx = "r * (g - g.mean(1, keepdim=True) - h * (g * h).mean(1, keepdim=True))"
# ///
r"""
LayerNorm
=========

LayerNorm gives each row the mean 0 and the variance 1, then scales and shifts
the columns by a weight and a bias. Forward, a row is the work of one program.
The gradients of weight and bias are sums over *all* rows, and so over programs.
This page computes these sums without atomic additions, so that training is
deterministic. For rows of more than 16,384 elements, see ``norms_long.py``.

After this page you can

* compute the mean and the variance of a row in registers;
* write the backward, and know what the forward saves for it;
* sum over rows, across programs, with the same result in every run.
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
# For a row :math:`x` of :math:`N` elements, with the weight :math:`w` and the
# bias :math:`b`,
#
# .. math:: y_n = w_n\,\hat{x}_n + b_n, \quad \hat{x}_n = (x_n - \mu)\,r, \quad
#    \mu = \tfrac{1}{N} \sum_k x_k, \quad
#    r = 1 \Big/ \sqrt{\tfrac{1}{N} \sum_k (x_k - \mu)^2 + \epsilon}.
#
# We write that with PyTorch's basic operators. ``Traffic``, from the folded
# cell above, counts the bytes that they move. The *floor* is what any kernel
# has to move: it reads ``x`` and writes ``y``.

generator = torch.Generator(device=DEVICE).manual_seed(0)
EPS = 1e-5


def layer_norm_in_steps(x, weight, bias):
    d = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + EPS)
    return d * r * weight + bias


if __name__ == "__main__":
    x = torch.randn(99, 4096, generator=generator, device=DEVICE)
    with Traffic() as traffic:
        y = layer_norm_in_steps(x, x[0], x[1])
    print(f"{len(traffic.operators)} operators move", end=" ")
    print(f"{traffic.moved / x.nbytes:.1f} times the bytes of x,")
    print(f"the floor is {(x.nbytes + y.nbytes) / x.nbytes:.1f} times")

# %%
# The first kernel
# ----------------
#
# A program loads one row into registers and passes over it twice: once for the
# mean, once for the variance. What is past the row's end is loaded as 0, which
# adds nothing to the sum of the row. But its difference from the mean is not 0,
# so the kernel sets these differences to 0 before it squares them.
#
# Beside ``y``, the kernel stores the mean and :math:`r` of each row: the
# backward needs both.


@triton.jit
def row_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, N, eps, BLOCK: tl.constexpr
):
    # In int32 the offset of a row would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    # Past the row's end x - mean is not 0, and would count as a difference.
    d = tl.where(mask, x - mean, 0)  # (BLOCK,)
    r = tl.rsqrt(tl.sum(d * d, axis=0) / N + eps)
    w = tl.load(w_ptr + offs, mask=mask, other=0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * N + offs, d * r * w + b, mask=mask)
    tl.store(stats_ptr + 2 * row, mean)
    tl.store(stats_ptr + 2 * row + 1, r)


def blocks(N):
    """Return the block for rows of N, and its warps, of 32 threads each."""
    BLOCK = triton.next_power_of_2(N)
    warps = BLOCK // (32 * 16)  # 16 elements a thread, or more past 8192
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, warps))}


def norm_rows(x, weight, bias):
    """Return the norm of a matrix's rows, and the mean and r of each."""
    M, N = x.shape
    assert 0 < N <= 16384  # a longer row would not fit into registers
    assert weight.shape == bias.shape == (N,)
    assert all(t.is_contiguous() for t in (x, weight, bias))
    y = torch.empty_like(x)
    stats = x.new_empty(M, 2, dtype=torch.float32)
    row_kernel[(M,)](x, weight, bias, y, stats, N, EPS, **blocks(N))
    return y, stats


# %%
# Is it right?
# ------------
#
# We compare with float64. ``y`` may cancel, so the tolerance is absolute. All
# numbers are below 16 here, where float32 rounds by at most 4.8e-7. We allow
# eight such roundings: 4e-6.

if __name__ == "__main__":
    x = torch.randn(5, 1000, generator=generator, device=DEVICE)
    w, b = torch.randn(2, 1000, generator=generator, device=DEVICE)
    expected = layer_norm_in_steps(x.double(), w.double(), b.double())
    y = norm_rows(x, w, b)[0].double()
    error = (y - expected).abs().max().item()
    print(f"largest error {error:.1e}, allowed 4.0e-06")
    torch.testing.assert_close(y, expected, rtol=0, atol=4e-6)

# %%
# How fast?
# ---------
#
# We time three lengths of row in bfloat16. Beside our kernel are PyTorch's
# ``layer_norm``, ``torch.compile`` of it, and a copy of ``x``, the *roof*.
# Rates count the bytes of the floor.

ELEMENTS = 2**27  # 256 MB in bfloat16: more than a GPU's caches


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def torch_layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def contestants(ours):
    """Return our functions and PyTorch's, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(torch_layer_norm, dynamic=False, fullgraph=True)
    return ours | {"PyTorch": torch_layer_norm, "torch.compile": fast}


def calls(ours, N):
    """Return what is timed for rows of N, by name."""
    x = random(N)
    out = torch.empty_like(x)
    ops = contestants(ours).items()
    timed = {name: partial(op, x, x[0], x[1]) for name, op in ops}
    return timed | {"Roof": partial(out.copy_, x)}


def rates(times, tensors=2):
    """Return GB/s by name, for ``tensors`` times ELEMENTS."""
    moved = tensors * 2e-6 * ELEMENTS
    return {name: round(moved / t[0]) for name, t in times.items()}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (1024, 4096, 8192):
        rows[N] = rates(gpu_time(calls({"row_kernel": norm_rows}, N)))
    print("GB/s", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# The backward
# ------------
#
# Let :math:`g = w\,\mathrm{d}y`. An element of ``x`` acts on its row in three
# ways: directly, through the mean, and through :math:`r`. So its gradient has
# three terms, in this order. The gradients of weight and bias are sums over
# rows:
#
# .. math:: \mathrm{d}x = r\,\Big(g - \tfrac{1}{N} \sum_k g_k
#    - \hat{x}\,\tfrac{1}{N} \sum_k g_k\,\hat{x}_k\Big), \quad
#    \mathrm{d}w = \sum_{\mathrm{rows}} \mathrm{d}y\,\hat{x}, \quad
#    \mathrm{d}b = \sum_{\mathrm{rows}} \mathrm{d}y.
#
# For ``dx``, a program needs only its row. For ``dw`` and ``db``, the terms of
# all rows have to come together, and programs can pass values to each other
# only through memory.
#
# So we launch a fixed number of programs that share the rows. Each adds up the
# terms of its rows in registers. At its end, it stores these *partial sums* in
# a row of ``sums`` that no other program writes to. What is left is a small
# matrix, and PyTorch adds up its columns.


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, sums_ptr, M, N, BLOCK: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    w = tl.load(w_ptr + offs, mask=mask, other=0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    db = tl.zeros((BLOCK,), dtype=tl.float32)
    # A program takes its rows in order, so its sums have an order too.
    for row in tl.range(pid, M, tl.num_programs(axis=0)):
        at = row * N + offs  # (BLOCK,)
        # With 0 past the row's end, dy adds nothing to any of the sums.
        dy = tl.load(dy_ptr + at, mask=mask, other=0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
        mean = tl.load(stats_ptr + 2 * row)
        r = tl.load(stats_ptr + 2 * row + 1)
        x_hat = (x - mean) * r  # (BLOCK,)
        g = w * dy  # (BLOCK,)
        mean_g = tl.sum(g, axis=0) / N
        mean_gx = tl.sum(g * x_hat, axis=0) / N
        dx = r * (g - mean_g - x_hat * mean_gx)  # (BLOCK,)
        tl.store(dx_ptr + at, dx, mask=mask)
        dw += dy * x_hat
        db += dy
    sums_ptrs = sums_ptr + pid * 2 * N + offs  # (BLOCK,)
    tl.store(sums_ptrs, dw, mask=mask)
    tl.store(sums_ptrs + N, db, mask=mask)


def gradients(dy, x, w, stats, programs):
    """Return the gradients of x, weight and bias."""
    M, N = x.shape
    assert dy.shape == x.shape
    assert all(t.is_contiguous() for t in (dy, x, w, stats))
    dx = torch.empty_like(x)
    sums = x.new_empty(programs, 2 * N, dtype=torch.float32)
    pointers = dy, x, w, stats, dx, sums
    backward_kernel[(programs,)](*pointers, M, N, **blocks(N))
    dw, db = sums.sum(0).to(w.dtype).chunk(2)
    return dx, dw, db


# %%
# We compare with float64 again. A sum of 70 terms is below 64 here, where
# float32 rounds by at most 2e-6. Roundings partly cancel: we allow 20 of them.

if __name__ == "__main__":
    dy, x = torch.randn(2, 70, 100, generator=generator, device=DEVICE)
    w, b = torch.randn(2, 100, generator=generator, device=DEVICE)
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    y = layer_norm_in_steps(*leaves)
    expected = torch.autograd.grad(y, leaves, dy.double())
    stats = norm_rows(x, w, b)[1]
    results = gradients(dy, x, w, stats, programs=8)
    names = ("dx", "dw", "db")
    for name, result, exact in zip(names, results, expected, strict=True):
        error = (result - exact).abs().max().item()
        print(f"largest error of {name} {error:.1e}, allowed 4.0e-05")
        assert error <= 4e-5

# %%
# Break it: atomic additions
# --------------------------
#
# Why not let all programs add to one total in memory? An *atomic* addition
# loads, adds and stores, and no other program comes in between. So no term is
# lost. But the programs arrive in another order in every run, and a sum that is
# rounded depends on the order of its terms.


@triton.jit
def atomic_kernel(dy_ptr, db_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    dy = tl.load(dy_ptr + row * N + offs, mask=mask, other=0)
    tl.atomic_add(db_ptr + offs, dy, mask=mask)


if __name__ == "__main__":
    dy = torch.randn(500, 1024, generator=generator, device=DEVICE)
    totals = torch.zeros(2, 1024, device=DEVICE)
    for total in totals:
        atomic_kernel[(500,)](dy, total, 1024, BLOCK=1024)
    differ = (totals[0] != totals[1]).sum().item()
    print(f"atomic additions: {differ} of 1024 sums differ in a second run")
    stats = norm_rows(dy, dy[0], dy[0])[1]
    first, second = (gradients(dy, dy, dy[0], stats, 64)[2] for _ in range(2))
    differ = (first != second).sum().item()
    print(f"partial sums: {differ} of 1024 sums differ in a second run")

# %%
# The order of the partial sums is fixed everywhere: in the loop, in ``tl.sum``
# and in PyTorch's sum. Triton's interpreter runs one program after another, so
# it cannot show the difference.

# %%
# How many programs?
# ------------------
#
# With few programs, some multiprocessors have nothing to do. With many, there
# are more partial sums to store and to read again. The floor is now to read
# ``dy`` and ``x``, and to write ``dx``.

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (1024, 4096, 8192):
        dy, x = random(N), random(N)
        stats = norm_rows(x, x[0], x[1])[1]
        tried = {
            programs: partial(gradients, dy, x, x[0], stats, programs)
            for programs in (32, 128, 256, 512, 1024)
        }
        rows[N] = rates(gpu_time(tried), tensors=3)
    print("GB/s by the number of programs")
    print(pd.DataFrame(rows).T.to_string())

# %%
# Shorter rows want more programs. Their number makes 8 MB of partial sums,
# but not fewer than 128, so that a large GPU's multiprocessors all have one.
# The number depends on the shape alone, and so does the order of the additions.


class LayerNorm(torch.autograd.Function):
    """The norm of each row of a matrix, with its gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x = x.contiguous()
        y, stats = norm_rows(x, weight, bias)
        ctx.save_for_backward(x, weight, stats)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, stats = ctx.saved_tensors
        M, N = x.shape  # the sums of a program take 8 N bytes
        programs = min(M, max(128, 2**20 // N))
        return gradients(dy.contiguous(), x, weight, stats, programs)


# %%
# The op
# ------
#
# ``layer_norm(x, weight, bias, eps)`` is this gallery's op. To the kernels of
# this page it adds tensors of any shape and layout, float64, several short rows
# in a program, and one launch instead of two where there are few rows. Its page
# has its code, and figures beside other libraries.

from triton_gallery_ops.layer_norm import layer_norm

# %%
# The result
# ----------
#
# Again in bfloat16. In the chart, *Triton* is the op, and *Triton, this page*
# is our ``LayerNorm``. The roof of the forward is a copy. That of the backward
# is an addition, which reads two matrices and writes one as well. *PyTorch's
# best* is the faster of PyTorch and ``torch.compile`` at each length.

SIZES = [128, 768, 1024, 2880, 4096, 7168, 12288, 16384]
OURS = {"Triton": partial(layer_norm, eps=EPS)}
OURS["Triton, this page"] = LayerNorm.apply


def calls_backward(ours, N):
    """Return what is timed for the gradients of rows of N, by name."""
    x, dy = random(N), random(N)
    leaves = [t.clone().requires_grad_() for t in (x, x[0], x[1])]
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(ours).items()
    timed = {name: partial(grad, op(*leaves), leaves, dy) for name, op in ops}
    out = torch.empty_like(dy)
    return timed | {"Roof": partial(torch.add, x, dy, out=out)}


def show(title, results):
    """Print and draw rates, and compare ours with the best of PyTorch's."""
    print(title, results.to_string(), sep="\n")
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title=title)
    best = wide[["PyTorch", "torch.compile"]].max(axis=1)
    for who, series in zip(("the op", "this page"), OURS, strict=True):
        ratio = wide[series] / best
        low, high, at = ratio.min(), ratio.max(), ratio.idxmin()
        print(f"{title}, {who}: {low:.2f} to {high:.2f}", end=" ")
        print(f"of PyTorch's best, least at N = {at}")


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(OURS, N)) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: 4e-6 * ELEMENTS)
    show("forward", results)

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls_backward(OURS, N)) for N in SIZES}
    moved = 6e-6 * ELEMENTS
    results_backward = rate_table(times, "N", "GB/s", lambda N: moved)
    show("backward", results_backward)

# %%
# A row of 128 is little work for a program: there the op gives it several rows,
# as ``row_sum.py`` does. On a small matrix the GPU is done before the CPU has
# made the next call. There PyTorch, whose call takes the CPU least time, is the
# fastest.

# %%
# Exercises
# ---------
#
# Each is a function that returns a tensor. Write it and run the cell: it says
# whether the function is right. No GPU is needed.
#
# **1.** A linear layer adds its bias to every row of its output, so the bias
# has the gradient ``db`` of this page. Compute it alone, for a contiguous
# matrix in float32: a kernel with partial sums, then ``sums.sum(0)``.


def bias_gradient(dy):
    return None  # your launch


def check(solution, x, expected):
    """Print whether a function returns what is expected for x."""
    y = solution(x)
    if y is None:
        print("not solved yet")
        return False
    right = torch.equal(y, expected)
    print("right" if right else "wrong")
    return right


dy = torch.arange(300.0, device=DEVICE).reshape(60, 5) % 7

if __name__ == "__main__":
    check(bias_gradient, dy, dy.sum(0))

# %%
# **2.** To store a matrix in eight bits, one scales each column by its largest
# magnitude. Compute the largest ``abs`` of each column with ``tl.atomic_max``,
# from a program for each row. Why is this atomic deterministic?


def column_max(x):
    return None  # your launch


if __name__ == "__main__":
    check(column_max, dy - 3, (dy - 3).abs().amax(0))

# %%
# Answers
# -------
#
# **1.** It is the backward kernel with ``db`` alone.


@triton.jit
def bias_kernel(dy_ptr, sums_ptr, M, N, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    db = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.range(pid, M, tl.num_programs(axis=0)):
        db += tl.load(dy_ptr + row * N + offs, mask=mask, other=0)
    tl.store(sums_ptr + pid * N + offs, db, mask=mask)


def answer_1(dy):
    M, N = dy.shape
    sums = dy.new_empty(8, N)  # 8 programs
    bias_kernel[(8,)](dy, sums, M, N, BLOCK=triton.next_power_of_2(N))
    return sums.sum(0)


if __name__ == "__main__":
    assert check(answer_1, dy, dy.sum(0))

# %%
# **2.** A maximum does not round, so its order does not matter.


@triton.jit
def max_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0)
    tl.atomic_max(out_ptr + offs, tl.abs(x), mask=mask)


def answer_2(x):
    M, N = x.shape
    out = x.new_zeros(N)  # no magnitude is smaller
    max_kernel[(M,)](x, out, N, BLOCK=triton.next_power_of_2(N))
    return out


if __name__ == "__main__":
    assert check(answer_2, dy - 3, (dy - 3).abs().amax(0))
