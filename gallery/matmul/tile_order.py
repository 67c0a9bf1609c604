# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# A list of the causes, each with how to see it and the page that mends it; then
# one of them, the order of tiles, measured."""
# tool = true
#
# [[tool.triton-gallery.step_through]]
# kernel = "ordered_kernel"
# caption = """
# An 8 x 4 matrix times a 4 x 8 matrix: 16 programs, each with a tile of 2 x 2.
# Four programs run at a time. Choose "all, 4 at once" in each order, and
# compare what the first four have read of a and of b."""
# registers = ["pid", "first_m", "place", "pid_m", "pid_n"]
# inputs = { a = "integers(1, 4, 8, 4)", b = "integers(1, 3, 4, 8)" }
# layout = "product"
# at_once = 4
# start = [2, 2]
#
# [[tool.triton-gallery.step_through.launches]]
# label = "row by row: GROUP = 1"
# call = "ordered_matmul(a, b, 1, (2, 2, 4))"
# expected = { c = "a @ b" }
#
# [[tool.triton-gallery.step_through.launches]]
# label = "in groups: GROUP = 2"
# call = "ordered_matmul(a, b, 2, (2, 2, 4))"
# expected = { c = "a @ b" }
# ///
r"""
Why is my matmul slower than cuBLAS?
====================================

A matrix product can be correct and still be much slower than cuBLAS, NVIDIA's
library. This page lists the causes. It says how to see each in your own kernel,
and which page shows the mend. It then measures one of them, the order in which
programs take their tiles.

After this page you can

* find out what holds your matrix product up, from the cheapest check on;
* count what the programs that run together read;
* order the tiles so that these programs share what they read.

The causes
----------

Check them in this order: the first ones are the cheapest to see. A launch
returns the compiled kernel, here ``compiled``.

1. **The comparison is unfair.** Time both in rotation, with the same data and
   a cold L2 cache: ``benchmarking.py``.
2. **The CPU is the slower one.** If half the size takes the same time, you
   have timed the launch: ``what_a_call_costs.py``, ``cuda_graphs.py``.
3. **Float32 is multiplied in full.** With ``input_precision="ieee"``, your
   kernel uses no tensor cores: *Break it* in ``matmul.py``.
4. **Few rows.** Up to about 64 rows, the time is that of reading the weights:
   ``skinny_matmul.py``.
5. **Small tiles.** Compute the operations for each byte that all programs
   load: *How large a tile?* in ``matmul.py``.
6. **Spilled registers.** Print ``compiled.n_spills``; it should be 0: *How
   many warps?* in ``matmul.py``.
7. **Narrow loads.** If 16 does not divide a size or a stride, a thread may
   load one element at a time. Look for the widths of ``cp.async`` in
   ``compiled.asm["ptx"]``: *Which loads are wide?* in ``tuned_matmul.py``.
8. **Few stages.** Try ``num_stages`` of 2 to 5: *Pipelining: num_stages* in
   ``compiler_stages.py``.
9. **The order of the tiles.** Compare ``GROUP`` 1 and 8: this page.
10. **A last wave with little to do.** Divide the number of tiles by the
    number of programs that run at a time. Just above a whole number is bad:
    *Which tile?* in ``persistent_matmul.py``; with few tiles, *Split K* in
    ``skinny_matmul.py``.
11. **Products wait for each other.** The assembler ``ptxas -v`` warns of it:
    *Do multiplications wait for each other?* in ``tuned_matmul.py``.
12. **Every thread copies.** On Hopper and later GPUs, one thread can hand a
    whole tile to the copy engine. Without it, ``cp.async.bulk.tensor`` is not
    in the PTX: ``tensor_descriptors.py``.
13. **Each tile begins and ends alone.** While a program stores its tile,
    nothing loads the next one: ``persistent_matmul.py``.
14. **All warps wait at the same barriers.** Give warps different work:
    *Who starts the loads?* in ``gluon_matmul.py``.

The rest of this page is about cause 9.
"""

# sphinx_gallery_tags = ["matmul", "compute bound"]
import os
from functools import partial

import torch

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

# %%
# Which tiles run together?
# -------------------------
#
# A GPU runs a limited number of programs at a time, a *wave*. It starts
# programs in the order of their ids, and the kernel decides which tile an id
# stands for. Programs whose tiles lie in one row load the same rows of ``a``.
# The first of them loads these rows from memory. The others find them in the
# *L2 cache*, which all programs share.
#
# So the shape of a wave matters. In the order row by row, a wave is wide and
# flat: it needs few rows of ``a``, but most columns of ``b``. The *grouped*
# order goes down ``GROUP`` tiles before it steps to the right, so that a wave
# is closer to a square. Only the lines down to ``pid_n`` are new: the rest is
# the kernel of ``matmul.py``.


