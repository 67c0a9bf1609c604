"""Rotary position embedding (RoPE) of queries and keys in one kernel.

Rotates each pair of numbers of a head by its token's angle, from tables of cos
and sin: (x1 * cos - x2 * sin, x2 * cos + x1 * sin) (Su et al., 2021,
arXiv:2104.09864). A pair is one number from each half of the head (Llama) or,
interleaved, two neighbors (GPT-J). One launch reads and writes queries and keys
once, in any layout. Tokens have the rows of the tables in turn, or positions of
their own: those of packed sequences, of sequences that begin elsewhere, or of
Qwen2-VL's three axes. ``rope`` is its own backward, so it has gradients of any
order, except for the tables. ``rope_`` works in place, to save memory, and has
no backward. ``kv_cache_write`` rotates keys on their way to a cache.
Deterministic.
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
# What the kernel takes for positions of tokens
ROPE_OPTIONS = (
    *("positions_ptr", "P", "stride_pa", "stride_pb", "stride_pt"),
    *("stride_cos_a", "stride_sin_a", "FIRST", "BOTH"),
)
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
    positions_ptr,  # None: token t has row t of the tables
    P,  # how many rows these have
    stride_pa,  # from one axis to the next
    stride_pb,
    stride_pt,
    stride_cos_a,
    stride_sin_a,
    STARTS: tl.constexpr,  # whether positions are of first tokens
    FIRST: tl.constexpr,  # the points of the first of three axes
    BOTH: tl.constexpr,  # and of the first two
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
    if FIRST is not None:
        axis = (offs_d >= FIRST).to(tl.int64) + (offs_d >= BOTH).to(tl.int64)
        if stride_cos_a is not None:  # each axis has tables of its own
            cos_ptr += axis * stride_cos_a
            sin_ptr += axis * stride_sin_a
    row, other = t, None
    if positions_ptr is not None:
        positions_ptr += b * stride_pb + t * stride_pt
        if stride_pa is not None:
            positions_ptr += axis * stride_pa
        row = tl.load(positions_ptr, mask=t < T, other=0).to(tl.int64)
        if STARTS:
            row += t
        # A position without a row makes its token NaN.
        mask &= (row >= 0) & (row < P)
        other = float("nan")
    cos_ptrs = cos_ptr + row * stride_cos + offs_d
    cos = tl.load(cos_ptrs, mask=mask, other=other).to(ACC)
    sin_ptrs = sin_ptr + row * stride_sin + offs_d
    sin = tl.load(sin_ptrs, mask=mask, other=other).to(ACC)
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


def _rope_check(name, q, k, cos, sin, *places):
    """Raise for what the ops do not take."""
    tensors = [q, k, cos, sin]
    indices = [place for place in places[:3] if place is not None]
    dtypes = [t.dtype for t in tensors]
    if q.dtype != k.dtype or any(dtype not in ROPE_ACC for dtype in dtypes):
        raise TypeError(
            f"{name} takes q and k of one float dtype, and tables of any, "
            f"not {dtypes}"
        )
    devices = [t.device for t in (*tensors, *indices)]
    if devices.count(q.device) < len(devices):
        raise TypeError(f"{name} takes tensors on one device, not {devices}")
    shapes = [tuple(t.shape) for t in tensors]
    fit = False
    if q.ndim == k.ndim == 4 and q.shape[-1] % 2 == 0:
        B, _, T, D = q.shape
        R = cos.shape[-1] if cos.ndim else 0
        fit = (
            shapes[1] == (B, k.shape[1], T, D)
            and shapes[2] == shapes[3]
            and 2 * R <= D
        )
        if indices:
            fit = fit and cos.ndim == 2
        elif len(places) > 3 and places[3] is not None:
            fit = fit and shapes[2] == (3, B, T, R)
        else:
            fit = fit and shapes[2] in ((T, R), (B, T, R))
    if not fit:
        raise ValueError(
            f"{name} takes q (B, Hq, T, D) and k (B, Hk, T, D), D even, and "
            "cos and sin (T, R / 2) or (B, T, R / 2) with R up to D, (P, R / "
            "2) for positions, (3, B, T, R / 2) for mrope_section, not "
            f"{shapes}"
        )
    _rope_check_places(name, B, T, R, *places)


def _rope_check_places(
    name,
    B,
    T,
    R,
    positions=None,
    seqlen_offsets=None,
    cu_seqlens=None,
    mrope_section=None,
):
    """Raise for positions of tokens that the ops do not take."""
    indices = positions, seqlen_offsets, cu_seqlens
    dtypes = [t.dtype for t in indices if t is not None]
    if not {torch.int32, torch.int64}.issuperset(dtypes):
        raise TypeError(
            f"{name} takes positions, seqlen_offsets and cu_seqlens of int32 "
            f"or int64, not {dtypes}"
        )
    shapes = [None if t is None else tuple(t.shape) for t in indices]
    fits = [(None, None, None), ((T,), None, None), ((B, T), None, None)]
    if mrope_section is not None:
        fits = [fits[0], ((3, B, T), None, None)]
        if len(mrope_section) != 3 or sum(mrope_section) != R:
            raise ValueError(
                f"{name} takes a mrope_section of 3 numbers whose sum is the "
                f"{R} of the tables, not {mrope_section}"
            )
    elif cu_seqlens is not None and cu_seqlens.numel() > 1 and B == 1:
        count = cu_seqlens.numel() - 1
        fits = [(None, starts, (count + 1,)) for starts in (None, (count,))]
    else:
        fits.append((None, (B,), None))
    if tuple(shapes) not in fits:
        raise ValueError(
            f"{name} takes positions (T,), (B, T) or, for mrope_section, (3, "
            "B, T); or seqlen_offsets (B,); or, for B of 1, cu_seqlens (S + "
            f"1,) and seqlen_offsets (S,) or None; not {shapes}"
        )


def _rope_positions(T, seqlen_offsets, cu_seqlens):
    """Return the positions of packed tokens, anew in each sequence."""
    tokens = torch.arange(T, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    positions = tokens - cu_seqlens[sequence]
    if seqlen_offsets is not None:
        # Tokens past the last sequence have any position.
        sequence = sequence.clamp(max=seqlen_offsets.numel() - 1)
        positions = positions + seqlen_offsets[sequence]
    return positions


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
    kernel,
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    interleaved,
    conjugate,
    tile=ROPE_TILE,
    positions=None,
    seqlen_offsets=None,
    cu_seqlens=None,
    mrope_section=None,
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
        count = 2 if t is cos or t is sin else 3
        strides += [*shared, *t.stride()[-1 - count : -1]]
    # All by name: torch.compile traces no kernel that lacks an argument.
    options = dict.fromkeys(ROPE_OPTIONS) | {"STARTS": False}
    if mrope_section is not None:
        FIRST, SECOND, _ = mrope_section
        options |= {"FIRST": FIRST, "BOTH": FIRST + SECOND}
    if cos.ndim == 4:
        options["stride_cos_a"], options["stride_sin_a"] = (
            table.stride(0) for table in (cos, sin)
        )
    if cu_seqlens is not None:
        positions = _rope_positions(T, seqlen_offsets, cu_seqlens)
    elif seqlen_offsets is not None:
        positions, options["STARTS"] = seqlen_offsets[:, None], True
    if positions is not None:
        positions = positions.expand(*positions.shape[:-2], B, T)
        options |= {"positions_ptr": positions, "P": cos.shape[0]}
        names = ["stride_pt", "stride_pb", "stride_pa"][: positions.ndim]
        options |= zip(names, positions.stride()[::-1], strict=True)
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
            **options,
        )


def _rope_launch(
    q,
    k,
    cos,
    sin,
    interleaved=False,
    conjugate=False,
    positions=None,
    seqlen_offsets=None,
    cu_seqlens=None,
    mrope_section=None,
    kernel=_rope_kernel,
):
    k = q[:, :0] if k is None else k
    places = positions, seqlen_offsets, cu_seqlens, mrope_section
    _rope_check("rope", q, k, cos, sin, *places)
    q, k = _rope_rows(q), _rope_rows(k)
    out = _rope_like(q), _rope_like(k)
    flags = interleaved, conjugate
    _rope_run(kernel, q, k, cos, sin, *out, *flags, ROPE_TILE, *places)
    return out


@triton_op(f"{ROPE_NAMESPACE}::rope", mutates_args={})
def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
    positions: torch.Tensor | None = None,
    seqlen_offsets: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    mrope_section: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k with rotary position embeddings.

    Takes float16, bfloat16, float32 or float64: ``q`` of shape (B, Hq, T, D),
    ``k`` (B, Hk, T, D) of the same dtype, with an even D, in any layout;
    ``cos`` and ``sin`` (T, R / 2), which all sequences share, or (B, T, R / 2),
    of any of these dtypes. Row t of the tables turns token t. For tokens that
    begin at a position ``start``, pass ``cos[start : start + T]`` and the same
    of ``sin``. R is at most D: the first R numbers of a head are turned, and
    the others stay. Point i of a head is its numbers i and i + R / 2, or,
    interleaved, 2 i and 2 i + 1. With ``conjugate`` it turns back. If ``k`` is
    None, the second result is a tensor of no heads.

    Tokens at other positions take rows of tables (P, R / 2), by int32 or int64:

    - ``positions`` (T,) or (B, T), as in vLLM: of each token.
    - ``seqlen_offsets`` (B,), as in flash-attention: of each first token.
    - ``cu_seqlens`` (S + 1,), likewise, for a batch of one: where each of S
      packed sequences begins, and where the last one ends. Positions begin
      anew in each, at 0 or at ``seqlen_offsets`` (S,).

    A token whose position is not in range(P) becomes NaN.

    ``mrope_section`` is that of Qwen2-VL (https://arxiv.org/abs/2409.12191):
    how many points of a head, R / 2 in all, have positions in time, how many
    in height and how many in width. Tables are (3, B, T, R / 2) then, or (P,
    R / 2) with ``positions`` (3, B, T).

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
    places = positions, seqlen_offsets, cu_seqlens, mrope_section
    flags = interleaved, conjugate
    return _rope_launch(q, k, cos, sin, *flags, *places, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
ROPE_LIBRARY = Library(ROPE_NAMESPACE, "FRAGMENT")
ROPE_LIBRARY.impl("rope", _rope_launch, "CUDA")


def _rope_setup(ctx, inputs, output):
    _, k, cos, sin, ctx.interleaved, ctx.conjugate, *places = inputs
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope has no gradients for cos and sin")
    *indices, ctx.mrope_section = places
    ctx.has_k = k is not None
    ctx.save_for_backward(cos, sin, *indices)


def _rope_gradient(ctx, dq, dk):
    flags = ctx.interleaved, not ctx.conjugate
    cos, sin, *indices = ctx.saved_tensors
    tables_and_places = cos, sin, *flags, *indices, ctx.mrope_section
    dq, dk = rope(dq, dk if ctx.has_k else None, *tables_and_places)
    return dq, dk if ctx.has_k else None, *[None] * 8


rope.register_autograd(_rope_gradient, setup_context=_rope_setup)


def _rope_check_in_place(q, k, cos, sin, *places):
    _rope_check("rope_", q, k, cos, sin, *places)
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
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
    positions: torch.Tensor | None = None,
    seqlen_offsets: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    mrope_section: list[int] | None = None,
) -> None:
    """Give q and k rotary position embeddings, in place.

    Takes what ``rope`` takes, where the last dimension has a stride of 1 and no
    two elements share memory. q and k must not overlap: nothing checks that.
    Raises ValueError for other layouts and for tensors that require a gradient.
    """
    k = q[:, :0] if k is None else k
    places = positions, seqlen_offsets, cu_seqlens, mrope_section
    _rope_check_in_place(q, k, cos, sin, *places)
    flags = interleaved, conjugate
    inputs = q, k, cos, sin, q, k, *flags, ROPE_TILE
    _rope_run(_rope_kernel, *inputs, *places)


@rope_.register_fake
def _rope_fake_in_place(
    q, k, cos, sin, interleaved=False, conjugate=False, *places
):
    k = q[:, :0] if k is None else k
    _rope_check_in_place(q, k, cos, sin, *places)
