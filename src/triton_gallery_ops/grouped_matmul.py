"""Grouped GEMM: a matrix product for each group of rows, in one launch.

Multiplies each group of the rows of ``x`` by a matrix of its own, as experts
do, with groups of any length: ``offsets`` stays on the GPU, so no call waits
for it. There is one program per multiprocessor, which walks over the tiles of
all groups. On NVIDIA GPUs of compute capability 9.0 or more, the copy engine
loads and stores tiles of 16-bit floats whose rows begin at multiples of 16
bytes; all else goes through pointers, on any GPU, and is slower. The gradient
of the weight, whose sums are as long as the groups, is a single launch as well.
The tile follows from a formula, without tuning: deterministic. Gradients of any
order. ``grouped_matmul_fp8`` multiplies float8, with scales for tensors, rows
or blocks of 128, through the copy engine alone and without a gradient. For
blocks on Hopper (H100, H200), a kernel in Gluon specializes warps: one loads,
and groups of four multiply, so that the tensor cores work for one group while
another scales.
"""

import math
import threading
from functools import cache, lru_cache, partial

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
from triton.tools.tensor_descriptor import TensorDescriptor

GROUPED_MATMUL_NAMESPACE = "triton_gallery"
GROUPED_MATMUL_THREAD = threading.local()
GROUPED_MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# BLOCK_M, BLOCK_N, BLOCK_K, warps and the most stages: through the copy engine,
# through pointers, where these load one element at a time, and of wider dtypes
GROUPED_MATMUL_ENGINE = [
    (128, 256, 64, 8, 4),
    (128, 128, 64, 4, 6),
    (64, 256, 64, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (64, 128, 64, 4, 6),  # where shared memory is small
]
GROUPED_MATMUL_POINTERS = [
    (128, 128, 64, 8, 3),
    (64, 128, 64, 4, 3),
    (32, 128, 64, 4, 3),
    (16, 128, 64, 4, 4),
]
GROUPED_MATMUL_ODD = [(64, 64, 32, 4, 3), (16, 64, 32, 4, 3)]
GROUPED_MATMUL_WIDE = [(64, 64, 16, 8, 4), (16, 64, 32, 4, 3)]
GROUPED_MATMUL_FP8_INPUTS = torch.float8_e4m3fn, torch.float8_e5m2
GROUPED_MATMUL_FP8_OUTPUTS = torch.bfloat16, torch.float16, torch.float32
# As above, of float8: scaled after the sum, or each 128 of K
GROUPED_MATMUL_FP8_ENGINE = [
    (128, 256, 128, 8, 4),
    (128, 128, 128, 4, 5),
    (64, 256, 128, 4, 4),
    (64, 128, 128, 4, 6),
    (64, 64, 128, 4, 8),
]
GROUPED_MATMUL_FP8_BLOCKS = [
    (128, 128, 128, 8, 5),
    (64, 128, 128, 4, 6),
    (64, 64, 128, 4, 6),
]
# On Hopper; in the place of warps, the groups of four of them that multiply
GROUPED_MATMUL_FP8_HOPPER = [(128, 128, 128, 2, 6), (192, 128, 128, 3, 4)]
# registers of a thread: at the launch, and of those that multiply
GROUPED_MATMUL_FP8_REGISTERS = {2: (168, 240), 3: (128, 160)}
GROUPED_MATMUL_FP8_STEP = 80  # what a step costs, beside rows and columns
GROUPED_MATMUL_FP8_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
GROUPED_MATMUL_FP8_SQUARE = 128  # numbers that share a scale, along N and K
GROUPED_MATMUL_EDGE = 48  # what an edge of a tile costs, beside its area
GROUPED_MATMUL_HELD = 2  # programs of a multiprocessor, through pointers
GROUPED_MATMUL_ROWS = tl.constexpr(2**30)  # a descriptor has fewer
GROUPED_MATMUL_ZEROS = 4096  # stored at a time, past the last group
GROUPED_MATMUL_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
_grouped_matmul_load = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)
_grouped_matmul_store = (
    getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
)


@triton.jit
def _grouped_matmul_before(
    offsets_ptr, E, R, tiles_n, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Return how many tiles come before each group, and how many there are."""
    groups = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    ends = tl.load(offsets_ptr + groups, mask=groups < E, other=0)
    some = (groups > 0) & (groups < E)
    starts = tl.load(offsets_ptr + groups - 1, mask=some, other=0)
    rows = tl.maximum(tl.minimum(ends, R) - starts, 0)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    return tl.cumsum(tiles, axis=0) - tiles, tl.sum(tiles, axis=0)


@triton.jit
def _grouped_matmul_rows(group, offsets_ptr, R):
    """Return the first row of a group, and how many it has."""
    some = group > 0
    start = tl.load(offsets_ptr + group - 1, mask=some, other=0)
    end = tl.minimum(tl.load(offsets_ptr + group), R)
    return start, tl.maximum(end - start, 0)


@triton.jit
def _grouped_matmul_place(tile, tiles_m, tiles_n):
    """Return the row and the column of a tile: column by column, in groups."""
    # Eight rows of tiles together: what is read again is still in L2.
    first = tile // (8 * tiles_n) * 8
    height = tl.minimum(tiles_m - first, 8)
    within = tile % (8 * tiles_n)
    return first + within % height, within // height


@triton.jit
def _grouped_matmul_find(
    tile, before, offsets_ptr, R, tiles_n, BLOCK_M: tl.constexpr
):
    """Return a tile's group, its row and column within it, and its rows."""
    # Of the groups that begin at or before this tile, it is in the last one. An
    # empty group begins where the next one does.
    begun = before <= tile  # (BLOCK_E,)
    groups = tl.arange(0, before.shape[0])
    group = tl.max(tl.where(begun, groups, 0), axis=0)
    tile -= tl.max(tl.where(begun, before, 0), axis=0)
    start, rows = _grouped_matmul_rows(group, offsets_ptr, R)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    pid_m, pid_n = _grouped_matmul_place(tile, tiles_m, tiles_n)
    return group, pid_m, pid_n, start, rows


@triton.jit
def _grouped_matmul_zeros(y_ptr, offsets_ptr, E, R, N, BLOCK: tl.constexpr):
    """Store zeros in the rows past the last group of y, which is contiguous."""
    last = tl.minimum(tl.load(offsets_ptr + E - 1), R).to(tl.int64)
    size = (R - last) * N
    first = tl.program_id(axis=0).to(tl.int64) * BLOCK
    for begin in range(first, size, tl.num_programs(axis=0) * BLOCK):
        offs = begin + tl.arange(0, BLOCK)  # (BLOCK,)
        zeros = tl.zeros((BLOCK,), dtype=y_ptr.dtype.element_ty)
        tl.store(y_ptr + last * N + offs, zeros, mask=offs < size)


@triton.jit
def _grouped_matmul_dot(a, b, acc, ACC: tl.constexpr):
    """Return acc + a @ b."""
    if GROUPED_MATMUL_INTERPRETED:
        # Triton's interpreter multiplies bfloat16 wrongly, and so it does small
        # numbers of float8_e5m2.
        a, b = a.to(ACC), b.to(ACC)
    # "ieee": float32 is not rounded to TF32 before it is multiplied.
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _grouped_matmul_ragged(start, rows, row):
    """Return the first three places of a row of a group, in a descriptor.

    It is from _grouped_matmul_descriptor. The third reaches the descriptor's
    length where the group ends, and the engine takes nothing past that.
    """
    MOST: tl.constexpr = GROUPED_MATMUL_ROWS
    # A constant less a number is no place in the interpreter of Triton 3.9.
    return MOST, start + rows, row - rows + MOST


@triton.jit
def _grouped_matmul_engine_kernel(
    x_desc,
    weight_desc,
    y_desc,  # ragged: it stores the rows of one group alone
    y_ptr,
    bias_ptr,  # None without a bias
    offsets_ptr,
    E,
    W_T: tl.constexpr,  # weight_desc is of the transposes
    BLOCK_E: tl.constexpr,
    ZEROS: tl.constexpr,
):
    R, K = x_desc.shape
    N = y_desc.shape[3]
    BLOCK_M: tl.constexpr = y_desc.block_shape[2]
    HALF: tl.constexpr = y_desc.block_shape[3]
    BLOCK_N: tl.constexpr = 2 * HALF
    BLOCK_K: tl.constexpr = x_desc.block_shape[1]
    tiles_n = tl.cdiv(N, BLOCK_N)
    before, tiles = _grouped_matmul_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, tiles, programs, flatten=True):
        group, pid_m, pid_n, start, rows = _grouped_matmul_find(
            tile, before, offsets_ptr, R, tiles_n, BLOCK_M
        )
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            # The engine fills with zeros past K, so those add nothing. Rows
            # past the group's end are computed and not stored.
            x = x_desc.load([start + off_m, k])  # (BLOCK_M, BLOCK_K)
            if W_T:
                w = weight_desc.load([group, off_n, k])
                w = w.reshape(BLOCK_N, BLOCK_K).T
            else:
                w = weight_desc.load([group, k, off_n])
                w = w.reshape(BLOCK_K, BLOCK_N)
            acc = _grouped_matmul_dot(x, w, acc, tl.float32)
        # In halves, the store needs half as much shared memory, and the loads
        # have a stage more. tl.split takes apart the last dimension.
        both = tl.reshape(acc, (BLOCK_M, 2, HALF)).permute(0, 2, 1)
        left, right = tl.split(both)  # (BLOCK_M, HALF)
        for side in tl.static_range(2):
            y = left if side == 0 else right
            off = off_n + side * HALF
            if bias_ptr is not None:
                offs_n = off + tl.arange(0, HALF)  # (HALF,)
                bias_ptrs = bias_ptr + group.to(tl.int64) * N + offs_n
                bias = tl.load(bias_ptrs, mask=offs_n < N, other=0.0)
                y += bias.to(tl.float32)[None, :]
            y = y.to(y_desc.dtype).reshape(1, 1, BLOCK_M, HALF)
            a, b, c = _grouped_matmul_ragged(start, rows, off_m)
            y_desc.store([a, b, c, off], y)
    _grouped_matmul_zeros(y_ptr, offsets_ptr, E, R, N, ZEROS)


