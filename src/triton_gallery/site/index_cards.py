"""The index of the recipes: a card for each with its description and chart, and buttons that filter by topic."""

from collections import Counter
from html import escape

from docutils import nodes
from sphinx import addnodes
from sphinx.environment import BuildEnvironment

from triton_gallery.recipe.contents import Recipe
from triton_gallery.site.chart import sparkline
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import line, page_name, recipe_page, recipes
from triton_gallery.site.render import html, page_link, paragraph
from triton_gallery.site.sphinx_internals import thumbnails_start, topics

FEWEST = 2  # recipes of a topic: a button for one alone would be a link


def add_cards(env: BuildEnvironment, document: nodes.document) -> None:
    """Replace sphinx-gallery's thumbnails, whose text breaks off within a sentence, by cards.

    Nothing happens if the document is not the index of all recipes or of a section.
    """
    by_section: dict[str, list[Recipe]] = {}
    for recipe in recipes(env).values():
        by_section.setdefault(recipe.section, []).append(recipe)
    pages = {page_name(env, f"{section}/index"): of_section for section, of_section in by_section.items()}
    sections = list(document.findall(nodes.section))
    if env.docname == page_name(env, "index"):
        _replace_thumbnails(sections[0], _filters(list(recipes(env).values())))
        lists = list(zip(sections[1:], by_section.values(), strict=True))
    elif env.docname in pages:
        lists = [(sections[0], pages[env.docname])]
    else:
        return
    for section, of_section in lists:
        cards = nodes.bullet_list("", *(_card(env, recipe) for recipe in of_section), classes=["cards"])
        _replace_thumbnails(section, cards)
    depends_on(env, shown)


def _replace_thumbnails(section: nodes.section, shown: nodes.Node) -> None:
    """Replace what sphinx-gallery puts after the introduction of a section."""
    start = thumbnails_start(section)
    kept = [node for node in section[start:] if isinstance(node, nodes.section) or any(node.findall(addnodes.toctree))]
    section[start:] = [shown, *kept]


def _card(env: BuildEnvironment, recipe: Recipe) -> nodes.list_item:
    """Return a card: the title as a link, the description, and the chart if there is one."""
    title, about = paragraph(page_link(page_name(env, recipe.key))), paragraph(line(recipe))
    classes = ["card", *map(_topic_class, topics(recipe.text))]
    return nodes.list_item("", title, about, html(_picture(env, recipe)), classes=classes)


def _topic_class(topic: str) -> str:
    return f"topic-{nodes.make_id(topic)}"


def _filters(listed: list[Recipe]) -> nodes.raw:
    """Return a button for each topic that several recipes have, and a place for the number of recipes left."""
    counts = Counter(topic for recipe in listed for topic in topics(recipe.text))
    buttons = [
        f'<button type="button" aria-pressed="false" data-topic="{_topic_class(topic)}">{escape(topic)} '
        f"<span>{count}</span></button>"
        for topic, count in counts.most_common()
        if count >= FEWEST
    ]
    return html(
        '<div class="filters"><div role="group" aria-label="Show recipes of these topics alone">'
        f'{"".join(buttons)}</div><p><span role="status"></span> '
        '<button type="button" class="all" hidden>Show all</button></p></div>'
    )


def _picture(env: BuildEnvironment, recipe: Recipe) -> str:
    """Return a small chart of a recipe's benchmark; empty if it has none."""
    page = recipe_page(env, page_name(env, recipe.key))
    return sparkline(page.table) if page and page.table else ""


def shown(env: BuildEnvironment) -> object:
    """Return what the cards show; for `freshness.depends_on`."""
    listed = recipes(env).values()
    return [(recipe.key, line(recipe), topics(recipe.text), _picture(env, recipe)) for recipe in listed]
