# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Add the residual and divide each row by its root mean square in one kernel,
# which reads each number once."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "two ops share its kernels, with and without residual and weight"
# ///
r"""
RMSNorm
=======

RMSNorm divides each row by its root mean square and multiplies it by a weight.
A language model does that twice in each layer, right after it added a residual.
One kernel does both, and reads each number once.

After this page you can

* let a program use a row twice that it has loaded once;
* choose the number of warps for the rows of a model, and tiles for its heads;
* put the addition in front of a norm into the same kernel;
* add up a weight's gradient over all rows: without locks, and with a
  deterministic result.
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
# For each row :math:`x` of :math:`N` numbers, with a weight :math:`w`,
#
# .. math:: y_n = x_n\,r\,w_n, \qquad
#    r = 1 \Big/ \sqrt{\tfrac{1}{N} \sum_k x_k^2 + \epsilon}.
#
# Models compute this in float32. With PyTorch's operators that makes eight
# kernels. ``Traffic``, in the opening of this page, is a *dispatch mode*: it
# sees each of them, and notes what it reads and writes.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def rms_norm_torch(x, weight, eps):
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + eps) * weight).to(x.dtype)


if __name__ == "__main__":
    x = torch.randn(512, 4096, generator=generator, device=DEVICE).bfloat16()
    weight = torch.ones_like(x[0])
    with Traffic() as traffic:
        y = rms_norm_torch(x, weight, 1e-6)
    for name, read, written in traffic.operators:
        print(f"{name:24} reads {read:9,}, writes {written:9,} bytes")
    print(f"in all {traffic.moved / x.nbytes:.1f} times the bytes of x;")
    print(f"reading x and writing y: {(x.nbytes + y.nbytes) / x.nbytes:.1f}")

# %%
# The *floor* is two: to read ``x`` and to write ``y``. PyTorch has one function
# for it, ``torch.nn.functional.rms_norm``. We measure ours beside it.

# %%
# The first kernel
# ----------------
#
# The row is needed twice: for the sum of squares, then for the result. A
# program that keeps the row in registers loads it once. The length of a block
# is a power of two. What it has past the row's end is masked:
#
# .. code-block:: text
#
#     N = 5, BLOCK_N = 8
#
#     mask     1    1    1    1    1    0    0    0
#     x       x0   x1   x2   x3   x4    0    0    0   -> sum of squares -> r
#     y       x0*r*w0  ...  x4*r*w4     not stored
#
# The masked elements are zeros, which add nothing to the sum. The mean is over
# ``N`` elements, not over the block.


@triton.jit
def row_kernel(x_ptr, weight_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=0)
    # In half precision the square of 300 would be infinite.
    x = x.to(tl.float32)  # (BLOCK_N,)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + start + offs, x * r * weight, mask=mask)


def norm_rows(x, weight, eps=1e-6, num_warps=4):
    """Return the norm of each row of a contiguous matrix."""
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    args = x, weight, y, N, eps
    row_kernel[(M,)](*args, BLOCK_N=BLOCK_N, num_warps=num_warps)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. 1000 squares are added up in a tree, which rounds
# about ten times to 24 bits, and the root halves that error. The root itself
# and three products round once each. We allow :math:`10^{-6}`, seventeen
# roundings.

if __name__ == "__main__":
    x = torch.randn(5, 1000, generator=generator, device=DEVICE)
    weight = torch.randn(1000, generator=generator, device=DEVICE)
    y, rtol = norm_rows(x, weight).double(), 1e-6
    wide = torch.nn.functional.rms_norm(x.double(), (1000,), None, 1e-6)
    expected = wide * weight.double()
    error = ((y - expected) / expected).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    torch.testing.assert_close(y, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time three lengths in bfloat16, a quarter of a gigabyte each. Beside ours
# are PyTorch's function, ``torch.compile`` of it, and a copy, which is the
# roof. The rate counts the bytes of the floor.

ELEMENTS = 2**27


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def eager(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def contestants(ours, eager):
    """Return what is measured, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(function, N):
    x, weight = random(N), random(N)[0]
    out = torch.empty_like(x)
    ops = contestants(function, eager).items()
    found = {name: partial(op, x, weight) for name, op in ops}
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
# How many warps?
# ---------------
#
# The kernel had four warps, 128 threads, whatever the length. Of a row of 16384
# each thread holds 128 numbers in registers, so few programs fit on a
# multiprocessor. Of a row of 768 a thread holds eight numbers at most. So we
# time lengths that models have with other numbers of warps:

WARPS = [1, 2, 4, 8, 16, 32]

