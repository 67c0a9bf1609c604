"""With which Tritons lessons, ops and features were tried: a line on each page, and tables of all."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipe.contents import Recipe
from triton_gallery.site import page_context
from triton_gallery.site.collapsible import fold
from triton_gallery.site.render import first_cells, grid, op_link, page_link
from triton_gallery.versions.matrix import FEATURE, KERNELS, LESSON, OP, Outcome, Tried, hashes, load

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "version_matrix"  # the key in a page's metadata for what it shows
PAGE = "versions"
PASSED, FAILED, OLDER, UNTRIED = "passed", "fails", "older code", "not tried"
CLASSES = {PASSED: "fits", FAILED: "fails", OLDER: "unmeant", UNTRIED: "unmeant"}


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directives, and make pages follow what is kept."""
    app.add_directive("features-by-version", FeaturesDirective)
    app.add_directive("recipes-by-version", RecipesDirective)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def tried(env: "BuildEnvironment") -> list[Tried]:
    """Return what was tried with each Triton, the newest last."""
    return load(Path(env.srcdir, "_versions"))


def marks(env: "BuildEnvironment", recipe: Recipe, op: str | None) -> list[nodes.Node]:
    """Return a line with a mark for each Triton; nothing where nothing was tried.

    Args:
        env: Sphinx's.
        recipe: the lesson, or the one that hands over the op.
        op: the name of the op that the page is of; None for the lesson.
    """
    line = _marks(env, recipe, op)
    env.metadata[env.docname][STATE] = line
    return [nodes.raw("", line, format="html")] if line else []


def _marks(env: "BuildEnvironment", recipe: Recipe, op: str | None) -> str:
    shown, now = [], hashes([recipe])
    for one in tried(env):
        word, why = _of_op(one, recipe.key, op, now) if op else _state(one, LESSON, recipe.key, now[LESSON])
        said = "" if word == PASSED else f" {word}"
        about = f"Triton {one.triton}, torch {one.torch}, numpy {one.numpy}: {why or word}"
        shown.append(f'<span class="target {CLASSES[word]}" title="{escape(about)}">{_short(one)}{said}</span>')
    up = "../" if op else "../../"
    link = f'<a href="{up}{PAGE}.html">Runs with Triton</a>'
    return f'<p class="targets">{link} {" ".join(shown)}</p>' if shown else ""


class FeaturesDirective(SphinxDirective):
    """`features-by-version`: the probes of Triton's features."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        found = tried(self.env)
        self.env.metadata[self.env.docname][STATE] = _hash(found, list(page_context.recipes(self.env).values()))
        names = {name for one in found for name in one.outcomes[FEATURE]}
        if not names:
            return [nodes.paragraph("", "Nothing has been tried yet.")]
        rows = {
            name: [_word_and_reason(one.outcomes[FEATURE].get(name)) for one in found]
            for name in sorted(names, key=str.lower)
        }
        return [_table("feature", found, rows, {name: nodes.Text(name) for name in rows})]


class RecipesDirective(SphinxDirective):
    """`recipes-by-version`: lessons and ops with each Triton."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return a line on the versions, then a table of lessons and one of ops."""
        found, recipes = tried(self.env), page_context.recipes(self.env)
        if not found:
            return [nodes.paragraph("", "Nothing has been tried yet.")]
        self.env.metadata[self.env.docname][STATE] = _hash(found, list(recipes.values()))
        now, ops = hashes(list(recipes.values())), page_context.ops(self.env)
        of_lessons = {
            recipe.key: [_state(one, LESSON, recipe.key, now[LESSON]) for one in found] for recipe in recipes.values()
        }
        of_ops = {op: [_of_op(one, recipes[page].key, op, now) for one in found] for op, page in ops.items()}
        with_what = "; ".join(f"{one.triton} with torch {one.torch} and numpy {one.numpy}" for one in found)
        said = f"Triton {with_what}; Python {', '.join(dict.fromkeys(one.python for one in found))}."
        links = {recipe.key: page_link(page) for page, recipe in recipes.items()}
        return [
            nodes.paragraph("", said),
            *_exceptions("lesson", found, of_lessons, links),
            *(_exceptions("op", found, of_ops, {op: op_link(op) for op in of_ops}) if of_ops else []),
        ]


