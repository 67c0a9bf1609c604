"""Executes recipes when a Sphinx build begins, showing progress; sphinx-gallery then finds every page up to date."""

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from sphinx.errors import ConfigError
from sphinx.util import logging

from triton_gallery.execute import refresh
from triton_gallery.pages import Pages, Run
from triton_gallery.recipes import Recipe, load

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
    try:
        recipes = load(Path(app.srcdir, conf["examples_dirs"]).resolve())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pages = Pages(Path(app.srcdir, conf["gallery_dirs"]))
    _lock(pages.folder)
    columns = (SpinnerColumn(), TextColumn("executing recipes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(highlight=False), transient=True) as progress:
        bar = progress.add_task("", total=None)

        def report(recipe: Recipe, run: Run, left: int) -> None:
            done = progress.tasks[0].completed + 1
            progress.update(bar, completed=done, total=done + left)
            outcome = "[green]passed" if run.failure is None else f"[red]{run.failure}"
            progress.console.print(f"  {recipe.key:<32} {run.environment.name}  {run.seconds:6.1f} s  {outcome}")

        try:
            runs = refresh(recipes, pages, Path(app.confdir), limit, report)
        except RuntimeError as error:
            raise ConfigError(str(error)) from None
    for recipe, run in runs:
        if run.failure is not None:
            logger.warning("%s", run.failure, location=f"{conf['gallery_dirs']}/{recipe.key}")


def _lock(folder: Path) -> None:
    """Keep other builds off the generated pages until this process ends; wait for one that has them."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another build")
        fcntl.flock(lock, fcntl.LOCK_EX)
