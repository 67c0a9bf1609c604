"""Routing of a mixture of experts: the choice of experts, and their tokens.

``moe_routing`` makes weights and experts from a router's logits: a softmax or a
sigmoid, the k best experts of a token, their weights, optionally normalized.
It takes the options of Mixtral, Qwen3-MoE and DeepSeek-V3, groups of experts
and a bias among them. ``moe_routing_permutation`` sorts the choices by expert,
as a grouped product wants them, by counting. ``moe_routing_with_permutation``
does both, in one launch where tokens are few. Nothing waits for the GPU.
Deterministic: of equals the lower expert is chosen, and an expert's tokens stay
in order. The weights have a gradient with respect to the logits. Up to 1024
experts and 32 choices.
"""

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton

MOE_ROUTING_NAMESPACE = "triton_gallery"
MOE_ROUTING_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
MOE_ROUTING_EXPERTS = 1024
MOE_ROUTING_CHOICES = 32  # of a token
MOE_ROUTING_TILE = 512  # logits for a warp, of several tokens where they fit
MOE_ROUTING_ONE = 2**15  # comparisons that one program makes for all choices
MOE_ROUTING_FEW = 4096  # choices that are all compared with each other
MOE_ROUTING_BLOCKS = 128  # programs that count more choices
MOE_ROUTING_CHUNK = 128  # choices that such a program ranks at once
MOE_ROUTING_PAIRS = 2**30  # choices, at most


@triton.jit
def _moe_routing_key(x):
    """Return integers in the order of the floats, with NaN as the largest."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        wide = x.to(tl.float32)
    else:
        bits = x.to(tl.int64 if BITS == 64 else tl.int32, bitcast=True)
        wide = x
    # The bits of negative floats are in reverse order.
    key = tl.where(bits < 0, bits ^ TOP, bits)
    # The two zeros are equal, and so are all NaN.
    key = tl.where(wide == 0, 0, key)
    return tl.where(wide == wide, key, TOP)


@triton.jit
def _moe_routing_number(key):
    """Return the floats of keys, of 32 or 64 bits."""
    BITS: tl.constexpr = key.dtype.primitive_bitwidth
    bits = tl.where(key < 0, key ^ (2 ** (BITS - 1) - 1), key)
    return bits.to(tl.float64 if BITS == 64 else tl.float32, bitcast=True)


@triton.jit
def _moe_routing_groups(
    key,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Return whether the group of each key is among the best.

    GROUPS and SIZE are powers of two. Where there is nothing, keys are lowest.
    """
    BITS: tl.constexpr = key.dtype.primitive_bitwidth
    LOWEST: tl.constexpr = -(2 ** (BITS - 1))
    shape: tl.constexpr = key.shape
    keys = tl.reshape(key, (shape[0], GROUPS, SIZE))
    best = tl.max(keys, axis=2)  # (BLOCK_T, GROUPS)
    if BIASED:
        # The sum of the best two. The second may be equal to the best.
        same = keys == best[:, :, None]
        second = tl.max(tl.where(same, LOWEST, keys), axis=2)
        twice = tl.sum(same.to(tl.int32), axis=2) > 1
        second = tl.where(twice, best, second)
        total = _moe_routing_number(best) + _moe_routing_number(second)
        best = tl.where(best == LOWEST, LOWEST, _moe_routing_key(total))
    group = tl.arange(0, GROUPS)
    earlier = (group[None, :] < group[:, None])[None, :, :]
    mine, other = best[:, :, None], best[:, None, :]
    ahead = (other > mine) | ((other == mine) & earlier)
    rank = tl.sum(ahead.to(tl.int32), axis=2)  # (BLOCK_T, GROUPS)
    kept = tl.broadcast_to((rank < TOP)[:, :, None], keys.shape)
    return tl.reshape(kept, shape)


