"""Below each term of the glossary, the recipes that show it: those whose prose has it most often."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.nodes import make_refnode

from triton_gallery.site import page_context
from triton_gallery.site.links import is_prose, pattern_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PAGE = "glossary"
SHOWN = 3  # recipes of a term
OFTEN = 2  # who has it less often only mentions it,
FEWER = 3  # and so does who has it so many times less often than another


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Hook in when the page is written: all others have been read."""
    app.connect("doctree-resolved", _link)
    app.connect("env-get-outdated", _follow_recipes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _link(app: "Sphinx", document: nodes.document, docname: str) -> None:
    if docname != PAGE:
        return
    entries = {item[0].astext(): item[-1] for item in document.findall(nodes.definition_list_item)}
    pages = {
        page: _mentions(app.env, page, entries) for page in page_context.recipes(app.env) if page in app.env.all_docs
    }
    for term, definition in entries.items():
        often = {page: counts[term.lower()] for page, counts in pages.items()}
        least = max(OFTEN, max(often.values(), default=0) / FEWER)
        shown = [page for page in sorted(often, key=lambda page: -often[page])[:SHOWN] if often[page] >= least]
        if isinstance(definition, nodes.definition) and shown:
            line = nodes.paragraph("", "Shown in ", classes=["shown-in"])
            for place, page in enumerate(shown):
                title = nodes.Text(app.env.titles[page].astext())
                line += [nodes.Text(", " if place else ""), make_refnode(app.builder, docname, page, None, title)]
            definition += line


def _mentions(env: "BuildEnvironment", page: str, terms: Iterable[str]) -> Counter[str]:
    """Count the terms in the prose and in the headings of a page."""
    document = env.get_doctree(page)
    texts = [text for text in document.findall(nodes.Text) if is_prose(text) or isinstance(text.parent, nodes.title)]
    return Counter(match[1].lower() for text in texts for match in pattern_of(terms).finditer(text))


def _follow_recipes(
    app: "Sphinx", env: "BuildEnvironment", added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Ask for the glossary to be made again when a recipe's page is."""
    return [PAGE] if PAGE in env.all_docs and (added | changed) & page_context.recipes(env).keys() else []
