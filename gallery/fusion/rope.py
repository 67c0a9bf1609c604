# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Turn queries and keys by angles that grow with the position, in one kernel
# where models read and write everything five times."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "positions of tokens come in several forms, which it checks"
# ///
r"""
RoPE
====

Rotary position embeddings (RoPE) turn queries and keys by angles that grow with
the position. Nearly every language model does that in every layer. PyTorch has
no function for it. Models write it as several operators, and move everything
through memory five times as often as one kernel does.

After this page you can

* load a table once for several heads;
* read and write tensors in whatever layout they lie;
* let one launch serve two tensors, here queries and keys;
* use an op as its own backward;
* write an op that changes its arguments, and declare that to PyTorch.
"""

# sphinx_gallery_tags = ["elementwise", "autograd", "custom op", "memory bound"]
import os
from functools import partial

import pandas as pd
import torch
from torch.library import custom_op

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


def calls(T, B=8, D=128, **ours):
    """Return what the page times, by name: ours, and the others."""
    q, k = heads(B, T, 32, D), heads(B, T, 8, D)
    cos, sin = tables(T, D, q.dtype)
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(rope_torch, dynamic=False, fullgraph=True)
    found = {name: partial(f, q, k, cos, sin) for name, f in ours.items()}
    wide = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    found |= {"PyTorch": partial(rope_torch, q, k, *wide)}
    found |= {"torch.compile": partial(fast, q, k, *wide)}
    x = torch.cat([q.flatten(), k.flatten()])
    return found | {"Roof": partial(torch.empty_like(x).copy_, x)}


def rate(found, T, B=8, D=128):
    """Return GB/s: queries and keys are read and written, in 16 bits."""
    return 2 * 2 * B * T * 40 * D / found[0] * 1e-6


# %%
# In PyTorch
# ----------
#
# A head of ``D`` numbers is ``D / 2`` points in the plane. At position
# :math:`t` the point :math:`i` is turned by the angle :math:`t\,\theta_i`:
#
# .. math:: y_1 = x_1 \cos t\theta_i - x_2 \sin t\theta_i, \qquad
#    y_2 = x_2 \cos t\theta_i + x_1 \sin t\theta_i, \qquad
#    \theta_i = 10000^{-2i/D}.
#
# Then the product of a given query and key depends on their distance alone. In
# Llama's form, :math:`x_1` is in the first half of the head, :math:`x_2` in the
# second. Models on Hugging Face keep tables of cosines and sines for each
# position, with each column twice, and swap the halves by ``rotate_half``.
# ``Traffic``, in the opening of this page, is a *dispatch mode*: it sees each
# operator, and adds up what all of them move.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def tables(T, D, dtype=torch.float64):
    """Return the cosines and the sines, each (T, D / 2)."""
    theta = 10_000 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    angles = torch.outer(torch.arange(T, dtype=torch.float64), theta)
    return [f(angles).to(DEVICE, dtype) for f in (torch.cos, torch.sin)]


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)


def rope_torch(q, k, cos, sin):
    """Turn queries and keys by tables with each column twice, (T, D)."""
    return [x * cos + rotate_half(x) * sin for x in (q, k)]


def heads(B, T, H, D, dtype=torch.bfloat16):
    """Return (B, H, T, D), a view of (B, T, H, D), as attention layers do."""
    x = torch.randn(B, T, H, D, generator=generator, device=DEVICE)
    return x.to(dtype).transpose(1, 2)


if __name__ == "__main__":
    q, k = heads(2, 256, 8, 64), heads(2, 256, 2, 64)
    wide = [torch.cat([table] * 2, -1) for table in tables(256, 64, q.dtype)]
    with Traffic() as traffic:
        rope_torch(q, k, *wide)
    print(f"moves {traffic.moved / (q.nbytes + k.nbytes):.1f} times q and k")

# %%
# The *floor* is two: to read ``q`` and ``k``, and to write both results. The
# tables are small, because all heads and sequences share them.

