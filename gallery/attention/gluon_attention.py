# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Write attention for Hopper in Gluon, with roles for warps and two groups that
# take turns at the matrix units."""
# dtypes = ["float16", "bfloat16"]
# backward = false
# deterministic = true
# longer = "its warps have two roles, each a function"
# gpu = "==9.0"
# ///
r"""
Attention in Gluon
==================

``flash_attention_forward.py`` writes attention in Triton. There the compiler
decides where tiles lie, when loads begin, and in which order products and
exponentials are issued, and all warps do the same. In Gluon you decide that
yourself. This page writes the same attention in Gluon for Hopper, which is
NVIDIA's GPUs of compute capability 9.0: H100 and H200. There are three steps:
one group of warps, roles for warps, and two products issued together. Read
``gluon_matmul.py`` first: it explains layouts, copies and barriers.

After this page you can

* give the matrix units an operand from registers, and another one in shared
  memory by columns;
* have two groups of warps take turns at the matrix units, and measure it;
* issue two products together, and wait for the first one alone;
* see in compiled code what the compiler moved past a wait.
"""

# sphinx_gallery_tags = ["attention", "compute bound", "TMA", "Gluon"]
import itertools
import math
import os
import re
from functools import partial

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)

# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

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
# ``scaled_dot_product_attention``, SDPA, calls a library. In a cycle, a Hopper
# multiprocessor does 4096 operations of the matrix units, by the data sheets,
# and 16 exponentials, by CUDA's programming guide. For a tile of scores:

rng = torch.Generator(device=DEVICE).manual_seed(0)


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=rng, device=DEVICE).to(dtype)


if __name__ == "__main__":
    for D in (64, 128):
        print(f"a tile of 128 x 128 scores, heads of {D}: cycles for products")
        print(
            f"{4 * 128**2 * D / 4096:5.0f}, for exponentials {128**2 / 16:.0f}"
        )

# %%
# The *floor* is bytes: ``q``, ``k`` and ``v`` are read, ``o`` is written. With
# ``L`` tokens, these are ``L / 2`` operations a byte. In the time of a byte, an
# H200 does about 200, and an H100 about 300, by their data sheets. So for long
# inputs memory is no bound, but two units are. Each needs what the other has
# computed, and one after the other, their cycles add up. We run them together.

# %%
# The first kernel
# ----------------
#
# As in ``flash_attention_forward.py``, a program takes ``M`` queries, and goes
# along all keys with a maximum ``m``, a sum ``total`` of exponentials and a sum
# ``acc`` of values. A step takes ``D`` keys, so all tiles have one layout:
#
# .. code-block:: text
#
#     device memory      shared memory             registers
#
#     q_ptr ------------------------------------>  q (M, D)
#     k_desc [key, 0] ->  k (D, D)  -> wgmma --->  s = q k.T
#                                                  p = 2 ** (s - m)
#     v_desc [key, 0] ->  v (D, D)  -> wgmma --->  acc += p v
#     o_ptr <------------------------------------  acc / total
#
# ``wgmma`` is the instruction for products. The scale has the factor
# :math:`\log_2 e`, as ``exp2`` has base 2. New, beside ``gluon_matmul.py``:
#
# * *An operand in registers.* The first one of ``wgmma`` may lie there, in a
#   ``DotOperandLayout``. With 16-bit numbers, each thread holds the same
#   elements there as of a product's result. So ``p`` stays in its threads.
# * *An operand by columns.* ``k.permute`` exchanges dimensions. No byte moves:
#   ``wgmma`` reads 16-bit numbers by rows or by columns.
# * *A row's maximum* has a ``SliceLayout``: a tile's layout less its columns.


