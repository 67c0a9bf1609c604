"""FlashAttention: tests/test_flash_attn.py (test_flash_attn_varlen_output, _varlen_qkvpacked, _varlen_causal,
_varlen_deterministic, _bwd_varlen_overflow), hopper/test_flash_attn.py and tests/cute (lengths of 0, seqused).
"""

import torch
from comparing import all_within, arithmetic, grads, same_bits, within
from references import bias_of, both, hidden_by, paged, problem
from setting import BF16, DEVICE, F16, composed, each, light, not_taken, pick, rand, randn

from triton_gallery_ops.decode_attention import decode_attention
from triton_gallery_ops.varlen_attention import varlen_attention

BATCH, HEADS = pick(4, 2), pick(6, 3)
MOST = 6 * 64 * 64  # of scores, in the interpreter


def lengths_of(longest, batch, mode="random", zeros=False):
    least = max(0 if zeros else 1, longest - 20) if mode == "random" else longest // 3
    lengths = torch.randint(least, longest + 1, (batch,))
    if zeros:
        lengths[::5] = 0
        lengths[-1] = 0
    return lengths.to(DEVICE)


def mask_of(lengths, longest):
    return torch.arange(longest, device=DEVICE) < lengths[:, None]


def cu_of(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def varlen(q, k, v, q_lengths, k_lengths, causal, layout="packed", **options):
    """Our op on tensors of (batch, tokens, heads, D), of which a part is used; the result is padded again.

    Packed are the tokens that are used; "seqused" says how many; "padded" has packed queries and padded keys.
    """
    (B, sq, heads), sk, DV = q.shape[:3], k.shape[1], v.shape[3]
    q_mask, k_mask = mask_of(q_lengths, sq), mask_of(k_lengths, sk)
    q_cu, k_cu = cu_of(q_lengths), cu_of(k_lengths)
    if layout != "packed":
        k_cu = torch.arange(0, (B + 1) * sk, sk, dtype=torch.int32, device=DEVICE)
        options["seqused_k"] = k_lengths.int()
    else:
        k, v = k[k_mask], v[k_mask]
    if layout == "seqused":
        q_cu = torch.arange(0, (B + 1) * sq, sq, dtype=torch.int32, device=DEVICE)
        return varlen_attention(q, k, v, q_cu, k_cu, sq, sk, causal, seqused_q=q_lengths.int(), **options)
    longest = int(q_lengths.max()), int(k_lengths.max()) if layout == "packed" else sk
    found = varlen_attention(q[q_mask], k, v, q_cu, k_cu, *longest, causal, **options)
    return q.new_zeros(B, sq, heads, DV).masked_scatter(q_mask[:, :, None, None].expand(B, sq, heads, DV), found)


def compare(q, k, v, inputs, q_lengths, k_lengths, causal=False, factors=(2, 3), layout="packed", **options):
    sq, sk = q.shape[1], k.shape[1]
    light(q.shape[0] * q.shape[2] * sq * sk, MOST)
    out = varlen(q, k, v, q_lengths, k_lengths, causal, layout, **options)
    masks = mask_of(q_lengths, sq), mask_of(k_lengths, sk)
    left, right = options.pop("window_size", (-1, -1))
    hidden = hidden_by(sq, sk, left, 0 if causal else right, *masks)
    slopes = options.pop("alibi_slopes", None)
    bias = None if slopes is None else bias_of(slopes, sq, sk, masks[1], masks[0])
    rights = [x.masked_fill(~masks[0][:, :, None, None], 0) for x in both(q, k, v, hidden, bias, **options)]
    all_within([out, *rights], inputs, None, factors, (1e-5, 1e-5))


SIZES = [(1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)]
SIZES += [(1024, 1023), (2048, 2048)]


def cases():
    for n, D in enumerate((32, 59, 64, 80, 96, 111, 128, 160, 192, 256)):
        for m in range(3):
            kind, dtype = ("mha", "mqa", "gqa")[(n + m) % 3], (F16, BF16)[(n + m // 2) % 2]
            yield (*SIZES[(4 * n + 3 * m) % 11], D, (n + m) % 2 == 0, kind, dtype, m == 2)


@each("case", *cases(), cpu=[(30, 47, 40, True, "gqa", F16, True)])
def test_output(case):
    sq, sk, D, causal, kind, dtype, packed = case
    given = problem(sq, sk, D, dtype, kind, packed, BATCH, HEADS, few=pick(2, 1))
    compare(*given, lengths_of(sq, BATCH), lengths_of(sk, BATCH), causal)


QKVPACKED = [(97, 64, False, F16), (257, 128, True, BF16), (1025, 59, True, F16), (200, 32, False, BF16)]


@each("length, D, causal, dtype", *QKVPACKED)
def test_qkvpacked(length, D, causal, dtype):
    batch = pick(5, 1)
    qkv = randn(batch, length, 3, pick(6, 1), D, dtype=dtype, grad=True)
    lengths = lengths_of(length, batch)
    compare(*qkv.unbind(2), (qkv,), lengths, lengths, causal)


@each("lengths", (1, 239), (3, 799), (127, 513), (108, 256), (1023, 1024))
@each("swap", False, True)
@each("D, dtype", (64, F16), (128, BF16))
def test_causal(lengths, swap, D, dtype):
    sq, sk = lengths[::-1] if swap else lengths
    batch = pick(8, 2)
    given = problem(sq, sk, D, dtype, batch=batch, heads=pick(9, 1))
    compare(*given, lengths_of(sq, batch), lengths_of(sk, batch), True, (2, 2))


@each("D", 16, 32, 64)
@each("causal", False, True)
def test_bwd_overflow(D, causal):
    """Many queries, one key each: gradients had NaN in theirs."""
    q_cu, k_cu = (torch.tensor(x, device=DEVICE, dtype=torch.int32) for x in ([0, 76, 110, 256], [0, 1, 2, 3]))
    inputs = [(randn(n, pick(5, 2), D, dtype=F16) * 3).requires_grad_() for n in (256, 3, 3)]
    out = varlen_attention(*inputs, q_cu, k_cu, 256, 3, causal)
    assert not any(x.isnan().any() for x in (out, *grads(out, inputs, torch.randn_like(out))))
    if not causal:  # each query sees one key: its value
        which = torch.bucketize(torch.arange(256, device=DEVICE), q_cu[1:], right=True)
        assert torch.equal(out, inputs[2][which])


@each("sizes", (511, 1), (3, 513), (64, 128), (307, 256), (640, 128), (1024, 1024), cpu=[(20, 33)])
@each("mode, q_zeros, k_zeros", ("random", False, True), ("third", True, False), ("random", True, True))
@each("causal", False, True)
def test_lengths_of_zero(sizes, mode, q_zeros, k_zeros, causal):
    """Sequences without queries, without keys, and without either."""
    batch = pick(9, 6)
    light(batch * sizes[0] * sizes[1], 6000)
    given = problem(*sizes, 64, BF16, "gqa", batch=batch, heads=pick(6, 1), few=pick(2, 1))
    compare(*given, lengths_of(sizes[0], batch, mode, q_zeros), lengths_of(sizes[1], batch, mode, k_zeros), causal)


@each("causal", False, True)
@each("heads, kind", (4, "mha"), (4, "mqa"))
def test_same_bits(causal, heads, kind):
    sq, sk, turns = pick((1023, 1024, 12), (30, 40, 2))
    q, k, v, inputs = problem(sq, sk, 64, BF16, kind, batch=2, heads=heads)
    lengths = lengths_of(sq, 2), lengths_of(sk, 2)
    same_bits(lambda: varlen(q, k, v, *lengths, causal), inputs, randn(*q.shape, dtype=BF16), turns)


@each("sizes", (113, 203), (1024, 1024), cpu=[(30, 45)])
@each("what", "seqused", "window", "softcap", "alibi", "dropout", "sinks", "values", "padded")
def test_option(sizes, what):
    if what == "dropout":
        not_taken("dropout")
    q, k, v, inputs = problem(
        *sizes, 64, BF16, "gqa", False, BATCH, pick(4, 2), few=1, DV=128 if what == "values" else None
    )
    sinks = randn(q.shape[2], dtype=BF16, grad=True)
    options = {
        "window": {"window_size": (50, 20)},
        "softcap": {"softcap": 15.0},
        "alibi": {"alibi_slopes": rand(BATCH, q.shape[2]) * 0.3},
        "sinks": {"sinks": sinks, "causal": True},
        "seqused": {"layout": "seqused", "causal": True},
        "padded": {"layout": "padded"},
    }.get(what, {})
    inputs = (*inputs, sinks) if what == "sinks" else inputs
    compare(q, k, v, inputs, lengths_of(sizes[0], BATCH), lengths_of(sizes[1], BATCH), **options)


@composed
@each("sizes", (113, 203), (1024, 1024), cpu=[(10, 40)])
def test_packed_queries_of_paged_keys(sizes):
    """block_table of packed queries: they are padded on the left, one sequence a row, for decode_attention."""
    light(BATCH * 4 * sizes[0] * sizes[1], MOST)
    q, k, v, _ = (
        x.detach() if torch.is_tensor(x) else x for x in problem(*sizes, 64, BF16, "gqa", batch=BATCH, heads=4)
    )
    q_lengths = lengths_of(sizes[0], BATCH)
    k_lengths = q_lengths + torch.randint(0, sizes[1] - sizes[0] + 1, (BATCH,)).to(DEVICE)
    last = mask_of(q_lengths, sizes[0]).flip(1)
    packed = q[last]
    padded = torch.zeros_like(q).masked_scatter(last[:, :, None, None].expand_as(q), packed)
    found = decode_attention(padded, *paged(k, v, 16), k_lengths.int())[last]
    hidden = hidden_by(*sizes, right=0, k_mask=mask_of(k_lengths, sizes[1]))
    reference, plain = (x[last] for x in both(q, k, v, hidden))
    within(found, reference, plain, 3, 2 * arithmetic(reference))
