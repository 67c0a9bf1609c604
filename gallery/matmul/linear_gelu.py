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
# ///
r"""
A linear layer with GELU
========================

A linear layer is a matrix product and a bias. In many models a GELU follows.
PyTorch runs the GELU as a kernel of its own, which reads and writes the whole
product again. A product of ours can apply it while its result is in registers.

After this page you can

* finish a product's tile in registers, in what is called an *epilogue*;
* count what that saves, and what the epilogue's instructions cost;
* write an exact GELU with about as few instructions as the tanh one;
* choose what the forward keeps for the backward.
"""

# sphinx_gallery_tags = ["matmul", "fusion", "autograd", "compute bound"]
import math
import os
import time
from functools import partial

import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton
from torch.nn.functional import gelu, linear
from torch.utils._python_dispatch import TorchDispatchMode

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
# .. math:: z = x W^T + b, \qquad y = \mathrm{GELU}(z) = z\,\Phi(z), \qquad
#    \Phi(z) = \tfrac12 \Big(1 + \mathrm{erf}\,\frac{z}{\sqrt 2}\Big)
#
# The input ``x`` is M x K, the weight N x K. :math:`\Phi(z)` is the share of
# ``z`` that passes. Two *dispatch modes* count PyTorch's operations and bytes.
# The *floor* is what any kernel has to move: the three inputs and ``y``.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def linear_gelu_torch(x, weight, bias, approximate="none"):
    return gelu(linear(x, weight, bias), approximate=approximate)


class Traffic(TorchDispatchMode):
    moved = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.t.default:
            return out  # another view of the weight moves nothing
        read = sum(t.nbytes for t in args if isinstance(t, torch.Tensor))
        print(f"{operator!s:20} reads {read:9,}, writes {out.nbytes:9,} bytes")
        self.moved += read + out.nbytes
        return out


def layer(M, K, N, dtype=torch.bfloat16):
    normal = partial(torch.randn, generator=generator, device=DEVICE)
    weight = normal(N, K) * max(K, 1) ** -0.5  # z is as large as one of x
    return [t.to(dtype) for t in (normal(M, K), weight, normal(N))]


if __name__ == "__main__":
    inputs = layer(256, 512, 2048)
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        y = linear_gelu_torch(*inputs)
    floor = y.nbytes + sum(tensor.nbytes for tensor in inputs)
    print(f"in all {traffic.moved:,} bytes, the floor is {floor:,};")
    print(f"the difference is {(traffic.moved - floor) / y.nbytes:.2f} times y")
    print(f"the product takes {flops.get_total_flops():,} operations")

# %%
# The first kernel
# ----------------
#
# A program computes one tile of ``y``. It walks along ``K``, and adds up
# products of tiles. What stands behind the loop is the *epilogue*:
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
# We compare with float64. A sum of ``K`` products is rounded up to ``K`` times,
# each time by less than :math:`2^{-24}` of the sum of their magnitudes. GELU's
# slope is below 1.13. Bias and GELU add a few roundings, and float16 another.

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
# takes :math:`R` and :math:`B` from an H200's data sheet:

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
# With a small K fusion saves much, with a large one little. And for any K, an
# epilogue of 26 instructions for each element takes as long as fusion saves. In
# a kernel of its own, a GELU's instructions can hide: they run while other
# threads wait for memory. In an epilogue they cannot, if the tensor cores wait
# for it. Here is a multiprocessor's time, ``#`` for a loop and ``*``
# for an epilogue:
#
# .. code-block:: text
#
#     one program at a time     program 0   ######***
#                               program 1            ######***
#
#     two at a time             program 0   ######***######***
#                               program 1      ######***######***
#
# There are two remedies: fewer instructions, or two smaller programs at a time,
# so that one has its loop while the other has its epilogue.

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
# In float32 the polynomial is about as exact as erf. Where ``z`` is negative it
# is more exact: there :math:`1 + \mathrm{erf}` subtracts two numbers that are
# nearly equal. Beside ``tl.erf``, the table after the op counts what each form
# compiles to.

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
# that product. So for all but small K, storing is cheaper. PyTorch keeps ``z``
# too. With a gradient wanted, fusion is left with one read to save; without
# one, the op stores nothing.
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
# The op
# ------
#
# The op takes an ``x`` of any shape, works along its last dimension, and has a
# backward. Rows that lie apart are read where they are. Other layouts are
# copied first. The programs go through the tiles in the order that
# ``tile_order.py`` explains. Triton's autotuner chooses the tile: the first two
# configurations leave room for two programs on a multiprocessor of an H200. For
# small products, and in float32 and float64, the tile is fixed.
#
# The op is registered in the way of the page ``what_a_call_costs.py``: on a GPU
# a call goes straight to the launcher, and ``torch.compile`` looks into the
# ``triton_op``. That op returns ``y`` and ``z``. The function around it asks
# whether a gradient is wanted.

