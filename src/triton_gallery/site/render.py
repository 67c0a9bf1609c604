"""How outputs look on a page: charts, tables, text and figures, the same for live and recorded ones."""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from docutils import nodes
from sphinx import addnodes

from triton_gallery.figures.ratios import Summary
from triton_gallery.recipe.cells import is_footer
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.recipe.tables import ROOF, Table
from triton_gallery.site.chart import short, svg

AFTER = "Go further"  # the section of a recipe that follows its figures
LATE = "\N{DAGGER}"  # stands at a figure that the CPU decided
WAITED = "the GPU had to wait for the CPU, so the figure is partly the CPU's"


def show(output: Output, figures: str, about: str = "") -> list[nodes.Node]:
    """Return the nodes that show an output whose figures lie in the folder `figures`, and what those are about."""
    shown: list[nodes.Node] = []
    for table in output.tables:
        shown += [nodes.raw("", f'<div class="chart">{svg(table)}</div>', format="html")]
        shown += [frame(benchmark(table), "benchmark")]
        shown += [nodes.paragraph("", note, classes=["clocks"]) for note in clocks(table)]
    shown += [
        nodes.image("", uri=f"{figures}/{name}", classes=["sphx-glr-single-img"], alt=about) for name in output.figures
    ]
    if output.text:
        shown.append(text(output.text))
    if output.frame:
        shown.append(frame(output.frame, "dataframe"))
    return shown


def text(printed: str) -> nodes.literal_block:
    """Return what a cell printed, in the look of sphinx-gallery."""
    return nodes.literal_block(printed, printed, language="none", classes=["sphx-glr-script-out"])


def frame(content: Frame, kind: str) -> nodes.Node:
    """Return a data frame, or what is shown like one, as a table of this class."""
    return grid(content.columns, content.rows, kind)


def benchmark(table: Table) -> Frame:
    """Return what a benchmark's table shows: our ratio to the best other, the fraction of the roof, and the figures."""
    columns = [table.x]
    rows = [[size(x)] for x in table.xs]
    for title, against, names in (
        ("Triton / best other", table.ratio, [*table.ours, *table.others]),
        ("Triton / roof", table.of_roof, [*table.ours, ROOF]),
    ):
        values = [against(index) for index in range(len(rows))]
        if any(value is not None for value in values):
            columns.append(title)
            for index, (row, value) in enumerate(zip(rows, values, strict=True)):
                row.append("" if value is None else f"{value:.2f}{_mark(table, names, index)}")
    for name, figures in table.series.items():
        columns.append(f"{name} ({table.unit})")
        for index, (row, value) in enumerate(zip(rows, figures, strict=True)):
            row.append(figure(value) + _mark(table, [name], index))
    return Frame(columns, rows)


def clocks(table: Table) -> list[str]:
    """Return what is to be said of a benchmark's clocks, in sentences."""
    notes = []
    if any(map(any, table.cpu_bound.values())):
        notes.append(f"{LATE}, in the chart a ring: {WAITED}.")
    times = {name: [time for time in values if time is not None] for name, values in table.cpu.items()}
    medians = [f"{name} {figure(median(values))}" for name, values in times.items() if values]
    if medians:
        notes.append(f"CPU time of a call, median over the sizes, in microseconds: {' · '.join(medians)}.")
    return notes


def _mark(table: Table, names: Sequence[str], index: int) -> str:
    """Return the mark of a figure that the CPU decided, or of a ratio that has one among these series."""
    return f" {LATE}" if any(table.is_cpu_bound(name, index) for name in names) else ""


def figure(value: float | None) -> str:
    """Write a rate with three digits, or whole where there are more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(x: float | str) -> str:
    """Write what a benchmark varies: whole up to a million, so that those of a table look alike."""
    return x if isinstance(x, str) else f"{x:g}" if x != int(x) else f"{x:.0f}" if x < 2**20 else short(x)


def where(item: Summary, index: int) -> str:
    """Write at which size of a benchmark something stands."""
    x = size(item.table.xs[index])
    return f"{item.table.x} = {x}" if item.is_page else x


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], *kinds: str) -> nodes.Node:
    """Return a table, of these classes, in a box that scrolls sideways by itself."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in columns), cols=len(columns))
    group += nodes.thead("", _row(columns))
    for title in group.findall(nodes.paragraph):
        if not title.children:
            title += nodes.inline("", "row", classes=["unseen"])  # for those who listen
    group += nodes.tbody("", *map(_row, rows))
    return nodes.container(
        "", nodes.table("", group, classes=[*kinds], support_smartquotes=False), classes=["table-box"]
    )


def of_gpu(device: str, shown: Iterable[nodes.Node]) -> list[nodes.Node]:
    """Return what is about one GPU so that a reader who chose another does not see it."""
    begin = f'<div data-gpu="{escape(device)}">'
    return [nodes.raw("", begin, format="html"), *shown, nodes.raw("", "</div>", format="html")]


def page_link(name: str) -> addnodes.pending_xref:
    """Return a link to a page of the site, whose text is the page's title."""
    link = {"reftype": "doc", "refdomain": "std", "reftarget": f"/{name}", "refexplicit": False}
    return addnodes.pending_xref("", nodes.inline(), refwarn=True, **link)


def op_link(op: str) -> addnodes.pending_xref:
    """Return a link to the page of an op, whose text is the op's name."""
    link = {"reftype": "doc", "refdomain": "std", "reftarget": f"/ops/{op}", "refexplicit": True}
    return addnodes.pending_xref("", nodes.literal("", op), refwarn=True, **link)


def titled(title: str) -> nodes.section:
    """Return a section that has its title, and an address made of that, and nothing else yet."""
    return nodes.section("", nodes.title("", title), ids=[nodes.make_id(title)], names=[title.lower()])


def prose(text: str) -> list[nodes.Node]:
    """Return a docstring as paragraphs: plain text but for ``code`` and addresses, whatever formulas it has."""
    shown: list[nodes.Node] = []
    for block in filter(None, re.split(r"\n\s*\n", text)):
        paragraph = nodes.paragraph()
        for part in re.split(r"(``.+?``|https?://\S+[\w/])", " ".join(block.split())):
            if part.startswith("``"):
                paragraph += nodes.literal("", part.strip("`"))
            elif part.startswith("http"):
                paragraph += nodes.reference("", part, refuri=part)
            else:
                paragraph += nodes.Text(part)
        shown.append(paragraph)
    return shown


def add_section(document: nodes.document, section: nodes.section) -> None:
    """Put a section about the op on a recipe's page: before what a reader does next, else at the end."""
    sections = list(document.findall(nodes.section))
    ends = [(parent, node) for parent in sections for node in parent if _is_end(node)]
    parent, end = ends[0] if ends else (sections[0], None)
    parent.insert(parent.index(end) if end else len(parent), section)


def _is_end(node: nodes.Node) -> bool:
    """Whether a child of a section is what follows the figures: a section of its own, or the files to download."""
    return node[0].astext() == AFTER if isinstance(node, nodes.section) else is_footer(node)


def first_cells(table: nodes.Node) -> Iterator[nodes.paragraph]:
    """Yield the paragraph in the first cell of each row of a table's body."""
    for body in table.findall(nodes.tbody):
        for row in body.findall(nodes.row):
            yield next(row.findall(nodes.paragraph))


def _row(texts: Sequence[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", text)) for text in texts))
