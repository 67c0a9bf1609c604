"""Expert parallelism: send tokens to experts on other GPUs, and back.

The experts of a layer are spread over GPUs, its ranks, so each token's row goes
to the ranks that have its experts. ``expert_all_to_all_dispatch`` writes rows
into the memory of other GPUs of the host, sorted by expert, as a grouped
product takes them; ``expert_all_to_all_combine`` reads the results back and
adds up those of each token, by their weights. How many rows go where is
exchanged between the GPUs: no CPU waits, so a CUDA graph can hold both calls.
Rows are of 16 bits, float32, or float8 with scales. Deterministic. For ranks on
one host whose GPUs reach each other's memory; it uses no multicast. Without a
gradient.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch.library import Library, custom_op

EXPERT_ALL_TO_ALL_NAMESPACE = "triton_gallery"
EXPERT_ALL_TO_ALL_FLOATS = torch.float16, torch.bfloat16, torch.float32
EXPERT_ALL_TO_ALL_EIGHT = torch.float8_e4m3fn, torch.float8_e5m2
EXPERT_ALL_TO_ALL_EXPERTS = 1024
EXPERT_ALL_TO_ALL_RANKS = 64
EXPERT_ALL_TO_ALL_PLACES = 2**30  # rows of all ranks, at most
EXPERT_ALL_TO_ALL_TRIES = 2**28  # at a flag, before a rank is given up
EXPERT_ALL_TO_ALL_WORDS = 1024  # of 4 bytes, that a program copies at once
EXPERT_ALL_TO_ALL_COPIES = 1024  # programs that copy results


class ExpertAllToAllMemory(NamedTuple):
    """Memory that ranks share; ``expert_all_to_all_memory`` makes it.

    rows: (capacity, hidden), where other ranks write rows for experts here.
    scales: (capacity, groups) of float32, those of the rows; None without.
    results: (capacity, hidden), where other ranks read what experts returned.
    addresses: (4, ranks), where each rank has flags and counts, rows, scales
        and results.
    state: the most rows that any rank was to get in a call so far, and 1 if a
        rank did not come to a barrier.
    rank: of this process.
    experts: how many there are on all ranks.
    own: addresses of rows and results, for a check.
    kept: what the memory lasts as long as.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    results: torch.Tensor
    addresses: torch.Tensor
    state: torch.Tensor
    rank: int
    experts: int
    own: tuple[int, int]
    kept: object


@triton.jit
def _expert_all_to_all_meet(addresses_ptr, state_ptr, rank, tries, RANKS):
    """Wait for all ranks: a flag for each pair is set, seen and cleared.

    What a rank wrote before is seen by all after. A rank that has failed would
    otherwise keep this GPU busy forever, so the tries are counted.
    """
    left = tries
    tl.debug_barrier()
    for peer in range(RANKS):
        ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32)) + rank
        # Not set a second time before that rank has cleared it
        was = tl.atomic_cas(ptr, 0, 1, sem="release", scope="sys")
        while (was != 0) & (left > 0):
            was = tl.atomic_cas(ptr, 0, 1, sem="release", scope="sys")
            left -= 1
    flags_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in range(RANKS):
        ptr = flags_ptr + peer
        was = tl.atomic_cas(ptr, 1, 0, sem="acquire", scope="sys")
        while (was != 1) & (left > 0):
            was = tl.atomic_cas(ptr, 1, 0, sem="acquire", scope="sys")
            left -= 1
    if left == 0:
        tl.store(state_ptr + 1, 1)
    tl.debug_barrier()


@triton.jit
def _expert_all_to_all_barrier_kernel(
    addresses_ptr, state_ptr, rank, tries, RANKS
):
    _expert_all_to_all_meet(addresses_ptr, state_ptr, rank, tries, RANKS)


@triton.jit
def _expert_all_to_all_tell(
    addresses_ptr, offsets_ptr, rank, E, RANKS, BLOCK_E: tl.constexpr
):
    """Tell every rank how many rows this one has for each expert."""
    offs_e = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    mask = offs_e < E
    ends = tl.load(offsets_ptr + offs_e, mask=mask)
    inner = mask & (offs_e > 0)
    counts = ends - tl.load(offsets_ptr + offs_e - 1, mask=inner, other=0)
    for peer in range(RANKS):
        peer_ptr = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
        # Counts lie past the flags.
        tl.store(peer_ptr + RANKS + rank * E + offs_e, counts, mask=mask)


