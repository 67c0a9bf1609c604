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
# the largest again. Look at the tie in row 1: the first of two equals is taken
# first. A block has 8 elements, of which two are masked off. Experts are stored
# one in each round, weights all at the end."""
# registers = ["remaining", "largest", "expert", "best"]
# inputs = { logits = "integers(1, 9, 3, 6)" }
# call = "route(logits, 2)"
# start = [1, 1]
#
# [tool.triton-gallery.step_through.expected]
# weights = "logits.topk(2).values.softmax(-1)"
# experts = "logits.sort(descending=True, stable=True).indices[:, :2].int()"
#
# [[tool.triton-gallery.step_through]]
# kernel = "place_kernel"
# caption = """
# Three tokens with two choices each, in blocks of four choices. In program 0,
# choice 2 has expert 0, as choice 1 has, which is earlier: its rank is 1."""
# registers = ["expert", "same", "earlier", "rank", "start"]
# call = "sort_by_counting(experts, 4, BLOCK_R=4)"
# inputs = { experts = "torch.tensor([[2, 0], [0, 3], [2, 3]]).int()" }
# expected = { order = "sort_torch(experts, 4)[0]" }
# start = [0, 2]
# ///
r"""
Route tokens to experts (MoE router)
====================================

A mixture of experts has many feed-forward layers, the *experts*, and sends each
token through a few of them. A *router* chooses: it gives each expert a score,
keeps the best, and weights what they return. Then each expert needs the rows of
its own tokens side by side. Both steps are small and take many operators in
PyTorch. A model without experts needs neither.

After this page you can

* choose experts and compute their weights in one kernel;
* say what a grouped matrix product needs of a router;
* sort by a small key (count, add up, rank) with the same result in every run.
"""

# sphinx_gallery_tags = ["experts", "selection", "sorting", "autograd"]
import os
from functools import partial
from operator import truediv

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
from triton_gallery.ranks import replays

# %%
# In PyTorch
# ----------
#
# A linear layer makes *logits*: for each token, one for each expert. The router
# takes their softmax, keeps the ``k`` largest, and divides these by their sum,
# so that a token's weights add up to 1. ``Traffic``, from the folded cell
# above, counts the bytes that PyTorch's operators read and write. The *floor*
# is what any kernel has to move: logits in, weights and experts out.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def draw(T, E, dtype=torch.bfloat16):
    """Return random logits of T tokens for E experts."""
    return torch.randn(T, E, generator=generator, device=DEVICE).to(dtype)


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
# equal logits ``tl.max`` takes the first. At least k logits must be finite,
# none NaN or +inf: once only -inf is left, an expert is chosen twice. A program
# is one warp of 32 threads (``num_warps=1``); of 256 logits, each thread has 8.
# So it needs no *barrier*, a point where warps wait for each other.
#
# The softmax needs no pass of its own. The largest logits have the largest
# scores, and dividing by the sum of the chosen scores cancels the sum over all
# experts. With :math:`x` the logits, :math:`i` any expert, :math:`c` any chosen
# one, and :math:`m` the chosen one whose weight we want, the softmax of the
# chosen logits is left:
#
# .. math:: w_m = \frac{e^{x_m} / \sum_i e^{x_i}}
#    {\sum_c e^{x_c} / \sum_i e^{x_i}} = \frac{e^{x_m}}{\sum_c e^{x_c}}.
#
# With k = 1 this weight is always 1. A score that rises with the logit chooses
# the same experts: for a sigmoid, only ``e`` changes, to ``tl.sigmoid(best)``.


@triton.jit
def route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    E,
    k,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(axis=0).to(tl.int64)  # token * E may pass 2**31
    offs = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    ptrs = logits_ptr + token * E + offs
    remaining = tl.load(ptrs, mask=offs < E, other=-float("inf"))
    remaining = remaining.to(tl.float32)  # (BLOCK_E,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    best = tl.full((BLOCK_K,), -float("inf"), tl.float32)
    for j in range(k):
        largest, expert = tl.max(remaining, axis=0, return_indices=True)
        tl.store(experts_ptr + token * k + j, expert)  # one number
        best = tl.where(offs_k == j, largest, best)  # best[j] = largest
        remaining = tl.where(offs == expert, -float("inf"), remaining)
    # BLOCK_K is a power of two. Past k, -inf becomes a weight of 0.
    e = tl.exp(best - tl.max(best, axis=0))
    weights = e / tl.sum(e, axis=0)
    tl.store(weights_ptr + token * k + offs_k, weights, mask=offs_k < k)


