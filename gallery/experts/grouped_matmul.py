# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Multiply each expert's tokens by its weight in one launch, with groups of any
# length that only the GPU knows, and compute the gradient of the weights."""
# dtypes = [
#   "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"
# ]
# backward = true
# deterministic = true
# longer = "two directions, by copy engine and by pointers, and float8"
#
# [tool.triton-gallery.not_for]
# walk_kernel = ["sm_80", "sm_89", "gfx942"]
# _grouped_matmul_engine_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _grouped_matmul_engine_sums_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "grouped_kernel"
# caption = """
# Three groups with 2, 0 and 5 rows. A tile of y is 4 x 8, and a step along K
# is 2 long. Program 0 has the first group, programs 1 and 2 the last one.
# Program 3 is past the last tile, and gets group 4, which does not exist."""
# registers = ["group", "row", "end", "x", "w", "acc"]
# call = "grouped(x, w, offsets, tile=(4, 8, 2))"
# expected = { y = "loop(x, w, offsets)" }
# start = [1, 0]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(-2, 3, 7, 4)"
# w = "integers(-2, 4, 3, 4, 8)"
# offsets = "torch.tensor([2, 2, 7], dtype=torch.int32)"
# ///
r"""
Grouped GEMM for mixtures of experts (MoE)
==========================================

A mixture of experts sends each token to a few experts, and each expert has a
weight of its own. With tokens sorted by expert, a *grouped* matrix product
(GEMM: general matrix multiplication) multiplies each group of rows by its
weight, in one launch. If all tokens use one weight, take a plain product: see
``persistent_matmul.py``.

After this page you can

* multiply groups of any length in one launch, without asking the GPU how long
  they are;
* compute the gradient of the weights, each a sum over the rows of its group;
* say what uneven groups cost.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "TMA", "autograd"]
import os
from functools import partial

import matplotlib.pyplot as plt
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

from triton_gallery.bench import gpu_time, rate_table

generator = torch.Generator().manual_seed(0)
# Triton's interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
KIND = {"device": DEVICE, "dtype": DTYPE}

PROGRAMS, CAN = 3, True  # without a GPU
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    PROGRAMS = gpu.multi_processor_count
    CAN = gpu.major >= 9 and not torch.version.hip  # there is a copy engine


def ends(E, R, skew=0.0):
    """Return offsets: R rows fall into E groups at random."""
    chances = torch.arange(1, E + 1, dtype=torch.float64) ** -skew
    chosen = torch.multinomial(chances, R, True, generator=generator)
    return chosen.bincount(minlength=E).cumsum(0).int().to(DEVICE)


def lengths(offsets):
    """Return how many rows each group has."""
    return offsets.diff(prepend=offsets[:1] * 0)


def make_inputs(E, R, K, N, skew=0.0):
    """Return random x, w and offsets."""
    x, w = (torch.randn(*s, **KIND) for s in ((R, K), (E, K, N)))
    return x, w, ends(E, R, skew)


# %%
# In PyTorch
# ----------
#
# ``x`` is (R, K): the rows of all groups, one group after another. ``w`` is
# (E, K, N), one weight for each group. A token sent to two experts is two rows
# of ``x``. ``offsets`` (E,), int32, has each group's end, exclusive: 2, 2 and 7
# are groups of 2, 0 and 5 rows. A loop in Python needs these numbers, and waits
# until the GPU has them.
# The run prints the *floor*, the bytes if each element is moved once, and the
# operations (flop) for each of these bytes. If these are more than a GPU can do
# while it moves a byte, arithmetic limits the speed, not memory.


def loop(x, w, offsets):
    y = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for group, end in enumerate(offsets.tolist()):  # waits for the GPU
        y[start:end] = x[start:end] @ w[group]
        start = end
    return y


SIZES = [(8, 32768, 768, 2048), (128, 65536, 2048, 768)]  # E, R, K and N
SIZES += [(16, 4096, 4096, 14336)]

if __name__ == "__main__":
    for E, R, K, N in SIZES:
        flops = 2e-6 * R * K * N  # two for each term of a sum
        moved = 2e-6 * (R * K + E * K * N + R * N)  # two bytes an element
        print(f"{E}: {R}x{K}x{N}: {moved:.0f} MB, {flops / moved:.0f} flop/B")

# %%
# The first kernel
# ----------------
#
# A program computes one tile of ``y``, with rows of one group alone. ``slot``
# is the number of its tile of rows, counted from 0 over all groups. Which group
# has slot 1, with offsets 2, 2 and 7 and BLOCK_M = 4? The groups have 1, 0 and
# 2 tiles (``tiles``); their running sum ``after``, 1, 1 and 3, is the first
# slot after each group. The groups with ``after <= 1`` end before slot 1. There
# are two, so it belongs to group 2, which begins at slot ``after - tiles`` = 1:
# slot 1 is its first tile.
#
# There are at most R // BLOCK_M full tiles, and each group has at most one that
# is not full, so R // BLOCK_M + E programs are enough. Past the last tile,
# ``find`` returns ``group`` = BLOCK_E, a group that does not exist, and ``row``
# = ``end`` = 0. So check ``row < end`` before you load with ``group``.


@triton.jit
def find(slot, offsets_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the group of a tile of rows, its first row, the group's end."""
    groups = tl.arange(0, BLOCK_E)  # 0, 1, 2, 3: E is 3
    some = (groups > 0) & (groups < E)
    starts = tl.load(offsets_ptr + groups - 1, mask=some, other=0)  # 0, 2, 2, 0
    ends = tl.load(offsets_ptr + groups, mask=groups < E, other=0)  # 2, 2, 7, 0
    tiles = tl.cdiv(ends - starts, BLOCK_M)  # 1, 0, 2, 0
    after = tl.cumsum(tiles, axis=0)  # the sum up to each: 1, 1, 3, 3
    group = tl.sum((after <= slot).to(tl.int32), axis=0)  # 2; past all: BLOCK_E
    # Each group's first row, and BLOCK_M more for each of its tiles before ours
    rows = starts + (slot - (after - tiles)) * BLOCK_M  # 4, 2, 2, -8
    # The sums have one term that is not 0: that of our group.
    row = tl.sum(tl.where(groups == group, rows, 0), axis=0)  # 2; past all: 0
    end = tl.sum(tl.where(groups == group, ends, 0), axis=0)  # 7; past all: 0
    return group, row, end


