"""Draws a step-through figure: SVG in which every cell that a step may change is there, and data for the script.

The figure shows one step, so that it says something without scripts and on paper. `_static/step_through.js` plays the
others: it sets classes and texts of cells, so nothing moves.
"""

import json
import math
import re
from collections.abc import Sequence
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from triton_gallery.site.sphinx_internals import lighten
from triton_gallery.step_through.trace import Access, Figure, Step, Tensor, Trace

CELL, LABEL, NAME, GAP = 20, 14, 18, 8  # pixels: height of a cell, room for row or column numbers, a name, between
CHARACTER, PADDING = 6.7, 5  # pixels, of the text in a cell
NARROWEST = 20
COLOURS = 8  # of programs
HATCH = (  # once on a page: the style names it
    '<svg class="hatch" width="0" height="0" aria-hidden="true"><pattern id="step-hatch" width="6" height="6" '
    'patternUnits="userSpaceOnUse"><path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5"/></pattern></svg>'
)
KINDS = {"load": "ld", "store": "st", "atomic": "st"}
BAR = (
    '<div class="bar"><button type="button" class="previous" aria-label="Previous step">‹</button>'
    '<button type="button" class="play" aria-pressed="false">▶ Play</button>'
    '<button type="button" class="next" aria-label="Next step">›</button><div class="track">'
    '<input type="range" min="0" max="1" value="0" aria-label="Step of {kernel}">'
    '<div class="ticks" aria-hidden="true"></div></div><output class="at"></output></div>'
)
LEGEND = {
    "ld": "loads",
    "st": "stores",
    "off": "masked off",
    "out": "outside",
    "held": "loaded",
    "seen": "in earlier turns",
    "own": "its output",
}


def drawing(figure: Figure) -> str:
    """Return a figure as HTML."""
    several = len(figure.traces) > 1
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(not number).lower()}">{_code(trace.label)}</button>'
        for number, trace in enumerate(figure.traces)
    )
    switch = f'<div class="switches"><div role="group" aria-label="Launch">{buttons}</div></div>'
    launches = "".join(
        _Launch(trace, figure.layout).html(number == 0, several) for number, trace in enumerate(figure.traces)
    )
    # The data last: launches that look alike are close to each other then, which halves what is transferred
    data = "".join(f'<script type="application/json">{_data(trace)}</script>' for trace in figure.traces)
    return (
        f'<figure class="step-through" data-kernel="{escape(figure.kernel)}">'
        f"{switch if several else ''}{launches}<figcaption>{_code(figure.caption)}</figcaption>{data}</figure>"
    )


