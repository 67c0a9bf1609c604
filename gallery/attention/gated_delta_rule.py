# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Linear-time attention as in Gated DeltaNet and Qwen3-Next: a state that each
# token decays, reads and corrects; token by token, then in chunks."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "six kernels: what is serial is apart from the rest, both ways"
#
# [tool.triton-gallery.not_for]  # with Hopper's tiles; others get smaller ones
# _gated_delta_rule_states_kernel = ["sm_89", "sm_120"]
# _gated_delta_rule_flows_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _gated_delta_rule_gradients_kernel = ["sm_89", "sm_120"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "token_kernel"
# caption = """
# Three tokens, one head of dimension 4. A program has two of the four columns
# of the state. The scale is 1, to keep the numbers whole. Token 2 has the key
# of token 0. The gate first halves the state, so this key reads half of the
# first value. Then the error makes that row of the state the third value."""
# registers = ["q", "k", "v", "state", "error", "out"]
# inputs.q = "torch.eye(4)[[0, 0, 0]] + torch.eye(4)[[3, 2, 3]]"
# inputs.k = "torch.eye(4)[[0, 2, 0]]"
# inputs.v = "torch.tensor([[4., 2, 8, 6], [6, 8, 2, 4], [2, 6, 3, 9]])"
# inputs.g = "torch.tensor([1.0, 1.0, 0.5]).log()"
# inputs.beta = "torch.tensor([1.0, 0.5, 1.0])"
# inputs.out = "torch.zeros(3, 4)"
# start = [0, 2]
# call = """
# token_kernel[(1, 2)](q, k, v, g, beta, out, 1.0, 3, 1, D=4, BLOCK_V=2)"""
# expected.out = "torch.tensor([[4., 2, 8, 6], [7, 6, 9, 8], [2, 6, 3, 9]])"
# ///
r"""
Gated delta rule
================

The gated delta rule is a linear-time attention: instead of the keys and values
of all tokens, a head keeps one matrix of fixed size, its state. Layers of Gated
DeltaNet and Qwen3-Next use it, because the work per token and the memory do not
grow with the length. For short sequences, or where a layer must recall any
token exactly, take softmax attention (``flash_attention.py``).

After this page you can

* write the recurrence as a kernel that keeps the state out of memory;
* compute a chunk of 64 tokens at once, by matrix products;
* say why a chunk needs a triangular system, and solve it.
"""

# sphinx_gallery_tags = ["attention", "memory bound"]
import os
from functools import partial

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

# %%
# In PyTorch
# ----------
#
# Each head has a *state* :math:`S`, a matrix that maps a key to a value. A
# token has a query, a key, a value and two numbers: :math:`g_t \le 0`, the
# logarithm of its *gate*, and :math:`\beta_t` between 0 and 1. It takes four
# steps:
#
# .. math::
#
#    \begin{aligned}
#    S &\leftarrow e^{g_t} S && (D \times D) && \text{the gate: decay} \\
#    x_t &= v_t - S^\top k_t && (D) && \text{the error of the value} \\
#    S &\leftarrow S + \beta_t\, k_t x_t^\top && (D \times D) &&
#    \text{correct the error} \\
#    o_t &= S^\top q_t / \sqrt D && (D) && \text{read with the query}
#    \end{aligned}
#
# The second and third step are the *delta rule*. With a key of length 1 and
# :math:`\beta_t = 1`, the key afterwards reads exactly :math:`v_t`. Plain
# linear attention (``linear_attention.py``) adds :math:`k_t v_t^\top` without
# looking, so old values stay in the sum.
#
# Tensors are (batch, T, heads, D). In a loop, every token reads and writes the
# state in memory. The *floor* is to read all inputs and write the output once.
# (``partial`` and ``gpu_time`` come from the folded cell of imports.)

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(T, heads=16, D=128, dtype=torch.bfloat16):
    """Return queries, keys of length 1, values, log gates and betas."""

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    q, k, v = (normal(1, T, heads, D) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    # Most gates are near 1, so the state forgets slowly.
    g = torch.nn.functional.logsigmoid(normal(1, T, heads) + 3)
    beta = normal(1, T, heads).sigmoid()
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def recurrence(q, k, v, g, beta):
    q, k, v = (tensor.to(g.dtype) for tensor in (q, k, v))
    batch, T, heads, D = q.shape
    S = q.new_zeros(batch, heads, D, D)
    outs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None, None]
        x = v[:, t] - (k[:, t, :, None] @ S)[:, :, 0]
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * x)[:, :, None]
        outs.append((q[:, t, :, None] @ S)[:, :, 0] * D**-0.5)
    return torch.stack(outs, dim=1)


def floor(T):
    """Return megabytes: q, k, v, out in bfloat16; g and beta in float32."""
    return 1e-6 * T * 16 * (4 * 2 * 128 + 2 * 4)  # 16 heads of 128


