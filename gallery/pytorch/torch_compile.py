# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Call a Triton kernel in a function under torch.compile: which decorators and
# shapes it takes, what it fuses, and where it goes wrong silently."""
# tool = true
# ///
r"""
User-defined kernels with torch.compile
=======================================

``torch.compile`` takes a function that launches your Triton kernel as it is:
nothing to register, no graph break. It then compiles the code around the kernel
and tunes the kernel itself. Where a compiler can write the kernel, leave it the
whole function: this page measures what a kernel of your own costs there.

After this page you can

* say which decorators, options and shapes ``torch.compile`` takes;
* read the generated code, and count what is fused;
* find a write that the compiler does not see.
"""

# sphinx_gallery_tags = ["torch.compile", "elementwise", "memory bound"]
import os
import re
import textwrap
from functools import partial

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
from triton_gallery.compiling import compile_only, generated_code, launches

# %%
# A kernel among operators
# ------------------------
#
# The kernel adds two tensors, between operators of PyTorch. ``launch`` takes
# the kernel as an argument, so that we can decorate it in many ways.


@triton.jit
def add_kernel(
    x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    # In int32 the product below would overflow past element 2**31.
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = (offs < N) | EVEN  # EVEN: BLOCK divides N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y, mask=mask)


def launch(x, y, kernel=add_kernel, out=None, **options):
    out = torch.empty_like(x) if out is None else out
    kernel[lambda meta: (triton.cdiv(out.numel(), meta["BLOCK"]),)](
        x, y, out, out.numel(), **options
    )
    return out


def add(x, y, BLOCK=1024):
    """Return ``x + y`` for contiguous tensors of one shape and dtype."""
    return launch(x, y, BLOCK=BLOCK, EVEN=False)


def chain(x, y):
    return torch.sigmoid(add(torch.relu(x) * 0.5, y)) * 2


def chain_torch(x, y):
    return torch.sigmoid(torch.relu(x) * 0.5 + y) * 2


if __name__ == "__main__":
    x, y = torch.rand(2, 5008, device=DEVICE)
    torch.testing.assert_close(chain(x, y), chain_torch(x, y))

# %%
# The answers
# -----------
#
# Which decorators and options does ``torch.compile`` take? ``compile_only``
# runs a function where kernels compile without a GPU, and ``generated_code``
# returns the program that ``torch.compile`` writes. The program does not run.


def tuned(kernel, **options):
    stages = [triton.Config({"BLOCK": 1024}, num_stages=n) for n in (1, 3)]
    return triton.autotune(**{"configs": stages, "key": [], **options})(kernel)


def answer(kernel, dynamic=False, **options):
    """Say whether torch.compile takes a kernel; name the configs' stages."""

    def function(x, y):
        return launch(x, y, kernel, **options)

    try:
        inputs = torch.ones(5000), torch.ones(5000)
        (code,) = generated_code(function, inputs, dynamic=dynamic)
    except Exception as error:
        reason = re.search(r"feature: (.*)|raised exception (\w+)", str(error))
        return f"no: {reason[1] or reason[2]}"
    stages = re.findall(r"'num_stages': (\d+)", code.partition("meta=")[0])
    return f"yes, num_stages {', '.join(stages)}" if stages else "yes"


@compile_only
def answers():
    def row(name, kernel, **options):
        text = f"{name:27} {answer(kernel, EVEN=False, **options)}"
        print(textwrap.fill(text, 78, subsequent_indent=" " * 28))

    row("no decorator", add_kernel, BLOCK=1024)
    row("launched with num_stages", add_kernel, BLOCK=1024, num_stages=4)
    row("autotune", tuned(add_kernel))
    last = {"early_config_prune": lambda configs, *_, **__: configs[-1:]}
    for name, value in {
        "key": ["N"],
        "restore_value": ["out_ptr"],
        "reset_to_zero": ["out_ptr"],
        "prune_configs_by": last,
        "do_bench": print,
        "use_cuda_graph": True,
        "pre_hook": print,
    }.items():
        row(f"autotune, {name}", tuned(add_kernel, **{name: value}))
    row("autotune twice", tuned(tuned(add_kernel)))


if __name__ == "__main__":
    answers()

# %%
# ``num_stages`` is taken over from each config, or from the launch. Pruning is
# obeyed: one config is left. But *yes* does not mean *obeyed*: ``key`` is
# ignored. The other answers, each with its run below:
#
# * **heuristics**: alone, above or below ``autotune``, with two exceptions;
# * **dynamic shapes**: one program for all sizes;
# * **training**: forward and backward of a ``torch.autograd.Function``;
# * **ahead of time**: exported with ``strict=True``;
# * **hidden writes**: wrong results, and no warning.
#
# What is fused?
# --------------
#
# Here is what the generated programs launch. ``arg`` is an argument, ``buf`` is
# memory that the program allocates. A float32 element has 4 bytes:


def chain_(x, y):
    return launch(x, y, out=x, BLOCK=1024, EVEN=False) * 2


@compile_only
def fused():
    inputs = torch.ones(5000), torch.ones(5000)
    for function in (chain, chain_torch, chain_):
        (code,) = generated_code(function, inputs)
        tensors = re.findall(r"(?:arg|buf)\d", str(launches(code)))
        print(f"{function.__name__}: {4 * len(tensors)} bytes for an element")
        print(*launches(code), sep="\n")


if __name__ == "__main__":
    fused()

# %%
# The compiler fuses what comes before the kernel, and what comes after it, but
# not across it. The kernel is a wall: all goes through memory. In ``chain_``
# our kernel writes to its argument, and nothing is copied. These programs are
# for a CPU, so the other kernels are C++. ``TORCH_LOGS=output_code`` prints the
# programs of your own functions.
#
# Heuristics: alone, above or below autotune?
# -------------------------------------------
#
# ``triton.heuristics`` computes a parameter from the other arguments:
#
# .. code-block:: python
#
#     @triton.heuristics({"EVEN": ...})   # above: called first
#     @triton.autotune(configs, key)
#     @triton.jit
#
#     @triton.autotune(configs, key)
#     @triton.heuristics({"EVEN": ...})   # below: called for a chosen config
#     @triton.jit
#
# PyTorch's tutorial allows heuristics *before* ``autotune``, not after. We try
# each order with a heuristic of ``N`` and with one of ``N`` and ``BLOCK``. Then
# a kernel that changes its argument is tuned with ``restore_value``:


def decorated(kernel, order, values, **options):
    if order == "above":
        return triton.heuristics(values)(tuned(kernel, **options))
    kernel = triton.heuristics(values)(kernel)
    return tuned(kernel, **options) if order == "below" else kernel


@triton.jit
def increment_kernel(x_ptr, STEP: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + STEP)


def increment(order, **options):
    options["configs"] = [triton.Config({}, num_warps=n) for n in (1, 2)]
    options["restore_value"] = ["x_ptr"]
    step = {"STEP": lambda args: 1}
    kernel = decorated(increment_kernel, order, step, **options)
    return lambda x: kernel[(1,)](x) or x


@compile_only
def orders():
    print("order  reads        constant sizes  dynamic sizes")
    reasons = {}
    for reads, value in {
        "N": lambda args: args["N"] % 1024 == 0,
        "N and BLOCK": lambda args: args["N"] % args["BLOCK"] == 0,
    }.items():
        for order in ("alone", "above", "below"):
            kernel = decorated(add_kernel, order, {"EVEN": value})
            block = {"BLOCK": 1024} if order == "alone" else {}
            found = [answer(kernel, how, **block) for how in (False, True)]
            reasons |= {text: order for text in found if text[:2] == "no"}
            static, dynamic = (text[:3].rstrip(":") for text in found)
            print(f"{order:7}{reads:13}{static:16}{dynamic}")
    for reason, order in reasons.items():
        print(textwrap.fill(f"{order}, {reason}", 78))
    swap = {"early_config_prune": lambda configs, *_, **__: configs[::-1]}
    functions = {order: increment(order) for order in ("above", "below")}
    functions["above, pruned"] = increment("above", prune_configs_by=swap)
    for name, function in functions.items():
        (code,) = generated_code(function, (torch.tensor([100]),))
        print(f"{name}: restore_value in the program:", "restore_" in code)


if __name__ == "__main__":
    orders()

# %%
# * **Alone**, it works.
# * **Above**, it works unless the heuristic reads what the tuner chooses:
#   nothing is chosen yet. Triton itself raises this error (``autotune.py``).
# * **Below**, it works while sizes are constants. PyTorch calls the heuristic
#   at compile time, and makes its result a part of each config. So a result
#   that depends on a dynamic size is refused. And PyTorch makes a new tuner of
#   the new configs, which forgets ``restore_value``: wrong, with no warning.
#   The same becomes of ``restore_value`` where configs are pruned.
#
# So put heuristics above ``autotune``, and let them read arguments alone. On a
# GPU the kernel adds 1 to 100, twice: 101 and 102 are right.


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, **options)


