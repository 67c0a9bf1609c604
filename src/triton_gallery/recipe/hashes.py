"""What identifies a recipe's code.

The code is the list of the recipe's cells. Each has a hash that prose, docstrings, comments and layout do not change;
the hash of the list, which moving a border between two cells changes, identifies the code that a record was made of.
The functions of the clock, which are inlined, count by the clock's version alone.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from sphinx_gallery.py_source_parser import split_code_and_text_blocks

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.inline import clock

DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def cell_hash(code: str) -> str:
    """Return the hash of a cell's code; SyntaxError if it is not Python.

    It is made of the syntax tree without empty fields, of which every version of Python has others.
    """
    return tree_hash(ast.parse(code))


def tree_hash(tree: ast.Module) -> str:
    """Return the hash of a syntax tree, which loses its docstrings."""
    version, functions = clock()
    timing = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in functions]
    tree.body = [node for node in tree.body if node not in timing]
    return _digest([repr(_skeleton(tree)), *(f"clock {version}" for _ in timing[:1])])


def code_hash(cells: Iterable[str]) -> str:
    """Return the hash of a recipe's code, given those of its cells."""
    return _digest(cells)


def cell_hashes(path: Path) -> list[str]:
    """Return the hashes of a script's cells, with the lines that its page leaves out."""
    return [cell_hash(content) for kind, content in blocks(path.read_text(encoding="utf-8")) if kind == "code"]


def hash_of(recipe: Recipe) -> str:
    """Return the hash of a recipe's present code."""
    return _hash_of(recipe.text)


@cache  # a build asks for it some twenty times
def _hash_of(text: str) -> str:
    return code_hash(cell_hash(content) for kind, content in blocks(text) if kind == "code")


@cache
def blocks(text: str) -> list[tuple[str, str]]:
    """Return the blocks of a script as sphinx-gallery sees them: of each whether it is "text" or "code", and what."""
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".py") as file:  # sphinx-gallery splits files alone
        file.write(text)
        file.flush()
        return [(block.type, block.content) for block in split_code_and_text_blocks(file.name)[1]]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _skeleton(node: object) -> object:
    if isinstance(node, ast.AST):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        if isinstance(node, ast.JoinedStr):  # from Python 3.12 on, f"{x:{width}}" ends in an empty constant
            node.values = [value for value in node.values if getattr(value, "value", value) != ""]
        fields = [(name, _skeleton(value)) for name, value in ast.iter_fields(node) if value not in (None, [])]
        return (type(node).__name__, fields)
    if isinstance(node, list):
        return [_skeleton(item) for item in node]
    return node
