"""flash-linear-attention: tests/ops/test_gdn.py (test_fused_recurrent, test_chunk, test_chunk_with_chunk_size,
test_chunk_beta_sigmoid_in_kernel, test_chunk_state_v_first, test_chunk_gate_in_kernel, test_chunk_varlen).

Theirs are in float16 alone. Where a case is asked twice, the second is in bfloat16, with bounds four times as wide.
"""

import functools

import torch
import torch.nn.functional as F
from comparing import grads, leaves, ratio
from references import one_by_one, recurrence
from setting import BF16, DEVICE, F16, F32, each, light, rand, randn

from triton_gallery_ops.gated_delta_rule import gated_delta_rule

BOUNDS = {"o": 0.005, "ht": 0.005, "dq": 0.008, "dk": 0.008, "dv": 0.008, "db": 0.02, "dg": 0.02, "dh0": 0.008}
STRICT = {**BOUNDS, "dq": 0.005, "dk": 0.005, "dv": 0.005, "db": 0.01, "dg": 0.01, "dh0": 0.005}
MOST = 5000
l2 = functools.partial(F.normalize, p=2, dim=-1)


def bounds_of(dtype, bounds=BOUNDS):
    """Return the bounds of float16; bfloat16 has 3 bits fewer."""
    return {what: most * 4 for what, most in bounds.items()} if dtype == BF16 else bounds


def compare(given, call, reference, bounds):
    """Compare results, and gradients where there are bounds for them, of q, k, v, g, beta and h0."""
    a, b = leaves(*given), leaves(*given)
    found, expected = call(*a), reference(*b)
    ratio(found[0], expected[0], bounds["o"], "o")
    ratio(found[1], expected[1], bounds["ht"], "ht")
    if "dq" in bounds:
        upstream = [torch.randn_like(x, dtype=F32) for x in expected]
        names = ("dq", "dk", "dv", "dg", "db", "dh0")
        for what, one, right in zip(names, grads(found, a, upstream), grads(expected, b, upstream), strict=True):
            ratio(one, right, bounds[what], what)


def problem(B, T, H, HV, D, dtype, normalizer=1.0, mask=0.0, dense=False, unit=True):
    """Make q, k, v, g, beta and a state of zeros; q and k positive, as theirs, unless ``dense``."""
    draw = randn if dense else rand
    q, k, v = (draw(B, T, heads, D) for heads in (H, H, HV))
    g = F.logsigmoid(rand(B, T, HV)) / normalizer * (rand(B, T, HV) > mask)
    q, k = (l2(q), l2(k)) if unit else (q, k)
    return *(x.to(dtype) for x in (q, k, v)), g, rand(B, T, HV).sigmoid(), torch.zeros(B, HV, D, D, device=DEVICE)


def ours(scale=None, **options):
    return lambda q, k, v, g, beta, h0: gated_delta_rule(q, k, v, g, beta, h0, scale, **options)


def theirs(scale=None, of=lambda *given: given):
    def call(*given):
        q, k, v, g, beta, h0 = of(*given)
        return recurrence(q, k, v, g, beta, h0, scale)

    return call


RECURRENT = [(1, 63, 1, 1, 64, 1, 1, F32), (2, 500, 4, 4, 60, 1, 1, F32), (2, 1000, 2, 8, 128, 1, 0.1, F32)]
RECURRENT += [(3, 1024, 2, 2, 128, 0.1, 1, F32), (4, 1024, 3, 3, 128, 1, 10, F32), (4, 2048, 4, 4, 64, 0.1, 1, F32)]
RECURRENT += [(2, 1024, 4, 4, 128, 1, 0.1, F16), (2, 1024, 4, 8, 128, 1, 10, F16)]


@each("B, T, H, HV, D, scale, normalizer, dtype", *RECURRENT)
def test_fused_recurrent(B, T, H, HV, D, scale, normalizer, dtype):
    """Forward only, to 0.2 %; their recurrent kernel has all of it in float32."""
    light(B * T * H * D, MOST)
    *given, h0 = problem(B, T, H, HV, D, dtype, normalizer, dense=True)
    compare((*given, torch.randn_like(h0)), ours(scale), theirs(scale), {"o": 0.002, "ht": 0.002})


CHUNK = [(4, 1024, 4, 4, 128, 0.1, 1, 1.0, False, F16), (2, 75, 4, 4, 64, 1, 0.01, 0, False, F16)]
CHUNK += [(2, 500, 3, 3, 60, 1, 1, 0, False, F16), (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, F16)]
CHUNK += [(3, 1024, 4, 4, 100, 1, 0.1, 0, False, F16), (4, 1024, 4, 4, 128, 0.1, 1, 0, True, F16)]
CHUNK += [(2, 1500, 4, 4, 128, 0.1, 10, 0, False, F16), (4, 2048, 8, 8, 64, 0.1, 1, 0, False, F16)]
CHUNK += [(2, 256, 2, 4, 64, 1, 1, 0, False, F16), (2, 512, 2, 8, 64, 1, 0.1, 0, True, F16)]
CHUNK += [(2, 1024, 4, 8, 128, 0.1, 1, 0, False, F16)]
SMALL = [(1, 75, 1, 1, 64, 1, 0.01, 0, False, F16), (1, 70, 1, 1, 60, 0.1, 1, 0.5, False, BF16)]
SMALL += [(1, 40, 1, 1, 16, 1, 1, 1.0, False, F32), (1, 70, 1, 2, 16, 1, 1, 0, True, F16)]
CHUNK += [(*case[:-1], BF16) for case in CHUNK if case[2] != case[3] or case[8]]


