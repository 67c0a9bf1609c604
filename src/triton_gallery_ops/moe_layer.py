"""A mixture-of-experts (MoE) layer: each token goes through a few networks.

``moe_layer`` takes tokens, the weights and experts of ``moe_routing``, and the
weights of all experts as the models of transformers hold them. It sorts the
choices by expert. One launch then loads the tokens of each expert from where
they lie, multiplies them by gate and up, and applies SwiGLU; a grouped product
multiplies by down; and the last launch adds up each token's results in the
order of its choices. Nothing waits for the GPU, and a choice outside of the
experts adds nothing, so a GPU may hold some of the experts. For a few tokens,
as in decoding, there is no sort: the time is that of reading the weights of
the chosen experts. For the backward, gate and up are kept in the dtype of x,
and nothing else that is as large. Deterministic. No second derivatives.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_gallery_ops.grouped_matmul import (
    GROUPED_MATMUL_ACC,
    _grouped_matmul_before,
    _grouped_matmul_begin,
    _grouped_matmul_descriptor,
    _grouped_matmul_dot,
    _grouped_matmul_find,
    _grouped_matmul_fits,
    _grouped_matmul_gpu,
    _grouped_matmul_launch,
    _grouped_matmul_plan,
    _grouped_matmul_ragged,
    _grouped_matmul_sums_launch,
    _grouped_matmul_vec,
)
from triton_gallery_ops.moe_routing import (
    MOE_ROUTING_EXPERTS,
    _moe_routing_permutation_launch,
)

MOE_LAYER_NAMESPACE = "triton_gallery"
# Whether the first product loads rows of x from where they lie. Otherwise they
# are copied in the order of experts, and the copy engine loads the copies.
MOE_LAYER_GATHER = True
MOE_LAYER_FEW = 2  # choices of an expert, which are not sorted if none is kept
MOE_LAYER_ROWS = 16  # of an expert that a program takes, of a few choices
# BLOCK_N, BLOCK_K, warps and stages of these: of products with down, and of
# those with gate and up
MOE_LAYER_FEW_TILES = [(64, 128, 4, 3), (32, 128, 4, 3)]
MOE_LAYER_FEW_WIDE = (16, 32, 4, 3)  # of float32 and float64
MOE_LAYER_SUM = 1024  # columns of a program


@triton.jit
def _moe_layer_swiglu(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["R"])
def _moe_layer_engine_kernel(
    x_ptr,  # rows of tokens; None where x_desc has them in order
    x_desc,
    weight_desc,  # of (E, 2, F, H)
    h_desc,  # ragged: it stores the rows of one expert alone
    gate_desc,  # ragged, None if nothing is kept
    up_desc,
    order_ptr,
    offsets_ptr,
    E,
    R,
    k,
    stride_xt,
    VEC: tl.constexpr,  # what divides it and H
    BLOCK_E: tl.constexpr,
):
    F, H = weight_desc.shape[2], weight_desc.shape[3] // VEC * VEC
    BLOCK_M: tl.constexpr = h_desc.block_shape[2]
    BLOCK_N: tl.constexpr = h_desc.block_shape[3]
    BLOCK_K: tl.constexpr = weight_desc.block_shape[3]
    stride_xt = stride_xt // VEC * VEC
    tiles_n = tl.cdiv(F, BLOCK_N)
    before, tiles = _grouped_matmul_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, tiles, programs, flatten=True):
        expert, pid_m, pid_n, start, rows = _grouped_matmul_find(
            tile, before, offsets_ptr, R, tiles_n, BLOCK_M
        )
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        if x_desc is None:
            offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
            order_ptrs = order_ptr + start + offs_m
            # Past the expert's end: choice 0, computed and not stored
            choice = tl.load(order_ptrs, mask=offs_m < rows, other=0)
            # In int32 this would overflow past element 2**31.
            offs_x = (choice // k).to(tl.int64)[:, None] * stride_xt
            x_ptrs = x_ptr + offs_x + offs_k
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for i in range(0, H, BLOCK_K):
            if x_desc is None:  # (BLOCK_M, BLOCK_K)
                x = tl.load(x_ptrs + i, mask=offs_k < H - i, other=0.0)
            else:
                x = x_desc.load([start + off_m, i])
            # The same columns of gate and up, one below the other
            w = weight_desc.load([expert, 0, off_n, i])
            w = w.reshape(2 * BLOCK_N, BLOCK_K).T
            acc = _grouped_matmul_dot(x, w, acc, tl.float32)
        # tl.split takes apart the last dimension.
        both = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)).permute(0, 2, 1)
        gate, up = tl.split(both)  # (BLOCK_M, BLOCK_N)
        a, b, c = _grouped_matmul_ragged(start, rows, off_m)
        if gate_desc is not None:
            kept = gate.to(h_desc.dtype).reshape(1, 1, BLOCK_M, BLOCK_N)
            gate_desc.store([a, b, c, off_n], kept)
            kept = up.to(h_desc.dtype).reshape(1, 1, BLOCK_M, BLOCK_N)
            up_desc.store([a, b, c, off_n], kept)
        h = _moe_layer_swiglu(gate, up).to(h_desc.dtype)
        h_desc.store([a, b, c, off_n], h.reshape(1, 1, BLOCK_M, BLOCK_N))


@triton.jit
def _moe_layer_product(
    x_rows,  # pointers to rows, (BLOCK_M, 1)
    mask_m,
    w_columns,  # pointers to what makes a column of the result, (1, BLOCK_N)
    mask_n,
    K,
    stride_xk,
    stride_wk,
    ACC: tl.constexpr,
    VEC_X: tl.constexpr,  # what divides K, or 1
    VEC_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    gap=None,  # from columns of gate to those of up
):
    """Return one product, or those with gate and up."""
    BLOCK_M: tl.constexpr = x_rows.shape[0]
    BLOCK_N: tl.constexpr = w_columns.shape[1]
    K_X, K_W = K // VEC_X * VEC_X, K // VEC_W * VEC_W
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    other = acc
    for i in range(0, K, BLOCK_K):
        # In int32 a product with a stride would overflow past element 2**31.
        offs = (i + offs_k).to(tl.int64)
        x_mask = mask_m[:, None] & (offs_k < K_X - i)[None, :]
        w_mask = (offs_k < K_W - i)[:, None] & mask_n[None, :]
        x_ptrs = x_rows + offs[None, :] * stride_xk
        w_ptrs = w_columns + offs[:, None] * stride_wk
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        acc = _grouped_matmul_dot(x, w, acc, ACC)
        if gap is not None:
            w = tl.load(w_ptrs + gap, mask=w_mask, other=0.0)
            other = _grouped_matmul_dot(x, w, other, ACC)
    return acc, other


@triton.jit(do_not_specialize=["R"])
def _moe_layer_pointers_kernel(
    x_ptr,
    weight_ptr,  # to (E, 2 F, H), of any strides
    h_ptr,
    kept_ptr,  # to (2, R, F), None if nothing is kept
    order_ptr,
    offsets_ptr,
    E,
    R,
    k,
    H,
    F,
    stride_xt,
    stride_xh,
    stride_we,
    stride_wn,
    stride_wh,
    ACC: tl.constexpr,
    VEC_X: tl.constexpr,  # what divides H and the strides of rows, or 1
    VEC_W: tl.constexpr,
    VEC_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # The compiler learns only here that rows begin at multiples of 16 bytes.
    stride_xt = stride_xt // VEC_X * VEC_X
    stride_we = stride_we // VEC_W * VEC_W
    stride_wn = stride_wn // VEC_W * VEC_W
    F_H = F // VEC_H * VEC_H
    tiles_n = tl.cdiv(F, BLOCK_N)
    before, tiles = _grouped_matmul_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    gap = tl.cast(F, tl.int64) * stride_wn
    for tile in range(first, tiles, programs):
        expert, pid_m, pid_n, start, rows = _grouped_matmul_find(
            tile, before, offsets_ptr, R, tiles_n, BLOCK_M
        )
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask_m, mask_n = offs_m < rows, offs_n < F_H
        choice = tl.load(order_ptr + start + offs_m, mask=mask_m, other=0)
        x_rows = x_ptr + (choice // k).to(tl.int64)[:, None] * stride_xt
        w_columns = weight_ptr + expert.to(tl.int64) * stride_we
        w_columns += offs_n.to(tl.int64)[None, :] * stride_wn
        gate, up = _moe_layer_product(
            x_rows,
            mask_m,
            w_columns,
            mask_n,
            H,
            stride_xh,
            stride_wh,
            ACC,
            VEC_X,
            VEC_W,
            BLOCK_K,
            gap,
        )
        offs = (start + offs_m).to(tl.int64)[:, None] * F_H + offs_n[None, :]
        mask = mask_m[:, None] & mask_n[None, :]
        if kept_ptr is not None:
            up_ptr = kept_ptr + tl.cast(R, tl.int64) * F_H
            tl.store(kept_ptr + offs, gate.to(h_ptr.dtype.element_ty), mask)
            tl.store(up_ptr + offs, up.to(h_ptr.dtype.element_ty), mask)
        h = _moe_layer_swiglu(gate, up)  # (BLOCK_M, BLOCK_N)
        tl.store(h_ptr + offs, h.to(h_ptr.dtype.element_ty), mask)


@triton.jit
def _moe_layer_few_kernel(
    x_ptr,
    weight_ptr,  # of any strides
    out_ptr,
    experts_ptr,
    R,
    E,
    DIV,  # choices that have one row of x
    K,
    N,
    stride_xr,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    ACC: tl.constexpr,
    GATED: tl.constexpr,  # weight has gate, then up
    VEC_X: tl.constexpr,  # what divides K and the strides of rows, or 1
    VEC_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    stride_xr = stride_xr // VEC_X * VEC_X
    stride_we = stride_we // VEC_W * VEC_W
    stride_wn = stride_wn // VEC_W * VEC_W
    # Each choice has programs. Of an expert's choices, the first one has the
    # work of BLOCK_M of them, and so has each that is BLOCK_M later.
    r = tl.program_id(axis=1)
    expert = tl.load(experts_ptr + r)
    offs_r = tl.arange(0, BLOCK_R)  # (BLOCK_R,)
    of_all = tl.load(experts_ptr + offs_r, mask=offs_r < R, other=-1)
    same = (of_all == expert).to(tl.int32)
    earlier = tl.sum(tl.where(offs_r < r, same, 0), axis=0)
    if (expert >= 0) & (expert < E) & (earlier % BLOCK_M == 0):
        place = tl.cumsum(same, axis=0) - earlier - 1  # (BLOCK_R,)
        offs_m = tl.arange(0, BLOCK_M)[:, None]
        mine = (same > 0)[None, :] & (place[None, :] == offs_m)
        choice = tl.max(tl.where(mine, offs_r[None, :], -1), axis=1)
        mask_m = choice >= 0  # (BLOCK_M,)
        offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        # In int32 a product with a stride would overflow past element 2**31.
        offs_x = (choice // DIV).to(tl.int64)[:, None] * stride_xr
        w_columns = weight_ptr + expert.to(tl.int64) * stride_we
        w_columns += offs_n.to(tl.int64)[None, :] * stride_wn
        gap = tl.cast(N, tl.int64) * stride_wn
        out, up = _moe_layer_product(
            x_ptr + offs_x,
            mask_m,
            w_columns,
            mask_n,
            K,
            stride_xk,
            stride_wk,
            ACC,
            VEC_X,
            VEC_W,
            BLOCK_K,
            gap if GATED else None,
        )
        if GATED:
            out = _moe_layer_swiglu(out, up)
        out_ptrs = out_ptr + choice.to(tl.int64)[:, None] * N + offs_n[None, :]
        out = out.to(out_ptr.dtype.element_ty)  # (BLOCK_M, BLOCK_N)
        tl.store(out_ptrs, out, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _moe_layer_sum_kernel(
    y_ptr,
    experts_ptr,
    weights_ptr,  # None for a sum without weights
    inverse_ptr,  # None where y has the order of choices
    out_ptr,
    E,
    H,
    tiles_n,
    ACC: tl.constexpr,
    VEC: tl.constexpr,  # what divides H
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    H = H // VEC * VEC
    pid = tl.program_id(axis=0)
    token = (pid // tiles_n).to(tl.int64)
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    acc = tl.zeros((BLOCK_N,), dtype=ACC)
    # In this order in each run: the rounding is the same.
    for j in tl.static_range(CHOICES):
        place = token * CHOICES + j
        expert = tl.load(experts_ptr + place)
        some = (expert >= 0) & (expert < E)
        weight = tl.cast(1.0, ACC)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + place).to(ACC)
        if inverse_ptr is not None:
            place = tl.load(inverse_ptr + place).to(tl.int64)
        y_ptrs = y_ptr + place * H + offs_n
        end = tl.where(some, H, 0)
        y = tl.load(y_ptrs, mask=offs_n < end, other=0.0).to(ACC)
        acc += tl.where(some, weight * y, 0.0)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + offs_n, out, mask=offs_n < H)


@triton.jit(do_not_specialize=["R"])
def _moe_layer_backward_kernel(
    grad_ptr,  # of what down multiplies, but for the weight of the choice
    kept_ptr,
    weights_ptr,
    order_ptr,
    offsets_ptr,
    d_ptr,  # to the gradients of gate and up, (R, 2 F)
    h_ptr,  # to what down multiplies, times the weight
    d_weights_ptr,
    R,
    E,
    F,
    ACC: tl.constexpr,
    VEC: tl.constexpr,  # what divides F
    BLOCK_N: tl.constexpr,
):
    F = F // VEC * VEC
    row = tl.program_id(axis=0).to(tl.int64)
    choice = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + choice).to(ACC)
    # Rows past the last expert are of no choice that an expert computes.
    end = tl.where(row < tl.load(offsets_ptr + E - 1), F, 0)
    gates_ptr = kept_ptr + row * F
    ups_ptr = gates_ptr + tl.cast(R, tl.int64) * F
    total = tl.zeros((BLOCK_N,), dtype=ACC)
    for n in range(0, end, BLOCK_N):
        offs = n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = offs < F
        gate = tl.load(gates_ptr + offs, mask=mask, other=0.0).to(ACC)
        up = tl.load(ups_ptr + offs, mask=mask, other=0.0).to(ACC)
        grad = tl.load(grad_ptr + row * F + offs, mask=mask, other=0.0).to(ACC)
        # Recomputed: an exponential, but no byte moved
        s = tl.sigmoid(gate)
        h = gate * s * up
        total += grad * h
        grad *= weight
        d_gate = grad * up * s * (1 + gate * (1 - s))
        d_ptrs = d_ptr + row * 2 * F + offs
        tl.store(d_ptrs, d_gate.to(d_ptr.dtype.element_ty), mask=mask)
        d_up = (grad * gate * s).to(d_ptr.dtype.element_ty)
        tl.store(d_ptrs + F, d_up, mask=mask)
        h = (weight * h).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * F + offs, h, mask=mask)
    d_weight = tl.sum(total, axis=0).to(d_weights_ptr.dtype.element_ty)
    tl.store(d_weights_ptr + choice, d_weight)


def _moe_layer_check(x, weights, experts, gate_up, down):
    """Raise for what the op does not take."""
    kinds = x.dtype, gate_up.dtype, down.dtype
    if len(set(kinds)) > 1 or x.dtype not in GROUPED_MATMUL_ACC:
        raise TypeError(
            "moe_layer takes x, gate_up and down of one float dtype, not "
            f"{', '.join(map(str, kinds))}"
        )
    if weights.dtype not in GROUPED_MATMUL_ACC:
        raise TypeError(f"moe_layer takes float weights, not {weights.dtype}")
    if experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"moe_layer takes experts of int32 or int64, not {experts.dtype}"
        )
    devices = [t.device for t in (x, weights, experts, gate_up, down)]
    if len(set(devices)) > 1:
        raise ValueError(
            "moe_layer takes tensors on one device, not on "
            f"{', '.join(map(str, devices))}"
        )
    shapes = [tuple(t.shape) for t in (x, weights, experts)]
    if [len(s) for s in shapes] != [2, 2, 2] or shapes[1] != shapes[2]:
        shapes[0] = None
    if shapes[0] is None or x.shape[0] != experts.shape[0]:
        raise ValueError(
            "moe_layer takes x (T, H), weights (T, k) and experts (T, k), not "
            f"{tuple(x.shape)}, {tuple(weights.shape)} and "
            f"{tuple(experts.shape)}"
        )
    H, fits = x.shape[1], gate_up.ndim == down.ndim == 3
    if fits:
        E, _, F = down.shape
        fits = down.shape[1] == H and gate_up.shape == (E, 2 * F, H)
        fits = fits and 1 <= E <= MOE_ROUTING_EXPERTS
    if not fits:
        raise ValueError(
            f"moe_layer takes gate_up (E, 2 F, {H}) and down (E, {H}, F), of "
            f"1 to {MOE_ROUTING_EXPERTS} experts, not {tuple(gate_up.shape)} "
            f"and {tuple(down.shape)}"
        )


def _moe_layer_sum(y, experts, weights, inverse, E):
    """Return for each token the sum of its rows of y."""
    (T, k), H = experts.shape, y.shape[1]
    out = y.new_empty(T, H)
    BLOCK_N = min(MOE_LAYER_SUM, triton.next_power_of_2(H))
    if T * k <= MOE_LAYER_FEW * E:
        BLOCK_N = min(BLOCK_N, MOE_LAYER_SUM // 4)
    tiles_n = triton.cdiv(H, BLOCK_N)
    _moe_layer_sum_kernel[(T * tiles_n,)](
        *(y, experts, weights, inverse, out, E, H, tiles_n),
        ACC=GROUPED_MATMUL_ACC[y.dtype],
        VEC=_grouped_matmul_vec(y),
        CHOICES=int(k),
        BLOCK_N=BLOCK_N,
    )
    return out


def _moe_layer_few(x, weight, out, experts, gated):
    """Multiply the rows of a few choices, which are not sorted."""
    R, (E, N, K) = experts.numel(), weight.shape
    N = N // 2 if gated else N
    BLOCK_N, BLOCK_K, num_warps, num_stages = MOE_LAYER_FEW_WIDE
    if x.element_size() == 2:
        BLOCK_N, BLOCK_K, num_warps, num_stages = MOE_LAYER_FEW_TILES[gated]
        # Programs would leave multiprocessors idle: twice as many share it.
        if R * triton.cdiv(N, BLOCK_N) < _grouped_matmul_gpu(x.device)[0]:
            BLOCK_N //= 2
    grid = triton.cdiv(N, BLOCK_N), R
    _moe_layer_few_kernel[grid](
        *(x, weight, out, experts, R, E, R // x.shape[0], K, N),
        *x.stride(),
        *weight.stride(),
        ACC=GROUPED_MATMUL_ACC[x.dtype],
        GATED=gated,
        VEC_X=_grouped_matmul_vec(x),
        VEC_W=_grouped_matmul_vec(weight),
        BLOCK_M=MOE_LAYER_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        BLOCK_R=triton.next_power_of_2(R),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _moe_layer_hidden(x, gate_up, order, offsets, k, keep):
    """Return what down multiplies, and gate and up if they are kept."""
    R, (E, F, H) = order.shape[0], gate_up.shape
    F //= 2
    h = x.new_empty(R, F)
    kept = x.new_empty(2, R, F) if keep else x.new_empty(0)
    gpu, size = _grouped_matmul_gpu(x.device), x.element_size()
    vec_x, vec_w = _grouped_matmul_vec(x), _grouped_matmul_vec(gate_up)
    vec_h, vector = _grouped_matmul_vec(h), min(vec_x, vec_w) > 1
    engine = gpu[2] if _grouped_matmul_fits(h, vec_x, vec_w, vec_h) else 0
    sizes = E, R, 2 * F, False, size
    plan = _grouped_matmul_plan(*sizes, gpu, vector, engine)
    programs, (m, n, block_k, num_warps, _), num_stages = plan
    options = {
        "BLOCK_E": triton.next_power_of_2(E),
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    if not engine:
        _moe_layer_pointers_kernel[(programs,)](
            *(x, gate_up, h, kept if keep else None, order, offsets),
            *(E, R, k, H, F, *x.stride(), *gate_up.stride()),
            ACC=GROUPED_MATMUL_ACC[x.dtype],
            VEC_X=vec_x,
            VEC_W=vec_w,
            VEC_H=vec_h,
            BLOCK_M=m,
            BLOCK_N=n // 2,
            BLOCK_K=block_k,
            **options,
        )
        return h, kept
    _grouped_matmul_begin(x.device)
    x_desc, block = None, [m, n // 2]
    if not MOE_LAYER_GATHER:
        x = x.index_select(0, order // k)
        x_desc = TensorDescriptor.from_tensor(x, [m, block_k])
    weight = gate_up.view(E, 2, F, H)
    ragged = [_grouped_matmul_descriptor(t, block) for t in (h, *kept)]
    _moe_layer_engine_kernel[(programs,)](
        None if x_desc else x,
        x_desc,
        TensorDescriptor.from_tensor(weight, [1, 2, n // 2, block_k]),
        *(ragged if keep else (*ragged, None, None)),
        *(order, offsets, E, R, k, x.stride(0)),
        VEC=vec_x,
        **options,
    )
    return h, kept


def _moe_layer_launch(x, weights, experts, gate_up, down, keep=True):
    _moe_layer_check(x, weights, experts, gate_up, down)
    (T, k), (E, _, F) = experts.shape, down.shape
    R = T * k
    if 0 in (R, *x.shape, F):
        kept = x.new_zeros((2, R, F) if keep else (0,))
        return x.new_zeros(x.shape), kept
    experts, weights = experts.contiguous(), weights.contiguous()
    with torch.accelerator.device_index(x.device.index):
        if R <= MOE_LAYER_FEW * E and not keep:
            h, y = x.new_empty(R, F), x.new_empty(R, x.shape[1])
            _moe_layer_few(x, gate_up, h, experts, True)
            _moe_layer_few(h, down, y, experts, False)
            out = _moe_layer_sum(y, experts, weights, None, E)
            return out, x.new_empty(0)
        order, inverse, offsets = _moe_routing_permutation_launch(experts, E)
        h, kept = _moe_layer_hidden(x, gate_up, order, offsets, k, keep)
        y = _grouped_matmul_launch(h, down.mT, offsets)
        return _moe_layer_sum(y, experts, weights, inverse, E), kept


def _moe_layer_backward_launch(
    grad, x, weights, experts, gate_up, down, kept, needs
):
    (T, k), (E, _, F) = experts.shape, down.shape
    R = T * k
    made = [torch.zeros_like(t[:0]) for t in (x, weights, gate_up, down)]
    if 0 in (R, *x.shape, F):
        for place, t in enumerate((x, weights, gate_up, down)):
            made[place] = t.new_zeros(t.shape) if needs[place] else made[place]
        return tuple(made)
    experts, weights = experts.contiguous(), weights.contiguous()
    with torch.accelerator.device_index(x.device.index):
        order, inverse, offsets = _moe_routing_permutation_launch(experts, E)
        tokens = order // k
        grad = grad.index_select(0, tokens)
        by_down = _grouped_matmul_launch(grad, down, offsets)
        d, h = x.new_empty(R, 2 * F), x.new_empty(R, F)
        d_weights = weights.new_empty(T, k)
        _moe_layer_backward_kernel[(R,)](
            *(by_down, kept, weights, order, offsets, d, h, d_weights),
            *(R, E, F),
            ACC=GROUPED_MATMUL_ACC[x.dtype],
            VEC=_grouped_matmul_vec(h),
            BLOCK_N=min(MOE_LAYER_SUM, triton.next_power_of_2(F)),
        )
        # What is not needed any more makes room for what is next.
        del by_down
        if needs[3]:
            made[3] = _grouped_matmul_sums_launch(grad, h, offsets)
        del grad, h
        if needs[2]:
            rows = x.index_select(0, tokens)
            made[2] = _grouped_matmul_sums_launch(d, rows, offsets)
            del rows
        if needs[0]:
            rows = _grouped_matmul_launch(d, gate_up, offsets)
            made[0] = _moe_layer_sum(rows, experts, None, inverse, E)
        if needs[1]:
            made[1] = d_weights
    return tuple(made)


@custom_op(
    f"{MOE_LAYER_NAMESPACE}::moe_layer_with_activations", mutates_args=()
)
def moe_layer_with_activations(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``moe_layer`` does, and what its backward needs.

    That is (2, T * k, F): the products with gate, and those with up, of the
    choices in the order of experts, in the dtype of x. Rows of choices outside
    of the experts are not written. Without ``keep`` it is empty, and there is
    no gradient.
    """
    return _moe_layer_launch(x, weights, experts, gate_up, down, keep)


