"""Writes into a script what it imports of this project, so that it stands alone.

A line `from triton_gallery.bench import gpu_time, rate_table` becomes the text of these functions, and so does one
that imports from `triton_gallery.compiling`, `.counting`, `.outcomes` or `.ranks`. A line `from
triton_gallery_ops.softmax import softmax` becomes the text of the whole op, with the ops that it is made of. What they
import is imported where the script begins. All else stays as it is, byte by byte.
"""

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from triton_gallery.recipe.names import bound

CLOCK_FILE = Path(__file__).parents[1] / "bench.py"
HELPERS = {  # of lessons
    f"triton_gallery.{name}": CLOCK_FILE.with_name(f"{name}.py")
    for name in ("bench", "compiling", "counting", "outcomes", "ranks")
}
OPS = "triton_gallery_ops"
FOLDER = Path(__file__).parents[2] / OPS  # of this project's ops
LATE = ("triton", "transformers", "torch.utils.flop_counter")  # load Triton, which reads TRITON_INTERPRET then
WIDTH = 80
FUNCTION = ("def ", "class ", "@")

ImportNode = ast.Import | ast.ImportFrom
Helper = ast.FunctionDef | ast.ClassDef
Imported = tuple[str, str | None, str | None]  # module, name of it, and what it is called here


@dataclass(frozen=True)
class _Source:
    """What takes the place of an import.

    Attributes:
        text: the code.
        binds: the names that it binds.
        imports: what it imports.
        needs: the names that the script has to bind.
    """

    text: str
    binds: list[str]
    imports: list[Imported]
    needs: set[str]


@cache  # a build asks for each script dozens of times
def inlined(script: str, folder: Path = FOLDER) -> str:
    """Return a script with the text of what it imports of this project in place of each such import.

    Args:
        script: its text.
        folder: where the ops are.

    Raises:
        ValueError: if it imports what is not there or may not be inlined, if two things would have one name, or if what
            is inlined needs a name that the script does not bind.
    """
    if not any(module in script for module in (*HELPERS, OPS)):
        return script
    try:
        body = ast.parse(script).body
    except SyntaxError:  # its page says so
        return script
    own_imports = [node for node in body if isinstance(node, ast.ImportFrom) and _is_ours(node.module)]
    taken = list(zip(own_imports, _sources(own_imports, folder), strict=True))
    _check(script, [node for node in body if node not in own_imports], taken)
    lines = script.splitlines(keepends=True)
    for node, source in reversed(taken):  # from the end, so that the numbers of lines stay those of the tree
        before, after = "".join(lines[: node.lineno - 1]), "".join(lines[node.end_lineno :])
        lines = _join(before, source.text, after).splitlines(keepends=True)
    return _with_imports("".join(lines), [item for _, source in taken for item in source.imports])


@cache
def ops_in(script: str) -> list[str]:
    """Return the names of the ops that a script imports, in order."""
    if OPS not in script:
        return []
    nodes = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.ImportFrom) and _is_op(node.module)]
    return [str(node.module).partition(".")[2] for node in nodes]


@cache
def clock() -> tuple[int, frozenset[str]]:
    """Return the version of the clock, and the names of its functions."""
    tree = ast.parse(CLOCK_FILE.read_text(encoding="utf-8"))
    (version,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and [*bound([node])] == ["VERSION"])
    return ast.literal_eval(version), frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def sources(script: str, folder: Path = FOLDER) -> list[Path]:
    """Return the files whose text takes the place of what a script imports."""
    parts = dict.fromkeys(part for op in ops_in(script) for part in _made_of(op, folder))
    helpers = [file for module, file in HELPERS.items() if module in script]
    return [*helpers, *(folder / f"{part}.py" for part in parts)]


def _is_op(module: str | None) -> bool:
    return (module or "").startswith(f"{OPS}.")


def _is_ours(module: str | None) -> bool:
    return module in HELPERS or _is_op(module)


