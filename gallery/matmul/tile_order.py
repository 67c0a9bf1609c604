# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Tile order, stages and tuning
=============================

The kernel of ``matmul.py`` computes one tile of the result in each program.
This page leaves that as it is, and turns what stands around it: the order in
which programs take tiles, the copies that run ahead of the loop, the width of a
load, and the size of a tile. Then it counts what still separates the kernel
from the vendor's library.

After this page you can

* order programs so that those which run together read the same tiles;
* find in compiled code what ``num_stages`` does, and what it takes;
* keep loads 16 bytes wide for any layout, and for matrices of odd sizes;
* tune a product for each shape, and know what tuning costs;
* count what a program does besides multiplying.
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
from collections import Counter, OrderedDict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.library import Library, triton_op, wrap_triton

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")


def gpu_time(calls, turns=50):
    """Time a dictionary of calls by turns, each with the L2 cache emptied.

    Returns for each the median of its GPU time in milliseconds, the 20th and
    the 80th percentile, its CPU time in microseconds, and whether the GPU had
    to wait for the CPU. The GPU sleeps before a call: that hides the launch.
    """
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    seen = {name: [] for name in calls}
    for turn in range(-5, turns):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(3_000_000)  # cycles of its clock, about 1.5 ms
            cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            cpu = time.perf_counter() - began
            end.record()
            late = start.query()  # the GPU got there before the CPU was done
            torch.cuda.synchronize()
            if turn >= 0:  # those before compile, tune and warm up
                seen[name].append((start.elapsed_time(end), cpu * 1e6, late))
    low, middle, high = turns // 5, turns // 2, turns * 4 // 5
    found = {}
    for name, rows in seen.items():
        gpu, cpu, late = map(sorted, zip(*rows, strict=True))
        found[name] = gpu[middle], gpu[low], gpu[high], cpu[middle], late[high]
    return found


def rate_table(times, x, unit, work):
    """Return a data frame of rates: work(size) for each millisecond.

    ``times`` has, for each size, what ``gpu_time`` returned.
    """
    import pandas as pd

    rows = []
    for size, calls in times.items():
        for name, (median, fast, slow, cpu, late) in calls.items():
            rates = [work(size) / ms for ms in (median, slow, fast)]
            rows.append([size, name, *rates, cpu, late])
    columns = [x, "series", unit, "low", "high", "CPU us", "late"]
    return pd.DataFrame(rows, columns=columns)


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
# needs a strip of rows of A and a strip of columns of B, and a kernel with one
# tile for each program loads each strip again for each tile in its way:

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
# It can afford this only if most loads never reach the GPU's memory. Between
# the multiprocessors and the memory lies the L2 cache. What one program has
# loaded, another finds there, if it comes soon enough. Programs start in the
# order of their ids, and the kernel decides which tile an id stands for. Row by
# row is the plain order. The *grouped* order goes down ``GROUP_M`` tiles before
# it goes on to the right. Here twelve programs run at a time:
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
# All else is the kernel of ``matmul.py``. ``GROUP_M = 1`` gives its order.


@triton.jit
def tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Return the row and the column of a program's tile."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    # The last group may be lower. Else some tiles would be left out.
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
    # Half precision would stop growing at 2048.
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
    """Return the product of two matrices in float16."""
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
# A sum of ``K`` terms in float32 is off by at most :math:`K \cdot 2^{-24}` of
# the sum of their magnitudes, and the result is rounded once more. The tiles
# are small here, so that there are several groups.


def check(function, a, b):
    """Return the largest error as a part of what is allowed; at most 1."""
    c, K = function(a, b).double(), a.shape[1]
    right, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    unit = 2.0 ** (-53 if a.dtype == torch.float64 else -24)
    # A whole unit of the last bit: the interpreter cuts where a GPU rounds.
    last = torch.finfo(a.dtype)
    allowed = (K + 1) * unit * size + last.eps * right.abs() + last.tiny
    part = (c - right).abs() / allowed
    torch.testing.assert_close(part, part.clamp(max=1), rtol=0, atol=0)
    return part.max().item()


if __name__ == "__main__":
    small = partial(matmul_in_order, GROUP_M=3, tile=(64, 64, 32))
    part = check(small, *random(300, 45, 200))
    print(f"largest error: {part:.2f} of what is allowed")

# %%
# How fast?
# ---------
#
# PyTorch calls cuBLAS, the vendor's library, which is the roof here. The rate
# counts two operations for each of the ``M N K`` products.


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


