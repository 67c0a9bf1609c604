# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Transpose a matrix in tiles, and learn in which order a kernel should read
# and write memory."""
#
# [[tool.triton-gallery.step_through]]
# kernel = "first_elements_kernel"
# caption = """
# Each program stores the offset of the first element of its row. Rows have
# 65,536 elements, so row 32768, that of program 2, begins at 2**31. Switch to
# the launch with int32 offsets, and look at programs 2 and 3."""
# registers = ["row", "result"]
# inputs = { out = "torch.zeros(4, dtype=torch.int64)" }
# expected = { out = "torch.arange(32766, 32770) * 65536" }
# start = [2, 0]
# [[tool.triton-gallery.step_through.launches]]
# label = "int64 offsets"
# call = "first_elements_kernel[(4,)](None, out, 32766, 65536, WIDE=True)"
# [[tool.triton-gallery.step_through.launches]]
# label = "int32 offsets"
# call = "first_elements_kernel[(4,)](None, out, 32766, 65536, WIDE=False)"
# wrong = true
# ///
r"""
Strides and tiles
=================

A transpose computes nothing. It reads every element, writes every element, and
is slow all the same when it does so in the wrong order. That makes it the best
place to learn how a kernel walks through memory. ``row_sum.py``, where a
kernel met its first strides, comes before this page.

After this page you can

* count what one instruction of a warp moves, before you measure anything;
* build a two-dimensional tile with ``[:, None]`` and ``[None, :]``;
* read off what the compiler made of it, with a GPU or without one;
* spot an offset that does not fit into 32 bits, and widen it.
"""

# sphinx_gallery_tags = ["layout", "memory bound"]
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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

# %%
# The problem in bytes
# --------------------
#
# ``x.t()`` only swaps the strides and returns another view of the same memory.
# ``.contiguous()`` then moves everything: for an ``(M, N)`` float32 matrix, it
# reads ``4 * M * N`` bytes and writes as many. So a copy is the roof.

if __name__ == "__main__":
    x = torch.arange(6, device=DEVICE).view(2, 3)
    for view in (x, x.t(), x.t().contiguous()):
        print(f"strides {view.stride()}: {view.tolist()}")

# %%
# What one instruction moves
# --------------------------
#
# The 32 threads of a warp load together. Memory comes in *sectors* of 32
# bytes, and the hardware `moves those
# <https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/>`_
# that their 32 addresses fall into. Threads whose elements share a sector share
# its cost: their access is *coalesced*. Stores work the same way. How many
# sectors there are is arithmetic:


