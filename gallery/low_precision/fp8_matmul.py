# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply float8 matrices and scale the result's tile, see what a tensor core's
# sum loses, and train a layer whose three products are in float8."""
# dtypes = ["float8_e4m3fn", "float8_e5m2"]
# backward = false
# deterministic = true
# longer = "the product, and a layer that quantizes, with both gradients"
#
# [[tool.triton-gallery.step_through]]
# kernel = "product_kernel"
# caption = """
# Two programs, a tile of the result each. The tile is the sum of two products,
# times the scales of its rows and columns. The last column is masked."""
# registers = ["x", "w", "acc", "y"]
# inputs = { x = "integers(-2, 3, 4, 8)", w = "integers(-2, 3, 7, 8)" }
# call = "product(x, w, SX, SW, SMALL)"
# expected = { y = "(x * SX) @ (w * SW[:, None]).T" }
# start = [1, 0]
# ///
r"""
FP8 matrix products, scaled per tensor and per row
==================================================

The tensor cores of an H100 multiply 8-bit floats twice as fast as 16-bit ones,
and the matrices are half the bytes. A float8 number means little without its
scale (``quantize.py``), so a product takes two matrices and their scales. This
page puts the scales where they cost nothing, measures what the tensor cores'
own sum loses, and trains a layer in float8.

After this page you can

* multiply float8 matrices with a scale for each row;
* say what fast accumulation loses, and when that matters;
* make a linear layer whose result and gradients are float8 products.
"""

# sphinx_gallery_tags = ["matmul", "float8", "quantization", "autograd"]
import os
from functools import partial

import matplotlib.pyplot as plt
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

# %%
# In PyTorch
# ----------
#
# A *scale* of each row of ``x`` and of each row of the weight turns float8 back
# into what it stands for. In a product of two such matrices the scales of row m
# and of column n are the same for all terms of the sum over K:
#
# .. math:: y_{mn} = \sum_k (s_m x_{mk}) (t_n w_{nk})
#    = s_m t_n \sum_k x_{mk} w_{nk}.
#
# So the product is of the float8 numbers alone, and its result is scaled once.
# PyTorch has this as ``scaled_mm``; written out, in float64:

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
generator = torch.Generator(device=DEVICE).manual_seed(0)


def exact(x, w, scale_x, scale_w):
    """Return the product in float64."""
    return (x.double() * scale_x) @ (w.double() * scale_w[:, None]).T


def random(rows, K, dtype=E4M3):
    """Return a float8 matrix of normal numbers, and a scale for each row."""
    x = torch.randn(rows, K, generator=generator, device=DEVICE)
    scale = torch.rand(rows, generator=generator, device=DEVICE) + 0.5
    return x.to(dtype), scale


if __name__ == "__main__":
    (x, scale_x), (w, scale_w) = random(8192, 4096), random(2048, 4096)
    print(f"{2e-9 * 8192 * w.numel():.0f} GFLOP, {x.nbytes + w.nbytes:,} bytes")
    print(f"of float8, {scale_x.nbytes + scale_w.nbytes:,} bytes of scales")

# %%
# The first kernel
# ----------------
#
# It is the plain product of ``matmul.py``, with two differences. K is
# contiguous in both matrices, because the tensor cores read float8 only that
# way: a weight (N, K), as ``torch.nn.Linear`` has it. And the tile is
# multiplied by its scales before it is stored. Only N has a mask: M and K are
# multiples of the tile's.


@triton.jit
def product_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask = offs_n < N  # (BLOCK_N,)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :].to(tl.int64) * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k)  # (BLOCK_M, BLOCK_K)
        w = tl.load(w_ptrs + k, mask=mask[None, :], other=0.0)
        acc = tl.dot(x, w, acc, max_num_imprecise_acc=IMPRECISE)
    scale_x = tl.load(scale_x_ptr + offs_m)  # (BLOCK_M,)
    scale_w = tl.load(scale_w_ptr + offs_n, mask=mask, other=0.0)
    y = acc * scale_x[:, None] * scale_w[None, :]  # (BLOCK_M, BLOCK_N)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask[None, :])


LARGE, SMALL = (128, 128, 128), (4, 4, 4)
SX = torch.tensor([[1.0], [2], [1], [3]])  # for the figure
SW = torch.tensor([1.0, 1, 2, 1, 1, 2, 1])


