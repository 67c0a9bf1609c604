# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Build the plainest matrix product that uses the tensor cores, and each number
# many times, and make an op of it."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Matrix multiplication (matmul)
==============================

A matrix product does far more arithmetic than a softmax or a norm for each
number that it reads. To be fast, a kernel has to use each number many times
before it lets go of it. This page builds the plainest kernel that does so, on
the GPU's tensor cores, and makes an op of it.

After this page you can

* divide a product into tiles, and say how often each number is read;
* loop over ``K`` with ``tl.dot`` and an accumulator in float32;
* mask the ragged edges of all three matrices;
* read operands of any layout, so that no transpose is copied;
* say which error a product may have, and test that it is not that of TF32.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "autograd"]
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path

import pandas as pd
import torch

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

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.counting import statements

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
# By their data sheets, an H100 and an H200 do 200 to 300 operations in float16
# for each byte that they read. A softmax has fewer, and waits for memory. A
# large product has more, if it reads each matrix about once. But an element of
# ``c`` needs a whole row and a whole column. So a program computes a *tile* of
# ``c``, and uses what it has read for many elements.

# %%
# The first kernel
# ----------------
#
# A program cannot hold all ``K`` columns of its rows. It goes along ``K`` in
# steps of ``BLOCK_K``. In each step it loads a tile of ``a`` and one of ``b``.
# ``tl.dot(a, b, acc)`` returns ``acc + a @ b``, where ``acc`` is the program's
# tile of ``c``, the *accumulator*. It stays in registers:
#
# .. code-block:: text
#
#     step 0, 1, 2                        N
#                            +-------+-------+-------+
#                            |       | b 0   |       |
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
        # In b, k is a row and is multiplied by N, so int64 here too.
        offs_k = start + tl.arange(0, BLOCK_K).to(tl.int64)  # (BLOCK_K,)
        k_of_a, k_of_b = offs_k[None, :], offs_k[:, None]
        # Past K, the next row's numbers would be added to the sum.
        a_mask = (offs_m < M) & (k_of_a < K)  # (BLOCK_M, BLOCK_K)
        b_mask = (k_of_b < K) & (offs_n < N)  # (BLOCK_K, BLOCK_N)
        a = tl.load(a_ptr + offs_m * K + k_of_a, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k_of_b * N + offs_n, mask=b_mask, other=0.0)
        # A float16 accumulator would be rounded to float16 at every step.
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
# of ``K`` additions is rounded, or cut off, by at most :math:`2^{-23}` of its
# largest number. None is larger than :math:`s = \sum_k |a_{mk}\,b_{kn}|`, so
# the accumulator is off by at most :math:`K\,2^{-23} s`. The store rounds the
# result by at most :math:`2^{-11}` of it.


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
# ``torch.matmul`` calls NVIDIA's library cuBLAS. cuBLAS is what we compare
# with. The rate counts :math:`2 M N K` operations.


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
# A number of ``a``, once read, serves the ``BLOCK_N`` columns of a tile. So
# ``N / BLOCK_N`` programs read it, and ``M / BLOCK_M`` programs read each
# number of ``b``. Let us count what all programs of a product read together:


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
# A larger tile reads less. None of them has 200 operations a byte: the rest is
# up to the L2 cache, as programs side by side read the same tiles. What limits
# a tile? A multiprocessor has 65536 registers, and a thread has at most 255. An
# accumulator of 128 x 256 is 128 registers for each of 256 threads, which are 8
# warps. One of 256 x 256 would need 256 in a thread, one too many. The tiles of
# ``a`` and ``b`` wait in *shared memory*, a few steps ahead of the one that is
# multiplied (``tile_order.py`` is about that). Three steps of 64 for a tile of
# 128 x 128 are ``3 * (128 + 128) * 64 * 2`` bytes, 96 KiB, of the 227 KiB that
# a program may have. We time four tiles. A spilled register is one that a
# thread keeps in memory, because it has not enough of them:

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
# the compiler runs here for an H100, in a child process. We look for the
# instructions in its *PTX*, the assembly of NVIDIA's GPUs.

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
        return "refused: " + str(error).strip().splitlines()[-1]
    found = re.findall(r"(wgmma|mma)\S*?(m\d+n\d+k\d+)", made.asm["ptx"])
    before = "cvt.rna.tf32, " if "cvt.rna.tf32" in made.asm["ptx"] else ""
    return before + " ".join(found[0]) if found else "fma, on no tensor core"

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
    ("fp32", "ieee", 64, 64, 16),
    ("fp32", "tf32", 64, 64, 16),
    ("fp32", "tf32x3", 64, 64, 16),
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
# ``wgmma`` is the instruction of Hopper, the H100 and H200: four warps together
# multiply 64 rows. With fewer than 64 rows, the compiler takes ``mma`` of
# earlier GPUs, which has 16 rows. So a tile should be a multiple of an
# instruction's shape, and fewer than 16 rows gain nothing. Triton refuses a
# ``BLOCK_K`` below 16. The last three rows are float32. All its 24 bits need
# ordinary arithmetic, ``fma``. A tensor core takes *TF32*, with 11 bits.
# ``tf32x3`` multiplies three times, to make up for that. *Break it* shows what
# the missing bits do.

