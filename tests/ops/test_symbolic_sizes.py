"""torch.compile traces every op for any sizes, and its gradient."""

import importlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import Ask, graphs
from own import collect, gradients, is_real, runs_here

# With its place in the list of the recipe's tests: what makes its inputs cannot travel to another process.
FOUND = Counter[str]()
PLACES = []
for key, entry in collect("OPS"):
    if len(entry) == 3:
        PLACES.append((key, entry[0], FOUND[key]))
    FOUND[key] += 1


def traced(place: int, recipe: ModuleType) -> list[list[str]]:
    """Trace an op of a recipe for symbolic sizes; return what its graphs call."""
    name, make = importlib.import_module(f"test_{recipe.__name__}").OPS[place][:2]
    inputs: list[Any] = list(make(torch.randn, 51, 53))
    tensors = {n: value for n, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    order, rest = list(tensors), [None if n in tensors else value for n, value in enumerate(inputs)]
    wanted = [inputs[n] for n in range(len(inputs))[: gradients(name)] if is_real(inputs[n])]
    for t in wanted:
        t.requires_grad_()
    op = getattr(recipe, name)

    def call(*given: torch.Tensor) -> Any:
        values = list(rest)
        for n, t in zip(order, given, strict=True):
            values[n] = t
        return op(*values)

    found = graphs(call, *tensors.values())
    assert len(found) == 1 + bool(wanted), found
    return found


@pytest.mark.parametrize(("recipe", "name", "place"), PLACES)
def test_any_sizes(gallery: Path, on_h100: Ask, recipe: str, name: str, place: int) -> None:
    if not runs_here(recipe):
        pytest.skip(f"NOT TESTED: {recipe} needs another GPU")
    look: Callable[[ModuleType], Any] = partial(traced, place)
    (found,) = on_h100(gallery / f"{recipe}.py", look)
    assert all(found)
