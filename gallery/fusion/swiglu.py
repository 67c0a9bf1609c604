# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply one projection by the SiLU of another: there is little to compute,
# so what counts is how often memory is read."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "two ops share its kernels: of two tensors, and of a projection"
# ///
r"""
SwiGLU
======

The feed-forward layer of most language models multiplies one projection by the
SiLU of another. No element needs its neighbours, so there is nothing clever to
compute. What counts is how often memory is read and written.

After this page you can

* count what any PyTorch function moves, forward and backward;
* recompute in a backward what others store for it;
* read two halves of a projection in place, and write both gradients into one
  tensor;
* load 16 bytes at a time, even if there is one odd element at the end.
"""

# sphinx_gallery_tags = ["fusion", "elementwise", "autograd", "memory bound"]
import math
import os
from functools import partial

import pandas as pd
import torch
from torch.autograd.graph import saved_tensors_hooks

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
from triton_gallery.counting import Traffic

# %%
# In PyTorch
# ----------
#
# SwiGLU takes two tensors of one shape:
#
# .. math:: \mathrm{out} = \mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up},
#    \qquad \mathrm{silu}(x) = x\,\sigma(x) = \frac{x}{1 + e^{-x}}
#
# All tensors have one size here. So we count traffic in *tensors*: one tensor
# is that size, read or written once. ``Traffic``, in the opening of this page,
# is a *dispatch mode*: it sees the arguments and results of every operator that
# PyTorch runs, in the backward too. Views move nothing. A hook sees each tensor
# that autograd keeps for the backward.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def swiglu_torch(gate, up):
    return torch.nn.functional.silu(gate) * up


def count(function, *inputs):
    """Return the tensors moved forward, moved backward, and kept between."""
    kept = {}
    hooks = lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    with saved_tensors_hooks(*hooks), Traffic() as forward:
        out = function(*inputs)
    grad, size = torch.ones_like(out), out.nbytes
    with Traffic() as backward:
        torch.autograd.grad(out, inputs, grad)
    kept = sum(t.nbytes for t in kept.values())
    return [n / size for n in (forward.moved, backward.moved, kept)]


def random(*shape, dtype=torch.bfloat16):
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.to(dtype).requires_grad_()


if __name__ == "__main__":
    moved = count(swiglu_torch, random(7, 15), random(7, 15))
    print("tensors forward, backward, kept:", *moved)
    print("floor: 3 forward, 5 backward")

# %%
# The *floor* is what any kernel has to move: forward two reads and one write,
# backward three reads and two writes. A dozen operations for each element are
# little for a GPU. So we expect that the number of tensors decides the time.
# The first table after the op tests this. Its times follow the number of
# tensors where our kernels move them. PyTorch's operators take longer for each
# tensor.

# %%
# The first kernel
# ----------------
#
# If both tensors are contiguous, their shape does not matter: each is one long
# row of ``N`` elements. A program takes a block of this row. The last block
# goes beyond the end, so it has a mask:
#
# .. code-block:: text
#
#     program        0            1            2
#     gate, up   [ BLOCK ]    [ BLOCK ]    [ BLO|  ]
#     mask       1 1 1 1 1    1 1 1 1 1    1 1 1 0 0


