"""Matrix products beside communication: all-gather, and reduce-scatter.

For layers whose weights are split over the GPUs of one host (tensor parallel).
``all_gather_matmul`` multiplies the rows of all ranks by this rank's weight.
Copy engines fetch the rows in chunks while the product runs: it begins with
this rank's own, and before a chunk of another rank's it waits for a flag.
``all_gather_matmul_scatter`` adds up the products of all ranks, and each rank
has some rows of the sum. Its kernel stores every tile in the memory of the
rank that needs it, so the tiles travel while others are computed. For NVIDIA
GPUs of compute capability 9.0 or more that address each other's memory, over
NVLink. With few rows there is little to overlap: there NCCL or a one-shot
kernel does as well. Deterministic. No gradients.
"""

import os
import shutil
import tempfile
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch.distributed import distributed_c10d
from torch.library import Library, custom_op
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_gallery_ops.persistent_matmul import (
    PERSISTENT_MATMUL_ACC,
    PERSISTENT_MATMUL_INTERPRETED,
    PERSISTENT_MATMUL_TILES,
    PERSISTENT_MATMUL_WIDE,
    _persistent_matmul_descriptor,
    _persistent_matmul_gpu,
    _persistent_matmul_padded,
    _persistent_matmul_place,
    _persistent_matmul_plan,
    _persistent_matmul_rows,
    _persistent_matmul_side,
)

ALL_GATHER_MATMUL_NAMESPACE = "triton_gallery"
ALL_GATHER_MATMUL_CHUNK = 2**23  # the bytes of a chunk, or a little less
ALL_GATHER_MATMUL_UNIT = 128  # rows: what the tallest tile has divides a chunk
# A flag is asked for that often, which is seconds, and then the tile is NaN.
ALL_GATHER_MATMUL_TRIES = 2**24
ALL_GATHER_MATMUL_TIMEOUT = 600_000  # milliseconds that a barrier may take
ALL_GATHER_MATMUL_SUM = 2048  # elements of a program


@triton.jit
def _all_gather_matmul_wait(flag_ptr, tries):
    """Wait until a flag is set; return 0, or NaN if it never is."""
    left = tries
    # Triton makes a load of an addition of 0.
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while (seen == 0) & (left > 0):
        left -= 1
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    # One thread has seen the flag; none may load before that.
    tl.debug_barrier()
    return tl.where(seen == 0, float("nan"), 0.0)


