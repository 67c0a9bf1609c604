"""Softmax over the last dimension, for long rows such as logits.

Like ``torch.softmax(x, -1)``, for rows of up to 2**30 elements. Rows that fit
in registers, if short or aligned, are read once. Others take two passes: the
online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867) finds maximum
and sum in the first, and the L2 cache can serve the second, which writes the
result. One program handles a row. Where rows are far fewer than
multiprocessors, many programs share a row, in one launch for each pass.
``softmax`` is for rows that fit in registers. Deterministic on a given GPU
model. Has a backward, but no second derivative.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

SOFTMAX_LONG_NAMESPACE = "triton_gallery"
SOFTMAX_LONG_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
SOFTMAX_LONG_LOG2_E = tl.constexpr(math.log2(math.e))
# Bytes of a row that stays in registers, at most, in the accumulator's type. In
# half precision half of that, as two passes are faster there. Backward they are
# only up to AGAIN: on an H200 from 8656 elements to 12288, and not at 14336.
SOFTMAX_LONG_WHOLE = 64 * 1024
SOFTMAX_LONG_AGAIN = 48 * 1024
# Programs share rows of more than FEW bytes, if there are this many or more
# multiprocessors for each row. On an H200, which has 132, that was faster with
# 1 to 16 rows, and with 61 or more it was slower, backward more so.
SOFTMAX_LONG_FEW = 64 * 1024
SOFTMAX_LONG_PROCESSORS = 4
SOFTMAX_LONG_EACH = 4  # such programs for each multiprocessor
SOFTMAX_LONG_PART = 8 * 1024  # bytes that such a program loads in a turn
SOFTMAX_LONG_SINGLE = 2048  # elements, where each is loaded by itself
SOFTMAX_LONG_TILE = 8 * 1024  # bytes of short rows that share a program
SOFTMAX_LONG_THREAD = 128  # bytes of a row for a thread
# By the tensors that are read twice: how much of L2 is for the rows under way,
# then warps, the bytes of each tensor that a thread loads at once, and how many
# such programs a multiprocessor holds
SOFTMAX_LONG_PROGRAMS = {
    1: (0.52, [(4, 16, 8), (8, 16, 4), (16, 16, 2), (32, 16, 1)]),
    2: (0.7, [(8, 16, 8), (16, 16, 4), (32, 16, 2), (32, 32, 1)]),
}


@triton.jit
def _softmax_long_whole_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    # Clamp to the last row: it is recomputed, and the same values are stored.
    offs_m = tl.minimum(offs_m, M - 1)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    mask = offs_n < N
    x_ptrs = x_ptr + offs_m * stride_xm + offs_n  # (BLOCK_M, BLOCK_N)
    x = tl.load(x_ptrs, mask=mask, other=-float("inf")).to(ACC)
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    y = e / tl.sum(e, axis=1, keep_dims=True)
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)


@triton.jit
def _softmax_long_whole_backward_kernel(
    g_ptr,
    y_ptr,
    d_ptr,
    M,
    N,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Unless 16 divides N, the compiler learns only here that VEC does.
    N = N // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    # Without the minimum, the last program would store rows past d's end.
    offs_m = tl.minimum(offs_m, M - 1)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    mask = offs_n < N
    offs = offs_m * N + offs_n  # (BLOCK_M, BLOCK_N)
    # Zeros past the end add nothing to the sum of products.
    g = tl.load(g_ptr + offs, mask=mask, other=0).to(ACC)
    y = tl.load(y_ptr + offs, mask=mask, other=0).to(ACC)
    # Each d needs the sum of its whole row, so g and y wait in registers.
    d = y * (g - tl.sum(g * y, axis=1, keep_dims=True))
    tl.store(d_ptr + offs, d, mask=mask)


@triton.jit
def _softmax_long_exp(x):
    # tl.exp takes instructions for results below the normal numbers.
    return tl.exp2(x * SOFTMAX_LONG_LOG2_E)


@triton.jit
def _softmax_long_start(ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return maxima and sums of columns, to which nothing was added."""
    # From -inf on, the difference of two maxima could be NaN.
    DOUBLE: tl.constexpr = tl.float64 == ACC
    LOWEST: tl.constexpr = (
        -1.7976931348623157e308 if DOUBLE else -3.4028234663852886e38
    )
    # Each column has its own: no thread waits for another in the loop.
    m = tl.full((BLOCK_N,), LOWEST, dtype=ACC)
    return m, tl.zeros((BLOCK_N,), dtype=ACC)


