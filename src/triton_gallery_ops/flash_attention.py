"""Flash attention with its backward, for training.

Computes softmax(q @ k.T * scale) @ v, full or causal (FlashAttention-2: Dao,
2023, arXiv:2307.08691). The scores are never stored: the backward recomputes
them with one saved number per query, in two passes instead of one with atomics,
so gradients are deterministic too. Head sizes go up to 256; query heads may
share key heads (GQA). As in PyTorch's ``scaled_dot_product_attention``, a
causal query i sees keys 0 to i. On Hopper, all but short sequences with heads
of 64 or 128 go to the kernels of ``gluon_attention`` and
``gluon_attention_backward``.
``attention_variants`` has other masks, and ``varlen_attention`` takes packed
sequences. There is no second derivative.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton

from triton_gallery_ops.gluon_attention import (
    GLUON_ATTENTION_DTYPES,
    _gluon_attention_fits,
    _gluon_attention_launch,
)
from triton_gallery_ops.gluon_attention_backward import (
    _gluon_attention_backward_launch,
)

FLASH_ATTENTION_NAMESPACE = "triton_gallery"
# For D, padded to a power of two: the tiles of the forward, of the pass for dk
# and dv, and of the pass for dq. A tile is BLOCK_M, BLOCK_N, warps and stages.
FLASH_ATTENTION_TILES = {
    16: [(128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 3)],
    32: [(128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 3)],
    64: [(128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 3)],
    128: [(128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 3)],
    256: [(128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)],
}
# Tiles for Hopper. On other GPUs, those for heads of 64 may spill registers. A
# fifth number is how many registers a thread may take: with more than 128, one
# program of 8 warps would have a multiprocessor to itself.
FLASH_ATTENTION_HOPPER = {
    16: [(128, 64, 8, 3, 128), (128, 64, 4, 2), (128, 64, 8, 4)],
    32: [(128, 64, 8, 3, 128), (128, 64, 4, 2), (128, 64, 8, 4)],
    64: [(128, 64, 8, 3, 128), (128, 64, 4, 2), (128, 64, 8, 4)],
    128: [(128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 3)],
}
# In bytes. GPUs with less shared memory for a program than this (an A100 has
# more) take the SMALL tiles.
FLASH_ATTENTION_ROOM = 160_000
FLASH_ATTENTION_SMALL = {
    128: [(128, 64, 8, 3), (32, 64, 4, 2), (64, 32, 4, 2)],
    256: [(64, 32, 8, 2), (16, 32, 4, 1), (32, 32, 4, 1)],
}
# For D: how long queries and keys are at least for Gluon's kernels, forward and
# backward. An H200 was measured with as many of each, full and causal. With
# heads of 128, Gluon leads at all of these sizes: from 256 tokens and from 64
# programs on. With heads of 64 it does not at 1024 tokens forward and at 512
# backward, and leads at twice as many.
FLASH_ATTENTION_GLUON = {64: (2048, 1024), 128: (256, 256)}


@triton.jit
def _flash_attention_place(L, HEADS, BLOCK: tl.constexpr):
    """Return which block of a head this program has, the head and the batch."""
    blocks = tl.cdiv(L, BLOCK)
    pid = tl.program_id(axis=0)
    # In int32, an offset would overflow past element 2**31.
    head = (pid // blocks % HEADS).to(tl.int64)
    batch = (pid // blocks // HEADS).to(tl.int64)
    return pid % blocks, head, batch


# The forward, as in flash_attention_forward.py; it stores the log-sum-exp, too.
@triton.jit
def _flash_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    LQ,
    LK,
    HEADS,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE_2: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid, head, batch = _flash_attention_place(LQ, HEADS, BLOCK_M)
    # Later queries see more keys: programs with the most work start first.
    pid_m = tl.cdiv(LQ, BLOCK_M) - 1 - pid
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = offs_m.to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_d
    mask = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q = tl.load(q_ptrs + row * stride_ql, mask=mask, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    # Keys up to here need no mask; from here to the end, some are not seen.
    full, end = LK // BLOCK_N * BLOCK_N, LK
    if CAUSAL:
        full = tl.minimum(full, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
        end = tl.minimum(LK, (pid_m + 1) * BLOCK_M)
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            # Past D lies another head, or memory of another tensor.
            inside = offs_d < D  # (1, BLOCK_D)
            if MASKED:
                # Only the last block of keys can be ragged. This loop has it.
                inside = inside & (offs_n[:, None] < LK)  # (BLOCK_N, BLOCK_D)
            # In int32, a key's offset would overflow past element 2**31.
            row_n = offs_n[:, None].to(tl.int64)
            k = tl.load(k_ptrs + row_n * stride_kl, mask=inside, other=0.0)
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            s = s * SCALE_2  # which has the factor log2(e), for exp2
            if MASKED:
                # A padded key is zeros: its score of 0 would get a weight.
                seen = offs_n[None, :] < LK
                if CAUSAL:
                    seen = seen & (offs_n[None, :] <= offs_m)
                s = tl.where(seen, s, -float("inf"))  # (BLOCK_M, BLOCK_N)
            m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
            p = tl.exp2(s - m_new)  # (BLOCK_M, BLOCK_N)
            # What was added up so far had the old maximum.
            rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
            total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
            # NaN from past the end would stay NaN even with a weight of 0.
            v = tl.load(v_ptrs + row_n * stride_vl, mask=inside, other=0.0)
            # The tensor cores take p in the type of v.
            p = p.to(v.dtype)
            acc = acc * rescale
            acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
            m = m_new
    rows = (batch * HEADS + head) * LQ + row  # (BLOCK_M, 1)
    # A row that saw nothing has a sum of 0, and a result of 0.
    divisor = tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + rows * D + offs_d, acc / divisor, mask=mask)
    # The backward computes exp2(s - lse): with inf that is 0, as it should be.
    lse = tl.where(total == 0, float("inf"), m + tl.log2(divisor))
    tl.store(lse_ptr + rows, lse, mask=offs_m < LQ)


# The backward: first delta, then the pass for dk and dv, then the pass for dq.
@triton.jit
def _flash_attention_delta_kernel(
    out_ptr,
    grad_ptr,
    delta_ptr,
    LQ,
    HEADS,
    stride_gb,
    stride_gh,
    stride_gl,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_m, head, batch = _flash_attention_place(LQ, HEADS, BLOCK_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    mask = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    row = (batch * HEADS + head) * LQ + offs_m  # (BLOCK_M, 1)
    # Products of half precision would be rounded one by one.
    out = tl.load(out_ptr + row * D + offs_d, mask=mask, other=0.0).to(ACC)
    grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_d
    grad = tl.load(grad_ptrs + offs_m * stride_gl, mask=mask, other=0.0)
    # Padding of the head is zero in both, so it adds nothing.
    delta = tl.sum(out * grad, axis=1, keep_dims=True)  # (BLOCK_M, 1)
    tl.store(delta_ptr + row, delta, mask=offs_m < LQ)


@triton.jit
def _flash_attention_dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    LQ,
    LK,
    HEADS,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_dkb,
    stride_dkh,
    stride_dkl,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_2: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Earlier keys are seen by more queries: the most work starts first.
    pid_n, shared, batch = _flash_attention_place(LK, HEADS // GROUP, BLOCK_N)
    begin = pid_n * BLOCK_N
    offs_n = begin + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    mask = (offs_n < LK) & (offs_d < D)  # (BLOCK_N, BLOCK_D)
    row = offs_n.to(tl.int64)
    k_ptrs = k_ptr + batch * stride_kb + shared * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + shared * stride_vh + offs_d
    k = tl.load(k_ptrs + row * stride_kl, mask=mask, other=0.0)
    v = tl.load(v_ptrs + row * stride_vl, mask=mask, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    # Queries before `first` see none of these keys; from `full` on, all.
    first, full = 0, 0
    if CAUSAL:
        first = begin // BLOCK_M * BLOCK_M
        full = tl.cdiv(begin + BLOCK_N, BLOCK_M) * BLOCK_M
        # A ragged block of keys masks up to the end. It need not, but without
        # that the code for Hopper spills registers.
        full = LQ if begin + BLOCK_N > LK else tl.minimum(full, LQ)
    for member in range(GROUP):
        head = shared * GROUP + member
        sums = (batch * HEADS + head) * LQ
        q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
        grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_d
        lse_ptrs, delta_ptrs = lse_ptr + sums, delta_ptr + sums
        for MASKED in tl.static_range(1, -1, -1):
            for start in range(
                first if MASKED else full, full if MASKED else LQ, BLOCK_M
            ):
                offs_m = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
                row_m = offs_m[:, None].to(tl.int64)
                # Queries past the end have zeros for q, grad and delta: they
                # add zeros.
                inside = (row_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
                q = tl.load(q_ptrs + row_m * stride_ql, mask=inside, other=0.0)
                lse = tl.load(lse_ptrs + offs_m, mask=offs_m < LQ, other=0.0)
                s = tl.dot(k, q.T, input_precision="ieee", out_dtype=ACC)
                p = tl.exp2(s * SCALE_2 - lse[None, :])  # (BLOCK_N, BLOCK_M)
                if MASKED:
                    # Later keys are hidden. Padded keys may stay: their sums,
                    # which are in rows of their own, are not stored.
                    p = tl.where(offs_n <= offs_m[None, :], p, 0.0)
                grad = tl.load(
                    grad_ptrs + row_m * stride_gl, mask=inside, other=0.0
                )
                w = p.to(grad.dtype)
                dv = tl.dot(w, grad, dv, input_precision="ieee", out_dtype=ACC)
                dp = tl.dot(v, grad.T, input_precision="ieee", out_dtype=ACC)
                delta = tl.load(delta_ptrs + offs_m, offs_m < LQ, other=0.0)
                # The tensor cores take ds in the type of q.
                ds = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
                ds = ds.to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee", out_dtype=ACC)
    offs = batch * stride_dkb + shared * stride_dkh + row * stride_dkl + offs_d
    tl.store(dk_ptr + offs, dk * SCALE, mask=mask)
    tl.store(dv_ptr + offs, dv, mask=mask)


@triton.jit
def _flash_attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    LQ,
    LK,
    HEADS,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_gb,
    stride_gh,
    stride_gl,
    stride_dqb,
    stride_dqh,
    stride_dql,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_2: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid, head, batch = _flash_attention_place(LQ, HEADS, BLOCK_M)
    # Later queries see more keys: the most work starts first.
    pid_m = tl.cdiv(LQ, BLOCK_M) - 1 - pid
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = offs_m.to(tl.int64)
    mask = (offs_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_d
    grad_ptrs = grad_ptr + batch * stride_gb + head * stride_gh + offs_d
    dq_ptrs = dq_ptr + batch * stride_dqb + head * stride_dqh + offs_d
    q = tl.load(q_ptrs + row * stride_ql, mask=mask, other=0.0)
    grad = tl.load(grad_ptrs + row * stride_gl, mask=mask, other=0.0)
    # One log-sum-exp and one delta for each query of each head
    sums = (batch * HEADS + head) * LQ + row
    lse = tl.load(lse_ptr + sums, mask=offs_m < LQ, other=0.0)
    delta = tl.load(delta_ptr + sums, mask=offs_m < LQ, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    # As in the forward: keys up to `full` need no mask.
    full, end = LK // BLOCK_N * BLOCK_N, LK
    if CAUSAL:
        full = tl.minimum(full, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
        end = tl.minimum(LK, (pid_m + 1) * BLOCK_M)
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            # Past D lies another head, or memory of another tensor.
            inside = offs_d < D  # (1, BLOCK_D)
            if MASKED:
                # Only the last block of keys can be ragged. This loop has it.
                inside = inside & (offs_n[:, None] < LK)  # (BLOCK_N, BLOCK_D)
            # In int32, a key's offset would overflow past element 2**31.
            row_n = offs_n[:, None].to(tl.int64)
            k = tl.load(k_ptrs + row_n * stride_kl, mask=inside, other=0.0)
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            p = tl.exp2(s * SCALE_2 - lse)  # (BLOCK_M, BLOCK_N)
            if MASKED:
                # A padded key scores 0: its p may be inf, and dq then NaN.
                seen = offs_n[None, :] < LK
                if CAUSAL:
                    seen = seen & (offs_n[None, :] <= offs_m)
                p = tl.where(seen, p, 0.0)
            v = tl.load(v_ptrs + row_n * stride_vl, mask=inside, other=0.0)
            dp = tl.dot(grad, v.T, input_precision="ieee", out_dtype=ACC)
            # The tensor cores take ds in the type of k.
            ds = (p * (dp - delta)).to(k.dtype)  # (BLOCK_M, BLOCK_N)
            dq = tl.dot(ds, k, dq, input_precision="ieee", out_dtype=ACC)
    # All terms have the factor SCALE: once at the end is cheaper than for each.
    tl.store(dq_ptrs + row * stride_dql, dq * SCALE, mask=mask)


@functools.cache
def _flash_attention_tiles(device, BLOCK_D, itemsize):
    """Return the blocks, warps and stages of the three kernels."""
    tiles = FLASH_ATTENTION_TILES[BLOCK_D]
    if device.type == "cuda":  # not the interpreter
        gpu = torch.cuda.get_device_properties(device)
        room = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
        if room < FLASH_ATTENTION_ROOM:
            tiles = FLASH_ATTENTION_SMALL.get(BLOCK_D, tiles)
        elif gpu.major == 9:
            tiles = FLASH_ATTENTION_HOPPER.get(BLOCK_D, tiles)
    if itemsize > 2:  # float32 and float64: operands take registers
        n, num_warps = (32, 4) if BLOCK_D <= 64 else (16, 8)
        tiles = [(32, 16, 4, 1), (16, n, 4, 1), (n, 16, num_warps, 1)]
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "maxnreg"
    tiles = [dict(zip(names, tile, strict=False)) for tile in tiles]
    for tile in tiles if torch.version.hip else ():
        tile.pop("maxnreg", None)  # CUDA's alone
        # Two stages fit AMD's shared memory.
        tile["num_stages"] = min(2, tile["num_stages"])
    return tiles


@functools.cache
def _flash_attention_hopper(device):
    """Return whether Gluon's kernels are written for a GPU."""
    if device.type != "cuda" or torch.version.hip:
        return False
    gpu = torch.cuda.get_device_properties(device)
    return (gpu.major, gpu.minor) == (9, 0)


