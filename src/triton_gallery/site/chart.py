"""Draws a benchmark's table: as SVG on pages, where colours follow the theme, and as a PNG for notebooks.

Lines stretch to the width that a page has. Letters keep their size, because their places are percentages. Sizes are at
equal distances, so that there is room for the name of each.
"""

import math
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import pairwise

from triton_gallery.recipe.tables import ROOF, TRITON, Table
from triton_gallery.site.render import figure, size

FOREGROUND = "var(--color-foreground-primary)"
OURS = ["#c2570c", "#e58f4b", "#8a3c05", "#f0b48a"]  # in a PNG; on pages the theme's variables
OTHERS = ["#1f6685", "#3f8f4f", "#7a5aa6", "#a08020", "#666666"]
HEX = {FOREGROUND: "#000000"} | {
    f"var(--chart-{kind}-{index})": color
    for kind, colors in (("ours", OURS), ("other", OTHERS))
    for index, color in enumerate(colors, start=1)
}
MOST_STEPS = 5  # of an axis
CHARACTER, PHONE = 6.6, 290  # pixels: the width of a letter, and of the axis of sizes on a phone
ROW = 2.6  # rem, the height of a size where these are rows


@dataclass(frozen=True)
class _Axis:
    """The axis of the rates: linear from 0, or logarithmic."""

    ticks: list[float]
    is_logarithmic: bool

    def at(self, value: float) -> float:
        """Return the place of a rate as a percentage of the axis."""
        first, last = self.ticks[0], self.ticks[-1]
        if self.is_logarithmic:
            first, last, value = math.log(first), math.log(last), math.log(value)
        return 100 * (value - first) / (last - first)


def chart(table: Table, place: str = "") -> str:
    """Return a chart: a legend, in which a script writes the rates at a size that a reader points at, and an SVG.

    Args:
        table: what is drawn.
        place: the beginning of the chart's label, which is what screen readers say of it.
    """
    axis, count, names = _axis(table), len(table.xs), [size(x) for x in table.xs]
    label = f"{place}{_title(table)} against {table.x}, of {'; '.join(table.series)}"
    ticks = [(axis.at(tick), f"{tick:.9g}") for tick in axis.ticks]
    if _is_ordered(table):
        kind, box, height = "lines", f"0 0 {count} 100", ""
        if count * (CHARACTER * max(map(len, names)) + 6) > PHONE:
            kind = "lines crowded"
        grid = "".join(f"M0 {100 - at:.1f}h{count}" for at, _ in ticks)
        rates = "".join(f'<text y="{100 - at:.1f}%">{name}</text>' for at, name in ticks)
        sizes = (f'<text x="{100 * (i + 0.5) / count:.1f}%" y="100%">{escape(x)}</text>' for i, x in enumerate(names))
    else:
        kind, box, height = "rows", f"0 0 100 {count}", f' style="height:{ROW * count:.1f}rem"'
        grid = "".join(f"M{at:.1f} 0v{count}" for at, _ in ticks) + "".join(f"M0 {row}h100" for row in range(count))
        rates = "".join(f'<text x="{at:.1f}%" y="100%">{name}</text>' for at, name in ticks)
        sizes = (f'<text y="{100 * row / count:.1f}%">{escape(x)}</text>' for row, x in enumerate(names))
    drawn = "".join(_series(table, name, axis) for name in table.series)
    # The title of what stands at the left is at the top: rates, or the names of rows.
    left, below = _title(table), _size_title(table)
    if not _is_ordered(table):
        left, below = below, left
    return (
        f'<div class="chart {kind}" style="--left:{max(len(name) for _, name in ticks)}ch">{_legend(table, left)}'
        f'<svg role="img" aria-label="{escape(label)}"{height}>'
        f'<svg viewBox="{box}" preserveAspectRatio="none"><path class="grid" d="{grid}"/>{drawn}</svg>'
        f'<g class="rates">{rates}</g><g class="sizes">{"".join(sizes)}</g></svg>'
        f'<p class="axis">{escape(below)}</p></div>'
    )


