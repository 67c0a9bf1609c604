"""Matrix product of float8 with scales of 1 x 128 groups and 128 x 128 blocks.

What DeepSeek-V3 trains and serves with: ``x`` has a scale for each group of 128
along K, the weight one for each square of 128. Such a scale differs along the
sum, so each product of 128 of K leaves the tensor cores, is scaled, and is
added in float32. For NVIDIA GPUs of compute capability 9.0 or more, whose copy
engine loads tiles. Both matrices lie along K, which is a multiple of 128. There
is one program per multiprocessor. On Hopper (H100, H200) a kernel in Gluon
specializes warps: one loads, and groups of four multiply, so that the tensor
cores work for one group while another scales. Deterministic, without a
gradient.
"""

import math
from functools import cache

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

from triton_gallery_ops.fp8_matmul import (
    FP8_MATMUL_INPUTS,
    FP8_MATMUL_OUTPUTS,
    FP8_MATMUL_THREAD,
    _fp8_matmul_gpu,
    _fp8_matmul_place,
    _fp8_matmul_rows,
    _fp8_matmul_stored,
)

BLOCK_SCALED_MATMUL_NAMESPACE = "triton_gallery"
BLOCK_SCALED_MATMUL_GROUP = 128  # numbers that share a scale, along N and K
# BLOCK_M, BLOCK_N, warps and the most stages; BLOCK_N is within a block
BLOCK_SCALED_MATMUL_TILES = [
    (128, 128, 8, 5),
    (64, 128, 4, 6),
    (64, 64, 4, 6),
    (64, 32, 4, 6),
]
# BLOCK_M, BLOCK_N, groups of four warps that multiply, and the most stages
BLOCK_SCALED_MATMUL_HOPPER = [
    (192, 128, 3, 4),
    (128, 128, 2, 6),
    (64, 128, 1, 8),
    (64, 64, 1, 10),
    (64, 32, 1, 12),
]
# registers of a thread: at the launch, and of those that multiply
BLOCK_SCALED_MATMUL_REGISTERS = {1: (168, 240), 2: (168, 240), 3: (128, 160)}
BLOCK_SCALED_MATMUL_STEP = 80  # what a step costs, beside rows and columns
BLOCK_SCALED_MATMUL_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}
# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
_block_scaled_matmul_load = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)
_block_scaled_matmul_store = (
    getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
)


