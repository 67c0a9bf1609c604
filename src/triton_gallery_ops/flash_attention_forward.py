"""Flash attention without a backward, for inference.

Computes softmax(q @ k.T * scale) @ v, full or causal, with the scores in
registers (FlashAttention-2: Dao, 2023, arXiv:2307.08691). Head sizes go up to
256, and query heads may share key heads (GQA). Blocks that a causal mask hides
are skipped. As in PyTorch's ``scaled_dot_product_attention``, a causal query i
sees keys 0 to i; there is no other mask and no dropout. Float32 has full
precision, not TF32. ``hopper_attention`` and ``gluon_attention`` are faster on
Hopper; ``flash_attention`` has a backward; ``attention_variants`` has other
masks, and ``varlen_attention`` takes packed sequences. Deterministic.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

FLASH_ATTENTION_FORWARD_NAMESPACE = "triton_gallery"
# For a padded head: queries and keys of a block, warps, stages
FLASH_ATTENTION_FORWARD_TILES = {
    16: (128, 64, 8, 3),
    32: (128, 64, 8, 3),
    64: (128, 64, 8, 3),
    128: (128, 64, 8, 3),
    256: (128, 64, 8, 2),
}
# Where a program has less shared memory than an A100's, in bytes
FLASH_ATTENTION_FORWARD_ROOM = 160_000
FLASH_ATTENTION_FORWARD_SMALL = (64, 32, 8, 2)


@triton.jit
def _flash_attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
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
    stride_ob,
    stride_oh,
    stride_ol,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks = tl.cdiv(LQ, BLOCK_M)
    pid = tl.program_id(axis=0)
    # Later queries see more keys: programs with the most work start first.
    pid_m = blocks - 1 - pid % blocks
    # In int32, an offset would overflow past element 2**31.
    head = (pid // blocks % HEADS).to(tl.int64)
    batch = (pid // blocks // HEADS).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    row = offs_m.to(tl.int64)
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + offs_d
    k_ptrs = k_ptr + batch * stride_kb + head // GROUP * stride_kh + offs_d
    v_ptrs = v_ptr + batch * stride_vb + head // GROUP * stride_vh + offs_d
    o_ptrs = out_ptr + batch * stride_ob + head * stride_oh + offs_d
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
            if MASKED:
                # A padded key is zeros: its score of 0 would have a weight.
                seen = offs_n[None, :] < LK
                if CAUSAL:
                    seen = seen & (offs_n[None, :] <= offs_m)
                s = tl.where(seen, s, -float("inf"))  # (BLOCK_M, BLOCK_N)
            m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
            # Scaled first, the product of a score above 2**27 could differ
            # from its rounded maximum by more than exp2 can take.
            p = tl.exp2((s - m_new) * SCALE)  # (BLOCK_M, BLOCK_N)
            # What was added up so far had the old maximum.
            rescale = tl.exp2((m - m_new) * SCALE)  # (BLOCK_M, 1)
            total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
            # NaN from past the end would stay NaN even with a weight of 0.
            v = tl.load(v_ptrs + row_n * stride_vl, mask=inside, other=0.0)
            # The tensor cores take p in the type of v.
            p = p.to(v.dtype)
            acc = acc * rescale
            acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
            m = m_new
    # A row that saw nothing has a sum of 0, and a result of 0.
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(o_ptrs + row * stride_ol, acc, mask=mask)


@functools.cache
def _flash_attention_forward_room(device):
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":  # the interpreter
        return FLASH_ATTENTION_FORWARD_ROOM
    gpu = torch.cuda.get_device_properties(device)
    return getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)


def _flash_attention_forward_check(q, k, v):
    name = "flash_attention_forward"
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


def _flash_attention_forward_launch(
    q, k, v, causal=False, scale=None, kernel=_flash_attention_forward_kernel
):
    _flash_attention_forward_check(q, k, v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    batch, heads, LQ, D = q.shape
    D = int(D)  # torch.compile would keep it open, and a constant cannot be
    scale = D**-0.5 if scale is None else scale
    if scale <= 0:  # The largest score is looked for before it is scaled.
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    tile = FLASH_ATTENTION_FORWARD_TILES[BLOCK_D]
    if BLOCK_D == 256 and (
        _flash_attention_forward_room(q.device) < FLASH_ATTENTION_FORWARD_ROOM
    ):
        tile = FLASH_ATTENTION_FORWARD_SMALL
    if q.dtype.itemsize > 2:  # float32 and float64: operands take registers
        tile = (32, 16, 4, 1)
    BLOCK_M, BLOCK_N, num_warps, num_stages = tile
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        q, k, v = (t.float().contiguous() for t in (q, k, v))
    grid = (triton.cdiv(LQ, BLOCK_M) * batch * heads,)
    pointers, sizes = (q, k, v, out), (LQ, k.shape[2], heads)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        kernel[grid](
            *pointers,
            *sizes,
            *(stride for t in pointers for stride in t.stride()[:3]),
            GROUP=int(heads // k.shape[1]),
            D=D,
            # exp(x) is exp2(x * log2(e)).
            SCALE=scale * math.log2(math.e),
            CAUSAL=causal,
            ACC=tl.float64 if q.dtype == torch.float64 else tl.float32,
            LOWEST=torch.finfo(torch.promote_types(q.dtype, torch.float32)).min,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            num_warps=num_warps,
            # Two stages fit AMD's shared memory.
            num_stages=min(num_stages, 2 if torch.version.hip else num_stages),
        )
    return out


@triton_op(
    f"{FLASH_ATTENTION_FORWARD_NAMESPACE}::flash_attention_forward",
    mutates_args={},
)
def flash_attention_forward(
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
    With ``causal``, query i sees keys 0 to i. ``scale`` is 1 / sqrt(D) if not
    given; the kernel is compiled for it. The result is contiguous, of the shape
    and dtype of q, and deterministic. A query that sees nothing, or whose
    scores are all -inf, gives 0. In float16, weights below 2**-25 of the
    largest count as 0. A NaN or an infinity in v may reach queries that it is
    hidden from. Raises TypeError for other dtypes and ValueError for other
    shapes. Has no gradient: a backward raises RuntimeError. The method:
    https://arxiv.org/abs/2307.08691

    Rounding: scores, softmax and sums are in float32, or float64 for float64.
    The weights of a softmax are rounded to the dtype of v for their product
    with v, and each result is rounded once.

    Under ``torch.autocast`` it casts q, k and v to autocast's dtype.
    """
    kernel = wrap_triton(_flash_attention_forward_kernel)
    return _flash_attention_forward_launch(q, k, v, causal, scale, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
FLASH_ATTENTION_FORWARD_LIBRARY = Library(
    FLASH_ATTENTION_FORWARD_NAMESPACE, "FRAGMENT"
)
FLASH_ATTENTION_FORWARD_LIBRARY.impl(
    "flash_attention_forward", _flash_attention_forward_launch, "CUDA"
)


def _flash_attention_forward_autocast(kind, q, k, v, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's attention does."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    q, k, v = (t.to(dtype) if t.dtype in casts else t for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return flash_attention_forward(q, k, v, *options)


FLASH_ATTENTION_FORWARD_LIBRARY.impl(
    "flash_attention_forward",
    functools.partial(_flash_attention_forward_autocast, "cpu"),
    "AutocastCPU",
)
FLASH_ATTENTION_FORWARD_LIBRARY.impl(
    "flash_attention_forward",
    functools.partial(_flash_attention_forward_autocast, "cuda"),
    "AutocastCUDA",
)
