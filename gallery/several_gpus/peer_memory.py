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
* see from a number that is too old or too new which barrier is missing.
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


def say(*texts):
    """Print on rank 0."""
    if RANK == 0:
        print(*texts)


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
# all ranks, each with a tensor of the same size. It maps the memory of every
# rank into the address space of this process, and returns a *handle*:
#
# * ``buffer_ptrs`` are the addresses of all ranks' tensors, by rank;
# * ``signal_pad_ptrs`` are the addresses of the ranks' *signal pads*, small
#   pieces of memory for flags, zero at first;
# * ``get_buffer`` returns another rank's tensor as a tensor, for PyTorch's own
#   operators.
#
# A kernel cannot take a list. So the addresses go into two tables of int64, on
# this rank's GPU.
#
# Without a GPU the ranks map files instead (``shared_on_cpu``), and Triton's
# interpreter reads and writes those. Its atomic operations work between
# processes, so all kernels and checks of this page run there, too.


def symmetric(numel):
    """Return a float32 tensor of each rank, and the addresses of all."""
    if DEVICE.type == "cpu":
        peers, handle = shared_on_cpu(numel)  # handle: the signal pads
        mine = peers[RANK]
        addresses = [[t.data_ptr() for t in those] for those in (peers, handle)]
    else:
        here = torch.device("cuda", torch.cuda.current_device())
        mine = symm_mem.empty(numel, dtype=torch.float32, device=here)
        handle = symm_mem.rendezvous(mine, dist.group.WORLD.group_name)
        sizes = (numel,), torch.float32  # shape and dtype
        peers = [handle.get_buffer(rank, *sizes) for rank in range(RANKS)]
        addresses = handle.buffer_ptrs, handle.signal_pad_ptrs
    buffers, pads = (
        torch.tensor(list(those), dtype=torch.int64, device=DEVICE)
        for those in addresses
    )
    return SimpleNamespace(
        mine=mine,  # this rank's tensor
        peers=peers,  # every rank's tensor
        buffers=buffers,  # the addresses of these
        pads=pads,  # the addresses of the signal pads
        handle=handle,  # keep it: the memory is freed with it
    )


LARGEST = 5000 if DEVICE.type == "cpu" else 2**26
x = symmetric(LARGEST)

if __name__ == "__main__":
    say(f"{len(x.peers)} tensors of {x.mine.nbytes:,} bytes, one on each rank")

# %%
# The first kernel
# ----------------
#
# The kernel takes the table and a rank. It loads an int64 from the table, and
# ``.to(tl.pointer_type(tl.float32))`` makes a pointer of it. What follows is a
# copy as in *Vector addition*. Triton knows the alignment of a tensor that you
# pass, but not of an address that the kernel loads. ``tl.multiple_of`` promises
# a multiple of 16 bytes, so that each thread may load 16 bytes at once.


@triton.jit
def read_peer_kernel(buffers_ptr, out_ptr, peer, N, BLOCK: tl.constexpr):
    address = tl.load(buffers_ptr + peer)
    peer_ptr = address.to(tl.pointer_type(tl.float32))
    peer_ptr = tl.multiple_of(peer_ptr, 16)
    pid = tl.program_id(axis=0).to(tl.int64)  # pid * BLOCK may pass 2**31
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    values = tl.load(peer_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, values, mask=mask)


BLOCK = 2048  # for each of 256 threads 8 elements: two loads of 16 bytes


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
# The kernel's CPU time includes allocating the result; ``copy_`` is given one.

SIZES = [2**14, 2**20, 2**26]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for N in SIZES if RANK == 0 else []:
        out, own = torch.empty(2, N, device=DEVICE)
        calls = {
            "Triton": lambda N=N: read_peer(x, NEXT, N),
            "PyTorch": lambda N=N, out=out: out.copy_(x.peers[NEXT][:N]),
            "PyTorch, own memory": lambda own=own, out=out: out.copy_(own),
        }
        times[4 * N] = gpu_time(calls)
    meet_ranks()
    if RANK == 0:
        results = rate_table(times, "bytes", "GB/s", lambda size: size / 1e6)
        print(results.to_string())

