# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compute each random number of dropout from the element's position, so that
# the backward needs no stored mask."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# ///
r"""
Dropout
=======

Dropout sets each element to 0 with probability ``p``, and scales up the rest.
For that the forward needs a random number for each element. The backward needs
the same numbers again. A kernel does not have to store these numbers. It
computes each one from the element's position, in the forward and again in the
backward.

After this page you can

* get random numbers from a counter, the same on every GPU and without one;
* recompute a mask in the backward, and store nothing;
* share one call of the generator between eight elements;
* draw a seed without waiting for the GPU;
* test that random numbers are used rightly.
"""

# sphinx_gallery_tags = ["elementwise", "autograd", "random numbers"]
import hashlib
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
# In plain PyTorch dropout takes four operators. We count the bytes that each of
# them reads and writes, for a bfloat16 ``x``:

generator = torch.Generator(device=DEVICE).manual_seed(0)


def dropout_plain(x, p):
    u = torch.rand(x.shape, generator=generator, device=x.device)
    keep = u >= p
    zeroed = x * keep
    y = zeroed / (1 - p)
    return y, [(u,), (u, keep), (x, keep, zeroed), (zeroed, y)]


def random(*shape, dtype=torch.bfloat16):
    x = torch.randn(shape, generator=generator, device=DEVICE)
    return x.to(dtype)


if __name__ == "__main__":
    x = random(1000)
    y, moved = dropout_plain(x, 0.1)
    sizes = [sum(t.nbytes for t in tensors) / x.numel() for tensors in moved]
    print("bytes for each element:", *sizes, "in all", sum(sizes))
    print("reading x and writing y:", (x.nbytes + y.nbytes) / x.numel())

# %%
# The *floor* is to read ``x`` and to write ``y``. PyTorch has one function for
# dropout, ``torch.nn.functional.dropout``. Its kernel writes a mask too, a byte
# for each element, and its backward reads that mask.

# %%
# Random numbers from a counter
# -----------------------------
#
# Most generators have a state, and each number needs the one before. A
# *counter-based generator* is a function of a *key*, our seed, and a *counter*,
# such as the index of an element. It returns bits that look random. Triton, and
# PyTorch on a GPU, use Philox: ten rounds of two products, with mixed halves.


def philox(seed, n):
    """Return four numbers of 32 bits for a key and a counter of 64."""
    low = 2**32 - 1
    c, k = [n & low, n >> 32, 0, 0], [seed & low, seed >> 32 & low]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    return c


if __name__ == "__main__":
    # The authors of Philox publish what comes out for zeros.
    words = [f"{word:x}" for word in philox(0, 0)]
    print("Philox of zeros:", *words)
    assert words == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]

# %%
# Integers are not rounded. So a seed gives the same mask on every machine. In
# Triton the function is ``tl.randint4x(seed, n)``.

# %%
# The first kernel
# ----------------
#
# ``tl.rand(seed, n)`` makes a number from 0 to 1 of the first of the four. Let
# the index of an element be the counter, whatever program works on it:
#
# .. code-block:: text
#
#     program          0               1
#     counter     0   1   2   3   4   5   6   7
#     tl.rand    .43 .02 .77 .91 .10 .58 .36 .05
#     p = 0.4     1   0   1   1   0   1   0   0     kept
#
# So neither the block's length nor the number of programs changes the mask.


@triton.jit
def rand_kernel(x_ptr, y_ptr, N, p, seed, BLOCK: tl.constexpr):
    # In int32 the product would overflow past element 2**31.
    start = tl.program_id(axis=0).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)  # (BLOCK,)
    keep = tl.rand(seed, offs) >= p  # (BLOCK,)
    tl.store(y_ptr + offs, tl.where(keep, x / (1 - p), 0), mask=mask)


def drop_each(x, p, seed, block=1024):
    """Return dropout of a contiguous tensor."""
    y, N = torch.empty_like(x), x.numel()
    rand_kernel[(triton.cdiv(N, block),)](x, y, N, p, seed, BLOCK=block)
    return y


# %%
# Is it right?
# ------------
#
# Kept elements have to be ``x / (1 - p)``, to four roundings. The number of the
# others has a standard deviation of :math:`\sqrt{N p (1 - p)}`. We allow five.