def product(x, w, scale_x, scale_w, BLOCKS=LARGE, dtype=None, IMPRECISE=None):
    """Return (x * scale_x) @ (w * scale_w).T of contiguous matrices."""
    (M, K), N = x.shape, w.shape[0]
    assert M % BLOCKS[0] == 0
    assert K % BLOCKS[2] == 0
    y = torch.empty(M, N, device=x.device, dtype=dtype or torch.float32)
    grid = (M // BLOCKS[0], triton.cdiv(N, BLOCKS[1]))
    product_kernel[grid](
        x, w, scale_x, scale_w, y, N, K, *BLOCKS, IMPRECISE, num_warps=8
    )
    return y


# %%
# Is it right?
# ------------
#
# A product of two e4m3 numbers is exact in float32. What is lost is in the sum.
# The tensor cores of Hopper keep fewer bits of float8 sums than float32 has.
# For numbers of both signs we allow :math:`2^{-12}` of the terms' magnitudes.


def errors(y, x, w, scale_x, scale_w):
    """Return the error of each number, as a part of the sum of magnitudes."""
    terms = exact(x.float().abs(), w.float().abs(), scale_x, scale_w)
    return (y - exact(x, w, scale_x, scale_w)) / terms


if __name__ == "__main__":
    (x, scale_x), (w, scale_w) = random(128, 384), random(200, 384)
    inputs = x, w, scale_x[:, None], scale_w
    off = errors(product(*inputs), *inputs)
    print(f"largest error {off.abs().max():.1e}, allowed {2**-12:.1e}")
    torch.testing.assert_close(off, 0 * off, rtol=0, atol=2**-12)

# %%
# How fast?
# ---------
#
# Beside PyTorch's products of float8 and bfloat16, which are cuBLAS's. Rates
# count :math:`2MNK` operations.


def scaled_mm(x, w, scale_x, scale_w):
    """Return PyTorch's product in bfloat16, scaled per row."""
    return torch._scaled_mm(
        *(x, w.T, scale_x, scale_w[None, :]),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def calls(ours, M, N, K):
    """Return what is timed for a product, by name."""
    (x, scale_x), (w, scale_w) = random(M, K), random(N, K)
    inputs = x, w, scale_x[:, None], scale_w
    timed = {name: partial(f, *inputs) for name, f in ours.items()}
    timed["cuBLAS, float8"] = partial(scaled_mm, *inputs)
    plain = partial(torch.matmul, x.bfloat16(), w.bfloat16().T)
    return timed | {"cuBLAS, bfloat16": plain}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    ours = {"product_kernel": partial(product, dtype=torch.bfloat16)}
    for N in (1024, 4096, 8192):
        times = gpu_time(calls(ours, N, N, N))
        rows[N] = {name: round(2e-9 * N**3 / t[0]) for name, t in times.items()}
    print("TFLOP/s", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# What does the tensor core's sum lose?
# -------------------------------------
#
# ``tl.dot`` adds to ``acc`` in the tensor core. Its option
# ``max_num_imprecise_acc`` says how many products the tensor core may add up
# before the sum goes to a float32 register, where it is added as float32.
# Without the option, that is all of K: *fast accumulation*. We measure the
# error for several K, for normal numbers and for positive ones, whose sum
# grows with K:

if __name__ == "__main__":
    rows = {}
    steps = range(8, 15, 2) if DEVICE.type == "cuda" else range(8, 11)
    for K in (2**n for n in steps):
        (x, scale_x), (w, scale_w) = random(128, K), random(128, K)
        for kind in ("normal", "positive"):
            if kind == "positive":
                x, w = x.float().abs().to(E4M3), w.float().abs().to(E4M3)
            inputs = x, w, scale_x[:, None], scale_w
            expected = exact(*inputs)
            for name, most in (("fast", None), ("each 128", 128)):
                y = product(*inputs, IMPRECISE=most)
                off = (y - expected).norm() / expected.norm()
                rows.setdefault(f"{kind}, {name}", {})[K] = off.item()
    table = pd.DataFrame(rows)
    print("relative error by K", table.to_string(float_format="%.1e"), sep="\n")
    table.plot(logx=True, logy=True, marker="o", xlabel="K", ylabel="error")
    plt.tight_layout()

# %%
# For comparison: rounding a result to bfloat16 costs up to
# :math:`2^{-9} = 0.002`, and rounding the inputs to float8 costs more. So fast
# accumulation does no harm where terms cancel, as with normal numbers. Where
# all have one sign, take 128. In the interpreter all four columns are sums in
# float32.

# %%
# The op
# ------
#
# ``fp8_matmul(x, weight, scale_x, scale_weight)`` is this gallery's op. To the
# kernel of this page it adds tiles that the copy engine loads, one program per
# multiprocessor (``persistent_matmul.py``), any sizes, a bias, a scale of the
# whole tensor, and the choice of accumulation. ``fp8_matmul_linear`` is the
# layer below.

from triton_gallery_ops.fp8_matmul import fp8_matmul, fp8_matmul_linear

# %%
# A layer in float8
# -----------------
#
# Training takes three products: :math:`y = x W^T`, :math:`dx = g W` and
# :math:`dW = g^T x`. The last is a sum over tokens. As the tensor cores want
# what is summed over to be contiguous, it needs ``g`` and ``x`` transposed, and
# the second needs ``W`` transposed. ``fp8_matmul_linear`` quantizes each matrix
# with one scale, and writes the values and their transpose in the same pass.
# The gradient becomes e5m2, which has two bits of mantissa and a wider range.
#
# Does it train? A model of two layers learns to copy a random one, in bfloat16
# and in float8, from the same weights:

WIDTH = 1024 if DEVICE.type == "cuda" else 32
STEPS = 200 if DEVICE.type == "cuda" else 12


def losses_of(linear, dtype):
    """Train two layers; return the loss of each step."""
    noise = torch.Generator(device=DEVICE).manual_seed(1)
    kind = {"generator": noise, "device": DEVICE}
    start = WIDTH**-0.5
    teacher = start * torch.randn(WIDTH, WIDTH, **kind)
    weights = [start * torch.randn(WIDTH, WIDTH, **kind) for _ in range(2)]
    weights = [w.requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(weights, lr=0.3 / WIDTH)
    found = []
    for _ in range(STEPS):
        x = torch.randn(WIDTH, WIDTH, **kind).to(dtype)
        target = torch.tanh(x.float() @ teacher.T)
        hidden = torch.relu(linear(x, weights[0].to(dtype)))
        y = linear(hidden, weights[1].to(dtype)).float()
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    curves = pd.DataFrame(
        {
            "bfloat16": losses_of(torch.nn.functional.linear, dtype),
            "float8": losses_of(fp8_matmul_linear, dtype),
        }
    )
    first, last = curves.iloc[0], curves.iloc[-1]
    print(f"loss at first {first.to_dict()}")
    print(f"after {STEPS} steps {last.to_dict()}")
    assert (last < first).all()
    curves.plot(style=["-", "--"], xlabel="step", ylabel="loss", logy=True)
    plt.tight_layout()

# %%
# How much faster is the layer, forward and backward? All of quantizing is in
# its time.


def training_step(linear, x, w, g):
    y = linear(x, w)
    return torch.autograd.grad(y, (x, w), g)


if __name__ == "__main__" and DEVICE.type == "cuda":
    M, K, N = 8192, 4096, 14336
    kind = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    x = torch.randn(M, K, **kind).requires_grad_()
    w = torch.randn(N, K, **kind).requires_grad_()
    g = torch.randn(M, N, **kind)
    layers = {
        "bfloat16": torch.nn.functional.linear,
        "float8": fp8_matmul_linear,
    }
    times = gpu_time(
        {
            name: partial(training_step, linear, x, w, g)
            for name, linear in layers.items()
        }
    )
    ms = {name: t[0] for name, t in times.items()}
    print({name: f"{t:.2f} ms" for name, t in ms.items()})
    print(f"float8 is {ms['bfloat16'] / ms['float8']:.2f} times as fast")
    x = w = g = None

# %%
# The result
# ----------
#
# Products of models' layers: tokens, outputs, inputs. In the chart, *Triton* is
# the op, and *Triton, this page* is the first kernel.

LAYERS = {
    "64, 7168, 4096": (64, 7168, 4096),
    "1024, 4096, 14336": (1024, 4096, 14336),
    "4096, 7168, 2048": (4096, 7168, 2048),
    "4096, 7168, 16384": (4096, 7168, 16384),
    "8192, 8192, 8192": (8192, 8192, 8192),
    "16384, 28672, 4096": (16384, 28672, 4096),
}


def op(x, w, scale_x, scale_w):
    return fp8_matmul(x, w, scale_x, scale_w)


if __name__ == "__main__" and DEVICE.type == "cuda":
    times, page = {}, partial(product, dtype=torch.bfloat16)
    for name, (M, N, K) in LAYERS.items():
        ours = {"Triton": op}
        ours |= {"Triton, this page": page} if M % 128 == 0 else {}
        times[name] = gpu_time(calls(ours, M, N, K))

    def work(name):
        M, N, K = LAYERS[name]
        return 2e-9 * M * N * K

    results = rate_table(times, "M, N, K", "TFLOP/s", work)
    print(results.to_string())
    wide = results.pivot(index="M, N, K", columns="series", values="TFLOP/s")
    wide = wide.loc[list(LAYERS)]
    wide.plot.bar(rot=20, ylabel="TFLOP/s")
    plt.tight_layout()
    ratio = wide["Triton"] / wide["cuBLAS, float8"]
    print(f"the op: {ratio.min():.2f} to {ratio.max():.2f} of cuBLAS")

# %%
# Exercises
# ---------
#
# Both are kernels with the arguments of ``product_kernel``. Write one and run
# the cell: it says whether the kernel is right. No GPU is needed.
#
# **1.** After the scales, apply ReLU.

relu_kernel = None  # your kernel


def check(kernel, expected, x, w, scale_x, scale_w):
    """Print whether a kernel stores what is expected."""
    if kernel is None:
        print("not solved yet")
        return False
    y = torch.empty(x.shape[0], w.shape[0], device=x.device)
    grid = (x.shape[0] // 128, triton.cdiv(w.shape[0], 128))
    sizes = w.shape[0], x.shape[1]
    kernel[grid](x, w, scale_x, scale_w, y, *sizes, *LARGE, None, num_warps=8)
    right = torch.allclose(y.double(), expected, rtol=1e-2, atol=1e-2)
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    (x, scale_x), (w, scale_w) = random(128, 256), random(72, 256)
    for_relu = x, w, scale_x[:, None], scale_w
    expected_relu = torch.relu(exact(*for_relu))
    check(relu_kernel, expected_relu, *for_relu)

# %%
# **2.** Give each group of 128 along K its own scale of ``x``: ``scale_x`` is a
# matrix of (M, K / 128). Such a scale differs from term to term, so it cannot
# be taken out of the sum over K. Where does it go?

group_kernel = None  # your kernel


def exact_groups(x, w, scale_x, scale_w):
    return exact(x.double() * scale_x.repeat_interleave(128, 1), w, 1, scale_w)


if __name__ == "__main__":
    scales = torch.rand(128, 2, generator=generator, device=DEVICE) + 0.5
    for_groups = x, w, scales, scale_w
    check(group_kernel, exact_groups(*for_groups), *for_groups)

# %%
# Answers
# -------
#
# **1.** The tile is in registers, so ReLU is one line before the store.


@triton.jit
def relu_answer_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask = offs_n < N  # (BLOCK_N,)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k)  # (BLOCK_M, BLOCK_K)
        w = tl.load(w_ptrs + k, mask=mask[None, :], other=0.0)
        acc = tl.dot(x, w, acc)
    scale_x = tl.load(scale_x_ptr + offs_m)  # (BLOCK_M,)
    scale_w = tl.load(scale_w_ptr + offs_n, mask=mask, other=0.0)
    y = acc * scale_x[:, None] * scale_w[None, :]
    y = tl.maximum(y, 0.0)  # (BLOCK_M, BLOCK_N)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y, mask=mask[None, :])


if __name__ == "__main__":
    assert check(relu_answer_kernel, expected_relu, *for_relu)

# %%
# **2.** Each product of a block of K is scaled before it is added. So ``acc``
# is added outside of the tensor core, as precise accumulation does anyway.


@triton.jit
def group_answer_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask = offs_n < N  # (BLOCK_N,)
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k)  # (BLOCK_M, BLOCK_K)
        w = tl.load(w_ptrs + k, mask=mask[None, :], other=0.0)
        scale_x = tl.load(scale_x_ptr + offs_m * (K // BLOCK_K) + k // BLOCK_K)
        acc += tl.dot(x, w) * scale_x[:, None]
    scale_w = tl.load(scale_w_ptr + offs_n, mask=mask, other=0.0)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc * scale_w[None, :], mask=mask[None, :])


if __name__ == "__main__":
    assert check(group_answer_kernel, exact_groups(*for_groups), *for_groups)
