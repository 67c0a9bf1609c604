# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Send the tokens of a mixture of experts to the GPUs that have the experts, and
# sum what returns, with counts that only the GPUs know."""
# dtypes = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
# backward = false
# deterministic = true
# longer = "two ops, the memory that ranks share, and checks of both"
# gpus = 2
# ///
r"""
Expert parallelism: send tokens to experts on other GPUs
========================================================

The experts of a large model do not fit on one GPU, so each GPU has some of
them. Then a layer sends each token's row to the GPUs that have its experts
(*dispatch*), and adds up what they return (*combine*). Both are an *all-to-all*
(each GPU sends to each) whose sizes depend on the router. With experts on one
GPU, take ``moe_layer.py``; between hosts, a library such as NCCL or DeepEP.

After this page you can

* find, without the CPU, the place of each row in another GPU's memory;
* exchange counts of rows between GPUs while no CPU waits;
* run a whole layer of experts on several GPUs, also in a CUDA graph.
"""

# sphinx_gallery_tags = ["several gpus", "atomics", "memory bound"]
import math
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import silu

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.ranks import join_ranks, meet_ranks, shared_bytes
from triton_gallery_ops.moe_routing import (
    moe_routing_permutation,
    moe_routing_with_permutation,
)

RANK, RANKS = join_ranks()


def say(*texts, **options):
    """Print on rank 0."""
    if RANK == 0:
        print(*texts, **options)


generator = torch.Generator().manual_seed(RANK)


def make_inputs(T):
    """Return rows, experts and weights of this rank's tokens."""
    x = torch.randn(T, H, generator=generator).to(DEVICE, DTYPE)
    scores = torch.rand(T, E, generator=generator).to(DEVICE)
    weights, experts = scores.topk(k)
    return x, experts.int(), weights


def layer_weights(F=32):
    """Return the router, and gate, up and down of all experts."""
    same = torch.Generator().manual_seed(99)  # on all ranks
    shapes = (H, E), (E, 2 * F, H), (E, H, F)
    drawn = (torch.randn(shape, generator=same) for shape in shapes)
    router, gate_up, down = (w.to(DEVICE, DTYPE) for w in drawn)
    # Scaled so that no choice of a token has nearly all the weight
    return router / H**0.5, gate_up / H**0.5, down / F**0.5


def megabytes_sent(T):
    """Return the megabytes that a GPU sends to others, on average."""
    return T * k * (RANKS - 1) / RANKS * H * DTYPE.itemsize / 1e6


def check_tokens(x, experts):
    """Assert that all ranks' memory is for such tokens."""
    T = len(x)
    assert 0 < T <= max(TOKENS), "no tokens, or more than memory is for"
    assert (x.dtype, experts.dtype) == (DTYPE, torch.int32)
    assert (x.shape, experts.shape) == ((T, H), (T, k))
    assert x.is_contiguous()
    assert experts.is_contiguous()


def places_torch(experts):
    """Return the row of each choice on the rank of its expert."""
    _, inverse, offsets = moe_routing_permutation(experts, E)
    own = offsets.diff(prepend=offsets.new_zeros(1))
    counts = own.new_empty(RANKS, E)
    dist.all_gather([*counts], own)  # fills the rows of counts
    total = counts.sum(0).view(RANKS, LOCAL)
    start = (total.cumsum(1) - total).flatten()  # (E,)
    lower = counts[:RANK].sum(0)  # (E,)
    start_here = offsets - own  # (E,)
    base = start + lower - start_here  # int64, as sums are
    return base.int()[experts.flatten()] + inverse


def combine_torch(y, weights, back):
    """Return the weighted sum of each token's results."""
    by_expert, inverse, sent, got = back
    y_by_rank = torch.empty_like(y).index_copy_(0, by_expert, y)
    mine = y.new_empty(sum(sent), H)
    dist.all_to_all_single(mine, y_by_rank, sent, got)
    mine = mine[inverse].view(*weights.shape, H)
    return (mine * weights[:, :, None]).sum(1).to(y.dtype)


def dispatch_op(x, experts, memory):
    """Dispatch by the op."""
    _, inverse, offsets = moe_routing_permutation(experts, E)
    return expert_all_to_all_dispatch(x, experts, inverse, offsets, memory)


