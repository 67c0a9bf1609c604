# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
# ///
r"""
Top-k
=====

The ``k`` largest of each row, and where they are: a language model samples its
next token among them, a router picks experts. Sorting the row would be too
much. For a small ``k`` this kernel sorts a few hundredths of it. You learn to

* pack a float and its index into one integer that sorts like both;
* say what is larger than NaN, and which of two equals comes first;
* select through maxima, so that few elements are ever compared in a sort;
* share a long row among programs.
"""

# sphinx_gallery_tags = ["selection", "sorting", "memory bound", "autograd"]
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
from triton.testing import Benchmark, do_bench

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# The problem in bytes
# --------------------
#
# A row of ``N`` is read, ``k`` values and ``k`` indices are written: with a
# small ``k``, the floor is the input once. The simplest way takes the maximum,
# removes it, and starts again:


def topk_plain(x, k):
    x, values, indices = x.clone(), [], []
    for _ in range(k):
        value, index = x.max(-1, keepdim=True)  # 1 read
        x.scatter_(-1, index, -math.inf)
        values.append(value)
        indices.append(index)
    return torch.cat(values, -1), torch.cat(indices, -1)


if __name__ == "__main__":
    x = torch.tensor([[3.0, 1, 4, 1, 5, 9, 2, 6]], device=DEVICE)
    print(*(t.tolist() for t in topk_plain(x, 3)))

# %%
# That reads the row ``k`` times, and fails with fewer than ``k`` numbers above
# ``-inf``. PyTorch's op looks for the ``k``-th largest a few bits at a time.
#
# What is larger?
# ---------------
#
# In PyTorch NaN is larger than any number, and -0.0 equals 0.0. Which of two
# equals comes first is left open; here it is the one with the lower index. Then
# there are no ties, and one integer can say all:
#
# .. code-block:: text
#
#     63                         32 31                         0
#     +----------------------------+----------------------------+
#     |  the float, as an integer  |  the index, bits inverted  |
#     +----------------------------+----------------------------+
#
# The bits of positive floats, as integers, are in the floats' order. Those of
# negative ones are in reverse, until all bits below the sign are inverted. Half
# precision is converted to float32 first, which is exact.

LOWEST = tl.constexpr(-(2**63))  # below all words
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(x):
    """Return integers in the order of the floats."""
    wide: tl.constexpr = x.dtype == tl.float64
    INT: tl.constexpr = tl.int64 if wide else tl.int32
    TOP: tl.constexpr = 2**63 - 1 if wide else 2**31 - 1
    bits = x.to(INT, bitcast=True)
    bits = tl.where(x == 0, 0, bits)  # both zeros
    key = tl.where(bits < 0, bits ^ TOP, bits)
    return tl.where(x == x, key, TOP)


@triton.jit
def pack(x, index, valid):
    word = (key_of(x).to(tl.int64) << 32) | (index ^ LAST)
    return tl.where(valid, word, LOWEST)


@triton.jit
def index_of(word):
    return ((word & LAST) ^ LAST).to(tl.int32)


# %%
# With float64 there is no room for an index. It gets the simple kernel: ``k``
# times along the row, for the first element, in this order, behind the last.


@triton.jit
def topk_passes_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    k,
    N,
    stride_xm,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    x_row = x_ptr + pid * stride_xm
    found, index = tl.full((), 2**63 - 1, tl.int64), tl.full((), -1, tl.int32)
    for j in range(k):
        best = tl.full((BLOCK_N,), LOWEST, dtype=tl.int64)  # (BLOCK_N,)
        where = tl.full((BLOCK_N,), LAST, dtype=tl.int32)  # (BLOCK_N,)
        for start in range(0, N, BLOCK_N):
            offs = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            key = key_of(tl.load(x_row + offs, offs < N, 0)).to(tl.int64)
            after = (key < found) | ((key == found) & (offs > index))
            better = after & (key > best) & (offs < N)
            best = tl.where(better, key, best)
            where = tl.where(better, offs, where)
        found = tl.max(best, axis=0)
        index = tl.min(tl.where(best == found, where, LAST), axis=0)
        tl.store(values_ptr + pid * k + j, tl.load(x_row + index))
        tl.store(indices_ptr + pid * k + j, index.to(tl.int64))


