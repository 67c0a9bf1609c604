# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Read another GPU's memory from a Triton kernel, and have the kernels of
# several GPUs wait for each other, without a library in between."""
# tool = true
# gpus = 2
# ///
r"""
One kernel, several GPUs: symmetric memory
==========================================

The GPUs of one host can load from each other's memory, over NVLink or PCIe. To
a kernel that memory is an address like any other. *Symmetric memory* of PyTorch
gives each process the addresses; then a kernel of a few lines replaces a call
of a communication library, and can compute on what it reads, as exercise 1
does. Between hosts, use NCCL instead.

After this page you can

* read memory of another GPU in a kernel, from a table of addresses;
* write a barrier that kernels of several GPUs wait at;
* tell from a wrong number, too old or too new, which barrier is missing.
"""

# sphinx_gallery_tags = ["several gpus", "atomics", "memory bound"]
import os
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

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
from triton_gallery.ranks import join_ranks, meet_ranks, shared_on_cpu


def symmetric_on_cpu(numel):
    """Return what ``symmetric`` does, of files that all ranks map."""
    tensors, pads = shared_on_cpu(numel)
    addresses = [[t.data_ptr() for t in of] for of in (tensors, pads)]
    buffers_table, pads_table = map(torch.tensor, addresses)
    return SimpleNamespace(
        mine=tensors[dist.get_rank()],
        buffers=buffers_table,
        pads=pads_table,
        handle=(tensors, pads),
    )


# %%
# A process for each GPU
# ----------------------
#
# One process runs for each GPU; each process is a *rank*. For two GPUs:
#
# .. code-block:: text
#
#     torchrun --nproc-per-node=2 peer_memory.py
#
# ``torchrun`` tells each process its rank, in environment variables. All ranks
# run the same lines, and only rank 0 prints. Without ``torchrun``, this process
# is the only rank, and ``NEXT`` is the rank itself.

RANK, RANKS = join_ranks()
NEXT = (RANK + 1) % RANKS  # the rank whose memory this one reads


def say(*texts, **options):
    """Print on rank 0."""
    if RANK == 0:
        print(*texts, **options)


if __name__ == "__main__":
    say("ranks:", RANKS)

# %%
# ``join_ranks``, in the fold at the top, gives each rank its GPU and calls
# ``init_process_group`` with a timeout: nothing on this page waits forever for
# a process that has failed.
#
# Symmetric memory
# ----------------
#
# ``symm_mem.empty`` allocates on this rank's GPU. ``rendezvous`` is called by
# all ranks, each with a tensor of the same size, hence *symmetric*. It maps the
# memory of every rank into the address space of this process, and returns a
# *handle*:
#
# * ``buffer_ptrs`` are the addresses of all ranks' tensors, by rank;
# * ``signal_pad_ptrs`` are the addresses of the ranks' *signal pads*, small
#   pieces of memory for flags, zero at first;
# * ``get_buffer`` returns another rank's tensor as a tensor, for PyTorch's own
#   operators.
#
# A kernel cannot take a list. So the addresses go into two tables of int64, on
# this rank's GPU. This rank's tensor, ``mine``, is a tensor like any other.
#
# Without a GPU the ranks map files instead (``symmetric_on_cpu``, in the fold
# at the top). The atomic operations of Triton's interpreter work between
# processes, so all kernels and checks of this page run there, too.


def symmetric(numel):
    """Return this rank's float32 tensor, ``mine``, and all ranks' addresses."""
    if DEVICE.type == "cpu":
        return symmetric_on_cpu(numel)
    here = torch.device("cuda", torch.cuda.current_device())
    mine = symm_mem.empty(numel, dtype=torch.float32, device=here)
    handle = symm_mem.rendezvous(mine, dist.group.WORLD.group_name)
    table = {"dtype": torch.int64, "device": here}
    return SimpleNamespace(
        mine=mine,
        buffers=torch.tensor(list(handle.buffer_ptrs), **table),
        pads=torch.tensor(list(handle.signal_pad_ptrs), **table),
        handle=handle,  # keep it: the memory is freed with it
    )


LARGEST = 5000 if DEVICE.type == "cpu" else 2**26
x = symmetric(LARGEST)

if __name__ == "__main__":
    say(f"{len(x.buffers)} tensors of {x.mine.nbytes:,} bytes, one per rank")

# %%
# The first kernel
# ----------------
#
# The kernel takes the table and a rank. It loads an int64 from the table, and
# ``.to(tl.pointer_type(tl.float32))`` makes a pointer of it. What follows is a
# copy as in *Vector addition*. Triton knows the alignment of a tensor that you
# pass, but not of an address that the kernel loads. ``tl.multiple_of`` promises
# a multiple of 16 bytes, so that each thread may load 16 bytes at once. An
# allocation begins at such an address; its slice ``[1:]`` does not.


