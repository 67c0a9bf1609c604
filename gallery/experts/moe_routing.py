# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Route tokens to experts: choose the k best for each token in one kernel, and
# sort the tokens by expert with a counting sort that needs no atomics."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "it chooses by groups and bias, sorts few and many, has a backward"
#
# [[tool.triton-gallery.step_through]]
# kernel = "route_kernel"
# caption = """
# A token per program: it takes the largest of 6 logits, removes it, and takes
# the largest again. A block has 8 elements, of which two are masked off."""
# registers = ["left", "largest", "expert", "best"]
# inputs = { logits = "integers(1, 9, 3, 6)" }
# call = "route(logits, 2)"
# start = [1, 0]
#
# [tool.triton-gallery.step_through.expected]
# weights = "logits.topk(2).values.softmax(-1)"
# experts = "logits.sort(descending=True, stable=True).indices[:, :2].int()"
# ///
r"""
Route tokens to experts (MoE router)
====================================

A mixture of experts has many feed-forward layers, the *experts*, and sends each
token through a few of them. A *router* chooses: it gives each expert a score,
keeps the best, and weights what they return. Then each expert needs the rows of
its own tokens side by side. Both steps are small and take many operators in
PyTorch. In a dense model, there is nothing to route.

After this page you can

* choose experts and compute their weights in one kernel;
* say what a grouped matrix product needs of a router;
* sort by a small key: count, add up, rank, and always in the same order.
"""

# sphinx_gallery_tags = ["experts", "selection", "sorting", "autograd"]
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
from triton_gallery.counting import Traffic

# %%
# In PyTorch
# ----------
#
# A linear layer makes *logits*: for each token a number for each expert. The
# router takes their softmax, keeps the ``k`` largest, and divides these by
# their sum, so that a token's weights add up to 1. The *floor* is what any
# kernel has to move: logits in, weights and experts out.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def draw(T, E, dtype=torch.bfloat16):
    """Return random logits of T tokens for E experts."""
    kind = {"device": DEVICE, "dtype": torch.float32}
    return torch.randn(T, E, generator=generator, **kind).to(dtype)


def route_torch(logits, k):
    """Return weights and experts, (T, k) of each."""
    scores = logits.float().softmax(-1)
    weights, experts = scores.topk(k)
    return weights / weights.sum(-1, keepdim=True), experts.int()


if __name__ == "__main__":
    logits = draw(4096, 64)
    with Traffic() as traffic:
        weights, experts = route_torch(logits, 6)
    floor = logits.nbytes + weights.nbytes + experts.nbytes
    count, times = len(traffic.operators), traffic.moved / floor
    print(f"{count} operators, {times:.1f} times the floor of {floor:,} bytes")

# %%
# The first kernel
# ----------------
#
# A program has the logits of one token in registers. It takes the largest,
# removes it by writing -inf in its place, and starts again, ``k`` times. Of
# equal logits ``tl.argmax`` returns the first.
#
# The softmax needs no pass of its own. It rises with the logits, so the largest
# logits have the largest scores. And the division by the sum of the chosen
# cancels the sum of all: what is left is the softmax of the chosen logits,
#
# .. math:: w_j = \frac{e^{x_j} / \sum_i e^{x_i}}
#    {\sum_c e^{x_c} / \sum_i e^{x_i}} = \frac{e^{x_j}}{\sum_c e^{x_c}},
#
# where :math:`i` is any expert and :math:`c` a chosen one.


@triton.jit
def route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    E,
    k,
    BLOCK_E: tl.constexpr,
    K: tl.constexpr,
):
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    ptrs = logits_ptr + token * E + offs
    left = tl.load(ptrs, mask=offs < E, other=-float("inf")).to(tl.float32)
    offs_k = tl.arange(0, K)  # (K,)
    best = tl.full((K,), -float("inf"), tl.float32)
    for j in range(k):
        largest = tl.max(left, axis=0)
        expert = tl.argmax(left, axis=0)
        tl.store(experts_ptr + token * k + j, expert)
        best = tl.where(offs_k == j, largest, best)
        left = tl.where(offs == expert, -float("inf"), left)
    # K is a power of two. Past k, -inf becomes a weight of 0.
    e = tl.exp(best - tl.max(best, axis=0))
    weights = e / tl.sum(e, axis=0)
    tl.store(weights_ptr + token * k + offs_k, weights, mask=offs_k < k)


