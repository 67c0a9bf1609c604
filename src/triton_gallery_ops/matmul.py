"""Matrix product (matmul) of any size, layout and float dtype.

Computes a @ b for (M, K) and (K, N), with any strides; flatten batches first.
A model of the time chooses the way and the tile, without tuning. On Hopper and
newer GPUs there are two ways: the copy engine, as in ``persistent_matmul``,
where a matrix whose rows begin at no multiples of 16 bytes is copied first, or
pointers. Other GPUs, float32 in full precision and float64 take pointers. If
the last tiles leave multiprocessors idle, their sums are split. Float32 is
multiplied in full precision unless ``input_precision`` says otherwise; sums are
in float32, or float64 for float64. Deterministic on a given GPU model, with
gradients of any order.
"""

import math
from functools import cache, lru_cache, partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op

from triton_gallery_ops.persistent_matmul import (
    PERSISTENT_MATMUL_STAGES,
    PERSISTENT_MATMUL_TILES,
    _persistent_matmul_add,
    _persistent_matmul_gpu,
    _persistent_matmul_place,
    _persistent_matmul_plan,
    _persistent_matmul_run,
    _persistent_matmul_stages,
    _persistent_matmul_turned,
)

MATMUL_NAMESPACE = "triton_gallery"
MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# Through pointers: BLOCK_M, BLOCK_N, BLOCK_K, warps and stages, by the bytes of
# an element
MATMUL_TILES = {
    2: [
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 3),
        (64, 64, 64, 4, 3),
        (64, 32, 128, 4, 4),
        (16, 128, 128, 4, 3),
    ],
    4: [(128, 128, 16, 8, 3), (64, 64, 32, 4, 3), (32, 32, 32, 4, 3)],
    8: [(64, 64, 16, 4, 3), (32, 32, 16, 4, 3)],
}
MATMUL_NARROW = [  # where 2 bytes are a load
    (64, 64, 128, 8, 3),
    (64, 64, 64, 4, 5),
    (64, 32, 128, 8, 4),
    (32, 64, 128, 4, 3),
]
MATMUL_PARTS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48
MATMUL_RESIDENT = 4  # programs of pointers that a multiprocessor runs at once
# What a plan of half precision counts, in microseconds of an H200. Fitted to
# 744 timed plans of 48 products, drawn by other seeds than its benchmark's.
MATMUL_COSTS = {
    # begin, a product, an edge's element, a step, a tile, an element of it
    "engine": (7.2, 2.2e-7, 8.4e-6, 0.07, 0.43, 4.1e-5),
    "pointers": (6.0, 0.0, 2.8e-5, 0.0, 0.0, 8.9e-5),
}
# What pointers take more, divided by the elements of a load or a store
MATMUL_LOAD = 8.8e-5  # an edge's element
MATMUL_STEP = 0.82  # a step takes as long at least
MATMUL_STORE = 5.9e-5  # a tile's element
MATMUL_MEMORY = 3e6  # bytes
MATMUL_ADD = 5.2  # the launch that adds the parts
MATMUL_PART = 1.2e-6  # to write and to add an element of a part
MATMUL_COPY = 3.4, 4.9e6  # to begin a copy, and its bytes
MATMUL_TF32 = 2**27  # products from which TF32 goes through the engine


