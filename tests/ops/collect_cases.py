"""What the tests of each recipe say of it: its ops, its mutants; and which part of its script defines them."""

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


def require(recipe: str) -> None:
    """Skip the tests of a module, and say so, where its recipe declares what is not here, as another Triton."""
    if lacks := _lacks(recipe):
        pytest.skip(f"NOT TESTED: {recipe} is for {', '.join(lacks)}", allow_module_level=True)


def _lacks(recipe: str) -> list[str]:
    path = ROOT / "gallery" / f"{recipe}.py"
    if not path.exists():
        return ["a gallery that has it"]
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return missing(path, path.read_text(), capability)


def definitions(source: str) -> str:
    """Return a recipe without its checks, which would stop the import of one that is broken.

    Those under `if __name__ == "__main__":` stay, as an import leaves them out; ValueError if there are none of either.
    """
    code = BETWEEN.sub("", END.split(source, maxsplit=1)[0])
    if code == source and 'if __name__ == "__main__"' not in source:
        raise ValueError("no heading 'Is it right?', 'The check' or 'Proof': which part of this recipe are its checks?")
    return code
