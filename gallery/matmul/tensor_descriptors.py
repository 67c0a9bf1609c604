# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply matrices through tensor descriptors, which the copy engine of
# Hopper reads, and compare the compiled code."""
# tool = true
#
# [tool.triton-gallery.not_for]
# host_kernel = ["sm_80", "sm_89", "gfx942"]
# device_kernel = ["sm_80", "sm_89", "gfx942"]
# ///
r"""
Tensor descriptors
==================

NVIDIA's GPUs since Hopper have a copy engine. It fetches a whole tile of a
matrix, so threads need not compute addresses. A kernel tells the engine where a
matrix lies by a tensor descriptor. This page multiplies matrices by pointers
and by descriptors, and compares what the compiler makes of both. It compiles
for GPUs that need not be here.

After this page you can

* make a descriptor on the host or in the kernel, and say what each costs;
* read in compiled code what the engine takes off the threads;
* say which matrices the engine does not take;
* see whether the compiler gave the warps different work, as you asked.
"""

# sphinx_gallery_tags = ["matmul", "TMA", "compiler"]
import inspect
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# Whether there is a copy engine. The interpreter can do without.
CAN = DEVICE.type == "cpu" or (
    not torch.version.hip and torch.cuda.get_device_capability() >= (9, 0)
)
if __name__ == "__main__" and not CAN:
    print("This GPU has no copy engine: nothing is launched or timed on it.")

from triton_gallery.bench import gpu_time

# What compiles kernels for any GPU, in a child process: it is imported there
# without the interpreter.
COMPILER = r"""
import json, re, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNELS

COUNTED = {
    "integer": r"U?(IMAD|IADD3|ISETP|IABS|LEA|P?LOP3|SHF|SEL|VIADD)",
    "LDGSTS": "LDGSTS",
    "UTMALDG": "UTMALDG",
    "HGMMA": "HGMMA",
}

def usage(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.check_output(command, text=True)
    return map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())

def code(kernel, tile, gpu, specialize, sass, **options):
    m, n, k = tile
    blocks = {"a_desc": [m, k], "b_desc": [k, n], "c_desc": [m, n]}
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    constants["SPECIALIZE"] = specialize
    kernel, types, by_16 = globals()[kernel], {}, {}
    for place, name in enumerate(kernel.arg_names):
        types[name] = "*fp16" if name.endswith("_ptr") else "i32"
        if name in blocks:
            types[name] = f"tensordesc<fp16{blocks[name]}>"
        elif name in constants:
            types[name] = "constexpr"
        else:
            by_16[place,] = [["tt.divisibility", 16]]
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, types, constants, by_16)
    target = GPUTarget("cuda", gpu, 32)
    try:
        made = triton.compile(source, target=target, options=options)
    except RuntimeError as error:
        return {"failed": str(error)}
    known = dict(zip(["registers", "spilled"], usage(made.asm["cubin"])))
    known["shared memory"] = made.metadata.shared
    known["scratch"] = made.metadata.global_scratch_size
    known["warps"] = made.metadata.num_warps
    split = re.findall(r"ttg\.warp_specialize\(", made.asm["ttgir"])
    known["specialised"] = len(split)
    if sass:
        line = r"(?m)^\S+:\S*\s+(?:@\S+\s+)?([A-Z][A-Z0-9_]*)"
        names = re.findall(line, made.asm["sass"])
        known["instructions"] = len(names)
        for what, which in COUNTED.items():
            known[what] = sum(bool(re.fullmatch(which, n)) for n in names)
    return known

json.dump([code(**job) for job in json.load(sys.stdin)], sys.stdout)
"""


def compile_all(jobs, *kernels):
    """Return a table of what code() gives for each job, by its name."""
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
    return pd.DataFrame(json.loads(child.stdout), index=[*jobs])


