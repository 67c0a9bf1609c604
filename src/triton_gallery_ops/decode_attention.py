"""Decode attention over a paged key-value cache, for one or more new tokens.

Attends to pages found through a block table (PagedAttention: Kwon et al., 2023,
arXiv:2309.06180). Reading the cache bounds the time: query heads of a group
share loads, and the keys of few sequences are split among programs
(Flash-Decoding: https://pytorch.org/blog/flash-decoding/). All sequences get
equally many parts, so unequal lengths are slower. Head sizes go up to 256. It
takes any number of queries, as of a prompt in chunks, but is tuned for few.
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
DECODE_ATTENTION_LOG2E = tl.constexpr(math.log2(math.e))
DECODE_ATTENTION_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Keys of a step for each padded D, in half precision or float8
DECODE_ATTENTION_STEPS = {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}
DECODE_ATTENTION_ROWS = 64  # of a tile: queries times heads of a group
DECODE_ATTENTION_KEYS = 64  # of a part, at least
DECODE_ATTENTION_LONG = 1024  # at least, where a multiprocessor gets one more
DECODE_ATTENTION_WAVES = 4  # of whole sequences, before a last one is halved
DECODE_ATTENTION_PARTS = 128  # of a sequence, at most


@triton.jit
def _decode_attention_span(
    length,
    first,
    final,
    batch,
    leftpad_ptr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the first key that queries see, and the one after the last.

    Of these queries, the first and the final one are at these places.
    """
    begin, end = 0, length
    if CAUSAL:
        end = tl.minimum(final + 1, length).to(tl.int32)
    if WINDOW is not None:
        begin = tl.maximum(first - WINDOW, 0).to(tl.int32)
    if leftpad_ptr is not None:
        begin = tl.maximum(tl.load(leftpad_ptr + batch), begin)
    return begin, end


