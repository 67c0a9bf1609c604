"""The functions that ops replace, as `replaces.toml` lists them."""

import tomllib
from functools import cache
from pathlib import Path

import msgspec
from docutils import nodes

from triton_gallery.recipe.data import Data
from triton_gallery.site.render import code, folded, prose, titled

FILE = Path(__file__).with_suffix(".toml")
TITLE = "Instead of what you call today"


class Swap(Data, frozen=True):
    """A call, and the same with the op.

    Attributes:
        today: the call as it is made, as code.
        with_op: the same with the op, as code that names what comes out as `today` does.
        said: which arguments map to which, and what the op does not have.
    """

    today: str
    with_op: str
    said: str


class Replaced(Data, frozen=True):
    """The functions that an op replaces.

    Attributes:
        names: of functions and modules.
        note: how it differs from them.
        swaps: the most usual calls.
    """

    names: list[str]
    note: str
    swaps: list[Swap] = msgspec.field(default_factory=list)


@cache
def replaces() -> dict[str, Replaced]:
    """Return the functions that each op replaces."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return msgspec.convert(entries, dict[str, Replaced])


def section(op: str) -> list[nodes.section]:
    """Return the section with the calls that an op replaces, all but the first folded; nothing where there is none."""
    swaps = replaces()[op].swaps if op in replaces() else []
    shown: list[nodes.Node] = []
    for number, swap in enumerate(swaps):
        calls = {"Today": swap.today, "With this op": swap.with_op}
        blocks = [*(code(f"# {label}\n{call.strip()}") for label, call in calls.items()), *prose(swap.said)]
        shown += folded(f"Instead of <code>{_called(swap)}</code>", blocks) if number else blocks
    return [titled(TITLE, *shown)] if swaps else []


def _called(swap: Swap) -> str:
    """Return the name of the function that a call imports, or else calls in its last line."""
    lines = swap.today.strip("\n").splitlines()
    _, imports, name = lines[0].rpartition(" import ")
    return name if imports else lines[-1].partition(" = ")[2].partition("(")[0]