if __name__ == "__main__" and DEVICE.type == "cuda":
    print("GB/s,  N", *(f"{warps:3} warps" for warps in WARPS))
    for N in (768, 2880, 4096, 7168, 12288, 16384):
        x, line = random(N), f"{N:8}"
        tried = {w: partial(norm_rows, x, x[0], num_warps=w) for w in WARPS}
        tried = {w: call for w, call in tried.items() if 4096 * w >= N}
        found = gpu_time(tried, turns=20)
        for warps in WARPS:
            known = warps in found
            line += f"{rate(found[warps]):10.0f}" if known else " " * 10
        print(line)

# %%
# The op has four warps for rows of up to 8 KB in float32, 2048 numbers, and
# eight for longer ones. The table shows what other numbers of warps come to.

# %%
# A row in two blocks
# -------------------
#
# A row of 5120 numbers has a block of 8192, and one of 12288 has 16384. Three
# eighths and a quarter of these blocks are masked. Each masked element takes a
# register, and is computed with. Of two blocks, fewer elements are masked, and
# the first block is full:
#
# .. code-block:: text
#
#     one block    |<------ N = 5120 ------>|   masked     |  8192
#     two blocks   |<--- BLOCK_N = 4096 --->|REST|            4096 + 1024
#
# The kernel loads both blocks, and then adds their two sums of squares. The op
# does so where one block would be larger than 16 KB in float32 and a quarter of
# it or more would be masked. The table after the op compares one block with
# two. On an H100, two gain nothing in this forward.

# %%
# Heads: many short rows
# ----------------------
#
# Some models norm each head of the queries and keys. These are rows of 64, 128
# or 256, and millions of them. A row of 128 in bfloat16 is 256 bytes, so a
# program with one such row has little to load. Let it take as many rows as make
# 8 KB in float32:
#
# .. code-block:: text
#
#     heads:       BLOCK_N            hidden states:   BLOCK_N
#                +---------+                   +------------------------+
#                |  row 0  |     BLOCK_M = 1   |         row 0          |
#        BLOCK_M |  row 1  |                   +------------------------+
#                |  row 2  |
#                +---------+
#
# The sum goes along ``axis=1``. The last program's rows may go beyond the
# matrix. It then does the last row again, and stores the same values in the
# same place. So rows need no mask.
#
# One question is left. A row of 1000 in bfloat16 begins at a multiple of 16
# bytes, as a row of 1024 does. A thread could load 8 elements at once. But the
# compiler does not know that: of an argument it only knows whether 16 divides
# it. Let ``VEC`` be how many elements a thread may load at once. ``VEC``
# divides ``N``, so ``N // VEC * VEC`` is ``N`` again, and now the compiler
# knows that ``VEC`` divides it. (``unaligned_rows.py`` looks into that.)

# %%
# The residual in the same kernel
# -------------------------------
#
# A model computes ``h = x + residual``, and then the norm of ``h``. The sum
# ``h`` goes on as the next residual, so both results are needed. Two kernels
# move five matrices: two reads and a write, then a read and a write. One kernel
# has ``h`` in registers when it needs it, and moves four matrices:
#
# .. code-block:: text
#
#     x -------+
#              +--> h ---> sum of squares --> r --> y = h * r * w ---> y
#     residual +    |
#                   +------------------------------------------------> h
#
# ``h`` is rounded to its dtype before its squares are added up. So the result
# is the same as that of two kernels. The backward starts from the stored ``h``,
# and so from the same numbers as the forward.

# %%
# The backward
# ------------
#
# Let :math:`g = w\,\mathrm{d}y`. Each :math:`h_n` acts on the row directly and
# through :math:`r`, whose derivative is :math:`-r^3 h_n / N`:
#
# .. math:: \mathrm{d}h_n = r\,(g_n - c\,h_n), \quad
#    c = \tfrac{r^2}{N} \sum_k g_k\,h_k, \qquad
#    \mathrm{d}w_n = \sum_{\mathrm{rows}} \mathrm{d}y_n\,h_n\,r.
#
# The gradient that comes to ``h`` from later layers is added to
# :math:`\mathrm{d}h_n`. ``x`` and the residual both get that sum. The kernel
# computes :math:`r` again: ``h`` is read anyway, so that costs no bytes, and
# nothing more has to be saved.
#
# The sum for :math:`\mathrm{d}w` goes across the rows, which belong to
# different programs. All programs could add to one row in memory, by atomics or
# with a lock. Then the order of the additions would change from call to call,
# and with it the last bits. So each program adds up its own rows in registers,
# and a second kernel adds up the programs:
#
# .. code-block:: text
#
#     program 0: rows 0, 3, 6 ...  -> partial[0, :] --+
#     program 1: rows 1, 4, 7 ...  -> partial[1, :] --+--> dw[:]
#     program 2: rows 2, 5, 8 ...  -> partial[2, :] --+
#
# ``partial`` is written and read in float32, 8 bytes for each column and
# program. With a program for each row that would be more than all the rest. So
# for each multiprocessor the op starts one to four programs, as many as have 40
# KB of rows in float32 under way together. Each goes on to further rows. The
# order of all sums is fixed, so the op is deterministic on one kind of GPU.
#
# Where a program has several rows at a time, its last ones may lie beyond the
# matrix. Forward they are the last row again. In a sum over rows they would
# count twice, so the backward masks them.
#
# Each program has its row of ``dw`` in registers, besides ``h`` and
# :math:`\mathrm{d}y`. In the backward, every row of more than 8192 numbers is
# two blocks. The weight of a row in two blocks does not stay in registers as
# well. It is loaded twice for each row, which a cache can serve. The loop loads
# up to two turns ahead, into shared memory.