@triton.jit
def flat_kernel(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    # In half precision each step would round.
    gate = tl.load(gate_ptr + offs, mask=mask).to(tl.float32)  # (BLOCK,)
    up = tl.load(up_ptr + offs, mask=mask).to(tl.float32)  # (BLOCK,)
    tl.store(out_ptr + offs, gate * tl.sigmoid(gate) * up, mask=mask)


def swiglu_flat(gate, up, block=1024, num_warps=4):
    """Return SwiGLU of two contiguous tensors."""
    out = torch.empty_like(gate)
    N = out.numel()
    grid = (triton.cdiv(N, block),)
    args = gate, up, out, N
    flat_kernel[grid](*args, BLOCK=block, num_warps=num_warps)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64. The argument of the exponential, the sum, the
# quotient and two products round once each, and the exponential is good to
# about two roundings. The exponential magnifies the rounding of a large
# argument: five times for a gate of 5. We allow :math:`10^{-6}`, sixteen
# roundings.

if __name__ == "__main__":
    gate, up = random(3, 1000, dtype=torch.float32), random(3, 1000).float()
    out, rtol = swiglu_flat(gate, up).double(), 1e-6
    expected = swiglu_torch(gate.double(), up.double())
    error = ((out - expected) / expected).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    torch.testing.assert_close(out, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time three numbers of tokens in bfloat16. The width, 14336, is that of the
# feed-forward layer in an 8B model. The roof is an addition, which has two
# reads and a write as well. The rate counts the floor's three tensors.


def contestants(ours, eager):
    """Return what is measured, by name."""
    torch.compiler.reset()  # past eight sizes it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(M, N=14336, ours=swiglu_flat):
    gate, up = random(M, N).detach(), random(M, N).detach()
    ops = contestants(ours, swiglu_torch).items()
    found = {name: partial(op, gate, up) for name, op in ops}
    return found | {"Roof": partial(torch.add, gate, up, out=gate.clone())}


def rate(found, size, tensors=3):
    """Return GB/s for ``tensors`` tensors of ``size`` 16-bit elements."""
    return 2e-6 * tensors * size / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    for M in (1, 512, 8192):
        found = gpu_time(calls(M)).items()
        rates = [f"{who} {rate(times, M * 14336):.0f}" for who, times in found]
        print(f"{M:4} tokens: {', '.join(rates)} GB/s")

# %%
# How many elements a program?
# ----------------------------
#
# In a block of 1024 with four warps, a thread has eight elements. That is 16
# bytes in bfloat16, the most that a thread can load at once. Smaller blocks
# spread few tokens over more multiprocessors. Larger blocks need fewer
# programs. The table has GB/s by the number of tokens:

BLOCKS = [(256, 1), (512, 2), (512, 4), (1024, 4), (2048, 4)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = {}
    for M in (1, 16, 128, 1024, 8192):
        gate, up = random(M, 14336).detach(), random(M, 14336).detach()
        tried = {
            f"block {block}, {warps} warps": partial(
                swiglu_flat, gate, up, block, warps
            )
            for block, warps in BLOCKS
        }
        found = gpu_time(tried, turns=20).items()
        table[M] = {who: rate(times, gate.numel()) for who, times in found}
    print(pd.DataFrame(table).round().to_string())

# %%
# The op has four warps. A program takes 512 elements if a tensor has up to
# ``2**20`` of them, and 1024 if it has more. On an H100, the smaller blocks
# gain nothing for few tokens.

# %%
# Two halves of one projection
# ----------------------------
#
# Most models compute gate and up by one matrix product. Gate is the left half
# of its rows, and up is the right half. Copying both halves first would move
# four more tensors. So the op's kernel gets, for each tensor, the distance
# between its rows:
#
# .. code-block:: text
#
#     stride_gm = stride_um = 2 * N                stride_om = N
#     +--------- gate ---------+---------- up ----------+
#     |       BLOCK_N          |       BLOCK_N          |      BLOCK_N
#     |      [       ] BLOCK_M |      [       ]         | ->  [       ]
#     +------------------------+------------------------+
#
# A program takes ``BLOCK_M`` short rows. If the mask hides a quarter or more of
# the elements in the tiles, as in rows of 1100, a program takes twice as many
# elements. If all tensors are contiguous, they are still one long row.
#
# The gradients of two halves have to become one tensor again. Autograd does
# that after our backward. The gradients of chunks are concatenated. The
# gradients of slices are padded with zeros and added up. So there is a second
# op, ``swiglu_packed``. It takes the whole projection, and writes one gradient
# for all of it. The table after the op counts what each of these ways moves.

# %%
# One odd element
# ---------------
#
# A thread loads 16 bytes at once if the compiler can prove two things: that the
# address is a multiple of 16 bytes, and that all these elements are on one side
# of the mask. Of an integer argument, the compiler knows only whether 16
# divides it. So one element too many at the end makes every load of the first
# kernel narrow. Halves of 3000 begin at a multiple of eight elements, 16 bytes.
# But 16 does not divide 3000, and the compiler does not learn that 8 does.
#
# There is a cure for each:
#
# * A program whose tile is full takes a branch without a mask.
# * Let ``VEC`` divide ``N`` and all strides, and be eight at most in bfloat16.
#   Then ``N // VEC * VEC`` is ``N`` again, and the compiler knows that ``VEC``
#   divides it.
#
# The second table after the op shows what the cures gain: the branch at an odd
# number of elements, ``VEC`` at halves of 1100, and in the backward at halves
# of 3000. Rows of an odd length that lie apart have no cure here, because every
# other row begins at an odd address. (``unaligned_rows.py`` looks into that.)

# %%
# The backward recomputes
# -----------------------
#
# Let :math:`g` be the gradient that comes in, and :math:`\sigma` stand for
# :math:`\sigma(\mathrm{gate})`:
#
# .. math:: \mathrm{d}_\mathrm{gate} = g \cdot \mathrm{up} \cdot
#    \sigma\,(1 + \mathrm{gate}\,(1 - \sigma)),
#    \qquad \mathrm{d}_\mathrm{up} = g \cdot \mathrm{gate} \cdot \sigma.
#
# The forward had :math:`\sigma` in registers. To keep it, the forward would
# write one more tensor and the backward would read it: 4 and 6 tensors instead
# of 3 and 5. In half precision, storing would also round :math:`\sigma`. The
# backward reads ``gate`` anyway, so it computes :math:`\sigma` again. To test
# this choice, the table after the op times ``torch.compile`` of these two
# functions, which keep :math:`\sigma`:


def keep(gate, up):
    s = torch.sigmoid(gate)
    return gate * s * up, s


def keep_backward(grad, gate, up, s):
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


# %%
# The op
# ------
#
# There are two ops. ``swiglu(gate, up)`` has two gradients, and
# ``swiglu_packed(x)`` has one. Each backward fills one buffer and returns all
# of it. If a kernel wrote into views of the buffer, ``torch.compile`` would
# copy the views.

from triton_gallery_ops.swiglu import (
    SWIGLU_ACC,
    _swiglu_backward_kernel,
    _swiglu_kernel,
    _swiglu_run,
    swiglu,
    swiglu_packed,
)

# %%
# What does each step gain? The first table is about the halves of a projection.
# It has five ways to the output, the tensors that the run counts for each, and
# the GPU time of forward and backward. The row "sigmoid kept" is
# ``torch.compile`` of ``keep`` and ``keep_backward``, with gate and up apart.
# Its tensors are counted by hand.


def split(op, x):
    return op(*x.chunk(2, dim=-1))


def slices(x):
    N = x.shape[-1] // 2
    return swiglu(x[..., :N], x[..., N:])


WAYS = {
    "PyTorch": partial(split, swiglu_torch),
    "the op on copies": lambda x: swiglu(*(t + 0 for t in x.chunk(2, -1))),
    "the op on slices": slices,
    "the op on chunks": partial(split, swiglu),
    "the packed op": swiglu_packed,
}


def passes(op, grad, *inputs):
    """Return the forward and the backward, as calls."""
    out, leaves = op(*inputs), [x.detach() for x in inputs]
    backward = partial(torch.autograd.grad, out, inputs, grad)
    return partial(op, *leaves), partial(backward, retain_graph=True)


if __name__ == "__main__":
    moved = [count(way, random(7, 30)) for way in WAYS.values()]
    traffic = pd.DataFrame(moved, WAYS, ["forward", "backward", "kept"])
    if DEVICE.type == "cuda":
        M, N = 8192, 14336
        grad, x = random(M, N).detach(), random(M, 2 * N)
        both = {name: passes(way, grad, x) for name, way in WAYS.items()}
        gate, up = x.detach().view(2, M, N)
        torch.compiler.reset()
        keep_fast, back_fast = torch.compile(keep), torch.compile(keep_backward)
        kept = keep_fast(gate, up)[1]
        both["sigmoid kept"] = (
            partial(keep_fast, gate, up),
            partial(back_fast, grad, gate, up, kept),
        )
        traffic.loc["sigmoid kept"] = [4, 6, 3]
        for i, which in enumerate(("forward ms", "backward ms")):
            tried = {name: pair[i] for name, pair in both.items()}
            found = gpu_time(tried, turns=20).items()
            traffic[which] = pd.Series({name: ms[0] for name, ms in found})
    print(traffic.round(3).to_string())

# %%
# The second table is about the width of loads. It has GB/s, forward and
# backward, of the first kernel and of the op. ``VEC = 1`` tells the compiler
# nothing about strides. "1024 elements" is the op without larger tiles where
# much is masked.

LAYOUTS = {
    "contiguous": (8192, 14336, False),
    "contiguous, odd": (8191, 14335, False),
    "halves of 3000": (32768, 3000, True),
    "halves of 1100": (65536, 1100, True),
    "halves of 2999": (32768, 2999, True),
}


def steps(M, N, packed):
    """Return a call of each step, by name, and the tensors that it moves."""
    grad, gate, up = (random(M, N).detach() for _ in range(3))
    if packed:
        gate, up = random(M, 2 * N).detach().chunk(2, -1)
    out, d, pair = torch.empty_like(grad), grad.new_empty(2, M, N), (gate, up)
    run = partial(_swiglu_run, _swiglu_kernel, pair, out, N)
    back = partial(_swiglu_run, _swiglu_backward_kernel, (grad, *pair), d, N)
    back = partial(back, UP_FIRST=False)
    block = min(1024, triton.next_power_of_2(N)) if packed else 1024
    tile = {"BLOCK_M": 1024 // block, "BLOCK_N": block}
    found = {
        "the op, 1024 elements": (partial(run, **tile), 3),
        "the op, VEC = 1": (partial(run, vec=1), 3),
        "the op": (run, 3),
        "backward, VEC = 1": (partial(back, M * N, vec=1), 5),
        "the op's backward": (partial(back, M * N), 5),
    }
    if not packed:
        first = partial(swiglu_flat, gate, up)
        found = {"the first kernel": (first, 3)} | found
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    table = {}
    for name, layout in LAYOUTS.items():
        M, N, _ = layout
        tried = steps(*layout)
        found = gpu_time({k: call for k, (call, _) in tried.items()}, turns=20)
        table[name] = {
            k: rate(found[k], M * N, tensors)
            for k, (_, tensors) in tried.items()
        }
    print(pd.DataFrame(table).round().to_string(na_rep="-"))

# %%
# Proof
# -----
#
# We compare values and gradients of every dtype with autograd in float64. In
# half precision a result is rounded once more. Where a derivative is near 0,
# its terms cancel, so there is an ``atol``.


def prove(dtype, *shape):
    grad = random(*shape, dtype=dtype).detach()
    gate, up = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    x = torch.cat([gate, up], -1).detach().requires_grad_()
    reference = partial(split, swiglu_torch)
    for op, exact, *inputs in (
        (swiglu, swiglu_torch, gate, up),
        (partial(split, swiglu), reference, x),
        (swiglu_packed, reference, x),
    ):
        tensors = grad, *inputs
        wide = [t.detach().double().requires_grad_() for t in tensors]
        both = passes(op, *tensors), passes(exact, *wide)
        got, right = ([forward(), *gradient()] for forward, gradient in both)
        rtol = 1e-5 + torch.finfo(dtype).eps
        for a, b in zip(got, right, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-5)


if __name__ == "__main__":
    for dtype in SWIGLU_ACC:
        for shape in ((3, 0), (31, 65), (40, 16), (2, 2, 1100)):
            prove(dtype, *shape)
    x, y, z = (random(2, n, dtype=torch.float64) for n in (3, 3, 6))
    assert torch.autograd.gradcheck(swiglu, (x, y))
    assert torch.autograd.gradcheck(swiglu_packed, z)
else:  # imported: a glance
    prove(torch.float32, 2, 3, 40)

# %%
# Rows that lie apart and rows that repeat give exactly the result of contiguous
# tensors. Other layouts are copied:

if __name__ == "__main__":
    x = random(9, 90).detach()
    views = x[:, 5:45], x[:, 50:], x[:1, :40].expand(9, -1), x[:, ::2][:, :40]
    for gate in views:
        got = swiglu(gate, views[0])
        assert torch.equal(got, swiglu(gate.clone(), views[0].clone()))

# %%
# An error names what an op does not take:

if __name__ == "__main__":
    x = torch.ones(2, 3, device=DEVICE)
    for op, *bad in ((swiglu, x, x.half()), (swiglu, x, x[0])):
        try:
            op(*bad)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    try:
        swiglu_packed(x)
    except ValueError as error:
        print(f"ValueError: {error}")

# %%
# The benchmark
# -------------
#
# The first two charts are in bfloat16 by the number of tokens ``M``, with gate
# and up apart and ``N = 14336``. The other two have the halves of a projection,
# by ``N``, with as many rows as make ``2**27`` elements. The rates count the
# floor, 3 tensors forward and 5 backward. The backward is called through
# autograd. ``Roof`` is an addition of as many bytes.

TOKENS = [1, 16, 128, 1000, 4096, 8192]
WIDTHS = [256, 1000, 2880, 4864, 8192, 14336, 28672]
ELEMENTS = 2**27


def contest(M, N, packed, backward):
    """Return what is measured, by name."""
    eager, ours = swiglu_torch, swiglu
    inputs = [random(M, N), random(M, N)]
    if packed:
        eager, ours = partial(split, swiglu_torch), swiglu_packed
        inputs = [random(M, 2 * N)]
    grad = random(M, N).detach()
    found = {
        name: passes(op, grad, *inputs)[backward]
        for name, op in contestants(ours, eager).items()
    }
    tensors = 5 if backward else 3
    x, y, out = random(3, tensors * M * N // 24 * 8).detach()
    return found | {"Roof": partial(torch.add, x, y, out=out)}


def table(x, sizes, packed, backward):
    """Return the rates of one pass, by tokens or by width."""
    by_tokens = {M: (M, 14336) for M in sizes}
    by_width = {N: (ELEMENTS // N, N) for N in sizes}
    shapes = by_width if packed else by_tokens
    times = {
        size: gpu_time(contest(*shape, packed, backward))
        for size, shape in shapes.items()
    }
    moved = 2e-6 * (5 if backward else 3)
    found = rate_table(times, x, "GB/s", lambda n: moved * math.prod(shapes[n]))
    print(found.to_string())
    title = (
        f"{'halves' if packed else 'apart'}, {('for', 'back')[backward]}ward"
    )
    wide = found.pivot(index=x, columns="series", values="GB/s")
    wide.plot(logx=True, title=title)
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = table("M", TOKENS, packed=False, backward=False)
    results_backward = table("M", TOKENS, packed=False, backward=True)

if __name__ == "__main__" and DEVICE.type == "cuda":
    results_packed = table("N", WIDTHS, packed=True, backward=False)
    results_packed_backward = table("N", WIDTHS, packed=True, backward=True)

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["M"] == 4096].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The forward moves what the addition of the roof moves: two reads and a write.
# Where our line touches the roof, the exponential costs nothing. Where gate and
# up are apart, the code that ``torch.compile`` generates moves the same bytes.
# For the gradient of a projection, compare the line of ``torch.compile`` with
# ours.
#
# With few tokens, the time hardly depends on their number. It is the time to
# start a kernel and to wait for the first bytes. The CPU needs longer than that
# for a call, as the last lines show. CUDA graphs save this CPU time
# (``cuda_graphs.py``).

# %%
# Break it: gradients over the inputs
# -----------------------------------
#
# Some libraries write the gradients over gate and up. That saves memory, but no
# traffic. And other operators may have kept these tensors for their own
# backward. Here ``exp`` makes ``x`` and keeps it. Nobody tells PyTorch that a
# launch changed ``x``:


class Overwriting(torch.autograd.Function):
    tell = False

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu_packed(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        inputs, N = (grad, *x.chunk(2, -1)), x.shape[-1] // 2
        kernel = _swiglu_backward_kernel
        _swiglu_run(kernel, inputs, x, 2 * N, N, UP_FIRST=False)
        if Overwriting.tell:
            torch.autograd.graph.increment_version(x)
        return x.clone()


def gradient(op):
    x = torch.tensor([[0.0, 0.5, 1.0, 1.5]], device=DEVICE, requires_grad=True)
    return torch.autograd.grad(op(x.exp()).sum(), x)[0]


if __name__ == "__main__":
    for name, op in (("op", swiglu_packed), ("overwriting", Overwriting.apply)):
        print(f"{name:12}", *(f"{d:.2f}" for d in gradient(op).flatten()))
    Overwriting.tell = True
    try:
        gradient(Overwriting.apply)
    except RuntimeError as error:
        print("told:", str(error).partition(":")[0])

# %%
# The gradient was wrong, without an error. ``increment_version`` tells PyTorch
# that ``x`` was changed, and then the backward stops with an error.

# %%
# Go further
# ----------
#
# 1. GEGLU has a GELU instead of the SiLU, which is ``activation="gelu"`` here.
#    Which lines know of it?
# 2. The matrix product after the op keeps its input, our ``out``, for the
#    gradient of its weight. What would it cost to recompute ``out`` too?
#
# To read on:
#
# * ``rope.py`` comes next.
# * ``linear_gelu.py`` has an activation in the epilogue of a matrix product.
# * The paper: https://arxiv.org/abs/2002.05202

# %%
# Answers
# -------
#
# **1.** Those of ``_swiglu_share``, which both kernels call, and the derivative
# in ``_swiglu_gradients``. No other line of a kernel knows the function.
#
# **2.** One write more, 6 tensors instead of 5. But ``out`` has to be there
# before the matrix product's backward begins, so the product and SwiGLU must
# become one op.
