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
two passes: they are one kernel with its arguments exchanged, and a flag.
The op at the end is that kernel in Gluon, Triton's lower-level language, for
Hopper: NVIDIA's H100 and H200. On other GPUs, take ``flash_attention``.

After this page you can

* say which five products the backward has, and why two passes compute seven;
* write one pass, and get the other one by exchanging its arguments;
* choose which scores to compute, a tile or its transpose, so that the next
  product finds its operand in registers.
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


def logsumexp(q, k):
    """Return the logsumexp of the scores of each query of a head."""
    return (q.float() @ k.float().T * q.shape[-1] ** -0.5).logsumexp(-1)


def inputs(*shape):
    """Return do, q, k and v of (heads, L, D), lse and delta."""
    tensors = torch.randn(4, *shape, generator=rng, device=DEVICE).half()
    do, q, k, v = tensors
    lse = [logsumexp(*head) for head in zip(q, k, strict=True)]
    return *tensors, torch.stack(lse), (do.float() * sdpa(q, k, v)).sum(-1)


if __name__ == "__main__":
    for L in (1024, 16384):
        flop = 5 * 2 * L * L * 128
        nbytes = 7 * 2 * L * 128  # do, q, k, v in; dq, dk, dv out
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
# right one must be in shared memory. ``ds`` lacks the factor ``scale``: ``dk``
# is multiplied by it once, at the end.


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
    # The first row of this head; in int32, its offset could overflow.
    head = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]  # (1, D)
    own = head + tl.program_id(axis=0) * N + tl.arange(0, N)[:, None]  # (N, 1)
    k = tl.load(k_ptr + own * D + offs_d)  # (N, D)
    v = tl.load(v_ptr + own * D + offs_d)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, L, M):
        row = head + start + tl.arange(0, M)  # (M,)
        q = tl.load(q_ptr + row[:, None] * D + offs_d)  # (M, D)
        do = tl.load(do_ptr + row[:, None] * D + offs_d)
        lse = tl.load(lse_ptr + row)[None, :]  # (1, M)
        delta = tl.load(delta_ptr + row)[None, :]
        p = tl.exp(tl.dot(k, q.T) * scale - lse)  # (N, M)
        ds = p * (tl.dot(v, do.T) - delta)
        dv = tl.dot(p.to(do.dtype), do, dv)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + own * D + offs_d, dk * scale)
    tl.store(dv_ptr + own * D + offs_d, dv)


def keys_pass(do, q, k, v, lse, delta, kernel=keys_kernel, M=64, N=64):
    """Return dk and dv of contiguous (heads, L, D); M and N divide L."""
    (heads, L, D), dk, dv = k.shape, torch.empty_like(k), torch.empty_like(v)
    assert L % M == L % N == 0  # no load has a mask
    given = k, v, q, do, lse, delta, dk, dv, D**-0.5, L, D, M, N
    kernel[L // N, heads](*given, num_warps=4, num_stages=2)
    return dk, dv


# %%
# Is it right?
# ------------
#
# ``p``, ``ds`` and the result are rounded to float16, each by at most
# :math:`2^{-11}` of its size. We allow :math:`2^{-9}` of the largest element: a
# margin that we chose, and no bound.


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
# The rate counts the products that a kernel computes: here four of the five.


def rate_of(passes):
    """Print TFLOP/s of kernels, each with its number of products."""
    rates = {}
    for L, D in ((1024, 64), (1024, 128), (8192, 128)):
        x = inputs(8192 // L * 2048 // D, L, D)
        timed = {name: partial(call, *x) for name, (call, _) in passes.items()}
        rates[f"{L} tokens, heads of {D}"] = {
            name: round(passes[name][1] * 2e-9 * 8192 * 2048 * L / ms)
            for name, (ms, *_) in gpu_time(timed, turns=20).items()
        }
    print("TFLOP/s", pd.DataFrame(rates).T.to_string(), sep="\n")


PASSES = {"pass of keys": (keys_pass, 4)}

if __name__ == "__main__" and DEVICE.type == "cuda":
    rate_of(PASSES)

# %%
# And dq?
# -------
#
# ``dq`` is a sum over keys, so no program above has all of its terms. Each
# could add its part to a float32 ``dq`` of zeros: in the kernel's names,
# ``tl.atomic_add`` of ``tl.dot(ds.T, k) * scale``. The order of the additions,
# and so the last bits, would differ from run to run. Instead, a second pass
# keeps queries and goes along keys. It computes ``s`` and ``dp`` again: seven
# products in all.
#
# This pass needs no kernel of its own. Let a program keep ``a`` and ``b``, and
# go along ``x`` and ``y``; the last three columns are what its products give:
#
# .. code-block:: text
#
#     pass             a     b     x     y     a @ x.T   b @ y.T  ds @ x
#
#     of keys          k     v     q     do    s.T       dp.T     dk
#     of queries       q     do    k     v     s         dp       dq
#
# In both passes the tile ``ds`` is (N, M), and the left operand of ``ds @ x``;
# in the pass of keys its rows are keys. The flag ``KEYS`` is for what differs.
# The pass of keys has one more product, ``p @ y`` for ``dv``, and its queries,
# with ``lse`` and ``delta``, are columns of the tile; in the pass of queries
# they are rows.


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
    head = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]
    own = head + tl.program_id(axis=0) * N + tl.arange(0, N)[:, None]
    a = tl.load(a_ptr + own * D + offs_d)  # (N, D)
    b = tl.load(b_ptr + own * D + offs_d)
    da = tl.zeros((N, D), dtype=tl.float32)
    db = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, L, M):
        row = head + start + tl.arange(0, M)[:, None]  # (M, 1)
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


