# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Let triton.autotune choose the block sizes and warps of a matrix-vector
# product, and learn what it never checks."""
# ///
r"""
Autotuning
==========

Which block size, how many warps? ``triton.autotune`` answers by trying: it
times every candidate on your GPU and keeps the fastest. It never checks one,
and it runs your kernel many times. This page tunes the matrix-vector product
``mv(A, x)``; ``row_sum.py`` has its loop, ``benchmarking.py`` its clock.

After this page you can

* write configs, choose the key, prune, and see what was tried and chosen;
* put ``autotune`` and ``heuristics`` in the order that works;
* tune a kernel that changes its arguments, and check every config.
"""

# sphinx_gallery_tags = ["autotuning", "matrix", "memory bound"]
import inspect
import os
import pathlib
import subprocess
import sys
import tempfile
import time

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
# The problem in bytes
# --------------------
#
# For an ``(M, N)`` matrix the product reads ``M * N`` elements of ``A`` and
# ``N`` of ``x``, and writes ``M``. Each element of ``A`` is used once, so the
# op is memory bound. A language model that generates one token at a time reads
# its weights in products like this one.

if __name__ == "__main__":
    A, x = torch.rand(300, 1000, device=DEVICE), torch.rand(1000, device=DEVICE)
    moved = 4 * (A.numel() + x.numel() + (A @ x).numel())
    print(f"{2 * A.numel():,} operations for {moved:,} bytes")

# %%
# One kernel, many tiles
# ----------------------
#
# A program takes ``BLOCK_M`` rows and walks along them by ``BLOCK_N`` columns:
#
# .. code-block:: text
#
#     operands     BLOCK_N
#                +---------+---------+---------+
#     x          |         |   ->    |         |         out
#                +---------+---------+---------+         +-+
#     A  BLOCK_M |         |   ->    |         |         | |
#                +---------+---------+---------+         +-+
#
# With more rows in a tile, ``x`` is fetched less often, but there are fewer
# programs. More elements per thread put more loads in flight and take more
# registers. More ``STAGES`` load for later iterations ahead of time, into
# shared memory. Which effect wins is hard to predict, so we try.
#
# A ``triton.Config`` is one choice: a dictionary of the kernel's own
# parameters, then launch options.


def tile(BLOCK_M, BLOCK_N, num_warps=4, STAGES=1):
    kwargs = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "STAGES": STAGES}
    return triton.Config(kwargs, num_warps=num_warps)


WIDE = [(4, 512), (4, 1024), (8, 512), (2, 1024), (2, 2048), (1, 1024)]
WIDE += [(1, 2048), (1, 4096, 8), (4, 512, 4, 3), (8, 512, 4, 4), (32, 64)]
TALL = [(64, 32), (64, 32, 4, 4), (128, 16)]
CONFIGS = [tile(*sizes) for sizes in WIDE + TALL]

# %%
# The launch option ``num_stages`` loads ahead (*pipelines*) only what feeds a
# ``tl.dot``; ``tl.range(num_stages=STAGES)`` does so for `most loads
# <https://github.com/triton-lang/triton/pull/3425>`_. Four more pieces:
# ``prune`` throws out configs that cannot win. ``bench`` is the clock: shorter
# than Triton's own, which takes 125 ms for a config, and a stopwatch without a
# GPU. ``EVEN_N`` is a *heuristic*: a parameter computed from others, here from
# the ``BLOCK_N`` that the tuner has picked. ``KEY`` names what the choice
# depends on: ``M`` and ``N`` rounded up to powers of two, and the memory order.


def prune(configs, args, **kwargs):
    """Keep tiles that lie as the matrix does and aren't larger than it."""

    def sensible(BLOCK_M, BLOCK_N, STAGES):
        fits = args["like_m"] >= BLOCK_M and args["like_n"] >= BLOCK_N
        return fits and (BLOCK_N > BLOCK_M) == bool(args["row_major"])

    return [c for c in configs if sensible(**c.kwargs)] or configs[:1]


def bench(call, quantiles):
    if DEVICE.type == "cuda":
        return triton.testing.do_bench(call, 5, 25, quantiles=quantiles)
    start = time.perf_counter()
    call()
    return [1e3 * (time.perf_counter() - start)] * len(quantiles)


DROP = {"early_config_prune": prune}
EVEN = {"EVEN_N": lambda args: args["N"] % args["BLOCK_N"] == 0}
KEY = ["like_m", "like_n", "row_major"]