@triton.jit
def _expert_all_to_all_plan_kernel(
    addresses_ptr,
    offsets_ptr,
    ends_ptr,
    bases_ptr,
    state_ptr,
    rank,
    capacity,
    tries,
    E,
    RANKS,
    LOCAL,  # experts of a rank
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    _expert_all_to_all_tell(addresses_ptr, offsets_ptr, rank, E, RANKS, BLOCK_E)
    _expert_all_to_all_meet(addresses_ptr, state_ptr, rank, tries, RANKS)
    own_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32))
    offs_r = tl.arange(0, BLOCK_R)[:, None]  # (BLOCK_R, 1)
    offs_l = tl.arange(0, BLOCK_L)  # (BLOCK_L,)
    mask = offs_l < LOCAL
    needed = tl.load(state_ptr)
    for peer in range(RANKS):
        e = peer * LOCAL + offs_l
        there = (offs_r < RANKS) & mask[None, :]
        ptrs = own_ptr + RANKS + offs_r * E + e[None, :]
        counts = tl.load(ptrs, mask=there, other=0)  # (BLOCK_R, BLOCK_L)
        # Rows of an expert are in the order of the ranks that they come from.
        total = tl.sum(counts, axis=0)
        before = tl.sum(tl.where(offs_r < rank, counts, 0), axis=0)
        ends = tl.cumsum(total, axis=0)
        # A choice's place in this rank's order, plus this, is its row there.
        inner = mask & (e > 0)
        start = tl.load(offsets_ptr + e - 1, mask=inner, other=0)
        tl.store(bases_ptr + e, ends - total + before - start, mask=mask)
        needed = tl.maximum(needed, tl.sum(total, axis=0))
        if peer == rank:
            held = tl.minimum(ends, capacity)
            tl.store(ends_ptr + offs_l, held, mask=mask)
    tl.store(state_ptr, needed)


