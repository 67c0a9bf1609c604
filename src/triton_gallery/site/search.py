"""What each page is about, for the search: Sphinx's own asks only whether a page has a word, not how often."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.search import WordCollector
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from triton_gallery.site.page_context import recipes

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

WORDS = "words"  # the key in a page's metadata
FILE = "search_weights.js"
OFTEN = 3  # a pair that stands less often on a page is chance
LEAST = 2  # what weighs less tells little of a page
IN_TITLE = 5  # what stands in a title counts as so many in the text
SATURATION, LENGTH = 4, 0.5  # k1 and b of BM25: pages are long, and code repeats its words
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


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Count words when pages are read; write what they weigh, and load it where one searches."""
    app.add_transform(IndexName)
    app.connect("doctree-read", _count)
    app.connect("html-page-context", _load)
    app.connect("build-finished", _write)
    return {"env_version": 2, "parallel_read_safe": True, "parallel_write_safe": True}  # older ones lack words


class IndexName(SphinxTransform):
    """Has a recipe's page found by the words of its file's name, which need not stand on it: "layer norm".

    As keywords, not as an entry of the index: a build that reads no page again would lose that.
    """

    default_priority = 600

    def apply(self, **kwargs: object) -> None:
        """Add the name, if the document is a recipe's page."""
        recipe = recipes(self.env).get(self.env.current_document.docname)
        if recipe:
            self.document.insert(0, nodes.meta(name="keywords", content=recipe.name.replace("_", ", ")))


def weights(pages: Mapping[str, Words]) -> dict[str, dict[str, float]]:
    """Return what words and pairs weigh on pages, by BM25: much where they are frequent on a page, and on few pages."""
    having = Counter(word for its in pages.values() for word in its.counts)
    rarity = {word: math.log(1 + (len(pages) - count + 0.5) / (count + 0.5)) for word, count in having.items()}
    mean = sum(its.counts.total() for its in pages.values()) / max(1, len(pages))
    found = {}
    for page, its in pages.items():
        room = SATURATION * (1 - LENGTH + LENGTH * its.counts.total() / mean)
        weighed = {word: count * (SATURATION + 1) / (count + room) for word, count in its.counts.items()}
        for word in {*its.title, *its.name}:
            weighed[word] = weighed.get(word, 0) + NAMED * min(1, 2 / len(its.title))  # a long title says less
        rare = {word: rarity.get(word, 0) * weight for word, weight in weighed.items()}
        found[page] = {word: weight for word, weight in rare.items() if weight >= LEAST}
    return found


def words(env: "BuildEnvironment") -> dict[str, Words]:
    """Return the words of all pages that have been read."""
    metadata: Mapping[str, Any] = env.metadata
    return {page: metadata[page][WORDS] for page in sorted(env.all_docs) if WORDS in metadata[page]}


def _count(app: "Sphinx", document: nodes.document) -> None:
    language = SearchEnglish({})
    collector = WordCollector(document, language)
    document.walk(collector)
    texts = collector.found_words, collector.found_title_words
    text, titles = ([*_stems(language, words)] for words in texts)
    pairs = Counter([*_pairs(text), *(IN_TITLE - 1) * [*_pairs(titles)]])
    counts = Counter([*text, *(IN_TITLE - 1) * titles])
    counts.update({pair: count for pair, count in pairs.items() if count >= OFTEN})
    title = next((title for title, _ in collector.found_titles), "")
    name = app.env.docname.rpartition("/")[2]
    names = [name, *name.split("_")]
    metadata: dict[str, Any] = app.env.metadata[app.env.docname]
    metadata[WORDS] = Words(counts, [*_stems(language, language.split(title))], [*_stems(language, names)])


def _pairs(words: Sequence[str]) -> Iterator[str]:
    return map(" ".join, pairwise(words))


def _stems(language: SearchEnglish, words: Iterable[str]) -> Iterator[str]:
    """Yield the stems of words as the browser makes them."""
    for word in map(str.lower, words):
        if language.word_filter(word):
            yield language.stem(word)


def _load(app: "Sphinx", page: str, *_: object) -> None:
    if page == "search":
        app.add_js_file(FILE)


def _write(app: "Sphinx", exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    found = weights(words(app.env))
    rounded = {page: {word: round(weight, 1) for word, weight in its.items()} for page, its in found.items()}
    text = f"var searchWeights = {json.dumps(rounded, separators=(',', ':'))};\n"
    Path(app.outdir, "_static", FILE).write_text(text, encoding="utf-8")