def _flash_attention_in_gluon(q, k, scale, backward):
    """Return whether a call goes to Gluon's kernels: where they lead.

    If torch.compile leaves a length open, this returns whether it may.
    """
    least = FLASH_ATTENTION_GLUON.get(int(q.shape[3]))
    takes = least is not None and q.dtype in GLUON_ATTENTION_DTYPES
    # Gluon finds the maximum of the scores before it scales them.
    if not takes or not (scale is None or 0 < scale < math.inf):
        return False
    LQ, LK = q.shape[2], k.shape[2]
    if not (isinstance(LQ, int) and isinstance(LK, int)):
        return True  # a comparison would make a graph for each result
    return min(LQ, LK) >= least[backward]


def _flash_attention_is_open(q, k, scale, backward):
    """Return whether a graph leaves the choice to the time when it runs.

    Gluon's kernels are no part of a graph. A package of AOTInductor runs
    without Python, and so has Triton's alone.
    """
    if not _flash_attention_hopper(q.device):
        return False
    from torch._inductor.virtualized import V

    if V.aot_compilation:
        return False
    return _flash_attention_in_gluon(q, k, scale, backward)


def _flash_attention_check(q, k, v):
    name = "flash_attention"
    if not q.is_floating_point() or q.element_size() == 1:  # float8
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    if len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise TypeError(f"{name} takes one dtype on one device, not {found}")
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and 1 <= q.shape[3] <= 256
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(
            f"{name} takes q of (batch, heads, queries, D), and k and v of one "
            "shape (batch, heads / n, keys, D), with D up to 256, not " + found
        )


