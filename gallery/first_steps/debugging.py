# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Find out why a kernel does not compile, stops the GPU or is wrong, and learn
# what each tool cannot see."""
# ///
r"""
Debugging a kernel
==================

A kernel fails in one of three ways: the compiler refuses it, the GPU stops
it, or it runs and the result is wrong. Each way has its own tools, and each
tool has things that it cannot see. You know ``vector_add.py``, ``row_sum.py``
and ``launch.py``.

After this page you can

* stop inside a kernel and look at its tiles;
* print and assert in a kernel that runs on the GPU;
* read the ten errors that nearly everyone meets, and fix them;
* find a stray access, an unwritten input and a race, and know which tool
  misses them.
"""

# sphinx_gallery_tags = ["debugging"]
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
# In which order
# --------------
#
# What to do for each symptom; the sections below show how:
#
# .. code-block:: text
#
#     symptom                           what to do
#     the compiler refuses it           last line, caret, tl.static_print
#     wrong in the interpreter too      print, breakpoint()
#     wrong in only one of the two      bfloat16, races, promises, masks
#     wrong from some size on           TRITON_DEBUG=1, for int32
#     another result each time          initcheck; atomics
#     illegal or misaligned access      memcheck, without caching
#     an error at an innocent line      CUDA_LAUNCH_BLOCKING=1
#
# One process for each failure
# ----------------------------
#
# What this page shows is meant to fail, and a failure on the GPU takes the
# process with it. So each failing kernel is a script of its own, and the page
# prints the script's output. Do the same with your own failures.

import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def with_imports(source):
    lines = "import triton\nimport triton.language as tl\n" + source
    return "import torch\n" + lines if "torch." in source else lines


# Compiled, and Triton 3.9 does not warn of the next version's default.
QUIET = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}


def run(source, *arguments, tool=(), stdin=None, **environment):
    """Return what a script says, with the folders taken out of it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "demo.py")
        script.write_text(with_imports(source))
        said = subprocess.run(
            [*tool, sys.executable, "-u", script, *arguments],
            cwd=folder,
            env=os.environ | QUIET | environment,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        ).stdout
    return re.sub(r"[^\s\"']*/(?=\w+\.py)", "", said)


# %%
# A wrong result: stop and look
# -----------------------------
#
# This kernel takes the largest element of a row. For the row ``-3, -1, -2`` it
# returns 0. With ``TRITON_INTERPRET=1`` the kernel is Python, executed program
# by program, so ``print`` and ``breakpoint()`` work in it. Three commands for
# the debugger: ``p x`` and ``p mask`` print two tiles, ``c`` continues.

WRONG_MAX = """
@triton.jit
def max_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    print("the largest is", tl.max(x, axis=0))
    breakpoint()
    tl.store(out_ptr, tl.max(x, axis=0))
x, out = torch.tensor([-3.0, -1.0, -2.0]), torch.empty(1)
max_kernel[(1,)](x, out, 3, BLOCK=4)
"""

if __name__ == "__main__":
    keys = ["p x", "p mask", "c"]
    said = run(WRONG_MAX, stdin="\n".join(keys), TRITON_INTERPRET="1")
    print(re.sub(r"\(Pdb\) ", lambda _: f"(Pdb) {keys.pop(0)}\n", said))
    assert "array([-3., -1., -2.,  0.]" in said

# %%
# There it is: the fourth element, which the mask turns off, takes part in the
# maximum. (``p`` prints any expression, ``n`` steps to the next line.) Masked
# elements must hold a value that changes no maximum:


@triton.jit
def max_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    x_ptrs = x_ptr + row * N + offs  # (BLOCK,)
    x = tl.load(x_ptrs, mask=offs < N, other=float("-inf"))  # (BLOCK,)
    tl.store(out_ptr + row, tl.max(x, axis=0))


# A maximum rounds nothing, so the tolerance is zero.
for shape in ((1, 3), (5, 64)):
    x, out = -torch.rand(shape, device=DEVICE), torch.ones(shape[0]).to(DEVICE)
    max_kernel[(shape[0],)](x, out, shape[1], BLOCK=64)
    torch.testing.assert_close(out.double(), x.double().amax(1), rtol=0, atol=0)

# %%
# Speaking from inside the kernel
# -------------------------------
#
# A compiled kernel has no debugger, but there are four functions:
#
# .. code-block:: text
#
#     function           works while    tells or checks
#     tl.static_print    compiling      types, shapes, constexprs
#     tl.static_assert   compiling      what must hold for them
#     tl.device_print    running        values, a line for each element
#     tl.device_assert   running        what must hold for them (debug mode)
#
# The next script only compiles, which takes no GPU: ``triton.compile`` is told
# the types of the arguments and what to compile for, here an H100. It prints
# which messages are left in the compiler's code, first without debug mode,
# which drops ``device_assert``, then with it.

COMPILER = """
import json, re, runpy, sys
def build(kernel, options=None, **values):
    types = {p: "*fp32" if "_ptr" in p else "i32" for p in kernel.arg_names}
    types |= dict.fromkeys(values, "constexpr")
    source = triton.compiler.ASTSource(kernel, types, values)
    h100 = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=h100, options=options)