if __name__ == "__main__" and DEVICE.type == "cuda":
    for order in ("alone", "above", "below"):
        function, z = compiled(increment(order)), torch.tensor([100]).to(DEVICE)
        with torch._inductor.utils.fresh_cache():  # or old choices come back
            print(order, function(z).tolist() + function(z).tolist())

# %%
# How many programs for many sizes?
# ---------------------------------
#
# Sizes are constants at first. When one changes, the second program has a
# symbol for it; ``dynamic=True`` begins with the symbol. But each value of a
# ``tl.constexpr`` takes a program of its own, as in ``by_size``:


def by_size(x, y):
    return add(x, y, BLOCK=triton.next_power_of_2(x.numel()))


@compile_only
def sizes():
    calls = [(torch.ones(N), torch.ones(N)) for N in (3000, 3001, 5000, 70_000)]
    for function in (chain, by_size):
        for dynamic in (None, True):
            count = len(generated_code(function, *calls, dynamic=dynamic))
            print(f"{function.__name__}, dynamic={dynamic}: {count} programs")
    kernel = tuned(add_kernel, key=["N"])
    (code,) = generated_code(
        lambda x, y: launch(x, y, kernel, EVEN=False), *calls, dynamic=True
    )
    print("tuned: 1 program; key in it:", re.findall(r"\bkey\b", code))


