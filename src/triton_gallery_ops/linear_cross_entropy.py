"""Fused linear layer and cross-entropy loss, without holding all logits.

Computes the mean cross entropy of x @ weight.T for 2048 tokens at a time, as
Liger Kernel does (Hsu et al., 2024, arXiv:2410.10989). This saves memory if
there are more tokens than that. ``torch.mm`` computes the products, and the op
is as deterministic as they are. The forward also computes the gradients; the
backward scales them in place, so a second backward of one loss raises
RuntimeError. There is no second derivative. In half precision, the weight's
gradient is rounded after each chunk. No label smoothing, class weights or other
reductions. For logits that exist already, use ``cross_entropy``.
"""

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
def _linear_cross_entropy_load(row_ptr, offs, V, room, ACC: tl.constexpr):
    # A mask up to V could end between any two elements, so each would be
    # loaded by itself. 16 divides the room.
    z = tl.load(row_ptr + offs, mask=offs < room).to(ACC)
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
    m = tl.full((), LOWEST, dtype=ACC)
    s = tl.zeros((), dtype=ACC)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)  # (BLOCK_V,)
        z = _linear_cross_entropy_load(row_ptr, offs, V, room, ACC)
        larger = tl.maximum(m, tl.max(z, axis=0))
        # What is in s was added while the maximum was m.
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(z - larger), axis=0)
        m = larger
    loss = tl.where(counts, m + tl.log(s) - chosen, 0.0)
    tl.store(losses_ptr + pid, loss)
    if GRADIENT:
        scale = tl.load(scale_ptr)
        # A wrong target makes its row of gradients NaN, as well as the loss.
        s = tl.where(chosen == chosen, s, float("nan"))
        for start in range(0, V, BLOCK_V):
            offs = start + tl.arange(0, BLOCK_V)  # (BLOCK_V,)
            z = _linear_cross_entropy_load(row_ptr, offs, V, room, ACC)
            d = tl.exp(z - m) / s - (offs == target).to(ACC)  # (BLOCK_V,)
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


def _linear_cross_entropy_check(x, weight, targets):
    name = "linear_cross_entropy"
    dtypes = x.dtype, weight.dtype, targets.dtype
    if (
        x.dtype not in LINEAR_CROSS_ENTROPY_ACC
        or weight.dtype != x.dtype
        or targets.dtype != torch.int64
    ):
        raise TypeError(
            f"{name} takes x and weight of one float dtype and int64 targets, "
            f"not {', '.join(map(str, dtypes))}"
        )
    devices = {tensor.device for tensor in (x, weight, targets)}
    shapes = [tuple(tensor.shape) for tensor in (x, weight, targets)]
    if (
        len(devices) > 1
        or x.ndim == 0
        or weight.ndim != 2
        or x.shape[-1] != weight.shape[1]
        or x.shape[:-1] != targets.shape
        or not 0 < weight.shape[0] <= 2**30
        or weight.shape[1] == 0
    ):
        raise ValueError(
            f"{name} takes x (..., D), weight (V, D) with V from 1 to 2**30 "
            f"and D from 1, and targets (...), on one device, not {shapes}"
        )


def _linear_cross_entropy_empty(x, weight, of_x, of_weight):
    """Return where the gradients go; nothing for those not wanted."""
    d_x = torch.zeros(x.shape if of_x else 0, dtype=x.dtype, device=x.device)
    d_weight = torch.zeros(
        weight.shape if of_weight else 0, dtype=x.dtype, device=x.device
    )
    return d_x, d_weight


