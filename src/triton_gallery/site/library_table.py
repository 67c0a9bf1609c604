"""Tables of our ops beside other libraries', on each op's or recipe's page its own."""

from collections.abc import Sequence

from docutils import nodes
from sphinx.environment import BuildEnvironment

from triton_gallery.libraries.library_rows import LibraryRow
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.tables import ROOF, TRITON
from triton_gallery.site import page_context
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.panels import BACKWARD, FORWARD, Panel, figure_of
from triton_gallery.site.render import add_section, figure, folded, page_link, paragraph, titled, two_digits
from triton_gallery.site.row_table import device_tables

TITLE = "Beside other libraries"


def add_to_recipe(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Add a section with a recipe's rows, if there are any; if the op has a page, they are there."""
    depends_on(env, shown, page.recipe.key)
    if not page_context.op_of_page(env, page.recipe) and (rows := section(env, page.recipe)):
        rows[1:] = folded("The same work through other libraries, and how it was measured", rows[1:], "stays")
        add_section(document, rows)


def section(env: BuildEnvironment, recipe: Recipe) -> nodes.section | None:
    """Return the section with a recipe's rows; None if there are none."""
    rows = [row for row in page_context.beside_libraries(env) if row.recipe == recipe.key]
    if not rows:
        return None
    about = paragraph(
        "The op and the same work through other libraries, as ",
        nodes.literal("", "make libraries"),
        " measured them: the median rates, with the launch hidden and the L2 cache emptied. In a tie the two bands, "
        "from the 20th to the 80th percentile, overlap. A row is stale if the code of the op or its lesson has changed "
        "since. ",
        page_link("performance"),
        " says what each size means.",
    )
    panels: list[Panel] = []
    for row in rows:
        panel_about = _about(row)
        if panel_about not in (panel.about for panel in panels):
            of_panel = [other for other in rows if _about(other) == panel_about]
            panels.append(Panel(panel_about, device_tables(of_panel, _packages, _cells, [recipe], {})))
    return titled(TITLE, about, *figure_of(panels))


def shown(env: BuildEnvironment, key: str) -> list[tuple[LibraryRow, bool]]:
    """Return the rows of a recipe, and whether each is fresh; for `freshness.depends_on`."""
    recipes = list(page_context.recipes(env).values())
    return [(row, row.is_fresh(recipes)) for row in page_context.beside_libraries(env) if row.recipe == key]


def _about(row: LibraryRow) -> dict[str, str]:
    """Return what a row is about, for a panel."""
    direction = BACKWARD if BACKWARD in row.work else FORWARD
    return {"gpu": row.environment.name, "direction": direction, "dtype": row.dtype}


def _packages(row: LibraryRow) -> dict[str, str]:
    return {"triton": row.environment.triton, **row.packages}


def _cells(rows: Sequence[LibraryRow], unit: str) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns after the first, and the cells below them."""
    others = [name for row in rows for name, rate in row.rates.items() if rate and name not in {TRITON, ROOF}]
    series = [TRITON, *dict.fromkeys(others), ROOF]
    dtype = ["dtype"] if any(row.dtype for row in rows) else []
    columns = ["size", *dtype, "Triton / best other", "Triton / roof", f"Triton Gallery ({unit})", *series[1:]]
    timed = [name for name in series if any(name in row.cpu_us for row in rows)]
    shown_names = ["Triton Gallery" if name == TRITON else name for name in timed]
    columns += [f"CPU us, {', '.join(shown_names)}"] if timed else []
    cells = []
    for row in rows:
        ratio = f"{two_digits(row.table.ratio(0))}{' (tie)' if row.is_tie else ''}"
        medians = [figure(rate[0] if (rate := row.rates.get(name)) else None) for name in series]
        cells.append([row.size, *([row.dtype] if dtype else []), ratio, two_digits(row.table.of_roof(0)), *medians])
        if timed:
            cells[-1].append(", ".join(f"{us:.0f}" if (us := row.cpu_us.get(name)) else "-" for name in timed))
    return columns, cells
