"""Cross-entropy loss over the last dimension, for large vocabularies.

Computes logsumexp(logits) - logits[target] for each row, by the online method
(Milakov and Gimelshein, 2018, arXiv:1805.02867), with ignore_index, class
weights, label smoothing, a softcap, z-loss and all reductions. Each logit is
read once; the backward needs the logits and two numbers per row. Unlike in
``torch.nn.functional.cross_entropy``, the loss is float32 for half precision, a
target out of range gives NaN, and there are no probability targets. One program
reads a row, so few rows leave part of the GPU idle. ``linear_cross_entropy``
saves memory.
Deterministic on a given GPU model. There is no second derivative.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

CROSS_ENTROPY_NAMESPACE = "triton_gallery"
CROSS_ENTROPY_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
CROSS_ENTROPY_LOG2_E = tl.constexpr(math.log2(math.e))
CROSS_ENTROPY_WARPS = 4  # of a program of the forward, for many rows
CROSS_ENTROPY_MOST = 32  # of a program of the forward, for few rows
CROSS_ENTROPY_BACKWARD = 8  # warps of the backward
CROSS_ENTROPY_SUM = 8192  # losses that the mean adds up at one time


@triton.jit
def _cross_entropy_exp(x):
    # tl.exp takes more instructions, for results below the normal numbers.
    return tl.exp2(x * CROSS_ENTROPY_LOG2_E)


@triton.jit
def _cross_entropy_tanh(x):
    # 1 - 2 / (exp + 1) cancels where x is small. There we take Lambert's
    # continued fraction, cut off after 13, as one quotient. It is off by less
    # than float64 rounds.
    s = x * x
    p = 135135 + s * (17325 + s * (378 + s))
    q = 135135 + s * (62370 + s * (3150 + s * 28))
    # Where exp is inf, tanh is 1.
    large = 1 - 2 / (_cross_entropy_exp(2 * x) + 1)
    return tl.where(s < 0.25, x * p / q, large)


@triton.jit
def _cross_entropy_load(
    ptrs, mask, other, ACC: tl.constexpr, SOFTCAP: tl.constexpr
):
    x = tl.load(ptrs, mask=mask, other=other).to(ACC)
    if SOFTCAP > 0:
        # What is masked remains other.
        tanh = _cross_entropy_tanh(x * (1 / SOFTCAP))
        x = tl.where(mask, SOFTCAP * tanh, other)
    return x


@triton.jit
def _cross_entropy_target(targets_ptr, row, N, ignore_index):
    """Return a row's target, if the row counts, and if the target is known.

    A target is known if the row counts and has such a column.
    """
    target = tl.load(targets_ptr + row)
    counts = target != ignore_index
    return target, counts, counts & (target >= 0) & (target < N)


@triton.jit
def _cross_entropy_divide(start, N, VEC: tl.constexpr):
    """Return where a row's body begins, its length, the edges and a mask."""
    head = ((VEC - start % VEC) % VEC).to(tl.int32)
    # A row may end before its first multiple. A rest of less than VEC elements
    # is left to the edge: with it, a mask would end within a wide load.
    length = tl.maximum(N - head, 0) // VEC * VEC
    # Both edges are one tile, so they take one load. What follows the head is
    # moved past the body.
    edge = tl.arange(0, 2 * VEC)  # (2 * VEC,)
    offs_e = tl.where(edge < head, edge, edge + length)
    return head, length, offs_e, edge < N - length


@triton.jit
def _cross_entropy_weigh(x, weight_ptr, offs, mask, SMOOTHING: tl.constexpr):
    """Return x times the weights of its classes. Smoothing alone needs them."""
    if weight_ptr is not None and SMOOTHING > 0:
        x *= tl.load(weight_ptr + offs, mask=mask, other=0)
    return x


