# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply rows of all GPUs while copy engines still fetch them: a kernel that
# begins with its own rows and waits for flags of the others."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = false
# deterministic = true
# longer = "two products beside communication, and the memory that they share"
# gpus = 2
#
# [tool.triton-gallery.not_for]
# gather_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# timed_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# scatter_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _all_gather_matmul_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _all_gather_matmul_scatter_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# ///
r"""
All-gather and matmul: hide communication behind a matrix product
=================================================================

A model that is split over GPUs (tensor parallel) often gathers rows from all of
them and then multiplies. The product need not wait for all rows: it begins with
the rows that are here, while others are copied. With few rows, what no tile
hides weighs more: the last table of the GPU run names the fastest way for each
number of tokens (rows of all GPUs together).

After this page you can

* copy from other GPUs beside a kernel, and tell it by flags what has arrived;
* order the tiles of a product by when their rows arrive;
* draw from the GPU's own clock when rows came and when they were used;
* store tiles in the memory of the GPU that needs them.
"""

# sphinx_gallery_tags = ["several gpus", "matmul", "atomics", "TMA"]
import math
import os
import threading
import time
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# Whether tensor descriptors work: from Hopper on, and in the interpreter
HAS_TMA = DEVICE.type == "cpu" or (
    not torch.version.hip and torch.cuda.get_device_capability() >= (9, 0)
)

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.ranks import join_ranks, meet_ranks, shared_bytes

RANK, RANKS = join_ranks()
GROUP = dist.group.WORLD.group_name  # of all ranks
SMALL = DEVICE.type == "cpu"  # small sizes, for the interpreter
SIDE = None if SMALL else torch.cuda.Stream(priority=-1)  # goes first
generator = torch.Generator(device=DEVICE).manual_seed(RANK)

# PyTorch 2.13 has new names for two collectives.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def say(*texts):
    """Print on rank 0."""
    if RANK == 0:
        print(*texts)


def random(*shape):
    """Return random numbers, others on each rank."""
    return torch.randn(*shape, device=DEVICE, generator=generator).to(DTYPE)


def symmetric(dtype, *shape):
    """Return every rank's tensor, by rank, at first zero."""
    parts = shared_bytes(math.prod(shape) * dtype.itemsize)
    return [part.view(dtype).view(shape) for part in parts]


def pause():
    """Have what follows on this stream be late, by some milliseconds."""
    time.sleep(0.3) if SMALL else torch.cuda._sleep(2**26)  # cycles


def begin_aside(work):
    """Queue work on the side stream, after what this stream has queued so far.

    Returns a function that has this stream wait for the work; the CPU goes on.
    Without a GPU, a thread does it.
    """
    if SMALL:
        thread = threading.Thread(target=work)
        thread.start()
        return thread.join
    SIDE.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE):
        work()
    return lambda: torch.cuda.current_stream().wait_stream(SIDE)


def on_all_ranks(right):
    """Return whether something is right on every rank."""
    verdict = torch.tensor(int(right), device=DEVICE)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def scattered_error(y, x, weight):
    """Return errors of all ranks' summed products as parts of the allowed."""
    parts = torch.stack(exact(x, weight))
    dist.all_reduce(parts)
    expected, bound = parts[:, RANK * ROWS :][:, :ROWS]
    bound += torch.finfo(DTYPE).eps * expected.abs()
    return (y[:, -512:].double() - expected) / bound


def what_to_take(times):
    """Return a table of times, and of what takes the least; not the roof."""
    rows = []
    for of in times.values():
        gpu = {name: 1e3 * ms for name, (ms, *_) in of.items()}
        del gpu["Roof"]
        call = {name: max(us, of[name][3]) for name, us in gpu.items()}
        row = {k: f"{us:.0f} / {of[k][3]:.0f}" for k, us in gpu.items()}
        row["take"] = min(call, key=call.get).partition(",")[0]
        row["in a graph"] = min(gpu, key=gpu.get).partition(",")[0]
        rows.append(row)
    index = pd.Index(times, name="tokens")
    return pd.DataFrame(rows, index).to_string()


