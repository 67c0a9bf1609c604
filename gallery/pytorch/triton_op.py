# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Make an op of a kernel with torch.library.triton_op, so that PyTorch knows
# its name, its shapes and its gradient."""
# ///
r"""
A kernel as an op
=================

``torch.library.triton_op`` makes a PyTorch operator, an *op*, of the Python
function that launches a kernel. PyTorch then knows its name, its gradient and
the shapes of its results. A kernel that you only call eagerly, without
gradients, does not need an op.

After this page you can

* make an op, call it, and give it a backward in PyTorch or in Triton;
* prove it with ``opcheck``, ``gradcheck`` and ``gradgradcheck``;
* say what goes wrong when a backward launches a kernel that is no op.
"""

# sphinx_gallery_tags = ["custom op", "autograd", "elementwise", "memory bound"]
import os
import textwrap
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.library import triton_op, wrap_triton

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.compiling import compile_only


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True)


def torch_compile(op):
    """Return how many launches are in the graphs of forward and backward."""
    from torch._dynamo.backends.common import aot_autograd

    code = []
    backend = aot_autograd(fw_compiler=lambda g, _: code.append(g.code) or g)
    torch.compiler.reset()
    function = torch.compile(lambda x: op(x), backend=backend, fullgraph=True)
    with FakeTensorMode():
        out = function(torch.empty(5, 7, requires_grad=True))
        out.sum().backward() if out.requires_grad else None
    return "".join(code).count("triton_kernel_wrapper_functional(")


def outcome(call, *arguments):
    """Return what a call returns, or its error."""
    try:
        return call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ask(op, *questions):
    return [str(outcome(q, op)).partition(":")[0] for q in questions]


def show(columns, here, traced):
    rows = ["gradient", "gradient penalty", "fake tensors"]
    rows += ["kernels in torch.compile", "torch.export"]
    answers = [a + b for a, b in zip(here, traced, strict=True)]
    print(pd.DataFrame(answers, columns, rows).T.to_string())


# %%
# Three ways to call a kernel
# ---------------------------
#
# The kernel computes a sine. ``launch`` is the Python code around a kernel.

BLOCK = 1024


