# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
Softmax
=======

Softmax turns a row of numbers into positive ones that add up to 1. Operator
by operator it goes through memory eight times; a kernel can read once and
write once. After ``row_sum.py``, ``triton_op.py`` and this page you can

* count what fusion saves before you write it;
* keep several short rows, or a longer one, in a program's registers;
* go over a row that does not fit with the *online* softmax, and have a cache
  serve the second pass;
* load 16 bytes at once from rows of odd length;
* avoid the ``-inf`` that fills a row with NaN.
"""

# sphinx_gallery_tags = ["reduction", "memory bound", "autograd"]
import itertools
import math
import os
import time
import warnings
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")


def gpu_time(calls, turns=50):
    """Time a dictionary of calls by turns, each with the L2 cache emptied.

    Returns for each the median of its GPU time in milliseconds, the 20th and
    the 80th percentile, its CPU time in microseconds, and whether the GPU had
    to wait for the CPU. The GPU sleeps before a call: that hides the launch.
    """
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    seen = {name: [] for name in calls}
    for turn in range(-5, turns):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(3_000_000)  # cycles of its clock, about 1.5 ms
            cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            cpu = time.perf_counter() - began
            end.record()
            late = start.query()  # the GPU got there before the CPU was done
            torch.cuda.synchronize()
            if turn >= 0:  # those before compile, tune and warm up
                seen[name].append((start.elapsed_time(end), cpu * 1e6, late))
    low, middle, high = turns // 5, turns // 2, turns * 4 // 5
    found = {}
    for name, rows in seen.items():
        gpu, cpu, late = map(sorted, zip(*rows, strict=True))
        found[name] = gpu[middle], gpu[low], gpu[high], cpu[middle], late[high]
    return found


def rate_table(times, x, unit, work):
    """Return a data frame of rates: work(size) for each millisecond.

    ``times`` has, for each size, what ``gpu_time`` returned.
    """
    import pandas as pd

    rows = []
    for size, calls in times.items():
        for name, (median, fast, slow, cpu, late) in calls.items():
            rates = [work(size) / ms for ms in (median, slow, fast)]
            rows.append([size, name, *rates, cpu, late])
    columns = [x, "series", unit, "low", "high", "CPU us", "late"]
    return pd.DataFrame(rows, columns=columns)


# Without a GPU, NumPy computes, and would warn of infinities.
warnings.filterwarnings("ignore", module="triton.runtime.interpreter")

# %%
# The problem in bytes
# --------------------
#
# .. math:: y_n = \frac{e^{x_n - m}}{\sum_k e^{x_k - m}}, \qquad
#    m = \max_k x_k
#
# The maximum cancels. It is there because :math:`e^{100}` is too large for
# float32. In PyTorch's operators these are five kernels. This is what they
# read and write, in multiples of ``x``:


def softmax_torch(x):
    top = x.amax(-1, keepdim=True)  # 1 read
    e = (x - top).exp()  # 1 read, 1 written; 1 read, 1 written
    return e / e.sum(-1, keepdim=True)  # 1 read; 1 read, 1 written


# %%
# Eight in all, and the floor is one read and one write. So the row has to be at
# hand when its maximum, and then its sum, is known.
#
# Rows in registers
# -----------------
#
# The registers of a multiprocessor hold 256 KB, so a program can well keep a
# row of 16384 elements in float32. A short row makes too few loads to keep the
# memory busy (``row_sum.py`` has that), so a program takes several:
#
# .. code-block:: text
#
#     short:    BLOCK_N       long:              BLOCK_N
#             +---------+              +------------------------+
#             |  row 0  |     BLOCK_M  |  row 0                 |
#     BLOCK_M |  row 1  |              +------------------------+
#             |  row 2  |     What lies behind the end of a row is
#             +---------+     -inf: never the maximum, and exp(-inf) = 0.
#
# * The op starts a program for each tile. If fewer run, they are *persistent*:
#   they go on to other tiles. That is for an experiment below.
# * ``N`` and the stride come in units of ``VEC`` elements. Since the compiler
#   knows ``VEC``, it knows that all rows begin at multiples of it, and loads
#   ``VEC`` elements, up to 16 bytes, with one instruction.
# * ``tl.exp`` takes three more instructions, for results that are too small to
#   be normal float32 numbers. ``tl.exp2`` makes those zero.

LOG2_E = tl.constexpr(math.log2(math.e))
KEEP, DROP = tl.constexpr("evict_last"), tl.constexpr("evict_first")


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def softmax_kernel(
    x_ptr,
    y_ptr,
    M,
    N_vecs,
    stride_vecs,
    VEC: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Not a global: torch.compile would write -inf, which Python cannot read.
    HIDDEN: tl.constexpr = float("-inf")
    # In int64, or a row's offset would overflow behind element 2**31.
    first = tl.program_id(axis=0).to(tl.int64)
    N = N_vecs * VEC
    offs_n = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    for tile in tl.range(first, tl.cdiv(M, BLOCK_M), tl.num_programs(axis=0)):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
        # Rows behind the last read that one again, and store nothing.
        x_rows = tl.minimum(offs_m, M - 1) * stride_vecs * VEC  # (BLOCK_M, 1)
        x = tl.load(x_ptr + x_rows + offs_n, offs_n < N, HIDDEN).to(ACC)
        e = exp(x - tl.max(x, axis=1, keep_dims=True))
        y = e * (1 / tl.sum(e, axis=1, keep_dims=True))
        tl.store(y_ptr + offs_m * N + offs_n, y, (offs_m < M) & (offs_n < N))


# %%
# The online softmax
# ------------------
#
# A longer row has to come in blocks. Its maximum is known at its end, its sum a
# pass later, or in the same pass, if the sum so far is corrected whenever the
# maximum grows, from :math:`m` to :math:`m'`:
#
# .. math:: s' = s\,e^{m - m'} + \sum_{k \in \text{block}} e^{x_k - m'}
#
# The block here is ``4 x BLOCK_N`` consecutive elements. Each column keeps its
# own ``m`` and ``s``, so no thread asks another before the loop is over, and a
# correction serves four elements.
#
# To write the result, a second pass reads the row again. That should not come
# from memory: the rows under way on the whole GPU have to fit in its L2 cache.
# This is what persistent programs are good for: the grid sets their number. The
# first pass asks the caches to keep what it reads, ``evict_last``. The second
# goes from the end to the start, as the end is what they saw last. (Why ``m``
# starts at ``LOWEST``, a finite number, is in "Break it".)
#
# If ``N`` is odd, most rows begin at no multiple of 16 bytes, where no thread
# can load 16 bytes at once. So the blocks are a row's *body*, from its first
# multiple to its last. In front and behind are the *edges*, less than
# ``2 * VEC`` elements, a block of their own. (Picture: ``cross_entropy.py``.)


@triton.jit
def divide(x_ptr, start, N, VEC: tl.constexpr):
    """Return a row's body, its length, its edges and which there are."""
    head = ((VEC - start % VEC) % VEC).to(tl.int32)
    length = tl.maximum(N - head, 0) // VEC * VEC
    edge = tl.arange(0, 2 * VEC)  # (2 * VEC,)
    edges = x_ptr + start + tl.where(edge < head, edge, edge + length)
    body = x_ptr + (start + head) // VEC * VEC  # tells the compiler: aligned
    return body, length, edges, edge < N - length