@triton.jit
def _softmax_long_add(x, m, s):
    """Add rows of a tile to the maximum and the sum of each column."""
    larger = tl.maximum(m, tl.max(x, axis=0))  # (BLOCK_N,)
    # What is in s was added while the maximum was m.
    s *= _softmax_long_exp(m - larger)
    s += tl.sum(_softmax_long_exp(x - larger[None, :]), axis=0)
    return larger, s


@triton.jit
def _softmax_long_divide(x_ptr, start, N, VEC: tl.constexpr):
    """Return a row's body, its length, its edges and which there are."""
    head = ((VEC - start % VEC) % VEC).to(tl.int32)
    # A row may end before its first multiple. A rest of less than VEC elements
    # is left to the edge: with it, a mask would end within a wide load.
    length = tl.maximum(N - head, 0) // VEC * VEC
    # To divide and multiply again tells the compiler: a multiple of VEC.
    body = x_ptr + (start + head) // VEC * VEC
    # Both edges are one tile, so they take one load. What follows the head is
    # moved past the body.
    edge = tl.arange(0, 2 * VEC)  # (2 * VEC,)
    edges = x_ptr + start + tl.where(edge < head, edge, edge + length)
    return body, length, edges, edge < N - length


@triton.jit
def _softmax_long_kernel(
    x_ptr,
    y_ptr,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK: tl.constexpr = 4 * BLOCK_N
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    x_body, end, x_edges, mask_e = _softmax_long_divide(
        x_ptr, row * stride_xm, N, VEC
    )
    y_body, _, y_edges, _ = _softmax_long_divide(y_ptr, row * N, N, VEC)
    x_e = tl.load(x_edges, mask=mask_e, other=-float("inf")).to(ACC)
    block = tl.arange(0, 4)[:, None] * BLOCK_N  # (4, 1)
    block += tl.arange(0, BLOCK_N)[None, :]  # (4, BLOCK_N)
    m, s = _softmax_long_start(ACC, BLOCK_N)
    # Up to N: end comes from x_ptr. If a store's address depended on it,
    # torch.compile would take x for written, and copy it.
    for start in range(0, N, BLOCK):
        offs = start + block  # (4, BLOCK_N)
        x = tl.load(
            x_body + offs,
            mask=offs < end,
            other=-float("inf"),
            eviction_policy="evict_last",  # the second pass reads it again
        )
        m, s = _softmax_long_add(x.to(ACC), m, s)
    # The edges are no part of the body, but of the row.
    top = tl.maximum(tl.max(m, axis=0), tl.max(x_e, axis=0))
    e = _softmax_long_exp(x_e - top)  # (2 * VEC,)
    total = tl.sum(s * _softmax_long_exp(m - top), axis=0)
    total += tl.sum(e, axis=0)
    tl.store(y_edges, e / total, mask=mask_e)
    # From the end to the start, as the caches saw the end last.
    last = (N - 1) // BLOCK * BLOCK
    for step in range(0, N, BLOCK):
        offs = last - step + block  # (4, BLOCK_N)
        x = tl.load(
            x_body + offs, mask=offs < end, eviction_policy="evict_first"
        )
        y = _softmax_long_exp(x.to(ACC) - top) / total  # (4, BLOCK_N)
        tl.store(
            y_body + offs, y, mask=offs < end, eviction_policy="evict_first"
        )


@triton.jit
def _softmax_long_backward_kernel(
    g_ptr,
    y_ptr,
    d_ptr,
    N,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    # All three are contiguous, so a row's body is the same part of each: one
    # end and one mask serve them all.
    g_body, end, g_edges, mask_e = _softmax_long_divide(g_ptr, row * N, N, VEC)
    y_body, _, y_edges, _ = _softmax_long_divide(y_ptr, row * N, N, VEC)
    d_body, _, d_edges, _ = _softmax_long_divide(d_ptr, row * N, N, VEC)
    # Zeros where there is no edge add nothing to the sum of products.
    g_e = tl.load(g_edges, mask=mask_e, other=0).to(ACC)  # (2 * VEC,)
    y_e = tl.load(y_edges, mask=mask_e, other=0).to(ACC)  # (2 * VEC,)
    block = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    # Each column has its own: no thread waits for another in the loop.
    s = tl.zeros((BLOCK_N,), dtype=ACC)
    # Up to N and not to end, as forward, for the sake of torch.compile.
    for start in range(0, N, BLOCK_N):
        offs = start + block  # (BLOCK_N,)
        mask = offs < end
        # Both are read again, so the caches are to leave them last.
        g = tl.load(
            g_body + offs, mask=mask, other=0, eviction_policy="evict_last"
        )
        y = tl.load(
            y_body + offs, mask=mask, other=0, eviction_policy="evict_last"
        )
        s += g.to(ACC) * y.to(ACC)
    # The edges are no part of the body, but of the row's sum.
    total = tl.sum(s, axis=0) + tl.sum(g_e * y_e, axis=0)
    tl.store(d_edges, y_e * (g_e - total), mask=mask_e)
    # From the end to the start, as the caches saw the end last.
    last = (N - 1) // BLOCK_N * BLOCK_N
    for step in range(0, N, BLOCK_N):
        offs = last - step + block  # (BLOCK_N,)
        mask = offs < end
        g = tl.load(g_body + offs, mask=mask, eviction_policy="evict_first")
        y = tl.load(y_body + offs, mask=mask, eviction_policy="evict_first")
        d = y.to(ACC) * (g.to(ACC) - total)  # (BLOCK_N,)
        tl.store(d_body + offs, d, mask=mask, eviction_policy="evict_first")


@triton.jit
def _softmax_long_part(N, BLOCK: tl.constexpr):
    """Return a program's row and number, and where its part begins and ends."""
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    part, parts = tl.program_id(axis=1), tl.num_programs(axis=1)
    # Parts are whole blocks, so that they begin at multiples of 16 bytes if the
    # row does.
    span = tl.cdiv(tl.cdiv(N, parts), BLOCK) * BLOCK
    begin = part * span
    return row, row * parts + part, begin, tl.minimum(begin + span, N)


@triton.jit
def _softmax_long_parts_kernel(
    x_ptr,
    m_ptr,
    s_ptr,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N, stride_xm = N // VEC * VEC, stride_xm // VEC * VEC
    row, at, begin, end = _softmax_long_part(N, BLOCK_N)
    COLUMNS: tl.constexpr = BLOCK_N // 4
    block = tl.arange(0, 4)[:, None] * COLUMNS  # (4, 1)
    block += tl.arange(0, COLUMNS)[None, :]  # (4, COLUMNS)
    m, s = _softmax_long_start(ACC, COLUMNS)
    for start in range(begin, end, BLOCK_N):
        offs = start + block  # (4, COLUMNS)
        x_ptrs = x_ptr + row * stride_xm + offs
        x = tl.load(x_ptrs, mask=offs < N, other=-float("inf"))
        m, s = _softmax_long_add(x.to(ACC), m, s)
    top = tl.max(m, axis=0)
    tl.store(m_ptr + at, top)
    tl.store(s_ptr + at, tl.sum(s * _softmax_long_exp(m - top), axis=0))


@triton.jit
def _softmax_long_merge_kernel(
    x_ptr,
    m_ptr,
    s_ptr,
    y_ptr,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N, stride_xm = N // VEC * VEC, stride_xm // VEC * VEC
    row, _, begin, end = _softmax_long_part(N, BLOCK_N)
    parts = tl.num_programs(axis=1)
    offs_p = tl.arange(0, BLOCK_P)  # (BLOCK_P,)
    at, mask = row * parts + offs_p, offs_p < parts
    m = tl.load(m_ptr + at, mask=mask, other=-float("inf"))
    s = tl.load(s_ptr + at, mask=mask, other=0)
    top = tl.max(m, axis=0)
    total = tl.sum(s * _softmax_long_exp(m - top), axis=0)
    for start in range(begin, end, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        x = tl.load(x_ptr + row * stride_xm + offs, mask=offs < N)
        y = _softmax_long_exp(x.to(ACC) - top) / total
        tl.store(y_ptr + row * N + offs, y, mask=offs < N)


@triton.jit
def _softmax_long_parts_backward_kernel(
    g_ptr,
    y_ptr,
    s_ptr,
    N,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    N = N // VEC * VEC
    row, at, begin, end = _softmax_long_part(N, BLOCK_N)
    s = tl.zeros((BLOCK_N,), dtype=ACC)
    for start in range(begin, end, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        g = tl.load(g_ptr + row * N + offs, mask=offs < N, other=0)
        y = tl.load(y_ptr + row * N + offs, mask=offs < N, other=0)
        s += g.to(ACC) * y.to(ACC)
    tl.store(s_ptr + at, tl.sum(s, axis=0))


@triton.jit
def _softmax_long_merge_backward_kernel(
    g_ptr,
    y_ptr,
    s_ptr,
    d_ptr,
    N,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    N = N // VEC * VEC
    row, _, begin, end = _softmax_long_part(N, BLOCK_N)
    parts = tl.num_programs(axis=1)
    offs_p = tl.arange(0, BLOCK_P)  # (BLOCK_P,)
    s = tl.load(s_ptr + row * parts + offs_p, mask=offs_p < parts, other=0)
    total = tl.sum(s, axis=0)
    for start in range(begin, end, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        g = tl.load(g_ptr + row * N + offs, mask=offs < N).to(ACC)
        y = tl.load(y_ptr + row * N + offs, mask=offs < N).to(ACC)
        tl.store(d_ptr + row * N + offs, y * (g - total), mask=offs < N)


@functools.cache
def _softmax_long_gpu(device):
    """Return a GPU's number of multiprocessors and the bytes of its L2."""
    if device.type != "cuda":
        return 16, 2**22  # small, for the interpreter
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, gpu.L2_cache_size


def _softmax_long_check(x, name):
    """Return the length of x's rows; raise for what the op does not take."""
    if x.dtype not in SOFTMAX_LONG_ACC:
        raise TypeError(f"{name} takes a float tensor, not {x.dtype}")
    N = int(x.shape[-1]) if x.ndim else 1
    if N > 2**30:
        raise ValueError(f"{name} takes rows of up to 2**30 elements, not {N}")
    return N


def _softmax_long_fits(N, stride, size, backward=False):
    """Return whether rows stay in registers."""
    aligned = math.gcd(N, stride, 16 // size) * size == 16
    few = SOFTMAX_LONG_SINGLE >= N
    kept, most = N * max(4, size), SOFTMAX_LONG_WHOLE
    if size == 2 and not (backward and kept > SOFTMAX_LONG_AGAIN):
        most //= 2
    return kept <= most and (aligned or few)


def _softmax_long_whole_plan(x, M, N, stride):
    """Return how to launch for rows that stay in registers."""
    size, wide = x.element_size(), max(4, x.element_size())
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = max(1, SOFTMAX_LONG_TILE // (BLOCK_N * wide))
    warps = BLOCK_M * BLOCK_N * wide // (32 * SOFTMAX_LONG_THREAD)
    return (triton.cdiv(M, BLOCK_M),), {
        "ACC": SOFTMAX_LONG_ACC[x.dtype],
        "VEC": math.gcd(N, stride, 16 // size),
        "M": M,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "num_warps": max(4, warps),
    }


def _softmax_long_plan(x, M, N, stride, tensors):
    """Return how to launch, if ``tensors`` tensors are read twice."""
    size = x.element_size()
    processors, cache = _softmax_long_gpu(x.device)
    share, programs = SOFTMAX_LONG_PROGRAMS[tensors]
    rows = share * cache / (tensors * N * size * processors)
    warps, thread, _ = next((p for p in programs if p[2] <= rows), programs[-1])
    # A program has 1024 threads at most. On AMD's GPUs, they are 16 warps.
    warps = min(warps, 16) if torch.version.hip else warps
    # Rows of x and of y need the same alignment, or they have no common body.
    alike = (N - stride) * size % 16 == 0
    # Elements that are loaded one by one take twice the registers.
    columns = 32 * warps * thread // (size if alike else 2 * size)
    return (M,), {
        "ACC": SOFTMAX_LONG_ACC[x.dtype],
        "VEC": 16 // size if alike else 1,
        "BLOCK_N": columns,
        "num_warps": warps,
    }


def _softmax_long_parts_plan(x, M, N, stride):
    """Return how to launch if programs share rows: no grid if they do not."""
    size = x.element_size()
    processors, _ = _softmax_long_gpu(x.device)
    many = processors < SOFTMAX_LONG_PROCESSORS * M
    if many or N * size <= SOFTMAX_LONG_FEW:
        return None, {}, 1
    BLOCK = SOFTMAX_LONG_PART // size
    programs = SOFTMAX_LONG_EACH * processors
    # One row has the most parts, whose number is no more than its blocks.
    most = min(programs, triton.cdiv(N, BLOCK))
    options = {
        "ACC": SOFTMAX_LONG_ACC[x.dtype],
        "VEC": math.gcd(N, stride, 16 // size),
        "BLOCK_N": BLOCK,
    }
    grid = (M, min(most, triton.cdiv(programs, M)))
    return grid, options, most


def _softmax_long_launch(
    x,
    whole=_softmax_long_whole_kernel,
    passes=_softmax_long_kernel,
    parts=_softmax_long_parts_kernel,
    merge=_softmax_long_merge_kernel,
):
    N = _softmax_long_check(x, "softmax_long")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    stride = N
    if not x.is_contiguous():
        x = x.reshape(-1, N)
        x = x if x.stride(1) == 1 else x.contiguous()
        stride = int(x.stride(0))
    M, kernel, given = y.numel() // N, merge, (x, y)
    grid, options, most = _softmax_long_parts_plan(x, M, N, stride)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if grid is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            # If a shape had the number of parts, torch.compile would compile
            # for each number of rows.
            m, s = (x.new_empty(M, most, dtype=wide) for _ in range(2))
            parts[grid](x, m, s, N=N, stride_xm=stride, **options)
            given = x, m, s, y
            options["BLOCK_P"] = triton.next_power_of_2(most)
        elif _softmax_long_fits(N, stride, x.element_size()):
            kernel = whole
            grid, options = _softmax_long_whole_plan(x, M, N, stride)
        else:
            kernel = passes
            grid, options = _softmax_long_plan(x, M, N, stride, 1)
        kernel[grid](*given, N=N, stride_xm=stride, **options)
    return y


def _softmax_long_backward_launch(
    grad,
    y,
    whole=_softmax_long_whole_backward_kernel,
    passes=_softmax_long_backward_kernel,
    parts=_softmax_long_parts_backward_kernel,
    merge=_softmax_long_merge_backward_kernel,
):
    N = _softmax_long_check(y, "softmax_long_backward")
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in (grad, y)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "softmax_long_backward takes a gradient of y's dtype, shape and "
            f"device, not {kinds[0]} for {kinds[1]}"
        )
    grad, y = grad.contiguous(), y.contiguous()
    d = torch.empty_like(y)
    if d.numel() == 0:
        return d
    M, kernel, given = d.numel() // N, merge, (grad, y, d)
    grid, options, most = _softmax_long_parts_plan(y, M, N, N)
    with torch.accelerator.device_index(y.device.index):
        if grid is not None:
            wide = torch.promote_types(y.dtype, torch.float32)
            s = y.new_empty(M, most, dtype=wide)
            parts[grid](grad, y, s, N=N, **options)
            given = grad, y, s, d
            options["BLOCK_P"] = triton.next_power_of_2(most)
        elif _softmax_long_fits(N, N, y.element_size(), backward=True):
            kernel = whole
            grid, options = _softmax_long_whole_plan(y, M, N, N)
        else:
            kernel = passes
            grid, options = _softmax_long_plan(y, M, N, N, 2)
        kernel[grid](*given, N=N, **options)
    return d


@triton_op(f"{SOFTMAX_LONG_NAMESPACE}::softmax_long", mutates_args={})
def softmax_long(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax along the last dimension, as torch.softmax(x, -1).

    Takes a tensor of float16, bfloat16, float32 or float64, of any shape and
    layout, with rows of up to 2**30 elements. The result has the shape and
    dtype of ``x``, is contiguous, and is deterministic on one kind of GPU. A
    row with NaN or inf, or with nothing but -inf, becomes NaN. Raises TypeError
    for other dtypes and ValueError for longer rows. Has a gradient, which has
    none itself. The online softmax: https://arxiv.org/abs/1805.02867

    Rounding: maximum, sum and quotient are in float32, or float64 for float64,
    and each result is rounded once. The backward starts from the rounded
    result.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    kernels = (
        wrap_triton(_softmax_long_whole_kernel),
        wrap_triton(_softmax_long_kernel),
        wrap_triton(_softmax_long_parts_kernel),
        wrap_triton(_softmax_long_merge_kernel),
    )
    return _softmax_long_launch(x, *kernels)


@triton_op(f"{SOFTMAX_LONG_NAMESPACE}::softmax_long_backward", mutates_args={})
def softmax_long_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, for y = softmax_long(x) and the gradient of y.

    Takes two tensors of one dtype, shape and device, of any layout, and raises
    as ``softmax_long`` does, and ValueError for two that differ.
    """
    kernels = (
        wrap_triton(_softmax_long_whole_backward_kernel),
        wrap_triton(_softmax_long_backward_kernel),
        wrap_triton(_softmax_long_parts_backward_kernel),
        wrap_triton(_softmax_long_merge_backward_kernel),
    )
    return _softmax_long_backward_launch(grad, y, *kernels)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
SOFTMAX_LONG_LIBRARY = Library(SOFTMAX_LONG_NAMESPACE, "FRAGMENT")
SOFTMAX_LONG_LIBRARY.impl("softmax_long", _softmax_long_launch, "CUDA")
SOFTMAX_LONG_LIBRARY.impl(
    "softmax_long_backward", _softmax_long_backward_launch, "CUDA"
)

# Under torch.autocast it computes in float32, as PyTorch's own does.
softmax_long.register_autocast("cpu", torch.float32)
softmax_long.register_autocast("cuda", torch.float32)


def _softmax_long_setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _softmax_long_gradient(ctx, grad):
    (y,) = ctx.saved_tensors
    return softmax_long_backward(grad, y)


softmax_long.register_autograd(
    _softmax_long_gradient, setup_context=_softmax_long_setup
)