@triton.jit
def _moe_routing_sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _moe_routing_choose(
    rows,  # pointers to logits, (BLOCK_T, 1)
    bias_ptr,
    E: tl.constexpr,
    k: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,  # of a group
):
    """Return the weights and the experts of tokens, (BLOCK_T, K) of each."""
    BITS: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth
    ACC: tl.constexpr = tl.float64 if BITS == 64 else tl.float32
    BIASED: tl.constexpr = bias_ptr is not None
    PACKED: tl.constexpr = BITS == 16 and not BIASED
    LOWEST: tl.constexpr = -(2 ** (63 if BITS == 64 else 31))
    SIZE: tl.constexpr = E // GROUPS
    # Each group begins at a power of two, so a place is not its expert.
    place = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]  # (1, BLOCK_E)
    offs_e = place // BLOCK_S * SIZE + place % BLOCK_S
    there = (place // BLOCK_S < GROUPS) & (place % BLOCK_S < SIZE)
    x = tl.load(rows + offs_e, mask=there, other=-float("inf"))
    wide = x.to(ACC)  # (BLOCK_T, BLOCK_E)
    # Scores rise with logits, so without a bias the logits are compared.
    key = _moe_routing_key(x)
    if BIASED:
        if SIGMOID:
            score = _moe_routing_sigmoid(wide)
        else:
            score = tl.exp(wide - tl.max(wide, axis=1, keep_dims=True))
            score = score / tl.sum(score, axis=1, keep_dims=True)
        bias = tl.load(bias_ptr + offs_e, mask=there, other=0).to(ACC)
        key = _moe_routing_key(score + bias)
    if PACKED:
        # A key of 16 bits and its place fit into one word.
        key = (key << 16) | (0xFFFF - place)
    key = tl.where(there, key, LOWEST)
    if TOP < GROUPS:
        kept = _moe_routing_groups(key, BLOCK_G, BLOCK_S, TOP, BIASED)
        key = tl.where(kept, key, LOWEST)
    offs_k = tl.arange(0, K)[None, :]  # (1, K)
    chosen = tl.zeros((x.shape[0], K), dtype=tl.int32)
    for j in tl.static_range(k):
        best = tl.max(key, axis=1, keep_dims=True)  # (BLOCK_T, 1)
        if PACKED:
            first = 0xFFFF - (best & 0xFFFF)
        else:
            # The first of equals
            first = tl.where(key == best, place, BLOCK_G * BLOCK_S)
            first = tl.min(first, axis=1, keep_dims=True)
        chosen = tl.where(offs_k == j, first, chosen)
        key = tl.where(place == first, LOWEST, key)
    chosen = chosen // BLOCK_S * SIZE + chosen % BLOCK_S
    # Loaded again, as a key may have a bias; the cache has them.
    y = tl.load(rows + chosen).to(ACC)  # (BLOCK_T, K)
    if RENORMALIZE:
        wide = tl.where(offs_k < k, y, -float("inf"))
    if SIGMOID:
        weights = _moe_routing_sigmoid(y)
        total = 1.0
        if RENORMALIZE:
            total = _moe_routing_sigmoid(wide)
            total = tl.sum(total, axis=1, keep_dims=True)
    else:
        largest = tl.max(wide, axis=1, keep_dims=True)
        weights = tl.exp(y - largest)
        total = tl.sum(tl.exp(wide - largest), axis=1, keep_dims=True)
    return weights / total * SCALE, chosen


@triton.jit
def _moe_routing_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    T,
    stride,
    BLOCK_T: tl.constexpr,
    E: tl.constexpr,
    k: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_t = pid * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # (BLOCK_T, 1)
    # Clamp to the last token: it is routed again, and the same is stored.
    offs_t = tl.minimum(offs_t, T - 1)
    weights, chosen = _moe_routing_choose(
        logits_ptr + offs_t * stride,
        bias_ptr,
        E,
        k,
        SIGMOID,
        RENORMALIZE,
        SCALE,
        GROUPS,
        TOP,
        K,
        BLOCK_G,
        BLOCK_S,
    )
    offs_k = tl.arange(0, K)[None, :]  # (1, K)
    pair = offs_t * k + offs_k  # (BLOCK_T, K)
    tl.store(weights_ptr + pair, weights, mask=offs_k < k)
    tl.store(experts_ptr + pair, chosen, mask=offs_k < k)


@triton.jit
def _moe_routing_one_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    T,
    stride,
    BLOCK_T: tl.constexpr,
    E: tl.constexpr,
    k: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_t = tl.arange(0, BLOCK_T)[:, None]  # (BLOCK_T, 1)
    rows = tl.minimum(offs_t, T - 1).to(tl.int64) * stride
    weights, chosen = _moe_routing_choose(
        logits_ptr + rows,
        bias_ptr,
        E,
        k,
        SIGMOID,
        RENORMALIZE,
        SCALE,
        GROUPS,
        TOP,
        K,
        BLOCK_G,
        BLOCK_S,
    )
    offs_k = tl.arange(0, K)[None, :]  # (1, K)
    pair = offs_t * k + offs_k  # (BLOCK_T, K)
    mask = (offs_t < T) & (offs_k < k)
    tl.store(weights_ptr + pair, weights, mask=mask)
    tl.store(experts_ptr + pair, chosen, mask=mask)
    # Words are in the order of experts, and of pairs within an expert. Those of
    # no pair are past all others.
    R = T * k
    word = tl.where(mask, chosen * R + pair, E * R)
    word = tl.reshape(word, (BLOCK_T * K,))
    pair = tl.reshape(pair, (BLOCK_T * K,))
    mask = tl.reshape(mask, (BLOCK_T * K,))
    smaller = word[:, None] < word[None, :]
    place = tl.sum(smaller.to(tl.int32), axis=0)  # (BLOCK_T * K,)
    tl.store(inverse_ptr + pair, place, mask=mask)
    tl.store(order_ptr + place, pair, mask=mask)
    offs_e = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    smaller = word[:, None] < ((offs_e + 1) * R)[None, :]
    ends = tl.sum(smaller.to(tl.int32), axis=0)
    tl.store(offsets_ptr + offs_e, ends, mask=offs_e < E)


@triton.jit
def _moe_routing_load(experts_ptr, offs, R, E):
    """Return experts; those that are none are E, and so is what is masked."""
    e = tl.load(experts_ptr + offs, mask=offs < R, other=E)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit
def _moe_routing_few_kernel(
    experts_ptr,
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    R,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    # How many words are smaller: than that of a pair, which is its place, or
    # than the first that an expert may not have, which is the expert's end.
    query = tl.program_id(axis=0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    mine = _moe_routing_load(experts_ptr, query, R, E) * R + query
    mine = tl.where(query < R, mine, (query - R + 1) * R)  # (BLOCK_Q,)
    place = tl.zeros((BLOCK_Q,), dtype=tl.int32)
    for first in range(0, R, BLOCK_R):
        offs = first + tl.arange(0, BLOCK_R)
        word = _moe_routing_load(experts_ptr, offs, R, E) * R + offs
        smaller = word[:, None] < mine[None, :]  # (BLOCK_R, BLOCK_Q)
        place += tl.sum(smaller.to(tl.int32), axis=0)
    tl.store(inverse_ptr + query, place, mask=query < R)
    tl.store(order_ptr + place, query, mask=query < R)
    mask = (query >= R) & (query < R + E)
    tl.store(offsets_ptr + query - R, place, mask=mask)


@triton.jit
def _moe_routing_count_kernel(
    experts_ptr,
    counts_ptr,
    R,
    E,
    PAIRS,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    end = tl.minimum(pid * PAIRS + PAIRS, R)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(pid * PAIRS, end, BLOCK_R):
        offs = first + tl.arange(0, BLOCK_R)
        e = _moe_routing_load(experts_ptr, offs, end, E)  # (BLOCK_R,)
        counts += tl.histogram(e, BLOCK_E, mask=e < E)
    tl.store(counts_ptr + pid * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit
def _moe_routing_place_kernel(
    experts_ptr,
    counts_ptr,
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    R,
    E,
    PAIRS,
    blocks,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    offs_e = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)  # in blocks before this one
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)[:, None]  # (BLOCK_B, 1)
        ptrs = counts_ptr + block * BLOCK_E + offs_e[None, :]
        counts = tl.load(ptrs, mask=block < blocks, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(block < pid, counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if pid == 0:
        tl.store(offsets_ptr + offs_e, ends, mask=offs_e < E)
    next_place = ends - total + before  # of each expert
    # Pairs without an expert come last.
    outside = tl.sum(total) + pid * PAIRS - tl.sum(before)
    for first in range(
        pid * PAIRS, tl.minimum(pid * PAIRS + PAIRS, R), BLOCK_R
    ):
        offs = first + tl.arange(0, BLOCK_R)  # (BLOCK_R,)
        e = _moe_routing_load(experts_ptr, offs, R, E)
        # A pair's rank: how many pairs before it have the same expert
        same = e[:, None] == e[None, :]
        earlier = offs[:, None] < offs[None, :]
        rank = tl.sum((same & earlier).to(tl.int32), axis=0)
        there = e < E
        start = tl.gather(next_place, tl.where(there, e, 0), axis=0)
        place = tl.where(there, start, outside) + rank
        tl.store(inverse_ptr + offs, place, mask=offs < R)
        tl.store(order_ptr + place, offs, mask=offs < R)
        counts = tl.histogram(e, BLOCK_E, mask=there)
        next_place += counts
        outside += BLOCK_R - tl.sum(counts)


@triton.jit
def _moe_routing_backward_kernel(
    grad_ptr,
    logits_ptr,
    experts_ptr,
    out_ptr,
    T,
    stride,
    E: tl.constexpr,
    k: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    BITS: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth
    ACC: tl.constexpr = tl.float64 if BITS == 64 else tl.float32
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_t = pid * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # (BLOCK_T, 1)
    offs_t = tl.minimum(offs_t, T - 1)
    offs_e = tl.arange(0, BLOCK_E)[None, :]  # (1, BLOCK_E)
    ptrs = logits_ptr + offs_t * stride + offs_e
    x = tl.load(ptrs, mask=offs_e < E, other=-float("inf")).to(ACC)
    # Each weight's gradient at its expert
    grad = tl.zeros((BLOCK_T, BLOCK_E), dtype=ACC)
    chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
    for j in tl.static_range(k):
        here = offs_e == tl.load(experts_ptr + offs_t * k + j)
        grad = tl.where(here, tl.load(grad_ptr + offs_t * k + j), grad)
        chosen = chosen | here
    if RENORMALIZE:
        x = tl.where(chosen, x, -float("inf"))
    if SIGMOID:
        score = _moe_routing_sigmoid(x)
        weights, total = score, 1.0
        if RENORMALIZE:
            total = tl.sum(score, axis=1, keep_dims=True)
            weights = score / total
            grad -= tl.sum(grad * weights, axis=1, keep_dims=True)
        out = grad * weights * (1 - score)
    else:
        weights = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        weights = weights / tl.sum(weights, axis=1, keep_dims=True)
        grad -= tl.sum(grad * weights, axis=1, keep_dims=True)
        out = grad * weights
    out = (out * SCALE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_t * E + offs_e, out, mask=offs_e < E)


def _moe_routing_plan(
    name, logits, k, score, bias, groups, top_groups, renormalize, scale
):
    """Return the constants of a launch; raise for what the op does not take."""
    if logits.dtype not in MOE_ROUTING_FLOATS:
        raise TypeError(f"{name} takes float logits, not {logits.dtype}")
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MOE_ROUTING_EXPERTS:
        raise ValueError(
            f"{name} takes logits of (tokens, experts), of up to "
            f"{MOE_ROUTING_EXPERTS} experts, not {tuple(logits.shape)}"
        )
    E, k, groups = int(logits.shape[1]), int(k), int(groups)
    top = groups if top_groups is None else int(top_groups)
    if score not in ("softmax", "sigmoid"):
        raise ValueError(
            f"{name} takes the scores softmax and sigmoid, not {score}"
        )
    if groups < 1 or E % groups or not 1 <= top <= groups:
        raise ValueError(
            f"{name} takes groups that divide {E} experts, and top_groups from "
            f"1 to all, not {groups} and {top_groups}"
        )
    most = min(MOE_ROUTING_CHOICES, top * (E // groups))
    if not 1 <= k <= most:
        raise ValueError(f"{name} takes k from 1 to {most} here, not {k}")
    if bias is not None:
        fits = bias.dtype in MOE_ROUTING_FLOATS and bias.device == logits.device
        if not fits or bias.shape != (E,):
            raise ValueError(
                f"{name} takes a float bias of ({E},) on {logits.device}, not "
                f"{bias.dtype} of {tuple(bias.shape)} on {bias.device}"
            )
        if top < groups and groups == E:
            raise ValueError(
                f"{name} scores a group by its best two where there is a bias, "
                "and takes groups of two experts or more"
            )
    # Without a choice among them, groups are none.
    groups, top = (groups, top) if top < groups else (1, 1)
    return {
        "E": E,
        "k": k,
        "SIGMOID": score == "sigmoid",
        "RENORMALIZE": bool(renormalize),
        "SCALE": float(scale),
        "GROUPS": groups,
        "TOP": top,
        "K": triton.next_power_of_2(k),
        "BLOCK_G": triton.next_power_of_2(groups),
        "BLOCK_S": triton.next_power_of_2(E // groups),
    }


def _moe_routing_rows(logits, bias, k):
    """Return logits whose rows are contiguous, the bias, and empty results."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.new_empty((logits.shape[0], k), dtype=wide)
    experts = logits.new_empty((logits.shape[0], k), dtype=torch.int32)
    bias = None if bias is None else bias.contiguous()
    return (logits, bias, weights, experts)


def _moe_routing_launch(
    logits,
    k,
    score="softmax",
    bias=None,
    groups=1,
    top_groups=None,
    renormalize=True,
    scale=1.0,
    kernel=_moe_routing_kernel,
):
    options = score, bias, groups, top_groups, renormalize, scale
    plan = _moe_routing_plan("moe_routing", logits, k, *options)
    tensors = _moe_routing_rows(logits, bias, plan["k"])
    return _moe_routing_route(tensors, plan, kernel)


def _moe_routing_route(tensors, plan, kernel):
    """Launch for any number of tokens; return weights and experts."""
    logits, _, weights, experts = tensors
    T = logits.shape[0]
    if T > 0:
        BLOCK_E = plan["BLOCK_G"] * plan["BLOCK_S"]
        # One warp reduces whole rows, without a barrier.
        BLOCK_T = max(1, MOE_ROUTING_TILE // BLOCK_E)
        sizes = T, logits.stride(0), BLOCK_T
        grid = (triton.cdiv(T, BLOCK_T),)
        # Triton launches on the current GPU, which may not be that of logits.
        with torch.accelerator.device_index(logits.device.index):
            kernel[grid](*tensors, *sizes, **plan, num_warps=1)
    return weights, experts


def _moe_routing_backward_launch(
    grad,
    logits,
    experts,
    score,
    renormalize,
    scale,
    kernel=_moe_routing_backward_kernel,
):
    T, E = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = logits.new_empty((T, E))
    if T > 0:
        BLOCK_E = triton.next_power_of_2(int(E))
        BLOCK_T = max(1, MOE_ROUTING_TILE // BLOCK_E)
        tensors = grad.contiguous(), logits, experts, out
        with torch.accelerator.device_index(logits.device.index):
            kernel[(triton.cdiv(T, BLOCK_T),)](
                *tensors,
                T,
                logits.stride(0),
                E=int(E),
                k=int(experts.shape[1]),
                SIGMOID=score == "sigmoid",
                RENORMALIZE=renormalize,
                SCALE=float(scale),
                BLOCK_T=BLOCK_T,
                BLOCK_E=BLOCK_E,
                num_warps=1,
            )
    return out


def _moe_routing_places(experts, E):
    """Return the order, its inverse and the offsets of choices, unwritten."""
    R = experts.numel()
    if R > MOE_ROUTING_PAIRS:
        raise ValueError(
            f"moe_routing_permutation takes up to 2**30 choices, not {R}"
        )
    sizes = R, R, E
    return tuple(experts.new_empty(n, dtype=torch.int32) for n in sizes)


def _moe_routing_permutation_launch(experts, num_experts):
    if experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "moe_routing_permutation takes experts of int32 or int64, not "
            f"{experts.dtype}"
        )
    if not 1 <= num_experts <= MOE_ROUTING_EXPERTS:
        raise ValueError(
            "moe_routing_permutation takes from 1 to "
            f"{MOE_ROUTING_EXPERTS} experts, not {num_experts}"
        )
    experts, E = experts.contiguous(), int(num_experts)
    places = _moe_routing_places(experts, E)
    R = experts.numel()
    if R == 0:
        places[2].zero_()
        return places
    with torch.accelerator.device_index(experts.device.index):
        if R <= MOE_ROUTING_FEW:
            BLOCK_R = 256 if R <= 256 else 1024
            _moe_routing_few_kernel[(triton.cdiv(R + E, 32),)](
                experts, *places, R, E, BLOCK_R, BLOCK_Q=32, num_warps=8
            )
            return places
        BLOCK_R, BLOCK_E = MOE_ROUTING_CHUNK, triton.next_power_of_2(E)
        PAIRS = BLOCK_R * triton.cdiv(R, BLOCK_R * MOE_ROUTING_BLOCKS)
        blocks = triton.cdiv(R, PAIRS)
        counts = experts.new_empty((blocks, BLOCK_E), dtype=torch.int32)
        _moe_routing_count_kernel[(blocks,)](
            experts, counts, R, E, PAIRS, BLOCK_R=1024, BLOCK_E=BLOCK_E
        )
        _moe_routing_place_kernel[(blocks,)](
            experts,
            counts,
            *places,
            R,
            E,
            PAIRS,
            blocks,
            BLOCK_B=max(1, 8192 // BLOCK_E),
            BLOCK_R=BLOCK_R,
            BLOCK_E=BLOCK_E,
        )
    return places


def _moe_routing_with_permutation_launch(
    logits,
    k,
    score="softmax",
    bias=None,
    groups=1,
    top_groups=None,
    renormalize=True,
    scale=1.0,
):
    options = score, bias, groups, top_groups, renormalize, scale
    name = "moe_routing_with_permutation"
    plan = _moe_routing_plan(name, logits, k, *options)
    tensors = _moe_routing_rows(logits, bias, plan["k"])
    logits, _, weights, experts = tensors
    T, E = logits.shape[0], plan["E"]
    BLOCK_T, BLOCK_E = triton.next_power_of_2(T), triton.next_power_of_2(E)
    R = BLOCK_T * plan["K"]
    compared = R * max(R, BLOCK_E)
    if T == 0 or compared > MOE_ROUTING_ONE:
        _moe_routing_route(tensors, plan, _moe_routing_kernel)
        places = _moe_routing_permutation_launch(experts, E)
        return weights, experts, *places
    places = _moe_routing_places(experts, E)
    sizes = T, logits.stride(0), BLOCK_T
    warps = max(1, compared // 4096)
    with torch.accelerator.device_index(logits.device.index):
        _moe_routing_one_kernel[(1,)](
            *tensors, *places, *sizes, **plan, BLOCK_E=BLOCK_E, num_warps=warps
        )
    return weights, experts, *places


@triton_op(f"{MOE_ROUTING_NAMESPACE}::moe_routing", mutates_args={})
def moe_routing(
    logits: torch.Tensor,
    k: int,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the experts of each token, the best one first.

    Takes ``logits`` of (tokens, experts), float16, bfloat16, float32 or
    float64, of any strides, with up to 1024 experts, and ``k`` of up to 32. The
    ``score`` of an expert is the softmax of the logits or their sigmoid. The k
    experts with the largest ``score + bias`` are chosen; ``bias`` is of
    (experts,), and serves for the choice alone. Of equals, the lower expert is
    chosen first; without a bias the logits are compared, which are equal less
    often than scores.

    Experts may be in ``groups`` of neighbours, all of one size. Then a token's
    experts come from its best ``top_groups`` groups. A group counts as much as
    its best expert, or, where there is a bias, as the sum of its best two, as
    in DeepSeek-V3 (Liu et al., 2024, arXiv:2412.19437).

    The weights are the scores, with ``renormalize`` divided by their sum, times
    ``scale``. So a renormalized softmax is that of the chosen logits alone. The
    weights are float32, or float64 for float64, and the experts int32, both of
    (tokens, k), contiguous and deterministic.

    NaN is the largest: such an expert is chosen first. Its weight is NaN, and
    so are all weights of the token, but for a sigmoid without ``renormalize``.
    If all chosen scores are 0, the renormalized weights are NaN. In any case
    the experts of a token differ and are in range.

    The weights have a gradient with respect to the logits, which has none
    itself; nothing else has a gradient. Raises TypeError for other dtypes, and
    ValueError for other sizes and options.

    Rounding: all is in float32, or in float64 for float64.
    """
    kernel = wrap_triton(_moe_routing_kernel)
    options = bias, groups, top_groups, renormalize, scale
    return _moe_routing_launch(logits, k, score, *options, kernel)


@triton_op(f"{MOE_ROUTING_NAMESPACE}::moe_routing_backward", mutates_args={})
def moe_routing_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    experts: torch.Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> torch.Tensor:
    """Return the gradient of the logits, given that of the weights.

    Takes what ``moe_routing`` took and returned.
    """
    kernel = wrap_triton(_moe_routing_backward_kernel)
    options = score, renormalize, scale
    return _moe_routing_backward_launch(grad, logits, experts, *options, kernel)


@custom_op(f"{MOE_ROUTING_NAMESPACE}::moe_routing_permutation", mutates_args=())
def moe_routing_permutation(
    experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how choices are sorted by expert: order, inverse and offsets.

    Takes ``experts`` of any shape, int32 or int64, such as those of
    ``moe_routing``, and up to 1024 of them in ``num_experts``. Choice j of
    token t is number ``t * k + j``. All results are int32:

    * ``order``: the numbers of the choices, sorted by expert; those of an
      expert stay in order. ``x[order // k]`` has the rows of ``x`` sorted.
    * ``inverse``: for each choice its place in the order. Row ``inverse[t * k +
      j]`` of what experts made of sorted rows belongs to choice j of token t.
    * ``offsets``: of (num_experts,), the end of each expert's rows: ``offs`` of
      ``torch.nn.functional.grouped_mm``.

    Choices of an expert outside of [0, num_experts), such as -1, come last, in
    order, and past all offsets. Deterministic, without a gradient; the CPU does
    not wait for the GPU. Raises TypeError for other dtypes, and ValueError for
    other numbers of experts and more than 2**30 choices.
    """
    return _moe_routing_permutation_launch(experts, num_experts)


@custom_op(
    f"{MOE_ROUTING_NAMESPACE}::moe_routing_with_permutation", mutates_args=()
)
def moe_routing_with_permutation(
    logits: torch.Tensor,
    k: int,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Return what ``moe_routing`` does, then order, inverse and offsets.

    That is weights, experts and what ``moe_routing_permutation`` makes of the
    experts; for a few tokens, from one launch. Arguments and gradient are those
    of ``moe_routing``.
    """
    options = bias, groups, top_groups, renormalize, scale
    return _moe_routing_with_permutation_launch(logits, k, score, *options)


@moe_routing_permutation.register_fake
def _moe_routing_permutation_fake(experts, num_experts):
    return _moe_routing_places(experts, num_experts)


@moe_routing_with_permutation.register_fake
def _moe_routing_with_permutation_fake(
    logits,
    k,
    score="softmax",
    bias=None,
    groups=1,
    top_groups=None,
    renormalize=True,
    scale=1.0,
):
    _, _, weights, experts = _moe_routing_rows(logits, bias, k)
    places = _moe_routing_places(experts, logits.shape[1])
    return weights, experts, *places


# On a GPU a call goes to the launcher; all else goes on to the op.
MOE_ROUTING_LIBRARY = Library(MOE_ROUTING_NAMESPACE, "FRAGMENT")
MOE_ROUTING_LIBRARY.impl("moe_routing", _moe_routing_launch, "CUDA")
MOE_ROUTING_LIBRARY.impl(
    "moe_routing_backward", _moe_routing_backward_launch, "CUDA"
)
MOE_ROUTING_LIBRARY.impl(
    "moe_routing_permutation", _moe_routing_permutation_launch, "CUDA"
)
MOE_ROUTING_LIBRARY.impl(
    "moe_routing_with_permutation", _moe_routing_with_permutation_launch, "CUDA"
)


def _moe_routing_setup(ctx, inputs, output):
    logits, _, score, _, _, _, renormalize, scale = inputs
    _, experts, *places = output
    ctx.save_for_backward(logits, experts)
    ctx.options = score, renormalize, scale
    ctx.mark_non_differentiable(experts, *places)


def _moe_routing_gradient(ctx, grad, *_):
    grad = moe_routing_backward(grad, *ctx.saved_tensors, *ctx.options)
    return grad, None, None, None, None, None, None, None


moe_routing.register_autograd(
    _moe_routing_gradient, setup_context=_moe_routing_setup
)
moe_routing_with_permutation.register_autograd(
    _moe_routing_gradient, setup_context=_moe_routing_setup
)