# %%
# The kernel
# ----------
#
# A call goes through the decorators from the top down: the tuner picks a
# config, the heuristic sees it, the kernel runs.


@triton.autotune(
    configs=CONFIGS if DEVICE.type == "cuda" else CONFIGS[:1],
    key=KEY,
    prune_configs_by=DROP,
    do_bench=bench,
)
@triton.heuristics(EVEN)
@triton.jit
def mv_kernel(
    a_ptr,
    x_ptr,
    out_ptr,
    M,
    N,
    stride_am,
    stride_an,
    stride_xn,
    like_m,  # for the tuner alone, like the next two
    like_n,
    row_major,
    ACC: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    # In int32, row times stride overflows in a matrix of 2**31 elements.
    pid_m = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    mask_m = offs_m < M
    row_ptrs = a_ptr + offs_m[:, None] * stride_am  # (BLOCK_M, 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)  # (BLOCK_M, BLOCK_N)
    # The bound in int64 makes `start`, and all offsets made from it, int64.
    end = tl.cast(N, tl.int64)
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        # Where EVEN_N is True the compiler drops the comparison.
        mask_n = (offs_n < N) | EVEN_N
        mask = mask_m[:, None] & mask_n[None, :]  # (BLOCK_M, BLOCK_N)
        a_ptrs = row_ptrs + offs_n[None, :] * stride_an
        a = tl.load(a_ptrs, mask=mask, other=0)  # (BLOCK_M, BLOCK_N)
        x = tl.load(x_ptr + offs_n * stride_xn, mask=mask_n, other=0)
        acc += a.to(ACC) * x.to(ACC)[None, :]
    tl.store(out_ptr + offs_m, tl.sum(acc, axis=1), mask=mask_m)


# %%
# The launcher
# ------------
#
# The grid depends on ``BLOCK_M``, which the caller does not know, so it is a
# function of all arguments, the chosen config's too. ``launch`` takes the
# kernel as an argument: this page has several tuners for it.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}


def launch(kernel, A, x, out, **config):
    M, N = A.shape
    like = triton.next_power_of_2(M), triton.next_power_of_2(N)
    strides = *A.stride(), *x.stride()
    row_major = int(A.stride(0) >= A.stride(1))
    kernel[lambda args: (triton.cdiv(M, args["BLOCK_M"]),)](
        *(A, x, out, M, N, *strides, *like, row_major),
        ACC=ACC[A.dtype],
        **config,
    )


def mv(A, x):
    """Return ``A @ x`` for a matrix and a vector with any strides."""
    if A.dtype not in ACC or A.dtype != x.dtype:
        raise TypeError(f"mv takes one float dtype, not {A.dtype}, {x.dtype}")
    if A.ndim != 2 or A.shape[1:] != x.shape:
        shapes = f"{tuple(A.shape)}, {tuple(x.shape)}"
        raise ValueError(f"mv takes shapes (M, N), (N,), not {shapes}")
    if A.device.type != DEVICE.type or A.device != x.device:
        devices = f"{A.device}, {x.device}"
        raise ValueError(f"mv takes one {DEVICE.type} device, not {devices}")
    if torch.is_grad_enabled() and (A.requires_grad or x.requires_grad):
        raise ValueError("mv has no backward: call it under torch.no_grad()")
    out = torch.empty(A.shape[0], dtype=A.dtype, device=A.device)
    if out.numel() > 0:
        # Triton launches on the current GPU, which may not be that of A.
        with torch.accelerator.device_index(A.device.index):
            launch(mv_kernel, A, x, out)
    return out


# %%
# The check
# ---------
#
# A test of ``mv`` tests the config that won here, today. So check them all,
# for one can be wrong alone: `with four warps and not with one
# <https://github.com/triton-lang/triton/issues/2499>`_, where a barrier was
# missing; `with one warp and not with two
# <https://github.com/triton-lang/triton/issues/802>`_, by the compiler's fault.
#
# ``mv_kernel.fn`` is what lies below the tuner, and ``config.all_kwargs()`` is
# what the tuner would pass to it. An element takes part in a product and in
# ``ceil(N / BLOCK_N) + log2(BLOCK_N)`` additions. Even for the narrowest tile
# here that is fewer than 50 roundings, and nothing cancels:
# :math:`50 \cdot 2^{-24} < 3 \cdot 10^{-6}`.


def check(config, A, x, out):
    launch(mv_kernel.fn, A, x, out.fill_(torch.nan), **config.all_kwargs())
    expected = A.double() @ x.double()
    rtol = 3e-6 + (0 if A.dtype == torch.float32 else torch.finfo(A.dtype).eps)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=0)


