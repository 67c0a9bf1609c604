"""Every recipe stands alone, can be imported, works as a notebook, and keeps to the form of a recipe."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from project import ROOT
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import BLOCK, declaration
from triton_gallery.recipe.needs import ORDINARY, missing, packages
from triton_gallery.records.page_cache import Run
from triton_gallery.site.notebook import OURS

RECIPES = load(ROOT / "gallery")
CAPABILITY = "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)


def lacks(recipe: Recipe) -> list[str]:
    """Return what the recipe needs and is not here."""
    return missing(recipe.path, recipe.text, CAPABILITY)


each_executable_recipe = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=pytest.mark.skipif(bool(lacks(recipe)), reason=f"lacks {lacks(recipe)}"))
        for recipe in RECIPES
    ],
    ids=lambda recipe: recipe.key,
)


FIRST = {recipe.section: recipe for recipe in reversed(RECIPES) if not lacks(recipe)}  # of each section


def run_python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with nothing in the environment but where programs are."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "MPLBACKEND": "agg"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def read_notebook(site: Path, recipe: Recipe) -> nbformat.NotebookNode:
    """Return a recipe's notebook as it is offered for download."""
    (path,) = site.glob(f"_downloads/*/{recipe.name}.ipynb")
    return nbformat.read(path, as_version=4)


@each_executable_recipe
def test_page_is_of_a_run_that_passed(recipe: Recipe, site: Path, run_of_page: Callable[[str], Run | None]) -> None:
    """The page was made by executing the script as it is now: it ran alone, to its end, and showed something."""
    run = run_of_page(recipe.key)
    assert run, "no run of the present code passed here"
    assert any(run.outputs), "the recipe shows nothing"


def write_script(recipe: Recipe, folder: Path) -> int:
    """Write a recipe's script as readers take it."""
    return (folder / recipe.path.name).write_text(recipe.text)


@pytest.mark.thorough
@pytest.mark.anywhere
@each_executable_recipe
def test_script_runs_alone(recipe: Recipe, tmp_path: Path) -> None:
    write_script(recipe, tmp_path)
    result = run_python([recipe.path.name], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout, "the recipe shows nothing"


@pytest.mark.thorough
@pytest.mark.anywhere
@each_executable_recipe
def test_import_is_quick_and_quiet(recipe: Recipe, tmp_path: Path) -> None:
    write_script(recipe, tmp_path)
    result = run_python(
        [
            "-c",
            f"import torch, time as t; start = t.process_time(); import {recipe.name}; print(t.process_time() - start)",
        ],
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    (seconds,) = result.stdout.split()
    # of the processor: whatever else runs, those of the script
    assert float(seconds) < 4


AFTER_TRITON = """
import json, sys, torch, triton.language

said = {}
for name in sys.argv[1:]:
    try:
        __import__(name)
    except RuntimeError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.mark.anywhere
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is interpreted")
def test_import_after_triton_says_what_to_do(tmp_path: Path) -> None:
    names = [recipe.name for recipe in RECIPES if not lacks(recipe) and write_script(recipe, tmp_path)]
    result = run_python(["-c", AFTER_TRITON, *names], tmp_path)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert list(said) == names
    assert all("TRITON_INTERPRET=1" in message for message in said.values()), said


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", FIRST.values(), ids=FIRST)
def test_notebook_runs(recipe: Recipe, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first notebook of each section runs; all have the code of their scripts, which run above."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    notebook = read_notebook(site, recipe)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs, "the notebook shows nothing"


@each_recipe
def test_notebook_has_the_code_of_the_script(recipe: Recipe, site: Path) -> None:
    notebook = [cell for cell in read_notebook(site, recipe).cells if OURS not in cell.metadata.get("tags", [])]
    cells = [cell.source for cell in notebook if cell.cell_type == "code"]
    assert len(cells) > 3
    title, *code = ast.parse(recipe.text).body
    assert isinstance(title.value, ast.Constant)
    assert [ast.dump(node) for node in ast.parse("\n".join(cells)).body] == [ast.dump(node) for node in code]


@each_recipe
def test_notebook_has_no_raw_markup(recipe: Recipe, site: Path) -> None:
    for cell in read_notebook(site, recipe).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            assert not re.search(r"^\.\. |:\w+:`|^\s*:\w+:", prose, flags=re.MULTILINE), cell.source
        elif OURS not in cell.metadata.get("tags", []):
            assert "# ///" not in cell.source


@each_recipe
def test_notebook_keeps_what_is_drawn(recipe: Recipe, site: Path) -> None:
    """sphinx-gallery ends a block at the first line that is indented less than its first one."""
    _, blocks = split_code_and_text_blocks(str(recipe.path))
    prose = "\n".join(block.content for block in blocks if block.type == "text") + "\n"
    drawn = re.findall(r"^ *\.\. code-block:: \w+\n((?:\n| +.*\n)+)", prose, flags=re.MULTILINE)
    cells = [cell.source for cell in read_notebook(site, recipe).cells if cell.cell_type == "markdown"]
    kept = re.findall(r"^```\w+\n(.*?)\n```$", "\n".join(cells), flags=re.DOTALL | re.MULTILINE)
    assert kept == [textwrap.dedent(block).strip("\n") for block in drawn]


@each_recipe
def test_dependencies_are_named(recipe: Recipe) -> None:
    source = recipe.text
    assert BLOCK.match(source), "no PEP 723 block at the top"
    declared = declaration(recipe.path, source)
    assert str(declared.pythons) == ">=3.11"
    assert {package.name for package in declared.packages} >= {"torch", "triton"}


def test_recipes_time_alike() -> None:
    """There is one clock: a recipe that times imports it, and has its text on its page."""
    for recipe in RECIPES:
        script = recipe.path.read_text()
        assert not re.search(r"^def (gpu_time|rate_table)\(", script, re.MULTILINE), recipe.key
        assert ("import gpu_time" in script) == ("def gpu_time(" in recipe.text), recipe.key


@each_recipe
def test_imports_only_what_a_reader_has(recipe: Recipe) -> None:
    source = recipe.text
    declared = {re.match(r"[\w-]+", package)[0].replace("-", "_") for package in packages(recipe.path, source)}
    allowed = ORDINARY | declared | sys.stdlib_module_names
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert {name.partition(".")[0] for name in names} <= allowed


@each_recipe
def test_asserts_before_it_measures(recipe: Recipe) -> None:
    text = recipe.text
    assert "torch.testing.assert_close(" in text
    kernel = max(text.find("@triton.jit"), 0)  # what PyTorch takes may be measured before
    for timed in ("perf_report(", "= gpu_time("):
        if timed in text[kernel:]:
            assert text.index("torch.testing.assert_close(") < text.index(timed, kernel)


def test_ops_have_one_namespace_and_names_of_their_own() -> None:
    """Recipes can be imported side by side: none takes the other's op away."""
    qualified = r'"([a-z]\w*::\w+)"'
    names = [name for recipe in RECIPES for name in set(re.findall(qualified, recipe.text))]
    assert names
    assert [name for name in names if not name.startswith("triton_gallery::")] == []
    assert [name for name, count in Counter(names).items() if count > 1] == []
