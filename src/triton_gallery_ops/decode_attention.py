"""Decode attention over a paged key-value cache, for a few new tokens.

Attends to pages found through a block table (PagedAttention: Kwon et al., 2023,
arXiv:2309.06180). Reading the cache bounds the time: query heads of a group
share loads, and the keys of few sequences are split among programs
(Flash-Decoding: https://pytorch.org/blog/flash-decoding/). All sequences get
equally many parts, so unequal lengths are slower. Head sizes go up to 256,
queries times heads per key head up to 64; for more, see ``varlen_attention``.
Caches may be float8_e4m3fn. Table and lengths are not checked.
``kv_cache_write`` fills the cache. Deterministic for given shapes. No backward.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

DECODE_ATTENTION_NAMESPACE = "triton_gallery"
DECODE_ATTENTION_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Keys of a step for each padded D, in half precision or float8
DECODE_ATTENTION_STEPS = {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}
DECODE_ATTENTION_ROWS = 64  # queries times heads of a group
DECODE_ATTENTION_KEYS = 64  # of a part, at least
DECODE_ATTENTION_PARTS = 128  # of a sequence, at most


@triton.jit
def _decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kp,
    stride_kl,
    stride_kh,
    stride_vp,
    stride_vl,
    stride_vh,
    stride_tb,
    stride_ks,
    stride_vs,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # In int32, an offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    batch, head = pid // (HEADS // GROUP), pid % (HEADS // GROUP)
    part, parts = tl.program_id(axis=1), tl.num_programs(axis=1)
    # First come the heads of a group for query 0, then those for query 1, ...
    rows = tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    query = rows // GROUP  # (BLOCK_M, 1)
    offs_h = head * GROUP + rows % GROUP  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    mask = (query < QUERIES) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
    q_ptrs = q_ptr + batch * stride_qb + query * stride_ql + offs_h * stride_qh
    q = tl.load(q_ptrs + offs_d, mask=mask, other=0.0).to(DOT)
    # Scales of a whole head are factors of its scores and of its result. A
    # Python number would become float32 here, and ACC may be float64.
    k_factor = tl.full((1, 1), SCALE, dtype=ACC)
    v_factor = tl.full((1, 1), 1.0, dtype=ACC)
    if SCALED:
        k_factor *= tl.load(k_scale_ptr + head * stride_ks).to(ACC)
        v_factor *= tl.load(v_scale_ptr + head * stride_vs).to(ACC)
    length = tl.load(lens_ptr + batch)
    last = length - QUERIES + query  # (BLOCK_M, 1)
    # Parts are whole blocks of the true length: no bound can cut keys off.
    keys = tl.cdiv(tl.cdiv(length, parts), BLOCK_N) * BLOCK_N
    end = tl.minimum((part + 1) * keys, length)
    table_ptrs = table_ptr + batch * stride_tb
    k_ptrs = k_ptr + head * stride_kh + offs_d
    v_ptrs = v_ptr + head * stride_vh + offs_d
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    for start in range(part * keys, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        inside = offs_n < end
        # Past the end, the table may hold anything.
        page = tl.load(table_ptrs + offs_n // PAGE, mask=inside, other=0)
        page = page.to(tl.int64)[:, None]
        slot = (offs_n % PAGE)[:, None]
        there = inside[:, None] & (offs_d < D)  # (BLOCK_N, BLOCK_D)
        k_page = k_ptrs + page * stride_kp
        k = tl.load(k_page + slot * stride_kl, mask=there, other=0.0)
        s = tl.dot(q, k.to(DOT).T, input_precision="ieee", out_dtype=ACC)
        # Keys past the last one would have the score 0, and so a weight.
        s = tl.where(offs_n[None, :] <= last, s * k_factor, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp2(s - m_new)  # (BLOCK_M, BLOCK_N)
        rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        v_page = v_ptrs + page * stride_vp
        # A slot not written yet may hold NaN, and 0 times NaN is NaN.
        v = tl.load(v_page + slot * stride_vl, mask=there, other=0.0)
        p, v = p.to(DOT), v.to(DOT)
        acc = acc * rescale
        acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
        m = m_new
    # A row that saw nothing has a sum of 0, and a result of 0.
    some = tl.where(total == 0, 1.0, total)  # (BLOCK_M, 1)
    acc = acc * (v_factor / some)
    row = ((batch * QUERIES + query) * HEADS + offs_h) * parts + part
    tl.store(out_ptr + row * D + offs_d, acc, mask=mask)
    if SPLIT:
        # A part without keys has -inf here, and so the weight 0.
        lse = tl.where(total == 0, -float("inf"), m + tl.log2(some))
        tl.store(lse_ptr + row, lse, mask=query < QUERIES)


@triton.jit
def _decode_attention_combine(
    part_ptr,
    lse_ptr,
    out_ptr,
    parts,
    D: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program has one head of one query. In int32, its row times the parts
    # and D would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)[:, None]  # (BLOCK_P, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    lse_ptrs = lse_ptr + row * parts + offs_p
    lse = tl.load(lse_ptrs, mask=offs_p < parts, other=-float("inf"))
    # Where no part saw a key, -inf minus -inf would be NaN.
    m = tl.maximum(tl.max(lse, axis=0, keep_dims=True), LOWEST)
    weight = tl.exp2(lse - m)  # (BLOCK_P, 1)
    total = tl.sum(weight, axis=0, keep_dims=True)
    weight = weight / tl.where(total == 0, 1.0, total)
    # BLOCK_P is a power of two: rows past the last part are other heads'.
    mask = (offs_p < parts) & (offs_d < D)  # (BLOCK_P, BLOCK_D)
    part_ptrs = part_ptr + (row * parts + offs_p) * D + offs_d
    part = tl.load(part_ptrs, mask=mask, other=0.0)
    out = tl.sum(part * weight, axis=0, keep_dims=True)  # (1, BLOCK_D)
    tl.store(out_ptr + row * D + offs_d, out, mask=offs_d < D)


@functools.cache
def _decode_attention_processors(device):
    """Return a GPU's number of multiprocessors."""
    if device.type != "cuda":  # the interpreter: few, but enough for parts
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count


