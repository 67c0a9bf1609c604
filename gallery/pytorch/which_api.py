# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "numpy", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Choose between a plain function, triton_op and custom_op by a table of what
# each supports, every cell of which was run."""
# ///
r"""
Which API
=========

A plain function can launch a kernel, or be made an op by ``custom_op`` or by
``triton_op``. PyTorch has a chart of what each way supports. This page tries
it, and more, on the PyTorch at hand: every cell is a run in a process of its
own, and its numbers have to be right. ``subsystems.py`` explains most rows.

After this page you

* choose a plain function, ``custom_op`` or ``triton_op`` by what your kernel
  has to get along with;
* know what fails without a GPU, and what goes wrong without an error;
* know which sentences of the documentation still hold.
"""

# sphinx_gallery_tags = ["custom op", "torch.compile"]
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# What the documentation says
# ---------------------------
#
# PyTorch's tutorial *Using User-Defined Triton Kernels with torch.compile* has
# `this chart <https://github.com/pytorch/tutorials/pull/3227>`_. *Mostly* is
# short for "in the majority of cases". The last three rows are a single row
# there.

APIS = ["bare kernel", "triton_op", "custom_op"]
CHART = {
    "inference": ["yes", "yes", "yes"],
    "training": ["mostly", "yes", "yes"],
    "torch_compile": ["yes", "yes", "yes"],
    "fullgraph": ["mostly", "mostly", "yes"],
    "traced_into": ["yes", "yes", "no"],
    "aot_inductor": ["yes", "yes", "no"],
    "flop_counter": ["no", "yes", "yes"],
    "cpu_fallback": ["no", "yes", "yes"],
    "tensor_subclass": ["no", "yes", "yes"],
}
pd.DataFrame(CHART.values(), CHART, APIS)

# %%
# One kernel, three wrappings
# ---------------------------
#
# The kernel is not the subject, so it is a dull one.


@triton.jit
def square_kernel(
    x_ptr,
    out_ptr,
    N,
    BLOCK: tl.constexpr,
):
    # In int32 the product below would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    tl.store(out_ptr + offs, x * x, mask=offs < N)


# %%
# Both ops get a gradient, a fallback for the CPU, a rule for ``vmap``, a flop
# count. ``finite=True`` has the launcher look at values, which compilers
# dislike. All this is in one function, which other processes will call, too.


