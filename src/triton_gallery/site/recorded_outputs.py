"""Shows outputs on recipes' pages: charts of benchmarks that ran here, and recorded outputs where no GPU ran."""

from collections import Counter
from collections.abc import Sequence

from docutils import nodes
from msgspec.structs import replace
from sphinx.environment import BuildEnvironment

from triton_gallery.recipe.cells import Cell, cells
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.recipe.tables import Table
from triton_gallery.records.output_diff import STALE, ran_here, recorded_on, side_by_side
from triton_gallery.records.record_store import Record
from triton_gallery.site import page_context
from triton_gallery.site.chart import chart
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.panels import Panel, about_table, figure_of
from triton_gallery.site.render import benchmark, clocks, folded, html, paragraph, table
from triton_gallery.site.sphinx_internals import FIGURE, PRINTED, is_data_frame


def show_outputs(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Show the outputs of each cell of a recipe's page."""
    depends_on(env, page_context.record_shown, page.name)
    if page.run is None:
        return
    seen = Counter[str]()
    figures = page_context.pages(env).figures(page.recipe)
    outputs = side_by_side(page.run, page.record, page.has_fresh_record, figures)
    for cell, shown in zip(cells(document), outputs, strict=False):
        _show_frame(cell, shown.here)
        here = _show_benchmark(cell, shown.here, page, seen) if shown.here.tables else cell.outputs
        if shown.in_numbers:
            for node in cell.outputs:
                node.parent.remove(node)
            here = []
        if page.record and shown.there:
            recorded = _recorded(cell, shown.there, page, page.record, seen)
            _set_beside(cell, here, recorded, ran_here(page.run) if shown.differ else "")


def _recorded(cell: Cell, output: Output, page: RecipePage, record: Record, seen: Counter[str]) -> list[nodes.Node]:
    """Return the labelled outputs of a cell that only a record has."""
    folder = f"/_records/{record.path.parents[1].name}/{record.path.parent.name}"
    parent = cell.code.parent
    about = parent[0].astext() if isinstance(parent, nodes.section) else page.recipe.name
    label = record_label(record, page.recipe)
    tables = _tables(output.tables, page, record.environment.name, label, seen)
    rest = _nodes(output, folder, about)
    if len(_gpus(output.tables, page, record.environment.name)) == 1:
        return [_labelled("recorded", label, [*tables, *rest])]
    return [*tables, *([_labelled("recorded", label, rest)] if rest else [])]


def record_label(record: Record, recipe: Recipe) -> list[nodes.Node | str]:
    """Return what stands above what a record has: its GPU, its date, and whether it is stale."""
    stale = [] if record.is_fresh(recipe) else [nodes.strong("", STALE, classes=["stale"])]
    return [recorded_on(record), *stale]


def _set_beside(cell: Cell, here: list[nodes.Node], recorded: list[nodes.Node], label: str) -> None:
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


def _show_benchmark(cell: Cell, output: Output, page: RecipePage, seen: Counter[str]) -> list[nodes.Node]:
    """Replace the printed text of a benchmark by its chart and table; return all outputs of the cell."""
    assert page.run
    for node in cell.texts:
        node.parent.remove(node)
    device = page.run.environment
    label = [f"Measured here on {device.name}, Triton {device.triton}, {page.run.date[:10]}"]
    tables = _tables(output.tables, page, device.name if device.is_gpu else "", label, seen)
    shown = [*tables, *_nodes(replace(output, figures=[], frame=None))]
    parent = cell.code.parent
    parent.insert(parent.index(cell.code) + 1, shown)
    return [*shown, *(node for node in cell.outputs if node not in cell.texts)]


def _gpus(tables: Sequence[Table], page: RecipePage, gpu: str) -> dict[str, Record | None]:
    """Return the GPUs on which these benchmarks are known: that of the output, then those of other records."""
    names = {table.name for table in tables}
    others = {
        record.environment.name: record
        for record in page.records
        if gpu and record.environment.name != gpu and names & {*_by_name(record)}
    }
    return {gpu: None, **others}


def _by_name(record: Record) -> dict[str, Table]:
    return {table.name: table for output in record.outputs for table in output.tables}


def _tables(
    tables: Sequence[Table], page: RecipePage, gpu: str, label: Sequence[nodes.Node | str], seen: Counter[str]
) -> list[nodes.Node]:
    """Return the benchmarks of a cell as one figure, with those of the same names on other GPUs.

    Args:
        tables: those of the cell; without any, there is no figure.
        page: the page, with the records of other GPUs.
        gpu: the one that the tables were measured on; empty if there is none.
        label: what stands above them if there are several GPUs.
        seen: how many benchmarks of each name the page has before; it is counted on.
    """
    gpus = _gpus(tables, page, gpu)
    panels = []
    for name, record in gpus.items():
        of_record = _by_name(record) if record else {}
        results = [of_record[table.name] for table in tables if table.name in of_record] if record else tables
        for result in results:
            parts = _benchmark(result, f"{name}: " if record else "", seen)
            if len(gpus) > 1:
                texts = record_label(record, page.recipe) if record else [*label]
                copies = [text if isinstance(text, str) else text.deepcopy() for text in texts]
                parts.insert(0, paragraph(*copies, classes=["gpu-label"]))
            panels.append(Panel(about_table(result, name), parts, "of-other-record" if record else ""))
    return figure_of(panels) if panels else []


def _benchmark(table: Table, place: str, seen: Counter[str]) -> list[nodes.Node]:
    """Return a benchmark's chart, its address, its table in a fold, and notes."""
    seen[table.name] += 1
    anchor = f"figure-{table.name}" + (f"-{seen[table.name]}" if seen[table.name] > 1 else "")
    return [
        html(f'<span id="{anchor}"></span>{chart(table, place)}'),
        html(f'<p class="figure-links"><a href="#{anchor}">Link to this figure</a></p>'),
        *folded("The numbers in this chart", [_frame(benchmark(table), "benchmark")], "stays"),
        *(paragraph(note, classes=["clocks"]) for note in clocks(table)),
    ]


def _nodes(output: Output, folder: str = "", about: str = "") -> list[nodes.Node]:
    """Return the nodes that show an output besides its benchmarks.

    Args:
        output: what a cell put out.
        folder: where the output's figures lie.
        about: what the figures are about.
    """
    shown: list[nodes.Node] = [
        nodes.image("", uri=f"{folder}/{name}", classes=[FIGURE], alt=about) for name in output.figures
    ]
    if output.text:
        shown.append(nodes.literal_block(output.text, output.text, language="none", classes=[PRINTED]))
    if output.frame:
        shown.append(_frame(output.frame, "dataframe"))
    return shown


def _frame(frame: Frame, kind: str) -> nodes.Node:
    return table(frame.columns, frame.rows, kind)


def _labelled(kind: str, label: Sequence[nodes.Node | str], shown: list[nodes.Node]) -> nodes.container:
    return nodes.container("", paragraph(*label, classes=[f"{kind}-label"]), *shown, classes=[kind])
