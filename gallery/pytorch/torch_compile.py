# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Call a bare Triton kernel in a function under torch.compile, and see where
# that goes wrong silently."""
# ///
r"""
Kernels in torch.compile
========================

``torch.compile`` takes a function that launches a Triton kernel as it is:
nothing to declare, no graph break. It reads the kernel to learn what it writes.
This page watches it do so, and shows where that goes wrong silently. It follows
``autotune.py``.

After this page you can

* put a kernel, tuned or not, into ``torch.compile(fullgraph=True)``;
* read the captured graph and the generated code, and count what is fused;
* keep one graph for many shapes;
* find a write that the compiler does not know of.
"""

# sphinx_gallery_tags = ["torch.compile", "elementwise", "memory bound"]
import contextlib
import os
import re
import textwrap
from unittest import mock

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in bytes
# --------------------
#
# Here an addition is one of five operators. Run one by one, the others move
# ``8 * N`` bytes of float32 each, and the addition ``12 * N``: together 44 for
# an element. The floor is 12: read ``x`` and ``y``, write the result. Left
# alone, ``torch.compile`` reaches it, with one kernel for all five.


def chain_torch(x, y):
    total = torch.relu(x) * 0.5 + y
    return torch.sigmoid(total) * 2


# %%
# The kernel and its launcher
# ---------------------------
#
# You write a kernel for what the compiler cannot do well. An addition is no
# such thing, but this page is about what surrounds a kernel. *Dynamo*, which
# traces Python, follows checks and grids. Compiled code sets the device by
# itself, so ``launch`` sets it in eager calls only.


@triton.jit
def add_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    N,
    BLOCK: tl.constexpr,
):
    # In int32 the product below would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y, mask=mask)


def launch(kernel, x, y, out, **options):
    def grid(meta):
        return (triton.cdiv(out.numel(), meta["BLOCK"]),)

    guard = torch.accelerator.device_index
    if torch.compiler.is_compiling():
        guard = contextlib.nullcontext
    if out.numel() > 0:
        with guard(x.device.index):
            kernel[grid](x, y, out, out.numel(), **options)
    return out


def add(x, y):
    """Return ``x + y`` for tensors of the same shape, dtype and device."""
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != y.dtype:
        raise TypeError(f"add takes one float dtype, not {x.dtype}, {y.dtype}")
    alike = x.shape == y.shape and x.device == y.device
    if not alike or x.device.type != DEVICE.type:
        raise ValueError(f"add takes one shape on one {DEVICE.type} device")
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        raise ValueError("add has no backward: call it under torch.no_grad()")
    x, y = x.contiguous(), y.contiguous()
    return launch(add_kernel, x, y, torch.empty_like(x), BLOCK=1024)


def chain(x, y):
    total = add(torch.relu(x) * 0.5, y)
    return torch.sigmoid(total) * 2


def chain_(x, y):
    return launch(add_kernel, x, y, out=x, BLOCK=1024) * 2


# %%
# The check
# ---------
#
# The kernel has to return the float64 sum, rounded to float32, bit for bit.

torch.manual_seed(0)
for shape in ((), (4096,), (31, 257), (2, 0, 3)):
    x, y = torch.randn(2, *shape, device=DEVICE)
    expected = (x.double() + y.double()).float()
    torch.testing.assert_close(add(x, y), expected, rtol=0, atol=0)

# %%
# What the compiler captures
# --------------------------
#
# Dynamo records a graph, *AOTAutograd* rewrites it so that nothing is changed
# in place, and *Inductor* generates code. A backend is a function that is given
# a graph, so ours keeps the graphs of the first two, and runs nothing. Without
# a GPU, ``pretend`` makes up a driver, and kernels that aren't interpreted.


