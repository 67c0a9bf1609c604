"""FlashAttention: tests/test_rotary.py, tests/ops/triton/test_layer_norm.py, tests/losses/test_cross_entropy.py,
tests/ops/test_fused_dense.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
import triton
from comparing import arithmetic, check, grads, leaves, near, within
from losses import reference as loss_of
from references import rms, rotate, turned
from setting import (
    BF16,
    DEVICE,
    F16,
    F32,
    F64,
    GPU,
    composed,
    each,
    light,
    needs,
    not_taken,
    pick,
    rand,
    randint,
    randn,
)

from triton_gallery_ops.cross_entropy import cross_entropy
from triton_gallery_ops.cross_entropy_in_place import cross_entropy_in_place_
from triton_gallery_ops.dropout import dropout, dropout_seed
from triton_gallery_ops.layer_norm import layer_norm, layer_norm_residual
from triton_gallery_ops.linear_gelu import linear_gelu
from triton_gallery_ops.rms_norm import rms_norm, rms_norm_residual
from triton_gallery_ops.rope import rope, rope_
from triton_gallery_ops.tuned_matmul import tuned_matmul

EPS = 1e-6

# --- tests/test_rotary.py

BATCH = pick(32, 2)


def random_tables(length, R, dtype):
    angle = rand(2 * length, R // 2) * 2 * math.pi
    return angle.cos().to(dtype), angle.sin().to(dtype)


def right(x, cos, sin, interleaved):
    """Turned in float32, of (batch, tokens, heads, D), by rows of tables (tokens, R / 2) or (batch, tokens, R / 2)."""
    wide = F64 if x.dtype == F64 else F32
    return rotate(x.to(wide), cos.unsqueeze(-2).to(wide), sin.unsqueeze(-2).to(wide), interleaved).to(x.dtype)


def close(found, expected, what):
    near(found, expected, 2 * arithmetic(expected), 1e-3, what)


# In theirs a half or all of a head is turned; a quarter is ours.
ROTARY = [(begin, part, pairs) for begin in ("0", "int", "each") for part in (1.0, 0.5) for pairs in (False, True)]
ROTARY += [(begin, 0.25, pairs) for begin in ("0", "int") for pairs in (False, True)]


@each("begin, part, interleaved", *ROTARY)
@each("dtype", F16, BF16)
@each("inplace", False, True)
def test_rotary(begin, part, interleaved, dtype, inplace):
    """One tensor, from a position of all sequences or of each."""
    length, D = pick(217, 19), pick(128, 32)
    x, (cos, sin) = randn(BATCH, length, 4, D, dtype=dtype), random_tables(length, int(part * D), dtype)
    if begin == "each":
        offsets = randint(0, length + 1, (BATCH,))
        at, options = offsets[:, None] + torch.arange(length, device=DEVICE), {"seqlen_offsets": offsets}
        rows = cos[at], sin[at]
    else:
        start, options = 0 if begin == "0" else int(torch.randint(0, length + 1, ())), {}
        cos, sin = rows = cos[start : start + length], sin[start : start + length]
    a, b = *leaves(x), *leaves(x)
    expected = right(b, *rows, interleaved)
    if inplace:  # without a gradient
        rope_(turned(x), None, cos, sin, interleaved, **options)
        close(x, expected, "output")
        return
    found = turned(rope(turned(a), None, cos, sin, interleaved, **options)[0])
    close(found, expected, "output")
    upstream = torch.randn_like(expected)
    close(grads(found, a, upstream)[0], grads(expected, b, upstream)[0], "gradient")


@each("dtype", F16, BF16)
@each("heads_k", 4, 2)
@each("interleaved", False, True)
def test_rotary_qkv(dtype, heads_k, interleaved):
    """Queries and keys of one projection are turned where they are; values stay."""
    length, D = pick(512, 19), pick(128, 32)
    qkv = randn(BATCH, length, 4 + 2 * heads_k, D, dtype=dtype)
    cos, sin = (t[:length] for t in random_tables(length, D, dtype))
    q, k, v = qkv.split([4, heads_k, heads_k], 2)
    expected = torch.cat([right(q, cos, sin, interleaved), right(k, cos, sin, interleaved), v], 2)
    rope_(turned(q), turned(k), cos, sin, interleaved)
    close(qkv, expected, "q, k and v")


@each("interleaved", False, True)
def test_rotary_compiled(interleaved):
    needs(GPU, "torch.compile of an op needs a GPU")
    q, k = (turned(randn(4, 512, 4, 128, dtype=F16)) for _ in range(2))
    cos, sin = (t[:512] for t in random_tables(512, 128, F16))
    a, b = leaves(q, k), leaves(q, k)
    found = torch.compile(lambda q, k: rope(q, k, cos, sin, interleaved))(*a)
    expected = [turned(right(turned(x), cos, sin, interleaved)) for x in b]
    upstream = [torch.randn_like(x) for x in expected]
    for one, two in zip((*found, *grads(found, a, upstream)), (*expected, *grads(expected, b, upstream)), strict=True):
        close(one, two, "q and k, and gradients")


@each("offsets", False, True)
def test_rotary_varlen(offsets):
    """Packed sequences, from 0 or from a position of each."""
    lengths, D = pick([100, 1, 217, 60], [7, 1, 12]), pick(128, 32)
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(DEVICE)
    begins = randint(0, 50, (len(lengths),)) if offsets else None
    at = torch.cat([torch.arange(n, device=DEVICE) + (begins[i] if offsets else 0) for i, n in enumerate(lengths)])
    x, (cos, sin) = randn(sum(lengths), 4, D, dtype=F16), random_tables(300, D, F16)
    a, b = *leaves(x), *leaves(x)
    found = turned(rope(turned(a[None]), None, cos, sin, cu_seqlens=cu, seqlen_offsets=begins)[0])[0]
    expected = right(b, cos[at], sin[at], False)
    close(found, expected, "output")
    upstream = torch.randn_like(expected)
    close(grads(found, a, upstream)[0], grads(expected, b, upstream)[0], "gradient")


def test_compilations():
    """One kernel for the forward and one for the backward, whatever the batch and the length."""
    needs(GPU, "the interpreter compiles nothing")
    count, knobs = 0, triton.knobs.runtime

    def hook(*args, **others):
        nonlocal count
        count += 1

    before, knobs.jit_cache_hook = knobs.jit_cache_hook, hook
    try:
        for length in (128, 256):
            for batch in (4, 32):
                q, k = (turned(randn(batch, length, 2, 128, dtype=F16)).requires_grad_() for _ in range(2))
                out = rope(q, k, *(t[:length] for t in random_tables(length, 128, F16)))
                torch.autograd.backward(out, [torch.randn_like(x) for x in out])
    finally:
        knobs.jit_cache_hook = before
    assert count <= 2  # fewer where another test of this process made them


# --- tests/ops/triton/test_layer_norm.py

ATOL = {F16: 1e-2, BF16: 5e-2, F32: 1e-4}
NORMS = [(192, F16), (2048, BF16), (2560, F16), (3000, F32), (3000, BF16), (4096, F16)]


def normed(x, weight, bias, high):
    if bias is not None:
        wide = x.float() if high else x
        return F.layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), EPS).to(x.dtype)
    return rms(x, weight, EPS) if high else rms(x, None, EPS) * weight


@each("hidden, dtype", *NORMS, cpu=[(40, BF16)])
@each("kind", "layer", "rms", "rms+residual", "rms+residual+prenorm")
def test_layer_norm(hidden, dtype, kind):
    batch, length = pick((8, 512), (2, 5))
    light(batch * length * hidden, 1 << 13)
    x, residual = randn(batch, length, hidden, dtype=dtype), randn(batch, length, hidden, dtype=dtype)
    weight, bias = randn(hidden, dtype=dtype), randn(hidden, dtype=dtype)
    inputs = [x, weight, *([bias] if kind == "layer" else []), *([residual] if "residual" in kind else [])]

    def ours(x, weight, *others):
        if kind == "layer":
            return layer_norm(x, weight, *others, EPS)
        if not others:
            return rms_norm(x, weight, EPS)
        out, total = rms_norm_residual(x, *others, weight, EPS)
        return out * total.sigmoid() if "prenorm" in kind else out

    def theirs(high):
        def call(x, weight, *others):
            if "residual" not in kind:
                return normed(x, weight, others[0] if others else None, high)
            total = x.float() + others[0].float() if high else x + others[0]
            out = normed(total, weight, None, high)
            return (out * total.sigmoid() if "prenorm" in kind else out).to(x.dtype)

        return call

    results, upstream = [], randn(*x.shape, dtype=dtype) / batch
    for call in (ours, theirs(True), theirs(False)):
        a = leaves(*inputs)
        out = call(*a)
        results.append((out, *grads(out, a, upstream)))
    for n, found in enumerate(zip(*results, strict=True)):
        within(*found, 2, ATOL[dtype], f"result {n}")


@each("hidden", 192, 3000)
@each(
    "what",
    "weight in float32",
    "LayerNorm + residual",
    *(
        pytest.param(what, marks=composed)
        for what in ("residual in float32", "dropout", "rowscale", "x1 and weight1", "norm and linear")
    ),
)
def test_layer_norm_options(hidden, what):
    """Those of theirs that come before or after a norm are a line of PyTorch or another op, so are composed."""
    rows = pick(512, 2)
    x, other = (randn(rows, hidden, dtype=F16) for _ in range(2))
    weight, bias, scale = randn(hidden, dtype=F16), randn(hidden, dtype=F16), rand(rows, 1)
    seed = dropout_seed(DEVICE)
    kept = dropout(torch.ones_like(x), 0.3, seed)  # 0, or 1 / 0.7
    linear = randn(64, hidden, dtype=F16) / 16
    layer = lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS)  # noqa: E731
    ours, theirs, inputs = {
        "weight in float32": (lambda x, w: rms_norm(x, w, EPS), rms, (x, weight.float())),
        "LayerNorm + residual": (
            lambda *given: layer_norm_residual(*given, EPS),
            lambda x, r, w, b: [layer(x + r, w, b), x + r],
            (x, other, weight, bias),
        ),
        "residual in float32": (
            lambda x, r, w: rms_norm(x + r, w, EPS).to(x.dtype),
            lambda x, r, w: rms(x + r, w).to(x.dtype),
            (x, other.float(), weight),
        ),
        "dropout": (lambda x, w: rms_norm(dropout(x, 0.3, seed), w, EPS), lambda x, w: rms(x * kept, w), (x, weight)),
        "rowscale": (
            lambda x, w: rms_norm((x * scale).to(x.dtype), w, EPS),
            lambda x, w: rms((x * scale).to(x.dtype), w),
            (x, weight),
        ),
        "x1 and weight1": (
            lambda x, x1, w, w1: (lambda out, h: [out, rms_norm(h, w1, EPS)])(*rms_norm_residual(x, x1, w, EPS)),
            lambda x, x1, w, w1: [rms(x + x1, w), rms(x + x1, w1)],
            (x, other, weight, bias),
        ),
        "norm and linear": (
            lambda x, w, linear: F.linear(rms_norm(x, w, EPS), linear),
            lambda x, w, linear: F.linear(rms(x, w), linear),
            (x, weight, linear),
        ),
    }[what]
    # Sums over the rows are larger than the others.
    factors = [max(1.0, rows**0.5) if t.ndim == 1 or t is linear else 1.0 for t in inputs]
    check(ours, theirs, inputs, 1e-2, 1e-2, factors=factors)


# --- tests/losses/test_cross_entropy.py

VOCABULARIES = pick([50257, 128256], [1003, 2004])


def logits_of(rows, vocabulary, dtype):
    x, target = randn(rows, vocabulary, dtype=dtype), randint(0, vocabulary, (rows,))
    target[torch.randperm(rows, device=DEVICE)[:10]] = -100
    return x, target


@each("vocabulary", *VOCABULARIES)
@each("dtype", F16, F32, BF16)
@each("smoothing", 0.0, 0.9)
@each("inplace", False, True)
def test_cross_entropy(vocabulary, dtype, smoothing, inplace):
    rtol, atol = (1e-5, 1e-6) if dtype == F32 else (1e-3, 1e-4)
    x, target = logits_of(pick(1024, 20), vocabulary, dtype)
    a, b = *leaves(x), *leaves(x)
    expected, given = F.cross_entropy(b.float(), target, label_smoothing=smoothing), randn()
    if inplace:
        found = cross_entropy_in_place_(x, target, -100, smoothing)
        mine = x * given
    else:
        found = cross_entropy(a, target, -100, smoothing)
        mine = grads(found, a, given)[0]
    near(found, expected, 1e-6, 1e-5, "loss")
    near(mine, grads(expected, b, given)[0], atol, rtol, "gradient")


@each("vocabulary", *VOCABULARIES)
@each("what", "z-loss", pytest.param("logit_scale", marks=composed), "lse", "parallel")
def test_cross_entropy_options(vocabulary, what):
    if what in ("lse", "parallel"):
        not_taken(what)
    x, target = logits_of(pick(1024, 20), vocabulary, F32)
    squares, scale = (1e-4, 1.0) if what == "z-loss" else (0.0, 0.7)
    check(
        lambda x: cross_entropy(x * scale, target, lse_square_scale=squares),
        lambda x: loss_of(x * scale, target, -100, 0.0, lse_square_scale=squares),
        (x,),
        1e-6,
        1e-5,
    )


# --- tests/ops/test_fused_dense.py

DENSE = pick([(1024, 1024), (1024, 4096), (4096, 1024)], [(40, 72), (72, 40), (33, 65)])


@each("features", *DENSE)
@each("has_bias", True, False)
@each("dtype, atol", (F16, 1e-3), (BF16, 3e-2))
def test_fused_mlp(features, has_bias, dtype, atol):
    """A linear layer, tanh GELU, a linear layer: the first two are the op."""
    into, inner = features
    batch, length = pick((8, 512), (2, 9))
    x = randn(batch, length, into, dtype=dtype)
    first = torch.nn.Linear(into, inner, has_bias, device=DEVICE)
    second = torch.nn.Linear(inner, into, device=DEVICE)
    weights = [p.detach().to(dtype) for p in (*first.parameters(), *second.parameters())]

    def mlp(activated):
        def call(x, weight, *others):
            return F.linear(activated(x, weight, others[0] if has_bias else None), *others[has_bias:])

        return call

    ours = mlp(lambda x, w, b: linear_gelu(x, w, b, "tanh"))
    theirs = mlp(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"))
    factors = [1.0, *([10.0, 5.0] if has_bias else [10.0]), 10.0, 5.0]
    check(ours, theirs, (x, *weights), atol, 3e-3, randn(batch, length, into, dtype=dtype) / 32, factors)


@each("activation", "relu", None)
@each("features", *DENSE[:2])
def test_fused_dense(activation, features):
    """A linear layer with ReLU, or with a bias alone."""
    into, inner = features
    x, layer = randn(pick(512, 18), into, dtype=F16), torch.nn.Linear(into, inner, device=DEVICE)
    weights = [p.detach().half() for p in layer.parameters()]
    check(
        lambda x, w, b: tuned_matmul(x, w.t(), b, activation),
        lambda x, w, b: F.linear(x, w, b).relu() if activation else F.linear(x, w, b),
        (x, *weights),
        3e-3,
        3e-3,
        factors=[2.0, 10.0, 10.0],
    )
