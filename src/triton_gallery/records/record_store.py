"""Recorded outputs of recipes, and the only module that knows their format.

`docs/_records/<device>/<section>/<recipe>.json` holds what a run on that device put out, cell by cell; the figures lie
beside it. The name of a figure tells its content, so that no other run's takes its place: until the file is replaced
the old record is whole, and from then on the new one.

A record counts while the code that its measurements depend on is the same; of older code it is stale. Records are data
from elsewhere: one that does not fit the schema is refused, and nothing in one is ever executed.
"""

import hashlib
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field, structs

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.data import Hash
from triton_gallery.recipe.hashes import code_hash, hash_of
from triton_gallery.recipe.measured import measured_hash
from triton_gallery.recipe.outputs import Execution
from triton_gallery.records.files import OPS, BadRecordError, Commit, decode, encode, replace, slug, write
from triton_gallery.records.git import file_at
from triton_gallery.records.page_cache import Run

TOOLS = ["memcheck", "racecheck", "initcheck"]
FIRST = [
    "schema",
    "code",
    "measured",
    "device",
    "date",
    "commit",
    "seconds",
    "packages",
    "sanitized",
]  # of the keys in a file
FIGURE = re.compile(r"[A-Za-z0-9_]+\.png")


class RecordFile(Execution, frozen=True, kw_only=True, tag_field="schema", tag=2):
    """What the file of a record holds.

    Attributes:
        recipe_hash: that of the recipe's code that ran.
        measured_hash: that of the part which its measurements depend on; records of before have none.
        commit: the revision of the project, if it was known.
        sanitized: the tools of compute-sanitizer under which its checks ran without an error.
    """

    recipe_hash: Hash = field(name="code")
    measured_hash: Hash | UnsetType = field(name="measured", default=UNSET)
    commit: Commit | None
    sanitized: list[Annotated[str, Meta(pattern=rf"^({'|'.join(TOOLS)})\Z")]]

    def __post_init__(self) -> None:
        """Refuse what no recipe puts out on a GPU; ValueError."""
        super().__post_init__()
        if not self.environment.is_gpu:
            raise ValueError("its device is no GPU")
        if code_hash(output.cell_hash for output in self.outputs) != self.recipe_hash:
            raise ValueError("the hash of its code is not that of its cells")
        for output in self.outputs:
            if wrong := [name for name in output.figures if not FIGURE.fullmatch(name)]:
                raise ValueError(f"{wrong[0]!r} is no name of a figure")
            if output.frame and any(len(row) != len(output.frame.columns) for row in output.frame.rows):
                raise ValueError("a row of a frame is not as long as its columns")
            for table in output.tables:
                if table.fault:
                    raise ValueError(f"{table.name}: {table.fault}")


class Record(RecordFile, frozen=True, kw_only=True):
    """A recorded run.

    Attributes:
        path: the file.
    """

    path: Path

    @property
    def key(self) -> str:
        """`section/name` of the recipe."""
        return f"{self.path.parent.name}/{self.path.stem}"

    def is_fresh(self, recipe: Recipe) -> bool:
        """Whether what the recipe's measurements depend on is still the code that was recorded."""
        if self.measured_hash is UNSET:
            return self.recipe_hash == hash_of(recipe)
        return self.measured_hash == measured_hash(recipe)