if __name__ == "__main__":
    x, p = random(30_000, dtype=torch.float32), 0.1
    y, rtol = drop_each(x, p, seed=7), 2.5e-7
    kept = x.double() / (1 - p) * (y != 0)
    torch.testing.assert_close(y.double(), kept, rtol=rtol, atol=0)
    error = ((y.double() - kept) / x * (1 - p)).abs().max().item()
    print(f"largest relative error {error:.1e}, allowed {rtol:.1e}")
    deviation = math.sqrt(x.numel() * p * (1 - p))
    off = ((y == 0).sum().item() - x.numel() * p) / deviation
    print(f"dropped: off by {off:.1f} standard deviations, allowed 5")
    assert abs(off) < 5

# %%
# How fast?
# ---------
#
# We time three sizes in bfloat16. The rate counts the bytes of the floor. The
# roof is a copy.


def contestants(ours):
    """Return what is measured, by name."""
    torch.compiler.reset()  # past eight sizes it would raise
    eager = partial(torch.nn.functional.dropout, p=0.1)
    fast = torch.compile(lambda x: eager(x), dynamic=False, fullgraph=True)
    return {"Triton": ours, "PyTorch": eager, "torch.compile": fast}


def calls(ours, *shape):
    x = random(*shape)
    found = {name: partial(op, x) for name, op in contestants(ours).items()}
    return found | {"Roof": partial(torch.empty_like(x).copy_, x)}