def route(logits, k):
    """Return weights and experts of contiguous logits."""
    T, E = logits.shape
    assert logits.is_contiguous()
    assert 0 < k <= E <= 1024  # at most 32 logits in each thread of a warp
    weights = logits.new_empty(T, k, dtype=torch.float32)
    experts = logits.new_empty(T, k, dtype=torch.int32)
    sizes = triton.next_power_of_2(E), triton.next_power_of_2(k)
    route_kernel[(T,)](logits, weights, experts, E, k, *sizes, num_warps=1)
    return weights, experts


# %%
# Is it right?
# ------------
#
# ``topk`` promises no order of equals, and float32 scores may be equal where
# logits are not, so we compare with a stable sort of the logits. We round the
# logits of every second token: many are equal. A weight is at most 1, and each
# of a softmax's few roundings changes it by less than 1e-7: we allow 1e-6.

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
# bytes of the floor. The *roof* is the rate of a plain copy of as many bytes.
# The last line has times of ``route`` for several k: the bytes hardly change.

E, CHOICES = 256, 8


def moved(T):
    """Return the bytes of the floor for T tokens, in millions."""
    return T * (2 * E + 8 * CHOICES) * 1e-6


def copy_of(T):
    """Return a call that copies as many bytes."""
    size = round(moved(T) * 5e5)  # half is read, half written
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
    print("GB/s", pd.DataFrame(rows).T.rename_axis("T").to_string(), sep="\n")
    times = gpu_time({k: partial(route, logits, k) for k in (1, 2, 4, 8)})
    took = ", ".join(f"k = {k}: {t[0] * 1e3:.1f}" for k, t in times.items())
    print(f"us of route, T = {T}, {took}")

# %%
# With many tokens, ``route`` reaches a smaller part of the roof than with few.
# A part of its time goes to the k rounds, each of which needs the result of the
# one before: in the last line, the time grows with k.
#
# Why sort?
# ---------
#
# An expert multiplies a token's vector by two or three matrices of its own. To
# read these matrices once, it has to take all of its tokens in one product. So
# we put the vectors, the rows of a matrix ``x``, in the order of their experts.
# A *choice* is a pair of a token and one of its experts. Choice j of token t
# has the index ``t * k + j``. For a grouped matrix product, such as
# ``torch.nn.functional.grouped_mm``, we need
#
# * ``order``: the indices of the choices, sorted by expert. The sorted rows are
#   ``x[order // k]``;
# * ``offsets``: for each expert, where its rows end.
#
# Three tokens, two choices each, of four experts:

experts = torch.tensor([[2, 0], [0, 3], [2, 3]], device=DEVICE).int()


def sort_torch(experts, E):
    """Return order and offsets."""
    ordered, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(E, device=experts.device, dtype=torch.int32)
    # How many choices are of each expert or one before; bincount would wait
    # for the GPU.
    offsets = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return order.int(), offsets


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
# A general sort takes any keys. Ours are whole numbers up to a few hundred: we
# count them, in blocks of choices. The place of a choice, its index in the
# sorted order, is the sum of three counts:
#
# * choices of experts before its own;
# * choices of its own expert in blocks before its own;
# * choices of its own expert before it in its own block: its *rank*.
#
# Count the choices in a table, with a row for each expert and a column for each
# block. Take the running sum along row 0, then row 1, and so on. The sum of all
# cells before a cell, the first two counts together, is where that expert's
# choices of that block *start*. Our six choices make blocks of four and two.
# Each line below is an expert, each list ``[block 0, block 1]``:

if __name__ == "__main__":
    blocks = experts.flatten().split(4)
    counts = torch.stack([block.bincount(minlength=4) for block in blocks], 1)
    starts = counts.flatten().cumsum(0).view(4, 2) - counts
    table = pd.DataFrame({"counts": counts.tolist(), "starts": starts.tolist()})
    print(table.rename_axis("expert"))

# %%
# Expert 2 has one choice in each block: their places are 2 and 3.
#
# A program of ``count_kernel`` makes one column of the table, a *histogram* of
# its block. ``cumsum`` makes the starts.


@triton.jit
def count_kernel(
    experts_ptr, counts_ptr, R, E, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr
):
    pid, blocks = tl.program_id(axis=0), tl.num_programs(axis=0)
    offs = pid * BLOCK_R + tl.arange(0, BLOCK_R)  # (BLOCK_R,)
    mask = offs < R
    expert = tl.load(experts_ptr + offs, mask=mask, other=0)  # not counted
    counts = tl.histogram(expert, BLOCK_E, mask=mask)  # (BLOCK_E,)
    offs_e = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + offs_e * blocks + pid, counts, mask=offs_e < E)


# %%
# ``place_kernel`` adds start and rank. For the rank it compares the choices of
# a block with each other: column c of ``same & earlier`` marks the choices
# before c with c's expert, and its sum is c's rank. So the rank is
# deterministic. With atomic counters, which are common, the order of the rows
# may differ from run to run, and with it the rounding of sums over them.


