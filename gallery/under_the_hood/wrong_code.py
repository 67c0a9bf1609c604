# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6,<3.8", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Find out whether a wrong result is the kernel's fault or the assembler's, by
# reading the machine code of an H100 on any machine."""
# tool = true
# ///
r"""
When the assembler is wrong
===========================

A kernel gives wrong numbers, or stops at an illegal address. Nearly always the
kernel is at fault. Sometimes it is the assembler, the program that turns the
kernel into machine code. This page has a right kernel of ten lines. NVIDIA's
assembler, ``ptxas``, makes wrong code of it for an H100. The page needs no GPU
to show that.

The fault is in Triton 3.6 and 3.7 (``ptxas`` 12.8). In 3.8 (12.9) and 3.9
(13.4) none was found.

After this page you can

* tell a fault of your kernel from one of the assembler;
* find in machine code a register that is read and that nothing wrote;
* choose tiles for which that does not happen, or another assembler.
"""

# sphinx_gallery_tags = ["compiler", "debugging", "matmul"]
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
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
# The kernel
# ----------
#
# It has three products, as a chunk of linear attention has: the products of
# rows of ``x`` with each other are weights for the rows of ``z``, and ``x``
# times ``y`` comes on top. All tiles are in half precision: ``x`` is 64 x 64,
# ``y`` and ``z`` are 64 x ``BLOCK``.


