"""Where the project is, small projects of its kind to test the machinery on, and what becomes of their processes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server
import psutil

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "triton_gallery_ops"
NOT_OPS = {"check_compiles", "transformers"}  # a command, and what puts ops into models
OPS = sorted({path.stem for path in SOURCES.glob("[a-z]*.py")} - NOT_OPS)
# A recipe that starts three children, two of which leave its session and one its parent, and notes all process numbers.
LEAVES = """
import os, subprocess, time

child = subprocess.Popen(["sleep", "1000"])
apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
daemon = subprocess.check_output("setsid sleep 1000 >/dev/null 2>&1 & echo $!", shell=True, text=True)
with open({notes!r}, "w") as notes:
    notes.write(f"{{os.getpid()}} {{child.pid}} {{apart.pid}} {{daemon}}")
"""
HANGS = LEAVES + "time.sleep(1000)\n"


@dataclass
class Project:
    """A project of the same settings as this one, with other recipes."""

    root: Path
    code = "from triton_gallery.cli import main; exit(main())"  # the project's command

    def write(self, **recipes: str) -> None:
        """Write recipes, by name, into the one section; `text` is the code below the title."""
        for name, text in recipes.items():
            title = name.replace("_", " ")
            (self.root / "gallery" / "things" / f"{name}.py").write_text(f'"""\n{title}\n{"=" * 30}\n"""\n\n{text}\n')
        names = sorted(path.stem for path in (self.root / "gallery" / "things").glob("*.py"))
        (self.root / "gallery" / "contents.toml").write_text(f"things = {names}\n")

    def copy(self, root: Path) -> "Project":
        """Return a copy of it in another folder."""
        return type(self)(Path(shutil.copytree(self.root, root, symlinks=True)))

    def remove(self, name: str) -> None:
        """Remove a recipe."""
        (self.root / "gallery" / "things" / f"{name}.py").unlink()
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it needs."""
        variables = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
        return {**os.environ, **variables}  # Sphinx colours what it prints where CI is set

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run a command of the project; return the exit status and what the terminal showed."""
        return fork_server.run(self.code, [*arguments], self.root, {**self.environment, **variables})

    def start(self) -> subprocess.Popen[str]:
        """Begin to build the site."""
        return subprocess.Popen(
            [sys.executable, "-c", self.code, "html"],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def build(self) -> tuple[int, str]:
        """Build the site; return the exit status and what the terminal showed."""
        return self.run("html")

    def page(self, name: str) -> str:
        """Return the built page of a recipe."""
        return whole_page(self.root / "_build" / "html" / "recipes" / "things" / f"{name}.html")


def deferred(script: Path) -> Any:
    """Return what a script file hands over to `deferred.load`."""
    return json.loads(script.read_text().removeprefix("deferred.loaded(").removesuffix(");\n"))


def whole_page(page: Path) -> str:
    """Return the text of a page with the content of its folds that a browser loads later."""
    text, script = page.read_text(), page.with_suffix(".folded.js")
    contents = deferred(script) if script.is_file() else []
    return re.sub(r'<p class="deferred">.*?#fold-(\d+)".*?</p>', lambda link: contents[int(link[1])], text)


def wait_until(true: Callable[[], bool], log: Callable[[], str] = lambda: "it did not come true") -> None:
    """Wait for a condition, a minute at the most; then show the log."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, log()
        time.sleep(0.05)


def without_make() -> dict[str, str]:
    """Return the environment without the variables that a make which runs the tests hands on to one within them."""
    handed_on = "MAKE|MFLAGS|VENV|PYTHON|THOROUGH|RECIPE"
    return {name: value for name, value in os.environ.items() if not re.match(handed_on, name)}


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