@triton.jit
def grouped_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    offsets_ptr,
    E,
    K,  # a multiple of BLOCK_K
    N,  # a multiple of BLOCK_N
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    slot = tl.program_id(axis=0)
    group, row, end = find(slot, offsets_ptr, E, BLOCK_M, BLOCK_E)
    # In int32 the offset of a row would overflow past element 2**31.
    offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (group.to(tl.int64) * K + offs_k[:, None]) * N + offs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # A program without rows makes no turns.
    for k in range(0, tl.where(row < end, K, 0), BLOCK_K):
        x_ptrs = x_ptr + offs_m * K + k + offs_k[None, :]
        x = tl.load(x_ptrs, mask=offs_m < end, other=0.0)  # (BLOCK_M, BLOCK_K)
        w = tl.load(w_ptrs + k * N)  # (BLOCK_K, BLOCK_N)
        acc = tl.dot(x, w, acc)  # acc + x @ w
    # Rows past the end belong to the next group.
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=offs_m < end)


def grouped(x, w, offsets, tile=(128, 128, 64)):
    """Return the products; rows past offsets[-1] keep what new_empty had."""
    (R, K), (E, _, N), (m, n, k) = x.shape, w.shape, tile
    assert w.shape[1] == K
    assert offsets.dtype == torch.int32
    assert all(t.is_contiguous() for t in (x, w))
    assert K % k == N % n == 0
    y = x.new_empty(R, N)
    sizes = E, K, N, *tile, triton.next_power_of_2(E)
    # Eight warps, 256 threads, share a tile.
    grouped_kernel[R // m + E, N // n](x, w, y, offsets, *sizes, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# ``make_inputs``, in the folded cell above, draws ``x``, ``w`` and offsets. We
# compare with float64. A sum of ``K`` terms in float32 loses at most
# :math:`2^{-24} K` times the sum of their magnitudes, and the rounding to 16
# bits at most one ``eps`` of the result. So we divide by the sum of magnitudes.


def check(product):
    x, w, _ = make_inputs(5, 200, 128, 64)
    offsets = torch.tensor([0, 70, 70, 71, 200]).int().to(DEVICE)
    y, x, w = product(x, w, offsets).double(), x.double(), w.double()
    lost = (y - loop(x, w, offsets)) / loop(x.abs(), w.abs(), offsets)
    allowed = 2**-24 * 128 + torch.finfo(DTYPE).eps
    print(f"largest error {lost.abs().max():.1e}, allowed {allowed:.1e}")
    torch.testing.assert_close(lost, 0 * lost, rtol=0, atol=allowed)


if __name__ == "__main__":
    check(partial(grouped, tile=(32, 32, 32)))

# %%
# How fast?
# ---------
#
# *PyTorch* is ``torch.nn.functional.grouped_mm``, which needs no copy of
# ``offsets`` to the host, either. The roof is one product of all rows with one
# weight. A column is a size, E: R x K x N.


def show_rates(ours, calls):
    columns = {}
    for E, R, K, N in SIZES:
        times = gpu_time(calls(ours, E, R, K, N), turns=20)
        work = 2e-9 * R * K * N
        rates = {who: round(work / t[0]) for who, t in times.items()}
        columns[f"{E}: {R}x{K}x{N}"] = rates
    print("TFLOP/s", pd.DataFrame(columns).to_string(), sep="\n")


def grouped_mm(x, w, offsets):
    return torch.nn.functional.grouped_mm(x, w, offs=offsets)


def calls(ours, *size, skew=0.0):
    """Return what is timed for a size, by name."""
    x, w, offsets = make_inputs(*size, skew)
    timed = ours | {"loop": loop, "PyTorch": grouped_mm}
    timed = {name: partial(f, x, w, offsets) for name, f in timed.items()}
    return timed | {"Roof": partial(torch.matmul, x, w[0])}


OURS = {"grouped_kernel": grouped}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS, calls)