LINEAR_GELU_NAMESPACE = "triton_gallery"
LINEAR_GELU_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
LINEAR_GELU_INTERPRETED = triton.knobs.runtime.interpret
# What tl.dot is given. The interpreter multiplies bfloat16 tiles wrongly.
LINEAR_GELU_DOT = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if LINEAR_GELU_INTERPRETED else tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Numbers of rows up to which a choice of the autotuner holds
LINEAR_GELU_ROWS = (256, 1024, 4096, 16384)


def _linear_gelu_config(BLOCK_M, BLOCK_N, num_warps, num_stages):
    block = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": 64}
    return triton.Config(
        block | {"GROUP_M": 8}, num_warps=num_warps, num_stages=num_stages
    )


LINEAR_GELU_CONFIGS = [
    _linear_gelu_config(128, 128, num_warps=8, num_stages=3),
    _linear_gelu_config(128, 128, num_warps=4, num_stages=3),
    _linear_gelu_config(128, 128, num_warps=8, num_stages=4),
    _linear_gelu_config(128, 256, num_warps=8, num_stages=3),
    _linear_gelu_config(128, 256, num_warps=8, num_stages=4),
    _linear_gelu_config(256, 128, num_warps=8, num_stages=3),
    _linear_gelu_config(64, 128, num_warps=4, num_stages=4),
]
# Below so many products of numbers, no configuration is worth the tuner's time.
LINEAR_GELU_TUNED = 2**27
LINEAR_GELU_SMALL = {
    "BLOCK_M": 128,
    "BLOCK_N": 128,
    "BLOCK_K": 64,
    "GROUP_M": 8,
    "num_warps": 8,
    "num_stages": 3,
}
# In float32 and float64 there are no tensor cores to feed, or slow ones.
LINEAR_GELU_WIDE = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_K": 16,
    "GROUP_M": 8,
    "num_warps": 4,
    "num_stages": 3,
}


@triton.jit
def _linear_gelu_phi(z, GELU: tl.constexpr):
    """Return the share of z that passes."""
    if GELU == "erf":
        share = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
    else:
        s = z * z
        if GELU == "tanh":
            # Held, or the slope would be 0 times inf for a very large z.
            s = tl.minimum(s, 100.0)
            p = 0.1029432395800235 * s + 2.302208198144325
        else:
            s = tl.minimum(s, 30.25)
            p = -7.75493378e-11 * s + 9.3906819e-09
            p = p * s - 4.67923821e-07
            p = p * s + 1.22248437e-05
            p = p * s - 0.000162993407
            p = p * s - 8.72860404e-05
            p = p * s + 0.104829921
            p = p * s + 2.3022103
        share = 1 / (1 + tl.exp2(-z * p))
    return share


