"""The box under a recipe's first sentences: what its op comes to, how to take it, what comes before and after."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from triton_gallery.figures.ratios import Summary, summaries
from triton_gallery.recipe.cells import cells
from triton_gallery.recipe.declaration import declaration
from triton_gallery.site import op_files, other_gpus, peer_table, provenance, repository, verdict, version_matrix
from triton_gallery.site.chart import svg
from triton_gallery.site.page_context import RecipePage, op_of_page, pages, peers, recipe_page, recipes
from triton_gallery.site.render import WAITED, grid, op_link, page_link, where

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
        op = op_of_page(self.env, page.recipe)
        items = list(summaries(page.records[:1], peers(self.env), page.recipe))
        figures = _of_lesson(self.env, page, op) if op else _measured(page, items)
        strip = nodes.container("", *provenance.lines(page, page.run), classes=["recipe-strip"])
        box = nodes.container("", nodes.rubric("", "At a glance"), *figures, classes=["glance"])
        box += [
            *said(page),
            *other_gpus.strip(self.env, page.recipe, f"../../ops/{op}.html" if op else ""),
            *version_matrix.marks(self.env, page.recipe, None),
            strip,
            _files(self.env, page, self.document),
            _path(self.env),
        ]
        shown = [*provenance.failure(page.run), box]
        for cell in cells(self.document)[:1]:
            cell.start.parent.insert(cell.start.parent.index(cell.start), shown)


def _measured(page: RecipePage, items: list[Summary]) -> Iterator[nodes.Node]:
    """Yield the chart of a recipe, how its benchmarks come out beside the best other, and what a call costs the CPU."""
    record = page.record
    if record is None or page.table is None or not items:
        return
    yield from chart(page)
    yield ratios([item for item in items if item.environment.name == record.environment.name])
    if cpu := verdict.cpu(page, items):
        yield nodes.paragraph("", cpu)


def chart(page: RecipePage) -> Iterator[nodes.Node]:
    """Yield the chart of what was recorded of the op itself, and what a ring in it means."""
    table = page.table if page.record else None
    if table:
        yield nodes.raw("", f'<div class="chart">{svg(table, "At a glance: ")}</div>', format="html")
        if any(map(any, table.cpu_bound.values())):
            yield nodes.paragraph("", f"A ring marks a size at which {WAITED}.")


def _of_lesson(env: "BuildEnvironment", page: RecipePage, op: str) -> Iterator[nodes.Node]:
    """Yield the chart of an op, and a link to its page, which has the rest: addresses of what was here lead to it."""
    moved = [nodes.make_id(peer_table.TITLE)]
    moved += [] if other_gpus.section(env, page.recipe, of_op=False) else [nodes.make_id(other_gpus.TITLE)]
    yield from chart(page)
    said = nodes.paragraph("", "The page of the op, ", op_link(op), ids=moved, classes=["op-page"])
    said += nodes.Text(", has its signature, its figures beside other libraries, what it compiles to, and its source.")
    yield said


def ratios(items: Sequence[Summary], named: bool = False) -> nodes.Node:
    """Return the table of how benchmarks come out, without a ratio that none of them has.

    On the page of an op, each library is named, and each row says of which sizes it is, and on which GPU.
    """
    others = [*dict.fromkeys(name for item in items for name in item.table.others)] if named else []
    against = [f"speed / {name}" for name in others] or ["speed / best other"]
    there = "" if named else f"on {items[0].environment.name}, "
    columns = [f"{there}median of the sizes", *against, "speed / roof"]
    rows = [[_name(item, items, named), *_ratios(item, others)] for item in items]
    kept = [place for place in range(len(columns)) if place == 0 or any(row[place] for row in rows)]
    return grid([columns[place] for place in kept], [[row[place] for place in kept] for row in rows], "ratios")


def _name(item: Summary, items: Sequence[Summary], named: bool) -> str:
    """Return what is said of a benchmark: one without a name, beside that of a backward, is the forward's."""
    unnamed = "forward" if any("backward" in other.kind for other in items) else "this page"
    kind = item.kind or unnamed
    if named:
        sizes = "the lesson's sizes" if item.is_page else "shapes of models"
        kind = f"{verdict.label(item)}, {sizes}, {item.environment.name}"
    return f"{kind}{'' if item.is_fresh else ', of older code'}"


def _ratios(item: Summary, others: Sequence[str]) -> Iterator[str]:
    """Yield the ratios to these libraries, or to the best of all, and to the roof."""
    of_others: list[Callable[[int], float | None]] = [partial(item.table.over, name) for name in others]
    for ratio in (*(of_others or [item.table.ratio]), item.table.of_roof):
        over = item.over(ratio)
        yield f"{over.median:.2f}; worst {over.worst:.2f} at {where(item, over.at)}" if over else ""


def said(page: RecipePage) -> Iterator[nodes.paragraph]:
    """Yield what the recipe declares of its op; tests hold it to that."""
    of_op = declaration(page.recipe.path, page.recipe.text).of_op
    if of_op.dtypes:
        backward = "with a backward" if of_op.backward else "forward alone"
        same = "deterministic" if of_op.deterministic else "not deterministic"
        yield nodes.paragraph("", f"Takes {', '.join(of_op.dtypes)} · {backward} · {same}")


def _files(env: "BuildEnvironment", page: RecipePage, document: nodes.document) -> nodes.paragraph:
    """Return the buttons: the op, and the files to download."""
    files = nodes.paragraph(classes=["recipe-downloads"])
    files += op_files.buttons(env, page)
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
