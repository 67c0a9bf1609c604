"""The tables of recorded rows of a device: lines on its runs, and a table for each unit."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from docutils import nodes

from triton_gallery.recipe.contents import Recipe
from triton_gallery.records.rows import Row
from triton_gallery.site.render import Parts, folded, page_link, paragraph, table

MOST_RUNS = 3  # in sight above a table

R = TypeVar("R", bound=Row)


def device_tables(
    rows: Sequence[R],
    packages_of: Callable[[R], dict[str, str]],
    cells_of: Callable[[Sequence[R], str], tuple[list[str], list[list[str]]]],
    recipes: Sequence[Recipe],
    links: dict[str, str],
    *classes: str,
) -> list[nodes.Node]:
    """Return lines on the runs, then a table for each unit; with several runs, each row names its own.

    Args:
        rows: of one device.
        packages_of: returns the versions that a row was measured with, beside those of the driver and of torch.
        cells_of: returns, of the rows of a unit, the titles of the columns and the cells behind the work.
        recipes: of which the rows are.
        links: by a recipe's key the page that the work leads to; without one, the recipe's name is left out.
        classes: of the tables.
    """
    runs = list(dict.fromkeys(_run(row, packages_of(row)) for row in rows))
    device = rows[0].environment.name
    lines: list[nodes.Node] = [paragraph(nodes.strong("", device), run) for run in runs]
    if len(runs) > MOST_RUNS:
        lines = folded(f"{len(runs)} runs on {device}: when, and with which software", lines)
    shown: list[nodes.Node] = [nodes.container("", *lines)]
    for unit in dict.fromkeys(row.unit for row in rows):
        of_unit = [row for row in rows if row.unit == unit]
        columns, cells = cells_of(of_unit, unit)
        of_run = [[_when(row)] if len(runs) > 1 else [] for row in of_unit]
        parts = zip(of_unit, cells, of_run, strict=True)
        table_rows: list[list[Parts]] = [[_work(row, recipes, links), *texts, *when] for row, texts, when in parts]
        titles = ["work", *columns, *(["measured"] if len(runs) > 1 else [])]
        shown.append(table(titles, table_rows, "libraries", "sortable", *classes))
    return shown


def _run(row: Row, packages: dict[str, str]) -> str:
    """Return when, and with which software, a row was measured."""
    versions = {"driver": row.environment.driver, "torch": row.environment.torch, **packages}
    parts = [_when(row), *(f"{name} {version}" for name, version in versions.items() if version)]
    if row.commit:
        parts.append(f"commit {row.commit[:10]}")
    return "".join(f" · {part}" for part in parts)


def _when(row: Row) -> str:
    """Return the minute in which a row's run began, which identifies the run."""
    return row.date[:16].replace("T", " ")


def part_of_recipe(row: Row) -> str:
    """Return a row's work without its recipe's name."""
    return row.work.removeprefix(row.recipe.rpartition("/")[2]).strip(", ")


def _work(row: Row, recipes: Sequence[Recipe], links: dict[str, str]) -> list[str | nodes.Node]:
    """Return the first cell of a row: its work, with a link instead of the recipe's name, and whether it is stale."""
    part = part_of_recipe(row)
    link = links.get(row.recipe)
    work: list[str | nodes.Node] = [page_link(link), part and f", {part}"] if link else [part or row.work]
    return work if row.is_fresh(recipes) else [*work, nodes.strong("", ", stale", classes=["stale"])]
