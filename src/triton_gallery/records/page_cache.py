"""The generated pages under `docs/recipes`, and what is known of the run that made each.

Beside a page's files lies `<recipe>.run.json`, which holds a `Run`. Written last: without it no page is done.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import field

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.outputs import Execution

RUN_SUFFIX = ".run.json"

_locking = threading.Lock()  # for what follows
_locked: set[tuple[int, int]] = set()  # the folders that this process has, by device and inode


def figure_files(folder: Path, name: str) -> Iterable[Path]:
    """Return a recipe's figures in a folder, as sphinx-gallery numbers them: of `matmul`, none of `matmul_8bit`."""
    return folder.glob(f"sphx_glr_{name}_[0-9][0-9][0-9].*")


class Run(Execution, frozen=True, kw_only=True):
    """How the execution of one recipe went.

    Attributes:
        source_hash: that of the code that was executed, and of the files that it found beside it.
        failure: None, or in one line what happened.
        detail: the traceback or the last output of a run that failed.
        missing: what the recipe needs and did not find; then it was not executed, and its cells put out nothing.
        laid_out: each code cell's output as sphinx-gallery laid it out.
        page_hash: that of what shaped the page besides.
    """

    source_hash: str = field(name="code")
    failure: str | None = None
    detail: str = ""
    missing: list[str] = field(default_factory=list)
    laid_out: list[str] = field(default_factory=list)
    page_hash: str = field(default="", name="page")

    def passed(self, source_hash: str, environments: Sequence[Environment]) -> bool:
        """Whether it went well, with this source, in one of these environments."""
        return self.failure is None and self.source_hash == source_hash and self.environment in environments


class Pages:
    """The folder of generated pages."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, `docs/recipes`; it need not exist yet."""
        self.folder = folder

    def run_file(self, key: str) -> Path:
        """Return the path of a recipe's run, whether or not there is one."""
        return self.folder / (key + RUN_SUFFIX)

    def notebook(self, recipe: Recipe) -> Path:
        """Return the path of a recipe's notebook."""
        return self.folder / f"{recipe.key}.ipynb"

    def figures(self, recipe: Recipe) -> dict[str, bytes]:
        """Return the figures on a recipe's page, by their file names."""
        pictures = self.folder / recipe.section / "images"
        return {path.name: path.read_bytes() for path in figure_files(pictures, recipe.name) if path.suffix == ".png"}

    def files(self, recipe: Recipe) -> dict[str, bytes]:
        """Return the pictures on a recipe's page, as `install` takes them."""
        return {f"{recipe.section}/images/{name}": picture for name, picture in self.figures(recipe).items()}

    def lock(self, say: Callable[[str], object]) -> None:
        """Keep other processes off the folder until this one ends; where one has it, say so and wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locking:
            folder = os.open(self.folder, os.O_RDONLY)
            status = os.fstat(folder)
            identity = status.st_dev, status.st_ino
            if identity in _locked:
                os.close(folder)
                return
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another build that has {self.folder}")
                fcntl.flock(folder, fcntl.LOCK_EX)
            _locked.add(identity)

    def run(self, key: str) -> Run | None:
        """Return the run that made a recipe's page; None if there is no whole page."""
        try:
            run = msgspec.convert(json.loads(self.run_file(key).read_bytes()), Run)
        except (OSError, ValueError):
            return None
        whole = run.failure is not None or (self.folder / f"{key}.rst").is_file()
        return run if whole else None

    def install(self, recipe: Recipe, files: Mapping[str, bytes], run: Run) -> Run:
        """Put a recipe's files, by their paths below the folder, in place of its older ones; return the run as kept.

        If they are not the files of its page, none is written and the run is kept as one that failed.
        """
        if fault := _fault(recipe, files, run):
            run, files = msgspec.structs.replace(run, failure=fault, detail="", outputs=[]), {}
        self._remove(recipe.section, recipe.name)
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if {f"{recipe.key}.rst", f"{recipe.key}.py"} <= files.keys():
            # sphinx-gallery writes no checksum for a recipe that raised, and would then empty its page
            checksum = hashlib.md5(files[f"{recipe.key}.py"], usedforsecurity=False).hexdigest()
            (self.folder / f"{recipe.key}.py.md5").write_text(checksum, encoding="ascii")
        target = self.run_file(recipe.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(msgspec.to_builtins(run), indent=1), encoding="utf-8")
        partial.replace(target)
        return run

    def prune(self, recipes: Sequence[Recipe]) -> None:
        """Remove the pages of recipes that are no more, and whatever else is not a recipe's."""
        known = {recipe.key for recipe in recipes} | {f"{recipe.section}/index" for recipe in recipes}
        for path in self.folder.glob("*/*"):
            key = f"{path.parent.name}/{path.name.partition('.')[0]}"
            if path.is_file() and key not in known:
                self._remove(path.parent.name, path.name.partition(".")[0])
        for folder in self.folder.glob("*/"):
            if folder.name not in {recipe.section for recipe in recipes}:
                shutil.rmtree(folder)

    def _remove(self, section: str, name: str) -> None:
        folder = self.folder / section
        self.run_file(f"{section}/{name}").unlink(missing_ok=True)
        thumbnails = folder.glob(f"images/thumb/sphx_glr_{name}_thumb.*")
        for path in [*folder.glob(f"{name}.*"), *figure_files(folder / "images", name), *thumbnails]:
            path.unlink()


def _fault(recipe: Recipe, files: Iterable[str], run: Run) -> str | None:
    """Return why files, by their paths, are not those of a recipe's page; None if they are."""
    section, pictures = re.escape(recipe.section), rf"sphx_glr_{recipe.name}_\d\d\d|thumb/sphx_glr_{recipe.name}_thumb"
    pattern = re.compile(rf"{section}/({recipe.name}\.[\w.-]+|images/({pictures})\.\w+)", re.ASCII)
    for name in sorted(files):
        if not pattern.fullmatch(name):
            return f"brought a file that is not of its page: {name!r}"
    if run.failure is None:
        figures = {f"{recipe.section}/images/{figure}" for output in run.outputs for figure in output.figures}
        for name in sorted({*(f"{recipe.key}.{kind}" for kind in ("rst", "py", "ipynb")), *figures} - set(files)):
            return f"brought no {name!r}"
    return None