def route(logits, k):
    """Return weights and experts of contiguous logits."""
    T, E = logits.shape
    assert 0 < k <= E <= 1024
    weights = logits.new_empty(T, k, dtype=torch.float32)
    experts = logits.new_empty(T, k, dtype=torch.int32)
    blocks = triton.next_power_of_2(E), triton.next_power_of_2(k)
    route_kernel[(T,)](logits, weights, experts, E, k, *blocks, num_warps=1)
    return weights, experts


# %%
# One warp, ``num_warps=1``, has a few logits in each thread, and finds a
# maximum without a barrier.
#
# Is it right?
# ------------
#
# The chosen experts have to be those of a stable sort, which has the first of
# equals first. Half of these logits are rounded, so that many are equal. The
# weights may be off by the few roundings of float32 that a softmax takes.

if __name__ == "__main__":
    logits = draw(20, 60, torch.float32)
    logits[::2] = logits[::2].round()
    weights, experts = route(logits, 6)
    order = logits.double().sort(descending=True, stable=True)
    expected = order.values[:, :6].softmax(-1)
    error = (weights - expected).abs().max().item()
    print(f"largest error {error:.1e}, allowed 1.0e-06")
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(experts.long(), order.indices[:, :6])

# %%
# How fast?
# ---------
#
# 256 experts and 8 choices, as in DeepSeek-V3, in bfloat16. The rate counts the
# bytes of the floor, and the *roof* copies as many.

E, CHOICES = 256, 8


def moved(T):
    """Return the bytes of the floor for T tokens, in millions."""
    return T * (2 * E + 8 * CHOICES) * 1e-6


def copy_of(T):
    """Return a call that copies as many bytes."""
    size = round(moved(T) * 5e5)
    x = torch.empty(size, dtype=torch.int8, device=DEVICE)
    return partial(torch.empty_like(x).copy_, x)


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for T in (64, 1024, 16384):
        torch.compiler.reset()
        fast = torch.compile(route_torch, dynamic=False, fullgraph=True)
        ops = {"route": route, "PyTorch": route_torch, "torch.compile": fast}
        logits = draw(T, E)
        calls = {name: partial(op, logits, CHOICES) for name, op in ops.items()}
        times = gpu_time(calls | {"Roof": copy_of(T)})
        rows[T] = {name: round(moved(T) / t[0], 1) for name, t in times.items()}
    print("GB/s", pd.DataFrame(rows).T.to_string(), sep="\n")

# %%
# Why sort?
# ---------
#
# An expert is two or three matrix products with weights of its own. To read
# these weights once, it has to take all of its tokens in one product. So we put
# the rows of ``x`` in the order of their experts. A *choice* is a pair of a
# token and one of its experts. Choice j of token t has the number
# ``t * k + j``. A grouped matrix product, such as
# ``torch.nn.functional.grouped_mm``, needs
#
# * ``order``: the numbers of the choices, sorted by expert. The row for a
#   choice is that of token ``order // k``;
# * ``offsets``: for each expert, where its rows end.
#
# Three tokens, two choices each, of four experts:

experts = torch.tensor([[2, 0], [0, 3], [2, 3]], device=DEVICE).int()


def sort_torch(experts, E):
    """Return order and offsets."""
    flat = experts.flatten()
    order = flat.sort(stable=True).indices
    counts = torch.bincount(flat, minlength=E)
    return order.int(), counts.cumsum(0).int()


if __name__ == "__main__":
    order, offsets = sort_torch(experts, 4)
    print(f"order   {order.tolist()}")
    print(f"tokens  {(order // 2).tolist()}")
    print(f"offsets {offsets.tolist()}")

# %%
# Expert 0 has the rows up to 2: those of tokens 0 and 1. Expert 1 has none.
#
# A counting sort
# ---------------
#
# A sort of any numbers compares them again and again. Here the keys are a few
# hundred experts. The place of a choice in the order is the sum of three
# counts:
#
# * choices of experts before its own;
# * choices of its own expert in blocks of choices before its own;
# * choices of its own expert before it in its own block: its *rank*.
#
# One kernel counts the choices of each expert in each block, a *histogram*. In
# the table of these counts, with a row for an expert and a column for a block,
# the first two numbers together are the sum of everything before: the rows
# above, and the columns to the left. That is a cumulative sum over the table.