# %%
# Few survive
# -----------
#
# ``tl.topk`` sorts a block with a *bitonic network*: pairs are compared and
# exchanged, between registers or between threads. Most take part in several
# exchanges, and that is more work than reading. A maximum is one instruction
# per element. So first find out where not to look. Divide a row in any way: its
# ``k`` largest elements are in the ``k`` parts with the largest maxima, for one
# in another part would be smaller than those. This is used twice, for *pieces*
# of 16 bytes and for *sets* of pieces:
#
# .. code-block:: text
#
#     a row of 4096 float32, k = 8
#     1024 pieces of 4  ->  128 sets of 8      ->  8 sets      tl.topk
#     a maximum each        a maximum each
#                           64 pieces of 4     ->  8 pieces    tl.topk
#                           (read again)
#                           32 elements        ->  8 elements  tl.topk
#
# * Ties: a maximum has to carry the place of its *first* occurrence. A piece
#   is contiguous, so its number will do. A set keeps the largest such word.
# * Every ``SETS``-th piece belongs to the same set, which a thread keeps in a
#   register. Up to 128 sets are sorted by one warp, without barriers.
# * A thread loads a piece at once, if it is at a multiple of 16 bytes. So they
#   begin at a row's first multiple: its *body*, as in ``cross_entropy.py``. Its
#   *edges* are sorted last. ``num_stages``: loads are ahead.


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def body(x_ptr, row, N, stride, P: tl.constexpr):
    """Return where a row's pieces begin, elements before, and their number."""
    head = ((P - row * stride % P) % P).to(tl.int32)
    start = (row * stride + head) // P * P  # tells the compiler: no remainder
    return x_ptr + start, head, tl.maximum(N - head, 0) // P


@triton.jit
def load_piece(x_body, piece, pieces, P: tl.constexpr):
    offs = piece[:, None] * P + tl.arange(0, P)[None, :]  # (pieces, P)
    x = tl.load(x_body + offs, (piece < pieces)[:, None], -float("inf"))
    return x.to(tl.float32), offs


@triton.jit
def maxima(x_body, piece, pieces, P: tl.constexpr):
    """Return a word for each piece: its largest element, its number."""
    x, _ = load_piece(x_body, piece, pieces, P)
    return pack(tl.reduce(x, 1, larger), piece, piece < pieces)


@triton.jit
def finish(x_ptr, values_ptr, indices_ptr, row, best, k, N, stride, P, K):
    """Store the k largest elements of the K pieces in best, and the edges."""
    x_row = x_ptr + row * stride
    x_body, head, pieces = body(x_ptr, row, N, stride, P)
    # In a short row there may be fewer pieces; the one behind it is empty.
    piece = tl.where(best == LOWEST, pieces, index_of(best))  # (K,)
    x, offs = load_piece(x_body, piece, pieces, P)  # (K, P)
    words = pack(x, head + offs, (piece < pieces)[:, None])
    best = tl.topk(tl.reshape(words, (K * P,)), K)  # (K,)
    length = pieces * P
    if length < N:
        edge = tl.arange(0, K * P)  # in front and behind, less than 2 * P
        mask = edge < N - length
        offs_e = tl.where(edge < head, edge, edge + length)
        x_e = tl.load(x_row + offs_e, mask, 0).to(tl.float32)
        both = tl.join(best, tl.topk(pack(x_e, offs_e, mask), K))  # (K, 2)
        best = tl.topk(tl.reshape(both, (2 * K,)), K)
    index = index_of(best)  # (K,)
    offs, mask = row * k + tl.arange(0, K), tl.arange(0, K) < k
    tl.store(values_ptr + offs, tl.load(x_row + index, mask), mask)
    tl.store(indices_ptr + offs, index.to(tl.int64), mask)


