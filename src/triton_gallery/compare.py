"""Recorded figures against those of another revision, or of a second run on the same machine."""

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_gallery.recipes import Recipe
from triton_gallery.records import Record, Records, load_at
from triton_gallery.rows import Row, of_record
from triton_gallery.tables import TRITON

SPREAD_FILE = "spread.json"


@dataclass(frozen=True)
class Change:
    """A figure now and before.

    Attributes:
        row: the figure now.
        before: its value before.
        spread: the relative difference that two runs on the device may have.
    """

    row: Row
    before: float
    spread: float

    @property
    def ratio(self) -> float:
        """The figure now over that before; less than 1 is slower."""
        return self.row.value / self.before

    @property
    def slower(self) -> bool:
        """Whether one of our kernels is slower by more than two runs of the same code differ."""
        return _is_ours(self.row) and self.ratio < 1 - self.spread


def compare(records: Records, recipes: Sequence[Recipe], base: str) -> list[Change]:
    """Return the figures that are recorded now and were at a git revision.

    Raises:
        ValueError: if there is no such revision, or a device whose spread has not been measured.
    """
    asked = ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
    if subprocess.run(asked, capture_output=True, check=False).returncode != 0:
        raise ValueError(f"git knows no revision {base!r}")
    changes = []
    for record in (record for recipe in recipes for record in records.of(recipe)):
        before = load_at(base, record.path)
        if before:
            spread = _spread(record.path.parents[1])
            changes += [Change(row, old, spread) for row, old in _pairs(record, before)]
    return changes


def measure_spread(records: Records, again: Records, recipes: Sequence[Recipe]) -> Path:
    """Write the spread of two recorded runs on the same machine beside the first; return the file.

    The spread is the 95th percentile, over our kernels' figures, of the relative difference between the runs.

    Raises:
        ValueError: if there are too few figures that both have.
    """
    differences = []
    folder = None
    for recipe in recipes:
        for first in records.of(recipe):
            for second in again.of(recipe):
                if first.device == second.device and first.code == second.code:
                    folder = first.path.parents[1]
                    pairs = [(row.value, other) for row, other in _pairs(first, second) if _is_ours(row)]
                    differences += [abs(one / other - 1) for one, other in pairs]
    if folder is None or len(differences) < 20:
        raise ValueError(f"only {len(differences)} figures have two runs on one device")
    spread = statistics.quantiles(differences, n=20)[-1]
    path = folder / SPREAD_FILE
    path.write_text(json.dumps({"spread": round(spread, 4), "figures": len(differences)}) + "\n", encoding="utf-8")
    return path


def _spread(folder: Path) -> float:
    try:
        return float(json.loads((folder / SPREAD_FILE).read_text(encoding="utf-8"))["spread"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder / SPREAD_FILE}: the spread of two runs is not known; see make spread") from None


def _pairs(now: Record, before: Record) -> list[tuple[Row, float]]:
    """Return the figures of one record with those of another in the same places."""
    old = {_place(row): row.value for row in of_record(before, "")}
    return [(row, old[_place(row)]) for row in of_record(now, "") if old.get(_place(row))]


def _place(row: Row) -> tuple[object, ...]:
    return row.table, row.x_name, row.x, row.series, row.unit


def _is_ours(row: Row) -> bool:
    return row.series.split(",")[0] == TRITON
