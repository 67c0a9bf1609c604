# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas", "numpy", "packaging",
#   "jax[cuda13]>=0.10.2,<0.12",  # with 0.12, jax-triton 0.4.1 fails
#   "jax-triton>=0.3.1,<0.5"]
#
# [tool.triton-gallery]
# description = """
# Call Triton kernels, up to flash attention, in a jitted JAX function, and pass
# them PyTorch's tensors without a copy."""
# tool = true
# ///
r"""
Triton in a JAX program
=======================

JAX compiles a program with XLA, which fuses simple operations by itself.
``jax_triton.triton_call`` puts a Triton kernel of yours into such a program.
Use it for what XLA does not fuse well, such as attention, and not for
elementwise operations: XLA cannot fuse anything into your kernel.

After this page you can

* install ``jax-triton`` beside PyTorch, and call a kernel under ``jax.jit``;
* pass int64 operands, and tensors of PyTorch without a copy;
* add ``vmap`` and ``grad``, and measure a kernel beside XLA's own code.
"""

# sphinx_gallery_tags = ["jax", "attention", "compute bound"]
import importlib.metadata
import inspect
import os
import re
import time
import zlib
from functools import partial
from unittest.mock import patch
from urllib.parse import unquote_to_bytes

import numpy as np
import pandas as pd
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import triton
import triton.language as tl
from triton_gallery.compiling import compile_only

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")


def interpret(arguments, launch, out_type, options):
    """Launch a kernel in Triton's interpreter, from a program of JAX."""
    arrays = [a for a in arguments if isinstance(a, jax.Array)]
    numbers = arguments[len(arrays) :]

    def run(*arrays):
        tensors = [torch.from_dlpack(a) for a in arrays]
        if out_type.dtype == jnp.bfloat16:  # wrong in the interpreter
            tensors = [t.float() for t in tensors]
        out = torch.empty(out_type.shape, dtype=tensors[0].dtype)
        launch(*tensors, *numbers, out, **options)
        return out.numpy().astype(out_type.dtype)

    return jax.pure_callback(run, out_type, *arrays)


def payload(text):
    """Return what the custom call has for the launch, unpacked."""
    # Release 0.4.1 leaves one backend_config empty, and calls the message in a
    # second one opaque.
    quoted = re.search(r'(?:config|opaque) = "((?:[^"\\]|\\.)+)"', text)[1]
    # A byte is written \\ or \XX, as in a web address but for the %.
    quoted = quoted.replace("\\\\", "\\5C").replace("%", "%25")
    message = zlib.decompress(unquote_to_bytes(quoted.replace("\\", "%")))
    return message.decode(errors="replace")


def result(text):
    """Return the types of a kernel's arguments, or the error of a lowering."""
    if "@triton_kernel_call" not in text:
        return text.splitlines()[-1].partition(". ")[0]
    line = payload(text).partition("tt.func public @")[2].partition("\n")[0]
    types = re.findall(r"%\w+: (?:!tt\.)?(\w+(?:<\w+>)?)", line)
    return "custom call with " + ", ".join(types)


# %%
# PyTorch and JAX can share a process, with two precautions. JAX `reserves 75 %
# of the GPU's memory
# <https://docs.jax.dev/en/latest/gpu_memory_allocation.html>`_ unless a
# variable forbids it. And importing ``jax_triton`` changes
# ``TRITON_CACHE_DIR``, where `Triton keeps compiled kernels
# <https://github.com/jax-ml/jax-triton/pull/351>`_; ``patch.dict`` restores it.

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp

with patch.dict(os.environ):
    import jax_triton as jt

# %%
# What to install
# ---------------
#
# PyTorch's wheel demands one exact version of Triton, and ``jax-triton`` a
# range. The dictionaries have what the wheels on PyPI say in their metadata.
# Which releases agree on a Triton?

PINS = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1"}  # torch
RANGES = {"0.3.1": ">=3.6", "0.4.1": ">=3.7"}  # jax-triton


