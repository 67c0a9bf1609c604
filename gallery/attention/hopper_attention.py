# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Attend through Hopper's copy engine, order the programs so that none ends long
# after the others, and give warps different work."""
# dtypes = ["float16", "bfloat16"]
# backward = false
# deterministic = true
# longer = "it checks what the copy engine takes, and the GPU"
#
# [tool.triton-gallery.not_for]
# attention_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# walk_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _hopper_attention_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# ///
r"""
Attention on Hopper
===================

On NVIDIA's GPUs from Hopper on, a copy engine can fetch the keys and values, so
that threads compute no addresses. This page has that engine load and store for
the forward of flash attention. Then it decides which program starts first, and
asks the compiler to give the warps of a program different work.

After this page you can

* load a block of a head through a tensor descriptor of four dimensions;
* count how much work each multiprocessor gets in a causal attention;
* order the programs so that none works long after the others;
* say for which loops Triton makes warps with different work, and for which not.
"""

# sphinx_gallery_tags = ["attention", "compute bound", "TMA", "compiler"]
import heapq
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from functools import partial
from itertools import chain
from pathlib import Path

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

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

from triton_gallery.bench import gpu_time, rate_table

SM = 4  # multiprocessors; without a GPU, few programs with many tiles each
if DEVICE.type == "cuda":
    SM = torch.cuda.get_device_properties(DEVICE).multi_processor_count

# What compiles a kernel for an H100, in a child process. There the compiler may
# crash, and is not the interpreter.
COMPILER = r"""
import json, re, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

KERNEL

job = json.load(sys.stdin)
kernel, types, by_16 = globals()[job["kernel"]], {}, {}
for place, name in enumerate(kernel.arg_names):
    types[name] = "*fp16" if name.endswith("_ptr") else "i32"
    if name.endswith("_ptr"):
        by_16[place,] = [["tt.divisibility", 16]]
    if name == "scale":
        types[name] = "fp32"
    if name in job["blocks"]:
        types[name] = f"tensordesc<fp16{job['blocks'][name]}>"
    if name in job["constants"]:
        types[name] = "constexpr"
source = triton.compiler.ASTSource(kernel, types, job["constants"], by_16)
target = GPUTarget("cuda", 90, 32)
made = triton.compile(source, target=target, options=job["options"])
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(made.asm["cubin"])
    file.flush()
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", file.name]
    said = subprocess.check_output(command, text=True)
found = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
text, ptx = made.asm["ttgir"], made.asm["ptx"]
line = r"(?m)^\S+:\S*\s+(?:@\S+\s+)?([A-Z][A-Z0-9_]*)"
names = re.findall(line, made.asm["sass"])
together = re.findall(r"bar\.sync\s+\d+(?:, (\d+))?;", ptx)
warps = made.metadata.num_warps
json.dump({
    "split": "ttg.warp_specialize(" in text,
    "warps": warps,
    "programs": min(65536 // (32 * warps * (-(-int(found[0]) // 8) * 8)),
                    228 * 1024 // (made.metadata.shared + 1024)),
    "registers": int(found[0]),
    "spilled": int(found[1]),
    "shared memory": made.metadata.shared,
    "instructions": len(names),
    "UTMALDG": names.count("UTMALDG"),
    "HGMMA": names.count("HGMMA"),
    "meet": sorted({int(n or 32 * warps) for n in together}),
    "setmaxnreg": sorted(map(int, set(re.findall(
        r"setmaxnreg\S+\s+(\d+)", ptx)))),
}, sys.stdout)
"""


def blocks_of(tile, D):
    """Return the blocks of the descriptors of queries, keys and so on."""
    sizes = {"q_desc": tile[0], "out_desc": tile[0]}
    sizes |= {"k_desc": tile[1], "v_desc": tile[1]}
    return {name: [1, 1, size, D] for name, size in sizes.items()}