@triton.jit
def _block_scaled_matmul_kernel(
    x_desc,
    weight_desc,
    out_desc,
    scale_x_ptr,
    scale_weight_ptr,
    stride_xm,  # of the scales
    stride_xk,
    stride_wn,
    stride_wk,
    GROUP: tl.constexpr,
):
    M, N = out_desc.shape
    K = x_desc.shape[1]
    BLOCK_M: tl.constexpr = out_desc.block_shape[0]
    BLOCK_N: tl.constexpr = out_desc.block_shape[1]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, tiles_m * tiles_n, programs, flatten=True):
        pid_m, pid_n = _fp8_matmul_place(tile, tiles_m, tiles_n)
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        offs_m = (off_m + tl.arange(0, BLOCK_M)).to(tl.int64)  # (BLOCK_M,)
        rows = scale_x_ptr + offs_m * stride_xm
        block = scale_weight_ptr + (off_n // GROUP).to(tl.int64) * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, GROUP):
            x = x_desc.load([off_m, k])  # (BLOCK_M, GROUP)
            weight = weight_desc.load([off_n, k]).T  # (GROUP, BLOCK_N)
            scale = tl.load(
                rows + k // GROUP * stride_xk, mask=offs_m < M, other=0.0
            )  # (BLOCK_M,)
            # A tile is within one block of columns, so this is one number.
            scale *= tl.load(block + k // GROUP * stride_wk)
            # Each block has its scale: its sum is scaled, then added.
            acc += tl.dot(x, weight) * scale[:, None]
        out_desc.store([off_m, off_n], acc.to(out_desc.dtype))


@gluon.jit
def _block_scaled_matmul_place(tile, M, N, BLOCK_M, BLOCK_N):
    """Return where a tile begins: column by column, in groups of rows."""
    # Eight rows of tiles together: what is read again is still in L2.
    tiles_n = gl.cdiv(N, BLOCK_N)
    first = tile // (8 * tiles_n) * 8
    rows = gl.minimum(gl.cdiv(M, BLOCK_M) - first, 8)
    within = tile % (8 * tiles_n)
    # Rows and columns fit int32, whatever their product is.
    return (first + within % rows) * BLOCK_M, within // rows * BLOCK_N


@gluon.jit
def _block_scaled_matmul_produce(source, sizes, ring, GROUPS: gl.constexpr):
    x_desc, weight_desc = source
    tiles, M, N, K = sizes
    x, weight, full, empty = ring
    STAGES: gl.constexpr = weight.shape[0]
    ROWS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_N: gl.constexpr = weight_desc.block_shape[0]
    BLOCK_K: gl.constexpr = weight_desc.block_shape[1]
    nbytes: gl.constexpr = x_desc.block_type.nbytes
    n = 0  # steps of all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        off_m, off_n = _block_scaled_matmul_place(
            tile, M, N, GROUPS * ROWS, BLOCK_N
        )
        for k in range(0, K, BLOCK_K):
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
                place = [off_m + i * ROWS, k]
                _block_scaled_matmul_load(x_desc, place, bar, rows)
            _block_scaled_matmul_load(
                weight_desc, [off_n, k], bar, weight.index(stage)
            )
            n += 1


@gluon.jit
def _block_scaled_matmul_scales(step, steps, rows, block, strides, mask):
    """Load the scales of a step: of rows (ROWS,), and of the one block."""
    stride_xk, stride_wk = strides
    step = gl.minimum(step, steps - 1)
    of_rows = gl.load(rows + step * stride_xk, mask=mask, other=0.0)
    return of_rows, gl.load(block + step * stride_wk)


@gluon.jit
def _block_scaled_matmul_step(
    NUMBER: gl.constexpr, n, acc, part, scale, ring, GROUPS: gl.constexpr
):
    x, weight, full, empty = ring
    STAGES: gl.constexpr = weight.shape[0]
    stage = n % STAGES
    mbarrier.wait(full.index(stage), n // STAGES & 1)
    part = warpgroup_mma(
        x.index(GROUPS * stage + NUMBER),
        weight.index(stage).permute([1, 0]),
        part,
        use_acc=False,
        is_async=True,
    )
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(empty.index(stage))
    # Meanwhile the tensor cores multiply for the other groups.
    return acc + part * scale[:, None], part


@gluon.jit
def _block_scaled_matmul_consume(
    NUMBER: gl.constexpr,  # of this group of warps
    given,
    GROUPS: gl.constexpr,
):
    out_desc, out, sizes, ring, scales = given
    tiles, M, N, K = sizes
    scale_x_ptr, scale_weight_ptr, all_strides = scales
    stride_xm, stride_xk, stride_wn, stride_wk = all_strides
    ROWS: gl.constexpr = out_desc.block_shape[0]
    BLOCK_N: gl.constexpr = out_desc.block_shape[1]
    BLOCK_K: gl.constexpr = ring[1].shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 32]
    )
    steps, strides = K // BLOCK_K, (stride_xk, stride_wk)
    n = 0  # steps of all tiles, as the producer counts them
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        off_m, off_n = _block_scaled_matmul_place(
            tile, M, N, GROUPS * ROWS, BLOCK_N
        )
        off_m += NUMBER * ROWS
        offs_m = off_m + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
        mask = offs_m < M  # (ROWS,)
        rows = scale_x_ptr + offs_m.to(gl.int64) * stride_xm
        # A tile is within one block of columns.
        block = scale_weight_ptr + (off_n // BLOCK_K).to(gl.int64) * stride_wn
        where = steps, rows, block, strides, mask
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, sums)
        part = gl.zeros((ROWS, BLOCK_N), gl.float32, sums)
        x0, w0 = _block_scaled_matmul_scales(0, *where)
        x1, w1 = _block_scaled_matmul_scales(1, *where)
        for step in range(0, steps, 2):
            # A load takes longer than a step: it is for two steps later.
            x2, w2 = _block_scaled_matmul_scales(step + 2, *where)
            x3, w3 = _block_scaled_matmul_scales(step + 3, *where)
            acc, part = _block_scaled_matmul_step(
                NUMBER, n, acc, part, x0 * w0, ring, GROUPS
            )
            n += 1
            if step + 1 < steps:
                acc, part = _block_scaled_matmul_step(
                    NUMBER, n, acc, part, x1 * w1, ring, GROUPS
                )
                n += 1
            x0, w0, x1, w1 = x2, w2, x3, w3
        tma.store_wait(0)  # the store of the last tile has read the buffer
        piece = out.index(NUMBER)
        piece.store(acc.to(out_desc.dtype))
        fence_async_shared()  # what threads wrote, the engine reads
        _block_scaled_matmul_store(out_desc, [off_m, off_n], piece)
    tma.store_wait(0)  # the shared memory is another program's soon


