# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Follow a load and a tl.dot through the stages of Triton's compiler, down to
# the instructions of four GPUs."""
# tool = true
# ///
r"""
The stages of the compiler
==========================

A kernel says ``tl.load``; the GPU executes ``LDG.E.128``. Between the two lie
the stages of Triton's compiler. Each stage decides something and writes its
decision down as text. This page follows one load through all stages, then a
``tl.dot``, and compiles that ``tl.dot`` for four GPUs. No GPU is needed for it.

After this page you can

* get the text of every stage of a kernel of your own;
* find the line that says which thread holds what, how wide a load is, and which
  matrix instruction ``tl.dot`` became;
* say which decisions are the compiler's and which are yours.
"""

# sphinx_gallery_tags = ["compiler", "layout", "matmul"]
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
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
# One kernel
# ----------
#
# It adds up rows. A program loads a tile of 8 rows and stores 8 sums.


@triton.jit
def row_sum_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * N + offs_n[None, :]
    # What is masked counts as 0, so it does not change the sum.
    x = tl.load(x_ptrs, mask=mask, other=0.0)  # (BLOCK_M, BLOCK_N)
    tl.store(out_ptr + offs_m, tl.sum(x, axis=1), mask=offs_m < M)


def row_sum(x):
    """Return the sums of the rows of a contiguous matrix."""
    M, N = x.shape
    out = torch.empty(M, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, 8),)
    row_sum_kernel[grid](x, out, M, N, 8, triton.next_power_of_2(N))
    return out


# %%
# Is it right?
# ------------
#
# The kernel runs here, beside float64, for a length that 16 divides and for one
# that it does not. A sum of 64 numbers rounds 63 times, by at most
# :math:`2^{-20}` each time while it stays below 32.

generator = torch.Generator().manual_seed(0)

if __name__ == "__main__":
    for N in (64, 50):
        x = torch.randn(19, N, generator=generator).to(DEVICE)
        out, right = row_sum(x).double(), x.double().sum(1)
        print(f"N = {N}: largest error {(out - right).abs().max():.1e}")
        torch.testing.assert_close(out, right, rtol=0, atol=63 * 2**-20)

# %%
# How to get the texts
# --------------------
#
# On a GPU, a launch returns the compiled kernel, which has all texts:
#
# .. code-block:: python
#
#     compiled = row_sum_kernel[grid](x, out, M, N, 8, 64)
#     print(compiled.asm["ttgir"])  # or ttir, llir, ptx, sass
#
# Triton compiles without a GPU too, and for any GPU: ``triton.compile`` takes
# the kernel, the types of its arguments, the constants, what is known of the
# arguments, and a target. What is known here is that 16 divides each argument.
# At a launch, Triton looks which arguments 16 divides, and compiles once more
# if they are others than before.
#
# The compiler runs in a child process, out of the interpreter's reach. The tool
# ``cuobjdump``, which Triton ships, counts the registers of NVIDIA's code.

COMPILER = r"""
import json, re, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNELS

def registers(made):
    if "amdgcn" in made.asm:  # it says so itself
        return re.search(r"\.vgpr_count: +(\d+)", made.asm["amdgcn"])[1]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.check_output(command, text=True)
    return re.search(r"REG:(\d+)", usage)[1]

def texts(
    kernel, target, constants, dtype="*fp16", unknown=(), sass=True, **options
):
    kernel = globals()[kernel]
    types = {a: dtype if "_ptr" in a else "i32" for a in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    hidden = {*constants, *unknown}
    known = [i for i, a in enumerate(types) if a not in hidden]
    by_16 = {(i,): [["tt.divisibility", 16]] for i in known}
    source = triton.compiler.ASTSource(kernel, types, constants, by_16)
    made = triton.compile(source, target=GPUTarget(*target), options=options)
    if sass and "cubin" in made.asm:
        made.asm["sass"]  # made when first asked for: it takes a while
    found = {k: v for k, v in made.asm.items() if isinstance(v, str)}
    for name in ("ttir", "ttgir"):  # without places in the source
        found[name] = re.sub(r"#loc.*\n| loc\([^)]*\)", "", found[name])
    found["shared"] = made.metadata.shared
    found["registers"] = int(registers(made))
    return found

json.dump([texts(**job) for job in json.load(sys.stdin)], sys.stdout)
"""

