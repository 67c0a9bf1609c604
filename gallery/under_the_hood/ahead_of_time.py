# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compile a kernel into machine code and a C function, and call it from a
# program without Python, PyTorch or Triton."""
# tool = true
# ///
r"""
Ahead of time: a C function
===========================

A Triton kernel can leave Python for good. Triton's own tools compile it into
machine code and a C function that launches it. A program in C or C++ calls
that function. Where the program runs, there is no Python, no PyTorch and no
Triton: only NVIDIA's driver. (All of this page is about NVIDIA's GPUs.)

After this page you can

* compile a kernel into C files, on a machine with a GPU or without one;
* have the C function choose between two versions of the kernel;
* write the C program around it, and say what that program has to check;
* tell when this is the right way to ship a kernel, and when it is not.
"""

# sphinx_gallery_tags = ["deployment", "C", "launch cost"]
import inspect
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
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
# The verdict
# -----------
#
# Three ways to ship a kernel that is written in Triton:
#
# .. code-block:: text
#
#     the way       from Python         AOTInductor         C function
#     you ship      Python source       one package         C or object files
#     what it runs  kernels, Python     a whole program     one kernel
#     it needs      Python, PyTorch,    PyTorch's C++       the GPU's driver
#                   Triton, a compiler  library
#     compiled      at the first call   before              before
#     tuned         at the first call   before              by you
#     for           any GPU             one architecture    one architecture
#     a new dtype   is compiled for     is misread, or      is misread
#                                       refused on request
#
# For the middle column, ``torch.export`` records a PyTorch program, and
# Inductor packs it with its kernels: see ``aot_inductor.py``. This page is
# about the last column. On the way lies a trap: Triton's tools declare a float
# argument as a ``double``, the kernel reads four bytes of it, and nothing
# warns.
#
# The kernel
# ----------
#
# It computes ``alpha * x + y``. Each program takes a block of 1024 numbers. The
# mask keeps the last program from reading and writing past the end.

BLOCK = 1024


@triton.jit
def scale_add_kernel(x_ptr, y_ptr, out_ptr, alpha, N, BLOCK: tl.constexpr):
    # In int32, the last block's offsets would overflow near 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, alpha * x + y, mask=mask)


def scale_add(x, y, alpha):
    """Return ``alpha * x + y`` for two contiguous float32 vectors."""
    for tensor in (x, y):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise TypeError("scale_add takes contiguous float32 vectors")
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError("scale_add takes two vectors of one length")
    out, N = torch.empty_like(x), x.numel()
    grid = (triton.cdiv(N, BLOCK),)
    scale_add_kernel[grid](x, y, out, alpha, N, BLOCK=BLOCK, num_warps=4)
    return out


# %%
# The check
# ---------
#
# Compared with float64. Product and sum are rounded once each, by at most
# :math:`2^{-24}` of themselves. Neither exceeds 16: :math:`2^{-19}` is enough.

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    for N in (1, 1003, 4096):
        x, y = torch.randn(2, N, generator=generator).to(DEVICE)
        out, right = scale_add(x, y, 2.5).double(), 2.5 * x.double() + y
        error = (out - right).abs().max().item()
        print(f"N = {N}: largest error {error:.1e}, allowed {2**-19:.1e}")
        torch.testing.assert_close(out, right, rtol=0, atol=2**-19)

# %%
# Triton's compiler for C
# -----------------------
#
# ``python -m triton.tools.compile`` takes a file, the name of a kernel, and a
# *signature*: a type for each argument, a value for each constant. ``*fp32`` is
# a pointer to float32, ``i32`` an integer, 1024 the value of ``BLOCK``. The
# tool takes the grid, too, as an expression in C of the arguments. (``1023u``
# makes the sum unsigned; a signed sum would overflow near :math:`2^{31}`.) The
# target is a kind of GPU: 90 is compute capability 9.0, an H100, and 32 the
# threads of a warp. A child process runs the tool, in a folder with nothing but
# the kernel.

GRID = "(N + 1023u) / 1024, 1, 1"
ANY = "*fp32, *fp32, *fp32, fp32, i32, 1024"


def begin(folder):
    """Make a folder with the kernel in it, and nothing else of this page."""
    folder.mkdir()
    top = "import triton\nimport triton.language as tl\n"
    kernel = inspect.getsource(scale_add_kernel.fn)
    (folder / "kernel.py").write_text(top + kernel)


