# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Correct a state by what it has wrong for a key: a recurrence in chunks, where
# each solves a triangular system, forward and backward."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "six kernels: what is serial is apart from the rest, both ways"
#
# [tool.triton-gallery.not_for]  # with Hopper's tiles; others get smaller ones
# _gated_delta_rule_states_kernel = ["sm_89", "sm_120"]
# _gated_delta_rule_flows_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _gated_delta_rule_gradients_kernel = ["sm_89", "sm_120"]
# ///
r"""
Gated delta rule
================

Linear attention has a matrix as its state. It adds each token's value to the
state, whatever stands there already. The delta rule first reads what stands
there, and then corrects only the error. So what a token writes depends on the
tokens before it. This page solves this dependence for a whole chunk of tokens
at once, as a triangular system.

After this page you can

* write a recurrence, within a chunk, as a triangular system;
* invert a triangular matrix in registers, by products of whole tiles;
* solve all chunks before any state is known;
* derive the backward, which is the same system transposed.

The recurrence is that of `gated delta networks
<https://arxiv.org/abs/2412.06464>`_; the chunks are those of `DeltaNet
<https://arxiv.org/abs/2406.06484>`_.
"""

# sphinx_gallery_tags = ["attention", "memory bound"]
import ast
import functools
import inspect
import os
from functools import partial

import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton

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

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(T, heads=16, D=128, dtype=torch.bfloat16, batch=1):
    """Return queries, keys of length 1, values, log decays and betas."""
    normal = partial(torch.randn, generator=generator, device=DEVICE)
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (normal(batch, T, heads, D) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = (normal(batch, T, heads, dtype=wide) for _ in range(2))
    g = torch.nn.functional.logsigmoid(g + 3)
    return *(t.to(dtype) for t in (q, k, v)), g, beta.sigmoid()


def prepared(q, k, v, g, beta):
    """Return, for all chunks, what does not need the state."""
    decay = g.cumsum(-1)
    since = decay[..., :, None] - decay[..., None, :]
    seen = torch.ones_like(since, dtype=torch.bool).tril()
    weights = since.masked_fill(~seen, -torch.inf).exp()
    system = (k @ k.mT * weights).tril(-1) * beta[..., None, :]
    system = system + torch.eye(k.shape[-2], device=k.device)
    wanted = torch.cat([k * decay.exp()[..., None], v], dim=-1).to(g.dtype)
    w, y = torch.linalg.solve_triangular(
        system, wanted, upper=False, unitriangular=True
    ).split([k.shape[-1], v.shape[-1]], dim=-1)
    total = decay[..., -1:]
    left = k * ((total - decay).exp() * beta)[..., None]
    p = (q @ k.mT * weights * beta[..., None, :]).to(v.dtype)
    reads = q * decay.exp()[..., None]
    tensors = w, y, left, reads
    return p, total.exp()[..., None], *(t.to(v.dtype) for t in tensors)


def one_chunk(state, p, total, w, y, left, reads):
    """Return a chunk's outputs, and the state behind it."""
    x = y - w @ state.to(w.dtype)
    out = reads @ state.to(w.dtype) + p @ x
    return out, state * total + left.mT @ x


def delta_rule_torch(q, k, v, g, beta, C=64, compiled=False):
    """Return the outputs; the length is a multiple of C."""
    first, step = prepared, one_chunk
    if compiled:
        options = {"dynamic": False, "fullgraph": True}
        first, step = (torch.compile(part, **options) for part in (first, step))
    x = [t.unflatten(1, (-1, C)).movedim(3, 1) for t in (q, k, v, g, beta)]
    chunks = [part.unbind(2) for part in first(*x)]
    batch, _, heads, K = q.shape
    state, outs = g.new_zeros(batch, heads, K, v.shape[3]), []
    for chunk in zip(*chunks, strict=True):
        out, state = step(state, *chunk)
        outs.append(out)
    out = torch.stack(outs, dim=2).movedim(1, 3).flatten(1, 2)
    return out.to(v.dtype) * K**-0.5


def floor(T, tensors=4):
    """Return the megabytes of so many tensors, and of decays and betas."""
    return 1e-6 * T * 16 * (tensors * 2 * 128 + 8)


# %%
# In PyTorch
# ----------
#
# Read ``linear_attention.py`` first: it explains the state, its decay, and
# chunks. The *delta rule* changes what a token writes. First the state
# :math:`S_{t-1}` decays by the gate :math:`e^{g_t}`. Then the token reads what
# the state has for its key :math:`k_t`. The *error* :math:`x_t` is its value
# :math:`v_t` less what it read. The token writes a part :math:`\beta_t` of the
# error for its key, so that the state has more of :math:`v_t` there:
#
# .. math:: x_t = v_t - e^{g_t} S_{t-1}^\top k_t, \qquad
#    S_t = e^{g_t} S_{t-1} + \beta_t\, k_t x_t^\top, \qquad
#    o_t = \frac{1}{\sqrt K}\, S_t^\top q_t
#
# With keys of length 1 and :math:`\beta_t = 1`, the state then has exactly
# :math:`v_t` for :math:`k_t`. In a loop over the tokens, each step reads and
# writes the state. The *floor* is to read ``q``, ``k``, ``v``, ``g`` and
# ``beta``, and to write the outputs. Tensors are (batch, length, heads,
# dimension).


def recurrence(q, k, v, g, beta, state=None, scale=None):
    """Return the outputs and the final state, token by token."""
    batch, T, heads, K = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, K, v.shape[3])
    scale, outs = K**-0.5 if scale is None else scale, []
    for t in range(T):
        state = state * g[:, t].exp()[..., None, None]
        error = v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]
        written = beta[:, t, :, None] * error
        state = state + k[:, t, :, :, None] * written[:, :, None]
        outs.append(scale * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outs, dim=1), state


if __name__ == "__main__":
    for T in (2048, 8192, 65536):
        moved = 2 * 4e-9 * T * 16 * 128 * 128  # float32, 16 heads of 128
        print(f"{T:5} tokens: {moved:5.1f} GB in {T:5} steps,", end=" ")
        print(f"floor {floor(T) / 1e3:.2f} GB")

# %%
# The first kernel
# ----------------
#
# The simplest kernel is this loop with the state in registers. No column of a
# state depends on another, so a program has a block of columns:
#
# .. code-block:: text
#
#     state S   BLOCK_V columns
#             +-----+-----+-----+-----+
#     K rows  |  S  |     |     |     |    one program for each block
#             +-----+-----+-----+-----+
#      k, q -> read, correct, read again, token by token