for text in json.load(sys.stdin):
    open("case.py", "w").write(text)
    try:
        error = runpy.run_path("case.py", {"build": build, "re": re}) and None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print("error", json.dumps(error))
"""


def compile_all(*sources):
    """Return what the sources print, and for each its error or None."""
    texts = json.dumps([with_imports(source) for source in sources])
    said = run(COMPILER, stdin=texts, TRITON_ALWAYS_COMPILE="1")
    errors = re.findall("^error (.*)$", said, re.MULTILINE)
    assert len(errors) == len(sources), said
    return said.partition("error ")[0], [json.loads(error) for error in errors]


SQRT = """
@triton.jit
def sqrt_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 1024, "the block is too large")
    x_ptrs = x_ptr + tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptrs)
    tl.static_print("compiling for x of", x.dtype, x.shape)
    tl.device_print("this is x", x)
    tl.device_assert(x >= 0, "x is negative")
    tl.store(x_ptrs, tl.sqrt(x))
"""
MESSAGES = """
for debug in (False, True):
    ir = build(sqrt_kernel, {"debug": debug}, BLOCK=4).asm["ttir"]
    print(f"{debug=}:", re.findall('(?:print|assert).*?"(.*?)"', ir))
build(sqrt_kernel, BLOCK=2048)
"""

if __name__ == "__main__":
    said, (refusal,) = compile_all(SQRT + MESSAGES)
    print(said, refusal, sep="\n")
    assert "the block is too large" in refusal
    assert [said.count(w) for w in ("is x:", "negative", "int32")] == [2, 1, 1]

# %%
# Debug mode also asserts that int32 sums and products stay in range: the second
# list has one for the product with ``program_id``.
# ``TRITON_DEBUG=1`` turns it on for all kernels, ``@triton.jit(debug=True)``
# for one; without it ``device_assert`` `does nothing
# <https://github.com/triton-lang/triton/issues/1448>`_. The static ones are
# silent when the kernel is in Triton's cache, unless
# ``TRITON_ALWAYS_COMPILE=1`` is set. ``device_print`` is slow: launch one
# program with the smallest tile that fails. Three launches on a GPU:

CALLER = """
import os, sys
device = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
ones, raw = torch.ones(1000, device=device), torch.empty(1000, device=device)

def call(kernel, x, *arguments, programs=1, **constexprs):
    kernel[(programs,)](x, *arguments, **constexprs)
    return x[0].item()
for expression in sys.argv[1:]:
    try:
        print(expression, "=", eval(expression))
    except Exception as error:
        print(expression, "=", str(error).splitlines()[0])
"""

if __name__ == "__main__" and DEVICE.type == "cuda":
    calls = [f"call(sqrt_kernel, {x}, BLOCK=4)" for x in ("ones", "-ones")]
    said = run(SQRT + CALLER, *calls, calls[0], TRITON_DEBUG="1")
    lines = re.sub(r".*thread: \[(?!0,0,0\]).*\n", "", said).splitlines()
    print(*dict.fromkeys(lines), sep="\n")
    assert said.count("= 1.0") == 1, said
    assert len(re.findall("= .*device-side assert triggered", said)) == 2, said

# %%
# The third launch is right and yet fails with the second one's error: after a
# failed assertion, or an illegal access, the process is done with that GPU.
# (The interpreter checks no ``device_assert``, whatever ``TRITON_DEBUG`` is.)
#
# The ten errors
# --------------
#
# These are questions from Triton's issue tracker, cut down to a few lines and
# written as a diff: a case fails with its ``-`` lines and not with its ``+``
# lines. Its first line has the number of the issue and words of the message.
#
# Four times **the compiler has to know** something:
#
# 1. `#2604 <https://github.com/triton-lang/triton/issues/2604>`__: a local
#    ``BLOCK`` is a variable, until ``tl.constexpr`` makes it a constant.
# 2. `#7322 <https://github.com/triton-lang/triton/issues/7322>`__: a global
#    could change after the kernel was compiled, so it must be a constant.
# 3. `#1487 <https://github.com/triton-lang/triton/issues/1487>`__: two rows
#    of different length. ``[:, None]`` makes a column of one of them.
# 4. `#4197 <https://github.com/triton-lang/triton/issues/4197>`__: ``tl.dot``
#    has a least size, set by the hardware. Pad, or multiply and sum.
#
# Three times it is **Python that a kernel doesn't speak**:
#
# 5. `#2151 <https://github.com/triton-lang/triton/issues/2151>`__: a variable
#    keeps its type in a loop, and ``0`` is an integer.
# 6. `#3157 <https://github.com/triton-lang/triton/issues/3157>`__: a loop has
#    no ``break``, ``continue`` or ``return``. A ``while`` has a condition.
# 7. `#4192 <https://github.com/triton-lang/triton/issues/4192>`__: a tile is
#    spread over many threads' registers. Load the element, or reduce.

REFUSED = """
2604 arange's arguments must be of type tl.constexpr
 def kernel(x_ptr):
