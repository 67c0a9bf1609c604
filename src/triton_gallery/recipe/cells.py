"""The code cells on a recipe's page, as sphinx-gallery lays them out."""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePosixPath

from docutils import nodes

SOURCE_LINES = "GENERATED FROM PYTHON SOURCE LINES"


@dataclass(frozen=True)
class Cell:
    """A code cell on a page: the comment that begins it, the node with its code, and the nodes of its output."""

    start: nodes.comment
    code: nodes.literal_block
    outputs: list[nodes.Node]

    @property
    def texts(self) -> list[nodes.literal_block]:
        """The nodes with what it printed."""
        return [node for node in self.outputs if isinstance(node, nodes.literal_block)]

    @property
    def figures(self) -> list[str]:
        """The file names of its figures."""
        elements = [node for output in self.outputs for node in output.findall() if isinstance(node, nodes.Element)]
        return [PurePosixPath(node["uri"]).name for node in elements if "uri" in node]


def cells(document: nodes.document) -> list[Cell]:
    """Return the code cells of a recipe's page, as sphinx-gallery laid them out.

    The code of a cell and its output follow a comment with line numbers; in a page of a single cell, the output first.
    """
    results = []
    for comment in document.findall(nodes.comment):
        if comment.astext().startswith(SOURCE_LINES):
            siblings = comment.parent.children
            block = list(takewhile(_is_of_cell, siblings[siblings.index(comment) + 1 :]))
            code = next((node for node in block if _is_code(node)), None)
            if isinstance(code, nodes.literal_block):
                results.append(Cell(comment, code, [node for node in block if node is not code]))
    return results


def _is_of_cell(node: nodes.Node) -> bool:
    return not isinstance(node, (nodes.comment, nodes.section)) and not is_footer(node)


def _is_code(node: nodes.Node) -> bool:
    return isinstance(node, nodes.literal_block) and node.get("language") == "Python"


def is_footer(node: nodes.Node) -> bool:
    """Whether a node is the end of a recipe's page, with the files to download."""
    return any("sphx-glr-footer" in box["classes"] for box in node.findall(nodes.container))
