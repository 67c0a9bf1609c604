"""Matrix product (matmul) for any layout, with its backward.

Computes a @ b for (M, K) and (K, N), with any strides and no copies; flatten
batches first. A plain tiled kernel for tensor cores, without tuning. It is
slower if b is transposed, and if sizes are odd, where each element is loaded
alone. Float32 is multiplied in full precision unless ``input_precision`` says
otherwise; sums are in float32, or float64 for float64. ``tuned_matmul`` chooses
a tile for each shape, ``persistent_matmul`` uses the copy engine of Hopper and
newer GPUs, and ``skinny_matmul`` is for up to 64 rows. Deterministic, with
gradients of any order.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

MATMUL_NAMESPACE = "triton_gallery"
# A tile along M, N and K, and its warps
MATMUL_TILES = {
    torch.float16: (128, 256, 64, 8),
    torch.bfloat16: (128, 256, 64, 8),
    torch.float32: (64, 64, 32, 4),
    torch.float64: (64, 64, 16, 4),
}


@triton.jit
def _matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    LEAST: tl.constexpr,  # 1 where b is transposed, else 0
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32, an offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = pid // tiles_n, pid % tiles_n
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # In a transposed operand, k times its stride may be past 2**31 as well.
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # (BLOCK_K,)
    step = tl.cast(BLOCK_K, tl.int64)
    a_ptrs = a_ptr + offs_m * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # If the loop might not run, ptxas would have each multiplication wait for
    # the one before, where b is transposed: tuned_matmul.py shows it.
    for start in range(0, tl.maximum(K, LEAST), BLOCK_K):
        # Zeros past the end of K add nothing. Both need them: NaN * 0 is NaN.
        a_mask = (offs_m < M) & (offs_k[None, :] < K - start)
        b_mask = (offs_k[:, None] < K - start) & (offs_n < N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)  # (BLOCK_M, BLOCK_K)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)  # (BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        # Stepping the pointers is cheaper than computing them from k again.
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    c_mask = (offs_m < M) & (offs_n < N)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


def _matmul_block(size, most):
    """Return the block for a dimension; an instruction has 16 rows anyway."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _matmul_check(a, b, input_precision):
    if a.dtype not in MATMUL_TILES:
        raise TypeError(f"matmul takes float matrices, not {a.dtype}")
    if b.dtype != a.dtype or b.device != a.device:
        raise TypeError(
            "matmul takes matrices of one dtype on one device, not "
            f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "matmul takes matrices of (M, K) and (K, N), not "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if input_precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(
            "matmul takes ieee, tf32 or tf32x3 as input_precision, not "
            f"{input_precision}"
        )


def _matmul_launch(a, b, input_precision="ieee", kernel=_matmul_kernel):
    _matmul_check(a, b, input_precision)
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c
    most_m, most_n, BLOCK_K, num_warps = MATMUL_TILES[a.dtype]
    BLOCK_M, BLOCK_N = _matmul_block(M, most_m), _matmul_block(N, most_n)
    if triton.knobs.runtime.interpret and a.dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        a, b = a.float(), b.float()
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        arguments = a, b, c, M, N, K, *a.stride(), *b.stride()
        kernel[grid](
            *arguments,
            LEAST=int(b.stride(0) == 1),
            ACC=tl.float64 if a.dtype == torch.float64 else tl.float32,
            PRECISION=input_precision,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=num_warps if BLOCK_M * BLOCK_N > 64 * 128 else 4,
            # AMD's shared memory has room for two.
            num_stages=2 if torch.version.hip else 3,
        )
    return c


@triton_op(f"{MATMUL_NAMESPACE}::matmul", mutates_args={})
def matmul(
    a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee"
) -> torch.Tensor:
    """Return the matrix product of a (M, K) and b (K, N), of shape (M, N).

    Takes two matrices of float16, bfloat16, float32 or float64, both of one
    dtype, with any strides. Of a batch, flatten the leading dimensions of ``a``
    first. Sums are kept in float32, or float64 for float64. The result has
    their dtype, is contiguous, and is deterministic. ``input_precision`` is for
    float32, the other dtypes ignore it: "ieee" multiplies all 24 bits, "tf32"
    gives 11 of them to the tensor cores, and "tf32x3" makes up for that with
    three products. Raises TypeError for other dtypes or two that differ, and
    ValueError for other shapes. Has a gradient, in the same precision, and that
    has one.

    Rounding: products are summed in float32, or float64 for float64, and each
    result is rounded once.

    Under ``torch.autocast`` it casts a and b to autocast's dtype.
    """
    kernel = wrap_triton(_matmul_kernel)
    return _matmul_launch(a, b, input_precision, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
MATMUL_LIBRARY = Library(MATMUL_NAMESPACE, "FRAGMENT")
MATMUL_LIBRARY.impl("matmul", _matmul_launch, "CUDA")


def _matmul_autocast(kind, a, b, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    a, b = (t.to(dtype) if t.dtype in casts else t for t in (a, b))
    with torch.autocast(kind, enabled=False):
        return matmul(a, b, *options)


MATMUL_LIBRARY.impl("matmul", partial(_matmul_autocast, "cpu"), "AutocastCPU")
MATMUL_LIBRARY.impl("matmul", partial(_matmul_autocast, "cuda"), "AutocastCUDA")


def _matmul_setup(ctx, inputs, output):
    a, b, ctx.input_precision = inputs
    ctx.save_for_backward(a, b)


def _matmul_gradient(ctx, grad):
    a, b = ctx.saved_tensors
    precision = ctx.input_precision
    by_a, by_b = ctx.needs_input_grad[:2]
    grad_a = matmul(grad, b.T, precision) if by_a else None
    grad_b = matmul(a.T, grad, precision) if by_b else None
    return grad_a, grad_b, None


matmul.register_autograd(_matmul_gradient, setup_context=_matmul_setup)