def png(table: Table) -> bytes:
    """Return the chart as a PNG on white."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 4), layout="constrained")
    axes = drawing.subplots()
    for name, values in table.series.items():
        color = HEX[_color(table, name)]
        numbers = [math.nan if value is None else value for value in values]
        line = "none" if not _is_ordered(table) else "--" if name == ROOF else "-"
        axes.plot(numbers, linestyle=line, marker="o", markersize=4, color=color, linewidth=1.6, label=_plain(name))
        lows, highs = zip(
            *(table.band(name, index) or (math.nan, math.nan) for index in range(len(values))), strict=True
        )
        if _is_ordered(table):
            axes.fill_between(range(len(values)), lows, highs, color=color, alpha=0.2, linewidth=0)
        else:
            axes.vlines(range(len(values)), lows, highs, color=color, alpha=0.4, linewidth=4)
        late = [value if table.is_cpu_bound(name, index) else math.nan for index, value in enumerate(numbers)]
        axes.plot(late, "o", markersize=9, color=color, fillstyle="none")
    if _is_steep(table):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(table.xs)), [_plain(size(x)) for x in table.xs], rotation=30)
    axes.set_title(_plain(_title(table)), loc="left")
    axes.set_xlabel(_plain(_size_title(table)))
    axes.grid(axis="y", alpha=0.4)
    if table.series:
        drawing.legend(loc="outside lower center", ncols=3, frameon=False)
    file = BytesIO()
    drawing.savefig(file, format="png")
    return file.getvalue()


def _title(table: Table) -> str:
    """Return the title of a chart: the unit, the kind of benchmark, and that the axis does not begin at 0."""
    return ", ".join(filter(None, [table.unit, table.kind, "logarithmic" if _is_steep(table) else ""]))


def _size_title(table: Table) -> str:
    """Return the title of the axis of sizes; it says so if equal distances are not equal steps."""
    xs = [x for x in table.xs if isinstance(x, float)]
    if not _is_ordered(table) or len(xs) < 3:
        return table.x
    steps = [[after - before for before, after in pairwise(xs)]]
    if xs[0] > 0:
        steps.append([after / before for before, after in pairwise(xs)])
    even = any(max(each) <= 1.001 * min(each) for each in steps)
    return table.x if even else f"{table.x} (not to scale)"


def _is_ordered(table: Table) -> bool:
    """Whether the sizes are numbers that grow, so that lines between them mean something."""
    return all(isinstance(x, float) for x in table.xs) and table.xs == sorted(table.xs)


def _is_steep(table: Table) -> bool:
    """Whether lines would coincide at an end of a linear axis, as all rates there are so low.

    Rates often rise to a roof, where a logarithmic axis would hide small differences: so a rise has to be steeper.
    """
    series = [values for values in ([value for value in all_ if value] for all_ in table.series.values()) if values]
    if not series or not _is_ordered(table):
        return False
    first, last = (max(values[place] for values in series) for place in (0, -1))
    highest = max(map(max, series))
    return last < highest / 10 or first < highest / 50


def _axis(table: Table) -> _Axis:
    """Return an axis with at most six ticks that has all rates and their bands."""
    kinds = (table.series, table.p20, table.p80)
    rates = [value for kind in kinds for values in kind.values() for value in values if value]
    highest = max(rates, default=1.0)
    if _is_steep(table):
        first, last = math.floor(math.log10(min(rates))), math.ceil(math.log10(highest))
        powers = range(first, last + MOST_STEPS, math.ceil((last - first) / MOST_STEPS))
        return _Axis([10.0**power for power in powers if power < last + powers.step], is_logarithmic=True)
    power = 10.0 ** math.floor(math.log10(highest / MOST_STEPS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if highest <= MOST_STEPS * factor * power)
    return _Axis([step * place for place in range(math.ceil(highest / step) + 1)], is_logarithmic=False)


def _color(table: Table, name: str) -> str:
    """Return the colour of a series."""
    if name == ROOF:
        return FOREGROUND
    kind, most = ("ours", len(OURS)) if name in table.ours else ("other", len(OTHERS))
    names = sorted(table.ours, key=lambda name: name != TRITON) if kind == "ours" else table.others
    return f"var(--chart-{kind}-{min(names.index(name) + 1, most)})"


def _legend(table: Table, title: str) -> str:
    """Return the title of what is at the left, and a legend with room for a size and the rate of each series at it."""
    texts = {name: [figure(value) for value in values] for name, values in table.series.items()}
    digits = max((len(text) for values in texts.values() for text in values), default=0)
    series = "".join(
        f'<span class="series{" roof" if name == ROOF else ""}" style="--color:{_color(table, name)}" '
        f'data-rates="{" ".join(values)}">{escape(name)} <b></b></span> '
        for name, values in texts.items()
    )
    return (
        f'<p class="legend" role="status" style="--digits:{digits}ch"><span>{escape(title)}</span> {series}'
        f'<span class="at" data-x="{escape(table.x)}"></span></p>'
    )


def _series(table: Table, name: str, axis: _Axis) -> str:
    """Return the band, the line and the points of a series, and rings around figures that the CPU decided."""
    is_ordered, place = _is_ordered(table), [*table.series].index(name)
    beside = 0.5 + 0.45 * (place + 0.5) / len(table.series)  # in a row, where no point lies on another's

    def at(index: int, value: float) -> str:
        if is_ordered:
            return f"{index + 0.5:g} {100 - axis.at(value):.1f}"
        return f"{axis.at(value):.1f} {index + beside:.2f}"

    points = {index: at(index, value) for index, value in enumerate(table.series[name]) if value is not None}
    bands = [(index, band) for index in points if (band := table.band(name, index))]
    rings = [point for index, point in points.items() if table.is_cpu_bound(name, index)]
    kinds = dict[str, str]()
    if is_ordered and bands:
        edge = [at(index, high) for index, (_, high) in bands] + [at(index, low) for index, (low, _) in bands[::-1]]
        kinds["band"] = f"M{'L'.join(edge)}z"
    elif bands:
        kinds["band"] = "".join(f"M{at(index, low)}L{at(index, high)}" for index, (low, high) in bands)
    if is_ordered:
        kinds["line"] = f"M{'L'.join(points.values())}" if len(points) > 1 else ""
    kinds["ring"] = "".join(f"M{point}h0" for point in rings)
    kinds["inner"] = kinds["ring"]  # in the colour of the page
    kinds["points"] = "".join(f"M{point}h0" for point in points.values())
    paths = "".join(f'<path class="{kind}" d="{d}"/>' for kind, d in kinds.items() if d)
    role = " roof" if name == ROOF else " ours" if name in table.ours else ""
    return f'<g class="series{role}" style="--color:{_color(table, name)}">{paths}</g>'


def _plain(name: str) -> str:
    """Escape dollar signs, which matplotlib would take for a formula."""
    return name.replace("$", r"\$")
