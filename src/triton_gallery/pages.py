"""The generated pages under `docs/recipes`, and what is known of the run that made each.

Beside a page's files lies `<recipe>.run.json`, which holds a `Run`. Written last: without it no page is done.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from triton_gallery.device import Environment
from triton_gallery.outputs import Output, from_json
from triton_gallery.recipes import Recipe

RUN_SUFFIX = ".run.json"


@dataclass(frozen=True)
class Run:
    """How the execution of one recipe went.

    Attributes:
        code: hash of the recipe's source and of the machinery that executed it.
        environment: what executed it.
        date: when it began, ISO 8601 in UTC.
        seconds: wall time of the whole script, imports included.
        failure: None, or in one line what happened.
        detail: the traceback or the last output of a run that failed.
        outputs: what each code cell put out; empty for a run that failed.
        packages: versions of what the recipe declares beyond the packages that any recipe may use.
        missing: what the recipe needs and did not find; then it was not executed, and its cells put out nothing.
    """

    code: str
    environment: Environment
    date: str
    seconds: float
    failure: str | None = None
    detail: str = ""
    outputs: list[Output] = field(default_factory=list)
    packages: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


class Pages:
    """The folder of generated pages."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, `docs/recipes`; it need not exist yet."""
        self.folder = folder

    def run_file(self, key: str) -> Path:
        """Return the path of a recipe's run, whether or not there is one."""
        return self.folder / (key + RUN_SUFFIX)

    def thumbnail(self, recipe: Recipe) -> Path:
        """Return the path of a recipe's picture in the index."""
        return self.folder / recipe.section / "images" / "thumb" / f"sphx_glr_{recipe.name}_thumb.png"

    def figures(self, recipe: Recipe) -> dict[str, bytes]:
        """Return the figures on a recipe's page, by their file names."""
        pictures = self.folder / recipe.section / "images"
        return {path.name: path.read_bytes() for path in pictures.glob(f"sphx_glr_{recipe.name}_[0-9]*.png")}

    def lock(self) -> None:
        """Keep other builds off the folder until this process ends; wait for one that has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(self.folder, os.O_RDONLY), fcntl.LOCK_EX)

    def run(self, key: str) -> Run | None:
        """Return the run that made a recipe's page; None if there is no whole page."""
        try:
            fields = json.loads(self.run_file(key).read_text(encoding="utf-8"))
            environment = Environment(**fields["environment"])
            outputs = [from_json(output) for output in fields["outputs"]]
            run = Run(**{**fields, "environment": environment, "outputs": outputs})
            datetime.fromisoformat(run.date)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        whole = run.failure is not None or (self.folder / f"{key}.rst").is_file()
        return run if whole else None

    def install(self, recipe: Recipe, files: Mapping[str, bytes], run: Run) -> None:
        """Put a recipe's files, by their paths below the folder, in place of its older ones."""
        self._remove(recipe.section, recipe.name)
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if f"{recipe.key}.rst" in files:
            # sphinx-gallery writes no checksum for a recipe that raised, and would then empty its page
            checksum = hashlib.md5(files[f"{recipe.key}.py"], usedforsecurity=False).hexdigest()
            (self.folder / f"{recipe.key}.py.md5").write_text(checksum, encoding="ascii")
        target = self.run_file(recipe.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(run), indent=1), encoding="utf-8")
        partial.replace(target)

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
        for pattern in (f"{name}.*", f"images/sphx_glr_{name}_[0-9]*", f"images/thumb/sphx_glr_{name}_thumb.*"):
            for path in folder.glob(pattern):
                path.unlink()
