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

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import custom_op, triton_op, wrap_triton
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

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
# values, which compilers dislike. ``triton_op``, ``wrap_triton`` and
# ``custom_op`` are in ``torch.library``.


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


@triton_op("triton_gallery::square_traced", mutates_args=())
def traced(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
    return bare(x, finite, wrap_triton(square_kernel))


@custom_op("triton_gallery::square_opaque", mutates_args=())
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
    return (x * x).contiguous()  # as the kernel's result is


def complete(op, name):
    op.register_autograd(backward, setup_context=save)
    op.register_kernel("cpu")(fallback)
    # A batch of tensors is a tensor with more elements: the same op serves.
    op.register_vmap(lambda info, dims, *x: (op(*x), dims[0]))
    register_flop_formula(name)(lambda shape, *_, **__: shape.numel())


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
# How each line is tried
# ----------------------
#
# A row of the table is a line of code. If it returns a tensor, that has to be
# the square of ``x``; a function that returns nothing checks for itself.
# ``tried`` runs each line with each op, each time in a process of its own, in
# which Triton compiles. So a crash is an outcome, too. It prints what was not
# ok.


def attempt(line, api, device):
    torch.manual_seed(0)
    x = torch.randn(1000, device=device)
    y = eval(line, globals() | {"op": OPS[api], "x": x})
    if not isinstance(y, torch.Tensor):
        return y
    torch.testing.assert_close(y, x * x)


gpu, ROWS = {}, []  # what became of the lines; the lines

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


rows = [
    "op(x)",
    "training(op, x)",
    "training(torch.compile(op, fullgraph=True), x)",
    "compiled_function(op, x)",
]
ROWS += rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# To autograd, what a bare kernel returns is a constant. Its share of the
# gradient is missing, and the other path keeps ``backward`` from raising. A
# ``Function`` around the launch mends that, here under ``torch.compile``.
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


rows = [
    "torch.compile(op)(x)",
    "torch.compile(op, fullgraph=True)(x)",
    "torch.compile(op, fullgraph=True)(x, finite=True)",
    "dynamic_shapes(op, x)",
    "traced_into(op, x)",
]
ROWS += rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# ``if not x.isfinite().all()`` needs a value while the compiler traces, and
# there is none. Nobody looks into a ``custom_op``, so its launcher may do
# anything; but the compiler cannot fuse or package what it does not see.
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


rows = ["export(op, x).module()(x)", "aot_inductor(op, x)"]
ROWS += rows

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
# ``TwoTensor`` is a tensor subclass of PyTorch's own tests.


def flop_counter(op, x):
    with FlopCounterMode(display=False) as counter:
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


rows = [
    "op(x.cpu()).to(x.device)",
    "torch.vmap(op)(x.view(10, -1)).view(-1)",
    "flop_counter(op, x)",
    "tensor_subclass(op, x)",
    "cuda_graph(op, x)",
]
ROWS += rows

if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu |= tried(attempt, rows, OPS, "cuda")

# %%
# These subsystems work on ops, and a launch is no op. The counter misses it,
# again without an error. The others cannot redirect it: the kernel gets an
# address on the CPU, or that of a tensor without memory of its own.
#
# What a call costs
# -----------------
#
# The CPU's time for a call, in microseconds, the least of five medians: ``x``
# needs no gradient, ``w`` does; then the backward. Without a GPU the fallback
# is called where the table says *bare kernel*.


def microseconds(line, **names):
    timer = Timer(line, globals=names)
    runs = [timer.blocked_autorange(min_run_time=0.1) for _ in range(5)]
    return 1e6 * min(run.median for run in runs)


def costs(op):
    x = torch.randn(1000, device=DEVICE)
    w = x.clone().requires_grad_()
    y, found = op(w), {"op(x)": microseconds("op(x)", op=op, x=x)}
    found["op(w)"] = microseconds("op(w)", op=op, w=w)
    if y.requires_grad:
        line = "torch.autograd.grad(y, w, x, retain_graph=True)"
        found["backward"] = microseconds(line, y=y, w=w, x=x)
    return found


if __name__ == "__main__":
    timed = dict(OPS)
    if DEVICE.type == "cpu":
        timed["bare kernel"] = lambda x: fallback(x.detach())
    table = pd.DataFrame({api: costs(op) for api, op in timed.items()})
    print(table.round(1).to_string(na_rep="-"))

# %%
# The bare kernel does the same in both of its rows. An op adds to that, more if
# a gradient is recorded; which of the two ops matters less. A kernel that runs
# for longer hides these times, as the CPU goes on meanwhile.
# ``what_a_call_costs.py`` takes a call apart, and has faster ways to register
# an op.
#
# What PyTorch's chart says
# -------------------------
#
# PyTorch's tutorial on Triton kernels in ``torch.compile`` has `this chart
# <https://github.com/pytorch/tutorials/pull/3227>`_. Which of its cells does
# the run not confirm? *mostly*, "in the majority of cases", is too vague to
# test. A result that is wrong without an error is *wrong*, whatever the chart
# says.

CHART = {
    "op(x)": ["yes", "yes", "yes"],
    "training(op, x)": ["mostly", "yes", "yes"],
    "torch.compile(op)(x)": ["yes", "yes", "yes"],
    "torch.compile(op, fullgraph=True)(x)": ["mostly", "mostly", "yes"],
    "traced_into(op, x)": ["yes", "yes", "no"],
    "aot_inductor(op, x)": ["yes", "yes", "no"],
    "flop_counter(op, x)": ["no", "yes", "yes"],
    "op(x.cpu()).to(x.device)": ["no", "yes", "yes"],
    "tensor_subclass(op, x)": ["no", "yes", "yes"],
}


def verdict(claim, outcome):
    if outcome.startswith("wrong"):
        return "wrong"
    if claim == "mostly":
        return "too vague to test"
    works = not outcome.startswith(("fails", "opaque"))
    return "confirmed" if works == (claim == "yes") else "refuted"


def not_confirmed(found):
    """Return the cells of the chart that a run does not confirm, with why."""
    for line, claims in CHART.items():
        for claim, api in zip(claims, OPS, strict=True):
            said = verdict(claim, found[line, api])
            if said != "confirmed":
                yield f"{line}, {api}: {claim}; {said}"


if __name__ == "__main__" and DEVICE.type == "cuda":
    print(*not_confirmed(gpu), sep="\n")

# %%
# ``torch_compile.py`` tries what the tutorial says of ``autotune``'s options.
#
# Since which PyTorch
# -------------------
#
# Each line is tested on the PyTorch of the machine that the page was made on.
# For a line of the first table, that says what became of a bare kernel; another
# name is looked up. The versions are from PyTorch's pages: the
# `release notes of 2.3
# <https://github.com/pytorch/pytorch/releases/tag/v2.3.0>`_ and the `tutorial
# <https://docs.pytorch.org/tutorials/recipes/
# torch_compile_user_defined_triton_kernel_tutorial.html>`_, `torch.library in
# 2.4 <https://docs.pytorch.org/docs/2.4/library.html>`_, and the `release notes
# of 2.6 <https://github.com/pytorch/pytorch/releases/tag/v2.6.0>`_.

SINCE = {
    "torch.compile(op)(x)": "2.3",
    "dynamic_shapes(op, x)": "2.3",
    "compiled_function(op, x)": "2.3",
    "aot_inductor(op, x)": "2.3",
    "custom_op": "2.4",
    "register_autograd": "2.4",
    "register_kernel": "2.4",
    "triton_op": "2.6",
    "wrap_triton": "2.6",
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    print(f"since  in PyTorch {torch.__version__}")
    for name, version in SINCE.items():
        there = "is there" if hasattr(torch.library, name) else "is missing"
        print(f"{version}    {name:26}", gpu.get((name, "bare kernel"), there))

# %%
# Which one
# ---------
#
# Each line was run on a GPU with three kinds of ``op``, which squares ``x``.
# *ok*: the result is right. *fails*: an error. *wrong*: no error, and a wrong
# result. *traced*: the compiler sees the kernel; *opaque*: it does not. With
# ``finite=True`` the launcher raises an error if ``x`` has an infinity or NaN:
# Python looks at values. The functions are on this page, below; in the script
# this table comes last.

outcome_table(gpu) if gpu else None

# %%
# * **Begin with triton_op.** On a GPU it fails in one line, where the launcher
#   looks at values. On a CPU a call has a fallback; compiled code has none.
# * **Take custom_op** if the launcher looks at values, or if compiled code may
#   find no GPU. The price: no compiler sees the kernel, and a file of
#   ``aot_inductor``, for a process without your Python, does not have it.
# * **A bare kernel** will do for inference in your own code: plain, compiled,
#   in such a file or in a CUDA graph. Before you train, make it an op or write
#   a ``Function``: its gradient is wrong without an error.
#
# The same lines on the CPU, with the machine's GPU hidden if there is one. A
# call of an op runs its fallback. But ``torch.compile`` looks into a
# ``triton_op``, and finds the launcher: it compiles the kernel, which cannot
# run there. Of a ``custom_op`` it sees a call, which runs the fallback.

if __name__ == "__main__":
    cpu = tried(attempt, ROWS, OPS, "cpu", reasons=False)
    print(outcome_table(cpu).to_string())

# %%
# Go further
# ----------
#
# 1. Without ``register_autograd`` in ``complete``, what becomes of
#    ``training(op, x)``?
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
