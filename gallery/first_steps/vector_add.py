# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Write a first Triton kernel of six lines, launch it, check it, time it, and
# find what it takes to beat PyTorch."""
#
# [[tool.triton-gallery.step_through]]
# kernel = "add_kernel"
# caption = """
# Ten elements in blocks of four. Look at program 2: only two of its four
# positions have an element. What happens at the other two depends on the
# mask."""
# expected = { out = "x + y" }
# registers = ["pid", "offs", "mask", "x", "y"]
# start = [2, 0]
# [tool.triton-gallery.step_through.inputs]
# x = "integers(1, 10, 10)"
# y = "10 * integers(1, 10, 10).flip(0)"
#
# [[tool.triton-gallery.step_through.launches]]
# label = "with the mask"
# call = "launch(add_kernel, x, y, BLOCK=4)"
#
# [[tool.triton-gallery.step_through.launches]]
# label = "without the mask"
# kernel = "add_kernel_without_mask"
# call = "add_kernel_without_mask[(3,)](x, y, torch.empty_like(x), BLOCK=4)"
# registers = ["pid", "offs", "x", "y"]
# outside = true
# ///
r"""
Vector addition
===============

This page writes a first Triton kernel: six lines that add two vectors on a
GPU. All other lessons build on it. For an addition alone, keep PyTorch's: a
kernel of your own pays when it does several operations while the data is at
hand.

After this page you can

* write a kernel, and launch enough copies of it to cover a vector;
* keep the last copy inside the vector with a *mask*;
* work out, from the bytes that a kernel moves, the least time it can take.
"""

# sphinx_gallery_tags = ["elementwise", "memory bound"]
import os

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

# %%
# In PyTorch
# ----------
#
# In PyTorch an addition is one line. What does it cost? ``Traffic`` counts the
# bytes that PyTorch's operators read and write. It comes from the folded cell
# above, as do ``DEVICE`` and the timer ``gpu_time``.

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(N):
    return torch.randn(N, generator=generator, device=DEVICE)


if __name__ == "__main__":
    x, y = random(1_000_000), random(1_000_000)
    with Traffic() as traffic:
        out = x + y
    print(f"{x.numel():,} additions move {traffic.moved:,} bytes")

# %%
# Each addition reads two numbers of four bytes and writes one. So no kernel
# can add ``N`` elements and move less than ``12 * N`` bytes. A GPU adds much
# faster than its memory delivers numbers: the bytes decide the time. Such an
# operation is called *memory bound*.

# %%
# The first kernel
# ----------------
#
# A *kernel* is a function that runs on the GPU. You write it for one small
# part of the work, here for a *block* of neighbouring elements. Then you launch
# many copies of it, called *programs*. All programs run the same lines. They
# differ in one thing, their number, which ``tl.program_id`` returns.


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    # Program 0 takes elements 0 to BLOCK - 1, program 1 the next BLOCK.
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    # The last block may reach past the end: True where an element exists.
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y, mask=mask)


# %%
# Line by line:
#
# * ``pid`` is a number, and ``offs`` is a block of ``BLOCK`` numbers: the
#   positions of this program's elements. ``tl.arange(0, BLOCK)`` counts from 0
#   to ``BLOCK - 1``, as ``torch.arange`` does.
# * A tensor arrives in the kernel as a *pointer*, the address of its first
#   element. So ``x_ptr + offs`` is a block of addresses, and ``tl.load``
#   fetches the element at each address.
# * The *mask* is a block of booleans. Where it is False, ``tl.load`` reads
#   nothing and returns an undefined value, and ``tl.store`` writes nothing. The
#   figure calls the positions of a block *lanes*, and marks the masked ones.
# * ``x + y`` adds whole blocks. The kernel has no loop over elements and no
#   threads: the compiler spreads the block over the threads of the GPU. (CUDA
#   calls a program a thread block.)
#
# ``BLOCK: tl.constexpr`` is a constant that the compiler has to know. The size
# of ``tl.arange`` must be such a constant, and a power of two.
#
# Now the function that launches the kernel:


def launch(kernel, x, y, BLOCK=1024):
    """Return what an elementwise kernel makes of two equal-shaped tensors."""
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    assert x.device == y.device
    # The kernel takes the elements as neighbours in memory.
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    N = out.numel()
    assert N < 2**31  # offs is int32
    grid = (triton.cdiv(N, BLOCK),)  # the number of blocks, rounded up
    kernel[grid](x, y, out, N, BLOCK=BLOCK)
    return out


def add(x, y):
    return launch(add_kernel, x, y)