@gluon.jit
def _block_scaled_matmul_hopper_kernel(
    x_desc,
    weight_desc,
    out_desc,
    scale_x_ptr,
    scale_weight_ptr,
    stride_xm,  # of the scales
    stride_xk,
    stride_wn,
    stride_wk,
    GROUPS: gl.constexpr,  # of four warps that multiply
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that multiplies
):
    M, N = out_desc.shape
    K = x_desc.shape[1]
    x_shape: gl.constexpr = [GROUPS * STAGES] + x_desc.block_shape
    weight_shape: gl.constexpr = [STAGES] + weight_desc.block_shape
    out_shape: gl.constexpr = [GROUPS] + out_desc.block_shape
    x = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    weight = gl.allocate_shared_memory(
        weight_desc.dtype, weight_shape, weight_desc.layout
    )
    out = gl.allocate_shared_memory(out_desc.dtype, out_shape, out_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)  # the producer's expect
        mbarrier.init(empty.index(stage), count=GROUPS)  # one of each consumer
    tiles_m = gl.cdiv(M, GROUPS * out_desc.block_shape[0])
    tiles = tiles_m * gl.cdiv(N, out_desc.block_shape[1])
    sizes, ring = (tiles, M, N, K), (x, weight, full, empty)
    strides = stride_xm, stride_xk, stride_wn, stride_wk
    scales = scale_x_ptr, scale_weight_ptr, strides
    given, source = (out_desc, out, sizes, ring, scales), (x_desc, weight_desc)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_block_scaled_matmul_consume, (0, given, GROUPS)),
                (_block_scaled_matmul_produce, (source, sizes, ring, GROUPS)),
            ],
            [1],
            [24],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_block_scaled_matmul_consume, (0, given, GROUPS)),
                (_block_scaled_matmul_consume, (1, given, GROUPS)),
                (_block_scaled_matmul_produce, (source, sizes, ring, GROUPS)),
            ],
            [4, 1],  # warps of the second consumer and of the producer
            [REGISTERS, 24],  # and registers of their threads
        )
    else:
        gl.warp_specialize(
            [
                (_block_scaled_matmul_consume, (0, given, GROUPS)),
                (_block_scaled_matmul_consume, (1, given, GROUPS)),
                (_block_scaled_matmul_consume, (2, given, GROUPS)),
                (_block_scaled_matmul_produce, (source, sizes, ring, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


@cache
def _block_scaled_matmul_is_hopper(device):
    """Return whether a GPU has the instructions of the kernel in Gluon."""
    return device.type == "cuda" and torch.cuda.get_device_capability(
        device
    ) == (9, 0)


@cache
def _block_scaled_matmul_plan(
    M, N, itemsize, multiprocessors, shared, is_hopper
):
    """Return the number of programs, their tile and its stages."""

    def stages(tile):
        BLOCK_M, BLOCK_N, _, most = tile
        free = shared - BLOCK_M * BLOCK_N * itemsize - 4096
        stage = (BLOCK_M + BLOCK_N) * BLOCK_SCALED_MATMUL_GROUP
        return min(most, free // stage)

    def number(tile):
        return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])

    def cost(tile):
        rounds = triton.cdiv(number(tile), multiprocessors)
        # On an H200, a step took time by its edges, and not by its area.
        return rounds * (tile[0] + tile[1] + BLOCK_SCALED_MATMUL_STEP)

    tiles = BLOCK_SCALED_MATMUL_TILES
    tiles = BLOCK_SCALED_MATMUL_HOPPER if is_hopper else tiles
    tile = min((t for t in tiles if stages(t) >= 3), key=cost)
    programs = min(multiprocessors, number(tile))
    return programs, tile, stages(tile)


def _block_scaled_matmul_descriptor(matrix, shape, strides, block):
    dtype = BLOCK_SCALED_MATMUL_DTYPES[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return GluonDescriptor(matrix, shape, strides, block, layout)


def _block_scaled_matmul_check(x, weight, scale_x, scale_weight, out_dtype):
    """Raise for what the op does not take; return M, N and K."""
    kinds = {x.dtype, weight.dtype}
    if not kinds <= {*FP8_MATMUL_INPUTS}:
        raise TypeError(
            "block_scaled_matmul takes float8_e4m3fn and float8_e5m2, not "
            f"{x.dtype} and {weight.dtype}"
        )
    if {scale_x.dtype, scale_weight.dtype} != {torch.float32}:
        raise TypeError(
            "block_scaled_matmul takes scales of float32, not "
            f"{scale_x.dtype} and {scale_weight.dtype}"
        )
    if out_dtype not in FP8_MATMUL_OUTPUTS:
        raise TypeError(
            "block_scaled_matmul returns bfloat16, float16 or float32, not "
            f"{out_dtype}"
        )
    devices = {t.device for t in (x, weight, scale_x, scale_weight)}
    if len(devices) > 1:
        raise ValueError(
            "block_scaled_matmul takes tensors on one device, not on "
            f"{', '.join(sorted(map(str, devices)))}"
        )
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "block_scaled_matmul takes x (..., K) and weight (N, K), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    N, K = weight.shape
    if K % BLOCK_SCALED_MATMUL_GROUP:
        raise ValueError(
            "block_scaled_matmul takes K that is a multiple of "
            f"{BLOCK_SCALED_MATMUL_GROUP}, not {K}"
        )
    groups, blocks = (-(-n // BLOCK_SCALED_MATMUL_GROUP) for n in (K, N))
    expected = (*x.shape[:-1], groups), (blocks, groups)
    given = tuple(scale_x.shape), tuple(scale_weight.shape)
    if given != expected:
        raise ValueError(
            f"block_scaled_matmul takes scales of shapes {expected[0]} and "
            f"{expected[1]}, not {given[0]} and {given[1]}"
        )
    return math.prod(x.shape[:-1]), N, K


def _block_scaled_matmul_launch(
    x, weight, scale_x, scale_weight, out_dtype=torch.bfloat16
):
    M, N, K = _block_scaled_matmul_check(
        x, weight, scale_x, scale_weight, out_dtype
    )
    multiprocessors, shared = _fp8_matmul_gpu(x.device)
    stored = _fp8_matmul_stored(x, M, N, out_dtype)
    if M * N * K == 0:
        stored.zero_()
    else:
        side_x = _fp8_matmul_rows(x.reshape(M, K))
        side_weight = _fp8_matmul_rows(weight)
        scale_x = scale_x.reshape(M, -1)
        specialized = _block_scaled_matmul_is_hopper(x.device)
        programs, (m, n, count, _), num_stages = _block_scaled_matmul_plan(
            *(M, N, out_dtype.itemsize, multiprocessors, shared, specialized)
        )
        GROUP = BLOCK_SCALED_MATMUL_GROUP
        rows, describe = m, TensorDescriptor
        if specialized:
            rows, describe = m // count, _block_scaled_matmul_descriptor
        scales = scale_x, scale_weight
        strides = *scale_x.stride(), *scale_weight.stride()
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            if x.is_cuda and not hasattr(FP8_MATMUL_THREAD, "begun"):
                # No descriptor is made in a thread without CUDA's context.
                FP8_MATMUL_THREAD.begun = torch.zeros(1, device=x.device)
            matrices = (
                describe(side_x, [M, K], [side_x.stride(0), 1], [rows, GROUP]),
                describe(
                    side_weight, [N, K], [side_weight.stride(0), 1], [n, GROUP]
                ),
                describe(stored, [M, N], [stored.stride(0), 1], [rows, n]),
            )
            if specialized:
                most, own = BLOCK_SCALED_MATMUL_REGISTERS[count]
                _block_scaled_matmul_hopper_kernel[(programs,)](
                    *matrices,
                    *scales,
                    *strides,
                    GROUPS=count,
                    STAGES=num_stages,
                    REGISTERS=own,
                    num_warps=4,  # of the first group
                    maxnreg=most,
                )
            else:
                _block_scaled_matmul_kernel[(programs,)](
                    *matrices,
                    *scales,
                    *strides,
                    GROUP=GROUP,
                    num_warps=count,
                    num_stages=num_stages,
                )
    return stored.reshape(*x.shape[:-1], N)


@custom_op(
    f"{BLOCK_SCALED_MATMUL_NAMESPACE}::block_scaled_matmul", mutates_args=()
)
def block_scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return the product of x and weight.T, each times its scales.

    Takes x (..., K) and weight (N, K), each float8_e4m3fn or float8_e5m2, K a
    multiple of 128, and scales of float32, of any strides: ``scale_x``
    (..., K / 128), one for each group of 128 along K, and ``scale_weight``
    (ceil(N / 128), K / 128), one for each square of 128. They are what
    ``quantize`` returns for block sizes (1, 128) and (128, 128). The result
    (..., N) is ``out_dtype``: bfloat16, float16 or float32, and is contiguous
    where 16 divides the bytes of a row. A matrix whose rows are strided, or
    begin at other addresses than multiples of 16, is copied in each call.
    Deterministic on one kind of GPU; without a gradient. Raises TypeError for
    other dtypes, ValueError for other shapes, and RuntimeError for GPUs other
    than NVIDIA's of compute capability 9.0 and more. Without a GPU, it needs
    Triton's interpreter. From https://arxiv.org/abs/2412.19437, section 3.3.

    Rounding: the tensor cores add up 128 products, with fewer bits than float32
    has on Hopper. Each such sum is multiplied by its two scales and added in
    float32, and the result is rounded once.
    """
    return _block_scaled_matmul_launch(
        x, weight, scale_x, scale_weight, out_dtype
    )


@block_scaled_matmul.register_fake
def _block_scaled_matmul_fake(
    x, weight, scale_x, scale_weight, out_dtype=torch.bfloat16
):
    M, N, _ = _block_scaled_matmul_check(
        x, weight, scale_x, scale_weight, out_dtype
    )
    stored = _fp8_matmul_stored(x, M, N, out_dtype)
    return stored.reshape(*x.shape[:-1], N)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
BLOCK_SCALED_MATMUL_LIBRARY = Library(BLOCK_SCALED_MATMUL_NAMESPACE, "FRAGMENT")
BLOCK_SCALED_MATMUL_LIBRARY.impl(
    "block_scaled_matmul", _block_scaled_matmul_launch, "CUDA"
)