def judge(kernel, launch, expected):
    """Launch a kernel between barriers; say if it is right on all ranks."""
    if kernel is None:
        return "not solved yet"
    meet_ranks()
    out = launch(kernel)
    meet_ranks()
    n = len(expected)
    right = torch.equal(out[:n], expected) and not out[n:].any()
    verdict = torch.tensor(int(right), device=DEVICE)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return "right" if verdict.item() else "wrong"


def judge_scale(kernel):
    """Check exercise 1."""
    _, experts, _ = make_inputs(7)
    scales = torch.arange(1.0, 8.0, device=DEVICE) + 10 * RANK  # none is 0
    wide = scales[:, None].expand(7, H).to(DTYPE)  # as rows, which we can send
    expected = dispatch_torch(wide, experts)[0][:, 0].float()
    there, table = shared(7 * k * RANKS, dtype=torch.float32)
    given = scales, experts, places_torch(experts), table, 7 * k, k, LOCAL

    def launch(kernel):
        kernel[(triton.cdiv(7 * k, 4),)](*given, BLOCK=4)
        return there

    return judge(kernel, launch, expected)


def judge_load(kernel):
    """Check exercise 2."""
    counts = torch.arange(RANKS * E, device=DEVICE).view(RANKS, E).int() % 7
    expected = counts.sum(0).view(RANKS, LOCAL).sum(1).int()
    out = torch.zeros(RANKS, dtype=torch.int32, device=DEVICE)

    def launch(kernel):
        block = triton.next_power_of_2(E)
        kernel[(RANKS,)](counts, out, RANKS, E, LOCAL, BLOCK=block)
        return out

    return judge(kernel, launch, expected)


# %%
# In PyTorch
# ----------
#
# RANKS processes run this script, one for each GPU; this one is ``RANK``. Each
# has LOCAL experts: expert e is on rank ``e // LOCAL``. A token has k choices;
# choice j of token t has the number ``t * k + j``. The gallery's op
# ``moe_routing_permutation`` sorts choices by expert: ``order`` lists them,
# ``inverse`` is each choice's position in that list, and ``offsets`` is where
# each expert's choices end. For choices of experts 1, 1 and 0, these are
# (2, 0, 1), (1, 2, 0) and (1, 3).
#
# ``all_to_all_single`` moves rows between ranks, one for each choice: a token
# with two choices on one rank goes there twice, here and in our kernels. The
# CPU passes how many rows go where, so it waits for the counts. Rows arrive
# sorted by sender, then by expert; a last, stable sort orders them by expert.

ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# As in DeepSeek-V3: experts, choices of a token, elements of its row
E, k, H = (256, 8, 7168) if ON_GPU else (4 * RANKS, 2, 128)
TOKENS = [64, 512, 4096] if ON_GPU else [8]
LOCAL = E // RANKS  # experts of a rank
assert E % RANKS == 0, "each rank has as many experts"


