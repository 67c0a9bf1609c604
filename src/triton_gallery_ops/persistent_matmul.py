"""Persistent matrix product (matmul) through TMA, for Hopper and newer GPUs.

Computes a @ b on NVIDIA GPUs of compute capability 9.0 or more. There is one
program per multiprocessor, and it loads its next tile through the copy engine
before it stores the last. The engine takes contiguous rows or columns that
begin at multiples of 16 bytes; a matrix without them is copied in each call.
The result's rows are padded to such multiples, so it may not be contiguous;
``matmul`` has one that is, and takes any GPU. The tile follows from a formula,
without tuning, and so do the parts in which the last tiles are summed where
they would leave multiprocessors idle: deterministic on a given GPU model.
Float32 has full precision unless ``input_precision`` says otherwise. Gradients
of any order.
"""

import math
import threading
from functools import cache, lru_cache, partial

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
from triton.tools.tensor_descriptor import TensorDescriptor

PERSISTENT_MATMUL_NAMESPACE = "triton_gallery"
PERSISTENT_MATMUL_THREAD = threading.local()
PERSISTENT_MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# BLOCK_M, BLOCK_N, BLOCK_K, warps and the most stages, of half precision, of
# wider dtypes, and of float32 as TF32
PERSISTENT_MATMUL_TILES = [
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 4),
    (128, 128, 64, 4, 6),
    (64, 256, 64, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (64, 128, 64, 4, 8),
]
PERSISTENT_MATMUL_WIDE = [(64, 64, 16, 8, 4)]
PERSISTENT_MATMUL_TF32 = [
    (128, 128, 32, 8, 4),
    (64, 128, 32, 4, 4),
    (64, 64, 32, 4, 4),
]
PERSISTENT_MATMUL_STAGES = 3  # the fewest
# What a plan counts, in the time that a multiprocessor takes for one product
PERSISTENT_MATMUL_EDGE = 80  # to load an element of an edge, a row or a column
PERSISTENT_MATMUL_BYTE = 2  # a byte of a or b from memory, for the whole GPU
PERSISTENT_MATMUL_PART = 10  # to write and to add an element of a part, as well
PERSISTENT_MATMUL_ADD = 10**7  # the launch that adds the parts
PERSISTENT_MATMUL_PARTS = (2, 3, 4, 6, 8, 12, 16)
# A matrix that is multiplied by as many rows is copied if its own begin at odd
# multiples of 16 bytes: memory is read 32 bytes at a time.
PERSISTENT_MATMUL_MANY = 4096
PERSISTENT_MATMUL_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _persistent_matmul_place(tile, tiles_m, tiles_n):
    """Return the row and the column of a tile: column by column, in groups."""
    # Eight rows of tiles together: what is read again is still in L2.
    first = tile // (8 * tiles_n) * 8
    rows = tl.minimum(tiles_m - first, 8)
    within = tile % (8 * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def _persistent_matmul_halves(tile):
    """Return the left and the right half of a tile's columns."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    # tl.split takes apart the last dimension.
    return tl.split(tl.reshape(tile, (rows, 2, half)).permute(0, 2, 1))


@triton.jit
def _persistent_matmul_load(
    desc, row, column, T: tl.constexpr, ACC: tl.constexpr
):
    """Load a tile, of the transpose if T."""
    x = desc.load([column, row]).T if T else desc.load([row, column])
    # Triton's interpreter multiplies bfloat16 wrongly.
    return x.to(ACC) if PERSISTENT_MATMUL_INTERPRETED else x


@triton.jit
def _persistent_matmul_sum(
    a_desc,
    b_desc,
    off_m,
    off_n,
    off_k,
    length,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the left and the right columns of a tile, over a part of K."""
    BLOCK_M: tl.constexpr = a_desc.block_shape[1 if A_T else 0]
    BLOCK_K: tl.constexpr = a_desc.block_shape[0 if A_T else 1]
    BLOCK_N: tl.constexpr = b_desc.block_shape[0 if B_T else 1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(off_k, off_k + length, BLOCK_K):
        # The engine fills with zeros past K, so those add nothing.
        a = _persistent_matmul_load(a_desc, off_m, k, A_T, ACC)
        b = _persistent_matmul_load(b_desc, k, off_n, B_T, ACC)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
    # In halves, the store needs half as much shared memory, and the loads have
    # a stage more.
    return _persistent_matmul_halves(acc)


@triton.jit
def _persistent_matmul_columns(
    c_ptr, tile, off_m, off_n, M, stride_cm, VEC: tl.constexpr
):
    """Store columns of a tile through pointers."""
    # The compiler learns only here that rows begin at a multiple.
    stride_cm = stride_cm // VEC * VEC
    offs_m = (off_m + tl.arange(0, tile.shape[0]))[:, None]
    offs_n = (off_n + tl.arange(0, tile.shape[1]))[None, :]
    c_ptrs = c_ptr + offs_m.to(tl.int64) * stride_cm + offs_n
    # The padding of a row is stored as well.
    tl.store(c_ptrs, tile, mask=(offs_m < M) & (offs_n < stride_cm))


@triton.jit
def _persistent_matmul_store(
    c, tile, off_m, off_n, M, stride_cm, VEC: tl.constexpr
):
    """Store a half of a tile: by the engine if VEC is 0, else by pointers."""
    if VEC == 0:
        c.store([off_m, off_n], tile.to(c.dtype))
    else:
        # At once, pointers of rows of any length would spill registers.
        left, right = _persistent_matmul_halves(tile)
        more_n = off_n + tile.shape[1] // 2
        _persistent_matmul_columns(c, left, off_m, off_n, M, stride_cm, VEC)
        _persistent_matmul_columns(c, right, off_m, more_n, M, stride_cm, VEC)


@triton.jit(do_not_specialize=["stride_cm", "whole", "tail", "items", "steps"])
def _persistent_matmul_kernel(
    a_desc,
    b_desc,
    c,  # a descriptor or a pointer
    part_ptr,  # None where no sum is split
    stride_cm,
    whole,  # tiles that one program sums
    tail,  # tiles after these
    items,  # parts of the tail
    steps,  # of a part
    A_T: tl.constexpr,  # a_desc is of a's transpose
    B_T: tl.constexpr,
    VEC: tl.constexpr,  # of c: elements that a store takes, 0 by the engine
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,  # "ieee", "tf32" or "tf32x3"
):
    M, K = a_desc.shape[1 if A_T else 0], a_desc.shape[0 if A_T else 1]
    BLOCK_M: tl.constexpr = a_desc.block_shape[1 if A_T else 0]
    BLOCK_K: tl.constexpr = a_desc.block_shape[0 if A_T else 1]
    BLOCK_N: tl.constexpr = b_desc.block_shape[0 if B_T else 1]
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(b_desc.shape[0 if B_T else 1], BLOCK_N)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, whole, programs, flatten=True):
        pid_m, pid_n = _persistent_matmul_place(tile, tiles_m, tiles_n)
        # Rows and columns fit int32, whatever their product is.
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        left, right = _persistent_matmul_sum(
            *(a_desc, b_desc, off_m, off_n, 0, K),
            *(A_T, B_T, ACC, PRECISION),
        )
        _persistent_matmul_store(c, left, off_m, off_n, M, stride_cm, VEC)
        _persistent_matmul_store(
            c, right, off_m, off_n + HALF, M, stride_cm, VEC
        )
    # The last tiles leave multiprocessors idle, so each is for several
    # programs, with a part of K for each.
    if part_ptr is not None:
        for item in range(first, items, programs):
            tile = whole + item % tail
            pid_m, pid_n = _persistent_matmul_place(tile, tiles_m, tiles_n)
            length = steps * BLOCK_K
            off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
            left, right = _persistent_matmul_sum(
                *(a_desc, b_desc, off_m, off_n),
                *(item // tail * length, length, A_T, B_T, ACC, PRECISION),
            )
            rows = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N
            part_ptrs = (
                part_ptr + tl.cast(item, tl.int64) * BLOCK_M * BLOCK_N + rows
            )
            tl.store(part_ptrs + tl.arange(0, HALF)[None, :], left)
            columns = HALF + tl.arange(0, HALF)[None, :]
            tl.store(part_ptrs + columns, right)


@triton.jit(do_not_specialize=["M", "first"])
def _persistent_matmul_copy_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_om,
    first,  # of pairs: 1 if x begins in the middle of one
    PAIRS: tl.constexpr,  # whether 2 elements are copied as one of 4 bytes
    VEC: tl.constexpr,  # divides N and stride_xm: elements of a load
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pid, across = tl.program_id(axis=0), tl.cdiv(N, COLUMNS)
    offs_m = (pid // across * ROWS + tl.arange(0, ROWS))[:, None]  # (ROWS, 1)
    column = pid % across * COLUMNS
    begin = offs_m.to(tl.int64)
    if PAIRS:
        # Two loads of 4 bytes are faster than four of 2. A row may begin in
        # the middle of a pair: its pairs are halves of two that are adjacent.
        x_ptr = (x_ptr - first).to(tl.pointer_type(tl.uint32), bitcast=True)
        out_ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        begin = first + begin * stride_xm
        is_odd = begin % 2 == 1
        pairs = column // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        ptrs = x_ptr + begin // 2 + pairs
        mask = (offs_m < M) & (2 * pairs < N)
        x = tl.load(ptrs, mask=mask)
        more = mask & is_odd & (2 * pairs + 1 < N)
        right = tl.load(ptrs + 1, mask=more, other=0)
        x = tl.where(is_odd, (x >> 16) | (right << 16), x)
        out_ptrs = out_ptr + offs_m.to(tl.int64) * (stride_om // 2) + pairs
    else:
        N, stride_xm = N // VEC * VEC, stride_xm // VEC * VEC
        offs_n = column + tl.arange(0, COLUMNS)[None, :]
        mask = (offs_m < M) & (offs_n < N)
        x = tl.load(x_ptr + begin * stride_xm + offs_n, mask=mask)
        out_ptrs = out_ptr + begin * stride_om + offs_n
    tl.store(out_ptrs, x, mask=mask)


@triton.jit(do_not_specialize=["M", "whole", "tail"])
def _persistent_matmul_add_kernel(
    part_ptr,
    c_ptr,
    M,
    N,
    stride_cm,
    whole,
    tail,
    tile_m,
    tile_n,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    across = tile_n // COLUMNS
    pieces = tile_m // ROWS * across
    index, piece = pid // pieces, pid % pieces
    pid_m, pid_n = _persistent_matmul_place(
        whole + index, tl.cdiv(M, tile_m), tl.cdiv(N, tile_n)
    )
    rows = piece // across * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    columns = piece % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    size = tile_m * tile_n
    part_ptrs = part_ptr + index.to(tl.int64) * size + rows * tile_n + columns
    step = tl.cast(tail, tl.int64) * size
    total = tl.load(part_ptrs)  # (ROWS, COLUMNS)
    # The order is fixed, so the sum is deterministic.
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_ptrs + part * step)
    offs_m, offs_n = pid_m * tile_m + rows, pid_n * tile_n + columns
    c_ptrs = c_ptr + offs_m.to(tl.int64) * stride_cm + offs_n
    tl.store(c_ptrs, total, mask=(offs_m < M) & (offs_n < N))


@cache
def _persistent_matmul_gpu(device):
    """Return how many multiprocessors there are, and their shared memory."""
    if device.type == "cpu":  # interpreted: few programs, with many tiles each
        return 4, 227 * 1024
    driver = triton.runtime.driver.active
    with torch.accelerator.device_index(device.index):
        target = driver.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        raise RuntimeError(
            "persistent_matmul takes tensors on NVIDIA GPUs of compute "
            f"capability 9.0 or more, which have a copy engine, and this is "
            f"{target.backend} {target.arch}: tuned_matmul takes any GPU"
        )
    gpu = driver.utils.get_device_properties(device.index)
    return gpu["multiprocessor_count"], gpu["max_shared_mem"]


def _persistent_matmul_stages(tile, itemsize, shared):
    """Return how many stages a tile has, as far as shared memory has room."""
    BLOCK_M, BLOCK_N, BLOCK_K, _, most = tile
    half = BLOCK_M * BLOCK_N // 2 * itemsize  # of the tile that is stored
    stage = (BLOCK_M + BLOCK_N) * BLOCK_K * itemsize
    free = shared - half - 1024  # barriers take less
    return min(most, free // stage)


def _persistent_matmul_work(M, N, K, tile, itemsize, multiprocessors):
    """Return what a product costs with a tile, and how its work is divided.

    That is how many tiles are whole, how many come after these, in how many
    parts each of the latter is summed, and the steps of a part.
    """
    m, n, k = tile[:3]
    tiles = triton.cdiv(M, m) * triton.cdiv(N, n)
    rounds, tail = divmod(tiles, multiprocessors)
    steps = triton.cdiv(K, k)
    step = k * (m * n + PERSISTENT_MATMUL_EDGE * (m + n))
    memory = PERSISTENT_MATMUL_BYTE * itemsize * (M * K + K * N + M * N)

    def cost(parts):
        of_part = triton.cdiv(steps, parts) if tail > 0 else 0
        time = (rounds * steps + of_part) * step
        add = 0
        if parts > 1:
            add = PERSISTENT_MATMUL_PART * tail * parts * m * n
            add += PERSISTENT_MATMUL_ADD
        # Of several that wait for memory alone, the one with least to do
        return max(time, memory) + add, time

    choices = [1]
    for parts in PERSISTENT_MATMUL_PARTS:
        some = triton.cdiv(steps, triton.cdiv(steps, parts)) == parts  # in each
        if some and 0 < tail * parts <= multiprocessors:
            choices.append(parts)
    parts = min(choices, key=cost)
    if parts == 1:
        return cost(1), (tiles, 0, 1, 0)
    return cost(parts), (tiles - tail, tail, parts, triton.cdiv(steps, parts))


@lru_cache(4096)
def _persistent_matmul_plan(M, N, K, tiles, itemsize, multiprocessors, shared):
    """Return the tile of least cost, its stages, and how work is divided."""
    stages = {t: _persistent_matmul_stages(t, itemsize, shared) for t in tiles}
    work = {
        t: _persistent_matmul_work(M, N, K, t, itemsize, multiprocessors)
        for t in tiles
        if stages[t] >= PERSISTENT_MATMUL_STAGES
    }
    tile = min(work, key=lambda t: work[t][0])
    return tile, stages[tile], *work[tile][1]


def _persistent_matmul_check(a, b, input_precision):
    """Raise for what the op does not take, as far as no address tells."""
    if a.dtype != b.dtype or a.dtype not in PERSISTENT_MATMUL_ACC:
        raise TypeError(
            "persistent_matmul takes two float matrices of one dtype, not "
            f"{a.dtype} and {b.dtype}"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "persistent_matmul takes matrices of shapes (M, K) and (K, N), not "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(
            "persistent_matmul takes two matrices on one device, not on "
            f"{a.device} and {b.device}"
        )
    if input_precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(
            "persistent_matmul takes ieee, tf32 or tf32x3 as input_precision, "
            f"not {input_precision}"
        )


def _persistent_matmul_padded(length, itemsize, most=16):
    """Return the elements of a row, and what lies before the next one."""
    unit = most // itemsize
    return (length + unit - 1) // unit * unit


def _persistent_matmul_rows(M, N, like, most=16):
    """Return a new matrix whose rows begin at multiples of ``most`` bytes."""
    stride = _persistent_matmul_padded(N, like.element_size(), most)
    # The engine stores 16 bytes at a time, so the last row has its padding too.
    return like.new_empty(M, stride)[:, :N]


def _persistent_matmul_turned(x, begin):
    """Return whether the engine takes x.T, not x; None if it takes neither.

    ``begin`` is the address of x, or how far it begins from one that 16
    divides.
    """
    for side in (x, x.T):
        (rows, length), (stride, step) = side.shape, side.stride()
        # Rows that overlap, as those of an expanded tensor, it does not take.
        apart = stride >= length and stride * x.element_size() % 16 == 0
        if step == 1 and (apart or rows == 1) and begin % 16 == 0:
            return side is not x
    return None


def _persistent_matmul_copy(out, x, kernel=_persistent_matmul_copy_kernel):
    """Copy x to out, both of contiguous rows if x is, and return out.

    Rows of out begin at multiples of 16 bytes.
    """
    if x.stride(1) != 1:
        return out.copy_(x)
    (M, N), stride, size = x.shape, x.stride(0), x.element_size()
    is_aligned = x.data_ptr() % 16 == 0
    VEC = math.gcd(N, stride, 16 // size) if is_aligned else 1
    PAIRS = size == 2 and VEC == 1
    ROWS, COLUMNS = (4 if PAIRS else 1), 1024
    with torch.accelerator.device_index(x.device.index):
        kernel[(triton.cdiv(M, ROWS) * triton.cdiv(N, COLUMNS),)](
            x,
            out,
            M,
            N,
            stride,
            out.stride(0),
            x.data_ptr() % 4 // 2,
            PAIRS=PAIRS,
            VEC=VEC,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
    return out


def _persistent_matmul_side(x, begin, others=0, copy=torch.Tensor.copy_):
    """Return x or x.T, with rows that the engine takes, and whether it is x.T.

    If it takes neither, a copy is returned, as well as if it takes it slowly,
    and there are many ``others`` that it is multiplied by.
    """
    turned = _persistent_matmul_turned(x, begin)
    taken = turned is not None
    if not taken:
        # Adjacent elements stay adjacent: a copy that transposes is slower.
        turned = x.stride(0) == 1 and x.stride(1) != 1
    side = x.T if turned else x
    slow = others >= PERSISTENT_MATMUL_MANY and side.shape[0] > 1
    if taken and not (slow and side.stride(0) * side.element_size() % 32):
        return side, turned
    return copy(_persistent_matmul_rows(*side.shape, side, 128), side), turned


def _persistent_matmul_descriptor(side, block_shape):
    rows, length = side.shape
    # The stride of an only row may be anything.
    only = _persistent_matmul_padded(length, side.element_size())
    strides = [side.stride(0) if rows > 1 else only, 1]
    return TensorDescriptor(side, [rows, length], strides, block_shape)


def _persistent_matmul_add(part, c, plan, add=_persistent_matmul_add_kernel):
    """Launch the kernel that adds the parts of a plan's last tiles."""
    (m, n, *_), _, whole, tail, parts, _ = plan
    ROWS, COLUMNS = 16, min(n, 64)
    grid = (tail * (m // ROWS) * (n // COLUMNS),)
    sizes = *c.shape, c.stride(0), whole, tail, m, n
    add[grid](part, c, *sizes, PARTS=parts, ROWS=ROWS, COLUMNS=COLUMNS)


def _persistent_matmul_run(a, b, c, input_precision, plan=None):
    """Store a @ b in c, whose rows are contiguous, by a plan or by its own."""
    multiprocessors, shared = _persistent_matmul_gpu(a.device)
    (M, K), (N, size) = a.shape, (b.shape[1], a.element_size())
    copy = _persistent_matmul_copy
    side_a, A_T = _persistent_matmul_side(a, a.data_ptr(), N, copy)
    side_b, B_T = _persistent_matmul_side(b, b.data_ptr(), M, copy)
    tiles = PERSISTENT_MATMUL_TILES if size == 2 else PERSISTENT_MATMUL_WIDE
    if input_precision != "ieee" and a.dtype == torch.float32:
        tiles = PERSISTENT_MATMUL_TF32
    plan = plan or _persistent_matmul_plan(
        M, N, K, (*tiles,), size, multiprocessors, shared
    )
    (m, n, k, num_warps, _), num_stages, whole, tail, parts, steps = plan
    ACC = PERSISTENT_MATMUL_ACC[a.dtype]
    part = None
    if tail > 0:
        wide = torch.float64 if size == 8 else torch.float32
        part = a.new_empty(parts * tail * m * n, dtype=wide)
    by_engine = c.stride(0) * size % 16 == 0
    describe = _persistent_matmul_descriptor
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        if a.is_cuda and not hasattr(PERSISTENT_MATMUL_THREAD, "begun"):
            # No descriptor is made in a thread without CUDA's context. Autograd
            # has threads of its own. The first work of one may be ours.
            PERSISTENT_MATMUL_THREAD.begun = torch.zeros(1, device=a.device)
        programs = min(multiprocessors, whole + tail * parts)
        _persistent_matmul_kernel[(programs,)](
            describe(side_a, [k, m] if A_T else [m, k]),
            describe(side_b, [n, k] if B_T else [k, n]),
            describe(c, [m, n // 2]) if by_engine else c,
            part,
            c.stride(0),
            whole,
            tail,
            tail * parts,
            steps,
            A_T=A_T,
            B_T=B_T,
            VEC=0 if by_engine else math.gcd(c.stride(0), 16 // size),
            ACC=ACC,
            PRECISION=input_precision if a.dtype == torch.float32 else "ieee",
            num_warps=num_warps,
            num_stages=num_stages,
        )
        if tail > 0:
            _persistent_matmul_add(part, c, plan)


def _persistent_matmul_launch(a, b, input_precision="ieee"):
    _persistent_matmul_check(a, b, input_precision)
    _persistent_matmul_gpu(a.device)  # raises where there is no engine
    c = _persistent_matmul_rows(a.shape[0], b.shape[1], a)
    if c.numel() * a.shape[1] == 0:
        return c.zero_()
    _persistent_matmul_run(a, b, c, input_precision)
    return c


@custom_op(f"{PERSISTENT_MATMUL_NAMESPACE}::persistent_matmul", mutates_args=())
def persistent_matmul(
    a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee"
) -> torch.Tensor:
    """Return the matrix product of a (M, K) and b (K, N), as a @ b.

    Takes float16, bfloat16, float32 and float64, both of one dtype, and sums in
    float32, or float64 for float64. They may lie in memory in any way. The
    engine takes a matrix with rows or columns of adjacent elements that begin
    at multiples of 16 bytes: so do those of a new contiguous matrix with rows
    of such a length, and of its transpose. Any other matrix is copied in each
    product, to rows at multiples of 128 bytes: 4096 x 2047 numbers of half
    precision are 16 MB to read and 16 MB to write. Rows at odd multiples of 16
    bytes are taken, and copied if 4096 or more rows are multiplied by them. If
    you can, keep a weight of such a length with padded rows instead.

    ``input_precision`` is for float32, the other dtypes ignore it: "ieee"
    multiplies all 24 bits, without tensor cores; "tf32" gives 11 of them to the
    tensor cores, and "tf32x3" makes up for that with three products. What
    ``torch.backends.cuda.matmul`` says does not count.

    The result has the dtype of ``a`` and rows that begin at multiples of 16
    bytes: it is contiguous where 16 divides the bytes of a row. It is
    deterministic on one kind of GPU. Raises TypeError for other dtypes,
    ValueError for other shapes and precisions, and RuntimeError for GPUs
    without a copy engine, which NVIDIA's have from compute capability 9.0 on.
    Without a GPU, it needs Triton's interpreter, TRITON_INTERPRET=1. Has a
    gradient, in the same precision, which can be differentiated again.

    Rounding: products are summed in float32, or float64 for float64, and each
    result is rounded once.

    Under ``torch.autocast`` it casts a and b to autocast's dtype.
    """
    return _persistent_matmul_launch(a, b, input_precision)


@persistent_matmul.register_fake
def _persistent_matmul_fake(a, b, input_precision="ieee"):
    _persistent_matmul_check(a, b, input_precision)
    return _persistent_matmul_rows(a.shape[0], b.shape[1], a)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
PERSISTENT_MATMUL_LIBRARY = Library(PERSISTENT_MATMUL_NAMESPACE, "FRAGMENT")
PERSISTENT_MATMUL_LIBRARY.impl(
    "persistent_matmul", _persistent_matmul_launch, "CUDA"
)


def _persistent_matmul_autocast(kind, a, b, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    a, b = (t.to(dtype) if t.dtype in casts else t for t in (a, b))
    with torch.autocast(kind, enabled=False):
        return persistent_matmul(a, b, *options)


PERSISTENT_MATMUL_LIBRARY.impl(
    "persistent_matmul",
    partial(_persistent_matmul_autocast, "cpu"),
    "AutocastCPU",
)
PERSISTENT_MATMUL_LIBRARY.impl(
    "persistent_matmul",
    partial(_persistent_matmul_autocast, "cuda"),
    "AutocastCUDA",
)


def _persistent_matmul_setup(ctx, inputs, output):
    a, b, ctx.input_precision = inputs
    ctx.save_for_backward(a, b)


def _persistent_matmul_as(x, left, right, precision):
    """Return left @ right, by rows or by columns as x."""
    if x.stride(1) == 1:
        return persistent_matmul(left, right, precision)
    return persistent_matmul(right.T, left.T, precision).T


def _persistent_matmul_gradient(ctx, grad):
    a, b = ctx.saved_tensors
    # It may be an expanded number, or have rows of any length: one copy is for
    # both products. Whoever traces this knows no address.
    begin = grad.storage_offset() * grad.element_size()
    side, turned = _persistent_matmul_side(grad, begin)
    grad = side.T if turned else side
    d_a = d_b = None
    if ctx.needs_input_grad[0]:
        d_a = _persistent_matmul_as(a, grad, b.T, ctx.input_precision)
    if ctx.needs_input_grad[1]:
        d_b = _persistent_matmul_as(b, a.T, grad, ctx.input_precision)
    return d_a, d_b, None


persistent_matmul.register_autograd(
    _persistent_matmul_gradient, setup_context=_persistent_matmul_setup
)
