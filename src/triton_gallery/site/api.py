"""The page of the names of Triton and of `torch.library` that recipes use, and of the recipes that use them.

Where each name is documented is in the table beside this module; nothing is fetched.
"""

import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipe.names import uses
from triton_gallery.site import page_context
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.render import folded, page_link, paragraph, titled

TABLE = Path(__file__).with_name("api_inventory.toml")
SHORT = {"tl": "triton.language", "F": "torch.nn.functional"}  # as scripts and prose call them
MANY = 8  # recipes of a name: more are folded
LANGUAGE, GLUON = "triton.language.", "triton.experimental.gluon."
GROUPS = {  # by title: what names of it begin with; the first that fits
    "Triton's language": LANGUAGE,
    "Gluon": GLUON,
    "Triton": "triton.",
    "PyTorch's library of ops": "torch.library.",
}


def address_of(name: str) -> str | None:
    """Return the address of a name's documentation, or of its class's documentation; None if neither is known."""
    addresses = table()
    while name and name not in addresses:
        name = name.rpartition(".")[0]
    return addresses.get(name)


def in_full(written: str) -> str:
    """Return the full name of a name as prose writes it."""
    root, dot, rest = written.partition(".")
    return f"{SHORT.get(root, root)}{dot}{rest}"


@cache
def table() -> dict[str, str]:
    """Return the address of each name's documentation."""
    pages = tomllib.loads(TABLE.read_text(encoding="utf-8"))["pages"]
    return {name: page["address"].format(name) for page in pages for name in page["names"].split()}


class NamesDirective(SphinxDirective):
    """`names`: a section for each group, with a term for each name."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        depends_on(self.env, users)
        pages = users(self.env)
        shown: list[nodes.Node] = []
        for title, start in GROUPS.items():
            names = sorted((name for name in pages if _group(name) == title), key=str.lower)
            if names:
                terms = nodes.definition_list("", *(_term(name, pages[name]) for name in names), classes=["names"])
                shown.append(titled(title, terms, address=start))
        return shown


def _term(name: str, pages: list[str]) -> nodes.definition_list_item:
    """Return a name, indexed, with a link to its documentation, and the recipes that use it."""
    short = name.replace(f"{GLUON}language.", "gl.").replace(LANGUAGE, "tl.")
    anchor, address = f"name-{name}", address_of(name)
    literal = nodes.literal("", short)
    entries = [("single", entry, anchor, "main", None) for entry in dict.fromkeys((short, name))]
    link = nodes.reference("", "", literal, refuri=address) if address else literal
    term = nodes.term("", "", addnodes.index(entries=entries), link, ids=[anchor])
    links = (part for page in pages for part in (" · ", page_link(page)))
    line: list[nodes.Node] = [paragraph(*[*links][1:])]
    definition = folded(f"{len(pages)} recipes", line) if len(pages) > MANY else line
    return nodes.definition_list_item("", term, nodes.definition("", *definition))


def users(env: BuildEnvironment) -> dict[str, list[str]]:
    """Return the pages that use each public name, in the order of the contents."""
    pages = defaultdict(list)
    for page, recipe in page_context.recipes(env).items():
        for name in dict.fromkeys(use.name for use in uses(recipe.text)):
            if _group(name) and not any(part.startswith("_") for part in name.split(".")):
                pages[name].append(page)
    return dict(pages)


def _group(name: str) -> str | None:
    return next((title for title, start in GROUPS.items() if name.startswith(start)), None)