-    BLOCK = 1024
+    BLOCK: tl.constexpr = 1024
     tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)

7322 Cannot access global variable
-BLOCK = 1024
+BLOCK = tl.constexpr(1024)
 def kernel(x_ptr):
     tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)

1487 incompatible dimensions
 def kernel(x_ptr, N):
     offs_m, offs_n = tl.arange(0, 16), tl.arange(0, 64)
-    tl.store(x_ptr + offs_m * N + offs_n, 0.0)
+    tl.store(x_ptr + offs_m[:, None] * N + offs_n, 0.0)

4197 Input shapes should have
 def kernel(x_ptr):
     offs = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)
     x = tl.load(x_ptr + offs)
-    x = tl.dot(x, x)
+    x = tl.sum(x[:, :, None] * x[None, :, :], axis=1)
     tl.store(x_ptr + offs, x)

2151 Please make sure that the type stays consistent
 def kernel(x_ptr, N):
-    total = 0
+    total = 0.0
     for i in range(N):
         total += tl.load(x_ptr + i)
     tl.store(x_ptr, total)

3157 unsupported AST node type: Break
 def kernel(x_ptr):
     i = 0
-    while True:
-        if tl.load(x_ptr + i) < 0:
-            break
+    while tl.load(x_ptr + i) >= 0:
         i += 1
     tl.store(x_ptr, i)

4192 unsupported tensor index
 def kernel(x_ptr):
     x = tl.load(x_ptr + tl.arange(0, 64))
-    tl.store(x_ptr, x[63])
+    tl.store(x_ptr, tl.load(x_ptr + 63))
"""


def read(diffs):
    """Return link, message, broken and fixed source of each case."""
    cases = []
    diffs = diffs.replace("\n def", "\n @triton.jit\n def")
    pattern = r"(\d+) (.*)\n((?:[ +-].*\n)+)"
    for issue, message, lines in re.findall(pattern, diffs):
        lines += "" if "kernel[" in lines else " build(kernel)"
        broken, fixed = (
            "\n".join(x[1:] for x in lines.splitlines() if x[0] != other)
            for other in "+-"
        )
        link = f"https://github.com/triton-lang/triton/issues/{issue}"
        cases.append((link, message, broken, fixed))
    return cases


def outcomes(cases):
    """Return the error of each case's broken source and of its fixed one."""
    _, _, broken, fixed = zip(*cases, strict=True)
    # The broken ones last: on a GPU, nothing runs after an illegal access.
    _, errors = compile_all(*fixed, *broken)
    return list(zip(errors[len(cases) :], errors, strict=False))


def show(cases):
    for case, (broken, fixed) in zip(cases, outcomes(cases), strict=True):
        assert (case[1] in broken, fixed) == (True, None), (broken, fixed)
        kind, _, text = broken.partition(": ")
        lines = text.splitlines()
        lines = lines[-3:] if text.startswith("at ") else lines[:1]
        print(case[0], *lines[:-1], sep="\n")
        print(textwrap.fill(f"{kind}: {lines[-1]}", 78), end="\n\n")


if __name__ == "__main__":
    show(read(REFUSED))

# %%
# The caret is under what was refused; read the last line first. The last three
# get past the compiler and need a GPU. The **launch** raises 8 and 9. Number 10
# appears later, in the next call that waits for the GPU, unless
# ``CUDA_LAUNCH_BLOCKING=1`` makes each launch wait.
#
# 8. `#2925 <https://github.com/triton-lang/triton/issues/2925>`__: a tensor
#    on the CPU, or on a GPU that isn't the current one.
# 9. `#8182 <https://github.com/triton-lang/triton/issues/8182>`__: the tiles
#    of ``tl.dot`` fill shared memory once for each stage. Take fewer.
# 10. `#9306 <https://github.com/triton-lang/triton/issues/9306>`__: beyond
#     int32 an offset is negative, and so passes the mask. Try debug mode.

