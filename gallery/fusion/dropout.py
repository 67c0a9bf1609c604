# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
Dropout
=======

Dropout sets each element to 0 with probability ``p``, and scales up the rest.
For that the forward needs a random number per element, and the backward the
same ones again. A kernel does not have to store them: it computes each from
its position, whenever it is asked for.

After this page you can

* get random numbers from a counter, alike on every GPU and without one;
* recompute a mask in the backward, and store nothing;
* weigh instructions against bytes, where arithmetic is not free;
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
from torch.library import triton_op, wrap_triton

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in bytes
# --------------------
#
# In plain PyTorch, with the bytes per element that each line reads and writes
# for a bfloat16 ``x``:


def dropout_plain(x, p):
    u = torch.rand_like(x, dtype=torch.float32)  # writes 4
    keep = u >= p  # 4 + 1
    y = x * keep  # 3 + 2
    return y / (1 - p)  # 2 + 2


# %%
# 18 in all, and the mask waits in memory for the backward. PyTorch's own op has
# one kernel that reads ``x`` and writes ``y`` and the mask, 5 bytes; its
# backward reads the mask, 5 again. The floor is 4: ``x`` read, ``y`` written.
#
# Random numbers from a counter
# -----------------------------
#
# Most generators have a state, and each number needs the one before. A
# counter-based generator is a function: of a *key*, our seed, and a *counter*,
# say the index of an element, to bits that look random. Nobody has to keep
# anything, and threads don't wait for each other. Triton, and PyTorch on a GPU,
# use Philox, ten rounds of two products, whose halves are mixed:


def philox(seed, n):
    """Return four numbers of 32 bits for a key and a counter of 64."""
    low = 2**32 - 1
    c, k = [n & low, n >> 32, 0, 0], [seed & low, seed >> 32 & low]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    return c


assert [f"{n:x}" for n in philox(0, 0)] == [
    *("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")  # its authors' test
]

# %%
# Products and XORs of integers have no rounding, so a seed gives the same mask
# everywhere. In Triton this function is ``tl.randint4x(seed, n)``.
#
# What can we afford?
# -------------------
#
# In the time in which memory moves 4 bytes, an H200 issues some 30
# instructions, and fewer where they multiply integers. A round is 5 of them, so
# a call costs about 50. The common ``tl.rand`` makes a call for each element
# and throws three of its four numbers away: the kernel would wait for
# arithmetic. Four elements can share a call, and eight can, if 16 bits are
# enough for one:
#
# .. code-block:: text
#
#     counter     |             n                 |           n + 1
#     word        |   0       1       2       3   |   0       1   ...
#     half        | lo  hi  lo  hi  lo  hi  lo  hi| lo  hi  lo  hi
#     element     | 8n  +1  +2  +3  +4  +5  +6  +7| 8(n+1)  ...
#
# With 16 bits ``p`` is a multiple of :math:`2^{-16}`, off by :math:`2^{-17}` at
# most: a smaller ``p`` drops nothing. To notice at ``p = 0.1``, one would have
# to count a billion elements. The scale is computed from the ``p`` that is
# used, so ``y`` is ``x`` on average.
#
# The kernel
# ----------
#
# Four words per counter become a row of elements: ``tl.join`` puts two tiles
# side by side in a new last dimension, and ``tl.reshape`` makes one row of it.
# Since all eight elements belong to one thread, nothing moves. The comparison
# is of signed integers, and ``limit`` has zeros in its lower half: the upper 16
# bits decide, and what else is in a word does not matter.
#
# The last program alone has a mask, the others need none. That way the compiler
# knows that eight elements can be loaded at once, whatever ``N`` is.


