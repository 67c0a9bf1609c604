"""Recorded figures, one a row."""

from collections.abc import Sequence
from dataclasses import dataclass

from triton_gallery.recipes import Recipe
from triton_gallery.records import Record, Records


@dataclass(frozen=True)
class Row:
    """One recorded figure.

    Attributes:
        recipe: `section/name`.
        table: the variable that held the table.
        x_name: what the benchmark varied.
        x: its value.
        series: who was measured.
        value: the figure, in `unit`; more is better.
        device: the GPU's name.
        state: "fresh", or "stale" if the recipe's code has changed since.
    """

    recipe: str
    table: str
    x_name: str
    x: float | str
    series: str
    value: float
    unit: str
    device: str
    state: str


def rows(records: Records, recipes: Sequence[Recipe]) -> list[Row]:
    """Return every recorded figure of the recipes; BadRecordError if a record does not fit."""
    found = []
    for recipe in recipes:
        for record in records.of(recipe):
            found += of_record(record, "fresh" if record.is_fresh(recipe) else "stale")
    return found


def of_record(record: Record, state: str) -> list[Row]:
    """Return the figures of one record."""
    return [
        Row(record.key, table.name, table.x, x, name, value, table.unit, record.device.name, state)
        for output in record.outputs
        for table in output.tables
        for name, values in table.series.items()
        for x, value in zip(table.xs, values, strict=True)
        if value is not None
    ]