GPUS = {  # kind, compute capability or name, threads in a warp
    "A100": ("cuda", 80, 32),
    "H100": ("cuda", 90, 32),
    "B200": ("cuda", 100, 32),
    "MI300": ("hip", "gfx942", 64),
}


def compile_all(jobs, *kernels):
    """Return what texts() gives for each job, a dictionary of its arguments."""
    sources = "\n".join(inspect.getsource(kernel.fn) for kernel in kernels)
    knobs = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compile.py")
        file.write_text(COMPILER.replace("KERNELS", sources))
        options = {"env": os.environ | knobs, "text": True}
        options |= {"input": json.dumps([*jobs.values()])}
        command = [sys.executable, file]
        child = subprocess.run(command, capture_output=True, **options)
    assert child.returncode == 0, child.stderr
    return dict(zip(jobs, json.loads(child.stdout), strict=True))


def find(text, pattern):
    """Return the lines of a text in which a pattern is found."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if re.search(pattern, line)]


def show(text, pattern):
    for line in find(text, pattern):
        print(textwrap.fill(line, 78, subsequent_indent=8 * " "))


# %%
# Who decides what?
# -----------------
#
# The verdict first: each stage, what it decides, and the part of the line about
# the load in ``row_sum_kernel`` that shows it. The tile has 8 rows of 64
# elements. The GPU is an H100, and for AMDGCN an MI300.

VERDICT = [  # stage, its name in asm, what it decides, how to find the line
    ("TTIR", "ttir", "shapes and types of tiles", r"tt\.load"),
    ("TTGIR", "ttgir", "which thread holds which element", r"size\w+ = \[1, "),
    ("LLVM IR", "llir", "what one thread does", r"ld\.global"),
    ("PTX", "ptx", "instructions; each value has a register", r"ld\.global"),
    ("SASS", "sass", "which registers, and what waits for what", "LDG"),
    ("AMDGCN", "amdgcn", "AMD's code, in place of PTX and SASS", "global_load"),
]
SIZES = {"BLOCK_M": 8, "BLOCK_N": 64}
SUM = {"kernel": "row_sum_kernel", "constants": SIZES, "dtype": "*fp32"}

if __name__ == "__main__":
    jobs = {gpu: SUM | {"target": target} for gpu, target in GPUS.items()}
    jobs["any N"] = jobs["H100"] | {"unknown": ["N"]}
    sums = compile_all(jobs, row_sum_kernel)
    h100, mi300 = sums["H100"], sums["MI300"]
    for stage, name, decides, pattern in VERDICT:
        (line,) = find((mi300 | h100)[name], pattern)
        line = line[re.search(pattern, line).start() :]
        line = textwrap.shorten(line, 70, placeholder=" ...")
        print(f"{stage:9}{decides}\n         {line}")

# %%
# No stage decides what you decided: the sizes of tiles, pointers or
# descriptors, the arguments that you pass, ``num_warps`` and ``num_stages``.

# %%
# TTIR: shapes and types
# ----------------------
#
# *Triton IR* is your kernel without Python. What is a tile in it?

if __name__ == "__main__":
    show(h100["ttir"], r"tt\.(load|store)|\"tt\.reduce\"|-> tensor<8xf32>$")
    texts = {sums[gpu]["ttir"] for gpu in GPUS}
    print(f"{len(GPUS)} GPUs, {len(texts)} text")
    assert len(texts) == 1
    assert not re.search("thread|warp|lane", h100["ttir"])

# %%
# A tile is one value with a shape and a type, and the sum is one operation.
# (``%`` begins the name of a value.) No thread is mentioned, and the text is
# the same for all four GPUs.

# %%
# TTGIR: which thread holds which element
# ---------------------------------------
#
# *Triton GPU IR* has the same operations. What does it add?


def blocked(texts):
    """Return sizePerThread, threadsPerWarp and warpsPerCTA of #blocked."""
    (line,) = find(texts["ttgir"], "^#blocked =")
    lists = re.findall(r"(?:Thread|Warp|CTA) = \[(\d+), (\d+)\]", line)
    return [[int(m), int(n)] for m, n in lists]


