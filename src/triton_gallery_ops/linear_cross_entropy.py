"""Fused linear layer and cross-entropy loss, without holding all logits.

Computes the cross entropy of x @ weight.T + bias for 2048 tokens at a time, as
Liger Kernel does (Hsu et al., 2024, arXiv:2410.10989). This saves memory if
there are more tokens than that. ``torch.mm`` computes the products, and the op
is as deterministic as they are. The forward also computes the gradients; the
backward scales them in place, so a second backward of one loss raises
RuntimeError. With ``reduction="none"`` the backward computes the logits again
instead. There is no second derivative. In half precision, the weight's gradient
is rounded after each chunk, unless ``accum_dtype`` is wider. For logits that
exist already, use ``cross_entropy``.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op

LINEAR_CROSS_ENTROPY_NAMESPACE = "triton_gallery"
LINEAR_CROSS_ENTROPY_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
LINEAR_CROSS_ENTROPY_CHUNK = 2048  # tokens whose logits exist at one time
LINEAR_CROSS_ENTROPY_BLOCK = 4096  # elements that a program has at one time
LINEAR_CROSS_ENTROPY_WARPS = 8


@triton.jit
def _linear_cross_entropy_tanh(x):
    # 1 - 2 / (exp + 1) cancels where x is small. There we take Lambert's
    # continued fraction, cut off after 13, as one quotient. It is off by less
    # than float64 rounds.
    s = x * x
    p = 135135 + s * (17325 + s * (378 + s))
    q = 135135 + s * (62370 + s * (3150 + s * 28))
    # Where exp is inf, tanh is 1.
    large = 1 - 2 / (tl.exp(2 * x) + 1)
    return tl.where(s < 0.25, x * p / q, large)


@triton.jit
def _linear_cross_entropy_cap(z, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        z = SOFTCAP * _linear_cross_entropy_tanh(z * (1 / SOFTCAP))
    return z


@triton.jit
def _linear_cross_entropy_load(
    row_ptr, offs, V, room, ACC: tl.constexpr, SOFTCAP: tl.constexpr
):
    # A mask up to V could end between any two elements, so each would be
    # loaded by itself. 16 divides the room.
    z = tl.load(row_ptr + offs, mask=offs < room).to(ACC)
    z = _linear_cross_entropy_cap(z, SOFTCAP)
    # -inf is never the maximum, and adds nothing to the sum.
    return tl.where(offs < V, z, -float("inf"))


@triton.jit
def _linear_cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    scale_ptr,
    V,
    room,
    ignore_index,
    ACC: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,  # whether each token has its own scale
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 is none
    LSE_SQUARE_SCALE: tl.constexpr,
    ce_weight_ptr,  # of classes, their mean, a factor of the z-loss
    predicted_ptr,  # where the predictions go, if anywhere
    TOKEN_SCALING: tl.constexpr,
):
    # The lowest number of ACC. With -inf, m - larger could be NaN.
    DOUBLE: tl.constexpr = tl.float64 == ACC
    LOWEST: tl.constexpr = (
        -1.7976931348623157e308 if DOUBLE else -3.4028234663852886e38
    )
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    row_ptr = logits_ptr + pid * room
    target = tl.load(targets_ptr + pid)
    counts = target != ignore_index
    # Any other target would read another row's logit, or past the buffer.
    known = counts & (target >= 0) & (target < V)
    # Read before the second pass writes over it: the reductions between them
    # make all threads wait for each other.
    chosen = tl.load(row_ptr + target, mask=known, other=float("nan")).to(ACC)
    chosen = _linear_cross_entropy_cap(chosen, SOFTCAP)
    m = tl.full((), LOWEST, dtype=ACC)
    s = tl.zeros((), dtype=ACC)
    middle = tl.zeros((), dtype=ACC)  # the mean of the logits
    best = tl.full((), V, dtype=tl.int32)
    share = 1 / tl.cast(V, ACC)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)  # (BLOCK_V,)
        z = _linear_cross_entropy_load(row_ptr, offs, V, room, ACC, SOFTCAP)
        larger = tl.maximum(m, tl.max(z, axis=0))
        if predicted_ptr is not None:
            first = tl.min(tl.where(z == larger, offs, V), axis=0)
            best = tl.where(larger > m, first, best)
        # What is in s was added while the maximum was m.
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(z - larger), axis=0)
        m = larger
        if SMOOTHING > 0:
            # Each is divided first, as the sum of logits could be infinite.
            z *= share
            if ce_weight_ptr is not None:
                z *= tl.load(ce_weight_ptr + offs, mask=offs < V, other=0)
            middle += tl.sum(tl.where(offs < V, z, 0), axis=0)
    lse = m + tl.log(s)
    loss = lse - chosen
    of_lse = 1.0  # the gradient of lse
    smooth = lse - middle
    if ce_weight_ptr is not None:
        w_t = tl.load(ce_weight_ptr + target, mask=known, other=0)
        average = tl.load(ce_weight_ptr + V)
        loss *= w_t
        smooth = lse * average - middle
        of_lse = w_t * (1 - SMOOTHING) + average * SMOOTHING
    if SMOOTHING > 0:
        loss = loss * (1 - SMOOTHING) + smooth * SMOOTHING
    if LSE_SQUARE_SCALE > 0:
        factor = tl.full((), LSE_SQUARE_SCALE, dtype=ACC)
        if ce_weight_ptr is not None:
            factor *= tl.load(ce_weight_ptr + V + 1)
        loss += factor * lse * lse
    if TOKEN_SCALING:
        probability = tl.exp(chosen - m) / s
        loss *= probability
    tl.store(losses_ptr + pid, tl.where(counts, loss, 0.0))
    if predicted_ptr is not None:
        # A row that has no number but -inf has no larger one.
        best = tl.where(counts, tl.where(best < V, best, 0), -1)
        tl.store(predicted_ptr + pid, best)
    if GRADIENT:
        scale = tl.load(scale_ptr + pid if EACH else scale_ptr)
        if TOKEN_SCALING:
            scale *= probability
        if LSE_SQUARE_SCALE > 0:
            of_lse += 2 * factor * lse
        if ce_weight_ptr is not None or LSE_SQUARE_SCALE > 0:
            # The gradient of lse is the softmax, which divides by s.
            s /= of_lse
        # A wrong target makes its row of gradients NaN, as well as the loss.
        s = tl.where(chosen == chosen, s, float("nan"))
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)  # (BLOCK_V,)
            z = _linear_cross_entropy_load(row_ptr, offs, V, room, ACC, SOFTCAP)
            d = tl.exp(z - m) / s  # (BLOCK_V,)
            hit = (offs == target).to(ACC)
            if ce_weight_ptr is not None:
                hit *= w_t
            if SMOOTHING > 0:
                even = SMOOTHING * share
                if ce_weight_ptr is not None:
                    even *= tl.load(
                        ce_weight_ptr + offs, mask=offs < V, other=0
                    )
                hit = hit * (1 - SMOOTHING) + even
            d -= hit
            if SOFTCAP > 0:
                d *= 1 - (z * (1 / SOFTCAP)) * (z * (1 / SOFTCAP))
            # The products go over ignored tokens too: these add nothing.
            d = tl.where(counts, d * scale, 0.0)
            # What is stored past V, nobody reads.
            tl.store(row_ptr + offs, d, mask=offs < room)


@triton.jit
def _linear_cross_entropy_scale_kernel(
    d_ptr, factor_ptr, numel, BLOCK: tl.constexpr
):
    factor = tl.load(factor_ptr)
    # Most steps go back from the loss itself: then there is nothing to do.
    if factor != 1.0:
        # In int32 the offsets would overflow past element 2**31.
        pid = tl.program_id(axis=0).to(tl.int64)
        offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
        d = tl.load(d_ptr + offs, mask=offs < numel).to(factor.dtype)
        tl.store(d_ptr + offs, d * factor, mask=offs < numel)


@custom_op(
    f"{LINEAR_CROSS_ENTROPY_NAMESPACE}::linear_cross_entropy_scale",
    mutates_args=("d",),
)
def _linear_cross_entropy_scale(d: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply d, in the factor's precision, whatever the dtype of d is."""
    grid = (triton.cdiv(d.numel(), LINEAR_CROSS_ENTROPY_BLOCK),)
    # An op that mutates: PyTorch notes that d is no longer what was saved.
    with torch.accelerator.device_index(d.device.index):
        _linear_cross_entropy_scale_kernel[grid](
            d,
            factor,
            d.numel(),
            BLOCK=LINEAR_CROSS_ENTROPY_BLOCK,
            num_warps=LINEAR_CROSS_ENTROPY_WARPS,
        )


