"""Cross-entropy loss that writes its gradient over the logits.

Returns the loss over the rows that are not ignored, and allocates no tensor of
the logits' size. A row is read twice; the L2 cache can serve the second read.
There is no autograd formula: call the op in the forward of a
``torch.autograd.Function`` that makes the logits and whose backward scales the
written gradient. That gradient is already rounded, so in float16 a loss scale
comes too late. Use ``cross_entropy`` if logits are needed afterward. Liger
Kernel writes over the logits too (Hsu et al., 2024, arXiv:2410.10989).
Deterministic on a given GPU model.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op

CROSS_ENTROPY_IN_PLACE_NAMESPACE = "triton_gallery"
CROSS_ENTROPY_IN_PLACE_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
CROSS_ENTROPY_IN_PLACE_LOG2_E = tl.constexpr(math.log2(math.e))
CROSS_ENTROPY_IN_PLACE_ROW = 112 * 1024  # bytes of a row for eight warps
CROSS_ENTROPY_IN_PLACE_COUNT = 8192  # targets that are counted at one time


@triton.jit
def _cross_entropy_in_place_exp(x):
    # tl.exp takes more instructions, for results below the normal numbers.
    return tl.exp2(x * CROSS_ENTROPY_IN_PLACE_LOG2_E)


@triton.jit
def _cross_entropy_in_place_tanh(x):
    # 1 - 2 / (exp + 1) cancels where x is small. There we take Lambert's
    # continued fraction, cut off after 13, as one quotient. It is off by less
    # than float64 rounds.
    s = x * x
    p = 135135 + s * (17325 + s * (378 + s))
    q = 135135 + s * (62370 + s * (3150 + s * 28))
    # Where exp is inf, tanh is 1.
    large = 1 - 2 / (_cross_entropy_in_place_exp(2 * x) + 1)
    return tl.where(s < 0.25, x * p / q, large)


@triton.jit
def _cross_entropy_in_place_cap(x, mask, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        # What is masked stays -inf, which adds nothing to a sum.
        tanh = _cross_entropy_in_place_tanh(x * (1 / SOFTCAP))
        x = tl.where(mask, SOFTCAP * tanh, -float("inf"))
    return x


@triton.jit
def _cross_entropy_in_place_slope(d, x, SOFTCAP: tl.constexpr):
    """Return the gradient of a logit, given that of the capped logit x."""
    if SOFTCAP > 0:
        d *= 1 - (x * (1 / SOFTCAP)) * (x * (1 / SOFTCAP))
    return d


@triton.jit
def _cross_entropy_in_place_weigh(
    x, weight_ptr, offs, mask, SMOOTHING: tl.constexpr
):
    """Return x times the weights of its classes. Smoothing alone needs them."""
    if weight_ptr is not None and SMOOTHING > 0:
        x *= tl.load(weight_ptr + offs, mask=mask, other=0)
    return x


@triton.jit
def _cross_entropy_in_place_count_kernel(
    targets_ptr,
    scale_ptr,
    M,
    ignore_index,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, M, BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        targets = tl.load(targets_ptr + offs, mask=offs < M, other=0)
        count += ((targets != ignore_index) & (offs < M)).to(tl.int32)
    tl.store(scale_ptr, 1 / tl.sum(count, axis=0).to(ACC))


@triton.jit
def _cross_entropy_in_place_kernel(
    x_ptr,
    targets_ptr,
    scale_ptr,
    losses_ptr,
    N,
    stride_xm,
    ignore_index,
    ACC: tl.constexpr,
    SMOOTHING: tl.constexpr,
    VEC: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is none
    LSE_SQUARE_SCALE: tl.constexpr,
    weight_ptr,  # of classes; then scale_ptr points to their sums
    predicted_ptr,  # where the predictions go, if anywhere
):
    # The first maximum. With -inf, the difference of two could be NaN.
    DOUBLE: tl.constexpr = tl.float64 == ACC
    LOWEST: tl.constexpr = (
        -1.7976931348623157e308 if DOUBLE else -3.4028234663852886e38
    )
    # In int32 a row's offset would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    x_row = row * stride_xm
    target = tl.load(targets_ptr + row)
    counts = target != ignore_index
    # A wrong target would read another row. Its NaN reaches all results.
    known = counts & (target >= 0) & (target < N)
    # Loaded before the second pass writes over it: between the passes all
    # threads of the program wait for each other.
    x_t = tl.load(x_ptr + x_row + target, mask=known, other=float("nan"))
    x_t = _cross_entropy_in_place_cap(x_t.to(ACC), True, SOFTCAP)
    # The body begins at the first multiple of 16 bytes. What is left at its end
    # is less than VEC elements: with it, a mask would end within a wide load.
    head = ((VEC - x_row % VEC) % VEC).to(tl.int32)
    length = tl.maximum(N - head, 0) // VEC * VEC
    # Dividing and multiplying tells the compiler: a multiple of VEC.
    x_body = x_ptr + (x_row + head) // VEC * VEC
    # Both edges are one tile: what follows the head is moved past the body.
    edge = tl.arange(0, 2 * VEC)  # (2 * VEC,)
    offs_e = tl.where(edge < head, edge, edge + length)
    mask_e = edge < N - length
    read_e = tl.where(counts, mask_e, False)
    x_e = tl.load(x_ptr + x_row + offs_e, mask=read_e, other=-float("inf"))
    x_e = _cross_entropy_in_place_cap(x_e.to(ACC), read_e, SOFTCAP)
    block = tl.arange(0, LINES)[:, None] * BLOCK_N  # (LINES, 1)
    block += tl.arange(0, BLOCK_N)[None, :]  # (LINES, BLOCK_N)
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
        x = tl.load(
            x_body + offs,
            mask=mask,
            other=-float("inf"),
            eviction_policy="evict_last",  # the second pass reads it again
        )
        # (LINES, BLOCK_N)
        x = _cross_entropy_in_place_cap(x.to(ACC), mask, SOFTCAP)
        larger = tl.maximum(m, tl.max(x, axis=0))  # (BLOCK_N,)
        if predicted_ptr is not None:
            first = tl.min(tl.where(x == larger[None, :], offs, N), axis=0)
            best = tl.where(larger > m, first, best)
        # What is in s was added while the maximum was m.
        s *= _cross_entropy_in_place_exp(m - larger)
        s += tl.sum(_cross_entropy_in_place_exp(x - larger[None, :]), axis=0)
        m = larger
        if SMOOTHING > 0:
            # Each is divided first, as the sum of logits could be infinite.
            x = _cross_entropy_in_place_weigh(
                x * share, weight_ptr, head + offs, mask, SMOOTHING
            )
            mean += tl.sum(tl.where(mask, x, 0), axis=0)
    # The row has edges, too, which the loop left out.
    top = tl.maximum(tl.max(m, axis=0), tl.max(x_e, axis=0))
    total = tl.sum(s * _cross_entropy_in_place_exp(m - top), axis=0)
    total += tl.sum(_cross_entropy_in_place_exp(x_e - top), axis=0)
    if predicted_ptr is not None:
        best = tl.min(tl.where(m == top, head + best, N), axis=0)
        best = tl.minimum(best, tl.min(tl.where(x_e == top, offs_e, N), axis=0))
        # A row that has no number but -inf has no larger one.
        best = tl.where(counts, tl.where(best < N, best, 0), -1)
        tl.store(predicted_ptr + row, best)
    # The logarithm is small. It is lost if it is added to a large top first.
    loss = tl.log(total) + (top - x_t)
    of_lse = 1.0  # the gradient of lse
    if weight_ptr is not None:
        w_t = tl.load(weight_ptr + target, mask=known, other=0)
        average = tl.load(scale_ptr + 2)
        loss *= w_t
        of_lse = w_t * (1 - SMOOTHING) + average * SMOOTHING
    if SMOOTHING > 0:
        middle = tl.sum(mean, axis=0)
        part = _cross_entropy_in_place_weigh(
            x_e * share, weight_ptr, offs_e, mask_e, SMOOTHING
        )
        middle += tl.sum(tl.where(mask_e, part, 0), axis=0)
        if weight_ptr is None:
            smooth = tl.log(total) + (top - middle)
        else:
            smooth = tl.log(total) * average + (top * average - middle)
        loss = loss * (1 - SMOOTHING) + smooth * SMOOTHING
    if LSE_SQUARE_SCALE > 0:
        lse = tl.log(total) + top
        factor = tl.full((), LSE_SQUARE_SCALE, dtype=ACC)
        if weight_ptr is not None:
            factor *= tl.load(scale_ptr + 1)
        loss += factor * lse * lse
        of_lse += 2 * factor * lse
    scale = tl.load(scale_ptr) if MEAN else tl.full((), 1.0, dtype=ACC)
    # If no row counts, scale is infinite and 0 * scale NaN, as in PyTorch.
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0) * scale)
    # A wrong target makes its row NaN. An ignored row is not read:
    # 0 * exp(0 - 0) is 0, whatever it holds.
    scale = tl.where(known, scale, float("nan"))
    scale = tl.where(counts, scale, 0.0)
    a = scale / tl.where(counts, total, 1.0)
    if weight_ptr is not None or LSE_SQUARE_SCALE > 0:
        a = tl.where(counts, a * of_lse, 0.0)
    top = tl.where(counts, top, 0.0)
    b = scale * SMOOTHING * share
    hit = scale * (1 - SMOOTHING)
    if weight_ptr is not None:
        hit *= w_t
    x_e = tl.where(counts, x_e, 0.0)
    b_e = _cross_entropy_in_place_weigh(
        b, weight_ptr, offs_e, mask_e, SMOOTHING
    )
    d_e = _cross_entropy_in_place_exp(x_e - top) * a - b_e  # (2 * VEC,)
    d_e = _cross_entropy_in_place_slope(d_e, x_e, SOFTCAP)
    tl.store(x_ptr + x_row + offs_e, d_e, mask=mask_e)
    # From the end to the start, because the caches saw the end last.
    last = (N - 1) // (LINES * BLOCK_N) * (LINES * BLOCK_N)
    for step in range(0, N, LINES * BLOCK_N):
        offs = last - step + block  # (LINES, BLOCK_N)
        mask = offs < length
        x = tl.load(
            x_body + offs,
            mask=tl.where(counts, mask, False),
            other=0,
            eviction_policy="evict_first",
        )
        x = _cross_entropy_in_place_cap(x.to(ACC), mask, SOFTCAP)
        b_n = _cross_entropy_in_place_weigh(
            b, weight_ptr, head + offs, mask, SMOOTHING
        )
        d = _cross_entropy_in_place_exp(x - top) * a - b_n
        d = _cross_entropy_in_place_slope(d, x, SOFTCAP)
        # No other program reads this row.
        tl.store(x_body + offs, d, mask=mask, eviction_policy="evict_first")
    # Without the barrier, a thread of the second pass could store later.
    b_t = _cross_entropy_in_place_weigh(b, weight_ptr, target, known, SMOOTHING)
    d_t = _cross_entropy_in_place_exp(x_t - top) * a - b_t - hit
    d_t = _cross_entropy_in_place_slope(d_t, x_t, SOFTCAP)
    tl.debug_barrier()
    tl.store(x_ptr + x_row + target, d_t, mask=known)


def _cross_entropy_in_place_check(
    logits, targets, label_smoothing, reduction, softcap, scale, weight
):
    name = "cross_entropy_in_place_"
    dtypes = logits.dtype, targets.dtype
    if (
        logits.dtype not in CROSS_ENTROPY_IN_PLACE_ACC
        or targets.dtype != torch.int64
    ):
        raise TypeError(
            f"{name} takes float logits and int64 targets, not "
            f"{dtypes[0]} and {dtypes[1]}"
        )
    shapes = tuple(logits.shape), tuple(targets.shape)
    if logits.ndim == 0 or shapes[0][:-1] != shapes[1]:
        raise ValueError(
            f"{name} takes logits (..., N) and targets (...), not {shapes}"
        )
    if logits.device != targets.device:
        raise ValueError(
            f"{name} takes logits and targets on one device, not "
            f"{logits.device} and {targets.device}"
        )
    if logits.shape[-1] > 2**30:
        raise ValueError(
            f"{name} takes rows of up to 2**30 elements, not {logits.shape[-1]}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"{name} takes label_smoothing from 0 to 1, not {label_smoothing}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"{name} takes a reduction mean, sum or none, not {reduction!r}"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"{name} takes a softcap above 0 or None, not {softcap}"
        )
    if not 0 <= scale < math.inf:
        raise ValueError(f"{name} takes lse_square_scale from 0, not {scale}")
    if weight is not None:
        if weight.dtype not in CROSS_ENTROPY_IN_PLACE_ACC:
            raise TypeError(f"{name} takes a float weight, not {weight.dtype}")
        place = tuple(weight.shape), weight.device
        if place != (shapes[0][-1:], logits.device):
            raise ValueError(
                f"{name} takes a weight (N,) where the logits are, not "
                f"{place[0]} on {place[1]}"
            )
    if logits.requires_grad:
        raise ValueError(
            f"{name} takes no logits that require grad: call it in the forward "
            "of a torch.autograd.Function that makes the logits itself"
        )
    N = logits.shape[-1]
    apart = logits.ndim == 2 and logits.stride(1) == 1 and logits.stride(0) >= N
    if not apart and not logits.is_contiguous():
        raise ValueError(
            f"{name} takes a contiguous tensor, or a matrix of contiguous rows "
            "that share no memory: make the logits contiguous first"
        )


@functools.cache
def _cross_entropy_in_place_processors(device):
    """Return a GPU's number of multiprocessors."""
    if device.type != "cuda":
        return 2  # for the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _cross_entropy_in_place_plan(x, M):
    """Return how to launch for M rows."""
    size = x.element_size()
    processors = _cross_entropy_in_place_processors(x.device)
    long = x.shape[-1] * size > CROSS_ENTROPY_IN_PLACE_ROW
    # float64 takes twice the registers. On AMD's GPUs, 16 warps have the 1024
    # threads that a program may have.
    most = 16 if size == 8 or torch.version.hip else 32
    warps = most if long or processors >= M else 8
    return {
        "ACC": CROSS_ENTROPY_IN_PLACE_ACC[x.dtype],
        "VEC": 16 // size,
        # With more lines, 32 warps would not have enough registers.
        "LINES": 4 if warps == 32 else 8,
        "BLOCK_N": warps * 512 // size,
        "num_warps": warps,
    }


