# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Keep each row in registers: softmax then reads it once and writes it once,
# where PyTorch's operators move it eight times."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
#
# [[tool.triton-gallery.step_through]]
# kernel = "row_kernel"
# caption = """
# Program 0 has row 0. A row has 5 elements and a block has 8, so three are
# masked. Switch to the launch with zeros: 0 is larger than every element here,
# so it becomes the maximum, and three exponentials too many are added up."""
# registers = ["x", "e", "y"]
# expected = { y = "torch.softmax(x, -1)" }
# start = [0, 0]
# inputs = { x = "integers(-3, 0, 3, 5)" }
# [[tool.triton-gallery.step_through.launches]]
# label = "masked elements are -inf"
# call = "softmax_rows(x)"
# [[tool.triton-gallery.step_through.launches]]
# label = "masked elements are 0"
# call = "softmax_rows(x, OTHER=0)"
# wrong = true
# ///
r"""
Softmax
=======

Softmax turns a row of numbers into positive ones that add up to 1. Written with
PyTorch's basic operators, it moves the matrix through memory eight times. One
*fused* kernel does the work of all of them and moves the matrix twice. A row
has to fit into the registers of one program: for more than 16,384 elements, see
``softmax_long.py``.

After this page you can

* count what fusion saves before you write a kernel;
* keep a row in registers, and give masked elements a neutral value;
* choose the number of warps for a row, and write the backward.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd"]
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
# For a row :math:`x` with the maximum :math:`m`,
#
# .. math:: y_n = \frac{e^{x_n - m}}{\sum_k e^{x_k - m}}, \qquad
#    m = \max_k x_k.
#
# The maximum cancels. We subtract it because :math:`e^{100}` is too large for
# float32. With PyTorch's basic operators, a softmax is five kernels.
# ``Traffic``, from the folded cell above, counts the bytes that each of them
# reads and writes:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def softmax_in_steps(x):
    shifted = x - x.amax(-1, keepdim=True)
    e = shifted.exp()
    return e / e.sum(-1, keepdim=True)


if __name__ == "__main__":
    x = torch.randn(64, 4096, generator=generator, device=DEVICE)
    with Traffic() as traffic:
        y = softmax_in_steps(x)
    for name, read, written in traffic.operators:
        print(f"{name:20} reads {read:9,}, writes {written:9,} bytes")
    print(f"in all {traffic.moved / x.nbytes:.2f} times the bytes of x")
    print(f"floor  {(x.nbytes + y.nbytes) / x.nbytes:.2f} times")

# %%
# The *floor* is what any kernel has to move: it reads ``x`` and writes ``y``.
# Softmax does little arithmetic for each byte. So a kernel that moves no more
# than the floor should take as long as a copy of ``x``.

# %%
# The first kernel
# ----------------
#
# A row is needed three times: for the maximum, for the sum and for the
# quotients. To read the row from memory only once, a program keeps it in
# *registers*, the memory of its threads. A multiprocessor has 65,536 registers,
# of 32 bits each. A row of 16,384 and its exponentials take half of them. This
# page goes no further; *Softmax of long rows* does.
#
# A block's length is a power of two, and the mask leaves out what lies past the
# row's end. These elements are not read; both reductions see ``other`` in their
# place. ``other`` must not change the maximum or the sum: ``-inf`` is never the
# maximum, and its exponential adds 0 to the sum. If a kernel computes something
# else before, as ``-x``, ``other`` has to fit the result of that. The figure's
# switch has a launch with 0 instead.


@triton.jit
def row_kernel(
    x_ptr,
    y_ptr,
    N,
    BLOCK_N: tl.constexpr,
    OTHER: tl.constexpr = -float("inf"),  # what masked elements count as
):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=OTHER)
    # A long sum in half precision would lose its small terms.
    x = x.to(tl.float32)  # (BLOCK_N,)
    e = tl.exp(x - tl.max(x, axis=0))  # (BLOCK_N,)
    y = e / tl.sum(e, axis=0)  # (BLOCK_N,)
    tl.store(y_ptr + start + offs, y, mask=mask)


def softmax_rows(x, kernel=row_kernel, **options):
    """Return the softmax of each row of a matrix, computed in float32."""
    M, N = x.shape
    assert 0 < N <= 16384  # a longer row would not fit into registers
    x = x.contiguous()
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N, **options)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. Here ``x - m`` is a number down to -20, and float32
# rounds it by up to :math:`20 \times 2^{-24} = 1.2 \times 10^{-6}`. Exponential
# and sum are then off by as large a part of themselves, their quotient by twice
# that. We allow 5e-6, as ``tl.exp`` rounds, too. Bfloat16 keeps eight bits of a
# result, so that is off by up to :math:`2^{-8}` of itself; we allow twice that.

if __name__ == "__main__":
    x = torch.randn(5, 1000, generator=generator, device=DEVICE)
    for dtype, rtol in ((torch.float32, 5e-6), (torch.bfloat16, 2**-7)):
        expected = torch.softmax(x.to(dtype).double(), -1)
        y = softmax_rows(x.to(dtype)).double()
        error = ((y - expected) / expected).abs().max().item()
        print(f"{dtype}: relative error {error:.1e}, allowed {rtol:.1e}")
        torch.testing.assert_close(y, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time three lengths of row in bfloat16, half a gigabyte of each. Beside our
# kernel are ``torch.softmax``, ``torch.compile`` of it, and a copy of ``x``,
# the *roof*. Rates count the bytes of the floor. Short rows give a program too
# little to do; *The result* comes back to them.

ELEMENTS = 2**28  # half a gigabyte in bfloat16: far more than a GPU's caches


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def torch_softmax(x):
    return torch.softmax(x, -1)


def contestants(ours):
    """Return our functions and PyTorch's, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(torch_softmax, dynamic=False, fullgraph=True)
    return ours | {"PyTorch": torch_softmax, "torch.compile": fast}


