# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Change the order in which programs take tiles and how early they copy them,
# and count what still holds a product up."""
# tool = true
# ///
r"""
Tile order and stages
=====================

The kernel of ``matmul.py`` computes one tile of the result in each program.
This page keeps its arithmetic, and changes two other things: the order in
which programs take tiles, and how early a program starts to copy what it
multiplies later. Then it counts what still holds the kernel up, and lists why
a matmul may be slower than cuBLAS, the vendor's library.

After this page you can

* order programs so that those which run together read the same tiles;
* compute what an order reads from memory, and say what the model leaves out;
* find in compiled code what ``num_stages`` does, and what it takes;
* count what a program does besides multiplying, and find what to mend first.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "compiler"]
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict
from functools import partial
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

from triton_gallery.bench import gpu_time

CHILD = r"""
import json, re, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNELS

def said(tool, *options):
    command = [getattr(triton.knobs.nvidia, tool).path, *options]
    return subprocess.run(command, capture_output=True, text=True).stdout

def answer(kernel, gpu, constants, by_16, warps, stages):
    kernel = globals()[kernel]
    types = {n: "*fp16" if n[-3:] == "ptr" else "i32" for n in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    known = {n for n in types if n[-3:] == "ptr" or n in by_16} - {*constants}
    places = [i for i, n in enumerate(types) if n in known]
    hints = {(i,): [["tt.divisibility", 16]] for i in places}
    source = triton.compiler.ASTSource(kernel, types, constants, hints)
    options = {"num_warps": warps, "num_stages": stages}
    target = GPUTarget("cuda", gpu, 32)
    made = triton.compile(source, target=target, options=options)
    ttgir = re.sub(r"#loc.*\n| loc\([^)]*\)", "", made.asm["ttgir"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = said("nvdisasm", "--print-code", file.name)
        usage = said("cuobjdump", "--dump-resource-usage", file.name)
    found = {"ttgir": ttgir, "sass": sass, "shared": made.metadata.shared}
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
# The product of an (M, K) and a (K, N) matrix is ``a @ b``. Its floor is to
# read each operand once and to write the result once. But a tile of the result
# needs a whole strip of A, its rows, and a whole strip of B, its columns. With
# one tile for each program, every tile in a row of tiles loads the same strip
# of A again, and every tile in a column the same strip of B. Here are the bytes
# for tiles of 128 x 256. (The floor includes the result, the loads do not.)

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(M, K, N, dtype=torch.float16):
    """Return two matrices to multiply."""
    kind = {"device": DEVICE, "dtype": dtype, "generator": generator}
    return torch.randn(M, K, **kind), torch.randn(K, N, **kind)


if __name__ == "__main__":
    a, b = random(512, 256, 1024)
    floor = a.nbytes + b.nbytes + (a @ b).nbytes
    strips = 512 // 128 * 1024 // 256 * (128 + 256) * 256 * 2
    print(f"floor {floor / 1e6:.2f} MB; tiles load {strips / 1e6:.2f} MB")

# %%
# The first kernel
# ----------------
#
# Not all of these loads have to reach the GPU's memory. Between the
# multiprocessors and the memory lies the L2 cache. What one program has loaded,
# another finds there, if it comes soon enough. Programs start in the order of
# their ids, and the kernel decides which tile an id stands for. Row by row is
# the plain order. The *grouped* order goes down ``GROUP_M`` tiles before it
# goes on to the right. Here twelve programs, 0 to 11, run at a time:
#
# .. code-block:: text
#
#     row by row, GROUP_M = 1             grouped, GROUP_M = 3
#
#              columns of B                        columns of B
#            +-----------------------+           +-----------------------+
#     rows   |  0  1  2  3  4  5  6  7 |  rows   |  0  3  6  9 12 15 18 21 |
#     of A   |  8  9 10 11 12 ..       |  of A   |  1  4  7 10 13 ..       |
#            | 16 17 ..                |         |  2  5  8 11 14 ..       |
#            +-----------------------+           +-----------------------+
#     ids 0 to 11 read 2 rows + 8 columns        3 rows + 4 columns
#
# A group is ``GROUP_M`` rows of tiles, from the left edge to the right.
# ``tile_of`` finds the tile of an id. All else is the kernel of ``matmul.py``,
# whose order is that of ``GROUP_M = 1``.


@triton.jit
def tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Return the row and the column of a program's tile."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # A group has GROUP_M * tiles_n tiles: these are the rows above its own.
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    # The last group may have fewer rows. With GROUP_M rows, some of its ids
    # would stand for tiles below the matrix, and some tiles would have no id.
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    return first_m + place % height, place // height


@triton.jit
def matmul_kernel(
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
    GROUP_M: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    pid_m, pid_n = tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    # In int32 a product with a stride would overflow past element 2**31.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    in_m, in_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    # In float16, 2048 + 1 is 2048: a sum would stop growing.
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)  # (BLOCK_M, BLOCK_N)
    for k in range(0, K, BLOCK_K):
        in_k = offs_k < K - k
        # What is masked is 0, and adds nothing to the sum.
        a = tl.load(a_ptrs, mask=in_m & in_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=in_k[:, None] & in_n, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(tl.float16), mask=in_m & in_n)


def matmul_in_order(a, b, GROUP_M=8, tile=(128, 256, 64), warps=8, stages=3):
    """Return the product of two float16 matrices, and check nothing."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    grid = (triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]),)
    sizes = M, N, K, *a.stride(), *b.stride(), *tile, GROUP_M
    options = {"num_warps": warps, "num_stages": stages}
    matmul_kernel[grid](a, b, c, *sizes, **options)
    return c


# %%
# Is it right?
# ------------
#
# An addition in float32 is rounded, or cut off. So a sum of ``K`` terms is off
# by at most :math:`K \cdot 2^{-23}` of the sum of their magnitudes, and the
# result is rounded once more. With small tiles, even small matrices have
# several groups, and a last one that is not full.


def check(function, a, b):
    """Return the largest error as a part of what is allowed; at most 1."""
    c, K = function(a, b).double(), a.shape[1]
    right, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    # A whole unit of the last bit: the interpreter cuts where a GPU rounds.
    last = torch.finfo(a.dtype)
    allowed = (K + 1) * 2.0**-23 * size + last.eps * right.abs() + last.tiny
    part = (c - right).abs() / allowed
    torch.testing.assert_close(part, part.clamp(max=1), rtol=0, atol=0)
    return part.max().item()


small = partial(matmul_in_order, tile=(64, 64, 32), warps=4)

if __name__ == "__main__":
    part = check(partial(small, GROUP_M=3), *random(300, 45, 200))
    print(f"largest error: {part:.2f} of what is allowed")

# %%
# The verdict
# -----------
#
# What is the order worth, what are the stages, and both? A GPU prints that.
# With three stages, the copies of a tile start two rounds of the loop before it
# is multiplied. With one stage, nothing is loaded early. PyTorch calls cuBLAS,
# the roof here. The rate counts two operations for each of ``M N K`` products.

VERDICT = {
    "row by row, 1 stage": {"GROUP_M": 1, "stages": 1},
    "grouped, 1 stage": {"GROUP_M": 8, "stages": 1},
    "row by row, 3 stages": {"GROUP_M": 1, "stages": 3},
    "grouped, 3 stages": {"GROUP_M": 8, "stages": 3},
}


def rates(calls, size, turns=20):
    """Return the TFLOP/s of calls, by name, for square matrices."""
    found = gpu_time(calls, turns=turns).items()
    return {name: round(2e-9 * size**3 / times[0]) for name, times in found}


if __name__ == "__main__" and DEVICE.type == "cuda":
    found = {}
    for size in (2048, 4096, 8192):
        operands = random(size, size, size)
        tried = {
            name: partial(matmul_in_order, *operands, **settings)
            for name, settings in VERDICT.items()
        }
        tried["cuBLAS"] = partial(torch.mm, *operands)
        found[size] = rates(tried, size)
    print("TFLOP/s", pd.DataFrame(found).to_string(), sep="\n")

# %%
# What does the order change?
# ---------------------------
#
# Take two matrices of 8192 x 8192, larger than the L2 cache. Only one program
# with a tile of 128 x 256 fits on a multiprocessor, as a later table counts. An
# H200 has 132 multiprocessors, so programs 0 to 131 run first. They are the
# first *wave*. In the figure, their tiles are blue. The strips that they read
# are orange: those of A are on the left, and those of B on top. (Without a GPU,
# the page takes 132 multiprocessors and an L2 of 50 MiB.)

SIZE, TILE_M, TILE_N = 8192, 128, 256
GROUPS = [1, 2, 4, 8, 16, 32]
SMS, L2 = 132, 50 * 2**20
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    SMS, L2 = gpu.multi_processor_count, gpu.L2_cache_size


def in_order(rows, columns, GROUP_M):
    """Return the row and the column of each program's tile, as tile_of."""
    pid = torch.arange(rows * columns)
    first = pid // (GROUP_M * columns) * GROUP_M
    height = (rows - first).clamp(max=GROUP_M)
    place = pid % (GROUP_M * columns)
    return torch.stack([first + place % height, place // height], 1)


if __name__ == "__main__":
    figure, both = plt.subplots(1, 2, figsize=(6, 4.6), layout="constrained")
    for axes, GROUP_M in zip(both, (1, 8), strict=True):
        tiles = in_order(SIZE // TILE_M, SIZE // TILE_N, GROUP_M)
        picture = torch.full((SIZE // TILE_M + 3, SIZE // TILE_N + 3, 3), 0.88)
        rows, columns = (tiles[:SMS] + 3).T
        picture[:3] = picture[:, :3] = 1.0
        orange, blue = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.4, 0.75]])
        picture[rows, 0] = picture[rows, 1] = orange
        picture[0, columns] = picture[1, columns] = orange
        picture[rows, columns] = blue
        axes.imshow(picture, aspect=0.5, interpolation="nearest")
        axes.set(title=f"GROUP_M = {GROUP_M}", xticks=[], yticks=[])
        axes.set(xlabel="tiles of N", ylabel="tiles of M")
    plt.show()

# %%
# Row by row, the wave reads 5 strips of A and all 32 of B. In groups of eight
# rows, it reads 8 strips of A and about half of B. **The table is a model**, no
# measurement. *From memory* are the bytes of the first wave's strips, each
# counted once. *Loaded* is what its programs load, all together. *Hits* is the
# part of the loads that find their bytes in the L2, if the programs go along
# ``K`` in step. The last column is about all waves: what comes from memory if
# an L2 of this GPU's size drops what was used least recently (*LRU*). A real
# cache may choose otherwise.


def simulate(tiles, capacity, step=512):
    """Return the bytes that an LRU cache of ``capacity`` has to fetch.

    The programs of a wave go along K in step, ``step`` elements at a time.
    """
    cache, held, fetched = OrderedDict(), 0, 0
    size = 2 * step * TILE_M, 2 * step * TILE_N
    waves = [wave.tolist() for wave in tiles.split(SMS)]
    for wave, k in itertools.product(waves, range(0, SIZE, step)):
        for tile, which in itertools.product(wave, (0, 1)):
            key = which, tile[which], k
            if key not in cache:
                fetched += size[which]
                held += size[which]
            cache[key] = None
            cache.move_to_end(key)
            while held > capacity:
                held -= size[cache.popitem(last=False)[0][0]]
    return fetched


if __name__ == "__main__":
    rows = []
    for GROUP_M in GROUPS:
        tiles = in_order(SIZE // TILE_M, SIZE // TILE_N, GROUP_M)
        high, wide = (len(ids.unique()) for ids in tiles[:SMS].T)
        memory = 2 * SIZE * (TILE_M * high + TILE_N * wide) / 1e6
        loads = 2 * SIZE * SMS * (TILE_M + TILE_N) / 1e6
        row = [GROUP_M, high, wide, memory, loads, 100 * (1 - memory / loads)]
        rows.append([*row, simulate(tiles, L2) / 1e9])
    names = ["GROUP_M", "strips of A", "of B", "from memory, MB", "loaded, MB"]
    names += ["hits, %", f"LRU of {L2 / 2**20:.0f} MiB, GB"]
    model = pd.DataFrame(rows, columns=names).round(1)
    print("model, not measured:", model.to_string(index=False), sep="\n")

# %%
# Up to ``GROUP_M = 4`` a wave still reads all of B. The wave's tiles cover an
# area of ``GROUP_M * 128`` rows and ``132 / GROUP_M * 256`` columns of the
# result. It reads the fewest bytes if both are equal, for ``GROUP_M`` near
# :math:`\sqrt{132 \cdot 256 / 128} \approx 16`.
#
# How much time is that? The data sheet of an H200 has 4.8 TB/s and 989 TFLOP/s.
# At these rates, the product takes 1.1 ms, and the bytes of the last column 0.5
# ms row by row, or 0.25 ms in groups of 16. The loads of all waves would take
# 2.7 ms without a cache. So in this model the L2 matters most, and with it no
# order is bound by its bytes. The model does not explain all that follows: its
# bytes are about the same up to ``GROUP_M = 4``, and the rates rise there too.
# In the verdict, the order gains most with three stages, at the largest size.
# With one stage it gains nothing there. **This is measured**, in TFLOP/s by
# ``GROUP_M``:

if __name__ == "__main__" and DEVICE.type == "cuda":
    operands = random(SIZE, SIZE, SIZE)
    tried = {g: partial(matmul_in_order, *operands, g) for g in GROUPS}
    print(rates(tried, SIZE))

# %%
# What does num_stages do?
# ------------------------
#
# A load from memory takes hundreds of cycles. A program that loads, waits and
# then multiplies would leave the tensor cores idle while it waits. With
# ``num_stages``, the compiler *pipelines* the loop: copies for later rounds of
# the loop are in flight while it multiplies. We compile the kernel for an H100,
# in a child process that needs no GPU, and read the TTGIR, one of the
# compiler's forms of the kernel. (``compiler_stages.py`` explains it, and
# ``compile_all`` is in the opening of this page.) We print the lines about
# buffers, copies and products, each with its tile's shape. *Wait for copies but
# 2* means: wait until at most two copies are still in flight.

BLOCKS = {"BLOCK_M": TILE_M, "BLOCK_N": TILE_N, "BLOCK_K": 64, "GROUP_M": 8}
# Integers that 16 divides here; a stride along a row is 1.
BY_16 = ["M", "N", "K", "stride_am", "stride_bk"]


def job(gpu=90, blocks=BLOCKS, warps=8, stages=3):
    """Return what answer() takes: as a launch of these blocks would be."""
    constants = blocks | {"stride_ak": 1, "stride_bn": 1}
    found = {"kernel": "matmul_kernel", "gpu": gpu, "constants": constants}
    return found | {"by_16": BY_16, "warps": warps, "stages": stages}


STEPS = {
    "local_alloc": r"ttg\.local_alloc\b.*memdesc<([x\d]+)x",
    "copy, does not wait": r"ttg\.async_copy_global_to_local.*<([x\d]+)x",
    "load, into registers": r"= tt\.load .*tensor<([x\d]+)x!",
    "wait for copies but": r"ttg\.async_wait.*num = (\d+)",
    "multiply": r"(?:warp_group_dot|tt\.dot) .*tensor<([x\d]+)x",
    "wait for products but": r"warp_group_dot_wait.*pendings = (\d+)",
}


def steps(ttgir):
    """Yield where something happens, what it is, and its shape or number."""
    before, loop = re.split(r"\n.* scf\.for ", ttgir, maxsplit=1)
    loop, after = loop.split("scf.yield", maxsplit=1)
    parts = {"before": before, "loop": loop, "after": after}
    for place, part in parts.items():
        for line in part.splitlines():
            for step, pattern in STEPS.items():
                if found := re.search(pattern, line):
                    yield place, step, found[1]


if __name__ == "__main__":
    jobs = {(s, g): job(stages=s, gpu=g) for g in (90, 89) for s in range(1, 6)}
    staged = compile_all(jobs, tile_of, matmul_kernel)
    print("num_stages = 3, on an H100:")
    for place, step, what in steps(staged[3, 90]["ttgir"]):
        print(f"  {place:7} {step:22} {what}")

# %%
# Three buffers lie in shared memory for A and three for B. Before the loop, the
# copies for the first two rounds start, one of A and one of B for each. A round
# waits until its own two tiles have arrived; the next round's may be in flight.
# It starts its multiplication. Then it waits for that of the round before, so
# that the buffers of that round are free, and starts the copies of the round
# after the next, into these buffers. The compiler made *asynchronous copies* of
# the kernel's loads: a thread starts one and goes on, and nothing passes
# through its registers. The table has one to five stages, on an H100 (sm_90)
# and on an L4 (sm_89). *Copies ahead* are those that start before the loop.

FITS = {90: 227, 89: 99}  # KiB of shared memory that a program may have

if __name__ == "__main__":
    rows = []
    for (stages, gpu), made in staged.items():
        found = [*steps(made["ttgir"])]
        buffers = [what for _, step, what in found if step == "local_alloc"]
        ahead = [place for place, step, _ in found if step.startswith("copy")]
        kib, most = made["shared"] // 1024, FITS[gpu]
        row = [f"sm_{gpu}", stages, buffers[0], ahead.count("before"), kib]
        rows.append([*row, "yes" if kib <= most else "no"])
    names = ["GPU", "stages", "buffers of A", "copies ahead", "KiB", "fits"]
    print(pd.DataFrame(rows, columns=names).to_string(index=False))

# %%
# With one stage the loads go into registers, and from there to the one buffer.
# On an H100 the tensor cores read both tiles from shared memory until the
# multiplication has ended. So each stage needs a buffer of its own, 48 KiB with
# these tiles, and five of them are too many. On an L4 the instructions multiply
# registers. A tile is first read into these, its buffer is free at once, and
# there is one buffer less than stages. So three stages of these tiles fit. The
# buffers also decide how many programs share a multiprocessor. With tiles of
# 128 x 128 x 64, an H100 has room for two programs of three stages, but for one
# of four. So there a fourth stage costs more than it gains. On a GPU:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for tile, warps in (((128, 256, 64), 8), ((128, 128, 64), 4)):
        kind, tried = {"tile": tile, "warps": warps}, {}
        for stages in range(1, 6):
            call = partial(matmul_in_order, *operands, **kind, stages=stages)
            try:
                call()
                tried[stages] = call
            except triton.runtime.errors.OutOfResources as error:
                print(f"{stages} stages: {error}")
        print(tile, rates(tried, SIZE), "TFLOP/s")

# %%
# What holds the kernel up?
# -------------------------
#
# The verdict says how far the kernel is from cuBLAS. What may hold it up can be
# counted in its compiled code, without a clock. We sort the instructions of the
# loop with three stages by their purpose, and compare two times of a round:
#
# * to issue its instructions: a multiprocessor has four schedulers, and each
#   issues one instruction of one warp in a cycle. The program has 8 warps;
# * to multiply its tiles: the 989 TFLOP/s of an H200's data sheet are 4096
#   operations in a cycle for each of 132 multiprocessors, at 1.83 GHz.

OPCODE = r"(?m)^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)"


def loop_of(sass):
    """Return the shortest loop that multiplies, as text."""
    loops = []
    for label in re.findall(r"(?m)^(\.L_x_\d+):", sass):
        body = sass.split(f"\n{label}:")[1]
        if f"`({label})" in body:  # a jump back to it
            loops.append(body[: body.rindex(f"`({label})")])
    return min((loop for loop in loops if "MMA" in loop), key=len)


PURPOSE = {
    "multiply": r"HGMMA",
    "copy": r"LDGSTS|LDGDEPBAR",
    "wait for copies, products": r"DEPBAR|WARPGROUP|WARPSYNC|MEMBAR|FENCE",
    "meet all warps": r"BAR",
    "addresses, masks, counting": r"U?(IMAD|IADD|ISETP|SEL|LEA|LOP|SHF|PRMT)",
}


def purposes(loop):
    """Return how many instructions of a loop have each purpose."""
    found = Counter()
    for op in loop:
        fits = (k for k, v in PURPOSE.items() if re.match(v, op))
        found[next(fits, "other")] += 1
    return found


if __name__ == "__main__":
    made = staged[3, 90]
    loop = loop_of(made["sass"])
    # "@!PT" is a condition that never holds.
    issued = "\n".join(x for x in loop.splitlines() if "@!PT" not in x)
    found = purposes(re.findall(OPCODE, issued))
    for purpose, count in found.most_common():
        print(f"{purpose:28}{count:4}")
    print(f"cycles to issue them, 8 warps: {found.total() * 8 // 4}")
    print(f"cycles to multiply: {2 * TILE_M * TILE_N * 64 // 4096}")
    _, _, rest = made["sass"].partition(loop)
    print(f"copies behind the loop: {rest.count('LDGSTS')}")
    print(f"stores behind the loop: {rest.count('STG')}")

# %%
# * **Instructions are not the limit.** The four that multiply take 16 of the
#   round's 64 steps along ``K`` each, and keep the tensor cores busy for longer
#   than it takes to issue the whole loop.
# * **All warps go in step.** They meet at two barriers in a round. One comes
#   before the multiplication, as a warp multiplies what others have copied. The
#   other comes before the copies, which overwrite what another warp may still
#   multiply. A warp that is late holds up all others.
# * **Every thread copies.** It computes the addresses and masks of its copies,
#   which are most of the loop, and it keeps addresses in registers. GPUs since
#   Hopper have a copy engine: one thread asks it for a whole tile by one
#   instruction.
# * **Nothing overlaps a program's end.** After the loop it stores its tile and
#   starts no copy, for it has no next tile. If it is the only program on its
#   multiprocessor, the tensor cores are idle meanwhile, and again until the
#   first tiles of the next program have arrived. The shorter ``K``, the larger
#   is this part of the time.
#
# A wave that is not full costs time as well. From the registers, the shared
# memory and the warps of a program follows how many fit on a multiprocessor at
# a time. All multiprocessors have 132 times as many *places*. A product's
# tiles, divided by the places, are its waves.


def at_a_time(made, warps, registers=65536, shared=228):
    """Return how many programs fit on a multiprocessor of an H200."""
    a_warp = 32 * triton.cdiv(made["REG"], 8) * 8
    kib = made["shared"] / 1024 + 1  # one is taken for each program
    return int(min(registers // (a_warp * warps), shared // kib, 64 // warps))


TILES = [(128, 256, 8, 3), (128, 128, 4, 3), (64, 128, 4, 3)]
SHAPES = [(1024, 7168, 2048), (4096, 4096, 14336), (4096, 2880, 5120)]
SHAPES += [(512, 5120, 151936), (8192, 8192, 8192)]

if __name__ == "__main__":
    jobs = {}
    for BLOCK_M, BLOCK_N, warps, stages in TILES:
        blocks = BLOCKS | {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
        kind = {"warps": warps, "stages": stages}
        jobs[BLOCK_M, BLOCK_N] = job(blocks=blocks, **kind)
    rows = []
    for (tile, made), (*_, warps, _) in zip(
        compile_all(jobs, tile_of, matmul_kernel).items(), TILES, strict=True
    ):
        slots = SMS * at_a_time(made, warps)
        for M, K, N in SHAPES:
            tiles = triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])
            waves = tiles / slots
            busy = 100 * waves / triton.cdiv(tiles, slots)
            row = [f"{tile[0]} x {tile[1]}", slots // SMS, f"{M} x {K} x {N}"]
            rows.append([*row, tiles, round(waves, 2), round(busy)])
    columns = ["tile", "at a time", "M x K x N", "tiles", "waves", "busy, %"]
    print(pd.DataFrame(rows, columns=columns).to_string(index=False))

# %%
# *Busy* is the share of places that have a tile, over all waves, if all tiles
# take equally long and no wave overlaps the next. The first shape has few
# tiles, and the smallest tile fills more of its places. It does not always:
# compare 4096 x 2880 x 5120. And smaller tiles load more for each product.
#
# A place is not a multiprocessor. With tiles of 128 x 128, the first shape has
# 128 programs for 264 places. If the GPU spreads them, only four of its 132
# multiprocessors have no work, though half of the places have none.

# %%
# Why is my matmul slower than cuBLAS?
# ------------------------------------
#
# Look for these, in this order. The words in italics are headings.
#
# 1. **The comparison.** Are both called in rotation, with the same data and a
#    cold L2, and do both take float32 as TF32, or neither? ``benchmarking.py``,
#    and ``matmul.py``, *What becomes of tl.dot?* Small matrices may show the
#    time of the CPU: ``what_a_call_costs.py``.
# 2. **Few rows.** Then the memory sets the pace. ``skinny_matmul.py`` is for up
#    to 64. From 65 to some 500 rows, cuBLAS may be faster than all ops here.
# 3. **Narrow loads.** Unless 16 divides the sizes, and the strides other than
#    1, the compiler may load one element at a time: ``tuned_matmul.py``, *Which
#    loads are wide?*
# 4. **Spilled registers**, as of too large a tile. ``matmul.py``, *How large a
#    tile?*, counts them. None of its tiles has any.
# 5. **Products that wait for each other.** The assembler says so if it is
#    asked: ``tuned_matmul.py``, *Do multiplications wait for each other?*
# 6. **Few tiles, or few in the last wave**, as counted above:
#    ``tuned_matmul.py`` and ``persistent_matmul.py``, *Which tile?* For few
#    rows the sum can be split: ``skinny_matmul.py``, *Split K*.
# 7. **The order of tiles**: *What does the order change?* on this page.
# 8. **Too few stages**: *What does num_stages do?* on this page. To make room
#    for one: ``persistent_matmul.py``, *What does shared memory hold?*
# 9. **Every thread copies.** The copy engine spares that:
#    ``tensor_descriptors.py``, *What is gone?*
# 10. **Each program begins and ends alone.** A persistent one goes on to its
#     next tile: ``persistent_matmul.py``, *Should a program go on to other
#     tiles?*
# 11. **Barriers for all warps.** Some warps can copy and others multiply:
#     ``gluon_matmul.py``, *Who starts the loads?* By itself that gains little
#     there, or loses.

# %%
# Proof
# -----
#
# Every order takes each tile once, also where the last group is not full. The
# kernel is right in each order, for sizes that no block divides, and for
# transposed views:

if __name__ == "__main__":
    for rows, columns in ((1, 1), (7, 5), (8, 3), (3, 20)):
        every = [[m, n] for m in range(rows) for n in range(columns)]
        for GROUP_M in (1, 3, 8):
            found = in_order(rows, columns, GROUP_M).tolist()
            assert sorted(found) == every
    a, b = random(200, 37, 300)
    for GROUP_M in (1, 2, 3, 8):
        multiply = partial(small, GROUP_M=GROUP_M)
        check(multiply, a, b)
        check(multiply, a.T.contiguous().T, b.T.contiguous().T)

# %%
# Go further
# ----------
#
# 1. The order goes down the rows of A in groups. When would groups of columns
#    be better?
# 2. With how many stages do tiles of 128 x 128 x 64 fit on an L4?
#
# To read on:
#
# * ``tuned_matmul.py`` makes an op of this kernel: with loads that are wide for
#   any layout and size, and a tile for each shape.
# * ``persistent_matmul.py`` has the copy engine, and programs that go on from
#   tile to tile.
# * Triton's third tutorial, on the matrix product, has grouped order as well:
#   https://triton-lang.org/main/getting-started/tutorials/
# * How a kernel in CUDA comes near to cuBLAS, step by step:
#   https://siboehm.com/articles/22/CUDA-MMM

# %%
# Answers
# -------
#
# **1.** Seldom. Either kind can make the area of a wave nearly square: with
# tiles of 128 x 256, by about 16 rows of tiles in a group, or by about 8
# columns. But with 17 rows of tiles, the last group of 16 rows would have one
# row alone, for which all of B is read again. Groups of 8 columns do without
# that, if 8 divides the number of columns. ``simulate`` says what that saves.
#
# **2.** A tile of A and one of B are ``(128 + 128) * 64 * 2`` bytes, 32 KiB.
# Three such pairs of buffers fit into 99 KiB. On an L4 there is one buffer less
# than stages, so four stages fit.
