# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute the gradients of attention in two passes that are one kernel with its
# arguments exchanged, and see what Hopper's matrix units need for it."""
# dtypes = ["float16", "bfloat16"]
# backward = false
# deterministic = true
# longer = "it is two passes, whose warps have two roles"
# gpu = "==9.0"
# ///
r"""
The backward of attention on Hopper
===================================

``flash_attention.py`` derives the gradients of attention and computes them in
one pass with atomic additions, or in two passes without. This page looks at the
two passes. One kernel does both: the second pass exchanges the arguments and
clears a flag. The op at the end is that kernel in Gluon, Triton's lower-level
language, for Hopper (NVIDIA's H100, H200). Elsewhere, take ``flash_attention``.

After this page you can

* say which five products the backward has, and why two passes compute seven;
* write one pass, and get the other one by exchanging its arguments;
* choose between a tile of scores and its transpose, so that the next product
  has its left operand in registers already.
"""

# sphinx_gallery_tags = ["attention", "compute bound", "TMA", "Gluon"]
import math
import os
from functools import partial

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

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

# %%
# In PyTorch
# ----------
#
# A head has queries ``q``, keys ``k`` and values ``v``, and its result ``out``
# has the gradient ``do``. We are given two numbers for each query: ``lse``, the
# logarithm of its sum of exponentials, and ``delta``, the dot product of its
# rows of ``do`` and ``out``. The rest is five matrix products, ``@``:

rng = torch.Generator(device=DEVICE).manual_seed(0)


def exact(do, q, k, v, lse, delta):
    """Return the gradients of q, k and v in float64."""
    do, q, k, v, lse, delta = (t.double() for t in (do, q, k, v, lse, delta))
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (do @ v.mT - delta[..., None]) * scale
    return ds @ k, ds.mT @ q, p.mT @ do


def inputs(heads, L, D):
    """Return do, q, k and v of (heads, L, D), lse and delta."""
    shape = 4, heads, L, D
    do, q, k, v = torch.randn(shape, generator=rng, device=DEVICE).half()
    lse = torch.empty(heads, L, device=DEVICE)
    for head in range(heads):  # not all at once: scores take memory
        s = q[head].float() @ k[head].float().T * D**-0.5
        lse[head] = s.logsumexp(-1)
    delta = (do.float() * sdpa(q, k, v)).sum(-1)  # sdpa: PyTorch's attention
    return do, q, k, v, lse, delta


if __name__ == "__main__":
    for L in (1024, 16384):
        flop = 5 * 2 * L * L * 128
        nbytes = 7 * 2 * L * 128  # do, q, k, v in; dq, dk, dv out; once
        print(f"{L:5} tokens: {flop / nbytes:.0f} operations a byte")

# %%
# By its data sheet, an H200 does about 200 operations in the time that a byte
# takes. Both lengths are above that: products are the limit, and memory is not.

# %%
# The first kernel
# ----------------
#
# A program keeps ``N`` keys and values, and goes along all queries, ``M`` a
# step. The sums ``dk`` and ``dv`` stay in registers. Scores are *transposed*:
#
# .. code-block:: text
#
#     left operand      right operand           result
#
#     k    (N, D)       q.T  (D, M)       ->    s.T          (N, M)
#     v    (N, D)       do.T (D, M)       ->    dp.T         (N, M)
#     p.T  (N, M)       do   (M, D)       ->    add to dv    (N, D)
#     ds.T (N, M)       q    (M, D)       ->    add to dk    (N, D)
#
# So ``p.T`` and ``ds.T``, named ``p`` and ``ds`` in the kernel, are the next
# left operands as they are. On Hopper a left operand may come from registers; a
# right one must be in shared memory.


