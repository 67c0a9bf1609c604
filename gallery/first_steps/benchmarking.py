# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Time a kernel, and not the compiler, Python or the cache: each mistake
# is shown beside the right number."""
# ///
r"""
Benchmarking a kernel
=====================

Timing a kernel takes one line, and so does timing something else by mistake:
the compiler, Python, the cache. This page makes the mistakes on purpose, with
the right number beside each.

A wrong kernel has no speed: ``debugging.py`` comes before. Here you learn to

* say what ``do_bench``, ``do_bench_cudagraph`` and a wall clock measure;
* tell a cold cache from a warm one, and a kernel's time from its launch;
* compare two kernels without being fooled by the order, the clock or the data;
* measure the roofs of your own GPU and place a kernel under them.
"""

# sphinx_gallery_tags = ["measurement", "memory bound", "compute bound"]
import itertools
import os
import time
from functools import partial
from inspect import getsource, signature
from subprocess import PIPE, Popen

import matplotlib.pyplot as plt
import pandas as pd
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

# %%
# What to expect: operations and bytes
# ------------------------------------
#
# Count what the algorithm has to compute and to move before you measure; the
# quotient is its *arithmetic intensity*. This page has a row sum, PyTorch's
# matrix product in bfloat16, and an addition with a knob: ``fmas`` further
# multiply-adds on each element. (*FMA*: fused multiply-add, two operations.)


def add_work(N, fmas=0):
    return (1 + 2 * fmas) * N, 12 * N  # operations, bytes


def sum_row_work(M, N):
    return M * (N - 1), 4 * (M * N + M)


def matmul_work(N):
    return 2 * N**3, 3 * 2 * N**2


def intensity(work):
    return work[0] / work[1]


def attainable(intensity, bandwidth, peak):
    return min(peak, intensity * bandwidth)


def show(title, rows, columns):
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    print(title, table.to_string(float_format="{:,.2f}".format), sep="\n")


if __name__ == "__main__":
    work = {f"add, {k:4} FMAs": add_work(2**25, k) for k in (0, 1, 64, 1024)}
    work["sum_row, 16384 x 4096"] = sum_row_work(16384, 4096)
    work |= {f"matmul, N = {N}": matmul_work(N) for N in (256, 8192)}
    rows = {k: [w[0] / 1e6, w[1] / 1e6, intensity(w)] for k, w in work.items()}
    show("in millions", rows, ["operations", "bytes", "operations/byte"])

# %%
# A GPU has a *peak*, the operations that it does in a second, and a bandwidth.
# A kernel of intensity :math:`I` can attain the smaller of the peak and
# :math:`I \cdot \text{bandwidth}`. The two meet at the *ridge point*,
#
# .. math:: I_\text{ridge} = \text{peak} / \text{bandwidth}.
#
# Below it a kernel is memory bound and you quote GB/s. Above it a kernel is
# *compute bound* and you quote TFLOP/s.
#
# The kernels
# -----------
#
# The third does nothing: a launch and no work. The launchers take what the
# measurements need and refuse the rest.


