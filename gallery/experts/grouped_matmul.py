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
# Three groups with 2, 0 and 5 rows; a tile has four rows. Program 0 finds the
# first group, programs 1 and 2 the last one. Program 3 finds no rows: 7 rows of
# 3 groups may have up to four tiles."""
# registers = ["group", "row", "end", "x", "w", "acc"]
# call = "grouped(x, w, offsets, tile=(4, 4, 4))"
# expected = { y = "exact(x, w, offsets)" }
# start = [1, 0]
#
# [tool.triton-gallery.step_through.inputs]
# x = "integers(-2, 3, 7, 8)"
# w = "integers(-2, 4, 3, 8, 4)"
# offsets = "torch.tensor([2, 2, 7], dtype=torch.int32)"
# ///
r"""
Grouped GEMM for mixtures of experts (MoE)
==========================================

A mixture of experts sends each token to a few experts, and each expert has a
weight of its own. With tokens sorted by expert, a *grouped* matrix product
multiplies each group of rows by its weight, in one launch. If all tokens use
one weight, take a plain product: see ``persistent_matmul.py``.

After this page you can

* multiply groups of any length in one launch, without asking the GPU how long
  they are;
* compute the gradient of the weights, whose sums are as long as the groups;
* say what uneven groups cost, and choose a tile for them.
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

# %%
# In PyTorch
# ----------
#
# ``x`` is (R, K): the rows of all groups, one group after another. ``w`` is
# (E, K, N), one weight for each group. ``offsets`` says where groups end: 2, 2
# and 7 are groups of two rows, of none, and of five. A loop over groups has to
# wait for the GPU, to know them. The bytes below, read once, are the *floor*.

generator = torch.Generator().manual_seed(0)
# Triton's interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
KIND = {"device": DEVICE, "dtype": DTYPE}


def loop(x, w, offsets):
    y = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for group, end in enumerate(offsets.tolist()):  # waits for the GPU
        y[start:end] = x[start:end] @ w[group]
        start = end
    return y


def exact(x, w, offsets):
    return loop(x.double(), w.double(), offsets)


def ends(E, R, skew=0.0):
    """Return offsets: R rows fall into E groups at random."""
    chances = torch.arange(1, E + 1, dtype=torch.float64) ** -skew
    chosen = torch.multinomial(chances, R, True, generator=generator)
    return chosen.bincount(minlength=E).cumsum(0).int().to(DEVICE)


def make_inputs(E, R, K, N, skew=0.0):
    x, w = (torch.randn(*s, **KIND) for s in ((R, K), (E, K, N)))
    return x, w, ends(E, R, skew)


SIZES = [(8, 32768, 768, 2048), (128, 65536, 2048, 768)]  # E, R, K and N
SIZES += [(16, 4096, 4096, 14336)]

if __name__ == "__main__":
    for E, R, K, N in SIZES:
        flops, moved = 2 * R * K * N, 2 * (R * K + E * K * N + R * N)
        print(f"{E}: {R}x{K}x{N}: {moved / 1e6:.0f} MB,", end=" ")
        print(f"{flops / 1e12:.2f} Tflop, {flops / moved:.0f} flop a byte")

# %%
# The first kernel
# ----------------
#
# A program computes one tile of ``y``, with rows of one group alone. Which
# group has tile 17 of the rows? Each program loads all offsets and counts the
# tiles of each group: those that end at or before tile 17 come before its own.
# Each group has at most one tile that is not full, so R // BLOCK_M + E programs
# are enough. Those without a tile have a first row that is not before the end.


@triton.jit
def find(slot, offsets_ptr, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the group of a tile of rows, its first row, and its end."""
    groups = tl.arange(0, BLOCK_E)  # (BLOCK_E,), of which E are groups
    some = (groups > 0) & (groups < E)
    starts = tl.load(offsets_ptr + groups - 1, mask=some, other=0)
    ends = tl.load(offsets_ptr + groups, mask=groups < E, other=0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)  # none past the last group
    after = tl.cumsum(tiles, axis=0)  # tiles of all groups up to each
    group = tl.sum((after <= slot).to(tl.int32), axis=0)
    rows = starts + (slot - after + tiles) * BLOCK_M
    row = tl.sum(tl.where(groups == group, rows, 0), axis=0)
    end = tl.sum(tl.where(groups == group, ends, 0), axis=0)
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
    for k in range(0, tl.where(row < end, K, 0), BLOCK_K):
        x_ptrs = x_ptr + offs_m * K + k + offs_k[None, :]
        x = tl.load(x_ptrs, mask=offs_m < end, other=0.0)  # (BLOCK_M, BLOCK_K)
        w = tl.load(w_ptrs + k * N)  # (BLOCK_K, BLOCK_N)
        acc = tl.dot(x, w, acc)
    # The rows after the end are of the next group.
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=offs_m < end)


