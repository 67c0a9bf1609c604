"""Executes recipes when a Sphinx build begins, showing progress; sphinx-gallery then finds every page up to date.

Before that it writes the scripts, with what they import of this project inlined, to where sphinx-gallery reads them. It
also removes the pages of recipes that no longer exist.
"""

from pathlib import Path

from rich.console import Console
from sphinx.application import Sphinx
from sphinx.errors import ConfigError
from sphinx.util import logging

from triton_gallery.execute.execute import refresh
from triton_gallery.execute.progress import progress
from triton_gallery.execute.settings import read
from triton_gallery.recipe.contents import lay_out, load
from triton_gallery.records.page_cache import Pages
from triton_gallery.records.record_store import Records
from triton_gallery.site import deferred
from triton_gallery.site.sphinx_internals import output_file

logger = logging.getLogger(__name__)


def remove(app: Sphinx, _env: object, _added: object, _changed: object, removed: set[str]) -> list[str]:
    """Remove the HTML of documents that no longer exist, and the files beside it; Sphinx leaves them."""
    if app.builder.format == "html":
        for document in removed:
            page = output_file(app, document)
            for suffix in (".html", *deferred.SUFFIXES, ".md"):
                page.with_suffix(suffix).unlink(missing_ok=True)
    return []


def execute(app: Sphinx) -> None:
    """Execute the recipes whose code changed, before sphinx-gallery assembles the pages."""
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
