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
*packed*, one behind the other without a gap, and compute nothing for padding.

After this page you can

* count what padding costs;
* tell each program which piece of which sequence is its own;
* measure what programs without work cost, and launch nearly none;
* start the longest work first;
* compute the gradient in two passes that give the same bits each time.
"""

# sphinx_gallery_tags = ["attention", "compute bound", "autograd"]
import functools
import inspect
import itertools
import math
import os
from functools import partial

import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton
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
    # No query of the block sees a key behind the block's last query.
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
# Beside the kernel stands PyTorch's ``scaled_dot_product_attention``, SDPA: one
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
# its own tiles behind so many. Nothing is sorted, and no program waits for
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
# same bits each time. The first pass also computes :math:`\delta`, for both.
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
# registered in the way of the page ``what_a_call_costs.py``.

VARLEN_ATTENTION_NAMESPACE = "triton_gallery"
VARLEN_ATTENTION_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
# Of each kernel, by a head's size, padded to a power of two: BLOCK_M, BLOCK_N,
# warps, stages. Heads below 64 take the tiles of 64.
VARLEN_ATTENTION_TILES = {
    "forward": {
        64: (64, 64, 4, 3),
        128: (64, 64, 4, 3),
        256: (128, 64, 8, 2),
    },
    "dq": {
        64: (128, 64, 8, 3),
        128: (64, 64, 4, 2),
        256: (64, 32, 8, 2),
    },
    "dkdv": {
        64: (128, 64, 4, 2),
        128: (64, 128, 8, 2),
        256: (32, 64, 8, 2),
    },
}
# Heads padded to 256 take the small tile where a program gets fewer bytes of
# shared memory than this. (On an A100 it gets more.)
VARLEN_ATTENTION_ROOM = 160_000
VARLEN_ATTENTION_SMALL = (32, 32, 4, 1)
# For float32 and float64: heads of up to 64, and longer ones
VARLEN_ATTENTION_WIDE = [(32, 32, 4, 1), (16, 16, 4, 1)]


@triton.jit
def _varlen_attention_list_kernel(
    cu_ptr,
    cu_other_ptr,
    list_ptr,
    BATCH,
    SLOTS,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Write the tiles of one sequence into the list: the sequence, the block.

    The list is of one side, queries or keys. A tile goes along the tokens of
    the other side. The sequence with most of these comes first.
    """
    seq = tl.program_id(axis=0)
    tokens = tl.load(cu_ptr + seq + 1) - tl.load(cu_ptr + seq)
    work = tl.load(cu_other_ptr + seq + 1) - tl.load(cu_other_ptr + seq)
    first, count = 0, 0
    for start in range(0, BATCH, BLOCK_B):
        offs = start + tl.arange(0, BLOCK_B)  # (BLOCK_B,)
        mask = offs < BATCH
        begin = tl.load(cu_ptr + offs, mask=mask, other=0)
        tiles = tl.load(cu_ptr + offs + 1, mask=mask, other=0) - begin
        tiles = tl.cdiv(tiles, BLOCK)  # (BLOCK_B,)
        begin = tl.load(cu_other_ptr + offs, mask=mask, other=0)
        other = tl.load(cu_other_ptr + offs + 1, mask=mask, other=0) - begin
        # Equally long sequences come by number: two never share a place.
        sooner = (other > work) | ((other == work) & (offs < seq))
        first += tl.sum(tl.where(sooner, tiles, 0))
        count += tl.sum(tiles)
    tiles = tl.cdiv(tokens, BLOCK)
    for start in range(0, tiles, BLOCK_B):
        offs = start + tl.arange(0, BLOCK_B)  # (BLOCK_B,)
        # With a causal mask, the last queries and the first keys have the most.
        block = tiles - 1 - offs if DOWN else offs
        # Tiles go past the end only if max_seqlen was too small. They are
        # left out then, rather than written beside the list.
        mask = (offs < tiles) & (first + offs < SLOTS)
        tl.store(list_ptr + 2 * (first + offs), seq, mask=mask)
        tl.store(list_ptr + 2 * (first + offs) + 1, block, mask=mask)
    # Entries that are left over get the block -1. The programs share them.
    for slot in range(count + seq, SLOTS, BATCH):
        tl.store(list_ptr + 2 * slot, 0)
        tl.store(list_ptr + 2 * slot + 1, -1)


