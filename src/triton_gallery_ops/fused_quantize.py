"""RMSNorm or SwiGLU that writes float8 or int8, and the scales, at once.

A layer in 8 bits quantizes what a norm or an activation makes. Here the kernel
that makes a row quantizes it as well, while the row is in registers: the norm
is neither written in 16 bits nor read again. Results are those of ``rms_norm``
or ``swiglu`` followed by ``quantize`` or ``quantize_static``: a scale for each
row (token) or each group of a row, or one for all that the caller knows. Memory
bound. Rows of up to 16384 elements are read once; RMSNorm takes no longer ones,
and SwiGLU reads those twice, where the scale is that of the row. Deterministic,
for inference: there is no gradient.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

from triton_gallery_ops.quantize import (
    QUANTIZE_EIGHT,
    _quantize_check,
    _quantize_format,
    _quantize_largest,
    _quantize_scale,
    _quantize_scale_shape,
    _quantize_values,
)
from triton_gallery_ops.rms_norm import (
    _rms_norm_check,
    _rms_norm_factor,
    _rms_norm_gpu,
    _rms_norm_load,
    _rms_norm_rows,
    _rms_norm_scale,
)
from triton_gallery_ops.swiglu import (
    _swiglu_check,
    _swiglu_clamp,
    _swiglu_halves,
    _swiglu_options,
    _swiglu_share,
)

FUSED_QUANTIZE_NAMESPACE = "triton_gallery"
FUSED_QUANTIZE_GROUP = 1024  # elements of the largest group
FUSED_QUANTIZE_ROW = 16384  # elements of the longest row in registers
FUSED_QUANTIZE_TILE = 4096  # elements of a block of a longer row
FUSED_QUANTIZE_WARP = 1024  # elements of a warp
FUSED_QUANTIZE_FEW = 2**25  # elements up to which programs load ahead
FUSED_QUANTIZE_WARPS = 16  # warps of a multiprocessor that load ahead


@triton.jit
def _fused_quantize_block(
    y,  # (BLOCK_M, BLOCK_N)
    given,  # the largest magnitude of each row or group, or one over its scale
    out_rows,  # (BLOCK_M, 1)
    scale_rows,  # (BLOCK_M, 1)
    first,  # the column of the block
    N,
    GROUP: tl.constexpr,  # elements that share a scale; 0 for the whole row
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
):
    """Store a block of values, and its scales."""
    BN: tl.constexpr = GROUP if GROUP else y.shape[1]
    inverse = given
    if SCALING != "static":
        inverse, scale = _quantize_scale(given, None, SCALING, MAX, CAST)
        groups = tl.cdiv(N, GROUP) if GROUP else 1
        # A later block of a row with one scale stores none.
        offs_g = first // BN + tl.arange(0, y.shape[1] // BN)[None, :]
        tl.store(scale_rows + offs_g, scale, mask=offs_g < groups)
    CLAMP: tl.constexpr = SCALING == "static"
    y = _quantize_values(
        y, inverse, 1, BN, MAX, MANTISSA, BIAS, WIDTH, LAST, CAST, CLAMP
    )
    offs_n = first + tl.arange(0, y.shape[1])[None, :]  # (1, BLOCK_N)
    y = y.to(out_rows.dtype.element_ty)
    tl.store(out_rows + offs_n, y, mask=offs_n < N)


@triton.jit
def _fused_quantize_store(
    y,  # (BLOCK_M, BLOCK_N)
    rest,  # (BLOCK_M, REST), where a row is two blocks, or None
    static_ptr,
    out_ptr,
    scale_ptr,
    offs_m,  # (BLOCK_M, 1)
    first,
    N,
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
):
    """Store the values and the scales of rows, or of a part of them."""
    out_rows = out_ptr + offs_m * N  # (BLOCK_M, 1)
    scale_rows = scale_ptr + offs_m * (tl.cdiv(N, GROUP) if GROUP else 1)
    BN: tl.constexpr = GROUP if GROUP else y.shape[1]
    BN_REST: tl.constexpr = BN if rest is None or GROUP else rest.shape[1]
    if SCALING == "static":
        scale = tl.load(static_ptr)
        tl.store(scale_ptr, scale)  # all programs store the same
        given = tl.zeros(offs_m.shape, tl.float32) + tl.math.div_rn(1.0, scale)
        given_rest = given
    else:
        given = _quantize_largest(y, 1, BN)
        if rest is not None:
            given_rest = _quantize_largest(rest, 1, BN_REST)
            if not GROUP:  # both blocks have one scale
                given = tl.maximum(given, given_rest)
                given_rest = given
    _fused_quantize_block(
        y,
        given,
        out_rows,
        scale_rows,
        first,
        N,
        GROUP,
        SCALING,
        MAX,
        MANTISSA,
        BIAS,
        WIDTH,
        LAST,
        CAST,
    )
    if rest is not None:
        _fused_quantize_block(
            rest,
            given_rest,
            out_rows,
            scale_rows,
            y.shape[1],
            N,
            GROUP,
            SCALING,
            MAX,
            MANTISSA,
            BIAS,
            WIDTH,
            LAST,
            CAST,
        )


@triton.jit
def _fused_quantize_rows(tile, M, BLOCK_M: tl.constexpr):
    """Return the numbers (BLOCK_M, 1) of a tile's rows, in int64."""
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    # Clamp to the last row: it is recomputed, and the same values are stored.
    return tl.minimum(offs_m, M - 1)


