"""What a recipe declares of itself, in the block of script metadata at its head (PEP 723), which `uv run` reads too.

Its environment stands where that standard has it; what the gallery shows and checks stands under `tool.triton-gallery`.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from triton_gallery.recipe.data import Data

BLOCK = re.compile(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$")


class OfOp(Data, frozen=True):
    """What a recipe declares of its page and of the op that it hands over.

    Attributes:
        description: what the page is about, for lists of pages and for search engines; see `line`.
        dtypes: those that the op takes, as torch calls them.
        backward: whether it has a gradient.
        deterministic: whether the same arguments give the same bits each time.
        tool: whether the page is about a tool and hands over no op.
        gpu: the compute capabilities of the NVIDIA GPUs that the recipe is for alone, as a version specifier: "==9.0".
        not_for: the GPUs that a kernel is not meant for, by its name, as `gpus.GPUS` calls them.
        only_with: the versions of Triton that a kernel is for alone, by its name, as a version specifier: "<3.9".
        longer: why the op takes more statements than an op has.
    """

    description: str = ""
    dtypes: list[str] = field(default_factory=list)
    backward: bool | None = None
    deterministic: bool | None = None
    tool: bool = False
    gpu: str = ""
    not_for: dict[str, list[str]] = field(default_factory=dict)
    only_with: dict[str, str] = field(default_factory=dict)
    longer: str | None = None

    @property
    def line(self) -> str:
        """The description in one line; the file may break it anywhere."""
        return " ".join(self.description.split())


@dataclass(frozen=True)
class Declaration:
    """What a recipe declares; each part empty if it declares nothing.

    Attributes:
        pythons: the versions of Python that it runs on.
        packages: what it needs installed.
        gpus: the compute capabilities of the NVIDIA GPUs that it is for alone; None if it runs anywhere.
        of_op: what the gallery shows and checks.
    """

    pythons: SpecifierSet
    packages: list[Requirement]
    gpus: SpecifierSet | None
    of_op: OfOp


def declaration(path: Path, source: str) -> Declaration:
    """Return what a recipe declares.

    Args:
        path: the recipe's file, to name in errors.
        source: its text.

    Raises:
        ValueError: if the block of metadata is not in order.
    """
    block = BLOCK.search(source)
    try:
        lines = [line[2:] for line in block[1].splitlines()] if block else []
        metadata: dict[str, Any] = tomllib.loads("\n".join(lines))
        of_op = msgspec.convert(metadata.get("tool", {}).get("triton-gallery", {}), OfOp)
        return Declaration(
            SpecifierSet(metadata.get("requires-python", "")),
            [Requirement(package) for package in metadata.get("dependencies", [])],
            SpecifierSet(of_op.gpu) if of_op.gpu else None,
            of_op,
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its script metadata is not in order: {error}") from None
