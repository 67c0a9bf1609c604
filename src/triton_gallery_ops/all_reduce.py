"""Sums over the GPUs of one host, for tensors of up to some megabytes.

``all_reduce`` returns the sum of all ranks' tensors on every rank;
``all_reduce_rms_norm`` adds a residual to it and returns the RMSNorm too, in
the same launch, as inference engines do after a layer's last product. Small
tensors take *one shot*: each rank reads all others'. Large ones take *two*:
each rank adds up a part, then reads the others' parts. Sums are in float32, in
the order of the ranks: deterministic, and equal bit for bit on all ranks. Both
work in CUDA graphs. ``all_reduce_memory`` allocates symmetric memory once for
many calls. NVLink's multicast is not used, and there is no gradient. Between
hosts, and for tensors that are much larger, use NCCL.
"""

import os
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch.library import Library, custom_op

ALL_REDUCE_NAMESPACE = "triton_gallery"
ALL_REDUCE_DTYPES = torch.float16, torch.bfloat16, torch.float32
ALL_REDUCE_PROGRAMS = 64  # of every launch; each has a count on every rank
ALL_REDUCE_COUNTS = tl.constexpr(8 * ALL_REDUCE_PROGRAMS)  # bytes
ALL_REDUCE_TILE = 2**13  # bytes that a program has at a time
ALL_REDUCE_LARGE_TILE = 2**15  # the same of large tensors
ALL_REDUCE_LARGE = 2**21  # bytes of a tensor that is large
ALL_REDUCE_SAVED = 2**20  # bytes that a second shot has to save
ALL_REDUCE_LONGEST = 16384  # elements of a row
ALL_REDUCE_STEP = 2**16  # bytes of the longest row; memory is made of these


class AllReduceMemory(NamedTuple):
    """What ``all_reduce_memory`` returns; a call takes it as it is."""

    addresses: torch.Tensor  # of all ranks' memory, and of ``late``
    late: torch.Tensor  # not 0 where a rank did not come; on the CPU
    rank: int
    ranks: int
    numel: int  # that a tensor has at most
    dtype: torch.dtype
    half: int  # bytes of a buffer, of which there are two
    tries: int  # how often a program looks for the other ranks
    kept: Any = None  # the memory lasts as long as this


@triton.jit
def _all_reduce_data(addresses_ptr, rank, start, dtype: tl.constexpr):
    """Return a pointer to a rank's buffer."""
    address = tl.load(addresses_ptr + rank) + start
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _all_reduce_begin(addresses_ptr, rank, half, RANKS: tl.constexpr):
    """Return this program's count, what it is before, and where to write."""
    count_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
    count_ptr += tl.program_id(axis=0)
    # Each launch adds 2 for each rank. Ranks that are ahead have added at most
    # 1 less than that, for this launch, so the quotient is its number.
    count = tl.atomic_add(count_ptr, 0, sem="relaxed", scope="sys")
    launch = count // (2 * RANKS)
    # Two buffers in rotation: the other one may still be read.
    start = ALL_REDUCE_COUNTS + launch % 2 * half
    return count_ptr, launch * (2 * RANKS), start


