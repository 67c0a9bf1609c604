# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Take the CPU time of one call apart, measure twelve ways to call a kernel, and
# choose one."""
# tool = true
# ///
r"""
What a call costs: launch overhead
==================================

Before a kernel runs on the GPU, the CPU has to call it: Python checks the
arguments, PyTorch looks for the implementation and for a gradient, Triton
looks for the compiled kernel. With a small tensor, this launch overhead takes
longer than the kernel itself. This page takes one call apart, measures
twelve ways to make such a call, and chooses the one that most ops of this
gallery take.

After this page you can

* measure the CPU time of a call, and not the GPU's by mistake;
* say what the launch overhead is made of: a launch, a check, an allocation, the
  registration of an op, and lines of your own that are worth replacing;
* choose a way to register an op by what its call costs, and by what PyTorch
  can still do with it.
"""

# sphinx_gallery_tags = ["custom op", "autograd", "launch cost"]
import ctypes
import io
import math
import os
import time
import warnings
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import wrap_triton
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# One kernel
# ----------
#
# A softmax of short rows, forward and backward: each program takes a row.


@triton.jit
def softmax_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    # Past the end of a row the tile holds -inf: exp makes it 0.
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))  # (BLOCK,)
    tl.store(y_ptr + row * N + offs, e / tl.sum(e, axis=0), mask=mask)


