# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Matrix product
==============

A matrix product does far more arithmetic than a softmax or a norm for each
number that it reads. To be fast, a kernel has to use each number many times
before it lets go of it. This page builds the plainest kernel that does so, on
the GPU's tensor cores, and makes an op of it.

After this page you can

* divide a product into tiles, and say how often each number is read;
* loop over ``K`` with ``tl.dot`` and an accumulator in float32;
* mask the ragged edges of all three matrices;
* read operands of any layout, so that a transpose costs nothing;
* say which error a product may have, and find out that TF32 made it larger.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "autograd"]
import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")


def gpu_time(calls, turns=50):
    """Time a dictionary of calls by turns, each with the L2 cache emptied.

    Returns for each the median of its GPU time in milliseconds, the 20th and
    the 80th percentile, its CPU time in microseconds, and whether the GPU had
    to wait for the CPU. The GPU sleeps before a call: that hides the launch.
    """
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    seen = {name: [] for name in calls}
    for turn in range(-5, turns):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(3_000_000)  # cycles of its clock, about 1.5 ms
            cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            cpu = time.perf_counter() - began
            end.record()
            late = start.query()  # the GPU got there before the CPU was done
            torch.cuda.synchronize()
            if turn >= 0:  # those before compile, tune and warm up
                seen[name].append((start.elapsed_time(end), cpu * 1e6, late))
    low, middle, high = turns // 5, turns // 2, turns * 4 // 5
    found = {}
    for name, rows in seen.items():
        gpu, cpu, late = map(sorted, zip(*rows, strict=True))
        found[name] = gpu[middle], gpu[low], gpu[high], cpu[middle], late[high]
    return found


def rate_table(times, x, unit, work):
    """Return a data frame of rates: work(size) for each millisecond.

    ``times`` has, for each size, what ``gpu_time`` returned.
    """
    import pandas as pd

    rows = []
    for size, calls in times.items():
        for name, (median, fast, slow, cpu, late) in calls.items():
            rates = [work(size) / ms for ms in (median, slow, fast)]
            rows.append([size, name, *rates, cpu, late])
    columns = [x, "series", unit, "low", "high", "CPU us", "late"]
    return pd.DataFrame(rows, columns=columns)


# %%
# In PyTorch
# ----------
#
# .. math:: c_{mn} = \sum_{k=1}^{K} a_{mk}\,b_{kn}
#
# An element of ``c`` takes ``K`` multiplications and ``K`` additions. A *flop
# counter* counts what PyTorch executes. Tensors on the device ``meta`` have no
# data, so that takes no time. The *floor* of the bytes is each matrix once.

generator = torch.Generator(device=DEVICE).manual_seed(0)

if __name__ == "__main__":
    for N in (128, 1024, 8192):
        a = torch.empty(N, N, dtype=torch.float16, device="meta")
        with FlopCounterMode(display=False) as counter:
            c = a @ a
        flops, moved = counter.get_total_flops(), 3 * c.nbytes
        print(f"{N} x {N} x {N}: {flops:,} operations", end=", ")
        print(f"{moved:,} bytes, {flops / moved:.0f} operations a byte")

# %%
# A softmax does a few operations for each byte, and waits for memory. A large
# product has thousands to do, if it reads each matrix about once. But an
# element of ``c`` needs a whole row and a whole column. So a program computes a
# *tile* of ``c``, and uses what it has read for many elements.

# %%
# The first kernel
# ----------------
#
# A program cannot hold all ``K`` columns of its rows. It goes along ``K`` in
# steps of ``BLOCK_K``. In each step it loads a tile of ``a`` and one of ``b``,
# multiplies them with ``tl.dot``, and adds the product to its tile of ``c``,
# the *accumulator*, which stays in registers:
#
# .. code-block:: text
#
#                                        N
#                            +-------+-------+-------+
#     step 0, 1, 2           |       | b 0   |       |
#                            |       | b 1   |       |  K
#             K              |       | b 2   |       |
#     +-----+-----+-----+    +-------+-------+-------+
#     |     |     |     |    |       |       |       |
#     | a 0 | a 1 | a 2 |    |       |  acc  |       |  M
#     +-----+-----+-----+    +-------+-------+-------+
#
# The last tiles reach past the edges. There, a mask puts zeros, which add
# nothing to a sum. Both operands need them along ``K``: NaN times 0 is NaN.