@triton.jit
def _linear_gelu_tile(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return which tile is a program's: GROUP_M rows of tiles share columns."""
    group = pid // (GROUP_M * tiles_n)
    # The last group may have fewer rows.
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    return group * GROUP_M + place % rows, place // rows


@triton.autotune(
    configs=LINEAR_GELU_CONFIGS[: 1 if LINEAR_GELU_INTERPRETED else None],
    key=["like_m", "N", "K"],
)
@triton.jit
def _linear_gelu_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    like_m,  # for the tuner alone
    GELU: tl.constexpr,  # "none", "tanh", or "erf": exact, by tl.erf
    BIAS: tl.constexpr,  # whether there is one
    KEEP: tl.constexpr,  # whether z is wanted
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    pid_m, pid_n = _linear_gelu_tile(
        tl.program_id(axis=0),
        tl.cdiv(M, BLOCK_M),
        tl.cdiv(N, BLOCK_N),
        GROUP_M,
    )
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    # Rows past the last one are the last one again, so the loop needs no mask
    # for them. In int32 a row's offset would overflow past element 2**31.
    rows_x = tl.minimum(offs_m, M - 1).to(tl.int64) * stride_xm
    rows_w = tl.minimum(offs_n, N - 1).to(tl.int64) * stride_wn
    x_ptrs = x_ptr + rows_x[:, None] + offs_k[None, :]
    weight_ptrs = weight_ptr + rows_w[None, :] + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # If the loop might not run, ptxas would have each multiplication of a large
    # tile wait for the one before: tuned_matmul.py shows it.
    for k in range(0, tl.maximum(K, 1), BLOCK_K):
        # What lies past a row's end may be NaN, and only zeros add nothing.
        mask_k = offs_k < K - k
        x = tl.load(x_ptrs, mask=mask_k[None, :], other=0)
        weight = tl.load(weight_ptrs, mask=mask_k[:, None], other=0)
        acc = tl.dot(
            x.to(DOT),
            weight.to(DOT),
            acc,
            # float32 stays float32, as PyTorch has it, and is not cut to TF32.
            input_precision="ieee",
            out_dtype=ACC,
        )
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    z = acc  # (BLOCK_M, BLOCK_N)
    if BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0)
        z += bias[None, :].to(ACC)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    # z is stored last: stored first, registers would spill.
    tl.store(y_ptr + offs, z * _linear_gelu_phi(z, GELU), mask=mask)
    if KEEP:
        tl.store(z_ptr + offs, z, mask=mask)


