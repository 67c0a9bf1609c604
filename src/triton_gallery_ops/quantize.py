"""Quantize to float8, int8 and 4 bits, a scale for each block.

A block of numbers shares a scale, so that the largest of them becomes the
largest number of the narrow dtype: ``x`` is about ``values * scale``. A block
is the whole tensor, a row (a token), a part of a row or a square. Also the
formats MX (32 numbers and a scale that is a power of two) and NVFP4 (16 numbers
and a float8 scale). A tensor is read once, except where a block is the whole
tensor or a row of more than 16384 elements: then twice. Deterministic, without
a gradient.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

QUANTIZE_NAMESPACE = "triton_gallery"
QUANTIZE_INPUTS = torch.float16, torch.bfloat16, torch.float32
# The largest number; the bits of a mantissa, the bias of an exponent, all bits,
# and the code of the largest number
QUANTIZE_FORMATS = {
    torch.float8_e4m3fn: (448.0, 3, 7, 8, 0x7E),
    torch.float8_e5m2: (57344.0, 2, 15, 8, 0x7B),
    torch.float4_e2m1fn_x2: (6.0, 1, 1, 4, 0x7),
    torch.int8: (127.0, 0, 0, 8, 127),
}
QUANTIZE_EIGHT = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
QUANTIZE_MX_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float4_e2m1fn_x2,
)
QUANTIZE_MX = 32  # numbers of a block of MX
QUANTIZE_NVFP4 = 16
QUANTIZE_ROW = 16384  # elements of the longest row that is read once
QUANTIZE_TILE = 4096  # elements of a program, about
QUANTIZE_COLUMNS = 512  # of it, if blocks are narrower


@triton.jit
def _quantize_code(
    x,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
):
    """Return the nearest float of few bits, as the first bits of an integer."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Times this, a float32 has the exponent of the narrow dtype, or none where
    # that has none. Its first bits are the code.
    y = x * 2.0 ** (BIAS - 127)
    # The last bit of large - y is that of the code, so the subtraction rounds
    # as the code should be: to the nearest, to even. large + y may lose a bit.
    large = tl.maximum(tl.abs(y) * 2.0**DROPPED, 1.5 * 2.0 ** (DROPPED - 126))
    y = large - (large - tl.abs(y))
    code = tl.minimum(y.to(tl.uint32, bitcast=True), LAST << DROPPED)
    if WIDTH == 8:
        code = tl.where(x == x, code, 0x7F << DROPPED)  # NaN
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return sign | (code << (9 - WIDTH + MANTISSA))


@triton.jit
def _quantize_number(
    code,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
):
    """Return the float32 of which these are the bits."""
    magnitude = code.to(tl.int32) & ((1 << (WIDTH - 1)) - 1)
    bits = magnitude << (23 - MANTISSA)
    number = bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
    if MANTISSA == 2:
        number = tl.where(magnitude > LAST, float("inf"), number)
    if WIDTH == 8:
        NAN: tl.constexpr = LAST + 1 if MANTISSA == 2 else LAST
        number = tl.where(magnitude > NAN, float("nan"), number)
    return tl.where(code >= (1 << (WIDTH - 1)), -number, number)


