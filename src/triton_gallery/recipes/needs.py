"""What a recipe needs of the environment that executes it, and what of that is missing.

A recipe declares its environment in the block of script metadata at its head (PEP 723), which `uv run` reads too. Where
something is missing, the page is built from the record instead of a run.
"""

import platform
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

ORDINARY = {"torch", "triton", "matplotlib", "numpy", "pandas"}  # what any recipe may use
BLOCK = re.compile(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$")


def packages(path: Path, source: str) -> list[str]:
    """Return the packages that a recipe declares, as pip takes them; ValueError if its block is not in order."""
    return [str(requirement) for requirement in _declared(path, source)[1]]


def missing(path: Path, source: str) -> list[str]:
    """Return what a recipe declares and this Python has not, in words; none if it declares nothing.

    Args:
        path: the recipe's file, to name in errors.
        source: its text.

    Raises:
        ValueError: if the block of metadata is not in order.
    """
    return list(_missing(*_declared(path, source)))


def versions(path: Path, source: str) -> dict[str, str]:
    """Return the versions found here of the packages that a recipe declares beyond the ordinary ones."""
    names = [package.name for package in _declared(path, source)[1] if package.name not in ORDINARY]
    return {name: version(name) for name in names}


def _missing(pythons: SpecifierSet, packages: list[Requirement]) -> Iterator[str]:
    if not pythons.contains(platform.python_version(), prereleases=True):
        yield f"Python {pythons} (here is {platform.python_version()})"
    for package in packages:
        if package.marker and not package.marker.evaluate():
            continue
        try:
            found = version(package.name)
        except PackageNotFoundError:
            yield str(package)
            continue
        if not package.specifier.contains(found, prereleases=True):
            yield f"{package} (here is {found})"


def _declared(path: Path, source: str) -> tuple[SpecifierSet, list[Requirement]]:
    block = BLOCK.search(source)
    if block is None:
        return SpecifierSet(), []
    try:
        metadata = tomllib.loads("".join(line[2:] + "\n" for line in block[1].splitlines()))
        packages = [Requirement(package) for package in metadata.get("dependencies", [])]
        return SpecifierSet(metadata.get("requires-python", "")), packages
    except (tomllib.TOMLDecodeError, InvalidRequirement, InvalidSpecifier, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its script metadata is not in order: {error}") from None
