"""What a recipe needs of the environment that executes it, and what of that is missing.

Where something is missing, the page is built from the record instead of a run.
"""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from triton_gallery.recipe.declaration import Declaration, declaration

ORDINARY = {"torch", "triton", "matplotlib", "numpy", "pandas"}  # what any recipe may use


def packages(path: Path, source: str) -> list[str]:
    """Return the packages that a recipe declares, as pip takes them; ValueError if its block is not in order."""
    return [str(requirement) for requirement in declaration(path, source).packages]


def missing(path: Path, source: str, capability: str | None, gpus: int = 1) -> list[str]:
    """Return what a recipe declares and this Python or GPU has not, in words; none if it declares nothing.

    Args:
        path: the recipe's file, to name in errors.
        source: its text.
        capability: the compute capability of the GPU that would execute it; None without one.
        gpus: how many such GPUs would.

    Raises:
        ValueError: if the block of metadata is not in order.
    """
    return list(_missing(declaration(path, source), capability, gpus))


def versions(path: Path, source: str) -> dict[str, str]:
    """Return the versions found here of the packages that a recipe declares beyond the ordinary ones."""
    names = [package.name for package in declaration(path, source).packages if package.name not in ORDINARY]
    return {name: version(name) for name in names}


def _missing(declared: Declaration, capability: str | None, gpus: int) -> Iterator[str]:
    if not declared.pythons.contains(platform.python_version(), prereleases=True):
        yield f"Python {declared.pythons} (here is {platform.python_version()})"
    for package in declared.packages:
        if package.marker and not package.marker.evaluate():
            continue
        try:
            installed = version(package.name)
        except PackageNotFoundError:
            yield str(package)
            continue
        if not package.specifier.contains(installed, prereleases=True):
            yield f"{package} (here is {installed})"
    if declared.gpus is not None and not (capability and declared.gpus.contains(capability)):
        here = f"one of {capability}" if capability else "none"
        yield f"an NVIDIA GPU of compute capability {str(declared.gpus).removeprefix('==')} (here is {here})"
    if capability and gpus < declared.of_op.gpus:  # without any, the interpreter has processes for them
        yield f"{declared.of_op.gpus} GPUs of one host (here {f'are {gpus}' if gpus > 1 else 'is one'})"
