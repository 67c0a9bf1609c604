# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas", "numpy",
#   "jax[cuda13]>=0.10.2,<0.12",  # with 0.12, jax-triton 0.4.1 fails
#   "jax-triton>=0.3.1,<0.5"]
#
# [tool.triton-gallery]
# description = """
# Call Triton kernels, up to flash attention, in a jitted JAX function, and pass
# them PyTorch's tensors without a copy."""
# ///
r"""
Triton in a JAX program
=======================

XLA, the compiler of JAX, makes fast kernels of what it can fuse. For the rest a
call puts a Triton kernel of yours into the program that XLA compiles. That of
PyTorch/XLA is gone (``pytorch_xla.py``); ``jax_triton.triton_call`` is kept up.

After this page you can

* call a kernel under ``jax.jit``, on PyTorch's tensors and without a copy;
* read what XLA gets to see of it, on any machine;
* give it ``grad`` and ``vmap``, time it, and choose between it and Pallas.
"""

# sphinx_gallery_tags = ["jax", "attention", "compute bound"]
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote_to_bytes

import numpy as np
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# %%
# PyTorch and JAX can share a process, with two precautions. JAX would `reserve
# 75 % of the GPU's memory
# <https://docs.jax.dev/en/latest/gpu_memory_allocation.html>`_: we forbid it.
# ``jax_triton`` 0.3.1 empties ``TRITON_CACHE_DIR``, 0.4.1 deletes it. `Triton's
# own launches <https://github.com/jax-ml/jax-triton/pull/351>`_ would then put
# compiled kernels into the current folder, or not into the one you chose;
# ``patch.dict`` restores the variable.

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp

with patch.dict(os.environ):
    import jax_triton as jt

# %%
# A kernel that does not know who calls it
# ----------------------------------------
#
# ``softcap`` bends numbers into the range from ``-cap`` to ``cap``, as `Gemma 2
# <https://arxiv.org/abs/2408.00118>`_ does with its logits: :math:`c \cdot
# \tanh(x / c)`. The arguments are in the order that ``triton_call`` asks for:
# inputs, outputs, constexprs.