@triton.jit
def _linear_gelu_backward_kernel(
    grad_ptr,
    z_ptr,
    dz_ptr,
    partial_ptr,
    M,
    N,
    GELU: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = pid // tiles_n
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    offs = offs_m * N + offs_n  # (BLOCK_M, BLOCK_N)
    # Zeros past the end add nothing to the sum of a column.
    grad = tl.load(grad_ptr + offs, mask=mask, other=0).to(ACC)
    z = tl.load(z_ptr + offs, mask=mask, other=0).to(ACC)
    share = _linear_gelu_phi(z, GELU)
    s = z * z
    if GELU == "tanh":
        inner = 0.21406444881780076 * tl.minimum(s, 100.0) + 1.5957691216057308
        slope = share * (1 - share) * inner
    else:
        slope = 0.3989422804014327 * tl.exp(-0.5 * s)
    dz = grad * (share + z * slope)  # (BLOCK_M, BLOCK_N)
    tl.store(dz_ptr + offs, dz, mask=mask)
    # A row of sums for each tile, in its own place. Atomic additions to one row
    # would come in another order each time.
    partial_ptrs = partial_ptr + pid_m * N + offs_n  # (1, BLOCK_N)
    db = tl.sum(dz, axis=0, keep_dims=True)  # (1, BLOCK_N)
    tl.store(partial_ptrs, db, mask=offs_n < N)


def _linear_gelu_check(x, weight, bias, approximate):
    """Raise for what the op does not take."""
    given = (x, weight) if bias is None else (x, weight, bias)
    kinds = [(t.dtype, t.device) for t in given]
    if x.dtype not in LINEAR_GELU_ACC or kinds.count(kinds[0]) < len(kinds):
        raise TypeError(
            f"linear_gelu takes one float dtype and device, not {kinds}"
        )
    fits = x.ndim > 0 and weight.ndim == 2 and x.shape[-1:] == weight.shape[1:]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [tuple(t.shape) for t in given]
        raise ValueError(
            f"linear_gelu takes shapes (..., K), (N, K) and (N,), not {shapes}"
        )
    _linear_gelu_kind(x, approximate)


def _linear_gelu_kind(x, approximate):
    """Return which GELU the kernels compute."""
    if approximate not in ("none", "tanh"):
        raise ValueError(
            "linear_gelu takes approximate='none' or 'tanh', "
            f"not {approximate!r}"
        )
    # The polynomial is as exact as float32. In float64 tl.erf is.
    exact = x.dtype == torch.float64 and approximate == "none"
    return "erf" if exact else approximate


def _linear_gelu_rows(x, M, K):
    """Return a tensor as a matrix with contiguous rows."""
    x = x.reshape(M, K)
    return x if x.stride(1) == 1 else x.contiguous()


def _linear_gelu_launch(x, weight, bias, approximate, keep, wrap=lambda k: k):
    _linear_gelu_check(x, weight, bias, approximate)
    N, K = weight.shape
    y = x.new_empty(*x.shape[:-1], N)
    z = torch.empty_like(y) if keep else x.new_empty(0)
    M = math.prod(x.shape[:-1])
    if M == 0 or N == 0:
        return y, z
    x, weight = _linear_gelu_rows(x, M, K), _linear_gelu_rows(weight, N, K)
    kernel, plan = _linear_gelu_kernel, {}
    if x.element_size() > 2:
        kernel, plan = kernel.fn, LINEAR_GELU_WIDE
    elif M * N * K < LINEAR_GELU_TUNED:
        kernel, plan = kernel.fn, LINEAR_GELU_SMALL
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        wrap(kernel)[
            lambda meta: (
                triton.cdiv(M, meta["BLOCK_M"])
                * triton.cdiv(N, meta["BLOCK_N"]),
            )
        ](
            x,
            weight,
            weight if bias is None else bias.contiguous(),
            y,
            z,
            M,
            N,
            K,
            x.stride(0),
            weight.stride(0),
            like_m=next((m for m in LINEAR_GELU_ROWS if m >= M), 2**30),
            GELU=_linear_gelu_kind(x, approximate),
            BIAS=bias is not None,
            KEEP=keep,
            ACC=LINEAR_GELU_ACC[x.dtype],
            DOT=LINEAR_GELU_DOT[x.dtype],
            **plan,
        )
    return y, z


def _linear_gelu_backward_launch(grad, z, approximate, wrap=lambda k: k):
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in (grad, z)]
    if z.dtype not in LINEAR_GELU_ACC or kinds[0] != kinds[1] or z.ndim == 0:
        raise ValueError(
            "linear_gelu_backward takes a gradient of z's float dtype, shape "
            f"and device, not {kinds[0]} for {kinds[1]}"
        )
    GELU = _linear_gelu_kind(z, approximate)
    N = z.shape[-1]
    M = math.prod(z.shape[:-1])
    grad, z = grad.contiguous(), z.contiguous()
    dz = torch.empty_like(z)
    if M == 0 or N == 0:
        return dz, z.new_zeros(N)
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    # A double takes two registers, and its exponential several.
    BLOCK_M = 16 if wide == torch.float64 else 64
    tiles_m, tiles_n = triton.cdiv(M, BLOCK_M), triton.cdiv(N, 128)
    partial = z.new_empty(tiles_m, N, dtype=wide)
    with torch.accelerator.device_index(z.device.index):
        wrap(_linear_gelu_backward_kernel)[(tiles_m * tiles_n,)](
            grad,
            z,
            dz,
            partial,
            M,
            N,
            GELU=GELU,
            ACC=LINEAR_GELU_ACC[z.dtype],
            BLOCK_M=BLOCK_M,
            BLOCK_N=128,
            num_warps=8,
        )
    return dz, partial.sum(0).to(z.dtype)