@triton.jit
def _expert_all_to_all_send_kernel(
    x_ptr,
    experts_ptr,
    inverse_ptr,
    bases_ptr,
    addresses_ptr,
    places_ptr,
    first,  # in the addresses: the first rank's of what is written
    capacity,
    W,  # words of 4 bytes in a row
    E,
    LOCAL,
    k,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In int32 a row's offset would overflow past element 2**31.
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    # VEC divides it, which the compiler learns here: 16 bytes move at once.
    W = W // VEC * VEC
    words = tl.load(x_ptr + token * W + offs, mask=offs < W)
    for choice in range(token * k, token * k + k):
        e = tl.load(experts_ptr + choice)
        there = (e >= 0) & (e < E)
        e = tl.where(there, e, 0).to(tl.int32)
        row = tl.load(bases_ptr + e) + tl.load(inverse_ptr + choice)
        peer = e // LOCAL
        fits = there & (row < capacity)
        if fits:
            address = tl.load(addresses_ptr + first + peer)
            row_ptr = address.to(tl.pointer_type(tl.int32))
            row_ptr = tl.multiple_of(row_ptr, 16) + row.to(tl.int64) * W
            tl.store(row_ptr + offs, words, mask=offs < W)
        # -1 is a choice of no expert, and -2 one that did not fit.
        place = tl.where(there, -2, -1)
        place = tl.where(fits, peer * capacity + row, place)
        if tl.program_id(axis=1) == 0:
            tl.store(places_ptr + choice, place)


@triton.jit
def _expert_all_to_all_copy_kernel(
    y_ptr,
    ends_ptr,
    out_ptr,
    W,
    LOCAL,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # As many rows as there are, which the GPU alone knows
    W = W // VEC * VEC
    rows = tl.load(ends_ptr + LOCAL - 1)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    # In int32 a row's offset would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    for row in range(pid, rows, tl.num_programs(axis=0)):
        at = row * W + offs
        words = tl.load(y_ptr + at, mask=offs < W)
        tl.store(out_ptr + at, words, mask=offs < W)


@triton.jit
def _expert_all_to_all_sum_kernel(
    weights_ptr,
    places_ptr,
    addresses_ptr,
    state_ptr,
    out_ptr,
    first,  # in the addresses: that of the first rank's results
    capacity,
    H,
    CHOICES: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    H = H // VEC * VEC
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    # Where a rank did not come, what is read may be anything.
    if tl.load(state_ptr + 1) != 0:
        acc += float("nan")
    # The order of the choices, in every run; unrolled, so that loads overlap.
    for j in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + j)
        weight = tl.load(weights_ptr + token * CHOICES + j).to(tl.float32)
        peer = tl.maximum(place, 0) // capacity
        row = tl.maximum(place, 0) % capacity
        row_ptr = tl.load(addresses_ptr + first + peer).to(out_ptr.dtype)
        row_ptr = tl.multiple_of(row_ptr, 16) + row.to(tl.int64) * H
        mask = offs < tl.where(place < 0, 0, H)
        y = tl.load(row_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        # A row that did not fit makes its token's result NaN.
        lost = tl.where(place == -1, 0.0, float("nan"))
        acc += tl.where(place < 0, lost, weight * y)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + offs, out, mask=offs < H)


def _expert_all_to_all_vec(words):
    """Return how many words of a row a thread moves at once."""
    return 4 if words % 4 == 0 else 1


def _expert_all_to_all_block(words):
    """Return how many words of a row a program takes."""
    return min(EXPERT_ALL_TO_ALL_WORDS, triton.next_power_of_2(words))


def _expert_all_to_all_words(x):
    """Return the rows of a matrix as words of 4 bytes."""
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    return x.view(torch.int32)


def _expert_all_to_all_meeting(addresses, state, rank):
    """Return the arguments of a barrier."""
    # The interpreter's tries take longer.
    tries = EXPERT_ALL_TO_ALL_TRIES >> (8 if state.device.type == "cpu" else 0)
    return addresses, state, rank, tries, int(addresses.shape[1])


def _expert_all_to_all_check(name, x, rows, other):
    """Raise for rows that do not fit the memory, or tensors elsewhere."""
    if x.dtype != rows.dtype:
        raise TypeError(f"{name} takes rows of {rows.dtype}, not {x.dtype}")
    if x.ndim != 2 or x.shape[1] != rows.shape[1]:
        raise ValueError(
            f"{name} takes rows of (tokens, {rows.shape[1]}), not "
            f"{tuple(x.shape)}"
        )
    devices = {t.device for t in (x, rows, *other)}
    if len(devices) > 1:
        raise ValueError(f"{name} takes tensors on one device, not {devices}")


def _expert_all_to_all_no_gradient(name, *tensors):
    """Raise for what requires grad."""
    wanted = torch.is_grad_enabled()
    if wanted and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{name} has no gradient, which an argument requires")


def _expert_all_to_all_check_dispatch(
    x, experts, inverse, offsets, scales, memory_rows, memory_scales, E
):
    """Raise for what the op does not take."""
    name = "expert_all_to_all_dispatch"
    others = experts, inverse, offsets
    _expert_all_to_all_check(name, x, memory_rows, others)
    if experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name} takes experts of int32 or int64, not {experts.dtype}"
        )
    if experts.ndim != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name} takes experts of ({x.shape[0]}, k), not "
            f"{tuple(experts.shape)}"
        )
    for t, numel in ((inverse, experts.numel()), (offsets, E)):
        if t.dtype != torch.int32 or t.numel() != numel:
            raise ValueError(
                f"{name} takes inverse and offsets of moe_routing for "
                f"{experts.numel()} choices of {E} experts, not {t.dtype} of "
                f"{tuple(t.shape)}"
            )
    if (scales is None) != (memory_scales is None):
        raise ValueError(f"{name} takes scales where its memory has them")
    if scales is not None:
        wanted = x.shape[0], memory_scales.shape[1]
        if scales.dtype != torch.float32 or tuple(scales.shape) != wanted:
            raise ValueError(
                f"{name} takes scales of float32 and {wanted}, not "
                f"{scales.dtype} and {tuple(scales.shape)}"
            )