def _linear_cross_entropy_check(
    x,
    weight,
    targets,
    bias,
    label_smoothing,
    reduction,
    softcap,
    scale,
    ce_weight,
    accum_dtype,
):
    name = "linear_cross_entropy"
    tensors = [x, weight, targets] + ([] if bias is None else [bias])
    dtypes = [tensor.dtype for tensor in tensors]
    if (
        x.dtype not in LINEAR_CROSS_ENTROPY_ACC
        or {weight.dtype, *dtypes[3:]} != {x.dtype}
        or targets.dtype != torch.int64
    ):
        raise TypeError(
            f"{name} takes x, weight and bias of one float dtype and int64 "
            f"targets, not {', '.join(map(str, dtypes))}"
        )
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if (
        len({tensor.device for tensor in tensors}) > 1
        or x.ndim == 0
        or weight.ndim != 2
        or x.shape[-1] != weight.shape[1]
        or x.shape[:-1] != targets.shape
        or not 0 < weight.shape[0] <= 2**30
        or weight.shape[1] == 0
        or shapes[3:] not in ([], [(weight.shape[0],)])
    ):
        raise ValueError(
            f"{name} takes x (..., D), weight (V, D) with V from 1 to 2**30 "
            f"and D from 1, targets (...), and a bias (V,) or None, on one "
            f"device, not {shapes}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"{name} takes a reduction mean, sum or none, not {reduction!r}"
        )
    if not (
        0 <= label_smoothing <= 1
        and 0 < (1 if softcap is None else softcap) < math.inf
        and 0 <= scale < math.inf
    ):
        raise ValueError(
            f"{name} takes label_smoothing from 0 to 1, a softcap above 0 or "
            "None, and lse_square_scale from 0, not "
            f"{label_smoothing}, {softcap} and {scale}"
        )
    if accum_dtype not in (None, *LINEAR_CROSS_ENTROPY_ACC):
        raise TypeError(
            f"{name} takes a float accum_dtype or None, not {accum_dtype}"
        )
    if ce_weight is None:
        return
    if ce_weight.dtype not in LINEAR_CROSS_ENTROPY_ACC:
        raise TypeError(
            f"{name} takes a float ce_weight, not {ce_weight.dtype}"
        )
    if ce_weight.shape != weight.shape[:1] or ce_weight.device != x.device:
        raise ValueError(
            f"{name} takes a ce_weight (V,) where x is, not "
            f"{tuple(ce_weight.shape)} on {ce_weight.device}"
        )