if __name__ == "__main__":
    show(h100["ttgir"], r"^#blocked|tt\.load|convert_layout")
    print("On an MI300:")
    show(mi300["ttgir"], "^#blocked =")
    for texts, lanes in ((h100, 32), (mi300, 64)):
        per_thread, threads, warps = torch.tensor(blocked(texts))
        assert threads.prod() == lanes
        assert (per_thread * threads * warps).tolist() == [8, 64]

# %%
# The tile's type has got a *layout*, ``#blocked``, with a number for each
# dimension of the tile. A thread holds ``sizePerThread`` elements side by side,
# ``threadsPerWarp`` threads make a warp, and ``warpsPerCTA`` warps make the
# program (NVIDIA calls it a *CTA*): that is the option ``num_warps``, 4 unless
# you say otherwise. Here the three numbers multiply to the tile's size in each
# dimension. Where they make less, the layout is repeated, and a thread holds
# several such pieces; where they make more, several threads hold the same.
# ``order = [1, 0]`` puts the last dimension first: neighbouring threads hold
# neighbouring elements of a row, so a warp reads whole pieces of memory. A warp
# of an MI300 has 64 threads, hence another layout there. The sums have a layout
# as well, ``#blocked1`` with room for 128 of them, and ``convert_layout`` hands
# them over to the threads that store them.
#
# The compiler chose ``#blocked`` by your pointers and by what is known of the
# arguments. What if nobody knows that 16 divides ``N``?

if __name__ == "__main__":
    any_n = sums["any N"]
    for name, texts in (("16 divides N", h100), ("any N", any_n)):
        print(f"{name}: sizePerThread = {blocked(texts)[0]}")
        show(texts["sass"], "LDG")
    assert blocked(any_n)[0] == [1, 1]
    assert len(find(any_n["sass"], r"LDG\.E R")) == 4

# %%
# Then a row may begin at any element, and no thread loads four at once. So this
# is where the width of a load is decided: ``sizePerThread`` is how many
# elements a thread can load in one instruction. They must follow each other in
# memory, begin at a known multiple of their bytes, and be masked together.
# ``unaligned_rows.py`` takes these apart, and has the remedy.

# %%
# LLVM IR: what one thread does
# -----------------------------
#
# LLVM is the compiler behind many languages. Where are the tile and its sum?

if __name__ == "__main__":
    show(h100["llir"], r"tid\.x\(\)$|ld\.global|= fadd|shfl.*i32 8, i32 31")
    adds = len(find(h100["llir"], "= fadd"))
    shuffles = len(find(h100["llir"], "= .*shfl"))
    print(f"{adds} additions, {shuffles} of them after a shuffle")
    (_, held), (_, lanes), _ = blocked(h100)
    assert adds - shuffles == held - 1
    assert 2**shuffles == lanes == 16

# %%
# The tile is gone. This is the program of one thread, which asks for its
# number, ``tid.x``. It loads four numbers and adds them. The layout puts a row
# into 16 threads of a warp, so four *shuffles* follow. The first adds the sum
# of the thread 8 places away (its shuffle is printed), the next ones 4, 2 and
# 1. The load is in quotation marks there: Triton wrote it in PTX already, and
# LLVM hands it on.

# %%
# PTX: instructions
# -----------------
#
# LLVM has made PTX of it, NVIDIA's assembly language. What is left to decide?