@triton.jit
def random_bits(seed, first, PER, BLOCK):
    """Return BLOCK numbers for the elements from ``first`` on."""
    # In int64: behind 2**32 counters the mask would begin again.
    n = tl.cast(first, tl.int64) // PER + tl.arange(0, BLOCK // PER)
    w0, w1, w2, w3 = tl.randint4x(seed, n)
    if PER == 1:
        bits = w0
    else:
        bits = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (BLOCK // PER, 2, 2)
        if PER == 8:
            bits = tl.join(bits << 16, bits)  # (BLOCK // 8, 2, 2, 2)
    return tl.reshape(bits, (BLOCK,)).to(tl.int32, bitcast=True)


@triton.jit
def drop(x_ptrs, out_ptrs, mask, seed, first, limit, ACC, PER, BLOCK):
    x = tl.load(x_ptrs, mask).to(ACC)  # (BLOCK,)
    bits = random_bits(seed, first, PER, BLOCK)  # (BLOCK,)
    kept = 2147483648 - tl.cast(limit, tl.int64)  # out of 2**32
    scale = 4294967296.0 / kept.to(ACC)
    tl.store(out_ptrs, tl.where(bits >= limit, x * scale, 0), mask)


@triton.jit
def dropout_kernel(
    x_ptr,
    seed_ptr,
    out_ptr,
    N,
    limit,
    ACC: tl.constexpr,
    PER: tl.constexpr,  # elements per call of Philox: 8, 4 or 1
    BLOCK: tl.constexpr,
):
    first = tl.program_id(axis=0).to(tl.int64) * BLOCK
    offs = first + tl.arange(0, BLOCK)  # (BLOCK,)
    seed = tl.load(seed_ptr)
    x_ptrs, out_ptrs = x_ptr + offs, out_ptr + offs
    if first + BLOCK <= N:
        drop(x_ptrs, out_ptrs, None, seed, first, limit, ACC, PER, BLOCK)
    else:
        mask = offs < N
        drop(x_ptrs, out_ptrs, mask, seed, first, limit, ACC, PER, BLOCK)


# %%
# The op
# ------
#
# The gradient of a kept element is the scale, that of a dropped one 0: dropout
# of the gradient, with the same seed. So the op is its own backward, as in
# ``rope.py``, and autograd keeps nothing but the seed.
#
# The seed is a tensor, ``torch.randint(2**63 - 1, (1,), device=...)``. A number
# would have to come from the CPU each time; a captured CUDA graph would keep
# the first one for ever (``cuda_graphs.py``). It must not change before the
# backward, and autograd sees to that.
#
# What is dropped is 0, also where ``x`` is NaN or infinite. PyTorch multiplies
# by 0, and NaN stays.

ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32}
ACC |= {torch.float32: tl.float32, torch.float64: tl.float64}


def new_seed(seed):
    return torch.tensor([seed], device=DEVICE)


def launch(kernel, x, p, seed, out, per=8, block=2048):
    limit = round(float(p) * 2**16) * 2**16 - 2**31
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        return kernel[(triton.cdiv(x.numel(), block),)](
            *(x, seed, out, x.numel(), limit, ACC[x.dtype], per, block)
        )


