"""Variable-length flash attention for packed sequences, with its backward.

Attends within each sequence and computes nothing for padding (FlashAttention-2:
Dao, 2023, arXiv:2307.08691). The GPU lists the tiles, longest sequence first,
so the CPU does not wait for lengths. Nothing checks them: wrong ``cu_seqlens``
may read and write out of bounds. A causal mask aligns the last query with the
last key, unlike PyTorch's ``is_causal``. Supports sliding windows, soft caps,
ALiBi, sinks, and caches of which a part is used. Head sizes go up to 256; query
heads may share key heads (GQA). If little is padding, a padded batch may be
faster. For one or a few queries on a paged cache, use ``decode_attention``.
Deterministic. There is no second derivative.
"""

import functools
import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

VARLEN_ATTENTION_NAMESPACE = "triton_gallery"
# Of each kernel, by a head's size, padded to a power of two: BLOCK_M, BLOCK_N,
# warps, stages. Heads below 64 take the tiles of 64.
VARLEN_ATTENTION_TILES = {
    "forward": {
        64: (64, 64, 4, 3),
        128: (64, 64, 4, 3),
        256: (128, 64, 8, 2),
    },
    "dq": {
        64: (128, 64, 8, 3),
        128: (64, 64, 4, 2),
        256: (64, 32, 8, 2),
    },
    "dkdv": {
        64: (128, 64, 4, 2),
        128: (64, 128, 8, 2),
        256: (32, 64, 8, 2),
    },
}
# Heads padded to 256 take the small tile where a program gets fewer bytes of
# shared memory than this. (On an A100 it gets more.)
VARLEN_ATTENTION_ROOM = 160_000
VARLEN_ATTENTION_SMALL = (32, 32, 4, 1)
# For float32 and float64: heads of up to 64, and longer ones
VARLEN_ATTENTION_WIDE = [(32, 32, 4, 1), (16, 16, 4, 1)]