def _decode_attention_parts(programs, longest, cache):
    """Return in how many parts to split sequences, by a bound of lengths."""
    # A program for each multiprocessor. To convert float8 takes instructions,
    # so its programs are two.
    each = 2 if cache.dtype.itemsize == 1 else 1
    enough = each * _decode_attention_processors(cache.device) // programs
    most = min(DECODE_ATTENTION_PARTS, longest // DECODE_ATTENTION_KEYS)
    return max(1, min(enough, most))


def _decode_attention_check(q, k_cache, v_cache, block_table, seq_lens, scales):
    name = "decode_attention"
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {"block_table": block_table, "seq_lens": seq_lens}
    names = zip(("k_scale", "v_scale"), scales, strict=True)
    given |= {who: t for who, t in names if t is not None}
    tensors = list(given.values())
    scales = tensors[5:]
    kinds = [torch.int32] * 2 + [torch.float32] * len(scales)
    small = torch.float8_e4m3fn if q.dtype.itemsize == 2 else q.dtype
    fits = (
        q.dtype in DECODE_ATTENTION_DTYPES
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (q.dtype, small)
        and [t.dtype for t in tensors[3:]] == kinds
        and len({t.device for t in tensors}) == 1
    )
    if not fits:
        found = ", ".join(
            f"{who} {t.dtype} on {t.device}" for who, t in given.items()
        )
        raise TypeError(
            f"{name} takes a float q, two caches of its dtype, or, if that has "
            "16 bits, of float8_e4m3fn, a block_table and seq_lens of int32, "
            f"and scales of float32, on one device, not {found}"
        )
    fits = (
        q.ndim == k_cache.ndim == 4
        and k_cache.shape == v_cache.shape
        and k_cache.shape[1] * k_cache.shape[2] > 0
        and 1 <= q.shape[3] <= 256
        and q.shape[3] == k_cache.shape[3]
        and q.shape[2] % k_cache.shape[2] == 0
        and block_table.ndim == 2
        and block_table.shape[0] == q.shape[0]
        and seq_lens.shape == q.shape[:1]
        and len(scales) != 1
        and all(t.shape in ((1,), k_cache.shape[2:3]) for t in scales)
    )
    if not fits:
        found = ", ".join(f"{who} {tuple(t.shape)}" for who, t in given.items())
        raise ValueError(
            f"{name} takes q of (batch, queries, heads, D), two caches of "
            "(pages, page size, heads / n, D), a block_table of (batch, most "
            "pages), seq_lens of (batch,), and no or two scales of (1,) or "
            f"(heads / n,), with D up to 256, not {found}"
        )
    rows = q.shape[1] * (q.shape[2] // k_cache.shape[2])
    if rows > DECODE_ATTENTION_ROWS:
        raise ValueError(
            f"{name} takes up to {DECODE_ATTENTION_ROWS} queries times heads "
            f"of a group, not {rows}"
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"{name} takes caches that are contiguous along D")
    if any(t.requires_grad for t in tensors):
        raise ValueError(f"{name} has no gradient: detach what requires grad")


def _decode_attention_launch(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    max_seq_len=None,
    scale=None,
    k_scale=None,
    v_scale=None,
    parts=None,
    wrap=lambda kernel: kernel,
):
    scales = (k_scale, v_scale)
    _decode_attention_check(q, k_cache, v_cache, block_table, seq_lens, scales)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    batch, queries, heads, D = map(int, q.shape)
    _, page, shared, _ = map(int, k_cache.shape)
    q = q if q.stride(3) == 1 else q.contiguous()
    block_table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    programs = batch * shared
    bound = block_table.shape[1] * page if max_seq_len is None else max_seq_len
    # A sequence of one page never leaves it: one kernel serves all page sizes.
    page = page if block_table.shape[1] > 1 else 2**30
    parts = parts or _decode_attention_parts(programs, int(bound), k_cache)
    scale = D**-0.5 if scale is None else scale
    rows = queries * (heads // shared)
    BLOCK_M = max(16, triton.next_power_of_2(rows))
    BLOCK_D = max(16, triton.next_power_of_2(D))
    half = q.dtype.itemsize == 2
    # The interpreter's tl.dot takes the bits of bfloat16 for integers.
    widen = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16
    stages = (5 if BLOCK_M < 64 else 3) if half else 1
    ACC = torch.float64 if q.dtype == torch.float64 else torch.float32
    part, lse = out, None
    if parts > 1:
        part = q.new_empty((batch, queries, heads, parts, D), dtype=ACC)
        lse = q.new_empty((batch, queries, heads, parts), dtype=ACC)
    # One scale for all heads, or one for each
    apart = [0 if t is None or t.numel() == 1 else t.stride(0) for t in scales]
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        arguments = (
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            *scales,
            part,
            lse,
        )
        wrap(_decode_attention_kernel)[(programs, parts)](
            *arguments,
            *(n for t in (q, k_cache, v_cache) for n in t.stride()[:3]),
            block_table.stride(0),
            *apart,
            QUERIES=queries,
            HEADS=heads,
            GROUP=heads // shared,
            PAGE=page,
            D=D,
            # exp(x) is exp2(x * log2(e)).
            SCALE=scale * math.log2(math.e),
            SCALED=k_scale is not None,
            SPLIT=parts > 1,
            DOT=tl.float32 if widen else DECODE_ATTENTION_DTYPES[q.dtype],
            ACC=DECODE_ATTENTION_DTYPES[ACC],
            LOWEST=torch.finfo(ACC).min,
            BLOCK_M=BLOCK_M,
            # Float32 and float64 are multiplied in registers, which are few.
            BLOCK_N=DECODE_ATTENTION_STEPS[BLOCK_D] if half else 16,
            BLOCK_D=BLOCK_D,
            num_warps=8 if BLOCK_M == 64 else 4,
            # Two stages fit AMD's shared memory.
            num_stages=min(stages, 2) if torch.version.hip else stages,
        )
        if parts > 1:
            wrap(_decode_attention_combine)[(batch * queries * heads,)](
                part,
                lse,
                out,
                parts,
                D=D,
                LOWEST=torch.finfo(ACC).min,
                BLOCK_P=triton.next_power_of_2(parts),
                BLOCK_D=BLOCK_D,
                num_warps=8 if parts > 32 else 4,
            )
    return out


@triton_op(f"{DECODE_ATTENTION_NAMESPACE}::decode_attention", mutates_args={})
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of the last queries of sequences in a paged cache.

    Takes q of (batch, queries, heads, D), k_cache and v_cache of (pages, page
    size, heads / n, D), block_table of (batch, most pages) and seq_lens of
    (batch,), both int32. Each n heads of q share a head of keys. Key j of
    sequence b is number j % page size of page block_table[b, j // page size].
    These numbers are not checked, nor is that a length fits into the table.
    Lengths count the keys of the queries, which are in the cache already: query
    i sees keys 0 to seq_lens[b] - queries + i. One that sees none gives 0. A
    score below -2.3e38, or -1.2e308 in float64, counts as -inf.

    Takes float16, bfloat16, float32 or float64, caches of the same or, with 16
    bits, of float8_e4m3fn (on NVIDIA from compute capability 8.9 on), D up to
    256, any page size, and up to 64 queries times n. Caches are contiguous
    along D, with any other strides. They may have both a k_scale and a v_scale,
    float32, of (1,) or (heads / n,): the true keys are k_scale * k_cache.
    ``scale`` is a factor of the scores, 1 / sqrt(D) if not given; the kernel is
    compiled for its value. ``max_seq_len`` is a bound of seq_lens, else the
    room of the table is. It decides the number of parts that the keys are split
    into; if it is wrong, the result is right.

    The result is contiguous, of q's shape and dtype, and on one GPU
    deterministic for the same shapes and bound. Raises TypeError for
    other dtypes and devices, ValueError for other shapes and for what requires
    grad. The method: https://pytorch.org/blog/flash-decoding/

    Rounding: scores, softmax and sums are in float32, or float64 for float64,
    those of the parts too. The weights of a softmax are rounded to the dtype of
    q for their product with v, and each result is rounded once.
    """
    cache = k_cache, v_cache, block_table, seq_lens
    options = max_seq_len, scale, k_scale, v_scale
    return _decode_attention_launch(q, *cache, *options, wrap=wrap_triton)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
DECODE_ATTENTION_LIBRARY = Library(DECODE_ATTENTION_NAMESPACE, "FRAGMENT")
DECODE_ATTENTION_LIBRARY.impl(
    "decode_attention", _decode_attention_launch, "CUDA"
)
