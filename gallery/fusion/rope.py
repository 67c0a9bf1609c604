# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
RoPE
====

Rotary position embeddings turn queries and keys by angles that grow with the
position. Nearly every language model does it in every layer, and PyTorch has
no op for it: models spell it out, and read and write everything five times.

After this page you can

* turn queries and keys in one launch, in whatever layout they lie;
* write an op that changes its arguments, and know who reads its declaration.
"""

# sphinx_gallery_tags = ["elementwise", "autograd", "custom op", "memory bound"]
import os
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import custom_op, triton_op, wrap_triton

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in bytes
# --------------------
#
# A head of ``D`` numbers is ``D / 2`` points in the plane. At position
# :math:`t` the point :math:`i` is turned by the angle :math:`t\,\theta_i`:
#
# .. math:: y_1 = x_1 \cos t\theta_i - x_2 \sin t\theta_i, \qquad
#    y_2 = x_2 \cos t\theta_i + x_1 \sin t\theta_i, \qquad
#    \theta_i = 10000^{-2i/D}.
#
# Positions enter the product of a turned query and a turned key by their
# distance alone. Which two numbers make a point? There are two answers, and a
# model works with the one that it was trained with:
#
# .. code-block:: text
#
#     halves (Llama, GPT-NeoX)          interleaved (RoFormer, GPT-J)
#
#     x0 x1 x2 x3 x4 x5 x6 x7           x0 x1 x2 x3 x4 x5 x6 x7
#      \__________/                      \__/  \__/  \__/  \__/
#         \__________/       ...
#
# ``q`` is ``(B, Hq, T, D)``, ``k`` is ``(B, Hk, T, D)``, often with fewer
# heads. Sines and cosines are tables, ``(T, D // 2)``. Models on Hugging Face
# have each twice, side by side, and ours is ``cos[0, :, : D // 2]`` of theirs.
# Comments count reads and writes, in units of ``q`` and ``k``:


def tables(T, D, dtype=torch.float64):
    theta = 10_000 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    angles = torch.outer(torch.arange(T, dtype=torch.float64), theta)
    return [f(angles).to(DEVICE, dtype) for f in (torch.cos, torch.sin)]


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)  # 1/2 + 1/2, then 1 + 1


def rope_torch(q, k, cos, sin):  # with double tables
    q_out = q * cos + rotate_half(q) * sin  # 1 + 1, 1 + 1, and 2 + 1
    k_out = k * cos + rotate_half(k) * sin
    return q_out, k_out


# %%
# 10 in all, and a kernel has to read once and write once: 2. The tables are
# shared by all heads and sequences. A point in the plane is a complex number, a
# rotation is a product: that is a reference for both pairings.


def rope_complex(x, cos, sin, interleaved):
    x = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    y = torch.view_as_complex(x.contiguous()) * torch.complex(cos, sin)
    y = torch.view_as_real(y)
    return (y if interleaved else y.mT).flatten(-2)


# %%
# The kernel
# ----------
#
# A program turns ``BLOCK_H`` heads at ``BLOCK_T`` positions. It loads the piece
# of the tables once, and broadcasting lays it over the heads:
#
# .. code-block:: text
#
#     cos, sin   (1, BLOCK_T, BLOCK_D)
#     x1, x2     (BLOCK_H, BLOCK_T, BLOCK_D)      BLOCK_D >= D / 2
#
# Alone, a head would load as many bytes of tables as of itself. The heads of
# ``k`` are numbered behind those of ``q``: one launch does both.
#
# A thread should move 16 bytes at a time. In halves, ``x1`` and ``x2`` are two
# loads. Interleaved, ``x1`` is every other element: load all, and ``tl.split``
# them, which moves nothing between threads, as each has whole pairs. Strides in
# units of ``UNIT`` tell the compiler what is aligned (``swiglu.py``).


@triton.jit
def turn(x_ptrs, out_ptrs, rows, cos, sin, D, BLOCK_D, INTERLEAVED):
    if INTERLEAVED:
        offs_d = tl.arange(0, 2 * BLOCK_D)[None, None, :]
        mask = rows & (offs_d < D)
        x = tl.load(x_ptrs + offs_d, mask).to(cos.dtype)
        pairs = tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_D, 2))
        x1, x2 = tl.split(pairs)
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        tl.store(out_ptrs + offs_d, tl.reshape(y, x.shape), mask)
    else:
        offs_d = tl.arange(0, BLOCK_D)[None, None, :]
        mask = rows & (offs_d < D // 2)
        x1 = tl.load(x_ptrs + offs_d, mask).to(cos.dtype)
        x2 = tl.load(x_ptrs + D // 2 + offs_d, mask).to(cos.dtype)
        tl.store(out_ptrs + offs_d, x1 * cos - x2 * sin, mask)
        tl.store(out_ptrs + D // 2 + offs_d, x2 * cos + x1 * sin, mask)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    T,
    Hq,
    Hk,
    stride_qb,  # strides are in units of UNIT elements
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_cos,
    stride_sin,
    stride_q_out_b,
    stride_q_out_h,
    stride_q_out_t,
    stride_k_out_b,
    stride_k_out_h,
    stride_k_out_t,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ACC: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    groups_q, groups_k = tl.cdiv(Hq, BLOCK_H), tl.cdiv(Hk, BLOCK_H)
    # In int32 products overflow, in tensors of 2**31 elements.
    pid = tl.program_id(axis=0).to(tl.int64)
    group, pid = pid % (groups_q + groups_k), pid // (groups_q + groups_k)
    b, tile = pid // tl.cdiv(T, BLOCK_T), pid % tl.cdiv(T, BLOCK_T)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)[None, :, None]
    offs_d = tl.arange(0, BLOCK_D)[None, None, :]
    mask = (t < T) & (offs_d < D // 2)  # (1, BLOCK_T, BLOCK_D)
    cos = tl.load(cos_ptr + t * stride_cos * UNIT + offs_d, mask).to(ACC)
    sin = tl.load(sin_ptr + t * stride_sin * UNIT + offs_d, mask).to(ACC)
    if CONJUGATE:
        sin = -sin
    h = group * BLOCK_H + tl.arange(0, BLOCK_H)[:, None, None]
    if group < groups_q:
        x = b * stride_qb + h * stride_qh + t * stride_qt
        out = b * stride_q_out_b + h * stride_q_out_h + t * stride_q_out_t
        x_ptrs, out_ptrs = q_ptr + x * UNIT, q_out_ptr + out * UNIT
        rows = (h < Hq) & (t < T)  # (BLOCK_H, BLOCK_T, 1)
        turn(x_ptrs, out_ptrs, rows, cos, sin, D, BLOCK_D, INTERLEAVED)
    else:
        h -= groups_q * BLOCK_H
        x = b * stride_kb + h * stride_kh + t * stride_kt
        out = b * stride_k_out_b + h * stride_k_out_h + t * stride_k_out_t
        x_ptrs, out_ptrs = k_ptr + x * UNIT, k_out_ptr + out * UNIT
        rows = (h < Hk) & (t < T)
        turn(x_ptrs, out_ptrs, rows, cos, sin, D, BLOCK_D, INTERLEAVED)


# %%
# The launcher
# ------------
#
# Attention layers compute ``(B, T, H, D)`` and transpose. So any strides will
# do, except in the last dimension. A program turns 512 points of each of 4
# heads, a thread 16: in half precision these are 4 loads of 16 bytes.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}


def check(q, k, cos, sin):
    tensors = q, k, cos, sin
    dtypes = [t.dtype for t in tensors]
    shapes = [tuple(t.shape) for t in tensors]
    if q.dtype != k.dtype or any(dtype not in ACC for dtype in dtypes):
        raise TypeError(f"takes one floating dtype and tables, not {dtypes}")
    (B, _, T, D), Hk = q.shape if q.ndim == 4 else [0] * 4, k.shape[1:2]
    fit = (B, *Hk, T, D), (T, D // 2), (T, D // 2)
    if q.ndim != 4 or D % 2 or shapes[1:] != [*fit]:
        raise ValueError(f"q, k, cos and sin do not fit together: {shapes}")
    if any(t.device != q.device for t in tensors):
        raise ValueError("takes tensors on one device")


def rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def launch(kernel, q, k, cos, sin, q_out, k_out, interleaved, conjugate):
    (B, Hq, T, D), Hk = q.shape, k.shape[1]
    if q.numel() + k.numel() == 0:
        return
    cos, sin = rows(cos), rows(sin)
    tensors = q, k, cos, sin, q_out, k_out
    strides = [n for t in tensors for n in t.stride()[:-1]]
    UNIT = 16 // q.element_size()
    UNIT = UNIT if all(n % UNIT == 0 for n in (D // 2, *strides)) else 1
    BLOCK_D = triton.next_power_of_2(int(D) // 2)
    BLOCK_H, BLOCK_T = 4, max(1, 512 // BLOCK_D)
    groups = triton.cdiv(Hq, BLOCK_H) + triton.cdiv(Hk, BLOCK_H)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        kernel[(B * triton.cdiv(T, BLOCK_T) * groups,)](
            *(*tensors, T, Hq, Hk, *(n // UNIT for n in strides)),
            *(int(D), interleaved, conjugate, ACC[q.dtype], UNIT),
            *(BLOCK_H, BLOCK_T, BLOCK_D),
        )


# %%
# The op with a backward
# ----------------------
#
# The gradient of a rotation is the rotation back: ``sin`` changes its sign.
# With the flag ``conjugate`` the op is its own backward, and that has one too.
# Autograd keeps neither ``q`` nor ``k``. Results lie as these do.


@triton_op("triton_gallery::rope", mutates_args={})
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, turned by the angles of the tables, or back."""
    check(q, k, cos, sin)
    q, k = rows(q), rows(k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    tensors = q, k, cos, sin, q_out, k_out
    launch(wrap_triton(rope_kernel), *tensors, interleaved, conjugate)
    return q_out, k_out


def save(ctx, inputs, output):
    *_, cos, sin, ctx.interleaved, ctx.conjugate = inputs
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope has no gradients for cos and sin")
    ctx.save_for_backward(cos, sin)


def backward(ctx, dq, dk):
    flags = ctx.interleaved, not ctx.conjugate
    return *rope(dq, dk, *ctx.saved_tensors, *flags), *[None] * 4


rope.register_autograd(backward, setup_context=save)

# %%
# The op that writes over its arguments
# -------------------------------------
#
# In place takes no memory, which is for serving. ``mutates_args`` names what
# changes. The op can have no backward (``triton_op.py``) and refuses tensors
# that require one, when traced too, by its *fake* function. It refuses elements
# that share memory: they would be turned more than once.
#
# Compilers look into a ``triton_op`` and copy what the launch changes. Where
# ``q`` is a part of a tensor, that may `read out of bounds
# <https://github.com/pytorch/pytorch/pull/184050>`_. So it is a ``custom_op``,
# which has no need for ``wrap_triton``: there it would only launch more slowly.


def check_in_place(q, k, cos, sin, interleaved=False, conjugate=False):
    check(q, k, cos, sin)
    if any(t.requires_grad for t in (q, k, cos, sin)):
        raise ValueError("rope_ has no backward: use rope")
    for x in (q, k):
        expanded = any(x.stride(i) == 0 and x.shape[i] > 1 for i in range(4))
        if expanded or x.stride(-1) != 1:
            raise ValueError("rope_ takes contiguous heads that lie apart")


@custom_op("triton_gallery::rope_", mutates_args={"q", "k"})
def rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
) -> None:
    """Turn q and k in place."""
    check_in_place(q, k, cos, sin)
    launch(rope_kernel, q, k, cos, sin, q, k, interleaved, conjugate)


