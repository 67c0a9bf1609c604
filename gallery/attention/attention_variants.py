# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Hand attention a bias, cap, window or documents as functions, and skip the
# tiles that no query sees, forward and backward."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "twelve functions of variants, a forward, two passes of a backward"
# ///
r"""
Attention with your own score
=============================

Models change attention in small ways: a window, a bias, a cap, documents side
by side, a sink. One kernel serves them all if it takes the change as a
function. A second function says which keys a query sees. From it the kernel
derives the mask, and skips the tiles that no query sees.

After this page you can

* hand a jitted function to a kernel, with tensors and numbers of its own;
* skip the tiles that a window or documents hide, forward and backward;
* mask only the tiles that need it, by one branch;
* put an attention sink into a softmax;
* add a variant in a few lines, with gradients.
"""

# sphinx_gallery_tags = ["attention", "autograd", "compute bound"]
import os
from functools import partial

import pandas as pd
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
from triton_gallery.counting import statements


def flex(score_mod, mask_mod, length):
    """Return compiled flex_attention, with a block mask made beforehand."""
    from torch.nn.attention.flex_attention import (
        create_block_mask,
        flex_attention,
    )

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = create_block_mask(mask_mod, None, None, length, length, DEVICE)
    return partial(compiled, score_mod=score_mod, block_mask=mask)


