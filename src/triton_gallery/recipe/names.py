"""The names of Triton and PyTorch in a script, each resolved through the script's imports, without executing it."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

PACKAGES = ("torch", "triton")


@dataclass(frozen=True)
class Use:
    """A name in a script.

    Attributes:
        written: as the script has it: "tl.dot".
        name: in full: "triton.language.dot".
    """

    written: str
    name: str


@cache  # a build asks three times for each page
def uses(source: str) -> list[Use]:
    """Return the names of torch and triton that a script uses, each way to write one once, in order."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    known = dict(binding for node in nodes for binding in _bound(node))
    for node in nodes:  # a name that is given to something else too tells nothing
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            known.pop(node.id, None)
        elif isinstance(node, ast.arg):
            known.pop(node.arg, None)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.pop(node.name, None)
    places: dict[Use, tuple[int, int]] = {}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
            root, *rest = _path(node)
            if root in known and known[root].partition(".")[0] in PACKAGES:
                use = Use(".".join([root, *rest]), ".".join([known[root], *rest]))
                places.setdefault(use, (node.lineno, node.col_offset))
    return sorted(places, key=places.__getitem__)


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what an import binds, and to what."""
    if isinstance(node, ast.Import):
        for name in node.names:
            yield (name.asname, name.name) if name.asname else 2 * (name.name.partition(".")[0],)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for name in node.names:
            yield name.asname or name.name, f"{node.module}.{name.name}"


def _path(node: ast.expr) -> list[str]:
    """Return the names in `a.b.c`, as far in as it goes: those of `f(x).b.c` begin with an empty one."""
    if isinstance(node, ast.Attribute):
        return [*_path(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that statements bind, but for those within functions and classes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name.asname or name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))  # not that of x[0] = 1