@triton.jit
def ordered_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # A group is GROUP rows of tiles, over the whole width of c.
    first_m = pid // (GROUP * tiles_n) * GROUP
    # The last group has fewer rows where GROUP does not divide tiles_m.
    height = tl.minimum(tiles_m - first_m, GROUP)
    place = pid % (GROUP * tiles_n)
    pid_m = first_m + place % height
    pid_n = place // height
    # In int32, a row times K would overflow past element 2**31.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m * K + offs_k[None, :]  # (BLOCK_M, BLOCK_K)
    b_ptrs = b_ptr + offs_k[:, None] * N + offs_n  # (BLOCK_K, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        a_mask = (offs_m < M) & (start + offs_k[None, :] < K)
        b_mask = (start + offs_k[:, None] < K) & (offs_n < N)
        # Zeros past K add nothing to the product.
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    c_mask = (offs_m < M) & (offs_n < N)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


# 128 x 256 with 8 warps is the tile that matmul.py chooses.
def ordered_matmul(a, b, GROUP=8, blocks=(128, 256, 64), num_warps=8):
    """Return the product of two contiguous half-precision matrices."""
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert a.shape[1] == b.shape[0]
    assert a.dtype == b.dtype
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, blocks[0]) * triton.cdiv(N, blocks[1]),)
    ordered_kernel[grid](
        a, b, c, M, N, K, *blocks, GROUP=GROUP, num_warps=num_warps
    )
    return c


# %%
# In the figure, the first wave with ``GROUP = 1`` reads two rows of ``a`` and
# all of ``b``: 2 * 4 + 4 * 8 = 40 numbers. With ``GROUP = 2`` it reads four
# rows of ``a`` and four columns of ``b``: 4 * 4 + 4 * 4 = 32 numbers.

# %%
# Is it right?
# ------------
#
# The order must not change the result. We test with three rows of tiles, so
# that with ``GROUP = 2`` the last group is not full. Each of ``K`` additions in
# float32 may be off by :math:`2^{-23}` of the sum of magnitudes, and the store
# by :math:`2^{-11}` of the result.

# DEVICE, from the folded cell, is the GPU; without one, it is the CPU.
generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(M, N):
    x = torch.randn(M, N, generator=generator, device=DEVICE)
    return x.to(torch.float16)


if __name__ == "__main__":
    M, K, N = 150, 45, 200
    a, b = random(M, K), random(K, N)
    expected = a.double() @ b.double()
    magnitudes = a.double().abs() @ b.double().abs()
    bound = K * 2.0**-23 * magnitudes + 2.0**-11 * expected.abs()
    worst = 0.0
    for GROUP in (1, 2, 8):
        c = ordered_matmul(a, b, GROUP, blocks=(64, 64, 32), num_warps=4)
        part = (c - expected).abs() / bound
        torch.testing.assert_close(part, 0 * part, rtol=0, atol=1)
        worst = max(worst, part.max().item())
    print(f"in every order: at most {worst:.2f} of the tolerance")

# %%
# Break it
# --------
#
# The minimum in ``height`` looks like a detail. Without it, some ids of a last
# group that is not full stand for tiles below the matrix. The masks hide these,
# and other tiles have no program at all. The lines of the kernel, in Python,
# show which:


def tile_of(pid, tiles_m, tiles_n, GROUP, with_minimum=True):
    """Return the row and the column of a program's tile, as the kernel does."""
    first_m = pid // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first_m, GROUP) if with_minimum else GROUP
    place = pid % (GROUP * tiles_n)
    return first_m + place % height, place // height


def missing(order, tiles_m, tiles_n, GROUP):
    """Return the tiles that no program computes."""
    tiles = {(m, n) for m in range(tiles_m) for n in range(tiles_n)}
    pids = range(tiles_m * tiles_n)
    return sorted(tiles - {order(pid, tiles_m, tiles_n, GROUP) for pid in pids})


if __name__ == "__main__":
    without = missing(partial(tile_of, with_minimum=False), 5, 4, GROUP=4)
    print("without the minimum:", without)
    print("with the minimum:", missing(tile_of, 5, 4, GROUP=4))
    assert without

# %%
# If ``GROUP`` divides the rows of tiles, as in most benchmarks, this bug does
# not show. Test sizes that leave the last group short.

# %%
# What does a wave read?
# ----------------------
#
# A *multiprocessor* is one of the GPU's cores. Its registers have room for one
# program with a tile of 128 x 256. An H200 has 132 multiprocessors, so a wave
# has 132 programs. We count the bytes of ``a`` and ``b`` that the first wave
# needs, at 8192 x 8192 x 8192. *Loaded* is what its programs load together.
# *Distinct* counts each byte once, as a cache that keeps everything would fetch
# it. **This is a model, not a measurement.**

SIZE, BLOCK_M, BLOCK_N = 8192, 128, 256
PROGRAMS = 132
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    PROGRAMS = gpu.multi_processor_count


