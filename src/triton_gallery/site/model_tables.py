"""Models of the transformers library as they are, with Liger's kernels and with the ops: tables, charts, and a line."""

from collections.abc import Sequence
from itertools import groupby

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.libraries.model_rows import KINDS, LIGER, OURS, PLAIN, WAYS, Case, ModelRow
from triton_gallery.recipe.tables import TRITON, Table
from triton_gallery.site import page_context
from triton_gallery.site.chart import chart
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.panels import Panel, figure_of
from triton_gallery.site.render import folded, html, older, page_link, paragraph, table, two_digits

COMMAND = "make models"
PAGE = "guide/transformers"
TITLES = {PLAIN: "plain", LIGER: "Liger", OURS: "patched"}
BY, NO_BREAK = "\N{MULTIPLICATION SIGN}", "\N{NO-BREAK SPACE}"
STATES = {False: "eager", True: "compiled"}


class ModelsDirective(SphinxDirective):
    """`models`: the tables of each device, and the losses."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, shown)
        rows = page_context.models(self.env)
        if not rows:
            return [paragraph("There is no record of ", nodes.literal("", COMMAND), " yet.")]
        return [node for of_device in _by_device(rows) for node in _of_device(of_device)]


class ModelLineDirective(SphinxDirective):
    """`models-line`: how much faster a training step is, or nothing where that is not known."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, shown)
        lines = (line(rows) for rows in _by_device(page_context.models(self.env)))
        return [paragraph(text, page_link(PAGE), ".") for text in lines if text]


def shown(env: BuildEnvironment) -> object:
    """Return the rows, and whether each is fresh; for `freshness.depends_on`."""
    return [(row, row.is_fresh) for row in page_context.models(env)]


def line(rows: Sequence[ModelRow]) -> str:
    """Return the gain of the first compiled training step of a device that has its figures, of the present code."""
    found = {row.case: row for row in rows if row.is_fresh}
    for case, row in found.items():
        plain = found.get(_other(case, PLAIN))
        if case.way == OURS and case.compiled and plain and row.training and plain.training:
            liger = found.get(_other(case, LIGER))
            beside = f", {liger.ms[0]:.1f} ms with Liger-Kernel" if liger else ""
            return (
                f"In a whole model, a training step of {_model(row)} under torch.compile takes {row.ms[0]:.1f} ms with "
                f"the ops{beside} and {plain.ms[0]:.1f} ms without, and {row.training.gib:.1f} GiB instead of "
                f"{plain.training.gib:.1f} ({row.environment.name}, {row.date[:10]}): "
            )
    return ""


def _other(case: Case, way: str) -> Case:
    """Return the same case another way."""
    return Case(case.work, case.size, case.batch, case.length, way, case.compiled)


def _by_device(rows: Sequence[ModelRow]) -> list[list[ModelRow]]:
    return [list(of_device) for _, of_device in groupby(rows, key=lambda row: row.environment.name)]


def _of_device(rows: Sequence[ModelRow]) -> list[nodes.Node]:
    """Return the runs on a device, and what they found."""
    runs = dict.fromkeys(map(_run, rows))
    about: list[nodes.Node] = [
        paragraph(nodes.literal("", COMMAND), " on ", nodes.strong("", rows[0].environment.name), run) for run in runs
    ]
    sizes = {row.case.size: row.config for row in rows}
    layers = (f"{size}, {config['num_hidden_layers']} of {config['hidden_size']}" for size, config in sizes.items())
    words = (
        f"Layers of the Llamas: {'; '.join(layers)}. A batch is sequences {BY} tokens, those to generate {BY} prompt."
    )
    parts = [*about, paragraph(words)]
    if training := [row for row in rows if row.training]:
        parts += [_steps(training), *_losses(training)]
    parts.append(_speeds(rows))
    if training:
        parts += folded("GPU time of a step by kind of kernel, in milliseconds", [_profiles(training)])
    return parts


def _run(row: ModelRow) -> str:
    """Return when, and with which software, a row was measured."""
    environment = row.environment
    versions = {"driver": environment.driver, "torch": environment.torch, "triton": environment.triton, **row.packages}
    parts = [row.date[:10], *(f"{name} {version}" for name, version in versions.items() if version)]
    parts += [f"commit {row.commit[:10]}"] if row.commit else []
    return "".join(f" \N{MIDDLE DOT} {part}" for part in parts)


def _model(row: ModelRow) -> str:
    """Return what a model is, and its batch."""
    layers, hidden = row.config["num_hidden_layers"], row.config["hidden_size"]
    batch = f"{row.case.batch} {BY} {row.case.length} tokens"
    return f"a Llama of {layers} layers of {hidden}, {batch}"


