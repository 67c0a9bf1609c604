# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Sum each row of a matrix: a reduction in a loop over blocks, then a tile for
# many short rows and two launches for one long row."""
#
# [[tool.triton-gallery.step_through]]
# kernel = "sum_row_kernel"
# caption = """
# A row per program, in blocks of four. A row has six elements, so half of the
# second block is masked. Look at x in the registers: the masked half is zero,
# and adds nothing to acc."""
# inputs = { x = "integers(1, 5, 3, 6)" }
# call = "sum_row(x, BLOCK_N=4)"
# expected = { out = "x.sum(1)" }
# registers = ["row", "offs_n", "x", "acc"]
# start = [0, 1]
#
# [[tool.triton-gallery.step_through]]
# kernel = "sum_tile_kernel"
# caption = """
# Four rows per program. Look at the mask: the last column is past the end of
# each row, and the last two rows of program 1 are past the last row of x."""
# inputs = { x = "integers(1, 5, 6, 3)" }
# call = "sum_short_rows(x, size=16)"
# expected = { out = "x.sum(1)" }
# registers = ["offs_m", "offs_n", "mask", "x"]
# start = [0, 0]
# ///
r"""
Row sum
=======

``x.sum(1)`` reduces each row of a matrix to one number. Softmax, the norms and
every other *reduction* begin like this, so this page is worth knowing even
though PyTorch sums well. Where a sum is all you need, keep PyTorch's.

After ``vector_add.py`` and this page you can

* reduce a row of any length, in a loop over blocks;
* give masked elements the value that leaves a reduction unchanged;
* choose how many programs share the work, for many short rows and for one long
  row.
"""

# sphinx_gallery_tags = ["reduction", "memory bound"]
import os

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
# One line of PyTorch. ``Traffic``, from the folded cell above, counts the bytes
# that it reads and writes.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(M, N):
    return torch.rand(M, N, generator=generator, device=DEVICE)


if __name__ == "__main__":
    x = random(300, 1000)
    with Traffic() as traffic:
        out = x.sum(1)
    print(f"{traffic.moved:,} bytes move, and x has {x.nbytes:,}")

# %%
# The sum reads the matrix once and writes one number per row. No kernel can
# move fewer bytes. So a row sum is memory bound, as the addition was: the
# question is how close a kernel comes to the bandwidth of the memory.

# %%
# The first kernel
# ----------------
#
# Each program sums one row. A row may be longer than a block, so the program
# goes over it in a loop. The *accumulator* ``acc`` is a block too: its first
# element adds up the first elements of all blocks, and so on.


@triton.jit
def sum_row_kernel(x_ptr, out_ptr, N, stride_m, BLOCK_N: tl.constexpr):
    # In int32, row * stride_m would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)  # (BLOCK_N,)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x_ptrs = x_ptr + row * stride_m + offs_n  # (BLOCK_N,)
        # Past the end of the row, load zeros: they leave a sum unchanged.
        x = tl.load(x_ptrs, mask=offs_n < N, other=0)  # (BLOCK_N,)
        acc += x
    tl.store(out_ptr + row, tl.sum(acc, axis=0))


# Elements of a block or a tile: 32 for each of a program's 128 threads, so each
# thread asks for many elements at once and waits for memory once.
SIZE = 4096


def sum_row(x, BLOCK_N=SIZE):
    """Return x.sum(1) in float32, for a matrix with contiguous rows."""
    M, N = x.shape
    assert x.stride(1) == 1
    out = torch.empty(M, device=x.device)
    sum_row_kernel[(M,)](x, out, N, x.stride(0), BLOCK_N=BLOCK_N)
    return out


# %%
# Three things are new:
#
# * The *stride* ``stride_m`` is the number of elements in memory from one row
#   to the next. Row ``row`` begins at ``x_ptr + row * stride_m``. In a
#   contiguous matrix the stride is ``N``; in ``x[:, :100]`` it is larger.
# * ``other`` is the value that ``tl.load`` returns where the mask is False. In
#   ``vector_add.py`` these elements were never used. Here ``acc`` adds them
#   all, so they must be zero.
# * ``tl.sum`` adds up the elements of ``acc`` and returns one number. It runs
#   once per row, after the loop.

