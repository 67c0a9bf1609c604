"""Recorded figures against those of another revision."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from triton_gallery.figures.measurements import Measurement, of_record
from triton_gallery.recipe.contents import Recipe
from triton_gallery.records.record_store import Records, load_at

LEAST = 0.045  # two runs of a kernel of 4 us differ by as much; of longer ones by 0.01


@dataclass(frozen=True)
class Change:
    """A figure now and before."""

    now: Measurement
    before: Measurement

    @property
    def ratio(self) -> float:
        """The figure now over that before; less than 1 is slower."""
        return self.now.value / self.before.value

    @property
    def spread(self) -> float | None:
        """The relative difference that two runs of the same code may have here; None if nothing tells.

        Half the wider of the two bands: from run to run, a median moves less than the calls of one run do.
        """
        if self.now.cpu_bound or self.before.cpu_bound or self.now.band is None or self.before.band is None:
            return None
        return max(LEAST, self.now.band / 2, self.before.band / 2)

    @property
    def verdict(self) -> str:
        """Say "slower" or "faster" beyond the spread, "" within it, or why that cannot be told."""
        if self.now.cpu_bound or self.before.cpu_bound:
            return "CPU decided"
        if self.spread is None:
            return "no band"
        if abs(self.ratio - 1) <= self.spread:
            return ""
        return "slower" if self.ratio < 1 else "faster"


def compare(records: Records, recipes: Sequence[Recipe], base: str) -> list[Change]:
    """Return the figures that were recorded since a git revision and were recorded in it too.

    Raises:
        ValueError: if there is no such revision.
    """
    asked = ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
    if subprocess.run(asked, capture_output=True, check=False).returncode != 0:
        raise ValueError(f"git knows no revision {base!r}")
    changes = []
    for record in (record for recipe in recipes for record in records.of(recipe)):
        old = load_at(base, record.path)
        if old and old.date != record.date:
            before = {figure.place: figure for figure in of_record(old, "")}
            now = [figure for figure in of_record(record, "") if figure.place in before]
            changes += [Change(figure, before[figure.place]) for figure in now]
    return changes
