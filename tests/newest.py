"""Every recipe can be imported with the newest Triton, and those that changed run. `make newest` runs this alone.

`tests/newest.txt` names that Triton. It lies over the pinned PyTorch, which asks for an older one, so the rest of the
tests runs without it.
"""

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from op_fixtures import import_file
from project import ROOT
from selection import changed

from triton_gallery.recipes.contents import Recipe, load
from triton_gallery.recipes.needs import missing

RECIPES = load(ROOT / "gallery")
CHANGED = changed(ROOT)  # None: all
LIMIT = 120  # seconds; what has not begun by then is left out, and said
BEGAN = time.monotonic()


def lacks(recipe: Recipe) -> str:
    """Return what a recipe needs and this environment has not; an empty text if it has all."""
    return ", ".join(missing(recipe.path, recipe.text, capability=None))


def test_it_is_the_newest() -> None:
    assert f"triton=={version('triton')}" in (ROOT / "tests" / "newest.txt").read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_import(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := lacks(recipe):
        pytest.skip(f"not tried with the newest Triton, it needs {reason}")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import_file(recipe.path)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if CHANGED is None or r.key in CHANGED], ids=lambda r: r.key)
def test_run(recipe: Recipe, tmp_path: Path) -> None:
    if reason := lacks(recipe):
        pytest.skip(f"not tried with the newest Triton, it needs {reason}")
    if time.monotonic() - BEGAN > LIMIT:
        pytest.skip(f"not tried with the newest Triton: {LIMIT} seconds are over")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / recipe.path.name
    script.write_text(recipe.text)
    ended = subprocess.run(
        [sys.executable, "-B", script], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
