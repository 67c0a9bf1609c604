# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Balance the load of experts: the auxiliary loss and its gradient in one pass
# over the router's logits each, and the bias that does without a loss."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
#
# [[tool.triton-gallery.step_through]]
# kernel = "sums_kernel"
# caption = """
# Each program adds up the probabilities and the choices of two tokens; the last
# one has one token. Of the four elements of a load, one is masked off: without
# the mask it would be the next token's first logit."""
# registers = ["x", "sums", "expert", "counts"]
# inputs = { logits = "integers(1, 4, 5, 3)" }
# call = "add_up(logits.float(), logits.topk(2).indices.int(), 3)"
# start = [1, 0]
#
# [tool.triton-gallery.step_through.expected]
# sums = "torch.stack([p.softmax(-1).sum(0) for p in logits.float().split(2)])"
# counts = """torch.stack([e.flatten().bincount(minlength=3).int()
#   for e in logits.topk(2).indices.split(2)])"""
# ///
r"""
Load balancing of experts: auxiliary loss or bias
=================================================

A router that is left alone tends to send most tokens to a few experts: these
learn, so they are chosen more often. The others only take memory, and the GPUs
that hold them wait. Two remedies are common: an *auxiliary loss*, which is
added to the model's loss, and a *bias*, which is added to the router's scores.
Both act in training alone: in a served model, router and bias are fixed.

After this page you can

* write the auxiliary loss, and say why it balances;
* add up probabilities and choices in one pass, in the same order in each run;
* derive its gradient, and say which of the two remedies needs a kernel.
"""

# sphinx_gallery_tags = ["experts", "reductions", "autograd"]
import os
from functools import partial

import matplotlib.pyplot as plt
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
# A router makes *logits*, a number for each token and each of E experts, and
# chooses k experts for each of T tokens. The auxiliary loss is
#
# .. math:: L = E \sum_e f_e P_e, \qquad f_e = \frac{c_e}{T}, \qquad
#    P_e = \frac{1}{T} \sum_t p_{t,e},
#
# where :math:`c_e` counts the choices of expert :math:`e`, its *load*, and
# :math:`p_{t,e}` is the softmax of token t's logits. Counts have no gradient:
# in a step of training :math:`f_e` is constant. All :math:`P_e` add up to 1: to
# lower L, the step moves probability from experts with large loads to those
# with small ones. With equal loads L is k for any :math:`P_e`: its gradient is
# 0. ``Traffic`` counts the bytes that PyTorch's operators move; the *floor* is
# what any kernel must read: logits and chosen experts, once.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def draw(T, E, k, dtype=torch.bfloat16):
    """Return random logits, and the k experts with the largest."""
    logits = torch.randn(T, E, generator=generator, device=DEVICE).to(dtype)
    return logits, logits.topk(k).indices.int()


def loss_torch(logits, experts):
    """Return the auxiliary loss."""
    T, E = logits.shape
    flat = experts.flatten().long()
    counts = torch.zeros(E, dtype=torch.int32, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat).int())
    wide = torch.promote_types(logits.dtype, torch.float32)
    P = logits.to(wide).softmax(-1).mean(0)
    return E * (counts * P / T).sum()


if __name__ == "__main__":
    logits, experts = draw(4096, 64, 6)
    with Traffic() as traffic:
        print(f"loss {loss_torch(logits, experts).item():.3f}, balanced: 6")
    floor = logits.nbytes + experts.nbytes
    count, times = len(traffic.operators), traffic.moved / floor
    print(f"{count} operators, {times:.1f} times the floor of {floor:,} bytes")

# %%
# The first kernel
# ----------------
#
# Each program takes ``rows`` tokens, adds up probabilities and choices for each
# expert, and stores both sums in a row of its own. PyTorch adds up the rows.
# Without atomic operations the order of all additions is fixed: the loss is
# deterministic. A program is one warp, enough for the few logits of a token.


