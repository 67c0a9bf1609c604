# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply few rows by a large weight matrix: keep more loads in flight, and
# split the sum over K among more programs."""
# dtypes = ["float16", "bfloat16", "float32"]
# backward = false
# deterministic = true
# ///
r"""
A product of few rows
=====================

A language model that writes one token at a time multiplies few rows, often a
single one, by each of its weight matrices. Such a product has to read all
weights and computes little with each of them. So the memory sets the pace, and
not the tensor cores. The tiles of an ordinary matrix product are too few to
keep the memory busy. This page keeps more loads in flight in each program, and
splits the sum over ``K``, the columns of the weights, among more programs.

After this page you can

* tell by counting whether memory or arithmetic bounds a product;
* count how many bytes are in flight, and choose stages and splits by it;
* split the sum over ``K``, and add the parts deterministically;
* sum each row in the same parts, however many rows come with it.
"""

# sphinx_gallery_tags = ["matmul", "memory bound", "split-K", "atomics"]
import os
from functools import partial

import pandas as pd
import torch
from torch.nn.functional import linear

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.counting import statements

# %%
# In PyTorch
# ----------
#
# ``linear(x, weight)`` multiplies ``M`` rows by a weight matrix:
#
# .. math:: y_{mn} = \sum_{k=0}^{K-1} x_{mk}\,w_{nk}, \qquad 0 \le n \lt N.
#
# How much does that move, and how much does it compute? Tensors on the device
# ``meta`` have no data, so the count costs nothing. Three layers of models:

SHAPES = [(1, 4096, 14336), (16, 8192, 8192), (64, 7168, 2048)]  # M, K, N
meta = partial(torch.empty, dtype=torch.bfloat16, device="meta")

if __name__ == "__main__":
    for M, K, N in SHAPES:
        x, weight = meta(M, K), meta(N, K)
        with FlopCounterMode(display=False) as counter:
            y = linear(x, weight)
        moved = x.nbytes + weight.nbytes + y.nbytes
        work = counter.get_total_flops() / moved
        print(f"{M:2} x {K} x {N:5}: {moved / 1e6:3.0f} MB to move, ", end="")
        print(f"{weight.nbytes / moved:.1%} weights; {work:2.0f} FLOP a byte")

# %%
# Nearly all bytes are weights. An H100 and an H200 do 200 to 300 operations a
# byte by their data sheets. These products need a third at most, so memory
# bounds them. The floor is one *read* of the weights; we measure PyTorch's too.

# %%
# The first kernel
# ----------------
#
# A program goes along ``BLOCK_N`` rows of weights. Stars: program 1 reads them.
#
# .. code-block:: text
#
#     grid           weight (N, K)              x.T (K, M)    y.T (N, M)
#
#                  BLOCK_K                        BLOCK_M
#                 +-------+-------+-------+        +----+        +----+
#     program 0   |       |       |       |        |    |        |    |
#                 +-------+-------+-------+        | *  |        +----+
#     program 1   |   *   |   *   |   *   |        | *  |        |acc | BLOCK_N
#                 +-------+-------+-------+        | *  |        +----+
#
# The weights are the first operand of ``tl.dot``. The few rows of ``x`` are the
# columns of the second one. The reason is the matrix instruction of Hopper, the
# H100 and H200: it takes 64 rows of the first operand, but as few as 8 columns
# of the second. Up to Triton 3.7 it is used from 16 columns on, so ``BLOCK_M``
# is at least 16. Columns past ``M`` are computed, but not loaded or stored.


@triton.jit
def first_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # In int32 the offset of a row would overflow past element 2**31.
    pid_n = tl.program_id(axis=0).to(tl.int64)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    offs_m = tl.arange(0, BLOCK_M)[None, :]  # (1, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)  # (BLOCK_K,)
        # Past the end of K both tiles are zero, so nothing is added there.
        mask_w = (offs_n < N) & (offs_k < K)[None, :]
        mask_x = (offs_m < M) & (offs_k < K)[:, None]
        w_ptrs = w_ptr + offs_n * K + offs_k[None, :]
        x_ptrs = x_ptr + offs_m * K + offs_k[:, None]
        w = tl.load(w_ptrs, mask=mask_w, other=0.0)  # (BLOCK_N, BLOCK_K)
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # (BLOCK_K, BLOCK_M)
        # "ieee": without it, float32 would be rounded to TF32, of 11 bits.
        acc = tl.dot(w, x, acc, input_precision="ieee")
    y_ptrs = y_ptr + offs_m * N + offs_n  # (BLOCK_N, BLOCK_M)
    tl.store(y_ptrs, acc, mask=(offs_n < N) & (offs_m < M))


