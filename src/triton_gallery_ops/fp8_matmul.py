"""Matrix product of float8, scaled per tensor and per row, through TMA.

Computes ``(x @ weight.T) * scale_x * scale_weight + bias`` for float8 matrices
on NVIDIA GPUs of compute capability 9.0 or more, whose copy engine loads tiles.
Both matrices lie along K, as the tensor cores want float8, and their rows begin
at multiples of 16 bytes: K is a multiple of 16. There is one program per
multiprocessor, and it loads its next tile before it stores the last. The scales
are applied to the result's tile. Deterministic. ``fp8_matmul_linear`` is a
layer for training: it quantizes its input, its weight and the gradient, each
with one scale, and makes all three products in float8.
"""

import math
import threading
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_gallery_ops.quantize import quantize_with_transpose

FP8_MATMUL_NAMESPACE = "triton_gallery"
FP8_MATMUL_THREAD = threading.local()
FP8_MATMUL_INPUTS = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MATMUL_OUTPUTS = torch.bfloat16, torch.float16, torch.float32
# BLOCK_M, BLOCK_N, BLOCK_K, warps and the most stages
FP8_MATMUL_TILES = [
    (128, 256, 128, 8, 4),
    (128, 128, 128, 4, 5),
    (64, 256, 128, 4, 4),
    (64, 128, 128, 4, 6),
    (64, 64, 256, 4, 5),  # half as many steps, where shared memory allows it
    (64, 64, 128, 4, 8),
]
# Sums of 128 products need registers beside the tile's: more rows than columns,
# and 8 warps for 128 x 128, leave them free.
FP8_MATMUL_TILES_PRECISE = [
    (256, 128, 128, 8, 4),
    (128, 256, 128, 8, 4),
    (128, 128, 128, 8, 5),
    *FP8_MATMUL_TILES[2:],
]
FP8_MATMUL_EDGE = 48  # what an edge of a tile costs, beside its area
FP8_MATMUL_PRECISE = 128  # products that the tensor cores add up by themselves
FP8_MATMUL_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _fp8_matmul_place(tile, tiles_m, tiles_n):
    """Return the row and the column of a tile: column by column, in groups."""
    # Eight rows of tiles together: what is read again is still in L2.
    first = tile // (8 * tiles_n) * 8
    rows = tl.minimum(tiles_m - first, 8)
    within = tile % (8 * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def _fp8_matmul_scale(ptr, offs, length, PER_ROW: tl.constexpr):
    """Return the scales of a tile's rows, or the one of all."""
    if PER_ROW:
        scale = tl.load(ptr + offs, mask=offs < length, other=0.0)
    else:
        scale = tl.load(ptr)
    return scale


@triton.jit
def _fp8_matmul_kernel(
    x_desc,
    weight_desc,
    out_desc,
    scale_x_ptr,
    scale_weight_ptr,
    bias_ptr,  # or None
    PER_ROW_X: tl.constexpr,
    PER_ROW_WEIGHT: tl.constexpr,
    IMPRECISE: tl.constexpr,  # what tensor cores add up; None is all
):
    M, N = out_desc.shape
    K = x_desc.shape[1]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    BLOCK_N: tl.constexpr = weight_desc.block_shape[0]
    BLOCK_K: tl.constexpr = x_desc.block_shape[1]
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, tiles_m * tiles_n, programs, flatten=True):
        pid_m, pid_n = _fp8_matmul_place(tile, tiles_m, tiles_n)
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            # The engine fills with zeros past K, so those add nothing.
            x = x_desc.load([off_m, k])  # (BLOCK_M, BLOCK_K)
            weight = weight_desc.load([off_n, k]).T  # (BLOCK_K, BLOCK_N)
            acc = tl.dot(x, weight, acc, max_num_imprecise_acc=IMPRECISE)
        offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        scale = _fp8_matmul_scale(scale_x_ptr, offs_m, M, PER_ROW_X)
        acc *= scale[:, None] if PER_ROW_X else scale
        # In halves, the store needs half as much shared memory, and the loads
        # have a stage more. tl.split takes apart the last dimension.
        both = tl.reshape(acc, (BLOCK_M, 2, HALF)).permute(0, 2, 1)
        left, right = tl.split(both)  # (BLOCK_M, HALF)
        for side in tl.static_range(2):
            off = off_n + side * HALF
            y = left if side == 0 else right
            offs_n = off + tl.arange(0, HALF)  # (HALF,)
            scale = _fp8_matmul_scale(
                scale_weight_ptr, offs_n, N, PER_ROW_WEIGHT
            )
            y *= scale[None, :] if PER_ROW_WEIGHT else scale
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
                y += bias.to(tl.float32)[None, :]
            out_desc.store([off_m, off], y.to(out_desc.dtype))


