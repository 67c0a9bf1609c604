"""Linear layer with bias and GELU, fused into the matrix product.

Computes gelu(x @ weight.T + bias), exact or with the tanh approximation. The
GELU is applied in registers, before rounding, which saves a write and a read of
the product. That matters less the larger K is. On H100, H200 and B200, half
precision goes through the copy engine; matrices whose rows do not begin at
multiples of 16 bytes are copied first. Float32 has full precision, not TF32. If
a gradient is wanted, the product is kept for the backward. Products of the
backward are ``matmul``'s in half precision where 8 does not divide N or K, and
otherwise PyTorch's, as deterministic as they are. The forward is deterministic.
A second derivative raises RuntimeError.
"""

import math
import threading
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_gallery_ops.matmul import matmul
from triton_gallery_ops.persistent_matmul import (
    _persistent_matmul_copy,
    _persistent_matmul_place,
)

LINEAR_GELU_NAMESPACE = "triton_gallery"
LINEAR_GELU_THREAD = threading.local()
LINEAR_GELU_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# What tl.dot is given. The interpreter multiplies bfloat16 tiles wrongly.
LINEAR_GELU_DOT = {
    torch.float16: tl.float16,
    torch.bfloat16: (
        tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
    ),
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Through descriptors: BLOCK_M, BLOCK_N, BLOCK_K, warps and stages
LINEAR_GELU_TILES = [
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 6),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 6),
]
LINEAR_GELU_EDGE = 48  # what an edge of a tile costs, beside its area
LINEAR_GELU_ROOM = 227 * 1024  # bytes of shared memory that these take
# Through pointers
LINEAR_GELU_HALF = {
    "BLOCK_M": 128,
    "BLOCK_N": 128,
    "BLOCK_K": 64,
    "num_warps": 8,
    "num_stages": 3,
}
# In float32 and float64 there are no tensor cores to feed, or slow ones.
LINEAR_GELU_WIDE = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_K": 16,
    "num_warps": 4,
    "num_stages": 3,
}


@triton.jit
def _linear_gelu_phi(z, GELU: tl.constexpr):
    """Return the share of z that passes."""
    if GELU == "erf":
        share = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
    else:
        s = z * z
        if GELU == "tanh":
            # Held, or the slope would be 0 times inf for a very large z.
            s = tl.minimum(s, 100.0)
            p = 0.1029432395800235 * s + 2.302208198144325
        else:
            s = tl.minimum(s, 30.25)
            p = -7.75493378e-11 * s + 9.3906819e-09
            p = p * s - 4.67923821e-07
            p = p * s + 1.22248437e-05
            p = p * s - 0.000162993407
            p = p * s - 8.72860404e-05
            p = p * s + 0.104829921
            p = p * s + 2.3022103
        share = 1 / (1 + tl.exp2(-z * p))
    return share


@triton.jit
def _linear_gelu_add_bias(acc, bias_ptr, offs_n, N):
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0)
    return acc + bias[None, :].to(acc.dtype)