def child(folder, *command):
    """Run a command in a folder; return its exit status and what it said."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    temporary = tempfile.TemporaryDirectory()
    FOLDER = Path(temporary.name)
    begin(plain := FOLDER / "plain")
    tool = [sys.executable, "-m", "triton.tools.compile", "kernel.py"]
    tool += ["--kernel-name", "scale_add_kernel", "--signature", ANY]
    tool += ["--grid", GRID, "--target", "cuda:90:32"]
    status, said = child(plain, *tool)
    print(said.splitlines()[-1] if status else "no error")
    assert status != 0 or DEVICE.type == "cuda"

# %%
# It fails: although the target was given, the tool asks Triton's driver object
# for the GPU at hand, and without a GPU there is none. With a GPU and a Triton
# before 3.9 it fails later: the tool hands the architecture on as the text
# ``"90"``, and the compiler wants a number. On a GPU the command works without
# ``--target``, but it walks into the trap below.
#
# So our child calls the command's own function, ``compile_kernel``, and first
# puts a stand-in where Triton looks for its driver object. The stand-in answers
# two questions: for which GPU, and what a type is called in C. Now any machine
# compiles for any of NVIDIA's GPUs. This page takes the GPU at hand, or an H100
# if there is none.

COMPILE = r"""
import sys
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.tools.compile import CompileArgs, compile_kernel

arch, float_type, grid, *signatures = sys.argv[1:]
target = GPUTarget("cuda", int(arch), 32)  # 32 threads in a warp
types = {"fp32": float_type}  # the section on the trap says why
driver = SimpleNamespace(
    get_current_target=lambda: target,
    map_python_to_cpp_type=lambda ty: types.get(ty) or ty_to_cpp(ty),
)
triton.runtime.driver.set_active(driver)
for signature in signatures:
    compile_kernel(
        CompileArgs(
            path="kernel.py",
            kernel_name="scale_add_kernel",
            signature=signature,
            grid=grid,
            num_warps=4,
            out_name="scale_add",
            out_path=Path("scale_add"),
        )
    )
"""

# %%
# Two versions, and a linker
# --------------------------
#
# ``:16`` after a type promises that 16 divides the argument. For a pointer,
# that is its address in bytes. When Triton launches from Python, it finds out
# by itself which arguments 16 divides. Here we compile two versions: ``BY_16``
# for arguments that keep the promise, ``ANY`` for all others. The tool writes a
# ``.c`` and a ``.h`` file for each. ``triton.tools.link`` adds ``scale_add.c``:
# a function that looks at its arguments and calls one of the two.

BY_16 = "*fp32:16, *fp32:16, *fp32:16, fp32, i32:16, 1024"
ARCH = 90
if DEVICE.type == "cuda":
    major, minor = torch.cuda.get_device_capability()
    ARCH = 10 * major + minor


def build(folder, arch, float_type="float"):
    """Write the C files of the kernel for a GPU into a new folder."""
    begin(folder)
    (folder / "compile.py").write_text(COMPILE)
    arguments = [str(arch), float_type, GRID, BY_16, ANY]
    status, said = child(folder, sys.executable, "compile.py", *arguments)
    assert status == 0, said
    headers = sorted(path.name for path in folder.glob("*.h"))
    arguments = ["triton.tools.link", *headers, "--out", "scale_add"]
    status, said = child(folder, sys.executable, "-m", *arguments)
    assert status == 0, said


if __name__ == "__main__":
    build(built := FOLDER / "built", ARCH)
    for path in sorted(built.glob("scale_add*")):
        print(f"{path.stat().st_size:6} bytes  {path.name}")

# %%
# In a file's name, the first part is a hash of the signature, the warps and the
# stages. In the second part, ``4d`` says that 16 divides argument 4; Triton 3.6
# lists the arguments without a promise too.
#
# What is in the files
# --------------------
#
# Each ``.c`` file holds the machine code, a *cubin*, as an array of bytes, and
# a function that launches it. We put the bytes into a file of their own, and
# ask ``cuobjdump``, which comes with Triton: for which architecture is the
# code, how does a thread load, and how many bytes does each argument have?


def look(folder):
    """Return a table of the cubins in a folder's C files."""
    rows, tool = {}, triton.knobs.nvidia.cuobjdump.path
    for path in sorted(folder.glob("scale_add.*.c")):
        array = re.search(r"CUBIN_NAME\[\d+\] = \{ (.*?) \}", path.read_text())
        code = bytes(int(byte, 16) for byte in array[1].split(", "))
        (cubin := path.with_suffix(".cubin")).write_bytes(code)
        _, sass = child(folder, tool, "-sass", cubin.name)
        _, elf = child(folder, tool, "-elf", cubin.name)
        loads = Counter(re.findall(r"\bLDG[.\w]*", sass))
        sizes = re.findall(r"Ordinal *: 0x(\w+)\s.*Size *: 0x(\w+)", elf)
        rows[path.stem] = {
            "bytes": len(code),
            "for": re.search(r"sm_\w+", sass)[0],
            "loads": ", ".join(f"{n} {load}" for load, n in loads.items()),
            "arguments": " ".join(size for _, size in sorted(sizes)),
        }
    return pd.DataFrame.from_dict(rows, orient="index").sort_values("bytes")


