"""Figures of our ops beside other libraries', and the only module that knows their format.

`docs/_records/<device>/ops/<recipe>.json` holds a row for each work of a recipe at each size that
`measure.py` measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from triton_gallery.recipe.tables import TRITON, Table
from triton_gallery.records.rows import RATE, Row, RowFile
from triton_gallery.records.schemas import OPS, PACKAGES, TEXT

SCHEMA_VERSION = 2
_RATES = {
    "type": "object",
    "properties": {TRITON: RATE},
    "required": [TRITON],
    "additionalProperties": {"anyOf": [{"type": "null"}, RATE]},
}


@dataclass(frozen=True)
class PeerRow(Row):
    """One work at one size, through several libraries.

    Attributes:
        packages: the versions of the other libraries.
        rates: by the name of who was measured: the median and the 20th and 80th percentile of the rate; None where
            there is none.
        dtype: of the tensors; empty if it was not kept.
    """

    packages: dict[str, str]
    rates: dict[str, list[float] | None]
    dtype: str = ""

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


def table_of(rows: Sequence[PeerRow]) -> Table:
    """Return rows of one work as a benchmark's table, the smallest size first."""
    rows = sorted(rows, key=lambda row: math.prod(row.shape))
    names = list(dict.fromkeys(name for row in rows for name in row.rates))

    def of(place: int) -> dict[str, list[float | None]]:
        return {name: [rate[place] if (rate := row.rates.get(name)) else None for row in rows] for name in names}

    return Table("results", "size", rows[0].unit, [row.size for row in rows], of(0), low=of(1), high=of(2))


_FILE = RowFile(
    f"{OPS}/{{}}.json", SCHEMA_VERSION, PeerRow, {"packages": PACKAGES, "rates": _RATES, "dtype": TEXT}, ["dtype"]
)
load_all, merge = _FILE.load_all, _FILE.merge
