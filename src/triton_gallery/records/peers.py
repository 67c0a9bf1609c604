"""Figures of our ops beside other libraries', and the only module that knows their format.

`docs/_records/<device>/peers.json` holds one row for each work at each size that `benchmarks/measure_peers.py` measured
on that device. A row says when, with which software and of which code it was measured, so that rows of several runs
stand in one file. If the recipe has changed since, the row is stale.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triton_gallery.recipes.contents import Recipe
from triton_gallery.recipes.hashes import hash_of
from triton_gallery.recipes.tables import TRITON, Table
from triton_gallery.records.formats import (
    COMMIT,
    DATE,
    DEVICE,
    HASH,
    PACKAGES,
    TEXT,
    BadRecordError,
    Device,
    dump,
    list_of,
    object_of,
    parse,
    replace,
    slug,
    validate,
)

SCHEMA_VERSION = 2
FILE = "peers.json"
BYTES, OPERATIONS = "GB/s", "TFLOP/s"

_RATE = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 3, "maxItems": 3}
_ROW = object_of(
    recipe={"type": "string", "pattern": "^[a-z0-9_]+/[a-z0-9_]+$"},
    work=TEXT,
    shape={"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
    unit={"enum": [BYTES, OPERATIONS]},
    code=HASH,
    device=DEVICE,
    date=DATE,
    commit=COMMIT,
    packages=PACKAGES,
    rates={
        "type": "object",
        "properties": {TRITON: _RATE},
        "required": [TRITON],
        "additionalProperties": {"anyOf": [{"type": "null"}, _RATE]},
    },
)
_SCHEMA = object_of(schema={"const": SCHEMA_VERSION}, rows={**list_of(_ROW), "minItems": 1})
_SCHEMA_1 = object_of(
    schema={"const": 1}, device=DEVICE, date=DATE, commit=COMMIT, packages=PACKAGES, rows=list_of({"type": "object"})
)

Key = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class PeerRow:
    """One work at one size, through several libraries.

    Attributes:
        recipe: `section/name` of ours.
        work: what was measured: "softmax, forward".
        shape: of the input that counts.
        unit: of the rates, `BYTES` or `OPERATIONS`.
        code: the hash of the recipe's code that was measured.
        device: what executed it.
        date: when its run began, ISO 8601 in UTC.
        commit: the revision of the project, if it was known.
        packages: the versions of the other libraries.
        rates: by the name of who was measured: the median and the 20th and 80th percentile of the rate; None where
            there is none.
    """

    recipe: str
    work: str
    shape: list[int]
    unit: str
    code: str
    device: Device
    date: str
    commit: str | None
    packages: dict[str, str]
    rates: dict[str, list[float] | None]

    @property
    def key(self) -> Key:
        """What it is the row of; another one of the same takes its place."""
        return self.recipe, self.work, tuple(self.shape)

    @property
    def size(self) -> str:
        """The shape, as readers see it."""
        return " \N{MULTIPLICATION SIGN} ".join(map(str, self.shape))

    @property
    def table(self) -> Table:
        """The medians, as a benchmark's table of one line."""
        return table_of([self])

    @property
    def is_tie(self) -> bool:
        """Whether the bands of ours and of the best other, from the 20th to the 80th percentile, overlap."""
        table = self.table
        other = table.best(table.others, 0)
        ours, theirs = self.rates[TRITON], self.rates[other[0]] if other else None
        return bool(ours and theirs and ours[1] <= theirs[2] and theirs[1] <= ours[2])

    def is_fresh(self, recipes: Sequence[Recipe]) -> bool:
        """Whether the recipe is among these and still has the code that was measured."""
        return any(recipe.key == self.recipe and hash_of(recipe) == self.code for recipe in recipes)


def table_of(rows: Sequence[PeerRow]) -> Table:
    """Return the medians of rows of one work as a benchmark's table, the smallest size first."""
    rows = sorted(rows, key=lambda row: math.prod(row.shape))
    series: dict[str, list[float | None]] = {
        name: [rate[0] if (rate := row.rates.get(name)) else None for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row.rates)
    }
    return Table("results", "size", rows[0].unit, [row.size for row in rows], series)


def load_all(folder: Path) -> list[PeerRow]:
    """Return the rows of all devices in the folder of records; BadRecordError if a file does not fit."""
    return [row for path in sorted(folder.glob(f"*/{FILE}")) for row in load(path)]


def load(path: Path) -> list[PeerRow]:
    """Return the rows in a file; BadRecordError if it does not fit."""
    return list(_parse(path, path.read_bytes()))


@cache  # a build asks for them dozens of times
def _parse(path: Path, text: bytes) -> Sequence[PeerRow]:
    content = _migrate(path, parse(path, text))
    validate(path, content, _SCHEMA)
    rows = [PeerRow(**{**row, "device": Device(**row["device"])}) for row in content["rows"]]
    for name in (row.device.name for row in rows):
        if path.parent.name != slug(name):
            raise BadRecordError(f"{path}: it is that of another device, {name}")
    return rows


def merge(folder: Path, rows: Sequence[PeerRow], known: Sequence[Key]) -> Path:
    """Put rows of one device into its file, in place of the older ones of the same work and size.

    Args:
        folder: the folder of records.
        rows: what was measured.
        known: what is measured at all, in the order of the file; other rows are dropped from it.

    Raises:
        BadRecordError: if a row or what the file holds does not fit; the file stays as it was.
    """
    path = folder / slug(rows[0].device.name) / FILE
    found = {row.key: row for row in [*(load(path) if path.is_file() else []), *rows]}
    write(path, [found[key] for key in known if key in found])
    return path


def write(path: Path, rows: Sequence[PeerRow]) -> None:
    """Write a file of these rows; BadRecordError if one does not fit."""
    content = {"schema": SCHEMA_VERSION, "rows": [asdict(row) for row in rows]}
    validate(path, content, _SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, dump(content))


def _migrate(path: Path, content: Any) -> Any:
    """Return a file of version 1 as one of this version: it held one run, whose unit was GB/s."""
    if not isinstance(content, dict) or content.get("schema") != 1:
        return content
    validate(path, content, _SCHEMA_1)
    run = {name: value for name, value in content.items() if name not in {"schema", "rows"}}
    return {"schema": SCHEMA_VERSION, "rows": [{**row, "unit": BYTES, **run} for row in content["rows"]]}
