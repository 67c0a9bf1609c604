"""What this package relies on in Sphinx, its extensions and the theme that their documentation does not promise.

A test compares the versions below with what is installed. If it fails, read what is here against the new version, then
change the number. `execute/recipe_process.py` and `execute/scraper.py` call sphinx-gallery and read what it wrote, and
`recipe/cells.py` knows how it lays out a page;
`_static/gallery.css` and `_static/search.js` use the classes of furo's elements.
"""

import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from furo import get_pygments_stylesheet
from sphinx.application import Sphinx
from sphinx.builders.html._assets import _CascadingStyleSheet, _JavaScript
from sphinx_gallery.py_source_parser import extract_file_config

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
# do, and keyboard.js what doctools.js does
UNUSED_FILES = {
    "doctools.js",
    "sg-tags.js",
    "sg_gallery-binder.css",
    "sg_gallery-dataframe.css",
    "sg_gallery-rendered-html.css",
    "sg_gallery.css",
    "sphinx_highlight.js",  # what Sphinx's own search found
}
# A pattern of what has to stand in a page for a script to be loaded; the page's other scripts are loaded always
NEEDED_FOR = {
    **dict.fromkeys(("documentation_options.js", "clipboard.min.js", "copybutton.js"), 'class="highlight'),
    "chart.js": '<figure class="panels"',
    "step_through.js": '<figure class="step-through"',
    "filter.js": 'class="filters"',
    "gpu_choice.js": 'class="gpu-choice"|data-kind="gpu"',
    "listing.js": 'class="listing"',
    "performance.js": "sortable",
    "take.js": 'class="take"',
}
STYLES = "_static/all.css"  # all style files in one

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
    """Leave a page the scripts that do something on it, all deferred, and one style file.

    A browser paints nothing before it has each style file and each script that is not deferred.
    """
    body = context.get("body", "")
    context["script_files"] = [
        _JavaScript(file.filename, priority=file.priority, **{**file.attributes, "defer": "defer"})
        for file in context["script_files"]
        if _name(file) not in UNUSED_FILES and re.search(NEEDED_FOR.get(_name(file), ""), body)
    ]
    styles = sorted(context["css_files"], key=lambda file: file.priority)
    _join_styles(Path(app.outdir), *(str(file.filename) for file in styles if _name(file) not in UNUSED_FILES))
    context["css_files"] = [_CascadingStyleSheet(STYLES)]


def _name(file: _CascadingStyleSheet | _JavaScript) -> str:
    return PurePosixPath(str(file.filename)).name


@cache  # the first page is written before the processes that write the others start
def _join_styles(site: Path, *names: str) -> None:
    """Write the text of the site's style files into one; furo writes that of code at the end of a build."""
    code = "_static/pygments.css"
    texts = [get_pygments_stylesheet() if name == code else (site / name).read_text("utf-8") for name in names]
    joined = re.sub(r"/\*# sourceMappingURL=.*?\*/", "", "\n".join(texts))
    (site / STYLES).write_text(joined, encoding="utf-8")
