"""LayerNorm and RMSNorm over the last dimension, for long rows.

``norms_long_layer_norm`` and ``norms_long_rms_norm`` take rows of up to 2**30
elements, in two passes. The first finds the statistics; LayerNorm's variance
does not cancel (Welford, 1962; Chan, Golub and LeVeque, 1983). The second
writes the result, and the L2 cache can serve it. Use ``layer_norm`` and
``rms_norm`` for rows that fit in registers. One program of the forward handles
a row, so a few rows leave most of the GPU idle; unaligned rows are loaded in
smaller pieces. RMSNorm may have no weight, or Gemma's offset; LayerNorm has a
weight and a bias. Deterministic on a given GPU model. Has a backward, but no
second derivative: it sums each row, then computes all gradients in tiles.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

NORMS_LONG_NAMESPACE = "triton_gallery"
NORMS_LONG_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# What part of L2 a row on each multiprocessor takes: the limits of three cases
NORMS_LONG_PARTS = 0.15, 0.3
# For each case: the warps of a program, and how many bytes of each tensor a
# thread loads in a turn
NORMS_LONG_PROGRAMS = (16, 16), (32, 16), (32, 32)
# The same on AMD's GPUs, where 16 warps are 1024 threads, the most
NORMS_LONG_SMALL = (16, 16), (16, 16), (16, 64)
NORMS_LONG_EACH = 4  # programs of the backward for each multiprocessor
NORMS_LONG_SUMS = 8, 16  # warps, and the bytes of a row for a thread
NORMS_LONG_TILE = 4, 4, 16  # the same for tiles, with their rows in between


@triton.jit
def _norms_long_scale(x, weight, ACC: tl.constexpr, OFFSET: tl.constexpr):
    """Return x times OFFSET + weight, or x if there is no weight."""
    if weight is not None:
        factor = weight.to(ACC)
        if OFFSET != 0:
            factor += OFFSET
        x *= factor
    return x


@triton.jit
def _norms_long_kernel(
    x_ptr,
    weight_ptr,  # None without a weight
    bias_ptr,
    y_ptr,
    stats_ptr,
    M,
    N,
    stride_xm,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,  # LayerNorm: whether there are a mean and a bias
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSET: tl.constexpr,  # added to the weight
    LLAMA: tl.constexpr,  # whether x is rounded before it is scaled
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N, stride_xm = N // VEC * VEC, stride_xm // VEC * VEC
    columns = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    x_row = x_ptr + row * stride_xm
    # The sums are of differences from the row's first element. A large mean of
    # the elements themselves would be rounded by too much.
    first = tl.load(x_row).to(ACC) if CENTER else 0.0
    # Each column has its own: no thread waits for another in the loop.
    mean = tl.zeros((BLOCK_N,), dtype=ACC)
    s = tl.zeros((BLOCK_N,), dtype=ACC)
    n = tl.zeros((), dtype=ACC)
    for start in range(0, N, BLOCK_N):
        offs = start + columns  # (BLOCK_N,)
        # To be evicted last, as the second pass reads it again.
        x = tl.load(
            x_row + offs, mask=offs < N, other=0, eviction_policy="evict_last"
        ).to(ACC)
        if CENTER:
            n, x = n + 1, x - first
            # A difference of 0 changes neither the mean nor s.
            d = tl.where(offs < N, x - mean, 0)  # (BLOCK_N,)
            mean += d * (1 / n)
            s += d * (x - mean)
        else:
            s += x * x
    total = 0.0
    if CENTER:
        # Columns past the end of the last block have one element less.
        count = tl.cdiv(tl.maximum(N - columns, 0), BLOCK_N).to(ACC)
        total = tl.sum(count * mean, axis=0) / N
        # The columns' means differ: that spread is part of the variance.
        s += count * (mean - total) * (mean - total)
        tl.store(stats_ptr + M + row, first + total)
    r = tl.rsqrt(tl.sum(s, axis=0) / N + EPS)
    tl.store(stats_ptr + row, r)
    # From the end to the start, as the caches saw the end last.
    last = (N - 1) // BLOCK_N * BLOCK_N
    for step in range(0, N, BLOCK_N):
        offs = last - step + columns  # (BLOCK_N,)
        mask = offs < N
        # Nobody reads these elements again, and all rows read the weight.
        x = tl.load(x_row + offs, mask=mask, eviction_policy="evict_first")
        weight = None
        if weight_ptr is not None:
            weight = tl.load(
                weight_ptr + offs, mask=mask, eviction_policy="evict_last"
            )
        y = (x.to(ACC) - first - total) * r  # (BLOCK_N,)
        if LLAMA:
            y = y.to(x.dtype).to(ACC)
        y = _norms_long_scale(y, weight, ACC, OFFSET)
        if CENTER:
            y += tl.load(
                bias_ptr + offs, mask=mask, eviction_policy="evict_last"
            ).to(ACC)
        tl.store(
            y_ptr + row * N + offs, y, mask=mask, eviction_policy="evict_first"
        )


@triton.jit
def _norms_long_sums_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    rows_ptr,
    M,
    N,
    stride_xm,
    CENTER: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSET: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N, stride_xm = N // VEC * VEC, stride_xm // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    part, parts = tl.program_id(axis=1), tl.num_programs(axis=1)
    x_row = x_ptr + row * stride_xm
    dy_row = dy_ptr + row * N
    mean = tl.load(stats_ptr + M + row) if CENTER else 0.0
    # Each column has its own: no thread waits for another in the loop.
    sum_g = tl.zeros((BLOCK_N,), dtype=ACC)
    sum_gd = tl.zeros((BLOCK_N,), dtype=ACC)
    # Few rows have several programs each. Their parts are whole blocks.
    span = tl.cdiv(tl.cdiv(N, parts), BLOCK_N) * BLOCK_N
    end = tl.minimum((part + 1) * span, N)
    for start in range(part * span, end, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # Zeros past the end add to no sum.
        mask = offs < N
        x = tl.load(x_row + offs, mask=mask, other=0)
        dy = tl.load(dy_row + offs, mask=mask, other=0)
        weight = None
        if weight_ptr is not None:
            weight = tl.load(
                weight_ptr + offs,
                mask=mask,
                other=0,
                eviction_policy="evict_last",
            )
        g = _norms_long_scale(dy.to(ACC), weight, ACC, OFFSET)  # (BLOCK_N,)
        sum_g += g
        sum_gd += g * (x.to(ACC) - mean)
    at = row * parts + part
    tl.store(rows_ptr + at, tl.sum(sum_gd, axis=0))
    if CENTER:  # only a mean has a gradient through the sum of g
        tl.store(rows_ptr + M * parts + at, tl.sum(sum_g, axis=0))


@triton.jit
def _norms_long_gradients_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    rows_ptr,
    dx_ptr,
    sums_ptr,  # None without a weight
    M,
    N,
    stride_xm,
    CENTER: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSET: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N, stride_xm = N // VEC * VEC, stride_xm // VEC * VEC
    offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    first, programs = tl.program_id(axis=1), tl.num_programs(axis=1)
    factor = 1.0
    if weight_ptr is not None:
        factor = tl.load(weight_ptr + offs_n, mask=offs_n < N).to(ACC)
        if OFFSET != 0:
            factor += OFFSET
    # A thread has the same columns of all rows of a tile: no thread waits for
    # another in the loop.
    dw = tl.zeros((1, BLOCK_N), dtype=ACC)
    db = tl.zeros((1, BLOCK_N), dtype=ACC)
    # From the last row to the first, as the caches saw the last ones last. If
    # programs took whichever tile is next, the order of the sums, and with it
    # their last bits, would change from call to call.
    tiles = tl.cdiv(M, BLOCK_M)
    for tile in tl.range(first, tiles, programs):
        # In int32 a row's offset would overflow past element 2**31.
        offs_m = tl.cast(tiles - 1 - tile, tl.int64) * BLOCK_M
        offs_m += tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
        inside = offs_m < M
        mask = inside & (offs_n < N)  # (BLOCK_M, BLOCK_N)
        # Nobody reads these elements again.
        x = tl.load(
            x_ptr + offs_m * stride_xm + offs_n,
            mask=mask,
            other=0,
            eviction_policy="evict_first",
        )
        dy = tl.load(
            dy_ptr + offs_m * N + offs_n,
            mask=mask,
            other=0,
            eviction_policy="evict_first",
        ).to(ACC)
        r = tl.load(stats_ptr + offs_m, mask=inside, other=0)  # (BLOCK_M, 1)
        c = tl.load(rows_ptr + offs_m, mask=inside, other=0) / N * r * r
        d = x.to(ACC)  # (BLOCK_M, BLOCK_N)
        g = dy * factor  # (BLOCK_M, BLOCK_N)
        if CENTER:
            d -= tl.load(stats_ptr + M + offs_m, mask=inside, other=0)
            g -= tl.load(rows_ptr + M + offs_m, mask=inside, other=0) / N
            db += tl.sum(dy, axis=0, keep_dims=True)
        if weight_ptr is not None:
            # Rows past the last one have dy = 0, and add nothing.
            dw += tl.sum(dy * (d * r), axis=0, keep_dims=True)
        tl.store(
            dx_ptr + offs_m * N + offs_n,
            (g - d * c) * r,
            mask=mask,
            eviction_policy="evict_first",
        )
    if weight_ptr is not None:
        # Each program stores a row of its own. Atomic additions to one row
        # would come in another order each time.
        sums_ptrs = sums_ptr + first.to(tl.int64) * N + offs_n  # (1, BLOCK_N)
        tl.store(sums_ptrs, dw, mask=offs_n < N)
        if CENTER:
            sums_ptrs += programs.to(tl.int64) * N
            tl.store(sums_ptrs, db, mask=offs_n < N)


def _norms_long_check(name, matrices, vectors, offset):
    """Raise for what the ops do not take."""
    x, count = matrices[0], len(matrices)
    given = *matrices, *vectors
    kinds = [t if t is None else (t.dtype, t.device) for t in given]
    same = kinds.count(kinds[0]) == len(kinds)
    if not same and kinds[-1] is not None and kinds[-1][1] == x.device:
        # Vectors may have a dtype of their own.
        same = kinds[:count].count(kinds[0]) == count
        same &= kinds[count:].count(kinds[-1]) == len(vectors)
        same &= kinds[-1][0] in NORMS_LONG_ACC
    if x.dtype not in NORMS_LONG_ACC or not same:
        raise TypeError(
            f"{name} takes rows of one float dtype and device, and vectors of "
            f"one float dtype there, not {kinds}"
        )
    shapes = [tuple(t.shape) for t in given]
    same = shapes.count(shapes[0]) >= len(matrices)
    row = shapes[0][-1:]
    if not same or x.ndim == 0 or any(tuple(t.shape) != row for t in vectors):
        raise ValueError(f"{name} takes shapes (..., N) and (N,), not {shapes}")
    if offset and not vectors:
        raise ValueError(
            f"{name} takes an offset of a weight, not {offset} without a weight"
        )
    if x.shape[-1] > 2**30:
        raise ValueError(
            f"{name} takes rows of up to 2**30 elements, not {x.shape[-1]}"
        )


def _norms_long_rows(x):
    """Return a tensor as a matrix with contiguous rows, and their distance."""
    N = int(x.shape[-1])
    if x.is_contiguous():
        return x, N
    x = x.reshape(-1, N)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, int(x.stride(0))


@functools.cache
def _norms_long_gpu(device):
    """Return a GPU's number of multiprocessors and the bytes of its L2."""
    if device.type != "cuda":
        return 4, 2**20  # small, for the interpreter
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, gpu.L2_cache_size


