"""Top-k over the last dimension: the k largest values and their indices.

Like ``torch.topk(x, k)``, sorted, for rows of up to 8192 elements and k up to
128. NaN is the largest, and of equal values the one with the lower index comes
first, so the result is deterministic. Fast for small k: the maxima of columns
rule out most of a row (compare Gaihre et al., 2021, "Dr. Top-k",
arXiv:2109.08219), and only a small part is sorted. Float64, meant for
gradcheck, takes k maxima one after another. For a few short rows, PyTorch may
be faster, because its call costs the CPU less. For longer rows, use
``topk_long``. The values have gradients of any order. ``apply_softmax`` gives
the weights of a router.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

TOPK_NAMESPACE = "triton_gallery"
TOPK_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOPK_MOST = 128  # for k
TOPK_LONGEST = 8192  # elements of a row
TOPK_COLUMN = 64  # elements of a column, at most
TOPK_WARP = 128  # columns for a warp
TOPK_TILE = 4096  # elements for a warp
TOPK_STEP = 32  # words to sort that cost as much as one more sort


@triton.jit
def _topk_key(x):
    """Return integers in the order of the floats, with NaN as the largest."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    INT: tl.constexpr = tl.int64 if BITS == 64 else tl.int32
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    if BITS == 16:
        bits = x.to(tl.int16, bitcast=True).to(INT)
        wide = x.to(tl.float32)
    else:
        bits = x.to(INT, bitcast=True)
        wide = x
    # The bits of negative floats are in reverse order.
    key = tl.where(bits < 0, bits ^ TOP, bits)
    # The two zeros are equal, and so are all NaN.
    key = tl.where(wide == 0, 0, key)
    return tl.where(wide == wide, key, TOP)


@triton.jit
def _topk_best(
    x_rows, first, N, STEP: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr
):
    """Return where the maxima of the K best groups of elements are.

    A group begins at an element of ``first``. It has LENGTH elements, one in
    every STEP of the row.
    """
    BITS: tl.constexpr = x_rows.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    LAST: tl.constexpr = 2 ** (BITS - 1) - 1
    LOWEST: tl.constexpr = -(2 ** (2 * BITS - 1))
    x = tl.load(x_rows + first, mask=first < N, other=0)  # (BLOCK_M, groups)
    # In float32, which is exact: not every GPU compares bfloat16.
    top, index = x.to(tl.float32), first
    for member in tl.static_range(1, LENGTH):
        offs = first + member * STEP
        x = tl.load(x_rows + offs, mask=offs < N, other=-float("inf"))
        wide = x.to(tl.float32)
        # NaN is larger than a number, and not larger than another NaN. Of two
        # equals the first stays.
        larger = (~(wide <= top)) & (top == top)
        top = tl.where(larger, wide, top)
        index = tl.where(larger, offs, index)
    # Only the maxima are packed, not all elements.
    key = _topk_key(top.to(x.dtype)).to(WORD)
    words = (key << BITS) | (LAST - index)
    words = tl.where(first < N, words, LOWEST)
    best = tl.topk(words, K)  # (BLOCK_M, K)
    return LAST - (best & LAST).to(tl.int32)


@triton.jit
def _topk_split(
    index, SETS: tl.constexpr, LENGTH: tl.constexpr, PART: tl.constexpr
):
    """Return where the parts of groups begin, given an element of each."""
    GROUP: tl.constexpr = SETS * LENGTH
    first = index % SETS + index // GROUP * GROUP  # (BLOCK_M, K)
    part = tl.arange(0, LENGTH // PART) * (SETS * PART)
    first = first[:, :, None] + part[None, None, :]
    shape: tl.constexpr = (first.shape[0], first.shape[1] * first.shape[2])
    return tl.reshape(first, shape)


@triton.jit
def _topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    M,
    N,
    stride_xm,
    k,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SETS: tl.constexpr,  # columns
    LENGTH: tl.constexpr,  # of a column
    PART: tl.constexpr,  # of a column, for the second sort
    SOFTMAX: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    # Clamp to the last row: it is recomputed, and the same values are stored.
    offs_m = tl.minimum(offs_m, M - 1)
    x_rows = x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)
    # Neighbours are in different columns, so that threads load side by side.
    first = tl.arange(0, SETS)[None, :]  # (1, SETS)
    index = _topk_best(x_rows, first, N, SETS, LENGTH, K)  # (BLOCK_M, K)
    if PART < LENGTH:
        first = _topk_split(index, SETS, LENGTH, PART)
        index = _topk_best(x_rows, first, N, SETS, PART, K)
    if PART > 1:
        first = _topk_split(index, SETS, PART, 1)
        index = _topk_best(x_rows, first, N, SETS, 1, K)
    offs_k = tl.arange(0, K)[None, :]  # (1, K)
    mask = offs_k < k
    # Loaded again: a key lacks the sign of a zero, and the bits of a NaN.
    values = tl.load(x_rows + index, mask=mask)
    if SOFTMAX:
        wide = tl.where(mask, values.to(tl.float32), -float("inf"))
        wide = tl.exp(wide - tl.max(wide, axis=1, keep_dims=True))
        values = wide / tl.sum(wide, axis=1, keep_dims=True)
    offs = offs_m * k + offs_k  # (BLOCK_M, K)
    tl.store(values_ptr + offs, values, mask=mask)
    tl.store(indices_ptr + offs, index.to(tl.int64), mask=mask)


