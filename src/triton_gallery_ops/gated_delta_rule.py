"""Gated delta rule (Gated DeltaNet) in chunks, with its backward.

For each head, S = exp(g_t) * S_(t-1), S_t = S + beta_t * outer(k_t, v_t - S.T @
k_t), and the output is scale * S_t.T @ q_t (Yang, Kautz and Hatamizadeh, 2024,
arXiv:2412.06464). A chunk solves a triangular system by matrix products (Yang
et al., 2024, arXiv:2406.06484). One kernel is serial along the chunks, so
throughput rises with the number of heads and sequences. Takes K up to 128, V up
to 256, g of at most 0 and beta * |k|**2 from 0 to 2, which is not checked.
Float32 products are computed as three TF32 products. Deterministic. There is no
second derivative. ``linear_attention`` does without the correction.
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
def _gated_delta_rule_tokens(slot, T, HEADS, CHUNK: tl.constexpr):
    """Return a chunk's first row, its rows, and which of them exist."""
    chunks = tl.cdiv(T, CHUNK)
    start = slot % chunks * CHUNK
    place = slot // chunks  # of a head of a batch
    begin = (place // HEADS * T + start) * HEADS + place % HEADS
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
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a chunk's decays, and its inverse times keys and values."""
    # In int32, an offset would overflow past element 2**31.
    slot = tl.program_id(axis=0).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
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
    keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
    keys_mask = inside[:, None] & (offs_k[None, :] < K)
    k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
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
    tl.store(w_ptr + begin * K + keys, w, mask=keys_mask)
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
    K: tl.constexpr,
    V: tl.constexpr,
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
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=ACC)
    if STARTED:
        state = tl.load(first_ptr + place * K * V + tile, mask=mask, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    for chunk in range(chunks):
        slot = place * chunks + chunk
        # Only the stored copy is rounded. The state in registers goes on.
        tl.store(states_ptr + slot * K * V + tile, state, mask=mask)
        begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
        decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
        beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        values_mask = inside[:, None] & (offs_v[None, :] < V)
        w = tl.load(w_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
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
    tl.store(last_ptr + place * K * V + tile, state, mask=mask)


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
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
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
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
    decay, _ = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    out = tl.zeros((CHUNK, BLOCK_V), dtype=ACC)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + begin * K + keys, mask=mask, other=0.0)
        k = tl.load(k_ptr + begin * K + keys, mask=mask, other=0.0)
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
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
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
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    # The last state is a result, so the walk begins with its gradient.
    flow = tl.load(grad_last_ptr + place * K * V + tile, mask=mask, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    for step in range(chunks):
        slot = place * chunks + chunks - 1 - step
        tl.store(flows_ptr + slot * K * V + tile, flow, mask=mask)
        begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
        decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
        beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        values_mask = inside[:, None] & (offs_v[None, :] < V)
        k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        # What a token wrote reaches later chunks, and queries of its own.
        read = flow.to(k.dtype)
        f = tl.dot(k, read, input_precision=PRECISION, out_dtype=ACC)
        f *= tl.exp2(total - decay)[:, None]
        f += tl.load(near_ptr + begin * V + values, mask=values_mask, other=0.0)
        f *= beta[:, None]
        tl.store(f_ptr + begin * V + values, f, mask=values_mask)
        # What the queries read of the state, less what the keys did.
        q = tl.load(q_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        grad = tl.load(
            grad_ptr + begin * V + values, mask=values_mask, other=0.0
        )
        grad = (grad * (tl.exp2(decay) * SCALE)[:, None]).to(k.dtype)
        flow *= tl.exp2(total)
        flow = tl.dot(q.T, grad, flow, input_precision=PRECISION, out_dtype=ACC)
        w = tl.load(w_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        f = (-f).to(k.dtype)
        flow = tl.dot(w.T, f, flow, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dfirst_ptr + place * K * V + tile, flow, mask=mask)


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
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the gradients of values, and of products of queries and keys."""
    slot = tl.program_id(axis=0).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
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
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the other gradients of the tokens of a chunk."""
    slot = tl.program_id(axis=0).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
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
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
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
        tl.store(dq_ptr + begin * K + keys, dq, mask=keys_mask)
        read *= -tl.exp2(decay)[:, None]
        read = tl.dot(
            errors, scaled, read, input_precision=PRECISION, out_dtype=ACC
        )
        dg += tl.sum(dq * q + read * k, axis=1)
        dk = read + written + near
        tl.store(dk_ptr + begin * K + keys, dk, mask=keys_mask)
    tl.store(dbeta_ptr + begin + rows, dbeta, mask=inside)
    # A log decay acts on each pair of a token that writes and a later one that
    # reads, around it: both in this chunk, one of them, or none.
    dg = tl.cumsum(dg, axis=0, reverse=True) + tl.cumsum(far, axis=0) - far
    dg += tl.sum(through, axis=0) * tl.exp2(total)
    tl.store(dg_ptr + begin + rows, dg, mask=inside)


GATED_DELTA_RULE_KERNELS = (
    _gated_delta_rule_solve_kernel,
    _gated_delta_rule_states_kernel,
    _gated_delta_rule_outputs_kernel,
    _gated_delta_rule_flows_kernel,
    _gated_delta_rule_pairs_kernel,
    _gated_delta_rule_gradients_kernel,
)


def _gated_delta_rule_check(q, k, v, g, beta, initial_state):
    name = "gated_delta_rule"
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    wide = torch.promote_types(q.dtype, torch.float32)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        given["initial_state"] = initial_state
    kinds = dict.fromkeys(given, wide) | dict.fromkeys("qkv", q.dtype)
    found = {who: (t.dtype, t.device) for who, t in given.items()}
    if found != {who: (kind, q.device) for who, kind in kinds.items()}:
        text = ", ".join(
            f"{who} {t.dtype} on {t.device}" for who, t in given.items()
        )
        raise TypeError(
            f"{name} takes q, k and v of one dtype, g, beta and the initial "
            f"state of {wide}, on one device, not {text}"
        )
    fits = (
        q.ndim == v.ndim == 4
        and q.shape == k.shape
        and q.shape[:3] == v.shape[:3] == g.shape == beta.shape
        and q.shape[2] < 65536
        and 1 <= q.shape[3] <= 128
        and 1 <= v.shape[3] <= 256
    )
    if fits and initial_state is not None:
        batch, _, heads, K = q.shape
        fits = initial_state.shape == (batch, heads, K, v.shape[3])
    if not fits:
        text = ", ".join(f"{who} {tuple(t.shape)}" for who, t in given.items())
        raise ValueError(
            f"{name} takes q and k of (batch, length, heads, K), v of (batch, "
            "length, heads, V), g and beta of (batch, length, heads) and an "
            "initial state of (batch, heads, K, V), with fewer than 65536 "
            f"heads, K up to 128 and V up to 256, not {text}"
        )


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
    kernels, which, q, v, programs, parts, *pointers, **constants
):
    """Launch a kernel with its tile, for each part of the values if asked."""
    (_, T, heads, K), V = q.shape, int(v.shape[3])
    K = int(K)  # torch.compile would keep it open, and a constant cannot be
    (CHUNK, PRECISION), *tiles = GATED_DELTA_RULE_TILES[q.dtype.itemsize]
    least = 16
    if q.dtype.itemsize == 2 and _gated_delta_rule_is_hopper(q.device):
        tiles, least = GATED_DELTA_RULE_HOPPER, 64
    most_k, most_v, num_warps, num_stages = tiles[which]
    BLOCK_V = min(most_v, max(least, triton.next_power_of_2(V)))
    grid = (programs * (triton.cdiv(V, BLOCK_V) if parts else 1),)
    kernels[which][grid](
        *pointers,
        T=T,
        HEADS=heads,
        K=K,
        V=V,
        ACC=tl.float64 if q.dtype == torch.float64 else tl.float32,
        PRECISION=PRECISION,
        CHUNK=CHUNK,
        BLOCK_K=min(most_k, max(least, triton.next_power_of_2(K))),
        BLOCK_V=BLOCK_V,
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )


def _gated_delta_rule_states(kernels, q, k, v, g, beta, first):
    """Return what does not need the queries: states, errors and the like."""
    (batch, T, heads, K), V = q.shape, v.shape[3]
    CHUNK = GATED_DELTA_RULE_TILES[q.dtype.itemsize][0][0]
    chunks = triton.cdiv(T, CHUNK)
    inverse = k.new_empty(batch, T, heads, CHUNK)
    w, y, x = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    states = k.new_empty(batch, heads, chunks, K, V)
    decay = g.new_empty(batch, heads, chunks, CHUNK)
    last = g.new_empty(batch, heads, K, V)
    pointers = k, v, g, beta, decay, inverse, w, y
    programs = batch * heads * chunks
    _gated_delta_rule_call(kernels, 0, q, v, programs, False, *pointers)
    pointers = k, decay, beta, w, y, last if first is None else first
    pointers, started = (*pointers, states, x, last), first is not None
    _gated_delta_rule_call(
        kernels, 1, q, v, batch * heads, True, *pointers, STARTED=started
    )
    return decay, inverse, w, states, x, last, programs


def _gated_delta_rule_launch(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    scale=None,
    kernels=GATED_DELTA_RULE_KERNELS,
):
    _gated_delta_rule_check(q, k, v, g, beta, initial_state)
    dtype, first = q.dtype, initial_state
    if q.numel() == 0:  # also without tokens: the state stays
        shape = q.shape[0], q.shape[2], q.shape[3], v.shape[3]
        last = g.new_zeros(shape) if first is None else first
        # A copy, as an op may not return its input.
        last = last.clone(memory_format=torch.contiguous_format)
        return v.new_empty(v.shape), last
    q, k, v = _gated_delta_rule_read(q, k, v)
    g, beta = g.contiguous(), beta.contiguous()
    first = None if first is None else first.contiguous()
    # As a constant, it keeps its 53 bits. An argument has 24.
    SCALE = int(q.shape[3]) ** -0.5 if scale is None else scale
    out = torch.empty_like(v)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        decay, _, _, states, x, last, programs = _gated_delta_rule_states(
            kernels, q, k, v, g, beta, first
        )
        pointers = q, k, x, decay, beta, states, out
        constants = {"SCALE": SCALE, "BACKWARD": False}
        _gated_delta_rule_call(
            kernels, 2, q, v, programs, True, *pointers, **constants
        )
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
    kernels=GATED_DELTA_RULE_KERNELS,
):
    dtype, first = q.dtype, initial_state
    dg, dbeta = (t.new_empty(t.shape) for t in (g, beta))
    if q.numel() == 0:
        grads = [t.new_empty(t.shape) for t in (q, k, v)]
        return *grads, dg, dbeta, grad_last.clone()
    q, k, v, grad = _gated_delta_rule_read(q, k, v, grad)
    g, beta, grad_last = (t.contiguous() for t in (g, beta, grad_last))
    first = None if first is None else first.contiguous()
    SCALE = int(q.shape[3]) ** -0.5 if scale is None else scale
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    near, f, dfirst = (torch.empty_like(t) for t in (v, v, grad_last))
    with torch.accelerator.device_index(q.device.index):
        # Computed again: to keep them would take more memory than q, k and v.
        decay, inverse, w, states, x, _, programs = _gated_delta_rule_states(
            kernels, q, k, v, g, beta, first
        )
        flows = torch.empty_like(states)
        queries, errors = torch.empty_like(inverse), torch.empty_like(inverse)
        call = functools.partial(_gated_delta_rule_call, SCALE=SCALE)
        pointers = q, k, grad, decay, beta, states, near
        call(kernels, 2, q, v, programs, True, *pointers, BACKWARD=True)
        pointers = grad, q, k, decay, beta, w, near, grad_last
        pointers = *pointers, flows, f, dfirst
        heads = q.shape[0] * q.shape[2]
        call(kernels, 3, q, v, heads, True, *pointers)
        pointers = grad, decay, inverse, x, f, dv, queries, errors
        call(kernels, 4, q, v, programs, False, *pointers)
        pointers = grad, q, k, decay, beta, x, dv, queries, errors
        pointers = *pointers, states, flows, dq, dk, dg, dbeta
        call(kernels, 5, q, v, programs, False, *pointers)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the gated delta rule, and its final state.

    In each head a state S of (K, V) decays, and each token corrects what the
    state has for its key: with S = exp(g_t) * S_(t-1) and the error v_t - S.T @
    k_t, S_t = S + beta_t * outer(k_t, error), and the output is scale * S_t.T @
    q_t, with a scale of 1 / sqrt(K) if none is given; the kernels are compiled
    for each scale. Takes q and k of (batch, length, heads, K), v of (batch,
    length, heads, V), with fewer than 65536 heads, K up to 128 and V up to 256,
    all of float16, bfloat16, float32 or float64; the log decays g and the
    factors beta of (batch, length, heads) and the initial state of (batch,
    heads, K, V), zeros if not given, all in float32, or float64 for float64. It
    copies what is not contiguous. The log decays are at most 0, and beta times
    the squared length of a key is from 0 to 2. That is not checked: beyond it,
    states grow, and results may be infinite or NaN. Returns the outputs, of the
    shape and dtype of v, and the state after the last token, of the shape and
    dtype of the initial one. Both are contiguous. Results and gradients are
    deterministic.

    Within chunks of 64 tokens (32 for float32, 16 for float64) what a token
    writes comes from the inverse of a triangular matrix. It is computed in
    TF32 and rounded to the dtype of q, for float16 and bfloat16, as are errors
    and the states between chunks: float16 needs those below 65504. Products of
    float32 are computed as three products of TF32. A NaN or an infinity may
    reach earlier tokens of its chunk. A g below -110 (-831 for float64) counts
    as that; -inf ends what was before.

    Both results pass gradients on to q, k, v, g, beta and the initial state.
    Second derivatives are not supported. Raises TypeError for other dtypes and
    for tensors on different devices, and ValueError for other shapes. The
    methods: https://arxiv.org/abs/2412.06464,
    https://arxiv.org/abs/2406.06484

    Rounding: decays and sums are in float32, or float64 for float64. Inverses,
    errors and the copies of states that are read are rounded to the dtype of q,
    and each output is rounded once.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype, and g,
    beta and the initial state to float32.
    """
    kernels = (
        wrap_triton(_gated_delta_rule_solve_kernel),
        wrap_triton(_gated_delta_rule_states_kernel),
        wrap_triton(_gated_delta_rule_outputs_kernel),
    )
    return _gated_delta_rule_launch(
        q, k, v, g, beta, initial_state, scale, kernels
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
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """Return the gradients of q, k, v, g, beta and the initial state.

    Takes those of both results and what ``gated_delta_rule`` took, and checks
    none of it. Second derivatives are not supported.
    """
    kernels = (
        wrap_triton(_gated_delta_rule_solve_kernel),
        wrap_triton(_gated_delta_rule_states_kernel),
        wrap_triton(_gated_delta_rule_outputs_kernel),
        wrap_triton(_gated_delta_rule_flows_kernel),
        wrap_triton(_gated_delta_rule_pairs_kernel),
        wrap_triton(_gated_delta_rule_gradients_kernel),
    )
    return _gated_delta_rule_backward_launch(
        grad, grad_last, q, k, v, g, beta, initial_state, scale, kernels
    )


def _gated_delta_rule_setup(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gated_delta_rule_gradient(ctx, grad, grad_last):
    *tensors, first = ctx.saved_tensors
    *grads, dfirst = gated_delta_rule_backward(
        grad, grad_last, *tensors, first, ctx.scale
    )
    return *grads, None if first is None else dfirst, None


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


def _gated_delta_rule_autocast(
    kind, q, k, v, g, beta, initial_state=None, scale=None
):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    g, beta, initial_state = (
        t.float() if t is not None and t.dtype in casts else t
        for t in (g, beta, initial_state)
    )
    with torch.autocast(kind, enabled=False):
        return gated_delta_rule(q, k, v, g, beta, initial_state, scale)


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