@triton.jit
def _all_gather_matmul_tile(x_desc, weight_desc, shard, off_m, off_n, ACC, W_T):
    """Return a tile of the product of a shard's rows."""
    K = x_desc.shape[2]
    BLOCK_M: tl.constexpr = x_desc.block_shape[1]
    BLOCK_K: tl.constexpr = x_desc.block_shape[2]
    BLOCK_N: tl.constexpr = weight_desc.block_shape[1 if W_T else 0]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(0, K, BLOCK_K):
        # Past the shard's last row and past K the engine fills with zeros.
        x = x_desc.load([shard, off_m, k]).reshape(BLOCK_M, BLOCK_K)
        # (BLOCK_K, BLOCK_N)
        w = weight_desc.load([k, off_n] if W_T else [off_n, k])
        w = w if W_T else w.T
        if PERSISTENT_MATMUL_INTERPRETED:
            # Triton's interpreter multiplies bfloat16 wrongly.
            x, w = x.to(ACC), w.to(ACC)
        acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def _all_gather_matmul_kernel(
    x_desc,  # (ranks, rows, K), which copies fill meanwhile
    weight_desc,
    y_desc,  # (ranks, rows, N)
    flags_ptr,  # (ranks, chunks)
    rank,
    chunk,  # rows
    chunks,
    tries,
    W_T: tl.constexpr,  # weight_desc is of (K, N)
    ACC: tl.constexpr,
):
    RANKS, M, N = y_desc.shape
    BLOCK_M: tl.constexpr = y_desc.block_shape[1]
    BLOCK_N: tl.constexpr = y_desc.block_shape[2] * 2  # y's block is half
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n  # of a shard
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Not flattened: that would move loads of a tile before its wait.
    for tile in range(first, RANKS * tiles, programs):
        # This rank's rows are here. The next rank's come first of the others.
        shard = (rank + tile // tiles) % RANKS
        pid_m, pid_n = _persistent_matmul_place(tile % tiles, tiles_m, tiles_n)
        # Rows and columns fit int32, whatever their product is.
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        lost = 0.0
        if shard != rank:
            flag_ptr = flags_ptr + shard * chunks + off_m // chunk
            lost = _all_gather_matmul_wait(flag_ptr, tries)
        acc = _all_gather_matmul_tile(
            x_desc, weight_desc, shard, off_m, off_n, ACC, W_T
        )
        # Added after the products: if the sum began at a number known only at
        # run time, ptxas would have each product wait for the one before.
        acc += lost
        # In halves, the store needs half as much shared memory.
        both = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)).permute(0, 2, 1)
        left, right = tl.split(both)  # (BLOCK_M, BLOCK_N // 2)
        left = left.to(y_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
        y_desc.store([shard, off_m, off_n], left)
        right = right.to(y_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
        y_desc.store([shard, off_m, off_n + BLOCK_N // 2], right)


@triton.jit
def _all_gather_matmul_scatter_kernel(
    x_desc,  # (ranks, rows, K)
    weight_desc,
    buffers_ptr,  # addresses of all ranks' (ranks, rows, stride)
    rank,
    N,
    stride,
    VEC: tl.constexpr,  # what divides it
    W_T: tl.constexpr,  # weight_desc is of (K, N)
    ACC: tl.constexpr,
):
    RANKS, M = x_desc.shape[0], x_desc.shape[1]
    stride = stride // VEC * VEC
    BLOCK_M: tl.constexpr = x_desc.block_shape[1]
    BLOCK_N: tl.constexpr = weight_desc.block_shape[1 if W_T else 0]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n  # of a shard
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, RANKS * tiles, programs, flatten=True):
        # At any time each rank stores to another one, so all links are busy.
        # This rank's own rows come last: they need no link.
        shard = (rank + 1 + tile // tiles) % RANKS
        pid_m, pid_n = _persistent_matmul_place(tile % tiles, tiles_m, tiles_n)
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = _all_gather_matmul_tile(
            x_desc, weight_desc, shard, off_m, off_n, ACC, W_T
        )
        address = tl.load(buffers_ptr + shard)
        out_ptr = tl.multiple_of(address.to(tl.pointer_type(x_desc.dtype)), 16)
        offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        offs_n = off_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # In int32 this would overflow past element 2**31.
        rows = tl.cast(rank, tl.int64) * M + offs_m
        out_ptrs = out_ptr + rows[:, None] * stride + offs_n[None, :]
        mask = (offs_m < M)[:, None] & (offs_n < stride)[None, :]
        tl.store(out_ptrs, acc.to(x_desc.dtype), mask=mask)


@triton.jit
def _all_gather_matmul_sum_kernel(
    partial_ptr,  # (RANKS, size)
    out_ptr,  # (size,)
    size,
    RANKS: tl.constexpr,
    ACC: tl.constexpr,
    VEC: tl.constexpr,  # what divides size
    BLOCK: tl.constexpr,
):
    size = tl.cast(size, tl.int64) // VEC * VEC
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    acc = tl.zeros((BLOCK,), dtype=ACC)
    # In this order on each rank and in each run: the rounding is the same.
    for rank in tl.static_range(RANKS):
        part_ptrs = partial_ptr + rank * size + offs
        acc += tl.load(part_ptrs, mask=offs < size, other=0.0).to(ACC)
    acc = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, acc, mask=offs < size)


def _all_gather_matmul_group(name):
    """Return the group of ranks that has a name."""
    if not dist.is_initialized():
        raise RuntimeError(
            "all_gather_matmul takes a group of ranks, and there is none: "
            "call torch.distributed.init_process_group"
        )
    try:
        return distributed_c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            "all_gather_matmul takes the name of a group that has this rank, "
            f"as dist.group.WORLD.group_name, not {name!r}"
        ) from error


def _all_gather_matmul_files(group, size):
    """Return memory of all ranks on one CPU: files that all of them map."""
    place = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(place, group=group, group_src=0)
    files = [os.path.join(place[0], str(r)) for r in range(group.size())]
    options = {"shared": True, "size": size, "dtype": torch.uint8}
    peers = [torch.from_file(file, **options) for file in files]
    dist.barrier(group)  # all have them
    if group.rank() == 0:
        shutil.rmtree(place[0])
    return peers


@cache
def _all_gather_matmul_buffers(group_name, device, size):
    """Return bytes of every rank that this one can address.

    All ranks call it. It waits for them, once for each size.
    """
    group = _all_gather_matmul_group(group_name)
    side = handle = None
    if device.type == "cpu":
        peers = _all_gather_matmul_files(group, size + 16)
        addresses = [peer.data_ptr() for peer in peers]
    else:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "all_gather_matmul allocates memory of all ranks in the first "
                "call of a size, which no CUDA graph can: make one call before"
            )
        kind = {"dtype": torch.uint8, "device": device}
        mine = symm_mem.empty(size + 16, **kind)
        handle = symm_mem.rendezvous(mine, group_name)
        sizes = (size + 16,), torch.uint8
        peers = [handle.get_buffer(r, *sizes) for r in range(group.size())]
        addresses = list(handle.buffer_ptrs)
        # Its copies get ahead of what else waits for a copy engine.
        side = torch.cuda.Stream(device, priority=-1)
    ones = [peer[size : size + 4].view(torch.int32) for peer in peers]
    buffers = SimpleNamespace(
        group=group,
        mine=peers[group.rank()],
        peers=peers,
        ones=ones,  # of each rank, the number 1
        addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
        handle=handle,  # the memory lasts as long as this
        side=side,
    )
    ones[group.rank()].fill_(1)
    _all_gather_matmul_barrier(buffers, 0)
    return buffers


def _all_gather_matmul_barrier(buffers, channel):
    """Have the current stream wait for those of the other ranks."""
    if buffers.handle is None:
        dist.barrier(buffers.group)
    else:
        timeout_ms = ALL_GATHER_MATMUL_TIMEOUT
        buffers.handle.barrier(channel=channel, timeout_ms=timeout_ms)


def _all_gather_matmul_aside(buffers):
    """Return a context in which work goes to the side stream."""
    if buffers.side is None:
        return nullcontext()
    return torch.cuda.stream(buffers.side)


def _all_gather_matmul_pull(buffers, flags, rows, chunk, row_bytes):
    """Copy the rows of other ranks, with a flag after each chunk.

    The order is that of the product. Both copies are from another GPU's memory:
    copy engines do them, while the product has the multiprocessors. They do
    them in order, so the flag is set when the chunk is there.
    """
    rank, (ranks, chunks) = buffers.group.rank(), flags.shape
    for step in range(1, ranks):
        peer = (rank + step) % ranks
        for i in range(chunks):
            begin, end = i * chunk, min((i + 1) * chunk, rows)
            place = slice(
                (peer * rows + begin) * row_bytes,
                (peer * rows + end) * row_bytes,
            )
            buffers.mine[place].copy_(buffers.peers[peer][place])
            flags[peer, i : i + 1].copy_(buffers.ones[peer])


def _all_gather_matmul_check(x, weight, group_name):
    """Raise for what the ops do not take; return the group."""
    if x.dtype != weight.dtype or x.dtype not in PERSISTENT_MATMUL_ACC:
        raise TypeError(
            "all_gather_matmul takes two float matrices of one dtype, not "
            f"{x.dtype} and {weight.dtype}"
        )
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "all_gather_matmul takes matrices of shapes (M, K) and (N, K), not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(
            "all_gather_matmul takes two matrices on one device, not on "
            f"{x.device} and {weight.device}"
        )
    return _all_gather_matmul_group(group_name)


