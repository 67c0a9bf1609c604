"""Flash attention forward in Gluon with specialized warps, for Hopper only.

Computes softmax(q @ k.T * scale) @ v, full or causal, in float16 or bfloat16,
with a head size of 64 or 128, on NVIDIA GPUs of compute capability 9.0
(methods: Dao, 2023, arXiv:2307.08691; Shah et al., 2024, arXiv:2407.08608). One
warp loads, and two groups of four compute, so one group can multiply while the
other computes exponentials. As in PyTorch, a causal query i sees keys 0 to i.
For a head size of 64, ``hopper_attention`` is faster except at the longest
sequences. ``flash_attention_forward`` takes other dtypes, head sizes and GPUs.
Deterministic, without a backward; ``flash_attention`` has one.
"""

import math
import threading
from functools import cache, partial

import torch
import triton
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

GLUON_ATTENTION_NAMESPACE = "triton_gallery"
GLUON_ATTENTION_THREAD = threading.local()
GLUON_ATTENTION_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
}
GLUON_ATTENTION_TILE = (64, 128)  # queries of a consumer, keys of a step
GLUON_ATTENTION_STAGES = 2
# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
_gluon_attention_load = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)
_gluon_attention_store = (
    getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
)


@gluon.jit
def _gluon_attention_produce(q_desc, k_desc, v_desc, place, tiles, ring, group):
    batch, head, row, steps = place
    q, k, v = tiles
    q_full, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = k.shape[0]
    ROWS: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    nbytes: gl.constexpr = k_desc.block_type.nbytes
    shared = head // group  # the head of keys
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    for half in gl.static_range(2):
        _gluon_attention_load(
            q_desc, [batch, head, row + half * ROWS, 0], q_full, q.index(half)
        )
    for n in range(steps):
        stage, phase = n % STAGES, n // STAGES & 1
        key = (steps - 1 - n) * BLOCK_N  # from the last tile to the first
        # Both consumers have arrived for step n - STAGES. A new barrier
        # counts the phase before its first one as ended.
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        # The one arrival at full. The phase ends with the last byte; those
        # that the engine fills with zeros count as well.
        bar = k_full.index(stage)
        mbarrier.expect(bar, nbytes)
        _gluon_attention_load(
            k_desc, [batch, shared, key, 0], bar, k.index(stage)
        )
        # Values have barriers of their own: keys are needed, and given back,
        # one step earlier.
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        bar = v_full.index(stage)
        mbarrier.expect(bar, nbytes)
        _gluon_attention_load(
            v_desc, [batch, shared, key, 0], bar, v.index(stage)
        )


