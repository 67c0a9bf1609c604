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

To PyTorch a launch is invisible: no gradient, no name, no shape known without
running it. ``torch.library.triton_op`` makes an op of the function around a
kernel. In ``torch_compile.py`` the compiler finds the kernel; here you declare
it.

After this page you can

* make an op, call it in two ways, and read its schema;
* give it a backward, in PyTorch or in Triton, and a backward of that;
* prove it with ``opcheck``, ``gradcheck`` and ``gradgradcheck``;
* say where it beats ``torch.autograd.Function``, and where it does not.
"""

# sphinx_gallery_tags = ["custom op", "autograd", "elementwise", "memory bound"]
import inspect
import os
import sys
import tempfile
import textwrap
from functools import partial
from itertools import product
from subprocess import check_output

import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from torch.library import triton_op, wrap_triton

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table

# %%
# The problem and the kernels
# ---------------------------
#
# The feed-forward layers of many language models compute ``silu(x) * y``:
#
# .. math:: f = h(x)\,y, \qquad h(x) = x\,\sigma(x), \qquad
#    h'(x) = \sigma(x)\,(1 + x\,(1 - \sigma(x))).
#
# PyTorch moves 5 arrays in two kernels, and 9 in three for the backward. The
# floor is 3 (two reads, a write), and 5 for the gradients :math:`g\,h'\,y` and
# :math:`g\,h`. They are computed in the type ``ACC``, float32 for 16-bit types.


def silu_mul_torch(x, y):
    return torch.nn.functional.silu(x) * y


def inputs(*shape, dtype=torch.float64):
    kind = {"dtype": dtype, "device": DEVICE, "requires_grad": True}
    return [torch.randn(shape, **kind) for _ in "xy"]


@triton.jit
def silu_mul_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    N,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    tl.store(out_ptr + offs, x * tl.sigmoid(x) * y, mask=mask)


@triton.jit
def silu_mul_backward_kernel(
    grad_ptr,
    x_ptr,
    y_ptr,
    dx_ptr,
    dy_ptr,
    N,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    grad = tl.load(grad_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask).to(ACC)  # (BLOCK,)
    s = tl.sigmoid(x)
    tl.store(dx_ptr + offs, grad * y * s * (1 + x * (1 - s)), mask=mask)
    tl.store(dy_ptr + offs, grad * x * s, mask=mask)


# %%
# The op
# ------
#
# An op is a launcher with a name, ``namespace::op``, that no other library
# uses; with type hints, from which PyTorch infers the *schema*; and
# ``wrap_triton``, through which it sees the launch. ``mutates_args`` names what
# is written to. No output may alias an input. On tensors, the body may use only
# PyTorch operators and launches. Call the object, or the name in ``torch.ops``.

BLOCK = 1024
ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}


def check(*tensors):
    # Compared, not hashed: under a compiler, sizes may be symbols.
    kinds = [(t.dtype, tuple(t.shape), t.device) for t in tensors]
    if tensors[0].dtype not in ACC:
        raise TypeError(f"takes floating dtypes, not {tensors[0].dtype}")
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"takes one dtype, shape and device, not {kinds}")


def launch(kernel, x, *others):
    grid = (triton.cdiv(x.numel(), BLOCK),)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[grid](x, *others, x.numel(), ACC[x.dtype], BLOCK)


@triton_op("triton_gallery::silu_mul", mutates_args={})
def silu_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    check(x, y)
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    launch(wrap_triton(silu_mul_kernel), x, y, out)
    return out


if __name__ == "__main__":
    x, y = inputs(2, 3)
    named = torch.ops.triton_gallery.silu_mul
    assert torch.equal(silu_mul(x, y), named(x, y))
    print(named.default._schema)

# %%
# A backward in PyTorch
# ---------------------
#
# ``register_autograd`` takes two functions: ``save`` keeps what the backward
# needs; the backward turns a gradient per output into one per input. Written in
# PyTorch operators it takes several kernels, and can be differentiated again.
# ``gradcheck`` compares it with differences :math:`(f(x + \epsilon) - f(x -
# \epsilon)) / 2 \epsilon`, and ``gradgradcheck`` does so with the backward. In
# float32 these are mostly rounding error, hence float64 all the way.


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward_in_torch(ctx, grad):
    x, y = ctx.saved_tensors
    s = torch.sigmoid(x)
    return grad * y * s * (1 + x * (1 - s)), grad * x * s


silu_mul.register_autograd(backward_in_torch, setup_context=save)

if __name__ == "__main__":
    assert torch.autograd.gradcheck(silu_mul, (x, y))
    assert torch.autograd.gradgradcheck(silu_mul, (x, y))

# %%
# A backward in Triton
# --------------------
#
# The backward kernel becomes an op too, and a second registration replaces the
# first. The new op has no backward of its own yet, and says so:


@triton_op("triton_gallery::silu_mul_backward", mutates_args={})
def silu_mul_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    check(grad, x, y)
    grad, x, y = grad.contiguous(), x.contiguous(), y.contiguous()
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    launch(wrap_triton(silu_mul_backward_kernel), grad, x, y, dx, dy)
    return dx, dy


def backward(ctx, grad):
    return silu_mul_backward(grad, *ctx.saved_tensors)


silu_mul.register_autograd(backward, setup_context=save)


def outcome(call, *arguments, **options):
    """Return what a call does, or its error's first line, a compiler's last."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        kind, lines = type(error).__name__, str(error).strip().splitlines()
        line = lines[-1 if kind == "CompilationError" else 0]
        return textwrap.fill(f"{kind}: {line}", 76, subsequent_indent="    ")