def demanded(package):
    """Return the versions of Triton that an installed package demands."""
    needs = map(Requirement, importlib.metadata.requires(package))
    return next((str(n.specifier) for n in needs if n.name == "triton"), "none")


version = importlib.metadata.version
for package in ("torch", "jax-triton"):
    print(package, version(package), "demands Triton:", demanded(package))
print("installed Triton:", version("triton"))
pd.DataFrame(
    {
        f"jax-triton {release}": [
            pin if pin in SpecifierSet(allowed) else "none"
            for pin in PINS.values()
        ]
        for release, allowed in RANGES.items()
    },
    [f"torch {release}" for release in PINS],
)

# %%
# Where the table names a Triton, install **with dependencies**: ``pip install
# torch jax-triton "jax[cuda13]"``. ``jax-triton`` demands ``jax`` without its
# CUDA plugin, hence the last part.
#
# Where the table says *none*, pip refuses the two, or takes an older
# ``jax-triton`` if you name no release. (Release 0.4.1 needs Python 3.12. In
# 0.3.1, a kernel that makes a tensor descriptor faults: it gets `no scratch
# memory <https://github.com/jax-ml/jax-triton/pull/390>`_.) Then install
# **without dependencies**: ``jax`` and ``absl-py`` as usual, and ``jax-triton``
# and the Triton of your choice with ``pip install --no-deps``. pip checks
# nothing there, so test. PyTorch's wheel for the CPU demands no Triton: install
# one yourself.
#
# A kernel and its call
# ---------------------
#
# The kernel adds a number to an array. Its arguments have the order that
# ``triton_call`` demands: inputs, then outputs, then constexprs.


@triton.jit
def shift_kernel(
    x_ptr,
    by,
    N,
    out_ptr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N)  # (BLOCK,)
    tl.store(out_ptr + offs, x + by, mask=offs < N)


# %%
# ``jax_triton.triton_call`` allocates an output of the shape and dtype that you
# name. It takes no strides, as XLA hands over contiguous arrays. Our
# ``triton_call`` adds the older name of ``out_type``, which is ``out_shape`` in
# release 0.3.1. Where there is no GPU, it calls Triton's interpreter.


def triton_call(*arguments, kernel, out_type, grid, **options):
    out_type = jax.ShapeDtypeStruct(out_type.shape, out_type.dtype)
    if triton.knobs.runtime.interpret:
        return interpret(arguments, kernel[grid], out_type, options)
    new = "out_type" in inspect.signature(jt.triton_call).parameters
    options["out_type" if new else "out_shape"] = out_type
    target = triton.runtime.driver.active.get_current_target()
    options["compute_capability"] = target.arch
    return jt.triton_call(*arguments, kernel=kernel, grid=grid, **options)


def shift(x, by):
    """Return ``x + by`` for an array with elements."""
    return triton_call(
        x,
        by,
        x.size,
        kernel=shift_kernel,
        out_type=x,
        grid=(triton.cdiv(x.size, 1024),),
        BLOCK=1024,
    )


# %%
# What works
# ----------
#
# ``jit`` traces a function, translates (*lowers*) it to `StableHLO
# <https://openxla.org/stablehlo>`_, and has XLA compile that. Triton compiles
# the kernel in the lowering, which needs no GPU. So we lower some calls and
# look at what XLA gets. ``compile_only`` runs a function in a process where
# Triton compiles for an H100. ``result`` unpacks the types of the kernel's
# arguments.


def chain(x, function=shift):
    """Return an elementwise function that XLA computes around another one."""
    return x + function(2 * x, 7)


def lower(function, *arguments):
    """Return a function's StableHLO, or the error that its lowering raises."""
    try:
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@compile_only
def lower_all():
    """Return what each call is lowered to, for CUDA and without a GPU."""
    jax.config.update("jax_platforms", "cpu")
    x, ids = jnp.ones((8, 8)), np.arange(64)  # NumPy's integers are int64
    seven = partial(shift, by=7)
    texts = {
        "jit": lower(chain, x),
        "vmap": lower(jax.vmap(seven), x),
        "grad": lower(jax.grad(lambda x: seven(x).sum()), x),
        "a float": lower(partial(shift, by=0.5), x),
        "an array for a number": lower(shift, x, jnp.ones(())),
        "int64": lower(seven, ids),
    }
    with jax.enable_x64(True):
        texts["int64, enable_x64"] = lower(seven, ids)
    return texts