# %%
# In which order?
# ---------------
#
# The grid above counts tiles of rows first: programs that run at the same time
# compute one column of tiles in many groups. They read a part of many weights
# and all of ``x``, and all of ``x`` again for the next column. If they take all
# columns of a tile of rows first, they read one weight and a few rows of ``x``
# repeatedly, from L2, the cache of the whole GPU.
#
# A *persistent* kernel sets the order itself: ``PROGRAMS`` programs, one for
# each multiprocessor, each loop over many tiles. A tile without rows costs a
# turn of the loop, not a program; ``slots`` is R // BLOCK_M + E, as above.
#
# Tiles of ``x`` and ``w`` come from the GPU's copy engine (TMA), if it has one
# (``CAN``). A *tensor descriptor* tells it the address and shape of a tensor,
# and the shape of a tile, ``block_shape``. ``x_desc.load([row, k])`` is the
# tile that begins at that row and column (``tensor_descriptors.py``). Elements
# outside the tensor are 0, so K need not be a multiple of BLOCK_K. A tile of
# ``w`` has a first dimension of 1, which ``reshape`` drops. Rows past the
# group's end belong to the next group: they are computed and not stored.


@triton.jit
def walk_kernel(
    x_desc, w_desc, y_ptr, offsets_ptr, slots, E, BLOCK_E: tl.constexpr
):
    BLOCK_M: tl.constexpr = x_desc.block_shape[0]
    BLOCK_K: tl.constexpr = x_desc.block_shape[1]
    BLOCK_N: tl.constexpr = w_desc.block_shape[2]
    K, N = w_desc.shape[1], w_desc.shape[2]
    tiles_n = tl.cdiv(N, BLOCK_N)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    for tile in range(first, slots * tiles_n, programs):
        # All columns of a tile of rows, then the next rows.
        slot, off_n = tile // tiles_n, tile % tiles_n * BLOCK_N
        group, row, end = find(slot, offsets_ptr, E, BLOCK_M, BLOCK_E)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.where(row < end, K, 0), BLOCK_K):
            x = x_desc.load([row, k])  # (BLOCK_M, BLOCK_K)
            w = w_desc.load([group, k, off_n]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x, w, acc)
        offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        offs_n = off_n + tl.arange(0, BLOCK_N)[None, :]
        y = acc.to(y_ptr.dtype.element_ty)
        mask = (offs_m < end) & (offs_n < N)
        tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)