# %%
# ``kernel[grid](...)`` is a *launch*. The *grid* says how many programs to
# start. It is a tuple because a grid may have up to three axes; ours has one,
# ``axis=0``. The GPU runs as many programs at a time as fit, in any order, so
# no program may depend on another one. By default a program has 128 threads,
# so a block of 1024 gives each thread eight elements.
#
# ``@triton.jit`` is what makes a function a kernel. Python never runs its body.
# At the first launch, Triton compiles it for your GPU and for the types of the
# arguments, and keeps the result for later launches. So the body may use ``tl``
# functions, arithmetic, ``if`` and ``for``, but not PyTorch.

# %%
# Is it right?
# ------------
#
# We check before we time. The reference is computed in float64. A float32
# addition rounds once, so its relative error is at most :math:`2^{-24}`. The
# sizes are one element, one full block, and a last block that is mostly masked.

if __name__ == "__main__":
    for N in (1, 1024, 10_241):
        x, y = random(N), random(N)
        out, expected = add(x, y).double(), x.double() + y.double()
        error = ((out - expected) / expected).abs().max().item()
        print(f"{N:6,} elements: error {error:.1e}, allowed {2**-24:.1e}")
        torch.testing.assert_close(out, expected, rtol=2**-24, atol=0)

# %%
# Without a GPU, this script runs in Triton's interpreter: the same kernel, one
# program after the other, in NumPy. It is slow, and good for finding mistakes.

# %%
# Break it: the missing mask
# --------------------------
#
# Here is the kernel without its mask. ``out`` has five elements, and the two
# programs store eight. To see what happens to the other three, we put ``out``
# and ``neighbour`` into one buffer.


@triton.jit
def add_kernel_without_mask(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs)  # (BLOCK,)
    y = tl.load(y_ptr + offs)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y)


if __name__ == "__main__":
    x = torch.ones(8, device=DEVICE)
    buffer = torch.tensor([0.0, 0, 0, 0, 0, 7, 7, 7], device=DEVICE)
    out, neighbour = buffer[:5], buffer[5:]
    add_kernel[(2,)](x, x, out, 5, BLOCK=4)
    print("with the mask:   ", out.tolist(), neighbour.tolist())
    add_kernel_without_mask[(2,)](x, x, out, BLOCK=4)
    print("without the mask:", out.tolist(), neighbour.tolist())

# %%
# ``out`` is right both times. Nothing raises an error, but another tensor has
# changed. A length that is a multiple of ``BLOCK`` hides the mistake, so test
# lengths that are not.

# %%
# How fast?
# ---------
#
# The *bandwidth* is the rate at which memory moves bytes. We take it from
# PyTorch's addition of the longest vectors. Divide the bytes by the bandwidth,
# and you have the *floor*: the least time that the addition can take. The GPU
# time is how long the kernel runs. The CPU time is how long Python takes to
# launch it.


def time_addition(N):
    x, y = random(N), random(N)
    return gpu_time({"Triton": lambda: add(x, y), "PyTorch": lambda: x + y})


if __name__ == "__main__" and DEVICE.type == "cuda":
    sizes = (1, 2**12, 2**16, 2**20, 2**24, 2**26)
    times = {N: time_addition(N) for N in sizes}
    rate = 12 * sizes[-1] / times[sizes[-1]]["PyTorch"][0]  # bytes in 1 ms
    print(f"bandwidth {rate * 1e-6:.0f} GB/s; times in microseconds:")
    print(" elements   floor      GPU: Triton PyTorch      CPU: Triton PyTorch")
    for N, calls in times.items():
        gpu = [f"{t[0] * 1e3:7.1f}" for t in calls.values()]
        cpu = [f"{t[3]:7.0f}" for t in calls.values()]
        print(
            f"{N:9} {12e3 * N / rate:7.1f}         ",
            " ".join(gpu),
            "        ",
            " ".join(cpu),
        )

# %%
# The longer the vectors, the closer the GPU time comes to the floor. Short
# vectors have almost no floor. Their GPU time is what the GPU needs to start a
# kernel and to end it, and a better kernel cannot lower it.
#
# The CPU time hardly depends on the length. A script that makes one call after
# another waits for the slower of CPU and GPU. With short vectors the CPU
# is slower, and the call with the lower CPU time wins. What helps is to launch
# fewer kernels, each with more work.

# %%
# What is a kernel of your own good for?
# --------------------------------------
#
# Suppose that a ReLU follows the addition. PyTorch launches a second kernel,
# which reads the sum back from memory. Our kernel has the sum at hand and needs
# two more lines.


@triton.jit
def add_relu_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    total = x + y
    # tl.where, as torch.where, chooses for each element. NaN < 0 is False, so
    # a NaN stays a NaN, as in PyTorch.
    relu = tl.where(total < 0, 0.0, total)
    tl.store(out_ptr + offs, relu, mask=mask)