if __name__ == "__main__" and DEVICE.type == "cuda":
    for size in (2048, 4096, 8192):
        operands = random(size, size, size)
        ops = contestants(matmul_in_order).items()
        tried = {name: partial(op, *operands) for name, op in ops}
        print(f"M = N = K = {size}: {rates(tried, size, size, size)} TFLOP/s")

# %%
# What does the order change?
# ---------------------------
#
# Take two matrices of 8192 x 8192, larger than the L2 cache. A program with a
# tile of 128 x 256 fills a multiprocessor. An H200 has 132 of these: the first
# *wave* are programs 0 to 131. The figure shows their tiles in two orders.
# Orange are the strips of A, on the left, and of B, on top, that the wave
# reads. (Without a GPU, the page takes the numbers of an H200.)

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
# Row by row, the wave reads five strips of A and all of B. Grouped, it reads 8
# strips of A and half of B. **The table is a model**: of the first wave, the
# bytes of the different strips, which have to come from memory, the bytes that
# its programs load, and how many of these loads can hit the L2 if the wave runs
# in step. The last column simulates an L2 of this GPU's size, for all waves. It
# forgets what was used least recently (*LRU*). Real caches do more.


def simulate(tiles, capacity, step=512):
    """Return the bytes that an LRU cache of so many bytes has to fetch."""
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
# The wave's tiles cover an area, and their strips are shortest if the area is
# square in elements. With tiles of 128 x 256, that is a group of about
# :math:`\sqrt{132 \cdot 256 / 128} \approx 16`. Up to 4 a wave still reads all
# of B. Is the model right? **This is measured**, in TFLOP/s by ``GROUP_M``:

if __name__ == "__main__" and DEVICE.type == "cuda":
    operands = random(SIZE, SIZE, SIZE)
    tried = {g: partial(matmul_in_order, *operands, g) for g in GROUPS}
    print(rates(tried, SIZE, SIZE, SIZE))

# %%
# What does num_stages do?
# ------------------------
#
# A load from memory takes hundreds of cycles. A program that loads, waits and
# multiplies would leave the tensor cores idle meanwhile. With ``num_stages``,
# the compiler *pipelines* the loop: it has copies for later rounds under way
# while it multiplies. We compile the kernel for an H100, in a child process
# that needs no GPU, and read the TTGIR. (``compiler_stages.py`` explains it,
# and ``compile_all`` stands in the opening of this page.)

BLOCKS = {"BLOCK_M": TILE_M, "BLOCK_N": TILE_N, "BLOCK_K": 64, "GROUP_M": 8}
# Which strides are 1, for A and B as they lie: along rows or along columns
LAYOUTS = {
    "A, B": ("stride_ak", "stride_bn"),
    "A, B.T": ("stride_ak", "stride_bk"),
    "A.T, B": ("stride_am", "stride_bn"),
    "A.T, B.T": ("stride_am", "stride_bk"),
}
SIZES_16 = ["M", "N", "K"]
STRIDES = ["stride_am", "stride_ak", "stride_bk", "stride_bn"]


def job(layout="A, B", by_16=(*SIZES_16, *STRIDES), gpu=90, **options):
    """Return what answer() takes: as a launch of 128 x 256 x 64 would be."""
    constants = BLOCKS | dict.fromkeys(LAYOUTS[layout], 1)
    constants |= options.pop("constants", {})
    usual = {"kernel": "matmul_kernel", "warps": 8, "stages": 3} | options
    return usual | {"gpu": gpu, "constants": constants, "by_16": [*by_16]}


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
# copies for the first two rounds start. Each round of the loop waits until its
# own tiles have arrived, starts the multiplication, waits for the one of the
# round before, and starts the copies for two rounds ahead, into the buffers
# that the round before has read. The loads of the kernel were turned into
# *asynchronous copies*: a thread starts one and goes on, and nothing passes
# through its registers. The table has one to five stages, on an H100 (sm_90)
# and on an L4 (sm_89).

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
# On an H100 the tensor cores read both tiles from shared memory, while the next
# copies arrive, so each stage is a buffer: 48 KiB with these tiles, and the
# fifth is too many. The L4's instructions read registers, so a buffer is free
# again as soon as it is read, and there is one less. On it these tiles fit
# with three stages at most. What are stages worth? On a GPU:

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
        print(tile, rates(tried, SIZE, SIZE, SIZE), "TFLOP/s")

