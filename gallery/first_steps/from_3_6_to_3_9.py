# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Carry a kernel from block pointers to plain pointers and to tensor
# descriptors, and see what changed in Triton 3.7, 3.8 and 3.9."""
# tool = true
# [tool.triton-gallery.not_for]  # the first needs Triton 3.8, the others 3.9
# dot_probe = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
# publish_kernel = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# load_probe = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# store_probe = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# poll_probe = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# [tool.triton-gallery.only_with]  # Triton 3.9 has no block pointers
# block_pointer_kernel = "<3.9"
# block_pointer_probe = "<3.9"
# positional_probe = "<3.9"
# ///
r"""
Migrate kernels: block pointers to descriptors, and Triton 3.7 to 3.9
=====================================================================

Triton 3.9 removed block pointers: ``tl.make_block_ptr`` is still there, but
calling it raises an error. This page carries one old kernel to plain pointers
and to tensor descriptors, and lists what else changed since Triton 3.6. Kernels
that use none of the calls in its first table run unchanged on 3.6 to 3.9.

After this page you can

* replace ``make_block_ptr``, ``advance``, ``boundary_check`` and
  ``padding_option``;
* tell which tensors a descriptor takes, and what to do with the others;
* find the calls in your own kernels that a newer Triton refuses or reads
  differently.
"""

# sphinx_gallery_tags = ["descriptors", "tool"]
import os
import warnings

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

# %%
# What changed, in one table
# --------------------------
#
# Each row is one call, and what Triton 3.6, 3.7, 3.8 and 3.9 make of it. *The
# check*, below, calls every one of them on the installed version and compares
# the answer with its column.

VERSIONS = ["3.6", "3.7", "3.8", "3.9"]
CHANGES = {  # a call: what it gives on each version, and what to write instead
    "tl.make_block_ptr(...)": (
        "works warns warns raises",
        "pointers, or a descriptor: see below",
    ),
    'tl.load(p, None, None, (), "", ".cg")': (
        "works works works raises",
        'tl.load(p, cache_modifier=".cg")',
    ),
    "tl.reshape(x, s, can_reorder=True)": (
        "works works works warns",
        "tl.reshape(x, s)",
    ),
    "tl.cumsum(x) of bfloat16 has dtype": (
        "fp32 fp32 fp32 bf16",
        "tl.cumsum(x.to(tl.float32))",
    ),
    "tl.maximum(x, x) of bfloat16 has dtype": (
        "fp32 fp32 fp32 bf16",
        "x.to(tl.float32) first, where the next step needs it",
    ),
    "tl.dot of two 8 x 8 float32 tiles": (
        "raises raises works works",
        "16 x 16 tiles, padded with zeros",
    ),
    'autotune(key=["not an argument"])': (
        "works works works raises",
        "names of arguments; others were ignored",
    ),
    "tl.atomic_load(p)": (
        "raises raises raises works",
        "tl.atomic_add of 0",
    ),
    "tl.atomic_store(p, 1)": (
        "raises raises raises works",
        "tl.atomic_xchg(p, 1)",
    ),
    "tl.atomic_poll(p, 0)": (  # waits until p holds a 0
        "raises raises raises works",
        "a loop of tl.atomic_cas(p, 0, 0)",
    ),
    "a * b + c without an option": (
        "fused fused fused fused",
        "tl.fma(a, b, c)",
    ),
}

table = pd.DataFrame([answers.split() for answers, _ in CHANGES.values()])
table.index, table.columns = list(CHANGES), VERSIONS
if __name__ == "__main__":
    print(table.to_string(), "\n\nWrite instead, for all of them:")
    for call, (_, instead) in CHANGES.items():
        print(f"  {call:38} {instead}")

# %%
# *Warns* means that the call is deprecated. Two rows change a result, and
# nothing tells you: ``tl.cumsum`` and ``tl.maximum`` return bfloat16 for
# bfloat16 from 3.9 on, and a cumulative sum in bfloat16 loses its low digits.
#
# The last row will change next. So far, a product and a sum are compiled into
# one *fused multiply-add* (FMA), which rounds once. Triton 3.9 warns that 3.10
# will not fuse them unless ``enable_fp_fusion=True`` is given at the launch.
#
# A kernel with block pointers
# ----------------------------
#
# It finds the largest absolute value of each row. A block pointer holds the
# shape and the strides of a whole tensor, and the position of one tile in it.
# ``boundary_check`` names the axes on which the tile may reach past the end.
# Elements past the end are not stored. They read as what ``padding_option``
# says, zero or NaN; without it they are undefined.


