"""FlashAttention: tests/test_flash_attn.py (test_flash_attn_kvcache, _kvcache_paged_block_table_bounds), by
kv_cache_write_ and decode_attention. Tensors are (batch, tokens, heads, D).
"""

import math

import pytest
import torch
from comparing import near, within
from references import bias_of, both, heads_of, hidden_by, paged, rotate, turned, unpaged
from setting import BF16, DEVICE, F16, each, light, not_taken, rand, randint, randn

from triton_gallery_ops.decode_attention import decode_attention
from triton_gallery_ops.kv_cache_write import kv_cache_write_
from triton_gallery_ops.rope import rope

BATCH, HEADS = 2, 6


def case(sq, sk, D, kind="mha", **others):
    """One case: a number of queries and of keys; ``new`` keys are written first, with RoPE of a ``fraction`` of D."""
    name = f"{sq}-{sk}-{D}-{kind}" + "".join(f"-{k}={v}" for k, v in others.items())
    return pytest.param(sq, sk, D, kind, others, id=name)


CASES = [case(1, 128, 64), case(1, 339, 59, "mqa"), case(1, 339, 128, "gqa", causal=False)]
CASES += [case(3, 1024, 128, "gqa"), case(3, 799, 80, "mqa"), case(3, 799, 256), case(64, 800, 64)]
CASES += [case(16, 20000, 128), case(16, 20000, 32, "gqa"), case(1, 131072, 128, "mqa")]
CASES += [case(1, 131072, 64, dtype=BF16), case(64, 256, 32), case(1, 128, 64, page=None)]
CASES += [case(3, 799, 59, "gqa", page=None), case(1, 339, 256, "mqa", page=None, causal=False)]
CASES += [case(1, 339, 64, new=True, fraction=1.0), case(1, 339, 128, "gqa", new=True, fraction=0.5)]
CASES += [case(3, 1024, 128, new=True, fraction=1.0), case(3, 799, 59, "mqa", new=True, fraction=1.0)]
CASES += [case(3, 799, 80, new=True, fraction=0.5, page=None), case(64, 800, 32, new=True, fraction=1.0)]
CASES += [case(16, 20000, 256, "gqa", new=True, fraction=1.0), case(1, 128, 59, new=True, fraction=0.5, dtype=BF16)]
CASES += [case(1, 339, 64, new=True), case(3, 799, 128, "gqa", new=True), case(1, 339, 64, new=True, dtype=BF16)]
CASES += [case(3, 799, 128, "gqa", new=True, dtype=BF16), case(3, 1024, 64, causal=False), case(64, 800, 64, "mqa")]
CASES += [case(128, 128, 64), case(1, 339, 64, new=True, fraction=1.0, interleaved=True)]
CASES += [case(3, 799, 64, new=True, fraction=1.0, fewer=True), case(1, 339, 64, alibi=True)]
CASES += [case(3, 1024, 128, local=True), case(1, 339, 64, page=None, leftpad=True)]
CASES += [case(1, 128, 64, page=None, batch_idx=True), case(3, 1024, 64, new=True, fraction=1.0, causal=False)]
SMALL = [case(3, 40, 32, "gqa", page=16), case(3, 40, 32, "gqa", page=16, causal=False)]
SMALL += [case(3, 40, 32, new=True, fraction=1.0, page=16, interleaved=True)]
SMALL += [case(3, 40, 32, new=True, fraction=0.5, page=16, fewer=True), case(3, 40, 32, new=True, page=None)]
SMALL += [*(case(3, 40, 32, page=None, **{name: True}) for name in ("alibi", "local", "leftpad", "batch_idx"))]


