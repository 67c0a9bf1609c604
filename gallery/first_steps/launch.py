# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery.not_for]  # it shows what no compiler takes
# inverse_kernel = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
#
# [tool.triton-gallery]
# description = """
# See what happens between a call in Python and the GPU: how Triton finds,
# compiles and launches a kernel."""
# ///
r"""
Launching a kernel
==================

``kernel[grid](arguments)`` reads like a function call. In it, Triton looks for
a compiled kernel that fits these arguments, compiles one if there is none, and
hands it to the GPU. This page opens that call up. It follows
``strides.py`` and needs the programs, blocks and masks of ``vector_add.py``.

After this page you can

* tell what a kernel may contain, and read the refusal when it contains more;
* shape a grid, and look up every option that a launch takes;
* predict when a kernel is compiled again, and decide whether it should be;
* find what the compiler made, in memory and on disk.
"""

# sphinx_gallery_tags = ["compiler"]
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path

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
# An empty kernel
# ---------------
#
# ``@triton.jit`` takes the *source* of a function, which has to lie in a file
# or a notebook cell. Python never runs the body; it is compiled at a launch.


@triton.jit
def empty_kernel():
    pass


if __name__ == "__main__":
    empty_kernel[(1,)]()
    print("empty_kernel is of type", type(empty_kernel).__name__)

# %%
# On a GPU that is ``JITFunction``. Without one, ``TRITON_INTERPRET=1`` was set
# above, and the decorator made something that runs the body in NumPy.
#
# The grid
# --------
#
# The *grid* is in the square brackets: how many programs, along up to three
# axes. Here each program writes its place in the grid as two digits.


@triton.jit
def place_kernel(out_ptr):
    row, column = tl.program_id(axis=0), tl.program_id(axis=1)
    offset = row * tl.num_programs(axis=1) + column
    tl.store(out_ptr + offset, 10 * row + column)


out = torch.empty((2, 4), dtype=torch.int32, device=DEVICE)
place_kernel[(2, 4)](out)
assert out.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]

# %%
# The first axis may have :math:`2^{31} - 1` programs, the others 65535 (the
# `CUDA guide <https://docs.nvidia.com/cuda/cuda-c-programming-guide/>`_ lists
# such limits), so the axis that grows with the data goes first.
#
# What a kernel may use
# ---------------------
#
# * Python's numbers, tuples, ``if``, ``for``, ``while``, and a few of its
#   built-in functions: ``range``, ``min``, ``max``, ``len``, ``isinstance``;
# * its own arguments, and everything in ``triton.language``;
# * other functions decorated with ``@triton.jit``;
# * global constants, if they are wrapped in ``tl.constexpr``.
#
# This kernel uses some of each. It adds up ``TERMS`` terms of the power series
# of :math:`e^x`, innermost bracket first: :math:`1 + x (1 + x (1/2 + \dots))`.
# ``tl.static_range`` unrolls its loop, so that each ``k`` is a constant.

SERIES = tl.constexpr((1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120))


@triton.jit
def horner_step(acc, x, coefficient):
    return acc * x + coefficient


@triton.jit
def exp_kernel(
    x_ptr,
    out_ptr,
    N,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)  # (BLOCK,)
    for k in tl.static_range(TERMS - 1, -1, -1):
        acc = horner_step(acc, x, SERIES[k])
    tl.store(out_ptr + offs, acc, mask=offs < N)


# %%
# The grid may also be a function. Triton calls it with a dictionary of the
# kernel's arguments. Take constexprs such as ``BLOCK`` (*meta-parameters*) from
# there: then the grid is still right when ``autotune.py`` chooses ``BLOCK``.
# Options of the launch, such as ``num_warps``, are not in the dictionary.