# %%
# The op
# ------
#
# There are two ops: ``rms_norm``, and ``rms_norm_residual``, which adds first.
# They share all kernels. The row is the last dimension of a tensor of any
# shape. Rows that lie apart, as in ``x[:, :1000]``, are read where they are.
# Other layouts are copied first. The ops are registered as
# ``what_a_call_costs.py`` shows: on a GPU a call goes straight to the launcher,
# and ``torch.compile`` looks into the ``triton_op``.

from triton_gallery_ops.rms_norm import (
    RMS_NORM_ACC,
    _rms_norm_backward_launch,
    _rms_norm_kernel,
    _rms_norm_plan,
    rms_norm,
    rms_norm_residual,
)

# %%
# What did each step gain? The table has the rates of each step and, for the
# longest row, the registers of a thread. A spilled register is one that a
# thread keeps in memory, because it has not enough of them. The backward has
# two kernels, so its registers are left out. Rates count the bytes of the
# floor. With a residual the floor is four matrices each way. The row "x +
# residual, then the op" moves five, and its rate counts four of them.


def one_row(x, y, residual, num_warps):
    (M, N), block = x.shape, triton.next_power_of_2(x.shape[1])
    args = x, x[0], y, N, 1e-6
    return row_kernel[(M,)](*args, BLOCK_N=block, num_warps=num_warps)


def by_length(x, y, residual):
    return one_row(x, y, residual, 4 if x.shape[1] <= 2048 else 8)


def tiles(x, y, residual, ADD=False, **changes):
    M, N = x.shape
    plan = _rms_norm_plan(x, 1e-6, N) | changes
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    h = torch.empty_like(x) if ADD else y
    args = x, residual, x[0], h, y, M, N, N, N
    options = {"ADD": ADD, "LLAMA": False, "IN_PLACE": False}
    return _rms_norm_kernel[grid](*args, **options, **plan)


def one_block(x, y, residual):
    block = triton.next_power_of_2(x.shape[1])
    return tiles(x, y, residual, VEC=1, BLOCK_N=block, REST=0)


def added(x, y, residual):
    return tiles(x + residual, y, residual)


def backward(x, y, residual, dh=None):
    _rms_norm_backward_launch(y, dh, x, x[0], 1e-6)