def _all_gather_matmul_rank_rows(x, group):
    """Return how many rows of a sum a rank has."""
    if x.shape[0] % group.size():
        raise ValueError(
            f"all_gather_matmul_scatter takes a multiple of {group.size()} "
            f"rows, as there are so many ranks, not {x.shape[0]}"
        )
    return x.shape[0] // group.size()


def _all_gather_matmul_shards(side, ranks, block_shape):
    """Return a descriptor of a matrix's rows, with those of a rank apart."""
    rows, length = side.shape[0] // ranks, side.shape[1]
    padded = _persistent_matmul_padded(length, side.element_size())
    # The stride of an only row may be anything.
    stride = side.stride(0) if side.shape[0] > 1 else padded
    shape = [ranks, rows, length]
    return TensorDescriptor(
        side, shape, [rows * stride, stride, 1], block_shape
    )


def _all_gather_matmul_memory(group_name, x, *shape):
    """Return buffers, and this rank's memory as a tensor like x."""
    needed = torch.Size(shape).numel() * x.element_size()
    # Powers of two: at most one buffer for each, whatever shapes come.
    size = max(triton.next_power_of_2(needed), 2**16)
    buffers = _all_gather_matmul_buffers(group_name, x.device, size)
    return buffers, buffers.mine[:needed].view(x.dtype).view(shape)