def exp_series(x):
    """Return the first six terms of the power series of exp, for float32."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError("exp_series takes a contiguous float32 tensor")
    out = torch.empty_like(x)
    N = x.numel()

    def grid(meta):
        assert set(meta) == {"x_ptr", "out_ptr", "N", "TERMS", "BLOCK"}
        return (triton.cdiv(N, meta["BLOCK"]),)

    exp_kernel[grid](x, out, N, TERMS=6, BLOCK=1024)
    return out


# %%
# The check, for ``|x| <= 1``. Each of six steps rounds a coefficient, a product
# and a sum, all below 3, and a product with ``x`` enlarges no error. So the
# error is :math:`6 \cdot 3 \cdot 3 \cdot 2^{-24} < 4 \cdot 10^{-6}` at most.

torch.manual_seed(0)
for N in (1, 1000, 4096):
    x = 2 * torch.rand(N, device=DEVICE) - 1
    expected = sum(c * x.double() ** k for k, c in enumerate(SERIES.value))
    out = exp_series(x).double()
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-6)

# %%
# A compiler without a GPU
# ------------------------
#
# From here on we watch the compiler, on any machine: only loading what it made
# needs a GPU. A second Python process, with the interpreter off, gets a
# stand-in for the driver that knows a *target* and no more: compute capability
# 9.0, an H100 or H200. The real launch path works there up to the loading, and
# ``kernel.warmup(arguments, grid=...)`` goes exactly that far. ``elsewhere``
# calls a function of this page in that process, with the kernels it needs.

TARGET = triton.backends.compiler.GPUTarget("cuda", 90, 32)
FACTOR = 2.0
TOP = f"""
import os, re, subprocess, time, types, torch, triton, triton.language as tl
from pathlib import Path
TARGET = triton.backends.compiler.{TARGET}
FACTOR, SERIES = {FACTOR}, tl.constexpr({SERIES.value})
"""
SERVER = """
import importlib, json, sys
for line in sys.stdin:
    importlib.invalidate_caches()
    name, arguments = json.loads(line)
    answer = getattr(importlib.import_module("page_" + name), name)(*arguments)
    print(json.dumps(answer), flush=True)
