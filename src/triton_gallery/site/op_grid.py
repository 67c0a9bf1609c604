"""How fast each op is on the GPU that a reader chooses, as a grid: beside PyTorch, the best other and the roof."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.figures.ratios import Summary, headline, summaries
from triton_gallery.recipe.declaration import declaration
from triton_gallery.site import page_context, verdict
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.render import html, of_gpu, older, op_link, paragraph, where

PYTORCH = "PyTorch"
UNMEASURED = "not measured on this GPU"
TO_LEARN = "To learn from: plain ops that a faster one replaces"
TAKE = "To take: "
ABOUT = (
    "Above 1 the op is faster. A figure is the ratio of two medians of one run, and of several sizes the median. Times "
    "are the GPU's, without the launch. PyTorch is eager; the best other is at each size the fastest of PyTorch, "
    "torch.compile and the libraries that were measured. The roof is a copy, an addition or a matrix product of "
    "the vendor's library with as many bytes or operations. Sizes at which the GPU had to wait for the CPU are left "
    "out. Where it says so, figures are of older code: an op's file has changed since. An op's page has the worst and "
    "the best size, and the CPU time of a call."
)


class OpGridDirective(SphinxDirective):
    """`op-grid`: the ops by section, each with its speed."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, shown)
        return [paragraph(ABOUT), *grid(self.env)]


def speeds(env: BuildEnvironment) -> dict[str, dict[str, list[Summary]]]:
    """Return for each op and each GPU the benchmarks that stand for the op: its forward, then its backward.

    They are of the present code, or else of older code. An op without one on a GPU lacks that GPU.
    """
    records, rows, recipes = page_context.records(env), page_context.beside_libraries(env), page_context.recipes(env)
    by_op: dict[str, dict[str, list[Summary]]] = {}
    for op, page in page_context.ops(env).items():
        items = list(summaries(records.of(recipes[page]), rows, recipes[page]))
        names = sorted({item.environment.name for item in items})
        by_gpu = {name: [item for item in items if item.environment.name == name] for name in names}
        of_gpus = {name: headline(of_gpu, or_older=True) for name, of_gpu in by_gpu.items()}
        by_op[op] = {name: main for name, main in of_gpus.items() if main}
    return by_op


def gpus(by_op: dict[str, dict[str, list[Summary]]]) -> list[str]:
    """Return the names of the GPUs, the one on which most ops were measured first."""
    counts = Counter(name for of_gpus in by_op.values() for name in of_gpus)
    return sorted(counts, key=lambda name: (-counts[name], name))


def choice(names: Sequence[str]) -> nodes.Node:
    """Return the menu of the GPUs; `gpu_choice.js` shows what is about the chosen one alone."""
    options = "".join(f"<option>{escape(name)}</option>" for name in names)
    return html(f'<p class="gpu-choice"><label>GPU: <select autocomplete="off">{options}</select></label></p>')


def grid(env: BuildEnvironment) -> list[nodes.Node]:
    """Return the menu of the GPUs, and a list of the ops for each section."""
    by_op, lessons = speeds(env), page_context.ops(env)
    names = gpus(by_op)
    grids: list[nodes.Node] = [choice(names)] if names else []
    instead = take_instead(env)
    to_take = [op for op in by_op if op not in instead]
    by_section = groupby(to_take, key=lambda op: lessons[op].split("/")[-2])
    groups = [(section.replace("_", " ").capitalize(), [*ops]) for section, ops in by_section]
    groups.append((TO_LEARN, [op for op in by_op if op in instead]))
    for title, ops in groups:
        if ops:
            tiles = [nodes.list_item("", *_tile(env, op, by_op[op], names, instead.get(op, ""))) for op in ops]
            grids += [nodes.rubric("", title), nodes.bullet_list("", *tiles, classes=["op-grid"])]
    return grids


def take_instead(env: BuildEnvironment) -> dict[str, str]:
    """Return for each op that is there to learn from the op to take instead."""
    recipes = page_context.recipes(env)
    declared = {op: declaration(recipes[page].path, recipes[page].text) for op, page in page_context.ops(env).items()}
    return {op: other for op, of_lesson in declared.items() if (other := of_lesson.of_op.take_instead)}


def _tile(
    env: BuildEnvironment, op: str, of_gpus: dict[str, list[Summary]], names: Sequence[str], instead: str
) -> list[nodes.Node]:
    """Return the tile of an op: its name as a link, what it is, what to take instead, and its speed on each GPU."""
    tile: list[nodes.Node] = [paragraph(op_link(op)), paragraph(page_context.op_title(env, op), classes=["about"])]
    tile += [paragraph(TAKE, op_link(instead), classes=["sizes"])] if instead else []
    for name in names:
        main = of_gpus.get(name, [])
        lines = [*map(_line, main), paragraph(_conditions(main) if main else UNMEASURED, classes=["sizes"])]
        tile += of_gpu(name, lines, hidden=name != names[0])
    return tile


def _line(item: Summary) -> nodes.Node:
    """Return a line with a benchmark's ratio to PyTorch, to the best other and to the roof, which its bar shows."""
    over, roof = item.beside(PYTORCH), item.over(item.table.of_roof)
    best = item.over(item.table.ratio) if item.table.others != [PYTORCH] else None
    bar = f' style="--roof: {min(roof.median, 1):.3f}"' if roof else ""
    figures = [f"<b>{over.median:.2f}</b> \N{MULTIPLICATION SIGN} PyTorch"] if over else []
    figures += [f"<b>{best.median:.2f}</b> \N{MULTIPLICATION SIGN} best other"] if best else []
    figures += [f"<b>{roof.median:.2f}</b> of the roof"] if roof else []
    return html(f'<p class="speed"{bar}><span>{escape(_name(item))}</span> {", ".join(figures)}</p>')


def _name(item: Summary) -> str:
    """Return the label of a benchmark without its dtype."""
    return verdict.label(item).removeprefix(item.dtype).strip(", ")


def _conditions(main: Sequence[Summary]) -> str:
    """Return in which dtype, at which sizes and with which code the benchmarks of an op were measured."""
    sizes = dict.fromkeys(map(_sizes, main))
    dtypes = dict.fromkeys(item.dtype for item in main if item.dtype)
    return ", ".join([*dtypes, " and ".join(sizes)]) + older(all(item.is_fresh for item in main))


def _sizes(item: Summary) -> str:
    """Return at which size a benchmark was measured, or at how many."""
    indices = item.table.settled
    if len(indices) == 1:
        return where(item, indices[0])
    return f"median of {len(indices)} {'sizes of the lesson' if item.is_page else 'sizes'}"


def shown(env: BuildEnvironment) -> object:
    """Return what the grid shows; for `freshness.depends_on`."""
    titles = [page_context.op_title(env, op) for op in page_context.ops(env)]
    return speeds(env), take_instead(env), titles