@cache
def _fp8_matmul_gpu(device):
    """Return how many multiprocessors there are, and their shared memory."""
    if device.type == "cpu":  # interpreted: few programs, with many tiles each
        return 4, 227 * 1024
    driver = triton.runtime.driver.active
    with torch.accelerator.device_index(device.index):
        target = driver.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        raise RuntimeError(
            "fp8_matmul takes tensors on NVIDIA GPUs of compute capability 9.0 "
            "or more, which multiply float8 and have a copy engine, and this "
            f"is {target.backend} {target.arch}"
        )
    gpu = driver.utils.get_device_properties(device.index)
    return gpu["multiprocessor_count"], gpu["max_shared_mem"]


@cache
def _fp8_matmul_plan(M, N, itemsize, multiprocessors, shared, fast=True):
    """Return the number of programs, their tile and its stages."""

    def stages(tile):
        BLOCK_M, BLOCK_N, BLOCK_K, _, most = tile
        free = shared - BLOCK_M * BLOCK_N // 2 * itemsize - 2048
        return min(most, free // ((BLOCK_M + BLOCK_N) * BLOCK_K))

    def number(tile):
        return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])

    def cost(tile):
        rounds = triton.cdiv(number(tile), multiprocessors)
        edges = FP8_MATMUL_EDGE * (tile[0] + tile[1])
        return rounds * (tile[0] * tile[1] + edges)

    tiles = FP8_MATMUL_TILES if fast else FP8_MATMUL_TILES_PRECISE
    tile = min((t for t in tiles if stages(t) >= 3), key=cost)
    return min(multiprocessors, number(tile)), tile, stages(tile)


def _fp8_matmul_check(x, weight, scale_x, scale_weight, bias, out_dtype):
    """Raise for what the op does not take; return M, N and K."""
    tensors = [x, weight, scale_x, scale_weight]
    tensors += [] if bias is None else [bias]
    if (
        x.dtype not in FP8_MATMUL_INPUTS
        or weight.dtype not in FP8_MATMUL_INPUTS
    ):
        raise TypeError(
            "fp8_matmul takes float8_e4m3fn and float8_e5m2, not "
            f"{x.dtype} and {weight.dtype}"
        )
    if {scale_x.dtype, scale_weight.dtype} != {torch.float32}:
        raise TypeError(
            "fp8_matmul takes scales of float32, not "
            f"{scale_x.dtype} and {scale_weight.dtype}"
        )
    if out_dtype not in FP8_MATMUL_OUTPUTS or (
        bias is not None and bias.dtype not in FP8_MATMUL_OUTPUTS
    ):
        raise TypeError(
            "fp8_matmul returns bfloat16, float16 or float32, and takes a bias "
            f"of these, not {out_dtype} and {getattr(bias, 'dtype', None)}"
        )
    if len({t.device for t in tensors}) > 1:
        raise ValueError(
            "fp8_matmul takes tensors on one device, not on "
            f"{', '.join(str(t.device) for t in tensors)}"
        )
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "fp8_matmul takes x (..., K) and weight (N, K), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    N, K = weight.shape
    if K % 16:
        raise ValueError(
            f"fp8_matmul takes rows of a multiple of 16 numbers, not {K}: the "
            "copy engine loads from multiples of 16 bytes"
        )
    rows, M = (*x.shape[:-1], 1), math.prod(x.shape[:-1])
    if scale_x.numel() != 1 and tuple(scale_x.shape) != rows:
        raise ValueError(
            f"fp8_matmul takes scale_x of one number or of shape {rows}, not "
            f"{tuple(scale_x.shape)}"
        )
    if scale_weight.numel() != 1 and tuple(scale_weight.shape) not in (
        (N,),
        (N, 1),
    ):
        raise ValueError(
            "fp8_matmul takes scale_weight of one number or of shape "
            f"({N},) or ({N}, 1), not {tuple(scale_weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(
            f"fp8_matmul takes a bias of shape ({N},), not {tuple(bias.shape)}"
        )
    return M, N, K


def _fp8_matmul_rows(x):
    """Return a matrix whose rows the engine takes: x, or a copy."""
    begins = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
    apart = x.stride(0) >= x.shape[1] or x.shape[0] == 1
    return (
        x
        if x.stride(1) == 1 and begins and apart
        else x.clone(memory_format=torch.contiguous_format)
    )