# %%
# Is it right?
# ------------
#
# We compare with float64. An addition rounds by at most :math:`2^{-24}` of its
# result, and no result is larger than the row's sum, as all elements are
# positive. So we count the additions on the way of one element: one per turn of
# the loop, and at most 38 in ``tl.sum``, where each of 128 threads adds 32
# elements in 31 steps, and pairs of threads add their sums in 7 more. A later
# function uses ``tl.sum`` twice, so we allow for two.


def check(function, x):
    """Compare with float64; print the largest relative error."""
    out, expected = function(x).double(), x.double().sum(1)
    additions = triton.cdiv(x.shape[1], SIZE) + 2 * 38
    allowed = additions * 2**-24
    error = ((out - expected) / expected).abs().max().item()
    print(f"{tuple(x.shape)}: error {error:.1e}, allowed {allowed:.1e}")
    torch.testing.assert_close(out, expected, rtol=allowed, atol=0)


if __name__ == "__main__":
    check(sum_row, random(7, 1))
    check(sum_row, random(3, 4096))
    check(sum_row, random(5, 10_007)[:, :10_000])

# %%
# Break it: zeros in a maximum
# ----------------------------
#
# The same loop finds a maximum: ``tl.maximum`` takes the place of ``+``, and
# ``tl.max`` replaces ``tl.sum``. (Other functions have PyTorch's names as well,
# such as ``tl.abs`` and ``tl.exp``.) Zero leaves a sum unchanged, but not a
# maximum. Here a row of five negative numbers is reduced in blocks of four. The
# masked elements are zeros first, and then minus infinity.