@triton.jit(do_not_specialize=["whole", "tail", "steps"])
def _matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    part_ptr,  # None where no sum is split
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    whole,  # tiles that one program sums
    tail,  # tiles after these
    steps,  # of a part of these
    LEAST: tl.constexpr,  # 1 where b is transposed, else 0
    VEC_AM: tl.constexpr,  # divides M and stride_ak, if columns are contiguous
    VEC_AK: tl.constexpr,  # divides K and stride_am, if rows are contiguous
    VEC_BK: tl.constexpr,
    VEC_BN: tl.constexpr,
    VEC_CN: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Of an integer, the compiler knows only whether 16 divides it. Of a row of
    # 5000 numbers, it learns here that 8 does: one load takes 16 bytes.
    stride_am = stride_am // VEC_AK * VEC_AK
    stride_ak = stride_ak // VEC_AM * VEC_AM
    stride_bk = stride_bk // VEC_BN * VEC_BN
    stride_bn = stride_bn // VEC_BK * VEC_BK
    # In int32, an offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    tile, off_k, length = pid, 0, K
    if part_ptr is not None:
        # The last tiles are for several programs, with a part of K for each.
        item = pid - whole
        is_part = item >= 0
        tile = tl.where(is_part, whole + item % tail, pid)
        off_k = tl.where(is_part, item // tail * steps * BLOCK_K, 0)
        left = tl.minimum(steps * BLOCK_K, K - off_k)
        length = tl.where(is_part, left, K).to(tl.int32)
    pid_m, pid_n = _persistent_matmul_place(
        tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    )
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    # In a transposed operand, k times its stride may be past 2**31 as well.
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)  # (BLOCK_K,)
    step = tl.cast(BLOCK_K, tl.int64)
    a_ptrs = a_ptr + offs_m * stride_am + (off_k + offs_k)[None, :] * stride_ak
    b_ptrs = b_ptr + (off_k + offs_k)[:, None] * stride_bk + offs_n * stride_bn
    # A mask that ends elsewhere would divide a load of 16 bytes.
    a_rows = offs_m < M // VEC_AM * VEC_AM
    b_columns = offs_n < N // VEC_BN * VEC_BN
    a_end = K // VEC_AK * VEC_AK - off_k
    b_end = K // VEC_BK * VEC_BK - off_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # If the loop might not run, ptxas would have each multiplication wait for
    # the one before, where b is transposed: tuned_matmul.py shows it.
    for start in range(0, tl.maximum(length, LEAST), BLOCK_K):
        # Zeros past the end of K add nothing. Both need them: NaN * 0 is NaN.
        a_mask = a_rows & (offs_k[None, :] < a_end - start)
        b_mask = (offs_k[:, None] < b_end - start) & b_columns
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)  # (BLOCK_M, BLOCK_K)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)  # (BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        # Stepping the pointers is cheaper than computing them from k again.
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    if part_ptr is not None:
        # A part has no edges: what is past them, no one adds.
        columns = tl.arange(0, BLOCK_N)[None, :]
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + columns
        part_ptrs = part_ptr + item * BLOCK_M * BLOCK_N + offs
        tl.store(part_ptrs, acc, mask=is_part & (offs >= 0))
        M = tl.where(is_part, 0, M)
    N = N // VEC_CN * VEC_CN
    c_mask = (offs_m < M) & (offs_n < N)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


