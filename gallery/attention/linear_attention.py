# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute attention without softmax in chunks of a recurrence, with a state that
# decays by a gate, forward and backward."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "three kernels: the forward runs in segments, the backward in chunks"
# ///
r"""
Linear attention
================

Softmax makes attention compare each query with each key. Without it, all that a
token needs of the tokens before is one matrix, the state of a recurrence. This
page computes that recurrence in chunks, with matrix products, forward and
backward, and lets the state decay by a gate.

After this page you can

* write a recurrence as matrix products within chunks;
* keep exponentials of decays from overflowing, however strong the decay is;
* cut a recurrence into segments that run at once;
* derive a backward whose sums have the form of the forward's.

The recurrence is that of `Mamba-2 <https://arxiv.org/abs/2405.21060>`_; the
chunks are those of `gated linear attention
<https://arxiv.org/abs/2312.06635>`_, with one gate for each token of a head.
"""

# sphinx_gallery_tags = ["attention", "memory bound"]
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
from triton_gallery.counting import statements

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(T, heads=16, D=128, dtype=torch.bfloat16):
    """Return queries, keys, values and log decays of one sequence."""
    normal = partial(torch.randn, generator=generator, device=DEVICE)
    q, k, v = (normal(1, T, heads, D).to(dtype) for _ in range(3))
    wide = torch.promote_types(dtype, torch.float32)
    gates = normal(1, T, heads, dtype=wide) + 3
    return q, k, v, torch.nn.functional.logsigmoid(gates)


def weights(late, early, diagonal):
    """Return exp(late_i - early_j) for j up to i + diagonal, else 0."""
    exponents = late[..., :, None] - early[..., None, :]
    seen = torch.ones_like(exponents, dtype=torch.bool).tril(diagonal)
    return exponents.masked_fill(~seen, -torch.inf).exp()


def linear_attention_torch(q, k, v, g, C=64):
    """Return the outputs; the length is a multiple of C."""
    q, k, v, g = (
        t.unflatten(1, (-1, C)).movedim(3, 1) for t in (q, k, v, g)
    )  # (batch, heads, chunks, C, ...)
    decay = g.cumsum(-1)
    total = decay[..., -1]
    inside = (q @ k.mT * weights(decay, decay, 0)).to(v.dtype) @ v
    left = (total[..., None] - decay).exp()[..., None]
    added = (k.mT @ (v * left).to(v.dtype)).flatten(3).to(g.dtype)
    since = total.cumsum(-1)
    states = weights(since - total, since, -1) @ added
    states = states.unflatten(3, (k.shape[-1], -1)).to(q.dtype)
    out = inside + (q @ states) * decay.exp()[..., None]
    out = out * q.shape[-1] ** -0.5
    return out.to(v.dtype).movedim(1, 3).flatten(1, 2)


def floor(T, tensors=4):
    """Return the megabytes of the tensors, and of the log decays."""
    return 1e-6 * T * 16 * (tensors * 2 * 128 + 4)


# %%
# In PyTorch
# ----------
#
# Without its softmax, attention is a *recurrence*. The keys and values of all
# tokens so far are one matrix of size K by V, the *state* :math:`S`. A token
# lets the state decay by its *gate* :math:`e^{g_t}`, adds its own key and
# value, and reads the sum with its query:
#
# .. math:: S_t = e^{g_t} S_{t-1} + k_t v_t^\top, \qquad
#    o_t = \frac{1}{\sqrt K}\, S_t^\top q_t, \qquad g_t \le 0
#
# As a loop this takes one step for each token, and each step reads and writes
# the state. The *floor* is to read ``q``, ``k``, ``v`` and ``g`` and to write
# ``o``. A tensor is (batch, length, heads, dimension), as a projection leaves
# it.


def recurrence(q, k, v, g, scale=None, state=None):
    """Return the outputs and the final state, token by token."""
    batch, T, heads, K = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, K, v.shape[3])
    out = torch.empty_like(v)
    scale = K**-0.5 if scale is None else scale
    for t in range(T):
        one = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = state * g[:, t].exp()[..., None, None] + one
        out[:, t] = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out, state


if __name__ == "__main__":
    for T in (2048, 8192, 65536):
        moved = 2 * 4e-9 * T * 16 * 128 * 128  # float32, 16 heads of 128
        print(f"{T:5} tokens: {moved:5.1f} GB in {T:5} steps,", end=" ")
        print(f"floor {floor(T) / 1e3:.2f} GB")