@triton.jit
def _linear_gelu_engine_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    y_desc,
    z_desc,
    GELU: tl.constexpr,  # "none" or "tanh"
    BIAS: tl.constexpr,  # whether there is one
    KEEP: tl.constexpr,  # whether z is wanted
    DOT: tl.constexpr,
):
    M, N = y_desc.shape
    BLOCK_M: tl.constexpr = y_desc.block_shape[0]
    HALF: tl.constexpr = y_desc.block_shape[1]  # of a tile's columns
    BLOCK_K: tl.constexpr = x_desc.block_shape[1]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, 2 * HALF)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one's epilogue.
    for tile in tl.range(first, tiles_m * tiles_n, programs, flatten=True):
        pid_m, pid_n = _persistent_matmul_place(tile, tiles_m, tiles_n)
        # Rows and columns fit int32, whatever their product is.
        off_m, off_n = pid_m * BLOCK_M, pid_n * 2 * HALF
        acc = tl.zeros((BLOCK_M, 2 * HALF), dtype=tl.float32)
        for k in range(0, x_desc.shape[1], BLOCK_K):
            # The engine fills with zeros past K, so those add nothing.
            x = x_desc.load([off_m, k]).to(DOT)  # (BLOCK_M, BLOCK_K)
            weight = weight_desc.load([off_n, k]).to(DOT)  # (2 HALF, BLOCK_K)
            acc = tl.dot(x, weight.T, acc)
        # Of halves, shared memory holds one at a time, beside more of x and
        # weight. tl.split takes apart the last dimension.
        both = tl.reshape(acc, (BLOCK_M, 2, HALF)).permute(0, 2, 1)
        left, right = tl.split(both)  # (BLOCK_M, HALF)
        if BIAS:
            offs_n = off_n + tl.arange(0, HALF)
            left = _linear_gelu_add_bias(left, bias_ptr, offs_n, N)
            right = _linear_gelu_add_bias(right, bias_ptr, offs_n + HALF, N)
        y = left * _linear_gelu_phi(left, GELU)
        y_desc.store([off_m, off_n], y.to(y_desc.dtype))
        y = right * _linear_gelu_phi(right, GELU)
        y_desc.store([off_m, off_n + HALF], y.to(y_desc.dtype))
        if KEEP:
            z_desc.store([off_m, off_n], left.to(y_desc.dtype))
            z_desc.store([off_m, off_n + HALF], right.to(y_desc.dtype))


