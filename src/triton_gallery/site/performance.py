"""The performance page: every recipe on every recorded device, as a chart, a table and data files."""

import csv
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.figures.measurements import Measurement, all_recorded
from triton_gallery.figures.ratios import Summary, summaries
from triton_gallery.site import page_context
from triton_gallery.site.chart import fractions_svg
from triton_gallery.site.render import figure, first_cells, grid, of_gpu, page_link, where

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PAGE = "performance"
COLUMNS = ["recipe", "workload", "Triton / best other", "median", "worst", "Triton / roof", "Triton", "best other"]
COLUMNS += ["device", "date"]
CHOICE = (
    '<label class="gpu-choice">GPU: <select></select></label>'  # a script fills it; it is there before, for its room
)


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive and what writes the data files."""
    app.add_directive("performance", PerformanceDirective)
    app.add_js_file("performance.js")
    app.connect("env-get-outdated", _outdated)
    app.connect("build-finished", _write_data)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def cells(item: Summary) -> list[str]:
    """Return the row of the page's table."""
    middle, table = item.middle, item.table
    ours, other = table.best(table.ours, middle), table.best(table.others, middle)
    ratio, roof = table.ratio(middle), table.of_roof(middle)
    over = item.over(table.ratio)
    return [
        "",
        f"{f'{item.kind}, ' if item.kind else ''}{where(item, middle)}",
        f"{ratio:.2f}" if ratio else "",
        f"{over.median:.2f}" if over else "",
        f"{over.worst:.2f} at {where(item, over.at)}" if over else "",
        f"{roof:.2f}" if roof else "",
        f"{figure(ours[1])} {table.unit}" if ours else "",
        f"{other[0]}: {figure(other[1])} {table.unit}" if other else "",
        item.environment.name,
        item.date[:10] + ("" if item.is_fresh else ", stale"),
    ]


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
        bars = defaultdict[str, list[tuple[str, float]]](list)
        for item in found:
            if item.is_page and (roof := item.table.of_roof(item.middle)):
                bars[item.environment.name].append((f"{item.recipe.name}, {cells(item)[1]}", roof))
        table = grid(COLUMNS, [cells(item) for item in found], "performance", "sortable", "filterable")
        gallery = env.config.sphinx_gallery_conf["gallery_dirs"]
        for place, item in zip(first_cells(table), found, strict=True):
            place += page_link(f"{gallery}/{item.recipe.key}")
        data = nodes.paragraph("", "Every recorded figure: ")
        data += nodes.reference("", "CSV", refuri=f"{PAGE}.csv")
        data += nodes.Text(", ")
        data += nodes.reference("", "JSON", refuri=f"{PAGE}.json")
        charts: list[nodes.Node] = []
        if len({item.environment.name for item in found}) > 1:
            charts.append(nodes.raw("", CHOICE, format="html"))
        for device, of_device in sorted(bars.items()):
            drawn = f'<div class="chart">{fractions_svg(device, of_device)}</div>'
            charts += of_gpu(device, [nodes.raw("", drawn, format="html")])
        return [*charts, table, data]


def _summaries(env: "BuildEnvironment") -> list[Summary]:
    records, rows = page_context.records(env), page_context.peers(env)
    recipes = page_context.recipes(env).values()
    return [item for recipe in recipes for item in summaries(records.of(recipe), rows, recipe)]


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
    recipes = list(page_context.recipes(app.env).values())
    found = all_recorded(page_context.records(app.env), recipes)
    out = Path(app.outdir)
    (out / f"{PAGE}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    with open(out / f"{PAGE}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, Measurement.__struct_encode_fields__)
        writer.writeheader()
        writer.writerows(found["figures"])