@triton.jit
def _fused_quantize_tile(
    x_ptr, tile, M, stride_xm, offs_n, mask, BLOCK_M: tl.constexpr
):
    """Load a tile of rows, which is not read again."""
    offs_m = _fused_quantize_rows(tile, M, BLOCK_M)
    ptrs = x_ptr + offs_m * stride_xm + offs_n  # (BLOCK_M, BLOCK_N)
    return tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _fused_quantize_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,  # None without a weight
    h_ptr,
    static_ptr,  # None where scales are found here
    out_ptr,
    scale_ptr,
    M,
    N,
    stride_xm,
    stride_rm,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,  # added to the weight
    LLAMA: tl.constexpr,  # whether x is rounded before it is scaled
    ADD: tl.constexpr,  # whether there are a residual and an h
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,  # the second block of a row, or 0
    AHEAD: tl.constexpr,  # whether a program has several tiles of rows
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NARROW: tl.constexpr = DTYPE if LLAMA else None
    ACC: tl.constexpr = tl.float32
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    stride_rm = stride_rm // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tiles, programs = tl.cdiv(M, BLOCK_M), tl.num_programs(axis=0)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    mask = offs_n < N
    # As a tile, although its rows are the same: the compiler would move x
    # through shared memory to where a single row lies.
    offs_w = offs_n + tl.zeros((BLOCK_M, 1), tl.int32)  # (BLOCK_M, BLOCK_N)
    if AHEAD:
        following = _fused_quantize_tile(
            x_ptr, pid, M, stride_xm, offs_n, mask, BLOCK_M
        )
        if weight_ptr is not None:
            held = tl.load(weight_ptr + offs_w, mask=mask, other=0)
    # One tile without AHEAD, which the compiler sees: it leaves no loop then.
    end, step = (tiles, programs) if AHEAD else (pid + 1, 1)
    for tile in range(pid, end, step):
        offs_m = _fused_quantize_rows(tile, M, BLOCK_M)  # (BLOCK_M, 1)
        x_rows = x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)
        residual_rows = residual_ptr + offs_m * stride_rm  # (BLOCK_M, 1)
        h_rows = h_ptr + offs_m * N  # (BLOCK_M, 1)
        if AHEAD:
            x = following.to(ACC)
            # The next rows are on their way while these are reduced.
            later = tile + programs
            there = offs_n < tl.where(later < tiles, N, 0)
            following = _fused_quantize_tile(
                x_ptr, later, M, stride_xm, offs_n, there, BLOCK_M
            )
        else:
            x = _rms_norm_load(
                x_rows, residual_rows, h_rows, offs_n, mask, ACC, ADD
            )
        if REST:
            # Loaded before the first sum, for which all warps wait.
            rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
            x_rest = _rms_norm_load(
                x_rows, residual_rows, h_rows, rest, rest < N, ACC, ADD
            )
            squares = tl.sum(x * x) + tl.sum(x_rest * x_rest)  # of the one row
        else:
            squares = tl.sum(x * x, axis=1, keep_dims=True)  # (BLOCK_M, 1)
        r = tl.rsqrt(squares / N + EPS)
        if AHEAD and weight_ptr is not None:
            weight = held.to(ACC) + OFFSET
        else:
            weight = _rms_norm_factor(weight_ptr, offs_w, N, ACC, OFFSET)
        # Rounded as if it were stored: the largest magnitude is that of what
        # rms_norm returns.
        y = _rms_norm_scale(x, r, weight, ACC, NARROW).to(DTYPE).to(ACC)
        y_rest = None
        if REST:
            last = _rms_norm_factor(weight_ptr, rest, N, ACC, OFFSET)
            y_rest = _rms_norm_scale(x_rest, r, last, ACC, NARROW)
            y_rest = y_rest.to(DTYPE).to(ACC)
        _fused_quantize_store(
            y,
            y_rest,
            static_ptr,
            out_ptr,
            scale_ptr,
            offs_m,
            0,
            N,
            GROUP,
            SCALING,
            MAX,
            MANTISSA,
            BIAS,
            WIDTH,
            LAST,
            CAST,
        )


