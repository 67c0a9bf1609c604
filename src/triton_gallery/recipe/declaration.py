"""What a recipe declares of itself, in the block of script metadata at its head (PEP 723), which `uv run` reads too.

Its environment stands where that standard has it; what the gallery shows and checks stands under `tool.triton-gallery`.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from triton_gallery.recipe.data import Data
from triton_gallery.recipe.device import MOST

BLOCK = re.compile(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$")


class Launch(Data, frozen=True):
    """One of the launches that a step-through figure shows; what is left out is as the figure says.

    Attributes:
        label: what the switch between launches calls it.
        kernel: the kernel that it launches, where it is another one than the figure's.
        inputs: Python expressions by the names that `call` and `expected` use, evaluated in order.
        call: a Python expression that launches the kernel once.
        expected: what has to be in memory afterwards: a Python expression for each pointer of the kernel that is
            compared, by its name without `_ptr`.
        registers: the names in the kernel whose values are shown.
        start: the program, and which of its accesses to memory, that a page without scripts shows.
        at_once: how many programs run at a time where all are shown; 0 stands for all.
        wrong: whether the result has to differ from what is expected.
        outside: whether lanes may point outside of every tensor; they are shown and not carried out.
        race: whether the programs that run at a time read what was in memory before any of them wrote.
    """

    label: str = ""
    kernel: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    call: str = ""
    expected: dict[str, str] = field(default_factory=dict)
    registers: list[str] = field(default_factory=list)
    start: tuple[int, int] | None = None
    at_once: int | None = None
    wrong: bool = False
    outside: bool = False
    race: bool = False


class StepThrough(Launch, frozen=True):
    """A figure that steps through a kernel: one launch, or several on a switch.

    Attributes:
        caption: what stands below it.
        layout: "row" or "product", where the tensors a, b and c are laid out as the product of two matrices.
        launches: the launches, where there are several.
    """

    caption: str = ""
    layout: Literal["row", "product"] = "row"
    launches: list[Launch] = field(default_factory=list)


class OfOp(Data, frozen=True):
    """What a recipe declares of its page and of the op that it hands over.

    Attributes:
        description: what the page is about, for lists of pages and for search engines; see `line`.
        dtypes: those that the op takes, as torch calls them.
        backward: whether it has a gradient.
        deterministic: whether the same arguments give the same bits each time.
        tool: whether the page is about a tool and hands over no op.
        shown_first: the title of the section that the page begins with, where that sums up what the script does before.
        gpu: the compute capabilities of the NVIDIA GPUs that the recipe is for alone, as a version specifier: "==9.0".
        gpus: how many GPUs of one host it runs on at least, a process on each.
        not_for: the GPUs that a kernel is not meant for, by its name, as `gpus.GPUS` calls them.
        only_with: the versions of Triton that a kernel is for alone, by its name, as a version specifier: "<3.9".
        longer: why the op takes more statements than an op has.
        take_instead: the name of a faster op that does the same, where this one is there to learn from.
        step_through: the figures that step through its kernels.
    """

    description: str = ""
    dtypes: list[str] = field(default_factory=list)
    backward: bool | None = None
    deterministic: bool | None = None
    tool: bool = False
    shown_first: str = ""
    gpu: str = ""
    gpus: Annotated[int, Meta(ge=1, le=MOST)] = 1
    not_for: dict[str, list[str]] = field(default_factory=dict)
    only_with: dict[str, str] = field(default_factory=dict)
    longer: str | None = None
    take_instead: str = ""
    step_through: list[StepThrough] = field(default_factory=list)

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
