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
# Two programs compute 4 x 4 results each. A tile is the sum of two products,
# each over four columns of x and w, times the scales of its rows and columns.
# Row 3 is past the end of x, and the second tile's last two columns are past
# the end of w: they are masked."""
# registers = ["x", "w", "acc", "scale_x", "scale_w", "y"]
# call = "product(x, w, scale_x, scale_w, BLOCK_M=4, BLOCK_N=4, BLOCK_K=4)"
# expected = { y = "(x * scale_x) @ (w * scale_w).T" }
# start = [1, 0]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(-2, 3, 3, 8)"
# w = "integers(-2, 3, 8, 6).T.contiguous()"
# scale_x = "torch.tensor([[1.0], [2], [3]])"
# scale_w = "torch.tensor([[1.0], [1], [2], [1], [2], [1]])"
# ///
r"""
FP8 matrix products, scaled per tensor and per row
==================================================

The tensor cores of Hopper (H100, H200) multiply 8-bit floats twice as fast as
16-bit ones, and the matrices are half the bytes. A float8 number means little
without its scale (``quantize.py``), so a product takes two matrices and their
scales. This page applies the scales once, after the sum. Then it measures how
much precision the tensor cores lose when they add float8 products, and trains
a layer in float8.

After this page you can

* multiply float8 matrices with a scale for each row;
* say what fast accumulation loses, and where to avoid it;
* make a linear layer whose result and gradients are float8 products, with a
  scale for each tensor.
"""

# sphinx_gallery_tags = ["matmul", "float8", "quantization", "autograd"]
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


def check(kernel, expected, inputs):
    """Print whether a kernel stores what is expected, to 1 %."""
    if kernel is None:
        print("not solved yet")
        return False
    y = product(*inputs, kernel=kernel).double()
    right = torch.allclose(y, expected, rtol=1e-2, atol=1e-2)
    print("right" if right else "wrong")
    return right


# %%
# In PyTorch
# ----------
#
# Each row of ``x`` and of the weight ``w`` has a *scale*: a float8 number
# stands for itself times the scale of its row. In a product, the scales
# :math:`s_m` and :math:`t_n` are the same for all terms of the sum over K:
#
# .. math:: y_{mn} = \sum_k (s_m x_{mk}) (t_n w_{nk})
#    = s_m t_n \sum_k x_{mk} w_{nk}.
#
# So we multiply the float8 numbers alone, and scale the result once. PyTorch
# has this as ``torch.nn.functional.scaled_mm``; we check against ``exact``, in
# float64. For the size of a layer, scales add little to the bytes:

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # up to 448 and 57344
generator = torch.Generator(device=DEVICE).manual_seed(0)


def exact(x, w, scale_x, scale_w):
    """Return the product in float64; the scales are (M, 1) and (N, 1)."""
    return (x.double() @ w.double().T) * scale_x * scale_w.T


def float8_rows(rows, K, whole=False):
    """Return float8 numbers, integers if ``whole``, and scales of rows."""
    x = torch.randn(rows, K, generator=generator, device=DEVICE)
    x = x.round() if whole else x
    scale = torch.rand(rows, 1, generator=generator, device=DEVICE) + 0.5
    return x.to(E4M3), scale


if __name__ == "__main__":
    x, scale_x = float8_rows(8192, 4096)
    w, scale_w = float8_rows(2048, 4096)
    print(f"{2e-9 * 8192 * w.numel():.0f} GFLOP")
    print(f"{x.nbytes + w.nbytes:,} bytes of float8", end=", ")
    print(f"{scale_x.nbytes + scale_w.nbytes:,} bytes of scales")

# %%
# The first kernel
# ----------------
#
# It is the plain product of ``matmul.py``, with two differences. K is
# contiguous in both matrices, because the tensor cores read float8 only that
# way: a weight (N, K), as ``torch.nn.Linear`` has it. And the tile is
# multiplied by its scales before it is stored. K must be a multiple of
# ``BLOCK_K``; masks cover the edges of M and N. ``IMPRECISE`` is None until
# *What does the tensor core's sum lose?*


@triton.jit
def product_kernel(
    x_ptr,
    w_ptr,
    scale_x_ptr,
    scale_w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    offs_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.program_id(axis=1).to(tl.int64) * BLOCK_N
    offs_n += tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask_m, mask_n = offs_m < M, offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]  # (BLOCK_M, BLOCK_K)
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs + k, mask=mask_n[None, :], other=0.0)  # transposed
        acc = tl.dot(x, w, acc, max_num_imprecise_acc=IMPRECISE)
    scale_x = tl.load(scale_x_ptr + offs_m, mask=mask_m, other=0.0)
    scale_w = tl.load(scale_w_ptr + offs_n, mask=mask_n, other=0.0)
    y = acc * scale_x[:, None] * scale_w[None, :]  # (BLOCK_M, BLOCK_N)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)  # y's dtype


TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}


def product(
    x, w, scale_x, scale_w, kernel=product_kernel, dtype=None, **chosen
):
    """Return (x * scale_x) @ (w * scale_w).T; pass chosen to the kernel."""
    options = TILE | {"IMPRECISE": None, "num_warps": 8} | chosen
    (M, K), N = x.shape, w.shape[0]
    assert w.shape[1] == K
    assert K % options["BLOCK_K"] == 0
    assert scale_w.shape == (N, 1)
    assert len(scale_x) == M  # exercise 2 has several columns
    inputs = (t.contiguous() for t in (x, w, scale_x, scale_w))
    y = torch.empty(M, N, device=x.device, dtype=dtype or torch.float32)
    down = triton.cdiv(M, options["BLOCK_M"])
    across = triton.cdiv(N, options["BLOCK_N"])
    kernel[down, across](*inputs, y, M, N, K, **options)
    return y


# %%
# Is it right?
# ------------
#
# Sums of small integers are exact, even in Hopper's tensor cores, which keep
# fewer bits than float32. So only the two multiplications by scales round, each
# by :math:`2^{-24}` at most: :math:`2^{-23}` together. We allow twice that.

if __name__ == "__main__":
    x, scale_x = float8_rows(100, 384, whole=True)
    w, scale_w = float8_rows(200, 384, whole=True)
    inputs = x, w, scale_x, scale_w
    y, expected = product(*inputs).double(), exact(*inputs)
    error = ((y - expected) / expected).abs().nan_to_num().max()  # 0 / 0: 0
    print(f"largest error {error:.1e}, allowed {2**-22:.1e}")
    torch.testing.assert_close(y, expected, rtol=2**-22, atol=0)

# %%
# How fast?
# ---------
#
# Rows are sizes, M = N = K; rates count :math:`2MNK` operations. PyTorch's
# products are cuBLAS's. *Each 128* sums more exactly, as the next section says.