STOPPED = """
2925 cannot be accessed from Triton (cpu tensor?)
 def kernel(x_ptr):
     tl.store(x_ptr, 0.0)
-kernel[(1,)](torch.ones(4))
+kernel[(1,)](torch.ones(4, device="cuda"))

8182 out of resource: shared memory
 def kernel(x_ptr, K):
     offs, acc = tl.arange(0, 128), tl.zeros((128, 128), tl.float32)
     for k in range(0, K, 128):
         x = tl.load(x_ptr + offs[:, None] * K + k + offs)
         acc = tl.dot(x, x.T, acc)
     tl.store(x_ptr + offs[:, None] * K + offs, acc)
 x = torch.ones(128, 1024, dtype=torch.float16, device="cuda")
-kernel[(1,)](x, 1024, num_stages=12)
+kernel[(1,)](x, 1024, num_stages=3)

9306 an illegal memory access was encountered
 def kernel(x_ptr, N, BLOCK: tl.constexpr):
-    pid = tl.program_id(axis=0)
+    pid = tl.program_id(axis=0).to(tl.int64)
     offs = pid * BLOCK + tl.arange(0, BLOCK)
     tl.store(x_ptr + offs, 1, mask=offs < N)
 x = torch.empty(3 * 2**30, dtype=torch.int8, device="cuda")
 kernel[(3 * 2**20,)](x, x.numel(), BLOCK=1024)
 torch.cuda.synchronize()
"""

if __name__ == "__main__" and DEVICE.type == "cuda":
    show(read(STOPPED))

# %%
# What the interpreter cannot tell
# --------------------------------
#
# A kernel that is right in the interpreter has the right formulas. The
# interpreter still misleads, and these are the four things that most people
# meet. ``interpreter.md`` lists them all, and has a command that compiles a
# kernel of yours for GPUs that are not there.
#
# * **bfloat16.** The interpreter computes with its bits as if they were an
#   integer (`#4972 <https://github.com/triton-lang/triton/issues/4972>`__).
#   Convert to float32 first. This kernel, which adds 1 to 1, doesn't.
# * **Races.** Programs run one after another. Here 1000 of them add 1 to the
#   same number, by a load and a store or atomically.
# * **Stray reads.** What lies past the end of a tensor is read without an
#   error, on the GPU too: a sum of eight elements of a tensor of five. A masked
#   load without ``other`` gives 0 in the interpreter and may give anything on a
#   GPU.
# * **False promises.** ``tl.multiple_of`` promises that offsets start at a
#   multiple of 16, so the compiler reads 16 bytes at a time. These start at 3.

PITFALLS = r"""
@triton.jit
def count_kernel(x_ptr, step_ptr, ATOMIC: tl.constexpr):
    step = tl.load(step_ptr)
    if ATOMIC:
        tl.atomic_add(x_ptr, step)
    else:
        tl.store(x_ptr, tl.load(x_ptr) + step)
@triton.jit
def sum_kernel(x_ptr, start, BLOCK: tl.constexpr):
    offs = tl.multiple_of(start + tl.arange(0, BLOCK), 16)
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + offs), axis=0))
"""
CALLS = [
    "call(count_kernel, ones.bfloat16(), ones.bfloat16(), ATOMIC=False)",
    "call(count_kernel, 0 * ones, ones, programs=1000, ATOMIC=False)",
    "call(count_kernel, 0 * ones, ones, programs=1000, ATOMIC=True)",
    "call(sum_kernel, torch.cat([ones[:5], 7 * ones])[:5], 0, BLOCK=8)",
    "call(sum_kernel, ones, 3, BLOCK=512)",
]

if __name__ == "__main__":
    said = run(PITFALLS + CALLER, *CALLS, TRITON_INTERPRET="1")
    print("INTERPRETER", said, sep="\n")
    values = re.findall(" = (.*)", said)
    assert float(values[0]) != 2, said
    assert values[1:] == ["1000.0", "1000.0", "26.0", "512.0"], said

if __name__ == "__main__" and DEVICE.type == "cuda":
    said = run(PITFALLS + CALLER, *CALLS)
    print("GPU", said, sep="\n")
    values = re.findall(" = (.*)", said)
    assert float(values.pop(1)) < 1000, said
    assert values[:3] == ["2.0", "1000.0", "26.0"], said
    assert "misaligned address" in values[3], said

