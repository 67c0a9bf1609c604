"""Matrix product with 4-bit weights and 16-bit activations (W4A16).

Computes x @ W.T + bias for W = (code - zero) * scale, with a code of 4 bits for
each weight, and a scale and a zero point for each group along K, as GPTQ and
AWQ have them. For few rows the time is that of reading W, which is a quarter of
its size in 16 bits. Codes are unpacked in registers, on their way to the tensor
cores. With more rows than a limit, W is first written out in 16 bits, and
``torch.nn.functional.linear`` multiplies by it: the limit is 512 rows on
Hopper, where a matrix instruction takes weights from registers, and 64
elsewhere.

Unpacking a code costs an AND, an addition and a subtraction, for two codes at a
time, and no conversion: a code placed into the lowest bits of the mantissa of
1024, or 128 in bfloat16, is that number plus the code. Kim et al., "Who Says
Elephants Can't Run" (arXiv 2211.10017), and FasterTransformer have the trick;
Frantar et al., "MARLIN" (arXiv 2408.11743), order codes so that a thread finds
those it multiplies in the words it reads. The order here suits the layout of
``tl.dot``, and the zero point is part of the addition.
"""

import math
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

INT4_MATMUL_NAMESPACE = "triton_gallery"
INT4_MATMUL_HALF = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# The type in which weights are written out, before they are rounded
INT4_MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# BLOCK_M, BLOCK_N, warps, stages, and programs that a multiprocessor holds
INT4_MATMUL_TILES = [
    (16, 64, 4, 5, 4),
    (32, 64, 4, 5, 3),
    (64, 64, 4, 4, 2),
    (128, 128, 8, 4, 1),
    (256, 128, 8, 3, 1),
]
INT4_MATMUL_ROWS = {True: 512, False: 64}  # fused up to here: Hopper, others
INT4_MATMUL_SPLITS = 16  # parts of a sum, at most
INT4_MATMUL_WHOLE = 2**24  # blocks of one group, if it is a whole row
INT4_MATMUL_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the codes in a word


