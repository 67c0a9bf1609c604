"""Shows outputs on recipes' pages: charts of benchmarks that ran here, and recorded outputs where no GPU ran."""

from collections import Counter
from collections.abc import Sequence

from docutils import nodes
from msgspec.structs import replace
from sphinx.environment import BuildEnvironment

from triton_gallery.recipe.cells import Cell, cells
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.records.output_diff import STALE, ran_here, recorded_on, side_by_side
from triton_gallery.records.record_store import Record
from triton_gallery.site import page_context
from triton_gallery.site.chart import svg
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import benchmark, chart, clocks, html, paragraph, table
from triton_gallery.site.sphinx_internals import FIGURE, PRINTED, is_data_frame


def show_outputs(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Show the outputs of each cell of a recipe's page."""
    depends_on(env, page_context.record_shown, page.name)
    if page.run is None:
        return
    seen = Counter[str]()
    outputs = side_by_side(page.run, page.record, page_context.pages(env).figures(page.recipe))
    for cell, shown in zip(cells(document), outputs, strict=False):
        _show_frame(cell, shown.here)
        here = _show_benchmark(cell, shown.here, seen) if shown.here.tables else cell.outputs
        if page.record and shown.there:
            recorded = _recorded(cell, shown.there, page.recipe, page.record, seen)
            _set_beside(cell, here, recorded, ran_here(page.run) if shown.differ else "")


def _recorded(cell: Cell, output: Output, recipe: Recipe, record: Record, seen: Counter[str]) -> nodes.Node:
    """Return the labelled outputs of a cell that only a record has."""
    folder = f"/_records/{record.path.parents[1].name}/{record.path.parent.name}"
    parent = cell.code.parent
    about = parent[0].astext() if isinstance(parent, nodes.section) else recipe.name
    stale = [] if record.is_fresh(recipe) else [nodes.strong("", STALE, classes=["stale"])]
    return _labelled("recorded", [recorded_on(record), *stale], _nodes(output, seen, folder, about))


def _set_beside(cell: Cell, here: list[nodes.Node], recorded: nodes.Node, label: str) -> None:
    """Insert recorded outputs after those of this machine; these get a label if the two differ."""
    last, parent = here[-1] if here else cell.code, cell.code.parent
    parent.insert(parent.index(last) + 1, recorded)
    if label:
        index = parent.index(here[0])
        for node in here:
            parent.remove(node)
        parent.insert(index, _labelled("here", [label], here))


def _show_frame(cell: Cell, output: Output) -> None:
    """Replace the markup that pandas makes of a data frame by the table that is used for recorded ones."""
    for index, node in enumerate(cell.outputs):
        if output.frame and is_data_frame(node):
            cell.outputs[index] = _frame(output.frame, "dataframe")
            node.parent.replace(node, cell.outputs[index])


def _show_benchmark(cell: Cell, output: Output, seen: Counter[str]) -> list[nodes.Node]:
    """Replace the printed text of a benchmark by its chart and table; return all outputs of the cell."""
    for node in cell.texts:
        node.parent.remove(node)
    shown = _nodes(replace(output, figures=[], frame=None), seen)
    parent = cell.code.parent
    parent.insert(parent.index(cell.code) + 1, shown)
    return [*shown, *(node for node in cell.outputs if node not in cell.texts)]


def _nodes(output: Output, seen: Counter[str], folder: str = "", about: str = "") -> list[nodes.Node]:
    """Return the nodes that show an output.

    Args:
        output: what a cell put out.
        seen: how many charts of each name the page has before; it is counted on.
        folder: where the output's figures lie.
        about: what the figures are about.
    """
    shown: list[nodes.Node] = []
    for figures in output.tables:
        seen[figures.name] += 1
        anchor = f"figure-{figures.name}" + (f"-{seen[figures.name]}" if seen[figures.name] > 1 else "")
        link = f'<p class="figure-links"><a href="#{anchor}">Link to this figure</a></p>'
        shown += [html(f'<span id="{anchor}"></span>'), chart(svg(figures)), html(link)]
        shown.append(_frame(benchmark(figures), "benchmark"))
        shown += [paragraph(note, classes=["clocks"]) for note in clocks(figures)]
    shown += [nodes.image("", uri=f"{folder}/{name}", classes=[FIGURE], alt=about) for name in output.figures]
    if output.text:
        shown.append(nodes.literal_block(output.text, output.text, language="none", classes=[PRINTED]))
    if output.frame:
        shown.append(_frame(output.frame, "dataframe"))
    return shown


def _frame(frame: Frame, kind: str) -> nodes.Node:
    return table(frame.columns, frame.rows, kind)


def _labelled(kind: str, label: Sequence[nodes.Node | str], shown: list[nodes.Node]) -> nodes.container:
    return nodes.container("", paragraph(*label, classes=[f"{kind}-label"]), *shown, classes=[kind])
