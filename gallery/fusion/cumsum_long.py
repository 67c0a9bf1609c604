# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute the cumulative sum of one long row with many programs, which tell each
# other how far the sum has come."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Cumulative sum of a few long rows
=================================

On the page ``cumsum.py`` a program goes along its row. With one long row, one
program works, and the rest of the GPU is idle. Here many programs share a row.
They wait for each other within one kernel, and still read each number once.

After this page you can

* hand a number from program to program with one 64-bit word of memory;
* let programs wait for others without a deadlock;
* look back over many words at once instead of waiting in a chain;
* keep the bits the same in each call, whichever program runs first.
"""

# sphinx_gallery_tags = ["scan", "memory bound", "autograd", "atomics"]
import math
import os
from functools import partial

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

# %%
# In PyTorch
# ----------
#
# Cut a row into *tiles*. The carry into a tile is the sum of all tiles before
# it. So we sum up each tile, scan these few sums, scan each tile, and add the
# tile's carry. We count the bytes:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def cumsum_torch(x, BLOCK_N=4096):
    """Return the cumulative sum of a vector, and the bytes that were moved."""
    tiles = x.view(-1, BLOCK_N)
    sums = tiles.sum(-1, dtype=torch.float64)  # reads x
    carry = sums.cumsum(0) - sums
    y = tiles.cumsum(-1)  # reads x, writes y
    moved = x.nbytes + x.nbytes + y.nbytes
    y += carry[:, None]  # reads y, writes y
    return y.view(-1), moved + 2 * y.nbytes


if __name__ == "__main__":
    x = torch.rand(2**18, generator=generator, device=DEVICE)
    y, moved = cumsum_torch(x)
    print(f"a row of {len(x)}: {moved / x.nbytes:.1f} times the bytes of x;")
    print(f"reading x and writing y: {(x.nbytes + y.nbytes) / x.nbytes:.1f}")

# %%
# The *floor* is two: to read ``x`` and to write ``y``. Two kernels, one for the
# sums and one for the rest, would move three. To reach the floor, a program has
# to keep its tile in registers *while it waits* for the carry.

# %%
# The first kernel
# ----------------
#
# Each tile has a program, and each program a word in memory. A program adds the
# sum of its tile to the word before, and writes its own word:
#
# .. code-block:: text
#
#     tile     0 ----> 1 ----> 2 ----> 3         s: sum of a tile
#     word     P0      P1      P2      P3        P: sum of all up to here
#              s0    P0+s1   P1+s2   P2+s3
#
# A program that waits keeps its place on a multiprocessor. If all programs that
# run waited for one that has not started, they would wait forever. A GPU may
# start programs in any order. So a program does not take its tile by
# ``tl.program_id``. It takes a *ticket* from a counter when it starts, and the
# ticket gives its tile. All programs with earlier tickets have then started,
# too.
#
# Usually one writes a value and then a flag, and nobody must see the flag
# before the value. Here one word of 64 bits is both. It holds the sum in
# float64. Before the launch, the words are filled with -1. As float64, these
# bits are a NaN that a program never writes.


@triton.jit
def chain_kernel(x_ptr, y_ptr, words_ptr, tiles, N, BLOCK_N: tl.constexpr):
    # The first word is the counter and begins at -1. A ticket is int64, as a
    # row's offset has to be.
    ticket = tl.atomic_add(words_ptr, 1, sem="relaxed") + 1
    row = ticket // tiles
    tile = (ticket % tiles).to(tl.int32)
    offs = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0)  # (BLOCK_N,)
    total = tl.sum(x, axis=0).to(tl.float64)
    y = tl.cumsum(x, axis=0)  # (BLOCK_N,)
    word_ptr = words_ptr + 1 + ticket
    # Volatile: from memory each time, not from a register or a near cache.
    word = tl.load(word_ptr - 1, mask=tile > 0, other=0, volatile=True)
    while word == -1:
        word = tl.load(word_ptr - 1, mask=tile > 0, other=0, volatile=True)
    carry = word.to(tl.float64, bitcast=True)
    word = (carry + total).to(tl.int64, bitcast=True)
    # A reader of the word needs nothing else, so no order has to be kept.
    tl.atomic_xchg(word_ptr, word, sem="relaxed")
    tl.store(y_ptr + row * N + offs, y + carry.to(tl.float32), mask=mask)


def scan(kernel, x, empty=-1, BLOCK_N=8192, num_warps=4, **known):
    """Return the cumulative sums of the rows of a float32 matrix."""
    M, N = x.shape
    y = torch.empty_like(x)
    tiles = triton.cdiv(N, BLOCK_N)
    # A counter, and a word for each tile
    words = x.new_full((1 + M * tiles,), empty, dtype=torch.int64)
    plan = {"BLOCK_N": BLOCK_N, "num_warps": num_warps, **known}
    kernel[(M * tiles,)](x, y, words, tiles, N, **plan)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. These numbers are positive, so nothing cancels. A sum
# within a tile takes about a hundred additions one after another on a GPU. In
# the interpreter, where NumPy adds, it takes up to 1024 here. Each addition
# rounds by at most :math:`2^{-24}`. The carry is added up in float64, then
# rounded once, and added once. We allow :math:`6 \cdot 10^{-5}`, 1024
# roundings, however many tiles there are.

if __name__ == "__main__":
    x = torch.rand(2, 30_000, generator=generator, device=DEVICE)
    y, rtol = scan(chain_kernel, x, BLOCK_N=1024).double(), 6e-5
    expected = x.double().cumsum(-1)
    error = ((y - expected) / expected).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    torch.testing.assert_close(y, expected, rtol=rtol, atol=0)

# %%
# How fast?
# ---------
#
# We time one row in float32, of three lengths. Beside ours are PyTorch's
# function, ``torch.compile`` of it, and a copy, which is the roof. The rate
# counts the bytes of the floor.


def random(*shape):
    return torch.rand(shape, generator=generator, device=DEVICE)


def eager(x):
    return torch.cumsum(x, dim=-1)


def contestants(ours):
    """Return what is measured, by name."""
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(eager, dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(function, x):
    out = torch.empty_like(x)
    found = {name: partial(op, x) for name, op in contestants(function).items()}
    return found | {"Roof": partial(out.copy_, x)}


def rates(tried, x, **options):
    """Return GB/s by name, for one read and one write of x."""
    found = gpu_time(tried, **options).items()
    return {name: 2e-6 * x.nbytes / times[0] for name, times in found}


def show(what, rates):
    line = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(f"{what}: {line} GB/s")


if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (2**20, 2**24, 2**27):
        x = random(1, N)
        show(f"N = {N:9}", rates(calls(partial(scan, chain_kernel), x), x))

# %%
# Must a sum wait for the one before?
# -----------------------------------
#
# In the chain, a sum goes to the L2 cache and back for each tile, one tile
# after the other. But a program knows the sum of its own tile at once. If it
# writes that sum into its word, others need not wait until it knows more. That
# is the *decoupled look-back* of Merrill and Garland. A word is empty, or has
# the sum of its tile, or has the *prefix*: the sum of everything up to the end
# of its tile. A program looks back over a window of words, to the last prefix
# in it:
#
# .. code-block:: text
#
#     tile     0    1    2    3    4    5    6
#     word     P0   P1   P2   s3   s4   s5   ?      tile 6 adds P2+s3+s4+s5
#
#     state, in the word's two lowest bits:  0 empty   1 s   2 P
#
# The two lowest bits of a float64 weigh little: the sum still has 51 binary
# digits, and float32 has 24. If a window has no prefix, the program adds up all
# its sums and looks further back.


@triton.jit
def look_back_kernel(
    x_ptr,
    y_ptr,
    words_ptr,
    tiles,
    N,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Here the memory is filled with zeros.
    ticket = tl.atomic_add(words_ptr, 1, sem="relaxed")
    row = ticket // tiles
    tile = (ticket % tiles).to(tl.int32)
    offs = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0)  # (BLOCK_N,)
    total = tl.sum(x, axis=0).to(tl.float64)
    row_words_ptr = words_ptr + 1 + row * tiles
    word = total.to(tl.int64, bitcast=True) & -4
    tl.atomic_xchg(row_words_ptr + tile, word | 1, sem="relaxed")
    y = tl.cumsum(x, axis=0)  # (BLOCK_N,)
    carry = total * 0
    end = tile  # the words from here on are added
    while end > 0:
        index = end - WINDOW + tl.arange(0, WINDOW)  # (WINDOW,)
        ptrs = row_words_ptr + index
        # Before the first tile comes the prefix 0.
        words = tl.load(ptrs, mask=index >= 0, other=2, volatile=True)
        last = tl.max(tl.where(words & 2 != 0, index, -WINDOW), axis=0)
        # What is empty matters only after the last prefix.
        while tl.max(tl.where(words & 3 == 0, index, -WINDOW), axis=0) > last:
            words = tl.load(ptrs, mask=index >= 0, other=2, volatile=True)
            last = tl.max(tl.where(words & 2 != 0, index, -WINDOW), axis=0)
        sums = (words & -4).to(tl.float64, bitcast=True)
        carry += tl.sum(tl.where(index >= last, sums, 0.0), axis=0)
        end = tl.where(last > -WINDOW, 0, end - WINDOW)
    word = (carry + total).to(tl.int64, bitcast=True) & -4
    tl.atomic_xchg(row_words_ptr + tile, word | 2, sem="relaxed")
    tl.store(y_ptr + row * N + offs, y + carry.to(tl.float32), mask=mask)


def look_back(x, WINDOW=128, **options):
    return scan(look_back_kernel, x, empty=0, WINDOW=WINDOW, **options)


if __name__ == "__main__":
    x = random(2, 30_000)
    y, expected = look_back(x, BLOCK_N=1024), x.double().cumsum(-1)
    torch.testing.assert_close(y.double(), expected, rtol=6e-5, atol=0)

if __name__ == "__main__" and DEVICE.type == "cuda":
    for N in (2**20, 2**24, 2**27):
        x, ours = random(1, N), partial(scan, chain_kernel)
        tried = {"chain": partial(ours, x), "look-back": partial(look_back, x)}
        show(f"N = {N:9}", rates(tried, x))

# %%
# Is the look-back deterministic? Which words are prefixes when a program looks
# is up to chance, and so is the order of the additions. With random numbers,
# the float32 results mostly hide that, because the words are float64. So we put
# a huge number into one tile of four, and its negative into the next tile. What
# is added between the two is lost, and what is lost depends on the order:


def huge(N, tile=8192):
    """Return a row whose sums tell the order of their additions."""
    x = torch.randn(1, N, generator=generator, device=DEVICE)
    x[:, :: 4 * tile], x[:, tile :: 4 * tile] = 2.0**60, -(2.0**60)
    return x


def differing(function, x, calls=20):
    """Return how many calls give other bits than the first."""
    first = function(x)
    return sum(not torch.equal(function(x), first) for _ in range(calls))


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = huge(2**26)
    print("chain:", differing(partial(scan, chain_kernel), x), "of 20 differ")
    print("look-back:", differing(look_back, x), "of 20 differ")

# %%
# Can the order be fixed?
# -----------------------
#
# Let the number of a tile decide what its word is, not the moment when a
# program looks. Of each ``GROUP`` tiles, the last one writes the prefix, and
# the others write the sums of their tiles:
#
# .. code-block:: text
#
#     GROUP = 4
#     tile    0    1    2    3    4    5    6    7    8
#     word   s0   s1   s2   P3   s4   s5   s6   P7   s8
#
#     tile 6 adds  P3 + s4 + s5
#     tile 7 adds  P3 + s4 + s5 + s6, and then its own for P7
#
# So a program reads ``GROUP`` words at most, and all of them at once. It waits
# for a chain with one link for each group, not for each tile. It always adds
# the same numbers in the same order. Each word is written once, so it needs no
# state, and -1 is again the word that nobody wrote yet.

# %%
# The backward
# ------------
#
# The gradient of an element is the sum of all incoming gradients from there to
# the end of its row:
#
# .. math:: \mathrm{d}x_k = \sum_{n \ge k} \mathrm{d}y_n
#
# So the last tile comes first, and each tile is scanned from right to left. As
# on the page ``cumsum.py``, vectors are loaded in reverse order, each one
# whole, and turned round in registers.

# %%
# The op
# ------
#
# A GPU has places for many programs at a time. If a few rows make fewer tiles
# than that, places are idle, so there the op takes smaller tiles. By the table
# of tiles below, less than 4096 elements gain little or nothing. A row is the
# last dimension of a tensor of any shape. Rows that lie apart are read where
# they are, and other layouts are copied first. ``cumsum.py`` explains ``VEC``
# and the order from right to left. The op is registered as on the page
# ``what_a_call_costs.py``.

from triton_gallery_ops.cumsum_long import (
    CUMSUM_LONG_ACC,
    _cumsum_long_kernel,
    _cumsum_long_plan,
    cumsum_long,
    cumsum_long_backward,
)

# %%
# What did each step gain? The table has the chain, the look-back, and groups of
# two sizes, each with the better tile of 4096 and 8192 elements. The op chooses
# its tile itself. A column's name has the rows and their length. Below are the
# registers of the op's kernel for the longest row, forward and backward. The
# last line counts how many calls of the op give other bits.


def kernel_alone(x, REVERSE=False, **changes):
    """Launch the op's kernel as the op does, but for the changes."""
    M, N = x.shape
    plan = _cumsum_long_plan(x, N, REVERSE) | changes
    tiles = triton.cdiv(N, plan["BLOCK_N"])
    words = x.new_full((1 + M * tiles,), -1, dtype=torch.int64)
    y = torch.empty_like(x)
    args = x, y, words, tiles, N, N
    return y, _cumsum_long_kernel[(M * tiles,)](*args, **plan)


