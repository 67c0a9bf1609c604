"""The recipe Launching a kernel: its op, its table of options, and what it says about launches."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import TRITON
from guard import guarded
from hypothesis import given
from inputs import Layout, sizes

BLOCK = 1024  # of the recipe

# What the prose and the table claim, asked of the launch path in a process without the interpreter and without a GPU.
CLAIMS = """
import json, re, torch, triton, triton.language as tl
from types import SimpleNamespace

target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0))

@triton.jit
def kernel(x_ptr, N):
    offs = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(x_ptr + offs, offs * N, mask=offs < N)

@triton.jit
def any_kernel(value):
    pass

def compile(**options):
    return kernel.warmup(torch.int32, 1000, grid=(1,), **options)

def code(**options):
    return compile(**options).asm["ptx"]

def hint(value):
    source = any_kernel.warmup(value, grid=(1,)).src
    return source.signature["value"], str(source.attrs.get((0,)) or "")

moved = triton.jit(kernel.fn)
moved.starting_line_number += 1
aligned = torch.zeros(64)
print(json.dumps({
    "recorded only": code(warp_size=64) == code(backend_name="other") == code(),
    "flags of the launch": code(launch_pdl=True, launch_cooperative_grid=True) == code(),
    "overwritten": [compile(instrumentation_mode="consan").metadata.instrumentation_mode,
                    compile(max_num_imprecise_acc_default=7).metadata.max_num_imprecise_acc_default],
    "asserts": [code(**options).count("__assertfail") > 0 for options in (
        {}, {"debug": True}, {"debug": True, "sanitize_overflow": False}, {"sanitize_overflow": True})],
    "ptx_version": re.search(r"^.version (.*)", code(ptx_version=80), re.MULTILINE)[1],
    "maxnreg": ".maxnreg 24" in code(maxnreg=24),
    "num_ctas": ".reqnctapercluster 2" in code(num_ctas=2),
    "moved by a line": moved.cache_key != kernel.cache_key,
    "loaded": hasattr(compile(), "n_regs"),
    "hints": [hint(value) for value in (
        1, 0, 16, 17, 2**31 - 1, 2**31, 1.0, 16.0, True, None, aligned, aligned[1:])],
}))
"""

# The same of options that Triton 3.9 brought
NEWER = (
    CLAIMS.partition("def hint")[0]
    + """
def refused(**options):
    try:
        compile(**options)
    except ValueError as error:
        return "SM100+" in str(error)

blackwell = triton.backends.compiler.GPUTarget("cuda", 100, 32)
of_blackwell = triton.compile(compile().src, target=blackwell, options={"clc": True}).asm["ptx"]
print(json.dumps({
    "clc": ["clusterlaunchcontrol.try_cancel" in of_blackwell, refused(clc=True)],
    "min_shared_mem": [compile().metadata.shared, compile(min_shared_mem=4096).metadata.shared],
    "sched4reg": code(sched4reg=True) != code(),
    "overwritten": compile(fpsan_homomorphic_casts=True).metadata.fpsan_homomorphic_casts,
}))
"""
)


@given(size=sizes(BLOCK, 8 * BLOCK))
def test_six_terms(recipe: ModuleType, size: int) -> None:
    """The bound that the recipe derives holds, and the launcher takes any size."""
    x = Layout("contiguous", size).make((size,), torch.float32, recipe.DEVICE).clamp(-1, 1)
    expected = sum(c * x.double() ** k for k, c in enumerate(recipe.SERIES.value))
    out = guarded(recipe.exp_series, x)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-6)


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(4, 4, device=recipe.DEVICE)
    for wrong in (x.half(), x.T[1:], x[:, ::2]):
        with pytest.raises(ValueError, match="contiguous float32"):
            recipe.exp_series(wrong)


def test_every_option_is_explained(recipe: ModuleType) -> None:
    """A new Triton may have new options: explain them in the recipe's OPTIONS."""
    assert recipe.unexplained() == []
    assert set(recipe.options.index) == set(recipe.DEFAULTS)
    assert not recipe.options["default"].str.contains("site-packages").any()


def test_unknown_option_is_shown(
    recipe: ModuleType, load_recipe: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that the recipe does not know gets into its table and does not stop it."""
    options = dataclasses.make_dataclass("Options", [("num_warps", int, 4), ("brand_new", str, "on")])
    make_backend = recipe.triton.compiler.make_backend

    class Newer:
        """The installed backend, with other options when asked for the defaults."""

        def __init__(self, target: object) -> None:
            self.backend = make_backend(target)

        def __getattr__(self, name: str) -> object:
            return getattr(self.backend, name)

        def parse_options(self, given: dict[str, object]) -> object:
            return self.backend.parse_options(given) if given else options()

    monkeypatch.setattr(recipe.triton.compiler, "make_backend", Newer)
    newer = load_recipe("first_steps/launch.py")
    assert newer.unexplained() == ["brand_new"]
    assert list(newer.options.index) == ["num_warps", "brand_new"]
    assert list(newer.options.loc["brand_new"]) == ["on", "not explained here"]


def answers(folder: Path, code: str) -> dict[str, object]:
    """Return what a script prints."""
    script = folder / "claims.py"
    script.write_text(code)
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.skipif(TRITON < (3, 9), reason="these options are of Triton 3.9")
def test_claims_of_newer_options(tmp_path: Path) -> None:
    """The installed Triton does what the table says of them."""
    assert answers(tmp_path, NEWER) == {
        "clc": [True, True],
        "min_shared_mem": [0, 4096],
        "sched4reg": True,
        "overwritten": False,
    }


def test_claims(tmp_path: Path) -> None:
    """The installed Triton does what the recipe says in words only."""
    sixteen = str([["tt.divisibility", 16]])
    assert answers(tmp_path, CLAIMS) == {
        "recorded only": True,
        "flags of the launch": True,
        "overwritten": ["", 2**30],
        "asserts": [False, True, False, False],
        "ptx_version": "8.0",
        "maxnreg": True,
        "num_ctas": True,
        "moved by a line": True,
        "loaded": False,
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


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("exp_series", lambda normal, M, N: (normal(M * N),)),
]