def dispatch_torch(x, experts):  # (T, H), and (T, k) of int32
    """Return rows by expert, where each ends, and what the way back needs."""
    order, inverse, offsets = moe_routing_permutation(experts, E)
    counts = offsets.diff(prepend=offsets.new_zeros(1))  # (E,), sent to each
    theirs = torch.empty_like(counts)  # from each rank, for each expert here
    dist.all_to_all_single(theirs, counts)
    both = torch.stack([counts, theirs]).view(2, RANKS, LOCAL)
    sent, got = both.sum(2).tolist()  # to each rank, from each; the CPU waits
    rows = x.new_empty(sum(got), H)  # sorted by sender, then by expert
    dist.all_to_all_single(rows, x[order // k], got, sent)
    expert = torch.arange(LOCAL, device=DEVICE).repeat(RANKS)  # of each count
    # output_size: otherwise repeat_interleave waits for the GPU as well
    of_row = expert.repeat_interleave(theirs, output_size=len(rows))
    by_expert = of_row.sort(stable=True).indices
    ends = theirs.view(RANKS, LOCAL).sum(0).cumsum(0).int()  # (LOCAL,)
    return rows[by_expert], ends, (by_expert, inverse, sent, got)


if __name__ == "__main__":
    say(f"{RANKS} ranks, {LOCAL} experts on each, {k} choices of a token")
    for T in TOKENS:
        say(f"{T} tokens: a GPU sends {megabytes_sent(T):.3g} MB to others")

# %%
# The first kernel
# ----------------
#
# ``places[c]`` is the row, on its expert's rank, that choice c goes to.
# ``table`` is an int64 tensor on the GPU: the address of each rank's memory.
# ``.to`` makes an address a pointer to numbers of x's dtype. A program loads a
# part of a token's row once and stores it k times. Triton sees at the launch
# that 16 divides H, and ``tl.multiple_of`` tells it that 16 divides the
# address, too. So a thread may store 16 bytes at once.

KEPT = []  # memory of all ranks, which tables do not keep


def shared(*shape, dtype):
    """Return this rank's tensor, all zero, and all ranks' addresses.

    All ranks call it in the same order.
    """
    parts = shared_bytes(math.prod(shape) * dtype.itemsize)
    KEPT.append(parts)
    table = torch.tensor([part.data_ptr() for part in parts], device=DEVICE)
    return parts[RANK].view(dtype).view(shape), table


@triton.jit
def send_kernel(
    x_ptr, experts_ptr, places_ptr, table_ptr, k, LOCAL, H, BLOCK: tl.constexpr
):
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + token * H + offs, mask=offs < H)
    for choice in range(token * k, token * k + k):
        expert = tl.load(experts_ptr + choice)
        row = tl.load(places_ptr + choice).to(tl.int64)
        rows_ptr = tl.load(table_ptr + expert // LOCAL).to(x_ptr.dtype)
        rows_ptr = tl.multiple_of(rows_ptr, 16)
        tl.store(rows_ptr + row * H + offs, x, mask=offs < H)


def send(x, experts, places, table, BLOCK=2048):
    """Store each row where its choices go, for this page's H, k and LOCAL."""
    check_tokens(x, experts)  # T <= max(TOKENS), dtypes, shapes, contiguous
    assert (places.dtype, places.numel()) == (torch.int32, experts.numel())
    grid = len(x), triton.cdiv(H, BLOCK)  # tokens, and parts of a row
    send_kernel[grid](x, experts, places, table, k, LOCAL, H, BLOCK=BLOCK)


# %%
# Which row? Received rows are sorted by expert, then by sender. Let the
# receiver, rank 1 of two, have experts A and B. Sender 0 has 3 choices of A and
# 1 of B. Sender 1, the receiver itself, has 7: 5 of rank 0's experts, then 2 of
# A, which are at its positions 5 and 6.
#
# .. code-block:: text
#
#    row at the receiver      0  1  2  3  4  5
#    expert                   A  A  A  A  A  B
#    sender                   0  0  0  1  1  0
#    position at the sender   0  1  2  5  6  3
#
# At the receiver, an expert's rows begin at row ``start``. The first ``lower``
# of them are from lower ranks; this sender's come next. At the sender, sorted
# choices of the expert begin at position ``start_here``. So the choice at
# position ``inverse`` goes to row ``base + inverse``, where ``base`` is ``start
# + lower - start_here``. For A and sender 1, that is 0 + 3 - 5 = -2.
# ``places_torch``, in the fold at the top, does this with all ranks' counts.

CAPACITY = RANKS * max(TOKENS) * k  # rows: the most, if all go to one rank
rows, rows_table = shared(CAPACITY, H, dtype=DTYPE)

# %%
# Is it right?
# ------------
#
# Rows are only moved, in the order of ``dispatch_torch``: nothing may differ.

x, experts, weights = make_inputs(max(TOKENS))  # in the fold at the top
expected, expected_ends, back = dispatch_torch(x, experts)
send(x, experts, places_torch(experts), rows_table)
meet_ranks()  # the CPU waits until all ranks have stored
torch.testing.assert_close(rows[: len(expected)], expected, rtol=0, atol=0)

if __name__ == "__main__":
    say(f"rank 0 got {len(expected)} rows, all as by all_to_all_single")

# %%
# How fast?
# ---------
#
# Only sending is timed, on all ranks at once: counts are known. *PyTorch* is
# ``all_to_all_single`` of as many rows. Rates count what a GPU sends to others
# on average, the MB printed above, and no rows that stay.

if __name__ == "__main__" and DEVICE.type == "cuda":
    times_send = {}
    for T in TOKENS:
        few = x[:T], experts[:T]
        places, (*_, sent, got) = places_torch(few[1]), dispatch_torch(*few)[2]
        times_send[T] = gpu_time(
            {
                "Triton, this page": partial(send, *few, places, rows_table),
                "PyTorch": partial(
                    dist.all_to_all_single,
                    rows.new_empty(sum(got), H),
                    x[:T].repeat(k, 1),  # as many rows, in any order
                    got,
                    sent,
                ),
            },
            prepare=dist.barrier,
        )
        meet_ranks()
    results_send = rate_table(times_send, "tokens", "GB/s", megabytes_sent)
    say(results_send.to_string())
    for T, of in times_send.items():
        ms, other = of["Triton, this page"][0], of["PyTorch"][0]
        say(f"{T} tokens, {RANKS} GPUs: {ms:.3f} ms,", end=" ")
        say(f"PyTorch / this page {other / ms:.2f}")

# %%
# Counts that no CPU sees
# -----------------------
#
# ``dispatch_torch`` has the CPU wait for the counts (``tolist``), and after
# ``send`` the CPU waited for all ranks (``meet_ranks``). Now kernels wait for
# counts and rows, and the CPU waits for nothing. Each rank has a *pad* in
# symmetric memory: a flag for each rank, then E counts from each rank. On two
# ranks with two experts each:
#
# .. code-block:: text
#
#    rank 1's pad   flag of 0  flag of 1 | 4 counts from 0 | 4 counts from 1
#
# One program writes this rank's counts to all pads, waits at a barrier, and
# computes a ``base`` for each of the E experts from its own pad.
#
# The barrier, ``meet``, is that of ``peer_memory.py``. First it sets this
# rank's flag on every pad from 0 to 1. A flag may still be 1 from the barrier
# before, until the pad's owner has cleared it; then ``meet`` tries again. So
# two barriers in a row do not mix. Then it waits for each flag on its own pad
# and clears it. ``tl.atomic_cas(ptr, 0, 1)`` stores 1 where it finds 0, and
# returns what it found; ``scope="sys"`` is for other GPUs to see. Who sees a
# flag by ``acquire`` sees all that the other rank wrote before it set that flag
# by ``release``. A single thread sets and reads the flags. At the first
# ``tl.debug_barrier`` it waits for the stores of all other threads of the
# program, and at the last one they wait for it.


@triton.jit
def meet(pads_ptr, late_ptr, rank, tries, RANKS):
    """Wait for all ranks."""
    left = tries
    tl.debug_barrier()  # all threads have written before a flag is set
    for peer in range(RANKS):
        ptr = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32)) + rank
        was = tl.atomic_cas(ptr, 0, 1, sem="release", scope="sys")
        while (was != 0) & (left > 0):
            was = tl.atomic_cas(ptr, 0, 1, sem="release", scope="sys")
            left -= 1
    pad_ptr = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in range(RANKS):
        ptr = pad_ptr + peer
        was = tl.atomic_cas(ptr, 1, 0, sem="acquire", scope="sys")
        while (was != 1) & (left > 0):
            was = tl.atomic_cas(ptr, 1, 0, sem="acquire", scope="sys")
            left -= 1
    if left == 0:  # gave up, or came with the last try
        tl.store(late_ptr, 1)
    tl.debug_barrier()  # and all have waited before they read


