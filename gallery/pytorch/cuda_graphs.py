# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Capture a Triton kernel in a CUDA graph, run into what the graph freezes,
# and measure when it pays."""
# ///
r"""
CUDA graphs
===========

A small kernel is done before Python has launched the next one. A CUDA graph
records launches once and replays them without Python, and also without asking
what has changed since. This page captures a Triton kernel, runs into what a
graph freezes, and measures when it pays. It follows ``aot_inductor.py``.

After this page you can

* capture a Triton kernel, and know beforehand what capture refuses;
* give a graph new data and new numbers, and not compute with old ones;
* count the kernels in a graph;
* choose between a graph, ``torch.compile`` and neither, by measuring.
"""

# sphinx_gallery_tags = ["launch cost", "elementwise"]
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in bytes
# --------------------
#
# ``torch.lerp(x, end, weight)`` is ``x + weight * (end - x)``. Each step of a
# running average is one, ``average = lerp(average, sample, weight)``. It reads
# two vectors and writes one: ``12 * N`` bytes in float32. An `H200
# <https://www.nvidia.com/en-us/data-center/h200/>`_ moves 4.8 TB/s, by its data
# sheet.

if __name__ == "__main__":
    x, end = torch.rand(2, 4096, device=DEVICE)
    moved = sum(4 * t.numel() for t in (x, end, torch.lerp(x, end, 0.25)))
    print(f"{moved:,} bytes: {moved / 4.8e3:.0f} ns at 4.8 TB/s")

# %%
# A launch from Python takes microseconds, so the GPU mostly waits.
#
# The kernel
# ----------
#
# The weight is a number or the address of one. A graph can change it only in
# the second case. A ``weight_ptr`` of ``None`` is known to the compiler.


@triton.jit
def lerp_kernel(
    x_ptr,
    end_ptr,
    out_ptr,
    weight_ptr,
    weight,
    N,
    BLOCK: tl.constexpr,
):
    # In int32 the product below would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)  # (BLOCK,)
    end = tl.load(end_ptr + offs, mask=mask).to(tl.float32)  # (BLOCK,)
    if weight_ptr is None:
        w = tl.cast(weight, tl.float32)
    else:
        w = tl.load(weight_ptr).to(tl.float32)
    # Two formulas, as in PyTorch, so that both ends are met exactly.
    near_x, near_end = x + w * (end - x), end - (1 - w) * (end - x)
    tl.store(out_ptr + offs, tl.where(w < 0.5, near_x, near_end), mask=mask)


# %%
# The op
# ------
#
# What ``lerp`` calls is registered (``triton_op.py`` explains how), so that
# ``torch.compile`` takes it. Who takes this cell takes the kernel above along,
# and ``DEVICE``.

DTYPES = {torch.float16, torch.bfloat16, torch.float32}
BLOCK = 1024


@triton_op("triton_gallery::lerp", mutates_args={})
def lerp_op(
    x: torch.Tensor,
    end: torch.Tensor,
    weight_tensor: torch.Tensor | None,
    weight: float,
) -> torch.Tensor:
    x, end = x.contiguous(), end.contiguous()
    out = torch.empty_like(x)
    N = out.numel()
    if N > 0:
        kernel = wrap_triton(lerp_kernel)
        grid = (triton.cdiv(N, BLOCK),)
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            kernel[grid](x, end, out, weight_tensor, weight, N, BLOCK=BLOCK)
    return out


