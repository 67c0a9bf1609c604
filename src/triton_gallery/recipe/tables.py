"""Benchmark tables, as data.

A recipe makes one as a data frame in either of two forms. In the form of `rates`, which stands in the opening of the
recipes that time, each row is one figure with its band and its clocks. In that of `triton.testing.perf_report` each row
is a size and each column a series, of medians alone.
"""

import re
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, field

from triton_gallery.recipe.data import Data

if TYPE_CHECKING:
    import pandas

TORCH_COMPILE = "torch.compile"
ROOF = "Roof"
TRITON = "Triton"
BYTES, OPERATIONS = "GB/s", "TFLOP/s"  # the units of what is measured beside other libraries
SERIES = "series"  # the second column of a frame of `rates`; these follow the figure:
BAND = ["low", "high", "CPU us", "late"]
Figures = dict[str, list[float | None]]  # by the name of who was measured
SMALLEST, LARGEST = 1e-18, 1e18  # of what is measured anywhere, and of what a chart can show


class Table(Data, frozen=True):
    """A benchmark's figures.

    Attributes:
        name: the variable's name; it begins with `results`.
        x: the name of the first column, what the benchmark varies.
        unit: the unit of all figures, a rate, so that more is better.
        xs: the values of `x`.
        series: figures, one for each of `xs`; None where there is none.
        p20: the 20th percentile of each figure, laid out as `series`; without the series whose band is not known.
        p80: the 80th percentile, likewise.
        cpu: the CPU's microseconds for a call, likewise.
        cpu_bound: whether the GPU had to wait for the CPU, so that the figure is partly the CPU's; likewise.
        title: the line that the cell printed above the table; empty if none.
    """

    name: Annotated[str, Meta(pattern="^results")]
    x: str
    unit: str
    xs: list[float | str]
    series: Figures
    p20: Figures = field(name="low")
    p80: Figures = field(name="high")
    cpu: Figures
    cpu_bound: dict[str, list[bool]] = field(name="late")
    title: str = ""  # which older files have not

    @property
    def kind(self) -> str:
        """What tells the benchmark from the others of its recipe: its title, or else what its variable's name says."""
        named = self.name.removeprefix("results").strip("_").replace("_", " ")
        if self.title and "backward" in named and "backward" not in self.title:
            return f"backward, {self.title}"
        return self.title or named

    @property
    def fault(self) -> str | None:
        """Why these are no figures of a benchmark, in words; None if they are."""
        kinds = [self.series, self.p20, self.p80, self.cpu]
        numbers = [value for kind in kinds for values in kind.values() for value in values if value is not None]
        if not self.xs:
            return "it has no rows"
        lengths = [(name, len(values)) for kind in kinds for name, values in kind.items()]
        lengths += [(name, len(values)) for name, values in self.cpu_bound.items()]
        if any(length != len(self.xs) for _, length in lengths):
            return "a series is not as long as its x"
        if any(name not in self.series for name, _ in lengths):
            return "it has the band or the clock of a series that is not there"
        if len(set(self.xs)) != len(self.xs):
            return f"a value of {self.x} stands twice"
        if not all(abs(x) <= LARGEST for x in self.xs if not isinstance(x, str)):
            return f"a value of {self.x} is not finite, or above {LARGEST:g}"
        if not all(SMALLEST <= number <= LARGEST for number in numbers):
            return f"a rate is not between {SMALLEST:g} and {LARGEST:g}"
        return None

    @property
    def ours(self) -> list[str]:
        """The names of this gallery's own kernels."""
        return [name for name in self.series if name.split(",")[0] == TRITON]

    @property
    def judged(self) -> list[str]:
        """The names of the series that ratios are of: the op's, or where no series is the op's alone, all of ours."""
        return [TRITON] if TRITON in self.series else self.ours

    @property
    def others(self) -> list[str]:
        """The names of what they are compared with."""
        return [name for name in self.series if name not in self.ours and name != ROOF]

    def is_cpu_bound(self, name: str, index: int) -> bool:
        """Return whether the CPU decided a figure."""
        return name in self.cpu_bound and self.cpu_bound[name][index]

    @property
    def settled(self) -> list[int]:
        """The indices at which the CPU decided no figure; all, where it had its hand in each."""
        sizes = list(range(len(self.xs)))
        return [size for size in sizes if not any(self.is_cpu_bound(name, size) for name in self.series)] or sizes

    def best(self, names: list[str], index: int) -> tuple[str, float] | None:
        """Return who of `names` is fastest at the index, and its figure; None if none has one."""
        figures = [(value, name) for name in names if (value := self.series[name][index]) is not None]
        return (max(figures)[1], max(figures)[0]) if figures else None

    def ratio(self, index: int) -> float | None:
        """Return our best figure over the best other's."""
        ours, other = self.best(self.judged, index), self.best(self.others, index)
        return ours[1] / other[1] if ours and other else None

    def over(self, other: str, index: int) -> float | None:
        """Return our best figure over that of one series."""
        ours, other_best = self.best(self.judged, index), self.best([other], index) if other in self.series else None
        return ours[1] / other_best[1] if ours and other_best else None

    def band(self, name: str, index: int) -> tuple[float, float] | None:
        """Return the 20th and the 80th percentile of a figure; None where they are not known."""
        low, high = (values[name][index] if name in values else None for values in (self.p20, self.p80))
        return None if low is None or high is None else (low, high)

    def is_tie(self, other: str, index: int) -> bool:
        """Return whether the bands of our best figure and of another's overlap, or one of the two is not known."""
        ours = self.best(self.judged, index)
        our_band, other_band = (self.band(name, index) for name in (ours[0] if ours else "", other))
        return our_band is None or other_band is None or (our_band[0] <= other_band[1] and other_band[0] <= our_band[1])

    def of_roof(self, index: int) -> float | None:
        """Return our best figure over the roof's."""
        ours, roof = self.best(self.judged, index), self.series.get(ROOF, [])
        return ours[1] / top if ours and roof and (top := roof[index]) else None


