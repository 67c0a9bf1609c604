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
state, whatever is stored there already. The delta rule first reads what is
stored, and then corrects only the error. So what a token writes depends on the
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
    """Return a chunk's outputs, and the state after it."""
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
    """Return the megabytes of the tensors, and of decays and betas."""
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
# let ``between`` have the blocks :math:`C` of ``M`` that lie between two of
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

from triton_gallery_ops.gated_delta_rule import (
    GATED_DELTA_RULE_KERNELS,
    _gated_delta_rule_decays,
    _gated_delta_rule_tokens,
    _gated_delta_rule_weights,
    gated_delta_rule,
)

# %%
# What did the chunks gain? The table has the time of the forward and of the
# backward, in microseconds, and the statements of the kernels. Its last line is
# the backward of the chunks in PyTorch, through autograd.


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
# must agree bit for bit. On a GPU, ``opcheck`` tests that the op works with
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
# several kernels for each chunk. Our backward costs the CPU about as long as
# the GPU sleeps before it.

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
