"""The index of the site's search, and links from recipes to similar ones.

What the search finds is noted of each page when it is read, and written into one script at the end of a build. The
browser ranks it: `docs/_static/search.js`.
"""

import json
import math
import posixpath
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from triton_gallery.site import library_table, other_gpus, page_context
from triton_gallery.site.links import GLOSSARY, title_link
from triton_gallery.site.meta_description import description
from triton_gallery.site.op_pages import public
from triton_gallery.site.replaces import replaces
from triton_gallery.site.sphinx_internals import topics

WORDS = Path(__file__).with_name("search_words.toml")
FILE = "search_index.js"
KEY = "search"  # in a page's metadata
FAQ = "faq"  # its page; each of its sections is found by itself, as each term of the glossary is
KINDS = {"recipes": "Lesson", "ops": "Op", "guide": "Guide", FAQ: "FAQ", GLOSSARY: "Glossary"}
NOT_PROSE = (nodes.title, nodes.literal_block, nodes.table, nodes.raw, nodes.rubric, nodes.comment, nodes.figure)
NOT_PROSE_CLASSES = {
    *("cards", "clocks", "counts", "glance", "gpu-label", "gpu-only", "here-label", "names", "op-grid", "op-page"),
    *("recipe-path", "recorded-label", "sphx-glr-example-tags", "sphx-glr-footer", "table-box"),
}
GENERATED = {library_table.TITLE, other_gpus.TITLE, "Where it runs"}  # sections that say the same on every page
NAME = re.compile(r"\b(?:tl|torch|triton|gl|libdevice|jax)(?:\.\w+)+|(?<=\bdef )\w+|\b\w+(?==[^=])|\b\w+Error\b")
PAGE_TITLE = re.compile("\0(.*?)\0")  # stands for the title of a page, which is not known before all have been read
RELATED = 3  # links to recipes that are alike


@dataclass
class Section:
    """A section of a page, or what stands above the first: its address on the page, its title and its text."""

    anchor: str
    title: str
    text: str


