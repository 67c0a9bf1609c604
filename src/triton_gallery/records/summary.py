"""What a benchmark comes to: its middle size, and how its ratios lie over all sizes that the CPU did not decide."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from triton_gallery.recipes.contents import Recipe
from triton_gallery.recipes.tables import Table
from triton_gallery.records.formats import Device
from triton_gallery.records.peers import PeerRow, table_of
from triton_gallery.records.recorded import Record

BESIDE = "beside libraries"


@dataclass(frozen=True)
class Over:
    """A ratio over the sizes of a benchmark: its median, its worst value, and the index of the size of that."""

    median: float
    worst: float
    at: int


@dataclass(frozen=True)
class Summary:
    """A benchmark of a recipe on a device.

    Attributes:
        recipe: of what.
        kind: what tells it from the recipe's other benchmarks.
        table: the figures.
        device: where they were measured.
        date: when; of several runs, when the first began.
        is_fresh: whether all of them are of the recipe's present code.
        is_page: whether they are those of the recipe's page, and not of `make peers`.
    """

    recipe: Recipe
    kind: str
    table: Table
    device: Device
    date: str
    is_fresh: bool
    is_page: bool

    @property
    def middle(self) -> int:
        """The index of the size that is shown alone: the middle one, the larger of two."""
        return self.table.settled[len(self.table.settled) // 2]

    def over(self, ratio: Callable[[int], float | None]) -> Over | None:
        """Return a ratio over the sizes, given what tells it at an index; None if there is none anywhere."""
        found = [(value, index) for index in self.table.settled if (value := ratio(index))]
        return Over(median(value for value, _ in found), *min(found)) if found else None


def summaries(records: Sequence[Record], rows: Sequence[PeerRow], recipe: Recipe) -> Iterator[Summary]:
    """Yield the benchmarks of a recipe on all devices: those of its page, then its works beside other libraries.

    Args:
        records: the recipe's.
        rows: of any recipes.
        recipe: the recipe.
    """
    for record in records:
        for table in (table for output in record.outputs for table in output.tables):
            yield Summary(recipe, table.kind, table, record.device, record.date, record.is_fresh(recipe), True)
    of_recipe = (row for row in rows if row.recipe == recipe.key)
    for (_, name), group in groupby(of_recipe, key=lambda row: (row.device.name, row.work)):
        there = list(group)
        kind = f"{name.removeprefix(recipe.name).strip(', ')}, {BESIDE}".removeprefix(", ")
        fresh = all(row.is_fresh([recipe]) for row in there)
        date = min(row.date for row in there)
        yield Summary(recipe, kind, table_of(there), there[0].device, date, fresh, False)
