# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas",
#   "jax[cuda13]>=0.10.2,<0.12"]
#
# [tool.triton-gallery]
# description = """
# Make PyTorch/XLA's documented call of a Triton kernel work again: torch_xla
# traces the graph, and JAX's XLA executes it."""
# tool = true
# ///
r"""
Triton in a PyTorch/XLA program
===============================

PyTorch/XLA turns a PyTorch program into a graph that XLA compiles. Its `page
on Triton <https://docs.pytorch.org/xla/release/r2.8/features/triton.html>`_
makes a kernel a node of that graph, a *custom call*. Today that page ends in an
error. Here it works in two steps: torch_xla **traces** the graph, without a
GPU, and the XLA inside of JAX **executes** the graph on a GPU. For new work
take ``jax_call.py`` instead.

After this page you can

* tell which release of torch_xla has what, and what to install beside it;
* put Triton kernels into a torch_xla graph, with int64 operands too;
* execute the graph with JAX, and avoid a call that computes nonsense.
"""

# sphinx_gallery_tags = ["jax", "attention", "compiler"]
import base64
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import zipfile
from pathlib import Path

import pandas as pd
import torch

TRACING = importlib.util.find_spec("torch_xla") is not None
if TRACING:  # kernels are compiled, for a GPU that need not be here
    os.environ |= {"PJRT_DEVICE": "CPU", "TRITON_DISABLE_LINE_INFO": "1"}
elif not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# JAX would take most of the GPU's memory, and PyTorch needs some too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
COMPILES = isinstance(tl.sum, triton.JITFunction)
if DEVICE.type == "cpu" and COMPILES and not TRACING:
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

PACKAGES = ["torch_xla", "torch", "triton", "jax", "jaxlib"]


def digest(functions):
    """Return a hash of the text of functions and kernels."""
    texts = [inspect.getsource(getattr(f, "fn", f)) for f in functions]
    return hashlib.sha256(repr([texts, CONSTANTS]).encode()).hexdigest()


def environment():
    here = importlib.metadata.packages_distributions()
    version = importlib.metadata.version
    versions = {name: version(name) for name in PACKAGES if name in here}
    return {"Python": sys.version.split()[0]} | versions


def demands(package):
    """Return what a package demands of the others, without its extras."""
    needs = importlib.metadata.requires(package) or []
    needs = [n.partition(";")[0] for n in needs if "extra ==" not in n]
    return [n for n in needs if re.match(r"[\w-]+", n)[0] in PACKAGES]


def pip(*arguments):
    command = [sys.executable, "-m", "pip", *arguments]
    command += ["--python-version=3.11", "--only-binary=:all:"]
    return subprocess.check_output(command, text=True)