def compile_for_h100(
    kernel, blocks, edit=None, num_warps=8, num_stages=2, **constants
):
    """Return what the compiler makes of a kernel, or how it fails."""
    text = inspect.getsource(kernel.fn)
    if edit:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    job = {"kernel": kernel.fn.__name__, "blocks": blocks}
    job |= {"constants": constants, "options": options}
    knobs = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compile.py")
        file.write_text(COMPILER.replace("KERNEL", text))
        how = {"env": os.environ | knobs, "text": True}
        how |= {"input": json.dumps(job), "capture_output": True}
        child = subprocess.run([sys.executable, file], **how)
    return json.loads(child.stdout) if child.returncode == 0 else {}


# What tests a kernel of causal and full attention in another child process.
TEST = r"""
x = [torch.randn(2, 4, 1000, 128, device="cuda").half() for _ in range(3)]
for causal in (False, True):
    expected = torch.nn.functional.scaled_dot_product_attention(
        *x, is_causal=causal)
    torch.testing.assert_close(launch(*x, causal), expected, rtol=0, atol=4e-3)
"""


def answer(kernel, launch):
    """Return what becomes of that test, or that nothing does in 100 s."""
    source = "import math, torch, triton\nimport triton.language as tl\n"
    source += "from triton.tools.tensor_descriptor import TensorDescriptor\n"
    source += f"SM = {SM}\n\n" + inspect.getsource(kernel.fn)
    source += "\n\n" + inspect.getsource(launch)
    source += f"\n\nlaunch = {launch.__name__}" + TEST
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.py")
        file.write_text(source)
        command = [sys.executable, file]
        try:
            child = subprocess.run(command, capture_output=True, timeout=100)
        except subprocess.TimeoutExpired:
            return "no answer"
    return "wrong, or crashed" if child.returncode else "right"


# %%
# In PyTorch
# ----------
#
# ``scaled_dot_product_attention``, SDPA, computes :math:`\mathrm{softmax}(q
# k^T / \sqrt D)\, v` by a library's kernel. Any kernel has to read ``q``, ``k``
# and ``v`` and to write the result: the *floor*. For 32 heads of dimension 128:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


if __name__ == "__main__":
    for length in (1024, 4096, 16384):
        flops, floor = 4 * 32 * length**2 * 128, 4 * 32 * length * 128 * 2
        print(f"{length:5} tokens: {flops / 1e12:.2f} Tflop,", end=" ")
        print(f"floor {floor / 1e6:.0f} MB, {flops / floor:.0f} flop a byte")

# %%
# The first kernel
# ----------------
#
# ``flash_attention_forward.py`` derives the loop below: block by block it adds
# up exponentials in ``total`` and weighted values in ``acc``, and rescales both
# when the maximum ``m`` grows. Here the loads differ. A *tensor descriptor* has
# a tensor's address, shape and strides, and the shape of a block. The kernel
# asks the GPU's copy engine for the block at some coordinates.
# ``tensor_descriptors.py`` counts what that takes off the threads. Here the
# descriptor has four dimensions, and a block is ``BLOCK_N`` keys of one head:
#
# .. code-block:: text
#
#     shape    [batch, heads, length, D]       one head
#     block    [    1,     1, BLOCK_N, D]      +-------+ 0
#                                              |       |
#     k_desc.load([b, h, start, 0])  ------->  | block | start
#                                              |       |
#                                              +-------+ length
#                                                zeros
#
# A *ragged* last block reaches past the end of its head. In one matrix of all
# heads' rows, it would read keys of the next head, and a store would overwrite
# that head's results. With four dimensions, the engine gives zeros past the end
# of each head, and stores nothing there.
#
# With ``s``, a query times a key, a score is ``s * scale``. The kernel finds a
# query's largest ``s``, and multiplies that one by ``scale``. So the scale has
# to be positive. It contains the factor :math:`\log_2 e`, because ``tl.exp2``
# has base 2.