if __name__ == "__main__":
    torch.manual_seed(0)
    A = torch.rand(5, 600, device=DEVICE)
    for view in (A, A[:, :512].half(), A.T[:20]):
        x = torch.rand_like(view[0])
        out = torch.empty_like(view[:, 0])
        for config in CONFIGS:
            check(config, view, x, out)
        torch.testing.assert_close(mv(view, x), out, rtol=1e-3, atol=0)

# %%
# When it tunes
# -------------
#
# A key is the values of the arguments named in ``key`` and the dtypes of all
# tensors. A call with a new key times all configs, and ``kernel.cache`` keeps
# the fastest. With exact sizes as keys, a server with varying batches is never
# done: hence the rounding in ``KEY``. A decorator is a function; here are two
# more tuners of the kernel:


def tuner(kernel, configs, **options):
    return triton.autotune(configs, do_bench=bench, **options)(kernel)


if __name__ == "__main__":
    exact = tuner(mv_kernel.fn, CONFIGS[:2], key=["M", "N"])
    rounded = tuner(mv_kernel.fn, CONFIGS[:2], key=KEY)
    print("keys known after each call    M, N    rounded")
    for M, N in ((5, 600), (5, 601), (6, 700), (8, 1000), (5, 600)):
        A, x = torch.rand(M, N, device=DEVICE), torch.rand(N, device=DEVICE)
        for kernel in (exact, rounded):
            launch(kernel, A, x, torch.empty(M, device=DEVICE))
        print(f"{(M, N)!s:30}{len(exact.cache):4}{len(rounded.cache):11}")
    assert (len(exact.cache), len(rounded.cache)) == (4, 1)
    print("chosen:", rounded.best_config.kwargs)
    assert set(KEY) <= set(mv_kernel.arg_names)

# %%
# The memory order is in the key too. Misspelt names are ignored (`later Tritons
# refuse them <https://github.com/triton-lang/triton/pull/11602>`_), hence the
# last line. ``TRITON_PRINT_AUTOTUNING=1`` prints each choice.
#
# Prune what cannot win
# ---------------------
#
# ``early_config_prune`` is a filter. A ``perf_model`` guesses times, and only
# the ``top_k`` best guesses, here three, are timed. This model guesses that the
# tile with most rows is fastest.

if __name__ == "__main__":
    guess = {**DROP, "perf_model": lambda BLOCK_M, **rest: -BLOCK_M, "top_k": 3}
    A = torch.rand(5, 600, device=DEVICE)
    x, out = A[0].clone(), A[:, 0].clone()
    for by in ({}, DROP, guess):
        tuned = tuner(mv_kernel.fn, CONFIGS, key=KEY, prune_configs_by=by)
        launch(tuned, A, x, out)
        print(f"{len(tuned.configs_timings):2} timed:", ", ".join(by) or "all")
    assert len(tuned.configs_timings) == 3

# %%
# A config that the model ranks fourth is never timed, even if it is the best.
#
# The order of the decorators
# ---------------------------
#
# Put ``heuristics`` above ``autotune`` and it runs first, when there is no
# ``BLOCK_N`` yet:

if __name__ == "__main__":
    tuned = tuner(mv_kernel.fn.fn, CONFIGS[:2], key=KEY)
    try:
        launch(triton.heuristics(EVEN)(tuned), A, x, out)
        raise AssertionError("the heuristic saw a BLOCK_N")
    except KeyError as error:
        print("KeyError:", error)

# %%
# A heuristic of plain arguments works on either side, which hides the mistake
# until one reads a block size. ``autotune`` goes on top.
#
# Break it: tune a kernel that changes its arguments
# --------------------------------------------------
#
# The tuner runs your kernel again and again, on your tensors. This kernel adds
# 1 to an argument that is 100. The run prints its value after the first call
# and after the second; 101 and 102 are right.


@triton.jit
def increment_kernel(y_ptr):
    tl.store(y_ptr, tl.load(y_ptr) + 1)


