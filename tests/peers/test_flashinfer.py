"""FlashInfer: tests/attention/test_batch_decode_kernels.py, tests/attention/test_attention_sink.py,
tests/utils/test_norm.py.
"""

import pytest
import torch
from comparing import near
from references import attention, hidden_by, rms, turned
from setting import BF16, DEVICE, F16, F32, GPU, composed, each, light, needs, not_taken, pick, rand, randn

from triton_gallery_ops.attention_variants import attention_variants
from triton_gallery_ops.cumsum import cumsum
from triton_gallery_ops.decode_attention import decode_attention, decode_attention_with_lse
from triton_gallery_ops.layer_norm import layer_norm
from triton_gallery_ops.norms_long import norms_long_rms_norm
from triton_gallery_ops.quantize import quantize_static
from triton_gallery_ops.rms_norm import rms_norm, rms_norm_residual, rms_norm_residual_
from triton_gallery_ops.softmax import softmax
from triton_gallery_ops.topk import topk

EPS = 1e-6
DECODE = [(12, 54, 1, 4, 128, ""), (17, 97, 8, 32, 128, ""), (128, 512, 16, 32, 128, ""), (12, 2048, 16, 4, 256, "")]
DECODE += [(17, 2048, 1, 32, 256, ""), (12, 16384, 16, 32, 128, ""), (17, 54, 8, 4, 128, "HND")]
DECODE += [(12, 512, 16, 32, 256, "HND"), (128, 97, 1, 4, 128, "strided"), (17, 512, 8, 32, 128, "HND strided")]
DECODE += [(12, 2048, 16, 32, 128, "fp8"), (17, 97, 8, 4, 256, "fp8"), (128, 512, 1, 32, 128, "fp8")]
DECODE += [(12, 512, 16, 32, 512, ""), (12, 54, 1, 4, 512, "fp8")]