def walk(x, w, offsets, tile=(128, 128, 64)):
    """Return the products, as grouped does."""
    (R, K), (E, _, N), (m, n, k) = x.shape, w.shape, tile
    assert w.shape[1] == K
    assert offsets.dtype == torch.int32
    assert K % 8 == N % 8 == 0  # each row begins at a multiple of 16 bytes
    y = x.new_empty(R, N)
    x_desc = TensorDescriptor.from_tensor(x, block_shape=[m, k])
    w_desc = TensorDescriptor.from_tensor(w, block_shape=[1, k, n])
    sizes = R // m + E, E, triton.next_power_of_2(E)
    walk_kernel[(PROGRAMS,)](x_desc, w_desc, y, offsets, *sizes, num_warps=8)
    return y


if __name__ == "__main__" and CAN:
    check(partial(walk, tile=(32, 32, 32)))

# %%
# The same sizes again, with new lengths. In the recorded run ``walk_kernel`` is
# close to ``grouped_kernel`` at the first two sizes and slower at the third:
# the order and the copy engine alone do not pay. *The op* lists what it adds.

OURS |= {"walk_kernel": walk} if CAN else {}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS, calls)

# %%
# The gradients
# -------------
#
# Let :math:`g` be the gradient of ``y``. The gradient of ``x`` is a grouped
# product, too: a row of group :math:`e` gets :math:`g\,w_e^T`. The gradient of
# a weight sums over the rows of its group: :math:`d w_e = x_e^T g_e`.
#
# Every :math:`d w_e` is (K, N); only the number of rows in its *sums* varies.
# So the host knows the grid, and each program loops from the start to the end
# of its group. Rows past the end are zeros in both tiles. For a group without
# rows, the loop makes no turns, and the gradient is zero.


@triton.jit
def sums_kernel(
    x_ptr,
    g_ptr,
    dw_ptr,
    offsets_ptr,
    K,  # a multiple of BLOCK_K
    N,  # a multiple of BLOCK_N
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group = tl.program_id(axis=2)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    offs_k = tl.program_id(axis=0) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for row in range(start, end, BLOCK_M):
        offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        x_ptrs = x_ptr + offs_m[None, :] * K + offs_k
        g_ptrs = g_ptr + offs_m[:, None] * N + offs_n
        x = tl.load(x_ptrs, mask=offs_m[None, :] < end, other=0.0)
        g = tl.load(g_ptrs, mask=offs_m[:, None] < end, other=0.0)
        acc = tl.dot(x, g, acc)  # (BLOCK_K, BLOCK_M) by (BLOCK_M, BLOCK_N)
    dw_ptrs = dw_ptr + (group.to(tl.int64) * K + offs_k) * N + offs_n
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty))