if __name__ == "__main__":
    show(h100["ptx"], r"\.reg|ld\.global|shfl.* 8,|tid\.x")
    virtual = int(re.search(r"%r<(\d+)>", h100["ptx"])[1])
    print(f"{h100['registers']} registers of 32 bits in the machine code")
    assert "ld.global.v4.b32" in h100["ptx"]
    assert h100["registers"] < virtual

# %%
# The instructions are there. But each value has a register of its own. ``.reg``
# declares how many there are of each kind: one bit (``pred``), 32 bits and 64
# bits. Which of them share a real register is still open.

# %%
# SASS: registers and waiting
# ---------------------------
#
# NVIDIA's ``ptxas`` makes SASS of PTX. An H100 executes this:

if __name__ == "__main__":
    show(h100["sass"], "LDG|FADD|SHFL")
    load, add = find(h100["sass"], "LDG|FADD")[:2]
    assert "LDG.E.128 " in load
    assert len(find(h100["sass"], "SHFL")) == shuffles
    busy, waits_for = load.split(":")[2], add.split(":")[0]
    assert int(waits_for) == 2 ** int(busy)

# %%
# ``LDG.E.128`` loads 128 bits into four registers, the named one and the next
# three. ``@P0`` in front of it is the mask. Before that come five fields about
# waiting, for which a warp has a few *scoreboards*:
#
# 1. which scoreboards it waits for, a bit for each, as a decimal number;
# 2. the scoreboard that is busy until the instruction has read its operands;
# 3. the scoreboard that is busy until its result is there;
# 4. ``Y`` if another warp may go first;
# 5. the cycles before the next instruction, hexadecimal.
#
# Here the load keeps a scoreboard busy, and the bit of that scoreboard is in
# front of the first ``FADD``. The SASS at the end of this page lacks these
# fields: it is the work of another tool, ``nvdisasm``.

# %%
# A tl.dot
# --------
#
# The second kernel multiplies matrices: a program walks along ``K`` and adds up
# products of tiles. It loads by *descriptors*. A descriptor knows the address,
# shape and strides of a matrix, and the shape of a tile. Its ``load`` is given
# the place of the tile, and returns 0 outside of the matrix. A descriptor that
# is made in a kernel needs some bytes of the GPU's memory, which
# ``set_allocator`` provides.


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK, BLOCK])
    b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK, BLOCK])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    off_m = tl.program_id(axis=0) * BLOCK
    off_n = tl.program_id(axis=1) * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        a = a_desc.load([off_m, k])  # (BLOCK, BLOCK)
        b = b_desc.load([k, off_n])  # (BLOCK, BLOCK)
        acc = tl.dot(a, b, acc)
    c_desc.store([off_m, off_n], acc.to(tl.float16))