@triton.jit
def _varlen_attention_list_kernel(
    lengths_ptr,
    others_ptr,
    list_ptr,
    BATCH,
    SLOTS,
    USED: tl.constexpr,
    OTHERS_USED: tl.constexpr,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Write the tiles of one sequence into the list: the sequence, the block.

    The list is of one side, queries or keys. A tile goes along the tokens of
    the other side. The sequence with most of these comes first. Of each side,
    the pointer is to seqused if USED, or else to cu_seqlens.
    """
    seq = tl.program_id(axis=0)
    if USED:
        tokens = tl.load(lengths_ptr + seq)
    else:
        tokens = tl.load(lengths_ptr + seq + 1) - tl.load(lengths_ptr + seq)
    if OTHERS_USED:
        work = tl.load(others_ptr + seq)
    else:
        work = tl.load(others_ptr + seq + 1) - tl.load(others_ptr + seq)
    first, count = 0, 0
    for start in range(0, BATCH, BLOCK_B):
        offs = start + tl.arange(0, BLOCK_B)  # (BLOCK_B,)
        mask = offs < BATCH
        tiles = tl.load(lengths_ptr + offs, mask=mask, other=0)
        if not USED:
            end = tl.load(lengths_ptr + offs + 1, mask=mask, other=0)
            tiles = end - tiles
        tiles = tl.cdiv(tiles, BLOCK)  # (BLOCK_B,)
        other = tl.load(others_ptr + offs, mask=mask, other=0)
        if not OTHERS_USED:
            end = tl.load(others_ptr + offs + 1, mask=mask, other=0)
            other = end - other
        # Equally long sequences come by number: two never share a place.
        sooner = (other > work) | ((other == work) & (offs < seq))
        first += tl.sum(tl.where(sooner, tiles, 0))
        count += tl.sum(tiles)
    tiles = tl.cdiv(tokens, BLOCK)
    for start in range(0, tiles, BLOCK_B):
        offs = start + tl.arange(0, BLOCK_B)  # (BLOCK_B,)
        # With a causal mask, the last queries and the first keys have the most.
        block = tiles - 1 - offs if DOWN else offs
        # Tiles go past the end only if max_seqlen was too small. They are
        # left out then, rather than written beside the list.
        mask = (offs < tiles) & (first + offs < SLOTS)
        tl.store(list_ptr + 2 * (first + offs), seq, mask=mask)
        tl.store(list_ptr + 2 * (first + offs) + 1, block, mask=mask)
    # Entries that are left over get the block -1. The programs share them.
    for slot in range(count + seq, SLOTS, BATCH):
        tl.store(list_ptr + 2 * slot, 0)
        tl.store(list_ptr + 2 * slot + 1, -1)


@triton.jit
def _varlen_attention_load(
    ptrs,
    offs,
    stride,
    L,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Load rows of a sequence, zeros past its end and past the head's."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    mask = offs_d < D
    if RAGGED:
        # Past the end lie the tokens of the next sequence.
        mask = mask & (offs < L)
    return tl.load(ptrs + offs.to(tl.int64) * stride + offs_d, mask, other=0.0)


@triton.jit
def _varlen_attention_store(
    ptr,
    tile,
    begin,
    offs,
    L,
    head,
    HEADS,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store rows of a sequence into a contiguous tensor."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    ptrs = ptr + ((begin + offs) * HEADS + head) * D + offs_d
    tl.store(ptrs, tile, mask=(offs < L) & (offs_d < D))


@triton.jit
def _varlen_attention_keys(
    block,
    LQ,
    LK,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the ends of three parts of the keys that a block of queries sees.

    All queries of the block see the keys of the second part; the others need a
    mask. Query i sees the keys from i + LK - LQ - LEFT to i + LK - LQ + RIGHT:
    the last query is beside the last key.
    """
    first, low, full, end = 0, 0, LK, LK
    if RIGHT is not None:
        seen = block * BLOCK_M + LK - LQ + RIGHT
        full = tl.maximum(tl.minimum(seen + 1, LK), 0)
        end = tl.maximum(tl.minimum(seen + BLOCK_M, LK), 0)
    # Rounded down to whole blocks: a ragged block needs a mask.
    full = full // BLOCK_N * BLOCK_N
    if LEFT is not None:
        seen = block * BLOCK_M + LK - LQ - LEFT
        first = tl.maximum(seen, 0) // BLOCK_N * BLOCK_N
        low = tl.cdiv(tl.maximum(seen + BLOCK_M - 1, 0), BLOCK_N) * BLOCK_N
        low = tl.minimum(low, end)
        full = tl.maximum(full, low)
    return first, low, full, end


@triton.jit
def _varlen_attention_seen(
    offs_m, offs_n, LQ, LK, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Return which keys a query sees."""
    seen = offs_n < LK
    if RIGHT is not None:
        seen = seen & (offs_n <= offs_m + LK - LQ + RIGHT)
    if LEFT is not None:
        seen = seen & (offs_n >= offs_m + LK - LQ - LEFT)
    return seen


@triton.jit
def _varlen_attention_score(
    s, distance, slope, SCALE: tl.constexpr, CAP: tl.constexpr
):
    """Return scores, to the base 2, and their derivative, which is over SCALE.

    Without a cap and a slope they are returned as they are. The distance is
    that of a query and a key.
    """
    derivative = 1.0
    if CAP is not None:
        # tanh of a magnitude: its exponential is never inf, and the derivative
        # is right for large scores, too.
        power = tl.exp2(tl.abs(s) * (-2.0 * SCALE / CAP))
        part = 1.0 / (1.0 + power)
        derivative = 4.0 * power * part * part
        tanh = (1.0 - power) * part
        s = tl.where(s < 0, -tanh, tanh) * (CAP * 1.4426950408889634)
    elif slope is not None:
        s = s * SCALE
    if slope is not None:
        s = s - slope * tl.abs(distance).to(s.dtype)
    return s, derivative


@triton.jit
def _varlen_attention_power(s, SCALE: tl.constexpr, shift):
    """Return 2**(s * SCALE - shift)."""
    scale = tl.full((), SCALE, dtype=s.dtype)
    # One rounding, whatever Triton's default. (Before Triton 3.9, -shift would
    # be an instruction of its own.)
    return tl.exp2(tl.fma(s, scale, -1.0 * shift))


@triton.jit
def _varlen_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    list_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_q_ptr,
    used_k_ptr,
    slopes_ptr,
    sinks_ptr,
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    ROW_Q,
    ROW_K,
    jump_q,
    jump_k,
    jump_v,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # These lines are not in a helper. A helper would get these pointers and
    # return numbers that the stores' addresses depend on. torch.compile would
    # then believe that the kernel writes to these tensors, and copy them.
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    if used_q_ptr is None:
        LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    else:
        LQ = tl.load(used_q_ptr + seq)
    if used_k_ptr is None:
        LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    else:
        LK = tl.load(used_k_ptr + seq)
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    if ROW_Q is not None:
        q_ptrs += begin_q // ROW_Q * jump_q
    if ROW_K is not None:
        k_ptrs += begin_k // ROW_K * jump_k
        v_ptrs += begin_k // ROW_K * jump_v
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + seq * HEADS + head)
    FACTOR: tl.constexpr = SCALE if CAP is None and slopes_ptr is None else 1.0
    # Not -inf: for a query that has seen no key yet, -inf - -inf is NaN.
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    if sinks_ptr is not None:
        # A sink is a score without a value.
        sink = tl.load(sinks_ptr + head)
        m = tl.maximum(m, sink)
        total = tl.exp2(sink - m)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=ACC)
    ends = _varlen_attention_keys(block, LQ, LK, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    # The keys that all queries of the block see go without a mask.
    for PART in tl.static_range(1 if LEFT is None else 0, 3):
        for start in range(ends[PART], ends[PART + 1], BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            k = _varlen_attention_load(
                k_ptrs, offs_n[:, None], stride_kt, LK, D, BLOCK_D, PART != 1
            )
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            offs = offs_n[None, :]
            s, _ = _varlen_attention_score(
                s, offs_m + LK - LQ - offs, slope, SCALE, CAP
            )
            if PART != 1:
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, LEFT, RIGHT)
                s = tl.where(seen, s, -float("inf"))  # (BLOCK_M, BLOCK_N)
            # The factor is positive, so it may be applied after the maximum.
            most = tl.max(s, axis=1, keep_dims=True) * FACTOR
            m_new = tl.maximum(m, most)
            p = _varlen_attention_power(s, FACTOR, m_new)  # (BLOCK_M, BLOCK_N)
            # What was added up so far had the old maximum.
            rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
            total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
            v = _varlen_attention_load(
                v_ptrs, offs_n[:, None], stride_vt, LK, DV, BLOCK_DV, PART != 1
            )
            acc = acc * rescale
            # The tensor cores take p in the type of v.
            p = p.to(v.dtype)
            acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
            m = m_new
    # A query that saw nothing has a result of 0. As its lse is infinite, the
    # backward computes probabilities of 0 for it.
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total
    lse = tl.where(nothing, float("inf"), m + tl.log2(total))
    _varlen_attention_store(
        out_ptr, acc, begin_q, offs_m, LQ, head, HEADS, DV, BLOCK_DV
    )
    tl.store(lse_ptr + head * TOTAL + begin_q + offs_m, lse, mask=offs_m < LQ)


@triton.jit
def _varlen_attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    list_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_q_ptr,
    used_k_ptr,
    slopes_ptr,
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dt,
    stride_dh,
    ROW_Q,
    ROW_K,
    jump_q,
    jump_k,
    jump_v,
    jump_d,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    if used_q_ptr is None:
        LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    else:
        LQ = tl.load(used_q_ptr + seq)
    if used_k_ptr is None:
        LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    else:
        LK = tl.load(used_k_ptr + seq)
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    d_ptrs = do_ptr + begin_q * stride_dt + head * stride_dh
    o_ptrs = out_ptr + (begin_q * HEADS + head) * DV
    if ROW_Q is not None:
        q_ptrs += begin_q // ROW_Q * jump_q
        d_ptrs += begin_q // ROW_Q * jump_d
    if ROW_K is not None:
        k_ptrs += begin_k // ROW_K * jump_k
        v_ptrs += begin_k // ROW_K * jump_v
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    do = _varlen_attention_load(
        d_ptrs, offs_m, stride_dt, LQ, DV, BLOCK_DV, True
    )
    out = _varlen_attention_load(
        o_ptrs, offs_m, HEADS * DV, LQ, DV, BLOCK_DV, True
    )
    row = head * TOTAL + begin_q + offs_m  # (BLOCK_M, 1)
    lse = tl.load(lse_ptr + row, mask=offs_m < LQ, other=float("inf"))
    delta = tl.sum(out.to(ACC) * do.to(ACC), axis=1, keep_dims=True)
    # The other pass runs after this one, and reads delta.
    tl.store(delta_ptr + row, delta, mask=offs_m < LQ)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + seq * HEADS + head)
    FACTOR: tl.constexpr = SCALE if CAP is None and slopes_ptr is None else 1.0
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    ends = _varlen_attention_keys(block, LQ, LK, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    # The keys that all queries of the block see go without a mask.
    for PART in tl.static_range(1 if LEFT is None else 0, 3):
        for start in range(ends[PART], ends[PART + 1], BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            k = _varlen_attention_load(
                k_ptrs, offs_n[:, None], stride_kt, LK, D, BLOCK_D, PART != 1
            )
            v = _varlen_attention_load(
                v_ptrs, offs_n[:, None], stride_vt, LK, DV, BLOCK_DV, PART != 1
            )
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            offs = offs_n[None, :]
            s, derivative = _varlen_attention_score(
                s, offs_m + LK - LQ - offs, slope, SCALE, CAP
            )
            p = _varlen_attention_power(s, FACTOR, lse)  # (BLOCK_M, BLOCK_N)
            if PART != 1:
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, LEFT, RIGHT)
                # For a key that is not seen, exp2 may give inf. Multiplied by
                # a mask's 0, that would be NaN, so we select.
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
            ds = p * (dp - delta)  # (BLOCK_M, BLOCK_N)
            if CAP is not None:
                ds *= derivative
            ds = ds.to(k.dtype)
            dq = tl.dot(ds, k, dq, input_precision="ieee", out_dtype=ACC)
    # SCALE contains log2(e), and the derivative does not: ln(2) cancels it.
    dq = dq * (SCALE * 0.6931471805599453)
    _varlen_attention_store(
        dq_ptr, dq, begin_q, offs_m, LQ, head, HEADS, D, BLOCK_D
    )


@triton.jit
def _varlen_attention_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    list_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_q_ptr,
    used_k_ptr,
    slopes_ptr,
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dt,
    stride_dh,
    ROW_Q,
    ROW_K,
    jump_q,
    jump_k,
    jump_v,
    jump_d,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # HEADS counts the heads of keys. GROUP heads of queries share each of them.
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    if used_q_ptr is None:
        LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    else:
        LQ = tl.load(used_q_ptr + seq)
    if used_k_ptr is None:
        LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    else:
        LK = tl.load(used_k_ptr + seq)
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    k_ptrs = k_ptr + begin_k * stride_kt + head * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head * stride_vh
    if ROW_K is not None:
        k_ptrs += begin_k // ROW_K * jump_k
        v_ptrs += begin_k // ROW_K * jump_v
    k = _varlen_attention_load(k_ptrs, offs_n, stride_kt, LK, D, BLOCK_D, True)
    v = _varlen_attention_load(
        v_ptrs, offs_n, stride_vt, LK, DV, BLOCK_DV, True
    )
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), dtype=ACC)
    # From query some on, a query sees some of these keys; from full on, all;
    # from less on, some; from none on, none.
    some, full, less, none = 0, 0, LQ, LQ
    if RIGHT is not None:
        some = block * BLOCK_N + LQ - LK - RIGHT
        some = tl.minimum(tl.maximum(some, 0), LQ)
        some = some // BLOCK_M * BLOCK_M
        full = (block + 1) * BLOCK_N - 1 + LQ - LK - RIGHT
        full = tl.maximum(full, some)
        full = tl.minimum(tl.cdiv(full, BLOCK_M) * BLOCK_M, LQ)
    if LEFT is not None:
        seen = block * BLOCK_N + LQ - LK + LEFT
        none = tl.minimum(tl.maximum(seen + BLOCK_N, 0), LQ)
        less = tl.minimum(tl.maximum(seen + 1, 0), LQ)
        full = tl.minimum(full, tl.maximum(none, some))
        less = tl.maximum(less // BLOCK_M * BLOCK_M, full)
    ends = some, full, less, none
    FACTOR: tl.constexpr = SCALE if CAP is None and slopes_ptr is None else 1.0
    for member in range(GROUP):
        of_q = head * GROUP + member
        q_ptrs = q_ptr + begin_q * stride_qt + of_q * stride_qh
        d_ptrs = do_ptr + begin_q * stride_dt + of_q * stride_dh
        if ROW_Q is not None:
            q_ptrs += begin_q // ROW_Q * jump_q
            d_ptrs += begin_q // ROW_Q * jump_d
        row = of_q * TOTAL + begin_q
        slope = None
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + seq * HEADS * GROUP + of_q)
        # The queries that see all keys of the block go without a mask.
        for PART in tl.static_range(
            1 if RIGHT is None else 0, 2 if LEFT is None else 3
        ):
            for start in range(ends[PART], ends[PART + 1], BLOCK_M):
                offs_m = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
                mask = offs_m < LQ
                q = _varlen_attention_load(
                    q_ptrs, offs_m[:, None], stride_qt, LQ, D, BLOCK_D, True
                )
                do = _varlen_attention_load(
                    d_ptrs, offs_m[:, None], stride_dt, LQ, DV, BLOCK_DV, True
                )
                # Past the end, lse is inf, so p is 0.
                lse = tl.load(lse_ptr + row + offs_m, mask, other=float("inf"))
                delta = tl.load(delta_ptr + row + offs_m, mask, other=0.0)
                # Keys by queries: p is the first operand of the sum over
                # queries, below.
                s = tl.dot(k, q.T, input_precision="ieee", out_dtype=ACC)
                # (BLOCK_N, BLOCK_M)
                offs = offs_m[None, :]
                s, derivative = _varlen_attention_score(
                    s, offs + LK - LQ - offs_n, slope, SCALE, CAP
                )
                p = _varlen_attention_power(s, FACTOR, lse[None, :])
                if PART != 1 and RIGHT is not None:
                    p = tl.where(offs_n <= offs + LK - LQ + RIGHT, p, 0.0)
                if PART != 1 and LEFT is not None:
                    p = tl.where(offs_n >= offs + LK - LQ - LEFT, p, 0.0)
                w = p.to(do.dtype)
                dv = tl.dot(w, do, dv, input_precision="ieee", out_dtype=ACC)
                dp = tl.dot(v, do.T, input_precision="ieee", out_dtype=ACC)
                ds = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
                if CAP is not None:
                    ds *= derivative
                ds = ds.to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee", out_dtype=ACC)
    dk = dk * (SCALE * 0.6931471805599453)
    _varlen_attention_store(
        dk_ptr, dk, begin_k, offs_n, LK, head, HEADS, D, BLOCK_D
    )
    _varlen_attention_store(
        dv_ptr, dv, begin_k, offs_n, LK, head, HEADS, DV, BLOCK_DV
    )


@functools.cache
def _varlen_attention_room(device):
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":  # the interpreter
        return VARLEN_ATTENTION_ROOM
    gpu = torch.cuda.get_device_properties(device)
    return getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)


def _varlen_attention_check(
    name,
    q,
    k,
    v,
    cu,
    scale,
    left,
    right,
    softcap,
    slopes,
    sinks,
    *used,
):
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    used = [t for t in used if t is not None]
    kinds = [(t.dtype, t.device) for t in (q, k, v)]
    places = [(t.dtype, t.device) for t in (*cu, *used)]
    if len({*kinds}) > 1 or {*places} != {(torch.int32, q.device)}:
        raise TypeError(
            f"{name} takes q, k and v of one dtype, and cu_seqlens and seqused "
            f"of int32, all on one device, not {kinds + places}"
        )
    fits = (
        {q.ndim, k.ndim} <= {3, 4}
        and k.shape[:-1] == v.shape[:-1]
        and q.shape[-1] == k.shape[-1]
        and 1 <= q.shape[-1] <= 256
        and 1 <= v.shape[-1] <= 256
        and k.shape[-2] > 0
        and q.shape[-2] % k.shape[-2] == 0
        and cu[0].ndim == 1
        and cu[0].shape == cu[1].shape
        and cu[0].shape[0] > 0
        and all(t.shape == (cu[0].shape[0] - 1,) for t in used)
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v, *cu, *used))
        raise ValueError(
            f"{name} takes q of (tokens, heads, D), k of (tokens, heads / n, "
            "D), v of (tokens, heads / n, DV), or each of (rows, tokens, ...), "
            "with D and DV up to 256, cu_seqlens of one shape (batch + 1,), "
            f"and seqused of (batch,), not {found}"
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"{name} takes a scale above 0, not {scale}")
    if min(left, right) < -1:
        raise ValueError(
            f"{name} takes a window_size of two numbers, -1 for no limit, "
            f"not {left} and {right}"
        )
    if not 0 <= softcap < math.inf:
        raise ValueError(f"{name} takes a softcap from 0 on, not {softcap}")
    for what, t in (("alibi_slopes", slopes), ("sinks", sinks)):
        if t is None:
            continue
        if not t.is_floating_point() or t.device != q.device:
            raise TypeError(
                f"{name} takes {what} of floats on the device of q, not "
                f"{t.dtype} on {t.device}"
            )
        shapes = [q.shape[-2:-1], (cu[0].shape[0] - 1, q.shape[-2])]
        if t.shape not in shapes[: 1 if t is sinks else 2]:
            raise ValueError(
                f"{name} takes {what} of a number for each head of q, not of "
                f"{tuple(t.shape)}"
            )


def _varlen_attention_tile(kind, D, DV, dtype, device):
    """Return the constants of a kernel's tile, its warps and stages."""
    BLOCK_D, BLOCK_DV = (max(16, triton.next_power_of_2(n)) for n in (D, DV))
    widest = max(64, BLOCK_D, BLOCK_DV)
    tile = VARLEN_ATTENTION_TILES[kind][widest]
    room = _varlen_attention_room(device)
    if widest == 256 and room < VARLEN_ATTENTION_ROOM:
        tile = VARLEN_ATTENTION_SMALL
    if dtype.itemsize > 2:  # their operands take more registers
        tile = VARLEN_ATTENTION_WIDE[widest > 64]
    BLOCK_M, BLOCK_N, num_warps, num_stages = tile
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_DV,
        "num_warps": num_warps,
        # Two stages fit AMD's shared memory.
        "num_stages": min(num_stages, 2 if torch.version.hip else num_stages),
    }


def _varlen_attention_known(
    q, k, v, batch, causal, scale, left, right, softcap, slopes
):
    """Return what all three kernels are given by name."""
    D, heads = int(q.shape[-1]), q.shape[-2]
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(q.dtype, torch.float32))
        slopes = slopes.expand(batch, heads) * math.log2(math.e)
        slopes = slopes.contiguous()
    return {
        "slopes_ptr": slopes,
        "ROW_Q": q.shape[1] if q.ndim == 4 else None,
        "ROW_K": k.shape[1] if k.ndim == 4 else None,
        "GROUP": int(heads // k.shape[-2]),
        "D": D,
        "DV": int(v.shape[-1]),
        # exp(x) is exp2(x * log2(e)).
        "SCALE": (D**-0.5 if scale is None else scale) * math.log2(math.e),
        "CAP": softcap or None,
        "LEFT": None if left < 0 else int(left),
        "RIGHT": 0 if causal else None if right < 0 else int(right),
        "ACC": tl.float64 if q.dtype == torch.float64 else tl.float32,
    }


def _varlen_attention_list(
    cu,
    cu_other,
    total,
    longest,
    BLOCK,
    DOWN,
    used=None,
    used_other=None,
    kernel=_varlen_attention_list_kernel,
):
    """Return the list of the tiles of one side, (slots, 2), on the GPU."""
    batch = cu.shape[0] - 1
    # The GPU alone knows how many tiles there are. Each sequence has at most
    # one ragged tile, and no more tiles than the longest.
    slots = torch.sym_min(
        total // BLOCK + batch, batch * triton.cdiv(longest, BLOCK)
    )
    tiles = cu.new_empty(slots, 2)
    kernel[(batch,)](
        cu if used is None else used,
        cu_other if used_other is None else used_other,
        tiles,
        batch,
        slots,
        USED=used is not None,
        OTHERS_USED=used_other is not None,
        DOWN=DOWN,
        BLOCK=BLOCK,
        BLOCK_B=256,
    )
    return tiles


def _varlen_attention_read(**tensors):
    """Return tensors as kernels read them, and their strides by name.

    Their heads are contiguous. A jump leads from where a row ends to where the
    next one begins.
    """
    read, strides = [], {}
    for name, t in tensors.items():
        t = t if t.stride(-1) == 1 else t.contiguous()
        if triton.knobs.runtime.interpret and t.dtype == torch.bfloat16:
            # The interpreter would multiply the bits as if they were integers.
            t = t.float().contiguous()
        *row, along, head = t.stride()[:-1]
        strides |= {f"stride_{name}t": along, f"stride_{name}h": head}
        jump = row[0] - t.shape[1] * along if row else None
        strides[f"jump_{name}"] = jump
        read.append(t)
    return read, strides


def _varlen_attention_launch(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    scale=None,
    left=-1,
    right=-1,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    seqused_q=None,
    seqused_k=None,
    kernel=_varlen_attention_kernel,
    listed=_varlen_attention_list,
):
    cu, used = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    asked = scale, left, right, softcap, alibi_slopes
    _varlen_attention_check(
        "varlen_attention", q, k, v, cu, *asked, sinks, *used
    )
    total, heads = math.prod(q.shape[:-2]), q.shape[-2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(heads, total, dtype=wide)
    if seqused_q is not None:  # the kernel leaves the other rows as they are
        out.zero_()
    if seqused_q is not None or sinks is not None:
        lse.fill_(float("inf"))
    if out.numel() == 0:
        return out, lse
    cu = [t.contiguous() for t in cu]
    used = [t if t is None else t.contiguous() for t in used]
    batch = cu[0].shape[0] - 1
    known = _varlen_attention_known(q, k, v, batch, causal, *asked)
    known |= _varlen_attention_tile(
        "forward", known["D"], known["DV"], q.dtype, q.device
    )
    read, strides = _varlen_attention_read(q=q, k=k, v=v)
    if sinks is not None:
        sinks = sinks.to(wide) * math.log2(math.e)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        size = total, max_seqlen_q, known["BLOCK_M"], known["RIGHT"] is not None
        tiles = listed(*cu, *size, *used)
        pointers = *read, out, lse, tiles, *cu, *used
        kernel[(tiles.shape[0] * heads,)](
            *pointers,
            sinks_ptr=sinks,
            TOTAL=total,
            HEADS=heads,
            LOWEST=torch.finfo(wide).min,
            **known,
            **strides,
        )
    return out, lse


def _varlen_attention_backward_launch(
    do,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    scale=None,
    left=-1,
    right=-1,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    seqused_q=None,
    seqused_k=None,
    dq_kernel=_varlen_attention_dq_kernel,
    dkdv_kernel=_varlen_attention_dkdv_kernel,
    listed=_varlen_attention_list,
):
    cu = [t.contiguous() for t in (cu_seqlens_q, cu_seqlens_k)]
    used = seqused_q, seqused_k
    used = [t if t is None else t.contiguous() for t in used]
    heads, heads_k = q.shape[-2], k.shape[-2]
    total, keys = math.prod(q.shape[:-2]), math.prod(k.shape[:-2])
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    if seqused_q is not None:
        dq.zero_()
    if seqused_k is not None:
        dk.zero_()
        dv.zero_()
    delta = torch.empty_like(lse)
    if sinks is not None:
        delta.zero_()
    asked = causal, scale, left, right, softcap, alibi_slopes
    known = _varlen_attention_known(q, k, v, cu[0].shape[0] - 1, *asked)
    kind = known["D"], known["DV"], q.dtype, q.device
    (q, k, v, do), strides = _varlen_attention_read(q=q, k=k, v=v, d=do)
    (out,), _ = _varlen_attention_read(o=out)
    known |= strides | {"TOTAL": total}
    with torch.accelerator.device_index(q.device.index):
        if total * heads > 0:
            tile = _varlen_attention_tile("dq", *kind)
            size = total, max_seqlen_q, tile["BLOCK_M"]
            tiles = listed(*cu, *size, known["RIGHT"] is not None, *used)
            pointers = q, k, v, out, do, lse, delta, dq, tiles, *cu, *used
            dq_kernel[(tiles.shape[0] * heads,)](
                *pointers, HEADS=heads, **known, **tile
            )
        if keys > 0:
            tile = _varlen_attention_tile("dkdv", *kind)
            size = keys, max_seqlen_k, tile["BLOCK_N"], False
            tiles = listed(*reversed(cu), *size, *reversed(used))
            pointers = q, k, v, do, lse, delta, dk, dv, tiles, *cu, *used
            dkdv_kernel[(tiles.shape[0] * heads_k,)](
                *pointers, HEADS=heads_k, **known, **tile
            )
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    # A sink has the probability exp(sink - lse), and the value 0.
    log2 = sinks[:, None].to(lse.dtype) * math.log2(math.e)
    d_sinks = -(torch.exp2(log2 - lse) * delta).sum(1)
    return dq, dk, dv, d_sinks.to(sinks.dtype)


@triton_op(
    f"{VARLEN_ATTENTION_NAMESPACE}::varlen_attention_forward", mutates_args={}
)
def varlen_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return varlen_attention, and the log-sum-exp of each row of scores.

    Takes what varlen_attention takes; left and right are its window_size. The
    log-sum-exp has the shape (heads, tokens) and the base 2, is float32, or
    float64 for float64, and has no gradient. It is inf for a query that sees
    nothing.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    listing = wrap_triton(_varlen_attention_list_kernel)
    kernels = (
        wrap_triton(_varlen_attention_kernel),
        partial(_varlen_attention_list, kernel=listing),
    )
    options = causal, scale, left, right, softcap, alibi_slopes, sinks
    return _varlen_attention_launch(
        q, k, v, *lengths, *options, seqused_q, seqused_k, *kernels
    )


@triton_op(
    f"{VARLEN_ATTENTION_NAMESPACE}::varlen_attention_backward", mutates_args={}
)
def varlen_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v and sinks, given that of the result, do.

    Takes what varlen_attention_forward took and returned. Without sinks, the
    last gradient is empty.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    listing = wrap_triton(_varlen_attention_list_kernel)
    kernels = (
        wrap_triton(_varlen_attention_dq_kernel),
        wrap_triton(_varlen_attention_dkdv_kernel),
        partial(_varlen_attention_list, kernel=listing),
    )
    options = causal, scale, left, right, softcap, alibi_slopes, sinks
    used = seqused_q, seqused_k
    return _varlen_attention_backward_launch(
        do, q, k, v, out, lse, *lengths, *options, *used, *kernels
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
VARLEN_ATTENTION_LIBRARY = Library(VARLEN_ATTENTION_NAMESPACE, "FRAGMENT")
VARLEN_ATTENTION_LIBRARY.impl(
    "varlen_attention_forward", _varlen_attention_launch, "CUDA"
)
VARLEN_ATTENTION_LIBRARY.impl(
    "varlen_attention_backward", _varlen_attention_backward_launch, "CUDA"
)


def _varlen_attention_autocast(kind, q, k, v, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return varlen_attention_forward(q, k, v, *options)


VARLEN_ATTENTION_LIBRARY.impl(
    "varlen_attention_forward",
    partial(_varlen_attention_autocast, "cpu"),
    "AutocastCPU",
)
VARLEN_ATTENTION_LIBRARY.impl(
    "varlen_attention_forward",
    partial(_varlen_attention_autocast, "cuda"),
    "AutocastCUDA",
)


def _varlen_attention_setup(ctx, inputs, output):
    q, k, v, cu_q, cu_k, *ctx.known, slopes, sinks, used_q, used_k = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(
        q, k, v, *output, cu_q, cu_k, slopes, sinks, used_q, used_k
    )


def _varlen_attention_gradient(ctx, do, _):
    *saved, slopes, sinks, used_q, used_k = ctx.saved_tensors
    options = *ctx.known, slopes, sinks, used_q, used_k
    dq, dk, dv, d_sinks = varlen_attention_backward(do, *saved, *options)
    d_sinks = None if sinks is None else d_sinks
    return dq, dk, dv, *[None] * 10, d_sinks, None, None


varlen_attention_forward.register_autograd(
    _varlen_attention_gradient, setup_context=_varlen_attention_setup
)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of packed sequences, each within itself.

    Takes q of (tokens, heads, D), k of (tokens, heads / n, D) and v of (tokens,
    heads / n, DV), all of one dtype, float16, bfloat16, float32 or float64,
    with D and DV up to 256 and any strides; what is not contiguous along D is
    copied. Head h of q takes head h // n of k and v. q and k may differ in
    tokens. q, or k and v, may also be of (rows, tokens, ...), as a batch with
    padding or a cache is. They stand for t.flatten(0, 1), and are not copied.
    No sequence may then go on from one row to the next.

    cu_seqlens_q and cu_seqlens_k say where sequences begin and end: sequence i
    has the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1, and its keys
    likewise. Both are int32 on the device of q, and have batch + 1 numbers that
    never fall, from 0 to the number of tokens. A sequence may be empty.
    max_seqlen_q and max_seqlen_k are integers, at least the lengths of the
    longest sequence. These numbers are not checked, as the CPU would have to
    wait for them. With wrong ones, the op may read and write outside of the
    tensors, or leave rows of the result or of a gradient unwritten.

    seqused_q and seqused_k, of (batch,) and int32, say how many of a sequence's
    tokens are used, the first ones. Then cu_seqlens need not begin at 0, nor
    end with the number of tokens. For a cache k of (batch, length, heads, D),
    give i * length for cu_seqlens_k[i], and the length filled for seqused_k[i].
    Rows that are not used are neither read nor, in the result and in the
    gradients, other than 0.

    With causal, a sequence's last query sees all its keys, the one before it
    all but the last, and so on: query i of LQ is beside key i + LK - LQ. A
    window_size of (left, right) has each query see the key beside it, ``left``
    keys before that and ``right`` after it; -1 is all. With causal, right is 0.
    A query that sees nothing gives 0.

    scale multiplies the scores. It is above 0, and 1 / sqrt(D) if not given. A
    softcap above 0 then makes softcap * tanh(score / softcap) of a score.
    alibi_slopes, float tensors of (heads,) or (batch, heads), subtract slope *
    |i + LK - LQ - j| from the score of query i and key j (ALiBi,
    https://arxiv.org/abs/2108.12409); they have no gradient. sinks, a float
    tensor of (heads,), has a score for each head of q, which takes part in
    each softmax and has no value; its gradient is summed in float32, or float64
    for float64. The kernels are compiled anew for each scale, window_size and
    softcap. Scores above 2**27 or below -2**27, in float64 2**56, may give 0 or
    NaN: a GPU then rounds by more than exp2 can take.

    The result has the shape of q, with DV for D, and its dtype, and is
    contiguous. With return_lse, there is a second one: the logarithm of the sum
    of exp(score), over the keys that a query sees and the sink, of (heads,
    tokens) or (rows, heads, tokens), float32, or float64 for float64. It is
    -inf for a query that sees nothing, and has no gradient.

    The result and the gradients of q, k, v and sinks are deterministic. Second
    derivatives are not supported. Raises TypeError for other dtypes and for
    dtypes or devices that differ, and ValueError for other shapes and numbers,
    and if alibi_slopes requires grad. The method:
    https://arxiv.org/abs/2307.08691

    Rounding: scores, softmax and sums are in float32, or float64 for float64.
    The weights of a softmax are rounded to the dtype of v for their product
    with v, and each result is rounded once. In the backward, weights and the
    gradients of scores are rounded likewise. The gradient of sinks is that of
    the rounded result.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = *window_size, softcap, alibi_slopes, sinks, seqused_q, seqused_k
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("varlen_attention has no gradient for alibi_slopes")
    out, lse = varlen_attention_forward(
        q, k, v, *lengths, causal, scale, *options
    )
    if not return_lse:
        return out
    lse = torch.where(lse == torch.inf, -torch.inf, lse * math.log(2))
    if q.ndim == 4:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out, lse