STEPS = {
    "chain": partial(scan, chain_kernel),
    "look-back": look_back,
    "groups of 128": lambda x, **tile: kernel_alone(x, **tile)[0],
    "groups of 32": lambda x, **tile: kernel_alone(x, GROUP=32, **tile)[0],
}
SHAPES = [(1, 2**17), (4, 128256), (64, 2**18), (8, 2**23), (1, 2**27)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=[*STEPS, "the op", "the op's backward"])
    for shape in SHAPES:
        x = random(*shape)
        tried = {
            (name, tile): partial(step, x, BLOCK_N=tile, num_warps=4)
            for name, step in STEPS.items()
            for tile in (4096, 8192)
        }
        tried["the op"] = partial(cumsum_long, x)
        tried["the op's backward"] = partial(cumsum_long_backward, x)
        found = rates(tried, x, turns=20)
        best = {
            name: max(found[name, tile] for tile in (4096, 8192))
            for name in STEPS
        }
        line = best | {name: found[name] for name in list(tried)[-2:]}
        ladder[f"GB/s {shape}"] = [round(line[name]) for name in ladder.index]
    print(ladder.to_string())
    for REVERSE in (False, True):
        compiled = kernel_alone(x, REVERSE)[1]
        print(f"{compiled.n_regs} registers, {compiled.n_spills} spilled")
    found = differing(cumsum_long, huge(2**26))
    print("the op:", found, "of 20 calls differ")