# %%
# A descriptor
# ------------
#
# A *tensor descriptor* says where a matrix is: its address, its shape and its
# strides. It has the shape of a tile as well, called its block. A kernel asks
# the copy engine for the tile at a row and a column. One thread asks. The
# engine computes the addresses, and copies the tile to shared memory. (NVIDIA
# calls the engine *TMA*.)
#
# .. code-block:: text
#
#     a            K                            a_desc.load([off_m, k])
#         +-----------------+
#         |                 |             shape    [M, K]
#     M   |       +-----+   | off_m       strides  [K, 1]
#         |       |     |   |             block    [BLOCK_M, BLOCK_K]
#         |       +-----+   |
#         +-----------------+             past the edge: zeros
#                 k
#
# What a tile has past the matrix's edge is zero. What a store has past the edge
# is not written, but for the rest of the last 16 bytes. So this kernel has
# neither masks nor pointers. Each program computes one tile of the product of
# two float16 matrices. (``SPECIALIZE`` is for a later section.)


@triton.jit
def host_kernel(a_desc, b_desc, c_desc, SPECIALIZE: tl.constexpr = False):
    # The descriptors know the sizes: those of matrices and those of tiles.
    BLOCK_M: tl.constexpr = c_desc.block_shape[0]
    BLOCK_N: tl.constexpr = c_desc.block_shape[1]
    BLOCK_K: tl.constexpr = a_desc.block_shape[1]
    # Rows and columns fit int32, even where the number of elements does not.
    off_m = tl.program_id(axis=0) * BLOCK_M
    off_n = tl.program_id(axis=1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    K = a_desc.shape[1]
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZE):
        a = a_desc.load([off_m, k])  # (BLOCK_M, BLOCK_K)
        b = b_desc.load([k, off_n])  # (BLOCK_K, BLOCK_N)
        # Past the edge of K both are zero, so what lies there adds nothing.
        acc = tl.dot(a, b, acc)
    c_desc.store([off_m, off_n], acc.to(c_desc.dtype))


TILE = (128, 128, 64)


def grid_of(c, tile):
    """Return the number of tiles down and across."""
    return triton.cdiv(c.shape[0], tile[0]), triton.cdiv(c.shape[1], tile[1])


def by_host(a, b, tile=TILE, num_warps=8):
    """Multiply row-major matrices; 16 divides the bytes of a row."""
    m, n, k = tile
    c = a.new_empty(a.shape[0], b.shape[1])
    a_desc = TensorDescriptor.from_tensor(a, block_shape=[m, k])
    b_desc = TensorDescriptor.from_tensor(b, block_shape=[k, n])
    c_desc = TensorDescriptor.from_tensor(c, block_shape=[m, n])
    launch = host_kernel[grid_of(c, tile)]
    launch(a_desc, b_desc, c_desc, num_warps=num_warps)
    return c


# %%
# Here the launcher makes the descriptors, on the host: the driver encodes 128
# bytes for each matrix, and they travel with the kernel's arguments. A kernel
# can make its own descriptors instead, from pointers. Each program writes them
# to the GPU's memory, and the engine reads them from there. For that memory
# Triton asks an *allocator*, which we have to provide.


@triton.jit
def device_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    a_desc = tl.make_tensor_descriptor(
        a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BLOCK_M, BLOCK_K]
    )
    b_desc = tl.make_tensor_descriptor(
        b_ptr, shape=[K, N], strides=[N, 1], block_shape=[BLOCK_K, BLOCK_N]
    )
    c_desc = tl.make_tensor_descriptor(
        c_ptr, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N]
    )
    host_kernel(a_desc, b_desc, c_desc)


def by_kernel(a, b, tile=TILE, num_warps=8):
    """Do the same, with descriptors that the kernel makes."""
    # The allocator is that of one context. A thread of its own, as autograd has
    # for a backward, needs to set it again.
    triton.set_allocator(lambda size, *_: a.new_empty(size, dtype=torch.int8))
    return by_pointers(a, b, tile, num_warps, kernel=device_kernel)