if __name__ == "__main__":
    table = look(built)
    print(table.to_string())
    by_16, of_any = table["loads"]
    assert int(by_16.split()[0]) < int(of_any.split()[0])
    assert table["arguments"].nunique() == 1

# %%
# The 128 threads have 8 of the 1024 numbers of ``x`` each, and 8 of ``y``.
# ``LDG.E.128`` loads four at once. It takes an address that 16 divides, so only
# ``BY_16`` may do it. ``N`` matters too: if 16 divides it, the end never falls
# between four neighbours, and one bit of the mask serves all of them.
#
# The arguments are three pointers, ``alpha`` and ``N``. Triton adds two
# pointers for its own use; this kernel needs neither, so the launcher passes 0.
#
# The function in C
# -----------------
#
# The linker's header has the *prototypes*: what the C compiler has to know of a
# function. The first one launches; we shall call it. ``load_scale_add`` hands
# the cubins to the driver. If you don't call it, the first launch does.


def show(*lines):
    """Print lines that may be long."""
    for line in lines:
        print(textwrap.fill(line.strip(), 78, subsequent_indent="    "))


if __name__ == "__main__":
    header = (built / "scale_add.h").read_text()
    prototypes = re.findall(r".*(?:_default|load_scale_add)\(.*", header)
    show(*prototypes)
    assert len(prototypes) == 3
    assert "float alpha, int32_t N" in prototypes[0]

# %%
# A ``CUdeviceptr`` is an address on the GPU, as an integer. Next is how the
# linker's function chooses (``if (1)`` is ``ANY``, which promises nothing), and
# what the launchers have fixed: the grid, 4 warps of 32 threads, no shared
# memory.

if __name__ == "__main__":
    chooser = (built / "scale_add.c").read_text()
    show(*re.findall(r" *(?:if .*|return scale_add_\w+_.*)", chooser))
    launcher = (built / f"{table.index[0]}.c").read_text()
    show(*re.findall(r".*(?:gX = |cuLaunchKernel).*", launcher))
    assert chooser.count("% 16 == 0") == 4
    assert "gX = (N + 1023u) / 1024;" in launcher

# %%
# Nothing else is looked at. The rest is the caller's duty:
#
# * **dtype and layout.** Any address will do. Two float16 are read as one
#   float32, a strided vector as if it were contiguous.
# * **length.** If a vector has fewer than ``N`` numbers, the kernel reads and
#   writes past its end.
# * **alignment.** The linker's function looks. The launcher of ``BY_16`` itself
#   does not, if you call that one.
# * **N = 0.** The launcher launches nothing and forgets its ``return``: what
#   you get is arbitrary. Don't call it.
# * **one GPU.** The loaded kernel is a global variable, for the GPU that was
#   current at the time. A second GPU takes a second process.
# * **errors of loading.** You can't handle them: ``load_scale_add`` prints them
#   and ends the program.
#
# The trap: a float
# -----------------
#
# In ``COMPILE``, we said what ``fp32`` is called in C. Without that, here is
# the prototype as the tools write it by themselves, and what the kernel takes:

if __name__ == "__main__":
    build(trap := FOLDER / "trap", ARCH, float_type="")
    prototype = re.search(".*default.*", (trap / "scale_add.h").read_text())
    show(prototype[0])
    alpha = look(trap)["arguments"].iloc[0].split()[3]
    read = struct.unpack("f", struct.pack("d", 2.5)[: int(alpha)])
    print(f"it takes {alpha} bytes; of alpha = 2.5 it would read {read[0]}")
    assert "double alpha" in prototype[0]
    assert (alpha, read[0]) == ("4", 0.0)

# %%
# A ``double`` has 8 bytes. The driver copies as many as the kernel takes, the
# first 4. In a number with few binary digits, such as 2.5, these are 0. So the
# kernel computes with another alpha, and nothing warns. The cause:
# ``ty_to_cpp`` is made for launches from Python, where Triton takes a
# ``double`` and converts it; the launcher in C does not. The `ninetoothed
# project <https://github.com/InfiniTensor/ninetoothed/pull/153>`__ met this
# too. There they take ``fp64``: alpha is then a float64 in the kernel, and so
# is the arithmetic with it. ``COMPILE`` corrects the type instead. For ``fp16``
# and ``bf16``, C has no type: take ``fp32``, and convert in the kernel.
#
# The program
# -----------
#
# It talks to the driver alone: it starts the driver, takes memory, copies,
# calls, copies back and compares. All of its numbers are exact in float32, so
# results must be equal, and what lies before and after them must stay -1. At
# last it prints the CPU time of a call: of 100 batches, the mean of 100 calls
# each. The GPU is idle before each batch, so its queue is empty.

MAIN = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "scale_add.h"

static float x[4128], y[4128], out[4128];
static CUdeviceptr gpu_x, gpu_y, gpu_out;

/* Every call of the driver returns 0, or the number of an error. */
static void check(CUresult result) {
    const char *text = "unknown error";
    if (result == CUDA_SUCCESS)
        return;
    cuGetErrorString(result, &text);
    fprintf(stderr, "CUDA: %s\n", text);
    exit(1);
}

/* Run the kernel on n numbers from a first one on; count what is wrong. */
static int count_wrong(int n, int first) {
    size_t skip = first * sizeof(float);
    int wrong = 0;
    for (int i = 0; i < 4128; i++)
        out[i] = -1;
    check(cuMemcpyHtoD(gpu_out, out, sizeof out));
    /* NULL is the default stream. */
    check(scale_add_default(NULL, gpu_x + skip, gpu_y + skip,
                            gpu_out + skip, 2.5f, n));
    check(cuMemcpyDtoH(out, gpu_out, sizeof out)); /* waits for the kernel */
    for (int i = 0; i < 4128; i++) {
        int inside = first <= i && i < first + n;
        wrong += out[i] != (inside ? 2.5f * x[i] + y[i] : -1);
    }
    return wrong;
}

/* Print the microseconds of a call, 100 times. */
static void time_calls(void) {
    struct timespec from, to;
    printf("microseconds:");
    for (int batch = 0; batch < 100; batch++) {
        check(cuCtxSynchronize());
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (int call = 0; call < 100; call++)
            check(scale_add_default(NULL, gpu_x, gpu_y, gpu_out, 2.5f, 1024));
        clock_gettime(CLOCK_MONOTONIC, &to);
        printf(" %.3f", (to.tv_sec - from.tv_sec) * 1e4 +
                            (to.tv_nsec - from.tv_nsec) * 1e-5);
    }
    printf("\n");
}