def both_passes(do, q, k, v, lse, delta, M=64, N=64):
    """Return dq, dk and dv; M and N divide L."""
    (heads, L, D), grads = q.shape, [torch.empty_like(t) for t in (q, k, v)]
    assert L % M == L % N == 0
    dq, dk, dv = grads
    rest = D**-0.5, L, D, M, N
    for *given, KEYS in (
        (k, v, q, do, lse, delta, dk, dv, *rest, True),
        (q, do, k, v, lse, delta, dq, dq, *rest, False),  # no db: dq again
    ):
        pass_kernel[L // N, heads](*given, KEYS, num_warps=4, num_stages=2)
    return grads


if __name__ == "__main__":
    show_errors("dq dk dv", both_passes(*x), exact(*x))

# %%
# *Both passes* counts seven products: four of the pass of keys, which is timed
# at the left, too, and three of the pass of queries. Where its rate is the
# lower one, the pass of queries is slower for each product.

PASSES["both passes"] = (both_passes, 7)

if __name__ == "__main__" and DEVICE.type == "cuda":
    rate_of(PASSES)

# %%
# The op
# ------
#
# ``gluon_attention_backward(do, q, k, v, out, lse)`` is ``pass_kernel`` in
# Gluon, with the roles, barriers and buffers of ``gluon_attention.py``: one
# warp loads, and each of two groups of four warps has 64 rows of ``a`` and
# ``b``. It adds a causal mask, any length, and heads of queries that share a
# head of keys. In short, a step of the pass of keys is as follows; ``scale_2``
# is ``scale * log2(e)``, for ``exp2``:
#
# .. code-block:: python
#
#    s = warpgroup_mma(a, x.T, zeros, is_async=True)
#    dp = warpgroup_mma(b, y.T, zeros, is_async=True)
#    warpgroup_mma_wait(1)  # s is done, and one product goes on: dp
#    p = exp2(s * scale_2 - lse)
#    db = warpgroup_mma(p.to(float16), y, db, is_async=True)
#    warpgroup_mma_wait(1)  # dp is done, db goes on
#    ds = p * (dp - delta)
#    da = warpgroup_mma(ds.to(float16), x, da, is_async=True)
#    warpgroup_mma_wait(0)  # now the warp that loads may overwrite x and y
#
# Registers are the limit: a thread has at most 255. With heads of 128, ``da``
# and ``db`` are 2 * 64 * 128 sums for a group's 128 threads: 128 registers in
# each. A step of 64 queries takes 64 more for ``s`` and ``dp``; one of 128
# queries would take 128 more, 256 in all. So a step has 64.
#
# The op takes the inputs and both results of ``flash_attention_with_lse``.

from triton_gallery_ops.gluon_attention_backward import (
    gluon_attention_backward,
)

# %%
# It computes ``delta`` from ``out``. Its ``lse`` is to base 2, the one of
# ``inputs`` to base e:

if __name__ == "__main__" and DEVICE.type == "cuda":
    x = inputs(4, 1000, 128)
    do, q, k, v, lse, _ = (t[None] for t in x)
    kept = sdpa(q, k, v), lse * math.log2(math.e)
    found = gluon_attention_backward(do, q, k, v, *kept)
    show_errors("dq dk dv", [grad[0] for grad in found], exact(*x))

# %%
# The result
# ----------
#
# Causal, in float16, 16384 tokens in all at each length, and 16 heads of 128 or
# 32 of 64. The rate is of GPU time, and counts the same for all: five products,
# halved for the mask. At the shortest length a call takes more CPU time, given
# below the chart. *Triton* is this page's op, in Gluon: ``flash_attention``
# calls it for all but short inputs. *flash_attention* is the same two passes by
# that op's kernels in Triton. PyTorch calls the other two.

from triton_gallery_ops.flash_attention import (
    _flash_attention_backward_launch,
    flash_attention_with_lse,
)

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def by_library(library, do, *leaves):
    """Return a call of a library's backward."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    with sdpa_kernel(library):
        out = sdpa(*leaves, is_causal=True)
    return partial(torch.autograd.grad, out, leaves, do, retain_graph=True)


def calls(length, D):
    """Return what is timed at a length."""
    shape = 4, 16384 // length, 2048 // D, length, D
    do, q, k, v = torch.randn(shape, generator=rng, device=DEVICE).half()
    out, lse = flash_attention_with_lse(q, k, v, True)
    kept = do, q, k, v, out, lse, True
    in_triton = _flash_attention_backward_launch
    return {
        "Triton": partial(gluon_attention_backward, *kept),
        "flash_attention": partial(in_triton, *kept, None),
        "cuDNN": by_library(SDPBackend.CUDNN_ATTENTION, do, q, k, v),
        "FlashAttention-2": by_library(SDPBackend.FLASH_ATTENTION, do, q, k, v),
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
# whether the kernel is right. No GPU is needed.
#
# **1.** With a causal mask, query ``i`` sees keys 0 to ``i``. Along which
# queries does a program have to go, and which elements of ``p`` are 0?

causal_kernel = None  # your kernel


def check(kernel, tensors, right):
    """Say whether a kernel computes dk and dv within 1e-2, in steps of 32."""
    if kernel is None:
        return "not solved yet"
    pairs = zip(keys_pass(*tensors, kernel, M=32), right, strict=True)
    close = [torch.allclose(a.double(), b, atol=1e-2) for a, b in pairs]
    return "right" if all(close) else "wrong"


if __name__ == "__main__":
    do, q, k, v = (t.double() for t in inputs(2, 192, 64)[:4])
    hidden = torch.ones(192, 192, device=DEVICE).bool().triu(1)
    s = (q @ k.mT / 8).masked_fill(hidden, -torch.inf)
    p = s.softmax(-1)
    delta = (do * (p @ v)).sum(-1)
    ds = p * (do @ v.mT - delta[..., None]) / 8
    causal = *(t.half() for t in (do, q, k, v)), s.logsumexp(-1).float()
    causal = *causal, delta.float()
    right_causal = ds.mT @ q, p.mT @ do
    print(check(causal_kernel, causal, right_causal))

# %%
# **2.** Two heads of queries share a head of keys: head ``h`` of the queries
# reads head ``h // 2`` of the keys, and its gradients add up there.

shared_kernel = None  # your kernel

if __name__ == "__main__":
    do, q, k, v, _, _ = inputs(4, 192, 64)
    k, v = k[:2].contiguous(), v[:2].contiguous()
    twice = [t.repeat_interleave(2, 0) for t in (k, v)]
    lse = torch.stack([logsumexp(q[h], k[h // 2]) for h in range(4)])
    delta = (do.float() * sdpa(q, *twice)).sum(-1)
    shared = do, q, k, v, lse, delta
    _, *grads = exact(do, q, *twice, lse, delta)
    right_shared = [t.unflatten(0, (2, 2)).sum(1) for t in grads]
    print(check(shared_kernel, shared, right_shared))

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
    head = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]
    first = tl.program_id(axis=0) * N
    own = head + first + tl.arange(0, N)[:, None]
    k = tl.load(k_ptr + own * D + offs_d)
    v = tl.load(v_ptr + own * D + offs_d)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(first // M * M, L, M):
        row = head + start + tl.arange(0, M)
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
    answer = check(causal_answer_kernel, causal, right_causal)
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
    head = tl.program_id(axis=1).to(tl.int64) * L
    offs_d = tl.arange(0, D)[None, :]
    own = head + tl.program_id(axis=0) * N + tl.arange(0, N)[:, None]
    k = tl.load(k_ptr + own * D + offs_d)
    v = tl.load(v_ptr + own * D + offs_d)
    dk = tl.zeros((N, D), dtype=tl.float32)
    dv = tl.zeros((N, D), dtype=tl.float32)
    for start in range(0, 2 * L, M):
        row = 2 * head + start + tl.arange(0, M)  # of two heads
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
    answer = check(shared_answer_kernel, shared, right_shared)
    print(answer)
    assert answer == "right"