def wrap():
    """Return the three wrappings of the kernel."""

    def check(x, finite):
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"square takes float32 or float64, not {x.dtype}")
        if finite and not x.isfinite().all():
            raise ValueError("square got an infinity or NaN")

    def bare(x, finite=False, kernel=square_kernel):
        check(x, finite)
        x, N = x.contiguous(), x.numel()
        out = x.new_empty(x.shape)
        kernel[(triton.cdiv(N, 1024),)](x, out, N, BLOCK=1024)
        return out

    @torch.library.triton_op("triton_gallery::square_traced", mutates_args=())
    def traced(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
        return bare(x, finite, torch.library.wrap_triton(square_kernel))

    @torch.library.custom_op("triton_gallery::square_opaque", mutates_args=())
    def opaque(x: torch.Tensor, finite: bool = False) -> torch.Tensor:
        return bare(x, finite)

    def fallback(x, finite=False):
        check(x, finite)
        return (x * x).contiguous()

    def save(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad, None

    def batch(op):
        return lambda info, dims, x, *finite: (op(x, *finite), dims[0])

    def flops(x_shape, *finite, out_shape=None, **kwargs):
        return x_shape.numel()

    opaque.register_fake(lambda x, finite=False: x.new_empty(x.shape))
    for op in (traced, opaque):
        op.register_autograd(backward, setup_context=save)
        op.register_kernel("cpu")(fallback)
        op.register_vmap(batch(op))
    ops = torch.ops.triton_gallery
    register_flop_formula([ops.square_traced, ops.square_opaque])(flops)
    return {"bare kernel": bare, "triton_op": traced, "custom_op": opaque}


bare, square, square_opaque = wrap().values()

# %%
# The check
# ---------
#
# The float64 product, rounded to float32, has to come out bit for bit.

for shape in ((1024,), (31, 257)):
    x = torch.randn(shape, device=DEVICE)
    expected = (x.double() * x.double()).float()
    for op in (bare, square, square_opaque):
        torch.testing.assert_close(op(x), expected, rtol=0, atol=0)

# %%
# The rows
# --------
#
# A row of the table is a function of an op and a tensor. It returns what came
# out and what is right. First what needs no compiler. In ``training`` the loss
# has a second term without the op, as in a model: other paths reach ``x``, too.
# ``TwoTensor`` is a test subclass of PyTorch.


def inference(op, x):
    return op(x), x * x


def training(op, x):
    x.requires_grad_()
    (op(x).sum() + x.sum()).backward()
    return x.grad, 2 * x.detach() + 1


def flop_counter(op, x):
    with FlopCounterMode(display=False) as counter:
        out = op(x)
    return (counter.get_total_flops(), out), (x.numel(), x * x)


def cpu_fallback(op, x):
    return op(x.cpu()), x.cpu() * x.cpu()


def tensor_subclass(op, x):
    out = op(torch.testing._internal.two_tensor.TwoTensor(x, x + 1))
    return (out.a, out.b), (x * x, (x + 1) * (x + 1))


def vmap(op, x):
    return torch.vmap(op)(x.view(10, -1)), (x * x).view(10, -1)


def cuda_graph(op, x):
    op(x)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    x.normal_()
    graph.replay()
    return out, x * x


# %%
# Then the compilers. ``reading_values`` passes ``finite=True``. ``traced_into``
# looks whether Inductor's code still calls the op: *opaque*, or *traced*.
# ``torch_export`` saves and loads its program. ``aot_inductor`` runs a package
# in a process that has none of our Python.


def torch_compile(op, x):
    return torch.compile(op)(x), x * x


def fullgraph(op, x):
    return torch.compile(op, fullgraph=True)(x), x * x


def reading_values(op, x):
    return torch.compile(op, fullgraph=True)(x, True), x * x


def compiled_training(op, x):
    return training(torch.compile(op, fullgraph=True), x)


def traced_into(op, x):
    get_code = torch._inductor.utils.run_and_get_code
    out, code = get_code(torch.compile(op, fullgraph=True), x)
    called = "triton_gallery.square" in code[0]
    return out, x * x, "opaque" if called else "traced"


def export(op, x, strict):
    class Square(torch.nn.Module):
        def forward(self, x):
            return op(x)

    program = torch.export.export(Square(), (x,), strict=strict)
    torch.export.save(program, f"{os.getpid()}.pt2")
    return torch.export.load(f"{os.getpid()}.pt2")


def torch_export(op, x):
    return export(op, x, strict=False).module()(x), x * x


def aot_inductor(op, x):
    program, file = export(op, x, strict=True), f"{os.getpid()}.aot.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=file)
    torch.save(x, "x" + file)
    # Why libstdc++ and this loader: see ``aot_inductor.py``.
    code = f"""import atexit, ctypes, gc
gc.disable()
atexit.register(gc.freeze)
ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
import torch
load = torch._C._aoti.AOTIModelPackageLoader
square = load({file!r}, "model", False, 1, -1).boxed_run
torch.save(square([torch.load("x{file}")])[0], "out{file}")"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        said = run.stderr.strip() or f"exit code {run.returncode}"
        raise RuntimeError(said.splitlines()[-1].removeprefix("RuntimeError: "))
    return torch.load("out" + file), x * x


ROWS = [inference, training, torch_compile, fullgraph, reading_values]
ROWS += [compiled_training, traced_into, torch_export, aot_inductor]
ROWS += [flop_counter, cpu_fallback, tensor_subclass, vmap, cuda_graph]

# %%
# Further claims
# --------------
#
# The tutorial goes on: of the options of ``autotune``, ``torch.compile`` takes
# only ``configs`` and ``key``; ``heuristics`` may come above ``autotune``, not
# below; a flop formula takes ``(x_shape)``. An option like ``restore_value``
# matters to a kernel that changes what it reads (see ``autotune.py``). Ours
# adds 1 to a counter. After tuning and one call the counter must be 1.


@triton.jit
def count_kernel(out_ptr, STEP: tl.constexpr):
    tl.store(out_ptr, tl.load(out_ptr) + STEP)


def autotune(case, x):
    global kernel  # PyTorch has to find it by its name
    names = [n for n in ("restore_value", "reset_to_zero") if n in case]
    options = {name: ["out_ptr"] for name in names}
    if case == "pre_hook":
        options["pre_hook"] = lambda args, **_: args["out_ptr"].zero_()
    if "prune_configs_by" in case:
        prune = {"early_config_prune": lambda configs, *_, **__: configs[:2]}
        options["prune_configs_by"] = prune
    # One config is no choice: nothing would be tuned.
    warps = (1, 2, 4) if options else (1,)
    configs = [triton.Config({}, num_warps=n) for n in warps]
    tune = triton.autotune(configs, key=[], **options)
    guess = triton.heuristics({"STEP": lambda args: 1})
    kernel = tune(guess(count_kernel) if "below" in case else count_kernel)
    kernel = guess(kernel) if "above" in case else kernel
    step = {} if "heuristics" in case else {"STEP": 1}

    def launch(x):
        out = torch.zeros_like(x[:1])
        kernel[(1,)](out, **step)
        return out

    return torch.compile(launch, fullgraph=True)(x), torch.ones_like(x[:1])


def op_formula(case, x):
    @torch.library.custom_op("triton_gallery::square_counted", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @register_flop_formula(torch.ops.triton_gallery.square_counted)
    def _(x_shape):
        return x_shape.numel()

    return flop_counter(square, x)


# %%
# Each claim has its runs, and what it says of each: that the run works, or not.
# A claim of *mostly* fits any outcome, so it always holds.

TUNED = ["restore_value", "reset_to_zero", "pre_hook"]
TUNED += ["restore_value, prune_configs_by"]
BELOW = ["heuristics below", "heuristics below, restore_value"]
CLAIMS = {
    f"chart: {row}": [(row, api, said[k]) for k, api in enumerate(APIS)]
    for row, said in CHART.items()
}
for claim, function, works, *cases in (
    ("configs and key only", autotune, "no", *TUNED),
    ("heuristics above autotune", autotune, "yes", "heuristics above"),
    ("no heuristics below autotune", autotune, "no", *BELOW),
    ("def _(x_shape)", op_formula, "yes", "x_shape"),
):
    tests = [(function.__name__, case, works) for case in cases]
    CLAIMS[f"tutorial: {claim}"] = tests

# %%
# A process for each cell
# -----------------------
#
# A cell *fails* by an error, by a crash or after three minutes. It is *wrong*
# if there is no error, but its numbers are wrong. Else it is *ok*, or what
# ``traced_into`` saw. A number in brackets is that of a note, printed below.


def outcome(function, argument, device):
    """Run a cell; say what became of it."""
    torch.manual_seed(0)
    x = torch.randn(1000, device=device)
    try:
        op = wrap().get(argument, argument)
        got, right, *kind = globals()[function](op, x)
        torch.testing.assert_close(got, right)
    except Exception as error:
        lines = (str(error).strip() or "no message").splitlines()
        if lines[0].endswith(("not close!", "not equal!")):
            return f"wrong: {lines[2]}"
        return f"fails: {type(error).__name__}: {lines[0]}"
    return kind[0] if kind else "ok"


# %%
# The cells need Triton's compiler, not the interpreter. So the functions above
# make a program that imports PyTorch and, the GPU still untouched, forks. The
# garbage collector is off there: importing and ending would take twice as long.


def serve(device, cells):
    """Run each cell in a process of its own, as many at once as CPUs."""

    def tell(cell, said):
        os.write(1, (json.dumps([*cell, said]) + "\n").encode())

    config = torch._inductor.config
    # What one cell has tuned is not for others to find.
    config.autotune_local_cache = config.fx_graph_cache = False
    # What is compiled runs once: let the C++ compiler be quick.
    config.cpp_cache_precompile_headers = False
    config.aot_inductor.precompile_headers = False
    config.aot_inductor.compile_wrapper_opt_level = "O0"
    if device == "cpu":  # cells then find the rest of the compiler imported
        torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))
    gc.freeze()
    cells = sorted(cells, key=lambda cell: cell[0] == "aot_inductor")  # slow
    running = {}
    while cells or running:
        while cells and len(running) < os.cpu_count():
            cell = cells.pop()
            pid = os.fork()
            if pid == 0:
                signal.alarm(180)  # ends this process
                tell(cell, outcome(*cell, device))
                os._exit(0)
            running[pid] = cell
        pid, status = os.wait()
        cell, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            tell(cell, f"fails: exit code {code}")


IMPORTS = """
import gc; gc.disable()
import json, os, signal, subprocess, sys, torch, triton
import torch._inductor.compile_fx, torch.testing._internal.two_tensor
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula
"""


def run(device, cells):
    """Return what became of each cell."""
    parts = [square_kernel, count_kernel, wrap, *ROWS, export, autotune]
    parts += [op_formula, outcome, serve]
    texts = [inspect.getsource(getattr(part, "fn", part)) for part in parts]
    program = "\n".join([IMPORTS, *texts, f"serve({device!r}, {cells!r})"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"TRITON_INTERPRET": "0", "TMPDIR": folder}
        environment |= {"OMP_NUM_THREADS": "1", "TRITON_HOME": folder}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": folder}
        environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment |= {"TORCHINDUCTOR_VEC_ISA_OK": "0"}  # asking takes long
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        Path(folder, "program.py").write_text(program)
        command = [sys.executable, "program.py"]
        options = {"cwd": folder, "env": environment, "text": True}
        server = subprocess.run(command, capture_output=True, **options)
        if server.returncode:
            raise RuntimeError(server.stderr)
    lines = [line for line in server.stdout.splitlines() if line[:1] == "["]
    found = {tuple(cell): said for *cell, said in map(json.loads, lines)}
    return {cell: found[cell] for cell in cells}


TABLE = [(row.__name__, api) for row in ROWS for api in APIS]
TESTS = [test[:2] for tests in CLAIMS.values() for test in tests]
CELLS = {"cuda": list(dict.fromkeys(TABLE + TESTS))}
CELLS["cpu"] = TABLE + TESTS[-1:]  # the last claim needs no GPU


def notes(found):
    return [said for said in dict.fromkeys(found.values()) if ":" in said]


def mark(found, *cell):
    kind, more, _ = found[cell].partition(":")
    return f"{kind} [{notes(found).index(found[cell]) + 1}]" if more else kind


def table(found):
    rows = [[mark(found, row.__name__, api) for api in APIS] for row in ROWS]
    return pd.DataFrame(rows, [row.__name__ for row in ROWS], APIS)


def print_notes(found):
    for number, said in enumerate(notes(found), 1):
        print(textwrap.fill(f"[{number}] {said}", 78, subsequent_indent="    "))


def claims(found, names):
    rows = {}
    for name in names:
        holds, seen = "yes", []
        for *cell, works in CLAIMS[name]:
            no = found[tuple(cell)][:6] in ("wrong:", "fails:", "opaque")
            if works == ("yes" if no else "no"):
                holds = "no"
            seen.append(f"{cell[1]}: {mark(found, *cell)}")
        source, _, claim = name.partition(": ")
        rows[claim] = [source, holds, "; ".join(seen)]
    return pd.DataFrame(rows.values(), rows, ["source", "holds", "seen"])


# %%
# The table, on a GPU
# -------------------

gpu = cpu = None
if __name__ == "__main__" and DEVICE.type == "cuda":
    gpu = run("cuda", CELLS["cuda"])
gpu and table(gpu)

# %%

gpu and print_notes(gpu)

# %%
# *Wrong* is worse than *fails*: in training the gradient lacks the share of the
# bare kernel, and no error tells (see ``triton_op.py``). The bare kernel fails
# in ``torch_export``, which runs the function, but not in ``aot_inductor``,
# which exports with ``strict=True``: that reads the function instead.
#
# Without a GPU
# -------------
#
# The same on a CPU, with the machine's GPU hidden if there is one.

if __name__ == "__main__":
    cpu = run("cpu", CELLS["cpu"])
cpu and table(cpu)

# %%
# Below the notes is the one claim that can be tested without a GPU.

cpu and print_notes(cpu)
cpu and claims(cpu, list(CLAIMS)[-1:])

# %%
# The fallback serves whoever calls the op. ``torch.compile`` traces into
# ``triton_op``, past its fallback, to a kernel that can't run here. CUDA graphs
# need a GPU in any case; a note on them only shows that this page forks its
# processes.
#
# Which claims hold
# -----------------

gpu and claims(gpu, CLAIMS)

# %%
# The tutorial does not mention that PyTorch supports `restore_value
# <https://github.com/pytorch/pytorch/pull/139851>`_ and `heuristics below
# <https://github.com/pytorch/pytorch/pull/142208>`_. But with heuristics below
# or pruned configs, PyTorch makes a new tuner, which forgets ``restore_value``:
# the count is wrong, without an error. Flop formulas must take ``out_shape``.
#
# Which one
# ---------
#
# * Begin with ``triton_op``. On a GPU it fails in one row, where the launcher
#   looks at values. Compilers see its kernel, and packages hold it.
# * Take ``custom_op`` if the launcher can't be traced or compiled code may find
#   no GPU. The price: no compiler sees its kernel, and no package holds it.
# * A **bare kernel** will do for inference in your own code: plain, compiled,
#   in a package or a CUDA graph. Write its gradient, or make it an op, by
#   ``custom_op`` or ``triton_op``.
#
# Go further
# ----------
#
# 1. Without ``register_autograd`` in ``wrap``, what becomes of ``training``?
# 2. Write a row for ``torch.func.grad``. What becomes of the ops in it?
#
# Next is ``what_a_call_costs.py``, on the CPU's time for a call of each.

# %%
# Answers
# -------
#
# **1.** It fails for both ops. Only a bare kernel loses its gradient silently.
#
# **2.** ``return torch.func.grad(lambda x: op(x).sum())(x), 2 * x``. Both ops
# fail; ``subsystems.py`` shows the error and what mends it.