def caches_of(batch, length, page, D, kind="", heads_k=4):
    """Return keys and values in one tensor, their pages in order, and the table and lengths."""
    count = -(-length // page)
    shape = [batch * count, 2, *((heads_k, page) if "HND" in kind else (page, heads_k)), D]
    if "strided" in kind:  # gaps in each dimension but the last
        wide = randn(*(n for pair in zip(shape, (1, 2, 2, 2, 2), strict=True) for n in pair[::-1]), dtype=F16)
        kv = wide[0, :, 1, :, 1, :, 1, :, 1, :]
    else:
        kv = randn(*shape, dtype=F16)
    kv = kv.to(torch.float8_e4m3fn) if "fp8" in kind else kv
    table = torch.arange(batch * count, dtype=torch.int32, device=DEVICE).view(batch, count)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    return *(turned(c) if "HND" in kind else c for c in kv.unbind(1)), table, lengths


def read(cache, table, length):
    return cache[table.long()].flatten(1, 2)[:, :length].to(F16)


@each("batch, length, page, heads, D, kind", *DECODE, cpu=[(3, 21, 8, 4, 32, "HND strided"), (2, 18, 1, 8, 16, "fp8")])
def test_batch_decode(batch, length, page, heads, D, kind):
    """One query each, over pages in order."""
    if D > 256:
        not_taken("wide_heads")
    light(batch * length * heads * D, 20000)
    q, (k, v, table, lengths) = randn(batch, 1, heads, D, dtype=F16), caches_of(batch, length, page, D, kind)
    found = decode_attention(q, k, v, table, lengths)
    for n in range(0, batch, 16):
        expected = attention(q[n : n + 16], *(read(c, table[n : n + 16], length) for c in (k, v)))
        near(found[n : n + 16], expected, 1e-3, 1e-3, "output")


@each("what", "lse", "rope_inside", "softcap", "out", pytest.param("cascade", marks=composed))
def test_decode_option(what):
    if what in ("rope_inside", "out"):
        not_taken(what)
    batch, length, D = pick((12, 512, 128), (2, 40, 16))
    q, (k, v, table, lengths) = randn(batch, 1, 8, D, dtype=F16), caches_of(batch, length, 8, D)
    rights = [read(c, table, length) for c in (k, v)]
    if what == "softcap":
        found, expected = decode_attention(q, k, v, table, lengths, softcap=5.0), attention(q, *rights, softcap=5.0)
    elif what == "lse":
        found = decode_attention_with_lse(q, k, v, table, lengths)[1]
        scores = torch.einsum("bthd,bshd->bhts", q.float(), rights[0].float().repeat_interleave(2, 2)) * D**-0.5
        expected = scores.logsumexp(-1)
    else:  # states of two parts of the keys are merged
        half = length // 16
        parts = [decode_attention_with_lse(q, k, v, t, lengths * 0 + 8 * t.shape[1]) for t in table.split(half, 1)]
        (one, a), (two, b) = ((out, turned(lse)[..., None]) for out, lse in parts[:2])
        total = torch.logaddexp(a, b)
        found = ((a - total).exp() * one + (b - total).exp() * two).half()
        expected = attention(q, *(x[:, : 16 * half] for x in rights))
    near(found, expected, 1e-3, 1e-3, what)


SINKS = [(F16, 1, 1, 8, -1, True), (BF16, 4, 4, 32, -1, False), (F16, 16, 16, 8, 128, True)]
SINKS += [(BF16, 1, 128, 32, 128, True), (F16, 4, 128, 8, -1, True), (BF16, 16, 128, 8, -1, False)]
SINKS += [(F16, 1, 300, 8, 128, True), (BF16, 4, 300, 32, 128, True), (F16, 4, 300, 8, 128, False)]


@each("dtype, batch, length, heads_k, left, causal", *SINKS, cpu=[(F16, 1, 16, 8, 5, False)])
def test_sink(dtype, batch, length, heads_k, left, causal):
    light(batch * length * length * 32, 9000)
    q, k, v = (randn(batch, length, heads, 128, dtype=dtype) for heads in (32, heads_k, heads_k))
    sinks, right = rand(32) * 5, 0 if causal else -1
    found = attention_variants(*map(turned, (q, k, v)), "plain", ("local", left, right), sinks)
    expected = attention(q, k, v, hidden_by(length, length, left, right), sinks=sinks)
    near(turned(found), expected, *((1e-3, 1e-3) if dtype == F16 else (1e-2, 1e-2)), "output")


@each("steps", 1, 4)
def test_sink_decoding(steps):
    batch, length, D = pick((4, 300, 128), (2, 20, 16))
    q, (k, v, table, lengths) = randn(batch, steps, 8, D, dtype=F16), caches_of(batch, length, 8, D)
    sinks = rand(8) * 5
    found = decode_attention(q, k, v, table, lengths, sinks=sinks)
    rights = [read(c, table, length) for c in (k, v)]
    near(found, attention(q, *rights, hidden_by(steps, length, right=0), sinks=sinks), 1e-3, 1e-3)


# --- norms

NORMS = [(1, 111), (19, 500), (99, 1024), (989, 3072), (19, 3584), (99, 4096), (989, 8192), (19, 16384)]


@each("batch, hidden", *NORMS, cpu=[(3, 111)])
@each("contiguous", True, False)
@each("residual", False, True)
def test_norm(batch, hidden, contiguous, residual):
    light(batch * hidden, 1 << 13)
    x = randn(batch, hidden if contiguous else 2 * hidden, dtype=F16)[:, :hidden]
    weight, other = randn(hidden, dtype=F16), randn(batch, hidden, dtype=F16)
    if residual:
        found, total = rms_norm_residual(x, other, weight, EPS)
        near(total, x + other, 1e-3, 1e-3, "sum")
        # Theirs norms the sum before it is rounded; ours says that it norms h = x + residual.
        near(found, rms(x + other, weight), 1e-3, 2e-3, "output")
    else:
        near(rms_norm(x, weight, EPS), rms(x, weight), 1e-3, 1e-3, "output")


@each("batch, heads, D", (1, 4, 64), (19, 7, 128), (99, 16, 256), (989, 16, 512), cpu=[(3, 5, 64)])
@each("contiguous", True, False)
def test_qknorm(batch, heads, D, contiguous):
    """Norms of heads; also of every other part of the heads."""
    light(batch * heads * D, 1 << 13)
    x, weight = randn(batch, heads if contiguous else 2 * heads, D, dtype=F16)[:, :heads], randn(D, dtype=F16)
    near(rms_norm(x, weight, EPS), rms(x, weight), 1e-3, 1e-3, "output")


def layer(x, weight, bias):
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), EPS)