@contextlib.contextmanager
def pretend():
    if DEVICE.type == "cuda":
        return (yield)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    driver = mock.Mock(get_current_target=lambda: target)
    interpreted = triton.runtime.interpreter.InterpretedFunction
    mine = {n: f for n, f in globals().items() if isinstance(f, interpreted)}
    for name, kernel in mine.items():
        globals()[name] = triton.runtime.jit.JITFunction(kernel.fn)
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch("torch.utils._triton.has_triton", return_value=True),
    ):
        try:
            yield
        finally:
            globals().update(mine)


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, **options)


def capture(function, *calls, **options):
    """Return Dynamo's graphs of these calls, and AOTAutograd's."""
    from torch._dynamo.backends.common import aot_autograd

    recorded, rewritten = [], []

    def stop(*inputs):
        raise InterruptedError  # where the compiled function would run

    def keep(graph, inputs):
        rewritten.append(graph.graph)
        return stop

    aot = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)

    def backend(graph, inputs):
        recorded.append(graph.graph)
        return aot(graph, inputs)

    function = compiled(function, backend=backend, **options)
    with pretend():
        for inputs in calls:
            with contextlib.suppress(InterruptedError):
                function(*inputs)
    return recorded, rewritten


def launches(graph):
    return [n.kwargs for n in graph.nodes if "triton_kernel" in str(n.target)]


def show(graph):
    keys = "grid", "kwargs", "tensors_to_clone"
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            given = [f"{k}={node.kwargs[k]}" for k in keys if k in node.kwargs]
            given = ", ".join([*map(str, node.args), *given])
            name = getattr(node.target, "__name__", node.target)
            line = f"{node.name} = {name}({given})"
            print(textwrap.fill(line, 78, subsequent_indent="    "))


if __name__ == "__main__":
    breaks = torch._dynamo.utils.counters["graph_break"]
    x, y = (torch.rand(5000, device=DEVICE) for _ in range(2))
    recorded, rewritten = capture(chain, (x, y))
    for stage, (graph,) in (("Dynamo", recorded), ("AOTAutograd", rewritten)):
        print(f"{stage}, with {len(breaks)} graph breaks:")
        show(graph)
    assert not breaks
    assert launches(rewritten[0])[0]["tensors_to_clone"] == ["out_ptr"]

# %%
# What the launcher checked became *guards*, conditions under which the graph
# serves again. The launch is one node. Rewritten, its ``tensors_to_clone`` are
# what it writes: PyTorch compiles the kernel to Triton's first intermediate
# code and follows each store's address back to an argument. The node writes to
# copies of those and returns them; Inductor drops copies of what nobody needs.
# (``TORCH_LOGS=graph_code,aot_graphs`` prints both graphs, too;
# ``output_code`` prints the generated code.)
#
# So an untuned kernel may change an argument that it is given. In ``chain_``,
# the ``copy_`` at the end gives the caller's ``x`` its new values:

if __name__ == "__main__":
    show(capture(chain_, (x, y))[1][0])

# %%
# What is fused, and what isn't
# -----------------------------
#
# Inductor fuses what comes before the kernel, and what comes after it, but not
# across it. Its launches on a GPU, with 4 bytes an element for each tensor:

if __name__ == "__main__" and DEVICE.type == "cuda":
    moved, generated = {}, torch._inductor.utils.run_and_get_code
    for function in (chain, chain_torch, chain_):
        fresh, again = (x.clone(), y), (x.clone(), y)
        result, codes = generated(compiled(function), *fresh)
        torch.testing.assert_close(result, function(*again))
        torch.testing.assert_close(fresh, again)
        calls = re.findall(r"^ +(\w+\.run\(.*), stream=", codes[0], re.M)
        tensors = re.findall(r"\b(?:arg|buf)\d+", " ".join(calls))
        moved[function] = 4 * len(tensors)
        print(f"{function.__name__}: {moved[function]} bytes for an element")
        print(*[f"    {call})" for call in calls], sep="\n")
    assert moved[chain_torch] == 12 < moved[chain] < 44

# %%
# The kernel is a wall: all goes through memory. In ``chain_`` no copy is left.
#
# Tuned kernels
# -------------
#
# ``torch.compile`` hands the configs to its own tuner. Here is what it makes of
# ``autotune``'s arguments, and of ``@heuristics`` written below, then above it:

CONFIGS = [triton.Config({"BLOCK": 256 * n}, num_warps=n) for n in (1, 2, 4)]
PRUNE = "prune_configs_by={'early_config_prune': lambda c, *_, **__: c[:2]}"
MODEL = "prune_configs_by={'perf_model': lambda BLOCK, **_: BLOCK, 'top_k': 1}"
KEYED = "key=['N'], do_bench=print"
CHOICES = [KEYED, PRUNE, MODEL, "use_cuda_graph=True", "pre_hook=print"]
CHOICES += ["reset_to_zero=['out_ptr']", "restore_value=['out_ptr']"]
CHOICES += ["warmup=5, rep=25", "configs=[triton.Config({}, pre_hook=print)]"]


def tuned(kernel, configs=CONFIGS, key=(), **options):
    return triton.autotune(configs, key, **options)(kernel)


def add_with(kernel):
    return lambda x, y: launch(kernel, x, y, torch.empty_like(x))


def verdict(kernel):
    try:
        _, (graph,) = capture(add_with(kernel), (x, y))
        return f"captured, configs: {len(launches(graph)[0]['grid'])}"
    except Exception as error:
        return "refused: " + re.search("feature: (.*)", str(error))[1]


if __name__ == "__main__":
    with pretend():
        kernels = {c: tuned(add_kernel, **eval(f"dict({c})")) for c in CHOICES}
        block = triton.heuristics({"BLOCK": lambda args: 512})
        warps = [triton.Config({}, num_warps=n) for n in (1, 2)]
        kernels["heuristics below"] = tuned(block(add_kernel), warps)
        kernels["heuristics above"] = block(tuned(add_kernel, warps))
        answers = {name: verdict(kernel) for name, kernel in kernels.items()}
    assert (answers[PRUNE][-1], answers[MODEL][-1]) == ("2", "1")
    answers = pd.DataFrame({"answer": answers})
    pd.set_option("display.max_colwidth", None)
answers if __name__ == "__main__" else None

# %%
# Captured is not obeyed: ``do_bench`` is never called, `key is ignored
# <https://github.com/pytorch/pytorch/issues/164124>`_, and each graph is tuned
# once. First, three sizes are run. Then a kernel that adds 1 to its argument is
# tuned and called twice. Its argument starts at 100.


@triton.jit
def increment_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


if __name__ == "__main__" and DEVICE.type == "cuda":
    fresh_cache = torch._inductor.utils.fresh_cache  # or old choices come back
    tuner = torch._inductor.runtime.triton_heuristics.CachingAutotuner
    spy = {"autospec": True, "side_effect": tuner.benchmark_all_configs}
    spy = mock.patch.object(tuner, "benchmark_all_configs", **spy)
    for flag in (False, True):
        function = compiled(add_with(kernels[KEYED]), dynamic=flag)
        with fresh_cache(), spy as spied:
            for N in (5000, 70_000, 9_000_000):
                x = torch.rand(N, device=DEVICE)
                torch.testing.assert_close(function(x, x), x + x)
        print(f"dynamic={flag}: tuned {spied.call_count} times")
    for option in ("no option", "reset_to_zero", "restore_value"):
        care = {option: ["x_ptr"]} if "_" in option else {}
        kernel = tuned(increment_kernel, warps, **care)
        function = compiled(lambda x, kernel=kernel: kernel[(1,)](x) or x)
        x = torch.tensor([100], device=DEVICE)
        with fresh_cache():
            seen = function(x).tolist() + function(x).tolist()
        print(f"{option}: {seen}")
    assert (spied.call_count, seen) == (1, [101, 102])

