"""SwiGLU activation, silu(gate) * up, with its backward.

With silu(x) = x * sigmoid(x) (Shazeer, 2020, arXiv:2002.05202). Options make it
GEGLU, with either GELU, or the form of gpt-oss with its limits; kernels are
compiled for each set of options. ``swiglu`` takes two tensors, which may be
halves of a projection: strided rows are read in place. ``swiglu_packed`` takes
the whole projection, gate or up first, and writes one gradient; prefer it for
training, because autograd would have to assemble the gradients of two halves in
further passes over memory. The op is memory bound, so the backward recomputes
the sigmoid instead of storing it. For small tensors, starting the kernel
dominates. The arithmetic is in float32, or float64 for float64. Deterministic.
There is no second derivative.
"""

import math

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

SWIGLU_NAMESPACE = "triton_gallery"
SWIGLU_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
SWIGLU_SILU = {"ACTIVATION": "silu", "ALPHA": 1.0, "BETA": 0.0, "LIMIT": None}
SWIGLU_TILE = 1024  # elements of a program
SWIGLU_FEW = 2**20  # in a tensor of up to this size: half a tile


@triton.jit
def _swiglu_tile(
    M,
    N,
    tiles_n,
    FLAT: tl.constexpr,  # one long row
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return a tile's rows and columns, and whether all of it is inside."""
    # In int32 products of these would overflow past element 2**31.
    pid_m = tl.cast(0, tl.int64)
    pid_n = tl.program_id(axis=0).to(tl.int64)
    if not FLAT:
        pid = tl.program_id(axis=0)
        pid_m = (pid // tiles_n).to(tl.int64)
        pid_n = (pid % tiles_n).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    full_m = (pid_m + 1) * BLOCK_M <= M
    full_n = (pid_n + 1) * BLOCK_N <= N
    return offs_m, offs_n, full_m & full_n


@triton.jit
def _swiglu_clamp(gate, up, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """Return gate and up + BETA, both within LIMIT. NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
    if BETA != 0:
        up += BETA
    return gate, up


@triton.jit
def _swiglu_share(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """Return what the activation multiplies gate by."""
    if ACTIVATION == "gelu":
        s = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        square = tl.minimum(gate * gate, 100.0)
        slope = 1.5957691216057308 + 0.07135481627260025 * square
        s = tl.sigmoid(gate * slope)
    elif ALPHA != 1:
        s = tl.sigmoid(ALPHA * gate)
    else:
        s = tl.sigmoid(gate)
    return s


@triton.jit
def _swiglu_forward(
    gate_ptrs,
    up_ptrs,
    out_ptrs,
    mask,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    gate = tl.load(gate_ptrs, mask=mask).to(ACC)  # (BLOCK_M, BLOCK_N)
    up = tl.load(up_ptrs, mask=mask).to(ACC)  # (BLOCK_M, BLOCK_N)
    gate, up = _swiglu_clamp(gate, up, BETA, LIMIT)
    s = _swiglu_share(gate, ACTIVATION, ALPHA)
    tl.store(out_ptrs, gate * s * up, mask=mask)


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    M,
    N,
    tiles_n,
    stride_gm,
    stride_um,
    stride_om,
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu", "gelu" or "gelu_tanh"
    ALPHA: tl.constexpr,  # a factor of what the SiLU's sigmoid is of
    BETA: tl.constexpr,  # added to up
    LIMIT: tl.constexpr,  # of gate and up, or None
    FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_gm = stride_gm // VEC * VEC
    stride_um = stride_um // VEC * VEC
    stride_om = stride_om // VEC * VEC
    offs_m, offs_n, full = _swiglu_tile(M, N, tiles_n, FLAT, BLOCK_M, BLOCK_N)
    gate_ptrs = gate_ptr + offs_m * stride_gm + offs_n  # (BLOCK_M, BLOCK_N)
    up_ptrs = up_ptr + offs_m * stride_um + offs_n  # (BLOCK_M, BLOCK_N)
    out_ptrs = out_ptr + offs_m * stride_om + offs_n  # (BLOCK_M, BLOCK_N)
    # If N is odd, loads with a mask are narrow. Full tiles need no mask.
    if full:
        _swiglu_forward(
            gate_ptrs,
            up_ptrs,
            out_ptrs,
            None,
            ACC,
            ACTIVATION,
            ALPHA,
            BETA,
            LIMIT,
        )
    else:
        mask = (offs_m < M) & (offs_n < N)
        _swiglu_forward(
            gate_ptrs,
            up_ptrs,
            out_ptrs,
            mask,
            ACC,
            ACTIVATION,
            ALPHA,
            BETA,
            LIMIT,
        )


@triton.jit
def _swiglu_gradients(
    grad_ptrs,
    gate_ptrs,
    up_ptrs,
    dgate_ptrs,
    dup_ptrs,
    mask,
    ACC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    grad = tl.load(grad_ptrs, mask=mask).to(ACC)  # (BLOCK_M, BLOCK_N)
    gate_in = tl.load(gate_ptrs, mask=mask).to(ACC)  # (BLOCK_M, BLOCK_N)
    up_in = tl.load(up_ptrs, mask=mask).to(ACC)  # (BLOCK_M, BLOCK_N)
    gate, up = _swiglu_clamp(gate_in, up_in, BETA, LIMIT)
    # Recomputed: an exponential, but no byte moved
    s = _swiglu_share(gate, ACTIVATION, ALPHA)
    if ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        dgate = grad * up * (s + gate * density)
    else:
        # z is gate times the derivative of what the sigmoid is of.
        z = gate
        if ACTIVATION == "gelu_tanh":
            square = tl.minimum(gate * gate, 100.0)
            z *= 1.5957691216057308 + 0.21406444881780076 * square
        elif ALPHA != 1:
            z *= ALPHA
        dgate = grad * up * s * (1 + z * (1 - s))
    if LIMIT is not None:
        dgate = tl.where(gate_in <= LIMIT, dgate, 0.0)
    tl.store(dgate_ptrs, dgate, mask=mask)
    dup = grad * gate * s
    if LIMIT is not None:
        dup = tl.where(tl.abs(up_in) <= LIMIT, dup, 0.0)
    tl.store(dup_ptrs, dup, mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    d_ptr,  # to dgate, or to dup where that is first
    M,
    N,
    tiles_n,
    stride_grad_m,
    stride_gm,
    stride_um,
    stride_dm,
    gap,  # from an element of one to the same one of the other
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu", "gelu" or "gelu_tanh"
    ALPHA: tl.constexpr,  # a factor of what the SiLU's sigmoid is of
    BETA: tl.constexpr,  # added to up
    LIMIT: tl.constexpr,  # of gate and up, or None
    FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UP_FIRST: tl.constexpr,
):
    # As in the forward: here the compiler learns that VEC divides them.
    N = N // VEC * VEC
    stride_grad_m = stride_grad_m // VEC * VEC
    stride_gm = stride_gm // VEC * VEC
    stride_um = stride_um // VEC * VEC
    stride_dm = stride_dm // VEC * VEC
    gap = gap // VEC * VEC
    offs_m, offs_n, full = _swiglu_tile(M, N, tiles_n, FLAT, BLOCK_M, BLOCK_N)
    grad_ptrs = grad_ptr + offs_m * stride_grad_m + offs_n  # (BLOCK_M, BLOCK_N)
    gate_ptrs = gate_ptr + offs_m * stride_gm + offs_n  # (BLOCK_M, BLOCK_N)
    up_ptrs = up_ptr + offs_m * stride_um + offs_n  # (BLOCK_M, BLOCK_N)
    d_ptrs = d_ptr + offs_m * stride_dm + offs_n  # (BLOCK_M, BLOCK_N)
    dup_ptrs = d_ptrs + gap
    if UP_FIRST:
        d_ptrs, dup_ptrs = dup_ptrs, d_ptrs
    if full:
        _swiglu_gradients(
            grad_ptrs,
            gate_ptrs,
            up_ptrs,
            d_ptrs,
            dup_ptrs,
            None,
            ACC,
            ACTIVATION,
            ALPHA,
            BETA,
            LIMIT,
        )
    else:
        mask = (offs_m < M) & (offs_n < N)
        _swiglu_gradients(
            grad_ptrs,
            gate_ptrs,
            up_ptrs,
            d_ptrs,
            dup_ptrs,
            mask,
            ACC,
            ACTIVATION,
            ALPHA,
            BETA,
            LIMIT,
        )


def _swiglu_check(name, *tensors):
    """Raise for what the ops do not take."""
    dtypes = [t.dtype for t in tensors]
    if dtypes[0] not in SWIGLU_ACC or len(set(dtypes)) > 1:
        raise TypeError(f"{name} takes one float dtype, not {dtypes}")
    devices = [t.device for t in tensors]
    if len(set(devices)) > 1:
        raise TypeError(f"{name} takes tensors on one device, not {devices}")
    shapes = [tuple(t.shape) for t in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name} takes tensors of one shape, not {shapes}")


def _swiglu_options(name, activation, alpha, beta, limit):
    """Return constants of the kernels, or raise for what is no option."""
    if activation not in ("silu", "gelu", "gelu_tanh"):
        raise ValueError(
            f"{name} takes activation='silu', 'gelu' or 'gelu_tanh', "
            f"not {activation!r}"
        )
    if alpha != 1 and activation != "silu":
        raise ValueError(
            f"{name} takes alpha={alpha} with activation='silu', "
            f"not {activation!r}"
        )
    if limit is not None and not limit > 0:
        raise ValueError(f"{name} takes a limit above 0, not {limit}")
    options = activation, alpha, beta, limit
    return dict(zip(SWIGLU_SILU, options, strict=True))


def _swiglu_halves(name, x, up_first):
    """Return gate and up, as views."""
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{name} takes an even last dimension, not {tuple(x.shape)}"
        )
    first, second = x.tensor_split(2, dim=-1)
    return (second, first) if up_first else (first, second)


def _swiglu_plan(numel, N, flat):
    """Return the shape of a program's tile."""
    tile = SWIGLU_TILE
    if numel <= SWIGLU_FEW:
        tile //= 2
    elif not flat:
        block = min(tile, triton.next_power_of_2(N))
        covered = triton.cdiv(N, block) * block
        # If a quarter or more of the tiles is masked, fewer loads are in
        # flight.
        tile *= 2 if covered * 3 >= N * 4 else 1
    BLOCK_N = tile if flat else min(tile, triton.next_power_of_2(N))
    return {"BLOCK_M": tile // BLOCK_N, "BLOCK_N": BLOCK_N}


def _swiglu_run(kernel, inputs, out, stride_om, *gap, vec=8, **changes):
    """Launch for inputs of one shape and a result with rows stride_om apart."""
    numel = inputs[0].numel()
    if numel == 0:
        return
    N = int(inputs[0].shape[-1]) if inputs[0].ndim else 1
    inputs = [x.reshape(-1, N) for x in inputs]
    inputs = [x if x.stride(1) == 1 else x.contiguous() for x in inputs]
    flat = stride_om == N and all(x.is_contiguous() for x in inputs)
    strides = [int(x.stride(0)) for x in inputs]
    strides = [0] * (len(inputs) + 1) if flat else [*strides, stride_om]
    VEC = math.gcd(N, *strides, vec, 16 // out.element_size())
    plan = SWIGLU_SILU | _swiglu_plan(numel, N, flat) | changes
    M, N = (1, numel) if flat else (numel // N, N)
    tiles_n = triton.cdiv(N, plan["BLOCK_N"])
    grid = (triton.cdiv(M, plan["BLOCK_M"]) * tiles_n,)
    # Triton launches on the current GPU, which may not be that of the tensors.
    with torch.accelerator.device_index(out.device.index):
        arguments = *inputs, out, M, N, tiles_n, *strides, *gap
        kernel[grid](
            *arguments,
            ACC=SWIGLU_ACC[out.dtype],
            VEC=VEC,
            FLAT=flat,
            **plan,
        )


def _swiglu_launch(
    gate,
    up,
    activation="silu",
    alpha=1.0,
    beta=0.0,
    limit=None,
    kernel=_swiglu_kernel,
):
    _swiglu_check("swiglu", gate, up)
    options = _swiglu_options("swiglu", activation, alpha, beta, limit)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    N = int(gate.shape[-1]) if gate.ndim else 1
    _swiglu_run(kernel, (gate, up), out, N, **options)
    return out


def _swiglu_backward_launch(
    grad,
    gate,
    up,
    activation="silu",
    alpha=1.0,
    beta=0.0,
    limit=None,
    kernel=_swiglu_backward_kernel,
):
    name = "swiglu_backward"
    _swiglu_check(name, grad, gate, up)
    options = _swiglu_options(name, activation, alpha, beta, limit)
    options["UP_FIRST"] = False
    d = gate.new_empty(2, *gate.shape)
    N = int(gate.shape[-1]) if gate.ndim else 1
    _swiglu_run(kernel, (grad, gate, up), d, N, gate.numel(), **options)
    return d


def _swiglu_packed_launch(
    x,
    activation="silu",
    alpha=1.0,
    beta=0.0,
    limit=None,
    up_first=False,
    kernel=_swiglu_kernel,
):
    name = "swiglu_packed"
    gate, up = _swiglu_halves(name, x, up_first)
    _swiglu_check(name, gate, up)
    options = _swiglu_options(name, activation, alpha, beta, limit)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _swiglu_run(kernel, (gate, up), out, int(gate.shape[-1]), **options)
    return out


def _swiglu_packed_backward_launch(
    grad,
    x,
    activation="silu",
    alpha=1.0,
    beta=0.0,
    limit=None,
    up_first=False,
    kernel=_swiglu_backward_kernel,
):
    name = "swiglu_packed_backward"
    gate, up = _swiglu_halves(name, x, up_first)
    _swiglu_check(name, grad, gate, up)
    options = _swiglu_options(name, activation, alpha, beta, limit)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    N = int(gate.shape[-1])
    options["UP_FIRST"] = up_first
    _swiglu_run(kernel, (grad, gate, up), dx, 2 * N, N, **options)
    return dx


@triton_op(f"{SWIGLU_NAMESPACE}::swiglu", mutates_args={})
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """Return activation(gate) * (up + beta).

    The activation is "silu", gate * sigmoid(alpha * gate), or one of GEGLU:
    "gelu", which is exact, or "gelu_tanh", as PyTorch's ``gelu`` with
    ``approximate="tanh"``. With a ``limit``, gate is held to at most that, and
    up to between its negative and that, before all else; the gradient beyond
    is 0. gpt-oss has ``alpha=1.702, beta=1.0, limit=7.0``, with the names that
    FlashInfer and vLLM have for them; its projection has gate and up in turn,
    not in halves.

    Takes two tensors of float16, bfloat16, float32 or float64, of one dtype and
    one shape, which may be any. Rows along the last dimension may lie apart, as
    halves of a projection do. Other layouts are copied. The result is
    contiguous. It and the gradients have the shape and dtype of the arguments,
    and are deterministic. Second derivatives are not supported. The kernels are
    compiled for each set of options. Raises TypeError for other dtypes or
    devices that differ, and ValueError for shapes that differ and other
    options, as an ``alpha`` with GELU or a ``limit`` that is not above 0. From
    https://arxiv.org/abs/2002.05202 and
    https://github.com/openai/gpt-oss.

    Rounding: the arithmetic is in float32, or float64 for float64, and each
    result is rounded once, after the product.
    """
    kernel = wrap_triton(_swiglu_kernel)
    return _swiglu_launch(gate, up, activation, alpha, beta, limit, kernel)


@triton_op(f"{SWIGLU_NAMESPACE}::swiglu_backward", mutates_args={})
def swiglu_backward(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """Return the gradients of gate and up, stacked along a new dimension.

    Takes three tensors of one shape, and raises as ``swiglu`` does.
    """
    options = activation, alpha, beta, limit
    kernel = wrap_triton(_swiglu_backward_kernel)
    return _swiglu_backward_launch(grad, gate, up, *options, kernel)


@triton_op(f"{SWIGLU_NAMESPACE}::swiglu_packed", mutates_args={})
def swiglu_packed(
    x: torch.Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    up_first: bool = False,
) -> torch.Tensor:
    """Return the activation for x = (gate, up) along the last dimension.

    The same as ``swiglu`` of both halves, with a gradient that is one tensor:
    vLLM's ``silu_and_mul``, or ``gelu_and_mul``. With ``up_first``, x is (up,
    gate), as for its ``mul_and_silu``. Raises ValueError for an odd last
    dimension or none.
    """
    options = activation, alpha, beta, limit, up_first
    return _swiglu_packed_launch(x, *options, wrap_triton(_swiglu_kernel))


@triton_op(f"{SWIGLU_NAMESPACE}::swiglu_packed_backward", mutates_args={})
def swiglu_packed_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    up_first: bool = False,
) -> torch.Tensor:
    """Return the gradient of x, for a gradient of half its last dimension."""
    options = activation, alpha, beta, limit, up_first
    kernel = wrap_triton(_swiglu_backward_kernel)
    return _swiglu_packed_backward_launch(grad, x, *options, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
SWIGLU_LIBRARY = Library(SWIGLU_NAMESPACE, "FRAGMENT")
SWIGLU_LIBRARY.impl("swiglu", _swiglu_launch, "CUDA")
SWIGLU_LIBRARY.impl("swiglu_backward", _swiglu_backward_launch, "CUDA")
SWIGLU_LIBRARY.impl("swiglu_packed", _swiglu_packed_launch, "CUDA")
SWIGLU_LIBRARY.impl(
    "swiglu_packed_backward", _swiglu_packed_backward_launch, "CUDA"
)


def _swiglu_setup(ctx, inputs, output):
    *tensors, activation, alpha, beta, limit = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = activation, alpha, beta, limit


def _swiglu_packed_setup(ctx, inputs, output):
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _swiglu_gradient(ctx, grad):
    d = swiglu_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *d.unbind(), None, None, None, None


def _swiglu_packed_gradient(ctx, grad):
    dx = swiglu_packed_backward(grad, *ctx.saved_tensors, *ctx.options)
    return dx, None, None, None, None, None


swiglu.register_autograd(_swiglu_gradient, setup_context=_swiglu_setup)
swiglu_packed.register_autograd(
    _swiglu_packed_gradient, setup_context=_swiglu_packed_setup
)