def _matmul_block(size, most):
    """Return the block for a dimension; an instruction has 16 rows anyway."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _matmul_check(a, b, input_precision):
    if a.dtype not in MATMUL_ACC:
        raise TypeError(f"matmul takes float matrices, not {a.dtype}")
    if b.dtype != a.dtype or b.device != a.device:
        raise TypeError(
            "matmul takes matrices of one dtype on one device, not "
            f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "matmul takes matrices of (M, K) and (K, N), not "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if input_precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(
            "matmul takes ieee, tf32 or tf32x3 as input_precision, not "
            f"{input_precision}"
        )


@cache
def _matmul_gpu(device):
    """Return whether a GPU has a copy engine, and its multiprocessors."""
    if device.type != "cuda":  # interpreted: few programs, some sums split
        return device.type == "cpu", 4
    gpu = torch.cuda.get_device_properties(device)
    has_engine = gpu.major >= 9 and not torch.version.hip
    return has_engine, gpu.multi_processor_count


def _matmul_time(M, N, K, tile, parts, way, vecs, processors):
    """Return the time with a tile and parts, and how the work is divided.

    That is how many tiles are whole, how many come after these, in how many
    parts each of the latter is summed, and the steps of a part. Returns None
    if the work has no such parts. ``vecs`` are the elements of a load of a and
    of b.
    """
    m, n, k = tile[:3]
    begin, multiply, edge, step, each, element = MATMUL_COSTS[way]
    by_engine = way == "engine"
    resident = 1 if by_engine else MATMUL_RESIDENT
    tiles, steps = triton.cdiv(M, m) * triton.cdiv(N, n), triton.cdiv(K, k)
    of_part = triton.cdiv(steps, parts)
    tail = tiles % (resident * processors) if parts > 1 else 0
    if parts > 1 and (
        not 0 < tail * parts <= resident * processors
        or triton.cdiv(steps, of_part) != parts
    ):
        return None
    edges, least, vec_c = edge * (m + n), 0.0, math.gcd(N, 8)
    if not by_engine:
        edges += MATMUL_LOAD * (m / vecs[0] + n / vecs[1])
        least = MATMUL_STEP / min(vecs)
    if not by_engine or vec_c < 8:
        element += MATMUL_STORE / vec_c
    busy = k * (multiply * m * n + edges) + step
    together = max(1, min(resident, 2**15 // (m * n)))

    def run(programs, steps, store):
        # Programs of one multiprocessor wait for memory at the same time.
        own = triton.cdiv(programs, processors)
        rounds, rest = divmod(own, together)
        last = max(least, rest * busy) if rest else 0
        time = steps * (rounds * max(least, together * busy) + last)
        return time + own * store

    time = run(tiles - tail, steps, each + m * n * element)
    time += run(tail * parts, of_part, each)
    # The longer of computing and of memory counts most.
    memory = 2 * (M * K + K * N + M * N) / MATMUL_MEMORY
    time = begin + math.hypot(time, memory)
    if parts == 1:
        return time, (tiles, 0, 1, 0)
    time += MATMUL_ADD + MATMUL_PART * tail * parts * m * n
    return time, (tiles - tail, tail, parts, of_part)


@lru_cache(4096)
def _matmul_plan(
    M, N, K, vecs, tiles, copied, engine_tiles, processors, shared
):
    """Return whether the engine is faster than pointers, and the plan.

    ``copied`` is how long the copies take that the engine needs.
    """
    stages = {t: _persistent_matmul_stages(t, 2, shared) for t in engine_tiles}
    taken = [t for t in engine_tiles if stages[t] >= PERSISTENT_MATMUL_STAGES]
    choices = []
    for way, some, more in (
        ("pointers", tiles, 0.0),
        ("engine", taken, copied),
    ):
        for tile, parts in product(some, MATMUL_PARTS):
            found = _matmul_time(M, N, K, tile, parts, way, vecs, processors)
            if found:
                choices.append((more + found[0], way, tile, found[1]))
    _, way, tile, divided = min(choices)
    by_engine = way == "engine"
    return by_engine, (tile, stages[tile] if by_engine else tile[4], *divided)


def _matmul_vec(x):
    """Return how many adjacent elements one load takes, down and across.

    They divide the length of what is contiguous, and the other stride.
    """
    unit = 16 // x.element_size()
    (rows, columns), (by_row, by_column) = x.shape, x.stride()
    if by_column == 1:
        return 1, math.gcd(columns, by_row, unit)
    return (math.gcd(rows, by_column, unit), 1) if by_row == 1 else (1, 1)


def _matmul_copied(x):
    """Return how long the engine's copy of x takes, 0 if it needs none."""
    if _persistent_matmul_turned(x, x.data_ptr()) is not None:
        return 0.0
    begin, rate = MATMUL_COPY
    return begin + 4 * x.numel() / rate


def _matmul_choose(a, b, input_precision):
    """Return whether a product goes through the copy engine, and the plan.

    The plan is None if the engine makes its own.
    """
    (M, K), (N, size) = a.shape, (b.shape[1], a.element_size())
    has_engine, processors = _matmul_gpu(a.device)
    is_tf32 = a.dtype == torch.float32 and input_precision != "ieee"
    if has_engine and is_tf32 and M * N * K > MATMUL_TF32:
        return True, None
    vecs = max(_matmul_vec(a)), max(_matmul_vec(b))
    narrow = size == 2 and min(vecs) == 1
    # No edge is longer than the product's, as far as an instruction allows.
    tiles = tuple(
        (_matmul_block(M, m), _matmul_block(N, n), *more)
        for m, n, *more in (MATMUL_NARROW if narrow else MATMUL_TILES[size])
    )
    if size != 2:
        return False, _persistent_matmul_plan(
            M, N, K, tiles, size, processors, 2**20
        )
    copied, engine_tiles, shared = 0.0, (), 0
    if has_engine:
        copied = _matmul_copied(a) + _matmul_copied(b)
        engine_tiles = (*PERSISTENT_MATMUL_TILES,)
        shared = _persistent_matmul_gpu(a.device)[1]
    return _matmul_plan(
        *(M, N, K, vecs, tiles, copied, engine_tiles, processors, shared)
    )