@triton.jit
def softmax_long_kernel(
    x_ptr,
    y_ptr,
    M,
    N,
    stride,
    VEC: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(axis=0).to(tl.int64)
    HIDDEN: tl.constexpr = float("-inf")
    BLOCK: tl.constexpr = 4 * BLOCK_N
    block = tl.arange(0, 4)[:, None] * BLOCK_N  # (4, 1)
    block += tl.arange(0, BLOCK_N)[None, :]  # (4, BLOCK_N)
    for row in tl.range(first, M, tl.num_programs(axis=0)):
        x_body, end, x_edges, mask_e = divide(x_ptr, row * stride, N, VEC)
        y_body, _, y_edges, _ = divide(y_ptr, row * N, N, VEC)
        x_e = tl.load(x_edges, mask_e, HIDDEN).to(ACC)  # (2 * VEC,)
        m = tl.full((BLOCK_N,), LOWEST, dtype=ACC)  # (BLOCK_N,)
        s = tl.zeros((BLOCK_N,), dtype=ACC)  # (BLOCK_N,)
        for start in range(0, N, BLOCK):
            offs = start + block  # (4, BLOCK_N)
            x = tl.load(x_body + offs, offs < end, HIDDEN, eviction_policy=KEEP)
            x = x.to(ACC)  # (4, BLOCK_N)
            larger = tl.maximum(m, tl.max(x, axis=0))
            s *= exp(m - larger)
            s += tl.sum(exp(x - larger[None, :]), axis=0)
            m = larger
        top = tl.maximum(tl.max(m, axis=0), tl.max(x_e, axis=0))
        e = exp(x_e - top)  # (2 * VEC,)
        scale = 1 / (tl.sum(s * exp(m - top), axis=0) + tl.sum(e, axis=0))
        tl.store(y_edges, e * scale, mask_e)
        last = (N - 1) // BLOCK * BLOCK
        for back in range(0, N, BLOCK):
            offs = last - back + block  # (4, BLOCK_N)
            x = tl.load(x_body + offs, offs < end, HIDDEN, eviction_policy=DROP)
            y = exp(x.to(ACC) - top) * scale
            tl.store(y_body + offs, y, offs < end, eviction_policy=DROP)


# %%
# The backward
# ------------
#
# With the incoming gradient :math:`g`, the gradient of ``x`` is
#
# .. math:: d_n = y_n \Big(g_n - \sum_k g_k\,y_k\Big).
#
# It takes ``y`` and not ``x``, so the forward saves ``y``: two reads and a
# write. ``WHOLE`` rows stay in registers; others go by twice, in blocks.


@triton.jit
def softmax_backward_kernel(
    g_ptr,
    y_ptr,
    d_ptr,
    M,
    N_units,
    UNIT: tl.constexpr,
    VEC: tl.constexpr,
    ACC: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(axis=0).to(tl.int64)
    N = N_units * UNIT
    block = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    for tile in tl.range(first, tl.cdiv(M, BLOCK_M), tl.num_programs(axis=0)):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
        if WHOLE:
            offs = offs_m * N + block  # (BLOCK_M, BLOCK_N)
            mask = (offs_m < M) & (block < N)
            g = tl.load(g_ptr + offs, mask, 0).to(ACC)
            y = tl.load(y_ptr + offs, mask, 0).to(ACC)
            d = y * (g - tl.sum(g * y, axis=1, keep_dims=True))
            tl.store(d_ptr + offs, d, mask)
        else:
            g_body, end, g_edges, mask_e = divide(g_ptr, tile * N, N, VEC)
            y_body, _, y_edges, _ = divide(y_ptr, tile * N, N, VEC)
            d_body, _, d_edges, _ = divide(d_ptr, tile * N, N, VEC)
            g_e = tl.load(g_edges, mask_e, 0).to(ACC)  # (2 * VEC,)
            y_e = tl.load(y_edges, mask_e, 0).to(ACC)
            acc = tl.zeros((1, BLOCK_N), dtype=ACC)
            for start in range(0, N, BLOCK_N):
                offs = start + block  # (1, BLOCK_N)
                g = tl.load(g_body + offs, offs < end, 0, eviction_policy=KEEP)
                y = tl.load(y_body + offs, offs < end, 0, eviction_policy=KEEP)
                acc += g.to(ACC) * y.to(ACC)
            total = tl.sum(acc) + tl.sum(g_e * y_e)
            tl.store(d_edges, y_e * (g_e - total), mask_e)
            last = (N - 1) // BLOCK_N * BLOCK_N
            for back in range(0, N, BLOCK_N):
                offs = last - back + block  # (1, BLOCK_N)
                g = tl.load(g_body + offs, offs < end, 0, eviction_policy=DROP)
                y = tl.load(y_body + offs, offs < end, 0, eviction_policy=DROP)
                d = y.to(ACC) * (g.to(ACC) - total)
                tl.store(d_body + offs, d, offs < end, eviction_policy=DROP)


# %%
# The launcher
# ------------
#
# A row is copied if it is not contiguous. If it fits, registers keep it, 16
# elements to a thread, more where 8 warps (backward 16) are not enough; beyond
# ``FEW`` only if 16 bytes are loaded at once. The others are read twice, by up
# to eight programs for each multiprocessor, as many as the cache has room for.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}
IN_REGISTERS = 64 * 1024  # bytes of a row in its accumulator's type
FEW = 2048  # elements of the longest in registers with narrower loads
PROCESSORS, CACHE = 4, 2**20  # small, for the interpreter
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    PROCESSORS, CACHE = gpu.multi_processor_count, gpu.L2_cache_size


def plan(M, N, stride, size, tensors):
    """Return the grid, VEC and the options for rows of as many matrices."""
    VEC = math.gcd(N, stride, 16 // size)
    if N * max(4, size) <= IN_REGISTERS and (VEC * size == 16 or N <= FEW):
        BLOCK_N = triton.next_power_of_2(N)
        BLOCK_M = max(1, 2048 // BLOCK_N)
        options = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
        options["num_warps"] = min(8 * tensors, BLOCK_M * BLOCK_N // 512)
        return (triton.cdiv(M, BLOCK_M),), VEC, options
    # Where rows of the output are not aligned as these, single elements.
    VEC = 1 if (N - stride) * size % 16 else 16 // size
    fit = 0.6 * CACHE / (PROCESSORS * tensors * N * size)
    each = 2 ** min(3, int(math.log2(max(1, fit))))
    options = {"BLOCK_N": 32 // each * 512 // size, "num_warps": 32 // each}
    return (min(M, each * PROCESSORS),), VEC, options


def matrix(x):
    """Return x as a matrix with contiguous rows, a copy only if need be."""
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return x if x.stride(1) == 1 else x.contiguous()


def check(x, *others):
    # Compared, not hashed: under a compiler, sizes may be symbols.
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in (x, *others)]
    if x.dtype not in ACC:
        raise TypeError(f"takes floating dtypes, not {x.dtype}")
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"takes one dtype, shape and device, not {kinds}")
    if x.shape[-1:].numel() > 2**30:
        raise ValueError("takes rows of up to 2**30 elements")


@triton_op("triton_gallery::softmax", mutates_args={})
def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return torch.softmax(x, dim=-1)."""
    check(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x = matrix(x)
    M, N, stride = x.shape[0], int(x.shape[1]), int(x.stride(0))
    grid, VEC, options = plan(M, N, stride, x.element_size(), 1)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if "BLOCK_M" in options:
            arguments = x, y, M, N // VEC, stride // VEC, VEC, ACC[x.dtype]
            wrap_triton(softmax_kernel)[grid](*arguments, **options)
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            arguments = x, y, M, N, stride, VEC, ACC[x.dtype]
            options["LOWEST"] = torch.finfo(wide).min
            wrap_triton(softmax_long_kernel)[grid](*arguments, **options)
    return y


@triton_op("triton_gallery::softmax_backward", mutates_args={})
def softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, for y = softmax(x) and the gradient of y."""
    check(grad, y)
    d = torch.empty_like(y, memory_format=torch.contiguous_format)
    if d.numel() == 0:
        return d
    grad, y = grad.contiguous(), matrix(y.contiguous())
    M, N = y.shape[0], int(y.shape[1])
    grid, VEC, options = plan(M, N, N, y.element_size(), 2)
    unit = math.gcd(N, VEC)
    options = {"WHOLE": "BLOCK_M" in options, "BLOCK_M": 1} | options
    arguments = grad, y, d, M, N // unit, unit, VEC, ACC[y.dtype]
    with torch.accelerator.device_index(y.device.index):
        wrap_triton(softmax_backward_kernel)[grid](*arguments, **options)
    return d


def save(ctx, inputs, output):
    ctx.save_for_backward(output)


def backward(ctx, grad):
    return softmax_backward(grad, *ctx.saved_tensors)


softmax.register_autograd(backward, setup_context=save)

# %%
# The check
# ---------
#
# Against float64. The exponent is rounded to 24 bits and is less than 20 here,
# so exponentials and sum are off by :math:`20 \cdot 2^{-24}` at most, less than
# 2e-6. In a gradient the terms may cancel, hence the ``atol``.

torch.manual_seed(0)
cases = [(torch.float16, 3, 40), (torch.bfloat16, 2, 5, 257)]
cases += [(torch.float16, 3, 20_001), (torch.float32, 2, 20_000)]
for dtype, *shape in (*cases, (torch.float32, 5, 0), (torch.float32,)):
    x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    grad, wide = torch.randn_like(x), x.detach().double().requires_grad_()
    y, expected = softmax(x), torch.softmax(wide, -1)
    rtol = 5e-6 + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=1e-7)
    (d,) = torch.autograd.grad(y, x, grad)
    (expected,) = torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(d.double(), expected, rtol=rtol, atol=rtol)

if __name__ == "__main__":
    x = torch.randn(4, 3, 7, device=DEVICE).double().requires_grad_()
    assert torch.autograd.gradcheck(softmax, x)

# As in PyTorch, NaN or +inf or nothing but -inf makes a row NaN.
special = torch.zeros(7, 20_001, device=DEVICE)
special[0, 3], special[1, 0], special[2] = torch.nan, torch.inf, -torch.inf
special[3, :19_000], special[4, 1:] = -torch.inf, -torch.inf
special[5], special[6, 7] = torch.finfo(torch.float32).min, 3e38
for rows in (special, special[:, :40]):
    expected = torch.softmax(rows, -1)
    torch.testing.assert_close(softmax(rows), expected, equal_nan=True)

# %%
# What does a persistent program gain?
# ------------------------------------
#
# Two experiments, on a gigabyte of bfloat16. In the first, rows are in
# registers: a program for each tile, and about as many as run at a time.

ELEMENTS = 2**29


def random(N):
    return torch.randn(ELEMENTS // N, N, device=DEVICE, dtype=torch.bfloat16)


def launch(kernel, N, unit, each=None, **options):
    x = random(N)
    grid, _, known = plan(len(x), N, N, 2, 1)
    grid = (each * PROCESSORS,) if each else grid
    sizes = len(x), N // unit, N // unit, 8, tl.float32
    call = partial(kernel[grid], x, torch.empty_like(x), *sizes)
    return partial(call, **known | options)


def rate(time):  # of two tensors
    return 4 * ELEMENTS * 1e-6 / time[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    print("GB/s   each tile  persistent")
    for N, each in ((1024, 12), (4096, 8), (16384, 2)):
        at = partial(launch, softmax_kernel, N, 8)
        once, persistent = gpu_time({"once": at(), "all": at(each)}).values()
        print(f"{N:5} {rate(once):10.0f} {rate(persistent):11.0f}")

# %%
# A program for each tile needs no care: as one ends, the next one starts, and
# others on its multiprocessor load meanwhile. In the second, rows are in the
# cache. More programs hide more waiting, with more rows under way. When these
# outgrow L2, rates fall; the launcher leaves room for the results:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N, each in itertools.product((32768, 65536, 131072), (4, 2, 1)):
        options = {"num_warps": 32 // each, "BLOCK_N": 8192 // each}
        call = launch(softmax_long_kernel, N, 1, each, LOWEST=-3e38, **options)
        one = rate(gpu_time({"one": call})["one"])
        part = each * PROCESSORS * N * 2 / CACHE
        print(f"N = {N:6}, {each} each, {part:.2f} of L2: {one:5.0f} GB/s")

# %%
# The benchmark
# -------------
#
# bfloat16, :math:`2^{29}` elements at each length. The figure counts two
# tensors forward and three backward, whatever a kernel really moved. ``Roof``
# is a copy, and an addition. All backwards are called through autograd.

SIZES = [256, 1024, 3000, 4096, 16384, 50257, 65536, 131072]


def calls(N, backward):
    x, g = random(N), random(N)
    out = torch.empty_like(x)
    torch.compiler.reset()  # past eight shapes it would raise
    eager = partial(torch.softmax, dim=-1)
    fast = torch.compile(lambda x: eager(x), fullgraph=True, dynamic=False)
    ops = {"Triton": softmax, "PyTorch": eager, "torch.compile": fast}
    if not backward:
        found = {name: partial(op, x) for name, op in ops.items()}
        return found | {"Roof": partial(out.copy_, x)}
    x.requires_grad_()
    found = {
        name: partial(torch.autograd.grad, op(x), x, g, retain_graph=True)
        for name, op in ops.items()
    }
    return found | {"Roof": partial(torch.add, x.detach(), g, out=out)}


def table(backward):
    times = {N: gpu_time(calls(N, backward)) for N in SIZES}
    moved = (3 if backward else 2) * 2 * ELEMENTS
    return rate_table(times, "N", "GB/s", lambda N: moved * 1e-6)


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_backward = table(False), table(True)
    for name, one in (("forward", results), ("backward", results_backward)):
        print(f"{name}:", one.to_string(), sep="\n")
        wide = one.pivot(index="N", columns="series", values="GB/s")
        wide.plot(logx=True, title=name)

# %%
# Beside the best of PyTorch and ``torch.compile``, and beside the roof:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        wide = one.pivot(index="N", columns="series", values="GB/s")
        wide = wide.loc[[1024, 4096, 16384, 65536]]
        others = wide[["PyTorch", "torch.compile"]].max(axis=1)
        both = wide["Triton"] / others, wide["Triton"] / wide["Roof"]
        both = pd.concat(both, axis=1, keys=["of the best", "of the roof"])
        print(both.round(3))

# %%
# Reading the result
# ------------------
#
# While a row is in registers the kernel is near the roof: other programs load
# while one waits for its sum. Backward at 16384 there are none, for want of
# registers; ``torch.compile`` reads those rows twice, and is faster. Longer
# rows we read twice, too. The caches have to be fast, and large: backward, even
# one program for each multiprocessor has too much under way with the longest.
#
# 50257 is odd, and stands further below the roof than its neighbours. Forward,
# the last of its four blocks is mostly masked. In registers, the elements of
# odd rows, up to ``FEW``, are loaded one by one.
#
# Break it: a maximum that starts at -inf
# ---------------------------------------
#
# It seems the natural start. This row is padded on the left:

if __name__ == "__main__":
    x = torch.zeros(1, 20_000, device=DEVICE)
    x[0, :10_000] = -torch.inf
    y, sizes = torch.empty_like(x), (1, 20_000, 20_000, 4)
    for lowest in (-math.inf, torch.finfo(torch.float32).min):
        softmax_long_kernel[(1,)](x, y, *sizes, tl.float32, lowest, 1024)
        print(f"m starts at {lowest:8.2g}: {y.isnan().sum():5} NaN")

# %%
# After the first block ``larger`` is still ``-inf``, and ``m - larger`` is
# ``-inf - -inf``, which is NaN, for good. From the lowest finite number, every
# difference is a number or ``-inf``. A row of only ``-inf`` is NaN, by 0 / 0.
#
# Go further
# ----------
#
# The backward op has no backward. What would its two gradients be for an
# incoming ``v``, and which op computes one of them?
#
# Next is ``rms_norm.py``. To read on: the online softmax's `paper
# <https://arxiv.org/abs/1805.02867>`_.

# %%
# Answers
# -------
#
# For :math:`g` it is :math:`y\,(v - \sum v\,y)`, the op itself for ``v``
# and ``y``. For :math:`y` it is :math:`v\,(g - \sum g\,y) - g \sum v\,y`.
