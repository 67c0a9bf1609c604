"""The command that checks whether a kernel compiles for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

SCRIPT = """
import missing_module
import triton
import triton.language as tl

FACTOR = tl.constexpr(2.0)
PLAIN = 2.0
if __name__ == "__main__":
    FACTOR = None


@triton.jit
def scale(x):
    return x * FACTOR


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["N"])
@triton.jit
def scale_kernel(x_ptr, bias_ptr, N, BLOCK: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    x = scale(tl.load(x_ptr + offs, mask=offs < N)).to(DTYPE)
    if bias_ptr is not None:
        x += tl.load(bias_ptr)
    tl.store(x_ptr + offs, x, mask=offs < N)


@triton.jit
def three(x):
    return x + tl.arange(0, 3)


@triton.jit
def broken_kernel(x_ptr):
    tl.store(x_ptr, three(tl.load(x_ptr)))


@triton.jit
def global_kernel(x_ptr):
    tl.store(x_ptr, PLAIN)


@triton.jit
def square_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + offs[:, None] * BLOCK + offs[None, :]
    x = tl.load(x_ptrs)
    tl.store(x_ptrs, tl.dot(x, x))


@triton.jit
def import_kernel(x_ptr):
    tl.store(x_ptr, missing_module.value)


def function(x):
    return x


scale_kernel[(1,)](None, None, 0)
"""
ARGUMENTS = ("x_ptr:*fp32:16", "bias_ptr:*fp32", "N:i32", "BLOCK:1024")


def check(folder: Path, *arguments: str, script: str = SCRIPT, encoding: str = "utf-8") -> tuple[int, str, str]:
    """Return the exit status of the command and what it prints, in a shell that has Triton's interpreter."""
    (folder / "scale.py").write_text(script, encoding)
    variables = {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "triton_gallery_ops.check_compiles", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    status, out, err = check(tmp_path, "scale.py:scale_kernel", *ARGUMENTS)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
    assert all(": compiles, " in line and "registers a thread, 0 bytes of shared memory" in line for line in lines)


def test_one_gpu_and_constants(tmp_path: Path) -> None:
    arguments = ("x_ptr:*fp16", "bias_ptr:None", "N:1", "BLOCK:64", "DTYPE:tl.float16", "--gpu", "sm_90")
    status, out, err = check(tmp_path, "scale.py:scale_kernel", *arguments, "--num-warps", "2", "--num-stages", "1")
    assert (status, out.count("\n"), err) == (0, 1, "")


DECORATORS = """
import triton
import triton.language as tl

BLOCK = 64
VALUE = 1.0
WARPS = (2, 4)
args = missing_parser.parse_args()
for warps in WARPS:
    missing_launch()


@triton.autotune(configs=[triton.Config({"BLOCK": BLOCK}, num_warps=warps) for warps in WARPS], key=[])
@triton.heuristics({"EVEN": lambda args: args["BLOCK"] % 2 == 0})
@triton.jit
def fill_kernel(x_ptr, BLOCK: tl.constexpr, EVEN: tl.constexpr, VALUE: tl.constexpr = VALUE):
    tl.store(x_ptr + tl.arange(0, BLOCK), VALUE)
"""
ANNOTATIONS = """
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def fill_kernel(x_ptr, BLOCK: tl.constexpr = 64) -> Tensor:
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)
"""


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param(DECORATORS, ["BLOCK:64", "EVEN:True"], id="globals in decorators and defaults"),
        pytest.param(ANNOTATIONS, [], id="annotations that are not evaluated"),
    ],
)
def test_names_around_the_body_are_found(tmp_path: Path, script: str, arguments: list[str]) -> None:
    command = ("scale.py:fill_kernel", "x_ptr:*fp32", *arguments, "--gpu", "sm_90")
    status, out, err = check(tmp_path, *command, script=script)
    assert (status, out.count("\n"), err) == (0, 1, "")


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    status, out, err = check(tmp_path, "scale.py:f", script="# \xe9\n", encoding="latin-1")
    message = "check_compiles: scale.py is not UTF-8: invalid continuation byte at byte 2\n"
    assert (status, out, err) == (2, "", message)


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [
        ("broken_kernel", ["arange's range must be a power of 2", "    return x + tl.arange(0, 3)"]),
        ("global_kernel", ["Cannot access global variable PLAIN", "    tl.store(x_ptr, PLAIN)"]),
    ],
)
def test_error_names_the_line(tmp_path: Path, kernel: str, shown: list[str]) -> None:
    message, line = shown
    status, out, _ = check(tmp_path, f"scale.py:{kernel}", "x_ptr:*fp32", "--gpu", "sm_90")
    assert status == 1
    assert out.startswith(f"sm_90: does not compile: scale.py:{SCRIPT.splitlines().index(line) + 1}: ")
    assert message in out
    assert f"    {line}\n" in out


def test_kernel_that_does_not_fit(tmp_path: Path) -> None:
    arguments = ("x_ptr:*fp16:16", "BLOCK:256", "--num-warps", "8", "--gpu", "sm_80", "--gpu", "sm_89")
    status, out, _ = check(tmp_path, "scale.py:square_kernel", *arguments)
    assert status == 1
    assert [line.split(",")[0] for line in out.splitlines()] == ["sm_80: compiles", "sm_89: does not fit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other.py:scale_kernel"], "other.py: No such file or directory"),
        (["scale.py"], "scale.py: give FILE.py:KERNEL"),
        (["scale.py:other"], "scale.py has no function other at its top level"),
        (["scale.py:function"], "scale.py: function is not a @triton.jit function"),
        (
            ["scale.py:import_kernel", "x_ptr:*fp32"],
            "scale.py:2: ModuleNotFoundError: No module named 'missing_module'",
        ),
        (["scale.py:scale_kernel", *ARGUMENTS[:2]], "scale_kernel also needs N (a type), BLOCK (a value)"),
        (["scale.py:scale_kernel", "y:i32"], "scale_kernel has no argument y; it has x_ptr, bias_ptr, N, BLOCK, DTYPE"),
        (["scale.py:scale_kernel", "x_ptr:*f32"], "x_ptr: '*f32' is not a type; types are i1 "),
    ],
)
def test_wrong_command(tmp_path: Path, arguments: list[str], message: str) -> None:
    status, out, err = check(tmp_path, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"check_compiles: {message}")
