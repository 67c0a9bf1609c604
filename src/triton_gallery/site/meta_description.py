"""The descriptions of pages for search engines and link previews: a recipe's own, or the beginning of another page."""

import re

from docutils import nodes
from sphinx.environment import BuildEnvironment

from triton_gallery.site.page_context import RecipePage, line

DESCRIPTION = "og:description"  # the key in a page's metadata, which is sphinxext-opengraph's
LONGEST = 200  # characters; search engines and chat programs show no more
SENTENCE = re.compile(r".+?[.?!](?=\s|$)\s*")


def describe(env: BuildEnvironment, document: nodes.document, page: RecipePage | None) -> None:
    """Set the description of a page, if it has any text."""
    given = [meta["content"] for meta in document.findall(nodes.meta) if meta.get("name") == "description"]
    paragraphs = (text for section in document.findall(nodes.section) for text in section.findall(nodes.paragraph))
    beginnings = (_beginning(text.astext()) for text in paragraphs)  # what stands before the title is none
    text = next(filter(None, [*given, line(page.recipe) if page else "", *beginnings]), "")
    if text and not given:
        document.insert(0, nodes.meta("", name="description", content=text))
    if text:
        env.metadata[env.docname][DESCRIPTION] = text


def description(env: BuildEnvironment, page: str) -> str:
    """Return the description of a page that has been read; empty if it has none."""
    text: str = env.metadata[page].get(DESCRIPTION, "")
    return text


def _beginning(text: str) -> str:
    """Return as many whole sentences as fit; if the first is too long, its first words."""
    beginning = ""
    for sentence in SENTENCE.findall(" ".join(text.split())):
        if len(beginning + sentence) > LONGEST:
            break
        beginning += sentence
    return beginning.strip() or f"{text[:LONGEST].rpartition(' ')[0] or text} …"