def look(release):
    """Return what lies in the wheel of a release of torch_xla."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"torch_xla=={release}"
        pip("download", name, "--no-deps", f"--dest={folder}")
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        names = wheel.namelist()
        code = wheel.read(next(n for n in names if n.startswith("_XLAC.")))
    says = re.search(rb"XLA:CUDA (?:device )?is (?:dep|not)[ -~]*", code)
    return {
        "triton_call": "torch_xla/experimental/triton.py" in names,
        "_xla_gpu_custom_call": b"_xla_gpu_custom_call" in code,
        "_xla_custom_call": b"_xla_custom_call" in code,
        "GPU client": b"GetStreamExecutorGpuClient" in code,
        "says": says[0].decode().partition(". ")[0] if says else "",
    }


def show(hlo, names=r"[\w-]+"):
    """Print instructions of a graph, without the types of their operands."""
    kind = r"\w+\[[\d,]*\](?:\{[\d,]*\})?"
    for line in hlo.splitlines():
        if re.search(rf" = \S+ {names}\(", line):
            line = re.sub(rf"(?:\({kind}\)|{kind}) (?=%)", "", line.strip())
            line = re.sub(r",? (metadata|backend_config)={.*", "", line)
            lines = textwrap.wrap(line, 76, break_on_hyphens=False)
            print("\n    ".join(lines))


# %%
# Which release has what
# ----------------------
#
# ``triton_call`` makes the *payload* of a custom call, ``_xla_gpu_custom_call``
# puts it into the graph, and XLA's GPU client executes it. The table has what
# lies in the wheel of each release. It was made when the graphs below were
# traced, and is in a file, the *companion*.

COMPANION = Path("pytorch_xla.json")
companion = {}
if __name__ == "__main__" and COMPANION.exists():
    companion = json.loads(COMPANION.read_text())
elif __name__ == "__main__" and not TRACING:
    print(f"No {COMPANION} here: nothing to execute. See the section 'Trace'.")

releases = pd.DataFrame(companion.get("releases", {})).T
releases = releases.replace({True: "yes", False: "-"})
releases

# %%
# The last column is a message in the library itself. 2.4 to 2.8 have all three;
# 2.9 kept only a more general ``_xla_custom_call``. The client also needed a
# CUDA plugin, which `is gone <https://github.com/pytorch/xla/pull/9597>`_ too.
# So torch_xla can write a program down and not execute it on a GPU. JAX can: it
# ships XLA with CUDA, and the code that the custom call names.
#
# What to install
# ---------------
#
# PyTorch/XLA's page says ``pip install --no-deps triton==2.3.0``. Is that
# right? These packages trace here. Their metadata says what each demands of the
# others:

for package, needs in companion.get("demands", {}).items():
    version = companion["environment"][package]
    print(
        f"{package:10}{version:6} demands", ", ".join(needs) or "none of them"
    )

# %%
# * **With dependencies**, ``torch`` 2.8.0 brings the one Triton that it
#   demands. pip refuses ``torch==2.8.0 triton==2.3.0`` in one command.
# * **Without dependencies**, pip installs 2.3.0 unchecked beside a ``torch``
#   that demands another. So leave ``--no-deps`` out for 2.8.
# * ``torch_xla`` demands neither ``torch`` nor ``triton`` nor ``jax``: name all
#   of them. Its ``triton_call`` imports ``jaxlib`` and JAX's CUDA plugin.
#
# In full, with Python 3.11 or 3.12:
#
# .. code-block:: text
#
#     python3.11 -m venv tracing
#     tracing/bin/pip install torch==2.8.0 torch_xla==2.8.1 triton==3.4.0 \
#         jax==0.7.1 jaxlib==0.7.1 jax-cuda12-plugin==0.7.1 pandas==3.1.1
#     tracing/bin/python pytorch_xla.py
#
# The last line traces, as ``torch_xla`` can be imported there; elsewhere the
# script executes. In the repository: ``make trace RECIPE=xla/pytorch_xla``, and
# on a GPU ``make record-apart RECIPE=xla/pytorch_xla``.
#
# Two kernels
# -----------
#
# The addition of ``vector_add.py``, here of int64, and causal flash attention.
# ``jax_call.py`` explains the latter; its operands are ``(batch, heads, length,
# 64)`` here. Neither kernel takes strides: both count on dense operands, row by
# row.


@triton.jit
def add_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    N,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(axis=0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y, mask=mask)


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    T,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # exp(x) is exp2(x * log2(e)), and exp2 is one instruction.
    SCALE: tl.constexpr = 1.4426950408889634 / HEAD**0.5
    first = tl.program_id(axis=0) * BLOCK_M
    base = tl.program_id(axis=1).to(tl.int64) * T * HEAD
    offs_m = first + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_d = tl.arange(0, HEAD)  # (HEAD,)
    q_offs = base + offs_m[:, None] * HEAD + offs_d  # (BLOCK_M, HEAD)
    q = tl.load(q_ptr + q_offs, mask=offs_m[:, None] < T, other=0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD), tl.float32)
    # No row of this block sees a key past the block's last row.
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        kv_offs = base + offs_n[:, None] * HEAD + offs_d  # (BLOCK_N, HEAD)
        k = tl.load(k_ptr + kv_offs, mask=offs_n[:, None] < T, other=0)
        scores = tl.dot(q, tl.trans(k)) * SCALE  # (BLOCK_M, BLOCK_N)
        seen = offs_m[:, None] >= offs_n[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))  # (BLOCK_M,)
        weights = tl.exp2(scores - new_top[:, None])  # (BLOCK_M, BLOCK_N)
        shrink = tl.exp2(top - new_top)  # (BLOCK_M,)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + kv_offs, mask=offs_n[:, None] < T, other=0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    out_ptrs = out_ptr + q_offs  # (BLOCK_M, HEAD)
    tl.store(out_ptrs, acc / total[:, None], mask=offs_m[:, None] < T)


# %%
# Each op hands its kernel to ``call``: a launch here, a node of a graph below.

BLOCK, BLOCK_M, BLOCK_N, HEAD = 1024, 64, 64, 64


def launch(kernel, grid, operands, *scalars, **blocks):
    """Call a kernel that writes one output, shaped as its operands."""
    operands = [x.contiguous() for x in operands]
    out = torch.empty_like(operands[0])
    if out.numel() > 0:
        kernel[grid](*operands, out, *scalars, **blocks)
    return out


def add(x, y, call=launch):
    """Return ``x + y`` for two tensors of one dtype and shape."""
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        raise ValueError("add takes two tensors of one dtype and shape")
    N = x.numel()
    return call(add_kernel, (triton.cdiv(N, BLOCK),), [x, y], N, BLOCK=BLOCK)


def attention(q, k, v, call=launch):
    """Return causal attention of float16 (batch, heads, length, 64)."""
    dtypes, shapes = {q.dtype, k.dtype, v.dtype}, {q.shape, k.shape, v.shape}
    if dtypes != {torch.float16} or len(shapes) > 1 or q.shape[3:] != (HEAD,):
        raise ValueError(f"attention takes three float16 (B, H, T, {HEAD})")
    B, H, T, _ = q.shape
    grid = (triton.cdiv(T, BLOCK_M), B * H)
    blocks = {"HEAD": HEAD, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    return call(attention_kernel, grid, [q, k, v], T, **blocks)


# %%
# Is it right?
# ------------
#
# First, the kernels alone. A sum of int64 is exact. Attention rounds to
# float16 twice, the weights and the result, each by :math:`2^{-11}` of a value
# at most; twice that leaves room for float32 sums.


def causal(q, k, v):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=True)


if __name__ == "__main__" and (DEVICE.type == "cuda" or not COMPILES):
    torch.manual_seed(0)
    x = torch.arange(5003, device=DEVICE) + 2**40
    torch.testing.assert_close(add(x, x), 2 * x, rtol=0, atol=0)
    q, k, v = torch.randn(3, 1, 2, 150, HEAD, device=DEVICE).half()
    expected = causal(q.double(), k.double(), v.double())
    out, atol = attention(q, k, v).double(), 2**-10 * v.abs().max().item()
    torch.testing.assert_close(out, expected, rtol=2**-10, atol=atol)

# %%
# Two programs
# ------------
#
# Both have ordinary operators around the kernel. The op is an argument, so that
# one function serves for the trace, for PyTorch and for float64.


def counts(x, y, add):
    return add(x - y, y) + y


def layer(x, w_qkv, w_out, attention):
    B, T, D = x.shape
    qkv = (x @ w_qkv).view(B, T, 3, D // HEAD, HEAD)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    out = attention(q, k, v).transpose(1, 2).reshape(B, T, D)
    return x + out @ w_out


# %%
# Trace
# -----
#
# ``triton_call`` of torch_xla 2.8.1 compiles a kernel and packs what a GPU will
# need: PTX, warps, shared memory, grid, arguments. Two parts ask for a GPU.
# Triton asks the driver for the *target* (as in ``what_a_launch_compiles.py``),
# and torch_xla asks JAX for the compute capability. Both are answered here, for
# an H100 or H200: a compiler does not need the hardware that it compiles for.

CAPABILITY = (9, 0)


def without_gpu():
    """Return torch_xla's module for Triton, made to work without a GPU."""
    arch = 10 * CAPABILITY[0] + CAPABILITY[1]
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    driver = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    module = importlib.import_module("torch_xla.experimental.triton")
    library, pack = module.lib_triton, module.lib_triton.TritonKernel
    library.get_compute_capability = lambda device: arch
    # The fifth is a listing in Triton's IR; it would have this machine's paths.
    library.TritonKernel = lambda *args: pack(*args[:4], "", *args[5:])
    return module


