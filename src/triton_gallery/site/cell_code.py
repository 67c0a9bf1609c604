"""What a page shows of a cell's code: no guards that only the script needs, and folds for imports and measurements."""

import ast
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

MAIN = "__name__ == '__main__'"
ON_GPU = "DEVICE.type == 'cuda'"
CLOCKS = {"gpu_time", "cpu_time", "rate_table"}  # which lessons import
OTHER_CLOCKS = {"do_bench", "do_bench_cudagraph", "perf_counter", "elapsed_time"}  # in lessons on how to measure
LONG_IMPORTS = 3  # statements


def without_guards(code: str) -> tuple[str, bool]:
    """Return code without its guards against being imported, and whether all of it runs on a GPU alone.

    What else a guard asks for stays, but for a GPU where the guard is around all of the code. If leaving out a guard
    would change anything else, the code is returned as it is.
    """
    lines, body, gpu_only = code.splitlines(), ast.parse(code).body, False
    for statement in reversed(body):
        conditions = _conditions(statement)
        if MAIN not in conditions:
            continue
        assert isinstance(statement, ast.If)
        del conditions[MAIN]
        if len(body) == 1 and [*conditions] == [ON_GPU]:
            conditions, gpu_only = {}, True
        guarded = lines[statement.test.end_lineno : statement.end_lineno]
        if not guarded:  # the body is on the line of the test
            return code, False
        inner = guarded[guarded[0].startswith(")") :]
        if rest := [*conditions.values()]:
            test = ast.BoolOp(ast.And(), rest) if len(rest) > 1 else rest[0]
            shown = [f"if {ast.unparse(test)}:".replace("'", '"'), *inner]
            statements: list[ast.stmt] = [ast.If(test, statement.body, [])]
        else:
            shown = textwrap.dedent("\n".join(inner)).splitlines()
            statements = statement.body
        if not _are(shown, statements):
            return code, False
        lines[statement.lineno - 1 : statement.end_lineno] = shown
    return "\n".join(lines), gpu_only


def _conditions(statement: ast.stmt) -> dict[str, ast.expr]:
    """Return what all has to be true for a statement, by its text; nothing if it is no `if`, or has an `else`."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return {}
    test = statement.test
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return {ast.unparse(part): part for part in parts}


def _are(lines: list[str], body: list[ast.stmt]) -> bool:
    """Whether lines are these statements: a string may have lost spaces or have other quotes."""
    try:
        return ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.Module(body, []))
    except SyntaxError:
        return False


def measuring(codes: Iterable[str]) -> list[bool]:
    """Return for each cell of a recipe whether it does nothing but measure.

    What such a cell does, it does on a GPU alone. It calls a clock, or a function of a cell before it that does; it
    checks nothing, and defines no kernel and nothing that launches one. A clock that a recipe has of its own is what it
    teaches.
    """
    clocks, answers = set(CLOCKS), list[bool]()
    for code in codes:
        body = ast.parse(code).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        called = _called(*body)
        runs_anywhere = any(isinstance(node, ast.If) and ON_GPU not in _conditions(node) for node in body)
        teaches = any(_teaches(part) for node in body for part in ast.walk(node))
        answers.append(bool(called & clocks) and not called & OTHER_CLOCKS and not runs_anywhere and not teaches)
        timers = {function.name for function in functions if answers[-1] and _called(function) & clocks}
        clocks = clocks - {function.name for function in functions} | timers
    return answers


def measurements(sections: Sequence[str], measures: Sequence[bool]) -> Iterator[str]:
    """Yield what each cell that measures is of: the title of its section, and which of several there it is.

    Args:
        sections: the title of each cell's section.
        measures: whether it does nothing but measure.
    """
    titles = [title for title, is_one in zip(sections, measures, strict=True) if is_one]
    seen = Counter[str]()
    for title in titles:
        seen[title] += 1
        yield title if titles.count(title) == 1 else f"{title}, {seen[title]} of {titles.count(title)}"


def _called(*trees: ast.AST) -> set[str]:
    """Return the names of what is called, without the modules or objects that have it."""
    functions = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in functions}


def _teaches(node: ast.AST) -> bool:
    """Whether this is a class, an assertion, a decorated function, or a function that launches a kernel."""
    if isinstance(node, (ast.Assert, ast.ClassDef)) or "assert_close" in _called(node):
        return True
    if not isinstance(node, ast.FunctionDef):
        return False
    taken = [part.value for part in ast.walk(node) if isinstance(part, ast.Subscript)]
    return bool(node.decorator_list) or any(ast.unparse(value).endswith("kernel") for value in taken)


def leading_imports(code: str) -> int:
    """Return how many lines the imports at the head of a cell take; 0 if they are few."""
    imports = [*takewhile(lambda node: isinstance(node, (ast.Import, ast.ImportFrom)), ast.parse(code).body)]
    return imports[-1].end_lineno or 0 if len(imports) >= LONG_IMPORTS else 0
