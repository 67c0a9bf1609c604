"""What the tests of each recipe say of it: its ops, its mutants; and which part of its script defines them."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from project import ROOT

from triton_gallery.recipe.contents import load
from triton_gallery.recipe.needs import missing

HERE = Path(__file__).parent
# From such a heading on a recipe has nothing but checks, figures and prose; or down to the next heading.
END = re.compile(r"(?m)^# (The check|Proof)\n# -+$")
BETWEEN = re.compile(r"(?ms)^# %%\n# Is it right\?\n# -+$.*?(?=^# %%\n# [^\n]+\n# -+$|\Z)")


def collect(name: str) -> list[tuple[str, Any]]:
    """Return what the module `test_<recipe>` of each recipe lists under a name, with `section/name` of the recipe."""
    items = []
    for recipe in load(ROOT / "gallery"):
        tests = HERE / f"test_{recipe.name}.py"
        if tests.exists() and re.search(rf"(?m)^{name} = ", tests.read_text()):
            try:
                module = importlib.import_module(f"test_{recipe.name}")
            except pytest.skip.Exception:  # it lacks something here
                continue
            items += [(recipe.key, item) for item in getattr(module, name, ())]
    return items


def is_real(value: Any) -> bool:
    """Whether an argument or a result is a tensor of floats."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def runs_here(recipe: str) -> bool:
    """Whether a recipe's op runs on this machine: some are for one kind of GPU alone."""
    return not _lacks(recipe)


def require(recipe: str, gpus: int = 1) -> None:
    """Skip the tests of a module, and say so, where its recipe declares what is not here, as another Triton.

    Args:
        recipe: as `section/name`.
        gpus: how many the module's tests use.
    """
    if lacks := _lacks(recipe, gpus):
        pytest.skip(f"NOT TESTED: {recipe} is for {', '.join(lacks)}", allow_module_level=True)


def _lacks(recipe: str, gpus: int = 1) -> list[str]:
    path = ROOT / "gallery" / f"{recipe}.py"
    if not path.exists():
        return ["a gallery that has it"]
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return missing(path, path.read_text(), capability, gpus)


def definitions(source: str) -> str:
    """Return a recipe without what checks it at import, which would stop the import of one that is broken.

    That is all below the headings of checks, and other blocks at the top level that assert or check something.
    """
    code = BETWEEN.sub("", END.split(source, maxsplit=1)[0])
    lines = code.splitlines(keepends=True)
    for block in reversed(ast.parse(code).body):
        if _asserts_at_import(block):
            del lines[block.lineno - 1 : block.end_lineno]
    return "".join(lines)


def _asserts_at_import(block: ast.stmt) -> bool:
    """Whether a block at the top level of a recipe asserts or checks something when the recipe is imported."""
    if isinstance(block, (ast.FunctionDef, ast.ClassDef)) or ast.unparse(block).startswith("if __name__ == '__main__'"):
        return False
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and re.search(r"assert_|^check", ast.unparse(node.func)))
        for node in ast.walk(block)
    )