if TRACING:
    torch_xla, xla_triton = importlib.import_module("torch_xla"), without_gpu()

# %%
# ``triton_call`` takes what a launch takes. The custom call names operands, the
# payload, and shapes and dtypes of results. With ``general`` it is made by the
# function that 2.9 has kept; the 2 says which of XLA's interfaces to call.


def traced(kernel, grid, operands, *scalars, general=False, **blocks):
    """Put a kernel into the graph."""
    arguments = *operands, torch.empty_like(operands[0]), *scalars
    options = blocks | {"kernel": kernel, "grid": grid}
    payload = xla_triton.triton_call(*arguments, **options)
    result = [list(operands[0].shape)], [operands[0].dtype]
    library = torch_xla._XLAC
    if general:
        call = operands, "triton_kernel_call", *result, False, payload, 2, {}
        return library._xla_custom_call(*call)[0]
    return library._xla_gpu_custom_call(operands, payload, *result)[0]


# %%
# An operator on tensors of the device ``xla`` computes nothing, it adds a node.
# ``trace`` takes the graph behind a result as HLO, XLA's own language, to read,
# and as StableHLO, its exchange format, which `later versions
# <https://openxla.org/stablehlo/compatibility>`_ of XLA take too. Shapes are
# part of a graph. A change to a function in ``TRACED`` makes the companion
# stale.