lowered = lower_all() if __name__ == "__main__" else {}
pd.Series(lowered, name="result", dtype=object).map(result).to_frame()

# %%
# ``vmap`` and ``grad`` need a rule of yours, and int64 needs a setting; they
# come below. A number of Python is a constant of the program. A float is
# ``f64`` in release 0.3.1, and arithmetic in float64 is slow: pass
# ``np.float32(0.5)`` there. A JAX array is a pointer, even if it has one
# element. This is the program of the first row:

for line in lowered.get("jit", "").splitlines():
    if " = stablehlo." in line:
        print(line.strip()[:78])

# %%
# The kernel is one *custom call* between XLA's operations. The rest of its line
# is the payload for JAX's CUDA plugin, which launches the kernel: PTX, grid,
# arguments.
#
# int64
# -----
#
# JAX has no 64-bit types unless ``enable_x64`` is set. Without it, int64
# operands become int32: token ids survive, larger numbers do not.

numbers = torch.arange(2, device=DEVICE) + 2**40
for x64 in (False, True):
    with jax.enable_x64(x64):
        array = jax.dlpack.from_dlpack(numbers)
        out = jax.jit(shift, static_argnums=1)(array, 7)
        ones = jnp.ones(1).dtype
    right = out.tolist() == (numbers + 7).tolist()
    print(f"enable_x64 {x64}:", out.dtype, *out.tolist(), "right:", right, ones)
    assert right == x64

# %%
# For a whole program, set the environment variable ``JAX_ENABLE_X64=1``. The
# last column is the price: ``jnp.ones(1)`` becomes float64, so give a dtype.
#
# PyTorch's tensors, without a copy
# ---------------------------------
#
# `DLPack <https://dmlc.github.io/dlpack/latest/python_spec.html>`_ hands over a
# pointer, a shape and strides. On a GPU, the receiver's stream waits for the
# data. A dense tensor comes and goes without a copy; four others are special.

if __name__ == "__main__":
    tensor = torch.randn(64, 64, device=DEVICE)
    array = jax.dlpack.from_dlpack(tensor, copy=False)
    out = jax.jit(chain)(array)
    back = torch.from_dlpack(out)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert out.unsafe_buffer_pointer() == back.data_ptr()
    torch.testing.assert_close(back, tensor + (2 * tensor + 7))
    views = {
        "x.T": tensor.T,
        "x.double()": tensor.double(),
        "x[:, ::2]": tensor[:, ::2],
        "x.view(-1)[1:]": tensor.view(-1)[1:],
    }
    for name, view in views.items():
        try:
            array = jax.dlpack.from_dlpack(view, copy=False)
            jax.jit(chain)(array).block_until_ready()
            same = array.unsafe_buffer_pointer() == view.data_ptr()
            print(f"{name:16}{array.dtype},", "shared" if same else "copied")
        except Exception as error:
            print(f"{name:16}" + re.split("[;,.] ", str(error))[0][-60:])

# %%
# ``x.T`` is a permutation of dense memory, which XLA knows as a layout. A slice
# with gaps is none. ``double()`` is converted in spite of ``copy=False``, as
# int64 was above. The last slice fails on a GPU: addresses must be multiples of
# 16, which is 10 in hex.
#
# JAX takes its arrays for immutable, and after the exchange no stream waits for
# the other. Leave a tensor alone until JAX is done with it, or hand over a
# ``clone()``.
#
# Beside XLA's own fusion
# -----------------------
#
# What does it cost that XLA cannot fuse into a kernel? We compile ``chain``
# with our kernel and with JAX's addition, and count how often the compiled
# program passes over memory: an operand read or a result written is one pass.