@triton.jit
def keys_kernel(
    k_ptr,
    v_ptr,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    L,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    # This head's first row, in int64: times D, it may pass 2**31.
    base = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]  # (1, D)
    own = base + tl.program_id(axis=0) * N + tl.arange(0, N)[:, None]  # (N, 1)
    k = tl.load(k_ptr + own * D + offs_d)  # (N, D)
    v = tl.load(v_ptr + own * D + offs_d)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, L, M):
        row = base + start + tl.arange(0, M)  # (M,)
        q = tl.load(q_ptr + row[:, None] * D + offs_d)  # (M, D)
        do = tl.load(do_ptr + row[:, None] * D + offs_d)
        lse = tl.load(lse_ptr + row)[None, :]  # (1, M)
        delta = tl.load(delta_ptr + row)[None, :]
        p = tl.exp(tl.dot(k, q.T) * scale - lse)  # (N, M)
        ds = p * (tl.dot(v, do.T) - delta)
        dv = tl.dot(p.to(do.dtype), do, dv)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + own * D + offs_d, dk * scale)  # ds lacked scale
    tl.store(dv_ptr + own * D + offs_d, dv)  # in float16: stores convert


def keys_pass(do, q, k, v, lse, delta, kernel=keys_kernel, M=64, N=64):
    """Return dk and dv of contiguous (heads, L, D); M and N divide L."""
    heads, L, D = k.shape
    assert L % M == L % N == 0  # no load has a mask
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tensors = k, v, q, do, lse, delta, dk, dv
    sizes = D**-0.5, L, D, M, N
    # A group of four warps issues a product. Two stages load a step ahead.
    kernel[L // N, heads](*tensors, *sizes, num_warps=4, num_stages=2)
    return dk, dv


# %%
# Is it right?
# ------------
#
# Rounding ``p``, ``ds`` and the result costs up to :math:`2^{-11}` each. We
# allow :math:`2^{-9}` of the largest element. This is a rule of thumb.


def show_errors(names, found, right):
    """Print the largest error of gradients, and assert that it is small."""
    for name, grad, best in zip(names.split(), found, right, strict=True):
        atol = 2**-9 * best.abs().max().item()
        error = (grad - best).abs().max().item()
        print(f"{name}: largest error {error:.1e}, allowed {atol:.1e}")
        torch.testing.assert_close(grad.double(), best, rtol=0, atol=atol)


if __name__ == "__main__":
    x = inputs(2, 192, 64)
    show_errors("dk dv", keys_pass(*x), exact(*x)[1:])

# %%
# How fast?
# ---------
#
# There are eight sequences of 1024 tokens, or one of 8192, with 32 heads of 64
# or 16 of 128. The rate is the four products' operations divided by GPU time.


def rate_of(passes):
    """Print TFLOP/s of calls, each with the number of products to count."""
    rates = {}
    for L, D in ((1024, 64), (1024, 128), (8192, 128)):
        heads = 8192 // L * 2048 // D
        x = inputs(heads, L, D)
        calls = {name: partial(call, *x) for name, (call, _) in passes.items()}
        times = gpu_time(calls, turns=20)
        product = 2e-9 * heads * L * L * D
        rates[f"{L} tokens, heads of {D}"] = {
            name: round(count * product / times[name][0])
            for name, (_, count) in passes.items()
        }
    print("TFLOP/s", pd.DataFrame(rates).T.to_string(), sep="\n")


if __name__ == "__main__" and DEVICE.type == "cuda":
    rate_of({"pass of keys": (keys_pass, 4)})

# %%
# And dq?
# -------
#
# ``dq`` is a sum over keys, so no program above has all of its terms. Each
# could add its part to ``dq`` in memory, with ``tl.atomic_add``; the order of
# the additions, and so the last bits, would differ from run to run. Instead, a
# second pass keeps queries and goes along keys. It computes ``s`` and ``dp``
# again: seven products in all.
#
# This pass needs no kernel of its own. A program keeps ``N`` rows of ``a`` and
# ``b``, and goes along ``x`` and ``y``, ``M`` a step. The last columns are its
# products:
#
# .. code-block:: text
#
#     pass             a     b     x     y     a @ x.T   b @ y.T  ds @ x
#
#     of keys          k     v     q     do    s.T       dp.T     dk
#     of queries       q     do    k     v     s         dp       dq
#
# Here ``ds`` is the tile that the pass computes: ``ds.T`` in the pass of keys,
# where a row is a key, and ``ds`` in the pass of queries. The flag ``KEYS`` is
# for what differs. The pass of keys has one more product, ``p @ y`` for ``dv``.
# And ``lse`` and ``delta``, which belong to queries, are for columns of its
# tile; in the pass of queries they are for rows.


@triton.jit
def pass_kernel(
    a_ptr,
    b_ptr,
    x_ptr,
    y_ptr,
    lse_ptr,
    delta_ptr,
    da_ptr,
    db_ptr,
    scale,
    L,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    KEYS: tl.constexpr,
):
    base = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]
    own = base + tl.program_id(axis=0) * N + tl.arange(0, N)[:, None]
    a = tl.load(a_ptr + own * D + offs_d)  # (N, D)
    b = tl.load(b_ptr + own * D + offs_d)
    da = tl.zeros((N, D), dtype=tl.float32)
    db = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, L, M):
        row = base + start + tl.arange(0, M)[:, None]  # (M, 1)
        x = tl.load(x_ptr + row * D + offs_d)  # (M, D)
        y = tl.load(y_ptr + row * D + offs_d)
        # The compiler knows KEYS, and keeps one branch: (1, M) or (N, 1).
        query = row.T if KEYS else own
        p = tl.exp(tl.dot(a, x.T) * scale - tl.load(lse_ptr + query))  # (N, M)
        ds = p * (tl.dot(b, y.T) - tl.load(delta_ptr + query))
        if KEYS:
            db = tl.dot(p.to(y.dtype), y, db)
        da = tl.dot(ds.to(x.dtype), x, da)
    tl.store(da_ptr + own * D + offs_d, da * scale)
    if KEYS:
        tl.store(db_ptr + own * D + offs_d, db)


