# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "numpy", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Teach an op what the rest of PyTorch asks of it: fallbacks for other devices,
# flop counts, tensor subclasses, vmap and autocast."""
# ///
r"""
An op and PyTorch's subsystems
==============================

A Triton kernel that became an op (see ``triton_op.py``) runs and compiles. The
rest of PyTorch knows nothing of the op: some subsystems raise an error, and
some return a wrong result silently. Register what your users need: an op that
only ever runs on a GPU may need a backward and no more.

After this page you can

* give an op a backward, fallbacks, flops, vmap and autocast;
* let a tensor subclass, here an int8 weight, pass through your op;
* tell the gaps that raise an error from the silent ones.
"""

# sphinx_gallery_tags = ["custom op", "torch.compile"]
import os
import sys
import textwrap
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from torch import Tensor

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import triton_op, wrap_triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils._triton import has_triton, has_triton_package
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

VERDICT = {
    "gradients": ("error", "register_autograd", "right"),
    "CPU tensors": ("error", "register_kernel", "right"),
    "CPU, compiled": ("error", "none: choose in the body", "right"),
    "another device": ("error", "register_kernel", "right"),
    "flop counter": ("wrong: 0", "register_flop_formula", "right"),
    "vmap": ("right, in 8 calls", "register_vmap", "right, in 1 call"),
    "autocast": ("wrong: float32", "register_autocast", "right"),
    "tensor subclass": ("error", "register_torch_dispatch", "right"),
    "per-sample gradients": ("error", "none: autograd.Function", "right"),
    "forward mode": ("wrong: zeros", "none: autograd.Function", "error"),
}
COLUMNS = ["without", "registration", "with"]


def outcome(run, op, expected):
    try:
        torch.testing.assert_close(run(op), expected, rtol=0.02, atol=0.02)
    except AssertionError as error:
        return f"wrong: {' '.join(str(error).splitlines()[:3])}"
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error).splitlines()[0]}"
    return "right"


def show(name, text):
    text = textwrap.shorten(f"{name}: {text}", 150)
    print(textwrap.fill(text, 78, subsequent_indent="    "))


@contextmanager
def without_interpreter():
    torch._logging.set_logs(dynamo=40)  # errors only
    kernel = globals()["linear_relu_kernel"]
    globals()["linear_relu_kernel"] = triton.JITFunction(kernel.fn)
    yield
    globals()["linear_relu_kernel"] = kernel


def gradients(op, *inputs):
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    grads = torch.autograd.grad(op(*inputs).square().sum(), inputs)
    return torch.cat([grad.flatten() for grad in grads])


def compiled(op, *inputs):
    torch.compiler.reset()
    function = torch.compile(lambda *args: op(*args), backend="aot_eager")
    return function(*inputs)


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "triton_gallery"
        return func(*args, **(kwargs or {}))


class Layer(torch.nn.Module):
    def __init__(self, op, weight):
        super().__init__()
        self.op, self.weight = op, weight

    def forward(self, x):
        return self.op(x, self.weight)


# %%
# The verdict
# -----------
#
# What each subsystem makes of an op, without and with a registration. Sections
# below run their rows, and fail if *error*, *wrong* or *right* is not true.

pd.DataFrame.from_dict(VERDICT, orient="index", columns=COLUMNS)

# %%
# The op
# ------
#
# The op is a linear layer and its activation, ``relu(x @ weight.T)``. A program
# computes one element: the kernel is short and slow, as it is not the subject.