@triton.jit
def _grouped_matmul_steps(
    offsets_ptr,
    E,
    R,
    tiles,  # of each group
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return how many steps along rows this program has, in all its tiles."""
    groups = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    ends = tl.load(offsets_ptr + groups, mask=groups < E, other=0)
    some = (groups > 0) & (groups < E)
    starts = tl.load(offsets_ptr + groups - 1, mask=some, other=0)
    # An empty group has one step, of zeros.
    steps = tl.maximum(tl.cdiv(tl.minimum(ends, R) - starts, BLOCK_K), 1)
    # Of the tiles up to n, this program has those at first, first + programs...
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    begin = (groups * tiles - first + programs - 1) // programs
    end = ((groups + 1) * tiles - first + programs - 1) // programs
    return tl.sum(tl.where(groups < E, (end - begin) * steps, 0), axis=0)


# R is a number of tokens. If it were specialized, R = 1, multiples of 16 and
# all other R would each be compiled.
@triton.jit(do_not_specialize=["R"])
def _grouped_matmul_engine_sums_kernel(
    x_desc,  # ragged, as y_desc: zeros are past the last row of a group
    y_desc,
    out_desc,
    offsets_ptr,
    E,
    R,
    BLOCK_E: tl.constexpr,
):
    K, N = out_desc.shape[1], out_desc.shape[2]
    BLOCK_M: tl.constexpr = out_desc.block_shape[1]
    HALF: tl.constexpr = out_desc.block_shape[2]
    BLOCK_N: tl.constexpr = 2 * HALF
    BLOCK_K: tl.constexpr = x_desc.block_shape[2]
    tiles_m, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    steps = _grouped_matmul_steps(offsets_ptr, E, R, tiles, BLOCK_K, BLOCK_E)
    programs = tl.num_programs(axis=0)
    tile = tl.program_id(axis=0) - programs
    start, rows, group, off_m, off_n = 0, 0, 0, 0, 0
    row = -BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # One loop over the steps of all tiles, as the compiler flattens only loops
    # of one length: the next tile's loads begin before this one is stored.
    for _ in range(steps):
        row = tl.where(row + BLOCK_K >= rows, 0, row + BLOCK_K)
        if row == 0:
            tile += programs
            group, place = tile // tiles, tile % tiles
            pid_m, pid_n = _grouped_matmul_place(place, tiles_m, tiles_n)
            off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
            start, rows = _grouped_matmul_rows(group, offsets_ptr, R)
        a, b, c = _grouped_matmul_ragged(start, rows, row)
        x = x_desc.load([a, b, c, off_m]).reshape(BLOCK_K, BLOCK_M).T
        y = y_desc.load([a, b, c, off_n]).reshape(BLOCK_K, BLOCK_N)
        acc = _grouped_matmul_dot(x, y, acc, tl.float32)
        if row + BLOCK_K >= rows:
            both = tl.reshape(acc, (BLOCK_M, 2, HALF)).permute(0, 2, 1)
            left, right = tl.split(both)  # (BLOCK_M, HALF)
            left = left.to(out_desc.dtype).reshape(1, BLOCK_M, HALF)
            right = right.to(out_desc.dtype).reshape(1, BLOCK_M, HALF)
            out_desc.store([group, off_m, off_n], left)
            out_desc.store([group, off_m, off_n + HALF], right)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit(do_not_specialize=["R"])
def _grouped_matmul_pointers_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    bias_ptr,  # None without a bias
    offsets_ptr,
    E,
    R,
    K,
    N,
    stride_xr,
    stride_xk,
    stride_we,
    stride_wk,
    stride_wn,
    ACC: tl.constexpr,
    W_T: tl.constexpr,  # VEC_W is along K
    VEC_X: tl.constexpr,  # what divides K and the strides of rows, or 1
    VEC_W: tl.constexpr,
    VEC_Y: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ZEROS: tl.constexpr,
):
    # The compiler learns only here that rows begin at multiples of 16 bytes.
    stride_xr = stride_xr // VEC_X * VEC_X
    stride_we = stride_we // VEC_W * VEC_W
    if W_T:
        stride_wn = stride_wn // VEC_W * VEC_W
    else:
        stride_wk = stride_wk // VEC_W * VEC_W
    K_X, N_Y = K // VEC_X * VEC_X, N // VEC_Y * VEC_Y
    K_W = K // VEC_W * VEC_W if W_T else K
    N_W = N if W_T else N // VEC_W * VEC_W
    tiles_n = tl.cdiv(N, BLOCK_N)
    before, tiles = _grouped_matmul_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    for tile in range(first, tiles, programs):
        group, pid_m, pid_n, start, rows = _grouped_matmul_find(
            tile, before, offsets_ptr, R, tiles_n, BLOCK_M
        )
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        # In int32 a product with a stride would overflow past element 2**31.
        offs_r = (start + offs_m).to(tl.int64)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
        x_rows = x_ptr + offs_r[:, None] * stride_xr
        w_columns = weight_ptr + group.to(tl.int64) * stride_we
        w_columns += offs_n.to(tl.int64)[None, :] * stride_wn
        mask_m = offs_m < rows
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for k in range(0, K, BLOCK_K):
            x_mask = mask_m[:, None] & (offs_k < K_X - k)[None, :]
            w_mask = (offs_k < K_W - k)[:, None] & (offs_n < N_W)[None, :]
            offs = (k + offs_k).to(tl.int64)
            x_ptrs = x_rows + offs[None, :] * stride_xk
            w_ptrs = w_columns + offs[:, None] * stride_wk
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            w = tl.load(w_ptrs, mask=w_mask, other=0.0)
            acc = _grouped_matmul_dot(x, w, acc, ACC)
        mask_n = offs_n < N_Y
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + group.to(tl.int64) * N + offs_n
            bias = tl.load(bias_ptrs, mask=mask_n, other=0.0)
            acc += bias[None, :].to(ACC)
        y_ptrs = y_ptr + offs_r[:, None] * N_Y + offs_n[None, :]
        y = acc.to(y_ptr.dtype.element_ty)  # (BLOCK_M, BLOCK_N)
        tl.store(y_ptrs, y, mask=mask_m[:, None] & mask_n[None, :])
    _grouped_matmul_zeros(y_ptr, offsets_ptr, E, R, N, ZEROS)


@triton.jit(do_not_specialize=["R"])
def _grouped_matmul_pointers_sums_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    offsets_ptr,
    E,
    R,
    K,
    N,
    stride_xr,
    stride_xk,
    stride_yr,
    stride_yn,
    ACC: tl.constexpr,
    VEC_X: tl.constexpr,  # what divides K and the stride of rows, or 1
    VEC_Y: tl.constexpr,
    VEC_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    stride_xr = stride_xr // VEC_X * VEC_X
    stride_yr = stride_yr // VEC_Y * VEC_Y
    K_X, N_Y = K // VEC_X * VEC_X, N // VEC_Y * VEC_Y
    N_OUT = N // VEC_OUT * VEC_OUT
    tiles_m, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    for tile in range(first, E * tiles, programs):
        group, place = tile // tiles, tile % tiles
        pid_m, pid_n = _grouped_matmul_place(place, tiles_m, tiles_n)
        start, rows = _grouped_matmul_rows(group, offsets_ptr, R)
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
        # In int32 a product with a stride would overflow past element 2**31.
        x_columns = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xk
        y_columns = y_ptr + offs_n.to(tl.int64)[None, :] * stride_yn
        x_mask = (offs_m < K_X)[:, None]
        y_mask = (offs_n < N_Y)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for row in range(0, rows, BLOCK_K):
            some = offs_k < rows - row
            offs = (start + row + offs_k).to(tl.int64)
            x_ptrs = x_columns + offs[None, :] * stride_xr
            y_ptrs = y_columns + offs[:, None] * stride_yr
            x = tl.load(x_ptrs, mask=x_mask & some[None, :], other=0.0)
            y = tl.load(y_ptrs, mask=some[:, None] & y_mask, other=0.0)
            acc = _grouped_matmul_dot(x, y, acc, ACC)
        rows_out = group.to(tl.int64) * K + offs_m
        out_ptrs = out_ptr + rows_out[:, None] * N_OUT + offs_n[None, :]
        out = acc.to(out_ptr.dtype.element_ty)  # (BLOCK_M, BLOCK_N)
        mask = (offs_m < K)[:, None] & (offs_n < N_OUT)[None, :]
        tl.store(out_ptrs, out, mask=mask)


@triton.jit
def _grouped_matmul_fp8_kernel(
    x_desc,
    weight_desc,  # of the transposes
    y_desc,  # ragged
    y_ptr,
    scale_x_ptr,
    scale_weight_ptr,
    offsets_ptr,
    E,
    stride_yr,
    PER_ROW: tl.constexpr,  # scale_x is, or else it is one number
    PER_COLUMN: tl.constexpr,  # scale_weight is, or else one for each group
    BLOCK_E: tl.constexpr,
    ZEROS: tl.constexpr,
):
    R, K = x_desc.shape
    N = y_desc.shape[3]
    BLOCK_M: tl.constexpr = y_desc.block_shape[2]
    HALF: tl.constexpr = y_desc.block_shape[3]
    BLOCK_N: tl.constexpr = 2 * HALF
    BLOCK_K: tl.constexpr = x_desc.block_shape[1]
    tiles_n = tl.cdiv(N, BLOCK_N)
    before, tiles = _grouped_matmul_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, as in the kernel of wider floats.
    for tile in tl.range(first, tiles, programs, flatten=True):
        group, pid_m, pid_n, start, rows = _grouped_matmul_find(
            tile, before, offsets_ptr, R, tiles_n, BLOCK_M
        )
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([start + off_m, k])  # (BLOCK_M, BLOCK_K)
            w = weight_desc.load([group, off_n, k])
            w = w.reshape(BLOCK_N, BLOCK_K).T
            acc = _grouped_matmul_dot(x, w, acc, tl.float32)
        if PER_ROW:
            offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
            scale_ptrs = scale_x_ptr + start + offs_m
            scale = tl.load(scale_ptrs, mask=offs_m < rows, other=0.0)
            acc *= scale[:, None]
        else:
            acc *= tl.load(scale_x_ptr)
        both = tl.reshape(acc, (BLOCK_M, 2, HALF)).permute(0, 2, 1)
        left, right = tl.split(both)  # (BLOCK_M, HALF)
        for side in tl.static_range(2):
            y = left if side == 0 else right
            off = off_n + side * HALF
            if PER_COLUMN:
                offs_n = off + tl.arange(0, HALF)  # (HALF,)
                scale_ptrs = scale_weight_ptr + group.to(tl.int64) * N + offs_n
                scale = tl.load(scale_ptrs, mask=offs_n < N, other=0.0)
                y *= scale[None, :]
            else:
                y *= tl.load(scale_weight_ptr + group)
            y = y.to(y_desc.dtype).reshape(1, 1, BLOCK_M, HALF)
            a, b, c = _grouped_matmul_ragged(start, rows, off_m)
            y_desc.store([a, b, c, off], y)
    _grouped_matmul_zeros(y_ptr, offsets_ptr, E, R, stride_yr, ZEROS)


@triton.jit
def _grouped_matmul_fp8_blocks_kernel(
    x_desc,
    weight_desc,  # of the transposes
    y_desc,  # ragged
    y_ptr,
    scale_x_ptr,
    scale_weight_ptr,
    offsets_ptr,
    E,
    stride_yr,
    stride_xr,  # of the scales
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    BLOCK_E: tl.constexpr,
    ZEROS: tl.constexpr,
):
    R, K = x_desc.shape
    N = y_desc.shape[3]
    BLOCK_M: tl.constexpr = y_desc.block_shape[2]
    BLOCK_N: tl.constexpr = y_desc.block_shape[3]
    SQUARE: tl.constexpr = x_desc.block_shape[1]
    tiles_n = tl.cdiv(N, BLOCK_N)
    before, tiles = _grouped_matmul_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    for tile in tl.range(first, tiles, programs, flatten=True):
        group, pid_m, pid_n, start, rows = _grouped_matmul_find(
            tile, before, offsets_ptr, R, tiles_n, BLOCK_M
        )
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        of_rows = scale_x_ptr + (start + offs_m).to(tl.int64) * stride_xr
        of_group = scale_weight_ptr + group.to(tl.int64) * stride_we
        # A tile is within one square of columns.
        of_square = of_group + (off_n // SQUARE).to(tl.int64) * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, SQUARE):
            x = x_desc.load([start + off_m, k])  # (BLOCK_M, SQUARE)
            w = weight_desc.load([group, off_n, k])
            w = w.reshape(BLOCK_N, SQUARE).T
            scale = tl.load(
                of_rows + k // SQUARE * stride_xk, mask=offs_m < rows, other=0.0
            )  # (BLOCK_M,)
            scale *= tl.load(of_square + k // SQUARE * stride_wk)
            # Each square has its scale: its sum is scaled, then added.
            part = _grouped_matmul_dot(x, w, None, tl.float32)
            acc += part * scale[:, None]
        y = acc.to(y_desc.dtype).reshape(1, 1, BLOCK_M, BLOCK_N)
        a, b, c = _grouped_matmul_ragged(start, rows, off_m)
        y_desc.store([a, b, c, off_n], y)
    _grouped_matmul_zeros(y_ptr, offsets_ptr, E, R, stride_yr, ZEROS)


@gluon.jit
def _grouped_matmul_fp8_sum(a, b):
    return a + b


@gluon.jit
def _grouped_matmul_fp8_before(
    offsets_ptr, E, R, tiles_n, BLOCK_M: gl.constexpr, BLOCK_E: gl.constexpr
):
    """Return what _grouped_matmul_before does."""
    every: gl.constexpr = gl.BlockedLayout(
        [BLOCK_E // 32], [32], [gl.num_warps()], [0]
    )
    groups = gl.arange(0, BLOCK_E, every)
    ends = gl.load(offsets_ptr + groups, mask=groups < E, other=0)
    some = (groups > 0) & (groups < E)
    starts = gl.load(offsets_ptr + groups - 1, mask=some, other=0)
    rows = gl.maximum(gl.minimum(ends, R) - starts, 0)
    tiles = gl.cdiv(rows, BLOCK_M) * tiles_n
    through = gl.associative_scan(tiles, 0, _grouped_matmul_fp8_sum)
    return through - tiles, gl.sum(tiles, axis=0)


@gluon.jit
def _grouped_matmul_fp8_find(tile, where, BLOCK_M: gl.constexpr):
    """Return a tile's group, its column and its row, and the group's rows."""
    table, offsets_ptr, R, tiles_n = where
    BLOCK_E: gl.constexpr = table.shape[0]
    # Each warp has all groups, so that it needs no other one to find its own.
    every: gl.constexpr = gl.BlockedLayout(
        [BLOCK_E // 32], [32], [gl.num_warps()], [0]
    )
    before = table.load(every)
    groups = gl.arange(0, BLOCK_E, every)
    begun = before <= tile
    group = gl.max(gl.where(begun, groups, 0), axis=0)
    tile -= gl.max(gl.where(begun, before, 0), axis=0)
    start = gl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = gl.minimum(gl.load(offsets_ptr + group), R)
    rows = gl.maximum(end - start, 0)
    # Eight rows of tiles together, as _grouped_matmul_place has them.
    first = tile // (8 * tiles_n) * 8
    height = gl.minimum(gl.cdiv(rows, BLOCK_M) - first, 8)
    within = tile % (8 * tiles_n)
    off_m = (first + within % height) * BLOCK_M
    return group, within // height, off_m, start, rows


@gluon.jit
def _grouped_matmul_fp8_produce(source, both, GROUPS: gl.constexpr):
    x_desc, weight_desc = source
    where, tiles, ring = both
    x, weight, full, empty = ring
    STAGES: gl.constexpr = weight.shape[0]
    ROWS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = weight_desc.block_shape[1]
    BLOCK_K: gl.constexpr = weight_desc.block_shape[2]
    nbytes: gl.constexpr = x_desc.block_type.nbytes
    n = 0  # steps of all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, pid_n, off_m, start, _ = _grouped_matmul_fp8_find(
            tile, where, GROUPS * ROWS
        )
        for k in range(0, x_desc.shape[1], BLOCK_K):
            stage = n % STAGES
            # All consumers have arrived for step n - STAGES. A new barrier
            # counts the phase before its first one as ended.
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            # The one arrival at full. The phase ends with the last byte.
            bar = full.index(stage)
            mbarrier.expect(
                bar, GROUPS * nbytes + weight_desc.block_type.nbytes
            )
            for i in gl.static_range(GROUPS):
                rows = x.index(GROUPS * stage + i)
                place = [start + off_m + i * ROWS, k]
                _grouped_matmul_load(x_desc, place, bar, rows)
            place = [group, pid_n * BLOCK_N, k]
            _grouped_matmul_load(weight_desc, place, bar, weight.index(stage))
            n += 1


@gluon.jit
def _grouped_matmul_fp8_consume(
    NUMBER: gl.constexpr,  # of this group of warps
    given,
    both,
    GROUPS: gl.constexpr,
):
    where, tiles, ring = both
    y_desc, out, K, scale_x_ptr, scale_weight_ptr, strides = given
    x, weight, full, empty = ring
    stride_xr, stride_xk, stride_we, stride_wn, stride_wk = strides
    STAGES: gl.constexpr = weight.shape[0]
    ROWS: gl.constexpr = y_desc.block_shape[2]
    BLOCK_N: gl.constexpr = y_desc.block_shape[3]
    BLOCK_K: gl.constexpr = weight.shape[3]
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 32]
    )
    n = 0  # steps of all tiles, as the producer counts them
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, pid_n, off_m, start, rows = _grouped_matmul_fp8_find(
            tile, where, GROUPS * ROWS
        )
        off_m += NUMBER * ROWS
        offs_m = off_m + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
        mask = offs_m < rows  # (ROWS,)
        of_rows = scale_x_ptr + (start + offs_m).to(gl.int64) * stride_xr
        # A tile is within one square of columns, and as wide.
        of_square = scale_weight_ptr + group.to(gl.int64) * stride_we
        of_square += pid_n.to(gl.int64) * stride_wn
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, sums)
        part = gl.zeros((ROWS, BLOCK_N), gl.float32, sums)
        scale = gl.load(of_rows, mask=mask, other=0.0) * gl.load(of_square)
        for k in range(0, K, BLOCK_K):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), n // STAGES & 1)
            part = warpgroup_mma(
                x.index(GROUPS * stage + NUMBER),
                weight.index(stage).reshape([BLOCK_N, BLOCK_K]).permute([1, 0]),
                part,
                use_acc=False,
                is_async=True,
            )
            # The scales of the next step come while this one multiplies.
            coming = gl.minimum(k + BLOCK_K, K - BLOCK_K) // BLOCK_K
            later = gl.load(
                of_rows + coming * stride_xk, mask=mask, other=0.0
            ) * gl.load(of_square + coming * stride_wk)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage))
            # Meanwhile the tensor cores multiply for the other groups.
            acc += part * scale[:, None]
            scale = later
            n += 1
        tma.store_wait(0)  # the store of the last tile has read the buffer
        piece = out.index(NUMBER)
        piece.reshape([ROWS, BLOCK_N]).store(acc.to(y_desc.dtype))
        fence_async_shared()  # what threads wrote, the engine reads
        # The place that _grouped_matmul_ragged gives
        MOST: gl.constexpr = GROUPED_MATMUL_ROWS
        place = [MOST, start + rows, off_m - rows + MOST, pid_n * BLOCK_N]
        _grouped_matmul_store(y_desc, place, piece)
    tma.store_wait(0)  # the shared memory is another program's soon


@gluon.jit
def _grouped_matmul_fp8_zeros(y_ptr, offsets_ptr, E, R, N, BLOCK: gl.constexpr):
    """Do what _grouped_matmul_zeros does."""
    last = gl.minimum(gl.load(offsets_ptr + E - 1), R).to(gl.int64)
    size = (R - last) * N
    every: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    first = gl.program_id(0).to(gl.int64) * BLOCK
    for begin in range(first, size, gl.num_programs(0) * BLOCK):
        offs = begin + gl.arange(0, BLOCK, every)
        zeros = gl.zeros((BLOCK,), y_ptr.dtype.element_ty, every)
        gl.store(y_ptr + (last * N + offs), zeros, mask=offs < size)


@gluon.jit
def _grouped_matmul_fp8_hopper_kernel(
    x_desc,
    weight_desc,  # of the transposes
    y_desc,  # ragged
    y_ptr,
    scale_x_ptr,
    scale_weight_ptr,
    offsets_ptr,
    E,
    stride_yr,
    stride_xr,  # of the scales
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    BLOCK_E: gl.constexpr,
    ZEROS: gl.constexpr,
    GROUPS: gl.constexpr,  # of four warps that multiply
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that multiplies
):
    R, K = x_desc.shape
    x_shape: gl.constexpr = [GROUPS * STAGES] + x_desc.block_shape
    weight_shape: gl.constexpr = [STAGES] + weight_desc.block_shape
    out_shape: gl.constexpr = [GROUPS] + y_desc.block_shape
    x = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    weight = gl.allocate_shared_memory(
        weight_desc.dtype, weight_shape, weight_desc.layout
    )
    out = gl.allocate_shared_memory(y_desc.dtype, out_shape, y_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)  # the producer's expect
        mbarrier.init(empty.index(stage), count=GROUPS)  # one of each consumer
    tiles_n = gl.cdiv(y_desc.shape[3], y_desc.block_shape[3])
    BLOCK_M: gl.constexpr = GROUPS * y_desc.block_shape[2]
    before, tiles = _grouped_matmul_fp8_before(
        offsets_ptr, E, R, tiles_n, BLOCK_M, BLOCK_E
    )
    # In registers, it would take some that the sums need.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    table = gl.allocate_shared_memory(gl.int32, [BLOCK_E], flat)
    table.store(before)
    _grouped_matmul_fp8_zeros(y_ptr, offsets_ptr, E, R, stride_yr, ZEROS)
    where, ring = (table, offsets_ptr, R, tiles_n), (x, weight, full, empty)
    strides = stride_xr, stride_xk, stride_we, stride_wn, stride_wk
    given = y_desc, out, K, scale_x_ptr, scale_weight_ptr, strides
    source = x_desc, weight_desc
    both = where, tiles, ring
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_grouped_matmul_fp8_consume, (0, given, both, GROUPS)),
                (_grouped_matmul_fp8_consume, (1, given, both, GROUPS)),
                (_grouped_matmul_fp8_produce, (source, both, GROUPS)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [REGISTERS, 24],  # and registers of their threads
        )
    else:
        gl.warp_specialize(
            [
                (_grouped_matmul_fp8_consume, (0, given, both, GROUPS)),
                (_grouped_matmul_fp8_consume, (1, given, both, GROUPS)),
                (_grouped_matmul_fp8_consume, (2, given, both, GROUPS)),
                (_grouped_matmul_fp8_produce, (source, both, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


@cache
def _grouped_matmul_gpu(device):
    """Return multiprocessors, their shared memory, and which engine there is.

    The copy engine is that of NVIDIA's GPUs, by compute capability: 90, 100
    or 120; 0 is none.
    """
    if device.type == "cpu":  # interpreted: few programs, with many tiles each
        return 4, 227 * 1024, 90
    driver = triton.runtime.driver.active
    with torch.accelerator.device_index(device.index):
        target = driver.get_current_target()
    gpu = driver.utils.get_device_properties(device.index)
    engine = target.backend == "cuda" and target.arch >= 90
    engine = target.arch if engine else 0
    return gpu["multiprocessor_count"], gpu["max_shared_mem"], engine


def _grouped_matmul_stages(tile, itemsize, shared, sums, engine):
    """Return how many stages a tile has, as far as shared memory has room."""
    BLOCK_M, BLOCK_N, BLOCK_K, _, most = tile
    # What the engine stores: half of the tile, or each half in its own place,
    # as the compiler has it in sums from Blackwell on
    stored = BLOCK_M * BLOCK_N * itemsize if engine else 0
    stored = stored if sums and engine >= 100 else stored // 2
    stage = (BLOCK_M + BLOCK_N) * BLOCK_K * itemsize
    return min(most, (shared - stored - 2048) // stage)  # barriers take less


def _grouped_matmul_number(groups, M, N, sums, tile):
    """Return how many tiles there are, or about how many."""
    columns = triton.cdiv(N, tile[1])
    if sums:
        return groups * triton.cdiv(M, tile[0]) * columns
    # How long groups are is not known here. On average, the last tile of a
    # group is half full.
    some = min(groups, M)
    return max(some, M / tile[0] + (some - 1) / 2) * columns


@lru_cache(4096)
def _grouped_matmul_plan(groups, M, N, sums, itemsize, gpu, vector, engine):
    """Return the number of programs, their tile and its stages.

    There are M rows of all groups, or of each one where rows are summed up.
    ``vector`` is whether loads through pointers have several elements each.
    """
    multiprocessors, shared, _ = gpu
    tiles = GROUPED_MATMUL_POINTERS if vector else GROUPED_MATMUL_ODD
    tiles = GROUPED_MATMUL_ENGINE if engine else tiles
    tiles = tiles if itemsize == 2 else GROUPED_MATMUL_WIDE
    stages = {
        t: _grouped_matmul_stages(t, itemsize, shared, sums, engine)
        for t in tiles
    }
    tiles = [t for t in tiles if stages[t] >= (3 if engine else 2)]

    def cost(tile):
        number = _grouped_matmul_number(groups, M, N, sums, tile)
        rounds = max(1, number / multiprocessors)
        rounds = math.ceil(rounds) if sums else rounds
        edges = GROUPED_MATMUL_EDGE * (tile[0] + tile[1])
        return rounds * (tile[0] * tile[1] + edges)

    tile = min(tiles, key=cost)
    most = groups * triton.cdiv(M, tile[0]) if sums else M // tile[0] + groups
    used = (tile[0] + tile[1]) * tile[2] * itemsize * stages[tile] + 2048
    held = 1 if engine else min(GROUPED_MATMUL_HELD, shared // used)
    programs = min(held * multiprocessors, most * triton.cdiv(N, tile[1]))
    return programs, tile, stages[tile]


@lru_cache(4096)
def _grouped_matmul_fp8_plan(groups, R, N, itemsize, gpu, blocks, hopper):
    """Return the number of programs, their tile and its stages.

    And whether the kernel in Gluon takes them, which is for blocks on Hopper.
    """
    multiprocessors, shared, engine = gpu

    def stages(tile):
        BLOCK_M, BLOCK_N, BLOCK_K, _, most = tile
        # Halves, stored one after another, take more room on Blackwell.
        whole = blocks or engine >= 100
        stored = BLOCK_M * BLOCK_N * itemsize // (1 if whole else 2)
        table = 4 * triton.next_power_of_2(groups) if tile in special else 0
        free = shared - stored - table - 2048
        return min(most, free // ((BLOCK_M + BLOCK_N) * BLOCK_K))

    def cost(tile):
        number = _grouped_matmul_number(groups, R, N, False, tile)
        rounds, edges = max(1, number / multiprocessors), tile[0] + tile[1]
        if special:  # on an H200, a step takes time by its edges
            return rounds * (edges + GROUPED_MATMUL_FP8_STEP)
        return rounds * (tile[0] * tile[1] + GROUPED_MATMUL_EDGE * edges)

    tiles = GROUPED_MATMUL_FP8_BLOCKS if blocks else GROUPED_MATMUL_FP8_ENGINE
    special = GROUPED_MATMUL_FP8_HOPPER if blocks and hopper else []
    tile = min((t for t in special or tiles if stages(t) >= 3), key=cost)
    most = (R // tile[0] + groups) * triton.cdiv(N, tile[1])
    programs = min(multiprocessors, most)
    return programs, tile, stages(tile), tile in special


def _grouped_matmul_check(x, weight, offsets, bias=None):
    """Raise for what the op does not take, as far as no address tells."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    kinds = {t.dtype for t in tensors}
    if len(kinds) > 1 or x.dtype not in GROUPED_MATMUL_ACC:
        raise TypeError(
            "grouped_matmul takes float tensors of one dtype, not "
            f"{', '.join(str(t.dtype) for t in tensors)}"
        )
    if offsets.dtype != torch.int32:
        raise TypeError(
            f"grouped_matmul takes offsets of int32, not {offsets.dtype}"
        )
    if len({t.device for t in (*tensors, offsets)}) > 1:
        raise ValueError(
            "grouped_matmul takes tensors on one device, not on "
            f"{', '.join(str(t.device) for t in (*tensors, offsets))}"
        )
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "grouped_matmul takes x (R, K) and weight (E, K, N), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    groups, _, columns = weight.shape
    if offsets.shape != (groups,):
        raise ValueError(
            f"grouped_matmul takes offsets of shape ({groups},), one for each "
            f"group, not {tuple(offsets.shape)}"
        )
    if bias is not None and bias.shape != (groups, columns):
        raise ValueError(
            f"grouped_matmul takes a bias of shape ({groups}, {columns}), not "
            f"{tuple(bias.shape)}"
        )


def _grouped_matmul_sums_check(x, grad, offsets):
    """Raise for what grouped_matmul_weight_gradient does not take."""
    name = "grouped_matmul_weight_gradient"
    if x.dtype != grad.dtype or x.dtype not in GROUPED_MATMUL_ACC:
        raise TypeError(
            f"{name} takes float tensors of one dtype, not {x.dtype} and "
            f"{grad.dtype}"
        )
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name} takes offsets of int32, not {offsets.dtype}")
    if len({x.device, grad.device, offsets.device}) > 1:
        raise ValueError(
            f"{name} takes tensors on one device, not on {x.device}, "
            f"{grad.device} and {offsets.device}"
        )
    if x.ndim != 2 or grad.ndim != 2 or x.shape[0] != grad.shape[0]:
        raise ValueError(
            f"{name} takes x (R, K) and grad (R, N), not "
            f"{tuple(x.shape)} and {tuple(grad.shape)}"
        )
    if offsets.ndim != 1:
        raise ValueError(
            f"{name} takes offsets of one dimension, not {tuple(offsets.shape)}"
        )