@triton.jit
def sums_kernel(
    x_ptr, experts_ptr, sums_ptr, counts_ptr, T, E, k, BLOCK_E: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)  # token * E may pass 2**31
    rows = tl.cdiv(T, tl.num_programs(axis=0))
    offs = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    sums = tl.zeros((BLOCK_E,), dtype=tl.float32)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for token in range(pid * rows, tl.minimum(pid * rows + rows, T)):
        ptrs = x_ptr + token * E + offs
        x = tl.load(ptrs, mask=offs < E, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))
        sums += e / tl.sum(e, axis=0)
        for j in range(k):
            expert = tl.load(experts_ptr + token * k + j)
            counts += (offs == expert).to(tl.int32)
    tl.store(sums_ptr + pid * E + offs, sums, mask=offs < E)
    tl.store(counts_ptr + pid * E + offs, counts, mask=offs < E)


def add_up(logits, experts, programs=1024):
    """Return sums of probabilities, and loads: a row for each program."""
    assert all(t.is_contiguous() for t in (logits, experts))
    (T, E), k = logits.shape, experts.shape[1]
    sums = torch.empty(programs, E, device=logits.device)
    counts = torch.empty_like(sums, dtype=torch.int32)
    tensors = logits, experts, sums, counts
    options = {"BLOCK_E": triton.next_power_of_2(E), "num_warps": 1}
    sums_kernel[(programs,)](*tensors, T, E, k, **options)
    return sums, counts


def loss_of(way, logits, experts):
    """Return the loss; ``way`` adds up, a row for each program."""
    T, E = logits.shape
    sums, counts = way(logits, experts)
    return E * (counts.sum(0) / T * (sums.sum(0) / T)).sum()


# %%
# Is it right?
# ------------
#
# We compare with float64. With 16 programs some have several tokens, and some
# have none: these store zeros. A few dozen float32 roundings change a sum of
# positive terms by less than 1e-7 each, so we allow 1e-5.


def check(op):
    """Assert that a loss is that of float64; print the largest error."""
    worst = 0.0
    for T, E, k in [(5, 3, 2), (100, 8, 2), (200, 60, 6), (33, 256, 8)]:
        logits, experts = draw(T, E, k)
        expected = loss_torch(logits.double(), experts)
        loss = op(logits, experts).double()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        worst = max(worst, abs((loss / expected).item() - 1))
    print(f"largest relative error {worst:.1e}, allowed 1.0e-05")


if __name__ == "__main__":
    check(partial(loss_of, partial(add_up, programs=16)))

# %%
# How fast?
# ---------
#
# 128 experts, 8 choices, as in Qwen3-MoE; T tokens in bfloat16. Rates count the
# bytes of the floor; the *roof* is the rate of a copy of as many bytes.

E, CHOICES = 128, 8


def moved(T):
    """Return the bytes of the floor for T tokens, in millions."""
    return T * (2 * E + 4 * CHOICES) * 1e-6


def copy_of(T):
    """Return a call that copies as many bytes."""
    x = torch.empty(round(moved(T) * 5e5), dtype=torch.int8, device=DEVICE)
    return partial(torch.empty_like(x).copy_, x)


def time_forward(**ops):
    """Print the rates of ways to add up, of PyTorch and of the roof."""
    rows = {}
    for T in (1024, 16384, 131072):
        inputs = draw(T, E, CHOICES)
        fast = torch.compile(loss_torch, dynamic=False, fullgraph=True)
        calls = {n: partial(loss_of, op, *inputs) for n, op in ops.items()}
        calls |= {"PyTorch": partial(loss_torch, *inputs)}
        calls |= {"torch.compile": partial(fast, *inputs), "Roof": copy_of(T)}
        times = gpu_time(calls)
        rows[T] = {name: round(moved(T) / t[0], 1) for name, t in times.items()}
        torch.compiler.reset()  # past eight sizes it would raise
    table = pd.DataFrame(rows).T.rename_axis(columns="T")
    print("GB/s", table.to_string(), sep="\n")


if __name__ == "__main__" and DEVICE.type == "cuda":
    time_forward(add_up=add_up)