@triton.jit
def add_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    N,
    FMAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    acc = x + y
    # Sixteen to a turn, so that the loop's own instructions weigh little.
    for _ in range(FMAS // 16):
        for _ in tl.static_range(16):
            acc = acc * x + y
    for _ in tl.static_range(FMAS % 16):
        acc = acc * x + y
    tl.store(out_ptr + offs, acc, mask=mask)


@triton.jit
def sum_row_kernel(
    a_ptr,
    out_ptr,
    N,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(axis=0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    a = tl.load(a_ptr + pid_m * N + offs_n, mask=offs_n < N, other=0)
    tl.store(out_ptr + pid_m, tl.sum(a, axis=0))


@triton.jit
def empty_kernel(x_ptr):
    pass


def check(*tensors):
    kind = torch.float32, DEVICE.type, tensors[0].shape
    for t in tensors:
        needs_grad = t.requires_grad and torch.is_grad_enabled()
        fits = (t.dtype, t.device.type, t.shape) == kind and t.is_contiguous()
        if needs_grad or not fits:
            raise ValueError(f"takes contiguous {kind}, without gradient")


def add(x, y, fmas=0, block=1024):
    check(x, y)
    out, N = torch.empty_like(x), x.numel()
    grid = (triton.cdiv(N, block),)
    add_kernel[grid](x, y, out, N, FMAS=fmas, BLOCK=block)
    return out


def add_torch(x, y, fmas=0):
    acc = x + y
    for _ in range(fmas):
        acc = acc * x + y
    return acc


def sum_row(A):
    check(A)
    M, N = A.shape
    out, block = A.new_empty(M), triton.next_power_of_2(max(N, 1))
    sum_row_kernel[(M,)](A, out, N, BLOCK_N=block, num_warps=8)
    return out


# %%
# The check
# ---------
#
# First right, then fast. The addition rounds once, by :math:`2^{-24}` at most,
# a multiply-add once or (without an FMA) twice, and positive numbers do not
# cancel: ``2 * fmas + 1`` errors at most. ``row_sum.py`` counts those of a sum.

torch.manual_seed(0)
for N in (1, 1024, 3333):
    A = torch.rand(2, N, device=DEVICE)
    for fmas in (0, 1, 16, 50):
        out, expected = add(*A, fmas), add_torch(*A.double(), fmas)
        rtol = (2 * fmas + 1) * 2**-24
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=0)
    out, expected = sum_row(A).double(), A.double().sum(axis=1)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)

# %%
# One measurement is no measurement
# ---------------------------------
#
# A wall clock times a PyTorch op **on the CPU** (no kernel, and no GPU needed):
# two hundred calls, three times over. Which row would you quote?


def wall(op, calls=1, wait=False):
    start = time.perf_counter()
    for _ in range(calls):
        op()
    if wait:
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


if __name__ == "__main__":
    numbers, runs = torch.rand(300_000), {}
    for run in ("run 1", "run 2", "run 3"):
        op = partial(numbers.cumsum, 0)
        times = pd.Series([wall(op) for _ in range(200)])
        rest = times.describe(percentiles=[0.2, 0.5, 0.8]).drop("count")
        runs[run] = {"first call": times[0], **rest}
    print("torch.cumsum on the CPU, milliseconds")
    print(pd.DataFrame(runs).to_string(float_format="{:.3f}".format))

# %%
# One slow call, often the first, moves the mean, ``std`` and the maximum. The
# minimum is the luckiest call, and more calls are luckier. The median is a
# typical call: quote it, with the 20 and 80 % quantiles as its error bar.
#
# What Triton's helpers do
# ------------------------
#
# A launch returns before the kernel has run, so Python's clock has to wait for
# the GPU or to leave the timing to it: a *CUDA event* is a mark in the GPU's
# queue that notes when the GPU gets there. ``do_bench`` works with pairs:
#
# 1. Call once, which compiles, and synchronize.
# 2. Time five calls, clearing the cache before each. From that, clearing
#    included, follows how many calls fill ``warmup`` and ``rep`` milliseconds.
# 3. Warm up, without clearing.
# 4. Repeat: overwrite 256 MB, so that L2, the cache of the whole GPU, holds no
#    input (it is *cold*); event; call; event.
# 5. Synchronize and summarize the times between the events of a pair.
#
# ``do_bench_cudagraph`` records calls as a *CUDA graph* and replays it ten
# times: no Python between the calls, and nobody clears the cache. The defaults:

if __name__ == "__main__":
    helpers = triton.testing.do_bench, triton.testing.do_bench_cudagraph
    for helper in helpers:
        _, *parameters = signature(helper).parameters.values()
        print(helper.__name__, *parameters, sep="\n    ")
    assert "return_mode='mean'" in str(signature(helpers[0]))
    assert "clear_cache(" in getsource(helpers[0])
    assert "clear_cache(" not in getsource(helpers[1])

# %%
# Look at ``return_mode``: ``do_bench`` returns the mean, and up to Triton 3.7
# its description says the median. Ask for ``quantiles``. (A graph's are those
# of ten means.)
#
# One kernel, seven answers
# -------------------------
#
# From here on a GPU measures; without one these cells print nothing. The
# addition is the same in all rows, only the way to time it differs.


def bench(op):
    """Return the median, the 20 and the 80 % quantile in milliseconds."""
    return triton.testing.do_bench(op, quantiles=[0.5, 0.2, 0.8])


def graph(op):
    return triton.testing.do_bench_cudagraph(op, quantiles=[0.5])


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, y = torch.rand(2, 2**24, device=DEVICE)
    op, times = partial(add, x, y), {}
    with triton.knobs.compilation.scope():  # no code from earlier runs
        triton.knobs.compilation.always_compile = True
        times["first call: compiles"] = wall(partial(op, block=512), wait=True)
    times["20 calls, no synchronize"] = wall(op, 20)
    torch.accelerator.synchronize()
    each = pd.Series([wall(op, wait=True) for _ in range(20)])
    times["synchronize after each"] = each.median()
    times["100 calls, one synchronize"] = wall(op, 100, wait=True)
    times["do_bench, makes an input"] = bench(lambda: add(x.clone(), y))[0]
    times["do_bench"] = bench(op)[0]
    times["do_bench_cudagraph"] = graph(op)
    assert times["first call: compiles"] > times["do_bench"]
    rows = {k: [t * 1e3, 12 * x.numel() / t / 1e6] for k, t in times.items()}
    show("one addition", rows, ["microseconds", "GB/s"])

# %%
# Without waiting, the clock stops when Python has filled the queue: that rate
# is far above the roofs further down. Synchronizing after each call adds the
# launch and the way back. One wait for all is fair while kernels outlast their
# launches. Making an input inside the timed function times that as well.
#
# Cold and warm
# -------------
#
# ``do_bench`` starts with a cold L2 cache; a graph repeats a call whose data,
# if it fits, is warm. Their launches differ too, so another graph runs in
# between: its calls take turns among inputs that together exceed the cache, so
# each call finds its input cold.

if __name__ == "__main__" and DEVICE.type == "cuda":
    cache, rows = torch.cuda.get_device_properties(DEVICE).L2_cache_size, {}
    for mib in (1, 4, 16, 64, 256):
        copies = 1 + 4 * cache // (mib * 2**20)
        inputs = torch.rand(copies, 64 * mib, 4096, device=DEVICE)
        same, turns = partial(sum_row, inputs[0]), itertools.cycle(inputs)
        other = graph(lambda turns=turns: sum_row(next(turns)))
        times = bench(same)[0], other, graph(same)
        rates = (mib * 2**20 / t / 1e6 for t in times)
        rows[f"{mib} MiB"] = [*(t * 1e3 for t in times), *rates]
    columns = ["do_bench", "graph, turns", "graph, same"] * 2
    show("row sum: microseconds, then GB/s", rows, columns)

# %%
# The last two columns differ while the matrix fits into L2, and agree beyond.
# The first differs from both at every size, so don't mix the two helpers. Both
# caches occur: what was just written is warm. Never compare cold with warm.
#
# What a launch costs
# -------------------
#
# Four ops on one element or none; ``loop`` is the time from call to call in
# Python. A pair of events also counts the time that the GPU waits for Python.
# While the cache is cleared Python runs ahead, so only the part of its time
# that outlasts the clearing counts. The last row sleeps in Python.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, rows = torch.rand(1, device=DEVICE), {}
    empty = partial(empty_kernel[(1,)], x)
    ops = {"Triton, empty": empty, "Triton, add": partial(add, x, x)}
    ops["PyTorch, add"] = partial(torch.add, x, x)
    ops["sleep(300e-6), empty"] = lambda: (time.sleep(300e-6), empty())
    for name, op in ops.items():
        times = bench(op)[0], graph(op), wall(op, 500, wait=True)
        rows[name] = [t * 1e3 for t in times]
    show("microseconds", rows, ["do_bench", "do_bench_cudagraph", "loop"])

# %%
# The first row is about the shortest time that ``do_bench`` can report: don't
# compare kernels that come near it. The graph replays all four without Python,
# which is right if your program does, and hides a cost if it doesn't.
#
# The data, the clock and the order
# ---------------------------------
#
# Flipping bits takes power, a GPU at its power limit lowers its clock, and a
# product of zeros flips few. Each kind of data keeps the GPU busy for a while;
# then the driver is asked, under load. Each row starts at the clock at which
# the row above it ended.


def sustain(op, seconds):
    """Return the milliseconds of calls in a row, and at their end MHz, W."""
    uuid = torch.cuda.get_device_properties(DEVICE).uuid
    ask = f"timeout 9 nvidia-smi --id=GPU-{uuid} --format=csv,noheader,nounits"
    ask += " --query-gpu=clocks.sm,power.draw"
    events, driver, start = [], None, time.perf_counter()
    while driver is None or driver.poll() is None:
        for _ in range(16):
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            op()
        events[-16].synchronize()  # the GPU keeps a batch to work on
        if driver is None and time.perf_counter() - start > seconds:
            driver = Popen(ask, shell=True, stdout=PIPE, text=True)
    torch.accelerator.synchronize()
    said = pd.Series(driver.communicate()[0].split(","), dtype=object)
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return times, *pd.to_numeric(said, errors="coerce").reindex([0, 1])


def teraflops(work, milliseconds):
    return work[0] / milliseconds / 1e9


if __name__ == "__main__" and DEVICE.type == "cuda":
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    product, zeros = partial(torch.matmul, a, b), torch.zeros_like(a)
    ops = {"random": product, "zeros": partial(torch.matmul, zeros, zeros)}
    work, rows = matmul_work(8192), {}
    product()
    time.sleep(1)  # a rest
    for data, op in {**ops, "random again": product}.items():
        times, *state = sustain(op, 1)
        parts = pd.Series(times[:16]), pd.Series(times[-100:])
        rows[data] = [teraflops(work, t.median()) for t in parts] + state
    columns = ["first 16 calls", "last 100", "MHz", "watts"]
    show("bfloat16, 8192^3: TFLOP/s", rows, columns)

# %%
# Random data ends at more watts, fewer MHz and a lower rate than zeros. So use
# data like your users', and mind who goes first: ``A`` and ``B`` are two names
# of the product of random data, timed after a rest.

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for order in ("AB", "ABABABAB"):
        time.sleep(1)
        rates = [[name, teraflops(work, bench(product)[0])] for name in order]
        by_name = pd.DataFrame(rates).groupby(0)[1]
        rows[order] = [*by_name.median(), *by_name.std()]
    show("TFLOP/s", rows, ["A", "B", "std of A", "std of B"])

# %%
# ``A`` and ``B`` are one call, so their difference is no property of a kernel.
# (One timing has no ``std``.) Take turns, and call two versions equal when they
# are closer than their spread.
#
# The roofs of this machine
# -------------------------
#
# Memory has a roof for each mix of reads and writes. Arithmetic has one for
# each type: the vendor's matrix product (FMAs in ``float32``), at the clock
# that it gets.


def measure_roofs():
    x, y, out = torch.rand(3, 2**28, device=DEVICE)
    for name, count, op in (
        ("copy", 8, partial(out.copy_, x)),
        ("add", 12, partial(torch.add, x, y, out=out)),
        ("read", 4, x.sum),
    ):
        yield name, [count * x.numel() / t / 1e6 for t in bench(op)]
    a, b = torch.randn(2, 8192, 8192, device=DEVICE)
    for name in ("tf32", "float32", "float16", "bfloat16"):
        tf32 = name == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        dtype = torch.float32 if tf32 else getattr(torch, name)
        times = bench(partial(torch.matmul, a.to(dtype), b.to(dtype)))
        yield name, [teraflops(matmul_work(8192), t) for t in times]


if __name__ == "__main__" and DEVICE.type == "cuda":
    roofs = dict(measure_roofs())
    show("GB/s, then TFLOP/s", roofs, ["median", "best 20 %", "worst 20 %"])
    bandwidth = max(roofs[mix][0] for mix in ("copy", "add", "read")) / 1e3
    for name in ("float32", "tf32", "bfloat16"):
        print(f"ridge point of {name}: {roofs[name][0] / bandwidth:.0f}")

# %%
# The benchmark
# -------------
#
# The addition by the number of its multiply-adds: operations per second, the
# median and the 20 and 80 % quantiles. ``Roof`` is what it can attain with the
# ``add`` and ``float32`` above. PyTorch runs each step as separate kernels,
# so its intensity stays low; ``torch.compile`` unrolls them (only to 64 here).
# The flat part of ``Roof`` is a matrix product's, not this kernel's.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["fmas"],
        x_vals=[1, 4, 16, 64, 128, 256, 1024],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=["Triton", "PyTorch", "torch.compile", "Roof"],
        line_names=["Triton", "PyTorch", "torch.compile", "Roof"],
        ylabel="TFLOP/s",
        plot_name="benchmarking",
        args={"N": 2**25},
    )
)
def benchmark(N, fmas, provider):
    work = add_work(N, fmas)
    if provider == "Roof":
        speed = roofs["add"][0] / 1e3
        return attainable(intensity(work), speed, roofs["float32"][0])
    if provider == "torch.compile" and fmas > 64:
        return float("nan")
    x, y = torch.rand(2, N, device=DEVICE)
    torch.compiler.reset()
    compiled = torch.compile(add_torch, fullgraph=True, dynamic=False)
    ops = {"Triton": add, "PyTorch": add_torch, "torch.compile": compiled}
    times = bench(partial(ops[provider], x, y, fmas))
    median, fast, slow = (teraflops(work, t) for t in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# The roofline
# ------------
#
# The slant is the fastest memory roof, the flat lines are peaks.


def points():
    x, y = torch.rand(2, 2**25, device=DEVICE)
    for k in (0, 16, 64, 1024):
        op = partial(add, x, y, k)
        yield f"add, {k} FMAs", "float32", add_work(2**25, k), op
    A = torch.rand(16384, 4096, device=DEVICE)
    yield "sum_row", "float32", sum_row_work(*A.shape), partial(sum_row, A)
    for N in (256, 1024, 8192):
        a, b = torch.randn(2, N, N, device=DEVICE, dtype=torch.bfloat16)
        op = partial(torch.matmul, a, b)
        yield f"matmul, {N}", "bfloat16", matmul_work(N), op


if __name__ == "__main__" and DEVICE.type == "cuda":
    _, axes = plt.subplots()
    x, rows = [2 ** (k / 4) for k in range(-16, 61)], {}
    for name in ("float32", "tf32", "bfloat16"):
        peak = roofs[name][0]
        axes.loglog(x, [attainable(i, bandwidth, peak) for i in x], label=name)
    for name, kind, work, op in points():
        i, rate = intensity(work), teraflops(work, bench(op)[0])
        roof = attainable(i, bandwidth, roofs[kind][0])
        rows[name] = [i, rate, roof, 100 * rate / roof]
        axes.plot(i, rate, "ko", markersize=4)
        axes.annotate(name, (i, rate), (5, -9), textcoords="offset points")
    show("roofline", rows, ["operations/byte", "TFLOP/s", "attainable", "%"])
    axes.set(xlabel="operations per byte", ylabel="TFLOP/s")
    axes.legend()
    plt.show()

# %%
# Reading the result
# ------------------
#
# Far left of the ridge point only bytes count, far right only operations; near
# it both do, and a kernel stays further below. A roof is a measurement too: the
# largest product passes it a little. The smallest product takes not much longer
# than an empty kernel, so its rate says nothing about its arithmetic.
# Next comes ``autotune.py``, which chooses by measuring.
#
# Go further
# ----------
#
# 1. From which ``N`` on is a bfloat16 (float32) product compute bound?
# 2. A colleague's kernel is at twice the memory roof. What do you ask?
# 3. To time the multiply-adds alone, you leave out ``tl.store``. What happens?
#
# To read on: the `roofline <https://doi.org/10.1145/1498765.1498785>`_; `why
# data matters <https://www.thonking.ai/p/strangely-matrix-multiplications>`_;
# `how to report <https://doi.org/10.1145/2807591.2807644>`_; `do_bench's source
# <https://github.com/triton-lang/triton/blob/main/python/triton/testing.py>`_.

# %%
# Answers
# -------
#
# **1.** With ``s`` bytes per element, :math:`I = 2N^3 / (3sN^2)`, so it is at
# :math:`N = 3s/2 \cdot I_\text{ridge}`: 3 (6) times the ridge of the type.
#
# **2.** Was it synchronized? Was L2 warm? Which bytes are counted? Is it right?
#
# **3.** What nobody reads is not computed, and its inputs are not loaded: you
# time ``empty_kernel``. Check the result of the very kernel that you time.
