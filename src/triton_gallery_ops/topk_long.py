"""Top-k over the last dimension, for long rows such as logits.

Like ``torch.topk(x, k)``, sorted, for rows of up to 2**30 elements and k up to
128. NaN is the largest, and of equal values the one with the lower index comes
first, so the result is deterministic. A row is split into parts, one program
finds the k largest of a part, and further kernels merge them, so a single row
can use many programs. In a part, the maxima of columns rule out most elements
(compare Gaihre et al., 2021, "Dr. Top-k", arXiv:2109.08219). Small k is faster.
Float64, meant for gradcheck, reads a row k times. For rows of up to 8192
elements, use ``topk``. The values have gradients of any order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

TOPK_LONG_NAMESPACE = "triton_gallery"
TOPK_LONG_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOPK_LONG_MOST = 128  # for k
TOPK_LONG_PART = 4096  # elements of a part, at least
TOPK_LONG_WIDE = 2**16  # elements of a part, at most
TOPK_LONG_HALF = 2**14  # in half precision, where an index has 15 bits
TOPK_LONG_PROGRAMS = 1024  # that fill a GPU
TOPK_LONG_WARP = 128  # columns, or words to merge, for a warp
TOPK_LONG_STEP = 32  # words to sort that cost as much as one more sort
TOPK_LONG_MERGE = 1024  # words that a program merges


@triton.jit
def _topk_long_key(x):
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
def _topk_long_best(
    x_part, first, N, STEP: tl.constexpr, LENGTH: tl.constexpr, K: tl.constexpr
):
    """Return the words of the K best groups of elements, and their indices.

    A group begins at an element of ``first``. It has LENGTH elements, one in
    every STEP of the part. Its word is that of its largest element.
    """
    BITS: tl.constexpr = x_part.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    LAST: tl.constexpr = 2 ** (BITS - 1) - 1
    UNROLL: tl.constexpr = min(LENGTH, 8)
    # In float32, which is exact: not every GPU compares bfloat16.
    top = tl.full(first.shape, -float("inf"), dtype=tl.float32)  # (groups,)
    index = first
    for start in range(0, LENGTH, UNROLL):
        # At least UNROLL loads are in flight at a time.
        for member in tl.static_range(UNROLL):
            offs = first + (start + member) * STEP
            x = tl.load(x_part + offs, mask=offs < N, other=-float("inf"))
            wide = x.to(tl.float32)
            # NaN is larger than a number, and not larger than another NaN.
            larger = (~(wide <= top)) & (top == top)
            top = tl.where(larger, wide, top)
            index = tl.where(larger, offs, index)
    key = _topk_long_key(top.to(x_part.dtype.element_ty)).to(WORD)
    words = (key << BITS) | (LAST - index)
    # A group past the end has the key of -inf. It comes after the row's own
    # elements of -inf, because its index is larger.
    best = tl.topk(words, K)  # (K,)
    return best, LAST - (best & LAST).to(tl.int32)


@triton.jit
def _topk_long_split(
    index, SETS: tl.constexpr, LENGTH: tl.constexpr, SHARE: tl.constexpr
):
    """Return where the shares of groups begin, given an element of each."""
    GROUP: tl.constexpr = SETS * LENGTH
    first = index % SETS + index // GROUP * GROUP  # (K,)
    # A row's last part may have fewer than K groups. The index of a group past
    # the end is where this group begins.
    share = tl.arange(0, LENGTH // SHARE) * (SETS * SHARE)
    first = first[:, None] + share[None, :]
    return tl.reshape(first, (first.shape[0] * first.shape[1],))


@triton.jit
def _topk_long_store(x_row, values_row, indices_row, index, k, K: tl.constexpr):
    offs = tl.arange(0, K)  # (K,)
    mask = offs < k
    # Loaded again: a key lacks the sign of a zero, and the bits of a NaN.
    values = tl.load(x_row + index, mask=mask)
    tl.store(values_row + offs, values, mask=mask)
    tl.store(indices_row + offs, index.to(tl.int64), mask=mask)


@triton.jit
def _topk_long_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    words_ptr,
    N,
    stride_xm,
    k,
    parts,
    K: tl.constexpr,
    SETS: tl.constexpr,  # columns of a part
    LENGTH: tl.constexpr,  # of a column
    SHARE: tl.constexpr,  # of a column, for the second sort
    WHOLE: tl.constexpr,  # whether a part is the whole row
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    row = pid // parts
    start = (pid % parts).to(tl.int32) * (SETS * LENGTH)
    x_row = x_ptr + row * stride_xm
    x_part = x_row + start
    count = tl.minimum(N - start, SETS * LENGTH)
    first = tl.arange(0, SETS)  # (SETS,)
    best, index = _topk_long_best(x_part, first, count, SETS, LENGTH, K)
    if SHARE < LENGTH:
        first = _topk_long_split(index, SETS, LENGTH, SHARE)
        best, index = _topk_long_best(x_part, first, count, SETS, SHARE, K)
    if SHARE > 1:
        first = _topk_long_split(index, SETS, SHARE, 1)
        best, index = _topk_long_best(x_part, first, count, SETS, 1, K)
    if WHOLE:
        _topk_long_store(
            x_row, values_ptr + row * k, indices_ptr + row * k, index, k, K
        )
    else:
        # All parts of a row need indices from the row's start.
        key = best >> (16 if best.dtype == tl.int32 else 32)
        words = (key.to(tl.int64) << 32) | (2**31 - 1 - (start + index))
        tl.store(words_ptr + pid * K + tl.arange(0, K), words)


@triton.jit
def _topk_long_merge_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    words_ptr,
    merged_ptr,
    count,
    stride_xm,
    k,
    parts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # whether these are all words of a row
):
    pid = tl.program_id(axis=0).to(tl.int64)
    row = pid // parts
    offs = (pid % parts) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    words_row = words_ptr + row * count
    # No element has the lowest word, so what fills the block up never wins.
    words = tl.load(words_row + offs, mask=offs < count, other=-(2**63))
    best = tl.topk(words, K)  # (K,)
    if WHOLE:
        index = (2**31 - 1 - (best & (2**31 - 1))).to(tl.int32)
        x_row = x_ptr + row * stride_xm
        _topk_long_store(
            x_row, values_ptr + row * k, indices_ptr + row * k, index, k, K
        )
    else:
        tl.store(merged_ptr + pid * K + tl.arange(0, K), best)


@triton.jit
def _topk_long_passes_kernel(
    x_ptr, values_ptr, indices_ptr, N, stride_xm, k, BLOCK_N: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    x_row = x_ptr + pid * stride_xm
    # The last one found: at first, no key is above it and no index before it.
    found = tl.full((), 2**63 - 1, dtype=tl.int64)
    index = tl.full((), -1, dtype=tl.int32)
    for j in range(k):
        best = tl.full((BLOCK_N,), -(2**63), dtype=tl.int64)  # (BLOCK_N,)
        place = tl.full((BLOCK_N,), 2**31 - 1, dtype=tl.int32)  # (BLOCK_N,)
        for start in range(0, N, BLOCK_N):
            offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            key = _topk_long_key(tl.load(x_row + offs, mask=offs < N, other=0))
            # After the last one found, in the order of words
            after = (key < found) | ((key == found) & (offs > index))
            # A column's first maximum stays, so its index is the lowest.
            larger = after & (key > best) & (offs < N)
            best = tl.where(larger, key, best)
            place = tl.where(larger, offs, place)
        found = tl.max(best, axis=0)
        index = tl.min(tl.where(best == found, place, 2**31 - 1), axis=0)
        tl.store(values_ptr + pid * k + j, tl.load(x_row + index))
        tl.store(indices_ptr + pid * k + j, index.to(tl.int64))


@functools.cache
def _topk_long_columns(part, K):
    """Return the columns of a part with the least to sort."""
    plans = []
    for log_length in range(part.bit_length()):
        LENGTH = 2**log_length
        SETS = part // LENGTH
        if SETS < K:
            break
        for log_share in range(max(1, log_length)):
            SHARE = 2**log_share
            sorts = [SETS]
            sorts += [K * LENGTH // SHARE] if LENGTH > 1 else []
            sorts += [K * SHARE] if SHARE > 1 else []
            # For a word of the first sort, a column is read and packed.
            cost = SETS + sum(sorts) + TOPK_LONG_STEP * len(sorts)
            plans.append((cost, len(sorts), -SETS, LENGTH, SHARE))
    _, _, SETS, LENGTH, SHARE = min(plans)
    SETS = -SETS
    warps = max(1, min(8, SETS // TOPK_LONG_WARP))
    names = "K", "SETS", "LENGTH", "SHARE", "num_warps"
    return dict(zip(names, (K, SETS, LENGTH, SHARE, warps), strict=True))


def _topk_long_plan(M, N, K, size):
    """Return how to launch for M rows: long parts if there are many."""
    most = TOPK_LONG_HALF if size == 2 else TOPK_LONG_WIDE
    part = triton.next_power_of_2(triton.cdiv(M * N, TOPK_LONG_PROGRAMS))
    part = min(most, max(TOPK_LONG_PART, part), triton.next_power_of_2(N))
    return _topk_long_columns(max(part, K), K)


def _topk_long_check(x, k):
    """Return the length of x's rows; raise for what the op does not take."""
    if x.dtype not in TOPK_LONG_FLOATS:
        raise TypeError(f"topk_long takes a float tensor, not {x.dtype}")
    N = int(x.shape[-1]) if x.ndim else 1
    if N > 2**30:
        raise ValueError(
            f"topk_long takes rows of up to 2**30 elements, not {N}"
        )
    if not 0 <= k <= min(N, TOPK_LONG_MOST):
        raise ValueError(
            f"topk_long takes k from 0 to the row's length {N}, and up to "
            f"{TOPK_LONG_MOST}, not {k}"
        )
    return N