@triton.jit
def read_peer_kernel(buffers_ptr, out_ptr, peer, N, BLOCK: tl.constexpr):
    address = tl.load(buffers_ptr + peer)
    peer_ptr = address.to(tl.pointer_type(tl.float32))
    peer_ptr = tl.multiple_of(peer_ptr, 16)
    pid = tl.program_id(axis=0).to(tl.int64)  # N may be past 2**31
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    values = tl.load(peer_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, values, mask=mask)


BLOCK = 2048  # 8 warps have 256 threads: two loads of 16 bytes for each


def read_peer(x, peer, N):
    """Return the first N numbers of another rank's tensor."""
    out = torch.empty(N, device=DEVICE)
    grid = (triton.cdiv(N, BLOCK),)
    read_peer_kernel[grid](x.buffers, out, peer, N, BLOCK=BLOCK, num_warps=8)
    return out


# %%
# Is it right?
# ------------
#
# Each rank fills its tensor with numbers that no other rank has.
# ``meet_ranks``, in the fold at the top, waits for this GPU, then for all
# ranks. Then each rank reads from every rank. A copy is exact, so nothing is
# allowed to differ.


def numbers_of(rank, N):
    """Return what a rank's tensor has in the checks."""
    return torch.arange(N, device=DEVICE, dtype=torch.float32) + 10_000 * rank


for N in (1, 1000, 5000):
    x.mine[:N] = numbers_of(RANK, N)
    meet_ranks()
    for peer in range(RANKS):
        out = read_peer(x, peer, N)
        torch.testing.assert_close(out, numbers_of(peer, N), rtol=0, atol=0)
    meet_ranks()  # all have read, and the next size may be written

if __name__ == "__main__":
    say("every rank read every rank's numbers")

# %%
# How fast?
# ---------
#
# Rank 0 reads from rank 1, and the other ranks wait meanwhile. *PyTorch* copies
# the same tensor with ``copy_``; *own memory* is a copy within one GPU. The
# rate counts each byte once. Before a call, the L2 cache of the GPU that reads
# is emptied. The other GPU's is not, so small tensors may come from its cache.
# The kernel's CPU time includes allocating its result; ``copy_`` writes into a
# tensor that exists.

SIZES = [2**14, 2**20, 2**26]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for N in SIZES if RANK == 0 else []:
        out, own = torch.empty(2, N, device=DEVICE)
        theirs = x.handle.get_buffer(NEXT, (N,), torch.float32)
        calls = {
            "Triton": lambda N=N: read_peer(x, NEXT, N),
            "PyTorch": lambda out=out, theirs=theirs: out.copy_(theirs),
            "PyTorch, own memory": lambda own=own, out=out: out.copy_(own),
        }
        times[4 * N] = gpu_time(calls)
    meet_ranks()
    if RANK == 0:
        results = rate_table(times, "bytes", "GB/s", lambda size: size / 1e6)
        print(results.to_string())
        size, of = max(times.items())
        for name, (ms, *_) in of.items():
            print(f"{name}: {size / 1e6 / ms:,.0f} GB/s of {size:,} bytes")

# %%
# The kernel and ``copy_`` read over the same link, and neither can be faster
# than the link. Where a call's CPU time is longer than its GPU time, the CPU
# sets the pace: there a CUDA graph helps.
#
# A read that comes too early
# ---------------------------
#
# So far ``meet_ranks`` separated writes from reads, and the CPU waited. A model
# communicates many times for each token, and cannot afford that. Without this
# wait, nothing orders the kernels of different GPUs. To show that, every rank
# writes a value and reads the next rank's. We watch one read: rank 0 reads what
# rank 1 wrote. ``paused="writer"`` pauses rank 1 before its write, and
# ``paused="reader"`` pauses rank 0 before its read. ``exchange`` calls
# ``before`` between the write and the read, and ``after`` after the read. At
# first both do nothing; later they are barriers.


def pause():
    """Have this rank's GPU be late."""
    if DEVICE.type == "cpu":
        time.sleep(0.3)
    else:
        torch.cuda._sleep(2**28)  # cycles: over 0.1 s at 2 GHz


def exchange(x, value, before, after, paused):
    """Write a value; return what is then in the next rank's tensor."""
    if paused == "writer" and RANK == 1:
        pause()
    x.mine[:1] = value
    before(x)
    if paused == "reader" and RANK == 0:
        pause()
    out = read_peer(x, NEXT, 1)
    after(x)
    return out