def passes(function):
    """Return the kernels of a compiled program, and its passes over memory."""
    compiled = jax.jit(function).lower(jnp.ones((64, 64))).compile()
    entry = compiled.as_text().partition("\nENTRY")[2]
    kernels = re.findall(r" = .*? (fusion|custom-call)\((.*?)\)", entry)
    return [k for k, _ in kernels], sum(1 + o.count("%") for _, o in kernels)


for function in (shift, jnp.add):
    kernels, count = passes(partial(chain, function=function))
    print(f"{function.__name__:6}{count} passes: {', '.join(kernels)}")

# %%
# Leave elementwise functions to XLA. A kernel pays where XLA would write
# something large to memory.
#
# Flash attention
# ---------------
#
# Attention is such a case: :math:`\text{softmax}(Q K^T / \sqrt{H})\, V` has a
# matrix of ``T * T`` weights between its products, for each head. *Flash
# attention* never stores the matrix. A program owns ``BLOCK_M`` queries and
# walks along the keys in blocks of ``BLOCK_N``. It keeps each row's maximum and
# sum so far, and rescales what it has summed when the maximum grows. *Causal*
# means that a query sees the keys up to its own position. Arrays are ``(B, T,
# N, H)`` as in ``jax.nn.dot_product_attention``: batch, sequence, heads, head
# size.


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    T,
    out_ptr,
    N: tl.constexpr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # exp(x) is exp2(x * log2(e)), and exp2 is one instruction.
    SCALE: tl.constexpr = 1.4426950408889634 / H**0.5
    pid_m = tl.program_id(axis=0)
    pid_bn = tl.program_id(axis=1).to(tl.int64)
    # In int64: batches, positions and heads multiply to more than 2**31.
    head = (pid_bn // N * T * N + pid_bn % N) * H
    row: tl.constexpr = N * H  # from one position to the next
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_h = tl.arange(0, H)  # (H,)
    q_offs = head + offs_m.to(tl.int64)[:, None] * row + offs_h[None, :]
    mask_m = (offs_m < T)[:, None]
    q = tl.load(q_ptr + q_offs, mask=mask_m, other=0)  # (BLOCK_M, H)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)  # (BLOCK_M,)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)  # (BLOCK_M,)
    acc = tl.zeros((BLOCK_M, H), dtype=tl.float32)  # (BLOCK_M, H)
    # No query of this program sees a key past its last one.
    for start in range(0, tl.minimum(T, (pid_m + 1) * BLOCK_M), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        kv_offs = head + offs_n.to(tl.int64)[:, None] * row + offs_h[None, :]
        mask_n = (offs_n < T)[:, None]
        k = tl.load(k_ptr + kv_offs, mask=mask_n, other=0)  # (BLOCK_N, H)
        v = tl.load(v_ptr + kv_offs, mask=mask_n, other=0)  # (BLOCK_N, H)
        s = tl.dot(q, tl.trans(k)) * SCALE  # (BLOCK_M, BLOCK_N)
        # A score of -inf becomes a weight of 0.
        seen = offs_m[:, None] >= offs_n[None, :]
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))  # (BLOCK_M,)
        p = tl.exp2(s - new_top[:, None])  # (BLOCK_M, BLOCK_N)
        # What was summed so far is relative to the old maximum.
        shrink = tl.exp2(top - new_top)  # (BLOCK_M,)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(out_ptr + q_offs, acc / total[:, None], mask=mask_m)


def attend(query, key, value):
    B, T, N, H = query.shape
    return triton_call(
        *(query, key, value, T),
        kernel=attention_kernel,
        out_type=query,
        grid=(triton.cdiv(T, 128), B * N),
        **{"N": N, "H": H, "BLOCK_M": 128, "BLOCK_N": 64},
        num_warps=8,
    )


# %%
# ``vmap`` and ``grad``
# ---------------------
#
# ``custom_vmap`` takes a rule for a whole batch. Our rule folds the new axis
# into the batch that attention has already: still one launch, with a larger
# grid. (JAX's ``sequential_vmap`` needs no rule, and makes a loop of launches.)
#
# ``custom_vjp`` takes a forward, which also returns what to keep, and a
# backward. It is the outer of the two, as ``custom_vmap`` has no reverse mode.
# Our backward is the one of JAX's own attention, matrix and all.


