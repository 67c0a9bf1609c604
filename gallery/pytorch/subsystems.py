# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Teach an op what the rest of PyTorch asks of it: other devices, flop counts,
# tensor subclasses and vmap."""
# ///
r"""
An op and PyTorch's subsystems
==============================

A Triton kernel that became an op (see ``triton_op.py``) runs and compiles. The
rest of PyTorch knows nothing of it yet: some parts raise an error, some are
slow, some are silently wrong. This page gives each part the same op twice, bare
and registered, and compares the results with float64.

After this page you can

* give an op a backward, a CPU version, shapes, flops, vmap and autocast;
* let a tensor subclass, here a weight in int8, pass through your op;
* tell the gaps that raise an error from those that stay silent.
"""

# sphinx_gallery_tags = ["custom op", "matmul", "compute bound"]
import os
import textwrap
from functools import partial
from operator import call

import pandas as pd
import torch
from torch import Tensor

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The op
# ------
#
# A linear layer and its activation, ``relu(x @ weight.T + bias)``, in one
# kernel: ``2 * M * N * K`` operations. Each program computes one tile of the
# output, and applies bias and relu before it stores it. The launcher ``fused``
# becomes an op twice: ``linear_relu`` gets every registration of this page, and
# ``bare`` gets none.


@triton.jit
def linear_relu_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    double: tl.constexpr = x_ptr.dtype.element_ty == tl.float64
    ACC: tl.constexpr = tl.float64 if double else tl.float32
    pid, tiles_m = tl.program_id(axis=0).to(tl.int64), tl.cdiv(M, BLOCK_M)
    pid_m, pid_n = pid % tiles_m, pid // tiles_m
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    mask_m, mask_n = offs_m[:, None] < M, offs_n[None, :] < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    weight_ptrs = weight_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - k
        x = tl.load(x_ptrs, mask=mask_m & mask_k[None, :], other=0)
        weight = tl.load(weight_ptrs, mask=mask_n & mask_k[:, None], other=0)
        # "ieee": float32 stays float32, it is not rounded to TF32 first.
        acc = tl.dot(x, weight, acc, input_precision="ieee", out_dtype=ACC)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0)  # (BLOCK_N,)
    acc += bias[None, :].to(ACC)
    acc = tl.where(acc < 0, 0, acc)  # relu, and NaN stays NaN
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=mask_m & mask_n)


TILES = {torch.float16: (128, 128, 64), torch.bfloat16: (128, 128, 64)}
TILES |= {torch.float32: (64, 64, 32), torch.float64: (32, 32, 32)}


def check(x, weight, bias):
    dtypes = [str(tensor.dtype) for tensor in (x, weight, bias)]
    if x.dtype not in TILES or len(set(dtypes)) > 1:
        raise TypeError(f"takes one float dtype, not {', '.join(dtypes)}")
    fits = x.shape[1:] == weight.shape[1:] and weight.shape[:1] == bias.shape
    if x.ndim != 2 or not fits:
        shapes = [tuple(tensor.shape) for tensor in (x, weight, bias)]
        raise ValueError(f"takes (M, K), (N, K) and (N,), not {shapes}")
    if not x.device == weight.device == bias.device:
        raise ValueError("takes three tensors on one device")


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    check(x, weight, bias)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    out, tile = x.new_empty(M, N), TILES[x.dtype]
    if out.numel() > 0:
        grid = (triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]),)
        kernel = wrap_triton(linear_relu_kernel)
        with torch.accelerator.device_index(x.device.index):
            kernel[grid](x, weight, bias, out, M, N, K, *tile)
    return out


make_op = partial(triton_op, mutates_args=())
linear_relu = make_op("triton_gallery::linear_relu", fused)
bare = make_op("triton_gallery::linear_relu_bare", fused)

# %%
# The check
# ---------
#
# First the kernel, which ``bare`` runs on any machine. A sum of ``K + 1`` terms
# is off by at most ``(K + 1) * eps`` of the sum of their magnitudes, ``unit``;
# rounding the output comes on top.


def in_pytorch(x, weight, bias):
    return torch.relu(torch.nn.functional.linear(x, weight, bias))


def reference(*inputs):
    return in_pytorch(*(tensor.double() for tensor in inputs))


def random(M, N, K, dtype=torch.float32, device=DEVICE):
    shapes = (M, K), (N, K), (N,)
    return [torch.randn(s, dtype=dtype, device=device) for s in shapes]


