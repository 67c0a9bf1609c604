# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Turn queries and keys by their positions, round to float8 and write to a
# paged cache, all in one kernel."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = false
# deterministic = true
# longer = "it turns and writes four tensors, each with a layout of its own"
# ///
r"""
Writing to a paged cache
========================

Before a model can attend to a new token, three things happen to its key. Rotary
position embedding (RoPE) turns it by the token's position, it may be rounded to
float8, and it is put into a page of the cache that ``decode_attention.py``
reads. With PyTorch's operators these are many kernels, and each reads and
writes memory. This page does it in one, for queries, keys and values together.

After this page you can

* put rows where a list of slots says, and leave padding out;
* turn queries and keys in registers, on the way to where they go;
* round to float8 with a scale, and clamp what is still too large;
* register an op that changes the cache, and returns turned queries and keys.
"""

# sphinx_gallery_tags = ["attention", "memory bound", "custom op", "inference"]
import os
from functools import partial

import pandas as pd
import torch

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
from triton_gallery.counting import Traffic, statements

# %%
# In PyTorch
# ----------
#
# A cache in pages is a row of *slots*, each for one token. The engine chooses a
# slot for each token: page size times the page's number, plus the place in the
# page. *Padding* keeps batches to a few sizes; its slot is -1. Pages of four:
#
# .. code-block:: text
#
#     tokens  0  1  2  3      page 0     page 1     page 2
#     slots   9  4 -1  5    | - - - - | 1 3 - - | - 0 - - |
#
# ``rope.py`` explains how a position turns a query and a key. The floor is to
# read ``q``, ``k`` and ``v``, to write turned ``q`` and ``k``, and the cache:

generator = torch.Generator(device=DEVICE).manual_seed(0)
HEADS, SHARED, D, PAGE = 32, 8, 128, 16  # heads of queries and of keys