@triton.jit
def tile_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32, a row times K would overflow past element 2**31.
    pid_m = tl.program_id(axis=0).to(tl.int64)
    pid_n = tl.program_id(axis=1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)  # (BLOCK_K,)
        row, column = offs_k[None, :], offs_k[:, None]
        a_mask = (offs_m < M) & (row < K)  # (BLOCK_M, BLOCK_K)
        b_mask = (column < K) & (offs_n < N)  # (BLOCK_K, BLOCK_N)
        a = tl.load(a_ptr + offs_m * K + row, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + column * N + offs_n, mask=b_mask, other=0.0)
        # In half precision, a sum would be rounded at every step.
        acc = tl.dot(a, b, acc)
    c_mask = (offs_m < M) & (offs_n < N)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


def tile_matmul(a, b, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4):
    """Return the product of two contiguous float16 matrices."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    tile_kernel[grid](
        a, b, c, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, num_warps=num_warps
    )
    return c


# %%
# Is it right?
# ------------
#
# How far may it be off? Two float16 numbers multiply exactly in float32. Each
# of ``K`` additions is rounded, or cut off, by at most :math:`2^{-23}` of the
# sum so far. No sum is larger than :math:`s = \sum_k |a_{mk}\,b_{kn}|`, so the
# accumulator is off by at most :math:`K\,2^{-23} s`. The store rounds to the 11
# bits of float16.


def error_bound(a, b, rounding):
    """Return a @ b in float64, and how far a product may be off."""
    s = a.double().abs() @ b.double().abs()
    expected = a.double() @ b.double()
    return expected, a.shape[1] * 2.0**-23 * s + rounding * expected.abs()


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


if __name__ == "__main__":
    a, b = random(100, 300), random(300, 70)
    expected, bound = error_bound(a, b, rounding=2.0**-11)
    error = (tile_matmul(a, b) - expected).abs()
    print(f"largest error {error.max():.1e}, ", end="")
    print(f"at most {(error / bound).max():.2f} of what is allowed")
    torch.testing.assert_close(error / bound, 0 * bound, rtol=0, atol=1)

# %%
# How fast?
# ---------
#
# ``torch.matmul`` calls NVIDIA's library cuBLAS, and ``torch.compile`` leaves a
# lone product to it too. cuBLAS is the roof of this page. The rate counts
# :math:`2 M N K` operations.


def calls(function, M, N, K):
    a, b = random(M, K), random(K, N)
    torch.compiler.reset()  # past eight shapes it would raise
    fast = torch.compile(lambda a, b: a @ b, dynamic=False, fullgraph=True)
    ops = {"Triton": function, "cuBLAS": torch.matmul, "torch.compile": fast}
    return {name: partial(op, a, b) for name, op in ops.items()}


def rate(M, N, K, found):
    """Return TFLOP/s."""
    return 2e-9 * M * N * K / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (1024, 2048, 4096):
        found = gpu_time(calls(tile_matmul, N, N, N)).items()
        rates = [f"{who} {rate(N, N, N, times):.0f}" for who, times in found]
        print(f"{N} x {N} x {N}: {', '.join(rates)} TFLOP/s")

# %%
# How large a tile?
# -----------------
#
# With ``BLOCK_M`` rows and ``BLOCK_N`` columns, each number of ``a`` that is
# read serves ``BLOCK_N`` times, and each number of ``b`` serves ``BLOCK_M``
# times. Let us count what all programs of a product read together:


def tiles_read(M, N, K, BLOCK_M, BLOCK_N):
    """Return how many numbers all programs read, and of how many tiles."""
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    return tiles * (BLOCK_M + BLOCK_N) * K, tiles


if __name__ == "__main__":
    for block in (1, 16, 64, 128, 256):
        read, tiles = tiles_read(4096, 4096, 4096, block, block)
        print(
            f"tiles of {block:3} x {block:3}: {tiles:10,} programs,"
            f" {2 * 4096**3 / (2 * read):5.1f} operations a byte"
        )

# %%
# A larger tile reads less. What does it cost? A multiprocessor has 65536
# registers, and a thread has at most 255. The accumulator takes ``BLOCK_M *
# BLOCK_N`` of them, shared among the threads. The tiles of ``a`` and ``b`` wait
# in *shared memory*, some steps ahead of the one that is multiplied;
# ``tile_order.py`` is about that. We time four tiles:

TILES = [(32, 32, 32, 4), (64, 64, 32, 4), (128, 128, 64, 8), (128, 256, 64, 8)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    M = N = K = 4096
    a, b = random(M, K), random(K, N)
    c = torch.empty(M, N, dtype=a.dtype, device=DEVICE)
    tried = {tile: partial(tile_matmul, a, b, *tile) for tile in TILES}
    for tile, times in gpu_time(tried, turns=20).items():
        *block, num_warps = tile
        grid = (triton.cdiv(M, tile[0]), triton.cdiv(N, tile[1]))
        made = tile_kernel[grid](a, b, c, M, N, K, *block, num_warps=num_warps)
        read, _ = tiles_read(M, N, K, *tile[:2])
        print(
            f"{block}, {num_warps} warps: {rate(M, N, K, times):4.0f} TFLOP/s,"
            f" {2 * read / 1e9:5.1f} GB read, {made.n_regs:3} registers,"
            f" {made.n_spills} spilled, {made.metadata.shared:,} bytes of"
            " shared memory"
        )

# %%
# What becomes of tl.dot?
# -----------------------
#
# The size of a tile also decides which instruction multiplies. A *tensor core*
# multiplies small matrices of a fixed size at once, and ``tl.dot`` becomes as
# many of these instructions as its tiles hold. No GPU is needed to see which:
# the compiler runs here for an H100, in a child process, and we look for its
# instructions in the PTX.

COMPILER = r"""
import json, re, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNEL

def instruction(dtype, precision, *tile):
    names = dot_kernel.arg_names
    types = {name: "*" + dtype for name in names[:2]} | {names[2]: "*fp32"}
    known = dict(zip(names[3:], (precision, *tile)))
    types |= dict.fromkeys(known, "constexpr")
    source = triton.compiler.ASTSource(dot_kernel, types, known)
    try:
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except triton.CompilationError as error:
        return f"refused: {error}".strip().splitlines()[-1]
    found = re.findall(r"(wgmma|mma)\S*?(m\d+n\d+k\d+)", made.asm["ptx"])
    return " ".join(found[0]) if found else "fma, on no tensor core"

print(json.dumps([instruction(*row) for row in json.loads(sys.argv[1])]))
"""


@triton.jit
def dot_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    offs_m = tl.arange(0, M)[:, None]  # (M, 1)
    offs_n = tl.arange(0, N)[None, :]  # (1, N)
    offs_k = tl.arange(0, K)  # (K,)
    a = tl.load(a_ptr + offs_m * K + offs_k[None, :])  # (M, K)
    b = tl.load(b_ptr + offs_k[:, None] * N + offs_n)  # (K, N)
    c = tl.dot(a, b, input_precision=PRECISION)  # (M, N)
    tl.store(c_ptr + offs_m * N + offs_n, c)


DOTS = [
    ("fp16", "ieee", 128, 128, 64),
    ("fp16", "ieee", 64, 64, 16),
    ("fp16", "ieee", 16, 64, 16),
    ("fp16", "ieee", 64, 64, 8),
    ("fp32", "tf32", 64, 64, 16),
    ("fp32", "ieee", 64, 64, 16),
]


def instructions(rows):
    """Return what tl.dot of each row's type and tiles becomes on an H100."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compiler.py")
        kernel = textwrap.dedent(inspect.getsource(dot_kernel.fn))
        file.write_text(COMPILER.replace("KERNEL", kernel))
        command = [sys.executable, str(file), json.dumps(rows)]
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    table = pd.DataFrame(DOTS, columns=["type", "precision", "M", "N", "K"])
    table["instruction"] = instructions(DOTS)
    print(table.to_string(index=False))