@triton_op("triton_gallery::dropout", mutates_args={})
def dropout(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """Return x with elements set to 0 with probability p, others scaled."""
    if x.dtype not in ACC:
        raise TypeError(f"dropout takes floating dtypes, not {x.dtype}")
    if not 0 <= p <= 1:
        raise ValueError(f"dropout takes a p from 0 to 1, not {p}")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise TypeError("dropout takes a tensor with one int64 as its seed")
    if seed.device != x.device:
        raise ValueError(f"x is on {x.device}, and the seed on {seed.device}")
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        launch(wrap_triton(dropout_kernel), x, p, seed, out)
    return out


def save(ctx, inputs, output):
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def backward(ctx, grad):
    return dropout(grad, ctx.p, *ctx.saved_tensors), None, None


dropout.register_autograd(backward, setup_context=save)

# %%
# The check
# ---------
#
# The mask is compared with the function in Python, and by a checksum with the
# mask that this page was written with: on every machine the same. Each element
# is multiplied by a rounded scale and rounded. The last 3 of 4099 elements are
# a call of Philox that is not used up, in a program with a mask.


def mask_python(N, p, seed):
    words = [w for n in range(triton.cdiv(N, 8)) for w in philox(seed, n)]
    halves = torch.tensor([h for w in words for h in (w % 2**16, w >> 16)])
    signed = torch.where(halves < 2**15, halves, halves - 2**16)
    return signed[:N] >= round(p * 2**16) - 2**15


torch.manual_seed(0)
N, p, seed = 4099, 0.3, 0x0123_4567_89AB_CDEF
keep = mask_python(N, p, seed)
checksum = hashlib.sha256(bytes(keep.tolist())).hexdigest()
assert checksum.startswith("9a09311ba44e26f5"), checksum
keep, kept = keep.to(DEVICE), 1 - round(p * 2**16) / 2**16
for dtype in ACC:
    x, grad = torch.randn(2, N, device=DEVICE).to(dtype)
    y = dropout(x.requires_grad_(), p, new_seed(seed))
    (dx,) = torch.autograd.grad(y, x, grad)
    rtol = 1e-6 + torch.finfo(dtype).eps
    for out, source in ((y, x), (dx, grad)):
        expected = torch.where(keep, source.double() / kept, 0)
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=0)

if __name__ == "__main__":
    x = torch.randn(3, 5, device=DEVICE).double().requires_grad_()
    op = partial(dropout, p=0.5, seed=new_seed(1))
    assert torch.autograd.gradcheck(op, x)
    assert torch.autograd.gradgradcheck(op, x)

# %%
# Is it random?
# -------------
#
# Philox has passed the batteries of tests for generators. What can go wrong is
# its use: numbers that are used twice, shifted, or for two purposes. So look at
# masks. Count a kept element as :math:`p` and a dropped one as :math:`p - 1`,
# over the standard deviation :math:`\sqrt{p (1 - p)}`. The sum over ``n``
# elements, and that of products of any two that should know nothing of each
# other, over :math:`\sqrt{n}`, are nearly normal then, with deviation 1. So 100
# seeds should give deviations around 1, and nothing beyond 5:


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
    for p in (0.1, 0.5):
        masks = [dropout(ones, p, new_seed(n)) != 0 for n in range(100)]
        for name, z in deviations(torch.stack(masks), p).items():
            table[p, name] = float(z.std()), float(z.abs().max())
    table = pd.DataFrame(table.values(), table, ["deviation", "largest"])
    print(table.round(2))
    assert table["deviation"].between(0.7, 1.3).all()
    assert (table["largest"] < 5).all()

# %%
# Break it: a seed for each program
# ---------------------------------
#
# A natural idea: each program begins to count at 0, and adds its number to the
# seed. Every mask looks right. But layers and steps have seeds too, usually
# neighbouring ones:


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
# Two masks should agree in half of their elements. These are one mask, shifted
# by a block: layers forget the same things. The counter is for what belongs to
# one mask, the key for the masks.
#
# Elements per call
# -----------------
#
# What sharing a call brings, for :math:`2^{27}` elements in bfloat16. A launch
# of the kernel itself, not of the op, returns what was compiled; there we count
# the instructions that compute the upper half of a product. A call has 20, less
# what the compiler knows to be zero, and what only numbers need that are thrown
# away:


def bench(call, size):
    """Return GB/s for bfloat16: the median, then the worst and best 20 %."""
    times = triton.testing.do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return [4e-6 * size / t for t in times]


if __name__ == "__main__" and DEVICE.type == "cuda":
    x, seed = torch.randn(2**27, device=DEVICE).bfloat16(), new_seed(1)
    y = torch.empty_like(x)
    for per in (1, 4, 8):
        call = partial(launch, dropout_kernel, x, 0.1, seed, y, per)
        products = call().asm["ptx"].count("mul.hi")
        products /= 2 * 16  # branches, and elements of a thread
        rate = bench(call, x.numel())[0]
        print(
            f"{per} elements per call: {products:4.1f} upper halves "
            f"per element, {rate:4.0f} GB/s"
        )
    print(f"a copy: {bench(partial(y.copy_, x), x.numel())[0]:.0f} GB/s")

