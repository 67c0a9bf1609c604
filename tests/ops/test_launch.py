"""The recipe Launch a kernel: what a launch takes, what a kernel may contain, and its function exp_series."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import Layout, sizes

BLOCK = 1024  # of the recipe

# A file whose annotations are all strings
FUTURE = """
from __future__ import annotations
import json, os, torch, triton, triton.language as tl
from types import SimpleNamespace

@triton.jit
def kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), BLOCK)

if os.environ["TRITON_INTERPRET"] == "1":
    out = torch.zeros(4)
    kernel[(1,)](out, 4)
    print(json.dumps(out.tolist()))
else:
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0))
    print(json.dumps(kernel.warmup(torch.float32, 4, grid=(1,)).src.signature))
"""


@given(size=sizes(BLOCK, 8 * BLOCK))
def test_six_terms_float32(recipe: ModuleType, size: int) -> None:
    """The result is the six terms' sum, for any size.

    For |x| <= 1, each of six steps rounds a coefficient, a product and a sum, all below 3, and a product with x
    enlarges no error: the error is at most 6 * 3 * 3 * 2**-24.
    """
    x = Layout("contiguous", size).make((size,), torch.float32, recipe.DEVICE).clamp(-1, 1)
    expected = sum(c * x.double() ** k for k, c in enumerate(recipe.SERIES.value))
    out = guarded(recipe.exp_series, x)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-6)


def test_refuses(recipe: ModuleType) -> None:
    x = torch.ones(4, 4, device=recipe.DEVICE)
    for wrong in (x.half(), x.T[1:], x[:, ::2]):
        with pytest.raises(AssertionError):
            recipe.exp_series(wrong)


def test_launches(recipe: ModuleType) -> None:
    """The first table: six launches are accepted, and the others name what is wrong."""
    outcomes = recipe.outcomes(recipe.LAUNCHES)
    assert [*outcomes.values()].count("accepted") == 6
    assert outcomes["kernel[(8, 4, 2, 9)](x, 5, 16)"] == "accepted"
    for launch, words in {
        "kernel(x, 5, 16)": "outside of the scope of a kernel",
        "kernel[8](x, 5, 16)": "'int' has no len",
        "kernel[(8,)](x, 5)": "missing 1 required positional argument: 'BLOCK'",
        "kernel[(8,)]([1.0, 2.0], 5, 16)": "argument of type: list",
        "kernel[(8,)](x, 5, 16, num_warp=8)": "num_warp was specified but unrecognised",
    }.items():
        assert words in outcomes[launch]


def test_grid_function_sees_arguments_alone(recipe: ModuleType) -> None:
    """In the interpreter or on a GPU; a compiling launch is asked in another process."""
    seen = []

    def grid(meta: dict[str, object]) -> tuple[int]:
        seen.extend(meta)
        return (1,)

    recipe.kernel[grid](torch.ones(16, device=recipe.DEVICE), 5, BLOCK=16, num_warps=8)
    assert seen == ["x_ptr", "N", "BLOCK"]
    launch = "kernel[lambda meta: {}[' '.join(meta)]](x, 5, 16, num_warps=8)"
    assert recipe.outcomes([launch]) == {launch: "KeyError: 'x_ptr N BLOCK'"}


def test_types_of_arguments(recipe: ModuleType) -> None:
    assert recipe.argument_types() == {
        "a float32 tensor": "*fp32",
        "5": "i32",
        "1": "constexpr",
        "2**31": "i64",
        "2.5": "fp32",
        "True": "u1",
        "None": "constexpr",
        "(5, x)": ("i32", "*fp32"),
        "BLOCK=16": "constexpr",
    }


@pytest.mark.parametrize(
    ("interpret", "expected"),
    [("1", [4, 4, 4, 4]), ("0", {"out_ptr": "*fp32", "BLOCK": "constexpr"})],
    ids=["interpreted", "compiled"],
)
def test_annotations_of_a_file_may_be_strings(tmp_path: Path, interpret: str, expected: object) -> None:
    script = tmp_path / "future.py"
    script.write_text(FUTURE)
    environment = os.environ | {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter has to be on")
def test_quoted_annotation_is_no_constant_when_interpreted(recipe: ModuleType) -> None:
    """If this fails, the interpreter has learned it: change the lesson's sentence."""
    outcome = recipe.outcome(recipe.argument_kernel[(1,)], 5, 16)
    assert "arange's arguments must be of type tl.constexpr" in outcome


def test_surplus_programs_float32(recipe: ModuleType) -> None:
    """With the check they change nothing, on either axis; without it they store past the end."""
    for rows, blocks in ((2, 2), (3, 2), (2, 3), (7, 9)):
        buffer = torch.full((9, 7), -1.0, device=recipe.DEVICE)
        recipe.place_kernel[(rows, blocks)](buffer, 2, 7, BLOCK=4)
        assert buffer[:2].tolist() == [[*range(7)], [*range(10, 17)]]
        assert (buffer[2:] == -1).all()
    recipe.unchecked_kernel[(3, 1)](buffer, 4, BLOCK=4)
    assert buffer.view(-1)[8:12].tolist() == [20, 21, 22, 23]


def test_checks_of_exercises(recipe: ModuleType) -> None:
    """What is to be mended is refused, for one mistake after the other; the page proves the answers."""
    launch, seen = recipe.LAUNCH, []
    for mistake, mended in [("BLOCKS", "BLOCK"), ("x.tolist()", "x"), ("cdiv(N, BLOCK)", "(cdiv(N, meta['BLOCK']),)")]:
        seen.append(recipe.outcomes([launch])[launch])
        launch = launch.replace(mistake, mended)
    assert re.search("BLOCK.*type: list.*BLOCK", " ".join(seen))
    assert recipe.outcomes([launch]) == {launch: "accepted"}
    assert launch == recipe.MENDED
    assert "ambiguous" in recipe.check_leaky_relu()


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("exp_series", lambda normal, M, N: (normal(M * N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a surplus program stores", "if row < rows:", "if row < rows + 9:"),
    ("terms stored without a mask", "acc, mask=offs < N)", "acc)"),
]