def sums(x, g, offsets, tile=(64, 128, 128)):
    """Return the gradient of the weights."""
    K, N, E, (_, n, k) = x.shape[1], g.shape[1], len(offsets), tile
    assert all(t.is_contiguous() for t in (x, g))
    assert K % k == N % n == 0
    dw = x.new_empty(E, K, N)
    sums_kernel[K // k, N // n, E](x, g, dw, offsets, K, N, *tile, num_warps=8)
    return dw


if __name__ == "__main__":
    x, w, offsets = make_inputs(6, 200, 64, 96, skew=4.0)
    wide = w.double().requires_grad_()
    g = torch.randn(200, 96, **KIND)
    loop(x.double(), wide, offsets).backward(g.double())
    dw = sums(x, g, offsets, (32, 32, 32))
    print("lengths", lengths(offsets).tolist())
    exact, terms = wide.grad, wide.detach().requires_grad_()
    loop(x.double().abs(), terms, offsets).backward(g.double().abs())
    # As in check: the sum of the magnitudes is terms.grad.
    bound = (2**-24 * 200 + torch.finfo(DTYPE).eps) * terms.grad
    over = ((dw.double() - exact).abs() - bound).clamp(min=0)
    torch.testing.assert_close(over, 0 * over, rtol=0, atol=0)

# %%
# In PyTorch, ``grouped_mm`` of ``x.T`` and ``g`` computes the same gradient.


def sums_calls(ours, E, R, K, N):
    x, _, offsets = make_inputs(E, R, K, N)
    g = torch.randn(R, N, **KIND)
    timed = {who: partial(f, x, g, offsets) for who, f in ours.items()}
    return timed | {"PyTorch": partial(grouped_mm, x.T, g, offsets)}


if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates({"sums_kernel": sums}, sums_calls)

# %%
# What do uneven groups cost?
# ---------------------------
#
# The last tile of a group is seldom full, but all its rows are computed. The
# table divides the rows of all tiles by 8192, the rows of the 64 groups: 1
# would be no waste. With a skew of :math:`s`, group :math:`n` gets rows in
# proportion to :math:`n^{-s}`. Each column is one random draw.


def filled(offsets, BLOCK_M):
    """Return how many rows all tiles have."""
    return ((lengths(offsets) + BLOCK_M - 1) // BLOCK_M * BLOCK_M).sum()


if __name__ == "__main__":
    index = pd.Index([16, 32, 64, 128, 256], name="BLOCK_M")
    table = pd.DataFrame(index=index)
    for skew in (0, 1, 2):
        offsets = ends(64, 8192, skew)
        table[f"skew {skew}"] = [filled(offsets, m).item() for m in index]
    print((table / 8192).to_string(float_format="%.2f"))

# %%
# A small tile wastes less arithmetic, but loads more bytes for each operation.
# The host must choose without the lengths: it knows only R and E. The op
# assumes even groups, whose last tile is half full on average (most skewed
# groups are short, and fill less of it), and takes the tile whose products and
# loads cost least by the rule of ``persistent_matmul.py``.
#
# The next table has times for new draws, with K = 2048 and N = 1408. In the
# recorded run the time of ``walk_kernel`` grows with the rows computed (BLOCK_M
# is 128), that of ``grouped_kernel`` little.

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for skew in (0, 1, 2):
        found = gpu_time(calls(OURS, 64, 8192, 2048, 1408, skew=skew))
        times[f"skew {skew}"] = {who: t[0] for who, t in found.items()}
    print("ms", pd.DataFrame(times).to_string(float_format="%.3f"), sep="\n")

# %%
# The op
# ------
#
# ``grouped_matmul(x, weight, offsets, bias=None)`` is this gallery's op. It is
# ``walk_kernel`` with
#
# * any sizes and strides, and zeros in the rows past the last group;
# * loads of the next tile that begin before this tile is stored;
# * stores by the copy engine, cut off at the group's end;
# * a persistent kernel for the gradient of the weights.
#
# ``grouped_matmul_fp8`` is the same product of float8, for inference, with
# scales for tensors, rows or blocks of 128. Its weights are (E, N, K), as the
# tensor cores need float8 operands with contiguous K.
#
# To add a bias (E, N), ``walk_kernel`` would need the parameter ``bias_ptr``
# and these lines below ``offs_n``:
#
# .. code-block:: python
#
#    some = (row < end) & (offs_n < N)  # there is a group, and a column
#    bias_ptrs = bias_ptr + group.to(tl.int64) * N + offs_n  # (1, BLOCK_N)
#    acc += tl.load(bias_ptrs, mask=some, other=0.0).to(tl.float32)
#
# A router's weight for each row (R,) would be loaded at ``offs_m``, with the
# mask ``offs_m < end``, and would multiply ``acc`` after the bias is added.

from triton_gallery_ops.grouped_matmul import grouped_matmul

# %%
# The result
# ----------

if __name__ == "__main__":
    check(grouped_matmul)

# %%
# Each label is E, R, K and N of a model's layer, in bfloat16. *Triton* is the
# op. The chart has GPU time. If the CPU time of a call, below the chart, is
# longer, calls take that long, unless a CUDA graph replays them.

LAYERS = [
    (8, 32768, 768, 2048),
    (8, 32768, 2048, 768),
    (128, 65536, 2048, 1536),
    (128, 65536, 768, 2048),
    (32, 32768, 7168, 2048),
    (64, 8192, 2048, 1408),
]


def work(layer, products=1):
    _, R, K, N = map(int, layer.split(", "))
    return products * 2e-9 * R * K * N


def show(results, title):
    """Print a table and who leads, and draw it."""
    print(title, results.to_string(), sep="\n")
    wide = results.pivot(index="layer", columns="series", values="TFLOP/s")
    wide.loc[results["layer"].unique()].plot.bar(
        rot=20, ylabel="TFLOP/s", title=title
    )
    plt.tight_layout()
    ratio = wide["Triton"] / wide["PyTorch"]
    print(f"op / PyTorch: {ratio.min():.2f} to {ratio.max():.2f}")


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for size in LAYERS:
        timed = calls({"Triton": grouped_matmul}, *size)
        times[", ".join(map(str, size))] = gpu_time(timed, turns=20)
    results = rate_table(times, "layer", "TFLOP/s", work)
    show(results, "forward")

# %%
# The backward computes both gradients, through autograd.


def backward_calls(*size):
    """Return calls that compute the gradients of x and w."""
    x, w, offsets = make_inputs(*size)
    x, w = x.requires_grad_(), w.requires_grad_()
    g = torch.randn(size[1], size[3], **KIND)
    grad = partial(torch.autograd.grad, retain_graph=True)
    products = {"Triton": grouped_matmul, "PyTorch": grouped_mm}
    ys = {who: product(x, w, offsets) for who, product in products.items()}
    return {who: partial(grad, y, (x, w), g) for who, y in ys.items()}


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for size in LAYERS:
        timed = backward_calls(*size)
        times[", ".join(map(str, size))] = gpu_time(timed, turns=20)
    results_backward = rate_table(
        times, "layer", "TFLOP/s", partial(work, products=2)
    )
    show(results_backward, "backward")

# %%
# Exercises
# ---------
#
# Write a kernel and run the cell: it says whether the kernel is right. No GPU
# is needed. ``ends``, in the folded cell at the top, draws offsets.
#
# **1.** ``walk_kernel`` loops past the last tile. With one program, count the
# tiles of rows that there are, and store the count at ``count_ptr``.

count_kernel = None  # takes (offsets_ptr, count_ptr, E, BLOCK_M, BLOCK_E)


def judge_count(kernel):
    if kernel is None:
        return "not solved yet"
    offsets = ends(100, 1000)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernel[(1,)](offsets, count, 100, BLOCK_M=16, BLOCK_E=128)
    return "right" if count * 16 == filled(offsets, 16) else "wrong"


if __name__ == "__main__":
    print(judge_count(count_kernel))

# %%
# **2.** Sum ``g`` over the rows of each group: this is the gradient of a bias.
# The grid is (E, N // BLOCK_N).

bias_kernel = None  # takes (g_ptr, db_ptr, offsets_ptr, N, BLOCK_M, BLOCK_N)


def judge_bias(kernel):
    if kernel is None:
        return "not solved yet"
    g, _, offsets = make_inputs(6, 100, 128, 32, skew=3.0)
    db = g.new_empty(6, 128)
    kernel[(6, 2)](g, db, offsets, 128, BLOCK_M=32, BLOCK_N=64)
    groups = g.double().split(lengths(offsets).tolist())
    expected = torch.stack([rows.sum(0) for rows in groups])
    near = torch.allclose(db.double(), expected, 1e-2, 1e-1)
    return "right" if near else "wrong"


if __name__ == "__main__":
    print(judge_bias(bias_kernel))

# %%
# Answers
# -------
#
# **1.** Past the last group, both loads give zeros, and so no tiles:


@triton.jit
def count_answer_kernel(
    offsets_ptr, count_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    groups = tl.arange(0, BLOCK_E)  # (BLOCK_E,)
    some = (groups > 0) & (groups < E)
    starts = tl.load(offsets_ptr + groups - 1, mask=some, other=0)
    ends = tl.load(offsets_ptr + groups, mask=groups < E, other=0)
    tl.store(count_ptr, tl.sum(tl.cdiv(ends - starts, BLOCK_M), axis=0))


if __name__ == "__main__":
    answer = judge_count(count_answer_kernel)
    print(answer)
    assert answer == "right"

# %%
# **2.** As ``sums_kernel``, with a sum along the rows of a tile in place of the
# product:


@triton.jit
def bias_answer_kernel(
    g_ptr, db_ptr, offsets_ptr, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    group = tl.program_id(axis=0)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    offs_n = tl.program_id(axis=1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for row in range(start, end, BLOCK_M):
        offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        g_ptrs = g_ptr + offs_m * N + offs_n[None, :]
        g = tl.load(g_ptrs, mask=offs_m < end, other=0.0)
        acc += tl.sum(g.to(tl.float32), axis=0)
    db = acc.to(db_ptr.dtype.element_ty)
    tl.store(db_ptr + group.to(tl.int64) * N + offs_n, db)


if __name__ == "__main__":
    answer = judge_bias(bias_answer_kernel)
    print(answer)
    assert answer == "right"