"""

if __name__ == "__main__":

    def compile_only():
        stand_in = types.SimpleNamespace(
            get_current_target=lambda: TARGET,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
        triton.runtime.driver.set_active(stand_in)

    def elsewhere(function, needs=(), *arguments):
        sources = [getattr(f, "fn", f) for f in (*needs, function)]
        texts = [textwrap.dedent(inspect.getsource(f)) for f in sources]
        name = function.__name__
        (FOLDER / f"page_{name}.py").write_text("\n".join([TOP, *texts]))
        print(json.dumps([name, arguments]), file=CHILD.stdin, flush=True)
        answer = CHILD.stdout.readline()
        if not answer:
            raise RuntimeError((FOLDER / "stderr").read_text())
        return json.loads(answer)

    temporary = tempfile.TemporaryDirectory()
    FOLDER = Path(temporary.name)
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": f"{FOLDER}/cache"}
    CHILD = subprocess.Popen(  # it ends when this process closes its stdin
        [sys.executable, "-c", SERVER],
        cwd=FOLDER,
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(FOLDER / "stderr").open("w"),
        text=True,
    )
    elsewhere(compile_only)

# %%
# What the compiler refuses
# -------------------------
#
# Nine functions that are no kernels. The comments say what to write instead.

if __name__ == "__main__":

    def double(x):
        return 2 * x

    def calls_python(x_ptr):
        tl.store(x_ptr, double(1.0))  # decorate `double` with @triton.jit

    def calls_torch(x_ptr):
        tl.store(x_ptr, torch.exp(tl.load(x_ptr)))  # tl.exp; so with NumPy

    def reads_global(x_ptr):
        tl.store(x_ptr, FACTOR)  # FACTOR = tl.constexpr(2.0), or an argument

    def sizes_at_run_time(x_ptr, N):
        tl.store(x_ptr + tl.arange(0, N), 0.0)  # N: tl.constexpr

    def branches_on_block(x_ptr):
        if tl.load(x_ptr + tl.arange(0, 16)) > 0:  # a mask, or tl.where
            tl.store(x_ptr, 0.0)

    def indexes_block(x_ptr):
        x = tl.load(x_ptr + tl.arange(0, 16))
        tl.store(x_ptr, x[3])  # tl.load(x_ptr + 3)

    def changes_type(x_ptr, N):
        total = 0  # 0.0: the loop makes it a float
        for k in range(N):
            total += tl.load(x_ptr + k)

    def makes_dict(x_ptr):
        tl.store(x_ptr, {"one": 1.0}["one"])  # so with break, lambda, try

    def returns(x_ptr):
        return tl.load(x_ptr)  # store it: only helpers return

    REFUSED = [calls_python, calls_torch, reads_global, sizes_at_run_time]
    REFUSED += [branches_on_block, indexes_block, changes_type, makes_dict]
    REFUSED += [returns]

# %%
# Each is decorated and compiled in the other process; first, ``empty_kernel``
# is called without a grid. The cell prints the last line of each exception. The
# lines before it quote the source.

if __name__ == "__main__":

    def refusal(call, *arguments, **options):
        try:
            call(*arguments, **options)
        except Exception as error:
            message = re.sub(r" at 0x\w+", "", str(error).splitlines()[-1])
            return f"{type(error).__name__}: {message}"

    def refusals(names):
        said = {"empty_kernel()": refusal(empty_kernel)}  # without a grid
        for name in names:
            kernel = triton.jit(globals()[name])
            arguments = [torch.float32, 1000][: len(kernel.arg_names)]
            said[name] = refusal(kernel.warmup, *arguments, grid=(1,))
        return said

    def show(said):
        for name, message in said.items():
            line = f"{name}: {message or 'accepted'}"
            print(textwrap.fill(line, 78, subsequent_indent="    "))

    names = [function.__name__ for function in REFUSED]
    needs = (refusal, empty_kernel, double, *REFUSED)
    show(said := elsewhere(refusals, needs, names))
    assert all(said.values())
    stderr = (FOLDER / "stderr").read_text()
    show({"on standard error": re.search(r"error: .*", stderr)[0]})

# %%
# The function that returns fails in a later stage, which gives its reason not
# in the exception but on standard error.
#
# .. warning::
#
#    The interpreter does not compile, so what ran without a GPU can still be
#    refused on one. It also ignores options, the misspelt ones too.

if __name__ == "__main__" and DEVICE.type == "cpu":
    out = torch.zeros(1)
    triton.jit(calls_python)[(1,)](out, num_warp=8)
    print("calls_python, interpreted, stores", out.item())

# %%
# Every option of a launch
# ------------------------
#
# Options are passed beside the arguments: ``kernel[grid](x, N, num_warps=8)``.
# First in the table is what one sets, then what is for special occasions, then
# what Triton fills in. The defaults are those of the installed Triton, for
# sm_90.

OPTIONS = {
    "num_warps": "warps that share a program; a power of two, 32 at most",
    "num_stages": "loop iterations in flight when loads are pipelined",
    "num_ctas": "thread blocks, a cluster, that share a program; from sm_90",
    "maxnreg": "registers per thread at most; what does not fit is spilled",
    "debug": "keep tl.device_assert; TRITON_DEBUG=1 does it for all kernels",
    "sanitize_overflow": "with debug: assert that + - * of int32 stay in range",
    "enable_fp_fusion": "a * b + c in one instruction, rounded once",
    "launch_pdl": "start before the kernel ahead is done (gdc_wait waits)",
    "launch_cooperative_grid": "run all programs at the same time, or fail",
    "clc": "a program that is done takes over another; from sm_100",
    "extern_libs": "bitcode to link, {name: path}",
    "enable_reflect_ftz": "libdevice flushes subnormal float32 to zero",
    "ptx_options": "more arguments for ptxas, the assembler",
    "ptx_version": "PTX version, 87 for 8.7; None: what ptxas takes",
    "sched4reg": "order the PTX so that fewer registers are in use",
    "min_shared_mem": "bytes of shared memory that a program has at least",
    "ir_override": "file (.ttir .ttgir .llir .ptx) that replaces that stage",
    "instrumentation_mode": "ignored here: an environment variable sets it",
    "fpsan_homomorphic_casts": "ignored here, too; with fpsan, casts cut bits",
    "arch": "architecture that the optimizer plans for",
    "warp_size": "threads in a warp; recorded, not read",
    "backend_name": "recorded; Gluon reads it",
    "default_dot_input_precision": "of tl.dot for float32, if not given there",
    "allowed_dot_input_precisions": "what tl.dot takes as input_precision",
    "max_num_imprecise_acc_default": "float8 products added in low precision",
    "supported_fp8_dtypes": "float8 types that kernels may use",
    "deprecated_fp8_dot_operand_dtypes": "float8 types that tl.dot warns of",
}
DEFAULTS = vars(triton.compiler.make_backend(TARGET).parse_options({}))


def unexplained():
    return [name for name in DEFAULTS if name not in OPTIONS]


names = [name for name in OPTIONS if name in DEFAULTS] + unexplained()
texts = [OPTIONS.get(name, "not explained here") for name in names]
values = [re.sub(r"\S*/\S*|[(',)]", "", str(DEFAULTS[n])) for n in names]
options = pd.DataFrame({"default": values, "meaning": texts}, names)
if __name__ == "__main__":
    pd.set_option("display.max_colwidth", None)
options

# %%
# What some of them do to ``exp_kernel``. Registers per thread, and bytes of
# stack for spilled ones, are read from the machine code. Fused instructions and
# directives are read from the PTX, NVIDIA's portable assembly. ``.reqntid`` is
# the number of threads of a block, 32 for each warp.

if __name__ == "__main__":

    def effects(choices):
        rows = {}
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage"]
        arguments = (torch.float32, torch.float32, 4096, 6, 4096)
        for choice in choices:
            options = eval(f"dict({choice})")
            kernel = exp_kernel.warmup(*arguments, grid=(1,), **options)
            path = kernel.metadata_group["exp_kernel.cubin"]
            usage = subprocess.check_output([*tool, path], text=True)
            row = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
            ptx = kernel.asm["ptx"]
            lines = re.findall(r"^\.(?:max|req).*", ptx, re.MULTILINE)
            rows[choice] = [*row, ptx.count("fma."), ", ".join(lines)]
        return rows

    choices = ["num_warps=4", "num_warps=8", "num_ctas=2", "maxnreg=32"]
    choices += ["enable_fp_fusion=False", "launch_pdl=True"]
    rows = elsewhere(effects, [horner_step, exp_kernel], choices)
    columns = ["registers", "stack", "fma", "directives"]
    print(pd.DataFrame(rows.values(), rows, columns).to_string())

# %%
# (``launch_pdl`` leaves the code alone: it goes with the launch.) Some options
# are gone. Device, its type and the stream are PyTorch's current ones,
# ``warmup`` is a method, and ``num_ctas`` is the size of a cluster.

if __name__ == "__main__":

    def outdated(names):
        return {n: refusal(empty_kernel[(1,)], **{n: 1}) for n in names}

    names = ["stream", "device", "device_type", "warmup", "cluster_dims"]
    show(said := elsewhere(outdated, [refusal, empty_kernel], names))
    assert all(said.values())

# %%
# When a kernel is compiled again
# -------------------------------
#
# A launch looks its kernel up by a *key*: the options, the constexprs, and the
# type of each argument with a hint. An integer 1 becomes a constant. Of other
# integers and of addresses it is noted whether 16 divides them; of floats,
# nothing. This *specialization* makes code faster, and each new key costs a
# compilation. The table has the type of ``N``, and a thread's loads for its
# eight elements. Its right column is with ``do_not_specialize=["N"]``.

if __name__ == "__main__":

    def versions(settings):
        kernel = triton.jit(exp_kernel.fn, **settings)
        x, rows = torch.ones(9), {}
        for N, shift in ((1, 0), (1000, 0), (4096, 0), (2**31, 0), (4096, 1)):
            found = kernel.warmup(x[shift:], x, N, 6, 1024, grid=(1,))
            loads = re.findall(r"ld\.global(?:\.v(\d))?", found.asm["ptx"])
            kind, width = found.src.signature["N"], 4 * int(loads[0] or 1)
            case = f"N = {N}" + ", x[1:]" * shift
            rows[case] = f"{kind}: {len(loads)} x {width} bytes"
        N = range(1, 1001)
        hashes = {kernel.warmup(x, x, n, 6, 1024, grid=(1,)).hash for n in N}
        return rows | {"kernels, N = 1 to 1000": len(hashes)}

    kernels = [horner_step, exp_kernel]
    free = elsewhere(versions, kernels, {})
    fixed = elsewhere(versions, kernels, {"do_not_specialize": ["N"]})
    columns = {"as it is": free, "do_not_specialize": fixed}
    print(pd.DataFrame(columns).to_string())
    assert "16 bytes" in free["N = 4096"] != fixed["N = 4096"]

# %%
# Where the mask may end among four elements, or 16 does not divide the address,
# four elements cannot be loaded as one. So ``do_not_specialize`` is for
# arguments that touch neither mask nor address; for others it trades
# compilations for narrower loads. (Users of Helion `asked for that trade
# <https://github.com/pytorch/helion/issues/1539>`_.) On a GPU, the next cell
# counts the kernels of real launches. It also shows two refusals: a second axis
# that is too long, and a tensor on the CPU.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, kernels = torch.rand(1024, device=DEVICE), {}
    for N in range(1, 1001):
        kernel = exp_kernel[(1,)](x, torch.empty_like(x), N, 6, 1024)
        kernels[kernel.hash] = kernel
    for kernel in kernels.values():
        print("registers", kernel.n_regs, "spilled", kernel.n_spills)
    assert len(kernels) == 3
    said = {"a grid of (1, 65536)": refusal(empty_kernel[(1, 65536)])}
    show(said | {"a CPU tensor": refusal(place_kernel[(1,)], torch.ones(1))})

# %%
# What the compiler leaves behind
# -------------------------------
#
# ``warmup`` returns the compiled kernel. Its ``asm`` has every stage: Triton's
# own (``ttir``, ``ttgir``), LLVM's (``llir``), ``ptx``, and machine code
# (``cubin``). The files lie in ``TRITON_CACHE_DIR`` or ``~/.triton/cache``,
# where other processes find them.

if __name__ == "__main__":

    def on_disk():
        times = {}
        for step in ("compiled", "found in memory", "found on disk"):
            if step == "found on disk":
                exp_kernel.device_caches.clear()  # forget what is in memory
            start = time.perf_counter()
            x = torch.float32
            kernel = exp_kernel.warmup(x, x, 4096, 5, 1024, grid=(1,))
            times[step] = 1e3 * (time.perf_counter() - start)
        folder = Path(kernel.metadata_group["exp_kernel.ptx"]).parent
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        return times, list(kernel.asm), sizes

    times, stages, sizes = elsewhere(on_disk, [horner_step, exp_kernel])
    print("asm:", *stages)
    for name, size in sorted(sizes.items()):
        print(f"{size:7} bytes  {name}")
    for step, milliseconds in times.items():
        print(f"{milliseconds:9.3f} ms  {step}")

# %%
# The key on disk also has the source of the kernel and of all that it calls,
# the constexpr globals, the number of the first line (a kernel that moves down
# is compiled again), Triton's own source, the version of ``ptxas``, and the
# environment variables that change code.
#
# Break it: works for every size but one
# --------------------------------------
#
# This kernel divides by ``N``. Where is the bug?

if __name__ == "__main__":

    @triton.jit
    def inverse_kernel(out_ptr, N):
        tl.store(out_ptr, 1 / N.to(tl.float32))

    @triton.jit
    def inverse_kernel_with_cast(out_ptr, N):
        tl.store(out_ptr, 1 / tl.cast(N, tl.float32))

    def inverses():
        said = {}
        for kernel in (inverse_kernel, inverse_kernel_with_cast):
            for N in (1000, 16, 1):
                call, name = kernel.warmup, f"{kernel.__name__}, N = {N}"
                said[name] = refusal(call, torch.float32, N, grid=(1,))
        return said

    needs = [refusal, inverse_kernel, inverse_kernel_with_cast]
    show(said := elsewhere(inverses, needs))
    assert [n for n in said if said[n]] == ["inverse_kernel, N = 1"]
    if DEVICE.type == "cpu":
        inverse_kernel[(1,)](torch.ones(1), 1)  # passes, interpreted

# %%
# At ``N = 1`` the argument is the constant 1, and a number has no ``.to``: an
# `open issue of Triton <https://github.com/triton-lang/triton/issues/2939>`_.
# ``tl.cast`` takes both. A test with sizes like 1000 never sees it, and neither
# does the interpreter. Let every test have a size 1.
#
# Go further
# ----------
#
# 1. A decoder calls a kernel with a length that grows by one in each step. How
#    many compilations are there, with and without ``do_not_specialize``, and
#    how many if the length is a constexpr?
# 2. A server must not compile during its first requests. What do you do?
#
# Next is ``debugging.py``, on kernels that go wrong. To read on: `triton.jit
# <https://triton-lang.org/main/python-api/generated/triton.jit.html>`_.

# %%
# Answers
# -------
#
# **1.** One with ``do_not_specialize``. Without it at most three: for 1, for
# multiples of 16, and for all others. As a constexpr, each length has its own.
#
# **2.** Call ``warmup`` at the start, with the same options and constexprs, a
# dtype in the place of each tensor, and 1, 16 and 17 for each integer. That
# covers addresses that 16 divides. Or ship the cache's folder.
