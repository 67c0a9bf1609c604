# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.11", "triton>=3.6", "matplotlib", "pandas", "transformers>=5.17"
# ]
#
# [tool.triton-gallery]
# description = """
# Find where a training step of a Hugging Face model spends its time, replace
# a layer and the loss by hand, then all layers by one call."""
# tool = true
#
# [tool.triton-gallery.not_for]
# _gluon_attention_kernel = ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942"]
# _gluon_attention_backward_kernel = [
#   "sm_80", "sm_89", "sm_100", "sm_120", "gfx942"
# ]
# ///
r"""
Speed up a Hugging Face model
=============================

The layers of a model in Hugging Face's transformers are a few lines of PyTorch
each, and each operator in them reads and writes memory. This page measures what
that costs in time and memory, replaces one layer and the loss by hand, and then
calls ``patch``, which replaces all layers that this gallery has a kernel for.
Weights and checkpoints stay; a training loop changes only if it reads logits.

After this page you can

* say which part of a training step is worth a kernel;
* replace a layer of a model that you do not own, and undo it;
* check that a changed model computes the same, and measure what it gains.
"""

# sphinx_gallery_tags = ["transformers", "training", "autograd"]
import os
import statistics
import time
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
import triton
import triton.language as tl
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
)

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.counting import Traffic

# %%
# The model
# ---------
#
# A Llama of eight layers with random weights, and a batch of random tokens. Its
# vocabulary is that of Llama 3, because the cost of the loss grows with the
# vocabulary. The whole step fits a GPU of 24 GB. Without a GPU, and in the
# checks, the model is tiny, with sizes that are no powers of two, so that
# kernels need their masks.

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 97,
}
ON_GPU = DEVICE.type == "cuda"
SHAPE = (4, 2048) if ON_GPU else (2, 12)  # sequences, tokens of each
generator = torch.Generator(device=DEVICE).manual_seed(0)


def build(dtype=torch.bfloat16, sizes=LARGE if ON_GPU else TINY):
    """Return a model; each call gives the same weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes)
    with DEVICE:
        model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim == 1:  # a norm's: ones would hide a forgotten product
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(dtype).train()


def batch(model, shape=SHAPE):
    """Return random tokens, which are their own labels."""
    V = model.config.vocab_size
    ids = torch.randint(V, shape, generator=generator, device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def step(model, inputs):
    """Compute the loss and all gradients; return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach()


# %%
# Where does a step spend its time?
# ---------------------------------
#
# PyTorch's profiler has the GPU time of each kernel. We add these times up by
# words in the kernels' names. *Products* run on tensor cores, and no kernel of
# this page makes them faster. *The rest* is norms, rotary embeddings (they tell
# attention the positions), activations, the loss and copies: they do little
# arithmetic and move much memory. That part is worth a kernel, as fewer kernels
# can move less memory.

KINDS = {  # by the names that cuBLAS, CUTLASS and others give their kernels
    "products": ("gemm", "nvjet", "cutlass", "xmma"),
    "attention": ("flash", "fmha", "attention"),
}


def profile(model, inputs):
    """Return milliseconds of GPU time by kind of kernel, for one step."""
    step(model, inputs)
    step(model, inputs)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step(model, inputs)
        torch.cuda.synchronize()
    times = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiler.key_averages():
        found = "the rest"
        for kind, words in KINDS.items():
            if any(word in event.key.lower() for word in words):
                found = kind  # no break: attention may be named cutlass too
        times[found] += event.self_device_time_total / 1000
    return times


if __name__ == "__main__" and DEVICE.type == "cuda":
    model = build()
    inputs = batch(model)
    before = profile(model, inputs)
    share = before["the rest"] / sum(before.values())
    print({kind: f"{ms:.1f} ms" for kind, ms in before.items()})
    print(f"{share:.0%} of the GPU's time is neither products nor attention")

# %%
# One layer by hand
# -----------------
#
# The forward of Llama's norm, ``x / sqrt(mean(x**2) + eps) * weight``, is six
# operators of PyTorch and two casts, which read and write the hidden states
# several times. One kernel keeps a row in registers. Like Llama, it rounds
# before the product with the weight. The backward stays many operators of
# PyTorch here; a kernel for it is in ``rms_norm.py``. Rows too long for
# registers are in ``norms_long.py``.