if __name__ == "__main__":
    sizes()

# %%
# ``None`` is the default. The last program serves all sizes and has one tuner,
# which does not know the ``key``: the first size decides for all (`a known
# issue <https://github.com/pytorch/pytorch/issues/164124>`_).
#
# Training, and ahead of time?
# ----------------------------
#
# A ``torch.autograd.Function`` may launch kernels in its forward and in its
# backward. Here both are our addition:


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x, x)

    @staticmethod
    def backward(ctx, g):
        return add(g, g)


def loss(x):
    return Twice.apply(x).square().sum()


class Chain(torch.nn.Module):
    def forward(self, x, y):
        return chain(x, y)


@compile_only
def training_and_export():
    x, y = torch.ones(5000), torch.ones(5000)
    codes = generated_code(loss, (x.clone().requires_grad_(),))
    for name, code in zip(("forward", "backward"), codes, strict=True):
        print(f"{name}:", *launches(code), sep="\n")
    for strict in (True, False):
        try:
            program = torch.export.export(Chain(), (x, y), strict=strict)
            nodes = [node.name for node in program.graph.nodes]
            text = " ".join([f"export, strict={strict}:", *nodes[2:]])
            print(textwrap.fill(text, 78))
        except Exception as error:
            print(f"export, strict={strict}: {error}".partition(" (")[0])


if __name__ == "__main__":
    training_and_export()

# %%
# Both passes are compiled. So far the compiler runs at the first call, *just in
# time*. *Ahead of time*, an exported graph becomes a file that needs no Python:
# see ``aot_inductor.py``. With ``strict=True`` the export reads your Python, as
# ``torch.compile`` does. The default runs your Python, and there a bare kernel
# needs ``wrap_triton``: see ``triton_op.py``. On a GPU, results and gradient:

if __name__ == "__main__" and DEVICE.type == "cuda":
    torch.testing.assert_close(compiled(chain)(x, y), chain_torch(x, y))
    z = x.clone().requires_grad_()
    compiled(loss)(z).backward()
    torch.testing.assert_close(z.grad, 8 * x)
    print("right")

# %%
# Break it: writes that nobody sees
# ---------------------------------
#
# PyTorch finds what a kernel writes by following each store's address, in
# Triton's first intermediate code, back to an argument. Two hard cases:


@triton.jit
def table_kernel(table_ptr):
    # Kernels for a list of tensors take a tensor of their addresses.
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def pair_kernel(x_ptr, y_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)
    tl.store(y_ptr, tl.load(y_ptr) + 1)


def table(x, addresses):
    table_kernel[(1,)](addresses)
    return x + 100


def pair(x, addresses):
    pair_kernel[(1,)](x, x)
    return x + 100


def address(x):
    return torch.tensor([x.data_ptr()], device=x.device)


