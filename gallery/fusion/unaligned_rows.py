# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Load 16 bytes at once from rows of odd lengths too, by a split into a body
# and edges, and see it in the compiled code."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = false
# deterministic = true
# ///
r"""
Unaligned rows
==============

A thread can load 16 bytes with one instruction, if 16 divides the address and
the mask lets in all of them or none. Give an array one element more, and the
compiler can no longer be sure of that. This page reads the compiled code, and
mends it with a split into a *body* and *edges*.

After this page you can

* say when a thread loads 16 bytes at once, and when one element;
* read the width of loads from PTX, on a machine without a GPU;
* split an array, or each row of a matrix, into a body and its edges;
* tell a hint that follows from the code from a promise that nobody checks.
"""

# sphinx_gallery_tags = ["elementwise", "memory bound"]
import inspect
import os
import subprocess
import sys
import tempfile
from functools import partial
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

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.counting import statements

# %%
# In PyTorch
# ----------
#
# We add two long arrays. In half precision each element is 2 bytes, so 16 bytes
# are 8 elements. The floor is to read both arrays and to write one:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(*shape):
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.to(torch.bfloat16)


if __name__ == "__main__":
    for N in (2**16, 2**16 + 1):
        x, y = random(N), random(N)
        out = x + y  # reads x, reads y, writes out
        moved = sum(t.nbytes for t in (x, y, out))
        print(f"{N:,} additions for {moved:,} bytes")

# %%
# One element more is 6 bytes more. It should cost next to nothing.

# %%
# The first kernel
# ----------------
#
# This is the addition of the page ``vector_add.py``. Each program takes a
# block, and a mask keeps the last block inside the array:
#
# .. code-block:: text
#
#     element    0 1 2 3 4 5 6 7   8 9 . . . . . .        N = 10
#     mask       1 1 1 1 1 1 1 1   1 1 0 0 0 0 0 0
#                16 bytes: all     16 bytes: some


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask).to(tl.float32)
    tl.store(out_ptr + offs, x + y, mask=mask)


def add(x, y):
    """Return x + y for two contiguous arrays."""
    out, N = torch.empty_like(x), x.numel()
    add_kernel[(triton.cdiv(N, 1024),)](x, y, out, N, BLOCK=1024)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64. The sum is rounded to float32, and then to the 8 bits
# of bfloat16. The interpreter cuts bits off where a GPU rounds, so we allow a
# whole unit of the last bit.

if __name__ == "__main__":
    x, y = random(10_001), random(10_001)
    out, expected = add(x, y).double(), x.double() + y.double()
    unit = torch.finfo(torch.bfloat16).eps
    error = ((out - expected) / expected.abs().clamp(min=1e-9)).abs().max()
    print(f"largest relative error {error:.1e}, allowed {unit:.1e}")
    torch.testing.assert_close(out, expected, rtol=unit, atol=1e-9)

# %%
# How fast?
# ---------
#
# We time arrays of nearly the same length, a quarter of a gigabyte each. The
# roof is PyTorch's addition into memory that is there already.


def calls(function, x, y):
    out = torch.empty_like(x)
    torch.compiler.reset()
    options = {"dynamic": False, "fullgraph": True}
    compiled = torch.compile(lambda x, y: x + y, **options)
    return {
        "Triton": lambda: function(x, y),
        "PyTorch": lambda: x + y,
        "torch.compile": lambda: compiled(x, y),
        "Roof": lambda: torch.add(x, y, out=out),
    }


def rates(found, N):
    """Return the line of a table: GB/s for two reads and a write of N."""
    each = [f"{name} {6e-6 * N / t[0]:.0f}" for name, t in found.items()]
    return f"N = {N:,}: {', '.join(each)} GB/s"


LENGTHS = [2**27, 2**27 + 8, 2**27 + 1]

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in LENGTHS:
        print(rates(gpu_time(calls(add, random(N), random(N))), N))

# %%
# Which loads did the compiler write?
# -----------------------------------
#
# A child process compiles the kernels for an H100, and counts the loads and
# stores in their PTX. It runs without the interpreter, and needs no GPU.
# ``v4.b32`` is four words of 32 bits, which are 16 bytes in one instruction.
# ``b16`` is one element.

