"""PyTorch: test/test_transformers.py, TestSDPA and the tests of causal biases."""

import torch
import torch.nn.functional as F
from comparing import grads, leaves, near
from setting import BF16, DEVICE, F16, F32, F64, GPU, composed, each, light, needs, not_taken, pick, rand, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

from triton_gallery_ops.attention_variants import attention_variants
from triton_gallery_ops.flash_attention import flash_attention
from triton_gallery_ops.varlen_attention import varlen_attention

MOST = 4 * 70 * 70
DEFAULT_ATOL = {F16: 1e-3, BF16: 1e-3, F32: 1e-5}
DEFAULT_RTOL = {F16: 1e-3, BF16: 1.6e-2, F32: 1.3e-6}


def math(q, k, v, causal=False, scale=None, **others):
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **others)


def bounds(true, rough, factor=1.0):
    """Their tolerances: the error of the math kernel in the low precision, or the default of the dtype."""
    away = (true.double() - rough.double()).abs()
    relative = (away / true.double().abs()).nan_to_num(nan=DEFAULT_RTOL[rough.dtype]).max().item()
    rtol = factor * max(relative, DEFAULT_RTOL[rough.dtype])
    atol = factor * max(away.max().item(), DEFAULT_ATOL[rough.dtype])
    return atol, DEFAULT_RTOL[rough.dtype] if rtol > 1e30 else rtol


def compare(batch, sq, sk, D, causal, dtype, scale, factors, DV=None):
    """Of numbers from 0 to 1, as theirs: scores are large and alike, and gradients cancel."""
    batch, scale, wide = pick(batch, 1), 1 / D if scale else None, F64 if dtype == F32 else F32
    light(batch * 4 * sq * sk, MOST)
    needs(GPU or dtype != BF16, "the interpreter cuts bfloat16 off, and these gradients cancel")
    inputs = [rand(batch, 4, n, size, dtype=dtype) for n, size in ((sq, D), (sk, D), (sk, DV or D))]
    a, b, c = leaves(*inputs), leaves(*inputs, dtype=wide), leaves(*inputs)
    out = attention_variants(*a, scale=scale) if DV else flash_attention(*a, causal, scale)
    true, rough = math(*b, causal, scale), math(*c, causal, scale)
    near(out, true.to(dtype), *bounds(true, rough, factors[0]), "output")
    upstream = torch.rand_like(out)
    results = (grads(x, y, upstream) for x, y in ((out, a), (true, b), (rough, c)))
    for what, one, exact, low, factor in zip("qkv", *results, factors[1:], strict=True):
        near(one, exact.to(dtype), *bounds(exact, low, factor), f"gradient of {what}")


FLASH = [(8, 4, 4, 8, True, F16, None), (1, 8, 587, 16, False, BF16, None)]
FLASH += [(8, 143, 143, 21, True, BF16, "l1"), (1, 64, 128, 32, False, F16, "l1")]
FLASH += [(8, 256, 256, 64, True, F16, None), (1, 512, 587, 72, False, BF16, "l1")]
FLASH += [(8, 1024, 1024, 96, True, BF16, None), (1, 143, 2048, 128, False, F16, None)]
FLASH += [(1, 2048, 2048, 160, True, F16, "l1"), (8, 256, 64, 192, False, BF16, None)]
FLASH += [(1, 143, 587, 203, False, F16, "l1"), (1, 1024, 1024, 256, True, BF16, None)]
FLASH += [(1, 512, 4, 64, False, F16, None), (8, 64, 64, 203, True, F16, None)]
EFFICIENT = [(8, 4, 8, 8, True, F32, None), (1, 8, 4, 16, True, F32, "l1")]
EFFICIENT += [(8, 64, 128, 32, True, F16, None), (1, 128, 64, 64, True, BF16, "l1")]
EFFICIENT += [(1, 256, 512, 72, True, F32, None), (8, 512, 256, 96, True, F16, "l1")]
EFFICIENT += [(1, 1024, 2048, 128, True, BF16, None), (1, 2048, 1024, 64, True, F16, None)]
EFFICIENT += [(1, 64, 64, 128, False, F32, None), (8, 512, 512, 64, False, F32, "l1")]
EFFICIENT += [(1, 2048, 8, 32, False, F32, None), (1, 4, 2048, 128, False, F32, None)]


@each("kind, case", *(("flash", case) for case in FLASH), *(("efficient", case) for case in EFFICIENT))
def test_against_math(kind, case):
    """Efficient attention with float32, and causal masks of unequal lengths: query i sees keys 0 to i."""
    of_q = 4 if kind == "flash" else 1.5
    if case[4] and case[5] == BF16:
        # Probabilities are rounded before they multiply v. The first rows of a causal mask have few of them, so that
        # error does not average out; it moves all of a row's gradient of q. PyTorch's tests of today allow its own
        # kernels 160 and 180 times the tolerance for q.
        of_q = 10
    compare(*case, (3 if case[3] % 8 else 1, of_q, 2, 2) if kind == "flash" else (1, of_q, 12, 1))


@each("contiguous", True, False)
@each("causal", True, False)
@each("dtype, tol", (F32, 1e-5), (F16, 7e-4), (BF16, 7e-3))
def test_packed_projection(contiguous, causal, dtype, tol):
    """q, k and v are parts of one tensor; its gradient is compared."""
    qkv = randn(4, 4, 3 * 2 * 16, dtype=F64)
    (a,), (b,), outs = leaves(qkv, dtype=dtype), leaves(qkv), []
    for x, call in ((a, flash_attention), (b, math)):
        parts = [y.view(4, -1, 2, 16).transpose(1, 2) for y in x.chunk(3, -1)]
        outs.append(call(*([y.contiguous() for y in parts] if contiguous else parts), causal))
    upstream = torch.rand_like(outs[1])
    near(grads(outs[0], a, upstream)[0], grads(outs[1], b, upstream)[0], tol, tol, "gradient")