B, T, D = 2, 777, 1024


def programs():
    """Return what to trace: a program, its op, shapes and dtype of inputs."""
    vectors, matrices = [(1_000_003,)] * 2, [(B, T, D), (D, 3 * D), (D, D)]
    sums = counts, add, vectors, torch.int64
    layers = layer, attention, matrices, torch.float16
    general = {"counts, general": sums, "layer, general": layers}
    return {"counts": sums, "layer": layers} | general


def trace(name):
    program, op, shapes, dtype = programs()[name]
    call = functools.partial(traced, general=name.endswith("general"))
    inputs = [torch.zeros(shape, dtype=dtype).to("xla") for shape in shapes]
    out = program(*inputs, functools.partial(op, call=call))
    library = torch_xla._XLAC
    ids = [library._xla_get_tensor_id(x) for x in inputs]
    parameters, _ = library._get_tensors_xla_device_data_node([out])
    hlo = library._get_xla_tensors_hlo([out])
    code = torch_xla.core.xla_model.get_stablehlo_bytecode([out])
    packed = r'backend_config="(?:[^"\\]|\\.)*"'
    return {
        "order": [ids.index(parameter) for parameter in parameters],
        "hlo": re.sub(packed, "backend_config=PAYLOAD", hlo),
        "code": base64.b64encode(code).decode(),
    }


CONSTANTS = BLOCK, BLOCK_M, BLOCK_N, HEAD, CAPABILITY, B, T, D
TRACED = [add_kernel, attention_kernel, add, attention, counts, layer]
TRACED += [without_gpu, traced, programs, trace]
if __name__ == "__main__" and TRACING:
    listed = re.search("versions: (.*)", pip("index", "versions", "torch_xla"))
    same = companion.get("look") == digest([look])
    known = companion["releases"] if same else {}  # a wheel never changes
    companion = {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "demands": {package: demands(package) for package in PACKAGES},
        "look": digest([look]),
        "releases": {r: known.get(r) or look(r) for r in listed[1].split(", ")},
        "traced": digest(TRACED),
        "graphs": {name: trace(name) for name in programs()},
    }
    COMPANION.write_text(json.dumps(companion, indent=1) + "\n")
    print(f"{len(companion['graphs'])} graphs traced into {COMPANION}")
    sys.exit()

if companion and companion["traced"] != digest(TRACED):
    raise RuntimeError(f"{COMPANION} is not of this recipe: trace again")

# %%
# The graph
# ---------
#
# A line is an instruction: its name, ``=``, the shape of its result, what it
# does. ``s64`` is int64: torch_xla keeps 64 bits, and the kernel's PTX loads
# them. Braces hold the order of the dimensions in memory, fastest first. The
# transposes in the layer rename dimensions and leave the memory as it is. But
# the kernel counts on rows, and ``operand_layout_constraints`` asks XLA for
# them.


GRAPHS = companion.get("graphs", {})
if GRAPHS:
    show(GRAPHS["counts"]["hlo"], "(?:subtract|custom-call|add)")
    print()
    show(GRAPHS["layer"]["hlo"], "(?:dot|transpose|custom-call|add)")

# %%
# Execute
# -------
#
# JAX's client takes StableHLO as it is, and PyTorch's tensors by DLPack (see
# ``jax_call.py``). Its client for the CPU has no code for the custom call, and
# says so:


def executable(graph, platform=None):
    """Return a function that runs a graph on arrays of JAX."""
    from jax.extend import backend

    client = backend.get_backend(platform)
    one = backend.get_compile_options(num_replicas=1, num_partitions=1)
    code, devices = base64.b64decode(graph["code"]), client.local_devices()[:1]
    compiled = client.compile_and_load(code, devices, one)

    def call(*arrays):
        return compiled.execute([arrays[i] for i in graph["order"]])[0]

    call.hlo = compiled.hlo_modules()[0].to_string().partition("ENTRY")[2]
    return call


if GRAPHS:
    try:
        executable(GRAPHS["counts"], "cpu")
    except RuntimeError as error:
        print(error)

# %%
# The graph needs a GPU of the ``CAPABILITY`` that it was traced for. The
# reference is the program in float64; a graph may have up to twice the error of
# PyTorch. int64 must be exact, and needs ``enable_x64``: without it, JAX would
# truncate the operands to int32.

EXECUTES = bool(GRAPHS) and DEVICE.type == "cuda"
EXECUTES = EXECUTES and torch.cuda.get_device_capability() == CAPABILITY


