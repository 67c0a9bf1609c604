# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute attention with the scores in registers, so that the matrix of scores
# is never written to memory."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = false
# deterministic = true
# ///
r"""
Flash attention, forward
========================

Attention compares each query with each key. Written with PyTorch's operators,
the scores of all pairs are a matrix in memory. A
kernel that keeps them in registers never writes that matrix.

After this page you can

* count what the matrix of scores costs;
* add up values while the softmax is not yet known, block by block;
* say why the exponential has base 2;
* skip the blocks that a causal mask hides, nearly half of them;
* serve several query heads with one head of keys.
"""

# sphinx_gallery_tags = ["attention", "compute bound"]
import math
import os
import warnings
from functools import partial

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

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
from triton_gallery.counting import statements

# %%
# In PyTorch
# ----------
#
# .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \frac{e^{s_{ij}}}
#    {\sum_k e^{s_{ik}}}, \qquad s_{ij} = \frac{q_i \cdot k_j}{\sqrt D}
#
# With PyTorch's operators, the product, the scaled scores :math:`s` and the
# probabilities :math:`p` are matrices in memory. The *floor* is to read ``q``,
# ``k`` and ``v`` and to write ``o``. Tensors on the device ``meta`` have no
# data:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def attention_torch(q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


if __name__ == "__main__":
    for length in (512, 4096, 32768):  # 32 heads of dimension 128
        q = torch.empty(32, length, 128, dtype=torch.bfloat16, device="meta")
        scores = (q @ q.mT).nbytes
        print(f"{length:5} tokens: scores of {scores / 1e9:5.2f} GB,", end=" ")
        print(f"{scores / (4 * q.nbytes):4.0f} times the floor")

