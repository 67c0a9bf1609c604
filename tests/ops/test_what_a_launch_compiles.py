"""The recipe What a launch compiles: its tables, and what it says in words about keys and options."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import TRITON
from guard import guarded
from hypothesis import given
from inputs import Layout, sizes

# What the prose and the table claim, asked of the launch path in a process without the interpreter and without a GPU.
CLAIMS = """
import json, re, torch, triton, triton.language as tl
from types import SimpleNamespace

target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0))
ADDED = tl.constexpr(1)

@triton.jit
def helper(x):
    return x + ADDED

@triton.jit
def kernel(x_ptr, N):
    offs = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(x_ptr + offs, helper(offs * N), mask=offs < N)

@triton.jit
def dot_kernel(x_ptr):
    offs = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(x_ptr + offs, tl.dot(x, x))

@triton.jit
def any_kernel(value):
    pass

def compile(**options):
    return kernel.warmup(torch.int32, 1000, grid=(1,), **options)

def code(**options):
    return compile(**options).asm["ptx"]

def dot(**options):
    return "inputPrecision = tf32" in dot_kernel.warmup(torch.float32, grid=(1,), **options).asm["ttir"]

def hint(value):
    source = any_kernel.warmup(value, grid=(1,)).src
    return source.signature["value"], str(source.attrs.get((0,)) or "")

def key(added=1, line=0):
    global ADDED
    ADDED = tl.constexpr(added)
    helper.hash = None
    again = triton.jit(kernel.fn)
    again.starting_line_number += line
    return again.cache_key

aligned = torch.zeros(64)
print(json.dumps({
    "recorded only": code(warp_size=64) == code(backend_name="other") == code(),
    "flags of the launch": code(launch_pdl=True, launch_cooperative_grid=True) == code(),
    "overwritten": [compile(instrumentation_mode="consan").metadata.instrumentation_mode,
                    compile(max_num_imprecise_acc_default=7).metadata.max_num_imprecise_acc_default],
    "asserts": [code(**options).count("__assertfail") > 0 for options in (
        {}, {"debug": True}, {"debug": True, "sanitize_overflow": False}, {"sanitize_overflow": True})],
    "tf32 in tl.dot": [dot(), dot(default_dot_input_precision="ieee"),
                            dot(allowed_dot_input_precisions=("ieee",))],
    "keys": [key() == key(), key() == key(line=1), key() == key(added=2)],
    "hints": [hint(value) for value in (
        1, 0, 16, 17, 2**31 - 1, 2**31, 1.0, 16.0, True, None, aligned, aligned[1:])],
}))
"""
# Options that the lesson's table leaves out
UNTRIED = {
    "allowed_dot_input_precisions",
    "arch",
    "backend_name",
    "default_dot_input_precision",
    "deprecated_fp8_dot_operand_dtypes",
    "fpsan_homomorphic_casts",
    "instrumentation_mode",
    "max_num_imprecise_acc_default",
    "supported_fp8_dtypes",
}
NEWER = ["min_shared_mem=65536", "sched4reg=True", "clc=True"]  # options of Triton 3.9


@given(size=sizes(1024, 8 * 1024))
def test_scale(recipe: ModuleType, size: int) -> None:
    """The kernel that all is shown with is right."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        recipe.scale_kernel[(-(-size // 1024),)](x, out, 3.0, size, 1024)
        return out

    x = Layout("contiguous", size).make((size,), torch.float32, recipe.DEVICE)
    torch.testing.assert_close(guarded(scale, x), 3 * x, rtol=0, atol=0)


def test_what_compiles_again(recipe: ModuleType) -> None:
    """Five changes do not, and the others do."""
    assert [*recipe.changes().values()] == [False] * 2 + [True] + [False] * 3 + [True] * 7


def test_loads(recipe: ModuleType) -> None:
    """Wide loads want both a length and an address that 16 divides; without specialization there are none."""
    table, off = recipe.loads({}), recipe.loads({"do_not_specialize": ["N"]})
    assert [case for case in table if "16 bytes" in table[case]] == ["N = 1008", "N = 2**31"]
    assert not any("16 bytes" in found for found in off.values())
    kernels = "kernels, N = 1 to 1000"
    assert [table[kernels], off[kernels]] == ["3", "1"]