def _exceptions(
    title: str, found: Sequence[Tried], rows: Mapping[str, Sequence[tuple[str, str]]], names: Mapping[str, nodes.Node]
) -> list[nodes.Node]:
    """Return a table of the rows that did not pass with each Triton, and, folded, one of those that did."""
    passed = {name: states for name, states in rows.items() if all(word == PASSED for word, _ in states)}
    others = {name: states for name, states in rows.items() if name not in passed}
    said = f"{len(passed)} of {len(rows)} {title}s passed with each Triton."
    shown = nodes.container("", nodes.paragraph("", f"{said} The others:" if others else said))
    if others:
        shown += _table(title, found, others, names)
    if passed:
        start = len(shown)
        shown += _table(title, found, passed, names)
        fold(shown, start, start + 1, f"The {title}s that passed with each Triton")
    return [shown]


def _table(
    title: str, found: Sequence[Tried], rows: Mapping[str, Sequence[tuple[str, str]]], names: Mapping[str, nodes.Node]
) -> nodes.Node:
    """Return a table with a word for each row and Triton, and below it, folded, why what did not pass did not."""
    words = [["", *(word for word, _ in states)] for states in rows.values()]
    table = grid([title, *(f"Triton {_short(one)}" for one in found)], words, "tried")
    for place, name in zip(first_cells(table), rows, strict=True):
        place += names[name]
    for cell in table.findall(nodes.entry):
        if cell.astext() == FAILED:
            cell["classes"].append("failed")
    reasons = defaultdict[tuple[str, str], list[str]](list)
    for name, states in rows.items():
        for one, (word, why) in zip(found, states, strict=True):
            if why and word != PASSED:
                reasons[name, why].append(_short(one))
    if not reasons:
        return table
    said = nodes.bullet_list()
    for (name, why), tritons in reasons.items():
        said += nodes.list_item("", nodes.paragraph("", f"{name}, Triton {', '.join(tritons)}: {why}"))
    shown = nodes.container("", table, said)
    fold(shown, 1, 2, f"Why each {title} failed or was not tried")
    return shown


def _of_op(one: Tried, key: str, op: str, now: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """Return what came of an op and of the kernels of its recipe in a word, and why: the worst of both."""
    found = [_state(one, OP, op, now[OP]), _state(one, KERNELS, key, now[KERNELS])]
    return next((state for word in (FAILED, UNTRIED, OLDER) for state in found if state[0] == word), found[0])


def _state(one: Tried, kind: str, name: str, now: Mapping[str, str]) -> tuple[str, str]:
    """Return what came of something in a word, and why, if its code is this."""
    outcome = one.outcomes[kind].get(name)
    if outcome and outcome.code_hash != now[name]:
        return OLDER, f"on {outcome.date[:10]} an older version was tried"
    return _word_and_reason(outcome)


def _word_and_reason(outcome: Outcome | None) -> tuple[str, str]:
    if outcome is None:
        return UNTRIED, ""
    if outcome.missing:
        return UNTRIED, f"needs {', '.join(outcome.missing)}"
    return (FAILED, outcome.failure) if outcome.failure else (PASSED, f"tried on {outcome.date[:10]}")


def _short(one: Tried) -> str:
    """Return the first two numbers of a Triton."""
    return ".".join(one.triton.split(".")[:2])


def _hash(found: Sequence[Tried], recipes: Sequence[Recipe]) -> str:
    """Identify what a page shows."""
    return hashlib.sha256(repr((found, hashes(recipes))).encode()).hexdigest()


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    recipes = page_context.recipes(env)
    of_page: dict[str, tuple[Recipe, str | None]] = {page: (recipe, None) for page, recipe in recipes.items()}
    of_page |= {f"ops/{op}": (recipes[page], op) for op, page in page_context.ops(env).items()}
    shown = {name: data[STATE] for name, data in env.metadata.items() if STATE in data and name in env.all_docs}
    whole = _hash(tried(env), list(recipes.values()))
    return [name for name, was in shown.items() if was != (_marks(env, *of_page[name]) if name in of_page else whole)]