def fold(function):
    """Give vmap to a function of arrays with a leading batch dimension."""
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def rule(size, batched, *arrays):
        full = [
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip(arrays, batched, strict=True)
        ]
        axes = full[0].shape[:2]
        out = call(*(x.reshape(axes[0] * axes[1], *x.shape[2:]) for x in full))
        return out.reshape(*axes, *out.shape[1:]), True

    return call


@jax.custom_vjp
def causal_attention(query, key, value):
    """Return causal attention of (B, T, N, H), in float16 or bfloat16."""
    kinds = {(x.shape, x.dtype.name) for x in (query, key, value)}
    if query.dtype not in (jnp.float16, jnp.bfloat16) or len(kinds) > 1:
        raise TypeError(f"takes one shape, float16 or bfloat16, not {kinds}")
    if query.ndim != 4 or query.shape[3] not in (32, 64, 128):
        raise ValueError(f"takes (B, T, N, 32, 64 or 128), not {query.shape}")
    if query.size == 0:
        return query
    return fold(attend)(query, key, value)


causal_xla = partial(jax.nn.dot_product_attention, is_causal=True)
causal_attention.defvjp(
    lambda *inputs: (causal_attention(*inputs), inputs),
    lambda inputs, grad: jax.vjp(causal_xla, *inputs)[1](grad),
)

# %%
# Is it right?
# ------------
#
# We compare output and gradients under ``vmap`` with PyTorch in float64. The
# weights are rounded for the second product, then the result is rounded: twice
# half an ``eps`` of the largest value. We ask the same of the gradients.


def causal_torch(query, key, value):
    q, k, v = (x.transpose(-3, -2) for x in (query, key, value))
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q, k, v, is_causal=True).transpose(-3, -2)


if __name__ == "__main__":
    keys = jax.random.split(jax.random.key(1), 4)
    *qkv, grad = (
        jax.random.normal(key, (2, 1, 150, 2, 64), jnp.bfloat16) for key in keys
    )
    inputs = [torch.from_dlpack(x).double().requires_grad_() for x in qkv]
    expected = causal_torch(*inputs)
    expected.backward(torch.from_dlpack(grad).double())
    expected = [expected, *(x.grad for x in inputs)]
    out, pullback = jax.vjp(jax.jit(jax.vmap(causal_attention)), *qkv)
    for x, y in zip((out, *pullback(grad)), expected, strict=True):
        error = (torch.from_dlpack(x).double() - y).abs().max().item()
        atol = torch.finfo(torch.bfloat16).eps * y.abs().max().item()
        print(f"error {error:.1e} of {atol:.1e} allowed")
        assert error <= atol

# %%
# How fast?
# ---------
#
# The times are wall times, not GPU times: twenty calls, each on the result of
# the one before, and one wait for the GPU. ``chain`` takes :math:`2^{27}`
# numbers in float32. Attention takes 8192 positions in sequences of ``T``, 16
# heads of 128, bfloat16. JAX's own attention comes from XLA or from cuDNN.


def milliseconds(function, x, *others):
    """Return the median wall time of a call in a row of twenty."""
    call, times = jax.jit(function), []
    jax.block_until_ready(call(x, *others))  # compiles
    for _ in range(9):
        y, start = x, time.perf_counter()
        for _ in range(20):
            y = call(y, *others)
        jax.block_until_ready(y)
        times.append(time.perf_counter() - start)
    return 1000 / 20 * float(np.median(times))