def _expert_all_to_all_check_combine(y, weights, places, ends, results):
    """Raise for what the op does not take."""
    name = "expert_all_to_all_combine"
    _expert_all_to_all_check(
        name, results if y is None else y, results, (weights, places, ends)
    )
    if y is not None and y.shape[0] != results.shape[0]:
        raise ValueError(
            f"{name} takes as many rows as its memory has, {len(results)}, "
            f"not {len(y)}"
        )
    if weights.dtype not in EXPERT_ALL_TO_ALL_FLOATS:
        raise TypeError(f"{name} takes float weights, not {weights.dtype}")
    if weights.ndim != 2 or weights.shape != places.shape:
        raise ValueError(
            f"{name} takes weights of {tuple(places.shape)}, not "
            f"{tuple(weights.shape)}"
        )


def _expert_all_to_all_is_own(name, tensor, own):
    """Raise for a copy: other ranks know where the memory itself is."""
    if tensor.data_ptr() != own:
        raise RuntimeError(
            f"{name} takes the memory that other ranks have the address of, "
            "and got a copy: torch.compile with Inductor makes none"
        )


def _expert_all_to_all_dispatch_launch(
    x,
    experts,
    inverse,
    offsets,
    scales,
    memory_rows,
    memory_scales,
    addresses,
    state,
    rank,
    E,
    own,
):
    _expert_all_to_all_check_dispatch(
        x, experts, inverse, offsets, scales, memory_rows, memory_scales, E
    )
    _expert_all_to_all_is_own("expert_all_to_all_dispatch", memory_rows, own)
    capacity, (T, k) = memory_rows.shape[0], experts.shape
    meeting = _expert_all_to_all_meeting(addresses, state, rank)
    RANKS = meeting[-1]
    LOCAL = E // RANKS
    experts, inverse = experts.contiguous(), inverse.contiguous()
    offsets = offsets.contiguous()
    ends = offsets.new_empty(LOCAL)
    bases = torch.empty_like(offsets)
    places = inverse.new_empty((T, k))
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        _expert_all_to_all_plan_kernel[(1,)](
            *(addresses, offsets, ends, bases, state),
            *(rank, capacity, meeting[3], E, RANKS, LOCAL),
            BLOCK_R=triton.next_power_of_2(RANKS),
            BLOCK_E=triton.next_power_of_2(E),
            BLOCK_L=triton.next_power_of_2(LOCAL),
        )
        for sent, part in ((x, 1), (scales, 2)):
            if sent is None or T == 0:
                continue
            words = _expert_all_to_all_words(sent)
            W = words.shape[1]
            BLOCK = _expert_all_to_all_block(W)
            _expert_all_to_all_send_kernel[(T, triton.cdiv(W, BLOCK))](
                *(words, experts, inverse, bases, addresses, places),
                *(part * RANKS, capacity, W, E, LOCAL, k),
                VEC=_expert_all_to_all_vec(W),
                BLOCK=BLOCK,
            )
        # All rows are here when the ranks have met again.
        _expert_all_to_all_barrier_kernel[(1,)](*meeting, num_warps=1)
    return ends, places


def _expert_all_to_all_combine_launch(
    y, weights, places, ends, results, addresses, state, rank, own
):
    _expert_all_to_all_check_combine(y, weights, places, ends, results)
    _expert_all_to_all_is_own("expert_all_to_all_combine", results, own)
    (T, k), (capacity, H) = places.shape, results.shape
    out = results.new_empty((T, H))
    vec = 16 // results.element_size()
    meeting = _expert_all_to_all_meeting(addresses, state, rank)
    with torch.accelerator.device_index(results.device.index):
        if y is not None:
            words = _expert_all_to_all_words(y)
            W = words.shape[1]
            BLOCK = _expert_all_to_all_block(W)
            copies = min(capacity, EXPERT_ALL_TO_ALL_COPIES)
            _expert_all_to_all_copy_kernel[copies, triton.cdiv(W, BLOCK)](
                *(words, ends, results.view(torch.int32), W, ends.shape[0]),
                VEC=_expert_all_to_all_vec(W),
                BLOCK=BLOCK,
            )
        _expert_all_to_all_barrier_kernel[(1,)](*meeting, num_warps=1)
        if T > 0:
            # As many bytes as of words
            BLOCK = _expert_all_to_all_block(H) * vec // 4
            _expert_all_to_all_sum_kernel[(T, triton.cdiv(H, BLOCK))](
                *(weights.contiguous(), places.contiguous(), addresses),
                *(state, out, 3 * meeting[-1], capacity, H),
                CHOICES=int(k),
                VEC=vec,
                BLOCK=BLOCK,
            )
    return out