@triton.jit
def _cross_entropy_kernel(
    x_ptr,
    targets_ptr,
    losses_ptr,
    stats_ptr,
    M,
    N,
    stride_xm,
    ignore_index,
    ACC: tl.constexpr,
    SMOOTHING: tl.constexpr,
    VEC: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is none
    LSE_SQUARE_SCALE: tl.constexpr,
    weight_ptr,  # of classes; then _cross_entropy_sums are in the stats
    predicted_at,  # where in the stats the predictions are, if any
):
    # The first maximum. With -inf, the difference of two could be NaN.
    LOWEST: tl.constexpr = (
        -1.7976931348623157e308 if tl.float64 == ACC else -3.4028234663852886e38
    )
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    target, counts, known = _cross_entropy_target(
        targets_ptr, row, N, ignore_index
    )
    x_row = row * stride_xm
    # A wrong target would read another row. Its NaN makes the loss NaN.
    x_t = _cross_entropy_load(
        x_ptr + x_row + target, known, float("nan"), ACC, SOFTCAP
    )
    head, length, offs_e, mask_e = _cross_entropy_divide(x_row, N, VEC)
    # Dividing and multiplying tells the compiler: a multiple of VEC.
    x_body = x_ptr + (x_row + head) // VEC * VEC
    read_e = tl.where(counts, mask_e, False)
    x_e = _cross_entropy_load(
        x_ptr + x_row + offs_e, read_e, -float("inf"), ACC, SOFTCAP
    )
    block = (
        tl.arange(0, LINES)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    )  # (LINES, BLOCK_N)
    # Each column has its own m and s: in the loop, no thread waits.
    m = tl.full((BLOCK_N,), LOWEST, dtype=ACC)
    s = tl.zeros((BLOCK_N,), dtype=ACC)
    mean = tl.zeros((BLOCK_N,), dtype=ACC)
    best = tl.full((BLOCK_N,), N, dtype=tl.int32)
    share = 1 / tl.cast(N, ACC)
    # A row that does not count is not read.
    for start in range(0, tl.where(counts, N, 0), LINES * BLOCK_N):
        offs = start + block  # (LINES, BLOCK_N)
        mask = offs < length
        x = _cross_entropy_load(
            x_body + offs, mask, -float("inf"), ACC, SOFTCAP
        )
        larger = tl.maximum(m, tl.max(x, axis=0))  # (BLOCK_N,)
        if predicted_at is not None:
            first = tl.min(tl.where(x == larger[None, :], offs, N), axis=0)
            best = tl.where(larger > m, first, best)
        # What is in s was added while the maximum was m.
        s *= _cross_entropy_exp(m - larger)
        s += tl.sum(_cross_entropy_exp(x - larger[None, :]), axis=0)
        m = larger
        if SMOOTHING > 0:
            # Each is divided first, as the sum of logits could be infinite.
            x = _cross_entropy_weigh(
                x * share, weight_ptr, head + offs, mask, SMOOTHING
            )
            mean += tl.sum(tl.where(mask, x, 0), axis=0)
    # The row has edges, too, which the loop left out.
    top = tl.maximum(tl.max(m, axis=0), tl.max(x_e, axis=0))
    total = tl.sum(s * _cross_entropy_exp(m - top), axis=0)
    total += tl.sum(_cross_entropy_exp(x_e - top), axis=0)
    if predicted_at is not None:
        best = tl.min(tl.where(m == top, head + best, N), axis=0)
        best = tl.minimum(best, tl.min(tl.where(x_e == top, offs_e, N), axis=0))
        # A row that has no number but -inf has no larger one.
        best = tl.where(counts, tl.where(best < N, best, 0), -1)
        # The bits of an integer, as the stats have one dtype
        best = best.to(tl.int64 if tl.float64 == ACC else tl.int32)
        tl.store(stats_ptr + predicted_at + row, best.to(ACC, bitcast=True))
    # The logarithm is small. It is lost if it is added to a large top first.
    loss = tl.log(total) + (top - x_t)
    if weight_ptr is not None:
        loss *= tl.load(weight_ptr + target, mask=known, other=0)
    if SMOOTHING > 0:
        middle = tl.sum(mean, axis=0)
        part = _cross_entropy_weigh(
            x_e * share, weight_ptr, offs_e, mask_e, SMOOTHING
        )
        middle += tl.sum(tl.where(mask_e, part, 0), axis=0)
        if weight_ptr is None:
            smooth = tl.log(total) + (top - middle)
        else:
            average = tl.load(stats_ptr + 2 * M + 2)
            smooth = tl.log(total) * average + (top * average - middle)
        loss = loss * (1 - SMOOTHING) + smooth * SMOOTHING
    if LSE_SQUARE_SCALE > 0:
        lse = tl.log(total) + top
        square = LSE_SQUARE_SCALE * lse * lse
        if weight_ptr is not None:
            square *= tl.load(stats_ptr + 2 * M + 1)
        loss += square
    tl.store(stats_ptr + row, top)
    tl.store(stats_ptr + M + row, total)
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))


