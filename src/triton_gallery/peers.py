"""Figures of our ops beside other libraries', and the only module that knows their format.

`docs/_records/<device>/peers.json` holds one run of `benchmarks/peers.py` on that device. Each of its rows names the
code of the recipe that it measured; if that has changed since, the row is stale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from triton_gallery.device import Environment
from triton_gallery.formats import (
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
from triton_gallery.recipes import Recipe, hash_of
from triton_gallery.tables import TRITON, Table

SCHEMA_VERSION = 1
FILE = "peers.json"
UNIT = "GB/s"

_RATE = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 3, "maxItems": 3}
_ROW = object_of(
    recipe={"type": "string", "pattern": "^[a-z0-9_]+/[a-z0-9_]+$"},
    work=TEXT,
    shape={"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
    code=HASH,
    rates={
        "type": "object",
        "properties": {TRITON: _RATE},
        "required": [TRITON],
        "additionalProperties": {"anyOf": [{"type": "null"}, _RATE]},
    },
)
_SCHEMA = object_of(
    schema={"const": SCHEMA_VERSION},
    device=DEVICE,
    date=DATE,
    commit=COMMIT,
    packages=PACKAGES,
    rows={**list_of(_ROW), "minItems": 1},
)


@dataclass(frozen=True)
class Row:
    """One work at one size, through several libraries.

    Attributes:
        recipe: `section/name` of ours.
        work: what was measured: "softmax, forward".
        shape: of the input that counts.
        code: the hash of the recipe's code that was measured.
        rates: in `UNIT`, by the name of who was measured: the median and the 20th and 80th percentile of the rate;
            None where there is none.
    """

    recipe: str
    work: str
    shape: list[int]
    code: str
    rates: dict[str, list[float] | None]

    def is_fresh(self, recipes: Sequence[Recipe]) -> bool:
        """Whether the recipe is among these and still has the code that was measured."""
        return any(recipe.key == self.recipe and hash_of(recipe) == self.code for recipe in recipes)

    @property
    def table(self) -> Table:
        """The medians, as a benchmark's table of one line."""
        medians: dict[str, list[float | None]] = {
            name: [rate[0] if rate else None] for name, rate in self.rates.items()
        }
        return Table("results", "size", UNIT, [" x ".join(map(str, self.shape))], medians)

    @property
    def is_tie(self) -> bool:
        """Whether the bands of ours and of the best other, from the 20th to the 80th percentile, overlap."""
        table = self.table
        other = table.best(table.others, 0)
        ours, theirs = self.rates[TRITON], self.rates[other[0]] if other else None
        return bool(ours and theirs and ours[1] <= theirs[2] and theirs[1] <= ours[2])


@dataclass(frozen=True)
class Peers:
    """A run that measured several libraries on one device.

    Attributes:
        path: the file.
        device: what executed it.
        date: when it began, ISO 8601 in UTC.
        commit: the revision of the project, if it was known.
        packages: the versions of the other libraries.
        rows: the figures.
    """

    path: Path
    device: Device
    date: str
    commit: str | None
    packages: dict[str, str]
    rows: list[Row]

    def stale(self, recipes: Sequence[Recipe]) -> list[Row]:
        """Return the rows whose recipe has changed since, or is not among these."""
        return [row for row in self.rows if not row.is_fresh(recipes)]


def load_all(folder: Path) -> list[Peers]:
    """Return the runs in the folder of records, one for each device; BadRecordError if one does not fit."""
    return [load(path) for path in sorted(folder.glob(f"*/{FILE}"))]


def load(path: Path) -> Peers:
    """Return the run in a file; BadRecordError if it does not fit."""
    content = parse(path, path.read_bytes())
    validate(path, content, _SCHEMA)
    if path.parent.name != slug(content["device"]["name"]):
        raise BadRecordError(f"{path}: it is that of another device, {content['device']['name']}")
    fields = {name: value for name, value in content.items() if name != "schema"}
    rows = [Row(**row) for row in content["rows"]]
    return Peers(**{**fields, "path": path, "device": Device(**content["device"]), "rows": rows})


def write(
    folder: Path,
    environment: Environment,
    date: str,
    commit: str | None,
    packages: Mapping[str, str],
    rows: Sequence[Row],
) -> Path:
    """Write a run into the folder of records, in place of the device's older one; BadRecordError if it does not fit."""
    path = folder / slug(environment.name) / FILE
    content = {
        "schema": SCHEMA_VERSION,
        "device": environment.kind,
        "date": date,
        "commit": commit,
        "packages": dict(packages),
        "rows": [asdict(row) for row in rows],
    }
    validate(path, content, _SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, dump(content))
    return path
