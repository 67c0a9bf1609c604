"""The kernels in a recipe's script: of each the text of a module with all that it needs, and nothing else."""

import ast
import copy
from collections.abc import Sequence

from triton_gallery.recipe.names import bound

LAUNCHED = "triton.jit"  # what makes a function a kernel


def module_of(source: str, kernel: str, given: Sequence[str] = ()) -> str:
    """Return the text of a module with one kernel, the helpers and constants that it uses, and their imports.

    What decorates a kernel beside `jit`, such as `autotune`, is left out: a launch says what it chose.

    Args:
        source: the recipe's text.
        kernel: the name of a function, at its top level or within another function.
        given: the names of functions that a launch gives to the kernel.

    Raises:
        LookupError: if there is no such function.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == kernel]
    if not functions:
        raise LookupError(f"the recipe does not define {kernel}")
    statements = tree.body if functions[0] in tree.body else [*tree.body, functions[0]]
    binds = [set(bound([node])) for node in statements]
    wanted, kept = {kernel, *given, LAUNCHED.partition(".")[0]}, set[int]()
    while places := {place for place, names in enumerate(binds) if names & wanted} - kept:
        kept |= places
        for place in places:
            wanted |= _used(_bare(statements[place], kernel))
    return "\n\n".join(ast.unparse(_bare(statements[place], kernel)) for place in sorted(kept)) + "\n"


def _used(statement: ast.stmt) -> set[str]:
    """Return the names that a statement takes from the module: not those that a function binds itself."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    if not isinstance(statement, ast.FunctionDef):
        return loaded
    arguments = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    return loaded - arguments - {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _bare(statement: ast.stmt, kernel: str) -> ast.stmt:
    """Return a function without decorators other than `jit`, which the kernel has in any case; else the statement."""
    if not isinstance(statement, ast.FunctionDef):
        return statement
    jit = [node for node in statement.decorator_list if _called(node).endswith("jit")]
    if statement.name == kernel and not jit:
        jit = [ast.parse(LAUNCHED, mode="eval").body]
    bare = copy.copy(statement)
    bare.decorator_list = jit or statement.decorator_list
    return bare


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