def timeline(x, weight):
    """Return when chunks came, and when their tiles began and ended, in us.

    Three lists, in the order of the tiles; own chunks are first, but none came.
    """
    own_chunks = ROWS // CHUNK
    tiles = CHUNK // TILE[0] * triton.cdiv(N, TILE[1])
    came = torch.zeros(RANKS * own_chunks, dtype=torch.int64, device=DEVICE)
    times = came.new_zeros(RANKS * own_chunks, tiles, 2)
    meet_ranks()
    pause()
    gather_matmul(
        x,
        weight,
        launch=partial(timed_kernel[(PROGRAMS - 1,)], times),
        stamp=lambda place: stamp_kernel[(1,)](came, place),
    )
    began, ended = times[..., 0].amin(1), times[..., 1].amax(1)
    came = came.roll(-RANK * own_chunks)[own_chunks:]
    return [((t - began.min()) / 1e3).tolist() for t in (came, began, ended)]


def draw(came, began, ended):
    """Draw a bar for each chunk, its tiles, and a mark where it came."""
    chunks, own_chunks = len(began), len(began) - len(came)
    _, axes = plt.subplots(figsize=(8, 0.3 * chunks + 1), layout="constrained")
    lasted = [e - b for b, e in zip(began, ended, strict=True)]
    axes.barh(range(chunks), lasted, left=began, height=0.5, label="its tiles")
    marks = range(own_chunks, chunks)
    axes.plot(came, marks, "k|", markersize=12, label="it came")
    axes.invert_yaxis()
    axes.set(xlabel="microseconds", ylabel="chunk")
    axes.legend()


# %%
# In PyTorch
# ----------
#
# Each GPU has a process that runs this script, its *rank*: ``peer_memory.py``
# explains it. Every rank has some rows ``x``, and a part of a weight. It needs
# the product of *all* ranks' rows with its part of the weight. ``SMALL`` is
# true without a GPU: Triton's interpreter then gets small matrices.