# %%
# Which tile is best? A tile's name is its elements / its warps, and the rates
# are GB/s:

if __name__ == "__main__" and DEVICE.type == "cuda":
    tiles = [(1024, 2), (2048, 2), (2048, 4), (4096, 4), (8192, 4), (8192, 8)]
    for shape in SHAPES:
        x = random(*shape)
        tried = {
            f"{block}/{warps}": partial(
                kernel_alone, x, BLOCK_N=block, num_warps=warps
            )
            for block, warps in tiles
        }
        show(shape, rates(tried, x, turns=20))

# %%
# Proof
# -----
#
# We compare values and gradients of every dtype with float64. In half precision
# the result is rounded once more. The terms of a sum may cancel, so an error is
# measured against the sum of their absolute values.


def random_like(shape, dtype):
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.to(dtype).requires_grad_()


def prove(shape, dtype):
    x, dy = random_like(shape, dtype), random_like(shape, dtype).detach()
    y = cumsum_long(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    eps = torch.finfo(dtype).eps
    wide, turned = x.detach().double(), dy.double().flip(-1)
    for out, terms in ((y, wide), (dx.flip(-1), turned)):
        assert out.dtype == dtype
        expected, most = terms.cumsum(-1), terms.abs().cumsum(-1)
        error = (out.double() - expected).abs()
        assert (error <= 6e-5 * most + eps * expected.abs()).all()


CASES = [(3, 40), (2, 5, 257), (2, 5000), (1, 20_001), (0, 5), (5, 0), (7,)]
if __name__ == "__main__":
    for dtype in CUMSUM_LONG_ACC:
        for shape in CASES:
            prove(shape, dtype)
else:  # imported: a glance
    prove((3, 2500), torch.float32)

# %%
# Next come rows that lie apart, a transposed matrix and an expanded row.
# ``gradcheck`` compares gradients with finite differences, and
# ``gradgradcheck`` compares the gradients of gradients:

if __name__ == "__main__":
    x = torch.rand(60, 300, generator=generator, device=DEVICE)[:6]
    for view in (x[:, :37], x[::2, 3:204], x.T, x[:1].expand(9, 300)):
        expected = torch.cumsum(view.double(), -1).float()
        close = partial(torch.testing.assert_close, rtol=6e-5, atol=0)
        close(cumsum_long(view), expected)
        expected = torch.cumsum(view.double().flip(-1), -1).flip(-1).float()
        close(cumsum_long_backward(view), expected)
    leaf = random_like((4, 7), torch.float64)
    assert torch.autograd.gradcheck(cumsum_long, leaf)
    assert torch.autograd.gradgradcheck(cumsum_long, leaf)

# %%
# NaN and infinities reach all elements after them in their row. The last row
# has NaNs with the bits of -1. No program may take their sum for an empty word,
# and wait forever:

if __name__ == "__main__":
    x = torch.zeros(4, 3000, device=DEVICE, dtype=torch.float64)
    x[0, 1500], x[1, 30], x[2, 70], x[2, 900] = math.nan, 3e38, -math.inf, 1
    x[3] = torch.tensor(-1).view(torch.float64)
    expected = torch.cumsum(x, -1)
    torch.testing.assert_close(cumsum_long(x), expected, equal_nan=True)

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    row = torch.ones(1, device=DEVICE)
    for bad in (row.int(), row.expand(2**30 + 1)):
        try:
            cumsum_long(bad)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# The benchmark has one row of float32. The backward is called through autograd.
# ``Roof`` is a copy.

SIZES = [2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28]


def calls_backward(x):
    dy, out = torch.rand_like(x), torch.empty_like(x)
    x = x.requires_grad_()
    grad = partial(torch.autograd.grad, retain_graph=True)
    ops = contestants(cumsum_long).items()
    found = {name: partial(grad, op(x), x, dy) for name, op in ops}
    return found | {"Roof": partial(out.copy_, dy)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(cumsum_long, random(1, N))) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: 8e-6 * N)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls_backward(random(1, N))) for N in SIZES}
    results_backward = rate_table(times, "N", "GB/s", lambda N: 8e-6 * N)
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="backward")