@triton.jit
def _all_reduce_meet(
    addresses_ptr,
    count_ptr,
    weight,
    target,
    tries,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Meet the same program of all ranks; return the tries that are left."""
    rank = tl.arange(0, LANES)  # (LANES,)
    address = tl.load(addresses_ptr + rank, mask=rank < RANKS, other=0)
    count_ptrs = address.to(tl.pointer_type(tl.int64)) + tl.program_id(axis=0)
    # All threads have written before one of them signals.
    tl.debug_barrier()
    tl.atomic_add(
        count_ptrs, weight, mask=rank < RANKS, sem="release", scope="sys"
    )
    left = tries
    count = tl.atomic_add(count_ptr, 0, sem="acquire", scope="sys")
    while (count < target) & (left > 0):
        left -= 1
        count = tl.atomic_add(count_ptr, 0, sem="acquire", scope="sys")
    if left == 0:
        late = tl.load(addresses_ptr + RANKS)
        tl.store(late.to(tl.pointer_type(tl.int32)), 1)
    # None reads before the one that waited is done.
    tl.debug_barrier()
    return left


@triton.jit
def _all_reduce_finish(
    total,
    left,
    offs,
    lanes,
    mask,
    out_ptr,
    residual_ptr,
    weight_ptr,
    norm_ptr,
    eps,
    WIDTH: tl.constexpr,
):
    """Store a sum; or that with a residual, and its norm."""
    # Where a rank did not come there is NaN, and no number that looks right.
    total = tl.where(left > 0, total.to(tl.float32), float("nan"))
    if residual_ptr is not None:
        h = tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        total = (total + h).to(out_ptr.dtype.element_ty).to(tl.float32)
        mean = tl.sum(tl.where(mask, total * total, 0.0), axis=0) / WIDTH
        weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0)
        y = total * tl.rsqrt(mean + eps) * weight.to(tl.float32)
        tl.store(norm_ptr + offs, y.to(norm_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _all_reduce_one_shot_kernel(
    x_ptr,
    out_ptr,
    residual_ptr,
    weight_ptr,
    norm_ptr,
    addresses_ptr,
    units,
    half,
    rank,
    tries,
    eps,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    programs = tl.num_programs(axis=0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    N = units * UNIT  # so that the compiler knows a divisor
    tiles = tl.cdiv(N, WIDTH)
    count_ptr, before, start = _all_reduce_begin(
        addresses_ptr, rank, half, RANKS
    )
    if pid >= tiles:  # as if all had met
        tl.atomic_add(count_ptr, 2 * RANKS, sem="relaxed", scope="sys")
        return
    lanes = tl.arange(0, BLOCK)  # (BLOCK,)
    mine_ptr = _all_reduce_data(addresses_ptr, rank, start, dtype)
    # Others' programs of this number read what this one writes, and no more.
    for tile in range(pid, tiles, programs):
        offs = tile * WIDTH + lanes
        mask = (lanes < WIDTH) & (offs < N)
        tl.store(mine_ptr + offs, tl.load(x_ptr + offs, mask=mask), mask=mask)
    target = before + 2 * RANKS
    left = _all_reduce_meet(
        addresses_ptr, count_ptr, 2, target, tries, RANKS, LANES
    )
    for tile in range(pid, tiles, programs):
        offs = tile * WIDTH + lanes
        mask = (lanes < WIDTH) & (offs < N)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            ptr = _all_reduce_data(addresses_ptr, peer, start, dtype)
            total += tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
        _all_reduce_finish(
            *(total.to(dtype), left, offs, lanes, mask),
            *(out_ptr, residual_ptr, weight_ptr, norm_ptr, eps, WIDTH),
        )


@triton.jit
def _all_reduce_two_shot_kernel(
    x_ptr,
    out_ptr,
    residual_ptr,
    weight_ptr,
    norm_ptr,
    addresses_ptr,
    units,
    half,
    rank,
    tries,
    eps,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    programs = tl.num_programs(axis=0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    N = units * UNIT
    # A group has a tile for each rank, which adds it up.
    groups = tl.cdiv(N, WIDTH * RANKS)
    count_ptr, before, start = _all_reduce_begin(
        addresses_ptr, rank, half, RANKS
    )
    if pid >= groups:
        tl.atomic_add(count_ptr, 2 * RANKS, sem="relaxed", scope="sys")
        return
    lanes = tl.arange(0, BLOCK)  # (BLOCK,)
    mine_ptr = _all_reduce_data(addresses_ptr, rank, start, dtype)
    # A rank gets its tile of a group from all ranks, side by side.
    for group in range(pid, groups, programs):
        for peer in tl.static_range(RANKS):
            offs = (group * RANKS + peer) * WIDTH + lanes
            mask = (lanes < WIDTH) & (offs < N)
            x = tl.load(x_ptr + offs, mask=mask)
            ptr = _all_reduce_data(addresses_ptr, peer, start, dtype)
            place = (group * RANKS + rank) * WIDTH + lanes
            tl.store(ptr + place, x, mask=mask)
    left = _all_reduce_meet(
        addresses_ptr, count_ptr, 1, before + RANKS, tries, RANKS, LANES
    )
    for group in range(pid, groups, programs):
        offs = (group * RANKS + rank) * WIDTH + lanes
        mask = (lanes < WIDTH) & (offs < N)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            place = (group * RANKS + peer) * WIDTH + lanes
            x = tl.load(mine_ptr + place, mask=mask, other=0.0)
            total += x.to(tl.float32)
        # A rank that comes too late for this sum still reads it.
        total = tl.where(left > 0, total, float("nan"))
        # Over what this rank has sent to itself
        tl.store(mine_ptr + offs, total.to(dtype), mask=mask)
    left = _all_reduce_meet(
        addresses_ptr, count_ptr, 1, before + 2 * RANKS, left, RANKS, LANES
    )
    for group in range(pid, groups, programs):
        for peer in tl.static_range(RANKS):
            offs = (group * RANKS + peer) * WIDTH + lanes
            mask = (lanes < WIDTH) & (offs < N)
            ptr = _all_reduce_data(addresses_ptr, peer, start, dtype)
            _all_reduce_finish(
                *(tl.load(ptr + offs, mask=mask, other=0.0), left),
                *(offs, lanes, mask, out_ptr, residual_ptr, weight_ptr),
                *(norm_ptr, eps, WIDTH),
            )


def _all_reduce_two_shots(nbytes, ranks):
    """Whether a second barrier takes less time than what it saves."""
    # One shot reads ranks - 1 tensors, two read 2 * (ranks - 1) / ranks. It
    # also copies the tensor within the GPU, where memory is faster.
    saved = (ranks - 1) * (ranks - 2) / ranks + 1 / 4
    return nbytes * saved > ALL_REDUCE_SAVED


def _all_reduce_launch(
    x, residual, weight, eps, addresses, rank, ranks, half, shots, tries
):
    """Return the sum, or that with the residual, and its norm."""
    x = x.contiguous()
    out = torch.empty_like(x)
    norm = None if residual is None else torch.empty_like(x)
    N, size = x.numel(), x.element_size()
    if N == 0:
        return out, norm
    if residual is None:
        large = N * size > ALL_REDUCE_LARGE
        WIDTH = (ALL_REDUCE_LARGE_TILE if large else ALL_REDUCE_TILE) // size
    else:
        WIDTH = x.shape[-1]
        residual, weight = residual.contiguous(), weight.contiguous()
    BLOCK = triton.next_power_of_2(WIDTH)
    UNIT = 1 if N * size % 16 else 16 // size
    two = shots == 2 if shots else _all_reduce_two_shots(N * size, ranks)
    one = _all_reduce_one_shot_kernel
    kernel = _all_reduce_two_shot_kernel if two else one
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(ALL_REDUCE_PROGRAMS,)](
            *(x, out, residual, weight, norm, addresses),
            *(N // UNIT, half, rank, tries, eps),
            UNIT=UNIT,
            RANKS=ranks,
            LANES=triton.next_power_of_2(ranks),
            WIDTH=WIDTH,
            BLOCK=BLOCK,
            num_warps=max(1, min(16, BLOCK * size // 512)),
        )
    return out, norm


def _all_reduce_sum_launch(x, addresses, rank, ranks, half, shots, tries):
    memory = addresses, rank, ranks, half, shots, tries
    return _all_reduce_launch(x, None, None, 0.0, *memory)[0]


@custom_op(f"{ALL_REDUCE_NAMESPACE}::all_reduce", mutates_args=())
def _all_reduce_sum(
    x: torch.Tensor,
    addresses: torch.Tensor,
    rank: int,
    ranks: int,
    half: int,
    shots: int,
    tries: int,
) -> torch.Tensor:
    return _all_reduce_sum_launch(x, addresses, rank, ranks, half, shots, tries)


@custom_op(f"{ALL_REDUCE_NAMESPACE}::all_reduce_rms_norm", mutates_args=())
def _all_reduce_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    addresses: torch.Tensor,
    rank: int,
    ranks: int,
    half: int,
    shots: int,
    tries: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    memory = addresses, rank, ranks, half, shots, tries
    return _all_reduce_launch(x, residual, weight, eps, *memory)


@_all_reduce_sum.register_fake
def _all_reduce_fake_sum(x, *_):
    return x.new_empty(x.shape)


@_all_reduce_norm.register_fake
def _all_reduce_fake_norm(x, *_):
    return x.new_empty(x.shape), x.new_empty(x.shape)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
ALL_REDUCE_LIBRARY = Library(ALL_REDUCE_NAMESPACE, "FRAGMENT")
ALL_REDUCE_LIBRARY.impl("all_reduce", _all_reduce_sum_launch, "CUDA")
ALL_REDUCE_LIBRARY.impl("all_reduce_rms_norm", _all_reduce_launch, "CUDA")


def _all_reduce_check(name, x, memory, shots):
    """Raise for what the ops do not take, and where a rank did not come."""
    device = memory.addresses.device
    if x.dtype != memory.dtype or x.device != device:
        raise TypeError(
            f"{name} takes {memory.dtype} on {device}, as its memory was made "
            f"for, not {x.dtype} on {x.device}"
        )
    if x.numel() > memory.numel:
        raise ValueError(
            f"{name} takes up to {memory.numel} elements, as its memory was "
            f"made for, not {x.numel()}"
        )
    if shots not in (None, 1, 2):
        raise ValueError(f"{name} takes 1 or 2 shots or None, not {shots}")
    if not torch.compiler.is_compiling():
        all_reduce_check(memory)


def all_reduce(
    x: torch.Tensor, memory: AllReduceMemory, shots: int | None = None
) -> torch.Tensor:
    """Return the sum of all ranks' tensors, the same on each rank.

    All ranks of the memory's group make the same calls in the same order, each
    with a tensor of the same shape, on one stream at a time. Nothing checks
    that. Takes ``x`` of any shape and strides, of the memory's dtype, device,
    and at most its number of elements. The result is contiguous.

    With ``shots=1`` each rank reads all ranks' tensors; with ``shots=2`` it
    adds up its part of them and reads the other parts. None chooses by the
    number of bytes and of ranks.

    A call in a CUDA graph is replayed with it; ``memory`` has to last as long
    as the graph. Raises TypeError for another dtype or device, ValueError for
    more elements, and RuntimeError where a rank did not come to a call before:
    see ``all_reduce_check``. Deterministic, without a gradient.

    Rounding: the sum is in float32, from rank 0 on, and is rounded once.
    """
    _all_reduce_check("all_reduce", x, memory, shots)
    where = memory.addresses, memory.rank, memory.ranks, memory.half
    return _all_reduce_sum(x, *where, shots or 0, memory.tries)


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    memory: AllReduceMemory,
    shots: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of h, and h: all ranks' sum of x, plus a residual.

    ``residual`` has the shape and dtype of ``x``, and so have both results.
    ``weight`` is (N,), N being the last size of ``x``, up to 16384, in float16,
    bfloat16 or float32. ``residual`` and ``weight`` should be equal on all
    ranks; then so are the results. All else is as in ``all_reduce``.

    Rounding: the sum is rounded to its dtype, so is h, and the norm is that of
    the rounded h, in float32, rounded once.
    """
    name = "all_reduce_rms_norm"
    _all_reduce_check(name, x, memory, shots)
    fits = residual.dtype == x.dtype and weight.dtype in ALL_REDUCE_DTYPES
    if not fits or {residual.device, weight.device} != {x.device}:
        raise TypeError(
            f"{name} takes a residual of {x.dtype} and a float weight on "
            f"{x.device}, not {residual.dtype} on {residual.device} and "
            f"{weight.dtype} on {weight.device}"
        )
    fits = x.ndim > 0 and 1 <= x.shape[-1] <= ALL_REDUCE_LONGEST
    if not fits or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} takes x and a residual of (..., N), N up to "
            f"{ALL_REDUCE_LONGEST}, and a weight of (N,), not "
            f"{tuple(x.shape)}, {tuple(residual.shape)} and "
            f"{tuple(weight.shape)}"
        )
    where = memory.addresses, memory.rank, memory.ranks, memory.half
    options = *where, shots or 0, memory.tries
    h, y = _all_reduce_norm(x, residual, weight, eps, *options)
    return y, h


