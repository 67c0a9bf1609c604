"""Recorded figures against those of another revision, or of a second run on the same machine."""

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_gallery.recipes import Recipe
from triton_gallery.records import Record, Records, load_at
from triton_gallery.rows import Row, of_record
from triton_gallery.tables import TRITON

SPREAD_FILE = "spread.json"
LEAST_SPREAD = 0.03  # a single pair of runs may agree by chance


@dataclass(frozen=True)
class Change:
    """A figure now and before.

    Attributes:
        row: the figure now.
        before: its value before.
        spread: the relative difference that two runs of the same code may have here.
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
            spread = _spreads(record.path.parents[1])
            changes += [Change(row, old, spread(row)) for row, old in _pairs(record, before)]
    return changes


def measure_spread(first: Records, second: Records, recipes: Sequence[Recipe], kept: Records) -> Path:
    """Keep the relative difference of each figure between two recorded runs on the same machine; return the file.

    Raises:
        ValueError: if the runs have no figures in common.
    """
    differences: dict[str, float] = {}
    folder = None
    for recipe in recipes:
        for one in first.of(recipe):
            for other in second.of(recipe):
                if (one.device, one.code) == (other.device, other.code):
                    folder = kept.folder / one.path.parents[1].name
                    differences |= {
                        _key(row): round(abs(row.value / value - 1), 4) for row, value in _pairs(one, other)
                    }
    if folder is None or not differences:
        raise ValueError("the two runs have no figures in common")
    path = folder / SPREAD_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(differences, indent=1) + "\n", encoding="utf-8")
    return path


def _spreads(folder: Path) -> Callable[[Row], float]:
    """Return what tells the spread of a figure: its own where it is known, else what few of the others exceed."""
    try:
        known = json.loads((folder / SPREAD_FILE).read_text(encoding="utf-8"))
        usual = statistics.quantiles(map(float, known.values()), n=20)[-1]
    except (OSError, ValueError, AttributeError, statistics.StatisticsError):
        raise ValueError(f"{folder / SPREAD_FILE}: how far two runs differ is not known; see make spread") from None
    return lambda row: max(LEAST_SPREAD, float(known.get(_key(row), usual)))


def _pairs(now: Record, before: Record) -> list[tuple[Row, float]]:
    """Return the figures of one record with those of another in the same places."""
    old = {_place(row): row.value for row in of_record(before, "")}
    return [(row, old[_place(row)]) for row in of_record(now, "") if old.get(_place(row))]


def _place(row: Row) -> tuple[object, ...]:
    return row.table, row.x_name, row.x, row.series, row.unit


def _key(row: Row) -> str:
    return f"{row.recipe} {row.table} {row.x_name}={row.x} {row.series}"


def _is_ours(row: Row) -> bool:
    return row.series.split(",")[0] == TRITON
