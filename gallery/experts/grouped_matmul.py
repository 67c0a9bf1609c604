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
# _grouped_matmul_engine_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# _grouped_matmul_engine_sums_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
#
# [[tool.triton-gallery.step_through]]
# kernel = "grouped_kernel"
# caption = """
# Three groups with 2, 0 and 5 rows. A tile of y is 4 x 8, and a step along K
# is 2 long. Program 0 has the first group, programs 1 and 2 the last one.
# Program 3 is past the last tile, and gets group 4, which does not exist. On a
# GPU, ``tl.dot`` needs at least 16 along each side."""
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

# sphinx_gallery_tags = ["matmul", "compute bound", "autograd"]
import os
from functools import partial

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

from triton_gallery.bench import gpu_time, rate_table

generator = torch.Generator(device=DEVICE).manual_seed(0)
# Triton's interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# E, R, K and N
SIZES = (8, 32768, 768, 2048), (128, 65536, 2048, 768), (16, 4096, 4096, 14336)
# Ends of five groups, two of them empty, for checks
UNEVEN = torch.tensor([0, 70, 70, 71, 200], dtype=torch.int32, device=DEVICE)


def ends(E, R, skew=0.0):
    """Return offsets: R rows fall into E groups at random."""
    numbers = torch.arange(1, E + 1, dtype=torch.float64, device=DEVICE)
    chosen = torch.multinomial(numbers**-skew, R, True, generator=generator)
    return chosen.bincount(minlength=E).cumsum(0).int()


def lengths(offsets):
    """Return how many rows each group has."""
    return offsets.diff(prepend=offsets[:1] * 0)


def draw(*shape):
    """Return random numbers."""
    kind = {"device": DEVICE, "dtype": DTYPE}
    return torch.randn(shape, generator=generator, **kind)


def make_inputs(E, R, K, N):
    """Return random x, w and offsets."""
    return draw(R, K), draw(E, K, N), ends(E, R)


# %%
# In PyTorch
# ----------
#
# ``x`` is (R, K): the rows of all groups, one group after another. ``w`` is
# (E, K, N), one weight for each group. A token sent to two experts is two rows
# of ``x``. ``offsets`` (E,), int32, has each group's end, exclusive and at most
# R: 2, 2 and 7 are groups of 2, 0 and 5 rows. A Python loop needs the ends on
# the host, so it waits for the GPU. For sizes E: R x K x N, the run prints the
# *floor*, the bytes if each element is moved once, and the operations (flop)
# for each byte. By its data sheet, an H200 does about 200 operations while it
# moves a byte. All three sizes have more, so arithmetic limits their speed.


def loop(x, w, offsets):
    y = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for group, end in enumerate(offsets.tolist()):  # waits for the GPU
        y[start:end] = x[start:end] @ w[group]
        start = end
    return y


if __name__ == "__main__":
    for E, R, K, N in SIZES:
        flops = 2e-6 * R * K * N  # two for each term of a sum
        moved = 2e-6 * (R * K + E * K * N + R * N)  # two bytes an element
        print(f"{E}: {R}x{K}x{N}: {moved:.0f} MB, {flops / moved:.0f} flop/B")

# %%
# The first kernel
# ----------------
#
# A program computes a tile of ``y``, with rows of one group alone. Tiles of
# rows are numbered from 0 across all groups: ``slot`` is this tile's number.
# With the offsets 2, 2 and 7, and BLOCK_M = 4:
#
# .. code-block:: text
#
#    rows    2  0  5
#    tiles   1  0  2   how many tiles of rows
#    after   1  1  3   their running sum: the first tile after the group
#
# In which group is tile 1? The groups with ``after <= 1`` end before it. There
# are two, so it is in group 2, which begins at tile ``after - tiles`` = 1.
#
# At most R // BLOCK_M tiles are full, and one in each group may not be, so R //
# BLOCK_M + E programs are enough. Past the last tile, ``row`` = ``end`` = 0 and
# ``group`` = BLOCK_E does not exist: check ``row < end`` before a load with it.