# %%
# ``wgmma`` is the instruction of Hopper: four warps together multiply 64 rows.
# With fewer than 64 rows, the compiler takes ``mma`` of earlier GPUs, 16 rows
# for each warp. A tile with fewer rows than that is filled up with zeros. So
# tiles should be multiples of an instruction's shape, and with fewer than 16
# steps of ``K`` there is no instruction at all. The last two rows are about
# float32: a tensor core takes it only after rounding it to *TF32*, which has 11
# significant bits instead of 24. *Break it* shows what that does. Exact float32
# goes to the ordinary units, and needs smaller tiles, as each number takes a
# register of 32 bits.

# %%
# Operands that lie otherwise
# ---------------------------
#
# ``torch.nn.Linear`` multiplies with a transposed weight. A transpose in
# PyTorch copies nothing. It exchanges the *strides*, which say how far apart
# neighbours in a row and in a column lie. The first kernel takes for granted
# that rows are contiguous, so its result is wrong:

if __name__ == "__main__":
    a, weight = random(64, 64), random(64, 64)
    b = weight.T
    wrong = (tile_matmul(a, b) - a.double() @ b.double()).abs().max()
    print(f"b has strides {b.stride()}; the error is {wrong:.1f}")
    assert wrong > 1

# %%
# A copy of ``b`` would be right, at the price of reading and writing it once.
# The op's kernel takes strides instead:
#
# .. code-block:: text
#
#     address of a[m, k] = a_ptr + m * stride_am + k * stride_ak
#
# Does that cost speed? A launch compiles a kernel anew where an integer is 1,
# with 1 as a constant. So the compiler knows along which dimension the numbers
# are neighbours, and loads 16 bytes at once along that one. The table after the
# op has the four ways to lay out two operands.
#
# The backward needs two products, of transposed operands:
#
# .. math:: \nabla a = g\,b^T, \qquad \nabla b = a^T g.
#
# As a transpose costs nothing, the backward is the op itself, called twice.

# %%
# The op
# ------
#
# The op counts its tiles in one dimension: a grid may have only 65535 programs
# in the others. A tile has 128 rows and columns in half precision and 64 in
# float32 and float64. It is smaller where the matrix is: a single row takes a
# tile of 16. Float32 is multiplied exactly, as in PyTorch, unless
# ``input_precision`` says otherwise.

MATMUL_NAMESPACE = "triton_gallery"
# How far a tile reaches along M and N, and along K
MATMUL_TILES = {
    torch.float16: (128, 64),
    torch.bfloat16: (128, 64),
    torch.float32: (64, 32),
    torch.float64: (64, 16),
}


@triton.jit
def _matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32, an offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = pid // tiles_n, pid % tiles_n
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # In a transposed operand, k times its stride may be past 2**31 as well.
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # (BLOCK_K,)
    step = tl.cast(BLOCK_K, tl.int64)
    a_ptrs = a_ptr + offs_m * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for start in range(0, K, BLOCK_K):
        # Zeros past the end of K add nothing. Both need them: NaN * 0 is NaN.
        a_mask = (offs_m < M) & (offs_k[None, :] < K - start)
        b_mask = (offs_k[:, None] < K - start) & (offs_n < N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)  # (BLOCK_M, BLOCK_K)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)  # (BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        # Stepping the pointers is cheaper than computing them from k again.
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    c_mask = (offs_m < M) & (offs_n < N)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