@gluon.jit
def tile_kernel(
    q_ptr,
    k_desc,
    v_desc,
    o_ptr,
    scale,
    L,
    M: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    FIRST: gl.constexpr,
):
    row = gl.program_id(axis=0) * M  # of all heads' rows, one after another
    first = row // L * L  # the first key of this head
    offs_m = gl.arange(0, M, gl.SliceLayout(1, TILE))[:, None]  # (M, 1)
    offs = offs_m * D + gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]
    offs += row.to(gl.int64) * D  # past element 2**31, int32 would overflow
    q = gl.convert_layout(gl.load(q_ptr + offs), FIRST)
    k = gl.allocate_shared_memory(k_desc.dtype, [D, D], k_desc.layout)
    v = gl.allocate_shared_memory(k_desc.dtype, [D, D], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    m = gl.full((M,), -float("inf"), gl.float32, gl.SliceLayout(1, TILE))
    total = gl.zeros((M,), gl.float32, gl.SliceLayout(1, TILE))
    acc = gl.zeros((M, D), gl.float32, TILE)
    for n in range(L // D):
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        load(k_desc, [first + n * D, 0], full, k)  # by the copy engine
        load(v_desc, [first + n * D, 0], full, v)
        mbarrier.wait(full, n & 1)
        s = warpgroup_mma(q, k.permute([1, 0]), acc, use_acc=False)  # (M, D)
        # The old maximum is needed once more, for what was added up with it.
        before, m = m, gl.maximum(m, gl.max(s, axis=1) * scale)
        p = gl.exp2(s * scale - m[:, None])  # (M, D)
        total = total * gl.exp2(before - m) + gl.sum(p, axis=1)
        p = gl.convert_layout(p.to(k_desc.dtype), FIRST)
        acc = warpgroup_mma(p, v, acc * gl.exp2(before - m)[:, None])
    gl.store(o_ptr + offs, (acc / total[:, None]).to(k_desc.dtype))


def describe(x, rows):
    """Return the descriptor of all heads' rows, copied by blocks of rows."""
    x, block = x.flatten(0, -2), [rows, x.shape[-1]]
    kind = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return GluonDescriptor.from_tensor(x, block, layout)


def by_tiles(q, k, v, M=64, num_warps=4):
    """Return the attention of contiguous (..., L, D); 128 divides L."""
    o, (L, D) = torch.empty_like(q), q.shape[-2:]
    tile = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    first = gl.DotOperandLayout(0, tile, 2)  # 2 numbers fill a register
    scale, grid = D**-0.5 * math.log2(math.e), (q.numel() // (M * D),)
    given = q, describe(k, D), describe(v, D), o, scale, L, M, D, tile, first
    tile_kernel[grid](*given, num_warps=num_warps)
    return o


# %%
# Is it right?
# ------------
#
# We compare with float64. Probabilities and result are rounded to float16. Each
# costs at most :math:`2^{-11}` of the largest ``v``; we allow twice their sum.

if __name__ == "__main__":
    for D in (64, 128):
        q, k, v = (random(2, 3, 384, D) for _ in range(3))
        expected = sdpa(q.double(), k.double(), v.double())
        out, atol = by_tiles(q, k, v).double(), 2**-9 * v.abs().max().item()
        error = (out - expected).abs().max()
        print(f"heads of {D}: largest error {error:.1e}, allowed {atol:.1e}")
        torch.testing.assert_close(out, expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# Each step of this page has variants with other tiles, timed in rotation. A
# table has the best of each. ``torch.compile`` has no row: it calls SDPA, too.


def rate_of(steps):
    """Print a table of the best rates of steps, each of several variants."""
    rows = {}
    for D, length in ((64, 1024), (64, 16384), (128, 1024), (128, 16384)):
        x, calls = inputs(length, D), {}
        for name, variants in steps.items():
            for place, variant in enumerate(variants):
                calls[name, place] = partial(variant, *x)
        found = gpu_time(calls, turns=20).items()
        best = pd.Series({key: ms for key, (ms, *_) in found})
        rate = operations(length) / best.groupby(level=0).min()
        rows[f"heads of {D}, {length} tokens"] = rate.reindex([*steps]).round()
    print("TFLOP/s", pd.DataFrame(rows).T.to_string(), sep="\n")


TOKENS = 16384  # in all, at each length


def inputs(length, D):
    heads = 2048 // D
    return [random(TOKENS // length, heads, length, D) for _ in range(3)]


def operations(length):
    return 4e-9 * TOKENS * 2048 * length  # in units of 10**9


def library(backend, *inputs, **options):
    with sdpa_kernel(backend):
        return sdpa(*inputs, **options)


cudnn = partial(library, SDPBackend.CUDNN_ATTENTION)
flash = partial(library, SDPBackend.FLASH_ATTENTION)
LIBRARIES = {"cuDNN": [cudnn], "FlashAttention-2": [flash]}
STEPS = {"one group": [by_tiles, partial(by_tiles, M=128, num_warps=8)]}

if __name__ == "__main__":
    rate_of(STEPS | LIBRARIES)

# %%
# Who loads, who computes?
# ------------------------
#
# The first kernel waits for a load, then for a product, then for exponentials.
# As in ``gluon_matmul.py``, we give the warps roles. One warp, the *producer*,
# only loads. Two groups of four warps, the *consumers*, compute: each has its
# own 64 queries, and both read the same keys and values. So each tile is loaded
# once for 128 queries, and while one consumer computes exponentials, the matrix
# units are free for the other one.
#
# .. code-block:: text
#
#     producer    1 warp     loads q, then keys and values into a ring
#     consumer 0  4 warps    queries  0 to  63 \  wait for a full buffer,
#     consumer 1  4 warps    queries 64 to 127 /  compute, give it back
#
# With tiles of 128 keys, a thread of a consumer holds 64 scores and, with heads
# of 128, 64 sums. It gets 240 registers, and a thread of the producer 24. A
# *warpgroup* is four warps, and the producer takes up one as well. So each
# thread begins with the average of the three groups: ``maxnreg=168``.
#
# So far, both consumers may compute exponentials at once, and the matrix units
# have nothing to do then. With ``TURNS``, also called ping-pong, a consumer
# issues products only in its turn: the values' product of a step, and the
# scores of the next step. Then it passes the turn on:
#
# .. code-block:: text
#
#     matrix units   products of 0 | products of 1 | products of 0 | ...
#     consumer 0     ............. | exponentials  | ............. | ...
#     consumer 1     exponentials  | ............. | exponentials  | ...
#
# A turn is an mbarrier as well. Consumer 0 passes the turn on by arriving at
# ``turn[1]``, and consumer 1 by arriving at ``turn[0]``. Each arrival ends a
# phase. Consumer 0 begins: it waits for the phase before the first one, which
# has ended in any new barrier. Both have the same number of steps, so nobody
# waits for a turn that does not come. The table shows what turns give.


@gluon.jit
def produce(q_desc, k_desc, v_desc, place, tiles, ring):
    row, first, steps = place
    q, k, v = tiles
    q_full, full, empty = ring
    BLOCK_N: gl.constexpr = k_desc.block_shape[0]
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    load(q_desc, [row, 0], q_full, q.index(0))
    load(q_desc, [row + 64, 0], q_full, q.index(1))
    for n in range(steps):
        stage, key = n % k.shape[0], first + n * BLOCK_N
        # Both consumers have given it back; a new barrier's phase 1 has ended.
        mbarrier.wait(empty.index(stage), (n // k.shape[0] & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
        load(k_desc, [key, 0], full.index(stage), k.index(stage))
        load(v_desc, [key, 0], full.index(stage), v.index(stage))


@gluon.jit
def consume(HALF: gl.constexpr, both, TURNS: gl.constexpr):
    o_desc, place, tiles, ring, turn, o, scale = both
    row, _, steps = place
    q, k, v = tiles
    q_full, full, empty = ring
    N: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    dtype: gl.constexpr = o_desc.dtype
    warps: gl.constexpr = [gl.num_warps(), 1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps, [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps, [16, D, 16])
    m = gl.full((64,), -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, SCORES))
    zeros = gl.zeros((64, N), gl.float32, SCORES)
    acc = gl.zeros((64, D), gl.float32, SUMS)
    mbarrier.wait(q_full, 0)
    if TURNS:
        mbarrier.wait(turn.index(HALF), HALF ^ 1)  # consumer 0 begins
    for n in range(steps):
        stage = n % k.shape[0]
        mbarrier.wait(full.index(stage), n // k.shape[0] & 1)
        keys = k.index(stage).permute([1, 0])
        mine = q.index(HALF)
        s = warpgroup_mma(mine, keys, zeros, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(1 - HALF))
        s = warpgroup_mma_wait(0, deps=(s,))  # (64, N)
        before, m = m, gl.maximum(m, gl.max(s, axis=1) * scale)
        p = gl.exp2(s * scale - m[:, None])  # (64, N)
        factor = gl.exp2(before - m)  # (64,)
        total = total * factor + gl.sum(p, axis=1)
        # Scores and sums differ in their columns now; no number is moved.
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
        factor = gl.convert_layout(factor, gl.SliceLayout(1, SUMS))
        if TURNS:
            mbarrier.wait(turn.index(HALF), (n + HALF) & 1)
        acc = warpgroup_mma(p, v.index(stage), acc * factor[:, None])
        mbarrier.arrive(empty.index(stage))
    if TURNS:
        mbarrier.arrive(turn.index(1 - HALF))  # the other one's last product
    total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
    o.index(HALF).store((acc / total[:, None]).to(dtype))
    fence_async_shared()  # else the engine may read what was there before
    store(o_desc, [row + 64 * HALF, 0], o.index(HALF))
    tma.store_wait(0)


@gluon.jit
def roles_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    scale,
    L,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    # In its turn, a consumer waits for keys. With one buffer, those would wait
    # for the other consumer to give it back, and that consumer for its turn.
    gl.static_assert(STAGES >= 2)
    dtype: gl.constexpr = o_desc.dtype
    rows: gl.constexpr = [2] + q_desc.block_shape
    keys: gl.constexpr = [STAGES] + k_desc.block_shape
    q = gl.allocate_shared_memory(dtype, rows, q_desc.layout)
    k = gl.allocate_shared_memory(dtype, keys, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, keys, v_desc.layout)
    o = gl.allocate_shared_memory(dtype, rows, o_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], kind)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], kind)
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # one of each consumer
    for half in gl.static_range(2):
        mbarrier.init(turn.index(half), count=1)
    row = gl.program_id(axis=0) * 128
    place = row, row // L * L, L // k_desc.block_shape[0]
    tiles, ring = (q, k, v), (q_full, full, empty)
    both = (o_desc, place, tiles, ring, turn, o, scale)
    gl.warp_specialize(
        [
            # TURNS is passed here, and not inside ``both``, to stay a constant.
            (consume, (0, both, TURNS)),
            (consume, (1, both, TURNS)),
            (produce, (q_desc, k_desc, v_desc, place, tiles, ring)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and registers of their threads
    )


def with_roles(q, k, v, BLOCK_N=128, turns=False):
    o, (L, D) = torch.empty_like(q), q.shape[-2:]
    sizes = (64, BLOCK_N, BLOCK_N, 64)
    given = [describe(*of) for of in zip((q, k, v, o), sizes, strict=True)]
    scale, grid = D**-0.5 * math.log2(math.e), (q.numel() // (128 * D),)
    roles_kernel[grid](
        *given, scale, L, STAGES=2, TURNS=turns, num_warps=4, maxnreg=168
    )
    return o


for name, turns in {"roles for warps": False, "roles and turns": True}.items():
    STEPS[name] = [
        partial(with_roles, BLOCK_N=BLOCK_N, turns=turns)
        for BLOCK_N in (128, 64)
    ]

if __name__ == "__main__":
    for D in (64, 128):
        q, k, v = (random(2, 3, 384, D) for _ in range(3))
        expected = sdpa(q.double(), k.double(), v.double())
        for variant in itertools.chain(*STEPS.values()):
            error = (variant(q, k, v) - expected).abs().max().item()
            assert error <= 2**-9 * v.abs().max().item()
    rate_of(STEPS | LIBRARIES)

# %%
# What runs during a product?
# ---------------------------
#
# So far, a consumer waits for each product to end, and does nothing meanwhile.
# But the scores of step ``n`` do not need the product with the values of step
# ``n - 1``. So the op issues both products, one right after the other, and
# waits until at most one is in flight: ``wait(1)``. The scores are there then,
# and the second product may go on while the warps work on them. The source has
# this order:
#
# .. code-block:: text
#
#     matrix units   scores n | values n - 1         | ...
#     warps                   | exponentials n       | scale the sums, go on
#                      wait(1)^               wait(0)^
#
# Are the exponentials between the two waits in machine code, too? The compiler
# keeps waits, copies and products in order. But it may move arithmetic past a
# wait for products, because that changes no result. A table after the op counts
# what was left in between. With Triton 3.6.0 these are maxima, and no
# exponentials. An exercise keeps the exponentials there.

# %%
# Masks, lengths and heads
# ------------------------
#
# * *Backwards.* Only the last tile of keys can be ragged, and only the last one
#   is at the diagonal, as tiles have 128 queries and 128 keys. So we go along
#   the keys from the last tile to the first one. The mask belongs to the first
#   step, which comes before the loop, and the loop has none. Tiles past the
#   diagonal are not loaded. Query ``i`` sees the keys up to ``i``, as in SDPA.
# * *Ragged lengths.* The descriptors have four dimensions: batch, head, row and
#   column. Past the end of a head, the engine fills with zeros and stores
#   nothing. With two dimensions, the rows of the next head would lie there.
# * *Strides.* Heads may lie side by side, as a projection leaves them. Where
#   rows do not begin at multiples of 16 bytes, the op copies first.
# * *Shared keys.* Head ``h`` of the queries reads head ``h // group`` of keys.
# * *Order.* Within a head, later queries start first: they see more keys.

# %%
# The op
# ------
#
# Descriptors that the CPU makes are no tensors. So this is a ``custom_op``, and
# ``torch.compile`` does not look into it; ``persistent_matmul.py`` says more.

from triton_gallery_ops.gluon_attention import (
    _gluon_attention_kernel,
    gluon_attention,
)

# %%
# What did each step gain? The op is the last step. It has no turns. That is
# faster with heads of 128; with heads of 64, *roles and turns* is:

STEPS["two products, the op"] = [gluon_attention]

if __name__ == "__main__":
    rate_of(STEPS | LIBRARIES)

# %%
# What did the compiler make of them? ``HGMMA`` is ``wgmma`` in machine code,
# and *groups* counts those that end a group of products: a wait is for groups.
# If code touched sums while they are computed, the compiler would end a group
# with each ``HGMMA``, and wait for it. *Maxima* and *exponentials* are those
# between the wait for scores and the one for values, of both consumers in a
# step; a thread has 64 scores. Only the op has such a place. ``BAR`` counts
# barriers of warps, *spilled* what found no register, *shared* the bytes of
# shared memory. *Registers* are a thread's at the start.


def made(kernel):
    """Return what was compiled last of a kernel."""
    found, *_ = next(iter(kernel.device_caches.values()))
    compiled = [*found.values()][-1]
    code = compiled.asm["sass"]
    # Between a wait that leaves one group in flight and the next wait
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR", code, re.DOTALL)
    return {
        "HGMMA": len(re.findall(r"HGMMA", code)),
        "groups": len(re.findall(r"HGMMA.*gsb0", code)),
        "maxima": "".join(between).count("FMNMX"),
        "exponentials": "".join(between).count("MUFU.EX2"),
        "BAR": len(re.findall(r"BAR\.SYNC", code)),
        "registers": compiled.n_regs,
        "spilled": compiled.n_spills,
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    kernels = tile_kernel, roles_kernel, _gluon_attention_kernel
    table = pd.DataFrame({f.fn.__name__: made(f) for f in kernels}).T
    print(table.to_string())
    assert not table["spilled"].any()
    assert (table["groups"] < table["HGMMA"]).all()

# %%
# Proof
# -----
#
# We compare both dtypes with float64: ragged lengths, more keys than queries
# and fewer, shared heads of keys, no keys at all. For each element we allow two
# roundings of :math:`\sum_j p_j |v_j|` and two of the result. A rounding is
# :math:`2^{-11}` in float16 and :math:`2^{-8}` in bfloat16.

EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = [  # batch, heads, heads of keys, queries, keys
    (1, 2, 2, 128, 128),
    (2, 4, 2, 270, 70),
    (1, 3, 1, 33, 650),
    (1, 8, 8, 1000, 1000),
    (1, 1, 1, 1, 1),
    (1, 1, 1, 5, 0),
    (1, 2, 1, 0, 7),
]


def reference(q, k, v, causal=False, scale=None):
    """Return the attention in float64, and the sum of p |v|."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return [
            sdpa(q, k, t, is_causal=causal, scale=scale) for t in (v, v.abs())
        ]


def worst(out, expected, terms, eps):
    """Return the largest error, as a part of what is allowed."""
    allowed = 2 * eps * (terms + expected.abs()) + 1e-7
    return ((out.double() - expected).abs() / allowed).max().item()


def prove(shape, D, dtype, causal):
    batch, heads, shared, LQ, LK = shape
    q = random(batch, heads, LQ, D, dtype=dtype)
    k, v = (random(batch, shared, LK, D, dtype=dtype) for _ in range(2))
    out = gluon_attention(q, k, v, causal)
    assert out.dtype == dtype
    assert out.shape == q.shape
    if out.numel():
        expected = reference(q, k, v, causal)
        assert worst(out, *expected, EPS[dtype]) <= 1, (shape, D, dtype, causal)


if __name__ == "__main__":
    for dtype in EPS:
        for shape in SHAPES:
            for D in (64, 128):
                for causal in (False, True):
                    prove(shape, D, dtype, causal)

# %%
# Next come heads side by side in memory, rows that are copied first, a given
# scale, and scores in the thousands, whose exponentials would be inf. Then keys
# of ``-inf``, which have no weight: a query that sees only such keys gives 0,
# as in PyTorch.

if __name__ == "__main__":
    q = random(2, 150, 4, 64)[:, :140].transpose(1, 2)
    k = random(2, 400, 2, 64)[:, :100].transpose(1, 2)  # the part of a cache
    v = random(2, 2, 100, 65)[..., 1:]
    for options in ({}, {"causal": True}, {"scale": 0.5}, {"scale": 100.0}):
        out = gluon_attention(q, k, v, **options)
        assert out.is_contiguous()
        assert worst(out, *reference(q, k, v, **options), 2.0**-11) <= 1
    q = random(1, 1, 200, 64).abs()
    k, v = random(1, 1, 300, 64), random(1, 1, 300, 64)
    k[:, :, :150] = -torch.inf
    for causal in (False, True):
        out = gluon_attention(q, k, v, causal)
        assert worst(out, *reference(q, k, v, causal), 2.0**-11) <= 1
        assert (out[:, :, :150] == 0).all() == causal

# %%
# An error names what the op does not take. It has no gradient either, and
# PyTorch says so in the backward:

if __name__ == "__main__":
    q = torch.ones(1, 4, 3, 64, device=DEVICE).half()
    for k in (q.float(), q[:, :3], q[..., :32]):
        try:
            gluon_attention(q, k, k)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    try:
        gluon_attention(q.requires_grad_(), q, q).sum().backward()
    except RuntimeError as error:
        print(f"RuntimeError: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is causal, in float16, with heads of 128 and then of 64. At each
# length there are 16384 tokens in all. A causal mask leaves half of the
# operations. SDPA is told which library to call. ``CPU us`` is what a call
# costs the CPU, which encodes four descriptors. If short calls are made one by
# one, the GPU waits for the CPU; ``cuda_graphs.py`` shows how to avoid that.

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def calls(length, D):
    ops = {
        "Triton": partial(gluon_attention, causal=True),
        "cuDNN": partial(cudnn, is_causal=True),
        "FlashAttention-2": partial(flash, is_causal=True),
    }
    x = inputs(length, D)
    return {name: partial(op, *x) for name, op in ops.items()}


def benchmark(D):
    times = {length: gpu_time(calls(length, D)) for length in LENGTHS}
    table = rate_table(
        times, "tokens", "TFLOP/s", lambda length: operations(length) / 2
    )
    print(f"heads of {D}", table.to_string(), sep="\n")
    wide = table.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title=f"causal, heads of {D}")
    return table


if __name__ == "__main__":
    results = benchmark(D=128)

if __name__ == "__main__":
    results_of_64 = benchmark(D=64)

# %%
# Reading the result
# ------------------
#
# A tile at the diagonal is computed whole, and half of its operations count. At
# 512 tokens, a head has four blocks of queries with 1 to 4 tiles of keys: 10
# tiles, of which 8 count. At 16384 tokens, 128 of 129 count. A program begins
# with empty buffers and ends with a store. No other program fits on its
# multiprocessor meanwhile: 384 threads of 168 registers take nearly all 65536.
# In ``gluon_matmul.py``, a program loads its next tile while it stores.
#
# With heads of 128 and a causal mask, the op is faster than cuDNN from 4096
# tokens on, and as fast at 2048. With heads of 64, cuDNN is faster up to 8192
# tokens, and at 16384 both are about equal. At each of these lengths, the
# record of ``hopper_attention.py`` has a higher rate.
#
# Triton would have chosen layouts, ring, waits and fences. This page chose two
# groups without a barrier in common, and a product that is in flight while its
# group computes maxima. The price: it runs on Hopper alone.

# %%
# Go further
# ----------
#
# 1. A wait for an mbarrier is a loop in machine code. In the op, let each step
#    wait for the values of the next one, right before
#    ``warpgroup_mma_wait(0, ...)``. What does the table count then, and is the
#    op faster?
# 2. A right result does not need the turns. What would they do if one consumer
#    had more steps than the other one?
#
# To read on: `FlashAttention-3 <https://arxiv.org/abs/2407.08608>`_ has turns
# and products in flight, and measures each.

# %%
# Answers
# -------
#
# **1.** Before the loop, a consumer waits for ``v_full.index(0)``, in the loop
# for ``v_full.index(stage)`` in phase ``n // STAGES & 1``, and after the loop
# for nothing. The compiler moves no exponentials past that wait: all of them
# stay, 64 of scores and two of factors in a thread of each consumer. Only a run
# tells whether that pays: time both versions in rotation.
#
# **2.** The consumer with more steps would wait forever, for a turn that nobody
# passes on.