@each("sq, sk, D, kind, others", *CASES, cpu=SMALL)
def test_kvcache(sq, sk, D, kind, others):
    option, dtype = others.get, others.get("dtype", F16)
    light(BATCH * HEADS * sq * sk, 4000)
    new, causal, page, heads_k = option("new"), option("causal", True), option("page", 256), heads_of(kind, HEADS, 3)
    q = randn(BATCH, sq, HEADS, D, dtype=dtype)
    k, v = (randn(BATCH, sk, heads_k, D, dtype=dtype) for _ in range(2))
    lengths = randint(0 if new else 1, sk - sq + 1 if new else sk + 1, (BATCH,), torch.int32)
    if page:
        k_cache, v_cache, table = paged(k, v, page)
    else:  # rows by index, among others: cache_batch_idx
        table = torch.randperm(3 * BATCH if option("batch_idx") else BATCH, device=DEVICE)[:BATCH, None].int()
        k_cache, v_cache = (randn(3 * BATCH, *x.shape[1:], dtype=dtype) for x in (k, v))
        k_cache[table[:, 0].long()], v_cache[table[:, 0].long()] = k, v
    queries, q_right, k_right, v_right = q, q, k.clone(), v.clone()
    if new:
        count, interleaved = sq // 2 + 1 if option("fewer") else sq, bool(option("interleaved"))
        k_new, v_new = (randn(BATCH, count, heads_k, D, dtype=dtype) for _ in range(2))
        at_q = lengths[:, None].long() + torch.arange(sq, device=DEVICE)  # (batch, tokens)
        at = at_q[:, :count]
        slots = table.long().gather(1, at // k_cache.shape[1]) * k_cache.shape[1] + at % k_cache.shape[1]
        angle = rand(sk, int(option("fraction", 0) * D) // 16 * 8) * 2 * math.pi
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        turn = [at.flatten(), cos, sin] if angle.numel() else [None, None, None]
        rows = [[t[at][:, :, None].float() for t in (cos, sin)] for at in (at_q, at)]
        q_right, k_turned = (
            rotate(x.float(), *r, interleaved).to(dtype) for x, r in zip((q, k_new), rows, strict=True)
        )
        row = torch.arange(BATCH, device=DEVICE)[:, None].expand_as(at)
        k_right[row, at], v_right[row, at] = k_turned, v_new
        flat = [x.flatten(0, 1) for x in (k_new[:, :, :0] if count < sq else q, k_new, v_new)]
        queries, _ = kv_cache_write_(*flat, k_cache, v_cache, slots.flatten(), *turn, interleaved=interleaved)
        if count < sq:
            queries = turned(rope(turned(q), None, cos, sin, interleaved, positions=at_q)[0])
        queries, lengths = queries.reshape(q.shape), lengths + count
        rtol = 1e-3 if dtype == F16 else torch.finfo(dtype).eps  # theirs has float16 alone
        near(unpaged(k_cache, table, sk), k_right, 1e-3, rtol, "keys in the cache")
        assert torch.equal(unpaged(v_cache, table, sk), v_right), "values in the cache"
    places = torch.arange(sk, device=DEVICE)
    k_mask, options, bias = places < lengths[:, None], {"causal": causal}, None
    hidden = hidden_by(sq, sk, sk // 3 if option("local") else -1, 0 if causal else -1, k_mask=k_mask)
    if option("local"):
        options["window"] = sk // 3
    if option("alibi"):
        options["alibi_slopes"] = rand(BATCH, HEADS) * 0.3
        bias = bias_of(options["alibi_slopes"], sq, sk, k_mask)
    if option("leftpad"):
        pad = options["cache_leftpad"] = (rand(BATCH) * lengths).int()
        hidden = hidden | (places < pad[:, None])[:, None, None]
    reference, plain = both(q_right, k_right, v_right, hidden, bias)
    for bound in (None, int(lengths.max())):
        out = decode_attention(queries, k_cache, v_cache, table, lengths, bound, **options)
        within(out, reference, plain, 3, 1e-5, f"output, with a bound of {bound}")


@each("append", False, True)
def test_length_past_the_table(append):
    """Theirs raises where a length exceeds the room of its row of the table."""
    not_taken("table_check")
