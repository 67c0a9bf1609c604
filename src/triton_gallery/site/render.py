"""Nodes for what pages are made of (paragraphs, links, tables, folds), and the formats of figures."""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from docutils import nodes
from sphinx import addnodes

from triton_gallery.figures.ratios import Summary
from triton_gallery.recipe.outputs import Frame
from triton_gallery.recipe.tables import ROOF, Table

LATE = "\N{DAGGER}"  # stands at a figure that the CPU decided
WAITED = "the GPU had to wait for the CPU in a fifth of the calls or more, so the figure may be partly the CPU's"
RINGS = f"A ring marks a size at which {WAITED}."

Parts = str | nodes.Node | Sequence[str | nodes.Node]  # of a line of text


def inline(parts: Parts) -> list[nodes.Node]:
    """Return the parts of a line as nodes."""
    several = [parts] if isinstance(parts, (str, nodes.Node)) else parts
    return [nodes.Text(part) if isinstance(part, str) else part for part in several if part != ""]


def paragraph(*parts: str | nodes.Node, classes: Sequence[str] = (), ids: Sequence[str] = ()) -> nodes.paragraph:
    """Return a paragraph."""
    return nodes.paragraph("", "", *inline(parts), classes=[*classes], ids=[*ids])


def html(markup: str) -> nodes.raw:
    """Return markup as a node."""
    return nodes.raw("", markup, format="html")


def code(text: str, language: str = "python") -> nodes.literal_block:
    """Return a block of code."""
    return nodes.literal_block(text, text, language=language)


def folded(summary: str, shown: Iterable[nodes.Node], *classes: str) -> list[nodes.Node]:
    """Return nodes in an element that opens on a click; if it has the class "stays", it is loaded with the page."""
    return [
        html(f'<details class="{" ".join(["fold", *classes])}"><summary>{summary}</summary>'),
        *shown,
        html("</details>"),
    ]


def of_gpu(device: str, shown: Iterable[nodes.Node], hidden: bool = False) -> list[nodes.Node]:
    """Return nodes about one GPU in an element that is shown when the reader chooses it."""
    return [html(f'<div data-gpu="{escape(device)}"{" hidden" if hidden else ""}>'), *shown, html("</div>")]


def marks(*groups: tuple[str, Iterable[tuple[str, str, str]]]) -> nodes.raw:
    """Return a line of groups, each a text and its marks; each mark has a class, a tooltip and a label."""
    parts = []
    for text, spans in groups:
        markup = (f'<span class="target {kind}" title="{escape(about)}">{label}</span>' for kind, about, label in spans)
        parts.append(f"{text} {' '.join(markup)}")
    return html(f'<p class="targets">{" ".join(parts)}</p>')


def table(columns: Sequence[str], rows: Iterable[Sequence[Parts]], *classes: str) -> nodes.Node:
    """Return a table with these classes, in a box that scrolls sideways."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in columns), cols=len(columns))
    unseen = nodes.inline("", "row", classes=["unseen"])  # for those who listen
    group += nodes.thead("", _row([title or unseen.deepcopy() for title in columns]))
    group += nodes.tbody("", *map(_row, rows))
    return nodes.container(
        "", nodes.table("", group, classes=[*classes], support_smartquotes=False), classes=["table-box"]
    )


def _row(cells: Iterable[Parts]) -> nodes.row:
    return nodes.row("", *map(_cell, cells))


def _cell(parts: Parts) -> nodes.entry:
    """Return a cell; of text alone it is without a paragraph, which halves the elements of large tables."""
    shown = inline(parts)
    if all(isinstance(node, nodes.Text) for node in shown):
        return nodes.entry("", *shown)
    return nodes.entry("", nodes.paragraph("", "", *shown))


def bullets(items: Iterable[nodes.paragraph], *classes: str) -> nodes.bullet_list:
    """Return a bullet list."""
    return nodes.bullet_list("", *(nodes.list_item("", item) for item in items), classes=[*classes])


def page_link(name: str, text: str = "") -> addnodes.pending_xref:
    """Return a link to a page of the site, whose text is this name, in the style of code, or else the page's title."""
    link = {"reftype": "doc", "refdomain": "std", "reftarget": f"/{name}", "refexplicit": bool(text)}
    return addnodes.pending_xref("", nodes.literal("", text) if text else nodes.inline(), refwarn=True, **link)


