"""Flash attention forward through TMA, for Hopper and newer GPUs.

Computes softmax(q @ k.T * scale) @ v, full or causal, in float16 or bfloat16 on
NVIDIA GPUs of compute capability 9.0 or more (FlashAttention-2: Dao, 2023,
arXiv:2307.08691). Head sizes are multiples of 8 up to 128; query heads may
share key heads. The copy engine loads blocks, so threads compute no addresses,
and causal tiles start longest first. As in PyTorch, a causal query i sees keys
0 to i. On Hopper, ``gluon_attention`` is faster for long causal sequences and a
head size of 128. ``flash_attention_forward`` takes other dtypes, head sizes and
GPUs. Deterministic, without a backward; ``flash_attention`` has one.
"""

import math
import threading
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
from triton.tools.tensor_descriptor import TensorDescriptor

HOPPER_ATTENTION_NAMESPACE = "triton_gallery"
HOPPER_ATTENTION_THREAD = threading.local()
# For D rounded up to 64 or 128: BLOCK_M, BLOCK_N, warps, stages
HOPPER_ATTENTION_TILES = {64: (64, 128, 4, 2), 128: (128, 64, 4, 2)}
HOPPER_ATTENTION_SMALL = (128, 32, 8, 2)  # where shared memory is small
HOPPER_ATTENTION_ROOM = 200_000  # bytes of it: with less, the small tile
HOPPER_ATTENTION_NEAR = 2**24  # bytes of a group's keys and values
HOPPER_ATTENTION_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit(do_not_specialize=["NEAR"])
def _hopper_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    NEAR,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOWEST: tl.constexpr,
):
    BLOCK_M: tl.constexpr = q_desc.block_shape[2]
    BLOCK_N: tl.constexpr = k_desc.block_shape[2]
    BLOCK_D: tl.constexpr = q_desc.block_shape[3]
    HEADS, LQ, LK = q_desc.shape[1], q_desc.shape[2], k_desc.shape[2]
    # The longest tiles of NEAR heads start first, then their shorter ones. So
    # the last programs are short, and few heads are in the L2 cache at once.
    rows, pid = tl.cdiv(LQ, BLOCK_M), tl.program_id(axis=0)
    first = pid // (NEAR * rows) * NEAR
    near = tl.minimum(q_desc.shape[0] * HEADS - first, NEAR)
    within = pid % (NEAR * rows)
    off_m = (rows - 1 - within // near) * BLOCK_M
    head = first + within % near
    batch, head = head // HEADS, head % HEADS
    q = q_desc.load([batch, head, off_m, 0]).reshape(BLOCK_M, BLOCK_D)
    if HOPPER_ATTENTION_INTERPRETED:
        q = q.to(tl.float32)  # the interpreter multiplies bfloat16 wrongly
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    m = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    # Keys up to here need no mask; from here to the end, some are not seen.
    full, end = LK // BLOCK_N * BLOCK_N, LK
    if CAUSAL:
        full = tl.minimum(full, off_m // BLOCK_N * BLOCK_N)
        end = tl.minimum(LK, off_m + BLOCK_M)
    for MASKED in tl.static_range(2):
        shared = head // GROUP  # the head of keys
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            k = k_desc.load([batch, shared, start, 0]).reshape(BLOCK_N, BLOCK_D)
            k = k.to(q.dtype)  # float32 in the interpreter
            s = tl.dot(q, k.T)  # (BLOCK_M, BLOCK_N)
            if MASKED:
                # A key past the end is zeros: its score is 0, and would count.
                offs_n = start + tl.arange(0, BLOCK_N)[None, :]
                seen = offs_n < k_desc.shape[2]
                if CAUSAL:
                    offs_m = off_m + tl.arange(0, BLOCK_M)[:, None]
                    seen = seen & (offs_n <= offs_m)
                s = tl.where(seen, s, -float("inf"))
            # One multiplication for a row's maximum, and none for each score:
            # the one below is part of a multiply-add.
            m_new = tl.maximum(m, tl.max(s, axis=1) * SCALE)
            p = tl.exp2(s * SCALE - m_new[:, None])  # (BLOCK_M, BLOCK_N)
            # What was added up so far had the old maximum.
            rescale = tl.exp2(m - m_new)
            total = total * rescale + tl.sum(p, axis=1)
            v = v_desc.load([batch, shared, start, 0]).reshape(BLOCK_N, BLOCK_D)
            # The tensor cores take p in the type of v.
            p, v = p.to(q.dtype), v.to(q.dtype)
            acc = tl.dot(p, v, acc * rescale[:, None])
            m = m_new
    # A row that saw nothing has a sum of 0, and a result of 0.
    acc = acc * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    acc = acc.to(out_desc.dtype).reshape(1, 1, BLOCK_M, BLOCK_D)
    out_desc.store([batch, head, off_m, 0], acc)


@cache
def _hopper_attention_room(device):
    """Return how many bytes of shared memory a program may have."""
    if device.type == "cpu":  # interpreted
        return HOPPER_ATTENTION_ROOM
    driver = triton.runtime.driver.active
    with torch.accelerator.device_index(device.index):
        target = driver.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        raise RuntimeError(
            "hopper_attention takes tensors on NVIDIA GPUs of compute "
            "capability 9.0 or more, which have a copy engine, and this is "
            f"{target.backend} {target.arch}: flash_attention_forward takes any"
        )
    return driver.utils.get_device_properties(device.index)["max_shared_mem"]


def _hopper_attention_check(q, k, v, scale):
    """Raise for what the op does not take."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"hopper_attention takes float16 and bfloat16, not {q.dtype}: "
            "flash_attention_forward takes wider ones"
        )
    if len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise TypeError(
            f"hopper_attention takes one dtype on one device, not {found}"
        )
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and q.shape[3] in range(8, 129, 8)
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        other = q.ndim == 4 and q.shape[3] not in range(8, 129, 8)
        hint = ": flash_attention_forward takes other D" if other else ""
        raise ValueError(
            "hopper_attention takes q of (batch, heads, queries, D), and k and "
            "v of one shape (batch, heads / n, keys, D), with D a multiple of "
            f"8 up to 128, not {found}{hint}"
        )
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(
            f"hopper_attention takes a positive scale, not {scale}: "
            "flash_attention_forward takes any"
        )


def _hopper_attention_taken(x):
    """Return x, or a copy of it if the copy engine does not take x."""
    # A dimension of size 1 may have any stride. The engine does not take rows
    # that overlap, as those of an expanded tensor do.
    pairs = zip(x.stride()[:3], x.shape[:3], strict=True)
    apart = all(s >= x.shape[3] and s % 8 == 0 for s, n in pairs if n > 1)
    if apart and x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _hopper_attention_descriptor(x, block_shape):
    pairs = zip(x.stride()[:3], x.shape[:3], strict=True)
    strides = [s if n > 1 else x.shape[3] for s, n in pairs]
    return TensorDescriptor(x, [*x.shape], [*strides, 1], [1, 1, *block_shape])


def _hopper_attention_launch(q, k, v, causal=False, scale=None):
    _hopper_attention_check(q, k, v, scale)
    room = _hopper_attention_room(q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.numel() * k.numel() == 0:
        return out.zero_()
    (batch, heads, LQ, D), LK = q.shape, k.shape[2]
    scale = D**-0.5 if scale is None else scale
    BLOCK_D = 64 if D <= 64 else 128
    tile = HOPPER_ATTENTION_TILES[BLOCK_D]
    if room < HOPPER_ATTENTION_ROOM:
        tile = HOPPER_ATTENTION_SMALL
    BLOCK_M, BLOCK_N, num_warps, num_stages = tile
    q, k, v = (_hopper_attention_taken(x) for x in (q, k, v))
    describe = _hopper_attention_descriptor
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        if q.is_cuda and not hasattr(HOPPER_ATTENTION_THREAD, "begun"):
            # No descriptor is made in a thread without CUDA's context.
            HOPPER_ATTENTION_THREAD.begun = torch.zeros(1, device=q.device)
        _hopper_attention_kernel[(triton.cdiv(LQ, BLOCK_M) * batch * heads,)](
            describe(q, [BLOCK_M, BLOCK_D]),
            describe(k, [BLOCK_N, BLOCK_D]),
            describe(v, [BLOCK_N, BLOCK_D]),
            describe(out, [BLOCK_M, BLOCK_D]),
            min(batch * heads, max(1, HOPPER_ATTENTION_NEAR // (4 * LK * D))),
            GROUP=heads // k.shape[1],
            # exp(x) is exp2(x * log2(e)).
            SCALE=scale * math.log2(math.e),
            CAUSAL=causal,
            LOWEST=torch.finfo(torch.float32).min,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return out


@custom_op(f"{HOPPER_ATTENTION_NAMESPACE}::hopper_attention", mutates_args=())
def hopper_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v, as PyTorch's SDPA does.

    Takes q of (batch, heads, queries, D), k and v of (batch, heads / n, keys,
    D), all of float16 or bfloat16, where D is a multiple of 8 up to 128. Head h
    of q reads head h // n of k and v. Strides may be any multiples of 16 bytes;
    a tensor that has others, or is not contiguous along D, is copied. With
    ``causal``, query i sees keys 0 to i, whatever the number of keys.
    ``scale`` is a positive number, and 1 / sqrt(D) if not given; each new scale
    compiles the kernel again.

    The result is contiguous, of the shape and dtype of q, and deterministic. A
    query that sees no key, or whose scores are all -inf, gives 0. Scores above
    2**27 or below -2**27 may give 0 or NaN: a GPU then rounds by more than exp2
    can take. In float16, weights below 2**-25 of the largest count as 0. A NaN
    or an infinity in v may reach queries that do not see its key.

    Raises TypeError for other dtypes and for mixed dtypes or devices,
    ValueError for other shapes and scales, and RuntimeError for GPUs without a
    copy engine: NVIDIA's have one from compute capability 9.0 on. Tensors on
    the CPU need Triton's interpreter, TRITON_INTERPRET=1. Has no gradient: a
    backward raises RuntimeError. The method: https://arxiv.org/abs/2307.08691

    Rounding: scores, softmax and sums are in float32. The weights of a softmax
    are rounded to the dtype of v for their product with v, and each result is
    rounded once.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    return _hopper_attention_launch(q, k, v, causal, scale)


@hopper_attention.register_fake
def _hopper_attention_fake(q, k, v, causal=False, scale=None):
    _hopper_attention_check(q, k, v, scale)
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _hopper_attention_gradient(ctx, grad):
    raise RuntimeError("hopper_attention has no gradient: flash_attention does")


hopper_attention.register_autograd(_hopper_attention_gradient)
# On a GPU a call goes to the launcher; all else goes on to the custom_op.
HOPPER_ATTENTION_LIBRARY = Library(HOPPER_ATTENTION_NAMESPACE, "FRAGMENT")
HOPPER_ATTENTION_LIBRARY.impl(
    "hopper_attention", _hopper_attention_launch, "CUDA"
)


def _hopper_attention_autocast(kind, q, k, v, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return hopper_attention(q, k, v, *options)


HOPPER_ATTENTION_LIBRARY.impl(
    "hopper_attention",
    partial(_hopper_attention_autocast, "cpu"),
    "AutocastCPU",
)
HOPPER_ATTENTION_LIBRARY.impl(
    "hopper_attention",
    partial(_hopper_attention_autocast, "cuda"),
    "AutocastCUDA",
)
