"""Softmax over the last dimension, with its backward.

Computes exp(x - max(x)) / sum(exp(x - max(x))) for each row, like
``torch.softmax(x, -1)``, for rows of up to 64 KB in the accumulator type: 16384
elements, or 8192 in float64. A program keeps its rows in registers, so the
forward reads and writes each element once; the backward reads the saved output
instead of the input. Rows of odd length are loaded one element at a time. For
longer rows, use ``softmax_long``. Results are deterministic. There is no second
derivative.
"""

import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

SOFTMAX_NAMESPACE = "triton_gallery"
SOFTMAX_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Bytes, of a row in its accumulator's type
SOFTMAX_LONGEST = 64 * 1024
SOFTMAX_TILE = 8 * 1024  # what short rows share a program for
SOFTMAX_WHOLE = 16 * 1024  # beyond it a row may be two blocks
SOFTMAX_ALONE = 1024  # up to it a row that warps would share has one
SOFTMAX_THREAD = 128  # what a thread holds, about


@triton.jit
def _softmax_load(ptrs, mask, other, ACC: tl.constexpr):
    """Load a block, ``other`` where it is masked. A full block has no mask."""
    if mask is None:
        block = tl.load(ptrs)
    else:
        block = tl.load(ptrs, mask=mask, other=other)
    return block.to(ACC)


@triton.jit
def _softmax_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,  # the second block of a row, or 0
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
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # The first of two blocks is full, and needs no mask.
    mask = None if REST else offs_n < N
    # -inf is never the maximum, and adds nothing to the sum.
    x = _softmax_load(x_rows + offs_n, mask, -float("inf"), ACC)
    if REST:
        # Loaded before the first maximum, for which all warps wait.
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        x_rest = _softmax_load(x_rows + rest, rest < N, -float("inf"), ACC)
    top = tl.max(x, axis=1, keep_dims=True)  # (BLOCK_M, 1)
    if REST:
        top = tl.maximum(top, tl.max(x_rest, axis=1, keep_dims=True))
    e = tl.exp(x - top)  # (BLOCK_M, BLOCK_N)
    total = tl.sum(e, axis=1, keep_dims=True)  # (BLOCK_M, 1)
    if REST:
        e_rest = tl.exp(x_rest - top)  # (BLOCK_M, REST)
        total += tl.sum(e_rest, axis=1, keep_dims=True)
        tl.store(y_rows + rest, e_rest / total, mask=rest < N)
    tl.store(y_rows + offs_n, e / total, mask=mask)


@triton.jit
def _softmax_backward_kernel(
    g_ptr,
    y_ptr,
    d_ptr,
    M,
    N,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,
):
    # Unless 16 divides N, the compiler learns only here that VEC does.
    N = N // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    # Without the minimum, the last program would store rows past d's end.
    rows = tl.minimum(offs_m, M - 1) * N
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # As forward: only a single block can reach past the row's end.
    mask = None if REST else offs_n < N
    offs = rows + offs_n  # (BLOCK_M, BLOCK_N)
    # Zeros past the end add nothing to the sum of products.
    g = _softmax_load(g_ptr + offs, mask, 0, ACC)  # (BLOCK_M, BLOCK_N)
    y = _softmax_load(y_ptr + offs, mask, 0, ACC)  # (BLOCK_M, BLOCK_N)
    if REST:
        # After the first sum, for which all warps wait, these would come late.
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        g_rest = _softmax_load(g_ptr + rows + rest, rest < N, 0, ACC)
        y_rest = _softmax_load(y_ptr + rows + rest, rest < N, 0, ACC)
    # Each d needs the sum of its whole row, so nothing is stored before.
    if REST:
        # A tile of two blocks is one row. To keep the dimension of its sum,
        # Triton 3.9 would move the first block through shared memory.
        total = tl.sum(g * y) + tl.sum(g_rest * y_rest)
        d_rest = y_rest * (g_rest - total)  # (BLOCK_M, REST)
        tl.store(d_ptr + rows + rest, d_rest, mask=rest < N)
    else:
        total = tl.sum(g * y, axis=1, keep_dims=True)  # (BLOCK_M, 1)
    d = y * (g - total)  # (BLOCK_M, BLOCK_N)
    tl.store(d_ptr + offs, d, mask=mask)


def _softmax_length(x):
    """Return the length of x's rows; raise for what the op does not take."""
    if x.dtype not in SOFTMAX_ACC:
        raise TypeError(f"softmax takes a float tensor, not {x.dtype}")
    N = int(x.shape[-1]) if x.ndim else 1
    most = SOFTMAX_LONGEST // max(4, x.element_size())
    if most < N:
        raise ValueError(
            f"softmax takes rows of up to {most} elements of {x.dtype}, "
            f"not {N}: softmax_long takes rows of any length"
        )
    return N