if __name__ == "__main__":
    assert torch.autograd.gradcheck(silu_mul, (x, y))
    print(outcome(torch.autograd.gradgradcheck, silu_mul, (x, y)))

# %%
# With gradients :math:`a` and :math:`b` of its two outputs, its backward is the
# gradient of :math:`a\,g\,h'\,y + b\,g\,h`, this time in PyTorch operators.


def second_backward(ctx, a, b):
    grad, x, y = ctx.saved_tensors
    s = torch.sigmoid(x)
    h, dh = x * s, s * (1 + x * (1 - s))
    ddh = s * (1 - s) * (2 + x * (1 - 2 * s))
    return a * y * dh + b * h, grad * (a * y * ddh + b * dh), a * grad * dh


silu_mul_backward.register_autograd(second_backward, setup_context=save)

if __name__ == "__main__":
    assert torch.autograd.gradgradcheck(silu_mul, (x, y))

# %%
# The check
# ---------
#
# Value and gradients are compared with float64 autograd. ``rtol`` allows for an
# error of :math:`10^{-5}` and a rounding, ``atol`` for terms that cancel.

for dtype in (torch.float16, torch.bfloat16, torch.float32):
    for shape in ((), (31, 65), (2, 0, 3)):
        pair = inputs(*shape, dtype=dtype)
        wide, grad = [t.double() for t in pair], torch.randn_like(pair[0])
        out, expected = silu_mul(*pair), silu_mul_torch(*wide)
        got = torch.autograd.grad(out, pair, grad)
        exact = torch.autograd.grad(expected, wide, grad.double())
        got, exact = torch.stack([out, *got]), torch.stack([expected, *exact])
        rtol = 1e-5 + torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=1e-5)

# %%
# opcheck, fake tensors and torch.compile
# ---------------------------------------
#
# A *fake tensor* has a shape, a dtype and a device, and no data. Compilers run
# an op on them to learn what comes out. A ``custom_op`` needs a function for
# that, ``register_fake``; a ``triton_op`` is run itself, without the launches.
# ``torch.library.opcheck`` tests that the schema is true, that autograd is
# registered as it should, and that fake and compiled results are like the real.
#
# The interpreter cannot leave launches out: this runs in a process without it.
# Where there is no GPU, ``register_kernel("cpu")`` gives the op something to
# run, opcheck's last part is left out, and Triton compiles for a stand-in.

