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
# ///
r"""
Softmax
=======

Softmax turns a row of numbers into positive ones that add up to 1. Written with
PyTorch's operators, it moves the matrix through memory eight times. A kernel
that keeps a row in registers reads it once and writes it once.

After this page you can

* count what fusion saves before you write a kernel;
* keep a row in a program's registers, and mask what lies past its end;
* choose the number of warps by the bytes of a row;
* let a program take several short rows, or a row in two blocks;
* write a backward that starts from the saved result.
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
# .. math:: y_n = \frac{e^{x_n - m}}{\sum_k e^{x_k - m}}, \qquad
#    m = \max_k x_k
#
# The maximum :math:`m` cancels; we subtract it because :math:`e^{100}` is too
# large for float32. With PyTorch's operators, a softmax is five kernels.
# ``Traffic``, in the opening of this page, is a *dispatch mode*: it sees each
# of them, and notes what it reads and writes.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def softmax_torch(x):
    shifted = x - x.amax(-1, keepdim=True)
    e = shifted.exp()
    return e / e.sum(-1, keepdim=True)


if __name__ == "__main__":
    x = torch.randn(64, 4096, generator=generator, device=DEVICE)
    with Traffic() as traffic:
        y = softmax_torch(x)
    for name, read, written in traffic.operators:
        print(f"{name:22} reads {read:9,}, writes {written:9,} bytes")
    print(f"in all {traffic.moved / x.nbytes:.2f} times the bytes of x;")
    print(f"reading x and writing y: {(x.nbytes + y.nbytes) / x.nbytes:.2f}")

# %%
# Two is the *floor*: any kernel has to read ``x`` and to write ``y``. To reach
# the floor, one kernel has to keep a row. It needs the row again when the
# maximum is known, and once more when the sum is known. PyTorch's own
# ``torch.softmax`` is one kernel as well. We measure ours beside it.

# %%
# The first kernel
# ----------------
#
# A multiprocessor has 256 KB of registers. A row of 4096 numbers takes 16 KB in
# float32. So each program loads one row and keeps it. The length of a block is
# a power of two. What the block has past the row's end is masked:
#
# .. code-block:: text
#
#     N = 5, BLOCK_N = 8
#
#     mask        1      1      1      1      1      0      0      0
#     x          x0     x1     x2     x3     x4   -inf   -inf   -inf
#     exp(x-m)   e0     e1     e2     e3     e4      0      0      0
#
# The masked elements are ``-inf``. They are never the maximum, and they add
# nothing to the sum.


@triton.jit
def row_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=-float("inf"))
    # In half precision, the sum of many small numbers would stand still.
    x = x.to(tl.float32)  # (BLOCK_N,)
    e = tl.exp(x - tl.max(x, axis=0))  # (BLOCK_N,)
    y = e / tl.sum(e, axis=0)  # (BLOCK_N,)
    tl.store(y_ptr + start + offs, y, mask=mask)


def softmax_rows(x, num_warps=4):
    """Return the softmax of each row of a contiguous matrix."""
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    row_kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N, num_warps=num_warps)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. The difference ``x - m`` is rounded to 24 bits. Here
# it is above -20, so an exponential is off by a relative :math:`20 \cdot
# 2^{-24}`, and so is the sum. Twice that is 2.4e-6. The exponential function
# itself and the division add a few roundings more, so we allow 5e-6.
#
# .. note::
#
#    Without a GPU, all this runs in Triton's interpreter. A kernel that is
#    right there may be wrong on a GPU, or not compile: ``interpreter.md`` says
#    what differs.

if __name__ == "__main__":
    x = torch.randn(5, 1000, generator=generator, device=DEVICE)
    expected = torch.softmax(x.double(), -1)
    y, rtol = softmax_rows(x).double(), 5e-6
    error = ((y - expected) / expected).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    torch.testing.assert_close(y, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time rows of three lengths in bfloat16, half a gigabyte each. Beside our
# kernel are ``torch.softmax``, ``torch.compile`` of it, and a copy, which is
# the roof. The rate counts the bytes of the floor.

ELEMENTS = 2**28


def random(N):
    """Return a matrix with rows of N, and as many rows as make ELEMENTS."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(ELEMENTS // N, N, generator=generator, **kind)