@triton.jit
def norm_kernel(x_ptr, weight_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + start + offs, mask=mask, other=0.0)
    x = x.to(tl.float32)  # (BLOCK_N,)
    # Zeros past N add nothing to the sum of squares.
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    # element_ty is the dtype that the pointer points to.
    normed = (x * scale).to(y_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + offs, normed * weight, mask=mask)


class Norm(torch.autograd.Function):
    """The kernel, and a backward that is left to PyTorch."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        y = torch.empty_like(x)
        N = x.shape[-1]
        norm_kernel[(x.numel() // N,)](
            x, weight, y, N, eps, BLOCK_N=triton.next_power_of_2(N)
        )
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight = (t.float() for t in ctx.saved_tensors)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        normed, gw = x * scale, g.float() * weight
        dx = scale * (gw - normed * (gw * normed).mean(-1, keepdim=True))
        dw = (g.float() * normed).flatten(0, -2).sum(0)
        return dx.to(g.dtype), dw.to(g.dtype), None


# %%
# A model that you do not own is best changed from outside: we give each norm
# another class, with another ``forward``. The new class's ``__init__`` does not
# run, so it may use only attributes that the old class has set. The weight
# stays the same parameter, under the same name. To undo it, give the old class
# back. Change a model before you compile it.


class FusedNorm(LlamaRMSNorm):
    """Llama's norm as one kernel."""

    def forward(self, x):
        return Norm.apply(x, self.weight, self.variance_epsilon)


def kinds(model):
    """Return the class of each layer; the model itself comes first."""
    return [type(layer) for layer in model.modules()]


def replace(model, old, new):
    """Give layers of one class another; return how many there are."""
    # Not isinstance: a subclass may compute something else.
    layers = [layer for layer in model.modules() if type(layer) is old]
    for layer in layers:
        layer.__class__ = new
    return len(layers)


# %%
# Is it right?
# ------------
#
# We compare the loss and all gradients with the same model in float64, and take
# the largest error. (Llama's norms and loss compute in float32 even in that
# model, so it is not exact.) The plain model in float32 has an error, too. The
# changed one adds in another order, so we allow it four times the plain model's
# error: a margin that we chose.
#
# A change that replaces nothing would pass, so ``check`` compares the layers'
# classes, too. A norm that forgets its weight would pass in a new model, where
# all weights are 1, so ``build`` draws them.


def results(model, inputs):
    """Return the loss and the gradients in float64."""
    loss = step(model, inputs).double()
    return [loss, *(p.grad.double() for p in model.parameters())]


def error(found, exact):
    """Return the largest relative error of a tensor, in the Euclidean norm."""
    pairs = zip(found, exact, strict=True)
    errors = [(a - b).norm() / b.norm() for a, b in pairs]
    return torch.stack(errors).max().item()  # Python's max may hide NaN


def check(change, make=None):
    """Compare a changed model with a plain one.

    ``make(dtype)`` returns the same weights at each call, without dropout.
    """
    make = make or partial(build, sizes=TINY)
    plain, changed = make(torch.float32), make(torch.float32)
    change(changed)
    assert kinds(changed) != kinds(plain), "nothing was replaced"
    inputs = batch(plain, (2, 12))
    exact = results(make(torch.float64), inputs)
    allowed = 4 * error(results(plain, inputs), exact)
    ours = error(results(changed, inputs), exact)
    print(f"loss, gradients: largest error {ours:.1e}, allowed {allowed:.1e}")
    torch.testing.assert_close(ours, 0.0, rtol=0, atol=allowed)


if __name__ == "__main__":
    check(lambda model: replace(model, LlamaRMSNorm, FusedNorm))
    model = build()
    old = kinds(model)
    count = replace(model, LlamaRMSNorm, FusedNorm)
    assert count == 2 * model.config.num_hidden_layers + 1  # the last norm
    assert replace(model, FusedNorm, LlamaRMSNorm) == count
    assert kinds(model) == old
    print(f"replaced {count} norms, and put them back")

    # In float32 a misplaced rounding goes unseen; in float16 elements change.
    norm = build(torch.float16, TINY).model.norm
    x = torch.randn(200, 48, generator=generator, device=DEVICE).half()
    expected = norm(x)
    replace(norm, LlamaRMSNorm, FusedNorm)
    equal = (norm(x) == expected).double().mean().item()
    print(f"float16: {equal:.1%} of a norm's elements are equal, wanted 99%")
    assert equal > 0.99