@triton.jit
def count_kernel(
    experts_ptr, counts_ptr, R, E, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr
):
    pid, blocks = tl.program_id(axis=0), tl.num_programs(axis=0)
    offs = pid * BLOCK_R + tl.arange(0, BLOCK_R)  # (BLOCK_R,)
    mask = offs < R
    expert = tl.load(experts_ptr + offs, mask=mask, other=0)
    counts = tl.histogram(expert, BLOCK_E, mask=mask)  # (BLOCK_E,)
    offs_e = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + offs_e * blocks + pid, counts, mask=offs_e < E)


# %%
# The second kernel adds the rank. It compares all choices of a block with each
# other, and counts those that are earlier and have the same expert. A common
# alternative is an atomic counter for each expert, from which each choice takes
# the next number. But the order in which programs come to it differs from run
# to run, and then so do the order of the rows, and the rounding of what is
# added up in that order. A rank by comparison is deterministic.


@triton.jit
def place_kernel(experts_ptr, starts_ptr, order_ptr, R, BLOCK_R: tl.constexpr):
    pid, blocks = tl.program_id(axis=0), tl.num_programs(axis=0)
    offs = pid * BLOCK_R + tl.arange(0, BLOCK_R)  # (BLOCK_R,)
    mask = offs < R
    expert = tl.load(experts_ptr + offs, mask=mask, other=-1)
    same = expert[:, None] == expert[None, :]  # (BLOCK_R, BLOCK_R)
    earlier = offs[:, None] < offs[None, :]
    rank = tl.sum((same & earlier).to(tl.int32), axis=0)  # (BLOCK_R,)
    start = tl.load(starts_ptr + expert * blocks + pid, mask=mask, other=0)
    tl.store(order_ptr + start + rank, offs, mask=mask)


def sort_by_counting(experts, E, BLOCK_R=128):
    """Return order and offsets."""
    R = experts.numel()
    blocks = triton.cdiv(R, BLOCK_R)
    counts = experts.new_empty(E, blocks)
    order = experts.new_empty(R)
    BLOCK_E = triton.next_power_of_2(E)
    count_kernel[(blocks,)](experts, counts, R, E, BLOCK_R, BLOCK_E)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(E, blocks)
    starts = ends - counts
    place_kernel[(blocks,)](experts, starts, order, R, BLOCK_R)
    return order, ends[:, -1]


def check_sort(sort, experts, E):
    """Assert that order and offsets are those of PyTorch's stable sort."""
    assert all(map(torch.equal, sort(experts, E), sort_torch(experts, E)))


if __name__ == "__main__":
    check_sort(sort_by_counting, experts, 4)
    _, many = route(draw(300, 60), 6)
    check_sort(sort_by_counting, many, 60)
    check_sort(sort_by_counting, torch.full_like(many, 7), 60)
    print("sorted as PyTorch does, all choices of one expert too")

# %%
# How many comparisons? A block of 128 choices compares each of them with 128
# others, whatever the number of experts. A larger block compares more, and a
# smaller one has more counts to add up.
#
# Few tokens
# ----------
#
# A model that writes text routes a few tokens at a time. Then no launch has
# much to do, and their number counts. The sort above has four. With so few
# choices we can compare each with all others, in one launch. The number
# ``expert * R + r`` of choice r, its *word*, is in the order that we want. The
# place of a choice is the number of words that are smaller. And an expert ends
# where the words of the next one would begin.


