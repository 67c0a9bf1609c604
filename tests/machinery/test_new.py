"""A recipe that `make new` begins passes every check at once, and touches only its own files and the contents."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from triton_gallery.recipe.contents import load
from triton_gallery.recipe.new import create

KEY = "first_steps/root_mean_square"  # lines are longest with a long name
COPIED = [
    ".github",
    "benchmarks",
    "tests",
    "src",
    "gallery/ruff.toml",
    "gallery/GALLERY_HEADER.rst",
    "conf.py",
    "pyproject.toml",
    "LICENSE",
]
COPIED += [f"gallery/first_steps/{name}" for name in ("GALLERY_HEADER.rst", "vector_add.py")]
COPIED += ["docs/glossary.md", "docs/_static", "docs/_templates"]
LINKED = {  # pages that the glossary links to
    "gpu.md": "(program-block-thread)=\n(layouts-drawn)=\n# The GPU in one picture\n",
    "guide/interpreter.md": "# The interpreter\n",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the project, of one recipe."""
    root = tmp_path / "copy"
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    (root / "docs" / "guide").mkdir()
    for name, text in LINKED.items():
        (root / "docs" / name).write_text(f"---\norphan: true\n---\n\n{text}")
    (root / "gallery" / "contents.toml").write_text('first_steps = ["vector_add"]\n')
    (root / "docs" / "index.md").write_text("# Copy\n\n```{toctree}\nrecipes/index\nglossary\n```\n")
    return root


def run(folder: Path, *arguments: str) -> str:
    """Run a module of Python that has to succeed; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def files(root: Path) -> dict[Path, bytes]:
    """Return the files of a folder."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_new_recipe_is_in_style_and_touches_its_own_files(copy: Path) -> None:
    before = files(copy)
    output = run(copy, "triton_gallery", "new", KEY)
    after = files(copy)
    script, test = f"gallery/{KEY}.py", "tests/ops/test_root_mean_square.py"
    op = "src/triton_gallery_ops/root_mean_square.py"
    changed = {str(path.relative_to(copy)) for path in after if after[path] != before.get(path)}
    assert changed == {script, op, test, "gallery/contents.toml"}
    assert all(f"wrote {name}" in output for name in changed)
    assert [recipe.key for recipe in load(copy / "gallery")] == ["first_steps/vector_add", KEY]
    run(copy, "ruff", "check", script, op, test)
    run(copy, "ruff", "format", "--check", script, op, test)
    run(copy, "codespell_lib", script, op, test)
    assert "@" not in (copy / test).read_text().replace("@pytest", "").replace("@given", "").replace("@triton_op", "")


@pytest.mark.thorough
def test_new_recipe_passes_its_checks(copy: Path) -> None:
    """Those that `make test RECIPE=section/name` runs: of the page, of the op, and of a mutant."""
    run(copy, "triton_gallery", "new", KEY)
    run(copy, "triton_gallery", "html")
    output = run(copy, "pytest", "--recipe", KEY, "-n", "0", "-p", "no:cacheprovider", "-v")
    for test in (
        "test_sizes[root_mean_square-float32]",
        "test_script_runs_alone",
        "test_recipe_page_is_whole",
        "test_broken_recipe",
    ):
        (line,) = [line for line in output.splitlines() if "::" + test in line and " PASSED" in line]
        assert line


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("things/one", "there is no section 'things': first_steps"),
        ("first_steps", "'' is no name for a recipe"),
        ("first_steps/2d", "'2d' is no name"),
        ("first_steps/import", "'import' is no name"),
        ("first_steps/vector_add", "there is a recipe called vector_add already"),
        ("first_steps/row_sum", r"test_row_sum\.py is there already"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(copy: Path, key: str, why: str) -> None:
    before = files(copy)
    with pytest.raises(ValueError, match=why):
        create(copy, key)
    assert files(copy) == before


@pytest.mark.parametrize("contents", ['first_steps = ["vector_add"]', 'first_steps = [\n  "vector_add",\n]\n'])
def test_contents_keep_their_form(copy: Path, contents: str) -> None:
    (copy / "gallery" / "contents.toml").write_text(f"# The order.\n{contents}\n")
    create(copy, KEY)
    assert (copy / "gallery" / "contents.toml").read_text().startswith("# The order.\nfirst_steps = [")
    assert [recipe.name for recipe in load(copy / "gallery")] == ["vector_add", "root_mean_square"]
