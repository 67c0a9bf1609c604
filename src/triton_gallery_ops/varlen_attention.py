"""Variable-length flash attention for packed sequences, with its backward.

Attends within each sequence and computes nothing for padding (FlashAttention-2:
Dao, 2023, arXiv:2307.08691). The GPU lists the tiles, longest sequence first,
so the CPU does not wait for lengths. Nothing checks them: wrong ``cu_seqlens``
may read and write out of bounds. A causal mask aligns the last query with the
last key, unlike PyTorch's ``is_causal``. Head sizes go up to 256; query heads
may share key heads (GQA). If little is padding, a padded batch may be faster.
For one or a few queries on a paged cache, use ``decode_attention``.
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
    cu_ptr,
    cu_other_ptr,
    list_ptr,
    BATCH,
    SLOTS,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Write the tiles of one sequence into the list: the sequence, the block.

    The list is of one side, queries or keys. A tile goes along the tokens of
    the other side. The sequence with most of these comes first.
    """
    seq = tl.program_id(axis=0)
    tokens = tl.load(cu_ptr + seq + 1) - tl.load(cu_ptr + seq)
    work = tl.load(cu_other_ptr + seq + 1) - tl.load(cu_other_ptr + seq)
    first, count = 0, 0
    for start in range(0, BATCH, BLOCK_B):
        offs = start + tl.arange(0, BLOCK_B)  # (BLOCK_B,)
        mask = offs < BATCH
        begin = tl.load(cu_ptr + offs, mask=mask, other=0)
        tiles = tl.load(cu_ptr + offs + 1, mask=mask, other=0) - begin
        tiles = tl.cdiv(tiles, BLOCK)  # (BLOCK_B,)
        begin = tl.load(cu_other_ptr + offs, mask=mask, other=0)
        other = tl.load(cu_other_ptr + offs + 1, mask=mask, other=0) - begin
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
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the ends of the keys that all, and that some, of a block see.

    Query i sees the keys up to i + LK - LQ: the last query sees all of them.
    """
    full, end = LK, LK
    if CAUSAL:
        seen = block * BLOCK_M + LK - LQ
        full = tl.maximum(tl.minimum(seen + 1, LK), 0)
        end = tl.maximum(tl.minimum(seen + BLOCK_M, LK), 0)
    # Rounded down to whole blocks: a ragged block needs a mask.
    return full // BLOCK_N * BLOCK_N, end


@triton.jit
def _varlen_attention_seen(offs_m, offs_n, LQ, LK, CAUSAL: tl.constexpr):
    """Return which keys a query sees."""
    seen = offs_n < LK
    if CAUSAL:
        seen = seen & (offs_n <= offs_m + LK - LQ)
    return seen


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
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    # Not -inf: for a query that has seen no key yet, -inf - -inf is NaN.
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    full, end = _varlen_attention_keys(block, LQ, LK, CAUSAL, BLOCK_M, BLOCK_N)
    # First the keys that all queries of the block see, without a mask; then the
    # others, with one.
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            k = _varlen_attention_load(
                k_ptrs, offs_n[:, None], stride_kt, LK, D, BLOCK_D, MASKED
            )
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            if MASKED:
                offs = offs_n[None, :]
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, CAUSAL)
                s = tl.where(seen, s, -float("inf"))  # (BLOCK_M, BLOCK_N)
            # The scale is positive, so it may be applied after the maximum.
            most = tl.max(s, axis=1, keep_dims=True) * SCALE
            m_new = tl.maximum(m, most)
            p = _varlen_attention_power(s, SCALE, m_new)  # (BLOCK_M, BLOCK_N)
            # What was added up so far had the old maximum.
            rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
            total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
            v = _varlen_attention_load(
                v_ptrs, offs_n[:, None], stride_vt, LK, D, BLOCK_D, MASKED
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
        out_ptr, acc, begin_q, offs_m, LQ, head, HEADS, D, BLOCK_D
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
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    d_ptrs = do_ptr + begin_q * stride_dt + head * stride_dh
    o_ptrs = out_ptr + (begin_q * HEADS + head) * D
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    do = _varlen_attention_load(d_ptrs, offs_m, stride_dt, LQ, D, BLOCK_D, True)
    out = _varlen_attention_load(
        o_ptrs, offs_m, HEADS * D, LQ, D, BLOCK_D, True
    )
    row = head * TOTAL + begin_q + offs_m  # (BLOCK_M, 1)
    lse = tl.load(lse_ptr + row, mask=offs_m < LQ, other=float("inf"))
    delta = tl.sum(out.to(ACC) * do.to(ACC), axis=1, keep_dims=True)
    # The other pass runs after this one, and reads delta.
    tl.store(delta_ptr + row, delta, mask=offs_m < LQ)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    full, end = _varlen_attention_keys(block, LQ, LK, CAUSAL, BLOCK_M, BLOCK_N)
    # First the keys that all queries of the block see, without a mask; then the
    # others, with one.
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            k = _varlen_attention_load(
                k_ptrs, offs_n[:, None], stride_kt, LK, D, BLOCK_D, MASKED
            )
            v = _varlen_attention_load(
                v_ptrs, offs_n[:, None], stride_vt, LK, D, BLOCK_D, MASKED
            )
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            p = _varlen_attention_power(s, SCALE, lse)  # (BLOCK_M, BLOCK_N)
            if MASKED:
                offs = offs_n[None, :]
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, CAUSAL)
                # For a key that is not seen, exp2 may give inf. Multiplied by
                # a mask's 0, that would be NaN, so we select.
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
            ds = (p * (dp - delta)).to(k.dtype)  # (BLOCK_M, BLOCK_N)
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
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # HEADS counts the heads of keys. GROUP heads of queries share each of them.
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    k_ptrs = k_ptr + begin_k * stride_kt + head * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head * stride_vh
    k = _varlen_attention_load(k_ptrs, offs_n, stride_kt, LK, D, BLOCK_D, True)
    v = _varlen_attention_load(v_ptrs, offs_n, stride_vt, LK, D, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    # From query some on, a query sees some of these keys; from full on, all.
    some, full = 0, 0
    if CAUSAL:
        some = tl.minimum(tl.maximum(block * BLOCK_N + LQ - LK, 0), LQ)
        some = some // BLOCK_M * BLOCK_M
        full = tl.maximum((block + 1) * BLOCK_N - 1 + LQ - LK, some)
        full = tl.minimum(tl.cdiv(full, BLOCK_M) * BLOCK_M, LQ)
    for member in range(GROUP):
        of_q = head * GROUP + member
        q_ptrs = q_ptr + begin_q * stride_qt + of_q * stride_qh
        d_ptrs = do_ptr + begin_q * stride_dt + of_q * stride_dh
        row = of_q * TOTAL + begin_q
        # With a causal mask, first the queries that need it; then the others.
        for MASKED in tl.static_range(CAUSAL, -1, -1):
            for start in range(
                some if MASKED else full, full if MASKED else LQ, BLOCK_M
            ):
                offs_m = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
                mask = offs_m < LQ
                q = _varlen_attention_load(
                    q_ptrs, offs_m[:, None], stride_qt, LQ, D, BLOCK_D, True
                )
                do = _varlen_attention_load(
                    d_ptrs, offs_m[:, None], stride_dt, LQ, D, BLOCK_D, True
                )
                # Past the end, lse is inf, so p is 0.
                lse = tl.load(lse_ptr + row + offs_m, mask, other=float("inf"))
                delta = tl.load(delta_ptr + row + offs_m, mask, other=0.0)
                # Keys by queries: p is the first operand of the sum over
                # queries, below.
                s = tl.dot(k, q.T, input_precision="ieee", out_dtype=ACC)
                # (BLOCK_N, BLOCK_M)
                p = _varlen_attention_power(s, SCALE, lse[None, :])
                if MASKED:
                    seen = offs_n <= offs_m[None, :] + LK - LQ
                    p = tl.where(seen, p, 0.0)
                w = p.to(do.dtype)
                dv = tl.dot(w, do, dv, input_precision="ieee", out_dtype=ACC)
                dp = tl.dot(v, do.T, input_precision="ieee", out_dtype=ACC)
                ds = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
                ds = ds.to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee", out_dtype=ACC)
    dk = dk * (SCALE * 0.6931471805599453)
    _varlen_attention_store(
        dk_ptr, dk, begin_k, offs_n, LK, head, HEADS, D, BLOCK_D
    )
    _varlen_attention_store(
        dv_ptr, dv, begin_k, offs_n, LK, head, HEADS, D, BLOCK_D
    )


@functools.cache
def _varlen_attention_room(device):
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":  # the interpreter
        return VARLEN_ATTENTION_ROOM
    gpu = torch.cuda.get_device_properties(device)
    return getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)


def _varlen_attention_check(name, q, k, v, cu_q, cu_k, scale):
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    kinds = [(t.dtype, t.device) for t in (q, k, v)]
    places = [(t.dtype, t.device) for t in (cu_q, cu_k)]
    if len({*kinds}) > 1 or {*places} != {(torch.int32, q.device)}:
        raise TypeError(
            f"{name} takes q, k and v of one dtype and cu_seqlens of int32, "
            f"all on one device, not {kinds + places}"
        )
    fits = (
        q.ndim == k.ndim == 3
        and k.shape == v.shape
        and q.shape[2] == k.shape[2]
        and 1 <= q.shape[2] <= 256
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and cu_q.ndim == 1
        and cu_q.shape == cu_k.shape
        and cu_q.shape[0] > 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v, cu_q, cu_k))
        raise ValueError(
            f"{name} takes q of (tokens, heads, D), k and v of one shape "
            "(tokens, heads / n, D), with D up to 256, and cu_seqlens of one "
            f"shape (batch + 1,), not {found}"
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"{name} takes a scale above 0, not {scale}")


def _varlen_attention_tile(kind, like, scale):
    """Return the constants of a kernel, its warps and stages."""
    D = int(like.shape[2])
    BLOCK_D = max(16, triton.next_power_of_2(D))
    tile = VARLEN_ATTENTION_TILES[kind][max(64, BLOCK_D)]
    room = _varlen_attention_room(like.device)
    if BLOCK_D == 256 and room < VARLEN_ATTENTION_ROOM:
        tile = VARLEN_ATTENTION_SMALL
    if like.dtype.itemsize > 2:  # their operands take more registers
        tile = VARLEN_ATTENTION_WIDE[BLOCK_D > 64]
    BLOCK_M, BLOCK_N, num_warps, num_stages = tile
    return {
        "D": D,
        # exp(x) is exp2(x * log2(e)).
        "SCALE": (D**-0.5 if scale is None else scale) * math.log2(math.e),
        "ACC": tl.float64 if like.dtype == torch.float64 else tl.float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
        "num_warps": num_warps,
        # Two stages fit AMD's shared memory.
        "num_stages": min(num_stages, 2 if torch.version.hip else num_stages),
    }


def _varlen_attention_list(
    cu,
    cu_other,
    total,
    longest,
    BLOCK,
    DOWN,
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
    known = {"DOWN": DOWN, "BLOCK": BLOCK, "BLOCK_B": 256}
    kernel[(batch,)](cu, cu_other, tiles, batch, slots, **known)
    return tiles


def _varlen_attention_rows(*tensors):
    """Return tensors whose heads are contiguous, in a type to compute with."""
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]
    if triton.knobs.runtime.interpret and rows[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        rows = [t.float().contiguous() for t in rows]
    return rows, [stride for t in rows for stride in t.stride()[:2]]


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
    kernel=_varlen_attention_kernel,
    listed=_varlen_attention_list,
):
    cu = cu_seqlens_q, cu_seqlens_k
    _varlen_attention_check("varlen_attention", q, k, v, *cu, scale)
    total, heads = q.shape[:2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape), q.new_empty(heads, total, dtype=wide)
    if out.numel() == 0:
        return out, lse
    cu = [t.contiguous() for t in cu]
    tile = _varlen_attention_tile("forward", q, scale)
    rows, strides = _varlen_attention_rows(q, k, v)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        tiles = listed(*cu, total, max_seqlen_q, tile["BLOCK_M"], causal)
        pointers = *rows, out, lse, tiles, *cu
        kernel[(tiles.shape[0] * heads,)](
            *pointers,
            total,
            heads,
            *strides,
            GROUP=int(heads // k.shape[1]),
            CAUSAL=causal,
            LOWEST=torch.finfo(wide).min,
            **tile,
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
    dq_kernel=_varlen_attention_dq_kernel,
    dkdv_kernel=_varlen_attention_dkdv_kernel,
    listed=_varlen_attention_list,
):
    cu = [t.contiguous() for t in (cu_seqlens_q, cu_seqlens_k)]
    (total, heads), heads_k = q.shape[:2], k.shape[1]
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    delta = torch.empty_like(lse)
    (q, k, v, do, out), strides = _varlen_attention_rows(q, k, v, do, out)
    known = {"GROUP": int(heads // heads_k), "CAUSAL": causal}
    with torch.accelerator.device_index(q.device.index):
        if dq.numel() > 0:
            tile = known | _varlen_attention_tile("dq", dq, scale)
            tiles = listed(*cu, total, max_seqlen_q, tile["BLOCK_M"], causal)
            pointers = q, k, v, out, do, lse, delta, dq, tiles, *cu
            dq_kernel[(tiles.shape[0] * heads,)](
                *pointers, total, heads, *strides[:8], **tile
            )
        if dk.numel() > 0:
            tile = known | _varlen_attention_tile("dkdv", dk, scale)
            of_keys = *reversed(cu), k.shape[0], max_seqlen_k
            tiles = listed(*of_keys, tile["BLOCK_N"], False)
            pointers = q, k, v, do, lse, delta, dk, dv, tiles, *cu
            dkdv_kernel[(tiles.shape[0] * heads_k,)](
                *pointers, total, heads_k, *strides[:8], **tile
            )
    return dq, dk, dv


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return varlen_attention, and the log-sum-exp of each row of scores.

    Takes what varlen_attention takes. The log-sum-exp has the shape (heads,
    tokens) and the base 2, is float32, or float64 for float64, and has no
    gradient. It is inf for a query that sees nothing.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    listing = wrap_triton(_varlen_attention_list_kernel)
    kernels = (
        wrap_triton(_varlen_attention_kernel),
        partial(_varlen_attention_list, kernel=listing),
    )
    return _varlen_attention_launch(q, k, v, *lengths, causal, scale, *kernels)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of the result, do.

    Takes what varlen_attention_forward took and returned.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    listing = wrap_triton(_varlen_attention_list_kernel)
    kernels = (
        wrap_triton(_varlen_attention_dq_kernel),
        wrap_triton(_varlen_attention_dkdv_kernel),
        partial(_varlen_attention_list, kernel=listing),
    )
    return _varlen_attention_backward_launch(
        do, q, k, v, out, lse, *lengths, causal, scale, *kernels
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
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.known = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)


def _varlen_attention_gradient(ctx, do, _):
    grads = varlen_attention_backward(do, *ctx.saved_tensors, *ctx.known)
    return *grads, None, None, None, None, None, None


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
) -> torch.Tensor:
    """Return the attention of packed sequences, each within itself.

    Takes q of (tokens, heads, D), and k and v of (tokens, heads / n, D), all
    of one dtype, float16, bfloat16, float32 or float64, with D up to 256 and
    any strides; what is not contiguous along D is copied. Head h of q takes
    head h // n of k and v. q and k may differ in tokens.

    cu_seqlens_q and cu_seqlens_k say where sequences begin and end: sequence i
    has the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1, and its keys
    likewise. Both are int32 on the device of q, and have batch + 1 numbers that
    never fall, from 0 to the number of tokens. A sequence may be empty.
    max_seqlen_q and max_seqlen_k are integers, at least the lengths of the
    longest sequence. These numbers are not checked, as the CPU would have to
    wait for them. With wrong ones, the op may read and write outside of the
    tensors, or leave rows of the result or of a gradient unwritten.

    With causal, a sequence's last query sees all its keys, the one before it
    all but the last, and so on. A query that sees nothing gives 0. Scores above
    2**27 or below -2**27, in float64 2**56, may give 0 or NaN: a GPU then
    rounds by more than exp2 can take. scale multiplies the scores. It is above
    0, and 1 / sqrt(D) if not given; the kernels are compiled anew for each
    scale.

    The result has the shape and dtype of q and is contiguous. It and the
    gradients of q, k and v are deterministic. Second derivatives are not
    supported. Raises TypeError for other dtypes and for dtypes or devices
    that differ, and ValueError for other shapes or scales. The method:
    https://arxiv.org/abs/2307.08691

    Rounding: scores, softmax and sums are in float32, or float64 for float64.
    The weights of a softmax are rounded to the dtype of v for their product
    with v, and each result is rounded once. In the backward, weights and the
    gradients of scores are rounded likewise.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen_attention_forward(q, k, v, *lengths, causal, scale)[0]
