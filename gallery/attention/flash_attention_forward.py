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
# take_instead = "hopper_attention"
#
# [[tool.triton-gallery.step_through]]
# kernel = "one_query_kernel"
# caption = """
# Four scores in two blocks. The second block raises m from 2 to 3. So rescale
# is 0.5: total and acc are halved before the second block is added."""
# registers = ["s", "v", "m", "m_new", "p", "rescale", "total", "acc"]
# inputs.s = "torch.tensor([1.0, 2.0, 1.0, 3.0])"
# inputs.v = "torch.tensor([8.0, 4.0, 16.0, 2.0])"
# inputs.out = "torch.zeros(1)"
# call = "one_query_kernel[(1,)](s, v, out, N=4, BLOCK=2)"
# expected.out = "torch.tensor([5.0])"
#
# [[tool.triton-gallery.step_through]]
# kernel = "attention_kernel"
# caption = """
# Four tokens, a head of dimension 2, blocks of two queries and two keys, and a
# causal mask. Program 1 has queries 2 and 3. In its second turn, key 3 is
# hidden from query 2: its score is -inf and its weight p is 0. Program 0 never
# loads keys 2 and 3."""
# registers = ["end", "s", "p", "m", "rescale", "total", "acc"]
# inputs.q = "torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])"
# inputs.k = "torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 2.0], [2.0, 0.0]])"
# inputs.v = "torch.tensor([[4.0, 1.0], [2.0, 5.0], [8.0, 3.0], [6.0, 7.0]])"
# inputs.out = "torch.zeros(4, 2)"
# inputs.scale = "2**-0.5 * LOG2_E"
# start = [1, 1]
# call = "attention_kernel[(2, 1)](q, k, v, out, scale, 4, 2, True, 2, 2)"
# expected.out = "sdpa(q, k, v, is_causal=True)"
# ///
r"""
Flash attention, forward
========================

Attention weighs the values of all tokens by a softmax of scores. PyTorch's
operators write the scores of all pairs of tokens to memory; flash attention
computes a block of scores at a time and never writes one, so its memory grows
with the length and not with its square. For a plain or a causal mask, call
PyTorch's ``scaled_dot_product_attention``; write a kernel when you need
something that the library does not have.

After this page you can

* compute a softmax block by block, with the online softmax;
* write attention as one kernel;
* leave out the blocks that a causal mask hides.
"""

# sphinx_gallery_tags = ["attention", "compute bound"]
import math
import os
import warnings
from functools import partial

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

# %%
# In PyTorch
# ----------
#
# Query :math:`i` has a *score* :math:`s_{ij}` for each key :math:`j`. A softmax
# turns the scores of a query into weights, and the output is the weighted sum
# of the values:
#
# .. math:: s_{ij} = \frac{q_i \cdot k_j}{\sqrt D}, \qquad o_i =
#    \frac{\sum_j e^{s_{ij}} v_j}{\sum_j e^{s_{ij}}}
#
# Every kernel has to read ``q``, ``k`` and ``v`` and to write the output. This
# traffic is the *floor*. PyTorch's operators also write and read a matrix of
# scores, which for long texts is many times the floor:

TOKENS = 16384  # batch size times length, the same for every length
generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(*shape):
    normal = torch.randn(shape, generator=generator, device=DEVICE)
    return normal.to(torch.float16)


