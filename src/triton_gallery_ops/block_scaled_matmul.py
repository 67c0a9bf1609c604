"""Matrix product of float8 with scales of 1 x 128 groups and 128 x 128 blocks.

What DeepSeek-V3 trains and serves with: ``x`` has a scale for each group of 128
along K, the weight one for each square of 128. Such a scale differs along the
sum, so each product of 128 of K leaves the tensor cores, is scaled, and is
added in float32. For NVIDIA GPUs of compute capability 9.0 or more, whose copy
engine loads tiles. Both matrices lie along K, which is a multiple of 128. There
is one program per multiprocessor. Deterministic, without a gradient.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
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
BLOCK_SCALED_MATMUL_EDGE = 48  # what an edge of a tile costs, beside its area


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


@cache
def _block_scaled_matmul_plan(M, N, itemsize, multiprocessors, shared):
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
        edges = BLOCK_SCALED_MATMUL_EDGE * (tile[0] + tile[1])
        return rounds * (tile[0] * tile[1] + edges)

    tile = min(
        (t for t in BLOCK_SCALED_MATMUL_TILES if stages(t) >= 3), key=cost
    )
    return min(multiprocessors, number(tile)), tile, stages(tile)


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
        plan = M, N, out_dtype.itemsize, multiprocessors, shared
        programs, tile, num_stages = _block_scaled_matmul_plan(*plan)
        m, n, num_warps, _ = tile
        GROUP = BLOCK_SCALED_MATMUL_GROUP
        describe = TensorDescriptor
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            if x.is_cuda and not hasattr(FP8_MATMUL_THREAD, "begun"):
                # No descriptor is made in a thread without CUDA's context.
                FP8_MATMUL_THREAD.begun = torch.zeros(1, device=x.device)
            _block_scaled_matmul_kernel[(programs,)](
                describe(side_x, [M, K], [side_x.stride(0), 1], [m, GROUP]),
                describe(
                    side_weight, [N, K], [side_weight.stride(0), 1], [n, GROUP]
                ),
                describe(stored, [M, N], [stored.stride(0), 1], [m, n]),
                scale_x,
                scale_weight,
                *scale_x.stride(),
                *scale_weight.stride(),
                GROUP=GROUP,
                num_warps=num_warps,
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
