"""What people call today and the op in its place: the two snippets of an op's page come to the same."""

import ast
import inspect
import json
import subprocess
import sys

import pytest
from project import OPS, ROOT, SOURCES
from replacement_calls import HOPPER

from triton_gallery.site.op_pages import public
from triton_gallery.site.replaces import Swap, replaces

SWAPS = {f"{op} {number}": swap for op, entry in replaces().items() for number, swap in enumerate(entry.swaps)}
WIDTH = 92  # what a page 1280 pixels wide shows of a line


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    """Return in what the two snippets of each swap differ, in the interpreter."""
    done = subprocess.run(
        [sys.executable, "tests/site/replacement_calls.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [name for name in SWAPS if name.split()[0] not in HOPPER])
def test_both_calls_come_to_the_same(faults: dict[str, str], name: str) -> None:
    assert faults[name] == ""


@pytest.mark.parametrize("name", SWAPS)
def test_call_has_the_arguments_of_the_op(name: str) -> None:
    """For ops that run on Hopper alone this is all that can be tested elsewhere."""
    op, swap = name.split()[0], SWAPS[name]
    tree = ast.parse(swap.with_op)
    (imported,) = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    assert imported.module == f"triton_gallery_ops.{op}"
    named = {name.name for name in imported.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in named]
    assert {ast.unparse(call.func) for call in calls} == named
    functions = {part.node.name: part.node for part in public(op, (SOURCES / f"{op}.py").read_text()) if part.node}
    for call in calls:
        function = functions[ast.unparse(call.func)]
        assert isinstance(function, ast.FunctionDef)
        signature(function.args).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_snippets_fit_the_page(swap: Swap) -> None:
    assert max(map(len, f"{swap.today}\n{swap.with_op}".splitlines())) <= WIDTH
    assert swap.said.strip().endswith(".")


def test_every_op_has_one() -> None:
    assert {name.split()[0] for name in SWAPS} == {*OPS}


def signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature that a function's text has."""
    required = len(arguments.args) - len(arguments.defaults)
    kinds = inspect.Parameter
    by_place = [
        kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if place < required else None)
        for place, argument in enumerate(arguments.args)
    ]
    by_name = [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=None if default else kinds.empty)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return inspect.Signature([*by_place, *by_name])
