# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Apply bias and GELU to a matrix product while it is in registers, so that
# nothing reads and writes it again."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "two forward kernels: through descriptors, and by pointers"
#
# [tool.triton-gallery.not_for]
# _linear_gelu_engine_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# ///
r"""
A linear layer with GELU
========================

A linear layer is a matrix product and a bias. In many models a GELU follows.
PyTorch runs the GELU as a kernel of its own, which reads and writes the whole
product again. Our product can apply it while its result is in registers.

After this page you can

* finish a product's tile in registers, in what is called an *epilogue*;
* count what that saves, and what the epilogue's instructions cost;
* write an exact GELU with fewer instructions than ``erf`` takes;
* choose what the forward keeps for the backward.
"""

# sphinx_gallery_tags = ["matmul", "fusion", "autograd", "compute bound"]
import math
import os
from functools import partial

import pandas as pd
import torch
from torch.nn.functional import gelu, linear

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
from triton_gallery.counting import Traffic

# %%
# In PyTorch
# ----------
#
# .. math:: z = x W^T + b, \qquad y = \mathrm{GELU}(z) = z\,\Phi(z), \qquad
#    \Phi(z) = \tfrac12 \Big(1 + \mathrm{erf}\,\frac{z}{\sqrt 2}\Big)
#
# The input ``x`` is M x K, the weight N x K. :math:`\Phi(z)` is the share of
# ``z`` that passes. Two *dispatch modes* count what PyTorch does:
# ``FlopCounterMode`` its operations, and ``Traffic``, in the opening of this
# page, its bytes. The *floor* is what any kernel has to move: the three inputs
# and ``y``.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def linear_gelu_torch(x, weight, bias, approximate="none"):
    return gelu(linear(x, weight, bias), approximate=approximate)


def layer(M, K, N, dtype=torch.bfloat16):
    normal = partial(torch.randn, generator=generator, device=DEVICE)
    weight = normal(N, K) * max(K, 1) ** -0.5  # z is as large as one of x
    return [t.to(dtype) for t in (normal(M, K), weight, normal(N))]


if __name__ == "__main__":
    inputs = layer(256, 512, 2048)
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        y = linear_gelu_torch(*inputs)
    for name, read, written in traffic.operators:
        print(f"{name:20} reads {read:9,}, writes {written:9,} bytes")
    floor = y.nbytes + sum(tensor.nbytes for tensor in inputs)
    print(f"in all {traffic.moved:,} bytes, the floor is {floor:,};")
    print(f"the difference is {(traffic.moved - floor) / y.nbytes:.2f} times y")
    print(f"the product takes {flops.get_total_flops():,} operations")

# %%
# The first kernel
# ----------------
#
# A program computes one tile of ``y``. It walks along ``K``, and adds up
# products of tiles. What follows the loop is the *epilogue*:
#
# .. code-block:: text
#
#     along K:    BLOCK_K ->                   for each k:
#             +---+---+---+---+                  acc += x . weight
#     x       |   |   | x |   |  BLOCK_M
#             +---+---+---+---+                epilogue, in registers:
#     weight  |   |   | w |   |  BLOCK_N         z = acc + bias
#             +---+---+---+---+                  y = GELU(z)


@triton.jit
def first_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    offs_m = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask_m, mask_n = offs_m[:, None] < M, offs_n[None, :] < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    # The weight's tile is loaded as (BLOCK_K, BLOCK_N): tl.dot wants it so.
    weight_ptrs = weight_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # Zeros past the end of a row add nothing.
        mask_k = offs_k < K - k
        x = tl.load(x_ptrs, mask=mask_m & mask_k[None, :], other=0)
        weight = tl.load(weight_ptrs, mask=mask_n & mask_k[:, None], other=0)
        # "ieee": float32 stays float32, it is not cut to TF32 first.
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0)  # (BLOCK_N,)
    z = acc + bias[None, :].to(tl.float32)  # (BLOCK_M, BLOCK_N)
    y = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y, mask=mask_m & mask_n)


def first_linear_gelu(x, weight, bias, block=(128, 128, 64), num_warps=8):
    (M, K), N, y = x.shape, weight.shape[0], x.new_empty(len(x), len(weight))
    grid = (triton.cdiv(M, block[0]) * triton.cdiv(N, block[1]),)
    first_kernel[grid](x, weight, bias, y, M, N, K, *block, num_warps=num_warps)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum of ``K`` products has at most ``K`` roundings,