@moe_layer_with_activations.register_fake
def _moe_layer_fake(x, weights, experts, gate_up, down, keep=True):
    _moe_layer_check(x, weights, experts, gate_up, down)
    shape = (2, experts.numel(), down.shape[2]) if keep else (0,)
    return x.new_empty(x.shape), x.new_empty(shape)


@custom_op(f"{MOE_LAYER_NAMESPACE}::moe_layer_backward", mutates_args=())
def moe_layer_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activations: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weights, gate_up and down.

    Takes the gradient of the result, what ``moe_layer_with_activations`` took
    and kept, and which of the four are needed; the others come empty.
    """
    given = grad, x, weights, experts, gate_up, down, activations, needs
    return _moe_layer_backward_launch(*given)


@moe_layer_backward.register_fake
def _moe_layer_backward_fake(
    grad, x, weights, experts, gate_up, down, activations, needs
):
    tensors = zip((x, weights, gate_up, down), needs, strict=True)
    return tuple(
        t.new_empty(t.shape if needed else t[:0].shape) for t, needed in tensors
    )


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
MOE_LAYER_LIBRARY = Library(MOE_LAYER_NAMESPACE, "FRAGMENT")
MOE_LAYER_LIBRARY.impl("moe_layer_with_activations", _moe_layer_launch, "CUDA")
MOE_LAYER_LIBRARY.impl("moe_layer_backward", _moe_layer_backward_launch, "CUDA")


def _moe_layer_autocast(kind, x, weights, experts, gate_up, down, keep=True):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    x, gate_up, down = (
        t.to(dtype) if t.dtype in casts else t for t in (x, gate_up, down)
    )
    given = x, weights, experts, gate_up, down, keep
    with torch.autocast(kind, enabled=False):
        return moe_layer_with_activations(*given)


for _moe_layer_kind in ("cpu", "cuda"):
    MOE_LAYER_LIBRARY.impl(
        "moe_layer_with_activations",
        partial(_moe_layer_autocast, _moe_layer_kind),
        f"Autocast{_moe_layer_kind.upper()}",
    )


def _moe_layer_setup(ctx, inputs, output):
    *tensors, keep = inputs
    if not keep:
        raise RuntimeError("moe_layer has no gradient where nothing is kept")
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _moe_layer_gradient(ctx, grad, _):
    x, weights, _, gate_up, down = ctx.needs_input_grad[:5]
    needs = [x, weights, gate_up, down]
    made = moe_layer_backward(grad, *ctx.saved_tensors, needs)
    dx, d_weights, d_gate_up, d_down = (
        t if needed else None for t, needed in zip(made, needs, strict=True)
    )
    return dx, d_weights, None, d_gate_up, d_down, None


moe_layer_with_activations.register_autograd(
    _moe_layer_gradient, setup_context=_moe_layer_setup
)


def moe_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Return for each token the weighted sum of what its experts make of it.

    Takes x (T, H), and the weights and experts of ``moe_routing``, (T, k) of a
    float dtype and of int32 or int64. gate_up is (E, 2 F, H), gate first, and
    down (E, H, F), as experts in transformers hold them, of 1 to 1024 experts.
    Token t becomes the sum over j, from 0 to k - 1, of ``weights[t, j] *
    down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))``, where e is ``experts[t,
    j]``. A choice outside of [0, E), such as -1, adds nothing, and its weight
    has a gradient of 0: so each of several GPUs may hold some of the experts.

    x, gate_up and down have one dtype: float16, bfloat16, float32 or float64,
    and any strides. The result (T, H) has it, and is contiguous. The copy
    engine of NVIDIA's GPUs of compute capability 9.0 and more loads the
    weights, if they have 16 bits and rows that begin at multiples of 16 bytes,
    and x has such rows; F and H are then multiples of 8. Everything else goes
    through pointers, on any GPU, and is slower. Deterministic on one kind of
    GPU; the CPU waits for nothing.

    Has gradients of x, weights, gate_up and down, not of their gradients. If
    one of these requires a gradient, the products with gate and up are kept,
    2 T k F numbers of the dtype of x. Raises TypeError for other dtypes, and
    ValueError for other shapes and tensors on two devices. Without a GPU, it
    needs Triton's interpreter, TRITON_INTERPRET=1.

    Rounding: products are summed in float32, or float64 for float64, and so are
    the results of a token. What down multiplies is rounded to the dtype of x,
    and so is what it makes, before the weight. Float32 is not rounded to TF32.

    Under ``torch.autocast`` it casts x, gate_up and down to autocast's dtype.
    """
    tensors = x, weights, gate_up, down
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    op = moe_layer_with_activations
    return op(x, weights, experts, gate_up, down, keep)[0]