@compile_only
def writes():
    x = torch.zeros(1)
    for function in (table, pair):
        (code,) = generated_code(function, (x, address(x)))
        print(f"{function.__name__}:", *launches(code), sep="\n")


if __name__ == "__main__":
    writes()

# %%
# The GPU begins with an ``x`` of 0:

if __name__ == "__main__" and DEVICE.type == "cuda":
    for function in (table, pair):
        for call in (function, compiled(function)):
            z = torch.zeros(1, device=DEVICE)
            result = call(z, address(z)).item()
            how = "eager" if call is function else "compiled"
            name = f"{function.__name__}, {how}"
            print(f"{name}: returns {result:g}, x is {z.item():g}")

# %%
# * **table**: the address comes from memory, so the kernel seems to write
#   nothing and is removed.
# * **pair**: both writes are seen, but each goes to memory of its own.
#
# No error, no warning: compare compiled with eager, inputs as well as results.
# Don't pass a tensor under two names. Make a table of addresses inside a
# ``custom_op`` that declares its writes: the compiler doesn't look into that.
#
# The benchmark
# -------------
#
# The rate is ``12 * N / time``: read ``x`` and ``y``, write the result. Eager,
# ``Triton`` is ``chain`` and ``PyTorch`` is ``chain_torch``. Compiled, they are
# ``torch.compile`` and ``torch.compile, alone``. ``Roof`` is an addition.

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for N in [2**k for k in range(14, 29, 2)]:
        x, y, out = torch.rand(3, N, device=DEVICE)
        ours = compiled(chain)
        alone = torch.compile(chain_torch, fullgraph=True)
        calls = {
            "Triton": partial(chain, x, y),
            "PyTorch": partial(chain_torch, x, y),
            "torch.compile": partial(ours, x, y),
            "torch.compile, alone": partial(alone, x, y),
            "Roof": partial(torch.add, x, y, out=out),
        }
        times[N] = gpu_time(calls)
    results = rate_table(times, "N", "GB/s", lambda N: 12e-6 * N)
    print(results.to_string())
    wide = results.pivot(index="N", columns="series", values="GB/s")
    wide.plot(logx=True)
    ratio = wide["torch.compile"] / wide["torch.compile, alone"]
    print(f"with our kernel, {ratio.iloc[-1]:.2f} of the rate alone")

# %%
# For large ``N`` the bytes of *What is fused?* decide. A kernel where the
# compiler could have generated one is a loss, however good. Your kernel has to
# save more than the wall costs, or do its neighbours' work too.
#
# Exercises
# ---------
#
# **1.** Do the neighbours' work too: 12 bytes for an element of ``chain``.


@triton.jit
def chain_kernel(
    x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    pass  # your kernel


def check_chain(kernel):
    x, y = torch.rand(2, 5008, device=DEVICE) - 0.5
    out = torch.zeros_like(x)
    launch(x, y, kernel, out, BLOCK=1024, EVEN=False)
    right = torch.allclose(out, chain_torch(x, y))
    return "right" if right else "not solved yet"


if __name__ == "__main__":
    print("chain_kernel:", check_chain(chain_kernel))

# %%
# **2.** A tuner chooses a ``BLOCK`` of 512, 1024 or 2048. Write a heuristic for
# ``EVEN`` that works above this tuner: right for each of these blocks, and
# ``True`` for as many ``N`` as possible.


def even(args):
    pass  # your rule


def check_even(rule):
    found = {N for N in range(1, 9000) if rule({"N": N})}
    right = found == {2048, 4096, 6144, 8192}
    return "right" if right else "not solved yet"


if __name__ == "__main__":
    print("even:", check_even(even))

# %%
# ``triton_op.py`` is next. To read on: PyTorch's tutorial *Using User-Defined
# Triton Kernels with torch.compile*.

# %%
# Answers
# -------
#
# **1.** All five operators are between the loads and the store:


@triton.jit
def chain_answer_kernel(
    x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = (offs < N) | EVEN
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    s = tl.maximum(x, 0) * 0.5 + y
    tl.store(out_ptr + offs, tl.sigmoid(s) * 2, mask=mask)


if __name__ == "__main__":
    assert check_chain(chain_answer_kernel) == "right"

# %%
# **2.** The largest block decides, as the others divide it.


def even_answer(args):
    return args["N"] % 2048 == 0


if __name__ == "__main__":
    assert check_even(even_answer) == "right"
