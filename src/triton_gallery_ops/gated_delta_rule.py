"""Gated delta rule (Gated DeltaNet) in chunks, with its backward.

For each head, S = exp(g_t) * S_(t-1), S_t = S + beta_t * outer(k_t, v_t - S.T @
k_t), and the output is scale * S_t.T @ q_t (Yang, Kautz and Hatamizadeh, 2024,
arXiv:2412.06464). A chunk solves a triangular system by matrix products (Yang
et al., 2024, arXiv:2406.06484). One kernel is serial along the chunks, so
throughput rises with the number of heads and sequences. Takes K and V up to
256, g of at most 0 and beta * |k|**2 from 0 to 2, which is not checked. Float32
products are computed as three TF32 products. Deterministic. There is no second
derivative. ``linear_attention`` does without the correction.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

GATED_DELTA_RULE_NAMESPACE = "triton_gallery"
# For the bytes of a number: the tokens of a chunk, how products of float32 are
# computed, then BLOCK_K, BLOCK_V, warps and stages of each kernel. The second
# and the fourth go along the chunks: narrow blocks give them more programs.
GATED_DELTA_RULE_TILES = {
    2: (
        (64, "tf32"),
        (128, 64, 4, 2),
        (128, 16, 4, 3),
        (64, 128, 8, 2),
        (128, 16, 8, 3),
        (128, 64, 4, 2),
        (32, 32, 8, 2),
    ),
    4: (
        (32, "tf32x3"),
        (128, 32, 8, 1),
        (128, 16, 4, 1),
        (32, 64, 4, 1),
        (128, 16, 4, 1),
        (128, 32, 8, 1),
        (16, 32, 4, 1),
    ),
    8: (
        (16, "ieee"),
        (128, 16, 4, 1),
        (128, 16, 8, 1),
        (16, 16, 4, 1),
        (128, 16, 8, 1),
        (128, 16, 4, 1),
        (16, 16, 4, 1),
    ),
}
# The same of each kernel for half precision on Hopper. For tiles narrower than
# 128 bytes, the assembler of Triton 3.6 and 3.7 may make code that is wrong
# there: wrong_code.py shows it. The last kernel has too few registers for wider
# ones, and a test reads its machine code.
GATED_DELTA_RULE_HOPPER = (
    (128, 128, 4, 1),
    (128, 64, 4, 3),
    (128, 64, 4, 1),
    (128, 64, 4, 2),
    (128, 64, 4, 2),
    (32, 32, 4, 2),
)


@triton.jit
def _gated_delta_rule_tokens(slot, T, HEADS, spans_ptr, CHUNK: tl.constexpr):
    """Return a chunk's first row, its rows, and which of them exist."""
    if spans_ptr is None:
        chunks = tl.cdiv(T, CHUNK)
        start = slot % chunks * CHUNK
        place = slot // chunks  # of a head of a batch
        begin = (place // HEADS * T + start) * HEADS + place % HEADS
    else:  # packed: all heads of a chunk, then those of the next
        start = tl.load(spans_ptr + slot // HEADS * 2)
        T = start + tl.load(spans_ptr + slot // HEADS * 2 + 1)
        begin = start * HEADS + slot % HEADS
    rows = tl.arange(0, CHUNK) * HEADS  # since begin; in int32 they take less
    return begin, rows, tl.arange(0, CHUNK) < T - start


@triton.jit
def _gated_delta_rule_decays(decay_ptr, slot, CHUNK: tl.constexpr):
    """Return the log decays since a chunk began, in base 2, and the last."""
    decays = decay_ptr + slot * CHUNK
    return tl.load(decays + tl.arange(0, CHUNK)), tl.load(decays + CHUNK - 1)


@triton.jit
def _gated_delta_rule_weights(decay, CHUNK: tl.constexpr):
    """Return the decay from each token of a chunk to each one not before it."""
    offs = tl.arange(0, CHUNK)
    # For later tokens the exponent may be large: they are masked there.
    seen = offs[:, None] >= offs[None, :]
    since = decay[:, None] - decay[None, :]  # (CHUNK, CHUNK)
    return tl.exp2(tl.where(seen, since, -float("inf")))


@triton.jit
def _gated_delta_rule_solve_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    decay_ptr,
    inverse_ptr,
    w_ptr,
    y_ptr,
    T,
    HEADS,
    spans_ptr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a chunk's decays, and its inverse times keys and values."""
    # In int32, an offset would overflow past element 2**31.
    slot = tl.program_id(axis=0).to(tl.int64)
    if (
        spans_ptr is not None
        and tl.load(spans_ptr + slot // HEADS * 2 + 1) <= 0
    ):
        return  # no chunk is left for this program
    begin, rows, inside = _gated_delta_rule_tokens(
        slot, T, HEADS, spans_ptr, CHUNK
    )
    # What is decayed by 2**-160 is zero in float32, by 2**-1200 in float64. The
    # bound keeps -inf out: a difference of infinities is NaN.
    LOWEST: tl.constexpr = -1200.0 if ACC.is_fp64() else -160.0
    # Tokens past the end have a log decay of 0: they leave the state alone.
    g = tl.load(g_ptr + begin + rows, mask=inside, other=0.0)
    g *= 1.4426950408889634  # of base 2
    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN
    decay = tl.cumsum(g, axis=0)  # (CHUNK,)
    tl.store(decay_ptr + slot * CHUNK + tl.arange(0, CHUNK), decay)
    beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
    offs_k = tl.arange(0, BLOCK_K)
    own = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
    keys_mask = inside[:, None] & (offs_k[None, :] < K)
    keys = (rows // GROUP)[:, None] * K + offs_k[None, :]
    shared = begin // GROUP * K  # heads of a group follow one another
    k = tl.load(k_ptr + shared + keys, mask=keys_mask, other=0.0)
    pairs = tl.dot(k, k.T, input_precision=PRECISION, out_dtype=ACC)
    pairs *= _gated_delta_rule_weights(decay, CHUNK) * beta[None, :]
    # Tokens i and j < i are in neighbouring blocks of the same pair of blocks
    # if the highest bit in which they differ is that of the blocks' size. Those
    # with j > i have a weight of 0.
    offs = tl.arange(0, CHUNK)
    apart = offs[:, None] ^ offs[None, :]  # (CHUNK, CHUNK)
    inverse = tl.where(apart == 0, 1.0, 0.0).to(ACC)
    inverse -= tl.where(apart == 1, pairs, 0.0)
    # Blocks of 2, 4, ..., 32 become twice as long. In a shorter chunk no tokens
    # are left for the last doublings: they change nothing.
    for level in range(1, 6):
        between = tl.where(apart >> level == 1, pairs, 0.0)
        between = tl.dot(
            between, inverse, input_precision=PRECISION, out_dtype=ACC
        )
        inverse -= tl.dot(
            inverse, between, input_precision=PRECISION, out_dtype=ACC
        )
    inverse = inverse.to(k.dtype)
    tile = rows[:, None] * CHUNK + offs[None, :]  # (CHUNK, CHUNK)
    tl.store(inverse_ptr + begin * CHUNK + tile, inverse, mask=inside[:, None])
    k = (k * tl.exp2(decay)[:, None]).to(k.dtype)
    w = tl.dot(inverse, k, input_precision=PRECISION, out_dtype=ACC)
    tl.store(w_ptr + begin * K + own, w, mask=keys_mask)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        mask = inside[:, None] & (offs_v[None, :] < V)
        v = tl.load(v_ptr + begin * V + values, mask=mask, other=0.0)
        y = tl.dot(inverse, v, input_precision=PRECISION, out_dtype=ACC)
        tl.store(y_ptr + begin * V + values, y, mask=mask)


@triton.jit
def _gated_delta_rule_states_kernel(
    k_ptr,
    decay_ptr,
    beta_ptr,
    w_ptr,
    y_ptr,
    first_ptr,
    states_ptr,
    x_ptr,
    last_ptr,
    T,
    HEADS,
    spans_ptr,
    offsets_ptr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    V_FIRST: tl.constexpr,
    STARTED: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the state before each chunk, each token's error, and the last."""
    # Columns of the state do not meet, so a head has a program for each block.
    blocks = tl.cdiv(V, BLOCK_V)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (tl.program_id(axis=0) // blocks).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    tile = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
    ends = tile
    if V_FIRST:
        ends = offs_k[:, None] + offs_v[None, :] * K
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=ACC)
    if STARTED:
        state = tl.load(first_ptr + place * K * V + ends, mask=mask, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    if spans_ptr is not None:
        first = tl.load(offsets_ptr + place // HEADS)
        chunks = tl.load(offsets_ptr + place // HEADS + 1) - first
    for chunk in range(chunks):
        slot = place * chunks + chunk
        if spans_ptr is not None:
            slot = (first + chunk) * HEADS + place % HEADS
        # Only the stored copy is rounded. The state in registers goes on.
        tl.store(states_ptr + slot * K * V + tile, state, mask=mask)
        begin, rows, inside = _gated_delta_rule_tokens(
            slot, T, HEADS, spans_ptr, CHUNK
        )
        decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
        beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
        own = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        values_mask = inside[:, None] & (offs_v[None, :] < V)
        w = tl.load(w_ptr + begin * K + own, mask=keys_mask, other=0.0)
        keys = (rows // GROUP)[:, None] * K + offs_k[None, :]
        shared = begin // GROUP * K  # heads of a group follow one another
        k = tl.load(k_ptr + shared + keys, mask=keys_mask, other=0.0)
        y = tl.load(y_ptr + begin * V + values, mask=values_mask, other=0.0)
        # The tensor cores take both operands in the type of the inputs.
        read = state.to(k.dtype)
        # The system was solved without the state. Here the state comes in.
        x = y - tl.dot(w, read, input_precision=PRECISION, out_dtype=ACC)
        tl.store(x_ptr + begin * V + values, x, mask=values_mask)
        # What a token writes decays until the chunk ends, as the state does.
        x = (x * (tl.exp2(total - decay) * beta)[:, None]).to(k.dtype)
        state *= tl.exp2(total)
        state = tl.dot(k.T, x, state, input_precision=PRECISION, out_dtype=ACC)
    tl.store(last_ptr + place * K * V + ends, state, mask=mask)


@triton.jit
def _gated_delta_rule_outputs_kernel(
    q_ptr,
    k_ptr,
    x_ptr,
    decay_ptr,
    beta_ptr,
    states_ptr,
    out_ptr,
    T,
    HEADS,
    spans_ptr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a chunk's outputs, from its errors and the state before it.

    Backward, x are the gradients of outputs. Store what they are for each token
    that is read by queries of the same chunk.
    """
    # Programs side by side share a chunk, so its keys stay in the L2 cache.
    blocks = tl.cdiv(V, BLOCK_V)
    slot = (tl.program_id(axis=0) // blocks).to(tl.int64)
    if (
        spans_ptr is not None
        and tl.load(spans_ptr + slot // HEADS * 2 + 1) <= 0
    ):
        return  # no chunk is left for this program
    begin, rows, inside = _gated_delta_rule_tokens(
        slot, T, HEADS, spans_ptr, CHUNK
    )
    decay, _ = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    out = tl.zeros((CHUNK, BLOCK_V), dtype=ACC)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        keys = (rows // GROUP)[:, None] * K + offs_k[None, :]
        shared = begin // GROUP * K  # heads of a group follow one another
        mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + shared + keys, mask=mask, other=0.0)
        k = tl.load(k_ptr + shared + keys, mask=mask, other=0.0)
        p = tl.dot(q, k.T, p, input_precision=PRECISION, out_dtype=ACC)
        if not BACKWARD:
            cells = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
            fits = (offs_k[:, None] < K) & (offs_v[None, :] < V)
            place = slot * K * V
            state = tl.load(states_ptr + place + cells, mask=fits, other=0.0)
            out = tl.dot(
                q, state, out, input_precision=PRECISION, out_dtype=ACC
            )
    # A query sees what no later token wrote, and what decayed since.
    p *= _gated_delta_rule_weights(decay, CHUNK) * SCALE
    if BACKWARD:
        p = p.T  # from queries back to what they read
    else:
        p *= tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)[None, :]
        out *= tl.exp2(decay)[:, None] * SCALE
    values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
    values_mask = inside[:, None] & (offs_v[None, :] < V)
    x = tl.load(x_ptr + begin * V + values, mask=values_mask, other=0.0)
    p = p.to(x.dtype)
    out = tl.dot(p, x, out, input_precision=PRECISION, out_dtype=ACC)
    tl.store(out_ptr + begin * V + values, out, mask=values_mask)


@triton.jit
def _gated_delta_rule_flows_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    w_ptr,
    near_ptr,
    grad_last_ptr,
    flows_ptr,
    f_ptr,
    dfirst_ptr,
    T,
    HEADS,
    spans_ptr,
    offsets_ptr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    V_FIRST: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Go back: store the gradient of the state after each chunk.

    Also store f, the gradient of each error, but for what later tokens of the
    chunk read of it with their keys.
    """
    blocks = tl.cdiv(V, BLOCK_V)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (tl.program_id(axis=0) // blocks).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    tile = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
    ends = tile
    if V_FIRST:
        ends = offs_k[:, None] + offs_v[None, :] * K
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    # The last state is a result, so the walk begins with its gradient.
    flow = tl.load(grad_last_ptr + place * K * V + ends, mask=mask, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    if spans_ptr is not None:
        first = tl.load(offsets_ptr + place // HEADS)
        chunks = tl.load(offsets_ptr + place // HEADS + 1) - first
    for step in range(chunks):
        slot = place * chunks + chunks - 1 - step
        if spans_ptr is not None:
            slot = (first + chunks - 1 - step) * HEADS + place % HEADS
        tl.store(flows_ptr + slot * K * V + tile, flow, mask=mask)
        begin, rows, inside = _gated_delta_rule_tokens(
            slot, T, HEADS, spans_ptr, CHUNK
        )
        decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
        beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
        own = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        values_mask = inside[:, None] & (offs_v[None, :] < V)
        keys = (rows // GROUP)[:, None] * K + offs_k[None, :]
        shared = begin // GROUP * K  # heads of a group follow one another
        k = tl.load(k_ptr + shared + keys, mask=keys_mask, other=0.0)
        # What a token wrote reaches later chunks, and queries of its own.
        read = flow.to(k.dtype)
        f = tl.dot(k, read, input_precision=PRECISION, out_dtype=ACC)
        f *= tl.exp2(total - decay)[:, None]
        f += tl.load(near_ptr + begin * V + values, mask=values_mask, other=0.0)
        f *= beta[:, None]
        tl.store(f_ptr + begin * V + values, f, mask=values_mask)
        # What the queries read of the state, less what the keys did.
        q = tl.load(q_ptr + shared + keys, mask=keys_mask, other=0.0)
        grad = tl.load(
            grad_ptr + begin * V + values, mask=values_mask, other=0.0
        )
        grad = (grad * (tl.exp2(decay) * SCALE)[:, None]).to(k.dtype)
        flow *= tl.exp2(total)
        flow = tl.dot(q.T, grad, flow, input_precision=PRECISION, out_dtype=ACC)
        w = tl.load(w_ptr + begin * K + own, mask=keys_mask, other=0.0)
        f = (-f).to(k.dtype)
        flow = tl.dot(w.T, f, flow, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dfirst_ptr + place * K * V + ends, flow, mask=mask)


@triton.jit
def _gated_delta_rule_pairs_kernel(
    grad_ptr,
    decay_ptr,
    inverse_ptr,
    x_ptr,
    f_ptr,
    dv_ptr,
    queries_ptr,
    errors_ptr,
    T,
    HEADS,
    spans_ptr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the gradients of values, and of products of queries and keys."""
    slot = tl.program_id(axis=0).to(tl.int64)
    if (
        spans_ptr is not None
        and tl.load(spans_ptr + slot // HEADS * 2 + 1) <= 0
    ):
        return  # no chunk is left for this program
    begin, rows, inside = _gated_delta_rule_tokens(
        slot, T, HEADS, spans_ptr, CHUNK
    )
    decay, _ = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    offs = tl.arange(0, CHUNK)
    tile = rows[:, None] * CHUNK + offs[None, :]  # (CHUNK, CHUNK)
    inverse_ptrs = inverse_ptr + begin * CHUNK + tile
    inverse = tl.load(inverse_ptrs, mask=inside[:, None], other=0.0)
    # Sums over all columns of V: too many for registers at once.
    queries = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    errors = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        mask = inside[:, None] & (offs_v[None, :] < V)
        grad = tl.load(grad_ptr + begin * V + values, mask=mask, other=0.0)
        x = tl.load(x_ptr + begin * V + values, mask=mask, other=0.0)
        f = tl.load(f_ptr + begin * V + values, mask=mask, other=0.0)
        # The system of the forward, transposed.
        dv = tl.dot(inverse.T, f, input_precision=PRECISION, out_dtype=ACC)
        tl.store(dv_ptr + begin * V + values, dv, mask=mask)
        queries = tl.dot(
            grad, x.T, queries, input_precision=PRECISION, out_dtype=ACC
        )
        dv = dv.to(x.dtype)
        errors = tl.dot(
            dv, x.T, errors, input_precision=PRECISION, out_dtype=ACC
        )
    # A query reads what its own token writes, a key only what was before.
    weights = _gated_delta_rule_weights(decay, CHUNK)
    errors = tl.where(offs[:, None] > offs[None, :], errors, 0.0) * -weights
    queries *= weights * SCALE
    tl.store(queries_ptr + begin * CHUNK + tile, queries, mask=inside[:, None])
    tl.store(errors_ptr + begin * CHUNK + tile, errors, mask=inside[:, None])


# Specialized for one head and values of one number, this kernel is miscompiled
# on Hopper by the assembler of Triton 3.6 and 3.7.
@triton.jit(do_not_specialize=["HEADS"])
def _gated_delta_rule_gradients_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    x_ptr,
    dv_ptr,
    queries_ptr,
    errors_ptr,
    states_ptr,
    flows_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    T,
    HEADS,
    spans_ptr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the other gradients of the tokens of a chunk."""
    slot = tl.program_id(axis=0).to(tl.int64)
    if (
        spans_ptr is not None
        and tl.load(spans_ptr + slot // HEADS * 2 + 1) <= 0
    ):
        return  # no chunk is left for this program
    begin, rows, inside = _gated_delta_rule_tokens(
        slot, T, HEADS, spans_ptr, CHUNK
    )
    decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
    offs = tl.arange(0, CHUNK)
    dbeta = tl.zeros((CHUNK,), dtype=ACC)
    dg = tl.zeros((CHUNK,), dtype=ACC)
    far = tl.zeros((CHUNK,), dtype=ACC)
    through = tl.zeros((BLOCK_K,), dtype=ACC)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        dq = tl.zeros((CHUNK, BLOCK_K), dtype=ACC)
        read = tl.zeros((CHUNK, BLOCK_K), dtype=ACC)
        written = tl.zeros((CHUNK, BLOCK_K), dtype=ACC)
        for start in range(0, V, BLOCK_V):
            offs_v = start + tl.arange(0, BLOCK_V)
            values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
            mask = inside[:, None] & (offs_v[None, :] < V)
            grad = tl.load(grad_ptr + begin * V + values, mask=mask, other=0.0)
            dv = tl.load(dv_ptr + begin * V + values, mask=mask, other=0.0)
            x = tl.load(x_ptr + begin * V + values, mask=mask, other=0.0)
            cells = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
            fits = (offs_k[:, None] < K) & (offs_v[None, :] < V)
            place = slot * K * V
            state = tl.load(states_ptr + place + cells, mask=fits, other=0.0)
            flow = tl.load(flows_ptr + place + cells, mask=fits, other=0.0)
            # What passes the whole chunk decays by all of its gates.
            through += tl.sum(state.to(ACC) * flow, axis=1)
            dq = tl.dot(
                grad, state.T, dq, input_precision=PRECISION, out_dtype=ACC
            )
            read = tl.dot(
                dv, state.T, read, input_precision=PRECISION, out_dtype=ACC
            )
            written = tl.dot(
                x, flow.T, written, input_precision=PRECISION, out_dtype=ACC
            )
        keys = (rows // GROUP)[:, None] * K + offs_k[None, :]
        shared = begin // GROUP * K  # heads of a group follow one another
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + shared + keys, mask=keys_mask, other=0.0)
        k = tl.load(k_ptr + shared + keys, mask=keys_mask, other=0.0)
        own = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        tile = rows[:, None] * CHUNK + offs[None, :]  # (CHUNK, CHUNK)
        queries = tl.load(
            queries_ptr + begin * CHUNK + tile, mask=inside[:, None], other=0.0
        )
        errors = tl.load(
            errors_ptr + begin * CHUNK + tile, mask=inside[:, None], other=0.0
        )
        # Queries and keys of the same chunk that read what a token wrote
        near = tl.dot(queries.T, q, input_precision=PRECISION, out_dtype=ACC)
        near = tl.dot(
            errors.T, k, near, input_precision=PRECISION, out_dtype=ACC
        )
        written *= tl.exp2(total - decay)[:, None]
        # What a token writes is beta times an outer product with its key.
        dbeta += tl.sum((written + near) * k, axis=1)
        scaled = (k * beta[:, None]).to(k.dtype)
        # Rounded as where dq and read have it: a token's own read cancels.
        dg -= tl.sum(near * scaled, axis=1)
        written *= beta[:, None]
        near *= beta[:, None]
        far += tl.sum(written * k, axis=1)
        dq *= tl.exp2(decay)[:, None] * SCALE
        dq = tl.dot(
            queries, scaled, dq, input_precision=PRECISION, out_dtype=ACC
        )
        tl.store(dq_ptr + begin * K + own, dq, mask=keys_mask)
        read *= -tl.exp2(decay)[:, None]
        read = tl.dot(
            errors, scaled, read, input_precision=PRECISION, out_dtype=ACC
        )
        dg += tl.sum(dq * q + read * k, axis=1)
        dk = read + written + near
        tl.store(dk_ptr + begin * K + own, dk, mask=keys_mask)
    tl.store(dbeta_ptr + begin + rows, dbeta, mask=inside)
    # A log decay acts on each pair of a token that writes and a later one that
    # reads, around it: both in this chunk, one of them, or none.
    dg = tl.cumsum(dg, axis=0, reverse=True) + tl.cumsum(far, axis=0) - far
    dg += tl.sum(through, axis=0) * tl.exp2(total)
    tl.store(dg_ptr + begin + rows, dg, mask=inside)


@triton.jit
def _gated_delta_rule_unit_kernel(
    x_ptr,
    grad_ptr,
    out_ptr,
    ROWS,
    K: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store rows divided by their lengths, or the gradient of that."""
    row = tl.program_id(axis=0).to(tl.int64) * BLOCK_ROWS
    row += tl.arange(0, BLOCK_ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    cells = row[:, None] * K + offs_k[None, :]  # (BLOCK_ROWS, BLOCK_K)
    mask = (row < ROWS)[:, None] & (offs_k[None, :] < K)
    x = tl.load(x_ptr + cells, mask=mask, other=0.0).to(ACC)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
    out = x * factor
    if grad_ptr is not None:  # without its part along the row
        grad = tl.load(grad_ptr + cells, mask=mask, other=0.0).to(ACC)
        out = (grad - out * tl.sum(out * grad, axis=1)[:, None]) * factor
    tl.store(out_ptr + cells, out, mask=mask)


GATED_DELTA_RULE_KERNELS = (
    _gated_delta_rule_solve_kernel,
    _gated_delta_rule_states_kernel,
    _gated_delta_rule_outputs_kernel,
    _gated_delta_rule_flows_kernel,
    _gated_delta_rule_pairs_kernel,
    _gated_delta_rule_gradients_kernel,
    _gated_delta_rule_unit_kernel,
)


def _gated_delta_rule_check(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    use_gate_in_kernel,
    A_log,
    dt_bias,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    state_v_first,
):
    name = "gated_delta_rule"
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    wide = torch.promote_types(q.dtype, torch.float32)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    given |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    given |= {"A_log": A_log, "dt_bias": dt_bias}
    given = {who: t for who, t in given.items() if t is not None}
    kinds = dict.fromkeys(given, (wide,)) | dict.fromkeys("qkv", (q.dtype,))
    kinds["cu_seqlens"] = torch.int32, torch.int64
    if use_gate_in_kernel:
        kinds |= dict.fromkeys(("g", "A_log", "dt_bias"), (wide, q.dtype))
    if use_beta_sigmoid_in_kernel:
        kinds["beta"] = wide, q.dtype
    if any(
        t.dtype not in kinds[who] or t.device != q.device
        for who, t in given.items()
    ):
        text = ", ".join(
            f"{who} {t.dtype} on {t.device}" for who, t in given.items()
        )
        raise TypeError(
            f"{name} takes q, k and v of one dtype, g, beta and the initial "
            f"state of {wide}, what use_gate_in_kernel and "
            "use_beta_sigmoid_in_kernel read of either, and cu_seqlens of "
            f"int32 or int64, on one device, not {text}"
        )
    if use_gate_in_kernel != (A_log is not None) or (
        dt_bias is not None and not use_gate_in_kernel
    ):
        raise ValueError(
            f"{name} takes A_log, and dt_bias if there is one, with "
            "use_gate_in_kernel, and not without"
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{name} takes allow_neg_eigval with use_beta_sigmoid_in_kernel"
        )
    fits = (
        q.ndim == v.ndim == 4
        and q.shape == k.shape
        and q.shape[:2] == v.shape[:2]
        and v.shape[:3] == g.shape == beta.shape
        and q.shape[2] <= v.shape[2] < 65536
        and v.shape[2] % max(q.shape[2], 1) == 0
        and (q.shape[2] > 0 or v.shape[2] == 0)
        and 1 <= q.shape[3] <= 256
        and 1 <= v.shape[3] <= 256
        and all(t is None or t.shape == v.shape[2:3] for t in (A_log, dt_bias))
    )
    if fits and cu_seqlens is not None:
        fits = cu_seqlens.ndim == 1 < cu_seqlens.shape[0] and q.shape[0] == 1
    if fits and initial_state is not None:
        fits = initial_state.shape == _gated_delta_rule_state_shape(
            q, v, cu_seqlens, state_v_first
        )
    if not fits:
        text = ", ".join(f"{who} {tuple(t.shape)}" for who, t in given.items())
        raise ValueError(
            f"{name} takes q and k of (batch, length, heads / n, K), v of "
            "(batch, length, heads, V), g and beta of (batch, length, heads), "
            "A_log and dt_bias of (heads,), cu_seqlens of (sequences + 1,) for "
            "a batch of 1, an initial state of (sequences, heads, K, V), or "
            "(sequences, heads, V, K) if state_v_first, with fewer than 65536 "
            f"heads, and K and V up to 256, not {text}"
        )


def _gated_delta_rule_state_shape(q, v, cu_seqlens, state_v_first):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, V = q.shape[3], v.shape[3]
    return sequences, v.shape[2], *((V, K) if state_v_first else (K, V))


def _gated_delta_rule_spans(cu_seqlens, T, CHUNK):
    """Return where the chunks of packed sequences begin.

    The host reads no length, so the table has as many rows as there may be
    chunks: each has the chunk's first token, and the number of tokens from
    there to the end of the sequence. Rows that are left have a number of 0 or
    less. The other result is the first chunk of each sequence.
    """
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    chunks = (end - start + CHUNK - 1) // CHUNK  # of each sequence
    offsets = torch.nn.functional.pad(chunks.cumsum(0), (1, 0))
    sequences = start.shape[0]
    most = (T + sequences * (CHUNK - 1)) // CHUNK
    chunk = torch.arange(most, device=offsets.device)
    sequence = torch.searchsorted(offsets, chunk, right=True) - 1
    sequence = sequence.clamp(max=sequences - 1)
    token = start[sequence] + (chunk - offsets[sequence]) * CHUNK
    return torch.stack((token, end[sequence] - token), dim=1), offsets


def _gated_delta_rule_read(*tensors):
    """Return tensors as the kernels read them."""
    tensors = [t.contiguous() for t in tensors]
    if triton.knobs.runtime.interpret and tensors[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        tensors = [t.float() for t in tensors]
    return tensors


@functools.cache
def _gated_delta_rule_is_hopper(device):
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(device).major == 9


def _gated_delta_rule_call(
    kernels,
    q,
    v,
    spans,
    offsets,
    state_v_first,
    which,
    programs,
    *pointers,
    **constants,
):
    """Launch a kernel with its tile, for a number of chunks or sequences."""
    T, heads = v.shape[1:3]
    # torch.compile would keep them open, and a constant cannot be.
    K, V, GROUP = int(q.shape[3]), int(v.shape[3]), int(heads // q.shape[2])
    (CHUNK, PRECISION), *tiles = GATED_DELTA_RULE_TILES[q.dtype.itemsize]
    least = 16
    if q.dtype.itemsize == 2 and _gated_delta_rule_is_hopper(q.device):
        tiles, least = GATED_DELTA_RULE_HOPPER, 64
    most_k, most_v, num_warps, num_stages = tiles[which]
    # These take all of K at once, and in float32 spill registers above 128.
    if K > 128 and which in (0, 1, 3):
        most_k, most_v, num_warps, num_stages = 256, least, 8, 1
    BLOCK_V = min(most_v, max(least, triton.next_power_of_2(V)))
    if which in (1, 2, 3):  # a program takes a part of the values
        programs *= triton.cdiv(V, BLOCK_V)
    if which in (1, 3):
        constants |= {"offsets_ptr": offsets, "V_FIRST": state_v_first}
    kernels[which][(programs,)](
        *pointers,
        T=T,
        HEADS=heads,
        spans_ptr=spans,
        K=K,
        V=V,
        GROUP=GROUP,
        ACC=tl.float64 if q.dtype == torch.float64 else tl.float32,
        PRECISION=PRECISION,
        CHUNK=CHUNK,
        BLOCK_K=min(most_k, max(least, triton.next_power_of_2(K))),
        BLOCK_V=BLOCK_V,
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )


def _gated_delta_rule_unit(kernels, x, grad=None):
    """Return rows divided by their lengths, or the gradient of that."""
    out, K = torch.empty_like(x), int(x.shape[3])
    BLOCK_K = triton.next_power_of_2(K)
    ROWS, BLOCK_ROWS = x.numel() // K, 2048 // BLOCK_K
    kernels[-1][(triton.cdiv(ROWS, BLOCK_ROWS),)](
        x,
        grad,
        out,
        ROWS,
        K=K,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_K=BLOCK_K,
    )
    return out


def _gated_delta_rule_gates(g, beta, wide, A_log, dt_bias, sigmoid, negative):
    """Return log decays and factors, given what they are computed from."""
    if A_log is not None:
        g = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias
        g = -A_log.to(wide).exp() * torch.nn.functional.softplus(g)
    if sigmoid:
        beta = beta.to(wide).sigmoid()
    return g, 2 * beta if negative else beta


def _gated_delta_rule_states(
    kernels, q, k, v, g, beta, first, cu_seqlens, state_v_first
):
    """Return what does not need the queries: states, errors and the like.

    Also return the number of chunks of all heads, and a function that launches
    a kernel for these tensors.
    """
    (batch, T, heads, V), K = v.shape, k.shape[3]
    CHUNK = GATED_DELTA_RULE_TILES[q.dtype.itemsize][0][0]
    programs = batch * triton.cdiv(T, CHUNK) * heads
    spans = offsets = None
    if cu_seqlens is not None:
        spans, offsets = _gated_delta_rule_spans(cu_seqlens, T, CHUNK)
        programs = spans.shape[0] * heads
    inverse = k.new_empty(batch, T, heads, CHUNK)
    w = k.new_empty(batch, T, heads, K)
    y, x = torch.empty_like(v), torch.empty_like(v)
    states = k.new_empty(programs, K, V)
    decay = g.new_empty(programs, CHUNK)
    last = g.new_empty(
        _gated_delta_rule_state_shape(q, v, cu_seqlens, state_v_first)
    )
    call = functools.partial(
        _gated_delta_rule_call, kernels, q, v, spans, offsets, state_v_first
    )
    pointers = k, v, g, beta, decay, inverse, w, y
    call(0, programs, *pointers)
    pointers = k, decay, beta, w, y, last if first is None else first
    pointers, started = (*pointers, states, x, last), first is not None
    call(1, last.shape[0] * heads, *pointers, STARTED=started)
    return decay, inverse, w, states, x, last, programs, call


def _gated_delta_rule_launch(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    scale=None,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    kernels=GATED_DELTA_RULE_KERNELS,
):
    _gated_delta_rule_check(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    dtype, first = q.dtype, initial_state
    wide = torch.promote_types(dtype, torch.float32)
    if q.numel() == 0:  # also without tokens: the state stays
        shape = _gated_delta_rule_state_shape(q, v, cu_seqlens, state_v_first)
        last = g.new_zeros(shape, dtype=wide) if first is None else first
        # A copy, as an op may not return its input.
        last = last.clone(memory_format=torch.contiguous_format)
        return v.new_empty(v.shape), last
    q, k, v = _gated_delta_rule_read(q, k, v)
    g, beta = _gated_delta_rule_gates(
        g,
        beta,
        wide,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    g, beta = g.contiguous(), beta.contiguous()
    first = None if first is None else first.contiguous()
    # As a constant, it keeps its 53 bits. An argument has 24.
    SCALE = int(q.shape[3]) ** -0.5 if scale is None else scale
    out = torch.empty_like(v)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        if use_qk_l2norm_in_kernel:
            q, k = (_gated_delta_rule_unit(kernels, t) for t in (q, k))
        decay, _, _, states, x, last, programs, call = _gated_delta_rule_states(
            kernels, q, k, v, g, beta, first, cu_seqlens, state_v_first
        )
        pointers = q, k, x, decay, beta, states, out
        call(2, programs, *pointers, SCALE=SCALE, BACKWARD=False)
    return out.to(dtype), last


def _gated_delta_rule_backward_launch(
    grad,
    grad_last,
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    scale,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    state_v_first=False,
    kernels=GATED_DELTA_RULE_KERNELS,
):
    dtype, first = q.dtype, initial_state
    dg, dbeta = (t.new_empty(t.shape) for t in (g, beta))
    if q.numel() == 0:
        grads = [t.new_empty(t.shape) for t in (q, k, v)]
        dfirst = grad_last.clone(memory_format=torch.contiguous_format)
        return *grads, dg, dbeta, dfirst
    q, k, v, grad = _gated_delta_rule_read(q, k, v, grad)
    g, beta, grad_last = (t.contiguous() for t in (g, beta, grad_last))
    first = None if first is None else first.contiguous()
    SCALE = int(q.shape[3]) ** -0.5 if scale is None else scale
    near, f, dv = (torch.empty_like(v) for _ in range(3))
    dfirst = torch.empty_like(grad_last)
    # Each head has a gradient of its own of what a group of heads shares.
    group, given = v.shape[2] // q.shape[2], (q, k)
    shape = *v.shape[:3], q.shape[3]
    dq, dk = (
        q.new_empty(shape, dtype=q.dtype if group == 1 else g.dtype)
        for _ in range(2)
    )
    with torch.accelerator.device_index(q.device.index):
        if use_qk_l2norm_in_kernel:
            q, k = (_gated_delta_rule_unit(kernels, t) for t in (q, k))
        # Computed again: to keep them would take more memory than q, k and v.
        decay, inverse, w, states, x, last, programs, call = (
            _gated_delta_rule_states(
                kernels, q, k, v, g, beta, first, cu_seqlens, state_v_first
            )
        )
        flows = torch.empty_like(states)
        queries, errors = torch.empty_like(inverse), torch.empty_like(inverse)
        call = functools.partial(call, SCALE=SCALE)
        pointers = q, k, grad, decay, beta, states, near
        call(2, programs, *pointers, BACKWARD=True)
        pointers = grad, q, k, decay, beta, w, near, grad_last
        pointers = *pointers, flows, f, dfirst
        call(3, last.shape[0] * last.shape[1], *pointers)
        call(4, programs, grad, decay, inverse, x, f, dv, queries, errors)
        pointers = grad, q, k, decay, beta, x, dv, queries, errors
        pointers = *pointers, states, flows, dq, dk, dg, dbeta
        call(5, programs, *pointers)
        if group > 1:
            dq, dk = (t.unflatten(2, (-1, group)).sum(3) for t in (dq, dk))
        if use_qk_l2norm_in_kernel:
            dq, dk = (
                _gated_delta_rule_unit(kernels, t, of_unit)
                for t, of_unit in zip(given, (dq, dk), strict=True)
            )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dg, dbeta, dfirst


@triton_op(f"{GATED_DELTA_RULE_NAMESPACE}::gated_delta_rule", mutates_args={})
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the gated delta rule, and its final state.

    In each head a state S of (K, V) decays, and each token corrects what the
    state has for its key: with S = exp(g_t) * S_(t-1) and the error v_t - S.T @
    k_t, S_t = S + beta_t * outer(k_t, error), and the output is scale * S_t.T @
    q_t, with a scale of 1 / sqrt(K) if none is given; the kernels are compiled
    for each scale. Takes v of (batch, length, heads, V), and q and k of (batch,
    length, heads / n, K): n heads of v in a row share one of q and k, which is
    not repeated in memory. There are fewer than 65536 heads, and K and V are up
    to 256. All are of float16, bfloat16, float32 or float64; the log decays g
    and the factors beta of (batch, length, heads) and the initial state of
    (batch, heads, K, V), zeros if not given, are in float32, or float64 for
    float64. It copies what is not contiguous. The log decays are at most 0, and
    beta times the squared length of a key is from 0 to 2. That is not checked:
    beyond it, states grow, and results may be infinite or NaN. Returns the
    outputs, of the shape and dtype of v, and the state after the last token, of
    the shape and dtype of the initial one. Both are contiguous. Results and
    gradients are deterministic.

    Options have the names of flash-linear-attention:

    * ``cu_seqlens``, of (sequences + 1,), in int32 or int64: the tensors have a
      batch of 1, in which sequence i has the tokens cu_seqlens[i] to
      cu_seqlens[i + 1] - 1. States are (sequences, heads, K, V). It begins with
      0, does not decrease, and ends with the length. The values stay on the
      GPU, so they are not checked. In each call, operators of PyTorch compute
      from them where each chunk begins.
    * ``use_qk_l2norm_in_kernel`` divides each row of q and k by the square root
      of 1e-6 plus its squared length. One more kernel reads q and k and writes
      normalized copies in their dtype. The backward does so again, and at its
      end reads q and k and their gradients once more, and writes the gradients.
    * ``use_gate_in_kernel``: the log decays are -exp(A_log) * softplus(g +
      dt_bias), with ``A_log`` and ``dt_bias``, which may be left out, of
      (heads,). ``use_beta_sigmoid_in_kernel``: the factors are sigmoid(beta),
      or twice that with ``allow_neg_eigval``. Operators of PyTorch read g and
      beta and write tensors of the same shape; torch.compile fuses them. What
      they read may also have the dtype of q.
    * ``state_v_first``: initial and final states are (batch, heads, V, K).

    Within chunks of 64 tokens (32 for float32, 16 for float64) what a token
    writes comes from the inverse of a triangular matrix. It is computed in
    TF32 and rounded to the dtype of q, for float16 and bfloat16, as are errors
    and the states between chunks: float16 needs those below 65504. Products of
    float32 are computed as three products of TF32. A NaN or an infinity may
    reach earlier tokens of its chunk. A g below -110 (-831 for float64) counts
    as that; -inf ends what was before.

    Both results pass gradients on to q, k, v, g, beta, the initial state, A_log
    and dt_bias; those of q and k that several heads share are summed in
    float32, or float64 for float64. Second derivatives are not supported.
    Raises TypeError for other dtypes and for tensors on different devices, and
    ValueError for other shapes and for options that miss another. The methods:
    https://arxiv.org/abs/2412.06464,
    https://arxiv.org/abs/2406.06484

    Rounding: decays and sums are in float32, or float64 for float64. Inverses,
    errors and the copies of states that are read are rounded to the dtype of q,
    and each output is rounded once.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype, and all
    others to float32.
    """
    kernels = (
        wrap_triton(_gated_delta_rule_solve_kernel),
        wrap_triton(_gated_delta_rule_states_kernel),
        wrap_triton(_gated_delta_rule_outputs_kernel),
        wrap_triton(_gated_delta_rule_unit_kernel),
    )
    return _gated_delta_rule_launch(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        kernels,
    )


@triton_op(
    f"{GATED_DELTA_RULE_NAMESPACE}::gated_delta_rule_backward", mutates_args={}
)
def gated_delta_rule_backward(
    grad: torch.Tensor,
    grad_last: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    scale: float | None,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """Return the gradients of q, k, v, g, beta and the initial state.

    Takes those of both results and what ``gated_delta_rule`` took, with the log
    decays and the factors themselves, and checks none of it. Second derivatives
    are not supported.
    """
    kernels = (
        wrap_triton(_gated_delta_rule_solve_kernel),
        wrap_triton(_gated_delta_rule_states_kernel),
        wrap_triton(_gated_delta_rule_outputs_kernel),
        wrap_triton(_gated_delta_rule_flows_kernel),
        wrap_triton(_gated_delta_rule_pairs_kernel),
        wrap_triton(_gated_delta_rule_gradients_kernel),
        wrap_triton(_gated_delta_rule_unit_kernel),
    )
    return _gated_delta_rule_backward_launch(
        grad,
        grad_last,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        state_v_first,
        kernels,
    )


def _gated_delta_rule_setup(ctx, inputs, output):
    *tensors, ctx.scale, cu_seqlens, ctx.unit, _ = inputs[:10]
    A_log, dt_bias, ctx.sigmoid, ctx.negative, ctx.v_first = inputs[10:]
    ctx.save_for_backward(*tensors, cu_seqlens, A_log, dt_bias)


def _gated_delta_rule_gradient(ctx, grad, grad_last):
    q, k, v, g, beta, first, cu_seqlens, A_log, dt_bias = ctx.saved_tensors
    wide = grad_last.dtype
    gates = _gated_delta_rule_gates(
        g, beta, wide, A_log, dt_bias, ctx.sigmoid, ctx.negative
    )
    dq, dk, dv, dg, dbeta, dfirst = gated_delta_rule_backward(
        grad,
        grad_last,
        q,
        k,
        v,
        *gates,
        first,
        ctx.scale,
        cu_seqlens,
        ctx.unit,
        ctx.v_first,
    )
    dA_log = ddt_bias = None
    if A_log is not None:
        dA_log = (dg * gates[0]).sum((0, 1)).to(A_log.dtype)
        x = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias
        dg = dg * -A_log.to(wide).exp() * x.sigmoid()
        if dt_bias is not None:
            ddt_bias = dg.sum((0, 1)).to(dt_bias.dtype)
    if ctx.sigmoid:
        dbeta = dbeta * gates[1] * (1 - gates[1] / (1 + ctx.negative))
    dg, dbeta = dg.to(g.dtype), dbeta.to(beta.dtype)
    dfirst = None if first is None else dfirst
    grads = dq, dk, dv, dg, dbeta, dfirst, *[None] * 4
    return *grads, dA_log, ddt_bias, *[None] * 3


gated_delta_rule.register_autograd(
    _gated_delta_rule_gradient, setup_context=_gated_delta_rule_setup
)

# On a GPU a call goes to the launcher; all else goes on to the triton_op.
GATED_DELTA_RULE_LIBRARY = Library(GATED_DELTA_RULE_NAMESPACE, "FRAGMENT")
GATED_DELTA_RULE_LIBRARY.impl(
    "gated_delta_rule", _gated_delta_rule_launch, "CUDA"
)
GATED_DELTA_RULE_LIBRARY.impl(
    "gated_delta_rule_backward", _gated_delta_rule_backward_launch, "CUDA"
)


def _gated_delta_rule_autocast(kind, *arguments):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    arguments = [
        t.to(dtype if place < 3 else torch.float32)
        if isinstance(t, torch.Tensor) and t.dtype in casts
        else t
        for place, t in enumerate(arguments)
    ]
    with torch.autocast(kind, enabled=False):
        return gated_delta_rule(*arguments)


GATED_DELTA_RULE_LIBRARY.impl(
    "gated_delta_rule",
    functools.partial(_gated_delta_rule_autocast, "cpu"),
    "AutocastCPU",
)
GATED_DELTA_RULE_LIBRARY.impl(
    "gated_delta_rule",
    functools.partial(_gated_delta_rule_autocast, "cuda"),
    "AutocastCUDA",
)