def calls(ours, N):
    """Return what is timed for rows of N, by name."""
    x = random(N)
    out = torch.empty_like(x)
    timed = {name: partial(op, x) for name, op in contestants(ours).items()}
    return timed | {"Roof": partial(out.copy_, x)}


def rates(times):
    """Return GB/s by name, for one read and one write of ELEMENTS."""
    return {name: round(4e-6 * ELEMENTS / t[0]) for name, t in times.items()}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (256, 4096, 16384):
        rows[N] = rates(gpu_time(calls({"row_kernel": softmax_rows}, N)))
    print("GB/s", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# Break it: zeros in a softmax
# ----------------------------
#
# Zero adds nothing to a sum, so ``other=0`` seems harmless. But the sum is over
# exponentials, and that of 0 is not 0:

if __name__ == "__main__":
    for N in (1024, 1023, 1000):
        x = torch.randn(1, N, generator=generator, device=DEVICE) - 5
        y = softmax_rows(x, OTHER=0)
        print(f"N = {N}: the row adds up to {y.sum().item():.3f}")

# %%
# At 1024 nothing is masked, and the kernel is right. So test at lengths that
# are no power of two.

# %%
# How many warps?
# ---------------
#
# A *warp* is a group of 32 threads. Triton starts a program with four warps
# unless the launch says otherwise, and their threads share the row. Each thread
# has 2 elements of a row of 256, and 128 of a row of 16,384. The more registers
# a thread needs, the fewer programs fit on a multiprocessor at a time. Then the
# multiprocessor has fewer others to run while one program waits for memory.
#
# The kernel remains as it is. We change ``num_warps``, as long as a thread has
# at most 128 elements:

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (256, 1024, 4096, 16384):
        x = random(N)
        fit = [warps for warps in (1, 2, 4, 8, 16) if 128 * 32 * warps >= N]
        tried = {w: partial(softmax_rows, x, num_warps=w) for w in fit}
        rows[N] = rates(gpu_time(tried, turns=20))
    table = pd.DataFrame(rows).T
    print("GB/s by the number of warps; -: not tried")
    print(table.to_string(float_format="%.0f", na_rep="-"))

# %%
# Long rows want more warps. From here on, a thread has up to 32 elements. At
# each length of the table, that is the fastest choice or close to it.


def row_warps(N):
    """Return the number of warps for a row of N."""
    return max(1, triton.next_power_of_2(N) // (32 * 32))


# %%
# The backward
# ------------
#
# With the gradient :math:`g` of ``y``, the gradient of ``x`` is
#
# .. math:: d_n = y_n \Big(g_n - \sum_k g_k\,y_k\Big).
#
# The formula needs ``y`` and not ``x``, so the forward saves its result. The
# floor is two reads and a write. Here masked elements are 0: they add nothing
# to the sum of products.


@triton.jit
def backward_kernel(g_ptr, y_ptr, d_ptr, N, BLOCK_N: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    g = tl.load(g_ptr + start + offs, mask=mask, other=0).to(tl.float32)
    y = tl.load(y_ptr + start + offs, mask=mask, other=0).to(tl.float32)
    d = y * (g - tl.sum(g * y, axis=0))  # (BLOCK_N,)
    tl.store(d_ptr + start + offs, d, mask=mask)


class Softmax(torch.autograd.Function):
    """The softmax of each row of a matrix, with its gradient."""

    @staticmethod
    def forward(ctx, x):
        y = softmax_rows(x, num_warps=row_warps(x.shape[1]))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        M, N = y.shape
        g = g.contiguous()
        d = torch.empty_like(y)
        BLOCK_N = triton.next_power_of_2(N)
        backward_kernel[(M,)](
            g, y, d, N, BLOCK_N=BLOCK_N, num_warps=row_warps(N)
        )
        return d


# %%
# ``torch_softmax`` is PyTorch's. The gradient is a difference and may cancel,
# so the tolerance is absolute: 1e-6 is 16 roundings of a number near 1, and
# what is subtracted is below 1 here.

if __name__ == "__main__":
    x, g = torch.randn(2, 70, 100, generator=generator, device=DEVICE)
    exact = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(torch_softmax(exact), exact, g.double())
    (d,) = torch.autograd.grad(Softmax.apply(x.requires_grad_()), x, g)
    error = (d - expected).abs().max().item()
    print(f"largest error of the gradient {error:.1e}, allowed 1.0e-06")
    torch.testing.assert_close(d.double(), expected, rtol=0, atol=1e-6)

# %%
# The op
# ------
#
# ``softmax(x)`` is this gallery's op. To the kernels of this page it adds
# tensors of any shape and layout, float64, several short rows in a program as
# in ``row_sum.py``, and two smaller blocks for a row that would leave a quarter
# of one block empty, or more. Its page has its code, and figures beside other
# libraries.

from triton_gallery_ops.softmax import softmax

# %%
# The result
# ----------
#
# Again in bfloat16. In the chart, *Triton* is the op, and *Triton, this page*
# is our ``Softmax``. The roof of the forward is a copy; another kernel may be
# one or two percent faster than that. The roof of the backward is an addition,
# which reads two matrices and writes one as well. *PyTorch's best* is the
# faster of ``torch.softmax`` and ``torch.compile`` at each length.

SIZES = [128, 197, 512, 1000, 2880, 4096, 10000, 16384]
OURS = {"Triton": softmax, "Triton, this page": Softmax.apply}


def calls_backward(ours, N):
    """Return what is timed for the gradient of rows of N, by name."""
    x, g = random(N).requires_grad_(), random(N)
    out = torch.empty_like(g)
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(ours).items()
    timed = {name: partial(grad, op(x), x, g) for name, op in ops}
    return timed | {"Roof": partial(torch.add, x.detach(), g, out=out)}


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
# A row of 128 is little work for a program, which needs time to start and to
# wait for its data: there the op gives it several rows. Rows of 197 begin at
# any address, so a thread loads one element at a time: ``unaligned_rows.py`` is
# about that. A row of 10000 takes a block of 16,384, of which two fifths are
# masked; the op takes two smaller blocks. On a small matrix the GPU is done
# before the CPU has made the next call. There PyTorch, whose call takes the CPU
# least time, is the fastest.

# %%
# Exercises
# ---------
#
# Both are kernels with the arguments of ``row_kernel``. Write one and run the
# cell: it says whether the kernel is right. No GPU is needed.
#
# **1.** Compute the *logarithm* of the softmax: :math:`x_n - m - \log \sum_k
# e^{x_k - m}`. It is finite even where the softmax is rounded to 0. The
# function is ``tl.log``.

log_kernel = None  # your kernel


def check(kernel, expected):
    """Print whether a kernel stores what is expected for x."""
    if kernel is None:
        print("not solved yet")
        return False
    y = softmax_rows(x, kernel=kernel)
    right = torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    print("right" if right else "wrong")
    return right


x = 50 * torch.randn(100, 100, generator=generator, device=DEVICE)
expected_log = torch.log_softmax(x, -1)

if __name__ == "__main__":
    check(log_kernel, expected_log)

# %%
# **2.** In *causal* attention, row ``m`` has only the elements 0 to ``m``, and
# the others become 0. Compute the softmax of these elements.

causal_kernel = None  # your kernel

later = torch.ones_like(x, dtype=torch.bool).triu(1)
expected_causal = torch.softmax(x.masked_fill(later, -torch.inf), -1)

if __name__ == "__main__":
    check(causal_kernel, expected_causal)

# %%
# Answers
# -------
#
# **1.** Subtract the logarithm of the sum instead of dividing by the sum.


@triton.jit
def log_answer_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=-float("inf"))
    shifted = x - tl.max(x, axis=0)  # (BLOCK_N,)
    y = shifted - tl.log(tl.sum(tl.exp(shifted), axis=0))  # (BLOCK_N,)
    tl.store(y_ptr + start + offs, y, mask=mask)


if __name__ == "__main__":
    assert check(log_answer_kernel, expected_log)

# %%
# **2.** The load has a mask of its own. What it leaves out is ``-inf`` and
# becomes 0, and the store has the mask of the whole row.


@triton.jit
def causal_answer_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    x_ptrs = x_ptr + row * N + offs
    x = tl.load(x_ptrs, mask=offs <= row, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))  # (BLOCK_N,)
    y = e / tl.sum(e, axis=0)  # (BLOCK_N,)
    tl.store(y_ptr + row * N + offs, y, mask=offs < N)


if __name__ == "__main__":
    assert check(causal_answer_kernel, expected_causal)