# %%
# The first kernel
# ----------------
#
# Write the recurrence for a *chunk* of C tokens at once. With the log decays
# :math:`G_i = g_1 + \dots + g_i` since the chunk began, and the state
# :math:`S` before it,
#
# .. math:: o_i = \frac{1}{\sqrt K} \Big( e^{G_i} S^\top q_i + \sum_{j \le i}
#    e^{G_i - G_j} (q_i \cdot k_j)\, v_j \Big)
#
# .. math:: S' = e^{G_C} S + \sum_j e^{G_C - G_j}\, k_j v_j^\top
#
# These are four matrix products, in T / C steps. Each exponent is the log decay
# over a stretch of tokens, so it is at most 0. A program has a block of the
# columns of a head's state in registers, and goes along all chunks:
#
# .. code-block:: text
#
#     start = 0       CHUNK         2 CHUNK
#     +-------------+-------------+-------------+
#     |  q k v g    |  q k v g    |  q k v ...  |   BLOCK_V columns of v
#     +-------------+-------------+-------------+
#      0 ->  out ->  S  ->  out ->  S  ->  out ->
#
# Tokens past the end have the log decay 0, and keys and values of 0. They
# change nothing.


@triton.jit
def chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    out_ptr,
    scale,
    T,
    HEADS,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # In int32, an offset would overflow past element 2**31.
    place = tl.program_id(axis=0).to(tl.int64)  # of a head of a batch
    offs_k = tl.arange(0, D)[None, :]
    offs_v = tl.program_id(axis=1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    state = tl.zeros((D, BLOCK_V), dtype=tl.float32)
    for start in range(0, T, CHUNK):
        offs_t = start + tl.arange(0, CHUNK)  # (CHUNK,)
        mask = offs_t < T
        rows = (place // HEADS * T + offs_t) * HEADS + place % HEADS
        g = tl.load(g_ptr + rows, mask=mask, other=0.0)
        decay, total = tl.cumsum(g), tl.sum(g)
        row, mask = rows[:, None] * D, mask[:, None]  # (CHUNK, 1)
        q = tl.load(q_ptr + row + offs_k, mask=mask, other=0.0)
        k = tl.load(k_ptr + row + offs_k, mask=mask, other=0.0)
        v = tl.load(v_ptr + row + offs_v, mask=mask, other=0.0)
        # The tensor cores take both operands in one type.
        out = tl.dot(q, state.to(q.dtype)) * tl.exp(decay)[:, None]
        # For later tokens the exponent may be large: they are masked there.
        since = decay[:, None] - decay[None, :]  # (CHUNK, CHUNK)
        earlier = offs_t[:, None] >= offs_t[None, :]
        p = tl.dot(q, k.T) * tl.exp(tl.where(earlier, since, -float("inf")))
        out = tl.dot(p.to(v.dtype), v, out)  # (CHUNK, BLOCK_V)
        tl.store(out_ptr + row + offs_v, out * scale, mask=mask)
        v = (v * tl.exp(total - decay)[:, None]).to(k.dtype)
        state = tl.dot(k.T, v, state * tl.exp(total))


def by_chunks(q, k, v, g, BLOCK_V=32, num_warps=4):
    """Return the outputs of contiguous tensors; D is a power of two."""
    (batch, T, heads, D), out = q.shape, torch.empty_like(v)
    grid = (batch * heads, D // BLOCK_V)
    args = q, k, v, g, out, D**-0.5, T, heads, D, 64, BLOCK_V
    chunk_kernel[grid](*args, num_warps=num_warps, num_stages=2)
    return out


# %%
# Is it right?
# ------------
#
# We compare with the loop, in float64. Weights, states, weighted values and the
# result are each rounded to the 11 bits of float16. So each output may be off
# by four times :math:`2^{-11}` of the sum of its terms' absolute values. The
# loop computes these sums, too, when it gets the absolute values of the inputs.

if __name__ == "__main__":
    q, k, v, g = random(200, heads=2, D=64, dtype=torch.float16)
    out, x = by_chunks(q, k, v, g), [t.double() for t in (q, k, v)]
    expected, _ = recurrence(*x, g.double())
    sizes, _ = recurrence(*(t.abs() for t in x), g.double())
    out, expected = out / sizes, expected / sizes
    error, atol = (out - expected).abs().max(), 4 * 2**-11
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# We time 16 heads of dimension 128 in bfloat16. A rate is the bytes of the
# floor divided by the time; the roof copies as many. ``PyTorch`` has the same
# chunks in operators; its function is in the first cell. It computes what each
# chunk adds to the state, then all states by a matrix of decays between chunks.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for T in (2048, 4096, 8192):
        x = random(T)
        fast = torch.compile(linear_attention_torch, dynamic=False)
        whole = torch.empty(int(floor(T) * 5e5), dtype=torch.int8).to(DEVICE)
        found = gpu_time(
            {
                "Triton": partial(by_chunks, *x),
                "PyTorch": partial(linear_attention_torch, *x),
                "torch.compile": partial(fast, *x),
                "Roof": partial(torch.empty_like(whole).copy_, whole),
            }
        )
        print(f"{T} tokens, GB/s:", end=" ")
        print({who: round(floor(T) / times[0]) for who, times in found.items()})

# %%
# What has to be serial?
# ----------------------
#
# The first kernel goes from chunk to chunk with all of its work. How many
# programs is that, and how many steps does each take? A GPU like the H200 has
# 132 *multiprocessors*, each of which runs at least one program at a time:

if __name__ == "__main__":
    for T in (2048, 8192, 65536):
        steps = triton.cdiv(T, 64)
        text = f"{16 * 128 // 32} programs of {steps:4} steps"
        print(f"{T:5} tokens: {text}; {16 * steps:5} chunks in all heads")

# %%
# So half of the multiprocessors have nothing to do, and the others take up to
# 1024 steps one after another. Only the state has to go from chunk to chunk.
# And what a *segment*, several chunks, does to it is simple. Let :math:`E` be
# the state after the segment if it begins with zeros, and :math:`G` the
# segment's log decay. A segment that begins with :math:`S` leaves
# :math:`e^G S + E`. So we launch twice:
#
# .. code-block:: text
#
#     ends       segment 0 -> E0, G0     segment 1 -> E1, G1     ...
#
#     forward    S0               -> segment 0 -> out
#                S0, E0           -> segment 1 -> out
#                S0, E0, E1       -> segment 2 -> out            ...
#
# In the first launch, a program goes along the chunks of its segment, begins
# with zeros, and stores no more than :math:`E` and :math:`G`. In the second, a
# program has a segment, too. It makes its own first state: it begins with
# :math:`S_0`, the initial state, and takes one step :math:`e^G S + E` for each
# earlier segment. Then it goes along its chunks like the first kernel. Within a
# launch, no program waits for another one.
#
# The price is that keys and values are read twice. With more than 64 heads, in
# all sequences together, each sequence of a head is one segment: enough
# programs run without a cut. A sequence of at most 256 tokens is one segment,
# too.

# %%
# The backward
# ------------
#
# Let :math:`a_{ij} = e^{G_i - G_j}` for :math:`j \le i`, leave out the scale,
# and let :math:`h_i` be the gradient of :math:`o_i` (``grad``). Call the
# gradient of the state before a chunk :math:`\bar S`, and the one after it
# :math:`\bar S'`. It goes back from chunk to chunk: :math:`\bar S = e^{G_C}
# \bar S' + \sum_i e^{G_i} q_i h_i^\top`. This has the form of :math:`S'` above,
# in reverse, with the inputs q and h. The weight of a token is its decay since
# the chunk began. And within a chunk,
#
# .. math::
#
#    \begin{aligned}
#    o_i &= \sum_{j \le i} a_{ij} (q_i \cdot k_j)\, v_j + e^{G_i} S^\top q_i \\
#    \mathrm{d}q_i &= \sum_{j \le i} a_{ij} (h_i \cdot v_j)\, k_j
#    + e^{G_i} S h_i \\
#    \mathrm{d}k_j &= \sum_{i \ge j} a_{ij} (v_j \cdot h_i)\, q_i
#    + e^{G_C - G_j} \bar S' v_j \\
#    \mathrm{d}v_j &= \sum_{i \ge j} a_{ij} (k_j \cdot q_i)\, h_i
#    + e^{G_C - G_j} \bar S'^\top k_j
#    \end{aligned}
#
# All four are one formula: products of an ``x`` with each ``y`` weigh the
# ``z``, and ``x`` reads a state. One kernel computes the last three. In this
# table, ``dS`` is :math:`\bar S'`:
#
# .. code-block:: text
#
#     result     x      y      z     state          tokens that count
#     out        q      k      v     S              up to this one
#     dq         grad   v      k     S, transposed  up to this one
#     dk         v      grad   q     dS, transposed from this one on
#     dv         k      q      grad  dS             from this one on
#
# The state :math:`S_{t-1}` holds what earlier tokens wrote, and :math:`g_t`
# scales it. So :math:`g_t` acts on each pair of an earlier token, which writes,
# and a token from :math:`t` on, which reads. Such a pair is a term of both
# :math:`q_i \cdot \mathrm{d}q_i` and :math:`k_j \cdot \mathrm{d}k_j`. So within
# a chunk
#
# .. math:: \mathrm{d}g_t = \sum_{i \ge t} \big( q_i \cdot \mathrm{d}q_i - k_i
#    \cdot \mathrm{d}k_i^{\text{in}} \big) + \sum_{j < t} k_j \cdot
#    \mathrm{d}k_j^{\text{out}} + e^{G_C} \sum S \odot \bar S'
#
# where *in* is the part of :math:`\mathrm{d}k` from the same chunk, and *out*
# the part from the state. Pairs with both tokens from :math:`t` on are in the
# first sum twice, and cancel. The last term has the pairs that have no token in
# the chunk. The kernel for ``dk`` adds it all up.
#
# This last term has the state before a chunk and the gradient after the same
# chunk. The one is known going forward, the other going back. So the backward
# keeps both in memory. A kernel of states goes along the segments, once in each
# direction, and stores the state at each chunk. Then a kernel of tokens takes
# all chunks at once:
#
# .. code-block:: text
#
#     states    before   before   before   before
#               chunk 0  chunk 1  chunk 2  chunk 3   and dS, in reverse
#                  |        |        |        |
#                  v        v        v        v
#     tokens    chunk 0  chunk 1  chunk 2  chunk 3   for dq, for dk, for dv
#
# The forward saves its inputs alone, so the backward computes the states again.
# With dimensions of 128, the states and their gradients take as much memory as
# four tensors of the size of ``q`` in half precision, eight in float32, and 16
# in float64.

# %%
# The op
# ------
#
# The exponentials have base 2, as in ``flash_attention_forward.py``. A gate of
# 0 is the log decay ``-inf``. The op bounds log decays, because a difference of
# two infinities is NaN. Float32 and float64 have shorter chunks, because their
# operands take more registers.

from triton_gallery_ops.linear_attention import (
    LINEAR_ATTENTION_SEGMENTS,
    _linear_attention_decays,
    _linear_attention_kernel,
    _linear_attention_states_kernel,
    _linear_attention_tokens_kernel,
    linear_attention,
)

# %%
# What do the segments gain? Each row is a step: the statements of its kernels,
# and its time in microseconds. The second row has the op's kernel, and one
# segment for each sequence of a head. Its blocks are 64 wide, so it has half as
# many programs as the first kernel. The last row is the backward of the chunks
# in PyTorch, through autograd.


def output(*tensors):
    return linear_attention(*tensors)[0]


def one_segment(*tensors):
    """Return what the op does, with sequences that are not cut."""
    global LINEAR_ATTENTION_SEGMENTS
    kept, LINEAR_ATTENTION_SEGMENTS = LINEAR_ATTENTION_SEGMENTS, 1
    try:
        return output(*tensors)
    finally:
        LINEAR_ATTENTION_SEGMENTS = kept


def backward_of(op, *tensors):
    """Return a call that computes an op's gradients through autograd."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = op(*leaves)
    grad = torch.ones_like(out)
    grads = partial(torch.autograd.grad, retain_graph=True)
    return partial(grads, out, leaves, grad)


FORWARD = _linear_attention_decays, _linear_attention_kernel
STATES = _linear_attention_states_kernel
STEPS = {
    "first kernel": (by_chunks, chunk_kernel),
    "the op, one segment": (one_segment, *FORWARD),
    "the op": (output, *FORWARD, STATES),
}
BACKWARD = _linear_attention_decays, STATES, _linear_attention_tokens_kernel

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(
        index=[*STEPS, "the op, backward", "PyTorch, backward"]
    )
    counts = [statements(*step[1:]) for step in STEPS.values()]
    ladder["statements"] = [*counts, statements(*BACKWARD), 0]
    for T in (2048, 8192, 32768):
        x = random(T)
        tried = {who: partial(step[0], *x) for who, step in STEPS.items()}
        tried["the op, backward"] = backward_of(output, *x)
        tried["PyTorch, backward"] = backward_of(linear_attention_torch, *x)
        found = gpu_time(tried, turns=20)
        ladder[f"{T} tokens"] = [round(1e3 * found[who][0]) for who in tried]
        del tried, x
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare outputs, final states and all gradients with those of the loop in
# float64. All terms of a sum become positive if the inputs, but for ``g``, are
# replaced by their absolute values. So the same loop gives the sizes of the
# sums. The gradient of ``g`` has terms that cancel: those of all later tokens.
# For each element we allow three roundings of its size. A rounding is
# :math:`2^{-11}` in float16. In bfloat16 it is :math:`2^{-8}`, and we allow
# twice as much. (Without a GPU, the op computes bfloat16 in float32, and rounds
# at the end.) In float32 and float64 we allow for the roundings of long sums.
# For the sums of log decays, we add a rounding of the largest of them. A
# segment has at least 256 tokens. So one shape has 530 tokens: three segments.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-20,
    torch.float64: 2.0**-48,
}


def results_of(op, tensors, grads, scale=None):
    """Return the two results of an op, and the gradients of all it takes."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    *tokens, state = leaves
    found = op(*tokens, scale, state)
    return *found, *torch.autograd.grad(found, leaves, grads)


def worst(found, tensors, grads, scale=None):
    """Return the largest error, as a part of what is allowed."""
    x, dy = ([t.double() for t in group] for group in (tensors, grads))
    expected = results_of(recurrence, x, dy, scale)
    q, k, v, g, state = x
    x = q.abs(), k.abs(), v.abs(), g, state.abs()
    sizes = list(results_of(recurrence, x, [t.abs() for t in dy], scale))
    # The gradient of g at t has terms of all tokens from t on: q times dq.
    later = (sizes[2] * x[0]).sum(-1).flip(1).cumsum(1).flip(1)
    sizes[5] = sizes[5] + later
    eps = EPS[found[0].dtype]
    kind = torch.finfo(found[1].dtype)
    # What is beyond the bound of a log decay is cut off.
    eps += kind.eps * g.abs().clamp(max=850).sum(1).max().item()
    errors = [
        ((one.double() - right).abs() / (3 * eps * size + kind.tiny)).max()
        for one, right, size in zip(found, expected, sizes, strict=True)
    ]
    return torch.stack(errors).max().item()  # NaN, if there is any


def problem(dtype, batch, T, heads, K, V, gate=2.0):
    """Return what the op takes, and gradients of what it returns."""
    wide = torch.promote_types(dtype, torch.float32)
    normal = partial(torch.randn, generator=generator, device=DEVICE)
    q, k = (normal(batch, T, heads, K).to(dtype) for _ in range(2))
    v, grad = (normal(batch, T, heads, V).to(dtype) for _ in range(2))
    g = torch.nn.functional.logsigmoid(normal(batch, T, heads) + gate)
    state, dlast = (normal(batch, heads, K, V).to(wide) for _ in range(2))
    return [q, k, v, g.to(wide), state], [grad, dlast]


def prove(dtype, *shape, gate=2.0, scale=None):
    tensors, grads = problem(dtype, *shape, gate=gate)
    found = results_of(linear_attention, tensors, grads, scale)
    for one, t in zip(found, (tensors[2], tensors[4], *tensors), strict=True):
        assert (one.shape, one.dtype) == (t.shape, t.dtype)
    error = worst(found, tensors, grads, scale)
    assert error <= 1, (dtype, shape, error)
    return error


SHAPES = [  # batch, length, heads, K, V
    (2, 64, 2, 64, 64),
    (1, 130, 1, 128, 128),
    (1, 70, 2, 20, 40),
    (2, 1, 1, 16, 16),
    (1, 33, 1, 64, 256),
    (1, 530, 1, 16, 32),
]

if __name__ == "__main__":
    for dtype in EPS:
        errors = [prove(dtype, *shape) for shape in SHAPES]
        print(f"{dtype}: at most {max(errors):.2f} of what is allowed")
    prove(torch.float32, 1, 70, 2, 32, 32, scale=0.5)
    prove(torch.float64, 1, 530, 1, 16, 16, gate=6.0)  # states that last
else:  # imported: a glance
    prove(torch.float32, 1, 40, 1, 16, 32)

# %%
# The gates may be near 1, where states grow, or near 0, or 0. A decay by
# :math:`e^{-10}` in each token would overflow float32 after nine tokens, if any
# exponent were positive. Float16 is left out: below :math:`2^{-14}` its weights
# lose bits. With a log decay of ``-inf``, a sequence begins again:

if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for gate in (20.0, -10.0, -100.0):
            prove(dtype, 1, 100, 2, 32, 32, gate=gate)
    (q, k, v, g, state), _ = problem(torch.float32, 1, 600, 2, 32, 32)
    g[:, 530] = -torch.inf
    out, last = linear_attention(q, k, v, g, initial_state=state)
    again, end = linear_attention(*(t[:, 530:] for t in (q, k, v, g)))
    torch.testing.assert_close(out[:, 530:], again, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(last, end, rtol=1e-3, atol=1e-4)

# %%
# A long sequence in three parts, with the state handed over, gives the same as
# one. The part in the middle has no tokens: the state stays. Inputs may have
# any strides:

if __name__ == "__main__":
    (q, k, v, g, state), _ = problem(torch.float64, 1, 590, 2, 16, 32)
    whole, end = linear_attention(q, k, v, g, None, state)
    parts = []
    for begin, stop in ((0, 270), (270, 270), (270, 590)):
        part = [t[:, begin:stop] for t in (q, k, v, g)]
        out, state = linear_attention(*part, None, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, end)
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v, g)]
    strided = [t.transpose(1, 2) for t in heads_first]
    again, plain = linear_attention(*strided), linear_attention(q, k, v, g)
    assert all(map(torch.equal, again, plain))

# %%
# ``gradcheck`` compares gradients with differences of the forward. Two calls
# must agree bit for bit. On a GPU, ``opcheck`` tests that the op works with
# autograd, with tensors that have no data, and ``torch.compile``:

if __name__ == "__main__":
    (q, k, v, g, state), _ = problem(torch.float64, 1, 17, 1, 2, 2)
    leaves = [t.requires_grad_() for t in (q, k, v, g, state)]
    op = partial(linear_attention, scale=0.7)
    assert torch.autograd.gradcheck(
        lambda q, k, v, g, state: op(q, k, v, g, initial_state=state),
        leaves,
        fast_mode=True,  # one direction, not each element
    )
    x, dy = problem(torch.float16, 1, 600, 2, 64, 64)
    first, again = (results_of(linear_attention, x, dy) for _ in range(2))
    assert all(map(torch.equal, first, again))

if __name__ == "__main__" and DEVICE.type == "cuda":
    (q, k, v, g, state), _ = problem(torch.float16, 1, 70, 2, 64, 64)
    leaves = [t.requires_grad_() for t in (q, k, v, g, state)]
    arguments = *leaves[:4], 0.5, leaves[4]
    print(torch.library.opcheck(linear_attention, arguments))

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    (q, k, v, g, state), _ = problem(torch.float16, 1, 5, 2, 16, 32)
    for wrong in (
        (q, k, v.float(), g),
        (q, k, v, g.half()),
        (q, k[:, :4], v, g),
    ):
        try:
            linear_attention(*wrong)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# One sequence, 16 heads of dimension 128, bfloat16. A rate is the floor's bytes
# divided by the time: forward four tensors of the size of ``q``, backward
# seven. ``Roof`` is a copy of as many. PyTorch's matrix of decays between
# chunks grows with the square of the length, so here it is timed up to 16384
# tokens. *Beside other libraries*, on the site, has 65536.

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]


def contestants(T, backward):
    """Return calls at a length, one way."""
    x = random(T)
    ops = {"Triton": output}
    if T <= 16384:
        torch.compiler.reset()
        ops["PyTorch"] = linear_attention_torch
        ops["torch.compile"] = torch.compile(
            linear_attention_torch, dynamic=False, fullgraph=True
        )
    calls = {
        name: backward_of(op, *x) if backward else partial(op, *x)
        for name, op in ops.items()
    }
    half = int(floor(T, 7 if backward else 4) * 1e6 / 2)
    source = torch.empty(half, dtype=torch.int8, device=DEVICE)
    return calls | {"Roof": partial(torch.empty_like(source).copy_, source)}


def benchmark(backward):
    times = {T: gpu_time(contestants(T, backward), 30) for T in LENGTHS}
    moved = partial(floor, tensors=7 if backward else 4)
    table = rate_table(times, "tokens", "GB/s", moved)
    print(table.to_string())
    wide = table.pivot(index="tokens", columns="series", values="GB/s")
    wide.plot(logx=True, title="backward" if backward else "forward")
    return table


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark(backward=False)

if __name__ == "__main__" and DEVICE.type == "cuda":
    results_backward = benchmark(backward=True)

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["tokens"] == 8192].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# What the kernels move can be counted. We count in tensors of the size of
# ``q``, for bfloat16 and dimensions of 128. A launch counts a tensor once, also
# if several blocks read it. A state counts as two: it is 128 x 128, and a chunk
# of ``q`` 64 x 128.
#
# The forward reads three tensors and writes one, as the floor does. If there is
# more than one segment, the launch for the ends reads keys and values once
# more. That is six for a floor of four. So a memory that is as fast as the
# roof's copy allows two thirds of the roof. The rates are below that, so memory
# is not all that the kernels wait for: within a segment, a chunk still waits
# for the state of the one before.
#
# The backward's kernel of tokens runs three times. Each time it reads three
# tensors and a state, and writes one. For dq and dk it reads one more. The
# kernel of states reads two and writes a state, and in reverse it reads a state
# more. The ends of each direction read two. That makes 34 for a floor of seven:
# a fifth of the roof at most.
#
# A forward costs the CPU some hundreds of microseconds, and a backward more
# than a thousand. With few tokens that is more than the GPU takes, and only a
# queue of other work or a CUDA graph hides it: ``cuda_graphs.py``.