# %%
# The loss without the logits
# ---------------------------
#
# The last product makes a row of logits for each token, as long as the
# vocabulary. The loss needs one logit of each row and the logarithm of the sum
# of the exponentials of all; the gradient needs the softmax of the row. The
# plain model makes all logits, in bfloat16 and in float32. It keeps their
# log-softmax until the backward, which makes gradients of the same sizes.

if __name__ == "__main__":
    logits = 4 * 2048 * LARGE["vocab_size"]  # of the batch of a GPU
    print(f"{logits:,} logits: {logits / 2**29:.2f} GiB in bfloat16,", end=" ")
    print(f"{logits / 2**28:.2f} GiB in float32")

# %%
# ``linear_cross_entropy`` takes the hidden states and the weight of ``lm_head``
# instead of logits. It makes the logits of some tokens, turns them into their
# gradient at once, and goes on to the next tokens
# (``linear_cross_entropy.py``).

from triton_gallery_ops.linear_cross_entropy import linear_cross_entropy

# %%
# The model is a layer, too: we give it another class, and check it as before.


class ModelWithoutLogits(LlamaForCausalLM):
    """Llama that returns its loss alone; it serves ``step``."""

    def forward(self, input_ids, labels, use_cache):
        hidden = self.model(input_ids, use_cache=use_cache)[0]
        hidden = hidden[:, :-1].flatten(0, 1)  # each predicts the next token
        following = labels[:, 1:].flatten()
        loss = linear_cross_entropy(hidden, self.lm_head.weight, following)
        return CausalLMOutput(loss=loss)


if __name__ == "__main__":
    check(lambda model: replace(model, LlamaForCausalLM, ModelWithoutLogits))

# %%
# All of it
# ---------
#
# ``patch`` does this for norms, rotary embeddings, gated units (``LlamaMLP``,
# exercise 1), attention and the loss, and returns what it replaced, what it
# left, and why. *Ops in a transformers model*, in the guide, names the families
# of models and where a patched one differs: in training with labels its output
# has no logits.

from triton_gallery_ops.transformers import patch, unpatch

# %%
# Weights keep their names, and ``unpatch`` undoes it all.

if __name__ == "__main__":
    model = build()
    names = list(model.state_dict())
    old = kinds(model)
    print(patch(model))
    assert list(model.state_dict()) == names
    unpatch(model)
    assert kinds(model) == old
    check(patch)

# %%
# Does it learn the same?
# -----------------------
#
# Both models train on one batch, and the chart shows the relative difference of
# their losses at each step. They round differently, so it is not 0. Steps build
# on one another: if the models drifted apart, the difference would grow, which
# in the record it does not. We allow 0.05, a margin that we chose.


def losses_of(model, inputs, steps=30 if ON_GPU else 5):
    """Train; return the loss of each step."""
    rate = 1e-4 if ON_GPU else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=ON_GPU)
    found = []
    for _ in range(steps):
        found.append(step(model, inputs).item())
        optimizer.step()
    return found


