"""Recorded figures, one by one, and all that is recorded as one object for JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import field

from triton_gallery.libraries.library_rows import LibraryRow, load_all
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.data import Data
from triton_gallery.recipe.tables import TRITON, Figures, Table
from triton_gallery.records.record_store import Record, Records


class Measurement(Data, frozen=True):
    """One recorded figure.

    Attributes:
        recipe: `section/name`.
        table: the variable that held the table.
        x_name: what the benchmark varied.
        x: its value.
        series: who was measured.
        value: the median, in `unit`; more is better.
        p20: the 20th percentile; None if it was not kept.
        p80: the 80th percentile; None if it was not kept.
        unit: the unit of all three.
        cpu_us: the CPU's microseconds for a call; None if they were not kept.
        cpu_bound: whether the GPU had to wait for the CPU, so that the figure is partly the CPU's.
        device: the GPU's name.
        driver: the version of its driver, if it was known.
        torch: the version that ran.
        triton: the version that ran.
        date: of the run, ISO 8601 in UTC.
        commit: the revision of the project, if it was known.
        state: "fresh", or "stale" if the recipe's code has changed since.
    """

    recipe: str
    table: str
    x_name: str
    x: float | str
    series: str
    value: float
    p20: float | None = field(name="low")
    p80: float | None = field(name="high")
    unit: str
    cpu_us: float | None
    cpu_bound: bool = field(name="late")
    device: str
    driver: str | None
    torch: str
    triton: str
    date: str
    commit: str | None
    state: str

    @property
    def place(self) -> tuple[object, ...]:
        """What tells it from the other figures of its record."""
        return self.table, self.x_name, self.x, self.series, self.unit

    @property
    def is_ours(self) -> bool:
        """Whether one of this gallery's kernels was measured."""
        return self.series.split(",")[0] == TRITON

    @property
    def band(self) -> float | None:
        """How far the 20th and the 80th percentile lie apart, relative to the median; None if that was not kept."""
        return None if self.p20 is None or self.p80 is None else (self.p80 - self.p20) / self.value


def all_recorded(records: Records, recipes: Sequence[Recipe]) -> dict[str, list[dict[str, Any]]]:
    """Return all that is recorded of recipes, for JSON; BadRecordError if a file does not fit.

    Under `figures` stand those of the recipes' own benchmarks, a `Measurement` each; under `libraries` the rows beside
    other libraries, each with the rates of all.
    """
    keys = {recipe.key for recipe in recipes}
    rows = [row for row in load_all(records.folder) if row.recipe in keys]
    return {
        "figures": msgspec.to_builtins(measurements(records, recipes)),
        "libraries": [_of_libraries(row, "fresh" if row.is_fresh(recipes) else "stale") for row in rows],
    }


def measurements(records: Records, recipes: Sequence[Recipe]) -> list[Measurement]:
    """Return every recorded figure of the recipes; BadRecordError if a record does not fit."""
    figures = []
    for recipe in recipes:
        for record in records.of(recipe):
            figures += of_record(record, "fresh" if record.is_fresh(recipe) else "stale")
    return figures


def of_record(record: Record, state: str) -> list[Measurement]:
    """Return the figures of one record."""
    tables = [table for output in record.outputs for table in output.tables]
    return [
        _of_place(record, state, table, name, index, value)
        for table in tables
        for name, values in table.series.items()
        for index, value in enumerate(values)
        if value is not None
    ]


def _of_libraries(row: LibraryRow, state: str) -> dict[str, Any]:
    """Return a row beside other libraries as an object whose fields are called as those of a `Measurement`."""
    return {
        "recipe": row.recipe,
        "work": row.work,
        "shape": row.shape,
        "unit": row.unit,
        "rates": {
            name: rate and dict(zip(("value", "low", "high"), rate, strict=True)) for name, rate in row.rates.items()
        },
        "ratio": row.table.ratio(0),  # ours over the best other's
        "cpu_us": row.cpu_us,
        "first_call_s": row.first_call_s,
        "device": row.environment.name,
        "driver": row.environment.driver,
        "torch": row.environment.torch,
        "triton": row.environment.triton,
        "packages": row.packages,
        "date": row.date,
        "commit": row.commit,
        "state": state,
    }


def _of_place(record: Record, state: str, table: Table, name: str, index: int, value: float) -> Measurement:
    def kept(figures: Figures) -> float | None:
        return figures[name][index] if name in figures else None

    return Measurement(
        recipe=record.key,
        table=table.name,
        x_name=table.x,
        x=table.xs[index],
        series=name,
        value=value,
        p20=kept(table.p20),
        p80=kept(table.p80),
        unit=table.unit,
        cpu_us=kept(table.cpu),
        cpu_bound=table.is_cpu_bound(name, index),
        device=record.environment.name,
        driver=record.environment.driver,
        torch=record.environment.torch,
        triton=record.environment.triton,
        date=record.date,
        commit=record.commit,
        state=state,
    )