@triton.jit
def barrier_kernel(pads_ptr, late_ptr, rank, tries, RANKS):
    meet(pads_ptr, late_ptr, rank, tries, RANKS)


_, pads = shared(RANKS * (1 + E), dtype=torch.int32)  # flags begin at 0
late = torch.zeros(1, dtype=torch.int32, device=DEVICE)
TRIES = 2**24 if ON_GPU else 2**20


def gpu_barrier():
    """Have the GPU wait for the other ranks' GPUs; the CPU goes on."""
    # One warp is enough: a single thread sets and sees the flags
    barrier_kernel[(1,)](pads, late, RANK, TRIES, RANKS, num_warps=1)


# %%
# A rank that failed must not keep the other GPUs busy forever, so ``meet``
# counts its tries. When none is left, ``late`` becomes 1, and the kernel goes
# on. From then on, ranks may be at different barriers, and results of any rank
# may be wrong, also where ``late`` is 0. ``dispatch`` does not look at
# ``late``, as the CPU would have to wait. Every 100 steps, say, take the
# maximum of ``late`` over all ranks. If that is 1, use no result since the
# check before, and have all ranks begin again with new memory.
#
# Now the plan. ``base`` begins at -``start_here``, and the loop over sources
# adds the counts of lower ranks. The last loop adds ``start``: rows are
# numbered from 0 on each rank, so the cumsum runs over one rank's experts at a
# time. Only after a rank was late does ``tl.minimum`` matter: its pad may then
# have counts of two calls, which would number rows past the memory.
#
# ``dispatch`` and ``combine``, like ``send``, are for this page's H, E, k and
# LOCAL, and for its memory. Nothing checks that experts are from 0 to E - 1.


