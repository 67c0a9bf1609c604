"""Which scripts and styles a page loads: those that serve something on it."""

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

# What has to stand in a page for a file to be loaded; the page's other files are loaded always.
NEEDED_FOR = {
    "clipboard.min.js": 'class="highlight',
    "copybutton.css": 'class="highlight',
    "copybutton.js": 'class="highlight',
    "filter.js": 'class="filters"',
    "formulas.js": 'class="math',
    "listing.js": 'class="listing"',
    "performance.js": "sortable",
    "pygments.css": 'class="highlight',
    "take.js": 'class="take"',
}
# Ours do what these do: gallery.css and filter.js. KaTeX comes by formulas.js, when a reader comes to a formula.
REPLACED = {
    "auto-render.min.js",
    "katex-math.css",
    "katex.min.css",
    "katex.min.js",
    "katex_autorenderer.js",
    "sg-tags.js",
    "sg_gallery-binder.css",
    "sg_gallery-dataframe.css",
    "sg_gallery-rendered-html.css",
    "sg_gallery.css",
}


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the scripts that no other module of this room brings, and have each page choose."""
    app.add_js_file("formulas.js", defer="defer")
    app.add_js_file("keyboard.js", defer="defer")
    app.connect("html-page-context", _choose, priority=900)  # after those who add some
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _choose(
    app: "Sphinx", pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Leave out of a page's files what would find nothing to do."""
    body = context.get("body", "")
    for files in (context["script_files"], context["css_files"]):
        names = [PurePosixPath(str(file.filename)).name for file in files]
        files[:] = [
            file
            for file, name in zip(files, names, strict=True)
            if name not in REPLACED and NEEDED_FOR.get(name, "") in body
        ]
