"""RMSNorm over the last dimension, optionally fused with a residual add.

Computes h * weight / sqrt(mean(h * h) + eps) for each row (Zhang and Sennrich,
2019, arXiv:1910.07467). In ``rms_norm``, h is x; in ``rms_norm_residual``, h is
x + residual and is returned as well; ``rms_norm_residual_`` writes both in
place. Rows of up to 16384 elements, 8192 in
float64, stay in registers, so each element is read once; use ``norms_long`` for
longer rows. Unlike in ``torch.nn.functional.rms_norm``, eps is required. The
kernels are compiled for each eps and each set of options: no weight, an offset
of the weight as in Gemma, the rounding of Llama, a weight of another dtype.
Deterministic on a given GPU model: the weight's gradient is summed in a fixed
order, without atomics. There is no second derivative.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op, triton_op, wrap_triton

RMS_NORM_NAMESPACE = "triton_gallery"
RMS_NORM_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Bytes, of a row in its accumulator's type
RMS_NORM_LONGEST = 64 * 1024
RMS_NORM_HEAD = 1024  # up to here the backward takes larger tiles
RMS_NORM_TILE = 8 * 1024  # what short rows share a program for
RMS_NORM_WHOLE = 16 * 1024  # beyond it a row may be two blocks


@triton.jit
def _rms_norm_read(
    ptrs, mask, ACC: tl.constexpr, EVICTION: tl.constexpr = None
):
    """Load a block, zeros where it is masked. A full block has no mask."""
    if mask is None:
        block = tl.load(ptrs, eviction_policy=EVICTION)
    else:
        block = tl.load(ptrs, mask=mask, other=0, eviction_policy=EVICTION)
    return block.to(ACC)


@triton.jit
def _rms_norm_factor(
    weight_ptr,  # or None
    offs,
    N,  # None where all of the block is inside
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    EVICTION: tl.constexpr = None,
):
    """Return OFFSET + weight, or 1 if there is no weight."""
    factor = 1.0
    if weight_ptr is not None:
        ptrs = weight_ptr + offs
        mask = None if N is None else offs < N
        factor = _rms_norm_read(ptrs, mask, ACC, EVICTION)
        if OFFSET != 0:
            factor += OFFSET
    return factor


@triton.jit
def _rms_norm_scale(x, r, factor, ACC: tl.constexpr, NARROW: tl.constexpr):
    """Return x * r * factor. If NARROW is a type, x * r is rounded to it."""
    x *= r
    if NARROW is not None:
        x = x.to(NARROW).to(ACC)
    return x * factor


@triton.jit
def _rms_norm_load(
    x_rows,
    residual_rows,
    h_rows,
    offs,
    mask,
    ACC: tl.constexpr,
    ADD: tl.constexpr,
):
    """Return a block of rows of x or, stored as well, of x + residual."""
    x = _rms_norm_read(x_rows + offs, mask, ACC)
    if ADD:
        x += _rms_norm_read(residual_rows + offs, mask, ACC)
        # Rounded as it is stored: the backward starts from what is stored.
        h = x.to(h_rows.dtype.element_ty)
        tl.store(h_rows + offs, h, mask=mask)
        x = h.to(ACC)
    return x


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,  # None without a weight
    h_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    stride_rm,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,  # added to the weight
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    ADD: tl.constexpr,  # whether there are a residual and an h
    LLAMA: tl.constexpr,  # whether x is rounded before it is scaled
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,  # the second block of a row, or 0
    IN_PLACE: tl.constexpr,
):
    # VEC divides them, which the compiler learns here: it loads VEC at once.
    N = N // VEC * VEC
    stride_xm = stride_xm // VEC * VEC
    stride_rm = stride_rm // VEC * VEC
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    inside = offs_m < M
    # Clamp to the last row: it is recomputed, and the same values are stored.
    offs_m = tl.minimum(offs_m, M - 1)
    x_rows = x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)
    residual_rows = residual_ptr + offs_m * stride_rm  # (BLOCK_M, 1)
    h_rows = h_ptr + offs_m * N  # (BLOCK_M, 1)
    y_rows = y_ptr + offs_m * N  # (BLOCK_M, 1)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # The first of two blocks is full, and needs no mask.
    mask = None if REST else offs_n < N
    if IN_PLACE and not REST:
        # Not recomputed: another thread may have stored it already.
        mask &= inside
    x = _rms_norm_load(x_rows, residual_rows, h_rows, offs_n, mask, ACC, ADD)
    if REST:
        # Loaded before the first sum, for which all warps wait.
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        x_rest = _rms_norm_load(
            x_rows, residual_rows, h_rows, rest, rest < N, ACC, ADD
        )
    if REST:
        # A tile of two blocks is one row. To keep the dimension of its sum,
        # Triton 3.9 would move the first block through shared memory.
        squares = tl.sum(x * x) + tl.sum(x_rest * x_rest)
    else:
        squares = tl.sum(x * x, axis=1, keep_dims=True)  # (BLOCK_M, 1)
    # The mean is over N elements, not over the blocks.
    r = tl.rsqrt(squares / N + EPS)
    whole = None if REST else N
    NARROW: tl.constexpr = y_ptr.dtype.element_ty if LLAMA else None
    weight = _rms_norm_factor(weight_ptr, offs_n, whole, ACC, OFFSET)
    y_ptrs = y_rows + offs_n  # (BLOCK_M, BLOCK_N)
    y = _rms_norm_scale(x, r, weight, ACC, NARROW)
    tl.store(y_ptrs, y, mask=mask)
    if REST:
        last = _rms_norm_factor(weight_ptr, rest, N, ACC, OFFSET)
        y_ptrs = y_rows + rest  # (BLOCK_M, REST)
        y = _rms_norm_scale(x_rest, r, last, ACC, NARROW)
        tl.store(y_ptrs, y, mask=rest < N)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    dh_ptr,
    h_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,  # None without a weight
    M,
    N,
    stride_hm,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,  # added to the weight
    ACC: tl.constexpr,
    VEC: tl.constexpr,
    ADD: tl.constexpr,  # whether there is a gradient of h
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,  # of how many turns loads are in flight
):
    # Unless 16 divides them, the compiler learns only here that VEC does.
    N = N // VEC * VEC
    stride_hm = stride_hm // VEC * VEC
    pid = tl.program_id(axis=0)
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # One row of sums for each row of a tile: a sum across a tile's rows in each
    # turn could have threads wait for each other there.
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if REST:
        rest = BLOCK_N + tl.arange(0, REST)[None, :]  # (1, REST)
        dw_rest = tl.zeros((BLOCK_M, REST), dtype=ACC)
    else:
        # Here the weight stays in registers, for all tiles of the program.
        weight = _rms_norm_factor(weight_ptr, offs_n, N, ACC, OFFSET)
    # If programs took whichever tile is next, the order of the sums, and with
    # it their last bits, would change from call to call.
    tiles, programs = tl.cdiv(M, BLOCK_M), tl.num_programs(axis=0)
    for tile in tl.range(pid, tiles, programs, num_stages=STAGES):
        # In int32 a row's offset would overflow past element 2**31.
        offs_m = tl.cast(tile, tl.int64) * BLOCK_M
        offs_m += tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
        # A row done twice would count twice in dw: here rows need a mask. With
        # two blocks a tile is one row, and the first block is full.
        mask = None if REST else (offs_m < M) & (offs_n < N)
        h_rows = h_ptr + offs_m * stride_hm  # (BLOCK_M, 1)
        rows = offs_m * N  # (BLOCK_M, 1)
        h = _rms_norm_read(h_rows + offs_n, mask, ACC)
        dy = _rms_norm_read(dy_ptr + rows + offs_n, mask, ACC)
        if REST:
            # Loaded before the first sum, for which all warps wait.
            weight = _rms_norm_factor(weight_ptr, offs_n, None, ACC, OFFSET)
            h_rest = _rms_norm_read(h_rows + rest, rest < N, ACC)
            dy_rest = _rms_norm_read(dy_ptr + rows + rest, rest < N, ACC)
            last = _rms_norm_factor(weight_ptr, rest, N, ACC, OFFSET)
        # Each dx needs both sums, of the whole row: none can be stored before.
        squares = tl.sum(h * h, axis=1, keep_dims=True)  # (BLOCK_M, 1)
        products = tl.sum(dy * weight * h, axis=1, keep_dims=True)
        if REST:
            squares += tl.sum(h_rest * h_rest, axis=1, keep_dims=True)
            products += tl.sum(dy_rest * last * h_rest, axis=1, keep_dims=True)
        # Computed again: h is here anyway, a stored r would have to be loaded.
        r = tl.rsqrt(squares / N + EPS)
        c = products / N * r * r
        if REST:
            # A long row leaves no registers for its weight, so it is loaded
            # again, from a cache. With the policy of the first load, the
            # compiler would make one load of both.
            weight = _rms_norm_factor(
                weight_ptr, offs_n, None, ACC, OFFSET, "evict_first"
            )
            last = _rms_norm_factor(
                weight_ptr, rest, N, ACC, OFFSET, "evict_first"
            )
            dx_rest = (dy_rest * last - h_rest * c) * r
            if ADD:
                dx_rest += _rms_norm_read(dh_ptr + rows + rest, rest < N, ACC)
            tl.store(dx_ptr + rows + rest, dx_rest, mask=rest < N)
            if weight_ptr is not None:
                dw_rest += dy_rest * (h_rest * r)
        dx = (dy * weight - h * c) * r
        # An addition of its own would read and write dx once more.
        if ADD:
            dx += _rms_norm_read(dh_ptr + rows + offs_n, mask, ACC)
        tl.store(dx_ptr + rows + offs_n, dx, mask=mask)
        if weight_ptr is not None:
            dw += dy * (h * r)
    if weight_ptr is not None:
        # A row of its own for each program. Atomic additions to one row would
        # come in another order each time.
        partial_rows = partial_ptr + pid.to(tl.int64) * N
        dw = tl.sum(dw, axis=0, keep_dims=True)  # (1, BLOCK_N)
        tl.store(partial_rows + offs_n, dw, mask=offs_n < N)
        if REST:
            dw_rest = tl.sum(dw_rest, axis=0, keep_dims=True)  # (1, REST)
            tl.store(partial_rows + rest, dw_rest, mask=rest < N)


@triton.jit
def _rms_norm_sum_kernel(
    partial_ptr, dw_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    # The block has all rows of partial: one program adds up a column, in the
    # same order each time.
    offs_p = tl.arange(0, BLOCK_P)[:, None]  # (BLOCK_P, 1)
    offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    # BLOCK_P is a power of two, and there need not be as many programs.
    mask = (offs_p < P) & (offs_n < N)
    # int32 is enough: a thousand programs with the longest rows make 2**24.
    partial_ptrs = partial_ptr + offs_p * N + offs_n  # (BLOCK_P, BLOCK_N)
    dw = tl.sum(tl.load(partial_ptrs, mask=mask, other=0), 0, keep_dims=True)
    tl.store(dw_ptr + offs_n, dw, mask=offs_n < N)


def _rms_norm_check(name, weight, offset, *matrices):
    """Raise for what the ops do not take."""
    x = matrices[0]
    kinds = [t if t is None else (t.dtype, t.device) for t in matrices]
    takes = x.dtype in RMS_NORM_ACC and kinds.count(kinds[0]) == len(kinds)
    shapes = [() if t is None else tuple(t.shape) for t in matrices]
    fits = x.ndim > 0 and shapes.count(shapes[0]) == len(shapes)
    if weight is not None:
        kinds.append((weight.dtype, weight.device))
        takes &= weight.dtype in RMS_NORM_ACC and weight.device == x.device
        shapes.append(tuple(weight.shape))
        fits = fits and shapes[-1] == shapes[0][-1:]
    if not takes:
        raise TypeError(
            f"{name} takes one float dtype and device, and a weight of any "
            f"float dtype there, not {kinds}"
        )
    if not fits:
        raise ValueError(f"{name} takes shapes (..., N) and (N,), not {shapes}")
    if weight is None and offset:
        raise ValueError(
            f"{name} takes an offset of a weight, not {offset} without a weight"
        )
    most = RMS_NORM_LONGEST // max(4, x.element_size())
    if x.shape[-1] > most:
        raise ValueError(
            f"{name} takes rows of up to {most} elements of {x.dtype}, "
            f"not {x.shape[-1]}: norms_long takes rows of any length"
        )


def _rms_norm_rows(x):
    """Return a tensor as a matrix with contiguous rows, and their distance."""
    N = int(x.shape[-1])
    if x.is_contiguous():
        return x, N
    x = x.reshape(-1, N)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, int(x.stride(0))


def _rms_norm_plan(x, eps, *strides, offset=0.0, backward=False):
    """Return how to launch for the rows of x."""
    N, size = int(x.shape[-1]), max(4, x.element_size())
    BLOCK_N, REST = triton.next_power_of_2(N), 0
    # Backward the sum for dw takes registers as well.
    split = backward and BLOCK_N * size > 2 * RMS_NORM_WHOLE
    if split or (N * 4 <= BLOCK_N * 3 and BLOCK_N * size > RMS_NORM_WHOLE):
        BLOCK_N //= 2
        REST = triton.next_power_of_2(N - BLOCK_N)
    tile, num_warps = RMS_NORM_TILE, 4
    if backward and BLOCK_N * size <= RMS_NORM_HEAD:
        tile, num_warps = 2 * tile, 16
    elif (BLOCK_N + REST) * size > tile * (2 if backward else 1):
        num_warps = 8
    return {
        "EPS": eps,
        "OFFSET": offset,
        "ACC": RMS_NORM_ACC[x.dtype],
        "VEC": math.gcd(N, *strides, 16 // x.element_size()),
        "BLOCK_M": max(1, tile // (BLOCK_N * size)),
        "BLOCK_N": BLOCK_N,
        "REST": REST,
        "num_warps": num_warps,
    }


@cache
def _rms_norm_gpu(device):
    """Return the multiprocessors of a GPU, and their shared memory in bytes."""
    if device.type != "cuda":
        return 2, 2**17  # for the interpreter
    gpu = torch.cuda.get_device_properties(device)
    # On AMD's GPUs torch does not tell.
    shared = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
    return gpu.multi_processor_count, shared


def _rms_norm_plan_backward(h, eps, stride, has_dh, offset=0.0, weight_size=0):
    """Return how many programs to launch, and how."""
    plan = _rms_norm_plan(h, eps, stride, offset=offset, backward=True)
    block = plan["BLOCK_M"] * (plan["BLOCK_N"] + plan["REST"])
    processors, shared = _rms_norm_gpu(h.device)
    # As many programs as run at a time, but no more than tiles
    size = max(4, h.element_size())
    programs = processors * max(1, min(4, 40 * 1024 // (block * size)))
    M = h.numel() // h.shape[-1]
    programs = min(programs, triton.cdiv(M, plan["BLOCK_M"]))
    # Loads for further turns of the loop wait in shared memory: two turns
    # ahead, or as many as fit. Those of a weight are two, maybe of wider
    # elements.
    waiting = (2 + has_dh) * h.element_size()
    if plan["REST"]:
        waiting += 2 * max(h.element_size(), weight_size)
    ahead = min(2, shared // (waiting * block))
    return programs, plan | {"ADD": has_dh, "STAGES": 1 + ahead}


def _rms_norm_forward(
    name, x, residual, weight, eps, offset, casting_mode, kernel, in_place=False
):
    """Return the norm and, if there is a residual, the sum."""
    if casting_mode not in ("gemma", "llama"):
        raise ValueError(
            f"{name} takes casting_mode='gemma' or 'llama', "
            f"not {casting_mode!r}"
        )
    if in_place:
        y, h = x, residual
    else:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        h = y if residual is None else torch.empty_like(y)
    if y.numel() == 0:
        return y, h
    x, stride_xm = _rms_norm_rows(x)
    rows, stride_rm = x, stride_xm
    if residual is not None:
        rows, stride_rm = _rms_norm_rows(residual)
    weight = None if weight is None else weight.contiguous()
    N = int(y.shape[-1])
    M = y.numel() // N
    plan = _rms_norm_plan(y, eps, stride_xm, stride_rm, offset=offset)
    plan |= {"ADD": residual is not None, "LLAMA": casting_mode == "llama"}
    plan["IN_PLACE"] = in_place
    grid = (triton.cdiv(M, plan["BLOCK_M"]),)
    pointers, sizes = (x, rows, weight, h, y), (M, N)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[grid](*pointers, *sizes, stride_xm, stride_rm, **plan)
    return y, h


def _rms_norm_check_in_place(x, residual, weight, offset):
    name = "rms_norm_residual_"
    _rms_norm_check(name, weight, offset, x, residual)
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError(
            f"{name} takes contiguous tensors, not strides {x.stride()} and "
            f"{residual.stride()}"
        )
    if x.requires_grad or residual.requires_grad:
        raise ValueError(
            f"{name} has no backward: use rms_norm_residual, or detach what "
            "requires grad"
        )


def _rms_norm_launch(
    x,
    weight,
    eps,
    offset=0.0,
    casting_mode="gemma",
    kernel=_rms_norm_kernel,
):
    _rms_norm_check("rms_norm", weight, offset, x)
    options = weight, eps, offset, casting_mode
    return _rms_norm_forward("rms_norm", x, None, *options, kernel)[0]


def _rms_norm_residual_launch(
    x,
    residual,
    weight,
    eps,
    offset=0.0,
    casting_mode="gemma",
    kernel=_rms_norm_kernel,
):
    name, options = "rms_norm_residual", (weight, eps, offset, casting_mode)
    _rms_norm_check(name, weight, offset, x, residual)
    return _rms_norm_forward(name, x, residual, *options, kernel)


def _rms_norm_backward_launch(
    dy,
    dh,
    h,
    weight,
    eps,
    offset=0.0,
    kernel=_rms_norm_backward_kernel,
    sum_kernel=_rms_norm_sum_kernel,
):
    given = [dy, h] if dh is None else [dy, h, dh]
    _rms_norm_check("rms_norm_backward", weight, offset, *given)
    dx = torch.empty_like(h, memory_format=torch.contiguous_format)
    if weight is None:
        dw = dx.new_empty(0)
    else:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        weight = weight.contiguous()
    if dx.numel() == 0:
        return dx, dw.zero_()
    h, stride_hm = _rms_norm_rows(h)
    dy = dy.contiguous()
    N = int(dx.shape[-1])
    M = dx.numel() // N
    has_dh = dh is not None
    weight_size = 0 if weight is None else weight.element_size()
    programs, plan = _rms_norm_plan_backward(
        dx, eps, stride_hm, has_dh, offset, weight_size
    )
    wide = torch.promote_types(dx.dtype, torch.float32)
    sums = None if weight is None else dx.new_empty(programs, N, dtype=wide)
    pointers = dy, dh.contiguous() if has_dh else dy, h, weight, dx, sums
    with torch.accelerator.device_index(dx.device.index):
        kernel[(programs,)](*pointers, M, N, stride_hm, **plan)
        if weight is not None:
            BLOCK_P = triton.next_power_of_2(programs)
            # Elements here, not bytes: each program has one row of sums to add.
            BLOCK_N = RMS_NORM_TILE // BLOCK_P
            sum_kernel[(triton.cdiv(N, BLOCK_N),)](
                sums, dw, programs, N, BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N
            )
    return dx, dw


@triton_op(f"{RMS_NORM_NAMESPACE}::rms_norm", mutates_args={})
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> torch.Tensor:
    """Return x over the root mean square of its rows, times offset + weight.

    As ``torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)``, if
    ``offset`` is 0; Gemma's is 1. Takes ``x`` of shape (..., N) and any
    strides, and ``weight`` of shape (N,) or None, which multiplies by nothing
    (then there is no ``offset``), with N up to 16384, or 8192 in float64;
    longer rows are for ``norms_long``. Each is float16, bfloat16, float32 or
    float64, and they may differ. The kernel is compiled for each ``eps`` and
    ``offset``. The result has the shape and dtype of ``x``, is contiguous, and
    is deterministic, and so are the gradients, each in the dtype of its
    argument. Second derivatives are not supported. Raises TypeError for other
    dtypes or devices that differ, and ValueError for other shapes or options.
    From https://arxiv.org/abs/1910.07467.

    Rounding: sums and products are in float32, or float64 if ``x`` is, the
    weight included. Each result and each gradient is rounded once; the weight's
    gradient is rounded after it is summed over the rows. This is
    ``casting_mode="gemma"``, as in GemmaRMSNorm of transformers. With "llama",
    as in its LlamaRMSNorm, the normalised ``x`` is rounded to its dtype before
    it is multiplied by ``offset + weight``; the gradients are the same. Both
    are names of LigerRMSNorm; its "none", which computes in the dtype of ``x``,
    differs from them by roundings alone.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    kernel = wrap_triton(_rms_norm_kernel)
    return _rms_norm_launch(x, weight, eps, offset, casting_mode, kernel)