@triton.jit
def softcap_kernel(
    x_ptr,
    cap,
    N,
    out_ptr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    x = tl.load(x_ptr + offs, mask=offs < N).to(tl.float32)  # (BLOCK,)
    # tanh from the exponential of a negative number, which cannot overflow.
    decay = tl.exp(-2 * tl.abs(x) / cap)  # (BLOCK,)
    out = cap * (1 - decay) / (1 + decay)
    tl.store(out_ptr + offs, tl.where(x < 0, -out, out), mask=offs < N)


# %%
# ``triton_call``
# ---------------
#
# It takes the inputs, and allocates an output of the shape and dtype that you
# name. It takes no strides: XLA hands over contiguous arrays.
#
# On Python 3.11 the newest ``jax_triton`` is 0.3.1. In two ways it is not like
# 0.4.1, and ``compiled`` evens them out. It calls ``out_type`` ``out_shape``.
# And a Python ``float`` reaches the kernel as float64, and makes float64 of all
# that it meets; 0.4.1 passes float32, as Triton's launcher does.
#
# Without a GPU, this page has a stand-in that leaves the program for Triton's
# interpreter; it wants arrays before numbers. (The interpreter computes wrongly
# with bfloat16: it is given float32.)


def compiled(*arguments, out_type, **options):
    if "out_type" in inspect.signature(jt.triton_call).parameters:
        return jt.triton_call(*arguments, out_type=out_type, **options)
    passed = [np.float32(a) if isinstance(a, float) else a for a in arguments]
    return jt.triton_call(*passed, out_shape=out_type, **options)


def interpret(*arguments, kernel, out_type, grid, **options):
    arrays = [a for a in arguments if isinstance(a, jax.Array)]
    numbers = arguments[len(arrays) :]

    def run(*arrays):
        tensors = [torch.from_dlpack(a) for a in arrays]
        if out_type.dtype == jnp.bfloat16:
            tensors = [t.float() for t in tensors]
        out = torch.empty(out_type.shape, dtype=tensors[0].dtype)
        kernel[grid](*tensors, *numbers, out, **options)
        return out.numpy().astype(out_type.dtype)

    return jax.pure_callback(run, out_type, *arrays)


triton_call = compiled if DEVICE.type == "cuda" else interpret


def softcap(x, cap):
    """Return ``cap * tanh(x / cap)`` for an array with elements."""
    return triton_call(
        x,
        cap,
        x.size,
        kernel=softcap_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(triton.cdiv(x.size, 1024),),
        BLOCK=1024,
    )


# %%
# PyTorch's tensors, without a copy
# ---------------------------------
#
# This program computes the largest logit of each row. Its inputs come from
# PyTorch and its output goes there, by `DLPack
# <https://dmlc.github.io/dlpack/latest/python_spec.html>`_: a pointer, a shape,
# strides; on a GPU, the receiver's stream waits for the data. Then come
# four tensors less plain, not all of which can be handed over.


def capped(x):
    return softcap(x, 30.0)


def program(hidden, weight):
    logits = jnp.matmul(hidden, weight, precision="highest")
    return capped(logits).max(axis=1)


if __name__ == "__main__":
    tensors = [*torch.randn(2, 64, 64, device=DEVICE)]
    arrays = [jax.dlpack.from_dlpack(t, copy=False) for t in tensors]
    arrays.append(jax.jit(program)(*arrays))
    tensors.append(torch.from_dlpack(arrays[-1]))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    hidden, weight, out = (t.double() for t in tensors)
    expected = (30 * torch.tanh(hidden @ weight / 30)).amax(dim=1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
    tensors[0].fill_(7).cpu()  # which waits for the GPU
    print("same memory; PyTorch's 7 is in JAX's array:", np.unique(arrays[0]))
    x = tensors[1]
    for name in ("x.T", "x.double()", "x[:, ::2]", "x.view(-1)[1:]"):
        try:
            array = jax.dlpack.from_dlpack(eval(name), copy=False)
            said = f"{capped(array).block_until_ready().dtype}"
        except Exception as error:
            said = re.split("[;,.] ", str(error))[0][-60:]
        print(f"{name:16}{said}")

# %%
# JAX takes its arrays for immutable, and after the exchange no stream waits for
# the other: leave a tensor alone until JAX is done with it, or hand over a
# ``clone()``. ``x.T`` is a permutation of dense memory, which XLA knows as a
# layout; a slice with gaps is none. Look twice at ``double()``: JAX has no
# 64-bit types, unless ``jax_enable_x64`` is set, and converts in spite of
# ``copy=False``. The last slice fails on a GPU: addresses must be multiples of
# 16, which is 10 in hex.
#
# What XLA gets to see
# --------------------
#
# ``jit`` traces, translates (*lowers*) to `StableHLO
# <https://openxla.org/stablehlo>`_, the language that XLA reads, and has XLA
# compile that. Triton compiles in the lowering, which needs no GPU: name the
# platform, and give the call a ``compute_capability``. (Without a GPU,
# ``lowered`` goes to another process, where the kernel is not interpreted.)


def stablehlo(function, *arguments):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


TOP = """
import inspect, numpy as np, triton, triton.language as tl
import jax, jax.numpy as jnp, jax_triton as jt
def triton_call(*arguments, **options):
    return compiled(*arguments, compute_capability=90, **options)
"""


def lowered(needs, call):
    if DEVICE.type == "cuda":
        return eval(call)
    sources = [inspect.getsource(getattr(f, "fn", f)) for f in needs]
    settings = {"TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder, "child.py")
        child.write_text("\n".join([TOP, *sources, f"print({call})"]))
        command, environment = [sys.executable, child], os.environ | settings
        return subprocess.check_output(command, env=environment, text=True)


if __name__ == "__main__":
    text = lowered(
        [softcap_kernel, compiled, softcap, capped, program, stablehlo],
        "stablehlo(program, jnp.ones((64, 64)), jnp.ones((64, 64)))",
    )
    for line in text.splitlines():
        if " = stablehlo." in line:
            print(line.strip()[:78])
    assert text.count("@triton_kernel_call") == 1

# %%
# The kernel is one *custom call* among XLA's operations; nothing is fused into
# it or across it. The launch is left to the function of that name in JAX's CUDA
# plugin. ``backend_config``, cut off above, has what that needs: a compressed
# message with PTX, Triton IR, grid and arguments.


def payload(text):
    # jax_triton 0.4.1 leaves one backend_config empty; in a second one, the
    # message is called opaque.
    quoted = re.search(r'(?:config|opaque) = "((?:[^"\\]|\\.)+)"', text)[1]
    # A byte is written \\ or \XX, as in a web address but for the %.
    quoted = quoted.replace("\\\\", "\\5C").replace("%", "%25")
    message = zlib.decompress(unquote_to_bytes(quoted.replace("\\", "%")))
    return message.decode(errors="replace")


if __name__ == "__main__":
    ptx = payload(text)
    entry = re.search(r"(?s)\.entry .*?\)", ptx)[0]
    print("arguments in its PTX:", *re.findall(r"\.param \.(\w+)", entry))
    assert ".f64" not in ptx

# %%
# Numbers are constants of the program, here ``cap``, an ``f32``, and ``N``. An
# argument of the jitted function is no constant but an array: the kernel gets
# its address, and ``cap`` would be a pointer. The last two ``u64`` are Triton's
# own. One is for scratch memory, for which ``jax_triton`` 0.3.1 `asks no size
# <https://github.com/jax-ml/jax-triton/pull/390>`_: there a kernel that makes a
# tensor descriptor faults.
#
# Flash attention
# ---------------
#
# Written in JAX, ``softcap`` would be fused with its neighbours; as a kernel it
# only adds traffic. Attention, :math:`\text{softmax}(Q K^T / \sqrt{H})\, V`, is
# worth a kernel: between its products lies a matrix of ``T * T`` weights for
# each head. *Flash attention* never stores it. A program owns ``BLOCK_M``
# queries and walks along the keys by ``BLOCK_N``. It keeps the maximum and the
# total of each row; where the maximum grows, it shrinks what it has summed.
# Tiles of keys and values wait in shared memory; where there is little of it,
# ``block_n`` takes small ones.
# Arrays are ``(B, T, N, H)`` as in ``jax.nn.dot_product_attention``: batch,
# sequence, heads, head size. ``scale`` contains :math:`\log_2 e` for ``exp2``.


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    T,
    scale,
    out_ptr,
    N: tl.constexpr,
    H: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The longest rows first, so that what is left at the end is short.
    pid_m = tl.num_programs(axis=0) - 1 - tl.program_id(axis=0)
    pid_bn = tl.program_id(axis=1).to(tl.int64)
    row: tl.constexpr = N * H  # from one position to the next
    # In int64: batches, positions and heads multiply to more than 2**31.
    head = (pid_bn // N * T * N + pid_bn % N) * H
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_h = tl.arange(0, H)  # (H,)
    every = tl.full((BLOCK_N,), 1, dtype=tl.int1)  # (BLOCK_N,)
    q_offs = head + offs_m.to(tl.int64)[:, None] * row + offs_h[None, :]
    mask_m = (offs_m < T)[:, None]
    q = tl.load(q_ptr + q_offs, mask=mask_m, other=0)  # (BLOCK_M, H)
    # Keys lie across, so that tl.dot(q, k) is the product with the transpose.
    k_ptrs = k_ptr + head + offs_n[None, :] * row + offs_h[:, None]
    v_ptrs = v_ptr + head + offs_n[:, None] * row + offs_h[None, :]
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)  # (BLOCK_M,)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)  # (BLOCK_M,)
    acc = tl.zeros((BLOCK_M, H), dtype=tl.float32)  # (BLOCK_M, H)
    # Past `end` no query of this tile sees a key; up to `full` all see all.
    end = tl.minimum(T, (pid_m + 1) * BLOCK_M) if CAUSAL else T
    full = tl.minimum(T, pid_m * BLOCK_M) if CAUSAL else T
    full = full // BLOCK_N * BLOCK_N
    # Two loops from one text: full tiles, then those that need a mask.
    for MASKED in tl.static_range(2):
        first, last = (full, end) if MASKED else (0, full)
        for start in range(first, last, BLOCK_N):
            step = tl.cast(start, tl.int64) * row
            keep = start + offs_n < T if MASKED else every
            k = tl.load(k_ptrs + step, mask=keep[None, :], other=0)
            v = tl.load(v_ptrs + step, mask=keep[:, None], other=0)
            s = tl.dot(q, k)  # (BLOCK_M, BLOCK_N)
            if MASKED:
                below = start + offs_n[None, :] <= offs_m[:, None]
                seen = keep[None, :] & (below | (not CAUSAL))
                # A score of -inf becomes a weight of 0.
                s = tl.where(seen, s, float("-inf"))
            above = tl.maximum(top, tl.max(s, axis=1) * scale)
            p = tl.exp2(s * scale - above[:, None])  # (BLOCK_M, BLOCK_N)
            # What was summed so far is relative to the old maximum.
            shrink = tl.exp2(top - above)  # (BLOCK_M,)
            total = total * shrink + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
            top = above
    tl.store(out_ptr + q_offs, acc / total[:, None], mask=mask_m)


def block_n(H):
    """Return how many keys a tile has: 128 of 128 take 160 KiB at least."""
    if not torch.cuda.is_available():
        return 64
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return max(64, H) if shared > 2**17 else 64


def attend(query, key, value, is_causal):
    B, T, N, H = query.shape
    scale = float(np.log2(np.e) / H**0.5)
    return triton_call(
        *(query, key, value, T, scale),
        kernel=attention_kernel,
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(triton.cdiv(T, 128), B * N),
        **{"N": N, "H": H, "BLOCK_M": 128, "BLOCK_N": block_n(H)},
        CAUSAL=is_causal,
        num_warps=8,
    )


# %%
# ``grad`` and ``vmap``
# ---------------------
#
# Neither works by itself, for JAX cannot look into the call. ``custom_vmap``
# takes a rule for a whole batch. Where there is a batch dimension already, it
# can fold the new one into that: still one launch, with a larger grid. (JAX's
# ``sequential_vmap`` needs no rule, and makes a loop of launches.)
# ``custom_vjp`` takes a forward, which also says what to keep, and a backward.
# It is the outer one, as ``custom_vmap`` has no reverse mode. Our backward is
# that of JAX's own attention: it computes the forward again, with the matrix.


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


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot_product_attention(query, key, value, is_causal=False):
    """Return softmax(query @ key.T / sqrt(H)) @ value for (B, T, N, H)."""
    kinds = {(x.shape, x.dtype.name) for x in (query, key, value)}
    if query.dtype not in (jnp.float16, jnp.bfloat16) or len(kinds) > 1:
        raise TypeError(f"takes one shape, float16 or bfloat16, not {kinds}")
    if query.ndim != 4 or query.shape[3] not in (32, 64, 128):
        raise ValueError(f"takes (B, T, N, 32, 64 or 128), not {query.shape}")
    if query.size == 0:
        return query
    return fold(partial(attend, is_causal=is_causal))(query, key, value)


def forward(query, key, value, is_causal):
    inputs = query, key, value
    return dot_product_attention(*inputs, is_causal), inputs


def backward(is_causal, inputs, grad):
    by_xla = partial(jax.nn.dot_product_attention, is_causal=is_causal)
    return jax.vjp(by_xla, *inputs)[1](grad)


dot_product_attention.defvjp(forward, backward)

# %%
# The check
# ---------
#
# First Triton launches both kernels, without JAX. Then attention runs in JAX
# with gradients and ``vmap``; so does JAX's own. In ``softcap``, ``decay`` is
# at most 1, and ``cap`` enlarges its few roundings: ``cap * 2**-21`` covers
# them. Attention is a mean of values. Its weights are rounded for the second
# product, then it is rounded: twice half an ``eps`` of the largest. We ask the
# same of the gradients.


def sdpa(query, key, value, is_causal):
    q, k, v = (x.transpose(-3, -2) for x in (query, key, value))
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q, k, v, is_causal=is_causal).transpose(-3, -2)


torch.manual_seed(0)
x = 40 * torch.randn(3333, device=DEVICE)
out, expected = torch.empty_like(x), 30 * torch.tanh(x.double() / 30)
softcap_kernel[(4,)](x, 30.0, 3333, out, BLOCK=1024)
torch.testing.assert_close(out.double(), expected, rtol=0, atol=30 * 2**-21)

qkv = torch.randn(3, 1, 150, 2, 128, device=DEVICE).half()
out, expected = torch.empty_like(qkv[0]), sdpa(*qkv.double(), is_causal=False)
scale = float(np.log2(np.e) / 128**0.5)
sizes = 2, 128, False, 128, block_n(128)
attention_kernel[(2, 2)](*qkv, 150, scale, out, *sizes, num_warps=8)
atol = 2**-10 * qkv[2].abs().max().item()
torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)

if __name__ == "__main__":
    shape = 2, 1, 150, 2, 64
    keys = jax.random.split(jax.random.key(1), 4)
    *qkv, grad = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys)
    inputs = [torch.from_dlpack(x).double().requires_grad_() for x in qkv]
    out = sdpa(*inputs, is_causal=True)
    out.backward(torch.from_dlpack(grad).double())
    expected = [out, *(x.grad for x in inputs)]
    for op in (dot_product_attention, jax.nn.dot_product_attention):
        function = jax.jit(jax.vmap(partial(op, is_causal=True)))
        out, pullback = jax.vjp(function, *qkv)
        for x, y in zip((out, *pullback(grad)), expected, strict=True):
            x, atol = torch.from_dlpack(x), 2**-7 * y.abs().max().item()
            torch.testing.assert_close(x.double(), y, rtol=0, atol=atol)
    print("output and gradients, ours and JAX's: within an eps of the largest")

