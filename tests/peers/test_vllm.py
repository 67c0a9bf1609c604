"""vLLM: tests/kernels/attention/test_flash_attn.py (test_varlen_with_paged_kv), test_triton_decode_attention.py,
test_cache.py (test_reshape_and_cache_flash), tests/kernels/core/test_pos_encoding.py, test_layernorm.py,
test_activation.py.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from comparing import near
from references import attention, hidden_by, rms, rotate, tables, turned
from setting import BF16, DEVICE, F16, F32, composed, each, light, not_taken, pick, randint, randn

from triton_gallery_ops.attention_variants import attention_variants
from triton_gallery_ops.decode_attention import decode_attention
from triton_gallery_ops.kv_cache_write import kv_cache_write_
from triton_gallery_ops.quantize import quantize_static
from triton_gallery_ops.rms_norm import rms_norm, rms_norm_residual, rms_norm_residual_
from triton_gallery_ops.rope import rope
from triton_gallery_ops.swiglu import swiglu, swiglu_packed

EPS = 1e-6

# --- paged attention


def paged_problem(pairs, heads, D, page, pages, dtype):
    """Make queries, on the right of as many for each sequence, and pages in any order."""
    q = randn(len(pairs), max(queries for queries, _ in pairs), heads[0], D, dtype=dtype)
    k_cache, v_cache = (randn(pages, page, heads[1], D, dtype=dtype) for _ in range(2))
    lengths = torch.tensor([length for _, length in pairs], dtype=torch.int32, device=DEVICE)
    return q, k_cache, v_cache, randint(0, pages, (len(pairs), -(-int(lengths.max()) // page)), torch.int32), lengths


def compare(found, given, pairs, left=-1, softcap=0.0):
    q, k_cache, v_cache, table, _ = given
    for n, (queries, length) in enumerate(pairs):
        k, v = (c[table[n].long()].flatten(0, 1)[:length][None] for c in (k_cache, v_cache))
        expected = attention(q[n : n + 1, -queries:], k, v, hidden_by(queries, length, left, 0), softcap=softcap)
        near(found[n : n + 1, -queries:], expected, 1.5e-2, 1e-2, f"output of {n}")


CHUNKED = [(1, 1328), (5, 18), (129, 463)]
LENGTHS = [CHUNKED, [(1, 523), (1, 37), (1, 2011)], [(5, 18), (5, 463), (5, 1328)]]
SMALL = [[(1, 23), (1, 7), (1, 61)], [(5, 18), (5, 40)], [(1, 40), (5, 18)]]
HEADS = [((4, 4), 40), ((8, 2), 72), ((8, 2), 80), ((4, 4), 128), ((8, 2), 256)]
OPTIONS = [{"softcap": 50.0}, {"window": 256}, {"q_dtype": torch.float8_e4m3fn}]
PAGED = [
    pytest.param(pairs, *heads, {}, marks=composed if pairs is CHUNKED else ())
    for pairs in LENGTHS + pick([], SMALL)
    for heads in HEADS
]
PAGED += [
    pytest.param(LENGTHS[1], *heads, option, marks=composed if "q_dtype" in option else ())
    for option in OPTIONS
    for heads in (HEADS[0], HEADS[3])
]
PAGED += pick(
    [],
    [(SMALL[0], *HEADS[0], {"softcap": 5.0}), (SMALL[0], *HEADS[0], {"window": 9}), (SMALL[0], *HEADS[0], OPTIONS[2])],
)


@each("pairs, heads, D, option", *PAGED)
def test_varlen_with_paged_kv(pairs, heads, D, option):
    """Where sequences have different numbers of queries (chunked prefill), those are padded on the left.

    Queries of float8 are converted to 16 bits; caches are read as they are.
    """
    option = dict(option)
    light(sum(a * b for a, b in pairs) * heads[0] * D, 150000)
    given = paged_problem(pairs, heads, D, 16, pick(2048, 64), BF16)
    if dtype := option.pop("q_dtype", None):
        q, k, v, *others = given
        rounded = [x.to(dtype) for x in (q, k, v)]
        found = decode_attention(rounded[0].to(BF16), *rounded[1:], *others)
        given = *(x.to(BF16) for x in rounded), *others
    else:
        found = decode_attention(*given, **option)
    compare(found, given, pairs, option.get("window", -1), option.get("softcap", 0.0))


def test_many_pages():
    """NUM_BLOCKS of 32768: offsets of more than 2**31 bytes."""
    pairs = pick(LENGTHS[1], SMALL[0])
    given = paged_problem(pairs, (8, 8), pick(256, 32), 16, pick(32768, 64), BF16)
    compare(decode_attention(*given), given, pairs)


DECODE = [(3, 1027, 32, 128, 1), (5, 1025, 8, 128, 16), (3, 1025, 8, 192, 1), (5, 1027, 32, 192, 16)]


@each("batch, length, heads_k, D, page", *DECODE, cpu=[(2, 33, 1, 32, 1)])
def test_decode(batch, length, heads_k, D, page):
    """Pages of 1 and of 16 hold the same keys."""
    heads, room = pick(32, 4), pick(16384, 256)
    light(batch * length * heads * D, 150000)
    q, k, v = randn(batch, 1, heads, D, dtype=BF16), *(randn(room, heads_k, D, dtype=BF16) for _ in range(2))
    table = randint(0, room // page, (batch, -(-length // page)), torch.int32)
    slots = (table[:, :, None] * page + torch.arange(page, dtype=torch.int32, device=DEVICE)).flatten(1)[:, :length]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    given = q, k[:, None], v[:, None], slots.contiguous(), lengths
    one = decode_attention(*given)
    other = decode_attention(q, *(x.view(-1, page, heads_k, D) for x in (k, v)), table, lengths)
    near(other, one, 1e-8, 1e-5 if page == 1 else 2e-2, "pages")
    compare(one, given, [(1, length)] * batch)


@each("D, DV", (576, 512), (192, 128))
def test_decode_of_other_values(D, DV):
    """One query a sequence, not paged."""
    if D > 256:
        not_taken("wide_heads")
    q, k, v = (randn(2, n, heads, size, dtype=F16) for n, heads, size in ((1, 4, D), (40, 2, D), (40, 2, DV)))
    near(turned(attention_variants(*map(turned, (q, k, v)))), attention(q, k, v), 1e-3, 1e-2)


# --- writing to a cache

CACHES = [("NHC", "auto"), ("HNC", "auto"), ("NHC", "tensor"), ("NHC", "attn_head"), ("HNC", "attn_head")]


@each("layout, scales", *CACHES)
@each("D, page", (64, 8), (80, 16), (256, 32))
@each("dtype", BF16, F32)
def test_reshape_and_cache(layout, scales, D, page, dtype):
    """Keys and values as they are; float8 is of 16 bits, to which float32 is converted."""
    tokens, heads, pages = pick((21, 8, 512), (9, 2, 16))
    slots = torch.tensor(random.Random(0).sample(range(page * pages), tokens), device=DEVICE)
    _, k, v = randn(tokens, 3, heads, D, dtype=dtype).unbind(1)
    shape = (pages, page, heads, D) if layout == "NHC" else (pages, heads, page, D)
    caches = [randn(*shape, dtype=dtype) if scales == "auto" else torch.zeros(shape, device=DEVICE) for _ in range(2)]
    given, factors = [], [1.0, 1.0]
    if scales != "auto":
        caches, (k, v) = [c.to(torch.float8_e4m3fn) for c in caches], (x.to(BF16) for x in (k, v))
        given = [x.float().amax(dim=(0, 2)) / 64 for x in (k, v)]
        given = [s.amax().view(1) for s in given] if scales == "tensor" else given
        factors = [s.view(1, -1, 1) for s in given]
    views = caches if layout == "NHC" else [turned(c) for c in caches]
    before = [c.float().flatten(0, 1).clone() for c in views]
    kv_cache_write_(k[:, :0], k, v, *views, slots, None, None, None, *given)
    for name, cache, expected, x, factor in zip("kv", views, before, (k, v), factors, strict=True):
        found = cache.float().flatten(0, 1)
        if scales != "auto":
            near(found[slots] * factor, x.float(), 0.001 * 8, 0.1, name)  # a step of float8 is up to 1 / 8 of a number
        expected[slots] = x.float() if scales == "auto" else found[slots]
        assert torch.equal(found, expected), name


@each("what", "without RoPE", "nvfp4_cache", "pages", "latents")
def test_cache_option(what):
    if what != "without RoPE":
        not_taken(what)
    q, k, v, cache, slots = *(randn(5, 2, 16) for _ in range(3)), randn(2, 2, 8, 2, 16), randint(0, 1, (5,))
    slots += torch.arange(3, 13, 2, device=DEVICE)
    same, _ = kv_cache_write_(q, k, v, *cache, slots)
    assert torch.equal(same, q)
    assert torch.equal(cache.flatten(1, 2)[:, slots], torch.stack([k, v]))


# --- rotary embeddings


def turn(D, R, neox, dtype, padded, use_key=True):
    """Compare RoPE by a position of each token; q and k are (batch, tokens, heads, D)."""
    batch, length, heads = pick((5, 11, 17), (2, 5, 3))
    (cos, sin), at = tables(8192, R, dtype), randint(0, 8192, (batch, length))
    q, k = (randn(batch, length, heads, D + 64 * padded, dtype=dtype)[..., :D] for _ in range(2))
    rows = [x[at][:, :, None].float() for x in (cos, sin)]
    found = rope(turned(q), turned(k) if use_key else None, cos, sin, not neox, positions=at)
    for one, x in zip(found, (q, k)[: 1 + use_key], strict=False):
        expected = rotate(x.float(), *rows, not neox).to(dtype)
        near(turned(one), expected, *((1e-3, 1.6e-2) if dtype == BF16 else (1e-5, 1.3e-6)), "output")


@each("D, R", (64, 64), (80, 80), (120, 120), (256, 256), (256, 32), (64, 32))
@each("neox", True, False)
@each("dtype", BF16, F32)
@each("padded", False, True)
def test_rotary_embedding(D, R, neox, dtype, padded):
    turn(D, R, neox, dtype, padded)


@each("D, use_key", (128, True), (128, False))
def test_rotary_option(D, use_key):
    """Positions; queries alone (use_key=False)."""
    turn(D, D, True, F32, False, use_key)


# --- RMSNorm and activations


@each("tokens, hidden", (7, 8), (83, 768), (7, 769), (83, 5120), (4096, 5125), (7, 8192), cpu=[(7, 69)])
@each("residual", False, True)
@each("dtype, strided", (F16, False), (F16, True), (BF16, True), (F32, True))
def test_rms_norm(tokens, hidden, residual, dtype, strided):
    """Small numbers, near to eps; rows of a matrix that is twice as wide."""
    light(tokens * hidden, 1 << 13)
    scale, weight = 1 / (2 * hidden), (1 + 0.1 * randn(hidden)).to(dtype)
    x, other = ((randn(tokens, hidden * (1 + strided)) * scale).to(dtype)[:, :hidden] for _ in range(2))
    total = x.double() + other.double() if residual else x.double()
    expected = rms(total, weight)
    if residual:
        found, summed = rms_norm_residual(x, other, weight, EPS)
        near(summed, total, 1e-2 * scale, 1e-2, "sum")
    else:
        found = rms_norm(x, weight, EPS)
    # Theirs has 1e-2 for both; results are about 1 / 10 and less, so here it is relative to the largest.
    near(found, expected, 1e-2 * expected.abs().max().item(), 1e-2, "output")


@each("what", "no weight", "gemma", "weight in float32", "in place", pytest.param("float8", marks=composed))
def test_rms_norm_option(what):
    x, other, weight = randn(83, 68, dtype=F16), randn(83, 68, dtype=F16), 1 + 0.1 * randn(68, dtype=F16)
    if what == "no weight":
        found, expected = rms_norm(x, None, EPS), rms(x)
    elif what == "gemma":
        found, expected = rms_norm(x, weight, EPS, offset=1.0), rms(x, weight, offset=1.0)
    elif what == "weight in float32":
        found, expected = rms_norm(x, weight.float(), EPS), rms(x, weight.float())
    elif what == "in place":
        found, expected = x.clone(), rms(x + other, weight)
        rms_norm_residual_(found, other, weight, EPS)
    else:  # of 3 bits, which the interpreter does not round
        scale = torch.tensor(0.02, device=DEVICE)
        found, expected = quantize_static(rms_norm(x, weight, EPS), scale).float(), rms(x, weight).float() / scale
        near(found, expected.clamp(-448, 448), 2**-9, 2**-3)
        return
    near(found, expected, 1e-3, 2e-3)


@each("tokens, d", (7, 512), (83, 13824), cpu=[(7, 65)])
@each("dtype", F16, BF16, F32)
def test_silu_and_mul(tokens, d, dtype):
    """test_activation.py: silu_and_mul of the halves of one tensor, to the bit or nearly."""
    light(tokens * d, 1 << 13)
    x = randn(tokens, 2 * d, dtype=dtype)
    a, b = x.double().chunk(2, -1)
    near(swiglu_packed(x), a * a.sigmoid() * b, *[{F16: 2e-3, BF16: 1.6e-2, F32: 1e-5}[dtype]] * 2, "output")


@each("what", "mul_and_silu", "gelu_and_mul", "swigluoai", "fatrelu")
def test_activation(what):
    if what == "fatrelu":
        not_taken("fatrelu")
    x = 3 * randn(83, 2 * 65)
    a, b = x.chunk(2, -1)
    if what == "mul_and_silu":
        found, expected = swiglu_packed(x, up_first=True), a * F.silu(b)
    elif what == "gelu_and_mul":
        found = torch.stack([swiglu_packed(x, "gelu"), swiglu_packed(x, "gelu_tanh")])
        expected = torch.stack([F.gelu(a) * b, F.gelu(a, approximate="tanh") * b])
    else:
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        found = swiglu(x[..., ::2], x[..., 1::2], alpha=1.702, beta=1.0, limit=7.0)
        expected = gate * (1.702 * gate).sigmoid() * (up + 1)
    near(found, expected, 1e-5, 1e-5)