@triton.jit
def max_row_kernel(x_ptr, out_ptr, N, stride_m, other, BLOCK_N: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    acc = tl.full((BLOCK_N,), -float("inf"), dtype=tl.float32)  # (BLOCK_N,)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x_ptrs = x_ptr + row * stride_m + offs_n  # (BLOCK_N,)
        x = tl.load(x_ptrs, mask=offs_n < N, other=other)  # (BLOCK_N,)
        acc = tl.maximum(acc, x)
    tl.store(out_ptr + row, tl.max(acc, axis=0))


if __name__ == "__main__":
    x = torch.tensor([[-5.0, -3, -8, -2, -9]], device=DEVICE)
    out = torch.empty(1, device=DEVICE)
    for other in (0.0, -float("inf")):
        max_row_kernel[(1,)](x, out, 5, x.stride(0), other, BLOCK_N=4)
        print(f"other={other}: the maximum is {out.item()}")

# %%
# With zeros, the maximum is an element that the row does not have. A positive
# number in the row hides the mistake. So does a row that fills its blocks.
# Each reduction has its own neutral value: 0 for a sum, minus infinity for a
# maximum. Use it for ``other`` and to begin with.

# %%
# How fast?
# ---------
#
# Three matrices have the same number of elements: one is square, one has short
# rows, one is a single row. ``Roof`` is a copy that moves as many bytes.

ELEMENTS = 2**24


def sum_torch(x):
    return x.sum(1)


def contestants(N, ours):
    M = ELEMENTS // N
    x = random(M, N)
    source = torch.empty((M * N + M) // 2, device=DEVICE)
    target = torch.empty_like(source)
    torch.compiler.reset()
    compiled = torch.compile(sum_torch, dynamic=False, fullgraph=True)
    calls = {name: lambda f=f: f(x) for name, f in ours.items()}
    return {
        **calls,
        "PyTorch": lambda: sum_torch(x),
        "torch.compile": lambda: compiled(x),
        "Roof": lambda: target.copy_(source),
    }


def work(N):
    """Return the bytes for rows of N, in millions."""
    return 4e-6 * (ELEMENTS + ELEMENTS // N)


if __name__ == "__main__" and DEVICE.type == "cuda":
    table = {}
    for N in (4096, 16, ELEMENTS):
        times = gpu_time(contestants(N, {"sum_row": sum_row}))
        shape = f"{ELEMENTS // N} x {N}"
        table[shape] = {name: work(N) / t[0] for name, t in times.items()}
    table = pd.DataFrame(table).T
    print("GB/s", table.to_string(float_format="%.0f"), sep="\n")

# %%
# The same bytes, and very different rates of our kernel. The grid explains both
# slow cases: one has too many programs with too little work, the other a single
# program.

# %%
# Many short rows
# ---------------
#
# A row of 16 elements leaves most of a block of 4096 masked. So let each
# program take several rows: a *tile*, a block with two dimensions. The tile is
# as wide as the row, rounded up to a power of two. It holds whole rows, so the
# kernel needs no loop.


@triton.jit
def sum_tile_kernel(
    x_ptr, out_ptr, M, N, stride_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    pid_m = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    # (BLOCK_M, 1) and (1, BLOCK_N) broadcast to (BLOCK_M, BLOCK_N).
    x_ptrs = x_ptr + offs_m[:, None] * stride_m + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0)  # (BLOCK_M, BLOCK_N)
    # axis=1 is summed, as in PyTorch; one number is left for each row.
    tl.store(out_ptr + offs_m, tl.sum(x, axis=1), mask=offs_m < M)


def sum_short_rows(x, size=SIZE):
    """Return x.sum(1) in float32, for contiguous rows of 1 to size elements."""
    M, N = x.shape
    assert 1 <= N <= size
    assert x.stride(1) == 1
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = size // BLOCK_N  # rows that make a tile of that size
    out = torch.empty(M, device=x.device)
    grid = (triton.cdiv(M, BLOCK_M),)
    sum_tile_kernel[grid](x, out, M, N, x.stride(0), BLOCK_M, BLOCK_N)
    return out


if __name__ == "__main__":
    check(sum_short_rows, random(1000, 13))

# %%
# One long row
# ------------
#
# A GPU has many *multiprocessors*, and a program runs on one of them. With a
# single row there is a single program, and all other multiprocessors wait. So
# cut the row into parts and sum each part by a program of its own. The results
# are *partial sums*: a short row, which a second launch sums. A launch begins
# when the one before it has ended, so the partial sums are complete.
#
# The kernel remains as it is. A view of the matrix has one part in each row:


def sum_long_rows(x, PART=SIZE):
    """Return x.sum(1) for a contiguous matrix; PART divides its rows."""
    M, N = x.shape
    assert x.is_contiguous()
    assert N % PART == 0
    partial_sums = sum_row(x.view(M * N // PART, PART))
    return sum_row(partial_sums.view(M, N // PART))


if __name__ == "__main__":
    check(sum_long_rows, random(2, 5 * 4096))

# %%
# The result
# ----------
#
# This function chooses among the three by the shape:


def sum_rows(x):
    """Return x.sum(1) in float32, for a matrix of any shape and strides."""
    M, N = x.shape
    if x.stride(1) != 1:  # the kernels take the elements of a row as neighbours
        x = x.contiguous()
    if 1 <= N <= SIZE:  # a row fits into a tile
        return sum_short_rows(x)
    # Fewer than 1024 rows are too few programs for a large GPU: it has over a
    # hundred multiprocessors, and each runs several programs at a time.
    if M < 1024 and N % SIZE == 0 and x.is_contiguous():
        return sum_long_rows(x)
    return sum_row(x)


if __name__ == "__main__":
    for x in (random(13, 900).T, random(2, 5 * SIZE), random(2, SIZE + 1)):
        check(sum_rows, x)
    assert sum_rows(random(3, 0)).tolist() == [0, 0, 0]  # a row of nothing

# %%
# The chart has matrices of the same number of elements, from a million short
# rows to a single one. ``Triton`` is ``sum_rows``, and ``sum_row`` is the first
# kernel alone. ``Roof`` is the copy.

if __name__ == "__main__" and DEVICE.type == "cuda":
    ours = {"Triton": sum_rows, "sum_row": sum_row}
    lengths = [2**k for k in range(4, 25, 4)]
    times = {N: gpu_time(contestants(N, ours)) for N in lengths}
    results = rate_table(times, "N", "GB/s", work)
    print(results.to_string())
    rates = results.pivot(index="N", columns="series", values="GB/s")
    rates.plot(logx=True)
    for name in ("PyTorch", "torch.compile", "Roof"):
        ratio = rates["Triton"] / rates[name]
        low, high = ratio.min(), ratio.max()
        print(f"sum_rows has {low:.2f} to {high:.2f} times {name}'s rate")

# %%
# One long row takes two launches. A row whose length ``SIZE`` does not divide
# gets one program even if it is alone. ``few_long_rows.py`` needs one launch,
# and takes any length.

# %%
# Exercises
# ---------
#
# Each exercise has a function to fill in and a check, which needs no GPU.
#
# **1.** Write ``normalize(x)``, which divides each row by its sum. Rows have at
# most 1024 elements, so a program can load its row once and store all of it.
#
# **2.** Write ``sum_columns(x)``, which returns ``x.sum(0)``. A program takes a
# block of neighbouring columns and goes down the rows in a loop.


def normalize(x):
    return None  # launch your kernel here, and return its output


def sum_columns(x):
    return None  # launch your kernel here, and return its output


def compare(out, expected):
    if out is None:
        return "not solved yet"
    return "right" if torch.allclose(out, expected) else "wrong"


def check_normalize(function):
    x = random(7, 100)
    return compare(function(x), x / x.sum(1, keepdim=True))


def check_sum_columns(function):
    x = random(50, 300)
    return compare(function(x), x.sum(0))


if __name__ == "__main__":
    print("exercise 1:", check_normalize(normalize))
    print("exercise 2:", check_sum_columns(sum_columns))

# %%
# ``strides.py`` comes next: in which order a kernel should walk through memory.

# %%
# Answers
# -------
#
# **1.** The row stays in the program: it is read once.


@triton.jit
def normalize_kernel(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs_n < N
    x = tl.load(x_ptr + row * N + offs_n, mask=mask, other=0)  # (BLOCK_N,)
    total = tl.sum(x, axis=0)
    tl.store(out_ptr + row * N + offs_n, x / total, mask=mask)


def normalize_answer(x):
    M, N = x.shape
    out = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    normalize_kernel[(M,)](x, out, N, BLOCK_N=BLOCK_N)
    return out


if __name__ == "__main__":
    assert check_normalize(normalize_answer) == "right"

# %%
# **2.** Neighbouring columns are neighbours in memory, so each turn of the loop
# loads a block without gaps. No place of the accumulator meets another one:
# ``tl.sum`` is not needed.


@triton.jit
def sum_columns_kernel(x_ptr, out_ptr, M, N, BLOCK_N: tl.constexpr):
    pid_n = tl.program_id(axis=0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs_n < N
    x_ptrs = x_ptr + offs_n  # (BLOCK_N,)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)  # (BLOCK_N,)
    for _ in range(M):
        acc += tl.load(x_ptrs, mask=mask, other=0)  # (BLOCK_N,)
        x_ptrs += N  # the same columns of the next row
    tl.store(out_ptr + offs_n, acc, mask=mask)


def sum_columns_answer(x):
    M, N = x.shape
    out = torch.empty(N, device=x.device)
    # 128 columns: one for each thread of a program.
    sum_columns_kernel[(triton.cdiv(N, 128),)](x, out, M, N, BLOCK_N=128)
    return out


if __name__ == "__main__":
    assert check_sum_columns(sum_columns_answer) == "right"