@triton.jit
def softmax_backward_kernel(g_ptr, y_ptr, d_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    g = tl.load(g_ptr + row * N + offs, mask=mask, other=0)
    y = tl.load(y_ptr + row * N + offs, mask=mask, other=0)
    d = y * (g - tl.sum(g * y, axis=0))  # (BLOCK,)
    tl.store(d_ptr + row * N + offs, d, mask=mask)


# %%
# A *launcher* is the Python function that checks, allocates and launches. Ours
# take the kernel as an argument: a ``triton_op`` has to wrap it, so that
# compilers see it (``triton_op.py``).


def launch(x, kernel=softmax_kernel):
    """Return the softmax of each row of a contiguous float32 tensor."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError("launch takes a contiguous float32 tensor")
    y = torch.empty_like(x)
    N = x.shape[-1]
    BLOCK = 1 << (N - 1).bit_length()  # the next power of two
    kernel[(x.numel() // N,)](x, y, N, BLOCK)
    return y


def launch_backward(g, y, kernel=softmax_backward_kernel):
    """Return the gradient of x, given that of y = softmax(x), and y."""
    if g.dtype != torch.float32 or g.shape != y.shape:
        raise TypeError("launch_backward takes float32 tensors of one shape")
    g = g.contiguous()
    d = torch.empty_like(y)
    N = y.shape[-1]
    BLOCK = 1 << (N - 1).bit_length()
    kernel[(y.numel() // N,)](g, y, d, N, BLOCK)
    return d


# %%
# Is it right?
# ------------
#
# We compare with float64. An element goes through a few roundings, and the sum
# of its row adds some: :math:`16 \cdot 2^{-24}` is enough for values up to 1.

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 3, 100, generator=generator).to(DEVICE)
    y = torch.softmax(x.double(), -1)
    d = y * (g - (g * y).sum(-1, keepdim=True))
    for out, right in ((launch(x), y), (launch_backward(g, launch(x)), d)):
        error = (out - right).abs().max().item()
        print(f"largest error {error:.1e}, allowed {2**-20:.1e}")
        torch.testing.assert_close(out.double(), right, rtol=0, atol=2**-20)

# %%
# Without a GPU
# -------------
#
# The interpreter takes milliseconds for a launch. So without a GPU PyTorch's
# operators stand in for the launchers from here on, and **only what is around a
# launch is measured**.


def operators(x, kernel=None):
    return torch.softmax(x.detach(), -1)


def operators_backward(g, y, kernel=None):
    return y * (g - (g * y).sum(-1, keepdim=True))


forward, backward = launch, launch_backward
if DEVICE.type == "cpu":
    forward, backward = operators, operators_backward

# %%
# The ways
# --------
#
# The launcher itself is the first way. Autograd, ``torch.export``, vmap and the
# flop counter cannot deal with it. An ``autograd.Function`` adds a gradient:


def function_of(op, op_backward):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = op(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            return op_backward(g, *ctx.saved_tensors)

    def softmax(x):
        wanted = x.requires_grad and torch.is_grad_enabled()
        return Softmax.apply(x) if wanted else op(x)

    return softmax


# %%
# The other ways make an op. For each op, PyTorch's *dispatcher* keeps a table
# of functions by *key*: one for each kind of device, one for autograd, and so
# on. A call goes from key to key in C++; where a function is Python, C++ calls
# Python. The table is filled by
#
# * ``define``, which enters a name alone;
# * ``custom_op``, which adds a launcher that no compiler looks into;
# * ``triton_op``, which adds one that compilers look into;
# * ``impl`` and ``register_kernel``, which add one that wins on some device.

PLACE = "triton_gallery"  # the namespace of the ops


def traced(x: torch.Tensor) -> torch.Tensor:
    return forward(x, wrap_triton(softmax_kernel))


def traced_backward(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return backward(g, y, wrap_triton(softmax_backward_kernel))


def fake(*tensors):
    return torch.empty_like(tensors[-1])


def register(name, words, inputs, launcher, visible):
    """Register one op in a way, given as a list of words; return it."""
    op, made, library = f"{PLACE}::{name}", None, torch.library
    schema = f"({inputs}) -> Tensor"
    if "define" in words:
        library.define(op, schema, lib=LIBRARY)
    if "custom_op" in words:
        made = library.custom_op(op, launcher, mutates_args=(), schema=schema)
    if "triton_op" in words:
        made = library.triton_op(op, visible, mutates_args=())
    else:  # a triton_op finds out by itself what comes out
        library.register_fake(op, fake, lib=LIBRARY)
    if "impl" in words:
        library.impl(op, DEVICE.type, launcher, lib=LIBRARY)
    if "register_kernel" in words:
        library.register_kernel(op, DEVICE.type, launcher)
    return made or getattr(torch.ops.triton_gallery, name).default


# %%
# Then comes the gradient. ``register_autograd`` makes a ``Function`` of two
# functions and enters it at the autograd key. Or a ``Function`` of our own
# comes before the op. Or our own is entered at the autograd key. Then it has to
# switch that key off before it calls the op, or it would call itself; PyTorch
# documents no way to switch it off.


def make(way):
    """Return a softmax for users to call, made in a way."""
    words, name = way.split(", "), "cost_" + way.replace(", ", "_")
    op, op_backward = forward, backward
    if "launcher" not in words:
        op = register(name, words, "Tensor x", forward, traced)
        ends = "Tensor g, Tensor y", backward, traced_backward
        op_backward = register(f"{name}_backward", words, *ends)
        complete(name, op)

    def save(ctx, inputs, output):
        ctx.save_for_backward(output)

    def slope(ctx, g):
        return op_backward(g, *ctx.saved_tensors)

    def below(x):
        with torch._C._AutoDispatchBelowAutograd():
            return op(x)

    if "Function" in words:
        return function_of(op, op_backward)
    if "register_autograd" in words:
        options = {"setup_context": save, "lib": LIBRARY}
        torch.library.register_autograd(f"{PLACE}::{name}", slope, **options)
    if "own" in words:
        function = function_of(below, op_backward)
        LIBRARY.impl(name, function, f"Autograd{DEVICE.type.upper()}")
    return op


def complete(name, op):
    """Give an op what the proof below asks for, in the ordinary way."""

    def batch(info, dims, x):
        return op(x), dims[0]

    whole, library = f"{PLACE}::{name}", torch.library
    library.register_vmap(whole, batch, lib=LIBRARY)
    count = register_flop_formula(getattr(torch.ops.triton_gallery, name))
    count(lambda shape, **_: math.prod(shape))
    if DEVICE.type != "cpu":
        library.impl(whole, "cpu", operators, lib=LIBRARY)


WAYS = [
    "launcher",
    "launcher, Function",
    "define, impl",
    "define, impl, register_autograd",
    "define, impl, own",
    "custom_op, register_autograd",
    "custom_op, impl, register_autograd",
    "triton_op, register_autograd",
    "triton_op, register_kernel, register_autograd",
    "triton_op, impl, register_autograd",
    "triton_op, impl, own",
    "triton_op, impl, Function",
]
OURS = "triton_op, impl, register_autograd"  # the way of the gallery's ops
LIBRARY = torch.library.Library(PLACE, "FRAGMENT")  # when it ends, they end

if __name__ == "__main__":
    made = {way: make(way) for way in WAYS}

# %%
# What a call costs
# -----------------
#
# ``cpu_time`` takes a batch of one call, then of the next, in rotation. The GPU
# is idle when a batch begins, has less to do than the CPU, and its queue holds
# a whole batch: no call waits for it. It is wall-clock time, because autograd
# runs a backward in a thread of its own.


def cpu_time(calls, batch=20, turns=50):
    """Return the median time of each call of a dictionary, in microseconds."""
    seen = {name: [] for name in calls}
    for turn in range(-3, turns):
        for name, call in calls.items():
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(batch):
                call()
            took = time.perf_counter() - began
            if turn >= 0:  # those before compile and warm up
                seen[name].append(1e6 * took / batch)
    return {name: sorted(times)[turns // 2] for name, times in seen.items()}


# %%
# Three columns: no gradient is wanted; one is wanted, so the call prepares for
# it; and the backward, by ``torch.autograd.grad``. On a GPU ``torch.compile``
# and the replay of a CUDA graph (``cuda_graphs.py``) are below. A loop finds
# all that it needs in the CPU's caches, a call in a model may not: so in the
# first table a batch is one call, and all other ways are called in between.

NO_GRADIENT = "launcher", "define, impl"


def calls(kind):
    """Return a dictionary of calls, one for each way."""
    functions = made | {"PyTorch": partial(torch.softmax, dim=-1)}
    if DEVICE.type == "cuda":
        torch.compiler.reset()
        for name in ("PyTorch", OURS):
            function = functions[name]
            compiled = torch.compile(function, fullgraph=True, dynamic=False)
            functions[f"torch.compile of {name}"] = compiled
    x = torch.rand(1, 500, device=DEVICE).requires_grad_(kind != "forward")
    found = {name: partial(f, x) for name, f in functions.items()}
    if DEVICE.type == "cuda" and kind == "forward":
        found["CUDA graph"] = graph_of(found[OURS]).replay
    if kind == "backward":
        g, grad = torch.rand_like(x), torch.autograd.grad
        found = {
            name: partial(grad, call(), x, g, retain_graph=True)
            for name, call in found.items()
            if name not in NO_GRADIENT
        }
    return found


def graph_of(call):
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


if __name__ == "__main__":
    what = "launches included" if DEVICE.type == "cuda" else "without a launch"
    kinds = "forward", "with gradient", "backward"
    for batch in (1, 20):
        times = {kind: cpu_time(calls(kind), batch) for kind in kinds}
        costs = pd.DataFrame(times).loc[list(calls("forward"))].round(1)
        print(f"microseconds a call, {what}, in batches of {batch}")
        print(costs.to_string(na_rep="-"))

# %%
# In the second table, two ways that differ in one word tell what it costs. (Not
# in the first: there ``launcher`` costs more than some ways that do more.)
#
# * ``define, impl`` beside ``launcher``: a call from C++ to Python.
# * ``register_autograd`` is a second one. Its function asks whether a gradient
#   is wanted, and calls the dispatcher again. If one is wanted, it does so in a
#   ``Function``, adds default arguments, and calls ``save``.
# * ``custom_op`` and ``register_kernel`` put two functions of their own before
#   the launcher. One hides it from ``torch.compile``, the other makes sure
#   that no output is a view of an input.
# * ``triton_op`` has both functions, but compilers go round them. Around the
#   launcher it has a context that switches ``wrap_triton`` off, and then
#   ``wrap_triton`` itself: it shows a compiler the kernel, and in a plain call
#   hands the kernel through. ``impl`` passes by all four.

# %%
# The launch
# ----------
#
# On a GPU, ``launcher`` has a launch in it. Triton's launch overhead is mostly
# Python: it binds arguments to names, makes a key of their types and of the
# options (``what_a_launch_compiles.py``), looks up the kernel, and passes all
# on to the driver.


@triton.jit
def long_kernel(x_ptr, y_ptr, N, a, b, c, d, e, f, g, BLOCK: tl.constexpr):
    softmax_kernel(x_ptr, y_ptr, N, BLOCK)


LAUNCHES = """
softmax_kernel[(1,)](x, y, N, 512)
softmax_kernel[(1,)](x_ptr=x, y_ptr=y, N=N, BLOCK=512)
softmax_kernel[(1,)](x, y, N, 512, num_warps=8)
long_kernel[(1,)](x, y, N, 2, 3, 4, 5, 6, 7, 8, 512)
compiled[(1, 1, 1)](x, y, N, 512)
with torch.accelerator.device_index(x.device.index): pass
if x.device.index != torch.cuda.current_device(): pass
"""


def cost_of(lines, N):
    """Return a table of what lines of Python cost, in microseconds."""
    found = {}
    for line in lines.strip().splitlines():
        scope = globals() | {"N": N}
        exec(f"def call():\n    {line}", scope)
        found[line] = scope["call"]
    return pd.Series(cpu_time(found, batch=100)).round(2).to_string()


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, y = torch.rand(2, 500, device=DEVICE)
    compiled = softmax_kernel.warmup(x, y, 500, 512, grid=(1,))
    print(cost_of(LAUNCHES, 500))

# %%
# ``compiled`` is what Triton looks up. Launched by hand it costs less, but
# nobody asks any more whether it fits: it was made for addresses that 16
# divides. Triton launches on the current GPU. The last two lines are for
# tensors that may be on another: to switch always costs more than to ask first.

# %%
# The lines of a launcher
# -----------------------

LINES = """
torch.empty_like(x)
x.view(-1)
x.contiguous()
triton.cdiv(N, 512)
-(-N // 512)
triton.next_power_of_2(N)
1 << (N - 1).bit_length()
"""

if __name__ == "__main__":
    x, y = torch.rand(2, 1, 500, device=DEVICE)
    print(cost_of(LINES, 500))

# %%
# A line that makes a tensor, or a view of one, goes through the dispatcher. A
# ``contiguous`` that has nothing to do costs much less. Triton's helpers look
# for constexprs among their arguments; plain arithmetic does without.

# %%
# Proof
# -----
#
# A cheap call is worth nothing if PyTorch no longer gets along with the op.
# ``which_api.py`` explains these rows. *wrong* is a wrong result without an
# error; *refused*, an error instead, is better. ``opcheck`` takes ops alone:
# for a plain function it raises ``ValueError``. Without a GPU, PyTorch's own
# operators stand in for the kernels here: compilers cannot look into
# interpreted kernels, and fail with "Cannot access data pointer". So test an op
# of yours on a GPU.


same = torch.testing.assert_close


def slope(y, x, **options):
    """Return the gradient of a sum of two terms, of which one may be lost."""
    return torch.autograd.grad(y.square().sum() + x.sum(), x, **options)[0]


def training(op, x):
    x.requires_grad_()
    same(slope(op(x), x), slope(torch.softmax(x, -1), x))


def second_gradient(op, x):
    y = op(x.requires_grad_())
    d = slope(y, x, create_graph=True)
    try:
        slope(d, x)
    except RuntimeError:
        return "refused"
    raise AssertionError("a term is lost, without an error")


def flop_counter(op, x):
    with FlopCounterMode(display=False) as counter:
        op(x)
    same(counter.get_total_flops(), x.numel())


def tensor_subclass(op, x):
    from torch.testing._internal.two_tensor import TwoTensor

    y = op(TwoTensor(x, x + 1))
    same((y.a, y.b), (torch.softmax(x, -1), torch.softmax(x + 1, -1)))


def vmap(op, x):
    same(torch.vmap(op)(x), torch.softmax(x, -1))


def opcheck(op, x):
    torch.library.opcheck(op, (x.requires_grad_(),))


def export(op, x):
    model, file = torch.nn.Module(), io.BytesIO()
    model.forward = lambda x: op(x)
    program = torch.export.export(model, (x,))
    torch.export.save(program, file)
    same(torch.export.load(file).module()(x), torch.softmax(x, -1))
    return program


# %%
# Four more need a GPU. Code of ``torch.compile`` that calls the op has not
# looked into it. ``aot_inductor`` takes long, so two ways have to do.


def torch_compile(op, x):
    from torch._inductor import config, utils

    x.requires_grad_()
    with config.patch(force_disable_caches=True):  # or there is no code
        compiled = torch.compile(op, fullgraph=True)
        y, codes = utils.run_and_get_code(compiled, x)
        same(slope(y, x), slope(torch.softmax(x, -1), x))
    return "opaque" if "ops.triton_gallery" in "".join(codes) else "traced"


def aot_inductor(op, x):
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)  # see aot_inductor.py
    file = torch._inductor.aoti_compile_and_package(export(op, x))
    package = torch._inductor.aoti_load_package(file)
    same(package(x), torch.softmax(x, -1))


def cpu_fallback(op, x):
    same(op(x.cpu()), torch.softmax(x.cpu(), -1))


def cuda_graph(op, x):
    y = torch.empty_like(x)
    graph = graph_of(lambda: y.copy_(op(x)))
    x.normal_()
    graph.replay()
    same(y, torch.softmax(x, -1))


ROWS = [training, second_gradient, flop_counter, tensor_subclass, vmap]
ROWS += [opcheck, export]
if DEVICE.type == "cuda":
    ROWS += [torch_compile, aot_inductor, cpu_fallback, cuda_graph]
BEFORE = "triton_op, register_autograd"  # OURS must not lose what this has


def outcome(row, way, op):
    """Return what became of a row; "-" where it was not tried."""
    fatal = row is tensor_subclass and "launcher" in way  # reads address 0
    if fatal or (row is aot_inductor and way not in (BEFORE, OURS)):
        return "-"
    torch.compiler.reset()
    x = torch.linspace(-9, 9, 1000, device=DEVICE).view(10, 100)
    try:
        with warnings.catch_warnings(action="ignore"):  # of lost gradients
            said = row(op, x)
        return said if isinstance(said, str) else "ok"
    except AssertionError:
        return "wrong"
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    # Without a GPU a launcher is operators, and hides nothing.
    ways = [way for way in WAYS if DEVICE.type == "cuda" or way[0] != "l"]
    said = {way: [outcome(row, way, made[way]) for row in ROWS] for way in ways}
    kept = pd.DataFrame(said, [row.__name__ for row in ROWS]).T
    print(kept.to_string())

# %%
# The verdict
# -----------
#
# What each way costs, and which rows it loses beside a ``triton_op`` with
# nothing added. On a GPU there is also the largest of three ratios, to what
# ``torch.compile`` makes of PyTorch's softmax. Below 1, no column is dearer:

if __name__ == "__main__":
    verdict = costs.loc[ways]
    if DEVICE.type == "cuda":
        ratios = verdict / costs.loc["torch.compile of PyTorch"]
        verdict["of torch.compile"] = ratios.max(axis=1).round(2)
    changed = (kept != kept.loc[BEFORE]) & (kept != "-")
    lost = [", ".join(kept.columns[changed.loc[way]]) for way in ways]
    print(verdict.assign(loses=lost).to_string(na_rep="-"))
    assert not lost[ways.index(OURS)]

# %%
# The way of the gallery's ops
# ----------------------------
#
# It is ``triton_op, impl, register_autograd``, as in the op of ``softmax.py``.
# Where compilers must not look into an op, as in ``persistent_matmul.py``, a
# ``custom_op`` takes the place of the ``triton_op``. In outline:
#
# .. code-block:: python
#
#    @triton_op(f"{NAMESPACE}::softmax", mutates_args={})
#    def softmax(x: torch.Tensor) -> torch.Tensor:
#        return launch(x, wrap_triton(softmax_kernel))
#
#    LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
#    LIBRARY.impl("softmax", launch, "CUDA")
#    softmax.register_autograd(slope, setup_context=save)
#
# * It loses no row: compilers, fake tensors and other devices go on using the
#   decorated function.
# * A call costs less than with ``triton_op`` alone. Of the ways that lose no
#   row only ``triton_op, impl, own`` costs still less, but it needs what
#   PyTorch does not document.
# * ``define, impl, register_autograd`` costs about as much, but no compiler
#   looks into it, and a second gradient is lost without an error: its backward
#   is an op without one.

# %%
# Break it: a queue that is full
# ------------------------------
#
# The GPU's queue of launches has an end. Then each call waits until the GPU is
# done with another one, and what looks like the CPU's time is the GPU's.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x = torch.rand(4096, 4096, device=DEVICE)
    call = partial(torch.softmax, x, -1)
    for batch in (20, 4000):
        (found,) = cpu_time({"PyTorch": call}, batch, turns=5).values()
        print(f"{batch:4} calls in a batch: {found:.1f} us each")

# %%
# Go further
# ----------
#
# Tensors made under ``torch.inference_mode`` have no autograd key. Make ``x``
# there, and measure ``forward`` again. Which way does the gallery's come close
# to?
#
# To read on: ``what_a_launch_compiles.py`` on the key of a launch,
# ``triton_op.py`` on gradients, and `torch.library
# <https://docs.pytorch.org/docs/stable/library.html>`_.

# %%
# Answers
# -------
#
# To ``define, impl``: the launcher at the device's key is the one function in
# Python that is left.
