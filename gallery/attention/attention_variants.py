# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Hand attention a bias, cap, window or documents as functions, and skip the
# tiles that no query sees, forward and backward."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "eight functions of variants, a forward, two passes of a backward"
# ///
r"""
Attention with your own score
=============================

Models change attention in small ways: a window, a bias, a cap, documents side
by side, a sink. One kernel serves them all if it takes the change as a
function. A second function says which keys a query sees. From it the kernel
derives the mask, and skips the tiles that no query sees.

After this page you can

* hand a jitted function to a kernel, with tensors and numbers of its own;
* skip the tiles that a window or documents hide, forward and backward;
* mask only the tiles that need it, by one branch;
* put an attention sink into a softmax;
* add a variant in a few lines, with gradients.
"""

# sphinx_gallery_tags = ["attention", "autograd", "compute bound"]
import ast
import functools
import inspect
import math
import os
from collections.abc import Sequence
from functools import partial

import pandas as pd
import torch
from torch.library import Library, custom_op

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


def flex(score_mod, mask_mod, length):
    """Return compiled flex_attention, with a block mask made beforehand."""
    from torch.nn.attention.flex_attention import (
        create_block_mask,
        flex_attention,
    )

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = create_block_mask(mask_mod, None, None, length, length, DEVICE)
    return partial(compiled, score_mod=score_mod, block_mask=mask)


