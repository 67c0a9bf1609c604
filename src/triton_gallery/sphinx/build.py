"""Executes recipes when a Sphinx build begins, showing progress; sphinx-gallery then finds every page up to date.

Before that, it lays the gallery out as sphinx-gallery finds it: with whole scripts, as readers take them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from sphinx.errors import ConfigError
from sphinx.util import logging

from triton_gallery.recipes.contents import CONTENTS, HEADER, Recipe, load
from triton_gallery.records.pages import Pages
from triton_gallery.records.recorded import Records
from triton_gallery.run.execute import refresh
from triton_gallery.run.progress import progress
from triton_gallery.run.settings import read

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

logger = logging.getLogger(__name__)


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Hook execution in front of sphinx-gallery."""
    app.connect("builder-inited", _execute, priority=400)  # sphinx-gallery assembles at 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _execute(app: "Sphinx") -> None:
    conf = app.config.sphinx_gallery_conf
    pages = Pages(Path(app.srcdir, conf["gallery_dirs"]))
    pages.lock(Console(highlight=False, soft_wrap=True).print)
    try:
        gallery = Path(app.confdir, "gallery")
        recipes = load(gallery)
        Records(Path(app.srcdir, "_records")).all()
        settings = read(Path(app.confdir))
        pages.prune(recipes)
        _lay_out(gallery, recipes, Path(app.srcdir, conf["examples_dirs"]).resolve())
        with progress() as (report, say):
            runs = refresh(recipes, pages, settings, report, say)
    except (ValueError, RuntimeError) as error:  # the gallery's contents, a bad record or limit, no torch
        raise ConfigError(str(error)) from None
    for recipe, run in runs:
        if run.failure is not None:
            logger.warning("%s", run.failure, location=f"{conf['gallery_dirs']}/{recipe.key}")


def _lay_out(gallery: Path, recipes: Sequence[Recipe], to: Path) -> None:
    """Have in a folder what the gallery has, with whole scripts, and nothing else."""
    copied = [gallery / CONTENTS, *gallery.glob(f"**/{HEADER}"), *(path for it in recipes for path in it.companions)]
    files = {to / path.relative_to(gallery): path.read_bytes() for path in copied}
    files |= {to / f"{recipe.key}.py": recipe.text.encode() for recipe in recipes}
    for path in to.glob("*/*"):
        if path not in files:
            path.unlink()
    for path, content in files.items():
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