def _matmul_block(size, most):
    """Return the block for a dimension: tl.dot wants 16 at least."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _matmul_check(a, b, input_precision):
    if a.dtype not in MATMUL_TILES:
        raise TypeError(f"matmul takes float matrices, not {a.dtype}")
    if b.dtype != a.dtype or b.device != a.device:
        raise TypeError(
            "matmul takes matrices of one dtype on one device, not "
            f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "matmul takes matrices of (M, K) and (K, N), not "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if input_precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(
            "matmul takes ieee, tf32 or tf32x3 as input_precision, not "
            f"{input_precision}"
        )


def _matmul_launch(a, b, input_precision="ieee", kernel=_matmul_kernel):
    _matmul_check(a, b, input_precision)
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c
    most, BLOCK_K = MATMUL_TILES[a.dtype]
    BLOCK_M, BLOCK_N = _matmul_block(M, most), _matmul_block(N, most)
    if triton.knobs.runtime.interpret and a.dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        a, b = a.float(), b.float()
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        kernel[grid](
            a,
            b,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            ACC=tl.float64 if a.dtype == torch.float64 else tl.float32,
            PRECISION=input_precision,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=8 if BLOCK_M * BLOCK_N == 128 * 128 else 4,
            num_stages=3,
        )
    return c


@triton_op(f"{MATMUL_NAMESPACE}::matmul", mutates_args={})
def matmul(
    a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee"
) -> torch.Tensor:
    """Return the matrix product of a (M, K) and b (K, N), of shape (M, N).

    Takes two matrices of float16, bfloat16, float32 or float64, both of one
    dtype, with any strides. Sums are kept in float32, or float64 for float64.
    The result has their dtype, is contiguous, and is the same each time.
    ``input_precision`` is for float32 alone: "ieee" multiplies exactly, "tf32"
    rounds each input to 11 significant bits for the tensor cores, and "tf32x3"
    makes up for most of that with three products. Raises TypeError for other
    dtypes or two that differ, and ValueError for other shapes. Has a gradient,
    in the same precision, of any order.
    """
    kernel = wrap_triton(_matmul_kernel)
    return _matmul_launch(a, b, input_precision, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
MATMUL_LIBRARY = Library(MATMUL_NAMESPACE, "FRAGMENT")
MATMUL_LIBRARY.impl("matmul", _matmul_launch, "CUDA")


def _matmul_setup(ctx, inputs, output):
    a, b, ctx.input_precision = inputs
    ctx.save_for_backward(a, b)


def _matmul_gradient(ctx, grad):
    a, b = ctx.saved_tensors
    precision = ctx.input_precision
    by_a, by_b = ctx.needs_input_grad[:2]
    grad_a = matmul(grad, b.T, precision) if by_a else None
    grad_b = matmul(a.T, grad, precision) if by_b else None
    return grad_a, grad_b, None


matmul.register_autograd(_matmul_gradient, setup_context=_matmul_setup)

# %%
# What did each step gain? The rates are those of 4096 x 4096 x 4096 in float16.
# The first letter says how ``a`` lies and the second how ``b`` does: ``n`` is
# contiguous, ``t`` a transposed view. A spilled register is one that a thread
# keeps in memory, because it has not enough of them.


def statements(kernel):
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - 1


def laid_out(how, M, N, K):
    """Return two random matrices, each contiguous (n) or a transpose (t)."""
    a = random(M, K) if how[0] == "n" else random(K, M).T
    b = random(K, N) if how[1] == "n" else random(N, K).T
    return a, b


STEPS = {"tiles of 64": (tile_matmul, "nn", tile_kernel)}
STEPS["tiles of 128"] = (
    partial(tile_matmul, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8),
    "nn",
    tile_kernel,
)
for how in ("nn", "nt", "tn", "tt"):
    STEPS[f"the op, {how}"] = (matmul, how, _matmul_kernel)

if __name__ == "__main__" and DEVICE.type == "cuda":
    tried = {}
    for name, (step, how, _) in STEPS.items():
        a, b = laid_out(how, 4096, 4096, 4096)
        tried[name] = partial(step, a, b)
        tried[f"cuBLAS, {how}"] = partial(torch.matmul, a, b)
    found = gpu_time(tried, turns=20)
    ladder = pd.DataFrame(index=list(found))
    ladder["TFLOP/s"] = [
        round(rate(4096, 4096, 4096, times)) for times in found.values()
    ]
    ladder["statements"] = [
        statements(STEPS[name][2]) if name in STEPS else "" for name in found
    ]
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare every dtype with float64: ragged shapes, a single row, and each
# layout. An empty ``K`` is a sum of nothing, so the result is zero. In float64
# the reference is rounded itself, so a sum may be off by twice the bound of
# one.


def prove(M, N, K, dtype, how):
    a, b = laid_out(how, M, N, K)
    a, b = a.double().to(dtype), b.double().to(dtype)
    out, (expected, _) = matmul(a, b), error_bound(a, b, rounding=0)
    s = a.double().abs() @ b.double().abs()
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    allowed = 2 * (K + 1) * unit * s
    allowed += torch.finfo(dtype).eps * expected.abs()
    assert out.dtype == dtype
    assert out.shape == (M, N)
    assert ((out.double() - expected).abs() <= allowed).all()


SHAPES = [(1, 1, 1), (1, 130, 70), (150, 40, 65), (20, 30, 0), (0, 3, 4)]

if __name__ == "__main__":
    for dtype in MATMUL_TILES:
        for shape in SHAPES:
            for how in ("nn", "nt", "tn", "tt"):
                prove(*shape, dtype, how)

# %%
# Rows that lie apart, and one row repeated: strides may be anything, 0 too.
# ``gradcheck`` compares the gradient with finite differences, and
# ``gradgradcheck`` the gradient's own gradient. What stands past the end of
# ``K`` must not be read, even if it is NaN:

x = random(40, 90, dtype=torch.float32)
for view in (x[:, :37], x[::2, 3:40], x[:1].expand(9, 90)[:, 5:42]):
    torch.testing.assert_close(
        matmul(view, x[:37]), view @ x[:37], rtol=1e-4, atol=1e-4
    )

if __name__ == "__main__":
    a = random(3, 5, dtype=torch.float64).requires_grad_()
    b = random(5, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(matmul, (a, b))
    assert torch.autograd.gradgradcheck(matmul, (a, b))

    padded = torch.full((20, 64), torch.nan, device=DEVICE)
    padded[:, :50] = 1
    out = matmul(padded[:, :50], padded[:, :50].T)
    torch.testing.assert_close(out, torch.full_like(out, 50))

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    a = torch.ones(2, 3, device=DEVICE)
    for b in (a, a.half().T, a.T[None]):
        try:
            matmul(a, b)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# Tokens of a batch times a weight of 4096 x 14336, as in a model's feed-forward
# layer, in bfloat16. The weight is transposed, as in ``torch.nn.Linear``. The
# backward computes both gradients, so it does twice as many operations.

TOKENS = [16, 64, 256, 1024, 2048, 4096, 8192]


def layer(tokens):
    x = random(tokens, 4096, dtype=torch.bfloat16)
    return x, random(14336, 4096, dtype=torch.bfloat16).T


def calls_forward(tokens):
    x, weight = layer(tokens)
    ops = {"Triton": matmul, "cuBLAS": torch.matmul}
    return {name: partial(op, x, weight) for name, op in ops.items()}


def calls_backward(tokens):
    x, weight = (t.requires_grad_() for t in layer(tokens))
    grad = partial(torch.autograd.grad, retain_graph=True)
    found = {}
    for name, op in {"Triton": matmul, "cuBLAS": torch.matmul}.items():
        out = op(x, weight)
        found[name] = partial(grad, out, (x, weight), torch.ones_like(out))
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    layers = 2e-9 * 4096 * 14336
    times = {tokens: gpu_time(calls_forward(tokens)) for tokens in TOKENS}
    results = rate_table(times, "tokens", "TFLOP/s", lambda n: layers * n)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {tokens: gpu_time(calls_backward(tokens)) for tokens in TOKENS}
    results_backward = rate_table(
        times, "tokens", "TFLOP/s", lambda n: 2 * layers * n
    )
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(
        index="tokens", columns="series", values="TFLOP/s"
    )
    wide.plot(logx=True, title="backward")

# %%
# Reading the result
# ------------------
#
# Few tokens are another problem: there the weight has to be read, and its bytes
# decide, not the arithmetic. ``skinny_matmul.py`` is about them. With many
# tokens, this kernel has three things left to do. Its programs start row by
# row, whatever they share in the L2 cache, and ``num_stages`` is a guess:
# ``tile_order.py`` looks into both. Its threads compute addresses and masks
# while the tensor cores could work, and no program loads the next tile while it
# stores the last: ``persistent_matmul.py`` hands the loads to the copy engine.

# %%
# Break it
# --------
#
# Leave ``input_precision`` out of a kernel, and a float32 product differs from
# PyTorch's in the third or fourth digit. On NVIDIA GPUs the default of
# ``tl.dot`` is ``"tf32"``, while PyTorch's default is exact. Rounding to TF32
# keeps 11 significant bits, so each factor may be off by :math:`2^{-11}`, and
# their product by :math:`2^{-10}`. The error of a sum is at most
#
# .. math:: (2^{-10} + K\,2^{-23})\,s \quad\text{in TF32, and}\quad
#    K\,2^{-23}\,s \quad\text{in float32.}
#
# Which tolerance tells the two apart? The second bound is the worst case: all
# ``K`` roundings are as large as they can be, and go the same way. Roundings go
# either way, so their sum grows like :math:`\sqrt K`. The table has each error
# as a part of :math:`\sqrt K\,2^{-23} s`, and of the worst case. On a GPU, the
# kernel rounds to TF32. The interpreter does not, so PyTorch does it below, and
# multiplies in float64. ``tf32x3`` splits a factor into its TF32 and the rest,
# and adds three products of these.


def to_tf32(x):
    """Return float32 numbers rounded to 11 significant bits."""
    bits = x.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def three_products(a, b):
    """Return what tf32x3 adds up, in float64."""
    a_large, b_large = to_tf32(a), to_tf32(b)
    a_rest, b_rest = to_tf32(a - a_large), to_tf32(b - b_large)
    out = a_large.double() @ b_large.double()
    out += a_rest.double() @ b_large.double()
    return out + a_large.double() @ b_rest.double()


def precisions(K):
    """Return the errors of float32 products, beside two tolerances."""
    a = random(64, K, dtype=torch.float32)
    b = random(K, 64, dtype=torch.float32)
    rounded = to_tf32(a).double() @ to_tf32(b).double()
    products = {
        "PyTorch": a @ b,
        "matmul": matmul(a, b),
        "matmul, tf32": matmul(a, b, "tf32"),
        "matmul, tf32x3": matmul(a, b, "tf32x3"),
        "TF32, by hand": rounded,
        "tf32x3, by hand": three_products(a, b),
    }
    expected, worst = error_bound(a, b, rounding=0.0)
    table = pd.DataFrame(index=list(products))
    errors = [(out - expected).abs() for out in products.values()]
    table["largest error"] = [f"{e.max():.1e}" for e in errors]
    likely = worst / K**0.5
    table["of sqrt(K)"] = [(e / likely).max().item() for e in errors]
    table["of worst case"] = [(e / worst).max().item() for e in errors]
    return table


if __name__ == "__main__":
    for K in (64, 1024):
        table = precisions(K)
        print(f"K = {K}", table.round(3).to_string(), sep="\n")
        assert (table.loc[["PyTorch", "matmul"], "of sqrt(K)"] <= 1).all()
        assert table.loc["TF32, by hand", "of sqrt(K)"] > 1

# %%
# The tolerance that grows like :math:`\sqrt K` finds TF32 at both lengths. The
# worst case finds it at the shorter one alone. A fixed ``rtol`` does neither:
# where a sum cancels, any error is large beside it. So derive a tolerance from
# ``K``, from ``s`` and from the type that is multiplied.

# %%
# Go further
# ----------
#
# 1. ``acc`` is float32. What does the first kernel do with
#    ``out_dtype=tl.float16`` and an accumulator of float16, for ones and
#    ``K = 4096``?
# 2. ``a_mask`` guards the rows of ``a``, though rows past ``M`` are never
#    stored. What is it there for? And the mask along ``K``?
#
# To read on:
#
# * ``tile_order.py`` has this kernel's programs share the L2 cache, and looks
#   at what ``num_stages`` does.
# * `NVIDIA's guide to matrix products
#   <https://docs.nvidia.com/deeplearning/performance>`_, with the shapes that
#   tensor cores like.

# %%
# Answers
# -------
#
# **1.** A float16 has 11 significant bits, so past 2048 adding 1 changes
# nothing. ``tl.dot`` adds up a tile before it touches the accumulator: with
# ``BLOCK_K = 32`` the steps are 32 large, and the sum still reaches 4096. The
# error shows where terms are no powers of two.
#
# **2.** Rows past ``M`` lie past the end of the matrix. To read there may be an
# illegal access. Past ``K`` the mask decides about the value: the next row's
# numbers would be added.