@triton.jit
def plan_kernel(
    pads_ptr,
    offsets_ptr,
    bases_ptr,
    ends_ptr,
    late_ptr,
    rank,
    tries,
    RANKS,
    E,
    LOCAL,
    capacity,
    BLOCK: tl.constexpr,  # at least E
):
    offs = tl.arange(0, BLOCK)  # all experts
    # An expert starts where the previous one ends, and expert 0 at 0
    inside = (offs > 0) & (offs < E)
    start_here = tl.load(offsets_ptr + offs - 1, mask=inside, other=0)
    own = tl.load(offsets_ptr + offs, mask=offs < E) - start_here  # (BLOCK,)
    # To all pads, this rank's counts
    for peer in range(RANKS):
        pad_ptr = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(pad_ptr + RANKS + rank * E + offs, own, mask=offs < E)
    meet(pads_ptr, late_ptr, rank, tries, RANKS)  # after all warps' stores
    pad_ptr = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32))
    base = -start_here
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for source in range(RANKS):
        ptrs = pad_ptr + RANKS + source * E + offs
        counts = tl.load(ptrs, mask=offs < E, other=0)
        base += tl.where(source < rank, counts, 0)  # lower ranks' rows
        total += counts
    for peer in range(RANKS):
        mask = offs // LOCAL == peer  # the peer's experts
        ends = tl.cumsum(tl.where(mask, total, 0), axis=0)  # on the peer
        ends = tl.minimum(ends, capacity)
        # Not below 0: one expert's counts add up to capacity at most
        start = ends - total
        tl.store(bases_ptr + offs, base + start, mask=mask)
        if peer == rank:
            tl.store(ends_ptr + offs - rank * LOCAL, ends, mask=mask)


def dispatch(x, experts):
    """Return rows by expert, where each expert ends, and all places."""
    check_tokens(x, experts)  # before this rank's counts go to others
    _, inverse, offsets = moe_routing_permutation(experts, E)
    bases, ends = torch.empty_like(offsets), offsets.new_empty(LOCAL)
    tensors = pads, offsets, bases, ends, late
    BLOCK = triton.next_power_of_2(E)
    sizes = RANKS, E, LOCAL, CAPACITY
    plan_kernel[(1,)](*tensors, RANK, TRIES, *sizes, BLOCK=BLOCK)
    places = bases[experts.flatten()] + inverse
    send(x, experts, places, rows_table)
    gpu_barrier()
    return rows, ends, places  # the first ends[-1] rows, until the next call


# %%
# After the second barrier, all rows have come: ``barrier_kernel`` starts after
# ``send_kernel`` has ended, in the same stream, so its ``release`` covers these
# rows. Can a rank overwrite rows that another rank still computes with? No: it
# first waits at the next dispatch's first barrier, in ``plan_kernel``, which
# the other rank launches after its computation, in the same stream. Counts on a
# pad may be overwritten after the second barrier: every rank has read its pad.

if __name__ == "__main__":
    rows.zero_()
    meet_ranks()
    came, ends, places = dispatch(x, experts)
    assert torch.equal(came[: len(expected)], expected)
    assert torch.equal(ends, expected_ends)
    assert late.item() == 0, "a rank did not come to the barrier"
    say("the same rows, in the same order")

# %%
# Fetch and add up
# ----------------
#
# The way back needs no plan. A token's rank knows where its k rows went, and
# fetches the results from there, once all ranks have met. It adds them up in
# float32, in the order of the choices. Experts write results into ``returned``,
# symmetric memory like ``rows``. They may write there again only when all ranks
# have fetched, so ranks have to meet between a combine and the experts' next
# writes. A dispatch in between does that.
#
# In the check, experts add their rank's number to a row. Storing the weighted
# sum rounds it by half an ``eps`` of DTYPE at most. For the sum in float32 we
# allow 2 k float32 ``eps`` of the largest result, a margin that we chose.


