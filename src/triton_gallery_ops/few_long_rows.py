"""Sum and log-sum-exp of a few long rows, batch-invariant.

``few_long_rows_sum`` and ``few_long_rows_logsumexp`` reduce the last dimension
like ``torch.sum`` and ``torch.logsumexp``, but return float32 for half
precision. Many programs share a long row, so even a single row keeps many
multiprocessors busy. How a row is split depends only on its length and dtype:
results are deterministic on a given GPU model and do not depend on the other
rows of the batch. A call takes the CPU longer than one row takes the GPU, so
for one row the op pays off while the GPU has other work, or in a CUDA graph.
Both have a backward; that of the log-sum-exp has no second derivative.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

FEW_LONG_ROWS_NAMESPACE = "triton_gallery"
FEW_LONG_ROWS_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# The next two are bytes of elements in the accumulator's type.
FEW_LONG_ROWS_WHOLE = 128 * 1024  # of a row that is one part
FEW_LONG_ROWS_PART = 32 * 1024  # of a part of longer rows
FEW_LONG_ROWS_ALONE = 2048  # elements that a program of the backward has
FEW_LONG_ROWS_COUNTS = 1024  # rows that have a counter


@triton.jit
def _few_long_rows_reduce(x, LOG: tl.constexpr):
    """Return the sum of a block, or its log-sum-exp."""
    if LOG:
        top = tl.max(x, axis=0)
        # inf - inf would be NaN.
        top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        result = top + tl.log(tl.sum(tl.exp(x - top), axis=0))
    else:
        result = tl.sum(x, axis=0)
    return result


@triton.jit
def _few_long_rows_kernel(
    x_ptr,
    part_ptr,
    out_ptr,
    count_ptr,
    N,
    parts,
    stride_xm,
    LOG: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # a block for all parts of a row, or 0: no counter
):
    # VEC divides N. The compiler learns it here, and loads VEC at once.
    N = N // VEC * VEC
    # The compiler may also know that 16 divides the stride, and then it would
    # add up in another order. A program's number, always 0 on this axis, is
    # added so that it cannot know.
    stride_xm = (stride_xm + tl.program_id(axis=1)) // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    row, part = pid // parts, pid % parts
    offs = part * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    # Past the end, zeros add nothing to a sum, and exp(-inf) is zero.
    OTHER: tl.constexpr = -float("inf") if LOG else 0.0
    x_ptrs = x_ptr + row * stride_xm + offs  # (BLOCK,)
    x = tl.load(x_ptrs, mask=offs < N, other=OTHER).to(ACC)
    tl.store(part_ptr + pid, _few_long_rows_reduce(x, LOG))
    if PARTS:
        # One thread counts, after the thread that stores has stored.
        tl.debug_barrier()
        # Acquire and release: who finds the last count sees all parts.
        if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") == parts - 1:
            offs_p = tl.arange(0, PARTS)  # (PARTS,)
            # From pid - part the compiler cannot tell what divides parts.
            y_ptrs = part_ptr + (pid - part) + offs_p  # (PARTS,)
            # ".cg" reads the L2 cache, to which all multiprocessors write.
            y = tl.load(y_ptrs, offs_p < parts, OTHER, cache_modifier=".cg")
            tl.store(out_ptr + row, _few_long_rows_reduce(y, LOG))
            # The next launch counts from zero.
            tl.store(count_ptr + row, 0)


@triton.jit
def _few_long_rows_backward_kernel(
    g_ptr,
    x_ptr,
    y_ptr,
    d_ptr,
    N,
    parts,
    stride_xm,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    pid = tl.program_id(axis=0).to(tl.int64)
    row, part = pid // parts, pid % parts
    g, y = tl.load(g_ptr + row), tl.load(y_ptr + row)
    offs = part * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + row * stride_xm + offs, mask=mask).to(ACC)
    tl.store(d_ptr + row * N + offs, g * tl.exp(x - y), mask=mask)


def _few_long_rows_check(x):
    """Return the dtype of the results; raise for what the op does not take."""
    if x.dtype not in FEW_LONG_ROWS_ACC:
        raise TypeError(f"few_long_rows takes a float tensor, not {x.dtype}")
    if x.ndim == 0:
        raise ValueError("few_long_rows takes a tensor with a last dimension")
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _few_long_rows_matrix(x):
    """Return x as a matrix that can be loaded as its plan says."""
    N = int(x.shape[-1])
    x = x.reshape(-1, N)
    VEC = _few_long_rows_plan(N, x.dtype)["VEC"]
    begins = int(x.stride(0)) % VEC or x.storage_offset() % VEC
    if x.stride(1) != 1 or begins:
        x = torch.clone(x, memory_format=torch.contiguous_format)
    return x


@functools.cache
def _few_long_rows_plan(N, dtype):
    """Return how to launch for rows of N, however many rows there are."""
    VEC, size = 16 // dtype.itemsize, max(4, dtype.itemsize)
    BLOCK, num_warps = FEW_LONG_ROWS_PART // size, 8
    if N * size <= FEW_LONG_ROWS_WHOLE:
        # Few programs: many warps each, a thread for 64 bytes of a row.
        BLOCK = triton.next_power_of_2(N)
        num_warps = min(32, max(4, BLOCK * size // 2048))
    return {
        "ACC": FEW_LONG_ROWS_ACC[dtype],
        # All or nothing. With half of VEC, some rows of a matrix would begin
        # at multiples of 16 bytes, and others would not.
        "VEC": VEC if N % VEC == 0 else 1,
        "BLOCK": BLOCK,
        "num_warps": num_warps,
    }


def _few_long_rows_plan_backward(N, dtype):
    """Return the same for the backward, whose parts need not be finished."""
    plan = _few_long_rows_plan(N, dtype)
    BLOCK = min(plan["BLOCK"], FEW_LONG_ROWS_ALONE)
    return plan | {"BLOCK": BLOCK, "num_warps": 4}


@functools.cache
def _few_long_rows_counters(device, stream):
    """Return counters for a stream, whose launches do not overlap.

    A launch leaves them at zero, so they are set to zero only here.
    """
    return torch.zeros(FEW_LONG_ROWS_COUNTS, dtype=torch.int32, device=device)


def _few_long_rows_launch(x, LOG, kernel, count=None):
    """Reduce rows: in one launch with counters, in passes without."""
    dtype = _few_long_rows_check(x)
    out = x.new_empty(x.shape[:-1], dtype=dtype)
    if x.numel() == 0:
        return out.fill_(-math.inf if LOG else 0)
    x, M = _few_long_rows_matrix(x), out.numel()
    plan = _few_long_rows_plan(int(x.shape[1]), x.dtype)
    counts = count is not None and count.numel() >= M
    parts = PARTS = 0
    while parts != 1 and not PARTS:
        N, stride = int(x.shape[1]), int(x.stride(0))
        parts = triton.cdiv(N, plan["BLOCK"])
        to = x.new_empty((M, parts), dtype=dtype) if parts > 1 else out
        if counts and 1 < parts <= plan["BLOCK"]:
            PARTS = triton.next_power_of_2(parts)
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            pointers = x, to, out, count if PARTS else out
            sizes = N, parts, stride, LOG
            kernel[(M * parts,)](*pointers, *sizes, PARTS=PARTS, **plan)
        # The results of the parts are a shorter row, for the next pass. It adds
        # them up in the order in which a launch with counters does.
        BLOCK = min(triton.next_power_of_2(parts), plan["BLOCK"])
        x, plan = to, plan | {"VEC": 1, "BLOCK": BLOCK}
    return out


def _few_long_rows_launch_on_gpu(x, LOG):
    # A graph may be replayed on any stream, beside calls on that stream.
    count = None
    if x.is_cuda and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(x.device).cuda_stream
        count = _few_long_rows_counters(x.device, stream)
    return _few_long_rows_launch(x, LOG, _few_long_rows_kernel, count)


def _few_long_rows_backward_launch(
    grad, x, y, kernel=_few_long_rows_backward_kernel
):
    dtype = _few_long_rows_check(x)
    for t in (grad, y):
        if (t.dtype, t.shape, t.device) != (dtype, x.shape[:-1], x.device):
            raise ValueError(
                "few_long_rows_logsumexp_backward takes a gradient and a "
                f"result of dtype {dtype} and shape {tuple(x.shape[:-1])}, on "
                f"one device, not {t.dtype} and {tuple(t.shape)}"
            )
    d = torch.empty_like(x, memory_format=torch.contiguous_format)
    if d.numel() == 0:
        return d
    N, x = int(x.shape[-1]), _few_long_rows_matrix(x)
    plan = _few_long_rows_plan_backward(N, x.dtype)
    parts = triton.cdiv(N, plan["BLOCK"])
    g, y, stride = grad.contiguous(), y.contiguous(), int(x.stride(0))
    with torch.accelerator.device_index(x.device.index):
        kernel[(y.numel() * parts,)](g, x, y, d, N, parts, stride, **plan)
    return d


@triton_op(f"{FEW_LONG_ROWS_NAMESPACE}::few_long_rows_sum", mutates_args={})
def few_long_rows_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sums along the last dimension, as torch.sum(x, -1).

    Takes a tensor of float16, bfloat16, float32 or float64 with one dimension
    or more, of any layout. One whose rows do not fit into a matrix of
    contiguous rows is copied first. Returns float64 for float64, and float32
    for the others. The result of a row is deterministic on one kind of GPU, and
    the same in any batch: it does not depend on other rows, nor on how many
    there are. Raises TypeError for other dtypes, and ValueError for a tensor
    without dimensions. Has a gradient.

    Rounding: sums are in float32, or float64 for float64, and so are the
    results.
    """
    kernel = wrap_triton(_few_long_rows_kernel)
    return _few_long_rows_launch(x, False, kernel)


