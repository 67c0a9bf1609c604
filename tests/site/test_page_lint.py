"""Recipes are of the form of a recipe."""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from page_lint import bad_phrases, faults, jitted, length, width
from project import ROOT

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.needs import missing
from triton_gallery.recipe.new import create
from triton_gallery.recipe.op import op_of
from triton_gallery.records.page_cache import Run
from triton_gallery.records.record_store import Records

RECIPES = load(ROOT / "gallery")
# Pages that have not taken the form yet. Nothing is added here.
TO_COME = {
    "first_steps/vector_add",
    "first_steps/row_sum",
    "first_steps/strides",
    "first_steps/launch",
    "first_steps/what_a_launch_compiles",
    "first_steps/debugging",
    "first_steps/benchmarking",
    "first_steps/autotune",
    "pytorch/triton_op",
    "pytorch/subsystems",
    "pytorch/aot_inductor",
    "pytorch/cuda_graphs",
}
OF_FORM = [recipe for recipe in RECIPES if recipe.key not in TO_COME]
each_of_form = pytest.mark.parametrize("recipe", OF_FORM, ids=lambda recipe: recipe.key)
PROSE = [
    *(ROOT / "gallery").rglob("*.py"),
    *(ROOT / "gallery").rglob("*.rst"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "guide").glob("*.md"),
    *(ROOT / "src" / "triton_gallery_ops").glob("*.*"),
    *(ROOT / "src" / "triton_gallery" / "recipe" / "template").glob("*.txt"),
]
ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