def grouped(x, w, offsets, tile=(128, 128, 64)):
    """Return the products of contiguous matrices; all rows are in groups."""
    (R, K), (E, _, N), (m, n, k) = x.shape, w.shape, tile
    assert K % k == N % n == 0
    y = x.new_empty(R, N)
    sizes = E, K, N, m, n, k, triton.next_power_of_2(E)
    grouped_kernel[R // m + E, N // n](x, w, y, offsets, *sizes, num_warps=8)
    return y


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum of ``K`` terms in float32 loses at most
# :math:`2^{-24} K` of their magnitudes, and the last rounding one ``eps``.


def check(product):
    x, w, _ = make_inputs(5, 200, 128, 64)
    offsets = torch.tensor([0, 70, 70, 71, 200]).int().to(DEVICE)
    lost = product(x, w, offsets).double() - exact(x, w, offsets)
    lost /= exact(x.abs(), w.abs(), offsets)
    allowed = 2**-24 * 128 + torch.finfo(DTYPE).eps
    print(f"largest error {lost.abs().max():.1e}, allowed {allowed:.1e}")
    torch.testing.assert_close(lost, 0 * lost, rtol=0, atol=allowed)


if __name__ == "__main__":
    check(partial(grouped, tile=(32, 32, 32)))

# %%
# How fast?
# ---------
#
# Beside the loop and PyTorch's ``grouped_mm``, which takes ``offsets`` as they
# are. The roof is one product of all rows with one weight.


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
# The grid above counts tiles of rows first. So the programs that run at a time
# have one column of tiles in many groups: they read a part of many weights and
# of all ``x``, and they do so again for the next column. If programs take all
# tiles of a group before the next group, they read one weight and a part of
# ``x``, which are in L2 when they are read again.
#
# A *persistent* kernel sets the order by itself: there is one program for each
# multiprocessor, and it walks over tiles. It also starts no program without
# rows. Its tiles of ``x`` and ``w`` come from the copy engine, through *tensor
# descriptors* (``tensor_descriptors.py``). A tile that is past the end of its
# group has rows of the next group, which are computed and not stored.


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


PROGRAMS, CAN = 3, True  # without a GPU
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    PROGRAMS = gpu.multi_processor_count
    CAN = gpu.major >= 9 and not torch.version.hip  # there is a copy engine


def walk(x, w, offsets, tile=(128, 128, 64)):
    """Return the products, as grouped does; 8 divides K and N."""
    R, (E, _, N), (m, n, k) = len(x), w.shape, tile
    y = x.new_empty(R, N)
    described = (
        TensorDescriptor.from_tensor(x, [m, k]),
        TensorDescriptor.from_tensor(w, [1, k, n]),
    )
    sizes = R // m + E, E, triton.next_power_of_2(E)
    walk_kernel[(PROGRAMS,)](*described, y, offsets, *sizes, num_warps=8)
    return y


if __name__ == "__main__" and CAN:
    check(partial(walk, tile=(32, 32, 32)))

# %%
# The same sizes again:

if CAN:
    OURS["walk_kernel"] = walk

if __name__ == "__main__" and DEVICE.type == "cuda":
    show_rates(OURS, calls)

# %%
# The gradients
# -------------
#
# Let :math:`g` be the gradient of ``y``. Those of ``x`` are a grouped product,
# too, with transposed weights: a row of group :math:`e` gets :math:`g\,w_e^T`.
# That of a weight sums over the rows of its group:
#
# .. math:: d w_e = x_e^T g_e.
#
# Here all results have one shape, and the *sums* have any length. So the grid
# is known, and each program loops from the start to the end of its group. The
# rows after the end are zeros in both tiles. A group without rows loops over
# nothing: it gets zeros.


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
    (K, N), E, (m, n, k) = (x.shape[1], g.shape[1]), len(offsets), tile
    assert K % k == N % n == 0
    dw = x.new_empty(E, K, N)
    sums_kernel[(K // k, N // n, E)](
        x, g, dw, offsets, K, N, m, n, k, num_warps=8
    )
    return dw


if __name__ == "__main__":
    x, w, offsets = make_inputs(6, 200, 64, 96, skew=4.0)
    wide = w.double().requires_grad_()
    g = torch.randn(200, 96, **KIND)
    loop(x.double(), wide, offsets).backward(g.double())
    dw = sums(x, g, offsets, (32, 32, 32))
    print("lengths", offsets.diff(prepend=offsets[:1] * 0).tolist())
    # A sum of 200 terms: a hundredth of the largest result is plenty.
    atol = 0.01 * wide.grad.abs().max().item()
    torch.testing.assert_close(dw.double(), wide.grad, rtol=0, atol=atol)

# %%
# Beside PyTorch, where ``grouped_mm`` of ``x.T`` and ``g`` is the same:


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
# The last tile of a group is not full, and it takes as long as a full one. So
# what is computed is more than what is asked for. For 8192 rows of 64 groups,
# these are the rows of all tiles, divided by 8192. In groups with a skew of 1,
# group :math:`n` gets a part of the rows in proportion to :math:`1 / n`.


def filled(offsets, BLOCK_M):
    """Return the rows of all tiles for each row of the groups."""
    lengths = offsets.diff(prepend=offsets[:1] * 0)
    return (BLOCK_M * lengths.add(BLOCK_M - 1).div(BLOCK_M).floor()).sum()


if __name__ == "__main__":
    table = pd.DataFrame(index=[16, 32, 64, 128, 256])
    table.index.name = "BLOCK_M"
    for skew in (0.0, 1.0, 2.0):
        offsets = ends(64, 8192, skew)
        rows = [filled(offsets, m).item() / 8192 for m in table.index]
        table[f"skew {skew:.0f}"] = rows
    print(table.to_string(float_format="%.2f"))

# %%
# A small tile computes less for nothing, but loads more for each operation. The
# host knows neither the lengths nor the skew. It knows R and E, and so that
# there are about R / BLOCK_M + E / 2 tiles of rows. The op takes the tile for
# which these take the least time, by the formula of ``persistent_matmul.py``.

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for skew in (0.0, 1.0, 2.0):
        found = gpu_time(calls(OURS, 64, 8192, 2048, 1408, skew=skew))
        times[f"skew {skew:.0f}"] = {who: t[0] for who, t in found.items()}
    print("ms", pd.DataFrame(times).to_string(float_format="%.3f"), sep="\n")

# %%
# The op
# ------
#
# ``grouped_matmul(x, weight, offsets, bias=None)`` is this gallery's op. To
# ``walk_kernel`` it adds any sizes and strides, loads of the next tile before
# the present one is stored, stores by the copy engine that end at the end of a
# group, and zeros in the rows past the last group. Its gradient of the weights
# is persistent as well.
#
# ``grouped_matmul_fp8`` is the same product of float8, for inference, with
# scales for tensors, rows or blocks of 128. Its weights are (E, N, K), as the
# tensor cores take float8 that lies along K.

from triton_gallery_ops.grouped_matmul import grouped_matmul

# %%
# The result
# ----------
#
# Layers of models in bfloat16: groups, rows, inputs, outputs. *Triton* is the
# op. The backward computes both gradients, through autograd.

LAYERS = [
    (8, 32768, 768, 2048),
    (8, 32768, 2048, 768),
    (128, 65536, 2048, 1536),
    (128, 65536, 768, 2048),
    (32, 32768, 7168, 2048),
    (64, 8192, 2048, 1408),
]

if __name__ == "__main__":
    check(grouped_matmul)


def work(layer, products=1):
    _, R, K, N = map(int, layer.split(", "))
    return products * 2e-9 * R * K * N


def backward_calls(*size):
    """Return calls that compute the gradients of x and w."""
    x, w, offsets = make_inputs(*size)
    x, w = x.requires_grad_(), w.requires_grad_()
    g = torch.randn(size[1], size[3], **KIND)
    grad = partial(torch.autograd.grad, retain_graph=True)
    products = {"Triton": grouped_matmul, "PyTorch": grouped_mm}
    ys = {who: product(x, w, offsets) for who, product in products.items()}
    return {who: partial(grad, y, (x, w), g) for who, y in ys.items()}


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
# is needed.
#
# **1.** ``walk_kernel`` loops over as many tiles of rows as there may be. Store
# at ``count_ptr`` how many there are.

count_kernel = None  # takes (offsets_ptr, count_ptr, E, BLOCK_M, BLOCK_E)


def judge_count(kernel):
    """Say whether a kernel counts tiles."""
    if kernel is None:
        return "not solved yet"
    offsets = ends(100, 1000)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernel[(1,)](offsets, count, 100, BLOCK_M=16, BLOCK_E=128)
    return "right" if count * 16 == filled(offsets, 16) else "wrong"


if __name__ == "__main__":
    print(judge_count(count_kernel))

# %%
# **2.** The gradient of a bias (E, N) is the sum of ``g`` over the rows of each
# group. There is a program for each group, and for each BLOCK_N columns.

bias_kernel = None  # takes (g_ptr, db_ptr, offsets_ptr, N, BLOCK_M, BLOCK_N)


def judge_bias(kernel):
    """Say whether a kernel sums up the rows of groups."""
    if kernel is None:
        return "not solved yet"
    g, _, offsets = make_inputs(6, 100, 128, 32, skew=3.0)
    db = g.new_empty(6, 128)
    kernel[(6, 2)](g, db, offsets, 128, BLOCK_M=32, BLOCK_N=64)
    lengths = offsets.diff(prepend=offsets[:1] * 0).tolist()
    expected = torch.stack([rows.double().sum(0) for rows in g.split(lengths)])
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