if __name__ == "__main__":
    warps = [triton.Config({}, num_warps=n) for n in (1, 2)]
    seen = {}
    for option in ("no option", "reset_to_zero", "restore_value"):
        care = {option: ["y_ptr"]} if "_" in option else {}
        tuned = tuner(increment_kernel, warps, key=[], **care)
        y, seen[option] = torch.tensor([100], device=DEVICE), []
        for _ in range(2):
            tuned[(1,)](y)
            seen[option] += y.tolist()
        print(option, seen[option])
    assert seen["no option"][0] > 101
    assert seen["reset_to_zero"] == [1, 2]
    assert seen["restore_value"] == [101, 102]

# %%
# Without an option only the first call is wrong. Warm-up hides it, and
# `reports <https://github.com/triton-lang/triton/issues/6547>`_ keep coming:
#
# * ``restore_value``, for an argument that is read and changed: it is copied
#   before each run and back afterwards. The copies are timed, too.
# * ``reset_to_zero``, for an output that starts at zero (here it loses the
#   100). It acts `only while tuning
#   <https://github.com/triton-lang/triton/issues/7181>`_, so not with timings
#   read from disk. For all calls, zero it yourself or in a
#   ``Config(pre_hook=...)``, called before every run.
#
# What does not fit, and where nothing runs
# -----------------------------------------
#
# An H200 has `227 KiB (232448 bytes) of shared memory
# <https://docs.nvidia.com/cuda/hopper-tuning-guide/index.html>`_ for a program.
# Compiling needs no GPU, so a child process compiles our kernel with a huge
# tile. Then it lets a tuner choose between two configs without a GPU.

CHILD = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
KERNEL
known = dict(stride_an=1, stride_xn=1, ACC=tl.float32, EVEN_N=True)
known |= dict(BLOCK_M=64, BLOCK_N=512, STAGES=4)
aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
for dtype in ("fp16", "fp32"):
    types = dict.fromkeys(mv_kernel.arg_names, "i32")
    types |= dict.fromkeys(("a_ptr", "x_ptr", "out_ptr"), "*" + dtype)
    types |= dict.fromkeys(known, "constexpr")
    source = triton.compiler.ASTSource(mv_kernel, types, known, aligned)
    target = GPUTarget("cuda", 90, 32)
    binary = triton.compile(source, target=target, options={"num_warps": 8})
    print(dtype, "needs", binary.metadata.shared, "bytes of shared memory")

configs = [triton.Config({"STAGES": stages}) for stages in (1, 2)]
try:
    triton.autotune(configs, key=[])(mv_kernel)[(1,)]()
except RuntimeError as error:
    print("without a GPU:", error)
