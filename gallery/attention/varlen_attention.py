# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Attend within packed sequences of different lengths, and compute nothing for
# padding."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "four kernels: one lists the tiles, one attends, two are backward"
# ///
r"""
Variable-length attention
=========================

Sequences of a batch differ in length. If all are padded to the longest one,
most of what attention computes may be padding. A kernel can take the sequences
*packed*, one after the other without a gap, and compute nothing for padding.

After this page you can

* count what padding costs;
* tell each program which piece of which sequence is its own;
* measure what programs without work cost, and launch nearly none;
* start the longest work first;
* compute a deterministic gradient in two passes.
"""

# sphinx_gallery_tags = ["attention", "compute bound", "autograd"]
import inspect
import itertools
import math
import os
from functools import partial

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table

# %%
# In PyTorch
# ----------
#
# *Packed*, all tokens of a batch are the rows of one tensor. The cumulated
# lengths, ``cu_seqlens``, say where each sequence begins and where the last one
# ends: ``[0, 5, 7, 9]`` for sequences of 5, 2 and 2 tokens. We take 64 lengths
# from 128 to the longest, which grow by one factor, and shuffle them. Attention
# is *causal*: a query sees the keys of its sequence up to its own place.

generator = torch.Generator(device=DEVICE).manual_seed(0)
LONGEST = [512, 1024, 2048, 4096, 8192]
WIDTH = 512  # of all heads together


def lengths_of(longest, count=64):
    steps = torch.linspace(math.log(128), math.log(longest), count).exp()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return steps[order].round().int().tolist()


def operations(lengths):
    return 2e-9 * WIDTH * sum(n * n for n in lengths)  # in units of 10**9


if __name__ == "__main__":
    for longest in LONGEST[::2]:
        lengths = lengths_of(longest)
        waste = operations([longest] * 64) / operations(lengths)
        print(f"longest {longest:4}: {sum(lengths):6} tokens,", end=" ")
        print(f"{64 * longest:6} if padded, for {waste:.1f} times the work")

# %%
# The first kernel
# ----------------
#
# As in ``flash_attention_forward.py``, a program takes a block of queries, and
# goes along the keys of their sequence. The lengths are on the GPU; the CPU
# does not wait for them, but mostly knows the longest. So each sequence gets as
# many programs as the longest has blocks. Those without queries end at once:
#
# .. code-block:: text
#
#     block           0         1         2         3         4
#                +---------+---------+---------+---------+---------+
#     sequence a |   run   |   run   |   run   |   run   |   run   |
#     sequence b |   run   |   run   |   end   |   end   |   end   |
#     sequence c |   run   |   end   |   end   |   end   |   end   |
#                +---------+---------+---------+---------+---------+
#
# Past a sequence's end lie tokens of the next. Loads and stores mask them; the
# causal mask hides their scores. As on that page, ``m`` is the maximum so far,
# ``total`` the sum of exponentials, ``acc`` the weighted sum of values.


