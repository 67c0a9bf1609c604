# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Add up the rows of a matrix: the first kernel that finds its way through two
# dimensions and returns less than it reads."""
# ///
r"""
Row sum
=======

``A.sum(axis=1)`` adds up each row of a matrix. It is the first kernel whose
programs have to find their way through two dimensions and come back with less
than they read; softmax, the norms and every other reduction start like this.

After ``vector_add.py`` and this page you can

* get from a pointer and two strides to any element of any matrix;
* reduce a row in one block, and a row that is longer than any block in a loop;
* choose the accumulator's type, and know what the wrong one does;
* say what ``num_warps`` changes, and measure it.
"""

# sphinx_gallery_tags = ["reduction", "memory bound"]
import os

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

# %%
# The problem in bytes
# --------------------
#
# For an ``(M, N)`` matrix of float32, every element has to be read once and
# one number per row has to be written: ``4 * M * N + 4 * M`` bytes at least.
# Unless the rows are very short that is the size of the matrix. There is one
# addition for each four bytes, so the op is bound by memory, and the question
# is only how close a kernel comes to reading at full speed.

if __name__ == "__main__":
    A = torch.rand(300, 1000, device=DEVICE)
    out = A.sum(axis=1)  # reads A, writes one number per row

    read = A.numel() * A.element_size()
    written = out.numel() * out.element_size()
    print(f"{read:,} bytes read, {written:,} bytes written")

# %%
# A matrix is a pointer and two strides
# -------------------------------------
#
# Of a tensor, a kernel gets only the address of the first element, ``a_ptr``.
# The *strides* say how many elements to skip in order to move down by one row
# or right by one column. Element ``(m, n)`` of any PyTorch matrix lies at
#
# .. code-block:: text
#
#     a_ptr + m * stride_am + n * stride_an        (counted in elements)
#
#     A, shape (3, 5), strides (5, 1)      A.T, shape (5, 3), strides (1, 5)
#
#          n = 0  1  2  3  4                    n = 0  1  2
#     m=0      0  1  2  3  4               m=0      0  5 10
#     m=1      5  6  7  8  9               m=1      1  6 11
#     m=2     10 11 12 13 14               m=2      2  7 12
#                                          m=3      3  8 13
#                                          m=4      4  9 14
#
# Both tables describe the same 15 numbers in memory. Transposing swaps the
# strides and moves nothing; taking every other column doubles ``stride_an``;
# expanding a column to many sets it to zero. A kernel that uses both strides
# gets all of these right without a copy.
#
# This kernel writes down where each program would look. Program ``m`` has the
# row ``m``; the columns are a block.