def first_read(before, after, paused, values=(1, 2)):
    """Exchange these values in rounds; return what the first round read."""
    x.mine[:1] = 0
    meet_ranks()
    rounds = [exchange(x, value, before, after, paused) for value in values]
    meet_ranks()
    return rounds[0].item()


def nothing(x):
    """Wait for nobody."""


if __name__ == "__main__":
    read = first_read(nothing, nothing, paused="writer", values=[1])
    say(f"no barrier: all ranks wrote 1, and rank 0 read {read:g}")
    if RANK == 0 and RANKS > 1:
        assert read == 0

# %%
# With more than one rank, rank 0 read what was there before rank 1 wrote. No
# error says so, and without the pause the number may well be right.
#
# A barrier between GPUs
# ----------------------
#
# A *barrier* is passed when all have come to it. It takes four things:
#
# * **One flag for each pair.** A rank sets its flag on the signal pad of every
#   rank, its own too, and waits until all flags on its own pad are set. It
#   clears each as it sees it, so that the pad is ready for the next barrier.
# * **Compare and swap.** ``tl.atomic_cas`` changes a flag only if it has the
#   expected value, and returns what was there. If the other rank has not
#   cleared the flag yet, the swap fails, and ``flip`` tries again.
# * **Release and acquire.** Reads and writes may be reordered. Those before a
#   swap with ``sem="release"`` stay before it; those after one with
#   ``sem="acquire"`` stay after it.
# * **Scope.** ``scope="sys"`` makes that hold for other GPUs. The default,
#   ``"gpu"``, holds within one.
#
# A *slot* is a set of flags on a pad, one for each rank. ``flip`` gives up
# after ``tries`` swaps: a rank that has failed would keep this GPU busy
# forever. ``meet`` then stores 1 in the tensor ``late``. After that neither the
# result nor the flags can be trusted: end the processes. ``late.item()`` waits
# for the GPU, so call it rarely, for instance once per training step.


@triton.jit
def flip(flag_ptr, old, new, tries, sem: tl.constexpr):
    """Change a flag once it is old; return whether that was so in time."""
    found = tl.atomic_cas(flag_ptr, old, new, sem=sem, scope="sys")
    while (found != old) & (tries > 0):
        tries -= 1
        found = tl.atomic_cas(flag_ptr, old, new, sem=sem, scope="sys")
    return found == old


@triton.jit
def meet(pads_ptr, late_ptr, slot, rank, tries, RANKS: tl.constexpr):
    """Wait for all ranks, with the flags of a slot."""
    for peer in tl.static_range(RANKS):  # unrolled: the body RANKS times
        pad_ptr = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32))
        if not flip(pad_ptr + slot * RANKS + rank, 0, 1, tries, "release"):
            tl.store(late_ptr, 1)
    pad_ptr = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if not flip(pad_ptr + slot * RANKS + peer, 1, 0, tries, "acquire"):
            tl.store(late_ptr, 1)


@triton.jit
def barrier_kernel(pads_ptr, late_ptr, rank, tries, RANKS: tl.constexpr):
    meet(pads_ptr, late_ptr, 0, rank, tries, RANKS)


late = torch.zeros(1, dtype=torch.int32, device=DEVICE)  # 1: gave up
TRIES = 2**20 if DEVICE.type == "cpu" else 2**24  # at each flag


def barrier(x):
    """Have the GPU wait for the other ranks' GPUs; the CPU goes on."""
    barrier_kernel[(1,)](x.pads, late, RANK, TRIES, RANKS=RANKS, num_warps=1)


def check_late():
    assert late.item() == 0, "a rank did not come to the barrier"


if __name__ == "__main__":
    read = first_read(barrier, nothing, paused="writer", values=[1])
    say(f"a barrier before: all ranks wrote 1, and rank 0 read {read:g}")
    assert read == 1
    check_late()

# %%
# The barrier is a launch of its own, of one program: the GPU begins it after
# the write has ended, and begins the read after it.
#
# And a number from the future
# ----------------------------
#
# Now the reader is late, and there are two rounds: all ranks write 1, then 2.
# Once rank 1 has passed the barrier of the first round, nothing keeps it from
# writing 2: the barrier of the second round comes after that write.

if __name__ == "__main__":
    read = first_read(barrier, nothing, paused="reader")
    say(f"a barrier before: in the first round rank 0 read {read:g}")
    if RANK == 0 and RANKS > 1:
        assert read == 2
    for who in ("reader", "writer"):
        read = first_read(barrier, barrier, paused=who)
        say(f"barriers before and after, paused {who}: rank 0 read {read:g}")
        assert read == 1
    check_late()

