"""LayerNorm over the last dimension, with its backward.

Computes (x - mean) / sqrt(var + eps) * weight + bias for each row (Ba, Kiros
and Hinton, 2016, arXiv:1607.06450). Rows of up to 16384 elements, 8192 in
float64, stay in registers: each element is read once, and the variance is a
mean of squared differences, which does not cancel if the mean is large.
``layer_norm_residual`` adds a residual first, and returns the sum too. Use
``norms_long`` for longer rows. Unlike in ``torch.nn.functional.layer_norm``,
weight, bias and eps are required. Deterministic on a given GPU model: gradients
of weight and bias are summed in a fixed order, without atomics. There is no
second derivative.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

LAYER_NORM_NAMESPACE = "triton_gallery"
LAYER_NORM_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# In bytes of a row, counted in the type of its accumulator
LAYER_NORM_LONGEST = 64 * 1024
LAYER_NORM_TILE = 8 * 1024  # of short rows in a program; forward twice as much
LAYER_NORM_WHOLE = 16 * 1024  # a longer row may be two blocks
LAYER_NORM_COLUMNS = 256  # a program's part, with few rows: 64 numbers
# (bytes, warps): rows of up to this many bytes have this many warps.
LAYER_NORM_WARPS = [(20 * 1024, 4), (LAYER_NORM_LONGEST, 8)]
LAYER_NORM_WARPS_BACKWARD = [
    (8 * 1024, 4),
    (20 * 1024, 8),
    (LAYER_NORM_LONGEST, 16),
]
# Up to this many rows for each multiprocessor, one launch has all gradients.
LAYER_NORM_FEW = 4
LAYER_NORM_SUMS = 8192  # partial sums that a program adds up


@triton.jit
def _layer_norm_read(ptrs, mask):
    """Load a block, zeros where it is masked. A full block has no mask."""
    return tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0)


@triton.jit
def _layer_norm_load(
    x_ptrs, residual_rows, h_rows, offs, mask, ACC: tl.constexpr
):
    """Return a block of rows of x or, stored as well, of x + residual."""
    x = _layer_norm_read(x_ptrs, mask).to(ACC)
    if residual_rows is not None:
        x += _layer_norm_read(residual_rows + offs, mask).to(ACC)
        # Rounded as it is stored: the backward starts from what is stored.
        h = x.to(h_rows.dtype.element_ty)
        tl.store(h_rows + offs, h, mask=mask)
        x = h.to(ACC)
    return x


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    M,
    N,
    stride_xm,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    EARLY: tl.constexpr,  # whether weight and bias are loaded before the sums
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,  # the second block of a row, or 0
    residual_ptr,
    h_ptr,  # where x + residual goes
    stride_rm,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    # Clamp to the last row: it is recomputed, and the same values are stored.
    offs_m = tl.minimum(offs_m, M - 1)
    x_rows = x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)
    y_rows = y_ptr + offs_m * N  # (BLOCK_M, 1)
    residual_rows, h_rows = None, None
    if residual_ptr is not None:
        residual_rows = residual_ptr + offs_m * (stride_rm // VEC * VEC)
        h_rows = h_ptr + offs_m * N  # (BLOCK_M, 1)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # The first of two blocks is full, and needs no mask.
    mask = None if REST else offs_n < N
    x = _layer_norm_load(
        x_rows + offs_n, residual_rows, h_rows, offs_n, mask, ACC
    )
    if EARLY:
        # Not widened yet: in half precision they take half the registers.
        weight = _layer_norm_read(weight_ptr + offs_n, mask)  # (1, BLOCK_N)
        bias = _layer_norm_read(bias_ptr + offs_n, mask)  # (1, BLOCK_N)
    if REST:
        # Loaded before the first sum, for which all warps wait.
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        x_rest = _layer_norm_load(
            x_rows + rest, residual_rows, h_rows, rest, rest < N, ACC
        )
    # Differences from the row's first element: a mean of the elements would be
    # rounded, and of a large one that is much beside the differences from it.
    first = tl.load(x_rows).to(ACC)  # (BLOCK_M, 1)
    if residual_ptr is not None:
        first += tl.load(residual_rows).to(ACC)
        first = first.to(h_ptr.dtype.element_ty).to(ACC)
    x = x - first if REST else tl.where(mask, x - first, 0)
    total = tl.sum(x, axis=1, keep_dims=True)  # (BLOCK_M, 1)
    if REST:
        x_rest = tl.where(rest < N, x_rest - first, 0)
        total += tl.sum(x_rest, axis=1, keep_dims=True)
    mean = total / N
    # Past the row's end x - mean is not 0, and would count as a difference.
    d = x - mean if REST else tl.where(mask, x - mean, 0)
    var = tl.sum(d * d, axis=1, keep_dims=True) / N  # (BLOCK_M, 1)
    if REST:
        d_rest = tl.where(rest < N, x_rest - mean, 0)  # (BLOCK_M, REST)
        var += tl.sum(d_rest * d_rest, axis=1, keep_dims=True) / N
    r = tl.rsqrt(var + EPS)
    tl.store(stats_ptr + offs_m, first + mean)
    tl.store(stats_ptr + M + offs_m, r)
    if not EARLY:
        weight = _layer_norm_read(weight_ptr + offs_n, mask)
        bias = _layer_norm_read(bias_ptr + offs_n, mask)
    y = d * r * weight.to(ACC) + bias.to(ACC)
    tl.store(y_rows + offs_n, y, mask=mask)
    if REST:
        weight = _layer_norm_read(weight_ptr + rest, rest < N).to(ACC)
        bias = _layer_norm_read(bias_ptr + rest, rest < N).to(ACC)
        tl.store(y_rows + rest, d_rest * r * weight + bias, mask=rest < N)


@triton.jit
def _layer_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    sums_ptr,
    M,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,  # how many turns have loads in flight
    dh_ptr,  # the gradient of x itself, to be added
):
    # Unless 16 divides them, the compiler learns only here that VEC does.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    pid = tl.program_id(axis=0)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # Each row of a tile has sums of its own. A sum across the rows in each turn
    # could make threads wait for each other there.
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if REST:
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        dw_rest = tl.zeros((BLOCK_M, REST), dtype=ACC)
        db_rest = tl.zeros((BLOCK_M, REST), dtype=ACC)
    else:
        # Here the weight stays in registers, for all tiles of the program.
        weight = _layer_norm_read(weight_ptr + offs_n, offs_n < N).to(ACC)
    # If programs took whichever tile is next, the order of the sums, and with
    # it their last bits, would change from call to call.
    tiles, programs = tl.cdiv(M, BLOCK_M), tl.num_programs(axis=0)
    for tile in tl.range(pid, tiles, programs, num_stages=STAGES):
        # In int32 a row's offset would overflow past element 2**31.
        offs_m = tl.cast(tile, tl.int64) * BLOCK_M
        offs_m += tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
        # A row done twice would count twice in dw: here rows need a mask. With
        # two blocks a tile is one row, and the first block is full.
        mask = None if REST else (offs_m < M) & (offs_n < N)
        x_rows = x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)
        rows = offs_m * N  # (BLOCK_M, 1)
        x = _layer_norm_read(x_rows + offs_n, mask).to(ACC)
        dy = _layer_norm_read(dy_ptr + rows + offs_n, mask).to(ACC)
        mean = tl.load(stats_ptr + offs_m, mask=offs_m < M, other=0)
        r = tl.load(stats_ptr + M + offs_m, mask=offs_m < M, other=0)
        if REST:
            # Loaded before the first sum, for which all warps wait.
            x_rest = _layer_norm_read(x_rows + rest, rest < N).to(ACC)
            dy_rest = _layer_norm_read(dy_ptr + rows + rest, rest < N).to(ACC)
            weight = tl.load(weight_ptr + offs_n).to(ACC)  # (1, BLOCK_N)
            last = _layer_norm_read(weight_ptr + rest, rest < N).to(ACC)
        # What is masked has dy = 0, and so adds nothing to any sum.
        h = (x - mean) * r
        g = dy * weight
        dw += dy * h
        db += dy
        sum_g = tl.sum(g, axis=1, keep_dims=True)  # (BLOCK_M, 1)
        sum_gh = tl.sum(g * h, axis=1, keep_dims=True)
        if REST:
            h_rest = (x_rest - mean) * r
            g_rest = dy_rest * last
            dw_rest += dy_rest * h_rest
            db_rest += dy_rest
            sum_g += tl.sum(g_rest, axis=1, keep_dims=True)
            sum_gh += tl.sum(g_rest * h_rest, axis=1, keep_dims=True)
            # A long row leaves no registers for its weight, so the weight is
            # loaded again, from a cache. With the eviction policy of the first
            # load, the compiler would make one load of both.
            weight = tl.load(
                weight_ptr + offs_n, eviction_policy="evict_first"
            ).to(ACC)
            last = tl.load(
                weight_ptr + rest,
                mask=rest < N,
                other=0,
                eviction_policy="evict_first",
            ).to(ACC)
            g_rest = dy_rest * last
            dx_rest = (g_rest - sum_g / N - h_rest * (sum_gh / N)) * r
            if dh_ptr is not None:
                dh_ptrs = dh_ptr + rows + rest  # (BLOCK_M, REST)
                dx_rest += _layer_norm_read(dh_ptrs, rest < N).to(ACC)
            tl.store(dx_ptr + rows + rest, dx_rest, mask=rest < N)
        dx = (dy * weight - sum_g / N - h * (sum_gh / N)) * r
        if dh_ptr is not None:
            dh_ptrs = dh_ptr + rows + offs_n  # (BLOCK_M, BLOCK_N)
            dx += _layer_norm_read(dh_ptrs, mask).to(ACC)
        tl.store(dx_ptr + rows + offs_n, dx, mask=mask)
    # Each program has rows of its own. Atomic additions to one row would come
    # in another order each time.
    dw_rows = sums_ptr + pid.to(tl.int64) * N
    db_rows = dw_rows + programs.to(tl.int64) * N
    dw = tl.sum(dw, axis=0, keep_dims=True)  # (1, BLOCK_N)
    db = tl.sum(db, axis=0, keep_dims=True)  # (1, BLOCK_N)
    tl.store(dw_rows + offs_n, dw, mask=offs_n < N)
    tl.store(db_rows + offs_n, db, mask=offs_n < N)
    if REST:
        dw_rest = tl.sum(dw_rest, axis=0, keep_dims=True)  # (1, REST)
        db_rest = tl.sum(db_rest, axis=0, keep_dims=True)  # (1, REST)
        tl.store(dw_rows + rest, dw_rest, mask=rest < N)
        tl.store(db_rows + rest, db_rest, mask=rest < N)


@triton.jit
def _layer_norm_sum_kernel(
    sums_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    # The block has all programs' sums: one program adds up a column, in the
    # same order each time.
    offs_p = tl.arange(0, BLOCK_P)[:, None]  # (BLOCK_P, 1)
    offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    # BLOCK_P is a power of two, and there need not be as many programs.
    mask = (offs_p < P) & (offs_n < N)
    # int32 is enough: a thousand programs with the longest rows make 2**25.
    offs = (tl.program_id(axis=1) * P + offs_p) * N + offs_n
    sums = tl.load(sums_ptr + offs, mask=mask, other=0)  # (BLOCK_P, BLOCK_N)
    total = tl.sum(sums, axis=0, keep_dims=True)  # (1, BLOCK_N)
    if tl.program_id(axis=1) == 0:
        tl.store(dw_ptr + offs_n, total, mask=offs_n < N)
    else:
        tl.store(db_ptr + offs_n, total, mask=offs_n < N)


@triton.jit
def _layer_norm_few_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    dh_ptr,  # the gradient of x itself, to be added
):
    # Unless 16 divides them, the compiler learns only here that VEC does.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    pid, blocks = tl.program_id(axis=0), tl.cdiv(N, COLUMNS)
    if pid < blocks:  # weight and bias in a block of columns
        offs_n = pid * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        dw = tl.zeros((BLOCK_M, COLUMNS), dtype=ACC)
        db = tl.zeros((BLOCK_M, COLUMNS), dtype=ACC)
        for start in range(0, M, BLOCK_M):
            # Rows may lie far apart: in int32, offsets would overflow.
            offs_m = (start + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
            mask = (offs_m < M) & (offs_n < N)  # (BLOCK_M, COLUMNS)
            x = tl.load(x_ptr + offs_m * stride_xm + offs_n, mask=mask, other=0)
            dy = tl.load(dy_ptr + offs_m * N + offs_n, mask=mask, other=0)
            dy = dy.to(ACC)
            mean = tl.load(stats_ptr + offs_m, mask=offs_m < M, other=0)
            r = tl.load(stats_ptr + M + offs_m, mask=offs_m < M, other=0)
            dw += dy * ((x.to(ACC) - mean) * r)
            db += dy
        dw = tl.sum(dw, axis=0, keep_dims=True)  # (1, COLUMNS)
        db = tl.sum(db, axis=0, keep_dims=True)  # (1, COLUMNS)
        tl.store(dw_ptr + offs_n, dw, mask=offs_n < N)
        tl.store(db_ptr + offs_n, db, mask=offs_n < N)
    else:  # one row of x
        row = (pid - blocks).to(tl.int64)
        offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = offs < N
        x = tl.load(x_ptr + row * stride_xm + offs, mask=mask, other=0).to(ACC)
        dy = tl.load(dy_ptr + row * N + offs, mask=mask, other=0).to(ACC)
        weight = tl.load(weight_ptr + offs, mask=mask, other=0).to(ACC)
        r = tl.load(stats_ptr + M + row)
        h = (x - tl.load(stats_ptr + row)) * r
        g = dy * weight  # 0 where it is masked
        sum_g, sum_gh = tl.sum(g, axis=0), tl.sum(g * h, axis=0)
        dx = (g - sum_g / N - h * (sum_gh / N)) * r
        if dh_ptr is not None:
            dx += _layer_norm_read(dh_ptr + row * N + offs, mask).to(ACC)
        tl.store(dx_ptr + row * N + offs, dx, mask=mask)


def _layer_norm_check(name, matrices, vectors):
    """Raise for what the ops do not take."""
    x = matrices[0]
    kinds = [(t.dtype, t.device) for t in (*matrices, *vectors)]
    if x.dtype not in LAYER_NORM_ACC or kinds.count(kinds[0]) < len(kinds):
        raise TypeError(f"{name} takes one float dtype and device, not {kinds}")
    shapes = [tuple(t.shape) for t in (*matrices, *vectors)]
    same = shapes.count(shapes[0]) >= len(matrices)
    row = shapes[0][-1:]
    if not same or x.ndim == 0 or any(tuple(t.shape) != row for t in vectors):
        raise ValueError(f"{name} takes shapes (..., N) and (N,), not {shapes}")
    most = LAYER_NORM_LONGEST // max(4, x.element_size())
    if x.shape[-1] > most:
        raise ValueError(
            f"{name} takes rows of up to {most} elements of {x.dtype}, "
            f"not {x.shape[-1]}: norms_long takes rows of any length"
        )


def _layer_norm_rows(x):
    """Return a tensor as a matrix with contiguous rows, and their distance."""
    N = int(x.shape[-1])
    if x.is_contiguous():
        return x, N
    x = x.reshape(-1, N)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, int(x.stride(0))


@cache
def _layer_norm_gpu(device):
    """Return the multiprocessors of a GPU, and their shared memory in bytes."""
    if device.type != "cuda":
        return 2, 2**17  # for the interpreter
    gpu = torch.cuda.get_device_properties(device)
    # On AMD's GPUs torch does not tell.
    shared = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
    return gpu.multi_processor_count, shared


def _layer_norm_blocks(x, stride, warps):
    """Return the blocks of a row, how it is read, and by how many warps."""
    N, size = int(x.shape[-1]), max(4, x.element_size())
    BLOCK_N, REST = triton.next_power_of_2(N), 0
    masked = N * 4 <= BLOCK_N * 3 and BLOCK_N * size > LAYER_NORM_WHOLE
    if masked or BLOCK_N * size > 2 * LAYER_NORM_WHOLE:
        BLOCK_N //= 2
        REST = triton.next_power_of_2(N - BLOCK_N)
    row = (BLOCK_N + REST) * size
    num_warps = next(w for most, w in warps if row <= most)
    return {
        "ACC": LAYER_NORM_ACC[x.dtype],
        "VEC": math.gcd(N, stride, 16 // x.element_size()),
        "BLOCK_N": BLOCK_N,
        "REST": REST,
        "num_warps": num_warps,
    }


def _layer_norm_plan(x, stride):
    """Return how to launch the forward for the rows of x."""
    N, size = int(x.shape[-1]), max(4, x.element_size())
    plan = _layer_norm_blocks(x, stride, LAYER_NORM_WARPS)
    if plan["REST"]:  # 16 bytes a thread, or threads would exchange them
        least = 16 * 32 * plan["num_warps"] // x.element_size()
        plan["REST"] = max(plan["REST"], least)
    few = x.numel() // N <= _layer_norm_gpu(x.device)[0]
    row = (plan["BLOCK_N"] + plan["REST"]) * size
    return plan | {
        "EARLY": few or row <= LAYER_NORM_WHOLE,
        "BLOCK_M": max(1, 2 * LAYER_NORM_TILE // (plan["BLOCK_N"] * size)),
    }


def _layer_norm_plan_backward(x, stride, has_dh=False):
    """Return how many programs to launch for the gradients, and how."""
    N, size = int(x.shape[-1]), max(4, x.element_size())
    plan = _layer_norm_blocks(x, stride, LAYER_NORM_WARPS_BACKWARD)
    BLOCK_M = max(1, LAYER_NORM_TILE // (plan["BLOCK_N"] * size))
    block = BLOCK_M * (plan["BLOCK_N"] + plan["REST"])
    processors, shared = _layer_norm_gpu(x.device)
    # As many programs as run at a time, but no more than tiles
    each = max(1, min(4, 40 * 1024 // (block * size)))
    programs = min(processors * each, triton.cdiv(x.numel() // N, BLOCK_M))
    # Loads for further turns of the loop wait in shared memory: those of two
    # turns if they fit, else none. Tiles of short rows have none, either.
    loads = each * (2 + has_dh + (2 if plan["REST"] else 0))
    fit = 2 * loads * block * x.element_size() <= shared
    STAGES = 3 if fit and BLOCK_M < 4 else 1
    return programs, plan | {"BLOCK_M": BLOCK_M, "STAGES": STAGES}


def _layer_norm_plan_few(x, stride):
    """Return how to launch the gradients of few rows at once."""
    plan = _layer_norm_blocks(x, stride, LAYER_NORM_WARPS)
    del plan["REST"]  # a row is one block
    N = int(x.shape[-1])
    M = x.numel() // N
    return plan | {
        "BLOCK_M": 16 if M <= 16 else 32 if M <= 32 else 64,
        "BLOCK_N": triton.next_power_of_2(N),
        "COLUMNS": LAYER_NORM_COLUMNS // max(4, x.element_size()),
    }


def _layer_norm_forward(name, x, residual, weight, bias, eps, kernel):
    """Return the norm, x + residual if there is one, and the statistics."""
    matrices = [x] if residual is None else [x, residual]
    _layer_norm_check(name, matrices, [weight, bias])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = None if residual is None else torch.empty_like(y)
    wide = torch.promote_types(x.dtype, torch.float32)
    stats = x.new_empty(2, math.prod(x.shape[:-1]), dtype=wide)
    if y.numel() == 0:
        return y, h, stats.zero_()
    x, stride_xm = _layer_norm_rows(x)
    N = int(y.shape[-1])
    M = y.numel() // N
    plan = _layer_norm_plan(y, stride_xm)
    rows, stride_rm = None, None
    if residual is not None:
        rows, stride_rm = _layer_norm_rows(residual)
        plan["VEC"] = math.gcd(plan["VEC"], stride_rm)
    plan |= {"residual_ptr": rows, "h_ptr": h, "stride_rm": stride_rm}
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    pointers = x, weight.contiguous(), bias.contiguous(), y, stats
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[grid](*pointers, M, N, stride_xm, EPS=eps, **plan)
    return y, h, stats


def _layer_norm_launch(x, weight, bias, eps, kernel=_layer_norm_kernel):
    inputs = x, None, weight, bias
    y, _, stats = _layer_norm_forward("layer_norm", *inputs, eps, kernel)
    return y, stats


def _layer_norm_residual_launch(
    x, residual, weight, bias, eps, kernel=_layer_norm_kernel
):
    inputs = x, residual, weight, bias
    return _layer_norm_forward("layer_norm_residual", *inputs, eps, kernel)


def _layer_norm_backward_launch(
    dy,
    x,
    weight,
    stats,
    dh=None,
    kernel=_layer_norm_backward_kernel,
    sum_kernel=_layer_norm_sum_kernel,
    few_kernel=_layer_norm_few_kernel,
    few=LAYER_NORM_FEW,
):
    matrices = [dy, x] if dh is None else [dy, x, dh]
    _layer_norm_check("layer_norm_backward", matrices, [weight])
    if tuple(stats.shape) != (2, math.prod(x.shape[:-1])):
        raise ValueError(
            "layer_norm_backward takes the stats of as many rows, not of shape "
            f"{tuple(stats.shape)}"
        )
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = torch.empty_like(dw)
    if dx.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    x, stride_xm = _layer_norm_rows(x)
    N = int(dx.shape[-1])
    M = dx.numel() // N
    inputs = dy.contiguous(), x, weight.contiguous(), stats.contiguous()
    sizes = M, N, stride_xm
    dh = None if dh is None else dh.contiguous()
    with torch.accelerator.device_index(dx.device.index):
        if few * _layer_norm_gpu(dx.device)[0] >= M:
            plan = _layer_norm_plan_few(dx, stride_xm)
            grid = (M + triton.cdiv(N, plan["COLUMNS"]),)
            few_kernel[grid](*inputs, dx, dw, db, *sizes, dh_ptr=dh, **plan)
            return dx, dw, db
        has_dh = dh is not None
        programs, plan = _layer_norm_plan_backward(dx, stride_xm, has_dh)
        sums = stats.new_empty(2, programs, N)
        kernel[(programs,)](*inputs, dx, sums, *sizes, dh_ptr=dh, **plan)
        BLOCK_P = triton.next_power_of_2(programs)
        BLOCK_N = LAYER_NORM_SUMS // BLOCK_P
        sum_kernel[(triton.cdiv(N, BLOCK_N), 2)](
            sums, dw, db, programs, N, BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N
        )
    return dx, dw, db


@triton_op(f"{LAYER_NORM_NAMESPACE}::layer_norm", mutates_args={})
def layer_norm_with_stats(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what layer_norm does, and the mean and 1 / deviation of each row.

    They are of shape (2, rows), in float32, or float64 for float64. They have
    no gradient.
    """
    kernel = wrap_triton(_layer_norm_kernel)
    return _layer_norm_launch(x, weight, bias, eps, kernel)