@triton.jit
def _linear_gelu_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    GELU: tl.constexpr,  # "none", "tanh", or "erf": exact, by tl.erf
    BIAS: tl.constexpr,  # whether there is one
    KEEP: tl.constexpr,  # whether z is wanted
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_m, pid_n = _persistent_matmul_place(
        tl.program_id(axis=0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    )
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    # Rows past the last one are clamped to it, so the loop needs no mask for
    # them. In int32 a row's offset would overflow past element 2**31.
    rows_x = tl.minimum(offs_m, M - 1).to(tl.int64) * stride_xm
    rows_w = tl.minimum(offs_n, N - 1).to(tl.int64) * stride_wn
    x_ptrs = x_ptr + rows_x[:, None] + offs_k[None, :]
    weight_ptrs = weight_ptr + rows_w[None, :] + offs_k[:, None]
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # If the loop might not run, ptxas would have each multiplication of a large
    # tile wait for the one before: tuned_matmul.py shows it.
    for k in range(0, tl.maximum(K, 1), BLOCK_K):
        # What lies past a row's end may be NaN, and only zeros add nothing.
        mask_k = offs_k < K - k
        x = tl.load(x_ptrs, mask=mask_k[None, :], other=0).to(DOT)
        weight = tl.load(weight_ptrs, mask=mask_k[:, None], other=0).to(DOT)
        # "ieee": float32 stays float32, as PyTorch has it, and is not cut to
        # TF32.
        z = tl.dot(x, weight, z, input_precision="ieee", out_dtype=ACC)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if BIAS:
        z = _linear_gelu_add_bias(z, bias_ptr, offs_n, N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    # z is stored last: stored first, registers would spill.
    tl.store(y_ptr + offs, z * _linear_gelu_phi(z, GELU), mask=mask)
    if KEEP:
        tl.store(z_ptr + offs, z, mask=mask)


@triton.jit
def _linear_gelu_backward_kernel(
    grad_ptr,
    z_ptr,
    dz_ptr,
    partial_ptr,
    M,
    N,
    GELU: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = pid // tiles_n
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    offs = offs_m * N + offs_n  # (BLOCK_M, BLOCK_N)
    # Zeros past the end add nothing to the sum of a column.
    grad = tl.load(grad_ptr + offs, mask=mask, other=0).to(ACC)
    z = tl.load(z_ptr + offs, mask=mask, other=0).to(ACC)
    share = _linear_gelu_phi(z, GELU)
    s = z * z
    if GELU == "tanh":
        inner = 0.21406444881780076 * tl.minimum(s, 100.0) + 1.5957691216057308
        slope = share * (1 - share) * inner
    else:
        slope = 0.3989422804014327 * tl.exp(-0.5 * s)
    dz = grad * (share + z * slope)  # (BLOCK_M, BLOCK_N)
    tl.store(dz_ptr + offs, dz, mask=mask)
    # A row of sums for each tile, in its own place. Atomic additions to one row
    # would come in another order each time.
    partial_ptrs = partial_ptr + pid_m * N + offs_n  # (1, BLOCK_N)
    db = tl.sum(dz, axis=0, keep_dims=True)  # (1, BLOCK_N)
    tl.store(partial_ptrs, db, mask=offs_n < N)


def _linear_gelu_check(x, weight, bias, approximate):
    """Raise for what the op does not take."""
    given = (x, weight) if bias is None else (x, weight, bias)
    kinds = [(t.dtype, t.device) for t in given]
    if x.dtype not in LINEAR_GELU_ACC or kinds.count(kinds[0]) < len(kinds):
        raise TypeError(
            "linear_gelu takes float16, bfloat16, float32 or float64, one for "
            f"all, on one device, not {kinds}"
        )
    fits = x.ndim > 0 and weight.ndim == 2 and x.shape[-1:] == weight.shape[1:]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [tuple(t.shape) for t in given]
        raise ValueError(
            f"linear_gelu takes shapes (..., K), (N, K) and (N,), not {shapes}"
        )
    _linear_gelu_kind(x, approximate)


def _linear_gelu_kind(x, approximate):
    """Return which GELU the kernels compute."""
    if approximate not in ("none", "tanh"):
        raise ValueError(
            "linear_gelu takes approximate='none' or 'tanh', "
            f"not {approximate!r}"
        )
    # The polynomial is as exact as float32. In float64 tl.erf is.
    exact = x.dtype == torch.float64 and approximate == "none"
    return "erf" if exact else approximate


@cache
def _linear_gelu_programs(device):
    """Return how many programs a GPU's copy engine serves; 0 without one."""
    if device.type == "cpu":  # interpreted: few programs, with many tiles each
        return 4
    if device.type != "cuda" or torch.version.hip:
        return 0
    gpu = torch.cuda.get_device_properties(device)
    has_room = gpu.shared_memory_per_block_optin >= LINEAR_GELU_ROOM
    return gpu.multi_processor_count if gpu.major >= 9 and has_room else 0


def _linear_gelu_rows(x, unit):
    """Return a matrix with contiguous rows: x, if it has them, or a copy.

    The rows begin at multiples of ``unit`` elements, if that is more than one.
    """
    (rows, length), (stride, step) = x.shape, x.stride()
    if unit == 1:
        return x if step == 1 else x.contiguous()
    begins = x.data_ptr() % 16 == 0 and stride % unit == 0
    # Rows that overlap, as those of an expanded tensor, no engine takes.
    if begins and step == 1 and stride >= length:
        return x
    return _persistent_matmul_copy(_linear_gelu_empty(x, rows, length, unit), x)


def _linear_gelu_empty(x, rows, length, unit):
    """Return a new matrix like x, with rows of a multiple of unit elements."""
    return x.new_empty(rows, triton.cdiv(length, unit) * unit)[:, :length]


def _linear_gelu_plan(M, N, programs):
    """Return the number of programs and their tile: that of least cost."""

    def number(tile):
        return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])

    def cost(tile):
        edges = LINEAR_GELU_EDGE * (tile[0] + tile[1])
        rounds = triton.cdiv(number(tile), programs)
        return rounds * (tile[0] * tile[1] + edges)

    tile = min(LINEAR_GELU_TILES, key=cost)
    return min(programs, number(tile)), tile


def _linear_gelu_by_engine(x, weight, bias, y, z, known):
    """Launch the kernel with descriptors, on rows that begin at 16 bytes."""
    if x.device.type == "cuda" and not hasattr(LINEAR_GELU_THREAD, "begun"):
        # A thread makes descriptors in a CUDA context, which its first work
        # gives it. Autograd, for one, has threads of its own.
        LINEAR_GELU_THREAD.begun = torch.zeros(1, device=x.device)
    programs, (m, n, k, num_warps, num_stages) = _linear_gelu_plan(
        *y.shape, _linear_gelu_programs(x.device)
    )
    describe = TensorDescriptor.from_tensor
    y_desc = describe(y, [m, n // 2])
    return _linear_gelu_engine_kernel[(programs,)](
        describe(x, [m, k]),
        describe(weight, [n, k]),
        bias,
        y_desc,
        describe(z, [m, n // 2]) if known["KEEP"] else y_desc,
        DOT=LINEAR_GELU_DOT[x.dtype],
        num_warps=num_warps,
        num_stages=num_stages,
        **known,
    )


def _linear_gelu_by_pointers(x, weight, bias, y, z, known):
    """Launch the kernel with pointers on matrices with contiguous rows."""
    plan = LINEAR_GELU_HALF if x.element_size() == 2 else LINEAR_GELU_WIDE
    (M, K), N = x.shape, weight.shape[0]
    tiles_m = triton.cdiv(M, plan["BLOCK_M"])
    arguments = x, weight, bias, y, z, M, N, K, x.stride(0), weight.stride(0)
    return _linear_gelu_kernel[(tiles_m * triton.cdiv(N, plan["BLOCK_N"]),)](
        *arguments,
        ACC=LINEAR_GELU_ACC[x.dtype],
        DOT=LINEAR_GELU_DOT[x.dtype],
        **known,
        **plan,
    )


def _linear_gelu_launch(x, weight, bias, approximate, keep):
    _linear_gelu_check(x, weight, bias, approximate)
    (N, K), lead = weight.shape, x.shape[:-1]
    M = math.prod(lead)
    if M == 0 or N == 0:
        y = x.new_empty(*lead, N)
        return y, torch.empty_like(y) if keep else x.new_empty(0)
    half = x.element_size() == 2 and K > 0
    engine = half and _linear_gelu_programs(x.device)
    launch = _linear_gelu_by_engine if engine else _linear_gelu_by_pointers
    unit = 8 if engine else 1  # the engine's rows begin at 16 bytes
    y = _linear_gelu_empty(x, M, N, unit)
    z = _linear_gelu_empty(x, M, N, unit) if keep else x.new_empty(0)
    GELU = _linear_gelu_kind(x, approximate)
    known = {"GELU": GELU, "BIAS": bias is not None, "KEEP": keep}
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        launch(
            _linear_gelu_rows(x.reshape(M, K), unit),
            _linear_gelu_rows(weight, unit),
            y if bias is None else bias.contiguous(),
            y,
            z,
            known,
        )
    y = y.contiguous().view(*lead, N)
    return y, z.contiguous().view(*lead, N) if keep else z


def _linear_gelu_backward_launch(grad, z, approximate, wrap=lambda k: k):
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in (grad, z)]
    if z.dtype not in LINEAR_GELU_ACC or kinds[0] != kinds[1] or z.ndim == 0:
        raise ValueError(
            "linear_gelu_backward takes a gradient of z's float dtype, shape "
            f"and device, not {kinds[0]} for {kinds[1]}"
        )
    GELU = _linear_gelu_kind(z, approximate)
    N = z.shape[-1]
    M = math.prod(z.shape[:-1])
    grad, z = grad.contiguous(), z.contiguous()
    dz = torch.empty_like(z)
    if M == 0 or N == 0:
        return dz, z.new_zeros(N)
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    # A double takes two registers, and its exponential several.
    BLOCK_M = 16 if wide == torch.float64 else 64
    tiles_m, tiles_n = triton.cdiv(M, BLOCK_M), triton.cdiv(N, 128)
    partial = z.new_empty(tiles_m, N, dtype=wide)
    with torch.accelerator.device_index(z.device.index):
        arguments = grad, z, dz, partial, M, N
        wrap(_linear_gelu_backward_kernel)[(tiles_m * tiles_n,)](
            *arguments,
            GELU=GELU,
            ACC=LINEAR_GELU_ACC[z.dtype],
            BLOCK_M=BLOCK_M,
            BLOCK_N=128,
            num_warps=8,
        )
    return dz, partial.sum(0).to(z.dtype)


@custom_op(f"{LINEAR_GELU_NAMESPACE}::linear_gelu_forward", mutates_args=())
def linear_gelu_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    approximate: str,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y of linear_gelu and, if ``keep``, z; else an empty tensor."""
    return _linear_gelu_launch(x, weight, bias, approximate, keep)


@linear_gelu_forward.register_fake
def _linear_gelu_fake(x, weight, bias, approximate, keep):
    _linear_gelu_check(x, weight, bias, approximate)
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    return y, torch.empty_like(y) if keep else x.new_empty(0)


@triton_op(f"{LINEAR_GELU_NAMESPACE}::linear_gelu_backward", mutates_args={})
def linear_gelu_backward(
    grad: torch.Tensor, z: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of z and of the bias, for the gradient of y.

    Takes two tensors of one dtype, shape and device, of any layout, and raises
    ValueError for two that differ.
    """
    return _linear_gelu_backward_launch(grad, z, approximate, wrap_triton)


# On a GPU a call goes to the launcher; all else goes on to the op.
LINEAR_GELU_LIBRARY = Library(LINEAR_GELU_NAMESPACE, "FRAGMENT")
LINEAR_GELU_LIBRARY.impl("linear_gelu_forward", _linear_gelu_launch, "CUDA")
LINEAR_GELU_LIBRARY.impl(
    "linear_gelu_backward", _linear_gelu_backward_launch, "CUDA"
)


def _linear_gelu_autocast(kind, x, weight, bias, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    x, weight, bias = (
        t.to(dtype) if t is not None and t.dtype in casts else t
        for t in (x, weight, bias)
    )
    with torch.autocast(kind, enabled=False):
        return linear_gelu_forward(x, weight, bias, *options)


LINEAR_GELU_LIBRARY.impl(
    "linear_gelu_forward", partial(_linear_gelu_autocast, "cpu"), "AutocastCPU"
)
LINEAR_GELU_LIBRARY.impl(
    "linear_gelu_forward",
    partial(_linear_gelu_autocast, "cuda"),
    "AutocastCUDA",
)


def _linear_gelu_setup(ctx, inputs, output):
    x, weight, _, ctx.approximate, keep = inputs
    if not keep:
        raise ValueError("linear_gelu_forward has a gradient with keep=True")
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of z


def _linear_gelu_gradient(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    if torch.is_grad_enabled():  # create_graph=True: z would count as given
        raise RuntimeError("linear_gelu has no second derivatives")
    x, weight, z = ctx.saved_tensors
    dz, db = linear_gelu_backward(grad, z, ctx.approximate)
    M = math.prod(x.shape[:-1])
    (N, K), dx, dw = weight.shape, None, None
    # PyTorch's product is slow where rows begin at no multiples of 16 bytes.
    odd = x.element_size() == 2 and (N % 8 != 0 or K % 8 != 0)
    product = matmul if odd else torch.mm
    dz = dz.reshape(M, N)
    # Of frozen weights, or of data, no product is needed.
    if ctx.needs_input_grad[0]:
        dx = product(dz, weight).view(x.shape)
    if ctx.needs_input_grad[1]:
        dw = product(dz.T, x.reshape(M, K))
    return dx, dw, db if ctx.needs_input_grad[2] else None, None, None


linear_gelu_forward.register_autograd(
    _linear_gelu_gradient, setup_context=_linear_gelu_setup
)


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "none",
) -> torch.Tensor:
    """Return gelu(linear(x, weight, bias), approximate=approximate).

    Takes tensors of one dtype, float16, bfloat16, float32 or float64, of shapes
    (..., K), (N, K) and (N,), in any layout; the bias may be None. The result
    has the shape (..., N), is contiguous, and is deterministic. Products are
    added up in float32, or float64, and GELU is computed before the one
    rounding to the dtype. float32 is never cut to TF32. Raises TypeError and
    ValueError for what it does not take. Has a gradient: where one is wanted,
    the result of the product is kept for it. Has no second derivatives, and
    raises RuntimeError where they are asked for, by ``create_graph=True``.

    Rounding: products are summed in float32, or float64 for float64; bias and
    GELU are computed in that type, and the result is rounded once.

    Under ``torch.autocast`` it casts x, weight and bias to autocast's dtype.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return linear_gelu_forward(x, weight, bias, approximate, keep)[0]
