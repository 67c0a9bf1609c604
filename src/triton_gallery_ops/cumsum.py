"""Cumulative sum over the last dimension.

Like ``torch.cumsum(x, -1)``, for floating-point rows of up to 2**30 elements.
One program scans a row block by block and reads each element once. The carry
between blocks is float64, so for narrower dtypes the error does not grow with
the number of blocks. The backward is the same kernel from right to left, where
PyTorch flips, scans and flips back. A few long rows would leave part of the GPU
idle: they are computed as in ``cumsum_long``, where many programs share a row.
Deterministic on a given GPU model, with gradients of any order.
"""

import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

from triton_gallery_ops.cumsum_long import (
    _cumsum_long_check,
    _cumsum_long_kernel,
    _cumsum_long_launch_either,
    _cumsum_long_turn,
)

CUMSUM_NAMESPACE = "triton_gallery"
CUMSUM_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
CUMSUM_BLOCK = 1024  # elements that two warps scan at a time
CUMSUM_FEW = 2048  # fewer rows take four times the block and twice the warps
# Fewer rows than a GPU has multiprocessors, of several blocks, are shared.
CUMSUM_SHARED = 128


@triton.jit
def _cumsum_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    x_rows = x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)
    y_rows = y_ptr + offs_m * N  # (BLOCK_M, 1)
    block = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # In float32 each block of a long row would add a rounding.
    carry = tl.zeros((BLOCK_M, 1), dtype=tl.float64)  # (BLOCK_M, 1)
    for start in range(0, N, BLOCK_N):
        offs = start + block  # (1, BLOCK_N)
        if REVERSE:
            # Vectors from the last to the first, each one from left to right.
            offs = N - VEC - start - block // VEC * VEC + block % VEC
        mask = (offs_m < M) & (offs >= 0 if REVERSE else offs < N)
        x = tl.load(x_rows + offs, mask=mask, other=0).to(ACC)
        if REVERSE:
            x = _cumsum_long_turn(x, VEC)
        y = tl.cumsum(x, axis=1) + carry.to(ACC)  # (BLOCK_M, BLOCK_N)
        if REVERSE:
            y = _cumsum_long_turn(y, VEC)
        tl.store(y_rows + offs, y, mask=mask)
        carry += tl.sum(x, axis=1, keep_dims=True)


def _cumsum_plan(x, stride, REVERSE):
    """Return how to launch for the rows of x."""
    M, N = x.shape
    size = x.element_size()
    VEC = math.gcd(N, stride, 16 // size)
    # Few programs need long blocks to have enough loads in flight.
    few = M < CUMSUM_FEW and N > CUMSUM_BLOCK and VEC * size == 16
    block = 4 * CUMSUM_BLOCK if few else CUMSUM_BLOCK
    BLOCK_N = min(block, triton.next_power_of_2(N))
    return {
        "ACC": CUMSUM_ACC[x.dtype],
        "VEC": VEC,
        "REVERSE": REVERSE,
        "BLOCK_M": max(1, CUMSUM_BLOCK // BLOCK_N),
        "BLOCK_N": BLOCK_N,
        "num_warps": 4 if few else 2,
    }


def _cumsum_launch_either(name, x, wrap, REVERSE):
    _cumsum_long_check(name, x)
    N = int(x.shape[-1]) if x.ndim else 1
    if N > 4 * CUMSUM_BLOCK and x.numel() // N < CUMSUM_SHARED:
        shared = wrap(_cumsum_long_kernel)
        return _cumsum_long_launch_either(name, x, shared, REVERSE)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x = x.reshape(-1, N)
    x = x if x.stride(1) == 1 else x.contiguous()
    M, stride = x.shape[0], int(x.stride(0))
    plan = _cumsum_plan(x, stride, REVERSE)
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        wrap(_cumsum_kernel)[grid](x, y, M, N, stride, **plan)
    return y


def _cumsum_launch(x, wrap=lambda kernel: kernel):
    return _cumsum_launch_either("cumsum", x, wrap, False)


def _cumsum_backward_launch(grad, wrap=lambda kernel: kernel):
    return _cumsum_launch_either("cumsum_backward", grad, wrap, True)


@triton_op(f"{CUMSUM_NAMESPACE}::cumsum", mutates_args={})
def cumsum(x: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of the rows, as torch.cumsum(x, -1).

    Takes a tensor of float16, bfloat16, float32 or float64, of any shape and
    layout, with rows of up to 2**30 elements. Sums up in float32 and from block
    to block in float64, or all in float64. The result has the shape and dtype
    of ``x``, is contiguous, and is deterministic on one kind of GPU. Each row
    has one program, or several if there are few long rows. NaN and inf reach
    all elements after them. Raises TypeError for other dtypes and ValueError
    for longer rows. Has gradients of any order.

    Rounding: each block is summed in float32 and added to a carry of float64,
    or all in float64; each result is rounded once.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    return _cumsum_launch(x, wrap_triton)


@triton_op(f"{CUMSUM_NAMESPACE}::cumsum_backward", mutates_args={})
def cumsum_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row.

    That is the gradient of ``cumsum``, whose gradient is ``cumsum``. All else
    is as in ``cumsum``.
    """
    return _cumsum_backward_launch(grad, wrap_triton)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
CUMSUM_LIBRARY = Library(CUMSUM_NAMESPACE, "FRAGMENT")
CUMSUM_LIBRARY.impl("cumsum", _cumsum_launch, "CUDA")
CUMSUM_LIBRARY.impl("cumsum_backward", _cumsum_backward_launch, "CUDA")

# Under torch.autocast it computes in float32, as PyTorch's own does.
cumsum.register_autocast("cpu", torch.float32)
cumsum.register_autocast("cuda", torch.float32)


def _cumsum_gradient(ctx, grad):
    return cumsum_backward(grad)


def _cumsum_backward_gradient(ctx, grad):
    return cumsum(grad)


cumsum.register_autograd(_cumsum_gradient)
cumsum_backward.register_autograd(_cumsum_backward_gradient)
