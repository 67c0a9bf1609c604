"""Writes all pages again after a build that was killed.

Sphinx writes a page whose file is missing or older than its source. That leaves out what a killed build cut short, what
it read again and did not write, and what it did not come to copy. Recipes stay as they are: `execute` knows which are
done.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

MARK = ".unfinished"


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Mark the site's folder while a build lasts."""
    app.connect("env-get-outdated", _begin)
    app.connect("build-finished", _end)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _begin(app: "Sphinx", env: "BuildEnvironment", added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Name the pages to read and write again: all of them if the last build did not end."""
    mark = Path(app.outdir, MARK)
    again = list(env.found_docs) if mark.exists() else []
    mark.touch()
    return again


def _end(app: "Sphinx", exception: Exception | None) -> None:
    if exception is None:
        Path(app.outdir, MARK).unlink(missing_ok=True)
