"""Cumulative sum over the last dimension, for a few long rows.

Like ``torch.cumsum(x, -1)``, for floating-point rows of up to 2**30 elements.
Many programs share a row: each keeps its tile in registers while it waits for
the sums of earlier tiles, so each element is read and written once. A variant
of the decoupled look-back (Merrill and Garland, "Single-pass Parallel Prefix
Scan with Decoupled Look-back", 2016) with a fixed order of additions, and so
deterministic on a given GPU model. Short rows are slow, as each program takes
the same steps for little data. For many rows, use ``cumsum``, whose programs do
not wait for each other. Gradients of any order.
"""

import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

CUMSUM_LONG_NAMESPACE = "triton_gallery"
CUMSUM_LONG_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
CUMSUM_LONG_LONGEST = 2**30  # elements; their offsets are int32
CUMSUM_LONG_TILE = 16 * 1024  # bytes at most, in the accumulator's type
CUMSUM_LONG_PLACES = 512  # programs that a launch should have, if it can
CUMSUM_LONG_GROUP = 128  # tiles
# The word that no program writes: as float64, its bits are a NaN.
CUMSUM_LONG_EMPTY = tl.constexpr(-1)
CUMSUM_LONG_NAN = tl.constexpr(0x7FF8000000000000)


@triton.jit
def _cumsum_long_swap(x, SIZE: tl.constexpr):
    """Swap neighbouring pieces of SIZE elements."""
    INT: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    pairs = tl.reshape(x, (x.numel // SIZE // 2, 2, SIZE))
    pairs = pairs.to(INT, bitcast=True)
    # The sum of two integers, less either, is the other, even if it overflows.
    swapped = tl.sum(pairs, axis=1, keep_dims=True, dtype=INT) - pairs
    return tl.reshape(swapped.to(x.dtype, bitcast=True), x.shape)


@triton.jit
def _cumsum_long_turn(x, VEC: tl.constexpr):
    """Turn round each vector of up to 8 elements."""
    if VEC == 8:
        x = _cumsum_long_swap(x, 4)
    if VEC >= 4:
        x = _cumsum_long_swap(x, 2)
    if VEC >= 2:
        x = _cumsum_long_swap(x, 1)
    return x


@triton.jit
def _cumsum_long_publish(word_ptr, total):
    """Write a sum: the word is its own flag."""
    word = total.to(tl.int64, bitcast=True)
    # A NaN could have the bits of the word that no program writes.
    word = tl.where(total == total, word, CUMSUM_LONG_NAN)
    tl.atomic_xchg(word_ptr, word, sem="relaxed")


@triton.jit
def _cumsum_long_wait(word_ptrs, mask):
    """Return sums when all of them are written."""
    # Volatile: from memory each time, not from a register or a near cache.
    words = tl.load(word_ptrs, mask=mask, other=0, volatile=True)
    while tl.max((words == CUMSUM_LONG_EMPTY).to(tl.int32), axis=0) == 1:
        words = tl.load(word_ptrs, mask=mask, other=0, volatile=True)
    return words.to(tl.float64, bitcast=True)


@triton.jit
def _cumsum_long_kernel(
    x_ptr,
    y_ptr,
    words_ptr,
    tiles,
    N,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    # The first word is the counter and begins at -1. A ticket is int64, as a
    # row's offset has to be.
    ticket = tl.atomic_add(words_ptr, 1, sem="relaxed") + 1
    row = ticket // tiles
    tile = (ticket % tiles).to(tl.int32)
    block = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs = tile * BLOCK_N + block
    if REVERSE:
        # Vectors from the last to the first, each one from left to right.
        offs = N - VEC - tile * BLOCK_N - block // VEC * VEC + block % VEC
    mask = offs >= 0 if REVERSE else offs < N
    x_ptrs = x_ptr + row * stride_xm + offs  # (BLOCK_N,)
    x = tl.load(x_ptrs, mask=mask, other=0).to(ACC)
    total = tl.sum(x, axis=0).to(tl.float64)
    word_ptr = words_ptr + 1 + ticket
    closes = tile % GROUP == GROUP - 1
    # Before the scan, as others may wait for this word already.
    if not closes:
        _cumsum_long_publish(word_ptr, total)
    if REVERSE:
        x = _cumsum_long_turn(x, VEC)
    y = tl.cumsum(x, axis=0)  # (BLOCK_N,)
    if REVERSE:
        y = _cumsum_long_turn(y, VEC)
    # The last tile of the group before has the sum of everything up to there.
    before = tile // GROUP * GROUP - 1 + tl.arange(0, GROUP)  # (GROUP,)
    needed = (before >= 0) & (before < tile)
    sums = _cumsum_long_wait(word_ptr - tile + before, needed)
    carry = tl.sum(sums, axis=0)
    if closes:
        _cumsum_long_publish(word_ptr, carry + total)
    tl.store(y_ptr + row * N + offs, y + carry.to(ACC), mask=mask)


def _cumsum_long_check(name, x):
    """Raise for what the ops do not take."""
    if x.dtype not in CUMSUM_LONG_ACC:
        raise TypeError(f"{name} takes floating dtypes, not {x.dtype}")
    if x.shape[-1:].numel() > CUMSUM_LONG_LONGEST:
        raise ValueError(
            f"{name} takes rows of up to {CUMSUM_LONG_LONGEST} elements, "
            f"not {x.shape[-1]}"
        )


def _cumsum_long_plan(x, stride, REVERSE):
    """Return how to launch for the rows of a matrix."""
    M, N = x.shape
    size = max(4, x.element_size())
    BLOCK_N = CUMSUM_LONG_TILE // size
    while BLOCK_N > 1024 and M * triton.cdiv(N, BLOCK_N) < CUMSUM_LONG_PLACES:
        BLOCK_N //= 2
    BLOCK_N = min(BLOCK_N, triton.next_power_of_2(N))
    return {
        "ACC": CUMSUM_LONG_ACC[x.dtype],
        "VEC": math.gcd(N, stride, 16 // x.element_size()),
        "REVERSE": REVERSE,
        "GROUP": CUMSUM_LONG_GROUP,
        "BLOCK_N": BLOCK_N,
        "num_warps": 4 if BLOCK_N * size > 8 * 1024 else 2,
    }


def _cumsum_long_launch_either(name, x, kernel, REVERSE):
    _cumsum_long_check(name, x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    N = int(x.shape[-1]) if x.ndim else 1
    x = x.reshape(-1, N)
    x = x if x.stride(1) == 1 else x.contiguous()
    M, stride = x.shape[0], int(x.stride(0))
    plan = _cumsum_long_plan(x, stride, REVERSE)
    tiles = triton.cdiv(N, plan["BLOCK_N"])
    # A counter, and a word for each tile
    words = x.new_full((1 + M * tiles,), -1, dtype=torch.int64)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(M * tiles,)](x, y, words, tiles, N, stride, **plan)
    return y


def _cumsum_long_launch(x, kernel=_cumsum_long_kernel):
    return _cumsum_long_launch_either("cumsum_long", x, kernel, False)


def _cumsum_long_backward_launch(grad, kernel=_cumsum_long_kernel):
    name = "cumsum_long_backward"
    return _cumsum_long_launch_either(name, grad, kernel, True)


@triton_op(f"{CUMSUM_LONG_NAMESPACE}::cumsum_long", mutates_args={})
def cumsum_long(x: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of a few long rows, as torch.cumsum(x, -1).

    Takes a tensor of float16, bfloat16, float32 or float64, of any shape and
    layout, with rows of up to 2**30 elements. Sums up in float32 and from tile
    to tile in float64, or all in float64. The result has the shape and dtype of
    ``x``, is contiguous, and is deterministic on one kind of GPU: whatever the
    order in which programs run, each sum is added up in one order. NaN and inf
    reach all elements after them. Raises TypeError for other dtypes and
    ValueError for longer rows. Has gradients of any order. For many rows take
    ``cumsum``, whose programs do not wait for each other. After the decoupled
    look-back of Merrill and Garland, Single-pass Parallel Prefix Scan, 2016.

    Rounding: each tile is summed in float32 and added to a carry of float64, or
    all in float64; each result is rounded once.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    return _cumsum_long_launch(x, wrap_triton(_cumsum_long_kernel))


@triton_op(f"{CUMSUM_LONG_NAMESPACE}::cumsum_long_backward", mutates_args={})
def cumsum_long_backward(grad: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row.

    That is the gradient of ``cumsum_long``, whose gradient is ``cumsum_long``.
    All else is as in ``cumsum_long``.
    """
    return _cumsum_long_backward_launch(grad, wrap_triton(_cumsum_long_kernel))


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
CUMSUM_LONG_LIBRARY = Library(CUMSUM_LONG_NAMESPACE, "FRAGMENT")
CUMSUM_LONG_LIBRARY.impl("cumsum_long", _cumsum_long_launch, "CUDA")
CUMSUM_LONG_LIBRARY.impl(
    "cumsum_long_backward", _cumsum_long_backward_launch, "CUDA"
)

# Under torch.autocast it computes in float32, as PyTorch's own does.
cumsum_long.register_autocast("cpu", torch.float32)
cumsum_long.register_autocast("cuda", torch.float32)


def _cumsum_long_gradient(ctx, grad):
    return cumsum_long_backward(grad)


def _cumsum_long_backward_gradient(ctx, grad):
    return cumsum_long(grad)


cumsum_long.register_autograd(_cumsum_long_gradient)
cumsum_long_backward.register_autograd(_cumsum_long_backward_gradient)
