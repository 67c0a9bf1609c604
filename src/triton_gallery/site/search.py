"""The weights of words on pages, by which the search ranks pages and recipes link to similar ones.

Sphinx's own search asks only whether a page has a word, not how often.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from triton_gallery.site import page_context
from triton_gallery.site.links import title_link
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.sphinx_internals import document_words, stems

WORDS = "words"  # the key in a page's metadata
FILE = "search_weights.js"
OFTEN = 3  # a pair that stands less often on a page is chance
LEAST = 2  # what weighs less tells little of a page
IN_TITLE = 5  # what stands in a title counts as so many in the text
SATURATION, LENGTH = 4, 0.5  # k1 and b of BM25: pages are long, and code repeats its words
RELATED = 3  # links to recipes that are alike
NAMED = 3  # what a word weighs besides if the page is called so


@dataclass(frozen=True)
class Words:
    """The words of a page, as stems.

    Attributes:
        counts: how often each stands there, and each pair of neighbours that stands there often.
        title: those of its title.
        name: those of its file's name.
    """

    counts: Counter[str]
    title: list[str]
    name: list[str]


def add_keywords(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Make a recipe's page findable by the words of its file name, which need not be on it: "layer norm".

    They are keywords and not index entries, as a build that reads no page again would lose those.
    """
    document.insert(0, nodes.meta(name="keywords", content=page.recipe.name.replace("_", ", ")))


def count(app: Sphinx, document: nodes.document) -> None:
    """Count the words of a page when it has been read."""
    words = document_words(document)
    pairs = Counter([*_pairs(words.text), *(IN_TITLE - 1) * _pairs(words.headings)])
    counts = Counter([*words.text, *(IN_TITLE - 1) * words.headings])
    counts.update({pair: count for pair, count in pairs.items() if count >= OFTEN})
    name = app.env.docname.rpartition("/")[2]
    metadata: dict[str, Any] = app.env.metadata[app.env.docname]
    metadata[WORDS] = Words(counts, words.title, stems([name, *name.split("_")]))


def _pairs(words: Sequence[str]) -> list[str]:
    return [*map(" ".join, pairwise(words))]


def weights(pages: Mapping[str, Words]) -> dict[str, dict[str, float]]:
    """Return the BM25 weights of words and pairs on pages: high if they are frequent on a page, and on few pages."""
    pages_with = Counter(word for page in pages.values() for word in page.counts)
    rarity = {word: math.log(1 + (len(pages) - count + 0.5) / (count + 0.5)) for word, count in pages_with.items()}
    mean = sum(page.counts.total() for page in pages.values()) / max(1, len(pages))
    weights_of = {}
    for name, page in pages.items():
        length = SATURATION * (1 - LENGTH + LENGTH * page.counts.total() / mean)
        frequency = {word: count * (SATURATION + 1) / (count + length) for word, count in page.counts.items()}
        for word in {*page.title, *page.name}:  # a long title says less
            frequency[word] = frequency.get(word, 0) + NAMED * min(1, 2 / len(page.title))
        weighed = {word: rarity.get(word, 0) * weight for word, weight in frequency.items()}
        weights_of[name] = {word: weight for word, weight in weighed.items() if weight >= LEAST}
    return weights_of


def words(env: BuildEnvironment) -> dict[str, Words]:
    """Return the words of all pages that have been read."""
    metadata: Mapping[str, Any] = env.metadata
    return {page: metadata[page][WORDS] for page in sorted(env.all_docs) if WORDS in metadata[page]}


def alike(page: str, weights: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the other pages, the most alike first: by the cosine of the angle between their weights."""

    def cosine(other: str) -> float:
        own, theirs = weights[page], weights[other]
        product = sum(weight * theirs.get(word, 0) for word, weight in own.items())
        return product / (math.hypot(*own.values()) * math.hypot(*theirs.values()) or 1)

    return sorted((other for other in weights if other != page), key=cosine, reverse=True)


def link_related(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Add links to similar recipes, other than the neighbours, when a page is written; by then all have been read."""
    weights_of = _weights_of_recipes(app.env)
    if docname not in weights_of:
        return
    order = list(page_context.recipes(app.env))
    place = order.index(docname)
    neighbours = {*order[max(0, place - 1) : place + 2]}
    for path in document.findall(nodes.paragraph):
        if "recipe-path" in path["classes"]:
            pages = [page for page in alike(docname, weights_of) if page not in neighbours][:RELATED]
            line = nodes.inline()
            for word, page in zip(["Related: ", *RELATED * [", "]], pages, strict=False):
                line += [nodes.Text(word), title_link(app, docname, page)]
            path += [nodes.Text(" "), line]


@cache  # once for all pages
def _weights_of_recipes(env: BuildEnvironment) -> dict[str, dict[str, float]]:
    words_of = words(env)
    return weights({page: words_of[page] for page in page_context.recipes(env) if page in words_of})


def load(app: Sphinx, page: str, *_: object) -> None:
    """Load the weights on the search page."""
    if page == "search":
        app.add_js_file(FILE)


def write(app: Sphinx) -> None:
    """Write the weights on all pages."""
    weights_of = weights(words(app.env))
    rounded = {page: {word: round(weight, 1) for word, weight in of.items()} for page, of in weights_of.items()}
    text = f"var searchWeights = {json.dumps(rounded, separators=(',', ':'))};\n"
    Path(app.outdir, "_static", FILE).write_text(text, encoding="utf-8")