# %%
# At the largest size, the kernel and ``copy_`` read the other GPU's memory at
# nearly the same rate, far below that of a copy in own memory.
#
# A read that comes too early
# ---------------------------
#
# So far ``meet_ranks`` separated writes from reads, and the CPU waited. A model
# communicates many times for each token, and cannot afford that. Without this
# wait, nothing orders the kernels of different GPUs. To show that, every rank
# writes a value and reads the next rank's, and we pause one rank on purpose:
# the writer, rank 1, or the reader, rank 0, as the argument ``late`` says.
# ``exchange`` calls ``before`` and ``after`` around the read, for barriers.


def pause():
    """Have this rank's GPU be late."""
    if DEVICE.type == "cpu":
        time.sleep(0.3)
    else:
        torch.cuda._sleep(2**28)  # in cycles of its clock


def exchange(value, before, after, late):
    """Write a value; return what is then in the next rank's tensor."""
    if late == "writer" and NEXT != RANK and RANK == 1:
        pause()
    x.mine[:1] = value
    before()
    if late == "reader" and RANK == 0:
        pause()
    out = read_peer(x, NEXT, 1)
    after()
    return out


def first_read(before, after, late, values=(1, 2)):
    """Exchange these values in rounds; return what came of the first."""
    x.mine[:1] = 0
    meet_ranks()
    rounds = [exchange(value, before, after, late) for value in values]
    meet_ranks()
    return rounds[0].item()


def nothing():
    """Wait for nobody."""


if __name__ == "__main__":
    read = first_read(nothing, nothing, late="writer", values=[1])
    say(f"no barrier: all ranks wrote 1, and rank 0 read {read:g}")
    if RANK == 0 and RANKS > 1:
        assert read == 0

# %%
# With more than one rank, rank 0 read what was there before rank 1 wrote. No
# error says so, and without the planted delay the number may well be right:
# such a fault is hard to find.
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
# A *slot* is a set of flags on a pad, one for each rank. A loop tries one flag
# at a time and gives up after ``tries``, as a rank that has failed would keep
# this GPU busy forever. Then the tensor ``late`` is 1, what was read must not
# be used, and flags are left set or cleared at the wrong time: end the
# processes. ``late.item()`` waits for the GPU, so a program reads it rarely.


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
# At each flag: they have to last longer than a rank may be late
TRIES = 2**20 if DEVICE.type == "cpu" else 2**24


def barrier():
    """Have the GPU wait for the other ranks' GPUs; the CPU goes on."""
    barrier_kernel[(1,)](x.pads, late, RANK, TRIES, RANKS=RANKS, num_warps=1)


if __name__ == "__main__":
    read = first_read(barrier, nothing, late="writer", values=[1])
    say(f"a barrier before: all ranks wrote 1, and rank 0 read {read:g}")
    assert read == 1
    assert late.item() == 0, "a rank did not come to the barrier"

# %%
# The barrier is a launch of its own, of one program: the GPU begins it after
# the write has ended, and begins the read after it. (Triton 3.9 has
# ``tl.atomic_poll``, which waits at an address, with a timeout in nanoseconds.)
#
# And a number from the future
# ----------------------------
#
# Now the reader is late, and there are two rounds: all ranks write 1, then 2.
# Once rank 1 has passed the barrier of the first round, nothing keeps it from
# writing 2: the barrier of the second round comes after that write.

if __name__ == "__main__":
    read = first_read(barrier, nothing, late="reader")
    say(f"a barrier before: in the first round rank 0 read {read:g}")
    if RANK == 0 and RANKS > 1:
        assert read == 2
    for who in ("reader", "writer"):
        read = first_read(barrier, barrier, late=who)
        say(f"barriers before and after, late {who}: rank 0 read {read:g}")
        assert read == 1
    assert late.item() == 0, "a rank did not come to the barrier"

