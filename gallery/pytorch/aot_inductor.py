# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Compile a whole module ahead of time, its Triton kernel with it, into one
# file that a server loads and calls."""
# ///
r"""
Ahead of time: AOTInductor
==========================

A Triton kernel is compiled, or fetched from a cache, by the process that first
calls it, and that process needs your source, Triton and some time. AOTInductor
compiles a whole module beforehand, the kernel with it, into one file: the
*package*. A server loads it and calls it. ``which_api.py`` compared the ways to
register a kernel; here the choice decides whether the kernel gets into the
package.

After this page you can

* export a module with a kernel, compile it to a package and look inside;
* run it where neither your code nor Triton can be imported;
* have it refuse inputs that it would otherwise misread;
* say what it saves when a process starts, and what it is bound to.
"""

# sphinx_gallery_tags = ["torch.compile", "deployment", "memory bound"]
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

# %%
# The module, in bytes
# --------------------
#
# An embedding model can end like this: subtract the mean of all embeddings,
# then scale each row to length 1. In PyTorch that is ``normalize(x - mean,
# dim=-1)``. For each float32 element the subtraction reads and writes 8 bytes,
# the lengths read 4, the division moves 8 again: 20 bytes. Any kernel has to
# read and write each element once: 8 bytes, the *floor*. Ours normalizes a row
# in one go; the subtraction is left to Inductor, PyTorch's compiler, so that
# the package has a kernel of each kind.
#
# The kernel and its op
# ---------------------
#
# ``triton_op`` (see ``triton_op.py``) lets Inductor see the kernel in the op.

import math

from torch.nn import functional


@triton.jit
def normalize_kernel(
    x_ptr,
    out_ptr,
    N,
    eps,
    BLOCK_N: tl.constexpr,
):
    # In int32, row times N would overflow past element 2**31.
    row = tl.program_id(axis=0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    mask = offs_n < N
    x = tl.load(x_ptr + row * N + offs_n, mask=mask, other=0)  # (BLOCK_N,)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, axis=0))
    # Not tl.maximum, which may turn NaN into eps.
    length = tl.where(length < eps, eps, length)
    tl.store(out_ptr + row * N + offs_n, x / length, mask=mask)


def normalize_rows(x: torch.Tensor, eps: float = 1e-12) -> torch.Tensor:
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    if x.dtype not in floats or x.ndim == 0 or x.shape[-1] > 2**14:
        raise ValueError(
            "normalize takes rows of up to 2**14 floating-point numbers, "
            f"not {x.dtype} and the shape {tuple(x.shape)}"
        )
    x = x.contiguous()
    out, N = torch.empty_like(x), x.shape[-1]
    grid = (math.prod(x.shape[:-1]),)
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        torch.library.wrap_triton(normalize_kernel)[grid](
            *(x, out, N, eps), BLOCK_N=triton.next_power_of_2(max(N, 1))
        )
    return out


normalize = torch.library.triton_op(
    "triton_gallery::normalize", normalize_rows, mutates_args={}
)


class Head(torch.nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x):
        return normalize(x - self.mean)


# %%
# The check
# ---------
#
# Squares are never negative, so nothing cancels. Their sum is off by about a
# dozen roundings, and the root halves that error. :math:`10^{-6}` is twice it.

torch.manual_seed(0)
for shape in ((31, 257), (4, 8, 1024), (0, 257)):
    x = torch.randn(shape, device=DEVICE)
    expected = functional.normalize(x.double(), dim=-1)
    out = normalize(x).double()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)

# %%
# Other processes
# ---------------
#
# The process that compiles is not the one that serves. ``elsewhere`` calls a
# function of this page in a new process, with caches of its own. ``-I`` lets
# Python import nothing but what is installed; with ``model=True`` it also finds
# ``model.py``, which has the kernel, the op and ``Head``.

import contextlib
import ctypes
import gc
import inspect
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

TOP = """
import contextlib, ctypes, json, math, os, sys, time, torch
from torch.nn import functional
ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)  # explained further down
"""
MODEL = """
import triton, triton.language as tl
{}{}
normalize = torch.library.triton_op(
    "triton_gallery::normalize", normalize_rows, mutates_args={{}})
class Head(torch.nn.Module):
{}{}
"""


