"""Draws a benchmark table: as a PNG for notebooks, as an SVG whose colours follow the page's theme."""

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, Literal

from triton_gallery.recipe.tables import ROOF, TRITON, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of the PNG; the SVG gets the theme's variables in their place. None is black, which matplotlib leaves out.
FOREGROUND = "#010101"
MUTED = "#888888"
OURS = ["#c2570c", "#e58f4b", "#8a3c05", "#f0b48a"]
OTHERS = ["#1f6685", "#3f8f4f", "#7a5aa6", "#a08020", "#666666"]
THEME = {FOREGROUND: "var(--color-foreground-primary)", MUTED: "var(--color-foreground-border)"} | {
    color: f"var(--chart-{kind}-{index})"
    for kind, colors in (("ours", OURS), ("other", OTHERS))
    for index, color in enumerate(colors, start=1)
}
WIDTH, HEIGHT, FONT = 5, 3.5, 11  # inches, points: a telephone shows a chart's text at ten pixels
LABEL_GAP = 0.075  # of the axes' height
CHARACTER = 6.5  # points, on the average
WIDE, HIGH, EDGE = 160, 76, 5  # of a small chart


def svg(table: Table, place: str = "") -> str:
    """Return the chart as an SVG element; its label, which begins with `place`, is what screen readers say of it."""
    label = f"{place}{_title(table)} against {table.x}, of {'; '.join(table.series)}"
    return _themed(lambda: _draw(table), label)


def fractions_svg(device: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return a chart of fractions of a device's roof; a bar is a label and its fraction."""
    return _themed(lambda: _draw_fractions(device, bars), f"fractions of the roof, {device}")


def _themed(draw: Callable[[], "Figure"], label: str) -> str:
    import matplotlib

    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        draw().savefig(file, format="svg", transparent=True, metadata={"Date": None})
    _, start, rest = file.getvalue().partition("<svg")
    element = start + rest
    for color, variable in THEME.items():
        element = element.replace(color, variable)
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"font: [^;\"]*?(\d+(?:\.\d+)?)px[^;\"]*", r"font-size: \1px", element)
    element = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), element)  # half the size
    size = re.search(r'viewBox="[^"]*"', element)
    head = f'<svg {size[0] if size else ""} role="img" aria-label="{escape(label)}">'
    return re.sub(r"<svg[^>]*>", lambda _: head, element, count=1)


def png(table: Table) -> bytes:
    """Return the chart as a PNG on white."""
    file = BytesIO()
    _draw(table).savefig(file, format="png")
    return file.getvalue()


def sparkline(table: Table) -> str:
    """Return a small SVG chart without axes: lines, or points if there is one size or the sizes have no order."""
    xs, logarithmic = _sizes(table)
    across = [math.log2(x) if logarithmic else x for x in xs]
    values = [value for series in table.series.values() for value in series if value]
    scale, bottom = (math.log2, math.log2(min(values))) if _falls(table) else (float, 0.0)

    def at(x: float, value: float) -> tuple[float, float]:
        right = (x - across[0]) / ((across[-1] - across[0]) or 1)
        up = (scale(value) - bottom) / ((scale(max(values)) - bottom) or 1)
        return EDGE + (WIDE - 2 * EDGE) * right, HIGH - EDGE - (HIGH - 2 * EDGE) * up

    drawn = []
    for name, series in table.series.items():
        points = [at(x, value) for x, value in zip(across, series, strict=True) if value]
        color = THEME[_color(table, name)]
        if _is_numeric(table) and len(points) > 1:
            style = ' stroke-dasharray="5 3"' if name == ROOF else ' stroke-width="2.5"' if name in table.ours else ""
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            drawn.append(f'<polyline points="{line}" stroke="{color}"{style}/>')
        else:
            drawn += [f'<path d="M{x:.1f} {y:.1f}h0" stroke="{color}" stroke-width="7"/>' for x, y in points]
    return (
        f'<svg class="picture" viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" fill="none" stroke-width="1.5" '
        f'stroke-linecap="round" aria-hidden="true">{"".join(drawn)}</svg>'
    )


def _title(table: Table) -> str:
    """Return the title of a chart: the unit, and the kind of benchmark."""
    return ", ".join(filter(None, [table.unit, table.kind]))


def _is_numeric(table: Table) -> bool:
    return all(isinstance(x, float) for x in table.xs)