@triton_op(f"{LAYER_NORM_NAMESPACE}::layer_norm_residual", mutates_args={})
def layer_norm_residual_with_stats(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what layer_norm_residual does, and the same for its sum."""
    kernel = wrap_triton(_layer_norm_kernel)
    return _layer_norm_residual_launch(x, residual, weight, bias, eps, kernel)


@triton_op(f"{LAYER_NORM_NAMESPACE}::layer_norm_backward", mutates_args={})
def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stats: torch.Tensor,
    dh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight and bias, given that of the norm.

    Takes ``stats`` as ``layer_norm_with_stats`` returned them, and raises as
    ``layer_norm`` does. ``dh`` is added to the gradient of x.
    """
    kernels = (
        wrap_triton(_layer_norm_backward_kernel),
        wrap_triton(_layer_norm_sum_kernel),
        wrap_triton(_layer_norm_few_kernel),
    )
    return _layer_norm_backward_launch(dy, x, weight, stats, dh, *kernels)


def _layer_norm_setup(ctx, inputs, output):
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _layer_norm_gradient(ctx, dy, _):
    return *layer_norm_backward(dy, *ctx.saved_tensors), None


def _layer_norm_residual_setup(ctx, inputs, output):
    _, h, stats = output
    ctx.save_for_backward(h, inputs[2], stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)  # None for a result that nobody used


def _layer_norm_residual_gradient(ctx, dy, dh, _):
    dy = torch.zeros_like(ctx.saved_tensors[0]) if dy is None else dy
    dx, dw, db = layer_norm_backward(dy, *ctx.saved_tensors, dh)
    return dx, dx, dw, db, None


layer_norm_with_stats.register_autograd(
    _layer_norm_gradient, setup_context=_layer_norm_setup
)
layer_norm_residual_with_stats.register_autograd(
    _layer_norm_residual_gradient, setup_context=_layer_norm_residual_setup
)

# On a GPU a call goes to the launcher; all else goes on to the triton_op.
LAYER_NORM_LIBRARY = Library(LAYER_NORM_NAMESPACE, "FRAGMENT")
LAYER_NORM_LIBRARY.impl("layer_norm", _layer_norm_launch, "CUDA")
LAYER_NORM_LIBRARY.impl(
    "layer_norm_residual", _layer_norm_residual_launch, "CUDA"
)
LAYER_NORM_LIBRARY.impl(
    "layer_norm_backward", _layer_norm_backward_launch, "CUDA"
)

# Under torch.autocast it computes in float32, as PyTorch's own does.
layer_norm_with_stats.register_autocast("cpu", torch.float32)
layer_norm_with_stats.register_autocast("cuda", torch.float32)
layer_norm_residual_with_stats.register_autocast("cpu", torch.float32)
layer_norm_residual_with_stats.register_autocast("cuda", torch.float32)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the rows of x with mean 0 and variance 1, times weight, plus bias.

    As ``torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)``.
    Takes float16, bfloat16, float32 or float64, one for all: ``x`` of shape
    (..., N) and any strides, ``weight`` and ``bias`` of shape (N,), with N up
    to 16384, or 8192 in float64; longer rows are for ``norms_long``. Both are
    needed: give ones and zeros for what is ``None`` elsewhere. The kernel is
    compiled for each ``eps``. The result has the shape and dtype of ``x``, is
    contiguous, and is deterministic, and so are the gradients. Second
    derivatives are not supported. Raises TypeError for other dtypes or devices
    that differ, and ValueError for other shapes. From
    https://arxiv.org/abs/1607.06450.

    Rounding: mean, variance and products are in float32, or float64 for
    float64, weight and bias included. Each result and each gradient is rounded
    once; the gradients of weight and bias are rounded after they are summed
    over the rows.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    if weight is None or bias is None:
        raise TypeError(
            "layer_norm takes a weight and a bias: give ones and zeros for None"
        )
    return layer_norm_with_stats(x, weight, bias, eps)[0]


def layer_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of h = x + residual, and h.

    ``residual`` has the shape and dtype of ``x``, and so have both results:
    flash-attention's ``layer_norm_fn`` with ``prenorm``. All else is as in
    ``layer_norm``. h is rounded to its dtype, and the norm is that of the
    rounded h.
    """
    inputs = x, residual, weight, bias
    return layer_norm_residual_with_stats(*inputs, eps)[:2]
