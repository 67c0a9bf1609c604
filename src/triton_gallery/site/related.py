"""Leads from a recipe to those that are most alike: by the words that weigh on their pages."""

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.util.nodes import make_refnode

from triton_gallery.site import page_context, search

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

SHOWN = 3


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Hook in when pages are written: all have been read."""
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def alike(page: str, weights: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the other pages, the most alike first: by the cosine of the angle between their weights."""

    def cosine(other: str) -> float:
        one, two = weights[page], weights[other]
        product = sum(weight * two.get(word, 0) for word, weight in one.items())
        return product / (math.hypot(*one.values()) * math.hypot(*two.values()) or 1)

    return sorted((other for other in weights if other != page), key=cosine, reverse=True)


def _link(app: "Sphinx", document: nodes.document, docname: str) -> None:
    """Add the links to those before and after, which they leave out."""
    weights = _weights(app.env)
    if docname not in weights:
        return
    order = list(page_context.recipes(app.env))
    place = order.index(docname)
    beside = {*order[max(0, place - 1) : place + 2]}
    for path in document.findall(nodes.paragraph):
        if "recipe-path" in path["classes"]:
            shown = [page for page in alike(docname, weights) if page not in beside][:SHOWN]
            line = nodes.inline()
            for word, page in zip(["Related: ", *SHOWN * [", "]], shown, strict=False):
                title = nodes.Text(app.env.titles[page].astext())
                line += [nodes.Text(word), make_refnode(app.builder, docname, page, None, title)]
            path += [nodes.Text(" "), line]


@cache  # once for all pages
def _weights(env: "BuildEnvironment") -> dict[str, dict[str, float]]:
    words = search.words(env)
    return search.weights({page: words[page] for page in page_context.recipes(env) if page in words})
