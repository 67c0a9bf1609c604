"""Fused RoPE and write to a paged key-value cache, optionally in float8.

Rotates queries and keys by their positions, returns both, and writes the
rotated keys and the values to the cache that ``decode_attention`` reads. One
kernel replaces many, each of which reads and writes memory. A pair of RoPE is
one number from each half of the rotated part, which may be only the first part
of a head, or two numbers side by side. For a float8_e4m3fn cache,
numbers may be divided by a scale, and are clamped and rounded once. Tokens with
a negative slot are not written. Slots and positions are not checked, and no two
tokens may share a slot. Deterministic, without a backward.
"""

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op

KV_CACHE_WRITE_NAMESPACE = "triton_gallery"
KV_CACHE_WRITE_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
KV_CACHE_WRITE_TILE = 2048  # elements of half a head, for several heads


@triton.jit
def _kv_cache_write_put(
    ptrs, x, scale, mask, SCALED: tl.constexpr, LARGEST: tl.constexpr
):
    """Store to a cache, divided by a scale and clamped, if asked for."""
    if SCALED:
        x = x / scale
    if LARGEST > 0:
        # Float8 has no infinity: what is larger may become NaN. A comparison
        # with NaN is false, so NaN stays NaN.
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _kv_cache_write_turn(x_ptrs, out_ptrs, mask, cos, sin, HALF: tl.constexpr):
    """Turn heads, store them, and return their halves."""
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(cos.dtype)
    x2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(cos.dtype)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    tl.store(out_ptrs, y1, mask=mask)
    tl.store(out_ptrs + HALF, y2, mask=mask)
    return y1, y2


@triton.jit
def _kv_cache_write_turn_pairs(x_ptrs, out_ptrs, mask, cos, sin):
    """Turn heads of interleaved pairs, store them, and return them."""
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(cos.dtype)
    # Each thread has whole pairs, so parting them moves nothing.
    x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    y = tl.reshape(y, x.shape)
    tl.store(out_ptrs, y, mask=mask)
    return y


