"""Draws a benchmark table: as a PNG for notebooks, as an SVG whose colours follow the page's theme."""

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO, StringIO
from typing import TYPE_CHECKING

from triton_gallery.recipe.tables import ROOF, TRITON, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Drawn in stand-in colours; the SVG gets the theme's variables in their place, the PNG has a fixed palette.
FOREGROUND = "#010203"
MUTED = "#040506"
OURS = ["#0a0001", "#0a0002", "#0a0003", "#0a0004"]
OTHERS = ["#0b0001", "#0b0002", "#0b0003", "#0b0004", "#0b0005"]
THEME = {FOREGROUND: "var(--color-foreground-primary)", MUTED: "var(--color-foreground-border)"} | {
    color: f"var(--chart-{kind}-{index})"
    for kind, colors in (("ours", OURS), ("other", OTHERS))
    for index, color in enumerate(colors, start=1)
}
PALETTE = dict(
    zip(
        [FOREGROUND, MUTED, *OURS, *OTHERS],
        [
            "#000000",
            "#888888",
            "#c2570c",
            "#e58f4b",
            "#8a3c05",
            "#f0b48a",
            "#1f6685",
            "#3f8f4f",
            "#7a5aa6",
            "#a08020",
            "#666666",
        ],
        strict=True,
    )
)
SIZE, FONT = (5, 3.5), 11  # inches, points: a telephone shows a chart's text at ten pixels
LABEL_GAP = 0.075  # of the axes' height
CHARACTER = 6.5  # points, on the average
WIDE, HIGH, EDGE = 160, 76, 5  # of a small chart


def svg(table: Table, place: str = "") -> str:
    """Return the chart as an SVG element for a page; `place` tells it by ear from another one of the same table."""
    label = f"{place}{_title(table)} against {table.x}, of {'; '.join(table.series)}"
    return _themed(lambda: _draw(table, {color: color for color in PALETTE}), label)