@triton.jit
def attention_kernel(q_desc, k_desc, v_desc, out_desc, scale):
    # The descriptors know the sizes: those of tensors and those of blocks.
    BLOCK_M: tl.constexpr = q_desc.block_shape[2]
    BLOCK_N: tl.constexpr = k_desc.block_shape[2]
    D: tl.constexpr = q_desc.block_shape[3]
    L = k_desc.shape[2]
    off_m = tl.program_id(axis=0) * BLOCK_M
    head, batch = tl.program_id(axis=1), tl.program_id(axis=2)
    q = q_desc.load([batch, head, off_m, 0]).reshape(BLOCK_M, D)
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, L, BLOCK_N):
        k = k_desc.load([batch, head, start, 0]).reshape(BLOCK_N, D)
        s = tl.dot(q, k.T)  # (BLOCK_M, BLOCK_N)
        # Keys past the end are zeros: their score is 0, and would count.
        offs_n = start + tl.arange(0, BLOCK_N)[None, :]
        s = tl.where(offs_n < L, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - m_new[:, None])  # (BLOCK_M, BLOCK_N)
        # What was added up so far had the old maximum.
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        v = v_desc.load([batch, head, start, 0]).reshape(BLOCK_N, D)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        m = m_new
    out = (acc / total[:, None]).to(q.dtype).reshape(1, 1, BLOCK_M, D)
    out_desc.store([batch, head, off_m, 0], out)


TILE = 128, 64, 8, 2  # BLOCK_M, BLOCK_N, warps, stages


def attention(q, k, v, tile=TILE):
    """Return the attention of contiguous (batch, heads, length, D)."""
    (batch, heads, L, D), out = q.shape, torch.empty_like(q)
    m, n, num_warps, num_stages = tile
    pairs = (q, m), (k, n), (v, n), (out, m)
    descs = [TensorDescriptor.from_tensor(x, [1, 1, n, D]) for x, n in pairs]
    options = {"num_warps": num_warps, "num_stages": num_stages}
    grid = (triton.cdiv(L, m), heads, batch)
    attention_kernel[grid](*descs, D**-0.5 * math.log2(math.e), **options)
    return out


# %%
# Is it right?
# ------------
#
# We compare with float64. The probabilities are rounded to the 11 bits of
# float16 before the second product, and so is the result. Together these cost
# at most :math:`2^{-10}` of the largest element of ``v``. We allow twice that.

if __name__ == "__main__" and CAN:
    q, k, v = (random(2, 3, 200, 64) for _ in range(3))
    out, expected = attention(q, k, v), sdpa(q.double(), k.double(), v.double())
    error, atol = (out - expected).abs().max(), 2**-9 * v.abs().max().item()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)

# %%
# How fast?
# ---------
#
# cuDNN and FlashAttention-2 are libraries that SDPA can call. A call has 16384
# tokens in all, in float16, unmasked. A score counts :math:`4 D` operations.


def library(backend, *inputs, **options):
    with sdpa_kernel(backend):
        return sdpa(*inputs, **options)