@triton.jit
def compare_kernel(
    experts_ptr,
    order_ptr,
    offsets_ptr,
    R,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs = tl.arange(0, BLOCK_R)  # (BLOCK_R,)
    # Past R: larger than all words
    expert = tl.load(experts_ptr + offs, mask=offs < R, other=E)
    word = expert * R + offs
    smaller = word[:, None] < word[None, :]  # (BLOCK_R, BLOCK_R)
    place = tl.sum(smaller.to(tl.int32), axis=0)
    tl.store(order_ptr + place, offs, mask=offs < R)
    offs_e = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    smaller = word[:, None] < ((offs_e + 1) * R)[None, :]
    ends = tl.sum(smaller.to(tl.int32), axis=0)
    tl.store(offsets_ptr + offs_e, ends, mask=offs_e < E)


def sort_by_comparing(experts, E):
    """Return order and offsets, for a few choices."""
    R = experts.numel()
    assert R <= 128  # comparisons grow with the square
    order, offsets = experts.new_empty(R), experts.new_empty(E)
    blocks = triton.next_power_of_2(R), triton.next_power_of_2(E)
    compare_kernel[(1,)](experts, order, offsets, R, E, *blocks)
    return order, offsets


if __name__ == "__main__":
    check_sort(sort_by_comparing, experts, 4)
    check_sort(sort_by_comparing, many[:21].contiguous(), 60)
    print("sorted as PyTorch does")

# %%
# What does each way take, in microseconds of GPU time?

SORTS = {
    "PyTorch": sort_torch,
    "counting": sort_by_counting,
    "comparing": sort_by_comparing,
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for T in (1, 16, 1024, 16384):
        _, many = route(draw(T, E), CHOICES)
        calls = {name: partial(sort, many, E) for name, sort in SORTS.items()}
        if many.numel() > 128:
            calls.pop("comparing")
        times = gpu_time(calls)
        rows[T] = {name: f"{t[0] * 1e3:.1f}" for name, t in times.items()}
    print("us", pd.DataFrame(rows).T.to_string(na_rep=""), sep="\n")

# %%
# The op
# ------
#
# ``moe_routing(logits, k)`` is this gallery's op, and
# ``moe_routing_permutation(experts, num_experts)`` sorts.
# ``moe_routing_with_permutation`` does both, in one launch for a few tokens and
# in three for many: its second kernel adds up the counts by itself. It also
# returns the inverse of the order, which brings the experts' results back. In
# place of floats, the op compares integers of the same order, so that NaN and
# -inf are handled too. The weights have a gradient.
#
# DeepSeek-V3 chooses in another way, by options of the op. Its score is a
# sigmoid, and a *bias* that balances the experts' load is added for the choice
# alone. Experts are in groups: only those of the ``top_groups`` groups with the
# largest sums of their best two can be chosen. A ``scale`` multiplies weights.

from triton_gallery_ops.moe_routing import (
    moe_routing,
    moe_routing_with_permutation,
)

# %%
# A few tokens, more, and many are sorted in three ways. Then DeepSeek-V3's
# options, with eight groups of 32 experts, of which a token keeps four:

if __name__ == "__main__":
    for T in (5, 100, 1100):
        logits = draw(T, 60).requires_grad_()
        weights, *rest = moe_routing_with_permutation(logits, 4)
        by_route, experts = route(logits.detach(), 4)
        torch.testing.assert_close(weights, by_route)
        order, offsets = sort_torch(experts, 60)
        expected = experts, order, order.argsort().int(), offsets
        assert all(map(torch.equal, rest, expected))
        weights.square().sum().backward()
    bias = torch.zeros(E, device=DEVICE)
    options = {"score": "sigmoid", "bias": bias, "groups": 8, "top_groups": 4}
    weights, experts = moe_routing(draw(2, E), 8, **options, scale=2.5)
    for token in range(2):
        groups = sorted({e // 32 for e in experts[token].tolist()})
        total = weights[token].sum().item()
        print(f"experts of groups {groups}, weights of {total:.2f} in all")

# %%
# The result
# ----------
#
# From logits to order and offsets: the op, the kernels of this page, and
# PyTorch. *PyTorch's best* is the faster of its two at each size.


def on_this_page(logits):
    weights, experts = route(logits, CHOICES)
    few = experts.numel() <= 128
    sort = sort_by_comparing if few else sort_by_counting
    return weights, experts, *sort(experts, E)


def in_torch(logits):
    weights, experts = route_torch(logits, CHOICES)
    return weights, experts, *sort_torch(experts, E)


def calls_for(T):
    """Return what is timed for T tokens, by name."""
    torch.compiler.reset()  # past eight sizes it would raise
    logits = draw(T, E)
    # Of a histogram torch.compile makes a second graph.
    fast = torch.compile(in_torch, dynamic=False)
    ops = {
        "Triton": partial(moe_routing_with_permutation, k=CHOICES),
        "Triton, this page": on_this_page,
        "PyTorch": in_torch,
        "torch.compile": fast,
    }
    calls = {name: partial(op, logits) for name, op in ops.items()}
    return calls | {"Roof": copy_of(T)}


TOKENS = [1, 16, 64, 256, 1024, 4096, 16384, 65536]

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {T: gpu_time(calls_for(T)) for T in TOKENS}
    results = rate_table(times, "T", "GB/s", moved)
    print(results.to_string())
    wide = results.pivot(index="T", columns="series", values="GB/s")
    wide.plot(loglog=True, title="from logits to sorted choices, bfloat16")
    best = wide[["PyTorch", "torch.compile"]].max(axis=1)
    for who in ("Triton", "Triton, this page"):
        ratio = wide[who] / best
        print(f"{who}: {ratio.min():.1f} to", end=" ")
        print(f"{ratio.max():.1f} times PyTorch's best")
    for T in (1, 16384):
        print(f"{T} tokens: {times[T]['Triton'][0] * 1e3:.1f} us")

# %%
# Exercises
# ---------
#
# Write a kernel and run its cell: it says whether the kernel is right. No GPU
# is needed.
#
# **1.** Experts return rows in the order of ``order``. To bring them back, a
# token has to know where the row of each of its choices is: choice ``order[p]``
# is at place p. Write a kernel that stores this inverse of ``order``.

inverse_kernel = None  # your kernel


def check_inverse(kernel):
    """Print whether a kernel stores the place of each of 120 choices."""
    if kernel is None:
        print("not solved yet")
        return False
    _, experts = route(draw(20, 60), 6)
    order, _ = sort_torch(experts, 60)
    made = torch.full_like(order, -1)
    kernel[(4,)](order, made, 120, BLOCK_R=32)
    right = torch.equal(made.long(), order.argsort())
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    check_inverse(inverse_kernel)

# %%
# **2.** Some models give each expert room for a fixed number of tokens, its
# *capacity*, and drop the rest. The choice at place p of the order has the
# number p less the place where its expert begins. Store its slot,
# ``expert * CAPACITY`` plus that number; or -1, where the number is CAPACITY or
# more.

capacity_kernel = None  # your kernel


def check_capacity(kernel):
    """Print whether a kernel gives slots, of 5 for each of 8 experts."""
    if kernel is None:
        print("not solved yet")
        return False
    _, experts = route(draw(50, 8), 2)
    hot = torch.nn.functional.one_hot(experts.flatten().long(), 8)
    number = (hot.cumsum(0) * hot).sum(1) - 1
    slots = torch.where(number < 5, experts.flatten() * 5 + number, -1)
    made = torch.full_like(experts.flatten(), -7)
    sizes = 100, 5, 32  # choices, the capacity, choices of a program
    kernel[(4,)](experts, *sort_torch(experts, 8), made, *sizes)
    right = torch.equal(made.long(), slots.long())
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    check_capacity(capacity_kernel)

# %%
# Answers
# -------
#
# **1.** Two programs never store to one place, as no choice is in ``order``
# twice.


@triton.jit
def inverse_answer_kernel(order_ptr, inverse_ptr, R, BLOCK_R: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK_R + tl.arange(0, BLOCK_R)
    choice = tl.load(order_ptr + offs, mask=offs < R, other=0)
    tl.store(inverse_ptr + choice, offs, mask=offs < R)


if __name__ == "__main__":
    assert check_inverse(inverse_answer_kernel)

# %%
# **2.** An expert begins where the one before it ends, and the first at 0.


@triton.jit
def capacity_answer_kernel(
    experts_ptr,
    order_ptr,
    offsets_ptr,
    slots_ptr,
    R,
    CAPACITY,
    BLOCK_R: tl.constexpr,
):
    place = tl.program_id(axis=0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = place < R
    choice = tl.load(order_ptr + place, mask=mask, other=0)
    expert = tl.load(experts_ptr + choice)
    ends_ptrs = offsets_ptr + expert - 1
    number = place - tl.load(ends_ptrs, mask=expert > 0, other=0)
    slot = tl.where(number < CAPACITY, expert * CAPACITY + number, -1)
    tl.store(slots_ptr + choice, slot, mask=mask)


if __name__ == "__main__":
    assert check_capacity(capacity_answer_kernel)
