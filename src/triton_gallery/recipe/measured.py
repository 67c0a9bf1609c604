"""The part of a recipe's code that its measurements depend on.

A statement measures if it calls the clock, whatever functions lie between, or makes a benchmark's table. What it
depends on are the statements that bound or changed the names which it uses, back to the one that certainly bound them
anew, what those use, and so on. A proof, an example or prose is none of them: where one changes, the figures of a
record stay those of the present code.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.hashes import blocks, cell_hash, code_hash, hash_of, tree_hash
from triton_gallery.recipe.inline import clock
from triton_gallery.recipe.op import op_of

TIMERS = {"do_bench", "do_bench_cudagraph", "perf_report"}  # of Triton
TABLE = "results"  # begins the name of a benchmark's table
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class _Statement:
    """A statement outside functions: what it uses, what it binds or changes, and what it certainly binds anew."""

    def __init__(self, node: ast.stmt, conditions: Sequence[ast.stmt]) -> None:
        """Take it, with the conditions that it stands under."""
        self.tree = ast.Module([*conditions, node], [])
        self.conditions = {ast.dump(condition) for condition in conditions}
        self.is_definition = isinstance(node, DEFINITION)
        stored, loaded, local, changed = set[str](), set[str](), set[str](), set[str]()
        self.attributes = set[str]()
        for child in ast.walk(self.tree):
            if isinstance(child, ast.Name):
                (loaded if isinstance(child.ctx, ast.Load) else stored).add(child.id)
            elif isinstance(child, ast.arg):
                local.add(child.arg)
            elif isinstance(child, ast.comprehension | ast.For):
                local |= _names(child.target)
            elif isinstance(child, ast.withitem) and child.optional_vars:
                local |= _names(child.optional_vars)
            elif isinstance(child, ast.Attribute | ast.Subscript) and isinstance(child.ctx, ast.Store):
                changed |= _names(child.value)
            elif isinstance(child, ast.Attribute):
                self.attributes.add(child.attr)
            elif isinstance(child, ast.AugAssign):
                changed |= _names(child.target)
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                changed |= _names(child.value.func) if isinstance(child.value.func, ast.Attribute) else set()
            elif isinstance(child, ast.alias):
                stored.add(child.asname or child.name.partition(".")[0])
        if isinstance(node, DEFINITION):
            stored, local, changed = {node.name}, local | stored, set()
        self.uses = loaded - local | changed
        self.binds = stored | changed
        self.rebinds = set() if isinstance(node, ast.For | ast.While | ast.Try) else stored - changed


def _names(node: ast.expr) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _statements(body: Sequence[ast.stmt], conditions: Sequence[ast.stmt] = ()) -> Iterator[_Statement]:
    for node in body:
        if isinstance(node, ast.If):
            is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
            tests = node.test.values if is_and else [node.test]  # type: ignore[attr-defined]
            yield from _statements(node.body, [*conditions, *map(ast.Expr, tests)])
            yield from _statements(node.orelse, [*conditions, ast.Expr(ast.UnaryOp(ast.Not(), node.test))])
        else:
            yield _Statement(node, conditions)


def measured_hash(recipe: Recipe) -> str:
    """Return the hash of what a recipe's measurements depend on; of all its code, if it measures nothing."""
    return _measured_hash(recipe.text) or hash_of(recipe)


@cache  # a build asks for it with each page
def _measured_hash(text: str) -> str | None:
    statements = [
        statement
        for kind, content in blocks(text)
        if kind == "code"
        for statement in _statements(ast.parse(content).body)
    ]
    _, timers = clock()
    reached: set[int] = set()
    for index, statement in enumerate(statements):
        if not statement.is_definition:
            needed = _needed(statements, index)
            names = {name for place in needed for name in statements[place].uses | statements[place].attributes}
            if names & (timers | TIMERS) or any(name.startswith(TABLE) for name in statement.binds):
                reached |= needed
    return code_hash(tree_hash(statements[index].tree) for index in sorted(reached)) if reached else None


def _needed(statements: Sequence[_Statement], index: int) -> set[int]:
    """Return the places of a statement and of those that it depends on."""
    needed, pending = {index}, [(index, index)]  # each with the place from which names are looked up
    while pending:
        place, at = pending.pop()
        for name in sorted(statements[place].uses):  # what is reached depends on the order
            for bound in reversed(range(at)):
                other = statements[bound]
                if name in other.binds and bound not in needed:
                    needed.add(bound)
                    pending.append((bound, at if other.is_definition else bound))
                if name in other.rebinds and other.conditions <= statements[at].conditions:
                    break
    return needed


def op_hash(recipe: Recipe) -> str:
    """Return the hash of the code that is measured beside other libraries: of a recipe's op, else of all its code."""
    return _op_hash(recipe, recipe.text)


@cache  # a build asks for it with each row
def _op_hash(recipe: Recipe, _text: str) -> str:
    op = op_of(recipe)
    return cell_hash(op.code) if op else hash_of(recipe)
