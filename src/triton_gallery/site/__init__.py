"""The Sphinx side, and the extension that `conf.py` names: one module for each thing that the site shows."""

from typing import TYPE_CHECKING

import triton_gallery

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Set up what a build needs: execution first, then what pages show of it."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    on_recipes = (
        "meta_description",
        "recorded_outputs",
        "figures",
        "notebook",
        "repository",
        "summary_box",
        "op_files",
        "collapsible",
        "wheel",
        "op_pages",
    )
    on_ops = ("wheel", "op_pages")
    links = ("links", "code_links", "related")
    on_others = ("index_cards", "home_counts", "performance", "peer_table", "other_gpus", "api", "glossary")
    versions = ("version_table", "version_matrix")
    files = ("search", "markdown", "sitemap", "assets")
    for module in ("execute_hook", *on_recipes, *on_ops, *links, *on_others, *versions, *files):
        app.setup_extension(f"triton_gallery.site.{module}")
    return {"version": triton_gallery.__version__, "parallel_read_safe": True, "parallel_write_safe": True}