def _check(script: str, others: Sequence[ast.stmt], taken: Sequence[tuple[ast.ImportFrom, _Source]]) -> None:
    """Refuse names that are bound twice, or not at all; ValueError."""
    binds = [*bound(node for node in others if not isinstance(node, (ast.Import, ast.ImportFrom)))]
    known = {*bound(others), *(name for _, source in taken for name in source.binds)}
    for node, source in taken:
        if twice := sorted({*source.binds} & {*binds}):
            raise ValueError(f"{node.module} and what stands beside it both bind {', '.join(twice)}")
        binds += source.binds
        if missing := sorted(source.needs - known):
            raise ValueError(f"what is inlined of {node.module} needs {', '.join(missing)}, which the script lacks")


def _sources(nodes: Iterable[ast.ImportFrom], folder: Path) -> Iterator[_Source]:
    """Yield what takes the place of each import; an op that several need is in the place of the first."""
    written: set[str] = set()
    for node in nodes:
        if any(name.asname for name in node.names):
            raise ValueError(f"cannot be inlined: {ast.unparse(node)}")
        if node.module in HELPERS:
            yield _helpers(node, HELPERS[node.module])
            continue
        name = str(node.module).partition(".")[2]
        parts = [_op(part, folder) for part in _made_of(name, folder) if part not in written]
        written |= {*_made_of(name, folder)}
        if {name.name for name in node.names} - {*_op(name, folder).binds}:
            raise ValueError(f"cannot be inlined: {ast.unparse(node)}")
        text = ""
        for part in parts:
            text = _join(text, part.text, "")
        imports = [item for part in parts for item in part.imports]
        yield _Source(text, [name for part in parts for name in part.binds], imports, set())


def _helpers(node: ast.ImportFrom, file: Path) -> _Source:
    """Return the functions and classes that a statement imports, and what they use."""
    tree = ast.parse(source := file.read_text(encoding="utf-8"))
    helpers = {item.name: item for item in tree.body if isinstance(item, Helper)}
    if unknown := {name.name for name in node.names} - helpers.keys():
        raise ValueError(f"cannot be inlined: {ast.unparse(node)} ({', '.join(sorted(unknown))})")
    names = [name.name for name in node.names]
    for name in names:  # and those that they use; the list grows meanwhile
        names += sorted(_used(helpers[name]) & helpers.keys() - {*names})
    names.sort(key=[*helpers].index)
    text = ""
    for name in names:
        text = _join(text, f"{ast.get_source_segment(source, helpers[name])}\n", "")
    used = {item for name in names for item in _used(helpers[name])}
    imports = [item for item in _imported(tree.body) if _called(item) in used]
    return _Source(text, names, imports, used - {*names} - {_called(item) for item in imports})


def _used(helper: Helper) -> set[str]:
    """Return the names that a function or a class takes from its module."""
    local = {argument.arg for argument in ast.walk(helper) if isinstance(argument, ast.arg)}
    names = [item for item in ast.walk(helper) if isinstance(item, ast.Name)]
    local |= {item.id for item in names if isinstance(item.ctx, ast.Store)}
    local |= {str(item.name) for item in ast.walk(helper) if isinstance(item, ast.ExceptHandler)}
    local |= {*bound(item for item in ast.walk(helper) if isinstance(item, ImportNode | ast.FunctionDef))}
    return {item.id for item in names} - local - {*dir(builtins)}


def _made_of(op: str, folder: Path, within: tuple[str, ...] = ()) -> list[str]:
    """Return the ops that an op is made of, each after its own parts, and the op; ValueError if that is a circle."""
    if op in within:
        raise ValueError(f"ops are made of each other: {', '.join(within)}")
    inner = ops_in(_read(op, folder))
    dependencies = dict.fromkeys(part for name in inner for part in _made_of(name, folder, (*within, op)))
    return [*dependencies, op]


def _read(op: str, folder: Path) -> str:
    path = folder / f"{op}.py"
    if not path.is_file():
        raise ValueError(f"there is no op {OPS}.{op}")
    return path.read_text(encoding="utf-8")


