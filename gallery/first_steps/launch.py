# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery.not_for]  # it shows what no compiler takes
# plain_global = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# if_on_block = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# changed_type = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# leaky_relu = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
#
# [tool.triton-gallery]
# description = """
# Choose a grid, pass arguments, and learn which Python a Triton kernel may
# contain: each refusal with its error and what to write instead."""
#
# [[tool.triton-gallery.step_through]]
# kernel = "place_kernel"
# caption = """
# Six programs, each with a block of four columns of a row. The matrix has two
# rows, and the grid has three. Look at the programs (2, 0) and (2, 1): what do
# they store with the check, and where without it?"""
# expected = { out = "10 * torch.arange(2.)[:, None] + torch.arange(8.)" }
# registers = ["row", "offs"]
# start = [0, 0]
# [tool.triton-gallery.step_through.inputs]
# out = "torch.full((2, 8), -1.0)"
#
# [[tool.triton-gallery.step_through.launches]]
# label = "with the check"
# call = "place_kernel[(3, 2)](out, 2, 8, BLOCK=4)"
#
# [[tool.triton-gallery.step_through.launches]]
# label = "without the check"
# kernel = "unchecked_kernel"
# call = "unchecked_kernel[(3, 2)](out, 8, BLOCK=4)"
# outside = true
# ///
r"""
Launch a kernel
===============

``kernel[grid](arguments)`` starts the programs of a kernel. This page shows
which grids and arguments a launch takes, and which Python a kernel may contain.
Read it before you write a kernel of your own, or when Triton refuses yours.

After ``vector_add.py`` and this page you can

* choose a grid of one to three axes, and keep surplus programs harmless;
* pass tensors, numbers and constants to a kernel;
* understand why a launch or a kernel is refused, and write what is accepted.
"""

# sphinx_gallery_tags = ["compiler"]
import os
import re
import textwrap

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

from triton_gallery.compiling import compile_only


def outcome(launch, *arguments):
    """Call launch; return "accepted", or the error in one sentence."""
    try:
        launch(*arguments)
    except Exception as error:
        if "launcher_cls" not in str(error):  # what the missing GPU raises
            line = str(error).splitlines()[-1].split(". ")[0]
            line = re.sub(r" at 0x\w+", "", line)  # the address of an object
            return f"{type(error).__name__}: {line}"
    return "accepted"


@compile_only
def outcomes(launches):
    names = {"empty_kernel": empty_kernel, "kernel": kernel}
    names |= {"x": torch.ones(16), "N": 5, "cdiv": triton.cdiv}
    return {launch: outcome(eval, launch, names) for launch in launches}


def show(table, width):
    """Print a dictionary in two columns."""
    for left, right in table.items():
        line = f"{left:{width}}{right}"
        print(textwrap.fill(line, 72, subsequent_indent=" " * width))


# %%
# Launches in one table
# ---------------------
#
# Two kernels that do nothing: the first has no arguments, the second has three.


@triton.jit
def empty_kernel():
    pass


@triton.jit
def kernel(x_ptr, N, BLOCK: tl.constexpr):
    pass


# %%
# We launch them in eleven ways. ``outcomes``, from the folded cell above, runs
# each launch in a process that compiles for an H100, with or without a GPU.
# *accepted* means that the launch compiled.

LAUNCHES = [
    "empty_kernel[(1,)]()",
    "kernel[(8,)](x, 5, 16)",
    "kernel[(8, 4, 2)](x, N=5, BLOCK=16)",
    "kernel[lambda meta: (8,)](x, 5, 16)",
    "kernel[(8,)](x, 5, 16, num_warps=8)",
    "kernel[(8, 4, 2, 9)](x, 5, 16)",
    "kernel(x, 5, 16)",
    "kernel[8](x, 5, 16)",
    "kernel[(8,)](x, 5)",
    "kernel[(8,)]([1.0, 2.0], 5, 16)",
    "kernel[(8,)](x, 5, 16, num_warp=8)",
]


if __name__ == "__main__":
    show(outcomes(LAUNCHES), 38)