# %%
# Compute Sanitizer
# -----------------
#
# CUDA's `Compute Sanitizer
# <https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/>`_ watches every
# access. In ``compute-sanitizer --tool memcheck python demo.py``, *memcheck*
# finds accesses outside of all allocations, *initcheck* reads of what nobody
# wrote, *racecheck* races in shared memory among the threads of a program.
#
# PyTorch cuts tensors out of large pieces of memory and uses them again. So
# past the end of a tensor there is a valid address, and the memory of
# ``torch.empty`` may have been written before. With
# ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` every tensor has an allocation of its
# own. A stray read is run both ways below.
#
# In plain Triton code the compiler places the barriers, so a race in shared
# memory would be its bug. Inline assembly can do it wrong: here each thread
# puts its number into a slot and takes that of another warp, with a barrier in
# between (``SAFE``) or without (``RACY``). The race of ``count_kernel`` is in
# *global* memory, among programs, where racecheck doesn't look: the last check
# finds nothing, and only the wrong sum tells you.

EXCHANGE = r"""
SAFE = '''{ .shared .b32 slots[128]; .reg .b32 base, mine, other;
mov.u32 base, slots; mov.u32 mine, %tid.x; xor.b32 other, mine, 32;
mad.lo.u32 mine, mine, 4, base; mad.lo.u32 other, other, 4, base;
st.shared.b32 [mine], $1; bar.sync 0; ld.shared.b32 $0, [other]; }'''
RACY = SAFE.replace("bar.sync 0;", "")
@triton.jit
def exchange_kernel(x_ptr, ASM: tl.constexpr):
    x_ptrs = x_ptr + tl.arange(0, 128)
    x = [tl.load(x_ptrs)]
    x = tl.inline_asm_elementwise(ASM, "=r,r", x, tl.float32, False, 1)
    tl.store(x_ptrs, x)
"""
APART = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
CHECKS = [  # tool, call, environment, whether there is something to find
    ("memcheck", "call(sum_kernel, ones, 0, BLOCK=1024)", {}, False),
    ("memcheck", "call(sum_kernel, ones, 0, BLOCK=1024)", APART, True),
    ("initcheck", "call(sum_kernel, raw, 0, BLOCK=512)", APART, True),
    ("racecheck", "call(exchange_kernel, ones, ASM=SAFE)", {}, False),
    ("racecheck", "call(exchange_kernel, ones, ASM=RACY)", {}, True),
    ("racecheck", CALLS[1], {}, False),
]


def check(name, call, environment, _):
    """Return the first finding of a tool, its summary, and all it said."""
    tool = ["compute-sanitizer", "--report-api-errors=no", f"--tool={name}"]
    said = run(PITFALLS + EXCHANGE + CALLER, call, tool=tool, **environment)
    first = r"^=+ (?:Invalid|Uninit|\w+: Race).*(?:\n=+ {2,}(?![ S]).+)*"
    found = re.search(first, said, re.MULTILINE)
    summary = re.search("^=+ .*SUMMARY.*", said, re.MULTILINE)
    return found and found[0], summary and summary[0], said


if __name__ == "__main__" and DEVICE.type == "cuda":
    if shutil.which("compute-sanitizer"):
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda row: check(*row), CHECKS))
        for row, (found, summary, said) in zip(CHECKS, results, strict=True):
            print(*row[:2], *row[2], found or "nothing", summary, "", sep="\n")
            assert (bool(found), bool(summary)) == (row[3], True), said
    else:
        print("compute-sanitizer is not on PATH")

# %%
# Each report names a line of ``demo.py``: Triton keeps line numbers in its
# kernels unless ``TRITON_DISABLE_LINE_INFO=1`` is set.
#
# Go further
# ----------
#
# 1. Which tool of this page finds the bug of the first kernel on a GPU?
# 2. Give case 3157 an ``N``, where it stops if no number is negative.
#
# Next is how fast a kernel is: ``benchmarking.py``. See also Triton's `own page
# <https://triton-lang.org/main/programming-guide/chapter-3/debugging.html>`_.

# %%
# Answers
# -------
#
# **1.** Only ``tl.device_print``, by showing the 0: no access is stray, and one
# program cannot race. A check against PyTorch finds it, on negative numbers in
# a row shorter than the block.
#
# **2.** ``while tl.load(x_ptr + i, mask=i < N, other=-1.0) >= 0``: past the
# end, ``other`` is a number that ends the loop.
