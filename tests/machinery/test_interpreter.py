"""What the guide says of Triton's interpreter, and of the compiler, is true of the installed Triton."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

GUIDE = (ROOT / "docs" / "guide" / "interpreter.md").read_text()
SCRIPT = """
import json
import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(DTYPE)
    tl.store(out_ptr + offs, (x + x).to(tl.float32))


@triton.jit
def convert_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(DTYPE).to(tl.float32))


@triton.jit
def sum_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)).to(DTYPE), axis=0))


@triton.jit
def dot_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(DTYPE)
    tl.store(out_ptr + offs, tl.dot(x, x))


@triton.jit
def divide_kernel(out_ptr, eps):
    tl.store(out_ptr, 1.0 / eps)


@triton.jit
def masked_kernel(x_ptr, out_ptr):
    tl.store(out_ptr + tl.arange(0, 8), tl.load(x_ptr + tl.arange(0, 8), mask=tl.arange(0, 8) < 5))


@triton.jit
def count_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


def run(kernel, x, *arguments):
    out = torch.zeros(x.shape)
    kernel[(1,)](x, out, *arguments)
    return out.flatten().tolist()


values = torch.tensor([1.97, 31.4, 0.1, 2.0])
wide = torch.zeros(1, dtype=torch.float64)
divide_kernel[(1,)](wide, 1e-50)
part = torch.full((8,), 9.0)
masked_kernel[(1,)](torch.ones(8), part)
counter = torch.zeros(1)
count_kernel[(1, 70000)](counter)
print(json.dumps({
    "bfloat16": run(add_kernel, torch.ones(4), tl.bfloat16, 4)[0],
    "float32": run(add_kernel, torch.ones(4).bfloat16(), tl.float32, 4)[0],
    "float8": run(add_kernel, torch.ones(4), tl.float8e4nv, 4)[0],
    "sum": run(sum_kernel, torch.tensor([-1.0, -2, 3, 4]), tl.bfloat16, 4)[0],
    "dot": run(dot_kernel, 2 * torch.eye(16), tl.bfloat16, 16)[0],
    "float8 dot": run(dot_kernel, 2 * torch.eye(16), tl.float8e4nv, 16)[0],
    "to bfloat16": run(convert_kernel, values, tl.bfloat16, 4)[2],
    "to float8": run(convert_kernel, values, tl.float8e4nv, 4)[:2],
    "float argument": wide.item(),
    "masked": part.tolist(),
    "race on 70000 programs": counter.item(),
}))
"""
REFUSED = """
import triton
import triton.language as tl

SCALE = 2.5


@triton.jit
def loop_kernel(x_ptr):
    total = 0
    for i in range(4):
        total += tl.load(x_ptr + i)
    tl.store(x_ptr, total)


@triton.jit
def branch_kernel(x_ptr):
    if tl.load(x_ptr) > 0:
        y = 1
    else:
        y = 2.5
    tl.store(x_ptr, y)


@triton.jit
def break_kernel(x_ptr):
    for i in range(4):
        if tl.load(x_ptr + i) < 0:
            break
    tl.store(x_ptr, 1.0)


@triton.jit
def global_kernel(x_ptr):
    tl.store(x_ptr, SCALE)


@triton.jit
def dict_kernel(x_ptr):
    values = {"x": 1.0}
    tl.store(x_ptr, values["x"])


@triton.jit
def dot_kernel(x_ptr):
    offs = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)
    x = tl.load(x_ptr + offs).to(tl.float16)
    tl.store(x_ptr + offs, tl.dot(x, x))
"""
RUN_ALL = """
import torch
for kernel in (loop_kernel, branch_kernel, break_kernel, global_kernel, dict_kernel, dot_kernel):
    kernel[(1,)](torch.ones(64))
"""
MESSAGES = {
    "loop": "Loop-carried variable total has initial type int32 but is re-assigned to fp32",
    "branch": "Mismatched type for y between then block (int32) and else block (fp32)",
    "break": "unsupported AST node type: Break",
    "global": "Cannot access global variable SCALE",
    "dict": "unsupported AST node type: Dict",
    "dot": "Input shapes should have M >= 1, N >= 1 and K >= 16",
}


def python(folder: Path, *arguments: str, interpret: str = "1") -> str:
    """Return what Python prints."""
    variables = {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode < 2, done.stderr
    return done.stdout


def test_numbers_that_differ(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    results = json.loads(python(tmp_path, "script.py"))
    assert results.pop("bfloat16") == pytest.approx(1.7e38, rel=0.01)
    assert results.pop("float8") != 2
    assert results.pop("sum") != 4
    assert results.pop("dot") != 4
    assert results.pop("to bfloat16") == pytest.approx(0.0996, rel=1e-3)
    assert results.pop("float argument") == pytest.approx(1e50)
    assert results.pop("masked") == [1] * 5 + [0] * 3
    assert results == {"float32": 2, "float8 dot": 4, "to float8": [1, 16], "race on 70000 programs": 70000}


def test_interpreter_runs_what_the_compiler_refuses(tmp_path: Path) -> None:
    (tmp_path / "refused.py").write_text(REFUSED)
    (tmp_path / "run.py").write_text(REFUSED + RUN_ALL)
    assert python(tmp_path, "run.py") == ""
    for name, message in MESSAGES.items():
        assert message in GUIDE
        place = f"refused.py:{name}_kernel"
        out = python(tmp_path, "-m", "triton_gallery_ops.check_compiles", place, "x_ptr:*fp32", "--gpu", "sm_90")
        assert message in out


def test_core_to_copy(tmp_path: Path) -> None:
    (core,) = (block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "ASTSource" in block)
    (tmp_path / "core.py").write_text(core)
    (tmp_path / "scale.py").write_text("""
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < N), mask=offs < N)
""")
    assert ".target sm_90" in python(tmp_path, "core.py", interpret="0")
