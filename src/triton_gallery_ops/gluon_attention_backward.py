"""The backward of attention in Gluon with specialized warps, for Hopper only.

Computes the gradients of softmax(q @ k.T * scale) @ v from what a forward
kept, full or causal, in float16 or bfloat16, with a head size of 64 or 128, on
NVIDIA GPUs of compute capability 9.0 (methods: Dao, 2023, arXiv:2307.08691;
Shah et al., 2024, arXiv:2407.08608). One warp loads, and two groups of four
compute. One pass computes the gradients of keys and values, another one those
of queries, so no program adds to what another one stores: gradients are
deterministic. ``flash_attention`` has the forward whose results this takes, and
a backward for other dtypes, head sizes and GPUs.
"""

import math
import threading
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)

GLUON_ATTENTION_BACKWARD_NAMESPACE = "triton_gallery"
GLUON_ATTENTION_BACKWARD_THREAD = threading.local()
GLUON_ATTENTION_BACKWARD_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}
GLUON_ATTENTION_BACKWARD_ROWS = 64  # of a consumer
# For D: rows of a step and buffers, in the pass for keys and for queries. The
# first has two tiles of sums, so with heads of 128 its scores have less room.
GLUON_ATTENTION_BACKWARD_TILES = {
    64: [(128, 4), (128, 4)],
    128: [(64, 4), (128, 2)],
}
# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
_gluon_attention_backward_load = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)
_gluon_attention_backward_store = (
    getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
)


@triton.jit
def _gluon_attention_backward_delta_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    stats_ptr,
    LQ,
    HEADS,
    stride_ob,
    stride_oh,
    stride_ol,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_s,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    blocks = tl.cdiv(LQ, BLOCK_M)
    pid = tl.program_id(axis=0)
    # In int32, an offset would overflow past element 2**31.
    both = (pid // blocks).to(tl.int64)  # of all heads of the batch
    batch, head = both // HEADS, both % HEADS
    offs_m = pid % blocks * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    row, offs_d = offs_m[:, None].to(tl.int64), tl.arange(0, D)[None, :]
    mask = row < LQ  # (BLOCK_M, 1)
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + offs_d
    grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_d
    out = tl.load(out_ptrs + row * stride_ol, mask=mask, other=0.0)
    grad = tl.load(grad_ptrs + row * stride_gl, mask=mask, other=0.0)
    # Products of half precision would be rounded one by one.
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), axis=1)
    lse = tl.load(lse_ptr + both * LQ + offs_m, mask=offs_m < LQ, other=0.0)
    # Two rows of each head, which begin at multiples of 16 bytes
    stats_ptrs = stats_ptr + 2 * both * stride_s + offs_m
    tl.store(stats_ptrs, lse, mask=offs_m < LQ)
    tl.store(stats_ptrs + stride_s, delta, mask=offs_m < LQ)


# Both passes are one kernel. A program keeps ``a`` and ``b``, and goes along
# ``x`` and ``y``: of keys it keeps k and v, and goes along q and the gradient
# of out; of queries it keeps these two, and goes along k and v.
@gluon.jit
def _gluon_attention_backward_produce(
    descs, place, tiles, ring, KEYS: gl.constexpr
):
    a_desc, b_desc, x_desc, y_desc, stats_desc = descs
    batch, head, row, other, members, first, end = place
    a, b, x, y, stats = tiles
    kept, full, empty = ring
    STAGES: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = a_desc.block_shape[2]
    BLOCK: gl.constexpr = x_desc.block_shape[2]
    rest: gl.constexpr = 2 * stats_desc.block_type.nbytes if KEYS else 0
    mbarrier.expect(kept, 4 * a_desc.block_type.nbytes)
    for half in gl.static_range(2):
        at = [batch, head, row + half * ROWS, 0]
        _gluon_attention_backward_load(a_desc, at, kept, a.index(half))
        _gluon_attention_backward_load(b_desc, at, kept, b.index(half))
    n = 0
    for member in range(members):
        for start in range(first, end, BLOCK):
            stage = n % STAGES
            # Both consumers have arrived for step n - STAGES. A new barrier
            # counts the phase before its first one as ended.
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            bar = full.index(stage)
            # The one arrival at full. The phase ends with the last byte; those
            # that the engine fills with zeros count as well.
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + rest)
            at = [batch, other + member, start, 0]
            _gluon_attention_backward_load(x_desc, at, bar, x.index(stage))
            _gluon_attention_backward_load(y_desc, at, bar, y.index(stage))
            if KEYS:
                # Past the end these are zeros, as q and the gradient are: such
                # queries add zeros.
                for i in gl.static_range(2):
                    _gluon_attention_backward_load(
                        stats_desc,
                        [batch, other + member, i, start],
                        bar,
                        stats.index(2 * stage + i),
                    )
            n += 1