@triton.jit
def sine_kernel(x_ptr, out_ptr, N, ACC: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    # tl.sin takes float32 or float64: a 16-bit x is converted to float32.
    tl.store(out_ptr + offs, tl.sin(x.to(ACC)), mask=mask)


def launch(kernel, *inputs, out=None):
    """Return what a kernel computes from each element of the inputs."""
    x, *others = [t.contiguous() for t in inputs]
    if not x.is_floating_point():
        raise TypeError(f"takes floating dtypes, not {x.dtype}")
    for t in others:
        if (t.dtype, t.shape, t.device) != (x.dtype, x.shape, x.device):
            raise ValueError("takes tensors of one dtype, shape and device")
    out = torch.empty_like(x) if out is None else out
    ACC = tl.float64 if x.dtype == torch.float64 else tl.float32
    grid = (triton.cdiv(x.numel(), BLOCK),)
    kernel[grid](x, *others, out, x.numel(), ACC, BLOCK)
    return out


# %%
# ``launch`` alone is a plain function. The two other ways are an
# ``autograd.Function`` and an op. They share a backward in PyTorch operators.


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward_in_torch(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * torch.cos(x)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return launch(sine_kernel, x)

    @staticmethod
    def backward(ctx, grad):
        return backward_in_torch(ctx, grad)


@triton_op("triton_gallery::sine", mutates_args={})
def sine(x: torch.Tensor) -> torch.Tensor:
    return launch(wrap_triton(sine_kernel), x)


sine.register_autograd(backward_in_torch, setup_context=save)

# %%
# What an op gives you
# --------------------
#
# Five questions to each. A *gradient penalty* is a loss that contains a
# gradient, so its backward differentiates a backward. A *fake tensor* has a
# shape, a dtype and a device, but no data: on fake tensors, compilers call your
# code to learn the shapes of its results.


def gradient(op):
    x = random(5)
    (dx,) = torch.autograd.grad(op(x).sum(), x)
    return "right" if torch.allclose(dx, x.cos()) else "wrong"


def gradient_penalty(op):
    x = random(5)
    loss = op(x).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    (dx,) = torch.autograd.grad(loss + dx.sum(), x)
    right = torch.allclose(dx, x.cos() - x.sin(), atol=1e-6)
    return "right" if right else "wrong"


def fake_tensors(op):
    try:
        with FakeTensorMode():
            x = torch.empty(5, 7, requires_grad=True)
            (dx,) = torch.autograd.grad(op(x).sum(), x)
            return tuple(dx.shape)
    except AttributeError:  # from a launch, which needs a GPU
        return "launches"


def torch_export(op):
    module = torch.nn.Module()
    module.forward = lambda x: op(x)
    program = torch.export.export(module, (torch.ones(5),), strict=False)
    return [*program.graph.nodes][1].target.__name__


def ask_ways(*questions):
    ways = partial(launch, sine_kernel), Sine.apply, sine
    return [ask(op, *questions) for op in ways]


@compile_only  # runs in a process where Triton compiles, for an H100
def trace_ways():
    sine.register_autograd(backward_in_torch, setup_context=save)
    return ask_ways(fake_tensors, torch_compile, torch_export)


if __name__ == "__main__":
    here = ask_ways(gradient, gradient_penalty)
    show(["function", "Function", "op"], here, trace_ways())

# %%
# The op alone answers all five. ``torch.compile`` reads your Python code, and
# finds the kernel in each: the table counts launches in its graphs of forward
# and backward. ``torch.export`` runs the code on fake tensors, and records
# operators: where it meets a bare launch, it fails.
#
# The last three rows come from a process that compiles kernels and cannot
# launch them. There, ``launches`` means that the code tried.
#
# The op
# ------
#
# * The name, ``namespace::op``. No other library may use the same one.
# * The type hints. PyTorch infers the *schema*, the op's signature, from them.
# * ``mutates_args`` names the arguments that the kernel writes to.
# * ``wrap_triton`` lets compilers see the launch. On fake tensors it leaves the
#   launch out.
#
# On tensors, the body may use only PyTorch operators and launches. You can call
# the object ``sine`` or its name in ``torch.ops``. ``default`` is the name's
# only *overload*, a version for one schema; graphs show it.

if __name__ == "__main__":
    x = random(2, 3, dtype=torch.float64)
    named = torch.ops.triton_gallery.sine
    assert torch.equal(named(x), sine(x))
    assert torch.equal(named.default(x), sine(x))
    print(named.default._schema)

# %%
# Is it right?
# ------------
#
# Value and gradient are compared with float64, for arguments up to a few
# millions. Rounding a number up to 1 makes an error of at most the dtype's
# ``eps``. The tolerance is four times as much.

if __name__ == "__main__":
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        info = torch.finfo(dtype)
        large = random(31, 65, dtype=dtype) * min(1e6, info.max / 8)
        (dx,) = torch.autograd.grad(sine(large).sum(), large)
        wide = large.double()
        exact = torch.stack([wide.sin(), wide.cos()])
        got = torch.stack([sine(large), dx]).double()
        error, tolerance = (got - exact).abs().max().item(), 4 * info.eps
        print(f"{dtype}: error {error:.1e}, tolerance {tolerance:.1e}")
        torch.testing.assert_close(got, exact, rtol=0, atol=tolerance)
    assert gradcheck(sine, x)
    assert gradgradcheck(sine, x)

# %%
# ``gradcheck`` compares the gradient with the difference :math:`(f(x +
# \epsilon) - f(x - \epsilon)) / 2 \epsilon`, and ``gradgradcheck`` does so with
# the gradient's gradient. In float32 such a difference is mostly rounding
# error, hence float64.
#
# The interpreter takes the sine from NumPy. What does a GPU run?


@compile_only
def compiled_sine():
    types = torch.float32, torch.float32, 1, tl.float32, BLOCK
    return sine_kernel.warmup(*types, grid=(1,)).asm["ptx"]


if __name__ == "__main__":
    ptx = compiled_sine()
    for name in ("sin.approx", "__cudart_i2opi_f"):
        print(f"{name} in the PTX:", name in ptx)

# %%
# A GPU runs CUDA's accurate sine, not the fast instruction ``sin.approx``. The
# second name is a table of digits of :math:`2/\pi`, for large arguments.

# %%
# A backward in Triton
# --------------------
#
# In PyTorch operators, the backward is two kernels, a cosine and a product,
# which move five arrays. One kernel moves three. It becomes an op of its own:


@triton.jit
def sine_backward_kernel(
    grad_ptr, x_ptr, dx_ptr, N, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    grad = tl.load(grad_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    tl.store(dx_ptr + offs, grad * tl.cos(x), mask=mask)


@triton_op("triton_gallery::sine_backward", mutates_args={})
def sine_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return launch(wrap_triton(sine_backward_kernel), grad, x)


def backward(ctx, grad):
    return sine_backward(grad, *ctx.saved_tensors)


sine.register_autograd(backward, setup_context=save)  # replaces the first

if __name__ == "__main__":
    assert gradcheck(sine, x)
    print(textwrap.fill(outcome(gradgradcheck, sine, x), 76))

# %%
# The new op has no backward, and the error says so. For a gradient ``g`` of
# ``grad * cos(x)``, its two gradients are ``g * cos(x)`` and ``-g * grad *
# sin(x)``. Our two ops compute them:


def second_backward(ctx, g):
    grad, x = ctx.saved_tensors
    return sine_backward(g, x), -g * grad * sine(x)


sine_backward.register_autograd(second_backward, setup_context=save)

if __name__ == "__main__":
    assert gradgradcheck(sine, x)

# %%
# A backward that launches without an op
# --------------------------------------
#
# Does the backward need an op? Two shorter ones launch the kernel, bare or
# wrapped. We ask the same questions:


def bare(ctx, grad):
    return launch(sine_backward_kernel, grad, *ctx.saved_tensors)


def wrapped(ctx, grad):
    return launch(wrap_triton(sine_backward_kernel), grad, *ctx.saved_tensors)


def ask_backwards(*questions):
    answers = []
    for function in (bare, wrapped, backward):
        sine.register_autograd(function, setup_context=save)
        answers.append(ask(sine, *questions))
    return answers


@compile_only
def trace_backwards():
    sine_backward.register_autograd(second_backward, setup_context=save)
    return ask_backwards(fake_tensors, torch_compile, torch_export)


if __name__ == "__main__":
    here = ask_backwards(gradient, gradient_penalty)
    show(["bare launch", "wrap_triton", "op"], here, trace_backwards())

# %%
# Both launches give the right gradient, and a **wrong gradient penalty without
# an error**: for autograd, what a launch returns is a constant.
# ``gradgradcheck`` finds this fault. ``wrap_triton`` helps compilers only. The
# bare launch fails there. ``torch.export`` finds nothing, as its graph has no
# backward.
#
# An op moves no data
# -------------------
#
# Neither an op nor ``wrap_triton`` copies or converts a tensor. This op returns
# the address that its kernel gets:


@triton.jit
def address_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, x_ptr.to(tl.int64))


@triton_op("triton_gallery::address", mutates_args={})
def address(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty((), dtype=torch.int64, device=x.device)
    wrap_triton(address_kernel)[(1,)](x, out)
    return out


if __name__ == "__main__":
    print("the same address:", address(x).item() == x.data_ptr())
    print(outcome(sine_backward, x, x.to("meta")))
    if DEVICE.type == "cuda":
        print(outcome(address, x.cpu()))

# %%
# A tensor on another device is not moved, but an error, of ``launch`` or of
# Triton. The only copy is the one that ``launch`` makes by ``contiguous``.
#
# opcheck, and the usual mistakes
# -------------------------------
#
# ``opcheck`` tests that the schema is true and that autograd is registered
# right. On a GPU it also compares fake and compiled results with the real ones.
# Two more ops have a mistake each:


@triton_op("triton_gallery::returns_argument", mutates_args={})
def returns_argument(x: torch.Tensor) -> torch.Tensor:
    return x


@triton_op("triton_gallery::writes_argument", mutates_args={})
def writes_argument(x: torch.Tensor) -> torch.Tensor:
    wrap_triton(sine_kernel)[(1,)](x, x, x.numel(), tl.float32, BLOCK)
    return torch.empty_like(x)


if __name__ == "__main__":
    tests = ["test_schema", "test_autograd_registration"]
    if DEVICE.type == "cuda":
        tests += ["test_faketensor", "test_aot_dispatch_dynamic"]
    check = partial(torch.library.opcheck, test_utils=tests)
    print(*check(sine, (random(5),)).items(), sep="\n")
    for op in (returns_argument, writes_argument):
        message = outcome(check, op, (random(5),)).split("): ")[-1]
        print(textwrap.shorten(message, 78))

# %%
# A third mistake is to forget ``wrap_triton``. Eager calls work, and nothing
# tells until a compiler calls the op, as in the column *bare launch* above.
#
# The result
# ----------
#
# The chart has the op's forward, ``2 * N`` elements of bfloat16, and backward,
# ``3 * N``. ``Roof`` is a copy and an addition, which move as many bytes.


def calls(N, backward):
    x = random(N, dtype=torch.bfloat16)
    data, g = x.detach(), torch.randn_like(x)
    torch.compiler.reset()
    fast = torch.compile(lambda x: x.sin(), fullgraph=True, dynamic=False)
    ops = {"Triton": sine, "PyTorch": torch.sin, "torch.compile": fast}
    if not backward:
        roof = partial(torch.empty_like(data).copy_, data)
        ops = {name: partial(op, data) for name, op in ops.items()}
        return ops | {"Roof": roof}
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = {name: partial(grad, op(x), x, g) for name, op in ops.items()}
    return ops | {"Roof": partial(torch.add, data, g)}


def rates(backward):
    sizes = [2**k for k in range(14, 29, 2)]
    times = {N: gpu_time(calls(N, backward)) for N in sizes}
    bytes_each = 6 if backward else 4
    return rate_table(times, "N", "GB/s", lambda N: bytes_each * N * 1e-6)


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_backward = rates(False), rates(True)
    for name, rows in (("forward", results), ("backward", results_backward)):
        print(f"{name}:", rows.to_string(), sep="\n")
        wide = rows.pivot(index="N", columns="series", values="GB/s")
        wide.plot(logx=True, title=name)
        for other in wide.columns.drop("Triton"):
            ratio = wide["Triton"] / wide[other]
            low, high = ratio.min(), ratio.max()
            print(f"{name}: {low:.2f} to {high:.2f} times {other}'s rate")

# %%
# Forward, each is one kernel that moves two arrays. Backward, PyTorch has two
# kernels that move five arrays, and the others have one that moves three.
#
# Exercises
# ---------
#
# **1.** Make an op ``cosine`` with a backward, from the kernels of this page.


def cosine(x):
    return None  # your op


def check_cosine(op):
    x = random(2, 3, dtype=torch.float64)
    if op(x) is None:
        return "not solved yet"
    right = gradcheck(op, x, raise_exception=False)
    right &= torch.allclose(op(x), x.cos())
    return "right" if right else "wrong"


if __name__ == "__main__":
    print("cosine:", check_cosine(cosine))

# %%
# **2.** Make an op ``sine_`` that overwrites a contiguous ``x`` with its sine,
# and returns nothing. Can it have a backward? (Autograd counts the changes of a
# tensor in ``_version``.)


def sine_(x):
    pass  # your op


def check_in_place(op):
    x = random(5).detach()
    expected, version = x.sin(), x._version
    op(x)
    right = torch.allclose(x, expected) and x._version > version
    return "right" if right else "not solved yet"


if __name__ == "__main__":
    print("sine_:", check_in_place(sine_))

# %%
# Next is ``subsystems.py``. To read on: `torch.library
# <https://docs.pytorch.org/docs/stable/library.html>`_; what the search for
# kernels `does not cover <https://github.com/pytorch/pytorch/pull/160120>`_.

# %%
# Answers
# -------
#
# **1.** The backward kernel computes a cosine, if ``grad`` is 1.


@triton_op("triton_gallery::cosine", mutates_args={})
def cosine_answer(x: torch.Tensor) -> torch.Tensor:
    return launch(wrap_triton(sine_backward_kernel), torch.ones_like(x), x)


def cosine_backward(ctx, grad):
    return -grad * sine(*ctx.saved_tensors)


cosine_answer.register_autograd(cosine_backward, setup_context=save)

if __name__ == "__main__":
    assert check_cosine(cosine_answer) == "right"

# %%
# **2.** ``mutates_args`` tells PyTorch of the change, and the schema has it. A
# backward is refused.


@triton_op("triton_gallery::sine_", mutates_args={"x"})
def sine_answer_(x: torch.Tensor) -> None:
    if x.requires_grad or not x.is_contiguous():
        raise ValueError("sine_ takes a contiguous x, and has no backward")
    launch(wrap_triton(sine_kernel), x, out=x)


if __name__ == "__main__":
    assert check_in_place(sine_answer_) == "right"
    print(torch.ops.triton_gallery.sine_.default._schema)
    print(textwrap.fill(outcome(sine_answer_.register_autograd, backward), 76))
