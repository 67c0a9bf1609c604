"""The performance page: every recipe on every recorded device, as a chart, a table and data files."""

import csv
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.chart import fractions_svg
from triton_gallery.recipes import Recipe
from triton_gallery.records import Record, Records
from triton_gallery.rows import rows
from triton_gallery.sphinx import page
from triton_gallery.sphinx.show import figure, first_cells, grid, size
from triton_gallery.tables import Table

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PAGE = "performance"
COLUMNS = ["recipe", "workload", "Triton", "best other", "Triton / best other", "Triton / roof", "device", "date"]


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive and what writes the data files."""
    app.add_directive("performance", PerformanceDirective)
    app.add_js_file("performance.js")
    app.connect("env-get-outdated", _outdated)
    app.connect("build-finished", _write_data)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@dataclass(frozen=True)
class Summary:
    """A benchmark table at its last, largest size."""

    recipe: Recipe
    record: Record
    table: Table

    @property
    def workload(self) -> str:
        """What was measured: the size, and the table if a recipe has several."""
        kind = self.table.name.removeprefix("results").strip("_").replace("_", " ")
        return f"{f'{kind}, ' if kind else ''}{self.table.x} = {size(self.table.xs[-1])}"

    def cells(self) -> list[str]:
        """Return the row of the page's table."""
        ours = self.table.best(self.table.ours, -1)
        other = self.table.best(self.table.others, -1)
        ratio, roof = self.table.ratio(-1), self.table.of_roof(-1)
        return [
            "",
            self.workload,
            f"{figure(ours[1])} {self.table.unit}" if ours else "",
            f"{other[0]}: {figure(other[1])}" if other else "",
            f"{ratio:.2f}" if ratio else "",
            f"{roof:.2f}" if roof else "",
            self.record.device.name,
            self.record.date[:10] + ("" if self.record.is_fresh(self.recipe) else ", stale"),
        ]


def summaries(records: Records, recipes: list[Recipe]) -> Iterator[Summary]:
    """Yield the benchmarks of all recipes on all devices."""
    for recipe in recipes:
        for record in records.of(recipe):
            for table in (table for output in record.outputs for table in output.tables):
                yield Summary(recipe, record, table)


class PerformanceDirective(SphinxDirective):
    """`performance`: the chart, the links to the data, and the table."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        env = self.env
        records, recipes = _sources(env)
        env.metadata[PAGE]["records"] = _state(records)
        found = list(summaries(records, recipes))
        if not found:
            return [nodes.paragraph("", "Nothing has been recorded yet.")]
        bars = [
            (f"{item.recipe.name}, {item.workload}", item.record.device.name, roof)
            for item in found
            if (roof := item.table.of_roof(-1))
        ]
        table = grid(COLUMNS, [item.cells() for item in found], "performance", "sortable")
        gallery = env.config.sphinx_gallery_conf["gallery_dirs"]
        for place, item in zip(first_cells(table), found, strict=True):
            place += nodes.reference("", item.recipe.name, refuri=f"{gallery}/{item.recipe.key}.html", internal=True)
        data = nodes.paragraph("", "Every recorded figure: ")
        data += nodes.reference("", "CSV", refuri=f"{PAGE}.csv")
        data += nodes.Text(", ")
        data += nodes.reference("", "JSON", refuri=f"{PAGE}.json")
        return [nodes.raw("", f'<div class="chart">{fractions_svg(bars)}</div>', format="html"), table, data]


def _sources(env: "BuildEnvironment") -> tuple[Records, list[Recipe]]:
    return page.records(env), list(page.recipes(env).values())


def _state(records: Records) -> str:
    return repr([(str(path), path.stat().st_mtime_ns) for path in sorted(records.folder.glob("*/*/*.json"))])


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the page if a record or a recipe has changed since it was read."""
    records, recipes = _sources(env)
    if PAGE not in env.all_docs:
        return []
    changed = env.metadata[PAGE].get("records") != _state(records)
    stale = any(not record.is_fresh(recipe) for recipe in recipes for record in records.of(recipe))
    return [PAGE] if changed or stale else []


def _write_data(app: "Sphinx", exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    records, recipes = _sources(app.env)
    found = [dataclasses.asdict(row) for row in rows(records, recipes)]
    out = Path(app.outdir)
    (out / f"{PAGE}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    with open(out / f"{PAGE}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["recipe", "table", "x_name", "x", "series", "value", "unit", "device", "state"])
        writer.writeheader()
        writer.writerows(found)
