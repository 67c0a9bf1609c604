"""Executes recipes when a Sphinx build begins, showing progress; sphinx-gallery then finds every page up to date.

It removes the pages of those that are gone.

Before that, it lays the gallery out as sphinx-gallery finds it: with whole scripts, as readers take them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from sphinx.errors import ConfigError
from sphinx.util import logging

from triton_gallery.execute.execute import refresh
from triton_gallery.execute.progress import progress
from triton_gallery.execute.settings import read
from triton_gallery.recipe.contents import lay_out, load
from triton_gallery.records.page_cache import Pages
from triton_gallery.records.record_store import Records

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

logger = logging.getLogger(__name__)


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Hook execution in front of sphinx-gallery."""
    app.connect("builder-inited", _execute, priority=400)  # sphinx-gallery assembles at 500
    app.connect("env-get-outdated", _remove)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _remove(app: "Sphinx", _env: object, _added: object, _changed: object, removed: set[str]) -> list[str]:
    """Remove the pages of documents that are gone: Sphinx leaves what an earlier build wrote."""
    if app.builder.format == "html":
        for document in removed:
            Path(app.builder.get_outfilename(document)).unlink(missing_ok=True)  # type: ignore[attr-defined]
    return []


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
        lay_out(gallery, Path(app.srcdir, conf["examples_dirs"]).resolve())
        with progress() as (report, say):
            runs = refresh(recipes, pages, settings, report, say)
    except (ValueError, RuntimeError) as error:  # the gallery's contents, a bad record or limit, no torch
        raise ConfigError(str(error)) from None
    for recipe, run in runs:
        if run.failure is not None:
            logger.warning("%s", run.failure, location=f"{conf['gallery_dirs']}/{recipe.key}")
