# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Train with a large vocabulary and never hold all its logits: compute the loss
# and its gradients a few tokens at a time."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "class weights, smoothing, a softcap, z-loss, predictions"
#
# [tool.triton-gallery.not_for]  # with 32 warps, in a table; the op has eight
# gradient_kernel = ["gfx942"]
# ///
r"""
Linear cross entropy
====================

The last layer of a language model gives each token a *logit* for each word of
the vocabulary: a product of two matrices. The loss makes one number of all
logits. The logits are often the largest tensor of a training step, and their
gradient is as large again. This op computes the loss and the gradients of the
layer's input and weight, and holds the logits of only a few tokens at a time.

After this page you can

* compute a gradient during the forward, and so keep no logits for the backward;
* write a gradient over the values that it is made from;
* choose a number of tokens that keeps matrix products fast and memory small;
* leave the matrix products to cuBLAS, and write a kernel for the rest alone.
"""

# sphinx_gallery_tags = ["reduction", "compute bound", "autograd"]
import os
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

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
# ``x`` (T, D) has a row for each token, ``weight`` (V, D) for each word;
# ``targets`` (T,) are the right words. A token with logits :math:`z_v` has the
# loss :math:`\log \sum_v e^{z_v} - z_\text{target}`. PyTorch stores 4 matrices:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(T, D, V, dtype=torch.float32):
    kind = {"device": DEVICE, "generator": generator}
    x = torch.randn(T, D, dtype=dtype, **kind)
    weight = torch.randn(V, D, dtype=dtype, **kind) * D**-0.5  # logits near 1
    return x, weight, torch.randint(V, (T,), **kind)


def two_calls(x, weight, targets):
    return functional.cross_entropy(functional.linear(x, weight), targets)


def gradients(function, x, weight, targets):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    loss = function(*leaves, targets)
    return loss, *torch.autograd.grad(loss, leaves)


class LargeTensors(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(out, "shape", None) == (512, 8192) and not func.is_view:
            print(f"{func!s:39} makes {out.nbytes:,} bytes")
        return out


if __name__ == "__main__":
    x, weight, targets = random(T=512, D=64, V=8192)
    with LargeTensors():
        gradients(two_calls, x, weight, targets)

# %%
# The *floor* is three products of :math:`2TDV` operations, and none of these.
#
# The first kernel
# ----------------
#
# The gradient of a logit is its softmax, less one at the target. It depends on
# the logits of its own token alone. So a *chunk* of tokens goes through all
# steps before the next chunk begins, and all chunks can use one buffer in turn:
#
# .. code-block:: text
#
#     +-------+     +----------+     the buffer: +----------------------+
#     | chunk |  @  | weight.T |  =              | logits               |
#     +-------+     +----------+                 |  v the kernel        |
#     |  ...  |                                  | gradient of logits   |
#     +-------+                                  +----------------------+
#     gradients:  of chunk = the buffer @ weight, of weight += buffer.T @ chunk
#
# cuBLAS does the products. A program of the kernel has one row. Its first pass
# finds maximum and sum, as in ``softmax_long.py``; the second writes gradients.


@triton.jit
def gradient_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    V,
    BLOCK_V: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)  # pid * V may pass 2**31
    target = tl.load(targets_ptr + pid)
    row_ptr = logits_ptr + pid * V
    # The second pass writes over it, but only after all threads have met.
    chosen = tl.load(row_ptr + target).to(tl.float32)
    # float32's lowest number. With -inf, m - larger could be NaN.
    m = tl.full((), -3.4028234663852886e38, dtype=tl.float32)
    s = tl.zeros((), dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)  # (BLOCK_V,)
        # -inf past the end is never the maximum, and adds nothing to the sum.
        z = tl.load(row_ptr + offs, mask=offs < V, other=-float("inf"))
        z = z.to(tl.float32)  # (BLOCK_V,)
        larger = tl.maximum(m, tl.max(z, axis=0))
        # What is in s was added while the maximum was m.
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(z - larger), axis=0)
        m = larger
    tl.store(losses_ptr + pid, m + tl.log(s) - chosen)
    for start in range(0, V, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)  # (BLOCK_V,)
        z = tl.load(row_ptr + offs, mask=offs < V).to(tl.float32)
        d = tl.exp(z - m) / s - (offs == target).to(tl.float32)
        tl.store(row_ptr + offs, d, mask=offs < V)