# %%
# The first kernel
# ----------------
#
# A projection writes a token's heads one after the other, ``(B, T, H, D)``. Let
# a program turn the heads of one token. All of them turn by the same angles. So
# the program loads one row of each table, and *broadcasting* lays both rows
# over the heads:
#
# .. code-block:: text
#
#     columns      D / 2         D / 2
#              +------------+------------+
#     head 0   |     x1     |     x2     |      cos  +------------+
#     head 1   |     x1     |     x2     |           +------------+
#     head 2   |     x1     |     x2     |      sin  +------------+
#              +------------+------------+           +------------+
#
# ``BLOCK_H`` is a power of two. A mask hides the rows past the last head.


@triton.jit
def token_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    T,
    H,
    HALF: tl.constexpr,  # D / 2, here a power of two
    BLOCK_H: tl.constexpr,
):
    # In int32 the products would overflow past element 2**31.
    token = tl.program_id(axis=0).to(tl.int64)
    offs_d = tl.arange(0, HALF)[None, :]  # (1, HALF)
    # Each sequence begins with the first row of the tables.
    row = (token % T) * HALF
    cos = tl.load(cos_ptr + row + offs_d).to(tl.float32)  # (1, HALF)
    sin = tl.load(sin_ptr + row + offs_d).to(tl.float32)  # (1, HALF)
    offs_h = tl.arange(0, BLOCK_H)[:, None]  # (BLOCK_H, 1)
    mask = offs_h < H
    offs = (token * H + offs_h) * 2 * HALF + offs_d  # (BLOCK_H, HALF)
    x1 = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    x2 = tl.load(x_ptr + HALF + offs, mask=mask).to(tl.float32)
    tl.store(y_ptr + offs, x1 * cos - x2 * sin, mask=mask)
    tl.store(y_ptr + HALF + offs, x2 * cos + x1 * sin, mask=mask)


