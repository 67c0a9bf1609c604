# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas"]
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
kernel is at fault. Now and then it is the tool that makes machine code of it.
This page has a kernel of ten lines which is right, and of which ``ptxas``,
NVIDIA's assembler, makes wrong code for an H100. It needs no GPU to show it.

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
# times ``y`` comes on top. Half precision has tiles of 64 rows here, and of
# ``BLOCK`` columns.


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
# after on this page. So a child process runs the kernel beside float64, and
# tells the largest error as a part of what rounding may do. A weight, and then
# the result, is rounded to the 11 bits of float16.

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
# It runs here for three widths. Without a GPU, Triton's interpreter computes.

if __name__ == "__main__":
    ran = {block: run(block) for block in WIDTHS}
    for block, said in ran.items():
        print(f"BLOCK = {block}: {said}")
    if DEVICE.type == "cpu":  # no assembler has a part in it
        errors = torch.tensor([float(said) for said in ran.values()])
        torch.testing.assert_close(errors, 0 * errors, rtol=0, atol=1)

# %%
# A number below 1 is right. The interpreter has one for all widths, so the
# kernel says what it should. But on an H100, two ops of this gallery that
# multiply like this had wrong results, or stopped at an illegal address. In
# both, a tile was narrower than another.

# %%
# What the machine code reads
# ---------------------------
#
# Hopper's matrix instruction, ``HGMMA`` in machine code, takes a *descriptor*
# of a tile in shared memory: its address, and how its rows lie. A descriptor
# stands in *uniform registers*, ``UR0`` to ``UR62``, which the threads of a
# warp share. We go through the instructions in their order, and note which of
# these registers each one writes and reads. What is read first is suspect: no
# instruction before it put anything there.

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

    It is for kernels without a division of 64-bit numbers: those call a
    function, which returns its result in registers too.
    """
    written, suspects = set(), []
    for name, operands in STEP.findall(sass):
        first, *others = operands.split(",")
        writes = re.fullmatch(r"\s*UR\d+\s*", first) is not None
        read = [n for one in others for n in registers(one)]
        if not writes:
            read += registers(first)
        if name.startswith("HGMMA") and re.match(r"\s*R\d", others[0]):
            # Registers hold the first side: the descriptor of it is left out.
            read = [n for n in read if n - min(read) > 1]
        if unknown := sorted({*read} - written):
            names = ", ".join(f"UR{n}" for n in unknown)
            line = re.sub(r"-?0x\w+", "CONSTANT", f"{name} {operands.strip()}")
            suspects.append(f"{line}: {names} unwritten")
        if writes:
            (number,) = registers(first)
            pair = ".64" in name or "WIDE" in name
            written |= {number, number + 1} if pair else {number}
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

kernel, found = three_products_kernel, []
tools = Path(triton.knobs.nvidia.ptxas.path).parent
for block in json.load(sys.stdin):
    types = {a: "*fp16" for a in kernel.arg_names} | {"BLOCK": "constexpr"}
    by_16 = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = triton.compiler.ASTSource(kernel, types, {"BLOCK": block}, by_16)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    for name in ("ptxas", "ptxas-blackwell"):
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = Path(folder, "a.ptx"), Path(folder, "a.cubin")
            ptx.write_text(made.asm["ptx"])
            said(tools / name, "--gpu-name", "sm_90a", ptx, "-o", cubin)
            sass = said(triton.knobs.nvidia.nvdisasm.path, "-c", cubin)
        (version,) = re.findall(r"V([\\d.]+)", said(tools / name, "--version"))
        found.append([block, f"ptxas {version}", sass])
json.dump(found, sys.stdout)
"""


def machine_code(blocks):
    """Return a list of widths, assemblers and the machine code for an H100."""
    kernel = inspect.getsource(three_products_kernel.fn).partition("\n")[2]
    code = COMPILE.replace("SOURCE", "@triton.jit\n" + kernel)
    ended = child(code, stdin=json.dumps(blocks), TRITON_INTERPRET="0")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


if __name__ == "__main__":
    codes = machine_code(WIDTHS)
    for block, assembler, sass in codes:
        products = len(re.findall("HGMMA", sass))
        print(f"BLOCK = {block}, {assembler}: {products} matrix instructions")
        for suspect in unwritten(sass):
            print("   ", suspect)

# %%
# The code of the newer one reads nothing that it did not write, in any width.
# That of the older one does, where a tile has 16 or 32 columns. There
# ``UIADD3`` adds to the lower half of a descriptor, and ``UIADD3.X`` adds to
# the upper half, with the carry. What they add to is in a register that may
# hold anything. So the matrix instruction may read anything, in shared memory
# or beyond its end.

# %%
# The check
# ---------
#
# The table is the verdict. The run asserts what this page says of it.

if __name__ == "__main__":
    rows = [
        {
            "columns": block,
            "bytes of a row": 2 * block,
            "assembler": assembler,
            "reads unwritten": len(unwritten(sass)),
        }
        for block, assembler, sass in codes
    ]
    print(pd.DataFrame(rows).to_string(index=False))
    print(f"On this device ({DEVICE.type}):", ran)
    assert any(unwritten(sass) for _, _, sass in codes)
    assert not any(unwritten(sass) for block, _, sass in codes if block == 64)

# %%
# A run on a GPU takes Triton's choice, the older assembler. It may be right by
# chance: what ran before decides what the register holds.

# %%
# What to do
# ----------
#
# Is it your kernel? Ask in this order:
#
# 1. Is it right in the interpreter, for the same shape and strides? If not, the
#    kernel is wrong. ``debugging.py`` goes on from there.
# 2. Does compute-sanitizer report a read *outside of shared memory*? Triton
#    places tiles there, not you. An address in the GPU's memory is yours.
# 3. Does the error come and go with the width of a tile or the number of warps,
#    where the result must not change? Then read the machine code as above.
#
# If it is the assembler:
#
# * Make the tiles wider, 128 bytes or more in a row, and mask what is too much.
#   The op of ``linear_attention.py`` does.
# * Or name a newer assembler in the variable ``TRITON_PTXAS_PATH``. Triton has
#   one for Blackwell, at ``triton.knobs.nvidia.ptxas_blackwell.path``, and the
#   package ``nvidia-cuda-nvcc`` has others. An old driver may not load their
#   code.
# * Keep a test that reads the machine code. A result that is right today says
#   nothing about the next shape.

# %%
# Go further
# ----------
#
# 1. Which of your kernels multiply narrow tiles? Compile each for an H100, at
#    the smallest heads that you take, and call ``unwritten``.
# 2. Why does ``unwritten`` find nothing in wrong code where a register was
#    written for another purpose before?
#
# To read on:
#
# * ``compiler_stages.py`` reads the text of each stage.
# * Others met it in `flash-linear-attention
#   <https://github.com/fla-org/flash-linear-attention/pull/1262>`_, and with an
#   open cause in Triton's `report 11366
#   <https://github.com/triton-lang/triton/issues/11366>`_.

# %%
# Answers
# -------
#
# **1.** Replace the kernel in ``machine_code``, and its types and constants. A
# width of 64 half-precision numbers fills 128 bytes.
#
# **2.** The function asks whether anything was written, not whether it was the
# right thing. To find that, compare with the code of another assembler.
