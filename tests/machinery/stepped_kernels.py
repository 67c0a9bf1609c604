# /// script
# requires-python = ">=3.11"
# dependencies = []
#
# [[tool.triton-gallery.step_through]]
# kernel = "row_kernel"
# caption = "A row of `x` per program; three lanes of eight are masked off."
# registers = ["x", "e", "y"]
# inputs = { x = "integers(0, 4, 3, 5)", y = "torch.full_like(x, -9)" }
# call = "row_kernel[(3,)](x, y, 5, BLOCK_N=8)"
# expected = { y = "torch.softmax(x, -1)" }
# start = [1, 0]
#
# [[tool.triton-gallery.step_through]]
# kernel = "tile_kernel"
# caption = "A tile of `c` per program."
# registers = ["start", "a", "b", "acc"]
# inputs = { a = "integers(-3, 4, 6, 5)", b = "integers(-3, 4, 5, 7)", c = "torch.full((6, 7), -9.0)" }
# expected = { c = "a @ b" }
# layout = "product"
# start = [1, 3]
# call = "tile_kernel[(2, 2)](a, b, c, 6, 7, 5, BLOCK_M=4, BLOCK_N=4, BLOCK_K=4)"
#
# [[tool.triton-gallery.step_through]]
# kernel = "histogram_kernel"
# caption = "Lanes that point to the same element."
# registers = ["offs", "x"]
# inputs = { x = "torch.tensor([2, 0, 1, 1, 3, 1, 0, 2, 1, 0])", bins = "torch.zeros(4, dtype=torch.int32)" }
# expected = { bins = "torch.bincount(x)" }
# start = [1, 1]
# [[tool.triton-gallery.step_through.launches]]
# label = "atomic"
# call = "histogram_kernel[(4,)](x, bins, 10, BLOCK_N=4)"
# [[tool.triton-gallery.step_through.launches]]
# label = "a race"
# kernel = "race_kernel"
# call = "race_kernel[(3,)](x, bins, 10, BLOCK_N=4)"
# at_once = 2
# wrong = true
# race = true
# [[tool.triton-gallery.step_through.launches]]
# label = "without the mask"
# kernel = "maskless_kernel"
# call = "maskless_kernel[(3,)](x, bins, BLOCK_N=4)"
# wrong = true
# outside = true
#
# [[tool.triton-gallery.step_through]]
# kernel = "batch_kernel"
# caption = "A batch of matrices: the sum of each row."
# registers = ["x"]
# inputs = { x = "integers(0, 4, 2, 3, 3)", out = "torch.full((2, 3), -9.0)" }
# call = "batch_kernel[(2,)](x, out, BLOCK=4)"
# expected = { out = "x.sum(-1)" }
#
# [[tool.triton-gallery.step_through]]
# kernel = "surplus_kernel"
# caption = "A grid with a row of programs too many."
# registers = ["row", "offs", "inside"]
# inputs = { out = "torch.full((2, 6), -9.0)" }
# call = "surplus_kernel[(3, 2)](out, 2, 6, BLOCK=4)"
# expected = { out = "10 * torch.arange(2.0)[:, None] + torch.arange(6.0)" }
# ///
"""Kernels whose every step tests compare with what is in memory."""

import triton
import triton.language as tl


@triton.jit
def row_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)
    # A comment of its own line is not shown
    x = tl.load(x_ptr + start + offs, mask=offs < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + start + offs, y, mask=offs < N)


@triton.jit
def tile_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(axis=0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a_mask = (offs_m < M) & (offs_k[None, :] < K)
        b_mask = (offs_k[:, None] < K) & (offs_n < N)
        a = tl.load(a_ptr + offs_m * K + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    c_mask = (offs_m < M) & (offs_n < N)
    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)


@triton.jit
def histogram_kernel(x_ptr, bins_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.atomic_add(bins_ptr + x, 1, mask=offs < N)


@triton.jit
def race_kernel(x_ptr, bins_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs, mask=offs < N)
    count = tl.load(bins_ptr + x, mask=offs < N)
    tl.store(bins_ptr + x, count + 1, mask=offs < N)


@triton.jit
def maskless_kernel(x_ptr, bins_ptr, BLOCK_N: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs)
    tl.atomic_add(bins_ptr + x, 1)


@triton.jit
def batch_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    batch = tl.program_id(axis=0)
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + batch * 9 + row * 3 + column, mask=(row < 3) & (column < 3), other=0.0)
    so_far = tl.cumsum(x, axis=1)
    total = tl.sum(tl.where(column == 2, so_far, 0.0), axis=1, keep_dims=True)
    tl.store(out_ptr + batch * 3 + row, total, mask=row < 3)


@triton.jit
def surplus_kernel(out_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows) & (offs < columns)
    tl.store(out_ptr + row * columns + offs, 10 * row + offs, mask=inside)
