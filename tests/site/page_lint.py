"""The form of a recipe: what a script's text tells of it. `docs/contributing.md` says what the form is for."""

import ast
from collections.abc import Iterator

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.declaration import OfOp, declaration
from triton_gallery.recipe.names import bound
from triton_gallery.recipe.op import op_of, statements

FIRST_KERNEL, FIRST_CONSTANTS, FIRST_FIGURE = 25, 4, 150  # statements, constants, lines below the opening
OP, OP_AND_BACKWARD = 110, 210  # statements


def faults(recipe: Recipe) -> list[str]:
    """Return in what a recipe is not of the form, in words."""
    of_op = declaration(recipe.path, recipe.text).of_op
    if of_op.tool:
        return []
    own = recipe.path.read_text()
    kernels = jitted(own)
    none = [] if kernels else ["it has no kernel of its own"]
    return [*none, *_of_first_kernel(own if kernels else recipe.text), *_of_op(recipe, of_op)]


def width(source: str) -> int:
    """Return how wide a script is: beyond 80 columns its page scrolls sideways."""
    return max(map(len, source.splitlines()))


def length(recipe: Recipe) -> int:
    """Return the lines of a lesson but for its opening."""
    return len(_below_opening(recipe.path.read_text()))


def _below_opening(source: str) -> list[str]:
    lines = source.splitlines()
    return lines[lines.index("# %%") :]


def jitted(source: str) -> dict[str, ast.FunctionDef]:
    """Return the jitted functions at the top level of a script, by their names."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if any("jit" in ast.unparse(by) for by in node.decorator_list)}


def _of_first_kernel(source: str) -> Iterator[str]:
    kernels = jitted(source)
    first = next(node for node in kernels.values() if not _is_called(node.name, kernels))
    length = sum(statements(kernels[name]) for name in _calls(first.name, kernels))
    if length > FIRST_KERNEL:
        yield f"its first kernel has {length} statements, {FIRST_KERNEL} are allowed"
    constants = sum("constexpr" in ast.unparse(arg.annotation) for arg in first.args.args if arg.annotation)
    if constants > FIRST_CONSTANTS:
        yield f"its first kernel has {constants} constants, {FIRST_CONSTANTS} are allowed"
    below = "\n".join(_below_opening(source))
    for what, call in (("check", "assert_close("), ("figure", "gpu_time(")):
        line = below[: below.index(call)].count("\n") if call in below else None
        if line is None or line > FIRST_FIGURE:
            yield f"its first {what} stands in line {line} below the opening, {FIRST_FIGURE} are allowed"


def _calls(name: str, kernels: dict[str, ast.FunctionDef]) -> set[str]:
    """Return a jitted function and those that it calls."""
    found = {name}
    for node in ast.walk(kernels[name]):
        if isinstance(node, ast.Name) and node.id in kernels and node.id not in found:
            found |= _calls(node.id, kernels)
    return found


def _is_called(name: str, kernels: dict[str, ast.FunctionDef]) -> bool:
    return any(name in _calls(other, kernels) for other in kernels if other != name)


def _of_op(recipe: Recipe, of_op: OfOp) -> Iterator[str]:
    if not of_op.dtypes or None in (of_op.backward, of_op.deterministic):
        yield "it does not declare dtypes, backward and deterministic"
        return
    op = op_of(recipe)
    if op is None:
        yield "it has no cell under the heading 'The op'"
        return
    count, allowed = statements(ast.parse(op.cell)), OP_AND_BACKWARD if of_op.backward else OP
    if count > allowed and not of_op.longer:
        yield f"its op has {count} statements, {allowed} are allowed"
    if op.strangers:
        yield f"its op uses {sorted(op.strangers)}, which are not of its cell"
    if others := [name for name in op.names if not name.lower().lstrip("_").startswith(op.name)]:
        yield f"its op defines {others}: names begin with {op.name}"
    if "torch.library" in op.code and op.of("") == op:
        yield "its op has no constant for its namespace"
    if of_op.backward and "float64" not in of_op.dtypes:
        yield "its op has a backward and does not take float64"
    named = [name for name in bound(ast.parse(recipe.text).body) if name.startswith(f"_{op.name}_")]
    if outside := sorted({*named} - {*op.names}):
        yield f"it defines {outside} outside of its op"