def source(function):
    return inspect.getsource(getattr(function, "fn", function))


def write_model(folder):
    parts = normalize_kernel, normalize_rows, Head.__init__, Head.forward
    (folder / "model").mkdir()
    text = TOP + MODEL.format(*map(source, parts))
    (folder / "model" / "model.py").write_text(text)


def elsewhere(folder, function, *arguments, model=False, cache="cache", **env):
    """Return what a function returns, and what it writes to stderr."""
    # Without garbage collection imports and the end take half as long.
    text = f"import gc; gc.disable(){TOP}"
    text += f"sys.path += {[str(folder / 'model')] * model}\n"
    text += source(function)
    text += f"print(json.dumps({function.__name__}(*{arguments!r})))\n"
    text += "gc.freeze()"
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder / cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / cache / "inductor"),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # explained further down
    }
    command, env = [sys.executable, "-I", "-c", text], settings | env
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


# %%
# Export and compile
# ------------------
#
# ``torch.export`` records what ``Head`` does with an example, as a graph
# without Python. ``dynamic_shapes`` says what may change: the size of a batch,
# from 1 to ``2**15``. Inductor makes C++ and kernels of the graph, compiles
# them, and packs the results. Take an example of the size that is usual in
# production: Inductor plans its own kernels for it. (``opaque`` is for later.)

CALLS = r"\w+ = (?:aten|triton)[^;\n]*"


def build(path, device, opaque=False):
    model = __import__("model")  # there, not here
    if opaque:
        name, rows = "triton_gallery::normalize_opaque", model.normalize_rows
        model.normalize = torch.library.custom_op(name, rows, mutates_args={})
        model.normalize.register_fake(lambda x, eps=0: torch.empty_like(x))
    head = model.Head(torch.arange(1024, device=device) / 1024)
    x = torch.rand(2**13, 1024, device=device)
    batch = torch.export.Dim("batch", min=1, max=2**15)
    program = torch.export.export(head, (x,), dynamic_shapes={"x": {0: batch}})
    exported, refusal = program.graph_module.code, None
    if device == "cpu" and not opaque:
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=path)
        except RuntimeError as error:
            refusal = f"{type(error).__name__}: {error}".splitlines()[0]
        op = torch.ops.triton_gallery.normalize.default
        plain = {op: lambda x: functional.normalize(x, dim=-1)}
        program = program.run_decompositions(plain)
    options = {"aot_inductor.model_name_for_generated_files": "head"}
    options["aot_inductor.precompile_headers"] = False  # pays from the 2nd on
    if device == "cpu":  # nothing is timed there
        options["aot_inductor.compile_wrapper_opt_level"] = "O0"
    torch._inductor.aoti_compile_and_package(
        program, package_path=path, inductor_configs=options
    )
    codes = exported, program.graph_module.code
    return [code.replace("torch.ops.", "") for code in codes], refusal


if __name__ == "__main__":
    temporary = tempfile.TemporaryDirectory()
    write_model(FOLDER := Path(temporary.name))
    PACKAGE, OPAQUE = str(FOLDER / "head.pt2"), str(FOLDER / "opaque.pt2")
    with ThreadPoolExecutor() as pool:
        to = elsewhere, FOLDER, build
        job = pool.submit(*to, PACKAGE, DEVICE.type, model=True)
        if DEVICE.type == "cuda":
            pool.submit(*to, OPAQUE, DEVICE.type, True, model=True).result()
    ((exported, compiled), refusal), _ = job.result()
    print(*re.findall(CALLS, exported), sep="\n")
    assert "triton_gallery.normalize.default" in exported

# %%
# The op is one node of the exported graph, not looked into yet. Compiling opens
# it, and compiles the kernel for the GPU at hand. Without a GPU Inductor gives
# up; only there the next cell prints how. ``run_decompositions`` then puts
# PyTorch's own functions in the op's place, for a package for CPUs.

if __name__ == "__main__" and DEVICE.type == "cpu":
    print(refusal, *re.findall(CALLS, compiled), sep="\n")
    assert re.search("active drivers|triton not built", refusal)