STEPS = {  # with how many matrices the floor moves
    "a row, 4 warps": (partial(one_row, num_warps=4), 2),
    "a row, warps by length": (by_length, 2),
    "several rows": (one_block, 2),
    "two blocks": (partial(tiles, VEC=1), 2),
    "the op: and VEC": (tiles, 2),
    "x + residual, then the op": (added, 4),
    "the op with a residual": (partial(tiles, ADD=True), 4),
    "the op's backward": (backward, 3),
    "with a residual": (lambda x, y, r: backward(x, y, r, dh=r), 4),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    for N in (128, 1000, 5120, 12288, 16384):
        args = random(N), random(N), random(N)
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
# Proof
# -----
#
# We compare values and gradients of every dtype with float64. In half precision
# a result is rounded once more, and so is ``h``. The terms of a gradient may
# cancel, so there is an ``atol``.


def random_like(*shapes, dtype=torch.float32):
    """Return random tensors that want gradients."""
    made = (
        torch.randn(shape, generator=generator, device=DEVICE)
        for shape in shapes
    )
    return [t.to(dtype).requires_grad_() for t in made]


def prove(shape, dtype):
    x, residual, weight = random_like(shape, shape, shape[-1:], dtype=dtype)
    dy, dh = (t.detach() for t in random_like(shape, shape, dtype=dtype))
    leaves = x, residual, weight
    y, h = rms_norm_residual(*leaves, 1e-6)
    got = y, h, *torch.autograd.grad((y, h), leaves, (dy, dh))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(h, x + residual, rtol=eps, atol=0)
    leaves = h.detach().double().requires_grad_(), weight.double()
    wide = torch.nn.functional.rms_norm(leaves[0], shape[-1:], None, 1e-6)
    y = wide * leaves[1]
    grads = torch.autograd.grad(y, leaves, dy.double())
    d = grads[0] + dh.double()
    rtol = 1e-5 + eps
    for a, b in zip(got, (y, h, d, d, grads[1]), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=rtol)


SHAPES = [(3, 40), (2, 5, 257), (70, 16), (2, 8192), (0, 5), (5, 0)]
if __name__ == "__main__":
    for dtype in RMS_NORM_ACC:
        for shape in SHAPES:
            prove(shape, dtype)
else:  # imported: a glance
    prove((3, 40), torch.float32)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares the backward with finite differences:

if __name__ == "__main__":
    x, weight = random_like((60, 100), (37,))
    x, weight = x.detach(), weight.detach()
    for view in (
        x[:, :37],
        x[::2, 3:40],
        x.T[:, :37],
        x[:1, :37].expand(9, 37),
    ):
        expected = torch.nn.functional.rms_norm(view, (37,), weight, 1e-6)
        torch.testing.assert_close(rms_norm(view, weight, 1e-6), expected)
    leaves = random_like((4, 7), (4, 7), (7,), dtype=torch.float64)
    op = partial(rms_norm_residual, eps=1e-6)
    assert torch.autograd.gradcheck(op, leaves)
    assert torch.autograd.gradcheck(partial(rms_norm, eps=1e-6), leaves[1:])

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    x = torch.ones(3, 16385, device=DEVICE)
    for bad in ((x, x[0]), (x.int(), x[0].int()), (x[:, :5], x[0, :4])):
        try:
            rms_norm(*bad, 1e-6)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16, with a quarter of a gigabyte at each length. The
# first length is that of a head, the others are hidden sizes of models. The
# backward is called through autograd. ``Roof`` is a copy. For the backward it
# is an addition, which has two reads and a write as well.

SIZES = [128, 768, 1024, 2880, 4096, 7168, 12288, 16384]
ours = partial(rms_norm, eps=1e-6)


def calls_backward(N):
    x, weight, dy = random(N), random(N)[0], random(N)
    out = torch.empty_like(dy)
    leaves = x.requires_grad_(), weight.requires_grad_()
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(ours, eager).items()
    found = {name: partial(grad, op(*leaves), leaves, dy) for name, op in ops}
    return found | {"Roof": partial(torch.add, x.detach(), dy, out=out)}


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
# The same with a residual, at three of these lengths:


def eager_residual(x, residual, weight):
    h = x + residual
    return eager(h, weight), h


def calls_residual(N):
    x, residual, weight = random(N), random(N), random(N)[0]
    op = partial(rms_norm_residual, eps=1e-6)
    ops = contestants(op, eager_residual).items()
    return {name: partial(op, x, residual, weight) for name, op in ops}


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (2880, 4096, 7168):
        found = gpu_time(calls_residual(N)).items()
        rates = [f"{who} {rate(times, 4):.0f}" for who, times in found]
        print(f"N = {N:5}: {', '.join(rates)} GB/s")

# %%
# This is what a call costs the CPU, in microseconds. The GPU works through a
# queue that the CPU fills, so these figures count where matrices are small:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 4096].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# Forward, where our line touches the roof, the kernel moves the floor's bytes
# and waits for nothing else. Backward the roof is an addition, which sums
# nothing across rows. The op must write its partial sums and read them again,
# and its second kernel cannot begin before the first has ended. Once each
# program has several rows, both cost the same for any number of rows. So they
# weigh more in a small matrix. On the site, the table *Beside other libraries*
# has small matrices, and their backward is further from the roof.

# %%
# Break it: squares in half precision
# -----------------------------------
#
# Let a model in float16 have an activation of 300, and let its norm compute in
# float16. The square of 300 is infinite there. So :math:`r` is 0, and the whole
# row becomes 0. No NaN gives that away.

if __name__ == "__main__":
    x = torch.tensor([[300.0, -5.0, 2.0, 1.0]], device=DEVICE).half()
    print("float16:", (x * x.square().mean(-1, keepdim=True).rsqrt()).tolist())
    print("ours:   ", rms_norm(x, torch.ones_like(x[0]), 1e-6).tolist())

# %%
# Go further
# ----------
#
# 1. ``weight`` is often frozen. What can the backward leave out then, and how
#    does it learn of it?
# 2. Gemma multiplies by ``1 + weight``, which is ``offset=1.0`` here. Which
#    lines know of it, and what becomes of ``dw``?
#
# To read on:
#
# * ``layer_norm.py`` subtracts the mean as well.
# * ``norms_long.py`` is for rows that do not fit into registers.
# * The paper: https://arxiv.org/abs/1910.07467

# %%
# Answers
# -------
#
# **1.** ``dw``, its partial sums and the second kernel. The function that is
# given to ``register_autograd`` finds ``ctx.needs_input_grad[1]`` false, and
# can tell the op.
#
# **2.** ``_rms_norm_factor`` adds it when it has loaded the weight, for both
# kernels. ``dw`` stays as it is.