@triton.jit
def _topk_passes_kernel(
    x_ptr, values_ptr, indices_ptr, N, stride_xm, k, BLOCK_N: tl.constexpr
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    x_row = x_ptr + pid * stride_xm
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    key = _topk_key(tl.load(x_row + offs, mask=offs < N, other=0))
    # Below all keys, that of -inf too
    key = tl.where(offs < N, key, -(2**63))
    for j in range(k):
        index = tl.argmax(key, axis=0, tie_break_left=True)
        tl.store(values_ptr + pid * k + j, tl.load(x_row + index))
        tl.store(indices_ptr + pid * k + j, index.to(tl.int64))
        key = tl.where(offs == index, -(2**63), key)


@functools.cache
def _topk_plan(N, K):
    """Return how to launch for rows of N: with the least to sort."""
    block = max(K, triton.next_power_of_2(N))
    plans = []
    for log_length in range(TOPK_COLUMN.bit_length()):
        LENGTH = 2**log_length
        SETS = block // LENGTH
        if SETS < K:
            break
        for log_part in range(max(1, log_length)):
            PART = 2**log_part
            sorts = [SETS]
            sorts += [K * LENGTH // PART] if LENGTH > 1 else []
            sorts += [K * PART] if PART > 1 else []
            # For a word of the first sort, a column is read and packed.
            cost = SETS + sum(sorts) + TOPK_STEP * len(sorts)
            plans.append((cost, len(sorts), -SETS, LENGTH, PART))
    _, _, SETS, LENGTH, PART = min(plans)
    SETS = -SETS
    return {
        "K": K,
        "BLOCK_M": max(1, min(TOPK_WARP // SETS, TOPK_TILE // block)),
        "SETS": SETS,
        "LENGTH": LENGTH,
        "PART": PART,
        "num_warps": max(1, min(8, SETS // TOPK_WARP)),
    }


def _topk_check(x, k):
    """Return the length of x's rows; raise for what the op does not take."""
    if x.dtype not in TOPK_FLOATS:
        raise TypeError(f"topk takes a float tensor, not {x.dtype}")
    N = int(x.shape[-1]) if x.ndim else 1
    if N > TOPK_LONGEST:
        raise ValueError(
            f"topk takes rows of up to {TOPK_LONGEST} elements, not {N}; "
            "topk_long takes longer ones"
        )
    if not 0 <= k <= min(N, TOPK_MOST):
        raise ValueError(
            f"topk takes k from 0 to the row's length {N}, and up to "
            f"{TOPK_MOST}, not {k}"
        )
    return N


def _topk_launch(
    x,
    k,
    apply_softmax=False,
    kernel=_topk_kernel,
    passes=_topk_passes_kernel,
):
    N = _topk_check(x, k)
    # As in PyTorch, a tensor without dimensions has one, whatever k.
    k = int(k) if x.ndim else 1
    shape = (*x.shape[:-1], k) if x.ndim else ()
    values = x.new_empty(shape)
    indices = x.new_empty(shape, dtype=torch.int64)
    if values.numel() == 0:
        return values, indices
    stride = N
    if not x.is_contiguous():
        x = x.reshape(-1, N)
        x = x if x.stride(1) == 1 else x.contiguous()
        stride = int(x.stride(0))
    M = values.numel() // k
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if x.dtype == torch.float64:
            BLOCK_N = triton.next_power_of_2(N)
            passes[(M,)](x, values, indices, N, stride, k, BLOCK_N=BLOCK_N)
            return values.softmax(-1) if apply_softmax else values, indices
        # A network sorts a power of two, and two elements at least.
        plan = _topk_plan(N, max(2, triton.next_power_of_2(k)))
        kernel[(triton.cdiv(M, plan["BLOCK_M"]),)](
            x, values, indices, M, N, stride, k, **plan, SOFTMAX=apply_softmax
        )
    return values, indices


@triton_op(f"{TOPK_NAMESPACE}::topk", mutates_args={})
def topk(
    x: torch.Tensor, k: int, apply_softmax: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row, sorted, and their indices.

    As ``torch.topk(x, k)`` along the last dimension, but returns a plain tuple:
    NaN is the largest, and the two zeros are equal. Of equals, the one with the
    lower index comes first. ``k`` is an int. Takes float16, bfloat16, float32
    or float64, of any shape and strides, with rows of up to 8192 elements and k
    of up to 128. The values have the dtype of ``x``, the indices are int64, and
    both are contiguous and deterministic. Raises TypeError for other dtypes,
    and ValueError for longer rows and other k. The values have a gradient,
    which has one too.

    With ``apply_softmax``, the values are the softmax of the k largest, as the
    router of a mixture of experts takes it: it adds up to 1 in each row. In a
    row with +inf or NaN, or with nothing but -inf among the k, it is NaN.

    Rounding: none, as values are copied. The softmax is computed in float32, or
    in float64 for float64, and is rounded once.
    """
    passes = wrap_triton(_topk_passes_kernel)
    kernel = wrap_triton(_topk_kernel)
    return _topk_launch(x, k, apply_softmax, kernel, passes)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
TOPK_LIBRARY = Library(TOPK_NAMESPACE, "FRAGMENT")
TOPK_LIBRARY.impl("topk", _topk_launch, "CUDA")


def _topk_setup(ctx, inputs, output):
    x, _, softmax = inputs
    values, indices = output
    ctx.shape = x.shape
    ctx.save_for_backward(indices, values if softmax else None)
    ctx.mark_non_differentiable(indices)


def _topk_gradient(ctx, grad, _):
    indices, weights = ctx.saved_tensors
    if weights is not None:
        grad = torch.ops.aten._softmax_backward_data(
            grad, weights, -1, grad.dtype
        )
    # No element is found twice, so there is no order of additions.
    dx = grad.new_zeros(ctx.shape).scatter_(-1, indices, grad)
    return dx, None, None


topk.register_autograd(_topk_gradient, setup_context=_topk_setup)