def turn_tokens(q, k, cos, sin):
    """Turn queries and keys, each a (B, H, T, D) view of a (B, T, H, D)."""
    out = []
    for x in (q, k):
        B, H, T, D = x.shape
        y = torch.empty_like(x)  # with the strides of x
        BLOCK_H = triton.next_power_of_2(H)
        args = x, cos, sin, y, T, H
        token_kernel[(B * T,)](*args, HALF=D // 2, BLOCK_H=BLOCK_H)
        out.append(y)
    return out


# %%
# Is it right?
# ------------
#
# A result is two products and a sum. Each rounds once to 24 bits, and so do the
# numbers of the tables. We allow :math:`10^{-5}`, 42 roundings between 4 and 8.

if __name__ == "__main__":
    q, k = (heads(2, 19, H, 64, dtype=torch.float32) for H in (5, 2))
    found = turn_tokens(q, k, *tables(19, 64, torch.float32))
    wide = [torch.cat([table] * 2, -1) for table in tables(19, 64)]
    for y, x in zip(found, rope_torch(q, k, *wide), strict=True):
        print(f"largest error {(y - x).abs().max():.1e}, allowed 1.0e-05")
        torch.testing.assert_close(y.double(), x, rtol=0, atol=1e-5)

# %%
# How fast?
# ---------
#
# We time 32 heads of queries and 8 of keys in eight sequences, in bfloat16. The
# roof is a copy of as many bytes. Rates count the bytes of the floor.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for T in (256, 2048, 8192):
        found = gpu_time(calls(T, Triton=turn_tokens)).items()
        rates = [f"{who} {rate(times, T):.0f}" for who, times in found]
        print(f"{T:5} tokens: {', '.join(rates)} GB/s")

# %%
# Any layout
# ----------
#
# The first kernel takes one layout. A model may have ``(B, H, T, D)`` in
# memory, or a slice of a larger projection. A copy would move as many bytes
# again. So the op's kernel gets the strides of batch, heads and positions. Only
# the numbers of a head have to lie side by side.
#
# In other layouts, the heads of one position need not be neighbours in memory.
# Then a program for each token is only one of many choices. The op's kernel
# turns a tile of heads and positions, ``BLOCK_H`` by ``BLOCK_T``:
#
# .. code-block:: text
#
#     cos, sin   (1, BLOCK_T, BLOCK_D)          BLOCK_D >= D / 2
#     x1, x2     (BLOCK_H, BLOCK_T, BLOCK_D)
#
# Each piece of the tables serves ``BLOCK_H`` heads. The op turns 4 heads, and
# 512 points of each. The table after the op has other tiles, on an H100: 1 head
# gains a little with 4096 tokens, and loses more with one. 32 heads gain a
# little with one token, and lose more with 4096 where heads are outside.

# %%
# Which program is next?
# ----------------------
#
# The GPU starts programs in the order of their numbers. So programs with
# neighbouring numbers work at the same time, and should read neighbours in
# memory. If heads are *inside*, ``(B, T, H, D)``, that is the next *group* of
# ``BLOCK_H`` heads. If they are *outside*, ``(B, H, T, D)``, that is the next
# ``BLOCK_T`` positions. But then each group reads the tables again, from a
# cache if they are still there. So one group goes along the positions of 2 MB
# of the tables, then the next group does, and so on. Only then come the
# positions of the next 2 MB. The strides of ``q`` tell the layout. Here 2 MB
# last for four times ``BLOCK_T`` positions, and a number is that of a program:
#
# .. code-block:: text
#
#     heads inside          heads outside
#
#     BLOCK_T  0   1  ...   BLOCK_T  0   1   2   3     4   5
#     group 0  0   3        group 0  0   1   2   3    12  13
#     group 1  1   4        group 1  4   5   6   7    14  15
#     group 2  2   5        group 2  8   9  10  11    16  17

# %%
# One launch for queries and keys
# -------------------------------
#
# There are often few heads of keys: models let four or eight heads of queries
# share one head of keys. A launch for the keys alone has little to do, and the
# GPU runs empty before it and after it. So one launch does both. It numbers
# groups of ``BLOCK_H`` heads, first those of ``q``, then those of ``k``. A
# program knows its tensor by the number of its group. Here are 32 heads of
# ``q`` and 8 of ``k``, in groups of four:
#
# .. code-block:: text
#
#     group      0      1      2   ...   7      8      9
#                q      q      q         q      k      k
#
# All threads of a program share this number, so all take the same branch of the
# ``if``.

# %%
# Which two numbers make a point?
# -------------------------------
#
# There are two answers. A model works only with the one that it was trained
# with:
#
# .. code-block:: text
#
#     halves (Llama, GPT-NeoX)          interleaved (RoFormer, GPT-J)
#
#     x0 x1 x2 x3 x4 x5 x6 x7           x0 x1 x2 x3 x4 x5 x6 x7
#      \__________/                      \__/  \__/  \__/  \__/
#         \__________/       ...
#
# A thread should load 16 bytes at a time. In an interleaved head, ``x1`` is
# every other number. Loads of every other number would fetch single elements.
# So the kernel loads the whole head, and ``tl.split`` parts the pairs in
# registers. Before the store, ``tl.join`` puts them together again.

# %%
# The backward turns back
# -----------------------
#
# The gradient of a rotation is the rotation back, by the negative angle:
#
# .. math:: \mathrm{d}x_1 = \mathrm{d}y_1 \cos + \mathrm{d}y_2 \sin, \qquad
#    \mathrm{d}x_2 = \mathrm{d}y_2 \cos - \mathrm{d}y_1 \sin.
#
# Only ``sin`` changes its sign. So with a flag, ``conjugate``, the op is its
# own backward, and has second derivatives too. Autograd keeps the tables, but
# neither ``q`` nor ``k``.

# %%
# Writing over the arguments
# --------------------------
#
# An engine that serves a model needs no gradient. It may write the results over
# ``q`` and ``k``, and save the memory for new tensors. A second op does that,
# ``rope_``. It names in ``mutates_args`` what it changes. An op that changes
# its arguments can have no backward (``triton_op.py``), so ``rope_`` refuses
# tensors that require a gradient. It also refuses expanded tensors, whose
# elements share memory: they would be turned twice.
#
# ``torch.compile`` looks into a ``triton_op`` and copies what the launch
# changes. Where ``q`` is a part of a larger tensor, that copy may
# `read out of bounds <https://github.com/pytorch/pytorch/pull/184050>`_. So
# ``rope_`` is a ``custom_op``, into which no compiler looks.

# %%
# The op
# ------
#
# Both ops share the kernel. A program turns four heads, at as many positions as
# have 512 points of a head. With four warps that is 16 points a thread, four
# loads of 16 bytes in half precision. ``rope`` is registered as on the page
# ``what_a_call_costs.py``: on a GPU a call goes straight to the launcher, and
# ``torch.compile`` looks into the ``triton_op``.

from triton_gallery_ops.rope import (
    ROPE_ACC,
    ROPE_NEAR,
    ROPE_TILE,
    _rope_kernel,
    _rope_run,
    rope,
    rope_,
)

# %%
# What did each step gain? The table has GB/s with queries and keys in two
# layouts: heads inside, ``(B, T, H, D)``, and heads outside, ``(B, H, T, D)``.
# There are 64 sequences with one new token, or 8 with 4096 tokens. The first
# kernel takes only heads inside. Then comes the op's kernel with other tiles. A
# tile's name has its heads and its points of each head. Next, the op's kernel
# has one launch for ``q`` and one for ``k``. In the row *by tiles*, all groups
# of heads take a tile before the next, in both layouts. The last line is the
# op.


def run(q, k, cos, sin, tile=ROPE_TILE):
    """Launch the op's kernel, with any tile."""
    out = torch.empty_like(q), torch.empty_like(k)
    _rope_run(_rope_kernel, q, k, cos, sin, *out, False, False, tile)
    return out


def apart(q, k, cos, sin):
    """Launch for q, then for k."""
    q_out, _ = run(q, k[:, :0], cos, sin)
    _, k_out = run(q[:, :0], k, cos, sin)
    return q_out, k_out


def by_tiles(q, k, cos, sin):
    """Launch once; all groups of heads take a tile, then the next tile."""
    global ROPE_NEAR
    kept, ROPE_NEAR = ROPE_NEAR, 0
    try:
        return run(q, k, cos, sin)
    finally:
        ROPE_NEAR = kept


STEPS = {
    f"tile {tile}": partial(run, tile=tile) for tile in [(1, 2048), (32, 64)]
}
STEPS |= {"the op, two launches": apart, "the op, by tiles": by_tiles}
STEPS["the op"] = rope


def ladder(inside, B, T, D=128):
    """Return a call of each step, by name."""
    q, k = heads(B, T, 32, D), heads(B, T, 8, D)
    if not inside:
        q, k = q.contiguous(), k.contiguous()
    steps = {"first kernel": turn_tokens} | STEPS if inside else STEPS
    args = q, k, *tables(T, D, q.dtype)
    return {name: partial(step, *args) for name, step in steps.items()}


if __name__ == "__main__":
    for inside in (True, False):
        found = ladder(inside, B=2, T=9, D=64)
        expected = found.pop("the op")()
        for step in found.values():
            for one, other in zip(step(), expected, strict=True):
                torch.testing.assert_close(one, other)

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = {}
    for inside in (True, False):
        for B, T in ((64, 1), (8, 4096)):
            found = gpu_time(ladder(inside, B, T)).items()
            column = f"{'inside' if inside else 'outside'}, {B} x {T}"
            table[column] = {who: rate(ms, T, B) for who, ms in found}
    print(pd.DataFrame(table).round().to_string(na_rep="-"))

# %%
# With one token the two layouts are the same, and where heads are inside, the
# op goes by tiles. So the order matters in the last column alone. There, going
# along the positions is faster. The tables of 4096 positions have 1 MB, so this
# column does not show what the limit of 2 MB gains.

# %%
# Proof
# -----
#
# A point in the plane is a complex number, and turning a point is a product.
# That product is our reference, in float64. We compare values and gradients of
# every dtype, in both pairings and layouts. The two products of a result may
# cancel, so we measure the error against the length of the point. We allow
# :math:`10^{-6}` of this length, 16 roundings to 24 bits, and two roundings to
# the result's dtype. The op in place has to agree with the other bit for bit.


def rope_complex(x, cos, sin, interleaved=False):
    """Return x in float64, turned as complex numbers."""
    x = x.double()
    x = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    turn = torch.complex(cos.double(), sin.double())
    y = torch.view_as_real(torch.view_as_complex(x.contiguous()) * turn)
    return (y if interleaved else y.mT).flatten(-2)


def assert_close(y, x, cos, sin, interleaved=False):
    """Compare with the reference."""
    expected = rope_complex(x, cos, sin, interleaved)
    points = expected.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    length = points.norm(dim=-1 if interleaved else -2, keepdim=True)
    length = length.expand_as(points).flatten(-2)
    allowed = (1e-6 + torch.finfo(y.dtype).eps) * length
    assert ((y.double() - expected).abs() <= allowed).all()


def prove(dtype, interleaved, inside, B=2, T=9, D=80):
    q, k = heads(B, T, 6, D, dtype), heads(B, T, 2, D, dtype)
    dq, dk = heads(B, T, 6, D, dtype), heads(B, T, 2, D, dtype)
    if not inside:
        q, dk = q.contiguous(), dk.contiguous()
    cos, sin = tables(T, D)
    leaves = q.requires_grad_(), k.requires_grad_()
    out = rope(*leaves, cos, sin, interleaved)
    grads = torch.autograd.grad(out, leaves, (dq, dk))
    for y, x in zip(out, leaves, strict=True):
        assert_close(y.detach(), x.detach(), cos, sin, interleaved)
    for dx, dy in zip(grads, (dq, dk), strict=True):
        assert_close(dx, dy, cos, -sin, interleaved)
    in_place = [x.detach().clone() for x in leaves]
    rope_(*in_place, cos, sin, interleaved)
    assert all(torch.equal(a, b) for a, b in zip(in_place, out, strict=True))


if __name__ == "__main__":
    for dtype in ROPE_ACC:
        for interleaved in (False, True):
            for inside in (False, True):
                prove(dtype, interleaved, inside)
    q, k = heads(1, 2, 2, 4, torch.float64), heads(1, 2, 1, 4, torch.float64)
    leaves = q.requires_grad_(), k.requires_grad_(), *tables(2, 4)
    for interleaved in (False, True):
        op = partial(rope, interleaved=interleaved)
        assert torch.autograd.gradcheck(op, leaves)
        assert torch.autograd.gradgradcheck(op, leaves, fast_mode=True)
    rope(q[:, :, :0], k[:, :, :0], *tables(0, 4))  # no tokens
else:  # imported: a glance
    prove(torch.float32, interleaved=False, inside=True, B=1, T=5, D=16)

# %%
# This is what RoPE is for: the product of one query and one key at the same
# distance is the same at all positions.

if __name__ == "__main__":
    q = heads(1, 1, 2, 16, torch.float64).expand(1, 2, 20, 16)
    turned, _ = rope(q, q[:, :0], *tables(20, 16))
    scores = turned[0, 0] @ turned[0, 1].T
    seen = [scores.diagonal(n) for n in range(-19, 20)]
    spread = max((line.max() - line.min()).item() for line in seen)
    print(f"products at one distance differ by {spread:.0e} at most")
    assert spread < 1e-12

# %%
# An error names what an op does not take:

if __name__ == "__main__":
    q, (cos, sin) = heads(1, 3, 4, 8), tables(3, 8)
    for op, bad in (
        (rope, (q, q.half(), cos, sin)),
        (rope, (q, q, cos, sin[:2])),
        (rope_, (q.detach().requires_grad_(), q, cos, sin)),
        (rope_, (q[:, :1].expand(1, 4, 3, 8), q, cos, sin)),
    ):
        try:
            op(*bad)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark has eight sequences of ``T`` tokens, with 32 heads of queries
# and 8 of keys. A head has 128 numbers in bfloat16, and heads are inside. The
# backward is called through autograd. ``Roof`` is a copy of as many bytes.

SIZES = [256, 1000, 2048, 4096, 8192, 16384]


def calls_backward(T, B=8, D=128):
    q, k, dq, dk = (heads(B, T, H, D) for H in (32, 8, 32, 8))
    leaves = q.requires_grad_(), k.requires_grad_()
    cos, sin = tables(T, D, q.dtype)
    wide = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    torch.compiler.reset()
    fast = torch.compile(rope_torch, dynamic=False, fullgraph=True)
    out = {
        "Triton": rope(*leaves, cos, sin),
        "PyTorch": rope_torch(*leaves, *wide),
        "torch.compile": fast(*leaves, *wide),
    }
    grad = partial(torch.autograd.grad, retain_graph=True)
    x = torch.cat([dq.flatten(), dk.flatten()])
    found = {who: partial(grad, y, leaves, (dq, dk)) for who, y in out.items()}
    return found | {"Roof": partial(torch.empty_like(x).copy_, x)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    ours = {"Triton": rope, "Triton, in place": rope_}
    times = {T: gpu_time(calls(T, **ours)) for T in SIZES}
    results = rate_table(times, "T", "GB/s", lambda T: rate([1], T))
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="T", columns="series", values="GB/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {T: gpu_time(calls_backward(T)) for T in SIZES}
    results_backward = rate_table(times, "T", "GB/s", lambda T: rate([1], T))
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(index="T", columns="series", values="GB/s")
    wide.plot(logx=True, title="backward")

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["T"] == 4096].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The kernel moves the floor's bytes and the tables. Near the roof, little is
# left to gain. With few tokens there is little to move: a copy does not reach
# its full rate, and our lines can lie above it. The op is ahead of
# ``torch.compile`` here, most of all backward. With heads outside,
# ``torch.compile`` may be ahead forward: see *Beside other libraries* below.
# ``rope_`` moves as many bytes as ``rope``: it saves memory, not traffic. With
# few tokens it is faster all the same.

# %%
# Break it: an op that does not declare what it changes
# -----------------------------------------------------
#
# PyTorch counts the changes of each tensor, and relies on what ops declare. If
# a tensor that autograd kept was changed, the backward stops with an error.
# Here ``exp`` keeps its result. We change that result by ``rope_``, and by an
# op that declares nothing:


@custom_op("triton_gallery::rope_undeclared", mutates_args=())
def rope_undeclared(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    _rope_run(_rope_kernel, q, k, cos, sin, q, k, False, False)


if __name__ == "__main__":
    for op in (rope_, rope_undeclared):
        x = torch.zeros(1, 1, 3, 2, device=DEVICE, requires_grad=True)
        y = x.exp()
        op(y.detach(), y.detach()[:, :0], *tables(3, 2))
        try:
            (dx,) = torch.autograd.grad(y.sum(), x)
            print(op._name, "a gradient of", dx.flatten().tolist())
        except RuntimeError as error:
            print(op._name, str(error).partition(":")[0])

# %%
# The gradient should be 1 everywhere. With the second op it is wrong, without
# an error. Compilers order reads and writes by the same declaration, and
# ``torch.library.opcheck`` tests the declaration.

# %%
# Go further
# ----------
#
# 1. Some models turn only the first 32 numbers of a head. Which op is good for
#    that?
# 2. Packed sequences begin anywhere. What has to change in the kernel?
# 3. How many of the positions 0 to 4095 are still different numbers in
#    bfloat16?
#
# To read on:
#
# * ``kv_cache_write.py`` turns the keys while it writes them to a cache.
# * The paper: https://arxiv.org/abs/2104.09864

# %%
# Answers
# -------
#
# **1.** ``rope_(q[..., :32], k[..., :32], cos, sin)``, with tables of 16
# columns. ``rope`` would return the 32 numbers alone, and somebody would have
# to concatenate them with the rest.
#
# **2.** The kernel loads each token's position, and takes that row of the
# tables instead of row ``t``.
#
# **3.** 769. A bfloat16 has 8 binary digits. Up to 256 all positions are there,
# then every second one, from 512 on every fourth, and so on. So compute the
# angles in float32 at least.