def rate(found, size):
    """Return GB/s, if ``size`` 16-bit elements are read and written."""
    return 4e-6 * size / found[0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    first = partial(drop_each, p=0.1, seed=7)
    for M in (1, 512, 8192):
        found = gpu_time(calls(first, M, 14336)).items()
        rates = [f"{who} {rate(times, M * 14336):.0f}" for who, times in found]
        print(f"{M:4} rows: {', '.join(rates)} GB/s")

# %%
# What does a number cost?
# ------------------------
#
# The kernel moves as many bytes as the copy, at a much lower rate. Besides, it
# computes Philox: ten rounds for each element. And ``tl.rand`` throws three of
# its four words away. Four elements can share a call. Eight elements can, if 16
# bits are enough for each:
#
# .. code-block:: text
#
#     counter     |             n                 |           n + 1
#     word        |   0       1       2       3   |   0       1   ...
#     half        | lo  hi  lo  hi  lo  hi  lo  hi| lo  hi  lo  hi
#     element     | 8n  +1  +2  +3  +4  +5  +6  +7| 8(n+1)  ...
#
# In the kernel, ``tl.join`` puts two tiles side by side in a new last
# dimension. ``tl.reshape`` makes one row of the result. All elements of a call
# belong to one thread, so nothing moves between threads. This kernel shares a
# call between four elements:


@triton.jit
def four_kernel(x_ptr, y_ptr, N, p, seed, BLOCK: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)  # (BLOCK,)
    n = start // 4 + tl.arange(0, BLOCK // 4)  # (BLOCK // 4,)
    u0, u1, u2, u3 = tl.rand4x(seed, n)
    u = tl.join(tl.join(u0, u2), tl.join(u1, u3))  # (BLOCK // 4, 2, 2)
    keep = tl.reshape(u, (BLOCK,)) >= p
    tl.store(y_ptr + offs, tl.where(keep, x / (1 - p), 0), mask=mask)


def drop_four(x, p, seed, block=1024):
    y, N = torch.empty_like(x), x.numel()
    four_kernel[(triton.cdiv(N, block),)](x, y, N, p, seed, BLOCK=block)
    return y


# %%
# The op shares a call between eight elements. The table after the op counts the
# products of all three kernels, and has their rates.
#
# With 16 bits, ``p`` is rounded to a multiple of :math:`2^{-16}`. It is off by
# :math:`2^{-17}` at most, and a ``p`` below that drops nothing. To notice the
# rounding of ``p = 0.1``, somebody would have to count billions of elements.
# The scale follows from the rounded ``p``. So ``y`` is ``x`` on average.

# %%
# The backward is the op itself
# -----------------------------
#
# The gradient of a kept element is the scale. The gradient of a dropped one is
# 0. So the backward is dropout of the incoming gradient, with the same seed:
#
# .. math:: y = \frac{m\,x}{1 - p}, \qquad
#    \mathrm{d}x = \frac{m\,\mathrm{d}y}{1 - p}, \qquad
#    m = m(\mathrm{seed}, \mathrm{index}).
#
# The mask is recomputed, not stored. Autograd keeps only the seed. The op is
# its own backward, so it has gradients of any order.

# %%
# A seed that the CPU never sees
# ------------------------------
#
# Each call needs a seed of its own. If the seed is drawn on the GPU and read by
# the CPU, by ``.item()``, the CPU waits until the GPU has done all work before
# it. If the seed is drawn on the CPU, it is a fixed argument of the launch, and
# a captured CUDA graph would repeat it forever (``cuda_graphs.py``). So the
# seed is a tensor on the GPU, and the kernel loads it. ``dropout_seed`` draws a
# seed from a ``torch.Generator``, or from PyTorch's own generator. The seed
# must not change between forward and backward: autograd raises an error if it
# does.

# %%
# The op
# ------
#
# A program whose elements are all inside the tensor takes a branch without a
# mask. There the compiler knows that eight elements can be loaded at once,
# whatever ``N`` is. A dropped element is 0, even where ``x`` is NaN or
# infinite. PyTorch multiplies such an ``x`` by 0, which gives NaN.

from triton_gallery_ops.dropout import (
    DROPOUT_ACC,
    DROPOUT_BLOCK,
    _dropout_kernel,
    _dropout_launch,
    dropout,
    dropout_seed,
)

# %%
# What does sharing a call bring? A launch returns the compiled kernel. In its
# PTX code, we count ``mul.hi``, the instruction that computes the upper half of
# a product. Philox needs two for each round, and fewer where the compiler knows
# a word to be zero. The table has their number for each element of a thread,
# and GB/s at sizes that models have. The last size is odd.

SHAPES = [(1, 14336), (128, 14336), (4096, 2880), (8192, 14336), (8191, 14335)]


def first_step(x, y, kernel=rand_kernel):
    grid, N = (triton.cdiv(x.numel(), 1024),), x.numel()
    return kernel[grid](x, y, N, 0.1, 7, BLOCK=1024)


def op_step(x, y, seed, block=DROPOUT_BLOCK, num_warps=4):
    N = x.numel()
    return _dropout_kernel[(triton.cdiv(N, block),)](
        x,
        seed,
        y,
        N,
        round(0.1 * 2**16),
        ACC=tl.float32,
        BLOCK=block,
        num_warps=num_warps,
    )


def steps(seed):
    """Return a launch of each step, by name, and its elements of a thread.

    Those of the op count twice, as its code has Philox in both branches.
    """
    found = {
        "1 element a call": (first_step, 8),
        "4 elements a call": (partial(first_step, kernel=four_kernel), 8),
        "the op: 8 elements a call": (partial(op_step, seed=seed), 32),
    }
    for block, warps in ((512, 2), (1024, 4), (4096, 8)):
        options = {"seed": seed, "block": block, "num_warps": warps}
        name = f"the op, block {block}, {warps} warps"
        found[name] = partial(op_step, **options), block // warps // 16
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    tried, table = steps(dropout_seed(DEVICE, generator)), {}
    x = random(2**14)
    y = torch.empty_like(x)
    table["products"] = {
        name: step(x, y).asm["ptx"].count("mul.hi") / elements
        for name, (step, elements) in tried.items()
    }
    for shape in SHAPES:
        x = random(*shape)
        y = torch.empty_like(x)
        launches = {k: partial(step, x, y) for k, (step, _) in tried.items()}
        launches["a copy"] = partial(y.copy_, x)
        found = gpu_time(launches, turns=20).items()
        column = f"{shape[0]} x {shape[1]}"
        table[column] = {name: rate(ms, x.numel()) for name, ms in found}
    print(pd.DataFrame(table).round(1).to_string(na_rep="-"))

# %%
# Proof
# -----
#
# We compare the mask with that of ``philox``, the function in Python. A
# checksum compares it with the mask that this page was written with, because it
# is the same on every machine. A kept element is multiplied by a rounded scale
# and rounded. The last 3 of 4099 elements have a call of Philox to themselves,
# in a program with a mask.


def mask_python(N, p, seed):
    words = [w for n in range(triton.cdiv(N, 8)) for w in philox(seed, n)]
    halves = torch.tensor([h for w in words for h in (w % 2**16, w >> 16)])
    return halves[:N] >= round(p * 2**16)


def prove(N=4099, p=0.3, number=0x0123_4567_89AB_CDEF):
    keep = mask_python(N, p, number)
    checksum = hashlib.sha256(bytes(keep.tolist())).hexdigest()[:16]
    seed = torch.tensor([number], device=DEVICE)
    keep, kept = keep.to(DEVICE), 1 - round(p * 2**16) / 2**16
    for dtype in DROPOUT_ACC:
        x, grad = random(2, N, dtype=dtype)
        y = dropout(x.requires_grad_(), p, seed)
        (dx,) = torch.autograd.grad(y, x, grad)
        rtol = 1e-6 + torch.finfo(dtype).eps
        for out, source in ((y, x), (dx, grad)):
            expected = torch.where(keep, source.double() / kept, 0)
            torch.testing.assert_close(
                out.double(), expected, rtol=rtol, atol=0
            )
    return checksum


if __name__ == "__main__":
    checksum = prove()
    print("checksum of the mask", checksum)
    assert checksum == "9b273ffd06820cb8"
else:  # imported: a glance
    prove(N=99)

# %%
# Next come the ends of ``p``, where the result is ``x`` or 0. ``gradcheck`` and
# ``gradgradcheck`` compare first and second derivatives with finite
# differences. Other blocks give exactly the same result, and so does a
# transposed ``x``:

if __name__ == "__main__":
    seed = dropout_seed(DEVICE, generator)
    x = random(3, 5, dtype=torch.float64).requires_grad_()
    for p, expected in ((0.0, x), (1.0, torch.zeros_like(x))):
        assert torch.equal(dropout(x, p, seed), expected)
    op = partial(dropout, p=0.5, seed=seed)
    assert torch.autograd.gradcheck(op, x)
    assert torch.autograd.gradgradcheck(op, x)
    x = random(33, 100)
    for block in (64, 512, 1024):
        same = _dropout_launch(x, 0.5, seed, block=block)
        assert torch.equal(same, dropout(x, 0.5, seed))
    assert torch.equal(dropout(x.T, 0.5, seed), dropout(x.T.clone(), 0.5, seed))

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    for bad in ((x.int(), 0.5, seed), (x, 1.5, seed), (x, 0.5, seed.int())):
        try:
            dropout(*bad)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# Is it random?
# -------------
#
# Philox has passed the batteries of tests for random generators. What can go
# wrong is its use: numbers that are used twice, shifted, or for two purposes.
# So we look at masks. Let a kept element count :math:`p` and a dropped one
# :math:`p - 1`, both divided by the standard deviation
# :math:`\sqrt{p (1 - p)}`. Add these up over ``n`` elements and divide by
# :math:`\sqrt{n}`. The result is nearly normal, with deviation 1. The same goes
# for products of two elements that should know nothing of each other, such as
# neighbours, or one element under two seeds. So the results of 100 seeds should
# have deviations around 1, and none should be beyond 5:


def deviations(masks, p):
    """Return what should be normal numbers, a tensor for each kind."""
    kept = 1 - round(p * 2**16) / 2**16
    a = (masks.double() - kept) / math.sqrt(kept * (1 - kept))
    pairs = {"mean": (a, torch.ones_like(a)), "next seed": (a[1:], a[:-1])}
    pairs |= {"next row": (a[:, 1:], a[:, :-1])}
    for n in (1, 2, 7, 8, 16):
        pairs[f"{n} further"] = a[..., n:], a[..., :-n]
    sums = {name: (u * v).sum((1, 2)) for name, (u, v) in pairs.items()}
    return {n: s / math.sqrt(pairs[n][0][0].numel()) for n, s in sums.items()}


if __name__ == "__main__":
    table, ones = {}, torch.ones(8, 1024, device=DEVICE)
    seeds = torch.arange(100, device=DEVICE)
    for p in (0.1, 0.5):
        masks = torch.stack([dropout(ones, p, seed) != 0 for seed in seeds])
        for name, z in deviations(masks, p).items():
            table[p, name] = float(z.std()), float(z.abs().max())
    table = pd.DataFrame(table.values(), table, ["deviation", "largest"])
    print(table.round(2))
    assert table["deviation"].between(0.7, 1.3).all()
    assert (table["largest"] < 5).all()

# %%
# The benchmark
# -------------
#
# The benchmark has 4096 rows of ``N`` elements in bfloat16, with ``p = 0.1``.
# The rate counts two tensors, forward and backward. ``Roof`` is a copy. The
# backward is called through autograd.

SIZES = [8, 128, 1000, 2880, 4096, 8192, 14336, 28672]


def calls_backward(ours, *shape):
    x, grad = random(*shape).requires_grad_(), random(*shape)
    gradient = partial(torch.autograd.grad, retain_graph=True)
    found = {
        name: partial(gradient, op(x), x, grad)
        for name, op in contestants(ours).items()
    }
    return found | {"Roof": partial(torch.empty_like(grad).copy_, grad)}


def curve(calls):
    ours = partial(dropout, p=0.1, seed=dropout_seed(DEVICE, generator))
    times = {N: gpu_time(calls(ours, 4096, N)) for N in SIZES}
    found = rate_table(times, "N", "GB/s", lambda N: 4e-6 * 4096 * N)
    print(found.to_string())
    title = "backward" if calls is calls_backward else "forward"
    wide = found.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title=title)
    return found


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = curve(calls)

