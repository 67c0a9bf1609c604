# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery.not_for]  # it shows what no compiler takes
# inverse_kernel = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
#
# [tool.triton-gallery]
# description = """
# Predict when Triton compiles a kernel again, see what each launch option does
# to the code, and find the compiled kernel in the cache."""
# ///
r"""
What a launch compiles
======================

The first launch of a kernel compiles it, and later launches reuse the result.
But a new size or a new option can compile the kernel again, and the first call
then waits. This page shows when that happens, and what the compiler makes of
each option. Kernels that are called with few sizes need no such care.

After ``launch.py`` and this page you can

* predict whether a launch compiles, and avoid it where it hurts;
* choose the options of a launch by what they do to the code;
* find the compiled code in memory and on disk.
"""

# sphinx_gallery_tags = ["compiler"]
import os
import re
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

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

from triton.language.extra import libdevice
from triton_gallery.compiling import compile_only

OPTIONS = {  # what is tried, and what the option is for
    "num_warps=8": "warps, of 32 threads each, that share a program",
    "num_stages=1": "iterations in flight at a time, in loops with tl.dot",
    "num_ctas=2": "thread blocks (a cluster) that share a program",
    "maxnreg=32": "registers of a thread at most; the stack takes the rest",
    "enable_fp_fusion=False": "a * b + c in one instruction, an fma",
    "enable_reflect_ftz=False": "libdevice flushes the tiniest numbers to 0",
    "extern_libs={'libdevice': mine}": "files with functions to link",
    "debug=True": "keep tl.device_assert, and check integers for overflow",
    "ptx_version=80": "version of PTX, the assembly language",
    "ptx_options='--opt-level=0'": "options of the assembler",
    "ir_override=ptx": "other code for a stage, here that of maxnreg=32",
    "launch_pdl=True": "start before the kernel ahead has ended",
    "launch_cooperative_grid=True": "run all programs at the same time",
    "min_shared_mem=65536": "bytes of shared memory at least",
    "sched4reg=True": "order the instructions for fewer registers",
    "clc=True": "a program that has ended takes over another one",
    "stream=0": "gone: PyTorch's current stream",
    "device=0": "gone: PyTorch's current device",
    "warmup=True": "now a method",
    "warp_size=64": "recorded only",
    "debug=True, sanitize_overflow=False": "check nothing for overflow",
}


def properties(compiled):
    """Return what the options change, as found in a compiled kernel."""
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    found = dict(re.findall(r"(?m)^\.(req\w+) (\d+)", ptx))
    tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage"]
    file = compiled.metadata_group["tile_kernel.cubin"]
    usage = subprocess.check_output([*tool, file], text=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "threads": found["reqntid"],
        "cluster": found.get("reqnctapercluster", "1"),
        "registers": registers,
        "stack": stack,
        "shared": metadata.shared,
        "cp.async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "fma": ptx.count("fma."),
        "rsqrt": ", ".join({*re.findall(r"rsqrt\.(\S+)", ptx)}) or "none",
        "assertions": ptx.count("__assertfail"),
        "PTX": re.search(r"(?m)^\.version (.*)", ptx)[1],
        "launch_pdl": metadata.launch_pdl,
        "cooperative": metadata.launch_cooperative_grid,
        "code": ptx,
    }


@compile_only
def effects(options):
    """Return, for each option, its default and what it changes."""
    file = Path(tempfile.mkdtemp(), "mine.ll")  # in LLVM's language
    file.write_text("define float @__nv_rsqrtf(float %x) { ret float %x }")
    arguments = (torch.float16, torch.float16, torch.float32, 1024, 32)

    def compiled(**options):
        return tile_kernel.warmup(*arguments, grid=(1,), **options)

    ptx = compiled(maxnreg=32).metadata_group["tile_kernel.ptx"]
    names = {"mine": str(file), "ptx": ptx}
    target = triton.runtime.driver.active.get_current_target()
    backend = triton.compiler.make_backend(target)
    before, defaults = properties(compiled()), backend.parse_options({})
    table = {}
    for option in options:
        default = getattr(defaults, option.partition("=")[0], "")
        simple = isinstance(default, (bool, int, type(None)))
        known = f" (default {default})" if simple else ""
        try:
            after = properties(compiled(**eval(f"dict({option})", names)))
        except KeyError:
            effect = f"not in Triton {triton.__version__}"
        except Exception as error:
            words = str(error).split(";")[0].split("run() ")[-1]
            effect = textwrap.shorten(words, 40)
        else:
            same = after.pop("code") == before["code"]
            changed = [
                f"{name} {before[name]} -> {value}"
                for name, value in after.items()
                if value != before[name]
            ]
            rest = "nothing" if same else "another order"
            effect = ", ".join(changed) or rest
        table[option] = known, effect
    return table