def _flash_attention_rows(*tensors):
    """Return tensors that are contiguous along D."""
    return [t if t.stride(3) == 1 else t.contiguous() for t in tensors]


def _flash_attention_like(t):
    """Return memory for a gradient of t: in the order of t, adjacent along D.

    Where elements of t share memory, ``empty_like`` may choose another order.
    """
    new = torch.empty_like(t)
    return new if new.stride(3) == 1 else new.new_empty(t.shape)


def _flash_attention_read(*tensors):
    """Return tensors as kernels read them, and their strides."""
    if triton.knobs.runtime.interpret and tensors[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        tensors = [t.float().contiguous() for t in tensors]
    return tensors, [stride for t in tensors for stride in t.stride()[:3]]


def _flash_attention_common(q, k, lse, causal, scale):
    """Return the constants that both directions have."""
    # torch.compile would keep it open, and a constant cannot be.
    D = int(q.shape[3])
    return {
        "GROUP": int(q.shape[1] // k.shape[1]),
        "D": D,
        "SCALE_2": scale * math.log2(math.e),  # exp(x) is exp2(x * log2(e))
        "CAUSAL": causal,
        "ACC": tl.float64 if lse.dtype == torch.float64 else tl.float32,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }


def _flash_attention_results(q):
    """Return memory for the result and for the log-sum-exp."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, q.new_empty(q.shape[:3], dtype=wide)


def _flash_attention_launch(
    q, k, v, causal=False, scale=None, kernel=_flash_attention_kernel
):
    _flash_attention_check(q, k, v)
    batch, heads, LQ, D = q.shape
    out, lse = _flash_attention_results(q)
    if out.numel() == 0:
        return out, lse
    scale = int(D) ** -0.5 if scale is None else scale
    common = _flash_attention_common(q, k, lse, causal, scale)
    BLOCK_D, size = common["BLOCK_D"], q.dtype.itemsize
    tile = _flash_attention_tiles(q.device, BLOCK_D, size)[0]
    LOWEST = torch.finfo(lse.dtype).min
    read, strides = _flash_attention_read(*_flash_attention_rows(q, k, v))
    grid = (triton.cdiv(LQ, tile["BLOCK_M"]) * batch * heads,)
    sizes = LQ, k.shape[2], heads, *strides
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        kernel[grid](*read, out, lse, *sizes, LOWEST=LOWEST, **common, **tile)
    return out, lse


def _flash_attention_backward_launch(
    grad,
    q,
    k,
    v,
    out,
    lse,
    causal,
    scale,
    delta_kernel=_flash_attention_delta_kernel,
    dkv_kernel=_flash_attention_dkv_kernel,
    dq_kernel=_flash_attention_dq_kernel,
):
    q, k, v, grad = _flash_attention_rows(q, k, v, grad)
    batch, heads, LQ, D = q.shape
    shared, LK = int(k.shape[1]), k.shape[2]
    # The gradients lie in memory as q and k do, so autograd need not copy them.
    dq, dk, dv = map(_flash_attention_like, (q, k, k))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    scale = int(D) ** -0.5 if scale is None else scale
    common = _flash_attention_common(q, k, lse, causal, scale)
    BLOCK_D, size = common["BLOCK_D"], q.dtype.itemsize
    tiles = _flash_attention_tiles(q.device, BLOCK_D, size)
    for_keys, for_queries = tiles[1:]
    read, strides = _flash_attention_read(q, k, v, grad)
    sizes = LQ, LK, heads, *strides
    of_delta = {name: common[name] for name in ("D", "ACC", "BLOCK_D")}
    common["SCALE"] = scale
    with torch.accelerator.device_index(q.device.index):
        pointers = out.contiguous(), read[3], delta
        delta_kernel[(triton.cdiv(LQ, 32) * batch * heads,)](
            *pointers, LQ, heads, *strides[9:], **of_delta, BLOCK_M=32
        )
        blocks = triton.cdiv(LK, for_keys["BLOCK_N"])
        pointers = *read, lse, delta, dk, dv
        dkv_kernel[(blocks * batch * shared,)](
            *pointers, *sizes, *dk.stride()[:3], **common, **for_keys
        )
        blocks = triton.cdiv(LQ, for_queries["BLOCK_M"])
        pointers = *read, lse, delta, dq
        dq_kernel[(blocks * batch * heads,)](
            *pointers, *sizes, *dq.stride()[:3], **common, **for_queries
        )
    return dq, dk, dv


# Both ways keep one log-sum-exp, so the backward need not be the forward's.
def _flash_attention_run(q, k, v, causal=False, scale=None):
    """Compute with Gluon's kernels where they lead, with Triton's elsewhere."""
    if _flash_attention_hopper(q.device):
        _flash_attention_check(q, k, v)
        # For the others, the copy engine would need a copy in memory.
        in_gluon = _flash_attention_in_gluon(q, k, scale, backward=False)
        if in_gluon and all(map(_gluon_attention_fits, (q, k, v))):
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
            return _gluon_attention_launch(q, k, v, causal, scale, lse), lse
    return _flash_attention_launch(q, k, v, causal, scale)


def _flash_attention_backward_run(grad, q, k, v, out, lse, causal, scale):
    given = grad, q, k, v, out, lse, causal, scale
    if _flash_attention_hopper(q.device):
        in_gluon = _flash_attention_in_gluon(q, k, scale, backward=True)
        if in_gluon and all(map(_gluon_attention_fits, (grad, q, k, v))):
            # Gradients lie in memory as those of the other kernels do.
            like = _flash_attention_like
            return _gluon_attention_backward_launch(*given, like)
    return _flash_attention_backward_launch(*given)


# What torch.compile calls where the choice is open: it does not look into these
@custom_op(f"{FLASH_ATTENTION_NAMESPACE}::flash_attention_run", mutates_args=())
def _flash_attention_open(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _flash_attention_run(q, k, v, causal, scale)


@custom_op(
    f"{FLASH_ATTENTION_NAMESPACE}::flash_attention_backward_run",
    mutates_args=(),
)
def _flash_attention_backward_open(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _flash_attention_backward_run(grad, q, k, v, out, lse, causal, scale)


@_flash_attention_open.register_fake
def _flash_attention_fake(q, k, v, causal, scale):
    return _flash_attention_results(q)


@_flash_attention_backward_open.register_fake
def _flash_attention_backward_fake(grad, q, k, v, out, lse, causal, scale):
    return tuple(map(_flash_attention_like, (q, k, k)))


@triton_op(f"{FLASH_ATTENTION_NAMESPACE}::flash_attention", mutates_args={})
def flash_attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what flash_attention does, and the log-sum-exp of each row.

    That is log2(sum(exp(q @ k.mT * scale))), a sum over the keys that a query
    sees: of (batch, heads, queries), in float32, or float64 for float64. It is
    ``inf`` for a query that sees nothing. It has no gradient.
    """
    _flash_attention_check(q, k, v)
    if _flash_attention_is_open(q, k, scale, backward=False):
        return _flash_attention_open(q, k, v, causal, scale)
    kernel = wrap_triton(_flash_attention_kernel)
    return _flash_attention_launch(q, k, v, causal, scale, kernel)


@triton_op(
    f"{FLASH_ATTENTION_NAMESPACE}::flash_attention_backward", mutates_args={}
)
def flash_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of out.

    Takes what ``flash_attention_with_lse`` took and returned, and checks none
    of it. Second derivatives are not supported.
    """
    given = grad, q, k, v, out, lse, causal, scale
    if _flash_attention_is_open(q, k, scale, backward=True):
        return _flash_attention_backward_open(*given)
    kernels = (
        wrap_triton(_flash_attention_delta_kernel),
        wrap_triton(_flash_attention_dkv_kernel),
        wrap_triton(_flash_attention_dq_kernel),
    )
    return _flash_attention_backward_launch(*given, *kernels)


def _flash_attention_setup(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _flash_attention_gradient(ctx, grad, _):
    options = ctx.causal, ctx.scale
    grads = flash_attention_backward(grad, *ctx.saved_tensors, *options)
    return *grads, None, None


flash_attention_with_lse.register_autograd(
    _flash_attention_gradient, setup_context=_flash_attention_setup
)

# On a GPU a call goes to a launcher; all else goes on to the op.
FLASH_ATTENTION_LIBRARY = Library(FLASH_ATTENTION_NAMESPACE, "FRAGMENT")
FLASH_ATTENTION_LIBRARY.impl("flash_attention", _flash_attention_run, "CUDA")
FLASH_ATTENTION_LIBRARY.impl(
    "flash_attention_run", _flash_attention_run, "CUDA"
)
FLASH_ATTENTION_LIBRARY.impl(
    "flash_attention_backward", _flash_attention_backward_run, "CUDA"
)
FLASH_ATTENTION_LIBRARY.impl(
    "flash_attention_backward_run", _flash_attention_backward_run, "CUDA"
)


def _flash_attention_autocast(kind, q, k, v, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return flash_attention_with_lse(q, k, v, *options)


FLASH_ATTENTION_LIBRARY.impl(
    "flash_attention",
    functools.partial(_flash_attention_autocast, "cpu"),
    "AutocastCPU",
)
FLASH_ATTENTION_LIBRARY.impl(
    "flash_attention",
    functools.partial(_flash_attention_autocast, "cuda"),
    "AutocastCUDA",
)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v, as PyTorch's SDPA does.

    Takes q of (batch, heads, queries, D), k and v of (batch, heads / n, keys,
    D), all of float16, bfloat16, float32 or float64, with D up to 256 and any
    strides; it copies what is not contiguous along D. Each n heads of q share
    one of k and v. Float32 keeps its 24 bits, so it does without tensor cores.
    With ``causal``, query i sees keys 0 to i; there is no other mask, and no
    dropout. ``scale`` is a number, 1 / sqrt(D) if not given; the kernels are
    compiled for each. The result is contiguous, of the shape and dtype of q,
    and deterministic; on Hopper, sizes and strides decide which kernels compute
    it, and so its last bits. A query that sees nothing, or whose scores are
    all -inf, gives 0. Scores above 2**27 or below -2**27, in float64 2**56, may
    give 0 or NaN: a GPU then rounds by more than exp2 can take. A NaN or an
    infinity may reach queries and keys that it is hidden from.

    The gradients have the dtype of q, are deterministic, and have no gradient
    themselves. They are right for finite inputs only. With float16 inputs, the
    backward rounds the probabilities and the gradients of scores to float16:
    below 2**-14 these lose bits, from 2**-25 down they count as 0.

    Raises TypeError for other dtypes and for tensors on different devices, and
    ValueError for other shapes. The method: https://arxiv.org/abs/2307.08691

    Rounding: scores, softmax and sums are in float32, or float64 for float64.
    The weights of a softmax are rounded to the dtype of v for their product
    with v, and each result is rounded once. In the backward, weights and the
    gradients of scores are rounded likewise.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    return flash_attention_with_lse(q, k, v, causal, scale)[0]
