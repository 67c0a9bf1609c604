"""The form of a recipe: what a script's text tells of it. `docs/contributing.md` says what the form is for.

And the English of all pages: phrases that readers stumbled over, each with what to write instead.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.declaration import OfOp, declaration
from triton_gallery.recipe.names import bound
from triton_gallery.recipe.op import SUFFIX, op_of, statements

FIRST_KERNEL, FIRST_CONSTANTS, FIRST_FIGURE = 25, 4, 150  # statements, constants, lines below the opening
OP, OP_AND_BACKWARD = 110, 210  # statements
PHRASES = {
    r"\bsame bits\b|\b(?:is|are|and) the same each time\b": "deterministic; agree bit for bit",
    r"\bby turns\b": "in rotation",
    r"\bsticks? out\b": "reaches past the end",
    r"\bbehind (?:element|them|it|(?:the|its|a|each) (?:end|row|loop|op|tensor|head|block)|\w+'s)\b": "past",
    r"\btruth values?\b": "boolean",
    r"\b(?:number by number|element by element|bit by bit)\b": "one element at a time; bit for bit",
    r"\bsays? no\b(?! \w)": "raises a clear error",
    r"\b(?:not|n't) (?:show|say|tell|know|find out) why\b": "(say nothing, or explain it)",
    r"\bthe last one again\b": "clamp to the last row",
    r"\bwithout a word\b|\bnot say so\b": "silently",
    r"\bfor ever\b": "forever",
    r"\blie otherwise\b": "transposed and strided",
    r"\bin the way of the page\b": "as a page shows",
    r"\bof ours\b": "our",
    r"\bputs? out\b": "outputs, prints",
    r"\bso many\b(?! \w+ that\b)": "name the number",
    r"\bstands?\b(?!-in| in for| for\b| still\b| out\b| alone\b)": "is",
}


def faults(recipe: Recipe) -> list[str]:
    """Return in what a recipe is not of the form, in words."""
    of_op = declaration(recipe.path, recipe.text).of_op
    if of_op.tool:
        return []
    own = recipe.path.read_text()
    kernels = jitted(own)
    none = [] if kernels else ["it has no kernel of its own"]
    return [*none, *_of_first_kernel(own if kernels else recipe.text), *_of_op(recipe, of_op)]


def bad_phrases(path: Path) -> list[str]:
    """Return the phrases of a page's source that have a better English, each with its line and that."""
    text = path.read_text(encoding="utf-8")
    lines = _prose_of_script(text) if path.suffix == ".py" else text.splitlines()
    prose = "".join(f"{line.strip().removeprefix('#').strip()}\n" for line in lines)
    found = []
    for phrase, better in PHRASES.items():
        for match in re.finditer(phrase.replace(" ", r"\s"), prose, re.IGNORECASE):
            line = prose.count("\n", 0, match.start()) + 1
            found.append(f"{path.name}:{line}: {' '.join(match[0].split())}; better: {better}")
    return found


def _prose_of_script(text: str) -> list[str]:
    """Return a line for each of a script's: its comment or docstring, else nothing."""
    lines = [""] * (text.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = node.lineno - 1
            lines[first : node.end_lineno] = text.splitlines()[first : node.end_lineno]
    return lines


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


def _plain(name: str) -> str:
    """Return a name as constants, functions and classes have it in common."""
    return name.lower().replace("_", "")


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
    # Itself, and the ops that it is made of
    ops = [op.name, *(name.removesuffix(SUFFIX) for name in op.names if name.endswith(SUFFIX))]
    if others := [name for name in op.names if not any(_plain(part) in _plain(name) for part in ops)]:
        yield f"its op defines {others}: names have {op.name} in them"
    if "torch.library" in op.code and op.of("") == op:
        yield "its op has no constant for its namespace"
    if of_op.backward and "float64" not in of_op.dtypes:
        yield "its op has a backward and does not take float64"
    named = [name for name in bound(ast.parse(recipe.text).body) if name.startswith(f"_{op.name}_")]
    if outside := sorted({*named} - {*op.names}):
        yield f"it defines {outside} outside of its op"