@each("B, T, H, HV, D, scale, normalizer, mask, in_kernel, dtype", *CHUNK, cpu=SMALL)
def test_chunk(B, T, H, HV, D, scale, normalizer, mask, in_kernel, dtype):
    """Positive q and k, as theirs, of length 1; a mask of 1 means no decay at all."""
    light(B * T * HV * D, MOST)
    given = problem(B, T, H, HV, D, dtype, normalizer, mask, unit=not in_kernel)
    unit = (lambda q, k, *others: (l2(q), l2(k), *others)) if in_kernel else (lambda *given: given)
    call, bounds = ours(scale, use_qk_l2norm_in_kernel=in_kernel), bounds_of(dtype)
    compare(given, call, theirs(scale, unit), bounds)


@each("case", (1, 64, 2, 2, 32, 0.1, 1.0, F32), (1, 64, 2, 2, 32, 0.1, 1.0, BF16))
def test_chunk_with_chunk_size(case):
    """Theirs takes chunks of 16, 32 and 64; ours has the one of its dtype."""
    *sizes, scale, normalizer, dtype = case
    compare(problem(*sizes, dtype, normalizer), ours(scale), theirs(scale), STRICT if dtype == F32 else BOUNDS)


SIGMOID = [(2, 500, 4, 64, 1, False), (3, 1024, 4, 128, 0.1, True), (2, 1024, 4, 128, 0.1, True)]
SIGMOID += [(4, 2048, 8, 64, 0.1, False)]


@each("B, T, H, D, scale, negative", *SIGMOID, cpu=[(1, 70, 1, 32, 1, True)])
@each("dtype", F16, BF16)
def test_beta_sigmoid(B, T, H, D, scale, negative, dtype):
    """Beta from logits, and with negative eigenvalues up to 2."""
    light(B * T * H * D, MOST)
    q, k, v, g, _, h0 = problem(B, T, H, H, D, dtype)
    call = ours(scale, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=negative)
    of = lambda q, k, v, g, beta, h0: (q, k, v, g, beta.sigmoid() * (2 if negative else 1), h0)  # noqa: E731
    compare((q, k, v, g, randn(B, T, H), h0), call, theirs(scale, of), bounds_of(dtype))


@each("B, T, H, D", (1, 63, 1, 64), (2, 500, 3, 60), (3, 1024, 4, 128))
def test_state_v_first(B, T, H, D):
    light(B * T * H * D, MOST)
    *given, h0 = problem(B, T, H, H, D, F16)

    def of_rows(*given):
        out, state = theirs()(*given[:-1], given[-1].mT)
        return out, state.mT

    compare((*given, torch.randn_like(h0)), ours(state_v_first=True), of_rows, BOUNDS)


GATE = [(2, 75, 4, 64, 1, True), (2, 500, 3, 60, 1, False), (3, 1024, 4, 100, 1, True)]


@each("B, T, H, D, scale, with_bias", *GATE, cpu=[(1, 75, 1, 32, 1, True)])
@each("dtype", F16, BF16)
def test_gate(B, T, H, D, scale, with_bias, dtype):
    """Decays -exp(A_log) * softplus(g + dt_bias), of Mamba and Gated DeltaNet: strong ones."""
    light(B * T * H * D, MOST)
    q, k, v, _, beta, h0 = problem(B, T, H, H, D, dtype)
    A, bias = randn(H), randn(H) if with_bias else None
    call = ours(scale, use_gate_in_kernel=True, A_log=A, dt_bias=bias)

    def of(q, k, v, g, beta, h0):
        return q, k, v, -A.exp() * F.softplus(g + (bias if with_bias else 0)), beta, h0

    compare((q, k, v, randn(B, T, H), beta, h0), call, theirs(scale, of), bounds_of(dtype))


CHUNK_VARLEN = [(4, 60, 0, [0, 15]), (4, 64, 0, [0, 256, 500, 1000]), (4, 64, 0.5, [0, 256, 500, 1000])]
CHUNK_VARLEN += [(4, 100, 0, [0, 15, 100, 300, 1200, 2000])]


@each("H, D, mask, cu", *CHUNK_VARLEN, cpu=[(1, 32, 0, [0, 15, 79])])
@each("how", F16, BF16, "ended by -inf")
def test_chunk_varlen(H, D, mask, cu, how):
    """Packed sequences; also as one, without initial states, in which a decay of -inf ends each."""
    light(cu[-1] * H * D, MOST)
    dtype = BF16 if how == BF16 else F16
    *given, _ = problem(1, cu[-1], H, H, D, dtype, mask=mask, dense=True)
    bounds = {**BOUNDS, "dq": 0.007, "dv": 0.007, "db": 0.015, "dg": 0.015, "dh0": 0.007}
    each_one = one_by_one(theirs(), cu)
    if isinstance(how, torch.dtype):
        call = ours(cu_seqlens=torch.tensor(cu, device=DEVICE))
        compare((*given, randn(len(cu) - 1, H, D, D)), call, each_one, bounds_of(dtype, bounds))
        return
    first, nothing = torch.zeros(1, cu[-1], 1, dtype=torch.bool, device=DEVICE), torch.zeros(len(cu) - 1, H, D, D)
    first[:, cu[:-1]] = True
    a, b = leaves(*given), leaves(*given)
    found, _ = gated_delta_rule(*a[:3], a[3].masked_fill(first, -torch.inf), a[4])
    expected, _ = each_one(*b, nothing.to(DEVICE))
    ratio(found, expected, bounds["o"], "o")
    upstream = torch.randn_like(expected)
    for what, one, right in zip(
        ("dq", "dk", "dv", "dg", "db"), grads(found, a, upstream), grads(expected, b, upstream), strict=True
    ):
        if what == "dg":  # that of a first token is 0 in ours, and of a decay of nothing in theirs
            one, right = one.masked_fill(first, 0), right.masked_fill(first, 0)
        ratio(one, right, bounds[what], what)