def turned(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def turn_torch(q, k, positions, cos, sin):
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    return turned(q, cos, sin).to(q.dtype), turned(k, cos, sin).to(k.dtype)


def write_torch(q, k, v, k_cache, v_cache, slots, *turn):
    """Return q and k, turned, after a write to the caches; no padding."""
    q, k = turn_torch(q, k, *turn)
    k_cache.view(-1, *k.shape[1:])[slots] = k
    v_cache.view(-1, *v.shape[1:])[slots] = v
    return q, k


def problem(tokens, dtype=torch.float16, heads=HEADS, D=D, R=None):
    """Return inputs: random heads, slots in pages, positions and tables."""
    kind = {"device": DEVICE, "generator": generator}
    q = torch.randn(tokens, heads, D, dtype=dtype, **kind)
    k, v = torch.randn(2, tokens, heads // 4, D, dtype=dtype, **kind)
    pages = triton.cdiv(tokens, PAGE) + 1
    caches = q.new_zeros(2, pages, PAGE, heads // 4, D)
    slots = torch.randperm(pages * PAGE, **kind)[:tokens]
    positions = torch.randint(0, 4096, (tokens,), **kind)
    half = (D if R is None else R) // 2
    places = torch.arange(4096, device=DEVICE)
    angles = places[:, None] * 10_000.0 ** -(places[:half] / half)
    return q, k, v, *caches, slots, positions, angles.cos(), angles.sin()


if __name__ == "__main__":
    q, k, v, *_, positions, cos, sin = problem(64)
    with Traffic() as traffic:  # in the opening of this page
        turn_torch(q, k, positions, cos, sin)
    # It counts whole tables, of which an index reads the rows that it returns.
    unread = cos.nbytes + sin.nbytes - 2 * cos[positions].nbytes
    moved, caches = traffic.moved - unread, 2 * (k.nbytes + v.nbytes)
    print(f"floor {2 * q.nbytes + k.nbytes + caches:,} bytes, ", end="")
    print(f"operator by operator {moved + caches:,}")

# %%
# The first kernel
# ----------------
#
# It only writes. A program takes a token with all its heads, which lie side by
# side both in ``k`` and in a slot of the cache:
#
# .. code-block:: text
#
#     k       | token 0: heads 0, 1, ... | token 1: heads 0, 1, ... | ...
#                   +----------------------------|----------+
#                                 +--------------+          |
#     k_cache | slot 0 | ... |  slot 4  | slot 5 | ... | slot 9 | ...


@triton.jit
def put_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In int32, a slot times SIZE would overflow past element 2**31.
    token = tl.program_id(axis=0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    # Padding has the slot -1: a store there would hit what lies before.
    mask = offs < tl.where(slot >= 0, SIZE, 0)
    k = tl.load(k_ptr + token * SIZE + offs, mask=mask)
    v = tl.load(v_ptr + token * SIZE + offs, mask=mask)
    tl.store(k_cache_ptr + slot * SIZE + offs, k, mask=mask)
    tl.store(v_cache_ptr + slot * SIZE + offs, v, mask=mask)


def put(k, v, k_cache, v_cache, slots):
    """Write k and v to the slots of the caches; all are contiguous."""
    size = k[0].numel()
    sizes = {"SIZE": size, "BLOCK": triton.next_power_of_2(size)}
    put_kernel[(len(k),)](k, v, k_cache, v_cache, slots, **sizes)


def first(q, k, v, k_cache, v_cache, slots, *turn):
    """Turn with PyTorch, and write with the kernel."""
    q, k = turn_torch(q, k, *turn)
    put(k, v, k_cache, v_cache, slots)
    return q, k


# %%
# Is it right?
# ------------
#
# A copy has no error. After it, each slot has its token and the others are 0:

if __name__ == "__main__":
    q, k, v, k_cache, v_cache, slots, *_ = problem(40)
    slots[7] = -1
    put(k, v, k_cache, v_cache, slots)
    right = torch.zeros_like(k_cache)
    right.view(-1, *k.shape[1:])[slots[slots >= 0]] = k[slots >= 0]
    print(f"largest error {(k_cache - right).abs().max():.0e}, allowed 0")
    torch.testing.assert_close(k_cache, right, rtol=0, atol=0)

# %%
# How fast?
# ---------
#
# The rate is the floor's bytes by the time. The roof is a copy of as many
# bytes. 32 tokens are a step of 32 sequences, 8192 a long prompt.


def rates(calls, moved):
    """Return GB/s of each call that moves ``moved`` bytes."""
    found = gpu_time(calls).items()
    return {who: round(1e-6 * moved / times[0]) for who, times in found}


def floor_of(q, k, v, k_cache, *others):
    """Return the bytes to read and to write."""
    return 2 * q.nbytes + 3 * k.nbytes + 2 * k.numel() * k_cache.itemsize


def contestants(op, x):
    torch.compiler.reset()
    fast = torch.compile(write_torch, dynamic=False, fullgraph=True)
    many = torch.empty(floor_of(*x) // 2, dtype=torch.int8, device=DEVICE)
    calls = {"Triton": op, "PyTorch": write_torch, "torch.compile": fast}
    calls = {who: partial(call, *x) for who, call in calls.items()}
    return calls | {"Roof": partial(torch.clone, many)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    for tokens in (32, 1024, 8192):
        x = problem(tokens)
        found = rates(contestants(first, x), floor_of(*x))
        print(f"{tokens} tokens, GB/s: {found}")

# %%
# Turn in the same kernel
# -----------------------
#
# The first kernel leaves the turn to PyTorch, which moves most of the bytes
# there. But RoPE turns number ``i`` of a head with number ``i + R / 2`` alone,
# by the tables' row of its position. So a program loads both halves of all
# heads as two tiles, and turns them in registers. Some models turn only the
# first ``R`` numbers of a head, and the rest stays as it is:
#
# .. code-block:: text
#
#     numbers       R / 2         R / 2       D - R
#               +-------------+-------------+-------+
#     head 0    |             |             |       |
#     head 1    |     x1      |     x2      | rest  |
#     ...       |             |             |       |
#               +-------------+-------------+-------+
#
# The turned keys go to the cache, and are returned too, because the attention
# of a prompt needs them.

# %%
# Round to float8
# ---------------
#
# A cache of ``float8_e4m3fn`` has half the bytes. Its largest number is 448, so
# keys are divided by a *scale*, one for all heads or one for each. Serving
# engines choose scales before they run, from examples. So a number may be
# larger than they expected. The type has no infinity: such a number becomes 448
# or NaN. PyTorch's conversion on the CPU made it NaN `until 2026
# <https://github.com/pytorch/pytorch/pull/178817>`_. The version here gives:

if __name__ == "__main__":
    x = [0.1, 447.0, 480.0, 1e4, float("nan")]
    small = torch.tensor(x).to(torch.float8_e4m3fn).tolist()
    print("PyTorch:", dict(zip(x, small, strict=True)))

# %%
# A NaN in one key makes the attention of all later tokens NaN. So the op clamps
# to 448 first. A NaN that was there before stays NaN. The turned key is rounded
# once, from float32 to float8, not to float16 on the way.

# %%
# The op
# ------
#
# A tile has at most 2048 numbers, so a token of many heads takes several tiles.
# The op declares that it changes both caches, and refuses what requires grad.
# It is a ``custom_op``: compilers do not look into it. (``rope.py`` says what
# they may do to a tensor that a ``triton_op`` changes.)

from triton_gallery_ops.kv_cache_write import (
    KV_CACHE_WRITE_DTYPES,
    _kv_cache_write_kernel,
    _kv_cache_write_put,
    _kv_cache_write_turn,
    _kv_cache_write_turn_pairs,
    kv_cache_write_,
)

# %%
# What did it gain to turn in the kernel? The table has GB/s of the floor, and
# the statements of each kernel.


OP = (
    _kv_cache_write_kernel,
    _kv_cache_write_turn,
    _kv_cache_write_turn_pairs,
    _kv_cache_write_put,
)
STEPS = {"first kernel": (first, put_kernel), "the op": (kv_cache_write_, *OP)}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*of) for _, *of in STEPS.values()]
    for tokens in (32, 1024, 8192):
        x = problem(tokens)
        tried = {who: partial(of[0], *x) for who, of in STEPS.items()}
        found = rates(tried, floor_of(*x))
        ladder[f"{tokens} tokens"] = pd.Series(found)
    print(ladder.to_string())

# %%
# Proof
# -----
#
# The reference turns in float64 and writes with an index. A turn is the sum of
# two products. In float32 each product is rounded, and the sum, by at most
# :math:`2^{-24}` of itself. Then a result is rounded to its dtype; the
# interpreter cuts bfloat16 off. A float8 number has 4 bits, so rounding costs
# :math:`2^{-4}` of it, or half of the smallest one, :math:`2^{-10}`. A slot
# without a new token may not change.


def reference(q, k, v, k_cache, v_cache, slots, positions, cos, sin, *scales):
    """Return, in float64, q and k, and the caches after the write."""
    half = cos.shape[1]
    cos, sin = (t[positions][:, None].double() for t in (cos, sin))
    outs = []
    for x in (q, k):
        front, rest = x.double().split([2 * half, x.shape[2] - 2 * half], 2)
        outs.append(torch.cat([turned(front, cos, sin), rest], 2))
    caches = [k_cache.double(), v_cache.double()]
    some = slots >= 0
    for cache, x, scale in zip(caches, (outs[1], v), scales, strict=True):
        new = x.double() / (1 if scale is None else scale.double()[:, None])
        if k_cache.dtype == torch.float8_e4m3fn:
            new = new.clamp(-448, 448)
        cache.view(-1, *k.shape[1:])[slots[some]] = new[some]
    return *outs, *caches


def prove(x, *scales):
    """Compare a write with the reference."""
    eps = torch.finfo(x[0].dtype).eps
    largest = max(t.abs().max().item() for t in x[:3])
    expected = reference(*x, *(scales or (None, None)))
    got = *kv_cache_write_(*x, *scales), x[3], x[4]
    small = x[3].dtype == torch.float8_e4m3fn
    for i, (one, right) in enumerate(zip(got, expected, strict=True)):
        rough = small and i > 1
        allowed = (2**-4 if rough else eps) * right.abs()
        allowed += 2**-10 if rough else 0
        atol = largest * max(2.0**-50, min(eps, 2.0**-22))
        if scales and i > 1:
            atol = atol / scales[i - 2].min().item()
        assert ((one.double() - right).abs() <= allowed + atol).all(), i


prove(problem(9, heads=8, D=16))
if __name__ == "__main__":
    kind = {"device": DEVICE, "generator": generator}
    for dtype in KV_CACHE_WRITE_DTYPES:
        for heads, D_, R in ((4, 64, 64), (12, 80, 32), (40, 128, 128)):
            x = problem(20, dtype, heads, D_, R)
            x[5][3:5] = -1
            prove(x)
            if dtype.itemsize == 2:
                small = [t.to(torch.float8_e4m3fn) for t in x[3:5]]
                scales = torch.rand(2, heads // 4 + 1, **kind) + 0.01
                prove((*x[:3], *small, *x[5:]), *scales[:, 1:])

# %%
# Numbers that are too large become 448 or -448, and NaN stays. ``q``, ``k`` and
# ``v`` may be parts of one tensor, as a model's projection leaves them:

if __name__ == "__main__":
    q, k, v, *x = problem(3, heads=4, D=16)
    v[0], v[1, 0, 0] = -1e4, torch.nan
    x[:2] = [t.to(torch.float8_e4m3fn) for t in x[:2]]
    kv_cache_write_(q, k, v, *x)
    wrote = x[1].float().view(-1, 16)[x[2]]
    assert (wrote[0] == -448).all()
    assert wrote.isnan().sum() == 1
    joint = torch.cat([q, k, v], 1)
    outs = kv_cache_write_(*joint.split([4, 1, 1], 1), *x)
    assert torch.equal(outs[0], kv_cache_write_(q, k, v, *x)[0])

# %%
# An error names what the op does not take; these are its first words. The last
# line is the op's schema: ``!`` marks the arguments that it changes.

if __name__ == "__main__":
    q, k, v, *x = problem(3, heads=4, D=16)
    for wrong in ((q, k.float(), v), (q, k[:2], v), (q, k, v.requires_grad_())):
        try:
            kv_cache_write_(*wrong, *x)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {str(error)[:76]}")
    print(kv_cache_write_._opoverload._schema)

# %%
# The benchmark
# -------------
#
# The first table goes from one token, a step of one sequence, to a long prompt.
# The second has two types of the cache, for 8192 tokens.

TOKENS = [1, 32, 128, 512, 2048, 8192, 32768]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times, moved = {}, {}
    for tokens in TOKENS:
        x = problem(tokens)
        moved[tokens] = 1e-6 * floor_of(*x)
        times[tokens] = gpu_time(contestants(kv_cache_write_, x), turns=30)
    results = rate_table(times, "tokens", "GB/s", moved.get)
    print(results.to_string())
    wide = results.pivot(index="tokens", columns="series", values="GB/s")
    wide.plot(logx=True, title="turn and write")

if __name__ == "__main__" and DEVICE.type == "cuda":
    calls, moved = {}, {}
    for cache in (torch.float16, torch.float8_e4m3fn):
        q, k, v, k_cache, v_cache, *others = problem(8192)
        caches = k_cache.to(cache), v_cache.to(cache)
        calls[str(cache)] = partial(kv_cache_write_, q, k, v, *caches, *others)
        moved[str(cache)] = floor_of(q, k, v, *caches)
    for name, times in gpu_time(calls).items():
        rate = 1e-6 * moved[name] / times[0]
        print(f"{name}: {times[0] * 1e3:.1f} us, {rate:.0f} GB/s")

# %%
# This is what a call costs the CPU, in microseconds. In a step of few tokens
# the GPU may wait for the CPU; ``cuda_graphs.py`` shows how to avoid that.

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["tokens"] == 32].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# With few tokens there are few bytes. But a program still takes three steps,
# one after the other: it loads a position, loads a row of the tables, and
# stores. With many tokens the bytes decide, so compare with the roof. The roof
# is one kernel that copies, not a bound: at some sizes the op is faster. A
# float8 cache makes the write only a little faster, because the queries and the
# returned keys keep 16 bits.

# %%
# Go further
# ----------
#
# 1. Two tokens of one launch have the same slot. What does the cache hold then?
# 2. Why does the op return the turned queries, and not turn them in place?
#
# To read on:
#
# * ``decode_attention.py`` reads what this op wrote.
# * ``rope.py`` has the turn with a backward, and in place.

# %%
# Answers
# -------
#
# **1.** Either token, or a part of each: two programs store to the same
# addresses, and nothing orders them. A test would mostly pass.
#
# **2.** A caller may still need the queries, and a second call with the same
# tensors would turn them twice. To turn in place would save little memory, for
# the result is needed no longer than the attention of one layer.