@triton.jit
def _int4_matmul_codes(
    w_ptrs,
    g_ptrs,
    HALF: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return code - zero (BLOCK_N, 128), exactly, and scales, as float32."""
    words = tl.load(w_ptrs)  # (BLOCK_N, 16)
    # Scale and zero point in one load of 32 bits: shorter ones are not
    # pipelined.
    pairs = tl.load(g_ptrs)  # (BLOCK_N, GROUPS)
    scale = pairs.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
    zero = (pairs >> 16).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
    # From 128, or 1024 in float16, the last bit of the mantissa counts ones.
    # So adding a code to the bits of base - zero gives base - zero + code. Of
    # the base, 16 keeps that above 128 or 1024.
    BASE: tl.constexpr = 1040.0 if tl.float16 == HALF else 144.0
    bits = (BASE - zero).to(HALF).to(tl.int16, bitcast=True).to(tl.int32)
    bits = bits * 0x10001  # in both halves of a word
    # A word has four codes of each half. Words 4 t + i are of columns 32 i to
    # 32 i + 31, thus of one group.
    bits = tl.broadcast_to(
        bits[:, None, :, None], (BLOCK_N, 4, GROUPS, 4 // GROUPS)
    ).reshape(BLOCK_N, 16)
    c0 = (words & 0x000F000F) + bits
    c1 = ((words >> 4) & 0x000F000F) + bits
    c2 = ((words >> 8) & 0x000F000F) + bits
    c3 = ((words >> 12) & 0x000F000F) + bits
    # (BLOCK_N, 16, 2, 2): the last two dimensions count c0 to c3.
    halves = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    low = halves.to(tl.int16).to(HALF, bitcast=True).to(DOT) - BASE
    high = (halves >> 16).to(tl.int16).to(HALF, bitcast=True).to(DOT) - BASE
    # Column 32 i + 8 c + 2 t + h is half h of code c in word 4 t + i. A thread
    # of the matrix instruction has the columns of one t: none moves.
    codes = tl.join(low.to(DOT), high.to(DOT)).reshape(BLOCK_N, 4, 4, 4, 2)
    return codes.permute(0, 2, 3, 1, 4).reshape(BLOCK_N, 128), scale


@triton.jit
def _int4_matmul_groups(
    block, groups, SPAN: tl.constexpr, GROUPS: tl.constexpr
):
    """Return the groups of a block of 128 columns: GROUPS, or one of SPAN."""
    first = block // SPAN * GROUPS
    # The last block may be shorter than 128.
    return tl.minimum(first + tl.arange(0, GROUPS), groups - 1).to(tl.int64)


# M may be a number of tokens: a kernel for M = 1, and one for multiples of 16,
# would each be compiled.
@triton.jit(do_not_specialize=["M", "groups", "steps"])
def _int4_matmul_kernel(
    x_ptr,
    w_ptr,
    g_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    groups,
    steps,
    BIAS: tl.constexpr,  # whether to add one
    FULL: tl.constexpr,  # whether 128 divides K
    SPAN: tl.constexpr,  # blocks of 128 columns in a group, 1 if it is smaller
    GROUPS: tl.constexpr,  # groups in a block, 1 if they are larger
    HALF: tl.constexpr,  # the type of x and of scales
    DOT: tl.constexpr,  # the type in which tl.dot gets its tiles
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Programs side by side have the same weights, which they read once.
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid_m = tl.program_id(axis=0) % tiles_m
    pid_n = tl.program_id(axis=0) // tiles_m
    pid_k = tl.program_id(axis=1)
    # In int32 offsets would overflow past element 2**31.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    # Past the last row of W the last one is read again, and not stored.
    rows_n = tl.minimum(offs_n, N - 1)
    offs_k = tl.arange(0, 128)[:, None]
    w_ptrs = w_ptr + rows_n * 16 + tl.arange(0, 16)[None, :]
    x_ptrs = x_ptr + offs_m * K + offs_k  # (128, BLOCK_M)
    first = pid_k * steps
    last = tl.minimum(first + steps, tl.cdiv(K, 128))
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(last - first):
        block = first + step
        group = _int4_matmul_groups(block, groups, SPAN, GROUPS)[None, :]
        w, scale = _int4_matmul_codes(
            w_ptrs + block.to(tl.int64) * N * 16,
            g_ptr + group * N + rows_n,
            HALF,
            DOT,
            BLOCK_N,
            GROUPS,
        )
        mask = offs_m < M
        if not FULL:
            mask = mask & (block * 128 + offs_k < K)
        x = tl.load(x_ptrs + block * 128, mask=mask, other=0.0).to(DOT)
        # Whole numbers are multiplied exactly. If a block has one scale, and
        # few rows, the sum is scaled, in float32: less work than for weights.
        if GROUPS == 1 and BLOCK_M <= 64:
            acc += tl.dot(w, x, input_precision="ieee") * scale
        else:
            scaled = w.reshape(BLOCK_N, GROUPS, 128 // GROUPS)
            scaled = scaled * scale.to(DOT)[:, :, None]
            w = scaled.to(DOT).reshape(BLOCK_N, 128)
            acc = tl.dot(w, x, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + rows_n).to(tl.float32)
    # With one part this is the result, in its dtype; else a part, in float32.
    y_ptrs = y_ptr + pid_k.to(tl.int64) * M * N + offs_m * N + offs_n
    tl.store(y_ptrs, acc, mask=(offs_m < M) & (offs_n < N))


@triton.jit(do_not_specialize=["size"])
def _int4_matmul_add_kernel(
    part_ptr,
    bias_ptr,
    y_ptr,
    size,
    N,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Only a product of few tiles is split, so int32 holds these offsets.
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # The order is fixed, so the sum is deterministic.
    for split in tl.static_range(SPLITS):
        part_ptrs = part_ptr + split * size + offs
        total += tl.load(part_ptrs, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + offs % N, mask=mask).to(tl.float32)
    tl.store(y_ptr + offs, total, mask=mask)


@triton.jit
def _int4_matmul_dequantize_kernel(
    w_ptr,
    g_ptr,
    out_ptr,
    N,
    K,
    groups,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(axis=0) % tl.cdiv(K, 128)
    pid_n = tl.program_id(axis=0) // tl.cdiv(K, 128)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    # Past the last row of W the last one is read again, and not stored.
    rows_n = tl.minimum(offs_n, N - 1)
    group = _int4_matmul_groups(block, groups, SPAN, GROUPS)[None, :]
    w_ptrs = w_ptr + block.to(tl.int64) * N * 16 + rows_n * 16
    codes, scale = _int4_matmul_codes(
        w_ptrs + tl.arange(0, 16)[None, :],
        g_ptr + group * N + rows_n,
        HALF,
        DOT,
        BLOCK_N,
        GROUPS,
    )
    # In a third dimension, each group is multiplied by its scale.
    codes = codes.to(ACC).reshape(BLOCK_N, GROUPS, 128 // GROUPS)
    w = (codes * scale.to(ACC)[:, :, None]).reshape(BLOCK_N, 128)
    offs_k = block * 128 + tl.arange(0, 128)[None, :]
    out_ptrs = out_ptr + offs_n * K + offs_k  # (BLOCK_N, 128)
    tl.store(out_ptrs, w, mask=(offs_n < N) & (offs_k < K))


@cache
def _int4_matmul_gpu(device):
    """Return multiprocessors, a program's shared memory, and fused rows."""
    if device.type != "cuda":  # the interpreter: small sizes take every way
        return 8, 227 * 1024, 144
    gpu = torch.cuda.get_device_properties(device)
    shared = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
    hopper = gpu.major == 9 and not torch.version.hip
    return gpu.multi_processor_count, shared, INT4_MATMUL_ROWS[hopper]


def _int4_matmul_plan(M, N, K, device):
    """Return the number of parts, blocks in a part, and the tile."""
    processors, shared, _ = _int4_matmul_gpu(device)
    fitting = (tile for tile in INT4_MATMUL_TILES if tile[0] >= M)
    m, n, warps, stages, held = next(fitting, INT4_MATMUL_TILES[-1])
    tiles = triton.cdiv(M, m) * triton.cdiv(N, n)
    # With fewer programs than the GPU holds, split the sum among more.
    blocks = triton.cdiv(K, 128)
    splits = min(INT4_MATMUL_SPLITS, blocks, held * processors // tiles)
    steps = triton.cdiv(blocks, max(1, splits))
    fit = shared // (256 * m + 68 * n)  # bytes of x, of codes and scales
    tile = {"BLOCK_M": m, "BLOCK_N": n}
    options = {"num_warps": warps, "num_stages": max(1, min(stages, fit))}
    return triton.cdiv(blocks, steps), steps, tile | options


def _int4_matmul_known(scales_and_zeros, K):
    """Return the kernels' constants for groups and for the dtype."""
    groups, half = scales_and_zeros.shape[0], scales_and_zeros.dtype
    size = K // groups
    span = INT4_MATMUL_WHOLE if groups == 1 else max(1, size // 128)
    # The interpreter's arithmetic takes the bits of bfloat16 for integers.
    widen = triton.knobs.runtime.interpret and half == torch.bfloat16
    return {
        "SPAN": span,
        "GROUPS": 1 if groups == 1 else max(1, 128 // size),
        "HALF": INT4_MATMUL_HALF[half],
        "DOT": tl.float32 if widen else INT4_MATMUL_HALF[half],
    }


def _int4_matmul_check(packed, scales_and_zeros, K):
    """Raise for weights that are not packed as int4_matmul_pack does it."""
    shape = tuple(scales_and_zeros.shape)
    if packed.dtype != torch.int32 or (
        scales_and_zeros.dtype not in INT4_MATMUL_HALF
    ):
        raise TypeError(
            "int4_matmul takes packed weights of int32, scales and zeros of "
            f"float16 or bfloat16, not {packed.dtype} and "
            f"{scales_and_zeros.dtype}"
        )
    fits = packed.ndim == 3 and packed.shape[2] == 16
    fits = fits and packed.shape[0] == triton.cdiv(K, 128) and K % 32 == 0
    if not fits or len(shape) != 3 or shape[1:] != (packed.shape[1], 2):
        raise ValueError(
            "int4_matmul takes K a multiple of 32, packed weights "
            "(K / 128 rounded up, N, 16) and scales and zeros (groups, N, 2), "
            f"not K of {K}, {tuple(packed.shape)} and {shape}"
        )
    if packed.device != scales_and_zeros.device:
        raise ValueError(
            "int4_matmul takes tensors on one device, not on "
            f"{packed.device} and {scales_and_zeros.device}"
        )
    _int4_matmul_check_groups(K, shape[0])


def _int4_matmul_check_groups(K, groups):
    """Raise for groups that the kernels do not take."""
    size = K // groups if groups and K % groups == 0 else 0
    fits = size in (32, 64) or (size > 0 and size % 128 == 0)
    if groups != 1 and not fits:
        raise ValueError(
            "int4_matmul takes groups of 32, 64 or a multiple of 128 columns, "
            f"or one for each row, not {groups} groups for K of {K}"
        )


def _int4_matmul_dequantize_launch(
    packed,
    scales_and_zeros,
    K,
    dtype,
    kernel=_int4_matmul_dequantize_kernel,
):
    _int4_matmul_check(packed, scales_and_zeros, K)
    if dtype not in INT4_MATMUL_ACC:
        raise TypeError(f"int4_matmul_dequantize gives floats, not {dtype}")
    N, groups = packed.shape[1], scales_and_zeros.shape[0]
    out = torch.empty((N, K), dtype=dtype, device=packed.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(K, 128) * triton.cdiv(N, 64),)
    # Triton launches on the current GPU, which may not be that of the weights.
    with torch.accelerator.device_index(packed.device.index):
        kernel[grid](
            packed.contiguous(),
            scales_and_zeros.contiguous().view(torch.int32),
            out,
            N,
            K,
            groups,
            ACC=INT4_MATMUL_ACC[dtype],
            BLOCK_N=64,
            **_int4_matmul_known(scales_and_zeros, K),
        )
    return out


@triton_op(f"{INT4_MATMUL_NAMESPACE}::int4_matmul_dequantize", mutates_args={})
def int4_matmul_dequantize(
    packed: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    K: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weights (N, K) that packed codes stand for, in a dtype.

    Takes what ``int4_matmul_pack`` returns. Each weight is computed in float32,
    or float64 for float64, and rounded once. Raises TypeError and ValueError as
    ``int4_matmul`` does.
    """
    return _int4_matmul_dequantize_launch(
        packed,
        scales_and_zeros,
        K,
        dtype,
        wrap_triton(_int4_matmul_dequantize_kernel),
    )


def _int4_matmul_fused(x, packed, scales_and_zeros, bias, kernel, add):
    """Launch for a contiguous matrix x of one row or more."""
    (M, K), N = x.shape, packed.shape[1]
    splits, steps, tile = _int4_matmul_plan(M, N, K, x.device)
    y = x.new_empty((M, N))
    part = y
    if splits > 1:
        part = x.new_empty((splits, M, N), dtype=torch.float32)
    BIAS, given = bias is not None, x if bias is None else bias.contiguous()
    tiles = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(tiles, splits)](
            x,
            packed.contiguous(),
            scales_and_zeros.contiguous().view(torch.int32),
            given,
            part,
            M,
            N,
            K,
            scales_and_zeros.shape[0],
            steps,
            BIAS=BIAS and splits == 1,
            FULL=K % 128 == 0,
            **_int4_matmul_known(scales_and_zeros, K),
            **tile,
        )
        if splits > 1:
            grid = (triton.cdiv(M * N, 256),)
            options = {"BIAS": BIAS, "SPLITS": splits, "BLOCK": 256}
            add[grid](part, given, y, M * N, N, **options)
    return y


def _int4_matmul_launch(
    x,
    packed,
    scales_and_zeros,
    bias=None,
    kernel=_int4_matmul_kernel,
    add=_int4_matmul_add_kernel,
    dequantize=_int4_matmul_dequantize_launch,
):
    half = x.dtype in INT4_MATMUL_HALF
    if x.dtype not in INT4_MATMUL_ACC or (
        half and scales_and_zeros.dtype != x.dtype
    ):
        raise TypeError(
            "int4_matmul takes x of float32, float64 or the dtype of scales "
            f"and zeros, not {x.dtype} and {scales_and_zeros.dtype}"
        )
    if x.ndim == 0 or x.device != packed.device:
        raise ValueError(
            "int4_matmul takes x (..., K) on the device of the weights, not "
            f"{tuple(x.shape)} on {x.device} and {packed.device}"
        )
    K, lead = x.shape[-1], x.shape[:-1]
    _int4_matmul_check(packed, scales_and_zeros, K)
    N, M = packed.shape[1], math.prod(lead)
    if bias is not None and (bias.shape != (N,) or bias.dtype != x.dtype):
        raise ValueError(
            f"int4_matmul takes a bias ({N},) of {x.dtype}, not "
            f"{tuple(bias.shape)} of {bias.dtype}"
        )
    fused = half and _int4_matmul_gpu(x.device)[2] >= M
    if not fused or M == 0 or N == 0 or K == 0:
        weight = dequantize(packed, scales_and_zeros, K, x.dtype)
        return torch.nn.functional.linear(x, weight, bias).contiguous()
    x = x.reshape(M, K).contiguous()
    y = _int4_matmul_fused(x, packed, scales_and_zeros, bias, kernel, add)
    return y.view(*lead, N)


@triton_op(f"{INT4_MATMUL_NAMESPACE}::int4_matmul", mutates_args={})
def int4_matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ W.T + bias for weights of 4 bits.

    Takes ``x`` (..., K) in any layout, the two tensors that
    ``int4_matmul_pack``, ``int4_matmul_from_gptq`` or ``int4_matmul_from_awq``
    made of the weights (N, K), and ``bias`` (N,) in the dtype of x or None. K
    is a multiple of 32. There is a scale and a zero point for each 32, 64 or a
    multiple of 128 columns, or one for each row: the number of scales says
    which. The result (..., N) is contiguous, in the dtype of x.

    ``x`` has the dtype of the scales, float16 or bfloat16. If ``x`` has more
    rows than the limit that the module names, or is float32 or float64, the
    weights are first written out in its dtype, which takes N * K elements of
    memory while the call lasts.

    The result is deterministic. Raises TypeError for other dtypes, and
    ValueError for shapes that do not fit and for two devices. Has a gradient
    for x and for the bias, which multiplies by the weights in the dtype of x;
    it raises RuntimeError if scales need one.

    Rounding: products are summed in float32 and scaled in float32, and each
    result is rounded once. With groups of 32 or 64, and for more than 64 rows,
    each weight is rounded to the dtype of x before.

    Under ``torch.autocast`` it casts x, scales and bias to autocast's dtype.
    """
    return _int4_matmul_launch(
        x,
        packed,
        scales_and_zeros,
        bias,
        wrap_triton(_int4_matmul_kernel),
        wrap_triton(_int4_matmul_add_kernel),
        int4_matmul_dequantize,
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
INT4_MATMUL_LIBRARY = Library(INT4_MATMUL_NAMESPACE, "FRAGMENT")
INT4_MATMUL_LIBRARY.impl("int4_matmul", _int4_matmul_launch, "CUDA")
INT4_MATMUL_LIBRARY.impl(
    "int4_matmul_dequantize", _int4_matmul_dequantize_launch, "CUDA"
)


def _int4_matmul_autocast(kind, x, packed, scales_and_zeros, bias=None):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    if x.dtype in casts:
        x, scales_and_zeros = x.to(dtype), scales_and_zeros.to(dtype)
    if bias is not None and bias.dtype in casts:
        bias = bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return int4_matmul(x, packed, scales_and_zeros, bias)


INT4_MATMUL_LIBRARY.impl(
    "int4_matmul", partial(_int4_matmul_autocast, "cpu"), "AutocastCPU"
)
INT4_MATMUL_LIBRARY.impl(
    "int4_matmul", partial(_int4_matmul_autocast, "cuda"), "AutocastCUDA"
)


def _int4_matmul_setup(ctx, inputs, output):
    x, packed, scales_and_zeros, bias = inputs
    if ctx.needs_input_grad[2]:
        raise RuntimeError("int4_matmul has no gradient for scales and zeros")
    ctx.save_for_backward(packed, scales_and_zeros)
    ctx.K, ctx.has_bias = x.shape[-1], bias is not None


def _int4_matmul_backward(ctx, grad):
    packed, scales_and_zeros = ctx.saved_tensors
    dx = db = None
    if ctx.needs_input_grad[0]:
        weight = int4_matmul_dequantize(
            packed, scales_and_zeros, ctx.K, grad.dtype
        )
        dx = grad @ weight
    if ctx.has_bias and ctx.needs_input_grad[3]:
        db = grad.reshape(-1, grad.shape[-1]).sum(0)
    return dx, None, None, db


int4_matmul.register_autograd(
    _int4_matmul_backward, setup_context=_int4_matmul_setup
)


def int4_matmul_pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack 4-bit codes, and scales with zero points, for ``int4_matmul``.

    Takes ``codes`` (N, K), integers from 0 to 15, and ``scales`` (groups, N) of
    float16 or bfloat16: a weight is ``(code - zero) * scale`` with the scale of
    its row and of its group of K / groups columns. ``zeros`` (groups, N) are
    whole numbers from 0 to 16; without them each is 8. Returns the packed codes
    and the scales beside the zero points. Raises TypeError for codes that are
    not integers and scales of other dtypes, and ValueError for shapes that do
    not fit, K that is not a multiple of 32, and numbers out of range.
    """
    if codes.is_floating_point() or scales.dtype not in INT4_MATMUL_HALF:
        raise TypeError(
            "int4_matmul_pack takes integers and scales of float16 or "
            f"bfloat16, not {codes.dtype} and {scales.dtype}"
        )
    zeros = torch.full_like(scales, 8) if zeros is None else zeros
    fits = codes.ndim == scales.ndim == 2 and zeros.shape == scales.shape
    if not fits or codes.shape[0] != scales.shape[1] or codes.shape[1] % 32:
        raise ValueError(
            "int4_matmul_pack takes codes (N, K) with K a multiple of 32, "
            "scales and zeros (groups, N), not "
            f"{[tuple(t.shape) for t in (codes, scales, zeros)]}"
        )
    N, K = codes.shape
    _int4_matmul_check_groups(K, scales.shape[0])
    for name, t, most in (("codes", codes, 15), ("zeros", zeros, 16)):
        if ((t < 0) | (t > most) | (t != t.round())).any():
            raise ValueError(
                f"int4_matmul_pack takes {name} that are whole numbers from 0 "
                f"to {most}"
            )
    blocks = triton.cdiv(K, 128)
    wide = codes.new_zeros((N, 128 * blocks), dtype=torch.int64)
    wide[:, :K] = codes
    # Column 32 i + 8 c + 2 t + h is half h of code c in word 4 t + i.
    wide = wide.view(N, blocks, 4, 4, 4, 2).permute(1, 0, 4, 2, 3, 5)
    shifts = 4 * torch.arange(4, device=codes.device)[:, None]
    shifts = shifts + 16 * torch.arange(2, device=codes.device)
    words = (wide << shifts).sum((-1, -2)).flatten(2)  # (blocks, N, 16)
    pairs = torch.stack([scales, zeros.to(scales.dtype)], dim=-1)
    return words.to(torch.int32), pairs  # the lowest 32 bits


def _int4_matmul_unpack(words, order=tuple(range(8))):
    """Return the codes of words, eight times as many in the last dimension.

    Column ``order[i]`` of each eight is in the bits from 4 * i on.
    """
    shifts = [4 * order.index(column) for column in range(8)]
    shifts = torch.tensor(shifts, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def int4_matmul_from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack weights of GPTQ for ``int4_matmul``.

    Takes ``qweight`` (K / 8, N) and ``qzeros`` (groups, N / 8) of int32, and
    ``scales`` (groups, N) of float16 or bfloat16, as checkpoints have them: the
    stored zero points are one less than those used. ``g_idx`` may be given if
    it numbers the groups in order; columns in another order (``desc_act``)
    raise ValueError.
    """
    K, groups = 8 * qweight.shape[0], scales.shape[0]
    if g_idx is not None:
        in_order = torch.arange(K, device=g_idx.device) * groups // K
        if not torch.equal(g_idx.long(), in_order):
            raise ValueError(
                "int4_matmul_from_gptq takes groups in order: quantize with "
                "desc_act=False"
            )
    codes = _int4_matmul_unpack(qweight.T)
    return int4_matmul_pack(codes, scales, _int4_matmul_unpack(qzeros) + 1)


def int4_matmul_from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack weights of AWQ for ``int4_matmul``.

    Takes ``qweight`` (K, N / 8) and ``qzeros`` (groups, N / 8) of int32, and
    ``scales`` (groups, N) of float16 or bfloat16, as checkpoints of AutoAWQ
    with ``version="GEMM"`` have them.
    """
    codes = _int4_matmul_unpack(qweight, INT4_MATMUL_AWQ).T
    zeros = _int4_matmul_unpack(qzeros, INT4_MATMUL_AWQ)
    return int4_matmul_pack(codes, scales, zeros)
