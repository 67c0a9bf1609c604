# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "numpy", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Choose between a bare kernel, triton_op and custom_op by a table of what each
# supports, every cell of which was run."""
# tool = true
# shown_first = "Which one"
# ///
r"""
Which API: bare kernel, triton_op or custom_op
==============================================

A plain Python function can launch a *bare kernel*, or ``triton_op`` or
``custom_op`` can make that function an op of PyTorch. The choice decides what
works with the kernel: autograd, compilers, export, the CPU. If you only want to
write a first op, read ``triton_op.py`` instead.

After this page you can

* choose one of the three by a table that a run printed;
* name what goes wrong without an error;
* say what a call of each costs, and which PyTorch has it.
"""

# sphinx_gallery_tags = ["custom op", "torch.compile"]
import os
import textwrap
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import flop_counter
from torch.utils.benchmark import Timer

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.outcomes import outcome_table, run_package, tried

# %%
# One kernel, three APIs
# ----------------------
#
# The kernel squares a tensor. With ``finite=True`` its launcher looks at
# values, which compilers dislike.


@triton.jit
def square_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    # In int32 the product below would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    tl.store(y_ptr + offs, x * x, mask=offs < N)


def check(x, finite):
    if finite and not x.isfinite().all():
        raise ValueError("square got an infinity or NaN")


def bare(x, finite=False, kernel=square_kernel):
    check(x, finite)
    x, N = x.contiguous(), x.numel()
    y = x.new_empty(x.shape)
    kernel[(triton.cdiv(N, 1024),)](x, y, N, BLOCK=1024)
    return y


@torch.library.triton_op("triton_gallery::square_traced", mutates_args=())
def traced(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
    return bare(x, finite, torch.library.wrap_triton(square_kernel))


@torch.library.custom_op("triton_gallery::square_opaque", mutates_args=())
def opaque(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
    return bare(x, finite)


opaque.register_fake(lambda x, finite=False: x.new_empty(x.shape))

OPS = {"bare kernel": bare, "triton_op": traced, "custom_op": opaque}

# %%
# ``register_fake`` tells a compiler the shape of a ``custom_op``'s result. A
# ``triton_op`` needs none: the compiler runs its launcher, without the kernel.
# Both can be told more: here a gradient, a fallback for the CPU, a rule for
# ``vmap`` and a count of operations.


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def backward(ctx, grad):
    return 2 * ctx.saved_tensors[0] * grad, None  # finite has no gradient


def fallback(x, finite=False):
    check(x, finite)
    return (x * x).contiguous()  # laid out as the kernel's result


def complete(op, name):
    op.register_autograd(backward, setup_context=save)
    op.register_kernel("cpu")(fallback)
    # A batch of tensors is a tensor with more elements: the same op serves.
    op.register_vmap(lambda info, dims, *x: (op(*x), dims[0]))
    flop_counter.register_flop_formula(name)(
        lambda shape, *_, **__: shape.numel()
    )


complete(opaque, torch.ops.triton_gallery.square_opaque)
complete(traced, torch.ops.triton_gallery.square_traced)

# %%
# Is it right?
# ------------
#
# Each op, for a size that its block of 1024 divides and one that it does not:

if __name__ == "__main__":
    for x in torch.randn(1024, device=DEVICE), torch.randn(999, device=DEVICE):
        for op in OPS.values():
            torch.testing.assert_close(op(x), x * x)

# %%
# How each row is tried
# ---------------------
#
# A row of the table stands for a line of code, with a function of this page in
# the place of ``op``. If it returns a tensor, that has to be the square of
# ``x``; otherwise the line does its own check. ``tried`` runs each line with
# each of the three, each time in a process of its own where Triton compiles,
# never interprets. So a crash is an outcome, too. What was not ok is printed.


def attempt(row, api, device):
    torch.manual_seed(0)
    x = torch.randn(1000, device=device)
    y = eval(ROWS[row], globals() | {"op": OPS[api], "x": x})
    if not isinstance(y, torch.Tensor):
        return y
    torch.testing.assert_close(y, x * x)


ROWS, gpu = {}, {}  # lines of code; what became of them

# %%
# Training: a gradient that is wrong without an error
# ---------------------------------------------------
#
# In a model, ``x`` reaches the loss by other paths, too: here by ``x.sum()``.


def training(op, x):
    x.requires_grad_()
    loss = op(x).sum() + x.sum()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() + 1)


def compiled_function(op, x):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return op(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    training(torch.compile(lambda x: Square.apply(x), fullgraph=True), x)


rows = {
    "a call": "op(x)",
    "gradient": "training(op, x)",
    "gradient, compiled": "training(torch.compile(op, fullgraph=True), x)",
    "autograd.Function, compiled": "compiled_function(op, x)",
}
ROWS |= rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# To autograd, what a bare kernel returns is a constant. Its share of the
# gradient is missing, and the other path keeps ``backward`` from raising. A
# ``Function`` around the launch mends that.
#
# torch.compile
# -------------
#
# With ``fullgraph=True`` no part may be left to Python. ``traced_into`` reads
# Inductor's code: where it calls the op, the op stayed *opaque*; else the
# compiler *traced* into it.


def dynamic_shapes(op, x):
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), x * x)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(x[:600]), x[:600] * x[:600])


