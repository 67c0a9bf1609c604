"""Where the names of Triton and PyTorch are documented, as the table beside this module has it: nothing is fetched."""

import tomllib
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_suffix(".toml")
SHORT = {"tl": "triton.language", "F": "torch.nn.functional"}  # as scripts and prose call them


def address_of(name: str) -> str | None:
    """Return the address of a name's documentation, or of that of the class that has it; None if none is known."""
    known = table()
    while name:
        if name in known:
            return known[name]
        name = name.rpartition(".")[0]
    return None


def in_full(written: str) -> str:
    """Return a name in full that prose mentions."""
    root, dot, rest = written.partition(".")
    return f"{SHORT.get(root, root)}{dot}{rest}"


@cache
def table() -> dict[str, str]:
    """Return the address of each name."""
    pages = tomllib.loads(TABLE.read_text(encoding="utf-8"))["pages"]
    return {name: page["address"].format(name) for page in pages for name in page["names"].split()}
