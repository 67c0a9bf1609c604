"""Tables of our ops under several versions of Triton, and on a recipe's page a sentence if its op became slower."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby
from statistics import geometric_mean

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipe.contents import Recipe
from triton_gallery.site import library_table, page_context
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import add_section, figure, folded, page_link, paragraph, titled
from triton_gallery.site.row_table import device_tables, part_of_recipe
from triton_gallery.versions.rates import VersionRow

PAGE = "versions"
TITLE = "With another Triton"
LOST = 0.95  # of the baseline's rate: below it, an op's page says so


class VersionsDirective(SphinxDirective):
    """`versions`: the rows of all recipes."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, shown)
        rows, recipes = page_context.versions(self.env), page_context.recipes(self.env)
        if not rows:
            return [paragraph("Nothing has been measured under several versions of Triton yet.")]
        links = {recipe.key: page for page, recipe in recipes.items()}

        def group(row: VersionRow) -> tuple[str, str]:
            return row.environment.name, row.baseline

        tables: list[nodes.Node] = []
        for _, of_group in groupby(sorted(rows, key=group), key=group):  # sorted keeps the order else
            tables += _tables(list(of_group), list(recipes.values()), links)
        return tables


def add_to_recipe(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Add a sentence on where a recipe's op became slower, unless the op has a page, which has the sentence.

    It is added to the section beside other libraries; without one, in a section of its own.
    """
    depends_on(env, shown, page.recipe.key)
    text = sentence(env, page.recipe)
    if text is None or page_context.op_of_page(env, page.recipe):
        return
    beside = nodes.make_id(library_table.TITLE)
    for section in document.findall(nodes.section):
        if beside in section["ids"]:
            section += text
            return
    add_section(document, titled(TITLE, text))


def shown(env: BuildEnvironment, key: str = "") -> list[tuple[VersionRow, bool]]:
    """Return the rows of a recipe or of all, and whether each is fresh; for `freshness.depends_on`."""
    recipes = list(page_context.recipes(env).values())
    return [(row, row.is_fresh(recipes)) for row in page_context.versions(env) if row.recipe == (key or row.recipe)]


def sentence(env: BuildEnvironment, recipe: Recipe) -> nodes.paragraph | None:
    """Return a sentence on where a recipe's op became slower most; None if it did not."""
    rows = [row for row, is_fresh in shown(env, recipe.key) if is_fresh]
    ratios = [(ratio, name, row) for row in rows for name in row.others if (ratio := row.ratio(name)) is not None]
    if not ratios:
        return None
    ratio, name, row = min(ratios, key=lambda item: item[0])
    if ratio >= LOST:
        return None
    where = ", ".join(filter(None, [part_of_recipe(row), row.size]))
    return paragraph(
        f"With Triton {name} this op reaches {ratio:.2f} of its rate with {row.baseline} ({where}, on "
        f"{row.environment.name}); ",
        page_link(PAGE),
        " has every size.",
    )


def _tables(rows: Sequence[VersionRow], recipes: Sequence[Recipe], links: dict[str, str]) -> list[nodes.Node]:
    """Return the tables of one device and one baseline, with a line of means below the runs."""
    baseline = rows[0].baseline
    names = [baseline, *dict.fromkeys(name for row in rows for name in row.others)]

    def assemblers(row: VersionRow) -> dict[str, str]:
        return {f"triton {name}": f"(ptxas {contender.assembler})" for name, contender in row.contenders.items()}

    def cells(of_unit: Sequence[VersionRow], unit: str) -> tuple[list[str], list[list[str]]]:
        columns = ["size", *(f"{name} / {baseline}" for name in names[1:])]
        columns += [f"{name} ({unit})" for name in names] + [f"{name}, compiled (s)" for name in names]
        return columns, [[row.size, *_cells(row, names)] for row in of_unit]

    runs, *tables = device_tables(rows, assemblers, cells, recipes, links, "filterable")
    units = Counter(row.unit for row in rows)
    folds = (folded(f"{count} rows in {unit}", [box]) for (unit, count), box in zip(units.items(), tables, strict=True))
    return [runs, *_means(rows, names, recipes), *chain.from_iterable(folds)]


def _means(rows: Sequence[VersionRow], names: Sequence[str], recipes: Sequence[Recipe]) -> list[nodes.Node]:
    """Return a line on the fresh rows: the mean ratio and the compile time of each version."""
    fresh = [row for row in rows if row.is_fresh(recipes)]
    means = []
    for name in names[1:]:
        ratios = [ratio for row in fresh if (ratio := row.ratio(name)) is not None]
        if ratios:
            means.append(f"{name} / {names[0]}: {geometric_mean(ratios):.3f} over {len(ratios)} rows")
    if not means:
        return []
    seconds = {name: [made.seconds or 0 for row in fresh if (made := row.contenders.get(name))] for name in names}
    compiled = ", ".join(f"{name} {sum(times):.0f}" for name, times in seconds.items())
    ratios_text = f"Geometric mean of the ratios: {'; '.join(means)}."
    return [paragraph(f"{ratios_text} Seconds of compiling, all rows together: {compiled}.")]


def _cells(row: VersionRow, names: Sequence[str]) -> list[str]:
    """Return a row's ratios, rates and seconds of compiling; empty where a contender was not measured."""
    ratios = ["" if (ratio := row.ratio(name)) is None else f"{ratio:.2f}" for name in names[1:]]
    rates, seconds = [], []
    for contender in map(row.contenders.get, names):
        rates.append("" if contender is None else figure(contender.rate[0]) if contender.rate else "failed")
        seconds.append("" if contender is None or contender.seconds is None else f"{contender.seconds:.2f}")
    return [*ratios, *rates, *seconds]