@triton.jit
def place_kernel(experts_ptr, starts_ptr, order_ptr, R, BLOCK_R: tl.constexpr):
    pid, blocks = tl.program_id(axis=0), tl.num_programs(axis=0)
    offs = pid * BLOCK_R + tl.arange(0, BLOCK_R)  # (BLOCK_R,)
    mask = offs < R
    # Choices past R are later than all others, so 0 there raises no rank.
    expert = tl.load(experts_ptr + offs, mask=mask, other=0)
    same = expert[:, None] == expert[None, :]  # (BLOCK_R, BLOCK_R)
    earlier = offs[:, None] < offs[None, :]
    rank = tl.sum((same & earlier).to(tl.int32), axis=0)  # (BLOCK_R,)
    start = tl.load(starts_ptr + expert * blocks + pid, mask=mask, other=0)
    tl.store(order_ptr + start + rank, offs, mask=mask)


def sort_by_counting(experts, E, BLOCK_R=128):
    """Return order and offsets of experts, each in 0 to E - 1."""
    assert experts.is_contiguous()
    assert experts.dtype == torch.int32
    R = experts.numel()
    # A larger block means more comparisons, a smaller one a wider table.
    blocks = triton.cdiv(R, BLOCK_R)
    assert 0 < R <= 2**30  # R + BLOCK_R has to fit, too
    assert E * blocks < 2**31  # the kernels' offsets are int32
    counts, order = experts.new_empty(E, blocks), experts.new_empty(R)
    BLOCK_E = triton.next_power_of_2(E)
    count_kernel[(blocks,)](experts, counts, R, E, BLOCK_R, BLOCK_E)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(E, blocks)
    starts = ends - counts
    place_kernel[(blocks,)](experts, starts, order, R, BLOCK_R)
    return order, ends[:, -1].contiguous()  # as grouped products take them


def check_sort(sort, experts, E):
    """Assert that order and offsets are those of PyTorch's stable sort."""
    assert all(map(torch.equal, sort(experts, E), sort_torch(experts, E)))


if __name__ == "__main__":
    check_sort(sort_by_counting, experts, 4)
    _, many = route(draw(300, 60), 6)
    check_sort(sort_by_counting, many, 60)
    check_sort(sort_by_counting, torch.full_like(many, 7), 60)
    check_sort(sort_by_counting, many[:1], 60)  # one block, not full
    print("sorted as PyTorch does, all choices of one expert too")

# %%
# Each choice is compared with the 128 of its block, however many experts there
# are. In the recorded run, this sort takes less GPU time at every size:

if __name__ == "__main__" and DEVICE.type == "cuda":
    sorts = {"PyTorch": sort_torch, "counting": sort_by_counting}
    rows = {}
    for T in (1, 16, 1024, 16384):
        _, many = route(draw(T, E), CHOICES)
        times = gpu_time({n: partial(f, many, E) for n, f in sorts.items()})
        rows[T] = {name: f"{t[0] * 1e3:.1f}" for name, t in times.items()}
    table = pd.DataFrame(rows).T.rename_axis("T").to_string()
    print(f"us, {CHOICES} of {E} experts", table, sep="\n")

# %%
# The op
# ------
#
# ``moe_routing`` chooses, ``moe_routing_permutation`` sorts, and
# ``moe_routing_with_permutation`` does both, in at most three launches.
# Few choices are all compared with each other, without counting. The op also
#
# * returns the inverse of the order, to bring the experts' results back;
# * takes NaN and -inf, too: it marks a chosen expert by a value that no logit
#   has (``topk.py``);
# * chooses by sigmoids, only in the best groups of experts, and with a bias
#   that balances their load, as DeepSeek-V3 does (``load_balance.py``);
# * passes the gradient of the weights back to the logits.

from triton_gallery_ops.moe_routing import moe_routing_with_permutation

# %%
# The three sizes take one, two and three launches, with this page's results:

if __name__ == "__main__":
    for T in (5, 100, 1100):
        logits = draw(T, 60)
        result = moe_routing_with_permutation(logits, 4)
        weights, experts, order, inverse, offsets = result
        torch.testing.assert_close(result[:2], route(logits, 4))
        assert all(map(torch.equal, (order, offsets), sort_torch(experts, 60)))
        assert torch.equal(order.argsort().int(), inverse.flatten())

# %%
# The result
# ----------
#
# From logits to order and offsets, for 256 experts and 8 choices. *Triton* is
# the op; rates count the bytes of the floor. Below the chart are the speeds as
# multiples of *PyTorch's best*, the faster of PyTorch and ``torch.compile``:
# first by GPU time, then by the longer of a call's GPU and CPU time, which a
# model sees unless a CUDA graph replays the call.