def inputs(length):
    """Return queries, keys and values: 16 heads of dimension 128."""
    return [random(TOKENS // length, 16, length, 128) for _ in range(3)]


def attention_torch(q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


if __name__ == "__main__":
    for L in (512, 4096, 32768):
        # A tensor of the device "meta" has a shape and no memory.
        q = torch.empty(16, L, 128, dtype=torch.float16, device="meta")
        scores = (q @ q.mT).nbytes
        print(f"{L:5} tokens: scores of {scores / 1e9:5.2f} GB,", end=" ")
        print(f"{scores / (4 * q.nbytes):3.0f} times the floor")

# %%
# Does the time follow? ``SDPA`` is PyTorch's ``scaled_dot_product_attention``,
# which calls a library's kernel. (``partial`` and ``gpu_time`` come from the
# folded cell of imports.)

if __name__ == "__main__" and DEVICE.type == "cuda":
    x = inputs(4096)
    ops = {"PyTorch": attention_torch, "SDPA": sdpa}
    times = gpu_time({name: partial(op, *x) for name, op in ops.items()})
    for name, (ms, *_) in times.items():
        print(f"4096 tokens, {name}: {ms:.1f} ms")

# %%
# The online softmax, by hand
# ---------------------------
#
# A softmax divides by a sum over all scores, and a kernel sees one block at a
# time. It keeps three running numbers for a query: the largest score ``m``, the
# ``total`` of the weights, and ``acc``, the sum of weighted values. A weight is
# ``2**(s - m)``. No score is above ``m``, so no weight is above 1. When a block
# has a larger maximum, the sums so far have the wrong ``m``. One factor,
# ``rescale``, corrects both.
#
# Here is one query with four scores in two blocks. Weights are powers of 2
# instead of e, to keep the numbers short.


@triton.jit
def one_query_kernel(s_ptr, v_ptr, out_ptr, N, BLOCK: tl.constexpr):
    m = -float("inf")
    total = 0.0
    acc = 0.0
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        s = tl.load(s_ptr + offs)
        v = tl.load(v_ptr + offs)
        m_new = tl.maximum(m, tl.max(s, axis=0))
        p = tl.exp2(s - m_new)  # (BLOCK,)
        rescale = tl.exp2(m - m_new)  # 0 in the first block
        total = total * rescale + tl.sum(p, axis=0)
        acc = acc * rescale + tl.sum(p * v, axis=0)
        m = m_new
    tl.store(out_ptr, acc / total)


# %%
# Break it
# --------
#
# A mask hides a key by a score of ``-inf``: its weight is 0. Let us hide the
# second block, and then the first:


def one_query(*scores):
    s = torch.tensor(scores, device=DEVICE)
    v = torch.tensor([8.0, 4.0, 16.0, 2.0], device=DEVICE)
    out = torch.empty(1, device=DEVICE)
    one_query_kernel[(1,)](s, v, out, N=4, BLOCK=2)
    return out.item()


if __name__ == "__main__":
    torch.testing.assert_close(one_query(1.0, 2.0, 1.0, 3.0), 5.0)
    second = one_query(1.0, 2.0, -math.inf, -math.inf)
    with warnings.catch_warnings(action="ignore"):  # the interpreter's, of NaN
        first = one_query(-math.inf, -math.inf, 1.0, 3.0)
    print(f"second block hidden: {second:.2f}, first block hidden: {first:.2f}")

# %%
# If all of the first block is hidden, ``m_new`` is ``-inf`` too, and ``-inf -
# -inf`` is NaN. The guard is to start ``m`` at a finite number below all
# scores, such as -1e30. The causal mask below needs no guard: every query sees
# key 0, which is in the first block. A sliding window does need it.

# %%
# The kernel
# ----------
#
# A program takes ``BLOCK_M`` queries of one head and walks over the keys. Each
# query is a row, so ``m`` and ``total`` become columns and ``acc`` a matrix.
# The scores of a block are a product, ``q @ k.T``, and the weighted sum of the
# values is another, ``p @ v``.
#
# A GPU has an instruction for :math:`2^x` and none for :math:`e^x`. Every score
# is multiplied by a scale anyway, so we put :math:`\log_2 e` into the scale and
# keep ``tl.exp2``.
#
# With a causal mask, query :math:`i` sees only keys 0 to :math:`i`. A program
# whose last query is ``end - 1`` can then stop before key ``end``: it neither
# loads nor multiplies the blocks after that.

LOG2_E = math.log2(math.e)


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,  # has the factor log2(e)
    L,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
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
    end = tl.minimum(L, (tl.program_id(axis=0) + 1) * BLOCK_M) if CAUSAL else L
    for start in range(0, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs = head + offs_n[:, None] * D + offs_d  # (BLOCK_N, D)
        # Zeros past the last key: a weight of 0 times NaN would be NaN.
        k = tl.load(k_ptr + offs, mask=offs_n[:, None] < L, other=0.0)
        v = tl.load(v_ptr + offs, mask=offs_n[:, None] < L, other=0.0)
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        last = offs_m if CAUSAL else L - 1  # the last key that a query sees
        s = tl.where(offs_n[None, :] <= last, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp2(s - m_new)  # (BLOCK_M, BLOCK_N)
        rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        # Tensor cores multiply operands of one type: p takes the type of v.
        acc = tl.dot(p.to(v.dtype), v, acc * rescale)
        m = m_new
    tl.store(out_ptr + head + offs_m * D + offs_d, acc / total, mask=offs_m < L)


def attention(q, k, v, causal=False):
    """Return attention; q, k and v are contiguous (batch, heads, L, D)."""
    assert q.shape == k.shape == v.shape
    assert all(tensor.is_contiguous() for tensor in (q, k, v))
    # tl.dot would round float32 to the 11 bits of TF32.
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    batch, heads, L, D = q.shape
    assert D in (16, 32, 64, 128)  # a power of two, as tl.arange takes
    out = torch.empty_like(q)
    scale = D**-0.5 * LOG2_E
    # A larger block of queries reads the keys less often, until acc, of
    # BLOCK_M x D, no longer fits in the registers of 8 warps.
    BLOCK_M, BLOCK_N = 128, 64
    grid = (triton.cdiv(L, BLOCK_M), batch * heads)
    attention_kernel[grid](
        q, k, v, out, scale, L, D, causal, BLOCK_M, BLOCK_N, num_warps=8
    )
    return out


# %%
# Is it right?
# ------------
#
# We compare with PyTorch in float64, at a length that no block divides. The
# kernel rounds the weights and the output to the 11 bits of float16. Each
# rounding costs at most :math:`2^{-11}` of the largest value. We allow four:
# the two, and as much again in reserve.


def check(causal):
    q, k, v = (random(2, 3, 200, 64) for _ in range(3))
    expected = sdpa(q.double(), k.double(), v.double(), is_causal=causal)
    out = attention(q, k, v, causal).double()
    atol = 4 * 2**-11 * v.abs().max().item()
    error = (out - expected).abs().max()
    print(f"{causal=}: largest error {error:.1e},", end=" ")
    print(f"allowed {atol:.1e}")
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


if __name__ == "__main__":
    check(causal=False)
    check(causal=True)

# %%
# How fast?
# ---------
#
# Without a mask, in TFLOP/s: :math:`4 D` operations for each score.
# ``torch.compile`` recognises attention and calls SDPA as well. ``Roof`` is a
# matrix product of the vendor's library with as many operations.


def operations(length):
    return 4e-9 * TOKENS * 2048 * length  # in units of 10**9; 16 * 128 is 2048


def roof(length):
    a, b = random(TOKENS, 2 * length), random(2 * length, 2048)
    return partial(torch.matmul, a, b)


if __name__ == "__main__" and DEVICE.type == "cuda":
    for length in (512, 1024, 2048):
        torch.compiler.reset()
        fast = torch.compile(attention_torch, dynamic=False, fullgraph=True)
        tried = {"this page": attention, "PyTorch": attention_torch}
        tried |= {"torch.compile": fast, "SDPA": sdpa}
        x = inputs(length)
        calls = {name: partial(op, *x) for name, op in tried.items()}
        times = gpu_time(calls | {"Roof": roof(length)})
        rates = [
            f"{name} {operations(length) / ms:.0f}"
            for name, (ms, *_) in times.items()
        ]
        print(f"{length:4} tokens:", ", ".join(rates))

# %%
# What does the causal mask save?
# -------------------------------
#
# Of :math:`n` blocks of queries and as many blocks of keys, the causal mask
# leaves :math:`(n + 1) / 2n`: a half and the diagonal. Does the time follow?

if __name__ == "__main__" and DEVICE.type == "cuda":
    for length in (512, 2048, 8192):
        x = inputs(length)
        full = partial(attention, *x)
        causal = partial(attention, *x, causal=True)
        times = gpu_time({"full": full, "causal": causal})
        ratio = times["causal"][0] / times["full"][0]
        n = length // 128
        print(f"{length} tokens: {(n + 1) / (2 * n):.2f} of the work,", end=" ")
        print(f"{ratio:.2f} of the time")

# %%
# The op
# ------
#
# Our kernel masks every block; the op masks only those at the diagonal and at
# the end. It starts the longest programs first, and lets several heads of
# queries share one head of keys (grouped-query attention). It takes any strides
# and head sizes up to 256, and gives 0 for a query that sees nothing, as
# PyTorch does.

from triton_gallery_ops.flash_attention_forward import flash_attention_forward

# %%
# The result
# ----------
#
# The benchmark is causal, so half of the operations count. In the chart,
# ``Triton`` is the op, and ``Triton, this page`` is our kernel. ``cuDNN`` and
# ``FlashAttention-2`` are two libraries that SDPA can call.


def library(backend):
    """Return causal attention by one of the libraries of SDPA."""

    def call(*x):
        with sdpa_kernel(backend):
            return sdpa(*x, is_causal=True)

    return call


SERIES = {
    "Triton": partial(flash_attention_forward, causal=True),
    "Triton, this page": partial(attention, causal=True),
    "cuDNN": library(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": library(SDPBackend.FLASH_ATTENTION),
}


def calls(length):
    x = inputs(length)
    ops = {name: partial(op, *x) for name, op in SERIES.items()}
    return ops | {"Roof": roof(length // 2)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    times = {length: gpu_time(calls(length)) for length in lengths}
    results = rate_table(
        times, "tokens", "TFLOP/s", lambda length: operations(length) / 2
    )
    print(results.to_string())
    wide = results.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="causal, heads of 128")
    for name in wide.columns.drop("Triton"):
        ratio = wide["Triton"] / wide[name]
        print(f"the op: {ratio.min():.2f} to {ratio.max():.2f} times", name)

# %%
# Exercises
# ---------
#
# **1.** In a sliding window, a query sees itself and the ``WINDOW - 1`` keys
# before it. A program's first query is ``first``. At which key, a multiple of
# ``BLOCK_N``, can its loop start?


def loop_start(first, WINDOW, BLOCK_N):
    return None  # your code


def check_start(start):
    for first, WINDOW, BLOCK_N in ((4, 9, 2), (12, 5, 4), (32, 6, 8)):
        answer = start(first, WINDOW, BLOCK_N)
        if answer is None:
            return "not solved yet"
        seen = [key for key in range(first + 1) if key > first - WINDOW]
        skipped = range(0, answer)
        first_block = range(answer, answer + BLOCK_N)
        if answer % BLOCK_N or seen[0] in skipped or seen[0] not in first_block:
            return "wrong"
    return "right"


if __name__ == "__main__":
    print(check_start(loop_start))

# %%
# **2.** Two programs share the keys of one query, and each returns its ``m``,
# ``total`` and ``acc``, in base 2. Merge them into the output. A decoding
# kernel ends like this (``decode_attention.py``).


def merge(m1, total1, acc1, m2, total2, acc2):
    return None  # your code


def check_merge(merged):
    scores, values = random(2, 8).double() * 4, random(2, 8).double()
    m = scores.amax(1)
    p = 2 ** (scores - m[:, None])
    total, acc = p.sum(1), (p * values).sum(1)
    answer = merged(m[0], total[0], acc[0], m[1], total[1], acc[1])
    if answer is None:
        return "not solved yet"
    expected = (2**scores * values).sum() / (2**scores).sum()
    return "right" if torch.allclose(answer, expected) else "wrong"


if __name__ == "__main__":
    print(check_merge(merge))

# %%
# Answers
# -------
#
# **1.** The oldest key that any query of the program sees is the oldest of its
# first query. Its block is the first. **2.** The sums that have the smaller
# maximum are corrected, as in the loop.


def start_answer(first, WINDOW, BLOCK_N):
    oldest = max(0, first - WINDOW + 1)
    return oldest // BLOCK_N * BLOCK_N


def merge_answer(m1, total1, acc1, m2, total2, acc2):
    m = torch.maximum(m1, m2)
    r1, r2 = 2 ** (m1 - m), 2 ** (m2 - m)
    return (acc1 * r1 + acc2 * r2) / (total1 * r1 + total2 * r2)


if __name__ == "__main__":
    answers = check_start(start_answer), check_merge(merge_answer)
    print(*answers)
    assert answers == ("right", "right")

# %%
# To read on: `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_ has this
# order of loops, and ``flash_attention.py`` adds the backward.
