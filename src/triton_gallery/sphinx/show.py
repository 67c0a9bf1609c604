"""How outputs look on a page: charts, tables, text and figures, the same for live and recorded ones."""

from collections.abc import Iterator, Sequence

from docutils import nodes

from triton_gallery.chart import short, svg
from triton_gallery.outputs import Frame, Output
from triton_gallery.tables import Table


def show(output: Output, figures: str) -> list[nodes.Node]:
    """Return the nodes that show an output whose figures lie in the folder `figures`."""
    shown: list[nodes.Node] = []
    for table in output.tables:
        shown += [nodes.raw("", f'<div class="chart">{svg(table)}</div>', format="html"), benchmark(table)]
    shown += [
        nodes.image("", uri=f"{figures}/{name}", classes=["sphx-glr-single-img"], alt="") for name in output.figures
    ]
    if output.text:
        shown.append(text(output.text))
    if output.frame:
        shown.append(frame(output.frame))
    return shown


def text(printed: str) -> nodes.literal_block:
    """Return what a cell printed, in the look of sphinx-gallery."""
    return nodes.literal_block(printed, printed, language="none", classes=["sphx-glr-script-out"])


def frame(content: Frame) -> nodes.Node:
    """Return a data frame as a table."""
    return grid(content.columns, content.rows, "dataframe")


def benchmark(table: Table) -> nodes.Node:
    """Return a benchmark as a table: the figures, our ratio to the best other, and the fraction of the roof."""
    columns = [table.x, *(f"{name} ({table.unit})" for name in table.series)]
    rows = [[size(x), *(figure(values[index]) for values in table.series.values())] for index, x in enumerate(table.xs)]
    for title, values in (
        ("Triton / best other", [table.ratio(index) for index in range(len(rows))]),
        ("Triton / roof", [table.of_roof(index) for index in range(len(rows))]),
    ):
        if any(value is not None for value in values):
            columns.append(title)
            for row, value in zip(rows, values, strict=True):
                row.append("" if value is None else f"{value:.2f}")
    return grid(columns, rows, "benchmark")


def figure(value: float | None) -> str:
    """Write a rate with three digits, or whole where there are more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(x: float | str) -> str:
    """Write what a benchmark varies."""
    return x if isinstance(x, str) else short(x)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], *kinds: str) -> nodes.Node:
    """Return a table, of these classes, in a box that scrolls sideways by itself."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in columns), cols=len(columns))
    group += nodes.thead("", _row(columns))
    group += nodes.tbody("", *map(_row, rows))
    return nodes.container(
        "", nodes.table("", group, classes=[*kinds], support_smartquotes=False), classes=["table-box"]
    )


def first_cells(table: nodes.Node) -> Iterator[nodes.paragraph]:
    """Yield the paragraph in the first cell of each row of a table's body."""
    for body in table.findall(nodes.tbody):
        for row in body.findall(nodes.row):
            yield next(row.findall(nodes.paragraph))


def _row(texts: Sequence[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", text)) for text in texts))