# %%
# Many tokens at once
# -------------------
#
# The rate is far below the roof. The kernel handles one token after another;
# with a tile of several tokens, all of their loads are under way at once. The
# accumulator ``sums`` is a tile of that shape, too: inside the loop each thread
# adds to its own elements, and the tile's rows are added up once, after the
# loop. ``tl.histogram(experts, N, mask)`` counts how often each of 0 to N - 1
# is in a tile, where the mask is true; N is a power of two.


@triton.jit
def tiles_kernel(
    x_ptr,
    experts_ptr,
    sums_ptr,
    counts_ptr,
    T,
    E,
    k,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    rows = tl.cdiv(T, tl.num_programs(axis=0))
    end = tl.minimum(pid * rows + rows, T)
    offs = tl.arange(0, BLOCK_E)[None, :]  # (1, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    sums = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(pid * rows, end, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)[:, None]  # (BLOCK_T, 1)
        # Past T, load the last token again, so that no address lies past x.
        # tl.where drops these rows, and those of the next program's tokens.
        ptrs = x_ptr + tl.minimum(token, T - 1) * E + offs  # (BLOCK_T, BLOCK_E)
        x = tl.load(ptrs, mask=offs < E, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        p = e / tl.sum(e, axis=1, keep_dims=True)
        sums += tl.where(token < end, p, 0)
        # The choices of a tile's tokens are contiguous.
        mask = offs_k < tl.minimum(BLOCK_T, end - first) * k
        experts = tl.load(experts_ptr + first * k + offs_k, mask=mask, other=0)
        counts += tl.histogram(experts, BLOCK_E, mask=mask)
    out = pid * E + tl.arange(0, BLOCK_E)
    mask = tl.arange(0, BLOCK_E) < E
    tl.store(sums_ptr + out, tl.sum(sums, axis=0), mask=mask)
    tl.store(counts_ptr + out, counts, mask=mask)


def add_up_tiles(logits, experts, programs=512):
    """Return what add_up does; a tile has 4096 logits at most, or one token."""
    assert all(t.is_contiguous() for t in (logits, experts))
    (T, E), k = logits.shape, experts.shape[1]
    BLOCK_E = triton.next_power_of_2(E)
    # 4096 logits are 32 in each thread of 4 warps, Triton's default.
    BLOCK_T = max(min(128, 4096 // BLOCK_E), 1)
    BLOCK_K = triton.next_power_of_2(BLOCK_T * k)
    programs = min(programs, triton.cdiv(T, BLOCK_T))
    sums = torch.empty(programs, E, device=logits.device)
    counts = torch.empty_like(sums, dtype=torch.int32)
    tensors = logits, experts, sums, counts
    blocks = {"BLOCK_T": BLOCK_T, "BLOCK_E": BLOCK_E, "BLOCK_K": BLOCK_K}
    tiles_kernel[(programs,)](*tensors, T, E, k, **blocks)
    return sums, counts


if __name__ == "__main__":
    check(partial(loss_of, partial(add_up_tiles, programs=2)))

# %%

if __name__ == "__main__" and DEVICE.type == "cuda":
    time_forward(add_up=add_up, add_up_tiles=add_up_tiles)

# %%
# The time includes ``loss_of``, where several PyTorch operators add up the
# programs' rows: in the recorded run, ``torch.compile`` is faster up to 16384
# tokens. The op has one kernel for that; *The result* compares it.
#
# The gradient
# ------------
#
# With the *slope* :math:`s_i = E c_i / T^2` of each expert, the loss is
# :math:`\sum_t \sum_i s_i p_{t,i}`. The derivative of :math:`p_{t,i}` by
# :math:`x_{t,e}` is :math:`p_{t,e} (1 - p_{t,e})` for :math:`i = e`, and
# :math:`-p_{t,i}\, p_{t,e}` otherwise. Multiplied by :math:`s_i` and summed
# over i, they give
#
# .. math:: \frac{\partial L}{\partial x_{t,e}} = p_{t,e}
#    \left( s_e - \sum_i p_{t,i} s_i \right).
#
# We compute the probabilities again: storing them would cost a write in the
# forward pass, and save no read in the backward pass.


@triton.jit
def gradient_kernel(
    x_ptr, s_ptr, out_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    token = pid * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # (BLOCK_T, 1)
    offs = tl.arange(0, BLOCK_E)[None, :]  # (1, BLOCK_E)
    # Past T, again the last token: the store leaves these rows out.
    ptrs = x_ptr + tl.minimum(token, T - 1) * E + offs
    x = tl.load(ptrs, mask=offs < E, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    p = e / tl.sum(e, axis=1, keep_dims=True)
    s = tl.load(s_ptr + offs, mask=offs < E, other=0)
    d = p * (s - tl.sum(p * s, axis=1, keep_dims=True))
    tl.store(out_ptr + token * E + offs, d, mask=(token < T) & (offs < E))


def gradient(logits, counts):
    """Return the loss's gradient by the logits, given the loads."""
    assert logits.is_contiguous()
    T, E = logits.shape
    BLOCK_E = triton.next_power_of_2(E)
    BLOCK_T = max(min(128, 4096 // BLOCK_E), 1)
    out, s = torch.empty_like(logits), E * (counts / T / T)
    grid = (triton.cdiv(T, BLOCK_T),)
    gradient_kernel[grid](logits, s, out, T, E, BLOCK_T, BLOCK_E)
    return out


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        logits, experts = draw(100, 60, 6, dtype)
        _, counts = add_up_tiles(logits, experts)
        made = gradient(logits, counts.sum(0)).double()
        logits = logits.double().requires_grad_()
        loss_torch(logits, experts).backward()
        # atol: a few float32 roundings of p * s; s has a factor 1 / T
        # rtol: one rounding to the dtype
        atol, rtol = 1e-6 / len(logits), torch.finfo(dtype).eps
        error = (made - logits.grad).abs().max().item()
        allowed = f"{atol:.1e} + {rtol:.1e} times the gradient"
        print(f"{dtype}: largest error {error:.1e}, allowed {allowed}")
        torch.testing.assert_close(made, logits.grad, rtol=rtol, atol=atol)

# %%
# A bias in place of a loss
# -------------------------
#
# The gradient of the auxiliary loss competes with that of the model's own loss.
# DeepSeek-V3 adds a bias to the scores instead. The bias takes part only in the
# choice; an expert's weight comes from its score without the bias. After each
# step, the bias of an expert with less than the mean load rises by a fixed
# amount, ``rate``; that of one with more falls by as much. A router that sorts
# tokens returns ``offsets`` (*Route tokens to experts*), the running sum of the
# loads, so the loads are its differences:


def update_(bias, offsets, rate):
    """Add rate * sign(mean load - load) to the bias of each expert."""
    loads = offsets.diff(prepend=offsets.new_zeros(1)).long()
    missing = loads.sum() - len(loads) * loads  # E * (mean - load)
    bias.add_(missing.sign(), alpha=rate)


# %%
# These few operators on E numbers run once in a training step and stay PyTorch:
# a kernel would save only launches. On several GPUs, first add up all loads.
#
# What it does for a model
# ------------------------
#
# There are 16 kinds of tokens, each to be multiplied by a matrix of its own.
# The model has eight experts, each a matrix, and a router that chooses two. We
# train it with no remedy, with the auxiliary loss times 0.1, and with the bias.
# All tokens share a large vector, so at first the router scores them alike.
# This runs on the CPU: every machine draws the same. The figure has the load of
# the busiest expert, at most 8 / 2 = 4 times the mean, and the number of *idle*
# experts, which have no token, for each step. The printed loss is the model's
# own, in the last step.


def train(way, N=512):
    """Return the loss after 500 steps of N tokens, and the loads in each."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    # A kind's tokens are near its center; its map is what experts should learn.
    centers, maps = normal(16, 16) + 3 * normal(16), normal(16, 16, 16) / 4
    router = (normal(16, 8) / 4).requires_grad_()
    matrices, bias = torch.zeros(8, 16, 16, requires_grad=True), torch.zeros(8)
    optimizer = torch.optim.Adam([router, matrices], lr=0.01)
    loads = []
    for _ in range(500):
        kind = torch.arange(N) % 16
        x = centers[kind] + 0.3 * normal(N, 16)
        logits = x @ router
        scores = logits.softmax(-1)
        experts = (scores + bias).topk(2).indices
        chosen = torch.zeros(N, 8).scatter(1, experts, 1)
        weights = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
        # y[t] = sum over experts n of weights[t, n] * x[t] @ matrices[n]
        y = torch.einsum("tn,td,ndf->tf", weights, x, matrices)
        loss = (y - torch.einsum("td,tdf->tf", x, maps[kind])).square().mean()
        extra = loss_torch(logits, experts) if way == "auxiliary loss" else 0
        optimizer.zero_grad()
        (loss + 0.1 * extra).backward()
        optimizer.step()
        loads.append(chosen.sum(0))
        if way == "bias":
            update_(bias, loads[-1].cumsum(0), 0.01)
    return loss.item(), torch.stack(loads)


if __name__ == "__main__":
    _, (above, below) = plt.subplots(2, sharex=True, layout="constrained")
    ways = {"nothing": ":", "auxiliary loss": "--", "bias": "-"}
    for way, line in ways.items():
        loss, loads = train(way)
        idle = (loads == 0).sum(1)
        above.plot(loads.amax(1) / loads.mean(1), line)
        below.plot(idle, line, label=way)
        print(f"{way}: {idle[-1]} idle experts, loss {loss:.2f}")
        assert (idle[-1] > 0) == (way == "nothing")
    above.set(title="Largest load, in multiples of the mean", ylim=(0, None))
    below.set(title="Idle experts, of eight", xlabel="step")
    below.legend(loc="center right")

# %%
# With no remedy, some experts are idle, and the loss is the largest; with
# either, none is idle. This is one small model with one seed.
#
# The op
# ------
#
# ``load_balance_loss(logits, experts)`` is this gallery's op, with a gradient.
# Its second kernel adds up the programs' rows. The op also takes a mask: T is
# then the number of tokens that are not padding. And it computes the loss that
# DeepSeek-V3 keeps beside its bias: one for each sequence, averaged, with
# sigmoids in place of the softmax.

from triton_gallery_ops.load_balance import load_balance_loss

# %%

if __name__ == "__main__":
    check(load_balance_loss)

# %%
# The result
# ----------
#
# Forward and backward, for 128 experts. *Triton* is the op; *PyTorch's best* is
# the faster of PyTorch and ``torch.compile`` at each size. Rates are of GPU
# time alone. In the recorded run the CPU takes longer than the GPU for each
# call of the op, and longer than for a call of PyTorch: the op gains time where
# a CUDA graph replays it, or where other work keeps the GPU busy. No figure
# here says what keeps its forward below half of the roof. The backward does
# what ``gradient_kernel`` does, and is no faster than ``torch.compile``'s.


def calls_for(T):
    """Return forwards and backwards that are timed for T tokens, by name."""
    torch.compiler.reset()
    logits, experts = draw(T, E, CHOICES)
    forwards, backwards = {"Roof": copy_of(T)}, {"Roof": logits.clone}
    fast = torch.compile(loss_torch, dynamic=False, fullgraph=True)
    ops = {"Triton": load_balance_loss, "PyTorch": loss_torch}
    for name, op in (ops | {"torch.compile": fast}).items():
        forwards[name] = partial(op, logits, experts)
        x = logits.clone().requires_grad_()
        grad = partial(torch.autograd.grad, op(x, experts), x)
        backwards[name] = partial(grad, retain_graph=True)
    return forwards, backwards


def show(results, way):
    """Print and draw rates, and print who leads."""
    print(way, results.to_string(), sep="\n")
    wide = results.pivot(index="T", columns="series", values="GB/s")
    wide.plot(loglog=True, title=f"auxiliary loss, {way}, bfloat16")
    ratio = wide["Triton"] / wide[["PyTorch", "torch.compile"]].max(axis=1)
    span = f"{ratio.min():.1f} to {ratio.max():.1f}"
    print(f"{way}: Triton's rate is {span} times that of PyTorch's best")


if __name__ == "__main__" and DEVICE.type == "cuda":
    times, backward = {}, {}
    for T in (1024, 4096, 16384, 65536, 131072):
        times[T], backward[T] = map(gpu_time, calls_for(T))
    results = rate_table(times, "T", "GB/s", moved)
    show(results, "forward")
    # Logits in, gradients out
    results_backward = rate_table(backward, "T", "GB/s", lambda T: 4e-6 * T * E)
    show(results_backward, "backward")

# %%
# Exercises
# ---------
#
# Write a kernel and run its cell: it says, without a GPU, whether it is right.
#
# **1.** For practice, write the update of the bias as a kernel of one program,
# from ``offsets``.

update_kernel = None  # takes (bias_ptr, offsets_ptr, rate, E, BLOCK_E)


def judge(check, kernel):
    """Print and return whether a kernel passes a check."""
    verdict = None if kernel is None else check(kernel)
    print({None: "not solved yet", True: "right", False: "wrong"}[verdict])
    return verdict


def check_update(kernel):
    """Return whether a kernel updates the bias of 60 experts."""
    loads = draw(50, 60, 6)[1].flatten().long().bincount(minlength=60)
    bias, expected = torch.zeros(2, 60, device=DEVICE)
    kernel[(1,)](bias, loads.cumsum(0).int(), 0.5, 60, BLOCK_E=64)
    update_(expected, loads.cumsum(0).int(), 0.5)
    return torch.equal(bias, expected)


if __name__ == "__main__":
    judge(check_update, update_kernel)

# %%
# **2.** ST-MoE adds another loss, the *z-loss*, which keeps logits small: the
# mean over tokens of :math:`z_t^2`, with :math:`z_t = \log \sum_e e^{x_{t,e}}`.
# Write a kernel whose programs each store the sum of the squares for their
# tokens, as in ``sums_kernel``. The check adds 100 to the logits, so ``tl.exp``
# would overflow: subtract the maximum, and add it again after ``tl.log``.

z_kernel = None  # takes (x_ptr, sums_ptr, T, E, BLOCK_E)


def check_z(kernel):
    """Return whether a kernel adds up squares of 10 tokens, 4 in a program."""
    logits = draw(10, 60, 6, torch.float32)[0] + 100
    sums = torch.full((3,), -1.0, device=DEVICE)
    kernel[(3,)](logits, sums, 10, 60, BLOCK_E=64)
    squares = logits.double().logsumexp(-1).square()
    expected = torch.stack([part.sum() for part in squares.split(4)])
    return torch.allclose(sums.double(), expected, rtol=1e-5, atol=0)


if __name__ == "__main__":
    judge(check_z, z_kernel)

# %%
# Answers
# -------
#
# **1.** The load of the first expert is its offset.


@triton.jit
def update_answer_kernel(bias_ptr, offsets_ptr, rate, E, BLOCK_E: tl.constexpr):
    offs = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + offs, mask=offs < E, other=0)
    mask = (offs > 0) & (offs < E)
    load = ends - tl.load(offsets_ptr + offs - 1, mask=mask, other=0)
    missing = tl.sum(load, axis=0) - E * load
    bias = tl.load(bias_ptr + offs, mask=offs < E, other=0)
    bias += tl.where(missing > 0, rate, tl.where(missing < 0, -rate, 0.0))
    tl.store(bias_ptr + offs, bias, mask=offs < E)


if __name__ == "__main__":
    assert judge(check_update, update_answer_kernel)

# %%
# **2.** A sum that a loop adds to may start as a Python float:


@triton.jit
def z_answer_kernel(x_ptr, sums_ptr, T, E, BLOCK_E: tl.constexpr):
    pid = tl.program_id(axis=0).to(tl.int64)
    rows = tl.cdiv(T, tl.num_programs(axis=0))
    offs = tl.arange(0, BLOCK_E)
    total = 0.0
    for token in range(pid * rows, tl.minimum(pid * rows + rows, T)):
        ptrs = x_ptr + token * E + offs
        x = tl.load(ptrs, mask=offs < E, other=-float("inf")).to(tl.float32)
        largest = tl.max(x, axis=0)
        lse = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
        total += lse * lse
    tl.store(sums_ptr + pid, total)


if __name__ == "__main__":
    assert judge(check_z, z_answer_kernel)