@triton_op(
    f"{FEW_LONG_ROWS_NAMESPACE}::few_long_rows_logsumexp", mutates_args={}
)
def few_long_rows_logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(x))) along the last dimension.

    Does what torch.logsumexp(x, -1) does, without overflow. Takes, returns and
    raises what ``few_long_rows_sum`` does. Infinities are what they are in
    PyTorch. Has a gradient, which has none itself.
    """
    kernel = wrap_triton(_few_long_rows_kernel)
    return _few_long_rows_launch(x, True, kernel)


@triton_op(
    f"{FEW_LONG_ROWS_NAMESPACE}::few_long_rows_logsumexp_backward",
    mutates_args={},
)
def few_long_rows_logsumexp_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of x, for y = few_long_rows_logsumexp(x).

    Takes the gradient of ``y``, ``x`` and ``y``. Raises as
    ``few_long_rows_sum`` does, and ValueError where ``grad`` or ``y`` is not
    what the forward returns for ``x``.
    """
    kernel = wrap_triton(_few_long_rows_backward_kernel)
    return _few_long_rows_backward_launch(grad, x, y, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
FEW_LONG_ROWS_LIBRARY = Library(FEW_LONG_ROWS_NAMESPACE, "FRAGMENT")
FEW_LONG_ROWS_LIBRARY.impl(
    "few_long_rows_sum",
    lambda x: _few_long_rows_launch_on_gpu(x, False),
    "CUDA",
)
FEW_LONG_ROWS_LIBRARY.impl(
    "few_long_rows_logsumexp",
    lambda x: _few_long_rows_launch_on_gpu(x, True),
    "CUDA",
)
FEW_LONG_ROWS_LIBRARY.impl(
    "few_long_rows_logsumexp_backward", _few_long_rows_backward_launch, "CUDA"
)


def _few_long_rows_sum_setup(ctx, inputs, output):
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype


def _few_long_rows_sum_gradient(ctx, grad):
    return grad.unsqueeze(-1).to(ctx.dtype).expand(ctx.shape)


def _few_long_rows_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def _few_long_rows_gradient(ctx, grad):
    return few_long_rows_logsumexp_backward(grad, *ctx.saved_tensors)


few_long_rows_sum.register_autograd(
    _few_long_rows_sum_gradient, setup_context=_few_long_rows_sum_setup
)
few_long_rows_logsumexp.register_autograd(
    _few_long_rows_gradient, setup_context=_few_long_rows_setup
)
