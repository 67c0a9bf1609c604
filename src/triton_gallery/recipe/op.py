"""The op that a recipe hands over: the one code cell under the heading *The op*, and what it needs to stand alone."""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.hashes import blocks
from triton_gallery.recipe.names import bound

NAMESPACE = "triton_gallery"  # of the ops on the pages
SUFFIX = "_NAMESPACE"  # of the constant for it
HEADING = re.compile(r"(?m)^The op\n-+$")


@dataclass(frozen=True)
class Op:
    """The code of an op.

    Attributes:
        name: what it is called; the constant for its namespace says so.
        title: of the recipe.
        imports: the recipe's imports that the cell uses, and no others, as statements.
        cell: the text of the cell.
    """

    name: str
    title: str
    imports: list[str]
    cell: str

    @property
    def code(self) -> str:
        """The imports and the cell: all of a module but what is said of it."""
        return "\n".join([*self.imports, "", self.cell])

    def of(self, namespace: str) -> "Op":
        """Return the op as someone takes it who sets its namespace, as the constant for it is there for."""
        old, new = (f'{self.name.upper()}{SUFFIX} = "{name}"' for name in (NAMESPACE, namespace))
        return replace(self, cell=self.cell.replace(old, new))

    @property
    def names(self) -> list[str]:
        """What the cell defines at its top level, in order."""
        return list(bound(ast.parse(self.cell).body))

    @property
    def strangers(self) -> set[str]:
        """The names that the cell uses and neither it, nor its imports, nor Python defines."""
        tree = ast.parse(self.code)
        stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)}
        known = {*bound(ast.walk(tree)), *stored, *arguments, *caught, *dir(builtins)}
        return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - known


def op_of(recipe: Recipe) -> Op | None:
    """Return the op of a recipe; None if it declares none, or no cell stands under the heading."""
    return _op_of(recipe, recipe.text)


@cache  # a build asks for it several times
def _op_of(recipe: Recipe, text: str) -> Op | None:
    if not declaration(recipe.path, text).of_op.dtypes:
        return None
    cells = blocks(text)
    places = [place for place, (kind, content) in enumerate(cells) if kind == "text" and HEADING.search(content)]
    if not places or [kind for kind, _ in cells[places[0] + 1 : places[0] + 2]] != ["code"]:
        return None
    cell = cells[places[0] + 1][1].strip("\n") + "\n"
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Name)}
    title = next(line for line in (ast.get_docstring(tree) or recipe.name).splitlines() if line)
    # The last, as ops that it is made of come before it
    named = [name for name in bound(ast.parse(cell).body) if name.endswith(SUFFIX)]
    name = [recipe.name, *named][-1].removesuffix(SUFFIX).lower()
    return Op(name, title, list(_imports(tree, used)), cell)


def statements(tree: ast.AST) -> int:
    """Return how many statements there are below a node; texts that stand for themselves are none."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


def _imports(tree: ast.Module, used: set[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kept = [name for name in node.names if (name.asname or name.name.partition(".")[0]) in used]
            if kept:
                yield ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), "names": kept}))