if __name__ == "__main__" and DEVICE.type == "cuda":
    torch._functorch.config.donated_buffer = False  # its backward runs again
    results_backward = curve(calls_backward)

# %%
# This is what a call costs the CPU, in microseconds:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for one in (results, results_backward):
        cost = one[one["N"] == 4096].set_index("series")["CPU us"]
        print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# With long rows, our line and the roof show what the arithmetic costs on top of
# the bytes. In the table of steps, kernels with more calls of Philox move the
# same bytes. So where their rates are lower at even sizes, the calls are the
# reason. At the odd size their loads are narrow too, as only the op has a
# branch without a mask. PyTorch's function and the code of ``torch.compile``
# keep a mask for the backward. Its byte for each element is a quarter more than
# the floor. With long rows, this is about the distance to the op in the
# backward. In the forward the distance is larger, so the mask explains only a
# part of it.
#
# With short rows there is little to move, and a copy is slow too.

# %%
# Break it: a seed for each program
# ---------------------------------
#
# It is a natural idea that each program counts from 0, and adds its number to
# the seed. Each mask looks right. But layers and training steps have seeds too,
# and these are often neighbours. Here are the masks of the seeds 7 and 8:


@triton.jit
def seeded_kernel(out_ptr, seed, p, BLOCK: tl.constexpr):
    pid, offs = tl.program_id(axis=0), tl.arange(0, BLOCK)
    keep = tl.rand(seed + pid, offs) >= p  # (BLOCK,)
    tl.store(out_ptr + pid * BLOCK + offs, keep.to(tl.int8))