@triton_op(f"{LINEAR_GELU_NAMESPACE}::linear_gelu_forward", mutates_args={})
def linear_gelu_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    approximate: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y of linear_gelu and, if ``keep``, z; else an empty tensor."""
    return _linear_gelu_launch(x, weight, bias, approximate, keep, wrap_triton)


@triton_op(f"{LINEAR_GELU_NAMESPACE}::linear_gelu_backward", mutates_args={})
def linear_gelu_backward(
    grad: torch.Tensor, z: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of z and of the bias, for the gradient of y.

    Takes two tensors of one dtype, shape and device, of any layout, and raises
    ValueError for two that differ.
    """
    return _linear_gelu_backward_launch(grad, z, approximate, wrap_triton)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
LINEAR_GELU_LIBRARY = Library(LINEAR_GELU_NAMESPACE, "FRAGMENT")
LINEAR_GELU_LIBRARY.impl("linear_gelu_forward", _linear_gelu_launch, "CUDA")
LINEAR_GELU_LIBRARY.impl(
    "linear_gelu_backward", _linear_gelu_backward_launch, "CUDA"
)


def _linear_gelu_setup(ctx, inputs, output):
    x, weight, _, ctx.approximate, keep = inputs
    if not keep:
        raise ValueError("linear_gelu_forward has a gradient with keep=True")
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of z