# %%
# So if a number is *too old*, the barrier between write and read is missing; if
# it is *too new*, the barrier between the read and the next write. (With two
# tensors in rotation, the first barrier of each round is enough.)
#
# All in one launch
# -----------------
#
# A kernel can pass both barriers itself, in one launch instead of three, if
# program *i* of one rank meets program *i* of the others, in a slot of its own.
# So all ranks must launch equally many programs. An earlier launch wrote the
# tensor, so each program may read any part. If this kernel wrote it, program
# *i* could read only what program *i* of the other rank wrote. New are:
#
# * ``tl.debug_barrier()`` has all threads of a program wait for each other, as
#   one thread sets and sees the flags for all. It is not for debugging only.
# * A program that waits occupies its multiprocessor. If more programs were
#   launched than fit on the GPU, those that wait could keep out those that are
#   waited for. So there are at most 32, each for several blocks: an H200 has
#   132 multiprocessors, and 32 slots fit on a signal pad.


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
    pid = tl.program_id(axis=0)  # int32: N is far below 2**31 here
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


def exchange_at_once(N):
    """Return the next rank's numbers, between two barriers."""
    out = torch.empty(N, device=DEVICE)
    grid = (min(triton.cdiv(N, BLOCK), 32),)
    tensors, numbers = (x.buffers, x.pads, out, late), (RANK, NEXT, N, TRIES)
    exchange_kernel[grid](
        *tensors, *numbers, RANKS=RANKS, BLOCK=BLOCK, num_warps=8
    )
    return out


def exchange_in_three(N):
    """Return the same from three launches."""
    barrier()
    out = read_peer(x, NEXT, N)
    barrier()
    return out


for N in (1, 5000):
    for call in (exchange_at_once, exchange_in_three):
        x.mine[:N] = numbers_of(RANK, N) + 1
        out = call(N)
        x.mine[:N] = -1  # at once: a rank that reads late would see it
        expected = numbers_of(NEXT, N) + 1
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
assert late.item() == 0, "a rank did not come to the barrier"

# %%
# All ranks are timed together now, so compare CPU times within one chart only.
# They meet before each call; still, each time includes the wait for the slowest
# rank. *Triton* is one launch. The rate counts what one rank reads.

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for N in (2**10, 2**14, 2**18, 2**22):
        calls = {
            "Triton": lambda N=N: exchange_at_once(N),
            "Triton, three launches": lambda N=N: exchange_in_three(N),
        }
        times[4 * N] = gpu_time(calls, prepare=dist.barrier)
    assert late.item() == 0, "a rank did not come to the barrier"
    if RANK == 0:
        results_exchange = rate_table(
            times, "bytes", "GB/s", lambda size: size / 1e6
        )
        print(results_exchange.to_string())
        us = {n: 1e3 * of[0] for n, of in times[4 * 2**10].items()}
        for name, time_us in us.items():
            print(f"{name}: {time_us:.1f} us for 4,096 bytes")

# %%
# One launch takes less time than three for the smallest tensor, and more for
# the largest: there it has 32 programs, and ``read_peer`` one for each block.
# So use one launch for small tensors.
#
# Exercises
# ---------
#
# Write one and run the script with ``torchrun --nproc-per-node=2``, also
# without GPUs: rank 0 says whether its numbers are right. One rank alone, as in
# a notebook, cannot show that a kernel uses the wrong rank's memory.
#
# **1.** Read from all ranks and store the sum: ``out[i]`` is the sum of
# element ``i`` of every rank's tensor. This is an *all-reduce*. The arguments
# are ``buffers_ptr, out_ptr, N, RANKS: tl.constexpr, BLOCK: tl.constexpr``.

sum_kernel = None  # your kernel


def check(kernel, out, expected, *arguments):
    """Launch a kernel between barriers; say if rank 0's tensor is right."""
    if kernel is None:
        say("not solved yet")
        return False
    meet_ranks()
    grid = (triton.cdiv(len(expected), BLOCK),)
    kernel[grid](x.buffers, *arguments, BLOCK=BLOCK)
    meet_ranks()
    right = torch.equal(out, expected)
    say("right" if right else "wrong")
    return right


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
# ``handle.barrier()`` is such a barrier from PyTorch, and
# ``torch.ops.symm_mem`` has whole collectives on symmetric memory, such as
# ``one_shot_all_reduce``. `PyTorch's page
# <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`_ lists both.

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