def op_link(op: str) -> addnodes.pending_xref:
    """Return a link to the page of an op, whose text is the op's name."""
    return page_link(f"ops/{op}", op)


def titled(title: str, *shown: nodes.Node, address: str = "") -> nodes.section:
    """Return a section; its address is made of the title if no other is given."""
    section = nodes.section("", nodes.title("", title), *shown, ids=[nodes.make_id(address or title)])
    if not address:
        section["names"] = [title.lower()]
    return section


def prose(text: str) -> list[nodes.Node]:
    """Return a docstring as paragraphs, in which only ``code`` and addresses are markup."""
    paragraphs: list[nodes.Node] = []
    for block in filter(None, re.split(r"\n\s*\n", text)):
        parts = re.split(r"(``.+?``|https?://\S+[\w/])", " ".join(block.split()))
        paragraphs.append(paragraph(*map(_prose_part, parts)))
    return paragraphs


def _prose_part(text: str) -> nodes.Node | str:
    if text.startswith("``"):
        return nodes.literal("", text.strip("`"))
    return nodes.reference("", text, refuri=text) if text.startswith("http") else text


def add_section(document: nodes.document, section: nodes.section) -> None:
    """Add a section at the end of a page."""
    page = next(document.findall(nodes.section))
    page += section


def benchmark(table: Table) -> Frame:
    """Return a benchmark as a table: our ratio to the best other, the fraction of the roof, and the rates."""
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
    """Return notes on a benchmark's clocks."""
    notes = []
    if any(map(any, table.cpu_bound.values())):
        marked = "; ".join(filter(None, (_cpu_where_late(table, name) for name in table.cpu_bound)))
        there = f" CPU time of a call there, in microseconds: {marked}." if marked else ""
        notes.append(f"{LATE}, in the chart a ring: {WAITED}.{there}")
    if times := cpu_times(table):
        notes.append(f"CPU time of a call, median over the sizes, in microseconds: {times}.")
    return notes


def _cpu_where_late(table: Table, name: str) -> str:
    """Return the CPU time of a series at each size at which the GPU had to wait for it; empty if it is not known."""
    times = enumerate(table.cpu.get(name, []))
    late = [(index, time) for index, time in times if time is not None and table.is_cpu_bound(name, index)]
    at = ", ".join(f"{time:.0f} at {size(table.xs[index])}" for index, time in late)
    return f"{name} {at}" if at else ""


def cpu_times(table: Table, without: str = "") -> str:
    """Return the CPU time of a call in microseconds, the median over the sizes, of each series but one."""
    times = {name: [time for time in values if time is not None] for name, values in table.cpu.items()}
    medians = {name: median(values) for name, values in times.items() if values and name != without}
    return " · ".join(f"{name} {figure(time)}" for name, time in medians.items())


def _mark(table: Table, names: Sequence[str], index: int) -> str:
    """Return the mark of a figure that was limited by the CPU, or of a ratio to such a figure."""
    return f" {LATE}" if any(table.is_cpu_bound(name, index) for name in names) else ""


def figure(value: float | None) -> str:
    """Format a rate with three digits, or as a whole number if that has more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def two_digits(ratio: float | None) -> str:
    """Format a ratio; empty if there is none."""
    return f"{ratio:.2f}" if ratio else ""


def older(is_fresh: bool) -> str:
    """Return a remark for measurements of older code."""
    return "" if is_fresh else ", of older code"


def size(x: float | str) -> str:
    """Format a size: in full up to a million, so that those of a table look alike."""
    return x if isinstance(x, str) else f"{x:g}" if x != int(x) else f"{x:.0f}" if x < 2**20 else short(x)


def short(value: float) -> str:
    """Format a size: 4096, 16K, 256M, but 256000."""
    for factor, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if value >= 10 * 2**10 and value % factor == 0 and math.log2(value).is_integer():
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def where(item: Summary, index: int) -> str:
    """Format the size of a benchmark at an index."""
    x = size(item.table.xs[index])
    return f"{item.table.x} = {x}" if item.is_page else x
