"""What tables of recorded rows have in common: the lines above them, the names in them, and what makes a page old."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from docutils import nodes

from triton_gallery.recipe.contents import Recipe
from triton_gallery.records.rows import Row
from triton_gallery.site import page_context
from triton_gallery.site.collapsible import fold
from triton_gallery.site.render import first_cells, page_link

if TYPE_CHECKING:
    from sphinx.environment import BuildEnvironment

MOST_RUNS = 3  # in sight above a table

R = TypeVar("R", bound=Row)


def told(device: str, runs: Sequence[str]) -> nodes.Node:
    """Return a line for each run on a device."""
    lines = nodes.container()
    lines += [nodes.paragraph("", "", nodes.strong("", device), nodes.Text(run)) for run in runs]
    if len(runs) > MOST_RUNS:
        fold(lines, 0, len(runs), f"{len(runs)} runs on {device}: when, and with which software")
    return lines


def facts(row: Row, packages: dict[str, str]) -> str:
    """Say when and with what a row was measured."""
    versions = {"driver": row.environment.driver, "torch": row.environment.torch, **packages}
    parts = [when(row), *(f"{name} {version}" for name, version in versions.items() if version)]
    if row.commit:
        parts.append(f"commit {row.commit[:10]}")
    return "".join(f" · {part}" for part in parts)


def when(row: Row) -> str:
    """Return the minute in which a row's run began: by it the row finds its caption."""
    return row.date[:16].replace("T", " ")


def name_rows(table: nodes.Node, rows: Sequence[Row], recipes: Sequence[Recipe], links: dict[str, str]) -> None:
    """Put into each row of a table what stands first there.

    That is its work, the recipe's name in it a link to the page that `links` has, or left out; and whether it is stale.
    """
    for place, row in zip(first_cells(table), rows, strict=True):
        link = links.get(row.recipe)
        rest = row.work.removeprefix(row.recipe.rpartition("/")[2]).strip(", ")
        place += [page_link(link), nodes.Text(rest and f", {rest}")] if link else nodes.Text(rest or row.work)
        if not row.is_fresh(recipes):
            place += nodes.strong("", ", stale", classes=["stale"])


def of(recipe: Recipe, rows: Sequence[R]) -> list[R]:
    """Return a recipe's rows."""
    return [row for row in rows if row.recipe == recipe.key]


def state(rows: Sequence[Row], recipes: Sequence[Recipe]) -> str:
    """Identify what a page shows of these rows."""
    return hashlib.sha256(repr([(row, row.is_fresh(recipes)) for row in rows]).encode()).hexdigest()


def outdated(env: "BuildEnvironment", key: str, rows: Sequence[Row]) -> list[str]:
    """Name the pages that show something else than they would now; their metadata have under `key` what they show."""
    recipes = page_context.recipes(env)
    shown = {name: data[key] for name, data in env.metadata.items() if key in data and name in env.all_docs}
    now = dict.fromkeys(shown, state(rows, list(recipes.values())))
    now |= {name: state(of(recipe, rows), [recipe]) for name, recipe in recipes.items()}
    return [name for name, was in shown.items() if was != now[name]]