@triton.jit
def _fused_quantize_gated(
    gate_rows,
    up_rows,
    offs,
    N,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return activation(gate) * (up + BETA), rounded as if it were stored."""
    DTYPE: tl.constexpr = gate_rows.dtype.element_ty
    mask = offs < N
    gate = tl.load(gate_rows + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_rows + offs, mask=mask, other=0.0).to(tl.float32)
    gate, up = _swiglu_clamp(gate, up, BETA, LIMIT)
    # Masked elements are 0, as gate is, even if up became BETA.
    y = gate * _swiglu_share(gate, ACTIVATION, ALPHA) * up
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def _fused_quantize_swiglu_kernel(
    gate_ptr,
    up_ptr,
    static_ptr,  # None where scales are found here
    out_ptr,
    scale_ptr,
    M,
    N,
    stride_gm,
    stride_um,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,  # the second block of a row, or 0
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
):
    # VEC divides them, as above.
    N = N // VEC * VEC
    stride_gm = stride_gm // VEC * VEC
    stride_um = stride_um // VEC * VEC
    tiles = tl.cdiv(N, BLOCK_N + REST)
    pid = tl.program_id(axis=0)
    offs_m = (pid // tiles).to(tl.int64) * BLOCK_M
    offs_m += tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_m = tl.minimum(offs_m, M - 1)  # as above
    first = pid % tiles * BLOCK_N  # 0 where a program has whole rows
    gate_rows = gate_ptr + offs_m * stride_gm  # (BLOCK_M, 1)
    up_rows = up_ptr + offs_m * stride_um  # (BLOCK_M, 1)
    offs_n = first + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    y = _fused_quantize_gated(
        gate_rows, up_rows, offs_n, N, ACTIVATION, ALPHA, BETA, LIMIT
    )
    y_rest = None
    if REST:
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        y_rest = _fused_quantize_gated(
            gate_rows, up_rows, rest, N, ACTIVATION, ALPHA, BETA, LIMIT
        )
    _fused_quantize_store(
        y,
        y_rest,
        static_ptr,
        out_ptr,
        scale_ptr,
        offs_m,
        first,
        N,
        GROUP,
        SCALING,
        MAX,
        MANTISSA,
        BIAS,
        WIDTH,
        LAST,
        CAST,
    )


@triton.jit
def _fused_quantize_swiglu_long_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    scale_ptr,
    N,
    stride_gm,
    stride_um,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALING: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    CAST: tl.constexpr,
):
    """Quantize a row that does not fit into registers."""
    # VEC divides them, as above.
    N = N // VEC * VEC
    stride_gm = stride_gm // VEC * VEC
    stride_um = stride_um // VEC * VEC
    row = tl.program_id(axis=0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    gate_rows = gate_ptr + row * stride_gm  # (1, 1)
    up_rows = up_ptr + row * stride_um  # (1, 1)
    most = tl.zeros((1, BLOCK_N), tl.float32)
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
        y = _fused_quantize_gated(
            gate_rows, up_rows, offs_n, N, ACTIVATION, ALPHA, BETA, LIMIT
        )
        most = tl.maximum(most, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    largest = _quantize_largest(most, 1, BLOCK_N)
    # The second time the row comes from a cache.
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
        y = _fused_quantize_gated(
            gate_rows, up_rows, offs_n, N, ACTIVATION, ALPHA, BETA, LIMIT
        )
        _fused_quantize_block(
            y,
            largest,
            out_ptr + row * N,
            scale_ptr + row,
            first,
            N,
            0,
            SCALING,
            MAX,
            MANTISSA,
            BIAS,
            WIDTH,
            LAST,
            CAST,
        )


def _fused_quantize_check(name, x, block_size, dtype, power_of_two, scale):
    """Return how many elements share a scale, or raise for what is no option.

    That is 0 for a row, or for all rows if there is a scale.
    """
    _quantize_check(name, x, dtype, QUANTIZE_EIGHT)
    block = tuple(block_size)
    if scale is not None:
        given = scale.numel() == 1 and scale.dtype == torch.float32
        if not given or scale.device != x.device:
            raise ValueError(
                f"{name} takes a scale of one float32 on {x.device}, not "
                f"{scale.dtype} of {tuple(scale.shape)} on {scale.device}"
            )
        if block != (-1, -1) or power_of_two:
            raise ValueError(
                f"{name} takes a scale with block_size=(-1, -1), and as it is, "
                f"not with {block} and power_of_two={power_of_two}"
            )
        return 0
    if block == (1, -1):
        return 0
    group = block[1] if len(block) == 2 and block[0] == 1 else 0
    if not 16 <= group <= FUSED_QUANTIZE_GROUP or group & (group - 1):
        raise ValueError(
            f"{name} takes a block_size of (1, -1), of 1 and a power of two "
            f"from 16 to {FUSED_QUANTIZE_GROUP}, or of (-1, -1) with a scale, "
            f"not {block}"
        )
    return group


def _fused_quantize_outputs(x, block_size, dtype, power_of_two, scale):
    """Return values and scales to be written, and the options of kernels."""
    stored, plan = _quantize_format(dtype, x.device)
    out = x.new_empty(x.shape, dtype=stored)
    shape = _quantize_scale_shape(x, *block_size)
    scales = x.new_empty(shape, dtype=torch.float32)
    plan["SCALING"] = "power of two" if power_of_two else "float"
    if scale is not None:
        plan["SCALING"] = "static"
    if out.numel() == 0:
        scales.copy_(1 if scale is None else scale.reshape(()))
    return out, scales, plan


def _fused_quantize_plan(N, group, strides, split=FUSED_QUANTIZE_WARP):
    """Return how to launch for rows of N elements.

    A block of ``split`` elements or more may become two.
    """
    BLOCK_N, REST = max(triton.next_power_of_2(N), group), 0
    # Up to three quarters of a block: two blocks are fewer elements
    least = max(split, 4 * group)
    if least <= BLOCK_N and N * 4 <= BLOCK_N * 3:
        BLOCK_N //= 2
        REST = max(triton.next_power_of_2(N - BLOCK_N), group)
    return {
        "VEC": math.gcd(N, *strides, 16),
        "BLOCK_M": 1 if REST else max(1, FUSED_QUANTIZE_WARP // BLOCK_N),
        "BLOCK_N": BLOCK_N,
        "REST": REST,
        "GROUP": group,
        "num_warps": max(1, BLOCK_N // FUSED_QUANTIZE_WARP),
    }


def _fused_quantize_rms_norm_run(
    name, x, residual, weight, eps, options, offset, casting_mode, kernel
):
    """Return values, scales and, if there is a residual, the sum."""
    _, dtype, _, scale = options
    given = [x] if residual is None else [x, residual]
    _rms_norm_check(name, weight, offset, *given)
    group = _fused_quantize_check(name, x, *options)
    if casting_mode not in ("gemma", "llama"):
        raise ValueError(
            f"{name} takes casting_mode='gemma' or 'llama', "
            f"not {casting_mode!r}"
        )
    out, scales, plan = _fused_quantize_outputs(x, *options)
    h = x.new_empty(0 if residual is None else x.shape)
    if out.numel() > 0:
        rows, stride_xm = _rms_norm_rows(x)
        added, stride_rm = rows, stride_xm
        if residual is not None:
            added, stride_rm = _rms_norm_rows(residual)
        weight = None if weight is None else weight.contiguous()
        N = int(x.shape[-1])
        M = x.numel() // N
        # Few or long rows: the next ones load while one is reduced. Under
        # torch.compile, M may be symbolic: comparing it would fix its range.
        few = isinstance(M, int) and M * N <= FUSED_QUANTIZE_FEW
        ahead = residual is None and (few or N > FUSED_QUANTIZE_TILE)
        blocks = N, group, (stride_xm, stride_rm)
        if ahead or residual is not None:
            blocks += (2 * FUSED_QUANTIZE_TILE,)
        plan |= _fused_quantize_plan(*blocks)
        plan |= {"EPS": eps, "OFFSET": offset, "ADD": residual is not None}
        plan["LLAMA"] = casting_mode == "llama"
        plan["AHEAD"] = ahead and plan["REST"] == 0
        most = M
        if plan["AHEAD"]:
            held = FUSED_QUANTIZE_WARPS // plan["num_warps"]
            most = held * _rms_norm_gpu(x.device)[0]
        pointers = rows, added, weight, h, scale, out, scales
        grid = (torch.sym_min(triton.cdiv(M, plan["BLOCK_M"]), most),)
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            kernel[grid](*pointers, M, N, stride_xm, stride_rm, **plan)
    return out.view(dtype), scales, h


def _fused_quantize_rms_norm_launch(
    x,
    weight,
    eps,
    block_size,
    dtype=torch.float8_e4m3fn,
    power_of_two=False,
    scale=None,
    offset=0.0,
    casting_mode="gemma",
    kernel=_fused_quantize_rms_norm_kernel,
):
    name, options = "fused_quantize_rms_norm", (block_size, dtype)
    options += power_of_two, scale
    rest = weight, eps, options, offset, casting_mode, kernel
    return _fused_quantize_rms_norm_run(name, x, None, *rest)[:2]


def _fused_quantize_rms_norm_residual_launch(
    x,
    residual,
    weight,
    eps,
    block_size,
    dtype=torch.float8_e4m3fn,
    power_of_two=False,
    scale=None,
    offset=0.0,
    casting_mode="gemma",
    kernel=_fused_quantize_rms_norm_kernel,
):
    name, options = "fused_quantize_rms_norm_residual", (block_size, dtype)
    options += power_of_two, scale
    rest = weight, eps, options, offset, casting_mode, kernel
    return _fused_quantize_rms_norm_run(name, x, residual, *rest)


def _fused_quantize_swiglu_launch(
    gate,
    up,
    block_size,
    dtype=torch.float8_e4m3fn,
    power_of_two=False,
    scale=None,
    activation="silu",
    alpha=1.0,
    beta=0.0,
    limit=None,
    kernel=_fused_quantize_swiglu_kernel,
    long_kernel=_fused_quantize_swiglu_long_kernel,
):
    name = "fused_quantize_swiglu"
    if up is None:
        gate, up = _swiglu_halves(name, gate, False)
    _swiglu_check(name, gate, up)
    options = block_size, dtype, power_of_two, scale
    group = _fused_quantize_check(name, gate, *options)
    constants = _swiglu_options(name, activation, alpha, beta, limit)
    out, scales, plan = _fused_quantize_outputs(gate, *options)
    if out.numel() == 0:
        return out.view(dtype), scales
    rows, stride_gm = _rms_norm_rows(gate)
    others, stride_um = _rms_norm_rows(up)
    N = int(gate.shape[-1])
    M = gate.numel() // N
    # Where a scale is not that of a row, a program has parts of rows.
    whole = scale is None and group == 0
    length = N if whole else min(N, FUSED_QUANTIZE_WARP)
    blocks = _fused_quantize_plan(length, group, (stride_gm, stride_um))
    plan |= constants | blocks | {"VEC": math.gcd(blocks["VEC"], N)}
    sizes = N, stride_gm, stride_um
    with torch.accelerator.device_index(gate.device.index):
        if whole and N > FUSED_QUANTIZE_ROW:
            for one_row in ("BLOCK_M", "REST", "GROUP"):
                plan.pop(one_row)
            plan |= {"BLOCK_N": FUSED_QUANTIZE_TILE, "num_warps": 4}
            long_kernel[(M,)](rows, others, out, scales, *sizes, **plan)
        else:
            tiles = triton.cdiv(N, plan["BLOCK_N"] + plan["REST"])
            grid = (triton.cdiv(M, plan["BLOCK_M"]) * tiles,)
            kernel[grid](rows, others, scale, out, scales, M, *sizes, **plan)
    return out.view(dtype), scales


@triton_op(
    f"{FUSED_QUANTIZE_NAMESPACE}::fused_quantize_rms_norm", mutates_args={}
)
def fused_quantize_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    block_size: Sequence[int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of the RMSNorm of each row of x.

    As ``quantize(rms_norm(x, weight, eps), block_size)``, in one pass over
    memory. Takes ``x`` of shape (..., N) and any strides, float16, bfloat16 or
    float32, with N up to 16384, and ``weight``, ``eps``, ``offset`` and
    ``casting_mode`` as ``rms_norm`` does. ``block_size`` is (1, -1) for a scale
    of each row (per token), (1, 128) for groups of 128, or of another power of
    two from 16 to 1024. ``dtype`` is float8_e4m3fn, float8_e5m2 or int8. The
    values have the shape of ``x`` and are contiguous; the scales are float32 of
    shape (..., 1) or (..., ceil(N / 128)), powers of two if ``power_of_two``
    says so. With a ``scale``, one float32 that a calibration found,
    ``block_size`` is (-1, -1), and what is too large for ``dtype`` becomes its
    largest number, as in ``quantize_static``; then the scales are that one, of
    shape (). The kernel is compiled for each ``eps`` and ``offset``.
    Deterministic, without a gradient. Raises TypeError for other dtypes and
    devices that differ, and ValueError for other shapes and options.

    Rounding: the norm is rounded to the dtype of ``x`` before its largest
    magnitude is taken, as vLLM and TensorRT-LLM do. Scales and values are as in
    ``quantize``: a row of zeros has a scale of 1, one with NaN or infinities a
    scale of NaN. A sum of squares in another order may change the last bit of
    the norm.
    """
    options = block_size, dtype, power_of_two, scale, offset, casting_mode
    kernel = wrap_triton(_fused_quantize_rms_norm_kernel)
    return _fused_quantize_rms_norm_launch(x, weight, eps, *options, kernel)


@triton_op(
    f"{FUSED_QUANTIZE_NAMESPACE}::fused_quantize_rms_norm_residual",
    mutates_args={},
)
def fused_quantize_rms_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    block_size: Sequence[int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values and scales of the norm of h = x + residual, and h.

    ``residual`` has the shape and dtype of ``x``, and so has h. All else is as
    in ``fused_quantize_rms_norm``.

    Rounding: h is rounded to its dtype, and the norm is that of the rounded h.
    """
    options = block_size, dtype, power_of_two, scale, offset, casting_mode
    kernel = wrap_triton(_fused_quantize_rms_norm_kernel)
    tensors = x, residual, weight
    return _fused_quantize_rms_norm_residual_launch(
        *tensors, eps, *options, kernel
    )


@triton_op(
    f"{FUSED_QUANTIZE_NAMESPACE}::fused_quantize_swiglu", mutates_args={}
)
def fused_quantize_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    block_size: Sequence[int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of activation(gate) * (up + beta).

    As ``quantize(swiglu(gate, up), block_size)``, in one pass over memory, or
    two where the scale is that of a row of more than 16384 elements. Takes
    ``gate`` and ``up`` of one shape (..., N), or the whole projection of shape
    (..., 2 * N), gate first, as ``gate`` with an ``up`` of None. Rows may lie
    apart, as halves of a projection do. The options of the activation are those
    of ``swiglu``; all other arguments, the results and the errors are as in
    ``fused_quantize_rms_norm``.

    Rounding: the product is rounded to the dtype of ``gate`` before its largest
    magnitude is taken.
    """
    options = block_size, dtype, power_of_two, scale
    constants = activation, alpha, beta, limit
    kernels = (
        wrap_triton(_fused_quantize_swiglu_kernel),
        wrap_triton(_fused_quantize_swiglu_long_kernel),
    )
    return _fused_quantize_swiglu_launch(
        gate, up, *options, *constants, *kernels
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
FUSED_QUANTIZE_LIBRARY = Library(FUSED_QUANTIZE_NAMESPACE, "FRAGMENT")
FUSED_QUANTIZE_LIBRARY.impl(
    "fused_quantize_rms_norm", _fused_quantize_rms_norm_launch, "CUDA"
)
FUSED_QUANTIZE_LIBRARY.impl(
    "fused_quantize_rms_norm_residual",
    _fused_quantize_rms_norm_residual_launch,
    "CUDA",
)
FUSED_QUANTIZE_LIBRARY.impl(
    "fused_quantize_swiglu", _fused_quantize_swiglu_launch, "CUDA"
)
