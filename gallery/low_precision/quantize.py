# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Give numbers 8 bits and a scale for each row or group: what a scale is for,
# how large a group may be, and how one pass over memory finds both."""
# dtypes = ["float16", "bfloat16", "float32"]
# backward = false
# deterministic = true
# longer = "eight formats, scales of a tensor, rows, groups, blocks, and back"
#
# [[tool.triton-gallery.step_through]]
# kernel = "row_kernel"
# caption = """
# A row of x per program, to int8. MAX is 7 here, so the scales are 1 and 2.
# A row has 5 elements and BLOCK_N is 8. 3 / 2 and -5 / 2 were rounded up."""
# registers = ["x", "largest", "scale", "values"]
# inputs.x = "torch.tensor([[1., -7, 3, 0, 5], [14, 3, -5, 6, 2]])"
# inputs.values = "torch.zeros(2, 5, dtype=torch.int8)"
# inputs.scale = "torch.zeros(2, 1)"
# call = "row_kernel[(2,)](x, values, scale, N=5, MAX=7.0, BLOCK_N=8)"
# expected.values = """torch.tensor([[1, -7, 3, 0, 5], [7, 2, -2, 3, 1]],
#     dtype=torch.int8)"""
# expected.scale = "torch.tensor([[1.], [2.]])"
# start = [1, 1]
#
# [[tool.triton-gallery.step_through]]
# kernel = "group_kernel"
# caption = """
# Groups of 2 in tiles of 2 rows and 4 columns; MAX is 7, and values stay
# float32. In the registers, each line of groups is one group and has one scale.
# A row has 7 elements: the last group has one of them, and a masked 0."""
# registers = ["x", "groups", "largest", "scale", "values"]
# call = "group_kernel[(2,)](x, values, scale, 2, 7, 7.0, 2, 4, GROUP=2)"
# start = [1, 2]
#
# [tool.triton-gallery.step_through.inputs]
# x = "torch.tensor([[1., -7, 14, 6, 7, -3, 14], [-14, 4, 7, 5, 2, 14, -7]])"
# values = "torch.zeros(2, 7)"
# scale = "torch.zeros(2, 4)"
#
# [tool.triton-gallery.step_through.expected]
# values = "torch.tensor([[1., -7, 7, 3, 7, -3, 7], [-7, 2, 7, 5, 1, 7, -7]])"
# scale = "torch.tensor([[1., 2, 1, 2], [2, 1, 2, 1]])"
# ///
r"""
Quantize to FP8 and INT8: a scale for each row or group
=======================================================

A weight or an activation of 8 bits takes half the memory of bfloat16, and the
tensor cores of an H100 multiply 8-bit numbers twice as fast as bfloat16. But
eight bits cover a small range, so the numbers of a block are first divided by
one number, their *scale*. Plain PyTorch finds the scale and casts in several
passes over memory. A kernel of your own reads the numbers once, and you choose
which of them share a scale.

After this page you can

* say what a scale is for, in floats and in integers, and what an outlier does;
* quantize rows, and groups of a row, in one pass over memory;
* choose the size of a block by the error that it leaves.
"""

# sphinx_gallery_tags = ["quantization", "float8", "reduction", "memory bound"]
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
from triton_gallery.counting import Traffic


def check(kernel, x, expected, *constants):
    """Launch a program for each row; print whether the results are right."""
    if kernel is None:
        print("not solved yet")
        return False
    M, N = x.shape
    results = [torch.zeros_like(right) for right in expected]
    kernel[(M,)](x, *results, N, *constants, triton.next_power_of_2(N))
    pairs = zip(results, expected, strict=True)
    right = all(torch.equal(a.float(), b.float()) for a, b in pairs)
    print("right" if right else "wrong")
    return right