def _sizes(table: Table) -> tuple[list[float], bool]:
    """Return the positions of a table's sizes on the x axis, and whether that axis is logarithmic."""
    if not _is_numeric(table):
        return [float(place) for place in range(len(table.xs))], False
    xs = [x for x in table.xs if isinstance(x, float)]
    return xs, min(xs) > 0 and max(xs) >= 8 * min(xs)


def _falls(table: Table) -> bool:
    """Whether the rates fall so far that the ends of the lines would coincide on a linear axis."""
    ends = [[value for value in values if value] for values in table.series.values()]
    ends = [values for values in ends if values]
    return bool(ends) and _is_numeric(table) and max(values[-1] for values in ends) < max(map(max, ends)) / 10


def _color(table: Table, name: str) -> str:
    """Return the colour of a series."""
    colors = dict(zip(sorted(table.ours, key=lambda name: name != TRITON), OURS, strict=False))
    colors |= dict(zip(table.others, OTHERS, strict=False))
    return FOREGROUND if name == ROOF else colors.get(name, MUTED)


def _axes(height: float, grid: Literal["x", "y"] | None) -> tuple["Figure", "Axes"]:
    """Return a figure of this height in inches, and its axes, in the style of all charts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(colors=FOREGROUND, length=3, color=MUTED, labelsize=FONT)
    if grid:
        axes.grid(axis=grid, color=MUTED, linewidth=0.4, alpha=0.5)
    for side, spine in axes.spines.items():
        spine.set_color(MUTED)
        spine.set_visible(side in {"left", "bottom"})
    return figure, axes


def _draw(table: Table) -> "Figure":
    """Draw a table: a line for each series, with its band."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    if not _is_numeric(table):
        return _draw_rows(table)
    figure, axes = _axes(HEIGHT, "y")
    xs, logarithmic = _sizes(table)
    ends = []
    beside = CHARACTER * (max(map(len, table.series), default=0) + 6)  # the axes: figures, and names of series
    character = CHARACTER / (72 * WIDTH - beside)
    for name, values in table.series.items():
        points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
        if not points:
            continue
        color = _color(table, name)
        line = axes.plot(*zip(*points, strict=True), color=color, linewidth=1.6)[0]
        if name == ROOF:
            line.set(linestyle=(0, (5, 3)), linewidth=1.2)
        else:
            line.set(marker="o", markersize=4, linewidth=2.4 if name in table.ours else 1.6)
        _draw_band(axes, table, name, xs, color)
        ends.append((points[-1], name, color))
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_minor_locator(NullLocator())
    names = _with_room({x: short(x) for x in xs}, math.log2 if logarithmic else float, character)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: names.get(x, "")))
    if _falls(table):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.9g}"))  # an exponent is too small to read
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    _label(axes, ends)
    axes.set_title(_plain(_title(table)), loc="left", fontsize=FONT, color=FOREGROUND)
    axes.set_xlabel(_plain(table.x), fontsize=FONT, color=FOREGROUND)
    return figure


def _draw_rows(table: Table) -> "Figure":
    """Draw a table whose sizes have no order: a row for each size, with a point and a band for each series."""
    figure, axes = _axes(0.9 + 0.35 * len(table.xs), "x")
    rows = range(len(table.xs), 0, -1)
    for place, (name, values) in enumerate(table.series.items()):
        color = _color(table, name)
        above = 0.5 * (0.5 - (place + 0.5) / len(table.series))  # of a row, so that no point lies on another
        label = _plain(name)
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            if value is None:
                continue
            axes.plot(value, row + above, "|" if name == ROOF else "o", color=color, markersize=7, label=label)
            label = ""  # in the legend once
            ends = [side[name][index] for side in (table.p20, table.p80) if name in side]
            band = [end for end in ends if end is not None]
            axes.plot(band, len(band) * [row + above], color=color, linewidth=4, alpha=0.4)
            if table.is_cpu_bound(name, index):
                axes.plot(value, row + above, "o", color=color, markersize=10, fillstyle="none")
    axes.set_xlim(left=0)
    axes.set_ylim(0.5, len(table.xs) + 0.5)
    axes.set_yticks(rows, [_plain(str(x)) for x in table.xs])
    axes.set_xlabel(_plain(_title(table)), fontsize=FONT, color=FOREGROUND)
    axes.set_ylabel(_plain(table.x), fontsize=FONT, color=FOREGROUND)
    legend: dict[str, Any] = {"loc": "outside upper left", "ncols": 3, "frameon": False, "fontsize": FONT}
    figure.legend(**legend, labelcolor="linecolor", handletextpad=0.2)
    return figure