def all_reduce_check(memory: AllReduceMemory) -> None:
    """Raise RuntimeError if a rank did not come to a call that has ended.

    The others' programs look for it ``tries`` times. Then they end; their
    results are NaN, and the memory serves no more. This does not wait for the
    GPU. Calls do it first, but those in a CUDA graph or under ``torch.compile``
    do not.
    """
    if memory.late.item():
        raise RuntimeError(
            f"all_reduce: rank {memory.rank} waited for a rank that did not "
            f"come in {memory.tries} tries; its memory serves no more"
        )


def all_reduce_memory(
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    tries: int | None = None,
) -> AllReduceMemory:
    """Return memory for calls with up to ``numel`` elements of a dtype.

    All ranks of a group call it together, with equal arguments; no group is
    all ranks. It is on this rank's current GPU, two buffers of that size, and
    these GPUs have to reach each other's memory. Without a GPU it is shared
    memory of the CPU, for Triton's interpreter. It serves one stream.

    ``tries`` is how often a program looks for the other ranks before it ends
    without them: by default 2**27 times, and 2**20 on the CPU. Raises TypeError
    for a dtype that is not float16, bfloat16 or float32, and ValueError for
    other sizes, without a process group, outside of the group, and where ranks
    ask for different memory.
    """
    name = "all_reduce_memory"
    if dtype not in ALL_REDUCE_DTYPES:
        raise TypeError(f"{name} takes float16, bfloat16, float32, not {dtype}")
    if not 1 <= numel < 2**31:
        raise ValueError(f"{name} takes 1 to 2**31 - 1 elements, not {numel}")
    if not dist.is_initialized():
        raise ValueError(f"{name} takes a process group, and there is none")
    group = group or dist.distributed_c10d._get_default_group()
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{name}: this process is not in the group")
    ranks = dist.get_world_size(group)
    asked = [None] * ranks
    dist.all_gather_object(asked, (numel, str(dtype)), group=group)
    if len({*asked}) > 1:
        raise ValueError(f"{name}: ranks ask for different memory: {asked}")
    step = ALL_REDUCE_STEP
    # The last group of tiles reaches past the end.
    half = (triton.cdiv(numel * dtype.itemsize, step) + ranks) * step
    size = ALL_REDUCE_COUNTS.value + 2 * half
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
        mine = symm_mem.empty(size, dtype=torch.uint8, device=device)
        kept = mine, symm_mem.rendezvous(mine, group.group_name)
        mine.zero_()
        torch.cuda.synchronize(device)
        places = [*kept[1].buffer_ptrs]
    else:
        device = torch.device("cpu")
        kept = _all_reduce_shared(size, ranks, group)
        places = [row.data_ptr() for row in kept]
    dist.barrier(group)  # no count is changed before all are 0
    late = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
    places.append(late.data_ptr())
    addresses = torch.tensor(places, dtype=torch.int64, device=device)
    tries = tries or (2**27 if on_gpu else 2**20)
    own = rank, ranks, numel, dtype, half, tries, kept
    return AllReduceMemory(addresses, late, *own)


def _all_reduce_shared(size, ranks, group):
    """Return a row of bytes for each rank, in a file that all ranks map."""
    place = [None]
    if dist.get_rank(group) == 0:
        handle, place[0] = tempfile.mkstemp()
        os.close(handle)
    dist.broadcast_object_list(place, group=group, group_src=0)
    options = {"size": ranks * size, "dtype": torch.uint8}
    rows = torch.from_file(place[0], shared=True, **options).view(ranks, size)
    dist.barrier(group)  # all have it
    if dist.get_rank(group) == 0:
        os.remove(place[0])
    return rows