def backward_of(op, q, k, v, grad):
    """Return a call that computes an op's gradients through autograd."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    grads = partial(torch.autograd.grad, retain_graph=True)
    return partial(grads, op(*leaves), leaves, grad)


def slopes_of(heads):  # of ALiBi, for a power of two of heads
    return torch.exp2(torch.arange(1, heads + 1, device=DEVICE) * -8.0 / heads)


def documents_of(length, count=12):
    """Return for each token where its document begins; lengths differ."""
    cuts = torch.linspace(0, 1, count + 1)[:-1].square() * length
    sizes = cuts.long().diff(append=torch.tensor([length]))
    begins = cuts.long().repeat_interleave(sizes)
    return begins.to(device=DEVICE, dtype=torch.int32)


def spans_of(length):
    """Return for each variant the first key that each query sees."""
    i = torch.arange(length, device=DEVICE)
    return {
        "causal": 0 * i,
        "window of 1024": (i - 1023).clamp(min=0),
        "12 documents": documents_of(length),
    }


# %%
# In PyTorch
# ----------
#
# Attention is :math:`o_i = \sum_j p_{ij} v_j`, where :math:`p_{ij}` is a
# softmax over :math:`j` of the scores :math:`s_{ij} = q_i \cdot k_j / \sqrt D`.
# A *variant* changes the scores, or hides keys:
#
# * **ALiBi** subtracts slope times distance: :math:`s_{ij} - a_h (i - j)`;
# * a **soft cap** keeps scores between :math:`\pm c`: :math:`c \tanh(s / c)`;
# * in a **window** of ``W``, query ``i`` sees the last ``W`` keys up to ``i``;
# * with **documents** side by side, it sees those of its own one up to ``i``.
#
# The *floor* is to compute what is seen. How much does a window of 1024 leave?

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def alibi_window_torch(q, k, v, slopes, size):
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    distance = i - i.T
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores - slopes[:, None, None] * distance
    hidden = (distance < 0) | (distance >= size)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v


if __name__ == "__main__":
    for length in (1024, 4096, 16384):
        seen = sum(min(i + 1, 1024) for i in range(length)) / length**2
        print(f"{length:5} tokens: {seen:3.0%} of the scores are seen")

# %%
# The first kernel
# ----------------
#
# A kernel can take a jitted function, as a ``tl.constexpr``. The compiler puts
# its code in place of the call, and makes a kernel for each function. Here
# ``SCORE`` gets a tile of scores and its place: batch, head, a column of
# queries ``i`` and a row of keys ``j``. What else it needs is in ``given``, a
# tuple of tensors and numbers; ``tl.constexpr`` makes a number a constant. A
# star hands the elements on one by one. A score of ``-inf`` hides a key:
#
# .. code-block:: text
#
#     one tile      j: keys start to start + BLOCK_N - 1
#                 +------------------------+
#     i: BLOCK_M  |       scores  s        | -> SCORE(s, batch, head, i, j,
#     queries     +------------------------+          *given)
#
# The rest is the *online* softmax of ``flash_attention_forward.py``: ``m`` is
# the maximum so far, ``total`` the sum of exponentials, ``acc`` that of values.


@triton.jit
def alibi_window(s, batch, head, i, j, slopes, SIZE):
    s -= tl.load(slopes + head) * (i - j)
    return tl.where((j <= i) & (i - j < SIZE), s, -float("inf"))


@triton.jit
def score_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    given,
    scale,
    HEADS,
    L,
    SCORE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # In int32, the offset of a head would overflow past element 2**31.
    pid = tl.program_id(axis=1).to(tl.int64)
    i = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    own = pid * L * D + i * D + tl.arange(0, D)[None, :]  # (BLOCK_M, D)
    q = tl.load(q_ptr + own, mask=i < L, other=0.0)
    # Not -inf: that minus itself, for a row that has seen no key yet, is NaN.
    m = tl.full((BLOCK_M, 1), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, L, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
        offs = pid * L * D + offs_n * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + offs, mask=offs_n < L, other=0.0)
        v = tl.load(v_ptr + offs, mask=offs_n < L, other=0.0)
        j = start + tl.arange(0, BLOCK_N)[None, :]  # (1, BLOCK_N)
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        s = SCORE(s, pid // HEADS, pid % HEADS, i, j, *given)
        s = tl.where(j < L, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp(s - m_new)  # (BLOCK_M, BLOCK_N)
        # What was added up so far had the old maximum.
        rescale = tl.exp(m - m_new)  # (BLOCK_M, 1)
        total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale)
        m = m_new
    tl.store(out_ptr + own, acc / total, mask=i < L)


def attention(q, k, v, score, *given, kernel=score_kernel, **more):
    """Return a variant of attention of contiguous (batch, heads, L, D)."""
    (batch, heads, L, D), out = q.shape, torch.empty_like(q)
    tile = {"D": D, "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
    launch = kernel[(triton.cdiv(L, 128), batch * heads)]
    launch(q, k, v, out, given, D**-0.5, heads, L, score, **tile, **more)
    return out


# %%
# Is it right?
# ------------
#
# In float16, the probabilities and the result are each rounded, by at most
# :math:`2^{-11}` of the largest ``v``. We allow twice the sum of both.

if __name__ == "__main__":
    x = [random(2, 4, 200, 64) for _ in range(3)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
    out = attention(*x, alibi_window, slopes, tl.constexpr(100))
    expected = alibi_window_torch(*(t.double() for t in x), slopes, 100)
    error, atol = (out - expected).abs().max(), 2**-9 * x[2].abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# The window is 1024. A seen score counts :math:`4D` operations.

TOKENS, HEADS = 16384, 16  # tokens in all, at each length


if __name__ == "__main__" and DEVICE.type == "cuda":
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device=DEVICE) / 2)
    for length in (1024, 2048, 4096):
        x = [random(TOKENS // length, HEADS, length, 128) for _ in range(3)]
        own = *x, alibi_window, slopes, tl.constexpr(1024)
        fast = torch.compile(alibi_window_torch, dynamic=False, fullgraph=True)
        tried = {"PyTorch": partial(alibi_window_torch, *x, slopes, 1024)}
        tried["torch.compile"] = partial(fast, *x, slopes, 1024)
        tried["Triton"] = partial(attention, *own)
        found = gpu_time(tried, turns=20).items()
        seen = sum(min(i + 1, 1024) for i in range(length))
        work = 4e-9 * 128 * HEADS * TOKENS / length * seen
        rates = {who: round(work / ms) for who, (ms, *_) in found}
        print(f"{length} tokens, TFLOP/s: {rates}")

# %%
# Which tiles does nobody see?
# ----------------------------
#
# The first kernel computes all scores, then hides most. Which could it leave
# out? In these variants, the keys that a query sees lie side by side. So let a
# second function, ``SPAN``, return where they begin and end. A later query's
# span neither begins nor ends earlier: spans *only move on*. So the first and
# the last query of a block tell what the whole block sees:
#
# .. code-block:: text
#
#     window of 9     keys 0-3   keys 4-7   keys 8-11  keys 12-15
#     query  8        # # # #  | # # # #  | # . . .  | . . . .
#     query  9        . # # #  | # # # #  | # # . .  | . . . .
#     query 10        . . # #  | # # # #  | # # # .  | . . . .
#     query 11        . . . #  | # # # #  | # # # #  | . . . .
#                       mask       full       mask       skip
#
# The block begins to see keys where its first query does, at 0, and stops where
# its last query does, before 12. So the loop over keys goes from 0 to 12, and
# the mask comes from the span of each query. How many tiles are left? We count
# those of 64 queries and 64 keys, for 16384 tokens. That needs no GPU.


def inputs(length, D=128):
    return [random(TOKENS // length, HEADS, length, D) for _ in range(4)]


def operations(begins, D=128):  # of a forward, in units of 10**9
    length = len(begins)
    ends = torch.arange(1, length + 1, device=DEVICE)
    return 4e-9 * D * HEADS * TOKENS / length * (ends - begins).sum().item()


BLOCK_M, BLOCK_N = 64, 64


def tiles_of(begins):
    """Return the number of tiles, of those computed and of those masked."""
    length = len(begins)
    computed = masked = 0
    for first in range(0, length, BLOCK_M):
        final = min(first + BLOCK_M, length) - 1
        start, latest = begins[first].item(), begins[final].item()
        for block in range(start, final + 1, BLOCK_N):
            full = block >= latest and block + BLOCK_N <= first + 1
            computed, masked = computed + 1, masked + (not full)
    blocks = triton.cdiv(length, BLOCK_M) * triton.cdiv(length, BLOCK_N)
    return blocks, computed, masked


if __name__ == "__main__":
    rows = {variant: tiles_of(b) for variant, b in spans_of(16384).items()}
    print(pd.DataFrame(rows, ["all", "computed", "masked"]).T.to_string())

# %%
# Which tiles need a mask?
# ------------------------
#
# A mask costs two comparisons for each score. In a tile where every query sees
# every key, it hides nothing: such a tile is *full*. In the drawing, the full
# tile lies between the last query's begin, 3, and the first query's end, 9. In
# the op these are ``latest`` and ``every``. A tile that begins before
# ``latest`` or ends past ``every`` is masked; the table's last column counts
# these. Both are numbers, not tiles, so all threads take the same branch.

# %%
# What does a backward need?
# --------------------------
#
# ``flash_attention.py`` derives the gradient of a score :math:`s'_{ij}`, the
# one that enters the softmax: :math:`p_{ij} (g_i \cdot v_j - \delta_i)` with
# :math:`\delta_i = g_i \cdot o_i`, where :math:`g` is the gradient of
# :math:`o`. A variant adds one factor, the derivative of its function:
#
# .. math:: \mathrm{d}s_{ij} = p_{ij} (g_i \cdot v_j - \delta_i)
#    \, \frac{\partial s'_{ij}}{\partial s_{ij}}, \qquad
#    \frac{\partial}{\partial s} \left(c \tanh \frac{s}{c}\right) =
#    1 - \tanh^2 \frac{s}{c}
#
# That is a third function, ``SLOPE``. ALiBi, whose factor is 1, needs none.
#
# One pass goes along keys for ``dq``, with the loop of the forward. The other
# goes along *queries* for ``dk`` and ``dv``. Which queries see a block of keys?
# Spans only move on, so the blocks of queries are in this order:
#
# .. code-block:: text
#
#     keys 8-11 of the window above
#     queries 0-3, 4-7             end before key 8     too early
#     queries 8-11, 12-15, 16-19   see some
#     queries 20-23, 24-27, ...    begin past key 11    too late
#
# A program counts, 128 blocks at a time, those that end too early and those
# that do not begin too late. Its loop goes from the first count to the second.

# %%
# A sink
# ------
#
# A softmax has to give its weights to somebody, even where no key fits. A
# *sink* :math:`z_h`, a number that each head learns, is one more score, of a
# key that is not there, and has no value:
#
# .. math:: p_{ij} = \frac{e^{s_{ij}}}{e^{z_h} + \sum_k e^{s_{ik}}}, \qquad
#    \mathrm{d}z_h = -\sum_i \frac{e^{z_h}}{e^{z_h} + \sum_k e^{s_{ik}}}
#    \, \delta_i
#
# The online softmax starts with the sink: the maximum begins as the sink, and
# the sum as 1 instead of 0. No loop changes. The sink's gradient needs only
# what the backward has: the log-sum-exp of each row, and :math:`\delta`. This
# page does not time a sink. The paper on attention sinks, below, has another
# way: it keeps the keys of the first tokens, beside a window. These do not lie
# side by side, so no span has both. A score of ``-inf`` with the span "causal"
# can hide the keys between them, but does not skip their tiles.

# %%
# The op
# ------
#
# ``score`` and ``span`` are names, or tuples of a name and what its function is
# given. Two dictionaries have the functions; add yours. Exponentials have base
# 2, and the op takes any lengths and strides, groups of heads, and heads of up
# to 256, as ``flash_attention.py`` explains.

from triton_gallery_ops.attention_variants import (
    ATTENTION_VARIANTS_SCORES,
    ATTENTION_VARIANTS_SPANS,
    _attention_variants_alibi,
    _attention_variants_kernel,
    _attention_variants_place,
    _attention_variants_seen,
    _attention_variants_window,
    attention_variants,
)

# %%
# What did it gain to skip tiles, and to mask fewer? The table has TFLOP/s of
# the forward, for seen scores with ALiBi and a window of 1024, and statements.
# It does not tell the two apart, and the op has exponentials of base 2 besides.


def by_op(q, k, v, slopes, size):
    return attention_variants(q, k, v, ("alibi", slopes), ("window", size))


def first_step(q, k, v, slopes, size):
    return attention(q, k, v, alibi_window, slopes, tl.constexpr(size))


PARTS = _attention_variants_place, _attention_variants_seen
BY_OP = _attention_variants_alibi, _attention_variants_window
STEPS = {
    "first kernel": (first_step, score_kernel, alibi_window),
    "the op": (by_op, _attention_variants_kernel, *PARTS, *BY_OP),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*step[1:]) for step in STEPS.values()]
    for length in (4096, 16384):
        *x, _ = inputs(length)
        given = slopes_of(HEADS), 1024
        tried = {who: partial(s[0], *x, *given) for who, s in STEPS.items()}
        work = operations(spans_of(length)["window of 1024"])
        found = gpu_time(tried, turns=20)
        rates = [round(work / found[who][0]) for who in STEPS]
        ladder[f"{length} tokens"] = rates
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare each dtype with float64: ragged lengths, more keys than queries and
# fewer, padded heads, shared heads of keys, no keys, no queries. A rounding is
# :math:`2^{-11}` in float16, and :math:`2^{-7}` in bfloat16, where the
# interpreter cuts bits off. In the others, a score is a sum of rounded terms,
# and we allow :math:`2^{-18}` and :math:`2^{-45}`. The result may have two
# roundings of :math:`\sum_j p_{ij} |v_j|` and two of itself. A gradient may
# have sixteen of its largest element, because three factors in it are rounded.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}
SHAPES = [  # batch, heads, heads of keys, queries, keys, D
    (1, 2, 1, 70, 90, 64),
    (2, 2, 2, 20, 30, 40),
    (1, 1, 1, 5, 0, 16),
    (1, 2, 1, 0, 7, 16),
]
SCORES = {
    "plain": lambda s, i, j: s,
    "alibi": lambda s, i, j, a: s - a.double()[:, None, None] * (i - j),
    "softcap": lambda s, i, j, cap: cap * torch.tanh(s / cap),
}
SPANS = {
    "all": lambda i: (0 * i, 0 * i + 2**30),
    "causal": lambda i: (0 * i, i + 1),
    "window": lambda i, size: (i + 1 - size, i + 1),
    "documents": lambda i, begins: (begins[:, None], i + 1),
}


def reference(q, k, v, score, span, sinks=None):
    """Return a variant of attention in float64, and the sum of p |v|."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    (name, *given), (span_name, *span_given) = score, span
    s = SCORES[name]((q @ k.mT) * q.shape[-1] ** -0.5, i, j, *given)
    begin, end = SPANS[span_name](i, *span_given)
    s = s.masked_fill((j < begin) | (j >= end), -torch.inf)
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], -1)
    # A row that sees nothing has no largest score.
    m = s.amax(-1, keepdim=True).clamp(min=-1e300) if s.numel() else 0.0
    p = (s - m).exp()
    total = p.sum(-1, keepdim=True)
    p = (p / total.masked_fill(total == 0, 1.0))[..., : k.shape[2]]
    return p @ v, p @ v.abs()


