"""What the code cells of a recipe put out, as data.

`scrape` is called by sphinx-gallery, in the process that executes a recipe, after each code cell: it keeps what the
page alone does not tell, the benchmark tables in variables whose names begin with `results` and the data frame that a
cell ends with. `read` puts that together with the text and the figures of the page.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from docutils import nodes

from triton_gallery.recipes import cell_hash
from triton_gallery.tables import Table, from_frame

if TYPE_CHECKING:
    import pandas

PREFIX = "results"
SOURCE_LINES = "GENERATED FROM PYTHON SOURCE LINES"


@dataclass(frozen=True)
class Frame:
    """A data frame that a cell shows; every cell of it as text."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Output:
    """What one code cell put out.

    Attributes:
        code: the hash of the cell's code.
        text: what it printed, without the benchmark tables.
        figures: file names of its figures.
        frame: the data frame that it ends with.
        tables: the benchmark tables that it made.
    """

    code: str
    text: str = ""
    figures: list[str] = field(default_factory=list)
    frame: Frame | None = None
    tables: list[Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.figures or self.frame or self.tables)


def from_json(fields: Mapping[str, Any]) -> Output:
    """Return the output that `dataclasses.asdict` took apart."""
    frame = fields["frame"] and Frame(**fields["frame"])
    return Output(**{**fields, "frame": frame, "tables": [Table(**table) for table in fields["tables"]]})


@dataclass(frozen=True)
class Cell:
    """A code cell on a page: the node with its code, and the nodes of its output."""

    code: nodes.literal_block
    outputs: list[nodes.Node]

    @property
    def texts(self) -> list[nodes.literal_block]:
        """The nodes with what it printed."""
        return [node for node in self.outputs if isinstance(node, nodes.literal_block)]

    @property
    def figures(self) -> list[str]:
        """The file names of its figures."""
        found = [node for output in self.outputs for node in output.findall() if isinstance(node, nodes.Element)]
        return [PurePosixPath(node["uri"]).name for node in found if "uri" in node]


def cells(document: nodes.document) -> list[Cell]:
    """Return the code cells of a recipe's page, as sphinx-gallery laid them out.

    The code of a cell and its output follow a comment with line numbers; in a page of a single cell, the output first.
    """
    found = []
    for comment in document.findall(nodes.comment):
        if comment.astext().startswith(SOURCE_LINES):
            siblings = comment.parent.children
            block = list(takewhile(_is_of_cell, siblings[siblings.index(comment) + 1 :]))
            code = next((node for node in block if _is_code(node)), None)
            if isinstance(code, nodes.literal_block):
                found.append(Cell(code, [node for node in block if node is not code]))
    return found


def _is_of_cell(node: nodes.Node) -> bool:
    return not isinstance(node, (nodes.comment, nodes.section)) and not is_footer(node)


def _is_code(node: nodes.Node) -> bool:
    return isinstance(node, nodes.literal_block) and node.get("language") == "Python"


def is_footer(node: nodes.Node) -> bool:
    """Whether a node is the end of a recipe's page, with the files to download."""
    return any("sphx-glr-footer" in box["classes"] for box in node.findall(nodes.container))


class _Captured:
    """What `scrape` has seen; a process executes one recipe."""

    def __init__(self) -> None:
        self.cell = -1
        self.frames: dict[int, Frame] = {}
        self.tables: dict[int, list[Table]] = {}
        self.printed: dict[int, list[str]] = {}
        self.seen: dict[str, object] = {}


_captured = _Captured()


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any], **_: object) -> str:
    """Keep what a cell left behind, and close the plots of its benchmark tables; return no reStructuredText."""
    _captured.cell += 1
    variables = block_vars["example_globals"]
    for name, value in list(variables.items()):
        if name.startswith(PREFIX) and _is_frame(value) and _captured.seen.get(name) is not value:
            _captured.seen[name] = value
            _captured.tables.setdefault(_captured.cell, []).append(from_frame(name, value))
            _captured.printed.setdefault(_captured.cell, []).append(value.to_string())
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


def read(document: nodes.document) -> list[Output]:
    """Return the outputs of the recipe that this process executed, from its page and from what `scrape` kept."""
    found = []
    for index, cell in enumerate(cells(document)):
        text = "\n".join(node.astext() for node in cell.texts)
        for printed in _captured.printed.get(index, []):
            text = re.sub(rf"(?m)^(?:.*:\n)?{re.escape(printed)}\n?", "", text)
        found.append(
            Output(
                cell_hash(cell.code.astext()),
                text.strip("\n"),
                cell.figures,
                _captured.frames.get(index),
                _captured.tables.get(index, []),
            )
        )
    return found
