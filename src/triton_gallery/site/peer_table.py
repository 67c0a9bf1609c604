"""Our ops beside other libraries': all of them on the performance page, and on each recipe's page its own."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from triton_gallery.libraries.peer_rows import PeerRow
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.tables import ROOF, TRITON
from triton_gallery.site import page_context
from triton_gallery.site.render import add_section, figure, grid, of_gpu, page_link, titled
from triton_gallery.site.row_table import facts, name_rows, of, outdated, state, told, when

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "peers"  # the key in a page's metadata for what it shows
TITLE = "Beside other libraries"


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive and the transform, and make pages follow what is recorded."""
    app.add_directive("peers", PeersDirective)
    app.add_transform(PeersOfRecipe)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class PeersDirective(SphinxDirective):
    """`peers`: the rows of all recipes."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        rows, recipes = page_context.peers(self.env), list(page_context.recipes(self.env).values())
        self.env.metadata[self.env.docname][STATE] = state(rows, recipes)
        if not rows:
            return [nodes.paragraph("", "Nothing has been measured beside other libraries yet.")]
        gallery = self.env.config.sphinx_gallery_conf["gallery_dirs"]
        links = {recipe.key: f"{gallery}/{recipe.key}" for recipe in recipes}
        return _tables(rows, recipes, links, "filterable")


class PeersOfRecipe(SphinxTransform):
    """Gives a recipe's page a section with the recipe's rows."""

    default_priority = 600

    def apply(self, **kwargs: object) -> None:
        """Insert the section, if there are rows: before what a reader does next, else at the end."""
        name = self.env.current_document.docname
        recipe = page_context.recipes(self.env).get(name)
        if recipe is None:
            return
        rows = of(recipe, page_context.peers(self.env))
        self.env.metadata[name][STATE] = state(rows, [recipe])
        if not page_context.op_of_page(self.env, recipe) and (shown := section(self.env, recipe)):
            add_section(self.document, shown)


def section(env: "BuildEnvironment", recipe: Recipe) -> nodes.section | None:
    """Return the section with a recipe's rows; None if there are none."""
    rows = of(recipe, page_context.peers(env))
    if not rows:
        return None
    about = nodes.paragraph("", "The op and the same work through other libraries, as ")
    about += nodes.literal("", "make libraries")
    about += nodes.Text(
        " measured them: the median rates, with the launch hidden and the L2 "
        "cache emptied. In a tie the two bands, from the 20th to the 80th percentile, overlap. A row is stale if the "
        "code of the op or its lesson has changed since. "
    )
    about += page_link("performance")
    about += nodes.Text(" says what each size means.")
    shown = titled(TITLE)
    shown += [about, *_tables(rows, [recipe], {})]
    return shown


def _tables(rows: Sequence[PeerRow], recipes: Sequence[Recipe], links: dict[str, str], *kinds: str) -> list[nodes.Node]:
    """Return for each device a line for each run, then a table for each unit; works have links to the pages of `links`.

    Where there are several runs, each row names its own.
    """
    shown: list[nodes.Node] = []
    for device, of_device in groupby(rows, key=lambda row: row.environment.name):
        there = list(of_device)
        runs = dict.fromkeys(facts(row, {"triton": row.environment.triton, **row.packages}) for row in there)
        tables = [told(device, list(runs))]
        for unit in dict.fromkeys(row.unit for row in there):
            of_unit = [row for row in there if row.unit == unit]
            columns, cells = _cells(of_unit, unit)
            if len(runs) > 1:
                columns.append("measured")
                cells = [[*texts, when(row)] for texts, row in zip(cells, of_unit, strict=True)]
            table = grid(columns, cells, "peers", "sortable", *kinds)
            name_rows(table, of_unit, recipes, links)
            tables.append(table)
        shown += of_gpu(device, tables)
    return shown


def _cells(rows: Sequence[PeerRow], unit: str) -> tuple[list[str], list[list[str]]]:
    """Return the titles of a table's columns, and its rows without their names."""
    others = [name for row in rows for name, rate in row.rates.items() if rate and name not in {TRITON, ROOF}]
    series = [TRITON, *dict.fromkeys(others), ROOF]
    columns = ["work", "size", "Triton / best other", "Triton / roof", f"Triton Gallery ({unit})", *series[1:]]
    cells = []
    for row in rows:
        other, roof = row.table.ratio(0), row.table.of_roof(0)
        ratios = [f"{other:.2f}{' (tie)' if row.is_tie else ''}" if other else "", f"{roof:.2f}" if roof else ""]
        medians = [figure(rate[0] if (rate := row.rates.get(name)) else None) for name in series]
        cells.append(["", row.size, *ratios, *medians])
    if any(row.dtype for row in rows):
        columns.insert(2, "dtype")
        for texts, row in zip(cells, rows, strict=True):
            texts.insert(2, row.dtype)
    return columns, cells


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    return outdated(env, STATE, page_context.peers(env))