def lerp(x, end, weight):
    """Return ``torch.lerp`` for a weight that is a number or one element."""
    if x.dtype not in DTYPES or x.dtype != end.dtype:
        dtypes = f"{x.dtype} and {end.dtype}"
        raise TypeError(f"lerp takes one of {DTYPES}, not {dtypes}")
    if x.shape != end.shape:
        raise ValueError(f"shapes differ: {tuple(x.shape)}, {tuple(end.shape)}")
    is_tensor = isinstance(weight, torch.Tensor)
    if is_tensor and not (weight.numel() == 1 and weight.is_floating_point()):
        raise ValueError(f"the weight has to be one float, not {weight}")
    tensors = (x, end, weight) if is_tensor else (x, end)
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1 or x.device.type != DEVICE.type:
        raise ValueError(f"lerp takes one {DEVICE.type} device, not {devices}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError("lerp has no backward: call it under torch.no_grad()")
    if is_tensor:
        return lerp_op(x, end, weight, 0.0)
    return lerp_op(x, end, None, float(weight))


# %%
# The check
# ---------
#
# For inputs between 0 and 1 each step rounds by :math:`2^{-24}` at most: the
# weight, ``1 - w``, difference, product, sum; then the dtype (``rtol``).

torch.manual_seed(0)
for shape in ((1,), (4 * BLOCK,), (31, 257)):
    for dtype, rtol in (torch.float32, 0), (torch.float16, 2**-10):
        x, end = torch.rand(2, *shape, device=DEVICE).to(dtype)
        for weight in (0.0, 0.3, 0.9, 1.0):
            expected = torch.lerp(x.double(), end.double(), weight)
            for w in (weight, torch.tensor([weight], device=DEVICE)):
                out = lerp(x, end, w).double()
                torch.testing.assert_close(out, expected, rtol=rtol, atol=3e-7)

# %%
# What a graph will remember
# --------------------------
#
# A launch gives the GPU a kernel, a grid and a value for each parameter. Which
# parameters? A child process without the interpreter asks the compiled kernel.

PARAMETERS = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget

KERNEL
types = dict.fromkeys(lerp_kernel.arg_names[:4], "*fp32")
types |= {"weight": "fp32", "N": "i32", "BLOCK": "constexpr"}
source = triton.compiler.ASTSource(lerp_kernel, types, {"BLOCK": 1024})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
kinds = re.findall(r"\\.param \\.(\\w+)", ptx)
for name, kind in zip(lerp_kernel.arg_names, kinds):
    print(kind, name if name != "BLOCK" else "and so on: the compiler's own")
"""


def child(program, folder, name="child"):
    """Start a Python process, the interpreter off, with our kernel."""
    source = inspect.getsource(lerp_kernel.fn)
    file = Path(folder, f"{name}.py")
    file.write_text(program.replace("KERNEL", source))
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": f"{file}.d"}
    command, env = [sys.executable, "-W", "ignore", file], os.environ | settings
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        said = child(PARAMETERS, folder).communicate()[0]
    print(said, end="")
    assert "u64 weight_ptr\nf32 weight\nu32 N\n" in said

# %%
# A graph stores these values as they are at its capture. It knows addresses but
# no tensors, ``N`` and the grid but no shape, and the weight or its address.
#
# Capture and replay
# ------------------
#
# ``torch.cuda.graph`` puts a stream into capture mode: launches are noted, not
# run. ``replay`` runs them. The *warm-up* before, on a side stream as `PyTorch
# wants it <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs>`_,
# keeps out what is set up at first use, once or for each stream.


def capture(function, **options):
    """Return a CUDA graph of ``function()``, and what the function returned."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph(**options)
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, end = torch.rand(2, 4096, device=DEVICE)
    graph, out = capture(lambda: lerp(x, end, 0.25))
    for _ in range(2):
        x.copy_(torch.rand_like(x))  # new data, into the old place
        graph.replay()
        torch.testing.assert_close(out, torch.lerp(x, end, 0.25))
    print("two replays, two right results")

# %%
# The CPU does not wait: copies and replays queue up in order. The memory of
# ``out`` belongs to the graph, and each replay overwrites it: clone what you
# keep.
#
# What capture refuses
# --------------------
#
# A stream that only takes notes never finishes, so waiting for it is an error.
# A tuner waits, to take the time, and so does ``.item()``. Each case has a
# process of its own: what runs before, what is captured, and how that ends.

CAPTURE = """
import torch, triton, triton.language as tl

KERNEL
x, end, out = torch.rand(3, 4096, device="cuda")
weight = torch.tensor([0.25], device="cuda")
configs = [triton.Config({"BLOCK": size}) for size in (256, 1024)]
tuned = triton.autotune(configs, key=["N"])(lerp_kernel)
compiled = torch.compile(lambda: torch.lerp(x, end, 0.25, out=out))

def launch(kernel, **block):
    grid = lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)
    kernel[grid](x, end, out, None, 0.25, 4096, **block)

try:
    BEFORE
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        NOW
    graph.replay()
    torch.testing.assert_close(out, torch.lerp(x, end, 0.25))
    print("captured")
except Exception as error:
    while error.__context__:  # the end of a broken capture complains as well
        error = error.__context__
    print(type(error).__name__, str(error).splitlines()[0][:60], sep=": ")
"""
CASES = {
    "cold": ("pass", "launch(lerp_kernel, BLOCK=1024)"),
    "tunes": ("pass", "launch(tuned)"),
    "tuned before": ("launch(tuned)", "launch(tuned)"),
    "compiles": ("pass", "compiled()"),
    "reads a tensor": ("pass", "weight.item()"),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for case, (before, captured) in CASES.items():
            text = CAPTURE.replace("BEFORE", before).replace("NOW", captured)
            running[case] = child(text, folder, case.replace(" ", "_"))
        said = {case: run.communicate()[0] for case, run in running.items()}
    for case, (before, captured) in CASES.items():
        print(f"{case}:\n  {before}; {captured}\n  {said[case]}", end="")
    assert said["tuned before"] == "captured\n"
    assert "not permitted" in said["tunes"]
    assert "not permitted" in said["reads a tensor"]

# %%
# A first launch also loads code into the GPU. Some drivers `refused that
# <https://github.com/rewarped/rewarped/issues/24>`_ during a capture; see the
# case "cold" for this one. Compiling during a capture fails too, and its error
# names a copy. Warm up with the very arguments to be captured: then each kernel
# is loaded, and tuners and ``torch.compile`` are done. Waits also hide in
# ``float(tensor)``, in ``if tensor:`` and in an index by a mask; after
# ``torch.cuda.set_sync_debug_mode("error")`` most raise in any run.
#
# Break it: what a graph doesn't notice
# -------------------------------------
#
# A replay never complains: it uses what it has. In these two graphs ``x`` is 0
# and ``end`` is 1, so the result is the weight: a number in the first graph, a
# tensor in the second. Each line changes something and replays both.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, end = torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE)
    number, tensor = 0.25, torch.tensor([0.25], device=DEVICE)
    of_number, result_n = capture(lambda: lerp(x, end, number))
    of_tensor, result_t = capture(lambda: lerp(x, end, tensor))

    def show(what, *expected):
        of_number.replay()
        of_tensor.replay()
        got = result_n[0].item(), result_t[0].item()
        print(f"{what:36}", *got)
        assert got == expected

    show("as captured", 0.25, 0.25)
    number, _ = 0.75, tensor.fill_(0.75)
    show("number = 0.75; tensor.fill_(0.75)", 0.25, 0.75)
    old, x = x, torch.ones_like(x)
    show("x = torch.ones_like(x)", 0.25, 0.75)
    old.copy_(x)
    show("old.copy_(x)", 1, 1)

# %%
# * **A number is frozen**: a weight, a position in a sequence, a seed. What
#   changes has to lie in a tensor, and the kernel has to read it from there.
# * **An address is frozen.** To give the name ``x`` to another tensor changes
#   nothing; data has to be copied to where the graph looks. DeepSpeed forgot
#   inputs in a dictionary, and `every picture had something of the first prompt
#   <https://github.com/deepspeedai/DeepSpeed/pull/8488>`_.
#
# Nor does a graph keep its inputs alive. Those below are freed as the function
# returns, and tensors of sevens get their memory. A shape is frozen, too:

if __name__ == "__main__" and DEVICE.type == "cuda":

    def forgets_its_inputs():
        x, end = torch.zeros(2, 8, device=DEVICE)
        return capture(lambda: lerp(x, end, 0.25))

    graph, out = forgets_its_inputs()
    others = [torch.full((2, 8), 7.0, device=DEVICE) for _ in range(8)]
    graph.replay()
    print("0 to 0 is", out[0].item())
    length = 3
    graph, short = capture(lambda: lerp(end[:length], end[:length], 0.25))
    length = 8
    graph.replay()
    print("length = 8:", short.tolist())
    assert (out[0].item(), len(short)) == (7, 3)

# %%
# So keep each input as long as the graph. (In newer versions of PyTorch
# ``torch.cuda.graph(graph, check_input_liveness=True)`` checks the inputs of
# ops.) Capture a graph for each shape; servers do it for a few batch sizes, and
# pad to the next.
#
# Count the kernels
# -----------------
#
# A graph made with ``keep_graph=True`` can be dumped as text, which lists each
# kernel with its grid. Here 32 samples are averaged in as many steps.


def average(op, x, samples, weight):
    for sample in samples.unbind():
        x = op(x, sample, weight)
    return x


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


def kernels(function):
    """Return the kernels that a function launches, as (name, programs)."""
    graph, _ = capture(function, keep_graph=True)
    graph.enable_debug_mode()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it writes a file
        graph.debug_dump(f"{folder}/graph.dot")
        text = Path(folder, "graph.dot").read_text()
    return re.findall(r"(\w+)\\<\\<\\<(\d+)", text)


OPS = {"Triton": lerp, "PyTorch": torch.lerp}
samples = torch.rand(32, 4096, device=DEVICE)
inputs = samples[0], samples, torch.full((1,), 0.1, device=DEVICE)
out = average(lerp, *inputs).double()
expected = average(torch.lerp, *(t.double() for t in inputs))
torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)

if __name__ == "__main__" and DEVICE.type == "cuda":
    for name, op in OPS.items():
        chain = partial(average, op)
        for how, call in ("plain", chain), ("compiled", compiled(chain)):
            found = kernels(partial(call, *inputs))
            print(f"{name}, {how}: {len(found)} of {found[0][0][:33]}")

# %%
# What a call costs
# -----------------
#
# All ways are timed alike: many calls, one wait at the end, the wall clock.
# (``do_bench`` empties the L2 cache before each call, and Python, running ahead
# meanwhile, hides part of what is to be measured.)


def seconds_per_call(call, calls):
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / calls


def seconds(call):
    """Return the time of a call in nine runs of about 20 ms, in order."""
    seconds_per_call(call, 5)  # what comes once: compiling, capturing
    calls = 10 + int(0.02 / seconds_per_call(call, 10))
    return sorted(seconds_per_call(call, calls) for _ in range(9))


WAYS = ["plain", "torch.compile", "reduce-overhead", "graph"]
WAYS += ["graph, inputs copied", "graph of torch.compile"]


def prepare(way, function, *inputs):
    """Return ``function(*inputs)`` in one of these ways, to call."""
    torch.compiler.reset()
    if way == "reduce-overhead":
        function = compiled(function, mode="reduce-overhead")
    elif "torch.compile" in way:
        function = compiled(function)
    call = partial(function, *inputs)
    if "graph" not in way:
        return call
    replay = capture(call)[0].replay
    if "copied" not in way:
        return replay
    news = [t.clone() for t in inputs]
    return lambda: (torch._foreach_copy_(inputs, news), replay())


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, samples, weight = inputs
    times = pd.DataFrame(index=WAYS)
    for name, op in OPS.items():
        one, many = (op, x, samples[1], weight), (partial(average, op), *inputs)
        for steps, what in (1, one), (32, many):
            medians = [seconds(prepare(way, *what))[4] for way in WAYS]
            times[f"{name}, {steps}"] = [f"{1e6 * t:.1f}" for t in medians]
    print("microseconds for 1 step and for 32, N = 4096")
    print(times.to_string())

# %%
# * **plain**: our op pays for its checks, for being registered and for
#   Triton's launcher, mostly Python; PyTorch's is C++.
# * **torch.compile** first checks that its code still fits. For one step that
#   costs about what it saves of our op, and far more than PyTorch's whole call.
#   In the chain it makes one kernel of PyTorch's 32; our 32 stay, launched from
#   generated code.
# * **reduce-overhead** is a graph that copies its inputs to where it reads, and
#   looks out for other numbers and shapes. That costs in every call.
# * **graph**: one call replays one kernel or 32, whoever wrote them. What is
#   left is the GPU's time, in the kernels and between them. So fusing still
#   pays: the last row first compiles, then captures.
#
# The benchmark
# -------------
#
# One step by its size: medians, 20 and 80 % quantiles of nine runs. ``Roof`` is
# a graph of a hundred of PyTorch's additions, which move the same bytes,
# divided by a hundred: no launches. What fits into the L2 cache stays there.

LINES = ["Triton", "Triton, torch.compile", "Triton, reduce-overhead"]
LINES += ["Triton, graph", "PyTorch", "PyTorch, graph", "Roof"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["N"],
        x_vals=[2**k for k in range(12, 27, 2)],
        x_log=True,
        y_log=True,
        line_arg="provider",
        line_vals=LINES,
        line_names=LINES,
        ylabel="calls/s",
        plot_name="cuda_graphs",
        args={},
    )
)
def benchmark(N, provider):
    name, _, way = provider.partition(", ")
    x, end, out = torch.rand(3, N, device=DEVICE)
    if name == "Roof":
        add = partial(torch.add, x, end, out=out)
        graph, _ = capture(lambda: [add() for _ in range(100)])
        rates = [100 / t for t in seconds(graph.replay)]
    else:
        call = prepare(way or "plain", OPS[name], x, end, inputs[-1])
        rates = [1 / t for t in seconds(call)]
    return rates[4], rates[7], rates[1]  # the times grow, the rates fall


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# Reading the result
# ------------------
#
# Without a graph, a line starts flat: a call costs its launch, whatever the
# size. It turns down where the GPU takes longer; from there on launches are
# hidden, and a graph has little left to save. ``reduce-overhead`` is lowest at
# every size: its checks cost on the left, and on the right its copies of the
# inputs, which move more bytes than the step. (PyTorch's kernel, named above,
# is not its vectorized one: the weight is broadcast.)
#
# So large kernels need no graph. Of small ones, first launch fewer: fuse them
# by hand or by ``torch.compile``. What stays small goes into a graph: your own,
# or ``reduce-overhead`` for a whole model, whose kernels share its cost.
#
# Go further
# ----------
#
# 1. You ``capture`` a step that adds 1 to a tensor, in place. The tensor was 0.
#    What is in it before the first replay, and after?
# 2. The weight of step ``k`` is ``1 / k``. Put the counting into the graph.
#
# This section ends here. To read on: `a long post
# <https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/>`_.

# %%
# Answers
# -------
#
# **1.** 3, because the warm-up runs it three times and a capture runs nothing.
# After the replay it is 4.
#
# **2.** Count in a tensor, ``k.add_(1)``, then call ``lerp(x, end, 1 / k)``.
# The warm-up counts as well: set ``k`` to 0 after the capture.