# %%
# What is in the package
# ----------------------
#
# It is a zip file. Built on a GPU it has a ``.cubin`` for each kernel, machine
# code: ours, and Inductor's for the subtraction. The C++ around them is there
# as source and as ``.so``, with the numbers of ``mean``. (``*`` is a hash.)


def unzip(path):
    with zipfile.ZipFile(path) as package:
        paths = package.namelist()
        return {path.split("/")[-1]: package.read(path) for path in paths}


def kernels(files):
    code = (files[name].decode("latin") for name in files if "cubin" in name)
    return [re.search(r"\.text\.(\w+)", text)[1] for text in code]


if __name__ == "__main__":
    for name, data in (files := unzip(PACKAGE)).items():
        print(f"{len(data):8}  {re.sub(r'^c.{51}', '*', name)}")
    print("kernels:", ", ".join(kernels(files)) or "none")
    assert ("normalize_kernel" in kernels(files)) == (DEVICE.type == "cuda")

# %%
# ``head.wrapper.cpp`` does what Python did: it allocates, computes the grid,
# launches. Below are its calls; ``s`` with a number is the size of the batch.
# ``size_hints`` is how many elements Inductor's kernel was planned for.

if __name__ == "__main__":
    wrapper = files["head.wrapper.cpp"].decode()
    calls = re.findall(r"^ +((?:call|cpp)_\w+)(\(.*\);)", wrapper, re.M)
    for kernel, arguments in calls:
        print(kernel, arguments[:74], sep="\n    ")
    print(*re.findall(r"size_hints=\{.*?\}", wrapper))

# %%
# A process without your code
# ---------------------------
#
# This function serves. There is no ``model``, and Triton is barred: the loader
# would import it but does not need it. The batches' sizes are new to it. (What
# it does with ``odd`` inputs is for later.)


def serve(path, device):
    sys.modules["triton"] = None  # an import of Triton fails from here on
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "0"
    head = torch._inductor.aoti_load_package(path)
    mean = torch.arange(1024, device=device) / 1024

    def right(x):
        out, x = head(x)[-1000:].double(), x[-1000:, :1024].double()
        expected = functional.normalize(x - mean.double(), dim=-1)
        # atol: where x is near the mean, the rounding of x - mean shows.
        return torch.allclose(out, expected, rtol=1e-6, atol=1e-7)

    for batch in (1, 8, 1000):
        assert right(torch.rand(batch, 1024, device=device))
    odd = {
        "a batch of 1": torch.rand(1, 1024),
        "a batch of 2**15 + 1": torch.rand(2**15 + 1, 1024),
        "float64": torch.rand(8, 1024, dtype=torch.float64),
        "the transpose of (1024, 8)": torch.rand(1024, 8).T,
        "rows of 2048": torch.rand(8, 2048),
    }
    accepted = {name: right(x.to(device)) for name, x in odd.items()}
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    head = torch._inductor.aoti_load_package(path)
    for x in odd.values():
        with contextlib.suppress(RuntimeError):  # the reason goes to stderr
            head(x.to(device))
    imported = [n for n in ("model", "aot_inductor") if n in sys.modules]
    return imported, accepted


if __name__ == "__main__":
    served = elsewhere(FOLDER, serve, PACKAGE, DEVICE.type, cache="served")
    (imported, accepted), errors = served
    written = [f for f in (FOLDER / "served").rglob("*") if f.is_file()]
    print("ours, imported:", imported, " written to caches:", written)
    assert imported == written == []

# %%
# The op that stays behind
# ------------------------
#
# With ``opaque=True`` it was ``custom_op`` that registered the op, and Inductor
# can't look into that. The package calls the op by its name and has none of our
# kernels. The server does not know that name (``which_api.py`` has the same on
# a CPU):

if __name__ == "__main__" and DEVICE.type == "cuda":
    assert "normalize_kernel" not in kernels(unzip(OPAQUE))
    try:
        elsewhere(FOLDER, serve, OPAQUE, DEVICE.type)
        raise AssertionError("the op came along")
    except RuntimeError as error:
        print(re.search(r"Could not find .*::normalize_opaque", str(error))[0])