int main(void) {
    int cases[3][2] = {{4096, 0}, {1003, 16}, {4096, 17}};
    CUdevice device;
    CUcontext context;
    check(cuInit(0));
    check(cuDeviceGet(&device, 0));
    check(cuDevicePrimaryCtxRetain(&context, device));
    check(cuCtxSetCurrent(context));
    load_scale_add();
    for (int i = 0; i < 4128; i++) {
        x[i] = i % 1000;
        y[i] = i % 7;
    }
    check(cuMemAlloc(&gpu_x, sizeof x));
    check(cuMemAlloc(&gpu_y, sizeof y));
    check(cuMemAlloc(&gpu_out, sizeof out));
    check(cuMemcpyHtoD(gpu_x, x, sizeof x));
    check(cuMemcpyHtoD(gpu_y, y, sizeof y));
    for (int i = 0; i < 3; i++) {
        int n = cases[i][0], first = cases[i][1];
        printf("%d numbers from element %d: %d wrong\n", n, first,
               count_wrong(n, first));
    }
    time_calls();
    unload_scale_add();
    return 0;
}
"""

# %%
# Of the three cases, the first keeps the promise of ``BY_16``. In the second,
# 16 does not divide ``N``; in the third, it does not divide the addresses.
#
# The C compiler makes an *object file* of each file: machine code of the CPU,
# with names yet to be found. ``cuda.h`` comes with Triton. Without a GPU we
# stop here; but now we know that the files fit together. Of the names that
# ``nm`` lists we keep those that no object defines. These are what the program
# needs from libraries, apart from what every C program has:

CC = next(filter(shutil.which, ("cc", "gcc", "clang")), None)


def compile_c(folder):
    """Compile the C files in a folder, the program too; return the objects."""
    (folder / "main.c").write_text(MAIN)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    sources = sorted(path.name for path in folder.glob("*.c"))
    status, said = child(folder, CC, "-O2", "-c", f"-I{include}", *sources)
    assert status == 0, said
    return [f"{name[:-2]}.o" for name in sources]


def needed(folder, objects):
    """Return the names that objects use and do not define."""
    status, said = child(folder, "nm", *objects)
    assert status == 0, said
    found = re.findall(r"(?m)^[\da-f ]* (\w) (\w+)$", said)
    defined = {name for kind, name in found if kind != "U"}
    return sorted({name for kind, name in found if kind == "U"} - defined)


if __name__ == "__main__":
    if CC and shutil.which("nm"):
        names = needed(built, compile_c(built))
        of_cuda = [name for name in names if name.startswith("cu")]
        of_c = [name for name in names if not name.startswith("cu")]
        show("of the driver: " + " ".join(of_cuda))
        show("of the C library: " + " ".join(of_c))
        assert {"cuInit", "cuLaunchKernel"} <= set(of_cuda)
        assert not any(name.startswith(("Py", "_Py", "_Z")) for name in of_c)
    else:
        print("there is no C compiler here: the program is not compiled")

# %%
# Names of Python's library begin with ``Py``, those of C++ with ``_Z``. There
# are none.
#
# On a GPU
# --------
#
# Three cells of this page run on a GPU alone.
#
# With a driver, the objects become a program. ``libcuda.so.1`` is the driver's
# library; ``readelf`` lists the libraries that the program asks for. The
# program runs, and then the same launch from Python, timed in the same way.


def link_c(folder):
    """Link the objects in a folder with the driver; return the program."""
    from triton.backends.nvidia.driver import libcuda_dirs

    places = [f"-L{place}" for place in libcuda_dirs()]
    objects = compile_c(folder)
    libraries = [*places, "-l:libcuda.so.1"]
    status, said = child(folder, CC, *objects, *libraries, "-o", "program")
    assert status == 0, said
    return str(folder / "program")


def cpu_time(call):
    """Return the microseconds that a call takes of the CPU, 100 times."""
    found = []
    for _ in range(100):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            call()
        found.append(1e4 * (time.perf_counter() - began))
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    program = link_c(built)
    _, said = child(built, "readelf", "--dynamic", program)
    libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", said)
    print("libraries:", *libraries)
    assert "libcuda.so.1" in libraries
    assert not any("python" in library for library in libraries)

    status, said = child(built, program)
    assert status == 0, said
    *lines, times = said.splitlines()
    print(*lines, sep="\n")
    assert [line.split()[-2:] for line in lines] == [["0", "wrong"]] * 3

    x, y, out = torch.rand(3, 1024, device=DEVICE)
    launch = scale_add_kernel[(1,)]
    in_c = statistics.median(float(word) for word in times.split()[1:])
    in_python = statistics.median(
        cpu_time(lambda: launch(x, y, out, 2.5, 1024, BLOCK, num_warps=4))
    )
    print(f"CPU time of a call from C:      {in_c:6.2f} microseconds")
    print(f"CPU time of a call from Python: {in_python:6.2f} microseconds")
    assert in_c < in_python

# %%
# Both end in a launch by the driver, ``cuLaunchKernel`` from C and
# ``cuLaunchKernelEx`` from Python. ``what_a_call_costs.py`` takes apart what
# comes before it from Python.
#
# And the trap, run: the same program around the launchers with the ``double``.

if __name__ == "__main__" and DEVICE.type == "cuda":
    _, said = child(trap, link_c(trap))
    print(said.splitlines()[0])
    assert int(said.splitlines()[0].split()[-2]) > 4000

# %%
# One file for each architecture
# ------------------------------
#
# The C files have machine code alone, and no PTX, the portable assembly
# language, so a driver cannot compile them again for another GPU. To see what
# happens there, we compile for an A100, or for an H100 if this GPU is like an
# A100:

OTHER = 90 if ARCH // 10 == 8 else 80

if __name__ == "__main__":
    build(foreign := FOLDER / "foreign", OTHER)
    both = pd.concat([table, look(foreign)])
    print(both[["bytes", "for"]].to_string())
    assert both["for"].nunique() == 2

# %%
# On a GPU, here is what the program says when it is built with the foreign
# code:

if __name__ == "__main__" and DEVICE.type == "cuda":
    status, said = child(foreign, link_c(foreign))
    print(said.removesuffix(r"\n"))  # the message ends in these two letters
    assert status != 0
    assert "no kernel image is available" in said

# %%
# Code for ``sm_80`` runs on GPUs 8.0, 8.6 and 8.9, and on no 9.0. The ``a`` in
# ``sm_90a`` means 9.0 and nothing else. Ship a cubin for each kind of GPU, and
# choose as the program starts (exercise 3): the files of two architectures have
# the same names, so give each an ``out_name`` of its own.
#
# Your own kernel
# ---------------
#
# The steps of this page, as you would type them. ``kernel.py`` has your kernel,
# without ``triton.autotune``, and the helpers that it calls; ``compile.py`` is
# ``COMPILE`` with your kernel's name and its ``num_warps``; ``main.c`` is your
# program:
#
# .. code-block:: text
#
#     python compile.py 90 float "(N + 1023u) / 1024, 1, 1" \
#         "*fp32:16, *fp32:16, *fp32:16, fp32, i32:16, 1024" \
#         "*fp32, *fp32, *fp32, fp32, i32, 1024"
#     python -m triton.tools.link scale_add.*.h --out scale_add
#     TRITON=$(python -c "import triton; print(triton.__path__[0])")
#     cc -O2 -c -I"$TRITON"/backends/nvidia/include *.c
#     cc *.o -l:libcuda.so.1 -o program
#
# The numbers for other GPUs are 80 (A100), 89 (L4, RTX 40), 100 (B200) and 120
# (RTX 50).
#
# When to take it
# ---------------
#
# * **Take it** when the program is in C, C++, Rust or Go, has its own memory
#   and streams, and calls a few kernels, or when it has to start fast.
# * **Take AOTInductor** when a model of PyTorch comes along.
# * **Stay in Python** when block sizes and dtypes are many. Here each of them,
#   and each number of warps, is one more file.
# * **Note the versions.** The C files don't say which Triton wrote them, and
#   Triton's manual doesn't describe the tools: look at what they write after
#   each update. An old driver may refuse what a newer ``ptxas`` compiled.
#
# Go further
# ----------
#
# 1. Call ``scale_add_default`` from C++. What does the linker of C++ say?
# 2. Compile each version with 8 warps too, and link all four headers. What does
#    the last argument of ``scale_add`` in ``scale_add.h`` choose?
# 3. One program is to run on an A100 and on an H100. What do you change?
#
# Next: ``aot_inductor.py`` packs a whole program. The functions with ``cu`` are
# those of NVIDIA's `driver API
# <https://docs.nvidia.com/cuda/cuda-driver-api/index.html>`__.

# %%
# Answers
# -------
#
# **1.** It does not find the function: C++ adds the types of the arguments to a
# function's name. Include the header inside ``extern "C" { ... }``, and compile
# the generated files as C.
#
# **2.** ``algo_id`` is the number of a *variant*: versions that differ in
# promises alone are one variant, other constants, warps or stages are another.
# ``scale_add_get_num_algos`` counts them, ``scale_add_default`` takes number 0.
# To tune, time all and remember one.
#
# **3.** Give ``compile_kernel`` another ``out_name`` for each architecture, so
# that names do not clash: ``scale_add_80``, ``scale_add_90``. Run
# ``triton.tools.link`` for each, and compile all C files into one program. As
# the program starts, ask ``cuDeviceGetAttribute`` for
# ``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR``, and call one of the two. Or
# put both cubins into one file, a *fat binary*, with NVIDIA's ``fatbinary``:
# then the driver chooses.
