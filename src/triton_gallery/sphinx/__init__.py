"""The Sphinx side, and the extension that `conf.py` names: one module for each thing that the site shows."""

from typing import TYPE_CHECKING

import triton_gallery

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Set up what a build needs: execution first, then what pages show of it."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    pages = ("replay", "notebook", "glance", "take", "fold", "links", "performance", "peer_table", "targets")
    for module in ("build", *pages, "resume"):
        app.setup_extension(f"triton_gallery.sphinx.{module}")
    return {"version": triton_gallery.__version__, "parallel_read_safe": True, "parallel_write_safe": True}