@custom_op(
    f"{EXPERT_ALL_TO_ALL_NAMESPACE}::expert_all_to_all_send",
    mutates_args=("memory_rows", "memory_scales", "state"),
)
def expert_all_to_all_send(
    x: torch.Tensor,
    experts: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor | None,
    memory_rows: torch.Tensor,
    memory_scales: torch.Tensor | None,
    addresses: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    num_experts: int,
    own: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``expert_all_to_all_dispatch`` does; return ends and places.

    Rounding: rows and scales arrive as they were sent.
    """
    return _expert_all_to_all_dispatch_launch(
        *(x, experts, inverse, offsets, scales, memory_rows, memory_scales),
        *(addresses, state, rank, num_experts, own),
    )


@expert_all_to_all_send.register_fake
def _expert_all_to_all_send_fake(
    x,
    experts,
    inverse,
    offsets,
    scales,
    memory_rows,
    memory_scales,
    addresses,
    state,
    rank,
    num_experts,
    own,
):
    _expert_all_to_all_check_dispatch(
        *(x, experts, inverse, offsets, scales, memory_rows, memory_scales),
        num_experts,
    )
    ends = offsets.new_empty(num_experts // addresses.shape[1])
    return ends, inverse.new_empty(experts.shape)


@custom_op(
    f"{EXPERT_ALL_TO_ALL_NAMESPACE}::expert_all_to_all_receive",
    mutates_args=("results", "state"),
)
def expert_all_to_all_receive(
    y: torch.Tensor | None,
    weights: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
    results: torch.Tensor,
    addresses: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    own: int,
) -> torch.Tensor:
    """Do what ``expert_all_to_all_combine`` does."""
    return _expert_all_to_all_combine_launch(
        y, weights, places, ends, results, addresses, state, rank, own
    )


@expert_all_to_all_receive.register_fake
def _expert_all_to_all_receive_fake(
    y, weights, places, ends, results, addresses, state, rank, own
):
    _expert_all_to_all_check_combine(y, weights, places, ends, results)
    return results.new_empty((places.shape[0], results.shape[1]))


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
EXPERT_ALL_TO_ALL_LIBRARY = Library(EXPERT_ALL_TO_ALL_NAMESPACE, "FRAGMENT")
EXPERT_ALL_TO_ALL_LIBRARY.impl(
    "expert_all_to_all_send", _expert_all_to_all_dispatch_launch, "CUDA"
)
EXPERT_ALL_TO_ALL_LIBRARY.impl(
    "expert_all_to_all_receive", _expert_all_to_all_combine_launch, "CUDA"
)


def _expert_all_to_all_allocator(ranks, rank, group):
    """Return what allocates symmetric memory, or plain memory for one rank."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if ranks == 1:
        device = device or torch.device("cpu")
        kind = {"dtype": torch.uint8, "device": device}
        return lambda size: [torch.empty(size, **kind)]

    def allocate(size):
        here = torch.device("cuda", torch.cuda.current_device())
        mine = symm_mem.empty(size, dtype=torch.uint8, device=here)
        name = (group or dist.group.WORLD).group_name
        handle = symm_mem.rendezvous(mine, name)
        every = range(ranks)
        parts = [handle.get_buffer(r, (size,), torch.uint8) for r in every]
        # The memory lasts as long as the tensor that was allocated.
        parts[rank] = mine
        return parts

    return allocate


def expert_all_to_all_memory(
    tokens: int,
    k: int,
    hidden: int,
    num_experts: int,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype = torch.bfloat16,
    groups: int = 0,
    capacity: int | None = None,
    group: dist.ProcessGroup | None = None,
    allocate: Callable[[int], Sequence[torch.Tensor]] | None = None,
) -> ExpertAllToAllMemory:
    """Return memory that all ranks of a group share, for the other functions.

    All ranks of ``group``, by default of all processes, call it together and
    with the same numbers; it waits for them. ``tokens`` is the most that a rank
    has in a call, each with ``k`` choices of ``num_experts`` experts, of which
    each rank has as many: expert e is on rank e // (num_experts / ranks).

    Rows have ``hidden`` numbers of ``dtype``: float16, bfloat16, float32,
    float8_e4m3fn or float8_e5m2; and ``groups`` scales, 1 for one per row and
    hidden / 128 for groups of 128. Results have as many numbers of
    ``out_dtype``: float16, bfloat16 or float32. A row of either is a multiple
    of 16 bytes.

    ``capacity`` is how many rows a rank can get in a call. By default it is
    ranks * tokens * k, so that any choices fit; less saves memory. Rows that do
    not fit are not sent, and the results of their tokens are NaN: whoever looks
    at results, or at a loss, sees it. ``expert_all_to_all_check`` says how many
    rows were needed.

    ``allocate`` takes a number of bytes and returns a uint8 tensor on each
    rank, by rank, each at a multiple of 16 bytes: by default, PyTorch's
    symmetric memory, or plain memory where there is one rank. Between calls of
    this function, memory serves any number of layers whose calls are in one
    order on all ranks.

    Raises TypeError for other dtypes, and ValueError for other sizes.
    """
    name = "expert_all_to_all_memory"
    ranks, rank = 1, 0
    if dist.is_initialized():
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    floats = *EXPERT_ALL_TO_ALL_FLOATS, *EXPERT_ALL_TO_ALL_EIGHT
    if dtype not in floats or out_dtype not in EXPERT_ALL_TO_ALL_FLOATS:
        raise TypeError(f"{name} does not take {dtype} and {out_dtype}")
    if min(tokens, k, hidden) < 1 or groups < 0:
        raise ValueError(
            f"{name} takes tokens, k and hidden from 1 on and no negative "
            f"groups, not {tokens}, {k}, {hidden} and {groups}"
        )
    for kind in (dtype, out_dtype):
        if hidden * kind.itemsize % 16:
            raise ValueError(
                f"{name} takes rows of a multiple of 16 bytes, not {hidden} "
                f"numbers of {kind}"
            )
    most = EXPERT_ALL_TO_ALL_EXPERTS
    if not ranks <= num_experts <= most or num_experts % ranks:
        raise ValueError(
            f"{name} takes up to {most} experts, as many on each of {ranks} "
            f"ranks, not {num_experts}"
        )
    if ranks > EXPERT_ALL_TO_ALL_RANKS:
        raise ValueError(f"{name} takes up to 64 ranks, not {ranks}")
    capacity = ranks * tokens * k if capacity is None else capacity
    if not 1 <= capacity <= EXPERT_ALL_TO_ALL_PLACES // ranks:
        raise ValueError(
            f"{name} takes a capacity from 1 to 2**30 / {ranks}, not {capacity}"
        )
    if allocate is None:
        allocate = _expert_all_to_all_allocator(ranks, rank, group)
    # Flags and counts, rows, scales, results
    rows, results = hidden * dtype.itemsize, hidden * out_dtype.itemsize
    flags = 4 * ranks * (1 + num_experts)
    sizes = flags, capacity * rows, 4 * capacity * groups, capacity * results
    parts = [allocate(size if size else 16) for size in sizes]
    for part in parts:
        part[rank].zero_()
    if ranks > 1:
        if parts[0][rank].device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group)  # none writes before all are zero
    addresses = [[int(t.data_ptr()) for t in part] for part in parts]
    mine = [p[rank][:size] for p, size in zip(parts, sizes, strict=True)]
    device = mine[0].device
    scales = mine[2].view(torch.float32).view(capacity, groups)
    return ExpertAllToAllMemory(
        rows=mine[1].view(dtype).view(capacity, hidden),
        scales=scales if groups else None,
        results=mine[3].view(out_dtype).view(capacity, hidden),
        addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
        state=torch.zeros(2, dtype=torch.int32, device=device),
        rank=rank,
        experts=num_experts,
        own=(addresses[1][rank], addresses[3][rank]),
        kept=tuple(map(tuple, parts)),
    )