"""

if __name__ == "__main__":
    source = inspect.getsource(mv_kernel.base_fn).partition("@triton.jit\n")[2]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    with tempfile.TemporaryDirectory() as folder:
        child = pathlib.Path(folder, "child.py")
        child.write_text(CHILD.replace("KERNEL", source))
        command = [sys.executable, child]
        said = subprocess.check_output(command, env=no_gpu, text=True)
    print(said, end="")
    half, single = (int(line.split()[2]) for line in said.splitlines()[:2])
    assert half <= 227 * 1024 < single
    assert "0 active drivers" in said

# %%
# * float32 does not fit. The tuner notes the time ``inf`` and goes on, as for
#   a failed ``tl.static_assert`` or an error of ``ptxas``. If all are ``inf``
#   it launches the first and you get its error.
# * Without a driver Triton's clock fails. Pass one of your own, like ``bench``
#   above, as ``do_bench``.
# * ``torch.compile`` tunes by itself. Its tutorial, *Using User-Defined Triton
#   Kernels with torch.compile*, speaks of ``configs`` and ``key`` only;
#   `reset_to_zero <https://github.com/pytorch/pytorch/pull/140982>`_ and
#   `heuristics <https://github.com/pytorch/pytorch/pull/142208>`_ came later,
#   and `hooks <https://github.com/pytorch/pytorch/issues/139059>`_ are refused.
#
# Keep the result
# ---------------
#
# A new process tunes anew. ``cache_results=True``, or
# ``TRITON_CACHE_AUTOTUNING=1`` for all kernels, keeps the timings on disk
# beside the compiled kernels, until the kernel, a config, the kind of GPU or
# Triton changes (not with a ``pre_hook``, nor in the interpreter). Or type in
# the ``best_config`` you saw. On a GPU, the second tuner reads from disk:


def operands(N, dtype=torch.float32):
    A = torch.rand(N, N, device=DEVICE).to(dtype)
    return A, torch.rand(N, device=DEVICE).to(dtype), torch.empty_like(A[0])


if __name__ == "__main__" and DEVICE.type == "cuda":
    inputs = operands(4096)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        for turn in ("first", "second"):
            tuned = tuner(mv_kernel.fn, CONFIGS, key=KEY, cache_results=True)
            launch(tuned, *inputs)
            spent = getattr(tuned, "bench_time", 0)  # unset when read back
            print(f"{turn}: {spent:.2f} s, {tuned.best_config.kwargs}")
        assert not hasattr(tuned, "bench_time")

# %%
# What the tuner saw
# ------------------
#
# ``configs_timings`` has the times of the last tuning, in milliseconds. The
# figure is ``(M * N + N + M) * size / time``, the bytes of the algorithm, and 0
# for the huge tile if it does not fit. ``Roof`` is a copy of as many bytes.


def gigabytes_per_second(N, size, milliseconds):
    return (N * N + 2 * N) * size * 1e-6 / milliseconds


def copy(N, dtype=torch.float32):
    source = torch.rand((N * N + 2 * N) // 2, device=DEVICE).to(dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def print_timings(N, dtype):
    A, x, out = operands(N, dtype)
    candidates = [*CONFIGS, tile(64, 512, 8, 4)]
    tuned = tuner(mv_kernel.fn, candidates, key=KEY, prune_configs_by=DROP)
    launch(tuned, A, x, out)
    rows = {str(c): t[0] for c, t in tuned.configs_timings.items()}
    rows["PyTorch"] = bench(lambda: A @ x, (0.5, 0.2))[0]
    rows["Roof"] = bench(copy(N, dtype), (0.5, 0.2))[0]
    print(f"{dtype}, tuned in {tuned.bench_time:.1f} s")
    for name, milliseconds in sorted(rows.items(), key=lambda row: row[1]):
        rate = gigabytes_per_second(N, dtype.itemsize, milliseconds)
        print(f"{rate:7.0f} GB/s  {name.partition(', num_ctas')[0]}")


if __name__ == "__main__" and DEVICE.type == "cuda":
    for dtype in (torch.float32, torch.float16):
        print_timings(16384, dtype)

# %%
# The benchmark
# -------------
#
# Square float32 matrices; lines are medians, bands run from the 20th to the
# 80th percentile. The first call, which tunes, is not timed.


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2**k for k in range(11, 15)],
        x_log=True,
        line_arg="provider",
        line_vals=["Triton", "PyTorch", "torch.compile", "Roof"],
        line_names=["Triton", "PyTorch", "torch.compile", "Roof"],
        ylabel="GB/s",
        plot_name="autotune",
        args={},
    )
)
def benchmark(N, provider):
    A, x, _ = operands(N)
    torch.compiler.reset()  # the ninth shape would raise an error
    product = torch.compile(lambda A, x: A @ x, fullgraph=True, dynamic=False)
    op = {
        "Triton": lambda: mv(A, x),
        "PyTorch": lambda: A @ x,
        "torch.compile": lambda: product(A, x),
        "Roof": copy(N),
    }[provider]
    times = triton.testing.do_bench(op, quantiles=[0.5, 0.2, 0.8])
    median, fast, slow = (gigabytes_per_second(N, 4, t) for t in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# Reading the result
# ------------------
#
# ``Roof`` is a copy, which writes half of its bytes; the product writes hardly
# any, and can pass it. For the largest matrix Triton is ahead of all. For the
# smaller ones ``torch.compile`` is ahead on an H200. Configs closer together
# than two runs of one are equal, and chance picks among them. Tuning pays by
# avoiding the slow ones, and by choosing anew: in float16 another tile leads.
#
# Go further
# ----------
#
# 1. Someone writes ``grid = (triton.cdiv(M, 4),)`` because the first config
#    has ``BLOCK_M=4``. Which configs are wrong? Does the tuner mind?
# 2. 16 long rows are 16 programs at most. Split the columns among programs
#    too, and add up with ``tl.atomic_add``. What must the tuner know?
#
# To read on: `the reference of autotune
# <https://triton-lang.org/main/python-api/generated/triton.autotune.html>`_
# and ``triton/runtime/autotuner.py``, which is short. These were the first
# steps; all later pages build on them.

# %%
# Answers
# -------
#
# **1.** Those with fewer rows leave some of the output unwritten. The tuner
# likes them, for doing less. The check of every config finds them.
#
# **2.** ``reset_to_zero=["out_ptr"]``, or the output sums up all runs of all
# configs; and ``torch.zeros`` in ``mv``, for the calls that don't tune.