class _Launch:
    """One launch of a figure, with the step that is shown at first."""

    def __init__(self, trace: Trace, layout: str) -> None:
        """Take the launch, and how its tensors are laid out."""
        self.trace, self.layout = trace, layout
        program, self.start = trace.start
        self.mine = [step for step in trace.steps if step.program == program]
        # Of cells, which are known by "t" or "r", for a tensor or a register, its number, and their place
        self.texts = dict[tuple[str, int, int], str]()
        self.classes = dict[tuple[str, int, int], str]()
        finished = program - program % trace.at_once if trace.is_race else program
        for step in trace.steps:
            if step.program < finished:
                self._store(step, "old")
        for number in range(self.start + 1):
            self._paint(number)

    def _store(self, step: Step, kind: str) -> None:
        """Set texts and classes of the cells that a step stores to."""
        for access in step.accesses:
            if access.kind != "load":
                keys = [("t", access.tensor, cell) for cell in access.cells]
                self.texts |= zip(keys, access.values, strict=True)
                self.classes |= dict.fromkeys(keys, kind)

    def _paint(self, number: int) -> None:
        """Set texts and classes of cells as the script would at a step."""
        step, is_now = self.mine[number], number == self.start
        again = any(later.lines == step.lines for later in self.mine[number + 1 : self.start + 1])
        loaded = "ld" if is_now else "seen" if again else "held"
        self._store(step, "st" if is_now else "done")
        for access in step.accesses:
            if access.kind == "load":
                self.classes |= {("t", access.tensor, cell): loaded for cell in access.cells}
            if is_now:
                self.classes |= {("t", access.tensor, cell): "off" for cell in access.masked}
                self.classes |= {("t", access.tensor, cell): "out" for cell in access.outside}
        for register, values in step.values.items():
            self.texts |= {("r", register, cell): value for cell, value in enumerate(values)}
            if is_now:
                self.classes |= {("r", register, cell): "new" for cell in range(len(values))}

    def html(self, is_first: bool, has_title: bool) -> str:
        """Return the launch as HTML."""
        trace, now = self.trace, self.mine[self.start]
        program = trace.programs[trace.start[0]]
        name = f"Program {program}" if len(trace.programs) > 1 else "The program"
        steps = "".join(f"<li>{_code(step.sentence)}</li>" for step in self.mine)
        registers = "".join(map(self._register, range(len(trace.registers))))
        outcome = "wrong" if trace.is_wrong else "right"
        race = " One order of many: the programs of a wave read before any of them writes." if trace.is_race else ""
        parts = [
            f'<p class="launch-title"><b>{_code(trace.label)}</b></p>' if has_title else "",
            BAR.format(kernel=escape(trace.kernel)),
            self._programs(),
            f'<p class="sentence" role="status"><b>{escape(name)}.</b> {_code(now.sentence)}</p>',
            f'<div class="highlight source"><pre tabindex="0">{self._source(now)}</pre></div>',
            f'<div class="memory"><b class="head">Memory</b>{self._tensors()}</div>',
            f'<div class="registers"><b class="head">In the program’s registers</b>{registers}</div>',
            f'<div class="foot"><p class="key">{self._legend()}</p>',
            '<output class="hover" aria-hidden="true"></output></div>',
            f'<p class="outcome {outcome}"><b>After all programs: {outcome}.</b> {_code(trace.verdict)}{race}</p>',
            f"<details><summary>The steps of <span>{escape(name[0].lower() + name[1:])}</span> as text</summary>",
            f"<ol>{steps}</ol></details>",
        ]
        return f'<div class="launch{" chosen" if is_first else ""}">{"".join(parts)}</div>'

    def _programs(self) -> str:
        """Return buttons that choose a program, or all."""
        trace = self.trace
        if len(trace.programs) == 1:
            return ""
        names = dict(enumerate(trace.programs))
        names[-1] = f"all, {trace.at_once} at once" if trace.at_once < len(trace.programs) else "all at once"
        buttons = "".join(
            f'<button type="button" value="{number}" class="pg{number % COLOURS if number >= 0 else ""}" '
            f'aria-pressed="{str(number == trace.start[0]).lower()}">{escape(name)}</button>'
            for number, name in names.items()
        )
        return f'<div class="programs" role="group" aria-label="Which program"><span>Program</span>{buttons}</div>'

    def _source(self, now: Step) -> str:
        """Return the kernel's lines; the statement that ran is marked, and what touches memory has a coloured edge."""
        source = "\n".join(self.trace.lines)
        markup = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
        touching = {step.lines[0]: KINDS[step.accesses[0].kind] for step in self.trace.steps if step.accesses}
        shown = []
        for number, line in enumerate(lighten(markup).rstrip("\n").split("\n"), start=1):
            is_now = now.lines[0] <= number <= now.lines[1]
            classes = " ".join(filter(None, ["ln", touching.get(number, ""), "now" if is_now else ""]))
            shown.append(f'<span class="{classes}" data-n="{number}">{line or " "}\n</span>')
        return "".join(shown)

    def _legend(self) -> str:
        """Return what the colours mean, of those that the launch has."""
        steps = self.trace.steps
        accesses = [access for step in steps for access in step.accesses]
        loads = [(step.program, step.lines) for step in steps if any(a.kind == "load" for a in step.accesses)]
        missing = {
            "ld": not loads,
            "held": not loads,
            "seen": len({*loads}) == len(loads),
            "off": not any(access.masked for access in accesses),
            "out": not any(access.outside for access in accesses),
        }
        shown = {kind: words for kind, words in LEGEND.items() if not missing.get(kind)}
        spans = [f'<span><i class="{kind}"></i>{words}</span>' for kind, words in shown.items()]
        return " ".join([*spans, "<span>dots below the slider: steps that touch memory</span>"])

    def _tensors(self) -> str:
        """Return all tensors, side by side or laid out as a product."""
        tensors = self.trace.tensors
        digits = max(len(name) for name in self.trace.programs) if len(self.trace.programs) > 1 else 1
        widths = [_width(max(tensor.longest, min(digits, 2))) for tensor in tensors]
        if self.layout != "product":
            drawn = [self._tensor(number, width) for number, width in enumerate(widths)]
            pairs = zip(tensors, widths, drawn, strict=True)
            return "".join(
                _svg(*_extent(tensor, width), shown, f"Cells of {tensor.name}") for tensor, width, shown in pairs
            )
        a, b, c = ([tensor.name for tensor in tensors].index(name) for name in "abc")
        widths[b] = widths[c] = max(widths[b], widths[c])
        (left, low), (wide_b, top), (wide_c, low_c) = (_extent(tensors[number], widths[number]) for number in (a, b, c))
        left, top = left + GAP, top + GAP
        places = {a: (0.0, top), b: (left, 0.0), c: (left, top)}
        drawn = [self._tensor(number, widths[number], *place) for number, place in places.items()]
        return _svg(left + max(wide_b, wide_c), top + max(low, low_c), "".join(drawn), "Cells of a, b and c")

    def _tensor(self, number: int, width: float, x: float = 0, y: float = 0) -> str:
        """Return a tensor: its name, the numbers of rows and columns, its cells, and an outline of each matrix."""
        tensor = self.trace.tensors[number]
        rows, columns = tensor.drawn
        own_rows, own_columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        each = tensor.shape[-2] if len(tensor.shape) > 1 else 1
        left, top = x + LABEL, y + NAME + LABEL
        tops = [top + row * CELL + gap for row, gap in enumerate(_gaps(tensor.shape, rows))]
        name, _ = _title(tensor.name, tensor.shape)
        drawn = [f'<text class="name" x="{left:g}" y="{y + 12:g}">{name}</text>']
        for column in range(own_columns):
            drawn.append(f'<text class="index" x="{left + (column + 0.5) * width:g}" y="{top - 4:g}">{column}</text>')
        for row in range(own_rows if own_rows > 1 else 0):
            drawn.append(f'<text class="index" x="{x + 6:g}" y="{tops[row] + 14:g}">{row % each}</text>')
        drawn.append(f'<g data-t="{number}">')
        for cell in range(rows * columns):
            row, column = divmod(cell, columns)
            pad = "" if row < own_rows and column < own_columns else "pad"
            text = tensor.before[cell] if tensor.before else ""
            drawn.append(self._cell(("t", number, cell), left + column * width, tops[row], width, text, pad))
        drawn.append("</g>")
        wide = own_columns * width
        for row in range(0, own_rows, each if len(tensor.shape) > 2 else own_rows):
            high = CELL * (each if len(tensor.shape) > 2 else own_rows)
            drawn.append(f'<path class="edge" d="M{left:g} {tops[row]:g}h{wide:g}v{high}h-{wide:g}z"/>')
        return "".join(drawn)

    def _register(self, number: int) -> str:
        """Return a register: its name and its cells."""
        register = self.trace.registers[number]
        shape = register.shape or [1]
        columns, rows = shape[-1], math.prod(shape[:-1])
        width = _width(register.longest)
        name, title = _title(register.name, register.shape)
        places = ((cell, *divmod(cell, columns)) for cell in range(rows * columns))
        cells = [
            self._cell(("r", number, cell), 0.5 + column * width, NAME + row * CELL, width)
            for cell, row, column in places
        ]
        drawn = f'<text class="name" x="0" y="12">{name}</text><g data-r="{number}">{"".join(cells)}</g>'
        return _svg(max(columns * width + 1, title), NAME + rows * CELL + 1, drawn, f"Values of {register.name}")

    def _cell(self, key: tuple[str, int, int], x: float, y: float, width: float, text: str = "", kind: str = "") -> str:
        classes = " ".join(filter(None, [kind, self.classes.get(key, "")]))
        kind = f' class="{classes}"' if classes else ""
        return (
            f'<rect{kind} x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL}"/>'
            f'<text x="{x + width / 2:g}" y="{y + 14:g}">{escape(self.texts.get(key, text))}</text>'
        )


