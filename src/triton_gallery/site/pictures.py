"""The pictures on the recipes' cards: what a kernel does, as rows of cells; `pictures.toml` has them."""

import re
import tomllib
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("pictures.toml")
COLORS = {"#": "var(--gallery-accent)", "o": "var(--color-brand-content)", ".": "var(--color-background-border)"}
COLUMNS, ROWS = 16, 5
CELL, PITCH = 8, 10


@cache
def pictures() -> dict[str, str]:
    """Return the rows of cells by the names of the recipes."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def picture(name: str) -> str:
    """Return the picture of a recipe as an SVG element; empty if there is none."""
    rows = pictures().get(name, "").split("/")
    paths = []
    for kind, color in COLORS.items():
        lines = [
            f"M{PITCH * run.start()} {PITCH * row + CELL // 2}h{PITCH * len(run[0]) - (PITCH - CELL)}"
            for row, cells in enumerate(rows)
            for run in re.finditer(re.escape(kind) + "+", cells)
        ]
        if lines:
            paths.append(f'<path d="{"".join(lines)}" stroke="{color}"/>')
    if not paths:
        return ""
    width, height = (PITCH * count - (PITCH - CELL) for count in (COLUMNS, ROWS))
    return (
        f'<svg class="picture" viewBox="0 0 {width} {height}" fill="none" stroke-width="{CELL}" '
        f'stroke-dasharray="{CELL} {PITCH - CELL}" aria-hidden="true">{"".join(paths)}</svg>'
    )