def show_options(options):
    """Print each option with its default, its purpose and its effect."""
    for option, (default, effect) in effects([*options]).items():
        line = f"{option}{default}: {options[option]}"
        print(textwrap.fill(line, 72, subsequent_indent="    "))
        indents = {"initial_indent": "    -> ", "subsequent_indent": "       "}
        print(textwrap.fill(effect, 72, **indents))


# %%
# Compiled again, or not?
# -----------------------
#
# This kernel multiplies a vector by a number.


@triton.jit
def scale_kernel(x_ptr, out_ptr, a, N, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    tl.store(out_ptr + offs, a * x, mask=offs < N)


if __name__ == "__main__":
    x = torch.rand(1000, device=DEVICE)
    out = torch.empty_like(x)
    scale_kernel[(1,)](x, out, 2.0, 1000, BLOCK=1024)
    torch.testing.assert_close(out, 2 * x, rtol=0, atol=0)

# %%
# We compile it, change one thing, and see whether it is compiled again.
# ``warmup`` compiles as a launch does, and returns the compiled kernel. The
# same kernel has the same ``hash``. ``compile_only`` runs a function in a
# process where Triton compiles for an H100, with or without a GPU.


@compile_only
def changes():
    x = torch.ones(2000)
    first = {"x_ptr": x, "out_ptr": x, "a": 2.0, "N": 1000, "BLOCK": 1024}
    first["grid"] = (1,)
    changed = {
        "nothing": {},
        "another float: a = 3.0": {"a": 3.0},
        "an integer for the float: a = 2": {"a": 2},
        "another integer: N = 1001": {"N": 1001},
        "another shape of x": {"x_ptr": x.view(2, 1000)},
        "another grid": {"grid": (7,)},
        "N = 1": {"N": 1},
        "N = 1008, which 16 divides": {"N": 1008},
        "N = 2**31, which needs int64": {"N": 2**31},
        "x[1:], an address 16 does not divide": {"x_ptr": x[1:]},
        "another type: x.half()": {"x_ptr": x.half()},
        "another constexpr: BLOCK = 512": {"BLOCK": 512},
        "another option: num_warps = 8": {"num_warps": 8},
    }
    before = scale_kernel.warmup(**first)
    table = {}
    for name, change in changed.items():
        after = scale_kernel.warmup(**first | change)
        table[name] = after.hash != before.hash
    return table


if __name__ == "__main__":
    for name, again in changes().items():
        print(f"{name:38}{'compiled again' if again else '-'}")

# %%
# A launch looks for its kernel by a *key*. The key has the options, the value
# of each constexpr, and the type of each other argument. An integer is int32 if
# it fits, and int64 otherwise. Besides the type, the key has
#
# * of an integer 1, that it is 1: it becomes a constexpr;
# * of all other integers, and of addresses, whether 16 divides them;
# * of floats, nothing more.
#
# To compile for a 1, or for what 16 divides, is called *specialization*.

# %%
# What specialization is good for
# -------------------------------
#
# A block has 1024 floats, and a program has 128 threads, so each thread loads
# eight floats. The table shows the type of ``N``, and how a thread loads them.
# On the right, ``@triton.jit(do_not_specialize=["N"])`` switches specialization
# off for ``N``.


@compile_only
def loads(settings):
    kernel = triton.jit(scale_kernel.fn, **settings)
    x = torch.ones(2000)
    cases = {"N = 1": (x, 1), "N = 1000": (x, 1000), "N = 1008": (x, 1008)}
    cases |= {"N = 2**31": (x, 2**31), "N = 1008, x[1:]": (x[1:], 1008)}
    table = {}
    for name, (source, N) in cases.items():
        compiled = kernel.warmup(source, x, 2.0, N, 1024, grid=(1,))
        vectors = re.findall(r"ld\.global(?:\.v(\d))?", compiled.asm["ptx"])
        size = 4 * int(vectors[0] or 1)  # .v4 loads four floats at once
        kind = compiled.src.signature["N"]
        table[name] = f"{kind}: {len(vectors)} x {size} bytes"
    hashes = set()
    for N in range(1, 1001):
        hashes.add(kernel.warmup(x, x, 2.0, N, 1024, grid=(1,)).hash)
    return table | {"kernels, N = 1 to 1000": str(len(hashes))}


if __name__ == "__main__":
    off = loads({"do_not_specialize": ["N"]})
    print(f"{'':24}{'specialized':24}do_not_specialize")
    for case, found in loads({}).items():
        print(f"{case:24}{found:24}{off[case]}")

# %%
# Where 16 divides ``N``, four neighbours have the same mask. If 16 divides the
# address too, the compiler loads them at once. The price for one integer is
# three kernels, and two more from :math:`2^{31}` on; each address doubles that.

# %%
# A kernel that never stalls a server
# -----------------------------------
#
# A server calls this kernel with any length, and with a ``step`` that grows by
# one each time. ``step`` touches neither mask nor address, so we switch its
# specialization off. Its type still counts: a step of :math:`2^{31}` would be
# an int64.
#
# The server calls ``warm_up`` before it answers. There, ``torch.float32``
# stands for a tensor whose address is a multiple of 16. Triton can call a
# function after each compilation, so a process can notice compilations.


@triton.jit(do_not_specialize=["step"])
def decay_kernel(x_ptr, step, N, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    tl.store(x_ptr + offs, x / (1.0 + step), mask=offs < N)


def decay(x, step):
    """Divide a vector by 1 + step, in place."""
    N = x.numel()
    decay_kernel[(triton.cdiv(N, 1024),)](x, step, N, BLOCK=1024)
    return x


def warm_up():
    """Compile what decay needs, with its BLOCK and its options."""
    for N in (1, 16, 17):
        decay_kernel.warmup(torch.float32, 0, N, BLOCK=1024, grid=(1,))


def count_compilations():
    """Return a list that grows by one with each compilation."""
    seen = []

    def note(*, repr, **rest):
        seen.append(repr)

    triton.knobs.runtime.jit_post_compile_hook = note
    return seen


if __name__ == "__main__":
    x = torch.rand(1000, device=DEVICE)
    torch.testing.assert_close(decay(x.clone(), 3), x / 4)


@compile_only
def serve():
    seen = count_compilations()
    warm_up()
    print("at the start:", len(seen), "compilations")
    x = torch.ones(5000)
    for N in range(1, 5000):
        decay_kernel.warmup(x, N - 1, N, BLOCK=1024, grid=(1,))
    print("for 4999 lengths and steps:", len(seen))
    decay_kernel.warmup(x[1:], 0, 17, BLOCK=1024, grid=(1,))
    print("and an address that 16 does not divide:", len(seen))


if __name__ == "__main__":
    serve()

# %%
# On a GPU, the same with real launches:

if __name__ == "__main__" and DEVICE.type == "cuda":
    decay_kernel.device_caches.clear()  # as in a new process
    seen = count_compilations()
    warm_up()
    compiled = len(seen)
    x = torch.ones(5000, device=DEVICE)
    for N in range(1, 5000):
        decay(x[:N], N - 1)
    print("launches compiled", len(seen) - compiled, "kernels")
    assert len(seen) == compiled == 3

# %%
# Break it: works for every size but one
# --------------------------------------
#
# This kernel divides by ``N``. Where is the mistake?


@triton.jit
def inverse_kernel(out_ptr, N):
    tl.store(out_ptr, 1 / N.to(tl.float32))


@triton.jit
def inverse_kernel_with_cast(out_ptr, N):
    tl.store(out_ptr, 1 / tl.cast(N, tl.float32))


@compile_only
def inverses():
    table = {}
    for kernel in (inverse_kernel, inverse_kernel_with_cast):
        for N in (1000, 1):
            name = f"{kernel.__name__}, N = {N}"
            try:
                kernel.warmup(torch.float32, N, grid=(1,))
                table[name] = "compiled"
            except triton.CompilationError as error:
                table[name] = str(error).splitlines()[-1]
    return table


if __name__ == "__main__":
    table = inverses()
    for name, answer in table.items():
        print(f"{name}: {answer}")
    refused = [name for name in table if table[name] != "compiled"]
    assert refused == ["inverse_kernel, N = 1"]

# %%
# At ``N = 1`` the argument is a constant, and constants have no ``.to``: an
# `open issue of Triton <https://github.com/triton-lang/triton/issues/2939>`_.
# ``tl.cast`` takes constants too. Let every test have a size of 1.

# %%
# What each option does
# ---------------------
#
# Options follow the arguments: ``kernel[grid](x, N, num_warps=8)``. The next
# kernel is made so that each option finds something to change. It
# multiplies tiles in a loop (``tl.dot``), asserts something, calls a function
# of NVIDIA's library ``libdevice``, then multiplies and adds.


@triton.jit
def tile_kernel(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]  # (BLOCK, 1)
    columns = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # (BLOCK, BLOCK)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows * K + k + columns)  # (BLOCK, BLOCK)
        b = tl.load(b_ptr + (k + rows) * BLOCK + columns)  # (BLOCK, BLOCK)
        acc = tl.dot(a, b, acc)
    tl.device_assert(K > 0)
    out = 2 * libdevice.rsqrt(acc) + 1  # (BLOCK, BLOCK)
    tl.store(out_ptr + rows * BLOCK + columns, out)


# %%
# Each option is set to another value than its default. The run prints its
# purpose, and below it what differs in the compiled kernel. Those that you set
# most often come first.

if __name__ == "__main__":
    show_options(OPTIONS)

# %%
# * ``num_warps`` divides the block among more threads: each holds less of it in
#   registers, and executes fewer fused multiply-adds (``fma``).
# * ``num_stages`` needs more copies of the tiles in shared memory.
#   ``cp.async`` starts a load that later instructions wait for. With one stage,
#   there is none.
# * ``maxnreg`` can force values out of the registers onto the ``stack``, in
#   slow memory.
# * ``launch_pdl`` and ``launch_cooperative_grid`` leave the code alone: the
#   driver gets them with each launch.
# * ``extern_libs`` put our function in the place of the library's ``rsqrt``.
# * ``debug=True`` is not free: it adds assertions. From Triton 3.7 on, the
#   loads are no longer asynchronous, either.
#
# Triton 3.9 has three more options. Under 3.9.0, their lines are
#
# .. code-block:: text
#
#     min_shared_mem=65536 (default None): bytes of shared memory at least
#         -> shared 8192 -> 65536
#     sched4reg=True (default False): order the instructions for fewer
#         registers
#         -> another order
#     clc=True (default False): a program that has ended takes over another
#         one
#         -> clc=True requires NVIDIA SM100+ [...]

# %%
# Where compiled code lies
# ------------------------
#
# A compiled kernel has the code of each stage in ``asm``: Triton's own
# (``ttir`` and ``ttgir``), LLVM's (``llir``), ``ptx``, and machine code
# (``cubin``). The process keeps the kernel in memory. Files of the same names
# lie in ``~/.triton/cache``, or in ``TRITON_CACHE_DIR``, where other processes
# find them.


@compile_only
def where():
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    x = torch.float32  # stands for a tensor of this type
    scale_kernel.warmup(x, x, 2.0, 1000, 512, grid=(1,))  # starts the compiler
    for how in ("compiled", "found in memory", "found on disk"):
        if how == "found on disk":
            scale_kernel.device_caches.clear()  # forget what is in memory
        start = time.perf_counter()
        kernel = scale_kernel.warmup(x, x, 2.0, 1000, 1024, grid=(1,))
        print(f"{1e3 * (time.perf_counter() - start):8.3f} ms  {how}")
    print("asm:", *kernel.asm)
    folder = Path(kernel.metadata_group["scale_kernel.ptx"]).parent
    print("files:", *sorted(file.suffix for file in folder.iterdir()))


if __name__ == "__main__":
    where()

# %%
# The name of the folder is a hash of all that can change the code: the source
# of the kernel and of the functions that it calls, its constexpr globals, the
# key of the launch, the GPU, and the versions of Triton and of its assembler.
# The number of the kernel's first line belongs to it too, so a line inserted
# above a kernel compiles it again.

# %%
# Exercises
# ---------
#
# Each exercise has a function to fill in and a check, which needs no GPU.
#
# **1.** How many kernels are compiled if ``scale_kernel`` is launched with each
# of these lengths ``N``? All are below :math:`2^{31}`.
#
# **2.** A server must not compile while it answers. With which lengths does it
# call ``warmup`` at the start, so that no length below :math:`2^{31}` compiles
# later?


def count(lengths):
    return None  # return the number of kernels


def lengths_at_start():
    return None  # return a list of lengths


@compile_only
def counts(lists):
    x, rest = torch.ones(16), {"BLOCK": 1024, "grid": (1,)}
    return [
        len({scale_kernel.warmup(x, x, 2.0, N, **rest).hash for N in lengths})
        for lengths in lists
    ]


def check_count(function):
    lists = [[5, 6, 7], [1, 16, 17, 32], [1, 1, 2], [48, 64]]
    answers = [function(lengths) for lengths in lists]
    if None in answers:
        return "not solved yet"
    return "right" if answers == counts(lists) else "wrong"


def check_lengths(function):
    at_start = function()
    if at_start is None:
        return "not solved yet"
    later = [1, 2, 15, 16, 17, 1000, 4096, 2**31 - 1]
    before, after = counts([at_start, at_start + later])
    return "right" if before == after else "wrong"


if __name__ == "__main__":
    print("exercise 1:", check_count(count))
    print("exercise 2:", check_lengths(lengths_at_start))

# %%
# ``debugging.py`` comes next, on kernels that go wrong.

# %%
# Answers
# -------
#
# **1.** One kernel for the length 1, one for multiples of 16, one for the rest.
#
# **2.** One length of each kind.


def count_answer(lengths):
    return len({(N == 1, N % 16 == 0) for N in lengths})


def lengths_at_start_answer():
    return [1, 16, 17]


if __name__ == "__main__":
    assert check_count(count_answer) == "right"
    assert check_lengths(lengths_at_start_answer) == "right"
