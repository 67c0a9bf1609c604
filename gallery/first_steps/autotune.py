# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Let triton.autotune choose block sizes and warps of a matrix-vector product,
# see what num_stages changes, and learn what the tuner never checks."""
# ///
r"""
Autotuning
==========

Which block size, how many warps and stages? ``triton.autotune`` times every
candidate on your GPU and keeps the fastest. It never checks a candidate, and it
runs your kernel many times. This page tunes the matrix-vector product
``mv(A, x)``; ``row_sum.py`` has its loop, ``benchmarking.py`` its clock.

After this page you can

* write configs, choose the key, prune, and see what was tried and chosen;
* say what ``num_stages`` does, and when it does nothing;
* put ``autotune`` and ``heuristics`` in the order that works;
* tune a kernel that changes its arguments, and check every config.
"""

# sphinx_gallery_tags = ["autotuning", "matrix", "memory bound"]
import os
import re
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

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.compiling import compile_only

# %%
# One kernel, many tiles
# ----------------------
#
# The product of an ``(M, N)`` matrix and a vector uses each element of the
# matrix once, so it is memory bound. A program takes ``BLOCK_M`` rows and walks
# along them by ``BLOCK_N`` columns. With more rows in a tile, the vector is
# fetched less often, but there are fewer programs. More elements for a thread
# put more loads in flight and take more registers. Which effect wins is hard to
# predict, so we try.
#
# A ``triton.Config`` is one choice: a dictionary of the kernel's own
# parameters, then launch options such as ``num_warps``. ``STAGES`` is explained
# below.


def tile(BLOCK_M, BLOCK_N, num_warps=4, STAGES=1):
    kwargs = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "STAGES": STAGES}
    return triton.Config(kwargs, num_warps=num_warps)


WIDE = [(4, 512), (4, 1024), (8, 512), (2, 1024), (2, 2048), (1, 1024)]
WIDE += [(1, 2048), (1, 4096, 8), (4, 512, 4, 3), (8, 512, 4, 4), (32, 64)]
TALL = [(64, 32), (64, 32, 4, 4), (128, 16)]
CONFIGS = [tile(*sizes) for sizes in WIDE + TALL]

# %%
# What does num_stages do?
# ------------------------
#
# ``num_stages`` is a launch option, so it may be in a config. To see what it
# changes, we compile a loop over a matrix product and a loop over a sum.
# ``compile_only`` runs a function where kernels compile without a GPU, and
# ``warmup`` compiles a launch.


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        offs_k = start + offs  # (BLOCK,)
        a = tl.load(a_ptr + offs[:, None] * K + offs_k)  # (BLOCK, BLOCK)
        b = tl.load(b_ptr + offs_k[:, None] * BLOCK + offs)  # (BLOCK, BLOCK)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs[:, None] * BLOCK + offs, acc)


@triton.jit
def sum_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        acc += tl.load(x_ptr + start + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(acc))


@compile_only
def stages():
    def show(name, compiled):
        copies = len(re.findall(r"cp\.async\.c[ag]", compiled.asm["ptx"]))
        print(f"{name:32}{compiled.metadata.shared:8,}{copies:15}")

    print("                            bytes of shared memory  async copies")
    half, single = torch.float16, torch.float32
    for n in (1, 2, 3, 4):
        options = triton.Config({"BLOCK": 128}, num_stages=n).all_kwargs()
        tiles = half, half, single, 4096
        compiled = product_kernel.warmup(*tiles, **options, grid=(1,))
        show(f"tl.dot, num_stages={n}", compiled)
    for n, STAGES in ((1, 1), (4, 1), (1, 4)):
        options = {"BLOCK": 1024, "STAGES": STAGES, "num_stages": n}
        row = single, single, 4096
        compiled = sum_kernel.warmup(*row, **options, grid=(1,))
        show(f"sum, num_stages={n}, STAGES={STAGES}", compiled)


if __name__ == "__main__":
    stages()