SHARED = 64 * 1024  # bytes that a program gets; the interpreter takes any
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    SHARED = gpu.shared_memory_per_block_optin


def whole_sum(x, weight):
    """Return linear(x, weight), for two contiguous matrices."""
    (M, K), N = x.shape, weight.shape[0]
    y, grid = x.new_empty(M, N), (triton.cdiv(N, 64),)
    BLOCK_M = max(16, triton.next_power_of_2(M))
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": 64, "BLOCK_K": 256 // x.itemsize}
    stages = min(5, SHARED // ((BLOCK_M + 64) * 256))  # the reason is below
    first_kernel[grid](x, weight, y, M, N, K, **tile, num_stages=stages)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum of ``K`` products is rounded ``K`` times at
# most, each time by :math:`2^{-24}` of the sum of magnitudes at most, and once
# to the dtype of ``x``. The cell prints the error in units of that sum. It
# takes float16: with bfloat16, the interpreter's ``tl.dot`` is wrong.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(M, K, N, dtype=torch.bfloat16):
    kind = {"dtype": dtype, "device": DEVICE, "generator": generator}
    return torch.randn(M, K, **kind), torch.randn(N, K, **kind)


def check(who, function, M, K, N, dtype=torch.float16):
    x, weight = random(M, K, N, dtype)
    error = function(x, weight).double() - linear(x.double(), weight.double())
    error /= linear(x.double().abs(), weight.double().abs())
    allowed = K * 2**-24 + torch.finfo(dtype).eps
    print(f"{who}: {error.abs().max():.1e} of {allowed:.1e}")
    torch.testing.assert_close(error, 0 * error, rtol=0, atol=allowed)


if __name__ == "__main__":
    check("whole sum", whole_sum, M=20, K=304, N=112)

# %%
# How fast?
# ---------
#
# The rate counts the weights' bytes alone. ``linear`` calls cuBLAS. For the
# roof, PyTorch reads the same bytes as if they were float32, and sums each row.
# Before each call the L2 cache is emptied.


def contestants(function, x, weight):
    torch.compiler.reset()  # past eight shapes it would raise
    fast = torch.compile(lambda *of: linear(*of), dynamic=False, fullgraph=True)
    calls = {"Triton": function, "cuBLAS": linear, "torch.compile": fast}
    calls = {who: partial(call, x, weight) for who, call in calls.items()}
    return calls | {"Roof": partial(torch.sum, weight.view(torch.float32), 1)}


def rates(calls, weight, turns=50):
    """Return GB/s of each call, for one read of the weights."""
    found = gpu_time(calls, turns).items()
    return {who: round(1e-6 * weight.nbytes / times[0]) for who, times in found}


if __name__ == "__main__" and DEVICE.type == "cuda":
    for M, K, N in SHAPES:
        x, weight = random(M, K, N)
        found = rates(contestants(whole_sum, x, weight), weight)
        print(f"{M} x {K} x {N}, GB/s: {found}")

# %%
# How many loads are in flight?
# -----------------------------
#
# A memory keeps its rate only while enough loads are *in flight*: begun and not
# yet done. Suppose that a load takes a microsecond. At 4.8 TB/s, 4.8 MB then
# have to be in flight, 36 KB for each of the 132 multiprocessors of an H200, or
# 25 KB at the 3.35 TB/s of an H100. Our program has ``num_stages - 1`` blocks
# of weights in flight, of 16 KiB each: the compiler copies them into shared
# memory ahead of the loop (``compiler_stages.py`` shows how). With three and
# with five stages, how much is in flight for a multiprocessor, on average?

PROCESSORS = 132  # of an H200

if __name__ == "__main__":
    for M, K, N in SHAPES:
        programs = triton.cdiv(N, 64)
        kib = [programs * (s - 1) * 16 / PROCESSORS for s in (3, 5)]
        print(f"{M:2} x {K} x {N:5}: {programs:3} programs, ", end="")
        print(f"{kib[0]:2.0f} or {kib[1]:3.0f} KiB in flight for each")

# %%
# For the second shape, three stages are too few for an H200 by this count, and
# five are enough. The table of plans, after the op, times both. More stages
# take more shared memory: a block of weights and its block of ``x`` are
# ``(64 + BLOCK_M) * 256`` bytes, 20 KiB for up to 16 rows and 32 KiB for 64. An
# H200 has 227 KiB for a program, an L4 99 KiB. The op takes five stages, or as
# many as fit. Their number changes no bit: the sum keeps its order.
#
# For the last shape no number of stages is enough: three of four
# multiprocessors have no program. With a smaller ``BLOCK_N`` there would be
# more programs. But each program reads all of ``x``, out of the L2 cache. With
# 64 rows of ``x`` and ``BLOCK_N = 64``, that is already as many bytes of ``x``
# as of weights. The other way is to let several programs share the sum of a
# tile.

# %%
# Split K
# -------
#
# The grid gets a second axis. Program ``(n, k)`` adds up part ``k`` of the sum
# of tile ``n``, and stores it in float32. A second kernel adds these *partial
# sums*, always in the order from the first to the last, and rounds once.
#
# .. code-block:: text
#
#     weight     K ->                             partial sums         y.T
#               +-----------+-----------+
#     tile 0    | (0, 0)    | (0, 1)    |        [0, tile 0]
#               +-----------+-----------+         + [1, tile 0]   ->  tile 0
#     tile 1    | (1, 0)    | (1, 1)    |        [0, tile 1]
#               +-----------+-----------+         + [1, tile 1]   ->  tile 1
#
# How many parts? The second launch costs time, and so do the parts, which are
# written once and read once. So we take only as many parts as there are
# multiprocessors for, and one where more than half of them have a tile:

if __name__ == "__main__":
    for M, K, N in SHAPES:
        parts = max(1, PROCESSORS // triton.cdiv(N, 64))
        size = parts * M * N * 4 if parts > 1 else 0
        print(f"{M:2} x {K} x {N:5}: {parts} parts of a sum, ", end="")
        print(f"{size / (2 * K * N):.1%} of the weights' bytes")

# %%
# The op
# ------
#
# ``x`` may have any shape with up to 64 rows in all. The weights may have any
# layout: as ``torch.nn.Linear`` keeps them, or transposed. The number of parts
# follows from ``N``, ``K`` and the number of multiprocessors, and not from
# ``M``. So each row is added up in the same parts, however many rows there are.
# One kernel serves with and without a split: a single part is the result, and
# is stored in the result's dtype.
#
# Some weights cannot be copied into shared memory 16 bytes at a time, as their
# rows do not begin at multiples of 16 bytes. In half precision, they then go
# through registers. For such weights the op halves ``BLOCK_K`` and takes two
# stages, so that the registers suffice. The op is registered as
# ``what_a_call_costs.py`` shows: on a GPU a call goes straight to the launcher.

from triton_gallery_ops.skinny_matmul import (
    SKINNY_MATMUL_DTYPES,
    _skinny_matmul_add_kernel,
    _skinny_matmul_kernel,
    _skinny_matmul_part,
    _skinny_matmul_plan,
    _skinny_matmul_run,
    skinny_matmul,
)

# %%
# Could one launch do?
# --------------------
#
# The op needs a second kernel to add the parts. There are two ways to add them
# in the first one. With *atomics* there is one sum in float32, and every
# program adds its part to it by ``tl.atomic_add``, in the order in which the
# programs finish. But the sum has to be set to zero before, and rounded after:
# PyTorch launches a kernel for each.
#
# With a *counter* for each tile, every program stores its part and then raises
# the counter by one. ``tl.atomic_add`` returns what the counter was. The
# program that finds ``SPLITS - 1`` came last, and adds all parts in their
# order. No program waits for another one, which might never start: the programs
# that wait could hold every place on the GPU. The counters, too, have to be set
# to zero before.


@triton.jit
def one_launch_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    K,
    steps,
    ATOMIC: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    acc, offs, mask = _skinny_matmul_part(
        x_ptr, w_ptr, M, N, K, steps, K, K, 1, DOT, BLOCK_M, BLOCK_N, BLOCK_K
    )
    part_ptrs = part_ptr + offs  # (BLOCK_N, BLOCK_M)
    if ATOMIC:
        # No program reads the sum, so none needs an order of memory accesses.
        tl.atomic_add(part_ptrs, acc, mask=mask, sem="relaxed")
    else:
        tl.store(part_ptrs + tl.program_id(axis=1) * M * N, acc, mask=mask)
        # One thread of the program counts. All of them must have stored first.
        tl.debug_barrier()
        # Release: others see the part before the count. Acquire: the last
        # program sees all parts.
        count_ptrs = count_ptr + tl.program_id(axis=0)
        if tl.atomic_add(count_ptrs, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros_like(acc)
            for split in tl.static_range(SPLITS):
                # ".cg" reads the L2 cache, to which all multiprocessors write.
                ptrs = part_ptrs + split * M * N
                total += tl.load(ptrs, mask=mask, cache_modifier=".cg")
            tl.store(y_ptr + offs, total, mask=mask)


def planned(x, weight, splits=None, **changes):
    """Return the op's plan, with changes."""
    ours, _, tile = _skinny_matmul_plan(x.shape[0], weight)
    tile, splits = tile | changes, splits or ours
    blocks = triton.cdiv(weight.shape[1], tile["BLOCK_K"])
    return splits, triton.cdiv(blocks, splits), tile


def one_launch(x, weight, ATOMIC, splits=None):
    (M, K), N = x.shape, weight.shape[0]
    splits, steps, tile = planned(x, weight, splits)
    y, tiles = x.new_empty(M, N), triton.cdiv(N, 64)
    new = torch.zeros if ATOMIC else torch.empty
    part = new(1 if ATOMIC else splits, M, N, device=x.device)
    count = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    one_launch_kernel[tiles, splits](
        x, weight, y, part, count, M, N, K, steps, ATOMIC, splits, **tile
    )
    return part[0].to(y.dtype) if ATOMIC else y


PARTS = (_skinny_matmul_part, _skinny_matmul_kernel, _skinny_matmul_add_kernel)
STEPS = {
    "whole sum": (whole_sum, first_kernel),
    "the op": (skinny_matmul, *PARTS),
    "atomics": (partial(one_launch, ATOMIC=True), PARTS[0], one_launch_kernel),
    "counter": (partial(one_launch, ATOMIC=False), PARTS[0], one_launch_kernel),
}

if __name__ == "__main__":
    for who, (function, *_) in STEPS.items():
        check(who, function, M=20, K=912, N=112)

# %%
# What does each gain? The table has GB/s of weights for each shape, and the
# number of statements in the kernels. All have the same blocks and stages.
# Where the op's plan has one part, the last two rows have nothing to add up. A
# sum in float32 depends on its order. So the column ``results`` counts how many
# different results 20 calls gave, for the last shape in float32.


def results_of(function, x, weight):
    found = (function(x, weight).float().cpu() for _ in range(20))
    return len({y.numpy().tobytes() for y in found})


if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*of) for _, *of in STEPS.values()]
    x, weight = random(*SHAPES[-1], torch.float32)
    ladder["results"] = [results_of(of[0], x, weight) for of in STEPS.values()]
    for M, K, N in SHAPES:
        x, weight = random(M, K, N)
        tried = {who: partial(of[0], x, weight) for who, of in STEPS.items()}
        name = f"{M} x {K} x {N}, {planned(x, weight)[0]} parts"
        ladder[name] = pd.Series(rates(tried, weight))
    print(ladder.to_string())

# %%
# The split is for the last shape, which has few tiles. The op has neither
# atomics nor a counter: a second launch needs nothing that is zero before it,
# and where the sum is split, neither of the two is faster in the table.

# %%
# Is the plan right? This table has other blocks, parts and stages for the op's
# kernels. A star marks what the op takes. The op has one rule for all shapes,
# which need not be the best for each; the table shows what that costs.

PLANS = [(64, 1, 3), (64, 1, 5), (64, 2, 5), (64, 4, 3), (64, 4, 5), (64, 8, 5)]
PLANS += [(32, 1, 5), (32, 4, 5), (128, 4, 3)]  # BLOCK_N, parts, stages


def replanned(x, weight, BLOCK_N, splits, num_stages):
    """Call the op's kernels with another plan."""
    blocks = {"BLOCK_N": BLOCK_N, "num_stages": num_stages}
    plan = planned(x, weight, splits, **blocks)
    y = x.new_empty(x.shape[0], weight.shape[0])
    return _skinny_matmul_run(x, weight, y, plan, *PARTS[1:])


if __name__ == "__main__" and DEVICE.type == "cuda":
    table = pd.DataFrame(index=[str(of) for of in PLANS])
    for M, K, N in SHAPES:
        x, weight = random(M, K, N)
        splits, _, tile = planned(x, weight)
        ours = (tile["BLOCK_N"], splits, tile["num_stages"])
        tried = {
            of: partial(replanned, x, weight, *of)
            for of in PLANS
            if (of[0] + tile["BLOCK_M"]) * 256 * of[2] <= SHARED
        }
        found = rates(tried, weight, turns=20).items()
        cells = {str(of): f"{gb}{' *'[of == ours]}" for of, gb in found}
        table[f"{M} x {K} x {N}"] = pd.Series(cells)
    print("GB/s for (BLOCK_N, parts, stages)")
    print(table.to_string(na_rep=""))

# %%
# Proof
# -----
#
# We compare every dtype with float64: sums that are split and sums that are
# not, and tensors where ``M``, ``N`` or ``K`` is 0. The interpreter cuts off
# bits of half precision where a GPU rounds, so a whole ``eps`` is allowed.


def prove(x, weight):
    y, magnitude = skinny_matmul(x, weight), x.double().abs()
    expected = linear(x.double(), weight.double())
    unit = linear(magnitude, weight.double().abs())
    eps = torch.finfo(x.dtype).eps
    allowed = (x.shape[-1] + 8) * 2**-24 * unit + eps * expected.abs() + 1e-7
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= allowed).all()


