"""Matrix product (matmul) of up to 64 rows with a large weight, for decoding.

Computes x @ weight.T, like ``torch.nn.functional.linear`` without a bias. The
read of the weights bounds the time, so programs keep many loads in flight, and
if there are few tiles, the sum over K is split into up to 8 parts. A second
kernel adds them in a fixed order: deterministic on a given GPU model. The split
does not depend on the number of rows, so a row is summed in the same parts in
any batch. Weights that are not aligned to 16 bytes have fewer loads in flight.
Float32 has full precision, without tensor cores. No backward. For more rows,
use ``persistent_matmul`` or ``tuned_matmul``.
"""

import math
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

SKINNY_MATMUL_NAMESPACE = "triton_gallery"
SKINNY_MATMUL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
SKINNY_MATMUL_ROWS = 64  # at most, in all
SKINNY_MATMUL_SPLITS = 8  # parts of a sum, at most
SKINNY_MATMUL_STAGES = 5  # at most; fewer where shared memory holds fewer


@triton.jit
def _skinny_matmul_part(
    x_ptr,
    w_ptr,
    M,
    N,
    K,
    steps,
    stride_xm,
    stride_wn,
    stride_wk,
    DOT: tl.constexpr,  # the type in which tl.dot gets its tiles
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32 offsets into the weights would overflow past element 2**31.
    pid_n = tl.program_id(axis=0).to(tl.int64)
    pid_k = tl.program_id(axis=1).to(tl.int64)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = tl.arange(0, BLOCK_M)[None, :].to(tl.int64)  # (1, BLOCK_M)
    # The loop goes over this program's part of K.
    offs_k = pid_k * steps * BLOCK_K + tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask_n = offs_n < N
    mask_m = offs_m < M
    w_ptrs = w_ptr + offs_n * stride_wn + offs_k[None, :] * stride_wk
    x_ptrs = x_ptr + offs_m * stride_xm + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in range(steps):
        # The last part may reach beyond K: zeros there add nothing.
        mask_k = offs_k < K
        w = tl.load(w_ptrs, mask=mask_n & mask_k[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=mask_m & mask_k[:, None], other=0.0)
        acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision="ieee")
        offs_k += BLOCK_K
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * tl.cast(stride_wk, tl.int64)
    # The part, (BLOCK_N, BLOCK_M), and where it is in (M, N)
    return acc, offs_m * N + offs_n, mask_n & mask_m


@triton.jit
def _skinny_matmul_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    steps,
    stride_xm,
    stride_wn,
    stride_wk,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    sizes = M, N, K, steps, stride_xm, stride_wn, stride_wk
    acc, offs, mask = _skinny_matmul_part(
        x_ptr, w_ptr, *sizes, DOT, BLOCK_M, BLOCK_N, BLOCK_K
    )
    # With one part this is the result, in its dtype; else a part, in float32.
    y_ptrs = y_ptr + tl.program_id(axis=1).to(tl.int64) * M * N + offs
    tl.store(y_ptrs, acc, mask=mask)


@triton.jit
def _skinny_matmul_add_kernel(
    part_ptr, y_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    # Only a product of few tiles is split, so int32 holds these offsets.
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # The order is fixed, so the sum is deterministic.
    for split in tl.static_range(SPLITS):
        part_ptrs = part_ptr + split * size + offs
        total += tl.load(part_ptrs, mask=mask, other=0.0)
    tl.store(y_ptr + offs, total, mask=mask)


@cache
def _skinny_matmul_gpu(device):
    """Return a GPU's multiprocessors, and a program's shared memory."""
    if device.type != "cuda":  # the interpreter: some sums split
        return 8, 64 * 1024
    gpu = torch.cuda.get_device_properties(device)
    shared = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
    return gpu.multi_processor_count, shared


def _skinny_matmul_plan(M, weight):
    """Return splits, steps and blocks. The first two do not depend on M."""
    N, K = map(int, weight.shape)
    size = weight.element_size()
    processors, shared = _skinny_matmul_gpu(weight.device)
    apart = [s * size % 16 for s in weight.stride() if s != 1]
    # Other weights go through registers, which have less room.
    wide = 1 in weight.stride() and not any(apart)
    BLOCK_M = 16 if M <= 16 else 32 if M <= 32 else 64
    BLOCK_N, BLOCK_K = 64, (256 if wide else 128) // size
    # With fewer tiles than multiprocessors, split: up to one program for each.
    blocks, tiles = triton.cdiv(K, BLOCK_K), triton.cdiv(N, BLOCK_N)
    splits = min(SKINNY_MATMUL_SPLITS, blocks, processors // tiles)
    steps = triton.cdiv(blocks, max(1, splits))
    fit = shared // ((BLOCK_M + BLOCK_N) * BLOCK_K * size)
    # The interpreter's tl.dot takes the bits of bfloat16 for integers.
    widen = triton.knobs.runtime.interpret and weight.dtype == torch.bfloat16
    return (
        max(1, triton.cdiv(blocks, max(1, steps))),
        steps,
        {
            "DOT": tl.float32 if widen else SKINNY_MATMUL_DTYPES[weight.dtype],
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": BLOCK_K,
            "num_stages": min(SKINNY_MATMUL_STAGES, fit) if wide else 2,
        },
    )


def _skinny_matmul_check(x, weight):
    """Raise for what the op does not take."""
    if weight.dtype not in SKINNY_MATMUL_DTYPES or x.dtype != weight.dtype:
        raise TypeError(
            "skinny_matmul takes two tensors of float16, bfloat16 or float32, "
            f"not {x.dtype} and {weight.dtype}"
        )
    fits = weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[1]
    if not fits or x.device != weight.device:
        raise ValueError(
            "skinny_matmul takes (..., K) and (N, K) on one device, not "
            f"{tuple(x.shape)} and {tuple(weight.shape)} on {x.device} and "
            f"{weight.device}"
        )
    rows = math.prod(x.shape[:-1])
    if rows > SKINNY_MATMUL_ROWS:
        raise ValueError(
            f"skinny_matmul takes up to {SKINNY_MATMUL_ROWS} rows, not {rows}: "
            "linear of torch.nn.functional takes any number"
        )


def _skinny_matmul_run(x, weight, y, plan, kernel, add):
    """Launch for a matrix x as a plan says."""
    splits, steps, tile = plan
    (M, K), N = x.shape, weight.shape[0]
    part = y
    if splits > 1:
        part = x.new_empty((splits, M, N), dtype=torch.float32)
    grid = (triton.cdiv(N, tile["BLOCK_N"]), splits)
    sizes = (M, N, K, steps, x.stride(0), *weight.stride())
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[grid](x, weight, part, *sizes, **tile)
        if splits > 1:
            grid = (triton.cdiv(M * N, 256),)
            add[grid](part, y, M * N, SPLITS=splits, BLOCK=256)
    return y


def _skinny_matmul_launch(
    x, weight, kernel=_skinny_matmul_kernel, add=_skinny_matmul_add_kernel
):
    _skinny_matmul_check(x, weight)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if y.numel() > 0:
        x = x.unsqueeze(0).flatten(0, -2)  # (M, K)
        x = x if x.stride(1) == 1 else x.contiguous()
        plan = _skinny_matmul_plan(x.shape[0], weight)
        _skinny_matmul_run(x, weight, y, plan, kernel, add)
    return y


@triton_op(f"{SKINNY_MATMUL_NAMESPACE}::skinny_matmul", mutates_args={})
def skinny_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T for few rows: torch.nn.functional.linear, no bias.

    Takes ``x`` (..., K) with at most 64 rows in all, and ``weight`` (N, K), of
    one dtype, float16, bfloat16 or float32, on one device, in any layout. An
    ``x`` that is not contiguous along K, or whose rows no single stride
    reaches, is copied; ``weight`` never is. The result (..., N) has their dtype
    and is contiguous. Sums are in float32, and float32 is not rounded to TF32.
    The result is deterministic. The parts in which a row is summed
    do not depend on the number of rows. Raises TypeError for other dtypes or
    two dtypes, and ValueError for more rows, for shapes that do not fit and for
    two devices. Has no gradient: inputs may require one, and then a backward
    through the op raises RuntimeError.

    Rounding: products are summed in float32, the parts of a split sum too, and
    each result is rounded once.

    Under ``torch.autocast`` it casts x and weight to autocast's dtype.
    """
    kernel = wrap_triton(_skinny_matmul_kernel)
    add = wrap_triton(_skinny_matmul_add_kernel)
    return _skinny_matmul_launch(x, weight, kernel, add)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
SKINNY_MATMUL_LIBRARY = Library(SKINNY_MATMUL_NAMESPACE, "FRAGMENT")
SKINNY_MATMUL_LIBRARY.impl("skinny_matmul", _skinny_matmul_launch, "CUDA")


def _skinny_matmul_autocast(kind, x, weight, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    x, weight = (t.to(dtype) if t.dtype in casts else t for t in (x, weight))
    with torch.autocast(kind, enabled=False):
        return skinny_matmul(x, weight, *options)


SKINNY_MATMUL_LIBRARY.impl(
    "skinny_matmul", partial(_skinny_matmul_autocast, "cpu"), "AutocastCPU"
)
SKINNY_MATMUL_LIBRARY.impl(
    "skinny_matmul", partial(_skinny_matmul_autocast, "cuda"), "AutocastCUDA"
)