@triton.jit
def packed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_ptr,
    scale,
    HEADS,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cu_ptrs = cu_ptr + tl.program_id(axis=2)
    begin, end = tl.load(cu_ptrs), tl.load(cu_ptrs + 1)
    row = begin + tl.program_id(axis=1) * BLOCK_M
    if row >= end:
        return  # the sequence has no such block
    offs_m = row + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.program_id(axis=0) * D + tl.arange(0, D)[None, :]  # (1, D)
    # In int32, the offset would overflow past element 2**31.
    offs = offs_m.to(tl.int64) * HEADS * D + offs_d  # (BLOCK_M, D)
    q = tl.load(q_ptr + offs, mask=offs_m < end, other=0.0)
    m = tl.full((BLOCK_M, 1), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    # No query of the block sees a key past the block's last query.
    for start in range(begin, tl.minimum(end, row + BLOCK_M), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
        of_keys = offs_n.to(tl.int64) * HEADS * D + offs_d  # (BLOCK_N, D)
        k = tl.load(k_ptr + of_keys, mask=offs_n < end, other=0.0)
        v = tl.load(v_ptr + of_keys, mask=offs_n < end, other=0.0)
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        s = tl.where(offs_m >= offs_n.T, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp2(s - m_new)  # (BLOCK_M, BLOCK_N)
        # What was added up so far had the old maximum.
        total = total * tl.exp2(m - m_new) + tl.sum(p, axis=1, keep_dims=True)
        acc = tl.dot(p.to(v.dtype), v, acc * tl.exp2(m - m_new))
        m = m_new
    tl.store(out_ptr + offs, acc / total, mask=offs_m < end)


def packed(q, k, v, cu, longest):
    """Return the causal attention of packed, contiguous q, k and v."""
    (_, heads, D), out = q.shape, torch.empty_like(q)
    scale = D**-0.5 * math.log2(math.e)  # exp(x) is exp2(x * log2(e))
    grid = heads, triton.cdiv(longest, 128), len(cu) - 1
    tile = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
    packed_kernel[grid](q, k, v, out, cu, scale, heads, D, **tile)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64. In float16, the probabilities and the result are
# rounded, each by :math:`2^{-11}` of the largest ``v``. We allow twice the sum.


def inputs(lengths, D, dtype=torch.float16, heads=None):
    """Return packed random q, k and v, and their cu_seqlens."""
    shape = 3, sum(lengths), heads or WIDTH // D, D
    x = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return *x, cu.to(DEVICE)


def one_by_one(q, k, v, lengths):
    turned = (t.transpose(0, 1)[None].split(lengths, 2) for t in (q, k, v))
    parts = zip(*turned, strict=True)
    outs = [sdpa(*part, is_causal=True)[0] for part in parts]
    return torch.cat(outs, 1).transpose(0, 1)


if __name__ == "__main__":
    lengths = [1, 200, 0, 128, 31]
    *x, cu = inputs(lengths, D=64, heads=2)
    expected = one_by_one(*(t.double() for t in x), lengths)
    error = (packed(*x, cu, 200) - expected).abs().max()
    atol = 2**-9 * x[2].abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(error, 0 * error, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# We compare it with PyTorch's ``scaled_dot_product_attention``, SDPA: one
# sequence after the other, and the padded batch. Rates count only needed work.


def rates(calls, lengths):
    """Return the TFLOP/s of calls."""
    found = gpu_time(calls, turns=20).items()
    return {name: round(operations(lengths) / t[0]) for name, t in found}


def padded_inputs(lengths, D):
    *x, _ = inputs([len(lengths) * max(lengths)], D)
    shape = len(lengths), WIDTH // D, max(lengths), D
    return [t.view(shape) for t in x]


def by_library(backend, q, k, v):
    with sdpa_kernel(backend):
        return sdpa(q, k, v, is_causal=True)


CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION


if __name__ == "__main__" and DEVICE.type == "cuda":
    for longest in LONGEST[::2]:
        lengths = lengths_of(longest)
        *x, cu = inputs(lengths, D=128)
        wide = padded_inputs(lengths, D=128)
        tried = {
            "Triton": partial(packed, *x, cu, longest),
            "one by one": partial(one_by_one, *x, lengths),
            "cuDNN, padded": partial(by_library, CUDNN, *wide),
            "Flash, padded": partial(by_library, FLASH, *wide),
        }
        print(f"longest {longest}, TFLOP/s: {rates(tried, lengths)}")

# %%
# What do programs without work cost?
# -----------------------------------
#
# Many programs end at once; call them *idle*. The launcher uses ``longest`` for
# the grid alone. So we pass 2, 4 and 8 times the true length. That adds idle
# programs, and changes nothing else.

if __name__ == "__main__":
    for longest in LONGEST[::2]:
        programs = 64 * triton.cdiv(longest, 128)
        busy = sum(triton.cdiv(n, 128) for n in lengths_of(longest))
        print(f"longest {longest:4}: {programs - busy} of {programs} idle")

if __name__ == "__main__" and DEVICE.type == "cuda":
    for longest in LONGEST[::2]:
        x, many = inputs(lengths_of(longest), D=128), [1, 2, 4, 8]
        tried = {n: partial(packed, *x, n * longest) for n in many}
        found = {n: 1e3 * t[0] for n, t in gpu_time(tried, turns=20).items()}
        more = WIDTH // 128 * 64 * 7 * longest // 128
        each = 1e3 * (found[8] - found[1]) / more
        print(f"longest {longest:4}, microseconds:", end=" ")
        print(", ".join(f"x{n} {t:.0f}" for n, t in found.items()), end="; ")
        print(f"{each:.1f} ns for each idle program")

# %%
# A list of tiles
# ---------------
#
# Idle programs may be most of the grid, as the output above shows. Instead, a
# program could look up its *tile* in a list: a sequence, and a block of its
# queries. Each head then has as many programs as the list has entries:
#
# .. code-block:: text
#
#     program     0     1     2     3     4     5     6     7
#              +-----+-----+-----+-----+-----+-----+-----+-----+
#     sequence |  a  |  a  |  a  |  a  |  a  |  b  |  b  |  c  |
#     block    |  4  |  3  |  2  |  1  |  0  |  1  |  0  |  0  |
#              +-----+-----+-----+-----+-----+-----+-----+-----+
#
# We also choose the order. If a tile with much work starts among the last ones,
# it may still run when all others have ended. With a causal mask, block ``n``
# goes along the blocks of keys up to its own: a sequence's last block has the
# most work. We try three orders: as packed; the tiles with the most work first;
# and the longest sequence first, each from its last block, as in the picture.
# There, neighbours in the list mostly read the same keys.

# %%
# The GPU makes the list
# ----------------------
#
# The op takes the third order; the table below it compares them. A kernel of
# one program a sequence makes the list. A program adds up the tiles of all
# longer sequences, and of equally long ones with a smaller number. It writes
# its own tiles after those. Nothing is sorted, and no program waits for
# another.
#
# The CPU has to size the grid, and does not know how many tiles there are. But
# it knows a bound. :math:`T` tokens fill at most :math:`T / b` whole blocks of
# :math:`b`, and each of :math:`B` sequences has at most one *ragged* block, one
# that is not full. The list has :math:`\lfloor T / b \rfloor + B` entries, or
# the longest length's blocks times :math:`B` if that is less. Those left over
# have the block ``-1``, and a program that finds it ends. Each head has at most
# :math:`B` such programs, whatever the longest length is.

# %%
# The backward
# ------------
#
# The forward keeps the *log-sum-exp* of each row of scores,
# :math:`\lambda_i = \log \sum_j e^{s_{ij}}`. With it, a probability needs no
# sum. (:math:`\mathrm{d}x` is the gradient with respect to :math:`x`.)
#
# .. math:: p_{ij} = e^{s_{ij} - \lambda_i}, \qquad
#    \mathrm{d}p_{ij} = \mathrm{d}o_i \cdot v_j, \qquad
#    \mathrm{d}s_{ij} = p_{ij} \big( \mathrm{d}p_{ij} - \delta_i \big), \qquad
#    \delta_i = \mathrm{d}o_i \cdot o_i
#
# .. math:: \mathrm{d}q_i = \tfrac{1}{\sqrt D} \sum_j \mathrm{d}s_{ij} k_j,
#    \qquad \mathrm{d}k_j = \tfrac{1}{\sqrt D} \sum_i \mathrm{d}s_{ij} q_i,
#    \qquad \mathrm{d}v_j = \sum_i p_{ij}\, \mathrm{d}o_i
#
# One sum goes along the keys, and two along the queries. In one kernel for all
# three, many programs would have to add to the same place in memory, in an
# order that changes. So there are two passes. One takes a block of queries and
# goes along the keys, for :math:`\mathrm{d}q`. The other takes a block of keys
# and goes along the queries. Each recomputes the scores and
# :math:`\mathrm{d}p`. That makes seven products where five would do, but the
# gradient is deterministic. The first pass also computes :math:`\delta`, for
# both.
#
# The second pass has a list of its own, of blocks of keys. With a causal mask
# the first keys are seen by the most queries, so they come first. Where several
# heads of queries share one of keys, a program goes along all their queries.

# %%
# The op
# ------
#
# The cell has four kernels. The first writes a list, and runs before each of
# the others. These are the first kernel of this page, with a list, and the two
# passes of the backward. The op does more than the first kernel:
#
# * As in ``flash_attention_forward.py``, blocks of keys that all queries of a
#   tile see need no mask, and several heads of queries may share one of keys.
# * Queries and keys may differ in number, with a ``cu_seqlens`` for each. With
#   a causal mask the *last* query sees all keys, the one before it all but the
#   last, and so on: a model that continues a text has few new queries at the
#   end of many keys. (PyTorch's ``is_causal`` counts from the first query.)
#
# The op itself is ``varlen_attention_forward``, which also returns the
# log-sum-exp, in base 2; ``varlen_attention`` leaves that out. The op is
# registered as ``what_a_call_costs.py`` shows.

from triton_gallery_ops.varlen_attention import (
    VARLEN_ATTENTION_TILES,
    _varlen_attention_launch,
    varlen_attention,
    varlen_attention_forward,
)

# %%
# What did each step gain? The table has the TFLOP/s of the forward. In rows
# with a comma, the op gets a list made before. ``grid`` lists the longest
# length's blocks for each sequence, idle ones too, like the first kernel's
# grid; kernel and tile are the op's. Then come the three orders. The last row
# has the tiles of the one before it; its time includes the kernel that makes
# the list.


def orders(lengths, BLOCK):
    """Return lists of tiles, by name."""
    blocks = range(triton.cdiv(max(lengths), BLOCK))
    tiles = [*itertools.product(range(len(lengths)), blocks)]
    real = [tile for tile in tiles if tile[1] * BLOCK < lengths[tile[0]]]
    by_sequence = sorted(real, key=lambda tile: (tile[0], -tile[1]))
    return {
        "grid": [(s, n if n * BLOCK < lengths[s] else -1) for s, n in tiles],
        "as packed": real,
        "most work first": sorted(real, key=lambda tile: -tile[1]),
        "longest first": sorted(by_sequence, key=lambda t: -lengths[t[0]]),
    }


def ladder(lengths, D, heads=None):
    """Return a call of each step, by name."""
    *x, cu = inputs(lengths, D, heads=heads)
    known = *x, cu, cu, max(lengths), max(lengths), True
    steps = {"first kernel": partial(packed, *x, cu, max(lengths))}
    BLOCK = VARLEN_ATTENTION_TILES["forward"][max(64, D)][0]
    for name, tiles in orders(lengths, BLOCK).items():
        given = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
        listed = partial(lambda given, *_: given, given)
        step = partial(_varlen_attention_launch, *known, listed=listed)
        steps[f"the op, {name}"] = step
    return steps | {"the op": partial(varlen_attention_forward, *known)}


if __name__ == "__main__":
    steps = ladder([1, 140, 0, 128, 31], D=64, heads=2)
    expected = steps.pop("first kernel")()
    for step in steps.values():
        torch.testing.assert_close(step()[0], expected, rtol=0, atol=2e-3)

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = {}
    for D in (64, 128):
        for longest in LONGEST[::2]:
            lengths = lengths_of(longest)
            table[D, longest] = rates(ladder(lengths, D), lengths)
    print("TFLOP/s for heads of, longest", pd.DataFrame(table), sep="\n")

# %%
# Proof
# -----
#
# We compare each dtype with float64, sequence by sequence: ragged lengths, one
# token, none, more queries than keys and fewer, padded heads, shared heads of
# keys, with a causal mask and without. For each element of the result we allow
# two roundings of :math:`\sum_j p_j |v_j|` and two of the result. A rounding is
# :math:`2^{-11}` in float16. In bfloat16 we allow :math:`2^{-7}`, as the
# interpreter cuts bits off; in float32 and float64, where the rounding of the
# scores counts most, :math:`2^{-18}` and :math:`2^{-45}`. A gradient has terms
# that cancel. So there we compare norms, and allow four roundings.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}
CASES = [  # queries and keys of sequences, heads, heads of keys, D
    ([1, 140, 0, 64], [1, 140, 0, 64], 1, 1, 64),
    ([5, 40, 3, 0], [50, 20, 0, 9], 2, 1, 80),
    ([70], [70], 2, 1, 32),
    ([1, 1, 1], [7, 40, 1], 1, 1, 128),
]


def reference(q, k, v, lengths_q, lengths_k, causal):
    """Return attention by its formula, sequence by sequence."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    parts = q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)
    outs = []
    for of_q, of_k, of_v in zip(*parts, strict=True):
        scores = torch.einsum("mhd,nhd->hmn", of_q, of_k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], device=DEVICE).bool()
        hidden = hidden.triu(1 + len(of_k) - len(of_q)) & causal
        scores = scores.masked_fill(hidden, -torch.inf)
        # A query that sees nothing has a row of NaN, which counts as 0.
        p = scores.softmax(-1).masked_fill(hidden, 0)
        outs.append(torch.einsum("hmn,nhd->mhd", p, of_v))
    return torch.cat(outs)


def prove(case, dtype, causal):
    lengths_q, lengths_k, heads, shared, D = case
    q, do, _, cu_q = inputs(lengths_q, D, dtype, heads)
    k, v, _, cu_k = inputs(lengths_k, D, dtype, shared)
    sizes = cu_q, cu_k, max(lengths_q), max(lengths_k)
    lengths, eps = (lengths_q, lengths_k, causal), EPS[dtype]
    x = [t.requires_grad_() for t in (q, k, v)]
    out = varlen_attention(*x, *sizes, causal)
    assert out.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = reference(*wide, *lengths)
    terms = reference(*wide[:2], wide[2].abs(), *lengths)
    allowed = 2 * eps * (terms + expected.abs()) + 1e-300
    assert ((out.double() - expected).abs() <= allowed).all(), (case, dtype)
    grads = torch.autograd.grad(out, x, do)
    right = torch.autograd.grad(expected, wide, do.double())
    for grad, of_wide in zip(grads, right, strict=True):
        error = (grad.double() - of_wide).norm()
        assert error <= 4 * eps * of_wide.norm() + 1e-300, (case, dtype)


if __name__ == "__main__":
    for dtype in EPS:
        for case in CASES:
            for causal in (False, True):
                prove(case, dtype, causal)

# %%
# Next come queries, keys and values that are views of one tensor, and PyTorch's
# ``gradcheck``, which compares the gradient with differences of the result.

lengths = [40, 0, 9]
side, _, _, cu = inputs(lengths, 48, heads=2)
x = side.unflatten(2, (3, 16)).unbind(2)
sizes = cu, cu, 40, 40, True
out = varlen_attention(*x, *sizes)
same = varlen_attention(*(t.contiguous() for t in x), *sizes)
assert torch.equal(out, same)

if __name__ == "__main__":
    q, _, _, cu_q = inputs([2, 0, 1], 2, torch.float64, heads=2)
    k, v, _, cu_k = inputs([1, 1, 2], 2, torch.float64, heads=1)
    x = [t.requires_grad_() for t in (q, k, v)]
    for causal in (False, True):
        op = partial(varlen_attention, causal=causal, scale=0.7)
        op = partial(torch.autograd.gradcheck, op, fast_mode=True)
        assert op((*x, cu_q, cu_k, 2, 2))

# %%
# The benchmark
# -------------
#
# The benchmark is causal, in float16, with heads of 128. For ``n`` tokens we
# count ``n * n / 2`` scores, and a score four operations for each element of a
# head, in two products. A backward counts 2.5 times as many, for five products.
# Beside the op are cuDNN and FlashAttention-2 on the padded batch, without the
# time to pad it; PyTorch's ``varlen_attn``, FlashAttention-2 for packed
# sequences; and SDPA of a *nested tensor*, PyTorch's form of a packed batch.


def packed_flash(q, k, v, cu, longest):
    # It imports triton, which must not come before the choice of interpreter.
    from torch.nn.attention.varlen import varlen_attn

    window = "window_size" in inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if window else {"is_causal": True}
    return varlen_attn(q, k, v, cu, cu, longest, longest, **causal)


def nested(q, k, v, cu, longest):
    """Return the attention of nested tensors."""
    places = cu.long(), None, 1, longest  # offsets, lengths, least and most
    jagged = torch.nested.nested_tensor_from_jagged
    x = [jagged(t, *places).transpose(1, 2) for t in (q, k, v)]
    return sdpa(*x, is_causal=True).transpose(1, 2).values()


def calls(lengths, D, backward=False, alone=False):
    """Return calls by name, of the forward or of the backward alone."""
    longest, (*x, cu) = max(lengths), inputs(lengths, D)
    known = cu, cu, longest, longest, True
    functions = {"Triton": (lambda *x: varlen_attention(*x, *known), x)}
    if not alone:
        wide = padded_inputs(lengths, D)
        functions |= {
            "cuDNN, padded": (partial(by_library, CUDNN), wide),
            "Flash, padded": (partial(by_library, FLASH), wide),
            "varlen_attn": (lambda *x: packed_flash(*x, cu, longest), x),
            "nested": (lambda *x: nested(*x, cu, longest), x),
        }
    found = {}
    for name, (function, given) in functions.items():
        found[name] = partial(function, *given)
        if backward:
            given = [t.requires_grad_() for t in given]
            out = function(*given)
            do = torch.empty_like(out).normal_(generator=generator)
            found[name] = partial(
                torch.autograd.grad, out, given, do, retain_graph=True
            )
    return found


def benchmark(D, backward=False):
    times = {}
    for longest in LONGEST:
        tried = calls(lengths_of(longest), D, backward)
        times[longest] = gpu_time(tried, turns=20)
    table = rate_table(
        times,
        "longest",
        "TFLOP/s",
        lambda longest: (
            operations(lengths_of(longest)) * (2.5 if backward else 1)
        ),
    )
    print(table.to_string())
    wide = table.pivot(index="longest", columns="series", values="TFLOP/s")
    what = "backward" if backward else "forward"
    wide.plot(logx=True, title=f"{what}, causal, heads of {D}")
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark(D=128)

if __name__ == "__main__" and DEVICE.type == "cuda":
    results_backward = benchmark(D=128, backward=True)

# %%
# How much do unequal lengths cost? The next table has the op's rates for these
# batches, divided by those for 64 equal lengths that need as many operations.

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for longest in LONGEST:
        lengths = lengths_of(longest)
        equal = [round(math.sqrt(sum(n * n for n in lengths) / 64))] * 64
        row = rows[longest] = {}
        for D, backward in itertools.product((64, 128), (False, True)):
            batches = {"some": lengths, "same": equal}
            tried = {
                who: calls(batch, D, backward, alone=True)["Triton"]
                for who, batch in batches.items()
            }
            found = rates(tried, lengths)
            name = f"{'backward' if backward else 'forward'}, {D}"
            row[name] = round(found["some"] / found["same"], 2)
    print("unequal / equal", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# Reading the result
# ------------------
#
# The op is the fastest at each length. At 512, the next is cuDNN on the padded
# batch, forward. Elsewhere it is ``varlen_attn``. A call costs the CPU more
# than the GPU takes where the longest sequence is short, so there these rates
# need other work in front, or a CUDA graph.
#
# The first output of this page counts how many times the work a padded batch
# takes. Rates count the work that the sequences need, so a kernel that computes
# padding loses that factor. With 64 sequences of the longest length, cuDNN
# takes the same time. So its rate is then the one here times the factor, which
# is more than the op has here: where little is padding, a padded batch may be
# the faster one. FlashAttention-3 was not measured, and neither was cuDNN with
# packed sequences.
#
# In the table of steps, a grid without idle programs gains a few per cent, and
# the longest sequence first is the fastest of the three orders in each column.
# The most work first is the slowest of them in the longest batch, though there,
# too, long tiles start early; no figure here tells why. Making the list costs
# the most where sequences are short, and hardly anything in the longest batch.
#
# Most ratios of the last table are above 1. That does not mean that unequal
# lengths are better: the equal batch has more tokens for the same operations,
# and the ratio does not separate the two.
#
# The table beside other libraries is of an H100, and the outputs above are of
# an H200. There PyTorch pads within its time, and lengths grow from a 64th of
# the longest.

# %%
# Break it
# --------
#
# The classic bug is to mask by the end of the tensor, not by the end of the
# sequence. Without a causal mask, a sequence then sees the first keys of the
# next one. Here it is in PyTorch, with blocks of 64 keys:


def by_blocks(q, k, v, lengths, BLOCK):
    begin, outs = 0, []
    for length in lengths:
        end = begin + math.ceil(length / BLOCK) * BLOCK
        scores = q[begin : begin + length] @ k[begin:end].T
        outs.append(scores.softmax(-1) @ v[begin:end])
        begin += length
    return torch.cat(outs)


if __name__ == "__main__":
    for lengths in ([128, 64, 192], [128, 60, 192]):
        *x, _ = inputs(lengths, 32, torch.float64, heads=1)
        x = [t[:, 0] for t in x]
        right = by_blocks(*x, lengths, BLOCK=1)  # ends with the sequence
        error = (by_blocks(*x, lengths, BLOCK=64) - right).abs().max().item()
        print(f"lengths {lengths}: error {error:.1e}")
        assert (error > 1e-3) == (60 in lengths)

# %%
# A test whose lengths are multiples of the block finds nothing, and neither
# does a test with a single sequence. Test with several odd lengths.

# %%
# Go further
# ----------
#
# 1. The op's list has whole sequences, one after the other. For which batch
#    would it be better to sort the tiles of all sequences by their work?
#
# To read on:
#
# * `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, with the formulas of
#   the backward.
# * ``tile_order.py`` is about the order of a product's tiles.

# %%
# Answers
# -------
#
# **1.** For a batch of one long sequence and few others. The tiles of the long
# one start first in either order. But the op's order puts even its first
# blocks, which have little work, before the longest tiles of the others.