# %%
# The server would have to import the module that registers it, and so Triton.
# Use ``triton_op`` for what is to be deployed.
#
# What the package does not check
# -------------------------------
#
# A package checks its inputs only if it is asked to. ``serve`` gave it five odd
# inputs, without and then with the variable ``AOTI_RUNTIME_CHECK_INPUTS``:

if __name__ == "__main__":
    errors = re.findall(r"^Error: input_handles\[0\]: (.*)", errors, re.M)
    for (what, right), error in zip(accepted.items(), errors, strict=True):
        print(f"{what}: accepted, {'right' if right else 'WRONG'}")
        print(f"    {error[:74]}")
    assert not accepted["float64"]

# %%
# Without the check wrong dtypes, strides and widths give wrong numbers and no
# error. (The batch beyond the range is right: neither kernel uses the limit.)
# With it all five are refused, even the batch of 1, which is valid: the check
# begins at 2, since export treats the sizes 0 and 1 as special cases. Switch it
# on in tests; in production check where requests come in.
#
# What the package is bound to
# ----------------------------
#
# It says what it was built on, but not with which PyTorch: note that yourself.

if __name__ == "__main__":
    metadata = json.loads(files["head.wrapper_metadata.json"])
    print(*(f"{key} = {value}" for key, value in metadata.items()), sep="\n")
    own = b"libstdc++.so.6" not in files["head.wrapper.so"]
    print("C++ library:", "linked into the .so" if own else "shared")

# %%
# Some compilers link the C++ library into the ``.so``. PyTorch then has another
# one in use. We load it with ``RTLD_GLOBAL`` in ``TOP``, so that both use the
# same one and cannot clash. How strict is the loader? On a GPU, the next cell
# forges a package: its metadata and kernels are those of an A100.

if __name__ == "__main__" and DEVICE.type == "cuda":
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "N": "i32", "eps": "fp32"}
    types, known = types | {"BLOCK_N": "constexpr"}, {"BLOCK_N": 1024}
    code = triton.compiler.ASTSource(normalize_kernel, types, known)
    a100 = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    cubin = triton.compile(code, target=a100).asm["cubin"]
    forged = str(FOLDER / "forged.pt2")
    with zipfile.ZipFile(PACKAGE) as old, zipfile.ZipFile(forged, "w") as new:
        for name in old.namelist():
            data = cubin if name.endswith(".cubin") else old.read(name)
            if name.endswith("_metadata.json"):
                data = re.sub(rb'(CAPABILITY": ")\d+', rb"\g<1>80", data)
            new.writestr(name.replace("head", "forged", 1), data)
    try:
        elsewhere(FOLDER, serve, forged, DEVICE.type)
        raise AssertionError("ran code of another architecture")
    except RuntimeError as error:
        said = re.findall("Device info.*?[.]|CUDA driver.*", str(error))
        print(*dict.fromkeys(said), sep="\n")
        assert "no kernel image is available" in said[-1]

# %%
# Metadata that differ only cause a warning. The foreign machine code then fails
# at the first call. Build a package for each kind of GPU, or see exercise 1.
#
# Time to the first result
# ------------------------
#
# What a server waits for on a GPU: with empty caches, then with what that run
# has left in them. PyTorch is imported and the GPU awake when the clock starts.
# *Ready* means that the model is imported, or the package loaded.