if __name__ == "__main__":
    first, second = torch.empty(2, 4, 1024, dtype=torch.int8, device=DEVICE)
    for seed, out in ((7, first), (8, second)):
        seeded_kernel[(4,)](out, seed, 0.5, BLOCK=1024)
    same = (first[:, None] == second).double().mean(dim=-1)
    print("the share of equal elements, of each two blocks:", same, sep="\n")

# %%
# Two masks should agree in half of their elements. These two are one mask,
# shifted by a block: what one layer drops, another drops one block further on.
# Use the counter for the elements of one mask, and the key for different masks.

# %%
# Go further
# ----------
#
# 1. A transformer adds what it drops to a residual, ``residual + dropout(x)``.
#    What would one op for both move, and what would its backward keep?
# 2. Philox with 7 rounds passes its authors' tests too. What would change in
#    the table above, and what in the checksum?
# 3. Two GPUs hold the left and the right half of ``x``. What does the op need
#    so that both together have the mask of one GPU?
#
# To read on:
#
# * ``cross_entropy.py`` comes next.
# * Philox: https://doi.org/10.1145/2063384.2063405
# * Dropout: https://jmlr.org/papers/v15/srivastava14a.html

# %%
# Answers
# -------
#
# **1.** The op would move three tensors instead of five. The gradient of the
# residual is the incoming one, untouched. The gradient of ``x`` is that of
# dropout, and needs only the seed.
#
# **2.** There is less arithmetic, so four elements a call might be enough.
# Seven rounds give another mask, and so another checksum.
#
# **3.** The op needs each element's index in the whole tensor. If the halves
# are halves of the columns, a row of ``x`` is not contiguous in the whole
# tensor. Then one offset is not enough, and the op needs the strides of the
# whole tensor too.