def calls(ours, M, N, K):
    """Return what is timed for a product, by name."""
    (x, scale_x), (w, scale_w) = float8_rows(M, K), float8_rows(N, K)
    inputs = x, w, scale_x, scale_w
    timed = {name: partial(f, *inputs) for name, f in ours.items()}
    kind = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    given = x, w.T, scale_x, scale_w.T
    timed["cuBLAS, float8"] = partial(torch._scaled_mm, *given, **kind)
    plain = partial(torch.matmul, x.bfloat16(), w.bfloat16().T)
    return timed | {"cuBLAS, bfloat16": plain}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    fast = partial(product, dtype=torch.bfloat16)
    ours = {"product_kernel": fast, "each 128": partial(fast, IMPRECISE=128)}
    for N in (1024, 4096, 8192):
        times = gpu_time(calls(ours, N, N, N))
        rows[N] = {name: round(2e-9 * N**3 / t[0]) for name, t in times.items()}
    print("TFLOP/s", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# What does the tensor core's sum lose?
# -------------------------------------
#
# ``acc`` is float32, but while the tensor core adds float8 products to it, it
# keeps fewer bits. The option ``max_num_imprecise_acc`` of ``tl.dot`` limits
# how many products are added there before their sum is added to a float32
# register. Without the option, the limit is all of K: *fast accumulation*. With
# 128, each sum of 128 products is added in float32. We measure the error of the
# result for Gaussian numbers and for positive ones, whose sum grows with K.
# (The interpreter adds everything in float32; only a GPU shows a difference.)

if __name__ == "__main__":
    columns = {}
    for K in (256, 1024, 4096):
        (x, scale_x), (w, scale_w) = float8_rows(128, K), float8_rows(128, K)
        positive = (t.float().abs().to(E4M3) for t in (x, w))
        for kind, pair in {"Gaussian": (x, w), "positive": positive}.items():
            inputs = *pair, scale_x, scale_w
            expected = exact(*inputs)
            for name, most in (("fast", None), ("each 128", 128)):
                y = product(*inputs, IMPRECISE=most)
                error = (y - expected).norm() / expected.norm()
                columns.setdefault(f"{kind}, {name}", {})[K] = error.item()
    table = pd.DataFrame(columns)
    print("relative error by K", table.to_string(float_format="%.1e"), sep="\n")

# %%
# On Hopper, the error of fast accumulation grows with K, most where all terms
# have one sign. With 128, it hardly changes. For comparison, rounding a number
# to bfloat16 costs up to :math:`2^{-8} = 0.004` of it, and to E4M3 up to
# :math:`2^{-4} = 0.06`.
#
# So fast accumulation is fine for the output of a layer, where terms cancel and
# K is the layer's width. For the gradient of a weight, K is the number of
# tokens, often far more: pass ``IMPRECISE=128``. The first two columns of *How
# fast?* show its price in this kernel: in the record, at the two larger sizes,
# about all that float8 gains over bfloat16.

# %%
# The op
# ------
#
# ``fp8_matmul(x, weight, scale_x, scale_weight, bias=None)`` is this gallery's
# op. It also takes a bias, and one scale for a whole tensor. The GPU's copy
# engine loads its tiles (``tensor_descriptors.py``), and one program for each
# multiprocessor computes several of them (``persistent_matmul.py``).
# ``out_dtype`` is bfloat16 unless you give another, and
# ``use_fast_accum=False`` adds each 128 products in float32.
# ``fp8_matmul_linear`` is the layer of the next section, ready-made.

from triton_gallery_ops.fp8_matmul import fp8_matmul, fp8_matmul_linear
from triton_gallery_ops.quantize import quantize_with_transpose

# %%
# A layer in float8
# -----------------
#
# Training takes three products: :math:`y = x W^T`, :math:`dx = g W` and
# :math:`dW = g^T x`, where ``g`` is the gradient of ``y``. The tensor cores
# want the axis that is summed over to be contiguous, so :math:`dx` needs ``W``
# transposed, and :math:`dW` needs ``g`` and ``x`` transposed.
# ``quantize_with_transpose`` (``quantize.py``) returns the float8 values, their
# scale, the transposed values and their scale. With one scale for the whole
# tensor, both scales are the same. The gradient becomes E5M2, which has one bit
# less of mantissa and a wider range; a product can mix it with E4M3.

TENSOR = -1, -1  # a block as large as the tensor: one scale


class Float8Linear(torch.autograd.Function):
    """A linear layer whose three products are in float8."""

    @staticmethod
    def forward(ctx, x, w):
        x8, scale_x, x_t, _ = quantize_with_transpose(x, TENSOR)
        w8, scale_w, w_t, _ = quantize_with_transpose(w, TENSOR)
        ctx.save_for_backward(x_t, scale_x, w_t, scale_w)
        return fp8_matmul(x8, w8, scale_x, scale_w, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, g):
        x_t, scale_x, w_t, scale_w = ctx.saved_tensors
        g8, scale_g, g_t, _ = quantize_with_transpose(g, TENSOR, E5M2)
        dx = fp8_matmul(g8, w_t, scale_g, scale_w, out_dtype=g.dtype)
        # A sum over all tokens: no fast accumulation
        kind = {"out_dtype": g.dtype, "use_fast_accum": False}
        return dx, fp8_matmul(g_t, x_t, scale_g, scale_x, **kind)


# %%
# Does it train? Two layers learn to imitate a random layer with a tanh, one in
# bfloat16 and one in float8, from the same weights. The losses may differ by
# 5 % in any step, and must fall. (Triton's interpreter computes bfloat16
# wrongly, so without a GPU we use float32.)

ON_GPU = DEVICE.type == "cuda"
WIDTH, STEPS = (1024, 200) if ON_GPU else (32, 12)
WIDE = torch.bfloat16 if ON_GPU else torch.float32


def losses_of(linear):
    """Train two layers; return the loss of each step."""
    noise = torch.Generator(device=DEVICE).manual_seed(1)
    draw = partial(torch.randn, WIDTH, WIDTH, generator=noise, device=DEVICE)
    teacher, *weights = (draw() / WIDTH**0.5 for _ in range(3))
    weights = [w.requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(weights, lr=0.3 / WIDTH)
    losses = []
    for _ in range(STEPS):
        x = draw()
        first, last = (w.to(WIDE) for w in weights)
        y = linear(torch.relu(linear(x.to(WIDE), first)), last)
        loss = (y.float() - torch.tanh(x @ teacher.T)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    layers = {
        str(WIDE): torch.nn.functional.linear,
        "float8": Float8Linear.apply,
    }
    losses = pd.DataFrame({name: losses_of(f) for name, f in layers.items()})
    print("loss in the first step and the last", losses.iloc[[0, -1]], sep="\n")
    apart = (losses["float8"] / losses[str(WIDE)] - 1).abs().max()
    print(f"at most {apart:.1%} apart in any step")
    assert apart < 0.05
    assert (losses.iloc[-1] < losses.iloc[0]).all()

# %%
# How much faster than in bfloat16 is the layer, forward and backward? Its time
# includes all quantizing. *Fast* is the op's layer, :math:`dW` added up fast.


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
        "float8": Float8Linear.apply,
        "float8, fast": partial(fp8_matmul_linear, use_fast_accum=True),
    }
    steps = {n: partial(training_step, f, x, w, g) for n, f in layers.items()}
    times = gpu_time(steps)
    ms = {name: t[0] for name, t in times.items()}
    for name, t in ms.items():
        print(f"{name}: {t:.2f} ms, {ms['bfloat16'] / t:.2f} times as fast")
    x = w = g = steps = None

# %%
# The result
# ----------
#
# Each product is a layer of a model, labelled M, N, K: tokens, outputs, inputs.
# *Triton* is the op, and *Triton, this page* is the first kernel. Farther right
# is faster. The line below the chart gives the op's rate as a fraction of
# *cuBLAS, float8*, from the lowest to the highest.

LAYERS = {
    "64, 7168, 4096": (64, 7168, 4096),
    "1024, 4096, 14336": (1024, 4096, 14336),
    "4096, 7168, 2048": (4096, 7168, 2048),
    "4096, 7168, 16384": (4096, 7168, 16384),
    "8192, 8192, 8192": (8192, 8192, 8192),
    "16384, 28672, 4096": (16384, 28672, 4096),
}


if __name__ == "__main__" and DEVICE.type == "cuda":
    page = partial(product, dtype=torch.bfloat16)
    ours = {"Triton": fp8_matmul, "Triton, this page": page}
    times = {name: gpu_time(calls(ours, *s)) for name, s in LAYERS.items()}

    def work(name):
        M, N, K = LAYERS[name]
        return 2e-9 * M * N * K

    results = rate_table(times, "M, N, K", "TFLOP/s", work)
    print(results.to_string())
    wide = results.pivot(index="M, N, K", columns="series", values="TFLOP/s")
    wide = wide.loc[list(LAYERS)]
    wide.plot.bar(rot=20, ylabel="TFLOP/s")
    ratio = wide["Triton"] / wide["cuBLAS, float8"]
    print(f"the op: {ratio.min():.2f} to {ratio.max():.2f} of cuBLAS")

# %%
# Exercises
# ---------
#
# Both are kernels with the arguments of ``product_kernel``. Write one and run
# the cell: it says whether the kernel is right. No GPU is needed.
#
# **1.** After the scales, apply ReLU (``tl.maximum``).

relu_kernel = None  # your kernel

if __name__ == "__main__":
    x, scale_x = float8_rows(100, 256, whole=True)
    w, scale_w = float8_rows(72, 256, whole=True)
    for_relu = x, w, scale_x, scale_w
    expected_relu = torch.relu(exact(*for_relu))
    check(relu_kernel, expected_relu, for_relu)

# %%
# **2.** Give each group of 128 along K its own scale of ``x``: ``scale_x`` is a
# matrix of (M, K / 128). Such a scale differs from term to term, so it cannot
# be taken out of the sum over K. Where does it go?

group_kernel = None  # your kernel

if __name__ == "__main__":
    scales = torch.rand(100, 2, generator=generator, device=DEVICE) + 0.5
    for_groups = x, w, scales, scale_w
    scaled = x.double() * scales.repeat_interleave(128, 1)
    expected_groups = exact(scaled, w, 1, scale_w)
    check(group_kernel, expected_groups, for_groups)

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
    M,
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
    mask_m, mask_n = offs_m < M, offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs + k, mask=mask_n[None, :], other=0.0)
        acc = tl.dot(x, w, acc)
    scale_x = tl.load(scale_x_ptr + offs_m, mask=mask_m, other=0.0)
    scale_w = tl.load(scale_w_ptr + offs_n, mask=mask_n, other=0.0)
    y = acc * scale_x[:, None] * scale_w[None, :]
    y = tl.maximum(y, 0.0)  # (BLOCK_M, BLOCK_N)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y, mask=mask_m[:, None] & mask_n[None, :])


if __name__ == "__main__":
    assert check(relu_answer_kernel, expected_relu, for_relu)

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
    M,
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
    mask_m, mask_n = offs_m < M, offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs + k, mask=mask_n[None, :], other=0.0)
        scale_x_ptrs = scale_x_ptr + offs_m * (K // BLOCK_K) + k // BLOCK_K
        scale_x = tl.load(scale_x_ptrs, mask=mask_m, other=0.0)
        acc += tl.dot(x, w) * scale_x[:, None]
    scale_w = tl.load(scale_w_ptr + offs_n, mask=mask_n, other=0.0)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptrs, acc * scale_w[None, :], mask=mask)


if __name__ == "__main__":
    assert check(group_answer_kernel, expected_groups, for_groups)
