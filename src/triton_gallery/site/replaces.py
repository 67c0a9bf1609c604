"""What people call today, and the op that computes the same: what `replaces.toml` says."""

import tomllib
from functools import cache
from pathlib import Path

import msgspec
from docutils import nodes

from triton_gallery.recipe.data import Data
from triton_gallery.site.collapsible import fold
from triton_gallery.site.render import prose, titled

FILE = Path(__file__).with_suffix(".toml")
TITLE = "Instead of what you call today"


class Swap(Data, frozen=True):
    """A call, and the op in its place.

    Attributes:
        today: the call as it is made, as code.
        with_op: the same with the op, as code that names what comes out as `today` does.
        said: which arguments map to which, and what the op does not have.
    """

    today: str
    with_op: str
    said: str


class Replaced(Data, frozen=True):
    """What an op may be taken for.

    Attributes:
        names: of functions and modules.
        note: in what it differs from them.
        swaps: the most usual calls.
    """

    names: list[str]
    note: str
    swaps: list[Swap] = msgspec.field(default_factory=list)


@cache
def replaces() -> dict[str, Replaced]:
    """Return for each op what it may be taken for."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return msgspec.convert(entries, dict[str, Replaced])


def section(op: str) -> list[nodes.Node]:
    """Return the section with the calls that an op replaces, the second one folded; nothing where there is none."""
    swaps = replaces()[op].swaps if op in replaces() else []
    if not swaps:
        return []
    shown = titled(TITLE)
    for number, swap in enumerate(swaps):
        start = len(shown)
        for label, code in (("Today", swap.today), ("With this op", swap.with_op)):
            text = f"# {label}\n{code.strip()}"
            shown += nodes.literal_block(text, text, language="python")
        shown += prose(swap.said)
        if number:
            fold(shown, start, len(shown), f"Instead of <code>{_called(swap)}</code>")
    return [shown]


def _called(swap: Swap) -> str:
    """Return the name of the function that a call of today imports, or else its last line."""
    lines = swap.today.strip("\n").splitlines()
    _, imports, name = lines[0].rpartition(" import ")
    return name if imports else lines[-1].partition(" = ")[2].partition("(")[0]
