"""The rooms of the package import each other in one direction."""

import ast
from pathlib import Path

from project import ROOT

PACKAGE = ROOT / "src" / "triton_gallery"
ROOMS = [  # each knows those before it
    "recipe",
    "records",
    "libraries",
    "figures",
    "compiled",
    "versions",
    "execute",
    "execute.dask",
    "step_through",
    "site",
    "cli",
]
MEASURED = {"libraries", "figures"}
NOT_FOR = {  # of those before it
    "compiled": MEASURED,
    "versions": {"figures"},
    "execute": {*MEASURED, "versions"},
    "execute.dask": {*MEASURED, "versions", "compiled"},
    "step_through": {"records", *MEASURED, "versions", "compiled", "execute.dask"},
    "site": {"execute.dask"},
}


def room(module: str) -> str | None:
    """Return the room of a module, named as it is imported."""
    inside = module.removeprefix("triton_gallery").removeprefix(".")
    return next((name for name in reversed(ROOMS) if inside == name or inside.startswith(f"{name}.")), None)


def imported(path: Path) -> set[str]:
    """Return what of the package a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    return {name for name in names if name.startswith("triton_gallery.")}


def test_no_room_knows_one_above() -> None:
    files = {
        path: room(".".join(["triton_gallery", *path.relative_to(PACKAGE).with_suffix("").parts]))
        for path in PACKAGE.rglob("*.py")
    }
    assert set(files.values()) - {None} == set(ROOMS)
    for path, its_room in files.items():
        if its_room is None:
            continue
        known = set(ROOMS[: ROOMS.index(its_room) + 1]) - NOT_FOR.get(its_room, set())
        assert {room(name) for name in imported(path)} <= {*known, None}, path
