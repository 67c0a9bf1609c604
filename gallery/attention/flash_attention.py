# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Train with attention: the forward stores one number for each query, and the
# backward recomputes the probabilities with it."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "five kernels; three go along blocks with and without a mask"
#
# [tool.triton-gallery.not_for]  # with Hopper's tiles; others get smaller ones
# _flash_attention_dq_kernel = ["sm_89", "sm_120"]
# _gluon_attention_kernel = ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942"]
# _gluon_attention_backward_kernel = [
#   "sm_80", "sm_89", "sm_100", "sm_120", "gfx942"
# ]
# ///
r"""
Flash attention
===============

This is attention to train with. For each query, the forward stores one number
beside the result: the log-sum-exp of its scores. With it, the backward
recomputes the probabilities block by block. So the matrix of scores is never in
memory, neither forward nor backward.

After ``flash_attention_forward.py`` and this page you can

* derive the gradients of attention, and recompute what they need;
* say which program adds up which gradient, and what is left for the others;
* weigh one pass with atomic additions against two that are deterministic;
* skip what a causal mask hides, and add up the gradients of a group of heads.
"""

# sphinx_gallery_tags = ["attention", "autograd", "compute bound"]
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
from triton_gallery.counting import statements


def backward_of(op, q, k, v, grad):
    """Return a call that computes an op's gradients through autograd."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    grads = partial(torch.autograd.grad, retain_graph=True)
    return partial(grads, op(*leaves), leaves, grad)


# %%
# In PyTorch
# ----------
#
# Forward, with the scores :math:`s_{ij} = q_i \cdot k_j / \sqrt D`,
#
# .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = e^{s_{ij} - \ell_i},
#    \qquad \ell_i = \log \sum_k e^{s_{ik}}
#
# with :math:`\ell_i`, the row's *log-sum-exp*. If :math:`o` has the gradient
# :math:`g`, then :math:`p_{ij}` has :math:`g_i \cdot v_j`. A score acts on its
# whole row, through :math:`\ell_i`. So a mean, weighted by p, is subtracted:
#
# .. math:: \mathrm{d}s_{ij} = p_{ij} (g_i \cdot v_j - \delta_i), \quad
#    \delta_i = \sum_j p_{ij}\, (g_i \cdot v_j) = g_i \cdot o_i
#
# .. math:: \mathrm{d}v_j = \sum_i p_{ij}\, g_i, \quad \mathrm{d}k_j =
#    \sum_i \mathrm{d}s_{ij}\, q_i / \sqrt D, \quad \mathrm{d}q_i =
#    \sum_j \mathrm{d}s_{ij}\, k_j / \sqrt D
#
# PyTorch's operators keep :math:`p` for that. See its bytes beside the floor's:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def attention_torch(q, k, v):
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


if __name__ == "__main__":
    for length in (512, 4096, 32768):  # 32 heads of dimension 128
        q = torch.empty(32, length, 128, dtype=torch.bfloat16, device="meta")
        p, floor = (q @ q.mT).nbytes / 1e9, 8 * q.nbytes / 1e9  # 5 in, 3 out
        print(f"{length:5} tokens: floor {floor:.2f} GB, p alone {p:.2f} GB")

# %%
# The first kernel
# ----------------
#
# ``dk`` and ``dv`` are sums over queries. A program with a block of keys that
# goes along all queries adds them up in registers. Its part of ``dq`` goes to
# memory by *atomic* additions: each reads, adds and writes as one step.
#
# .. code-block:: text
#
#     start =             0       BLOCK_M   2 BLOCK_M
#                    +----------+----------+----------+
#      BLOCK_N keys  |  queries |  queries | queries..|  ->  dk, dv
#                    +----------+----------+----------+
#                      add to     add to     add to   dq
#
# ``p`` is recomputed transposed, as the left operand of the product for ``dv``.
# On an H100 a left operand may come from registers, the right one comes from
# shared memory. Past the end, ``q``, ``grad`` and ``delta`` are 0, and add 0.


@triton.jit
def backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    L,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32, an element's offset would overflow past element 2**31.
    head = tl.program_id(axis=1).to(tl.int64) * L
    offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    own = (head + offs_n) * D + tl.arange(0, D)[None, :]  # (BLOCK_N, D)
    k = tl.load(k_ptr + own, mask=offs_n < L, other=0.0)
    v = tl.load(v_ptr + own, mask=offs_n < L, other=0.0)
    dk = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    for start in range(0, L, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
        mask = offs_m < L
        offs = (head + offs_m[:, None]) * D + tl.arange(0, D)[None, :]
        q = tl.load(q_ptr + offs, mask=mask[:, None], other=0.0)
        grad = tl.load(grad_ptr + offs, mask=mask[:, None], other=0.0)
        lse = tl.load(lse_ptr + head + offs_m, mask=mask, other=0.0)
        delta = tl.load(delta_ptr + head + offs_m, mask=mask, other=0.0)
        p = tl.exp(tl.dot(k, q.T) * scale - lse[None, :])  # (BLOCK_N, BLOCK_M)
        # A padded key has the score 0: p may be inf there, and dq then NaN.
        p = tl.where(offs_n < L, p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        ds = (p * (tl.dot(v, grad.T) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        dq = tl.dot(ds.T, k) * scale  # (BLOCK_M, D)
        tl.atomic_add(dq_ptr + offs, dq, mask=mask[:, None], sem="relaxed")
    tl.store(dk_ptr + own, dk * scale, mask=offs_n < L)
    tl.store(dv_ptr + own, dv, mask=offs_n < L)


def backward(q, k, v, out, lse, grad, BLOCK_M=64, BLOCK_N=128):
    """Return the gradients of contiguous (batch, heads, length, D)."""
    (batch, heads, L, D), dk, dv = q.shape, *map(torch.empty_like, (k, v))
    # Each addition would round, so the sum is in float32.
    dq, delta = torch.zeros_like(q).float(), (grad.float() * out).sum(-1)
    args = q, k, v, grad, lse, delta, dq, dk, dv, D**-0.5, L, D
    grid = (triton.cdiv(L, BLOCK_N), batch * heads)
    backward_kernel[grid](*args, BLOCK_M, BLOCK_N, num_warps=8, num_stages=2)
    return dq.to(q.dtype), dk, dv


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def first_kernel(q, k, v, grad):  # after a forward by PyTorch
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return partial(backward, q, k, v, sdpa(q, k, v), scores.logsumexp(-1), grad)


# %%
# Is it right?
# ------------
#
# We compare ``dq``, ``dk`` and ``dv`` with float64. ``p``, ``ds`` and the
# result are each rounded by at most :math:`2^{-11}` of their size. We allow a
# little more than all three, :math:`2^{-9}` of the largest element.

if __name__ == "__main__":
    x = [random(1, 2, 200, 64) for _ in range(4)]
    expected = backward_of(attention_torch, *(t.double() for t in x))()
    for t, one, right in zip("qkv", first_kernel(*x)(), expected, strict=True):
        error, atol = (one - right).abs().max(), 2**-9 * right.abs().max()
        print(f"d{t}: largest error {error:.1e}, allowed {atol:.1e}")
        torch.testing.assert_close(one.double(), right, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# For each score, we count :math:`2D` operations in each of five products.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for L in (512, 1024, 2048):
        x = [random(4, 32, L, 64) for _ in range(4)]
        fast = torch.compile(attention_torch, dynamic=False, fullgraph=True)
        tried = {"SDPA": sdpa, "PyTorch": attention_torch, "compiled": fast}
        tried = {who: backward_of(op, *x) for who, op in tried.items()}
        tried["Triton"] = first_kernel(*x)
        for who, (ms, *_) in gpu_time(tried, turns=20).items():
            rate = 1e-8 * x[0].numel() * L / ms
            print(f"{L} tokens, {who}: {rate:.0f} TFLOP/s")

# %%
# Is the gradient deterministic?
# ------------------------------
#
# All programs of a head add to the same ``dq``, in the order in which they get
# there. In another order, the additions may round to another sum:

if __name__ == "__main__":
    call = first_kernel(*(random(1, 2, 512, 64) for _ in range(4)))
    first, again = call()[0], call()[0]
    print(f"{(first != again).sum()} of {first.numel()} elements of dq differ")

# %%
# (The interpreter runs one program after the other, so there none differs.) To
# make the gradient deterministic, each sum needs an *owner*: the one program
# that adds it up, in a fixed order. So take two passes:
#
# .. code-block:: text
#
#     way         owner           goes along     products
#     one pass    key block       all queries    s dp dv dk, and part of dq
#     two passes  key block       all queries    s dp dv dk
#                 query block     all keys       s dp dq
#
# The second of the two passes repeats ``s`` and ``dp`` (:math:`g_i \cdot v_j`):
# seven products instead of five. At the same rate, these take 7/5 of the time.
# One pass has other work: it fills ``dq`` with zeros, adds to memory, and
# converts the sum from float32. And each of two passes can have a tile that
# suits it. The op takes two passes. The table after it compares them with one.

# %%
# What does a causal mask hide?
# -----------------------------
#
# With a causal mask, a key is seen by its own query and later ones. A kernel
# that computes all pairs would set nearly half of the probabilities to 0. A
# program of the pass for ``dk`` and ``dv`` can begin at the diagonal:
#
# .. code-block:: text
#
#     BLOCK_M = 2 BLOCK_N   queries
#                +------+------+------+------+
#     program 0  | mask | full | full | full |
#     program 1  | mask | full | full | full |
#     program 2  | skip | mask | full | full |
#     program 3  | skip | mask | full | full |
#                +------+------+------+------+
#
# So the loop is split in two: first the blocks at the diagonal, with a mask,
# then the full ones. Program 0 has the most work, and starts first. The pass
# for ``dq`` goes along keys, like the forward: there, full blocks come first.
# It also masks the last, ragged block of keys: padded keys would add to ``dq``.
# In the other pass, a padded key adds to a row of its own, which is not stored.

# %%
# A group of heads
# ----------------
#
# In grouped-query attention several heads of queries share a head of keys, and
# the gradient of a shared head is a sum over its group. A program with a block
# of keys goes along the queries of one head after the other, and adds all up in
# the same registers. No second kernel has to add.

# %%
# The op
# ------
#
# ``flash_attention`` returns the first of an op's two results. The second is
# the log-sum-exp, in base 2 like the exponentials; it is ``inf`` for a query
# that sees nothing. The backward has three kernels: one for :math:`\delta`, and
# one for each pass. On Hopper, half precision goes to the kernels of
# ``gluon_attention.py`` and ``gluon_attention_backward.py``, which keep the
# same log-sum-exp: heads of 128 from 256 tokens on, and heads of 64 from 2048
# tokens forward and 1024 backward.

from triton_gallery_ops.flash_attention import (
    _flash_attention_backward_launch,
    _flash_attention_delta_kernel,
    _flash_attention_dkv_kernel,
    _flash_attention_dq_kernel,
    _flash_attention_launch,
    _flash_attention_place,
    flash_attention,
    flash_attention_backward,
    flash_attention_with_lse,
)

# %%
# What did each step gain? The table has TFLOP/s of the backward at 4096 tokens,
# and the statements of the kernels that it runs. We count five products for
# each step, and half of the operations with a causal mask. Two passes compute
# seven: for them the table shows 5/7 of the rate at which they ran. *One pass*
# is the first kernel. *Wide*, it has blocks of 128 queries for heads of 64.


def first_step(q, k, v, grad, wide=False):
    out, lse = flash_attention_with_lse(q, k, v)
    lse = lse * math.log(2)  # the first kernel takes it in base e
    BLOCK_M = 8192 // q.shape[-1] if wide else 64
    return partial(backward, q, k, v, out, lse, grad, BLOCK_M)


def two_passes(q, k, v, grad, causal=False):  # by Triton's kernels
    kept = q, k, v, *_flash_attention_launch(q, k, v, causal)
    return partial(_flash_attention_backward_launch, grad, *kept, causal, None)


TOKENS = 16384  # in all, at each length
CAUSAL = partial(flash_attention, causal=True)
KERNELS = (
    _flash_attention_place,
    _flash_attention_delta_kernel,
    _flash_attention_dkv_kernel,
    _flash_attention_dq_kernel,
)
# What makes a call, whether it is causal, and the kernels
STEPS = {
    "one pass": (first_step, False, backward_kernel),
    "one pass, wide": (partial(first_step, wide=True), False, backward_kernel),
    "two passes": (two_passes, False, *KERNELS),
    "causal": (partial(two_passes, causal=True), True, *KERNELS),
}


def inputs(length, D):
    shape = TOKENS // length, 2048 // D, length, D
    return [random(*shape) for _ in range(4)]


def operations(length, products=5):
    return products * 2e-9 * TOKENS * 2048 * length


if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*step[2:]) for step in STEPS.values()]
    for D in (64, 128):
        x = inputs(4096, D)
        tried = {name: step[0](*x) for name, step in STEPS.items()}
        found = gpu_time(tried, turns=20)
        ladder[f"heads of {D}"] = [
            round(operations(4096) / (1 + step[1]) / found[name][0])
            for name, step in STEPS.items()
        ]
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare each dtype with float64, full and causal: ragged lengths, more keys
# than queries and fewer, padded heads, shared heads of keys, no keys, no
# queries. A gradient is a sum. For each element we allow two roundings of the
# sum of its terms' sizes, and two of the result. For the size of ``ds`` we take
# :math:`p_{ij} (|g_i| \cdot |v_j| + |g_i| \cdot |o_i|)`. A rounding is
# :math:`2^{-11}` in float16. In bfloat16 we allow :math:`2^{-7}`, because the
# interpreter cuts bits off where a GPU rounds. In float32 and float64 we allow
# :math:`2^{-18}` and :math:`2^{-45}`: a score is a sum of D rounded terms.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}
SHAPES = [  # batch, heads, heads of keys, queries, keys, D
    (1, 2, 2, 128, 128, 64),
    (1, 4, 2, 50, 40, 32),
    (2, 3, 1, 20, 70, 80),
    (1, 1, 1, 20, 40, 256),
    (1, 1, 1, 5, 0, 16),
    (1, 2, 1, 0, 7, 16),
]


def expected_of(*tensors, **options):
    """Return SDPA's gradients in float64."""
    op = partial(sdpa, enable_gqa=True, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return backward_of(op, *(t.double() for t in tensors))()


def terms_of(q, k, v, grad, causal=False, scale=None):
    """Return the sizes of what is added up for each gradient, in float64."""
    least = torch.finfo(q.dtype).smallest_normal  # below, bits are lost
    q, k, v, grad = (t.detach().double() for t in (q, k, v, grad))
    heads, scale = k.shape[1], scale or q.shape[-1] ** -0.5
    k, v = (t.repeat_interleave(q.shape[1] // heads, 1) for t in (k, v))
    s = (q @ k.mT) * scale
    if causal:
        hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    p = s.softmax(-1)
    size = (grad.abs() * (p @ v).abs()).sum(-1, keepdim=True)
    ds = (p * (grad.abs() @ v.mT.abs() + size) + least) * scale
    shared = ds.mT @ q.abs(), (p + least).mT @ grad.abs()
    shared = [t.unflatten(1, (heads, -1)).sum(2) for t in shared]
    return [sizes + least for sizes in (ds @ k.abs(), *shared)]


def worst(found, expected, terms, eps):
    """Return the largest error, as a part of what is allowed."""
    errors = [
        ((one.double() - right).abs() / (2 * eps * (size + right.abs()))).max()
        for one, right, size in zip(found, expected, terms, strict=True)
    ]
    return torch.stack(errors).max().item()  # NaN, if there is any


def proved(op, q, k, v, grad, causal=False, scale=None, looser=1):
    """Return the gradients that the op has, once they are proved."""
    found = backward_of(partial(op, scale=scale), q, k, v, grad)()
    for one, t in zip(found, (q, k, v), strict=True):
        assert (one.shape, one.dtype) == (t.shape, t.dtype)
    if k.shape[2] == 0:  # no query sees anything
        assert not found[0].any()
    elif q.shape[2]:
        expected = expected_of(q, k, v, grad, is_causal=causal, scale=scale)
        terms = terms_of(q, k, v, grad, causal, scale)
        assert worst(found, expected, terms, EPS[q.dtype]) <= looser
    return found


def prove(shape, dtype, causal):
    batch, heads, shared, LQ, LK, D = shape
    q, grad = (random(batch, heads, LQ, D, dtype=dtype) for _ in range(2))
    k, v = (random(batch, shared, LK, D, dtype=dtype) for _ in range(2))
    op = partial(flash_attention, causal=causal)
    proved(op, q, k, v, grad, causal)


if __name__ == "__main__":
    for dtype in EPS:
        for shape in SHAPES:
            prove(shape, dtype, causal=False)
            prove(shape, dtype, causal=True)
else:  # imported: a glance
    prove((1, 2, 1, 33, 70, 32), torch.float16, causal=True)

# %%
# Next come heads side by side in memory, another scale, and large scores. In
# memory, ``dq`` and ``dk`` have the order of dimensions of ``q`` and ``k``.

if __name__ == "__main__":
    q = random(2, 150, 4, 64)[:, :140].transpose(1, 2)
    k = random(2, 100, 2, 64).transpose(1, 2)
    v, grad = random(2, 2, 100, 64), random(1, 4, 140, 1).expand(2, 4, 140, 64)
    dq, dk, dv = proved(CAUSAL, q, k, v, grad, causal=True)
    assert dq.transpose(1, 2).is_contiguous()
    assert dk.transpose(1, 2).is_contiguous()
    proved(flash_attention, q, k, v, grad, scale=0.5)
    large = [20 * random(1, 1, 70, 64, dtype=torch.float64) for _ in range(4)]
    proved(flash_attention, *large, looser=32)  # scores in thousands

# %%
# ``gradcheck`` compares the gradients with differences of the forward. Then two
# backwards must agree bit for bit. On a GPU, ``opcheck`` tests that the op
# works with autograd, with tensors that have no data, and ``torch.compile``:

if __name__ == "__main__":
    shapes = (1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2)
    leaves = [random(*shape, dtype=torch.float64) for shape in shapes]
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(flash_attention, leaves)
    assert torch.autograd.gradcheck(CAUSAL, leaves)
    x = [random(1, 2, 300, 64) for _ in range(4)]
    call = backward_of(flash_attention, *x)
    assert all(map(torch.equal, call(), call()))

if __name__ == "__main__" and DEVICE.type == "cuda":
    q, k, v = (random(1, 2, 70, 64).requires_grad_() for _ in range(3))
    print(torch.library.opcheck(flash_attention_with_lse, (q, k, v, True)))

# %%
# A model learns
# --------------
#
# A block of a transformer learns to count modulo 16, in steps that differ by
# sequence. It learns twice, with SDPA and with the op: the losses must agree.


class Block(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.tokens = torch.nn.Embedding(16, 64)
        self.heads = torch.nn.Linear(64, (4 + 2 + 2) * 16)
        self.out = torch.nn.Linear(64, 64)
        self.scores = torch.nn.Linear(64, 16)

    def forward(self, tokens):
        x = self.tokens(tokens)
        heads = self.heads(x).unflatten(-1, (8, 16)).transpose(1, 2)
        mixed = self.attention(*heads.split((4, 2, 2), dim=1))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.scores(x).transpose(1, 2)


def losses(attention, steps):
    """Return the losses of a block that learns, from the same start."""
    block, random = Block(attention), torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.normal_(0, 0.1, generator=random)
    learning = torch.optim.AdamW(block.to(DEVICE).parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        steps_of = torch.randint(16, (4, 1), generator=random)
        tokens = (torch.arange(40) * steps_of % 16).to(DEVICE)
        scores = block(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores, tokens[:, 1:])
        found.append(loss.item())
        learning.zero_grad()
        loss.backward()
        learning.step()
    return torch.tensor(found)


if __name__ == "__main__":
    steps = 100 if DEVICE.type == "cuda" else 5
    with torch.random.fork_rng():  # the layers' first values, thrown away
        theirs = losses(partial(sdpa, is_causal=True, enable_gqa=True), steps)
        found = losses(CAUSAL, steps)
    for step in (0, steps // 2, steps - 1):
        print(f"step {step}: SDPA {theirs[step]:.5f}, the op {found[step]:.5f}")
    torch.testing.assert_close(found, theirs, rtol=1e-3, atol=0)

# %%
# How much memory?
# ----------------
#
# The table has the most memory that a forward and a backward take besides their
# inputs, for 16 heads of 64 in float16. PyTorch's operators keep the matrix.


def memory(op, length):
    """Return the megabytes that a forward and a backward take at most."""
    x = [random(1, 16, length, 64) for _ in range(4)]
    call = partial(backward_of, op, *x)
    call()()  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


if __name__ == "__main__" and DEVICE.type == "cuda":
    lengths = [512, 1024, 2048, 4096, 8192]
    tried = {"the op": flash_attention, "SDPA": sdpa}
    tried["PyTorch"] = attention_torch
    used = pd.DataFrame(
        {who: [memory(op, n) for n in lengths] for who, op in tried.items()},
        index=pd.Index(lengths, name="tokens"),
    )
    print("MB", used.round(1).to_string(), sep="\n")
    used.plot(logx=True, logy=True, ylabel="MB", title="forward and backward")

# %%
# The benchmark
# -------------
#
# The backward is causal, in float16, with heads of 64 and then of 128. At each
# length there are 16384 tokens in all. A causal mask leaves half of the
# operations. SDPA is told which library to call.


def by(library, *inputs):
    with sdpa_kernel(library):
        return sdpa(*inputs, is_causal=True)


LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
OPS = {
    "Triton": CAUSAL,
    "cuDNN": partial(by, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": partial(by, SDPBackend.FLASH_ATTENTION),
}


def calls(length, D):
    x = inputs(length, D)
    return {who: backward_of(op, *x) for who, op in OPS.items()}


def benchmark(D):
    times = {length: gpu_time(calls(length, D), 30) for length in LENGTHS}
    work = partial(operations, products=5 / 2)  # the mask leaves half
    table = rate_table(times, "tokens", "TFLOP/s", work)
    print(f"heads of {D}", table.to_string(), sep="\n")
    wide = table.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title=f"backward, causal, heads of {D}")
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results_backward_of_64 = benchmark(D=64)
    results_backward = benchmark(D=128)

# %%
# Reading the result
# ------------------
#
# The table of steps counts five products for one pass and for two. Where two
# passes show the higher rate, they are faster although they compute seven. What
# one pass does instead can be counted. Without a mask, each block of 128 keys
# adds to all rows of ``dq``. So 4096 keys add 32 float32 numbers to each
# element: 128 bytes, for a result of two. No figure here tells how long that
# takes beside the products, and the kernels differ in more: the op's have tiles
# of their own, exponentials of base 2, and masks only where needed. With heads
# of 64, *one pass, wide* spills registers, as *On other GPUs* shows.
#
# The benchmark and the table beside other libraries time the op: on Hopper, the
# kernels that it chooses. A short call may take the CPU longer than the GPU.
# Its rate counts while the GPU has other work, or in a CUDA graph.

# %%
# Break it
# --------
#
# A classic bug is a backward that always masks, though its forward need not. If
# all tests are causal, all of them pass. Only gradients of full attention show
# it, so the proof above has both. Here is that backward after each forward:

if __name__ == "__main__":
    *x, grad = (random(1, 2, 200, 64) for _ in range(4))
    for causal in (True, False):
        saved = *x, *flash_attention_with_lse(*x, causal)
        found = flash_attention_backward(grad, *saved, True, None)
        expected = expected_of(*x, grad, is_causal=causal)
        of = worst(found, expected, terms_of(*x, grad, causal), 2.0**-11)
        print(f"causal forward: {causal!s:5}, error {of:.2g} of the allowed")
        assert (of > 1) == (not causal)

# %%
# Go further
# ----------
#
# 1. What changes if the loss uses the log-sum-exp, which then has a gradient?
# 2. Which of the two passes could compute :math:`\delta` on its way?
#
# To read on:
#
# * `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, whose backward is
#   one pass.
# * ``rms_norm.py`` has partial sums and a second kernel, instead of atomics.

# %%
# Answers
# -------
#
# **1.** As :math:`\partial \ell_i / \partial s_{ij} = p_{ij}`, its gradient
# joins :math:`g_i \cdot v_j` in the parentheses. So both passes stay as they
# are, and :math:`\delta_i` becomes :math:`g_i \cdot o_i` minus that gradient.
#
# **2.** The pass for ``dq``, if it comes first. Its program has the rows of
# ``g``, and could read those of ``o``.