@triton.jit
def topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    words_ptr,
    k,
    parts,
    N,
    stride,
    P: tl.constexpr,
    K: tl.constexpr,
    SETS: tl.constexpr,
    EACH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # In int64, or a row's offset would overflow behind element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    row, part = pid // parts, (pid % parts).to(tl.int32)
    x_body, _, pieces = body(x_ptr, row, N, stride, P)
    first = part * SETS * EACH
    last = tl.minimum(first + SETS * EACH, pieces)
    sets = tl.full((SETS,), LOWEST, dtype=tl.int64)  # (SETS,)
    for start in tl.range(first, last, SETS, num_stages=3):
        piece = start + tl.arange(0, SETS)  # (SETS,)
        sets = tl.maximum(sets, maxima(x_body, piece, pieces, P))
    best = tl.topk(sets, K)  # (K,)
    if EACH > 1:
        # All pieces of a set have the same number, modulo SETS.
        piece = first + (index_of(best) % SETS)[:, None]  # (K, 1)
        piece += SETS * tl.arange(0, EACH)[None, :]  # (K, EACH)
        piece = tl.where(best[:, None] == LOWEST, pieces, piece)
        piece = tl.reshape(piece, (K * EACH,))
        best = tl.topk(maxima(x_body, piece, pieces, P), K)
    if WHOLE:
        finish(x_ptr, values_ptr, indices_ptr, row, best, k, N, stride, P, K)
    else:
        tl.store(words_ptr + pid * K + tl.arange(0, K), best)


# %%
# Few rows
# --------
#
# Logits are long and few. Then several programs share a row. Each leaves the
# ``K`` best words of its part to a second kernel. (In ``cumsum.py`` they wait.)


@triton.jit
def topk_merge_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    words_ptr,
    k,
    count,
    N,
    stride,
    P: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(axis=0).to(tl.int64)
    best = tl.full((K,), LOWEST, dtype=tl.int64)  # (K,)
    for start in range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
        words = tl.load(words_ptr + row * count + offs, offs < count, LOWEST)
        both = tl.join(best, tl.topk(words, K))  # (K, 2)
        best = tl.topk(tl.reshape(both, (2 * K,)), K)
    finish(x_ptr, values_ptr, indices_ptr, row, best, k, N, stride, P, K)


# %%
# The launcher
# ------------
#
# With :math:`S` sets of :math:`E` pieces each, ``tl.topk`` gets :math:`S` words
# and then :math:`k E`. As :math:`S E` is given, the sum is least where they are
# equal. The latter are read again, so half as many. ``K`` is two or more.

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
MOST = 128  # for k
PART, PROGRAMS = 4096, 1024  # elements that are worth a program; a full GPU


