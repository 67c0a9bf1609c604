"""The index of the recipes: a card for each with its picture, description and badges, and buttons that filter."""

from collections import Counter
from html import escape
from itertools import groupby

from docutils import nodes
from sphinx import addnodes
from sphinx.environment import BuildEnvironment

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.op import op_of
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import line, page_name, recipes
from triton_gallery.site.pictures import picture
from triton_gallery.site.render import html, page_link, paragraph
from triton_gallery.site.sphinx_internals import thumbnails_start, topics

FEWEST = 2  # recipes of a topic: a button for one alone would be a link
OP, LESSON = "op to take", "lesson"
BEGINNER, INTERMEDIATE, ADVANCED = "beginner", "intermediate", "advanced"
ADVANCED_TOPICS = {"TMA", "Gluon", "compiler", "atomics", "split-K"}
OPS_TITLE, LESSONS_TITLE = "Ops, by family", "Lessons about the tools around a kernel"


def add_cards(env: BuildEnvironment, document: nodes.document) -> None:
    """Replace sphinx-gallery's thumbnails, whose text breaks off within a sentence, by cards.

    Nothing happens if the document is not the index of all recipes or of a section.
    """
    by_section: dict[str, list[Recipe]] = {}
    for recipe in recipes(env).values():
        by_section.setdefault(recipe.section, []).append(recipe)
    first = next(iter(by_section), "")
    pages = {page_name(env, f"{section}/index"): of_section for section, of_section in by_section.items()}
    sections = list(document.findall(nodes.section))
    if env.docname == page_name(env, "index"):
        _replace_thumbnails(sections[0], _filters(list(recipes(env).values()), first))
        lists = list(zip(sections[1:], by_section.values(), strict=True))
        _title_groups(lists)
    elif env.docname in pages:
        lists = [(sections[0], pages[env.docname])]
    else:
        return
    for section, of_section in lists:
        cards = nodes.bullet_list("", *(_card(env, recipe, first) for recipe in of_section), classes=["cards"])
        _replace_thumbnails(section, cards)
    depends_on(env, shown)


def _replace_thumbnails(section: nodes.section, shown: nodes.Node) -> None:
    """Replace what sphinx-gallery puts after the introduction of a section."""
    start = thumbnails_start(section)
    kept = [node for node in section[start:] if isinstance(node, nodes.section) or any(node.findall(addnodes.toctree))]
    section[start:] = [shown, *kept]


def _title_groups(lists: list[tuple[nodes.section, list[Recipe]]]) -> None:
    """Put a title above the sections of ops, and another above those of lessons that follow them."""
    groups = groupby(lists, key=lambda pair: any(map(op_of, pair[1])))
    for place, (has_ops, group) in enumerate(groups):
        section, _ = next(group)
        if has_ops or place:
            title = nodes.rubric("", OPS_TITLE if has_ops else LESSONS_TITLE, classes=["card-group"])
            section.parent.insert(section.parent.index(section), title)


def _card(env: BuildEnvironment, recipe: Recipe, first: str) -> nodes.list_item:
    """Return a card: the title as a link, the description, the badges, and the picture."""
    title, about = paragraph(page_link(page_name(env, recipe.key))), paragraph(line(recipe))
    badges = "".join(f"<span>{escape(badge)}</span> " for badge in _badges(recipe, first))
    classes = ["card", *map(_topic_class, _filtered_by(recipe, first))]
    below = html(f'{picture(recipe.name)}<p class="badges">{badges}</p>')
    return nodes.list_item("", title, about, below, classes=classes)


def _kind(recipe: Recipe) -> str:
    return OP if op_of(recipe) else LESSON


def level(recipe: Recipe, first: str) -> str:
    """Return for whom a recipe is: its section, its topics and what it declares decide.

    Args:
        recipe: the recipe.
        first: the name of the first section, which is for beginners.
    """
    declared, about = declaration(recipe.path, recipe.text).of_op, set(topics(recipe.text))
    if recipe.section == first:
        return BEGINNER
    trains_attention = "attention" in about and declared.backward
    return ADVANCED if declared.gpu or about & ADVANCED_TOPICS or trains_attention else INTERMEDIATE


def _badges(recipe: Recipe, first: str) -> list[str]:
    """Return the badges of a recipe: its level, and of an op whether it has a backward, and its dtypes."""
    declared = declaration(recipe.path, recipe.text).of_op
    if not op_of(recipe):
        return [level(recipe, first), LESSON]
    dtypes = " ".join(dtype.replace("bfloat", "bf").replace("float", "fp") for dtype in declared.dtypes)
    return [level(recipe, first), "backward" if declared.backward else "no backward", dtypes]


def _filtered_by(recipe: Recipe, first: str) -> list[str]:
    """Return the words of the buttons that leave a recipe in sight."""
    return [_kind(recipe), level(recipe, first), *topics(recipe.text)]


def _topic_class(topic: str) -> str:
    return f"topic-{nodes.make_id(topic)}"


def _filters(listed: list[Recipe], first: str) -> nodes.raw:
    """Return a button for each kind, level and topic of several recipes, and a place for the number of recipes left."""
    counts = Counter(word for recipe in listed for word in _filtered_by(recipe, first))
    before = [OP, LESSON, BEGINNER, INTERMEDIATE, ADVANCED]
    words = [*before, *(topic for topic, _ in counts.most_common() if topic not in before)]
    buttons = [
        f'<button type="button" aria-pressed="false" data-topic="{_topic_class(word)}">{escape(word)} '
        f"<span>{counts[word]}</span></button>"
        for word in words
        if counts[word] >= FEWEST
    ]
    return html(
        '<div class="filters"><div role="group" aria-label="Show these recipes alone">'
        f'{"".join(buttons)}</div><p><span role="status"></span> '
        '<button type="button" class="all" hidden>Show all</button></p></div>'
    )


def shown(env: BuildEnvironment) -> object:
    """Return what the cards show; for `freshness.depends_on`."""
    listed = list(recipes(env).values())
    first = listed[0].section if listed else ""
    return [
        (recipe.key, line(recipe), _badges(recipe, first), topics(recipe.text), picture(recipe.name))
        for recipe in listed
    ]
