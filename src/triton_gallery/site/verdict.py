"""A summary of an op's records: how fast it is beside each library, where it is slower, and its CPU time.

Every number comes from a record. Where two bands overlap, neither side is called faster.
"""

from collections.abc import Iterator, Sequence

from docutils import nodes

from triton_gallery.figures.ratios import MANY, Over, Summary, headline
from triton_gallery.recipe.tables import BYTES, ROOF
from triton_gallery.site import render
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import cpu_times, paragraph, where

FORWARD = "forward"
NOTHING = "Nothing has been measured with the present code."
OLDER = "Beside other libraries, older code than the present was measured."
RATIOS = (
    "A ratio is the op's speed over that of the row: above 1 the op is faster. It is the median of all sizes, with the "
    "worst and the best; from ten sizes on, also with the 10th percentile."
)
EQUAL = (
    "Equal: the ranges of the two, from the 20th to the 80th percentile, overlap. Slower: the op's whole range lies "
    "below that of the row."
)
UNKNOWN = "The spread was not kept, so neither side is called faster."
LAUNCH = "Times are of the GPU, without the launch."
BACKWARD = "Times of the backward leave out the forward."
CPU = (
    "In eager code a call takes at least its CPU time: where the GPU needs less, the CPU time decides. A CUDA graph "
    "takes it away, and so does torch.compile in the mode reduce-overhead, which makes one."
)
ROOFS = {
    True: "Roof: a copy, or an addition, of as many bytes, measured in the same run.",
    False: "Roof: a matrix product of the vendor's library with as many operations, measured in the same run.",
}
UNMEASURED = "\N{EN DASH}"


def table(items: Sequence[Summary]) -> Iterator[nodes.Node]:
    """Yield the tables that summarise the benchmarks of an op: one of all libraries, one of its other workloads."""
    main = headline(items)
    if not main:
        yield paragraph(NOTHING)
        return
    yield paragraph(_conditions(main))
    names = sorted({name for item in main for name in item.table.others}, key=lambda name: _rank(main, name))
    columns = [text for item in main for text in (f"{_name(item)}: ratio", "slower at")]
    rows = [[name, *(text for item in main for text in _cells(item, name))] for name in names]
    rows.append([ROOF, *(text for item in main for text in (_ratio(item.over(item.table.of_roof)), ""))])
    yield render.table(["beside", *columns], [row for row in rows if any(row[1:])], "ratios", "verdict")
    if further := _further(items, main[0]):
        yield further
    elif main[0].is_page and any(not item.is_page for item in items):
        yield paragraph(OLDER)
    yield paragraph(" ".join(_explanations(main)))


def distribution(items: Sequence[Summary]) -> Iterator[nodes.Node]:
    """Yield a table of the ratios to each library over many shapes, on the GPU that stands for the op; or nothing."""
    gpu = next((item.environment.name for item in headline(items)), "")
    fresh = [item for item in items if item.is_fresh and not item.is_page and item.environment.name == gpu]
    many = [item for item in fresh if len(item.table.settled) >= MANY]
    names = list(dict.fromkeys(name for item in many for name in item.table.others))
    if names:
        yield paragraph(f"On {gpu}, the op's speed over each library's: worst, 10th percentile and median.")
        rows = [[f"{label(item)}, {len(item.table.settled)} shapes"] for item in many]
        for row, item in zip(rows, many, strict=True):
            row += [_spread(item.beside(name)) for name in names]
        yield render.table(["beside", *names], rows, "ratios", "distribution")


def label(item: Summary) -> str:
    """Return the name of a benchmark; one without a name is the forward's."""
    return item.work or FORWARD


def cpu(page: RecipePage, items: Sequence[Summary]) -> str:
    """Return a line on the CPU time of a call, the median over the sizes of the recipe's page; empty if unknown."""
    tables = [(label(item), item.table) for item in headline([item for item in items if item.is_page])]
    if not tables and page.table:
        tables = [("of older code:", page.table)] if page.record and not page.record.is_fresh(page.recipe) else []
    if [name for name, _ in tables] == [FORWARD]:
        tables = [("", tables[0][1])]
    texts = [f"{name} {times}".strip() for name, table in tables if (times := cpu_times(table, without=ROOF))]
    return f"CPU time of a call, in microseconds: {'; '.join(texts)}. {CPU}" if texts else ""


def _conditions(main: Sequence[Summary]) -> str:
    """Return on which GPU, in which types and at how many sizes benchmarks were measured."""
    counts = [_count(item) for item in main]
    each = [f"{count} for the {_name(item)}" for item, count in zip(main, counts, strict=True)]
    sizes = counts[0] if len(set(counts)) == 1 else " and ".join(each)
    dtypes = " and ".join(dict.fromkeys(item.dtype for item in main if item.dtype))
    return f"On {' in '.join(filter(None, [main[0].environment.name, dtypes]))}, at {sizes}."