def _softmax_plan(N, stride, dtype, backward=False):
    """Return how to launch for rows of N that begin so far apart."""
    size = max(4, dtype.itemsize)
    whole = triton.next_power_of_2(N)
    BLOCK_N, REST = whole, 0
    if BLOCK_N * size > SOFTMAX_WHOLE and N * 4 <= BLOCK_N * 3:
        BLOCK_N //= 2
        REST = triton.next_power_of_2(N - BLOCK_N)
    BLOCK_M = max(1, SOFTMAX_TILE // (BLOCK_N * size))
    held = BLOCK_M * (whole if backward else BLOCK_N + REST) * size
    warps = held / (32 * SOFTMAX_THREAD)
    # The nearest power of two, by ratio: 10 is nearer to 8, 12 to 16.
    num_warps = max(4, 2 ** round(math.log2(warps)))
    VEC = math.gcd(N, stride, 16 // dtype.itemsize)
    row, tile = BLOCK_N * size, SOFTMAX_TILE // 2
    # A warp loads 32 times VEC elements at once. Warps that share a row wait
    # for each other in both reductions.
    if 32 * VEC < BLOCK_N and VEC * dtype.itemsize < 16 and row <= tile:
        BLOCK_M, num_warps = tile // row, 1 if row <= SOFTMAX_ALONE else 2
    return {
        "ACC": SOFTMAX_ACC[dtype],
        "VEC": VEC,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "REST": REST,
        "num_warps": num_warps,
    }


def _softmax_launch(x, kernel=_softmax_kernel):
    N = _softmax_length(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    stride = N
    if not x.is_contiguous():
        x = x.reshape(-1, N)
        x = x if x.stride(1) == 1 else x.contiguous()
        stride = int(x.stride(0))
    M = y.numel() // N
    plan = _softmax_plan(N, stride, x.dtype)
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[grid](x, y, M, N, stride, **plan)
    return y


def _softmax_backward_launch(grad, y, kernel=_softmax_backward_kernel):
    N = _softmax_length(y)
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in (grad, y)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "softmax_backward takes a gradient of y's dtype, shape and device, "
            f"not {kinds[0]} for {kinds[1]}"
        )
    grad, y = grad.contiguous(), y.contiguous()
    d = torch.empty_like(y)
    if d.numel() == 0:
        return d
    M = d.numel() // N
    plan = _softmax_plan(N, N, y.dtype, backward=True)
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    with torch.accelerator.device_index(y.device.index):
        kernel[grid](grad, y, d, M, N, **plan)
    return d


@triton_op(f"{SOFTMAX_NAMESPACE}::softmax", mutates_args={})
def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax along the last dimension, as torch.softmax(x, -1).

    Takes a tensor of float16, bfloat16, float32 or float64, of any shape and
    layout, with rows of up to 16384 elements, 8192 in float64. The result has
    the shape and dtype of ``x``, is contiguous, and is deterministic. A row
    with NaN or inf, or with nothing but -inf, becomes NaN. Raises TypeError for
    other dtypes and ValueError for longer rows. Has a gradient, which has none
    itself.

    Rounding: maximum, sum and quotient are in float32, or float64 for float64,
    and each result is rounded once. The backward starts from the rounded
    result.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    return _softmax_launch(x, wrap_triton(_softmax_kernel))


@triton_op(f"{SOFTMAX_NAMESPACE}::softmax_backward", mutates_args={})
def softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, for y = softmax(x) and the gradient of y.

    Takes two tensors of one dtype, shape and device, of any layout, and raises
    as ``softmax`` does, and ValueError for two that differ.
    """
    kernel = wrap_triton(_softmax_backward_kernel)
    return _softmax_backward_launch(grad, y, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
SOFTMAX_LIBRARY = Library(SOFTMAX_NAMESPACE, "FRAGMENT")
SOFTMAX_LIBRARY.impl("softmax", _softmax_launch, "CUDA")
SOFTMAX_LIBRARY.impl("softmax_backward", _softmax_backward_launch, "CUDA")

# Under torch.autocast it computes in float32, as PyTorch's own does.
softmax.register_autocast("cpu", torch.float32)
softmax.register_autocast("cuda", torch.float32)


def _softmax_setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _softmax_gradient(ctx, grad):
    (y,) = ctx.saved_tensors
    return softmax_backward(grad, y)


softmax.register_autograd(_softmax_gradient, setup_context=_softmax_setup)
