"""The drawings on the page `docs/gpu.md`: the memories of a GPU, a program and its threads, and layouts.

Two of them are SVG files in which the numbers are filled in: those of `gpu_picture.toml`, each of which has a source,
and of the layouts in `layouts.toml`, which are bases of Triton's linear layouts.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.site.panels import Panel, figure_of
from triton_gallery.site.render import folded, html, inline, paragraph, table

FOLDER = Path(__file__).parent
FILES = [FOLDER / name for name in ("gpu_picture.toml", "gpu_picture.svg", "program_picture.svg", "layouts.toml")]
BAR_LEFT, BAR_WIDTH = 60, 216  # of the longest latency
TILE = 16  # rows and columns of the tile whose layouts are drawn
CELL, MARGIN, TOP = 21, 22, 18
LANES, BANKS = 32, 32
THREAD = 9  # whose elements are marked
LEGENDS = {
    "blocked": (("first", "warp 0"), ("second", "warp 1"), ("one", f"thread {THREAD}")),
    "shared": (("one", "column 0"), ("first", "banks 0 and 16")),
}
LEGENDS["mma"] = LEGENDS["blocked"]


class DrawingDirective(SphinxDirective):
    """`drawing`: one of the drawings, by its name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        for file in FILES:
            self.env.note_dependency(str(file))
        drawings = {"gpu": gpu, "program": program, "layouts": layouts}
        return drawings[self.arguments[0]]()


@dataclass(frozen=True)
class Figure:
    """A figure in the drawing of the GPU: a number, or the least and the largest that were measured.

    Attributes:
        about: what it is of.
        numbers: one or two.
        sources: the keys of the sources, one for each number.
        unit: of the numbers.
        note: what the table says besides.
    """

    about: str
    numbers: Sequence[float]
    sources: Sequence[str]
    unit: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """The numbers and their unit."""
        return f"{self.range} {self.unit}".strip()

    @property
    def range(self) -> str:
        """The numbers."""
        return "\N{EN DASH}".join(f"{number:g}" for number in self.numbers)