CASES = [(64, 2064, 112), (64, 900, 100), (1, 896, 100), (17, 257, 1030)]
CASES += [(33, 40, 70), (0, 5, 7), (5, 7, 0), (5, 0, 7)]  # M, K, N
if __name__ == "__main__":
    for dtype in SKINNY_MATMUL_DTYPES:
        for case in CASES:
            prove(*random(*case, dtype))

# %%
# Next come other layouts: a vector, more dimensions, rows and columns that lie
# apart, an expanded row, and transposed weights.

if __name__ == "__main__":
    x, weight = random(12, 300, 100, torch.float32)
    for view in (x[0], x.view(3, 4, 300), x[::2], x[:1].expand(9, 300)):
        prove(view, weight)
    prove(weight[:64, ::3], weight[:, 100:200])
    prove(weight[:64, :12], x.T)

# %%
# A row's result should be the same in every call, whatever rows come with it.
# We count the results of 20 calls, and the elements of a row that differ when
# fewer rows come with it. (This needs a GPU. In the interpreter, NumPy adds up
# each block, in an order that may depend on the number of rows.)

if __name__ == "__main__" and DEVICE.type == "cuda":
    for dtype in SKINNY_MATMUL_DTYPES:
        x, weight = random(64, 7168, 2048, dtype)
        y, rows = skinny_matmul(x, weight), (1, 2, 16, 17, 32, 33, 63)
        differ = [(skinny_matmul(x[:M], weight) != y[:M]).sum() for M in rows]
        found = results_of(skinny_matmul, x, weight)
        print(f"{dtype}: {found} result of 20 calls; with fewer rows, ", end="")
        print(f"{sum(differ).item()} elements differ")
        assert found == 1

