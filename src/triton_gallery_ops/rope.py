"""Rotary position embedding (RoPE) of queries and keys in one kernel.

Rotates each pair of numbers of a head by its token's angle, from tables of cos
and sin: (x1 * cos - x2 * sin, x2 * cos + x1 * sin) (Su et al., 2021,
arXiv:2104.09864). A pair is one number from each half of the head (Llama) or,
interleaved, two neighbors (GPT-J). One launch reads and writes queries and keys
once, in any layout. ``rope`` is its own backward, so it has gradients of any
order, except for the tables. ``rope_`` works in place, to save memory, and has
no backward. All sequences of a batch share the positions. ``kv_cache_write``
rotates keys on their way to a cache. Deterministic.
"""

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton

ROPE_NAMESPACE = "triton_gallery"
ROPE_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# What a program turns: heads, and points of a head at all its positions
ROPE_TILE = 4, 512
# Bytes of the tables that each group of heads goes along in turn
ROPE_NEAR = 2**21


@triton.jit
def _rope_turn(
    x_ptrs,
    y_ptrs,
    rows,
    cos,
    sin,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Turn D numbers of each head in a tile, and copy the REST after them.

    The mask of the tile is rows, (BLOCK_H, BLOCK_T, 1).
    """
    if REST > 0:
        offs_r = tl.arange(0, BLOCK_REST)[None, None, :]
        mask = rows & (offs_r < REST)
        rest = tl.load(x_ptrs + D + offs_r, mask=mask)
        tl.store(y_ptrs + D + offs_r, rest, mask=mask)
    if INTERLEAVED:
        offs_d = tl.arange(0, 2 * BLOCK_D)[None, None, :]
        mask = rows & (offs_d < D)
        x = tl.load(x_ptrs + offs_d, mask=mask).to(cos.dtype)
        # Each thread has whole pairs, so parting them moves nothing.
        pairs = tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_D, 2))
        x1, x2 = tl.split(pairs)  # (BLOCK_H, BLOCK_T, BLOCK_D)
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        tl.store(y_ptrs + offs_d, tl.reshape(y, x.shape), mask=mask)
    else:
        offs_d = tl.arange(0, BLOCK_D)[None, None, :]
        mask = rows & (offs_d < D // 2)
        x1 = tl.load(x_ptrs + offs_d, mask=mask).to(cos.dtype)
        x2 = tl.load(x_ptrs + D // 2 + offs_d, mask=mask).to(cos.dtype)
        tl.store(y_ptrs + offs_d, x1 * cos - x2 * sin, mask=mask)
        tl.store(y_ptrs + D // 2 + offs_d, x2 * cos + x1 * sin, mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    T,
    HEADS_Q,
    HEADS_K,
    NEAR,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_cos_b,
    stride_cos,
    stride_sin_b,
    stride_sin,
    stride_q_out_b,
    stride_q_out_h,
    stride_q_out_t,
    stride_k_out_b,
    stride_k_out_h,
    stride_k_out_t,
    D: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    groups_q = tl.cdiv(HEADS_Q, BLOCK_H)
    groups = groups_q + tl.cdiv(HEADS_K, BLOCK_H)
    # In int32 the products with strides would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    # First NEAR tiles of each group, then the next tiles of each
    tiles = tl.cdiv(T, BLOCK_T)
    b, pid = pid // (tiles * groups), pid % (tiles * groups)
    first = pid // (NEAR * groups) * NEAR
    near = tl.minimum(tiles - first, NEAR)
    pid = pid % (NEAR * groups)
    group, tile = pid // near, first + pid % near
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)[None, :, None]
    offs_d = tl.arange(0, BLOCK_D)[None, None, :]
    mask = (t < T) & (offs_d < D // 2)  # (1, BLOCK_T, BLOCK_D)
    if stride_cos_b is not None:  # each sequence has tables of its own
        cos_ptr += b * stride_cos_b
        sin_ptr += b * stride_sin_b
    cos = tl.load(cos_ptr + t * stride_cos + offs_d, mask=mask).to(ACC)
    sin = tl.load(sin_ptr + t * stride_sin + offs_d, mask=mask).to(ACC)
    if CONJUGATE:
        sin = -sin
    h = group * BLOCK_H + tl.arange(0, BLOCK_H)[:, None, None]
    # All pointers below are (BLOCK_H, BLOCK_T, 1), and so is rows.
    if group < groups_q:
        rows = (h < HEADS_Q) & (t < T)
        x_ptrs = q_ptr + b * stride_qb + h * stride_qh + t * stride_qt
        y_ptrs = q_out_ptr + b * stride_q_out_b
        y_ptrs = y_ptrs + h * stride_q_out_h + t * stride_q_out_t
        _rope_turn(
            x_ptrs,
            y_ptrs,
            rows,
            cos,
            sin,
            D,
            BLOCK_D,
            REST,
            BLOCK_REST,
            INTERLEAVED,
        )
    else:
        h -= groups_q * BLOCK_H
        rows = (h < HEADS_K) & (t < T)
        x_ptrs = k_ptr + b * stride_kb + h * stride_kh + t * stride_kt
        y_ptrs = k_out_ptr + b * stride_k_out_b
        y_ptrs = y_ptrs + h * stride_k_out_h + t * stride_k_out_t
        _rope_turn(
            x_ptrs,
            y_ptrs,
            rows,
            cos,
            sin,
            D,
            BLOCK_D,
            REST,
            BLOCK_REST,
            INTERLEAVED,
        )


def _rope_check(name, q, k, cos, sin):
    """Raise for what the ops do not take."""
    tensors = q, k, cos, sin
    dtypes = [t.dtype for t in tensors]
    if q.dtype != k.dtype or any(dtype not in ROPE_ACC for dtype in dtypes):
        raise TypeError(
            f"{name} takes q and k of one float dtype, and tables of any, "
            f"not {dtypes}"
        )
    devices = [t.device for t in tensors]
    if devices.count(q.device) < 4:
        raise TypeError(f"{name} takes tensors on one device, not {devices}")
    shapes = [tuple(t.shape) for t in tensors]
    fit = False
    if q.ndim == k.ndim == 4 and q.shape[-1] % 2 == 0:
        B, _, T, D = q.shape
        R = cos.shape[-1] if cos.ndim else 0
        fit = (
            shapes[1] == (B, k.shape[1], T, D)
            and shapes[2] == shapes[3]
            and shapes[2] in ((T, R), (B, T, R))
            and 2 * R <= D
        )
    if not fit:
        raise ValueError(
            f"{name} takes q (B, Hq, T, D) and k (B, Hk, T, D), D even, and "
            "cos and sin (T, R / 2) or (B, T, R / 2) with R up to D, not "
            f"{shapes}"
        )


def _rope_rows(x):
    """Return a tensor whose last dimension lies side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rope_like(x):
    """Return new memory for x turned: in the order of x, without gaps.

    Where elements of x share memory, ``empty_like`` may choose another order.
    """
    new = torch.empty_like(x)
    return new if new.stride(-1) == 1 else new.new_empty(x.shape)


def _rope_run(
    kernel, q, k, cos, sin, q_out, k_out, interleaved, conjugate, tile=ROPE_TILE
):
    """Launch for tensors with heads that lie side by side."""
    B, HEADS_Q, T, D = q.shape
    HEADS_K, R = k.shape[1], 2 * int(cos.shape[-1])
    # In place, what is not turned stays where it is.
    rest = 0 if q is q_out else int(D) - R
    if q.numel() + k.numel() == 0:
        return
    cos, sin = _rope_rows(cos), _rope_rows(sin)
    tensors = q, k, cos, sin, q_out, k_out
    strides = []
    for t in tensors:
        shared = [None] if t.ndim == 2 else []  # a table for all sequences
        strides += [*shared, *t.stride()[:-1]]
    BLOCK_H, points = tile
    BLOCK_D = triton.next_power_of_2(max(1, R // 2))
    BLOCK_T = max(1, points // BLOCK_D)
    groups = triton.cdiv(HEADS_Q, BLOCK_H) + triton.cdiv(HEADS_K, BLOCK_H)
    near = 1
    if q.stride(2) < q.stride(1):  # heads are outside
        near = max(1, ROPE_NEAR // (BLOCK_T * max(1, R) * cos.element_size()))
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        arguments = *tensors, T, HEADS_Q, HEADS_K, near, *strides
        kernel[(B * triton.cdiv(T, BLOCK_T) * groups,)](
            *arguments,
            D=R,
            REST=rest,
            INTERLEAVED=interleaved,
            CONJUGATE=conjugate,
            ACC=ROPE_ACC[q.dtype],
            BLOCK_H=BLOCK_H,
            BLOCK_T=BLOCK_T,
            BLOCK_D=BLOCK_D,
            BLOCK_REST=triton.next_power_of_2(max(1, rest)),
        )


def _rope_launch(
    q, k, cos, sin, interleaved=False, conjugate=False, kernel=_rope_kernel
):
    _rope_check("rope", q, k, cos, sin)
    q, k = _rope_rows(q), _rope_rows(k)
    out = _rope_like(q), _rope_like(k)
    _rope_run(kernel, q, k, cos, sin, *out, interleaved, conjugate)
    return out


@triton_op(f"{ROPE_NAMESPACE}::rope", mutates_args={})
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k with rotary position embeddings.

    Takes float16, bfloat16, float32 or float64: ``q`` of shape (B, Hq, T, D),
    ``k`` (B, Hk, T, D) of the same dtype, with an even D, in any layout;
    ``cos`` and ``sin`` (T, R / 2), which all sequences share, or (B, T, R / 2),
    of any of these dtypes. Row t of the tables turns token t. For tokens that
    begin at a position ``start``, pass ``cos[start : start + T]`` and the same
    of ``sin``. R is at most D: the first R numbers of a head are turned, and
    the others stay. Point i of a head is its numbers i and i + R / 2, or,
    interleaved, 2 i and 2 i + 1. With ``conjugate`` it turns back.

    The results have the shapes and dtypes of ``q`` and ``k``, lie densely, with
    the dimensions in the same order in memory, and are deterministic. If the
    last dimension has a stride other than 1, the op first makes a contiguous
    copy. ``q`` and ``k`` have gradients of any order, ``cos`` and ``sin`` have
    none. Raises TypeError for other dtypes or devices that differ, and
    ValueError for other shapes, or for tables that require a gradient. From
    https://arxiv.org/abs/2104.09864.

    Rounding: the arithmetic is in float32, or float64 for float64, the tables
    included, and each result is rounded once.
    """
    kernel = wrap_triton(_rope_kernel)
    return _rope_launch(q, k, cos, sin, interleaved, conjugate, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
ROPE_LIBRARY = Library(ROPE_NAMESPACE, "FRAGMENT")
ROPE_LIBRARY.impl("rope", _rope_launch, "CUDA")


def _rope_setup(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.conjugate = inputs
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope has no gradients for cos and sin")
    ctx.save_for_backward(cos, sin)


def _rope_gradient(ctx, dq, dk):
    flags = ctx.interleaved, not ctx.conjugate
    dq, dk = rope(dq, dk, *ctx.saved_tensors, *flags)
    return dq, dk, None, None, None, None


rope.register_autograd(_rope_gradient, setup_context=_rope_setup)


def _rope_check_in_place(q, k, cos, sin, interleaved=False, conjugate=False):
    _rope_check("rope_", q, k, cos, sin)
    if any(t.requires_grad for t in (q, k, cos, sin)):
        raise ValueError(
            "rope_ has no backward: use rope, or detach what requires grad"
        )
    for x in (q, k):
        width, shared = 1, False
        for step, extent in sorted(zip(x.stride(), x.shape, strict=True)):
            if extent > 1:
                shared = shared or step < width
                width += step * (extent - 1)
        if shared or x.stride(-1) != 1:
            raise ValueError(
                "rope_ takes heads whose numbers lie side by side and share no "
                f"memory, not strides {x.stride()} of {tuple(x.shape)}"
            )


@custom_op(f"{ROPE_NAMESPACE}::rope_", mutates_args={"q", "k"})
def rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
) -> None:
    """Give q and k rotary position embeddings, in place.

    Takes what ``rope`` takes, where the last dimension has a stride of 1 and no
    two elements share memory. q and k must not overlap: nothing checks that.
    Raises ValueError for other layouts and for tensors that require a gradient.
    """
    _rope_check_in_place(q, k, cos, sin)
    _rope_run(_rope_kernel, q, k, cos, sin, q, k, interleaved, conjugate)


@rope_.register_fake
def _rope_fake_in_place(q, k, cos, sin, interleaved=False, conjugate=False):
    _rope_check_in_place(q, k, cos, sin)
