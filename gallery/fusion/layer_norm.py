# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
LayerNorm
=========

LayerNorm takes each row to mean 0 and variance 1, then scales and shifts its
columns. Forward, one sum waits for another. Backward, every program has
something to add to the gradients of weight and bias.

After ``rms_norm.py`` and this page you can

* compute a variance that does not cancel, of rows of any length;
* put a lock around a sum, and see why to do without.
"""

# sphinx_gallery_tags = ["autograd", "reduction", "memory bound"]
import math
import os
from functools import partial

import torch
import torch._functorch.config

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.testing import Benchmark

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in bytes
# --------------------
#
# For a row :math:`x` of ``N`` elements, a weight :math:`w`, a bias :math:`b`,
#
# .. math:: y = (x - \mu)\,r\,w + b, \quad \mu = \tfrac{1}{N} \sum x, \quad
#    r = 1 / \sqrt{\tfrac{1}{N} \sum (x - \mu)^2 + \epsilon}.
#
# In PyTorch's operators, in float32 inside, these are the reads and writes, in
# units of a bfloat16 ``x``: 30 in all. The floor is 2.
#
# .. code-block:: python
#
#     wide = x.float()                                # 1 read, 2 written
#     d = wide - wide.mean(-1, True)                  # 2; 2 + 2
#     r = rsqrt(d.square().mean(-1, True) + eps)      # 2 + 2; 2
#     y = (d * r * weight + bias).to(x.dtype)         # 2 + 2, 3 times; 2 + 1


def layer_norm_torch(x, weight, bias, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def inputs(*shape, dtype=torch.float64):
    x, dy = torch.randn(2, *shape, dtype=dtype, device=DEVICE)
    weight, bias = torch.randn(2, *shape[-1:], dtype=dtype, device=DEVICE)
    return *(t.detach().requires_grad_() for t in (x, weight, bias)), dy


# %%
# Two passes in registers
# -----------------------
#
# The variance needs the mean, so one sum waits for the other. It looks like two
# passes over memory. But a program that holds its row in registers passes over
# it as often as it likes, and reads it once:
#
# .. code-block:: text
#
#     program 0   x x x x x x . .  -> sum -> x - mean -> sum of squares -> r
#     program 1   x x x x x x . .  -> sum -> x - mean -> sum of squares -> r
#                 |<-- N -->| masked: read as 0, and after x - mean 0 again
#
# But for each sum a program's threads have to *meet*, to exchange their parts.
# So the kernel first tries one meeting for two sums, of :math:`x` and
# :math:`x^2` (``tl.join`` makes one tile of two). The variance is the mean of
# squares less :math:`\mu^2`. If :math:`\mu^2` is no larger than the variance,
# that loses two bits at most. Otherwise the second pass follows.
#
# Welford for longer rows
# -----------------------
#
# A row that does not fit comes in blocks, and there Welford's method takes both
# sums in one pass. From the mean :math:`\mu` of ``k - 1`` elements, and the sum
# :math:`s` of their squared differences from it, the next element makes
#
# .. math:: \mu' = \mu + \tfrac{1}{k} (x - \mu), \qquad
#    s' = s + (x - \mu)(x - \mu').
#
# Each column of the block has such a state of its own, so no thread waits for
# another. At the end they are merged, in two passes: with ``k`` elements in
# column :math:`c`,
#
# .. math:: \mu = \tfrac{1}{N} \sum_c k\,\mu_c, \qquad
#    s = \sum_c \big( s_c + k\,(\mu_c - \mu)^2 \big).
#
# Then the row is read once more. (``rms_norm.py`` has ``ACC`` and ``UNIT``.)

NONE, DROP = tl.constexpr(""), tl.constexpr("evict_first")


@triton.jit
def read(ptrs, mask, ACC: tl.constexpr, POLICY: tl.constexpr):
    return tl.load(ptrs, mask, 0, eviction_policy=POLICY).to(ACC)


@triton.jit
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stats_ptr,
    M,
    N,
    stride_xm,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    N, stride_xm = N // UNIT * UNIT, stride_xm // UNIT * UNIT
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m, mask_m = rows[:, None], rows[:, None] < M  # (BLOCK_M, 1)
    block = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    x_rows, y_rows = x_ptr + offs_m * stride_xm, y_ptr + offs_m * N
    if WHOLE:
        x = read(x_rows + block, mask_m & (block < N), ACC, NONE)
        mean, square = tl.split(tl.sum(tl.join(x, x * x), axis=1) / N)
        var = square - mean * mean  # (BLOCK_M,)
        if tl.min((mean * mean <= var).to(tl.int32), axis=0) == 0:
            d = tl.where(block < N, x - mean[:, None], 0)
            var = tl.sum(d * d, axis=1) / N
    else:
        means = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        squares = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (start + block < N)
            x = read(x_rows + start + block, mask, ACC, NONE)
            d = tl.where(mask, x - means, 0)
            step = d * (1 / tl.cast(start // BLOCK_N + 1, ACC))
            means += step
            squares += d * (d - step)
        k = tl.cdiv(N - block, BLOCK_N)  # elements of each column
        mean = tl.sum(k * means, axis=1) / N
        d = means - mean[:, None]
        var = tl.sum(squares + k * d * d, axis=1) / N
    r = tl.rsqrt(var + EPS)
    if SAVE:
        tl.store(stats_ptr + rows, mean, rows < M)
        tl.store(stats_ptr + M + rows, r, rows < M)
    for start in range(0, BLOCK_N if WHOLE else N, BLOCK_N):
        offs_n = start + block  # (1, BLOCK_N)
        if not WHOLE:
            x = read(x_rows + offs_n, mask_m & (offs_n < N), ACC, DROP)
        weight = read(weight_ptr + offs_n, offs_n < N, ACC, NONE)
        bias = read(bias_ptr + offs_n, offs_n < N, ACC, NONE)
        y = (x - mean[:, None]) * r[:, None] * weight + bias
        tl.store(y_rows + offs_n, y, mask_m & (offs_n < N))


# %%
# The backward on paper
# ---------------------
#
# Let :math:`\hat{x} = (x - \mu)\,r` and :math:`g = w\,\mathrm{d}y`. An element
# acts on its row directly, through the mean and through :math:`r`:
#
# .. math:: \mathrm{d}x = r\,\Big(g - \tfrac{1}{N} \sum g
#    - \hat{x}\,\tfrac{1}{N} \sum g\,\hat{x}\Big), \quad
#    \mathrm{d}w = \sum_{\mathrm{rows}} \mathrm{d}y\,\hat{x}, \quad
#    \mathrm{d}b = \sum_{\mathrm{rows}} \mathrm{d}y.
#
# RMSNorm's backward computed :math:`r` again, along with its own sum. Here that
# would be one more meeting or two. So the forward saves it, and the mean.
#
# ``dw`` and ``db`` go across the rows. As in ``rms_norm.py``, there are about
# as many programs as run at a time, in a loop over rows (three stages: the next
# rows come while one is added up). Each adds up its own rows in registers and
# stores ``partial[program, 0:2, :]``; a sum over ``partial`` is the result.
# For rows of 16384 these sums fill half of a multiprocessor's registers. So
# nothing but them is held while the threads meet: with ``AGAIN``, the row is
# read once more, from L1. (The other eviction policy keeps the compiler from
# merging the two loads.) A longer row is split among programs, by columns, and
# the kernel runs twice: for the sums (``TURN = 1``), then with them given.


@triton.jit
def layer_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    sums_ptr,
    dx_ptr,
    partial_ptr,
    M,
    N,
    stride_dym,
    stride_xm,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TURN: tl.constexpr,  # 0: whole rows; 1: the sums; 2: the sums are given
    AGAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    N = N // UNIT * UNIT
    stride_dym, stride_xm = stride_dym // UNIT * UNIT, stride_xm // UNIT * UNIT
    pid, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_n = part * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    weight = read(weight_ptr + offs_n, offs_n < N, ACC, NONE)  # (1, BLOCK_N)
    dw, db = tl.zeros((1, BLOCK_N), ACC), tl.zeros((1, BLOCK_N), ACC)
    tiles, programs = tl.cdiv(M, BLOCK_M), tl.num_programs(0)
    for tile in tl.range(pid, tiles, programs, num_stages=1 if AGAIN else 3):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_m, mask_m = rows[:, None], rows < M  # (BLOCK_M, 1), (BLOCK_M,)
        mask = mask_m[:, None] & (offs_n < N)  # (BLOCK_M, BLOCK_N)
        x_ptrs = x_ptr + offs_m * stride_xm + offs_n
        dy_ptrs = dy_ptr + offs_m * stride_dym + offs_n
        x, dy = read(x_ptrs, mask, ACC, NONE), read(dy_ptrs, mask, ACC, NONE)
        mean = tl.load(stats_ptr + rows, mask_m, 0)[:, None]  # (BLOCK_M, 1)
        r = tl.load(stats_ptr + M + rows, mask_m, 0)[:, None]
        if AGAIN:
            weight = read(weight_ptr + offs_n, offs_n < N, ACC, NONE)
        x, g = (x - mean) * r, dy * weight
        if TURN == 2:
            sum_g = tl.load(sums_ptr + rows, mask_m, 0)  # (BLOCK_M,)
            sum_gx = tl.load(sums_ptr + M + rows, mask_m, 0)
        else:
            sum_g, sum_gx = tl.sum(g, axis=1), tl.sum(g * x, axis=1)
        if TURN == 1:
            tl.store(sums_ptr + 2 * part * M + rows, sum_g, mask_m)
            tl.store(sums_ptr + (2 * part + 1) * M + rows, sum_gx, mask_m)
        else:
            if AGAIN:
                x = read(x_ptrs, mask, ACC, DROP)
                dy = read(dy_ptrs, mask, ACC, DROP)
                weight = read(weight_ptr + offs_n, offs_n < N, ACC, DROP)
                x, g = (x - mean) * r, dy * weight
            dx = g - sum_g[:, None] / N - x * (sum_gx[:, None] / N)
            tl.store(dx_ptr + offs_m * N + offs_n, dx * r, mask)
            dw += tl.sum(dy * x, axis=0, keep_dims=True)
            db += tl.sum(dy, axis=0, keep_dims=True)
    partial_ptrs = partial_ptr + 2 * pid.to(tl.int64) * N + offs_n
    tl.store(partial_ptrs, dw, offs_n < N)
    tl.store(partial_ptrs + N, db, offs_n < N)


# %%
# The ops
# -------
#
# As in PyTorch, ``layer_norm`` is ``native_layer_norm`` less the statistics,
# which have no gradient. A row is the last dimension, copied if not contiguous.
# ``weight`` and ``bias`` are required, in the dtype of ``x``.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}
SMS = 2  # multiprocessors
if DEVICE.type == "cuda":
    SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count


def check(x, dy, *vectors):
    kinds = {(t.dtype, t.device) for t in (x, dy, *vectors)}
    if x.dtype not in ACC or len(kinds) > 1:
        raise TypeError(f"takes one floating dtype and device, not {kinds}")
    wrong = [t for t in vectors if tuple(t.shape) != tuple(x.shape[-1:])]
    if x.ndim == 0 or tuple(dy.shape) != tuple(x.shape) or wrong:
        raise ValueError("takes shapes (..., N), (N,) and (N,), and dy like x")


def as_rows(x):
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def common(N, *matrices):
    size, N = matrices[0].element_size(), int(N)
    unit = math.gcd(16 // size, N, *(int(m.stride(0)) for m in matrices))
    full = triton.next_power_of_2(N)
    block = full if full * size <= 32768 else 4096
    options = {"ACC": ACC[matrices[0].dtype], "UNIT": unit, "BLOCK_N": block}
    return full, block, options


@triton_op("triton_gallery::native_layer_norm", mutates_args={})
def native_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm of each row; to ``save``, each row's mean and factor."""
    check(x, x, weight, bias)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = torch.promote_types(x.dtype, torch.float32)
    stats = x.new_empty(2, x.shape[:-1].numel() * save, dtype=wide)
    if y.numel() == 0:
        return y, stats.zero_()
    x, weight, bias = as_rows(x), weight.contiguous(), bias.contiguous()
    M, N = x.shape
    full, block, options = common(N, x)
    rows, num_warps = max(1, 1024 // full), min(8, max(1, full // 1024))
    options |= {"WHOLE": block == full, "SAVE": save, "BLOCK_M": rows}
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        wrap_triton(layer_norm_kernel)[(triton.cdiv(M, rows),)](
            *(x, weight, bias, y, stats, M, N, x.stride(0), eps),
            **options | {"num_warps": num_warps},
        )
    return y, stats


@triton_op("triton_gallery::native_layer_norm_backward", mutates_args={})
def native_layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``weight`` and ``bias``."""
    check(x, dy, weight)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight), torch.zeros_like(weight)
    dy, x = as_rows(dy), as_rows(x)
    M, N = x.shape
    if stats.numel() != 2 * M:
        raise ValueError("stats have to be those of a forward that saved them")
    full, block, options = common(N, dy, x)
    num_warps, again = min(8, max(1, full // 256)), block * x.itemsize > 16384
    rows, parts = 2 if full <= 2048 else 1, triton.cdiv(N, block)
    programs = SMS * min(16 // num_warps, max(1, 8192 // block))
    programs = min(triton.cdiv(M, rows), max(1, programs // parts))
    partial = stats.new_empty(programs, 2, N)
    sums, weight = stats.new_empty(parts, 2, M), weight.contiguous()
    options |= {"AGAIN": again, "BLOCK_M": rows, "num_warps": num_warps}
    with torch.accelerator.device_index(x.device.index):
        for turn in (0,) if parts == 1 else (1, 2):
            sums = sums.sum(0) if turn == 2 else sums
            wrap_triton(layer_norm_backward_kernel)[(programs, parts)](
                *(dy, x, weight, stats.contiguous(), sums, dx, partial, M, N),
                *(dy.stride(0), x.stride(0)),
                **options | {"TURN": turn},
            )
    return dx, *(d.clone() for d in partial.sum(0).to(x.dtype))


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def backward(ctx, dy, _):
    return *native_layer_norm_backward(dy, *ctx.saved_tensors), None, None


native_layer_norm.register_autograd(backward, setup_context=save)


def layer_norm(x, weight, bias, eps):
    """Return the norm of the last dimension, scaled and shifted."""
    return native_layer_norm(x, weight, bias, eps, torch.is_grad_enabled())[0]


# %%
# The check
# ---------
#
# ``gradcheck`` compares gradients with differences, in float64. Then all is
# compared with float64 autograd: sums of 20,000 terms at most, by blocks and in
# trees, for which :math:`10^{-5}` will do; then a rounding to the dtype.


def assert_right(*leaves, dy, eps=1e-5):
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected, y = layer_norm_torch(*wide, eps), layer_norm(*leaves, eps)
    exact = torch.autograd.grad(expected, wide, dy.double())
    got = torch.autograd.grad(y, leaves, dy)
    rtol = 1e-5 + torch.finfo(dy.dtype).eps
    for a, b in zip((y, *got), (expected, *exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-5)


torch.manual_seed(0)
assert torch.autograd.gradcheck(partial(layer_norm, eps=0.1), inputs(3, 5)[:3])
for dtype in ACC:
    for shape in ((7, 96), (2, 3, 300), (0, 4), (3, 0), (1, 20_000)):
        *leaves, dy = inputs(*shape, dtype=dtype)
        assert_right(*leaves, dy=dy)

# %%
# Break it: the variance in one pass
# ----------------------------------
#
# Why not always the mean of squares less :math:`\mu^2`? If the mean is 10,000,
# squares are near :math:`10^8`, where neighbours in float32 are 8 apart. The
# formula's variance, the kernel's, and the exact one, which is near 1:

if __name__ == "__main__":
    for mean in (0, 100, 1000, 10_000):
        x = torch.randn(9000, device=DEVICE) + mean
        naive = x.square().mean() - x.mean().square()
        _, (_, r) = native_layer_norm(x, x, x, 0.0, True)
        variances = naive, r.pow(-2), x.double().var(correction=0)
        print(f"mean {mean:6}:", *(f"{v.item():9.4f}" for v in variances))

# %%
# Break it: a lock without a barrier
# ----------------------------------
#
# Could the programs not add to one ``dw``? They would have to take turns, by a
# *spin lock*: a number in memory. Who changes it from 0 to 1 may go on, and
# sets it back at the end; ``tl.atomic_cas`` compares and swaps in one step.


@triton.jit
def add_under_lock_kernel(
    partial_ptr,
    total_ptr,
    lock_ptr,
    N,
    BARRIER: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.load(partial_ptr + tl.program_id(0) * N + offs_n, offs_n < N)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    acc += tl.load(total_ptr + offs_n, offs_n < N)
    tl.store(total_ptr + offs_n, acc, offs_n < N)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def add_under_lock(partial, barrier=True):
    total, lock = torch.zeros_like(partial[0]), partial.new_zeros(1).int()
    arguments = partial, total, lock, partial.shape[1], barrier, 16384
    return total, add_under_lock_kernel[(len(partial),)](*arguments)


# %%
# A program is many threads, and *one* of them releases the lock. Only the
# barrier makes it wait for the stores of the others. Without it the next
# program may read a total that is not complete, and what came late is lost.
#
# Triton's compiler places barriers itself where threads hand each other
# something in shared memory, such as what ``tl.atomic_cas`` returned. Here it
# sees no need. So the race shows in some kernels, now and then; without a GPU
# never, as the interpreter runs one program after another. Ones are added, so
# the sums are known:

if __name__ == "__main__" and DEVICE.type == "cuda":
    ones = torch.ones(2048, 16384, device=DEVICE)
    for barrier in (True, False):
        runs = [add_under_lock(ones, barrier) for _ in range(9)]
        wrong = sum((total != 2048).sum().item() for total, _ in runs)
        ptx = runs[0][1].asm["ptx"]
        count = ptx[ptx.rindex("st.global") : ptx.index("exch")].count("bar.")
        print(f"barriers before the release: {count}, wrong sums: {wrong}")
        assert wrong == 0 or not barrier
    noise = torch.randn_like(ones)
    for add in (lambda: add_under_lock(noise)[0], lambda: noise.sum(0)):
        differ, time = (add() != add()).sum(), triton.testing.do_bench(add)
        print(f"{time:6.3f} ms, {differ:5} sums differ in another run")
    assert differ == 0

# %%
# A zero in the second line would prove nothing. With its barrier the lock is
# right, and still no good (third line): programs take turns, and in any order,
# so the last bits change. Partial sums (last line) always have the same bits.
#
# The benchmark
# -------------
#
# As in ``rms_norm.py``: bfloat16, :math:`2^{29}` elements, 2 tensors forward, 3
# backward, medians with bands. ``Roof`` is a copy. The forward runs
# under ``torch.no_grad``, as in inference, and saves nothing.

SIZES = [256, 1024, 3000, 4096, 16384, 65536, 131072]
NAMES = ["Triton", "PyTorch", "torch.compile", "Roof"]
curve = partial(Benchmark, ["N"], SIZES, "provider", NAMES, NAMES, x_log=True)
CURVES = [curve("layer_norm", {"tensors": 2}, ylabel="GB/s")]
CURVES += [curve("layer_norm_backward", {"tensors": 3}, ylabel="GB/s")]


@triton.testing.perf_report(CURVES)
def benchmark(N, provider, tensors):
    *leaves, dy = inputs(2**29 // N, N, dtype=torch.bfloat16)
    torch.compiler.reset()  # the ninth shape would raise an error
    fast = torch.compile(layer_norm_torch, fullgraph=True, dynamic=False)
    op = [layer_norm, layer_norm_torch, fast, None][NAMES.index(provider)]
    if op is None:
        call, tensors = partial(torch.empty_like(dy).copy_, dy), 2
    elif tensors == 2:
        call = torch.no_grad()(partial(op, *leaves, 1e-5))
    else:
        arguments = op(*leaves, 1e-5), leaves, dy
        call = partial(torch.autograd.grad, *arguments, retain_graph=True)
    times = triton.testing.do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return tuple(tensors * 2 * dy.numel() * 1e-6 / t for t in times)


if __name__ == "__main__" and DEVICE.type == "cuda":
    torch._functorch.config.donated_buffer = False  # for retain_graph
    results, results_backward = benchmark.run(True, True, return_df=True)

# %%
# Reading the result
# ------------------
#
# The bytes bound it, as long as a row is in registers and the next one on its
# way. At 16384 the backward's two sums leave no room for that: one program has
# a multiprocessor to itself, and memory waits while it adds. At 3000 a quarter
# of a block is masked, so less is under way. Longer rows move five tensors for
# three backward. Forward they are read twice from memory, by the others too;
# ``rms_norm.py`` has the reason.
#
# Go further
# ----------
#
# 1. How are two of Welford's states merged, of ``k`` and ``l`` elements?
# 2. ``tl.atomic_add`` needs no lock. What is left to object to?
#
# Next is ``swiglu.py``. To read on: the `paper
# <https://arxiv.org/abs/1607.06450>`_; Welford's, Technometrics 4 (1962).

# %%
# Answers
# -------
#
# **1.** With :math:`\delta = \mu_l - \mu_k`, the mean is
# :math:`\mu_k + \delta\,l / (k + l)`, and
# :math:`s = s_k + s_l + \delta^2\,k\,l / (k + l)`. ``tl.reduce`` takes such a
# function, and merges a block of states in one meeting.
#
# **2.** Any order, so the last bits change. Where that is no matter, use it.
