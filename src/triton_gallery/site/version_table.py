"""Our ops under several versions of Triton: all of them on a page, and on a recipe's page a sentence if it lost."""

from collections.abc import Sequence
from itertools import groupby
from statistics import geometric_mean
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipe.contents import Recipe
from triton_gallery.site import page_context, peer_table
from triton_gallery.site.render import add_section, figure, grid, page_link, titled
from triton_gallery.site.row_table import facts, name_rows, of, outdated, state, told, when
from triton_gallery.versions.rates import VersionRow

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "versions"  # the key in a page's metadata for what it shows
PAGE = "versions"
TITLE = "With another Triton"
LOST = 0.95  # of the baseline's rate: below it, an op's page says so


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive and the transform, and make pages follow what is recorded."""
    app.add_directive("versions", VersionsDirective)
    app.add_transform(VersionsOfRecipe)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class VersionsDirective(SphinxDirective):
    """`versions`: the rows of all recipes."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        rows, recipes = page_context.versions(self.env), list(page_context.recipes(self.env).values())
        self.env.metadata[self.env.docname][STATE] = state(rows, recipes)
        if not rows:
            return [nodes.paragraph("", "Nothing has been measured under several versions of Triton yet.")]
        gallery = self.env.config.sphinx_gallery_conf["gallery_dirs"]
        links = {recipe.key: f"{gallery}/{recipe.key}" for recipe in recipes}
        shown: list[nodes.Node] = []
        for (device, baseline), group in groupby(sorted(rows, key=_group), key=_group):  # sorted keeps the order else
            shown += _tables(device, baseline, list(group), recipes, links)
        return shown


def sentence(env: "BuildEnvironment", recipe: Recipe) -> nodes.paragraph | None:
    """Say where a recipe's op lost most; None if it lost nowhere."""
    return _sentence([row for row in of(recipe, page_context.versions(env)) if row.is_fresh([recipe])])


class VersionsOfRecipe(SphinxTransform):
    """Says on a recipe's page where the op lost most of its rate."""

    default_priority = 601  # after the section beside other libraries is there

    def apply(self, **kwargs: object) -> None:
        """Add the sentence to that section; without one, in a section of its own."""
        name = self.env.current_document.docname
        recipe = page_context.recipes(self.env).get(name)
        if recipe is None:
            return
        rows = of(recipe, page_context.versions(self.env))
        self.env.metadata[name][STATE] = state(rows, [recipe])
        said = sentence(self.env, recipe)
        if said is None or page_context.op_of_page(self.env, recipe):  # which says it itself
            return
        beside = nodes.make_id(peer_table.TITLE)
        for section in self.document.findall(nodes.section):
            if beside in section["ids"]:
                section += said
                return
        section = titled(TITLE)
        section += said
        add_section(self.document, section)


def _group(row: VersionRow) -> tuple[str, str]:
    """Return what the rows of a table have in common."""
    return row.environment.name, row.baseline


def _sentence(rows: Sequence[VersionRow]) -> nodes.paragraph | None:
    """Say where an op lost most; None if it lost nowhere."""
    found = [(ratio, name, row) for row in rows for name in row.others if (ratio := row.ratio(name)) is not None]
    if not found:
        return None
    ratio, name, row = min(found, key=lambda one: one[0])
    if ratio >= LOST:
        return None
    rest = row.work.removeprefix(row.recipe.rpartition("/")[2]).strip(", ")
    where = f"{rest}, {row.size}" if rest else row.size
    said = nodes.paragraph(
        "",
        f"With Triton {name} this op reaches {ratio:.2f} of its rate with {row.baseline} ({where}, on "
        f"{row.environment.name}); ",
    )
    said += page_link(PAGE)
    said += nodes.Text(" has every size.")
    return said


def _tables(
    device: str, baseline: str, rows: Sequence[VersionRow], recipes: Sequence[Recipe], links: dict[str, str]
) -> list[nodes.Node]:
    """Return a line for each run, one for the means, and a table for each unit; all rows have one baseline.

    Where there are several runs, each row names its own.
    """
    runs = dict.fromkeys(_facts(row) for row in rows)
    others = [*dict.fromkeys(name for row in rows for name in row.others)]
    shown = [told(device, list(runs)), *_totals(rows, baseline, others, recipes)]
    names = [baseline, *others]
    for unit in dict.fromkeys(row.unit for row in rows):
        of_unit = [row for row in rows if row.unit == unit]
        columns = ["work", "size", *(f"{name} / {baseline}" for name in others)]
        columns += [f"{name} ({unit})" for name in names] + [f"{name}, compiled (s)" for name in names]
        cells = [["", row.size, *_cells(row, names)] for row in of_unit]
        if len(runs) > 1:
            columns.append("measured")
            cells = [[*texts, when(row)] for texts, row in zip(cells, of_unit, strict=True)]
        table = grid(columns, cells, "peers", "sortable", "filterable")
        name_rows(table, of_unit, recipes, links)
        shown.append(table)
    return shown


def _facts(row: VersionRow) -> str:
    """Say when and with what a row was measured."""
    used = {f"triton {name}": f"(ptxas {contender.assembler})" for name, contender in row.contenders.items()}
    return facts(row, used)


def _totals(
    rows: Sequence[VersionRow], baseline: str, others: Sequence[str], recipes: Sequence[Recipe]
) -> list[nodes.Node]:
    """Return a line on the rows that are not stale: each contender's mean ratio, and the seconds that it compiled."""
    fresh = [row for row in rows if row.is_fresh(recipes)]
    parts = []
    for name in others:
        found = [ratio for row in fresh if (ratio := row.ratio(name)) is not None]
        if found:
            parts.append(f"{name} / {baseline}: {geometric_mean(found):.3f} over {len(found)} rows")
    if not parts:
        return []
    seconds = {
        name: sum(one.seconds or 0 for row in fresh if (one := row.contenders.get(name)))
        for name in (baseline, *others)
    }
    compiled = ", ".join(f"{name} {total:.0f}" for name, total in seconds.items())
    return [
        nodes.paragraph(
            "",
            f"Geometric mean of the ratios: {'; '.join(parts)}. Seconds of compiling, all rows together: {compiled}.",
        )
    ]


def _cells(row: VersionRow, names: Sequence[str]) -> list[str]:
    """Return a row's ratios, rates and seconds of compiling; empty where a contender was not measured."""
    ratios = ["" if (ratio := row.ratio(name)) is None else f"{ratio:.2f}" for name in names[1:]]
    rates, seconds = [], []
    for contender in map(row.contenders.get, names):
        rates.append("" if contender is None else figure(contender.rate[0]) if contender.rate else "failed")
        seconds.append("" if contender is None or contender.seconds is None else f"{contender.seconds:.2f}")
    return [*ratios, *rates, *seconds]


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    return outdated(env, STATE, page_context.versions(env))