def _norms_long_plan(x, stride, center):
    """Return how to launch the forward."""
    N, size = int(x.shape[-1]), x.element_size()
    processors, cache = _norms_long_gpu(x.device)
    taken = processors * N * size  # bytes of the cache
    vec = math.gcd(N, stride, 16 // size)
    # In half precision, rows that do not begin at multiples of 16 bytes are
    # fastest as in the first case.
    parts = NORMS_LONG_PARTS if size > 2 or vec == 8 else ()
    hip = torch.version.hip
    programs = NORMS_LONG_SMALL if hip else NORMS_LONG_PROGRAMS
    warps, thread = programs[sum(taken > part * cache for part in parts)]
    two = center and size == 2 and (warps, thread) == (32, 16)
    return {
        "ACC": NORMS_LONG_ACC[x.dtype],
        "VEC": vec,
        "BLOCK_N": min(32 * warps * thread // size, triton.next_power_of_2(N)),
        "num_warps": warps,
        # With more registers a multiprocessor would hold one program, not two.
        **({"maxnreg": 32} if two else {}),
    }


def _norms_long_plan_backward(x, stride):
    """Return the grids and the blocks of both kernels of the backward."""
    N, size = int(x.shape[-1]), x.element_size()
    M = x.numel() // N
    known = {
        "ACC": NORMS_LONG_ACC[x.dtype],
        "VEC": math.gcd(N, stride, 16 // size),
    }
    # Few rows are cut into parts, but into no more than blocks.
    programs = NORMS_LONG_EACH * _norms_long_gpu(x.device)[0]
    warps, thread = NORMS_LONG_SUMS
    BLOCK_N = min(32 * warps * thread // size, triton.next_power_of_2(N))
    parts = min(triton.cdiv(programs, M), triton.cdiv(N, BLOCK_N))
    sums = known | {"BLOCK_N": BLOCK_N, "num_warps": warps}
    warps, BLOCK_M, thread = NORMS_LONG_TILE
    BLOCK_N = 32 * warps * thread // size
    groups = triton.cdiv(N, BLOCK_N)
    # One more for each strip would have to wait until others end.
    rows = min(max(1, programs // groups), triton.cdiv(M, BLOCK_M))
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": warps}
    return (M, parts), sums, (groups, rows), known | tile


def _norms_long_launch(
    x,
    weight,
    bias,
    eps,
    offset=0.0,
    casting_mode="gemma",
    kernel=_norms_long_kernel,
):
    center = bias is not None
    name = "norms_long_layer_norm" if center else "norms_long_rms_norm"
    vectors = [] if weight is None else [weight]
    vectors = [weight, bias] if center else vectors
    _norms_long_check(name, [x], vectors, offset)
    if casting_mode not in ("gemma", "llama"):
        raise ValueError(
            f"{name} takes casting_mode='gemma' or 'llama', "
            f"not {casting_mode!r}"
        )
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = torch.promote_types(x.dtype, torch.float32)
    stats = x.new_empty(1 + center, math.prod(x.shape[:-1]), dtype=wide)
    if y.numel() == 0:
        return y, stats.zero_()
    x, stride_xm = _norms_long_rows(x)
    N = int(y.shape[-1])
    M = y.numel() // N
    weight = None if weight is None else weight.contiguous()
    pointers = x, weight, bias.contiguous() if center else weight, y, stats
    plan = _norms_long_plan(y, stride_xm, center)
    plan |= {"OFFSET": offset, "LLAMA": casting_mode == "llama"}
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(M,)](*pointers, M, N, stride_xm, EPS=eps, CENTER=center, **plan)
    return y, stats


def _norms_long_backward_launch(
    dy,
    x,
    weight,
    stats,
    offset=0.0,
    sums_kernel=_norms_long_sums_kernel,
    kernel=_norms_long_gradients_kernel,
):
    kinds, M = len(stats), math.prod(x.shape[:-1])
    vectors = [] if weight is None and kinds == 1 else [weight]
    _norms_long_check("norms_long_backward", [dy, x], vectors, offset)
    if kinds not in (1, 2) or tuple(stats.shape[1:]) != (M,):
        raise ValueError(
            "norms_long_backward takes the stats of as many rows, not of shape "
            f"{tuple(stats.shape)}"
        )
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    N = int(dx.shape[-1])
    if dx.numel() == 0:
        rows = dx.new_empty(0) if weight is None else weight.new_zeros(kinds, N)
        return dx, rows
    x, stride_xm = _norms_long_rows(x)
    M = dx.numel() // N
    of_weight = None if weight is None else weight.contiguous()
    given = dy.contiguous(), x, of_weight, stats.contiguous()
    grid, plan, tiles, tile = _norms_long_plan_backward(dx, stride_xm)
    rows = stats.new_empty(kinds, *grid)
    sums = None if weight is None else stats.new_empty(kinds, tiles[1], N)
    sizes, known = (M, N, stride_xm), {"CENTER": kinds == 2, "OFFSET": offset}
    with torch.accelerator.device_index(dx.device.index):
        sums_kernel[grid](*given, rows, *sizes, **known, **plan)
        rows = rows.sum(-1) if grid[1] > 1 else rows
        kernel[tiles](*given, rows, dx, sums, *sizes, **known, **tile)
    if weight is None:
        return dx, dx.new_empty(0)
    return dx, sums.sum(1).to(weight.dtype)


@triton_op(f"{NORMS_LONG_NAMESPACE}::norms_long", mutates_args={})
def norms_long_with_stats(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of each row, and statistics: RMSNorm where bias is None.

    The statistics are of shape (1, rows), 1 over the root mean square, and for
    LayerNorm of shape (2, rows), 1 / deviation and the mean. They are in
    float32, or float64 for float64, and have no gradient. All else is as in
    ``norms_long_rms_norm``.
    """
    kernel = wrap_triton(_norms_long_kernel)
    options = eps, offset, casting_mode
    return _norms_long_launch(x, weight, bias, *options, kernel)


@triton_op(f"{NORMS_LONG_NAMESPACE}::norms_long_backward", mutates_args={})
def norms_long_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x and, as the rows of a matrix, of the vectors.

    Takes ``stats`` as ``norms_long_with_stats`` returned them, and raises as
    the norms do. The matrix has the weight's gradient and, for LayerNorm, the
    bias's, in the weight's dtype. Without a weight, it has no elements.
    """
    kernels = (
        wrap_triton(_norms_long_sums_kernel),
        wrap_triton(_norms_long_gradients_kernel),
    )
    return _norms_long_backward_launch(dy, x, weight, stats, offset, *kernels)


def _norms_long_setup(ctx, inputs, output):
    x, weight, _, _, ctx.offset, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _norms_long_gradient(ctx, dy, _):
    x, weight, stats = ctx.saved_tensors
    dx, vectors = norms_long_backward(dy, x, weight, stats, ctx.offset)
    dw = None if weight is None else vectors[0]
    db = vectors[1] if len(stats) == 2 else None
    return dx, dw, db, None, None, None


norms_long_with_stats.register_autograd(
    _norms_long_gradient, setup_context=_norms_long_setup
)

# On a GPU a call goes to the launcher; all else goes on to the triton_op.
NORMS_LONG_LIBRARY = Library(NORMS_LONG_NAMESPACE, "FRAGMENT")
NORMS_LONG_LIBRARY.impl("norms_long", _norms_long_launch, "CUDA")
NORMS_LONG_LIBRARY.impl(
    "norms_long_backward", _norms_long_backward_launch, "CUDA"
)

# Under torch.autocast it computes in float32, as PyTorch's layer_norm does.
norms_long_with_stats.register_autocast("cpu", torch.float32)
norms_long_with_stats.register_autocast("cuda", torch.float32)


def norms_long_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the rows of x with mean 0 and variance 1, times weight, plus bias.

    As ``torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)``.
    Takes ``x`` of shape (..., N) and any strides, and ``weight`` and ``bias``
    of shape (N,) and of one dtype, with N up to 2**30. Both are needed: give
    ones and zeros for what is ``None`` elsewhere. The dtypes are float16,
    bfloat16, float32 and float64; that of ``x`` may be another than that of
    ``weight``. The kernel is compiled for each ``eps``. The result has the
    shape and dtype of ``x``, is contiguous, and is deterministic on one kind of
    GPU, and so are the gradients, each in the dtype of its argument. Second
    derivatives are not supported. Raises TypeError for other dtypes or devices
    that differ, and ValueError for other shapes. The variance:
    https://doi.org/10.1080/00401706.1962.10490022 and
    https://doi.org/10.1080/00031305.1983.10483115.

    Rounding: mean, variance and products are in float32, or float64 if ``x``
    is, weight and bias included. Each result and each gradient is rounded
    once; the gradients of weight and bias are rounded after they are summed
    over the rows.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    if bias is None:
        raise TypeError("norms_long_layer_norm takes a bias, not None")
    return norms_long_with_stats(x, weight, bias, eps)[0]


def norms_long_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> torch.Tensor:
    """Return x over the root mean square of its rows, times offset + weight.

    As ``torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)``, if
    ``offset`` is 0; Gemma's is 1. A ``weight`` of None multiplies by nothing
    (then there is no ``offset``). With ``casting_mode="llama"``, the normalised
    ``x`` is rounded to its dtype before it is multiplied, as in ``rms_norm``;
    the gradients are the same. The kernel is compiled for each ``offset``, too.
    Raises ValueError for other options. All else is as in
    ``norms_long_layer_norm``, without a bias.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    options = eps, offset, casting_mode
    return norms_long_with_stats(x, weight, None, *options)[0]