@triton.jit
def token_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    out_ptr,
    scale,
    T,
    HEADS,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # In int32, an offset would overflow past element 2**31.
    place = tl.program_id(axis=0).to(tl.int64)  # of a head of a batch
    offs_k = tl.arange(0, D)
    offs_v = tl.program_id(axis=1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((D, BLOCK_V), dtype=tl.float32)
    for t in range(T):
        row = (place // HEADS * T + t) * HEADS + place % HEADS
        q = tl.load(q_ptr + row * D + offs_k).to(tl.float32)
        k = tl.load(k_ptr + row * D + offs_k).to(tl.float32)
        v = tl.load(v_ptr + row * D + offs_v).to(tl.float32)
        state *= tl.exp(tl.load(g_ptr + row))
        error = v - tl.sum(state * k[:, None], axis=0)  # (BLOCK_V,)
        error *= tl.load(beta_ptr + row)
        state += k[:, None] * error[None, :]
        out = tl.sum(state * q[:, None], axis=0) * scale
        tl.store(out_ptr + row * D + offs_v, out)


def by_token(q, k, v, g, beta, BLOCK_V=16, num_warps=4):
    """Return the outputs of contiguous tensors; D is a power of two."""
    (batch, T, heads, D), out = q.shape, torch.empty_like(v)
    grid = (batch * heads, D // BLOCK_V)
    args = q, k, v, g, beta, out, D**-0.5, T, heads, D, BLOCK_V
    token_kernel[grid](*args, num_warps=num_warps)
    return out


# %%
# Is it right?
# ------------
#
# We compare with the loop, in float64. The state stays in float32, and an
# output is rounded once, to the 11 bits of float16. So an output may be off by
# :math:`2^{-11}` of itself. For the rounding of float32 we allow
# :math:`2^{-18}` of the largest output besides.

if __name__ == "__main__":
    x = random(70, heads=1, D=64, dtype=torch.float16)
    out, doubles = by_token(*x), [t.double() for t in x]
    expected, _ = recurrence(*doubles)
    error, largest = (out - expected).abs().max(), expected.abs().max()
    allowed = 2**-11 * largest
    print(f"largest error {error:.1e}, allowed {allowed:.1e}")
    torch.testing.assert_close(
        out.double(), expected, rtol=2**-11, atol=2**-18 * largest.item()
    )

# %%
# How fast?
# ---------
#
# We time 16 heads of dimension 128 in bfloat16. A rate is the bytes of the
# floor divided by the time. ``Roof`` is a copy that moves as many bytes.
# ``PyTorch`` is a loop over chunks, which the next section explains. Its two
# functions, for what comes before the loop and for a step of it, are in the
# first cell. In ``torch.compile``, both functions are compiled.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for T in (512, 1024, 2048):
        x = random(T)
        whole = torch.empty(int(floor(T) * 5e5), dtype=torch.int8).to(DEVICE)
        found = gpu_time(
            {
                "Triton": partial(by_token, *x),
                "PyTorch": partial(delta_rule_torch, *x),
                "torch.compile": partial(delta_rule_torch, *x, compiled=True),
                "Roof": partial(torch.empty_like(whole).copy_, whole),
            },
            turns=20,
        )
        print(f"{T} tokens, GB/s:", end=" ")
        print({who: round(floor(T) / times[0]) for who, times in found.items()})

# %%
# All errors of a chunk at once
# -----------------------------
#
# The kernel takes a step for each token, and none of its sums is a matrix
# product. Linear attention takes a chunk of tokens at a time for this reason.
# Here we do not know at first what the tokens of a chunk write, because each
# error depends on the errors before it. But it depends on them *linearly*. Let
# :math:`G_i` be the sum of the log decays since the chunk began, up to token
# :math:`i`, and :math:`S` the state before the chunk. Then the error of token
# :math:`i` is given by
#
# .. math:: x_i + \sum_{j < i} M_{ij}\, x_j = v_i - e^{G_i} S^\top k_i, \qquad
#    M_{ij} = e^{G_i - G_j}\, (k_i \cdot k_j)\, \beta_j
#
# For all tokens of the chunk, these are linear equations. Their matrix
# :math:`I + M` is lower triangular with ones on its diagonal, and does not
# depend on the state. The right side has two parts, and only one of them is
# multiplied by the state. So every chunk can solve for both parts before any
# state is known. With one row of :math:`X`, :math:`V` and :math:`K` for each
# token,
#
# .. math:: X = \underbrace{(I + M)^{-1} V}_{Y} - \underbrace{(I + M)^{-1}
#    \mathrm{diag}(e^G) K}_{W}\, S
#
# With its errors, a chunk is one of linear attention that has
# :math:`\beta_j x_j` as its values. The forward has three kernels. Only
# ``states`` goes from chunk to chunk:
#
# .. code-block:: text
#
#     solve      W0 Y0     W1 Y1     W2 Y2      a program for each chunk of a
#                  |         |         |        head
#                  v         v         v
#     states  S0 ----> S1 ------> S2 ------> .. a program for a block of
#                  |         |         |        columns, all chunks of a head
#                  v         v         v
#     outputs   chunk 0   chunk 1   chunk 2     a program for a block of
#                                               columns of a chunk

# %%
# How to invert a triangle?
# -------------------------
#
# A forward substitution goes row by row: 64 steps for 64 tokens, none of them a
# matrix product. But the inverses of two neighbouring triangular blocks on the
# diagonal, :math:`A` and :math:`B`, give the inverse of both together:
#
# .. math:: \begin{pmatrix} A & 0 \\ C & B \end{pmatrix}^{-1} =
#    \begin{pmatrix} A^{-1} & 0 \\ -B^{-1} C A^{-1} & B^{-1} \end{pmatrix}
#
# A block of one token is a one, which is its own inverse. Each step makes the
# blocks twice as long, so six such *doublings* invert a chunk of 64. Let
# ``inverse`` have the inverses of all blocks of one size on its diagonal, and
# let ``between`` have the blocks :math:`C` of ``M`` that stand between two of
# them. Then ``inverse - inverse @ between @ inverse`` has the inverses of the
# blocks of twice the size. All of these are whole tiles. The element of ``M``
# for two tokens :math:`i > j` is in ``between`` at one doubling: that of the
# highest bit in which :math:`i` and :math:`j` differ.


def doubled(M):
    """Return the inverse of I + M for a strictly lower triangular M."""
    C = M.shape[-1]
    i = torch.arange(C, device=M.device)
    apart = i[:, None] ^ i[None, :]
    inverse, size = torch.eye(C, dtype=M.dtype, device=M.device), 1
    while size < C:
        between = M * (apart // size == 1)
        inverse = inverse - inverse @ between @ inverse
        size *= 2
    return inverse


if __name__ == "__main__":
    _, k, _, _, beta = random(64, heads=1, dtype=torch.float64)
    k, beta = k[0, :, 0], beta[0, :, 0]
    M = (k @ k.T).tril(-1) * beta
    error = (doubled(M) @ (torch.eye(64, device=DEVICE) + M)).tril(-1).abs()
    print(f"doublings: error {error.max():.1e} in float64")
    assert error.max() < 1e-14

# %%
# The backward is the system transposed
# -------------------------------------
#
# Let :math:`h_i` be the gradient of :math:`o_i` times the scale,
# :math:`a_{ij} = e^{G_i - G_j}`, and :math:`D'` the gradient of the state after
# the chunk. What token :math:`j` writes, :math:`\beta_j x_j`, reaches the
# queries of its chunk and the state after the chunk. From both, the error
# :math:`x_j` has the gradient that it would have in linear attention. It is the
# row :math:`f_j` of a matrix :math:`F`:
#
# .. math:: f_j = \beta_j \Big( \sum_{i \ge j} a_{ij} (k_j \cdot q_i)\, h_i +
#    e^{G_C - G_j} D'^\top k_j \Big)
#
# The error :math:`x_j` also reaches the errors of later tokens. The system
# contains all of these effects: with its right side :math:`R`, the errors are
# :math:`X = (I + M)^{-1} R`. So the gradient of :math:`R` is a product with the
# transposed inverse:
#
# .. math:: \mathrm{d}V = \mathrm{d}R = (I + M)^{-\top} F, \qquad
#    \mathrm{d}M = -\,\mathrm{d}R\, X^\top
#
# The state before the chunk has the gradient
# :math:`D = e^{G_C} D' + \sum_i e^{G_i} q_i h_i^\top - W^\top F`. It is
# computed by a second serial kernel, ``flows``, which goes from the last chunk
# back to the first. The other gradients are computed within each chunk:
#
# .. math::
#
#    \begin{aligned}
#    \mathrm{d}q_i &= \sum_{j \le i} a_{ij} \beta_j (h_i \cdot x_j)\, k_j
#    + e^{G_i} S h_i \\
#    \mathrm{d}k_i^{\text{read}} &= -\sum_{j < i} a_{ij} \beta_j
#    (\mathrm{d}v_i \cdot x_j)\, k_j - e^{G_i} S\, \mathrm{d}v_i \\
#    m_j &= \sum_{i \ge j} a_{ij} (h_i \cdot x_j)\, q_i - \sum_{i > j} a_{ij}
#    (\mathrm{d}v_i \cdot x_j)\, k_i + e^{G_C - G_j} D' x_j \\
#    \mathrm{d}k_j &= \mathrm{d}k_j^{\text{read}} + \beta_j m_j, \qquad
#    \mathrm{d}\beta_j = m_j \cdot k_j
#    \end{aligned}
#
# The gradient of a key has two parts: one where the key reads, as a query with
# the gradient :math:`-\mathrm{d}v_i`, and one where it writes. A log decay acts
# on all pairs of an earlier token that writes, and of its own or a later token
# that reads. Its gradient adds up these pairs, as in ``linear_attention.py``.
# Here keys read as well as queries.

# %%
# The op
# ------
#
# Float32 and float64 have shorter chunks, because their operands take more
# registers. In half precision, the inverse of a chunk is computed with TF32,
# which has the 11 bits of float16 and the range of float32. Offsets within a
# chunk are int32, because int64 offsets would take twice the registers.
#
# The log decays since a chunk began are running sums, for which threads wait
# for each other. ``solve`` adds them up once, and the other kernels read them.
#
# The backward launches ``solve`` and ``states`` again, to have what they store.
# Then ``outputs`` computes what queries of the same chunk give each error,
# ``flows`` goes back along the chunks, ``pairs`` has what pairs of tokens give,
# and ``gradients`` the rest.

GATED_DELTA_RULE_NAMESPACE = "triton_gallery"
GATED_DELTA_RULE_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
# For the bytes of a number: the tokens of a chunk, how products of float32 are
# computed, then BLOCK_K, BLOCK_V, warps and stages of each kernel. The second
# and the fourth go along the chunks: narrow blocks give them more programs.
GATED_DELTA_RULE_TILES = {
    2: (
        (64, "tf32"),
        (128, 64, 4, 2),
        (128, 16, 4, 3),
        (64, 128, 8, 2),
        (128, 16, 8, 3),
        (128, 64, 4, 2),
        (32, 32, 8, 2),
    ),
    4: (
        (32, "tf32x3"),
        (128, 32, 8, 1),
        (128, 16, 4, 1),
        (32, 64, 4, 1),
        (128, 16, 4, 1),
        (128, 32, 8, 1),
        (16, 32, 4, 1),
    ),
    8: (
        (16, "ieee"),
        (128, 16, 4, 1),
        (128, 16, 8, 1),
        (16, 16, 4, 1),
        (128, 16, 8, 1),
        (128, 16, 4, 1),
        (16, 16, 4, 1),
    ),
}
# The same of each kernel for half precision on Hopper. For tiles narrower than
# 128 bytes, the assembler of Triton 3.6 and 3.7 may make code that is wrong
# there: wrong_code.py shows it. The last kernel has too few registers for wider
# ones, and a test reads its machine code.
GATED_DELTA_RULE_HOPPER = (
    (128, 128, 4, 1),
    (128, 64, 4, 3),
    (128, 64, 4, 1),
    (128, 64, 4, 2),
    (128, 64, 4, 2),
    (32, 32, 4, 2),
)


@triton.jit
def _gated_delta_rule_tokens(slot, T, HEADS, CHUNK: tl.constexpr):
    """Return a chunk's first row, its rows, and which of them exist."""
    chunks = tl.cdiv(T, CHUNK)
    start = slot % chunks * CHUNK
    place = slot // chunks  # of a head of a batch
    begin = (place // HEADS * T + start) * HEADS + place % HEADS
    rows = tl.arange(0, CHUNK) * HEADS  # since begin; in int32 they take less
    return begin, rows, tl.arange(0, CHUNK) < T - start


@triton.jit
def _gated_delta_rule_decays(decay_ptr, slot, CHUNK: tl.constexpr):
    """Return the log decays since a chunk began, in base 2, and the last."""
    decays = decay_ptr + slot * CHUNK
    return tl.load(decays + tl.arange(0, CHUNK)), tl.load(decays + CHUNK - 1)


@triton.jit
def _gated_delta_rule_weights(decay, CHUNK: tl.constexpr):
    """Return the decay from each token of a chunk to each one not before it."""
    offs = tl.arange(0, CHUNK)
    # For later tokens the exponent may be large: they are masked there.
    seen = offs[:, None] >= offs[None, :]
    since = decay[:, None] - decay[None, :]  # (CHUNK, CHUNK)
    return tl.exp2(tl.where(seen, since, -float("inf")))


@triton.jit
def _gated_delta_rule_solve_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    decay_ptr,
    inverse_ptr,
    w_ptr,
    y_ptr,
    T,
    HEADS,
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a chunk's decays, and its inverse times keys and values."""
    # In int32, an offset would overflow past element 2**31.
    slot = tl.program_id(axis=0).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
    # What is decayed by 2**-160 is zero in float32, by 2**-1200 in float64. The
    # bound keeps -inf out: a difference of infinities is NaN.
    LOWEST: tl.constexpr = -1200.0 if ACC.is_fp64() else -160.0
    # Tokens past the end have a log decay of 0: they leave the state alone.
    g = tl.load(g_ptr + begin + rows, mask=inside, other=0.0)
    g *= 1.4426950408889634  # of base 2
    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN
    decay = tl.cumsum(g, axis=0)  # (CHUNK,)
    tl.store(decay_ptr + slot * CHUNK + tl.arange(0, CHUNK), decay)
    beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
    offs_k = tl.arange(0, BLOCK_K)
    keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
    keys_mask = inside[:, None] & (offs_k[None, :] < K)
    k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
    pairs = tl.dot(k, k.T, input_precision=PRECISION, out_dtype=ACC)
    pairs *= _gated_delta_rule_weights(decay, CHUNK) * beta[None, :]
    # Tokens i and j < i are in neighbouring blocks of the same pair of blocks
    # if the highest bit in which they differ is that of the blocks' size. Those
    # with j > i have a weight of 0.
    offs = tl.arange(0, CHUNK)
    apart = offs[:, None] ^ offs[None, :]  # (CHUNK, CHUNK)
    inverse = tl.where(apart == 0, 1.0, 0.0).to(ACC)
    inverse -= tl.where(apart == 1, pairs, 0.0)
    # Blocks of 2, 4, ..., 32 become twice as long. In a shorter chunk no tokens
    # are left for the last doublings: they change nothing.
    for level in range(1, 6):
        between = tl.where(apart >> level == 1, pairs, 0.0)
        between = tl.dot(
            between, inverse, input_precision=PRECISION, out_dtype=ACC
        )
        inverse -= tl.dot(
            inverse, between, input_precision=PRECISION, out_dtype=ACC
        )
    inverse = inverse.to(k.dtype)
    tile = rows[:, None] * CHUNK + offs[None, :]  # (CHUNK, CHUNK)
    tl.store(inverse_ptr + begin * CHUNK + tile, inverse, mask=inside[:, None])
    k = (k * tl.exp2(decay)[:, None]).to(k.dtype)
    w = tl.dot(inverse, k, input_precision=PRECISION, out_dtype=ACC)
    tl.store(w_ptr + begin * K + keys, w, mask=keys_mask)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        mask = inside[:, None] & (offs_v[None, :] < V)
        v = tl.load(v_ptr + begin * V + values, mask=mask, other=0.0)
        y = tl.dot(inverse, v, input_precision=PRECISION, out_dtype=ACC)
        tl.store(y_ptr + begin * V + values, y, mask=mask)


@triton.jit
def _gated_delta_rule_states_kernel(
    k_ptr,
    decay_ptr,
    beta_ptr,
    w_ptr,
    y_ptr,
    first_ptr,
    states_ptr,
    x_ptr,
    last_ptr,
    T,
    HEADS,
    K: tl.constexpr,
    V: tl.constexpr,
    STARTED: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the state before each chunk, each token's error, and the last."""
    # Columns of the state do not meet, so a head has a program for each block.
    blocks = tl.cdiv(V, BLOCK_V)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (tl.program_id(axis=0) // blocks).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    tile = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=ACC)
    if STARTED:
        state = tl.load(first_ptr + place * K * V + tile, mask=mask, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    for chunk in range(chunks):
        slot = place * chunks + chunk
        # Only the stored copy is rounded. The state in registers goes on.
        tl.store(states_ptr + slot * K * V + tile, state, mask=mask)
        begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
        decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
        beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        values_mask = inside[:, None] & (offs_v[None, :] < V)
        w = tl.load(w_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        y = tl.load(y_ptr + begin * V + values, mask=values_mask, other=0.0)
        # The tensor cores take both operands in the type of the inputs.
        read = state.to(k.dtype)
        # The system was solved without the state. Here the state comes in.
        x = y - tl.dot(w, read, input_precision=PRECISION, out_dtype=ACC)
        tl.store(x_ptr + begin * V + values, x, mask=values_mask)
        # What a token writes decays until the chunk ends, as the state does.
        x = (x * (tl.exp2(total - decay) * beta)[:, None]).to(k.dtype)
        state *= tl.exp2(total)
        state = tl.dot(k.T, x, state, input_precision=PRECISION, out_dtype=ACC)
    tl.store(last_ptr + place * K * V + tile, state, mask=mask)


@triton.jit
def _gated_delta_rule_outputs_kernel(
    q_ptr,
    k_ptr,
    x_ptr,
    decay_ptr,
    beta_ptr,
    states_ptr,
    out_ptr,
    T,
    HEADS,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a chunk's outputs, from its errors and the state before it.

    Backward, x are the gradients of outputs. Store what they are for each token
    that is read by queries of the same chunk.
    """
    # Programs side by side share a chunk, so its keys stay in the L2 cache.
    blocks = tl.cdiv(V, BLOCK_V)
    slot = (tl.program_id(axis=0) // blocks).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
    decay, _ = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    out = tl.zeros((CHUNK, BLOCK_V), dtype=ACC)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + begin * K + keys, mask=mask, other=0.0)
        k = tl.load(k_ptr + begin * K + keys, mask=mask, other=0.0)
        p = tl.dot(q, k.T, p, input_precision=PRECISION, out_dtype=ACC)
        if not BACKWARD:
            cells = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
            fits = (offs_k[:, None] < K) & (offs_v[None, :] < V)
            place = slot * K * V
            state = tl.load(states_ptr + place + cells, mask=fits, other=0.0)
            out = tl.dot(
                q, state, out, input_precision=PRECISION, out_dtype=ACC
            )
    # A query sees what no later token wrote, and what decayed since.
    p *= _gated_delta_rule_weights(decay, CHUNK) * SCALE
    if BACKWARD:
        p = p.T  # from queries back to what they read
    else:
        p *= tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)[None, :]
        out *= tl.exp2(decay)[:, None] * SCALE
    values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
    values_mask = inside[:, None] & (offs_v[None, :] < V)
    x = tl.load(x_ptr + begin * V + values, mask=values_mask, other=0.0)
    p = p.to(x.dtype)
    out = tl.dot(p, x, out, input_precision=PRECISION, out_dtype=ACC)
    tl.store(out_ptr + begin * V + values, out, mask=values_mask)


@triton.jit
def _gated_delta_rule_flows_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    w_ptr,
    near_ptr,
    grad_last_ptr,
    flows_ptr,
    f_ptr,
    dfirst_ptr,
    T,
    HEADS,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Go back: store the gradient of the state behind each chunk.

    Also store f, the gradient of each error, but for what later tokens of the
    chunk read of it with their keys.
    """
    blocks = tl.cdiv(V, BLOCK_V)
    offs_v = tl.program_id(axis=0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    place = (tl.program_id(axis=0) // blocks).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    tile = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
    mask = (offs_k[:, None] < K) & (offs_v[None, :] < V)
    # The last state is a result, so the walk begins with its gradient.
    flow = tl.load(grad_last_ptr + place * K * V + tile, mask=mask, other=0.0)
    chunks = tl.cdiv(T, CHUNK)
    for step in range(chunks):
        slot = place * chunks + chunks - 1 - step
        tl.store(flows_ptr + slot * K * V + tile, flow, mask=mask)
        begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
        decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
        beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        values_mask = inside[:, None] & (offs_v[None, :] < V)
        k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        # What a token wrote reaches later chunks, and queries of its own.
        read = flow.to(k.dtype)
        f = tl.dot(k, read, input_precision=PRECISION, out_dtype=ACC)
        f *= tl.exp2(total - decay)[:, None]
        f += tl.load(near_ptr + begin * V + values, mask=values_mask, other=0.0)
        f *= beta[:, None]
        tl.store(f_ptr + begin * V + values, f, mask=values_mask)
        # What the queries read of the state, less what the keys did.
        q = tl.load(q_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        grad = tl.load(
            grad_ptr + begin * V + values, mask=values_mask, other=0.0
        )
        grad = (grad * (tl.exp2(decay) * SCALE)[:, None]).to(k.dtype)
        flow *= tl.exp2(total)
        flow = tl.dot(q.T, grad, flow, input_precision=PRECISION, out_dtype=ACC)
        w = tl.load(w_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        f = (-f).to(k.dtype)
        flow = tl.dot(w.T, f, flow, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dfirst_ptr + place * K * V + tile, flow, mask=mask)


@triton.jit
def _gated_delta_rule_pairs_kernel(
    grad_ptr,
    decay_ptr,
    inverse_ptr,
    x_ptr,
    f_ptr,
    dv_ptr,
    queries_ptr,
    errors_ptr,
    T,
    HEADS,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the gradients of values, and of products of queries and keys."""
    slot = tl.program_id(axis=0).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
    decay, _ = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    offs = tl.arange(0, CHUNK)
    tile = rows[:, None] * CHUNK + offs[None, :]  # (CHUNK, CHUNK)
    inverse_ptrs = inverse_ptr + begin * CHUNK + tile
    inverse = tl.load(inverse_ptrs, mask=inside[:, None], other=0.0)
    # Sums over all columns of V: too many for registers at once.
    queries = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    errors = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
        mask = inside[:, None] & (offs_v[None, :] < V)
        grad = tl.load(grad_ptr + begin * V + values, mask=mask, other=0.0)
        x = tl.load(x_ptr + begin * V + values, mask=mask, other=0.0)
        f = tl.load(f_ptr + begin * V + values, mask=mask, other=0.0)
        # The system of the forward, transposed.
        dv = tl.dot(inverse.T, f, input_precision=PRECISION, out_dtype=ACC)
        tl.store(dv_ptr + begin * V + values, dv, mask=mask)
        queries = tl.dot(
            grad, x.T, queries, input_precision=PRECISION, out_dtype=ACC
        )
        dv = dv.to(x.dtype)
        errors = tl.dot(
            dv, x.T, errors, input_precision=PRECISION, out_dtype=ACC
        )
    # A query reads what its own token writes, a key only what was before.
    weights = _gated_delta_rule_weights(decay, CHUNK)
    errors = tl.where(offs[:, None] > offs[None, :], errors, 0.0) * -weights
    queries *= weights * SCALE
    tl.store(queries_ptr + begin * CHUNK + tile, queries, mask=inside[:, None])
    tl.store(errors_ptr + begin * CHUNK + tile, errors, mask=inside[:, None])


@triton.jit
def _gated_delta_rule_gradients_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    x_ptr,
    dv_ptr,
    queries_ptr,
    errors_ptr,
    states_ptr,
    flows_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    T,
    HEADS,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the other gradients of the tokens of a chunk."""
    slot = tl.program_id(axis=0).to(tl.int64)
    begin, rows, inside = _gated_delta_rule_tokens(slot, T, HEADS, CHUNK)
    decay, total = _gated_delta_rule_decays(decay_ptr, slot, CHUNK)
    beta = tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)
    offs = tl.arange(0, CHUNK)
    dbeta = tl.zeros((CHUNK,), dtype=ACC)
    dg = tl.zeros((CHUNK,), dtype=ACC)
    far = tl.zeros((CHUNK,), dtype=ACC)
    through = tl.zeros((BLOCK_K,), dtype=ACC)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        dq = tl.zeros((CHUNK, BLOCK_K), dtype=ACC)
        read = tl.zeros((CHUNK, BLOCK_K), dtype=ACC)
        written = tl.zeros((CHUNK, BLOCK_K), dtype=ACC)
        for start in range(0, V, BLOCK_V):
            offs_v = start + tl.arange(0, BLOCK_V)
            values = rows[:, None] * V + offs_v[None, :]  # (CHUNK, BLOCK_V)
            mask = inside[:, None] & (offs_v[None, :] < V)
            grad = tl.load(grad_ptr + begin * V + values, mask=mask, other=0.0)
            dv = tl.load(dv_ptr + begin * V + values, mask=mask, other=0.0)
            x = tl.load(x_ptr + begin * V + values, mask=mask, other=0.0)
            cells = offs_k[:, None] * V + offs_v[None, :]  # (BLOCK_K, BLOCK_V)
            fits = (offs_k[:, None] < K) & (offs_v[None, :] < V)
            place = slot * K * V
            state = tl.load(states_ptr + place + cells, mask=fits, other=0.0)
            flow = tl.load(flows_ptr + place + cells, mask=fits, other=0.0)
            # What passes the whole chunk decays by all of its gates.
            through += tl.sum(state.to(ACC) * flow, axis=1)
            dq = tl.dot(
                grad, state.T, dq, input_precision=PRECISION, out_dtype=ACC
            )
            read = tl.dot(
                dv, state.T, read, input_precision=PRECISION, out_dtype=ACC
            )
            written = tl.dot(
                x, flow.T, written, input_precision=PRECISION, out_dtype=ACC
            )
        keys = rows[:, None] * K + offs_k[None, :]  # (CHUNK, BLOCK_K)
        keys_mask = inside[:, None] & (offs_k[None, :] < K)
        q = tl.load(q_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        k = tl.load(k_ptr + begin * K + keys, mask=keys_mask, other=0.0)
        tile = rows[:, None] * CHUNK + offs[None, :]  # (CHUNK, CHUNK)
        queries = tl.load(
            queries_ptr + begin * CHUNK + tile, mask=inside[:, None], other=0.0
        )
        errors = tl.load(
            errors_ptr + begin * CHUNK + tile, mask=inside[:, None], other=0.0
        )
        # Queries and keys of the same chunk that read what a token wrote
        near = tl.dot(queries.T, q, input_precision=PRECISION, out_dtype=ACC)
        near = tl.dot(
            errors.T, k, near, input_precision=PRECISION, out_dtype=ACC
        )
        written *= tl.exp2(total - decay)[:, None]
        # What a token writes is beta times an outer product with its key.
        dbeta += tl.sum((written + near) * k, axis=1)
        scaled = (k * beta[:, None]).to(k.dtype)
        # Rounded as where dq and read have it: a token's own read cancels.
        dg -= tl.sum(near * scaled, axis=1)
        written *= beta[:, None]
        near *= beta[:, None]
        far += tl.sum(written * k, axis=1)
        dq *= tl.exp2(decay)[:, None] * SCALE
        dq = tl.dot(
            queries, scaled, dq, input_precision=PRECISION, out_dtype=ACC
        )
        tl.store(dq_ptr + begin * K + keys, dq, mask=keys_mask)
        read *= -tl.exp2(decay)[:, None]
        read = tl.dot(
            errors, scaled, read, input_precision=PRECISION, out_dtype=ACC
        )
        dg += tl.sum(dq * q + read * k, axis=1)
        dk = read + written + near
        tl.store(dk_ptr + begin * K + keys, dk, mask=keys_mask)
    tl.store(dbeta_ptr + begin + rows, dbeta, mask=inside)
    # A log decay acts on each pair of a token that writes and a later one that
    # reads, around it: both in this chunk, one of them, or none.
    dg = tl.cumsum(dg, axis=0, reverse=True) + tl.cumsum(far, axis=0) - far
    dg += tl.sum(through, axis=0) * tl.exp2(total)
    tl.store(dg_ptr + begin + rows, dg, mask=inside)


GATED_DELTA_RULE_KERNELS = (
    _gated_delta_rule_solve_kernel,
    _gated_delta_rule_states_kernel,
    _gated_delta_rule_outputs_kernel,
    _gated_delta_rule_flows_kernel,
    _gated_delta_rule_pairs_kernel,
    _gated_delta_rule_gradients_kernel,
)


def _gated_delta_rule_check(q, k, v, g, beta, initial_state):
    name = "gated_delta_rule"
    if q.dtype not in GATED_DELTA_RULE_DTYPES:
        raise TypeError(f"{name} takes float tensors, not {q.dtype}")
    wide = torch.promote_types(q.dtype, torch.float32)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        given["initial_state"] = initial_state
    kinds = dict.fromkeys(given, wide) | dict.fromkeys("qkv", q.dtype)
    found = {who: (t.dtype, t.device) for who, t in given.items()}
    if found != {who: (kind, q.device) for who, kind in kinds.items()}:
        text = ", ".join(
            f"{who} {t.dtype} on {t.device}" for who, t in given.items()
        )
        raise TypeError(
            f"{name} takes q, k and v of one dtype, g, beta and the initial "
            f"state of {wide}, on one device, not {text}"
        )
    fits = (
        q.ndim == v.ndim == 4
        and q.shape == k.shape
        and q.shape[:3] == v.shape[:3] == g.shape == beta.shape
        and q.shape[2] < 65536
        and 1 <= q.shape[3] <= 128
        and 1 <= v.shape[3] <= 256
    )
    if fits and initial_state is not None:
        batch, _, heads, K = q.shape
        fits = initial_state.shape == (batch, heads, K, v.shape[3])
    if not fits:
        text = ", ".join(f"{who} {tuple(t.shape)}" for who, t in given.items())
        raise ValueError(
            f"{name} takes q and k of (batch, length, heads, K), v of (batch, "
            "length, heads, V), g and beta of (batch, length, heads) and an "
            "initial state of (batch, heads, K, V), with fewer than 65536 "
            f"heads, K up to 128 and V up to 256, not {text}"
        )


def _gated_delta_rule_read(*tensors):
    """Return tensors as the kernels read them."""
    tensors = [t.contiguous() for t in tensors]
    if triton.knobs.runtime.interpret and tensors[0].dtype == torch.bfloat16:
        # The interpreter would multiply the bits as if they were integers.
        tensors = [t.float() for t in tensors]
    return tensors


@functools.cache
def _gated_delta_rule_is_hopper(device):
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(device).major == 9


def _gated_delta_rule_call(
    kernels, which, q, v, programs, parts, *pointers, **constants
):
    """Launch a kernel with its tile, for each part of the values if asked."""
    (_, T, heads, K), V = q.shape, int(v.shape[3])
    K = int(K)  # torch.compile would keep it open, and a constant cannot be
    (CHUNK, PRECISION), *tiles = GATED_DELTA_RULE_TILES[q.dtype.itemsize]
    least = 16
    if q.dtype.itemsize == 2 and _gated_delta_rule_is_hopper(q.device):
        tiles, least = GATED_DELTA_RULE_HOPPER, 64
    most_k, most_v, num_warps, num_stages = tiles[which]
    BLOCK_V = min(most_v, max(least, triton.next_power_of_2(V)))
    grid = (programs * (triton.cdiv(V, BLOCK_V) if parts else 1),)
    kernels[which][grid](
        *pointers,
        T=T,
        HEADS=heads,
        K=K,
        V=V,
        ACC=tl.float64 if q.dtype == torch.float64 else tl.float32,
        PRECISION=PRECISION,
        CHUNK=CHUNK,
        BLOCK_K=min(most_k, max(least, triton.next_power_of_2(K))),
        BLOCK_V=BLOCK_V,
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )


def _gated_delta_rule_states(kernels, q, k, v, g, beta, first):
    """Return what does not need the queries: states, errors and the like."""
    (batch, T, heads, K), V = q.shape, v.shape[3]
    CHUNK = GATED_DELTA_RULE_TILES[q.dtype.itemsize][0][0]
    chunks = triton.cdiv(T, CHUNK)
    inverse = k.new_empty(batch, T, heads, CHUNK)
    w, y, x = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    states = k.new_empty(batch, heads, chunks, K, V)
    decay = g.new_empty(batch, heads, chunks, CHUNK)
    last = g.new_empty(batch, heads, K, V)
    pointers = k, v, g, beta, decay, inverse, w, y
    programs = batch * heads * chunks
    _gated_delta_rule_call(kernels, 0, q, v, programs, False, *pointers)
    pointers = k, decay, beta, w, y, last if first is None else first
    _gated_delta_rule_call(
        kernels,
        1,
        q,
        v,
        batch * heads,
        True,
        *pointers,
        states,
        x,
        last,
        STARTED=first is not None,
    )
    return decay, inverse, w, states, x, last, programs


def _gated_delta_rule_launch(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    scale=None,
    kernels=GATED_DELTA_RULE_KERNELS,
):
    _gated_delta_rule_check(q, k, v, g, beta, initial_state)
    dtype, first = q.dtype, initial_state
    if q.numel() == 0:  # also without tokens: the state stays
        shape = q.shape[0], q.shape[2], q.shape[3], v.shape[3]
        last = g.new_zeros(shape) if first is None else first
        # A copy, as an op may not return its input.
        last = last.clone(memory_format=torch.contiguous_format)
        return v.new_empty(v.shape), last
    q, k, v = _gated_delta_rule_read(q, k, v)
    g, beta = g.contiguous(), beta.contiguous()
    first = None if first is None else first.contiguous()
    # As a constant, it keeps its 53 bits. An argument has 24.
    SCALE = int(q.shape[3]) ** -0.5 if scale is None else scale
    out = torch.empty_like(v)
    # Triton launches on the current GPU, which may not be that of q.
    with torch.accelerator.device_index(q.device.index):
        decay, _, _, states, x, last, programs = _gated_delta_rule_states(
            kernels, q, k, v, g, beta, first
        )
        pointers = q, k, x, decay, beta, states, out
        constants = {"SCALE": SCALE, "BACKWARD": False}
        _gated_delta_rule_call(
            kernels, 2, q, v, programs, True, *pointers, **constants
        )
    return out.to(dtype), last


def _gated_delta_rule_backward_launch(
    grad,
    grad_last,
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    scale,
    kernels=GATED_DELTA_RULE_KERNELS,
):
    dtype, first = q.dtype, initial_state
    dg, dbeta = (t.new_empty(t.shape) for t in (g, beta))
    if q.numel() == 0:
        grads = [t.new_empty(t.shape) for t in (q, k, v)]
        return *grads, dg, dbeta, grad_last.clone()
    q, k, v, grad = _gated_delta_rule_read(q, k, v, grad)
    g, beta, grad_last = (t.contiguous() for t in (g, beta, grad_last))
    first = None if first is None else first.contiguous()
    SCALE = int(q.shape[3]) ** -0.5 if scale is None else scale
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    near, f, dfirst = (torch.empty_like(t) for t in (v, v, grad_last))
    with torch.accelerator.device_index(q.device.index):
        # Computed again: to keep them would take more memory than q, k and v.
        decay, inverse, w, states, x, _, programs = _gated_delta_rule_states(
            kernels, q, k, v, g, beta, first
        )
        flows = torch.empty_like(states)
        queries, errors = torch.empty_like(inverse), torch.empty_like(inverse)
        call = functools.partial(_gated_delta_rule_call, SCALE=SCALE)
        pointers = q, k, grad, decay, beta, states, near
        call(kernels, 2, q, v, programs, True, *pointers, BACKWARD=True)
        pointers = grad, q, k, decay, beta, w, near, grad_last
        pointers = *pointers, flows, f, dfirst
        heads = q.shape[0] * q.shape[2]
        call(kernels, 3, q, v, heads, True, *pointers)
        pointers = grad, decay, inverse, x, f, dv, queries, errors
        call(kernels, 4, q, v, programs, False, *pointers)
        pointers = grad, q, k, decay, beta, x, dv, queries, errors
        pointers = *pointers, states, flows, dq, dk, dg, dbeta
        call(kernels, 5, q, v, programs, False, *pointers)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dg, dbeta, dfirst


@triton_op(f"{GATED_DELTA_RULE_NAMESPACE}::gated_delta_rule", mutates_args={})
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the gated delta rule, and its final state.

    In each head a state S of (K, V) decays, and each token corrects what the
    state has for its key: with S = exp(g_t) * S_(t-1) and the error v_t - S.T @
    k_t, S_t = S + beta_t * outer(k_t, error), and the output is scale * S_t.T @
    q_t, with a scale of 1 / sqrt(K) if none is given; the kernels are compiled
    for each scale. Takes q and k of (batch, length, heads, K), v of (batch,
    length, heads, V), with fewer than 65536 heads, K up to 128 and V up to 256,
    all of float16, bfloat16, float32 or float64; the log decays g and the
    factors beta of (batch, length, heads) and the initial state of (batch,
    heads, K, V), zeros if not given, all in float32, or float64 for float64. It
    copies what is not contiguous. The log decays are at most 0, and beta times
    the squared length of a key is from 0 to 2. That is not checked: beyond it,
    states grow, and results may be infinite or NaN. Returns the outputs, of the
    shape and dtype of v, and the state after the last token, of the shape and
    dtype of the initial one. Both are contiguous, with the same bits each time.

    Within chunks of 64 tokens (32 for float32, 16 for float64) what a token
    writes comes from the inverse of a triangular matrix. It is computed in
    TF32 and rounded to the dtype of q, for float16 and bfloat16, as are errors
    and the states between chunks: float16 needs those below 65504. Products of
    float32 are computed as three products of TF32. A NaN or an infinity may
    reach earlier tokens of its chunk. A g below -110 (-831 for float64) counts
    as that; -inf ends what was before.

    Both results pass gradients on to q, k, v, g, beta and the initial state,
    with the same bits each time. These have no gradient themselves. Raises
    TypeError for other dtypes and for tensors on different devices, and
    ValueError for other shapes. The methods: https://arxiv.org/abs/2412.06464,
    https://arxiv.org/abs/2406.06484
    """
    return _gated_delta_rule_launch(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale,
        (
            wrap_triton(_gated_delta_rule_solve_kernel),
            wrap_triton(_gated_delta_rule_states_kernel),
            wrap_triton(_gated_delta_rule_outputs_kernel),
        ),
    )


@triton_op(
    f"{GATED_DELTA_RULE_NAMESPACE}::gated_delta_rule_backward", mutates_args={}
)
def gated_delta_rule_backward(
    grad: torch.Tensor,
    grad_last: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    scale: float | None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """Return the gradients of q, k, v, g, beta and the initial state.

    Takes those of both results and what ``gated_delta_rule`` took, and checks
    none of it. The gradients have no gradient themselves.
    """
    return _gated_delta_rule_backward_launch(
        grad,
        grad_last,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale,
        (
            wrap_triton(_gated_delta_rule_solve_kernel),
            wrap_triton(_gated_delta_rule_states_kernel),
            wrap_triton(_gated_delta_rule_outputs_kernel),
            wrap_triton(_gated_delta_rule_flows_kernel),
            wrap_triton(_gated_delta_rule_pairs_kernel),
            wrap_triton(_gated_delta_rule_gradients_kernel),
        ),
    )


def _gated_delta_rule_setup(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gated_delta_rule_gradient(ctx, grad, grad_last):
    *tensors, first = ctx.saved_tensors
    *grads, dfirst = gated_delta_rule_backward(
        grad, grad_last, *tensors, first, ctx.scale
    )
    return *grads, None if first is None else dfirst, None


gated_delta_rule.register_autograd(
    _gated_delta_rule_gradient, setup_context=_gated_delta_rule_setup
)

# On a GPU a call goes to the launcher; all else goes on to the triton_op.
GATED_DELTA_RULE_LIBRARY = Library(GATED_DELTA_RULE_NAMESPACE, "FRAGMENT")
GATED_DELTA_RULE_LIBRARY.impl(
    "gated_delta_rule", _gated_delta_rule_launch, "CUDA"
)
GATED_DELTA_RULE_LIBRARY.impl(
    "gated_delta_rule_backward", _gated_delta_rule_backward_launch, "CUDA"
)

# %%
# What did the chunks gain? The table has the time of the forward and of the
# backward, in microseconds, and the statements of the kernels. Its last line is
# the backward of the chunks in PyTorch, through autograd.


def statements(*kernels):
    """Count the statements of kernels, but for their heads and texts."""
    trees = (ast.parse(inspect.getsource(kernel.fn)) for kernel in kernels)
    nodes = [node for tree in trees for node in ast.walk(tree.body[0])]
    texts = sum(bool(kernel.fn.__doc__) for kernel in kernels)
    found = sum(isinstance(node, ast.stmt) for node in nodes)
    return found - texts - len(kernels)


def output(*tensors):
    return gated_delta_rule(*tensors)[0]


def backward_of(op, *tensors):
    """Return a call that computes an op's gradients through autograd."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = op(*leaves)
    grad = torch.ones_like(out)
    grads = partial(torch.autograd.grad, retain_graph=True)
    return partial(grads, out, leaves, grad)


HELPERS = (
    _gated_delta_rule_tokens,
    _gated_delta_rule_decays,
    _gated_delta_rule_weights,
)
STEPS = {
    "first kernel": (by_token, token_kernel),
    "the op": (output, *HELPERS, *GATED_DELTA_RULE_KERNELS[:3]),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(
        index=[*STEPS, "the op, backward", "PyTorch, backward"]
    )
    counts = [statements(*step[1:]) for step in STEPS.values()]
    both = statements(*HELPERS, *GATED_DELTA_RULE_KERNELS)
    ladder["statements"] = [*counts, both, 0]
    for T in (2048, 8192):
        x = random(T)
        tried = {who: partial(step[0], *x) for who, step in STEPS.items()}
        tried["the op, backward"] = backward_of(output, *x)
        tried["PyTorch, backward"] = backward_of(delta_rule_torch, *x)
        found = gpu_time(tried, turns=10)
        ladder[f"{T} tokens"] = [round(1e3 * found[who][0]) for who in tried]
        del tried, x
    print(ladder.to_string())

# %%
# Proof
# -----
#
# We compare outputs, final states and all gradients with those of the loop in
# float64. A rounding error is in the state, and so reaches later tokens, whose
# own values may be small. So an error is not measured by its own element, but
# by the largest element of a result: we allow four roundings of the largest. A
# rounding is :math:`2^{-11}` in float16. In bfloat16 it is :math:`2^{-8}`, and
# we allow twice as much. Of float32 and float64 we ask for 20 and 48 bits.
# (Without a GPU, the op computes bfloat16 in float32, and rounds at the end.)
# The sums of log decays are rounded as well, and we allow for their rounding
# too. The gradient of ``g`` is a sum of terms that cancel, so there the largest
# term counts as well.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-20,
    torch.float64: 2.0**-48,
}


def results_of(op, tensors, grads, scale=None):
    """Return the two results of an op, and the gradients of all it takes."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = op(*leaves, scale)
    return *found, *torch.autograd.grad(found, leaves, grads)


def worst(found, tensors, grads, scale=None):
    """Return the largest error, as a part of what is allowed."""
    x, dy = ([t.double() for t in group] for group in (tensors, grads))
    expected = results_of(recurrence, x, dy, scale)
    sizes = [t.abs().max() for t in expected]
    terms = [(x[i] * expected[2 + i]).abs().sum(-1) for i in range(2)]
    sizes[5] = sizes[5] + sum(terms).max()
    eps = EPS[found[0].dtype]
    # What is beyond the bound of a log decay is cut off.
    sums = x[3].abs().clamp(max=850).sum(1).max().item()
    eps += torch.finfo(found[1].dtype).eps * sums
    errors = [
        (one.double() - right).abs().max() / (4 * eps * size + 1e-30)
        for one, right, size in zip(found, expected, sizes, strict=True)
    ]
    return torch.stack(errors).max().item()  # NaN, if there is any


def problem(dtype, batch, T, heads, K, V, gate=2.0):
    """Return what the op takes, and gradients of what it returns."""
    wide = torch.promote_types(dtype, torch.float32)
    normal = partial(torch.randn, generator=generator, device=DEVICE)
    q, k = (normal(batch, T, heads, K) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    v, grad = (normal(batch, T, heads, V).to(dtype) for _ in range(2))
    g = torch.nn.functional.logsigmoid(normal(batch, T, heads) + gate)
    beta = normal(batch, T, heads).sigmoid()
    state, dlast = (normal(batch, heads, K, V).to(wide) for _ in range(2))
    tensors = q.to(dtype), k.to(dtype), v, g.to(wide), beta.to(wide), state
    return [*tensors], [grad, dlast]


def prove(dtype, *shape, gate=2.0, scale=None):
    tensors, grads = problem(dtype, *shape, gate=gate)
    found = results_of(gated_delta_rule, tensors, grads, scale)
    for one, t in zip(found, (tensors[2], tensors[5], *tensors), strict=True):
        assert (one.shape, one.dtype) == (t.shape, t.dtype)
    error = worst(found, tensors, grads, scale)
    assert error <= 1, (dtype, shape, error)
    return error


SHAPES = [  # batch, length, heads, K, V
    (1, 70, 2, 20, 40),
    (1, 66, 1, 128, 128),
    (2, 1, 1, 16, 16),
]

if __name__ == "__main__":
    for dtype in EPS:  # each shape and dtype compiles six kernels
        shapes = SHAPES if dtype == torch.bfloat16 else SHAPES[:1]
        errors = [prove(dtype, *shape) for shape in shapes]
        print(f"{dtype}: at most {max(errors):.2f} of what is allowed")
    prove(torch.float32, 1, 40, 1, 32, 32, scale=0.5)
else:  # imported: a glance
    prove(torch.float32, 1, 40, 1, 16, 16)

# %%
# The gates may be near 1, or near 0, or 0. With a log decay of ``-inf``, a
# sequence begins again. With a ``beta`` of 0, a token writes nothing, but its
# ``beta`` has a gradient:

if __name__ == "__main__":
    for gate in (20.0, -10.0, -100.0):
        prove(torch.float32, 1, 40, 1, 32, 32, gate=gate)
    x, dy = problem(torch.float32, 1, 70, 1, 32, 32)
    x[4][:, 20:40] = 0
    found = results_of(gated_delta_rule, x, dy)
    assert worst(found, x, dy) <= 1
    assert (found[6][:, 20:40] != 0).all()
    q, k, v, g, beta, state = x
    g[:, 30] = -torch.inf
    out, last = gated_delta_rule(q, k, v, g, beta, state)
    again, end = gated_delta_rule(*(t[:, 30:] for t in (q, k, v, g, beta)))
    torch.testing.assert_close(out[:, 30:], again, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(last, end, rtol=1e-3, atol=1e-4)

# %%
# A sequence in parts, with the state handed over, gives the same as the whole
# sequence. A part without tokens leaves the state as it is. Inputs may have any
# strides:

if __name__ == "__main__":
    x, _ = problem(torch.float64, 1, 60, 1, 16, 16)
    *tokens, state = x
    whole, end = gated_delta_rule(*tokens, state)
    parts = []
    for begin, stop in ((0, 40), (40, 40), (40, 60)):
        part = [t[:, begin:stop] for t in tokens]
        out, state = gated_delta_rule(*part, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, end)
    heads_first = [t.transpose(1, 2).contiguous() for t in tokens]
    strided = [t.transpose(1, 2) for t in heads_first]
    again, plain = gated_delta_rule(*strided), gated_delta_rule(*tokens)
    assert all(map(torch.equal, again, plain))

# %%
# ``gradcheck`` compares gradients with differences of the forward. Two calls
# must give the same bits. On a GPU, ``opcheck`` tests that the op works with
# autograd, with tensors that have no data, and ``torch.compile``:

if __name__ == "__main__":
    x, _ = problem(torch.float64, 1, 17, 1, 2, 2)
    leaves = [t.requires_grad_() for t in x]
    op = partial(gated_delta_rule, scale=0.7)
    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)
    x, dy = problem(torch.float16, 1, 70, 1, 32, 32)
    first, again = (results_of(gated_delta_rule, x, dy) for _ in range(2))
    assert all(map(torch.equal, first, again))

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, _ = problem(torch.float16, 1, 70, 2, 64, 64)
    leaves = [t.requires_grad_() for t in x]
    print(torch.library.opcheck(gated_delta_rule, (*leaves, 0.5)))

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    (q, k, v, g, beta, state), _ = problem(torch.float16, 1, 5, 2, 16, 32)
    for wrong in (
        (q, k, v.float(), g, beta),
        (q, k, v, g, beta.half()),
        (q, k[:, :4], v, g, beta),
    ):
        try:
            gated_delta_rule(*wrong)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark has one sequence with 16 heads of dimension 128, in bfloat16. A
# rate is the bytes of the floor divided by the time. The floor has four tensors
# of the size of ``q`` forward, and seven backward. ``Roof`` is a copy that
# moves as many bytes. PyTorch launches several kernels for each chunk, so we
# time it for up to 8192 tokens.

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]


def contestants(T, backward):
    """Return calls at a length, one way."""
    x = random(T)
    ops = {"Triton": output}
    if T <= 8192:
        torch.compiler.reset()
        ops["PyTorch"] = delta_rule_torch
        ops["torch.compile"] = partial(delta_rule_torch, compiled=True)
    calls = {
        name: backward_of(op, *x) if backward else partial(op, *x)
        for name, op in ops.items()
    }
    half = int(floor(T, 7 if backward else 4) * 1e6 / 2)
    source = torch.empty(half, dtype=torch.int8, device=DEVICE)
    return calls | {"Roof": partial(torch.empty_like(source).copy_, source)}


def benchmark(backward):
    times = {T: gpu_time(contestants(T, backward), 20) for T in LENGTHS}
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
# What the three kernels move can be counted, in tensors of the size of ``q``.
# The kernel ``solve`` reads ``k`` and ``v``, and writes ``w``, ``y`` and the
# inverses, which count as a half. The kernel ``states`` reads ``w``, ``y`` and
# ``k``, and writes the errors and the states, which count as two. The kernel
# ``outputs`` reads ``q``, ``k``, the errors and the states, and writes the
# outputs. Decays and betas are small beside these. In bfloat16, with dimensions
# of 128, the sum is sixteen and a half at least, and the floor has four. So
# memory allows a quarter of the roof, and the rates are a third to a half of
# that. But ``states`` goes along the chunks, one after the other. With blocks
# of 64 columns, as on Hopper, it has two programs for a head: 32 for 132
# multiprocessors. With more heads or sequences the rate grows, as the table
# beside other libraries shows.
#
# Where the GPU waited for the CPU, a rate says little. PyTorch's loop launches
# several kernels for each chunk. A backward of ours costs the CPU about as long
# as the GPU sleeps before it.

# %%
# Break it
# --------
#
# There is another way to invert. :math:`(I + M)^{-1}` is also a product,
# :math:`(I - M)(I + M^2)(I + M^4) \cdots`. The product ends, because
# :math:`M^{64} = 0`, and takes about as many products of tiles. Let a sequence
# repeat a token, so that its keys are equal, without decays and with
# :math:`\beta = 1`. The numbers in :math:`M^{32}` are as large as
# :math:`\binom{62}{31}`, while those in the inverse are 1, 0 and -1:


def powers(M):
    """Return the inverse as a product: (I - M) (I + M^2) (I + M^4) ..."""
    C = M.shape[-1]
    one = torch.eye(C, dtype=M.dtype, device=M.device)
    inverse, power, size = one - M, M @ M, 2
    while size < C:
        inverse, power, size = inverse @ (one + power), power @ power, size * 2
    return inverse


if __name__ == "__main__":
    k = random(64, heads=1, dtype=torch.float64)[1][0, :, 0]
    for alike in (0.0, 0.9, 1.0):
        keys = alike * k[:1] + (1 - alike) * k
        keys = torch.nn.functional.normalize(keys, dim=-1)
        M = (keys @ keys.T).tril(-1)
        exact = torch.linalg.inv(torch.eye(64, device=DEVICE) + M)
        for how in (doubled, powers):
            error = (how(M.float()) - exact).abs().max().item()
            print(f"alike {alike}, {how.__name__}: error {error:.1e}")
            assert (error < 1e-3) == (how is doubled or alike == 0)

# %%
# The doublings stay right, because each block is the inverse of a part of the
# sequence, and for equal keys such inverses have no large numbers. With keys
# that are not alike, both ways are right: such keys would not test them.

# %%
# Go further
# ----------
#
# 1. Before its value is added, a token multiplies the decayed state by
#    :math:`I - \beta k k^\top`. What does a :math:`\beta` of 2 do to the state,
#    for a key of length 1?
# 2. The backward computes inverses, W, states and errors again. How much memory
#    would it take to keep them?
#
# To read on:
#
# * `DeltaNet <https://arxiv.org/abs/2406.06484>`_, for the chunks without a
#   gate, and `gated delta networks <https://arxiv.org/abs/2412.06464>`_.
# * ``linear_attention.py``, for the same chunks without a system to solve.

# %%
# Answers
# -------
#
# **1.** It is a reflection: the part along the key changes its sign, and the
# state keeps its size. Beyond 2 the state grows.
#
# **2.** We count in tensors of the size of ``q``. W and the errors count as one
# each, the inverses as a half, and the states as two. These are four and a
# half, and the inputs are three.