def add_relu(x, y):
    return launch(add_relu_kernel, x, y)


if __name__ == "__main__":
    x, y = random(10_241), random(10_241)
    with Traffic() as traffic:
        expected = torch.relu(x + y)
    torch.testing.assert_close(add_relu(x, y), expected, rtol=0, atol=0)
    moved = 12 * x.numel()  # by our kernel
    print(f"PyTorch moves {traffic.moved / moved:.2f} times the bytes of ours")

# %%
# The result
# ----------
#
# The chart has the addition with ReLU. ``Triton`` is ``add_relu``. ``PyTorch``
# is its two kernels, and ``torch.compile`` writes one kernel for both
# operations. ``Roof`` is PyTorch's addition without the ReLU: it moves the same
# ``12 * N`` bytes as our kernel.


def add_relu_torch(x, y):
    return torch.relu(x + y)


def contestants(N):
    x, y = random(N), random(N)
    torch.compiler.reset()
    compiled = torch.compile(add_relu_torch, dynamic=False, fullgraph=True)
    return {
        "Triton": lambda: add_relu(x, y),
        "PyTorch": lambda: add_relu_torch(x, y),
        "torch.compile": lambda: compiled(x, y),
        "Roof": lambda: x + y,
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {
        N: gpu_time(contestants(N)) for N in (2**k for k in range(16, 27, 2))
    }
    results = rate_table(times, "N", "GB/s", lambda N: 12 * N * 1e-6)
    print(results.to_string())
    rates = results.pivot(index="N", columns="series", values="GB/s")
    rates.plot(logx=True)
    for name in ("PyTorch", "torch.compile"):
        ratio = rates["Triton"] / rates[name]
        low, high = ratio.min(), ratio.max()
        print(f"our kernel has {low:.2f} to {high:.2f} times {name}'s rate")

# %%
# The chart compares GPU times. Where the CPU time below the chart is larger
# than the GPU time, it decides again. CPU times of the same launch differ from
# one measurement to the next, as here and in the first table; compare those of
# one measurement only. ``torch.compile`` fuses elementwise operations like
# these by itself. The other lessons write kernels for operations that are not
# elementwise.

# %%
# Exercises
# ---------
#
# Each exercise has a function to fill in and a check, which needs no GPU.
#
# **1.** Write ``scale_add(a, x, y)``, which returns ``a * x + y`` for a number
# ``a``, with a kernel of your own. Pass the number as ``N`` is passed. A Python
# float becomes a float32 in the kernel.


def scale_add(a, x, y):
    return None  # launch your kernel here, and return its output


def compare(out, expected):
    if out is None:
        return "not solved yet"
    return "right" if torch.allclose(out, expected, atol=1e-5) else "wrong"


def check_scale_add(function):
    x, y = random(1500), random(1500)
    return compare(function(3.0, x, y), 3 * x + y)


if __name__ == "__main__":
    print("exercise 1:", check_scale_add(scale_add))

# %%
# **2.** Write ``reverse(x)``, which returns the elements of ``x`` in reverse
# order. Which positions does a program load, if it stores those of ``offs``?
# Does the same mask do?


def reverse(x):
    return None  # launch your kernel here, and return its output


def check_reverse(function):
    x = random(1500)
    return compare(function(x), x.flip(0))


if __name__ == "__main__":
    print("exercise 2:", check_reverse(reverse))

# %%
# ``row_sum.py`` comes next: each program reduces a row of a matrix to one
# number.

# %%
# Answers
# -------
#
# **1.** Only the stored value changes, and ``a`` is one more argument.


@triton.jit
def scale_add_kernel(a, x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, a * x + y, mask=mask)


def scale_add_answer(a, x, y):
    out = torch.empty_like(x)
    N = x.numel()
    scale_add_kernel[(triton.cdiv(N, 1024),)](a, x, y, out, N, BLOCK=1024)
    return out


if __name__ == "__main__":
    assert check_scale_add(scale_add_answer) == "right"

# %%
# **2.** Element ``n`` of the output is element ``N - 1 - n`` of ``x``. Where
# ``offs < N``, that position is inside ``x`` as well, so the mask is the same.


@triton.jit
def reverse_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + (N - 1 - offs), mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, x, mask=mask)


def reverse_answer(x):
    out = torch.empty_like(x)
    N = x.numel()
    reverse_kernel[(triton.cdiv(N, 1024),)](x, out, N, BLOCK=1024)
    return out


if __name__ == "__main__":
    assert check_reverse(reverse_answer) == "right"
