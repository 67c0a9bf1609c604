"""Files of rows: one row for each work at each size that was measured on a device.

A row says when, with which software and of which code it was measured, so that rows of several runs stand in one file.
If the recipe has changed since, the row is stale.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.hashes import hash_of
from triton_gallery.recipe.tables import BYTES, OPERATIONS
from triton_gallery.records.schemas import (
    COMMIT,
    DATE,
    DEVICE,
    HASH,
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

RATE = {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 3, "maxItems": 3}

Key = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One work at one size.

    Attributes:
        recipe: `section/name` of ours.
        work: what was measured: "softmax, forward".
        shape: of the input that counts.
        unit: of the rates, `BYTES` or `OPERATIONS`.
        code: the hash of the recipe's code that was measured.
        device: what executed it.
        date: when its run began, ISO 8601 in UTC.
        commit: the revision of the project, if it was known.
    """

    recipe: str
    work: str
    shape: list[int]
    unit: str
    code: str
    device: Device
    date: str
    commit: str | None

    @property
    def key(self) -> Key:
        """What it is the row of; another one of the same takes its place."""
        return self.recipe, self.work, tuple(self.shape)

    @property
    def size(self) -> str:
        """The shape, as readers see it."""
        return " \N{MULTIPLICATION SIGN} ".join(map(str, self.shape))

    def is_fresh(self, recipes: Sequence[Recipe]) -> bool:
        """Whether the recipe is among these and still has the code that was measured."""
        return any(recipe.key == self.recipe and hash_of(recipe) == self.code for recipe in recipes)


R = TypeVar("R", bound=Row)


class RowFile(Generic[R]):
    """A kind of file in the folders of devices: one for each device, or one for each recipe."""

    def __init__(
        self, name: str, version: int, row: type[R], further: dict[str, Any], optional: Sequence[str] = ()
    ) -> None:
        """Describe it.

        Args:
            name: the file's name in a device's folder; `{}` in it stands for the name of a recipe.
            version: of its schema.
            row: the class of its rows.
            further: the schemas of what a row has beside the fields of every `Row`.
            optional: which of these rows of before have not.
        """
        self.name, self.version, self.row = name, version, row
        of_row = object_of(
            optional=optional,
            recipe={"type": "string", "pattern": "^[a-z0-9_]+/[a-z0-9_]+$"},
            work=TEXT,
            shape={"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
            unit={"enum": [BYTES, OPERATIONS]},
            code=HASH,
            device=DEVICE,
            date=DATE,
            commit=COMMIT,
            **further,
        )
        self.schema = object_of(schema={"const": version}, rows={**list_of(of_row), "minItems": 1})
        self._parsed = cache(self._parse)  # a build asks for them dozens of times

    def load_all(self, folder: Path) -> list[R]:
        """Return the rows of all devices in the folder of records; BadRecordError if a file does not fit."""
        return [row for path in self._files(folder) for row in self.load(path)]

    def load(self, path: Path) -> list[R]:
        """Return the rows in a file; BadRecordError if it does not fit."""
        return list(self._parsed(path, path.read_bytes()))

    def merge(self, folder: Path, rows: Sequence[R], known: Sequence[Key]) -> list[Path]:
        """Put rows of one device into their files, in place of the older ones of the same work and size.

        Args:
            folder: the folder of records.
            rows: what was measured.
            known: what is measured at all, in the order of a file; other rows are dropped.

        Returns:
            The files that were written.

        Raises:
            BadRecordError: if a row or what a file holds does not fit; that file stays as it was.
        """
        device = slug(rows[0].device.name)
        before = {path: self.load(path) for path in self._files(folder, device)}
        found = {row.key: row for row in [*(row for of_file in before.values() for row in of_file), *rows]}
        now = defaultdict[Path, list[R]](list)
        for key in known:
            if key in found:
                now[folder / device / self.name.format(key[0].rpartition("/")[2])].append(found[key])
        changed = [path for path, of_file in now.items() if of_file != before.get(path)]
        for path in changed:
            self.write(path, now[path])
        for path in before.keys() - now.keys():
            path.unlink()
        return changed

    def write(self, path: Path, rows: Sequence[R]) -> None:
        """Write a file of these rows; BadRecordError if one does not fit."""
        content = {"schema": self.version, "rows": [asdict(row) for row in rows]}
        validate(path, content, self.schema)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, dump(content))

    def _files(self, folder: Path, device: str = "*") -> list[Path]:
        return sorted(folder.glob(f"{device}/{self.name.format('*')}"))

    def _parse(self, path: Path, text: bytes) -> Sequence[R]:
        content = parse(path, text)
        validate(path, content, self.schema)
        rows = [self.row(**{**row, "device": Device(**row["device"])}) for row in content["rows"]]
        for name in (row.device.name for row in rows):
            if path.parents[self.name.count("/")].name != slug(name):
                raise BadRecordError(f"{path}: it is that of another device, {name}")
        return rows