@triton.jit
def _kv_cache_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcp,
    stride_kcl,
    stride_kch,
    stride_vcp,
    stride_vcl,
    stride_vch,
    stride_cos,
    stride_sin,
    stride_ks,
    stride_vs,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # In int32, offsets would overflow past element 2**31.
    token = tl.program_id(axis=0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if HALF > 0:
        position = tl.load(positions_ptr + token)
    offs_r = tl.arange(0, BLOCK_R)[None, :]  # (1, BLOCK_R)
    offs_p = tl.arange(0, 2 * BLOCK_R)[None, :]  # (1, 2 * BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    half = offs_r < HALF
    both = offs_p < 2 * HALF
    rest = (offs_d >= 2 * HALF) & (offs_d < D)  # what is not turned
    if HALF > 0:
        cos_ptrs = cos_ptr + position * stride_cos + offs_r
        sin_ptrs = sin_ptr + position * stride_sin + offs_r
        # One angle serves all heads of a token: it is loaded before the loops.
        cos = tl.load(cos_ptrs, mask=half, other=0.0).to(ACC)  # (1, BLOCK_R)
        sin = tl.load(sin_ptrs, mask=half, other=0.0).to(ACC)
    for first in tl.static_range(0, HEADS, BLOCK_H):
        offs_h = first + tl.arange(0, BLOCK_H)[:, None]  # (BLOCK_H, 1)
        there = offs_h < HEADS
        q_ptrs = q_ptr + token * stride_qt + offs_h * stride_qh
        out_ptrs = q_out_ptr + (token * HEADS + offs_h) * D
        if INTERLEAVED:
            _kv_cache_write_turn_pairs(
                q_ptrs + offs_p, out_ptrs + offs_p, there & both, cos, sin
            )
        elif HALF > 0:
            _kv_cache_write_turn(
                q_ptrs + offs_r, out_ptrs + offs_r, there & half, cos, sin, HALF
            )
        if 2 * HALF < D:
            q = tl.load(q_ptrs + offs_d, mask=there & rest)
            tl.store(out_ptrs + offs_d, q, mask=there & rest)
    # Padding has the slot -1, and no valid address: masks keep it unused.
    k_cell = k_cache_ptr + slot // PAGE * stride_kcp + slot % PAGE * stride_kcl
    v_cell = v_cache_ptr + slot // PAGE * stride_vcp + slot % PAGE * stride_vcl
    for first in tl.static_range(0, SHARED, BLOCK_S):
        offs_h = first + tl.arange(0, BLOCK_S)[:, None]  # (BLOCK_S, 1)
        there = offs_h < SHARED
        # Padding has no slot: a store there would hit what lies before.
        slotted = offs_h < tl.where(slot >= 0, SHARED, 0)
        k_scale, v_scale = 1.0, 1.0
        if SCALED:
            k_scale_ptrs = k_scale_ptr + offs_h * stride_ks
            v_scale_ptrs = v_scale_ptr + offs_h * stride_vs
            k_scale = tl.load(k_scale_ptrs, mask=there, other=1.0).to(ACC)
            v_scale = tl.load(v_scale_ptrs, mask=there, other=1.0).to(ACC)
        k_ptrs = k_ptr + token * stride_kt + offs_h * stride_kh
        out_ptrs = k_out_ptr + (token * SHARED + offs_h) * D
        cells = k_cell + offs_h * stride_kch
        if INTERLEAVED:
            y = _kv_cache_write_turn_pairs(
                k_ptrs + offs_p, out_ptrs + offs_p, there & both, cos, sin
            )
            mask = slotted & both  # (BLOCK_S, 2 * BLOCK_R)
            _kv_cache_write_put(
                cells + offs_p, y, k_scale, mask, SCALED, LARGEST
            )
        elif HALF > 0:
            y1, y2 = _kv_cache_write_turn(
                k_ptrs + offs_r, out_ptrs + offs_r, there & half, cos, sin, HALF
            )
            mask = slotted & half  # (BLOCK_S, BLOCK_R)
            _kv_cache_write_put(
                cells + offs_r, y1, k_scale, mask, SCALED, LARGEST
            )
            _kv_cache_write_put(
                cells + HALF + offs_r, y2, k_scale, mask, SCALED, LARGEST
            )
        if 2 * HALF < D:
            k = tl.load(k_ptrs + offs_d, mask=there & rest)
            tl.store(out_ptrs + offs_d, k, mask=there & rest)
            _kv_cache_write_put(
                cells + offs_d,
                k.to(ACC),
                k_scale,
                slotted & rest,
                SCALED,
                LARGEST,
            )
        v_ptrs = v_ptr + token * stride_vt + offs_h * stride_vh + offs_d
        cells = v_cell + offs_h * stride_vch + offs_d
        mask = slotted & (offs_d < D)  # (BLOCK_S, BLOCK_D)
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(ACC)
        _kv_cache_write_put(cells, v, v_scale, mask, SCALED, LARGEST)


def _kv_cache_write_check(
    q, k, v, k_cache, v_cache, slots, positions, cos, sin, scales
):
    name, scales = "kv_cache_write_", [t for t in scales if t is not None]
    places = [t for t in (slots, positions) if t is not None]
    tables = [t for t in (cos, sin) if t is not None]
    tensors = (q, k, v, k_cache, v_cache, *places, *tables, *scales)
    small = torch.float8_e4m3fn if q.dtype.itemsize == 2 else q.dtype
    fits = (
        q.dtype in KV_CACHE_WRITE_DTYPES
        and q.dtype == k.dtype == v.dtype
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (q.dtype, small)
        and {t.dtype for t in places} == {torch.int64}
        and {t.dtype for t in tables} <= KV_CACHE_WRITE_DTYPES
        and all(t.dtype == torch.float32 for t in scales)
        and len({t.device for t in tensors}) == 1
    )
    if not fits:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise TypeError(
            f"{name} takes q, k and v of one float dtype, two caches of it, or,"
            " if it has 16 bits, of float8_e4m3fn, slots and positions of "
            "int64, float tables, and scales of float32, on one device, not "
            + found
        )
    fits = (
        q.ndim == k.ndim == 3
        and q.shape[::2] == k.shape[::2]
        and k.shape == v.shape
        and k.shape[1] * k.shape[2] > 0
        and q.shape[1] % k.shape[1] == 0
        and k_cache.ndim == 4
        and k_cache.shape == v_cache.shape
        and k_cache.shape[1] > 0
        and k_cache.shape[2:] == k.shape[1:]
        and (len(places), len(tables)) in ((1, 0), (2, 2))
        and all(t.shape == q.shape[:1] for t in places)
        and all(t.ndim == 2 and t.shape == cos.shape for t in tables)
        and all(2 <= 2 * t.shape[1] <= q.shape[2] for t in tables)
        and len(scales) != 1
        and all(t.shape in ((1,), k.shape[1:2]) for t in scales)
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"{name} takes q of (tokens, heads, D), k and v of (tokens, some "
            "heads, D), two caches of (pages, page size, some heads, D), slots "
            "of (tokens,), all or none of positions of (tokens,), cos and sin "
            "of (positions, R / 2), R up to D, and no or two scales of (1,) or "
            "(some heads,), not " + found
        )
    if any(t.requires_grad for t in tensors):
        raise ValueError(f"{name} has no gradient: detach what requires grad")
    if any(t.stride(-1) != 1 for t in (k_cache, v_cache)):
        raise ValueError(f"{name} takes caches that are contiguous along D")


def _kv_cache_write_launch(
    q,
    k,
    v,
    k_cache,
    v_cache,
    slots,
    positions=None,
    cos=None,
    sin=None,
    k_scale=None,
    v_scale=None,
    interleaved=False,
):
    scales = (k_scale, v_scale)
    _kv_cache_write_check(
        q, k, v, k_cache, v_cache, slots, positions, cos, sin, scales
    )
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    if len(q) == 0:
        return q_out, k_out
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)]
    half, strides = 0, (None, None)
    if cos is not None:
        cos, sin = (
            t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin)
        )
        half, strides = cos.shape[1], (cos.stride(0), sin.stride(0))
        positions = positions.contiguous()
    # One scale for all heads, or one for each
    apart = [0 if t is None or t.numel() == 1 else t.stride(0) for t in scales]
    (_, heads, D), shared = q.shape, k.shape[1]
    BLOCK_R = triton.next_power_of_2(max(1, half))
    most = max(1, KV_CACHE_WRITE_TILE // BLOCK_R)
    small = k_cache.dtype == torch.float8_e4m3fn
    # The interpreter would round 1.999 to 1 in float8. There the kernel writes
    # float32, and PyTorch rounds.
    by_torch = small and triton.knobs.runtime.interpret
    caches = [t.float() if by_torch else t for t in (k_cache, v_cache)]
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        places = slots.contiguous(), positions
        arguments = *rows, q_out, k_out, *caches, *places, cos, sin, *scales
        _kv_cache_write_kernel[(len(q),)](
            *arguments,
            *(n for t in rows for n in t.stride()[:2]),
            *(n for t in caches for n in t.stride()[:3]),
            *strides,
            *apart,
            HEADS=heads,
            SHARED=shared,
            D=D,
            HALF=half,
            INTERLEAVED=interleaved and half > 0,
            PAGE=k_cache.shape[1],
            SCALED=k_scale is not None,
            LARGEST=torch.finfo(k_cache.dtype).max if small else 0.0,
            ACC=tl.float64 if q.dtype == torch.float64 else tl.float32,
            BLOCK_H=min(triton.next_power_of_2(max(1, heads)), most),
            BLOCK_S=min(triton.next_power_of_2(shared), most),
            BLOCK_R=BLOCK_R,
            BLOCK_D=triton.next_power_of_2(D),
        )
    if by_torch:
        k_cache.copy_(caches[0])
        v_cache.copy_(caches[1])
    return q_out, k_out


@custom_op(
    f"{KV_CACHE_WRITE_NAMESPACE}::kv_cache_write_",
    mutates_args=("k_cache", "v_cache"),
)
def kv_cache_write_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, turned by their positions; write k and v to the cache.

    Takes q of (tokens, heads, D), k and v of (tokens, heads / n, D), caches of
    (pages, page size, heads / n, D), contiguous along D, with any other
    strides, slots and positions of (tokens,), int64, and cos and sin, float
    tables of (positions, R / 2). A token's turned k and its v go to slot s,
    place s % page size of page s // page size; a token with a negative slot is
    not written. Slots and positions are not checked, and two tokens may not
    have the same slot. RoPE turns number i of a head with number i + R / 2, or,
    ``interleaved``, number 2 i with 2 i + 1, by column i of the tables; numbers
    from R on stay. Without positions, cos and sin nothing is turned: q and k
    are copied, and k and v written; a q without heads, q[:, :0], saves a copy.

    q, k and v are of one dtype, float16, bfloat16, float32 or float64, the
    caches of the same or, with 16 bits, of float8_e4m3fn (on NVIDIA from
    compute capability 8.9 on). k_scale and v_scale, both or none, float32, of
    (1,) or (heads / n,), divide what is written to a cache of any dtype; float8
    is clamped to its largest number, and NaN stays NaN.

    The results are contiguous, of the dtype of q. They and what is written are
    deterministic. Raises TypeError for other dtypes and devices,
    ValueError for other shapes and for what requires grad.

    Rounding: the arithmetic is in float32, or float64 for float64. Each result
    is rounded once, and so is what goes to the cache, from the numbers before
    that rounding.
    """
    turn = positions, cos, sin, k_scale, v_scale, interleaved
    return _kv_cache_write_launch(q, k, v, k_cache, v_cache, slots, *turn)


@kv_cache_write_.register_fake
def _kv_cache_write_fake(
    q,
    k,
    v,
    k_cache,
    v_cache,
    slots,
    positions=None,
    cos=None,
    sin=None,
    k_scale=None,
    v_scale=None,
    interleaved=False,
):
    scales = k_scale, v_scale
    _kv_cache_write_check(
        q, k, v, k_cache, v_cache, slots, positions, cos, sin, scales
    )
    return q.new_empty(q.shape), k.new_empty(k.shape)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
KV_CACHE_WRITE_LIBRARY = Library(KV_CACHE_WRITE_NAMESPACE, "FRAGMENT")
KV_CACHE_WRITE_LIBRARY.impl("kv_cache_write_", _kv_cache_write_launch, "CUDA")