def from_frame(name: str, frame: "pandas.DataFrame") -> Table:
    """Return a data frame as a table.

    Raises:
        ValueError: if its figures have no unit, or several: "Triton (GB/s)" is how a column of `perf_report` is called;
            or they are not those of a benchmark.
    """
    table = _of_figures(name, frame) if list(frame.columns[1:2]) == [SERIES] else _of_medians(name, frame)
    if table.fault:
        raise ValueError(f"{name}: {table.fault}")
    return table


def _of_medians(name: str, frame: "pandas.DataFrame") -> Table:
    """Return a data frame of `perf_report` as a table; ValueError if a column has no unit, or two have unlike ones."""
    x, *columns = map(str, frame.columns)
    series: Figures = {}
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
    return Table(name, x, units.pop(), xs, series, {}, {}, {}, {})


def _of_figures(name: str, frame: "pandas.DataFrame") -> Table:
    """Return a data frame of `rates` as a table; ValueError if it has other columns, or two figures for one place."""
    x, series, unit, *band = map(str, frame.columns)
    if band != BAND:
        raise ValueError(f"{name}: after its figure come the columns {BAND}, not {band}")
    if frame.duplicated([x, series]).any():
        raise ValueError(f"{name}: it has two figures of one series for one {x}")
    xs = list(dict.fromkeys(frame[x]))
    names = list(dict.fromkeys(frame[series]))
    by_place = frame.set_index([x, series])

    def laid_out(column: str) -> Figures:
        figures = by_place[column].dropna().to_dict()
        return {label: [float(figures[x, label]) if (x, label) in figures else None for x in xs] for label in names}

    late = by_place["late"].to_dict()
    return Table(
        name,
        x,
        unit,
        [x if isinstance(x, str) else float(x) for x in xs],
        laid_out(unit),
        p20=laid_out("low"),
        p80=laid_out("high"),
        cpu=laid_out("CPU us"),
        cpu_bound={label: [bool(late.get((x, label))) for x in xs] for label in names},
    )