@triton.jit
def find(slot, offsets_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the group of a tile of rows, its first row, the group's end."""
    groups = tl.arange(0, BLOCK_E)  # 0, 1, 2, 3: the example, slot 1
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
    for k in range(0, tl.where(row < end, K, 0), BLOCK_K):  # no rows: no turns
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
    assert (w.shape[1], w.dtype, offsets.dtype) == (K, x.dtype, torch.int32)
    assert all(t.is_contiguous() for t in (x, w, offsets))
    assert K % k == N % n == 0  # masks are for rows alone
    y = x.new_empty(R, N)
    sizes = E, K, N, *tile, triton.next_power_of_2(E)
    grouped_kernel[R // m + E, N // n](x, w, y, offsets, *sizes, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# ``UNEVEN``, in the folded cell above, has the ends of five groups, two of them
# empty; the last ten rows are in none. We compare with float64. A sum of ``K``
# terms in float32 loses at most :math:`2^{-24} K` times the sum of magnitudes,
# and rounding to 16 bits at most one ``eps`` of the result, which is no larger.
# So we divide the error by that sum, and allow :math:`2^{-24} K` + ``eps``.


def check(product):
    x, w = draw(210, 128), draw(5, 128, 128)
    y, x, w = product(x, w, UNEVEN).double(), x.double(), w.double()
    lost = (y - loop(x, w, UNEVEN)) / loop(x.abs(), w.abs(), UNEVEN)
    lost = lost[:200]  # the rest is in no group
    allowed = 2**-24 * 128 + torch.finfo(DTYPE).eps
    print(f"largest error {lost.abs().max():.1e}, allowed {allowed:.1e}")
    torch.testing.assert_close(lost, 0 * lost, rtol=0, atol=allowed)


if __name__ == "__main__":
    check(grouped)
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
        times = gpu_time(calls(ours, *make_inputs(E, R, K, N)), turns=20)
        work = 2e-9 * R * K * N
        rates = {who: round(work / t[0]) for who, t in times.items()}
        columns[f"{E}: {R}x{K}x{N}"] = rates
    table = pd.DataFrame(columns)
    print("TFLOP/s", table.to_string(), sep="\n")
    first = next(iter(ours))
    ratio = table.loc[first] / table.loc["PyTorch"]
    print(f"{first} / PyTorch: {ratio.min():.2f} to {ratio.max():.2f}")


def grouped_mm(x, w, offsets):
    return torch.nn.functional.grouped_mm(x, w, offs=offsets)


def calls(ours, x, w, offsets):
    """Return what is timed, by name."""
    timed = ours | {"PyTorch": grouped_mm}
    timed = {name: partial(f, x, w, offsets) for name, f in timed.items()}
    return timed | {"Roof": partial(torch.matmul, x, w[0])}


OURS = {"grouped_kernel": grouped, "loop": loop}

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS, calls)

# %%
# In the recorded run, ``grouped_kernel`` is between ``loop`` and PyTorch.
# ``loop``, with a launch for each group, is slowest where groups are most.
# *The op* below adds the steps of ``persistent_matmul.py``.
#
# The gradients
# -------------
#
# Let :math:`g` be the gradient of ``y``. The gradient of ``x`` is a grouped
# product, too: ``grouped(g, w.mT.contiguous(), offsets)``. The gradient of a
# weight sums over the rows of its group: :math:`d w_e = x_e^T g_e`.
#
# Every :math:`d w_e` is (K, N); only the number of rows in its *sums* varies.
# So the host knows the grid, and each program loops from the start to the end
# of its group. Rows past the end are loaded as zeros. For a group without rows,
# the loop makes no turns, and the gradient is zero.


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
    assert x.dtype == g.dtype
    assert x.shape[0] == g.shape[0]
    assert offsets.dtype == torch.int32
    assert all(t.is_contiguous() for t in (x, g, offsets))
    assert K % k == N % n == 0
    assert E <= 65535  # the most along the third axis of a grid
    dw = x.new_empty(E, K, N)
    sums_kernel[K // k, N // n, E](x, g, dw, offsets, K, N, *tile, num_warps=8)
    return dw


def by_autograd(x, w, g):
    """Return the gradient of w in float64, from the loop."""
    w = w.double().requires_grad_()
    loop(x.double(), w, UNEVEN).backward(g.double())
    return w.grad


if __name__ == "__main__":
    x, w, g = draw(210, 128), draw(5, 128, 128), draw(210, 128)
    # check divides by it, but here it may be 0. No group has over 129 rows.
    bound = by_autograd(x.abs(), w, g.abs())
    info = torch.finfo(DTYPE)  # below tiny, numbers are eps * tiny apart
    bound = (2**-24 * 129 + info.eps) * bound + info.eps * info.tiny
    for tile in ((64, 128, 128), (32, 32, 32)):
        error = (sums(x, g, UNEVEN, tile) - by_autograd(x, w, g)).abs()
        over = (error - bound).clamp(min=0)  # the excess; NaN stays NaN
        torch.testing.assert_close(over, torch.zeros_like(over), rtol=0, atol=0)
    print("gradient of the weights: each error within its bound")

# %%
# In PyTorch, ``grouped_mm`` of ``x.T`` and ``g`` computes the same gradient.


def sums_calls(ours, x, w, offsets):
    g = draw(x.shape[0], w.shape[2])
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
# would be no waste. With a skew of :math:`s`, group :math:`i`, counted from 1,
# gets rows in proportion to :math:`1 / i^s`. Each column is one random draw.


def filled(offsets, BLOCK_M):
    """Return how many rows all tiles have."""
    return ((lengths(offsets) + BLOCK_M - 1) // BLOCK_M * BLOCK_M).sum()


DRAWS = {f"skew {skew}": ends(64, 8192, skew) for skew in (0, 1, 2)}

if __name__ == "__main__":
    index = pd.Index([16, 32, 64, 128, 256], name="BLOCK_M")
    table = pd.DataFrame(index=index)
    for name, offsets in DRAWS.items():
        table[name] = [filled(offsets, m).item() for m in index]
    print((table / 8192).to_string(float_format="%.2f"))

# %%
# A small tile wastes less arithmetic, but loads more bytes for each operation.
# The host must choose without the lengths: it knows only R and E. The op
# assumes that a group's last tile is half full on average. For each tile size,
# it multiplies the number of tiles by the cost of one, a sum of area
# (arithmetic) and edges (loads), and takes the size with the least.
#
# The same draws, with K = 2048 and N = 1408, take these times. The last line is
# of ``grouped_kernel``, whose BLOCK_M is 128. In the recorded run, its time
# grows less than the rows that it computes: to count rows overstates what skew
# costs this kernel.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x, w, _ = make_inputs(64, 8192, 2048, 1408)
    times = {}
    for name, offsets in DRAWS.items():
        found = gpu_time(calls(OURS, x, w, offsets))
        times[name] = {who: t[0] for who, t in found.items()}
    times = pd.DataFrame(times)
    print("ms", times.to_string(float_format="%.3f"), sep="\n")
    grown = []
    for row in (times.loc["grouped_kernel"], table.loc[128]):
        grown.append(row["skew 2"] / row["skew 0"])
    print("skew 2 / skew 0: time {:.2f}, rows computed {:.2f}".format(*grown))

# %%
# The op
# ------
#
# ``grouped_matmul(x, weight, offsets, bias=None)`` is this gallery's op. It is
# ``grouped_kernel`` with
#
# * any sizes and strides, and zeros in the rows past the last group;
# * the steps of ``persistent_matmul.py``: the GPU's copy engine (TMA) loads and
#   stores tiles, their order reuses what is in the L2 cache, and there is one
#   program for each multiprocessor, which loads its next tile before it stores;
# * the same steps in the gradient of the weights.
#
# ``grouped_matmul_fp8`` is the same product of float8, for inference, with
# scales for tensors, rows or blocks of 128. Its weights are (E, N, K), as the
# tensor cores need float8 operands with contiguous K.
#
# With a contiguous bias (E, N), ``loop`` would add ``bias[group]`` to each
# product, and ``grouped_kernel`` would take ``bias_ptr`` and have these lines
# above ``y =``, where ``acc`` is not rounded yet:
#
# .. code-block:: python
#
#    some = offs_n < tl.where(row < end, N, 0)  # past all, there is no group
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
# op, and *Triton, this page* is ``grouped``. The chart and the first line below
# it are of GPU time. The second line takes the longer of a call's GPU and CPU
# time, which a model sees unless a CUDA graph replays the call. In the recorded
# run, the op is slower than PyTorch by this clock at some sizes.

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


CLOCKS = {
    "GPU time": lambda t: t[0] * 1e3,
    "longer of GPU and CPU time": lambda t: max(t[0] * 1e3, t[3]),
}


def show(times, results, title):
    """Print a table and who leads, and draw it."""
    print(title, results.to_string(), sep="\n")
    wide = results.pivot(index="layer", columns="series", values="TFLOP/s")
    wide.loc[results["layer"].unique()].plot.bar(
        rot=20, ylabel="TFLOP/s", title=title
    )
    plt.tight_layout()
    for clock, us in CLOCKS.items():
        ratio = [us(t["PyTorch"]) / us(t["Triton"]) for t in times.values()]
        speed = f"{min(ratio):.2f} to {max(ratio):.2f} times PyTorch's speed"
        print(f"{title}, {clock}: the op has {speed}")


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for size in LAYERS:
        ours = {"Triton": grouped_matmul, "Triton, this page": grouped}
        timed = calls(ours, *make_inputs(*size))
        times[", ".join(map(str, size))] = gpu_time(timed, turns=20)
    results = rate_table(times, "layer", "TFLOP/s", work)
    show(times, results, "forward")

# %%
# The backward computes both gradients, through autograd.


def backward_calls(*size):
    """Return calls that compute the gradients of x and w."""
    x, w, offsets = make_inputs(*size)
    x, w = x.requires_grad_(), w.requires_grad_()
    g = draw(size[1], size[3])
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
    show(times, results_backward, "backward")

# %%
# Exercises
# ---------
#
# Write a kernel and run the cell: it says whether the kernel is right. No GPU
# is needed. ``ends``, in the folded cell at the top, draws offsets.
#
# **1.** Some programs of ``grouped`` have no rows. With one program, count the
# tiles of rows that there are, and store the count at ``count_ptr``.

# Takes offsets_ptr, count_ptr, E and the constexprs BLOCK_M and BLOCK_E
count_kernel = None  # your kernel


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

# Takes g_ptr, db_ptr, offsets_ptr, N and the constexprs BLOCK_M and BLOCK_N
bias_kernel = None  # your kernel


def judge_bias(kernel):
    if kernel is None:
        return "not solved yet"
    g = draw(200, 128)
    db = g.new_full((5, 128), float("nan"))  # two groups are empty
    kernel[(5, 2)](g, db, UNEVEN, 128, BLOCK_M=32, BLOCK_N=64)
    groups = g.double().split(lengths(UNEVEN).tolist())
    expected = torch.stack([rows.sum(0) for rows in groups])
    near = torch.allclose(db.double(), expected, rtol=1e-2, atol=1e-1)
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
