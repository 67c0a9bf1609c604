"""What the records of an op come to: how fast it is beside each library, where it loses, what it costs the CPU.

Every number comes from a record. Where two bands overlap, neither side is called faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from docutils import nodes

from triton_gallery.recipes.tables import ROOF, Table
from triton_gallery.records.summary import Over, Summary, headline
from triton_gallery.sphinx.lookup import RecipePage
from triton_gallery.sphinx.show import figure, where

FORWARD = "forward"
NOTHING = "Nothing has been measured with the present code."
OLDER = "Beside other libraries, older code than the present was measured."


def sentences(items: Sequence[Summary]) -> Iterator[nodes.paragraph]:
    """Yield what the benchmarks of an op come to: a paragraph for the forward, and one for the gradients."""
    found = headline(items)
    places = [f"on {item.device.name}{_kind(item)}, over {_sizes(item)}, median " for item in found]
    for number, (item, place) in enumerate(zip(found, places, strict=True)):
        name, told = label(item), place if place not in places[:number] else ""
        text = f": {told}{_speeds(item)}. {_losses(item)}"
        yield nodes.paragraph("", "", nodes.strong("", name[0].upper() + name[1:]), nodes.Text(text))
    if not found:
        yield nodes.paragraph("", NOTHING)
    elif found[0].is_page and any(not item.is_page for item in items):
        yield nodes.paragraph("", OLDER)


def label(item: Summary) -> str:
    """Return what is said of a benchmark: one without a name is the forward's."""
    return item.work or FORWARD


def short(item: Summary) -> str:
    """Return our speed over that of the fastest library, and its name."""
    over = item.beside(item.fastest) if item.fastest else None
    return f"{over.median:.2f} \N{MULTIPLICATION SIGN} {item.fastest}" if over else ""


def cpu(page: RecipePage, items: Sequence[Summary]) -> str:
    """Say what a call takes of the CPU, each way, the median over the sizes of the recipe's page; empty if unknown."""
    tables = [(label(item), item.table) for item in headline([item for item in items if item.is_page])]
    if not tables and page.table:
        tables = [("of older code:", page.table)] if page.record and not page.record.is_fresh(page.recipe) else []
    if [name for name, _ in tables] == [FORWARD]:
        tables = [("", tables[0][1])]
    told = [f"{name} {times}".strip() for name, table in tables if (times := _times(table))]
    return f"CPU time of a call, in microseconds: {'; '.join(told)}." if told else ""


def _times(table: Table) -> str:
    times = {name: [time for time in values if time is not None] for name, values in table.cpu.items() if name != ROOF}
    return " · ".join(f"{name} {figure(median(values))}" for name, values in times.items() if values)


def _kind(item: Summary) -> str:
    """Say in which type a benchmark was measured, if its name does not."""
    return f" in {item.dtype}" if item.dtype and item.dtype not in label(item) else ""


def _sizes(item: Summary) -> str:
    """Say at how many sizes a benchmark was measured, without those at which the CPU decided a figure."""
    count = len(item.table.settled)
    size = "size" if item.is_page else "shape"
    return f"{count} {size}{'s' if count > 1 else ''}{' of the lesson' if item.is_page else ''}"


def _speeds(item: Summary) -> str:
    """Say how fast the op is beside each library and the roof: the median ratio, and the lowest and the highest."""
    said: list[str] = []
    for name in item.table.others:
        if over := item.beside(name):
            few = f" at {len(over.sizes)}" if len(over.sizes) < len(item.table.settled) else ""
            said.append(f"{over.median:.2f} times {'' if said else 'the speed of '}{name}{few}{_span(over)}")
    parts = [", ".join(said)] if said else []
    if roof := item.over(item.table.of_roof):
        parts.append(f"{roof.median:.2f} of the roof{_span(roof)}")
    return "; ".join(parts)


def _span(over: Over) -> str:
    ends = f"{over.worst:.2f}", f"{over.best:.2f}"
    return "" if ends[0] == ends[1] else f" ({' to '.join(ends)})"


def _losses(item: Summary) -> str:
    """Say at how many sizes which library is faster, and with which there is a tie."""
    table = item.table
    measured = {name: len(over.sizes) for name in table.others if (over := item.beside(name))}
    waited = [name for name in table.others if name not in measured and any(table.late.get(name, []))]
    said = [f"Where {' or '.join(waited)} was measured, the GPU waited for the CPU."] if waited else []
    if measured and not any(table.low.values()):
        said.append("The spread was not kept, so neither side is called faster.")
    elif measured:
        behind = {name: item.behind(name) for name in measured}
        lost = [(table.over(name, at) or 0, at, name) for name, places in behind.items() for at in places]
        if lost:
            ratio, at, name = min(lost)
            said.append(
                f"Slower than {_counts(behind, measured)}; at worst {ratio:.2f} times {name}, at {where(item, at)}."
            )
        else:
            said.append(f"No library is faster at any of these {'sizes' if item.is_page else 'shapes'}.")
        tied = {name: item.tied(name) for name in measured}
        said += [f"Equal within the spread: {_counts(tied, measured)}."] if any(tied.values()) else []
    return " ".join(said)


def _counts(places: Mapping[str, Sequence[int]], of: Mapping[str, int]) -> str:
    return ", ".join(f"{name} at {len(found)} of {of[name]}" for name, found in places.items() if found)