# %%
# The benchmark
# -------------
#
# Causal attention on 16384 positions in sequences of ``T``, 16 heads of 128,
# bfloat16. Only what lies below the diagonal counts as work:
# ``2 * T * T * H`` operations for a head.
# ``XLA`` and ``cuDNN`` are JAX's own; the ``Roof`` is a matrix product, 8192³.
# Each call gets the result of the one before, five make a program, and a wall
# clock runs until all is done. ``do_bench``, in the last line, is no clock for
# JAX: its events lie in PyTorch's stream.

SIZES = [2**k for k in range(9, 15)]
NAMES = ["Triton", "PyTorch", "XLA", "cuDNN", "Roof"]
AXES = {"x_names": ["T"], "x_vals": SIZES, "x_log": True, "ylabel": "TFLOP/s"}
LINES = {"line_arg": "provider", "line_vals": NAMES, "line_names": NAMES}


def five(op, x, *others):
    for _ in range(5):
        x = op(x, *others)
    return x


def seconds(call, programs, x, *others):
    start = time.perf_counter()
    for _ in range(programs):
        x = call(x, *others)
    jax.block_until_ready(x)
    torch.accelerator.synchronize()
    return (time.perf_counter() - start) / programs / 5


@triton.testing.perf_report(
    triton.testing.Benchmark(**AXES, **LINES, plot_name="jax_call", args={})
)
def benchmark(T, provider):
    by_jax = partial(jax.nn.dot_product_attention, is_causal=True)
    op = {
        "Triton": partial(dot_product_attention, is_causal=True),
        "PyTorch": partial(sdpa, is_causal=True),
        "Roof": lambda x, y, _: x @ y,
    }.get(provider, partial(by_jax, implementation=provider.lower()))
    shape, scale = (2**14 // T, T, 16, 128), 1
    work = 2 * 2**14 * T * 16 * 128
    if provider == "Roof":  # with a scale that keeps the product as large as x
        shape, scale, work = (8192, 8192), 1 / 90, 2 * 8192**3
    elif provider == "XLA" and torch.cuda.mem_get_info()[1] < 2**22 * T:
        return float("nan")  # its matrix would take half of the memory
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [scale * jax.random.normal(k, shape, jnp.bfloat16) for k in keys]
    call = jax.jit(partial(five, op))
    if provider == "PyTorch":
        inputs, call = [*map(torch.from_dlpack, inputs)], partial(five, op)
    seconds(call, 2, *inputs)  # compiles
    times = [seconds(call, 1 + 2**14 // T, *inputs) for _ in range(9)]
    return np.quantile(work * 1e-12 / np.array(times), [0.5, 0.2, 0.8])


if __name__ == "__main__" and DEVICE.type == "cuda":
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)
    x = jnp.ones((4, 4096, 16, 128), jnp.bfloat16)
    call = jax.jit(partial(dot_product_attention, is_causal=True))
    wrong = triton.testing.do_bench(lambda: call(x, x, x), quantiles=[0.5])
    rate = 4 * 2 * 4096**2 * 16 * 128 * 1e-9 / wrong
    print(f"do_bench at T = 4096: {rate:,.0f} TFLOP/s")

# %%
# Reading the result
# ------------------
#
# On the H200 ``cuDNN`` and ``PyTorch`` are ahead of our kernel: for plain
# attention take ``implementation="cudnn"``, for a variant of it the kernel.
# ``XLA`` writes the matrix to memory and reads it back; ours keeps it in
# registers. In short sequences a larger part of the tiles lies on the diagonal;
# half of such a tile is computed and not counted.
#
# Pallas or Triton
# ----------------
#
# `Pallas <https://docs.jax.dev/en/latest/pallas/>`_ is JAX's own language for
# kernels. It runs on TPUs too, and has ``vmap`` and an interpreter by itself.
# On GPUs it needs `Hopper or newer
# <https://docs.jax.dev/en/latest/pallas/quickstart.html>`_, and you `pipeline
# <https://docs.jax.dev/en/latest/pallas/gpu/pipelining.html>`_ by hand what
# Triton would. Its backend for older ones, through Triton, `is deprecated
# <https://docs.jax.dev/en/latest/pallas/CHANGELOG.html>`_ since JAX 0.11.
#
# So take Pallas for a TPU, for full control of a Hopper or Blackwell GPU, or if
# the kernel lives in JAX alone. Take ``triton_call`` if the kernel exists, if
# PyTorch needs it too, or for an older GPU. Pin its version: ``jax_triton`` is
# no official product of Google's, says its README.
#
# Go further
# ----------
#
# 1. What must the forward keep for a backward that never stores the matrix?
# 2. ``triton_call`` takes autotuned kernels. When are they tuned?
#
# Next: ``pytorch_xla.py``; `JAX-Triton <https://jax-ml.github.io/jax-triton>`_.

# %%
# Answers
# -------
#
# **1.** The logarithm of each row's sum of exponentials: with it, any tile of
# the weights can be computed again.
#
# **2.** When the program first runs: the payload has all configs, compiled.