# %%
# With pointers, the kernel computes addresses and masks for each tile that it
# loads:


@triton.jit
def pointer_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A row times its stride may be beyond int32.
    pid_m = tl.program_id(axis=0).to(tl.int64)
    pid_n = tl.program_id(axis=1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)  # (BLOCK_K,)
    a_ptrs = a_ptr + offs_m * K + offs_k[None, :]  # (BLOCK_M, BLOCK_K)
    b_ptrs = b_ptr + offs_k[:, None].to(tl.int64) * N + offs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # Zeros past the end of K, or the next row would be added.
        mask_k = offs_k < K - k
        a = tl.load(a_ptrs, mask=(offs_m < M) & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & (offs_n < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        # A step along K is rows of b, which may be beyond int32 as well.
        b_ptrs += BLOCK_K * tl.cast(N, tl.int64)
    c_ptrs = c_ptr + offs_m * N + offs_n  # (BLOCK_M, BLOCK_N)
    c = acc.to(tl.float16)  # (BLOCK_M, BLOCK_N)
    tl.store(c_ptrs, c, mask=(offs_m < M) & (offs_n < N))


def by_pointers(a, b, tile=TILE, num_warps=8, kernel=pointer_kernel):
    """Do the same with pointers, for rows of any length."""
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    kernel[grid_of(c, tile)](a, b, c, M, N, K, *tile, num_warps=num_warps)
    return c


WAYS = {
    "pointers": by_pointers,
    "descriptors by the host": by_host,
    "descriptors by the kernel": by_kernel,
}

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(rows, columns):
    """Return a random float16 matrix."""
    x = torch.randn(rows, columns, generator=generator, device=DEVICE)
    return x.half()


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum of ``K`` products in float32 is off by at most
# ``K`` roundings of :math:`2^{-24}`, of the sum of the products' magnitudes.
# The result is rounded once more, to float16.


def error_of(out, a, b):
    """Return the error as a part of what is allowed."""
    a, b = a.double(), b.double()
    expected = a @ b
    allowed = a.shape[1] * 2**-24 * (a.abs() @ b.abs())
    allowed += 2**-10 * (expected.abs() + 2**-14)
    return (out.double() - expected) / allowed


if __name__ == "__main__" and CAN:
    a, b = random(208, 80), random(80, 144)
    for way, multiply in WAYS.items():
        error = error_of(multiply(a, b), a, b)
        print(f"{way}: error {error.abs().max():.2f} of the allowed")
        torch.testing.assert_close(error, 0 * error, rtol=0, atol=1)

# %%
# The verdict
# -----------
#
# What does the compiler make of the three, for an H100? ``compile_all``, in the
# opening, compiles them in a child process, out of the interpreter's reach.
# ``compiler_stages.py`` explains how to compile for a GPU that is not there.
# The compiler is told that 16 divides addresses and sizes, as a launch would
# tell it.


def job(kernel, tile=TILE, gpu=90, num_warps=8, **more):
    """Return how to compile a kernel of this page."""
    found = {"kernel": kernel, "tile": tile, "gpu": gpu, "sass": True}
    return found | {"num_warps": num_warps, "specialize": False} | more


KERNELS = [pointer_kernel, host_kernel, device_kernel]

if __name__ == "__main__":
    names = [kernel.fn.__name__ for kernel in KERNELS]
    jobs = {way: job(name) for way, name in zip(WAYS, names, strict=True)}
    table = compile_all(jobs, *KERNELS)
    print(table.drop(columns=["warps", "specialised"]).T.to_string())
    pointers, host, kernel = (table.loc[way] for way in WAYS)
    for row in ("registers", "instructions", "integer", "LDGSTS"):
        assert host[row] < pointers[row]
    assert pointers["UTMALDG"] == host["LDGSTS"] == kernel["LDGSTS"] == 0
    assert host["UTMALDG"] == kernel["UTMALDG"] > 0
    assert pointers["HGMMA"] == host["HGMMA"] == kernel["HGMMA"]
    assert host["scratch"] == 0 < kernel["scratch"]

# %%
# And on the GPU, if there is one: the GPU time and the CPU time of a call, in
# microseconds, for a large and a small product. ``torch.matmul`` calls cuBLAS.

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    rows = {}
    for size in (4096, 512):
        a, b = random(size, size), random(size, size)
        calls = {way: partial(call, a, b) for way, call in WAYS.items()}
        calls["cuBLAS"] = partial(torch.matmul, a, b)
        for way, (ms, *_, cpu, _) in gpu_time(calls).items():
            rows[size, way] = {"GPU us": 1000 * ms, "CPU us": cpu}
    print(pd.DataFrame(rows).T.round(1).to_string())

# %%
# What is gone?
# -------------
#
# ``integer`` counts the instructions that compute with integers. ``LDGSTS`` is
# an asynchronous copy of up to 16 bytes for each thread. With ``UTMALDG`` one
# thread asks the copy engine for a whole tile. Most integer instructions are
# gone, and the registers for addresses and masks. The multiplications,
# ``HGMMA`` (``wgmma`` in PTX), are the same. On an H200, the large product is
# faster with descriptors by the host, and each call costs the CPU more. What a
# program has in registers to spare, it can use for a larger tile, or for work
# on the result.

# %%
# Who makes the descriptor?
# -------------------------
#
# ``scratch`` is what the allocator is asked for, in bytes for each program. A
# kernel that makes its descriptors has more instructions, too, and each program
# executes them before its first load. In the table of times, that costs the
# small product most.
#
# Make a descriptor on the host when its shape is known at the launch, as here.
# The CPU pays for it at each call. Make it in the kernel when the kernel alone
# knows the shape. That is so for the matrices of many experts, and for a
# sequence whose length is on the GPU.

# %%
# What does the engine not take?
# ------------------------------
#
# The engine wants rows of adjacent elements. Each row begins at a multiple of
# 16 bytes. A descriptor on the host is checked when it is made:


def refusal(x):
    """Return why the engine does not take a matrix."""
    try:
        TensorDescriptor.from_tensor(x, block_shape=[16, 16])
    except AssertionError as error:
        return str(error)
    return "taken"


if __name__ == "__main__":
    x = random(24, 24)
    views = {
        "x[:, :21]": x[:, :21],
        "x[:, :21].contiguous()": x[:, :21].contiguous(),
        "x[:, 1:]": x[:, 1:],
        "x[:, 8:]": x[:, 8:],
        "x[:, ::2]": x[:, ::2],
        "x.T": x.T,
    }
    found = {name: refusal(view) for name, view in views.items()}
    for name, why in found.items():
        print(f"{name:24}{why}")
    taken = [name for name, why in found.items() if why == "taken"]
    assert taken == ["x[:, :21]", "x[:, 8:]"]

# %%
# So the length of a row may be odd, but not the step from row to row. In
# float16, 8 elements are 16 bytes.
#
# * For ``x.T``, describe ``x`` and write ``.T`` after the load.
#   ``persistent_matmul.py`` does that.
# * For an odd step or address, copy the matrix into one with longer rows, or
#   load it with pointers.
#
# A descriptor in the kernel is not checked. The kernel is compiled before the
# strides and the address are known. So its launcher has to check them.

# %%
# And on a GPU without the engine?
# --------------------------------
#
# There the compiler makes pointers and masks of the descriptors. An A100 has
# asynchronous copies, so we look for them:

if __name__ == "__main__":
    jobs = {name: job(name, gpu=80) for name in names[:2]}
    table = compile_all(jobs, *KERNELS)
    columns = ["registers", "spilled", "instructions", "LDGSTS", "UTMALDG"]
    print(table[columns].T.to_string())
    assert (table["UTMALDG"] == 0).all()
    assert (table["LDGSTS"] > 0).tolist() == [True, False]

# %%
# The kernel with descriptors compiles, but none of its loads is asynchronous.
# So nothing is loaded while tiles are multiplied. Write pointers for that GPU.

# %%
# Warps with different work
# -------------------------
#
# In the kernels above, all warps do all things. With *warp specialisation* one
# warp starts the copies, and others multiply. ``warp_specialize=True`` on a
# loop asks the compiler for that. The compiler may fail, or silently do
# nothing. The TTGIR tells: it has an operation ``ttg.warp_specialize``, or not.


def outcome(found):
    """Return in words what came of warp_specialize=True."""
    if found["specialised"] > 0:
        return f"done: {found['warps']:.0f} warps"
    return "ignored" if found["registers"] > 0 else "the compiler fails"


ASKED = [
    (gpu, tile, num_warps)
    for gpu in (90, 100)
    for tile in ((64, 128, 64), (128, 128, 64), (128, 256, 64))
    for num_warps in (4, 8)
]

if __name__ == "__main__":
    ask = partial(job, "host_kernel", specialize=True, sass=False)
    jobs = {
        asked: ask(tile=asked[1], gpu=asked[0], num_warps=asked[2])
        for asked in ASKED
    }
    table = compile_all(jobs, host_kernel)
    names = [
        (f"sm_{gpu}", f"{m}x{n}", f"{num_warps} warps")
        for gpu, (m, n, _), num_warps in ASKED
    ]
    table.index = pd.MultiIndex.from_tuples(names)
    print(f"Triton {triton.__version__}: warp_specialize=True is")
    print(table.apply(outcome, axis=1).unstack().to_string())
    for (gpu, _, num_warps), found in table.iterrows():
        if (gpu, num_warps) == ("sm_90", "8 warps"):
            assert outcome(found) == "ignored"

# %%
# The GPU sm_90 is an H100 or H200, and sm_100 a B200. You ask for four or eight
# warps; the compiler adds some for the copies. With eight warps, the code for
# an H100 has no warps with different work. So whoever asks should look into the
# TTGIR, as this cell does.

# %%
# Proof
# -----
#
# Sizes below, at and above those of a tile. Whoever made the descriptors, the
# bits are the same. With pointers, rows have any length:

if __name__ == "__main__" and CAN:
    for M, K, N in ((1, 8, 8), (128, 64, 128), (129, 136, 264)):
        a, b = random(M, K), random(K, N)
        c = by_host(a, b)
        assert error_of(c, a, b).abs().max() <= 1
        torch.testing.assert_close(by_kernel(a, b), c, rtol=0, atol=0)
    a, b = random(129, 21), random(21, 35)
    assert error_of(by_pointers(a, b), a, b).abs().max() <= 1

# %%
# Go further
# ----------
#
# 1. A tensor of shape (batch, tokens, heads, 128) is contiguous. Which shape
#    and strides describe one head of one batch as a matrix?
# 2. A kernel looks for the maximum of each row. What is wrong with zeros past
#    the edge, and what does ``TensorDescriptor`` have for it?
# 3. In float32, of how many elements does the step between two rows have to be
#    a multiple?
#
# To read on:
#
# * ``persistent_matmul.py`` makes an op of descriptors.
# * ``unaligned_rows.py`` is about pointers at odd addresses.
# * NVIDIA on the copy engine:
#   https://docs.nvidia.com/cuda/cuda-c-programming-guide/

# %%
# Answers
# -------
#
# **1.** The shape is (tokens, 128) and the strides are (heads * 128, 1). The
# address is that of ``x[batch, 0, head]``. ``x[batch, :, head]`` has all three,
# so ``from_tensor`` takes it.
#
# **2.** A row of negative numbers would have the maximum 0. With
# ``padding="nan"`` the tile has NaN past the edge, which the kernel can replace
# by ``-inf``. NaN that are in the matrix are lost with them.
#
# **3.** Of four: an element has four bytes.
