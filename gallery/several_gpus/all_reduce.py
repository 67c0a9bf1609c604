# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Sum tensors over the GPUs of one host in a Triton kernel: in one shot, in
# two, and fused with a residual and RMSNorm."""
# dtypes = ["float16", "bfloat16", "float32"]
# backward = false
# deterministic = true
# longer = "it shares memory among ranks, and has a kernel for each shot"
# gpus = 2
# ///
r"""
All-reduce in one shot and in two
=================================

A layer that is spread over several GPUs leaves on each GPU a partial sum of the
whole result. An *all-reduce* adds these tensors up, and every GPU gets the sum.
Small tensors, as in decoding, cost mostly waiting, and a kernel with a single
barrier keeps that short. Between hosts, use NCCL; for many megabytes, measure
NCCL and PyTorch's two shots as well.

After this page you can

* add up tensors of several GPUs in one launch, with equal results on all;
* choose between one shot and two, by what each reads and waits for, and by
  measuring;
* count barriers on the GPU, so that a CUDA graph can be replayed;
* notice a rank that does not come.
"""

# sphinx_gallery_tags = ["several gpus", "atomics", "memory bound", "inference"]
import os

import pandas as pd
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
from triton_gallery.ranks import (
    join_ranks,
    meet_ranks,
    replays,
    symmetric_floats,
)

RANK, RANKS = join_ranks()


def say(*texts, **options):
    """Print on rank 0."""
    if RANK == 0:
        print(*texts, **options)


def tensor_of(seed, N):
    """Return random numbers; the seed of a rank's tensor is its number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=generator).to(DEVICE)


def exact_sum(N):
    """Return what all ranks should get, in float64."""
    return sum(tensor_of(rank, N).double() for rank in range(RANKS))


# %%
# In PyTorch
# ----------
#
# ``torchrun --nproc-per-node=2 all_reduce.py`` starts one process for each GPU;
# these are the *ranks*. ``peer_memory.py`` explains them, symmetric memory, and
# ``acquire`` and ``release``. In the fold at the top, ``tensor_of`` makes a
# rank's tensor, ``exact_sum`` adds up all, and ``say`` prints on rank 0.

if __name__ == "__main__":
    total = tensor_of(RANK, 4)
    dist.all_reduce(total)
    torch.testing.assert_close(total.double(), exact_sum(4))
    say("ranks:", RANKS, "sum:", *(f"{value:.3f}" for value in total.tolist()))

# %%
# The first kernel
# ----------------
#
# In *one shot*, each rank reads the whole tensor of each other rank. The kernel
# waits for all ranks, adds up their tensors, and waits again.
# ``symmetric_floats`` gives each rank a tensor, ``x.mine``, and tables of the
# addresses of all ranks' tensors and signal pads, ``x.buffers`` and ``x.pads``.
#
# Every pad has a *count* for each program. In ``meet``, a program adds 1 to its
# count on all ranks, and waits until the count on its own pad reaches a target,
# the first multiple of ``RANKS`` above the count it read. It reads before it
# adds, so of this barrier it can have read other ranks' adds alone: too few for
# another target. Say two ranks have passed two barriers. Rank 1 reads 4, adds
# 1, waits for 6. Rank 0 reads 5 and adds 1; both see 6 and pass. After
# ``tries`` looks a program gives up: it sets ``late``, and the sum is NaN.


@triton.jit
def count_at(pads_ptr, rank):
    """Return a pointer to this program's count on a rank's pad."""
    address = tl.load(pads_ptr + rank)
    return address.to(tl.pointer_type(tl.int64)) + tl.program_id(axis=0)


@triton.jit
def tensor_at(buffers_ptr, rank):
    """Return a pointer to a rank's tensor."""
    ptr = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(ptr, 16)  # bytes: a thread loads 4 floats at once


