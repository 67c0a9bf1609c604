"""Figures of our ops beside other libraries', and the only module that knows their format.

`docs/_records/<device>/ops/<recipe>.json` holds a row for each work of a recipe at each size that
`measure.py` measured.
"""

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, field

from triton_gallery.recipe.tables import TRITON, Figures, Table
from triton_gallery.records.files import OPS
from triton_gallery.records.rows import Rate, Row, Rows


class LibraryRow(Row, frozen=True):
    """One work at one size, through several libraries.

    Attributes:
        packages: the versions of the other libraries.
        rates: by the name of who was measured; None where there is none.
        dtype: of the tensors; empty if it was not kept.
        cpu_us: the CPU's microseconds for a call, by the same names; empty if they were not kept.
        first_call_s: the seconds of the first call of ours and of torch.compile's function, which compiles; in a
            recipe's first row each way alone.
    """

    packages: dict[str, str]
    rates: dict[str, Rate | None]
    dtype: str = ""  # which older files have not
    cpu_us: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)  # nor these
    first_call_s: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)  # nor these

    def __post_init__(self) -> None:
        """Refuse a row without a rate of ours; ValueError."""
        super().__post_init__()
        if self.rates.get(TRITON) is None:
            raise ValueError(f"it has no rate of {TRITON}")

    @property
    def table(self) -> Table:
        """The medians, as a benchmark's table of one line."""
        return table_of([self])

    @property
    def is_tie(self) -> bool:
        """Whether the bands of ours and of the best other, from the 20th to the 80th percentile, overlap."""
        table = self.table
        other = table.best(table.others, 0)
        return other is not None and table.is_tie(other[0], 0)


def table_of(rows: Sequence[LibraryRow]) -> Table:
    """Return rows of one work as a benchmark's table, the smallest size first."""
    rows = sorted(rows, key=lambda row: math.prod(row.shape))
    names = list(dict.fromkeys(name for row in rows for name in row.rates))

    def series(place: int) -> Figures:
        return {name: [rate[place] if (rate := row.rates.get(name)) else None for row in rows] for name in names}

    return Table("results", "size", rows[0].unit, [row.size for row in rows], series(0), series(1), series(2), {}, {})


class PeerRows(Rows[LibraryRow], frozen=True, tag_field="schema", tag=2):
    """What a file holds."""

    file_name = f"{OPS}/{{}}.json"


load_all, merge = PeerRows.load_all, PeerRows.merge