# %%
# With ``num_stages=n`` the loop has ``n`` buffers in shared memory, each for a
# tile of either operand. While the product of one iteration runs, asynchronous
# copies load tiles for the next iterations (the loop is *pipelined*). 4 stages
# are too much for an H200, which has `227 KiB (232448 bytes)
# <https://docs.nvidia.com/cuda/hopper-tuning-guide/index.html>`_ for a program.
# The tuner notes the time ``inf`` for such a config and goes on.
#
# The launch option changes nothing for the sum: it pipelines only loads that
# feed a ``tl.dot``. ``tl.range(num_stages=STAGES)`` pipelines `most loads
# <https://github.com/triton-lang/triton/pull/3425>`_ of its loop, so ``STAGES``
# is the parameter for our product with a vector.
#
# Four more pieces
# ----------------
#
# ``prune`` throws out configs that cannot win. ``bench`` is the clock: quicker
# than Triton's own, and a stopwatch without a GPU. ``EVEN_N`` is a *heuristic*:
# a parameter computed from others, here from the ``BLOCK_N`` that the tuner has
# picked. ``KEY`` names what the choice depends on: the sizes, rounded up to
# powers of two, and the memory order.


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
# The caller does not know ``BLOCK_M``, so the grid is a function of all
# arguments. ``launch`` takes the kernel as an argument: this page has several
# tuners for it.

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
# A test of ``mv`` tests the config that won here, today. So check them all, for
# one can be wrong alone: `with four warps and not with one
# <https://github.com/triton-lang/triton/issues/2499>`_, for example.
# ``mv_kernel.fn`` is what lies below the tuner, and ``config.all_kwargs()`` is
# what the tuner would pass to it. Nothing cancels, and an element takes part in
# fewer than 50 roundings: :math:`50 \cdot 2^{-24} < 3 \cdot 10^{-6}`.


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
# done: hence the rounding in ``KEY``. Here are two more tuners of the kernel,
# as a decorator is a function:


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
# Misspelt names are ignored (`later Tritons refuse them
# <https://github.com/triton-lang/triton/pull/11602>`_), hence the last line.
# ``TRITON_PRINT_AUTOTUNING=1`` prints each choice.
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
# until one reads a block size. So ``autotune`` goes on top. (``torch.compile``
# has a tuner and rules of its own: see ``torch_compile.py``.)
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
# Without an option only the first call is wrong, so warm-up hides it:
#
# * ``restore_value``, for an argument that is read and changed: it is copied
#   before each run and back afterwards. The copies are timed, too.
# * ``reset_to_zero``, for an output that starts at zero (here it loses the
#   100). It acts `only while tuning
#   <https://github.com/triton-lang/triton/issues/7181>`_, so not with timings
#   read from disk. For all calls, zero it yourself.
#
# Keep the result
# ---------------
#
# A new process tunes anew. ``cache_results=True``, or
# ``TRITON_CACHE_AUTOTUNING=1`` for all kernels, keeps the timings on disk
# beside the compiled kernels, until the kernel, a config, the kind of GPU or
# Triton changes. Or type in the ``best_config`` you saw. On a GPU, the second
# tuner reads from disk:


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
# rate counts ``M * N + N + M`` elements. It is 0 for a huge tile that does not
# fit. ``Roof`` is a copy of as many bytes.


def megabytes(N, size=4):
    return (N * N + 2 * N) * size * 1e-6


def copy(N, dtype=torch.float32):
    source = torch.rand((N * N + 2 * N) // 2, device=DEVICE).to(dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


if __name__ == "__main__" and DEVICE.type == "cuda":
    N, candidates = 16384, [*CONFIGS, tile(64, 512, 8, 4)]
    for dtype in (torch.float32, torch.float16):
        A, x, out = operands(N, dtype)
        tuned = tuner(mv_kernel.fn, candidates, key=KEY, prune_configs_by=DROP)
        launch(tuned, A, x, out)
        rows = {str(c): t[0] for c, t in tuned.configs_timings.items()}
        rows["PyTorch"] = bench(lambda A=A, x=x: A @ x, (0.5, 0.2))[0]
        rows["Roof"] = bench(copy(N, dtype), (0.5, 0.2))[0]
        print(f"{dtype}, tuned in {tuned.bench_time:.1f} s")
        for name, milliseconds in sorted(rows.items(), key=lambda row: row[1]):
            rate = megabytes(N, dtype.itemsize) / milliseconds
            print(f"{rate:7.0f} GB/s  {name.partition(', num_ctas')[0]}")

# %%
# The benchmark
# -------------
#
# Square float32 matrices. ``Roof`` is a copy, which writes half of its bytes.
# The product writes hardly any, and can pass it.


def calls(N):
    A, x, _ = operands(N)
    torch.compiler.reset()  # the ninth shape would raise an error
    product = torch.compile(lambda A, x: A @ x, fullgraph=True, dynamic=False)
    return {
        "Triton": lambda: mv(A, x),
        "PyTorch": lambda: A @ x,
        "torch.compile": lambda: product(A, x),
        "Roof": copy(N),
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {2**k: gpu_time(calls(2**k)) for k in range(11, 15)}
    results = rate_table(times, "N", "GB/s", megabytes)
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True)

# %%
# Configs closer together than two runs of one are equal, and chance picks among
# them. Tuning pays by avoiding the slow ones.
#
# Go further
# ----------
#
# Someone writes ``grid = (triton.cdiv(M, 4),)`` because the first config has
# ``BLOCK_M=4``. Which configs are wrong? Does the tuner mind?
#
# To read on: `the reference of autotune
# <https://triton-lang.org/main/python-api/generated/triton.autotune.html>`_.
# These were the first steps; all later pages build on them.

# %%
# Answers
# -------
#
# Those with fewer rows leave some of the output unwritten. The tuner likes such
# configs, for doing less. The check of every config finds them.