@triton.jit
def _quantize_largest(x, BM: tl.constexpr, BN: tl.constexpr):
    """Return the largest magnitude of each block, as an integer.

    As integers, magnitudes have the order of floats, and NaN is the largest.
    """
    x = x.to(tl.uint32, bitcast=True) << 1  # without the sign
    ROWS: tl.constexpr = x.shape[0] // BM
    x = tl.reshape(x, (ROWS, BM, x.shape[1] // BN, BN))
    return (tl.max(tl.max(x, axis=3), axis=1) >> 1).to(tl.int32)


@triton.jit
def _quantize_scale(
    largest,
    tensor,  # the scale of the whole tensor, or None
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    CAST: tl.constexpr,
):
    """Return one over the scale of each block, and what is stored of it.

    Of a block that is not finite the scale is NaN.
    """
    nan = float("nan")
    finite = largest < 0x7F800000
    if SCALING == "mx":
        # The exponent of MAX
        E: tl.constexpr = 2 if MAX < 100 else (8 if MAX < 1000 else 15)
        code = tl.maximum((largest >> 23) - E, 0)
        inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(finite, code, 255).to(tl.uint8)
    else:
        scale = tl.math.div_rn(largest.to(tl.float32, bitcast=True), MAX)
        if SCALING == "nvfp4":
            scale = tl.math.div_rn(tl.where(finite, scale, nan), tensor)
            if CAST:
                # The largest number, where a cast to float8 would be NaN
                scale = tl.clamp(scale, 0.0, 448.0, tl.PropagateNan.ALL)
                scale = scale.to(tl.float8e4nv)
                code = scale.to(tl.uint8, bitcast=True)
                scale = scale.to(tl.float32)
            else:
                code = _quantize_code(scale, 3, 7, 8, 0x7E) >> 24
                scale = _quantize_number(code, 3, 7, 8, 0x7E)
            # A block whose scale is too small to be stored is zero.
            scale = tl.where(code == 0, float("inf"), scale * tensor)
            inverse = tl.math.div_rn(1.0, scale)
            scale = code.to(tl.uint8)
        else:
            # Not below the smallest normal number, of which there is an inverse
            bits = tl.maximum(scale.to(tl.int32, bitcast=True), 0x00800000)
            if SCALING == "power of two":
                bits = (bits + 0x007FFFFF) & 0x7F800000
            scale = bits.to(tl.float32, bitcast=True)
            scale = tl.where(largest == 0, 1.0, scale)
            scale = tl.where(finite, scale, nan)
            inverse = tl.math.div_rn(1.0, scale)
    return tl.where(finite, inverse, nan), scale


@triton.jit
def _quantize_values(
    x,
    inverse,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """Return a tile over the scales of its blocks, ready to be stored.

    CAST says that the GPU has instructions for casts to float8, and CLAMP that
    there may be values outside of the dtype's range.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    y = tl.reshape(x, (ROWS // BM, BM, COLS // BN, BN))
    y = tl.reshape(y * inverse[:, None, :, None], (ROWS, COLS))
    if MANTISSA == 0:
        if CLAMP:
            y = tl.clamp(y, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
        else:
            # No FMA of product and sum, so that the product is rounded, too
            y = tl.minimum(y, MAX, propagate_nan=tl.PropagateNan.ALL)
        # The sum of y and 1.5 * 2**23 ends in the nearest integer.
        y = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif not CAST or WIDTH == 4:
        y = _quantize_code(y, MANTISSA, BIAS, WIDTH, LAST)
        if WIDTH == 4:  # two in a byte, the first in its low half
            low, high = tl.split(tl.reshape(y, (ROWS, COLS // 2, 2)))
            y = (low >> 4) + high
        y = (y >> 24).to(tl.uint8)
    elif CLAMP:
        y = tl.clamp(y, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def _quantize_store(ptr, y, pid_m, pid_n, M, N):
    """Store a tile of a matrix with rows of N elements."""
    ROWS: tl.constexpr = y.shape[0]
    COLS: tl.constexpr = y.shape[1]
    offs_m = pid_m * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    offs_n = pid_n * COLS + tl.arange(0, COLS)  # (COLS,)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(ptrs, y.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_apart(y, size):
    """Return y, times a number that is 1, which the compiler does not know.

    If numbers that one instruction has cast to float8 are stored both as they
    are and transposed, ptxas of CUDA 12.9 stores others:
    https://github.com/triton-lang/triton/issues/11111
    """
    if y.dtype == tl.float32:
        y *= tl.where(size < 0, 2.0, 1.0)
    return y


@triton.jit
def _quantize_tensor(tensor_ptr, out_ptr, SCALING: tl.constexpr):
    """Return the scale of the whole tensor, of which a copy is stored."""
    tensor = None
    if SCALING == "nvfp4":
        tensor = tl.load(tensor_ptr)
        if tensor_ptr.dtype.element_ty == tl.int32:
            # The largest number is 6 in a block whose scale is 448.
            tensor = tl.math.div_rn(tensor.to(tl.float32, bitcast=True), 2688.0)
            tensor = tl.where(tensor == 0, 1.0, tensor)
        tl.store(out_ptr, tensor)  # all programs store the same
    return tensor


@triton.jit
def _quantize_kernel(
    x_ptr,
    tensor_ptr,  # a scale of the whole tensor, or its largest magnitude
    tensor_out_ptr,  # that scale
    out_ptr,
    scale_ptr,
    out_t_ptr,  # the transpose, or None
    scale_t_ptr,
    M,
    N,
    stride_xm,
    BM: tl.constexpr,  # a block
    BN: tl.constexpr,
    ROWS: tl.constexpr,  # of a program's tile
    COLS: tl.constexpr,
    VEC: tl.constexpr,
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
    CLAMP: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    tiles = tl.cdiv(N, COLS)
    # The last tiles first: a cache holds these if x was just written or read.
    # In int32 an offset would overflow past element 2**31.
    pid = tl.num_programs(axis=0) - 1 - tl.program_id(axis=0)
    pid_m, pid_n = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64)
    offs_m = pid_m * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    offs_n = pid_n * COLS + tl.arange(0, COLS)  # (COLS,)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # (ROWS, COLS)
    tensor = _quantize_tensor(tensor_ptr, tensor_out_ptr, SCALING)
    largest = _quantize_largest(x, BM, BN)  # (ROWS // BM, COLS // BN)
    inverse, scale = _quantize_scale(largest, tensor, SCALING, MAX, CAST)
    y = _quantize_values(
        x, inverse, BM, BN, MAX, MANTISSA, BIAS, WIDTH, LAST, CAST, CLAMP
    )
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    _quantize_store(scale_ptr, scale, pid_m, pid_n, blocks_m, blocks_n)
    stored = N // 2 if WIDTH == 4 else N
    _quantize_store(out_ptr, y, pid_m, pid_n, M, stored)
    if out_t_ptr is not None:
        # A block of the transpose is one of x on its side.
        largest = _quantize_largest(x, BN, BM)
        inverse, scale = _quantize_scale(largest, tensor, SCALING, MAX, CAST)
        y = _quantize_values(
            x, inverse, BN, BM, MAX, MANTISSA, BIAS, WIDTH, LAST, CAST, CLAMP
        )
        y = tl.trans(_quantize_apart(y, M + stride_xm))
        _quantize_store(out_t_ptr, y, pid_n, pid_m, N, M)
        blocks_m, blocks_n = tl.cdiv(M, BN), tl.cdiv(N, BM)
        scale = tl.trans(scale)
        _quantize_store(scale_t_ptr, scale, pid_n, pid_m, blocks_n, blocks_m)


@triton.jit
def _quantize_read(ptrs, mask, BN: tl.constexpr):
    """Return blocks as rows, each in one thread: its loads are eight apart."""
    low = tl.load(ptrs, mask=mask, other=0.0)  # (BLOCKS, 8)
    high = tl.load(ptrs + 8, mask=mask, other=0.0)
    x = tl.join(low, high)  # (BLOCKS, 8, 2)
    if BN == 16:
        x = tl.permute(x, (0, 2, 1))
    else:
        low = tl.load(ptrs + 16, mask=mask, other=0.0)
        high = tl.load(ptrs + 24, mask=mask, other=0.0)
        x = tl.join(x, tl.join(low, high))  # (BLOCKS, 8, 2, 2)
        x = tl.permute(x, (0, 3, 2, 1))
    return tl.reshape(x, (x.shape[0], BN)).to(tl.float32)


@triton.jit
def _quantize_4_bits_kernel(
    x_ptr,
    tensor_ptr,  # as of _quantize_kernel
    tensor_out_ptr,
    out_ptr,  # words of eight numbers
    scale_ptr,
    blocks,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
    SCALING: tl.constexpr,
    CAST: tl.constexpr,
):
    """Quantize contiguous blocks to 4 bits, each block in one thread."""
    # With eight numbers a thread, as many as a load has, threads share a block,
    # and each computes its scale.
    pid = tl.num_programs(axis=0) - 1 - tl.program_id(axis=0)
    offs = pid.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # (BLOCKS,)
    mask = (offs < blocks)[:, None]
    ptrs = x_ptr + offs[:, None] * BN + tl.arange(0, 8)[None, :]
    x = _quantize_read(ptrs, mask, BN)  # (BLOCKS, BN)
    tensor = _quantize_tensor(tensor_ptr, tensor_out_ptr, SCALING)
    largest = _quantize_largest(x, 1, BN)  # (BLOCKS, 1)
    inverse, scale = _quantize_scale(largest, tensor, SCALING, 6.0, CAST)
    code = _quantize_code(x * inverse, 1, 1, 4, 7)
    # The first of two numbers is in the lower half of what both make.
    WORDS: tl.constexpr = BN // 8
    low, high = tl.split(tl.reshape(code, (BLOCKS, WORDS, 4, 2)))
    pairs = (low >> 4) + high  # (BLOCKS, WORDS, 4)
    low, high = tl.split(tl.reshape(pairs, (BLOCKS, WORDS, 2, 2)))
    low, high = tl.split((low >> 8) + high)
    word = (low >> 16) + high  # (BLOCKS, WORDS)
    ptrs = out_ptr + offs[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(ptrs, word.to(tl.int32, bitcast=True), mask=mask)
    tl.store(scale_ptr + offs[:, None], scale, mask=mask)


@triton.jit
def _quantize_largest_kernel(
    x_ptr,
    largest_ptr,
    M,
    N,
    stride_xm,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Write the largest magnitude of each row, or of the tensor."""
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    tiles = tl.cdiv(N, COLS)
    pid_m = (tl.program_id(axis=0) // tiles).to(tl.int64)
    pid_n = (tl.program_id(axis=0) % tiles).to(tl.int64)
    offs_m = pid_m * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    offs_n = pid_n * COLS + tl.arange(0, COLS)  # (COLS,)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # (ROWS, COLS)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    # A maximum does not depend on the order in which programs arrive.
    if PER_ROW:
        tl.atomic_max(largest_ptr + offs_m, largest, mask=offs_m < M)
    else:
        tl.atomic_max(largest_ptr, tl.max(largest, axis=0))


@triton.jit
def _quantize_with_kernel(
    x_ptr,
    largest_ptr,  # or None
    scale_ptr,
    out_ptr,
    scale_t_ptr,  # of the transpose, or None
    out_t_ptr,
    M,
    N,
    stride_xm,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """Quantize with known scales, or known largest magnitudes."""
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    tiles = tl.cdiv(N, COLS)
    # The last tiles first, as above
    pid = tl.num_programs(axis=0) - 1 - tl.program_id(axis=0)
    pid_m, pid_n = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64)
    offs_m = pid_m * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    offs_n = pid_n * COLS + tl.arange(0, COLS)  # (COLS,)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # (ROWS, COLS)
    blocks = offs_m if PER_ROW else offs_m * 0
    if largest_ptr is not None:
        largest = tl.load(largest_ptr + blocks, mask=offs_m < M, other=0)
        inverse, scale = _quantize_scale(largest, None, SCALING, MAX, CAST)
        # The programs of a block store the same.
        tl.store(scale_ptr + blocks, scale, mask=offs_m < M)
        if out_t_ptr is not None:
            tl.store(scale_t_ptr + blocks, scale, mask=offs_m < M)
    else:
        scale = tl.load(scale_ptr + blocks, mask=offs_m < M, other=1.0)
        inverse = tl.math.div_rn(1.0, scale)
    inverse = inverse[:, None]
    y = _quantize_values(
        x, inverse, 1, COLS, MAX, MANTISSA, BIAS, WIDTH, LAST, CAST, CLAMP
    )
    _quantize_store(out_ptr, y, pid_m, pid_n, M, N)
    if out_t_ptr is not None:
        y = tl.trans(_quantize_apart(y, M + stride_xm))
        _quantize_store(out_t_ptr, y, pid_n, pid_m, N, M)


@triton.jit
def _quantize_dequantize_kernel(
    values_ptr,
    scale_ptr,
    tensor_ptr,  # or None
    out_ptr,
    M,
    N,
    rows,  # of a block
    columns,
    SCALES: tl.constexpr,  # the bits of a scale's mantissa, if it has 8 bits
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
):
    N = N // VEC * VEC  # as above
    tiles = tl.cdiv(N, COLS)
    pid_m = (tl.program_id(axis=0) // tiles).to(tl.int64)
    offs_m = pid_m * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    offs_n = tl.program_id(axis=0) % tiles * COLS + tl.arange(0, COLS)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = scale_ptr + (offs_m // rows)[:, None] * tl.cdiv(N, columns)
    scale = tl.load(ptrs + (offs_n // columns)[None, :], mask=mask, other=0)
    if SCALES == 0:  # the exponent of a power of two
        bits = scale.to(tl.int32) << 23
        # 2**-127 has no exponent of its own, and 255 is NaN.
        bits = tl.where(scale == 0, 0x00400000, bits)
        bits = tl.where(scale == 255, 0x7FC00000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    elif SCALES == 3:
        scale = _quantize_number(scale, 3, 7, 8, 0x7E)
    if tensor_ptr is not None:
        scale *= tl.load(tensor_ptr)
    offs_v = offs_n // 2 if WIDTH == 4 else offs_n
    ptrs = values_ptr + offs_m[:, None] * (N * WIDTH // 8) + offs_v[None, :]
    y = tl.load(ptrs, mask=mask, other=0.0)
    if WIDTH == 4:
        y = (y >> (offs_n % 2 * 4)[None, :].to(tl.uint8)) & 15
    if MANTISSA > 0 and (WIDTH == 4 or not CAST):
        y = _quantize_number(y, MANTISSA, BIAS, WIDTH, LAST)
    y = y.to(tl.float32) * scale
    ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


def _quantize_check(name, x, dtype, dtypes):
    """Raise an error for what an op does not take."""
    if x.dtype not in QUANTIZE_INPUTS or x.dim() == 0:
        raise TypeError(
            f"{name} takes float16, bfloat16 or float32 of one or more "
            f"dimensions, not {x.dtype} of {x.dim()}"
        )
    if dtype not in dtypes:
        raise TypeError(
            f"{name} takes {', '.join(map(str, dtypes))}, not {dtype}"
        )


def _quantize_rows(x, BN=None):
    """Return x as M rows of N elements, M, N, their stride, and if it is flat.

    With BN, contiguous rows of whole blocks of BN are flat: a single row.
    """
    N = max(1, int(x.shape[-1]))
    if x.numel() == 0:
        return x, 0, N, N, False
    rows = x.reshape(-1, N)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    # The number of elements, and what is added to it, fit an int32.
    if BN and N % BN == 0 and rows.is_contiguous() and x.numel() < 2**30:
        return rows, 1, rows.numel(), N, True
    return rows, rows.shape[0], N, int(rows.stride(0)), False


def _quantize_format(dtype, device):
    """Return the dtype that kernels store, and what they know of theirs."""
    names = "MAX", "MANTISSA", "BIAS", "WIDTH", "LAST"
    # Older GPUs have no instruction, and on 8.9 Triton's cast truncates to
    # float16 first: https://github.com/triton-lang/triton/pull/11753. The
    # interpreter's cast loses a carry.
    CAST = device.type == "cuda" and dtype.itemsize == 1
    if CAST and not torch.version.hip:
        CAST = torch.cuda.get_device_capability(device) >= (9, 0)
    plan = dict(zip(names, QUANTIZE_FORMATS[dtype], strict=True), CAST=CAST)
    # Without that instruction, and of 4-bit floats, the kernels store bits.
    bits = dtype != torch.int8 and not CAST
    bits = bits or dtype == torch.float4_e2m1fn_x2
    return torch.uint8 if bits else dtype, plan


def _quantize_block(name, x, block_size):
    """Return the extents of a block, -1 for those that are the tensor's."""
    BM, BN = block_size if len(block_size) == 2 else (0, 0)
    whole = (BM, BN) in ((-1, -1), (1, -1))
    powers = BM > 0 and BN >= 16 and BM & (BM - 1) == 0 and BN & (BN - 1) == 0
    if not whole and not (powers and BM * BN <= QUANTIZE_ROW):
        raise ValueError(
            f"{name} takes a block_size of (-1, -1), (1, -1), or two powers of "
            f"two of up to {QUANTIZE_ROW} elements, 16 or more of them in a "
            f"row, not {tuple(block_size)}"
        )
    if BM > 1 and x.dim() != 2:
        raise ValueError(
            f"{name} takes blocks of several rows of a matrix alone, not of "
            f"{x.dim()} dimensions"
        )
    return BM, BN


def _quantize_scale_shape(x, BM, BN):
    """Return the shape of the scales."""
    if BM == -1:
        return ()
    N = x.shape[-1]
    columns = 1 if BN == -1 else -(-N // BN)
    return (
        (*x.shape[:-2], -(-x.shape[-2] // BM), columns)
        if x.dim() > 1
        else (columns,)
    )


def _quantize_tile(N, stride, BM, BN, flat=False, transpose=False):
    """Return the tile of a program, and its warps."""
    COLS = min(triton.next_power_of_2(N), QUANTIZE_COLUMNS // BM)
    COLS = QUANTIZE_TILE if flat else max(BN, COLS)
    ROWS = max(BM, QUANTIZE_TILE // COLS)
    if transpose:  # a square of whole blocks, for stores along either side
        ROWS = COLS = max(BM, BN, 64)
    return {
        "ROWS": ROWS,
        "COLS": COLS,
        "VEC": math.gcd(N, stride, 16),
        # Long rows were faster with more numbers in each thread.
        "num_warps": max(4, ROWS * COLS // (4096 if BM == 1 else 2048)),
    }


def _quantize_blocks(
    x, dtype, BM, BN, SCALING, kernel, tensors=(None, None), transpose=False
):
    """Quantize in blocks that fit a program: values, scales, those of x.T."""
    stored, plan = _quantize_format(dtype, x.device)
    floats = (
        torch.float32 if SCALING in ("float", "power of two") else torch.uint8
    )
    out = []
    for like in (x, x.T) if transpose else (x,):
        shape = (*like.shape[:-1], like.shape[-1] * plan["WIDTH"] // 8)
        out.append(x.new_empty(shape, dtype=stored))
        shape = _quantize_scale_shape(like, BM, BN)
        out.append(x.new_empty(shape, dtype=floats))
    whole = BM == 1 and 0 < BN <= QUANTIZE_TILE and not transpose
    rows, M, N, stride, flat = _quantize_rows(x, BN if whole else None)
    if M > 0:
        BN = triton.next_power_of_2(N) if BN == -1 else BN
        plan |= {"BM": BM, "BN": BN, "SCALING": SCALING}
        plan |= {"CLAMP": floats == torch.uint8}
        plan |= _quantize_tile(
            int(x.shape[-1]), stride, BM, BN, flat, transpose
        )
        grid = (triton.cdiv(M, plan["ROWS"]) * triton.cdiv(N, plan["COLS"]),)
        ends = out if transpose else [*out, None, None]
        with torch.accelerator.device_index(x.device.index):
            kernel[grid](rows, *tensors, *ends, M, N, stride, **plan)
    return [t.view(dtype) if n % 2 == 0 else t for n, t in enumerate(out)]


def _quantize_4_bits(x, BN, SCALING, kernel, wide_kernel, tensors=(None, None)):
    """Quantize to 4 bits: values and the scales of blocks of BN."""
    dtype = torch.float4_e2m1fn_x2
    rows, _, N, _, flat = _quantize_rows(x, BN)
    if not flat:
        return _quantize_blocks(x, dtype, 1, BN, SCALING, wide_kernel, tensors)
    words = x.new_empty((*x.shape[:-1], x.shape[-1] // 8), dtype=torch.int32)
    shape = _quantize_scale_shape(x, 1, BN)
    scales = x.new_empty(shape, dtype=torch.uint8)
    _, plan = _quantize_format(dtype, x.device)
    BLOCKS = QUANTIZE_TILE // BN
    with torch.accelerator.device_index(x.device.index):
        kernel[(triton.cdiv(N, QUANTIZE_TILE),)](
            rows,
            *tensors,
            words,
            scales,
            N // BN,
            BN=BN,
            BLOCKS=BLOCKS,
            SCALING=SCALING,
            CAST=plan["CAST"],
        )
    return words.view(dtype), scales


def _quantize_largest_of(x, per_row, kernel):
    """Return the largest magnitudes of rows, or of the tensor, as integers."""
    rows, M, N, stride, flat = _quantize_rows(x, None if per_row else 1)
    shape = max(1, M) if per_row else 1
    largest = x.new_zeros(shape, dtype=torch.int32)
    if M > 0:
        plan = _quantize_tile(int(x.shape[-1]), stride, 1, 16, flat)
        grid = (triton.cdiv(M, plan["ROWS"]) * triton.cdiv(N, plan["COLS"]),)
        with torch.accelerator.device_index(x.device.index):
            kernel[grid](rows, largest, M, N, stride, PER_ROW=per_row, **plan)
    return largest


def _quantize_with(x, dtype, largest, scales, SCALING, kernel, transpose=False):
    """Return values, for scales that are known or for largest magnitudes.

    From the latter it writes the scales, too. With ``transpose``, values of x.T
    and their scales follow.
    """
    stored, plan = _quantize_format(dtype, x.device)
    out = x.new_empty(x.shape, dtype=stored)
    out_t = x.new_empty(x.shape[::-1], dtype=stored) if transpose else None
    scales_t = torch.empty_like(scales) if transpose else None
    per_row = scales.dim() > 0
    whole = None if per_row or transpose else 1
    rows, M, N, stride, flat = _quantize_rows(x, whole)
    if M > 0:
        plan |= {"PER_ROW": per_row, "CLAMP": largest is None}
        BM = 128 if transpose else 1  # the tile that blocks of 128 x 128 have
        length = int(x.shape[-1])
        plan |= _quantize_tile(length, stride, BM, 16, flat, transpose)
        plan["SCALING"] = SCALING
        grid = (triton.cdiv(M, plan["ROWS"]) * triton.cdiv(N, plan["COLS"]),)
        ends = scales, out, scales_t, out_t
        with torch.accelerator.device_index(x.device.index):
            kernel[grid](rows, largest, *ends, M, N, stride, **plan)
    if transpose:
        return out.view(dtype), out_t.view(dtype), scales_t
    return out.view(dtype)


def _quantize_launch(
    x,
    block_size,
    dtype=torch.float8_e4m3fn,
    power_of_two=False,
    kernel=_quantize_kernel,
    largest_kernel=_quantize_largest_kernel,
    with_kernel=_quantize_with_kernel,
):
    _quantize_check("quantize", x, dtype, QUANTIZE_EIGHT)
    BM, BN = _quantize_block("quantize", x, block_size)
    SCALING = "power of two" if power_of_two else "float"
    long = BM == -1 or (BN == -1 and x.shape[-1] > QUANTIZE_ROW)
    if long and x.numel() > 0:
        shape = _quantize_scale_shape(x, BM, BN)
        scales = x.new_empty(shape, dtype=torch.float32)
        largest = _quantize_largest_of(x, BM == 1, largest_kernel)
        rest = largest, scales, SCALING, with_kernel
        return _quantize_with(x, dtype, *rest), scales
    values, scales = _quantize_blocks(x, dtype, BM, BN, SCALING, kernel)
    return values, scales if x.numel() > 0 else scales.fill_(1.0)


def _quantize_static_launch(
    x, scales, dtype=torch.float8_e4m3fn, kernel=_quantize_with_kernel
):
    _quantize_check("quantize_static", x, dtype, QUANTIZE_EIGHT)
    shapes = (), (*x.shape[:-1], 1)
    same = scales.dtype == torch.float32 and scales.device == x.device
    if not same or tuple(scales.shape) not in shapes:
        raise ValueError(
            f"quantize_static takes float32 scales of shape () or {shapes[1]} "
            f"on {x.device}, not {scales.dtype} of {tuple(scales.shape)} on "
            f"{scales.device}"
        )
    return _quantize_with(x, dtype, None, scales.contiguous(), "float", kernel)


def _quantize_with_transpose_launch(
    x,
    block_size,
    dtype=torch.float8_e4m3fn,
    power_of_two=False,
    kernel=_quantize_kernel,
    largest_kernel=_quantize_largest_kernel,
    with_kernel=_quantize_with_kernel,
):
    name = "quantize_with_transpose"
    _quantize_check(name, x, dtype, QUANTIZE_EIGHT)
    BM, BN = _quantize_block(name, x, block_size)
    if x.dim() != 2 or (BM, BN) == (1, -1) or max(BM, BN) > 128:
        raise ValueError(
            f"{name} takes a matrix, and one block or blocks of up to 128 rows "
            f"and columns, not {x.dim()} dimensions and {tuple(block_size)}"
        )
    SCALING = "power of two" if power_of_two else "float"
    if BM == -1:
        largest = _quantize_largest_of(x, False, largest_kernel)
        scale = x.new_empty((), dtype=torch.float32)
        scale = scale if x.numel() > 0 else scale.fill_(1.0)
        options = largest, scale, SCALING, with_kernel, True
        values, values_t, scale_t = _quantize_with(x, dtype, *options)
        return values, scale, values_t, scale_t
    out = _quantize_blocks(x, dtype, BM, BN, SCALING, kernel, transpose=True)
    return tuple(out)


def _quantize_check_4_bits(name, x, dtype):
    if dtype == torch.float4_e2m1fn_x2 and x.shape[-1] % 2:
        raise ValueError(
            f"{name} puts two numbers of a row into a byte, and takes rows of "
            f"even length, not {x.shape[-1]}"
        )


def _quantize_mx_launch(
    x,
    dtype=torch.float8_e4m3fn,
    kernel=_quantize_kernel,
    narrow_kernel=_quantize_4_bits_kernel,
):
    _quantize_check("quantize_mx", x, dtype, QUANTIZE_MX_DTYPES)
    _quantize_check_4_bits("quantize_mx", x, dtype)
    if dtype == torch.float4_e2m1fn_x2:
        kernels = narrow_kernel, kernel
        out, scales = _quantize_4_bits(x, QUANTIZE_MX, "mx", *kernels)
    else:
        out, scales = _quantize_blocks(x, dtype, 1, QUANTIZE_MX, "mx", kernel)
    return out, scales.view(torch.float8_e8m0fnu)


def _quantize_nvfp4_launch(
    x,
    tensor_scale=None,
    kernel=_quantize_4_bits_kernel,
    wide_kernel=_quantize_kernel,
    largest_kernel=_quantize_largest_kernel,
):
    dtype = torch.float4_e2m1fn_x2
    _quantize_check("quantize_nvfp4", x, dtype, (dtype,))
    _quantize_check_4_bits("quantize_nvfp4", x, dtype)
    if tensor_scale is None:
        given = _quantize_largest_of(x, False, largest_kernel)
    else:
        if tensor_scale.numel() != 1 or tensor_scale.dtype != torch.float32:
            raise ValueError(
                "quantize_nvfp4 takes a tensor_scale of one float32, not "
                f"{tensor_scale.dtype} of shape {tuple(tensor_scale.shape)}"
            )
        given = tensor_scale
    tensor = x.new_empty((), dtype=torch.float32)
    if x.numel() == 0:
        tensor.fill_(1.0 if tensor_scale is None else given.reshape(()))
    kernels, tensors = (kernel, wide_kernel), (given, tensor)
    out, scales = _quantize_4_bits(
        x, QUANTIZE_NVFP4, "nvfp4", *kernels, tensors
    )
    return out, scales.view(torch.float8_e4m3fn), tensor


def _quantize_dequantize_launch(
    values,
    scales,
    block_size,
    dtype=torch.float32,
    tensor_scale=None,
    kernel=_quantize_dequantize_kernel,
):
    if values.dtype not in QUANTIZE_FORMATS or values.dim() == 0:
        raise TypeError(
            "dequantize takes values of "
            f"{', '.join(map(str, QUANTIZE_FORMATS))} and one or more "
            f"dimensions, not {values.dtype} of {values.dim()}"
        )
    stored, plan = _quantize_format(values.dtype, values.device)
    plan.pop("MAX")
    shape = (*values.shape[:-1], values.shape[-1] * 8 // plan["WIDTH"])
    out = torch.empty(shape, dtype=dtype, device=values.device)
    BM, BN = block_size if len(block_size) == 2 else (0, 0)
    if any(size < 1 and size != -1 for size in (BM, BN)):
        raise ValueError(
            f"dequantize takes a block_size of two numbers, not {block_size}"
        )
    expected = _quantize_scale_shape(out, BM, BN)
    if tuple(scales.shape) != expected or scales.device != values.device:
        raise ValueError(
            f"dequantize takes scales of shape {expected} on {values.device}, "
            f"not {tuple(scales.shape)} on {scales.device}"
        )
    if out.numel() == 0:
        return out
    kinds = {torch.float8_e8m0fnu: 0, torch.float8_e4m3fn: 3}
    kind = kinds.get(scales.dtype)
    scales = scales if kind is None else scales.view(torch.uint8)
    N = shape[-1]
    M = out.numel() // N
    BM, BN = M if BM == -1 else BM, N if BN == -1 else BN
    plan |= {"SCALES": kind, **_quantize_tile(N, N, 1, 16)}
    grid = (triton.cdiv(M, plan["ROWS"]) * triton.cdiv(N, plan["COLS"]),)
    values, scales = values.contiguous().view(stored), scales.contiguous()
    with torch.accelerator.device_index(values.device.index):
        kernel[grid](values, scales, tensor_scale, out, M, N, BM, BN, **plan)
    return out


@triton_op(f"{QUANTIZE_NAMESPACE}::quantize", mutates_args={})
def quantize(
    x: torch.Tensor,
    block_size: Sequence[int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales: ``x`` is about ``values * scales``.

    Takes ``x`` of shape (..., N) and any strides, float16, bfloat16 or float32,
    and makes float8_e4m3fn, float8_e5m2 or int8. ``block_size`` is the rows and
    columns of ``x`` that share a scale: (-1, -1) for the whole tensor, (1, -1)
    for a row (per token), or two powers of two of up to 16384 numbers, 16 or
    more of them in a row, such as (1, 128) for a group or (128, 128) for a
    block of a matrix. ``values`` has the shape of ``x`` and is contiguous;
    ``scales`` is float32 of shape (), (..., 1), or (ceil(M / rows),
    ceil(N / columns)). Deterministic, without a gradient. Raises TypeError for
    other dtypes, such as float8_e4m3fnuz of MI300, and ValueError for other
    blocks. It works on GPUs that have no float8 or another one, too.

    A scale is the largest magnitude of its block over the largest number of
    ``dtype``: 448, 57344 or 127. It is at least 2**-126, and 1 for a block of
    zeros. With ``power_of_two`` it is rounded up to a power of two: then the
    scales of a product are exact, and can be stored as exponents. A block with
    NaN or infinities has a scale of NaN.

    Rounding: values are ``x * (1 / scale)``, computed in float32, and rounded
    to the nearest, to even.
    """
    kernels = (
        wrap_triton(_quantize_kernel),
        wrap_triton(_quantize_largest_kernel),
        wrap_triton(_quantize_with_kernel),
    )
    return _quantize_launch(x, block_size, dtype, power_of_two, *kernels)


@triton_op(f"{QUANTIZE_NAMESPACE}::quantize_static", mutates_args={})
def quantize_static(
    x: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Return values for scales that are known, as those of a calibration.

    ``scales`` is float32 of shape () for the whole tensor, or (..., 1) for each
    row. What is larger than ``dtype`` has becomes its largest number. All else
    is as in ``quantize``.
    """
    kernel = wrap_triton(_quantize_with_kernel)
    return _quantize_static_launch(x, scales, dtype, kernel)


@triton_op(f"{QUANTIZE_NAMESPACE}::quantize_with_transpose", mutates_args={})
def quantize_with_transpose(
    x: torch.Tensor,
    block_size: Sequence[int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``quantize`` makes of a matrix and of its transpose.

    That is values (M, N) and scales, then values (N, M) and scales, from one
    read of ``x``. A product sums over rows of both its matrices, and the
    gradient of a weight sums over tokens: it takes the transpose. A block is
    the whole matrix, (-1, -1), or has up to 128 rows and columns; else as
    ``quantize``.
    """
    kernels = (
        wrap_triton(_quantize_kernel),
        wrap_triton(_quantize_largest_kernel),
        wrap_triton(_quantize_with_kernel),
    )
    options = block_size, dtype, power_of_two
    return _quantize_with_transpose_launch(x, *options, *kernels)


@triton_op(f"{QUANTIZE_NAMESPACE}::quantize_mx", mutates_args={})
def quantize_mx(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales in a format of MX: MXFP8 or MXFP4.

    Takes ``x`` as ``quantize`` does; ``dtype`` is float8_e4m3fn, float8_e5m2 or
    float4_e2m1fn_x2. Blocks are 32 numbers of a row; the last may have fewer.
    ``scales`` is float8_e8m0fnu of shape (..., ceil(N / 32)). A byte has two
    numbers of 4 bits, the first in its low half: N is even, and values have
    shape (..., N / 2).

    The exponent of a scale is that of the block's largest magnitude, less the
    largest of ``dtype``, and values that are larger than ``dtype`` has become
    its largest number, as in section 6.3 of the OCP Microscaling Formats
    specification 1.0. A block with NaN or infinities has a scale of NaN.

    Rounding: to the nearest, to even. In 4 bits, ``x / scale`` that is less
    than 2**-22 from 0.25 or 0.75 counts as that.
    """
    kernels = _quantize_kernel, _quantize_4_bits_kernel
    return _quantize_mx_launch(x, dtype, *map(wrap_triton, kernels))


@triton_op(f"{QUANTIZE_NAMESPACE}::quantize_nvfp4", mutates_args={})
def quantize_nvfp4(
    x: torch.Tensor, tensor_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, scales and a scale of the tensor, in the format NVFP4.

    Takes ``x`` as ``quantize`` does, N even. Blocks are 16 numbers of a row;
    the last may have fewer. ``values`` is float4_e2m1fn_x2, (..., N / 2) of it,
    as of ``quantize_mx``; ``scales`` is float8_e4m3fn of shape
    (..., ceil(N / 16)); ``tensor_scale`` is float32 of shape (). A number of
    ``x`` is about ``value * scale * tensor_scale``. Without a ``tensor_scale``
    it is the largest magnitude over 448 * 6, for which ``x`` is read once more.

    Scales are rounded to the nearest, and values for the rounded ones, as in
    ``quantize_mx``. A block with NaN or infinities has a scale of NaN.
    """
    kernels = (
        _quantize_4_bits_kernel,
        _quantize_kernel,
        _quantize_largest_kernel,
    )
    return _quantize_nvfp4_launch(x, tensor_scale, *map(wrap_triton, kernels))


@triton_op(f"{QUANTIZE_NAMESPACE}::dequantize", mutates_args={})
def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    block_size: Sequence[int],
    dtype: torch.dtype = torch.float32,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``values * scales``, as ``dtype``.

    Takes what the functions above return; ``block_size`` is (1, 32) for MX and
    (1, 16) for NVFP4. The product is in float32 and is rounded once. Raises
    TypeError for values of other dtypes, and ValueError for scales whose shape
    does not fit ``block_size``.
    """
    kernel = wrap_triton(_quantize_dequantize_kernel)
    options = block_size, dtype, tensor_scale
    return _quantize_dequantize_launch(values, scales, *options, kernel)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
QUANTIZE_LIBRARY = Library(QUANTIZE_NAMESPACE, "FRAGMENT")
QUANTIZE_LIBRARY.impl("quantize", _quantize_launch, "CUDA")
QUANTIZE_LIBRARY.impl("quantize_static", _quantize_static_launch, "CUDA")
QUANTIZE_LIBRARY.impl(
    "quantize_with_transpose", _quantize_with_transpose_launch, "CUDA"
)
QUANTIZE_LIBRARY.impl("quantize_mx", _quantize_mx_launch, "CUDA")
QUANTIZE_LIBRARY.impl("quantize_nvfp4", _quantize_nvfp4_launch, "CUDA")
QUANTIZE_LIBRARY.impl("dequantize", _quantize_dequantize_launch, "CUDA")