def _topk_long_launch(
    x,
    k,
    kernel=_topk_long_kernel,
    merge=_topk_long_merge_kernel,
    passes=_topk_long_passes_kernel,
    plan=None,
):
    N = _topk_long_check(x, k)
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
    out = x, values, indices
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if x.dtype == torch.float64:
            BLOCK_N = min(1024, triton.next_power_of_2(N))
            passes[(M,)](*out, N, stride, k, BLOCK_N=BLOCK_N)
            return values, indices
        # A network sorts a power of two, and two elements at least.
        K = max(2, triton.next_power_of_2(k))
        plan = plan or _topk_long_plan(M, N, K, x.element_size())
        parts = triton.cdiv(N, plan["SETS"] * plan["LENGTH"])
        words = indices if parts == 1 else indices.new_empty(M * parts * K)
        kernel[(M * parts,)](
            *out, words, N, stride, k, parts, WHOLE=parts == 1, **plan
        )
        while parts > 1:
            count = parts * K
            BLOCK = min(TOPK_LONG_MERGE, triton.next_power_of_2(count))
            parts = triton.cdiv(count, BLOCK)
            merged = words if parts == 1 else words.new_empty(M * parts * K)
            sizes = count, stride, k, parts
            merge[(M * parts,)](
                *out,
                words,
                merged,
                *sizes,
                K=K,
                BLOCK=BLOCK,
                WHOLE=parts == 1,
                num_warps=max(1, BLOCK // TOPK_LONG_WARP),
            )
            words = merged
    return values, indices


@triton_op(f"{TOPK_LONG_NAMESPACE}::topk_long", mutates_args={})
def topk_long(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row, sorted, and their indices.

    As ``torch.topk(x, k)`` along the last dimension, but returns a plain tuple:
    NaN is the largest, and the two zeros are equal. Of equals, the one with the
    lower index comes first. ``k`` is an int. Takes float16, bfloat16, float32
    or float64, of any shape and strides, with rows of up to 2**30 elements and
    k of up to 128. The values have the dtype of ``x``, the indices are int64,
    and both are contiguous and deterministic. Raises TypeError for other
    dtypes, and ValueError for longer rows and other k. The values have a
    gradient, which has one too.

    Rounding: none, as values are copied.
    """
    kernels = (
        wrap_triton(_topk_long_kernel),
        wrap_triton(_topk_long_merge_kernel),
        wrap_triton(_topk_long_passes_kernel),
    )
    return _topk_long_launch(x, k, *kernels)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
TOPK_LONG_LIBRARY = Library(TOPK_LONG_NAMESPACE, "FRAGMENT")
TOPK_LONG_LIBRARY.impl("topk_long", _topk_long_launch, "CUDA")


def _topk_long_setup(ctx, inputs, output):
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _topk_long_gradient(ctx, grad, _):
    (indices,) = ctx.saved_tensors
    # No element is found twice, so there is no order of additions.
    return grad.new_zeros(ctx.shape).scatter_(-1, indices, grad), None


topk_long.register_autograd(_topk_long_gradient, setup_context=_topk_long_setup)