@gluon.jit
def _gluon_attention_backward_hide(
    p,
    row,
    start,
    LK,
    TILE: gl.constexpr,
    CAUSAL: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Return weights with 0 where a query does not see a key."""
    offs = row + gl.arange(0, p.shape[0], gl.SliceLayout(1, TILE))[:, None]
    along = start + gl.arange(0, p.shape[1], gl.SliceLayout(0, TILE))[None, :]
    if KEYS:
        # A key past the end has a row of its own, which is in no other sum.
        return gl.where(offs <= along, p, 0.0)
    # A key past the end is zeros: its score is 0, and its weight may be inf.
    last = gl.minimum(offs, LK - 1) if CAUSAL else LK - 1
    return gl.where(along <= last, p, 0.0)


@gluon.jit
def _gluon_attention_backward_numbers(stats, place, TILE: gl.constexpr):
    """Return the numbers of a tile's columns."""
    numbers = stats.index(place).reshape([stats.shape[4]])
    return numbers.load(gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def _gluon_attention_backward_weigh(
    operands,
    lse,
    place,
    scale_2,
    TILE: gl.constexpr,
    CAUSAL: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Return weights, and their gradients, whose product is in flight."""
    a, b, x, y = operands
    stats, number, row, start, LK = place
    ROWS: gl.constexpr = a.shape[0]
    BLOCK: gl.constexpr = x.shape[0]
    zeros = gl.zeros((ROWS, BLOCK), gl.float32, TILE)
    s = warpgroup_mma(a, x.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(
        b, y.permute([1, 0]), zeros, use_acc=False, is_async=True
    )
    # The first product is done, the second one may go on.
    s = warpgroup_mma_wait(1, deps=(s,))
    if KEYS:
        lse = _gluon_attention_backward_numbers(stats, number, TILE)
    p = gl.exp2(gl.fma(s, scale_2, -lse))  # (ROWS, BLOCK)
    # Few tiles are at the diagonal or at the end of the keys.
    if KEYS:
        masked = start < row + ROWS - 1 if CAUSAL else False
    else:
        masked = start + BLOCK > (gl.minimum(LK, row) if CAUSAL else LK)
    if masked:
        p = _gluon_attention_backward_hide(
            p, row, start, LK, TILE, CAUSAL, KEYS
        )
    return p, dp


@gluon.jit
def _gluon_attention_backward_end(
    HALF: gl.constexpr, descs, sums, tiles, at, KEYS: gl.constexpr
):
    """Store the sums of this consumer's rows."""
    for i in gl.static_range(2 if KEYS else 1):
        # Nobody reads these rows of a and b now.
        tile = tiles[i].index(HALF)
        rows = tile.reshape([tile.shape[2], tile.shape[3]])
        rows.store(sums[i].to(descs[i].dtype))
        fence_async_shared()  # what threads wrote, the engine reads
        _gluon_attention_backward_store(
            descs[i], [at[0], at[1], at[2], 0], tile
        )
    tma.store_wait(0)  # the shared memory is another program's soon


@gluon.jit
def _gluon_attention_backward_consume(
    HALF: gl.constexpr, both, CAUSAL: gl.constexpr, KEYS: gl.constexpr
):
    descs, stats_ptr, place, tiles, ring, LQ, LK, scale, log_scale = both
    batch, head, row, _, members, first, end = place
    a_tiles, b_tiles, x_tiles, y_tiles, stats = tiles
    kept, full, empty = ring
    STAGES: gl.constexpr = x_tiles.shape[0]
    ROWS: gl.constexpr = a_tiles.shape[3]
    BLOCK: gl.constexpr = x_tiles.shape[3]
    D: gl.constexpr = x_tiles.shape[4]
    dtype: gl.constexpr = descs[0].dtype
    # Hopper's version; the warps of rows and of columns; a warp's M, N and K
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, D, 16]
    )
    FIRST: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row += HALF * ROWS
    a = a_tiles.index(HALF).reshape([ROWS, D])
    b = b_tiles.index(HALF).reshape([ROWS, D])
    da = gl.zeros((ROWS, D), gl.float32, SUMS)
    db = gl.zeros((ROWS, D), gl.float32, SUMS)
    lse = None
    if not KEYS:
        offs_m = row + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
        lse = gl.load(stats_ptr + offs_m, offs_m < LQ, 0.0)[:, None]
        delta_ptrs = stats_ptr + gl.cdiv(LQ, 4) * 4 + offs_m
        delta = gl.load(delta_ptrs, offs_m < LQ, 0.0)[:, None]
    mbarrier.wait(kept, 0)
    n = 0
    for _member in range(members):
        for start in range(first, end, BLOCK):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), n // STAGES & 1)
            x = x_tiles.index(stage).reshape([BLOCK, D])
            y = y_tiles.index(stage).reshape([BLOCK, D])
            p, dp = _gluon_attention_backward_weigh(
                (a, b, x, y),
                lse,
                (stats, 2 * stage, row, start, LK),
                log_scale,
                TILE,
                CAUSAL,
                KEYS,
            )
            if KEYS:
                # The first operand stays in the registers that it is in.
                w = gl.convert_layout(p.to(dtype), FIRST)
                db = warpgroup_mma(w, y, db, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                delta = _gluon_attention_backward_numbers(
                    stats, 2 * stage + 1, TILE
                )
            else:
                dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = (p * (dp - delta)).to(dtype)
            ds = gl.convert_layout(ds, FIRST)
            da = warpgroup_mma(ds, x, da, is_async=True)
            if KEYS:
                da, db = warpgroup_mma_wait(0, deps=(da, db))
            else:
                da = warpgroup_mma_wait(0, deps=(da,))
            mbarrier.arrive(empty.index(stage))
            n += 1
    _gluon_attention_backward_end(
        HALF, descs, (da * scale, db), tiles, (batch, head, row), KEYS
    )


@gluon.jit
def _gluon_attention_backward_kernel(
    a_desc,
    b_desc,
    x_desc,
    y_desc,
    stats_desc,
    stats_ptr,
    da_desc,
    db_desc,
    scale,
    scale_2,
    group,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    ROWS: gl.constexpr = a_desc.block_shape[2]
    BLOCK: gl.constexpr = x_desc.block_shape[2]
    dtype: gl.constexpr = a_desc.dtype
    a_shape: gl.constexpr = [2] + a_desc.block_shape
    x_shape: gl.constexpr = [STAGES] + x_desc.block_shape
    s_shape: gl.constexpr = [2 * STAGES if KEYS else 1] + stats_desc.block_shape
    a = gl.allocate_shared_memory(dtype, a_shape, a_desc.layout)
    b = gl.allocate_shared_memory(dtype, a_shape, b_desc.layout)
    x = gl.allocate_shared_memory(dtype, x_shape, x_desc.layout)
    y = gl.allocate_shared_memory(dtype, x_shape, y_desc.layout)
    stats = gl.allocate_shared_memory(gl.float32, s_shape, stats_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    kept = gl.allocate_shared_memory(gl.int64, [1], kind)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    mbarrier.init(kept, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)  # the producer's expect
        mbarrier.init(empty.index(stage), count=2)  # one of each consumer
    heads, L, end = a_desc.shape[1], a_desc.shape[2], x_desc.shape[2]
    blocks = gl.cdiv(L, 2 * ROWS)
    pid = gl.program_id(axis=0)
    head, batch = pid // blocks % heads, pid // blocks // heads
    # With a causal mask, earlier keys are seen by more queries, and later
    # queries see more keys: programs with the most work start first.
    if KEYS:
        LQ, LK = end, L
        row, other, first = pid % blocks * 2 * ROWS, head * group, 0
        if CAUSAL:
            first = row // BLOCK * BLOCK
        members = group
    else:
        LQ, LK = L, end
        row, first = (blocks - 1 - pid % blocks) * 2 * ROWS, 0
        other, members = head // group, 1
        if CAUSAL:
            end = gl.minimum(LK, row + 2 * ROWS)
        stride = gl.cdiv(LQ, 4) * 4
        stats_ptr += 2 * (batch * heads + head).to(gl.int64) * stride
    place = batch, head, row, other, members, first, end
    tiles, ring = (a, b, x, y, stats), (kept, full, empty)
    descs = (a_desc, b_desc, x_desc, y_desc, stats_desc)
    grads = (da_desc, db_desc)
    both = (grads, stats_ptr, place, tiles, ring, LQ, LK, scale, scale_2)
    gl.warp_specialize(
        [
            # Passed here, and not inside ``both``, to stay constants
            (_gluon_attention_backward_consume, (0, both, CAUSAL, KEYS)),
            (_gluon_attention_backward_consume, (1, both, CAUSAL, KEYS)),
            (
                _gluon_attention_backward_produce,
                (descs, place, tiles, ring, KEYS),
            ),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and registers of their threads
    )


@cache
def _gluon_attention_backward_gpu(device):
    """Raise for devices that the kernels are not written for."""
    if device.type == "cuda" and not torch.version.hip:
        gpu = torch.cuda.get_device_properties(device)
        if (gpu.major, gpu.minor) == (9, 0):
            return
    raise RuntimeError(
        "gluon_attention_backward takes tensors on NVIDIA GPUs of compute "
        "capability 9.0 alone, whose instructions it names, not on "
        f"{device}: flash_attention_backward takes any"
    )


def _gluon_attention_backward_check(do, q, k, v, out, lse):
    """Raise for what the op does not take."""
    name, halves = "gluon_attention_backward", (do, q, k, v, out)
    if q.dtype not in GLUON_ATTENTION_BACKWARD_DTYPES:
        raise TypeError(
            f"{name} takes float16 and bfloat16, not {q.dtype}: "
            "flash_attention_backward takes others"
        )
    if len({(t.dtype, t.device) for t in halves}) > 1:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in halves)
        raise TypeError(f"{name} takes one dtype on one device, not {found}")
    if lse.dtype != torch.float32 or lse.device != q.device:
        raise TypeError(
            f"{name} takes lse of float32 on {q.device}, not {lse.dtype} on "
            f"{lse.device}"
        )
    fits = (
        q.ndim == k.ndim == 4
        and q.shape == do.shape == out.shape
        and k.shape == v.shape
        and lse.shape == q.shape[:3]
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and q.shape[3] in (64, 128)
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (*halves, lse))
        raise ValueError(
            f"{name} takes do, q and out of (batch, heads, queries, D), k and "
            "v of (batch, heads / n, keys, D), with D of 64 or 128, and lse "
            f"of (batch, heads, queries), not do, q, k, v, out, lse of {found}"
        )


def _gluon_attention_backward_aligned(x):
    """Return x, or a copy of it, with rows that the copy engine takes."""
    D = x.shape[3]
    sides = zip(x.shape[:3], x.stride()[:3], strict=True)
    # Rows begin at multiples of 16 bytes, and do not overlap. The stride of a
    # dimension of one may be anything.
    fits = all(step >= D and step % 8 == 0 for n, step in sides if n > 1)
    if fits and x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _gluon_attention_backward_like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cache  # to make one takes longer than the rest of a descriptor
def _gluon_attention_backward_layout(rows, D, dtype):
    kind = GLUON_ATTENTION_BACKWARD_DTYPES[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], kind)


def _gluon_attention_backward_descriptor(x, rows):
    """Return the descriptor of x, copied by a number of its rows."""
    D, sides = x.shape[3], zip(x.shape, x.stride(), strict=True)
    strides = [step if n > 1 else x.shape[3] for n, step in sides]
    layout = _gluon_attention_backward_layout(rows, D, x.dtype)
    return GluonDescriptor(x, [*x.shape], strides, [1, 1, rows, D], layout)


def _gluon_attention_backward_launch(
    do,
    q,
    k,
    v,
    out,
    lse,
    causal=False,
    scale=None,
    like=_gluon_attention_backward_like,
):
    """Return the gradients, in memory that ``like`` returns for a tensor."""
    _gluon_attention_backward_check(do, q, k, v, out, lse)
    _gluon_attention_backward_gpu(q.device)
    dq, dk, dv = map(like, (q, k, k))
    if q.numel() * k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    batch, heads, LQ, D = q.shape
    scale = D**-0.5 if scale is None else scale
    do, q, k, v = map(_gluon_attention_backward_aligned, (do, q, k, v))
    out = out if out.stride(3) == 1 else out.contiguous()
    # For each query its lse and its delta, in two rows of a head. Rows begin at
    # multiples of 16 bytes.
    room = triton.cdiv(LQ, 4) * 4
    stats = lse.new_empty(batch, heads, 2, room)
    rows = GLUON_ATTENTION_BACKWARD_ROWS
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        if not hasattr(GLUON_ATTENTION_BACKWARD_THREAD, "begun"):
            # A thread has no context until torch uses it, and no descriptor
            # is made without one. Autograd has threads of its own.
            lse.new_zeros(1)
            GLUON_ATTENTION_BACKWARD_THREAD.begun = True
        _gluon_attention_backward_delta_kernel[
            (triton.cdiv(LQ, 32) * batch * heads,)
        ](
            out,
            do,
            lse.contiguous(),
            stats,
            LQ,
            heads,
            *out.stride()[:3],
            *do.stride()[:3],
            room,
            D=D,
            BLOCK_M=32,
        )
        describe = _gluon_attention_backward_descriptor
        stats_layout = gl.NVMMASharedLayout(0, 32, rank=4)
        for KEYS in (True, False):
            kept, along = ((k, v), (q, do)) if KEYS else ((q, do), (k, v))
            grads = [describe(t, rows) for t in ((dk, dv) if KEYS else (dq,))]
            BLOCK, STAGES = GLUON_ATTENTION_BACKWARD_TILES[D][not KEYS]
            stats_desc = GluonDescriptor(
                stats,
                [batch, heads, 2, LQ],
                [*stats.stride()],
                [1, 1, 1, BLOCK],
                stats_layout,
            )
            blocks = triton.cdiv(kept[0].shape[2], 2 * rows)
            _gluon_attention_backward_kernel[
                (blocks * batch * kept[0].shape[1],)
            ](
                *(describe(t, rows) for t in kept),
                *(describe(t, BLOCK) for t in along),
                stats_desc,
                stats,
                grads[0],
                grads[-1],
                float(scale),
                scale * math.log2(math.e),  # exp(x) is exp2(x * log2(e))
                heads // k.shape[1],
                KEYS=KEYS,
                CAUSAL=causal,
                STAGES=STAGES,
                num_warps=4,  # of the first consumer
                maxnreg=168,  # of all three warpgroups, before they are moved
            )
    return dq, dk, dv


@custom_op(
    f"{GLUON_ATTENTION_BACKWARD_NAMESPACE}::gluon_attention_backward",
    mutates_args=(),
)
def gluon_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given ``do``, that of attention.

    Takes what ``flash_attention_with_lse`` took and returned: q of (batch,
    heads, queries, D), k and v of (batch, heads / n, keys, D), and ``out`` of
    the shape of q, as ``do`` is, all of float16 or bfloat16, with D of 64 or
    128 and any strides; ``lse`` of (batch, heads, queries) in float32 is
    log2(sum(exp(q @ k.mT * scale))), a sum over the keys that a query sees.
    A tensor is copied if it is not contiguous along D, or if rows do not begin
    at multiples of 16 bytes. Head h of q reads head h // n of k and v. With
    ``causal``, query i sees keys 0 to i, whatever the number of keys.
    ``scale`` is a number, and 1 / sqrt(D) if not given.

    The gradients are contiguous, of the dtype of q, and deterministic. They are
    right for finite inputs only. With float16, the probabilities and the
    gradients of scores are rounded to float16: below 2**-14 these lose bits,
    from 2**-25 down they count as 0.

    Raises TypeError for other dtypes and for mixed dtypes or devices,
    ValueError for other shapes, and RuntimeError on devices other than NVIDIA's
    GPUs of compute capability 9.0. Has no gradient: a backward raises
    RuntimeError. The method: https://arxiv.org/abs/2307.08691 and
    https://arxiv.org/abs/2407.08608

    Rounding: scores, probabilities and sums are in float32. Probabilities and
    the gradients of scores are rounded to the dtype of q for their products,
    and each result is rounded once.
    """
    return _gluon_attention_backward_launch(
        do, q, k, v, out, lse, causal, scale
    )


@gluon_attention_backward.register_fake
def _gluon_attention_backward_fake(
    do, q, k, v, out, lse, causal=False, scale=None
):
    _gluon_attention_backward_check(do, q, k, v, out, lse)
    return tuple(map(_gluon_attention_backward_like, (q, k, v)))


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
GLUON_ATTENTION_BACKWARD_LIBRARY = Library(
    GLUON_ATTENTION_BACKWARD_NAMESPACE, "FRAGMENT"
)
GLUON_ATTENTION_BACKWARD_LIBRARY.impl(
    "gluon_attention_backward", _gluon_attention_backward_launch, "CUDA"
)