def fractions_svg(device: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return a chart of fractions of a device's roof; a bar is a label and its fraction."""
    return _themed(lambda: _draw_fractions(device, bars), f"fractions of the roof, {device}")


def _themed(draw: Callable[[], "Figure"], label: str) -> str:
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        draw().savefig(text, format="svg", transparent=True, metadata={"Date": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]
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
    _draw(table, PALETTE).savefig(file, format="png")
    return file.getvalue()


def sparkline(table: Table) -> str:
    """Return the chart as a small SVG element, the lines alone; of a single size, or of sizes without order, points."""
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
        color = THEME[_colors(table).get(name, MUTED)]
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
    """Return the unit of a table, and what tells the table from others of its recipe."""
    return ", ".join(filter(None, [table.unit, table.kind]))


def _is_numeric(table: Table) -> bool:
    return all(isinstance(x, float) for x in table.xs)


def _sizes(table: Table) -> tuple[list[float], bool]:
    """Return where a table's sizes stand on an axis, and whether that is a logarithmic one."""
    if not _is_numeric(table):
        return [float(place) for place in range(len(table.xs))], False
    xs = [x for x in table.xs if isinstance(x, float)]
    return xs, min(xs) > 0 and max(xs) >= 8 * min(xs)


def _falls(table: Table) -> bool:
    """Whether the rates fall so far that from zero up the lines would end as one."""
    ends = [[value for value in values if value] for values in table.series.values()]
    ends = [values for values in ends if values]
    return bool(ends) and _is_numeric(table) and max(values[-1] for values in ends) < max(map(max, ends)) / 10


def _colors(table: Table) -> dict[str, str]:
    """Return the colour of each series, one that stands in for the theme's."""
    colors = {ROOF: FOREGROUND}
    colors |= dict(zip(sorted(table.ours, key=lambda name: name != TRITON), OURS, strict=False))
    return colors | dict(zip(table.others, OTHERS, strict=False))


def _draw(table: Table, palette: dict[str, str]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    if not _is_numeric(table):
        return _draw_rows(table, palette)
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    xs, logarithmic = _sizes(table)
    ends, colors = [], _colors(table)
    beside = CHARACTER * (max(map(len, table.series), default=0) + 6)  # the axes: figures, and names of series
    character = CHARACTER / (72 * SIZE[0] - beside)
    for name, values in table.series.items():
        points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
        if not points:
            continue
        color = palette[colors.get(name, MUTED)]
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
    axes.set_title(_plain(_title(table)), loc="left", fontsize=FONT, color=palette[FOREGROUND])
    axes.set_xlabel(_plain(table.x), fontsize=FONT, color=palette[FOREGROUND])
    axes.tick_params(colors=palette[FOREGROUND], length=3, color=palette[MUTED], labelsize=FONT)
    axes.grid(axis="y", color=palette[MUTED], linewidth=0.4, alpha=0.5)
    _draw_sides(axes, palette[MUTED])
    return figure


def _draw_rows(table: Table, palette: dict[str, str]) -> "Figure":
    """Draw a table whose sizes have no order: a row for each, in it a point for each series, with its band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], 0.9 + 0.35 * len(table.xs)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(table.xs), 0, -1)
    for place, (name, values) in enumerate(table.series.items()):
        color = palette[_colors(table).get(name, MUTED)]
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
    axes.set_xlabel(_plain(_title(table)), fontsize=FONT, color=palette[FOREGROUND])
    axes.set_ylabel(_plain(table.x), fontsize=FONT, color=palette[FOREGROUND])
    axes.tick_params(colors=palette[FOREGROUND], length=3, color=palette[MUTED], labelsize=FONT)
    axes.grid(axis="x", color=palette[MUTED], linewidth=0.4, alpha=0.5)
    _draw_sides(axes, palette[MUTED])
    figure.legend(
        loc="outside upper left", ncols=3, frameon=False, fontsize=FONT, labelcolor="linecolor", handletextpad=0.2
    )
    return figure


def _draw_sides(axes: "Axes", color: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_color(color)
        spine.set_visible(side in {"left", "bottom"})


def _draw_band(axes: "Axes", table: Table, name: str, xs: Sequence[float], color: str) -> None:
    """Draw the band of a series, and rings around the figures that the CPU decided."""
    values = table.series[name]
    if name in table.p20 and name in table.p80:
        points = [(x, low, high) for x, low, high in zip(xs, table.p20[name], table.p80[name], strict=True)]
        kept = [(x, low, high) for x, low, high in points if low is not None and high is not None]
        if kept:
            sizes, lows, highs = zip(*kept, strict=True)
            axes.fill_between(sizes, lows, highs, color=color, alpha=0.2, linewidth=0)
    late = [
        (x, value) for index, (x, value) in enumerate(zip(xs, values, strict=True)) if table.is_cpu_bound(name, index)
    ]
    late = [(x, value) for x, value in late if value is not None]
    if late:
        axes.plot(*zip(*late, strict=True), linestyle="none", marker="o", markersize=9, color=color, fillstyle="none")


def _with_room(names: dict[float, str], place: Callable[[float], float], character: float) -> dict[float, str]:
    """Return the names that an axis has room for: none touches the one before.

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
    """Write each series' name behind its last point, moved apart where they would overlap."""
    axes.get_ylim()  # the limits are settled now
    to_fraction = axes.transData + axes.transAxes.inverted()
    highest_first = sorted(ends, key=lambda end: -end[0][1])
    places = _apart([float(to_fraction.transform(point)[1]) for point, _, _ in highest_first])
    for place, (point, name, color) in zip(places, highest_first, strict=True):
        axes.annotate(
            _plain(name),
            point,
            xytext=(1.02, place),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=FONT,
        )


def _apart(places: Sequence[float]) -> list[float]:
    """Move labels apart, given where each would stand, the highest first: down, and up again from the axis."""
    moved: list[float] = []
    for place in places:
        moved.append(min(place, moved[-1] - LABEL_GAP) if moved else place)
    lowest = 0.0
    for index in reversed(range(len(moved))):
        moved[index] = max(moved[index], lowest)
        lowest = moved[index] + LABEL_GAP
    return moved


def _draw_fractions(device: str, bars: Sequence[tuple[str, float]]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    color = OTHERS[2]  # those before mean PyTorch and libraries
    figure = Figure(figsize=(SIZE[0], 0.7 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars), 0, -1)
    axes.barh(places, [roof for _, roof in bars], color=color, height=0.3)
    axes.set_yticks([])
    axes.set_ylim(0.5, len(bars) + 0.7)
    for place, (label, roof) in zip(places, bars, strict=True):
        said = f"{roof:.2f}  {_plain(label)}"
        above = (0, place + 0.36)
        axes.annotate(
            said, above, xytext=(2, 0), textcoords="offset points", color=FOREGROUND, va="center", fontsize=FONT
        )
    axes.axvline(1, color=FOREGROUND, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set_xlim(0, 1.08 * max([1.0, *(roof for _, roof in bars)]))
    keys = [Patch(color=color, label=_plain(f"Triton / roof, {device}"))]
    figure.legend(handles=keys, loc="outside upper left", frameon=False, fontsize=FONT, labelcolor=FOREGROUND)
    axes.tick_params(colors=FOREGROUND, color=MUTED, length=3, labelsize=FONT)
    _draw_sides(axes, MUTED)
    return figure


def _plain(name: str) -> str:
    """Return a name so that matplotlib does not take its dollars for those around a formula."""
    return name.replace("$", r"\$")


def short(value: float) -> str:
    """Write a size as readers of sizes do: 4096, 16K, 256M, but 256000."""
    for factor, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if value >= 10 * 2**10 and value % factor == 0 and math.log2(value).is_integer():
            return f"{value / factor:g}{letter}"
    return f"{value:g}"