def read(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this folder."""
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def figures() -> dict[str, Figure]:
    """Return the figures of the GPU by their names."""
    return {name: Figure(**figure) for name, figure in read("gpu_picture.toml")["figures"].items()}


def gpu() -> list[nodes.Node]:
    """Return the drawing of the GPU, and the table of its figures."""
    data = read("gpu_picture.toml")
    sources = {
        key: nodes.reference("", source["title"], refuri=source["url"]) for key, source in data["sources"].items()
    }
    rows = []
    for figure in figures().values():
        links = [part for key in figure.sources for part in ("; ", sources[key].deepcopy())][1:]
        rows.append([figure.about, figure.text, links, figure.note])
    shown = table(["what", "value", "source", "note"], rows)
    return [html(gpu_picture()), *folded(f"The numbers of an {data['gpu']}, and their sources", [shown], "stays")]


def gpu_picture() -> str:
    """Return the drawing of the GPU."""
    shown = figures()
    scale = BAR_WIDTH / max(number for figure in shown.values() if figure.unit == "cycles" for number in figure.numbers)
    bars = {
        name.replace("latency", "bar"): _bar(figure, y, scale)
        for (name, figure), y in zip(
            [item for item in shown.items() if item[1].unit == "cycles"], range(499, 600, 22), strict=False
        )
    }
    label = f"{read('gpu_picture.toml')['gpu']}: {'; '.join(f'{one.about}: {one.text}' for one in shown.values())}"
    return _template("gpu_picture.svg").format(
        label=escape(label),
        shared_width=304 * shown["shared"].numbers[0] / shown["l1"].numbers[0],
        **{name: figure.text for name, figure in shown.items()},
        **bars,
    )


def _bar(figure: Figure, y: int, scale: float) -> str:
    """Return the bar of a latency: solid up to the least, lighter up to the largest."""
    least, largest = (scale * end(figure.numbers) for end in (min, max))
    return (
        f'<path class="bar" d="M{BAR_LEFT} {y}h{least:.1f}v14h-{least:.1f}z"/>'
        f'<path class="bar light" d="M{BAR_LEFT + least:.1f} {y}h{largest - least:.1f}v14h-{largest - least:.1f}z"/>'
        f'<text x="{BAR_LEFT + largest + 6:.1f}" y="{y + 11}">{figure.range}</text>'
    )


def program() -> list[nodes.Node]:
    """Return the drawing of a program, its tile and a thread."""
    layout = read("layouts.toml")["blocked"]
    threads, values = (2 ** len(bases) for bases in (layout["lane_bases"] + layout["warp_bases"], layout["reg_bases"]))
    width, height = 6, 6
    net = "".join(f"M{132 + width * place} 204v96M132 {204 + height * place}h96" for place in range(TILE + 1))
    label = (
        "Triton's grid of programs is CUDA's grid of thread blocks. A program is a thread block, and what Triton calls "
        f"a block is its tile of values, here 16 by 16, spread over {threads} threads, which hold {values} each."
    )
    picture = _template("program_picture.svg").format(
        label=escape(label), net=net, threads=threads, warps=threads // LANES, values=values, thread=THREAD
    )
    return [html(picture)]


def _template(name: str) -> str:
    """Return an SVG file in one line: blank lines would end the markup in Markdown."""
    return (FOLDER / name).read_text(encoding="utf-8").replace("\n", "")


def layouts() -> list[nodes.Node]:
    """Return the drawings of the layouts, with a button for each."""
    return figure_of(
        [
            Panel(
                {"layout": layout["name"]},
                [
                    html(layout_picture(name, layout) + _legend(LEGENDS[name])),
                    paragraph(nodes.strong("", layout["name"]), ": ", *inline(" ".join(layout["about"].split()))),
                    paragraph(nodes.literal("", layout["made_by"])),
                ],
            )
            for name, layout in read("layouts.toml").items()
        ]
    )


def holders(layout: dict[str, Any]) -> list[list[int]]:
    """Return the thread that holds each element of the tile, row by row; of a shared layout the bank."""
    is_shared = "offset_bases" in layout
    kinds = ["offset_bases"] if is_shared else ["reg_bases", "lane_bases", "warp_bases"]
    bases = [base for kind in kinds for base in layout[kind]]
    rows = [[-1] * TILE for _ in range(TILE)]
    for index in range(2 ** len(bases)):
        row = column = 0
        for bit, base in enumerate(bases):
            if index >> bit & 1:
                row, column = row ^ base[0], column ^ base[1]
        rows[row][column] = index % BANKS if is_shared else index >> len(layout["reg_bases"])
    return rows


def layout_picture(name: str, layout: dict[str, Any]) -> str:
    """Return the drawing of a layout: the tile, with the number of a thread or a bank in each cell."""
    rows = holders(layout)
    cells = {(row, column): rows[row][column] for row, column in product(range(TILE), repeat=2)}
    if name == "shared":
        groups = {"first": [at for at, bank in cells.items() if bank % TILE == 0]}
        marked = [at for at in cells if at[1] == 0]
    else:
        groups = {
            kind: [at for at, thread in cells.items() if thread // LANES == warp]
            for warp, kind in enumerate(("first", "second"))
        }
        marked = [at for at, thread in cells.items() if thread == THREAD]
    tinted = "".join(f'<path class="{kind}" d="{_squares(group)}"/>' for kind, group in groups.items())
    numbers = "".join(
        f'<text x="{x + CELL / 2:g}" y="{y + 15}">{number}</text>'
        for at, number in cells.items()
        for x, y in [_corner(at)]
    )
    axes = "".join(
        f'<text x="{MARGIN + CELL * place + CELL / 2:g}" y="12">{place}</text>'
        f'<text x="9" y="{TOP + CELL * place + 15}">{place}</text>'
        for place in range(TILE)
    )
    what = "bank" if name == "shared" else "thread"
    label = (
        f"A tile of {TILE} by {TILE} in the layout {layout['made_by']}. The {what} of each element, row by row: "
        + ("; ".join(" ".join(map(str, row)) for row in rows))
    )
    size = f"{MARGIN + CELL * TILE + 2} {TOP + CELL * TILE + 2}"
    return (
        f'<svg class="drawing layout" viewBox="0 0 {size}" role="img" aria-label="{escape(label)}">{tinted}'
        f'<path class="net" d="{_edges(cells, same=True)}"/><path class="edges" d="{_edges(cells, same=False)}"/>'
        f'<path class="edges" d="M{MARGIN} {TOP}h{CELL * TILE}v{CELL * TILE}h-{CELL * TILE}z"/>'
        f'<path class="one filled" d="{_squares(marked)}"/><g class="axes">{axes}</g>'
        f'<g class="numbers">{numbers}</g></svg>'
    )


def _corner(at: tuple[int, int]) -> tuple[int, int]:
    """Return the upper left corner of a cell."""
    return MARGIN + CELL * at[1], TOP + CELL * at[0]


def _squares(cells: Iterable[tuple[int, int]]) -> str:
    """Return cells as the data of a path."""
    return "".join(f"M{x} {y}h{CELL}v{CELL}h-{CELL}z" for x, y in map(_corner, cells))


def _edges(cells: dict[tuple[int, int], int], same: bool) -> str:
    """Return the left and upper edges of cells whose neighbour there has the same holder, or another."""
    parts = []
    for (row, column), holder in cells.items():
        x, y = _corner((row, column))
        for neighbour, line in (((row, column - 1), f"v{CELL}"), ((row - 1, column), f"h{CELL}")):
            if (cells.get(neighbour) == holder) == same:
                parts.append(f"M{x} {y}{line}")
    return "".join(parts)


def _legend(items: Iterable[tuple[str, str]]) -> str:
    """Return what the colours mean."""
    return f'<p class="colours">{" ".join(f"<span class={kind}>{escape(text)}</span>" for kind, text in items)}</p>'