# %%
# Break it
# --------
#
# As :math:`e^{G_i - G_j} = e^{G_i} e^{-G_j}`, these factors could go into
# queries and keys. One product would give the weights, with no exponential for
# each pair. Here are both, *whole* and *split*, for 64 tokens and three decays:


def chunk_torch(q, k, v, g, split):
    """Return the outputs of one chunk; the exponential may be split."""
    decay = g.cumsum(0)
    if split:
        q, k = q * decay.exp()[:, None], k * (-decay).exp()[:, None]
        return (q @ k.T).tril() @ v
    return (q @ k.T * weights(decay, decay, 0)) @ v


if __name__ == "__main__":
    q, k, v = (t[0, :, 0] for t in random(64, 1, 16, torch.float32)[:3])
    for log_decay in (-0.1, -1.0, -2.0):
        g = torch.full((64,), log_decay, device=DEVICE)
        exact = chunk_torch(*(t.double() for t in (q, k, v, g)), split=False)
        for split in (False, True):
            out = chunk_torch(q, k, v, g, split)
            error = (out - exact).abs().max().item()
            form = "split" if split else "whole"
            print(f"log decay {log_decay:4}, {form}: error {error:.1e}")
            assert (error < 1e-3) == (not split or log_decay > -2)

# %%
# After 64 tokens of the log decay -2, :math:`e^{-G_j}` is :math:`e^{128}`. In
# float32 that is infinite, and :math:`e^{G_i}` is 0. Their product is NaN. A
# test with gates near 1 does not find that.

# %%
# Go further
# ----------
#
# 1. What changes if each row of the state has a gate of its own, so that
#    :math:`g_t` is a vector of K numbers?
# 2. The *delta rule* writes only what the state does not know yet: the value is
#    :math:`v_t - S_{t-1}^\top k_t`. Why can a chunk not take the values of all
#    its tokens at once any more?
#
# To read on:
#
# * `Gated linear attention <https://arxiv.org/abs/2312.06635>`_, with a gate
#   for each row, and `Mamba-2 <https://arxiv.org/abs/2405.21060>`_.
# * `Gated delta networks <https://arxiv.org/abs/2412.06464>`_, for the delta
#   rule with a gate.
# * ``cumsum.py`` is about sums that go along, too.

# %%
# Answers
# -------
#
# **1.** The decay between two tokens is no number any more: it weighs each term
# of :math:`q_i \cdot k_j` differently. So it has to go into the operands, and
# :math:`e^{-G_j}` may overflow. One takes shorter blocks within a chunk, and
# decays since the beginning of a block.
#
# **2.** What a token writes depends on the tokens before it, those of its own
# chunk as well. Within a chunk these are linear equations whose matrix is
# triangular, and each chunk has to solve them.
