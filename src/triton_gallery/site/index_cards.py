"""The index of the recipes: for each a card with its line and its chart, and buttons that filter them by topic."""

import hashlib
from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx_gallery.py_source_parser import extract_file_config

from triton_gallery.recipe.contents import Recipe
from triton_gallery.site.chart import sparkline
from triton_gallery.site.page_context import line, recipe_page, recipes
from triton_gallery.site.render import page_link

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "cards"  # the key in a page's metadata for what it shows
FEWEST = 2  # recipes of a topic: a button for one alone would be a link


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform, and make the pages follow what the cards show."""
    app.add_transform(Cards)
    app.add_js_file("filter.js", defer="defer")
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Cards(SphinxTransform):
    """Puts the cards in the places of sphinx-gallery's thumbnails, which say where a sentence happens to break off."""

    default_priority = 590  # before images are collected

    def apply(self, **kwargs: object) -> None:
        """Do so, if the document is the index of all recipes or of a section."""
        name, gallery = self.env.current_document.docname, self.env.config.sphinx_gallery_conf["gallery_dirs"]
        by_section = _by_section(self.env)
        pages = {f"{gallery}/{section}/index": there for section, there in by_section.items()}
        sections = list(self.document.findall(nodes.section))
        if name == f"{gallery}/index":
            _put(sections[0], _filters(list(recipes(self.env).values())))
            shown = list(zip(sections[1:], by_section.values(), strict=True))
        elif name in pages:
            shown = [(sections[0], pages[name])]
        else:
            return
        for section, there in shown:
            _put(section, nodes.bullet_list("", *(_card(self.env, recipe) for recipe in there), classes=["cards"]))
        self.env.metadata[name][STATE] = _state(self.env)


def _by_section(env: "BuildEnvironment") -> dict[str, list[Recipe]]:
    """Return the recipes of each section."""
    found: dict[str, list[Recipe]] = {}
    for recipe in recipes(env).values():
        found.setdefault(recipe.section, []).append(recipe)
    return found


def _put(section: nodes.section, shown: nodes.Node) -> None:
    """Put something behind the introduction of a section, in the place of what sphinx-gallery has there."""
    start = next(place for place, node in enumerate(section) if isinstance(node, nodes.raw))
    kept = [node for node in section[start:] if isinstance(node, nodes.section) or _is_toctree(node)]
    section[start:] = [shown, *kept]


def _is_toctree(node: nodes.Node) -> bool:
    return any(True for _ in node.findall(addnodes.toctree)) and not isinstance(node, nodes.section)


def _card(env: "BuildEnvironment", recipe: Recipe) -> nodes.list_item:
    """Return a card: the title, which leads to the page, the line, and the chart if there is one."""
    gallery = env.config.sphinx_gallery_conf["gallery_dirs"]
    title = nodes.paragraph("", "", page_link(f"{gallery}/{recipe.key}"))
    return nodes.list_item(
        "",
        title,
        nodes.paragraph("", line(recipe)),
        nodes.raw("", _picture(env, recipe), format="html"),
        classes=["card", *map(_class, topics(recipe))],
    )


def topics(recipe: Recipe) -> list[str]:
    """Return the topics that a recipe says it has."""
    found: list[str] = extract_file_config(recipe.text).get("tags", [])
    return found


def _class(topic: str) -> str:
    return f"topic-{nodes.make_id(topic)}"


def _filters(of: list[Recipe]) -> nodes.raw:
    """Return a button for each topic that several recipes have, and what says how many are left."""
    counts = Counter(topic for recipe in of for topic in topics(recipe))
    buttons = [
        f'<button type="button" aria-pressed="false" data-topic="{_class(topic)}">{escape(topic)} '
        f"<span>{count}</span></button>"
        for topic, count in counts.most_common()
        if count >= FEWEST
    ]
    return nodes.raw(
        "",
        '<div class="filters"><div role="group" aria-label="Show recipes of these topics alone">'
        f'{"".join(buttons)}</div><p><span role="status"></span> '
        '<button type="button" class="all" hidden>Show all</button></p></div>',
        format="html",
    )


def _picture(env: "BuildEnvironment", recipe: Recipe) -> str:
    """Return the lines of a recipe's benchmark as a small picture; nothing where it has none."""
    page = recipe_page(env, f"{env.config.sphinx_gallery_conf['gallery_dirs']}/{recipe.key}")
    table = page.table if page else None
    return sparkline(table) if table else ""


def _state(env: "BuildEnvironment") -> str:
    """Identify what the cards show."""
    shown = [(recipe.key, line(recipe), topics(recipe), _picture(env, recipe)) for recipe in recipes(env).values()]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    shown = {name: data[STATE] for name, data in env.metadata.items() if STATE in data and name in env.all_docs}
    now = _state(env) if shown else ""
    return [name for name, state in shown.items() if state != now]
