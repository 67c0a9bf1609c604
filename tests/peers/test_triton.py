"""Triton: python/triton_kernels/tests/test_topk.py and test_swiglu.py, python/tutorials/06-fused-attention.py and
03-matrix-multiplication.py, python/test/unit/operators/test_matmul.py (of older versions).
"""

import pytest
import torch
import triton
from comparing import check, grads, leaves, near
from setting import BF16, DEVICE, F16, F32, F64, each, light, not_taken, on_hopper, pick, rand, randn

from triton_gallery_ops.flash_attention import flash_attention
from triton_gallery_ops.flash_attention_forward import flash_attention_forward
from triton_gallery_ops.fp8_matmul import fp8_matmul
from triton_gallery_ops.gluon_attention import gluon_attention
from triton_gallery_ops.gluon_matmul import gluon_matmul
from triton_gallery_ops.hopper_attention import hopper_attention
from triton_gallery_ops.matmul import matmul
from triton_gallery_ops.persistent_matmul import persistent_matmul
from triton_gallery_ops.quantize import dequantize, quantize
from triton_gallery_ops.skinny_matmul import skinny_matmul
from triton_gallery_ops.swiglu import swiglu
from triton_gallery_ops.topk import topk
from triton_gallery_ops.topk_long import topk_long
from triton_gallery_ops.tuned_matmul import TUNED_MATMUL_ACTIVATIONS, tuned_matmul

# --- top k


def right(x, k):
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)  # of equals, the lower index first
    return values[..., :k], places[..., :k]


SHAPES = [(1, 13, 3), (1, 200, 12), (7, 32, 7), (7, 128, 8), (256, 13, 12), (256, 200, 3), (300, 32, 8), (300, 128, 7)]


@pytest.mark.parametrize("call", [topk, topk_long], ids=["topk", "topk_long"])
@each("rows, columns, k", *SHAPES)
@each("dtype", F16, BF16, F32)
def test_topk(call, rows, columns, k, dtype):
    light(rows * columns, 2000)
    x = randn(rows, columns, dtype=dtype)
    assert all(torch.equal(*pair) for pair in zip(call(x, k), right(x, k), strict=True))


@each("k, softmax", *((k, s) for k in (1, 3, 5, 6, 7, 8, 12, 14, 15, 18, 31, 33, 63, 64) for s in (False, True)))
def test_topk_any_k(k, softmax):
    """Also with a softmax of the values, as a router has it, and with gradients."""
    x = randn(7, 67, dtype=(F16, BF16, F32)[k % 3])
    (a,), (b,) = leaves(x), leaves(x, dtype=F32)
    (values, places), (expected, at) = topk(a, k, softmax), right(b, k)
    assert torch.equal(places, at)
    expected = expected.softmax(-1) if softmax else expected
    near(values, expected, 1e-3, 1e-2, "values")
    upstream = torch.randn_like(expected)
    near(grads(values, a, upstream)[0], grads(expected, b, upstream)[0], 1e-2, 1e-2, "gradient")


@each("what", "apply_softmax", "given_places", "bitmap", "gathered")
@each("k", 8, 33)
def test_topk_option(what, k):
    if what != "apply_softmax":
        not_taken(what)
    x = randn(33, 300, dtype=BF16)
    near(topk(x, k, apply_softmax=True)[0], right(x.float(), k)[0].softmax(-1), 1e-3, 1e-2)


def test_topk_padding():
    """Their fpsan case: rows of NaN alone; padding is never chosen."""
    for columns, k in ((13, 3), (13, 12), (33, 3), (33, 12)):
        values, places = topk(torch.full((2, columns), torch.nan, device=DEVICE), k)
        assert values.isnan().all()
        assert torch.equal(places, torch.arange(k, device=DEVICE).expand(2, k))


@each("limit", 1e-2, 10)
def test_swiglu(limit):
    """Of gpt-oss: gate and up side by side."""
    x, alpha = randn(pick(1311, 31), 2 * pick(4352, 52)), 0.5

    def theirs(x):
        gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
        return gate * (alpha * gate).sigmoid() * (up + 1)

    call = lambda x: swiglu(x[..., ::2], x[..., 1::2], alpha=alpha, beta=1.0, limit=limit)  # noqa: E731
    check(call, theirs, (x,), 1e-5, 1e-5)


# --- fused attention

ATTENTION = {
    "flash_attention": flash_attention,
    "flash_attention_forward": flash_attention_forward,
    "hopper_attention": hopper_attention,
    "gluon_attention": gluon_attention,
}


FUSED = [(1, 2, 1024, 64, True), (4, 48, 128, 64, False), (1, 2, 1024, 128, False)]
FUSED += [(4, 2, 256, 16, True), (1, 2, 512, 32, True), (1, 2, 128, 256, False)]