# %%
# The first kernel
# ----------------
#
# A kernel that writes none of these has to go on from a block of scores to the
# values at once, before it knows the sum to divide by. ``softmax_long.py`` has
# the *online* softmax. So that no exponential overflows, the maximum :math:`m`
# is subtracted. That is a factor :math:`e^{-m}` in the sum :math:`l` of
# exponentials and in the sum :math:`a` of values; it cancels in :math:`a / l`.
# Begin with :math:`m = -\infty` and zeros. A block of scores gives the maximum
# :math:`m' = \max(m, \max_j s_j)`, and what was added up gets its factor:
#
# .. math:: l' = l\,e^{m - m'} + \sum_j e^{s_j - m'}, \qquad
#    a' = a\,e^{m - m'} + \sum_j e^{s_j - m'} v_j, \qquad o = a / l
#
# A program takes a block of queries, and goes along all keys of its head:
#
# .. code-block:: text
#
#     start = 0      BLOCK_N    2 BLOCK_N
#     +-----------+-----------+-----------+
#     |   keys    |   keys    | keys   ...|
#     +-----------+-----------+-----------+
#     |  scores   |  scores   | scores ...|   BLOCK_M queries
#     +-----------+-----------+-----------+
#       m, l, a  ->  m, l, a  ->  m, l, a   ->  o = a / l
#
# Keys past the end get the score ``-inf``, so their exponential is 0. In the
# code, ``acc`` is :math:`a` and ``total`` is :math:`l`.


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,
    L,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32, the offset of a head would overflow past element 2**31.
    head = tl.program_id(axis=1).to(tl.int64) * L * D
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_d = tl.arange(0, D)[None, :]  # (1, D)
    q = tl.load(q_ptr + head + offs_m * D + offs_d, mask=offs_m < L, other=0.0)
    m = tl.full((BLOCK_M, 1), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, L, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs = head + offs_n[:, None] * D + offs_d  # (BLOCK_N, D)
        k = tl.load(k_ptr + offs, mask=offs_n[:, None] < L, other=0.0)
        v = tl.load(v_ptr + offs, mask=offs_n[:, None] < L, other=0.0)
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        s = tl.where(offs_n[None, :] < L, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp(s - m_new)  # (BLOCK_M, BLOCK_N)
        # What was added up so far had the old maximum.
        rescale = tl.exp(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        # The tensor cores take p in the type of v.
        acc = tl.dot(p.to(v.dtype), v, acc * rescale)
        m = m_new
    tl.store(out_ptr + head + offs_m * D + offs_d, acc / total, mask=offs_m < L)


def attention(q, k, v, BLOCK_M=128, BLOCK_N=64, num_warps=8):
    """Return the attention of contiguous (batch, heads, length, D)."""
    (batch, heads, L, D), out = q.shape, torch.empty_like(q)
    grid = (triton.cdiv(L, BLOCK_M), batch * heads)
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": num_warps}
    attention_kernel[grid](q, k, v, out, D**-0.5, L, D, **tile)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64. Two things are rounded to the 11 bits of float16: the
# probabilities before the second product, and the result. Each costs at most
# :math:`2^{-11}` of the largest value, together :math:`2^{-10}`. We allow twice
# that.


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


if __name__ == "__main__":
    q, k, v = (random(2, 3, 200, 64) for _ in range(3))
    out, expected = attention(q, k, v), sdpa(q.double(), k.double(), v.double())
    error, atol = (out - expected).abs().max(), 2**-9 * v.abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# PyTorch's ``scaled_dot_product_attention``, SDPA, is a library's kernel, and
# ``torch.compile`` calls it too. For a score we count :math:`4 D` operations.

TOKENS = 16384  # in all, at each length


def inputs(length, D):
    heads = 2048 // D
    return [random(TOKENS // length, heads, length, D) for _ in range(3)]


def operations(length):
    return 4e-9 * TOKENS * 2048 * length  # in units of 10**9


if __name__ == "__main__" and DEVICE.type == "cuda":
    for length in (512, 1024, 2048):
        fast = torch.compile(attention_torch, dynamic=False, fullgraph=True)
        x, tried = inputs(length, D=64), {"Triton": attention, "SDPA": sdpa}
        tried |= {"PyTorch": attention_torch, "torch.compile": fast}
        found = gpu_time({who: partial(one, *x) for who, one in tried.items()})
        print(f"{length} tokens, TFLOP/s:", end=" ")
        print({w: round(operations(length) / t[0]) for w, t in found.items()})

# %%
# Which exponential?
# ------------------
#
# A score takes :math:`4D` operations on the *tensor cores*, the units that
# multiply tiles, and one exponential on another unit. A GPU has an instruction
# for :math:`2^x`, and none for :math:`e^x`. ``tl.exp`` multiplies by
# :math:`\log_2 e` first, and adds three instructions that keep results below
# :math:`2^{-126}`. ``tl.exp2`` is the instruction alone; what it loses, adds
# nothing here. So we multiply the scale by :math:`\log_2 e`, once, outside of
# the kernel:
#
# .. math:: e^{x / \sqrt D} = 2^{x \log_2(e) / \sqrt D}
#
# The maximum is now one in base 2, and nobody sees it. The kernel below also
# takes a causal mask, for the next question: query ``i`` sees the keys up to
# ``i``.


@triton.jit
def base2_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,
    L,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # As in the first kernel; only the marked lines differ.
    head = tl.program_id(axis=1).to(tl.int64) * L * D
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_d = tl.arange(0, D)[None, :]  # (1, D)
    q = tl.load(q_ptr + head + offs_m * D + offs_d, mask=offs_m < L, other=0.0)
    m = tl.full((BLOCK_M, 1), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, L, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs = head + offs_n[:, None] * D + offs_d  # (BLOCK_N, D)
        k = tl.load(k_ptr + offs, mask=offs_n[:, None] < L, other=0.0)
        v = tl.load(v_ptr + offs, mask=offs_n[:, None] < L, other=0.0)
        # The scale has the factor log2(e).
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        # The last key that a query sees; a score past it may not count.
        last = offs_m if CAUSAL else L - 1
        s = tl.where(offs_n[None, :] <= last, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        # Both powers have base 2, or the two sums would not fit together.
        p = tl.exp2(s - m_new)  # (BLOCK_M, BLOCK_N)
        rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale)
        m = m_new
    tl.store(out_ptr + head + offs_m * D + offs_d, acc / total, mask=offs_m < L)


def base2(q, k, v, causal=False, BLOCK_M=128, BLOCK_N=64, num_warps=8):
    batch, heads, L, D = q.shape
    out = torch.empty_like(q)
    scale = D**-0.5 * math.log2(math.e)
    grid = (triton.cdiv(L, BLOCK_M), batch * heads)
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": num_warps}
    base2_kernel[grid](q, k, v, out, scale, L, D, causal, **tile)
    return out


if __name__ == "__main__" and DEVICE.type == "cuda":
    for D in (64, 128):
        x = inputs(4096, D)
        found = gpu_time({"e": partial(attention, *x), "2": partial(base2, *x)})
        for base, times in found.items():
            rate = operations(4096) / times[0]
            print(f"heads of {D}, base {base}: {rate:.0f} TFLOP/s")

# %%
# Base 2 is faster for both lengths of a head, and the op has it. It gains more
# with heads of 128, which have more operations for each exponential. So the
# instructions that it saves do not explain all of the gain.

# %%
# What does a causal mask hide?
# -----------------------------
#
# With a causal mask, nearly half of the scores are ``-inf``. The last kernel
# computes all of them. Which blocks could it leave out?
#
# .. code-block:: text
#
#     BLOCK_M = 2 BLOCK_N         keys
#              +------+------+------+------+------+------+
#     program  | mask | mask | skip | skip | skip | skip |
#        0     |      |      |      |      |      |      |
#              +------+------+------+------+------+------+
#     program  | full | full | mask | mask | skip | skip |
#        1     |      |      |      |      |      |      |
#              +------+------+------+------+------+------+
#     program  | full | full | full | full | mask | mask |
#        2     |      |      |      |      |      |      |
#              +------+------+------+------+------+------+
#
# Of ``n`` rows of such blocks, ``(n + 1) / 2n`` remain: 12 of 18 here, 52 % for
# 4096 tokens. The loop is split: first the full blocks, without a mask on the
# scores, then those at the diagonal, with one. Both are one function, compiled
# twice. The blocks past the diagonal are not even loaded. A ragged last block
# of keys belongs to the second loop, with or without a causal mask. Within a
# head, later queries start first, so that the last programs to start are short
# ones. If queries and keys differ in number, query ``i`` still sees the keys up
# to ``i``, as SDPA has it.

# %%
# Several heads of queries
# ------------------------
#
# A model that writes text keeps the keys and values of all tokens so far. In
# *grouped-query attention* several heads of queries share one head of them, so
# that this cache is smaller. It takes a division: head ``h`` of the queries
# reads head ``h // GROUP``.
#
# Heads mostly lie side by side in memory, in the order (batch, length, heads,
# D), and attention gets a transposed view. The op takes any strides; where the
# last dimension is not contiguous, it copies first. Where ``D`` is no power of
# two, as 80 or 96, its block is padded with zeros, which add nothing to a
# score.

# %%
# The op
# ------
#
# A row whose scores are all ``-inf`` sees nothing. Its sum is 0, and the result
# is defined as 0, as in PyTorch. So ``m`` begins with the lowest finite number:
# ``-inf`` minus ``-inf`` would be NaN. (In the kernels above, key 0 is always
# seen.) The tiles were tried on an H200, for heads of 64 to 256. The op is
# registered as ``what_a_call_costs.py`` shows.

from triton_gallery_ops.flash_attention_forward import (
    _flash_attention_forward_kernel,
    flash_attention_forward,
)

# %%
# What did each step gain? The table has TFLOP/s at 4096 tokens, and the
# statements of each kernel. With a causal mask half of the operations count, so
# a kernel that computes all of them shows half its rate.


STEPS = {
    "first kernel": (attention, False, attention_kernel),
    "base 2": (base2, False, base2_kernel),
    "the op": (flash_attention_forward, False, _flash_attention_forward_kernel),
    "base 2, causal": (partial(base2, causal=True), True, base2_kernel),
    "the op, causal": (
        partial(flash_attention_forward, causal=True),
        True,
        _flash_attention_forward_kernel,
    ),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*step[2:]) for step in STEPS.values()]
    for D in (64, 128):
        x = inputs(4096, D)
        tried = {name: partial(step[0], *x) for name, step in STEPS.items()}
        found = gpu_time(tried)
        ladder[f"heads of {D}"] = [
            round(operations(4096) / (1 + step[1]) / found[name][0])
            for name, step in STEPS.items()
        ]
    print(ladder.to_string())

# %%
# Each step is faster than the one before, and the op is so without a causal
# mask too.

# %%
# Proof
# -----
#
# We compare each dtype with float64: ragged lengths, more keys than queries and
# fewer, padded heads, shared heads of keys, none at all. For each element we
# allow two roundings of :math:`\sum_j p_j |v_j|` and two of the result. A
# rounding is :math:`2^{-11}` in float16. In bfloat16 we allow :math:`2^{-7}`,
# as the interpreter cuts off. In float32 and float64, the roundings of the
# scores are left, which are sums of ``D`` terms; we allow :math:`2^{-18}` and
# :math:`2^{-45}`.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}
SHAPES = [  # batch, heads, heads of keys, queries, keys, D
    (1, 2, 2, 128, 128, 64),
    (1, 4, 2, 270, 70, 32),
    (2, 3, 1, 33, 150, 80),
    (1, 1, 1, 20, 40, 256),
    (1, 1, 1, 5, 0, 16),
    (1, 2, 1, 0, 7, 16),
]


def reference(q, k, v, causal=False):
    """Return the attention in float64, and the sum of p |v|."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        outs = [sdpa(q, k, t, is_causal=causal) for t in (v, v.abs())]
    return outs


def worst(out, expected, terms, eps):
    """Return the largest error, as a part of what is allowed."""
    allowed = 2 * eps * (terms + expected.abs()) + 1e-300
    return ((out.double() - expected).abs() / allowed).max().item()


def prove(shape, dtype, causal):
    batch, heads, shared, LQ, LK, D = shape
    q = random(batch, heads, LQ, D, dtype=dtype)
    k, v = (random(batch, shared, LK, D, dtype=dtype) for _ in range(2))
    out = flash_attention_forward(q, k, v, causal)
    assert out.dtype == dtype
    assert out.shape == q.shape
    if out.numel():
        expected = reference(q, k, v, causal)
        assert worst(out, *expected, EPS[dtype]) <= 1, (shape, dtype, causal)


if __name__ == "__main__":
    for dtype in EPS:
        for shape in SHAPES:
            for causal in (False, True):
                prove(shape, dtype, causal)

# %%
# Next come heads side by side in memory, a scale of one's own, and scores in
# the thousands: without subtracting the maximum, their exponentials would be
# inf.

q = random(2, 150, 4, 64)[:, :140].transpose(1, 2)
k = random(2, 400, 2, 64)[:, :100].transpose(1, 2)  # the part of a cache
v = random(2, 2, 100, 64)
out = flash_attention_forward(q, k, v, causal=True)
assert out.is_contiguous()
assert worst(out, *reference(q, k, v, causal=True), 2.0**-11) <= 1

if __name__ == "__main__":
    columns = k.mT.contiguous().mT
    assert torch.equal(flash_attention_forward(q, columns, v, True), out)
    out = flash_attention_forward(q, k, v, scale=0.5)
    assert worst(out, *reference(q * 4, k, v), 2.0**-11) <= 1
    large = [random(1, 1, 70, 64, dtype=torch.float64) * 40 for _ in range(3)]
    out = flash_attention_forward(*large)
    assert worst(out, *reference(*large), 2.0**-40) <= 1

# %%
# A key of ``-inf`` gets the score ``-inf`` from a positive query: no weight. A
# query with no other key sees nothing, and its result is 0, as in PyTorch.
# (Without a GPU, NumPy computes, and would warn.)

if __name__ == "__main__":
    q = random(1, 1, 40, 32).abs()
    k, v = random(1, 1, 50, 32), random(1, 1, 50, 32)
    k[:, :, :30] = -torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for causal in (False, True):
            out = flash_attention_forward(q, k, v, causal)
            assert worst(out, *reference(q, k, v, causal), 2.0**-11) <= 1
            assert (out[:, :, :30] == 0).all() == causal

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    q = torch.ones(1, 4, 3, 16, device=DEVICE).half()
    for k in (q.float(), q[:, :3], q[..., :8]):
        try:
            flash_attention_forward(q, k, k)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is causal, in float16, with heads of 128 and then of 64. At each
# length there are 16384 tokens in all. A causal mask leaves half of the
# operations. SDPA is told which library to call.


def cudnn(*inputs, **options):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(*inputs, **options)


def flash(*inputs, **options):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(*inputs, **options)


LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def calls(length, D):
    ops = {
        "Triton": partial(flash_attention_forward, causal=True),
        "cuDNN": partial(cudnn, is_causal=True),
        "FlashAttention-2": partial(flash, is_causal=True),
    }
    x = inputs(length, D)
    return {name: partial(op, *x) for name, op in ops.items()}


def benchmark(D):
    times = {length: gpu_time(calls(length, D)) for length in LENGTHS}
    table = rate_table(
        times, "tokens", "TFLOP/s", lambda length: operations(length) / 2
    )
    print(f"heads of {D}", table.to_string(), sep="\n")
    wide = table.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title=f"causal, heads of {D}")
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark(D=128)

if __name__ == "__main__" and DEVICE.type == "cuda":
    results_of_64 = benchmark(D=64)

# %%
# Reading the result
# ------------------
#
# The op lies between FlashAttention-2 and cuDNN at each length.
# A multiprocessor of an H200 does 4096 operations of the tensor cores in a
# cycle, by its data sheet, and 16 exponentials, by CUDA's programming guide. So
# a score takes 1/8 of a cycle of the tensor cores with heads of 128, 1/16 with
# heads of 64, and 1/16 for its exponential. With heads of 64 both take the same
# time. In the loop, the exponentials need the first product, and the second
# product needs the exponentials. How long the tensor cores wait for them, no
# figure here tells. With a causal mask, the op is farthest from cuDNN at short
# lengths. With heads of 128 it is so without a mask, too, as the table beside
# other libraries shows. So the blocks at the diagonal are not the only cause.

# %%
# Break it
# --------
#
# The bug that everybody writes once is to leave out the factor of what was
# added up before. The result looks plausible, and is right whenever the first
# block has the largest score. Here is the loop in PyTorch, with the factor and
# without it, for one block of 256 keys and for four of 64:


def attention_blocks(q, k, v, size, forget):
    """Return attention, block by block; the factor may be forgotten."""
    m = torch.full_like(q[..., :1], -torch.inf)
    total, acc = torch.zeros_like(m), torch.zeros_like(q)
    for keys, values in zip(k.split(size, 2), v.split(size, 2), strict=True):
        s = q @ keys.mT * q.shape[-1] ** -0.5
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p = (s - m_new).exp()
        rescale = 1.0 if forget else (m - m_new).exp()
        total = total * rescale + p.sum(-1, keepdim=True)
        acc = acc * rescale + p @ values
        m = m_new
    return acc / total


if __name__ == "__main__":
    q, k, v = (random(1, 1, 256, 64, dtype=torch.float64) for _ in range(3))
    expected, _ = reference(q, k, v)
    for size in (256, 64):
        for forget in (False, True):
            out = attention_blocks(q, k, v, size, forget)
            error = (out - expected).abs().max().item()
            done = "forgotten" if forget else "kept"
            print(f"blocks of {size:3}, factor {done:9}: error {error:.1e}")
            assert (error > 1e-3) == (forget and size < 256)

# %%
# With one block there is nothing to rescale, so a test with few keys finds
# nothing. Test with more keys than a block has, and compare with float64.

# %%
# Go further
# ----------
#
# 1. A backward needs the probabilities again. Which two numbers of each row are
#    enough to recompute them from ``q`` and ``k``, and can they be one?
# 2. The op computes ``p`` in float32 and rounds it to the type of ``v``. What
#    would be lost if ``p`` were normalised, divided by its sum, before that?
#
# To read on:
#
# * `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, with the order of
#   loops that this page has.
# * ``matmul.py`` is about ``tl.dot`` and its tiles.

# %%
# Answers
# -------
#
# **1.** The maximum :math:`m` and the sum :math:`l`. As :math:`p_{ij} =
# e^{s_{ij} - m} / l = e^{s_{ij} - (m + \log l)}`, the *log-sum-exp*
# :math:`m + \log l` is enough.
#
# In base 2, it is ``m + log2(total)``, and :math:`p` is the power of 2.
#
# **2.** The sum is known at the end only, so each block would be divided by the
# sum so far, and corrected twice. In bfloat16 rounding would lose the same,
# since it is relative. Float16 has all its bits down to :math:`2^{-14}` only:
# of 100000 keys, a normalised ``p`` is about :math:`10^{-5}`. Ours has a
# largest value of 1.