class Records:
    """The folder of records."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, `docs/_records`; it need not exist."""
        self.folder = folder

    def all(self) -> list[Record]:
        """Return every record; BadRecordError if one does not fit."""
        paths = sorted(self.folder.glob("*/*/*.json"))
        return [load(path) for path in paths if path.parent.name != OPS]

    def of(self, recipe: Recipe) -> list[Record]:
        """Return a recipe's records, those of its present code first, then the newest; BadRecordError as `all`."""
        records = [load(path) for path in sorted(self.folder.glob(f"*/{recipe.key}.json"))]
        return sorted(records, key=lambda record: (record.is_fresh(recipe), record.date), reverse=True)

    def on(self, recipe: Recipe, device: str) -> Record | None:
        """Return a recipe's record of a device, if there is one; BadRecordError as `all`."""
        path = self._path(recipe, device)
        return load(path) if path.is_file() else None

    def write(self, recipe: Recipe, run: Run, figures: Mapping[str, bytes], commit: str | None) -> Path:
        """Write the record of a run that passed on a GPU, with its figures, in place of an older one.

        Raises:
            ValueError: if the run failed, did not take place or had no GPU.
            BadRecordError: if it has what no record can hold, or a figure is missing.
        """
        if run.failure is not None or run.missing or not run.environment.is_gpu:
            raise ValueError(f"{recipe.key} did not pass on a GPU: nothing to record")
        path = self._path(recipe, run.environment.name)
        names = {name: _named(name, picture) for name, picture in figures.items()}
        if missing := [name for output in run.outputs for name in output.figures if name not in names]:
            raise BadRecordError(f"{path}: its figure {missing[0]} is missing")
        shared = {name: getattr(run, name) for name in Execution.__struct_fields__}
        shared["outputs"] = [
            structs.replace(output, figures=[names[name] for name in output.figures]) for output in run.outputs
        ]
        recipe_hash = code_hash(output.cell_hash for output in run.outputs)
        standing = self.on(recipe, run.environment.name)
        same_run = standing is not None and (standing.recipe_hash, standing.date) == (recipe_hash, run.date)
        sanitized = standing.sanitized if standing and same_run else []
        try:
            content = RecordFile(
                **shared,
                recipe_hash=recipe_hash,
                measured_hash=measured_hash(recipe) if recipe_hash == hash_of(recipe) else UNSET,
                commit=commit,
                sanitized=sanitized,
            )
        except ValueError as error:
            raise BadRecordError(f"{path}: {error}") from None
        text = encode(path, content, FIRST)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            for name, picture in figures.items():
                replace(path.parent / names[name], picture)
            replace(path, text)
        finally:
            _sweep(path)
        return path

    def check(self, recipe: Recipe, device: str) -> None:
        """Make sure that a recipe's record of a device can be written; BadRecordError if not, or if one is bad."""
        path = self._path(recipe, device)
        self.on(recipe, device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise BadRecordError(f"{path} cannot be written: {error.strerror}") from None

    def is_fresh(self, recipe: Recipe, device: str) -> bool:
        """Whether there is a record of a recipe's present code on a device; BadRecordError as `all`."""
        record = self.on(recipe, device)
        return record is not None and record.is_fresh(recipe)

    def seconds(self, device: str) -> dict[str, float]:
        """Return how long each recipe took that has a record of a device, by its key; BadRecordError as `all`."""
        return {record.key: record.seconds for record in self.all() if record.path.parents[1].name == slug(device)}

    def set_sanitized(self, recipe: Recipe, device: str, tools: list[str]) -> None:
        """Note in a recipe's record of a device under which tools its checks ran without an error.

        Raises:
            BadRecordError: if there is no such record of the recipe's present code.
        """
        path = self._path(recipe, device)
        if not self.is_fresh(recipe, device):
            raise BadRecordError(f"{path}: no record of the recipe's present code; run make record first")
        content = decode(path, path.read_bytes(), RecordFile)
        write(path, structs.replace(content, sanitized=tools), FIRST)

    def _path(self, recipe: Recipe, device: str) -> Path:
        return self.folder / slug(device) / f"{recipe.key}.json"


def _named(figure: str, picture: bytes) -> str:
    """Return the name of a recorded figure: that on the page, and what tells its content."""
    return f"{Path(figure).stem}_{hashlib.sha256(picture).hexdigest()[:8]}.png"


def _sweep(path: Path) -> None:
    """Remove a recipe's figures that its record, the old or the new one, does not have."""
    pattern = re.compile(rf"sphx_glr_{path.stem}_\d+(_[0-9a-f]{{8}})?\.png(\.partial)?")
    record = _parse(path, path.read_bytes()) if path.exists() else None
    kept = {name for output in record.outputs for name in output.figures} if record else set()
    for figure in path.parent.iterdir():
        if pattern.fullmatch(figure.name) and figure.name not in kept:
            figure.unlink()


def load(path: Path) -> Record:
    """Return the record in a file; BadRecordError if it does not fit."""
    record = _parse(path, path.read_bytes())
    for name in (name for output in record.outputs for name in output.figures):
        if not (path.parent / name).is_file():
            raise BadRecordError(f"{path}: its figure {name} is missing")
    return record


def load_at(revision: str, path: Path) -> Record | None:
    """Return a record as it was at a git revision, without looking for its figures; None if there was none."""
    content = file_at(revision, path)
    return None if content is None else _parse(path, content)


@cache  # a build asks for each record dozens of times
def _parse(path: Path, text: bytes) -> Record:
    return Record(**structs.asdict(decode(path, text, RecordFile)), path=path)
