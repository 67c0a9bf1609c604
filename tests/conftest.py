"""What all tests share: where the project is, and a small project made for one test."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a test run the tests of a recipe on a changed copy of the gallery."""
    parser.addoption(
        "--gallery", type=Path, default=ROOT / "gallery", help="the gallery to test (default: %(default)s)"
    )


@pytest.fixture(scope="session")
def gallery(pytestconfig: pytest.Config) -> Path:
    """Return the gallery under test."""
    return pytestconfig.getoption("--gallery")


@dataclass
class Project:
    """A project of the same settings as this one, with other recipes."""

    root: Path

    def write(self, **recipes: str) -> None:
        """Write recipes, by name, into the one section; `text` is the code below the title."""
        for name, text in recipes.items():
            title = name.replace("_", " ")
            (self.root / "gallery" / "things" / f"{name}.py").write_text(f'"""\n{title}\n{"=" * 30}\n"""\n\n{text}\n')
        names = sorted(path.stem for path in (self.root / "gallery" / "things").glob("*.py"))
        (self.root / "gallery" / "contents.toml").write_text(f"things = {names}\n")

    def remove(self, name: str) -> None:
        """Remove a recipe."""
        (self.root / "gallery" / "things" / f"{name}.py").unlink()
        self.write()

    def start(self) -> subprocess.Popen[str]:
        """Begin to build the site."""
        return subprocess.Popen(
            [sys.executable, "-m", "triton_gallery", "html"],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def build(self) -> tuple[int, str]:
        """Build the site; return the exit status and what the terminal showed."""
        process = self.start()
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def page(self, name: str) -> str:
        """Return the built page of a recipe."""
        return (self.root / "_build" / "html" / "recipes" / "things" / f"{name}.html").read_text()


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Project]:
    """Return a function that makes a `Project`; its argument is the time limit in seconds."""

    def make(limit: int = 60) -> Project:
        root = tmp_path_factory.mktemp("project")
        shutil.copy(ROOT / "conf.py", root)
        with open(root / "conf.py", "a") as conf:
            conf.write(f"\nrecipe_time_limit = {limit}\n")
        (root / "src").symlink_to(ROOT / "src")
        things = root / "gallery" / "things"
        things.mkdir(parents=True)
        (things.parent / "GALLERY_HEADER.rst").write_text("Recipes\n=======\n")
        (things / "GALLERY_HEADER.rst").write_text("Things\n======\n")
        (root / "docs").mkdir()
        (root / "docs" / "_static").symlink_to(ROOT / "docs" / "_static")
        (root / "docs" / "index.md").write_text("# Small\n\n```{toctree}\nrecipes/index\n```\n")
        return Project(root)

    return make


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the whole site with plain `sphinx-build`, warnings being errors; return its folder, `…/gallery`."""
    out = tmp_path_factory.mktemp("served") / "gallery"
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-c", ".", "-E", "-W", "--keep-going", "-n", "docs", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout
    return out