def _grouped_matmul_fp8_check(
    x, weight, offsets, scale_x, scale_weight, out_dtype
):
    """Raise for what grouped_matmul_fp8 does not take."""
    name = "grouped_matmul_fp8"
    if not {x.dtype, weight.dtype} <= {*GROUPED_MATMUL_FP8_INPUTS}:
        raise TypeError(
            f"{name} takes float8_e4m3fn and float8_e5m2, not {x.dtype} and "
            f"{weight.dtype}"
        )
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name} takes offsets of int32, not {offsets.dtype}")
    if {scale_x.dtype, scale_weight.dtype} != {torch.float32}:
        raise TypeError(
            f"{name} takes scales of float32, not {scale_x.dtype} and "
            f"{scale_weight.dtype}"
        )
    if out_dtype not in GROUPED_MATMUL_FP8_OUTPUTS:
        raise TypeError(
            f"{name} returns bfloat16, float16 or float32, not {out_dtype}"
        )
    tensors = x, weight, offsets, scale_x, scale_weight
    if len({t.device for t in tensors}) > 1:
        raise ValueError(
            f"{name} takes tensors on one device, not on "
            f"{', '.join(str(t.device) for t in tensors)}"
        )
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"{name} takes x (R, K) and weight (E, N, K), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    (R, K), (E, N, _) = x.shape, weight.shape
    if offsets.shape != (E,):
        raise ValueError(
            f"{name} takes offsets of shape ({E},), one for each group, not "
            f"{tuple(offsets.shape)}"
        )
    blocks = scale_weight.ndim == 3
    unit = GROUPED_MATMUL_FP8_SQUARE if blocks else 16
    if K % unit:
        raise ValueError(
            f"{name} takes K that is a multiple of {unit}"
            f"{' with scales of blocks' if blocks else ''}, not {K}"
        )
    if GROUPED_MATMUL_ROWS.value <= R:
        raise ValueError(f"{name} takes fewer than 2**30 rows, not {R}")
    of_x, of_weight = [(), (1,), (R,), (R, 1)], [(E,), (E, N)]
    if blocks:
        of_x, of_weight = [(R, K // unit)], [(E, -(-N // unit), K // unit)]
    given = tuple(scale_x.shape), tuple(scale_weight.shape)
    if given[0] not in of_x or given[1] not in of_weight:
        raise ValueError(
            f"{name} takes scale_x of shape {' or '.join(map(str, of_x))} with "
            f"scale_weight of shape {' or '.join(map(str, of_weight))}, not "
            f"{given[0]} and {given[1]}"
        )


def _grouped_matmul_vec(x):
    """Return the elements in 16 bytes, if all rows begin at multiples of 16."""
    unit, length = 16 // x.element_size(), x.shape[-1]
    even = all(n % unit == 0 for n in (length, *x.stride()[:-1]))
    # Rows that overlap, as those of an expanded tensor, the engine cannot take.
    apart = all(stride >= length > 0 for stride in x.stride()[:-1])
    begins = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return unit if even and apart and begins else 1


def _grouped_matmul_side(x):
    """Return x, or a copy whose rows begin at multiples of 16 bytes."""
    if _grouped_matmul_vec(x) == 1 and x.shape[1] * x.element_size() % 16 == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _grouped_matmul_fp8_side(x):
    """Return x, or a copy that the engine takes: K is a multiple of 16."""
    if _grouped_matmul_vec(x) == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _grouped_matmul_fp8_stored(x, N, out_dtype):
    """Return a new matrix whose rows begin at multiples of 16 bytes."""
    unit = 16 // out_dtype.itemsize
    # The engine stores 16 bytes at a time, so the last row has its padding too.
    columns = -(-N // unit) * unit
    return x.new_empty(x.shape[0], columns, dtype=out_dtype)[:, :N]


def _grouped_matmul_fits(x, *vecs):
    """Whether the engine takes matrices, of which x has the rows."""
    few = x.shape[0] < GROUPED_MATMUL_ROWS.value
    return few and x.element_size() == 2 and min(vecs) > 1


def _grouped_matmul_fp8_is_hopper(device, gpu):
    """Whether a GPU has the instructions of the kernel in Gluon."""
    return device.type == "cuda" and gpu[2] == 90


def _grouped_matmul_fp8_describe(descriptor):
    """Return what Gluon takes for a descriptor."""
    base, block = descriptor.base, descriptor.block_shape
    layout = gl.NVMMASharedLayout.get_default_for(
        block, GROUPED_MATMUL_FP8_DTYPES[base.dtype]
    )
    return GluonDescriptor(
        base, descriptor.shape, descriptor.strides, block, layout
    )


def _grouped_matmul_descriptor(x, block):
    """Return a descriptor of x whose rows may end after any row.

    The engine compares places with lengths, and adds up addresses modulo 2**64.
    So (2**30, end, row - 2**30) is the place of row end + row, as the first two
    strides and lengths are made up: 2**30 * 2**34 elements come to nothing. The
    length 2**30 bounds the rows, and end says which row it is that it bounds.
    Triton's triton/tools/ragged_tma.py has the idea.
    """
    most, (stride, step) = GROUPED_MATMUL_ROWS.value, x.stride()
    shape = [2**31 - 2**16, 2**31 - 2**16, most, x.shape[1]]
    strides = [2**34 - stride, stride, stride, step]
    return TensorDescriptor(x, shape, strides, [1, 1, *block])


def _grouped_matmul_begin(device):
    """Let this thread make descriptors, for which it needs CUDA's context."""
    # Autograd has threads of its own. The first work of one may be ours.
    if device.type == "cuda" and not hasattr(GROUPED_MATMUL_THREAD, "begun"):
        GROUPED_MATMUL_THREAD.begun = torch.zeros(1, device=device)


def _grouped_matmul_launch(x, weight, offsets, bias=None):
    _grouped_matmul_check(x, weight, offsets, bias)
    (R, K), (E, _, N) = x.shape, weight.shape
    y = x.new_empty(R, N)
    if y.numel() == 0 or E == 0:
        return y.zero_()
    gpu, size = _grouped_matmul_gpu(x.device), x.element_size()
    x = _grouped_matmul_side(x)
    vec_x, vec_y = _grouped_matmul_vec(x), _grouped_matmul_vec(y)
    vec_w, W_T = _grouped_matmul_vec(weight), False
    if vec_w == 1:
        vec_w, W_T = _grouped_matmul_vec(weight.mT), True
    engine = gpu[2] if _grouped_matmul_fits(x, vec_x, vec_w, vec_y) else 0
    sizes = E, R, N, False, size
    vector = min(vec_x, vec_w) > 1
    plan = _grouped_matmul_plan(*sizes, gpu, vector, engine)
    programs, (m, n, k, num_warps, _), num_stages = plan
    offsets = offsets.contiguous()
    bias = None if bias is None else bias.contiguous()
    options = {
        "W_T": W_T,
        "BLOCK_E": triton.next_power_of_2(E),
        "ZEROS": GROUPED_MATMUL_ZEROS,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if engine:
            _grouped_matmul_begin(x.device)
            side, block = (weight.mT, [1, n, k]) if W_T else (weight, [1, k, n])
            _grouped_matmul_engine_kernel[(programs,)](
                TensorDescriptor.from_tensor(x, [m, k]),
                TensorDescriptor.from_tensor(side, block),
                _grouped_matmul_descriptor(y, [m, n // 2]),
                y,
                bias,
                offsets,
                E,
                **options,
            )
        else:
            _grouped_matmul_pointers_kernel[(programs,)](
                *(x, weight, y, bias, offsets, E, R, K, N),
                *x.stride(),
                *weight.stride(),
                ACC=GROUPED_MATMUL_ACC[x.dtype],
                VEC_X=vec_x,
                VEC_W=vec_w,
                VEC_Y=vec_y,
                BLOCK_M=m,
                BLOCK_N=n,
                BLOCK_K=k,
                **options,
            )
    return y


def _grouped_matmul_sums_launch(x, grad, offsets):
    _grouped_matmul_sums_check(x, grad, offsets)
    (R, K), N, E = x.shape, grad.shape[1], offsets.shape[0]
    out = x.new_empty(E, K, N)
    if out.numel() == 0 or R == 0:
        return out.zero_()
    gpu, size = _grouped_matmul_gpu(x.device), x.element_size()
    x, grad = _grouped_matmul_side(x), _grouped_matmul_side(grad)
    vecs = [_grouped_matmul_vec(t) for t in (x, grad, out)]
    engine = gpu[2] if _grouped_matmul_fits(x, *vecs) else 0
    # x may be a column of ones, which is one number in memory.
    sizes = E, K, N, True, size
    plan = _grouped_matmul_plan(*sizes, gpu, vecs[1] > 1, engine)
    programs, (m, n, k, num_warps, _), num_stages = plan
    offsets = offsets.contiguous()
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with torch.accelerator.device_index(x.device.index):
        if engine:
            _grouped_matmul_begin(x.device)
            _grouped_matmul_engine_sums_kernel[(programs,)](
                _grouped_matmul_descriptor(x, [k, m]),
                _grouped_matmul_descriptor(grad, [k, n]),
                TensorDescriptor.from_tensor(out, [1, m, n // 2]),
                *(offsets, E, R),
                BLOCK_E=triton.next_power_of_2(E),
                **options,
            )
        else:
            _grouped_matmul_pointers_sums_kernel[(programs,)](
                *(x, grad, out, offsets, E, R, K, N),
                *x.stride(),
                *grad.stride(),
                ACC=GROUPED_MATMUL_ACC[x.dtype],
                VEC_X=vecs[0],
                VEC_Y=vecs[1],
                VEC_OUT=vecs[2],
                BLOCK_M=m,
                BLOCK_N=n,
                BLOCK_K=k,
                **options,
            )
    return out


def _grouped_matmul_fp8_launch(
    x, weight, offsets, scale_x, scale_weight, out_dtype=torch.bfloat16
):
    _grouped_matmul_fp8_check(
        x, weight, offsets, scale_x, scale_weight, out_dtype
    )
    gpu = _grouped_matmul_gpu(x.device)
    if not gpu[2]:
        raise RuntimeError(
            "grouped_matmul_fp8 takes tensors on NVIDIA GPUs of compute "
            "capability 9.0 or more, which multiply float8 and have a copy "
            f"engine, and {x.device} is none"
        )
    (R, K), (E, N, _) = x.shape, weight.shape
    y = _grouped_matmul_fp8_stored(x, N, out_dtype)
    if R * K * E * N == 0:
        return y.zero_()
    x, weight = map(_grouped_matmul_fp8_side, (x, weight))
    blocks = scale_weight.ndim == 3
    hopper = _grouped_matmul_fp8_is_hopper(x.device, gpu)
    plan = E, R, N, out_dtype.itemsize, gpu, blocks, hopper
    plan = _grouped_matmul_fp8_plan(*plan)
    programs, (m, n, k, count, _), num_stages, specialized = plan
    rows = m // count if specialized else m
    options = {"ZEROS": GROUPED_MATMUL_ZEROS}
    waiting = {"num_warps": count, "num_stages": num_stages}
    waiting["BLOCK_E"] = triton.next_power_of_2(E)
    offsets = offsets.contiguous()
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        _grouped_matmul_begin(x.device)
        matrices = (
            TensorDescriptor.from_tensor(x, [rows, k]),
            TensorDescriptor.from_tensor(weight, [1, n, k]),
            _grouped_matmul_descriptor(y, [rows, n if blocks else n // 2]),
        )
        if specialized:
            matrices = map(_grouped_matmul_fp8_describe, matrices)
        if blocks:
            given = (
                *(*matrices, y, scale_x, scale_weight, offsets, E, y.stride(0)),
                *scale_x.stride(),
                *scale_weight.stride(),
            )
        if specialized:
            most, own = GROUPED_MATMUL_FP8_REGISTERS[count]
            _grouped_matmul_fp8_hopper_kernel[(programs,)](
                *given,
                BLOCK_E=max(32, triton.next_power_of_2(E)),
                GROUPS=count,
                STAGES=num_stages,
                REGISTERS=own,
                num_warps=4,  # of the first group
                maxnreg=most,
                **options,
            )
        elif blocks:
            _grouped_matmul_fp8_blocks_kernel[(programs,)](
                *given, **options, **waiting
            )
        else:
            scales = scale_x.contiguous(), scale_weight.contiguous()
            _grouped_matmul_fp8_kernel[(programs,)](
                *(*matrices, y, *scales, offsets, E, y.stride(0)),
                PER_ROW=scale_x.numel() > 1,
                PER_COLUMN=scale_weight.ndim == 2,
                **options,
                **waiting,
            )
    return y


@custom_op(f"{GROUPED_MATMUL_NAMESPACE}::grouped_matmul", mutates_args=())
def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of each group of rows with a matrix of its own.

    Takes x (R, K), weight (E, K, N) and offsets (E,) of int32, which say where
    groups end: group e has the rows from ``offsets[e - 1]``, or 0, to
    ``offsets[e]``, as ``offs`` of ``torch.nn.functional.grouped_mm``, and any
    number of them, also none. Row r of group e becomes
    ``x[r] @ weight[e] + bias[e]``, where bias is (E, N) or None. The rows past
    the last group become zeros, and their gradients are zeros; ``grouped_mm``
    leaves such rows as they are in memory. Offsets do not fall, which is not
    checked: no call waits for the GPU. One past R counts as R.

    Takes float16, bfloat16, float32 and float64, all of one dtype, which the
    result (R, N) has; it is contiguous. x and weight may lie in memory in any
    way: ``linear.mT`` of a weight (E, N, K) costs nothing. The copy engine of
    NVIDIA's GPUs of compute capability 9.0 and more takes 16-bit floats if N
    and K are multiples of 8, and rows or columns of the weight begin at
    multiples of 16 bytes; an x without such rows is copied. Everything else
    goes through pointers, on any GPU.

    Deterministic on one kind of GPU. Raises TypeError for other dtypes and
    ValueError for other shapes and tensors on two devices. Without a GPU, it
    needs Triton's interpreter, TRITON_INTERPRET=1. Has gradients of x, weight
    and bias, which can be differentiated again.

    Rounding: products are summed in float32, or float64 for float64, where the
    bias is added, and each result is rounded once. Float32 is multiplied in
    full precision, not in TF32.

    Under ``torch.autocast`` it casts x, weight and bias to autocast's dtype.
    """
    return _grouped_matmul_launch(x, weight, offsets, bias)


@grouped_matmul.register_fake
def _grouped_matmul_fake(x, weight, offsets, bias=None):
    _grouped_matmul_check(x, weight, offsets, bias)
    return x.new_empty(x.shape[0], weight.shape[2])


@custom_op(
    f"{GROUPED_MATMUL_NAMESPACE}::grouped_matmul_weight_gradient",
    mutates_args=(),
)
def grouped_matmul_weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the product of x.T and grad for each group of their rows.

    Takes x (R, K) and grad (R, N) of one dtype, and offsets (E,) of int32, as
    ``grouped_matmul`` does. The result (E, K, N) is the gradient of its weight,
    and as ``torch.nn.functional.grouped_mm(x.T, grad, offs=offsets)``: matrix e
    is the sum over the rows of group e, zeros if that has none. Deterministic,
    in one launch. Raises TypeError for other dtypes and ValueError for other
    shapes and tensors on two devices. Has gradients of any order.

    Rounding: products are summed in float32, or float64 for float64, and each
    result is rounded once.

    Under ``torch.autocast`` it casts x and grad to autocast's dtype.
    """
    return _grouped_matmul_sums_launch(x, grad, offsets)


@grouped_matmul_weight_gradient.register_fake
def _grouped_matmul_sums_fake(x, grad, offsets):
    _grouped_matmul_sums_check(x, grad, offsets)
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])


@custom_op(f"{GROUPED_MATMUL_NAMESPACE}::grouped_matmul_fp8", mutates_args=())
def grouped_matmul_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return the product of each group of float8 rows with a matrix of its own.

    As ``grouped_matmul``, for x (R, K) and weight (E, N, K), each float8_e4m3fn
    or float8_e5m2. The weight is the transpose of what ``grouped_matmul``
    takes, as tensor cores want float8 that lies along K. Row r of group e
    becomes ``(x[r] * scale_x[r]) @ (weight[e] * scale_weight[e]).T``. Scales
    are float32, for one of

    * tensors and rows, where K is a multiple of 16: ``scale_x`` is one number,
      (R,) or (R, 1), and ``scale_weight`` is (E,), one for each matrix, or
      (E, N);
    * blocks, as DeepSeek-V3 has them, where K is a multiple of 128: ``scale_x``
      is (R, K / 128), one for each group of 128 along K, and ``scale_weight``
      (E, ceil(N / 128), K / 128), one for each square of 128. They are what
      ``block_scaled_matmul`` takes, and of any strides.

    The result (R, N) is ``out_dtype``: bfloat16, float16 or float32, and is
    contiguous where 16 divides the bytes of a row. Rows past the last group are
    zeros, and offsets are as those of ``grouped_matmul``. An x or a weight
    whose rows do not lie along K, or do not begin at multiples of 16 bytes, is
    copied in each call.

    Deterministic on one kind of GPU; without a gradient. Raises TypeError for
    other dtypes, ValueError for other shapes and tensors on two devices, and
    RuntimeError for GPUs other than NVIDIA's of compute capability 9.0 and
    more. Without a GPU, it needs Triton's interpreter.

    Rounding: the products are exact. On Hopper, tensor cores add float8
    products with fewer bits than float32 has: all of K, or the 128 of a block.
    The sums are scaled, and those of blocks are added, in float32, and each
    result is rounded once.
    """
    return _grouped_matmul_fp8_launch(
        x, weight, offsets, scale_x, scale_weight, out_dtype
    )


@grouped_matmul_fp8.register_fake
def _grouped_matmul_fp8_fake(
    x, weight, offsets, scale_x, scale_weight, out_dtype=torch.bfloat16
):
    _grouped_matmul_fp8_check(
        x, weight, offsets, scale_x, scale_weight, out_dtype
    )
    return _grouped_matmul_fp8_stored(x, weight.shape[1], out_dtype)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
GROUPED_MATMUL_LIBRARY = Library(GROUPED_MATMUL_NAMESPACE, "FRAGMENT")
GROUPED_MATMUL_LIBRARY.impl("grouped_matmul", _grouped_matmul_launch, "CUDA")
GROUPED_MATMUL_LIBRARY.impl(
    "grouped_matmul_weight_gradient", _grouped_matmul_sums_launch, "CUDA"
)
GROUPED_MATMUL_LIBRARY.impl(
    "grouped_matmul_fp8", _grouped_matmul_fp8_launch, "CUDA"
)


def _grouped_matmul_autocast(op, kind, *tensors):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    tensors = (
        t.to(dtype) if t is not None and t.dtype in casts else t
        for t in tensors
    )
    with torch.autocast(kind, enabled=False):
        return op(*tensors)


for _grouped_matmul_op in (grouped_matmul, grouped_matmul_weight_gradient):
    for _grouped_matmul_kind in ("cpu", "cuda"):
        GROUPED_MATMUL_LIBRARY.impl(
            _grouped_matmul_op._name,
            partial(
                _grouped_matmul_autocast,
                _grouped_matmul_op,
                _grouped_matmul_kind,
            ),
            f"Autocast{_grouped_matmul_kind.upper()}",
        )


def _grouped_matmul_setup(ctx, inputs, output):
    x, weight, offsets, _ = inputs
    ctx.save_for_backward(x, weight, offsets)


def _grouped_matmul_gradient(ctx, grad):
    x, weight, offsets = ctx.saved_tensors
    # It may be an expanded number: one copy is for all products.
    grad = grad.contiguous()
    by_x, by_weight, _, *others = ctx.needs_input_grad  # not of defaults
    d_x = d_weight = d_bias = None
    if by_x:
        d_x = grouped_matmul(grad, weight.mT, offsets)
    if by_weight and weight.stride(1) == 1 and weight.stride(2) != 1:
        # It lies in memory as the weight does.
        d_weight = grouped_matmul_weight_gradient(grad, x, offsets).mT
    elif by_weight:
        d_weight = grouped_matmul_weight_gradient(x, grad, offsets)
    if any(others):
        ones = grad.new_ones(1, 1).expand(grad.shape[0], 1)
        d_bias = grouped_matmul_weight_gradient(ones, grad, offsets)[:, 0]
    return d_x, d_weight, None, d_bias


grouped_matmul.register_autograd(
    _grouped_matmul_gradient, setup_context=_grouped_matmul_setup
)


def _grouped_matmul_sums_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_matmul_sums_gradient(ctx, grad_out):
    x, grad, offsets = ctx.saved_tensors
    d_x = d_grad = None
    if ctx.needs_input_grad[0]:
        d_x = grouped_matmul(grad, grad_out.mT, offsets)
    if ctx.needs_input_grad[1]:
        d_grad = grouped_matmul(x, grad_out, offsets)
    return d_x, d_grad, None


grouped_matmul_weight_gradient.register_autograd(
    _grouped_matmul_sums_gradient, setup_context=_grouped_matmul_sums_setup
)