def _linear_cross_entropy_wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _linear_cross_entropy_total(tokens):
    """Return what the products divide by, for gradients that float16 holds."""
    return min(max(tokens, 1), 2**15)  # float16 ends at 65504


def _linear_cross_entropy_empty(x, weight, *wanted):
    """Return where the gradients go; nothing for those not wanted."""
    shapes = x.shape, weight.shape, weight.shape[:1]
    return [
        torch.zeros(shape if of else 0, dtype=x.dtype, device=x.device)
        for shape, of in zip(shapes, wanted, strict=True)
    ]


def _linear_cross_entropy_launch(
    x,
    weight,
    targets,
    ignore_index,
    of_x,
    of_weight,
    bias=None,
    of_bias=False,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    lse_square_scale=0.0,
    ce_weight=None,
    accum_dtype=None,
    use_token_scaling=False,
    predict=False,
    grad=None,
):
    """Return the loss, its gradients, predictions; nothing if not wanted.

    With ``reduction="none"``, they are those of the losses multiplied by
    ``grad``, one number for each token; without it there are none. With "sum"
    they are divided by ``_linear_cross_entropy_total``.
    """
    options = label_smoothing, reduction, softcap, lse_square_scale
    options = *options, ce_weight, accum_dtype
    _linear_cross_entropy_check(x, weight, targets, bias, *options)
    if reduction == "none" and grad is None:
        of_x = of_weight = of_bias = False
    wanted = of_x, of_weight, of_bias
    d_x, d_weight, d_bias = _linear_cross_entropy_empty(x, weight, *wanted)
    V, D = weight.shape
    T, shape = targets.numel(), targets.shape
    rows, x = d_x.view(-1, D), x.reshape(T, D)
    sum_weight = d_weight.to(accum_dtype or x.dtype)
    predicted = targets.new_empty(T if predict else 0)
    targets = targets.reshape(T).contiguous()
    wide = _linear_cross_entropy_wide(x)
    losses = torch.empty(T, dtype=wide, device=x.device)
    sums = d_bias.to(wide)
    counts = targets != ignore_index
    count = counts.sum()
    # The mean divides by count, the number of tokens that count, which only the
    # GPU knows. If the kernel divided by it, small gradients would become zero
    # in float16. So the kernel multiplies by total / count, and the products
    # divide by total. The sum has no count, and each token's own gradients have
    # the sum of their magnitudes in its place.
    total = _linear_cross_entropy_total(T)
    divisor, ratio = count, torch.ones((), dtype=wide, device=x.device)
    if ce_weight is not None:
        ce_weight = ce_weight.to(wide)
        # Targets that are no words have a weight past the last one, which is 0.
        known = counts & (targets >= 0) & (targets < V)
        padded = torch.nn.functional.pad(ce_weight, (0, 1))
        if reduction == "mean":
            divisor = padded[torch.where(known, targets, V)].sum()
            ratio = divisor / count  # the mean of z-losses is over tokens
        factors = torch.stack([ce_weight.mean(), ratio])
        ce_weight = torch.cat([ce_weight, factors])
    # Without a token that counts the gradients are zero, as in PyTorch.
    size = torch.where(count > 0, divisor, 1).to(wide)
    if reduction == "sum":
        size = torch.full_like(size, total)
    scale = total / size
    if grad is not None:
        grad = torch.where(counts, grad.reshape(T), 0.0)
        size = grad.abs().sum().clamp(min=torch.finfo(wide).tiny)
        scale = grad / size * total
    chunk = min(T, LINEAR_CROSS_ENTROPY_CHUNK)
    # With room after each row, all rows begin at a multiple of 16 bytes. The
    # compiler knows it: Triton compiles a kernel for numbers that 16 divides.
    room = triton.cdiv(V, 16) * 16
    # cuBLAS is slow where 16 does not divide the number of words. So the words
    # past the last multiple have small products of their own.
    cut = V // 16 * 16
    edges = [(0, cut), (cut, V)] if 0 < cut < V else [(0, V)]
    words = [slice(*edge) for edge in edges]
    buffer = torch.empty(chunk, room, dtype=x.dtype, device=x.device)
    buffer[:, V:] = 0  # read, though nothing of it counts
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        for start in range(0, T, max(1, chunk)):
            part = slice(start, start + chunk)
            logits = buffer[: len(x[part]), :V]
            for some in words:
                factors, out = (x[part], weight[some].T), logits[:, some]
                if bias is None:
                    torch.mm(*factors, out=out)
                else:
                    torch.addmm(bias[some], *factors, out=out)
            scales = scale if grad is None else scale[part]
            pointers = logits, targets[part], losses[part], scales
            arguments = *pointers, V, room, ignore_index
            predictions = predicted[part] if predict else None
            _linear_cross_entropy_kernel[(len(logits),)](
                *arguments,
                ACC=LINEAR_CROSS_ENTROPY_ACC[x.dtype],
                GRADIENT=any(wanted),
                BLOCK_V=LINEAR_CROSS_ENTROPY_BLOCK,
                EACH=grad is not None,
                SMOOTHING=label_smoothing,
                SOFTCAP=softcap or 0.0,
                LSE_SQUARE_SCALE=lse_square_scale,
                ce_weight_ptr=ce_weight,
                predicted_ptr=predictions,
                TOKEN_SCALING=use_token_scaling,
                num_warps=LINEAR_CROSS_ENTROPY_WARPS,
            )
            # Now the buffer has the gradient of the logits.
            for some in words:
                d, alpha = logits[:, some], 1 / total
                if of_x:
                    rows[part].addmm_(d, weight[some], alpha=alpha)
                if of_weight and sum_weight.dtype == x.dtype:
                    sum_weight[some].addmm_(d.T, x[part], alpha=alpha)
                elif of_weight:
                    product = d.T, x[part]
                    sum_weight[some] += torch.addmm(
                        x.new_zeros(1), *product, beta=0, alpha=alpha
                    )
            if of_bias:
                sums.add_(logits.sum(0, dtype=wide), alpha=1 / total)
    if grad is not None:
        sums *= size
        for d in (d_x, sum_weight):
            _linear_cross_entropy_scale(d, size)
    if sum_weight is not d_weight:
        d_weight.copy_(sum_weight)
    d_bias.copy_(sums)
    loss = losses.view(shape) if reduction == "none" else losses.sum()
    # Without a token that counts 0 / 0, so NaN, as in PyTorch.
    loss = loss / divisor if reduction == "mean" else loss
    predicted = predicted.view(shape) if predict else predicted
    return loss, d_x, d_weight, d_bias, predicted