CHILD = """
import re, triton, triton.language as tl
from collections import Counter
from triton.backends.compiler import GPUTarget


def show(kernel, dividing, known):
    if "ACC" in kernel.arg_names:
        known["ACC"] = tl.float32
    types = {n: "*bf16" if n[-3:] == "ptr" else "i32" for n in kernel.arg_names}
    types |= dict.fromkeys(known, "constexpr")
    by_16 = [i for i, n in enumerate(types) if n[-3:] == "ptr" or n in dividing]
    hints = {(i,): [["tt.divisibility", 16]] for i in by_16}
    source = triton.compiler.ASTSource(kernel, types, known, hints)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    found = Counter(re.findall(r"(?:ld|st)\\.global[.\\w]*", ptx))
    print(", ".join(f"{n} x {op}" for op, n in found.items()))
"""


def child(program):
    """Run a program in a process without the interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "child.py")
        file.write_text(program)
        command, env = [sys.executable, file], os.environ
        env = {**env, "TRITON_INTERPRET": "0"}
        return subprocess.run(command, env=env, capture_output=True, text=True)


def loads(*sources, dividing=(), **known):
    """Return the loads and stores of the last kernel in each source."""
    program = CHILD
    for source in sources:
        name = source.rpartition("def ")[2].partition("(")[0]
        program += f"\n{source}\nshow({name}, {dividing}, {known})\n"
    found = child(program)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def variant(start="pid * BLOCK", mask="offs < N"):
    """Return the source of the first kernel with another start or mask."""
    source = inspect.getsource(add_kernel.fn)
    return source.replace("pid * BLOCK", start).replace("offs < N", mask)


if __name__ == "__main__":
    for who, dividing in (("16 divides N", ("N",)), ("any other N", ())):
        found = loads(variant(), dividing=dividing, BLOCK=1024)
        print(f"{who:13} {found[0]}")

# %%
# These are two versions of one kernel. At a launch Triton notes which arguments
# 16 divides, and compiles for that. A thread has 8 neighbouring elements of a
# block. It can load them at once if the mask is the same for all 8. The mask
# ``offs < N`` may end among them, unless 8 divides ``N``. The compiler knows
# that 8 divides ``N`` only where 16 does. So the elements of every block are
# loaded one by one, for the sake of the last block.
#
# Could the mask say more?

FORMS = [
    "offs < tl.multiple_of(N, 8)",
    "tl.max_constancy(offs < N, 8)",
    "offs < N // 8 * 8",
]

if __name__ == "__main__":
    found = loads(*(variant(mask=form) for form in FORMS), BLOCK=1024)
    for form, line in zip(FORMS, found, strict=True):
        print(f"{form:30} {line}")

# %%
# * ``tl.multiple_of`` on an argument changes nothing.
# * ``tl.max_constancy`` is a promise that eight neighbours in the mask are
#   equal. For most ``N`` that is not true, and the last block would write
#   beyond the end.
# * ``N // 8 * 8`` needs no promise: 8 divides it whatever ``N`` is, and the
#   compiler can tell.
#
# So let the mask end at the last multiple of 8. The elements up to there are
# the *body*. One program also does the *edge*, the few elements that are left:


@triton.jit
def body_kernel(
    x_ptr, y_ptr, out_ptr, N, VEC: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    # Up to N, the mask could end among the elements of one wide load.
    end = N // VEC * VEC
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < end
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask).to(tl.float32)
    tl.store(out_ptr + offs, x + y, mask=mask)
    # Without this, every program would add the same few elements again.
    if pid == 0:
        edge = end + tl.arange(0, VEC)  # (VEC,)
        x_e = tl.load(x_ptr + edge, mask=edge < N).to(tl.float32)
        y_e = tl.load(y_ptr + edge, mask=edge < N).to(tl.float32)
        tl.store(out_ptr + edge, x_e + y_e, mask=edge < N)


def add_body(x, y):
    out, N = torch.empty_like(x), x.numel()
    grid = (triton.cdiv(N, 1024),)
    body_kernel[grid](x, y, out, N, VEC=16 // x.itemsize, BLOCK=1024)
    return out


if __name__ == "__main__":
    source = inspect.getsource(body_kernel.fn)
    print(*loads(source, VEC=8, BLOCK=1024))
    x, y = random(10_001), random(10_001)
    torch.testing.assert_close(add_body(x, y), add(x, y))

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in LENGTHS:
        x, y = random(N), random(N)
        ways = {"one mask": partial(add, x, y)}
        ways["body and edge"] = partial(add_body, x, y)
        print(rates(gpu_time(ways), N))

# %%
# Rows that begin anywhere
# ------------------------
#
# Where rows of an odd length lie one after another, most do not begin at a
# multiple of 16 bytes. Another mask does not help there, as the address matters
# too:

if __name__ == "__main__":
    mask = "tl.arange(0, BLOCK) < N // 8 * 8"
    starts = "pid * N", "pid * N // 8 * 8"
    found = loads(*(variant(start, mask) for start in starts), BLOCK=1024)
    for start, line in zip(starts, found, strict=True):
        print(f"{start:17} {line}")

# %%
# With ``pid * N // 8 * 8`` the loads are wide, but most rows begin elsewhere.
# So let the body begin at the *first* multiple of 16 bytes in the row. Then
# there are two edges, before the body and after it. Together they have less
# than ``2 * VEC`` elements, where ``VEC`` elements take 16 bytes:
#
# .. code-block:: text
#
#     16 bytes, here 4 elements
#     |       |       |       |       |       |
#     . . . x x x x x x x x x x x x x x x x . .
#           edge|      body, in blocks    |edge
#
# The op adds rows, each with a weight: ``out[m] = x[m] + weight[m] * y[m]``. A
# mixture of experts does so with an expert's output.

# %%
# The op
# ------
#
# A row needs the same alignment in ``x``, ``y`` and ``out``: as many elements
# after a multiple of 16 bytes in each. In contiguous matrices it does. Where it
# does not, ``VEC`` is 1, the body is the whole row, and elements are loaded one
# by one. The op is registered as ``what_a_call_costs.py`` shows.

from triton_gallery_ops.add_rows import (
    ADD_ROWS_ACC,
    _add_rows_divide,
    _add_rows_kernel,
    add_rows,
)

# %%
# What did the step gain? With ``VEC=1`` the same kernel has empty edges, and
# wide loads only where 16 divides ``N``. First come the instructions of both
# for any other ``N``, then the statements of the kernels, then figures for
# three lengths: a multiple of 16, one of 8, and an odd one. Loads of one
# element cost rows less than they cost the arrays above.


def rows(x, y, weight, VEC):
    (M, N), out = x.shape, torch.empty_like(x)
    blocks = triton.cdiv(N, 1024)
    launch = _add_rows_kernel[(M * blocks,)]
    known = {"ACC": tl.float32, "VEC": VEC, "BLOCK": 1024}
    return launch(x, y, weight, out, N, blocks, N, N, **known)


if __name__ == "__main__":
    op = _add_rows_divide, _add_rows_kernel
    source = "\n".join(inspect.getsource(kernel.fn) for kernel in op)
    for VEC in (1, 8):
        (found,) = loads(source, VEC=VEC, BLOCK=1024)
        print(f"VEC={VEC}: {found}")
    kernels = {"one mask": [add_kernel], "body and edge": [body_kernel]}
    for name, one in (kernels | {"the op": op}).items():
        print(f"{name}: {statements(*one)} statements")

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (50256, 50264, 50257):
        M = 2**27 // N
        x, y, weight = random(M, N), random(M, N), random(M)
        ways = {f"VEC={v}": partial(rows, x, y, weight, v) for v in (1, 8)}
        registers = [way().n_regs for way in ways.values()]
        print(f"rows of {N}, {registers} registers,", end=" ")
        print(rates(gpu_time(ways), M * N))

# %%
# Proof
# -----
#
# We compare every dtype with float64. The rows have several lengths, some lie
# apart, and some differ in alignment. The product, the sum and the result are
# rounded, so we allow twice ``eps``, relative to the two terms. Then come
# matrices whose columns lie apart, and weights that do.

if __name__ == "__main__":
    for dtype in ADD_ROWS_ACC:
        unit = 2 * torch.finfo(dtype).eps
        for M, N, gap in (
            (3, 40, 0),
            (9, 257, 0),
            (4, 3001, 8),
            (5, 33, 3),
            (2, 0, 1),
        ):
            x = random(M, N + gap).to(dtype)[:, :N]
            y = random(M, N + gap).to(dtype)[:, gap:]
            weight = random(M).to(dtype)
            out = add_rows(x, y, weight).double()
            terms = x.double(), weight.double()[:, None] * y.double()
            error = (out - terms[0] - terms[1]).abs()
            assert (error <= unit * (terms[0].abs() + terms[1].abs())).all()

x, y, weight = random(30, 40).T, random(40, 90)[:, ::3], random(80)[::2]
expected = torch.addcmul(x.float(), weight[:, None].float(), y.float())
out = add_rows(x, y, weight)
torch.testing.assert_close(out, expected.bfloat16(), rtol=0.02, atol=0.02)

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16, with a quarter of a gigabyte in a matrix. The
# lengths come in pairs. PyTorch has one kernel for this op, ``torch.addcmul``.

SIZES = [1000, 1001, 4096, 4097, 50256, 50257, 151936, 151937]


def calls_of_rows(N):
    M = 2**27 // N
    x, y, weight = random(M, N), random(M, N), random(M)
    out, column = torch.empty_like(x), weight[:, None]
    torch.compiler.reset()  # past eight lengths it would raise
    options = {"dynamic": False, "fullgraph": True}
    compiled = torch.compile(lambda x, w, y: x + w * y, **options)
    return {
        "Triton": lambda: add_rows(x, y, weight),
        "PyTorch": lambda: torch.addcmul(x, column, y),
        "torch.compile": lambda: compiled(x, column, y),
        "Roof": lambda: torch.add(x, y, out=out),
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls_of_rows(N)) for N in SIZES}
    moved = {N: 6e-6 * (2**27 // N * N) for N in SIZES}
    results = rate_table(times, "N", "GB/s", moved.get)
    print(results.to_string())
    results.pivot(index="N", columns="series", values="GB/s").plot(logx=True)
    cost = results[results["N"] == 4096].set_index("series")["CPU us"]
    print("microseconds of the CPU:", cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The lengths of a pair differ by one element. Our rate is nearly the same for
# both, as most of a row is its body: the edges are less than 32 bytes together.
# The rate of ``torch.compile`` falls by more than a quarter at 1001 and 151937,
# and hardly at the other odd lengths. The sizes of the table beside other
# libraries are none at which it falls, so the op gains nothing there.
#
# The op has a program for each block of a row. A program with a row of a few
# hundred elements has little to load. On the page ``softmax.py`` a program
# takes several short rows.

# %%
# Break it: a hint that is not true
# ---------------------------------
#
# On an argument, ``tl.multiple_of`` changed nothing. On an expression, the
# compiler believes it:

if __name__ == "__main__":
    start, mask = (
        "tl.multiple_of(pid * N, 8)",
        "tl.arange(0, BLOCK) < N // 8 * 8",
    )
    print(*loads(variant(start, mask), BLOCK=1024))

# %%
# This is not true of most rows. On a GPU, the second of two rows of 1001 is
# then read 16 bytes at a time from an address that 16 does not divide:

CRASH = """
import torch
x = torch.ones(2, 1001, dtype=torch.bfloat16, device="cuda")
add_kernel[(2,)](x, x, torch.empty_like(x), 1001, BLOCK=1024)
torch.cuda.synchronize()
"""

if __name__ == "__main__" and DEVICE.type == "cuda":
    said = child(CHILD + variant(start, mask) + CRASH)
    lines = said.stderr.splitlines()
    print(next(line for line in lines if "error" in line.lower()))

# %%
# The interpreter does not notice. Nor does a test in which 8 divides the length
# of every row.

# %%
# Go further
# ----------
#
# 1. Of contiguous rows of 50257 in float32, how many begin at a multiple of 16
#    bytes? How many in bfloat16?
# 2. With rows of 4096, those of ``x[:, 1:]`` and ``y[:, 1:]`` begin one element
#    after a multiple of 16 bytes, those of the result anywhere. Where should
#    the body begin?
# 3. Whole blocks need no mask. With two branches, ``if (pid + 1) * BLOCK <= N``
#    and ``else``, which loads does the compiler write when it adds arrays?
#
# To read on: ``softmax_long.py`` has bodies and edges of rows that are reduced,
# and ``what_a_launch_compiles.py`` more on what a launch notes of arguments.

# %%
# Answers
# -------
#
# **1.** In float32 one in four, as 16 bytes are four elements. In bfloat16 one
# in eight. ``50257 % 4`` and ``50257 % 8`` are 1, so the rows take turns.
#
# **2.** At multiples of 16 bytes in the inputs. Then two tensors of three are
# moved 16 bytes at a time, and the result one element at a time.
#
# **3.** Both kinds: loads of 16 bytes in the branch without a mask, and loads
# of one element in the other. That suits long arrays, and rows that begin at
# multiples of 16 bytes.