PAGE = [check, launch, silu_mul_kernel.fn, silu_mul._abstract_fn, save]
PAGE += [silu_mul_backward_kernel.fn, silu_mul_backward._abstract_fn]
HEAD = """
import gc; gc.disable()  # imports take half as long
import textwrap, types, torch, triton, triton.language as tl
from torch._subclasses import FakeTensorMode
from torch.library import triton_op, wrap_triton
DEVICE, BLOCK = "cuda" if torch.cuda.is_available() else "cpu", 1024
ACC = {torch.float64: tl.float64}
if DEVICE == "cpu":
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0,
        get_current_stream=lambda device: 0))
"""


def run(*parts, **environment):
    """Print what a script prints that runs without the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0"} | environment
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        for part in (HEAD, *parts):
            text = part if isinstance(part, str) else inspect.getsource(part)
            print(textwrap.dedent(text), file=script, flush=True)
        command = [sys.executable, "-W", "ignore", script.name]
        print(check_output(command, env=environment, text=True), end="")


if __name__ == "__main__":

    def tests():
        parts = ["test_schema", "test_autograd_registration", "test_faketensor"]
        parts += ["test_aot_dispatch_dynamic"] * torch.cuda.is_available()
        silu_mul.register_autograd(backward, setup_context=save)
        silu_mul.register_kernel("cpu")(silu_mul_torch)
        said = torch.library.opcheck(silu_mul, inputs(5, 7), test_utils=parts)
        print(*said.items(), sep="\n")

    def compiled():
        from torch._dynamo.backends.common import aot_autograd

        def show(module, _):
            for node in module.graph.nodes:
                if (name := str(node.target)).startswith(("aten", "triton")):
                    val = node.meta["val"]
                    what = [*val] if isinstance(val, dict) else [*val.shape]
                    print(f"{name:34}{what}")
            return module

        backend = aot_autograd(fw_compiler=show)
        function = torch.compile(silu_mul, backend=backend, dynamic=True)
        with FakeTensorMode(), torch.no_grad():
            function(*inputs(5, 7))

    functions = [*PAGE, backward, silu_mul_torch, inputs, tests, compiled]
    run(*functions, "tests()", "compiled()")

# %%
# The last two lines are ``torch.compile``'s graph. The op is gone: the compiler
# saw the launch, read in the kernel which argument changes, and can fuse what
# is around it. (A ``custom_op`` would stay.) The sizes are symbols: any size
# will do. For CPU tensors the graph has the launch, too, and fails when it is
# run: ``register_kernel`` serves eager calls only.
#
# The usual mistakes
# ------------------
#
# Here is an op without ``mutates_args``, name, type hints or grid, and with
# addresses in the place of tensors. It is called before each of the first five
# repairs. The op printed last has all six.

SHOWN = """
@triton_op
def shown(x, y):
    out, N = torch.empty_like(x), x.numel()
    silu_mul_kernel(
        x.data_ptr(), y.data_ptr(), out.data_ptr(), N, tl.float32, BLOCK
    )
    return out