def wave(GROUP):
    """Return how many rows and columns of tiles the first wave covers."""
    tiles_m, tiles_n = SIZE // BLOCK_M, SIZE // BLOCK_N
    tiles = [tile_of(pid, tiles_m, tiles_n, GROUP) for pid in range(PROGRAMS)]
    return len({m for m, _ in tiles}), len({n for _, n in tiles})


GROUPS = [1, 2, 4, 8, 16, 32]

if __name__ == "__main__":
    loaded = PROGRAMS * (BLOCK_M + BLOCK_N) * SIZE * 2 / 1e6
    print(f"loaded: {loaded:.1f} MB")
    for GROUP in GROUPS:
        rows, columns = wave(GROUP)
        distinct = (rows * BLOCK_M + columns * BLOCK_N) * SIZE * 2 / 1e6
        print(f"GROUP = {GROUP:2}: {rows:2} rows x {columns:2} columns", end="")
        print(f" of tiles, distinct: {distinct:5.1f} MB")

# %%
# A wave reads the fewest bytes if it covers as many rows of ``c`` as columns.
# With ``GROUP`` rows of tiles, it covers ``128 * GROUP`` rows and ``256 * 132 /
# GROUP`` columns. The two are equal for ``GROUP`` = :math:`\sqrt{132 \cdot 256
# / 128}`, about 16.

# %%
# The result
# ----------
#
# Does it matter? As long as the matrices fit into the L2 cache, every order
# finds them there. So the size decides. The lines *Triton* are the kernel above
# and differ in ``GROUP`` alone. *cuBLAS* is ``torch.matmul``.

SIZES = [1024, 2048, 4096, 8192, 12288, 16384]


def order_calls(size):
    a, b = random(size, size), random(size, size)
    calls = {
        f"Triton, GROUP = {GROUP}": partial(ordered_matmul, a, b, GROUP)
        for GROUP in (1, 8, 16)
    }
    return calls | {"cuBLAS": partial(torch.matmul, a, b)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {size: gpu_time(order_calls(size), turns=20) for size in SIZES}
    results = rate_table(times, "size", "TFLOP/s", lambda n: 2e-9 * n**3)
    print(results.to_string())
    rates = results.pivot(index="size", columns="series", values="TFLOP/s")
    rates.plot(logx=True)
    grouped = rates["Triton, GROUP = 8"]
    for name in ("Triton, GROUP = 1", "cuBLAS"):
        ratio = grouped / rates[name]
        print(f"GROUP = 8 over {name.removeprefix('Triton, ')}:", end=" ")
        print(f"{ratio.min():.2f} at {ratio.idxmin()}", end=" to ")
        print(f"{ratio.max():.2f} at {ratio.idxmax()}")

# %%
# The order changes no operation and no load. It changes where the loads find
# their bytes, and costs each program a few integer operations. At 1024 there
# are 32 tiles for all multiprocessors, so most have nothing to do: no order
# mends cause 10. ``tuned_matmul.py`` and ``persistent_matmul.py`` have the
# grouped order.

# %%
# Exercises
# ---------
#
# 1. Groups of columns: write the order that goes right ``GROUP`` tiles before
#    it steps down.


def tile_in_columns(pid, tiles_m, tiles_n, GROUP):
    return None  # your code


def check_columns(order):
    if order(0, 5, 7, 3) is None:
        return "not solved yet"
    first = [order(pid, 5, 7, 3) for pid in range(5)]
    is_right = first == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    return "right" if is_right and not missing(order, 5, 7, 3) else "wrong"


if __name__ == "__main__":
    print(check_columns(tile_in_columns))

# %%
# 2. Return the best power of two for ``GROUP`` on a GPU that runs ``programs``
#    programs at a time. Take a wave for ``GROUP`` rows and ``programs / GROUP``
#    columns of tiles.


def best_group(programs, BLOCK_M, BLOCK_N):
    return None  # your code


def check_group(function):
    gpus = (132, 128, 256), (48, 128, 128), (20, 64, 64)
    groups = [function(*gpu) for gpu in gpus]
    if None in groups:
        return "not solved yet"
    return "right" if groups == [16, 8, 4] else "wrong"


if __name__ == "__main__":
    print(check_group(best_group))

# %%
# Answers
# -------
#
# **1.** Exchange rows and columns.


def columns_answer(pid, tiles_m, tiles_n, GROUP):
    pid_n, pid_m = tile_of(pid, tiles_n, tiles_m, GROUP)
    return pid_m, pid_n


if __name__ == "__main__":
    answer = check_columns(columns_answer)
    print(answer)
    assert answer == "right"

# %%
# **2.** Count the numbers for each step along ``K``.


def group_answer(programs, BLOCK_M, BLOCK_N):
    def numbers(GROUP):
        return GROUP * BLOCK_M + programs / GROUP * BLOCK_N

    return min((2**n for n in range(8)), key=numbers)


if __name__ == "__main__":
    answer = check_group(group_answer)
    print(answer)
    assert answer == "right"