rope_.register_fake(check_in_place)

if __name__ == "__main__":
    print(torch.ops.triton_gallery.rope_.default._schema)

# %%
# The check
# ---------
#
# Against the complex product in float64, and its autograd. Two products, each
# to within :math:`10^{-6}`, may cancel, hence ``atol``; then comes the dtype.


def inputs(B, Hq, Hk, T, D, dtype=torch.float64):
    """Return q and k, and their gradients, as attention layers have them."""
    new = [torch.randn(B, T, H, D, device=DEVICE) for H in (Hq, Hk) * 2]
    q, k, dq, dk = (x.to(dtype).transpose(1, 2) for x in new)
    return [q.requires_grad_(), k.requires_grad_()], [dq, dk]


def compare(dtype, *shape, interleaved):
    leaves, gradients = inputs(*shape, dtype=dtype)
    cos, sin = tables(*shape[-2:])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = [rope_complex(x, cos, sin, interleaved) for x in wide]
    out = rope(*leaves, cos, sin, interleaved)
    got = [*out, *torch.autograd.grad(out, leaves, gradients)]
    gradients = [x.double() for x in gradients]
    exact += torch.autograd.grad(exact, wide, gradients)
    rtol = 1e-6 + torch.finfo(dtype).eps
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=1e-5)
    in_place = [x.detach().clone() for x in leaves]
    rope_(*in_place, cos, sin, interleaved)
    assert all(torch.equal(a, b) for a, b in zip(in_place, out, strict=True))


