"""Liger-Kernel: test/transformers/test_softmax.py, test_swiglu.py, test_geglu.py, test_rope.py, test_llama4_rope.py,
test_qwen2vl_mrope.py.
"""

import pytest
import torch
import torch.nn.functional as F
from comparing import check
from references import rotate, tables, turned
from setting import BF16, F16, F32, F64, composed, each, light, not_taken, pick, randint, randn

from triton_gallery_ops.moe_layer import moe_layer
from triton_gallery_ops.rope import rope
from triton_gallery_ops.softmax import softmax
from triton_gallery_ops.softmax_long import softmax_long
from triton_gallery_ops.swiglu import swiglu, swiglu_packed


@pytest.mark.parametrize("call", [softmax, softmax_long], ids=["softmax", "softmax_long"])
@each("shape", (2, 8), (4, 16), (1, 1023), (3, 7, 256), (1, 4096), (1, 2, 4096))
@each("dtype, tol", (F32, 1e-5), (BF16, 5e-2))
def test_softmax(call, shape, dtype, tol):
    check(call, lambda x: torch.softmax(x, -1), (randn(*shape, dtype=dtype),), tol, tol)


# --- SwiGLU


@each("batch, length, hidden, inner", (2, 256, 256, 512), (6, 42, 123, 431))
@each("dtype, atol, rtol", (F32, 1e-0, 1e-5), (BF16, 1e4, 1e-2))
@each("packed", False, True)
def test_mlp(batch, length, hidden, inner, dtype, atol, rtol, packed):
    """LlamaMLP with two projections, Phi3MLP with one."""
    light(batch * length * inner, 1 << 17)

    def mlp(activation):
        return lambda x, gate_up, down: F.linear(activation(x, gate_up), down)

    def two(x, gate_up):
        return swiglu(*(F.linear(x, weight) for weight in gate_up.chunk(2)))

    def theirs(x, gate_up):
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.silu(gate) * up

    ours = mlp((lambda x, gate_up: swiglu_packed(F.linear(x, gate_up))) if packed else two)
    shapes = (batch, length, hidden), (2 * inner, hidden), (hidden, inner)
    check(ours, mlp(theirs), [randn(*shape, dtype=dtype) for shape in shapes], atol, rtol)


@each("shape", (2, 8, 8), (9, 7, 41))
@each("dtype, atol, rtol", (F32, 1e-3, 1e-5), (BF16, 1e-1, 1e-2))
@each("factors", (1.0, 1.0), *(pytest.param(factors, marks=composed) for factors in ((0.7, 1.3), (1.5, 0.5))))
@each("packed", False, True)
def test_silu_mul(shape, dtype, atol, rtol, factors, packed):
    """Of Falcon-H1: silu(a * gate) * up * b is gate * sigmoid(a * gate) * up, times a * b."""
    a, b = factors
    half = shape[-1]

    def ours(x):
        out = swiglu_packed(x, alpha=a) if packed else swiglu(x[..., :half], x[..., half:], alpha=a)
        return out if a * b == 1 else out * (a * b)

    def theirs(x):
        return F.silu(x[..., :half] * a) * x[..., half:] * b

    check(ours, theirs, (randn(*shape[:-1], 2 * half, dtype=dtype),), atol, rtol)


@each("sizes", (2, 256, 256, 512), (9, 41, 341, 4231), cpu=[(2, 5, 30, 70)])
def test_geglu(sizes):
    """LigerGEGLUMLP: the tanh of GELU."""
    batch, length, hidden, inner = sizes
    light(batch * length * inner, 1 << 13)
    inputs = [randn(*shape) for shape in ((batch, length, hidden), (inner, hidden), (inner, hidden), (hidden, inner))]

    def mlp(activation):
        return lambda x, gate, up, down: F.linear(activation(F.linear(x, gate), F.linear(x, up)), down)

    ours = mlp(lambda gate, up: swiglu(gate, up, "gelu_tanh"))
    check(ours, mlp(lambda gate, up: F.gelu(gate, approximate="tanh") * up), inputs, 1e-0, 1e-5)


@each("sizes", (2, 256, 256, 512), (6, 42, 123, 431), cpu=[(1, 9, 20, 24)])
@each("dtype, atol, rtol", (F32, 1e-3, 1e-4), (BF16, 1e-1, 1e-2))
def test_experts(sizes, dtype, atol, rtol):
    """LigerExperts, with the tolerances of LigerFusedMoEFunction: each token has two of eight experts."""
    batch, length, hidden, inner = sizes
    tokens = batch * length
    light(tokens * inner, 1 << 9)
    weights, experts = randn(tokens, 8).softmax(-1).topk(2)
    shapes = (tokens, hidden), (8, 2 * inner, hidden), (8, hidden, inner)
    x, gate_up, down = (randn(*shape, dtype=dtype) for shape in shapes)

    def theirs(x, weights, gate_up, down):
        rows = []
        for choice in range(2):
            gate, up = torch.einsum("th,tfh->tf", x, gate_up[experts[:, choice]]).chunk(2, -1)
            y = torch.einsum("tf,thf->th", F.silu(gate) * up, down[experts[:, choice]])
            rows.append(y * weights[:, choice, None])
        return sum(rows).to(x.dtype)

    ours = lambda x, weights, *rest: moe_layer(x, weights, experts.int(), *rest)  # noqa: E731
    check(ours, theirs, (x, weights.to(dtype), gate_up / hidden**0.5, down / inner**0.5), atol, rtol)