# %%
# The benchmark
# -------------
#
# 8192 rows of ``N`` bfloat16, ``p = 0.1``. The figure counts two tensors, 4
# bytes per element, forward and backward, whatever moved. ``Roof`` is a copy.
# Backwards run through autograd.

SIZES = [8, 128, 1000, 4096, 14336, 32768]
NAMES = ["Triton", "PyTorch", "torch.compile", "Roof"]
curve = partial(
    *(triton.testing.Benchmark, ["N"], SIZES, "provider", NAMES, NAMES),
    ylabel="GB/s",
    x_log=True,
)
CURVES = [curve("dropout", {"gradient": False})]
CURVES += [curve("dropout_backward", {"gradient": True})]


@triton.testing.perf_report(CURVES)
def benchmark(N, provider, gradient):
    x, grad = torch.randn(2, 8192, N, device=DEVICE).bfloat16()
    torch.compiler.reset()  # the ninth shape would raise an error
    eager = partial(torch.nn.functional.dropout, p=0.1)
    fast = torch.compile(lambda x: eager(x), fullgraph=True, dynamic=False)
    ours = partial(dropout, p=0.1, seed=new_seed(1))
    op = [ours, eager, fast, None][NAMES.index(provider)]
    if provider == "Roof":
        call = partial(torch.empty_like(x).copy_, x)
    elif gradient:
        y = op(x.requires_grad_())
        call = partial(torch.autograd.grad, y, x, grad, retain_graph=True)
    else:
        call = partial(op, x)
    return bench(call, x.numel())


if __name__ == "__main__" and DEVICE.type == "cuda":
    torch._functorch.config.donated_buffer = False  # run it again
    results, results_backward = benchmark.run(True, True, return_df=True)
    for table in (results, results_backward):
        row = table.set_index("N").iloc[-1].rename(lambda x: x.split(" (")[0])
        peer = max(row["PyTorch"], row["torch.compile"])
        print(
            f"to the best peer {row['Triton'] / peer:.2f}, "
            f"to the roof {row['Triton'] / row['Roof']:.2f}"
        )

# %%
# Reading the result
# ------------------
#
# With eight elements per call memory is the bound again. Forward,
# ``torch.compile`` makes a call for each element, and waits for arithmetic.
# PyTorch shares calls, but writes a mask, and falls behind by more than that
# byte. Backward both read a mask, and there that byte is what they lose.
#
# On the left the GPU waits for the CPU. PyTorch's op and its backward are C++;
# ours are Python, and so is what autograd calls for them. So forward PyTorch is
# ahead with rows of up to 128, backward up to 4096, and at 14336 some of it is
# still in our figure. A CUDA graph leaves all that out (``cuda_graphs.py``).
#
# Go further
# ----------
#
# 1. A transformer adds what it drops to a residual, ``residual + dropout(x)``.
#    What would one op for both move, and what keeps its backward?
# 2. Philox with 7 rounds passes the tests of its authors too. What would change
#    in the table above, and what in the checksum?
# 3. Two GPUs hold the left and the right half of ``x``. What does the op need
#    so that both together have the mask of one GPU?
#
# Next is ``cross_entropy.py``. To read on: the `paper on Philox
# <https://doi.org/10.1145/2063384.2063405>`_ and `on dropout
# <https://jmlr.org/papers/v15/srivastava14a.html>`_.

# %%
# Answers
# -------
#
# **1.** Three tensors instead of five. The gradient of the residual is the
# incoming one, untouched; the backward is that of dropout, and keeps the seed.
#
# **2.** Less arithmetic, so four elements per call would be enough for the
# bytes; another mask, and so another checksum.
#
# **3.** The index in the whole tensor. For halves of columns a row of ``x`` is
# not contiguous there, so an offset will not do: it takes the strides too.