@triton.jit
def fetch_kernel(
    experts_ptr,
    places_ptr,
    weights_ptr,
    table_ptr,
    out_ptr,
    LOCAL,
    H,
    k: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(k):  # unrolled, so that loads overlap
        choice = token * k + j
        expert = tl.load(experts_ptr + choice)
        row = tl.load(places_ptr + choice).to(tl.int64)
        y_ptr = tl.load(table_ptr + expert // LOCAL).to(out_ptr.dtype)
        # Another GPU's memory, or this one's
        y_ptr = tl.multiple_of(y_ptr, 16) + row * H
        y = tl.load(y_ptr + offs, mask=offs < H)
        acc += tl.load(weights_ptr + choice) * y.to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + offs, out, mask=offs < H)


returned, returned_table = shared(CAPACITY, H, dtype=DTYPE)


def combine(experts, weights, places, BLOCK=2048):
    """Return weighted sums of rows of ``returned``, once all are there."""
    T, k = experts.shape
    assert experts.dtype == places.dtype == torch.int32
    assert (weights.shape, places.shape) == ((T, k), (T * k,))
    assert experts.is_contiguous()
    assert weights.is_contiguous()
    out = torch.empty(T, H, dtype=DTYPE, device=DEVICE)
    gpu_barrier()
    grid = T, triton.cdiv(H, BLOCK)
    tensors = experts, places, weights, returned_table, out
    fetch_kernel[grid](*tensors, LOCAL, H, k=k, BLOCK=BLOCK)
    return out


if __name__ == "__main__":
    returned[: len(expected)] = expected + RANK  # stands for the experts
    # Of 64 tokens: in float64, the rows of all may take gigabytes
    x_64, experts_64, weights_64 = x[:64], experts[:64], weights[:64]
    out = combine(experts_64, weights_64, places[: experts_64.numel()])
    wide = x_64.double()[:, None] + (experts_64 // LOCAL)[:, :, None]
    exact = (wide.to(DTYPE) * weights_64.double()[:, :, None]).sum(1)
    stored = torch.finfo(DTYPE).eps / 2 * exact.abs()  # rounding, once
    summed = torch.finfo(torch.float32).eps * 2 * k * exact.abs().max()
    worst = ((out - exact).abs() / (stored + summed)).max().item()
    assert worst <= 1, worst  # a NaN is not, either
    say(f"sums: error / allowed: {worst:.2f} at most, on rank 0")
    say(f"memory for each direction: {rows.nbytes:,} bytes on a GPU")

# %%
# The op
# ------
#
# ``expert_all_to_all_dispatch`` and ``expert_all_to_all_combine`` are this
# gallery's op. They also take float8 rows with their scales, choices of no
# expert (-1), ranks without tokens, and a ``capacity``: memory for fewer rows
# than this page's CAPACITY, which grows with RANKS. Rows that do not fit are
# not sent, and the results of their tokens are NaN. The op's ``places`` are
# ``rank * capacity + row``, so its combine takes no experts.

from triton_gallery_ops.expert_all_to_all import (
    expert_all_to_all_check,
    expert_all_to_all_combine,
    expert_all_to_all_dispatch,
    expert_all_to_all_memory,
)

# %%
# All ranks create memory together, once, and then pass it to each call. Without
# ``allocate``, ``expert_all_to_all_memory`` takes PyTorch's symmetric memory.
# We pass ``shared_bytes``, so that the page also runs without a GPU.


def memory_for(T, capacity=None):
    """Return the op's memory for T tokens of each rank."""
    return expert_all_to_all_memory(
        *(T, k, H, E, DTYPE, DTYPE), capacity=capacity, allocate=shared_bytes
    )


# %%
# The layer below takes two other ops of this gallery.

from triton_gallery_ops.grouped_matmul import grouped_matmul
from triton_gallery_ops.moe_layer import moe_layer

# %%
# A whole layer
# -------------
#
# ``moe_routing_with_permutation`` also picks the k experts and their weights.
# ``ends`` stays on the GPU, and goes into ``grouped_matmul`` as its offsets;
# rows after the last end become zeros. Each rank has its own tokens, of any
# number, and weights of its own experts; ``layer_weights``, in the fold at the
# top, draws those of all. The results have to agree with ``moe_layer``, the
# same layer on one GPU. The two round at different places, so an element may
# differ by 8 ``eps`` of its token's largest, a margin that we chose.


def parallel_layer(x, router, gate_up, down, memory):
    """Return the layer's result; gate_up and down are of this rank."""
    routed = moe_routing_with_permutation(x @ router, k)
    weights, experts, _, inverse, offsets = routed
    rows, _, ends, places = expert_all_to_all_dispatch(  # _: float8's scales
        x, experts, inverse, offsets, memory
    )
    gate, up = grouped_matmul(rows, gate_up.mT, ends).chunk(2, dim=1)
    y = grouped_matmul(silu(gate) * up, down.mT, ends)
    return expert_all_to_all_combine(y, weights, places, ends, memory)


if __name__ == "__main__":
    memory = memory_for(8)
    router, *of_all = layer_weights()
    ours = [w[RANK * LOCAL :][:LOCAL] for w in of_all]
    pairs = []
    for T in (8, 3 + RANK, 8 * (RANK > 0)):  # rank 0 has none at last
        x, *_ = make_inputs(T)
        out = parallel_layer(x, router, *ours, memory)
        weights, experts, *_ = moe_routing_with_permutation(x @ router, k)
        pairs.append((out, moe_layer(x, weights, experts, *of_all)))
    expert_all_to_all_check(memory)  # no rank was late, and all rows fitted
    out, whole = map(torch.cat, zip(*pairs, strict=True))
    allowed = 8 * torch.finfo(DTYPE).eps * whole.abs().amax(1, keepdim=True)
    worst = ((out - whole).abs().float() / allowed).max().item()
    assert worst <= 1, worst  # a NaN is not, either
    say(f"{RANKS} ranks compute what one GPU does")
    say(f"error / allowed: {worst:.2f} at most, on rank 0")

# %%
# A CUDA graph can hold the layer: no CPU waits, addresses stay the same, and a
# barrier clears its flags. Each replay here routes tokens to other experts than
# the capture did.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, *_ = make_inputs(8)
    call = partial(parallel_layer, x, router, *ours)
    call(memory)  # compiles
    meet_ranks()  # all have compiled: no replay waits long for another rank
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(memory)
    *_, captured = moe_routing_with_permutation(x @ router, k)
    for _ in range(3):
        x.copy_(make_inputs(8)[0])
        *_, offsets = moe_routing_with_permutation(x @ router, k)
        assert not torch.equal(offsets, captured), "the counts are the same"
        graph.replay()
        replayed = out.clone()
        torch.testing.assert_close(replayed, call(memory), rtol=0, atol=0)
    expert_all_to_all_check(memory)
    say("three replays, each with other counts")

# %%
# The result
# ----------
#
# The first chart is of dispatch, from chosen experts to rows sorted by expert;
# the second is of combine. *Triton* is the op, *Triton, this page* is
# ``dispatch``, and *PyTorch* is ``dispatch_torch`` and, in the fold at the top,
# ``combine_torch``. *Roof* is the rate of one large copy to the next rank, the
# same at all sizes.
#
# ``gpu_time`` has the GPU sleep before each call, to hide the launch. PyTorch's
# dispatch launches kernels only when the CPU has the counts, after the sleep.
# So its GPU time includes launches that the others hide.


def copy_to_next():
    """Return a copy to the next rank of what the most tokens send."""
    size = max(1, max(TOKENS) * k * H * (RANKS - 1) // RANKS)
    there = KEPT[0][(RANK + 1) % RANKS].view(DTYPE)[:size]  # its rows
    return partial(there.copy_, rows.view(-1)[:size].clone())


if __name__ == "__main__" and DEVICE.type == "cuda":
    most = max(TOKENS)
    memory = memory_for(most, capacity=2 * most * k)
    times, times_combine = {}, {}
    link = gpu_time({"Roof": copy_to_next()}, prepare=dist.barrier)["Roof"]
    for T in TOKENS:
        x, experts, weights = make_inputs(T)
        roof = {"Roof": (*(ms * T / most for ms in link[:3]), *link[3:])}
        calls = {
            "Triton": partial(dispatch_op, x, experts, memory),
            "Triton, this page": partial(dispatch, x, experts),
            "PyTorch": partial(dispatch_torch, x, experts),
        }
        times[T] = gpu_time(calls, prepare=dist.barrier) | roof
        y_torch, _, back = dispatch_torch(x, experts)
        y, _, ends, places = dispatch_op(x, experts, memory)
        given = weights, places, ends, memory
        op = expert_all_to_all_combine
        calls = {
            "Triton": partial(op, y.clone(), *given),
            "Triton, in place": partial(op, None, *given),
            "PyTorch": partial(combine_torch, y_torch, weights, back),
        }
        times_combine[T] = gpu_time(calls, prepare=dist.barrier) | roof
        meet_ranks()
    expert_all_to_all_check(memory)
    results = rate_table(times, "tokens", "GB/s", megabytes_sent)
    say("dispatch", results.to_string(), sep="\n")
    results_combine = rate_table(
        times_combine, "tokens", "GB/s", megabytes_sent
    )
    say("combine", results_combine.to_string(), sep="\n")
    for name, of in (("dispatch", times), ("combine", times_combine)):
        for T, calls in of.items():
            op, other = calls["Triton"], calls["PyTorch"]
            waits = " (PyTorch waits for its CPU)" if other[4] else ""
            say(f"{name}, {T} tokens: op {op[0]:.3f} ms of the GPU,", end=" ")
            say(f"{op[3] / 1e3:.3f} of the CPU;", end=" ")
            say(f"PyTorch / op, GPU: {other[0] / op[0]:.2f}{waits}")
    for T, calls in times.items():
        name = "Triton, this page"
        share = times_send[T][name][0] / calls[name][0]
        say(f"{T} tokens: sending is {share:.0%} of this page's dispatch")

# %%
# What a dispatch takes beyond sending is routing, plan and barriers. Shares and
# ratios are of GPU times. Where a call's CPU time exceeds its GPU time, use a
# CUDA graph. In a combine, *Triton* first copies the results to where other
# ranks read them. For *Triton, in place*, the experts have written them there,
# into ``memory.results``, and the op is called with None for ``y``.
#
# Exercises
# ---------
#
# Write a kernel and run the script with ``torchrun --nproc-per-node=2``, also
# without GPUs: it says whether the kernel is right. One rank alone cannot show
# that a row went to the wrong rank. The checks are in the fold at the top.
#
# **1.** Let each row have one float32 scale, which has to travel as well. For
# each choice c of token t, store scale t in element ``places[c]`` of the tensor
# on the rank of expert ``experts[c]``. A program has BLOCK of the N choices and
# loads an address for each of them: ``.to`` takes a block, too. The arguments
# are ``scales_ptr, experts_ptr, places_ptr, table_ptr, N, k, LOCAL, BLOCK``.

scale_kernel = None  # your kernel

if __name__ == "__main__":
    say(judge_scale(scale_kernel))

# %%
# **2.** The slowest rank is the one with the most rows. Let ``counts`` be
# (RANKS, E), as on a pad. Store in ``out[r]`` how many rows rank r gets, with
# a program for each rank. BLOCK is a power of two, at least E. Arguments are
# ``counts_ptr, out_ptr, RANKS, E, LOCAL, BLOCK``.

load_kernel = None  # your kernel

if __name__ == "__main__":
    say(judge_load(load_kernel))

# %%
# Answers
# -------
#
# **1.** A block of addresses becomes a block of pointers:


@triton.jit
def scale_answer_kernel(
    scales_ptr,
    experts_ptr,
    places_ptr,
    table_ptr,
    N,
    k,
    LOCAL,
    BLOCK: tl.constexpr,
):
    choice = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = choice < N
    expert = tl.load(experts_ptr + choice, mask=mask, other=0)
    there = tl.load(table_ptr + expert // LOCAL)  # (BLOCK,)
    ptrs = there.to(tl.pointer_type(tl.float32))
    row = tl.load(places_ptr + choice, mask=mask, other=0)
    scale = tl.load(scales_ptr + choice // k, mask=mask)
    tl.store(ptrs + row, scale, mask=mask)


if __name__ == "__main__":
    answer = judge_scale(scale_answer_kernel)
    say(answer)
    assert answer == "right"

# %%
# **2.** The experts of a rank have consecutive numbers:


@triton.jit
def load_answer_kernel(
    counts_ptr, out_ptr, RANKS, E, LOCAL, BLOCK: tl.constexpr
):
    rank = tl.program_id(axis=0)
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for source in range(RANKS):
        ptrs = counts_ptr + source * E + rank * LOCAL + offs
        total += tl.load(ptrs, mask=offs < LOCAL, other=0)
    tl.store(out_ptr + rank, tl.sum(total, axis=0))


if __name__ == "__main__":
    answer = judge_load(load_answer_kernel)
    say(answer)
    assert answer == "right"
    dist.destroy_process_group()
