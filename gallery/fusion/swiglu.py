# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
SwiGLU
======

The feed-forward layer of most language models multiplies one projection by the
SiLU of another. No element needs its neighbours, so there is nothing clever to
compute: this page is about how often memory is read and written.

After it you can

* count what any PyTorch function moves, forward and backward;
* recompute in a backward what others keep for it;
* read two halves of a projection in place, and write both gradients into one;
* say what one odd element costs.
"""

# sphinx_gallery_tags = ["fusion", "elementwise", "autograd", "memory bound"]
import os
import re
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.autograd.graph import saved_tensors_hooks
from torch.library import triton_op, wrap_triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in tensors
# ----------------------
#
# .. math:: \text{out} = \text{silu}(\text{gate}) \cdot \text{up},
#    \qquad \text{silu}(x) = x\,\sigma(x) = \frac{x}{1 + e^{-x}}
#
# All tensors have one size here, so the unit of traffic is *a tensor*, read or
# written once. A *dispatch mode* sees the arguments and results of every
# operator that PyTorch runs, autograd's too, and so can count. (Views move
# nothing.) A hook sees what is kept for the backward.


def swiglu_torch(gate, up):
    return torch.nn.functional.silu(gate) * up


class Traffic(TorchDispatchMode):
    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            tensors = {id(t): t for t in tree_leaves((args, out))}.values()
            tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
            self.moved += sum(t.numel() for t in tensors)
        return out


def count(function, *inputs):
    """Return the tensors moved forward, moved backward, and kept between."""
    kept = {}
    hooks = lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    with saved_tensors_hooks(*hooks), Traffic() as forward:
        out = function(*inputs)
    grad, size = torch.ones_like(out), out.numel()
    with Traffic() as backward:
        torch.autograd.grad(out, inputs, grad)
    kept = sum(t.numel() for t in kept.values())
    return [n / size for n in (forward.moved, backward.moved, kept)]


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True)


if __name__ == "__main__":
    moved = count(swiglu_torch, normal(7, 15), normal(7, 15))
    print("tensors forward, backward, kept:", *moved)
    assert moved == [5, 9, 3]

# %%
# A kernel that leaves the rest in registers reads two tensors and writes one,
# 3 instead of 5. With :math:`g` for the incoming gradient, and :math:`\sigma`
# for :math:`\sigma(\text{gate})`, the backward is
#
# .. math:: d_\text{gate} = g \cdot \text{up} \cdot
#    \sigma\,(1 + \text{gate}\,(1 - \sigma)),
#    \qquad d_\text{up} = g \cdot \text{gate} \cdot \sigma,
#
# three reads and two writes, 5 instead of 9. A dozen operations for ten bytes:
# tensors should decide the time, and 5/3 and 9/5 be all that there is to gain.
#
# The kernels
# -----------
#
# ``layer_norm.py`` had rows to reduce. Here a row matters only because the next
# may lie elsewhere: gate and up are often halves of *one* matrix. So a program
# takes a tile, and each tensor brings its row stride.
#
# .. code-block:: text
#
#     stride_gate = stride_up = 2 * N           stride_out = N
#     +--------- gate ---------+---------- up ----------+
#     |       BLOCK_N          |       BLOCK_N          |      BLOCK_N
#     |      [       ] BLOCK_M |      [       ]         | ->  [       ]
#     +------------------------+------------------------+
#
# A thread moves 16 bytes at once if the compiler can prove that they are
# aligned and on one side of the mask. Triton tells it which integers 16
# divides, but 8 would do for bfloat16. So sizes and strides come in units of 8
# elements where they can, and are multiplied out here:


@triton.jit
def tile(M, N, UNIT, BLOCK_M, BLOCK_N):
    pid, tiles_n = tl.program_id(axis=0), tl.cdiv(N, BLOCK_N // UNIT)
    # In int32 products overflow, in tensors of 2**31 elements.
    pid_m, pid_n = (pid // tiles_n).to(tl.int64), (pid % tiles_n).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
    mask = (offs_m < M) & (offs_n < tl.cast(N, tl.int64) * UNIT)
    return offs_m * UNIT, offs_n, mask


@triton.jit
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    M,
    N,  # like the strides, in units of UNIT elements
    stride_gate,
    stride_up,
    stride_out,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m, offs_n, mask = tile(M, N, UNIT, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + offs_m * stride_gate + offs_n, mask).to(ACC)
    up = tl.load(up_ptr + offs_m * stride_up + offs_n, mask).to(ACC)
    out = gate * tl.sigmoid(gate) * up  # (BLOCK_M, BLOCK_N)
    tl.store(out_ptr + offs_m * stride_out + offs_n, out, mask)


@triton.jit
def swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    d_ptr,  # to dgate; dup is some way on
    M,
    N,  # like the strides, in units of UNIT elements
    stride_grad,
    stride_gate,
    stride_up,
    stride_d,
    offset_dup,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m, offs_n, mask = tile(M, N, UNIT, BLOCK_M, BLOCK_N)
    grad = tl.load(grad_ptr + offs_m * stride_grad + offs_n, mask).to(ACC)
    gate = tl.load(gate_ptr + offs_m * stride_gate + offs_n, mask).to(ACC)
    up = tl.load(up_ptr + offs_m * stride_up + offs_n, mask).to(ACC)
    s = tl.sigmoid(gate)  # recomputed: an exponential, and no byte
    dgate = grad * up * s * (1 + gate * (1 - s))  # (BLOCK_M, BLOCK_N)
    dgate_ptrs = d_ptr + offs_m * stride_d + offs_n
    tl.store(dgate_ptrs, dgate, mask)
    dup_ptrs = dgate_ptrs + tl.cast(offset_dup, tl.int64) * UNIT
    tl.store(dup_ptrs, grad * gate * s, mask)


# %%
# The launcher
# ------------
#
# ``rows`` makes a matrix of any tensor, and copies only what has no contiguous
# rows. Where everything is contiguous, row ends mean nothing, and the matrix
# becomes one long row. Short rows that lie apart share a tile.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}
empty = partial(torch.empty_like, memory_format=torch.contiguous_format)


def rows(x):
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return x if x.stride(1) == 1 else x.contiguous()


def launch(kernel, inputs, out, *offset, block=1024, num_warps=4, unit=8):
    if inputs[0].numel() == 0:
        return None
    inputs = [rows(x) for x in inputs]
    (M, N), length = inputs[0].shape, rows(out).shape[1]
    strides = [*(x.stride(0) for x in inputs), length]
    if length == N and all(x.is_contiguous() for x in inputs):
        M, N = 1, M * N
    if M == 1:
        strides = [0] * len(strides)
    sizes = N, *strides, *offset
    UNIT = unit if all(n % unit == 0 for n in sizes) else 1
    BLOCK_N = next((2**k for k in range(10) if 2**k >= N), block)
    BLOCK_M = block // BLOCK_N
    # Triton launches on the current GPU, which may not be that of the tensors.
    with torch.accelerator.device_index(out.device.index):
        return kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)](
            *(*inputs, out, M, *(n // UNIT for n in sizes)),
            *(ACC[out.dtype], UNIT, BLOCK_M, BLOCK_N),
            num_warps=num_warps,
        )


# %%
# The ops
# -------
#
# ``triton_op.py`` explains how a kernel becomes an op. ``swiglu(gate, up)``, of
# one shape and dtype, has two gradients. ``swiglu_packed(x)`` takes the whole
# projection, gate in front, and has one. Either backward fills one buffer, and
# hands it on whole: of a view that a kernel writes to, Inductor makes a copy.


def check(*tensors):
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in tensors]
    if tensors[0].dtype not in ACC:
        raise TypeError(f"takes floating dtypes, not {tensors[0].dtype}")
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"takes one dtype, shape and device, not {kinds}")


def halves(x):
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"takes an even last dimension, not {tuple(x.shape)}")
    return x.tensor_split(2, dim=-1)


@triton_op("triton_gallery::swiglu", mutates_args={})
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    check(gate, up)
    out = empty(gate)
    launch(wrap_triton(swiglu_kernel), (gate, up), out)
    return out


@triton_op("triton_gallery::swiglu_backward", mutates_args={})
def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    check(grad, gate, up)
    d = gate.new_empty(2, *gate.shape)  # dgate and dup
    inputs = grad, gate, up
    launch(wrap_triton(swiglu_backward_kernel), inputs, d, gate.numel())
    return d


@triton_op("triton_gallery::swiglu_packed", mutates_args={})
def swiglu_packed(x: torch.Tensor) -> torch.Tensor:
    gate, up = halves(x)
    check(gate)
    out = empty(gate)
    launch(wrap_triton(swiglu_kernel), (gate, up), out)
    return out


@triton_op("triton_gallery::swiglu_packed_backward", mutates_args={})
def swiglu_packed_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inputs, dx = (grad, *halves(x)), empty(x)
    check(*inputs)
    launch(wrap_triton(swiglu_backward_kernel), inputs, dx, x.shape[-1] // 2)
    return dx


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    return swiglu_backward(grad, *ctx.saved_tensors).unbind()


def backward_packed(ctx, grad):
    return swiglu_packed_backward(grad, *ctx.saved_tensors)


swiglu.register_autograd(backward, setup_context=save)
swiglu_packed.register_autograd(backward_packed, setup_context=save)

# %%
# The check
# ---------
#
# Against float64 autograd. All is computed to within :math:`10^{-5}`, rounded
# once. (``atol`` is for derivatives near 0, where terms cancel.) In float64,
# ``gradcheck`` compares with differences of the forward.


def split(op, x):
    return op(*x.chunk(2, dim=-1))


def passes(op, grad, *inputs):
    """Return the forward and the backward, as calls."""
    out, leaves = op(*inputs), [x.detach() for x in inputs]
    backward = partial(torch.autograd.grad, out, inputs, grad)
    return partial(op, *leaves), partial(backward, retain_graph=True)


def compare(dtype, *shape):
    gate, up = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    x, split_torch = torch.cat([gate, up], -1), partial(split, swiglu_torch)
    for op, reference, *inputs in (
        (swiglu, swiglu_torch, gate, up),
        (partial(split, swiglu), split_torch, x),
        (swiglu_packed, split_torch, x),
    ):
        tensors = torch.randn_like(gate), *inputs
        wide = [t.detach().double().requires_grad_() for t in tensors]
        both = passes(op, *tensors), passes(reference, *wide)
        got, exact = ([forward(), *gradient()] for forward, gradient in both)
        rtol = 1e-5 + torch.finfo(dtype).eps
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-5)


torch.manual_seed(0)
compare(torch.bfloat16, 2, 3, 40)

if __name__ == "__main__":
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for shape in ((3, 0), (31, 65), (40, 16), (2, 2, 1100)):
            compare(dtype, *shape)
    x, y, z = (normal(2, n, dtype=torch.float64) for n in (3, 3, 6))
    assert torch.autograd.gradcheck(swiglu, (x, y))
    assert torch.autograd.gradcheck(swiglu_packed, z)

# %%
# Two halves of one projection
# ----------------------------
#
# Five ways from a projection to the output: PyTorch's operators; our op on
# copies of the halves, on slices, on chunks; the packed op. The gradients of
# halves have to become one tensor: autograd concatenates those of chunks, and
# pads and adds up those of slices. The packed op writes it at once.

WAYS = {
    "PyTorch": partial(split, swiglu_torch),
    "copies": lambda x: swiglu(*(half + 0 for half in x.chunk(2, -1))),
    "slices": lambda x: swiglu(*halves(x)),
    "chunks": partial(split, swiglu),
    "packed": swiglu_packed,
}
if __name__ == "__main__":
    moved = [count(way, normal(7, 30)) for way in WAYS.values()]
    traffic = pd.DataFrame(moved, WAYS, ["forward", "backward", "kept"])
    assert moved[-1] == [3, 5, 2]
    print(traffic)

# %%
# Recompute or keep
# -----------------
#
# The backward needs :math:`\sigma`, which the forward had in registers. Why not
# keep it, as PyTorch keeps ``silu(gate)``? Because a tensor is kept in memory:
# written by the forward, read by the backward, 4 and 6 instead of 3 and 5, and
# rounded on the way. What it follows from is read anyway. To test that, have
# ``torch.compile`` write kernels that keep it. GB/s are of the traffic counted:


def keep(gate, up):
    s = torch.sigmoid(gate)
    return gate * s * up, s


def keep_backward(grad, gate, up, s):
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


def bench(call, tensors, size):
    """Return GB/s for bfloat16: the median, then the worst and best 20 %."""
    times = triton.testing.do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return [2e-6 * tensors * size / t for t in times]


if __name__ == "__main__" and DEVICE.type == "cuda":
    M, N = 8192, 14336
    grad, x = normal(M, N).detach(), normal(M, 2 * N)
    gate, up = x.detach().view(2, M, N)
    keeping = torch.compile(keep)
    inputs = grad, gate, up, keeping(gate, up)[1]
    calls = {"kept, forward": (4, partial(keeping, gate, up))}
    calls["kept, backward"] = 6, partial(torch.compile(keep_backward), *inputs)
    for name, way in WAYS.items():
        for kind, call in zip(traffic, passes(way, grad, x), strict=False):
            calls[f"{name}, {kind}"] = traffic.loc[name, kind], call
    table = []
    for name, (tensors, call) in calls.items():
        rate = bench(call, tensors, M * N)[0]
        table.append([name, tensors, 2e-6 * tensors * M * N / rate, rate])
    table = pd.DataFrame(table, columns=["", "tensors", "ms", "GB/s"])
    print(table.sort_values("tensors").round(2).to_string(index=False))

# %%
# Where GB/s are the same, the count explains the time. They are lower where an
# operator of PyTorch reads or writes a half in place, element by element.
#
# How wide
# --------
#
# What ``UNIT`` is for, with the bytes per load from PTX, and forward GB/s:

LAYOUTS = {
    "contiguous": (8192, 14336, False, 8),
    "contiguous, odd": (8191, 14335, False, 8),
    "halves of 3000": (32768, 3000, True, 8),
    "halves of 3000, UNIT = 1": (32768, 3000, True, 1),
    "halves of 2999": (32768, 2999, True, 8),
}
if __name__ == "__main__" and DEVICE.type == "cuda":
    table = {}
    for name, (M, N, packed, unit) in LAYOUTS.items():
        out, gate, up, x = (normal(M, n * N).detach() for n in (1, 1, 1, 2))
        inputs = halves(x) if packed else (gate, up)
        call = partial(launch, swiglu_kernel, inputs, out, unit=unit)
        load = re.search(r"ld\.global(?:\.v(\d))?\.b(\d+)", call().asm["ptx"])
        width = int(load[1] or 1) * int(load[2]) // 8
        table[name] = width, bench(call, 3, M * N)[0]
    columns = ["bytes per load", "GB/s"]
    print(pd.DataFrame(table.values(), table, columns).round().to_string())

# %%
# One odd element at the end, and no mask is known to cover eight at a time: the
# compiler falls back to loads of one element, for all of the tensor. It costs
# most in the contiguous one, where a thread still has eight neighbours and a
# warp's loads leave gaps. Keep the sizes of a projection multiples of eight.
#
# The benchmark
# -------------
#
# First by tokens ``M``, gate and up apart, ``N = 14336``; then the halves of a
# projection by ``N``, with ``M * N`` fixed. GB/s are those of the algorithm in
# bfloat16, 3 tensors forward and 5 backward, through autograd. ``Roof`` is an
# addition of as many bytes: the forward's mix, and near the backward's.

NAMES = ["Triton", "PyTorch", "torch.compile", "Roof"]
CURVES = {
    "swiglu": ("M", [64, 512, 1000, 2048, 8192, 16384]),
    "swiglu_packed": ("N", [256, 1000, 3000, 14336, 40960, 131072]),
}


@triton.testing.perf_report(
    [
        triton.testing.Benchmark(
            *([x], sizes, "provider", NAMES, NAMES, name + kind),
            {"tensors": tensors},
            ylabel="GB/s",
            x_log=True,
        )
        for name, (x, sizes) in CURVES.items()
        for kind, tensors in (("", 3), ("_backward", 5))
    ]
)
def benchmark(provider, tensors, M=None, N=14336):
    packed, M = M is None, M or 2**27 // N
    op, inputs = swiglu_torch, [normal(M, N), normal(M, N)]
    if packed:
        op, inputs = partial(split, op), [normal(M, 2 * N)]
    torch.compiler.reset()  # the ninth shape would raise an error
    if provider == "Triton":
        op = swiglu_packed if packed else swiglu
    elif provider == "torch.compile":
        op = torch.compile(op, fullgraph=True, dynamic=False)
    call = passes(op, normal(M, N).detach(), *inputs)[tensors == 5]
    if provider == "Roof":
        x, y, out = normal(3, tensors * M * N // 24 * 8).detach()
        call = partial(torch.add, x, y, out=out)
    return bench(call, tensors, M * N)


if __name__ == "__main__" and DEVICE.type == "cuda":
    tables = benchmark.run(print_data=True, show_plots=True, return_df=True)
    results, results_backward, results_packed, results_packed_backward = tables
    usual = [t[t.iloc[:, 0].isin([8192, 14336])] for t in tables]
    usual = pd.concat(usual).rename(columns=lambda name: name.split(" (")[0])
    peer = usual[["PyTorch", "torch.compile"]].max(axis=1)
    usual["of the best peer"] = usual["Triton"] / peer
    usual["of the roof"] = usual["Triton"] / usual["Roof"]
    usual.index = ["forward", "backward", "forward, halves", "backward, halves"]
    print(usual.iloc[:, -2:].round(3).to_string())

# %%
# Reading the result
# ------------------
#
# With many tokens the forward is, to memory, the addition of the roof, and so
# is the code that ``torch.compile`` writes: fusion is what compilers do best.
# In the backward of the halves that falls behind, as if it read its inputs
# twice, once for each half of the result.
#
# With few tokens you see the cost of a call, more than PyTorch's, as launcher
# and autograd formula are Python. ``cuda_graphs.py`` takes it away.
#
# Go further
# ----------
#
# 1. ``launch`` takes ``block`` and ``num_warps``. Why are they not tuned?
# 2. Some libraries write ``dgate`` and ``dup`` over ``gate`` and ``up``. What
#    does that save, and what may break?
# 3. The matrix product behind the op keeps its input, our ``out``, for the
#    gradient of its weight. What would it cost to recompute that too?
#
# Next is ``rope.py``. The op comes `from here
# <https://arxiv.org/abs/2002.05202>`_.

# %%
# Answers
# -------
#
# **1.** They stand on a plateau: 8 or 16 elements per thread, 512 to 4096 per
# program, are equal within the spread. Larger programs leave gaps where they
# end, and so does a persistent grid. Smaller ones have too little in flight.
#
# **2.** Memory, but no traffic. Other readers of gate and up get gradients
# instead, `without an error
# <https://github.com/linkedin/Liger-Kernel/issues/272>`_: ``exp``, say, which
# keeps its result, or a second backward. PyTorch does not see what a launch
# writes, unless ``torch.autograd.graph.increment_version`` tells it.
#
# **3.** One write more, 6 tensors instead of 5. But it has to be there before
# that product's backward begins, so the two must become one op.