if __name__ == "__main__" and DEVICE.type == "cuda":
    x = jax.random.normal(jax.random.key(0), (2**27,))
    both = [partial(chain, function=f) for f in (shift, jnp.add)]
    rows = {"chain": [*(milliseconds(f, x) for f in both), np.nan]}
    ops = [causal_attention]
    ops += [partial(causal_xla, implementation=by) for by in ("xla", "cudnn")]
    for T in (1024, 2048, 4096):
        shape = (2**13 // T, T, 16, 128)
        keys = jax.random.split(jax.random.key(0), 3)
        qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        rows[f"T = {T}"] = [milliseconds(op, *qkv) for op in ops]
    table = pd.DataFrame(rows, ["Triton", "XLA", "cuDNN"]).T
    table["XLA / Triton"] = table["XLA"] / table["Triton"]
    print("wall time of a call in ms, and its ratio to Triton's")
    print(table.round(2).to_string(na_rep="-"))
    fastest = table.iloc[1:, :3].idxmin(axis=1).unique()
    print("fastest attention:", *fastest)
    call = jax.jit(causal_attention)
    wrong = triton.testing.do_bench(lambda: call(*qkv))
    print(f"do_bench says {wrong:.2f} ms for T = {T}")

# %%
# ``chain`` shows the passes counted above. XLA's attention writes the matrix to
# memory and reads it back; ours keeps it in registers. For plain attention take
# the fastest of the table. Write a kernel for a variant that no library has.
#
# ``do_bench`` is no clock for JAX: its events are in PyTorch's stream, and do
# not wait for JAX's.
#
# Pallas or Triton
# ----------------
#
# `Pallas <https://docs.jax.dev/en/latest/pallas/>`_ is JAX's own language for
# kernels. It runs on TPUs too, and has ``vmap`` and an interpreter. On GPUs it
# needs `Hopper or newer
# <https://docs.jax.dev/en/latest/pallas/quickstart.html>`_, and you `pipeline
# <https://docs.jax.dev/en/latest/pallas/gpu/pipelining.html>`_ by hand what
# Triton pipelines itself. Its backend for older GPUs `is deprecated
# <https://docs.jax.dev/en/latest/pallas/CHANGELOG.html>`_ since JAX 0.11.
#
# Take Pallas for a TPU, for full control of a Hopper or Blackwell GPU, or if
# the kernel is for JAX alone. Take ``triton_call`` if the kernel exists, if
# PyTorch needs it too, or for an older GPU. Pin ``jax-triton``: it is, says its
# README, no official product of Google's.
#
# Exercises
# ---------
#
# **1.** ``seven`` has no rule for ``vmap``. Write ``batched`` with one, which
# makes one launch for the batch. (The kernel knows no shape, only ``N``.)


def seven(x):
    return shift(x, 7)


batched = seven  # your function


def check(transformed, expected):
    x = jnp.arange(6.0).reshape(2, 3)
    try:
        right = np.array_equal(transformed(x), expected(x))
    except (NotImplementedError, ValueError):  # no rule
        return "not solved yet"
    return "right" if right else "wrong"


def check_vmap(function):
    return check(jax.vmap(function), lambda x: x + 7)


if __name__ == "__main__":
    print("batched:", check_vmap(batched))

# %%
# **2.** Write ``trained`` with a gradient.

trained = seven  # your function


def check_gradient(function):
    gradient = jax.grad(lambda x: (function(x) * x).sum())
    return check(gradient, lambda x: 2 * x + 7)


if __name__ == "__main__":
    print("trained:", check_gradient(trained))

# %%
# Next: ``pytorch_xla.py``, the same for a program of PyTorch/XLA; `the
# documentation of jax-triton <https://jax-ml.github.io/jax-triton>`_.

# %%
# Answers
# -------
#
# **1.** The kernel adds 7 to a batch as it does to one array. (``fold`` serves
# too, but not where each array of the batch is a single number.)

batched_answer = jax.custom_batching.custom_vmap(seven)
batched_answer.def_vmap(lambda size, has_axis, x: (seven(x), True))

if __name__ == "__main__":
    assert check_vmap(batched_answer) == "right"

# %%
# **2.** The gradient of ``x + 7`` is what comes in, and nothing is kept.

trained_answer = jax.custom_vjp(seven)
trained_answer.defvjp(lambda x: (seven(x), None), lambda _, grad: (grad,))

if __name__ == "__main__":
    assert check_gradient(trained_answer) == "right"