def _count(item: Summary) -> str:
    """Return how many sizes a benchmark has, in words."""
    count = len(item.table.settled)
    if item.is_page:
        return f"{count} of the lesson's sizes"
    return f"{count} {'shape' if count == 1 else 'shapes'} that models use"


def _name(item: Summary) -> str:
    """Return the label of a benchmark without its type."""
    return label(item).removeprefix(item.dtype).strip(", ") if item.dtype else label(item)


def _rank(main: Sequence[Summary], name: str) -> tuple[bool, float]:
    """Return a sort key that puts the closest library first: by the median of the first benchmark that has it."""
    over = next((over for item in main if (over := item.beside(name))), None)
    return (over is None, over.median if over else 0)


def _ratio(over: Over | None) -> str:
    """Format a ratio: its median, the lowest and the highest, and of many the tenth."""
    if over is None:
        return UNMEASURED
    ends = f"{over.worst:.2f}", f"{over.best:.2f}"
    tenth = f"; 10th percentile {over.tenth:.2f}" if len(over.sizes) >= MANY else ""
    return f"{over.median:.2f}{'' if ends[0] == ends[1] else f' ({ends[0]} to {ends[1]}{tenth})'}"


def _spread(over: Over | None) -> str:
    """Format a ratio over many sizes: the lowest, the tenth and the median."""
    if over is None or len(over.sizes) < MANY:
        return UNMEASURED
    return f"{over.worst:.2f}, {over.tenth:.2f}, {over.median:.2f}"


def _cells(item: Summary, name: str) -> tuple[str, str]:
    """Return the cells of a library: our ratio to it, and at how many sizes it is faster."""
    over = item.beside(name)
    if over is None:
        return UNMEASURED, "the GPU waited for the CPU" if any(item.table.cpu_bound.get(name, [])) else ""
    return _ratio(over), "; ".join(_outcome(item, name, over))


def _outcome(item: Summary, name: str, over: Over) -> Iterator[str]:
    """Yield at how many sizes a library is faster than we, and where most; then at how many the two are equal."""
    behind, tied, count = item.behind(name), item.tied(name), len(over.sizes)
    if not any(item.table.p20.values()):
        return
    worst = min(behind, key=lambda index: item.table.over(name, index) or 0, default=None)
    yield f"{len(behind)} of {count}" + ("" if worst is None else f", most at {where(item, worst)}")
    if tied:
        yield f"equal at {len(tied)} of {count}"


def _further(items: Sequence[Summary], first: Summary) -> nodes.Node | None:
    """Return a table of the other workloads on the GPU, each beside its closest library; None if there are none."""
    works: dict[tuple[str, str], dict[bool, Summary]] = {}
    for item in items:
        is_other = item.variant != first.variant and item.environment.name == first.environment.name
        if is_other and item.is_fresh and not (item.is_page or first.is_page) and item.fastest:
            works.setdefault((item.variant, item.dtype), {})[item.is_backward] = item
    if not works:
        return None
    ways = sorted({is_backward for by_way in works.values() for is_backward in by_way})
    columns = ["beside the closest", *("backward" if is_backward else FORWARD for is_backward in ways)]
    rows = [[_work(*work, first), *(_beside(by_way.get(way)) for way in ways)] for work, by_way in works.items()]
    return render.table(columns, rows, "ratios")


def _work(name: str, dtype: str, first: Summary) -> str:
    """Return the name of a workload, with its dtype if that is not the one of the first."""
    name = name.replace("fp16", "float16")
    return name if dtype == first.dtype or dtype in name else f"{name}, {dtype}"


def _beside(item: Summary | None) -> str:
    """Return the cell of a workload: its ratio to the closest library."""
    if item is None or item.fastest is None:
        return UNMEASURED
    ratio, outcome = _cells(item, item.fastest)
    return f"{item.fastest} {ratio}{f'; slower at {outcome}' if outcome else ''}"


def _explanations(main: Sequence[Summary]) -> Iterator[str]:
    """Yield explanations of the words in the table."""
    yield RATIOS
    yield EQUAL if any(any(item.table.p20.values()) for item in main) else UNKNOWN
    if not main[0].is_page and any(item.over(item.table.of_roof) for item in main):
        yield ROOFS[main[0].table.unit == BYTES]
    if not main[0].is_page or any(item.table.cpu for item in main):
        yield LAUNCH
        if any("backward" in item.work for item in main):
            yield BACKWARD