# From Triton 3.7 on, asserting keeps loads from being asynchronous.
LOADS_IN_TURN = r"shared 8192 -> 4096, cp\.async 6 -> 0, " if TRITON >= (3, 7) else ""


def test_options(recipe: ModuleType) -> None:
    """Each option does in the compiled code what the lesson says that it is for."""
    effects = {option: effect for option, (_, effect) in recipe.effects([*recipe.OPTIONS]).items()}
    for option, effect in {
        "num_warps=8": r"threads 128 -> 256, .*fma 8 -> 4",
        "num_stages=1": r"shared 8192 -> 4096, cp\.async 6 -> 0",
        "num_ctas=2": r"cluster 1 -> 2",
        "maxnreg=32": r"registers \d+ -> 32, stack 0 -> [1-9]",
        "enable_fp_fusion=False": r"fma 8 -> 0$",
        "enable_reflect_ftz=False": r"rsqrt approx\.ftz\.f32 -> approx\.f32$",
        "extern_libs={'libdevice': mine}": r"rsqrt approx\.ftz\.f32 -> none$",
        "debug=True": r"^registers \S+ -> \S+, " + LOADS_IN_TURN + r"assertions 0 -> 9$",
        "debug=True, sanitize_overflow=False": r"assertions 0 -> [1-8]$",
        "ptx_version=80": r"PTX \S+ -> 8\.0$",
        "ptx_options='--opt-level=0'": r"registers \d+ -> [5-9]\d$",
        "ir_override=ptx": r"registers \d+ -> 32, stack 0 -> [1-9]",
        "launch_pdl=True": r"launch_pdl False -> True$",
        "launch_cooperative_grid=True": r"cooperative False -> True$",
        "stream=0": r"^stream option is deprecated$",
        "device=0": r"^device option is deprecated$",
        "warmup=True": r"^got multiple values for keyword",
    }.items():
        assert re.search(effect, effects.pop(option)), option
    for option in NEWER:
        assert ("not in Triton" in effects.pop(option)) == (TRITON < (3, 9))
    assert {*effects.values()} == {"nothing"}


def test_every_option_is_tried(recipe: ModuleType) -> None:
    """A new Triton may have new options: try them in the lesson."""
    triton = recipe.triton
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    tried = {name for option in recipe.OPTIONS for name in re.findall(r"(\w+)=", option)}
    assert vars(backend.parse_options({})).keys() <= tried | UNTRIED


@pytest.mark.skipif(TRITON < (3, 9), reason="these options are of Triton 3.9")
def test_newer_options(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The lesson has these lines as text, because the Triton that executes it has not the options."""
    recipe.show_options({option: recipe.OPTIONS[option] for option in NEWER})
    lines = capsys.readouterr().out.splitlines()
    assert "\n".join(f"#     {line}" for line in lines) in Path(recipe.__file__).read_text()


def test_claims(tmp_path: Path) -> None:
    """The installed Triton does what the recipe says in words only."""
    script = tmp_path / "claims.py"
    script.write_text(CLAIMS)
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    sixteen = str([["tt.divisibility", 16]])
    assert json.loads(result.stdout) == {
        "recorded only": True,
        "flags of the launch": True,
        "overwritten": ["", 2**30],
        "asserts": [False, True, False, False],
        "tf32 in tl.dot": [True, True, False],
        "keys": [True, False, False],
        "hints": [
            ["constexpr", ""],
            ["i32", sixteen],
            ["i32", sixteen],
            ["i32", ""],
            ["i32", ""],
            ["i64", sixteen],
            ["fp32", ""],
            ["fp32", ""],
            ["u1", ""],
            ["constexpr", ""],
            ["*fp32", sixteen],
            ["*fp32", ""],
        ],
    }


def test_checks_of_exercises(recipe: ModuleType) -> None:
    """They tell a right answer from a wrong one, and from none; the page proves the answers."""
    assert recipe.check_count(recipe.count) == "not solved yet"
    assert recipe.check_count(lambda lengths: len({*lengths})) == "wrong"
    assert recipe.check_lengths(recipe.lengths_at_start) == "not solved yet"
    assert recipe.check_lengths(lambda: [16, 17]) == "wrong"


def test_warm_up(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """What the server calls covers all lengths and steps, and not other addresses."""
    recipe.serve()
    assert [re.findall(r"\d+", line)[-1] for line in capsys.readouterr().out.splitlines()] == ["3", "3", "4"]