def _matmul_by_pointers(a, b, c, input_precision, plan):
    (M, K), (N, size) = a.shape, (b.shape[1], a.element_size())
    (VEC_AM, VEC_AK), (VEC_BK, VEC_BN) = _matmul_vec(a), _matmul_vec(b)
    (m, n, k, num_warps, num_stages), _, whole, tail, parts, steps = plan
    if triton.knobs.runtime.interpret and a.dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        a, b = a.float(), b.float()
    ACC = MATMUL_ACC[a.dtype]
    part = None
    if tail > 0:
        wide = torch.float64 if size == 8 else torch.float32
        part = a.new_empty(parts * tail * m * n, dtype=wide)
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        sizes = M, N, K, *a.stride(), *b.stride(), whole, tail, steps
        _matmul_kernel[(whole + tail * parts,)](
            *(a, b, c, part, *sizes),
            LEAST=int(b.stride(0) == 1),
            VEC_AM=VEC_AM,
            VEC_AK=VEC_AK,
            VEC_BK=VEC_BK,
            VEC_BN=VEC_BN,
            VEC_CN=math.gcd(N, 16 // size),
            ACC=ACC,
            PRECISION=input_precision,
            BLOCK_M=m,
            BLOCK_N=n,
            BLOCK_K=k,
            num_warps=num_warps,
            # AMD's shared memory has room for two.
            num_stages=2 if torch.version.hip else num_stages,
        )
        if tail > 0:
            _persistent_matmul_add(part, c, plan)


def _matmul_launch(a, b, input_precision="ieee"):
    _matmul_check(a, b, input_precision)
    c = a.new_empty(a.shape[0], b.shape[1])
    if c.numel() * a.shape[1] == 0:
        return c.zero_()
    by_engine, plan = _matmul_choose(a, b, input_precision)
    run = _persistent_matmul_run if by_engine else _matmul_by_pointers
    run(a, b, c, input_precision, plan)
    return c


@custom_op(f"{MATMUL_NAMESPACE}::matmul", mutates_args=())
def matmul(
    a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee"
) -> torch.Tensor:
    """Return the matrix product of a (M, K) and b (K, N), of shape (M, N).

    Takes two matrices of float16, bfloat16, float32 or float64, both of one
    dtype, with any strides. Of a batch, flatten the leading dimensions of ``a``
    first. Sums are kept in float32, or float64 for float64. The result has
    their dtype and is contiguous. It is deterministic on one kind of GPU.
    ``input_precision`` is for float32, the other dtypes ignore it: "ieee"
    multiplies all 24 bits, "tf32" gives 11 of them to the tensor cores, and
    "tf32x3" makes up for that with three products. Raises TypeError for other
    dtypes or two that differ, and ValueError for other shapes. Has a gradient,
    in the same precision, and that has one.

    Rounding: products are summed in float32, or float64 for float64, and each
    result is rounded once.

    Under ``torch.autocast`` it casts a and b to autocast's dtype.
    """
    return _matmul_launch(a, b, input_precision)


@matmul.register_fake
def _matmul_fake(a, b, input_precision="ieee"):
    _matmul_check(a, b, input_precision)
    return a.new_empty(a.shape[0], b.shape[1])


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
MATMUL_LIBRARY = Library(MATMUL_NAMESPACE, "FRAGMENT")
MATMUL_LIBRARY.impl("matmul", _matmul_launch, "CUDA")


def _matmul_autocast(kind, a, b, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    a, b = (t.to(dtype) if t.dtype in casts else t for t in (a, b))
    with torch.autocast(kind, enabled=False):
        return matmul(a, b, *options)


MATMUL_LIBRARY.impl("matmul", partial(_matmul_autocast, "cpu"), "AutocastCPU")
MATMUL_LIBRARY.impl("matmul", partial(_matmul_autocast, "cuda"), "AutocastCUDA")


def _matmul_setup(ctx, inputs, output):
    a, b, ctx.input_precision = inputs
    ctx.save_for_backward(a, b)


def _matmul_gradient(ctx, grad):
    a, b = ctx.saved_tensors
    precision = ctx.input_precision
    by_a, by_b = ctx.needs_input_grad[:2]
    grad_a = matmul(grad, b.T, precision) if by_a else None
    grad_b = matmul(a.T, grad, precision) if by_b else None
    return grad_a, grad_b, None


matmul.register_autograd(_matmul_gradient, setup_context=_matmul_setup)
