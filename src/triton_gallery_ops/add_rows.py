"""Weighted row addition, x + weight[:, None] * y, for rows of any length.

Like ``torch.addcmul(x, weight[:, None], y)`` for two (M, N) matrices and one
weight per row, but without broadcasting. Each row is split into an aligned body
and its edges, so rows of odd length are still moved 16 bytes at a time. For
that, a row must start at the same distance from a multiple of 16 bytes in both
inputs and the output, as in contiguous matrices; otherwise elements are moved
one by one. A program handles one block of one row, so rows of a few hundred
elements give it little to load. The arithmetic is in float32, or float64 for
float64. Deterministic, without a backward.
"""

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

ADD_ROWS_NAMESPACE = "triton_gallery"
ADD_ROWS_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _add_rows_divide(x_ptr, start, N, VEC: tl.constexpr):
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
def _add_rows_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    out_ptr,
    N,
    blocks,
    stride_xm,
    stride_ym,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    # One axis for both: a grid's second axis ends at 65535.
    row, block = pid // blocks, pid % blocks
    # In half precision, product and sum would be rounded before the store.
    weight = tl.load(weight_ptr + row).to(ACC)
    # The launcher checked that the rows have the same alignment, so one end and
    # one mask of the edges serve all three. Otherwise VEC is 1 and no row has
    # edges.
    x_body, end, x_edges, mask_e = _add_rows_divide(
        x_ptr, row * stride_xm, N, VEC
    )
    y_body, _, y_edges, _ = _add_rows_divide(y_ptr, row * stride_ym, N, VEC)
    out_body, _, out_edges, _ = _add_rows_divide(out_ptr, row * N, N, VEC)
    offs = block * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    # VEC divides end, so the mask lets in all of a wide load, or none.
    mask = offs < end
    x = tl.load(x_body + offs, mask=mask).to(ACC)  # (BLOCK,)
    y = tl.load(y_body + offs, mask=mask).to(ACC)  # (BLOCK,)
    tl.store(out_body + offs, x + weight * y, mask=mask)
    # The edges are far fewer than a block: one program of each row does them.
    if block == 0:
        x_e = tl.load(x_edges, mask=mask_e).to(ACC)  # (2 * VEC,)
        y_e = tl.load(y_edges, mask=mask_e).to(ACC)  # (2 * VEC,)
        tl.store(out_edges, x_e + weight * y_e, mask=mask_e)


def _add_rows_check(x, y, weight):
    """Raise for what the op does not take."""
    if x.dtype not in ADD_ROWS_ACC:
        raise TypeError(f"add_rows takes float tensors, not {x.dtype}")
    if x.ndim != 2 or x.shape != y.shape or weight.shape != x.shape[:1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, y, weight))
        raise ValueError(
            "add_rows takes two matrices of one shape, and a weight for each "
            f"row, not {shapes}"
        )
    kinds = [(t.dtype, t.device) for t in (x, y, weight)]
    if kinds[0] != kinds[1] or kinds[0] != kinds[2]:
        raise TypeError(f"add_rows takes one dtype and device, not {kinds}")


def _add_rows_apart(x):
    """Return x with contiguous rows, and how far apart they begin."""
    if x.is_contiguous():
        return x, int(x.shape[1])
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, int(x.stride(0))


def _add_rows_launch(x, y, weight, kernel=_add_rows_kernel):
    _add_rows_check(x, y, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    M, N = x.shape[0], int(x.shape[1])
    x, stride_xm = _add_rows_apart(x)
    y, stride_ym = _add_rows_apart(y)
    VEC = 16 // x.element_size()
    if (stride_xm - N) % VEC or (stride_ym - N) % VEC:
        VEC = 1  # other alignment
    BLOCK = min(1024, max(32, triton.next_power_of_2(N)))
    blocks = triton.cdiv(N, BLOCK)
    pointers = x, y, weight.contiguous(), out
    sizes = N, blocks, stride_xm, stride_ym
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(M * blocks,)](
            *pointers,
            *sizes,
            ACC=ADD_ROWS_ACC[x.dtype],
            VEC=VEC,
            BLOCK=BLOCK,
            num_warps=max(1, BLOCK // 256),
        )
    return out


@triton_op(f"{ADD_ROWS_NAMESPACE}::add_rows", mutates_args={})
def add_rows(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return x + weight[:, None] * y, as torch.addcmul does.

    Takes two (M, N) matrices and M weights, all of float16, bfloat16, float32
    or float64 and on one device. Rows may lie apart; other layouts are copied.
    The result is contiguous and deterministic. Raises TypeError for other
    dtypes and where dtypes or devices differ, ValueError where shapes do. Has
    no gradient.

    Rounding: the arithmetic is in float32, or float64 for float64, and each
    result is rounded once.
    """
    return _add_rows_launch(x, y, weight, wrap_triton(_add_rows_kernel))


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
ADD_ROWS_LIBRARY = Library(ADD_ROWS_NAMESPACE, "FRAGMENT")
ADD_ROWS_LIBRARY.impl("add_rows", _add_rows_launch, "CUDA")