def matmul(a, b):
    """Return the product of contiguous float16 matrices; 8 divides K and N."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=torch.float16, device=a.device)
    grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
    triton.set_allocator(lambda size, *_: a.new_empty(size, dtype=torch.int8))
    matmul_kernel[grid](a, b, c, M, N, K, BLOCK=64)
    return c


# %%
# The check
# ---------
#
# Beside float64 again. At last an element is rounded to the 11 bits of float16.
# What float32 rounded before is far below ``1e-3``.

if __name__ == "__main__":
    for M, N, K in ((96, 80, 144), (100, 72, 136)):
        a = torch.randn(M, K, generator=generator).half().to(DEVICE)
        b = torch.randn(K, N, generator=generator).half().to(DEVICE)
        out, right = matmul(a, b).double(), a.double() @ b.double()
        allowed = 2**-10 * right.abs() + 1e-3
        used = ((out - right).abs() / allowed).max()
        print(f"{M}x{N}x{K}: largest error {used:.2f} of what is allowed")
        torch.testing.assert_close(out, right, rtol=2**-10, atol=1e-3)

# %%
# Where is the dot?
# -----------------
#
# Matrix instructions are particular about who holds what. What does the TTGIR
# of ``matmul_kernel`` say, compiled for an H100?

DOT = {"kernel": "matmul_kernel", "constants": {"BLOCK": 64}}

if __name__ == "__main__":
    three = DOT | {"num_stages": 3}
    jobs = {gpu: three | {"target": target} for gpu, target in GPUS.items()}
    for gpu in ("A100", "H100"):
        for stages in (1, 2, 3, 4):
            options = {"num_stages": stages, "sass": False}
            jobs[gpu, stages] = jobs[gpu] | options
    dots = compile_all(jobs, matmul_kernel)
    dot = dots["H100"]
    show(dot["ttgir"], r"^#(mma|shared) =|warp_group_dot ")
    (ptx, *_) = find(dot["ptx"], "wgmma.mma")
    print("PTX: ", ptx.partition(" ")[0])
    print("SASS:", find(dot["sass"], "HGMMA")[0])
    assert "m64n64k16" in ptx
    assert len(find(dot["sass"], "HGMMA.64x64x16")) == 4

# %%
# ``tl.dot`` has become ``warp_group_dot``. ``memdesc`` is a tile in *shared
# memory*, and the operation reads both tiles from there. ``#shared`` says how
# they lie in it. ``#mma`` is the layout in which the matrix instruction leaves
# the sum. One instruction takes 16 columns of ``a``, so a ``tl.dot`` over 64 is
# four of them.

# %%
# Pipelining: num_stages
# ----------------------
#
# While a dot runs, tiles of later iterations can be in flight. How many is
# yours to say, by the option ``num_stages``. An *asynchronous copy* goes from
# the GPU's memory to a buffer in shared memory, and no thread waits for it.


def pipeline(texts):
    """Return what the TTGIR of a dot says of its pipeline."""
    before, _, loop = texts["ttgir"].partition("scf.for")
    copies = "async_(?:tma_)?copy_global_to_local"
    tile = re.search(r"memdesc<(?:(\d+)x)?64x64xf16, #shared", texts["ttgir"])
    return {
        "buffers": int(tile[1] or 1),
        "shared memory": texts["shared"],
        "copies before the loop": len(re.findall(copies, before)),
        "in the loop": len(re.findall(copies, loop)),
    }


if __name__ == "__main__":
    rows = {}
    for gpu in ("A100", "H100"):
        for stages in (1, 2, 3, 4):
            row = pipeline(dots[gpu, stages])
            rows[f"{gpu}, num_stages={stages}"] = row
            assert row["copies before the loop"] == 2 * (stages - 1)
            assert row["buffers"] == max(1, stages - (gpu == "A100"))
            assert row["shared memory"] >= row["buffers"] * 2 * 64 * 64 * 2
    print(pd.DataFrame(rows).T.to_string())
    (wait, *_) = find(dots["H100", 3]["ttgir"], "warp_group_dot_wait")
    print("H100:", wait.partition(" : tensor")[0])
    assert "pendings = 1" in wait

# %%
# With *n* stages, the copies of ``a`` and ``b`` for *n* - 1 iterations start
# before the loop. From then on each iteration starts two copies. (With one
# stage, an A100 loads into registers instead.) The price is shared memory:
# ``a`` and ``b`` have ``buffers`` copies each, of two bytes an element. (The 8
# bytes more for each stage of an H100 tell it that a copy has ended.)
#
# From two stages on, an H100 has one buffer more than an A100. Its dot reads
# the buffers itself, and one dot may be ``pending`` while the next copies
# start.

# %%
# One tl.dot, four GPUs
# ---------------------
#
# The source is the same, and ``num_stages`` is 3. The first table is about
# TTGIR: which operation is ``tl.dot``, where does it find ``a`` and ``b``,
# where is the sum, and how often does the text have the dot? The second one is
# about the machine code. (The table at the end of this page has other figures.
# It compiles the launch above, with the default ``num_stages``.)


def anatomy(texts):
    """Return what became of a dot in TTGIR and in machine code."""
    dots = find(texts["ttgir"], r"tt\.dot |warp_group_dot |tc_gen5_mma ")
    code = texts.get("sass") or texts["amdgcn"]
    found = {
        "operation": re.search(r"\w+\.\w+(?= %)", dots[0])[0],
        "a, b in": "shared memory" if "#smem" in dots[0] else "registers",
        "sum in": "tensor memory" if "#tmem" in dots[0] else "registers",
        "times": len(dots),
    }
    for what, pattern in (
        ("loads", "LDGSTS|UTMALDG|global_load"),
        ("matrix instructions", "HMMA|HGMMA|UTCHMMA|v_mfma"),
    ):
        names = Counter(re.findall(rf"\b(?:{pattern})[\w.]*", code))
        ((name, times),) = names.most_common(1)
        found[what] = f"{times} {name}"
    return found | {k: texts[k] for k in ("registers", "shared")}


if __name__ == "__main__":
    table = pd.DataFrame({gpu: anatomy(dots[gpu]) for gpu in GPUS}).T
    print(table.iloc[:, :4].to_string())
    print(table.iloc[:, 4:].to_string())
    for gpu in GPUS:
        assert ("tensordesc" in dots[gpu]["ttir"]) == (gpu in ("H100", "B200"))
    before, _, loop = dots["B200"]["ttgir"].partition("scf.for")
    assert before.count("tc_gen5_mma ") == loop.count("tc_gen5_mma ") == 1

# %%
# * An **A100** has ``LDGSTS``, the asynchronous copy: each thread copies a
#   piece. Before a dot, threads load ``a`` and ``b`` into registers.
#   ``HMMA.16816`` multiplies 16x16 by 16x8 numbers, in one warp. (From Triton
#   3.8 on the dot is cut into four: one loads while another is computed.)
# * An **H100** has ``UTMALDG`` (*TMA*): a unit of the GPU copies whole tiles.
#   ``HGMMA`` reads them from shared memory. Four warps do one together.
# * A **B200** leaves the sum in *tensor memory*, next to its matrix unit.
#   Threads load it from there after the loop. The text has one dot before the
#   loop and one in it.
# * An **MI300** loads into registers and stores from there to shared memory.
#   The dots of the last two iterations come after the loop, so its code has
#   three times the instructions of one dot.
#
# On NVIDIA's GPUs, where more stays out of registers, a thread needs fewer of
# them: compare the two tables. You asked for TMA by writing descriptors. For a
# GPU without it, TTIR has pointers in their place, and the source need not
# change.

# %%
# Which thread holds what?
# ------------------------
#
# Triton knows each layout as a *linear* one. Write the number of a lane (a
# thread in its warp) in binary. Each of its bits stands for a step through the
# tile, some rows down and some columns to the right, and *xor* combines the
# steps of the bits that are 1. The numbers of registers and of warps have steps
# as well. Here Triton reads its own TTGIR and is asked for the steps. No
# documented function does that, so this may break in another version.


def threads_of(ttgir, gpu, operation, shape):
    """Return which thread holds each element, and the steps of a lane."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget

    context, values = ir.context(), []
    ir.load_dialects(context)
    backend = triton.compiler.make_backend(GPUTarget(*GPUS[gpu]))
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ttgir")
        file.write_text(ttgir)
        module = ir.parse_mlir_module(str(file), context)

    def look(op):
        if op.get_name() == operation:
            values.append(op.get_result(0))

    module.walk(look)
    builder = gluon_ir.GluonOpBuilder(context)
    layout = builder.get_gluon_layout_from_tensor(values[-1])
    linear = builder.to_linear_layout(layout._to_ir(builder), shape)
    steps = linear.reg_bases + linear.lane_bases + linear.warp_bases
    number = torch.arange(2 ** len(steps))
    row = col = torch.zeros_like(number)
    for bit, (down, right) in enumerate(steps):
        is_set = number >> bit & 1
        row, col = row ^ is_set * down, col ^ is_set * right
    threads = torch.full(shape, -1)
    threads[row, col] = number >> len(linear.reg_bases)
    return threads, linear.lane_bases