# %%
# With dynamic shapes, the first size decides for all. In the first list the
# tuner's own runs were added, too; the last list is right. So a tuned kernel
# that changes an argument needs ``restore_value``, and neither pruning nor
# heuristics below: with them PyTorch forgets it (see ``which_api.py``).
#
# One graph for many shapes
# -------------------------
#
# Sizes are constants at first. When one changes, the second graph has a symbol
# for it, and the grid is an expression; ``dynamic=True``, or ``mark_dynamic``
# on a tensor, does so at once. But each ``tl.constexpr`` value takes a graph,
# as in ``by_size``. Graphs for four sizes (a ninth graph of a function is an
# error with ``fullgraph=True``; without it, the call is no longer compiled):


def by_size(x, y):
    block = triton.next_power_of_2(x.numel())
    return launch(add_kernel, x, y, torch.empty_like(x), BLOCK=block)


def count_graphs(function, mark_dynamic=False, **options):
    calls = [(torch.rand(N), torch.rand(N)) for N in (3000, 3001, 5000, 70_000)]
    calls = [(x.to(DEVICE), y.to(DEVICE)) for x, y in calls]
    for tensor in sum(calls, ()) if mark_dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    return len(capture(function, *calls, **options)[0])


if __name__ == "__main__":
    counts = pd.DataFrame(index=["chain", "by_size"])
    for how in ("", "dynamic=False", "dynamic=True", "mark_dynamic=True"):
        options = eval(f"dict({how})")
        found = [count_graphs(f, **options) for f in (chain, by_size)]
        counts[how or "default"] = found
    print(counts.to_string())
    assert counts.iloc[0, -1] == 1 < counts.iloc[1, -1]

# %%
# Break it: writes that nobody sees
# ---------------------------------
#
# A compiled kernel is right only if ``tensors_to_clone`` names all its writes
# and no two of them share memory. Here are three hard cases:


@triton.jit
def assembly_kernel(x_ptr, y_ptr):
    # is_pure=False: the instruction may do more than to return a value.
    tl.inline_asm_elementwise("mov.b32 $0, 1;", "=r", [], tl.int32, False, 1)
    tl.store(x_ptr, tl.load(y_ptr))


@triton.jit
def table_kernel(table_ptr):
    # Kernels for a list of tensors take a tensor of their addresses.
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def pair_kernel(x_ptr, y_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)
    tl.store(y_ptr, tl.load(y_ptr) + 1)


WRITES = {
    "assembly": lambda x, table: assembly_kernel[(1,)](x, torch.ones_like(x)),
    "table": lambda x, table: table_kernel[(1,)](table),
    "pair": lambda x, table: pair_kernel[(1,)](x, x),
}


def then_read(write):
    def function(x, table):
        write(x, table)
        return x + 100

    return function


def address(x):
    return torch.tensor([x.data_ptr()], device=x.device)


if __name__ == "__main__":
    log = "torch._higher_order_ops.triton_kernel_wrap.log.warning"
    x = torch.zeros(1, device=DEVICE)
    for name, write in WRITES.items():
        with mock.patch(log) as warning:
            _, (graph,) = capture(then_read(write), (x, address(x)))
        seen = [", ".join(k["tensors_to_clone"]) for k in launches(graph)]
        print(f"{name}: writes", *seen or ["nothing, so it is removed"])
        if warning.called:
            print("    warning:", warning.call_args[0][0].partition(", ")[2])

# %%
# * **assembly**: PyTorch gives up, logs that, and takes all for written: safe.
# * **table**: the address comes from memory, not from an argument.
# * **pair**: both writes are seen, but each goes to a copy of its own.
#
# On a GPU, from an ``x`` of 0: the result, ``x + 100``, and ``x`` afterwards:


def compare(write, **options):
    row, function = {}, then_read(write)
    for how in (function, compiled(function, **options)):
        x = torch.zeros(1, device=DEVICE)
        result = how(x, address(x)).item()
        row[len(row)] = f"returns {result:g}, x is {x.item():g}"
    return {"eager": row[0], "compiled": row[1]}


if __name__ == "__main__" and DEVICE.type == "cuda":
    with mock.patch(log):
        rows = {name: compare(write) for name, write in WRITES.items()}
    print(pd.DataFrame(rows).T.to_string())
    assert rows["assembly"]["eager"] == rows["assembly"]["compiled"]

