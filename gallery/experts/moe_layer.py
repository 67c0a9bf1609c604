# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute a whole mixture-of-experts layer: load tokens in the order of experts
# inside the first product, apply SwiGLU there, and add up in a fixed order."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "by copy engine, by pointers, and for a few tokens; a backward"
#
# [tool.triton-gallery.not_for]
# _grouped_matmul_engine_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _grouped_matmul_engine_sums_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _moe_layer_engine_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "hidden_kernel"
# caption = """
# Four tokens, two choices each, of three experts. Program (0, 1) has column
# tile 0 of expert 1: `order[4]` is choice 4, which is of token 4 // 2 = 2. Rows
# past `end` repeat token 0 and are not stored."""
# registers = ["start", "end", "token", "x", "gate", "up", "h"]
# call = "hidden(x, gate_up, *sort(experts, 3)[::2], 2, tile=(4, 2, 2))"
# expected = { h = "hidden_torch(x, gate_up, *sort(experts, 3)[::2], 2)" }
# start = [1, 7]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(0, 3, 4, 4)"
# gate_up = "integers(0, 2, 3, 4, 4)"
# experts = "torch.tensor([[0, 2], [2, 0], [1, 0], [0, 2]], dtype=torch.int32)"
# ///
r"""
A mixture-of-experts (MoE) layer in Triton
==========================================

A router chose a few experts, small networks, for each token. Now each expert
takes its tokens as input, and each token gets the weighted sum of its experts'
outputs. If your tokens are sorted by expert already, take the products alone:
see ``grouped_matmul.py``.

After this page you can

* load rows in any order inside a matrix product, without a sorted copy;
* apply SwiGLU in the kernel that computes the product;
* add up results in the same order in each run.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "fusion", "autograd"]
import os
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import grouped_mm, silu

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
# ``x`` (T, H) has T tokens. A router chose k of E experts for each: ``experts``
# and ``weights`` (T, k). Experts have weights ``gate_up`` (E, 2 F, H) and
# ``down`` (E, H, F); SwiGLU, ``silu(gate) * up``, comes between both products.

draw = {"generator": torch.Generator(DEVICE).manual_seed(0), "device": DEVICE}
# Triton's interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LAYER = 128, 8, 2048, 768  # E, k, H and F of Qwen3-30B-A3B


def loop(x, weights, experts, gate_up, down):
    out = torch.zeros_like(x)
    for e in range(len(down)):
        token, choice = torch.where(experts == e)  # waits for the GPU
        gate, up = (x[token] @ gate_up[e].T).chunk(2, dim=1)
        y = (silu(gate) * up) @ down[e].T * weights[token, choice, None]
        out.index_add_(0, token, y.to(x.dtype))
    return out


def make_inputs(T, E, k, H, F):
    """Return what a layer takes: each token has k different experts."""
    weights, experts = (2 * torch.rand(T, E, **draw)).softmax(1).topk(k)
    shapes = (T, H), (E, 2 * F, H), (E, H, F)
    x, gate_up, down = (torch.randn(*s, **draw, dtype=DTYPE) for s in shapes)
    return x, weights, experts.int(), gate_up / H**0.5, down / F**0.5


# %%
# The first kernel
# ----------------
#
# Choice j of token t has the number ``t * k + j``. We sort these numbers:
#
# * ``order`` has them sorted by expert: 0 3 5 6, 4, 1 2 7 in the figure below;
# * ``offsets`` says where each expert's part of ``order`` ends: 4 5 8;
# * ``inverse`` has the place of each number in ``order``: 5 for choice 1.
#
# ``hidden_kernel`` computes SwiGLU's output ``h``, ``grouped_mm`` its product
# with ``down``; then a token's rows are added up. The CPU would have to wait to
# read ``offsets``, so there is a program for each expert and BLOCK_N columns of
# ``h``. Each loads BLOCK_M of its rows of ``x`` at a time, without a copy.


def sort(experts, E):
    flat, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(E, device=flat.device)
    offsets = torch.searchsorted(flat, numbers, right=True)
    return order.int(), order.argsort().int(), offsets.int()


@triton.jit
def hidden_kernel(
    x_ptr,
    gate_up_ptr,
    h_ptr,
    order_ptr,
    offsets_ptr,
    k,
    H,  # a multiple of BLOCK_K
    F,  # a multiple of BLOCK_N
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(axis=1).to(tl.int64)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    offs_n = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)
    columns = expert * 2 * F + offs_n  # of h: rows of gate_up; up's: F later
    w_ptrs = gate_up_ptr + columns * H + offs_k[:, None]  # (BLOCK_K, BLOCK_N)
    for row in range(start, end, BLOCK_M):
        offs_m = row + tl.arange(0, BLOCK_M)[:, None]
        # Rows past the end compute token 0 again, and are not stored.
        choice = tl.load(order_ptr + offs_m, mask=offs_m < end, other=0)
        # In int32 the offset of a row would overflow past element 2**31.
        token = (choice // k).to(tl.int64)  # (BLOCK_M, 1)
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in range(0, H, BLOCK_K):
            x = tl.load(x_ptr + token * H + i + offs_k[None, :])
            gate = tl.dot(x, tl.load(w_ptrs + i), gate)  # gate += x @ w
            up = tl.dot(x, tl.load(w_ptrs + F * H + i), up)
        h = (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty)
        h_ptrs = h_ptr + offs_m.to(tl.int64) * F + offs_n
        tl.store(h_ptrs, h, mask=offs_m < end)


def hidden(x, gate_up, order, offsets, k, tile=(128, 128, 64)):
    """Return silu(gate) * up, a row for each choice in ``order``."""
    E, F, H = len(gate_up), gate_up.shape[1] // 2, x.shape[1]
    assert (F % tile[1], H % tile[2]) == (0, 0)  # the kernel masks neither
    assert all(t.is_contiguous() for t in (x, gate_up, order, offsets))
    h = x.new_empty(len(order), F)
    tensors = x, gate_up, h, order, offsets
    # With 4 warps, gate and up would take 256 of a thread's 255 registers.
    hidden_kernel[(F // tile[1], E)](*tensors, k, H, F, *tile, num_warps=8)
    return h


def sum_torch(y, weights, inverse):
    y = y[inverse].view(*weights.shape, -1)
    return (y * weights[:, :, None]).sum(1).to(y.dtype)


def layer(x, weights, experts, gate_up, down, hidden=hidden, add=sum_torch):
    order, inverse, offsets = sort(experts, len(down))
    h = hidden(x, gate_up, order, offsets, experts.shape[1])
    return add(grouped_mm(h, down.mT, offs=offsets), weights, inverse)


# %%
# Is it right?
# ------------
#
# We compare with the loop in float64. Three results are rounded to 16 bits, by
# half an eps each at most. Where large terms cancel, their errors stay, so we
# allow 4 eps of the largest result.


def check(ours, reference=loop):
    for T, E in (50, 6), (3, 8):  # three tokens leave experts without any
        given = make_inputs(T, E, 2, 64, 96)
        wide = (t.double() if t.is_floating_point() else t for t in given)
        exact = reference(*wide)
        atol = 4 * torch.finfo(DTYPE).eps * exact.abs().max().item()
        out = ours(*given).double()
        print(f"error {(out - exact).abs().max():.1e}, allowed {atol:.1e}")
        torch.testing.assert_close(out, exact, rtol=0, atol=atol)


if __name__ == "__main__":
    check(partial(layer, hidden=partial(hidden, tile=(16, 32, 32))))

# %%
# How fast?
# ---------
#
# A layer of Qwen3-30B-A3B, for T tokens, in milliseconds:


def show_times(ways, tokens=(1024, 8192, 32768)):
    table = {}
    for T in tokens:
        given = make_inputs(T, *LAYER)
        times = gpu_time({n: partial(f, *given) for n, f in ways.items()}, 20)
        table[T] = {name: t[0] for name, t in times.items()}
    table = pd.DataFrame(table).T.rename_axis(columns="T")
    print("ms", table.to_string(float_format="%.3f"), sep="\n")


if __name__ == "__main__" and DEVICE.type == "cuda":
    show_times({"loop": loop, "hidden_kernel": layer})

# %%
# ``loop`` waits for the GPU at each expert, so its time is partly the CPU's.
# PyTorch can do without: it copies the rows of ``x`` in the order of experts,
# and ``grouped_mm`` multiplies the rows of each expert by its weight. Then two
# kernels, silu and the multiplication by up, read what was just stored.


def hidden_torch(x, gate_up, order, offsets, k):
    rows = x[order // k]  # a copy
    gate, up = grouped_mm(rows, gate_up.mT, offs=offsets).chunk(2, dim=1)
    return silu(gate) * up


layer_torch = partial(layer, hidden=hidden_torch)

# %%

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_times({"hidden_kernel": layer, "PyTorch": layer_torch})

# %%
# The two differ only in how they compute ``h``, and in the recorded run they
# are close: our kernel saves the copy and the two kernels of SwiGLU, but its
# product takes longer by about as much. The next section changes the sum, which
# both leave to PyTorch.
#
# Add up in a fixed order
# -----------------------
#
# The experts' result for choice j of token t is in row ``inverse[t * k + j]``.
# There are two ways to add rows up. A program for each row can add it to the
# result of its token, by *atomic* additions: none is lost if two programs add
# at once. But their order may differ from run to run, and so may the rounding.
# Or a program for each token loads the token's rows: it adds them in the same
# order in each run, in float32, and stores once. ``tl.static_range`` is a loop
# that the compiler unrolls.


@triton.jit
def sum_kernel(
    y_ptr,
    weights_ptr,
    inverse_ptr,
    out_ptr,
    H,
    CHOICES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for j in tl.static_range(CHOICES):
        row = tl.load(inverse_ptr + token * CHOICES + j).to(tl.int64)
        weight = tl.load(weights_ptr + token * CHOICES + j)
        y = tl.load(y_ptr + row * H + offs, mask=offs < H)
        acc += weight * y.to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + offs, out, mask=offs < H)


def add(y, weights, inverse, BLOCK_H=1024):
    """Return the weighted sum of the rows of each token."""
    assert all(t.is_contiguous() for t in (y, weights, inverse))
    (T, k), H = weights.shape, y.shape[1]
    out = y.new_empty(T, H)
    grid = T, triton.cdiv(H, BLOCK_H)
    sum_kernel[grid](y, weights, inverse, out, H, k, BLOCK_H)
    return out


if __name__ == "__main__":
    small = partial(hidden, tile=(16, 32, 32))
    check(partial(layer, hidden=small, add=partial(add, BLOCK_H=64)))

# %%
# The time of the sum alone, for 32768 tokens, and how many of 20 more runs
# differ from the first in any bit; then the time of the layer with each sum:


def add_atomic(y, weights, inverse, order):
    """Return the same by atomic additions, which index_add_ makes."""
    rows = y * weights.flatten()[order, None]
    out = rows.new_zeros(len(weights), y.shape[1])
    return out.index_add_(0, order // weights.shape[1], rows).to(y.dtype)


if __name__ == "__main__" and DEVICE.type == "cuda":
    T, (_, k, H, _) = 32768, LAYER
    weights = torch.rand(T, k, device=DEVICE)
    inverse = torch.randperm(T * k, device=DEVICE).int()
    y = torch.randn(T * k, H, device=DEVICE, dtype=DTYPE)
    sums = {"PyTorch": sum_torch, "sum_kernel": add}
    sums["atomic"] = partial(add_atomic, order=inverse.argsort())
    calls = {who: partial(f, y, weights, inverse) for who, f in sums.items()}
    for who, (ms, *_) in gpu_time(calls, turns=20).items():
        first = calls[who]()
        differ = sum(not torch.equal(calls[who](), first) for _ in range(20))
        print(f"{who}: {ms:.2f} ms, {differ} of 20 runs differ")
    ways = {"sum of PyTorch": layer, "sum_kernel": partial(layer, add=add)}
    show_times(ways, [T])

# %%
# Only the atomic sum differs. ``sum_kernel`` takes the least time: both others,
# ``sum_torch`` and the atomic additions of ``index_add_``, first write all
# weighted rows to memory, in float32. A Triton kernel with atomic additions
# would not, but its order would vary as well.
#
# The gradients
# -------------
#
# For one choice, in column vectors (rows in the code), let
# :math:`a = \mathrm{gate}\,x`, :math:`u = \mathrm{up}\,x`, and
# :math:`h = \mathrm{silu}(a)\,u`; let :math:`w` be the choice's weight,
# :math:`g` the gradient of the token's result, and
# :math:`q = \mathrm{down}^T g`, a grouped product. Then
#
# .. math:: dw = q \cdot h, \quad du = w\,q\,\mathrm{silu}(a), \quad
#           da = w\,q\,u\,\sigma(a)\,(1 + a\,(1 - \sigma(a))).
#
# In these, products without a dot are elementwise. The first one is
# :math:`g \cdot (\mathrm{down}\,h)`; written as :math:`q \cdot h`, it does not
# need :math:`\mathrm{down}\,h` from the forward. For training,
# ``hidden_kernel`` would also store :math:`a` and :math:`u` (not shown); the
# backward computes :math:`h` again. A program has one row, which is one choice,
# so no two programs store the same :math:`dw`. The rest are grouped products:
# the gradient of ``x`` comes from :math:`da` and :math:`du`, that of
# ``gate_up`` from these and ``x``, that of ``down`` from :math:`g` and
# :math:`w\,h`. We check in float32.


@triton.jit
def swiglu_backward_kernel(
    q_ptr,
    a_ptr,
    u_ptr,
    weights_ptr,
    order_ptr,
    da_ptr,
    du_ptr,
    dw_ptr,
    F,
    BLOCK_F: tl.constexpr,  # a power of two, at least F
):
    row = tl.program_id(axis=0).to(tl.int64)
    choice = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + choice)
    offs = tl.arange(0, BLOCK_F)
    mask = offs < F
    offs += row * F
    q = tl.load(q_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(dw_ptr + choice, tl.sum(q * a * s * u, axis=0))
    du = weight * q * a * s
    da = weight * q * u * s * (1 + a * (1 - s))
    tl.store(du_ptr + offs, du.to(du_ptr.dtype.element_ty), mask=mask)
    tl.store(da_ptr + offs, da.to(da_ptr.dtype.element_ty), mask=mask)


if __name__ == "__main__":
    q, a, u = torch.randn(3, 6, 40, **draw)
    weights, order = torch.rand(6, **draw), torch.randperm(6, **draw)
    made = q.clone(), q.clone(), weights.clone()
    swiglu_backward_kernel[(6,)](q, a, u, weights, order, *made, 40, 64)
    a, u, w = leaves = [t.double().requires_grad_() for t in (a, u, weights)]
    h = silu(a) * u * w[order, None]
    exact = torch.autograd.grad(h, leaves, q.double())
    for name, ours, theirs in zip(("da", "du", "dw"), made, exact, strict=True):
        error = (ours - theirs).abs().max()
        print(f"{name}: error {error:.1e}, allowed 1.0e-05")
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=0)

# %%
# The op
# ------
#
# ``moe_layer(x, weights, experts, gate_up, down)`` is this gallery's op. To the
# kernels of this page it adds
#
# * any sizes and strides, and loads of whole tiles of the weights by TMA
#   (``tensor_descriptors.py``);
# * the whole backward, and experts on several GPUs: each GPU counts choices of
#   the others' experts as zero, and you add up the GPUs' results;
# * kernels for a few tokens, as in decoding, without a sort.
#
# The op has SwiGLU alone. For another gated activation, change the line of
# ``h`` in ``hidden_kernel``; GELU needs ``tl.erf``.

from triton_gallery_ops.moe_layer import moe_layer

# %%

if __name__ == "__main__":
    check(moe_layer)

# %%
# Train a block with a shared expert
# ----------------------------------
#
# Some models add a *shared* expert, an ordinary MLP that every token uses. This
# block has a router, two routed experts for a token, and a shared one. We train
# it with ``moe_layer`` and with ``loop``, by AdamW, with products in 16 bits.


def block(x, router, gate_up, down, shared_gate_up, shared_down, op):
    weights, experts = (x @ router.T).softmax(1).topk(2)
    gate, up = (x @ shared_gate_up.T).chunk(2, dim=1)
    shared = (silu(gate) * up) @ shared_down.T
    return x + op(x, weights, experts.int(), gate_up, down) + shared


def train(op, steps, T, E, H, F):
    """Yield the losses of a block that learns to multiply by a matrix."""
    draw["generator"].manual_seed(1)
    shapes = (H, H), (E, H), (E, 2 * F, H), (E, H, F), (2 * F, H), (H, F)
    matrix, *rest = (torch.randn(*s, **draw) / s[-1] ** 0.5 for s in shapes)
    optimizer = torch.optim.AdamW([t.requires_grad_() for t in rest], lr=2e-3)
    for _ in range(steps):
        x = torch.randn(T, H, **draw)
        with torch.autocast(DEVICE.type, DTYPE):
            out = block(x, *rest, op)
        loss = (out - x @ matrix).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


# %%
# Both round to 16 bits, in different places. A loss is a mean over all tokens,
# where most of that cancels, so we allow a relative distance of one eps. Each
# step has fresh tokens; without a GPU there are three steps, too few to learn.
# On a GPU we also train without the gradient of the routing weights,
# ``without dw``: its losses have to be further away than allowed.

if __name__ == "__main__":
    setup, ops = (3, 16, 4, 32, 32), {"moe_layer": moe_layer}
    if DEVICE.type == "cuda":
        setup = 100, 512, 8, 256, 128
        ops["without dw"] = lambda x, w, *rest: moe_layer(x, w.detach(), *rest)
    plain, eps = torch.tensor([*train(loop, *setup)]), torch.finfo(DTYPE).eps
    print(f"{setup[0]} steps, loss {plain[0]:.1f} to {plain[-1]:.1f}")
    for name, op in ops.items():
        ours = torch.tensor([*train(op, *setup)])
        away = (ours / plain - 1).abs().max().item()
        print(f"{name}: relative distance up to {away:.1e}, allowed {eps:.1e}")
        assert (away <= eps) == (op is moe_layer)

# %%
# The result
# ----------
#
# T is the number of tokens. *Triton* is ``moe_layer``; *Triton, this page* is
# ``hidden_kernel``, PyTorch's ``grouped_mm`` and ``sum_kernel``. *Roof* is one
# plain product with as many operations. The backward computes the gradients of
# ``x``, the routing weights, and both weights of the experts. The last table is
# the peak memory of forward and backward for 32768 tokens and E experts, in GB,
# without the inputs. *gradients* are a part of it that each way has to store.
# *PyTorch* is ``layer_torch``, with the sizes of ``LAYER``.

TOKENS = [512, 2048, 8192, 32768]


def work(T, passes=1):
    """Return the operations of a layer, in 10**9: three products."""
    _, k, H, F = LAYER
    return passes * 6e-9 * T * k * H * F


def roof(T):
    """Return a call of one product with the operations of a layer."""
    _, k, H, F = LAYER
    a, b = (torch.randn(n, H, device=DEVICE, dtype=DTYPE) for n in (T * k, F))
    return partial(torch.matmul, a, b.T.repeat(1, 3))


def backward_calls(T):
    """Return calls that compute all gradients, by name."""
    x, weights, experts, *rest = make_inputs(T, *LAYER)
    leaves = [t.requires_grad_() for t in (x, weights, *rest)]
    g = torch.randn_like(x)
    grad = partial(torch.autograd.grad, retain_graph=True)
    made = {
        name: op(x, weights, experts, *rest)
        for name, op in (("Triton", moe_layer), ("PyTorch", layer_torch))
    }
    return {name: partial(grad, out, leaves, g) for name, out in made.items()}


def show(results, title):
    """Print a table and who leads, and draw it."""
    print(title, results.to_string(), sep="\n")
    wide = results.pivot(index="T", columns="series", values="TFLOP/s")
    wide.plot(logx=True, marker="o", ylabel="TFLOP/s", title=title)
    plt.tight_layout()
    ratio = wide["Triton"] / wide["PyTorch"]
    span = f"{ratio.min():.2f} to {ratio.max():.2f}"
    print(f"{title}: Triton's rate is {span} times that of PyTorch")


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    ours = {"Triton": moe_layer, "Triton, this page": partial(layer, add=add)}
    ways = {"loop": loop, "PyTorch": layer_torch} | ours
    for T in TOKENS:
        given = make_inputs(T, *LAYER)
        calls = {name: partial(way, *given) for name, way in ways.items()}
        times[T] = gpu_time(calls | {"Roof": roof(T)}, turns=20)
    results = rate_table(times, "T", "TFLOP/s", work)
    show(results, "forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {T: gpu_time(backward_calls(T), turns=20) for T in TOKENS}
    results_backward = rate_table(
        times, "T", "TFLOP/s", partial(work, passes=2)
    )
    show(results_backward, "backward")
    table = {}
    for E in (8, 32, 128):
        given = make_inputs(32768, E, *LAYER[1:])
        leaves = [t.requires_grad_() for t in given if t.is_floating_point()]
        row = table[E] = {"gradients": sum(t.nbytes for t in leaves) / 1e9}
        for name, way in (("Triton", moe_layer), ("PyTorch", layer_torch)):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(way(*given).sum(), leaves)
            row[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    table = pd.DataFrame(table).T.rename_axis(columns="E")
    table["Triton / PyTorch"] = table["Triton"] / table["PyTorch"]
    print("peak GB", table.to_string(float_format="%.2f"), sep="\n")

# %%
# Exercises
# ---------
#
# Write a kernel and run its cell: it says, without a GPU, whether it is right.
#
# **1.** Write the copy that ``hidden_kernel`` avoids: row p of ``out`` is row
# ``order[p] // k`` of ``x``. A program copies a row of at most BLOCK elements.

copy_kernel = None  # takes (x_ptr, order_ptr, out_ptr, k, H, BLOCK)


def judge(kernel, expected, rows, places, *sizes):
    """Say whether a kernel makes the expected rows, a program for each."""
    if kernel is None:
        return "not solved yet"
    made = torch.zeros_like(expected)
    kernel[(len(made),)](rows, places, made, *sizes, BLOCK=64)
    near = torch.allclose(made.float(), expected.float(), 1e-2, 1e-2)
    return "right" if near else "wrong"


def judge_copy(kernel):
    x, _, experts, _, _ = make_inputs(9, 5, 3, 40, 16)
    order = sort(experts, 5)[0]
    return judge(kernel, x[order // 3], x, order, 3, 40)


if __name__ == "__main__":
    print(judge_copy(copy_kernel))

# %%
# **2.** ``rows`` has the gradient of each choice's row of ``x``, sorted by
# expert. A token's gradient, a row of ``dx``, is the sum of its k rows. Write
# the kernel: a program for each token, which adds in float32.

dx_kernel = None  # takes (rows_ptr, inverse_ptr, dx_ptr, H, CHOICES, BLOCK)


def judge_dx(kernel):
    rows = torch.randn(27, 40, **draw, dtype=DTYPE)
    inverse = torch.randperm(27, **draw).int()
    expected = sum_torch(rows, torch.ones(9, 3, device=DEVICE), inverse)
    return judge(kernel, expected, rows, inverse, 40, 3)


if __name__ == "__main__":
    print(judge_dx(dx_kernel))

# %%
# Answers
# -------
#
# **1.** Each program stores one row:


@triton.jit
def copy_answer_kernel(x_ptr, order_ptr, out_ptr, k, H, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    token = tl.load(order_ptr + row).to(tl.int64) // k
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * H + offs, mask=offs < H)
    tl.store(out_ptr + row * H + offs, x, mask=offs < H)


if __name__ == "__main__":
    answer = judge_copy(copy_answer_kernel)
    print(answer)
    assert answer == "right"

# %%
# **2.** As ``sum_kernel``, without weights:


@triton.jit
def dx_answer_kernel(
    rows_ptr, inverse_ptr, dx_ptr, H, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(CHOICES):
        row = tl.load(inverse_ptr + token * CHOICES + j).to(tl.int64)
        x = tl.load(rows_ptr + row * H + offs, mask=offs < H, other=0.0)
        acc += x.to(tl.float32)
    dx = acc.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + token * H + offs, dx, mask=offs < H)


if __name__ == "__main__":
    answer = judge_dx(dx_answer_kernel)
    print(answer)
    assert answer == "right"
