"""The ops of all recipes in one file: each works there, beside the others."""

import ast
import functools
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, in_float64
from device_key import at_cuda
from inputs import DEVICE
from op_fixtures import import_code, recipe_in
from own import collect, runs_here
from torch.utils._pytree import tree_leaves

from triton_gallery.recipes.op import Op, op_of

# A function of a module, what makes its arguments, and what computes the same
Entry = tuple[Callable[[ModuleType], Callable[..., Any]], Callable[..., tuple[Any, ...]], Callable[..., object]]


def of_case(case: Case) -> Entry:
    """Return what is asked of a case of the contract."""
    return (
        case.on_copies,
        lambda *_: case.arguments(Draw(torch.float32), *case.small),
        lambda *arguments: [right.value for right in case.exact(*in_float64(arguments))],
    )


REFERENCES: list[tuple[str, str, Entry]] = [
    (recipe, entry[0], (attrgetter(entry[0]), *entry[1:])) for recipe, entry in collect("OPS") if len(entry) == 3
]
REFERENCES += [(recipe, case.name or case.call, of_case(case)) for recipe, case in collect("CONTRACT")]


@pytest.fixture(scope="module")
def ops(gallery: Path) -> dict[str, Op]:
    """Return the ops that recipes hand over."""
    found = {f"{path.parent.name}/{path.stem}": op_of(recipe_in(path)) for path in sorted(gallery.glob("*/*.py"))}
    return {recipe: op for recipe, op in found.items() if op is not None}


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
    for load in (load_recipe, load_op):
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
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_each_has_a_reference(ops: dict[str, Op]) -> None:
    assert {recipe for recipe, *_ in REFERENCES} == set(ops)


@pytest.mark.parametrize(
    ("recipe", "entry"), [pytest.param(recipe, entry, id=f"{recipe}-{name}") for recipe, name, entry in REFERENCES]
)
def test_op_works_beside_the_others(together: ModuleType, recipe: str, entry: Entry) -> None:
    if not runs_here(recipe):
        pytest.skip("needs another GPU")
    find, make, reference = entry
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    inputs = make(lambda *shape: torch.randn(shape, device=device, generator=generator), 5, 100)
    out, expected = find(together)(*inputs), reference(*inputs)
    for one, right in zip(tree_leaves(out), tree_leaves(expected), strict=True):
        rounding = torch.finfo(one.dtype).eps if one.is_floating_point() else 0
        torch.testing.assert_close(
            one, right, rtol=max(1e-4, 2 * rounding), atol=max(1e-5, rounding), check_dtype=False
        )
