"""Attention with custom scores and mask: ALiBi, soft cap, window, documents.

Computes softmax(score(q @ k.T * scale)) @ v, where each query sees a span of
keys, as in FlexAttention (Dong et al., 2024, arXiv:2412.05496) and by the
method of FlashAttention-2 (Dao, 2023, arXiv:2307.08691). Add jitted functions
of your own to ATTENTION_VARIANTS_SCORES and ATTENTION_VARIANTS_SPANS. Tiles
that no query sees are skipped, so spans must not begin or end earlier for later
queries, which is not checked. Supports attention sinks, head sizes up to 256
and GQA. Deterministic. Has a backward for q, k, v and sinks, but no second
derivative. For a full or causal mask alone, there is ``flash_attention``.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op

ATTENTION_VARIANTS_NAMESPACE = "triton_gallery"
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
# Each j is the place of a key, and each i that of a query, so both may be where
# to load. With bottom_right, i is a position among the keys, maybe below 0.
@triton.jit
def _attention_variants_plain(s, batch, head, i, j):
    return s


@triton.jit
def _attention_variants_alibi(s, batch, head, i, j, slopes, HEADS=0):
    # HEADS is 0 where all sequences have the same slopes.
    slope = tl.load(slopes + batch * HEADS + head).to(s.dtype)
    # Converted before they meet, i and j are a column and a row, not a tile.
    return s - slope * (i.to(s.dtype) - j.to(s.dtype))


@triton.jit
def _attention_variants_symmetric_alibi(s, batch, head, i, j, slopes, HEADS=0):
    slope = tl.load(slopes + batch * HEADS + head).to(s.dtype)
    return s - slope * tl.abs(i.to(s.dtype) - j.to(s.dtype))


@triton.jit
def _attention_variants_softcap(s, batch, head, i, j, CAP):
    # CAP * tanh(s / CAP), with one exponential. Where that is inf, CAP remains.
    power = tl.exp2(s * (2.0 * ATTENTION_VARIANTS_LOG2E / CAP))
    return CAP - 2.0 * CAP / (1.0 + power)


@triton.jit
def _attention_variants_softcap_slope(s, batch, head, i, j, CAP):
    tanh = _attention_variants_softcap(s, batch, head, i, j, CAP) / CAP
    return 1.0 - tanh * tanh


# Several scores, each applied to what the one before returned. A link has what
# a score is given, the score, and its slope if there is one. Slopes multiply,
# by the chain rule.
@triton.jit
def _attention_variants_chain(s, batch, head, i, j, links):
    for n in tl.static_range(len(links)):
        s = links[n][1](s, batch, head, i, j, *links[n][0])
    return s


@triton.jit
def _attention_variants_chain_slope(s, batch, head, i, j, links):
    product = 1.0
    for n in tl.static_range(len(links)):
        if len(links[n]) == 3:
            product *= links[n][2](s, batch, head, i, j, *links[n][0])
        s = links[n][1](s, batch, head, i, j, *links[n][0])
    return product


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
def _attention_variants_local(batch, head, i, LEFT, RIGHT):
    begin = i - LEFT if LEFT >= 0 else 0
    end = i + 1 + RIGHT if RIGHT >= 0 else i * 0 + 2**30
    return begin, end


@triton.jit
def _attention_variants_documents(batch, head, i, begins):
    return tl.load(begins + i), i + 1


ATTENTION_VARIANTS_SCORES = {
    "plain": (_attention_variants_plain, None),
    "alibi": (_attention_variants_alibi, None),
    "symmetric_alibi": (_attention_variants_symmetric_alibi, None),
    "softcap": (_attention_variants_softcap, _attention_variants_softcap_slope),
}
ATTENTION_VARIANTS_OF_SLOPES = "alibi", "symmetric_alibi"
ATTENTION_VARIANTS_SPANS = {
    "all": _attention_variants_all,
    "causal": _attention_variants_causal,
    "window": _attention_variants_window,
    "local": _attention_variants_local,
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
def _attention_variants_keys(
    batch, LQ, LK, seqlens_ptr, leftpad_ptr, BOTTOM_RIGHT: tl.constexpr
):
    """Return a sequence's first key, its end, and the position of query 0."""
    first, shift = 0, 0
    if seqlens_ptr is not None:
        LK = tl.minimum(tl.load(seqlens_ptr + batch), LK)
    if leftpad_ptr is not None:
        first = tl.maximum(tl.load(leftpad_ptr + batch), 0)
    if BOTTOM_RIGHT:
        shift = LK - LQ  # the last query is at the last key
    return first, LK, shift