def prove(shape, dtype, score, span, with_sinks=False):
    batch, heads, shared, LQ, LK, D = shape
    q, grad = (random(batch, heads, LQ, D, dtype=dtype) for _ in range(2))
    k, v = (random(batch, shared, LK, D, dtype=dtype) for _ in range(2))
    sinks = [random(heads, dtype=torch.float64)] if with_sinks else []
    leaves = [t.requires_grad_() for t in (q, k, v, *sinks)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out = attention_variants(*leaves[:3], score, span, *leaves[3:])
    expected, terms = reference(*wide[:3], score, span, *wide[3:])
    assert (out.dtype, out.shape) == (dtype, q.shape)
    least = torch.finfo(dtype).smallest_normal  # below, bits are lost
    allowed = 2 * EPS[dtype] * (terms + expected.abs()) + least
    assert ((out.double() - expected).abs() <= allowed).all(), (score, span)
    grads = torch.autograd.grad(out, leaves, grad)
    rights = torch.autograd.grad(expected, wide, grad.double())
    for one, right in zip(grads, rights, strict=True):
        error, size = (one.double() - right).abs(), right.abs()
        largest = size.amax().clamp(min=1.0) if size.numel() else 1.0
        assert (error <= 16 * EPS[dtype] * largest).all(), (score, span)


def variants_of(heads, length):
    """Return scores and spans, each with what it is given."""
    slopes, begins = slopes_of(heads), documents_of(length, count=5)
    scores = ("plain",), ("alibi", slopes), ("softcap", 2.0)
    spans = ("all",), ("causal",), ("window", 30), ("documents", begins)
    return scores, spans


if __name__ == "__main__":
    for dtype in EPS:
        for shape in SHAPES:
            scores, spans = variants_of(shape[1], shape[3])
            for place, span in enumerate(spans):
                score = scores[place % 3]
                prove(shape, dtype, score, span, with_sinks=place % 2 == 0)
else:  # imported: a glance
    prove((1, 2, 1, 33, 70, 32), torch.float16, ("softcap", 2.0), ("window", 9))

# %%
# ``gradcheck`` compares the gradients with differences of the forward, those of
# the sinks, too. A sink of ``-inf`` is none:

if __name__ == "__main__":
    shapes = (1, 2, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (2,)
    leaves = [random(*shape, dtype=torch.float64) for shape in shapes]
    leaves = [t.requires_grad_() for t in leaves]
    for span in ("all", ("window", 2)):

        def op(q, k, v, sinks, span=span):
            return attention_variants(q, k, v, ("softcap", 2.0), span, sinks)

        assert torch.autograd.gradcheck(op, leaves)
    none = torch.full((2,), -torch.inf, device=DEVICE)
    out = attention_variants(*leaves[:3], sinks=none)
    assert torch.equal(out, attention_variants(*leaves[:3]))

# %%
# Your own variant
# ----------------
#
# A *prefix* that all queries see, as an image before a text, and a causal mask
# after it. It takes these lines, and has gradients, skipped tiles and masks:


@triton.jit
def prefix(batch, head, i, LENGTH):
    return 0, tl.maximum(i + 1, LENGTH)


ATTENTION_VARIANTS_SPANS["prefix"] = prefix

if __name__ == "__main__":
    SPANS["prefix"] = lambda i, n: (0 * i, (i + 1).clamp(min=n))
    prove((1, 2, 1, 140, 140, 64), torch.float16, ("plain",), ("prefix", 70))

# %%
# Kernels call a score in each tile, and a span for a block's first and last
# query and for all of its queries. Each ``i`` and ``j`` is a place that exists,
# so both may load there from what they are given; with the option
# ``bottom_right``, an ``i`` may be below 0. A score that does more than add to
# ``s`` needs a slope, the second function of its entry.

# %%
# The benchmark
# -------------
#
# Each variant has float16, heads of 128, and 16384 tokens in all; the op is
# measured beside compiled ``flex_attention``, whose block mask is made
# beforehand. Libraries with a window of their own were not measured. A window
# is 1024; a sequence has twelve documents of mixed length. A score that is seen
# counts as :math:`4D` operations forward, :math:`10D` backward.


def variants(length):
    """Return of each variant its begins, the op, and flex's functions."""
    spans, slopes = spans_of(length), slopes_of(HEADS)
    begins = spans["12 documents"]
    op = partial(partial, attention_variants)

    bias, cap = ("alibi", slopes), ("softcap", 20.0)
    causal = lambda b, h, i, j: j <= i  # noqa: E731
    return {
        "window": (
            spans["window of 1024"],
            op(span=("window", 1024)),
            (None, lambda b, h, i, j: (j <= i) & (i - j < 1024)),
        ),
        "documents": (
            begins,
            op(span=("documents", begins)),
            (None, lambda b, h, i, j: (j <= i) & (j >= begins[i])),
        ),
        "ALiBi": (
            spans["causal"],
            op(score=bias, span="causal"),
            (lambda s, b, h, i, j: s - slopes[h] * (i - j), causal),
        ),
        "soft cap": (
            spans["causal"],
            op(score=cap, span="causal"),
            (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), causal),
        ),
    }


def benchmark(backward):
    times, work = {}, {}
    for length in (4096, 16384):
        for name, (begins, ours, theirs) in variants(length).items():
            *x, grad = inputs(length)
            tried = {"Triton": ours, "flex_attention": flex(*theirs, length)}
            if backward:
                calls = {w: backward_of(f, *x, grad) for w, f in tried.items()}
            else:
                calls = {who: partial(f, *x) for who, f in tried.items()}
            size = f"{name}, {length}"
            times[size] = gpu_time(calls, turns=20)
            work[size] = operations(begins) * (2.5 if backward else 1)
    table = rate_table(times, "variant", "TFLOP/s", work.get)
    print(table.to_string())
    wide = table.pivot(index="variant", columns="series", values="TFLOP/s")
    wide.loc[[*times]].plot.barh(title="backward" if backward else "forward")
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark(backward=False)
    results_backward = benchmark(backward=True)

# %%
# Reading the result
# ------------------
#
# Both skip tiles that nobody sees. The op's begin where a span does, those of
# ``flex_attention`` where a block of its block mask does. A soft cap takes one
# exponential and one division more for each score. By the count above, a window
# masks a larger part of its tiles than a causal mask does, and a program has
# fewer of them. In the table, a window has a lower rate than ALiBi, whose span
# is causal. Whether these two things cause that, no figure here tells.

# %%
# Break it
# --------
#
# The op asks a block's first and last query for its span, so spans must move
# on. Here later queries see fewer keys: the result is wrong, and nothing
# raises. A score of ``-inf``, with the span "all", gets it right, and skips no
# tile:


@triton.jit
def shrinking(batch, head, i, LENGTH):
    return 0, -i + LENGTH


@triton.jit
def shrinking_score(s, batch, head, i, j, LENGTH):
    return tl.where(i + j < LENGTH, s, -float("inf"))


ATTENTION_VARIANTS_SPANS["shrinking"] = shrinking
ATTENTION_VARIANTS_SCORES["shrinking"] = shrinking_score, None

if __name__ == "__main__":
    q, k, v = (random(1, 1, 200, 64, dtype=torch.float32) for _ in range(3))
    SPANS["shrinking"] = lambda i, n: (0 * i, n - i)
    right, _ = reference(q, k, v, ("plain",), ("shrinking", 200))
    by_span = attention_variants(q, k, v, span=("shrinking", 200))
    by_score = attention_variants(q, k, v, ("shrinking", 200))
    for how, out in {"span": by_span, "score": by_score}.items():
        error = (out - right).abs().max().item()
        print(f"by a {how}: largest error {error:.1e}")
        assert (error > 1e-3) == (how == "span")

# %%
# Go further
# ----------
#
# 1. In ALiBi, :math:`a_h i` is the same for all keys of a query, and a softmax
#    does not change if a number is added to all its scores. Why does the op not
#    leave it out?
# 2. How would the gradient of ALiBi's slopes be computed?
#
# To read on:
#
# * `FlexAttention <https://arxiv.org/abs/2412.05496>`_, which has these two
#   functions, and lists of blocks.
# * `ALiBi <https://arxiv.org/abs/2108.12409>`_, the `soft cap of Gemma 2
#   <https://arxiv.org/abs/2408.00118>`_, and `attention sinks
#   <https://arxiv.org/abs/2309.17453>`_.

# %%
# Answers
# -------
#
# **1.** :math:`s_{ij} + a_h j` grows along the keys, to thousands. In float32,
# it has fewer bits after the point there, and the differences between scores,
# which make the softmax, would lose them. The distance is small where the
# weights are large.
#
# **2.** As :math:`\partial s'_{ij} / \partial a_h = -(i - j)`, it is
# :math:`-\sum_{ij} (i - j)\, p_{ij} (g_i \cdot v_j - \delta_i)`. The pass
# for ``dq`` has all of that. Each program would add up its part, and store one
# number.