def contestants(function):
    """Return what is measured on a matrix, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    eager = partial(torch.softmax, dim=-1)
    fast = torch.compile(lambda x: eager(x), dynamic=False, fullgraph=True)
    return {"Triton": function, "PyTorch": eager, "torch.compile": fast}


def calls(function, N):
    x = random(N)
    out = torch.empty_like(x)
    ops = contestants(function).items()
    found = {name: partial(op, x) for name, op in ops}
    return found | {"Roof": partial(out.copy_, x)}


def rate(found):
    """Return GB/s, for one read and one write of ELEMENTS."""
    return 4e-6 * ELEMENTS / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (256, 4096, 16384):
        found = gpu_time(calls(softmax_rows, N)).items()
        rates = [f"{who} {rate(times):.0f}" for who, times in found]
        print(f"N = {N:5}: {', '.join(rates)} GB/s")

# %%
# How many warps?
# ---------------
#
# The kernel had four warps, 128 threads, whatever the length. A thread held two
# elements of a row of 256, and 128 elements of a row of 16384. Each element
# takes a register, so a multiprocessor has registers for only a few programs
# with such long rows. We time each length with other numbers of warps, and two
# lengths between powers of two:

WARPS = [1, 2, 4, 8, 16, 32]

if __name__ == "__main__" and DEVICE.type == "cuda":
    print("GB/s,  N", *(f"{warps:3} warps" for warps in WARPS))
    for N in (256, 1024, 4096, 5120, 12288, 16384):
        x, line = random(N), f"{N:8}"
        tried = {w: partial(softmax_rows, x, w) for w in WARPS}
        tried = {w: call for w, call in tried.items() if 4096 * w >= N}
        found = gpu_time(tried, turns=20)
        for warps in WARPS:
            known = warps in found
            line += f"{rate(found[warps]):10.0f}" if known else " " * 10
        print(line)

# %%
# Longer rows want more warps. The op counts in bytes what a thread holds, as a
# float64 takes two registers. It gives a thread about 128 bytes of a row in
# float32 or float64. A row of 4096 takes four warps, one of 16384 takes 16. The
# op's longest row has 64 KB, a quarter of a multiprocessor's registers: 16384
# elements, or 8192 in float64.

# %%
# Should a program go on to other rows?
# -------------------------------------
#
# Triton's own tutorial has *persistent* programs. It starts no more of them
# than run at a time, and each goes on to further rows. Here are eight programs
# for each multiprocessor:


@triton.jit
def loop_kernel(x_ptr, y_ptr, M, N, BLOCK_N: tl.constexpr):
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    first = tl.program_id(axis=0).to(tl.int64)
    for row in tl.range(first, M, tl.num_programs(axis=0)):
        x_ptrs, y_ptrs = x_ptr + row * N + offs, y_ptr + row * N + offs
        x = tl.load(x_ptrs, mask=offs < N, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))  # (BLOCK_N,)
        tl.store(y_ptrs, e / tl.sum(e, axis=0), mask=offs < N)


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, y = random(4096), random(4096)
    gpu = torch.cuda.get_device_properties(DEVICE)
    launch = loop_kernel[(8 * gpu.multi_processor_count,)]
    loop = partial(launch, x, y, *x.shape, BLOCK_N=4096, num_warps=8)
    tried = {"a program a row": partial(softmax_rows, x, 8), "a loop": loop}
    for name, times in gpu_time(tried).items():
        print(f"{name}: {rate(times):.0f} GB/s")
    torch.testing.assert_close(y, softmax_rows(x, 8))

# %%
# The loop is slower than a program for each row, so the op has no loop.

# %%
# Several short rows
# ------------------
#
# A row of 256 in bfloat16 is 512 bytes, so each program has little to load. Let
# a program take several short rows, as many as make 8 KB in float32, with at
# least four warps:
#
# .. code-block:: text
#
#     short rows:  BLOCK_N            long rows:       BLOCK_N
#                +---------+                   +------------------------+
#                |  row 0  |     BLOCK_M = 1   |         row 0          |
#        BLOCK_M |  row 1  |                   +------------------------+
#                |  row 2  |
#                +---------+
#
# The reductions go along ``axis=1``. The last program's rows may go beyond the
# matrix. It then does the last row again, and stores the same values in the
# same place. So rows need no mask here. (A sum over rows does: a row that is
# done twice would count twice. ``rms_norm.py`` has such a sum.)
#
# How many elements may a thread load at once? Each row of 1000 in bfloat16
# begins at a multiple of 16 bytes, so 8. But the compiler does not know that:
# of an argument it only knows whether 16 divides it. Let ``VEC`` be how many
# elements it may load. ``VEC`` divides ``N``, so ``N // VEC * VEC`` is ``N``
# again, and now the compiler knows that ``VEC`` divides it.
# (``unaligned_rows.py`` looks into that.)
#
# With rows of 197, ``VEC`` is 1. The 32 threads of a warp then load 32 elements
# at once, and the next 32 are another warp's. So all four warps have a part of
# each row, and have to wait for each other in both reductions. One warp has
# nobody to wait for. Hence an exception to the four warps, where
#
# * ``VEC`` elements are less than 16 bytes,
# * a row has more than ``32 * VEC`` elements, and
# * its block has at most 4 KB in float32.
#
# A program then has 4 KB of rows. It has one warp if a block has at most 1 KB,
# and else two.

# %%
# A row in two blocks
# -------------------
#
# The table of warps has rows of 5120 and 12288, between powers of two. A block
# is the next power of two. A row of 5120 leaves three eighths of its block
# masked, and a row of 12288 leaves a quarter. A masked element moves no bytes,
# but it takes a register, and its exponential is computed. Must a row be one
# block?
#
# .. code-block:: text
#
#     N = 5120
#
#     one block     |              8192               |
#                   | x x x x x x x x x x . . . . . . |   3072 masked
#
#     two blocks    |      4096       |1024 |
#                   | x x x x x x x x | x x |             none masked
#
# The first block is half of that power of two. It is full and has no mask. The
# second, ``REST``, is the next power of two of what is left. The maximum and
# the sum are those of both blocks together. The op takes two blocks where one
# would be larger than 16 KB and where the row fills at most three quarters of
# it. Otherwise ``REST`` is 0, and the compiler leaves its lines out. The number
# of warps follows from both blocks together: a row of 5120 takes four, one of
# 12288 takes 16.

# %%
# The backward
# ------------
#
# With the incoming gradient :math:`g`, the gradient of ``x`` is
#
# .. math:: d_n = y_n \Big(g_n - \sum_k g_k\,y_k\Big).
#
# The formula needs ``y`` and not ``x``, so the forward saves its result. The
# floor is two reads and a write. A program keeps ``g`` and ``y`` in registers.
# It has the forward's blocks. If there are two, it has the warps that one would
# have. The table after the op has other numbers of warps beside them.

# %%
# The op
# ------
#
# The op works along the last dimension of a tensor of any shape, and has a
# backward. Rows that lie apart, as in ``x[:, :1000]``, are read where they are.
# Other layouts are copied first. The code launches on the GPU of its input,
# which need not be PyTorch's current one. The op is registered as
# ``what_a_call_costs.py`` shows: on a GPU a call goes straight to the launcher,
# and ``torch.compile`` looks into the ``triton_op``.

from triton_gallery_ops.softmax import (
    SOFTMAX_ACC,
    SOFTMAX_THREAD,
    SOFTMAX_TILE,
    _softmax_backward_kernel,
    _softmax_kernel,
    _softmax_plan,
    softmax,
)

# %%
# What did each step gain? The table has the rates of each step, the statements
# of its kernel and, for the longest row, its registers. A spilled register is
# one that a thread keeps in memory, because it has not enough of them. The
# backward moves three matrices instead of two, so its rate counts 1.5 times the
# bytes. "One block" is the op's kernel with ``REST=0`` for every row, in tiles
# of 8 KB and with four warps or more. What fewer warps gain shows at 197 and at
# 513, what two blocks gain shows at 5120 and 12288. The rows with other warps
# have the op's tiles. ``waits`` counts the barriers in the code for 197, where
# all warps of a program wait for each other.


def by_bytes(N):
    return max(1, triton.next_power_of_2(N) * 4 // (32 * SOFTMAX_THREAD))


def one_row(x, y, num_warps):
    (M, N), block = x.shape, triton.next_power_of_2(x.shape[1])
    return row_kernel[(M,)](x, y, N, BLOCK_N=block, num_warps=num_warps)


def one_block(N):
    """Return what changes in the plan of a row that may be one block alone."""
    block = triton.next_power_of_2(N)
    return {
        "BLOCK_M": max(1, SOFTMAX_TILE // (block * 4)),
        "BLOCK_N": block,
        "REST": 0,
        "num_warps": max(4, by_bytes(N)),
    }


def tiles(x, y, whole=False, **changes):
    M, N = x.shape
    changes = (one_block(N) if whole else {}) | changes
    plan = _softmax_plan(N, N, x.dtype) | changes
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    return _softmax_kernel[grid](x, y, M, N, N, **plan)


def tiles_backward(g, y, whole=False, **changes):
    (M, N), d = g.shape, torch.empty_like(g)
    changes = (one_block(N) if whole else {}) | changes
    plan = _softmax_plan(N, N, g.dtype, backward=True) | changes
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    return _softmax_backward_kernel[grid](g, y, d, M, N, **plan)


FORWARD = {
    "a row, 4 warps": lambda x, y: one_row(x, y, 4),
    "a row, warps by bytes": lambda x, y: one_row(x, y, by_bytes(x.shape[1])),
    "several rows, one block": lambda x, y: tiles(x, y, whole=True, VEC=1),
    "one block, and VEC": lambda x, y: tiles(x, y, whole=True),
    "the op: two blocks, fewer warps": tiles,
}
BACKWARD = {
    f"backward, {warps} warps": partial(tiles_backward, num_warps=warps)
    for warps in (4, 8, 16, 32)
}
BACKWARD["backward, one block"] = partial(tiles_backward, whole=True)
BACKWARD["the op's backward"] = tiles_backward
STEPS = FORWARD | BACKWARD

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    kernels = [row_kernel] * 2 + [_softmax_kernel] * 3
    kernels += [_softmax_backward_kernel] * len(BACKWARD)
    ladder["statements"] = [statements(kernel) for kernel in kernels]
    for N in (197, 256, 513, 1000, 4096, 5120, 12288, 16384):
        x, y = random(N), torch.softmax(random(N), -1)
        tried = {name: partial(step, x, y) for name, step in STEPS.items()}
        found = gpu_time(tried, turns=20).items()
        tensors = [3 if name in BACKWARD else 2 for name in STEPS]
        rates = [rate(times) / 2 for _, times in found]
        rates = [k * one for k, one in zip(tensors, rates, strict=True)]
        ladder[f"GB/s at {N}"] = [round(one) for one in rates]
        if N == 197:
            code = [step(x, y).asm["ptx"] for step in STEPS.values()]
            ladder["waits"] = [one.count("bar.sync") for one in code]
    compiled = [step(x, y) for step in STEPS.values()]
    ladder["registers"] = [kernel.n_regs for kernel in compiled]
    ladder["spilled"] = [kernel.n_spills for kernel in compiled]
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare value and gradient of every dtype with float64. In half precision
# the result is rounded once more. The terms of a gradient may cancel, so the
# gradient has an ``atol``.


def prove(shape, dtype):
    x = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
    grad = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
    wide = x.double().requires_grad_()
    y, expected = softmax(x.requires_grad_()), torch.softmax(wide, -1)
    rtol = 5e-6 + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=1e-7)
    (d,) = torch.autograd.grad(y, x, grad)
    (expected,) = torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(d.double(), expected, rtol=rtol, atol=rtol)


SHAPES = [(3, 40), (9, 197), (2, 5, 257), (70, 16), (2, 5000), (5, 0), (0, 5)]
SHAPES.append(())
if __name__ == "__main__":
    for dtype in SOFTMAX_ACC:
        for shape in SHAPES:
            prove(shape, dtype)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares the backward with finite differences:

x = torch.randn(60, 100, generator=generator, device=DEVICE)
for view in (x[:, :37], x[::2, 3:], x.T, x[:1].expand(9, 100)):
    torch.testing.assert_close(softmax(view), torch.softmax(view, -1))

if __name__ == "__main__":
    x = x[:4, :7].double().requires_grad_()
    assert torch.autograd.gradcheck(softmax, x)

# %%
# As in PyTorch, a row with NaN or inf, or with nothing but ``-inf``, becomes
# NaN. No other row does. (Without a GPU, NumPy computes, and would warn of
# that.)

x = torch.zeros(6, 40, device=DEVICE)
x[0, 3], x[1, 0], x[2], x[3, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
x[4], x[5, 7] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    y = softmax(x)
torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    for x in (torch.ones(3, 16385), torch.ones(3, dtype=torch.int32)):
        try:
            softmax(x.to(DEVICE))
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16, with half a gigabyte at each length. The
# backward is called through autograd. ``Roof`` is a copy. For the backward it
# is an addition, which has two reads and a write as well.

SIZES = [128, 197, 512, 1000, 2880, 4096, 10000, 16384]


def calls_backward(N):
    x, g = random(N).requires_grad_(), random(N)
    out = torch.empty_like(g)
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(softmax).items()
    found = {name: partial(grad, op(x), x, g) for name, op in ops}
    return found | {"Roof": partial(torch.add, x.detach(), g, out=out)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(softmax, N)) for N in SIZES}
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
# Where our line touches the roof, the kernel moves the bytes of the floor and
# waits for nothing else. Rows of 197 begin at any address, so each element is
# loaded by an instruction of its own: ``unaligned_rows.py`` is about that. A
# row of 2880 leaves three tenths of its block masked, as the op has two blocks
# only beyond 4096. A row of 10000 has two blocks. The table after the op has
# 5120 and 12288 in one block and in two.
#
# Backward, at 16384, our program has 512 threads. The table after the op shows
# how many registers a thread takes there. With more than 64, no two programs
# fit on a multiprocessor, which has 65536 registers. While the only program
# waits, nothing else runs there. With four warps, two programs fit, and in the
# table they are faster at this length, although they spill.

# %%
# Go further
# ----------
#
# 1. ``log_softmax`` is :math:`x_n - m - \log \sum_k e^{x_k - m}`. Which lines
#    of the two kernels change?
# 2. The backward op has no backward. What would its two gradients be for an
#    incoming ``v``, and which op of this page computes one of them?
#
# To read on:
#
# * ``softmax_long.py`` is for rows that do not fit, a vocabulary's for
#   instance.
# * Triton's tutorial on softmax, with persistent programs:
#   https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html

# %%
# Answers
# -------
#
# **1.** The forward stores ``x - m - tl.log(s)``, where ``m`` is the maximum
# and ``s`` the sum of exponentials. The gradient is :math:`g_n - e^{y_n} \sum_k
# g_k`. So the backward sums ``g`` alone, and takes the exponential of ``y``.
#
# **2.** For :math:`g` it is :math:`y\,(v - \sum v\,y)`, the backward op itself,
# of ``v`` and ``y``. For :math:`y` it is :math:`v\,(g - \sum g\,y) - g \sum
# v\,y`.
