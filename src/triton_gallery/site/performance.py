"""The performance page: every recipe on every recorded device, as a chart, a table and data files."""

import csv
import json
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.figures.measurements import Measurement, all_recorded
from triton_gallery.figures.ratios import Summary, summaries
from triton_gallery.site import page_context, render
from triton_gallery.site.chart import fractions_svg
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.render import figure, html, of_gpu, page_link, paragraph, table, two_digits, where

PAGE = "performance"
COLUMNS = ["recipe", "workload", "Triton / best other", "median", "worst", "Triton / roof", "Triton", "best other"]
COLUMNS += ["device", "date"]
CHOICE = (
    '<label class="gpu-choice">GPU: <select></select></label>'  # a script fills it; it is there before, for its room
)


class PerformanceDirective(SphinxDirective):
    """`performance`: the chart, the links to the data, and the table."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, all_summaries)
        items = all_summaries(self.env)
        if not items:
            return [paragraph("Nothing has been recorded yet.")]
        bars = defaultdict[str, list[tuple[str, float]]](list)
        for item in items:
            if item.is_page and (roof := item.table.of_roof(item.middle)):
                bars[item.environment.name].append((f"{item.recipe.name}, {_workload(item)}", roof))
        csv_link, json_link = (nodes.reference("", kind.upper(), refuri=f"{PAGE}.{kind}") for kind in ("csv", "json"))
        shown: list[nodes.Node] = [html(CHOICE)] if len({item.environment.name for item in items}) > 1 else []
        for device, of_device in sorted(bars.items()):
            shown += of_gpu(device, [html(fractions_svg(device, of_device))])
        return [
            *shown,
            table(COLUMNS, [self._row(item) for item in items], "performance", "sortable", "filterable"),
            paragraph("Every recorded figure: ", csv_link, ", ", json_link),
        ]

    def _row(self, item: Summary) -> list[render.Parts]:
        """Return the row of a benchmark."""
        middle, benchmark = item.middle, item.table
        ours, other = benchmark.best(benchmark.ours, middle), benchmark.best(benchmark.others, middle)
        over = item.over(benchmark.ratio)
        return [
            page_link(page_context.page_name(self.env, item.recipe.key)),
            _workload(item),
            two_digits(benchmark.ratio(middle)),
            f"{over.median:.2f}" if over else "",
            f"{over.worst:.2f} at {where(item, over.at)}" if over else "",
            two_digits(benchmark.of_roof(middle)),
            f"{figure(ours[1])} {benchmark.unit}" if ours else "",
            f"{other[0]}: {figure(other[1])} {benchmark.unit}" if other else "",
            item.environment.name,
            item.date[:10] + ("" if item.is_fresh else ", stale"),
        ]


def _workload(item: Summary) -> str:
    """Return the workload of a benchmark's row: its kind and size."""
    return f"{f'{item.kind}, ' if item.kind else ''}{where(item, item.middle)}"


def all_summaries(env: BuildEnvironment) -> list[Summary]:
    """Return the benchmarks of all recipes on all devices."""
    records, rows = page_context.records(env), page_context.beside_libraries(env)
    recipes = page_context.recipes(env).values()
    return [item for recipe in recipes for item in summaries(records.of(recipe), rows, recipe)]


def write(app: Sphinx) -> None:
    """Write the data files."""
    recipes = list(page_context.recipes(app.env).values())
    recorded = all_recorded(page_context.records(app.env), recipes)
    out = Path(app.outdir)
    (out / f"{PAGE}.json").write_text(json.dumps(recorded, indent=1), encoding="utf-8")
    with open(out / f"{PAGE}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, Measurement.__struct_encode_fields__)
        writer.writeheader()
        writer.writerows(recorded["figures"])
