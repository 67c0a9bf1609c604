"""The performance page: every recipe on every recorded device, as a chart, a table and data files."""

import csv
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipes.contents import Recipe
from triton_gallery.recipes.tables import Table
from triton_gallery.records.measurements import Measurement, all_recorded
from triton_gallery.records.peers import PeerRow, table_of
from triton_gallery.records.recorded import Records
from triton_gallery.sphinx import lookup
from triton_gallery.sphinx.chart import fractions_svg
from triton_gallery.sphinx.show import figure, first_cells, grid, size

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PAGE = "performance"
COLUMNS = ["recipe", "workload", "Triton", "best other", "Triton / best other", "median", "worst", "Triton / roof"]
COLUMNS += ["device", "date"]


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive and what writes the data files."""
    app.add_directive("performance", PerformanceDirective)
    app.add_js_file("performance.js")
    app.connect("env-get-outdated", _outdated)
    app.connect("build-finished", _write_data)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@dataclass(frozen=True)
class Summary:
    """A benchmark: its middle size, and the ratios over all of its sizes, without those that the CPU decided.

    Attributes:
        recipe: of what.
        kind: what tells it from the recipe's other benchmarks.
        table: the figures.
        device: where they were measured.
        date: when; of several runs, when the first began.
        is_fresh: whether all of them are of the recipe's present code.
        is_page: whether they are those of the recipe's page, and not of `make peers`.
    """

    recipe: Recipe
    kind: str
    table: Table
    device: str
    date: str
    is_fresh: bool
    is_page: bool

    @property
    def middle(self) -> int:
        """The index of the size that is shown: the middle one, the larger of two."""
        return self.table.settled[len(self.table.settled) // 2]

    @property
    def workload(self) -> str:
        """What was measured, at which size."""
        return f"{f'{self.kind}, ' if self.kind else ''}{self._size(self.middle)}"

    @property
    def of_roof(self) -> float | None:
        """Our best figure over the roof's, at the middle size."""
        return self.table.of_roof(self.middle)

    def cells(self) -> list[str]:
        """Return the row of the page's table."""
        ours = self.table.best(self.table.ours, self.middle)
        other = self.table.best(self.table.others, self.middle)
        ratios = [(ratio, index) for index in self.table.settled if (ratio := self.table.ratio(index))]
        ratio, roof = self.table.ratio(self.middle), self.of_roof
        return [
            "",
            self.workload,
            f"{figure(ours[1])} {self.table.unit}" if ours else "",
            f"{other[0]}: {figure(other[1])}" if other else "",
            f"{ratio:.2f}" if ratio else "",
            f"{median(ratio for ratio, _ in ratios):.2f}" if ratios else "",
            f"{min(ratios)[0]:.2f} at {self._size(min(ratios)[1])}" if ratios else "",
            f"{roof:.2f}" if roof else "",
            self.device,
            self.date[:10] + ("" if self.is_fresh else ", stale"),
        ]

    def _size(self, index: int) -> str:
        x = size(self.table.xs[index])
        return f"{self.table.x} = {x}" if self.is_page else x


def summaries(records: Records, rows: Sequence[PeerRow], recipes: Sequence[Recipe]) -> Iterator[Summary]:
    """Yield the benchmarks of all recipes on all devices: those of its page, then its works beside other libraries."""
    for recipe in recipes:
        for record in records.of(recipe):
            for table in (table for output in record.outputs for table in output.tables):
                kind = table.name.removeprefix("results").strip("_").replace("_", " ")
                yield Summary(recipe, kind, table, record.device.name, record.date, record.is_fresh(recipe), True)
        of_recipe = (row for row in rows if row.recipe == recipe.key)
        for (device, name), group in groupby(of_recipe, key=lambda row: (row.device.name, row.work)):
            there = list(group)
            kind = f"{name.removeprefix(recipe.name).strip(', ')} (make peers)".strip()
            fresh = all(row.is_fresh([recipe]) for row in there)
            yield Summary(recipe, kind, table_of(there), device, min(row.date for row in there), fresh, False)


class PerformanceDirective(SphinxDirective):
    """`performance`: the chart, the links to the data, and the table."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        env = self.env
        found = _summaries(env)
        env.metadata[PAGE]["records"] = _state(found)
        if not found:
            return [nodes.paragraph("", "Nothing has been recorded yet.")]
        bars = [
            (f"{item.recipe.name}, {item.workload}", item.device, roof)
            for item in found
            if item.is_page and (roof := item.of_roof)
        ]
        table = grid(COLUMNS, [item.cells() for item in found], "performance", "sortable", "filterable")
        gallery = env.config.sphinx_gallery_conf["gallery_dirs"]
        for place, item in zip(first_cells(table), found, strict=True):
            place += nodes.reference("", item.recipe.name, refuri=f"{gallery}/{item.recipe.key}.html", internal=True)
        data = nodes.paragraph("", "Every recorded figure: ")
        data += nodes.reference("", "CSV", refuri=f"{PAGE}.csv")
        data += nodes.Text(", ")
        data += nodes.reference("", "JSON", refuri=f"{PAGE}.json")
        chart = [nodes.raw("", f'<div class="chart">{fractions_svg(bars)}</div>', format="html")] if bars else []
        return [*chart, table, data]


def _summaries(env: "BuildEnvironment") -> list[Summary]:
    return list(summaries(lookup.records(env), lookup.peers(env), list(lookup.recipes(env).values())))


def _state(found: Sequence[Summary]) -> str:
    """Identify what the page shows."""
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the page if it shows something else than it would now."""
    shown = env.metadata[PAGE].get("records") if PAGE in env.all_docs else None
    return [PAGE] if shown and shown != _state(_summaries(env)) else []


def _write_data(app: "Sphinx", exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    recipes = list(lookup.recipes(app.env).values())
    found = all_recorded(lookup.records(app.env), recipes)
    out = Path(app.outdir)
    (out / f"{PAGE}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    with open(out / f"{PAGE}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Measurement)])
        writer.writeheader()
        writer.writerows(found["figures"])