def _linear_cross_entropy_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    of_x: bool,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss and its gradients; nothing for those not wanted."""
    _linear_cross_entropy_check(x, weight, targets)
    d_x, d_weight = _linear_cross_entropy_empty(x, weight, of_x, of_weight)
    V, D = weight.shape
    T = targets.numel()
    rows, x = d_x.view(-1, D), x.reshape(T, D)
    targets = targets.reshape(T).contiguous()
    ACC = LINEAR_CROSS_ENTROPY_ACC[x.dtype]
    wide = torch.float64 if tl.float64 == ACC else torch.float32
    losses = torch.empty(T, dtype=wide, device=x.device)
    count = (targets != ignore_index).sum()
    # The mean divides by count, the number of tokens that count, which only the
    # GPU knows. If the kernel divided by it, small gradients would become zero
    # in float16. So the kernel multiplies by total / count, and the products
    # divide by total. It is 2**15 at most, as float16 ends at 65504.
    total = min(max(T, 1), 2**15)
    # Without a token that counts the gradients are zero, as in PyTorch.
    scale = total / count.clamp(min=1).to(wide)
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
                torch.mm(x[part], weight[some].T, out=logits[:, some])
            pointers = logits, targets[part], losses[part], scale
            arguments = *pointers, V, room, ignore_index
            _linear_cross_entropy_kernel[(len(logits),)](
                *arguments,
                ACC=ACC,
                GRADIENT=of_x or of_weight,
                BLOCK_V=LINEAR_CROSS_ENTROPY_BLOCK,
                num_warps=LINEAR_CROSS_ENTROPY_WARPS,
            )
            # Now the buffer has the gradient of the logits.
            for some in words:
                d, alpha = logits[:, some], 1 / total
                if of_x:
                    rows[part].addmm_(d, weight[some], alpha=alpha)
                if of_weight:
                    d_weight[some].addmm_(d.T, x[part], alpha=alpha)
    # Without a token that counts 0 / 0, so NaN, as in PyTorch.
    return losses.sum() / count, d_x, d_weight


_linear_cross_entropy_forward = custom_op(
    f"{LINEAR_CROSS_ENTROPY_NAMESPACE}::linear_cross_entropy", mutates_args=()
)(_linear_cross_entropy_launch)


@_linear_cross_entropy_forward.register_fake
def _linear_cross_entropy_fake(
    x, weight, targets, ignore_index, of_x, of_weight
):
    _linear_cross_entropy_check(x, weight, targets)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    gradients = _linear_cross_entropy_empty(x, weight, of_x, of_weight)
    return x.new_empty((), dtype=wide), *gradients


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


def _linear_cross_entropy_setup(ctx, inputs, output):
    ctx.wanted = inputs[-2:]
    # No zeros for results that have no gradient: they would be as large.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _linear_cross_entropy_backward(ctx, grad, *_):
    gradients = [None, None]
    for which, d in enumerate(ctx.saved_tensors):
        if ctx.wanted[which]:
            _linear_cross_entropy_scale(d, grad)
            gradients[which] = d
    return *gradients, None, None, None, None


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


def _linear_cross_entropy_autocast(kind, x, weight, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    x, weight = (t.to(dtype) if t.dtype in casts else t for t in (x, weight))
    with torch.autocast(kind, enabled=False):
        return _linear_cross_entropy_forward(x, weight, *options)


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


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the mean cross entropy of the logits x @ weight.T.

    As PyTorch's ``cross_entropy(linear(x, weight), targets)``, but the logits
    of at most ``LINEAR_CROSS_ENTROPY_CHUNK`` tokens exist at one time.

    Takes x (..., D) and weight (V, D), both float16, bfloat16, float32 or
    float64 and of any layout, and int64 targets (...), with D and V from 1 on
    and V up to 2**30. All are on one device. Under ``torch.autocast`` x and
    weight are cast to its dtype. The loss is a float32 scalar (float64 for
    float64): the mean over the tokens whose target is not ``ignore_index``, an
    int. Without such tokens the loss is NaN. If any other target is not in
    range(V), the loss is NaN, and so are the gradient of weight and the one of
    that token's x. The logits and their gradient are rounded to the dtype of x,
    and so is the gradient of the weight after each chunk. On one kind of GPU,
    the results are deterministic if those of its library's matrix products
    are.

    The gradients are computed with the loss, for those of x and weight that
    require grad, and kept for the backward. The backward multiplies them in
    place: a second backward of one loss raises RuntimeError. Second derivatives
    are not supported. The method: https://arxiv.org/abs/2410.10989
    Raises TypeError for other dtypes, and ValueError for other shapes and for
    tensors on several devices.

    Rounding: the logits and their gradient are rounded to the dtype of x, and
    the gradient of the weight is after each chunk. The sums of the loss are in
    float32, or float64 for float64.
    """
    grad = torch.is_grad_enabled()
    wanted = grad and x.requires_grad, grad and weight.requires_grad
    return _linear_cross_entropy_forward(
        x, weight, targets, ignore_index, *wanted
    )[0]