# %%
# Transposed and strided operands
# -------------------------------
#
# ``torch.nn.Linear`` multiplies with a transposed weight. A transpose in
# PyTorch copies nothing. It exchanges the *strides*, which say how far apart
# neighbours in a row and in a column lie. The first kernel reads ``weight`` as
# if it were not transposed, so its result is wrong:

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
# with 1 as a constant, and where 16 divides it. So the compiler knows along
# which dimension the numbers are neighbours. If 16 divides the other stride and
# the sizes, it copies 16 bytes at once. In a matrix of odd width it loads each
# number alone. The table after the op has the four ways to lay out two
# operands, and an odd size.
#
# The backward: :math:`c_{mn}` has :math:`a_{mk}` with the factor
# :math:`b_{kn}`, so the gradient of :math:`a_{mk}` is
# :math:`\sum_n g_{mn}\,b_{kn}`:
#
# .. math:: \nabla a = g\,b^T, \qquad \nabla b = a^T g.
#
# These are products of transposed operands, which need no copy. So the backward
# is the op itself, called twice.

# %%
# The op
# ------
#
# The op counts its tiles row by row, in one number: in its second and third
# dimension, a grid may have only 65535 programs. A tile has 128 rows and 256
# columns in half precision, and 64 of each in float32 and float64. It is
# smaller where the matrix is: a row takes a tile of 16. ``num_stages`` is how
# many steps wait in shared memory. Float32 has all its bits, as in PyTorch,
# unless ``input_precision`` says otherwise. One program owns a tile and goes
# along ``K`` in order, so the result is deterministic. The op is registered as
# ``what_a_call_costs.py`` shows.

from triton_gallery_ops.matmul import MATMUL_TILES, _matmul_kernel, matmul

# %%
# What did each step gain? The rates are those of 4096 x 4096 x 4096 in float16,
# and of 4095 x 4095 x 4095. The first letter says how ``a`` lies and the second
# how ``b`` does: ``n`` is contiguous, ``t`` a transposed view.


def laid_out(how, M, N, K, dtype=torch.float16):
    """Return two random matrices, each contiguous (n) or a transpose (t)."""
    made = partial(random, dtype=dtype)
    a = made(M, K) if how[0] == "n" else made(K, M).T
    b = made(K, N) if how[1] == "n" else made(N, K).T
    return a, b


