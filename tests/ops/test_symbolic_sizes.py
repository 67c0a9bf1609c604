"""torch.compile traces every op for any sizes, and its gradient."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Draw, with_gradients
from collect_cases import collect, runs_here
from compiled import Ask, graphs
from torch.utils._pytree import tree_flatten, tree_unflatten

# With its place in the list of the recipe's tests, the first of each function: a case cannot travel to another process.
PLACES = {}
for recipe in dict.fromkeys(recipe for recipe, _ in collect("CONTRACT")):
    for place, (_, case) in enumerate(pair for pair in collect("CONTRACT") if pair[0] == recipe):
        if not case.call.startswith("_"):
            PLACES.setdefault((recipe, case.call), place)


def traced(place: int, module: ModuleType) -> list[list[str]]:
    """Trace a case of a recipe for symbolic sizes; return what its graphs call."""
    case = importlib.import_module(f"test_{module.__name__}").CONTRACT[place]
    drawn = case.arguments(Draw(case.usual, device=torch.device("cpu")), *case.small)
    leaves, arguments = with_gradients(case, drawn)
    flat, shape = tree_flatten(arguments)
    tensors = {index: value for index, value in enumerate(flat) if isinstance(value, torch.Tensor)}
    function = case.on_copies(module)

    def call(*given: torch.Tensor) -> Any:
        values = dict(zip(tensors, given, strict=True))
        return function(*tree_unflatten([values.get(index, value) for index, value in enumerate(flat)], shape))

    traced_graphs = graphs(call, *tensors.values())
    assert len(traced_graphs) == 1 + bool(leaves), traced_graphs
    return traced_graphs


@pytest.mark.parametrize(("recipe", "name", "place"), [(*key, place) for key, place in PLACES.items()])
def test_any_sizes(gallery: Path, on_h100: Ask, recipe: str, name: str, place: int) -> None:
    if not runs_here(recipe):
        pytest.skip(f"NOT TESTED: {recipe} needs another GPU")
    look: Callable[[ModuleType], Any] = partial(traced, place)
    (results,) = on_h100(gallery / f"{recipe}.py", look)
    assert all(results)