# --- RoPE

in_dtypes = each("dtype, atol, rtol", (F32, 1e-5, 1e-5), (BF16, 1e-1, 1e-5), (F16, 1e-2, 1e-5))
SIZES = [(1, 128, 32, 32, 64), (2, 128, 32, 8, 64), (3, 423, 73, 213, 92), (3, 423, 73, 155, 92), (1, 8192, 32, 8, 128)]
SIZES += [(1, 2, 2, 2, 8), (1, 2, 1, 2, 8), (9, 7, 41, 41, 41)]


def turn(q, k, cos, sin, atol, rtol, rows=None, **options):
    """Compare RoPE of q and k, which takes rows of tables (tokens, R / 2), or these ``rows`` by its options."""
    rows = [t.unsqueeze(-3) if t.ndim > 2 else t for t in rows or (cos, sin)]
    check(lambda q, k: rope(q, k, cos, sin, **options), lambda *qk: [rotate(x, *rows) for x in qk], (q, k), atol, rtol)


@each("sizes", *SIZES)
@in_dtypes
def test_rope(sizes, dtype, atol, rtol):
    batch, length, hq, hk, D = sizes
    if D % 2:
        not_taken("odd_rope")
    light(batch * length * (hq + hk) * D, 1 << 17)
    q, k = (turned(randn(batch, length, heads, D, dtype=dtype)) for heads in (hq, hk))
    turn(q, k, *tables(length, D, dtype), atol, rtol)


@each("sizes", *SIZES[1:4], cpu=[(2, 9, 4, 2, 16)])
def test_rope_each(sizes):
    """expand_position_ids: tables of each sequence."""
    batch, length, hq, hk, D = sizes
    light(batch * length * (hq + hk) * D, 1 << 17)
    q, k = (turned(randn(batch, length, heads, D)) for heads in (hq, hk))
    at = randint(0, 1000, (batch, length))
    turn(q, k, *(t[at] for t in tables(1000, D, F32)), 1e-5, 1e-5)


@each("length, heads, D", (128, 32, 64), (256, 16, 128), (423, 73, 92))
@in_dtypes
def test_vision_rope(length, heads, D, dtype, atol, rtol):
    light(length * heads * D, 1 << 17)
    q, k = (turned(randn(1, length, heads, D, dtype=dtype)).contiguous() for _ in range(2))
    turn(q, k, *tables(length, D, dtype), atol, rtol)


@each("sizes", *SIZES[:2], SIZES[3], SIZES[6], (9, 7, 41, 41, 40))
@each("dtype, atol, rtol", (F32, 1e-5, 1e-5), (BF16, 1e-1, 1e-5))
def test_llama4_rope(sizes, dtype, atol, rtol):
    """Pairs side by side, turned as complex numbers in float32; q and k are (batch, tokens, heads, D)."""
    batch, length, hq, hk, D = sizes
    light(batch * length * (hq + hk) * D, 1 << 17)
    cos, sin = tables(length, D, F32)
    turns = torch.complex(cos, sin)[None, :, None]

    def theirs(x):
        pairs = (x if x.dtype == F64 else x.float()).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2).to(x.dtype)

    check(
        lambda q, k: [turned(x) for x in rope(turned(q), turned(k), cos, sin, interleaved=True)],
        lambda *qk: [theirs(x) for x in qk],
        [randn(batch, length, heads, D, dtype=dtype) for heads in (hq, hk)],
        atol,
        rtol,
    )


@each("sizes", (1, 128, 64, 8, 128), (2, 131, 28, 4, 96))
def test_mrope(sizes):
    """M-RoPE: three positions of a token, by sections of a head."""
    batch, length, hq, hk, D = pick(sizes, (sizes[0], 7, 4, 2, sizes[4]))
    section = [D // 8, 3 * D // 16, 3 * D // 16]
    q, k = (turned(randn(batch, length, heads, D)) for heads in (hq, hk))
    at = randint(0, 500, (3, batch, length))
    cos, sin = tables(500, D, F32)
    rows = [torch.cat([x[n] for n, x in enumerate(t[at].split(section, -1))], -1) for t in (cos, sin)]
    turn(q, k, cos, sin, 1e-5, 1e-5, rows, positions=at, mrope_section=section)