# %%
# Which loads are wide?
# ---------------------
#
# An asynchronous copy moves 4, 8 or 16 bytes for a thread. Triton notes of each
# integer argument whether it is 1 and whether 16 divides it, and compiles for
# that. So a stride of 1 is known, and with it the direction in which elements
# lie side by side. Do all four layouts get copies of 16 bytes? And what if the
# sizes are multiples of 8, or odd? We count the copies ahead of the loop, what
# the compiled loop has of copies, loads and instructions, and the bytes of
# registers that spill to memory.

OPCODE = r"(?m)^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)"


def loop_of(sass):
    """Return the shortest loop that multiplies, as text."""
    loops = []
    for label in re.findall(r"(?m)^(\.L_x_\d+):", sass):
        body = sass.split(f"\n{label}:")[1]
        if f"`({label})" in body:  # a jump back to it
            loops.append(body[: body.rindex(f"`({label})")])
    return min((loop for loop in loops if "MMA" in loop), key=len)


def widths(made):
    """Return a row of a table: how a compiled kernel loads and stores."""
    loop = Counter(re.findall(OPCODE, loop_of(made["sass"])))
    wide = sum(n for op, n in loop.items() if re.match(r"LDGSTS.*128", op))
    narrow = sum(n for op, n in loop.items() if op.startswith("LDG.E.U16"))
    early = [
        step for place, step, _ in steps(made["ttgir"]) if place == "before"
    ]
    return {
        "copies ahead": "".join(early).count("copy"),
        "copies of 16 B": wide,
        "loads of 2 B": narrow,
        "instructions": loop.total(),
        "registers": made["REG"],
        "spilled": made["STACK"],
    }


if __name__ == "__main__":
    jobs = {layout: job(layout) for layout in LAYOUTS}
    jobs["A, B, multiples of 8, or odd"] = job(by_16=[])
    jobs["A, B, odd K alone"] = job(by_16=["N", "stride_bk"])
    plain = compile_all(jobs, tile_of, matmul_kernel)
    found = {name: widths(made) for name, made in plain.items()}
    print(pd.DataFrame(found).T.to_string())

# %%
# All four layouts are read by copies of 16 bytes, and the kernel has no switch
# for them. If 16 divides neither sizes nor strides, each element is a load of
# its own: it goes to a register, and from there to shared memory. Nothing is
# copied ahead, and some registers spill.
#
# Two remedies, for two cases:
#
# * **8 divides the sizes**, as for rows of 1000. Nothing forbids copies of 16
#   bytes, and only the compiler does not know it. So a constant ``VEC_AK`` says
#   how many elements of A lie side by side along K, and the kernel computes
#   ``stride_am // VEC_AK * VEC_AK``. That is ``stride_am`` again, but known to
#   be a multiple. (``unaligned_rows.py`` explains the trick.)
# * **Odd sizes.** Rows of 8193 elements begin at any address, and no copy of 4
#   bytes can be used. The launcher copies the operand once into a buffer whose
#   rows begin at multiples of 16 bytes, with zeros behind each row:
#
# .. code-block:: text
#
#     K = 5, 4 elements side by side       the buffer, 8 elements a row
#
#     a0 a1 a2 a3 a4 | b0 b1 b2 ..         a0 a1 a2 a3 a4  0  0  0
#     b3 b4 | c0 ..                        b0 b1 b2 b3 b4  0  0  0
#
# The copy reads and writes an operand once. The product reads it once for each
# row or column of tiles. So an operand is copied unless the other is narrow.

# %%
# Can the masks go?
# -----------------
#
# The loop compares for every copy, in three dimensions. For M and N there is a
# simpler way: a tile at the edge goes on at the first row. ``offs_m % M`` is
# computed once, before the loop. It loads some rows in vain, and the mask of
# the store drops their results. For K there is none, for a wrong term would be
# added to right sums. But if ``BLOCK_K`` divides ``K``, nothing overruns. A
# constant ``EVEN_K`` tells the compiler. The table behind the op says what the
# loop has left of its instructions.

# %%
# Which tile?
# -----------
#
# A larger tile loads less for each product: ``1 / BLOCK_M + 1 / BLOCK_N``
# elements. A smaller one gives more programs, and two of them
# fit on a multiprocessor, so that one stores while the other multiplies. Which
# one wins depends on the shape, so ``triton.autotune`` times all candidates.
# ``autotune.py`` explains it. Three decisions are the product's own:
#
# * *Its own list for each kind.* Up to 32 rows, tiles of 16 or 32 rows waste
#   less. Float32 in full precision runs without tensor cores, and float64 has
#   twice the bytes: both take smaller tiles.
# * *The key.* Tuning again for each number of tokens would stop a server again
#   and again. The key has the sizes rounded up to three bits, 5000 to 5120.
# * *The clock.* 25 ms for each candidate instead of Triton's 125.

