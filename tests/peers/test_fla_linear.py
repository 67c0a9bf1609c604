"""flash-linear-attention: tests/ops/test_simple_gla.py, test_linear_attn.py, test_retention.py, test_lightning_attn.py,
test_gla.py (only what is not taken), tests/ops/utils/test_cumsum.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from comparing import grads, leaves, near, ratio
from references import one_by_one, recurrence
from setting import BF16, DEVICE, F16, F32, composed, each, light, not_taken, pick, rand, randn

from triton_gallery_ops.cumsum import cumsum, cumsum_backward
from triton_gallery_ops.cumsum_long import cumsum_long, cumsum_long_backward
from triton_gallery_ops.linear_attention import linear_attention

LIMIT = 5000


def ours(scale=None, **options):
    return lambda q, k, v, g, h0: linear_attention(q, k, v, g, scale, initial_state=h0, **options)


def theirs(scale=None):
    return lambda q, k, v, g, h0: recurrence(q, k, v, g, None, h0, scale)


def compare(given, call, reference, most=0.005, of_o=None, fixed=(), small=1e-6):
    """Compare results, to ``of_o`` or ``most``, and gradients; ``fixed`` names what gets none."""
    names = ("q", "k", "v", "g", "h0")
    a, b = leaves(*given), leaves(*given)
    found, expected = call(*a), reference(*b)
    ratio(found[0], expected[0], of_o or most, "o")
    ratio(found[1], expected[1], most, "ht")
    upstreams = [torch.randn_like(x, dtype=F32) for x in expected]
    wanted = [n for n, what in enumerate(names) if what not in fixed]
    results = [grads(outs, [inputs[n] for n in wanted], upstreams) for outs, inputs in ((found, a), (expected, b))]
    for n, one, right in zip(wanted, *results, strict=True):
        ratio(one, right, most, f"gradient of {names[n]}", atol=small if names[n] == "g" else 1e-6)


def problem(B, T, H, K, V, dtype, normalizer=1.0, draw_state=randn):
    q, k, v = (randn(B, T, H, size, dtype=dtype) for size in (K, K, V))
    return q, k, v, F.logsigmoid(randn(B, T, H)) / normalizer, draw_state(B, H, K, V)


RECURRENT = [(1, 63, 1, 64, 1, 1, F32), (2, 500, 4, 60, 1, 1, F32), (2, 1024, 8, 128, 1, 0.1, F32)]
RECURRENT += [(2, 1024, 8, 128, 1, 10, F32), (4, 2048, 8, 64, 0.1, 1, F32)]
RECURRENT += [(2, 1024, 8, 128, 1, 0.1, F16), (2, 1024, 8, 128, 1, 10, F16)]


@each("B, T, H, D, scale, normalizer, dtype", *RECURRENT)
def test_simple_gla_recurrent(B, T, H, D, scale, normalizer, dtype):
    light(B * T * H * D, LIMIT)
    compare(problem(B, T, H, D, D, dtype, normalizer), ours(scale), theirs(scale), small=2e-4)


CHUNK = [(1, 63, 1, 64, 1, 1), (2, 500, 3, 60, 1, 1), (1, 1000, 4, 128, 1, 0.1)]
CHUNK += [(2, 1000, 4, 128, 0.1, 1), (3, 1000, 4, 128, 0.1, 10), (4, 2048, 8, 64, 0.1, 1)]


@each("B, T, H, D, scale, normalizer", *CHUNK)
def test_simple_gla_chunk(B, T, H, D, scale, normalizer):
    light(B * T * H * D, LIMIT)
    compare(problem(B, T, H, D, D, F16, normalizer, rand), ours(scale), theirs(scale), of_o=0.004)


@each("dtype", F16, F32)
def test_simple_gla_one_chunk(dtype):
    compare(problem(1, 64, 2, 64, 64, dtype), ours(0.1), theirs(0.1))


PARALLEL = [(1, 63, 1, 64, 1, 1), (2, 500, 3, 60, 1, 1), (3, 1024, 4, 128, 0.1, 10), (3, 1024, 4, 256, 0.1, 0.1)]


@each("B, T, H, D, scale, normalizer", *PARALLEL)
def test_simple_gla_parallel(B, T, H, D, scale, normalizer):
    light(B * T * H * D, LIMIT)
    given = problem(B, T, H, D, D, F16, normalizer, torch.zeros)
    given = *given[:4], given[4].to(DEVICE)
    compare(given, ours(scale), theirs(scale), fixed=("h0",))


SIMPLE_GLA_VARLEN = [(4, 64, [0, 15]), (4, 64, [0, 256, 500, 1000]), (4, 100, [0, 15, 100, 300, 1200, 2000])]


@each("H, D, cu", *SIMPLE_GLA_VARLEN, cpu=[(1, 32, [0, 15, 79])])
@each("dtype", F16, F32)
def test_simple_gla_varlen(H, D, cu, dtype):
    """Packed sequences, in theirs in float16."""
    light(cu[-1] * H * D, LIMIT)
    given = *problem(1, cu[-1], H, D, D, dtype)[:4], randn(len(cu) - 1, H, D, D)
    compare(given, ours(cu_seqlens=torch.tensor(cu, device=DEVICE)), one_by_one(theirs(), cu), small=2e-4)


SIZES = [(2, 256, 4, 64), (2, 1024, 4, 128)]


@each("B, T, H, D", *SIZES, cpu=[(1, 70, 1, 32)])
def test_state_v_first(B, T, H, D):
    light(B * T * H * D, LIMIT)

    def of_rows(*given):
        out, state = theirs()(*given[:-1], given[-1].mT)
        return out, state.mT

    compare(problem(B, T, H, D, D, F16), ours(state_v_first=True), of_rows)


@each("case", *SIZES)
def test_decay_of_channels(case):
    not_taken("channels")


@composed
@each("B, T, H, D", *SIZES, cpu=[(1, 70, 1, 32)])
def test_normalize(B, T, H, D):
    """normalize=True: the last column of values is 1, so that of the result is what to divide by."""
    light(B * T * H * D, LIMIT)
    q, k, v, g, _ = problem(B, T, H, D, D - 1, F32)
    q, k, v = q.abs(), k.abs(), torch.cat([v, torch.ones_like(v[..., :1])], -1)
    out, state = linear_attention(q, k, v, g * 0)
    weights = torch.einsum("bihk,bjhk->bhij", q.double(), k.double()).tril()
    expected = torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v.double())
    ratio(out / out[..., -1:], expected, 0.002, "o")
    ratio(state[..., -1], k.sum(1), 0.001, "sum of keys")


# --- no decay at all: linear attention


LINEAR = [(1, 64, 1, 64, None, F32), (2, 512, 4, 60, None, F32), (3, 1024, 8, 128, 1.0, F32)]
LINEAR += [(3, 1024, 8, 128, 0.1, F32), (1, 63, 1, 64, None, F16), (2, 500, 3, 60, None, F16)]
LINEAR += [(2, 1000, 3, 128, None, F16), (3, 1000, 4, 64, None, F16), (2, 2048, 4, 256, None, F16)]


@each("B, T, H, D, scale, dtype", *LINEAR, cpu=[(1, 40, 1, 40, None, BF16)])
def test_linear_attention(B, T, H, D, scale, dtype):
    """To 0.1 %: the sums are kept in float32, and a copy of the state is rounded to the dtype."""
    light(B * T * H * D, LIMIT)
    q, k, v, g, h0 = problem(B, T, H, D, D, dtype)
    compare((q, k, v, g * 0, h0), ours(scale), theirs(scale), 0.01 if dtype == BF16 else 0.001, fixed=("g",))


def test_linear_attention_in_two():
    """Their test_normalize_split_resume, without the sum of keys: a call that goes on from a state."""
    B, T, H, D = pick((2, 256, 4, 64), (1, 64, 1, 16))
    *tokens, h0 = problem(B, T, H, D, D, F32)
    tokens[3] = tokens[3] * 0
    whole, last = ours()(*tokens, h0 * 0)
    first, state = ours()(*(x[:, : T // 2] for x in tokens), h0 * 0)
    second, end = ours()(*(x[:, T // 2 :] for x in tokens), state)
    ratio(torch.cat([first, second], 1), whole, 0.002, "o")
    ratio(end, last, 0.002, "ht")


# --- one decay of a head: retention and lightning attention


RETENTION = [(1, 63, 1, 64, 1), (2, 500, 3, 60, 1), (2, 1000, 3, 100, 1), (2, 1000, 3, 128, 2)]
RETENTION += [(4, 2048, 4, 64, 2), pytest.param(3, 1024, 4, 256, 2, marks=composed)]


@each("B, T, H, K, expand", *RETENTION, cpu=[(1, 40, 1, 16, 2)])
@each("kind", "retention", "lightning")
def test_retention(B, T, H, K, expand, kind):
    """Values of more than 256 dimensions are two calls: their columns have nothing to do with each other."""
    light(B * T * H * K * expand, LIMIT)
    q, k, v, _, h0 = problem(B, T, H, K, K * expand, F16)
    at = torch.arange(H, device=DEVICE)
    retention = (1 - torch.exp2(-5.0 - at)).log()
    slopes = retention if kind == "retention" else -(2.0 ** (-8.0 * (at + 1) / H)) * (1 - 1 / 3 + 1e-5)

    def in_parts(q, k, v, g, h0):
        parts = [ours()(q, k, x, g, h) for x, h in zip(v.split(256, -1), h0.split(256, -1), strict=True)]
        return [torch.cat(results, -1) for results in zip(*parts, strict=True)]

    given = q, k, v, slopes.float().expand(B, T, H), h0
    compare(given, in_parts if K * expand > 256 else ours(), theirs(), fixed=("g",))


# --- cumulative sums along the tokens

SUMS = {"cumsum": (cumsum, cumsum_backward), "cumsum_long": (cumsum_long, cumsum_long_backward)}


@each("name", *SUMS)
@each("reverse", False, True)
@each("B, T, H, D", (1, 63, 1, 30), (2, 500, 4, 60), (2, 1000, 5, 128), (3, 1024, 6, 500))
def test_global_cumsum(name, reverse, B, T, H, D):
    for shape in ((B, T, H), (B, T, H, D)):
        if len(shape) == 4 and T > 63:
            light(B * T * H * D, 1 << 13)
        s = randn(*shape)
        wide = s.double()
        expected = (wide.flip(1).cumsum(1).flip(1) if reverse else wide.cumsum(1)).float()
        ratio(SUMS[name][reverse](s.transpose(1, -1)).transpose(1, -1), expected, 1e-3, "cumsum")


@each("name", *SUMS)
def test_reversed_cumsum_keeps_a_small_suffix(name):
    """A sum from the right is added up from the right: what is large on the left does not round it."""
    s = torch.cat([torch.full((32,), 1e8), torch.ones(32)]).to(DEVICE)[None]
    near(SUMS[name][1](s)[0, 32:], torch.arange(32, 0, -1, dtype=F32, device=DEVICE), 0, 0)


@composed
@each("H, D, cu", (2, 60, [0, 15]), (3, 100, [0, 256, 500, 1000]))
def test_cumsum_varlen(H, D, cu):
    """Packed sequences, one after another."""
    light(cu[-1] * H * D, 1 << 13)
    s = randn(H, D, cu[-1])
    parts = s.split([b - a for a, b in itertools.pairwise(cu)], -1)
    near(torch.cat([cumsum(part) for part in parts], -1), torch.cat([p.cumsum(-1) for p in parts], -1), 1e-4, 1e-5)