def on_this_page(logits):
    weights, experts = route(logits, CHOICES)
    return weights, experts, *sort_by_counting(experts, E)


def in_torch(logits):
    weights, experts = route_torch(logits, CHOICES)
    return weights, experts, *sort_torch(experts, E)


def calls_for(T):
    """Return what is timed for T tokens, by name."""
    torch.compiler.reset()  # past eight sizes it would raise
    logits = draw(T, E)
    fast = torch.compile(in_torch, dynamic=False, fullgraph=True)
    return {
        "Triton": partial(moe_routing_with_permutation, logits, CHOICES),
        "Triton, this page": partial(on_this_page, logits),
        "PyTorch": partial(in_torch, logits),
        "torch.compile": partial(fast, logits),
        "Roof": copy_of(T),
    }


TOKENS = [1, 16, 64, 256, 1024, 4096, 16384, 65536]
OTHERS = "PyTorch", "torch.compile"
CLOCKS = {
    "GPU time": lambda t: t[0] * 1e3,
    "longer of GPU and CPU time": lambda t: max(t[0] * 1e3, t[3]),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {T: gpu_time(calls_for(T)) for T in TOKENS}
    results = rate_table(times, "T", "GB/s", moved)
    print(results.to_string())
    wide = results.pivot(index="T", columns="series", values="GB/s")
    wide.plot(loglog=True, title="from logits to sorted choices, bfloat16")
    for clock, us in CLOCKS.items():
        best = [min(us(t[who]) for who in OTHERS) for t in times.values()]
        for who in ("Triton", "Triton, this page"):
            ours = [us(t[who]) for t in times.values()]
            low, *_, high = sorted(map(truediv, best, ours))
            ratio = f"{low:.1f} to {high:.1f} times PyTorch's best"
            print(f"{clock}, {who}: {ratio}")
    for T in (1, 16384):
        gpu, _, _, cpu, _ = times[T]["Triton"]
        print(f"T = {T}, the op: GPU {gpu * 1e3:.1f} us, CPU {cpu:.1f} us")
    one = {1: calls_for(1)["Triton"]}  # with the logits that the graph reads
    each, *_ = gpu_time(replays(one, 20))[1]
    print(f"T = 1, each of 20 calls in a CUDA graph: {each / 20 * 1e3:.1f} us")

# %%
# Exercises
# ---------
#
# Write a kernel and run its cell: it says, without a GPU, whether it is right.
#
# **1.** Experts return rows in the order of ``order``. To bring them back, we
# need its inverse: store p at ``inverse[order[p]]``.

# Takes order_ptr, inverse_ptr, R, BLOCK_R: tl.constexpr
inverse_kernel = None  # your kernel


def check(kernel, inputs, expected, *sizes):
    """Print whether a kernel makes the expected integers from its inputs."""
    if kernel is None:
        print("not solved yet")
        return False
    made = torch.full_like(expected, -7)
    kernel[(4,)](*inputs, made, *sizes)
    right = torch.equal(made, expected)
    print("right" if right else "wrong")
    return right


def check_inverse(kernel):
    """Print whether a kernel stores the place of each of 120 choices."""
    order, _ = sort_torch(route(draw(20, 60), 6)[1], 60)
    return check(kernel, [order], order.argsort().int(), 120, 32)


if __name__ == "__main__":
    check_inverse(inverse_kernel)

# %%
# **2.** Some models give each expert room for a fixed number of tokens, its
# *capacity*, and drop the rest. Expert 0 begins at 0, and expert e at
# ``offsets[e - 1]``. The position of choice ``order[p]`` is p minus the start
# of its expert. At ``slots[order[p]]`` store the choice's *slot*,
# ``expert * CAPACITY + position``, or -1 if ``position >= CAPACITY``.

# Takes experts_ptr, order_ptr, offsets_ptr, slots_ptr, R, CAPACITY,
# BLOCK_R: tl.constexpr
capacity_kernel = None  # your kernel


def check_capacity(kernel):
    """Print whether a kernel gives slots, of 5 for each of 8 experts."""
    experts = route(draw(50, 8), 2)[1].flatten()
    hot = torch.nn.functional.one_hot(experts.long(), 8)
    position = (hot.cumsum(0) * hot).sum(1) - 1
    slots = torch.where(position < 5, experts * 5 + position, -1).int()
    inputs = experts, *sort_torch(experts, 8)
    return check(kernel, inputs, slots, 100, 5, 32)


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
    position = place - tl.load(ends_ptrs, mask=expert > 0, other=0)
    slot = tl.where(position < CAPACITY, expert * CAPACITY + position, -1)
    tl.store(slots_ptr + choice, slot, mask=mask)


if __name__ == "__main__":
    assert check_capacity(capacity_answer_kernel)