@triton.jit
def where_kernel(
    where_ptr,
    stride_am,
    stride_an,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(axis=0)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    where = pid_m * stride_am + offs_n * stride_an  # (BLOCK_N,)
    tl.store(where_ptr + pid_m * BLOCK_N + offs_n, where)


if __name__ == "__main__":
    A = torch.rand(4, 4, device=DEVICE)
    for name, view in {"A": A, "A.T": A.T, "A[:, ::2]": A[:, ::2]}.items():
        M, N = view.shape
        where = torch.empty(M, N, dtype=torch.int32, device=DEVICE)
        where_kernel[(M,)](where, *view.stride(), BLOCK_N=N)
        print(f"{name:10} strides {view.stride()}  {where.tolist()}")

# %%
# Step 1: a row in one block
# --------------------------
#
# The simplest plan gives each row to one program, as one block. A block is a
# power of two and a row seldom is, so the block is the next power of two and
# the tail is masked:
#
# .. code-block:: text
#
#     N = 5, BLOCK_N = 8
#
#     offs_n    0   1   2   3   4   5   6   7
#     mask      1   1   1   1   1   0   0   0
#     a        a0  a1  a2  a3  a4   0   0   0     <- other=0
#               \___\___\___\___\___\___\___\____ tl.sum
#
# A masked load returns something undefined where the mask is False, and
# ``tl.sum`` adds up the whole block. So this load needs ``other``, a value
# that changes nothing: 0 for a sum, 1 for a product, ``-inf`` for a maximum.


@triton.jit
def sum_row_block_kernel(
    a_ptr,
    out_ptr,
    N,
    stride_am,
    stride_an,
    BLOCK_N: tl.constexpr,
):
    # In int32, row times stride overflows in a matrix of 2**31 elements.
    pid_m = tl.program_id(axis=0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # (BLOCK_N,)
    a_ptrs = a_ptr + pid_m * stride_am + offs_n * stride_an
    a = tl.load(a_ptrs, mask=offs_n < N, other=0)  # (BLOCK_N,)
    tl.store(out_ptr + pid_m, tl.sum(a, axis=0))


def sum_row_block(A):
    M, N = A.shape
    BLOCK_N = triton.next_power_of_2(N)
    num_warps = min(16, max(1, BLOCK_N // 1024))
    out = torch.empty(M, device=A.device)
    sum_row_block_kernel[(M,)](
        A, out, N, *A.stride(), BLOCK_N=BLOCK_N, num_warps=num_warps
    )
    return out


A = torch.rand(3, 5, device=DEVICE)
torch.testing.assert_close(sum_row_block(A), A.sum(axis=1))

if __name__ == "__main__":
    for N in (5, 1000, 1024, 1025):
        block = triton.next_power_of_2(N)
        print(f"N = {N:4}: a block of {block:4}, {block - N:4} of it masked")

# %%
# For rows of moderate length this is a good kernel. But its code grows with
# the row, a block of more than :math:`2^{20}` elements is refused, and each
# power of two is compiled anew.

# %%
# Step 2: a loop over blocks
# --------------------------
#
# A block of fixed size walks along the row. The accumulator is a block too:
#
# .. code-block:: text
#
#     N = 10, BLOCK_N = 4
#
#     start = 0        a0     a1     a2     a3
#     start = 4      + a4   + a5   + a6   + a7
#     start = 8      + a8   + a9   + 0    + 0      <- tail mask
#                    ----   ----   ----   ----
#     acc              |      |      |      |
#                      \______\______\______\_____ tl.sum, once
#
# Adding block to block, every thread adds its own elements to its own sums.
# ``tl.sum`` across the block is where threads have to talk to each other: by
# shuffles, which pass registers around within a warp, and through the shared
# memory of the multiprocessor. So it waits until the loop is over.
#
# ``acc`` has a type of its own, ``ACC``. In registers a wide type is cheap:
# the bytes that count are those that come from memory, and they stay the same.


@triton.jit
def sum_row_kernel(
    a_ptr,
    out_ptr,
    N,
    stride_am,
    stride_an,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(axis=0).to(tl.int64)
    row_ptr = a_ptr + pid_m * stride_am
    acc = tl.zeros((BLOCK_N,), dtype=ACC)  # (BLOCK_N,)
    # The bound in int64 makes `start`, and all offsets made from it, int64.
    for start in range(0, tl.cast(N, tl.int64), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        a_ptrs = row_ptr + offs_n * stride_an
        a = tl.load(a_ptrs, mask=offs_n < N, other=0)  # (BLOCK_N,)
        acc += a.to(ACC)
    tl.store(out_ptr + pid_m, tl.sum(acc, axis=0))


# %%
# The launcher
# ------------
#
# The types follow PyTorch: integers and booleans are summed in int64, the
# result of a floating type has the same type. Half precision is accumulated in
# float32 and rounded once, by the store. The strides are passed on, so no input
# is ever copied. An empty row needs no special case: the loop does nothing and
# ``acc`` is zero. A matrix without rows does: its grid is empty.

ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
INTEGERS = {torch.bool, torch.uint8, torch.int8}
INTEGERS |= {torch.int16, torch.int32, torch.int64}
BLOCK_N = 4096


def sum_row(A):
    """Return ``A.sum(axis=1)`` for a matrix with any strides."""
    if A.dtype not in INTEGERS and A.dtype not in ACC:
        raise TypeError(
            "sum_row takes a bool, integer or floating dtype, "
            f"float16 to float64, not {A.dtype}"
        )
    if A.ndim != 2:
        raise ValueError(f"sum_row takes a matrix, not {A.ndim} dimensions")
    if A.device.type != DEVICE.type:
        raise ValueError(
            f"sum_row takes a matrix on a {DEVICE.type} device, not {A.device}"
        )
    if torch.is_grad_enabled() and A.requires_grad:
        raise ValueError(
            "sum_row has no backward: call it under torch.no_grad()"
        )
    M, N = A.shape
    dtype = torch.int64 if A.dtype in INTEGERS else A.dtype
    out = torch.empty(M, dtype=dtype, device=A.device)
    block = min(BLOCK_N, triton.next_power_of_2(max(N, 1)))
    if M > 0:
        # Triton launches on the current GPU, which may not be that of A.
        with torch.accelerator.device_index(A.device.index):
            sum_row_kernel[(M,)](
                A,
                out,
                N,
                *A.stride(),
                ACC=ACC.get(A.dtype, tl.int64),
                BLOCK_N=block,
                num_warps=max(1, block // 512),
            )
    return out


# %%
# The check
# ---------
#
# An element takes part in at most ``ceil(N / BLOCK_N)`` additions in the loop
# and in ``log2(BLOCK_N)`` in ``tl.sum``, which adds in a tree. That makes 15
# for the longest row below. Each is off by a relative :math:`2^{-24}` at most.
# These elements are positive, so nothing cancels and the errors stay relative
# to the sum: :math:`15 \cdot 2^{-24} < 10^{-6}`. The reference is in float64.
#
# .. note::
#
#    Without a GPU, all this runs in Triton's interpreter. A kernel that is
#    right there may be wrong on a GPU, or not compile: ``interpreter.md`` says
#    what differs.

torch.manual_seed(0)
for M, N in ((3, 4096), (5, 10_007), (7, 1), (2, 0), (0, 3)):
    A = torch.rand(M, N, device=DEVICE)
    expected = A.double().sum(axis=1)
    torch.testing.assert_close(sum_row(A).double(), expected, rtol=1e-6, atol=0)

# %%
# Views with other strides have to be as exact as the matrix. Integers are
# compared exactly. A float16 result is rounded once more, to 11 bits.

A = torch.rand(100, 60, device=DEVICE)
for view in (A.T, A[:, ::3], A[1:, 7:], A[:, :1].expand(100, 50)):
    expected = view.double().sum(axis=1)
    torch.testing.assert_close(
        sum_row(view).double(), expected, rtol=1e-6, atol=0
    )

counts = torch.randint(-128, 128, (9, 5000), device=DEVICE, dtype=torch.int8)
torch.testing.assert_close(sum_row(counts), counts.sum(axis=1))
torch.testing.assert_close(sum_row(counts > 0), (counts > 0).sum(axis=1))

half = A.half()
expected = half.double().sum(axis=1)
torch.testing.assert_close(
    sum_row(half).double(), expected, rtol=2**-11 + 1e-6, atol=0
)

# %%
# Warps and bytes in flight
# -------------------------
#
# A program runs on ``num_warps`` warps of 32 threads, and the compiler deals
# the block out to them. Twice the warps is half the elements per thread:

WARPS = (2, 4, 8, 16)
BLOCKS = (1024, 2048, 4096, 8192, 16384)

if __name__ == "__main__":
    print("elements per thread")
    print("   BLOCK_N", *(f"{warps:5} warps" for warps in WARPS))
    for block in BLOCKS:
        print(f"{block:10}", *(f"{block // (32 * w):11}" for w in WARPS))

# %%
# Each float32 element that a thread holds takes a register, and its bytes are
# in flight together with the others. Memory answers hundreds of cycles later,
# so a GPU reaches its bandwidth only with many bytes *in flight*: by Little's
# law, as many as the bandwidth times the time to the answer. Too few elements
# in all the programs together leave the memory idle. Too many in a thread cost
# so many registers that fewer programs fit beside each other. While every
# program waits in ``tl.sum``, no load is in flight.
#
# Which matters more has to be measured. On a GPU, the next cell tries the whole
# grid on a float32 matrix of 16384 by 16384. (Without one it prints nothing,
# and the benchmark below is left out too.)


def gigabytes_per_second(M, N, milliseconds):
    return 4 * (M * N + M) * 1e-9 / (milliseconds * 1e-3)


def measure(A, BLOCK_N, num_warps):
    M, N = A.shape
    out = torch.empty(M, device=DEVICE)
    time = triton.testing.do_bench(
        lambda: sum_row_kernel[(M,)](
            A,
            out,
            N,
            *A.stride(),
            ACC=tl.float32,
            BLOCK_N=BLOCK_N,
            num_warps=num_warps,
        ),
        quantiles=[0.5],
    )
    return gigabytes_per_second(M, N, time)


if __name__ == "__main__" and DEVICE.type == "cuda":
    A = torch.rand(16384, 16384, device=DEVICE)
    print("GB/s")
    print("   BLOCK_N", *(f"{warps:5} warps" for warps in WARPS))
    for block in BLOCKS:
        print(f"{block:10}", *(f"{measure(A, block, w):11.0f}" for w in WARPS))
    del A

# %%
# The benchmark
# -------------
#
# Square float32 matrices; the figure is ``4 * (M * N + M) / time``, the bytes
# of the algorithm. ``Roof`` is a copy of as many bytes, half of them read and
# half of them written, with its output allocated beforehand. ``do_bench``
# empties the L2 cache before each call; lines are medians, bands run from the
# 20th to the 80th percentile.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2**k for k in range(8, 15)],
        x_log=True,
        line_arg="provider",
        line_vals=["one block", "loop", "PyTorch", "torch.compile", "Roof"],
        line_names=[
            "Triton, one block",
            "Triton",
            "PyTorch",
            "torch.compile",
            "Roof",
        ],
        ylabel="GB/s",
        plot_name="row_sum",
        styles=[
            ("C0", "-"),
            ("C1", "-"),
            ("C2", "-"),
            ("C3", "-"),
            ("k", "--"),
        ],
        args={},
    )
)
def benchmark(N, provider):
    A = torch.rand(N, N, device=DEVICE)
    half = (N * N + N) // 2
    source = torch.rand(half, device=DEVICE)
    target = torch.empty_like(source)
    torch.compiler.reset()  # the ninth shape would raise an error
    compiled = torch.compile(
        lambda A: A.sum(axis=1), fullgraph=True, dynamic=False
    )
    op = {
        "one block": lambda: sum_row_block(A),
        "loop": lambda: sum_row(A),
        "PyTorch": lambda: A.sum(axis=1),
        "torch.compile": lambda: compiled(A),
        "Roof": lambda: target.copy_(source),
    }[provider]
    times = triton.testing.do_bench(op, quantiles=[0.5, 0.2, 0.8])
    median, fast, slow = (gigabytes_per_second(N, N, t) for t in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# Reading the result
# ------------------
#
# All of them read the same bytes. For the largest matrix, both Triton kernels
# and ``torch.compile`` reach the roof; PyTorch's kernel stays below it. The
# loop and the single block stay close for large matrices, and only the loop
# takes rows of any length; that is why ``sum_row`` is the loop.
# ``torch.compile`` writes a Triton kernel of this kind itself; call it a draw
# when two lines are closer than their bands are wide. The roof need not be a
# ceiling: half of the bytes of a copy are written, and a sum hardly writes any.
# In the table of warps, compare neighbours: where they agree, the choice does
# not matter. The last line is the slowest for any number of warps. There a
# block is a whole row, so the loop runs only once.
#
# For small matrices a launch takes longer than the bytes do (``vector_add.py``
# takes that apart). ``do_bench`` does not hide the launch: where the CPU takes
# longer to make the call than the GPU to empty its cache, the figure holds CPU
# time too.
#
# On the site, the table *Beside other libraries* has two shapes that this
# kernel is not made for. A row is summed by one program. With a single row only
# one multiprocessor works, and the others have nothing to do:
# ``few_long_rows.py`` spreads a row over many programs. A million rows of 16
# elements are a million programs, and each starts, reads 64 bytes and ends.

# %%
# Break it: the wrong accumulator
# -------------------------------
#
# ``ACC`` looks like a detail. Here the same kernel adds 40,000 ones, once in
# float16 and once in float32. The exact sum is a float16 number, so it could
# be returned in both cases.

if __name__ == "__main__":
    ones = torch.ones(1, 40_000, dtype=torch.float16, device=DEVICE)
    out = torch.empty(1, dtype=torch.float16, device=DEVICE)
    for acc_type in (tl.float16, tl.float32):
        sum_row_kernel[(1,)](
            ones, out, 40_000, *ones.stride(), ACC=acc_type, BLOCK_N=16
        )
        print(f"accumulated in {acc_type}: {out.item():.0f}")

# %%
# A float16 has 11 significant bits, and from 2048 on its neighbours are two
# apart. 2048 + 1 lies halfway between them and is rounded back to 2048: there
# each of the 16 running sums stands still, and 16 times 2048 is what comes
# out. Nothing overflowed and nothing is NaN. In bfloat16, with 8 bits, a sum
# of ones would stop at 256.
#
# The small block makes it plain. 4096 running sums stand still later, but
# numbers other than ones lose bits long before, and a test with short rows
# would pass. The fix is the one above: accumulate in float32, round once.

# %%
# Go further
# ----------
#
# 1. For rows of 8 elements, a program per row leaves most of its warp idle.
#    Give each program a block of ``(BLOCK_M, BLOCK_N)`` elements.
# 2. ``sum_row(A.T)`` is right for a contiguous ``A``. What does each of its
#    loads move, and how does your kernel from 1 help?
# 3. ``sum_row`` of a single row with :math:`10^8` elements uses one program,
#    and so one multiprocessor. Use them all, without a new kernel.
#
# To read on (``strides.py`` comes next):
#
# * Triton's tutorial on softmax, which takes rows in one block:
#   https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html
# * *Coalesced access to global memory* in the `CUDA best practices guide
#   <https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/>`_
# * Nicholas J. Higham, *The accuracy of floating point summation*, SIAM
#   Journal on Scientific Computing 14 (1993), on why trees sum better than
#   loops

# %%
# Answers
# -------
#
# **1.** Rows become a column of offsets, ``offs_m[:, None]``, columns a row of
# them, ``offs_n[None, :]``. Their sum broadcasts to a block of addresses, and
# ``tl.sum(axis=1)`` leaves one number for each row of it.


@triton.jit
def sum_rows_kernel(
    a_ptr,
    out_ptr,
    M,
    N,
    stride_am,
    stride_an,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    mask_m = offs_m < M
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)  # (BLOCK_M, BLOCK_N)
    for start in range(0, tl.cast(N, tl.int64), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = mask_m[:, None] & (offs_n[None, :] < N)  # (BLOCK_M, BLOCK_N)
        offs = offs_m[:, None] * stride_am + offs_n[None, :] * stride_an
        acc += tl.load(a_ptr + offs, mask=mask, other=0)
    tl.store(out_ptr + offs_m, tl.sum(acc, axis=1), mask=mask_m)


A = torch.rand(1000, 8, device=DEVICE)
out = torch.empty(1000, device=DEVICE)
sum_rows_kernel[(8,)](A, out, 1000, 8, *A.stride(), BLOCK_M=128, BLOCK_N=8)
torch.testing.assert_close(out, A.sum(axis=1))

# %%
# **2.** Neighbouring threads take neighbouring elements of a row, which in
# ``A.T`` lie a whole stride apart. Memory comes in pieces of 32 bytes, and
# each request moves a piece for four bytes of use. With a wide ``BLOCK_M`` and
# a small ``BLOCK_N``, the compiler lets neighbouring threads go down the rows,
# the direction of stride 1, and whole pieces are used.
#
# **3.** A contiguous row is also a matrix: sum the rows of a square one, then
# sum the sums. (Pad with zeros, or sum the rest apart, if ``N`` has no such
# factors.)

row = torch.rand(1, 90_000, device=DEVICE)
twice = sum_row(sum_row(row.view(300, 300)).view(1, 300))
torch.testing.assert_close(twice, row.sum(axis=1))