if __name__ == "__main__":
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    plain, patched = build(dtype), build(dtype)
    patch(patched)
    inputs = batch(plain, (2, 512) if ON_GPU else SHAPE)  # two models at once
    losses = pd.Series(losses_of(plain, inputs))
    ours = pd.Series(losses_of(patched, inputs))
    apart = (ours - losses).abs() / losses
    print(f"patched: loss {ours[0]:.4f} at first, {ours.iloc[-1]:.4f} at last")
    early, late = apart[: len(apart) // 2], apart[len(apart) // 2 :]
    print(f"apart: mean {early.mean():.1e} in the first half,", end=" ")
    print(f"{late.mean():.1e} in the second; largest {apart.max():.1e}")
    assert ours.iloc[-1] < ours[0]
    assert (apart < 0.05).all()  # and none is NaN
    axes = apart.plot(xlabel="step", ylabel="relative difference")
    axes.xaxis.get_major_locator().set_params(integer=True)
    plt.tight_layout()
    del plain, patched

# %%
# What does it gain?
# ------------------
#
# Each way runs eager and under ``torch.compile``. *ms* is the wall time of a
# step without an optimizer, and *GiB* its peak memory. *norms* replaces the
# norms alone, by ``FusedNorm``. The last lines compare *patched* with *plain*.

WAYS = {
    "plain": lambda model: None,
    "norms": lambda model: replace(model, LlamaRMSNorm, FusedNorm),
    "patched": patch,
}


def measure(way, compiled):
    """Return milliseconds and GiB of a step."""
    model = build()
    WAYS[way](model)
    inputs = batch(model)
    called = torch.compile(model) if compiled else model
    for _ in range(3):
        step(called, inputs)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(called, inputs)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.compiler.reset()
    return {"ms": statistics.median(times), "GiB": peak}


if __name__ == "__main__" and DEVICE.type == "cuda":
    model = inputs = None
    rows = {}
    for compiled in (False, True):
        for way in WAYS:
            name = "compiled" if compiled else "eager"
            rows[f"{name}, {way}"] = measure(way, compiled)
    table = pd.DataFrame(rows).T
    print(table.to_string(float_format="%.1f"))
    for name in ("eager", "compiled"):
        ratio = table.loc[f"{name}, plain"] / table.loc[f"{name}, patched"]
        print(f"{name}: {ratio['ms']:.2f} times as fast,", end=" ")
        print(f"{1 / ratio['GiB']:.2f} of the memory")

# %%
# And where does the eager step spend its time, in milliseconds?

if __name__ == "__main__" and DEVICE.type == "cuda":
    model = build()
    patch(model)
    after = profile(model, batch(model))
    table = pd.DataFrame({"plain": before, "patched": after})
    table.loc["GPU time"] = table.sum()
    table.loc["wall time"] = [rows[f"eager, {way}"]["ms"] for way in table]
    print(table.to_string(float_format="%.1f"))
    model = None

# %%
# In the record the ops gain in *the rest*. Both models compute the same
# products, which take somewhat longer in the patched one. The op for attention
# takes longer here than PyTorch's, but leaves padding out (exercise 2).
#
# The wall time less the GPU time is time in which the GPU runs no kernel, and
# faster kernels do not shorten it (``what_a_call_costs.py``,
# ``cuda_graphs.py``). In the record the patched step has more of it than the
# plain one, so the step gains less than the kernels do.
#
# In the record our norm alone gains no time, eager or compiled.
# ``torch.compile`` fuses many of the operators that the ops replace, so under
# it the ops gain less time. It does not split the loss, though, and needs the
# memory of all logits. In the record it makes the patched model faster, too,
# though less so than the plain one.

# %%
# Exercises
# ---------
#
# **1.** Replace the gated unit: in ``LlamaMLP``, ``forward(x)`` computes
#
# .. code-block:: python
#
#    self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
#
# The op ``swiglu(gate, up)`` computes ``silu(gate) * up``, with one kernel.

from triton_gallery_ops.swiglu import swiglu

# %%
# Write the class, and run the cell.

FusedMLP = None  # your class


def check_unit(new):
    """Print whether the class computes what LlamaMLP does, with the op."""
    if new is None:
        print("not solved yet")
        return False
    model = build(torch.float32, TINY)
    inputs = batch(model, (2, 12))
    expected = results(model, inputs)
    replace(model, LlamaMLP, new)
    with Traffic() as traffic:  # a helper: it records which operators run
        found = results(model, inputs)
    called = {name for name, _, _ in traffic.operators}
    right = error(found, expected) < 1e-5
    right = right and "triton_gallery.swiglu.default" in called
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    check_unit(FusedMLP)

# %%
# **2.** A batch is padded at the right to the longest of its sequences; its
# mask is 1 at tokens and 0 at padding. Do the plain and the patched model
# agree? Padding has the label -100, so it has no loss. Replace the dots in
# ``PADDED`` by a (2, 12) mask on ``DEVICE`` whose second sequence has 7 tokens.

PADDED = ...


def check_padding(mask):
    """Print whether a padded batch gives the same in both models."""
    if mask is ...:
        print("not solved yet")
        return False
    plain, patched = build(torch.float32, TINY), build(torch.float32, TINY)
    patch(patched)
    inputs = batch(plain, (2, 12)) | {"attention_mask": mask}
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    apart = error(results(patched, inputs), results(plain, inputs))
    right = mask.sum(1).tolist() == [12, 7] and not mask[1, 7:].any()
    right = right and apart < 1e-5
    print("right" if right else "wrong")
    return right


if __name__ == "__main__":
    check_padding(PADDED)

# %%
# Answers
# -------
#
# **1.** The three products stay those of the model.


class FusedMLPAnswer(LlamaMLP):
    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


if __name__ == "__main__":
    assert check_unit(FusedMLPAnswer)

# %%
# **2.** They agree: the patched model computes attention for the real tokens
# alone.

padded_answer = torch.ones(2, 12, dtype=torch.int64, device=DEVICE)
padded_answer[1, 7:] = 0

if __name__ == "__main__":
    assert check_padding(padded_answer)