# %%
# The op
# ------
#
# The op takes matrices of any strides and has a backward: the gradients are
# products of transposed operands, by the same op. On a GPU a call goes straight
# to the launcher, and ``torch.compile`` looks into the ``triton_op``, as the
# page ``what_a_call_costs.py`` explains.

TUNED_MATMUL_NAMESPACE = "triton_gallery"
TUNED_MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# BLOCK_M, BLOCK_N, BLOCK_K, warps and stages; the first fits every GPU
TUNED_MATMUL_TILES = {
    "few rows": [
        (16, 64, 128, 4, 3),
        (16, 32, 128, 4, 5),
        (16, 64, 128, 4, 5),
        (16, 128, 128, 8, 3),
        (32, 32, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (32, 128, 64, 4, 4),
    ],
    "2 bytes": [
        (64, 128, 64, 4, 3),
        (64, 64, 64, 4, 5),
        (128, 64, 64, 4, 4),
        (64, 256, 64, 4, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
    ],
    "4 bytes": [
        (64, 64, 16, 4, 3),
        (32, 32, 32, 4, 3),
        (64, 64, 32, 4, 3),
        (64, 128, 16, 8, 3),
        (128, 64, 16, 8, 3),
        (128, 128, 16, 8, 3),
    ],
    "8 bytes": [
        (64, 64, 16, 4, 3),
        (32, 32, 32, 4, 3),
        (64, 64, 16, 8, 3),
        (64, 128, 16, 8, 3),
        (128, 64, 16, 8, 3),
    ],
}
TUNED_MATMUL_FEW = 32  # rows
TUNED_MATMUL_GROUP = 8
TUNED_MATMUL_COPY = 128  # an operand is copied if the other is wider
TUNED_MATMUL_PITCH = 2**24  # 128 of them fit into int32
TUNED_MATMUL_KEY = ["like_m", "like_n", "like_k", "VEC_AK", "VEC_BK"]


@triton.jit
def _tuned_matmul_tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M):
    """Return the row and the column of a program's tile, in groups of rows."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    # The last group has what is left. Without this, tiles would be missed.
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    return first_m + place % height, place // height


@triton.jit(do_not_specialize=["M", "like_m", "like_n", "like_k"])
def _tuned_matmul_kernel(
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
    like_m,  # for the key of autotune alone
    like_n,
    like_k,
    ACC: tl.constexpr,
    VEC_AM: tl.constexpr,  # elements of A that lie side by side along M
    VEC_AK: tl.constexpr,
    VEC_BK: tl.constexpr,
    VEC_BN: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides K
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # The compiler learns only here that rows begin at multiples of 16 bytes.
    stride_am = stride_am // VEC_AK * VEC_AK
    stride_ak = stride_ak // VEC_AM * VEC_AM
    stride_bk = stride_bk // VEC_BN * VEC_BN
    stride_bn = stride_bn // VEC_BK * VEC_BK
    pid = tl.program_id(axis=0)
    pid_m, pid_n = _tuned_matmul_tile(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    # In int32 a product with a stride would overflow past element 2**31.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    # Past the edge the first rows come again, and the loop needs no mask for
    # them. Wide loads may take what pads a row: the store leaves it out.
    a_m = offs_m % (tl.cdiv(M, VEC_AM) * VEC_AM)  # (BLOCK_M,)
    b_n = offs_n % (tl.cdiv(N, VEC_BN) * VEC_BN)  # (BLOCK_N,)
    a_ptrs = a_ptr + a_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + b_n[None, :] * stride_bn
    # Along K the padding is zeros, which add nothing.
    a_end = tl.cdiv(K, VEC_AK) * VEC_AK
    b_end = tl.cdiv(K, VEC_BK) * VEC_BK
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)  # (BLOCK_M, BLOCK_N)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)  # (BLOCK_M, BLOCK_K)
            b = tl.load(b_ptrs)  # (BLOCK_K, BLOCK_N)
        else:
            a = tl.load(a_ptrs, mask=(offs_k < a_end - k)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(offs_k < b_end - k)[:, None], other=0.0)
        # "ieee": float32 is not rounded to TF32 before it is multiplied.
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    c = acc.to(c_ptr.dtype.element_ty)  # (BLOCK_M, BLOCK_N)
    tl.store(c_ptrs, c, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def _tuned_matmul_clock(call, quantiles):
    """Time a candidate, in a fifth of the time of Triton's own clock."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def _tuned_matmul_tuner(tiles):
    """Return the kernel, tuned over tiles."""
    configs = []
    for BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages in tiles:
        blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
        options = {"num_warps": num_warps, "num_stages": num_stages}
        configs.append(triton.Config(blocks, **options))
    return triton.autotune(
        configs=configs[:1] if triton.knobs.runtime.interpret else configs,
        key=TUNED_MATMUL_KEY,
        do_bench=_tuned_matmul_clock,
    )(_tuned_matmul_kernel)


TUNED_MATMUL_TUNED = {
    kind: _tuned_matmul_tuner(tiles)
    for kind, tiles in TUNED_MATMUL_TILES.items()
}


def _tuned_matmul_kind(M, dtype):
    """Return which of the lists of tiles is for so many rows."""
    few = M <= TUNED_MATMUL_FEW and dtype.itemsize == 2
    return "few rows" if few else f"{dtype.itemsize} bytes"


def _tuned_matmul_like(n):
    """Return a size rounded up to three bits; a symbolic one as it is."""
    if not isinstance(n, int):
        return n
    step = max(1, triton.next_power_of_2(n) // 8)
    return triton.cdiv(n, step) * step


def _tuned_matmul_operand(x, copy):
    """Return x, and how many elements lie side by side along each dimension.

    Where rows do not begin at multiples of 16 bytes, it is one. If ``copy``
    is true, such an operand is copied, and zeros pad its rows.
    """
    vec = 16 // x.element_size()
    begins = x.storage_offset() % vec == 0
    for dim in (1, 0):
        aligned = x.stride(1 - dim) % vec == 0 and x.shape[dim] % vec == 0
        if begins and aligned and x.stride(dim) == 1:
            return x, 1 if dim else vec, vec if dim else 1
    if not copy:
        return x, 1, 1
    # Rows of the copy are what lies side by side.
    transposed = x.stride(0) == 1 and x.shape[0] < TUNED_MATMUL_PITCH
    rows = x.T if transposed else x
    width = rows.shape[1]
    buffer = x.new_empty(rows.shape[0], triton.cdiv(width, vec) * vec)
    buffer[:, :width] = rows
    buffer[:, width:] = 0
    rows = buffer[:, :width]
    return (rows.T, vec, 1) if transposed else (rows, 1, vec)


def _tuned_matmul_check(a, b):
    """Raise for what the op does not take."""
    for x in (a, b):
        if x.dtype not in TUNED_MATMUL_ACC:
            raise TypeError(f"tuned_matmul takes float tensors, not {x.dtype}")
    if a.dtype != b.dtype:
        raise TypeError(
            f"tuned_matmul takes one dtype, not {a.dtype}, {b.dtype}"
        )
    if a.device != b.device:
        raise ValueError(
            f"tuned_matmul takes one device, not {a.device}, {b.device}"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "tuned_matmul takes an (M, K) and a (K, N) matrix, "
            f"not {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if max(a.stride(1), b.stride(0)) >= TUNED_MATMUL_PITCH:
        raise ValueError(
            "tuned_matmul takes strides along K below "
            f"{TUNED_MATMUL_PITCH}, not {a.stride(1)} and {b.stride(0)}"
        )


def _tuned_matmul_launch(a, b, wrap=lambda kernel: kernel):
    _tuned_matmul_check(a, b)
    (M, K), N, dtype = a.shape, b.shape[1], a.dtype
    if M == 0 or N == 0 or K == 0:
        return a.new_zeros(M, N)
    c = a.new_empty(M, N)
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        a, b = a.float(), b.float()  # which tl.dot gets wrong there
    copy = M > TUNED_MATMUL_COPY and N > TUNED_MATMUL_COPY
    a, VEC_AM, VEC_AK = _tuned_matmul_operand(a, copy)
    b, VEC_BK, VEC_BN = _tuned_matmul_operand(b, copy)

    def grid(config):
        tiles_m = triton.cdiv(M, config["BLOCK_M"])
        return (tiles_m * triton.cdiv(N, config["BLOCK_N"]),)

    kind = _tuned_matmul_kind(M, dtype)
    kernel = wrap(TUNED_MATMUL_TUNED[kind])
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        kernel[grid](
            a,
            b,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            *map(_tuned_matmul_like, (M, N, K)),
            ACC=TUNED_MATMUL_ACC[dtype],
            VEC_AM=VEC_AM,
            VEC_AK=VEC_AK,
            VEC_BK=VEC_BK,
            VEC_BN=VEC_BN,
            EVEN_K=all(K % tile[2] == 0 for tile in TUNED_MATMUL_TILES[kind]),
            GROUP_M=TUNED_MATMUL_GROUP,
        )
    return c


@triton_op(f"{TUNED_MATMUL_NAMESPACE}::tuned_matmul", mutates_args={})
def tuned_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices, as a @ b.

    Takes an (M, K) and a (K, N) matrix of one dtype, float16, bfloat16, float32
    or float64, with any strides. The result has their dtype and is contiguous.
    Sums are in float32, for float64 in float64; float32 is multiplied in full
    precision, not in TF32. The first call with new sizes tunes, and the result
    is the same each time after it. Sizes that lie close together share what was
    tuned. Raises TypeError for other dtypes and for two that differ, and
    ValueError for shapes that do not fit, tensors on two devices and strides
    along K of 2**24 or more. Has a gradient, which has one itself.
    """
    return _tuned_matmul_launch(a, b, wrap_triton)


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
TUNED_MATMUL_LIBRARY = Library(TUNED_MATMUL_NAMESPACE, "FRAGMENT")
TUNED_MATMUL_LIBRARY.impl("tuned_matmul", _tuned_matmul_launch, "CUDA")


def _tuned_matmul_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _tuned_matmul_gradient(ctx, grad):
    a, b = ctx.saved_tensors
    by_a, by_b = ctx.needs_input_grad
    return (
        tuned_matmul(grad, b.T) if by_a else None,
        tuned_matmul(a.T, grad) if by_b else None,
    )


tuned_matmul.register_autograd(
    _tuned_matmul_gradient, setup_context=_tuned_matmul_setup
)

# %%
# Is it what we wanted? First the compiled code, on any machine, with tiles of
# 128 x 256 x 64. ``VEC`` is 8 where a row lies, and nothing else is known.


def op_job(layout, even, by_16=("N",), **options):
    along_ak, along_bk = (
        s in LAYOUTS[layout] for s in (STRIDES[1], STRIDES[2])
    )
    constants = {"VEC_AM": 1 if along_ak else 8, "VEC_AK": 8 if along_ak else 1}
    constants |= {
        "VEC_BK": 8 if along_bk else 1,
        "VEC_BN": 1 if along_bk else 8,
    }
    constants |= {"EVEN_K": even} | options.pop("constants", {})
    options |= {"kernel": "_tuned_matmul_kernel", "constants": constants}
    return job(layout, by_16, **options)


OP = _tuned_matmul_tile, _tuned_matmul_kernel

if __name__ == "__main__":
    jobs = {f"{one}, masks of K": op_job(one, even=False) for one in LAYOUTS}
    jobs |= {f"{one}, EVEN_K": op_job(one, even=True) for one in LAYOUTS}
    jobs["A, B, odd N"] = op_job("A, B", even=False, by_16=())
    of_op = compile_all(jobs, *OP)
    found = {f"{x}, masks of M, N, K": widths(plain[x]) for x in LAYOUTS}
    found |= {name: widths(made) for name, made in of_op.items()}
    print(pd.DataFrame(found).T.to_string())

# %%
# With ``VEC`` no size needs to be a multiple of 16. Without masks every loop is
# shorter than that of the first kernel. With masks of K alone it is not, for
# ``A, B`` and ``A.T, B``: K ends at one place for A and at another for B, since
# one of them may be padded. Where ``N`` is odd, the result is stored by 2
# bytes, and registers may spill around the store. What is it worth? On a GPU,
# each step with tiles of 128 x 256 x 64 and 3 stages, and then the op:

LADDER = [(8192, 8192, 8192), (4096, 4096, 14336), (8191, 4097, 8193)]


def fixed(a, b, copy):
    """Return the product by the op's kernel with one tile for all shapes."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    a, *vec_a = _tuned_matmul_operand(a, copy)
    b, *vec_b = _tuned_matmul_operand(b, copy)
    grid = (triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N),)
    sizes = M, N, K, *a.stride(), *b.stride(), M, N, K
    constants = tl.float32, *vec_a, *vec_b, K % 64 == 0
    options = BLOCKS | {"num_warps": 8, "num_stages": 3}
    _tuned_matmul_kernel[grid](a, b, c, *sizes, *constants, **options)
    return c


RUNGS = {
    "row by row": partial(matmul_in_order, GROUP_M=1),
    "grouped": partial(matmul_in_order, GROUP_M=8),
    "fewer masks, VEC": partial(fixed, copy=False),
    "rows copied": partial(fixed, copy=True),
    "the op: tuned": tuned_matmul,
    "cuBLAS": torch.mm,
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = {}
    for shape in LADDER:
        operands = random(*shape)
        tried = {name: partial(f, *operands) for name, f in RUNGS.items()}
        name = " x ".join(map(str, shape))
        ladder[name] = rates(tried, *shape, turns=10)
    print("TFLOP/s", pd.DataFrame(ladder).to_string(), sep="\n")

# %%
# What does tuning cost, and who wins?
# ------------------------------------
#
# The first call with new sizes compiles and times each candidate. The second
# call is an ordinary one. We print both, and the winner of each shape. (What
# Triton's cache has on disk is not compiled again.) The sizes are those of
# layers in models: tokens x K x N.

TOKENS = [1, 16, 128, 1024, 4096]
LAYERS = [(4096, 14336), (7168, 2048)]


def seconds(call):
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__" and DEVICE.type == "cuda":
    for (K, N), M in itertools.product(LAYERS, TOKENS):
        call = partial(tuned_matmul, *random(M, K, N))
        first, second = seconds(call), seconds(call)
        kind = _tuned_matmul_kind(M, torch.float16)
        best = TUNED_MATMUL_TUNED[kind].best_config
        print(f"{M} x {K} x {N}: first call {first:.2f} s", end=", ")
        print(f"second {1e3 * second:.2f} ms", end=", ")
        blocks = " x ".join(map(str, best.kwargs.values()))
        print(f"{blocks}, {best.num_warps} warps, {best.num_stages} stages")

# %%
# What to look for: where there are few tiles, small ones keep more
# multiprocessors busy; where there are many, large ones load less. And a wave
# that is nearly empty takes as long as a full one, as a section below counts.

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
        a, b = random(40, 70, 100)
        a_t, b_t = a.T.contiguous().T, b.T.contiguous().T
        check(tuned_matmul, a_t, b)
        check(tuned_matmul, a, b_t)
        check(tuned_matmul, a_t, b_t)
        check(tuned_matmul, a[::2, ::2], b[::2, 3:])
        check(tuned_matmul, a[:1].expand(40, 70), b)
        for M, K, N in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
            assert not tuned_matmul(*random(M, K, N)).any()

# %%
# ``gradcheck`` compares the backward with finite differences, and
# ``gradgradcheck`` the backward of the backward:

a, b = random(3, 4, 5, torch.float64)
with one_candidate():
    torch.testing.assert_close(tuned_matmul(a, b), a @ b)

if __name__ == "__main__":
    with one_candidate():
        inputs = a.requires_grad_(), b.requires_grad_()
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
# as a Llama of 8 billion parameters has them, whose weight lies as (N, K). The
# rate of few tokens is set by the memory, which has to deliver the weight.
# ``skinny_matmul.py`` is for those.

SIZES = [1, 16, 64, 256, 1000, 4096, 8192]
LAYER = 4096, 14336


def calls(M, backward=False):
    a, b = random(M, *LAYER, dtype=torch.bfloat16)
    b = b.T.contiguous().T
    ops = contestants(tuned_matmul).items()
    if not backward:
        return {name: partial(op, a, b) for name, op in ops}
    a, b = a.requires_grad_(), b.requires_grad_()
    g, _ = random(M, LAYER[1], 1, dtype=torch.bfloat16)
    grad = partial(torch.autograd.grad, retain_graph=True)
    return {name: partial(grad, op(a, b), (a, b), g) for name, op in ops}


def work(M):
    """Return operations, so that by milliseconds they are TFLOP/s."""
    return 2e-9 * M * LAYER[0] * LAYER[1]


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: gpu_time(calls(M), turns=20) for M in SIZES}
    results = rate_table(times, "M", "TFLOP/s", work)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="M", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="forward")

# %%
# The backward has two products, and so twice the operations:

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {M: gpu_time(calls(M, True), turns=10) for M in (256, 1000, 4096)}
    results_backward = rate_table(times, "M", "TFLOP/s", lambda M: 2 * work(M))
    print("backward", results_backward.to_string(), sep="\n")

# %%
# This is what a call costs the CPU, in microseconds. The launcher looks up the
# tuned config by its key each time:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["M"] == 1000].set_index("series")["CPU us"]
        print(cost.round(1).to_dict())

# %%
# Why is it not yet cuBLAS?
# -------------------------
#
# The tables above say by how much. Why can be counted in the compiled code,
# without a clock. First the loop of the op's kernel, by what its instructions
# are for. A multiprocessor has four schedulers, and each issues an instruction
# of one of its warps in a cycle. The 989 TFLOP/s of an H200's data sheet are
# 4096 operations in a cycle for each of 132 multiprocessors, at 1.83 GHz.

PURPOSE = {
    "multiply": r"HGMMA",
    "copy": r"LDGSTS|LDGDEPBAR",
    "read shared memory": r"LDS",
    "wait": r"DEPBAR|BAR|WARP|NOP|MEMBAR",
    "addresses, masks, counting": r"U?(IMAD|IADD|ISETP|SEL|LEA|LOP|SHF|PRMT)",
}


def purposes(loop):
    """Return how many instructions of a loop have each purpose."""
    found = Counter()
    for op in loop:
        fits = (k for k, v in PURPOSE.items() if re.match(rf"({v})\d*\b", op))
        found[next(fits, "other")] += 1
    return found


if __name__ == "__main__":
    made = of_op["A, B, EVEN_K"]
    loop = loop_of(made["sass"])
    found = purposes(re.findall(OPCODE, loop))
    for purpose, count in found.most_common():
        print(f"{purpose:28}{count:4}")
    print(f"cycles to issue them, 8 warps: {found.total() * 8 // 4}")
    print(f"cycles to multiply: {2 * TILE_M * TILE_N * 64 // 4096}")
    pairs = set(re.findall(r"LDGSTS.*\[(R\d+)\.64", loop))
    _, _, rest = made["sass"].partition(loop)
    print(f"{len(pairs)} pairs of registers hold addresses of copies")
    print(f"copies behind the loop: {rest.count('LDGSTS')}")
    print(f"stores behind the loop: {rest.count('STG')}")

# %%
# * **The loop has room.** The multiplication is four instructions, which keep
#   the tensor cores busy for longer than it takes to issue all others. But all
#   warps go the same way: they wait for copies, multiply, then copy.
# * **Every thread copies.** Each has to know its addresses, keep them in
#   registers and move them on, which is most of the loop. GPUs since Hopper
#   have a copy engine that takes a tile by one instruction of one thread.
# * **The end is bare.** Behind the loop the program stores its tile and starts
#   no copy, for it has no next tile. With one program on a multiprocessor, the
#   tensor cores are idle meanwhile, and at the start of the next program as
#   well.
#
# The last loss is the wave that is not full. How many programs fit on a
# multiprocessor follows from registers and shared memory. The rest is division.


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
        blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
        kind = {"warps": warps, "stages": stages, "constants": blocks}
        jobs[BLOCK_M, BLOCK_N] = op_job("A, B.T", even=True, **kind)
    rows = []
    for (tile, made), (*_, warps, _) in zip(
        compile_all(jobs, *OP).items(), TILES, strict=True
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
# *Busy* is the share of places that have a tile, if all tiles take as long and
# waves do not overlap. Smaller tiles fill the last wave better, and load more
# for each product. ``persistent_matmul.py`` answers all of these points: it
# takes the copy engine, and a program there goes on from tile to tile.

# %%
# Reading the result
# ------------------
#
# An H200 has 989 TFLOP/s for 4.8 TB/s by its data sheet, about 200 operations
# for a byte. A weight in bfloat16 is read at least once, and gives ``M``
# operations for a byte. So up to about 200 tokens the memory bounds the
# product, and beyond that the tensor cores do. What these may wait for is
# counted above. At 1000 tokens, compare with the table of waves: how many tiles
# are there for how many places?

# %%
# Go further
# ----------
#
# 1. The order goes down the rows of A in groups. When would groups of columns
#    be better?
# 2. The result of a product with an odd ``N`` has rows that begin at odd
#    addresses, and is stored by 2 bytes. Which change of the op gives wide
#    stores, and what is its price?
#
# To read on:
#
# * ``persistent_matmul.py`` takes up the points above.
# * Triton's third tutorial, on the matrix product, has grouped order as well:
#   https://triton-lang.org/main/getting-started/tutorials/
# * How a kernel in CUDA comes near to cuBLAS, step by step:
#   https://siboehm.com/articles/22/CUDA-MMM

# %%
# Answers
# -------
#
# **1.** The area of a wave should be square, and either way can make it so. It
# differs where a group cannot be full: with two tiles along M and hundreds
# along N, a group has two rows, and the wave reads many columns once each. No
# order helps there, since every column is needed once for each row of tiles.
# Groups of columns are the same order for the transposed product.
#
# **2.** Allocate the result with rows of a multiple of 8 elements, pass its
# stride to the kernel, and return the first ``N`` columns. The result is then
# not contiguous, and many ops that follow copy it.