@dataclass
class Entry:
    """What the search finds: a page, a question or a term.

    Attributes:
        page: the name of its page.
        kind: what it is, as a word that a reader sees; empty for a page of no special kind.
        title: of the page, or the question or term itself.
        sections: its text; a question and a term have one.
        about: the page's description, topics, and the words of its name.
        names: functions of an op, and the functions that it replaces.
        code: names in the page's code.
    """

    page: str
    kind: str
    title: str
    sections: list[Section]
    about: str = ""
    names: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that a reader reads of it, the title several times, as pages with the same titles are alike."""
        return " ".join([*5 * [self.title], *(f"{part.title} {part.text}" for part in self.sections), *self.code])


def note(app: Sphinx, document: nodes.document) -> None:
    """Note what the search finds on a page when it has been read."""
    page, env = app.env.docname, app.env
    metadata: dict[str, Any] = env.metadata[page]
    metadata[KEY] = list(entries(env, page, document))


def entries(env: BuildEnvironment, page: str, document: nodes.document) -> Iterator[Entry]:
    """Yield what the search finds on a page: the page, or else its questions or terms."""
    top = next(document.findall(nodes.section), None)
    if top is None:
        return
    kind = KINDS.get(page.partition("/")[0], "") if not page.endswith("index") else ""
    below = [node for node in top if isinstance(node, nodes.section) and node[0].astext() not in GENERATED]
    if page == FAQ:
        for section in below:
            yield Entry(page, kind, section[0].astext(), [Section(section["ids"][0], "", prose(section))])
    elif page == GLOSSARY:
        for item in top.findall(nodes.definition_list_item):
            for term in item.findall(nodes.term):
                yield Entry(page, kind, term.astext(), [Section(term["ids"][0], "", prose([item[-1]]))])
    else:
        intro = [node for node in top if not isinstance(node, nodes.section)]
        sections = [Section("", "", prose(intro)), *(Section(s["ids"][0], _headings(s), prose(s)) for s in below)]
        recipe = page_context.recipes(env).get(page)
        op = page_context.op_of_page(env, recipe) if recipe else page.removeprefix("ops/")
        about = [description(env, page), page.replace("/", " "), *(topics(recipe.text) if recipe else [])]
        literals = (*top.findall(nodes.literal_block), *top.findall(nodes.literal))
        code = {name for literal in literals for name in NAME.findall(literal.astext())}
        names = _names(env, op) if op in page_context.ops(env) else []
        yield Entry(page, kind, top[0].astext(), sections, ". ".join(about), names, sorted(code))


def prose(shown: Iterable[nodes.Node]) -> str:
    """Return the sentences in these parts of a document."""
    return " ".join(" ".join(_sentences(shown)).split())


def _sentences(shown: Iterable[nodes.Node]) -> Iterator[str]:
    for node in shown:
        if not isinstance(node, nodes.Element) or isinstance(node, NOT_PROSE):
            continue
        if isinstance(node, (nodes.paragraph, nodes.term)) and NOT_PROSE_CLASSES.isdisjoint(node["classes"]):
            yield "".join(_text(node))
        elif NOT_PROSE_CLASSES.isdisjoint(node["classes"]):
            yield from _sentences(node.children)


def _text(node: nodes.Node) -> Iterator[str]:
    for child in node.children:
        if isinstance(child, nodes.Text):
            yield child.astext()
        elif isinstance(child, addnodes.pending_xref) and child["reftype"] == "doc" and not child["refexplicit"]:
            folder = posixpath.dirname(child.get("refdoc", ""))
            yield f"\0{posixpath.join('/', folder, child['reftarget'])[1:]}\0"
        elif not isinstance(child, (nodes.math, nodes.raw)):
            yield from _text(child)


def _headings(section: nodes.section) -> str:
    return " · ".join(title.astext() for title in section.findall(nodes.title))


def _names(env: BuildEnvironment, op: str) -> list[str]:
    """Return the names of an op's functions, and of those that it replaces."""
    functions = public(op, page_context.op_file(env, op).read_text(encoding="utf-8"))
    replaced = replaces()[op].names if op in replaces() else []
    return [op, *(part.node.name for part in functions if part.node), *replaced]


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the page of the search, with its template."""
    yield "search", {}, "search.html"


def write(app: Sphinx) -> None:
    """Write the index of all pages."""
    metadata: Mapping[str, Any] = app.env.metadata
    found = [entry for page in sorted(app.env.all_docs) for entry in metadata[page].get(KEY, ())]
    text = script(found, {page: title.astext() for page, title in app.env.titles.items()})
    Path(app.outdir, "_static", FILE).write_text(text, encoding="utf-8")


def script(found: Iterable[Entry], titles: Mapping[str, str]) -> str:
    """Return the index as a script, as a page opened from a disk can load no other data."""
    index = {"entries": [asdict(entry) for entry in found], **tomllib.loads(WORDS.read_text(encoding="utf-8"))}
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    quoted = {page: json.dumps(title, ensure_ascii=False)[1:-1] for page, title in titles.items()}
    text = text.replace("\\u0000", "\0")
    return f"var searchIndex = {PAGE_TITLE.sub(lambda match: quoted.get(match[1], ''), text)};\n"


def alike(page: str, texts: Mapping[str, str]) -> list[str]:
    """Return the other pages, the most alike first: by the cosine of their words, rare ones weighing more."""
    weights = _weights(tuple(texts.items()))

    def cosine(other: str) -> float:
        product = sum(weight * weights[other].get(word, 0) for word, weight in weights[page].items())
        return product / (math.hypot(*weights[other].values()) or 1)

    return sorted((other for other in texts if other != page), key=cosine, reverse=True)


@cache  # once for all pages
def _weights(texts: tuple[tuple[str, str], ...]) -> dict[str, dict[str, float]]:
    counts = {page: Counter(re.findall(r"[a-z]\w+", text.lower())) for page, text in texts}
    pages_with = Counter(word for words in counts.values() for word in words)
    rarity = {word: math.log(len(texts) / count) for word, count in pages_with.items()}
    return {page: {w: (1 + math.log(n)) * rarity[w] for w, n in words.items()} for page, words in counts.items()}


def link_related(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Add links to similar recipes, other than the neighbours, when a page is written; by then all have been read."""
    metadata: Mapping[str, Any] = app.env.metadata
    order = list(page_context.recipes(app.env))
    texts = {page: entry.text for page in order for entry in metadata[page].get(KEY, ())}
    if docname not in texts:
        return
    place = order.index(docname)
    neighbours = {*order[max(0, place - 1) : place + 2]}
    for path in document.findall(nodes.paragraph):
        if "recipe-path" in path["classes"]:
            pages = [page for page in alike(docname, texts) if page not in neighbours][:RELATED]
            line = nodes.inline()
            for word, page in zip(["Related: ", *RELATED * [", "]], pages, strict=False):
                line += [nodes.Text(word), title_link(app, docname, page)]
            path += [nodes.Text(" "), line]
