# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
RMSNorm
=======

RMSNorm divides each row by its root mean square, and multiplies by a weight.
Most language models do it twice per layer. Forward it is a reduction inside an
elementwise op; backward it also adds up across all rows.

After ``softmax.py`` and this page you can

* put a reduction into a fusion, so that a row is read once and used twice;
* derive a backward that saves nothing but its inputs;
* add up a weight's gradient in parallel, without locks, and get the same bits
  each time;
* see where the registers end, and what to do with longer rows.
"""

# sphinx_gallery_tags = ["autograd", "reduction", "memory bound"]
import os
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

# %%
# The problem in bytes
# --------------------
#
# For each row :math:`x` of ``N`` elements, with a weight :math:`w`,
#
# .. math:: y = x\,r\,w, \qquad r = 1 / \sqrt{\tfrac{1}{N} \sum x^2 + \epsilon}.
#
# This is it in plain PyTorch, in float32 inside, as models have it. Comments
# count what is read and written, in units of a bfloat16 ``x``: 20 in all.


def rms_norm_plain(x, weight, eps):
    wide = x.float()  # 1 read, 2 written
    mean = wide.square().mean(-1, keepdim=True)  # 2 + 2, and 2
    r = torch.rsqrt(mean + eps)
    y = wide * r * weight.float()  # 2 + 2, and again 2 + 2
    return y.to(x.dtype)  # 2 + 1


def rms_norm_torch(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def inputs(*shape, dtype=torch.float64):
    kind = {"dtype": dtype, "device": DEVICE}
    x = torch.randn(shape, **kind).requires_grad_()
    weight = torch.randn(shape[-1:], **kind).requires_grad_()
    return x, weight, torch.randn(shape, **kind)


# %%
# The floor is 2: ``x`` read and ``y`` written. Backward it is 3: ``x`` and the
# gradient of ``y`` read, that of ``x`` written. Anything per row is small.
#
# The forward kernel
# ------------------
#
# The row is needed twice, for the sum and for the result. If a program can hold
# it in its registers, it is read once. Short rows share a program:
#
# .. code-block:: text
#
#     M = 5, N = 6, BLOCK_M = 2, BLOCK_N = 8
#
#                      x x x x x x . .   -> sum of squares -> r, times w
#     program 1        x x x x x x . .   -> sum of squares -> r, times w
#                      |<-- N -->| masked, read as 0
#
# Zeros add nothing to a sum; the mean is over ``N``, not over the block. A
# longer row is read block by block, and then again: from the L2 cache, if the
# rows under way fit in there together. Three things deserve a look:
#
# * ``ACC``, float32 for half precision.
# * ``EPS`` is a constexpr and keeps its digits; a float argument of a kernel
#   arrives as float32.
# * ``UNIT``. Triton notices integer arguments that 16 divides, and then loads
#   16 bytes at once. For bfloat16 a multiple of 8 would do, as a row of 3000.
#   ``N // UNIT * UNIT`` is still ``N``, but now the compiler knows that it is
#   such a multiple.


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    N = tl.cast(N, tl.int64) // UNIT * UNIT
    stride_xm = tl.cast(stride_xm, tl.int64) // UNIT * UNIT
    pid = tl.program_id(axis=0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    block = tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    x_rows, y_rows = x_ptr + offs_m * stride_xm, y_ptr + offs_m * N
    if WHOLE:
        mask = (offs_m < M) & (block < N)
        x = tl.load(x_rows + block, mask=mask, other=0).to(ACC)
        weight = tl.load(weight_ptr + block, mask=block < N, other=0).to(ACC)
        r = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + EPS)
        tl.store(y_rows + block, x * r * weight, mask=mask)
    else:
        squares = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for start in range(0, N, BLOCK_N):
            offs_n = start + block
            mask = (offs_m < M) & (offs_n < N)
            x = tl.load(x_rows + offs_n, mask=mask, other=0).to(ACC)
            squares += x * x
        r = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / N + EPS)
        for start in range(0, N, BLOCK_N):
            offs_n = start + block
            mask = (offs_m < M) & (offs_n < N)
            x = tl.load(x_rows + offs_n, mask=mask).to(ACC)
            weight = tl.load(weight_ptr + offs_n, mask=offs_n < N).to(ACC)
            tl.store(y_rows + offs_n, x * r * weight, mask=mask)


# %%
# The backward on paper
# ---------------------
#
# Let :math:`g = w\,\mathrm{d}y`. Each :math:`x_i` acts on the row directly and
# through :math:`r`, whose derivative is :math:`-r^3 x_i / N`:
#
# .. math:: \mathrm{d}x = r\,(g - c\,x), \quad
#    c = \tfrac{r^2}{N} \sum g\,x, \qquad
#    \mathrm{d}w = \sum_{\mathrm{rows}} \mathrm{d}y\,x\,r.
#
# * Along a row there are two sums, :math:`\sum x^2` and :math:`\sum g\,x`. They
#   don't wait for each other: one pass over the row is enough.
# * The forward could save :math:`r`. But ``x`` is read anyway, so computing
#   :math:`r` again costs no bytes.
# * :math:`\mathrm{d}w` goes across the rows. Every program has some of them.
#
# Partial sums instead of locks
# -----------------------------
#
# Programs that add to one ``dw`` take turns, by atomics or with a lock. They
# come in any order, so the last bits change from run to run. Or each adds up
# its own rows in its registers, and a second kernel adds up the programs:
#
# .. code-block:: text
#
#     program 0: rows 0, 3, 6 ...  -> partial[0, :] --+
#     program 1: rows 1, 4, 7 ...  -> partial[1, :] --+--> dw[:]
#     program 2: rows 2, 5, 8 ...  -> partial[2, :] --+
#
# ``partial`` is written and read: in float32, 8 bytes per column and program.
# A program for each row would make that more than all the rest. So there are
# about as many as run at a time, *persistent* programs, in a loop over tiles.
#
# Rows and programs have a fixed order: the same bits each time, on one GPU.
#
# Short rows stay in registers, and the loop loads the next ones meanwhile
# (``STAGES``). A row of 32 KB does not fit beside ``dw`` and is loaded again,
# from the multiprocessor's L1 cache (``TURN = 1``). Longer rows are split among
# programs, and the kernel runs twice: for the sums (2), then with them (3).


@triton.jit
def again(ptrs, mask, ACC: tl.constexpr):
    # With the policy of the first load, the compiler would make one of both.
    return tl.load(ptrs, mask, 0, eviction_policy="evict_first").to(ACC)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    sums_ptr,
    dx_ptr,
    partial_ptr,
    M,
    N,
    stride_dym,
    stride_xm,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    TURN: tl.constexpr,  # 0, 1: whole rows; 2: the sums; 3: the sums are given
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    N = N // UNIT * UNIT
    stride_dym, stride_xm = stride_dym // UNIT * UNIT, stride_xm // UNIT * UNIT
    pid, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_n = part * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    weight = tl.load(weight_ptr + offs_n, offs_n < N, 0).to(ACC)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tiles, programs = tl.cdiv(M, BLOCK_M), tl.num_programs(0)
    for tile in tl.range(pid, tiles, programs, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        offs_m = first + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
        mask = (offs_m < M) & (offs_n < N)
        x_ptrs = x_ptr + offs_m * stride_xm + offs_n
        dy_ptrs = dy_ptr + offs_m * stride_dym + offs_n
        x = tl.load(x_ptrs, mask, 0).to(ACC)  # (BLOCK_M, BLOCK_N)
        dy = tl.load(dy_ptrs, mask, 0).to(ACC)
        if TURN == 1:
            weight = tl.load(weight_ptr + offs_n, offs_n < N, 0).to(ACC)
        if TURN == 3:
            xx = tl.load(sums_ptr + 2 * offs_m, offs_m < M, 0)  # (BLOCK_M, 1)
            gx = tl.load(sums_ptr + 2 * offs_m + 1, offs_m < M, 0)
        else:
            xx = tl.sum(x * x, axis=1, keep_dims=True)  # (BLOCK_M, 1)
            gx = tl.sum(dy * weight * x, axis=1, keep_dims=True)
        if TURN == 2:
            sums_ptrs = sums_ptr + 2 * (part * M + offs_m)
            tl.store(sums_ptrs, xx, mask=offs_m < M)
            tl.store(sums_ptrs + 1, gx, mask=offs_m < M)
        else:
            r = tl.rsqrt(xx / N + EPS)
            if TURN == 1:
                x, dy = again(x_ptrs, mask, ACC), again(dy_ptrs, mask, ACC)
                weight = again(weight_ptr + offs_n, offs_n < N, ACC)
            dx = (dy * weight - x * (gx / N * r * r)) * r
            tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)
            dw += dy * (x * r)
    if TURN != 2:
        dw = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(partial_ptr + pid.to(tl.int64) * N + offs_n, dw, offs_n < N)


@triton.jit
def sum_partial_kernel(
    partial_ptr,
    dw_ptr,
    P,
    N,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_P, BLOCK_N), dtype=partial_ptr.dtype.element_ty)
    for start in range(0, tl.cast(P, tl.int64), BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)[:, None]
        mask = (offs_p < P) & (offs_n < N)
        dw += tl.load(partial_ptr + offs_p * N + offs_n, mask=mask, other=0)
    tl.store(dw_ptr + offs_n, tl.sum(dw, 0, keep_dims=True), offs_n < N)


# %%
# The ops
# -------
#
# Two ops, as in ``triton_op.py``, with PyTorch's name and order of arguments,
# less the shape: a row is the last dimension. ``weight`` is required, in the
# dtype of ``x``. (``eps`` has no default: PyTorch's depends on the dtype.) Rows
# may lie apart; those that are not contiguous are copied. Nothing is tuned: how
# many rows and warps a program has follows from the length of a row.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}
SMS = 2  # multiprocessors
if DEVICE.type == "cuda":
    SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count


def check(x, weight, *others):
    dtypes = {t.dtype for t in (x, weight, *others)}
    if x.dtype not in ACC or len(dtypes) > 1:
        raise TypeError(f"rms_norm takes one floating dtype, not {dtypes}")
    if x.ndim == 0 or tuple(x.shape[-1:]) != tuple(weight.shape):
        raise ValueError("rms_norm takes shapes (..., N) and (N,)")
    if any(t.device != x.device for t in (weight, *others)):
        raise ValueError("rms_norm takes tensors on one device")


def as_rows(x):
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def common(N, eps, *matrices):
    """Return the constexprs that the kernels share."""
    unit = 16 // matrices[0].element_size()
    if any(n % unit for n in (N, *(m.stride(0) for m in matrices))):
        unit = 1
    return {"EPS": eps, "ACC": ACC[matrices[0].dtype], "UNIT": unit}


@triton_op("triton_gallery::rms_norm", mutates_args={})
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x`` over its root mean square (last dimension), weighted."""
    check(x, weight)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x, weight = as_rows(x), weight.contiguous()
    M, N = x.shape
    block = triton.next_power_of_2(int(N))
    whole = block * x.element_size() <= 65536
    tile = 2048 if block < 4096 else 16384  # more loads before each sum
    rows = max(1, tile // block)
    block = block if whole else 16384
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        wrap_triton(rms_norm_kernel)[(triton.cdiv(M, rows),)](
            *(x, weight, y, M, N, x.stride(0)),
            **common(N, eps, x),
            WHOLE=whole,
            BLOCK_M=rows,
            BLOCK_N=block,
            num_warps=min(16, max(4, rows * block // 2048)),
        )
    return y


@triton_op("triton_gallery::rms_norm_backward", mutates_args={})
def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x`` and of ``weight``."""
    check(x, weight, dy)
    if dy.shape != x.shape:
        raise ValueError(f"dy has the shape {dy.shape}, and x {x.shape}")
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx, dw.zero_()
    dy, x, weight = as_rows(dy), as_rows(x), weight.contiguous()
    M, N = x.shape
    block, size = triton.next_power_of_2(int(N)), x.element_size()
    turns = (0,) if block * size < 32768 else (1,)
    if block * size > 32768:
        block, turns = 4096, (2, 3)
    rows, parts = max(1, 2048 // block), triton.cdiv(N, block)
    num_warps = min(16, max(4, block // 512))
    # 16 warps a multiprocessor; and no more programs than tiles.
    programs = max(1, SMS * 16 // num_warps // parts)
    programs = min(triton.cdiv(M, rows), programs)
    wide = torch.promote_types(x.dtype, torch.float32)
    partial = x.new_empty(programs, N, dtype=wide)
    sums = x.new_empty(parts if 2 in turns else 0, M, 2, dtype=wide)
    with torch.accelerator.device_index(x.device.index):
        for turn in turns:
            wrap_triton(rms_norm_backward_kernel)[(programs, parts)](
                *(dy, x, weight, sums, dx, partial),
                *(M, N, dy.stride(0), x.stride(0)),
                **common(N, eps, dy, x),
                TURN=turn,
                BLOCK_M=rows,
                BLOCK_N=block,
                STAGES=3 if turn in (0, 2) else 1,
                num_warps=num_warps,
            )
            sums = sums.sum(0) if turn == 2 else sums
        wrap_triton(sum_partial_kernel)[(triton.cdiv(N, 16),)](
            *(partial, dw, programs, N),
            BLOCK_P=64,
            BLOCK_N=16,
        )
    return dx, dw


def save(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx, dy):
    return *rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps), None


rms_norm.register_autograd(backward, setup_context=save)

# %%
# The check
# ---------
#
# ``gradcheck`` compares gradients with differences of the op's values, so it
# runs in float64. Then value and gradients are compared with float64 autograd
# in other dtypes. The sums have no more than some thousand terms here, added up
# in float32, by blocks and in trees: :math:`10^{-5}` of the largest terms
# covers it. Then each result is rounded once, to its dtype.


def assert_right(x, weight, dy, eps=1e-6):
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = rms_norm_torch(*wide, eps)
    y = rms_norm(x, weight, eps)
    exact = torch.autograd.grad(expected, wide, dy.double())
    got = torch.autograd.grad(y, (x, weight), dy)
    rtol = 1e-5 + torch.finfo(x.dtype).eps
    for a, b in zip((y, *got), (expected, *exact), strict=True):
        assert a.dtype == x.dtype
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-5)


torch.manual_seed(0)
assert torch.autograd.gradcheck(partial(rms_norm, eps=1e-6), inputs(3, 5)[:2])
for dtype in ACC:
    for shape in ((7, 96), (2, 3, 1000), (0, 4), (3, 0)):
        assert_right(*inputs(*shape, dtype=dtype))

# %%
# Rows longer than the registers, in the narrowest and the widest dtype, and
# rows that lie apart, a slice of something wider:

if __name__ == "__main__":
    for dtype, N in ((torch.bfloat16, 40_001), (torch.float64, 10_000)):
        assert_right(*inputs(3, N, dtype=dtype))
    x, weight, dy = inputs(5, 3000)
    wide = torch.cat([x.detach(), dy], 1)
    assert_right(wide[:, :3000].requires_grad_(), weight, wide[:, 3000:])

# %%
# Break it: squares in half precision
# -----------------------------------
#
# A model in float16 with an activation of 300, and a norm that forgot to leave
# float16. The square is infinite, :math:`r` is 0, and the row is gone, without
# a NaN that anyone would notice.

if __name__ == "__main__":
    x = torch.tensor([[300.0, -5.0, 2.0, 1.0]], device=DEVICE).half()
    print("float16:", (x * x.square().mean(-1, keepdim=True).rsqrt()).tolist())
    print("ours:   ", rms_norm(x, torch.ones_like(x[0]), 1e-6).tolist())

# %%
# The benchmark
# -------------
#
# bfloat16, :math:`2^{29}` elements in rows of different lengths, so that no
# kernel is shorter than its launch; bytes of the algorithm, 2 tensors forward
# and 3 backward. ``Roof`` is a copy of as many bytes. All backwards run through
# autograd, on a graph built beforehand. ``do_bench`` empties the L2 cache
# before each call; medians, with bands from the 20th to the 80th percentile.

SIZES = [256, 1024, 3000, 4096, 16384, 65536, 131072]
NAMES = ["Triton", "PyTorch", "torch.compile", "Roof"]


@triton.testing.perf_report(
    [
        triton.testing.Benchmark(
            *(["N"], SIZES, "provider", NAMES, NAMES, name),
            args={"tensors": tensors},
            ylabel="GB/s",
            x_log=True,
        )
        for name, tensors in (("rms_norm", 2), ("rms_norm_backward", 3))
    ]
)
def benchmark(N, provider, tensors):
    M = 2**29 // N
    x, weight, dy = inputs(M, N, dtype=torch.bfloat16)
    torch.compiler.reset()  # the ninth shape would raise an error
    fast = torch.compile(rms_norm_torch, fullgraph=True, dynamic=False)
    op = [rms_norm, rms_norm_torch, fast, None][NAMES.index(provider)]
    if op is None:
        source = torch.randn(tensors * M * N // 2, device=DEVICE).to(x.dtype)
        call = partial(torch.empty_like(source).copy_, source)
    elif tensors == 2:
        call = partial(op, x.detach(), weight.detach(), 1e-6)
    else:
        arguments = op(x, weight, 1e-6), (x, weight), dy
        call = partial(torch.autograd.grad, *arguments, retain_graph=True)
    times = triton.testing.do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return tuple(tensors * 2 * M * N * 1e-6 / t for t in times)


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_backward = benchmark.run(True, True, return_df=True)

# %%
# As ratios, to the best of PyTorch and ``torch.compile``, and to the roof:


def ratios(table):
    table = table.set_index("N").loc[[1024, 4096, 16384]]
    ours, *others, roof = (table[column] for column in table.columns)
    best = pd.concat(others, axis=1).max(axis=1)
    both = ours / best, ours / roof
    return pd.concat(both, axis=1, keys=["of the best", "of the roof"])


if __name__ == "__main__" and DEVICE.type == "cuda":
    tables = {"forward": ratios(results), "backward": ratios(results_backward)}
    print(pd.concat(tables, axis=1).round(3))

# %%
# Reading the result
# ------------------
#
# While a row is in registers, the bytes bound it. At 3000 a quarter of a block
# is masked, so a program has less under way. Backward, at 256, a tile has more
# rows, and its threads exchange more sums for as many bytes; at 16384 a program
# has a multiprocessor to itself, and memory waits while it sums.
#
# Rows of 65536 and more move five tensors for three backward: 3 / 5 of the roof
# is left. Forward they move three for two. The second reading comes from memory
# as well, since what is under way, with what is written, does not stay in L2.
# PyTorch and ``torch.compile`` read them twice, too; the latter is slightly
# ahead. ``softmax_long.py`` has what keeps rows in L2: persistent programs, and
# a second pass from the end.
#
# Go further
# ----------
#
# 1. Models add a residual before they normalize: ``h = x + residual``, and both
#    ``h`` and its norm are needed. How many tensors does a fused op move, and
#    how many do two ops?
# 2. ``weight`` is often frozen. What can the backward leave out then, and how
#    does it learn of it?
#
# Next is ``layer_norm.py``. To read on: `the paper
# <https://arxiv.org/abs/1910.07467>`_.

# %%
# Answers
# -------
#
# **1.** Fused four: ``x`` and ``residual`` read, ``h`` and ``y`` written. Two
# ops move five, since the second reads ``h`` again.
#
# **2.** ``dw``, its partial sums and the second kernel. ``backward`` finds
# ``ctx.needs_input_grad[1]`` false, and tells the op.