PEERS = {
    "cuDNN": partial(library, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": partial(library, SDPBackend.FLASH_ATTENTION),
}
TOKENS = 16384  # in all, at each length


def inputs(length, D):
    shape = TOKENS // length, 2048 // D, length, D
    return [random(*shape) for _ in range(3)]


def rates(calls, length, D, part=1):
    """Return the TFLOP/s of calls; ``part`` of all scores are computed."""
    x, work = inputs(length, D), 4e-9 * TOKENS * 2048 * length * part
    found = gpu_time({who: partial(f, *x) for who, f in calls.items()}, 20)
    return {who: round(work / ms) for who, (ms, *_) in found.items()}


if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    for length in (1024, 4096, 16384):
        found = rates({"Triton": attention} | PEERS, length, D=128)
        print(f"{length} tokens, heads of 128, TFLOP/s: {found}")

# %%
# Which tile?
# -----------
#
# For each block of keys, a program takes the maximum of rows and rescales
# ``acc``, and its warps meet at *barriers*: no warp goes on before all are
# there. Larger blocks are fewer, and so are barriers. But they leave less room
# for a second program, which works while the first one waits. A multiprocessor
# has 65536 registers and 228 KB of shared memory for its *programs*.
# *Registers* are those of a thread, *spilled* the bytes that found no register.
# *Stages* are how many blocks of keys may be on their way or in use.
# ``compile_for_h100`` compiles in a child process, and counts what fits:

TILES = [(128, 64, 8, 2), (128, 128, 8, 2)]  # queries, keys, warps, stages
TILES += [(64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2)]

if __name__ == "__main__":
    rows = {}
    for D in (64, 128):
        for *tile, num_warps, num_stages in TILES:
            options = {"num_warps": num_warps, "num_stages": num_stages}
            blocks = blocks_of(tile, D)
            found = compile_for_h100(attention_kernel, blocks, **options)
            of = f"{tile}, {num_warps} warps, {num_stages} stages"
            rows[f"heads of {D}, {of}"] = found
    columns = ["registers", "spilled", "shared memory", "programs"]
    table = pd.DataFrame(rows).T[columns]
    print(table.to_string())
    assert not table["spilled"].any()
    assert table["programs"].iloc[[2, 9]].min() > 1

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    for D in (64, 128):
        tried = {tile: partial(attention, tile=tile) for tile in TILES}
        print(f"heads of {D}, 4096 tokens, TFLOP/s: {rates(tried, 4096, D)}")

# %%
# The op takes the fastest: 64 queries and 128 keys with heads of 64, and 128
# queries and 64 keys with heads of 128. Both have four warps, and more than one
# program fits. With heads of 128, 128 queries are faster than 64, although they
# need nearly all of the 255 registers that a thread can have.

# %%
# Which tile starts first?
# ------------------------
#
# With a causal mask, query ``i`` sees the keys up to ``i``. We call the tiles
# of a head its *rows*. If a block has as many keys as a tile has queries, row
# ``r`` needs ``r + 1`` blocks: the last row works longest. The GPU *hands out*
# the programs in the order of their numbers: a free *place* on a multiprocessor
# gets the next one. If two programs fit on each, the 132 multiprocessors of an
# H200, or of an H100 with SXM, have 264 places. A *persistent* program keeps
# its place, and computes several tiles one after another. Four orders, for
# heads of four rows:
#
# .. code-block:: text
#
#     handed out, by heads       head 0: rows 3 2 1 0    head 1: rows 3 2 1 0
#     handed out, in groups      row 3 of heads 0 to 63, then row 2 of them, ...
#     persistent, by heads       program p: tiles p, p + 264, p + 528, ...
#     persistent, in pairs       rows 3 and 0, or 2 and 1: 5 blocks each
#
# The programs of a head share its keys and values in the L2 cache. So a group's
# heads have at most 16 MB of them together. The run has heads of 128, and tiles
# of 128 queries, as the op. It counts blocks of 128 keys for each place, and
# one more for each tile's beginning and end. It prints the work of the busiest
# place, divided by the mean; the best is 1.


def in_groups(heads, rows, near):
    """Return the tiles of ``near`` heads at a time, the longest first."""
    found = []
    for first in range(0, heads, near):
        some = range(first, min(first + near, heads))
        found += [(h, r) for r in range(rows)[::-1] for h in some]
    return found


def in_pairs(heads, rows):
    """Return pairs of tiles: a long one and a short one of the same head."""
    pairs = [(h, r) for h in range(heads) for r in range((rows + 1) // 2)]
    return [[(h, r) for r in {rows - 1 - r, r}] for h, r in pairs]


def hand_out(tiles, programs):
    """Return the tiles of each place: the first that is free gets one."""
    free = [(0, p) for p in range(programs)]
    found = [[] for _ in range(programs)]
    for tile in tiles:
        busy, p = free[0]
        heapq.heapreplace(free, (busy + tile[1] + 2, p))
        found[p].append(tile)
    return found


def orders(length, heads, block=128, programs=264):
    """Return the work of each place, in four orders."""
    rows, near = triton.cdiv(length, block), 2**24 // (512 * length)
    single, together = (in_groups(heads, rows, n) for n in (1, near))
    pairs = in_pairs(heads, rows)
    dealt = {
        "handed out, by heads": hand_out(single, programs),
        "handed out, in groups": hand_out(together, programs),
        "persistent, by heads": [single[p::programs] for p in range(programs)],
        "persistent, in pairs": [
            [*chain(*pairs[p::programs])] for p in range(programs)
        ],
    }
    return {
        name: sorted(sum(r + 2 for _, r in some) for some in lists)
        for name, lists in dealt.items()
    }


LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]

if __name__ == "__main__":
    # With heads of 128
    table = pd.DataFrame({n: orders(n, TOKENS // n * 16) for n in LENGTHS})
    table = table.map(lambda work: max(work) * len(work) / sum(work))
    print("the busiest over the mean", table.round(3).to_string(), sep="\n")
    assert table.idxmin().eq("handed out, in groups").all()
    assert table.loc["persistent, by heads"].max() > 1.5
    picture = pd.DataFrame(orders(4096, 64))
    title = "4096 tokens: blocks of keys of 264 places, sorted"
    picture.plot(drawstyle="steps-mid", title=title)

# %%
# By heads, the long rows of the last head start when little else is left, and
# end late. In groups, the last tiles are the short ones of several heads. A
# persistent program takes every 264th tile. If a head has 4 or 8 rows, it gets
# the same row each time; of 128 rows, it gets one only 8 lower. Another program
# gets only shorter ones. All pairs are equally long, so the work of two
# programs differs by one pair at most. The op hands out its tiles in groups. At
# 4096 tokens, the busiest place has 15 % more than the mean by heads, and less
# than 1 % more in groups. In the table after the op, the gain is smaller, and
# least with heads of 64.

# %%
# The op
# ------
#
# The op has the first kernel's loop twice, as ``flash_attention_forward.py``
# has: without a mask up to the diagonal, and with one at the diagonal and in a
# ragged last block. Keys past the diagonal's block are not loaded. With heads
# of 128, the two loops spill registers, unlike the first kernel in the table of
# tiles. They are faster than it all the same, as the table after the op shows.
# In *grouped-query attention*, several heads of ``q`` share one of ``k`` and
# ``v``. Strides may be any multiples of 16 bytes, so heads may lie side by side
# in memory; the op copies what the engine does not take. Where ``D`` is less
# than its block of 64 or 128, the engine fills the block with zeros, which add
# nothing to a score. ``persistent_matmul.py`` says why it is a ``custom_op``.

from triton_gallery_ops.hopper_attention import (
    HOPPER_ATTENTION_NEAR,
    HOPPER_ATTENTION_TILES,
    hopper_attention,
)

# %%
# What did each step gain, in TFLOP/s at 4096 tokens? First comes the loop,
# without a causal mask, then the order, with one: half of the operations count.


def one_by_one(q, k, v, causal=True):
    """Return the op's result; its programs are handed out head by head."""
    global HOPPER_ATTENTION_NEAR
    kept, HOPPER_ATTENTION_NEAR = HOPPER_ATTENTION_NEAR, 1
    try:
        return hopper_attention(q, k, v, causal)
    finally:
        HOPPER_ATTENTION_NEAR = kept


if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    for D in (64, 128):
        tile = HOPPER_ATTENTION_TILES[D]
        tried = {"first kernel": partial(attention, tile=tile)}
        tried["the op"] = hopper_attention
        print(f"heads of {D}: {rates(tried, 4096, D)}")
        tried = {"the op, by heads": one_by_one}
        tried["the op"] = partial(hopper_attention, causal=True)
        print(f"heads of {D}, causal: {rates(tried, 4096, D, part=1 / 2)}")

# %%
# Warps with different work
# -------------------------
#
# In the kernels above, all warps of a program do the same, and meet at barriers
# in each block of keys. Two groups of warps that do not meet could take turns:
# one computes exponentials while the other multiplies. With *warp
# specialisation*, the compiler makes two such groups of four warps, and a third
# that only starts copies, for which the two wait. ``warp_specialize=True`` asks
# for it. The kernel below can have it. It is persistent and takes tiles in
# pairs, so the warps that copy can go on to the next tile. The heads of all
# batches are one dimension here:


@triton.jit
def walk_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    scale,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    heads, L = k_desc.shape[0], k_desc.shape[1]
    BLOCK_N: tl.constexpr = k_desc.block_shape[1]
    D: tl.constexpr = k_desc.block_shape[2]
    rows = tl.cdiv(L, BLOCK_M)
    half = tl.cdiv(rows, 2)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    tiles = 2 * tl.cdiv(heads * half - first, programs)
    for tile in tl.range(0, tiles, warp_specialize=SPECIALIZE):
        pair = first + tile // 2 * programs
        row, head = pair % half, pair // half
        row = tl.where(tile % 2 == 0, rows - 1 - row, row)
        off_m, at = row * BLOCK_M, head.to(tl.int64) * L * D
        # Each of the two groups has half of the queries. The compiler can halve
        # the blocks of these two descriptors only if the kernel makes them.
        q_desc = tl.make_tensor_descriptor(
            q_ptr + at, shape=[L, D], strides=[D, 1], block_shape=[BLOCK_M, D]
        )
        out_desc = tl.make_tensor_descriptor(
            out_ptr + at, shape=[L, D], strides=[D, 1], block_shape=[BLOCK_M, D]
        )
        q = q_desc.load([off_m, 0])  # (BLOCK_M, D)
        m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        end = tl.minimum(L, off_m + BLOCK_M) if CAUSAL else L
        # The compiler splits one loop alone, so all scores have the mask.
        for start in range(0, end, BLOCK_N):
            k = k_desc.load([head, start, 0]).reshape(BLOCK_N, D)
            s = tl.dot(q, k.T)  # (BLOCK_M, BLOCK_N)
            if CAUSAL or not EVEN:
                last = L - 1
                if CAUSAL:
                    offs_m = off_m + tl.arange(0, BLOCK_M)[:, None]
                    last = tl.minimum(offs_m, last)  # (BLOCK_M, 1)
                seen = start + tl.arange(0, BLOCK_N)[None, :] <= last
                s = tl.where(seen, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
            p = tl.exp2(s * scale - m_new[:, None])  # (BLOCK_M, BLOCK_N)
            rescale = tl.exp2(m - m_new)
            total = total * rescale + tl.sum(p, axis=1)
            v = v_desc.load([head, start, 0]).reshape(BLOCK_N, D)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
            m = m_new
        out = acc / total[:, None]
        out_desc.store([off_m, 0], out.to(q.dtype))


def walk(q, k, v, causal=False, specialize=True):
    (batch, heads, L, D), out = q.shape, torch.empty_like(q)
    keys = (x.view(batch * heads, L, D) for x in (k, v))
    descs = [TensorDescriptor.from_tensor(x, [1, 128, D]) for x in keys]
    # Descriptors that the kernel makes lie in memory that we provide.
    triton.set_allocator(lambda size, *_: q.new_empty(size, dtype=torch.int8))
    scale, num_warps = D**-0.5 * math.log2(math.e), 4 if specialize else 8
    known = {"CAUSAL": causal, "EVEN": L % 128 == 0, "SPECIALIZE": specialize}
    options = {"BLOCK_M": 128, "num_warps": num_warps, "num_stages": 2}
    walk_kernel[(SM,)](q, *descs, out, scale, **known, **options)
    return out


if __name__ == "__main__" and CAN and DEVICE.type == "cpu":
    x = [random(2, 2, 150, 64) for _ in range(3)]
    for causal in (False, True):
        out, expected = walk(*x, causal), hopper_attention(*x, causal)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)

# %%
# For other kernels, the compiler may crash, or silently do nothing. So we
# compile some forms in child processes. A form is *split* if its TTGIR, which
# is Triton's code for a GPU before PTX, has a ``ttg.warp_specialize``. *Meet*
# lists how many threads the barriers ``bar.sync`` wait for, and ``setmaxnreg``
# how many registers a thread gets. The last form is the first kernel, asked
# too: its launcher, on the host, makes the descriptors of ``q`` and the result.

END = "        out = acc / total[:, None]"
TWICE = """        for start in range(end, L, BLOCK_N):
            k = k_desc.load([head, start, 0]).reshape(BLOCK_N, D)
            acc = tl.dot(tl.dot(q, k.T).to(q.dtype), k, acc)
"""
MASK = "    s = tl.where", "    if start > 0: s = tl.where"
FORMS = {  # an edit of the kernel, or none, and warps
    "not asked": (("=SPECIALIZE)", "=False)"), 8),
    "asked, 8 warps": (None, 8),
    "asked, 4 warps": (None, 4),
    "the mask under an if": (MASK, 4),
    "a second loop": ((END, TWICE + END), 4),
}
HOST = "range(0, L, BLOCK_N)", "tl.range(0, L, BLOCK_N, warp_specialize=True)"


if __name__ == "__main__":
    blocks = {"k_desc": [1, 128, 128], "v_desc": [1, 128, 128]}
    known = {"CAUSAL": True, "EVEN": True, "BLOCK_M": 128, "SPECIALIZE": True}
    ask = partial(compile_for_h100, walk_kernel, blocks, **known)
    forms = {name: ask(*how) for name, how in FORMS.items()}
    host = compile_for_h100(attention_kernel, blocks_of(TILES[1], 128), HOST, 4)
    forms["q by the host"] = host
    columns = ["outcome", "warps", "registers", "spilled", "meet", "setmaxnreg"]
    for found in forms.values():
        said = "split" if found.get("split") else "not split"
        found["outcome"] = said if found else "the compiler fails"
    table = pd.DataFrame(forms).T[columns].astype(object).fillna("")
    print(f"Triton {triton.__version__}:", table.to_string(), sep="\n")
    done = forms["asked, 4 warps"]
    if triton.__version__.startswith(("3.6.", "3.7.")):
        assert (done["outcome"], done["meet"]) == ("split", [128])
        assert {40, 232} <= set(done["setmaxnreg"])
        assert forms["asked, 8 warps"]["outcome"] == "not split"
        assert forms["a second loop"]["outcome"] == "the compiler fails"

# %%
# The form that is split has twelve warps: four that copy, with 40 registers a
# thread, and two groups of four that compute, with 232. The page does not use
# the other two numbers. Each ``bar.sync`` waits for 128 threads, one group. Of
# the forms, one alone is split: it asks for four warps, has one loop over the
# keys and no ``if`` around the mask, and makes the descriptors of ``q`` and the
# result itself. The op has two loops, to spare most blocks the mask.
#
# Is one loop that is split faster than two that are not? On a Hopper GPU, a
# child process tries the split kernel first, as it could crash or hang. If it
# is right, it is timed, too. With Triton 3.6.0 it is wrong or crashes, and the
# question stays open. *Walk* is that kernel with eight warps, not split, and
# blocks of 128 queries and 128 keys. The table of tiles has this tile, too;
# without a causal mask, *walk* has nearly the same rates.

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    hopper = torch.cuda.get_device_capability()[0] == 9
    verdict = answer(walk_kernel, walk) if hopper else "not tried"
    print("split by the compiler, the kernel is:", verdict)
    calls = {"the op": hopper_attention}
    calls["walk"] = partial(walk, specialize=False)
    if verdict == "right":
        calls["split"] = walk
    for D in (64, 128):
        for causal in (False, True):
            some = {w: partial(f, causal=causal) for w, f in calls.items()}
            found = rates(some, 4096, D, part=1 / (1 + causal))
            print(f"heads of {D}, causal={causal}, TFLOP/s: {found}")

# %%
# Proof
# -----
#
# For each element we allow two roundings of :math:`\sum_j p_j |v_j|` and two of
# the result. A rounding is :math:`2^{-11}` in float16. In bfloat16 we allow
# :math:`2^{-7}`, twice a rounding, because the interpreter truncates.

EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
SHAPES = [  # batch, heads, heads of keys, queries, keys, D
    (1, 2, 2, 128, 128, 64),
    (1, 4, 2, 270, 70, 128),
    (2, 3, 1, 33, 150, 80),
    (1, 1, 1, 20, 300, 16),
    (1, 1, 1, 5, 0, 16),
    (1, 2, 1, 0, 7, 16),
]


def reference(q, k, v, causal=False):
    """Return the attention in float64, and the sum of p |v|."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return [sdpa(q, k, t, is_causal=causal) for t in (v, v.abs())]


def worst(out, expected, terms):
    """Return the largest error, as a part of what is allowed."""
    allowed = 2 * EPS[out.dtype] * (terms + expected.abs()) + 1e-300
    return ((out.double() - expected).abs() / allowed).max().item()


if __name__ == "__main__" and CAN:
    for dtype in EPS:
        for batch, heads, shared, LQ, LK, D in SHAPES:
            q = random(batch, heads, LQ, D, dtype=dtype)
            k, v = (random(batch, shared, LK, D, dtype=dtype) for _ in "kv")
            for causal in (False, True):
                out = hopper_attention(q, k, v, causal)
                assert (out.dtype, out.shape) == (dtype, q.shape)
                expected = reference(q, k, v, causal) if out.numel() else None
                assert not expected or worst(out, *expected) <= 1

# %%
# Next: heads side by side in memory, strides to be copied, and a given scale:

if __name__ == "__main__" and CAN:
    q = random(2, 150, 4, 64)[:, :140].transpose(1, 2)
    k = random(2, 400, 2, 64)[:, :100].transpose(1, 2)  # the part of a cache
    v = random(2, 2, 100, 64)
    out = hopper_attention(q, k, v, causal=True)
    assert out.is_contiguous()
    assert worst(out, *reference(q, k, v, causal=True)) <= 1
    columns = k.mT.contiguous().mT  # the engine does not take these strides
    assert torch.equal(hopper_attention(q, columns, v, True), out)
    out = hopper_attention(q, k, v, scale=0.5)
    assert worst(out, *reference(q * 4, k, v)) <= 1

# %%
# An error names what the op does not take:

if __name__ == "__main__" and CAN:
    q = torch.ones(1, 4, 3, 16, device=DEVICE).half()
    for k, scale in ((q.float(), 1.0), (q[..., :4], 1.0), (q, -1.0)):
        try:
            hopper_attention(q, k, k, scale=scale)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark is causal, in float16, with 16384 tokens in all at each length.
# Half of the operations count. ``CPU us`` is what a call costs the CPU, which
# encodes descriptors. If short calls are made one by one, the GPU waits for the
# CPU; ``cuda_graphs.py`` shows how to avoid that.


def benchmark(D):
    ops = {"Triton": partial(hopper_attention, causal=True)}
    ops |= {who: partial(op, is_causal=True) for who, op in PEERS.items()}
    times = {}
    for length in LENGTHS:
        x = inputs(length, D)
        times[length] = gpu_time({w: partial(f, *x) for w, f in ops.items()})
    table = rate_table(
        times, "tokens", "TFLOP/s", lambda length: 2e-9 * TOKENS * 2048 * length
    )
    print(f"heads of {D}", table.to_string(), sep="\n")
    wide = table.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title=f"causal, heads of {D}")
    return table


if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    results = benchmark(D=128)

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    results_of_64 = benchmark(D=64)

# %%
# Reading the result
# ------------------
#
# A multiprocessor of a Hopper GPU does 4096 operations of the tensor cores in a
# cycle, by the data sheets, and 16 exponentials, by CUDA's programming guide.
# So a score's :math:`4 D` operations take 1/8 of a cycle with heads of 128 and
# 1/16 with heads of 64, and its exponential takes 1/16. To be fast, a
# multiprocessor has to do both at the same time. Two programs of the op do so
# if they happen to be at different places of the loop. In
# ``gluon_attention.py``, one program has two groups of warps that do not meet.
#
# With heads of 128, cuDNN is faster at each length. With heads of 64 and a
# causal mask, the two are about equal from 4096 tokens on, and cuDNN is faster
# below. The op is faster than FlashAttention-2 in all rows.

# %%
# Go further
# ----------
#
# Why does the op look for the largest ``s``, and not for the largest score?
#
# To read on:
#
# * ``flash_attention.py`` has a backward, by pointers.
# * ``gluon_matmul.py`` gives warps different work by hand.
# * `FlashAttention-3 <https://arxiv.org/abs/2407.08608>`_ is about exponentials
#   and products at the same time, on this GPU.

# %%
# Answers
# -------
#
# If the largest ``s`` is scaled, a row's maximum takes one multiplication, and
# ``s * scale - m_new`` is one instruction for each score. To find the largest
# score, the kernel would multiply each ``s`` first, with one more instruction.