torch.manual_seed(0)
for M, N, K in ((1, 1, 1), (40, 70, 100), (64, 64, 0)):
    for dtype in (torch.float16, torch.float32, torch.float64):
        inputs = random(M, N, K, dtype)
        unit = reference(*(tensor.abs() for tensor in inputs)) + 1e-9
        eps = 2.0 ** (-53 if dtype == torch.float64 else -24)
        atol = (K + 1) * eps + torch.finfo(dtype).eps
        error = (bare(*inputs).double() - reference(*inputs)) / unit
        torch.testing.assert_close(error, 0 * error, rtol=0, atol=atol)

# %%
# All that follows goes through ``compare``. It hands the bare op, then the
# registered one to a function, and prints and keeps what came out: an error, or
# how far it is from float64. First the backward; its formula is in PyTorch.


def outcome(run, op, *args):
    try:
        out = run(op, *args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if isinstance(out, int):
        return f"{out:,} flops"
    dtype = str(out.dtype).removeprefix("torch.")
    if out.is_meta:
        return f"{dtype}, shape {tuple(out.shape)}"
    expected = run(reference, *args)
    error = (out.double() - expected).norm() / expected.norm()
    wrong = f"wrong by {error:.0%}" if out.any() else "wrong: all zeros"
    size = f"error {error:.0e}" if error < 0.01 else wrong
    return f"{dtype}, {size}"


def show(name, text):
    print(textwrap.fill(f"{name:>9}: {text}", 78, subsequent_indent=" " * 11))


table = {}


def compare(subsystem, run, *args):
    table[subsystem] = [outcome(run, op, *args) for op in (bare, linear_relu)]
    show("without", table[subsystem][0])
    show("with", table[subsystem][1])


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output)


def backward(ctx, grad):
    x, weight, out = ctx.saved_tensors
    grad = grad.masked_fill(out <= 0, 0)
    return grad @ weight, grad.T @ x, grad.sum(0)


linear_relu.register_autograd(backward, setup_context=setup_context)


def gradients(op, *inputs):
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    grads = torch.autograd.grad(op(*inputs).square().sum(), inputs)
    return torch.cat([grad.flatten() for grad in grads])


x, weight, bias = inputs = random(40, 70, 96)
if __name__ == "__main__":
    compare("backward", gradients, *inputs)

# %%
# A CPU implementation
# --------------------
#
# Models are also loaded, tested and debugged without a GPU. From here on, **a
# machine without one runs** ``on_cpu`` **in every call of** ``linear_relu`` and
# not the kernel; ``bare`` goes on with the kernel, in the interpreter. Only the
# code below turns the interpreter off, to show what CPU tensors meet on a GPU
# machine or with Triton's compiler:
#
# * Triton finds no driver or, where there is a GPU, refuses the pointer.
# * ``torch.compile`` replaces a ``triton_op`` by its body before it looks for
#   implementations, and **passes over the one for the CPU** (*compiled*). If a
#   compiled model may meet CPU tensors, the body has to choose (``either``).


@linear_relu.register_kernel("cpu")
def on_cpu(x, weight, bias):
    check(x, weight, bias)
    return in_pytorch(x, weight, bias)