def backward_of(op, q, k, v, grad):
    """Return a call that computes an op's gradients through autograd."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    grads = partial(torch.autograd.grad, retain_graph=True)
    return partial(grads, op(*leaves), leaves, grad)


def slopes_of(heads):  # of ALiBi, for a power of two of heads
    return torch.exp2(torch.arange(1, heads + 1, device=DEVICE) * -8.0 / heads)


def documents_of(length, count=12):
    """Return for each token where its document begins; lengths differ."""
    cuts = torch.linspace(0, 1, count + 1)[:-1].square() * length
    sizes = cuts.long().diff(append=torch.tensor([length]))
    begins = cuts.long().repeat_interleave(sizes)
    return begins.to(device=DEVICE, dtype=torch.int32)


def spans_of(length):
    """Return for each variant the first key that each query sees."""
    i = torch.arange(length, device=DEVICE)
    return {
        "causal": 0 * i,
        "window of 1024": (i - 1023).clamp(min=0),
        "12 documents": documents_of(length),
    }


# %%
# In PyTorch
# ----------
#
# Attention is :math:`o_i = \sum_j p_{ij} v_j`, where :math:`p_{ij}` is a
# softmax over :math:`j` of the scores :math:`s_{ij} = q_i \cdot k_j / \sqrt D`.
# A *variant* changes the scores, or hides keys:
#
# * **ALiBi** subtracts slope times distance: :math:`s_{ij} - a_h (i - j)`;
# * a **soft cap** keeps scores between :math:`\pm c`: :math:`c \tanh(s / c)`;
# * in a **window** of ``W``, query ``i`` sees the last ``W`` keys up to ``i``;
# * with **documents** side by side, it sees those of its own one up to ``i``.
#
# The *floor* is to compute what is seen. How much does a window of 1024 leave?

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def alibi_window_torch(q, k, v, slopes, size):
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    distance = i - i.T
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores - slopes[:, None, None] * distance
    hidden = (distance < 0) | (distance >= size)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v


if __name__ == "__main__":
    for length in (1024, 4096, 16384):
        seen = sum(min(i + 1, 1024) for i in range(length)) / length**2
        print(f"{length:5} tokens: {seen:3.0%} of the scores are seen")

# %%
# The first kernel
# ----------------
#
# A kernel can take a jitted function, as a ``tl.constexpr``. The compiler puts
# its code in place of the call, and makes a kernel for each function. Here
# ``SCORE`` gets a tile of scores and its place: batch, head, a column of
# queries ``i`` and a row of keys ``j``. What else it needs is in ``given``, a
# tuple of tensors and numbers; ``tl.constexpr`` makes a number a constant. A
# star hands the elements on one by one. A score of ``-inf`` hides a key:
#
# .. code-block:: text
#
#     one tile      j: keys start to start + BLOCK_N - 1
#                 +------------------------+
#     i: BLOCK_M  |       scores  s        | -> SCORE(s, batch, head, i, j,
#     queries     +------------------------+          *given)
#
# The rest is the *online* softmax of ``flash_attention_forward.py``: ``m`` is
# the maximum so far, ``total`` the sum of exponentials, ``acc`` that of values.


@triton.jit
def alibi_window(s, batch, head, i, j, slopes, SIZE):
    s -= tl.load(slopes + head) * (i - j)
    return tl.where((j <= i) & (i - j < SIZE), s, -float("inf"))


@triton.jit
def score_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    given,
    scale,
    HEADS,
    L,
    SCORE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32, the offset of a head would overflow past element 2**31.
    pid = tl.program_id(axis=1).to(tl.int64)
    i = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    own = pid * L * D + i * D + tl.arange(0, D)[None, :]  # (BLOCK_M, D)
    q = tl.load(q_ptr + own, mask=i < L, other=0.0)
    # Not -inf: that minus itself, for a row that has seen no key yet, is NaN.
    m = tl.full((BLOCK_M, 1), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, L, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
        offs = pid * L * D + offs_n * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + offs, mask=offs_n < L, other=0.0)
        v = tl.load(v_ptr + offs, mask=offs_n < L, other=0.0)
        j = start + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        s = SCORE(s, pid // HEADS, pid % HEADS, i, j, *given)
        s = tl.where(j < L, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp(s - m_new)  # (BLOCK_M, BLOCK_N)
        # What was added up so far had the old maximum.
        rescale = tl.exp(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale)
        m = m_new
    tl.store(out_ptr + own, acc / total, mask=i < L)


def attention(q, k, v, score, *given, kernel=score_kernel, **more):
    """Return a variant of attention of contiguous (batch, heads, L, D)."""
    (batch, heads, L, D), out = q.shape, torch.empty_like(q)
    tile = {"D": D, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
    launch = kernel[(triton.cdiv(L, 128), batch * heads)]
    launch(q, k, v, out, given, D**-0.5, heads, L, score, **tile, **more)
    return out


# %%
# Is it right?
# ------------
#
# In float16, the probabilities and the result are each rounded, by at most
# :math:`2^{-11}` of the largest ``v``. We allow twice the sum of both.

if __name__ == "__main__":
    x = [random(2, 4, 200, 64) for _ in range(3)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
    out = attention(*x, alibi_window, slopes, tl.constexpr(100))
    expected = alibi_window_torch(*(t.double() for t in x), slopes, 100)
    error, atol = (out - expected).abs().max(), 2**-9 * x[2].abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# The window is 1024. A seen score counts :math:`4D` operations.

TOKENS, HEADS = 16384, 16  # tokens in all, at each length


if __name__ == "__main__" and DEVICE.type == "cuda":
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device=DEVICE) / 2)
    for length in (1024, 2048, 4096):
        x = [random(TOKENS // length, HEADS, length, 128) for _ in range(3)]
        own = *x, alibi_window, slopes, tl.constexpr(1024)
        fast = torch.compile(alibi_window_torch, dynamic=False, fullgraph=True)
        tried = {"PyTorch": partial(alibi_window_torch, *x, slopes, 1024)}
        tried["torch.compile"] = partial(fast, *x, slopes, 1024)
        tried["Triton"] = partial(attention, *own)
        found = gpu_time(tried, turns=20).items()
        seen = sum(min(i + 1, 1024) for i in range(length))
        work = 4e-9 * 128 * HEADS * TOKENS / length * seen
        rates = {who: round(work / ms) for who, (ms, *_) in found}
        print(f"{length} tokens, TFLOP/s: {rates}")

# %%
# Which tiles does nobody see?
# ----------------------------
#
# The first kernel computes all scores, then hides most. Which could it leave
# out? In these variants, the keys that a query sees lie side by side. So let a
# second function, ``SPAN``, return where they begin and end. A later query's
# span neither begins nor ends earlier: spans *only move on*. So the first and
# the last query of a block tell what the whole block sees:
#
# .. code-block:: text
#
#     window of 9     keys 0-3   keys 4-7   keys 8-11  keys 12-15
#     query  8        # # # #  | # # # #  | # . . .  | . . . .
#     query  9        . # # #  | # # # #  | # # . .  | . . . .
#     query 10        . . # #  | # # # #  | # # # .  | . . . .
#     query 11        . . . #  | # # # #  | # # # #  | . . . .
#                       mask       full       mask       skip
#
# The block begins to see keys where its first query does, at 0, and stops where
# its last query does, before 12. So the loop over keys goes from 0 to 12, and
# the mask comes from the span of each query. How many tiles are left? We count
# those of 64 queries and 64 keys, for 16384 tokens. That needs no GPU.


def inputs(length, D=128):
    return [random(TOKENS // length, HEADS, length, D) for _ in range(4)]


def operations(begins, D=128):  # of a forward, in units of 10**9
    length = len(begins)
    ends = torch.arange(1, length + 1, device=DEVICE)
    return 4e-9 * D * HEADS * TOKENS / length * (ends - begins).sum().item()


BLOCK_M, BLOCK_N = 64, 64


def tiles_of(begins):
    """Return the number of tiles, of those computed and of those masked."""
    length = len(begins)
    computed = masked = 0
    for first in range(0, length, BLOCK_M):
        final = min(first + BLOCK_M, length) - 1
        start, latest = begins[first].item(), begins[final].item()
        for block in range(start, final + 1, BLOCK_N):
            full = block >= latest and block + BLOCK_N <= first + 1
            computed, masked = computed + 1, masked + (not full)
    blocks = triton.cdiv(length, BLOCK_M) * triton.cdiv(length, BLOCK_N)
    return blocks, computed, masked


if __name__ == "__main__":
    rows = {variant: tiles_of(b) for variant, b in spans_of(16384).items()}
    print(pd.DataFrame(rows, ["all", "computed", "masked"]).T.to_string())

# %%
# Which tiles need a mask?
# ------------------------
#
# A mask costs two comparisons for each score. In a tile where every query sees
# every key, it hides nothing: such a tile is *full*. In the drawing, the full
# tile lies between the last query's begin, 3, and the first query's end, 9. In
# the op these are ``latest`` and ``every``. A tile that begins before
# ``latest`` or ends past ``every`` is masked; the table's last column counts
# these. Both are numbers, not tiles, so all threads take the same branch.

# %%
# What does a backward need?
# --------------------------
#
# ``flash_attention.py`` derives the gradient of a score :math:`s'_{ij}`, the
# one that enters the softmax: :math:`p_{ij} (g_i \cdot v_j - \delta_i)` with
# :math:`\delta_i = g_i \cdot o_i`, where :math:`g` is the gradient of
# :math:`o`. A variant adds one factor, the derivative of its function:
#
# .. math:: \mathrm{d}s_{ij} = p_{ij} (g_i \cdot v_j - \delta_i)
#    \, \frac{\partial s'_{ij}}{\partial s_{ij}}, \qquad
#    \frac{\partial}{\partial s} \left(c \tanh \frac{s}{c}\right) =
#    1 - \tanh^2 \frac{s}{c}
#
# That is a third function, ``SLOPE``. ALiBi, whose factor is 1, needs none.
#
# One pass goes along keys for ``dq``, with the loop of the forward. The other
# goes along *queries* for ``dk`` and ``dv``. Which queries see a block of keys?
# Spans only move on, so the blocks of queries stand in this order:
#
# .. code-block:: text
#
#     keys 8-11 of the window above
#     queries 0-3, 4-7             end before key 8     too early
#     queries 8-11, 12-15, 16-19   see some
#     queries 20-23, 24-27, ...    begin past key 11    too late
#
# A program counts, 128 blocks at a time, those that end too early and those
# that do not begin too late. Its loop goes from the first count to the second.

# %%
# A sink
# ------
#
# A softmax has to give its weights to somebody, even where no key fits. A
# *sink* :math:`z_h`, a number that each head learns, is one more score, of a
# key that is not there, and has no value:
#
# .. math:: p_{ij} = \frac{e^{s_{ij}}}{e^{z_h} + \sum_k e^{s_{ik}}}, \qquad
#    \mathrm{d}z_h = -\sum_i \frac{e^{z_h}}{e^{z_h} + \sum_k e^{s_{ik}}}
#    \, \delta_i
#
# The online softmax starts with the sink: the maximum begins as the sink, and
# the sum as 1 instead of 0. No loop changes. The sink's gradient needs only
# what the backward has: the log-sum-exp of each row, and :math:`\delta`. This
# page does not time a sink. The paper on attention sinks, below, has another
# way: it keeps the keys of the first tokens, beside a window. These do not lie
# side by side, so no span has both. A score of ``-inf`` with the span "causal"
# can hide the keys between them, but does not skip their tiles.

# %%
# The op
# ------
#
# ``score`` and ``span`` are names, or tuples of a name and what its function is
# given. Two dictionaries have the functions; add yours. Exponentials have base
# 2, and the op takes any lengths and strides, groups of heads, and heads of up
# to 256, as ``flash_attention.py`` explains.

ATTENTION_VARIANTS_NAMESPACE = "triton_gallery"
ATTENTION_VARIANTS_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
ATTENTION_VARIANTS_LOG2E = tl.constexpr(math.log2(math.e))
# For D, padded to a power of two: the tiles of the forward, of the pass for dq,
# and of the pass for dk and dv. A tile is BLOCK_M, BLOCK_N, warps and stages.
ATTENTION_VARIANTS_TILES = {
    16: [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)],
    32: [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)],
    64: [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2)],
    128: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)],
    256: [(128, 32, 8, 3), (64, 32, 8, 2), (16, 64, 8, 2)],
}
# Where a program gets fewer bytes of shared memory than this (on Hopper it gets
# more), the kernels take the small tiles.
ATTENTION_VARIANTS_ROOM = 200_000
ATTENTION_VARIANTS_SMALL = {
    16: [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)],
    32: [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)],
    64: [(64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)],
    128: [(64, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)],
    256: [(32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)],
}


# A score returns what becomes of s, the tile of scores of queries i and keys j.
# Where its derivative by s is not 1, a second function returns that: the slope.
# What is given beside a score's name follows j. In the pass for dk and dv, s
# has keys by queries, i is a row and j a column: combine them by broadcasting.
@triton.jit
def _attention_variants_plain(s, batch, head, i, j):
    return s


@triton.jit
def _attention_variants_alibi(s, batch, head, i, j, slopes):
    slope = tl.load(slopes + head).to(s.dtype)
    # Converted before they meet, i and j are a column and a row, not a tile.
    return s - slope * (i.to(s.dtype) - j.to(s.dtype))


@triton.jit
def _attention_variants_softcap(s, batch, head, i, j, CAP):
    # CAP * tanh(s / CAP), with one exponential. Where that is inf, CAP remains.
    power = tl.exp2(s * (2.0 * ATTENTION_VARIANTS_LOG2E / CAP))
    return CAP - 2.0 * CAP / (1.0 + power)


@triton.jit
def _attention_variants_softcap_slope(s, batch, head, i, j, CAP):
    tanh = _attention_variants_softcap(s, batch, head, i, j, CAP) / CAP
    return 1.0 - tanh * tanh


# A span returns the first key that query i sees, and the one after the last.
# Neither may be less for a later query: the kernels rely on it, unchecked.
@triton.jit
def _attention_variants_all(batch, head, i):
    return 0, i * 0 + 2**30


@triton.jit
def _attention_variants_causal(batch, head, i):
    return 0, i + 1


@triton.jit
def _attention_variants_window(batch, head, i, SIZE):
    return i + 1 - SIZE, i + 1


@triton.jit
def _attention_variants_documents(batch, head, i, begins):
    return tl.load(begins + i), i + 1


ATTENTION_VARIANTS_SCORES = {
    "plain": (_attention_variants_plain, None),
    "alibi": (_attention_variants_alibi, None),
    "softcap": (_attention_variants_softcap, _attention_variants_softcap_slope),
}
ATTENTION_VARIANTS_SPANS = {
    "all": _attention_variants_all,
    "causal": _attention_variants_causal,
    "window": _attention_variants_window,
    "documents": _attention_variants_documents,
}


@triton.jit
def _attention_variants_place(L, HEADS, BLOCK: tl.constexpr):
    """Return which block of a head this program has, the head and the batch."""
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(axis=0)
    # In int32, an offset would overflow past element 2**31.
    head = (pid // blocks % HEADS).to(tl.int64)
    batch = (pid // blocks // HEADS).to(tl.int64)
    return pid % blocks, head, batch


@triton.jit
def _attention_variants_seen(
    i,
    LQ,
    LK,
    batch,
    head,
    span_given,
    SPAN: tl.constexpr,
):
    """Return the first key that queries see, and the one after the last."""
    # A span may load from its tensors at i, so i is the place of a query.
    i = tl.minimum(i, LQ - 1)
    begin, end = SPAN(batch, head, i, *span_given)
    # Adding zeros gives a constant the shape of i.
    begin = tl.maximum(begin + i * 0, 0)
    end = tl.minimum(end + i * 0, LK)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def _attention_variants_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    score_given,
    span_given,
    LQ,
    LK,
    HEADS,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    SCORE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid, head, batch = _attention_variants_place(LQ, HEADS, BLOCK_M)
    # Later queries often see more keys: programs with the most work come first.
    begin = (tl.cdiv(LQ, BLOCK_M) - 1 - pid) * BLOCK_M
    offs_m = begin + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = offs_m.to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_d
    inside = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q = tl.load(q_ptrs + row * stride_ql, mask=inside, other=0.0)
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    if sinks_ptr is not None:
        # A sink is a score without a value: the sum begins with its power.
        sink = tl.load(sinks_ptr + head).to(ACC) * ATTENTION_VARIANTS_LOG2E
        m = tl.maximum(m, sink)
        total = tl.exp2(sink - m)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    # Of spans that only move on, the first query's begins first, and so on.
    low, high = _attention_variants_seen(
        offs_m, LQ, LK, batch, head, span_given, SPAN
    )
    first, every = _attention_variants_seen(
        begin, LQ, LK, batch, head, span_given, SPAN
    )
    latest, last = _attention_variants_seen(
        begin + BLOCK_M - 1, LQ, LK, batch, head, span_given, SPAN
    )
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # Past D lies another head, or memory of another tensor.
        mask = (offs_n[:, None] < LK) & (offs_d < D)  # (BLOCK_N, BLOCK_D)
        # In int32, a key's offset would overflow past element 2**31.
        row_n = offs_n[:, None].to(tl.int64)
        k = tl.load(k_ptrs + row_n * stride_kl, mask=mask, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * SCALE
        # A score may load from its tensors at i and j: they have to exist.
        i, j = tl.minimum(offs_m, LQ - 1), tl.minimum(offs_n, LK - 1)[None, :]
        s = SCORE(s, batch, head, i, j, *score_given)  # (BLOCK_M, BLOCK_N)
        if (start < latest) | (start + BLOCK_N > every):
            # Some query of this block does not see some key of that one.
            seen = (offs_n[None, :] >= low) & (offs_n[None, :] < high)
            s = tl.where(seen, s, -float("inf"))
        # What exp2 takes is one multiply-add of a score.
        highest = tl.max(s, axis=1, keep_dims=True) * ATTENTION_VARIANTS_LOG2E
        m_new = tl.maximum(m, highest)
        p = tl.exp2(s * ATTENTION_VARIANTS_LOG2E - m_new)
        # What was added up so far had the old maximum.
        rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        # NaN from past the end would stay NaN even with a weight of 0.
        v = tl.load(v_ptrs + row_n * stride_vl, mask=mask, other=0.0)
        # The tensor cores take p in the type of v.
        p = p.to(v.dtype)
        acc = acc * rescale
        acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
        m = m_new
    rows = (batch * HEADS + head) * LQ + row  # (BLOCK_M, 1)
    # A row that saw nothing has a sum of 0, and a result of 0.
    divisor = tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + rows * D + offs_d, acc / divisor, mask=inside)
    # The backward computes exp2(s - lse): with inf that is 0, as it should be.
    lse = tl.where(total == 0, float("inf"), m + tl.log2(divisor))
    tl.store(lse_ptr + rows, lse, mask=offs_m < LQ)


@triton.jit
def _attention_variants_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    score_given,
    span_given,
    LQ,
    LK,
    HEADS,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_dqb,
    stride_dqh,
    stride_dql,
    SCORE: tl.constexpr,
    SLOPE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid, head, batch = _attention_variants_place(LQ, HEADS, BLOCK_M)
    begin = (tl.cdiv(LQ, BLOCK_M) - 1 - pid) * BLOCK_M
    offs_m = begin + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = offs_m.to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_d
    grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_d
    dq_ptrs = dq_ptr + batch * stride_dqb + head * stride_dqh + offs_d
    inside = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q = tl.load(q_ptrs + row * stride_ql, mask=inside, other=0.0)
    grad = tl.load(grad_ptrs + row * stride_gl, mask=inside, other=0.0)
    # One sum of out * grad for each query, which the pass for dk needs, too
    sums = (batch * HEADS + head) * LQ + row  # (BLOCK_M, 1)
    out = tl.load(out_ptr + sums * D + offs_d, mask=inside, other=0.0)
    # Products of half precision would be rounded one by one.
    delta = tl.sum(out.to(ACC) * grad, axis=1, keep_dims=True)
    tl.store(delta_ptr + sums, delta, mask=offs_m < LQ)
    # With inf, queries past the end have a p of 0, whatever their score.
    lse = tl.load(lse_ptr + sums, mask=offs_m < LQ, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    low, high = _attention_variants_seen(
        offs_m, LQ, LK, batch, head, span_given, SPAN
    )
    first, every = _attention_variants_seen(
        begin, LQ, LK, batch, head, span_given, SPAN
    )
    latest, last = _attention_variants_seen(
        begin + BLOCK_M - 1, LQ, LK, batch, head, span_given, SPAN
    )
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = (offs_n[:, None] < LK) & (offs_d < D)  # (BLOCK_N, BLOCK_D)
        row_n = offs_n[:, None].to(tl.int64)
        k = tl.load(k_ptrs + row_n * stride_kl, mask=mask, other=0.0)
        raw = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * SCALE
        i, j = tl.minimum(offs_m, LQ - 1), tl.minimum(offs_n, LK - 1)[None, :]
        s = SCORE(raw, batch, head, i, j, *score_given)  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * ATTENTION_VARIANTS_LOG2E - lse)
        if (start < latest) | (start + BLOCK_N > every):
            # A hidden or padded key may have any score: its p may be inf.
            seen = (offs_n[None, :] >= low) & (offs_n[None, :] < high)
            p = tl.where(seen, p, 0.0)
        v = tl.load(v_ptrs + row_n * stride_vl, mask=mask, other=0.0)
        dp = tl.dot(grad, v.T, input_precision="ieee", out_dtype=ACC)
        ds = p * (dp - delta)  # (BLOCK_M, BLOCK_N)
        if SLOPE is not None:
            ds *= SLOPE(raw, batch, head, i, j, *score_given)
        # The tensor cores take ds in the type of k.
        ds = ds.to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee", out_dtype=ACC)
    # All terms have the factor SCALE: once at the end is cheaper than for each.
    tl.store(dq_ptrs + row * stride_dql, dq * SCALE, mask=inside)


@triton.jit
def _attention_variants_viewers(
    begin,
    LQ,
    LK,
    batch,
    head,
    span_given,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return between which queries those lie that see keys from begin on.

    Spans only move on. So the blocks of queries whose spans end too early come
    first, and those whose spans begin too late come last: count both.
    """
    skipped, left, blocks = begin * 0, begin * 0, tl.cdiv(LQ, BLOCK_M)
    for start in range(0, blocks, 128):
        block = start + tl.arange(0, 128)
        low, _ = _attention_variants_seen(
            block * BLOCK_M, LQ, LK, batch, head, span_given, SPAN
        )
        _, high = _attention_variants_seen(
            block * BLOCK_M + BLOCK_M - 1, LQ, LK, batch, head, span_given, SPAN
        )
        early = (block < blocks) & (high <= begin)
        near = (block < blocks) & (low < begin + BLOCK_N)
        skipped += tl.sum(early.to(tl.int32))
        left += tl.sum(near.to(tl.int32))
    return skipped * BLOCK_M, left * BLOCK_M


