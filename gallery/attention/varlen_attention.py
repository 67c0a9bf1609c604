# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "four kernels: one lists the tiles, one attends, two are backward"
# ///
r"""
Variable-length attention
=========================

Sequences of a batch differ in length. Padded to the longest, most of what
attention computes may be padding. A kernel can take the sequences *packed*, one
behind the other without a gap, and compute nothing else.

After this page you can

* count what padding costs;
* tell each program which piece of which sequence is its own;
* say what programs without work cost, and launch nearly none;
* start the longest work first;
* compute the gradient in two passes that give the same bits each time.
"""

# sphinx_gallery_tags = ["attention", "compute bound", "backward"]
import ast
import functools
import inspect
import itertools
import math
import os
import time
from functools import partial

import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
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


def gpu_time(calls, turns=50):
    """Time a dictionary of calls by turns, each with the L2 cache emptied.

    Returns for each the median of its GPU time in milliseconds, the 20th and
    the 80th percentile, its CPU time in microseconds, and whether the GPU had
    to wait for the CPU. The GPU sleeps before a call: that hides the launch.
    """
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    seen = {name: [] for name in calls}
    for turn in range(-5, turns):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(3_000_000)  # cycles of its clock, about 1.5 ms
            cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            cpu = time.perf_counter() - began
            end.record()
            late = start.query()  # the GPU got there before the CPU was done
            torch.cuda.synchronize()
            if turn >= 0:  # those before compile, tune and warm up
                seen[name].append((start.elapsed_time(end), cpu * 1e6, late))
    low, middle, high = turns // 5, turns // 2, turns * 4 // 5
    found = {}
    for name, rows in seen.items():
        gpu, cpu, late = map(sorted, zip(*rows, strict=True))
        found[name] = gpu[middle], gpu[low], gpu[high], cpu[middle], late[high]
    return found


def rate_table(times, x, unit, work):
    """Return a data frame of rates: work(size) for each millisecond.

    ``times`` has, for each size, what ``gpu_time`` returned.
    """
    import pandas as pd

    rows = []
    for size, calls in times.items():
        for name, (median, fast, slow, cpu, late) in calls.items():
            rates = [work(size) / ms for ms in (median, slow, fast)]
            rows.append([size, name, *rates, cpu, late])
    columns = [x, "series", unit, "low", "high", "CPU us", "late"]
    return pd.DataFrame(rows, columns=columns)


# %%
# In PyTorch
# ----------
#
# Let query :math:`i` of a sequence see its keys up to :math:`i`. (The page
# ``flash_attention_forward.py`` has the formula, and the kernel that we start
# from.) *Packed*, all tokens of a batch are rows of one tensor, and
# ``cu_seqlens`` says where each sequence begins. It has one number more than
# there are sequences:
#
# .. code-block:: text
#
#     padded                       packed
#     +---+---+---+---+---+        +---+---+---+---+---+---+---+---+---+
#     | a   a   a   a   a |        | a   a   a   a   a | b   b | c   c |
#     | b   b   .   .   . |        +---+---+---+---+---+---+---+---+---+
#     | c   c   .   .   . |        cu_seqlens = [0, 5, 7, 9]
#     +---+---+---+---+---+
#
# Our batches have 64 sequences, from 128 tokens to the longest one. Each is
# longer than the last one by the same factor, and they are shuffled.

generator = torch.Generator(device=DEVICE).manual_seed(0)
WIDTH = 512  # of all heads together


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def lengths_of(longest, count=64):
    """Return the lengths of sequences, from 128 to the longest."""
    shuffle = torch.Generator().manual_seed(0)
    steps = torch.linspace(math.log(128), math.log(longest), count).exp()
    order = torch.randperm(count, generator=shuffle)
    return steps[order].round().int().tolist()


def cu_seqlens(lengths):
    """Return where sequences begin, and where the last one ends."""
    begins = [0, *itertools.accumulate(lengths)]
    return torch.tensor(begins, dtype=torch.int32, device=DEVICE)


