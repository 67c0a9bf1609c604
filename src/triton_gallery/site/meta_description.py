"""What search engines and link previews are told of a page: a recipe's own line, or how another page begins."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

from triton_gallery.site.page_context import line, recipes

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

SAID = "og:description"  # the key in a page's metadata, which is sphinxext-opengraph's
LONGEST = 200  # characters; search engines and chat programs show no more
SENTENCE = re.compile(r".+?[.?!](?=\s|$)\s*")


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform."""
    app.add_transform(Describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Describe(SphinxTransform):
    """Gives each page its description."""

    default_priority = 580  # before anything is put in front of what its author wrote

    def apply(self, **kwargs: object) -> None:
        """Describe the page, if it says anything."""
        name = self.env.current_document.docname
        recipe = recipes(self.env).get(name)
        given = [meta["content"] for meta in self.document.findall(nodes.meta) if meta.get("name") == "description"]
        said = next(filter(None, [*given, line(recipe) if recipe else "", *_beginnings(self.document)]), "")
        if said and not given:
            self.document.insert(0, nodes.meta("", name="description", content=said))
        if said:
            self.env.metadata[name][SAID] = said


def said_of(env: "BuildEnvironment", page: str) -> str:
    """Return the description of a page that has been read; of a page without a sentence, an empty one."""
    said: str = env.metadata[page].get(SAID, "")
    return said


def _beginnings(document: nodes.document) -> Iterator[str]:
    """Yield how each paragraph of a page begins; what stands before its title is none."""
    for section in document.findall(nodes.section):
        yield from (_beginning(text.astext()) for text in section.findall(nodes.paragraph))


def _beginning(text: str) -> str:
    """Return as many whole sentences as are not too long together; of a longer first one, its first words."""
    said = ""
    for sentence in SENTENCE.findall(" ".join(text.split())):
        if len(said + sentence) > LONGEST:
            break
        said += sentence
    return said.strip() or f"{text[:LONGEST].rpartition(' ')[0] or text} …"