def _op(name: str, folder: Path) -> _Source:
    """Return an op: what stands below its docstring and its imports."""
    source = _read(name, folder)
    body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, ImportNode)]
    rest = [node for node in body[1:] if node not in imports]
    end = max(int(node.end_lineno or 0) for node in imports)
    if min(node.lineno for node in rest) < end:
        raise ValueError(f"{OPS}.{name} imports below its first statement")
    text = "".join(source.splitlines(keepends=True)[end:]).strip("\n") + "\n"
    other_imports = [node for node in imports if not (isinstance(node, ast.ImportFrom) and _is_op(node.module))]
    return _Source(text, [*bound(rest)], [*_imported(other_imports)], set())


def _join(before: str, text: str, after: str) -> str:
    """Put a text between two others, with as many empty lines as a formatter leaves: two beside a function."""
    joined = before.rstrip("\n")
    for part in (text, after.lstrip("\n")):
        if joined and part:
            joined += "\n\n\n" if part.startswith(FUNCTION) or _ends_in_function(joined) else "\n\n"
        joined += part.rstrip("\n")
    return f"{joined}\n"


def _ends_in_function(text: str) -> bool:
    tree = ast.parse(text).body
    return bool(tree) and isinstance(tree[-1], (ast.FunctionDef, ast.ClassDef)) and text[text.rindex("\n") + 1] != "#"


def _imported(nodes: Iterable[ast.stmt]) -> Iterator[Imported]:
    """Yield what imports among statements import, name by name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((name.name, None, name.asname) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", name.name, name.asname) for name in node.names)


def _called(item: Imported) -> str:
    """Return the name that an import binds."""
    module, name, alias = item
    return alias or name or module.partition(".")[0]


def _with_imports(script: str, wanted: Iterable[Imported]) -> str:
    """Return a script that imports more, sorted: what loads Triton where the script does, and the rest on top."""
    tree, lines = ast.parse(script), script.splitlines(keepends=True)
    known = [*_imported(tree.body)]
    missing = [item for item in dict.fromkeys(wanted) if item not in known]
    if not missing:
        return script
    meant = {_called(item): item for item in known if item[1] or item[2]}
    for item in missing:
        if meant.setdefault(_called(item), item) != item and (item[1] or item[2]):
            raise ValueError(f"{_called(item)} is imported of {meant[_called(item)][0]} and of {item[0]}")
    blocks = _blocks(tree, lines)
    if not blocks:
        raise ValueError("the script imports nothing")
    of_triton = next((block for block in blocks if ("triton", None, None) in _imported(block)), blocks[0])
    for block in reversed(blocks):
        more = [item for item in missing if block is (of_triton if item[0].startswith(LATE) else blocks[0])]
        if more:
            lines[block[0].lineno - 1 : block[-1].end_lineno] = [_written([*_imported(block), *more])]
    return "".join(lines)


def _blocks(tree: ast.Module, lines: Sequence[str]) -> list[list[ast.stmt]]:
    """Return the imports of a script that stand together, with nothing but empty lines between them."""
    imports = [node for node in tree.body if isinstance(node, ImportNode)]
    blocks: list[list[ast.stmt]] = [[node] for node in imports[:1]]
    for before, node in pairwise(imports):
        if "".join(lines[int(before.end_lineno or 0) : node.lineno - 1]).strip():
            blocks.append([])
        blocks[-1].append(node)
    return blocks


def _written(items: Iterable[Imported]) -> str:
    """Return imports as statements, as ruff sorts them."""
    sections: dict[bool, list[str]] = {True: [], False: []}
    plain = sorted({item for item in items if item[1] is None}, key=lambda item: (item[0], item[2] or ""))
    for module, _, alias in plain:
        line = f"import {module} as {alias}" if alias else f"import {module}"
        sections[module.partition(".")[0] in sys.stdlib_module_names].append(line)
    members_of: dict[str, set[Imported]] = {}
    for item in items:
        if item[1]:
            members_of.setdefault(item[0], set()).add(item)
    for module, members in sorted(members_of.items()):
        names = [f"{name} as {alias}" if alias else str(name) for _, name, alias in sorted(members, key=_rank)]
        line = f"from {module} import {', '.join(names)}"
        if len(line) > WIDTH:
            line = "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
        sections[module.partition(".")[0] in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(lines) for lines in sections.values() if lines) + "\n"


def _rank(item: Imported) -> tuple[int, str]:
    """Sort constants before classes, and those before functions."""
    name = str(item[1])
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name