# %%
# First the tile of ``row_sum_kernel`` on an H100. Each colour is a warp. Each
# number is a lane, written on the four elements that it holds. The steps of a
# lane's bits are printed, the lowest bit first.

PALE = torch.tensor([[8, 9, 10], [10, 9, 7], [8, 9, 8], [9, 8, 10]]) / 10

if __name__ == "__main__":
    threads, steps = threads_of(h100["ttgir"], "H100", "tt.load", [8, 64])
    print("[down, right]:", *steps)
    lanes = 2 ** len(steps)
    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axes.imshow(PALE[threads // lanes], aspect="auto")
    axes.set(xticks=range(0, 64, 8), xlabel="column", ylabel="row")
    for row, col in itertools.product(range(8), range(0, 64, 4)):
        lane = int(threads[row, col] % lanes)
        axes.text(col + 1.5, row, lane, ha="center", va="center", size=8)
        axes.vlines(col + 3.5, row - 0.5, row + 0.5, "white")
    assert torch.equal(threads.unique(), torch.arange(128))
    assert (threads[:, ::4] == threads[:, 3::4]).all()
    plt.show()

# %%
# Then the sum of ``tl.dot`` on all four GPUs, 64 rows of 64 columns. Colours
# are warps again. Black is what thread 0 holds, and orange what thread 1 holds.

if __name__ == "__main__":
    figure, grid = plt.subplots(2, 2, figsize=(5, 5.4), layout="constrained")
    for axes, gpu in zip(grid.flat, GPUS, strict=True):
        ttgir = dots[gpu]["ttgir"]
        threads, steps = threads_of(ttgir, gpu, "arith.truncf", [64, 64])
        axes.imshow(PALE[threads // 2 ** len(steps)])
        axes.set(title=gpu, xlim=(-2, 65), ylim=(65, -2))
        for thread, colour in ((0, "black"), (1, "#e06000")):
            row, col = (threads == thread).nonzero().T
            axes.bar(col, 1, 1, row - 0.5, color=colour)
        used = len(threads.unique())
        print(f"{gpu}: {len(row)} elements in each of {used} threads")
        assert len(row) * used == 64 * 64
    plt.show()

# %%
# These layouts are what the matrix instructions leave behind, each in its own
# way. On an A100 and an H100 a thread holds pairs of neighbours, on a B200 half
# a row, on an MI300 four neighbours.

# %%
# Go further
# ----------
#
# 1. Halve ``BLOCK_N`` of ``row_sum_kernel``. What changes, the number of
#    shuffles or the width of the load? Which option gives the old width back?
# 2. Compile ``matmul_kernel`` for float32 (``"*fp32"``) and an H100. What do
#    its matrix instructions multiply?
# 3. Write its loads with pointers and masks. What do they become on an H100?
#
# ``what_a_launch_compiles.py`` has the options of the compiler, and
# ``unaligned_rows.py`` reads code to mend a kernel. The languages have pages of
# their own: Triton's
# `dialects <https://triton-lang.org/main/dialects/dialects.html>`_, the `LLVM
# language reference <https://llvm.org/docs/LangRef.html>`_, NVIDIA's `PTX ISA
# <https://docs.nvidia.com/cuda/parallel-thread-execution/>`_ and `list of SASS
# instructions <https://docs.nvidia.com/cuda/cuda-binary-utilities/>`_, and
# `AMDGPU in LLVM <https://llvm.org/docs/AMDGPUUsage.html>`_.

# %%
# Answers
# -------
#
# **1.** The load becomes 64 bits wide. 128 threads share 256 elements, two
# each, so a row is still in 16 threads, and there are four shuffles. With
# ``num_warps=2`` a thread holds four again.
#
# **2.** ``HGMMA.64x64x8.F32.TF32``: they round the numbers to TF32, which has
# the 11 bits of float16. ``tl.dot`` has the option ``input_precision``.
#
# **3.** ``LDGSTS``, as on an A100: an H100 uses TMA only for descriptors.