@triton.jit
def _cross_entropy_mean_kernel(
    losses_ptr,
    targets_ptr,
    loss_ptr,
    scale_ptr,
    M,
    ignore_index,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), dtype=ACC)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    # One program, so that the losses are added in the same order each time.
    for start in range(0, M, BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        mask = offs < M
        total += tl.load(losses_ptr + offs, mask=mask, other=0)
        targets = tl.load(targets_ptr + offs, mask=mask, other=0)
        count += (mask & (targets != ignore_index)).to(tl.int32)
    # Without a row that counts this is 0 / 0, so NaN, as in PyTorch.
    rows = tl.sum(count, axis=0).to(ACC)
    tl.store(loss_ptr, tl.sum(total, axis=0) / rows)
    tl.store(scale_ptr, 1 / rows)


@triton.jit
def _cross_entropy_backward_kernel(
    grad_ptr,
    x_ptr,
    targets_ptr,
    stats_ptr,
    d_ptr,
    M,
    N,
    stride_gm,
    stride_xm,
    ignore_index,
    ACC: tl.constexpr,
    MEAN: tl.constexpr,
    SMOOTHING: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is none
    LSE_SQUARE_SCALE: tl.constexpr,
    weight_ptr,  # of classes; then _cross_entropy_sums are in the stats
):
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    part = tl.program_id(axis=1)
    target, counts, known = _cross_entropy_target(
        targets_ptr, row, N, ignore_index
    )
    top = tl.load(stats_ptr + row)
    total = tl.load(stats_ptr + M + row)
    grad = tl.load(grad_ptr + row * stride_gm)
    if MEAN:
        grad *= tl.load(stats_ptr + 2 * M)
    # A wrong target makes the gradient of its row NaN, like the loss.
    grad = tl.where(known, grad, float("nan"))
    # An ignored row is not read: 0 * exp(0 - 0) is 0, whatever it holds.
    grad = tl.where(counts, grad, 0.0)
    a = grad / tl.where(counts, total, 1.0)
    top = tl.where(counts, top, 0.0)
    # The gradient of lse is the softmax, which a multiplies.
    of_lse = 1.0
    if weight_ptr is not None:
        w_t = tl.load(weight_ptr + target, mask=known, other=0)
        average = tl.load(stats_ptr + 2 * M + 2)
        of_lse = w_t * (1 - SMOOTHING) + average * SMOOTHING
    if LSE_SQUARE_SCALE > 0:
        lse = tl.log(tl.where(counts, total, 1.0)) + top
        of_square = 2 * LSE_SQUARE_SCALE * lse
        if weight_ptr is not None:
            of_square *= tl.load(stats_ptr + 2 * M + 1)
        of_lse += of_square
    if weight_ptr is not None:
        a = tl.where(counts, a * of_lse, 0.0)
    elif LSE_SQUARE_SCALE > 0:
        a *= of_lse
    b = grad * SMOOTHING / N
    hit = grad * (1 - SMOOTHING)
    if weight_ptr is not None:
        hit *= w_t
    x_row, d_row = row * stride_xm, row * N
    head, length, offs_e, mask_e = _cross_entropy_divide(x_row, N, VEC)
    x_body = x_ptr + (x_row + head) // VEC * VEC
    d_body = d_ptr + (d_row + head) // VEC * VEC
    # One of the row's programs has the edges.
    mask_e = tl.where(part == 0, mask_e, False)
    read_e = tl.where(counts, mask_e, False)
    x_e = _cross_entropy_load(x_ptr + x_row + offs_e, read_e, 0.0, ACC, SOFTCAP)
    b_e = _cross_entropy_weigh(b, weight_ptr, offs_e, mask_e, SMOOTHING)
    d_e = _cross_entropy_exp(x_e - top) * a - b_e  # (2 * VEC,)
    d_e = tl.where(offs_e == target, d_e - hit, d_e)
    if SOFTCAP > 0:
        d_e *= 1 - (x_e * (1 / SOFTCAP)) * (x_e * (1 / SOFTCAP))
    tl.store(d_ptr + d_row + offs_e, d_e, mask=mask_e)
    step = tl.num_programs(axis=1) * BLOCK_N
    for start in range(part * BLOCK_N, N, step):
        offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        mask = offs < length
        read = tl.where(counts, mask, False)
        x = _cross_entropy_load(x_body + offs, read, 0.0, ACC, SOFTCAP)
        b_n = _cross_entropy_weigh(b, weight_ptr, offs + head, mask, SMOOTHING)
        d = _cross_entropy_exp(x - top) * a - b_n  # (BLOCK_N,)
        d = tl.where(offs + head == target, d - hit, d)
        if SOFTCAP > 0:
            d *= 1 - (x * (1 / SOFTCAP)) * (x * (1 / SOFTCAP))
        tl.store(d_body + offs, d, mask=mask)


def _cross_entropy_check(
    logits, targets, label_smoothing, reduction, softcap, scale, weight
):
    if logits.dtype not in CROSS_ENTROPY_ACC or targets.dtype != torch.int64:
        raise TypeError(
            "cross_entropy takes float logits and int64 targets, not "
            f"{logits.dtype} and {targets.dtype}"
        )
    if (
        logits.ndim == 0
        or logits.shape[:-1] != targets.shape
        or logits.device != targets.device
        or logits.shape[-1] > 2**30
    ):
        raise ValueError(
            "cross_entropy takes logits (..., N) and targets (...) on one "
            "device, with N up to 2**30, not "
            f"{tuple(logits.shape)} and {tuple(targets.shape)} on "
            f"{logits.device} and {targets.device}"
        )
    if not (
        0 <= label_smoothing <= 1
        and 0 < (1 if softcap is None else softcap) < math.inf
        and 0 <= scale < math.inf
    ):
        raise ValueError(
            "cross_entropy takes label_smoothing from 0 to 1, a softcap above "
            "0 or None, and lse_square_scale from 0, not "
            f"{label_smoothing}, {softcap} and {scale}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            "cross_entropy takes a reduction mean, sum or none, not "
            f"{reduction!r}"
        )
    if weight is None:
        return
    if weight.dtype not in CROSS_ENTROPY_ACC:
        raise TypeError(
            f"cross_entropy takes a float weight, not {weight.dtype}"
        )
    if weight.shape != logits.shape[-1:] or weight.device != logits.device:
        raise ValueError(
            "cross_entropy takes a weight (N,) where the logits are, not "
            f"{tuple(weight.shape)} on {weight.device}"
        )


def _cross_entropy_sums(weight, targets, ignore_index, mean):
    """Return three sums of class weights that the kernels need.

    They are one over the sum of the targets' weights, that sum divided by the
    number of rows that count, and the mean of all weights. The first two are 1
    where the loss is no mean.
    """
    average = weight.mean()
    if not mean:
        return torch.stack([torch.ones_like(average)] * 2 + [average])
    N = weight.numel()
    counts = targets != ignore_index
    known = counts & (targets >= 0) & (targets < N)
    # All other targets have the weight past the last one, which is 0.
    padded = torch.nn.functional.pad(weight, (0, 1))
    total = padded[torch.where(known, targets, N)].sum()
    return torch.stack([1 / total, total / counts.sum(), average])


def _cross_entropy_rows(x, M):
    """Return a tensor as a matrix with contiguous rows, and their distance."""
    N = int(x.shape[-1])
    if x.is_contiguous():
        return x, N
    x = x.reshape(M, N)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, int(x.stride(0))


@functools.cache
def _cross_entropy_processors(device):
    """Return a GPU's number of multiprocessors; 4 for the interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


def _cross_entropy_plan(x, M):
    """Return how to launch the forward for M rows."""
    size, warps = x.element_size(), CROSS_ENTROPY_WARPS
    # float64 takes twice the registers.
    most = CROSS_ENTROPY_MOST * 4 // max(4, size)
    processors = _cross_entropy_processors(x.device)
    while warps < most and 2 * warps * M <= 16 * processors:
        warps *= 2
    return {
        "ACC": CROSS_ENTROPY_ACC[x.dtype],
        "VEC": 16 // size,
        # With more lines, 32 warps would not have enough registers.
        "LINES": 4 if warps == CROSS_ENTROPY_MOST else 8,
        "BLOCK_N": warps * 512 // size,
        "num_warps": warps,
    }


def _cross_entropy_plan_backward(x, M, N, stride):
    """Return a grid and how to launch the backward on it."""
    size = x.element_size()
    # A block has 64 bytes for each thread.
    BLOCK_N = CROSS_ENTROPY_BACKWARD * 2048 // size
    # With few rows, each is shared by as many programs as fill the GPU.
    many = 8 * _cross_entropy_processors(x.device)
    parts = max(1, min(triton.cdiv(N, BLOCK_N), many // M))
    # Rows of x and of d need the same alignment, or they have no common body.
    alike = (N - stride) * size % 16 == 0
    return (M, parts), {
        "ACC": CROSS_ENTROPY_ACC[x.dtype],
        "VEC": 16 // size if alike else 1,
        "BLOCK_N": BLOCK_N,
        "num_warps": CROSS_ENTROPY_BACKWARD,
    }


def _cross_entropy_launch(
    logits,
    targets,
    ignore_index,
    label_smoothing,
    reduction,
    softcap=None,
    lse_square_scale=0.0,
    weight=None,
    predict=False,
    kernel=_cross_entropy_kernel,
    mean_kernel=_cross_entropy_mean_kernel,
):
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    _cross_entropy_check(logits, targets, *options)
    mean = reduction == "mean"
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = targets.new_empty(targets.shape, dtype=wide)
    M, N = targets.numel(), int(logits.shape[-1])
    # Maxima, sums and, after them, one over the rows that count, or the sums of
    # class weights; then predictions
    end = 2 * M + (int(mean) if weight is None else 3)
    stats = losses.new_empty(end + (M if predict else 0))
    targets = targets.contiguous()
    if weight is not None:
        weight = weight.to(wide).contiguous()
        sums = weight, targets, ignore_index, mean
        stats[2 * M : end] = _cross_entropy_sums(*sums)
    # Triton launches on the current GPU, which may not be that of logits.
    with torch.accelerator.device_index(logits.device.index):
        if M > 0:
            x, stride = _cross_entropy_rows(logits, M)
            sizes = M, N, stride, ignore_index
            kernel[(M,)](
                *(x, targets, losses, stats, *sizes),
                SMOOTHING=label_smoothing,
                SOFTCAP=softcap or 0.0,
                LSE_SQUARE_SCALE=lse_square_scale,
                weight_ptr=weight,
                predicted_at=end if predict else None,
                **_cross_entropy_plan(x, M),
            )
        if not mean:
            return losses if reduction == "none" else losses.sum(), stats
        if weight is not None:
            return losses.sum() * stats[2 * M], stats
        loss = losses.new_empty(())
        few = M <= CROSS_ENTROPY_SUM // 8
        pointers = losses, targets, loss, stats[2 * M :]
        mean_kernel[(1,)](
            *pointers,
            M,
            ignore_index,
            ACC=CROSS_ENTROPY_ACC[logits.dtype],
            BLOCK=CROSS_ENTROPY_SUM // 8 if few else CROSS_ENTROPY_SUM,
            num_warps=4 if few else 32,
        )
    return loss, stats


def _cross_entropy_backward_launch(
    grad,
    logits,
    targets,
    stats,
    ignore_index,
    label_smoothing,
    reduction,
    softcap=None,
    lse_square_scale=0.0,
    weight=None,
    kernel=_cross_entropy_backward_kernel,
):
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    _cross_entropy_check(logits, targets, *options)
    each = reduction == "none"
    if grad.dtype != stats.dtype or (each and grad.shape != targets.shape):
        raise ValueError(
            "cross_entropy_backward takes a gradient like the loss, not "
            f"{grad.dtype} of {tuple(grad.shape)}"
        )
    d = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if d.numel() == 0:
        return d
    M, N = targets.numel(), int(logits.shape[-1])
    x, stride = _cross_entropy_rows(logits, M)
    grid, plan = _cross_entropy_plan_backward(x, M, N, stride)
    pointers = grad.contiguous(), x, targets.contiguous(), stats, d
    if weight is not None:
        weight = weight.to(stats.dtype).contiguous()
    sizes = M, N, 1 if each else 0, stride, ignore_index
    with torch.accelerator.device_index(logits.device.index):
        kernel[grid](
            *(*pointers, *sizes),
            MEAN=reduction == "mean",
            SMOOTHING=label_smoothing,
            SOFTCAP=softcap or 0.0,
            LSE_SQUARE_SCALE=lse_square_scale,
            weight_ptr=weight,
            **plan,
        )
    return d


@triton_op(f"{CROSS_ENTROPY_NAMESPACE}::cross_entropy", mutates_args={})
def cross_entropy_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    weight: torch.Tensor | None = None,
    predict: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and what the backward needs of each row.

    Where predictions are wanted, the second result ends with them.
    """
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    return _cross_entropy_launch(
        *(logits, targets, ignore_index, *options, predict),
        wrap_triton(_cross_entropy_kernel),
        wrap_triton(_cross_entropy_mean_kernel),
    )


@triton_op(
    f"{CROSS_ENTROPY_NAMESPACE}::cross_entropy_backward", mutates_args={}
)
def cross_entropy_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    stats: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits, given that of the loss."""
    kernel = wrap_triton(_cross_entropy_backward_kernel)
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    return _cross_entropy_backward_launch(
        grad, logits, targets, stats, ignore_index, *options, kernel
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
CROSS_ENTROPY_LIBRARY = Library(CROSS_ENTROPY_NAMESPACE, "FRAGMENT")
CROSS_ENTROPY_LIBRARY.impl("cross_entropy", _cross_entropy_launch, "CUDA")
CROSS_ENTROPY_LIBRARY.impl(
    "cross_entropy_backward", _cross_entropy_backward_launch, "CUDA"
)


def _cross_entropy_setup(ctx, inputs, output):
    logits, targets, *ctx.options, weight, _ = inputs
    if weight is not None and weight.requires_grad:
        raise ValueError("cross_entropy has no gradient for the weight")
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # stats have none: no zeros for them
    ctx.save_for_backward(logits, targets, output[1], weight)


def _cross_entropy_gradient(ctx, grad, _):
    d = None
    if grad is not None:
        *tensors, weight = ctx.saved_tensors
        d = cross_entropy_backward(grad, *tensors, *ctx.options, weight)
    return d, *[None] * 8


cross_entropy_forward.register_autograd(
    _cross_entropy_gradient, setup_context=_cross_entropy_setup
)


def _cross_entropy_accuracy(predicted, targets, ignore_index, reduction):
    """Return how often the prediction is the target."""
    counts = targets != ignore_index
    hits = (predicted == targets) & counts
    return hits.float() if reduction == "none" else hits.sum() / counts.sum()


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    weight: torch.Tensor | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the cross entropy of logits (..., N) with targets (...).

    As ``torch.nn.functional.cross_entropy`` with rows along the last dimension.
    Takes logits of float16, bfloat16, float32 or float64 and any layout, with N
    up to 2**30, and int64 targets, but no probabilities as targets. The loss is
    float32 (float64 for float64): with ``reduction="mean"`` the mean over the
    rows whose target is not ``ignore_index``, NaN if there are none; with "sum"
    the sum; with "none" a loss for each row, in the shape of ``targets``, which
    is 0 where ignored. An ignored row is not read, and its gradient is 0. If
    any other target is not in range(N), the loss is NaN, and so is that row's
    gradient.

    ``weight`` has a factor (N,) for each class, of any of these dtypes, and no
    gradient: it multiplies the loss of its targets, and with
    ``label_smoothing`` each class's part. Then the mean is the sum divided by
    the sum of the targets' weights.

    With a ``softcap`` above 0, the logits become softcap * tanh(logits /
    softcap), as in Gemma 2 (https://arxiv.org/abs/2408.00118).
    ``lse_square_scale`` adds lse_square_scale * logsumexp(logits)**2 to the
    loss of each row that is not ignored: the z-loss of PaLM
    (https://arxiv.org/abs/2204.02311), under its name in Liger Kernel. As
    there, it has no weight, and its mean is over the rows.

    With ``return_token_accuracy``, the loss comes in a tuple, followed by the
    share of the rows not ignored whose largest logit is their target's, in
    float32; with ``reduction="none"`` it is 1 or 0 for each row, and 0 where
    ignored. With ``return_predicted_tokens``, the last of the tuple is the
    class of each row's largest logit, the first of equals, in int64, and -1
    where ignored. Both are Liger Kernel's.

    Loss and gradient are deterministic on one kind of GPU. The gradient is
    contiguous and has the dtype of the logits. Second derivatives are not
    supported. Raises TypeError for other dtypes, and ValueError for other
    shapes, for tensors on two devices, for longer rows, and for options that
    are not as above. The online log-sum-exp: https://arxiv.org/abs/1805.02867

    Where a warp has 64 threads, as on MI300, a program of 32 warps does not
    run. The mean of more than 1024 rows takes one. So do logits of at most half
    as many rows as the GPU has multiprocessors, except in float64.

    Rounding: sums are in float32, or float64 for float64, and the loss stays
    so. The gradient is computed in that type and rounded once.
    """
    predict = return_token_accuracy or return_predicted_tokens
    loss, stats = cross_entropy_forward(
        logits,
        targets,
        ignore_index,
        label_smoothing,
        reduction,
        softcap,
        lse_square_scale,
        weight,
        predict,
    )
    if predict:
        bits = torch.int64 if stats.dtype == torch.float64 else torch.int32
        predicted = stats[stats.numel() - targets.numel() :].view(bits)
        predicted = predicted.to(torch.int64).view(targets.shape)
    results = [loss]
    if return_token_accuracy:
        options = targets, ignore_index, reduction
        results.append(_cross_entropy_accuracy(predicted, *options))
    if return_predicted_tokens:
        results.append(predicted)
    return tuple(results) if len(results) > 1 else loss