if __name__ == "__main__":

    def either(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (in_pytorch if x.is_cpu else fused)(x, weight, bias)

    def compiled(op, *inputs):
        torch._logging.set_logs(dynamo=40)  # errors only
        function = torch.compile(lambda *args: op(*args), backend="aot_eager")
        return function(*inputs)

    as_it_was = linear_relu_kernel
    linear_relu_kernel = triton.JITFunction(as_it_was.fn)
    on_the_cpu = [tensor.cpu() for tensor in inputs]
    compare("CPU tensors", call, *on_the_cpu)
    ops = linear_relu, make_op("triton_gallery::linear_relu_either", either)
    table["CPU, compiled"] = [outcome(compiled, op, *on_the_cpu) for op in ops]
    show("compiled", table["CPU, compiled"][0])
    show("either", table["CPU, compiled"][1])
    on_meta = [tensor.to("meta") for tensor in inputs]
    meta_for_free = outcome(call, bare, *on_meta)
    linear_relu_kernel = as_it_was

# %%
# Shapes without data
# -------------------
#
# Meta tensors, and the fake ones of ``torch.compile``, have a shape, a dtype
# and no data. For them PyTorch runs the op's body without the launch, so on a
# GPU this op needs no rule: all three lines agree (the first is from the cell
# above). Write one if the body, or Triton's interpreter, reads values.


@linear_relu.register_fake
def _(x, weight, bias):
    check(x, weight, bias)
    return x.new_empty(x.shape[0], weight.shape[0])


if __name__ == "__main__":
    show("for free", meta_for_free)
    compare("meta tensors", call, *on_meta)

# %%
# Floating-point operations
# -------------------------
#
# ``FlopCounterMode`` knows PyTorch's products. Any other op counts as 0,
# **silently**. In *training* the forward is one third; without a formula it
# would be missing. *meta* counts a layer of 65536 rows without its memory.
# PyTorch's tutorial *Using User-Defined Triton Kernels with torch.compile* has
# a formula of the inputs' shapes alone; the counter also passes ``out_shape``.


@register_flop_formula(torch.ops.triton_gallery.linear_relu)
def _(x_shape, weight_shape, *args, out_shape=None, **kwargs):
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


def flops(op, *inputs):
    with FlopCounterMode(display=False) as counter:
        op(*inputs)
    return counter.get_total_flops()


if __name__ == "__main__":
    documented = make_op("triton_gallery::linear_relu_documented", fused)

    @register_flop_formula(torch.ops.triton_gallery.linear_relu_documented)
    def _(x_shape, weight_shape, bias_shape):
        return 2 * x_shape[0] * x_shape[1] * weight_shape[0]

    show("tutorial", outcome(flops, documented, *inputs))
    compare("flop counter", flops, *inputs)
    training = partial(flops, gradients)
    show("training", outcome(training, linear_relu, *inputs))
    large = random(65536, 28672, 8192, torch.bfloat16, device="meta")
    show("meta", outcome(flops, linear_relu, *large))
    assert training(linear_relu, *inputs) == 6 * 40 * 70 * 96

# %%
# vmap
# ----
#
# Without a rule ``torch.vmap`` loops over the samples, one call for each, with
# a warning on standard error. A rule gets the batched inputs and says where its
# output's batch is. Samples become more rows of one call; weights get a loop.


@linear_relu.register_vmap
def _(info, in_dims, *inputs):
    if in_dims[1:] == (None, None):
        xs = inputs[0].movedim(in_dims[0], 0)
        out = linear_relu(xs.flatten(0, 1), *inputs[1:])
        return out.unflatten(0, xs.shape[:2]), 0
    outs, pairs = [], list(zip(inputs, in_dims, strict=True))
    for i in range(info.batch_size):
        each = (t if dim is None else t.select(dim, i) for t, dim in pairs)
        outs.append(linear_relu(*each))
    return torch.stack(outs), 0


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "triton_gallery"
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":

    def over_samples(op, xs):
        with Calls() as calls:
            out = torch.vmap(op, (0, None, None))(xs, weight, bias)
        counts[op] = calls.count
        return out

    counts = {}
    compare("vmap", over_samples, torch.randn(8, 40, 96, device=DEVICE))
    show("calls", f"{counts[bare]} without, {counts[linear_relu]} with a rule")
    table["vmap"][0] += f" ({counts[bare]} calls)"
    assert counts[bare] == 8 * counts[linear_relu] == 8

# %%
# Autocast
# --------
#
# Under ``torch.autocast`` linear layers compute in half precision. An op
# without a rule stays in float32, **silently**, and after a layer that did
# cast, it meets two dtypes at once: the second pair below.

for kind in ("cpu", "cuda"):
    linear_relu.register_autocast(kind, torch.bfloat16)


def autocast(op, *inputs, dtype=torch.bfloat16):
    with torch.autocast(DEVICE.type, dtype):
        return op(*inputs)


if __name__ == "__main__":
    compare("autocast", autocast, *inputs)
    compare("2nd autocast", autocast, x.bfloat16(), weight, bias)
    half = partial(autocast, dtype=torch.float16)
    show("float16", outcome(half, linear_relu, *inputs))
    mixed = partial(autocast, gradients)
    show("gradients", outcome(mixed, linear_relu, *inputs))

# %%
# The errors are bfloat16's; gradients arrive in the parameters' float32. In
# ``float16`` the dtype is that of the registration, **not the one that autocast
# was asked for**. (A second registration is ignored, float64 is never cast.)
#
# A tensor subclass
# -----------------
#
# This weight is int8, with a scale for each row. It looks like an ordinary
# matrix, but its ``data_ptr()`` is 0. ``__torch_dispatch__`` turns it back into
# floats for PyTorch's own ops, and knows nobody else's. The rule for our op
# changes neither op nor class; it could also call a kernel that reads int8. It
# works below autograd, so the backward still holds.


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
    compare("tensor subclass", call, x, int8, bias)
    assert int8.data_ptr() == 0

    def gradient(op):
        return gradients(lambda x: op(x, int8, bias), x)

    show("gradient", outcome(gradient, linear_relu))

# %%
# What no registration covers
# ---------------------------
#
# ``torch.func``'s gradients, here one for each sample, don't `get through
# <https://github.com/pytorch/pytorch/issues/170834>`_ to ``register_autograd``.
# Forward mode has no registration: zeros, **silently**. For now, wrap the op in
# an ``autograd.Function``: per-sample gradients are then right, and forward
# mode raises an error instead of returning zeros.


class LinearReLU(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(linear_relu)
    setup_context = staticmethod(setup_context)
    backward = staticmethod(backward)


if __name__ == "__main__":

    def sample_gradients(op):
        def loss(weight, sample):
            return op(sample[None], weight, bias).square().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    def tangent(op):
        return torch.func.jvp(lambda x: op(x, weight, bias), (x,), (x,))[1]

    for run in (sample_gradients, tangent):
        compare(f"torch.func, {run.__name__}", run)
        show("Function", outcome(run, LinearReLU.apply))

# %%
# All of it
# ---------
#
# The runs above in one table (*CPU, compiled*: ``linear_relu`` and ``either``):

right = [row[1] for k, row in table.items() if "torch.func" not in k]
assert not [text for text in right if "Error" in text or "wrong" in text]
pd.set_option("display.max_colwidth", None)
cut = {k: [textwrap.shorten(s, 56) for s in row] for k, row in table.items()}
outcomes = pd.DataFrame.from_dict(cut, "index", columns=["without", "with"])
outcomes

# %%
# The benchmark
# -------------
#
# The figure is the counted flops by the time, for square layers in bfloat16.
# ``Roof`` is cuBLAS' product alone, always at the largest size. It is measured
# anew for each point: how much it varies shows how exact the figures are.

SIZES = [2**k for k in range(9, 14)]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=SIZES,
        x_log=True,
        line_arg="provider",
        line_vals=["Triton", "PyTorch", "torch.compile", "Roof"],
        line_names=["Triton", "PyTorch", "torch.compile", "Roof"],
        ylabel="TFLOP/s",
        plot_name="subsystems",
        args={},
    )
)
def benchmark(N, provider):
    if provider == "Roof":
        N = SIZES[-1]
    layer = random(N, N, N, torch.bfloat16)
    torch.compiler.reset()  # after eight shapes it would fall back to eager
    op = {
        "Triton": linear_relu,
        "PyTorch": in_pytorch,
        "torch.compile": torch.compile(in_pytorch, dynamic=False),
        "Roof": lambda x, weight, bias: x @ weight.T,
    }[provider]
    run, work = partial(op, *layer), flops(linear_relu, *layer) * 1e-9
    times = triton.testing.do_bench(run, quantiles=[0.5, 0.2, 0.8])
    median, fast, slow = (work / milliseconds for milliseconds in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# Reading the result
# ------------------
#
# One kernel does the work of two, for PyTorch runs relu by itself. For large
# layers it still loses to PyTorch's two: it has no order of tiles for the L2
# cache and no TMA; what they would bring is not measured. The smallest layers
# wait for the CPU. There compiled code is slowest, and PyTorch fastest.
#
# Go further
# ----------
#
# 1. Change the fake rule to ``x.new_empty(weight.shape[0], x.shape[0]).T``.
#    Does this page notice? What does?
# 2. Write the rule of vmap for a batch of weights without a loop.
#
# Next is ``which_api.py``. To read on: `torch.library
# <https://docs.pytorch.org/docs/stable/library.html>`_.

# %%
# Answers
# -------
#
# **1.** No, for only the strides are wrong. ``test_faketensor`` of
# ``torch.library.opcheck`` finds it.
#
# **2.** More weights are more columns: flatten them to ``(B * N, K)``, ``bias``
# to ``(B * N,)``, and return ``out.unflatten(1, (B, N)), 1``.