@triton.jit
def block_pointer_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    off_m = tl.program_id(axis=0) * BLOCK_M
    x_block = tl.make_block_ptr(
        x_ptr,
        shape=(M, N),
        strides=(stride_xm, stride_xn),
        offsets=(off_m, 0),
        block_shape=(BLOCK_M, BLOCK_N),
        order=(1, 0),
    )
    out_block = tl.make_block_ptr(
        out_ptr,
        shape=(M,),
        strides=(1,),
        offsets=(off_m,),
        block_shape=(BLOCK_M,),
        order=(0,),
    )
    largest = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for _ in range(0, N, BLOCK_N):
        x = tl.load(x_block, boundary_check=(0, 1), padding_option="zero")
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        x_block = tl.advance(x_block, (0, BLOCK_N))
    tl.store(out_block, largest, boundary_check=(0,))


BLOCK_M, BLOCK_N = 16, 128


def amax(kernel, x, *strides):
    """Return the largest absolute value of each row of a float32 matrix."""
    M, N = x.shape
    out = torch.empty(M, device=x.device)
    grid = (triton.cdiv(M, BLOCK_M),)
    kernel[grid](x, out, M, N, *strides, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return out


# %%
# ``outcome`` calls a function and reports how it went: it works, warns of a
# deprecation, or raises.


def outcome(call):
    """Call a function; return how it went in one word, and what it said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            while error.__cause__:  # the cause of Triton's error
                error = error.__cause__
            return "raises", str(error).strip().split("\n")[-1]
    said = [str(w.message) for w in caught if w.category is UserWarning]
    deprecations = [message for message in said if "deprecated" in message]
    return ("warns", deprecations[0]) if deprecations else ("works", "")


if __name__ == "__main__":
    x = torch.randn(37, 300, device=DEVICE)
    how, message = outcome(lambda: amax(block_pointer_kernel, x, *x.stride()))
    print(f"Triton {triton.__version__}: {how}. {message}")

# %%
# The same with plain pointers
# ----------------------------
#
# This form runs on every version and every GPU, and takes any strides. What the
# block pointer held becomes visible: the offsets of each axis, and a mask that
# compares them with the shape.

if __name__ == "__main__":
    rows = {
        "strides": ("offs * stride", "strides; the last one is 1"),
        "offsets": ("part of offs", "arguments of load and store"),
        "shape, boundary_check": ("mask=offs < N", "shape; always checked"),
        "padding_option": ("other=, any number", "zero, or NaN if asked for"),
        "advance": ("the loop's variable", "the loop's variable"),
        "order": ("not needed", "not needed"),
        "addresses in 64 bits": ("offs.to(tl.int64)", "always"),
    }
    columns = ["plain pointers", "descriptor"]
    print(pd.DataFrame(rows, index=columns).T.to_string())

# %%
# A block pointer computed its addresses in 64 bits. With plain pointers that is
# up to you: an offset times a stride may be past 2**31, on either axis.


@triton.jit
def pointer_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    off_m = tl.program_id(axis=0).to(tl.int64) * BLOCK_M
    offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    mask_m = offs_m < M
    row_ptrs = x_ptr + offs_m[:, None] * stride_xm  # (BLOCK_M, 1)
    largest = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for off_n in range(0, N, BLOCK_N):
        offs_n = off_n + tl.arange(0, BLOCK_N).to(tl.int64)  # (BLOCK_N,)
        mask = mask_m[:, None] & (offs_n < N)[None, :]  # (BLOCK_M, BLOCK_N)
        x = tl.load(row_ptrs + offs_n[None, :] * stride_xn, mask=mask, other=0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    tl.store(out_ptr + offs_m, largest, mask=mask_m)


if __name__ == "__main__":
    for view in (x, x.t()):
        out = amax(pointer_kernel, view, *view.stride())
        torch.testing.assert_close(out, view.abs().amax(1), rtol=0, atol=0)
        print(f"strides {view.stride()}: equal to PyTorch's")

# %%
# A maximum is one of its inputs, never rounded, so the results must be equal.
#
# With a descriptor made in the kernel
# ------------------------------------
#
# A *tensor descriptor* replaces the block pointer: a shape, strides and a block
# shape, but no position. Triton 3.6 to 3.9 have it, on every GPU. It differs
# from a block pointer in four ways.
#
# * On Hopper and newer GPUs the *tensor memory accelerator* (TMA) copies the
#   tile. So the address and all strides but the last must be multiples of 16
#   bytes, the last stride must be 1, and a block's last axis needs 16 bytes or
#   more. ``TensorDescriptor`` checks that on every GPU. For a descriptor made
#   in the kernel, the launcher has to check.
# * ``desc.load`` takes the offsets, in 32 bits. It checks every axis, and pads
#   with zeros, or with NaN if the descriptor was made with
#   ``padding_option="nan"``.
# * ``desc.store([off_m, off_n], tile)`` leaves out what lies past the last row,
#   but on those GPUs it writes whole pieces of 16 bytes.
#   If ``N`` elements are no multiple of 16 bytes, as 301 columns with a stride
#   of 304, it `writes past the end of the row
#   <https://github.com/triton-lang/triton/issues/11583>`_. Nothing refuses
#   that, and the interpreter does not show it. Store through a descriptor only
#   where ``N * itemsize % 16 == 0``. The kernels here store one number a row,
#   with plain pointers.
# * It must not be empty.
#
# The kernel writes the descriptor into memory, which it gets from the allocator
# that ``triton.set_allocator`` was given.


@triton.jit
def device_descriptor_kernel(
    x_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    x_desc = tl.make_tensor_descriptor(
        x_ptr,
        shape=[M, N],
        strides=[stride_xm, 1],
        block_shape=[BLOCK_M, BLOCK_N],
    )
    off_m = tl.program_id(axis=0) * BLOCK_M
    largest = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for off_n in range(0, N, BLOCK_N):
        x = x_desc.load([off_m, off_n])  # (BLOCK_M, BLOCK_N)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    tl.store(out_ptr + offs_m, largest, mask=offs_m < M)


def fits_descriptor(x):
    """Tell whether a descriptor takes a matrix as it lies in memory."""
    itemsize = x.element_size()
    return (
        x.numel() > 0
        and x.stride(1) == 1
        and x.stride(0) * itemsize % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def allocate(size, alignment, stream):
    """Return size bytes on the GPU; PyTorch aligns more than Triton asks."""
    return torch.empty(size, dtype=torch.int8, device=DEVICE)


def amax_device(x):
    # Nothing in the kernel can refuse an x that a descriptor does not take.
    assert fits_descriptor(x)
    triton.set_allocator(allocate)
    return amax(device_descriptor_kernel, x, x.stride(0))


if __name__ == "__main__":
    x = torch.randn(37, 300, device=DEVICE)
    expected = x.abs().amax(1)
    torch.testing.assert_close(amax_device(x), expected, rtol=0, atol=0)
    print("equal to PyTorch's")

# %%
# With a descriptor made on the host
# ----------------------------------
#
# ``TensorDescriptor.from_tensor`` makes it before the launch, from the tensor
# itself: shape and strides cannot be wrong, and no allocator is needed. The
# kernel gets the descriptor as an argument.


@triton.jit
def host_descriptor_kernel(
    x_desc, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    off_m = tl.program_id(axis=0) * BLOCK_M
    largest = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for off_n in range(0, N, BLOCK_N):
        x = x_desc.load([off_m, off_n])  # (BLOCK_M, BLOCK_N)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    offs_m = off_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    tl.store(out_ptr + offs_m, largest, mask=offs_m < M)


def amax_host(x):
    M, N = x.shape
    out = torch.empty(M, device=x.device)
    x_desc = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_N])
    grid = (triton.cdiv(M, BLOCK_M),)
    host_descriptor_kernel[grid](
        x_desc, out, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N
    )
    return out


if __name__ == "__main__":
    torch.testing.assert_close(amax_host(x), expected, rtol=0, atol=0)
    print("equal to PyTorch's")

# %%
# What a descriptor does not take
# -------------------------------
#
# A block pointer took all of these. ``TensorDescriptor`` refuses three,
# and ``fits_descriptor`` says so beforehand.

if __name__ == "__main__":
    wide = torch.randn(37, 304, device=DEVICE)
    tensors = {
        "300 columns": torch.randn(37, 300, device=DEVICE),
        "301 columns, rows of 1204 bytes": torch.randn(37, 301, device=DEVICE),
        "every other column": wide[:, ::2],
        "from column 1, 4 bytes off": wide[:, 1:],
    }
    for name, x in tensors.items():
        how, message = outcome(lambda x=x: amax_host(x))
        print(f"{name:32} {how} {message}")
        assert (how == "works") == fits_descriptor(x)

# %%
# So the launcher asks first, and needs the plain kernel in any case:


def largest_of_rows(x):
    """Return the largest absolute value of each row of a float32 matrix."""
    if fits_descriptor(x):
        return amax_host(x)
    return amax(pointer_kernel, x, *x.stride())


if __name__ == "__main__":
    for x in tensors.values():
        out = largest_of_rows(x)
        torch.testing.assert_close(out, x.abs().amax(1), rtol=0, atol=0)
    print(f"{len(tensors)} tensors, all equal to PyTorch's")

# %%
# How fast?
# ---------
#
# The rate at which each form reads a matrix, beside a copy, which reads and
# writes it, and PyTorch's reduction.

FORMS = {
    "block pointer": lambda x: amax(block_pointer_kernel, x, *x.stride()),
    "plain pointers": lambda x: amax(pointer_kernel, x, *x.stride()),
    "device descriptor": amax_device,
    "host descriptor": amax_host,
    "torch.linalg.vector_norm": lambda x: torch.linalg.vector_norm(
        x, torch.inf, dim=1
    ),
    "copy": lambda x: x.clone(),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    rates = {}
    for M, N in ((4096, 4096), (16384, 4096), (32768, 8192)):
        x = torch.randn(M, N, device=DEVICE)
        column = rates[f"{M} x {N}, GB/s"] = {}
        for name, form in FORMS.items():
            if outcome(lambda form=form, x=x: form(x))[0] == "raises":
                column[name] = float("nan")  # block pointers, on Triton 3.9
                continue
            ms = triton.testing.do_bench(
                lambda form=form, x=x: form(x), return_mode="median"
            )
            moved = x.nbytes * (2 if name == "copy" else 1)
            column[name] = moved * 1e-6 / ms
    print(pd.DataFrame(rates).round().to_string())

# %%
# Break it
# --------
#
# The padding is part of the result. Without ``tl.abs`` this is a maximum, and a
# row of negative numbers gets 0, from past the end of the row. Plain pointers
# say ``other=-float("inf")``. A descriptor pads with zeros or NaN only, so the
# kernel has to overwrite what was padded.


@triton.jit
def row_max_kernel(
    x_desc,
    out_ptr,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REPAIR: tl.constexpr,
):
    off_m = tl.program_id(axis=0) * BLOCK_M
    largest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    for off_n in range(0, N, BLOCK_N):
        x = x_desc.load([off_m, off_n])  # (BLOCK_M, BLOCK_N)
        if REPAIR:
            inside = off_n + tl.arange(0, BLOCK_N) < N  # (BLOCK_N,)
            x = tl.where(inside[None, :], x, -float("inf"))
        largest = tl.maximum(largest, tl.max(x, axis=1))
    offs_m = off_m + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + offs_m, largest, mask=offs_m < M)


def row_max(x, repair):
    M, N = x.shape
    out = torch.empty(M, device=x.device)
    desc = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_N])
    row_max_kernel[(triton.cdiv(M, BLOCK_M),)](
        desc, out, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, REPAIR=repair
    )
    return out


if __name__ == "__main__":
    x = -1 - torch.rand(3, 300, device=DEVICE)
    wrong, right = row_max(x, repair=False), row_max(x, repair=True)
    print("as padded: ", wrong.tolist())
    print("overwritten:", right.tolist())
    assert (wrong == 0).all()
    torch.testing.assert_close(right, x.amax(1), rtol=0, atol=0)

# %%
# torch.compile does not see an atomic store
# ------------------------------------------
#
# This concerns you once you use the new ``tl.atomic_store``. ``torch.compile``
# reads a kernel's code to find which arguments it writes. In PyTorch 2.15 and
# before it looks for ``tl.store`` and the older atomics, and not for this one.
# An output that nothing else writes counts as never written, so the compiled
# function may leave the launch out:


@triton.jit
def publish_kernel(out_ptr, value):
    tl.atomic_store(out_ptr + tl.program_id(axis=0), value)


def published(x):
    out = torch.zeros_like(x)
    publish_kernel[(len(out),)](out, 1.0)
    return out


if __name__ == "__main__":
    x = torch.zeros(4, device=DEVICE)
    has_atomic_store = outcome(lambda: published(x))[0] == "works"
    if not has_atomic_store:
        print(f"Triton {triton.__version__} has no tl.atomic_store")
    elif DEVICE.type == "cpu":
        print("no GPU: torch.compile does not take an interpreted kernel")
    else:
        print("as it is:", published(x).tolist())
        print("compiled:", torch.compile(published)(x).tolist())

# %%
# The way out is to say what is written. An op made with
# ``torch.library.custom_op`` names it in ``mutates_args``. ``torch.compile``
# does not look into such an op:


@torch.library.custom_op("triton_gallery::publish", mutates_args={"out"})
def publish(out: torch.Tensor, value: float) -> None:
    publish_kernel[(len(out),)](out, value)


def published_by_op(x):
    out = torch.zeros_like(x)
    publish(out, 1.0)
    return out


if __name__ == "__main__" and has_atomic_store:
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    out = torch.compile(published_by_op, backend=backend)(x)
    print("compiled, as an op:", out.tolist())
    assert (out == 1).all()

# %%
# From PyTorch 2.15 on, ``register_kernel_access_op("tt.atomic_store",
# write_indexes=[0])`` of ``torch._higher_order_ops.triton_kernel_wrap`` tells
# ``torch.compile`` as well. That module is private.

# %%
# The check
# ---------
#
# A name that exists proves nothing: on 3.9 ``hasattr(tl, "make_block_ptr")`` is
# true, and the call raises. So each row of the first table is called here; two
# rows are about compiled code, and are asked on a GPU only. The kernels below
# hold one call each; ``probe`` launches one and reports how it went. It always
# compiles: Triton warns when it compiles, and not when it takes a kernel
# from its cache.


@triton.jit
def block_pointer_probe(p):
    tl.make_block_ptr(p, (64,), (1,), (0,), (64,), (0,))


@triton.jit
def positional_probe(p):
    tl.store(p, tl.load(p, None, None, (), "", ".cg"))


@triton.jit
def reshape_probe(p):
    x = tl.load(p + tl.arange(0, 64))
    x = tl.reshape(x, (64, 1), can_reorder=True)
    tl.store(p + tl.arange(0, 64)[:, None], x)


@triton.jit
def cumsum_probe(p):
    x = tl.cumsum(tl.load(p + tl.arange(0, 64)).to(tl.bfloat16), 0)
    tl.store(p, 16 if x.dtype == tl.bfloat16 else 32)


@triton.jit
def maximum_probe(p):
    x = tl.load(p).to(tl.bfloat16)
    tl.store(p, 16 if tl.maximum(x, x).dtype == tl.bfloat16 else 32)


@triton.jit
def dot_probe(p):
    offs = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)
    x = tl.load(p + offs)
    tl.store(p + offs, tl.dot(x, x))


@triton.jit
def load_probe(p):
    tl.store(p, tl.atomic_load(p))


@triton.jit
def store_probe(p):
    tl.atomic_store(p, 1.0)


@triton.jit
def poll_probe(p):
    tl.atomic_poll(p.to(tl.pointer_type(tl.int32)), 0)


@triton.jit
def fusion_probe(p):
    # The exact square of 1 + 2**-12 ends in 2**-24, which float32 rounds off.
    x = tl.load(p) + 1.000244140625
    tl.store(p, x * x - 1.00048828125)


def probe(kernel):
    """Launch a kernel on 64 zeros; return how it went and what [0] is."""
    memory = torch.zeros(64, device=DEVICE)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        how, _ = outcome(lambda: kernel[(1,)](memory))
    return how, memory[0].item()


def dtype_of(kernel):
    how, bits = probe(kernel)
    return {16: "bf16", 32: "fp32"}[bits] if how == "works" else how


def tune_by_no_argument():
    triton.autotune([triton.Config({})], key=["not an argument"])(dot_probe)


def compiled(answer):
    """Answer for a compiler; the interpreter takes any tile, and fuses none."""
    return answer() if DEVICE.type == "cuda" else "(not asked)"


def fusion():
    if os.environ.get("TRITON_DEFAULT_FP_FUSION") == "0":
        return "(not asked)"
    return "fused" if probe(fusion_probe)[1] else "apart"


ANSWERS = [
    lambda: probe(block_pointer_probe)[0],
    lambda: probe(positional_probe)[0],
    lambda: probe(reshape_probe)[0],
    lambda: dtype_of(cumsum_probe),
    lambda: dtype_of(maximum_probe),
    lambda: compiled(lambda: probe(dot_probe)[0]),
    lambda: outcome(tune_by_no_argument)[0],
    lambda: probe(load_probe)[0],
    lambda: probe(store_probe)[0],
    lambda: probe(poll_probe)[0],
    lambda: compiled(fusion),
]

if __name__ == "__main__":
    version = ".".join(triton.__version__.split(".")[:2])
    print(f"Triton {triton.__version__}")
    for call, answer in zip(CHANGES, ANSWERS, strict=True):
        said = answer()
        print(f"  {call:38} {said}")
        if version in VERSIONS:
            assert said in (table[version][call], "(not asked)"), call

# %%
# Exercises
# ---------
#
# **1.** An old kernel loads tiles of the *transposed* matrix with
# ``make_block_ptr(x_ptr, shape=(N, M), strides=(1, stride_xm), ...,
# block_shape=(BLOCK_N, BLOCK_M), order=(0, 1))``, for the largest absolute
# value of each *column*. A descriptor needs a last stride of 1, so it describes
# ``x`` as it lies. This kernel has a mistake in one line; find it.


@triton.jit
def column_kernel(
    x_desc, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    off_n = tl.program_id(axis=0) * BLOCK_N
    largest = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for off_m in range(0, M, BLOCK_M):
        x_t = x_desc.load([off_m, off_n]).reshape((BLOCK_N, BLOCK_M))
        largest = tl.maximum(largest, tl.max(tl.abs(x_t), axis=1))
    offs_n = off_n + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs_n, largest, mask=offs_n < N)


if __name__ == "__main__":
    x = torch.randn(37, 300, device=DEVICE)
    out = torch.empty(300, device=DEVICE)
    desc = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_N])
    column_kernel[(triton.cdiv(300, BLOCK_N),)](
        desc, out, 37, 300, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N
    )
    print("right" if torch.equal(out, x.abs().amax(0)) else "not yet")

# %%
# **2.** ``fits_descriptor`` refuses a matrix of 301 columns. Pad its rows in
# memory, without a copy at each call, so that a descriptor takes it.


def aligned(M, N):
    """Return a matrix of M x N floats that fits_descriptor takes."""
    return torch.empty(M, N, device=DEVICE)  # yours


if __name__ == "__main__":
    x = aligned(37, 301)
    print("right" if fits_descriptor(x) and x.shape[1] == 301 else "not yet")

# %%
# To read on:
#
# * *Tensor descriptors*, what the copy engine spares and how fast it is
# * `Triton's releases <https://github.com/triton-lang/triton/releases>`_
#
# Answers
# -------
#
# **1.** ``reshape`` keeps the order of the elements, so it cuts each row into
# pieces. A transpose is ``x_desc.load([off_m, off_n]).T``. Nothing moves in
# memory for it: the compiler gives the tile another layout.
#
# **2.** Make the rows longer and take a part of them:
# ``torch.empty(M, triton.cdiv(N, 4) * 4, device=DEVICE)[:, :N]``.
