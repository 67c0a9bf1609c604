"""Executes recipes when a Sphinx build begins, showing progress; sphinx-gallery then finds every page up to date."""

from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.errors import ConfigError
from sphinx.util import logging

from triton_gallery.chart import save_thumbnail
from triton_gallery.execute import refresh
from triton_gallery.pages import Pages, Run
from triton_gallery.progress import progress
from triton_gallery.recipes import Recipe, load
from triton_gallery.records import Records

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

logger = logging.getLogger(__name__)


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the setting of the time limit and hook execution in front of sphinx-gallery."""
    app.add_config_value("recipe_time_limit", 300, "", types=(int, float), description="seconds that a recipe may take")
    app.connect("builder-inited", _execute, priority=400)  # sphinx-gallery assembles at 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _execute(app: "Sphinx") -> None:
    conf = app.config.sphinx_gallery_conf
    limit = float(app.config.recipe_time_limit)
    if limit <= 0:
        raise ConfigError(f"recipe_time_limit is {limit:g}; it takes a positive number of seconds")
    pages = Pages(Path(app.srcdir, conf["gallery_dirs"]))
    pages.lock()
    try:
        recipes = load(Path(app.srcdir, conf["examples_dirs"]).resolve())
        records = Records(Path(app.srcdir, "_records"))
        records.all()
        with progress() as report:
            runs = refresh(recipes, pages, Path(app.confdir), limit, report)
    except (ValueError, RuntimeError) as error:  # the gallery's contents, a bad record, no torch
        raise ConfigError(str(error)) from None
    for recipe, run in runs:
        if run.failure is not None:
            logger.warning("%s", run.failure, location=f"{conf['gallery_dirs']}/{recipe.key}")
        _draw_thumbnail(recipe, run, pages, records)


def _draw_thumbnail(recipe: Recipe, run: Run, pages: Pages, records: Records) -> None:
    """Make the first benchmark's chart the recipe's thumbnail: of this run, or of the record."""
    outputs = [*run.outputs, *(output for record in records.of(recipe)[:1] for output in record.outputs)]
    tables = [table for output in outputs for table in output.tables]
    if tables:
        save_thumbnail(tables[0], pages.thumbnail(recipe))