@triton.jit
def _attention_variants_dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    score_given,
    span_given,
    LQ,
    LK,
    HEADS,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_dkb,
    stride_dkh,
    stride_dkl,
    SCORE: tl.constexpr,
    SLOPE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Earlier keys are often seen by more queries: the most work starts first.
    heads = HEADS // GROUP
    pid, shared, batch = _attention_variants_place(LK, heads, BLOCK_N)
    begin = pid * BLOCK_N
    offs_n = begin + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = offs_n.to(tl.int64)
    k_ptrs = k_ptr + batch * stride_kb + shared * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + shared * stride_vh + offs_d
    inside = (offs_n < LK) & (offs_d < D)  # (BLOCK_N, BLOCK_D)
    k = tl.load(k_ptrs + row * stride_kl, mask=inside, other=0.0)
    v = tl.load(v_ptrs + row * stride_vl, mask=inside, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    for member in range(GROUP):
        head = shared * GROUP + member
        sums = (batch * HEADS + head) * LQ
        q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
        grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_d
        first, last = _attention_variants_viewers(
            begin, LQ, LK, batch, head, span_given, SPAN, BLOCK_M, BLOCK_N
        )
        for start in range(first, last, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
            row_m = offs_m[:, None].to(tl.int64)
            mask = (row_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
            q = tl.load(q_ptrs + row_m * stride_ql, mask=mask, other=0.0)
            lse = tl.load(
                lse_ptr + sums + offs_m, mask=offs_m < LQ, other=float("inf")
            )
            raw = tl.dot(k, q.T, input_precision="ieee", out_dtype=ACC) * SCALE
            i = tl.minimum(offs_m, LQ - 1)[None, :]
            j = tl.minimum(offs_n, LK - 1)
            s = SCORE(raw, batch, head, i, j, *score_given)
            p = tl.exp2(s * ATTENTION_VARIANTS_LOG2E - lse[None, :])
            _, every = _attention_variants_seen(
                start, LQ, LK, batch, head, span_given, SPAN
            )
            latest, _ = _attention_variants_seen(
                start + BLOCK_M - 1, LQ, LK, batch, head, span_given, SPAN
            )
            if (begin < latest) | (begin + BLOCK_N > every):
                # Padded keys are hidden, too: no span reaches past the last.
                low, high = _attention_variants_seen(
                    i, LQ, LK, batch, head, span_given, SPAN
                )
                p = tl.where((offs_n >= low) & (offs_n < high), p, 0.0)
            grad = tl.load(grad_ptrs + row_m * stride_gl, mask=mask, other=0.0)
            right = p.to(grad.dtype)  # (BLOCK_N, BLOCK_M)
            dv = tl.dot(right, grad, dv, input_precision="ieee", out_dtype=ACC)
            dp = tl.dot(v, grad.T, input_precision="ieee", out_dtype=ACC)
            delta = tl.load(delta_ptr + sums + offs_m, mask=offs_m < LQ)
            ds = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
            if SLOPE is not None:
                ds *= SLOPE(raw, batch, head, i, j, *score_given)
            # The tensor cores take ds in the type of q.
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee", out_dtype=ACC)
    offs = batch * stride_dkb + shared * stride_dkh + row * stride_dkl + offs_d
    tl.store(dk_ptr + offs, dk * SCALE, mask=inside)
    tl.store(dv_ptr + offs, dv, mask=inside)


@functools.cache
def _attention_variants_tiles(device, BLOCK_D, itemsize):
    """Return the blocks, warps and stages of the three kernels."""
    tiles = ATTENTION_VARIANTS_TILES[BLOCK_D]
    if itemsize > 2:  # float32 and float64: operands take registers
        n, num_warps = (32, 4) if BLOCK_D <= 64 else (16, 8)
        tiles = [(32, 16, 4, 1), (n, 16, num_warps, 1), (16, n, 4, 1)]
    elif device.type == "cuda":  # not the interpreter
        gpu = torch.cuda.get_device_properties(device)
        room = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
        if room < ATTENTION_VARIANTS_ROOM:
            tiles = ATTENTION_VARIANTS_SMALL[BLOCK_D]
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
    return [dict(zip(names, tile, strict=True)) for tile in tiles]


def _attention_variants_check(q, k, v, score, span, sinks, tensors):
    name = "attention_variants"
    if q.dtype not in ATTENTION_VARIANTS_DTYPES:
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    if len({t.dtype for t in (q, k, v)}) > 1:
        raise TypeError(f"{name} takes one dtype for q, k and v")
    others = tensors if sinks is None else (sinks, *tensors)
    if len({t.device for t in (q, k, v, *others)}) > 1:
        raise TypeError(f"{name} takes tensors on one device")
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and 1 <= q.shape[3] <= 256
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(
            f"{name} takes q of (batch, heads, queries, D), and k and v of one "
            "shape (batch, heads / n, keys, D), with D up to 256, not " + found
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"{name} takes a sink for each head of q")
    if score not in ATTENTION_VARIANTS_SCORES:
        raise ValueError(f"{name} has no score {score!r}")
    if span not in ATTENTION_VARIANTS_SPANS:
        raise ValueError(f"{name} has no span {span!r}")


def _attention_variants_rows(*tensors):
    """Return tensors that are contiguous along D."""
    return [t if t.stride(3) == 1 else t.contiguous() for t in tensors]


def _attention_variants_like(t):
    """Return memory for a gradient of t: in the order of t, adjacent along D.

    Where elements of t share memory, ``empty_like`` may choose another order.
    """
    new = torch.empty_like(t)
    return new if new.stride(3) == 1 else new.new_empty(t.shape)


def _attention_variants_read(*tensors):
    """Return tensors as kernels read them, and their strides."""
    if triton.knobs.runtime.interpret and tensors[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        tensors = [t.float() for t in tensors]
    return tensors, [stride for t in tensors for stride in t.stride()[:3]]


def _attention_variants_given(tensors, numbers):
    """Return what a function of a variant is given: numbers are constants."""
    return *(t.contiguous() for t in tensors), *map(tl.constexpr, numbers)


def _attention_variants_common(q, k, lse, score, span, scale):
    """Return the constants that all kernels have."""
    D = q.shape[3]
    return {
        "SCORE": ATTENTION_VARIANTS_SCORES[score][0],
        "SPAN": ATTENTION_VARIANTS_SPANS[span],
        "GROUP": q.shape[1] // k.shape[1],
        "D": D,
        "SCALE": D**-0.5 if scale is None else scale,
        "ACC": tl.float64 if lse.dtype == torch.float64 else tl.float32,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }


def _attention_variants_empty(q):
    """Return new tensors for the result and its log-sum-exp."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3], dtype=wide)


def _attention_variants_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: str,
    score_tensors: Sequence[torch.Tensor],
    score_numbers: Sequence[torch.types.Number],
    span: str,
    span_tensors: Sequence[torch.Tensor],
    span_numbers: Sequence[torch.types.Number],
    sinks: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention_variants does, and the log-sum-exp of each row.

    That is log2 of the sum of exp(score), over the keys that a query sees and
    the sink of its head: of (batch, heads, queries), in float32, or float64 for
    float64. It is ``inf`` for a sum of 0. It has no gradient.
    """
    tensors = *score_tensors, *span_tensors
    _attention_variants_check(q, k, v, score, span, sinks, tensors)
    out, lse = _attention_variants_empty(q)
    if out.numel() == 0:
        return out, lse
    batch, heads, LQ, _ = q.shape
    common = _attention_variants_common(q, k, lse, score, span, scale)
    itemsize = q.dtype.itemsize
    tiles = _attention_variants_tiles(q.device, common["BLOCK_D"], itemsize)
    read, strides = _attention_variants_read(*_attention_variants_rows(q, k, v))
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        blocks = triton.cdiv(LQ, tiles[0]["BLOCK_M"])
        _attention_variants_kernel[(blocks * batch * heads,)](
            *read,
            out,
            lse,
            None if sinks is None else sinks.to(lse.dtype).contiguous(),
            _attention_variants_given(score_tensors, score_numbers),
            _attention_variants_given(span_tensors, span_numbers),
            LQ,
            k.shape[2],
            heads,
            *strides,
            LOWEST=torch.finfo(lse.dtype).min,
            **common,
            **tiles[0],
        )
    return out, lse


def _attention_variants_backward_launch(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    score: str,
    score_tensors: Sequence[torch.Tensor],
    score_numbers: Sequence[torch.types.Number],
    span: str,
    span_tensors: Sequence[torch.Tensor],
    span_numbers: Sequence[torch.types.Number],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of out, and delta.

    Takes what the op took and returned, and checks none of it. ``delta`` has
    the sum over D of grad * out.
    """
    q, k, v, grad = _attention_variants_rows(q, k, v, grad)
    # The gradients lie in memory as q and k do, so autograd need not copy them.
    dq, dk, dv = map(_attention_variants_like, (q, k, k))
    delta = torch.empty_like(lse)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta.zero_()
    (batch, heads, LQ, _), (_, shared, LK, _) = q.shape, k.shape
    common = _attention_variants_common(q, k, lse, score, span, scale)
    common["SLOPE"] = ATTENTION_VARIANTS_SCORES[score][1]
    itemsize = q.dtype.itemsize
    tiles = _attention_variants_tiles(q.device, common["BLOCK_D"], itemsize)
    read, strides = _attention_variants_read(q, k, v, grad)
    given = (
        _attention_variants_given(score_tensors, score_numbers),
        _attention_variants_given(span_tensors, span_numbers),
    )
    sizes = LQ, LK, heads, *strides
    with torch.accelerator.device_index(q.device.index):
        blocks = triton.cdiv(LQ, tiles[1]["BLOCK_M"])
        _attention_variants_dq_kernel[(blocks * batch * heads,)](
            *read,
            out.contiguous(),
            lse,
            delta,
            dq,
            *given,
            *sizes,
            *dq.stride()[:3],
            **common,
            **tiles[1],
        )
        blocks = triton.cdiv(LK, tiles[2]["BLOCK_N"])
        _attention_variants_dkv_kernel[(blocks * batch * shared,)](
            *read,
            lse,
            delta,
            dk,
            dv,
            *given,
            *sizes,
            *dk.stride()[:3],
            **common,
            **tiles[2],
        )
    return dq, dk, dv, delta


# torch.compile takes no function as a constant of a kernel. So this is a
# custom_op, into which it does not look, and variants travel by name.
attention_variants_with_lse = custom_op(
    f"{ATTENTION_VARIANTS_NAMESPACE}::attention_variants", mutates_args=()
)(_attention_variants_launch)
attention_variants_backward = custom_op(
    f"{ATTENTION_VARIANTS_NAMESPACE}::attention_variants_backward",
    mutates_args=(),
)(_attention_variants_backward_launch)


@attention_variants_with_lse.register_fake
def _attention_variants_fake(
    q, k, v, score, score_tensors, _, span, span_tensors, __, sinks, scale
):
    tensors = *score_tensors, *span_tensors
    _attention_variants_check(q, k, v, score, span, sinks, tensors)
    return _attention_variants_empty(q)


@attention_variants_backward.register_fake
def _attention_variants_backward_fake(grad, q, k, v, out, lse, *_):
    q, k = _attention_variants_rows(q, k)
    grads = map(_attention_variants_like, (q, k, k))
    return *grads, torch.empty_like(lse)


def _attention_variants_setup(ctx, inputs, output):
    q, k, v, ctx.score, first, ctx.first, ctx.span, second, *others = inputs
    ctx.second, sinks, ctx.scale = others
    ctx.count = len(first)
    ctx.save_for_backward(q, k, v, *output, sinks, *first, *second)
    ctx.mark_non_differentiable(output[1])


def _attention_variants_gradient(ctx, grad, _):
    *saved, lse, sinks = ctx.saved_tensors[:6]
    first = list(ctx.saved_tensors[6 : 6 + ctx.count])
    second = list(ctx.saved_tensors[6 + ctx.count :])
    asked = ctx.score, first, ctx.first, ctx.span, second, ctx.second
    *grads, delta = attention_variants_backward(
        grad, *saved, lse, *asked, ctx.scale
    )
    d_sinks = None
    if sinks is not None:
        # A sink has the probability exp2(sink - lse), and the value 0.
        base_2 = sinks[:, None].to(lse.dtype) * ATTENTION_VARIANTS_LOG2E.value
        d_sinks = -(torch.exp2(base_2 - lse) * delta).sum((0, 2))
        d_sinks = d_sinks.to(sinks.dtype)
    # A list of tensors has a list of gradients, and so has an empty list.
    none = []
    for tensors, numbers in ((first, ctx.first), (second, ctx.second)):
        none += [None, [None] * len(tensors), None if numbers else []]
    return *grads, *none, d_sinks, None


attention_variants_with_lse.register_autograd(
    _attention_variants_gradient, setup_context=_attention_variants_setup
)

# On a GPU a call goes to the launcher; all else goes on to the custom_op.
ATTENTION_VARIANTS_LIBRARY = Library(ATTENTION_VARIANTS_NAMESPACE, "FRAGMENT")
ATTENTION_VARIANTS_LIBRARY.impl(
    "attention_variants", _attention_variants_launch, "CUDA"
)
ATTENTION_VARIANTS_LIBRARY.impl(
    "attention_variants_backward", _attention_variants_backward_launch, "CUDA"
)


def attention_variants(
    q, k, v, score="plain", span="all", sinks=None, scale=None
) -> torch.Tensor:
    """Return attention with a score and a span of one's choice.

    That is softmax(score(q @ k.mT * scale)) @ v, where query i sees the keys of
    its span. Takes q of (batch, heads, queries, D), k and v of (batch, heads /
    n, keys, D), all of float16, bfloat16, float32 or float64, with D up to 256
    and any strides; it copies what is not contiguous along D. Each n heads of q
    share one of k and v. Float32 keeps its 24 bits, so it does without tensor
    cores. ``scale`` is a number, 1 / sqrt(D) if not given.

    A score or a span is a name, or a tuple of a name and what it is given:
    tensors on the device of q, and numbers, for each of which the kernels are
    compiled. Scores are "plain"; ("alibi", slopes), with a slope for each head
    of q, for s - slope * (i - j); and ("softcap", cap), with a cap above 0, for
    cap * tanh(s / cap). Spans are "all"; "causal", with the keys up to i;
    ("window", size), with the last ``size`` keys up to i; and ("documents",
    begins), causal, with integers, for each query the first key of its
    document, the same for the whole batch. What is given is not checked: the
    kernels read past the end of a tensor that is too short, and need begins
    that never fall. Add your own to the dictionaries ATTENTION_VARIANTS_SCORES
    and ATTENTION_VARIANTS_SPANS, as the comments above their functions say.
    ``sinks``, of (heads,), has a score for each head of q, which takes part in
    the softmax and has no value.

    The result is contiguous, of the shape and dtype of q, with the same bits
    each time. A query that sees nothing gives 0. Scores above 2**27 or below
    -2**27, in float64 2**56, may give 0 or NaN: a GPU then rounds by more than
    exp2 can take. A NaN or an infinity may reach queries and keys that it is
    hidden from. The gradients, of q, k, v and sinks, have their dtypes, the
    same bits each time, and no gradient themselves. They are right for finite
    inputs only. With float16 inputs, the backward rounds the probabilities and
    the gradients of scores to float16: below 2**-14 these lose bits, from
    2**-25 down they count as 0.

    Raises TypeError for other dtypes and for tensors on different devices, and
    ValueError for other shapes, for unknown names, and where what a score or a
    span is given requires grad. The methods: https://arxiv.org/abs/2307.08691,
    https://arxiv.org/abs/2412.05496
    """
    asked = []
    for named in (score, span):
        name, *given = (named,) if isinstance(named, str) else named
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        numbers = [x for x in given if not isinstance(x, torch.Tensor)]
        if any(t.requires_grad for t in tensors):
            raise ValueError(
                f"attention_variants has no gradient for what {name!r} is given"
            )
        asked += [name, tensors, numbers]
    return attention_variants_with_lse(q, k, v, *asked, sinks, scale)[0]


# %%
# What did it gain to skip tiles, and to mask fewer? The table has TFLOP/s of
# the forward, for seen scores with ALiBi and a window of 1024, and statements.
# It does not tell the two apart, and the op has exponentials of base 2 besides.


def statements(*kernels):
    """Count the statements of kernels, but for their heads and texts."""
    trees = (ast.parse(inspect.getsource(kernel.fn)) for kernel in kernels)
    nodes = [node for tree in trees for node in ast.walk(tree.body[0])]
    found = sum(isinstance(node, ast.stmt) for node in nodes)
    return found - sum(1 + bool(kernel.fn.__doc__) for kernel in kernels)


def by_op(q, k, v, slopes, size):
    return attention_variants(q, k, v, ("alibi", slopes), ("window", size))


def first_step(q, k, v, slopes, size):
    return attention(q, k, v, alibi_window, slopes, tl.constexpr(size))


PARTS = _attention_variants_place, _attention_variants_seen
BY_OP = _attention_variants_alibi, _attention_variants_window
STEPS = {
    "first kernel": (first_step, score_kernel, alibi_window),
    "the op": (by_op, _attention_variants_kernel, *PARTS, *BY_OP),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*step[1:]) for step in STEPS.values()]
    for length in (4096, 16384):
        *x, _ = inputs(length)
        given = slopes_of(HEADS), 1024
        tried = {who: partial(s[0], *x, *given) for who, s in STEPS.items()}
        work = operations(spans_of(length)["window of 1024"])
        found = gpu_time(tried, turns=20)
        rates = [round(work / found[who][0]) for who in STEPS]
        ladder[f"{length} tokens"] = rates
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare each dtype with float64: ragged lengths, more keys than queries and
# fewer, padded heads, shared heads of keys, no keys, no queries. A rounding is
# :math:`2^{-11}` in float16, and :math:`2^{-7}` in bfloat16, where the
# interpreter cuts bits off. In the others, a score is a sum of rounded terms,
# and we allow :math:`2^{-18}` and :math:`2^{-45}`. The result may have two
# roundings of :math:`\sum_j p_{ij} |v_j|` and two of itself. A gradient may
# have sixteen of its largest element, because three factors in it are rounded.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}
SHAPES = [  # batch, heads, heads of keys, queries, keys, D
    (1, 2, 1, 70, 90, 64),
    (2, 2, 2, 20, 30, 40),
    (1, 1, 1, 5, 0, 16),
    (1, 2, 1, 0, 7, 16),
]
SCORES = {
    "plain": lambda s, i, j: s,
    "alibi": lambda s, i, j, a: s - a.double()[:, None, None] * (i - j),
    "softcap": lambda s, i, j, cap: cap * torch.tanh(s / cap),
}
SPANS = {
    "all": lambda i: (0 * i, 0 * i + 2**30),
    "causal": lambda i: (0 * i, i + 1),
    "window": lambda i, size: (i + 1 - size, i + 1),
    "documents": lambda i, begins: (begins[:, None], i + 1),
}


def reference(q, k, v, score, span, sinks=None):
    """Return a variant of attention in float64, and the sum of p |v|."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    (name, *given), (span_name, *span_given) = score, span
    s = SCORES[name]((q @ k.mT) * q.shape[-1] ** -0.5, i, j, *given)
    begin, end = SPANS[span_name](i, *span_given)
    s = s.masked_fill((j < begin) | (j >= end), -torch.inf)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], -1)
    # A row that sees nothing has no largest score.
    m = s.amax(-1, keepdim=True).clamp(min=-1e300) if s.numel() else 0.0
    p = (s - m).exp()
    total = p.sum(-1, keepdim=True)
    p = (p / total.masked_fill(total == 0, 1.0))[..., : k.shape[2]]
    return p @ v, p @ v.abs()


def prove(shape, dtype, score, span, with_sinks=False):
    batch, heads, shared, LQ, LK, D = shape
    q, grad = (random(batch, heads, LQ, D, dtype=dtype) for _ in range(2))
    k, v = (random(batch, shared, LK, D, dtype=dtype) for _ in range(2))
    sinks = [random(heads, dtype=torch.float64)] if with_sinks else []
    leaves = [t.requires_grad_() for t in (q, k, v, *sinks)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out = attention_variants(*leaves[:3], score, span, *leaves[3:])
    expected, terms = reference(*wide[:3], score, span, *wide[3:])
    assert (out.dtype, out.shape) == (dtype, q.shape)
    least = torch.finfo(dtype).smallest_normal  # below, bits are lost
    allowed = 2 * EPS[dtype] * (terms + expected.abs()) + least
    assert ((out.double() - expected).abs() <= allowed).all(), (score, span)
    grads = torch.autograd.grad(out, leaves, grad)
    rights = torch.autograd.grad(expected, wide, grad.double())
    for one, right in zip(grads, rights, strict=True):
        error, size = (one.double() - right).abs(), right.abs()
        largest = size.amax().clamp(min=1.0) if size.numel() else 1.0
        assert (error <= 16 * EPS[dtype] * largest).all(), (score, span)


def variants_of(heads, length):
    """Return scores and spans, each with what it is given."""
    slopes, begins = slopes_of(heads), documents_of(length, count=5)
    scores = ("plain",), ("alibi", slopes), ("softcap", 2.0)
    spans = ("all",), ("causal",), ("window", 30), ("documents", begins)
    return scores, spans


if __name__ == "__main__":
    for dtype in EPS:
        for shape in SHAPES:
            scores, spans = variants_of(shape[1], shape[3])
            for place, span in enumerate(spans):
                score = scores[place % 3]
                prove(shape, dtype, score, span, with_sinks=place % 2 == 0)
else:  # imported: a glance
    prove((1, 2, 1, 33, 70, 32), torch.float16, ("softcap", 2.0), ("window", 9))

# %%
# ``gradcheck`` compares the gradients with differences of the forward, those of
# the sinks, too. A sink of ``-inf`` is none:

if __name__ == "__main__":
    shapes = (1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (2,)
    leaves = [random(*shape, dtype=torch.float64) for shape in shapes]
    leaves = [t.requires_grad_() for t in leaves]
    for span in ("all", ("window", 2)):

        def op(q, k, v, sinks, span=span):
            return attention_variants(q, k, v, ("softcap", 2.0), span, sinks)

        assert torch.autograd.gradcheck(op, leaves)
    none = torch.full((2,), -torch.inf, device=DEVICE)
    out = attention_variants(*leaves[:3], sinks=none)
    assert torch.equal(out, attention_variants(*leaves[:3]))

# %%
# Your own variant
# ----------------
#
# A *prefix* that all queries see, as an image before a text, and a causal mask
# after it. It takes these lines, and has gradients, skipped tiles and masks:


@triton.jit
def prefix(batch, head, i, LENGTH):
    return 0, tl.maximum(i + 1, LENGTH)


ATTENTION_VARIANTS_SPANS["prefix"] = prefix

if __name__ == "__main__":
    SPANS["prefix"] = lambda i, n: (0 * i, (i + 1).clamp(min=n))
    prove((1, 2, 1, 140, 140, 64), torch.float16, ("plain",), ("prefix", 70))

# %%
# Kernels call a score in each tile, and a span for a block's first and last
# query and for all of its queries. Each ``i`` and ``j`` is a place that exists,
# so both may load there from what they are given. A score that does more than
# add to ``s`` needs a slope, the second function of its entry.

# %%
# The benchmark
# -------------
#
# Each variant has float16, heads of 128, and 16384 tokens in all; the op stands
# beside compiled ``flex_attention``, whose block mask is made beforehand.
# Libraries with a window of their own were not measured. A window is 1024; a
# sequence has twelve documents of mixed length. A score that is seen counts as
# :math:`4D` operations forward, :math:`10D` backward.


def variants(length):
    """Return of each variant its begins, the op, and flex's functions."""
    spans, slopes = spans_of(length), slopes_of(HEADS)
    begins = spans["12 documents"]
    op = partial(partial, attention_variants)

    bias, cap = ("alibi", slopes), ("softcap", 20.0)
    causal = lambda b, h, i, j: j <= i  # noqa: E731
    return {
        "window": (
            spans["window of 1024"],
            op(span=("window", 1024)),
            (None, lambda b, h, i, j: (j <= i) & (i - j < 1024)),
        ),
        "documents": (
            begins,
            op(span=("documents", begins)),
            (None, lambda b, h, i, j: (j <= i) & (j >= begins[i])),
        ),
        "ALiBi": (
            spans["causal"],
            op(score=bias, span="causal"),
            (lambda s, b, h, i, j: s - slopes[h] * (i - j), causal),
        ),
        "soft cap": (
            spans["causal"],
            op(score=cap, span="causal"),
            (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), causal),
        ),
    }


def benchmark(backward):
    times, work = {}, {}
    for length in (4096, 16384):
        for name, (begins, ours, theirs) in variants(length).items():
            *x, grad = inputs(length)
            tried = {"Triton": ours, "flex_attention": flex(*theirs, length)}
            if backward:
                calls = {w: backward_of(f, *x, grad) for w, f in tried.items()}
            else:
                calls = {who: partial(f, *x) for who, f in tried.items()}
            size = f"{name}, {length}"
            times[size] = gpu_time(calls, turns=20)
            work[size] = operations(begins) * (2.5 if backward else 1)
    table = rate_table(times, "variant", "TFLOP/s", work.get)
    print(table.to_string())
    wide = table.pivot(index="variant", columns="series", values="TFLOP/s")
    wide.loc[[*times]].plot.barh(title="backward" if backward else "forward")
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark(backward=False)
    results_backward = benchmark(backward=True)

# %%
# Reading the result
# ------------------
#
# Both skip tiles that nobody sees. The op's begin where a span does, those of
# ``flex_attention`` where a block of its block mask does. A soft cap takes one
# exponential and one division more for each score. By the count above, a window
# masks a larger part of its tiles than a causal mask does, and a program has
# fewer of them. In the table, a window has a lower rate than ALiBi, whose span
# is causal. Whether these two things cause that, no figure here tells.

# %%
# Break it
# --------
#
# The op asks a block's first and last query for its span, so spans must move
# on. Here later queries see fewer keys: the result is wrong, and nothing
# raises. A score of ``-inf``, with the span "all", gets it right, and skips no
# tile:


@triton.jit
def shrinking(batch, head, i, LENGTH):
    return 0, -i + LENGTH


@triton.jit
def shrinking_score(s, batch, head, i, j, LENGTH):
    return tl.where(i + j < LENGTH, s, -float("inf"))


ATTENTION_VARIANTS_SPANS["shrinking"] = shrinking
ATTENTION_VARIANTS_SCORES["shrinking"] = shrinking_score, None

if __name__ == "__main__":
    q, k, v = (random(1, 1, 200, 64, dtype=torch.float32) for _ in range(3))
    SPANS["shrinking"] = lambda i, n: (0 * i, n - i)
    right, _ = reference(q, k, v, ("plain",), ("shrinking", 200))
    by_span = attention_variants(q, k, v, span=("shrinking", 200))
    by_score = attention_variants(q, k, v, ("shrinking", 200))
    for how, out in {"span": by_span, "score": by_score}.items():
        error = (out - right).abs().max().item()
        print(f"by a {how}: largest error {error:.1e}")
        assert (error > 1e-3) == (how == "span")

# %%
# Go further
# ----------
#
# 1. In ALiBi, :math:`a_h i` is the same for all keys of a query, and a softmax
#    does not change if a number is added to all its scores. Why does the op not
#    leave it out?
# 2. How would the gradient of ALiBi's slopes be computed?
#
# To read on:
#
# * `FlexAttention <https://arxiv.org/abs/2412.05496>`_, which has these two
#   functions, and lists of blocks.
# * `ALiBi <https://arxiv.org/abs/2108.12409>`_, the `soft cap of Gemma 2
#   <https://arxiv.org/abs/2408.00118>`_, and `attention sinks
#   <https://arxiv.org/abs/2309.17453>`_.

# %%
# Answers
# -------
#
# **1.** :math:`s_{ij} + a_h j` grows along the keys, to thousands. In float32,
# it has fewer bits after the point there, and the differences between scores,
# which make the softmax, would lose them. The distance is small where the
# weights are large.
#
# **2.** As :math:`\partial s'_{ij} / \partial a_h = -(i - j)`, it is
# :math:`-\sum_{ij} (i - j)\, p_{ij} (g_i \cdot v_j - \delta_i)`. The pass
# for ``dq`` has all of that. Each program would add up its part, and store one
# number.