def traced_into(op, x):
    get_code = torch._inductor.utils.run_and_get_code
    y, code = get_code(torch.compile(op, fullgraph=True), x)
    torch.testing.assert_close(y, x * x)
    return "opaque" if "triton_gallery.square" in code[0] else "traced"


rows = {
    "compiled": "torch.compile(op)(x)",
    "compiled, no graph break": "torch.compile(op, fullgraph=True)(x)",
    "compiled, values looked at": (
        "torch.compile(op, fullgraph=True)(x, finite=True)"
    ),
    "compiled, dynamic shapes": "dynamic_shapes(op, x)",
    "what the compiler does": "traced_into(op, x)",
}
ROWS |= rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# ``if not x.isfinite().all()`` needs a value while the compiler traces, and
# there is none. No compiler looks into a ``custom_op``: its launcher runs when
# there are values.
#
# Export and packages
# -------------------
#
# ``aot_inductor`` makes a *package* of an exported program, and runs it in a
# process that has PyTorch and none of our ops.


def export(op, x, strict=False):
    class Square(torch.nn.Module):
        def forward(self, x):
            return op(x)

    program = torch.export.export(Square(), (x,), strict=strict)
    torch.export.save(program, "square.pt2")
    return torch.export.load("square.pt2")


def aot_inductor(op, x):
    program, file = export(op, x, strict=True), os.path.abspath("aot.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=file)
    return run_package(file, x)


rows = {
    "torch.export": "export(op, x).module()(x)",
    "AOTInductor's package": "aot_inductor(op, x)",
}
ROWS |= rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# With ``strict=False`` export runs the function on tensors without memory, and
# a bare kernel is launched on them. With ``strict=True`` it reads the function
# and finds the launch. A package holds compiled kernels, but no Python: it
# knows a ``custom_op`` by name alone, and the other process has no such op.
#
# Other subsystems
# ----------------
#
# ``TwoTensor`` is a tensor subclass of PyTorch's own tests: each operator runs
# on both of its tensors.


def count_operations(op, x):
    with flop_counter.FlopCounterMode(display=False) as counter:
        y = op(x)
    torch.testing.assert_close(counter.get_total_flops(), x.numel())
    return y


def tensor_subclass(op, x):
    y = op(TwoTensor(x, x + 1))
    torch.testing.assert_close((y.a, y.b), (x * x, (x + 1) * (x + 1)))


def cuda_graph(op, x):
    op(x)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    x.normal_()
    graph.replay()
    return y


rows = {
    "CPU tensor": "op(x.cpu()).to(x.device)",
    "CPU tensor, compiled": "torch.compile(op)(x.cpu()).to(x.device)",
    "vmap": "torch.vmap(op)(x.view(10, -1)).view(-1)",
    "count of operations": "count_operations(op, x)",
    "tensor subclass": "tensor_subclass(op, x)",
    "CUDA graph": "cuda_graph(op, x)",
}
ROWS |= rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# These subsystems work on ops, and a launch is no op. The counter misses it,
# again without an error. For the others, the kernel gets an address on the CPU,
# or that of a tensor without memory of its own.
#
# On a CPU tensor, a call of an op runs its fallback. But ``torch.compile``
# looks into a ``triton_op`` and compiles its launch, which cannot run there. Of
# a ``custom_op`` it sees a call, which runs the fallback.
#
# Without a GPU
# -------------
#
# The same rows on the CPU, with the machine's GPU hidden if there is one:

if __name__ == "__main__":
    cpu = tried(attempt, ROWS, OPS, "cpu", reasons=False)
    print(outcome_table(cpu).to_string())
    print(textwrap.fill(cpu["compiled", "triton_op"], 76))

# %%
# Compiled code runs with a ``custom_op`` only, and no package runs.
#
# What a call costs
# -----------------
#
# The CPU's time for a call, in microseconds: ``x`` needs no gradient, ``w``
# does; then the backward. All are measured in turns, and the least of ten times
# counts.


def calls(op):
    x = torch.randn(1000, device=DEVICE)
    w = x.clone().requires_grad_()
    y, lines = op(w), {"op(x)": partial(op, x), "op(w)": partial(op, w)}
    if y.requires_grad:
        grad = partial(torch.autograd.grad, y, w, x, retain_graph=True)
        lines["backward"] = grad
    return lines


if __name__ == "__main__" and DEVICE.type == "cuda":
    timers = {
        (line, api): Timer("call()", globals={"call": call})
        for api, op in OPS.items()
        for line, call in calls(op).items()
    }
    least = {}
    for _ in range(10):
        for cell, timer in timers.items():
            seconds = timer.timeit(500).median
            least[cell] = min(seconds, least.get(cell, seconds))
    table = 1e6 * pd.Series(least).unstack(sort=False)
    print(table.round(1).to_string(na_rep="-"))

# %%
# The bare kernel does the same in both of its rows. An op adds to that, and
# more if a gradient is recorded. A kernel that runs for longer hides these
# times, as the CPU goes on meanwhile. ``what_a_call_costs.py`` takes a call
# apart, and has faster ways to register an op.
#
# Since which PyTorch
# -------------------
#
# === =====================================================================
# 2.3 bare kernels under ``torch.compile``, with dynamic shapes, in an
#     ``autograd.Function``, and in AOTInductor's packages
# 2.4 ``custom_op``, ``register_autograd``, ``register_kernel``
# 2.6 ``triton_op``, ``wrap_triton``
# === =====================================================================
#
# The versions are from PyTorch's pages: the `release notes of 2.3
# <https://github.com/pytorch/pytorch/releases/tag/v2.3.0>`_ and the `tutorial
# <https://docs.pytorch.org/tutorials/recipes/
# torch_compile_user_defined_triton_kernel_tutorial.html>`_, `torch.library in
# 2.4 <https://docs.pytorch.org/docs/2.4/library.html>`_, and the `release notes
# of 2.6 <https://github.com/pytorch/pytorch/releases/tag/v2.6.0>`_. The first
# table shows that they work in the PyTorch that *Where it runs* names.
#
# What PyTorch's chart says
# -------------------------
#
# PyTorch's tutorial on Triton kernels in ``torch.compile`` has `a chart like
# the first table <https://github.com/pytorch/tutorials/pull/3227>`_. Both agree
# but for three cells, which the chart calls *mostly* working:
#
# * the gradient of a bare kernel, which is wrong without an error;
# * a bare kernel and a ``triton_op`` that are compiled without graph breaks:
#   they work unless the launcher looks at values.
#
# Which one
# ---------
#
# Each row was tried on a GPU, in the three ways; in the script this table comes
# last. *ok*: the result is right. *fails*: an error. *wrong*: no error, and a
# wrong result. *traced*: the compiler sees the kernel; *opaque*: it does not.
# *Values looked at*: Python reads elements of ``x``, as a check for infinities
# does. The sections below have the line of code of each row. The two ops have a
# gradient, a fallback for the CPU, a rule for ``vmap`` and a formula for the
# count; ``subsystems.py`` shows what becomes of an op without these.

outcome_table(gpu) if gpu else None

# %%
# * **Begin with triton_op.** It fails in two rows: compiled on CPU tensors, and
#   where the launcher looks at values.
# * **Take custom_op** if the launcher looks at values, or if compiled code may
#   get CPU tensors. The price: no compiler sees the kernel, so AOTInductor's
#   package does not have it.
# * **A bare kernel** will do for inference in your own code: plain, compiled,
#   in a package or in a CUDA graph. Before you train, make it an op or write a
#   ``Function``: its gradient is wrong without an error.

# %%
# Go further
# ----------
#
# 1. Without ``register_autograd`` in ``complete``, what becomes of gradients?
# 2. What becomes of ``torch.func.grad(lambda x: op(x).sum())(x) ** 2 / 4``,
#    which has to be the square?
#
# Next is ``what_a_call_costs.py``, on the CPU's time for a call of each.

# %%
# Answers
# -------
#
# **1.** It fails for both ops. Only a bare kernel loses its gradient silently.
#
# **2.** It fails for both ops; ``subsystems.py`` shows the error and what mends
# it.
