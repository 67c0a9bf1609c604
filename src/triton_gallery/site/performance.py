"""The performance page: a line for each op on the chosen GPU, which opens to its sizes; and all figures as data."""

import csv
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.figures.measurements import Measurement, all_recorded
from triton_gallery.figures.ratios import BESIDE, Over, Summary, summaries
from triton_gallery.site import deferred, op_grid, page_context, render
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.render import html, of_gpu, older, op_link, page_link, paragraph, table
from triton_gallery.site.verdict import label

PAGE = "performance"
SIZES = "sizes"  # the folder with a script for each op, which has its sizes
COLUMNS = ["op", "dtype", "forward / best other", "worst", "/ roof", "backward / best other", "worst", "/ roof"]
COLUMNS += ["sizes", "date"]
LESSONS = "Lessons without an op measure what a step changes, not the fastest kernel. Their pages have the figures: "


class PerformanceDirective(SphinxDirective):
    """`performance`: the menu of the GPUs, a table for each, and the links to the lessons and the data."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, shown)
        by_op = op_grid.speeds(self.env)
        gpus = op_grid.gpus(by_op)
        parts = [op_grid.choice(gpus)] if gpus else [paragraph("No op has been measured yet.")]
        for gpu in gpus:
            rows = [_row(op, gpu, main) for op, of_gpus in by_op.items() if (main := of_gpus.get(gpu))]
            fresh = sum(main[0].is_fresh for of_gpus in by_op.values() if (main := of_gpus.get(gpu)))
            about = paragraph(nodes.strong("", gpu), f": {fresh} of {len(by_op)} ops measured in their present code")
            of_table = table(COLUMNS, rows, "performance", "sortable", "filterable")
            parts += of_gpu(gpu, [about, of_table], hidden=gpu != gpus[0])
        csv_link, json_link = (nodes.reference("", kind.upper(), refuri=f"{PAGE}.{kind}") for kind in ("csv", "json"))
        lessons = _comma_separated([page_link(page) for page in _lessons(self.env)])
        return [
            *parts,
            *([paragraph(LESSONS, *lessons, ".")] if lessons else []),
            paragraph("Every recorded figure: ", csv_link, ", ", json_link),
        ]


def _row(op: str, gpu: str, main: Sequence[Summary]) -> list[render.Parts]:
    """Return the row of an op: its ratios forward and backward, and a button that opens its sizes."""
    by_way = {item.is_backward: item for item in reversed(main)}
    cells: list[render.Parts] = []
    for is_backward in (False, True):
        item = by_way.get(is_backward)
        over, roof = (item.over(ratio) for ratio in (item.table.ratio, item.table.of_roof)) if item else (None, None)
        cells += [*((f"{over.median:.2f}", f"{over.worst:.2f}") if over else ("", "")), _bar(roof)]
    count = max(len(item.table.settled) for item in main)
    text = f"{count} {'size' if count == 1 else 'sizes'}"
    button = (
        f'<button type="button" class="sizes" aria-expanded="false" data-op="{op}" data-gpu-name="{escape(gpu)}" '
        f'aria-label="{text} of {op}">{text}</button>'
    )
    return [[op_link(op)], _workload(main[0]), *cells, [html(button)], min(item.date for item in main)[:10]]


def _workload(item: Summary) -> str:
    """Return the dtype of a benchmark, its variant if it is not the op itself, and whether the code is older."""
    variant = item.variant.removeprefix(item.dtype).strip(", ")
    return ", ".join(filter(None, [item.dtype or "the lesson's sizes", variant])) + older(item.is_fresh)


def _bar(roof: Over | None) -> render.Parts:
    """Return the fraction of the roof, with a bar of this length below it."""
    if not roof:
        return ""
    return [html(f'<span class="bar" style="--roof: {min(roof.median, 1):.3f}">{roof.median:.2f}</span>')]


def _comma_separated(links: Sequence[nodes.Node]) -> list[nodes.Node | str]:
    return [part for link in links for part in (", ", link)][1:]


def _lessons(env: BuildEnvironment) -> list[str]:
    """Return the pages of the recipes without an op that have a recorded benchmark."""
    ops, records = set(page_context.ops(env).values()), page_context.records(env)
    pages = page_context.recipes(env).items()
    return [page for page, recipe in pages if page not in ops and any(summaries(records.of(recipe), [], recipe))]


def shown(env: BuildEnvironment) -> object:
    """Return what the page shows; for `freshness.depends_on`."""
    return op_grid.speeds(env), _lessons(env)


def write(app: Sphinx) -> None:
    """Write the data files, and for each op a script with the tables of its sizes."""
    env, out = app.env, Path(app.outdir)
    records, recipes = page_context.records(env), page_context.recipes(env)
    recorded = all_recorded(records, list(recipes.values()))
    (out / f"{PAGE}.json").write_text(json.dumps(recorded, indent=1), encoding="utf-8")
    with open(out / f"{PAGE}.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, Measurement.__struct_encode_fields__)
        writer.writeheader()
        writer.writerows(recorded["figures"])
    folder, rows = out / SIZES, page_context.beside_libraries(env)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.js"):
        old.unlink()
    for op, page in page_context.ops(env).items():
        tables: dict[str, list[dict[str, Any]]] = {}
        items = [*summaries(records.of(recipes[page]), rows, recipes[page])]
        fresh = {item.environment.name for item in items if item.is_fresh}
        for item in sorted(items, key=lambda item: item.is_page):  # those that the op's line sums up come first
            if item.is_fresh or item.environment.name not in fresh:
                tables.setdefault(item.environment.name, []).append(_sizes(item))
        (folder / f"{op}.js").write_text(deferred.script(tables), encoding="ascii")


def _sizes(item: Summary) -> dict[str, Any]:
    """Return a benchmark as a table and the notes below it, for JSON."""
    frame = render.benchmark(item.table)
    where = "the lesson's sizes" if item.is_page else BESIDE
    words = dict.fromkeys([*label(item).split(", "), item.dtype, where, item.date[:10]])
    title = ", ".join(filter(None, words)) + older(item.is_fresh)
    return {"title": title, "columns": frame.columns, "rows": frame.rows, "notes": render.clocks(item.table)}
