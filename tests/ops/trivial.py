"""The trivial mutants of an op's kernels: a mask, a cast, a choice, or one side of a condition is left out."""

import ast
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32


class Mutant(NamedTuple):
    """A script that is broken in one place.

    Attributes:
        name: the kernel, what stands there, and what takes its place.
        source: the broken script.
    """

    name: str
    source: str


def mutants(source: str, op: str) -> list[Mutant]:
    """Return all mutants of the kernels of an op in a script; their names are unique."""
    text = source.encode()  # in which the parser counts columns
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    count = Counter[str]()
    made = []
    for kernel in ast.parse(source).body:
        if isinstance(kernel, ast.FunctionDef) and kernel.name.startswith(f"_{op}_") and _is_jitted(kernel):
            for node, other in _changes(kernel):
                name = f"{kernel.name}: {ast.unparse(node)} -> {ast.unparse(other)}"
                count[name] += 1
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                broken = text[:begin] + f"({ast.unparse(other)})".encode() + text[end:]
                made.append(Mutant(f"{name} ({count[name]})" if count[name] > 1 else name, broken.decode()))
    return made


def some(made: list[Mutant], count: int) -> list[Mutant]:
    """Return so many of them, the same each time, however the others change."""
    return sorted(made, key=lambda mutant: crc32(mutant.name.encode()))[:count]


def _is_jitted(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _changes(kernel: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each expression that is left out, and what takes its place."""
    for node in ast.walk(kernel):
        match node:
            case ast.Call(ast.Attribute(attr="load" | "store"), arguments, keywords):
                others = [keyword for keyword in keywords if keyword.arg not in {"mask", "other"}]
                if len(others) < len(keywords):
                    yield node, ast.Call(node.func, arguments, others)
            case ast.Call(ast.Attribute(value, "to"), [dtype], []) if ast.unparse(dtype) != "tl.int64":
                yield node, value  # that one counts beyond 2**31 elements alone, on a GPU
            case ast.Call(ast.Attribute(attr="where"), [_, chosen, _], []):
                yield node, chosen
            case ast.BinOp(left, ast.BitAnd(), right):
                yield node, right
                yield node, left
