# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Write a matrix product for Hopper in Gluon, the language below Triton:
# shared memory, barriers and roles for warps."""
# dtypes = ["float16", "bfloat16"]
# backward = false
# deterministic = true
# longer = "its warps have two roles, each a function"
# gpu = "==9.0"
# ///
r"""
A product in Gluon
==================

Gluon is the language below Triton. It has Triton's syntax and its compiler, but
you place the tiles in shared memory, you start the copies, and you wait for
them. This page writes one matrix product in Gluon for Hopper, which is NVIDIA's
GPUs of compute capability 9.0: H100 and H200. There are four steps: load and
wait, a ring of buffers, roles for warps, and programs that go on to other
tiles. Triton decides most of this for you.

After this page you can

* say what the layouts of shared memory and of registers are for;
* load tiles with the copy engine (TMA), and wait for them at an *mbarrier*;
* keep loads in flight with a ring of buffers, and say why it cannot deadlock;
* give loading and multiplying to different warps, with registers to match.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "TMA", "Gluon"]
import itertools
import os
import re
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)

# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table

# %%
# In PyTorch
# ----------
#
# ``a @ b`` calls cuBLAS. How much is there to do?

rng = torch.Generator(device=DEVICE).manual_seed(0)


def random(rows, columns, dtype=torch.float16):
    return torch.randn(rows, columns, generator=rng, device=DEVICE, dtype=dtype)


SIZES = [(8192, 8192, 8192), (8192, 2048, 8192), (8192, 512, 8192)]
SIZES += [(4096, 4096, 4096)]  # M, K and N

if __name__ == "__main__":
    for M, K, N in SIZES:
        flops, moved = 2 * M * N * K, 2 * (M * K + K * N + M * N)
        print(f"({M}, {K}) @ ({K}, {N}) in float16: {flops / 1e12:.2f} Tflop,")
        print(f"    {moved / 1e6:.0f} MB, {flops / moved:.0f} flop a byte")

# %%
# The bytes are the *floor*: each element is read or written once. By its data
# sheet, an H200 does about 200 operations in the time of reading a byte. These
# products have more for each byte, so the matrix units bound them.

# %%
# The first kernel
# ----------------
#
# A program computes one tile. It copies tiles of ``a`` and of ``b`` into shared
# memory, multiplies them, and goes on along ``K``:
#
# .. code-block:: text
#
#     device memory         shared memory              registers
#
#     a_desc [off_m, k] --> a (128, 64)  \
#                                          wgmma -->  acc (128, 128)
#     b_desc [k, off_n] --> b (64, 128)  /               |
#     c_desc         <----  c (128, 128)  <------- float16, at the end
#
# Triton would choose all this by itself. In Gluon you write it:
#
# * A *shared layout* says where an element lies in shared memory. The copy
#   engine writes ``NVMMASharedLayout``, and the matrix units read it: pieces of
#   16 bytes change places, so that a column is read from all banks at once.
# * A *register layout* says which thread holds which element. Hopper's matrix
#   instruction, ``wgmma``, leaves its sum in ``NVMMADistributedLayout``. Four
#   warps, a *warpgroup*, issue it together, for 64 rows: each has 16 of them.
# * A copy ends at an *mbarrier*, a counter in shared memory. A phase of it ends
#   when all arrivals that ``init`` asks for and all bytes that ``expect`` names
#   have come. Phases alternate, 0 and 1. A wait for a phase awaits its end.


@gluon.jit
def tile_kernel(a_desc, b_desc, c_desc):
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    off_m = gl.program_id(axis=0) * BLOCK_M
    off_n = gl.program_id(axis=1) * BLOCK_N
    dtype: gl.constexpr = c_desc.dtype
    a = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_K], a_desc.layout)
    b = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_N], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)  # a phase ends with one arrival and all bytes
    # Hopper's version; the warps of rows and of columns; a warp's M, N and K
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16]
    )
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, sums)
    for k in range(0, a_desc.shape[1], BLOCK_K):
        # expect is the one arrival. It names the bytes of both copies.
        nbytes: gl.constexpr = a_desc.block_type.nbytes
        mbarrier.expect(full, nbytes + b_desc.block_type.nbytes)
        # Past the matrix's edge the engine fills with zeros, and counts them.
        copy_in(a_desc, [off_m, k], full, a)  # by the copy engine
        copy_in(b_desc, [k, off_n], full, b)
        mbarrier.wait(full, k // BLOCK_K & 1)  # each step has a phase
        acc = warpgroup_mma(a, b, acc)  # ends when a and b have been read
    mbarrier.invalidate(full)  # its eight bytes may become part of c
    c = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], c_desc.layout)
    c.store(acc.to(dtype))
    fence_async_shared()  # else the engine may read what was there before
    copy_out(c_desc, [off_m, off_n], c)
    tma.store_wait(0)  # until c is read: its memory is the next program's


def describe(x, block):
    """Return the descriptor of a matrix that is copied by blocks."""
    kind = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return GluonDescriptor.from_tensor(x, block, layout)


TILE, BIG = (128, 128, 64), (128, 256, 64)  # BLOCK_M, BLOCK_N, BLOCK_K


def by_tiles(a, b, kernel=tile_kernel, tile=TILE, num_warps=4, **constants):
    """Multiply row-major matrices; 8 divides the length of a row."""
    c = a.new_empty(a.shape[0], b.shape[1])
    m, n, k = tile
    descriptors = describe(a, [m, k]), describe(b, [k, n]), describe(c, [m, n])
    grid = triton.cdiv(c.shape[0], m), triton.cdiv(c.shape[1], n)
    kernel[grid](*descriptors, **constants, num_warps=num_warps)
    return c


# %%
# Is it right?
# ------------
#
# A sum of ``K`` products in float32 has at most ``K`` roundings, each at most
# :math:`2^{-24}` of the sum of the products' magnitudes. For the last rounding
# we allow one ``eps``. ``error_of`` divides the error by what is allowed.


def error_of(out, a, b):
    a, b = a.double(), b.double()
    expected, info = a @ b, torch.finfo(out.dtype)
    bound = a.shape[1] * 2**-24 * (a.abs() @ b.abs())
    bound += info.eps * (expected.abs() + info.tiny)
    return (out.double() - expected) / bound


if __name__ == "__main__":
    for M, K, N in ((256, 256, 256), (200, 72, 136)):
        a, b = random(M, K), random(K, N)
        error = error_of(by_tiles(a, b), a, b)
        print(f"{M}x{K}x{N}: error {error.abs().max():.2f} of the allowed")
        torch.testing.assert_close(error, 0 * error, rtol=0, atol=1)

# %%
# How fast?
# ---------
#
# Each step has variants, timed in rotation. A table has the best rate of each,
# and does not name the variant. ``torch.compile`` calls cuBLAS here, too.


def rate_of(steps):
    """Print a table of the best rates of steps, each of several variants."""
    rows = {}
    for M, K, N in SIZES:
        a, b, calls = random(M, K), random(K, N), {}
        for name, variants in steps.items():
            for place, variant in enumerate(variants):
                calls[name, place] = partial(variant, a, b)
        found = gpu_time(calls, turns=20).items()
        best = pd.Series({key: ms for key, (ms, *_) in found})
        rate = 2e-9 * M * N * K / best.groupby(level=0).min()
        rows[f"{M}x{K}x{N}"] = rate.reindex([*steps]).round()
    print("TFLOP/s", pd.DataFrame(rows).T.to_string(), sep="\n")


LARGE = {"tile": BIG, "num_warps": 8}
STEPS = {"wait at once": [by_tiles, partial(by_tiles, **LARGE)]}
CUBLAS = {"cuBLAS": [torch.matmul]}

if __name__ == "__main__":
    rate_of(STEPS | CUBLAS)

# %%
# Can loads fly ahead?
# --------------------
#
# While the first kernel waits for a load, it has no product in flight. With a
# *ring* of ``STAGES`` buffers, later loads go on meanwhile. Triton's
# ``num_stages`` makes one, in Gluon you write it. Step ``n`` uses buffer
# ``n % STAGES``, and waits for phase ``n // STAGES & 1`` of its mbarrier:
#
# .. code-block:: text
#
#     step n     0   1   2   3   4   5   6   7   8   9 ...
#     buffer     0   1   2   3   0   1   2   3   0   1 ...
#     phase      0   0   0   0   1   1   1   1   0   0 ...
#
# ``is_async=True`` lets ``warpgroup_mma`` return at once. Then
# ``warpgroup_mma_wait(1)`` waits until at most one product is in flight: that
# of step ``n``. So step ``n - 1`` is done, and its buffer can take the load of
# step ``n - 1 + STAGES``.
#
# Each warpgroup waits for its own products only. So all warps have to meet at a
# barrier before that load, or it overwrites what another warpgroup still reads.
# In the first kernel the compiler places one. With asynchronous products it may
# not: see a `report <https://github.com/triton-lang/triton/issues/11047>`_.

# Triton 3.6 called it thread_barrier.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def start_load(n, a_desc, b_desc, place, ring):
    off_m, off_n, steps = place
    a, b, full = ring
    stage, k = n % b.shape[0], n * b_desc.block_shape[0]
    bar, a_now, b_now = full.index(stage), a.index(stage), b.index(stage)
    nbytes: gl.constexpr = a_desc.block_type.nbytes
    within = n < steps  # else nothing is expected, and nothing is copied
    mbarrier.expect(bar, nbytes + b_desc.block_type.nbytes, pred=within)
    copy_in(a_desc, [off_m, k], bar, a_now, pred=within)
    copy_in(b_desc, [k, off_n], bar, b_now, pred=within)


@gluon.jit
def ring_kernel(a_desc, b_desc, c_desc, STAGES: gl.constexpr):
    BLOCK_M: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_shape[1]
    off_m = gl.program_id(axis=0) * BLOCK_M
    off_n = gl.program_id(axis=1) * BLOCK_N
    dtype: gl.constexpr = c_desc.dtype
    a_shape: gl.constexpr = [STAGES] + a_desc.block_shape
    b_shape: gl.constexpr = [STAGES] + b_desc.block_shape
    a = gl.allocate_shared_memory(dtype, a_shape, a_desc.layout)
    b = gl.allocate_shared_memory(dtype, b_shape, b_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16]
    )
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, sums)
    steps = gl.cdiv(a_desc.shape[1], BLOCK_K)
    place, ring = (off_m, off_n, steps), (a, b, full)
    # All but one: the first product frees no buffer yet.
    for i in gl.static_range(STAGES - 1):
        start_load(i, a_desc, b_desc, place, ring)
    for n in range(steps):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        acc = warpgroup_mma(a.index(stage), b.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        barrier()  # now all warps are done with step n - 1
        start_load(n - 1 + STAGES, a_desc, b_desc, place, ring)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
    c = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], c_desc.layout)
    c.store(acc.to(dtype))
    fence_async_shared()
    copy_out(c_desc, [off_m, off_n], c)
    tma.store_wait(0)


ringed = partial(by_tiles, kernel=ring_kernel, STAGES=4)
STEPS["a ring of buffers"] = [ringed, partial(ringed, **LARGE)]
STEPS["a ring of buffers"] += [partial(ringed, **LARGE, STAGES=3)]

if __name__ == "__main__":
    rate_of(STEPS | CUBLAS)

# %%
# Who starts the loads?
# ---------------------
#
# In the ring all warps stop at the barrier, so that one of them can start a
# load. A program can have warps of several roles instead. ``warp_specialize``
# gives each role a function and warps of its own:
#
# .. code-block:: text
#
#     producer    1 warp     waits for an empty buffer, loads b and both halves
#                            of a into it
#     consumer 0  4 warps    for rows  0 to  63 \  wait for a full buffer,
#     consumer 1  4 warps    for rows 64 to 127 /  multiply, give it back
#
# The roles meet at two mbarriers for each buffer. A phase of *full* ends when
# all bytes have arrived: both consumers wait for that. A phase of *empty* ends
# when both consumers have given the buffer back: the producer waits for that.
#
# Can this ring deadlock? The producer's step ``n`` waits for the buffer of step
# ``n - STAGES``. A consumer gives it back in step ``n - STAGES + 1``, and waits
# in each step for the load of that step. So with two buffers or more, a load
# waits for earlier steps alone, and the earliest step that is not done can go
# on. In the first ``STAGES`` steps all buffers are empty. The producer asks for
# phase 1 there: a new mbarrier counts the phase before phase 0 as ended.
#
# A thread of a consumer holds 64 * 256 / 128 = 128 sums, and the producer needs
# few registers. ``maxnreg=168`` reserves 168 for each thread of three
# warpgroups; the producer's warp counts as four. The kernel then moves some: a
# thread of the producer keeps 24, two of consumers get 240, and 24 + 2 * 240 is
# 3 * 168.


@gluon.jit
def produce(a_desc, b_desc, place, ring):
    off_m, off_n, steps = place
    a, b, full, empty = ring
    STAGES: gl.constexpr = b.shape[0]
    ROWS: gl.constexpr = a_desc.block_shape[0]
    nbytes: gl.constexpr = a_desc.block_type.nbytes
    for n in range(steps):
        stage, k = n % STAGES, n * b_desc.block_shape[0]
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        bar, upper, lower = full.index(stage), 2 * stage, 2 * stage + 1
        mbarrier.expect(bar, 2 * nbytes + b_desc.block_type.nbytes)
        copy_in(a_desc, [off_m, k], bar, a.index(upper))
        copy_in(a_desc, [off_m + ROWS, k], bar, a.index(lower))
        copy_in(b_desc, [k, off_n], bar, b.index(stage))


@gluon.jit
def consume(HALF: gl.constexpr, c_desc, c, place, ring):
    off_m, off_n, steps = place
    a, b, full, empty = ring
    STAGES: gl.constexpr = b.shape[0]
    ROWS: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16]
    )
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, sums)
    for n in range(steps):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        mine = a.index(2 * stage + HALF)
        acc = warpgroup_mma(mine, b.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # Step n - 1 is done. Before the first step there is none.
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=n > 0)
    # Nobody waits for the last buffer, so nobody gives it back.
    acc = warpgroup_mma_wait(0, deps=(acc,))
    part, row = c.index(HALF), off_m + HALF * ROWS
    part.store(acc.to(c_desc.dtype))
    fence_async_shared()
    copy_out(c_desc, [row, off_n], part)
    tma.store_wait(0)


@gluon.jit
def roles_kernel(a_desc, b_desc, c_desc, STAGES: gl.constexpr):
    ROWS: gl.constexpr = a_desc.block_shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[1]
    off_m = gl.program_id(axis=0) * 2 * ROWS
    off_n = gl.program_id(axis=1) * BLOCK_N
    dtype: gl.constexpr = c_desc.dtype
    a_shape: gl.constexpr = [2 * STAGES] + a_desc.block_shape
    b_shape: gl.constexpr = [STAGES] + b_desc.block_shape
    c_shape: gl.constexpr = [2] + c_desc.block_shape
    a = gl.allocate_shared_memory(dtype, a_shape, a_desc.layout)
    b = gl.allocate_shared_memory(dtype, b_shape, b_desc.layout)
    c = gl.allocate_shared_memory(dtype, c_shape, c_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    steps = gl.cdiv(a_desc.shape[1], BLOCK_K)
    place, ring = (off_m, off_n, steps), (a, b, full, empty)
    # The first function runs in the warps of the launch. The lists say how many
    # warps the others get, and how many registers each of their threads has.
    gl.warp_specialize(
        [
            (consume, (0, c_desc, c, place, ring)),
            (consume, (1, c_desc, c, place, ring)),
            (produce, (a_desc, b_desc, place, ring)),
        ],
        [4, 1],
        [240, 24],
    )


def with_roles(a, b):
    c = a.new_empty(a.shape[0], b.shape[1])
    pairs = zip((a, b, c), ([64, 64], [64, 256], [64, 256]), strict=True)
    descriptors = [describe(*pair) for pair in pairs]
    grid = triton.cdiv(c.shape[0], 128), triton.cdiv(c.shape[1], 256)
    roles_kernel[grid](*descriptors, STAGES=3, num_warps=4, maxnreg=168)
    return c


STEPS["roles for warps"] = [with_roles]

if __name__ == "__main__":
    for M, K, N in ((200, 72, 136), (64, 1000, 520)):
        a, b = random(M, K), random(K, N)
        for variant in itertools.chain(*STEPS.values()):
            error = error_of(variant(a, b), a, b)
            torch.testing.assert_close(error, 0 * error, rtol=0, atol=1)
    rate_of(STEPS | CUBLAS)

# %%
# What happens between two tiles?
# -------------------------------
#
# A program ends with a store, and the next one begins with empty buffers. A
# *persistent* program, one for each multiprocessor, goes on to its next tile
# instead, as in ``persistent_matmul.py``. So each role gets a loop over tiles.
# While the consumers store, the producer loads the next tile's first buffers:
#
# .. code-block:: text
#
#     producer    loads of tile 0       loads of tile 1       loads of ...
#     consumers        products of tile 0   store   products of tile 1 ...
#
# The steps ``n`` are counted through all tiles, so the ring does not begin
# anew. Two more things change:
#
# * *The store waits later.* A consumer cuts its result into pieces of 64
#   columns, and has two buffers for them. It fills one when the copy engine has
#   read what was there. So the last stores run during the next tile. The
#   buffers take 2 * 2 * 8 KB, and leave room for a fourth stage: 4 * 48 KB more
#   are 224 KB, of 227 KB that a program can have.
# * *Groups of tiles.* Eight rows of tiles are walked together, column by column
#   (``tile_order.py`` draws it), so that what is read again is still in L2.

# %%
# Transposed operands
# -------------------
#
# The copy engine wants rows of adjacent elements. ``weight.T`` has adjacent
# columns. So its descriptor is of ``weight``, and the buffer in shared memory
# is permuted. No byte moves: ``wgmma`` reads 16-bit numbers in either order.

# %%
# The op
# ------
#
# A descriptor made on the CPU is no tensor. So the op is a ``custom_op``, into
# which ``torch.compile`` does not look; ``persistent_matmul.py`` says more. The
# result's rows begin at multiples of 16 bytes: the engine stores no others.

from triton_gallery_ops.gluon_matmul import (
    GLUON_MATMUL_DTYPES,
    _gluon_matmul_kernel,
    gluon_matmul,
)

# %%
# What did each step gain? Roles alone gain little or nothing over the ring. The
# last step gains at each size, but it changes four things at once: programs go
# on to other tiles, stores wait later, a fourth stage has room, and tiles come
# in groups. The table does not tell the four apart.

STEPS["persistent, the op"] = [gluon_matmul]

if __name__ == "__main__":
    rate_of(STEPS | CUBLAS)

# %%
# What did the compiler make of them? ``HGMMA`` is ``wgmma`` in machine code,
# and *groups* counts those that end a group of products. One waits for whole
# groups. Where code touches sums that are being computed, the compiler ends a
# group with each ``HGMMA``, and waits. The cell asserts that it did not.
# ``BAR`` counts the barriers of warps, *spilled* what found no register, and
# *shared* the bytes of shared memory. *Registers* are those of a thread at the
# start; with roles, some are moved afterwards.


def made(kernel):
    """Return what was compiled last of a kernel."""
    found, *_ = next(iter(kernel.device_caches.values()))
    compiled = [*found.values()][-1]
    code = compiled.asm["sass"]
    return {
        "HGMMA": len(re.findall(r"HGMMA", code)),
        "groups": len(re.findall(r"HGMMA.*gsb0", code)),
        "BAR": len(re.findall(r"BAR\.SYNC", code)),
        "registers": compiled.n_regs,
        "spilled": compiled.n_spills,
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    kernels = tile_kernel, ring_kernel, roles_kernel, _gluon_matmul_kernel
    table = pd.DataFrame({f.fn.__name__: made(f) for f in kernels}).T
    print(table.to_string())
    assert not table["spilled"].any()
    assert (table["groups"] < table["HGMMA"]).all()

# %%
# Proof
# -----
#
# Every pair of orders, in both dtypes, at sizes that no tile divides, with few
# steps and with more than there are buffers, and with several tiles for each
# program. Then rows with gaps, operands that are copied first, as neither rows
# nor columns begin at multiples of 16 bytes, and empty matrices:


def prove(M, K, N, dtype, a_t, b_t):
    a = random(K, M, dtype).T if a_t else random(M, K, dtype)
    b = random(N, K, dtype).T if b_t else random(K, N, dtype)
    assert error_of(gluon_matmul(a, b), a, b).abs().max() <= 1


if __name__ == "__main__":
    for dtype in GLUON_MATMUL_DTYPES:
        for a_t in (False, True):
            for b_t in (False, True):
                for M, K, N in ((8, 8, 8), (72, 136, 520), (4104, 328, 3080)):
                    prove(M, K, N, dtype, a_t, b_t)
    x = random(40, 48)
    odd = random(21, 21)
    copied = (odd, x[:21]), (x[:, 1:17], x[:16]), (x[:, ::2], x[:24])
    for pair in ((x[:, :21], x[:21]), (x[::2, 8:], x[:, :40].T), *copied):
        assert error_of(gluon_matmul(*pair), *pair).abs().max() <= 1
    for M, K, N in ((0, 8, 8), (8, 8, 0), (8, 0, 8)):
        out = gluon_matmul(random(M, K), random(K, N))
        assert out.shape == (M, N)
        assert not out.any()

# %%
# NaN and inf go where they belong, and nowhere else:

if __name__ == "__main__":
    a, b = random(72, 88), random(88, 104)
    a[3, 87], a[71, 0] = torch.nan, torch.inf
    b[87, 103], b[87, 5] = -torch.inf, torch.nan
    c = gluon_matmul(a, b)
    spoilt = torch.zeros_like(c, dtype=torch.bool)
    spoilt[[3, 71]], spoilt[:, [5, 103]] = True, True
    assert torch.equal(c.isfinite(), ~spoilt)
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=1e-2, equal_nan=True)

# %%
# An error names what the op does not take. It has no gradient either, and
# PyTorch says so in the backward:

if __name__ == "__main__":
    for pair in ((x, x), (x, x.T.float())):
        try:
            gluon_matmul(*pair)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    try:
        gluon_matmul(x.requires_grad_(), random(48, 8)).sum().backward()
    except RuntimeError as error:
        print(f"RuntimeError: {error}")

# %%
# The benchmark
# -------------
#
# This is a layer of a model, in bfloat16, for several numbers of tokens. The
# weight is a transpose, as in ``torch.nn.Linear``. ``CPU us`` is what a call
# costs the CPU, which encodes three descriptors. Called one by one, small
# products wait for the CPU; in a CUDA graph (``cuda_graphs.py``) they do not.

TOKENS = [1024, 2048, 4096, 8192, 16384]
INPUTS, OUTPUTS = 4096, 14336
PRODUCTS = {"Triton": gluon_matmul, "cuBLAS": torch.matmul}


def layer_calls(tokens):
    x = random(tokens, INPUTS, torch.bfloat16)
    weight = random(OUTPUTS, INPUTS, torch.bfloat16)
    return {who: partial(op, x, weight.T) for who, op in PRODUCTS.items()}


if __name__ == "__main__":
    times = {n: gpu_time(layer_calls(n), turns=30) for n in TOKENS}
    flops = 2e-9 * INPUTS * OUTPUTS
    results = rate_table(times, "tokens", "TFLOP/s", flops.__mul__)
    print(results.to_string())
    wide = results.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True)

# %%
# Reading the result
# ------------------
#
# Where our line lies below that of cuBLAS, one thing can be counted: rounds, in
# which each multiprocessor has a tile. All tiles are of 128x256. So 1024 tokens
# give 448 of them: three full rounds of an H200's 132 multiprocessors, and one
# of 52. ``persistent_matmul.py`` chooses among tiles.
#
# Triton would have chosen the layouts, made the ring, counted its phases, and
# placed fences and waits. In Gluon, too, the compiler places barriers where one
# warp of a role reads what another one wrote: ``BAR`` counts them.
#
# Triton would not have let you say that two consumers share a tile of ``b`` and
# have no barrier in common, nor in what pieces a tile is stored while the next
# one begins. (``tensor_descriptors.py`` asks Triton for roles.) The price: this
# op runs on Hopper alone.

# %%
# Go further
# ----------
#
# 1. In ``consume``, move ``mbarrier.arrive`` above ``warpgroup_mma_wait(1)``.
#    What may go wrong, and why would few tests notice?
# 2. Initialize the barriers of empty buffers with ``count=1``. What happens?
#
# To read on: ``compiler_stages.py`` shows layouts as the compiler writes them.
# Triton's tutorials on Gluon go on to Blackwell:
# https://github.com/triton-lang/triton/tree/main/python/tutorials/gluon

# %%
# Answers
# -------
#
# **1.** The consumer would give back a buffer that the product of the step
# before may still read. The producer would load into it. The load takes time to
# arrive, and most often the product is done by then. So wrong results are rare.
#
# **2.** One consumer's arrival would end the phase, and the producer would
# overwrite what the other consumer still reads. The second arrival counts for
# the next phase, so the barrier's phases are no longer those of the code, and
# the program may deadlock.