# %%
# What the op does not take, it refuses with an error. It has no gradient, and
# PyTorch says so in the backward:

if __name__ == "__main__":
    weight = torch.ones(3, 2, device=DEVICE, requires_grad=True)
    for x in (torch.ones(65, 2), torch.ones(4, 3), torch.ones(2).double()):
        try:
            skinny_matmul(x.to(DEVICE), weight)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    try:
        skinny_matmul(torch.ones(1, 2, device=DEVICE), weight).sum().backward()
    except RuntimeError as error:
        print(f"RuntimeError: {error}")

# %%
# The benchmark
# -------------
#
# First come weights of 8192 x 8192 with more and more rows. Then come layers of
# models, each with ``M``, ``K`` and ``N``: two projections, an expert of a
# mixture, the product for queries, keys and values, and a vocabulary.

ROWS = [1, 2, 4, 8, 16, 32, 64]
LAYERS = {
    "Llama 8B": (1, 4096, 14336),
    "Llama 70B": (16, 8192, 8192),
    "DeepSeek": (64, 7168, 2048),
    "gpt-oss": (16, 2880, 5120),
    "Qwen": (32, 5120, 151936),
}


def measure(M, K, N):
    x, weight = random(M, K, N)
    return gpu_time(contestants(skinny_matmul, x, weight), turns=30)


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: measure(M, 8192, 8192) for M in ROWS}
    results = rate_table(times, "M", "GB/s", lambda M: 2e-6 * 8192**2)
    print("8192 x 8192", results.to_string(), sep="\n")
    wide = results.pivot(index="M", columns="series", values="GB/s")
    wide.plot(logx=True, title="8192 x 8192")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {name: measure(*layer) for name, layer in LAYERS.items()}
    moved = {name: 2e-6 * K * N for name, (_, K, N) in LAYERS.items()}
    results_layers = rate_table(times, "layer", "GB/s", moved.get)
    print("layers of models", results_layers.to_string(), sep="\n")