@gluon.jit
def _gluon_attention_weigh(s, m, total, scale):
    """Return exponentials of scores, the new maximum and sum, a factor."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
    # If all scores are -inf so far, -inf minus -inf would be NaN.
    origin = gl.where(m_new == -float("inf"), 0.0, m_new)
    # One rounding, whatever Triton's default
    p = gl.exp2(gl.fma(s, scale, -origin[:, None]))
    # What was added up so far had the old maximum.
    factor = gl.exp2(m - origin)
    return p, m_new, total * factor + gl.sum(p, axis=1), factor


@gluon.jit
def _gluon_attention_consume(
    HALF: gl.constexpr, both, lse_ptr, CAUSAL: gl.constexpr
):
    o_desc, place, tiles, ring, o, LK, scale = both
    batch, head, row, steps = place
    q, k, v = tiles
    q_full, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = k.shape[0]
    ROWS: gl.constexpr = q.shape[3]
    BLOCK_N: gl.constexpr = k.shape[3]
    D: gl.constexpr = k.shape[4]
    dtype: gl.constexpr = o_desc.dtype
    # Hopper's version; the warps of rows and of columns; a warp's M, N and K
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, D, 16]
    )
    FIRST: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)
    row += HALF * ROWS
    mine = q.index(HALF).reshape([ROWS, D])
    m = gl.full((ROWS,), -float("inf"), gl.float32, LINE)
    total = gl.zeros((ROWS,), gl.float32, LINE)
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    acc = gl.zeros((ROWS, D), gl.float32, SUMS)
    # The last tile of keys comes first: it alone can be ragged or at the
    # diagonal. Each query sees one of its keys.
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    keys = k.index(0).reshape([BLOCK_N, D]).permute([1, 0])
    s = warpgroup_mma(mine, keys, zeros, use_acc=False)  # (ROWS, BLOCK_N)
    mbarrier.arrive(k_empty.index(0))
    offs_n = (steps - 1) * BLOCK_N + gl.arange(
        0, BLOCK_N, gl.SliceLayout(0, SCORES)
    )
    offs_m = row + gl.arange(0, ROWS, LINE)
    # A key past the end is zeros: its score is 0, and would have a weight.
    last = gl.minimum(offs_m, LK - 1)[:, None] if CAUSAL else LK - 1
    s = gl.where(offs_n[None, :] <= last, s, -float("inf"))
    p, m, total, _ = _gluon_attention_weigh(s, m, total, scale)
    p = gl.convert_layout(p.to(dtype), FIRST)
    for n in range(1, steps):
        stage, before = n % STAGES, (n - 1) % STAGES
        mbarrier.wait(v_full.index(before), (n - 1) // STAGES & 1)
        mbarrier.wait(k_full.index(stage), n // STAGES & 1)
        keys = k.index(stage).reshape([BLOCK_N, D]).permute([1, 0])
        s = warpgroup_mma(mine, keys, zeros, use_acc=False, is_async=True)
        values = v.index(before).reshape([BLOCK_N, D])
        acc = warpgroup_mma(p, values, acc, is_async=True)
        # The first product is done, the second one may go on.
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(stage))
        p, m, total, factor = _gluon_attention_weigh(s, m, total, scale)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before))
        factor = gl.convert_layout(factor, gl.SliceLayout(1, SUMS))
        acc = acc * factor[:, None]
        p = gl.convert_layout(p.to(dtype), FIRST)
    mbarrier.wait(v_full.index((steps - 1) % STAGES), (steps - 1) // STAGES & 1)
    values = v.index((steps - 1) % STAGES).reshape([BLOCK_N, D])
    acc = warpgroup_mma(p, values, acc)
    if lse_ptr is not None:
        # A backward computes exp2(s - lse): 0 in a row that saw nothing.
        lse = gl.where(total == 0, float("inf"), m + gl.log2(total))
        heads, LQ = o_desc.shape[1], o_desc.shape[2]
        lse_ptrs = lse_ptr + (batch * heads + head).to(gl.int64) * LQ + offs_m
        gl.store(lse_ptrs, lse, offs_m < LQ)
    # A row that saw nothing has a sum of 0, and a result of 0.
    total = gl.where(total == 0, 1.0, total)
    total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
    out = o.index(HALF)
    out.reshape([ROWS, D]).store((acc / total[:, None]).to(dtype))
    fence_async_shared()  # what threads wrote, the engine reads
    _gluon_attention_store(o_desc, [batch, head, row, 0], out)
    tma.store_wait(0)  # the shared memory is another program's soon


@gluon.jit
def _gluon_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,  # None where nobody needs it
    scale,
    group,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    ROWS: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    dtype: gl.constexpr = q_desc.dtype
    gl.static_assert(2 * ROWS == BLOCK_N)  # the mask is applied to one tile
    q_shape: gl.constexpr = [2] + q_desc.block_shape
    k_shape: gl.constexpr = [STAGES] + k_desc.block_shape
    q = gl.allocate_shared_memory(dtype, q_shape, q_desc.layout)
    k = gl.allocate_shared_memory(dtype, k_shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, k_shape, v_desc.layout)
    o = gl.allocate_shared_memory(dtype, q_shape, o_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], kind)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)  # the producer's expect
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # one of each consumer
        mbarrier.init(v_empty.index(stage), count=2)
    heads, LQ, LK = q_desc.shape[1], q_desc.shape[2], k_desc.shape[2]
    blocks = gl.cdiv(LQ, 2 * ROWS)
    pid = gl.program_id(axis=0)
    # Later queries see more keys: programs with the most work start first.
    row = (blocks - 1 - pid % blocks) * 2 * ROWS
    head, batch = pid // blocks % heads, pid // blocks // heads
    end = gl.minimum(LK, row + 2 * ROWS) if CAUSAL else LK
    place = batch, head, row, gl.cdiv(end, BLOCK_N)
    tiles, ring = (q, k, v), (q_full, k_full, k_empty, v_full, v_empty)
    both = (o_desc, place, tiles, ring, o, LK, scale)
    gl.warp_specialize(
        [
            # What may be a constant is passed here, and not inside ``both``,
            # to stay one.
            (_gluon_attention_consume, (0, both, lse_ptr, CAUSAL)),
            (_gluon_attention_consume, (1, both, lse_ptr, CAUSAL)),
            (
                _gluon_attention_produce,
                (q_desc, k_desc, v_desc, place, tiles, ring, group),
            ),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and registers of their threads
    )


@cache
def _gluon_attention_gpu(device):
    """Raise for devices that the kernel is not written for."""
    if device.type == "cuda" and not torch.version.hip:
        gpu = torch.cuda.get_device_properties(device)
        if (gpu.major, gpu.minor) == (9, 0):
            return
    raise RuntimeError(
        "gluon_attention takes tensors on NVIDIA GPUs of compute capability "
        "9.0 alone, whose instructions it names, not on "
        f"{device}: flash_attention_forward takes any"
    )


def _gluon_attention_check(q, k, v, scale):
    """Raise for what the op does not take; return the scale."""
    if q.dtype not in GLUON_ATTENTION_DTYPES:
        raise TypeError(
            f"gluon_attention takes float16 and bfloat16, not {q.dtype}: "
            "flash_attention_forward takes others"
        )
    if len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise TypeError(
            f"gluon_attention takes one dtype on one device, not {found}"
        )
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and q.shape[3] in (64, 128)
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(
            "gluon_attention takes q of (batch, heads, queries, D), and k and "
            "v of one shape (batch, heads / n, keys, D), with D of 64 or 128, "
            f"not {found}: flash_attention_forward takes D up to 256"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        # The maximum of the scores is found before they are scaled.
        raise ValueError(
            f"gluon_attention takes a positive scale, not {scale}: "
            "flash_attention_forward takes any"
        )
    return scale


def _gluon_attention_fits(x):
    """Return whether the copy engine takes rows of x."""
    D = x.shape[3]
    sides = zip(x.shape[:3], x.stride()[:3], strict=True)
    # Rows begin at multiples of 16 bytes, and do not overlap. The stride of a
    # dimension of one may be anything.
    fits = all(step >= D and step % 8 == 0 for n, step in sides if n > 1)
    return fits and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def _gluon_attention_aligned(x):
    """Return x, or a copy of it, with rows that the copy engine takes."""
    if _gluon_attention_fits(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache  # to make one takes longer than the rest of a descriptor
def _gluon_attention_layout(rows, D, dtype):
    kind = GLUON_ATTENTION_DTYPES[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], kind)


def _gluon_attention_descriptor(x, rows):
    D, sides = x.shape[3], zip(x.shape, x.stride(), strict=True)
    strides = [step if n > 1 else x.shape[3] for n, step in sides]
    layout = _gluon_attention_layout(rows, D, x.dtype)
    return GluonDescriptor(x, [*x.shape], strides, [1, 1, rows, D], layout)


def _gluon_attention_launch(q, k, v, causal=False, scale=None, lse=None):
    """Return the result; ``lse``, if given, gets each row's log-sum-exp."""
    scale = _gluon_attention_check(q, k, v, scale)
    _gluon_attention_gpu(q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() * k.numel() == 0:
        return out.zero_()
    q, k, v = (_gluon_attention_aligned(x) for x in (q, k, v))
    rows, keys = GLUON_ATTENTION_TILE
    batch, heads, queries, _ = q.shape
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        if not hasattr(GLUON_ATTENTION_THREAD, "begun"):
            # A thread has no context until torch uses it, and no descriptor
            # is made without one. Autograd has threads of its own.
            torch.zeros(1, device=q.device)
            GLUON_ATTENTION_THREAD.begun = True
        blocks = triton.cdiv(queries, 2 * rows)
        _gluon_attention_kernel[(blocks * batch * heads,)](
            _gluon_attention_descriptor(q, rows),
            _gluon_attention_descriptor(k, keys),
            _gluon_attention_descriptor(v, keys),
            _gluon_attention_descriptor(out, rows),
            lse,
            scale * math.log2(math.e),  # exp(x) is exp2(x * log2(e))
            heads // k.shape[1],
            CAUSAL=causal,
            STAGES=GLUON_ATTENTION_STAGES,
            num_warps=4,  # of the first consumer
            maxnreg=168,  # of all three warpgroups, before they are moved
        )
    return out


@custom_op(f"{GLUON_ATTENTION_NAMESPACE}::gluon_attention", mutates_args=())
def gluon_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v, as PyTorch's SDPA does.

    Takes q of (batch, heads, queries, D), k and v of (batch, heads / n, keys,
    D), all of float16 or bfloat16, with D of 64 or 128 and any strides. A
    tensor is copied if it is not contiguous along D, or if rows do not begin at
    multiples of 16 bytes. Head h of q reads head h // n of k and v. With
    ``causal``, query i sees keys 0 to i, whatever the number of keys.
    ``scale`` is a positive number, and 1 / sqrt(D) if not given.

    The result is contiguous, of the shape and dtype of q, and deterministic. A
    query that sees no key, or whose scores are all -inf, gives 0. Scores above
    2**27 or below -2**27 may give 0 or NaN: a GPU then rounds by more than exp2
    can take. In float16, weights below 2**-25 of the largest count as 0. A NaN
    or an infinity in v may reach queries that do not see its key.

    Raises TypeError for other dtypes and for mixed dtypes or devices,
    ValueError for other shapes and scales, and RuntimeError on devices other
    than NVIDIA's GPUs of compute capability 9.0. Has no gradient: a backward
    raises RuntimeError. The method: https://arxiv.org/abs/2307.08691 and
    https://arxiv.org/abs/2407.08608

    Rounding: scores, softmax and sums are in float32. The weights of a softmax
    are rounded to the dtype of v for their product with v, and each result is
    rounded once.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    return _gluon_attention_launch(q, k, v, causal, scale)


@gluon_attention.register_fake
def _gluon_attention_fake(q, k, v, causal=False, scale=None):
    _gluon_attention_check(q, k, v, scale)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
GLUON_ATTENTION_LIBRARY = Library(GLUON_ATTENTION_NAMESPACE, "FRAGMENT")
GLUON_ATTENTION_LIBRARY.impl("gluon_attention", _gluon_attention_launch, "CUDA")


def _gluon_attention_autocast(kind, q, k, v, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return gluon_attention(q, k, v, *options)


GLUON_ATTENTION_LIBRARY.impl(
    "gluon_attention", partial(_gluon_attention_autocast, "cpu"), "AutocastCPU"
)
GLUON_ATTENTION_LIBRARY.impl(
    "gluon_attention",
    partial(_gluon_attention_autocast, "cuda"),
    "AutocastCUDA",
)
