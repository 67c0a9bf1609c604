"""The page of names: each that the recipes use of Triton and of PyTorch's library of ops, and who uses it."""

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.names import uses
from triton_gallery.site import page_context
from triton_gallery.site.api_inventory import address_of
from triton_gallery.site.collapsible import fold
from triton_gallery.site.render import page_link

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "names"  # the key in a page's metadata for what it shows
MANY = 8  # recipes of a name: more are folded
LANGUAGE, GLUON = "triton.language.", "triton.experimental.gluon."
GROUPS = {  # by title: what names of it begin with; the first that fits
    "Triton's language": LANGUAGE,
    "Gluon": GLUON,
    "Triton": "triton.",
    "PyTorch's library of ops": "torch.library.",
}


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive, and make its page follow the scripts."""
    app.add_directive("names", NamesDirective)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class NamesDirective(SphinxDirective):
    """`names`: a section for each group, with a term for each name."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found = _users(self.env)
        self.env.metadata[self.env.docname][STATE] = _state(found)
        shown: list[nodes.Node] = []
        for title, start in GROUPS.items():
            names = sorted((name for name in found if _group(name) == title), key=str.lower)
            if names:
                terms = nodes.definition_list("", *(self._term(name, found[name]) for name in names), classes=["names"])
                shown.append(nodes.section("", nodes.title("", title), terms, ids=[nodes.make_id(start)]))
        return shown

    def _term(self, name: str, users: list[str]) -> nodes.definition_list_item:
        """Return a name, indexed, with a link to its documentation, and its recipes."""
        short = name.replace(f"{GLUON}language.", "gl.").replace(LANGUAGE, "tl.")
        anchor = f"name-{name}"
        written = nodes.literal("", short)
        address = address_of(name)
        shown = nodes.reference("", "", written, refuri=address) if address else written
        term = nodes.term("", "", shown, ids=[anchor])
        entries = [("single", entry, anchor, "main", None) for entry in dict.fromkeys((short, name))]
        term.insert(0, addnodes.index(entries=entries))
        line = nodes.paragraph()
        for place, page in enumerate(users):
            line += nodes.Text(" · " if place else "")
            line += page_link(page)
        definition = nodes.definition("", line)
        if len(users) > MANY:
            fold(definition, 0, 1, f"{len(users)} recipes")
        return nodes.definition_list_item("", term, definition)


def _users(env: "BuildEnvironment") -> dict[str, list[str]]:
    """Return the pages that use each public name, in the order of the contents."""
    found = defaultdict(list)
    for page, recipe in page_context.recipes(env).items():
        for name in _names(recipe):
            found[name].append(page)
    return dict(found)


def _names(recipe: Recipe) -> list[str]:
    names = dict.fromkeys(use.name for use in uses(recipe.text))
    return [name for name in names if _group(name) and not any(part.startswith("_") for part in name.split("."))]


def _group(name: str) -> str | None:
    return next((title for title, start in GROUPS.items() if name.startswith(start)), None)


def _state(found: dict[str, list[str]]) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the page if it shows something else than it would now."""
    shown = {page: data[STATE] for page, data in env.metadata.items() if STATE in data and page in env.all_docs}
    now = _state(_users(env)) if shown else ""
    return [page for page, state in shown.items() if state != now]