# each of less than :math:`2^{-24}` of the sum of their magnitudes. For bias and
# GELU we allow eight more, and GELU's slope is below 1.13. float16 has another.

if __name__ == "__main__":
    for dtype in (torch.float32, torch.float16):
        inputs = layer(80, 112, 144, dtype)
        wide = [tensor.double() for tensor in inputs]
        unit = linear(*(tensor.abs() for tensor in wide))
        expected = linear_gelu_torch(*wide) / unit
        y = first_linear_gelu(*inputs) / unit
        atol = 1.13 * 120 * 2**-24 + (2**-11 if dtype == torch.float16 else 0)
        error = (y - expected).abs().max()
        print(f"{dtype}: largest error {error:.1e}, allowed {atol:.1e}")
        torch.testing.assert_close(y, expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# The layers are those of transformers: 8192 tokens, ``N = 4 * K``, bfloat16.
# ``Roof`` is the product alone, by NVIDIA's library cuBLAS.


def calls(op, K, **kind):
    torch.compiler.reset()  # past eight sizes it would raise
    x, weight, _ = inputs = layer(8192, K, 4 * K)
    eager = partial(linear_gelu_torch, **kind)
    fast = torch.compile(lambda *t: eager(*t), dynamic=False, fullgraph=True)
    ops = {"Triton": op, "PyTorch": eager, "torch.compile": fast}
    found = {name: partial(op, *inputs) for name, op in ops.items()}
    return found | {"Roof": partial(torch.matmul, x, weight.T)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    for K in (512, 1600, 4096):
        found = gpu_time(calls(first_linear_gelu, K), turns=20).items()
        once = 2e-9 * 8192 * K * 4 * K
        rates = [f"{who} {once / times[0]:.0f}" for who, times in found]
        print(f"K = {K}: {', '.join(rates)} TFLOP/s")

# %%
# What can fusion save?
# ---------------------
#
# It saves a write and a read of ``z``: :math:`2 \cdot 2MN` bytes in half
# precision. The product takes :math:`2MNK` operations. So with a memory of
# :math:`B` bytes and tensor cores of :math:`R` operations a second, fusion
# saves this part of the product's time:
#
# .. math:: \frac{4MN / B}{2MNK / R} = \frac{2R}{BK}
#
# M and N cancel, only K is left. But the epilogue is not free either. An
# instruction for each of the :math:`MN` elements takes a multiprocessor of an
# H200 1/128 of a cycle. Its tensor cores do 2048 products and additions in a
# cycle, so the tile's product takes :math:`K/2048` cycles for each element. So
# :math:`E` instructions take :math:`16 E / K` of the product's time. The table
# takes :math:`R` and :math:`B` from an H200's data sheet. (An H100's has the
# same :math:`R` and a smaller :math:`B`, so there fusion saves more.)

RATE, BANDWIDTH = 989e12, 4.8e12  # bfloat16, dense; bytes


def shares(K):
    """Return parts of the product's time, in percent."""
    epilogues = {f"{E} instructions": 1600 * E / K for E in (10, 20, 40)}
    return {"K": K, "saved": 200 * RATE / BANDWIDTH / K} | epilogues


if __name__ == "__main__":
    table = pd.DataFrame([shares(K) for K in (256, 512, 1600, 4096, 12288)])
    print("% of the product's time")
    print(table.round(1).to_string(index=False))

# %%
# With a small K fusion could save much, with a large one little. And for any K,
# by these figures, an epilogue of 26 instructions for each element takes as
# long as fusion saves. In a kernel of its own, a GELU's instructions can hide:
# they run while other threads wait for memory. In an epilogue they cannot, if
# the tensor cores wait for it. Here is a multiprocessor's time, ``-`` for a
# wait for the first tiles to load, ``#`` for a loop and ``*`` for an epilogue:
#
# .. code-block:: text
#
#     one program at a time     program 0   --######***
#                               program 1              --######***
#
#     two at a time             program 0   --######***--######***
#                               program 1      --######***--######***
#
#     one that loads on         program 0   --######***######***
#
# There are three remedies. An epilogue can have fewer instructions. Two smaller
# programs can run at a time, so that one has its loop while the other has its
# epilogue. Or one large program loads for its next tile during the epilogue.
# Then the tensor cores still wait for the epilogue, but for no load after it.

# %%
# An exact GELU in fewer instructions
# -----------------------------------
#
# The tanh approximation of :math:`\Phi` is short, since :math:`\frac12 (1 +
# \tanh u)` is :math:`1 / (1 + e^{-2u})`. With the constants in front of it:
#
# .. math:: \Phi(z) \approx \frac{1}{1 + 2^{-z\,p(z^2)}}, \qquad
#    p(s) = 2.3022 + 0.10294\,s
#
# The exact :math:`\Phi` can be written so, too: solve the equation for
# :math:`p`. The solution is a smooth function of :math:`s = z^2`. A polynomial
# of degree 7 comes close to it up to :math:`|z| = 5.5`. Farther out, :math:`s`
# is held at :math:`5.5^2`: there :math:`\Phi` is less than :math:`2^{-25}` from
# 0 or 1. We fit by least squares. A weight says how much an error of :math:`p`
# changes :math:`\Phi`:

DEGREE, FARTHEST = 7, 5.5


def fit():
    """Return the coefficients of p, that of the constant first."""
    angle = (torch.arange(4000, dtype=torch.float64) + 0.5) * math.pi / 4000
    s = (1 + angle.cos()) / 2  # from 0 to 1, denser at both ends
    z = s.sqrt() * FARTHEST
    up, down = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
    p = (up - down) / math.log(2) / z
    # Far out, where p hardly changes the value, it still has to be near.
    weights = torch.maximum(z * (up + down).exp(), 3e-5 * z)[:, None]
    powers = s[:, None] ** torch.arange(DEGREE + 1)
    both = powers * weights, p[:, None] * weights
    found = torch.linalg.lstsq(*both, driver="gelsd").solution[:, 0]
    return found / FARTHEST ** (2 * torch.arange(DEGREE + 1))


def phi(z, p):
    """Return what stands for Phi, with a polynomial's coefficients."""
    s = (z * z).clamp(max=FARTHEST**2)
    value = torch.full_like(s, p[-1])
    for coefficient in p[-2::-1]:
        value = value * s + coefficient
    return 1 / (1 + torch.exp2(-z * value))


if __name__ == "__main__":
    p = [float(f"{coefficient:.9g}") for coefficient in fit()]
    print("p =", p)
    z = torch.linspace(-10, 10, 200_001)
    right = torch.special.ndtr(z.double())
    tries = {
        "erf": (1 + torch.erf(z * 0.5**0.5)) / 2,
        "the polynomial": phi(z, p),
        "tanh": phi(z, [2.302208198144325, 0.1029432395800235]),
    }
    for name, tried in tries.items():
        off = (tried.double() - right).abs()
        part = (off / right)[z.abs() < 5].max()
        print(f"{name:14} is off by {off.max():.0e}, or {part:.0e} of Phi")

# %%
# In float32 the polynomial's error is about that of erf. Where ``z`` lies
# between -5 and -1, it is a much smaller part of :math:`\Phi`: there
# :math:`1 + \mathrm{erf}` subtracts two numbers that are nearly equal. Farther
# out both are small errors, but of a :math:`\Phi` that is smaller still. The
# table after the op counts what each form compiles to.

# %%
# The backward
# ------------
#
# With the incoming gradient :math:`g`,
#
# .. math:: d_z = g\,\big(\Phi(z) + z\,\Phi'(z)\big), \qquad
#    d_x = d_z W, \quad d_W = d_z^T x, \quad d_b = \sum_m d_z
#
# So the backward needs ``z``, which the forward had in registers and did not
# keep. There are two answers. The forward can *store* ``z`` beside ``y``, which
# is a write, and later a read. Or the backward can *recompute* it, which is one
# more product. The store and the read take what fusion saved, :math:`2R/BK` of
# that product. By this data sheet it is less than the product where K is above
# 412. PyTorch keeps ``z`` too. With a gradient wanted, fusion is left with one
# read to save; without one, the op stores nothing.
#
# The gradient of ``z`` is needed three times. Could the products of the
# backward compute it while they load? A product reads each tile of :math:`d_z`
# for every tile of its other side. Each time it would need two loads instead of
# one, and the instructions of the GELU. So one kernel writes :math:`d_z`. What
# is left are plain products, and for those cuBLAS is at hand. The kernel holds
# a tile of :math:`d_z`, so it sums the tile's columns as well: a row of sums
# for each tile, added up after it. PyTorch would read :math:`d_z` again for
# that.

# %%
# A product at cuBLAS's speed
# ---------------------------
#
# With a large K, fusion saves a small part of the time, and a slower product
# would lose it. The page ``persistent_matmul.py`` brings a product to about
# cuBLAS's speed. On an H100, H200 or B200, the *copy engine* (TMA) loads the
# tiles. A *tensor descriptor* tells it where the matrix lies, and how long its
# rows are. So threads compute no addresses. There is one program for each
# multiprocessor: it goes from tile to tile, and the engine loads for the next
# one during the epilogue.
#
# A tile of 128x256 is stored in two halves. Then shared memory, of 227 KB, has
# room for four stages of 48 KB and half a tile of 32 KB. The engine wants rows
# that begin at multiples of 16 bytes.

# %%
# The op
# ------
#
# So the op has two forward kernels with one epilogue. The first one serves half
# precision on GPUs with a copy engine and 227 KB of shared memory: H100, H200
# and B200. Matrices whose rows do not suit the engine are copied first, into
# rows that do: rows of a length that 8 does not divide, or that begin anywhere
# or overlap. The second kernel loads by pointers. It serves float32, float64
# and all other GPUs: A100, L4, RTX 40 and 50, and AMD's. Both go through the
# tiles in the order that ``tile_order.py`` explains. The first one's tile is
# the one of least cost, by the formula of ``persistent_matmul.py``: the rounds
# that all multiprocessors need, times what a tile multiplies and loads.
#
# The op takes an ``x`` of any shape and works along its last dimension.
# Descriptors are made on the CPU, and of a ``triton_op`` that has them
# ``torch.compile`` leaves out the kernel. So the forward is a ``custom_op``,
# into which ``torch.compile`` does not look. It returns ``y`` and ``z``. The
# function around it asks whether a gradient is wanted.

from triton_gallery_ops.linear_gelu import (
    LINEAR_GELU_ACC,
    LINEAR_GELU_HALF,
    _linear_gelu_by_engine,
    _linear_gelu_by_pointers,
    _linear_gelu_programs,
    linear_gelu,
    linear_gelu_forward,
)

# %%
# What did each step gain? The rows are the first kernel, then both of the op's.
# "erf" is a kernel that calls ``tl.erf``, where the op has the polynomial,
# "none". The last columns are registers, spilled registers, and the epilogue's
# instructions for an element: those after the last matrix instruction, with
# addresses and stores. In the kernel with descriptors they are not in one
# place, so we do not count them.


def launched(launch, GELU, x, weight, bias, y):
    """Launch one of the op's kernels; return what was compiled."""
    known = {"GELU": GELU, "BIAS": True, "KEEP": False}
    return launch(x, weight, bias, y, y, known)


def epilogue(compiled):
    """Return how many instructions an epilogue has for an element."""
    lines = [line for line in compiled.asm["sass"].splitlines() if ";" in line]
    if not any("EXIT" in line for line in lines[-50:]):
        return math.nan
    last = max(i for i, line in enumerate(lines) if "MMA" in line)
    count = sum("NOP" not in line for line in lines[last + 1 :])
    plan = LINEAR_GELU_HALF
    return count * 32 * plan["num_warps"] / plan["BLOCK_M"] / plan["BLOCK_N"]


def work(K):
    """Return TFLOP/s, if the product of a layer takes a millisecond."""
    return 2e-9 * 8192 * K * 4 * K


STEPS = {
    f"{name}, {GELU}": partial(launched, launch, GELU)
    for name, launch in (
        ("pointers", _linear_gelu_by_pointers),
        ("descriptors", _linear_gelu_by_engine),
    )
    for GELU in ("erf", "none", "tanh")
    if name == "pointers" or _linear_gelu_programs(DEVICE)
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=["first kernel", *STEPS])
    for K in (512, 4096):
        inputs = layer(8192, K, 4 * K)
        tried = {"first kernel": partial(first_linear_gelu, *inputs)}
        inputs.append(torch.empty_like(tried["first kernel"]()))
        tried |= {name: partial(step, *inputs) for name, step in STEPS.items()}
        found = gpu_time(tried, turns=20)
        rates = [work(K) / times[0] for times in found.values()]
        ladder[f"TFLOP/s at {K}"] = [round(rate) for rate in rates]
    for name, step in STEPS.items():
        made = step(*inputs)
        ladder.loc[name, "registers"] = made.n_regs
        ladder.loc[name, "spilled"] = made.n_spills
        if name.startswith("pointers"):
            ladder.loc[name, "instructions"] = round(epilogue(made), 1)
    print(ladder.to_string(na_rep=""))

# %%
# A program by pointers has 8 warps with up to 128 registers a thread, which are
# half of a multiprocessor's, and its three stages take 96 KB. So two programs
# fit, and one has its loop while the other has its epilogue. (From Triton 3.8
# on it has up to 130 registers, and one program fits.) Through descriptors
# there is one, and the copy engine works during its epilogue.
#
# "erf" and "none" of one kernel differ by the instructions of the epilogue
# alone. At K = 4096 that is a smaller part of the time than at K = 512. At
# K = 512, the exact GELU by pointers is ahead of the one through descriptors,
# which the op takes all the same: it has one rule for all K.

# %%
# Proof
# -----
#
# We compare value and gradients of every dtype, in both kinds, with float64. In
# half precision the result and what is kept are rounded once more, and so is
# the gradient of ``z``, which the products then add up.


def prove(shape, N, dtype, approximate, bias=True):
    x, weight, b = layer(math.prod(shape[:-1]), shape[-1], N, dtype)
    inputs = [x.reshape(shape), weight, b][: 3 if bias else 2]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = linear_gelu(*inputs, approximate=approximate)
    expected = gelu(linear(*wide), approximate=approximate)
    rtol = max(torch.finfo(dtype).eps, 1e-14) * 4
    atol = rtol * max(1, shape[-1]) ** 0.5
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)
    grad = torch.randn(y.shape, generator=generator, device=DEVICE).to(dtype)
    found = torch.autograd.grad(y, inputs, grad)
    right = torch.autograd.grad(expected, wide, grad.double())
    for one, other in zip(found, right, strict=True):
        # The terms of a gradient may cancel.
        atol = 4 * rtol * (1 + other.square().sum().sqrt().item())
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


SHAPES = [((16, 64), 48), ((2, 3, 70), 65), ((9,), 9), ((0, 8), 3), ((4, 0), 3)]
if __name__ == "__main__":
    for dtype in LINEAR_GELU_ACC:
        for shape, N in SHAPES:
            prove(shape, N, dtype, "none")
        prove((3, 70), 40, dtype, "tanh", bias=False)
    x, weight, bias = layer(3, 5, 4, torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    for kind in ("none", "tanh"):
        op = partial(linear_gelu, approximate=kind)
        assert torch.autograd.gradcheck(op, inputs)

# %%
# Without a gradient, nothing is kept. A view of a larger matrix is read where
# it is, a transposed weight is copied first:

if __name__ == "__main__":
    x, weight, bias = layer(20, 64, 32, torch.float32)
    _, z = linear_gelu_forward(x, weight, bias, "none", False)
    assert z.numel() == 0
    for pair in ((x[:, :40], weight[:, 24:]), (x[:, :32], weight[:, :32].T)):
        expected = linear_gelu_torch(*pair, bias)
        torch.testing.assert_close(linear_gelu(*pair, bias), expected)

# %%
# An error names what the op does not take. The last is a second derivative:


def twice(x, weight):
    y = linear_gelu(x, weight.requires_grad_())
    torch.autograd.grad(y.sum(), weight, create_graph=True)


if __name__ == "__main__":
    wrong = [(x, weight.half()), (x, weight.T), (x, weight, bias, "fast")]
    calls_ = [partial(linear_gelu, *inputs) for inputs in wrong]
    for call in (*calls_, partial(twice, x, weight)):
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The layers are those of above. The forward is called without a gradient. The
# rate counts the product alone, and ``Roof`` is that product.

SIZES = [512, 768, 1600, 4096, 6144]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {K: gpu_time(calls(linear_gelu, K)) for K in SIZES}
    results = rate_table(times, "K", "TFLOP/s", work)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="K", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="forward")

# %%
# cuBLASLt, which is part of cuBLAS, has epilogues too.
# ``torch._addmm_activation`` calls it. Which GELU is that? We ask, in float32:


def cublaslt(x, weight, bias):
    return torch._addmm_activation(bias, x, weight.T, use_gelu=True)


if __name__ == "__main__":
    inputs = layer(64, 64, 64, torch.float32)
    for kind in ("none", "tanh"):
        right = linear_gelu_torch(*inputs, approximate=kind)
        off = (cublaslt(*inputs) - right).abs().max()
        print(f"on {DEVICE.type}, approximate={kind!r}: off by {off:.1e}")

# %%
# On a GPU the call computes the tanh GELU. On a CPU, where PyTorch has no
# cuBLASLt, it computes the exact one. So we measure it beside the op's tanh:


def calls_tanh(K):
    op = partial(linear_gelu, approximate="tanh")
    library = partial(cublaslt, *layer(8192, K, 4 * K))
    return calls(op, K, approximate="tanh") | {"cuBLASLt": library}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {K: gpu_time(calls_tanh(K)) for K in (1600, 4096)}
    results_tanh = rate_table(times, "K", "TFLOP/s", work)
    print("tanh", results_tanh.to_string(), sep="\n")

# %%
# The backward is called through autograd. It has two products, so its rate
# counts twice the operations. ``Roof`` is one product of as many:


def calls_backward(K):
    torch._functorch.config.donated_buffer = False  # to run it again
    found = calls(linear_gelu, K)
    inputs = [t.requires_grad_() for t in found["Triton"].args]
    g = torch.randn(8192, 4 * K, generator=generator, device=DEVICE).bfloat16()
    grad = partial(torch.autograd.grad, retain_graph=True)
    del found["Roof"]
    found = {who: partial(grad, op(), inputs, g) for who, op in found.items()}
    x, weight, _ = layer(8192, 2 * K, 4 * K)
    return found | {"Roof": partial(torch.matmul, x, weight.T)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {K: gpu_time(calls_backward(K), turns=20) for K in SIZES[1:4]}
    table = partial(rate_table, times, "K", "TFLOP/s")
    results_backward = table(lambda K: 2 * work(K))
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(index="K", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="backward")

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["K"] == 1600].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The product decides the time: for the layer of K = 4096 it is 1.1e12
# operations. The roof is that product alone, by cuBLAS. By the counts above,
# both what fusion saves and what the epilogue costs shrink with K. So the
# distance to the roof is large at K = 512 and small at K = 6144. A layer with a
# large K gains little from any fusion, and then the better product wins. At K =
# 512 the op gains nothing, and the kernel by pointers is faster. For the tanh
# GELU, ``torch._addmm_activation`` is ahead of the op. On the site, *Beside
# other libraries* has an odd size as well.
#
# A call costs the CPU time too. For a small layer it takes longer than the GPU
# needs. Called one by one, such layers gain nothing from a faster kernel, but
# while the GPU has other work, or in a CUDA graph (``cuda_graphs.py``), they
# do.
#
# ``torch.compile`` leaves the product to cuBLAS here, and writes one kernel for
# the GELU. With ``mode="max-autotune-no-cudagraphs"`` it tries Triton products
# with the GELU in their epilogue as well. To compile and time them takes long,
# so this page leaves them out.
#
# Backward, two plain products by cuBLAS take most of the time, ours and
# PyTorch's alike. The op saves PyTorch's pass that sums the bias gradient. In
# half precision, where 8 does not divide N or K, its products are those of the
# op ``matmul`` (``matmul.py``).

# %%
# Go further
# ----------
#
# 1. The forward could keep :math:`\Phi(z) + z\,\Phi'(z)` instead of ``z``. What
#    would the backward save, and what would the forward pay?
# 2. SwiGLU has two products, a gate and an up projection, of which the epilogue
#    needs the same tile. How would a program compute both?
#
# To read on:
#
# * ``tile_order.py`` is about the order of the tiles, and
#   ``persistent_matmul.py`` about descriptors and programs that go on.
# * cuBLASLt's epilogues:
#   https://docs.nvidia.com/cuda/cublas/#cublasltepilogue-t

# %%
# Answers
# -------
#
# **1.** The backward would be one multiplication, without an exponential. It
# moves the same bytes, and memory bounds it, so it saves little. The forward
# would pay for the derivative in its epilogue, where instructions count.
#
# **2.** With two accumulators of half the width, and two weights: ``gate =
# tl.dot(x, w_gate, gate)`` and ``up = tl.dot(x, w_up, up)`` in one loop, which
# loads ``x`` once. The epilogue stores ``gate * tl.sigmoid(gate) * up``.
