"""The machinery behind the Triton Gallery: a Sphinx extension and a command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

__version__ = "0.1.0"


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Set up what a build needs: execution first, then what pages show of it."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    for module in ("build", "replay", "provenance", "answers", "links", "performance", "peers", "resume"):
        app.setup_extension(f"triton_gallery.sphinx.{module}")
    return {"version": __version__, "parallel_read_safe": True, "parallel_write_safe": True}
