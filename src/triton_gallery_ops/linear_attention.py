"""Gated linear attention (Mamba-2) in chunks, with its backward.

For each head, S_t = exp(g_t) * S_(t-1) + outer(k_t, v_t), and the output is
scale * S_t.T @ q_t: the recurrence of Mamba-2 (Dao and Gu, 2024,
arXiv:2405.21060) in the chunks of Yang et al. (2023, arXiv:2312.06635). Takes K
and V up to 256, and g of at most 0, which is not checked. Chunks are
matrix products; if there are few heads, sequences are cut into segments that
run at once. Takes packed sequences. For few tokens, a call takes the CPU longer
than the GPU. The backward holds the states of all chunks. Deterministic. No
second derivative.
``gated_delta_rule`` corrects the state instead of only adding to it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

LINEAR_ATTENTION_NAMESPACE = "triton_gallery"
# For the bytes of a number: CHUNK, BLOCK_V, warps and stages of the forward;
# CHUNK, BLOCK_K, BLOCK_V, warps and stages of the kernel of states; BLOCK_X,
# BLOCK_Z, warps and stages of the kernel of tokens, whose chunks are those of
# states. All of K fits into BLOCK_Z: the gradient of g has sums along it.
LINEAR_ATTENTION_TILES = {
    2: ((64, 64, 4, 2), (64, 64, 64, 4, 3), (64, 128, 4, 3)),
    4: ((16, 16, 8, 1), (32, 32, 32, 4, 2), (16, 128, 8, 1)),
    8: ((16, 16, 8, 1), (16, 32, 32, 4, 1), (16, 128, 8, 1)),
}
LINEAR_ATTENTION_WIDE_TILES = {  # for K above 128
    2: ((32, 64, 8, 2), (64, 64, 64, 4, 3), (64, 256, 8, 2)),
    4: ((16, 16, 8, 1), (32, 32, 32, 4, 2), (16, 256, 8, 1)),
    8: ((16, 16, 8, 1), (16, 32, 32, 4, 1), (16, 256, 8, 1)),
}
# At most this many segments for all heads of all sequences together, but one
# for each at least. The length of a segment is a multiple of this many tokens,
# at least four times that. The length of each chunk divides it.
LINEAR_ATTENTION_SEGMENTS, LINEAR_ATTENTION_UNIT = 128, 64
# The narrowest block, for the bytes of a number. For tiles of half precision
# narrower than 128 bytes, the assembler of Triton 3.6 and 3.7 may make code
# that is wrong on Hopper: wrong_code.py shows it.
LINEAR_ATTENTION_LEAST = {2: 64, 4: 16, 8: 16}


@triton.jit
def _linear_attention_decays(g_ptr, rows, inside, ACC: tl.constexpr):
    """Return the log decays since a chunk began, in base 2, and the last."""
    # What is decayed by 2**-160 is zero in float32, by 2**-1200 in float64. The
    # bound keeps -inf out: a difference of infinities is NaN.
    LOWEST: tl.constexpr = -1200.0 if ACC.is_fp64() else -160.0
    # Tokens past the end have a log decay of 0: they leave the state alone.
    g = tl.load(g_ptr + rows, mask=inside, other=0.0) * 1.4426950408889634
    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN
    return tl.cumsum(g, axis=0), tl.sum(g, axis=0)


@triton.jit
def _linear_attention_sequence(part, unit, cu_ptr, sequences_ptr):
    """Return a sequence, its first token, its tokens, and which part this is.

    Sequence i has room for its parts of ``unit`` tokens from part
    cu_seqlens[i] // unit + i of all sequences on: for one more at most.
    """
    # In int32, an offset would overflow past element 2**31.
    sequence = tl.load(sequences_ptr + part)
    begin = tl.load(cu_ptr + sequence).to(tl.int64)
    T = (tl.load(cu_ptr + sequence + 1) - begin).to(tl.int32)
    part -= (begin // unit + sequence).to(tl.int32)
    return sequence, begin, T, part


# Without this, one segment and multiples of 16 would each compile anew.
@triton.jit(do_not_specialize=["segments"])
def _linear_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    first_ptr,
    ends_ptr,
    sums_ptr,
    out_ptr,
    last_ptr,
    cu_ptr,
    sequences_ptr,
    T,
    HEADS,
    segments,
    length,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STARTED: tl.constexpr,
    V_FIRST: tl.constexpr,  # of the states that are given and returned
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the outputs of a segment's tokens, chunk by chunk."""
    pid = tl.program_id(axis=0)
    blocks = tl.cdiv(V, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
    outer = offs_k[:, None] + offs_v[None, :] * K if V_FIRST else tile
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    segment = pid // blocks % segments
    # In int32, an offset would overflow past element 2**31.
    place = (pid // blocks // segments).to(tl.int64)  # of a head of a batch
    head, batch = place % HEADS, place // HEADS
    if cu_ptr is not None:
        slot = place * segments + segment
        sequence, begin, T, segment = _linear_attention_sequence(
            segment, length, cu_ptr, sequences_ptr
        )
        segments = tl.maximum(tl.cdiv(T, length), 1)
        if segment >= segments:
            return
        place = sequence * HEADS + head
        slot -= place * segments + segment
        ends_ptr += slot * K * V
        sums_ptr += slot
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=ACC)
    if STARTED:
        state = tl.load(first_ptr + place * K * V + outer, mask=mask, other=0.0)
    # What the segments before this one add to the state
    for slot in range(place * segments, place * segments + segment):
        ends = ends_ptr + slot * (K * V) + tile
        added = tl.load(ends, mask=mask, other=0.0)
        state = state * tl.exp2(tl.load(sums_ptr + slot)) + added
    end = tl.minimum(segment * length + length, T)
    for chunk in range(segment * length // CHUNK, tl.cdiv(end, CHUNK)):
        offs_t = chunk * CHUNK + tl.arange(0, CHUNK)  # (CHUNK,)
        inside = offs_t < T
        tokens = batch * T + offs_t if cu_ptr is None else begin + offs_t
        rows = tokens * HEADS + head
        decay, total = _linear_attention_decays(g_ptr, rows, inside, ACC)
        shared = tokens * (HEADS // GROUP) + head // GROUP  # of q and k
        own = shared[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        own_mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + own, mask=own_mask, other=0.0)
        k = tl.load(k_ptr + own, mask=own_mask, other=0.0)
        offs = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        out_mask = inside[:, None] & (offs_v[None, :] < V)
        v = tl.load(v_ptr + offs, mask=out_mask, other=0.0)
        p = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
        # The tensor cores take both operands in the type of the inputs. Only
        # this copy of the state is rounded. The one in registers goes on.
        out = tl.dot(
            q, state.to(q.dtype), input_precision="ieee", out_dtype=ACC
        )
        out = out * (tl.exp2(decay) * SCALE)[:, None]
        # Later tokens are masked in the exponent: it may be large.
        since = decay[:, None] - decay[None, :]  # (CHUNK, CHUNK)
        seen = offs_t[:, None] >= offs_t[None, :]
        since = tl.where(seen, since, -float("inf"))
        p = (p * tl.exp2(since) * SCALE).to(v.dtype)
        out = tl.dot(p, v, out, input_precision="ieee", out_dtype=ACC)
        tl.store(out_ptr + offs, out, mask=out_mask)
        v = (v * tl.exp2(total - decay)[:, None]).to(k.dtype)
        state = state * tl.exp2(total)
        state = tl.dot(k.T, v, state, input_precision="ieee", out_dtype=ACC)
    if segment == segments - 1:
        tl.store(last_ptr + place * K * V + outer, state, mask=mask)


@triton.jit(do_not_specialize=["segments"])
def _linear_attention_states_kernel(
    a_ptr,
    b_ptr,
    g_ptr,
    first_ptr,
    ends_ptr,
    sums_ptr,
    states_ptr,
    last_ptr,
    others_ptr,
    flow_ptr,
    cu_ptr,
    sequences_ptr,
    T,
    HEADS,
    segments,
    length,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STARTED: tl.constexpr,
    V_FIRST: tl.constexpr,  # of the states that are given and returned
    REVERSE: tl.constexpr,
    ENDS: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the state before each chunk; in reverse, the gradient after it.

    For the ends, store no more than what each segment adds to the state, and
    its log decay. Forward, a and b are keys and values. In reverse, they are
    the queries and the gradients of the outputs; the others are the states, and
    their product with the gradients goes to flow: the last term of the gradient
    of g.
    """
    pid = tl.program_id(axis=0)
    blocks_v = tl.cdiv(V, BLOCK_V)
    blocks = blocks_v * tl.cdiv(K, BLOCK_K)
    offs_k = pid % blocks // blocks_v * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_v = pid % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
    outer = offs_k[:, None] + offs_v[None, :] * K if V_FIRST else tile
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    segment = pid // blocks % segments
    # In int32, an offset would overflow past element 2**31.
    place = (pid // blocks // segments).to(tl.int64)  # of a head of a batch
    head, batch = place % HEADS, place // HEADS
    if cu_ptr is not None:
        slot = place * segments + segment
        sequence, begin, T, segment = _linear_attention_sequence(
            segment, length, cu_ptr, sequences_ptr
        )
        segments = tl.maximum(tl.cdiv(T, length), 1)
        # No segment reads the end of a sequence's last.
        if segment >= segments - ENDS:
            return
        place = sequence * HEADS + head
        slot -= place * segments + segment
        ends_ptr += slot * K * V
        sums_ptr += slot
        first_slot = (begin // CHUNK + sequence) * HEADS
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=ACC)
    if STARTED:
        state = tl.load(first_ptr + place * K * V + outer, mask=mask, other=0.0)
    if not ENDS:
        # What the segments before this one add to the state
        for slot in range(place * segments, place * segments + segment):
            ends = ends_ptr + slot * (K * V) + tile
            added = tl.load(ends, mask=mask, other=0.0)
            state = state * tl.exp2(tl.load(sums_ptr + slot)) + added
    chunks = tl.cdiv(T, CHUNK)
    passed = tl.zeros((), dtype=ACC)
    end = tl.minimum(segment * length + length, T)
    for step in range(segment * length // CHUNK, tl.cdiv(end, CHUNK)):
        chunk = chunks - 1 - step if REVERSE else step
        slot = (batch * chunks + chunk) * HEADS + head
        if cu_ptr is not None:
            slot += first_slot
        offs = slot * K * V + tile
        if not ENDS:
            # Only the stored copy is rounded. The state in registers goes on.
            tl.store(states_ptr + offs, state, mask=mask)
        offs_t = chunk * CHUNK + tl.arange(0, CHUNK)  # (CHUNK,)
        inside = offs_t < T
        tokens = batch * T + offs_t if cu_ptr is None else begin + offs_t
        rows = tokens * HEADS + head
        decay, total = _linear_attention_decays(g_ptr, rows, inside, ACC)
        passed += total
        # An exponent is the log decay over a stretch of tokens: at most 0.
        weight = tl.exp2(total - decay)
        if REVERSE:
            weight = tl.exp2(decay) * SCALE
        if REVERSE and not ENDS:
            # The last term of the gradient of g: states times their gradients.
            other = tl.load(others_ptr + offs, mask=mask, other=0.0)
            flow = tl.sum(state * other) * tl.exp2(total)
            tl.store(flow_ptr + slot * blocks + pid % blocks, flow)
        shared = tokens * (HEADS // GROUP) + head // GROUP  # of q and k
        a = tl.load(
            a_ptr + shared[:, None] * K + offs_k[None, :],
            mask=inside[:, None] & (offs_k[None, :] < K),
            other=0.0,
        )  # (CHUNK, BLOCK_K)
        b = tl.load(
            b_ptr + rows[:, None] * V + offs_v[None, :],
            mask=inside[:, None] & (offs_v[None, :] < V),
            other=0.0,
        )  # (CHUNK, BLOCK_V)
        # The tensor cores take both operands in the type of the inputs.
        b = (b * weight[:, None]).to(a.dtype)
        state = state * tl.exp2(total)
        state = tl.dot(a.T, b, state, input_precision="ieee", out_dtype=ACC)
    if ENDS:
        slot = place * segments + segment
        tl.store(ends_ptr + slot * K * V + tile, state, mask=mask)
        tl.store(sums_ptr + slot, passed)  # of all blocks the same
    elif segment == segments - 1:
        tl.store(last_ptr + place * K * V + outer, state, mask=mask)


@triton.jit
def _linear_attention_tokens_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    g_ptr,
    states_ptr,
    out_ptr,
    partner_ptr,
    reads_ptr,
    flow_ptr,
    dg_ptr,
    cu_ptr,
    sequences_ptr,
    T,
    HEADS,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    X: tl.constexpr,
    Z: tl.constexpr,
    REVERSE: tl.constexpr,
    GATES: tl.constexpr,  # of dq and dk: the state is transposed, too
    BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """Store, for each x of a chunk, the sum of weighted z, and of the state.

    A weight is the product of x with the y of the same token as z, times the
    decay between the two. In reverse, the sum has later tokens.
    """
    # Programs side by side share a chunk, so its x stays in the L2 cache.
    blocks = tl.cdiv(Z, BLOCK_Z)
    pid = tl.program_id(axis=0) // blocks
    chunks = tl.cdiv(T, CHUNK)
    # In int32, an offset would overflow past element 2**31.
    place = (pid // chunks).to(tl.int64)  # of a head of a batch
    head, batch, chunk = place % HEADS, place // HEADS, pid % chunks
    if cu_ptr is not None:
        head, part = pid % HEADS, pid // HEADS
        _, begin, T, chunk = _linear_attention_sequence(
            part, CHUNK, cu_ptr, sequences_ptr
        )
        if chunk * CHUNK >= T:
            return
    offs_t = chunk * CHUNK + tl.arange(0, CHUNK)  # (CHUNK,)
    offs_z = tl.program_id(axis=0) % blocks * BLOCK_Z + tl.arange(0, BLOCK_Z)
    inside = offs_t < T
    tokens = batch * T + offs_t if cu_ptr is None else begin + offs_t
    rows = tokens * HEADS + head
    shared = tokens * (HEADS // GROUP) + head // GROUP  # of q and k
    rows_x = rows if GATES else shared
    rows_z = shared if GATES else rows
    slot = (batch * chunks + chunk) * HEADS + head
    if cu_ptr is not None:
        slot = pid.to(tl.int64)
    decay, total = _linear_attention_decays(g_ptr, rows, inside, ACC)
    out = tl.zeros((CHUNK, BLOCK_Z), dtype=ACC)
    p = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    for start in range(0, X, BLOCK_X):
        offs_x = start + tl.arange(0, BLOCK_X)
        own = rows_x[:, None] * X + offs_x[None, :]  # (CHUNK, BLOCK_X)
        own_mask = inside[:, None] & (offs_x[None, :] < X)
        x = tl.load(x_ptr + own, mask=own_mask, other=0.0)
        y = tl.load(y_ptr + own, mask=own_mask, other=0.0)
        tile = offs_x[:, None] * Z + offs_z[None, :]  # (BLOCK_X, BLOCK_Z)
        if GATES:
            tile = offs_x[:, None] + offs_z[None, :] * X
        state = tl.load(
            states_ptr + slot * X * Z + tile,
            mask=(offs_x[:, None] < X) & (offs_z[None, :] < Z),
            other=0.0,
        )
        p = tl.dot(x, y.T, p, input_precision="ieee", out_dtype=ACC)
        # What other chunks have to do with these tokens is in the state.
        out = tl.dot(x, state, out, input_precision="ieee", out_dtype=ACC)
    outside = tl.exp2(total - decay) if REVERSE else tl.exp2(decay) * SCALE
    out = out * outside[:, None]  # (CHUNK, BLOCK_Z)
    offs = rows[:, None] * Z + offs_z[None, :]
    offs_own = rows_z[:, None] * Z + offs_z[None, :]
    mask = inside[:, None] & (offs_z[None, :] < Z)
    if GATES:
        partner = tl.load(partner_ptr + offs_own, mask=mask, other=0.0)
        far = tl.sum(out * partner, axis=1)  # (CHUNK,)
    # Tokens on the other side are masked in the exponent: it may be large.
    since = decay[:, None] - decay[None, :]  # (CHUNK, CHUNK)
    seen = offs_t[:, None] >= offs_t[None, :]
    if REVERSE:
        since = -since
        seen = offs_t[:, None] <= offs_t[None, :]
    since = tl.where(seen, since, -float("inf"))
    z = tl.load(z_ptr + offs_own, mask=mask, other=0.0)
    # The tensor cores take both operands in the type of the inputs.
    p = (p * tl.exp2(since) * SCALE).to(z.dtype)
    out = tl.dot(p, z, out, input_precision="ieee", out_dtype=ACC)
    tl.store(out_ptr + offs, out, mask=mask)
    if GATES:
        # Read again: kept until here, it would take registers.
        partner = tl.load(partner_ptr + offs_own, mask=mask, other=0.0)
        reads = tl.sum(out * partner, axis=1)
        if REVERSE:
            # A log decay acts on each pair of an earlier and a later token
            # around it: both in this chunk, one of them, or none.
            near = reads - far
            reads = tl.load(reads_ptr + rows, mask=inside, other=0.0)
            dg = tl.cumsum(reads - near, axis=0, reverse=True)
            dg += tl.cumsum(far, axis=0) - far
            for block in range(BLOCKS):
                dg += tl.load(flow_ptr + slot * BLOCKS + block)
            tl.store(dg_ptr + rows, dg, mask=inside)
        else:
            tl.store(reads_ptr + rows, reads, mask=inside)


def _linear_attention_state_shape(q, v, cu_seqlens, v_first):
    """Return the shape of the states of all sequences."""
    batch, heads, K = v.shape[0], v.shape[2], q.shape[3]
    if cu_seqlens is not None:
        batch = cu_seqlens.shape[0] - 1
    dimensions = (v.shape[3], K) if v_first else (K, v.shape[3])
    return batch, heads, *dimensions


def _linear_attention_group(q, v):
    """Return how many heads of v share one of q, or 0 if that is no number."""
    if q.shape[2] == v.shape[2]:
        return 1
    if not 0 < q.shape[2] < v.shape[2] or v.shape[2] % q.shape[2]:
        return 0
    return int(v.shape[2] // q.shape[2])


def _linear_attention_check(q, k, v, g, initial_state, cu_seqlens, v_first):
    name = "linear_attention"
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(
            f"{name} takes float16, bfloat16, float32 or float64, not {q.dtype}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    given = {"q": q, "k": k, "v": v, "g": g}
    if initial_state is not None:
        given["initial_state"] = initial_state
    kinds = dict.fromkeys(given, wide) | dict.fromkeys("qkv", q.dtype)
    found = {who: (t.dtype, t.device) for who, t in given.items()}
    if found != {who: (kind, q.device) for who, kind in kinds.items()}:
        text = ", ".join(
            f"{who} {t.dtype} on {t.device}" for who, t in given.items()
        )
        raise TypeError(
            f"{name} takes q, k and v of one dtype, g and the initial state of "
            f"{wide}, on one device, not {text}"
        )
    packed = cu_seqlens is not None
    if packed and (
        cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.device != q.device
    ):
        raise TypeError(
            f"{name} takes cu_seqlens of int32 or int64, on the device of q, "
            f"not {cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    fits = (
        q.ndim == v.ndim == 4
        and q.shape == k.shape
        and q.shape[:2] == v.shape[:2]
        and v.shape[:3] == g.shape
        and _linear_attention_group(q, v)
        and 1 <= q.shape[3] <= 256
        and 1 <= v.shape[3] <= 256
    )
    if fits and packed:
        given["cu_seqlens"] = cu_seqlens
        fits = cu_seqlens.ndim == 1 <= len(cu_seqlens) and q.shape[0] == 1
    if fits and initial_state is not None:
        shape = _linear_attention_state_shape(q, v, cu_seqlens, v_first)
        fits = initial_state.shape == shape
    if not fits:
        text = ", ".join(f"{who} {tuple(t.shape)}" for who, t in given.items())
        raise ValueError(
            f"{name} takes q and k of (batch, length, heads / n, K), v of "
            "(batch, length, heads, V), g of (batch, length, heads) and an "
            "initial state of (batch, heads, K, V), with K and V from 1 "
            "to 256; with cu_seqlens of (sequences + 1,), a batch of 1 "
            "and the state of (sequences, heads, K, V); with state_v_first, a "
            f"state of (..., V, K), not {text}"
        )


def _linear_attention_read(*tensors):
    """Return tensors as the kernels read them."""
    tensors = [t.contiguous() for t in tensors]
    if triton.knobs.runtime.interpret and tensors[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        tensors = [t.float() for t in tensors]
    return tensors


def _linear_attention_tiles(K, itemsize):
    """Return how each of the kernels is launched."""
    tiles = LINEAR_ATTENTION_TILES
    return (tiles if K <= 128 else LINEAR_ATTENTION_WIDE_TILES)[itemsize]


def _linear_attention_block(most, size, itemsize):
    """Return a block for a dimension: a power of two, at most `most`."""
    return min(
        most,
        max(LINEAR_ATTENTION_LEAST[itemsize], triton.next_power_of_2(size)),
    )


def _linear_attention_common(q, v, g, scale):
    """Return what all launches share."""
    return {
        # As a constant, it keeps its 53 bits. An argument has 24.
        "SCALE": int(q.shape[3]) ** -0.5 if scale is None else scale,
        "T": q.shape[1],
        "HEADS": v.shape[2],
        "GROUP": _linear_attention_group(q, v),
        "ACC": tl.float64 if g.dtype == torch.float64 else tl.float32,
    }


def _linear_attention_parts(T, unit, cu_seqlens):
    """Return the most parts of ``unit`` tokens that a sequence may have.

    Of packed sequences it is the most that all of them have together.
    """
    if cu_seqlens is None:
        return triton.cdiv(T, unit)
    return T // unit + cu_seqlens.shape[0] - 1


def _linear_attention_packed(cu_seqlens, unit, parts):
    """Return what tells kernels to which sequence a part belongs."""
    if cu_seqlens is None:
        return {"cu_ptr": None, "sequences_ptr": None}
    # Where the parts of each sequence begin: the CPU does not wait for it.
    arange = functools.partial(torch.arange, device=cu_seqlens.device)
    begins = cu_seqlens // unit + arange(cu_seqlens.shape[0])
    sequences = torch.searchsorted(begins, arange(parts), right=True) - 1
    sequences = sequences.clamp(max=cu_seqlens.shape[0] - 2)
    return {"cu_ptr": cu_seqlens.contiguous(), "sequences_ptr": sequences}


def _linear_attention_cut(v, cu_seqlens=None):
    """Return how many segments a sequence is cut into, and their length."""
    batch, T, heads, _ = v.shape
    most = max(1, LINEAR_ATTENTION_SEGMENTS // (batch * heads))
    units = triton.cdiv(triton.cdiv(T, LINEAR_ATTENTION_UNIT), most)
    # Each segment reads the ends of all before it, however short it is.
    length = max(4, units) * LINEAR_ATTENTION_UNIT
    segments = _linear_attention_parts(T, length, cu_seqlens)
    packed = _linear_attention_packed(cu_seqlens, length, segments)
    return {"segments": segments, "length": length, **packed}


def _linear_attention_blocks(a, b):
    """Return in how many blocks a state is computed, and the constants."""
    K, V = int(a.shape[3]), int(b.shape[3])
    size = a.dtype.itemsize
    tile = _linear_attention_tiles(K, size)[1]
    BLOCK_K = _linear_attention_block(tile[1], K, size)
    BLOCK_V = _linear_attention_block(tile[2], V, size)
    return triton.cdiv(K, BLOCK_K) * triton.cdiv(V, BLOCK_V), {
        # torch.compile would keep it open, and a constant cannot be.
        "K": K,
        "V": V,
        "CHUNK": tile[0],
        "BLOCK_K": BLOCK_K,
        "BLOCK_V": BLOCK_V,
        "num_warps": tile[3],
        "num_stages": tile[4],
    }


def _linear_attention_ends(kernel, a, b, g, cut, common, reverse=False):
    """Return what each segment adds to the state, and its log decay."""
    if a.shape[1] <= cut["length"]:  # one segment a sequence: no end is read
        return g, g
    (batch, _, heads, V), segments = b.shape, cut["segments"]
    ends = g.new_empty(batch, heads, segments, a.shape[3], V)
    sums = g.new_empty(batch, heads, segments)
    blocks, constants = _linear_attention_blocks(a, b)
    pointers = a, b, g, g, ends, sums, a, g, a, g
    constants |= {"STARTED": False, "V_FIRST": False}
    constants |= {"REVERSE": reverse, "ENDS": True}
    grid = (batch * heads * segments * blocks,)
    kernel[grid](*pointers, **cut, **common, **constants)
    return ends, sums


def _linear_attention_states(
    kernel, a, b, first, others, g, shape, v_first, chunks, cut, common
):
    """Return the state before each chunk, and the last; with others, reverse.

    In reverse, also return the part of the gradient of g that is in states.
    """
    (batch, _, heads, V), K = b.shape, a.shape[3]
    reverse = others is not None
    ends, sums = _linear_attention_ends(kernel, a, b, g, cut, common, reverse)
    blocks, constants = _linear_attention_blocks(a, b)
    states = a.new_empty(batch, chunks, heads, K, V)
    last = g.new_empty(shape)
    flow = g.new_empty(batch, chunks, heads, blocks) if reverse else last
    pointers = a, b, g, last if first is None else first, ends, sums
    pointers = *pointers, states, last, others if reverse else states, flow
    started = first is not None
    constants |= {"STARTED": started, "V_FIRST": v_first}
    constants |= {"REVERSE": reverse, "ENDS": False}
    grid = (batch * heads * cut["segments"] * blocks,)
    kernel[grid](*pointers, **cut, **common, **constants)
    return states, last, flow


def _linear_attention_tokens(
    kernel, x, y, z, g, states, packed, common, reverse=False, gates=()
):
    """Return the gradient of q, k or v.

    For the gradient of g, gates are q or k, the products of q with its own
    gradient, the part that is in states, and the result.
    """
    X, Z = int(x.shape[3]), int(z.shape[3])
    # Of each head of v; the sum over those that share one of q and k follows.
    summed = common["GROUP"] > 1 and bool(gates)
    out = z.new_empty(*g.shape, Z, dtype=g.dtype if summed else z.dtype)
    size = x.dtype.itemsize
    batch, chunks, heads, K, _ = states.shape
    (CHUNK, *_), tile = _linear_attention_tiles(K, size)[1:]
    BLOCK_Z = _linear_attention_block(tile[1], Z, size)
    partner, reads, flow, dg = gates or (out, g, g, g)
    arguments = x, y, z, g, states, out, partner, reads, flow, dg
    kernel[(chunks * batch * heads * triton.cdiv(Z, BLOCK_Z),)](
        *arguments,
        **packed,
        **common,
        X=X,
        Z=Z,
        REVERSE=reverse,
        GATES=bool(gates),
        BLOCKS=int(flow.shape[-1]) if gates else 1,
        CHUNK=CHUNK,
        BLOCK_X=_linear_attention_block(tile[0], X, size),
        BLOCK_Z=BLOCK_Z,
        num_warps=tile[2],
        num_stages=tile[3],
    )
    return out.unflatten(2, (-1, common["GROUP"])).sum(3) if summed else out


def _linear_attention_launch(
    q,
    k,
    v,
    g,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    state_v_first=False,
    kernel=_linear_attention_kernel,
    states_kernel=_linear_attention_states_kernel,
):
    options = cu_seqlens, state_v_first
    _linear_attention_check(q, k, v, g, initial_state, *options)
    dtype, first = q.dtype, initial_state
    (batch, _, heads, V), K = v.shape, q.shape[3]
    last = g.new_empty(_linear_attention_state_shape(q, v, *options))
    if q.numel() == 0:  # also without tokens: the state stays
        last = g.new_zeros(last.shape) if first is None else first
        # A copy, as an op may not return its input.
        last = last.clone(memory_format=torch.contiguous_format)
        return v.new_empty(v.shape), last
    q, k, v = _linear_attention_read(q, k, v)
    g = g.contiguous()
    out = torch.empty_like(v)
    size = q.dtype.itemsize
    tile = _linear_attention_tiles(K, size)[0]
    CHUNK, most, num_warps, num_stages = tile
    BLOCK_V = _linear_attention_block(most, int(V), size)
    common = _linear_attention_common(q, v, g, scale)
    cut = _linear_attention_cut(v, cu_seqlens)
    grid = batch * heads * cut["segments"] * triton.cdiv(V, BLOCK_V)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        ends, sums = _linear_attention_ends(states_kernel, k, v, g, cut, common)
        begins = last if first is None else first.contiguous()
        arguments = q, k, v, g, begins, ends, sums, out, last
        kernel[(grid,)](
            *arguments,
            **cut,
            **common,
            K=int(K),
            V=int(V),
            STARTED=first is not None,
            V_FIRST=state_v_first,
            CHUNK=CHUNK,
            BLOCK_K=_linear_attention_block(256, int(K), size),
            BLOCK_V=BLOCK_V,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return out.to(dtype), last


def _linear_attention_backward_launch(
    grad,
    grad_last,
    q,
    k,
    v,
    g,
    scale,
    initial_state,
    cu_seqlens=None,
    state_v_first=False,
    states_kernel=_linear_attention_states_kernel,
    tokens_kernel=_linear_attention_tokens_kernel,
):
    dtype, first = q.dtype, initial_state
    dg = torch.empty_like(g, memory_format=torch.contiguous_format)
    if q.numel() == 0:
        grads = [t.new_empty(t.shape) for t in (q, k, v)]
        grad_last = grad_last.clone(memory_format=torch.contiguous_format)
        return *grads, dg, grad_last
    q, k, v, grad = _linear_attention_read(q, k, v, grad)
    g, grad_last = g.contiguous(), grad_last.contiguous()
    first = None if first is None else first.contiguous()
    CHUNK = _linear_attention_tiles(q.shape[3], q.dtype.itemsize)[1][0]
    chunks = _linear_attention_parts(q.shape[1], CHUNK, cu_seqlens)
    with torch.accelerator.device_index(q.device.index):
        common = _linear_attention_common(q, v, g, scale)
        states_of = functools.partial(
            _linear_attention_states,
            states_kernel,
            g=g,
            shape=grad_last.shape,
            v_first=state_v_first,
            chunks=chunks,
            cut=_linear_attention_cut(v, cu_seqlens),
            common=common,
        )
        states, *_ = states_of(k, v, first, None)
        dstates, dfirst, flow = states_of(q, grad, grad_last, states)
        tokens = functools.partial(
            _linear_attention_tokens,
            tokens_kernel,
            g=g,
            packed=_linear_attention_packed(cu_seqlens, CHUNK, chunks),
            common=common,
        )
        gates = torch.empty_like(dg), flow, dg
        dq = tokens(grad, v, k, states=states, gates=(q, *gates))
        tokens = functools.partial(tokens, states=dstates, reverse=True)
        dk = tokens(v, grad, q, gates=(k, *gates))
        dv = tokens(k, q, grad)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dg, dfirst


@triton_op(f"{LINEAR_ATTENTION_NAMESPACE}::linear_attention", mutates_args={})
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of gated linear attention, and its final state.

    In each head, S_t = exp(g_t) * S_(t-1) + outer(k_t, v_t), and the output is
    scale * S_t.T @ q_t, with a scale of 1 / sqrt(K) if none is given; the
    kernels are compiled for each scale. Takes q and k of (batch, length,
    heads / n, K) and v of (batch, length, heads, V), with K and V up to 256,
    all of float16, bfloat16, float32 or float64: each n heads of v, one
    after another, share one of q and k, which is not copied. Takes the log
    decays g of (batch, length, heads) and the initial state of (batch, heads,
    K, V), zeros if not given, both in float32, or float64 for float64. It
    copies what is not contiguous.
    The log decays are at most 0, which is not checked: with larger ones,
    results may be infinite or NaN. Pass what comes after g by name. Returns the
    outputs, of the shape and dtype of v, and the state after the last token, of
    (batch, heads, K, V) in the dtype of g. Both are contiguous and
    deterministic.

    ``cu_seqlens`` says where packed sequences begin and end: q, k, v and g have
    a batch of 1 and the tokens of all sequences, and sequence i has the tokens
    cu_seqlens[i] to cu_seqlens[i + 1] - 1. It is a tensor of (sequences + 1,),
    of int32 or int64, that begins with 0, ends with the length and never falls:
    nothing checks that, and what is wrong may be read and written out of
    bounds. The states are of (sequences, heads, K, V). An empty sequence keeps
    its state. The CPU does not wait for the lengths, so a CUDA graph of a call
    serves other lengths of as many sequences. With ``state_v_first``, states
    are of (..., V, K).

    After each chunk of 64 tokens a copy of the state is rounded to float16 or
    bfloat16, if q is of that: float16 needs states below 65504, and its weights
    lose bits below 2**-14. A NaN or an infinity may reach earlier tokens of its
    chunk. The log decay between two tokens is a difference of two sums over
    their chunk, and has the rounding of those. A g below -110 (-831 for
    float64) counts as that; -inf ends what was before.

    Both results pass gradients on to q, k, v, g and the initial state, which
    are deterministic. Second derivatives are not supported. Backward,
    the states of all chunks and their gradients are in memory: for dimensions
    of 128, as much as four tensors of the size of q in half precision, eight in
    float32, and 16 in float64. The gradient of g is a difference of sums over
    the later tokens of its chunk, and has the rounding of those. Raises
    TypeError for other dtypes and for tensors on different devices, and
    ValueError for other shapes. The method: https://arxiv.org/abs/2312.06635

    Rounding: decays and sums are in float32, or float64 for float64. Operands
    of matrix products, as the weights of pairs of tokens, are rounded to the
    dtype of q, and each output is rounded once.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype, and g and
    the initial state to float32.
    """
    kernels = (
        wrap_triton(_linear_attention_kernel),
        wrap_triton(_linear_attention_states_kernel),
    )
    return _linear_attention_launch(
        q, k, v, g, scale, initial_state, cu_seqlens, state_v_first, *kernels
    )


@triton_op(
    f"{LINEAR_ATTENTION_NAMESPACE}::linear_attention_backward", mutates_args={}
)
def linear_attention_backward(
    grad: torch.Tensor,
    grad_last: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Return the gradients of q, k, v, g and the initial state.

    Takes those of both results and what ``linear_attention`` took, and checks
    none of it. Second derivatives are not supported.
    """
    kernels = (
        wrap_triton(_linear_attention_states_kernel),
        wrap_triton(_linear_attention_tokens_kernel),
    )
    options = cu_seqlens, state_v_first
    return _linear_attention_backward_launch(
        grad, grad_last, q, k, v, g, scale, initial_state, *options, *kernels
    )


def _linear_attention_setup(ctx, inputs, output):
    q, k, v, g, ctx.scale, initial_state, cu_seqlens, ctx.v_first = inputs
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens)


def _linear_attention_gradient(ctx, grad, grad_last):
    *tensors, first, cu_seqlens = ctx.saved_tensors
    *grads, dfirst = linear_attention_backward(
        grad, grad_last, *tensors, ctx.scale, first, cu_seqlens, ctx.v_first
    )
    return *grads, None, None if first is None else dfirst, None, None


linear_attention.register_autograd(
    _linear_attention_gradient, setup_context=_linear_attention_setup
)

# On a GPU a call goes to the launcher; all else goes on to the triton_op.
LINEAR_ATTENTION_LIBRARY = Library(LINEAR_ATTENTION_NAMESPACE, "FRAGMENT")
LINEAR_ATTENTION_LIBRARY.impl(
    "linear_attention", _linear_attention_launch, "CUDA"
)
LINEAR_ATTENTION_LIBRARY.impl(
    "linear_attention_backward", _linear_attention_backward_launch, "CUDA"
)


def _linear_attention_autocast(
    kind, q, k, v, g, scale=None, initial_state=None, *options
):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    g, initial_state = (
        t.float() if t is not None and t.dtype in casts else t
        for t in (g, initial_state)
    )
    with torch.autocast(kind, enabled=False):
        return linear_attention(q, k, v, g, scale, initial_state, *options)


LINEAR_ATTENTION_LIBRARY.impl(
    "linear_attention",
    functools.partial(_linear_attention_autocast, "cpu"),
    "AutocastCPU",
)
LINEAR_ATTENTION_LIBRARY.impl(
    "linear_attention",
    functools.partial(_linear_attention_autocast, "cuda"),
    "AutocastCUDA",
)