def _code(text: str) -> str:
    """Return a text as HTML, with what stands between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def _data(trace: Trace) -> str:
    """Return what the script needs, as JSON: sentences and accesses that repeat stand once."""
    sentences: dict[str, int] = {}
    accesses: dict[str, int] = {}
    lines: dict[tuple[int, int], int] = {}
    steps: list[list[object]] = [[] for _ in trace.programs]
    for step in trace.steps:
        texts = [json.dumps(_access(access), ensure_ascii=False, separators=(",", ":")) for access in step.accesses]
        numbers = [accesses.setdefault(text, len(accesses)) for text in texts]
        values = [[number, *texts] for number, texts in step.values.items()]
        known = [lines.setdefault(step.lines, len(lines)), sentences.setdefault(step.sentence, len(sentences))]
        steps[step.program].append(_shortened([*known, numbers, values]))
    data = {
        "programs": trace.programs,
        "atOnce": trace.at_once,
        "isRace": trace.is_race,
        "start": trace.start,
        "tensors": [_named(trace, number) for number in range(len(trace.tensors))],
        "registers": [[register.name, register.shape] for register in trace.registers],
        "accesses": [json.loads(text) for text in accesses],
        "lines": [*lines],
        "steps": steps,
        "sentences": [*sentences],
    }
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _named(trace: Trace, number: int) -> list[object]:
    """Return the name, shape and columns of a tensor, and what was there before where a program stores to it."""
    tensor = trace.tensors[number]
    stored = any(access.tensor == number and access.kind != "load" for step in trace.steps for access in step.accesses)
    return [tensor.name, tensor.shape, tensor.drawn[1], *([tensor.before] if stored else [])]


def _access(access: Access) -> list[object]:
    return _shortened([KINDS[access.kind], access.tensor, access.cells, access.masked, access.outside, access.values])


def _shortened(values: list[object]) -> list[object]:
    """Return values without empty lists at the end."""
    while values[-1] == []:
        values.pop()
    return values


def _width(longest: int) -> float:
    """Return the width of a cell for so many characters."""
    return max(NARROWEST, math.ceil(CHARACTER * longest + PADDING))


def _title(name: str, shape: Sequence[int]) -> tuple[str, float]:
    """Return the name of a tensor or register and its shape, as SVG, and its width."""
    text = f"{name} ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})" if shape else name
    rest = text.removeprefix(name)
    return f"<tspan>{escape(name)}</tspan>{escape(rest)}", CHARACTER * len(text) + 4


def _gaps(shape: Sequence[int], rows: int) -> list[int]:
    """Return for each row how far it is moved down: each matrix of a tensor of three dimensions begins with a gap."""
    each = shape[-2] if len(shape) > 2 else rows
    return [GAP * (row // each) for row in range(rows)]


def _extent(tensor: Tensor, width: float) -> tuple[float, float]:
    rows, columns = tensor.drawn
    _, title = _title(tensor.name, tensor.shape)
    height = NAME + LABEL + rows * CELL + _gaps(tensor.shape, rows)[-1] + 1
    return max(LABEL + columns * width + 1, LABEL + title), height


def _svg(width: float, height: float, drawn: str, label: str) -> str:
    box = f'width="{width:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}">{drawn}</svg>'