def run_pass(a, b, x, y, lse, delta, da, db, KEYS, M=64, N=64):
    """Launch a pass of contiguous (heads, L, D); M and N divide L."""
    heads, L, D = a.shape
    assert L % M == L % N == 0
    tensors = a, b, x, y, lse, delta, da, db
    sizes = D**-0.5, L, D, M, N, KEYS
    pass_kernel[L // N, heads](*tensors, *sizes, num_warps=4, num_stages=2)


def queries_pass(do, q, k, v, lse, delta):
    """Return dq."""
    dq = torch.empty_like(q)
    # Nothing is stored to db here: any pointer will do.
    run_pass(q, do, k, v, lse, delta, da=dq, db=dq, KEYS=False)
    return dq


def both_passes(do, q, k, v, lse, delta):
    """Return dq, dk and dv."""
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    run_pass(k, v, q, do, lse, delta, da=dk, db=dv, KEYS=True)
    return queries_pass(do, q, k, v, lse, delta), dk, dv


if __name__ == "__main__":
    for D in (64, 128):
        print(f"heads of {D}")
        x = inputs(2, 192, D)
        show_errors("dq dk dv", both_passes(*x), exact(*x))

# %%
# The pass of queries computes three products. *Both passes* compute seven, but
# count as the five that the result needs, as in the chart at the end: if both
# passes are equally fast, *both passes* has 5/7 of their rate.

if __name__ == "__main__" and DEVICE.type == "cuda":
    rate_of(
        {"pass of queries": (queries_pass, 3), "both passes": (both_passes, 5)}
    )

# %%
# The op
# ------
#
# In ``pass_kernel``, Triton's compiler decides how the warps share the work and
# where they wait for a product. In Gluon we decide: one warp does nothing but
# load, and a group of warps computes ``p`` while other products run.
#
# ``gluon_attention_backward(do, q, k, v, out, lse)`` is ``pass_kernel`` with
# the roles, barriers and buffers of ``gluon_attention.py``. Two groups of four
# warps compute. Below, ``a`` and ``b`` are a group's own 64 of the program's
# 128 rows, in shared memory. The op takes the inputs and both results of
# ``flash_attention_with_lse``: ``out``, from which it computes ``delta``, and
# ``lse``, to base 2. It adds a causal mask, any length, and heads of queries
# that share a head of keys. Without these, a group in the pass of keys runs
# this. Layouts are as in ``gluon_attention.py``; the list explains (1) to (5).
#
# .. code-block:: python
#
#    TILE = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])  # s, dp
#    SUMS = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # da, db
#    LEFT = gl.DotOperandLayout(0, SUMS, 2)  # left, where SUMS is the result
#    COLUMNS = gl.SliceLayout(0, TILE)
#    zeros = gl.zeros((64, M), gl.float32, TILE)  # use_acc=False: not read
#    da = gl.zeros((64, D), gl.float32, SUMS)
#    db = gl.zeros((64, D), gl.float32, SUMS)
#    mbarrier.wait(kept, 0)  # until a and b are loaded
#    for n in range(L // M):
#        stage, phase = n % STAGES, n // STAGES & 1
#        mbarrier.wait(full.index(stage), phase)  # (1)
#        x, y = x_ring.index(stage), y_ring.index(stage)  # (M, D)
#        x_t, y_t = x.permute([1, 0]), y.permute([1, 0])  # (2)
#        s = warpgroup_mma(a, x_t, zeros, use_acc=False, is_async=True)
#        dp = warpgroup_mma(b, y_t, zeros, use_acc=False, is_async=True)
#        s = warpgroup_mma_wait(1, deps=(s,))  # (3) dp may go on
#        lse = lse_ring.index(stage).load(COLUMNS)[None, :]  # (1, M), base 2
#        p = gl.exp2(s * scale_2 - lse)  # scale_2 is scale * log2(e)
#        p_left = gl.convert_layout(p.to(gl.float16), LEFT)  # (4)
#        db = warpgroup_mma(p_left, y, db, is_async=True)
#        dp = warpgroup_mma_wait(1, deps=(dp,))  # (3) db may go on
#        delta = delta_ring.index(stage).load(COLUMNS)[None, :]
#        ds = p * (dp - delta)
#        ds_left = gl.convert_layout(ds.to(gl.float16), LEFT)  # (4)
#        da = warpgroup_mma(ds_left, x, da, is_async=True)
#        da, db = warpgroup_mma_wait(0, deps=(da, db))  # (5)
#        mbarrier.arrive(empty.index(stage))  # (5)
#    a.store((da * scale).to(gl.float16))  # no other group reads these rows
#    b.store(db.to(gl.float16))
#    fence_async_shared()  # else TMA may read what was there before
#    store(da_desc, [row, 0], a)  # by TMA, from the group's first row on
#    store(db_desc, [row, 0], b)
#    tma.store_wait(0)  # this memory is another program's soon
#
# 1. *Shared memory.* In each step, the warp that loads waits for ``empty`` and
#    copies ``x``, ``y``, and M numbers each of ``lse`` and ``delta`` with TMA.
#    The barrier ``full`` counts the bytes of all four. A program has 227 KiB.
#    With heads of 128, ``a`` and ``b`` take 64 KiB, and each step of 64 queries
#    32.5. Four steps make 194; a fifth would leave 0.5 for all else.
# 2. *Both orders.* ``permute`` copies nothing: Hopper reads a right operand of
#    16 bits in either order. So one copy of ``x`` serves ``x_t`` and ``x``.
# 3. *Waits.* ``warpgroup_mma_wait(1)`` leaves one product of this group in
#    flight, the last one issued; ``deps`` names what may be read from then on.
#    The other group's products may run at any time.
# 4. *Left operands.* ``convert_layout`` moves nothing between threads: each has
#    the elements of its left operand already.
# 5. *The last wait* is for all. The products for ``da`` and ``db`` read ``x``
#    and ``y``, which are overwritten once both groups arrive at ``empty``: no
#    product may be in flight then. To let ``da`` run into the next step, a
#    group would have to arrive later, and keep ``ds_left`` as long.
#
# *Registers* limit a step. A thread has 240 (the loading warp's have fewer).
# With heads of 128, ``da`` and ``db`` are 2 * 64 * 128 numbers for 128 threads:
# 128 registers in each. With 64 queries, ``s`` and ``dp`` take 64, and both
# left operands, of 16 bits, 32: at most 224 at once. With 128 queries, 128 +
# 128 + 64 = 320 would be too many. The pass of queries has neither ``db`` nor
# ``p_left``: with 128 keys, 64 + 128 + 32 = 224. Its ``lse`` and ``delta`` are
# for rows, in ``SliceLayout(1, TILE)``: loaded before the loop.

from triton_gallery_ops.gluon_attention_backward import (
    gluon_attention_backward,
)

# %%
# Is the op right? ``inputs`` has ``lse`` to base e, so we convert it. No tile
# divides 1000 tokens.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x = inputs(4, 1000, 128)
    do, q, k, v, lse, _ = (t[None] for t in x)  # the op takes a batch
    lse_2 = lse * math.log2(math.e)
    found = gluon_attention_backward(do, q, k, v, sdpa(q, k, v), lse_2)
    show_errors("dq dk dv", [grad[0] for grad in found], exact(*x))

# %%
# The result
# ----------
#
# Causal, in float16, 16384 tokens in all at each length, with 16 heads of 128
# or 32 of 64. The rate is operations divided by GPU time. For each series it
# counts five products, halved for the mask. The line below a table is what a
# call costs the CPU: if the GPU needs less time, it waits for the CPU.
#
# * *Triton* is, as on each page, the op: here in Gluon, a part of Triton.
# * *Triton, without Gluon* is the same two passes in plain Triton: the kernels
#   that the op ``flash_attention`` has for other GPUs, and for short inputs. On
#   Hopper, ``flash_attention`` calls this page's op for longer ones.
# * *cuDNN* and *FlashAttention-2* are PyTorch's backward by either library.

from triton_gallery_ops.flash_attention import (
    _flash_attention_backward_launch,
    flash_attention_with_lse,
)

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def by_library(library, do, q, k, v):
    """Return a call of a library's backward."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(library):
        out = sdpa(*leaves, is_causal=True)
    return partial(torch.autograd.grad, out, leaves, do, retain_graph=True)


def calls(length, D):
    """Return what is timed at a length."""
    shape = 4, 16384 // length, 2048 // D, length, D
    do, q, k, v = torch.randn(shape, generator=rng, device=DEVICE).half()
    out, lse = flash_attention_with_lse(q, k, v, True)
    given = do, q, k, v, out, lse, True, None  # causal, with the usual scale
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    return {
        "Triton": partial(gluon_attention_backward, *given),
        "Triton, without Gluon": partial(
            _flash_attention_backward_launch, *given
        ),
        "cuDNN": by_library(cudnn, do, q, k, v),
        "FlashAttention-2": by_library(flash, do, q, k, v),
    }


def benchmark(D):
    """Print and plot the rates, and return them."""
    times = {length: gpu_time(calls(length, D), 30) for length in LENGTHS}
    table = rate_table(
        times, "tokens", "TFLOP/s", lambda length: 5e-9 * 16384 * 2048 * length
    )
    print(f"heads of {D}", table.to_string(), sep="\n")
    wide = table.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title=f"backward, causal, heads of {D}")
    for other in wide.columns.drop("Triton"):
        ratio = wide["Triton"] / wide[other]
        print(f"heads of {D}, op / {other}: {ratio.min():.2f}", end=" ")
        print(f"({ratio.idxmin()} tokens) to {ratio.max():.2f}")
    cost = table[table["tokens"] == 512].set_index("series")["CPU us"]
    print("CPU us of a call, 512 tokens:", cost.round().to_dict())
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results_backward = benchmark(D=128)

if __name__ == "__main__" and DEVICE.type == "cuda":
    results_backward_of_64 = benchmark(D=64)

# %%
# Exercises
# ---------
#
# Write a kernel with the arguments of ``keys_kernel`` and run the cell: it says
# whether the kernel is right. No GPU is needed. ``case`` makes the inputs and
# the right gradients:


def case(heads, heads_of_keys, causal):
    """Return what a pass of keys takes, and dk and dv in float64."""
    do, q, _, _, _, _ = inputs(heads, 192, 64)
    _, _, k, v, _, _ = inputs(heads_of_keys, 192, 64)
    exact_k, exact_v = (t.double().requires_grad_() for t in (k, v))
    group = heads // heads_of_keys
    s = q.double() @ exact_k.repeat_interleave(group, 0).mT / 8
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)
    out = s.softmax(-1) @ exact_v.repeat_interleave(group, 0)
    right = torch.autograd.grad(out, (exact_k, exact_v), do.double())
    lse = s.detach().logsumexp(-1).float()
    delta = (do * out.detach()).sum(-1).float()
    return (do, q, k, v, lse, delta), right


def check(kernel, tensors, right):
    """Say whether a kernel computes dk and dv within 1e-2, in steps of 32."""
    if kernel is None:
        return "not solved yet"
    found = keys_pass(*tensors, kernel, M=32)
    for grad, best in zip(found, right, strict=True):
        if not torch.allclose(grad.double(), best, atol=1e-2):
            return "wrong"
    return "right"


# %%
# **1.** With a causal mask, query ``i`` sees keys 0 to ``i``. Along which
# queries does a program have to go, and which elements of ``p`` are 0?

causal_kernel = None  # your kernel

if __name__ == "__main__":
    causal = case(heads=2, heads_of_keys=2, causal=True)
    print(check(causal_kernel, *causal))

# %%
# **2.** Without a mask, head ``h`` of the queries reads head ``h // 2`` of the
# keys. So two heads of queries add to the gradients of one head of keys.

shared_kernel = None  # your kernel

if __name__ == "__main__":
    shared = case(heads=4, heads_of_keys=2, causal=False)
    print(check(shared_kernel, *shared))

# %%
# Answers
# -------
#
# **1.** Earlier queries see none of the tile's keys, so the loop begins at the
# tile. Within it, a later key has the weight 0.


@triton.jit
def causal_answer_kernel(
    k_ptr,
    v_ptr,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    L,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    base = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]
    first = tl.program_id(axis=0) * N
    own = base + first + tl.arange(0, N)[:, None]
    k = tl.load(k_ptr + own * D + offs_d)
    v = tl.load(v_ptr + own * D + offs_d)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(first // M * M, L, M):
        row = base + start + tl.arange(0, M)
        q = tl.load(q_ptr + row[:, None] * D + offs_d)
        do = tl.load(do_ptr + row[:, None] * D + offs_d)
        lse = tl.load(lse_ptr + row)[None, :]
        delta = tl.load(delta_ptr + row)[None, :]
        p = tl.exp(tl.dot(k, q.T) * scale - lse)
        p = tl.where(own <= row[None, :], p, 0.0)
        ds = p * (tl.dot(v, do.T) - delta)
        dv = tl.dot(p.to(do.dtype), do, dv)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + own * D + offs_d, dk * scale)
    tl.store(dv_ptr + own * D + offs_d, dv)


if __name__ == "__main__":
    answer = check(causal_answer_kernel, *causal)
    print(answer)
    assert answer == "right"

# %%
# **2.** The program goes along the queries of two heads, one after the other.


@triton.jit
def shared_answer_kernel(
    k_ptr,
    v_ptr,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    L,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    base = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]
    own = base + tl.program_id(axis=0) * N + tl.arange(0, N)[:, None]
    k = tl.load(k_ptr + own * D + offs_d)
    v = tl.load(v_ptr + own * D + offs_d)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, 2 * L, M):
        row = 2 * base + start + tl.arange(0, M)  # of two heads
        q = tl.load(q_ptr + row[:, None] * D + offs_d)
        do = tl.load(do_ptr + row[:, None] * D + offs_d)
        lse = tl.load(lse_ptr + row)[None, :]
        delta = tl.load(delta_ptr + row)[None, :]
        p = tl.exp(tl.dot(k, q.T) * scale - lse)
        ds = p * (tl.dot(v, do.T) - delta)
        dv = tl.dot(p.to(do.dtype), do, dv)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + own * D + offs_d, dk * scale)
    tl.store(dv_ptr + own * D + offs_d, dv)


if __name__ == "__main__":
    answer = check(shared_answer_kernel, *shared)
    print(answer)
    assert answer == "right"