@each("name", *ATTENTION)
@each("Z, H, N, D, causal", *FUSED, cpu=[(1, 1, 80, 16, True)])
def test_fused_attention(name, Z, H, N, D, causal):
    if name == "gluon_attention" and D not in (64, 128):
        not_taken("gluon_wide")
    if name == "hopper_attention" and D > 128:
        not_taken("hopper_wide")
    on_hopper(name)
    light(Z * H * N * N, 7000)
    inputs = [0.5 * randn(Z, H, N, D, dtype=F16) for _ in range(3)]

    def theirs(q, k, v):
        s = q @ k.mT * 0.5
        s = s.masked_fill(torch.ones(N, N, device=DEVICE).tril() == 0, -torch.inf) if causal else s
        return (s if s.dtype == F64 else s.float()).softmax(-1).to(q.dtype) @ v

    call = ATTENTION[name]
    if name == "flash_attention":  # theirs has heads of 64; wider ones have larger gradients
        check(lambda *qkv: call(*qkv, causal, 0.5), theirs, inputs, 1e-2, 0.0, factors=[max(1.0, D / 64)] * 3)
    else:
        near(call(*inputs, causal, 0.5), theirs(*(x.double() for x in inputs)), 1e-2, 0.0, "output")


# --- products of matrices

SIZES = [(16, 16, 16), (64, 64, 128), (1024, 1024, 1024), (384, 128, 640), (107, 233, 256), (107, 233, 311)]
SIZES += [(1024, 1024, 32)]
PRODUCTS = {
    "matmul": matmul,
    "persistent_matmul": persistent_matmul,
    "gluon_matmul": gluon_matmul,
    "skinny_matmul": lambda a, b: skinny_matmul(a, b.t()),
    "tuned_matmul": tuned_matmul,
}
# A half of their cases; a sixth where each takes long to tune.
CASES = [
    (name, n, layout)
    for p, name in enumerate(PRODUCTS)
    for n in range(len(SIZES))
    for layout in range(4)
    if (n + layout + p) % (6 if name == "tuned_matmul" else 2) == 0
]


@each("name, n, layout", *CASES)
def test_matmul(name, n, layout):
    """Each size and layout, by turns of the dtypes; skinny_matmul has the first 64 rows."""
    (M, N, K), (at, bt), dtype = SIZES[n], (layout % 2, layout // 2), (F16, BF16, F32)[(n + layout // 2) % 3]
    if name == "gluon_matmul" and dtype == F32:
        not_taken("gluon_float32")
    M = min(M, 64) if name == "skinny_matmul" else M
    on_hopper(name)
    light(M * N * K, 1 << 20)
    a = 0.1 * randn(*((K, M) if at else (M, K)), dtype=dtype)
    b = 0.1 * randn(*((N, K) if bt else (K, N)), dtype=dtype)
    a, b = a.t() if at else a, b.t() if bt else b
    found, expected = PRODUCTS[name](a, b), a.double() @ b.double()
    # assert_almost_equal of two decimals, and a tighter one by the dtype: K products of 0.01 each.
    near(found, expected, 1.5e-2, 0.0, "product")
    near(found, expected, *[{F16: 2e-3, BF16: 1e-2, F32: 1e-5}[dtype]] * 2, "product")


@each("name", "matmul", "persistent_matmul", "gluon_matmul")
def test_tutorial_matmul(name):
    """03-matrix-multiplication.py: 512 x 512 in float16, numbers from -0.5 to 0.5."""
    on_hopper(name)
    a, b = (rand(pick(512, 64), pick(512, 64), dtype=F16) - 0.5 for _ in range(2))
    near(PRODUCTS[name](a, b), torch.matmul(a, b), 1e-2, 0.0, "product")


@triton.jit
def twice(z):
    return 2 * z


@each("what", "float8", "batch", "bias and activation")
def test_product(what):
    """A product of float8, of a batch, and with a bias and an activation of one's own."""
    M, N, K = pick((512, 512, 512), (32, 48, 64))
    a, b, bias = randn(3, M, K, dtype=F16), randn(3, K, N, dtype=F16), randn(N, dtype=F16)
    if what == "batch":
        check(tuned_matmul, torch.matmul, (a, b), 0.1, 1e-2)
    elif what == "float8":
        x, w = quantize(a[0].sign(), (1, -1)), quantize(b[0].t().sign(), (1, -1))
        found = fp8_matmul(x[0], w[0], x[1], w[1], out_dtype=F32, use_fast_accum=False)
        near(found, dequantize(*x, (1, -1)) @ dequantize(*w, (1, -1)).t(), 0.1, 1e-2)
    else:
        TUNED_MATMUL_ACTIVATIONS["twice"] = twice, lambda grad, z: 2 * grad
        call = lambda a, b, c: tuned_matmul(a, b, c, "twice")  # noqa: E731
        check(call, lambda a, b, c: 2 * (a @ b + c), (a[0], b[0], bias), 0.1, 1e-2)