@triton.jit
def linear_relu_kernel(
    x_ptr, weight_ptr, out_ptr, N, K, ACC: tl.constexpr, BLOCK_K: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    row, column = pid // N, pid % N
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask = offs_k < K
    x = tl.load(x_ptr + row * K + offs_k, mask=mask, other=0)
    weight = tl.load(weight_ptr + column * K + offs_k, mask=mask, other=0)
    total = tl.sum(x.to(ACC) * weight.to(ACC), axis=0)
    tl.store(out_ptr + pid, tl.where(total < 0, 0, total))  # NaN stays NaN


def check(x, weight):
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise TypeError(f"takes one float dtype, not {x.dtype}, {weight.dtype}")
    fits = x.ndim == 2 and x.shape[1:] == weight.shape[1:]
    if not fits or x.device != weight.device:
        raise ValueError("takes (M, K) and (N, K), on one device")


def fused(x: Tensor, weight: Tensor) -> Tensor:
    check(x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    out = x.new_empty(M, N)
    if out.numel() > 0:
        ACC = tl.float64 if x.dtype == torch.float64 else tl.float32
        BLOCK_K = triton.next_power_of_2(max(K, 1))
        kernel = wrap_triton(linear_relu_kernel)
        with torch.accelerator.device_index(x.device.index):
            kernel[(M * N,)](x, weight, out, N, K, ACC, BLOCK_K)
    return out


# %%
# The launcher ``fused`` becomes an op twice: ``linear_relu`` gets every
# registration of this page, and ``bare`` gets none.

make_op = partial(triton_op, mutates_args=())
linear_relu = make_op("triton_gallery::linear_relu", fused)
bare = make_op("triton_gallery::linear_relu_bare", fused)


def in_pytorch(x, weight):
    check(x, weight)
    return torch.relu(torch.nn.functional.linear(x, weight))


torch.manual_seed(0)
x, weight = torch.randn(5, 7, device=DEVICE), torch.randn(6, 7, device=DEVICE)

# %%
# Is it right?
# ------------

out, expected = bare(x, weight), in_pytorch(x.double(), weight.double())
torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)

# %%
# ``compare`` hands the bare op and the registered one to a function. Plain
# PyTorch gives the expected result. Folded with the imports are ``outcome``,
# which says *right* or what is wrong, ``gradients`` and ``compiled``.


def compare(row, run, without=bare, registered=linear_relu):
    expected = run(in_pytorch)
    for column, op in (("without", without), ("with", registered)):
        text = outcome(run, op, expected)
        show(column, text)
        assert text[:5] == VERDICT[row][COLUMNS.index(column)][:5], text


# %%
# Gradients
# ---------
#
# *Can a loss be differentiated through the op?* ``register_autograd`` takes a
# formula. This one is made of PyTorch operators.


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def backward(ctx, grad):
    x, weight, out = ctx.saved_tensors
    grad = grad.masked_fill(out <= 0, 0)
    return grad @ weight, grad.T @ x


linear_relu.register_autograd(backward, setup_context=setup_context)


if __name__ == "__main__":
    compare("gradients", lambda op: gradients(op, x, weight))

# %%
# Without a formula the call works, and the backward raises the error.
#
# A fallback for the CPU
# ----------------------
#
# *Does a model with this op run where there is no GPU?* ``register_kernel``
# takes another implementation for a device. Triton's interpreter would hide the
# error that users meet, so this page switches it off where that matters.


linear_relu.register_kernel("cpu", in_pytorch)
x_cpu, weight_cpu = on_cpu = x.cpu(), weight.cpu()

if __name__ == "__main__":
    with without_interpreter():
        compare("CPU tensors", lambda op: op(*on_cpu))

# %%
# ``torch.compile`` replaces the op by its body and **passes over the
# fallback**. An op that is also compiled for CPU tensors chooses in its body:


def choosing(name, fallback):
    def body(x: Tensor, weight: Tensor) -> Tensor:
        return (fallback if x.is_cpu else fused)(x, weight)

    return make_op(f"triton_gallery::{name}", body)


chooses = choosing("linear_relu_chooses", in_pytorch)


if __name__ == "__main__":
    with without_interpreter():
        pair = linear_relu, chooses
        compare("CPU, compiled", lambda op: compiled(op, *on_cpu), *pair)

# %%
# ``x.is_cpu`` asks about the tensor. ``has_triton()`` asks about the machine:
# does it have a device for which Triton compiles?

if __name__ == "__main__":
    print(f"{has_triton() = }, {has_triton_package() = }, {x_cpu.is_cpu = }")

# %%
# So ``has_triton()`` chooses for a whole process: kernels or fallbacks, and
# which tests to skip. It cannot choose for a call, for with a GPU it is true
# whatever the tensors are. It has no public name, so it may move.
#
# A fallback for another device
# -----------------------------
#
# *What if users have a device that Triton does not know?* PyTorch keeps the
# name ``privateuseone`` for a backend of your own. Here a stand-in for such a
# device keeps its data in a CPU tensor, ``host``. The fallback computes there.


def to_other_device(host):
    tensor = torch._C._acc.create_empty_tensor(host.shape, host.dtype)
    tensor.host = host
    return tensor


@linear_relu.register_kernel("privateuseone")
def _(x, weight):
    return to_other_device(in_pytorch(x.host, weight.host))


def other_device(op):
    if op is in_pytorch:  # it computes what is expected
        return op(*on_cpu)
    return op(*map(to_other_device, on_cpu)).host


if __name__ == "__main__":
    compare("another device", other_device)

# %%
# Without the fallback PyTorch runs the body, whose first allocation fails. For
# a device that has PyTorch's operators, register ``in_pytorch`` itself.
#
# A fallback in NumPy
# -------------------
#
# A fallback has to be composed of PyTorch operators, says PyTorch's tutorial
# *Using User-Defined Triton Kernels with torch.compile*. *What goes wrong
# otherwise?* Here are four ways to have a fallback, and eight uses of it.
# *fake* is a call without data, as compilers make it. *recorded* is a graph
# that ``make_fx`` makes of a call, run on another ``x``. Under the table is
# each reason, with the first use that has it.


def in_numpy(x, weight):
    x, weight = x.detach().numpy(), weight.detach().numpy()
    return torch.from_numpy(np.maximum(x @ weight.T, 0))


WAYS = {
    "PyTorch, in the body": chooses,
    "NumPy, in the body": choosing("numpy_body", in_numpy),
    "NumPy, registered": make_op("triton_gallery::numpy_registered", fused),
    "NumPy, no op": in_numpy,
}
WAYS["NumPy, registered"].register_kernel("cpu", in_numpy)
for op in [*WAYS.values()][:3]:
    op.register_autograd(backward, setup_context=setup_context)


USES = {
    "call": lambda op: op(*on_cpu),
    "gradients": lambda op: gradients(op, *on_cpu),
    "vmap": lambda op: torch.vmap(op, (0, None))(x_cpu[None], weight_cpu),
    "bfloat16": lambda op: op(*(tensor.bfloat16() for tensor in on_cpu)),
    "fake": lambda op: op(*map(FakeTensorMode().from_tensor, on_cpu)).shape,
    "torch.compile": lambda op: compiled(op, *on_cpu),
    "torch.export": lambda op: torch.export.export(
        Layer(op, weight_cpu), (x_cpu,)
    ).module()(x_cpu),
    "recorded": lambda op: make_fx(op)(*on_cpu)(2 * x_cpu, weight_cpu),
}

if __name__ == "__main__":
    table, texts = {}, {}
    with without_interpreter():
        for use, run in USES.items():
            expected = run(in_pytorch)
            table[use] = [outcome(run, op, expected) for op in WAYS.values()]
            texts |= {text: use for text in table[use] if text not in texts}
    table = pd.DataFrame.from_dict(table, "index", columns=[*WAYS])
    print(table.map(lambda text: text[:5]).to_string())
    del texts["right"]
    for text, use in texts.items():
        show(use, text)

# %%
# * Gradients, ``vmap`` and recording use an op from outside. Without an op they
#   fail, and the recorded graph **silently** returns its first result.
# * Fake tensors, compiler and export run the body: it must be in PyTorch. (The
#   compiler translates NumPy only outside of ops.)
# * A registered fallback runs only with data, and only NumPy's dtypes limit it.
#   But ``torch.compile`` passes over it, as above.
#
# Floating-point operations
# -------------------------
#
# *How much work is a model?* ``FlopCounterMode`` knows PyTorch's products. Any
# other op counts as 0, **silently**, until it has a formula. A formula gets the
# inputs' shapes, and the output's as ``out_shape``.


@register_flop_formula(torch.ops.triton_gallery.linear_relu)
def _(x_shape, weight_shape, *args, out_shape=None, **kwargs):
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


def count(op, *inputs, display=False):
    with FlopCounterMode(display=display) as counter:
        op(*inputs)
    return counter


if __name__ == "__main__":
    compare("flop counter", lambda op: count(op, x, weight).get_total_flops())

# %%
# By default the counter prints a table, which the package ``tabulate`` draws.
# PyTorch does not install ``tabulate``. Here are a run as things are, one with
# the package hidden, and the counts without a table:

if __name__ == "__main__":
    last = torch.nn.Linear(6, 4, device=DEVICE)
    model = torch.nn.Sequential(Layer(linear_relu, weight), last)
    for hidden in ({}, {"tabulate": None}):
        with patch.dict(sys.modules, hidden):
            try:
                count(model, x, display=True)
            except ModuleNotFoundError as error:
                print("ModuleNotFoundError:", error)
    counts = count(model, x).get_flop_counts()["Global"]
    print({str(op): number for op, number in counts.items()})

# %%
# In code for others, pass ``display=False``.
#
# vmap
# ----
#
# *Can the op take a batch?* Without a rule, ``torch.vmap`` calls it once for
# each sample. A rule returns the output and its batch dimension. Here samples
# become rows of one call, and a batch of weights gets a loop.


@linear_relu.register_vmap
def _(info, in_dims, x, weight):
    if in_dims[1] is None:
        xs = x.movedim(in_dims[0], 0)
        out = linear_relu(xs.flatten(0, 1), weight)
        return out.unflatten(0, xs.shape[:2]), 0
    xs = [x] * info.batch_size if in_dims[0] is None else x.unbind(in_dims[0])
    return torch.stack(list(map(linear_relu, xs, weight.unbind(in_dims[1])))), 0


def over_samples(op):
    return torch.vmap(op, (0, None))(samples, weight)


if __name__ == "__main__":
    samples = torch.randn(8, 5, 7, device=DEVICE)
    compare("vmap", over_samples)
    for op in (bare, linear_relu):
        with Calls() as calls:
            over_samples(op)
        print("calls:", calls.count)

# %%
# Both are right. PyTorch warns of the loop on standard error.
#
# Autocast
# --------
#
# *Does the op compute in half precision with the layers around it?* Without a
# rule it stays in float32, **silently**.

for kind in ("cpu", "cuda"):
    linear_relu.register_autocast(kind, torch.bfloat16)

if __name__ == "__main__":
    with torch.autocast(DEVICE.type, torch.bfloat16):
        compare("autocast", lambda op: op(x, weight))
    with torch.autocast(DEVICE.type, torch.float16):
        print("asked for float16:", linear_relu(x, weight).dtype)

# %%
# The dtype is the registration's, **not the one that autocast was asked for**.
#
# A tensor subclass
# -----------------
#
# *Can the weight be quantized?* This one is int8 with a scale for each row, and
# looks like an ordinary matrix. ``__torch_dispatch__`` dequantizes it for
# PyTorch's own operators alone. The rule changes neither op nor class.


class Int8Weight(Tensor):
    @staticmethod
    def __new__(cls, int8, scale):
        like = {"dtype": scale.dtype, "device": scale.device}
        self = Tensor._make_wrapper_subclass(cls, int8.shape, **like)
        self.int8, self.scale = int8, scale
        return self

    def dequantize(self):
        return self.int8 * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            return NotImplemented
        args = tree_map_only(cls, cls.dequantize, args)
        return func(*args, **(kwargs or {}))


@linear_relu.register_torch_dispatch(Int8Weight)
def _(cls, func, types, args, kwargs):
    return func(*tree_map_only(Int8Weight, Int8Weight.dequantize, args))


if __name__ == "__main__":
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    int8 = Int8Weight((weight / scale).round().to(torch.int8), scale)
    compare("tensor subclass", lambda op: op(x, int8))

# %%
# Without a rule neither op nor class knows what to do with the other.
#
# What no registration covers
# ---------------------------
#
# *And torch.func?* Its gradients, here one for each sample, do not `get through
# <https://github.com/pytorch/pytorch/issues/170834>`_ to ``register_autograd``.
# Its forward mode returns zeros, **silently**. Here *without* is the registered
# op, and *with* an ``autograd.Function`` around it.


class LinearReLU(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(linear_relu)
    setup_context = staticmethod(setup_context)
    backward = staticmethod(backward)


def sample_gradients(op):
    gradient = torch.func.grad(lambda w, row: op(row[None], w).square().sum())
    return torch.vmap(gradient, (None, 0))(weight, x)


def tangent(op):
    return torch.func.jvp(lambda x: op(x, weight), (x,), (x,))[1]


if __name__ == "__main__":
    pair = linear_relu, LinearReLU.apply
    compare("per-sample gradients", sample_gradients, *pair)
    compare("forward mode", tangent, *pair)
    assert not tangent(linear_relu).any()

# %%
# Per-sample gradients are right then. An error is better than zeros.
#
# Go further
# ----------
#
# Write the rule of ``vmap`` for a batch of weights without a loop, and one for
# the int8 weight that makes no dequantized copy. Next is ``which_api.py``.

# %%
# Answers
# -------
#
# More weights are more columns: flatten them to ``(B * N, K)``, and return
# ``out.unflatten(1, (B, N)), 1``. A row's scale is a factor of its sum:
# ``relu((x @ int8.T) * scale.T)``, with ``int8`` in the type of ``x``.
