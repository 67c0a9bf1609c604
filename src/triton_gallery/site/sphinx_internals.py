"""What this package relies on in Sphinx, its extensions and the theme that their documentation does not promise.

A test compares the versions below with what is installed. If it fails, read what is here against the new version, then
change the number. `execute/recipe_process.py` and `execute/scraper.py` call sphinx-gallery and read what it wrote, and
`recipe/cells.py` knows how it lays out a page;
`_static/gallery.css` and `_static/search.js` use the classes of furo's elements.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx_gallery.py_source_parser import extract_file_config
from sphinx_gallery.utils import zip_files

READ_IN = {  # the version of each package in which its part below was read
    "furo": "2025.12.19",
    "sphinx": "9.0.4",
    "sphinx-copybutton": "0.5.2",
    "sphinx-gallery": "0.22.1",
}

# furo: a script that stands in each page and sets the theme, as the browser has to be told to allow it; and its markup,
# with what takes its place so that those who listen are told what each part is.
THEME_SCRIPT = "ySvT2PEZeueHGC1y2crNuNTfphBynFPP7i+U21fEgX0="  # sha256, base64
LANDMARKS = {
    '<div class="header-left">': (
        '<div class="header-left"><button type="button" class="switch" data-for="__navigation">Navigation</button>'
    ),
    '<div class="header-right">': (
        '<div class="header-right"><button type="button" class="switch" data-for="__toc">This page</button>'
    ),
    '<a href="#" class="back-to-top': '<nav aria-label="Top"><a href="#" class="back-to-top',
    "Back to top</span>\n        </a>": "Back to top</span></a></nav>",
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Site">',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
}

# Files that these packages have each page load and that none needs: gallery.css and filter.js do what sphinx-gallery's
# do
UNUSED_FILES = {
    "sg-tags.js",
    "sg_gallery-binder.css",
    "sg_gallery-dataframe.css",
    "sg_gallery-rendered-html.css",
    "sg_gallery.css",
    "sphinx_highlight.js",  # what Sphinx's own search found
}
NEEDED_FOR = {  # what has to stand in a page for a file to be loaded; the page's other files are loaded always
    **dict.fromkeys(("clipboard.min.js", "copybutton.css", "copybutton.js", "pygments.css"), 'class="highlight'),
    **dict.fromkeys(("chart.css", "chart.js"), '<figure class="panels"'),
    **dict.fromkeys(("step_through.css", "step_through.js"), '<figure class="step-through"'),
    "filter.js": 'class="filters"',
    "op_grid.css": 'class="op-grid',
    "gpu_choice.js": 'class="gpu-choice"',
    "listing.js": 'class="listing"',
    "performance.js": "sortable",
    "take.js": 'class="take"',
}

# sphinx-gallery
BEFORE_SPHINX_GALLERY = 400  # the priority of what has to happen at "builder-inited" before it assembles the pages
DOWNLOAD_NOTE = "sphx-glr-download-link-note"  # classes
PRINTED = "sphx-glr-script-out"
FIGURE = "sphx-glr-single-img"

# Sphinx's markup of a block of a recipe's code, and that of Pygments in it
CODE_BLOCK = re.compile(r'(?s)<div class="highlight-Python notranslate">.*?</pre>')
DOT = '<span class="o">.</span>'
UNCOLOURED = re.compile(
    r'<span class="(?:n|nn|nx|p|pm|w)">([^<]*)</span>'
)  # in both styles of conf.py, as a test holds
STRING = re.compile(r'<span class="(?:s[a-ehix12]|dl)">')  # all kinds have the colour of "s"
SAME_TWICE = re.compile(r'(<span class="(\w+)">[^<]*)</span><span class="\2">')


def name_span(name: str) -> str:
    """Return a pattern for the markup of a name in code."""
    return rf'<span class="n[a-z]?">{name}</span>'


def leave_out_search(app: Sphinx) -> None:
    """Have Sphinx write no search of its own; it would write the page for it, too."""
    app.builder.search = False  # type: ignore[attr-defined]


def lighten_code(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Remove the elements around parts of a page's code that look the same without."""
    context["body"] = lighten(context.get("body", ""))


def lighten(markup: str) -> str:
    """Remove the elements around parts of code that look the same without; a dot gets the colour of names."""
    markup = UNCOLOURED.sub(r"\1", STRING.sub('<span class="s">', markup.replace(DOT, ".")))
    while (shorter := SAME_TWICE.sub(r"\1", markup)) != markup:
        markup = shorter
    return markup


def topics(script: str) -> list[str]:
    """Return the tags that a script gives sphinx-gallery."""
    tags: list[str] = extract_file_config(script).get("tags", [])
    return tags


def zip_downloads(script: Path, notebook: Path) -> None:
    """Write the zip of a recipe's downloads again, as sphinx-gallery does."""
    zip_files([script, notebook], script.with_suffix(".zip"), script.parent)


def is_data_frame(node: nodes.Node) -> bool:
    """Whether a node has the markup that pandas gives sphinx-gallery for a data frame."""
    return isinstance(node, nodes.raw) and "dataframe" in node.astext()


def thumbnails_start(section: nodes.section) -> int:
    """Return the position in a section at which sphinx-gallery's thumbnails begin."""
    return next(index for index, node in enumerate(section) if isinstance(node, nodes.raw))


def output_file(app: Sphinx, document: str) -> Path:
    """Return the HTML file of a document."""
    return Path(app.builder.get_outfilename(document))  # type: ignore[attr-defined]


def add_to_context(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Give the template of pages what it needs to know of furo's markup."""
    context["theme_script"] = THEME_SCRIPT
    context["name_landmarks"] = _name_landmarks


def _name_landmarks(markup: str) -> str:
    for old, new in LANDMARKS.items():
        markup = markup.replace(old, new)
    return markup


def choose_files(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Remove scripts and styles from a page that they would do nothing on."""
    body = context.get("body", "")
    for files in (context["script_files"], context["css_files"]):
        names = [PurePosixPath(str(file.filename)).name for file in files]
        files[:] = [
            file
            for file, name in zip(files, names, strict=True)
            if name not in UNUSED_FILES and NEEDED_FOR.get(name, "") in body
        ]
