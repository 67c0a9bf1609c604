"""The box under a recipe's first sentences: what its op comes to, how to take it, what comes before and after."""

import os
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from triton_gallery.recipes.cells import cells
from triton_gallery.recipes.declaration import OfOp, declaration
from triton_gallery.recipes.tables import ROOF, Table
from triton_gallery.records.summary import Summary, summaries
from triton_gallery.sphinx import provenance, repository, take, targets
from triton_gallery.sphinx.chart import svg
from triton_gallery.sphinx.lookup import RecipePage, pages, peers, recipe_page, recipes
from triton_gallery.sphinx.show import WAITED, figure, grid, page_link, where

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform."""
    app.add_transform(Glance)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Glance(SphinxTransform):
    """Puts the box on each page that a run made."""

    default_priority = 590  # before downloads are collected

    def apply(self, **kwargs: object) -> None:
        """Insert the box before the first cell of the document, if it is a recipe's page."""
        page = recipe_page(self.env, self.env.current_document.docname)
        if page is None or page.run is None:
            return
        self.env.note_dependency(str(pages(self.env).run_file(page.recipe.key)))
        for note in list(self.document.findall(nodes.note)):
            if "sphx-glr-download-link-note" in note["classes"]:
                note.parent.remove(note)
        of_op = declaration(page.recipe.path, page.recipe.text).of_op
        measured = _measured(page, list(summaries(page.records[:1], peers(self.env), page.recipe)))
        strip = nodes.container("", *provenance.lines(page, page.run), classes=["recipe-strip"])
        box = nodes.container("", nodes.rubric("", "At a glance"), *measured, classes=["glance"])
        box += [
            *_said(of_op),
            *targets.strip(self.env, page.recipe),
            strip,
            _files(self.env, page, self.document),
            _path(self.env),
        ]
        shown = [*provenance.failure(page.run), box]
        for cell in cells(self.document)[:1]:
            cell.start.parent.insert(cell.start.parent.index(cell.start), shown)


def _measured(page: RecipePage, items: list[Summary]) -> Iterator[nodes.Node]:
    """Yield the chart of the op, and how its benchmarks come out."""
    record, chart = page.record, page.table
    if record is None or chart is None or not items:
        return
    yield nodes.raw("", f'<div class="chart">{svg(chart, "At a glance: ")}</div>', format="html")
    there = [item for item in items if item.device.name == record.device.name]
    if any(map(any, chart.late.values())):
        yield nodes.paragraph("", f"In a ring {WAITED}.")
    yield ratios(there)
    cpu = _cpu(chart)
    if cpu:
        yield nodes.paragraph("", f"CPU time of a call, in microseconds: {cpu}.")


def ratios(items: list[Summary]) -> nodes.Node:
    """Return the table of how benchmarks on a device come out, without a ratio that none of them has."""
    columns = [f"on {items[0].device.name}, median of the sizes", "speed / best other", "speed / roof"]
    rows = [[_name(item, items), *_ratios(item)] for item in items]
    kept = [place for place in range(len(columns)) if place == 0 or any(row[place] for row in rows)]
    return grid([columns[place] for place in kept], [[row[place] for place in kept] for row in rows], "ratios")


def _name(item: Summary, items: list[Summary]) -> str:
    """Return what is said of a benchmark: one without a name, beside that of a backward, is the forward's."""
    unnamed = "forward" if any("backward" in other.kind for other in items) else "this page"
    return f"{item.kind or unnamed}{'' if item.is_fresh else ', of older code'}"


def _ratios(item: Summary) -> Iterator[str]:
    for ratio in (item.table.ratio, item.table.of_roof):
        over = item.over(ratio)
        yield f"{over.median:.2f}; worst {over.worst:.2f} at {where(item, over.at)}" if over else ""


def _cpu(table: Table) -> str:
    """Say what a call takes of the CPU, the median over the sizes."""
    times = {name: [time for time in values if time is not None] for name, values in table.cpu.items() if name != ROOF}
    return " · ".join(f"{name} {figure(median(values))}" for name, values in times.items() if values)


def _said(of_op: OfOp) -> Iterator[nodes.paragraph]:
    """Yield what the recipe declares of its op; tests hold it to that."""
    if of_op.dtypes:
        backward = "with a backward" if of_op.backward else "forward alone"
        same = "the same bits each time" if of_op.deterministic else "bits that may differ from call to call"
        yield nodes.paragraph("", f"Takes {', '.join(of_op.dtypes)} · {backward} · {same}")


def _files(env: "BuildEnvironment", page: RecipePage, document: nodes.document) -> nodes.paragraph:
    """Return the buttons: the op, and the files to download."""
    files = nodes.paragraph(classes=["recipe-downloads"])
    files += take.buttons(env, page)
    for link in list(document.findall(addnodes.download_reference)):
        file = link["reftarget"].rpartition("/")[2]
        if file.endswith((".py", ".ipynb")):
            button = addnodes.download_reference("", "", nodes.Text(file), **link.attributes)
            files += [button, nodes.Text(" ")]
    for path in page.recipe.companions:
        target = os.path.relpath(path, env.srcdir)
        files += [
            addnodes.download_reference("", "", nodes.Text(path.name), reftarget=f"/{target}"),
            nodes.Text(" "),
        ]
    files += repository.links(env.config, page.recipe)
    return files


def _path(env: "BuildEnvironment") -> nodes.paragraph:
    """Return links to the recipes before and after this one, as the contents have them."""
    order = list(recipes(env))
    place = order.index(env.current_document.docname)
    path = nodes.paragraph(classes=["recipe-path"])
    for word, neighbours in (("Before: ", order[:place][-1:]), ("Next: ", order[place + 1 :][:1])):
        for name in neighbours:
            path += nodes.inline("", word, page_link(name))
    return path