def _all_gather_matmul_plan(x, weight, ranks, rows):
    """Return the programs, their tile, the weight as they load it, options."""
    try:
        gpu, shared = _persistent_matmul_gpu(x.device)
    except RuntimeError as error:
        raise RuntimeError(
            "all_gather_matmul takes tensors on NVIDIA GPUs of compute "
            "capability 9.0 or more, which load tiles by a copy engine"
        ) from error
    # One multiprocessor stays free: a barrier runs beside the product.
    gpu, size, (N, K) = max(gpu - 1, 1), x.element_size(), weight.shape
    tiles = PERSISTENT_MATMUL_TILES if size == 2 else PERSISTENT_MATMUL_WIDE
    # Rows of a tile are of one chunk, and its columns one block.
    tiles = tuple(
        t
        for t in tiles
        if t[0] <= ALL_GATHER_MATMUL_UNIT
        and t[1] == triton.next_power_of_2(t[1])
    )
    sizes = ranks * rows, N, K, tiles, size, gpu, shared
    (m, n, k, num_warps, _), num_stages, *_ = _persistent_matmul_plan(*sizes)
    tiles = ranks * triton.cdiv(rows, m) * triton.cdiv(N, n)
    side, W_T = _persistent_matmul_side(weight, weight.data_ptr())
    block = [k, n] if W_T else [n, k]
    options = {
        "W_T": W_T,
        "ACC": PERSISTENT_MATMUL_ACC[x.dtype],
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    described = _persistent_matmul_descriptor(side, block)
    return min(gpu, tiles), (m, n, k), described, options


def _all_gather_matmul_launch(x, weight, group_name):
    group = _all_gather_matmul_check(x, weight, group_name)
    rank, ranks = group.rank(), group.size()
    (rows, K), N = x.shape, weight.shape[0]
    y = _persistent_matmul_rows(ranks * rows, N, x)
    if rows * K == 0:
        return y.zero_()
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        stride = _persistent_matmul_padded(K, x.element_size())
        buffers, gathered = _all_gather_matmul_memory(
            group_name, x, ranks * rows, stride
        )
        gathered[rank * rows : (rank + 1) * rows, :K].copy_(x)
        # From here on all ranks' rows may be read.
        _all_gather_matmul_barrier(buffers, 0)
        row_bytes, unit = stride * x.element_size(), ALL_GATHER_MATMUL_UNIT
        most = ALL_GATHER_MATMUL_CHUNK // row_bytes
        chunk = max(most // unit, 1) * unit
        # New zeros in each call: none is left of the last, in a graph either.
        flags = torch.zeros(
            ranks, triton.cdiv(rows, chunk), dtype=torch.int32, device=x.device
        )
        if buffers.side is not None:
            buffers.side.wait_stream(torch.cuda.current_stream())
        with _all_gather_matmul_aside(buffers):
            _all_gather_matmul_pull(buffers, flags, rows, chunk, row_bytes)
        if N:
            programs, (m, n, k), described, options = _all_gather_matmul_plan(
                x, weight, ranks, rows
            )
            shards = _all_gather_matmul_shards
            _all_gather_matmul_kernel[(programs,)](
                shards(gathered[:, :K], ranks, [1, m, k]),
                described,
                shards(y, ranks, [1, m, n // 2]),
                flags,
                rank,
                chunk,
                flags.shape[1],
                ALL_GATHER_MATMUL_TRIES,
                **options,
            )
        # All have copied this rank's rows: the next call may write there.
        with _all_gather_matmul_aside(buffers):
            _all_gather_matmul_barrier(buffers, 1)
        if buffers.side is not None:
            torch.cuda.current_stream().wait_stream(buffers.side)
    return y


def _all_gather_matmul_scatter_launch(x, weight, group_name):
    group = _all_gather_matmul_check(x, weight, group_name)
    rank, ranks = group.rank(), group.size()
    rows, N = _all_gather_matmul_rank_rows(x, group), weight.shape[0]
    y = _persistent_matmul_rows(rows, N, x)
    if y.numel() * x.shape[1] == 0:
        return y.zero_()
    with torch.accelerator.device_index(x.device.index):
        side, turned = _persistent_matmul_side(x, x.data_ptr())
        if turned:
            side = _persistent_matmul_rows(*x.shape, x).copy_(x)
        stride = _persistent_matmul_padded(N, x.element_size())
        buffers, partials = _all_gather_matmul_memory(
            group_name, x, ranks, rows, stride
        )
        # The other ranks have added up what the last call left with them.
        _all_gather_matmul_barrier(buffers, 0)
        programs, (m, _, k), described, options = _all_gather_matmul_plan(
            x, weight, ranks, rows
        )
        vec = 16 // x.element_size()
        _all_gather_matmul_scatter_kernel[(programs,)](
            _all_gather_matmul_shards(side, ranks, [1, m, k]),
            described,
            buffers.addresses,
            rank,
            N,
            stride,
            VEC=vec,
            **options,
        )
        # All have stored their parts of this rank's rows.
        _all_gather_matmul_barrier(buffers, 1)
        size = rows * stride
        _all_gather_matmul_sum_kernel[
            (triton.cdiv(size, ALL_GATHER_MATMUL_SUM),)
        ](
            partials,
            y,
            size,
            RANKS=ranks,
            ACC=options["ACC"],
            VEC=vec,
            BLOCK=ALL_GATHER_MATMUL_SUM,
        )
    return y


@custom_op(f"{ALL_GATHER_MATMUL_NAMESPACE}::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, group_name: str
) -> torch.Tensor:
    """Return the rows of all ranks times this rank's weight, transposed.

    It is ``torch.cat(x of all ranks) @ weight.T``, for a layer whose weight is
    split by columns of its result.

    Args:
        x: (M, K), this rank's rows. All ranks of the group call with the same
            shape and dtype, in the same order of calls.
        weight: (N, K), this rank's part; N may differ between ranks.
        group_name: of the ranks, which are processes of one host with a GPU
            each, as ``torch.distributed.group.WORLD.group_name``.

    Returns (ranks * M, N). Takes float16, bfloat16, float32 and float64, both
    of one dtype and of any strides, and sums in float32, or float64 for
    float64. Float32 is multiplied with all 24 bits. The rows of the result
    begin at multiples of 16 bytes: it is contiguous where 16 divides the bytes
    of a row. Matrices whose rows do not begin so are copied first.

    The rows of all ranks are held in symmetric memory, which the first call of
    a size allocates: at most twice the bytes that the largest call needs, and
    as much again in all for smaller ones. It is shared by both ops and kept
    until the process ends. So two calls may not overlap on two streams, and a
    CUDA graph may have the op after one call of its shape.

    Deterministic. Raises TypeError for other dtypes, ValueError for other
    shapes and an unknown group, and RuntimeError without a group or on a GPU
    without a copy engine for tiles, which NVIDIA's have from compute
    capability 9.0 on. A barrier that another rank does not reach in ten
    minutes is an error of CUDA, and a tile whose rows do not arrive is NaN. No
    gradient. Without a GPU, it needs Triton's interpreter, TRITON_INTERPRET=1,
    and ranks that share a folder for temporary files.

    Rounding: products are summed in float32, or float64 for float64, and each
    result is rounded once.

    Under ``torch.autocast`` it casts x and weight to autocast's dtype.
    """
    return _all_gather_matmul_launch(x, weight, group_name)


@custom_op(
    f"{ALL_GATHER_MATMUL_NAMESPACE}::all_gather_matmul_scatter", mutates_args=()
)
def all_gather_matmul_scatter(
    x: torch.Tensor, weight: torch.Tensor, group_name: str
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of x @ weight.T.

    It is a product and a reduce-scatter: the other half of a layer that begins
    with ``all_gather_matmul``, whose weight is split by what it sums over.

    Args:
        x: (M, K), the columns that this rank has. The number of ranks divides
            M. All ranks of the group call with the same shapes and dtype, in
            the same order of calls; K may differ between them, if none is 0.
        weight: (N, K), this rank's part.
        group_name: as of ``all_gather_matmul``, as are dtypes, strides, memory
            and errors.

    Returns (M / ranks, N): rank r has the r-th part of the rows. Deterministic.

    Rounding: products are summed in float32, or float64 for float64. Each
    rank's sum is rounded to the dtype of x to travel; these are added up in
    float32, in the order of ranks, and rounded once more.

    Under ``torch.autocast`` it casts x and weight to autocast's dtype.
    """
    return _all_gather_matmul_scatter_launch(x, weight, group_name)


@all_gather_matmul.register_fake
def _all_gather_matmul_fake(x, weight, group_name):
    group = _all_gather_matmul_check(x, weight, group_name)
    M = group.size() * x.shape[0]
    return _persistent_matmul_rows(M, weight.shape[0], x)


@all_gather_matmul_scatter.register_fake
def _all_gather_matmul_scatter_fake(x, weight, group_name):
    group = _all_gather_matmul_check(x, weight, group_name)
    rows = _all_gather_matmul_rank_rows(x, group)
    return _persistent_matmul_rows(rows, weight.shape[0], x)


def _all_gather_matmul_autocast(op, kind, x, weight, group_name):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    x, weight = (t.to(dtype) if t.dtype in casts else t for t in (x, weight))
    with torch.autocast(kind, enabled=False):
        return op(x, weight, group_name)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
ALL_GATHER_MATMUL_LIBRARY = Library(ALL_GATHER_MATMUL_NAMESPACE, "FRAGMENT")
for _all_gather_matmul_op, _all_gather_matmul_of_op in (
    (all_gather_matmul, _all_gather_matmul_launch),
    (all_gather_matmul_scatter, _all_gather_matmul_scatter_launch),
):
    _all_gather_matmul_name = _all_gather_matmul_op._name
    ALL_GATHER_MATMUL_LIBRARY.impl(
        _all_gather_matmul_name, _all_gather_matmul_of_op, "CUDA"
    )
    for _all_gather_matmul_kind in ("cpu", "cuda"):
        ALL_GATHER_MATMUL_LIBRARY.impl(
            _all_gather_matmul_name,
            partial(
                _all_gather_matmul_autocast,
                _all_gather_matmul_op,
                _all_gather_matmul_kind,
            ),
            f"Autocast{_all_gather_matmul_kind.upper()}",
        )
