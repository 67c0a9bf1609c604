"""The ops of all recipes in one file: each works there, beside the others."""

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from case import Case, Draw, check
from collect_cases import collect, runs_here
from device_key import at_cuda
from inputs import DEVICE
from op_fixtures import import_code, recipe_in

from triton_gallery.recipe.op import Op, op_of

CASES = collect("CONTRACT")


@pytest.fixture(scope="module")
def ops(gallery: Path) -> dict[str, Op]:
    """Return the ops that recipes hand over."""
    by_recipe = {f"{path.parent.name}/{path.stem}": op_of(recipe_in(path)) for path in sorted(gallery.glob("*/*.py"))}
    return {recipe: op for recipe, op in by_recipe.items() if op is not None}


@pytest.fixture(scope="module")
def together(ops: dict[str, Op], tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return a module of all of them."""
    imports = dict.fromkeys(line for op in ops.values() for line in op.imports)
    code = "\n".join([*imports, *(op.of("together").cell for op in ops.values())])
    return import_code(code, tmp_path_factory.mktemp("taken") / "all_ops.py")


def test_loads_twice(
    load_recipe: Callable[[str], ModuleType], load_op: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests load twice in a process works, where PyTorch refuses a second function for one device of an op too."""
    strict = functools.partialmethod(torch.library.Library.impl, allow_override=False)
    monkeypatch.setattr(torch.library.Library, "impl", strict)
    for load in (load_op, load_recipe, load_op):
        first, second = (load("fusion/unaligned_rows.py") for _ in range(2))
        assert first.ADD_ROWS_LIBRARY.m is None
        x = torch.ones(2, 3, device=DEVICE)
        assert at_cuda(second.add_rows, x, x, x[:, 0]).tolist() == [[2.0] * 3] * 2


def test_imports_do_not_replace_each_other(ops: dict[str, Op]) -> None:
    """No name stands for two things: of two, a file of several ops would have the later one alone."""
    places: dict[str, set[str]] = {}
    for op in ops.values():
        for node in ast.parse("\n".join(op.imports)).body:
            assert isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names:
                bound = name.asname or name.name.split(".")[0]
                whole = name.name if name.asname else bound
                places.setdefault(bound, set()).add(
                    f"{node.module}.{name.name}" if isinstance(node, ast.ImportFrom) else whole
                )
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_each_has_a_case(ops: dict[str, Op]) -> None:
    assert {recipe for recipe, _ in CASES} == set(ops)


@pytest.mark.parametrize(
    ("recipe", "case"), [pytest.param(recipe, case, id=f"{recipe}-{case.name or case.call}") for recipe, case in CASES]
)
def test_op_works_beside_the_others(together: ModuleType, recipe: str, case: Case) -> None:
    if not runs_here(recipe):
        pytest.skip("needs another GPU")
    before = {name: getattr(together, name) for name in case.settings}
    try:
        check(case, together, case.usual, case.arguments(Draw(case.usual), *case.small))
    finally:
        vars(together).update(before)
