"""Files of rows: one row for each work at each size that was measured on a device.

A row says when, with which software and of which code it was measured, so that rows of several runs stand in one file.
If the recipe has changed since, the row is stale.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from msgspec import Meta, field

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.data import Data, Date, Hash
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.measured import op_hash
from triton_gallery.recipe.tables import BYTES, OPERATIONS
from triton_gallery.records.files import BadRecordError, Commit, decode, slug, write

Key = tuple[Any, ...]  # its first item has the name of the file behind its last slash
Rate = Annotated[list[Annotated[float, Meta(gt=0)]], Meta(min_length=3, max_length=3)]  # median, 20th, 80th percentile


class Row(Data, frozen=True):
    """One work at one size.

    Attributes:
        recipe: `section/name` of ours.
        work: what was measured: "softmax, forward".
        shape: of the input that counts.
        unit: of the rates, `BYTES` or `OPERATIONS`.
        op_hash: that of the recipe's op that was measured, or of all its code where it has none.
        environment: what executed it.
        date: when its run began.
        commit: the revision of the project, if it was known.
    """

    recipe: Annotated[str, Meta(pattern=r"^[a-z0-9_]+/[a-z0-9_]+\Z")]
    work: str
    shape: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)]
    unit: Annotated[str, Meta(pattern=rf"^({BYTES}|{OPERATIONS})\Z")]
    op_hash: Hash = field(name="code")
    environment: Environment = field(name="device")
    date: Date
    commit: Commit | None

    def __post_init__(self) -> None:
        """Refuse what no GPU executed; ValueError."""
        if not self.environment.is_gpu:
            raise ValueError("its device is no GPU")

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """What it is the row of; another one of the same takes its place."""
        return self.recipe, self.work, tuple(self.shape)

    @property
    def size(self) -> str:
        """The shape, as readers see it."""
        return " \N{MULTIPLICATION SIGN} ".join(map(str, self.shape))

    def is_fresh(self, recipes: Sequence[Recipe]) -> bool:
        """Whether the recipe is among these and still has the op that was measured."""
        return any(recipe.key == self.recipe and op_hash(recipe) == self.op_hash for recipe in recipes)


class Measured(Protocol):
    """What all rows have, also those of no recipe."""

    @property
    def key(self) -> Key:
        """What it is the row of; another one of the same takes its place."""

    @property
    def environment(self) -> Environment:
        """What executed it."""


R = TypeVar("R", bound=Measured)


class Rows(Data, Generic[R], frozen=True):
    """What a file of rows holds. Each kind of file is a subclass, with the version of its schema as its tag.

    Attributes:
        file_name: the file's name in a device's folder; `{}` in it stands for the name of a recipe.
    """

    file_name: ClassVar[str]
    rows: Annotated[list[R], Meta(min_length=1)]

    @classmethod
    def load_all(cls, folder: Path) -> list[R]:
        """Return the rows of all devices in the folder of records; BadRecordError if a file does not fit."""
        return [row for path in cls._files(folder) for row in cls.load(path)]

    @classmethod
    def load(cls, path: Path) -> list[R]:
        """Return the rows in a file; BadRecordError if it does not fit."""
        return list(_parsed(cls, path, path.read_bytes()))

    @classmethod
    def merge(cls, folder: Path, rows: Sequence[R], known: Sequence[Key]) -> list[Path]:
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
        device = slug(rows[0].environment.name)
        before = {path: cls.load(path) for path in cls._files(folder, device)}
        by_key = {row.key: row for row in [*(row for of_file in before.values() for row in of_file), *rows]}
        now = defaultdict[Path, list[R]](list)
        for key in known:
            if key in by_key:
                now[folder / device / cls.file_name.format(key[0].rpartition("/")[2])].append(by_key[key])
        changed = [path for path, of_file in now.items() if of_file != before.get(path)]
        for path in changed:
            write(path, cls(now[path]))
        for path in before.keys() - now.keys():
            path.unlink()
        return changed

    @classmethod
    def _files(cls, folder: Path, device: str = "*") -> list[Path]:
        return sorted(folder.glob(f"{device}/{cls.file_name.format('*')}"))


@cache  # a build asks for them dozens of times
def _parsed(kind: type[Rows[Any]], path: Path, text: bytes) -> list[Any]:
    rows = decode(path, text, kind).rows
    for name in (row.environment.name for row in rows):
        if path.parents[kind.file_name.count("/")].name != slug(name):
            raise BadRecordError(f"{path}: it is that of another device, {name}")
    return rows
