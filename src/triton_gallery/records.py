"""Recorded outputs of recipes, and the only module that knows their format.

`docs/_records/<device>/<section>/<recipe>.json` holds what a run on that device put out, cell by cell; the figures lie
beside it. A record counts for code with the same hash; of older code it is stale. Records are data from elsewhere: one
that does not fit the schema is refused, and nothing in one is ever executed.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
from triton_gallery.outputs import Output, from_json
from triton_gallery.pages import Run
from triton_gallery.recipes import Recipe, code_hash, hash_of

SCHEMA_VERSION = 1
TOOLS = ["memcheck", "racecheck", "initcheck"]

_TABLE = object_of(
    name={"type": "string", "pattern": "^results"},
    x=TEXT,
    unit=TEXT,
    xs=list_of({"type": ["number", "string"]}),
    series={"type": "object", "additionalProperties": list_of({"type": ["number", "null"]})},
)
_OUTPUT = object_of(
    code=HASH,
    text=TEXT,
    figures=list_of({"type": "string", "pattern": r"^[A-Za-z0-9_]+\.png$"}),
    frame={"anyOf": [{"type": "null"}, object_of(columns=list_of(TEXT), rows=list_of(list_of(TEXT)))]},
    tables=list_of(_TABLE),
)
_SCHEMA = object_of(
    optional=["packages"],  # records of before have none
    schema={"const": SCHEMA_VERSION},
    code=HASH,
    device=DEVICE,
    date=DATE,
    commit=COMMIT,
    seconds={"type": "number"},
    packages=PACKAGES,
    sanitized=list_of({"enum": TOOLS}),
    outputs=list_of(_OUTPUT),
)


@dataclass(frozen=True)
class Record:
    """A recorded run.

    Attributes:
        path: the file.
        code: the hash of the recipe's code that ran.
        device: what executed it.
        date: when it began, ISO 8601 in UTC.
        commit: the revision of the project, if it was known.
        seconds: wall time of the whole script.
        sanitized: the tools of compute-sanitizer under which its checks ran without an error.
        outputs: what each code cell put out.
        packages: versions of what the recipe declares beyond the packages that any recipe may use.
    """

    path: Path
    code: str
    device: Device
    date: str
    commit: str | None
    seconds: float
    sanitized: list[str]
    outputs: list[Output]
    packages: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """`section/name` of the recipe."""
        return f"{self.path.parent.name}/{self.path.stem}"

    def is_fresh(self, recipe: Recipe) -> bool:
        """Whether the recipe still has the code that was recorded."""
        return self.code == hash_of(recipe)


class Records:
    """The folder of records."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, `docs/_records`; it need not exist."""
        self.folder = folder

    def all(self) -> list[Record]:
        """Return every record; BadRecordError if one does not fit."""
        return [load(path) for path in sorted(self.folder.glob("*/*/*.json"))]

    def of(self, recipe: Recipe) -> list[Record]:
        """Return a recipe's records, those of its present code first, then the newest; BadRecordError as `all`."""
        records = [load(path) for path in sorted(self.folder.glob(f"*/{recipe.key}.json"))]
        return sorted(records, key=lambda record: (record.is_fresh(recipe), record.date), reverse=True)

    def write(self, recipe: Recipe, run: Run, figures: Mapping[str, bytes], commit: str | None) -> Path:
        """Write the record of a run that passed on a GPU, with its figures, in place of an older one.

        Raises:
            ValueError: if the run failed, did not take place or had no GPU.
        """
        if run.failure is not None or run.missing or not run.environment.is_gpu:
            raise ValueError(f"{recipe.key} did not pass on a GPU: nothing to record")
        content = {
            "schema": SCHEMA_VERSION,
            "code": code_hash(output.code for output in run.outputs),
            "device": run.environment.kind,
            "date": run.date,
            "commit": commit,
            "seconds": run.seconds,
            "packages": run.packages,
            "sanitized": [],
            "outputs": [asdict(output) for output in run.outputs],
        }
        path = self._path(recipe, run.environment.name)
        _validate(path, content)
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, picture in figures.items():
            replace(path.parent / name, picture)
        replace(path, dump(content))
        for old in path.parent.glob(f"sphx_glr_{recipe.name}_[0-9]*.png"):
            if old.name not in figures:
                old.unlink()
        return path

    def is_fresh(self, recipe: Recipe, device: str) -> bool:
        """Whether there is a record of a recipe's present code on a device; BadRecordError as `all`."""
        path = self._path(recipe, device)
        return path.is_file() and load(path).is_fresh(recipe)

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
        content = json.loads(path.read_text(encoding="utf-8"))
        content["sanitized"] = tools
        _validate(path, content)
        replace(path, dump(content))

    def _path(self, recipe: Recipe, device: str) -> Path:
        return self.folder / slug(device) / f"{recipe.key}.json"


def load(path: Path) -> Record:
    """Return the record in a file; BadRecordError if it does not fit."""
    record = _parse(path, path.read_bytes())
    for name in (name for output in record.outputs for name in output.figures):
        if not (path.parent / name).is_file():
            raise BadRecordError(f"{path}: its figure {name} is missing")
    return record


def load_at(revision: str, path: Path) -> Record | None:
    """Return a record as it was at a git revision, without looking for its figures; None if there was none."""
    shown = subprocess.run(["git", "show", f"{revision}:./{path}"], capture_output=True, check=False)
    return _parse(path, shown.stdout) if shown.returncode == 0 else None


def _parse(path: Path, text: bytes) -> Record:
    content = parse(path, text)
    _validate(path, content)
    outputs = [from_json(output) for output in content["outputs"]]
    if code_hash(output.code for output in outputs) != content["code"]:
        raise BadRecordError(f"{path}: the hash of its code is not that of its cells")
    fields = {name: value for name, value in content.items() if name != "schema"}
    return Record(**{**fields, "path": path, "device": Device(**content["device"]), "outputs": outputs})


def _validate(path: Path, content: Any) -> None:
    validate(path, content, _SCHEMA)
    for output in content["outputs"]:
        for table in output["tables"]:
            if any(len(values) != len(table["xs"]) for values in table["series"].values()):
                raise BadRecordError(f"{path}: {table['name']}: a series is not as long as its x")
