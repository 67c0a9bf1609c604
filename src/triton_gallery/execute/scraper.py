"""Keeps what the code cells of a recipe put out, in the process that executes it.

`scrape` is called by sphinx-gallery after each code cell: it keeps what the page alone does not tell, the benchmark
tables in variables whose names begin with `results` and the data frame that a cell ends with. `read` puts that together
with the text and the figures of the page; a line that stands above a printed benchmark table is the table's title.
"""

import re
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

from triton_gallery.recipe.cells import cells
from triton_gallery.recipe.hashes import cell_hashes
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.recipe.tables import Table, from_frame

if TYPE_CHECKING:
    import pandas

PREFIX = "results"


class _Captured:
    """What `scrape` has seen; a process executes one recipe."""

    def __init__(self) -> None:
        self.cell = -1
        self.frames: dict[int, Frame] = {}
        self.tables: dict[int, list[tuple[Table, str]]] = {}  # each with what it looks like in print
        self.seen: dict[str, object] = {}


_captured = _Captured()


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any], **_: object) -> str:
    """Keep what a cell left behind, and close the plots of its benchmark tables; return no reStructuredText."""
    _captured.cell += 1
    variables = block_vars["example_globals"]
    for name, value in list(variables.items()):
        if name.startswith(PREFIX) and _is_frame(value) and _captured.seen.get(name) is not value:
            _captured.seen[name] = value
            table = from_frame(name, value), value.to_string()
            _captured.tables.setdefault(_captured.cell, []).append(table)
    last = variables.get("___")
    if _is_frame(last) and _captured.seen.get("___") is not last:
        _captured.seen["___"] = last
        _captured.frames[_captured.cell] = _frame(last)
    if _captured.cell in _captured.tables:
        import matplotlib.pyplot

        matplotlib.pyplot.close("all")
    return ""


def _is_frame(value: object) -> bool:
    return type(value).__name__ == "DataFrame"


def _frame(frame: "pandas.DataFrame") -> Frame:
    numbered = type(frame.index).__name__ == "RangeIndex"
    shown = frame if numbered else frame.reset_index(names=[name or "" for name in frame.index.names])
    rows = [[str(value) for value in row] for row in shown.itertuples(index=False)]
    return Frame([str(column) for column in shown.columns], rows)


def read(document: nodes.document, script: Path) -> list[Output]:
    """Return the outputs of the recipe that this process executed, from its page and from what `scrape` kept.

    A last cell of comments to sphinx-gallery alone is not on the page; it put out nothing.
    """
    found = []
    for index, (code, cell) in enumerate(zip_longest(cell_hashes(script), cells(document))):
        if cell is None:
            found.append(Output(code))
            continue
        text = "\n".join(node.astext() for node in cell.texts)
        tables = []
        for table, printed in _captured.tables.get(index, []):
            there = re.search(rf"(?m)^(?:(.*)\n)?{re.escape(printed)}\n?", text)
            tables.append(replace(table, title=(there[1] or "").rstrip(":") if there else ""))
            text = text.replace(there[0], "", 1) if there else text
        found.append(Output(code, text.strip("\n"), cell.figures, _captured.frames.get(index), tables))
    return found