@triton.jit
def three_products_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, 64)
    x = tl.load(x_ptr + offs[:, None] * 64 + offs[None, :])  # (64, 64)
    tile = offs[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    y = tl.load(y_ptr + tile)  # (64, BLOCK)
    weights = tl.exp2(tl.dot(x, x.T))  # (64, 64)
    out = tl.dot(x, y)  # (64, BLOCK)
    z = tl.load(z_ptr + tile)  # (64, BLOCK)
    out = tl.dot(weights.to(tl.float16), z, out)
    tl.store(out_ptr + tile, out)


def three_products(x, y, z):
    """Return exp2(x x^T) z + x y, for x of (64, 64), y and z of (64, BLOCK)."""
    out = torch.empty_like(y)
    three_products_kernel[(1,)](x, y, z, out, BLOCK=y.shape[1])
    return out


# %%
# A process of its own
# --------------------
#
# On a GPU, an illegal address would end the process, and with it what comes
# after on this page. So a child process runs the kernel beside float64. It
# prints the largest error, divided by a bound for two roundings to the 11 bits
# of float16: that of a weight, and that of the result.

WIDTHS = [16, 32, 64]
RUN = """
import sys
import torch, triton
import triton.language as tl

SOURCE

block = int(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
x = torch.randn(64, 64, generator=generator) / 8
y, z = torch.randn(2, 64, block, generator=generator)
x, y, z = (t.half().to(device) for t in (x, y, z))
out = three_products(x, y, z).double()
x, y, z = x.double(), y.double(), z.double()
weights = torch.exp2(x @ x.T)
terms = weights @ z.abs() + x.abs() @ y.abs()
error = (out - weights @ z - x @ y).abs() / (2**-10 * terms)
print(f"{error.max().item():.2g}")
"""


def child(code, *arguments, stdin=None, **variables):
    """Run a program in a process of its own; return it when it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program.py")
        file.write_text(code)
        return subprocess.run(
            [sys.executable, file, *map(str, arguments)],
            input=stdin,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )


def run(block):
    """Return the largest error as a part of what is allowed, or the reason."""
    kernel, launcher = three_products_kernel.fn, three_products
    source = "@triton.jit\n" + inspect.getsource(kernel).partition("\n")[2]
    source += "\n\n" + inspect.getsource(launcher)
    ended = child(RUN.replace("SOURCE", source), block)
    if ended.returncode == 0:
        return ended.stdout.strip()
    lines = [line for line in ended.stderr.splitlines() if "rror" in line]
    return lines[-1].strip() if lines else f"exit status {ended.returncode}"


# %%
# Is it right?
# ------------
#
# The kernel runs here for three widths. A number up to 1 is right, above 1 is
# wrong. Without a GPU, Triton's interpreter computes.

if __name__ == "__main__":
    ran = {block: run(block) for block in WIDTHS}
    for block, said in ran.items():
        print(f"BLOCK = {block}: {said}")
    if DEVICE.type == "cpu":  # no assembler has a part in it
        errors = torch.tensor([float(said) for said in ran.values()])
        zeros = torch.zeros(len(WIDTHS))
        torch.testing.assert_close(errors, zeros, rtol=0, atol=1)

# %%
# In Triton's interpreter all three numbers are below 1, so the kernel is right.
# On an H100 the two narrow tiles give numbers far above 1, and only the widest
# is right. Nothing but the width has changed.

# %%
# What the machine code reads
# ---------------------------
#
# The matrix instruction of Hopper, the H100's generation, is ``HGMMA`` in
# machine code. It takes a *descriptor* of a tile in shared memory: its address,
# and how its rows lie. A descriptor is in two *uniform registers*, ``UR0`` to
# ``UR62``, which the threads of a warp share; ``gdesc[UR8]`` names two
# descriptors, in four registers from ``UR8`` on. We go through the instructions
# in their order, and note which of these registers each one writes and reads. A
# register that is read before anything wrote it is suspect.

STEP = re.compile(r"^\s*/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", re.M)


def registers(text):
    """Return the numbers of the uniform registers that an operand names."""
    found = []
    for descriptor, number in re.findall(r"(gdesc\[)?\bUR(\d+)\b", text):
        first = int(number)
        found += range(first, first + (4 if descriptor else 1))
    return found


def unwritten(sass):
    """Return the instructions that read what no instruction before wrote.

    It follows the text, not the branches, and it is for kernels without a
    division of 64-bit numbers: those call a function, which returns its result
    in registers too.
    """
    written, suspects = set(), []
    for name, operands in STEP.findall(sass):
        # A predicate, UP0 for example, may be written first.
        into = re.match(r"\s*(?:U?P\d\s*,\s*)?UR(\d+)\s*(?:,|$)", operands)
        if "SETP" in name:  # a comparison writes predicates alone
            into = None
        read = registers(operands[into.end() :] if into else operands)
        if name.startswith("HGMMA") and re.match(r"[^,]*,\s*R\d", operands):
            # Registers hold the first side: its descriptor is left out.
            read = [n for n in read if n - min(read) > 1]
        if unknown := sorted({*read} - written):
            names = ", ".join(f"UR{n}" for n in unknown)
            line = re.sub(r"-?0x\w+", "CONSTANT", f"{name} {operands.strip()}")
            suspects.append(f"{line}: {names} unwritten")
        if into:
            first, pair = int(into[1]), ".64" in name or "WIDE" in name
            written |= {first, first + 1} if pair else {first}
    return suspects


# %%
# Triton compiles for an H100 on any machine, as ``compiler_stages.py`` shows. A
# child process does so, out of the interpreter's reach. It takes the PTX, the
# assembly language that Triton's compiler writes, and has two programs make
# machine code of it. One is the ``ptxas`` that Triton uses for an H100. The
# other is a newer ``ptxas``, which Triton brings for Blackwell's GPUs.

COMPILE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

SOURCE

def said(*command):
    return subprocess.check_output([*map(str, command)], text=True)

tools, found = triton.knobs.nvidia, []
name, jobs = json.load(sys.stdin)
for types, constants, options in jobs:
    pointers = [i for i, a in enumerate(types) if types[a].startswith("*")]
    by_16 = {(i,): [["tt.divisibility", 16]] for i in pointers}
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(globals()[name], types, constants, by_16)
    target = GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    for tool in (tools.ptxas.path, tools.ptxas_blackwell.path):
        with tempfile.TemporaryDirectory() as folder:
            text, cubin = Path(folder, "a.ptx"), Path(folder, "a.cubin")
            text.write_text(ptx)
            said(tool, "--gpu-name", "sm_90a", text, "-o", cubin)
            sass = said(tools.nvdisasm.path, "-c", cubin)
        (version,) = re.findall(r"V([\\d.]+)", said(tool, "--version"))
        found.append([f"ptxas {version}", ptx, sass])
json.dump(found, sys.stdout)
"""


def machine_code(kernel, *jobs):
    """Return a list of assemblers, PTX and machine code for an H100.

    A job has the types of a kernel's arguments in their order, its constants,
    and options of a launch such as ``num_warps``. It has two places in the
    list: one for Triton's assembler, one for the newer.
    """
    source = inspect.getsource(kernel.fn).partition("@triton.jit")[2]
    code = COMPILE.replace("SOURCE", "@triton.jit" + source)
    stdin = json.dumps([kernel.fn.__name__, jobs])
    ended = child(code, stdin=stdin, TRITON_INTERPRET="0")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


TYPES = dict.fromkeys(["x_ptr", "y_ptr", "z_ptr", "out_ptr"], "*fp16")

if __name__ == "__main__":
    jobs = [(TYPES, {"BLOCK": block}, {}) for block in WIDTHS]
    codes = machine_code(three_products_kernel, *jobs)
    both = [block for block in WIDTHS for _ in range(2)]
    for block, (assembler, _, sass) in zip(both, codes, strict=True):
        number = len(re.findall("HGMMA", sass))
        print(f"BLOCK = {block}, {assembler}: {number} matrix instructions")
        for suspect in unwritten(sass):
            print("   ", suspect)

# %%
# The code of the newer one reads nothing that it did not write, in any width.
# That of the older one does, where a tile has 16 or 32 columns. ``UIADD3`` adds
# a number (``CONSTANT``) to the lower half of a descriptor, ``UIADD3.X`` one to
# the upper half, with the carry ``UP0``. ``URZ`` is zero. Both lines add to
# ``UR7``, and no line before them wrote it. So it may hold anything, and the
# descriptor may name any place, in shared memory or beyond its end.

# %%
# Is the PTX to blame?
# --------------------
#
# If nothing wrote the value in PTX either, Triton would be at fault. We take
# the last matrix instruction, ``wgmma`` in PTX, and follow the descriptor of
# its second tile back to where it comes from:


def origin(ptx, register):
    """Return the lines that make a register's value, the last one first."""
    lines = []
    while register:
        pattern = rf"^\s*([\w.]+\s+{register},\s*([^;]*));"
        line = re.search(pattern, ptx, re.M)
        if line is None:
            return [*lines, f"nothing writes {register}"]
        lines.append(" ".join(line[1].split()))
        register = next(iter(re.findall(r"%r\w*", line[2])), None)
    return lines


if __name__ == "__main__":
    _, ptx, _ = codes[0]
    last = re.findall(r"wgmma\.mma_async[^;]*\}, (%rd\d+), ", ptx)[-1]
    lines = origin(ptx, last)
    print(*lines, sep="\n")
    assert "nothing writes" not in lines[-1]

# %%
# Each value has its line, and the last one is the place of shared memory. So
# the PTX does write this descriptor, and both assemblers were given the same.

# %%
# The check
# ---------
#
# The table is the verdict. The run asserts what this page says of ``ptxas``
# 12.8, as Triton 3.6 and 3.7 have it.

if __name__ == "__main__":
    rows = [
        {
            "columns": block,
            "bytes of a row": 2 * block,
            "assembler": assembler,
            "reads unwritten": len(unwritten(sass)),
        }
        for block, (assembler, _, sass) in zip(both, codes, strict=True)
    ]
    print(pd.DataFrame(rows).to_string(index=False))
    print(f"On this device ({DEVICE.type}):", ran)
    for row in rows:
        if row["assembler"].startswith("ptxas 12.8"):
            assert (row["reads unwritten"] > 0) == (row["columns"] < 64)
        else:
            assert row["reads unwritten"] == 0

# %%
# A run on Hopper takes Triton's choice, the older assembler. The last line has
# its errors. On another day they may be small by chance, because the register
# may hold anything. Code without such a line may still be wrong, see the second
# question below.

# %%
# What to do
# ----------
#
# Is it your kernel? Ask in this order:
#
# 1. Is it right in the interpreter, for the same shape and strides? If not, the
#    kernel is wrong. ``debugging.py`` goes on from there.
# 2. Does ``compute-sanitizer python script.py`` report an invalid *shared*
#    read? Then suspect the compiler: it places tiles in shared memory, not you.
# 3. Does the error come and go with the width of a tile or the number of warps,
#    though programs share no output? Then read the machine code as above.
#
# If it is the assembler:
#
# * Make the tiles wider, mask what is too much, and read the machine code
#   again. Rows of 128 bytes are enough here, and in ``linear_attention.py``.
# * Or take a newer Triton, or name a newer assembler in the variable
#   ``TRITON_PTXAS_PATH`` (Triton 3.9: ``TRITON_PTXAS_BLACKWELL_PATH``). Triton
#   has one for Blackwell, at ``triton.knobs.nvidia.ptxas_blackwell.path``, and
#   the package ``nvidia-cuda-nvcc`` has others. An old driver may not load
#   their code.
# * Keep a test that reads the machine code. A result that is right today says
#   nothing about the next shape.

# %%
# Go further
# ----------
#
# 1. Which of your kernels multiply narrow tiles? Compile each for an H100, with
#    the narrowest tiles that it takes, and call ``unwritten``.
# 2. Why does ``unwritten`` find nothing in wrong code where a register was
#    written for another purpose before?
#
# To read on:
#
# * ``compiler_stages.py`` reads the text of each stage.
# * Users of flash-linear-attention `found more faults
#   <https://github.com/fla-org/flash-linear-attention/pull/1262>`_ of
#   ``ptxas`` 12.8 and 13.0 on Hopper. With 13.1 their kernels were right.
# * Triton's `report 11366
#   <https://github.com/triton-lang/triton/issues/11366>`_ has a kernel with
#   narrow tiles that reads outside of shared memory.

# %%
# Answers
# -------
#
# **1.** Give ``machine_code`` your kernel and a job for each tile:
# ``({"x_ptr": "*bf16", "N": "i32"}, {"BLOCK": 16}, {"num_warps": 8})``. If the
# kernel calls other jitted functions, put their text into ``COMPILE`` too.
#
# **2.** The function asks whether anything was written, not whether it was the
# right thing. To find that, compare with the code of another assembler.
