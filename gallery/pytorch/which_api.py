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

from triton_gallery.outcomes import outcome_table, outcomes, run_package, tried

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


@triton_op("triton_gallery::square_traced", mutates_args=())
def traced(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
    return bare(x, finite, wrap_triton(square_kernel))


@custom_op("triton_gallery::square_opaque", mutates_args=())
def opaque(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
    return bare(x, finite)


OPS = {"bare kernel": bare, "triton_op": traced, "custom_op": opaque}

# %%
# An op can be told more: here a gradient, a fallback for the CPU, a rule for
# ``vmap`` and a count of operations. A ``custom_op`` needs the shape of its
# result, too; a ``triton_op`` runs its launcher without the kernel to find it.


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def backward(ctx, grad):
    return 2 * ctx.saved_tensors[0] * grad, None  # finite has no gradient


def fallback(x, finite=False):
    check(x, finite)
    return (x * x).contiguous()


def complete(op, name):
    op.register_autograd(backward, setup_context=save)
    op.register_kernel("cpu")(fallback)
    op.register_vmap(lambda info, dims, *x: (op(*x), dims[0]))
    register_flop_formula(name)(lambda shape, *_, **__: shape.numel())


opaque.register_fake(lambda x, finite=False: x.new_empty(x.shape))
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
# A row of the table is a line of code. A tensor that it returns has to be the
# square of ``x``. ``tried`` runs each line with each op, each time in a process
# of its own, in which Triton compiles. So a crash is an outcome, too. It prints
# what was not ok.


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


def autograd_function(op, x):
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
    "autograd_function(op, x)",
]
ROWS += rows

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
# ``fullgraph=True`` forbids a fallback to Python. ``traced_into`` reads
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
# The CPU's time for a call, in microseconds: ``x`` needs no gradient, ``w``
# does; then the backward. Without a GPU the fallback is in the place of the
# bare kernel. ``what_a_call_costs.py`` takes a call apart, and has faster ways
# to register an op.


def microseconds(line, **names):
    timer = Timer(line, globals=names)
    return 1e6 * timer.blocked_autorange(min_run_time=0.5).median


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
# What PyTorch's chart says
# -------------------------
#
# PyTorch's tutorial on Triton kernels in ``torch.compile`` has `this chart
# <https://github.com/pytorch/tutorials/pull/3227>`_. Each of its cells is
# *confirmed* or *refuted* by the run. *mostly*, "in the majority of cases", is
# too vague to test. A result that is wrong without an error is *wrong*,
# whatever the chart says.

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


def compared(row):
    cells = zip(CHART[row], OPS, strict=True)
    return [f"{claim}: {verdict(claim, gpu[row, api])}" for claim, api in cells]


pd.DataFrame({row: compared(row) for row in CHART}, OPS).T if gpu else None

# %%
# Options of autotune
# -------------------
#
# The tutorial goes on: of ``autotune``'s options ``torch.compile`` takes
# ``configs`` and ``key`` alone; ``heuristics`` may be above ``autotune``, not
# below; a flop formula takes ``(x_shape)``. Our kernel adds 1 to a counter:
# after tuning and one call, the counter has to be 1.


@triton.jit
def count_kernel(out_ptr, STEP: tl.constexpr):
    tl.store(out_ptr, tl.load(out_ptr) + STEP)


def tune(kernel, **options):
    warps = (1, 2, 4) if options else (1,)  # one config: nothing is tuned
    configs = [triton.Config({}, num_warps=n) for n in warps]
    return triton.autotune(configs, key=[], **options)(kernel)


def zero(args, **_):
    args["out_ptr"].zero_()


guess = triton.heuristics({"STEP": lambda args: 1})
PRUNE = {"early_config_prune": lambda configs, *_, **__: configs[:2]}
OUT = ["out_ptr"]


def counts(line):
    global kernel  # PyTorch has to find it by its name
    kernel, step = eval(line), {} if "guess" in line else {"STEP": 1}

    def launch(x):
        out = torch.zeros_like(x)
        kernel[(1,)](out, **step)
        return out

    x = torch.ones(1, device="cuda")
    torch.testing.assert_close(torch.compile(launch, fullgraph=True)(x), x)


def formula(line):
    @custom_op("triton_gallery::square_counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x * x

    count = register_flop_formula(torch.ops.triton_gallery.square_counted)
    count(eval(line))
    flop_counter(counted, torch.randn(1000))


CLAIMS = {  # does it work, by the tutorial?
    "lambda x_shape: x_shape.numel()": "yes",
    "tune(count_kernel, restore_value=OUT)": "no",
    "tune(count_kernel, reset_to_zero=OUT)": "no",
    "tune(count_kernel, pre_hook=zero)": "no",
    "tune(count_kernel, restore_value=OUT, prune_configs_by=PRUNE)": "no",
    "guess(tune(count_kernel))": "yes",
    "tune(guess(count_kernel))": "no",
    "tune(guess(count_kernel), restore_value=OUT)": "no",
}


def judged(device):
    lines = [*CLAIMS] if device == "cuda" else [*CLAIMS][:1]
    calls = [(formula if "x_shape" in x else counts, x) for x in lines]
    return dict(zip(lines, outcomes(calls, device), strict=True))


if __name__ == "__main__":
    for line, said in judged(DEVICE.type).items():
        claim = CLAIMS[line]
        print(f"{line}\n    {claim}; {verdict(claim, said)}; {said[:50]}")

# %%
# PyTorch supports `restore_value
# <https://github.com/pytorch/pytorch/pull/139851>`_ and `heuristics below
# <https://github.com/pytorch/pytorch/pull/142208>`_; the tutorial does not
# mention that. But with heuristics below or pruned configs, PyTorch makes a new
# tuner, which forgets ``restore_value``: the count is wrong, without an error.
# A flop formula has to take ``out_shape``, too.
#
# Since which PyTorch
# -------------------
#
# Each line is tested on the installed PyTorch: a name is looked up, and on a
# GPU a bare kernel is called. The versions are from PyTorch's pages: the
# `release notes of 2.3
# <https://github.com/pytorch/pytorch/releases/tag/v2.3.0>`_ and the `tutorial
# <https://docs.pytorch.org/tutorials/recipes/
# torch_compile_user_defined_triton_kernel_tutorial.html>`_, `torch.library in
# 2.4 <https://docs.pytorch.org/docs/2.4/library.html>`_, and the `release notes
# of 2.6 <https://github.com/pytorch/pytorch/releases/tag/v2.6.0>`_.

SINCE = {
    "torch.compile(op)(x)": "2.3",
    "dynamic_shapes(op, x)": "2.3",
    "autograd_function(op, x)": "2.3",
    "aot_inductor(op, x)": "2.3",
    "custom_op": "2.4",
    "register_autograd": "2.4",
    "register_kernel": "2.4",
    "triton_op": "2.6",
    "wrap_triton": "2.6",
}

if __name__ == "__main__":
    print(f"since  in PyTorch {torch.__version__}")
    for name, version in SINCE.items():
        there = "is there" if hasattr(torch.library, name) else "needs a GPU"
        print(f"{version}    {name:26}", gpu.get((name, "bare kernel"), there))

# %%
# Which one
# ---------
#
# Each line was run on a GPU with three kinds of ``op``. *ok*: the result is
# right. *fails*: an error. *wrong*: no error, and a wrong result. *traced*: the
# compiler sees the kernel; *opaque*: it does not. The functions are on this
# page.

outcome_table(gpu) if gpu else None

# %%
# * **Begin with triton_op.** It trains, compiles, exports and falls back to the
#   CPU. It fails in one line, where the launcher looks at values.
# * **Take custom_op** if compilers cannot trace the launcher, or if compiled
#   code may find no GPU. The price: no compiler sees the kernel, and no package
#   holds it.
# * **A bare kernel** will do for inference in your own code: plain, compiled,
#   in a package or a CUDA graph. Before you train, make it an op or write a
#   ``Function``: its gradient is wrong without an error.
#
# The same lines on the CPU, with the machine's GPU hidden if there is one. The
# fallback serves whoever calls an op. ``torch.compile`` traces into a
# ``triton_op``, past its fallback, to a kernel that cannot run there.

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