@triton.jit
def meet(pads_ptr, late_ptr, rank, tries, RANKS: tl.constexpr):
    """Wait for this program on all ranks; return 0, or NaN if one is late."""
    mine_ptr = count_at(pads_ptr, rank)  # read by adding 0: tl.load has no sem
    # Relaxed (in no order): it only picks the target, and the loop acquires.
    count = tl.atomic_add(mine_ptr, 0, sem="relaxed", scope="sys")
    target = (count // RANKS + 1) * RANKS
    tl.debug_barrier()  # until all threads of the program have read and written
    for peer in tl.static_range(RANKS):  # unrolled
        tl.atomic_add(count_at(pads_ptr, peer), 1, sem="release", scope="sys")
    while (count < target) & (tries > 0):
        tries -= 1
        count = tl.atomic_add(mine_ptr, 0, sem="acquire", scope="sys")
    tl.store(late_ptr, 1, mask=count < target)
    tl.debug_barrier()  # no thread reads before all ranks have come
    return tl.where(count < target, float("nan"), 0.0)


@triton.jit
def one_shot_kernel(
    out_ptr,
    buffers_ptr,
    pads_ptr,
    late_ptr,
    rank,
    N,
    tries,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    nan_if_late = meet(pads_ptr, late_ptr, rank, tries, RANKS)
    for start in range(pid * BLOCK, N, programs * BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):  # on all ranks in this order
            acc += tl.load(
                tensor_at(buffers_ptr, peer) + offs, mask=offs < N, other=0.0
            )
        tl.store(out_ptr + offs, acc + nan_if_late, mask=offs < N)
    meet(pads_ptr, late_ptr, rank, tries, RANKS)  # now x may be overwritten


BLOCK = 2048  # numbers that a program adds at a time
PROGRAMS = 32  # few: as each waits for others, all must fit on the GPU at once
MANY = 70_000  # numbers of a check in which a program has several blocks
LARGEST = 2**24  # numbers that a tensor has at most
TRIES = 2**26  # looks at a count before a program gives up
if DEVICE.type == "cpu":  # less, for Triton's interpreter
    PROGRAMS, MANY, LARGEST, TRIES = 2, 5000, 5000 * RANKS, 2**20
assert MANY > PROGRAMS * BLOCK
OPTIONS = {"RANKS": RANKS, "BLOCK": BLOCK, "num_warps": 16}  # 4 floats a thread
x = symmetric_floats(LARGEST)
late = torch.zeros(1, dtype=torch.int32, device=DEVICE)


def one_shot(N):
    """Return the sum of the first N numbers of all ranks' tensors."""
    assert N <= LARGEST
    out = torch.empty(N, device=DEVICE)
    args = x.buffers, x.pads, late, RANK
    grid = (min(triton.cdiv(N, BLOCK), PROGRAMS),)
    one_shot_kernel[grid](out, *args, N=N, tries=TRIES, **OPTIONS)
    return out


# %%
# Is it right?
# ------------
#
# Each addition rounds by at most :math:`2^{-24}` of ``RANKS * 6``. All ranks
# add in the same order: sums are equal. In the interpreter, the last N is 5000.


def check_sum(out):
    """Assert that a tensor is the sum, equal on all ranks."""
    expected = exact_sum(len(out))
    tolerance = RANKS * 2**-24 * RANKS * 6  # tensor_of draws none beyond 6
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    of_rank_0 = out.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(out, of_rank_0)
    assert late.item() == 0, "a rank did not come"
    off = (out.double() - expected).abs().max().item()
    return f"error {off:.1e}, tolerance {tolerance:.1e}"


for N in (1, 1000, MANY):
    x.mine[:N] = tensor_of(RANK, N)
    say(N, "numbers:", check_sum(one_shot(N)))

# %%
# How fast?
# ---------
#
# Ranks begin at different moments and wait for each other, so we time 20 calls
# in a row, in a CUDA graph. (*The op* says why the graph can be replayed.)


def time_calls(calls_of, sizes, width=4, repeats=20):
    """Time calls for N numbers of a width in bytes, several in a row."""
    times = {}
    for N in sizes:
        found = gpu_time(replays(calls_of(N), repeats), prepare=dist.barrier)
        for name, (*each, waited) in found.items():
            found[name] = *(time / repeats for time in each), waited
        times[width * N] = found
    return times


def microseconds(times):
    """Return a table: medians, and their 20th and 80th percentiles."""
    rows = []
    for calls in times.values():
        row = {}
        for name, (ms, *ends, _, _) in calls.items():
            low, high = (f"{1e3 * end:.1f}" for end in ends)
            row[name] = f"{1e3 * ms:.1f} ({low}-{high})"
        rows.append(row)
    return pd.DataFrame(rows, pd.Index(times, name="bytes")).to_string()


def where_less(times, first, second):
    """Return the sizes at which the first call took less than the second."""
    less = [size for size, of in times.items() if of[first][0] < of[second][0]]
    return less or "none of these sizes"


if __name__ == "__main__" and DEVICE.type == "cuda":
    t = symm_mem.empty(LARGEST, dtype=torch.float32, device=x.mine.device)
    WORLD = dist.group.WORLD.group_name
    symm_mem.rendezvous(t, WORLD)
    t.zero_()
    symm_ops = torch.ops.symm_mem

    def first_calls(N):
        """Return the calls for N numbers."""
        return {
            "this kernel": lambda: one_shot(N),
            "NCCL": lambda: dist.all_reduce(t[:N]),
            "PyTorch, one shot": lambda: symm_ops.one_shot_all_reduce(
                t[:N], "sum", WORLD
            ),
        }

    times = time_calls(first_calls, (2**12, 2**16, 2**24))
    say(microseconds(times))
    small, medium, _ = (of["this kernel"][0] for of in times.values())
    say(f"16 times the first size takes {medium / small:.1f} times as long")

# %%
# The GPU run prints the microseconds of a call: the median, and in brackets the
# 20th and the 80th percentile. Where 16 times the size takes far less than 16
# times as long, most of the time does not depend on the size. The two barriers
# of this kernel may be a part of that. We remove one. (Compare times within a
# table only: the GPUs' clocks may change between tables.)
#
# One barrier
# -----------
#
# The second barrier keeps a rank from overwriting what another one still reads.
# *Two buffers in rotation* replace it. Launches 1, 3, 5 write their tensor to
# buffer A, launches 2, 4, 6 to B. Below, rank 1 is late, and dots are waiting:
#
# .. code-block:: text
#
#    rank 0  1: write A | 1: read A  2: write B  ...... | 2: read B  3: write A
#    rank 1  1: write A |         1: read A  2: write B |         2: read B
#                      meet                            meet
#
# Between the two meetings, rank 0 writes B while rank 1 still reads A. Rank 0
# writes A again only after the second one, so rank 1 has read it.
#
# ``count // RANKS`` is the number of launches before this one: 0 in launch 1.
# If it is even, the launch uses buffer A. Program *p* reads only what program
# *p* of each rank wrote, so it meets those alone, and has its own count. A
# block must belong to the same program in every launch, so every launch has
# ``PROGRAMS`` programs, even if some have nothing to do. With 16 in launch 2,
# program 0 would read block 16 from B, too, where program 16, whose count is a
# launch behind, writes in launch 3. (``one_shot`` may launch fewer: after its
# second barrier, none still reads.)


@triton.jit
def one_barrier_kernel(
    given_ptr,
    out_ptr,
    buffers_ptr,
    pads_ptr,
    late_ptr,
    rank,
    N,
    capacity,
    tries,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(axis=0) * BLOCK
    step = tl.num_programs(axis=0) * BLOCK
    count_ptr = count_at(pads_ptr, rank)
    count = tl.atomic_add(count_ptr, 0, sem="relaxed", scope="sys")
    begin = ((count // RANKS) % 2) * capacity  # of this launch's buffer
    mine_ptr = tensor_at(buffers_ptr, rank)
    # A program writes the blocks that the same program of each rank reads
    for start in range(first, N, step):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        given = tl.load(given_ptr + offs, mask=offs < N)
        tl.store(mine_ptr + begin + offs, given, mask=offs < N)
    nan_if_late = meet(pads_ptr, late_ptr, rank, tries, RANKS)
    for start in range(first, N, step):
        offs = start + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            ptr = tensor_at(buffers_ptr, peer) + begin
            acc += tl.load(ptr + offs, mask=offs < N, other=0.0)
        tl.store(out_ptr + offs, acc + nan_if_late, mask=offs < N)


CAPACITY = triton.cdiv(LARGEST, 16) * 16  # aligned: Triton sees the factor 16
rotating = symmetric_floats(2 * CAPACITY)


def one_barrier(given):
    """Return the sum of all ranks' tensors.

    All make the same calls with the same N in the same order, on one stream.
    """
    assert given.is_contiguous()
    assert given.dtype == torch.float32
    assert given.numel() <= CAPACITY
    out, N = torch.empty_like(given), given.numel()
    args = rotating.buffers, rotating.pads, late, RANK
    one_barrier_kernel[(PROGRAMS,)](
        given, out, *args, N=N, capacity=CAPACITY, tries=TRIES, **OPTIONS
    )
    return out


for N in (1, MANY, 3000):
    check_sum(one_barrier(tensor_of(RANK, N)))

# %%
# One barrier less saves waiting, but the copy takes longer for a larger tensor.
# The last line of the GPU run says at which of its sizes one barrier took less
# time. (The times of two barriers are without their copy, to ``x.mine``.)

if __name__ == "__main__" and DEVICE.type == "cuda":

    def barrier_calls(N):
        """Return the calls for N numbers."""
        given = torch.randn(N, device=DEVICE)
        return {
            "two barriers": lambda: one_shot(N),
            "one barrier, and a copy": lambda: one_barrier(given),
        }

    times = time_calls(barrier_calls, (2**12, 2**16))
    say(microseconds(times))
    pays = where_less(times, "one barrier, and a copy", "two barriers")
    say("one barrier took less time at", pays)

# %%
# Two shots
# ---------
#
# In *two shots*, rank *r* adds up slice *r* of all ranks' tensors, and
# overwrites slice *r* of its own with the sum. This is safe: until the barrier,
# no other rank reads slice *r*. Then each rank reads every slice, of ``size``
# numbers, from the rank that has it. These steps are called *reduce-scatter*
# and *all-gather*. What a rank reads from the others, in sizes of the tensor:

if __name__ == "__main__":
    for ranks in (2, 4, 8):
        two = 2 * (ranks - 1) / ranks
        say(f"{ranks} ranks: one shot reads {ranks - 1}, two read {two}")

# %%
# From three ranks on, two shots read less, but they need one more barrier, and
# store a slice that others read. (The last barrier only protects ``x``; two
# buffers would replace it.)


@triton.jit
def two_shot_kernel(
    out_ptr,
    buffers_ptr,
    pads_ptr,
    late_ptr,
    rank,
    size,
    tries,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(axis=0) * BLOCK
    step = tl.num_programs(axis=0) * BLOCK
    mine_ptr = tensor_at(buffers_ptr, rank) + rank * size
    nan_if_late = meet(pads_ptr, late_ptr, rank, tries, RANKS)
    # First shot: add up this rank's slice, in place
    for start in range(first, size, step):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,), in the slice
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            ptr = tensor_at(buffers_ptr, peer) + rank * size
            acc += tl.load(ptr + offs, mask=offs < size, other=0.0)
        tl.store(mine_ptr + offs, acc + nan_if_late, mask=offs < size)
    nan_if_late += meet(pads_ptr, late_ptr, rank, tries, RANKS)  # NaN stays NaN
    # Second shot: fetch each rank's slice
    for start in range(first, size, step):
        offs = start + tl.arange(0, BLOCK)
        for peer in tl.static_range(RANKS):
            ptr = tensor_at(buffers_ptr, peer) + peer * size
            total = tl.load(ptr + offs, mask=offs < size) + nan_if_late
            tl.store(out_ptr + peer * size + offs, total, mask=offs < size)
    meet(pads_ptr, late_ptr, rank, tries, RANKS)


def two_shots(N, tries=TRIES):
    """Return the sum of the first N numbers, and overwrite x.mine."""
    assert N % RANKS == 0
    assert N <= LARGEST
    out = torch.empty(N, device=DEVICE)
    args = x.buffers, x.pads, late, RANK
    grid = (min(triton.cdiv(N // RANKS, BLOCK), PROGRAMS),)
    two_shot_kernel[grid](out, *args, size=N // RANKS, tries=tries, **OPTIONS)
    return out


for N in (RANKS, 999 * RANKS, MANY * RANKS):
    x.mine[:N] = tensor_of(RANK, N)
    check_sum(two_shots(N))

# %%
# With two ranks, two shots save no reading. With more, they pay where reading
# what they save takes longer than what they add: for large tensors (see the
# last line).

if __name__ == "__main__" and DEVICE.type == "cuda":

    def shot_calls(N):
        """Return the calls for N numbers."""
        return {"one": lambda: one_shot(N), "two": lambda: two_shots(N)}

    times = time_calls(shot_calls, (2**14, 2**18, 2**22, 2**24))
    say(microseconds(times))
    say("two shots took less time at", where_less(times, "two", "one"))

# %%
# The op
# ------
#
# ``all_reduce`` uses two buffers for one shot (one barrier) and for two shots
# (two barriers), and chooses by the bytes and the ranks. It takes tensors of
# any size, in half precision too. All ranks call ``all_reduce_memory`` once for
# a dtype and the largest size, and pass what it returns to every call. Its
# ``late`` is in the CPU's memory: the next call sees it without waiting for the
# GPU, and raises an error.
#
# A transformer then adds a residual and takes the RMSNorm. A program of
# ``all_reduce_rms_norm`` does so while it has a row of the sum in registers.

from triton_gallery_ops.all_reduce import (
    _all_reduce_two_shots,
    all_reduce,
    all_reduce_check,
    all_reduce_memory,
    all_reduce_rms_norm,
)

# %%
# This prints from which size on it chooses two shots, and checks a size that
# ``RANKS`` does not divide. For two ranks, two shots read as much as one, but
# the op's one shot also copies the whole tensor within the GPU.

for ranks in (2, 4, 8):
    two = [2**k for k in range(30) if _all_reduce_two_shots(2**k, ranks)]
    say(f"{ranks} ranks: two shots from {two[0]} bytes on")
memory = all_reduce_memory(LARGEST, torch.float32)
for shots in (1, 2):
    check_sum(all_reduce(tensor_of(RANK, 4001), memory, shots))

# %%
# The op works in a CUDA graph. Its kernels read their count on the GPU: if the
# target were an argument, a second replay would find it reached already.
# ``"thread_local"`` lets other threads, such as NCCL's, call CUDA meanwhile.

if __name__ == "__main__" and DEVICE.type == "cuda":
    given = torch.zeros(1000, device=DEVICE)
    all_reduce(given, memory)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = all_reduce(given, memory)
    for turn in range(3):
        given.fill_(turn + RANK)
        graph.replay()
        assert out.eq(sum(turn + rank for rank in range(RANKS))).all()
    say("replayed three times, with the right sums")

# %%
# The result
# ----------
#
# In the chart of the GPU run, *Triton* is ``all_reduce``, which copies its
# tensor first. The others work in symmetric memory, and NCCL and PyTorch's two
# shots in place. A rate is the bytes of one rank's tensor over the time; the
# second table has microseconds of a call. A CPU time is that of a graph's
# replay, divided by its calls.

SIZES = [2**k for k in (12, 14, 16, 18, 19, 20, 22, 24)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    t16 = symm_mem.empty(LARGEST, dtype=torch.bfloat16, device=x.mine.device)
    symm_mem.rendezvous(t16, WORLD)
    t16.zero_()
    memory = all_reduce_memory(LARGEST, torch.bfloat16)

    def result_calls(N):
        """Return the calls for N numbers."""
        given = torch.randn(N, device=DEVICE).bfloat16()
        return {
            "Triton": lambda: all_reduce(given, memory),
            "NCCL": lambda: dist.all_reduce(t16[:N]),
            "PyTorch, one shot": lambda: symm_ops.one_shot_all_reduce(
                t16[:N], "sum", WORLD
            ),
            "PyTorch, two shots": lambda: symm_ops.two_shot_all_reduce_(
                t16[:N], "sum", WORLD
            ),
        }

    times = time_calls(result_calls, SIZES, width=2)
    all_reduce_check(memory)
    results = rate_table(times, "bytes", "GB/s", lambda size: size / 1e6)
    say("all-reduce, bfloat16", results.to_string(), sep="\n")
    us = results.assign(us=results["bytes"] / results["GB/s"] / 1e3)
    us = us.pivot(index="bytes", columns="series", values="us")
    say(us.round(1).assign(fastest=us.idxmin(axis=1)).to_string())

# %%
# Next, *Triton* is ``all_reduce_rms_norm`` on tokens of 8192 numbers, beside
# NCCL, an addition and PyTorch's ``rms_norm``. The rate counts the sum's bytes.

if __name__ == "__main__" and DEVICE.type == "cuda":
    weight = torch.ones(8192, dtype=torch.bfloat16, device=DEVICE)

    def in_parts(given, residual):
        """Return the same from PyTorch's operators."""
        dist.all_reduce(given)
        h = given + residual
        return torch.nn.functional.rms_norm(h, weight.shape, weight, 1e-6), h

    def fused_calls(tokens):
        """Return the calls for some tokens."""
        given, residual = torch.randn(2, tokens, 8192, device=DEVICE).bfloat16()
        return {
            "Triton": lambda: all_reduce_rms_norm(
                given, residual, weight, 1e-6, memory
            ),
            "NCCL and PyTorch": lambda: in_parts(given, residual),
        }

    times = time_calls(fused_calls, (1, 8, 64, 512), width=1)
    all_reduce_check(memory)
    results_fused = rate_table(
        times, "tokens", "GB/s", lambda tokens: 2 * 8192 * tokens / 1e6
    )
    say("sum, residual and norm, bfloat16", results_fused.to_string(), sep="\n")

# %%
# Break it
# --------
#
# What if a rank does not come? Here only rank 0 calls ``two_shots``. It gives
# up at the first barrier, and the whole sum is NaN. With ``=`` instead of
# ``+=`` at the second ``meet``, slice 1 would be the numbers of rank 1 alone:
# there rank 0 reads 1, so with two ranks its own add reaches the target, 2.
#
# A rank that comes later may find its target reached and notice nothing. From
# here on the counts of ``x`` are off, and the job has failed: raise an error,
# and ``torchrun`` ends all ranks. After a restart all counts are 0.

if __name__ == "__main__":
    if RANK == 0:
        out = two_shots(1000 * RANKS, tries=100)
        say("all NaN:", out.isnan().all().item(), "late:", late.item())
        assert out.isnan().all() == (RANKS > 1)
    meet_ranks()

# %%
# Exercises
# ---------
#
# Write a kernel and start the script with ``torchrun`` and two ranks: it says
# whether the kernel is right, without GPUs too.
#
# **1.** The first half of two shots alone: rank *r* gets slice *r* of the sum.
# The arguments are ``out_ptr, buffers_ptr, rank, size, RANKS: tl.constexpr,
# BLOCK: tl.constexpr``. ``meet_ranks`` waits for all ranks before and after, so
# the kernel has no ``meet``.

scatter_kernel = None  # your kernel


def check(kernel, N, expected, *arguments, changed=()):
    """Launch a kernel between barriers; say if it is right on all ranks.

    ``changed`` has pairs of a tensor and what the kernel makes of it.
    """
    if kernel is None:
        say("not solved yet")
        return False
    x.mine[:N] = tensor_of(RANK, N)
    out = torch.full_like(expected, float("nan"))
    meet_ranks()
    grid = (out.shape[0] if out.ndim > 1 else triton.cdiv(len(out), BLOCK),)
    kernel[grid](out, x.buffers, *arguments, RANKS, BLOCK)
    meet_ranks()
    pairs = (out, expected), *changed
    right = all(torch.allclose(*pair, rtol=0, atol=1e-5) for pair in pairs)
    verdict = torch.tensor(int(right), device=DEVICE)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    say("right" if verdict.item() else "wrong")
    return bool(verdict.item())


def check_scatter(kernel, size=3000):
    """Check exercise 1."""
    total = exact_sum(RANKS * size).float()
    mine = total[RANK * size :][:size]
    return check(kernel, RANKS * size, mine, RANK, size)


if __name__ == "__main__":
    check_scatter(scatter_kernel)

# %%
# **2.** Compute on the sum: program *i* adds row *i* of a residual to row *i*
# of the sum, stores that over the residual, and its RMSNorm to ``out``. The
# arguments are ``out_ptr, buffers_ptr, residual_ptr, weight_ptr, H, eps, RANKS:
# tl.constexpr, BLOCK: tl.constexpr``. H is at most BLOCK.

norm_kernel = None  # your kernel


def check_norm(kernel, rows=3, H=1500, eps=1e-6):
    """Check exercise 2."""
    residual, weight = tensor_of(98, rows * H).view(rows, H), tensor_of(99, H)
    h = exact_sum(rows * H).view(rows, H).float() + residual
    expected = torch.nn.functional.rms_norm(h, (H,), weight, eps)
    given = residual, weight, H, eps
    return check(kernel, rows * H, expected, *given, changed=[(residual, h)])


if __name__ == "__main__":
    check_norm(norm_kernel)
    dist.destroy_process_group()

# %%
# Answers
# -------
#
# **1.** In every rank's tensor, read the slice that belongs to this rank.


@triton.jit
def scatter_answer_kernel(
    out_ptr, buffers_ptr, rank, size, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        ptr = tensor_at(buffers_ptr, peer) + rank * size
        acc += tl.load(ptr + offs, mask=offs < size, other=0.0)
    tl.store(out_ptr + offs, acc, mask=offs < size)


# %%
# **2.** Each thread stores to the residual only where it has loaded, so no
# barrier is needed in between.


@triton.jit
def norm_answer_kernel(
    out_ptr,
    buffers_ptr,
    residual_ptr,
    weight_ptr,
    H,
    eps,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = cols < H
    offs = tl.program_id(axis=0) * H + cols
    h = tl.load(residual_ptr + offs, mask=mask, other=0.0)
    for peer in tl.static_range(RANKS):
        ptr = tensor_at(buffers_ptr, peer)
        h += tl.load(ptr + offs, mask=mask, other=0.0)
    tl.store(residual_ptr + offs, h, mask=mask)
    weight = tl.load(weight_ptr + cols, mask=mask)
    y = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps) * weight
    tl.store(out_ptr + offs, y, mask=mask)