# %%
# These are the rates with several rows, forward. The first two shapes are a
# sampler's: the probabilities of a vocabulary, for a few texts.

if __name__ == "__main__" and DEVICE.type == "cuda":
    for shape in ((4, 128256), (32, 50257), (64, 2**18), (8, 2**23)):
        x = random(*shape)
        show(shape, rates(calls(cumsum_long, x), x))

# %%
# This is what a call costs the CPU, in microseconds. The GPU works through a
# queue that the CPU fills, so this time matters where rows are short:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 2**20].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The rate climbs with the length of the row. In a short row there are few bytes
# to move, and still the same steps: fill the words, load a tile, scan it, and
# wait for each group before. A program that waits has its tile in registers and
# loads nothing meanwhile. The table of steps shows what groups cost or gain
# beside the look-back. The lines that count differing calls show what groups
# are for.
#
# PyTorch's backward is a flip, a scan and a flip, and moves six tensors.

# %%
# Break it: a tile for each program's number
# ------------------------------------------
#
# Without tickets, the tile of a program is its ``tl.program_id``. That works as
# long as programs start in the order of their numbers, which no one promises.
# Here is a model of a GPU in Python. It has a few places and starts programs in
# a given order. A program ends once the program of the tile before has ended:


TILES = "numbers", "tickets"