@triton_op(f"{RMS_NORM_NAMESPACE}::rms_norm_residual", mutates_args={})
def rms_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of h = x + residual, and h.

    ``residual`` has the shape and dtype of ``x``, and so have both results. All
    else is as in ``rms_norm``.

    Rounding: h is rounded to its dtype, and the norm is that of the rounded h.

    Under ``torch.autocast`` it casts float16 and bfloat16 to float32.
    """
    kernel = wrap_triton(_rms_norm_kernel)
    options = weight, eps, offset, casting_mode
    return _rms_norm_residual_launch(x, residual, *options, kernel)


@custom_op(
    f"{RMS_NORM_NAMESPACE}::rms_norm_residual_", mutates_args={"x", "residual"}
)
def rms_norm_residual_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> None:
    """Write x + residual over the residual, and its norm over x.

    As vLLM's ``fused_add_rms_norm``. Takes what ``rms_norm_residual`` takes, if
    ``x`` and ``residual`` are contiguous. They must not overlap: nothing checks
    that. Raises ValueError for other layouts and for what requires a gradient.
    Under ``torch.autocast`` it computes in the dtypes that it is given.
    """
    _rms_norm_check_in_place(x, residual, weight, offset)
    tensors = x, residual, weight
    options = eps, offset, casting_mode, _rms_norm_kernel, True
    _rms_norm_forward("rms_norm_residual_", *tensors, *options)


@rms_norm_residual_.register_fake
def _rms_norm_fake_in_place(
    x, residual, weight, eps, offset=0.0, casting_mode="gemma"
):
    _rms_norm_check_in_place(x, residual, weight, offset)


@triton_op(f"{RMS_NORM_NAMESPACE}::rms_norm_backward", mutates_args={})
def rms_norm_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of h and of weight, for the norm of h.

    Takes the gradients of both results, ``dh`` or None for that of ``h``, in
    the shape and dtype of ``h``, and raises as ``rms_norm`` does. The gradient
    of a weight of None has no elements.
    """
    kernels = (
        wrap_triton(_rms_norm_backward_kernel),
        wrap_triton(_rms_norm_sum_kernel),
    )
    return _rms_norm_backward_launch(dy, dh, h, weight, eps, offset, *kernels)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