def chunked(x, weight, targets, chunk=2048, num_warps=8):
    """Return the mean loss, and the gradients of x and weight."""
    losses = x.new_empty(len(x), dtype=torch.float32)
    d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        logits = x[part] @ weight.T  # (chunk, V), the buffer
        known = {"BLOCK_V": 512 * num_warps, "num_warps": num_warps}
        tensors = logits, targets[part], losses[part]
        gradient_kernel[(len(logits),)](*tensors, len(weight), **known)
        torch.mm(logits, weight, out=d_x[part])  # now the gradient
        d_weight.addmm_(logits.T, x[part], alpha=1 / len(x))
    return losses.mean(), d_x.div_(len(x)), d_weight


# %%
# Is it right?
# ------------
#
# We allow 1e-5 of the largest element: in sums of 5003, most roundings cancel.

if __name__ == "__main__":
    x, weight, targets = random(T=100, D=64, V=5003)
    expected = gradients(two_calls, x.double(), weight.double(), targets)
    found = chunked(x, weight, targets, chunk=32)
    for one, other in zip(found, expected, strict=True):
        atol = 1e-5 * other.abs().max().item()
        print(f"error {(one - other).abs().max():.1e}, allowed {atol:.1e}")
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# We time bfloat16. ``Roof``: the products alone, of a multiple of 16 words.