# %%
# This is what a call costs the CPU, in microseconds. A model that decodes may
# wait for it; ``cuda_graphs.py`` is about that.

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["M"] == 16].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The read of the weights bounds the product. We compare with the roof,
# PyTorch's own read of the same bytes, and not with the data sheet: a short
# read does not reach the data sheet's rate. A rate may be above the roof, since
# PyTorch's sum of rows is a kernel like others, and not a limit of the GPU.
#
# On an H100, the op is behind cuBLAS for DeepSeek's layer, 7168 x 2048, with 1
# and with 64 rows. Two things may cost it time. The tables do not tell them
# apart:
#
# * **A second kernel.** The sum is in four parts, and another launch adds them.
# * **The rows of x.** Each program reads its part of ``x`` out of the L2 cache.
#   With 64 rows that is as many bytes again as the weights have.
#
# The layer of gpt-oss has 80 tiles. So 52 of 132 multiprocessors have no
# program, and a split in two would give some of them two programs. The chart
# has it about level with cuBLAS all the same.
#
# With weights in float32, which the benchmark does not have, the op does not
# use tensor cores, which would round to TF32. With 64 rows each weight costs
# 128 operations.
#
# In the table beside other libraries, a rate counts operations, and the roof is
# the same product by cuBLAS, not the read of the charts above. The op gains
# most for a vocabulary, 5120 x 151936.