@triton.jit
def _varlen_attention_load(
    ptrs,
    offs,
    stride,
    L,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Load rows of a sequence, zeros past its end and past the head's."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    mask = offs_d < D
    if RAGGED:
        # Past the end lie the tokens of the next sequence.
        mask = mask & (offs < L)
    return tl.load(ptrs + offs.to(tl.int64) * stride + offs_d, mask, other=0.0)


@triton.jit
def _varlen_attention_store(
    ptr,
    tile,
    begin,
    offs,
    L,
    head,
    HEADS,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store rows of a sequence into a contiguous tensor."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]  # (1, BLOCK_D)
    ptrs = ptr + ((begin + offs) * HEADS + head) * D + offs_d
    tl.store(ptrs, tile, mask=(offs < L) & (offs_d < D))


@triton.jit
def _varlen_attention_keys(
    block,
    LQ,
    LK,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the ends of the keys that all, and that some, of a block see.

    Query i sees the keys up to i + LK - LQ: the last query sees all of them.
    """
    full, end = LK, LK
    if CAUSAL:
        seen = block * BLOCK_M + LK - LQ
        full = tl.maximum(tl.minimum(seen + 1, LK), 0)
        end = tl.maximum(tl.minimum(seen + BLOCK_M, LK), 0)
    # Rounded down to whole blocks: a ragged block needs a mask.
    return full // BLOCK_N * BLOCK_N, end


@triton.jit
def _varlen_attention_seen(offs_m, offs_n, LQ, LK, CAUSAL: tl.constexpr):
    """Return which keys a query sees."""
    seen = offs_n < LK
    if CAUSAL:
        seen = seen & (offs_n <= offs_m + LK - LQ)
    return seen


@triton.jit
def _varlen_attention_power(s, SCALE: tl.constexpr, shift):
    """Return 2**(s * SCALE - shift)."""
    scale = tl.full((), SCALE, dtype=s.dtype)
    # One rounding, whatever Triton's default. (Before Triton 3.9, -shift would
    # be an instruction of its own.)
    return tl.exp2(tl.fma(s, scale, -1.0 * shift))


@triton.jit
def _varlen_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    list_ptr,
    cu_q_ptr,
    cu_k_ptr,
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # These lines are not in a helper. A helper would get these pointers and
    # return numbers that the stores' addresses depend on. torch.compile would
    # then believe that the kernel writes to these tensors, and copy them.
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    # Not -inf: for a query that has seen no key yet, -inf - -inf is NaN.
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    full, end = _varlen_attention_keys(block, LQ, LK, CAUSAL, BLOCK_M, BLOCK_N)
    # First the keys that all queries of the block see, without a mask; then the
    # others, with one.
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            k = _varlen_attention_load(
                k_ptrs, offs_n[:, None], stride_kt, LK, D, BLOCK_D, MASKED
            )
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            if MASKED:
                offs = offs_n[None, :]
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, CAUSAL)
                s = tl.where(seen, s, -float("inf"))  # (BLOCK_M, BLOCK_N)
            # The scale is positive, so it may be applied after the maximum.
            most = tl.max(s, axis=1, keep_dims=True) * SCALE
            m_new = tl.maximum(m, most)
            p = _varlen_attention_power(s, SCALE, m_new)  # (BLOCK_M, BLOCK_N)
            # What was added up so far had the old maximum.
            rescale = tl.exp2(m - m_new)  # (BLOCK_M, 1)
            total = total * rescale + tl.sum(p, axis=1, keep_dims=True)
            v = _varlen_attention_load(
                v_ptrs, offs_n[:, None], stride_vt, LK, D, BLOCK_D, MASKED
            )
            acc = acc * rescale
            # The tensor cores take p in the type of v.
            p = p.to(v.dtype)
            acc = tl.dot(p, v, acc, input_precision="ieee", out_dtype=ACC)
            m = m_new
    # A query that saw nothing has a result of 0. As its lse is infinite, the
    # backward computes probabilities of 0 for it.
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total
    lse = tl.where(nothing, float("inf"), m + tl.log2(total))
    _varlen_attention_store(
        out_ptr, acc, begin_q, offs_m, LQ, head, HEADS, D, BLOCK_D
    )
    tl.store(lse_ptr + head * TOTAL + begin_q + offs_m, lse, mask=offs_m < LQ)


@triton.jit
def _varlen_attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    list_ptr,
    cu_q_ptr,
    cu_k_ptr,
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dt,
    stride_dh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    d_ptrs = do_ptr + begin_q * stride_dt + head * stride_dh
    o_ptrs = out_ptr + (begin_q * HEADS + head) * D
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    do = _varlen_attention_load(d_ptrs, offs_m, stride_dt, LQ, D, BLOCK_D, True)
    out = _varlen_attention_load(
        o_ptrs, offs_m, HEADS * D, LQ, D, BLOCK_D, True
    )
    row = head * TOTAL + begin_q + offs_m  # (BLOCK_M, 1)
    lse = tl.load(lse_ptr + row, mask=offs_m < LQ, other=float("inf"))
    delta = tl.sum(out.to(ACC) * do.to(ACC), axis=1, keep_dims=True)
    # The other pass runs after this one, and reads delta.
    tl.store(delta_ptr + row, delta, mask=offs_m < LQ)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    full, end = _varlen_attention_keys(block, LQ, LK, CAUSAL, BLOCK_M, BLOCK_N)
    # First the keys that all queries of the block see, without a mask; then the
    # others, with one.
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            k = _varlen_attention_load(
                k_ptrs, offs_n[:, None], stride_kt, LK, D, BLOCK_D, MASKED
            )
            v = _varlen_attention_load(
                v_ptrs, offs_n[:, None], stride_vt, LK, D, BLOCK_D, MASKED
            )
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            p = _varlen_attention_power(s, SCALE, lse)  # (BLOCK_M, BLOCK_N)
            if MASKED:
                offs = offs_n[None, :]
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, CAUSAL)
                # For a key that is not seen, exp2 may give inf. Multiplied by
                # a mask's 0, that would be NaN, so we select.
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
            ds = (p * (dp - delta)).to(k.dtype)  # (BLOCK_M, BLOCK_N)
            dq = tl.dot(ds, k, dq, input_precision="ieee", out_dtype=ACC)
    # SCALE contains log2(e), and the derivative does not: ln(2) cancels it.
    dq = dq * (SCALE * 0.6931471805599453)
    _varlen_attention_store(
        dq_ptr, dq, begin_q, offs_m, LQ, head, HEADS, D, BLOCK_D
    )


@triton.jit
def _varlen_attention_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    list_ptr,
    cu_q_ptr,
    cu_k_ptr,
    TOTAL,
    HEADS,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dt,
    stride_dh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # HEADS counts the heads of keys. GROUP heads of queries share each of them.
    slot, head = tl.program_id(axis=0) // HEADS, tl.program_id(axis=0) % HEADS
    block = tl.load(list_ptr + 2 * slot + 1)
    if block < 0:
        return
    seq = tl.load(list_ptr + 2 * slot)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    begin_q, begin_k = begin_q.to(tl.int64), begin_k.to(tl.int64)
    head = head.to(tl.int64)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    k_ptrs = k_ptr + begin_k * stride_kt + head * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head * stride_vh
    k = _varlen_attention_load(k_ptrs, offs_n, stride_kt, LK, D, BLOCK_D, True)
    v = _varlen_attention_load(v_ptrs, offs_n, stride_vt, LK, D, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    # From query some on, a query sees some of these keys; from full on, all.
    some, full = 0, 0
    if CAUSAL:
        some = tl.minimum(tl.maximum(block * BLOCK_N + LQ - LK, 0), LQ)
        some = some // BLOCK_M * BLOCK_M
        full = tl.maximum((block + 1) * BLOCK_N - 1 + LQ - LK, some)
        full = tl.minimum(tl.cdiv(full, BLOCK_M) * BLOCK_M, LQ)
    for member in range(GROUP):
        of_q = head * GROUP + member
        q_ptrs = q_ptr + begin_q * stride_qt + of_q * stride_qh
        d_ptrs = do_ptr + begin_q * stride_dt + of_q * stride_dh
        row = of_q * TOTAL + begin_q
        # With a causal mask, first the queries that need it; then the others.
        for MASKED in tl.static_range(CAUSAL, -1, -1):
            for start in range(
                some if MASKED else full, full if MASKED else LQ, BLOCK_M
            ):
                offs_m = start + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
                mask = offs_m < LQ
                q = _varlen_attention_load(
                    q_ptrs, offs_m[:, None], stride_qt, LQ, D, BLOCK_D, True
                )
                do = _varlen_attention_load(
                    d_ptrs, offs_m[:, None], stride_dt, LQ, D, BLOCK_D, True
                )
                # Past the end, lse is inf, so p is 0.
                lse = tl.load(lse_ptr + row + offs_m, mask, other=float("inf"))
                delta = tl.load(delta_ptr + row + offs_m, mask, other=0.0)
                # Keys by queries: p is the first operand of the sum over
                # queries, below.
                s = tl.dot(k, q.T, input_precision="ieee", out_dtype=ACC)
                # (BLOCK_N, BLOCK_M)
                p = _varlen_attention_power(s, SCALE, lse[None, :])
                if MASKED:
                    seen = offs_n <= offs_m[None, :] + LK - LQ
                    p = tl.where(seen, p, 0.0)
                w = p.to(do.dtype)
                dv = tl.dot(w, do, dv, input_precision="ieee", out_dtype=ACC)
                dp = tl.dot(v, do.T, input_precision="ieee", out_dtype=ACC)
                ds = p * (dp - delta[None, :])  # (BLOCK_N, BLOCK_M)
                ds = ds.to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee", out_dtype=ACC)
    dk = dk * (SCALE * 0.6931471805599453)
    _varlen_attention_store(
        dk_ptr, dk, begin_k, offs_n, LK, head, HEADS, D, BLOCK_D
    )
    _varlen_attention_store(
        dv_ptr, dv, begin_k, offs_n, LK, head, HEADS, D, BLOCK_D
    )


@functools.cache
def _varlen_attention_room(device):
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":  # the interpreter
        return VARLEN_ATTENTION_ROOM
    gpu = torch.cuda.get_device_properties(device)
    return getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)


def _varlen_attention_check(name, q, k, v, cu_q, cu_k, scale):
    if q.dtype not in VARLEN_ATTENTION_DTYPES:
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    kinds = [(t.dtype, t.device) for t in (q, k, v)]
    places = [(t.dtype, t.device) for t in (cu_q, cu_k)]
    if len({*kinds}) > 1 or {*places} != {(torch.int32, q.device)}:
        raise TypeError(
            f"{name} takes q, k and v of one dtype and cu_seqlens of int32, "
            f"all on one device, not {kinds + places}"
        )
    fits = (
        q.ndim == k.ndim == 3
        and k.shape == v.shape
        and q.shape[2] == k.shape[2]
        and 1 <= q.shape[2] <= 256
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and cu_q.ndim == 1
        and cu_q.shape == cu_k.shape
        and cu_q.shape[0] > 0
    )
    if not fits:
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v, cu_q, cu_k))
        raise ValueError(
            f"{name} takes q of (tokens, heads, D), k and v of one shape "
            "(tokens, heads / n, D), with D up to 256, and cu_seqlens of one "
            f"shape (batch + 1,), not {found}"
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"{name} takes a scale above 0, not {scale}")


def _varlen_attention_tile(kind, like, scale):
    """Return the constants of a kernel, its warps and stages."""
    D = int(like.shape[2])
    BLOCK_D = max(16, triton.next_power_of_2(D))
    tile = VARLEN_ATTENTION_TILES[kind][max(64, BLOCK_D)]
    room = _varlen_attention_room(like.device)
    if BLOCK_D == 256 and room < VARLEN_ATTENTION_ROOM:
        tile = VARLEN_ATTENTION_SMALL
    if like.dtype.itemsize > 2:  # their operands take more registers
        tile = VARLEN_ATTENTION_WIDE[BLOCK_D > 64]
    BLOCK_M, BLOCK_N, num_warps, num_stages = tile
    return {
        "D": D,
        # exp(x) is exp2(x * log2(e)).
        "SCALE": (D**-0.5 if scale is None else scale) * math.log2(math.e),
        "ACC": tl.float64 if like.dtype == torch.float64 else tl.float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
        "num_warps": num_warps,
        # Two stages fit AMD's shared memory.
        "num_stages": min(num_stages, 2 if torch.version.hip else num_stages),
    }


def _varlen_attention_list(
    cu,
    cu_other,
    total,
    longest,
    BLOCK,
    DOWN,
    kernel=_varlen_attention_list_kernel,
):
    """Return the list of the tiles of one side, (slots, 2), on the GPU."""
    batch = cu.shape[0] - 1
    # The GPU alone knows how many tiles there are. Each sequence has at most
    # one ragged tile, and no more tiles than the longest.
    slots = torch.sym_min(
        total // BLOCK + batch, batch * triton.cdiv(longest, BLOCK)
    )
    tiles = cu.new_empty(slots, 2)
    kernel[(batch,)](
        cu,
        cu_other,
        tiles,
        batch,
        slots,
        DOWN=DOWN,
        BLOCK=BLOCK,
        BLOCK_B=256,
    )
    return tiles


def _varlen_attention_rows(*tensors):
    """Return tensors whose heads are contiguous, in a type to compute with."""
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]
    if triton.knobs.runtime.interpret and rows[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        rows = [t.float() for t in rows]
    return rows, [stride for t in rows for stride in t.stride()[:2]]


def _varlen_attention_launch(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    scale=None,
    kernel=_varlen_attention_kernel,
    listed=_varlen_attention_list,
):
    cu = cu_seqlens_q, cu_seqlens_k
    _varlen_attention_check("varlen_attention", q, k, v, *cu, scale)
    total, heads = q.shape[:2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape), q.new_empty(heads, total, dtype=wide)
    if out.numel() == 0:
        return out, lse
    cu = [t.contiguous() for t in cu]
    tile = _varlen_attention_tile("forward", q, scale)
    rows, strides = _varlen_attention_rows(q, k, v)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        tiles = listed(*cu, total, max_seqlen_q, tile["BLOCK_M"], causal)
        kernel[(tiles.shape[0] * heads,)](
            *rows,
            out,
            lse,
            tiles,
            *cu,
            total,
            heads,
            *strides,
            GROUP=int(heads // k.shape[1]),
            CAUSAL=causal,
            LOWEST=torch.finfo(wide).min,
            **tile,
        )
    return out, lse


def _varlen_attention_backward_launch(
    do,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    scale=None,
    dq_kernel=_varlen_attention_dq_kernel,
    dkdv_kernel=_varlen_attention_dkdv_kernel,
    listed=_varlen_attention_list,
):
    cu = [t.contiguous() for t in (cu_seqlens_q, cu_seqlens_k)]
    (total, heads), heads_k = q.shape[:2], k.shape[1]
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    delta = torch.empty_like(lse)
    (q, k, v, do, out), strides = _varlen_attention_rows(q, k, v, do, out)
    known = {"GROUP": int(heads // heads_k), "CAUSAL": causal}
    with torch.accelerator.device_index(q.device.index):
        if dq.numel() > 0:
            tile = known | _varlen_attention_tile("dq", dq, scale)
            tiles = listed(*cu, total, max_seqlen_q, tile["BLOCK_M"], causal)
            dq_kernel[(tiles.shape[0] * heads,)](
                q,
                k,
                v,
                out,
                do,
                lse,
                delta,
                dq,
                tiles,
                *cu,
                total,
                heads,
                *strides[:8],
                **tile,
            )
        if dk.numel() > 0:
            tile = known | _varlen_attention_tile("dkdv", dk, scale)
            tiles = listed(
                *reversed(cu),
                k.shape[0],
                max_seqlen_k,
                tile["BLOCK_N"],
                False,
            )
            dkdv_kernel[(tiles.shape[0] * heads_k,)](
                q,
                k,
                v,
                do,
                lse,
                delta,
                dk,
                dv,
                tiles,
                *cu,
                total,
                heads_k,
                *strides[:8],
                **tile,
            )
    return dq, dk, dv


@triton_op(
    f"{VARLEN_ATTENTION_NAMESPACE}::varlen_attention_forward", mutates_args={}
)
def varlen_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return varlen_attention, and the log-sum-exp of each row of scores.

    Takes what varlen_attention takes. The log-sum-exp has the shape (heads,
    tokens) and the base 2, is float32, or float64 for float64, and has no
    gradient. It is inf for a query that sees nothing.
    """
    return _varlen_attention_launch(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal,
        scale,
        wrap_triton(_varlen_attention_kernel),
        partial(
            _varlen_attention_list,
            kernel=wrap_triton(_varlen_attention_list_kernel),
        ),
    )


@triton_op(
    f"{VARLEN_ATTENTION_NAMESPACE}::varlen_attention_backward", mutates_args={}
)
def varlen_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, given that of the result, do.

    Takes what varlen_attention_forward took and returned.
    """
    return _varlen_attention_backward_launch(
        do,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal,
        scale,
        wrap_triton(_varlen_attention_dq_kernel),
        wrap_triton(_varlen_attention_dkdv_kernel),
        partial(
            _varlen_attention_list,
            kernel=wrap_triton(_varlen_attention_list_kernel),
        ),
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
VARLEN_ATTENTION_LIBRARY = Library(VARLEN_ATTENTION_NAMESPACE, "FRAGMENT")
VARLEN_ATTENTION_LIBRARY.impl(
    "varlen_attention_forward", _varlen_attention_launch, "CUDA"
)
VARLEN_ATTENTION_LIBRARY.impl(
    "varlen_attention_backward", _varlen_attention_backward_launch, "CUDA"
)


def _varlen_attention_setup(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.known = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)


def _varlen_attention_gradient(ctx, do, _):
    grads = varlen_attention_backward(do, *ctx.saved_tensors, *ctx.known)
    return *grads, None, None, None, None, None, None


varlen_attention_forward.register_autograd(
    _varlen_attention_gradient, setup_context=_varlen_attention_setup
)


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    scale=None,
):
    """Return the attention of packed sequences, each with itself alone.

    Takes q of (tokens, heads, D), and k and v of (tokens, heads / n, D), all
    of one dtype, float16, bfloat16, float32 or float64, with D up to 256 and
    any strides; what is not contiguous along D is copied. Head h of q takes
    head h // n of k and v. q and k may differ in tokens.

    cu_seqlens_q and cu_seqlens_k say where sequences begin and end: sequence i
    has the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1, and its keys
    likewise. Both are int32 on the device of q, and have batch + 1 numbers that
    never fall, from 0 to the number of tokens. A sequence may be empty.
    max_seqlen_q and max_seqlen_k are integers, at least the lengths of the
    longest sequence. These numbers are not checked, as the CPU would have to
    wait for them. With wrong ones, the op may read and write outside of the
    tensors, or leave rows of the result or of a gradient unwritten.

    With causal, a sequence's last query sees all its keys, the one before it
    all but the last, and so on. A query that sees nothing gives 0. Scores above
    2**27 or below -2**27, in float64 2**56, may give 0 or NaN: a GPU then
    rounds by more than exp2 can take. scale multiplies the scores. It is above
    0, and 1 / sqrt(D) if not given; the kernels are compiled anew for each
    scale.

    The result has the shape and dtype of q and is contiguous. It and the
    gradients of q, k and v have the same bits each time. The gradients have no
    gradient. Raises TypeError for other dtypes and for dtypes or devices that
    differ, and ValueError for other shapes or scales. The method:
    https://arxiv.org/abs/2307.08691
    """
    return varlen_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal,
        scale,
    )[0]


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
# Beside the op stand cuDNN and FlashAttention-2 on the padded batch, without
# the time to pad it; PyTorch's ``varlen_attn``, FlashAttention-2 for packed
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