def _draw_band(axes: "Axes", table: Table, name: str, xs: Sequence[float], color: str) -> None:
    """Draw the band of a series, and rings around the figures that were limited by the CPU."""
    bands = [(x, *band) for index, x in enumerate(xs) if (band := table.band(name, index))]
    if bands:
        sizes, lows, highs = zip(*bands, strict=True)
        axes.fill_between(sizes, lows, highs, color=color, alpha=0.2, linewidth=0)
    points = enumerate(zip(xs, table.series[name], strict=True))
    late = [(x, value) for index, (x, value) in points if value is not None and table.is_cpu_bound(name, index)]
    if late:
        axes.plot(*zip(*late, strict=True), linestyle="none", marker="o", markersize=9, color=color, fillstyle="none")


def _with_room(names: dict[float, str], place: Callable[[float], float], character: float) -> dict[float, str]:
    """Return those names that fit on an axis without touching each other.

    Args:
        names: of the sizes.
        place: tells where a size stands on the axis.
        character: how much of the axis a letter takes.
    """
    places = [place(x) for x in names]
    wide = max(places) - min(places)
    named: list[float] = []
    for x in sorted(names):
        half = character * (len(names[x]) + len(names[named[-1]]) + 4) / 2 if named else 0
        if not named or place(x) - place(named[-1]) >= half * wide:
            named.append(x)
    return {x: names[x] for x in named}


def _label(axes: "Axes", ends: list[tuple[tuple[float, float], str, str]]) -> None:
    """Write each series' name to the right of its last point, and move names apart that would overlap."""
    axes.get_ylim()  # the limits are settled now
    to_fraction = axes.transData + axes.transAxes.inverted()
    highest_first = sorted(ends, key=lambda end: -end[0][1])
    places = _apart([float(to_fraction.transform(point)[1]) for point, _, _ in highest_first])
    for place, (point, name, color) in zip(places, highest_first, strict=True):
        look: dict[str, Any] = {"color": color, "va": "center", "fontsize": FONT}
        axes.annotate(_plain(name), point, xytext=(1.02, place), textcoords="axes fraction", **look)


def _apart(places: Sequence[float]) -> list[float]:
    """Move labels apart, given their positions from the highest down: first downwards, then up again from the axis."""
    moved: list[float] = []
    for place in places:
        moved.append(min(place, moved[-1] - LABEL_GAP) if moved else place)
    lowest = 0.0
    for index in reversed(range(len(moved))):
        moved[index] = max(moved[index], lowest)
        lowest = moved[index] + LABEL_GAP
    return moved


def _draw_fractions(device: str, bars: Sequence[tuple[str, float]]) -> "Figure":
    from matplotlib.patches import Patch

    color = OTHERS[2]  # those before mean PyTorch and libraries
    figure, axes = _axes(0.7 + 0.42 * len(bars), None)
    places = range(len(bars), 0, -1)
    axes.barh(places, [fraction for _, fraction in bars], color=color, height=0.3)
    axes.set_yticks([])
    axes.set_ylim(0.5, len(bars) + 0.7)
    look: dict[str, Any] = {"color": FOREGROUND, "va": "center", "fontsize": FONT}
    for place, (label, fraction) in zip(places, bars, strict=True):
        text = f"{fraction:.2f}  {_plain(label)}"
        axes.annotate(text, (0, place + 0.36), xytext=(2, 0), textcoords="offset points", **look)
    axes.axvline(1, color=FOREGROUND, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set_xlim(0, 1.08 * max([1.0, *(fraction for _, fraction in bars)]))
    keys = [Patch(color=color, label=_plain(f"Triton / roof, {device}"))]
    figure.legend(handles=keys, loc="outside upper left", frameon=False, fontsize=FONT, labelcolor=FOREGROUND)
    return figure


def _plain(name: str) -> str:
    """Escape dollar signs, which matplotlib would take for a formula."""
    return name.replace("$", r"\$")


def short(value: float) -> str:
    """Format a size: 4096, 16K, 256M, but 256000."""
    for factor, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if value >= 10 * 2**10 and value % factor == 0 and math.log2(value).is_integer():
            return f"{value / factor:g}{letter}"
    return f"{value:g}"
