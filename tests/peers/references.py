"""References in PyTorch, and inputs for them.

Attention is of (batch, tokens, heads, D), as it is in most of the peers. Linear attention and the delta rule go token
by token, in float64: with gradients, and few states in memory.
"""

import itertools

import torch
from setting import DEVICE, F32, F64, randn
from torch.utils.checkpoint import checkpoint


def turned(x):
    """Between (batch, tokens, heads, D) and (batch, heads, tokens, D)."""
    return x.transpose(1, 2)


def hidden_by(sq, sk, left=-1, right=-1, q_mask=None, k_mask=None, lower=True):
    """Return what queries do not see. The last query is aligned with the last key, or the first with the first."""
    i, j = torch.arange(sq, device=DEVICE)[:, None], torch.arange(sk, device=DEVICE)
    nq = sq if q_mask is None else q_mask.sum(1)[:, None, None, None]
    nk = sk if k_mask is None else k_mask.sum(1)[:, None, None, None]
    i = i + (nk - nq if lower else 0)
    hidden = torch.zeros(1, 1, sq, sk, dtype=torch.bool, device=DEVICE)
    hidden = hidden | (j > i + right) if right >= 0 else hidden
    hidden = hidden | (j < i - left) if left >= 0 else hidden
    return hidden if k_mask is None else hidden | ~k_mask[:, None, None, :]


def attention(q, k, v, hidden=None, bias=None, softcap=0.0, sinks=None, scale=None, high=True):
    """Return attention in float32, or in the dtype of q with the scale on the other side."""
    dtype, groups = q.dtype, q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if high:
        q, k, v = (x.to(F64 if dtype in (F32, F64) else F32) for x in (q, k, v))
        q = q * scale
    else:
        k = k * scale
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    s = torch.einsum("bthd,bshd->bhts", q, k)
    s = (s / softcap).tanh() * softcap if softcap else s
    s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
    s = s if bias is None else s + bias
    column = s.new_full(s.shape[1:2], -torch.inf) if sinks is None else sinks.to(s.dtype)
    column = column[None, :, None, None].expand(*s.shape[:3], 1)
    p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1].to(v.dtype)
    p = p if hidden is None else p.masked_fill(hidden, 0.0)  # rows that see nothing give 0
    return torch.einsum("bhts,bshd->bthd", p, v).to(dtype)


def both(*arguments, **options):
    """Return the reference and PyTorch's result in the dtype."""
    return [attention(*arguments, **options, high=high) for high in (True, False)]


def bias_of(slopes, sq, sk, k_mask=None, q_mask=None):
    """Return ALiBi's bias by the distance from the key beside a query."""
    i, j = torch.arange(sq, device=DEVICE)[:, None], torch.arange(sk, device=DEVICE)
    nq = sq if q_mask is None else q_mask.sum(1)[:, None, None, None]
    nk = sk if k_mask is None else k_mask.sum(1)[:, None, None, None]
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * (i + nk - nq - j).abs()


def heads_of(kind, heads, few=2):
    return {"mha": heads, "mqa": 1, "gqa": few}[kind]


def problem(sq, sk, D, dtype, kind="mha", packed=False, batch=1, heads=1, few=2, times=1.0, DV=None):
    """Make q, k and v of (batch, tokens, heads, D), and the leaves that they are or are parts of."""
    q = (randn(batch, sq, heads, D, dtype=dtype) * times).detach().requires_grad_()
    kv = randn(batch, sk, 2, heads_of(kind, heads, few), max(D, DV or D), dtype=dtype)
    if packed:
        kv.requires_grad_()
        return q, *kv.unbind(2), (q, kv)
    k, v = (x[..., :size].contiguous().requires_grad_() for x, size in zip(kv.unbind(2), (D, DV or D), strict=True))
    return q, k, v, (q, k, v)


def paged(k, v, page):
    """Return caches of pages in random places, and the table, for k and v of (batch, tokens, heads, D)."""
    batch, tokens = k.shape[:2]
    count = -(-tokens // page)
    table = torch.randperm(3 * batch * count, device=DEVICE)[: batch * count].view(batch, count)
    caches = []
    for x in (k, v):
        cache = randn(3 * batch * count, page, *x.shape[2:], dtype=x.dtype)
        rows = x.new_zeros(batch, count * page, *x.shape[2:])
        rows[:, :tokens] = x
        cache[table.flatten()] = rows.view(batch * count, page, *x.shape[2:])
        caches.append(cache)
    return *caches, table.int()


def unpaged(cache, table, tokens):
    return cache[table.long()].flatten(1, 2)[:, :tokens]


def rotate(x, cos, sin, interleaved=False):
    head, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    parts = a * cos - b * sin, a * sin + b * cos
    return torch.cat([torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest], -1)


def tables(length, R, dtype, theta=10000.0):
    """Return cos and sin of (length, R / 2)."""
    angles = torch.arange(length, device=DEVICE)[:, None] * theta ** -(torch.arange(0, R, 2, device=DEVICE) / R)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rms(x, weight=None, eps=1e-6, offset=0.0):
    """RMSNorm in float32, or float64, rounded once."""
    wide = x.to(F64 if x.dtype == F64 else F32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def _tokens(h, q, k, v, decay, beta):
    outs = []
    for t in range(q.shape[2]):
        h = h * decay[:, :, t, None, None]
        value = v[:, :, t]
        if beta is not None:
            value = (value - torch.einsum("bhk,bhkv->bhv", k[:, :, t], h)) * beta[:, :, t, None]
        h = h + k[:, :, t, :, None] * value[:, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], h))
    return h, torch.stack(outs, 2)


def recurrence(q, k, v, g, beta, h0, scale=None):
    """Return outputs, in the dtype of v, and the state, of q and k (B, T, H / n, K), v (B, T, H, V), g and beta."""
    dtype, scale = v.dtype, q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    q, k, v, g = (turned(x).double() for x in (q, k, v, g))
    beta, h, outs = None if beta is None else turned(beta).double(), h0.double(), []
    for n in range(0, q.shape[2], 64):
        part = [None if x is None else x[:, :, n : n + 64] for x in (q * scale, k, v, g.exp(), beta)]
        h, out = checkpoint(_tokens, h, *part, use_reentrant=False)
        outs.append(out)
    return turned(torch.cat(outs, 2)).to(dtype), h.float()


def one_by_one(call, cu):
    """Return a call for packed sequences that makes a call for each: of some tensors of tokens, then states."""

    def packed(*tensors):
        *tokens, h0 = tensors
        parts = [call(*(x[:, a:b] for x in tokens), h0[n : n + 1]) for n, (a, b) in enumerate(itertools.pairwise(cu))]
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts], 0)

    return packed