@each_of_form
def test_form(recipe: Recipe) -> None:
    assert faults(recipe) == []
    if length(recipe) > 600:
        warnings.warn(f"{recipe.key} has {length(recipe)} lines: is it two pages?", stacklevel=1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_lesson_has_a_kernel_of_its_own(recipe: Recipe) -> None:
    """What it imports is the hardened op; the kernel that it explains stands in it."""
    assert jitted(recipe.path.read_text())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_interpreter_is_chosen_before_triton_is_imported(recipe: Recipe) -> None:
    """An op imports Triton too."""
    script = recipe.path.read_text()
    first = re.search(r"(?m)^(import triton$|import triton\.|from triton[. ]|from triton_gallery_ops)", script)
    assert first
    assert "TRITON_INTERPRET" in script[: first.start()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_width(recipe: Recipe) -> None:
    assert width(recipe.path.read_text()) <= 80


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_each_cell_begins_after_an_empty_line(recipe: Recipe) -> None:
    """Otherwise its page shows the marker, and its heading as text."""
    lines = recipe.path.read_text().splitlines()
    assert [number for number, line in enumerate(lines) if line == "# %%" and lines[number - 1]] == []


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_english(path: Path) -> None:
    assert bad_phrases(path) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""It gives the\nsame bits each time."""\nsame_bits = "the same bits"\n', ["x.py:2: same bits"]),
        ("x = 1  # past the end\n# A lane that sticks\n# out over the end\n", ["x.py:2: sticks out"]),
        ("def f():\n    print(1)\n    # The mask stands here.\n    # It stands for a row.\n", ["x.py:3: stands"]),
        ("# The page does not\n#\n# show why.\n", []),
    ],
)
def test_bad_phrases_are_found(tmp_path: Path, text: str, found: list[str]) -> None:
    (tmp_path / "x.py").write_text(text)
    assert [phrase.partition(";")[0] for phrase in bad_phrases(tmp_path / "x.py")] == found


def test_list_of_those_to_come_shrinks() -> None:
    assert {recipe.key for recipe in RECIPES} >= TO_COME, "one of these is no more"
    done = [recipe.key for recipe in RECIPES if recipe.key in TO_COME and not faults(recipe)]
    assert done == [], "these have taken the form: take them off the list"


@each_of_form
def test_no_cell_prints_an_address(recipe: Recipe, run_of_page: Callable[[str], Run | None]) -> None:
    """It differs from run to run, and says nothing."""
    run = run_of_page(recipe.key)
    shown = [*(run.outputs if run else []), *(o for r in Records(ROOT / "docs/_records").of(recipe) for o in r.outputs)]
    assert [output.text for output in shown if ADDRESS.search(output.text)] == []


IMPORT = """
import contextlib, json, os, random, sys, warnings
import matplotlib.pyplot, numpy, pandas, torch, torch._inductor.compile_fx, triton, triton.language

torch._inductor.codecache.cache_dir()  # PyTorch notes it in the environment
with contextlib.suppress(ImportError):
    import jax  # it draws random numbers from NumPy
with contextlib.suppress(ImportError):
    import transformers.modeling_utils  # it filters warnings

SET = {"TRITON_INTERPRET", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"}  # they have to be set before an import

def state():
    return {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's": repr(numpy.random.get_state()),
        "Python's": repr(random.getstate()),
        "warnings": repr(warnings.filters),
        "environment": {name: value for name, value in os.environ.items() if name not in SET},
        "defaults": [repr(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads()],
    }

changed = {}
for name in sys.argv[1:]:
    before = state()
    __import__(name)
    changed[name] = [what for what, now in state().items() if now != before[what]]
print(json.dumps(changed))
"""


@pytest.mark.anywhere
def test_import_leaves_the_process_as_it_was() -> None:
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    here = [recipe for recipe in OF_FORM if not missing(recipe.path, recipe.text, capability)]
    names = [recipe.path.stem for recipe in here]
    folders = [str(path) for path in (ROOT / "gallery").iterdir() if path.is_dir()]
    program = f"import os, sys; sys.dont_write_bytecode = True; sys.path += {folders}\n"
    program += "os.environ['TRITON_INTERPRET'] = '1'\n" if capability is None else ""
    result = subprocess.run(
        [sys.executable, "-c", program + IMPORT, *names], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {name: [] for name in names}


@pytest.fixture
def square(tmp_path: Path) -> Recipe:
    """Return a new recipe."""
    gallery = tmp_path / "gallery" / "things"
    gallery.mkdir(parents=True)
    (tmp_path / "tests" / "ops").mkdir(parents=True)
    (gallery / "GALLERY_HEADER.rst").touch()
    (gallery / "first.py").touch()
    (gallery.parent / "contents.toml").write_text('things = ["first"]\n')
    create(tmp_path, "things/square")
    return Recipe("things", "square", gallery / "square.py")


def test_new_recipe_is_of_the_form(square: Recipe) -> None:
    assert faults(square) == []
    op = op_of(square)
    assert op is not None
    assert op.names[0] == "SQUARE_NAMESPACE"
    assert op.imports[0] == "import torch"
    assert not any("pandas" in line or "os" in line.split() for line in op.imports)


KERNEL = "    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)\n"
BROKEN = {
    "its first kernel has 26 statements": (KERNEL, KERNEL + 22 * "    offs = offs\n"),
    "its first kernel has 5 constants": (
        "plain_kernel(x_ptr, out_ptr, N, BLOCK: tl",
        "plain_kernel(x_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK: tl",
    ),
    "it has no kernel of its own": ("@triton.jit\ndef plain_kernel", "def plain_kernel"),
    "its first check stands in line 2": ("# In PyTorch\n", "# In PyTorch\n" + 150 * "#\n"),
    "no cell under the heading": ("# The op\n# ------\n", "# Our op\n# ------\n"),
    "does not declare dtypes": ("# backward = true\n", ""),
    r"its op has 2\d\d statements, 210 are allowed": ("SQUARE_BLOCK = 1024\n", 210 * "SQUARE_BLOCK = 1024\n"),
    r"its op uses \['DEVICE'\]": ("x = x.contiguous()", "x = x.to(DEVICE)"),
    r"its op defines \['helper'\]": ("SQUARE_BLOCK = 1024", "SQUARE_BLOCK = 1024\nhelper = 1"),
    "no constant for its namespace": ("SQUARE_NAMESPACE", "SQUARE_SPACE"),
    "does not take float64": ('"float32", "float64"', '"float32"'),
    r"_square_more\S+ outside": ("# %%\n# Proof\n", "# %%\n# More of it.\n\n_square_more = 1\n\n# %%\n# Proof\n"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_form_is_checked(square: Recipe, fault: str) -> None:
    old, new = BROKEN[fault]
    (file,) = (path for path in (square.path, square.ops / "square.py") if old in path.read_text())
    file.write_text(file.read_text().replace(old, new))
    assert re.search(fault, "\n".join(faults(square)))