def first_result(how, path):
    gc.enable()  # as it is in a server
    x = torch.rand(100, 1024, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    if how == "package, C++ loader":
        loader = torch._C._aoti.AOTIModelPackageLoader
        head, x = loader(path, "model", False, 1, -1).boxed_run, [x]
    elif "package" in how:
        head = torch._inductor.aoti_load_package(path)
    else:
        model = __import__("model")
        head = model.Head(torch.arange(1024, device="cuda") / 1024)
        head = torch.compile(head) if how == "torch.compile" else head
    ready = time.perf_counter()
    head(x)
    torch.cuda.synchronize()
    return 1e3 * (ready - start), 1e3 * (time.perf_counter() - ready)


if __name__ == "__main__" and DEVICE.type == "cuda":
    ways, rows = ["Triton", "torch.compile", "package", "package, no probe"], {}
    for how in [*ways, "package, C++ loader"]:
        to, rows[how] = (FOLDER, first_result, how, PACKAGE), []
        env = {"TORCHINDUCTOR_VEC_ISA_OK": "" if how == "package" else "0"}
        for _ in ("cold", "warm"):
            rows[how] += elsewhere(*to, model=True, cache=how, **env)[0]
    columns = ["ready, cold", "first, cold", "ready, warm", "first, warm"]
    table = pd.DataFrame(rows.values(), rows, columns).round(1)
    print("milliseconds", table.to_string(), sep="\n")

# %%
# ``aoti_load_package`` imports Inductor. To compare the metadata it also asks
# the C++ compiler which vector instructions this CPU has (`pytorch#191715
# <https://github.com/pytorch/pytorch/issues/191715>`_). That can take longer
# than compiling everything, and the package loses what it should save. On a GPU
# server set ``TORCHINDUCTOR_VEC_ISA_OK=0``, as ``elsewhere`` does: it says that
# there are none. (Don't set it where you build for CPUs: their code would lose
# its vectors.) Warm caches do not spare this probe. Without the probe, the
# package saves time in the first call, but Inductor is still imported. Only the
# last row does without that import: its loader is private in Python, but public
# in C++ as ``torch::inductor::AOTIModelPackageLoader``.
#
# The benchmark
# -------------
#
# After the start: calls with ``M`` rows of 1024 float32. The figure is the
# floor, ``8 * M * 1024`` bytes, over the time. ``Triton`` is ``Head`` itself,
# with PyTorch's own subtraction.

PROVIDERS = ["Triton", "torch.compile", "AOTInductor", "PyTorch", "Roof"]


@triton.testing.perf_report(
    triton.testing.Benchmark(
        x_names=["M"],
        x_vals=[2**k for k in range(1, 16, 2)],
        x_log=True,
        line_arg="provider",
        line_vals=PROVIDERS,
        line_names=PROVIDERS,
        ylabel="GB/s",
        plot_name="aot_inductor",
        args={},
    )
)
def benchmark(M, provider):
    x, mean = torch.rand(M, 1024, device=DEVICE), torch.rand(1024).to(DEVICE)
    head, out = Head(mean), torch.empty_like(x)
    torch.compiler.reset()
    compiled = torch.compile(head, fullgraph=True, dynamic=False)
    op = {
        "Triton": lambda: head(x),
        "torch.compile": lambda: compiled(x),
        "AOTInductor": lambda: package(x),
        "PyTorch": lambda: functional.normalize(x - mean, dim=-1),
        "Roof": lambda: out.copy_(x),
    }[provider]
    times = triton.testing.do_bench(op, quantiles=[0.5, 0.2, 0.8])
    median, fast, slow = (8 * M * 1024e-6 / t for t in times)
    return median, slow, fast


if __name__ == "__main__" and DEVICE.type == "cuda":
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)
    torch._inductor.config.cpp.vec_isa_ok = False  # as the variable does
    package = torch._inductor.aoti_load_package(PACKAGE)
    results = benchmark.run(print_data=True, show_plots=True, return_df=True)

# %%
# On the right even the best write the centred rows and read them again: twice
# the floor, so half of the roof, as Inductor fuses nothing into our op.
# ``Triton`` and PyTorch stay below what their bytes allow. On the left launches
# count, and the package is ahead; ``cuda_graphs.py`` is about launches.
#
# Go further
# ----------
#
# 1. Build a package with code for more than one architecture.
# 2. Let ``normalize_kernel`` subtract the mean. What is the floor then?
#
# To read on: `torch.export <https://docs.pytorch.org/docs/stable/export.html>`_
# and the manual of AOTInductor, with a server in C++:
# https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html

# %%
# Answers
# -------
#
# **1.** ``"aot_inductor.emit_multi_arch_kernel": True`` among the
# ``inductor_configs`` puts ``.fatbin`` files in the place of ``.cubin``, with
# PTX for the driver to compile. It takes ``nvcc``.
#
# **2.** It is the same, ``8 * M * N`` bytes and the few of the mean. But now
# nothing is written in between, and the kernel can come near it.