# %%
# No error, no warning. A kernel must not rely on two arguments being the same
# memory. Instead of passing a table, make it inside a ``custom_op``: the
# compiler doesn't look into that, and believes what it *declares* to write.
# Here is one, declared in two ways, compiled by AOTAutograd alone:

if __name__ == "__main__":

    def bump(x: torch.Tensor) -> None:
        table_kernel[(1,)](address(x))

    rows = {}
    for declared in ((), ("x",)):
        name = f"triton_gallery::bump_{len(declared)}"
        op = torch.library.custom_op(name, bump, mutates_args=declared)
        op.register_fake(lambda x: None)
        row = compare(lambda x, table, op=op: op(x), backend="aot_eager")
        rows[f"mutates_args={declared}"] = row
        try:
            x = torch.zeros(1, device=DEVICE)
            torch.library.opcheck(op, (x,), test_utils="test_schema")
        except Exception as error:
            print(str(error).partition(" (")[0].partition(": ")[2])
    print(pd.DataFrame(rows).T.to_string())
    lie, truth = rows.values()
    assert truth["eager"] == truth["compiled"] != lie["compiled"]

# %%
# So there are two ways to notice: compare compiled with eager, inputs as well
# as results; and ``opcheck``, whose ``test_schema`` looks for arguments that
# changed undeclared. (Don't pass addresses even to a declared op: it may be
# given a copy of ``x``, but the old address.) ``triton_op.py`` is next.
#
# The benchmark
# -------------
#
# The figure is ``12 * N / time``. Eager: ``Triton`` is ``chain``, ``PyTorch``
# is ``chain_torch``. Compiled: ``torch.compile`` is ``chain``, with our kernel,
# and ``alone`` is ``chain_torch``. ``Roof`` is an addition into a given output.

LINES = ["Triton", "PyTorch", "torch.compile", "torch.compile, alone", "Roof"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2**k for k in range(14, 29, 2)],
        x_log=True,
        line_arg="provider",
        line_vals=LINES,
        line_names=LINES,
        ylabel="GB/s",
        plot_name="torch_compile",
        args={},
    )
)
def benchmark(N, provider):
    x, y, out = torch.rand(3, N, device=DEVICE)
    op = {
        "Triton": chain,
        "PyTorch": chain_torch,
        "torch.compile": compiled(chain, dynamic=False),
        "torch.compile, alone": compiled(chain_torch, dynamic=False),
        "Roof": lambda x, y: torch.add(x, y, out=out),
    }[provider]
    times = triton.testing.do_bench(lambda: op(x, y), quantiles=[0.5, 0.2, 0.8])
    median, fast, slow = (12 * N * 1e-6 / time for time in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# Reading the result
# ------------------
#
# For large ``N`` the bytes decide: 44 for both eager chains, 28 with the wall,
# 12 without it. A kernel where the compiler could have generated one is a loss,
# however good. It has to save more than the wall costs, or do the neighbours'
# work too. For small ``N`` the GPU waits for the CPU, so these figures time the
# CPU's calls, not the kernels. There our chain is slower compiled than eager.
#
# Go further
# ----------
#
# 1. Let our kernel do the work of one neighbour, too. How much does that save?
# 2. Let ``bump`` return ``x.sum()``, still with ``mutates_args=()``. Its result
#    is used, so it stays in the graph. Is all well?
#
# To read on: PyTorch's tutorial *Using User-Defined Triton Kernels with
# torch.compile*; and ``torch/_higher_order_ops/triton_kernel_wrap.py``.

# %%
# Answers
# -------
#
# **1.** Nothing: the other operator on its side still takes a kernel, with a
# read and a write. A whole side saves 8 bytes, and both sides save 16, which
# reaches the floor.
#
# **2.** No. The op runs and changes ``x``, but to the compiler ``x * 2`` after
# it is the same as ``x * 2`` before it: their difference can become 0.