# %%
# The grid is a tuple of one to three numbers, or a function that returns such a
# tuple. A fourth number is silently ignored. Arguments are passed by position
# or by name, and *options* such as ``num_warps`` always by name.
# ``what_a_launch_compiles.py`` lists the options.
#
# The GPU refuses two more things: more than 65,535 programs on the second or
# third axis, and a tensor in the memory of the CPU. The first axis may have
# :math:`2^{31} - 1` programs, so put on it what grows with the data. If both
# axes grow, number the programs along one, as ``matmul.py`` does.

if __name__ == "__main__" and DEVICE.type == "cuda":
    x = torch.ones(16)
    for grid in ((65_536, 1), (1, 65_535), (1, 65_536)):
        print("a grid of", grid, outcome(empty_kernel[grid]))
    print("a CPU tensor", outcome(kernel[(8,)], x, 5, 16))

# %%
# More programs than elements
# ---------------------------
#
# On a grid with two axes, a program has a place on each. Here the first axis
# has the rows of a matrix, and the second has blocks of columns. Each element
# becomes ten times its row, plus its column.
#
# Grids are often larger than the data: columns are rounded up to whole blocks,
# or one grid serves matrices of several sizes. Our matrix has two rows, and the
# grid has three.


@triton.jit
def place_kernel(out_ptr, rows, columns, BLOCK: tl.constexpr):
    # int64: past 2**31 elements, int32 would overflow.
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    place = 10 * row + offs  # (BLOCK,)
    if row < rows:  # a surplus program has nothing to store
        tl.store(out_ptr + row * columns + offs, place, mask=offs < columns)


# %%
# To see the damage without the check, we give ``out`` a third row to spare:


@triton.jit
def unchecked_kernel(out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    place = 10 * row + offs  # (BLOCK,)
    tl.store(out_ptr + row * columns + offs, place, mask=offs < columns)


if __name__ == "__main__":
    buffer = torch.full((3, 8), -1, dtype=torch.int32, device=DEVICE)
    out, spare = buffer[:2], buffer[2]
    place_kernel[(3, 2)](out, 2, 8, BLOCK=4)
    print("with the check:", out.tolist(), "\n    spare:", spare.tolist())
    unchecked_kernel[(3, 2)](out, 8, BLOCK=4)
    print("without it:    ", out.tolist(), "\n    spare:", spare.tolist())

# %%
# Surplus programs do no harm, as long as they neither load nor store. Without
# the check they overwrite what lies behind ``out``. Here this is our own
# memory, so nothing raises an error.
#
# A launcher can also count exactly the programs that it needs. The grid may be
# a function, which Triton calls with a dictionary. What is in the dictionary?


def places(rows, columns):
    """Return a matrix of places."""
    out = torch.empty((rows, columns), dtype=torch.int32, device=DEVICE)

    def grid(meta):
        return (rows, triton.cdiv(columns, meta["BLOCK"]))

    place_kernel[grid](out, rows, columns, BLOCK=16)
    return out


if __name__ == "__main__":
    expected = 10 * torch.arange(3)[:, None] + torch.arange(100)
    torch.testing.assert_close(places(3, 100).cpu(), expected.int())

    def print_names(meta):
        print("the grid function sees", *meta)
        return (2, 1)

    place_kernel[print_names](out, 2, 8, BLOCK=16, num_warps=8)

# %%
# The dictionary has all arguments of the kernel and no options: ``num_warps``
# is missing. Take the size of a block from it, as ``places`` does. Then the
# grid is right for every ``BLOCK``, also when ``autotune.py`` chooses it.

# %%
# Arguments
# ---------
#
# What does a Python value become in the kernel? ``warmup`` compiles a kernel
# without a launch. The *signature* of the result has the type of each argument.


@triton.jit
def argument_kernel(value, BLOCK: "tl.constexpr"):
    tl.arange(0, BLOCK)  # needs a constant


@compile_only
def argument_types():
    x = torch.ones(16)
    values = {"a float32 tensor": x, "5": 5, "1": 1, "2**31": 2**31}
    values |= {"2.5": 2.5, "True": True, "None": None, "(5, x)": (5, x)}
    types = {}
    for name, value in values.items():
        compiled = argument_kernel.warmup(value, BLOCK=16, grid=(1,))
        signature = compiled.src.signature
        types[name] = signature["value"]
    return types | {"BLOCK=16": signature["BLOCK"]}


if __name__ == "__main__":
    show(argument_types(), 20)

# %%
# * ``*fp32`` is a pointer to float32 elements. The shape and the strides of the
#   tensor stay behind: pass the kernel those that it needs, as numbers.
# * An integer has 32 bits (``i32``) unless it needs 64, and a Python float
#   becomes a float32.
# * ``u1`` is a boolean.
# * ``constexpr`` is a constant: the compiler knows its value. ``None`` and the
#   integer 1 become constants by themselves.
#
# In this kernel the annotation of ``BLOCK`` is a string. The compiler accepts
# that. The interpreter takes ``BLOCK`` for an ordinary number, and fails. So
# write annotations without quotes.

if __name__ == "__main__" and DEVICE.type == "cpu":
    print(outcome(argument_kernel[(1,)], 5, 16))

# %%
# What a kernel may use
# ---------------------
#
# * Python's numbers, tuples and arithmetic; ``for``; ``if`` and ``while`` on a
#   single value;
# * the functions of ``triton.language``;
# * its arguments;
# * other functions that have ``@triton.jit``;
# * global constants, if they are wrapped in ``tl.constexpr``.
#
# This kernel uses all five. It computes :math:`e^x` by its power series
# :math:`1 + x (1 + x (1/2 + x (1/6 + \dots)))`, the innermost bracket first.

SERIES = tl.constexpr((1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120))


@triton.jit
def horner_step(acc, x, coefficient):
    return acc * x + coefficient


@triton.jit
def exp_kernel(x_ptr, out_ptr, N, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    # int64: past 2**31 elements, int32 would overflow.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    acc = tl.full((BLOCK,), SERIES[TERMS - 1], dtype=tl.float32)  # (BLOCK,)
    # static_range unrolls the loop: a tuple's index has to be a constant.
    for k in tl.static_range(TERMS - 2, -1, -1):
        acc = horner_step(acc, x, SERIES[k])
    tl.store(out_ptr + offs, acc, mask=offs < N)


def exp_series(x):
    """Return six terms of the power series of exp, for a float32 tensor."""
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    out = torch.empty_like(x)
    N = x.numel()

    def grid(meta):
        return (triton.cdiv(N, meta["BLOCK"]),)

    exp_kernel[grid](x, out, N, TERMS=6, BLOCK=1024)
    return out


if __name__ == "__main__":
    x = 0.2 * torch.rand(3000, device=DEVICE) - 0.1
    # So near to 0, the missing terms are too small for float32.
    torch.testing.assert_close(exp_series(x), torch.exp(x))

# %%
# What the compiler refuses
# -------------------------
#
# Nine functions that cannot be kernels. The docstring of each says what to
# write instead. The output has the last line of each error.

if __name__ == "__main__":
    FACTOR = 2.0

    def double(x):
        return 2 * x

    def python_function(x_ptr, N):
        """Decorate double with @triton.jit."""
        tl.store(x_ptr, double(1.0))

    def torch_function(x_ptr, N):
        """Call tl.exp."""
        tl.store(x_ptr, torch.exp(tl.load(x_ptr)))

    def plain_global(x_ptr, N):
        """Write FACTOR = tl.constexpr(2.0), or pass an argument."""
        tl.store(x_ptr, FACTOR)

    def run_time_size(x_ptr, N):
        """Annotate N: tl.constexpr, and pass a power of two."""
        tl.store(x_ptr + tl.arange(0, N), 0.0)

    def if_on_block(x_ptr, N):
        """Use a mask, or tl.where."""
        if tl.load(x_ptr + tl.arange(0, 16)) > 0:
            tl.store(x_ptr, 0.0)

    def block_index(x_ptr, N):
        """Load that element alone: tl.load(x_ptr + 3)."""
        x = tl.load(x_ptr + tl.arange(0, 16))
        tl.store(x_ptr, x[3])

    def changed_type(x_ptr, N):
        """Begin with total = 0.0: the loop makes it a float."""
        total = 0
        for k in range(N):
            total += tl.load(x_ptr + k)

    def dictionary(x_ptr, N):
        """Use a tuple."""
        tl.store(x_ptr, {"one": 1.0}["one"])

    def returned_value(x_ptr, N):
        """Store it. Only a helper may return a value."""
        return tl.load(x_ptr)

    @compile_only
    def refusals():
        functions = [python_function, torch_function, plain_global]
        functions += [run_time_size, if_on_block, block_index, changed_type]
        functions += [dictionary, returned_value]
        kernels = {f.__name__: triton.jit(f) for f in functions}
        x = torch.ones(16)
        return {f: outcome(kernels[f][(1,)], x, 5) for f in kernels}

    errors = refusals()
    show({name: e.partition(": ")[2] for name, e in errors.items()}, 18)
    assert "accepted" not in errors.values()

# %%
# Above that line, Triton's message quotes the statement that it refuses. Only
# the message for ``returned_value`` quotes nothing.
#
# The interpreter does not compile. So it accepts more, even an option that does
# not exist. Code that ran there can still be refused on a GPU:

if __name__ == "__main__" and DEVICE.type == "cpu":
    for function in (plain_global, if_on_block, changed_type):
        interpreted = triton.jit(function)[(1,)]
        print(function.__name__, outcome(interpreted, torch.ones(16), 5))
    print("num_warp=8", outcome(lambda: empty_kernel[(1,)](num_warp=8)))

# %%
# Exercises
# ---------
#
# Each exercise has a piece to mend, and a check, which needs no GPU.
#
# **1.** This launch has four mistakes. Mend the string. It may use ``x``, ``N``
# and ``cdiv``.

LAUNCH = "kernel[lambda meta: cdiv(N, BLOCK)](x.tolist(), N, BLOCKS=16)"

if __name__ == "__main__":
    show({"exercise 1": outcomes([LAUNCH])[LAUNCH]}, 14)

# %%
# **2.** This kernel has two mistakes. Mend the function. ``tl.where(condition,
# a, b)`` chooses for each element, as ``torch.where`` does.

SLOPE = 0.5


def leaky_relu(x_ptr, N):
    offs = tl.arange(0, 16)  # (16,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (16,)
    if x < 0:
        x = SLOPE * x
    tl.store(x_ptr + offs, x, mask=offs < N)


@compile_only
def compile_leaky_relu():
    return outcome(triton.jit(leaky_relu)[(1,)], torch.ones(16), 5)


def check_leaky_relu():
    answer = compile_leaky_relu()
    if answer != "accepted":
        return answer
    x = torch.tensor([-2.0, -1, 0, 1, -4, -8], device=DEVICE)
    triton.jit(leaky_relu)[(1,)](x, 5)  # the sixth element stays
    return "right" if x.tolist() == [-1, -0.5, 0, 1, -2, -8] else "wrong"


if __name__ == "__main__":
    show({"exercise 2": check_leaky_relu()}, 14)

# %%
# ``what_a_launch_compiles.py`` comes next: when a launch compiles, and what its
# options do to the code.

# %%
# Answers
# -------
#
# **1.** The grid is a tuple, its size comes from the dictionary, ``x`` stays a
# tensor, and the constexpr is called ``BLOCK``.

MENDED = "kernel[lambda meta: (cdiv(N, meta['BLOCK']),)](x, N, BLOCK=16)"

if __name__ == "__main__":
    assert outcomes([MENDED]) == {MENDED: "accepted"}

# %%
# **2.** The slope is wrapped, and ``tl.where`` chooses for each element.

if __name__ == "__main__":
    SLOPE = tl.constexpr(0.5)

    def leaky_relu(x_ptr, N):
        offs = tl.arange(0, 16)  # (16,)
        x = tl.load(x_ptr + offs, mask=offs < N)  # (16,)
        tl.store(x_ptr + offs, tl.where(x < 0, SLOPE * x, x), mask=offs < N)

    assert check_leaky_relu() == "right"
