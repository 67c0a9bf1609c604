"""Benchmark tables: what `triton.testing.perf_report` returns, as data."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

ROOF = "Roof"
TRITON = "Triton"


@dataclass(frozen=True)
class Table:
    """A benchmark's figures.

    Attributes:
        name: the variable's name; it begins with `results`.
        x: the name of the first column, what the benchmark varies.
        unit: the unit of all figures, a rate, so that more is better.
        xs: the values of `x`.
        series: figures by the name of who was measured, one for each of `xs`; None where there is none.
    """

    name: str
    x: str
    unit: str
    xs: list[float | str]
    series: dict[str, list[float | None]]

    @property
    def ours(self) -> list[str]:
        """The names of this gallery's own kernels."""
        return [name for name in self.series if name.split(",")[0] == TRITON]

    @property
    def others(self) -> list[str]:
        """The names of what they are compared with."""
        return [name for name in self.series if name not in self.ours and name != ROOF]

    def best(self, names: list[str], index: int) -> tuple[str, float] | None:
        """Return who of `names` is fastest at the index, and its figure; None if none has one."""
        figures = [(value, name) for name in names if (value := self.series[name][index]) is not None]
        return (max(figures)[1], max(figures)[0]) if figures else None

    def ratio(self, index: int) -> float | None:
        """Return our best figure over the best other's."""
        ours, other = self.best(self.ours, index), self.best(self.others, index)
        return ours[1] / other[1] if ours and other else None

    def of_roof(self, index: int) -> float | None:
        """Return our best figure over the roof's."""
        ours, roof = self.best(self.ours, index), self.series.get(ROOF, [])
        return ours[1] / top if ours and roof and (top := roof[index]) else None


def from_frame(name: str, frame: "pandas.DataFrame") -> Table:
    """Return a data frame of `perf_report` as a table.

    Raises:
        ValueError: if its figures have no unit, or several: "Triton (GB/s)" is how a column is called.
    """
    x, *columns = map(str, frame.columns)
    series: dict[str, list[float | None]] = {}
    units = set()
    for column in columns:
        parts = re.fullmatch(r"(.+) \((.+)\)", column)
        if not parts:
            raise ValueError(f"{name}: the column {column!r} names no unit")
        units.add(parts[2])
        series[parts[1]] = [None if value != value else float(value) for value in frame[column]]
    if len(units) != 1:
        raise ValueError(f"{name}: one table has one unit, not {sorted(units)}")
    xs = [value if isinstance(value, str) else float(value) for value in frame.iloc[:, 0]]
    return Table(name, x, units.pop(), xs, series)