FAR = {
    "rms_norm": (lambda x, w, b: rms_norm(x, w, EPS), lambda x, w, b: rms(x, w)),
    "rms_norm_residual": (lambda x, w, b: rms_norm_residual(x, x, w, EPS)[0], lambda x, w, b: rms(x + x, w)),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, EPS), layer),
    "softmax": (lambda x, w, b: softmax(x), lambda x, w, b: x.float().softmax(-1)),
    "norms_long": (lambda x, w, b: norms_long_rms_norm(x, w, EPS), lambda x, w, b: rms(x, w)),
    "cumsum": (lambda x, w, b: cumsum(x), lambda x, w, b: x.float().cumsum(-1)),
    "topk": (lambda x, w, b: topk(x, 5)[0], lambda x, w, b: x.float().topk(5).values),
}


@each("name", *FAR)
def test_int64_stride(name):
    """Two rows that are more than 2**31 elements apart (an overflow of int32 in theirs, issue 3005)."""
    needs(GPU, "needs 4 GB and a GPU")
    H, far = 128, 2**31
    x = torch.as_strided(torch.empty(far + H, dtype=BF16, device=DEVICE), (2, H), (far, 1))
    x.copy_(randn(2, H, dtype=BF16))
    weight, bias = randn(H, dtype=BF16), randn(H, dtype=BF16)
    call, reference = FAR[name]
    near(
        call(x, weight, bias), reference(x.contiguous(), weight, bias), 3e-2 if name == "cumsum" else 1e-3, 1.6e-2, name
    )


@composed
@each("batch, hidden", (1, 128), (2, 129), (3, 1024), (128, 16384))
def test_layernorm(batch, hidden):
    """Weight and bias in float32, x in bfloat16, which is converted."""
    light(batch * hidden, 1 << 13)
    x, weight, bias = randn(batch, hidden, dtype=BF16), randn(hidden), randn(hidden)
    near(layer_norm(x.float(), weight, bias, EPS).to(BF16), layer(x, weight, bias).to(BF16), 1e-2, 1e-2)


@each("what", "gemma", pytest.param("float8", marks=composed), "out", "residual in place")
def test_norm_option(what):
    if what == "out":
        not_taken("out")
    x, other, weight = randn(19, 500, dtype=F16), randn(19, 500, dtype=F16), randn(500, dtype=F16)
    if what == "gemma":
        near(rms_norm(x, weight, EPS, offset=1.0), rms(x, weight, offset=1.0), 1e-3, 1e-3)
    elif what == "float8":
        scale = torch.tensor(0.02, device=DEVICE)
        found = quantize_static(rms_norm(x, weight, EPS), scale)
        expected = (rms(x, weight).to(F32) / scale).clamp(-448, 448)
        near(found.float(), expected, 2**-9, 2**-3)  # a float8 has 3 bits, and the interpreter does not round it
    else:
        total = x + other
        rms_norm_residual_(x, other, weight, EPS)
        near(other, total, 1e-3, 1e-3, "sum")
        near(x, rms(total, weight), 1e-3, 2e-3, "output")
