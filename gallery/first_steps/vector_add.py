# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Add two vectors: the smallest kernel that has all the parts of a large one,
# and a count of bytes that says how fast it can be."""
# ///
r"""
Vector addition
===============

Adding two vectors is almost no arithmetic and a lot of memory traffic. That
makes it the smallest kernel that has all the parts of a large one, and the
simplest to judge: a count of bytes says how fast it can possibly be.

After this page you can

* split an array among *programs*, one *block* each, and launch a *grid*;
* keep the last block inside the array with a *mask*;
* turn a kernel into an op that is correct for any shape and dtype, or raises a
  clear error;
* tell a slow kernel from one that is too short to be worth launching.
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

# %%
# The problem in bytes
# --------------------
#
# In PyTorch the whole problem is one line. For ``N`` float32 elements it reads
# ``x``, reads ``y`` and writes ``out``: three arrays of ``4 * N`` bytes. Every
# element is used exactly once, so there is nothing to keep and reuse. No
# kernel can do with less than ``12 * N`` bytes; that is the floor.

if __name__ == "__main__":
    x = torch.rand(1_000_003, device=DEVICE)
    y = torch.rand(1_000_003, device=DEVICE)
    out = x + y  # reads x, reads y, writes out

    moved = sum(t.numel() * t.element_size() for t in (x, y, out))
    print(f"{out.numel():,} additions for {moved:,} bytes")

# %%
# One addition for every twelve bytes. A GPU can do far more arithmetic than
# that in the time the bytes take, so the memory alone decides how long this
# takes. Such an op is called *memory bound*, and its speed is best given in
# bytes per second.
#
# Programs, blocks and the mask
# -----------------------------
#
# You write a Triton kernel for one *program*. A launch starts many copies of
# it, the *grid*, which differ in nothing but their number, the *program id*.
# Here each program adds one *block* of ``BLOCK`` neighbouring elements. This
# is the tiling for ``N = 10`` and ``BLOCK = 4``:
#
# .. code-block:: text
#
#     program            0             1             2
#                  +-----------+ +-----------+ +-----------+
#     element      0  1  2  3    4  5  6  7    8  9  .  .
#     mask         1  1  1  1    1  1  1  1    1  1  0  0
#                                                    ^  ^
#                                     past the end: masked
#
# ``N`` is known when the kernel is launched. The size of a block is known
# earlier, when the kernel is compiled, and is the same for all programs. So the
# grid has ``ceil(N / BLOCK)`` programs, the last one usually reaches past the
# end, and a *mask* says which of its elements are real.

# %%
# The kernel
# ----------
#
# It reads like NumPy on a small array. ``tl.arange(0, BLOCK)`` counts through
# the block, ``x_ptr + offs`` is a block of addresses, ``tl.load`` fetches what
# lies there. Three things are worth a second look:
#
# * ``tl.constexpr`` marks a value that the compiler knows. Another ``BLOCK``
#   gives another compiled kernel.
# * An ``if`` on a dtype is settled while compiling; the branches not taken
#   leave no trace in the machine code.
# * Nothing here mentions threads. A program is one of CUDA's thread blocks; a
#   *block* here is a piece of the array. The compiler spreads it over the 32
#   threads of each of ``num_warps`` warps (4 unless you say otherwise).


@triton.jit
def add_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    N,
    BLOCK: tl.constexpr,
):
    # In int32 the product below would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    # A masked load touches no memory where the mask is False. What it returns
    # there is undefined, and harmless: the masked store drops it.
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    if x.dtype == tl.int1:
        total = x | y  # as in PyTorch, True + True is True
    elif x.dtype == tl.float16 or x.dtype == tl.bfloat16:
        # The sum in float32, then rounded by the store: as if rounded once.
        total = x.to(tl.float32) + y.to(tl.float32)
    else:
        total = x + y
    tl.store(out_ptr + offs, total, mask=mask)


# %%
# To watch the tiling at work, this second kernel adds nothing: every program
# writes down its offsets and its mask. Its outputs have room for whole blocks,
# so it can afford to store without a mask.


@triton.jit
def tiling_kernel(
    offs_ptr,
    mask_ptr,
    N,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    tl.store(offs_ptr + offs, offs)
    tl.store(mask_ptr + offs, offs < N)


if __name__ == "__main__":
    programs = triton.cdiv(10, 4)  # division, rounded up
    offs = torch.empty(programs, 4, dtype=torch.int64, device=DEVICE)
    mask = torch.empty(programs, 4, dtype=torch.bool, device=DEVICE)
    tiling_kernel[(programs,)](offs, mask, 10, BLOCK=4)
    for pid in range(programs):
        print(f"program {pid}: offs {offs[pid].tolist()}", end="  ")
        print(f"mask {mask[pid].int().tolist()}")

# %%
# ``kernel[grid](arguments)`` is a launch. The grid is a tuple of up to three
# numbers, and a tensor given as an argument arrives in the kernel as a pointer
# to its first element.
#
# Why a block is a power of two
# -----------------------------
#
# Ask for a block of 1000 and Triton refuses:

if __name__ == "__main__":
    try:
        add_kernel[(1,)](x, y, out, 1000, BLOCK=1000)
    except triton.TritonError as error:
        print(type(error).__name__, str(error).splitlines()[-1], sep=": ")

# %%
# The compiler decides which thread holds which element, and it writes that
# plan as a map from the bits of a thread's number to the bits of an element's
# index. (The paper on `linear layouts <https://arxiv.org/abs/2505.23819>`_ has
# the details.) With ``k`` bits one counts exactly ``2**k`` elements, so that is
# what a block has. The mask switches off those that you don't need.
#
# The launcher
# ------------
#
# A kernel trusts its pointers blindly. The op around it has to make sure that
# they are what the kernel expects, and has to say clearly what it won't take.
# ``add_kernel`` sees memory as one flat row of elements, so the op hands it
# contiguous tensors. For a contiguous tensor ``.contiguous()`` costs nothing.
# For any other it is a copy that reads and writes all its elements: two
# transposed inputs turn ``12 * N`` bytes into ``28 * N``.

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
DTYPES |= {torch.bool, torch.uint8, torch.int8}
DTYPES |= {torch.int16, torch.int32, torch.int64}
BLOCK = 1024


def add(x, y):
    """Return ``x + y`` for tensors of the same shape, dtype and device."""
    if x.dtype not in DTYPES or x.dtype != y.dtype:
        raise TypeError(
            "add takes two tensors of one bool, integer or floating dtype, "
            f"not {x.dtype} and {y.dtype}"
        )
    if x.shape != y.shape:
        raise ValueError(
            "add does not broadcast: the shapes are "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    if x.device.type != DEVICE.type or x.device != y.device:
        raise ValueError(
            f"add takes two tensors on one {DEVICE.type} device, "
            f"not {x.device} and {y.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        raise ValueError("add has no backward: call it under torch.no_grad()")
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    N = out.numel()
    if N > 0:
        # Triton launches on the current GPU, which may not be that of x.
        with torch.accelerator.device_index(x.device.index):
            add_kernel[(triton.cdiv(N, BLOCK),)](x, y, out, N, BLOCK=BLOCK)
    return out


# %%
# The check
# ---------
#
# The reference is computed in float64. The tolerance is zero: the float64 sum
# of two float32 numbers, rounded to float32, is their correctly rounded float32
# sum, and that is what the kernel has to return, bit for bit. The same goes for
# float16 and its float32 sum.
#
# .. note::
#
#    Without a GPU, all this runs in Triton's interpreter. A kernel that is
#    right there may be wrong on a GPU, or not compile: ``interpreter.md`` says
#    what differs.

torch.manual_seed(0)
for shape in ((), (4 * BLOCK,), (31, 257), (2, 0, 3)):
    for dtype in (torch.float16, torch.float32):
        a = torch.randn(shape, dtype=dtype, device=DEVICE)
        b = torch.randn(shape, dtype=dtype, device=DEVICE)
        expected = (a.double() + b.double()).to(dtype)
        torch.testing.assert_close(add(a, b), expected, rtol=0, atol=0)

# %%
# Real inputs are seldom that tidy. Here are a transposed matrix beside one with
# gaps between its elements, integers that overflow, and booleans. They have to
# match PyTorch exactly.

a = torch.randn(31, 257, device=DEVICE)
b = torch.randn(257, 62, device=DEVICE)[:, ::2].T
torch.testing.assert_close(add(a.T, b.T), a.T + b.T, rtol=0, atol=0)

a = torch.tensor([1, 100, -128], dtype=torch.int8, device=DEVICE)
torch.testing.assert_close(add(a, a), a + a)

a = torch.tensor([False, True, False, True], device=DEVICE)
b = torch.tensor([False, False, True, True], device=DEVICE)
torch.testing.assert_close(add(a, b), a + b)

# %%
# There is no check in bfloat16: without a GPU, the interpreter cuts the last
# bits off where the hardware rounds. The op names what it does not take:

if __name__ == "__main__":
    for other in (torch.rand(3, 1), torch.rand(2, 3).to(torch.complex64)):
        try:
            add(torch.rand(2, 3, device=DEVICE), other.to(DEVICE))
        except (TypeError, ValueError) as error:
            print(type(error).__name__, error, sep=": ")

# %%
# The benchmark
# -------------
#
# The figure is the rate at which the op moves the bytes of the algorithm,
# ``12 * N / time``. Beside our op are PyTorch and the ``Roof``: PyTorch's
# addition into an output that was allocated beforehand, which is what the
# memory does with vectors of that size.
#
# ``gpu_time``, in the opening of this script, calls the three in rotation.
# Before each call the GPU sleeps and then empties its L2 cache. Meanwhile the
# CPU prepares the launch, so no CPU time is in the figure. ``GB/s`` is the
# median rate, ``low`` and ``high`` are its 20th and 80th percentile, and
# ``late`` says whether the GPU had to wait for the CPU.
#
# The numbers need a GPU. Without one, the recipe stops at the checks here:
# timing the interpreter would say nothing about the kernel.

SIZES = [2**k for k in range(14, 29, 2)]


def calls(N):
    x = torch.rand(N, device=DEVICE)
    y = torch.rand(N, device=DEVICE)
    out = torch.empty_like(x)
    return {
        "Triton": lambda: add(x, y),
        "PyTorch": lambda: x + y,
        "Roof": lambda: torch.add(x, y, out=out),
    }


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {N: gpu_time(calls(N)) for N in SIZES}
    results = rate_table(times, "N", "GB/s", lambda N: 12 * N * 1e-6)
    print(results.to_string())
    results.pivot(index="N", columns="series", values="GB/s").plot(logx=True)

# %%
# Where launch cost hides everything
# ----------------------------------
#
# On the left of the figure the vectors are so short that their bytes take next
# to no time. What remains is the time to start a kernel and to finish it: the
# column ``GPU`` below. ``CPU`` is the time until a call returns. The figure
# leaves it out; a program that calls one short op after another pays it.

if __name__ == "__main__" and DEVICE.type == "cuda":
    print("microseconds   Triton: GPU     CPU   PyTorch: GPU     CPU")
    for N in (1, 1024, 65536):
        print(f"N = {N:<10,}", end="")
        found = gpu_time(calls(N))
        for gpu, _, _, cpu, _ in (found["Triton"], found["PyTorch"]):
            print(f"{gpu * 1e3:14.2f}{cpu:8.2f}", end="  ")
        print()

# %%
# Reading the result
# ------------------
#
# The three curves lie together from end to end: all three calls move exactly
# the bytes of the floor. On the right they level off. There the memory sets the
# pace, and a cleverer kernel has next to nothing left to win. The only way to
# make this addition cheaper is not to do it alone. A kernel that has an operand
# in registers anyway saves its bytes, and up to all ``12 * N`` of them. That is
# *fusion*.
#
# 16 divides all lengths in the figure. Triton notices that at the launch, and
# compiles a kernel in which a thread loads 16 bytes at once: the mask never
# ends between the elements of one such load. For any other length, a thread
# loads one element at a time (``ahead_of_time.py`` shows both versions). With 2
# bytes an element that is slow. On the site, the table *Beside other libraries*
# has one such length, in bfloat16, and there the op is far from the roof.
#
# On the left, the time hardly depends on ``N``, so the rate grows in step with
# ``N``. The ``GPU`` column has that time: a kernel's start and end. The ``CPU``
# column has the checks, the allocation and the launch. Compare the ops there:
# our checks and Triton's launcher are mostly Python, PyTorch's are C++. The GPU
# works through a queue that the CPU fills. So a loop over tiny ops goes at the
# speed of the ``CPU`` column while the GPU waits. The cure is fewer launches:
# more work in each kernel, or a CUDA graph that replays many launches as one.

# %%
# Break it: the missing mask
# --------------------------
#
# Here is the kernel without its mask. ``out`` and ``neighbour`` are two views
# of one buffer, so this overrun stays inside memory that is ours.


@triton.jit
def add_kernel_without_mask(
    x_ptr,
    y_ptr,
    out_ptr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs)  # (BLOCK,)
    y = tl.load(y_ptr + offs)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y)


if __name__ == "__main__":
    x = torch.ones(8, device=DEVICE)
    buffer = torch.zeros(8, device=DEVICE)
    out, neighbour = buffer[:5], buffer[5:]
    neighbour.fill_(7)

    add_kernel_without_mask[(2,)](x, x, out, BLOCK=4)
    print("without a mask: out", out.tolist(), "neighbour", neighbour.tolist())

    buffer[:] = torch.tensor([0, 0, 0, 0, 0, 7, 7, 7])
    add_kernel[(2,)](x, x, out, 5, BLOCK=4)
    print("with the mask:  out", out.tolist(), "neighbour", neighbour.tolist())

# %%
# ``out`` is right both times, so a test of ``out`` alone finds nothing. PyTorch
# cuts small tensors out of larger blocks that it holds (its `memory notes
# <https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management>`_
# tell how). The store that overruns one of them seldom faults: it changes
# another tensor of the same process, and the failure shows far away, or never.
# A size that is a multiple of ``BLOCK`` hides it altogether. So test with a
# ragged size, and with something past the end that you can look at.

# %%
# Go further
# ----------
#
# 1. Write ``axpy(a, x, y)``, which returns ``a * x + y`` for a number ``a``.
#    How many bytes does it move, and how many does the PyTorch expression?
# 2. Adding two transposed matrices copies both of them first. Show that no
#    copy is needed when both have the same strides and no gaps.
# 3. ``add`` refuses inputs that require a gradient. Teach it to take them.
#
# To read on:
#
# * ``row_sum.py`` comes next: two dimensions, and a sum over one of them.
# * Triton's own tutorial on this kernel:
#   https://triton-lang.org/main/getting-started/tutorials/01-vector-add.html
# * `The reference of the language
#   <https://triton-lang.org/main/python-api/triton.language.html>`_
# * `torch.library <https://docs.pytorch.org/docs/stable/library.html>`_, which
#   makes PyTorch ops of Triton kernels

# %%
# Answers
# -------
#
# **1.** The bytes of an addition, ``12 * N``: ``a`` travels as an argument.
# PyTorch's ``a * x + y`` is two kernels. The first reads ``x`` and writes a
# product, the second reads it back with ``y`` and writes the result:
# ``20 * N`` bytes. (``torch.add(y, x, alpha=a)`` is one kernel again.)


@triton.jit
def axpy_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    a,
    N,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, a * x + y, mask=mask)


x = torch.randn(1500, device=DEVICE)
y = torch.randn(1500, device=DEVICE)
out = torch.empty_like(x)
axpy_kernel[(2,)](x, y, out, 2.0, 1500, BLOCK=1024)
torch.testing.assert_close(out, 2.0 * x + y)

# %%
# **2.** Without gaps, the elements fill a flat stretch of memory, and with the
# same strides both tensors fill theirs in the same order. The order does not
# matter to an addition. ``torch.empty_like`` keeps the strides of such a
# tensor, so the output has that order too. In ``add``:
#
# .. code-block:: python
#
#     same = x.stride() == y.stride() == torch.empty_like(x).stride()
#     if not same:
#         x, y = x.contiguous(), y.contiguous()
#
# **3.** The gradient of a sum is the incoming gradient, once for each input.
# ``torch.library.triton_op`` makes an op of the launcher that autograd and
# ``torch.compile`` both understand. To keep it short, the cell leaves out the
# checks of ``add``. An op for others needs all but the last of them.

from torch.library import triton_op, wrap_triton


@triton_op("triton_gallery::add", mutates_args={})
def add_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    N = out.numel()
    kernel = wrap_triton(add_kernel)
    kernel[(triton.cdiv(N, BLOCK),)](x, y, out, N, BLOCK=BLOCK)
    return out


add_op.register_autograd(lambda ctx, grad: (grad, grad))

x = torch.randn(5, dtype=torch.float64, device=DEVICE, requires_grad=True)
y = torch.randn(5, dtype=torch.float64, device=DEVICE, requires_grad=True)
assert torch.autograd.gradcheck(add_op, (x, y))
