"""The folder of generated pages: whose figures are whose, and one build at a time."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from project import Project

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.outputs import Output
from triton_gallery.records.page_cache import Pages, Run
from triton_gallery.records.record_store import Records

GPU = Environment("Test GPU", "9.0", 1, None, "13.0", "2", "3", "3.12")


def run_with(figures: list[str]) -> Run:
    """Return a run of one cell that drew these."""
    return Run(GPU, "2026-01-01T00:00:00+00:00", 1.0, [Output("0" * 16, "", figures, None, [])], source_hash="")


def page_of(recipe: Recipe, **figures: bytes) -> dict[str, bytes]:
    """Return the files of a recipe's page, with figures by their names less the suffix."""
    files = {f"{recipe.key}.{kind}": b"" for kind in ("rst", "py", "ipynb")}
    return files | {f"things/images/{name}.png": content for name, content in figures.items()}


def test_a_longer_name_has_its_own_figures(tmp_path: Path) -> None:
    """Neither a page nor a record of `matmul` takes those of `matmul_8bit`."""
    short, long = (Recipe("things", name, tmp_path / f"{name}.py") for name in ("matmul", "matmul_8bit"))
    for recipe in (short, long):
        recipe.path.write_text('"""\nOne\n===\n"""\n\nx = 1\n')
    pages, records = Pages(tmp_path / "recipes"), Records(tmp_path / "_records")
    drawn = {recipe: f"sphx_glr_{recipe.name}_001.png" for recipe in (short, long)}
    for recipe, name in drawn.items():
        run = pages.install(recipe, page_of(recipe, **{Path(name).stem: b"first"}), run_with([name]))
        assert run.failure is None
        records.write(recipe, run_with([name]), {name: b"first"}, None)
    assert pages.figures(short) == {drawn[short]: b"first"}
    assert pages.figures(long) == {drawn[long]: b"first"}
    pages.install(short, page_of(short), run_with([]))
    records.write(short, run_with([]), {}, None)
    assert pages.figures(short) == {}
    assert pages.figures(long) == {drawn[long]: b"first"}
    (kept,) = tmp_path.glob("_records/**/*.png")
    assert kept.name.startswith("sphx_glr_matmul_8bit_001_")
    pages.prune([short])
    assert not list((tmp_path / "recipes").glob("**/*matmul_8bit*"))


def test_waiting_build_says_so(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(good="print('good')")
    pages = project.root / "docs" / "recipes"
    pages.mkdir()
    other = os.open(pages, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    build = project.start()
    try:
        assert build.stdout
        message = build.stdout.readline()
        assert message.startswith("waiting for another build that has ")
        assert message.endswith("docs/recipes\n")
        assert build.poll() is None
    finally:
        os.close(other)
    output, _ = build.communicate(timeout=120)
    assert build.returncode == 0, output
    assert "waiting" not in output


TWICE = """
from sphinx.application import Sphinx

for name in ("one", "other"):
    Sphinx("docs", ".", name, name, "dummy", status=None)
"""


def test_builds_in_one_process_do_not_wait_for_each_other(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(good="print('good')")
    subprocess.run([sys.executable, "-c", TWICE], cwd=project.root, env=project.environment, check=True, timeout=90)
