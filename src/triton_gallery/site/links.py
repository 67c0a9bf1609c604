"""Links in recipe pages that the notebook cannot have.

The first mention of a glossary term leads to its entry, that of a name such as ``tl.dot`` to its documentation. A file
name such as ``row_sum.py``, and the name of another recipe's op, lead to that recipe's page.
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.nodes import make_refnode

from triton_gallery.recipe.names import uses
from triton_gallery.recipe.op import op_of
from triton_gallery.site.api_inventory import address_of, in_full
from triton_gallery.site.page_context import recipes

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PROSE = (nodes.paragraph, nodes.list_item)
TERM = "term"  # the class of a word that leads to the glossary wherever it stands
NOT_IN = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.math, nodes.strong)


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Hook into the resolution of references."""
    app.connect("doctree-resolved", _link)
    app.connect("env-get-outdated", _follow_glossary)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _link(app: "Sphinx", document: nodes.document, docname: str) -> None:
    gallery = app.config.sphinx_gallery_conf["gallery_dirs"]
    path = PurePosixPath(docname)
    if path.parts[0] != gallery or path.name == "index":
        return
    _link_recipes(app, document, docname)
    _link_names(app, document, docname)
    _link_terms(app, document, docname)


def _link_recipes(app: "Sphinx", document: nodes.document, docname: str) -> None:
    pages = {f"{PurePosixPath(other).name}.py": other for other in _recipe_pages(app.env)}
    ops = {page: op_of(recipe) for page, recipe in recipes(app.env).items()}
    pages |= {op.name: page for page, op in ops.items() if op}
    for literal in list(document.findall(nodes.literal)):
        other = pages.get(literal.astext())
        if other and other != docname and not isinstance(literal.parent, nodes.reference):
            link = make_refnode(app.builder, docname, other, None, literal.deepcopy(), app.env.titles[other].astext())
            literal.replace_self(link)


def _link_names(app: "Sphinx", document: nodes.document, docname: str) -> None:
    """Link the first mention in prose of each name that is documented, written in full or as the script has it."""
    recipe = recipes(app.env)[docname]
    imported = {use.written: use.name for use in uses(recipe.text)}
    seen: set[str] = set()
    for literal in list(document.findall(nodes.literal)):
        written = literal.astext().partition("(")[0].removeprefix("@")
        address = address_of(imported.get(written) or in_full(written))
        if address and address not in seen and is_prose(literal):
            seen.add(address)
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=address, classes=["code-link"]))


def _link_terms(app: "Sphinx", document: nodes.document, docname: str) -> None:
    terms = {
        name.lower(): (page, anchor, name)
        for name, _, kind, page, anchor, _ in app.env.domains.standard_domain.get_objects()
        if kind == "term"
    }
    if not terms:
        return
    pattern = pattern_of(terms)
    seen: set[str] = set()
    for text in list(document.findall(nodes.Text)):
        if not is_prose(text):
            continue
        pieces: list[nodes.Node] = []
        end = 0
        for match in pattern.finditer(text):
            page, anchor, name = terms[match[1].lower()]
            if name in seen:
                continue
            seen.add(name)
            word = nodes.inline("", match[0], classes=["glossary-link"])
            pieces += [
                nodes.Text(text[end : match.start()]),
                make_refnode(app.builder, docname, page, anchor, word, name),
            ]
            end = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def pattern_of(terms: Iterable[str]) -> re.Pattern[str]:
    """Return what finds terms of the glossary in a text."""
    longest_first = sorted(map(re.escape, terms), key=len, reverse=True)
    return re.compile(rf"\b({'|'.join(longest_first)})s?\b", re.IGNORECASE)


def is_prose(text: nodes.Node) -> bool:
    """Whether this is in a recipe's own prose: not code, not a heading, not already a link, not a table of figures."""
    inside_prose = False
    node: nodes.Node | None = text.parent
    while isinstance(node, nodes.Element):
        classes: list[str] = node.get("classes", [])
        if TERM in classes:
            return True
        # A column's title is a button where a table can be sorted, and a button holds no link.
        if isinstance(node, NOT_IN) or not {"glance", "sortable"}.isdisjoint(classes):
            return False
        inside_prose = inside_prose or isinstance(node, PROSE)
        node = node.parent
    return inside_prose


def _recipe_pages(env: "BuildEnvironment") -> list[str]:
    gallery = env.config.sphinx_gallery_conf["gallery_dirs"]
    return [page for page in env.all_docs if page.startswith(f"{gallery}/") and not page.endswith("/index")]


def _follow_glossary(
    app: "Sphinx", env: "BuildEnvironment", added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Ask for the recipe pages to be made again when the glossary is."""
    return _recipe_pages(env) if "glossary" in added | changed else []