if __name__ == "__main__":
    moved = 2e-6 * 2048 * 16 * 128**2 * 4  # float32, read and written
    print(f"2048 tokens: states of {moved / 1e3:.1f} GB,", end=" ")
    print(f"{moved / floor(2048):.0f} times the floor")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = gpu_time({"loop": partial(recurrence, *random(1024))}, turns=10)
    print(f"1024 tokens: {times['loop'][0]:.0f} ms")

# %%
# The first kernel
# ----------------
#
# A program walks over the tokens and keeps the state in its own registers. No
# column of the state depends on another one, so a program takes ``BLOCK_V``
# columns of one head.


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
    head = tl.program_id(axis=0).to(tl.int64)  # of all batches
    offs_k = tl.arange(0, D)  # (D,)
    offs_v = tl.program_id(axis=1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((D, BLOCK_V), dtype=tl.float32)
    for t in range(T):
        # The batch is head // HEADS; tensors are (batch, T, heads, D).
        row = (head // HEADS * T + t) * HEADS + head % HEADS
        q = tl.load(q_ptr + row * D + offs_k).to(tl.float32)  # (D,)
        k = tl.load(k_ptr + row * D + offs_k).to(tl.float32)  # (D,)
        v = tl.load(v_ptr + row * D + offs_v).to(tl.float32)  # (BLOCK_V,)
        beta = tl.load(beta_ptr + row)
        state *= tl.exp(tl.load(g_ptr + row))  # forget
        error = v - tl.sum(state * k[:, None], axis=0)  # (BLOCK_V,)
        state += k[:, None] * (beta * error)[None, :]  # correct
        out = tl.sum(state * q[:, None], axis=0) * scale  # (BLOCK_V,)
        tl.store(out_ptr + row * D + offs_v, out)


def launch(kernel, q, k, v, g, beta, **options):
    """Launch a kernel for contiguous tensors and return its output."""
    batch, T, heads, D = q.shape
    assert k.shape == v.shape == q.shape
    assert g.shape == beta.shape == (batch, T, heads)
    assert all(tensor.is_contiguous() for tensor in (q, k, v, g, beta))
    # tl.arange takes powers of two, and a product's sides are 16 or more.
    assert D in (16, 32, 64, 128)
    out = torch.empty_like(v)
    BLOCK_V = 16  # as few columns as a product takes: the most programs
    grid = (batch * heads, D // BLOCK_V)
    options |= {"D": D, "BLOCK_V": BLOCK_V}
    kernel[grid](q, k, v, g, beta, out, D**-0.5, T, heads, **options)
    return out


def by_token(q, k, v, g, beta):
    return launch(token_kernel, q, k, v, g, beta)


# %%
# Is it right?
# ------------
#
# We compare with the recurrence in float64. This kernel rounds its output to
# the 11 bits of float16; a later one also rounds what it multiplies. We allow
# four such roundings of the largest output.


def check(kernel):
    q, k, v, g, beta = random(T=150, heads=2, D=64, dtype=torch.float16)
    out = kernel(q, k, v, g, beta).double()
    expected = recurrence(q, k, v, g.double(), beta.double())
    atol = 4 * 2**-11 * expected.abs().max().item()
    print(f"largest error {(out - expected).abs().max():.1e},", end=" ")
    print(f"allowed {atol:.1e}")
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


if __name__ == "__main__":
    check(by_token)

# %%
# How fast?
# ---------
#
# We time 16 heads of dimension 128 in bfloat16. A rate is the bytes of the
# floor divided by the time. ``Roof`` is a copy that moves as many bytes.


def roof(T):
    half = int(floor(T) * 1e6) // 2  # half is read, and half is written
    source = torch.empty(half, dtype=torch.int8, device=DEVICE)
    return partial(torch.empty_like(source).copy_, source)


if __name__ == "__main__" and DEVICE.type == "cuda":
    for T in (256, 512, 1024):
        x = random(T)
        calls = {"by token": partial(by_token, *x)}
        calls["PyTorch"] = partial(recurrence, *x)
        times = gpu_time(calls | {"Roof": roof(T)}, turns=10)
        rates = [
            f"{name} {floor(T) / ms:.2g}" for name, (ms, *_) in times.items()
        ]
        print(f"{T:4} tokens, GB/s:", ", ".join(rates))

# %%
# A chunk of tokens at once
# -------------------------
#
# The kernel takes one small step per token, and none of its sums is a matrix
# product, so the tensor cores idle. Can it take a *chunk* of :math:`C = 64`
# tokens in one step? What a token writes depends on its error. And its error
# depends on what the earlier tokens of the chunk wrote.
#
# Let :math:`S` be the state before the chunk, and :math:`G_i` the sum of the
# log gates from the first token of the chunk to token :math:`i`. When token
# :math:`i` reads, the state has decayed by :math:`e^{G_i}`, and what token
# :math:`j` wrote by :math:`e^{G_i - G_j}`. So the error of token :math:`i` is
#
# .. math:: x_i = v_i - e^{G_i} S^\top k_i - \sum_{j < i} \beta_j\,
#    e^{G_i - G_j} (k_i \cdot k_j)\, x_j
#
# The errors are on both sides, but each one needs only earlier ones. This is a
# *triangular system* of equations. Write the tokens as rows of :math:`Q`,
# :math:`K`, :math:`V` and :math:`X`, and the product of elements as
# :math:`\odot`. Then a chunk computes
#
# .. math::
#
#    \begin{aligned}
#    A_{ij} &= \beta_j\, e^{G_i - G_j} \text{ if } j \le i, \text{ else } 0
#    && (C \times C) \\
#    M &= K K^\top \odot A, \text{ below the diagonal}
#    && (C \times C) \\
#    X + M X &= V - \mathrm{diag}(e^G)\, K S
#    && (C \times D) \\
#    O &= \left(\mathrm{diag}(e^G)\, Q S + (Q K^\top \odot A)\, X\right)
#    / \sqrt D && (C \times D) \\
#    S' &= e^{G_C} S + K^\top \mathrm{diag}(\beta\, e^{G_C - G})\, X
#    && (D \times D)
#    \end{aligned}
#
# :math:`S'` is the state after the chunk. All but the third line are products
# of matrices. The third line is the system. To solve it, begin with its right
# side as ``X``. Row 0 is the error of token 0 already. Subtract its part, row 0
# times column 0 of ``M``, from the later rows: then row 1 is right, and so on.


@triton.jit
def solve(M, X, C: tl.constexpr):
    """Return the solution of the system; X is its right side."""
    rows = tl.arange(0, C)[:, None]  # (C, 1)
    columns = tl.arange(0, C)[None, :]  # (1, C)
    for j in range(C):
        # A tile has no index: zero the other rows (or columns), and sum.
        x = tl.sum(tl.where(rows == j, X, 0.0), axis=0, keep_dims=True)
        m = tl.sum(tl.where(columns == j, M, 0.0), axis=1, keep_dims=True)
        X -= m * x  # rows up to j stay: m is 0 there
    return X


@triton.jit
def chunk_kernel(
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
    C: tl.constexpr,
):
    head = tl.program_id(axis=0).to(tl.int64)
    offs_c = tl.arange(0, C)  # (C,)
    offs_k = tl.arange(0, D)[None, :]  # (1, D)
    offs_v = tl.program_id(axis=1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    i = offs_c[:, None]
    j = offs_c[None, :]
    S = tl.zeros((D, BLOCK_V), dtype=tl.float32)
    for start in range(0, T, C):
        # Past the end, k and beta are 0: such tokens write nothing.
        inside = offs_c < T - start
        row = (head // HEADS * T + start + offs_c) * HEADS + head % HEADS
        keys = row[:, None] * D + offs_k  # (C, D)
        values = row[:, None] * D + offs_v  # (C, BLOCK_V)
        q = tl.load(q_ptr + keys, mask=inside[:, None], other=0.0)
        k = tl.load(k_ptr + keys, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + values, mask=inside[:, None], other=0.0)
        g = tl.load(g_ptr + row, mask=inside, other=0.0)  # (C,)
        beta = tl.load(beta_ptr + row, mask=inside, other=0.0)  # (C,)
        G = tl.cumsum(g, axis=0)  # (C,)
        # Above the diagonal the exponent is positive: mask it before exp.
        A = tl.where(i >= j, G[:, None] - G[None, :], -float("inf"))
        A = tl.exp(A) * beta[None, :]  # (C, C)
        M = tl.where(i > j, tl.dot(k, k.T) * A, 0.0)  # (C, C)
        s = S.to(k.dtype)  # tensor cores take the type of the inputs
        X = v - tl.dot(k, s) * tl.exp(G)[:, None]  # (C, BLOCK_V)
        # Each token's error depends on those before it in the chunk.
        X = solve(M, X, C).to(k.dtype)
        P = (tl.dot(q, k.T) * A).to(k.dtype)  # (C, C)
        out = tl.dot(q, s) * tl.exp(G)[:, None]  # (C, BLOCK_V)
        out = tl.dot(P, X, out) * scale
        tl.store(out_ptr + values, out, mask=inside[:, None])
        # The next chunk needs the state after this one's last token.
        end = tl.sum(g, axis=0)  # the last of G
        kept = (k * (tl.exp(end - G) * beta)[:, None]).to(k.dtype)  # (C, D)
        S = tl.dot(kept.T, X, S * tl.exp(end))


def by_chunk(q, k, v, g, beta):
    # With more tokens, M would no longer fit in the registers.
    return launch(chunk_kernel, q, k, v, g, beta, C=64)


if __name__ == "__main__":
    check(by_chunk)

# %%
# ``solve`` still takes a step per token. But its steps touch neither memory nor
# the state.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x = random(2048)
    ops = {"by token": by_token, "by chunk": by_chunk}
    times = gpu_time({name: partial(op, *x) for name, op in ops.items()})
    for name, (ms, *_) in times.items():
        print(f"2048 tokens, {name}: {ms:.2f} ms, {floor(2048) / ms:.0f} GB/s")

# %%
# The op
# ------
#
# Our kernel does all of its work in the order of the chunks, though only the
# state needs that. So the op has three kernels: one inverts all systems in
# parallel, by matrix products; one carries the state from chunk to chunk; and
# one computes the outputs of all chunks in parallel. It also takes a first
# state, returns the last one, and has a backward: another walk over the chunks,
# from the last to the first.

from triton_gallery_ops.gated_delta_rule import gated_delta_rule

# %%
# The result
# ----------
#
# In the chart, ``Triton`` is the op, and ``Triton, this page`` is our kernel of
# chunks. The loop in PyTorch is left out: it is too slow for this axis. The
# page of the op compares with flash-linear-attention.


def calls(T):
    x = random(T)
    return {
        # Its other result is the last state.
        "Triton": lambda: gated_delta_rule(*x)[0],
        "Triton, this page": partial(by_chunk, *x),
        "Roof": roof(T),
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    lengths = [2048, 4096, 8192, 16384, 32768, 65536]
    times = {T: gpu_time(calls(T), turns=20) for T in lengths}
    results = rate_table(times, "tokens", "GB/s", floor)
    print(results.to_string())
    wide = results.pivot(index="tokens", columns="series", values="GB/s")
    wide.plot(logx=True, title="forward, 16 heads of 128")
    for name in wide.columns.drop("Triton"):
        ratio = wide["Triton"] / wide[name]
        print(f"the op: {ratio.min():.2f} to {ratio.max():.2f} times", name)

# %%
# Exercises
# ---------
#
# **1.** Make a state forget one key: after ``erase``, the key ``k``, of length
# 1, reads zeros, and a key orthogonal to ``k`` reads what it did before.


def erase(S, k):
    return None  # your code


def check_erase(erased):
    S = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    k = torch.tensor([0.6, 0.8])
    other = torch.tensor([-0.8, 0.6])  # orthogonal to k
    after = erased(S, k)
    if after is None:
        return "not solved yet"
    reads = torch.cat([k @ after, other @ after])
    expected = torch.cat([torch.zeros(2), other @ S])
    return "right" if torch.allclose(reads, expected, atol=1e-6) else "wrong"


if __name__ == "__main__":
    print(check_erase(erase))

# %%
# **2.** Write a chunk in PyTorch: return the state after a chunk of one head.
# Solve the system with ``torch.linalg.solve_triangular(M, right, upper=False,
# unitriangular=True)``, which takes the diagonal of ``M`` as ones.


def next_state(S, k, v, g, beta):
    return None  # your code


def check_state(answer):
    x = random(8, heads=1, D=4, dtype=torch.float64)
    _, k, v, g, beta = (tensor[0, :, 0].double() for tensor in x)
    before = torch.ones_like(v[:4])  # (4, 4)
    after = answer(before, k, v, g, beta)
    if after is None:
        return "not solved yet"
    S = before
    for t in range(8):  # token by token
        S = S * g[t].exp()
        S = S + beta[t] * torch.outer(k[t], v[t] - k[t] @ S)
    return "right" if torch.allclose(after, S) else "wrong"


if __name__ == "__main__":
    print(check_state(next_state))

# %%
# Answers
# -------
#
# **1.** It is the delta rule for a value of zeros, with :math:`\beta = 1`.
# **2.** It is the formulas above, without the output.


def erase_answer(S, k):
    return S - torch.outer(k, k @ S)


def state_answer(S, k, v, g, beta):
    G = g.cumsum(0)  # (C,)
    A = (G[:, None] - G).exp() * beta  # (C, C)
    M = (k @ k.T * A).tril(-1)
    right = v - G.exp()[:, None] * (k @ S)
    X = torch.linalg.solve_triangular(M, right, upper=False, unitriangular=True)
    kept = k * ((G[-1] - G).exp() * beta)[:, None]
    return G[-1].exp() * S + kept.T @ X


if __name__ == "__main__":
    answers = check_erase(erase_answer), check_state(state_answer)
    print(*answers)
    assert answers == ("right", "right")

# %%
# To read on: `Gated delta networks <https://arxiv.org/abs/2412.06464>`_ has the
# recurrence, `DeltaNet <https://arxiv.org/abs/2406.06484>`_ the chunks.