def _fp8_matmul_stored(x, M, N, out_dtype):
    """Return a new matrix whose rows begin at multiples of 16 bytes."""
    unit = 16 // out_dtype.itemsize
    # The engine stores 16 bytes at a time, so the last row has its padding too.
    return x.new_empty(M, -(-N // unit) * unit, dtype=out_dtype)[:, :N]


def _fp8_matmul_launch(
    x,
    weight,
    scale_x,
    scale_weight,
    bias=None,
    out_dtype=torch.bfloat16,
    use_fast_accum=True,
):
    sizes = _fp8_matmul_check(x, weight, scale_x, scale_weight, bias, out_dtype)
    M, N, K = sizes
    multiprocessors, shared = _fp8_matmul_gpu(x.device)
    stored = _fp8_matmul_stored(x, M, N, out_dtype)
    if M * N * K == 0:
        stored.zero_()
        if bias is not None:
            stored += bias
    else:
        side_x = _fp8_matmul_rows(x.reshape(M, K))
        side_weight = _fp8_matmul_rows(weight)
        gpu = multiprocessors, shared
        plan = _fp8_matmul_plan(M, N, out_dtype.itemsize, *gpu, use_fast_accum)
        programs, (m, n, k, num_warps, _), num_stages = plan
        describe = TensorDescriptor
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            if x.is_cuda and not hasattr(FP8_MATMUL_THREAD, "begun"):
                # No descriptor is made in a thread without CUDA's context.
                FP8_MATMUL_THREAD.begun = torch.zeros(1, device=x.device)
            _fp8_matmul_kernel[(programs,)](
                describe(side_x, [M, K], [side_x.stride(0), 1], [m, k]),
                describe(
                    side_weight, [N, K], [side_weight.stride(0), 1], [n, k]
                ),
                describe(stored, [M, N], [stored.stride(0), 1], [m, n // 2]),
                scale_x.contiguous(),
                scale_weight.contiguous(),
                None if bias is None else bias.contiguous(),
                PER_ROW_X=scale_x.numel() > 1,
                PER_ROW_WEIGHT=scale_weight.numel() > 1,
                IMPRECISE=None if use_fast_accum else FP8_MATMUL_PRECISE,
                num_warps=num_warps,
                num_stages=num_stages,
            )
    return stored.reshape(*x.shape[:-1], N)


@custom_op(f"{FP8_MATMUL_NAMESPACE}::fp8_matmul", mutates_args=())
def fp8_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """Return (x * scale_x) @ (weight * scale_weight).T + bias.

    Takes x (..., K) and weight (N, K), each float8_e4m3fn or float8_e5m2, with
    K a multiple of 16; scales of float32, of one number or one for each row:
    ``scale_x`` (..., 1) and ``scale_weight`` (N,) or (N, 1), as ``quantize``
    returns them; and a bias (N,) of bfloat16, float16 or float32, or None. The
    result has shape (..., N) and is ``out_dtype``, one of these three; it is
    contiguous where 16 divides the bytes of a row. A matrix whose rows are
    strided, or begin at other addresses than multiples of 16, is copied in each
    call. Deterministic on one kind of GPU; without a gradient. Raises TypeError
    for other dtypes, ValueError for other shapes, and RuntimeError for GPUs
    other than NVIDIA's of compute capability 9.0 and more. Without a GPU, it
    needs Triton's interpreter.

    Rounding: the products are exact. On Hopper, tensor cores add float8
    products with fewer bits than float32 has; with ``use_fast_accum`` they add
    up all of K so, without it 128 of them, whose sum is added in float32. The
    scales are multiplied, and the bias is added, in float32, and the result is
    rounded once.
    """
    return _fp8_matmul_launch(
        x, weight, scale_x, scale_weight, bias, out_dtype, use_fast_accum
    )


@fp8_matmul.register_fake
def _fp8_matmul_fake(
    x,
    weight,
    scale_x,
    scale_weight,
    bias=None,
    out_dtype=torch.bfloat16,
    use_fast_accum=True,
):
    M, N, _ = _fp8_matmul_check(
        x, weight, scale_x, scale_weight, bias, out_dtype
    )
    stored = _fp8_matmul_stored(x, M, N, out_dtype)
    return stored.reshape(*x.shape[:-1], N)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
FP8_MATMUL_LIBRARY = Library(FP8_MATMUL_NAMESPACE, "FRAGMENT")
FP8_MATMUL_LIBRARY.impl("fp8_matmul", _fp8_matmul_launch, "CUDA")


@register_flop_formula(getattr(torch.ops, FP8_MATMUL_NAMESPACE).fp8_matmul)
def _fp8_matmul_flops(x_shape, weight_shape, *args, **kwargs):
    count = 2 * weight_shape[0]
    for size in x_shape:
        count *= size
    return count


def _fp8_matmul_linear_check(x, weight, bias):
    """Raise for what the layer does not take."""
    floats = torch.bfloat16, torch.float16, torch.float32
    kinds = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(kinds) > 1 or not kinds <= {*floats}:
        raise TypeError(
            "fp8_matmul_linear takes bfloat16, float16 or float32 tensors of "
            f"one dtype, not {', '.join(sorted(map(str, kinds)))}"
        )
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "fp8_matmul_linear takes x (..., K) and weight (N, K), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    sizes = math.prod(x.shape[:-1]), *weight.shape
    if any(size % 16 for size in sizes):
        raise ValueError(
            "fp8_matmul_linear takes multiples of 16 tokens, outputs and "
            f"inputs, as a product sums over each of them, not {sizes}"
        )


@custom_op(f"{FP8_MATMUL_NAMESPACE}::fp8_matmul_linear", mutates_args=())
def fp8_matmul_linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    use_fast_accum: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Return what fp8_matmul_linear does, and what its backward needs.

    That is the transposes of x and weight in float8, each with its scale. Only
    the backward has use for ``use_fast_accum``.
    """
    _fp8_matmul_linear_check(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    values, scale, *kept_x = quantize_with_transpose(rows, (-1, -1))
    weights, of_weight, *kept = quantize_with_transpose(weight, (-1, -1))
    y = fp8_matmul(values, weights, scale, of_weight, bias, x.dtype)
    return (y.view(*x.shape[:-1], -1), *kept_x, *kept)


@fp8_matmul_linear_forward.register_fake
def _fp8_matmul_linear_fake(x, weight, bias, use_fast_accum):
    _fp8_matmul_linear_check(x, weight, bias)
    M, (N, K) = math.prod(x.shape[:-1]), weight.shape
    float8 = {"dtype": torch.float8_e4m3fn}
    scales = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    y = x.new_empty(*x.shape[:-1], N)
    kept_x = x.new_empty(K, M, **float8), next(scales)
    return (y, *kept_x, x.new_empty(K, N, **float8), next(scales))


@custom_op(
    f"{FP8_MATMUL_NAMESPACE}::fp8_matmul_linear_backward", mutates_args=()
)
def fp8_matmul_linear_backward(
    grad: torch.Tensor,
    x_t: torch.Tensor,
    scale_x: torch.Tensor,
    weight_t: torch.Tensor,
    scale_weight: torch.Tensor,
    use_fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x, as rows, and of weight."""
    rows = grad.reshape(-1, grad.shape[-1])
    float8 = torch.float8_e5m2
    made = quantize_with_transpose(rows, (-1, -1), float8)
    values, scale, values_t, scale_t = made
    kind = grad.dtype
    dx = fp8_matmul(values, weight_t, scale, scale_weight, None, kind)
    options = None, kind, use_fast_accum
    return dx, fp8_matmul(values_t, x_t, scale_t, scale_x, *options)


@fp8_matmul_linear_backward.register_fake
def _fp8_matmul_linear_backward_fake(
    grad, x_t, scale_x, weight_t, scale_weight, use_fast_accum
):
    (K, M), N = x_t.shape, weight_t.shape[1]
    return grad.new_empty(M, K), grad.new_empty(N, K)


def _fp8_matmul_linear_setup(ctx, inputs, output):
    _, *kept = output
    ctx.save_for_backward(*kept)
    ctx.mark_non_differentiable(*kept)
    ctx.has_bias, ctx.use_fast_accum = inputs[2] is not None, inputs[3]


def _fp8_matmul_linear_gradient(ctx, grad, *_):
    given = *ctx.saved_tensors, ctx.use_fast_accum
    dx, dw = fp8_matmul_linear_backward(grad, *given)
    db = None
    if ctx.has_bias:
        db = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(grad.dtype)
    return dx.view(*grad.shape[:-1], -1), dw, db, None


fp8_matmul_linear_forward.register_autograd(
    _fp8_matmul_linear_gradient, setup_context=_fp8_matmul_linear_setup
)


def fp8_matmul_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return x @ weight.T + bias, with all products in float8.

    As ``torch.nn.functional.linear``, for x (..., K), weight (N, K) and bias
    (N,) or None, all of one dtype: bfloat16, float16 or float32. Tokens, N and
    K are multiples of 16. The result and all gradients have that dtype. Each
    of x and weight gets one scale and becomes float8_e4m3fn, as by
    ``quantize``, and so does the gradient of the result, as float8_e5m2, which
    reaches further: https://arxiv.org/abs/2209.05433. The float8 transposes of
    x and weight are kept for the backward, half of what a linear layer of
    16 bits keeps of x. Raises TypeError for other dtypes, ValueError for other
    shapes, and RuntimeError for GPUs that ``fp8_matmul`` does not take. There
    are no second derivatives.

    Rounding: that of ``quantize``, then that of ``fp8_matmul``, with
    ``use_fast_accum`` in the result and in the gradient of x. That of the
    weight is a sum over all tokens, and has it if ``use_fast_accum`` says so.
    """
    return fp8_matmul_linear_forward(x, weight, bias, use_fast_accum)[0]
