"""What a benchmark comes to: its middle size, and how its ratios lie over all sizes that the CPU did not decide."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from triton_gallery.libraries.library_rows import LibraryRow, table_of
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.tables import Table
from triton_gallery.records.record_store import Record

BESIDE = "beside libraries"
MANY = 10  # from so many sizes on, one or more are a tenth of them
DRAWN = re.compile(r"\bdrawn\b.*?(?=(, (forward|backward))?$)")  # one draw of sizes: its seed, and what else it has


@dataclass(frozen=True)
class Over:
    """A ratio over the sizes of a benchmark: how its values lie, and at which sizes it was measured.

    Attributes:
        median: of all sizes.
        tenth: that which a tenth of the sizes, rounded down, lie below.
        worst: the lowest.
        best: the highest.
        at: the index of the size of the lowest.
        sizes: the indices of all.
    """

    median: float
    tenth: float
    worst: float
    best: float
    at: int
    sizes: list[int]


@dataclass(frozen=True)
class Summary:
    """A benchmark of a recipe on a device.

    Attributes:
        recipe: of what.
        kind: what tells it from the recipe's other benchmarks.
        table: the figures.
        environment: in which they were measured.
        date: when; of several runs, when the first began.
        is_fresh: whether all of them are of the recipe's present code.
        is_page: whether they are those of the recipe's page, and not of `make libraries`.
        dtype: of the tensors; empty if it was not kept, or is not the same at all sizes.
    """

    recipe: Recipe
    kind: str
    table: Table
    environment: Environment
    date: str
    is_fresh: bool
    is_page: bool
    dtype: str = ""

    @property
    def work(self) -> str:
        """What was measured, without who measured it; empty if it is the op itself."""
        return self.kind.removesuffix(BESIDE).strip(", ")

    @property
    def is_backward(self) -> bool:
        """Whether gradients were computed."""
        return bool(re.search(r"backward|gradient", self.work))

    @property
    def variant(self) -> str:
        """What the work and that with the gradients have in common; empty if it is the op itself."""
        return re.sub(r"\bforward|backward|\band gradients?", "", self.work).strip(", ")

    @property
    def middle(self) -> int:
        """The index of the size that is shown alone: the middle one, the larger of two."""
        return self.table.settled[len(self.table.settled) // 2]

    def over(self, ratio: Callable[[int], float | None]) -> Over | None:
        """Return a ratio over the sizes, given what tells it at an index; None if there is none anywhere."""
        found = {index: value for index in self.table.settled if (value := ratio(index))}
        if not found:
            return None
        values = list(found.values())
        at = min(found, key=found.__getitem__)
        return Over(median(values), tenth(values), found[at], max(values), at, list(found))

    def beside(self, other: str) -> Over | None:
        """Return our speed over a library's; None if it was measured nowhere."""
        return self.over(partial(self.table.over, other))

    def behind(self, other: str) -> list[int]:
        """Return the indices of the sizes at which a library is faster: ours is below it, and their bands are apart."""
        table = self.table
        slower = [index for index in table.settled if (table.over(other, index) or 1) < 1]
        return [index for index in slower if not table.is_tie(other, index)]

    def tied(self, other: str) -> list[int]:
        """Return the indices of the sizes at which the two bands overlap, or are not known."""
        over = self.beside(other)
        return [index for index in over.sizes if self.table.is_tie(other, index)] if over else []

    @property
    def fastest(self) -> str | None:
        """The name of who comes closest to us or passes us, in the median over the sizes; None if there is nobody."""
        medians = {name: over.median for name in self.table.others if (over := self.beside(name))}
        return min(medians, key=medians.__getitem__) if medians else None


def summaries(records: Sequence[Record], rows: Sequence[LibraryRow], recipe: Recipe) -> Iterator[Summary]:
    """Yield the benchmarks of a recipe on all devices: those of its page, then its works beside other libraries.

    Works whose sizes are drawn are one.

    Args:
        records: the recipe's.
        rows: of any recipes.
        recipe: the recipe.
    """
    for record in records:
        for table in (table for output in record.outputs for table in output.tables):
            yield Summary(recipe, table.kind, table, record.environment, record.date, record.is_fresh(recipe), True)
    groups = defaultdict[tuple[str, str], list[LibraryRow]](list)
    for row in rows:
        if row.recipe == recipe.key:
            groups[row.environment.name, pooled(row.work)].append(row)
    for (_, name), work_rows in groups.items():
        kind = f"{name.removeprefix(recipe.name).strip(', ')}, {BESIDE}".removeprefix(", ")
        fresh = all(row.is_fresh([recipe]) for row in work_rows)
        date = min(row.date for row in work_rows)
        dtypes = {row.dtype for row in work_rows}
        dtype = dtypes.pop() if len(dtypes) == 1 else ""
        yield Summary(recipe, kind, table_of(work_rows), work_rows[0].environment, date, fresh, False, dtype)


def pooled(work: str) -> str:
    """Return the name of a work without what tells one draw of sizes from another."""
    return DRAWN.sub("drawn", work)


def tenth(ratios: Sequence[float]) -> float:
    """Return the ratio that a tenth of all, rounded down, lie below."""
    return sorted(ratios)[len(ratios) // 10]


def headline(items: Sequence[Summary], or_older: bool = False) -> list[Summary]:
    """Return the benchmarks that stand for an op: its forward, then the same with the gradients if it was measured.

    They are of the present code and one device: beside other libraries if that was measured, else those of its page.
    Among devices, that of its page comes first; among works, the op itself.

    Args:
        items: the benchmarks.
        or_older: whether those of older code stand for an op that has none of the present code.
    """
    device = next((item.environment.name for item in items if item.is_page), "")
    known = [item for item in items if item.fastest or item.over(item.table.of_roof)]
    fresh = [item for item in known if item.is_fresh]
    if or_older and not fresh:
        fresh = known
    if not fresh:
        return []

    def rank(item: Summary) -> tuple[bool, bool, bool, bool]:
        return item.is_page, item.environment.name != device, item.is_backward, item.variant != ""

    def group(item: Summary) -> tuple[bool, str, str]:
        return item.is_page, item.environment.name, item.variant

    first = min(fresh, key=rank)
    backwards = [item for item in fresh if item.is_backward and item is not first and group(item) == group(first)]
    return [first, *backwards[:1]]