RMS_NORM_LIBRARY = Library(RMS_NORM_NAMESPACE, "FRAGMENT")
RMS_NORM_LIBRARY.impl("rms_norm", _rms_norm_launch, "CUDA")
RMS_NORM_LIBRARY.impl("rms_norm_residual", _rms_norm_residual_launch, "CUDA")
RMS_NORM_LIBRARY.impl("rms_norm_backward", _rms_norm_backward_launch, "CUDA")

# Under torch.autocast they compute in float32, as PyTorch's layer_norm does.
rms_norm.register_autocast("cpu", torch.float32)
rms_norm.register_autocast("cuda", torch.float32)
rms_norm_residual.register_autocast("cpu", torch.float32)
rms_norm_residual.register_autocast("cuda", torch.float32)


def _rms_norm_setup(ctx, inputs, output):
    x, weight, *ctx.options, _ = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_gradient(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, dw = rms_norm_backward(dy, None, x, weight, *ctx.options)
    return dx, None if weight is None else dw, None, None, None


def _rms_norm_residual_setup(ctx, inputs, output):
    _, _, weight, *ctx.options, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)  # None for a result that nobody used


def _rms_norm_residual_gradient(ctx, dy, dh):
    h, weight = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy
    dx, dw = rms_norm_backward(dy, dh, h, weight, *ctx.options)
    return dx, dx, None if weight is None else dw, None, None, None


rms_norm.register_autograd(_rms_norm_gradient, setup_context=_rms_norm_setup)
rms_norm_residual.register_autograd(
    _rms_norm_residual_gradient, setup_context=_rms_norm_residual_setup
)
