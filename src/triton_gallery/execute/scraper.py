"""Keeps what the code cells of a recipe put out, in the process that executes it.

`scrape` is called by sphinx-gallery after each code cell: it keeps what the page alone does not tell, the benchmark
tables in variables whose names begin with `results` and the data frame that a cell ends with. `outputs_of` puts that
together with the text and the figures of the page; a line that stands above a printed benchmark table is its title.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils.statemachine import string2lines
from msgspec.structs import replace

from triton_gallery.recipe.hashes import cell_hashes
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.recipe.tables import Table, from_frame

if TYPE_CHECKING:
    import pandas

PREFIX = "results"
PRINTED = re.compile(
    r"(?m)^\.\. rst-class:: sphx-glr-script-out\n\n \.\. code-block:: none\n\n((?:    .*\n|[ \t]*\n)*)"
)
FIGURE = re.compile(r"(?m)^ *(?:\* +)?\.\. image-sg:: .*/(\S+)$")


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


def outputs_of(script: Path, laid_out: Sequence[str]) -> list[Output]:
    """Return the outputs of the recipe that this process executed.

    Args:
        script: the recipe's file.
        laid_out: what each of its code cells put out, as sphinx-gallery laid it out in reStructuredText.
    """
    outputs = []
    for index, (code, layout) in enumerate(zip(cell_hashes(script), laid_out, strict=True)):
        text = "\n".join(map(_printed, PRINTED.findall(layout)))
        tables = []
        for table, printed in _captured.tables.get(index, []):
            place = re.search(rf"(?m)^(?:(.*)\n)?{re.escape(printed)}\n?", text)
            tables.append(replace(table, title=(place[1] or "").rstrip(":") if place else ""))
            text = text.replace(place[0], "", 1) if place else text
        figures = FIGURE.findall(PRINTED.sub("", layout))
        outputs.append(Output(code, text.strip("\n"), figures, _captured.frames.get(index), tables))
    return outputs


def _printed(block: str) -> str:
    """Return what a cell printed as a page shows it, given the block in reStructuredText."""
    return textwrap.dedent("\n".join(string2lines(block, convert_whitespace=True))).strip("\n")