def _linear_gelu_gradient(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    x, weight, z = ctx.saved_tensors
    dz, db = linear_gelu_backward(grad, z, ctx.approximate)
    M = math.prod(x.shape[:-1])
    dx = dw = None
    # Of frozen weights, or of data, no product is needed.
    if ctx.needs_input_grad[0]:
        dx = dz @ weight
    if ctx.needs_input_grad[1]:
        dw = dz.reshape(M, weight.shape[0]).T @ x.reshape(M, weight.shape[1])
    return dx, dw, db if ctx.needs_input_grad[2] else None, None, None


linear_gelu_forward.register_autograd(
    _linear_gelu_gradient, setup_context=_linear_gelu_setup
)


def linear_gelu(x, weight, bias=None, approximate="none"):
    """Return gelu(linear(x, weight, bias), approximate=approximate).

    Takes tensors of one dtype, float16, bfloat16, float32 or float64, of shapes
    (..., K), (N, K) and (N,), in any layout; the bias may be None. The result
    has the shape (..., N), is contiguous, and is the same each time. Products
    are added up in float32, or float64, and GELU is computed before the one
    rounding to the dtype. float32 is never cut to TF32. Raises TypeError and
    ValueError for what it does not take. Has a gradient, which has none itself:
    where one is wanted, the result of the product is kept for it.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return linear_gelu_forward(x, weight, bias, approximate, keep)[0]


# %%
# What did each step gain? The rows are the first kernel, then the op's kernel
# in the tuner's configurations. "erf" is a kernel that calls ``tl.erf``, where
# the op has the polynomial, "none". The last columns are registers, spilled
# registers, and the epilogue's instructions for an element, counted behind the
# last one of the tensor cores: addresses and stores are included. (None are
# counted where the disassembler did not reach the kernel's end.)


def tiled(config, GELU, x, weight, bias, y):
    """Launch the op's kernel as the tuner would; return what was compiled."""
    (M, K), N, plan = x.shape, weight.shape[0], config.all_kwargs()
    tiles_m = triton.cdiv(M, plan["BLOCK_M"])
    grid = (tiles_m * triton.cdiv(N, plan["BLOCK_N"]),)
    known = {"BIAS": True, "KEEP": False, "ACC": tl.float32}
    return _linear_gelu_kernel.fn[grid](
        *(x, weight, bias, y, y, M, N, K, K, K, 2**30),
        GELU=GELU,
        DOT=LINEAR_GELU_DOT[x.dtype],
        **known,
        **plan,
    )


def epilogue(compiled, config):
    """Return how many instructions an epilogue has for an element."""
    lines = [line for line in compiled.asm["sass"].splitlines() if ";" in line]
    if not any("EXIT" in line for line in lines[-50:]):
        return math.nan
    last = max(i for i, line in enumerate(lines) if "MMA" in line)
    count = sum("NOP" not in line for line in lines[last + 1 :])
    plan = config.all_kwargs()
    return count * 32 * plan["num_warps"] / plan["BLOCK_M"] / plan["BLOCK_N"]


def work(K):
    """Return TFLOP/s, if the product of a layer takes a millisecond."""
    return 2e-9 * 8192 * K * 4 * K


def steps():
    """Yield the rows for the op's kernel: a name, the call, its config."""
    for config in LINEAR_GELU_CONFIGS:
        plan = config.all_kwargs()
        name = "{BLOCK_M}x{BLOCK_N}, {num_warps} warps, {num_stages} stages"
        few = plan["BLOCK_M"] == 128 and plan["num_stages"] == 3
        for GELU in ("erf", "none", "tanh") if few else ("none",):
            call = partial(tiled, config, GELU)
            yield f"{GELU}, {name.format(**plan)}", call, config


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = list(steps())
    ladder = pd.DataFrame(index=["first kernel"] + [name for name, *_ in rows])
    for K in (512, 4096):
        inputs = layer(8192, K, 4 * K)
        tried = {"first kernel": partial(first_linear_gelu, *inputs)}
        inputs.append(torch.empty_like(tried["first kernel"]()))
        tried |= {name: partial(call, *inputs) for name, call, _ in rows}
        found = gpu_time(tried, turns=20)
        rates = [work(K) / times[0] for times in found.values()]
        ladder[f"TFLOP/s at {K}"] = [round(rate) for rate in rates]
    for name, call, config in rows:
        made = call(*inputs)
        ladder.loc[name, "registers"] = made.n_regs
        ladder.loc[name, "spilled"] = made.n_spills
        ladder.loc[name, "instructions"] = round(epilogue(made, config), 1)
    print(ladder.to_string())

# %%
# A program of 8 warps with up to 128 registers a thread takes half of a
# multiprocessor's, and so does one of 4 warps with up to 255. Three stages of a
# 128x128 tile take 96 KB of its 227 KB of shared memory. So of the first two
# configurations two programs fit, and of those with larger tiles one.
#
# Read the table in pairs. "erf" and "none" in one configuration differ by the
# instructions of the epilogue alone. At K = 512, a tile of 128x128 and one of
# 128x256 show what two programs at a time are worth. At K = 4096 the epilogue
# is a smaller part, and a larger tile loads ``x`` and ``weight`` less often.

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
# An error names what the op does not take:

if __name__ == "__main__":
    for wrong in ((x, weight.half()), (x, weight.T), (x, weight, bias, "fast")):
        try:
            linear_gelu(*wrong)
        except (TypeError, ValueError) as error:
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
# This is what a call costs the CPU, in microseconds, and what the tuner chose:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["K"] == 1600].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())
    for key, config in _linear_gelu_kernel.cache.items():
        print(key[:3], config)

# %%
# Reading the result
# ------------------
#
# The product decides the time: for the layer of K = 4096 it is 1.1e12
# operations. So the first question is how near our loop comes to cuBLAS, whose
# product alone is the roof. The second is what the epilogue adds. Compare the
# distance to the roof at K = 512 and at K = 4096: by the counts above, both
# what fusion saves and what the epilogue costs shrink with K. A layer with a
# large K gains little from any fusion, and then the better product wins.
#
# ``torch.compile`` leaves the product to cuBLAS here, and writes one kernel for
# the GELU. With ``mode="max-autotune-no-cudagraphs"`` it tries Triton products
# with the GELU in their epilogue as well. That compiles for tens of seconds a
# layer, so it is not part of this page.
#
# Where 16 does not divide ``K``, the compiler must expect rows to begin at any
# address. A thread then loads one element at a time, and no copy runs in the
# background. The sizes of models are multiples of 16; others are best padded.
#
# Backward, two plain products by cuBLAS take most of the time, ours and
# PyTorch's alike. What is left to gain is the pass that sums the bias gradient.

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
# * ``tile_order.py`` is about the order of the tiles and stages, and
#   ``tuned_matmul.py`` about the tuner.
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
