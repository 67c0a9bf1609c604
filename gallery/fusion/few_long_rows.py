# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Spread a row over many programs, where a batch has few rows: two passes,
# atomics or a counter, with a result that no other row changes."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Few long rows
=============

A program for each row is a good plan for thousands of rows. A model that writes
one token has a single row of logits. Then one program works, and the rest of
the GPU waits. This page spreads a row over many programs.

After this page you can

* tell from the grid whether a GPU has enough to do;
* finish a sum that many programs share: in a second pass, by atomics, or in the
  program that comes last;
* promise that a row's result does not depend on the batch, and keep that
  promise.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd"]
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
from triton_gallery.counting import Traffic, statements

# %%
# In PyTorch
# ----------
#
# This page computes two reductions of each row: the sum, and the *log-sum-exp*
#
# .. math:: y = m + \log \sum_k e^{x_k - m}, \qquad m = \max_k x_k.
#
# With the log-sum-exp of a row of logits, the probability of a token is
# :math:`e^{x_n - y}`. ``Traffic``, in the opening of this page, is a *dispatch
# mode*: it sees each operator of PyTorch, and adds up what all of them read and
# write.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def logsumexp_torch(x):
    m = x.amax(-1, keepdim=True)
    return (x - m).exp().sum(-1).log() + m[:, 0]


if __name__ == "__main__":
    x = torch.randn(4, 128256, generator=generator, device=DEVICE)
    for function in (partial(torch.sum, dim=-1), logsumexp_torch):
        with Traffic() as traffic:
            function(x)
        print(f"{traffic.moved / x.nbytes:.2f} times the bytes of x")

# %%
# The *floor* is to read ``x`` once, as the results are a few numbers. PyTorch's
# sum is at the floor already, and only its time can be better.

# %%
# The first kernel
# ----------------
#
# A program takes a row, and goes over it in blocks:
#
# .. code-block:: text
#
#     row 0     +---------+---------+---------+------+
#     program 0 | block 0 | block 1 | block 2 | mask |  -> out[0]
#               +---------+---------+---------+------+
#     row 1     +---------+---------+---------+------+
#     program 1 | block 0 | block 1 | block 2 | mask |  -> out[1]
#               +---------+---------+---------+------+
#
# In the loop, each place of the block has a sum of its own. ``tl.sum`` adds up
# these sums once, after the loop.


@triton.jit
def row_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64) * N
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        # Zeros past the end add nothing.
        x = tl.load(x_ptr + row + offs, mask=offs < N, other=0)  # (BLOCK,)
        # In half precision, a sum of many numbers would soon stand still.
        acc += x.to(tl.float32)
    tl.store(out_ptr + tl.program_id(axis=0), tl.sum(acc, axis=0))


def program_a_row(x):
    """Return the sums of the rows of a contiguous matrix, in float32."""
    M, N = x.shape
    out = torch.empty(M, device=x.device)
    row_kernel[(M,)](x, out, N, BLOCK=8192, num_warps=16)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64. In a sum of 20000 elements, an element passes two
# additions in the loop and 13 in the tree of ``tl.sum``. Each addition rounds
# to 24 bits. Terms may cancel, so we divide the error by the sum of their
# absolute values. 15 roundings are below :math:`10^{-6}` of this sum.

if __name__ == "__main__":
    x = torch.randn(3, 20_000, generator=generator, device=DEVICE)
    expected, terms = x.double().sum(-1), x.abs().double().sum(-1)
    out = program_a_row(x).double()
    error, rtol = ((out - expected).abs() / terms).max().item(), 1e-6
    print(f"largest error {error:.1e} of the terms, allowed {rtol:.1e}")
    torch.testing.assert_close(out / terms, expected / terms, rtol=0, atol=rtol)