def expert_all_to_all_dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    memory: ExpertAllToAllMemory,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Send each token's row to the ranks that have its experts.

    Takes x (T, hidden) of the memory's dtype, with T from 0 to its ``tokens``,
    which differs from rank to rank as it likes, and what ``moe_routing`` says
    of it: experts (T, k) of int32 or int64, inverse (T * k,) and offsets
    (num_experts,) of int32. A choice outside of [0, num_experts), such as -1,
    is not sent. With float8 come ``scales`` (T, groups) of float32, as
    ``quantize`` makes them for (1, -1) or (1, 128).

    The results are

    * rows (capacity, hidden): what all ranks sent to this one, in the order of
      its experts; those of an expert from rank 0 first, each rank's in the
      order of its tokens. Rows past the last expert's are what was there.
    * scales (capacity, groups), those of the rows, or None.
    * ends (num_experts / ranks,), int32: where each expert's rows end, the
      ``offsets`` of ``grouped_matmul``.
    * places (T, k), int32: where each choice went, for
      ``expert_all_to_all_combine``.

    Rows and scales are the memory itself, not a copy: they last until this rank
    calls the next dispatch with that memory. All ranks of the group make the
    same calls in the same order, each on one stream, and at most one combine
    for each dispatch. No CPU waits, and a CUDA graph can hold the calls. Under
    ``torch.compile``, a backend that copies the memory, as "aot_eager" does,
    raises RuntimeError; Inductor does not copy it.

    Deterministic, without a gradient. Raises TypeError for other dtypes, and
    ValueError for other shapes, tensors on two devices, and what requires grad.
    """
    _expert_all_to_all_no_gradient("expert_all_to_all_dispatch", x, scales)
    ends, places = expert_all_to_all_send(
        *(x, experts, inverse, offsets, scales, memory.rows, memory.scales),
        *(memory.addresses, memory.state, memory.rank, memory.experts),
        memory.own[0],
    )
    return memory.rows, memory.scales, ends, places


def expert_all_to_all_combine(
    y: torch.Tensor | None,
    weights: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
    memory: ExpertAllToAllMemory,
) -> torch.Tensor:
    """Read back what experts made of this rank's rows; add up each token's.

    Takes y (capacity, hidden) of the memory's ``out_dtype``, whose row r is the
    result of row r of a dispatch; its ends and places; and weights (T, k) of
    float16, bfloat16 or float32. The rows that the ends count are copied to
    where other ranks read them. An expert that writes to ``memory.results``
    spares the copy; then y is None.

    The result is (T, hidden) of the same dtype: token t is the sum over j, from
    0 to k - 1, of ``weights[t, j]`` times the result of choice j. A choice of
    no expert adds nothing. Where the row of a choice did not fit into the
    capacity of its rank, the token is NaN, and where this rank waited in vain
    for another, all are. The other may have come later: its results may then be
    wrong without being NaN, so no rank's count.

    Deterministic, without a gradient: the order of the sum is that of the
    choices. Other ranks make the call as well, also with no tokens. Raises
    TypeError for other dtypes, and ValueError for other shapes, tensors on two
    devices, and what requires grad.

    Rounding: sums are in float32, and each is rounded once.
    """
    _expert_all_to_all_no_gradient("expert_all_to_all_combine", y, weights)
    return expert_all_to_all_receive(
        *(y, weights, places, ends, memory.results, memory.addresses),
        *(memory.state, memory.rank, memory.own[1]),
    )


def expert_all_to_all_check(memory: ExpertAllToAllMemory) -> None:
    """Raise RuntimeError if a call with this memory lost rows, or a rank.

    It waits for the GPU: call it where a program waits anyway. A rank that
    waited in vain for another raises, but not one that came too late, so call
    it on all ranks, and stop all of them where one raises.
    """
    needed, late = memory.state.tolist()
    if late:
        raise RuntimeError(
            "expert_all_to_all waited for a rank that did not come, and the "
            "memory cannot be used any more"
        )
    if needed > memory.rows.shape[0]:
        raise RuntimeError(
            f"expert_all_to_all had a capacity of {memory.rows.shape[0]} rows, "
            f"and a rank was to get {needed}"
        )
