"""Every recipe's benchmark fits into the memory of a GPU of 12 GB."""

import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from triton_gallery.recipe.contents import Recipe, load

# Without a GPU these stop on the way, or take minutes. They are small, but for JAX's, which test_jax_call.py has.
OTHERS = {"pytorch/cuda_graphs", "xla/jax_call", "first_steps/benchmarking"}
RECIPES = [recipe for recipe in load(ROOT / "gallery") if "perf_report" in recipe.text and recipe.key not in OTHERS]


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_benchmark_fits(recipe: Recipe, gallery: Path) -> None:
    """It holds ten gigabytes at most; the rest is for the CUDA context, and for what cells before it left."""
    script = gallery / f"{recipe.key}.py"
    command = [sys.executable, Path(__file__).with_name("peak_memory.py"), script]
    process = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert 1e6 < int(process.stdout.split()[-1]) < 10e9