def compare(ours, in_torch):
    """Check float8 values and scales against PyTorch's, on a GPU."""
    (values, scales), (expected, expected_scales) = ours, in_torch
    # Triton's division may be off by two units in the last place
    torch.testing.assert_close(scales, expected_scales, rtol=2**-22, atol=0)
    # So a value half way between two float8 numbers may become either: they
    # are an eighth apart at most, or 2**-9 near 0
    values, expected = values.float(), expected.float()
    torch.testing.assert_close(values, expected, rtol=1 / 8, atol=2**-9)
    count = (values != expected).sum().item()
    print(f"{count} of {values.numel():,} float8 values differ from PyTorch's")


def check_steps(values, scales, x):
    """Check that int8 values are half a step off at most."""
    steps = ((values * scales - x).abs() / scales).max().item()
    print(f"int8: largest error {steps:.4f} of a step, allowed 0.5001")
    assert steps <= 0.5001  # a little more than half: the scale is rounded, too


def error_of(x, block, largest, rounded, relative, near_0):
    """Quantize x, a scale for each block if given; return the error over x."""
    blocks, scale = x, 1.0
    if block:
        (M, N), (rows, columns) = x.shape, block
        blocks = x.view(M // rows, rows, N // columns, columns)
        scale = blocks.abs().amax((1, 3), keepdim=True) / largest
    exact = blocks / scale
    difference = rounded(exact) - exact
    assert (difference.abs() <= (exact.abs() * relative).clamp(near_0)).all()
    return ((difference * scale).norm() / blocks.norm()).item()


def four_matrices(generator):
    """Return a matrix of each distribution, by name."""
    kind = {"generator": generator, "device": DEVICE}
    x, *others = torch.randn(4, 256, 1024, **kind).double() / 1000
    larger = torch.arange(1024, device=DEVICE) % 100 == 0
    return {
        "Gaussian": x,
        "uniform": torch.rand(256, 1024, **kind).double() / 1000,
        "Student's t": x / torch.stack(others).norm(dim=0) / 1000,
        "outliers": torch.where(larger, 50 * x, x),
    }


def draw_errors(matrices):
    """Draw the errors of both formats, and print some of them."""
    ways = {"no scale": None, "tensor": (256, 1024), "128 x 128": (128, 128)}
    ways |= {"row": (1, 1024), "1 x 128": (1, 128), "1 x 32": (1, 32)}
    ways["column"] = 256, 1
    formats = {  # the largest number, the cast, its error: relative, and near 0
        "float8": (448, lambda y: y.to(E4M3).double(), 1 / 16, 2**-10),
        "int8": (127, torch.round, 0, 1 / 2),
    }
    lines = "o-", "s--", "^:", "D-."
    _, axes = plt.subplots(1, 2, sharey=True, figsize=(8, 3), layout="tight")
    rows = {}
    for panel, name in zip(axes, formats, strict=True):
        for (kind, x), line in zip(matrices.items(), lines, strict=True):
            errors = [error_of(x, way, *formats[name]) for way in ways.values()]
            rows[name, kind] = dict(zip(ways, errors, strict=True))
            *smaller, column = ways
            (drawn,) = panel.semilogy(smaller, errors[:-1], line, label=kind)
            # No line to the column: it is not the smallest block
            panel.semilogy(column, errors[-1], line[0], color=drawn.get_color())
        panel.set_title(f"Relative error in {name}")
        panel.tick_params("x", rotation=40)
        panel.legend()
    table = pd.DataFrame(rows).T.drop(columns=["no scale", "128 x 128"])
    print(table.to_string(float_format="{:.4f}".format))


def rows_of_bytes(generator):
    """Return rows whose scale is 0.5, and what the second exercise returns."""
    kind = {"generator": generator, "device": DEVICE}
    values = torch.randint(0, 256, (20, 100), **kind)
    values[:, 0] = 0
    values[:, 1] = 255
    zeros = torch.arange(0, 200, 10, device=DEVICE).view(20, 1)
    x = 0.5 * (values - zeros)
    return x, (values.byte(), torch.full_like(x[:, :1], 0.5), zeros.byte())


# %%
# In PyTorch
# ----------
#
# FP8 here is ``float8_e4m3fn``: a sign, four bits of exponent, three of
# mantissa, and no infinity. Its largest number is 448. We divide each row by a
# *scale* that brings its largest magnitude to 448, and keep the scale:
# :math:`x \approx \mathit{values} \cdot \mathit{scale}`. In int8 the largest
# magnitude becomes 127, and quotients are rounded to integers. PyTorch takes
# several operators, each a kernel; ``Traffic`` counts the bytes that they move.
# The *floor* is the least that a kernel moves: ``x`` in, values and scales out.

E4M3 = torch.float8_e4m3fn
generator = torch.Generator(device=DEVICE).manual_seed(0)


def quantize_torch(x):
    """Return each row divided by its scale, as float8, and the scales."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scales = largest / 448
    return (x.float() * (1 / scales)).to(E4M3), scales


if __name__ == "__main__":
    x = torch.randn(64, 4096, generator=generator, device=DEVICE).bfloat16()
    with Traffic() as traffic:
        values, scales = quantize_torch(x)
    least = x.nbytes + values.nbytes + scales.nbytes
    count, times = len(traffic.operators), traffic.moved / least
    print(f"{count} operators, {times:.1f} times the floor of {least:,} bytes")

# %%
# The first kernel
# ----------------
#
# A program keeps a row in registers, so it reads the row once for the maximum
# and for the values. Masked elements are 0, which changes no maximum. A row of
# zeros would have the scale 0, and ``0 * (1 / 0)`` is NaN; a tiny scale has an
# infinite inverse. So no scale is below ``2.0**-126``, the smallest normal
# float32. A cast to int8 cuts the fraction off, so the kernel rounds first:
# ``floor(v + 0.5)``, where halves go up; ``torch.round`` takes them to even
# numbers. As the scale is rounded, a value may come out just above 448 or 127,
# but its rounding to 8 bits takes it back: no clamp.


@triton.jit
def row_kernel(
    x_ptr, values_ptr, scale_ptr, N, MAX: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(axis=0).to(tl.int64)  # row * N may pass 2**31
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    scale = tl.maximum(largest / MAX, 2.0**-126)  # the larger of two numbers
    # One division for the row, and a product for each element
    values = x * (1 / scale)  # (BLOCK_N,)
    # element_ty is the dtype of what a pointer points to, known to the compiler
    if values_ptr.dtype.element_ty.is_int():
        values = tl.floor(values + 0.5)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * N + offs, values, mask=mask)
    tl.store(scale_ptr + row, scale)


LARGEST = {E4M3: 448.0, torch.int8: 127.0}


def quantize_rows(x, dtype=E4M3):
    """Return each row divided by its scale, and the scales; x is finite."""
    M, N = x.shape
    assert 0 < N <= 16384  # the op reads longer rows twice
    x = x.contiguous()
    values = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(M, 1, dtype=torch.float32)
    MAX = LARGEST[dtype]
    BLOCK_N = triton.next_power_of_2(N)
    warps = max(1, BLOCK_N // 1024)  # a warp is 32 threads, of 32 elements each
    row_kernel[(M,)](x, values, scales, N, MAX, BLOCK_N, num_warps=warps)
    return values, scales


# %%
# Is it right?
# ------------
#
# The first check takes numbers that need no rounding: float8 numbers up to 448,
# times a power of two for each row. The kernel must find that power as the
# scale, and the error must be 0. The second rounds to int8: neighbors are one
# scale (a *step*) apart, so it allows half a step. The third compares rounding
# to float8 with PyTorch's, only on a GPU: Triton's interpreter rounds some
# numbers wrongly (1.97 to 1, as a carry is lost).


def exact_rows(M, N, largest=448):
    """Return rows of float8 numbers times powers of two, and the powers."""
    x = 100 * torch.randn(M, N, generator=generator, device=DEVICE)
    x = x.clamp(-largest, largest).to(E4M3).float()
    x[:, 0] = largest
    power = torch.randint(-20, 20, (M, 1), generator=generator, device=DEVICE)
    return torch.ldexp(x, power), torch.ldexp(torch.ones_like(x[:, :1]), power)


if __name__ == "__main__":
    x, powers = exact_rows(7, 1000)
    x[3:5] = 0  # row 3 stays all zeros
    x[4, 0] = 2.0**-125  # so small that row 4 has the least scale
    powers[3:5] = 2.0**-126
    values, scales = quantize_rows(x)
    error = (values.float() * scales - x).abs().max().item()
    print(f"float8: largest error {error}, allowed 0")
    torch.testing.assert_close(scales, powers, rtol=0, atol=0)
    assert error == 0
    x = torch.randn(20, 300, generator=generator, device=DEVICE)
    values, scales = quantize_rows(x, dtype=torch.int8)
    check_steps(values, scales, x)  # from the fold with the imports
    if DEVICE.type == "cuda":
        x[:, 0] = 448  # the largest of its row, so the scale is 1
        differ = quantize_rows(x)[0].float() != x.to(E4M3).float()
        print(f"float8: {differ.sum()} of {x.numel()} differ from PyTorch's")
        assert not differ.any()

# %%
# How fast?
# ---------
#
# Matrices of ``2**28`` bfloat16 numbers, in rows of N, become float8. GB/s are
# the floor's bytes over the time. The *roof* is a copy of as many bytes; it is
# measured, so a kernel may be a little above it.

ELEMENTS = 2**28  # far more than a GPU's caches hold
LEAST = 3e-6 * ELEMENTS  # megabytes: two bytes read, one written


def calls(ours, in_torch, N):
    """Return what is timed for rows of N, by name."""
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    x = torch.randn(ELEMENTS // N, N, generator=generator, **kind)
    torch.compiler.reset()  # past eight lengths it would raise
    fast = torch.compile(in_torch, dynamic=False, fullgraph=True)
    ours = ours | {"PyTorch": in_torch, "torch.compile": fast}
    copied = torch.empty(3 * ELEMENTS // 2, dtype=torch.int8, device=DEVICE)
    roof = partial(torch.empty_like(copied).copy_, copied)
    return {name: partial(op, x) for name, op in ours.items()} | {"Roof": roof}


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for N in (256, 4096, 16384):
        ours = {"row_kernel": quantize_rows}
        times = gpu_time(calls(ours, quantize_torch, N))
        rows[N] = {name: round(LEAST / t[0]) for name, t in times.items()}
    table = pd.DataFrame(rows).T.rename_axis("N")
    print("GB/s", table.to_string(), sep="\n")

# %%
# At N = 256, a program reads only 512 bytes. In the kernel for groups, below,
# it takes several rows; the last lines of *The result* compare the two.
#
# Break it: one outlier
# ---------------------
#
# A row has 1023 numbers between -1 and 1, and an outlier: 1000. How many of the
# row's numbers are not 0 after rounding?

if __name__ == "__main__":
    x = torch.rand(1, 1024, generator=generator, device=DEVICE) * 2 - 1
    x[0, 500] = 1000
    for dtype in (E4M3, torch.int8):
        values, _ = quantize_rows(x, dtype=dtype)
        kept = (values.float() != 0).sum().item()
        print(f"{dtype!s:20} keeps {kept} of 1024 numbers")

# %%
# In int8, the outlier makes the step 1000 / 127, about 8. All other numbers are
# within half a step of 0 and become 0. Float8 numbers near 0 are closer
# together: the smallest above 0 is ``2**-9``. Half of it, times the scale of
# 1000 / 448, is about 0.002. Only smaller numbers become 0: two of 1023 on
# average, by chance none or a few (more in the interpreter, which rounds
# differently).

# %%
# How large may a block be?
# -------------------------
#
# A *block* is a part of a matrix whose numbers share a scale; a *group* is a
# block of one row. Small blocks confine the outlier's damage. We measure it on
# four matrices of 256 x 1024 numbers: *Gaussian*, much as weights are, with a
# standard deviation of 0.001; *uniform*, from 0 to 0.001; *Student's t*, with
# heavy tails; and *outliers*, Gaussian with one column in a hundred 50 times
# larger, as in activations of language models. No kernel here: plain PyTorch,
# with scales in float64, so that only the 8 bits of values cause errors. From
# left to right, blocks (of rows x columns) get smaller; a column, 256 x 1, is
# there for comparison. The error is the root mean square of ``values * scale -
# x``, divided by that of ``x``.

if __name__ == "__main__":
    draw_errors(four_matrices(generator))

# %%
# * *No scale:* in int8 all of these numbers become 0. In float8 numbers below
#   ``2**-10`` (half the smallest above 0) do, nearly all of the uniform ones.
# * *float8:* a number is off by a sixteenth of itself at most, unless it is
#   near 0. So the size of a block hardly matters, except with outliers, which
#   make most of the error. The largest number of a block becomes 448, without
#   an error. In a small block, it is often the only outlier. A column of
#   outliers has 255 others.
# * *int8:* the largest number of a block sets the step, and each number may be
#   off by half a step. So small blocks help wherever a few numbers are large,
#   and a column helps where outliers fill columns.
#
# A product ``x @ w`` adds up along a row of ``x`` and a column of ``w``, and a
# scale can leave the sum only if all terms share it. So each row of ``x`` and
# each column of ``w`` has a scale: element ``[i, j]`` of the product is the sum
# over values, times ``x_scale[i] * w_scale[j]``. A scale for a column of ``x``
# cannot leave the sum, and would have to go into ``w``. ``torch.nn.Linear``
# holds ``w.T``, so ``quantize_rows(linear.weight)`` gives each column of ``w``
# a scale. With 1 x 128, the sum is taken in parts of 128 terms, and each part
# is multiplied by its scales.
#
# Scales take memory: with 1 x 32 an eighth of what the values take, with
# 1 x 128 a thirty-second. We take 128 as a compromise.

# %%
# Groups of 128
# -------------
#
# A group needs no other part of its row. So a program takes a *tile*, which is
# what it loads: ``BLOCK_M`` rows and ``BLOCK_N`` columns, here 8 and 512, so 4
# groups wide and 32 elements a thread. It is wide, as neighbors in a row are
# neighbors in memory. ``pid_m`` is its row of tiles, ``pid_n`` its column. As
# in PyTorch, ``[:, None]`` and ``[None, :]`` broadcast. The kernel reshapes the
# tile to (rows, groups, 128), takes the maximum along the last dimension,
# scales, and reshapes back.


@triton.jit
def group_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    M,
    N,
    MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_N // GROUP  # in a row; shapes are constants
    pid = tl.program_id(axis=0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = pid // tiles_n, pid % tiles_n
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m[:, None] * N + offs_n[None, :]  # (BLOCK_M, BLOCK_N)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    groups = tl.reshape(x, (BLOCK_M, GROUPS, GROUP))
    largest = tl.max(tl.abs(groups), axis=2)  # (BLOCK_M, GROUPS)
    scale = tl.maximum(largest / MAX, 2.0**-126)
    values = tl.reshape(groups * (1 / scale)[:, :, None], (BLOCK_M, BLOCK_N))
    if values_ptr.dtype.element_ty.is_int():
        values = tl.floor(values + 0.5)
    values = values.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + offs, values, mask=mask)
    groups_n = tl.cdiv(N, GROUP)  # columns of the matrix of scales
    offs_g = pid_n * GROUPS + tl.arange(0, GROUPS)  # (GROUPS,)
    mask_g = (offs_m < M)[:, None] & (offs_g < groups_n)[None, :]
    offs_s = offs_m[:, None] * groups_n + offs_g[None, :]
    tl.store(scale_ptr + offs_s, scale, mask=mask_g)


def quantize_groups(x, GROUP=128, dtype=E4M3, tile=(8, 512)):
    """Return each group divided by its scale, and the scales; x is finite."""
    MAX = LARGEST[dtype]
    BLOCK_M, BLOCK_N = tile  # powers of two; 4 warps of 32 threads by default
    assert BLOCK_N % GROUP == 0  # so GROUP is a power of two
    M, N = x.shape
    x = x.contiguous()
    values = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty(M, triton.cdiv(N, GROUP), dtype=torch.float32)
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    group_kernel[grid](x, values, scales, M, N, MAX, *tile, GROUP)
    return values, scales


if __name__ == "__main__":
    for GROUP in (128, 32):  # six programs; 1100 leaves a short last group
        groups = triton.cdiv(1100, GROUP)
        x, powers = exact_rows(11 * groups, GROUP)
        x, powers = x.view(11, -1)[:, :1100], powers.view(11, groups)
        # float8 numbers times a power of two are exact in bfloat16, too
        values, scales = quantize_groups(x.bfloat16(), GROUP)
        assert torch.equal(scales, powers)
        factors = powers.repeat_interleave(GROUP, 1)[:, :1100]
        assert torch.equal(values.float() * factors, x)
        print(f"groups of {GROUP}: no error")
    x = torch.randn(11, 1100, generator=generator, device=DEVICE)
    values, scales = quantize_groups(x, dtype=torch.int8)
    check_steps(values, scales.repeat_interleave(128, 1)[:, :1100], x)

# %%
# The op
# ------
#
# ``quantize(x, block_size)`` is this gallery's op. To these kernels it adds
# scales of the tensor and of blocks such as 128 x 128, strides, long rows, and
# NaN scales for NaN (here ``tl.max`` ignores NaN). Its module also has
# ``dequantize`` and formats of 4 bits.

from triton_gallery_ops.quantize import quantize

# %%
# The result
# ----------
#
# Groups of 128, to float8, in matrices of ``2**28`` bfloat16 numbers. *Triton*
# is the op, and *Triton, this page* is ``quantize_groups``. 2880 is no multiple
# of 128: there PyTorch pads the rows, and ``group_kernel`` masks them.
#
# GB/s count the time on the GPU alone: 805 MB at 4000 GB/s take 201 us. Below
# the chart is the CPU time of a call: how long Python takes until the GPU has
# its work. When calls follow one another, each takes the longer of the two, so
# compare them. Where that is the CPU time, a faster kernel gains nothing:
# launch it by a CUDA graph (``cuda_graphs.py``), or take a function with less
# CPU time.
#
# In the printed lines, *PyTorch's best* is the faster of PyTorch and
# ``torch.compile`` at each length. The count is of 300 rows of 2880: Triton's
# division may differ from PyTorch's in the last bits, so a number about half
# way between two float8 numbers may become either. The last two are of rows of
# 256, with a scale each: ``row_kernel``, then ``group_kernel`` with a tile of
# (16, 256) and a GROUP of 256, so that a program takes 16 rows.

SIZES = [512, 768, 1024, 2880, 4096, 7168, 11008, 16384]
OURS = {
    "Triton": partial(quantize, block_size=(1, 128)),
    "Triton, this page": quantize_groups,
}


def groups_torch(x):
    """Return values and scales, also where 128 does not divide a row."""
    whole = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    values, scales = quantize_torch(whole.view(x.shape[0], -1, 128))
    return values.view(whole.shape)[:, : x.shape[1]], scales[..., 0]


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(OURS, groups_torch, N)) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: LEAST)
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True, title="groups of 128 to float8")
    best = wide[["PyTorch", "torch.compile"]].max(axis=1)
    others = {"PyTorch's best": best, "the roof": wide["Roof"]}
    for series in OURS:
        for name, other in others.items():
            ratio = wide[series] / other
            low, high, at = ratio.min(), ratio.max(), ratio.idxmax()
            span = f"{low:.2f} to {high:.2f} (at {at})"
            print(f"{series}: {span} times as fast as {name}")
    x = torch.randn(300, 2880, generator=generator, device=DEVICE).bfloat16()
    compare(quantize_groups(x), groups_torch(x))
    tall = partial(quantize_groups, GROUP=256, tile=(16, 256))
    short = {"a row a program": quantize_rows, "16 rows": tall}
    times = gpu_time(calls(short, quantize_torch, 256))
    for name in short:
        print(f"N = 256, {name}: {LEAST / times[name][0]:.0f} GB/s")

# %%
# Exercises
# ---------
#
# Write a kernel and run its cell: ``check`` says whether the kernel is right.
# No GPU is needed.
#
# **1.** With the arguments of ``row_kernel``, round its scale up to a power of
# two. Then multiplying by it is exact, and a byte holds its exponent. Use
# ``tl.log2``, ``tl.ceil`` and ``tl.exp2``.

power_kernel = None  # your kernel

if __name__ == "__main__":
    x, powers = exact_rows(20, 100, largest=256)
    expected_power = (x / powers).to(E4M3), powers
    check(power_kernel, x, expected_power, 448.0)

# %%
# **2.** Numbers that are mostly of one sign waste half of int8. A *zero point*
# shifts them: it is the integer that stands for 0, so that ``x`` is about
# ``(values - zero) * scale``, with values from 0 to 255. Let ``low`` be the
# smaller of 0 and the row's smallest number, and ``high`` the larger of 0 and
# its largest. Then the scale is ``(high - low) / 255`` and the zero point is
# ``-low / scale``, rounded. A program takes a row and stores its values
# (uint8), scale (float32) and zero point (uint8). Use ``tl.min`` and
# ``tl.minimum``, also to keep values within 255. No row here is all zeros.

zero_point_kernel = None  # (x_ptr, values_ptr, scale_ptr, zero_ptr, N, BLOCK_N)

if __name__ == "__main__":
    shifted, expected_bytes = rows_of_bytes(generator)
    check(zero_point_kernel, shifted, expected_bytes)

# %%
# Answers
# -------
#
# **1.** The exponent is rounded up, so that no value is larger than 448.


@triton.jit
def power_answer_kernel(
    x_ptr, values_ptr, scale_ptr, N, MAX: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    scale = tl.exp2(tl.ceil(tl.log2(largest / MAX)))
    scale = tl.maximum(scale, 2.0**-126)
    values = (x / scale).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * N + offs, values, mask=mask)
    tl.store(scale_ptr + row, scale)


if __name__ == "__main__":
    assert check(power_answer_kernel, x, expected_power, 448.0)

# %%
# **2.** 0 is in the range, so masked elements of 0 are harmless. The zero point
# is rounded, too, so a value may leave the range: clamp it.


@triton.jit
def zero_point_answer_kernel(
    x_ptr, values_ptr, scale_ptr, zero_ptr, N, BLOCK_N: tl.constexpr
):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)
    low = tl.minimum(tl.min(x, axis=0), 0.0)
    high = tl.maximum(tl.max(x, axis=0), 0.0)
    scale = (high - low) / 255
    zero = tl.floor(-low / scale + 0.5)  # from 0 to 255
    values = tl.minimum(tl.floor(x / scale + zero + 0.5), 255.0)
    values = tl.maximum(values, 0.0)
    tl.store(values_ptr + row * N + offs, values.to(tl.uint8), mask=mask)
    tl.store(scale_ptr + row, scale)
    tl.store(zero_ptr + row, zero.to(tl.uint8))


if __name__ == "__main__":
    assert check(zero_point_answer_kernel, shifted, expected_bytes)