torch.manual_seed(0)
compare(torch.bfloat16, 1, 5, 2, 19, 16, interleaved=False)
compare(torch.float32, 1, 5, 2, 19, 16, interleaved=True)

if __name__ == "__main__":
    (q, k), _ = inputs(1, 2, 1, 2, 4)
    angles = tables(2, 4)
    for interleaved in (False, True):
        for dtype in ACC:
            compare(dtype, 2, 6, 2, 19, 80, interleaved=interleaved)
        op = partial(rope, interleaved=interleaved)
        assert torch.autograd.gradcheck(op, (q, k, *angles))
        assert torch.autograd.gradgradcheck(op, (q, k, *angles), fast_mode=True)

# %%
# Break it: an op that does not say so
# ------------------------------------
#
# By the declaration autograd counts changes, and stops when a tensor that it
# kept has one. Compilers order reads and writes by it, ``opcheck`` tests it.
# Declare nothing, and turn what the exponential kept for its backward:


@custom_op("triton_gallery::rope_undeclared", mutates_args=())
def rope_undeclared(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    launch(rope_kernel, q, k, cos, sin, q, k, False, False)


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
# The gradient should be 1 everywhere. In code that is not an op,
# ``torch.autograd.graph.increment_version`` tells autograd of a change.
#
# In place under a compiler
# -------------------------
#
# ``torch.compile`` first makes a graph in which nothing changes: the op becomes
# one that returns turned copies. Where nobody reads the old values later, the
# copies are taken away again. Bytes at the peak, in units of ``x``:


def turn_parts(x, cos, sin):
    x = x + 1
    rope_(x[:, :32], x[:, 32:], cos, sin)
    return x


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = torch.randn(8, 40, 1024, 128, device=DEVICE).bfloat16()
    for kind, compiler in (("eager", lambda f: f), ("compiled", torch.compile)):
        call = partial(compiler(turn_parts), x, *tables(1024, 128, x.dtype))
        call()
        torch.cuda.reset_peak_memory_stats()
        peak = -torch.cuda.memory_allocated()
        call()
        print(kind, (peak + torch.cuda.max_memory_allocated()) / x.nbytes)

# %%
# The benchmark
# -------------
#
# Eight sequences of ``T`` tokens, 32 heads of queries and 8 of keys with 128
# dimensions, bfloat16, transposed. GB/s count ``q``, ``k``, their results and
# the tables once. ``Roof`` is a copy of as many bytes. Backwards run through
# autograd. The ratios are those of the longest ``T``.

SIZES = [256, 1000, 4096, 8192, 16384]
NAMES = ["Triton", "Triton, in place", "PyTorch", "torch.compile", "Roof"]


def bench(call, *tensors):
    times = triton.testing.do_bench(call, quantiles=[0.5, 0.8, 0.2])
    moved = sum(2 * x.nbytes for x in tensors)
    return [1e-6 * moved / t for t in times]


@triton.testing.perf_report(
    [
        triton.testing.Benchmark(
            *(["T"], SIZES, "provider", names, names, name),
            args={"gradient": gradient},
            ylabel="GB/s",
            x_log=True,
        )
        for name, names, gradient in (
            ("rope", NAMES, False),
            ("rope_backward", [NAMES[0], *NAMES[2:]], True),
        )
    ]
)
def benchmark(T, provider, gradient):
    leaves, gradients = inputs(8, 32, 8, T, 128, dtype=torch.bfloat16)
    angles = tables(T, 128, torch.bfloat16)
    double = [torch.cat([t, t], -1) for t in angles]
    torch.compiler.reset()  # the ninth shape would raise an error
    fast = torch.compile(rope_torch, fullgraph=True, dynamic=False)
    op = [rope, rope_, rope_torch, fast, None][NAMES.index(provider)]
    arguments = angles if provider in NAMES[:2] else double
    if provider == "Roof":
        x = torch.cat([x.flatten() for x in (*gradients, angles[0])])
        call = partial(torch.empty_like(x).copy_, x)
    elif gradient:
        graph = op(*leaves, *arguments), leaves, gradients
        call = partial(torch.autograd.grad, *graph, retain_graph=True)
    else:
        call = partial(op, *(x.detach() for x in leaves), *arguments)
    return bench(call, *leaves, angles[0])


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_backward = benchmark.run(True, True, return_df=True)
    for table in (results, results_backward):
        row = table.set_index("T").iloc[-1].rename(lambda x: x.split(" (")[0])
        peer, roof = max(row["PyTorch"], row["torch.compile"]), row["Roof"]
        ratios = {"to the best peer": row / peer, "to the roof": row / roof}
        print(pd.DataFrame(ratios).filter(like="Triton", axis=0).round(3))

# %%
# In place on parts of one tensor, ``T = 8192``, in either order of heads and
# tokens, in halves and interleaved; last the formula and a copy, compiled:


@partial(torch.compile, dynamic=False)
def write_over(q, k, cos, sin):
    for x, y in zip((q, k), rope_torch(q, k, cos, sin), strict=True):
        x.copy_(y)


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = torch.randn(8, 40, 8192, 128, device=DEVICE).bfloat16()
    angles = tables(8192, 128, x.dtype)
    double = [torch.cat([t, t], -1) for t in angles]
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        apart = x.permute(order).contiguous().permute(order)
        parts = apart.split([32, 8], dim=1)
        calls = [partial(rope_, *parts, *angles, pairing) for pairing in (0, 1)]
        calls.append(partial(write_over, *parts, *double))
        print(order, *(round(bench(call, x, angles[0])[0]) for call in calls))

# %%
# Reading the result
# ------------------
#
# From 8192 tokens on memory bounds it, and ``torch.compile`` too, but forward
# only. Backward, it makes contiguous gradients of transposed ones. In place,
# results go to new memory, then into a new ``x``. PyTorch is slower than its
# bytes explain: its kernels load single elements of transposed tensors.
#
# With few tokens the GPU waits for Python; ``torch.compile`` needs least.
#
# Go further
# ----------
#
# 1. Some models turn the first 32 dimensions only. Which op is good for that?
# 2. Packed sequences begin anywhere. What has to change in the kernel?
# 3. How many of the positions 0 to 4095 are left in bfloat16?
#
# Next is ``dropout.py``. To read on: `the paper
# <https://arxiv.org/abs/2104.09864>`_.

# %%
# Answers
# -------
#
# **1.** ``rope_(q[..., :32], k[..., :32], cos, sin)``, with tables of 16
# columns. After the functional op somebody would have to concatenate.
#
# **2.** It loads each token's position, and ``t * stride_cos`` uses that.
#
# **3.** 769. With 8 bits for a number all are there up to 256, then every
# second one, from 512 every fourth. So compute tables in float32 at least.