DTYPE = torch.float32 if SMALL else torch.bfloat16
# Rows of each rank, length of the sums, columns of each rank's result
ROWS, K, N = (64, 48, 64) if SMALL else (8192 // RANKS, 8192, 28672 // RANKS)


def gather(x):
    """Return the rows of all ranks."""
    everyone = x.new_empty(RANKS * x.shape[0], x.shape[1])
    all_gather(everyone, x)
    return everyone


x, weight = random(ROWS, K), random(N, K)
everyone = gather(x)

if __name__ == "__main__":
    say(f"{RANKS} ranks: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    LINK, PEAK = 450e3, 989e6  # bytes and operations per microsecond
    for ranks in (2, 4, 8):  # at the sizes of GPUs
        copies = 2 * 8192 * 8192 * (ranks - 1) / ranks / LINK
        least = 2 * 8192 * 8192 * 28672 / ranks / PEAK
        us = f"copies to a rank {copies:.0f} us, product {least:.0f} us"
        say(f"at GPU sizes, {ranks} GPUs: {us}")

# %%
# These are bounds from NVIDIA's data sheet of H100 and H200: 450 GB/s in each
# direction of NVLink, which joins the GPUs, and 989 TFLOP/s. The product takes
# longer and can hide the copies, so the least time for both is that of the
# *product alone*. The GPU run prints what PyTorch takes without overlap.

if __name__ == "__main__" and DEVICE.type == "cuda":
    calls = {
        "NCCL": lambda: gather(x),
        "cuBLAS": lambda: everyone @ weight.T,
        "NCCL, then cuBLAS": lambda: gather(x) @ weight.T,
    }
    for name, (ms, *_) in gpu_time(calls, prepare=dist.barrier).items():
        say(f"{name}: {1e3 * ms:.0f} us")

# %%
# Rows that arrive beside a kernel
# --------------------------------
#
# Each rank has one buffer for the rows of all ranks, in symmetric memory. It
# puts its own rows there, and all ranks meet at a barrier. Then a *side stream*
# copies the other ranks' rows in chunks: ``begin_aside`` queues that there, and
# returns a function that has this stream wait for it. *Copy engines*, units
# that only copy, make contiguous copies between GPUs and leave the
# multiprocessors to the kernel. Each rank begins with the next rank's rows:
# while ranks keep pace, no two read one GPU at once: they would share its link.
#
# After each chunk, the side stream sets the chunk's flag by one more copy: of a
# 1 in the memory of the GPU that the chunk came from (``ONES``). A stream
# begins a copy when the one before it has ended, so the chunk is there when its
# flag is 1. The 1 must not come from this GPU: a fill or a copy within a GPU
# may run as a kernel. Such a kernel would need a free multiprocessor, but the
# programs that wait for its flag hold all of them: a deadlock.

BUFFERS = symmetric(DTYPE, RANKS * ROWS, K)  # a list: each rank's buffer
ONES = symmetric(torch.int32, 1)
ONES[RANK].fill_(1)
HANDLE = None if SMALL else symm_mem.rendezvous(BUFFERS[RANK], GROUP)
meet_ranks()  # the CPU waits, for all ranks


def barrier(channel):
    """Have this stream wait for other ranks' streams; the CPU goes on.

    With a channel each, two barriers cannot take each other's signals.
    """
    dist.barrier() if SMALL else HANDLE.barrier(channel, 100_000)  # ms


def offer(x, chunk):
    """Let other ranks read x; return flags, set for this rank's chunks."""
    assert x.shape == (ROWS, K)
    assert ROWS % chunk == 0
    BUFFERS[RANK][RANK * ROWS : (RANK + 1) * ROWS].copy_(x)
    barrier(0)  # the rows of all ranks may be read
    flags = torch.zeros(RANKS, ROWS // chunk, dtype=torch.int32, device=DEVICE)
    flags[RANK] = 1
    return flags.view(-1)


def pull(flags, chunk, late=False, stamp=None):
    """Copy the rows of other ranks in chunks, and set a flag after each."""
    if late:
        pause()  # the stream sleeps for some milliseconds
    of_a_rank = ROWS // chunk  # chunks
    for step in range(of_a_rank, RANKS * of_a_rank):
        place = (RANK * of_a_rank + step) % (RANKS * of_a_rank)
        peer = place // of_a_rank
        rows = slice(place * chunk, (place + 1) * chunk)
        BUFFERS[RANK][rows].copy_(BUFFERS[peer][rows])
        flags[place : place + 1].copy_(ONES[peer])  # after the rows
        if stamp:  # for the timeline below
            stamp(place)


def begin_gather(x, chunk, **options):
    """Begin to fill this rank's buffer; return flags, and what waits for it."""
    flags = offer(x, chunk)
    return flags, begin_aside(partial(pull, flags, chunk, **options))


CHUNK = 32 if SMALL else 1024  # rows
flags, end = begin_gather(x, CHUNK)
end()  # this stream waits for the side stream
torch.testing.assert_close(BUFFERS[RANK], everyone, rtol=0, atol=0)
assert flags.eq(1).all()
meet_ranks()  # all have copied: the next call may write x into the buffer

# %%
# The first kernel
# ----------------
#
# The product is *persistent*, as in *Persistent matmul*: each program computes
# many tiles. *Tensor descriptors* tell the TMA, a unit of Hopper and later GPUs
# (``HAS_TMA``), the shapes of a matrix and of its tiles. It loads tiles, with
# zeros past the edge, and stores only what lies within. Two things are new.
# Tiles of this rank's rows come first, then the others in the order of the
# copies; within a chunk, down a column, so that consecutive tiles share a tile
# of the weight. Before every tile, a program waits for the flag of the tile's
# chunk. After ``tries`` more reads, some seconds, it gives up: the tile is NaN.
#
# ``tl.load`` has no ``sem``, so ``wait`` reads the flag by adding 0 atomically.
# ``sem="acquire"`` orders later loads after the read that saw the 1, and
# ``scope="sys"`` includes writers outside this GPU. There is no release to
# write: the side stream copies the 1 after the rows.
#
# One thread reads the flag; ``tl.debug_barrier`` holds back the others. Only
# then are TMA loads issued; we do not claim that PTX's memory model orders them
# (its *async proxy*) after the acquire: the check with late copies tests it.


@triton.jit
def wait(flag_ptr, tries):
    """Wait until a flag is set; return 0, or NaN if it is not in time."""
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while (seen == 0) & (tries > 0):
        tries -= 1
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # one thread has seen it: now all may load
    return tl.where(seen == 0, float("nan"), 0.0)


@triton.jit
def product(x_desc, w_desc, off_m, off_n):
    """Return a tile of x @ weight.T, in float32."""
    tile: tl.constexpr = [x_desc.block_shape[0], w_desc.block_shape[0]]
    acc = tl.zeros(tile, dtype=tl.float32)  # (BLOCK_M, BLOCK_N)
    for k in range(0, x_desc.shape[1], x_desc.block_shape[1]):
        # (BLOCK_M, BLOCK_K) times (BLOCK_K, BLOCK_N)
        acc = tl.dot(x_desc.load([off_m, k]), w_desc.load([off_n, k]).T, acc)
    return acc


@triton.jit
def gather_tile(tile, x_desc, w_desc, y_desc, flags_ptr, first, chunk, tries):
    """Compute a tile once its rows are here; first is the first chunk."""
    M, N = y_desc.shape
    BLOCK_M: tl.constexpr = y_desc.block_shape[0]
    BLOCK_N: tl.constexpr = y_desc.block_shape[1]
    tiles_m = chunk // BLOCK_M
    tiles = tiles_m * tl.cdiv(N, BLOCK_N)  # of a chunk
    step, within = tile // tiles, tile % tiles
    place = (first + step) % (M // chunk)  # of the chunk
    off_m = place * chunk + (within % tiles_m) * BLOCK_M
    off_n = (within // tiles_m) * BLOCK_N
    lost = wait(flags_ptr + place, tries)
    acc = product(x_desc, w_desc, off_m, off_n) + lost
    y_desc.store([off_m, off_n], acc.to(y_desc.dtype))


@triton.jit
def gather_kernel(
    x_desc, w_desc, y_desc, flags_ptr, first, chunk, tries, tiles
):
    for tile in range(tl.program_id(axis=0), tiles, tl.num_programs(axis=0)):
        gather_tile(
            tile, x_desc, w_desc, y_desc, flags_ptr, first, chunk, tries
        )


# BLOCK_M, BLOCK_N, BLOCK_K: the large tile of *Persistent matmul*
TILE = (32, 32, 16) if SMALL else (128, 256, 64)
OPTIONS = {"num_warps": 8, "num_stages": 3}
TRIES = 2**20 if SMALL else 2**24  # reads of a flag: some seconds
PROGRAMS = 4
if not SMALL:
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    PROGRAMS = gpu.multi_processor_count


def described(*tensors):
    """Return descriptors of x, weight and maybe y, each with its tile."""
    m, n, k = TILE
    pairs = zip(tensors, ([m, k], [n, k], [m, n]), strict=False)
    return [TensorDescriptor.from_tensor(*pair) for pair in pairs]


def multiply(
    x, weight, flags, first, tries=TRIES, launch=gather_kernel[(PROGRAMS,)]
):
    """Multiply x by chunks, the first one first, each once its flag is set."""
    y = x.new_empty(len(x), len(weight))
    chunk = len(x) // len(flags)
    assert chunk % TILE[0] == 0
    assert weight.shape[1] == x.shape[1]
    tiles = len(x) // TILE[0] * triton.cdiv(len(weight), TILE[1])
    descs = described(x, weight, y)
    # gather_kernel and its grid; the timeline below passes another kernel
    launch(*descs, flags, first, chunk, tries, tiles, **OPTIONS)
    return y


def gather_matmul(x, weight, chunk=CHUNK, late=False, stamp=None, **options):
    """Return the product of all ranks' rows with this rank's weight."""
    flags, end = begin_gather(x, chunk, late=late, stamp=stamp)
    first = RANK * ROWS // chunk  # of this rank's chunks
    y = multiply(BUFFERS[RANK], weight, flags, first, **options)
    end()
    barrier(1)  # all have copied x: the next call may write there
    return y


# %%
# *Persistent matmul* joins the loops over tiles and ``k``: a tile's loads begin
# before the previous tile ends. Not here: no load may begin before its wait.
#
# Is it right?
# ------------
#
# We compare all rows and up to 512 columns with float64. A float32 sum of ``K``
# products rounds at most ``K`` times, each time by at most :math:`2^{-24}` of
# the summed magnitudes. Storing it rounds by at most one ``eps``. In the second
# of three calls, copies are late on purpose: loads that came before a flag
# would read rows of the first call. In the third, the last tile is not full.


def exact(x, weight):
    """Return the last columns of a product in float64, and their bound."""
    x, weight = x.double(), weight[-512:].double()
    expected, eps = x @ weight.T, torch.finfo(DTYPE).eps
    bound = x.shape[1] * 2**-24 * (x.abs() @ weight.abs().T)
    return expected, bound + eps * expected.abs()


def error_of(y, x, weight):
    """Return errors as parts of what is allowed."""
    expected, bound = exact(x, weight)
    return (y[:, -512:].double() - expected) / bound


def check(what, error):
    """Assert that errors are allowed on this rank; rank 0 prints its own."""
    torch.testing.assert_close(error, 0 * error, rtol=0, atol=1)
    say(f"{what}: error {error.abs().max():.2f} of the allowed")


if HAS_TMA:
    inputs = [random(ROWS, K) for _ in range(3)]
    weights = weight, weight, weight[: N - 24]
    cases = [*zip(inputs, weights, (False, True, False), strict=True)]
    outs = [gather_matmul(rows, w, late=late) for rows, w, late in cases]
    for (rows, w, _), out in zip(cases, outs, strict=True):
        check(f"{len(w)} columns", error_of(out, gather(rows), w))

# %%
# How fast?
# ---------
#
# The GPU run prints the time of this page's kernel, of the same kernel with all
# flags set and no copies (*all rows here*), and of the *product alone* in
# cuBLAS. *Own rows, flags, barriers* is what is left of a call without product
# and without copies from other GPUs; no tile can hide it. PyTorch's *fused*
# function multiplies each rank's rows as they arrive, too.


def fused(x, weight):
    symm = torch.ops.symm_mem
    _, (y,) = symm.fused_all_gather_matmul(x, [weight.T], 0, GROUP)
    return y


if __name__ == "__main__" and HAS_TMA and DEVICE.type == "cuda":
    here = torch.ones_like(flags)
    calls = {
        "this page's kernel": lambda: gather_matmul(x, weight),
        "the same, all rows here": lambda: multiply(everyone, weight, here, 0),
        "own rows, flags, barriers": lambda: (offer(x, CHUNK), barrier(1)),
        "NCCL, then cuBLAS": lambda: gather(x) @ weight.T,
        "PyTorch, fused": lambda: fused(x, weight),
        "product alone": lambda: everyone @ weight.T,
    }
    us = {}
    for name, (ms, *_) in gpu_time(calls, prepare=dist.barrier).items():
        us[name] = 1e3 * ms
        say(f"{name}: {us[name]:.0f} us")
    page, all_here, _, _, _, alone = us.values()
    say(f"so communication takes {page - all_here:.0f} us,")
    say(f"and our product {all_here - alone:.0f} us more than cuBLAS's")

# %%
# When did rows come, and when were they used?
# --------------------------------------------
#
# All multiprocessors of a GPU read one clock in nanoseconds, ``globaltimer``.
# ``timed_kernel`` is ``gather_kernel`` with two times for each tile: before its
# wait, and after its store. A tiny kernel on the side stream stores when a
# chunk has come. It needs a multiprocessor that no waiting program occupies, so
# ``timed_kernel`` is launched with one program less. ``timeline``, a helper at
# the top, passes it with its times as ``launch``, and pauses the GPU until the
# CPU has launched everything, so that neither copies nor kernel wait for it.


@triton.jit
def timed_kernel(
    times_ptr, x_desc, w_desc, y_desc, flags_ptr, first, chunk, tries, tiles
):
    for tile in range(tl.program_id(axis=0), tiles, tl.num_programs(axis=0)):
        tl.store(times_ptr + 2 * tile, tl.extra.cuda.globaltimer())
        gather_tile(
            tile, x_desc, w_desc, y_desc, flags_ptr, first, chunk, tries
        )
        tl.store(times_ptr + 2 * tile + 1, tl.extra.cuda.globaltimer())


@triton.jit
def stamp_kernel(times_ptr, place):
    tl.store(times_ptr + place, tl.extra.cuda.globaltimer())


if __name__ == "__main__" and HAS_TMA and DEVICE.type == "cuda":
    timeline(x, weight)  # compiles
    came, began, ended = timeline(x, weight)
    used = began[-len(came) :]  # when tiles of copied chunks began
    say(f"copied chunks came from {came[0]:.0f} to {came[-1]:.0f} us")
    say(f"their tiles ran from {used[0]:.0f} to {ended[-1]:.0f} us")
    after = sum(c > b for c, b in zip(came, used, strict=True))
    say(f"{after} of {len(came)} came after their first tile had begun")
    if RANK == 0:
        draw(came, began, ended)

# %%
# The GPU run draws a bar for each chunk, from when its first tile began until
# its last one ended, and a mark where its rows came. Chunks go down in the
# order of the tiles, this rank's own at the top. A mark left of its bar: no
# tile waited; within: the first tiles did, until then. Stamps may delay copies.
#
# How large is a chunk?
# ---------------------
#
# A small chunk comes earlier. But small chunks need more copies, and fewer
# consecutive tiles share a tile of the weight. At the largest size, each rank
# is one chunk, and own rows have to hide the copy of the next rank's. (Compare
# times within a table only: the GPU's clocks may change between tables.)

if __name__ == "__main__" and HAS_TMA and DEVICE.type == "cuda":
    sizes = [c for c in (128, 256, 512, 1024, 2048, 4096) if c <= ROWS]
    calls = {c: partial(gather_matmul, x, weight, chunk=c) for c in sizes}
    calls["product alone"] = lambda: everyone @ weight.T
    found = gpu_time(calls, prepare=dist.barrier)
    for c in sizes:
        mb = c * K * x.element_size() / 1e6
        say(f"chunks of {c} rows, {mb:.0f} MB: {1e3 * found[c][0]:.0f} us")
    say(f"product alone: {1e3 * found['product alone'][0]:.0f} us")
    best = min(sizes, key=lambda c: found[c][0])
    say(f"the least time is with {best} rows; elsewhere, CHUNK is {CHUNK}")

# %%
# The way back: product, then reduce-scatter
# ------------------------------------------
#
# A second algorithm: skip it if you only gather. The next layer's weight is
# split along ``K``, so each rank has a partial sum for *all* rows. These parts
# are added up, and a rank keeps its own rows: that is a *reduce-scatter*. So
# the kernel stores each tile of the product in the memory of the rank that
# needs it. Each receiver has one slot per sender (``PARTS``: ranks, rows,
# columns); this rank writes slot ``RANK`` of all of them, so no two write the
# same place. ``tl.pointer_type`` makes a pointer of an address;
# ``tl.multiple_of`` promises that 16 divides it, so that a thread may store 16
# bytes at once. The next rank's rows come first, and a rank's own last. After a
# barrier, each rank adds up the parts that it has received, in float32.


@triton.jit
def scatter_kernel(
    x_desc, w_desc, buffers_ptr, rank, rows, N, BLOCK_N: tl.constexpr
):
    M = x_desc.shape[0]
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    tiles_m = rows // BLOCK_M
    tiles = tiles_m * tl.cdiv(N, BLOCK_N)  # of a rank's rows
    pid, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    for tile in range(pid, M // rows * tiles, programs):
        to, within = (rank + 1 + tile // tiles) % (M // rows), tile % tiles
        off_m = (within % tiles_m) * BLOCK_M  # of that rank's rows
        off_n = (within // tiles_m) * BLOCK_N
        off_x = to * rows + off_m
        part = product(x_desc, w_desc, off_x, off_n)
        # Stored at once where that rank will add it up
        address = tl.load(buffers_ptr + to)
        out_ptr = address.to(tl.pointer_type(x_desc.dtype))
        out_ptr = tl.multiple_of(out_ptr, 16)
        # int64, as offs_m * N may pass 2**31
        offs_m = tl.cast(rank, tl.int64) * rows + off_m + tl.arange(0, BLOCK_M)
        offs_n = off_n + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
        mask = (offs_n < N)[None, :]
        tl.store(out_ptrs, part.to(x_desc.dtype), mask=mask)


# The columns of x that a rank has, and those of the result
K_PART, COLUMNS = (40, 48) if SMALL else (28672 // RANKS, 8192)
PARTS = symmetric(DTYPE, RANKS, ROWS, COLUMNS)
ADDRESSES = torch.tensor(
    [parts.data_ptr() for parts in PARTS], dtype=torch.int64, device=DEVICE
)


def sum_of_parts(dtype):
    return PARTS[RANK].sum(0, dtype=torch.float32).to(dtype)


def matmul_scatter(x, weight):
    """Return this rank's rows of the sum of all ranks' products."""
    assert x.shape == (RANKS * ROWS, weight.shape[1])
    assert weight.shape[0] == COLUMNS
    assert ROWS % TILE[0] == 0  # else a tile has rows of two ranks
    barrier(0)  # all have added up the parts of the last call
    x_desc, w_desc = described(x, weight)
    scatter_kernel[(PROGRAMS,)](
        x_desc, w_desc, ADDRESSES, RANK, ROWS, COLUMNS, TILE[1], **OPTIONS
    )
    barrier(1)  # all parts are here
    return sum_of_parts(x.dtype)


if HAS_TMA:
    weight_part = random(COLUMNS, K_PART)
    for _ in range(2):  # the second call overwrites the first one's parts
        x_part = random(RANKS * ROWS, K_PART)
        y = matmul_scatter(x_part, weight_part)
    check("scattered", scattered_error(y, x_part, weight_part))

# %%
# Each part is rounded once before it travels, and the sum once more: the bound
# in ``scattered_error`` is the sum of the parts' bounds, and one ``eps``.
#
# Break it: do not wait
# ---------------------
#
# With no tries the kernel looks at each flag once, and goes on. The copies are
# late on purpose, so it multiplies the zeros that are in the buffer. Such a
# product looks like any other; the NaN of ``wait`` shows that it is wrong.

if __name__ == "__main__" and HAS_TMA:
    for tries in (0, TRIES):
        BUFFERS[RANK].zero_()
        meet_ranks()
        y = gather_matmul(inputs[0], weight, tries=tries, late=True)
        error = error_of(y, gather(inputs[0]), weight).abs()
        wrong = (~(error <= 1)).any(1).sum().item()  # NaN is wrong, too
        lost = y.isnan().all(1).sum().item()
        say(f"{tries} tries: {wrong} of {RANKS * ROWS} rows are wrong")
        assert wrong == lost == (tries == 0) * (RANKS - 1) * ROWS

# %%
# The op
# ------
#
# The op's descriptors of rows and result are 3-D (rank, row, column), so a tile
# that passes a rank's last row is cut there, and rows need not be a multiple of
# the tile. Its kernel does not wait for own rows; sizes, order and stores of
# its tiles are as in *Persistent matmul*. The op takes other strides and all
# dtypes, keeps symmetric memory for all calls, and zeroes flags in each, so a
# CUDA graph can replay it. ``all_gather_matmul_scatter`` is the way back.

from triton_gallery_ops.all_gather_matmul import (
    all_gather_matmul,
    all_gather_matmul_scatter,
)

# %%
# Both are checked like the kernels, the first with few rows, too.

if __name__ == "__main__" and HAS_TMA:
    few = random(7, K)
    y = all_gather_matmul(few, weight, GROUP)
    check("op, few rows", error_of(y, gather(few), weight))
    y = all_gather_matmul_scatter(x_part, weight_part, GROUP)
    check("op, scattered", scattered_error(y, x_part, weight_part))

# %%
# The GPU run prints times of the way back, and what to take there. *Its sum
# alone* is the last step of this page's kernel, which nothing hides. Where this
# page takes longer than *cuBLAS, then NCCL*, its overlap does not pay.


def scatter_torch(x, weight):
    part, y = x @ weight.T, x.new_empty(ROWS, weight.shape[0])
    reduce_scatter(y, part)
    return y


def fused_scatter(x, weight):
    symm = torch.ops.symm_mem
    return symm.fused_matmul_reduce_scatter(x, weight.T, "sum", 0, GROUP)


if __name__ == "__main__" and HAS_TMA and DEVICE.type == "cuda":
    back = x_part, weight_part
    calls = {
        "the op": lambda: all_gather_matmul_scatter(*back, GROUP),
        "cuBLAS, then NCCL": lambda: scatter_torch(*back),
        "PyTorch, fused": lambda: fused_scatter(*back),
        "this page's kernel": lambda: matmul_scatter(*back),
        "its sum alone": lambda: sum_of_parts(DTYPE),
        "product alone": lambda: x_part @ weight_part.T,
    }
    found = gpu_time(calls, prepare=dist.barrier)
    for name, (ms, *_) in found.items():
        say(f"{name}: {1e3 * ms:.0f} us")
    best = min([*calls][:3], key=lambda name: found[name][0])
    say(f"On {RANKS} GPUs, take for the way back: {best}")

# %%
# And the gather. Rates are one rank's operations in GPU time. The names mean:
#
# * *Triton*: the op now. *Roof*, the best to hope for: the product alone.
# * ``take``: the fastest for calls in a row, by the longer of GPU and CPU time.
# * ``in a graph``: the fastest for replays, where GPU time alone counts.


def gather_calls(tokens):
    x = random(tokens // RANKS, K)
    everyone = gather(x)
    return {
        "Triton": lambda: all_gather_matmul(x, weight, GROUP),
        "NCCL, then cuBLAS": lambda: gather(x) @ weight.T,
        "PyTorch, fused": lambda: fused(x, weight),
        "Roof": lambda: everyone @ weight.T,
    }


if __name__ == "__main__" and HAS_TMA and DEVICE.type == "cuda":
    times = {}
    for tokens in (1024, 2048, 4096, 8192, 16384):
        times[tokens] = gpu_time(gather_calls(tokens), prepare=dist.barrier)
    if RANK == 0:
        results = rate_table(
            times, "tokens", "TFLOP/s", lambda tokens: 2e-9 * tokens * K * N
        )
        print("all-gather and product", results.to_string(), sep="\n")
        print("us of the GPU / us of the CPU", what_to_take(times), sep="\n")

# %%
# Exercises
# ---------
#
# Write a kernel and run the cell, which checks it. No GPU is needed.
#
# **1.** New flags need zeros in each call. Counters do not: in call number
# ``call`` the copy writes ``call`` into the flag, and a tile waits until the
# flag is at least ``call``. Write a kernel for one program that waits like
# this, and then stores in ``out_ptr`` what it saw. Its arguments are
# ``flag_ptr, out_ptr, call, tries``. Would "equal to ``call``" do, too?

counter_kernel = None  # your kernel


def check_counter(kernel):
    """Check exercise 1."""
    if kernel is None:
        say("not solved yet")
        return False
    flag, five, out = torch.tensor(
        [[4], [5], [0]], dtype=torch.int32, device=DEVICE
    )

    def set_late():
        pause()
        flag.copy_(five)

    end = begin_aside(set_late)
    kernel[(1,)](flag, out, 5, TRIES)
    end()
    right = on_all_ranks(out.item() == 5)
    say("right" if right else f"wrong: rank 0 saw {out.item()}; 5 is right")
    return right


if __name__ == "__main__":
    check_counter(counter_kernel)

# %%
# **2.** PyTorch does not promise in which order it adds up the parts. Add them
# up in the order of the ranks, in float32. ``parts_ptr`` has ``RANKS`` times
# ``size`` elements. The arguments are ``parts_ptr, out_ptr, size, RANKS:
# tl.constexpr, BLOCK: tl.constexpr``.

sum_kernel = None  # your kernel


def check_sum(kernel):
    """Check exercise 2, with numbers whose sum depends on the order."""
    if kernel is None:
        say("not solved yet")
        return False
    big = torch.tensor([1.0, 2.0**25, -(2.0**25), 3.0], device=DEVICE)
    parts = big[:, None].expand(4, 1000).contiguous()
    out = torch.full((1000,), -1.0, device=DEVICE)
    kernel[(triton.cdiv(1000, 256),)](parts, out, 1000, RANKS=4, BLOCK=256)
    right = on_all_ranks(torch.equal(out, torch.full_like(out, 3.0)))
    say("right" if right else f"wrong: rank 0 has {out[0].item()}; 3 is right")
    return right


if __name__ == "__main__":
    check_sum(sum_kernel)
    dist.destroy_process_group()

# %%
# Answers
# -------
#
# **1.** The barrier at the end of a call keeps flags from being ahead, so
# "equal" does as well.


@triton.jit
def counter_answer_kernel(flag_ptr, out_ptr, call, tries):
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while (seen < call) & (tries > 0):
        tries -= 1
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(out_ptr, seen)


# %%
# **2.** The loop over ranks is unrolled, and each element has one order.


@triton.jit
def sum_answer_kernel(
    parts_ptr, out_ptr, size, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(axis=0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        part_ptrs = parts_ptr + tl.cast(rank, tl.int64) * size + offs
        acc += tl.load(part_ptrs, mask=offs < size, other=0.0).to(tl.float32)
    acc = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, acc, mask=offs < size)