# %%
# How fast?
# ---------
#
# We sum rows of logits in bfloat16: one row and 64 rows of Llama's 128256
# tokens, and one row of :math:`2^{24}`. ``Roof`` is a copy that moves as many
# bytes: it reads half of ``x`` and writes as much. Below a few megabytes, the
# roof does not show the bandwidth, but the time that any kernel takes to start
# and end.


def random(M, N):
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(M, N, generator=generator, **kind)


def sum_torch(x):
    return torch.sum(x, -1, dtype=torch.float32)


def contestants(ours, eager, x):
    """Return what is measured on a matrix, by name."""
    torch.compiler.reset()  # past eight shapes it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    functions = {"Triton": ours, "PyTorch": eager, "torch.compile": fast}
    found = {name: partial(f, x) for name, f in functions.items()}
    half = x.view(-1)[: x.numel() // 2]
    return found | {"Roof": partial(torch.empty_like(half).copy_, half)}


SHAPES = [(1, 128256), (64, 128256), (1, 2**24)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    for M, N in SHAPES:
        found = gpu_time(contestants(program_a_row, sum_torch, random(M, N)))
        line = [f"{who} {1000 * t[0]:.1f}" for who, t in found.items()]
        print(f"{M:2} x {N:8}: {', '.join(line)} microseconds")

# %%
# Are there enough programs?
# --------------------------
#
# One row is one program, on one multiprocessor. The other 131 of an H100 or an
# H200 have nothing to do. So let a program take one *part* of a row, a single
# block:
#
# .. code-block:: text
#
#     row 0      +---------+---------+---------+------+
#                | part 0  | part 1  | part 2  | mask |
#                +---------+---------+---------+------+
#     programs        0         1         2        3
#                     |         |         |        |
#     partial    [ sum 0     sum 1     sum 2    sum 3 ]  -> out[0]
#
# The *partial sums* of a row are a row again, a short one. The same kernel sums
# them in a second launch. A kernel sees all that was stored by the launches
# before it, so nothing else has to be synchronized. This way takes two
# *passes*.


@triton.jit
def part_kernel(x_ptr, out_ptr, N, parts, BLOCK: tl.constexpr):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    row, part = pid // parts, pid % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0)  # (BLOCK,)
    tl.store(out_ptr + pid, tl.sum(x.to(tl.float32), axis=0))


def two_passes(x, BLOCK=8192, num_warps=8):
    (M, N), parts = x.shape, triton.cdiv(x.shape[1], BLOCK)
    sums, out = (torch.empty(n, device=x.device) for n in (M * parts, M))
    launch = part_kernel[(M * parts,)]
    launch(x, sums, N, parts, BLOCK=BLOCK, num_warps=num_warps)
    BLOCK = triton.next_power_of_2(parts)
    part_kernel[(M,)](sums, out, parts, 1, BLOCK=BLOCK)
    return out


# %%
# Could one launch do?
# --------------------
#
# A second launch has to wait for the first one to end. There are two ways to
# finish the sum in the first launch.
#
# With *atomics*, each program adds its sum to the result in memory. No other
# program can come between the read and the write of such an addition. But the
# programs add in the order in which they finish, and this order changes from
# call to call. A sum in float32 depends on its order.
#
# With a *counter* for each row, each program stores its partial sum, and then
# raises the counter by one. ``tl.atomic_add`` returns what the counter was. The
# program that finds ``parts - 1`` came last. It sums the partial sums, always
# in the same order. No program waits for another one, so none can wait forever.
#
# .. code-block:: text
#
#     program 2   store sum 2, count 0 -> 1
#     program 0   store sum 0, count 1 -> 2
#     program 3   store sum 3, count 2 -> 3
#     program 1   store sum 1, count 3 -> 4   the last one:
#                 out = sum 0 + sum 1 + sum 2 + sum 3, count = 0
#
# The counter has to be zero before the launch. To set it to zero would take a
# second launch again. So the last program leaves the counter at zero, for the
# next call.


@triton.jit
def atomic_kernel(x_ptr, out_ptr, N, parts, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0).to(tl.int64)
    row, part = pid // parts, pid % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0)  # (BLOCK,)
    total = tl.sum(x.to(tl.float32), axis=0)
    # No program reads the result, so none needs an order of memory accesses.
    tl.atomic_add(out_ptr + row, total, sem="relaxed")


@triton.jit
def counter_kernel(
    x_ptr,
    sums_ptr,
    out_ptr,
    count_ptr,
    N,
    parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    row, part = pid // parts, pid % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0)  # (BLOCK,)
    tl.store(sums_ptr + pid, tl.sum(x.to(tl.float32), axis=0))
    # One thread counts, after the thread that stores has stored.
    tl.debug_barrier()
    # Release: who sees the count sees the partial sum. Acquire: the last
    # program sees all partial sums.
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") == parts - 1:
        offs_p = tl.arange(0, PARTS)  # (PARTS,)
        ptrs = sums_ptr + row * parts + offs_p
        # ".cg" reads the L2 cache, to which all multiprocessors write.
        sums = tl.load(ptrs, offs_p < parts, 0, cache_modifier=".cg")
        tl.store(out_ptr + row, tl.sum(sums, axis=0))
        # The next call counts from zero.
        tl.store(count_ptr + row, 0)


COUNTS = torch.zeros(64, dtype=torch.int32, device=DEVICE)  # one for each row


def atomics(x, BLOCK=8192, num_warps=8):
    (M, N), parts = x.shape, triton.cdiv(x.shape[1], BLOCK)
    out = torch.zeros(M, device=x.device)
    launch = atomic_kernel[(M * parts,)]
    launch(x, out, N, parts, BLOCK=BLOCK, num_warps=num_warps)
    return out


def counter(x, BLOCK=8192, num_warps=8):
    (M, N), parts = x.shape, triton.cdiv(x.shape[1], BLOCK)
    sums, out = (torch.empty(n, device=x.device) for n in (M * parts, M))
    tile = {"BLOCK": BLOCK, "PARTS": triton.next_power_of_2(parts)}
    launch = counter_kernel[(M * parts,)]
    launch(x, sums, out, COUNTS, N, parts, **tile, num_warps=num_warps)
    return out


STEPS = {
    "a program a row": (program_a_row, row_kernel),
    "two passes": (two_passes, part_kernel),
    "atomics": (atomics, atomic_kernel),
    "a counter": (counter, counter_kernel),
}

if __name__ == "__main__":
    x = torch.randn(3, 20_000, generator=generator, device=DEVICE)
    terms = x.abs().double().sum(-1)
    for step, _ in STEPS.values():
        error = (step(x).double() - x.double().sum(-1)).abs() / terms
        assert error.max() < 1e-6

# %%
# The table has the time in microseconds, the statements of each kernel, and how
# many different results 20 calls gave for one row of :math:`2^{24}`. The
# atomics need a result of zero to add to. PyTorch writes this zero in a launch
# of its own.


def results_of(function, x):
    return len({function(x).item() for _ in range(20)})


if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    kernels = [kernel for _, kernel in STEPS.values()]
    ladder["statements"] = [statements(kernel) for kernel in kernels]
    for M, N in SHAPES:
        x = random(M, N)
        tried = {name: partial(step, x) for name, (step, _) in STEPS.items()}
        found = gpu_time(tried).values()
        ladder[f"{M} x {N}"] = [f"{1000 * times[0]:.1f}" for times in found]
    ladder["results"] = [results_of(step, x) for step, _ in STEPS.values()]
    print(ladder.to_string())

# %%
# So the op uses a counter. The counter has to be zero before the first call,
# and no other call may use it at the same time: two calls on two streams would
# count together. So the op keeps counters for each stream. A CUDA graph may be
# replayed on any stream, so a call that a graph captures takes two passes. A
# call that ``torch.compile`` compiles takes two passes too, as it may be kept
# in a graph. Counters and passes add up in the same order, and give the same
# result, bit for bit.

# %%
# A result that does not depend on the batch
# ------------------------------------------
#
# An inference engine puts the requests of many users into one batch. With one
# user more, a row may be split in another way, and then its sum has other last
# bits. So the answer to one request depends on the other requests. Horace He
# and others at Thinking Machines Lab found that this is why answers differ from
# run to run. They asked for *batch-invariant* kernels, whose result for a row
# does not depend on the other rows
# (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).
#
# It is tempting to split a row into as many parts as keep the GPU busy:


def by_programs(x, programs=64):
    """Sum rows with about ``programs`` programs, however many rows."""
    BLOCK = triton.next_power_of_2(triton.cdiv(x.numel(), programs))
    return two_passes(x, BLOCK=BLOCK)


def changed(function, x):
    """Return how many rows give other bits alone than in their batch."""
    alone = [function(x[row : row + 1]) for row in range(len(x))]
    return (function(x) != torch.cat(alone)).sum().item()


if __name__ == "__main__":
    x = torch.randn(8, 20_000, generator=generator, device=DEVICE)
    for function in (by_programs, two_passes):
        name, rows = function.__name__, changed(function, x)
        print(f"{name}: {rows} of {len(x)} rows give other bits alone")

if __name__ == "__main__" and DEVICE.type == "cuda":
    torch.compiler.reset()
    fast = torch.compile(sum_torch, dynamic=False, fullgraph=True)
    x = random(64, 128256)
    for name, function in (("PyTorch", sum_torch), ("torch.compile", fast)):
        print(f"{name}: {changed(function, x)} of {len(x)} rows")

# %%
# The op has a rule: how a row is split depends on its length and dtype alone.
# The kernel is not even told how many rows there are.
#
# The order of a sum depends on one more thing: which thread holds which
# elements. Where a row begins at a multiple of 16 bytes, the compiler may give
# a thread several neighbours, to load them at once, as the page
# ``unaligned_rows.py`` explains. Which thread holds which elements must not
# depend on where a row happens to lie. So let ``VEC`` be the number of elements
# in 16 bytes if it divides ``N``, and 1 otherwise. If it divides ``N``, all
# rows of a contiguous matrix begin at multiples of 16 bytes. A view whose rows
# begin elsewhere is copied first. If ``VEC`` is 1, each element is loaded by
# itself, wherever the row begins.

# %%
# The log-sum-exp, and its backward
# ---------------------------------
#
# If :math:`y_i` is the log-sum-exp of part :math:`i`, that of the whole row is
#
# .. math:: \log \sum_i e^{y_i}.
#
# So the results of the parts are reduced as the numbers of a row are. Where the
# maximum is infinite, :math:`x - m` could be :math:`\infty - \infty`, which is
# NaN. So an infinite maximum is not subtracted.
#
# With an incoming gradient :math:`g`, which is one number for each row, the
# gradients are :math:`d_n = g` for the sum, and for the log-sum-exp
#
# .. math:: d_n = g\,e^{x_n - y}.
#
# Given :math:`y`, no element needs another one of its row. So any program can
# take any part, and nothing has to be finished.

# %%
# The op
# ------
#
# The op returns float32 for half precision. In bfloat16, a log-sum-exp of 12
# would be rounded to a multiple of 1/16, and a probability from it would be off
# by up to 3 %. A row of up to 32768 numbers, 16384 in float64, is one part: one
# program loads it at once, and nothing has to be finished. Where the op has no
# counters, it takes passes until each row is one number. The op is registered
# as on the page ``what_a_call_costs.py``.

from triton_gallery_ops.few_long_rows import (
    FEW_LONG_ROWS_ACC,
    _few_long_rows_kernel,
    _few_long_rows_plan,
    few_long_rows_logsumexp,
    few_long_rows_sum,
)

# %%
# How large should a part be? Small parts make many programs, large parts make
# fewer partial sums. The table has microseconds of the op's kernel with other
# parts and other numbers of warps. A row of up to 32768 is fastest as one part.
# For longer rows, parts of 8192 with eight warps are the fastest or nearly.


def with_part(x, BLOCK, num_warps):
    """Return sums by the op's kernel, with other parts."""
    (M, N), parts = x.shape, triton.cdiv(x.shape[1], BLOCK)
    plan = _few_long_rows_plan(N, x.dtype) | {"BLOCK": BLOCK, "LOG": False}
    PARTS = triton.next_power_of_2(parts) if parts > 1 else 0
    sums, out = (torch.empty(n, device=x.device) for n in (M * parts, M))
    _few_long_rows_kernel[(M * parts,)](
        x,
        sums if PARTS else out,
        out,
        COUNTS,
        N,
        parts,
        N,
        **plan | {"PARTS": PARTS, "num_warps": num_warps},
    )
    return out


TILES = [(2048, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (32768, 32)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = pd.DataFrame(index=[f"{n}, {w} warps" for n, w in TILES])
    for M, N in [(1, 16384), (1, 32000), (1, 65536), *SHAPES]:
        x = random(M, N)
        tried = {tile: partial(with_part, x, *tile) for tile in TILES}
        found = gpu_time(tried, turns=20).values()
        table[f"{M} x {N}"] = [f"{1000 * times[0]:.1f}" for times in found]
    print(table.to_string())

# %%
# Proof
# -----
#
# We compare values and gradients of every dtype with float64. A gradient in
# half precision is rounded to that dtype, so its tolerance is wider.

OPS = {
    few_long_rows_sum: torch.sum,
    few_long_rows_logsumexp: torch.logsumexp,
}


def prove(op, shape, dtype):
    x = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
    wide = x.double().requires_grad_()
    y, expected = op(x.requires_grad_()), OPS[op](wide, -1)
    atol = 1e-6 * shape[-1] if OPS[op] is torch.sum else 5e-6
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=atol)
    grad = torch.randn(y.shape, generator=generator, device=DEVICE)
    (d,) = torch.autograd.grad(y, x, grad.to(y.dtype))
    (expected,) = torch.autograd.grad(expected, wide, grad.double())
    rtol = 2e-5 + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
    torch.testing.assert_close(d.double(), expected, rtol=rtol, atol=1e-7)


SHAPES_OF_PROOF = [(3, 40), (2, 5, 257), (2, 40_000), (1, 8192), (5, 0), (0, 5)]
if __name__ == "__main__":
    for op in OPS:
        for dtype in FEW_LONG_ROWS_ACC:
            for shape in SHAPES_OF_PROOF:
                prove(op, shape, dtype)

# %%
# Next come rows that lie apart or begin anywhere, a transposed matrix and an
# expanded row, then finite differences, and one row in several batches:

x = torch.randn(60, 100, generator=generator, device=DEVICE)
for view in (x[:, :37], x[::2, 3:], x.T, x[:1].expand(9, 100)):
    for op, function in OPS.items():
        torch.testing.assert_close(op(view), function(view, -1))

if __name__ == "__main__":
    for op in OPS:
        small = x[:4, :7].double().requires_grad_()
        assert torch.autograd.gradcheck(op, small)
        for N in (40_000, 40_001):
            rows = torch.randn(4, N, generator=generator, device=DEVICE)
            assert changed(op, rows) == 0

# %%
# With infinities and NaN, the results are those of PyTorch. (Without a GPU,
# NumPy computes, and would warn of them.)

x = torch.zeros(6, 40, device=DEVICE)
x[0, 3], x[1, 0], x[2], x[3, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
x[4, 0], x[4, 1], x[5, 7] = torch.inf, -torch.inf, 1e38
with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    found = [op(x) for op in OPS]
for y, function in zip(found, OPS.values(), strict=True):
    torch.testing.assert_close(y, function(x, -1), equal_nan=True)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    for x in (torch.tensor(1.0), torch.ones(3, dtype=torch.int32)):
        try:
            few_long_rows_sum(x.to(DEVICE))
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16: the sum of one row, the sum of several rows of
# 128256, and the log-sum-exp of eight rows. PyTorch returns its log-sum-exp in
# bfloat16, and our op in float32.

SIZES = [4096, 16384, 32000, 50257, 128256, 201088, 2**20, 2**24]
ROWS = [1, 2, 4, 8, 16, 32, 64]


def benchmark(sizes, x, shape_of, ours, eager):
    times = {}
    for size in sizes:
        matrix = random(*shape_of(size))
        times[size] = gpu_time(contestants(ours, eager, matrix))

    def moved(size):
        return 2e-6 * math.prod(shape_of(size))

    return rate_table(times, x, "GB/s", moved)


def shown(title, found, x):
    print(title, found.to_string(), sep="\n")
    wide = found.pivot(index=x, columns="series", values="GB/s")
    wide.plot(logx=True, logy=True, title=title)


if __name__ == "__main__" and DEVICE.type == "cuda":
    ways = few_long_rows_sum, sum_torch
    results = benchmark(SIZES, "N", lambda N: (1, N), *ways)
    shown("sum of one row", results, "N")

if __name__ == "__main__" and DEVICE.type == "cuda":
    results_rows = benchmark(ROWS, "M", lambda M: (M, 128256), *ways)
    shown("sum of M rows of 128256", results_rows, "M")

if __name__ == "__main__" and DEVICE.type == "cuda":
    ways = few_long_rows_logsumexp, partial(torch.logsumexp, dim=-1)
    results_logsumexp = benchmark(SIZES, "N", lambda N: (8, N), *ways)
    shown("log-sum-exp of 8 rows", results_logsumexp, "N")

# %%
# This is what a call costs the CPU, in microseconds. It is much more than one
# row costs the GPU. So for one row the op is faster only where the GPU has
# other work meanwhile, or in a CUDA graph:

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["N"] == 128256].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# For a short row, every rate is low, the rate of the copy included: the time is
# about what any kernel takes to start, load once and end. Rows of 50257 and
# more have several parts. Those of 50257 may also begin anywhere, so their
# elements are loaded one by one. The table does not tell the two causes apart.
#
# With many rows or a very long row, the rates are much higher, but the copy is
# faster. For one row of 16 million, the sum of ``torch.compile`` is a little
# faster than ours. The backward, in the table beside other libraries, is about
# as fast as that of ``torch.compile``, and slower at one row of 50257. In that
# table PyTorch computes in float32, as we do.

# %%
# Go further
# ----------
#
# 1. How would you compute the softmax of few long rows with the ops of this
#    page? What would your softmax read and write?
# 2. How would you compute RMSNorm, which divides a row by its root mean square?
# 3. The cross entropy of a row with the target :math:`t` is :math:`y - x_t`.
#    Which program should subtract?
#
# To read on:
#
# * ``skinny_matmul.py`` splits the sum of a matrix product, and
#   ``decode_attention.py`` the keys of a sequence.
# * ``cumsum_long.py`` has programs of one row that wait for each other.

# %%
# Answers
# -------
#
# **1.** ``few_long_rows_logsumexp``, and then a kernel that stores
# :math:`e^{x_n - y}`. The backward's kernel does so for a gradient of 1. The
# row is read twice and written once. If rows are few, the second read may come
# from the L2 cache.
#
# **2.** Each part sums up squares. The last program of a row adds up the sums
# of the parts, and does not square them again. A second kernel multiplies each
# part of the row by the factor that follows from the sum.
#
# **3.** The last program of a row. It knows :math:`y`, and has to load
# :math:`x_t` alone.