@triton.jit
def _decode_attention_scores(
    s,
    factor,
    offs_n,
    place,
    last,
    slope,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Scale scores; of keys that a query does not see they are -inf."""
    seen = offs_n <= last
    if WINDOW is not None:
        seen &= offs_n >= place - WINDOW
    s *= factor
    if SOFTCAP > 0:
        # SOFTCAP * tanh(s / SOFTCAP), of scores in base 2. Where the power is
        # inf, the cap remains.
        CAP: tl.constexpr = SOFTCAP * DECODE_ATTENTION_LOG2E
        s = CAP - 2.0 * CAP / (1.0 + tl.exp2(s * (2.0 / SOFTCAP)))
    if slope is not None:
        s -= slope * tl.abs(place - offs_n).to(s.dtype)
    return tl.where(seen, s, -float("inf"))


@triton.jit
def _decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    leftpad_ptr,
    slopes_ptr,
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
    stride_slopes,
    queries,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
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
    first = 0
    if QUERIES > 0:
        queries = QUERIES
    else:  # the rows of a head of keys are those of several tiles
        tiles = tl.cdiv(queries * GROUP, BLOCK_M)
        first, pid = pid % tiles * BLOCK_M, pid // tiles
    batch, head = pid // (HEADS // GROUP), pid % (HEADS // GROUP)
    part, parts = tl.program_id(axis=1), tl.num_programs(axis=1)
    # First come the heads of a group for query 0, then those for query 1, ...
    rows = first + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    query = rows // GROUP  # (BLOCK_M, 1)
    offs_h = head * GROUP + rows % GROUP  # (BLOCK_M, 1)
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    mask = (query < queries) & (offs_d < D)  # (BLOCK_M, BLOCK_D)
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
    place = (length - queries + query).to(tl.int32)  # (BLOCK_M, 1)
    last = place if CAUSAL else length - 1
    # Pages before and after what the rows see are not read.
    begin, end = _decode_attention_span(
        length,
        length - queries + first // GROUP,
        length - queries + (first + BLOCK_M - 1) // GROUP,
        batch,
        leftpad_ptr,
        CAUSAL and QUERIES == 0,
        WINDOW,
    )
    # Parts are whole blocks of the true length: no bound can cut keys off.
    keys = tl.cdiv(tl.cdiv(end - begin, parts), BLOCK_N) * BLOCK_N
    begin += part * keys
    end = tl.minimum(begin + keys, end)
    table_ptrs = table_ptr + batch * stride_tb
    k_ptrs = k_ptr + head * stride_kh + offs_d
    v_ptrs = v_ptr + head * stride_vh + offs_d
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    if sinks_ptr is not None:
        # A sink is like a key with the value 0. The first part has it.
        sink = tl.load(sinks_ptr + offs_h).to(ACC) * DECODE_ATTENTION_LOG2E
        sink = tl.where(part == 0, sink, -float("inf"))
        m = tl.maximum(m, sink)
        total = tl.exp2(sink - m)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + batch * stride_slopes + offs_h).to(ACC)
        slope *= DECODE_ATTENTION_LOG2E
    for start in range(begin, end, BLOCK_N):
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
        s = _decode_attention_scores(
            s, k_factor, offs_n[None, :], place, last, slope, WINDOW, SOFTCAP
        )
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
    row = ((batch * queries + query) * HEADS + offs_h) * parts + part
    tl.store(out_ptr + row * D + offs_d, acc, mask=mask)
    if lse_ptr is not None:
        # A part without keys has -inf here, and so the weight 0.
        lse = tl.where(total == 0, -float("inf"), m + tl.log2(some))
        if not SPLIT:  # it is a result: (batch, heads, queries), in base e
            lse /= DECODE_ATTENTION_LOG2E
            row = (batch * HEADS + offs_h) * queries + query
        tl.store(lse_ptr + row, lse, mask=query < queries)


@triton.jit
def _decode_attention_combine(
    part_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    parts,
    queries,
    heads,
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
    if out_lse_ptr is not None:
        query, head = row // heads % queries, row % heads
        at = (row // heads // queries * heads + head) * queries + query
        # Where no part saw a key, the logarithm of 0 is -inf.
        lse = (m + tl.log2(total)) / DECODE_ATTENTION_LOG2E  # (1, 1)
        tl.store(out_lse_ptr + at + tl.arange(0, 1)[:, None], lse)


@functools.cache
def _decode_attention_processors(device):
    """Return a GPU's number of multiprocessors."""
    if device.type != "cuda":  # the interpreter: few, but enough for parts
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count


def _decode_attention_parts(programs, longest, cache):
    """Return in how many parts to split sequences, by a bound of lengths."""
    # A program for each multiprocessor, and a second one, which loads while the
    # first computes, if its loop is long enough to outweigh its start. To
    # convert float8 takes instructions, so there it is two and a third one.
    processors = _decode_attention_processors(cache.device)
    each = 2 if cache.dtype.itemsize == 1 else 1
    long = longest // DECODE_ATTENTION_LONG
    parts = max(
        min(each * processors // programs, longest // DECODE_ATTENTION_KEYS),
        min((each + 1) * processors // programs, long),
    )
    # Of one part each, a last wave that half the multiprocessors or fewer work
    # on takes as long as a full one. Of two parts, it takes half as long.
    waves, last = divmod(programs, processors)
    half_full = waves < DECODE_ATTENTION_WAVES and 0 < 2 * last <= processors
    if half_full and long >= 2:
        parts = max(parts, 2)
    return max(1, min(parts, DECODE_ATTENTION_PARTS))


def _decode_attention_check(window, softcap, **given):
    name = "decode_attention"
    given = {who: t for who, t in given.items() if t is not None}
    q, k_cache, v_cache, block_table, *_ = given.values()
    small = torch.float8_e4m3fn if q.dtype.itemsize == 2 else q.dtype
    integers = "block_table", "seq_lens", "cache_leftpad"
    kinds = dict.fromkeys(integers, torch.int32)
    floats = "k_scale", "v_scale", "alibi_slopes"
    kinds |= dict.fromkeys(floats, torch.float32)
    fits = (
        q.dtype in DECODE_ATTENTION_DTYPES
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in (q.dtype, small)
        and all(given[who].dtype == kinds[who] for who in kinds.keys() & given)
        and given.get("sinks", q).dtype in DECODE_ATTENTION_DTYPES
        and len({t.device for t in given.values()}) == 1
    )
    if not fits:
        found = ", ".join(
            f"{who} {t.dtype} on {t.device}" for who, t in given.items()
        )
        raise TypeError(
            f"{name} takes a float q, two caches of its dtype, or, if that has "
            "16 bits, of float8_e4m3fn, a block_table, seq_lens and "
            "cache_leftpad of int32, scales and alibi_slopes of float32, and "
            f"float sinks, on one device, not {found}"
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
        and ("k_scale" in given) == ("v_scale" in given)
    )
    if fits:
        batch, _, heads, _ = q.shape
        scales = (1,), k_cache.shape[2:3]
        shapes = {"k_scale": scales, "v_scale": scales, "sinks": [(heads,)]}
        shapes["alibi_slopes"] = (heads,), (batch, heads)
        shapes |= dict.fromkeys(integers[1:], ((batch,),))
        fits = all(
            given[who].shape in shapes[who] for who in shapes.keys() & given
        )
    if not fits:
        found = ", ".join(f"{who} {tuple(t.shape)}" for who, t in given.items())
        raise ValueError(
            f"{name} takes q of (batch, queries, heads, D), two caches of "
            "(pages, page size, heads / n, D), a block_table of (batch, most "
            "pages), seq_lens and cache_leftpad of (batch,), no or two scales "
            "of (1,) or (heads / n,), sinks of (heads,), and alibi_slopes of "
            f"(heads,) or (batch, heads), with D up to 256, not {found}"
        )
    if window is not None and window < 0:
        raise ValueError(f"{name} takes a window of 0 or more, not {window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name} takes a softcap above 0, not {softcap}")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"{name} takes caches that are contiguous along D")
    if any(t.requires_grad for t in given.values()):
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
    window=None,
    softcap=None,
    sinks=None,
    cache_leftpad=None,
    causal=True,
    alibi_slopes=None,
    parts=None,
    with_lse=False,
    wrap=lambda kernel: kernel,
):
    scales = (k_scale, v_scale)
    _decode_attention_check(
        window,
        softcap,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    ACC = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_lse = None
    if with_lse:
        out_lse = q.new_empty((*q.shape[:3:2], q.shape[1]), dtype=ACC)
    result = (out, out_lse) if with_lse else out
    if out.numel() == 0:
        return result
    batch, queries, heads, D = map(int, q.shape)
    _, page, shared, _ = map(int, k_cache.shape)
    q = q if q.stride(3) == 1 else q.contiguous()
    block_table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    rows = queries * (heads // shared)
    BLOCK_M = max(16, triton.next_power_of_2(min(rows, DECODE_ATTENTION_ROWS)))
    programs = batch * shared * triton.cdiv(rows, BLOCK_M)
    bound = block_table.shape[1] * page if max_seq_len is None else max_seq_len
    if window is not None:
        bound = min(bound, window + queries)
    # A sequence of one page never leaves it: one kernel serves all page sizes.
    page = page if block_table.shape[1] > 1 else 2**30
    parts = parts or _decode_attention_parts(programs, int(bound), k_cache)
    scale = D**-0.5 if scale is None else scale
    BLOCK_D = max(16, triton.next_power_of_2(D))
    half = q.dtype.itemsize == 2
    # The interpreter's tl.dot takes the bits of bfloat16 for integers.
    widen = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16
    stages = (5 if BLOCK_M < 64 else 3) if half else 1
    part, lse = out, out_lse
    if parts > 1:
        part = q.new_empty((batch, queries, heads, parts, D), dtype=ACC)
        lse = q.new_empty((batch, queries, heads, parts), dtype=ACC)
    # One scale for all heads, or one for each
    apart = [0 if t is None or t.numel() == 1 else t.stride(0) for t in scales]
    few = sinks, cache_leftpad, alibi_slopes
    each = None  # the stride of the slopes of each sequence, if there are any
    if alibi_slopes is not None:
        each = heads if alibi_slopes.ndim == 2 else 0
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        arguments = (
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            *scales,
            *(None if t is None else t.contiguous() for t in few),
            part,
            lse,
        )
        wrap(_decode_attention_kernel)[(programs, parts)](
            *arguments,
            *(n for t in (q, k_cache, v_cache) for n in t.stride()[:3]),
            block_table.stride(0),
            *apart,
            each,
            queries if rows > BLOCK_M else None,
            # Few queries are a constant; one kernel serves any number above.
            QUERIES=0 if rows > BLOCK_M else queries,
            HEADS=heads,
            GROUP=heads // shared,
            PAGE=page,
            D=D,
            # exp(x) is exp2(x * log2(e)).
            SCALE=scale * DECODE_ATTENTION_LOG2E.value,
            SCALED=k_scale is not None,
            CAUSAL=causal,
            WINDOW=window,
            SOFTCAP=softcap or 0.0,
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
                out_lse,
                parts,
                queries if with_lse else None,
                heads if with_lse else None,
                D=D,
                LOWEST=torch.finfo(ACC).min,
                BLOCK_P=triton.next_power_of_2(parts),
                BLOCK_D=BLOCK_D,
                num_warps=8 if parts > 32 else 4,
            )
    return result


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
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    causal: bool = True,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of the last queries of sequences in a paged cache.

    Takes q of (batch, queries, heads, D), k_cache and v_cache of (pages, page
    size, heads / n, D), block_table of (batch, most pages) and seq_lens of
    (batch,), both int32. Each n heads of q share a head of keys. Key j of
    sequence b is number j % page size of page block_table[b, j // page size].
    These numbers are not checked, nor is that a length fits into the table.
    Lengths count the keys of the queries, which are in the cache already: query
    i sees keys 0 to seq_lens[b] - queries + i, or without ``causal`` all
    seq_lens[b]. A query that sees none gives 0. A score below -2.3e38, or
    -1.2e308 in float64, counts as -inf.

    Takes float16, bfloat16, float32 or float64, caches of the same or, with 16
    bits, of float8_e4m3fn (on NVIDIA from compute capability 8.9 on), D up to
    256, any page size, and any number of queries. Caches are contiguous
    along D, with any other strides. They may have both a k_scale and a v_scale,
    float32, of (1,) or (heads / n,): the true keys are k_scale * k_cache.
    ``scale`` is a factor of the scores, 1 / sqrt(D) if not given; the kernel is
    compiled for its value. ``max_seq_len`` is a bound of seq_lens, else the
    room of the table is. It decides the number of parts that the keys are split
    into; if it is wrong, the result is right.

    With ``window``, a query sees no key more than this many before its own, as
    with flash-attention's ``window_size=(window, 0)``, or (window, -1) if not
    causal. Pages that no query sees are
    not read, and their entries in the table may be anything.
    ``softcap`` makes of a scaled score softcap * tanh(score / softcap).
    ``sinks``, floats of (heads,), are scores that take part in the softmax of
    each query and have no value; they are neither scaled nor capped. With
    ``cache_leftpad``, int32 of (batch,), as flash-attention calls it, sequence
    b begins at key cache_leftpad[b]; seq_lens[b] counts the padding before it
    too. Pages of padding alone are not read either. ``alibi_slopes``, float32
    of (heads,) or (batch, heads), are ALiBi's (arXiv:2108.12409): slope times
    the distance from a query's own key is subtracted from each scaled and
    capped score.

    A cache without pages is one of a page for each sequence. Its block_table is
    flash-attention's ``cache_batch_idx[:, None]``, which finds rows by index.

    The result is contiguous, of q's shape and dtype, and on one GPU
    deterministic for the same shapes and bound. Raises TypeError for
    other dtypes and devices, ValueError for other shapes and for what requires
    grad. The method: https://pytorch.org/blog/flash-decoding/

    Rounding: scores, softmax and sums are in float32, or float64 for float64,
    those of the parts too. The weights of a softmax are rounded to the dtype of
    q for their product with v, and each result is rounded once.
    """
    cache = k_cache, v_cache, block_table, seq_lens
    options = max_seq_len, scale, k_scale, v_scale, window, softcap, sinks
    others = cache_leftpad, causal, alibi_slopes
    return _decode_attention_launch(
        q, *cache, *options, *others, wrap=wrap_triton
    )


@triton_op(
    f"{DECODE_ATTENTION_NAMESPACE}::decode_attention_with_lse", mutates_args={}
)
def decode_attention_with_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    causal: bool = True,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of ``decode_attention``, and the log-sum-exp of scores.

    Takes what ``decode_attention`` takes. The log-sum-exp is float32 of (batch,
    heads, queries), or float64 for float64. It is the natural logarithm of the
    sum of exp(score) of the keys that a query sees, and of the sink; -inf where
    there is none. With it, results for two sets of keys are merged: each has
    the weight exp(lse - logaddexp(lse, other lse)). Give a sink to one alone.
    """
    cache = k_cache, v_cache, block_table, seq_lens
    options = max_seq_len, scale, k_scale, v_scale, window, softcap, sinks
    others = cache_leftpad, causal, alibi_slopes
    return _decode_attention_launch(
        q, *cache, *options, *others, with_lse=True, wrap=wrap_triton
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
DECODE_ATTENTION_LIBRARY = Library(DECODE_ATTENTION_NAMESPACE, "FRAGMENT")
DECODE_ATTENTION_LIBRARY.impl(
    "decode_attention", _decode_attention_launch, "CUDA"
)
DECODE_ATTENTION_LIBRARY.impl(
    "decode_attention_with_lse",
    functools.partial(_decode_attention_launch, with_lse=True),
    "CUDA",
)