def calls(ours, V):
    x, weight, targets = random(T, D, V, torch.bfloat16)
    more = torch.cat([weight, weight[: -V % 16]])
    torch.compiler.reset()  # past eight sizes it would raise
    fast = torch.compile(two_calls, dynamic=False, fullgraph=True)
    return {
        "Triton": partial(ours, x, weight, targets),
        "PyTorch": partial(gradients, two_calls, x, weight, targets),
        "torch.compile": partial(gradients, fast, x, weight, targets),
        "Roof": lambda: (z := x @ more.T, z @ more, z.T @ x),
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    T, D = (8192 if torch.cuda.mem_get_info()[1] > 2**35 else 1024), 4096
    for V in (32000, 128256, 201088):
        for who, times in gpu_time(calls(chunked, V), turns=5).items():
            print(f"{V:6} {who:13} {6e-9 * T * D * V / times[0]:4.0f} TFLOP/s")

# %%
# How many tokens at once?
# ------------------------
#
# A chunk of few tokens needs little memory. But each chunk reads the whole
# weight, and reads and writes the whole gradient of the weight. With a chunk of
# :math:`C` tokens, that gradient takes :math:`2CDV` operations and moves
# :math:`4DV` bytes, so there are :math:`C / 2` operations a byte. A GPU needs
# some hundreds, or its products wait for memory. And a product of few rows has
# few tiles, maybe fewer than the GPU has multiprocessors. On a GPU, the run
# prints the rate and the memory of each chunk: the most that a call holds
# besides its arguments and results, in GB, and then as a part of the bytes that
# all logits and their gradient would take.


def rate(times, V):
    """Return TFLOP/s."""
    return 6e-9 * T * D * V / times[0]


def memory(call):
    """Return the most bytes that a call takes, with what it returns."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__" and DEVICE.type == "cuda":
    V = 128256
    x, weight, targets = random(T, D, V, torch.bfloat16)
    sizes = [c for c in (256, 512, 1024, 2048, 4096, 8192) if c <= T]
    tried = {c: partial(chunked, x, weight, targets, c) for c in sizes}
    lines = {}
    for chunk, times in gpu_time(tried, turns=5).items():
        # The gradients are there from the start.
        most = memory(tried[chunk]) - 2 * (T + V) * D
        lines[chunk] = {
            "TFLOP/s": round(rate(times, V)),
            "GB": round(most / 1e9, 2),
            "of logits and gradient": round(most / (4 * T * V), 3),
        }
    print(pd.DataFrame(lines).T.rename_axis("tokens").to_string())

# %%
# This launcher makes the logits of a chunk while those of the chunk before
# still exist, so it holds two buffers, or one if there is one chunk. The op
# makes one buffer before the loop, and takes 2048 tokens at a time: of 8192
# tokens, that is an eighth of what all logits and their gradient take. More
# tokens would be faster, and take more.

# %%
# Is the kernel worth more work?
# ------------------------------
#
# These are the parts of one chunk, and the kernel with four numbers of warps:

if __name__ == "__main__" and DEVICE.type == "cuda":
    chunk = min(T, 2048)
    x, weight, targets = random(chunk, D, V, torch.bfloat16)
    logits = x @ weight.T
    losses = torch.empty(chunk, device=DEVICE)
    d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
    parts = {
        "logits": lambda: torch.mm(x, weight.T, out=logits),
        "gradient of x": lambda: torch.mm(logits, weight, out=d_x),
        "gradient of weight": lambda: d_weight.addmm_(logits.T, x),
    }
    for warps in (4, 8, 16, 32):
        parts[f"the kernel, {warps} warps"] = partial(
            gradient_kernel[(chunk,)],
            logits,
            targets,
            losses,
            V,
            BLOCK_V=512 * warps,
            num_warps=warps,
        )
    for name, times in gpu_time(parts, turns=9).items():
        print(f"{name:20} {times[0]:6.3f} ms")

# %%
# The kernel moves each logit three times at most: each pass reads it, and the
# second writes its gradient. A better kernel could save no more than the
# kernel's own line, a small part of the chunk's time. The number of warps
# hardly matters, so the op keeps the two passes and has eight.

# %%
# A vocabulary of 50257
# ---------------------
#
# GPT-2's vocabulary is an odd number. In a matrix whose rows have 50257
# elements of two bytes, most rows begin at an address that 16 does not divide,
# and a GPU cannot load 16 bytes at once from there. So each row of the op's
# buffer has *room* for a few more logits, up to a multiple of 16 elements.
#
# The kernel needs the room too. A mask that ends at 50257 may end between any
# two elements, so the compiler loads each element by itself. The op's mask ends
# at the end of the room, at a multiple of 16, and a ``tl.where`` makes what
# lies past the vocabulary ``-inf``.
#
# Is the room enough for cuBLAS? Or do its products want sizes that 16 divides,
# too? Then the last word can have small products of its own. On a GPU, the run
# times the three products, with rows as they are, with room after them, and
# with the room and the last word apart. Room alone is not enough:

if __name__ == "__main__" and DEVICE.type == "cuda":
    V = 50257
    x, weight, targets = random(chunk, D, V, torch.bfloat16)
    d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    rows = torch.randn(chunk, V, **kind)
    roomy = torch.randn(chunk, V + 15, **kind)[:, :V]

    def three(logits, *words):
        for some in words:
            torch.mm(x, weight[some].T, out=logits[:, some])
        for some in words:
            d_x.addmm_(logits[:, some], weight[some])
            d_weight[some].addmm_(logits[:, some].T, x)

    parts = {
        "rows of 50257": partial(three, rows, slice(0, V)),
        "rows of 50272": partial(three, roomy, slice(0, V)),
        "the last apart": partial(
            three, roomy, slice(0, V - 1), slice(V - 1, V)
        ),
    }
    for name, times in gpu_time(parts, turns=9).items():
        print(f"{name} {6e-9 * chunk * D * V / times[0]:5.0f} TFLOP/s")

# %%
# The backward
# ------------
#
# The loss is one number, and so is the gradient that the backward gets for it,
# ``grad``. Both of our gradients are to be multiplied by it. So the forward can
# compute them for a ``grad`` of one, and the backward multiplies them *in
# place*: a second matrix as large as the weight could need more memory than the
# chunk's logits. PyTorch notices if somebody asks for the same gradients a
# second time, and raises a RuntimeError.
#
# A kernel multiplies them, in float32. ``mul_`` may round the factor to the
# gradient's dtype first, and float16 cannot hold 65536, a usual factor by which
# losses are scaled. *Proof* prints what both make of it on this device. Most
# backwards begin at the loss itself. Then ``grad`` is one: each program of the
# kernel reads that number and ends, and the CPU need not wait for it.

# %%
# The op
# ------
#
# The op is a ``custom_op``: ``torch.compile`` does not look into it. If it did,
# it could reorder the products of two chunks, and hold the logits of both.

from triton_gallery_ops.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY_ACC,
    _linear_cross_entropy_launch,
    _linear_cross_entropy_scale,
    linear_cross_entropy,
)

# %%
# On a GPU, the run times the op beside the first kernel's launcher. The loss
# alone, without gradients, needs one of the three products, so its rate counts
# the operations of one.

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {}
    for V in (50257, 128256):
        x, weight, targets = random(T, D, V, torch.bfloat16)
        tried = {
            "first kernel": partial(chunked, x, weight, targets),
            "the op": partial(
                gradients, linear_cross_entropy, x, weight, targets
            ),
            "the op, loss": partial(
                torch.no_grad()(linear_cross_entropy), x, weight, targets
            ),
        }
        for name, times in gpu_time(tried, turns=5).items():
            products = 1 if "loss" in name else 3
            figure = round(rate(times, V) * products / 3)
            ladder.setdefault(name, {})[f"TFLOP/s at {V}"] = figure
    print(pd.DataFrame(ladder).T.to_string())

# %%
# The op gains at 50257. At 128256, which 16 divides, it is about as fast as the
# first kernel.

# %%
# Proof
# -----
#
# We compare every dtype with float64, with chunks of five tokens, ignored
# tokens and a strided ``x``. In half precision, three things are rounded, to 8
# bits in bfloat16: the logits, their gradients, and the weight's gradient after
# each chunk. We allow six such roundings of the largest element.


def compare(x, weight, targets, tolerance):
    """Compare the loss and both gradients with those of float64."""
    found = gradients(linear_cross_entropy, x, weight, targets)
    wide = x.detach().double(), weight.detach().double()
    expected = gradients(two_calls, *wide, targets)
    for one, other in zip(found, expected, strict=True):
        atol = tolerance * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


def small(dtype=torch.float64, T=13, D=24, V=70):
    """Return inputs of which every third token is ignored."""
    x, weight, targets = random(T, 2 * D, V)
    targets[::3] = -100
    return x.to(dtype)[:, ::2], weight.to(dtype)[:, :D], targets


CHUNK = "LINEAR_CROSS_ENTROPY_CHUNK"
constants = _linear_cross_entropy_launch.__globals__  # of the op's module
before, constants[CHUNK] = constants[CHUNK], 5
for dtype in LINEAR_CROSS_ENTROPY_ACC:
    compare(*small(dtype), max(1e-5, 6 * torch.finfo(dtype).eps))
constants[CHUNK] = before

# %%
# ``gradcheck`` asks for each gradient twice, which the op refuses. So we take
# finite differences by hand: half the difference of the losses one step to
# either side, along a random direction. Then we ask a second time:

x, weight, targets = small()
leaves = x.requires_grad_(), weight.requires_grad_()
loss = linear_cross_entropy(*leaves, targets)
found = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
for tensor, d in zip(leaves, found, strict=True):
    step = torch.randn(tensor.shape, generator=generator, device=DEVICE)
    step = step.to(tensor.dtype) * 1e-6
    sides = []
    for sign in (1, -1):
        moved = [t + sign * step if t is tensor else t for t in leaves]
        sides.append(3 * linear_cross_entropy(*moved, targets).detach())
    torch.testing.assert_close((d * step).sum(), (sides[0] - sides[1]) / 2)
if __name__ == "__main__":
    try:
        torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        print("a second time:", str(error).partition(":")[0])

# %%
# The gradient of a scaled loss, in float16: 1e-4 times 65536 is 6.55. Where
# ``mul_`` rounds the factor to float16 first, it prints ``inf``:

if __name__ == "__main__":
    factor = torch.tensor(65536.0, device=DEVICE)
    for name, multiply in (
        ("mul_", torch.Tensor.mul_),
        ("the op", _linear_cross_entropy_scale),
    ):
        d = torch.full((1,), 1e-4, dtype=torch.float16, device=DEVICE)
        multiply(d, factor)
        print(f"{name}: {d.item():.2f}")

# %%
# Tokens that are all ignored, no tokens, and a wrong target:

if __name__ == "__main__":
    x, weight, targets = random(T=4, D=8, V=9)
    for case, name in (
        (torch.full_like(targets, -100), "all ignored"),
        (targets + 9, "wrong targets"),
    ):
        print(f"{name}: loss {linear_cross_entropy(x, weight, case).item()}")
    loss = linear_cross_entropy(x[:0], weight, targets[:0]).item()
    print(f"no tokens: loss {loss}")
    try:
        linear_cross_entropy(x, weight.half(), targets)
    except TypeError as error:
        print(f"TypeError: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark times loss and both gradients, at vocabularies of models. The
# roof's products take all tokens at once, so they need the whole matrix of
# logits. Its rows begin at multiples of 16 bytes.

SIZES = [32000, 50257, 128256, 151936, 201088]

if __name__ == "__main__" and DEVICE.type == "cuda":
    ours = partial(gradients, linear_cross_entropy)
    times = {V: gpu_time(calls(ours, V), turns=5) for V in SIZES}
    work = 6e-9 * T * D
    results = rate_table(times, "V", "TFLOP/s", lambda V: work * V)
    print(results.to_string())
    results.pivot(index="V", columns="series", values="TFLOP/s").plot()

# %%
# This is the memory of a call, besides its arguments. The two gradients, which
# all of these return, are part of it:

if __name__ == "__main__" and DEVICE.type == "cuda":
    taken = {}
    for V in SIZES:
        found = calls(ours, V)
        found.pop("Roof")
        taken[V] = {name: memory(call) / 1e9 for name, call in found.items()}
        taken[V]["the gradients"] = 2e-9 * (T + V) * D
    peaks = pd.DataFrame(taken).T
    print(peaks.round(2).to_string())
    fig, ax = plt.subplots()
    peaks.plot(ax=ax, marker="o")
    ax.set(xlabel="words in the vocabulary", ylabel="GB", ylim=(0, None))
    ax.set_title(f"Memory of a step of {T} tokens")

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["V"] == 32000].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The rate counts the operations of the three products. cuBLAS does them, in the
# op as in the roof. Three things are the op's alone: the kernel, reading the
# weight again for each chunk, and adding to the weight's gradient.
#
# With gradients, the op is faster at 50257, and ``torch.compile`` elsewhere, by
# less than a tenth. For the loss alone, the op is faster: see the table beside
# other libraries. Besides the gradients, the op takes a quarter of the memory
# of ``torch.compile`` or less, and a tenth of PyTorch's. With 2048 tokens or
# fewer there is one chunk. Then all logits exist at once, as they do in
# ``torch.compile``, and the op saves no memory beside it.
#
# The figures of the op and of ``torch.compile`` are marked: the CPU took longer
# to prepare the call than the GPU slept. They may hold a little of its time.
#
# In the table beside other libraries, the roof at 50257 is a product with an
# odd number of words, which cuBLAS does slowly: it is no roof. A dash there
# says that PyTorch 2.11 has no such op.
#
# Break it: a gradient that is divided too early
# ----------------------------------------------
#
# The mean divides by the number of tokens. What happens in float16 if the
# gradient of the logits is divided before it is rounded?

if __name__ == "__main__":
    x, weight, targets = random(T=64, D=32, V=50_257)
    d = torch.softmax(x @ weight.T, -1)
    for tokens in (1, 8192):
        lost = ((d / tokens).half() == 0).float().mean()
        print(f"divided by {tokens:4}: {lost:6.1%} of the elements become zero")

# %%
# The smallest positive number of float16 is 6e-8, and less than half of it
# rounds to zero. A softmax over 50257 words has many elements of about 1e-5.
# Divided by 8192, these are zero in float16. So the op's products divide, after
# they have added up in float32. The kernel itself multiplies by a number that
# is at least one for up to 32768 tokens.

# %%
# Go further
# ----------
#
# 1. *Soft-capping* replaces a logit by :math:`c \tanh(z / c)`. What changes in
#    the kernel?
# 2. Could the kernel of the product find maximum and sum too, so that no logits
#    are ever in memory? What would the backward have to do again?
#
# To read on: ``cross_entropy.py``, for logits that exist; `Cut your losses in
# large-vocabulary language models <https://arxiv.org/abs/2411.09009>`_, for the
# other answer; and ``torch.nn.functional.linear_cross_entropy`` of PyTorch
# 2.13, which takes chunks too if its ``options`` ask for it.

# %%
# Answers
# -------
#
# **1.** Both passes replace each logit right after they load it. The second
# multiplies the gradient by :math:`1 - \tanh^2(z / c)`.
#
# **2.** The end of the product's kernel can store a maximum and a sum for each
# row of its tile. The backward then has no logits, and multiplies ``x`` and
# ``weight`` once more: four products instead of three.
