"""What in `conf.py` and in the environment has recipes executed again, and what has not."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from project import Project

from triton_gallery.execute import settings
from triton_gallery.execute.execute import make_tasks
from triton_gallery.recipe.contents import load


@pytest.fixture
def hashes(make_project: Callable[..., Project]) -> Callable[..., tuple[str, str]]:
    """Return a function that tells the hashes of a recipe's execution and of its page, with more lines of settings."""
    project = make_project()
    project.write(one="print('one')")
    conf = (project.root / "conf.py").read_text()

    def hash_with(lines: str = "") -> tuple[str, str]:
        (project.root / "conf.py").write_text(f"{conf}{lines}\n")
        (task,) = make_tasks(load(project.root / "gallery"), settings.read(project.root))
        return task.source_hash, task.page_hash

    return hash_with


@pytest.mark.parametrize(
    "lines",
    [
        "# a comment",
        'html_theme_options["top_of_page_buttons"] = ["view"]',
        "recipe_time_limit = 1; recipe_memory_limit = 0.1",
        'sphinx_gallery_conf["subsection_order"] = []',
    ],
)
def test_what_shows_and_limits_recipes_does_not_shape_them(hashes: Callable[..., tuple[str, str]], lines: str) -> None:
    assert hashes(lines) == hashes()


def test_what_shapes_recipes_has_them_executed_again(hashes: Callable[..., tuple[str, str]]) -> None:
    code, _ = hashes()
    assert hashes('sphinx_gallery_conf["image_scrapers"] = ("matplotlib",)')[0] != code


@pytest.mark.parametrize("package", ["sphinx", "sphinx-gallery", "matplotlib", "numpy", "pandas"])
def test_other_version_has_pages_laid_out_again(
    hashes: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    code, page = hashes()
    metadata = tmp_path / f"{package.replace('-', '_')}-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    assert hashes()[0] == code
    assert hashes()[1] != page