def inputs(lengths, D):
    """Return q, k and v of packed sequences."""
    return [random(sum(lengths), WIDTH // D, D) for _ in range(3)]


def operations(lengths):
    """Return what a causal mask leaves to multiply and add, in 10**9."""
    return 2e-9 * WIDTH * sum(length**2 for length in lengths)


LONGEST = [512, 1024, 2048, 4096, 8192]

if __name__ == "__main__":
    for longest in LONGEST[::2]:
        lengths = lengths_of(longest)
        tokens = 64 * longest / sum(lengths)
        waste = operations([longest] * 64) / operations(lengths)
        print(f"longest {longest:4}: {sum(lengths):6} tokens;", end=" ")
        print(f"padded {tokens:.1f} times as many, {waste:.1f} times the work")

# %%
# The first kernel
# ----------------
#
# A program takes a block of queries, and goes along the keys of its sequence.
# Which block of which sequence? The lengths are on the GPU; to read them, the
# CPU would have to wait. But one usually knows the longest length. So launch
# programs for as many blocks as the longest sequence has, for each sequence. A
# program that finds no queries ends at once:
#
# .. code-block:: text
#
#     block     0      1      2      3      4
#            +------+------+------+------+------+
#     seq. a | run  | run  | run  | run  | run  |   BLOCK_M queries each
#            +------+------+------+------+------+
#     seq. b | run  | run  | end  | end  | end  |
#            +------+------+------+------+------+
#     seq. c | run  | end  | end  | end  | end  |
#            +------+------+------+------+------+
#
# ``attend`` is the loop of flash attention. The last block of a sequence is
# *ragged*: what lies past its end are tokens of the next one, and must be
# masked.


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    begin,
    end,
    row,
    scale,
    HEADS,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend from the queries at row and behind, in a sequence."""
    offs_m = row + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    offs_d = tl.program_id(axis=0) * D + tl.arange(0, D)[None, :]  # (1, D)
    # In int32, the offset would overflow past element 2**31.
    offs = offs_m.to(tl.int64) * HEADS * D + offs_d
    q = tl.load(q_ptr + offs, mask=offs_m < end, other=0.0)  # (BLOCK_M, D)
    m = tl.full((BLOCK_M, 1), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    # No query of the block sees a key behind its last one.
    for start in range(begin, tl.minimum(end, row + BLOCK_M), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        of_keys = offs_n[:, None].to(tl.int64) * HEADS * D + offs_d
        k = tl.load(k_ptr + of_keys, mask=offs_n[:, None] < end, other=0.0)
        v = tl.load(v_ptr + of_keys, mask=offs_n[:, None] < end, other=0.0)
        s = tl.dot(q, k.T) * scale  # (BLOCK_M, BLOCK_N)
        s = tl.where(offs_n[None, :] <= offs_m, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp2(s - m_new)  # (BLOCK_M, BLOCK_N)
        # What was added up so far had the old maximum.
        total = total * tl.exp2(m - m_new) + tl.sum(p, axis=1, keep_dims=True)
        acc = tl.dot(p.to(v.dtype), v, acc * tl.exp2(m - m_new))
        m = m_new
    tl.store(out_ptr + offs, acc / total, mask=offs_m < end)


@triton.jit
def grid_kernel(
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
    if row < end:  # else the sequence has no such block
        attend(
            q_ptr,
            k_ptr,
            v_ptr,
            out_ptr,
            begin,
            end,
            row,
            scale,
            HEADS,
            D,
            BLOCK_M,
            BLOCK_N,
        )


TILE = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}


def by_grid(q, k, v, cu, longest):
    """Return the causal attention of packed, contiguous q, k and v."""
    (_, heads, D), out = q.shape, torch.empty_like(q)
    # exp(x) is exp2(x * log2(e)).
    scale = D**-0.5 * math.log2(math.e)
    grid = heads, triton.cdiv(longest, TILE["BLOCK_M"]), len(cu) - 1
    grid_kernel[grid](q, k, v, out, cu, scale, heads, D, **TILE)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64, sequence by sequence. In float16, the probabilities
# are rounded before the second product, and so is the result. Each costs at
# most :math:`2^{-11}` of the largest value. We allow twice that.


def one_by_one(q, k, v, lengths):
    """Return causal attention by PyTorch, one sequence after the other."""
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    turned = ([t.transpose(0, 1)[None] for t in part] for part in parts)
    outs = [sdpa(*part, is_causal=True)[0].transpose(0, 1) for part in turned]
    return torch.cat(outs)


if __name__ == "__main__":
    lengths = [1, 200, 0, 128, 31]
    q, k, v = (random(sum(lengths), 2, 64) for _ in range(3))
    out = by_grid(q, k, v, cu_seqlens(lengths), max(lengths))
    expected = one_by_one(q.double(), k.double(), v.double(), lengths)
    error, atol = (out - expected).abs().max(), 2**-9 * v.abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# Beside it stand the padded batch, by two libraries that PyTorch's SDPA can
# call, and SDPA for one sequence after the other. With a causal mask, padding
# behind a sequence needs no mask of its own: no query of the sequence sees it.
# The rate counts what the sequences need, without padding.


def padded(backend, like, lengths, **options):
    """Return a call of SDPA for random padded sequences."""
    shape = len(lengths), like.shape[1], max(lengths), like.shape[2]
    x = [random(*shape) for _ in range(3)]

    def call():
        with sdpa_kernel(backend):
            return sdpa(*x, is_causal=True)

    return call


def rates(calls, lengths):
    """Return the TFLOP/s of calls."""
    found = gpu_time(calls, turns=20).items()
    return {name: round(operations(lengths) / t[0]) for name, t in found}


if __name__ == "__main__" and DEVICE.type == "cuda":
    for longest in LONGEST[::2]:
        lengths = lengths_of(longest)
        x = inputs(lengths, D=128)
        tried = {
            "Triton": partial(by_grid, *x, cu_seqlens(lengths), longest),
            "cuDNN, padded": padded(SDPBackend.CUDNN_ATTENTION, x[0], lengths),
            "Flash, padded": padded(SDPBackend.FLASH_ATTENTION, x[0], lengths),
            "one by one": partial(one_by_one, *x, lengths),
        }
        print(f"longest {longest}, TFLOP/s: {rates(tried, lengths)}")

# %%
# What do programs without work cost?
# -----------------------------------
#
# Most programs of the grid end at once. How many, and what does the GPU do for
# them? The kernel only uses ``longest`` for the grid. So let us claim that it
# is 2, 4 and 8 times what it is: each time, programs without work are added,
# and nothing else.


def programs(lengths, longest, BLOCK=128):
    """Return how many programs a head has, with work and without."""
    busy = sum(triton.cdiv(length, BLOCK) for length in lengths)
    return busy, len(lengths) * triton.cdiv(longest, BLOCK) - busy


if __name__ == "__main__":
    for longest in LONGEST[::2]:
        busy, idle = programs(lengths_of(longest), longest)
        print(f"longest {longest:4}: {busy:4} with work, {idle:4} without")

if __name__ == "__main__" and DEVICE.type == "cuda":
    for longest in LONGEST[::2]:
        lengths = lengths_of(longest)
        x, times = (*inputs(lengths, D=128), cu_seqlens(lengths)), [1, 2, 4, 8]
        tried = {n: partial(by_grid, *x, n * longest) for n in times}
        found = {n: t[0] * 1e3 for n, t in gpu_time(tried, turns=20).items()}
        more = 4 * 64 * 7 * triton.cdiv(longest, 128)  # of 4 heads
        each = (found[8] - found[1]) * 1e3 / more
        print(f"longest {longest:4}, microseconds:", end=" ")
        print(*(f"x{n} {t:.0f}" for n, t in found.items()), sep=", ", end="; ")
        print(f"{each:.1f} ns for each program without work")

# %%
# A list of tiles
# ---------------
#
# A program could look up in a list what it has to do: a sequence, and a block
# of it. The grid then has as many programs as the list has entries:
#
# .. code-block:: text
#
#     program     0     1     2     3     4     5     6     7
#              +-----+-----+-----+-----+-----+-----+-----+-----+
#     sequence |  a  |  a  |  a  |  a  |  a  |  b  |  b  |  c  |
#     block    |  0  |  1  |  2  |  3  |  4  |  0  |  1  |  0  |
#              +-----+-----+-----+-----+-----+-----+-----+-----+
#
# Here the list is made in Python, from lengths that the CPU knows. The op will
# make it on the GPU.


@triton.jit
def list_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_ptr,
    list_ptr,
    scale,
    HEADS,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    list_ptrs = list_ptr + 2 * tl.program_id(axis=1)
    cu_ptrs = cu_ptr + tl.load(list_ptrs)
    begin, end = tl.load(cu_ptrs), tl.load(cu_ptrs + 1)
    row = begin + tl.load(list_ptrs + 1) * BLOCK_M
    attend(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        begin,
        end,
        row,
        scale,
        HEADS,
        D,
        BLOCK_M,
        BLOCK_N,
    )


def by_list(q, k, v, cu, tiles):
    (_, heads, D), out = q.shape, torch.empty_like(q)
    scale = D**-0.5 * math.log2(math.e)
    grid = heads, len(tiles)
    list_kernel[grid](q, k, v, out, cu, tiles, scale, heads, D, **TILE)
    return out


def by_sequence(lengths):
    """Return the tiles of all sequences, in the order of the packed tokens."""
    blocks = [triton.cdiv(length, TILE["BLOCK_M"]) for length in lengths]
    return [(seq, n) for seq, count in enumerate(blocks) for n in range(count)]


def on_gpu(tiles):
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE)


# %%
# Which tile first?
# -----------------
#
# With a causal mask, block ``n`` goes along ``n + 1`` blocks of keys. If a long
# tile starts among the last ones, it runs on when all others have ended. With a
# list, the order is ours. Three orders to try:
#
# * as packed, sequence by sequence;
# * the tiles with the most work first, from all sequences;
# * the longest sequence first, and of each sequence the last block first. Tiles
#   that run at the same time then mostly read the same keys.


def most_work_first(lengths):
    return sorted(by_sequence(lengths), key=lambda tile: -tile[1])


def longest_sequence_first(lengths):
    return sorted(
        by_sequence(lengths),
        key=lambda tile: (-lengths[tile[0]], tile[0], -tile[1]),
    )


ORDERS = {
    "list, as packed": by_sequence,
    "list, most work first": most_work_first,
    "list, longest sequence first": longest_sequence_first,
}


def ladder(lengths, D):
    """Return a call of each step so far, by name."""
    x = *inputs(lengths, D), cu_seqlens(lengths)
    steps = {"grid": partial(by_grid, *x, max(lengths))}
    for name, order in ORDERS.items():
        steps[name] = partial(by_list, *x, on_gpu(order(lengths)))
    return steps


if __name__ == "__main__":
    lengths = [1, 200, 0, 128, 31]
    x = *(random(sum(lengths), 2, 64) for _ in range(3)), cu_seqlens(lengths)
    expected = by_grid(*x, max(lengths))
    for order in ORDERS.values():
        out = by_list(*x, on_gpu(order(lengths)))
        torch.testing.assert_close(out, expected, rtol=0, atol=0)

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for longest in LONGEST[::2]:
        lengths = lengths_of(longest)
        rows[longest] = rates(ladder(lengths, D=128), lengths)
    print("TFLOP/s", pd.DataFrame(rows).to_string(), sep="\n")

# %%
# A list that no CPU waits for
# ----------------------------
#
# The op takes the third order, and a small kernel of one program a sequence
# makes the list. How many tiles come before those of my sequence? Those of all
# longer sequences, and of equally long ones with a smaller number. A program
# adds them up: no sorting is needed, and no program waits for another. Then it
# writes its own tiles behind them.
#
# The grid needs a number, and the CPU does not know how many tiles there are.
# But it knows a bound. :math:`T` tokens fill at most :math:`T / b` whole blocks
# of :math:`b`, and each of :math:`B` sequences has at most one ragged block. So
# the list has :math:`\lfloor T / b \rfloor + B` entries, or as many as the
# longest length allows if these are fewer. What is left over has the block
# ``-1``, and a program that finds it ends. There are at most :math:`B` such
# programs a head, whatever the longest length is.

# %%
# What else the op does
# ---------------------
#
# * As in ``flash_attention_forward.py``, keys that all queries of a block see
#   need no mask, and several heads of queries may share one of keys.
# * Queries and keys may differ in number, with a ``cu_seqlens`` for each. Then
#   the *last* query sees all keys, the one before it all but the last, and so
#   on: a model that continues a text has few new queries at the end of many
#   keys. (PyTorch's ``is_causal`` counts from the first query instead.)
# * ``s * scale - m`` is one instruction, a fused multiply-add. So the maximum
#   is taken of the scores before the scale, and multiplied by it. That needs a
#   scale above 0.

# %%
# The backward
# ------------
#
# The forward keeps the *log-sum-exp* of each row,
# :math:`\lambda_i = \log \sum_j e^{s_{ij}}`. With it, a probability needs no
# sum:
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
# One sum goes along the keys, and two along the queries. One kernel for all
# three would have to add to some of them in memory, from many programs, in an
# order that changes. So there are two passes, and each recomputes the
# probabilities. One takes a block of queries and goes along the keys, for
# :math:`\mathrm{d}q`. The other takes a block of keys and goes along the
# queries. That is seven products where five would do, but the same bits each
# time. The first pass also computes :math:`\delta`, for both.
#
# .. code-block:: text
#
#     dq: a block of queries              dk, dv: a block of keys
#                   keys                                keys
#          +---+---+---+---+                    +---+---+---+---+
#          |                                    |   | : |
#          |                                    |   | : |
#          | > > > |             queries        |   | v |        queries
#          |                                    |   | v |
#          +---+---+---+---+                    +---+---+---+---+
#
# The second pass has a list of its own, of blocks of keys. With a causal mask
# the first keys are seen by the most queries, so they come first. A head of
# keys that several heads of queries share goes along the queries of all of
# them.

# %%
# The op
# ------
#
# The list's kernel runs before each of the others. The op itself is
# ``varlen_attention_forward``, which returns the log-sum-exp too;
# ``varlen_attention`` leaves that out. The op is registered in the way of the
# page ``what_a_call_costs.py``.

VARLEN_ATTENTION_NAMESPACE = "triton_gallery"
VARLEN_ATTENTION_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
# Of each kernel, for a padded head: BLOCK_M, BLOCK_N, warps, stages
VARLEN_ATTENTION_TILES = {
    "forward": {
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 3),
        256: (128, 64, 8, 2),
    },
    "dq": {
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 2),
        256: (64, 32, 8, 2),
    },
    "dkdv": {
        64: (64, 128, 8, 3),
        128: (64, 128, 8, 2),
        256: (32, 64, 8, 2),
    },
}
# Where a program has less shared memory than an A100's, in bytes
VARLEN_ATTENTION_ROOM = 160_000
VARLEN_ATTENTION_SMALL = (32, 32, 4, 1)
# For float32 and float64, in short heads and in long ones
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

    A tile goes along the other side's tokens. The more, the sooner its place.
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
        # Of equally long ones the first: no two may have the same places.
        sooner = (other > work) | ((other == work) & (offs < seq))
        first += tl.sum(tl.where(sooner, tiles, 0))
        count += tl.sum(tiles)
    tiles = tl.cdiv(tokens, BLOCK)
    for start in range(0, tiles, BLOCK_B):
        offs = start + tl.arange(0, BLOCK_B)  # (BLOCK_B,)
        # With a causal mask, the last queries and the first keys have the most.
        block = tiles - 1 - offs if DOWN else offs
        # Past the end only if max_seqlen was too small: then tiles get lost.
        mask = (offs < tiles) & (first + offs < SLOTS)
        tl.store(list_ptr + 2 * (first + offs), seq, mask=mask)
        tl.store(list_ptr + 2 * (first + offs) + 1, block, mask=mask)
    # What is left over says so by a block of -1.
    for slot in range(count + seq, SLOTS, BATCH):
        tl.store(list_ptr + 2 * slot, 0)
        tl.store(list_ptr + 2 * slot + 1, -1)


@triton.jit
def _varlen_attention_place(list_ptr, cu_q_ptr, cu_k_ptr, HEADS):
    """Return a program's block and head, and where its sequence lies."""
    slot = tl.program_id(axis=0) // HEADS
    head = tl.program_id(axis=0) % HEADS
    seq = tl.load(list_ptr + 2 * slot)
    block = tl.load(list_ptr + 2 * slot + 1)
    begin_q, begin_k = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
    LQ = tl.load(cu_q_ptr + seq + 1) - begin_q
    LK = tl.load(cu_k_ptr + seq + 1) - begin_k
    # In int32, an offset would overflow past element 2**31.
    head, begin_q = head.to(tl.int64), begin_q.to(tl.int64)
    return block, head, begin_q, LQ, begin_k.to(tl.int64), LK


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
    """Return up to where a block of queries sees all keys, and up to where any.

    Query i sees the keys up to i + LK - LQ: the last query sees all of them.
    """
    full, end = LK, LK
    if CAUSAL:
        seen = block * BLOCK_M + LK - LQ
        full = tl.maximum(tl.minimum(seen + 1, LK), 0)
        end = tl.maximum(tl.minimum(seen + BLOCK_M, LK), 0)
    # Whole blocks of keys; the last, ragged one needs a mask.
    return full // BLOCK_N * BLOCK_N, end


@triton.jit
def _varlen_attention_seen(offs_m, offs_n, LQ, LK, CAUSAL: tl.constexpr):
    """Return which keys a query sees."""
    seen = offs_n < LK
    if CAUSAL:
        seen = seen & (offs_n <= offs_m + LK - LQ)
    return seen


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
    block, head, begin_q, LQ, begin_k, LK = _varlen_attention_place(
        list_ptr, cu_q_ptr, cu_k_ptr, HEADS
    )
    if block < 0:
        return
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # (BLOCK_M, 1)
    q_ptrs = q_ptr + begin_q * stride_qt + head * stride_qh
    k_ptrs = k_ptr + begin_k * stride_kt + head // GROUP * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head // GROUP * stride_vh
    q = _varlen_attention_load(q_ptrs, offs_m, stride_qt, LQ, D, BLOCK_D, True)
    m = tl.full((BLOCK_M, 1), LOWEST, dtype=ACC)
    total = tl.zeros((BLOCK_M, 1), dtype=ACC)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    full, end = _varlen_attention_keys(block, LQ, LK, CAUSAL, BLOCK_M, BLOCK_N)
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
            # The scale is positive, so the largest score is known before it.
            most = tl.max(s, axis=1, keep_dims=True) * SCALE
            m_new = tl.maximum(m, most)
            p = tl.exp2(s * SCALE - m_new)  # (BLOCK_M, BLOCK_N)
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
    # A query that saw nothing has a result of 0. With an infinite lse, the
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
    block, head, begin_q, LQ, begin_k, LK = _varlen_attention_place(
        list_ptr, cu_q_ptr, cu_k_ptr, HEADS
    )
    if block < 0:
        return
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
    # The other pass needs it as well.
    tl.store(delta_ptr + row, delta, mask=offs_m < LQ)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    full, end = _varlen_attention_keys(block, LQ, LK, CAUSAL, BLOCK_M, BLOCK_N)
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
            p = tl.exp2(s * SCALE - lse)  # (BLOCK_M, BLOCK_N)
            if MASKED:
                offs = offs_n[None, :]
                seen = _varlen_attention_seen(offs_m, offs, LQ, LK, CAUSAL)
                # A key that is not seen may have a huge power; 0 * inf is NaN.
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(do, v.T, input_precision="ieee", out_dtype=ACC)
            ds = (p * (dp - delta)).to(k.dtype)  # (BLOCK_M, BLOCK_N)
            dq = tl.dot(ds, k, dq, input_precision="ieee", out_dtype=ACC)
    # SCALE has the factor log2(e), which the derivative has not.
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
    # HEADS are those of the keys; each adds up what its GROUP of queries gives.
    block, head, begin_q, LQ, begin_k, LK = _varlen_attention_place(
        list_ptr, cu_q_ptr, cu_k_ptr, HEADS
    )
    if block < 0:
        return
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # (BLOCK_N, 1)
    k_ptrs = k_ptr + begin_k * stride_kt + head * stride_kh
    v_ptrs = v_ptr + begin_k * stride_vt + head * stride_vh
    k = _varlen_attention_load(k_ptrs, offs_n, stride_kt, LK, D, BLOCK_D, True)
    v = _varlen_attention_load(v_ptrs, offs_n, stride_vt, LK, D, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    # The first query that sees any of these keys, and the first that sees all
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
                # Past the end p is 0.
                lse = tl.load(lse_ptr + row + offs_m, mask, other=float("inf"))
                delta = tl.load(delta_ptr + row + offs_m, mask, other=0.0)
                # Transposed: p is what the sum over queries multiplies.
                s = tl.dot(k, q.T, input_precision="ieee", out_dtype=ACC)
                p = tl.exp2(s * SCALE - lse[None, :])  # (BLOCK_N, BLOCK_M)
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
    if like.dtype.itemsize > 2:  # their operands take registers
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


def _varlen_attention_list(kernel, cu, cu_other, total, longest, BLOCK, DOWN):
    """Return the list of the tiles of one side, (slots, 2), on the GPU."""
    batch = cu.shape[0] - 1
    # The GPU alone knows how many there are. At most one of each sequence is
    # ragged, and none has more than the longest.
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
    list_kernel=_varlen_attention_list_kernel,
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
        tiles = _varlen_attention_list(
            list_kernel, *cu, total, max_seqlen_q, tile["BLOCK_M"], causal
        )
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
            LOWEST=torch.finfo(torch.float32).min,
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
    list_kernel=_varlen_attention_list_kernel,
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
            tiles = _varlen_attention_list(
                list_kernel, *cu, total, max_seqlen_q, tile["BLOCK_M"], causal
            )
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
            tiles = _varlen_attention_list(
                list_kernel,
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

    That has shape (heads, tokens) and base 2, is float32, or float64 with
    float64, and has no gradient.
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
        wrap_triton(_varlen_attention_list_kernel),
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
        wrap_triton(_varlen_attention_list_kernel),
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
    of float16, bfloat16, float32 or float64, with D up to 256 and any strides;
    what is not contiguous along D is copied. Each n heads of q share one of k
    and v. Sequence i has the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1
    and, by cu_seqlens_k, its keys: both are int32 on the GPU, have batch + 1
    numbers that do not fall, from 0 to the number of tokens. That is not
    checked, for the GPU alone knows them. A sequence may be empty. No sequence
    may be longer than max_seqlen_q and max_seqlen_k, or queries are left out.
    With causal, a sequence's last query sees all its keys, the one before it
    all but one, and so on. A query that sees nothing gives 0. scale is 1 /
    sqrt(D) if not given, else above 0; the kernels are compiled for it. The
    result is contiguous, and it and its gradients are the same each time; they
    have none themselves. Raises TypeError for other dtypes or devices that
    differ, and ValueError for other shapes. The method:
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
# What did each step gain? The table has TFLOP/s of the forward, and the
# statements of its kernels.


def statements(*kernels):
    trees = (ast.parse(inspect.getsource(kernel.fn)) for kernel in kernels)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [n for n in nodes if isinstance(n, ast.Expr)]
    texts = [n for n in texts if isinstance(n.value, ast.Constant)]
    found = sum(isinstance(node, ast.stmt) for node in nodes)
    return found - len(texts) - len(kernels)


OP = (
    _varlen_attention_kernel,
    _varlen_attention_place,
    _varlen_attention_load,
    _varlen_attention_store,
    _varlen_attention_keys,
    _varlen_attention_seen,
    _varlen_attention_list_kernel,
)
STEPS = {
    "grid": statements(grid_kernel, attend),
    **dict.fromkeys(ORDERS, statements(list_kernel, attend)),
    "the op": statements(*OP),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = pd.DataFrame({"statements": STEPS})
    for D in (64, 128):
        for longest in LONGEST[::2]:
            lengths = lengths_of(longest)
            x = *inputs(lengths, D), *[cu_seqlens(lengths)] * 2
            op = partial(varlen_attention, *x, longest, longest, causal=True)
            found = rates(ladder(lengths, D) | {"the op": op}, lengths)
            table[f"{D}: {longest}"] = pd.Series(found)
    print(table.to_string())

# %%
# Proof
# -----
#
# We compare each dtype with float64, sequence by sequence: ragged lengths, one
# token, none, more queries than keys and fewer, padded heads, shared heads of
# keys, with a causal mask and without. For each element of the result we allow
# two roundings of :math:`\sum_j p_j |v_j|` and two of the result. A rounding is
# :math:`2^{-11}` in float16. In bfloat16 we allow :math:`2^{-7}`, as the
# interpreter cuts off. In float32 and float64, the roundings of the scores are
# left; we allow :math:`2^{-18}` and :math:`2^{-45}`. An element of a gradient
# is a sum of terms that cancel, so there we compare the length of the
# difference with the length of the gradient, and allow four roundings.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}
CASES = [  # queries and keys of sequences, heads, heads of keys, D
    ([1, 150, 0, 64], [1, 150, 0, 64], 2, 2, 64),
    ([5, 70, 3, 0], [60, 20, 0, 9], 4, 2, 80),
    ([130], [130], 2, 1, 32),
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
    q = random(sum(lengths_q), heads, D, dtype=dtype)
    k, v = (random(sum(lengths_k), shared, D, dtype=dtype) for _ in range(2))
    do = random(*q.shape, dtype=dtype)
    cu = cu_seqlens(lengths_q), cu_seqlens(lengths_k)
    lengths, eps = (lengths_q, lengths_k, causal), EPS[dtype]
    x = [t.requires_grad_() for t in (q, k, v)]
    out = varlen_attention(*x, *cu, max(lengths_q), max(lengths_k), causal)
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
# Next come queries, keys and values side by side in memory, as one projection
# leaves them, and PyTorch's check of the gradient by differences.

lengths = [40, 0, 9]
cu, longest = cu_seqlens(lengths), max(lengths)
x = random(sum(lengths), 3, 2, 16).unbind(1)
out = varlen_attention(*x, cu, cu, longest, longest, causal=True)
apart = [t.contiguous() for t in x]
same = varlen_attention(*apart, cu, cu, longest, longest, causal=True)
assert torch.equal(out, same)

if __name__ == "__main__":
    cu_q, cu_k = cu_seqlens([3, 0, 2]), cu_seqlens([2, 1, 4])
    q = random(5, 2, 3, dtype=torch.float64).requires_grad_()
    k, v = (random(7, 1, 3, dtype=torch.float64) for _ in range(2))
    x = q, k.requires_grad_(), v.requires_grad_()
    for causal in (False, True):
        op = partial(varlen_attention, causal=causal, scale=0.7)
        assert torch.autograd.gradcheck(op, (*x, cu_q, cu_k, 3, 4))

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    q = torch.ones(6, 4, 16, device=DEVICE).half()
    for k, places in ((q, cu.long()), (q[:, :3], cu), (q, cu[None])):
        try:
            varlen_attention(q, k, k, places, places, 40, 40)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is causal, in float16, with heads of 128. The operations are
# those of the sequences, without padding; a backward counts 2.5 times those of
# a forward, five products for two. Beside the op stand
#
# * cuDNN and FlashAttention-2 on the padded batch, without the time that
#   padding takes;
# * PyTorch's ``varlen_attn``, which has FlashAttention-2 for packed sequences;
# * SDPA of a *nested tensor*, PyTorch's own form of a packed batch.

WINDOW = "window_size" in inspect.signature(varlen_attn).parameters
VARLEN = {"window_size": (-1, 0)} if WINDOW else {"is_causal": True}


def nested(q, k, v, cu, longest):
    """Return the attention of nested tensors."""
    places = cu.long(), None, 1, longest  # offsets, lengths, least and most
    jagged = torch.nested.nested_tensor_from_jagged
    x = [jagged(t, *places).transpose(1, 2) for t in (q, k, v)]
    return sdpa(*x, is_causal=True).transpose(1, 2).values()


def contestants(lengths, D):
    """Return functions with inputs that require gradients, by name."""
    longest, cu = max(lengths), cu_seqlens(lengths)
    x = [t.requires_grad_() for t in inputs(lengths, D)]
    shape = len(lengths), WIDTH // D, longest, D
    wide = [random(*shape).requires_grad_() for _ in range(3)]

    def by(backend, *x):
        with sdpa_kernel(backend):
            return sdpa(*x, is_causal=True)

    options = {"causal": True}
    sides = cu, cu, longest, longest
    return {
        "Triton": (lambda *x: varlen_attention(*x, *sides, **options), x),
        "cuDNN, padded": (partial(by, SDPBackend.CUDNN_ATTENTION), wide),
        "Flash, padded": (partial(by, SDPBackend.FLASH_ATTENTION), wide),
        "varlen_attn": (lambda *x: varlen_attn(*x, *sides, **VARLEN), x),
        "nested": (lambda *x: nested(*x, cu, longest), x),
    }


def calls(lengths, D, backward=False):
    found = {}
    for name, (function, x) in contestants(lengths, D).items():
        if backward:
            out = function(*x)
            do = random(*out.shape)
            call = partial(torch.autograd.grad, out, x, do, retain_graph=True)
        else:
            call = torch.no_grad()(partial(function, *x))
        found[name] = call
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
# batches, and for 64 sequences of one length that need as many operations.

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for D in (64, 128):
        for longest in LONGEST:
            for what, backward in (("forward", False), ("backward", True)):
                lengths = lengths_of(longest)
                equal = round(math.sqrt(sum(n * n for n in lengths) / 64))
                tried = {}
                for name, some in ((0, lengths), (1, [equal] * 64)):
                    call = calls(some, D, backward)["Triton"]
                    tried[name] = call
                found = rates(tried, lengths)
                row = rows.setdefault(longest, {})
                row[f"{what}, {D}"] = round(found[0] / found[1], 3)
    print("rate, of that of equal lengths", pd.DataFrame(rows).T, sep="\n")

# %%
# Reading the result
# ------------------
#
# The first output of this page counts what a padded batch computes beyond its
# sequences. Whichever library computes it, its rate falls by that factor. The
# curves show how the op compares with padded batches, and with libraries that
# take packed ones. The last table shows what unequal lengths leave of the rate.

# %%
# Break it
# --------
#
# The bug that everybody writes once is to mask by the end of the tensor, not by
# the end of the sequence. Without a causal mask, the last queries of a sequence
# then see the first keys of the next one. Here it is in PyTorch, with blocks of
# 64 keys:


def blocks_of_keys(q, k, v, lengths, end_of_all):
    """Return attention by whole blocks of 64 keys; they may run over."""
    begin, outs = 0, []
    for length in lengths:
        end = begin + math.ceil(length / 64) * 64
        end = min(end, len(k) if end_of_all else begin + length)
        scores = q[begin : begin + length] @ k[begin:end].T
        outs.append(scores.softmax(-1) @ v[begin:end])
        begin += length
    return torch.cat(outs)


if __name__ == "__main__":
    for lengths in ([128, 64, 192], [128, 60, 192]):
        q, k, v = (random(sum(lengths), 32, dtype=torch.float64) for _ in "qkv")
        right = blocks_of_keys(q, k, v, lengths, end_of_all=False)
        wrong = blocks_of_keys(q, k, v, lengths, end_of_all=True)
        error = (right - wrong).abs().max().item()
        print(f"lengths {lengths}: error {error:.1e}")
        assert (error > 1e-3) == any(length % 64 for length in lengths)

# %%
# A test with lengths that the block divides finds nothing, and neither does one
# with a single sequence. Test with odd lengths, several of them.

# %%
# Go further
# ----------
#
# 1. The op's list has the order of whole sequences. For which batch would tiles
#    with the most work first, of all sequences, balance better?
# 2. Keys and values of generated text are mostly kept in pages that lie
#    anywhere. Which line of the forward kernel would change?
#
# To read on:
#
# * `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_, with the formulas of
#   the backward.
# * `Nested tensors <https://docs.pytorch.org/docs/stable/nested.html>`_ of
#   PyTorch, with the layout ``torch.jagged``.
# * ``tile_order.py`` is about the order of a product's tiles.

# %%
# Answers
# -------
#
# **1.** For one with a single long sequence and few others. Its tiles start
# first in either order, but in the op's order those with little work, its first
# blocks, come before the longest tiles of the other sequences.
#
# **2.** Those that load ``k`` and ``v``: a token's row would be looked up in a
# table of pages, instead of counted from the begin of the sequence. The list,
# the masks and the sums stay.