def sectors(itemsize, stride, each):
    """Sectors that 32 threads touch, with ``each`` elements per thread."""
    starts = [thread * each * stride * itemsize for thread in range(32)]
    return len({(s + b) // 32 for s in starts for b in range(each * itemsize)})


ACCESSES = {  # bytes of an element, stride, neighbouring elements per thread
    "float32, along a row": (4, 1, 1),
    "float32, every other element": (4, 2, 1),
    "float32, down a column of 16384": (4, 16384, 1),
    "float32, along a row, 4 per thread": (4, 1, 4),
}

if __name__ == "__main__":
    print(f"{'':36} bytes wanted  sectors  bytes moved")
    for name, (itemsize, stride, each) in ACCESSES.items():
        count = sectors(itemsize, stride, each)
        wanted = 32 * each * itemsize
        print(f"{name:36}{wanted:13}{count:9}{32 * count:13}")

# %%
# Down a column, each thread gets a sector to itself and uses four bytes of it.
# Sixteen bytes per thread are the most for one instruction on an H100 or H200.
#
# Step 1: a row per program
# -------------------------
#
# The obvious kernel reads a piece of a row of ``x`` and writes it down a
# column of ``out``: coalesced on one side, and not on the other.


@triton.jit
def transpose_row_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(axis=0).to(tl.int64)
    pid_n = tl.program_id(axis=1).to(tl.int64)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs_n < N
    x_ptrs = x_ptr + pid_m * stride_xm + offs_n * stride_xn
    x = tl.load(x_ptrs, mask=mask)  # (BLOCK_N,)
    tl.store(out_ptr + offs_n * M + pid_m, x, mask=mask)


def transpose_rows(x):
    M, N = x.shape
    out = torch.empty(N, M, dtype=x.dtype, device=x.device)
    grid = (M, triton.cdiv(N, 1024))
    transpose_row_kernel[grid](x, out, M, N, *x.stride(), BLOCK_N=1024)
    return out


x = torch.rand(5, 1030, device=DEVICE)
torch.testing.assert_close(transpose_rows(x), x.t(), rtol=0, atol=0)

# %%
# Step 2: a tile per program
# --------------------------
#
# The way out is a piece that is wide in both directions. A program reads a
# tile row by row, turns it over inside the multiprocessor, where no sectors
# are wasted, and writes it row by row:
#
# .. code-block:: text
#
#     x                 N                out         M
#          +-----+-----+-----+-----+          +-----+-----+
#     M    |     |     | --> |     |          |     |     |
#          +-----+-----+-----+-----+     N    +-----+-----+
#          |     |     |     |     |          |     |     |
#          +-----+-----+-----+-----+          +-----+-----+
#                                             | --> |     |
#                                             +-----+-----+
#
# Two ranges make a tile: ``offs_m[:, None]`` is a column, ``offs_n[None, :]`` a
# row, and their sum broadcasts to all pairs, as in PyTorch. For a tile of 2 by
# 4, an ``x`` of 1000 columns and an ``out`` of 100:

if __name__ == "__main__":
    offs_m, offs_n = torch.arange(2)[:, None], torch.arange(4)[None, :]
    print("in x:  ", (offs_m * 1000 + offs_n).tolist())
    print("in out:", (offs_n * 100 + offs_m).tolist())

# %%
# One tile of elements, two tiles of addresses. A kernel loads at the first,
# stores at the second, and leaves it to the compiler to bring each element
# from the thread that loads it to the thread that stores it.
#
# Step 3: the order of the tiles
# ------------------------------
#
# CUDA promises no order of programs, but they start about as they are numbered,
# many at a time. ``tl.swizzle2d`` lets ``GROUP`` rows of tiles advance
# together:
#
# .. code-block:: text
#
#     GROUP = 1                GROUP = 2
#      0   1   2   3            0   2   4   6
#      4   5   6   7            1   3   5   7
#      8   9  10  11            8  10  12  14
#     12  13  14  15            9  11  13  15
#
# A matrix of 16384 by 16384 has 256 rows of 256 tiles of 64 by 64. If ``GROUP``
# is 1, the first 1024 of them are 4 whole rows: they write a narrow strip to
# *every* row of ``out``. If it is 32, they are a square; if it is 256, 4 whole
# columns, which finish whole rows of ``out``. A table below compares the three.
# (Wide rows of DRAM and cached translations of pages may make the difference.
# This page does not measure them.)
#
# The kernel
# ----------
#
# Strides may be anything, zero included. The offsets are int64; *Break it*
# shows why.


@triton.jit
def transpose_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tl.swizzle2d(
        pid // tiles_n, pid % tiles_n, tiles_m, tiles_n, GROUP
    )
    # In int32, index times stride overflows past element 2**31.
    first_m = pid_m.to(tl.int64) * BLOCK_M
    first_n = pid_n.to(tl.int64) * BLOCK_N
    offs_m = first_m + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = first_n + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    mask = (offs_m < M) & (offs_n < N)  # (BLOCK_M, BLOCK_N)
    x_ptrs = x_ptr + offs_m * stride_xm + offs_n * stride_xn
    x = tl.load(x_ptrs, mask=mask)  # (BLOCK_M, BLOCK_N)
    # The same tile, stored where its transpose belongs: no tl.trans needed.
    out_ptrs = out_ptr + offs_n * M + offs_m
    tl.store(out_ptrs, x, mask=mask)


# %%
# What the compiler made of it
# ----------------------------
#
# Triton can compile for a GPU that is not there. A child process, out of the
# interpreter's reach, gets the source of the two kernels and compiles them for
# an H100 or H200 and elements of 4 bytes. It counts the memory instructions:

COMPILE = r"""
import re
from collections import Counter
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
def show(name, fn, **constants):
    types = {a: "*i32" if "ptr" in a else "i32" for a in fn.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    by_16 = [i for i, t in enumerate(types.values()) if t != "constexpr"]
    hints = {(i,): [["tt.divisibility", 16]] for i in by_16}
    source = triton.compiler.ASTSource(fn, types, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    pattern = r"\b(?:ld|st)(?:\.global|\.shared|matrix)(?:\.v\d)?"
    counts = Counter(re.findall(pattern, compiled.asm["ptx"]))
    print(f"{name:20}", *(f"{n} {op}" for op, n in counts.items()), sep="  ")
KERNELS
tile = {"BLOCK_M": 64, "BLOCK_N": 64, "GROUP": 256}
show("row per program", transpose_row_kernel, stride_xn=1, BLOCK_N=1024)
show("tile per program", transpose_kernel, stride_xn=1, **tile)
show("tile, x.t() as input", transpose_kernel, stride_xm=1, **tile)
"""

if __name__ == "__main__":
    kernels = (transpose_row_kernel, transpose_kernel)
    sources = "\n".join(inspect.getsource(kernel.fn) for kernel in kernels)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compile.py")
        file.write_text(COMPILE.replace("KERNELS", sources))
        command = [sys.executable, str(file)]
        env = {**os.environ, "TRITON_INTERPRET": "0"}
        child = subprocess.run(command, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    print(child.stdout, end="")
    row, tile, view = child.stdout.splitlines()
    assert "st.global.v4" not in row
    assert "st.global.v4" in tile
    assert "shared" not in view

# %%
# ``v4`` is four elements at once. The row kernel loads in fours but has to
# store one by one; the tile kernel does both in fours. For either side the
# compiler chose a *layout*, a plan of which thread holds which element. Between
# two layouts, elements go through *shared memory* (``st.shared``, then
# ``ld.shared`` or ``ldmatrix``). In the tile kernel each follows the stride of
# 1. For a transposed view, both sides follow the same direction, the detour is
# gone, and what remains is a copy. (Triton compiles a stride of 1 as a
# constant, and notes which arguments 16 divides. An odd row length loses the
# ``v4``.)
#
# The launcher
# ------------
#
# A transpose moves bits and need not know what they mean. Viewed as integers
# of the same size, all dtypes are served by four versions of the kernel.
# (complex128 would need integers of 16 bytes. Triton has none, so the op
# refuses it.) For a thin matrix, the launcher takes a narrower, longer tile.

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# For each size of an element: BLOCK_M, BLOCK_N, num_warps.
TILES = {1: (128, 128, 16), 2: (128, 128, 8), 4: (64, 64, 4), 8: (64, 64, 8)}
GROUP = 256


def launch(x, out, BLOCK_M, BLOCK_N, num_warps, GROUP=GROUP):
    M, N = x.shape
    bits = BITS[x.element_size()]
    x, out = x.view(bits), out.view(bits)
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    transpose_kernel[grid](
        x, out, M, N, *x.stride(), BLOCK_M, BLOCK_N, GROUP, num_warps=num_warps
    )


def transpose(x):
    """Return ``x.t().contiguous()`` for a matrix with any strides."""
    if x.element_size() not in BITS:
        raise TypeError(
            f"transpose takes elements of 1, 2, 4 or 8 bytes, not {x.dtype}"
        )
    if x.ndim != 2:
        raise ValueError(f"transpose takes a matrix, not {x.ndim} dimensions")
    if x.device.type != DEVICE.type:
        raise ValueError(
            f"transpose takes a matrix on a {DEVICE.type} device, "
            f"not {x.device}"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            "transpose has no backward: call it under torch.no_grad()"
        )
    x = x.resolve_conj().resolve_neg()  # carry out a lazy x.conj()
    M, N = x.shape
    out = torch.empty(N, M, dtype=x.dtype, device=x.device)
    if x.numel() > 0:
        BLOCK_M, BLOCK_N, num_warps = TILES[x.element_size()]
        area = BLOCK_M * BLOCK_N
        block_m = min(BLOCK_M, triton.next_power_of_2(M))
        block_n = min(area // block_m, triton.next_power_of_2(N))
        block_m = min(area // block_n, triton.next_power_of_2(M))
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            launch(x, out, block_m, block_n, num_warps)
    return out


# %%
# The check
# ---------
#
# Nothing is computed, so nothing is rounded: the reference is PyTorch and the
# tolerance is zero.
#
# .. note::
#
#    Without a GPU, all this runs in Triton's interpreter. A kernel that is
#    right there may be wrong on a GPU, or not compile: ``interpreter.md`` says
#    what differs.

for M, N in ((64, 128), (65, 200), (1, 300), (300, 3), (0, 5), (5, 0)):
    x = torch.randn(M, N, device=DEVICE)
    torch.testing.assert_close(transpose(x), x.t(), rtol=0, atol=0)
    assert transpose(x).is_contiguous()
x = torch.randn(70, 90, device=DEVICE)
for view in (x.t(), x[:, ::2], x[3:, 5:], x[:, :1].expand(70, 80)):
    torch.testing.assert_close(transpose(view), view.t(), rtol=0, atol=0)
for other in (x > 0, x.bfloat16(), x.double(), torch.complex(x, -x).conj()):
    torch.testing.assert_close(transpose(other), other.t(), rtol=0, atol=0)

# %%
# Which tile, in which order?
# ---------------------------
#
# A large tile has long rows on both sides; of small ones, more are in flight at
# a time. On a GPU, the next cell tries ``(BLOCK_M, BLOCK_N, num_warps)``. Look
# for the best tile, and for what a square of tiles (``GROUP = 32``) gains.

SIZES = (32, 64, 128)
VARIANTS = [(m, n, m * n // 1024) for m in SIZES for n in SIZES]


def gigabytes_per_second(x, milliseconds):
    return 2 * x.numel() * x.element_size() * 1e-6 / milliseconds


def measure(x, op, *args):
    time = triton.testing.do_bench(lambda: op(*args), rep=50, quantiles=[0.5])
    return gigabytes_per_second(x, time)


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = torch.rand(16384, 16384, device=DEVICE)
    out = torch.empty_like(x)
    table = pd.DataFrame(index=[str(tile) for tile in VARIANTS])
    for g in (1, 32, 256):
        rates = [measure(x, launch, x, out, *tile, g) for tile in VARIANTS]
        table[f"GROUP = {g}"] = rates
    print("GB/s\n" + table.to_string(float_format="%.0f"))

# %%
# The benchmark
# -------------
#
# Square float32 matrices; the figure is ``8 * M * N / time``. Three lines are
# our three steps: a row per program, tiles row after row, and the op. ``Roof``
# copies the matrix. Before each call the L2 cache is emptied. For the smallest
# matrices the GPU waits for the CPU, and the figure holds that time too.

LINES = ["Triton, uncoalesced", "Triton, GROUP = 1", "Triton"]
LINES += ["PyTorch", "torch.compile", "Roof"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2**k for k in range(9, 15)],
        x_log=True,
        line_arg="provider",
        line_vals=LINES,
        line_names=LINES,
        ylabel="GB/s",
        plot_name="strides",
        args={},
    )
)
def benchmark(N, provider):
    x = torch.rand(N, N, device=DEVICE)
    out = torch.empty_like(x)
    torch.compiler.reset()  # the ninth shape would raise an error
    compiled = torch.compile(
        lambda x: x.t().contiguous(), fullgraph=True, dynamic=False
    )
    op = {
        "Triton, uncoalesced": lambda: transpose_rows(x),
        "Triton, GROUP = 1": lambda: launch(x, out, *TILES[4], GROUP=1),
        "Triton": lambda: transpose(x),
        "PyTorch": lambda: x.t().contiguous(),
        "torch.compile": lambda: compiled(x),
        "Roof": lambda: out.copy_(x),
    }[provider]
    times = triton.testing.do_bench(op, rep=50, quantiles=[0.5, 0.2, 0.8])
    median, fast, slow = (gigabytes_per_second(x, t) for t in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# Real matrices have other types and shapes. The roof of each is a copy of a
# contiguous matrix of the same bytes.


def measure_input(x):
    source = x.clone(memory_format=torch.contiguous_format)
    return {
        "Triton (GB/s)": measure(x, transpose, x),
        "PyTorch (GB/s)": measure(x, lambda: x.t().contiguous()),
        "Roof (GB/s)": measure(x, torch.empty_like(source).copy_, source),
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = torch.rand(16384, 16384, device=DEVICE)
    inputs = {
        "int8": (100 * x).to(torch.int8),
        "bfloat16": x.bfloat16(),
        "float32, 16383 x 16385": x.view(-1)[:-1].view(16383, 16385),
        "float32, 16777216 x 16": x.view(-1, 16),
    }
    rows = [{"input": k, **measure_input(v)} for k, v in inputs.items()]
    results_dtypes = pd.DataFrame(rows)
    print(results_dtypes.to_string())

# %%
# Reading the result
# ------------------
#
# All but the roof move elements between the same addresses, in other orders.
# From a row per program to tiles it is the order within a warp: a store of 128
# bytes in 32 sectors becomes one of 512 in 16. (With the load, 36 sectors for
# each 128 bytes become 8. For large matrices the rate gains more than that, so
# the count is not all.) From ``GROUP = 1`` to the op it is the order among
# programs: for large matrices, the last few percent. Fastest is no transpose: a
# kernel that takes strides reads the view. In the last table the odd row length
# stands out: it has lost the ``v4``.

# %%
# Break it: an offset of 32 bits
# ------------------------------
#
# ``tl.program_id`` and ``tl.arange`` are int32, and so is each size or stride
# that fits. The product of two int32 is an int32, and beyond :math:`2^{31} - 1`
# it wraps around silently. This kernel reads the first element of each of four
# rows. Without a matrix, it returns their offsets:


@triton.jit
def first_elements_kernel(
    x_ptr,
    out_ptr,
    first,
    stride_xm,
    WIDE: tl.constexpr,
):
    row = first + tl.program_id(axis=0)
    if WIDE:
        row = row.to(tl.int64)
    result = row * stride_xm
    if x_ptr is not None:
        result = tl.load(x_ptr + result)
    tl.store(out_ptr + row - first, result)


def first_elements(x, WIDE):
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    first_elements_kernel[(4,)](x, out, 32766, 65536, WIDE=WIDE)
    return out.tolist()


if __name__ == "__main__":
    narrow, wide = (first_elements(None, WIDE) for WIDE in (False, True))
    print("row         ", *(f"{row:11}" for row in range(32766, 32770)))
    print("int32 offset", *(f"{offs:11}" for offs in narrow))
    print("int64 offset", *(f"{offs:11}" for offs in wide))
    assert narrow[2:] == [offs - 2**32 for offs in wide[2:]]

# %%
# Row 32768 begins at :math:`2^{31}`; its int32 offset lies *before* the matrix.
# That memory is seldom ours. On a GPU, the next cell puts a neighbour there:

if __name__ == "__main__" and DEVICE.type == "cuda":
    M, N = 2**15 + 4, 2**16
    buffer = torch.full((2**31 + M * N,), -1, dtype=torch.int8, device=DEVICE)
    x = buffer[2**31 :].view(M, N)
    x[:, 0] = torch.arange(M, device=DEVICE) % 100
    narrow, wide = (first_elements(x, WIDE) for WIDE in (False, True))
    print("with int32 offsets", narrow)
    print("with int64 offsets", wide)
    assert narrow[2:] == [-1, -1]
    assert wide == x[32766:32770, 0].tolist()
    torch.testing.assert_close(transpose(x)[:, -9:], x[-9:].t())

# %%
# The two -1 are the neighbour's; a store would have overwritten them.
# The cure is ``.to(tl.int64)`` *before* the product. Published kernels `have
# needed it <https://github.com/fla-org/flash-linear-attention/pull/1082>`_. So
# test with more than :math:`2^{31}` elements: in int8 that is 2 GiB.

# %%
# Go further
# ----------
#
# 1. Transpose all matrices of a batch, shape ``(B, M, N)``, in one launch.
# 2. Why is ``transpose(x[::2, ::2].t())`` slower than it could be?
#
# To read on:
#
# * `A transpose in CUDA C++, with shared memory by hand
#   <https://developer.nvidia.com/blog/efficient-matrix-transpose-cuda-cc/>`_
# * `Linear layouts <https://arxiv.org/abs/2505.23819>`_, the compiler's plans
#
# Next comes ``launch.py``: which grids, arguments and kernels Triton takes.

# %%
# Answers
# -------
#
# **1.** A second axis of the grid counts the matrices. Its id, in int64, times
# the strides between matrices moves both pointers before anything else.
#
# **2.** No stride is 1, so neighbouring threads follow the last dimension. Its
# stride is the long one here. A launcher could swap the two dimensions' roles.