def _cross_entropy_in_place_wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _cross_entropy_in_place_sums(weight, targets, ignore_index, mean):
    """Return three sums of class weights that the kernel needs.

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


def _cross_entropy_in_place_launch(
    logits,
    targets,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    lse_square_scale=0.0,
    weight=None,
    predicted_tokens=None,
):
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    _cross_entropy_in_place_check(logits, targets, *options)
    M, N, mean = targets.numel(), logits.shape[-1], reduction == "mean"
    losses = targets.new_empty(
        targets.shape, dtype=_cross_entropy_in_place_wide(logits)
    )
    scale = losses.new_empty(())
    if M == 0 and mean:
        return losses.new_full((), torch.nan)
    targets = targets.contiguous()
    plan = _cross_entropy_in_place_plan(logits, M)
    few = M <= CROSS_ENTROPY_IN_PLACE_COUNT // 8
    # Triton launches on the current GPU, which may not be that of logits.
    with torch.accelerator.device_index(logits.device.index):
        if weight is not None:
            weight = weight.to(scale.dtype).contiguous()
            sums = weight, targets, ignore_index, mean
            scale = _cross_entropy_in_place_sums(*sums)
        elif mean:
            _cross_entropy_in_place_count_kernel[(1,)](
                targets,
                scale,
                M,
                ignore_index,
                ACC=plan["ACC"],
                BLOCK=CROSS_ENTROPY_IN_PLACE_COUNT // (8 if few else 1),
                num_warps=4 if few else 16,
            )
        stride = N if logits.is_contiguous() else logits.stride(0)
        sizes = N, stride, ignore_index
        if M > 0:
            _cross_entropy_in_place_kernel[(M,)](
                *(logits, targets, scale, losses, *sizes),
                SMOOTHING=label_smoothing,
                MEAN=mean or weight is not None,
                SOFTCAP=softcap or 0.0,
                LSE_SQUARE_SCALE=lse_square_scale,
                weight_ptr=weight,
                predicted_ptr=predicted_tokens,
                **plan,
            )
    return losses if reduction == "none" else losses.sum()


@custom_op(
    f"{CROSS_ENTROPY_IN_PLACE_NAMESPACE}::cross_entropy_in_place_",
    mutates_args=("logits", "predicted_tokens"),
)
def _cross_entropy_in_place_op(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    lse_square_scale: float,
    weight: torch.Tensor | None,
    predicted_tokens: torch.Tensor | None,
) -> torch.Tensor:
    """Return the cross entropy, and write the gradient and the predictions."""
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    return _cross_entropy_in_place_launch(
        logits, targets, ignore_index, *options, predicted_tokens
    )


@_cross_entropy_in_place_op.register_fake
def _cross_entropy_in_place_fake(
    logits,
    targets,
    ignore_index,
    label_smoothing,
    reduction,
    softcap,
    lse_square_scale,
    weight,
    predicted_tokens,
):
    options = label_smoothing, reduction, softcap, lse_square_scale, weight
    _cross_entropy_in_place_check(logits, targets, *options)
    wide = _cross_entropy_in_place_wide(logits)
    shape = targets.shape if reduction == "none" else ()
    return logits.new_empty(shape, dtype=wide)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
CROSS_ENTROPY_IN_PLACE_LIBRARY = Library(
    CROSS_ENTROPY_IN_PLACE_NAMESPACE, "FRAGMENT"
)
CROSS_ENTROPY_IN_PLACE_LIBRARY.impl(
    "cross_entropy_in_place_", _cross_entropy_in_place_launch, "CUDA"
)


def _cross_entropy_in_place_accuracy(
    predicted, targets, ignore_index, reduction
):
    """Return how often the prediction is the target."""
    counts = targets != ignore_index
    hits = (predicted == targets) & counts
    return hits.float() if reduction == "none" else hits.sum() / counts.sum()


def cross_entropy_in_place_(
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
    """Return the cross entropy, and write its gradient over the logits.

    As ``torch.nn.functional.cross_entropy`` with rows along the last dimension,
    and the gradient of that loss itself, multiplied by nothing. Takes logits
    (..., N) of float16, bfloat16, float32 or float64, contiguous or a matrix
    whose rows are, with N up to 2**30, and int64 targets (...). The loss is
    float32 (float64 for float64): with ``reduction="mean"`` the mean over the
    rows whose target is not ``ignore_index``, NaN if there are none; with "sum"
    the sum; with "none" a loss for each row, in the shape of ``targets``, which
    is 0 where ignored, and each row has the gradient of its own loss. An
    ignored row is not read, and its gradient is 0. If any other target is not
    in range(N), the loss is NaN, and so is that row's gradient.

    With a ``softcap`` above 0, the logits become softcap * tanh(logits /
    softcap), as in Gemma 2 (https://arxiv.org/abs/2408.00118), and the gradient
    is that of the logits before. ``lse_square_scale`` adds lse_square_scale *
    logsumexp(logits)**2 to the loss of each row that is not ignored: the z-loss
    of PaLM (https://arxiv.org/abs/2204.02311), under its name in Liger Kernel.

    ``weight`` has a factor (N,) for each class, of any of these dtypes: it
    multiplies the loss of its targets, and with ``label_smoothing`` each
    class's part. Then the mean is the sum divided by the sum of the targets'
    weights. The z-loss, as in Liger Kernel, has no weight, and its mean is over
    the rows.

    With ``return_token_accuracy``, the loss comes in a tuple, followed by the
    share of the rows not ignored whose largest logit is their target's, in
    float32; with ``reduction="none"`` it is 1 or 0 for each row, and 0 where
    ignored. With ``return_predicted_tokens``, the last of the tuple is the
    class of each row's largest logit, the first of equals, in int64, and -1
    where ignored. Both are Liger Kernel's.

    Loss and gradient are deterministic on one kind of GPU. The op has no
    autograd formula: it is to be called where logits do not require grad, as in
    the forward of a ``torch.autograd.Function``. The backward of that function
    multiplies the written gradient by the gradient of the loss. Raises
    TypeError for other dtypes, and ValueError for other shapes, layouts and
    options, for tensors on two devices, and for logits that require grad. The
    online log-sum-exp: https://arxiv.org/abs/1805.02867

    Rounding: sums are in float32, or float64 for float64, and the loss stays
    so. The gradient is computed in that type and rounded once.
    """
    predicted = None
    if return_token_accuracy or return_predicted_tokens:
        predicted = torch.empty(
            targets.shape, dtype=torch.int64, device=targets.device
        )
    loss = _cross_entropy_in_place_op(
        logits,
        targets,
        ignore_index,
        label_smoothing,
        reduction,
        softcap,
        lse_square_scale,
        weight,
        predicted,
    )
    results = [loss]
    if return_token_accuracy:
        options = targets, ignore_index, reduction
        results.append(_cross_entropy_in_place_accuracy(predicted, *options))
    if return_predicted_tokens:
        results.append(predicted)
    return tuple(results) if len(results) > 1 else loss