def _batch(row: ModelRow) -> str:
    """Return the name of a model, and its batch, on one line."""
    return f"{row.case.size}, {row.case.batch} {BY} {row.case.length}".replace(" ", NO_BREAK)


def _groups(rows: Sequence[ModelRow]) -> list[dict[str, ModelRow]]:
    """Return the rows by way, of each model, batch and state."""
    groups: dict[Case, dict[str, ModelRow]] = {}
    for row in rows:
        groups.setdefault(_other(row.case, PLAIN), {})[row.case.way] = row
    return list(groups.values())


def _first(group: dict[str, ModelRow]) -> list[str]:
    """Return the first cells of a line: the model, and whether it is compiled."""
    row = next(iter(group.values()))
    return [_batch(row), STATES[row.case.compiled] + older(all(row.is_fresh for row in group.values()))]


def _ratio(group: dict[str, ModelRow], way: str) -> str:
    """Return how many times as fast ours is as another way."""
    ours, other = group.get(OURS), group.get(way)
    return two_digits(other.ms[0] / ours.ms[0]) if ours and other else ""


def _steps(rows: Sequence[ModelRow]) -> nodes.Node:
    """Return the table of training: times and memory of a step."""
    titles = ["training step", "mode", *(f"{TITLES[way]} ({unit})" for unit in ("ms", "GiB") for way in WAYS)]
    lines = []
    for group in _groups(rows):
        of_ways = [group.get(way) for way in WAYS]
        times = [f"{row.ms[0]:.1f}" if row else "" for row in of_ways]
        memory = [f"{row.training.gib:.1f}" if row and row.training else "" for row in of_ways]
        lines.append([*_first(group), *times, *memory])
    return table(titles, lines, "libraries")


def _speeds(rows: Sequence[ModelRow]) -> nodes.Node:
    """Return the table of rates, and how many times as fast a patched model is."""
    titles = ["tokens/s", "mode", *(TITLES[way] for way in WAYS), "patched / plain", "patched / Liger"]
    lines = []
    for group in _groups(rows):
        work = next(iter(group.values())).case.work
        rates = [f"{row.tokens_per_second:.0f}" if (row := group.get(way)) else "" for way in WAYS]
        model, mode = _first(group)
        lines.append([f"{work}, {model}", mode, *rates, *(_ratio(group, way) for way in (PLAIN, LIGER))])
    return table(titles, lines, "libraries")


def _profiles(rows: Sequence[ModelRow]) -> nodes.Node:
    """Return the table of profiles."""
    lines = []
    for row in rows:
        if row.training:
            profile = row.training.profile
            times = [*(profile.kinds[kind] for kind in KINDS), profile.idle]
            model, mode = _first({row.case.way: row})
            lines.append([model, f"{TITLES[row.case.way]}, {mode}", *(f"{time:.1f}" for time in times)])
    return table(["training step", "mode", *KINDS, "idle"], lines, "libraries")


def _losses(rows: Sequence[ModelRow]) -> list[nodes.Node]:
    """Return the chart of the losses of each model, with all of its ways."""
    by_model: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.training:
            title = f"{TITLES[row.case.way]}, {STATES[row.case.compiled]}"
            name = f"{TRITON}, {title}" if row.case.way == OURS else title
            by_model.setdefault(_batch(row), {})[name] = row.training.losses
    panels = []
    for model, losses in by_model.items():
        longest = max(map(len, losses.values()))
        series: dict[str, list[float | None]] = {
            name: [*values, *[None] * (longest - len(values))] for name, values in losses.items()
        }
        steps: list[float | str] = [float(step) for step in range(1, longest + 1)]
        drawn = Table("results", "step", "loss", steps, series, {}, {}, {}, {})
        shown = [html(chart(drawn, f"{model}: ")), *_apart(losses)]
        panels.append(Panel({"variant": model}, shown))
    return figure_of(panels)


def _apart(losses: dict[str, list[float]]) -> list[nodes.Node]:
    """Return a line on how far losses are from those of the plain model that is not compiled."""
    plain = losses.get(f"{TITLES[PLAIN]}, {STATES[False]}")
    if not plain:
        return []
    apart = {
        name: max(abs(value - base) / base for value, base in zip(values, plain, strict=False))
        for name, values in losses.items()
        if values is not plain
    }
    found = "; ".join(f"{name} {ratio:.1e}" for name, ratio in apart.items())
    return [paragraph(f"Largest relative difference of a step's loss from {TITLES[PLAIN]}, {STATES[False]}: {found}.")]