def plan(M, N, P, K):
    """Return the number of parts of a row, and their sets and pieces."""
    part = triton.next_power_of_2(triton.cdiv(M * N, PROGRAMS))
    part = max(PART, min(part, 16 * PART))
    pieces = triton.next_power_of_2(triton.cdiv(min(N, part), P))
    sets = 2 ** round(math.log2(2 * K * pieces) / 2)
    sets = max(K, min(sets, pieces))
    each = max(1, pieces // sets)
    return triton.cdiv(N, sets * each * P), sets, each


def check(x, k):
    if x.dtype not in FLOATS:
        raise TypeError(f"takes floating dtypes, not {x.dtype}")
    N = x.shape[-1:].numel()
    if not 0 <= k <= N:
        raise ValueError(f"takes k from 0 to the row's length {N}, not {k}")
    if k > MOST:
        raise ValueError(f"takes k up to {MOST}, not {k}: better sort")
    if N > 2**30:
        raise ValueError("takes rows of up to 2**30 elements")


def matrix(x):
    """Return x as a matrix with contiguous rows, a copy only if need be."""
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return x if x.stride(1) == 1 else x.contiguous()


@triton_op("triton_gallery::topk", mutates_args={})
def topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch.topk(x, k), equals by index."""
    check(x, k)
    shape = (*x.shape[:-1], k) if x.ndim else ()
    values = x.new_empty(shape)
    indices = x.new_empty(shape, dtype=torch.int64)
    if values.numel() == 0:
        return values, indices
    x = matrix(x)
    M, N, stride = x.shape[0], int(x.shape[1]), int(x.stride(0))
    out = x, values, indices
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        if x.dtype == torch.float64:
            block = min(1024, triton.next_power_of_2(N))
            wrap_triton(topk_passes_kernel)[(M,)](*out, k, N, stride, block)
            return values, indices
        P = 16 // x.element_size()
        K = max(2, triton.next_power_of_2(int(k)))
        parts, sets, each = plan(int(M), N, P, K)
        sizes = N, stride, P, K
        count = parts * K if parts > 1 else 0
        words = x.new_empty((M, count), dtype=torch.int64)
        wrap_triton(topk_kernel)[(M * parts,)](
            *(*out, words, k, parts, *sizes, sets, each, parts == 1),
            num_warps=max(1, min(8, sets // 128)),
        )
        if parts > 1:
            block = min(1024, triton.next_power_of_2(count))
            wrap_triton(topk_merge_kernel)[(M,)](
                *(*out, words, k, count, *sizes, block),
                num_warps=max(1, block // 256),
            )
    return values, indices


# %%
# Gradients go back to where the values came from, in plain PyTorch.


def save(ctx, inputs, output):
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def backward(ctx, grad, _):
    (indices,) = ctx.saved_tensors
    return grad.new_zeros(ctx.shape).scatter(-1, indices, grad), None


topk.register_autograd(backward, setup_context=save)

# %%
# The check
# ---------
#
# Nothing is rounded, so all is compared exactly, with a stable sort on the CPU:
# on a GPU ``torch.sort`` may put NaN with a minus last.


def assert_right(x, k):
    x, values, indices = (t.cpu() for t in (x, *topk(x, k)))
    expected = torch.sort(x, dim=-1, descending=True, stable=True)
    assert torch.equal(indices, expected.indices[..., :k])
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(values, torch.topk(x, k).values, **exactly)
    torch.testing.assert_close(values, x.gather(-1, indices), **exactly)


torch.manual_seed(0)
for dtype, k, *shape in (
    *((torch.float32, 5, 2, 3, 300), (torch.bfloat16, 1, 2, 77)),
    *((torch.float64, 3, 2, 40), (torch.float16, 7, 3, 7)),
):
    assert_right(torch.randn(shape, device=DEVICE).to(dtype), k)

special = torch.zeros(3, 90, device=DEVICE)
special[0, ::7], special[0, 3] = -0.0, math.nan
special[1], special[1, 40] = -math.inf, -math.nan
special[2, 50:60] = math.inf
assert_right(special, 6)

if __name__ == "__main__":
    x = torch.randn(2, 5, device=DEVICE).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk(x, 3)[0], x)
    assert_right(torch.randn(1, 2 * PART, device=DEVICE).round(), 4)

# %%
# Break it: bits as they are
# --------------------------
#
# Without inverted bits all is well with probabilities, which have no sign. A
# test needs rows with fewer than ``k`` positive numbers to notice.

if __name__ == "__main__":
    x = torch.tensor([-3.0, 1.0, -0.5, math.nan, -2.0, -math.nan])
    order = x.view(torch.int32).argsort(descending=True)
    print("by bits ", x[order].tolist())
    print("by topk ", topk(x.to(DEVICE), 6)[0].tolist())

# %%
# What does a set save?
# ---------------------
#
# Float32 rows of 4096, ``k = 8``: 16384 of them for both ops; 65536, where the
# launch weighs less, for ``k`` passes and for ever fewer sets (ours are 128).

ELEMENTS = 2**28


def random(N):
    return torch.randn(ELEMENTS // N, N, device=DEVICE)


def rates(call, x, k):
    times = do_bench(call, quantiles=[0.5, 0.8, 0.2])
    return [(4 * x.numel() + 12 * len(x) * k) * 1e-6 / t for t in times]


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = random(4096)
    few, grid, out = x[:16384], (len(x),), (x, *topk(x, 8))
    print("GB/s")
    for name, op in (("PyTorch", torch.topk), ("topk", topk)):
        print(f"{name:14} {rates(partial(op, few, 8), few, 8)[0]:5.0f}")
    call = partial(topk_passes_kernel[grid], *out, 8, 4096, 4096, 1024)
    print(f"k passes       {rates(call, x, 8)[0]:5.0f}")
    sizes = 4096, 4096, 4, 8
    for sets in (1024, 512, 256, 128, 64, 32):
        arguments = *out, out[2], 8, 1, *sizes, sets, 1024 // sets, True
        warps = max(1, sets // 128)
        call = partial(topk_kernel[grid], *arguments, num_warps=warps)
        print(f"{sets:4} sets of {1024 // sets:2} {rates(call, x, 8)[0]:5.0f}")

# %%
# The benchmark
# -------------
#
# float32, :math:`2^{28}` elements in rows of different lengths, ``k = 8``; then
# rows of 4096, different ``k``. Bytes: the input, and twelve for each element
# found; ``Roof`` copies as many. ``torch.compile`` would call PyTorch's kernel.

NAMES = ["Triton", "PyTorch", "Roof"]
SIZES = [256, 1000, 4096, 16384, 50257, 128256, 2**20, 2**24]
MANY = [1, 2, 4, 8, 16, 32, 64, 128]
curve = partial(Benchmark, line_arg="provider", line_vals=NAMES, x_log=True)
curve = partial(curve, line_names=NAMES, ylabel="GB/s")
CURVES = [curve(["N"], SIZES, plot_name="topk", args={"k": 8})]
CURVES += [curve(["k"], MANY, plot_name="topk_k", args={"N": 4096})]


@triton.testing.perf_report(CURVES)
def benchmark(N, k, provider):
    x = random(N)
    half = torch.empty(ELEMENTS // 2 + 6 * len(x) * k // 4, device=DEVICE)
    roof = partial(torch.empty_like(half).copy_, half.normal_())
    ours, eager = partial(topk, x, k), partial(torch.topk, x, k)
    return rates([ours, eager, roof][NAMES.index(provider)], x, k)


if __name__ == "__main__" and DEVICE.type == "cuda":
    results, results_k = benchmark.run(True, True, return_df=True)

# %%
# Beside PyTorch, and beside the roof:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for table in (results, results_k):
        table = table.set_index(table.columns[0])
        table = table[[f"{name} (GB/s)" for name in NAMES]]
        table.columns = NAMES
        ratios = [(table["Triton"] / table[name]).round(2) for name in NAMES]
        print(pd.concat(ratios[1:], axis=1, keys=["of PyTorch", "of the roof"]))

# %%
# Reading the result
# ------------------
#
# A program reads, then sorts. Others read meanwhile, so long rows are near the
# roof. Of the shortest rows, or with the largest ``k``, a third is sorted. From
# ``k = 16`` on, 4096 elements have 256 sets and more, so a program has several
# warps, which wait as they sort.
#
# 50257 is odd, so three rows in four begin at no multiple of 16 bytes. Without
# body and edges threads would load single elements, and four share a piece.
# *Each* would pack its maximum and keep its set, nearly four times the
# instructions. Edges cost two more sorts, of ``k`` pieces and of ``2 k`` words.
#
# Go further
# ----------
#
# 1. ``largest=False``. What changes, and where does PyTorch put NaN then?
# 2. In half precision a float and an index below 65536 fit into 32 bits. What
#    would that save? What does a row of 100000 need?
#
# This was the last recipe of the section. To read on: Gaihre and others, `Dr.
# Top-k <https://arxiv.org/abs/2109.08219>`_, where maxima stand for parts.

# %%
# Answers
# -------
#
# **1.** ``~key`` is in the reverse order, with NaN lowest, so last, as in
# PyTorch. Pieces need a minimum without NaN. What is masked ``pack`` hides.
#
# **2.** Half of the shuffles and of the comparisons. A row of 100000 has 12500
# pieces, whose numbers fit. Only the last step, with elements, needs 64 bits.
