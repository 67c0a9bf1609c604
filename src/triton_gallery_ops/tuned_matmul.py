"""Autotuned matrix product (matmul) for any shape and layout.

Computes activation(a @ b + bias) of matrices or of batches, in one launch, on
any GPU; strides along K must be below 2**24. The first call with new sizes
times several tiles, which a CUDA graph cannot capture; sizes close together
share a tile. If M and N are above 128, an operand whose rows do not begin at
multiples of 16 bytes is copied in each call, which pays off for odd sizes.
Float32 has full precision, not TF32. Deterministic after tuning, but another
process may choose another tile. ``persistent_matmul`` comes closer to cuBLAS,
on Hopper and newer; ``skinny_matmul`` is for up to 64 rows. Gradients of any
order.
"""

import math
from functools import partial
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

TUNED_MATMUL_NAMESPACE = "triton_gallery"
TUNED_MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# BLOCK_M, BLOCK_N, BLOCK_K, warps and stages; the first fits every GPU
TUNED_MATMUL_TILES = {
    "few rows": [
        (16, 64, 128, 4, 3),
        (16, 32, 128, 4, 5),
        (16, 64, 128, 4, 5),
        (16, 128, 128, 8, 3),
        (32, 32, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (32, 128, 64, 4, 4),
    ],
    "2 bytes": [
        (64, 128, 64, 4, 3),
        (64, 64, 64, 4, 5),
        (128, 64, 64, 4, 4),
        (64, 256, 64, 4, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
    ],
    "4 bytes": [
        (64, 64, 16, 4, 3),
        (32, 32, 32, 4, 3),
        (64, 64, 32, 4, 3),
        (64, 128, 16, 8, 3),
        (128, 64, 16, 8, 3),
        (128, 128, 16, 8, 3),
    ],
    "8 bytes": [
        (64, 64, 16, 4, 3),
        (32, 32, 32, 4, 3),
        (64, 64, 16, 8, 3),
        (64, 128, 16, 8, 3),
        (128, 64, 16, 8, 3),
    ],
}
TUNED_MATMUL_FEW = 32  # rows
TUNED_MATMUL_GROUP = 8
TUNED_MATMUL_COPY = 128  # operands may be copied if M and N are above it
TUNED_MATMUL_PITCH = 2**24  # strides along K are below: 128 steps fit int32
TUNED_MATMUL_KEY = [
    *("like_m", "like_n", "like_k", "like_batch"),
    *("VEC_AK", "VEC_BK"),
]


@triton.jit
def _tuned_matmul_tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Return the row and the column of a program's tile, in groups of rows."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    # The last group has what is left. Without this, tiles would be missed.
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    return first_m + place % height, place // height


@triton.jit
def _tuned_matmul_begin(ptr, z, inner, stride_z, stride_y, VEC: tl.constexpr):
    """Return where matrix z of a batch begins, at a multiple of VEC."""
    stride_z = stride_z // VEC * VEC
    stride_y = stride_y // VEC * VEC
    return ptr + z // inner * stride_z + z % inner * stride_y


@triton.jit
def _tuned_matmul_activate(z, ACTIVATION: tl.constexpr):
    """Return an activation of z, given its name or a function."""
    if ACTIVATION == "relu":
        # Unlike with tl.maximum, NaN stays NaN.
        y = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "silu":
        y = z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        y = z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u).
        slope = 1.5957691216057308 + 0.07135481627260025 * z * z
        y = z * tl.sigmoid(z * slope)
    else:
        y = ACTIVATION(z)
    return y


# M may be a number of tokens. If it were specialized, M = 1, multiples of 16
# and all other M would each be compiled.
@triton.jit(
    do_not_specialize=["M", "like_m", "like_n", "like_k", "like_batch", "inner"]
)
def _tuned_matmul_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,  # None without a bias
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    inner,  # matrices of a batch's last dimension; None without a batch
    stride_az,
    stride_ay,
    stride_bz,
    stride_by,
    like_m,  # for the key of autotune alone
    like_n,
    like_k,
    like_batch,
    ACTIVATION: tl.constexpr,  # None, a name or a function
    ACC: tl.constexpr,
    VEC_AM: tl.constexpr,  # 16 bytes of elements if rows lie along M, or 1
    VEC_AK: tl.constexpr,
    VEC_BK: tl.constexpr,
    VEC_BN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # The compiler learns only here that rows begin at multiples of 16 bytes.
    stride_am = stride_am // VEC_AK * VEC_AK
    stride_ak = stride_ak // VEC_AM * VEC_AM
    stride_bk = stride_bk // VEC_BN * VEC_BN
    stride_bn = stride_bn // VEC_BK * VEC_BK
    pid = tl.program_id(axis=0)
    if inner is not None:
        # One batch after the other: its programs share what is in L2.
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        z = (pid // tiles).to(tl.int64)
        pid = pid % tiles
        VEC_A: tl.constexpr = VEC_AM * VEC_AK
        VEC_B: tl.constexpr = VEC_BK * VEC_BN
        a_ptr = _tuned_matmul_begin(
            a_ptr, z, inner, stride_az, stride_ay, VEC_A
        )
        b_ptr = _tuned_matmul_begin(
            b_ptr, z, inner, stride_bz, stride_by, VEC_B
        )
        c_ptr += z * M * N
    pid_m, pid_n = _tuned_matmul_tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    # In int32 a product with a stride would overflow past element 2**31.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    # A wide load is masked as a whole, so masks end at multiples of VEC. Past
    # the end of a row, such a load takes padding. Along M and N the store
    # leaves that out. Along K it is zeros, which add nothing.
    a_rows = (offs_m < tl.cdiv(M, VEC_AM) * VEC_AM)[:, None]  # (BLOCK_M, 1)
    b_columns = (offs_n < tl.cdiv(N, VEC_BN) * VEC_BN)[None, :]  # (1, BLOCK_N)
    a_end = tl.cdiv(K, VEC_AK) * VEC_AK
    b_end = tl.cdiv(K, VEC_BK) * VEC_BK
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)  # (BLOCK_M, BLOCK_N)
    # The launcher has no K of 0. Where rows of B lie along K, the compiler has
    # to know it, or products may wait for each other. Elsewhere that would cost
    # more.
    LEAST: tl.constexpr = 1 if VEC_BK > 1 else 0
    for k in range(0, tl.maximum(K, LEAST), BLOCK_K):
        a_mask = a_rows & (offs_k < a_end - k)[None, :]  # (BLOCK_M, BLOCK_K)
        b_mask = (offs_k < b_end - k)[:, None] & b_columns  # (BLOCK_K, BLOCK_N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        # "ieee": float32 is not rounded to TF32 before it is multiplied.
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc += bias[None, :].to(ACC)
    if ACTIVATION is not None:
        acc = _tuned_matmul_activate(acc, ACTIVATION)
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    c = acc.to(c_ptr.dtype.element_ty)  # (BLOCK_M, BLOCK_N)
    tl.store(c_ptrs, c, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def _tuned_matmul_silu_backward(grad, z):
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(grad, z)
    s = z.sigmoid()  # PyTorch's function above has no gradient itself
    return grad * s * (1 + z * (1 - s))


# By name: what the kernel is given, and a function of PyTorch that returns the
# gradient of z for that of the activation of z. Add an activation of your own
# with a triton.jit function of a tile of z, and None if it has no gradient.
TUNED_MATMUL_ACTIVATIONS = {
    "relu": ("relu", partial(torch.ops.aten.threshold_backward, threshold=0)),
    "silu": ("silu", _tuned_matmul_silu_backward),
    "gelu": ("gelu", torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        "gelu_tanh",
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
}


def _tuned_matmul_clock(call, quantiles):
    """Time a candidate, in a fifth of the time of Triton's own clock."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tuned_matmul tunes in its first call with new sizes, which a CUDA "
            "graph cannot capture: make one call before the capture"
        )
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def _tuned_matmul_tuner(tiles):
    """Return the kernel, tuned over tiles."""
    configs = []
    for BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages in tiles:
        blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
        options = {"num_warps": num_warps, "num_stages": num_stages}
        configs.append(triton.Config(blocks, **options))
    return triton.autotune(
        configs=configs[:1] if triton.knobs.runtime.interpret else configs,
        key=TUNED_MATMUL_KEY,
        do_bench=_tuned_matmul_clock,
    )(_tuned_matmul_kernel)


TUNED_MATMUL_TUNED = {
    kind: _tuned_matmul_tuner(tiles)
    for kind, tiles in TUNED_MATMUL_TILES.items()
}


def _tuned_matmul_kind(M, dtype):
    """Return which list of tiles is for M rows of a dtype."""
    few = M <= TUNED_MATMUL_FEW and dtype.itemsize == 2
    return "few rows" if few else f"{dtype.itemsize} bytes"


def _tuned_matmul_like(n):
    """Return a size rounded up to its first three bits, for the key.

    A symbolic size, which ``torch.compile`` passes, stays as it is.
    """
    if not isinstance(n, int):
        return n
    step = max(1, triton.next_power_of_2(n) // 8)
    return triton.cdiv(n, step) * step


def _tuned_matmul_operand(x, copy):
    """Return x, or a copy, and its VEC along the last two dimensions.

    VEC is the number of elements in 16 bytes, along the dimension in which rows
    lie, if all rows begin at multiples of 16 bytes. Else it is 1. If ``copy``
    is true, an operand without such rows is copied, and zeros pad the rows of
    the copy. The copy comes with its padding, which the kernel reads: where the
    kernel got a view without it, gradients under torch.compile were wrong.
    """
    vec = 16 // x.element_size()
    lead = zip(x.shape[:-2], x.stride()[:-2], strict=True)
    apart = [stride for size, stride in lead if size > 1]
    begins = all(n % vec == 0 for n in (x.storage_offset(), *apart))
    for dim in (1, 0):
        side, other = dim - 2, -1 - dim
        aligned = x.stride(other) % vec == 0 and x.shape[side] % vec == 0
        if begins and aligned and x.stride(side) == 1:
            return x, 1 if dim else vec, vec if dim else 1
    if not copy:
        return x, 1, 1
    # Rows of the copy are what lies side by side in x, unless the copy would
    # have too large a stride along K.
    transposed = x.stride(-2) == 1 and x.shape[-2] < TUNED_MATMUL_PITCH
    rows = x.mT if transposed else x
    width = rows.shape[-1]
    buffer = x.new_empty(*rows.shape[:-1], triton.cdiv(width, vec) * vec)
    buffer[..., :width] = rows
    buffer[..., width:] = 0
    return (buffer.mT, vec, 1) if transposed else (buffer, 1, vec)


def _tuned_matmul_batch(x):
    """Return x (..., rows, columns) with one or two dimensions before these."""
    x = x.flatten(0, -4) if x.ndim > 4 else x
    return x if x.ndim == 4 else x.unsqueeze(0)


def _tuned_matmul_is_matrix(a):
    """Whether one stride reaches all rows of (..., M, K)."""
    pairs = pairwise(dim for dim in range(a.ndim - 1) if a.shape[dim] != 1)
    return all(a.stride(i) == a.stride(j) * a.shape[j] for i, j in pairs)


def _tuned_matmul_check(a, b, bias, activation):
    """Raise for what the op does not take."""
    tensors = (a, b) if bias is None else (a, b, bias)
    dtypes, devices = [x.dtype for x in tensors], [x.device for x in tensors]
    for dtype in dtypes:
        if dtype not in TUNED_MATMUL_ACC:
            raise TypeError(f"tuned_matmul takes float tensors, not {dtype}")
    if len({*dtypes}) > 1:
        raise TypeError(f"tuned_matmul takes one dtype, not {dtypes}")
    if len({*devices}) > 1:
        raise ValueError(f"tuned_matmul takes one device, not {devices}")
    fits = a.ndim > 1 and b.ndim > 1 and a.shape[-1] == b.shape[-2]
    if not fits or (b.ndim > 2 and a.shape[:-2] != b.shape[:-2]):
        raise ValueError(
            "tuned_matmul takes (..., M, K) and (K, N) or (..., K, N), "
            f"not {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if bias is not None and bias.shape != b.shape[-1:]:
        raise ValueError(
            f"tuned_matmul takes a bias of shape ({b.shape[-1]},), not "
            f"{tuple(bias.shape)}"
        )
    if activation is not None and activation not in TUNED_MATMUL_ACTIVATIONS:
        raise ValueError(
            "tuned_matmul takes as activation None or one of "
            f"{[*TUNED_MATMUL_ACTIVATIONS]}, not {activation!r}"
        )
    if max(a.stride(-1), b.stride(-2)) >= TUNED_MATMUL_PITCH:
        raise ValueError(
            "tuned_matmul takes strides along K below "
            f"{TUNED_MATMUL_PITCH}, not {a.stride(-1)} and {b.stride(-2)}"
        )


def _tuned_matmul_launch(
    a, b, bias=None, activation=None, wrap=lambda kernel: kernel
):
    _tuned_matmul_check(a, b, bias, activation)
    N, dtype = b.shape[-1], a.dtype
    c = a.new_empty(*a.shape[:-1], N)
    if c.numel() == 0:
        return c
    if a.shape[-1] == 0:  # A sum of nothing is zero, as is that of zeros.
        a = a.new_zeros(*a.shape[:-1], 1)
        b = b.new_zeros(*b.shape[:-2], 1, N)
    if b.ndim == 2 and _tuned_matmul_is_matrix(a):
        a = a.flatten(0, -2)
    else:
        a = _tuned_matmul_batch(a)
        b = b if b.ndim == 2 else _tuned_matmul_batch(b)
    M, K = a.shape[-2:]
    count = math.prod(a.shape[:-2])
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        # The interpreter's tl.dot gets bfloat16 wrong.
        a, b = a.float(), b.float()
    copy = M > TUNED_MATMUL_COPY and N > TUNED_MATMUL_COPY
    a, VEC_AM, VEC_AK = _tuned_matmul_operand(a, copy)
    b, VEC_BK, VEC_BN = _tuned_matmul_operand(b, copy)
    batch = (None,) * 6
    if a.ndim == 4:
        between = b.stride()[:2] if b.ndim == 4 else (0, 0)
        batch = a.shape[1], *a.stride()[:2], *between, _tuned_matmul_like(count)

    def grid(config):
        tiles_m = triton.cdiv(M, config["BLOCK_M"])
        return (count * tiles_m * triton.cdiv(N, config["BLOCK_N"]),)

    kernel = wrap(TUNED_MATMUL_TUNED[_tuned_matmul_kind(M, dtype)])
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        bias = None if bias is None else bias.contiguous()
        strides = *a.stride()[-2:], *b.stride()[-2:], *batch[:5]
        function, _ = TUNED_MATMUL_ACTIVATIONS.get(activation, (None, None))
        likes = *map(_tuned_matmul_like, (M, N, K)), batch[5]
        arguments = a, b, bias, c, M, N, K, *strides, *likes
        kernel[grid](
            *arguments,
            ACTIVATION=function,
            ACC=TUNED_MATMUL_ACC[dtype],
            VEC_AM=VEC_AM,
            VEC_AK=VEC_AK,
            VEC_BK=VEC_BK,
            VEC_BN=VEC_BN,
            GROUP_M=TUNED_MATMUL_GROUP,
        )
    return c


@triton_op(f"{TUNED_MATMUL_NAMESPACE}::tuned_matmul", mutates_args={})
def tuned_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Return activation(a @ b + bias), for matrices or batches of them.

    Takes a (..., M, K) and b, (K, N) or (..., K, N) with the same leading
    dimensions, on one device, of one dtype: float16, bfloat16, float32 or
    float64. They may lie in memory in any way. With more than two leading
    dimensions, a tensor is copied if no single stride reaches those before the
    last. The result (..., M, N) has their dtype and is contiguous. Sums are in
    float32, for float64 in float64; float32 is multiplied in full precision,
    not in TF32.

    The bias has the shape (N,). The activation is None, "relu", "silu", "gelu"
    or "gelu_tanh", as PyTorch's ``gelu`` with ``approximate="tanh"``, or one
    that you have added: a dispatcher carries names, not functions, so set
    ``TUNED_MATMUL_ACTIVATIONS[name] = function, backward``. The kernel calls
    ``function``, by ``triton.jit``, with a tile of z = a @ b + bias in float32
    (float64 for float64). ``backward(grad, z)`` returns the gradient of z in
    PyTorch, or is None where there is no gradient. In Inductor's code a kernel
    cannot be given a function: ``torch.compile`` takes the names above alone.

    The first call with new sizes tunes: it times several tiles. A CUDA graph
    cannot capture that, so make one call before the capture. Sizes that lie
    close together share a tile. After the first call, the result is
    deterministic; another process may choose another tile. If M and N are both
    above 128, an operand whose rows do not begin at multiples of 16 bytes is
    copied in each call.

    Has a gradient, which has one itself. Raises TypeError for other dtypes and
    for two that differ, ValueError for shapes that do not fit, tensors on two
    devices, an unknown activation and strides along K of 2**24 or more, and
    RuntimeError where it would tune in a capture. The backward is a product
    along N and one along M, with the same limit for strides along these. With
    an activation it computes z again, which is a third product: of the forward
    the arguments alone are kept. ``linear_gelu`` keeps z instead.

    Rounding: products are summed in float32, or float64 for float64; bias and
    activation are computed in that type, and each result is rounded once. The
    z of the backward is rounded, too.

    Under ``torch.autocast`` it casts a, b and the bias to autocast's dtype.
    """
    return _tuned_matmul_launch(a, b, bias, activation, wrap_triton)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
TUNED_MATMUL_LIBRARY = Library(TUNED_MATMUL_NAMESPACE, "FRAGMENT")
TUNED_MATMUL_LIBRARY.impl("tuned_matmul", _tuned_matmul_launch, "CUDA")


def _tuned_matmul_autocast(kind, a, b, bias=None, activation=None):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    a, b, bias = (
        t.to(dtype) if t is not None and t.dtype in casts else t
        for t in (a, b, bias)
    )
    with torch.autocast(kind, enabled=False):
        return tuned_matmul(a, b, bias, activation)


TUNED_MATMUL_LIBRARY.impl(
    "tuned_matmul", partial(_tuned_matmul_autocast, "cpu"), "AutocastCPU"
)
TUNED_MATMUL_LIBRARY.impl(
    "tuned_matmul", partial(_tuned_matmul_autocast, "cuda"), "AutocastCUDA"
)


def _tuned_matmul_setup(ctx, inputs, output):
    a, b, bias, ctx.activation = inputs
    # The bias is for z alone.
    ctx.save_for_backward(a, b, bias if ctx.activation else None)


def _tuned_matmul_gradient(ctx, grad):
    a, b, bias = ctx.saved_tensors
    if ctx.activation is not None:
        _, backward = TUNED_MATMUL_ACTIVATIONS[ctx.activation]
        if backward is None:
            raise RuntimeError(
                f"tuned_matmul has no gradient of {ctx.activation!r}, whose "
                "backward in TUNED_MATMUL_ACTIVATIONS is None"
            )
        grad = backward(grad, tuned_matmul(a, b, bias))
    by_a, by_b, *others = ctx.needs_input_grad  # not of defaults
    left, right = a, grad
    if b.ndim == 2:  # One matrix for a whole batch has one sum over it.
        left, right = a.flatten(0, -2), grad.flatten(0, -2)
    return (
        tuned_matmul(grad, b.mT) if by_a else None,
        tuned_matmul(left.mT, right) if by_b else None,
        grad.flatten(0, -2).sum(0) if any(others) else None,
        None,
    )


tuned_matmul.register_autograd(
    _tuned_matmul_gradient, setup_context=_tuned_matmul_setup
)