def ends(order, places, tickets):
    """Return whether all programs of a chain come to an end."""
    waiting, done = set(), 0
    for started, number in enumerate(order):
        waiting.add(started if tickets else number)
        while done in waiting:
            waiting.remove(done)
            done += 1
        if len(waiting) == places:
            return False  # no place for the program that all wait for
    return True


if __name__ == "__main__":
    for order in (list(range(8)), [4, 5, 6, 7, 0, 1, 2, 3]):
        found = {kind: ends(order, 4, kind == "tickets") for kind in TILES}
        print(f"started as {order}, comes to an end: {found}")

# %%
# With tickets, of all programs that wait, the one with the first ticket can
# always go on. The interpreter runs programs one after another, in the order of
# their numbers. So it never shows this bug, and a GPU may hide it for years.

# %%
# Go further
# ----------
#
# 1. Why do the words of groups need no state, and what would go wrong if a
#    program wrote its word twice?
# 2. Write ``cummax`` of a long row, the values alone. What are the words, and
#    which of the three kernels is deterministic?
#
# To read on: Merrill and Garland, "Single-pass Parallel Prefix Scan with
# Decoupled Look-back", NVIDIA, 2016; Yan, Long and Zhang,
# `StreamScan <https://doi.org/10.1145/2442516.2442539>`_, whose tiles wait for
# the tile before them, as in the first kernel.

# %%
# Answers
# -------
#
# **1.** The number of a tile says what its word means, so a reader of a word
# that is not empty knows its meaning. A program that wrote the sum of its tile
# first and the prefix later would need a state to tell them apart, and readers
# would see the one or the other by chance.
#
# **2.** A word is the largest element of a tile, or of everything so far. A NaN
# must not have the bits of -1. ``tl.associative_scan`` takes ``tl.maximum``
# with ``propagate_nan``. A maximum does not round, so all three kernels are
# deterministic.