"""
REPAIRS = {
    "@triton_op": "@triton_op(mutates_args={})",
    "triton_op(": 'triton_op("triton_gallery::shown", ',
    "x, y)": "x: torch.Tensor, y: torch.Tensor) -> torch.Tensor",
    "silu_mul_kernel(": "silu_mul_kernel[(triton.cdiv(N, BLOCK),)](",
    ".data_ptr()": "",
    "silu_mul_kernel[": "wrap_triton(silu_mul_kernel)[",
}
CALL = "shown(*[torch.ones(5, device=DEVICE)] * 2)"
versions = [SHOWN]
for old, new in REPAIRS.items():
    versions.append(versions[-1].replace(old, new))

if __name__ == "__main__":
    calls = [f"print(outcome(exec, {v + CALL!r}))" for v in versions[:5]]
    run(silu_mul_kernel.fn, outcome, *calls)
    print(versions[6])

# %%
# ``data_ptr()`` is a number, which a kernel cannot load from; pass the tensor.
# No error names the last repair, ``wrap_triton``. On a GPU the op works without
# it. Run on fake tensors, the op then launches its kernel on addresses of 0:

FAKE = f"print({CALL})\nwith FakeTensorMode(): {CALL}\ntorch.cuda.synchronize()"
if __name__ == "__main__" and DEVICE.type == "cuda":
    call = f"print(outcome(exec, {versions[5] + FAKE!r}))"
    run(silu_mul_kernel.fn, outcome, call)

# %%
# Break it: the kernel that you edited is not the one that runs
# -------------------------------------------------------------
#
# ``torch.compile`` keeps results on disk, with the kernels' source in the key.
# It finds the kernels by reading the op's source, where it looks for a call of
# ``wrap_triton`` on a kernel's name. It overlooks ``torch.library.wrap_triton``
# and a helper that wraps the kernel it is given. So import it by name, and call
# it in the op. Of four processes, the second and the fourth have a kernel that
# returns 10 times as much. The fourth gets the third's result:

COMPILED = f"print(torch.compile(lambda: {CALL})()[0].item())"
if __name__ == "__main__" and DEVICE.type == "cuda":
    with tempfile.TemporaryDirectory() as cache:
        for place, times in product(("", "torch.library."), (1, 10)):
            kernel = inspect.getsource(silu_mul_kernel.fn)
            kernel = kernel.replace("x * tl", f"{times} * x * tl")
            op = versions[6].replace("wrap_triton(", f"{place}wrap_triton(")
            print(f"{place}wrap_triton, times {times}:", end=" ", flush=True)
            run(kernel, op, COMPILED, TORCHINDUCTOR_CACHE_DIR=cache)

# %%
# Nor is the rest of the op in the key. Where its launcher passed another
# constant to an unchanged kernel, a new process still ran the old graph (an
# H100, torch 2.11). Delete the folder of ``TORCHINDUCTOR_CACHE_DIR`` after such
# a change.
#
# Why not autograd.Function
# -------------------------
#
# A ``Function`` joins a kernel and its backward, too, and much code uses one:


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), BLOCK),)
        silu_mul_kernel[grid](x, y, out, x.numel(), ACC[x.dtype], BLOCK)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        arguments = grad.contiguous(), x, y, dx, dy, x.numel(), ACC[x.dtype]
        grid = (triton.cdiv(x.numel(), BLOCK),)
        silu_mul_backward_kernel[grid](*arguments, BLOCK)
        return dx, dy


def gradient_has_gradient(op):
    (dx,) = torch.autograd.grad(op(x, y).sum(), x, create_graph=True)
    return dx.requires_grad


def forward_mode_tangent(op):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), y.detach())
        return forward_ad.unpack_dual(op(dual, y.detach())).tangent


def fullgraph_right(op):
    out = torch.compile(lambda x, y: op(x, y), fullgraph=True)(x, y)
    return torch.allclose(out, silu_mul_torch(x, y))


def compare(trial):
    for kind, op in (("Function", SiluMul.apply), ("triton_op", silu_mul)):
        print(f"{trial.__name__}, {kind}:", outcome(trial, op), sep="\n    ")


if __name__ == "__main__":
    print(outcome(torch.library.opcheck, SiluMul.apply, (x, y)))
    compare(gradient_has_gradient)
    compare(forward_mode_tangent)

# %%
if __name__ == "__main__" and DEVICE.type == "cuda":
    compare(fullgraph_right)

# %%
# ``torch.compile`` takes both. The differences:
#
# * To autograd, what a kernel in a ``Function``'s backward returns is a
#   constant. A gradient penalty then **adds nothing, without an error**. (An op
#   without a second backward raises one; ``gradgradcheck`` finds both faults.)
# * A ``Function`` is no op, to ``opcheck`` and to all of ``subsystems.py``.
# * In forward mode, for inputs that need no gradient, it is the op that **drops
#   the derivative without an error**. The ``Function`` says what is missing.
#
# An op that changes its argument
# -------------------------------
#
# Its name ends in an underscore, and it cannot have a backward. Autograd would
# not notice the change of inputs that require a gradient: the op refuses them.


@triton_op("triton_gallery::silu_mul_", mutates_args={"x"})
def silu_mul_(x: torch.Tensor, y: torch.Tensor) -> None:
    check(x, y)
    if x.requires_grad or y.requires_grad or not x.is_contiguous():
        raise ValueError("silu_mul_ takes a contiguous x, and has no backward")
    launch(wrap_triton(silu_mul_kernel), x, y.contiguous(), x)


if __name__ == "__main__":
    print(torch.ops.triton_gallery.silu_mul_.default._schema)
    print(outcome(silu_mul_.register_autograd, backward))
    print(outcome(silu_mul_, x, y))

# %%
# The benchmark
# -------------
#
# The figure counts ``3 * N`` bfloat16 elements forward and ``5 * N`` backward,
# through autograd. ``Roof`` is an addition forward, and backward a copy of as
# many bytes.

SIZES = [2**k for k in range(14, 29, 2)]


def calls(N, backward):
    x, y = inputs(N, dtype=torch.bfloat16)
    torch.compiler.reset()
    fast = torch.compile(silu_mul_torch, fullgraph=True, dynamic=False)
    ops = {"Triton": silu_mul, "PyTorch": silu_mul_torch, "torch.compile": fast}
    if not backward:
        x, y = x.detach(), y.detach()
        found = ops | {"Roof": torch.add}
        return {name: partial(op, x, y) for name, op in found.items()}
    grad = partial(torch.autograd.grad, retain_graph=True)
    g = torch.randn_like(x)
    found = {
        name: partial(grad, op(x, y), (x, y), g) for name, op in ops.items()
    }
    flat = torch.randn(5 * N // 2, device=DEVICE, dtype=torch.bfloat16)
    return found | {"Roof": partial(torch.empty_like(flat).copy_, flat)}


def table(backward):
    times = {N: gpu_time(calls(N, backward)) for N in SIZES}
    arrays = 5 if backward else 3
    return rate_table(times, "N", "GB/s", lambda N: 2 * arrays * N * 1e-6)


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_backward = table(False), table(True)
    for name, one in (("forward", results), ("backward", results_backward)):
        print(f"{name}:", one.to_string(), sep="\n")
        wide = one.pivot(index="N", columns="series", values="GB/s")
        wide.plot(logx=True, title=name)

# %%
# Reading the result
# ------------------
#
# On the right a kernel is at the roof, or a little above it backward, whether
# you or Inductor wrote it. PyTorch moves 5 arrays for our 3, backward 9 for 5.
# On the left the time hardly depends on ``N``: the number of kernels counts.
# The CPU's time, in the table, is another matter: our call, and a compiled one,
# take longer than PyTorch's. (``late``: the GPU had to wait for the CPU.)
#
# Go further
# ----------
#
# 1. Add ``alpha: float = 1.0`` to ``silu_mul``. What does ``backward`` return?
# 2. ``gradcheck`` passed on six elements. Which bugs of a kernel stay hidden?
#
# Next is ``subsystems.py``. To read on: `torch.library
# <https://docs.pytorch.org/docs/stable/library.html>`_; what the search for
# kernels `does not cover <https://github.com/pytorch/pytorch/pull/160120>`_.

# %%
# Answers
# -------
#
# **1.** Both gradients times ``alpha``, and ``None``: a number has no gradient.
# ``save`` puts ``alpha`` into ``ctx``; ``save_for_backward`` is for tensors.
#
# **2.** All beyond the first program. The check has a larger, ragged shape.
