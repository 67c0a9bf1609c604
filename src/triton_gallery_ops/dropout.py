"""Dropout with a mask that the backward recomputes from a seed.

Sets elements to 0 with probability p and divides the others by 1 - p. The
Philox generator (Salmon et al., 2011, doi:10.1145/2063384.2063405) derives the
mask from seed and element index, so it is the same on every GPU and only the
seed is kept for the backward. Eight elements share one call of the generator.
Unlike in ``torch.nn.functional.dropout``, the seed is a tensor on the device
(see ``dropout_seed``), there is no training flag, p is rounded to a multiple of
2**-16, and a dropped NaN or infinity becomes 0. Deterministic for a given seed,
with gradients of any order.
"""

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

DROPOUT_NAMESPACE = "triton_gallery"
DROPOUT_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
DROPOUT_BLOCK = 2048  # elements of a program


@triton.jit
def _dropout_bits(seed, first, BLOCK: tl.constexpr):
    """Return 16 bits for each of the elements from ``first`` on, in int32."""
    # In int64: past 2**32 counters the mask would begin again.
    n = first.to(tl.int64) // 8 + tl.arange(0, BLOCK // 8)  # (BLOCK // 8,)
    w0, w1, w2, w3 = tl.randint4x(seed, n)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BLOCK // 8, 2, 2)
    halves = tl.join(words & 0xFFFF, words >> 16)  # (BLOCK // 8, 2, 2, 2)
    return tl.reshape(halves, (BLOCK,)).to(tl.int32)


@triton.jit
def _dropout_block(
    x_ptrs,
    y_ptrs,
    mask,
    seed,
    first,
    threshold,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x is loaded first: after Philox, its load would wait for the seed.
    x = tl.load(x_ptrs, mask=mask).to(ACC)  # (BLOCK,)
    bits = _dropout_bits(seed, first, BLOCK)  # (BLOCK,)
    # With p = 1 nothing is kept, and the scale does not matter.
    kept = tl.maximum(65536 - threshold, 1)
    scale = 65536.0 / kept.to(ACC)
    tl.store(y_ptrs, tl.where(bits >= threshold, x * scale, 0), mask=mask)


@triton.jit
def _dropout_kernel(
    x_ptr,
    seed_ptr,
    y_ptr,
    N,
    threshold,  # of 65536 values of 16 bits, how many drop an element
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In int32 the product would overflow past element 2**31.
    first = tl.program_id(axis=0).to(tl.int64) * BLOCK
    offs = first + tl.arange(0, BLOCK)  # (BLOCK,)
    seed = tl.load(seed_ptr)
    x_ptrs, y_ptrs = x_ptr + offs, y_ptr + offs
    if first + BLOCK <= N:
        _dropout_block(x_ptrs, y_ptrs, None, seed, first, threshold, ACC, BLOCK)
    else:
        mask = offs < N
        _dropout_block(x_ptrs, y_ptrs, mask, seed, first, threshold, ACC, BLOCK)


def dropout_seed(
    device: torch.device | str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return a seed for ``dropout``, an int64 tensor with one element.

    It is drawn on the device, so the CPU does not wait for it. A generator has
    to be of that device; without one, PyTorch's own is used.
    """
    return torch.randint(2**63 - 1, (1,), device=device, generator=generator)


def _dropout_check(x, p, seed):
    """Raise for what the op does not take."""
    if x.dtype not in DROPOUT_ACC:
        raise TypeError(f"dropout takes a float tensor, not {x.dtype}")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout takes a p from 0 to 1, not {p}")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError(
            "dropout takes a tensor with one int64 as its seed, "
            f"not {tuple(seed.shape)} of {seed.dtype}"
        )
    if seed.device != x.device:
        raise TypeError(
            f"dropout takes a seed on the device of x, {x.device}, "
            f"not on {seed.device}"
        )


def _dropout_launch(
    x, p, seed, kernel=_dropout_kernel, block=DROPOUT_BLOCK, num_warps=4
):
    _dropout_check(x, p, seed)
    x = x.contiguous()
    y = torch.empty_like(x)
    N = x.numel()
    if N == 0:
        return y
    threshold = round(float(p) * 65536)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        arguments = x, seed, y, N, threshold
        kernel[(triton.cdiv(N, block),)](
            *arguments,
            ACC=DROPOUT_ACC[x.dtype],
            BLOCK=block,
            num_warps=num_warps,
        )
    return y


@triton_op(f"{DROPOUT_NAMESPACE}::dropout", mutates_args={})
def dropout(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """Return x with elements set to 0 with probability p, others scaled.

    Takes float16, bfloat16, float32 or float64 of any shape; ``p`` from 0 to 1,
    which is rounded to a multiple of 2**-16; and a seed, an int64 tensor with
    one element on the device of ``x``, as ``dropout_seed`` draws it. Kept
    elements are divided by 1 - p. Dropped ones are 0, even NaN. It always
    drops: do not call it in evaluation, or give it a ``p`` of 0.

    The mask depends on seed, p and the index of an element alone: neither on
    the dtype, the layout, nor the GPU. The result is contiguous. It has the
    shape and dtype of ``x``, and gradients of any order. Nothing is kept for
    the backward but the seed. Raises TypeError for other dtypes, seeds or
    devices that differ, and ValueError for other p. The generator is Philox,
    https://doi.org/10.1145/2063384.2063405.

    Rounding: the product with 1 / (1 - p) is in float32, or float64 for
    float64, and is rounded once.
    """
    return _dropout_launch(x, p, seed, wrap_triton(_dropout_kernel))


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
DROPOUT_LIBRARY = Library(DROPOUT_NAMESPACE, "FRAGMENT")
DROPOUT_LIBRARY.impl("dropout", _dropout_launch, "CUDA")


def _dropout_setup(ctx, inputs, output):
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _dropout_gradient(ctx, grad):
    return dropout(grad, ctx.p, *ctx.saved_tensors), None, None


dropout.register_autograd(_dropout_gradient, setup_context=_dropout_setup)