@triton.jit
def _attention_variants_seen(
    i, LQ, keys, batch, head, span_given, SPAN: tl.constexpr
):
    """Return the first key that queries see, and the one after the last."""
    first, LK, shift = keys
    # A span may load from its tensors at i: past the last query it is that.
    i = tl.minimum(i, LQ - 1) + shift
    begin, end = SPAN(batch, head, i, *span_given)
    # Adding zeros gives a constant the shape of i.
    begin = tl.maximum(begin + i * 0, first)
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
    seqlens_ptr,
    leftpad_ptr,
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
    BOTTOM_RIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_V: tl.constexpr,
):
    pid, head, batch = _attention_variants_place(LQ, HEADS, BLOCK_M)
    # Later queries often see more keys: programs with the most work come first.
    begin = (tl.cdiv(LQ, BLOCK_M) - 1 - pid) * BLOCK_M
    offs_m = begin + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_D_V)[None, :]  # (1, BLOCK_D_V)
    row = offs_m.to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_v
    inside = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q = tl.load(q_ptrs + row * stride_ql, mask=inside, other=0.0)
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    if sinks_ptr is not None:
        # A sink is a score without a value: the sum begins with its power.
        sink = tl.load(sinks_ptr + head).to(ACC) * ATTENTION_VARIANTS_LOG2E
        m = tl.maximum(m, sink)
        total = tl.exp2(sink - m)
    acc = tl.zeros((BLOCK_M, BLOCK_D_V), dtype=ACC)
    keys = _attention_variants_keys(
        batch, LQ, LK, seqlens_ptr, leftpad_ptr, BOTTOM_RIGHT
    )
    _, LK, shift = keys
    # Of spans that only move on, the first query's begins first, and so on.
    low, high = _attention_variants_seen(
        offs_m, LQ, keys, batch, head, span_given, SPAN
    )
    first, every = _attention_variants_seen(
        begin, LQ, keys, batch, head, span_given, SPAN
    )
    latest, last = _attention_variants_seen(
        begin + BLOCK_M - 1, LQ, keys, batch, head, span_given, SPAN
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
        i = tl.minimum(offs_m, LQ - 1) + shift
        j = tl.minimum(offs_n, LK - 1)[None, :]
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
        mask = (offs_n[:, None] < LK) & (offs_v < D_V)  # (BLOCK_N, BLOCK_D_V)
        v = tl.load(v_ptrs + row_n * stride_vl, mask=mask, other=0.0)
        # The tensor cores take p in the type of v.
        p = p.to(v.dtype)
        acc = acc * rescale
        acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
        m = m_new
    rows = (batch * HEADS + head) * LQ + row  # (BLOCK_M, 1)
    # A row that saw nothing has a sum of 0, and a result of 0.
    divisor = tl.where(total == 0, 1.0, total)
    inside = (offs_m < LQ) & (offs_v < D_V)  # (BLOCK_M, BLOCK_D_V)
    tl.store(out_ptr + rows * D_V + offs_v, acc / divisor, mask=inside)
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
    grad_lse_ptr,
    delta_ptr,
    dq_ptr,
    score_given,
    span_given,
    seqlens_ptr,
    leftpad_ptr,
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
    BOTTOM_RIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_V: tl.constexpr,
):
    pid, head, batch = _attention_variants_place(LQ, HEADS, BLOCK_M)
    begin = (tl.cdiv(LQ, BLOCK_M) - 1 - pid) * BLOCK_M
    offs_m = begin + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_D_V)[None, :]  # (1, BLOCK_D_V)
    row = offs_m.to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_v
    grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_v
    dq_ptrs = dq_ptr + batch * stride_dqb + head * stride_dqh + offs_d
    inside = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q = tl.load(q_ptrs + row * stride_ql, mask=inside, other=0.0)
    inside_v = (offs_m < LQ) & (offs_v < D_V)  # (BLOCK_M, BLOCK_D_V)
    grad = tl.load(grad_ptrs + row * stride_gl, mask=inside_v, other=0.0)
    # One sum of out * grad for each query, which the pass for dk needs, too
    sums = (batch * HEADS + head) * LQ + row  # (BLOCK_M, 1)
    out = tl.load(out_ptr + sums * D_V + offs_v, mask=inside_v, other=0.0)
    # Products of half precision would be rounded one by one.
    delta = tl.sum(out.to(ACC) * grad, axis=1, keep_dims=True)
    if grad_lse_ptr is not None:
        # The log-sum-exp has the slope p / ln(2) of each score, or none if inf.
        lse = tl.load(lse_ptr + sums, mask=offs_m < LQ, other=float("inf"))
        some = lse < float("inf")  # (BLOCK_M, 1)
        grad_lse = tl.load(grad_lse_ptr + sums, mask=some, other=0.0)
        delta -= grad_lse * ATTENTION_VARIANTS_LOG2E
    tl.store(delta_ptr + sums, delta, mask=offs_m < LQ)
    # With inf, queries past the end have a p of 0, whatever their score.
    lse = tl.load(lse_ptr + sums, mask=offs_m < LQ, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    keys = _attention_variants_keys(
        batch, LQ, LK, seqlens_ptr, leftpad_ptr, BOTTOM_RIGHT
    )
    _, LK, shift = keys
    low, high = _attention_variants_seen(
        offs_m, LQ, keys, batch, head, span_given, SPAN
    )
    first, every = _attention_variants_seen(
        begin, LQ, keys, batch, head, span_given, SPAN
    )
    latest, last = _attention_variants_seen(
        begin + BLOCK_M - 1, LQ, keys, batch, head, span_given, SPAN
    )
    for start in range(first, last, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = (offs_n[:, None] < LK) & (offs_d < D)  # (BLOCK_N, BLOCK_D)
        row_n = offs_n[:, None].to(tl.int64)
        k = tl.load(k_ptrs + row_n * stride_kl, mask=mask, other=0.0)
        raw = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC) * SCALE
        i = tl.minimum(offs_m, LQ - 1) + shift
        j = tl.minimum(offs_n, LK - 1)[None, :]
        s = SCORE(raw, batch, head, i, j, *score_given)  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * ATTENTION_VARIANTS_LOG2E - lse)
        if (start < latest) | (start + BLOCK_N > every):
            # A hidden or padded key may have any score: its p may be inf.
            seen = (offs_n[None, :] >= low) & (offs_n[None, :] < high)
            p = tl.where(seen, p, 0.0)
        mask = (offs_n[:, None] < LK) & (offs_v < D_V)  # (BLOCK_N, BLOCK_D_V)
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
    keys,
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
            block * BLOCK_M, LQ, keys, batch, head, span_given, SPAN
        )
        _, high = _attention_variants_seen(
            block * BLOCK_M + BLOCK_M - 1,
            LQ,
            keys,
            batch,
            head,
            span_given,
            SPAN,
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
    seqlens_ptr,
    leftpad_ptr,
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
    BOTTOM_RIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_V: tl.constexpr,
):
    # Earlier keys are often seen by more queries: the most work starts first.
    heads = HEADS // GROUP
    pid, shared, batch = _attention_variants_place(LK, heads, BLOCK_N)
    begin = pid * BLOCK_N
    offs_n = begin + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_D_V)[None, :]  # (1, BLOCK_D_V)
    row = offs_n.to(tl.int64)
    k_ptrs = k_ptr + batch * stride_kb + shared * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + shared * stride_vh + offs_v
    inside = (offs_n < LK) & (offs_d < D)  # (BLOCK_N, BLOCK_D)
    inside_v = (offs_n < LK) & (offs_v < D_V)  # (BLOCK_N, BLOCK_D_V)
    keys = _attention_variants_keys(
        batch, LQ, LK, seqlens_ptr, leftpad_ptr, BOTTOM_RIGHT
    )
    held, held_v = inside, inside_v
    if (seqlens_ptr is not None) or (leftpad_ptr is not None):
        # What lies before and after a sequence may be NaN.
        own = (offs_n >= keys[0]) & (offs_n < keys[1])  # (BLOCK_N, 1)
        held, held_v = inside & own, inside_v & own
    k = tl.load(k_ptrs + row * stride_kl, mask=held, other=0.0)
    v = tl.load(v_ptrs + row * stride_vl, mask=held_v, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D_V), dtype=ACC)
    for member in range(GROUP):
        head = shared * GROUP + member
        sums = (batch * HEADS + head) * LQ
        q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
        grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_v
        first, last = _attention_variants_viewers(
            begin, LQ, keys, batch, head, span_given, SPAN, BLOCK_M, BLOCK_N
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
            i = tl.minimum(offs_m, LQ - 1)[None, :] + keys[2]
            j = tl.minimum(offs_n, LK - 1)
            s = SCORE(raw, batch, head, i, j, *score_given)
            p = tl.exp2(s * ATTENTION_VARIANTS_LOG2E - lse[None, :])
            _, every = _attention_variants_seen(
                start, LQ, keys, batch, head, span_given, SPAN
            )
            latest, _ = _attention_variants_seen(
                start + BLOCK_M - 1, LQ, keys, batch, head, span_given, SPAN
            )
            if (begin < latest) | (begin + BLOCK_N > every):
                # Padded keys are hidden, too: no span reaches past the last.
                low, high = _attention_variants_seen(
                    offs_m[None, :], LQ, keys, batch, head, span_given, SPAN
                )
                p = tl.where((offs_n >= low) & (offs_n < high), p, 0.0)
            mask = (row_m < LQ) & (offs_v < D_V)  # (BLOCK_M, BLOCK_D_V)
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
    if D_V != D:  # otherwise dv lies as dk does
        offs = ((batch * heads + shared) * LK + row) * D_V + offs_v
    tl.store(dv_ptr + offs, dv, mask=inside_v)


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


def _attention_variants_check(
    q,
    k,
    v,
    score,
    score_tensors,
    span,
    span_tensors,
    sinks,
    bottom_right,
    seqlens_k,
    leftpad_k,
):
    name = "attention_variants"
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    if len({t.dtype for t in (q, k, v)}) > 1:
        raise TypeError(f"{name} takes one dtype for q, k and v")
    limits = {"seqlens_k": seqlens_k, "leftpad_k": leftpad_k}
    options = [t for t in (sinks, *limits.values()) if t is not None]
    others = *score_tensors, *span_tensors, *options
    if len({t.device for t in (q, k, v, *others)}) > 1:
        raise TypeError(f"{name} takes tensors on one device")
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and 1 <= q.shape[3] <= 256
        and 1 <= v.shape[3] <= 256
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(
            f"{name} takes q of (batch, heads, queries, D), k of (batch, "
            "heads / n, keys, D), and v of (batch, heads / n, keys, D_v), with "
            "D_v and D up to 256, not " + found
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"{name} takes a sink for each head of q")
    for one, own, _ in _attention_variants_split(score, score_tensors, ()):
        if one not in ATTENTION_VARIANTS_SCORES:
            raise ValueError(f"{name} has no score {one!r}")
        each = own and one in ATTENTION_VARIANTS_OF_SLOPES and own[0].ndim > 1
        if each and own[0].shape != q.shape[:2]:
            raise ValueError(
                f"{name} takes slopes of (heads,) or (batch, heads), not "
                f"{tuple(own[0].shape)}"
            )
    for which, t in limits.items():
        if t is not None and t.dtype != torch.int32:
            raise TypeError(f"{name} takes {which} of int32, not {t.dtype}")
        if t is not None and t.shape != q.shape[:1]:
            raise ValueError(
                f"{name} takes {which} of (batch,), not {tuple(t.shape)}"
            )
    if span not in ATTENTION_VARIANTS_SPANS:
        raise ValueError(f"{name} has no span {span!r}")
    if bottom_right and span == "documents":
        raise ValueError(f"{name} takes no documents with bottom_right")


def _attention_variants_rows(*tensors):
    """Return tensors that are contiguous along D."""
    return [t if t.stride(3) == 1 else t.contiguous() for t in tensors]


def _attention_variants_like(q, k, v):
    """Return memory for gradients: in the order of q and k, adjacent along D.

    Where elements share memory, ``empty_like`` may choose another order. That
    of values lies as that of keys, or contiguous where their shapes differ.
    """
    new = [torch.empty_like(t) for t in (q, k, k)]
    dq, dk, dv = (t if t.stride(3) == 1 else t.new_empty(t.shape) for t in new)
    return dq, dk, dv if v.shape == k.shape else v.new_empty(v.shape)


def _attention_variants_read(*tensors):
    """Return tensors as kernels read them, and their strides."""
    if triton.knobs.runtime.interpret and tensors[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        tensors = [t.float().contiguous() for t in tensors]
    return tensors, [stride for t in tensors for stride in t.stride()[:3]]


def _attention_variants_given(tensors, numbers):
    """Return what a function of a variant is given: numbers are constants."""
    return *(t.contiguous() for t in tensors), *map(tl.constexpr, numbers)


def _attention_variants_split(score, tensors, numbers):
    """Return each score's name, and its tensors and numbers.

    Several have how many of these they take: ``softcap:0:1|alibi:1:0``.
    """
    if "|" not in score:
        return [(score, list(tensors), list(numbers))]
    parts, left = [], (iter(tensors), iter(numbers))
    for part in score.split("|"):
        name, *counts = part.rsplit(":", 2)
        taken = zip(left, map(int, counts), strict=True)
        parts.append((name, *(list(itertools.islice(*one)) for one in taken)))
    return parts


def _attention_variants_links(heads, score, tensors, numbers):
    """Return the function of a score or several, its slope and its given."""
    links = []
    for name, *own in _attention_variants_split(score, tensors, numbers):
        if name in ATTENTION_VARIANTS_OF_SLOPES and own[0][0].ndim == 2:
            own[1] = [heads]
        functions = ATTENTION_VARIANTS_SCORES[name]
        given = _attention_variants_given(*own)
        links.append((given, *(f for f in functions if f is not None)))
    if len(links) == 1:
        return *functions, given
    has_slope = any(len(link) == 3 for link in links)
    slope = _attention_variants_chain_slope if has_slope else None
    return _attention_variants_chain, slope, (tuple(links),)


def _attention_variants_limits(*tensors):
    """Return limits of keys as kernels read them."""
    return [t if t is None else t.contiguous() for t in tensors]


def _attention_variants_common(q, v, lse, SCORE, span, scale, bottom_right):
    """Return the constants that all kernels have."""
    D, D_V = q.shape[3], v.shape[3]
    return {
        "SCORE": SCORE,
        "SPAN": ATTENTION_VARIANTS_SPANS[span],
        "BOTTOM_RIGHT": bottom_right,
        "GROUP": q.shape[1] // v.shape[1],
        "D": D,
        "D_V": D_V,
        "SCALE": D**-0.5 if scale is None else scale,
        "ACC": tl.float64 if lse.dtype == torch.float64 else tl.float32,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "BLOCK_D_V": max(16, triton.next_power_of_2(D_V)),
    }


def _attention_variants_empty(q, v):
    """Return new tensors for the result and its log-sum-exp."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
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
    bottom_right: bool = False,
    seqlens_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention_variants does, and the log-sum-exp of each row.

    That is log2 of the sum of exp(score), over the keys that a query sees and
    the sink of its head: of (batch, heads, queries), in float32, or float64 for
    float64. It is ``inf`` for a sum of 0, and has no gradient there.
    """
    asked = score, score_tensors, span, span_tensors
    limits = seqlens_k, leftpad_k
    _attention_variants_check(q, k, v, *asked, sinks, bottom_right, *limits)
    out, lse = _attention_variants_empty(q, v)
    if out.numel() == 0:
        return out, lse
    batch, heads, LQ, _ = q.shape
    SCORE, _, score_given = _attention_variants_links(
        heads, score, score_tensors, score_numbers
    )
    common = _attention_variants_common(
        q, v, lse, SCORE, span, scale, bottom_right
    )
    wider = max(common["BLOCK_D"], common["BLOCK_D_V"])
    tiles = _attention_variants_tiles(q.device, wider, q.dtype.itemsize)
    read, strides = _attention_variants_read(*_attention_variants_rows(q, k, v))
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        blocks = triton.cdiv(LQ, tiles[0]["BLOCK_M"])
        _attention_variants_kernel[(blocks * batch * heads,)](
            *read,
            out,
            lse,
            None if sinks is None else sinks.to(lse.dtype).contiguous(),
            score_given,
            _attention_variants_given(span_tensors, span_numbers),
            *_attention_variants_limits(seqlens_k, leftpad_k),
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
    bottom_right: bool = False,
    seqlens_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of out, and delta.

    Takes what the op took and returned, and the gradient of its log-sum-exp, if
    there is one, and checks none of it. ``delta`` has the sum over D of grad *
    out, less grad_lse / ln(2).
    """
    q, k, v, grad = _attention_variants_rows(q, k, v, grad)
    # The gradients lie in memory as q and k do, so autograd need not copy them.
    dq, dk, dv = _attention_variants_like(q, k, v)
    delta = torch.empty_like(lse)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), delta
    (batch, heads, LQ, _), (_, shared, LK, _) = q.shape, k.shape
    SCORE, SLOPE, score_given = _attention_variants_links(
        heads, score, score_tensors, score_numbers
    )
    common = _attention_variants_common(
        q, v, lse, SCORE, span, scale, bottom_right
    )
    common["SLOPE"] = SLOPE
    wider = max(common["BLOCK_D"], common["BLOCK_D_V"])
    tiles = _attention_variants_tiles(q.device, wider, q.dtype.itemsize)
    read, strides = _attention_variants_read(q, k, v, grad)
    span_given = _attention_variants_given(span_tensors, span_numbers)
    limits = _attention_variants_limits(seqlens_k, leftpad_k)
    given = score_given, span_given, *limits
    sizes = LQ, LK, heads, *strides
    with torch.accelerator.device_index(q.device.index):
        blocks = triton.cdiv(LQ, tiles[1]["BLOCK_M"])
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        pointers = *read, out.contiguous(), lse, grad_lse, delta, dq
        common |= tiles[1]
        _attention_variants_dq_kernel[(blocks * batch * heads,)](
            *pointers, *given, *sizes, *dq.stride()[:3], **common
        )
        if LK == 0:
            return dq, dk, dv, delta
        blocks = triton.cdiv(LK, tiles[2]["BLOCK_N"])
        pointers = *read, lse, delta, dk, dv
        common |= tiles[2]
        _attention_variants_dkv_kernel[(blocks * batch * shared,)](
            *pointers, *given, *sizes, *dk.stride()[:3], **common
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
    q,
    k,
    v,
    score,
    score_tensors,
    _,
    span,
    span_tensors,
    __,
    sinks,
    scale,
    bottom_right=False,
    seqlens_k=None,
    leftpad_k=None,
):
    asked = score, score_tensors, span, span_tensors
    limits = seqlens_k, leftpad_k
    _attention_variants_check(q, k, v, *asked, sinks, bottom_right, *limits)
    return _attention_variants_empty(q, v)


@attention_variants_backward.register_fake
def _attention_variants_backward_fake(grad, q, k, v, out, lse, *_):
    q, k = _attention_variants_rows(q, k)
    grads = _attention_variants_like(q, k, v)
    return *grads, torch.empty_like(lse)


def _attention_variants_setup(ctx, inputs, output):
    q, k, v, ctx.score, first, ctx.first, ctx.span, second, *others = inputs
    ctx.second, sinks, *ctx.options, seqlens_k, leftpad_k = others
    ctx.count = len(first)
    tensors = *output, sinks, seqlens_k, leftpad_k, *first, *second
    ctx.save_for_backward(q, k, v, *tensors)
    ctx.set_materialize_grads(False)  # None for a result that nobody used


def _attention_variants_gradient(ctx, grad, grad_lse):
    *saved, lse, sinks, seqlens_k, leftpad_k = ctx.saved_tensors[:8]
    first = list(ctx.saved_tensors[8 : 8 + ctx.count])
    second = list(ctx.saved_tensors[8 + ctx.count :])
    asked = ctx.score, first, ctx.first, ctx.span, second, ctx.second
    options = *ctx.options, seqlens_k, leftpad_k, grad_lse
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    *grads, delta = attention_variants_backward(
        grad, *saved, lse, *asked, *options
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
    gradients = *grads, *none, d_sinks, None, None, None, None
    # PyTorch wants none for last arguments that have their default values.
    return gradients[: len(ctx.needs_input_grad)]


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


def _attention_variants_autocast(kind, q, k, v, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return attention_variants_with_lse(q, k, v, *options)


ATTENTION_VARIANTS_LIBRARY.impl(
    "attention_variants",
    functools.partial(_attention_variants_autocast, "cpu"),
    "AutocastCPU",
)
ATTENTION_VARIANTS_LIBRARY.impl(
    "attention_variants",
    functools.partial(_attention_variants_autocast, "cuda"),
    "AutocastCUDA",
)


def attention_variants(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: str | tuple[object, ...] | list[str | tuple[object, ...]] = "plain",
    span: str | tuple[object, ...] = "all",
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    bottom_right: bool = False,
    seqlens_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return attention with a score and a span of one's choice.

    That is softmax(score(q @ k.mT * scale)) @ v, where query i sees the keys of
    its span. Takes q of (batch, heads, queries, D), k of (batch, heads / n,
    keys, D) and v of (batch, heads / n, keys, D_v), all of float16, bfloat16,
    float32 or float64, with D and D_v up to 256 and any strides; it copies what
    is not contiguous along D. Each n heads of q share one of k and v. Float32
    keeps its 24 bits, so it does without tensor cores. ``scale`` is a number, 1
    / sqrt(D) if not given.

    A score or a span is a name, or a tuple of a name and what it is given:
    tensors on the device of q, and numbers, for each of which the kernels are
    compiled. Scores are "plain"; ("alibi", slopes), with a slope for each head
    of q, of (heads,) or (batch, heads), for s - slope * (i - j);
    ("symmetric_alibi", slopes), for s - slope * abs(i - j), as flash-attention
    has it for later keys; and ("softcap", cap), with a cap above 0, for cap *
    tanh(s / cap). A list of scores is applied in its order, each to what the
    one before returned: [("softcap", cap), ("alibi", slopes)].

    Spans are "all"; "causal", with the keys up to i; ("window", size), with the
    last ``size`` keys up to i; ("local", left, right), with the keys from i -
    left to i + right, where -1 is no limit, as in flash-attention's
    ``window_size``; and ("documents", begins), causal, with integers, for each
    query the first key of its document, the same for the whole batch. By
    default, the first query is at the first key: i and j count from 0, as
    in PyTorch's ``is_causal``. With ``bottom_right``, the last query is at
    the last key, as in flash-attention: i is then the query's place plus keys -
    queries, for scores and spans, and is negative for the first ones where
    there are fewer keys than queries. "documents" do not go with it.

    What is given is not checked: the kernels read past the end of a tensor that
    is too short, and need begins that never fall. Add your own to the
    dictionaries ATTENTION_VARIANTS_SCORES and ATTENTION_VARIANTS_SPANS, as the
    comments above their functions say. ``sinks``, of (heads,), has a score for
    each head of q, which takes part in the softmax and has no value.

    ``seqlens_k`` and ``leftpad_k``, of (batch,) and int32, are for sequences
    that are padded: keys from seqlens_k on and before leftpad_k are not seen,
    and may be NaN. Both count from the first key of k. With ``bottom_right``,
    the last query is at the last key that is seen, at seqlens_k - 1.

    The result is contiguous, of (batch, heads, queries, D_v) and the dtype of
    q, and deterministic. With ``return_lse`` it comes with the logarithm of
    what the softmax divides by, of (batch, heads, queries), in float32, or
    float64 for float64, which has a gradient, too. A query that sees nothing
    gives 0, and there -inf or the sink; its gradients are 0.

    Scores above 2**27 or below -2**27, in float64 2**56, may give 0 or NaN: a
    GPU then rounds by more than exp2 can take. A NaN or an infinity may reach
    queries and keys that it is hidden from. The gradients, of q, k, v and
    sinks, have their dtypes and are deterministic. They are right for finite
    inputs only. Second derivatives are not supported. With float16 inputs, the
    backward rounds the probabilities and the gradients of scores to float16:
    below 2**-14 these lose bits, from 2**-25 down they count as 0.

    Raises TypeError for other dtypes and for tensors on different devices, and
    ValueError for other shapes, for unknown names, and where what a score or a
    span is given requires grad. The methods: https://arxiv.org/abs/2307.08691,
    https://arxiv.org/abs/2412.05496

    Rounding: scores, softmax and sums are in float32, or float64 for float64.
    The weights of a softmax are rounded to the dtype of v for their product
    with v, and each result is rounded once. In the backward, weights and the
    gradients of scores are rounded likewise. The gradient of sinks is that of
    the rounded result.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    scores = score if isinstance(score, list) else [score]
    asked = []
    for several in (scores, [span]):
        names, tensors, numbers = [], [], []
        for named in several:
            name, *given = (named,) if isinstance(named, str) else named
            own = [x for x in given if isinstance(x, torch.Tensor)]
            if any(t.requires_grad for t in own):
                raise ValueError(
                    "attention_variants has no gradient for what "
                    f"{name!r} is given"
                )
            counts = f":{len(own)}:{len(given) - len(own)}"
            names.append(f"{name}{counts if several[1:] else ''}")
            tensors += own
            numbers += [x for x in given if not isinstance(x, torch.Tensor)]
        asked += ["|".join(names), tensors, numbers]
    options = sinks, scale, bottom_right, seqlens_k, leftpad_k
    out, lse = attention_variants_with_lse(q, k, v, *asked, *options)
    if not return_lse:
        return out
    nothing = lse == math.inf
    return out, (lse * math.log(2)).masked_fill(nothing, -math.inf)