# %%
# So if a number is *too old*, the barrier between write and read is missing; if
# it is *too new*, the barrier between the read and the next write. With two
# tensors in turn and the pads of one of them, the barrier before the read is
# enough: a rank writes the same tensor two rounds later, after the next round's
# barrier, which no rank passes before all have read.
#
# How long does a rank wait?
# --------------------------
#
# A rank may be late by seconds, but ``TRIES`` counts swaps. So the cell waits
# for a flag that nobody sets, and prints how long that took. (Triton 3.9 also
# has ``tl.atomic_poll``, which waits for a value, with a timeout.)


@triton.jit
def tries_kernel(flag_ptr, seen_ptr, tries):
    seen = flip(flag_ptr, 1, 0, tries, "acquire")
    tl.store(seen_ptr, seen.to(tl.int32))


if __name__ == "__main__":
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    seen = torch.ones_like(flag)
    # The first launch compiles, for both: 16 divides both numbers.
    for tries in (16, TRIES // 1024):
        begin = time.perf_counter()
        tries_kernel[(1,)](flag, seen, tries, num_warps=1)
        assert not seen.item()  # waits for the GPU
        seconds = time.perf_counter() - begin
    where = "interpreter" if DEVICE.type == "cpu" else "GPU"
    say(f"{where}: {TRIES // 1024:,} tries took {seconds:.3f} s", end=", ")
    say(f"so TRIES, {TRIES:,}, take about {1024 * seconds:.0f} s")

# %%
# All in one launch
# -----------------
#
# A kernel can pass both barriers itself, in one launch instead of three.
# Program *i* of each rank waits for programs *i* of the others alone, in a slot
# of its own, so all ranks must launch equally many. After the first ``meet``,
# program *i* may read the whole tensor: an earlier launch on each rank's stream
# wrote it, and has ended. If the kernel itself writes the tensor, call
# ``tl.debug_barrier()`` between the write and ``meet``; then program *i* may
# read only what programs *i* of the other ranks wrote. New are:
#
# * One thread of a program sets and sees the flags. ``tl.debug_barrier()`` has
#   all its threads wait for each other. It is not for debugging only.
# * A program that waits occupies its multiprocessor. If more programs were
#   launched than fit on the GPU, those that wait could keep out those that are
#   waited for. So there are at most 32, each for several blocks: an H200 has
#   132 multiprocessors. For 8 ranks, 32 slots are 1,024 bytes of a signal pad;
#   ``handle.signal_pad_size`` says how many it has.


@triton.jit
def exchange_kernel(
    buffers_ptr,
    pads_ptr,
    out_ptr,
    late_ptr,
    rank,
    peer,
    N,
    tries,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    meet(pads_ptr, late_ptr, pid, rank, tries, RANKS)
    tl.debug_barrier()  # no thread loads before the flags are seen
    peer_ptr = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.float32))
    peer_ptr = tl.multiple_of(peer_ptr, 16)
    for start in range(pid * BLOCK, N, tl.num_programs(axis=0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        values = tl.load(peer_ptr + offs, mask=offs < N)  # (BLOCK,)
        tl.store(out_ptr + offs, values, mask=offs < N)
    tl.debug_barrier()  # all threads have loaded before a flag says so
    meet(pads_ptr, late_ptr, pid, rank, tries, RANKS)


def exchange_at_once(x, N):
    """Return the next rank's numbers, read between two barriers."""
    out = torch.empty(N, device=DEVICE)
    grid = (min(triton.cdiv(N, BLOCK), 32),)
    given = x.buffers, x.pads, out, late, RANK, NEXT, N, TRIES
    exchange_kernel[grid](*given, RANKS=RANKS, BLOCK=BLOCK, num_warps=8)
    return out


def exchange_in_three(x, N):
    """Return the same from three launches."""
    barrier(x)
    out = read_peer(x, NEXT, N)
    barrier(x)
    return out


for N in (1, 5000):
    for call in (exchange_at_once, exchange_in_three):
        if RANK == 1:
            pause()  # a rank that does not wait reads what was there before
        x.mine[:N] = numbers_of(RANK, N) + 1
        out = call(x, N)
        x.mine[:N] = -1  # without the second meet, a late rank may read it
        expected = numbers_of(NEXT, N) + 1
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
check_late()

if __name__ == "__main__":
    say("one launch, or three: every rank read the next rank's numbers")

# %%
# All ranks are timed together now. They meet before each call; still, each time
# includes the wait for the slowest rank: do not compare the two charts.
# *Triton* is one launch. The rate counts what one rank reads. The printed
# ratios divide GPU times: above 1, one launch is faster.

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for N in (2**10, 2**14, 2**18, 2**22):
        calls = {
            "Triton": lambda N=N: exchange_at_once(x, N),
            "Triton, three launches": lambda N=N: exchange_in_three(x, N),
        }
        times[4 * N] = gpu_time(calls, prepare=dist.barrier)
    check_late()
    if RANK == 0:
        results_exchange = rate_table(
            times, "bytes", "GB/s", lambda size: size / 1e6
        )
        print(results_exchange.to_string())
        for size, of in times.items():
            ratio = of["Triton, three launches"][0] / of["Triton"][0]
            print(f"{size:,} bytes: three launches / one: {ratio:.2f}")

# %%
# One launch saves the start of two more. But it has at most 32 programs, and
# ``read_peer`` has one for each block: use one launch for small tensors.
#
# Exercises
# ---------
#
# Write one and run the script with ``torchrun --nproc-per-node=2``, also
# without GPUs: it says whether all ranks are right. One rank alone, as in a
# notebook, cannot show that a kernel uses the wrong rank's memory.
#
# **1.** Read from all ranks and store the sum: ``out[i]`` is the sum of
# element ``i`` of every rank's tensor. This is an *all-reduce*. The arguments
# are ``buffers_ptr, out_ptr, N, RANKS: tl.constexpr, BLOCK: tl.constexpr``.

sum_kernel = None  # your kernel


def check(kernel, out, expected, *arguments):
    """Launch a kernel between ``meet_ranks``; say if all ranks are right."""
    if kernel is None:
        say("not solved yet")
        return False
    meet_ranks()
    grid = (triton.cdiv(len(expected), BLOCK),)
    kernel[grid](x.buffers, *arguments, BLOCK=BLOCK)
    meet_ranks()
    right = torch.tensor(int(torch.equal(out, expected)), device=DEVICE)
    dist.all_reduce(right, dist.ReduceOp.MIN)
    say("right" if right else "wrong")
    return bool(right)


def check_sum(kernel, N=3000):
    """Check exercise 1."""
    x.mine[:N] = numbers_of(RANK, N)
    expected = sum(numbers_of(rank, N) for rank in range(RANKS))
    out = torch.zeros(N, device=DEVICE)
    return check(kernel, out, expected, out, N, RANKS)


if __name__ == "__main__":
    check_sum(sum_kernel)

# %%
# **2.** Write instead of reading: store ``x_ptr``'s numbers into the tensor of
# rank ``peer``. A store over NVLink need not wait for an answer. The arguments
# are ``buffers_ptr, x_ptr, peer, N, BLOCK: tl.constexpr``. What must a rank
# wait for before it writes, and what before it reads its own tensor?

push_kernel = None  # your kernel


def check_push(kernel, N=3000):
    """Check exercise 2."""
    x.mine[:N] = 0
    before = (RANK - 1) % RANKS  # this rank is next to it
    mine, expected = numbers_of(RANK, N), numbers_of(before, N)
    return check(kernel, x.mine[:N], expected, mine, NEXT, N)


if __name__ == "__main__":
    check_push(push_kernel)

# %%
# Go further
# ----------
#
# ``handle.barrier()`` is such a barrier from PyTorch. Its flags are on the same
# pads: do not run it at the same time as ``meet``. ``torch.ops.symm_mem`` has
# whole collectives on symmetric memory, such as ``one_shot_all_reduce``. Both
# are in `PyTorch's documentation
# <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`_.

if __name__ == "__main__":
    dist.destroy_process_group()

# %%
# Answers
# -------
#
# **1.** The loop over ranks is unrolled. Each rank adds in the same order, so
# all get the same numbers.


@triton.jit
def sum_answer_kernel(
    buffers_ptr, out_ptr, N, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        address = tl.load(buffers_ptr + rank)
        peer_ptr = address.to(tl.pointer_type(tl.float32))
        acc += tl.load(peer_ptr + offs, mask=offs < N, other=0.0)
    tl.store(out_ptr + offs, acc, mask=offs < N)


# %%
# **2.** Before it writes, a rank waits until the other no longer uses what was
# there. Before it reads its own tensor, it waits until all have written. Here
# ``check`` waits for both.


@triton.jit
def push_answer_kernel(buffers_ptr, x_ptr, peer, N, BLOCK: tl.constexpr):
    address = tl.load(buffers_ptr + peer)
    peer_ptr = address.to(tl.pointer_type(tl.float32))
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(peer_ptr + offs, values, mask=offs < N)
