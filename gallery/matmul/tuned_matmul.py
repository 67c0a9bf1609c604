# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Find in compiled code what slows a product for some shapes and layouts, mend
# it, and choose the tile for each shape."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# take_instead = "persistent_matmul"
# ///
r"""
A product for every shape and layout
====================================

The kernel of ``matmul.py`` takes matrices of any size and any strides, but it
is not as fast for all of them. Some matrices are loaded one element at a time.
With others, each multiplication may wait for the one before it. This page finds
both in the compiled code, removes both, and measures what that gains. Its op
also chooses a tile for each shape.

After this page you can

* say which layouts and sizes are loaded 16 bytes at a time, and help others;
* see in compiled code whether multiplications wait for each other, and why;
* tune a product for each shape, and know what tuning costs.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "autotuning", "autograd"]
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
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

from triton_gallery.bench import gpu_time, rate_table

CHILD = r"""
import json, re, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

KERNELS

def said(tool, *options):
    command = [getattr(triton.knobs.nvidia, tool).path, *options]
    return subprocess.run(command, capture_output=True, text=True).stdout

def answer(kernel, gpu, constants, by_16, warps, stages):
    kernel = globals()[kernel]
    if "ACC" in kernel.arg_names:
        constants["ACC"] = tl.float32
    types = {n: "*fp16" if n[-3:] == "ptr" else "i32" for n in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    known = {n for n in types if n[-3:] == "ptr" or n in by_16} - {*constants}
    places = [i for i, n in enumerate(types) if n in known]
    hints = {(i,): [["tt.divisibility", 16]] for i in places}
    source = triton.compiler.ASTSource(kernel, types, constants, hints)
    options = {"num_warps": warps, "num_stages": stages}
    target = GPUTarget("cuda", gpu, 32)
    made = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = said("nvdisasm", "--print-code", file.name)
        usage = said("cuobjdump", "--dump-resource-usage", file.name)
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [get_ptxas(gpu).path, "-v", f"-arch=sm_{gpu}a"]
        command += [file.name, "-o", "/dev/null"]
        log = subprocess.run(
            command, capture_output=True, text=True, check=True
        )
    notes = re.findall(r"Loss: (.*?) in the function", log.stdout + log.stderr)
    found = {"sass": sass, "shared": made.metadata.shared, "notes": notes}
    for name in ("REG", "STACK"):
        found[name] = int(re.search(name + r":(\d+)", usage)[1])
    return found

json.dump([answer(**job) for job in json.load(sys.stdin)], sys.stdout)
"""


def compile_all(jobs, *functions):
    """Return what answer() returns for each job, compiled without a GPU."""
    sources = "\n".join(inspect.getsource(one.fn) for one in functions)
    knobs = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "child.py")
        file.write_text(CHILD.replace("KERNELS", sources))
        options = {"env": os.environ | knobs, "text": True}
        options |= {"input": json.dumps([*jobs.values()])}
        command = [sys.executable, file]
        child = subprocess.run(command, capture_output=True, **options)
    assert child.returncode == 0, child.stderr
    return dict(zip(jobs, json.loads(child.stdout), strict=True))


# %%
# In PyTorch
# ----------
#
# The product of an (M, K) and a (K, N) matrix is ``a @ b``, however the two lie
# in memory. The weight of ``torch.nn.Linear`` is an (N, K) matrix, and its
# transpose, ``weight.T``, is a view with other strides. A kernel that takes
# contiguous matrices alone needs a copy of this view. The floor is to read each
# operand once and to write the result once. What would the copy add to that?

LAYOUTS = ["A, B", "A, B.T", "A.T, B", "A.T, B.T"]
generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(M, K, N, dtype=torch.float16, layout="A, B"):
    """Return two matrices to multiply; one with .T is a transposed view."""
    kind = {"device": DEVICE, "dtype": dtype, "generator": generator}
    a, b = torch.randn(M, K, **kind), torch.randn(K, N, **kind)
    a = a.T.contiguous().T if "A.T" in layout else a
    return a, b.T.contiguous().T if "B.T" in layout else b


if __name__ == "__main__":
    a, b = random(256, 512, 384, layout="A, B.T")
    floor = a.nbytes + b.nbytes + (a @ b).nbytes
    print(f"floor {floor:,} bytes, b.contiguous() {2 * b.nbytes:,} more")

# %%
# The first kernel
# ----------------
#
# Like that of ``matmul.py``, this kernel takes strides, and copies nothing. A
# tile of ``b`` may lie in memory in two ways. Along an arrow, elements are
# neighbours in memory:
#
# .. code-block:: text
#
#     B: stride_bn = 1                    B.T: stride_bk = 1
#
#              N                                   N
#         +-------+-------+                   +-------+-------+
#         | ----> | ----> |                   | | | | | | | | |
#      K  | ----> | ----> |                K  | | | | | | | | |
#         | ----> | ----> |                   | v v v | v v v |
#         +-------+-------+                   +-------+-------+
#
# Programs take their tiles in groups of eight rows, which ``tile_order.py``
# explains. ``LEAST`` is 0 for now and changes nothing. The section on waits
# needs it.


@triton.jit
def first_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAST: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(axis=0) // (8 * tiles_n) * 8
    # The last group may have fewer rows. Else some tiles would be left out.
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, 8)
    place = tl.program_id(axis=0) % (8 * tiles_n)
    pid_m, pid_n = first_m + place % height, place // height
    # In int32 a product with a stride would overflow past element 2**31.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    in_m, in_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    # In float16, 2048 + 1 is 2048: a sum would stop growing.
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)  # (BLOCK_M, BLOCK_N)
    for k in range(0, tl.maximum(K, LEAST), BLOCK_K):
        in_k = offs_k < K - k
        # What is masked is 0, and adds nothing to the sum.
        a = tl.load(a_ptrs, mask=in_m & in_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(tl.float16), mask=in_m & in_n)


def first_matmul(a, b, tile=(128, 256, 64), warps=8, LEAST=0):
    """Return the product of two matrices in float16."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    grid = (triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]),)
    sizes = M, N, K, *a.stride(), *b.stride(), *tile, LEAST
    first_kernel[grid](a, b, c, *sizes, num_warps=warps, num_stages=3)
    return c


# %%
# Is it right?
# ------------
#
# An addition in float32 is rounded, or cut off. So a sum of ``K`` terms is off
# by at most :math:`K \cdot 2^{-23}` of the sum of their magnitudes, and the
# result is rounded once more. We take small tiles here, so that even small
# matrices have many of them.


def check(function, a, b):
    """Return the largest error as a part of what is allowed; at most 1."""
    c, K = function(a, b).double(), a.shape[1]
    right, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    unit = 2.0 ** (-52 if a.dtype == torch.float64 else -23)
    # A whole unit of the last bit: the interpreter cuts where a GPU rounds.
    last = torch.finfo(a.dtype)
    allowed = (K + 1) * unit * size + last.eps * right.abs() + last.tiny
    part = (c - right).abs() / allowed
    torch.testing.assert_close(part, part.clamp(max=1), rtol=0, atol=0)
    return part.max().item()


if __name__ == "__main__":
    small = partial(first_matmul, tile=(16, 32, 16), warps=4)
    for layout in LAYOUTS:
        part = check(small, *random(150, 45, 100, layout=layout))
        print(f"{layout}: largest error {part:.2f} of what is allowed")

# %%
# How fast?
# ---------
#
# PyTorch calls cuBLAS, NVIDIA's library, which is the roof here but for the odd
# size: there ``torch.compile`` is far ahead of it. The rate counts two
# operations, a multiplication and an addition, for each of the ``M N K`` terms.
# All matrices are square. Those of 4096 come in four layouts. Then come 4104,
# which 8 divides and 16 does not, and 4095, which is odd. A GPU prints the
# rates:


def rates(calls, M, K, N, turns=20):
    """Return the TFLOP/s of calls, by name."""
    found = gpu_time(calls, turns=turns).items()
    return {name: round(2e-9 * M * K * N / times[0]) for name, times in found}


def contestants(function):
    """Return what is measured on two matrices, by name."""
    torch.compiler.reset()  # past eight shapes it would raise
    options = {"dynamic": False, "fullgraph": True}
    compiled = torch.compile(lambda a, b: torch.mm(a, b), **options)
    return {"Triton": function, "cuBLAS": torch.mm, "torch.compile": compiled}


KINDS = [(layout, 4096) for layout in LAYOUTS]
KINDS += [("A, B", 4104), ("A, B", 4095)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    for layout, size in KINDS:
        operands = random(size, size, size, layout=layout)
        ops = contestants(first_matmul).items()
        tried = {name: partial(op, *operands) for name, op in ops}
        print(f"{layout}, {size}: {rates(tried, size, size, size)} TFLOP/s")

# %%
# Which loads are wide?
# ---------------------
#
# Ahead of the loop's multiplications, threads copy the next tiles from memory
# to shared memory (``compiler_stages.py``): 4, 8 or 16 bytes at a time, if the
# compiler knows that they lie side by side. For each integer argument of a
# launch, Triton notes whether it is 1 and whether 16 divides it, and compiles
# the kernel for that. So a stride of 1 is known, and with it the direction in
# which elements lie side by side.
#
# What becomes of each layout and size? We compile for an H100, in a child
# process that needs no GPU (``compile_all`` is in the opening), and read the
# SASS, the GPU's own instructions. The table counts those of the loop: copies
# of 16 bytes, loads of 2 bytes, multiplications of tiles (*products*), waits
# for products, and all instructions. Its last columns are the registers of a
# thread, and the bytes of registers that it *spills*, which is to keep them in
# memory. The last row stands for sizes like 4104 and like 4095: of both, the
# compiler knows alike that 16 does not divide them.

BLOCKS = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
STRIDES = ["stride_am", "stride_ak", "stride_bk", "stride_bn"]


def ones(layout):
    """Return which strides are 1, for A and B as they lie."""
    along_a = "stride_am" if "A.T" in layout else "stride_ak"
    return along_a, "stride_bk" if "B.T" in layout else "stride_bn"


def job(layout="A, B", by_16=("M", "N", "K", *STRIDES), LEAST=0, **options):
    """Return what answer() takes: as a launch of 128 x 256 x 64 would be."""
    constants = BLOCKS | dict.fromkeys(ones(layout), 1)
    constants |= options.pop("constants", {"LEAST": LEAST})
    usual = {"kernel": "first_kernel", "warps": 8, "stages": 3} | options
    return usual | {"gpu": 90, "constants": constants, "by_16": [*by_16]}


OPCODE = r"(?m)^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)"


def loop_of(sass):
    """Return the shortest loop that multiplies, as text."""
    loops = []
    for label in re.findall(r"(?m)^(\.L_x_\d+):", sass):
        body = sass.split(f"\n{label}:")[1]
        if f"`({label})" in body:  # a jump back to it
            loops.append(body[: body.rindex(f"`({label})")])
    return min((loop for loop in loops if "MMA" in loop), key=len)


COUNTED = {
    "copies 16 B": r"LDGSTS.*128",
    "loads 2 B": r"LDG\.E\.U16",
    "products": "HGMMA",
    "waits": r"WARPGROUP\.DEPBAR",
    "in all": "",
}


def table(made):
    """Return what the loop of each compiled kernel has."""
    rows = {}
    for name, one in made.items():
        loop = re.findall(OPCODE, loop_of(one["sass"]))
        rows[name] = {
            what: sum(bool(re.match(pattern, op)) for op in loop)
            for what, pattern in COUNTED.items()
        }
        rows[name] |= {"registers": one["REG"], "spilled": one["STACK"]}
    return pd.DataFrame(rows).T.to_string()


if __name__ == "__main__":
    jobs = {layout: job(layout) for layout in LAYOUTS}
    jobs["A, B, not by 16"] = job(by_16=[])
    plain = compile_all(jobs, first_kernel)
    print(f"Triton {triton.__version__}", table(plain), sep="\n")

# %%
# All four layouts are read by copies of 16 bytes, and the kernel has no switch
# for them. In the last row, each element is a load of its own: it goes to a
# register, and from there to shared memory. Nothing is copied ahead, and some
# registers spill. There are two remedies, for two cases:
#
# * **8 divides the sizes**, as for rows of 1000. Then each row begins at a
#   multiple of 16 bytes, and copies of 16 bytes would be right, but the
#   compiler does not know it. The op tells it by a constant for each stride.
#   ``VEC_AK`` is 8 if rows of A lie along K and begin at multiples of 8
#   elements, else 1. The kernel computes ``stride_am // VEC_AK * VEC_AK``. That
#   is ``stride_am`` again, but the compiler knows that 8 divides it.
#   (``unaligned_rows.py`` explains the trick.)
# * **Other sizes**, such as odd ones. Every other row of 8193 elements begins
#   at an odd multiple of 2 bytes, where not even 4 bytes can be copied at a
#   time. The launcher first copies such an operand into a buffer. There, rows
#   begin at multiples of 16 bytes, and zeros follow each row:
#
# .. code-block:: text
#
#     K = 5: memory, 16 bytes a line       the buffer, 16 bytes a row
#
#     a0 a1 a2 a3 a4 | b0 b1 b2            a0 a1 a2 a3 a4  0  0  0
#     b3 b4 | c0 c1 c2 c3 c4 | d0          b0 b1 b2 b3 b4  0  0  0
#
# The copy reads and writes an operand once. The product reads A once for each
# column of tiles, and B once for each row of tiles. The fewer these are, the
# less a copy can save. So the op copies only if M and N are both above 128.

# %%
# Do multiplications wait for each other?
# ---------------------------------------
#
# An H100 has *asynchronous products*: a warp starts one and goes on. A product
# is one instruction, ``HGMMA``, and takes 16 steps along K. So a round of the
# loop starts four of them for its 64 steps. It needs one wait, for the products
# of the round before. Four waits in a row of the table mean that each product
# waits for the one before it. The version of Triton decides: for ``B.T`` and
# this tile, the code of Triton 3.6 has four waits, and that of 3.7 has one.
#
# Triton's compiler does not write the three further waits. ``ptxas``, NVIDIA's
# assembler, adds them, and says why if it is asked. It adds them where an
# instruction that is no product writes a register of the accumulator, while
# products may be in flight. Which instruction is that? If ``K`` is 0, the loop
# does not run, and the result is zeros. The compiler may write these zeros on a
# path of their own, around the loop.
#
# A launcher can see to it that ``K`` is at least 1, but the compiler has to
# know it too. With ``LEAST = 1``, the loop goes up to ``tl.maximum(K, 1)``. So
# it runs at least once, and there is no path around it. This table has the
# counts with ``LEAST = 1``. Under it is what ``ptxas`` says of the code of both
# tables. If there is no such line, ``ptxas`` printed nothing. The ladder after
# the op has the rates with 0 and with 1. The op takes 1 if ``B`` is transposed,
# and else 0.

if __name__ == "__main__":
    jobs = {f"{one}, LEAST = 1": job(one, LEAST=1) for one in LAYOUTS}
    least = compile_all(jobs, first_kernel)
    print(table(least))
    for name, made in (plain | least).items():
        for note in made["notes"]:
            print(f"ptxas on {name}: {note}")

# %%
# Which tile?
# -----------
#
# A larger tile loads less: ``1 / BLOCK_M + 1 / BLOCK_N`` elements for each
# multiplication of two numbers. Smaller tiles give more programs, and two of
# these may fit on a multiprocessor, so that one stores while the other
# multiplies. Which tile wins depends on the shape, so ``triton.autotune``
# (``autotune.py``) times all candidates. Three decisions are special to this
# op:
#
# * *A list of candidates for each kind of product.* For up to 32 rows, tiles of
#   16 or 32 rows have fewer masked ones. Float32 in full precision runs without
#   tensor cores, and float64 has twice the bytes: both take smaller tiles.
# * *The key.* ``autotune`` tunes for each new key. With the sizes as they are,
#   it would tune for each new number of tokens, and a server would stop each
#   time. So the key has each size rounded up to its first three bits: 5000,
#   which is 1001110001000 in binary, becomes 1010000000000, which is 5120.
# * *The clock.* Each candidate is timed for 25 ms. Triton's clock takes 125.

# %%
# The op
# ------
#
# The op takes matrices of any strides and has a backward: the gradients are
# products of transposed operands, by the same op. On a GPU a call goes straight
# to the launcher, and ``torch.compile`` looks into the ``triton_op``:
# ``what_a_call_costs.py`` explains both.

from triton_gallery_ops.tuned_matmul import (
    TUNED_MATMUL_ACC,
    TUNED_MATMUL_GROUP,
    TUNED_MATMUL_TUNED,
    _tuned_matmul_kernel,
    _tuned_matmul_kind,
    _tuned_matmul_operand,
    _tuned_matmul_tile,
    tuned_matmul,
)

# %%
# Does the op's kernel have what the sections above ask for? First its compiled
# code, which needs no GPU, with tiles of 128 x 256 x 64. ``VEC`` is 8 along the
# rows of each operand. Of the sizes and strides, the compiler knows which
# strides are 1, and that 16 divides ``N``. In the last row, it does not know
# that of ``N`` either.


# What the kernel is given for batches and activations, beside a bias
UNUSED = ["inner", "stride_az", "stride_ay", "stride_bz", "stride_by"]
UNUSED += ["like_batch", "ACTIVATION"]


def op_job(layout, by_16=("N",)):
    """Return what answer() takes, for the op's kernel."""
    constants = {"GROUP_M": TUNED_MATMUL_GROUP}
    constants |= dict.fromkeys(("bias_ptr", *UNUSED))
    for one in STRIDES:
        constants["VEC_" + one[-2:].upper()] = 8 if one in ones(layout) else 1
    kernel = "_tuned_matmul_kernel"
    return job(layout, by_16, kernel=kernel, constants=constants)


if __name__ == "__main__":
    jobs = {f"{one}, the op": op_job(one) for one in LAYOUTS}
    jobs["A, B, odd N"] = op_job("A, B", by_16=())
    print(table(compile_all(jobs, _tuned_matmul_tile, _tuned_matmul_kernel)))

# %%
# All copies have 16 bytes: with ``VEC``, the loads need no size that 16
# divides. The loop may be longer than that of the first kernel. It compares
# with two ends of K, ``a_end`` and ``b_end``, because the rows of one operand
# may be padded and those of the other not. Where 16 does not divide ``N``, the
# compiler stores 2 bytes at a time. Whether registers spill there depends on
# the version of Triton.
#
# What is each step worth? All rungs of this ladder but the last two have this
# tile and three stages. *VEC* runs the op's kernel on the operands as they lie.
# *Rows copied* first copies those that need it. ``LEAST = 1`` helps where ``B``
# is transposed and 16 divides the sizes. It costs speed in the other columns,
# though its loop is shorter. ``VEC`` helps multiples of 8, and where no operand
# needs it, it costs some speed. Copied rows help odd sizes, where cuBLAS is far
# below ``torch.compile``, and change no other column. The sizes are M, K and N:

LADDER = {
    "square": (8192, 8192, 8192, "A, B"),
    "a layer": (4096, 4096, 14336, "A, B.T"),
    "both .T": (4096, 4096, 4096, "A.T, B.T"),
    "multiples of 8": (4104, 4104, 4104, "A, B.T"),
    "odd": (4097, 4095, 8193, "A, B.T"),
}


def fixed(a, b, copy):
    """Return the product by the op's kernel with one tile for all shapes."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    a, *vec_a = _tuned_matmul_operand(a, copy)
    b, *vec_b = _tuned_matmul_operand(b, copy)
    grid = (triton.cdiv(M, 128) * triton.cdiv(N, 256),)
    no_batch = (None,) * 5
    sizes = M, N, K, *a.stride(), *b.stride(), *no_batch, M, N, K, None
    constants = None, tl.float32, *vec_a, *vec_b, TUNED_MATMUL_GROUP
    options = BLOCKS | {"num_warps": 8, "num_stages": 3}
    _tuned_matmul_kernel[grid](a, b, None, c, *sizes, *constants, **options)
    return c


RUNGS = {
    "first kernel": first_matmul,
    "LEAST = 1": partial(first_matmul, LEAST=1),
    "VEC": partial(fixed, copy=False),
    "rows copied": partial(fixed, copy=True),
    "the op: tuned": tuned_matmul,
    "cuBLAS": torch.mm,
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {}
    for name, (M, K, N, layout) in LADDER.items():
        operands = random(M, K, N, layout=layout)
        tried = {rung: partial(f, *operands) for rung, f in RUNGS.items()}
        ladder[name] = rates(tried, M, K, N, turns=10)
    print("TFLOP/s", pd.DataFrame(ladder).to_string(), sep="\n")

# %%
# What does tuning cost, and who wins?
# ------------------------------------
#
# The first call with new sizes compiles and times each candidate, the second is
# an ordinary one. We print the time of both, and the tile that won. Kernels
# that an earlier shape, the ladder or Triton's cache on disk has compiled are
# timed alone, so at most the longest first call compiles. The ladder has tuned
# 4096 x 4096 x 14336 already. The sizes are tokens x K x N, of models' layers,
# in float16.

TOKENS = [1, 16, 128, 1024, 4096]
LAYERS = [(4096, 14336), (7168, 2048)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    for (K, N), M in itertools.product(LAYERS, TOKENS):
        a, b = random(M, K, N, layout="A, B.T")
        took = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            tuned_matmul(a, b)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        kind = _tuned_matmul_kind(M, torch.float16)
        best = TUNED_MATMUL_TUNED[kind].best_config
        print(f"{M} x {K} x {N}: first call {took[0]:.2f} s", end=", ")
        print(f"second {1e3 * took[1]:.2f} ms: {best}")

# %%
# Proof
# -----
#
# We compare value and gradients of every dtype with float64, for odd sizes,
# with and without a copy of operands. Matrices that lie in other ways follow,
# and empty ones. To tune for each of these would take a GPU some minutes, so
# here the lists have one candidate each. (The tests run all candidates.)


@contextmanager
def one_candidate():
    """Let the op take the first candidate of each list meanwhile."""
    tuners = TUNED_MATMUL_TUNED.values()
    lists = [tuner.configs for tuner in tuners]
    for tuner in tuners:
        tuner.configs = tuner.configs[:1]
    yield
    for tuner, configs in zip(tuners, lists, strict=True):
        tuner.configs = configs


def prove(M, K, N, dtype):
    a, b = random(M, K, N, dtype)
    grad, _ = random(M, N, 1, dtype)
    check(tuned_matmul, a, b)
    c = tuned_matmul(a.requires_grad_(), b.requires_grad_())
    grads = torch.autograd.grad(c, (a, b), grad)
    a, b = a.detach(), b.detach()
    for got, left, right in ((grads[0], grad, b.T), (grads[1], a.T, grad)):
        check(lambda *_, got=got: got, left, right)


if __name__ == "__main__":
    with one_candidate():
        for dtype in TUNED_MATMUL_ACC:
            prove(133, 45, 131, dtype)
        prove(16, 64, 8, torch.float16)
        for layout in LAYOUTS:
            a, b = random(40, 70, 100, layout=layout)
            check(tuned_matmul, a, b)
        check(tuned_matmul, a[::2, ::2], b[::2, 3:])
        check(tuned_matmul, a[:1].expand(40, 70), b)
        for M, K, N in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
            assert not tuned_matmul(*random(M, K, N)).any()

# %%
# ``gradcheck`` compares the backward with finite differences, and
# ``gradgradcheck`` the backward of the backward:

if __name__ == "__main__":
    inputs = [x.requires_grad_() for x in random(3, 4, 5, torch.float64)]
    with one_candidate():
        assert torch.autograd.gradcheck(tuned_matmul, inputs)
        assert torch.autograd.gradgradcheck(tuned_matmul, inputs)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    a, b = random(3, 4, 5)
    for wrong in ((a, b.float()), (a, b.T), (a.int(), b.int())):
        try:
            tuned_matmul(*wrong)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is in bfloat16, for a layer with 4096 features in and 14336 out,
# as a Llama of 8 billion parameters has them. Its weight lies as (N, K). With
# few tokens, the memory sets the rate, as it has to deliver the weight, and
# ``skinny_matmul.py`` is the page for these. The backward has two products, and
# so twice the operations.

SIZES = [1, 16, 64, 256, 1000, 4096, 8192]
LAYER = 4096, 14336
WORK = 2e-9 * LAYER[0] * LAYER[1]  # of a token: by ms they are TFLOP/s


def calls(M, backward=False):
    a, b = random(M, *LAYER, dtype=torch.bfloat16, layout="A, B.T")
    ops = contestants(tuned_matmul).items()
    if not backward:
        return {name: partial(op, a, b) for name, op in ops}
    a, b = a.requires_grad_(), b.requires_grad_()
    g, _ = random(M, LAYER[1], 1, dtype=torch.bfloat16)
    grad = partial(torch.autograd.grad, retain_graph=True)
    return {name: partial(grad, op(a, b), (a, b), g) for name, op in ops}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: gpu_time(calls(M), turns=20) for M in SIZES}
    results = rate_table(times, "M", "TFLOP/s", lambda M: WORK * M)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="M", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: gpu_time(calls(M, True), turns=10) for M in (256, 1000, 4096)}
    table_of = partial(rate_table, times, "M", "TFLOP/s")
    results_backward = table_of(lambda M: 2 * WORK * M)
    print("backward", results_backward.to_string(), sep="\n")

# %%
# This is what a call costs the CPU, in microseconds, forward and backward. In
# each call, the tuner looks up the tile by the key. Called one by one, small
# products wait for the CPU; in a CUDA graph (``cuda_graphs.py``) they do not.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["M"] == 1000].set_index("series")["CPU us"]
        print(cost.round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# An H200 has 989 TFLOP/s for 4.8 TB/s by its data sheet, about 200 operations
# for a byte. A weight in bfloat16 is read at least once, and gives ``M``
# operations for a byte. So up to about 200 tokens the memory bounds the
# product, and beyond that the tensor cores do. The tables above count what
# these may wait for: narrow loads, and products before them. The op has wide
# copies and one wait in every layout, and still the benchmark has it below
# cuBLAS from 256 tokens on. So something else holds it up, which these counts
# do not show. ``persistent_matmul.py`` comes closer to cuBLAS with such
# weights. For narrow layers, such as 7168 x 2048, the table beside other
# libraries has it below cuBLAS at fewer tokens too. With few tokens such a
# layer has fewer tiles than there are multiprocessors. At 1000 tokens the
# number of tiles matters too: a last wave of few tiles takes as long as a full
# one (``persistent_matmul.py``). In the key, 1000 tokens are 1024, and the
# section on tuning prints the tile for 1024, in float16.

# %%
# Go further
# ----------
#
# 1. If ``N`` is odd, every other row of the result begins at an odd multiple of
#    2 bytes, and the result is stored by 2 bytes. Which change of the op gives
#    wide stores, and what is its price?
# 2. The op copies an odd weight in each call. What can the weight's owner do?
#
# To read on:
#
# * ``tensor_descriptors.py`` has Hopper's copy engine load the tiles, and
#   ``persistent_matmul.py`` makes an op of that.

# %%
# Answers
# -------
#
# **1.** Allocate the result with rows of a multiple of 8 elements, pass its
# stride to the kernel, and return the first ``N`` columns. The result is then
# not contiguous, and many ops that follow copy it.
#
# **2.** The owner can store the weight with zeros after each row, up to a
# multiple of 8 elements, do the same with the activations, and multiply along
# the longer ``K``.