# Arguments that both ops have
LINEAR_CROSS_ENTROPY_SCHEMA = (
    "Tensor x, Tensor weight, Tensor targets, int ignore_index, bool of_x, "
    "bool of_weight, Tensor? bias=None, bool of_bias=False, "
    'float label_smoothing=0.0, str reduction="mean", float? softcap=None, '
    "float lse_square_scale=0.0, Tensor? ce_weight=None, "
    "ScalarType? accum_dtype=None, bool use_token_scaling=False, "
    "bool predict=False"
)
_linear_cross_entropy_forward = custom_op(
    f"{LINEAR_CROSS_ENTROPY_NAMESPACE}::linear_cross_entropy",
    mutates_args=(),
    schema=f"({LINEAR_CROSS_ENTROPY_SCHEMA}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)(_linear_cross_entropy_launch)


@_linear_cross_entropy_forward.register_fake
def _linear_cross_entropy_fake(
    x,
    weight,
    targets,
    ignore_index,
    of_x,
    of_weight,
    bias=None,
    of_bias=False,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    lse_square_scale=0.0,
    ce_weight=None,
    accum_dtype=None,
    use_token_scaling=False,
    predict=False,
):
    options = label_smoothing, reduction, softcap, lse_square_scale
    options = *options, ce_weight, accum_dtype
    _linear_cross_entropy_check(x, weight, targets, bias, *options)
    each = reduction == "none"
    wanted = (of and not each for of in (of_x, of_weight, of_bias))
    loss = x.new_empty(
        targets.shape if each else (), dtype=_linear_cross_entropy_wide(x)
    )
    predicted = targets.new_empty(targets.shape if predict else 0)
    return loss, *_linear_cross_entropy_empty(x, weight, *wanted), predicted


@custom_op(
    f"{LINEAR_CROSS_ENTROPY_NAMESPACE}::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {LINEAR_CROSS_ENTROPY_SCHEMA}) -> "
    "(Tensor, Tensor, Tensor)",
)
def _linear_cross_entropy_of_each(grad, *inputs):
    """Return the gradients, given that of each token's loss."""
    return _linear_cross_entropy_launch(*inputs, grad=grad)[1:4]


@_linear_cross_entropy_of_each.register_fake
def _linear_cross_entropy_of_each_fake(grad, x, weight, *inputs):
    wanted = inputs[2], inputs[3], inputs[5]
    return tuple(_linear_cross_entropy_empty(x, weight, *wanted))


def _linear_cross_entropy_setup(ctx, inputs, output):
    x, weight, targets, *_ = inputs
    bias, reduction, ce_weight = inputs[6], inputs[9], inputs[12]
    if ce_weight is not None and ce_weight.requires_grad:
        raise ValueError("linear_cross_entropy has no gradient for ce_weight")
    ctx.wanted, ctx.reduction = (*inputs[4:6], inputs[7]), reduction
    # In their order, without the bias and the weights of classes
    ctx.options = inputs[3:6], inputs[7:12], inputs[13:15]
    ctx.total = _linear_cross_entropy_total(targets.numel())
    # No zeros for results that have no gradient: they would be as large.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    each = reduction == "none"
    tensors = x, weight, targets, bias, ce_weight
    ctx.save_for_backward(*(tensors if each else output[1:4]))


def _linear_cross_entropy_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 16
    gradients = ctx.saved_tensors
    if ctx.reduction == "none":
        *tensors, bias, ce_weight = ctx.saved_tensors
        first, middle, last = ctx.options
        inputs = *tensors, *first, bias, *middle, ce_weight, *last
        gradients = _linear_cross_entropy_of_each(grad, *inputs)
    else:
        factor = grad * ctx.total if ctx.reduction == "sum" else grad
        for d, of in zip(gradients, ctx.wanted, strict=True):
            if of:
                _linear_cross_entropy_scale(d, factor)
    d_x, d_weight, d_bias = (
        d if of else None for d, of in zip(gradients, ctx.wanted, strict=True)
    )
    return d_x, d_weight, None, None, None, None, d_bias, *[None] * 9


_linear_cross_entropy_forward.register_autograd(
    _linear_cross_entropy_backward, setup_context=_linear_cross_entropy_setup
)
# On a GPU a call goes to the launcher; all else goes on to the custom_op.
LINEAR_CROSS_ENTROPY_LIBRARY = Library(
    LINEAR_CROSS_ENTROPY_NAMESPACE, "FRAGMENT"
)
LINEAR_CROSS_ENTROPY_LIBRARY.impl(
    "linear_cross_entropy", _linear_cross_entropy_launch, "CUDA"
)


def _linear_cross_entropy_autocast(kind, *inputs):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    # Weights of classes, after the bias, keep their dtype.
    factors = (
        t.to(dtype) if getattr(t, "dtype", None) in casts else t
        for t in inputs[:7]
    )
    with torch.autocast(kind, enabled=False):
        return _linear_cross_entropy_forward(*factors, *inputs[7:])


LINEAR_CROSS_ENTROPY_LIBRARY.impl(
    "linear_cross_entropy",
    partial(_linear_cross_entropy_autocast, "cpu"),
    "AutocastCPU",
)
LINEAR_CROSS_ENTROPY_LIBRARY.impl(
    "linear_cross_entropy",
    partial(_linear_cross_entropy_autocast, "cuda"),
    "AutocastCUDA",
)


def _linear_cross_entropy_accuracy(predicted, targets, ignore_index, reduction):
    """Return how often the prediction is the target."""
    counts = targets != ignore_index
    hits = (predicted == targets) & counts
    return hits.float() if reduction == "none" else hits.sum() / counts.sum()


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    ce_weight: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the cross entropy of the logits x @ weight.T + bias.

    As PyTorch's ``cross_entropy(linear(x, weight, bias), targets)``, but the
    logits of at most ``LINEAR_CROSS_ENTROPY_CHUNK`` tokens exist at one time.

    Takes x (..., D), weight (V, D) and a bias (V,) or None, all float16,
    bfloat16, float32 or float64 and of any layout, and int64 targets (...),
    with D and V from 1 on and V up to 2**30. All are on one device. Under
    ``torch.autocast`` x, weight and bias are cast to its dtype. The loss is
    float32 (float64 for float64): with ``reduction="mean"`` the mean over the
    tokens whose target is not ``ignore_index``, an int, NaN if there are none;
    with "sum" the sum, 0 if there are none; with "none" a loss for each token,
    in the shape of ``targets``, which is 0 where ignored. If any other target
    is not in range(V), the loss is NaN, and so are the gradients of weight and
    bias and the one of that token's x. On one kind of GPU, the results are
    deterministic if those of its library's matrix products are.

    ``label_smoothing`` is that of ``torch.nn.functional.cross_entropy``. With a
    ``softcap`` above 0, the logits become softcap * tanh(logits / softcap), as
    in Gemma 2 (https://arxiv.org/abs/2408.00118). ``lse_square_scale`` adds
    lse_square_scale * logsumexp(logits)**2 to the loss of each token that is
    not ignored: the z-loss of PaLM (https://arxiv.org/abs/2204.02311), under
    the name that it has in Liger Kernel.

    ``ce_weight``, also named as there, is PyTorch's ``weight``: a factor (V,)
    for each class, of any of these dtypes and without a gradient. It multiplies
    the loss of its targets, and with ``label_smoothing`` each class's part.
    Then the mean is the sum divided by the sum of the targets' weights. The
    z-loss has no weight, and its mean is over the tokens.

    ``use_token_scaling`` multiplies the loss of each token by the probability
    of its target, of which there is no gradient: dynamic fine-tuning
    (https://arxiv.org/abs/2508.05629). The mean divides as without it. The
    gradient of the weight is summed over the chunks in ``accum_dtype``, any of
    these dtypes; None is the weight's own. Both are Liger Kernel's.

    With ``return_token_accuracy``, the loss comes in a tuple, followed by the
    share of the tokens not ignored whose largest logit is their target's, in
    float32; with ``reduction="none"`` it is 1 or 0 for each token, and 0 where
    ignored. With ``return_predicted_tokens``, the last of the tuple is the
    class of each token's largest logit, the first of equals, in int64, and -1
    where ignored. Both are Liger Kernel's.

    The gradients are computed with the loss, for those of x, weight and bias
    that require grad, and kept for the backward. The backward multiplies them
    in place: a second backward of one loss raises RuntimeError. With
    ``reduction="none"``, the backward computes logits and gradients instead: it
    takes a product more, and may be called again. Second derivatives are not
    supported. The method: https://arxiv.org/abs/2410.10989
    Raises TypeError for other dtypes, and ValueError for other shapes and
    options and for tensors on several devices.

    Rounding: the logits and their gradient are rounded to the dtype of x, and
    the gradient of the weight is after each chunk. The sums of the loss and of
    the bias's gradient are in float32, or float64 for float64, and so are the
    logits with a softcap.
    """
    grad = torch.is_grad_enabled()
    of_x, of_weight, of_bias = (
        grad and tensor is not None and tensor.requires_grad
        for tensor in (x, weight, bias)
    )
    predict = return_token_accuracy or return_predicted_tokens
    loss, _, _, _, predicted = _linear_cross_entropy_forward(
        x,
        weight,
        targets,
        ignore_index,
        of_x,
        of_weight,
        bias,
        of_bias,
        label_smoothing,
        reduction,
        softcap,
        lse_square_scale,
        ce_weight,
        accum_dtype,
        use_token_scaling,
        predict,
    )
    results = [loss]
    if return_token_accuracy:
        options = targets, ignore_index, reduction
        results.append(_linear_cross_entropy_accuracy(predicted, *options))
    if return_predicted_tokens:
        results.append(predicted)
    return tuple(results) if len(results) > 1 else loss
