"""Draws a benchmark table: as a PNG for thumbnails and notebooks, as an SVG whose colours follow the page's theme."""

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from triton_gallery.recipes.tables import ROOF, TRITON, Table

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
LABEL_GAP = 0.055  # of the axes' height
CHARACTER = 0.016  # of the axes' width, in a name below the axis


def svg(table: Table) -> str:
    """Return the chart as an SVG element for a page."""
    return _themed(lambda: _draw(table, {color: color for color in PALETTE}), f"{table.unit} against {table.x}")


def fractions_svg(bars: Sequence[tuple[str, str, float]]) -> str:
    """Return a chart of fractions of the roof; a bar is a label, a device and its fraction."""
    return _themed(lambda: _draw_fractions(bars), "fractions of the roof")


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
    size = re.search(r'viewBox="[^"]*"', element)
    head = f'<svg {size[0] if size else ""} role="img" aria-label="{escape(label)}">'
    return re.sub(r"<svg[^>]*>", lambda _: head, element, count=1)


def png(table: Table) -> bytes:
    """Return the chart as a PNG on white."""
    file = BytesIO()
    _draw(table, PALETTE).savefig(file, format="png")
    return file.getvalue()


def save_thumbnail(table: Table, path: Path) -> None:
    """Write the chart as a PNG, on white, in the size of sphinx-gallery's thumbnails."""
    figure = _draw(table, PALETTE)
    figure.set_size_inches(5, 3.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=80)


def _draw(table: Table, palette: dict[str, str]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    numeric = all(isinstance(x, float) for x in table.xs)
    xs = [x for x in table.xs if isinstance(x, float)] if numeric else [float(i) for i in range(len(table.xs))]
    ends = []
    colors = {ROOF: FOREGROUND}
    colors |= dict(zip(sorted(table.ours, key=lambda name: name != TRITON), OURS, strict=False))
    colors |= dict(zip(table.others, OTHERS, strict=False))
    for name, values in table.series.items():
        points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
        if not points:
            continue
        color = palette[colors.get(name, MUTED)]
        line = axes.plot(*zip(*points, strict=True), color=color, linewidth=1.6)[0]
        if not numeric:
            line.set(linestyle="none", marker="_" if name == ROOF else "o", markersize=9)
        elif name == ROOF:
            line.set(linestyle=(0, (5, 3)), linewidth=1.2)
        else:
            line.set(marker="o", markersize=4, linewidth=2.4 if name in table.ours else 1.6)
        _draw_band(axes, table, name, xs, color)
        ends.append((points[-1], name, color))
    logarithmic = numeric and min(xs) > 0 and max(xs) >= 8 * min(xs)
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_minor_locator(NullLocator())
    names = {x: short(x) for x in xs} if numeric else dict(zip(xs, (_plain(str(x)) for x in table.xs), strict=True))
    if numeric:
        names = _with_room(names, math.log2 if logarithmic else float)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: names.get(x, "")))
    top = max((value for values in table.series.values() for value in values if value), default=0)
    if numeric and ends and max(value for (_, value), _, _ in ends) < top / 10:
        axes.set_yscale("log")  # the rates fall: from zero up, the lines would end as one
    else:
        axes.set_ylim(bottom=0)
    _label(axes, ends)
    axes.set_title(_plain(table.unit), loc="left", fontsize=10, color=palette[FOREGROUND])
    axes.set_xlabel(_plain(table.x), color=palette[FOREGROUND])
    axes.tick_params(colors=palette[FOREGROUND], length=3, color=palette[MUTED])
    axes.grid(axis="y", color=palette[MUTED], linewidth=0.4, alpha=0.5)
    for side, spine in axes.spines.items():
        spine.set_color(palette[MUTED])
        spine.set_visible(side in {"left", "bottom"})
    return figure


def _draw_band(axes: "Axes", table: Table, name: str, xs: Sequence[float], color: str) -> None:
    """Draw the band of a series, and rings around the figures that the CPU decided."""
    values = table.series[name]
    if name in table.low and name in table.high:
        points = [(x, low, high) for x, low, high in zip(xs, table.low[name], table.high[name], strict=True)]
        kept = [(x, low, high) for x, low, high in points if low is not None and high is not None]
        if kept:
            sizes, lows, highs = zip(*kept, strict=True)
            axes.fill_between(sizes, lows, highs, color=color, alpha=0.2, linewidth=0)
    late = [(x, value) for index, (x, value) in enumerate(zip(xs, values, strict=True)) if table.is_late(name, index)]
    late = [(x, value) for x, value in late if value is not None]
    if late:
        axes.plot(*zip(*late, strict=True), linestyle="none", marker="o", markersize=9, color=color, fillstyle="none")


def _with_room(names: dict[float, str], place: Callable[[float], float]) -> dict[float, str]:
    """Return the names that an axis has room for, given where each size stands on it: none touches the one before."""
    places = [place(x) for x in names]
    wide = max(places) - min(places)
    named: list[float] = []
    for x in sorted(names):
        half = CHARACTER * (len(names[x]) + len(names[named[-1]]) + 2) / 2 if named else 0
        if not named or place(x) - place(named[-1]) >= half * wide:
            named.append(x)
    return {x: names[x] for x in named}


def _label(axes: "Axes", ends: list[tuple[tuple[float, float], str, str]]) -> None:
    """Write each series' name behind its last point, moved apart where they would overlap."""
    axes.get_ylim()  # the limits are settled now
    to_fraction = axes.transData + axes.transAxes.inverted()
    place = 1.0 + LABEL_GAP
    for (x, value), name, color in sorted(ends, key=lambda end: -end[0][1]):
        place = min(to_fraction.transform((x, value))[1], place - LABEL_GAP)
        at = (1.02, place)
        axes.annotate(
            _plain(name), (x, value), xytext=at, textcoords="axes fraction", color=color, va="center", fontsize=10
        )


def _draw_fractions(bars: Sequence[tuple[str, str, float]]) -> "Figure":
    from matplotlib.figure import Figure

    devices = sorted({device for _, device, _ in bars})
    colors = dict(zip(devices, [OURS[0], *OTHERS], strict=False))
    figure = Figure(figsize=(7.2, 0.9 + 0.26 * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars), 0, -1)
    axes.barh(places, [roof for *_, roof in bars], color=[colors[device] for _, device, _ in bars], height=0.6)
    axes.set_yticks(places, [_plain(label) for label, *_ in bars])
    for place, (_, _, roof) in zip(places, bars, strict=True):
        axes.annotate(
            f"{roof:.2f}",
            (max(roof, 1.0), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=FOREGROUND,
        )
    axes.axvline(1, color=FOREGROUND, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set_xlim(0, 1.08 * max([1.0, *(roof for *_, roof in bars)]))
    axes.set_title(_plain(f"Triton / roof: {', '.join(devices)}"), loc="left", fontsize=10, color=FOREGROUND)
    axes.tick_params(colors=FOREGROUND, color=MUTED, length=3)
    for side, spine in axes.spines.items():
        spine.set_color(MUTED)
        spine.set_visible(side in {"left", "bottom"})
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