def inputs(shapes, dtype):
    """Return random tensors; a matrix keeps the variance of what it takes."""
    if dtype == torch.int64:
        return [torch.randint(2**40, shape, device=DEVICE) for shape in shapes]
    random = [torch.randn(shape, device=DEVICE) for shape in shapes]
    scale = [x.shape[0] ** -0.5 if x.ndim == 2 else 1 for x in random]
    return [(x * s).to(dtype) for x, s in zip(random, scale, strict=True)]


def compare(name):
    """Return the largest errors of a graph and of PyTorch."""
    import jax

    program, op, *what = programs()[name]
    x, theirs = inputs(*what), torch.add if op is add else causal
    expected = program(*(tensor.double() for tensor in x), theirs)
    with jax.enable_x64(True):
        out = run[name](*map(jax.numpy.from_dlpack, x))
    both = torch.from_dlpack(out), program(*x, theirs)
    return [(out - expected).abs().max().item() for out in both]


if EXECUTES:
    made = {"traced": companion["environment"], "executed": environment()}
    print(pd.DataFrame(made).fillna("-").to_string())
    print("\nlargest error:       graph    PyTorch")
    run = {name: executable(graph) for name, graph in GRAPHS.items()}
    for name in run:
        error, torchs = compare(name)
        print(f"{name:20}{error:8.1e}{torchs:10.1e}")
        assert (error <= 2 * torchs) == (name != "layer, general")

# %%
# Break it: the layout
# --------------------
#
# ``general`` rows repeat a program with the call that 2.9 has kept. Vectors
# come out right, the layer far off. This is what XLA made of the layer:

if EXECUTES:
    show(run["layer, general"].hlo, "(?:bitcast|custom-call)")

# %%
# This call demands no layout. So XLA left the operands in the layout of the
# product's slices, ``{3,1,2,0}``, and the kernel took them for ``{3,2,1,0}``.
# Sizes and dtypes are right, and nothing complains. Use this call for vectors:
# they have one layout.
#
# Take care with a number, too. Triton compiles a Python float as float32, and
# ``triton_call`` packs a float64, of which the kernel reads the first four
# bytes. Make it a ``tl.constexpr``, or pass a tensor of one element.
#
# New work is for JAX, or for ``torch.compile``, which takes Triton kernels as
# they are.
#
# Exercises
# ---------
#
# **1.** A graph has one length. Let the graph of length ``T`` serve shorter
# sequences: return the attention of operands with fewer than ``T`` rows.
# ``fixed`` is a function that takes length ``T`` alone.


def serve(q, k, v, fixed, T):
    pass  # your function


def check_serve(function):
    def fixed(*operands):
        assert all(x.shape[2] == 150 for x in operands), "not of length 150"
        return attention(*operands)

    q, k, v = torch.randn(3, 1, 2, 99, HEAD, device=DEVICE).half()
    out = function(q, k, v, fixed, 150)
    if out is None or out.shape != q.shape:
        return "not solved yet"
    right = torch.allclose(out, attention(q, k, v), rtol=0, atol=2**-10)
    return "right" if right else "wrong"


if __name__ == "__main__" and not TRACING:
    print("serve:", check_serve(serve))

# %%
# **2.** Which number does a kernel get if the program says 1.5, and which if it
# says 0.1? Return what it reads of a float64.


def kernel_reads(number):
    pass  # your function


def check_kernel_reads(function):
    found = [function(number) for number in (1.5, 0.1)]
    if found[0] is None:
        return "not solved yet"
    return (
        "right" if found == [0, float.fromhex("-0x1.333334p-76")] else "wrong"
    )


if __name__ == "__main__":
    print("kernel_reads:", check_kernel_reads(kernel_reads))

# %%
# Answers
# -------
#
# **1.** Pad at the end: no query sees a later key, so the padding changes
# nothing before it.


def serve_answer(q, k, v, fixed, T):
    length = q.shape[2]
    pad = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, T - length))
    return fixed(*map(pad, (q, k, v)))[:, :, :length]


if __name__ == "__main__" and not TRACING:
    assert check_serve(serve_answer) == "right"

# %%
# **2.** Memory holds the last bits of a float64 first. Those of 1.5 are zeros,
# and those of 0.1 make a number that is tiny and negative.


def kernel_reads_answer(number):
    float64 = torch.tensor(number, dtype=torch.float64)
    return float64.view(torch.int64).view(1).view(torch.float32)[0].item()


if __name__ == "__main__":
    assert check_kernel_reads(kernel_reads_answer) == "right"
    print([kernel_reads_answer(number) for number in (1.5, 0.1)])