@each("variant", "upper_left", "lower_right")
@each("shape", (16, 16, 128, 128, 16), (16, 16, 128, 256, 32), (16, 16, 256, 128, 32), (1, 1, 23, 56, 15))
def test_causal_bias(variant, shape):
    """CausalVariant: the first query at the first key (flash_attention), or the last at the last (varlen_attention)."""
    batch, heads, sq, sk, D = shape
    light(batch * heads * sq * sk, MOST)
    inputs = randn(batch, heads, sq, D), randn(batch, heads, sk, D), randn(batch, heads, sk, D)
    a, b = leaves(*inputs), leaves(*inputs)
    mask = torch.ones(sq, sk, dtype=torch.bool, device=DEVICE).tril(0 if variant == "upper_left" else sk - sq)
    sees = mask.any(1)[:, None]  # what sees nothing gives 0
    expected = math(*b, attn_mask=mask).masked_fill(~sees, 0.0)
    if variant == "upper_left":
        found = flash_attention(*a, True)
    else:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in a]
        cu = [torch.arange(0, batch + 1, dtype=torch.int32, device=DEVICE) * n for n in (sq, sk)]
        found = varlen_attention(*flat, *cu, sq, sk, True).unflatten(0, (batch, sq)).transpose(1, 2)
    near(found, expected, 5e-3, 5e-3, "output")
    upstream = torch.rand_like(expected) * sees
    for what, one, right in zip("qkv", grads(found, a, upstream), grads(expected, b, upstream), strict=True):
        near(one, right.nan_to_num(), 5e-3, 5e-3, f"gradient of {what}")


def test_lengths_of_one():
    """test_fused_kernels_seq_len_1_inputs: nested tensors, some of one token."""
    batch, heads, D = pick(32, 6), pick(16, 2), 64
    lengths = torch.randint(1, 32, (batch,))
    lengths[torch.randint(0, batch, (10,))] = 1
    cu = F.pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)
    q, k, v = (randn(int(lengths.sum()), heads, D, dtype=F16) for _ in range(3))
    found = varlen_attention(q, k, v, cu, cu, int(lengths.max()), int(lengths.max()))
    parts = zip(*(x.float().transpose(0, 1)[None].split(lengths.tolist(), 2) for x in (q, k, v)), strict=True)
    expected = torch.cat([math(*part) for part in parts], 2)[0].transpose(0, 1)
    near(found, expected.half(), 1e-3, 1e-2, "output")


@each("expand", (True, False, False), (False, True, True), (True, True, True), (False, False, True))
@each("which", 0, 1)
def test_broadcasting(expand, which):
    """Expanded tensors: a stride of 0 along the batch or the heads."""
    batch, heads, sq, sk, D = pick((32, 8, 17, 29, 64), (2, 2, 17, 29, 16))
    tensors = []
    for wide, length in zip(expand, (sq, sk, sk), strict=True):
        shape = [batch, heads, length, D]
        shape[which] = 1 if wide else shape[which]
        tensors.append(randn(*shape, dtype=F16, grad=True))
    views = [x.expand(batch, heads, -1, -1) for x in tensors]
    found, expected = flash_attention(*views), math(*(x.float() for x in views))
    near(found, expected.half(), 1.5e-3, 1e-2, "output")
    upstream = torch.rand_like(expected)
    for what, one, right in zip(
        "qkv", grads(found, tensors, upstream), grads(expected, tensors, upstream), strict=True
    ):
        near(one, right, 2e-2 * max(1.0, right.abs().max().item()), 1e-2, f"gradient of {what}")


@each("length, D, causal", (256, 64, True), (512, 32, False))
def test_cuda_graph(length, D, causal):
    needs(GPU, "CUDA graphs need a GPU")
    a = leaves(*(rand(8, 4, length, D, dtype=F16) for _ in range(3)))
    upstream, stream, graph = torch.rand_like(a[0]), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        grads(flash_attention(*a, causal), a, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = flash_attention(*a, causal)
        found = grads(out, a, upstream)
    graph.replay()
    once = [x.clone() for x in (out, *found)]
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(once, (out, *found), strict=True))
    b = leaves(*a, dtype=F32)
    true = math(*b, causal)
    near(out, true.half(), 2e-3, 2e-3, "output")
    for what, one, right in zip("qkv", found, grads(true, b, upstream), strict=True):
        near(one, right.half(), 2e-2, 2e-2, f"gradient of {what}")


SIZES = [(64, 128, 64), (512, 512, 128)]


@each("what", "mask", "dropout", "second")
@each("size", *SIZES)
def test_not_taken(what, size):
    not_taken(what)


@each("size", *SIZES, cpu=[(60, 70, 64)])
def test_other_values(size):
    """Values of another D than keys."""
    compare(1, *size, False, F16, None, (1, 4, 2, 2), DV=32)


@composed
@each("size", *SIZES, cpu=[(60, 70, 64)])
def test_three_dimensions(size):
    """Without heads: a dimension of 1 takes their place."""
    sq, sk, D = size
    light(2 * sq * sk, MOST)
    q, k, v = (randn(2, n, D, dtype=F16) for n in (sq, sk, sk))
    found = flash_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    near(found, math(q.float(), k.float(), v.float()).half(), 1e-3, 2e-3, "output")