# %%
# Go further
# ----------
#
# 1. Exchange the operands: let the rows of ``x`` be the first operand of
#    ``tl.dot``, and the weights, transposed, the second. From how many rows on
#    does an H100 now use the matrix instruction of 64 rows? What may change?
# 2. Of 132 multiprocessors, 80 tiles leave 52 without a program. `Stream-K
#    <https://arxiv.org/abs/2301.03598>`_ puts the blocks of all tiles in one
#    line, and cuts the line into equal pieces, one for each program that runs
#    at a time. With ``K = 2880``, how many blocks does a program have, with
#    stream-K and without? What has to be added up, and where?
# 3. For one row, 15 of 16 columns are masked. A kernel without ``tl.dot`` could
#    multiply one element at a time. Which promise of the op would it break?
#
# To read on:
#
# * ``persistent_matmul.py`` is about products of many rows, ``tuned_matmul.py``
#   too, for any strides and any GPU.
# * ``few_long_rows.py`` compares the same three ways to add parts for sums of
#   rows, where a row's result does not depend on the batch.
# * ``cuda_graphs.py`` is about launches that a model repeats for each token.

# %%
# Answers
# -------
#
# **1.** From 33 rows on, as then ``BLOCK_M`` is 64. Up to 32 rows the compiler
# takes the instruction of older GPUs. The two may round sums differently, so a
# row's bits may change with the number of rows.
#
# **2.** Without stream-K, a program has the 23 blocks of its tile, each of 128
# columns. With it, 80 tiles are 1840 blocks, so each of 132 programs has at
# most 14. A piece begins and ends anywhere in a tile, so a tile may be in two
# pieces or three. Their sums have to be added up in a fixed order, as here. The
# cuts follow from ``N`` and ``K``, so the sums still do not depend on ``M``.
#
# **3.** A row that comes alone would be added up in another order than the same
# row among others. So its bits would depend on how many come with it.