LARGE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8}
STEPS = {
    "tiles of 64": (tile_matmul, tile_kernel, "nn", 4096),
    "tiles of 128 x 256": (
        partial(tile_matmul, **LARGE),
        tile_kernel,
        "nn",
        4096,
    ),
    "the op, nn": (matmul, _matmul_kernel, "nn", 4096),
    "the op, nt": (matmul, _matmul_kernel, "nt", 4096),
    "the op, tn": (matmul, _matmul_kernel, "tn", 4096),
    "the op, tt": (matmul, _matmul_kernel, "tt", 4096),
    "the op, odd": (matmul, _matmul_kernel, "nn", 4095),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [
        statements(kernel) for _, kernel, *_ in STEPS.values()
    ]
    tried = {}
    for name, (step, _, how, N) in STEPS.items():
        operands = laid_out(how, N, N, N)
        tried[name, "Triton"] = partial(step, *operands)
        tried[name, "cuBLAS"] = partial(torch.matmul, *operands)
    for (name, who), times in gpu_time(tried, turns=20).items():
        N = STEPS[name][3]
        ladder.loc[name, f"{who}, TFLOP/s"] = round(rate(N, N, N, times))
    print(ladder.to_string())

# %%
# No operand is copied, but not every layout is as fast: with a transposed
# ``b``, the op reaches less of cuBLAS. In an odd size, a thread of the op loads
# each number alone. cuBLAS is far slower there too, and no roof:
# ``torch.compile`` has a much higher rate in ``tuned_matmul.py``, which looks
# into both cases. With the same tile, the op is faster than the first kernel.
# Two things differ: the op steps its pointers, and its tiles come in another
# order. The table does not tell the two apart.

# %%
# Proof
# -----
#
# We compare every dtype with float64: ragged shapes, a single row, several
# tiles, and each layout. An empty ``K`` is a sum of nothing, so the result is
# zero. In float64, the unit is :math:`2^{-52}`, and the reference is rounded as
# well, so we allow twice the bound. The last rounding may be a whole ``eps``:
# the interpreter cuts bfloat16 off.
#
# .. note::
#
#    Without a GPU, all this runs in Triton's interpreter. A kernel that is
#    right there may be wrong on a GPU, or not compile: ``interpreter.md`` says
#    what differs.


def prove(M, N, K, dtype, how):
    a, b = laid_out(how, M, N, K, dtype)
    out, (expected, bound) = matmul(a, b), error_bound(a, b, rounding=0.0)
    if dtype == torch.float64:
        bound = 2 * bound * 2.0**-52 / 2.0**-23
    bound += torch.finfo(dtype).eps * expected.abs()
    assert out.dtype == dtype
    assert out.shape == (M, N)
    assert ((out.double() - expected).abs() <= bound).all()


SHAPES = [(1, 1, 1), (1, 130, 70), (150, 260, 65), (128, 256, 64)]
SHAPES += [(20, 30, 0), (0, 3, 4)]

if __name__ == "__main__":
    for dtype in MATMUL_TILES:
        for shape in SHAPES:
            for how in ("nn", "nt", "tn", "tt"):
                prove(*shape, dtype, how)

# %%
# Rows that lie apart, and one row repeated: strides may be anything, 0 too.
# ``gradcheck`` compares the gradient with finite differences, and
# ``gradgradcheck`` the gradient's own gradient. Elements past the end of ``K``
# must not be read, even if they are NaN:

if __name__ == "__main__":
    x = random(40, 90, dtype=torch.float32)
    for view in (x[:, :37], x[::2, 3:40], x[:1].expand(9, 90)[:, 5:42]):
        expected, bound = error_bound(view, x[:37], rounding=2.0**-24)
        assert ((matmul(view, x[:37]) - expected).abs() <= bound).all()

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
    g = random(tokens, 14336, dtype=torch.bfloat16)
    grad = partial(torch.autograd.grad, retain_graph=True)
    found = {}
    for name, op in {"Triton": matmul, "cuBLAS": torch.matmul}.items():
        out = op(x, weight)
        found[name] = partial(grad, out, (x, weight), g)
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
# tokens, the weight is a transposed ``b``, as in the slower rows of the table
# above. Neither product of the backward has a transposed ``b``; from 1024
# tokens on it comes closer to cuBLAS. With fewer tokens it is further away than
# the forward. ``tuned_matmul.py`` measures what a transposed ``b`` costs.
# Three more things are left to do. The programs of this kernel start
# row by row, whatever they share in the L2 cache: ``tile_order.py`` measures
# what another order gains, and other numbers of stages. Its threads compute
# addresses and masks and hold them in registers, and no program loads the next
# tile while it stores the last: ``persistent_matmul.py`` hands the loads to the
# copy engine.
#
# A call costs the CPU more than one of cuBLAS does. Called one by one, small
# products wait for the CPU; in a CUDA graph (``cuda_graphs.py``) they do not.

# %%
# Break it
# --------
#
# Leave ``input_precision`` out of a kernel, and a float32 product differs from
# PyTorch's in the third or fourth digit. On NVIDIA GPUs, the default of
# ``tl.dot`` is ``"tf32"``, while PyTorch's default is all 24 bits. In the table
# of instructions, nothing before ``wgmma`` rounds a number to TF32: the tensor
# core leaves out the last 13 bits. A factor is off by up to :math:`2^{-10}` of
# itself, always towards zero, so
#
# .. math:: |\text{error}| \le (2^{-9} + K\,2^{-23})\,s
#    \quad\text{and not}\quad K\,2^{-23}\,s.
#
# With ``tf32x3``, a factor is the sum of two numbers in TF32, :math:`a = a_1 +
# a_2`, and the result is :math:`a_1 b_1 + a_1 b_2 + a_2 b_1`. What is left out,
# :math:`a_2 b_2`, is below :math:`2^{-22}` of :math:`a b`.
#
# Would a test notice TF32? The table has the errors as parts of
# :math:`K\,2^{-23} s`. Some operands are random. The others are ``1 + 2**-12``
# everywhere, which TF32 takes for 1. Without a GPU, the kernel has all 24 bits
# whatever it is asked for, so PyTorch leaves out the bits below.


def to_tf32(x):
    """Return float32 numbers without their last 13 bits."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def precisions(a, b):
    """Return the errors of products, as parts of the bound in float32."""
    products = {
        "PyTorch": a @ b,
        "matmul": matmul(a, b),
        "matmul, tf32": matmul(a, b, "tf32"),
        "matmul, tf32x3": matmul(a, b, "tf32x3"),
        "11 bits, in float64": to_tf32(a).double() @ to_tf32(b).double(),
    }
    expected, bound = error_bound(a, b, rounding=0.0)
    return {
        name: ((out - expected).abs() / bound).max().item()
        for name, out in products.items()
    }


if __name__ == "__main__":
    table = pd.DataFrame()
    for K in (64, 2048):
        a = random(64, K, dtype=torch.float32)
        b = random(K, 64, dtype=torch.float32)
        table[f"random, K = {K}"] = precisions(a, b)
        alike = torch.full_like(a, 1 + 2**-12), torch.full_like(b, 1 + 2**-12)
        table[f"1 + 2**-12, K = {K}"] = precisions(*alike)
    print(table.map("{:.1e}".format).to_string())
    assert (table.loc[["PyTorch", "matmul"]] <= 1).all(axis=None)
    notices = table.loc["11 bits, in float64"] > 1
    assert notices.tolist() == [True, True, False, True]

# %%
# With random operands, the errors of many terms partly cancel, and the bound of
# the longer sum is too wide to notice TF32. If all operands are ``1 + 2**-12``,
# nothing cancels: the error is about :math:`2^{-11} s` at any length. So choose
# the operands of a test by what it has to notice, and derive its tolerance from
# ``K``, from ``s`` and from the type. A fixed ``rtol`` does neither: where a
# sum cancels, any error is large beside it.

# %%
# Go further
# ----------
#
# 1. ``acc`` is float32. Let it be float16, with ``out_dtype=tl.float16``, in
#    the first kernel. Does it add up 4096 ones? And 4096 times 0.1?
# 2. ``a_mask`` guards the rows of ``a``, though rows past ``M`` are never
#    stored. What is it there for? And along ``K``, would one of both masks do?
#
# To read on:
#
# * ``tile_order.py`` has this kernel's programs share the L2 cache, and looks
#   at what ``num_stages`` does. ``tuned_matmul.py`` looks at the loads and
#   waits of each layout, and has a tile for each shape.
# * `NVIDIA's guide to matrix products
#   <https://docs.nvidia.com/deeplearning/performance>`_, with the shapes that
#   tensor cores like.

# %%
# Answers
# -------
#
# **1.** A float16 has 11 significant bits, so past 2048 its neighbours are 2
# apart. But ``tl.dot`` adds up several products before it adds them to the
# accumulator, here 32, so ones still reach 4096. Terms of 0.1 are rounded at
# every step, to something other than 409.5.
#
# **2.** Rows past ``M`` lie past the end of the matrix. To read there may be an
# illegal access. Along ``K``, the zeros of one operand cancel what the other
# has read, if that is finite. If it is NaN or inf, the product with 0 is NaN.
