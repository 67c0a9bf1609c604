"""What all recorded files have in common: pieces of their schemas, refusal of what does not fit, whole writes."""

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def object_of(optional: Sequence[str] = (), **properties: object) -> dict[str, object]:
    """Return the schema of an object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def list_of(items: object) -> dict[str, object]:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


OPS = "ops"  # the folder, of a device's, with rows of ops; all others have records of lessons
TEXT = {"type": "string"}
OPTIONAL_TEXT = {"type": ["string", "null"]}
HASH = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
DATE = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"}
COMMIT = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[0-9a-f]{7,40}$"}]}
PACKAGES = {"type": "object", "additionalProperties": TEXT}
DEVICE = object_of(
    name=TEXT,
    capability=TEXT,
    memory={"type": "integer"},
    driver=OPTIONAL_TEXT,
    cuda=OPTIONAL_TEXT,
    torch=TEXT,
    triton=TEXT,
    python=TEXT,
)
LAUNCH = object_of(
    kernel={"type": "string", "pattern": r"^\w+$"},
    signature={"type": "object"},
    constants=list_of({"type": "array"}),
    aligned=list_of({"type": "array"}),
    options={"type": "object", "additionalProperties": {"type": "integer"}},
)


class BadRecordError(ValueError):
    """A record that does not fit; the message names the file and the reason."""


@dataclass(frozen=True)
class Device:
    """The device and the software of a recorded run; `device.Environment` explains the fields."""

    name: str
    capability: str
    memory: int
    driver: str | None
    cuda: str | None
    torch: str
    triton: str
    python: str


def slug(device: str) -> str:
    """Return a device's name as its folder is called: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def commit() -> str | None:
    """Return the project's revision: that of the variable COMMIT, else git's, else None.

    Raises:
        BadRecordError: if the variable has something else.
    """
    if given := os.environ.get("COMMIT"):
        if not re.fullmatch("[0-9a-f]{7,40}", given):
            raise BadRecordError(f"COMMIT is {given!r}; a revision has 7 to 40 of the digits 0 to 9 and a to f")
        return given
    return (_git("rev-parse", "HEAD") or "").strip() or None


def changed(patterns: Sequence[str], commit: str) -> list[Path]:
    """Return the files of these names that differ from those of a commit; none where there is no git to ask.

    Raises:
        BadRecordError: if git does not know the commit.
    """
    top = _git("rev-parse", "--show-cdup")
    if top is None or top.strip():  # no git, or that of something around the project
        return []
    names = ["--", *patterns]
    differ = _git("-c", "core.fileMode=false", "diff", "--name-only", "--no-renames", "-z", commit, *names)
    unknown = _git("ls-files", "--others", "-z", *names)
    if differ is None or unknown is None:
        raise BadRecordError(f"git knows no commit {commit}")
    return [Path(name) for name in (differ + unknown).split("\0") if name]


def _git(*arguments: str) -> str | None:
    """Return what git says; None if it cannot tell, or is not there."""
    try:
        asked = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return asked.stdout if asked.returncode == 0 else None


def shown(revision: str, path: Path) -> bytes | None:
    """Return a file as it was at a git revision; None if there was none, or git cannot tell."""
    try:
        asked = subprocess.run(["git", "show", f"{revision}:./{path}"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return asked.stdout if asked.returncode == 0 else None


def parse(path: Path, text: bytes) -> Any:
    """Return what a file's text says; BadRecordError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"{path}: not JSON, perhaps cut short: {error}") from None


def validate(path: Path, content: Any, schema: Mapping[str, object]) -> None:
    """Refuse content that does not fit; BadRecordError names the file that has it, or would."""
    import jsonschema  # here, because a machine that only measures need not have it
    from jsonschema.exceptions import best_match

    # `jsonschema.validate` would look at the schema each time, which takes longer than looking at the content.
    if error := best_match(jsonschema.Draft202012Validator(schema).iter_errors(content)):
        raise BadRecordError(f"{path}: {error.json_path}: {error.message}")
    try:
        dump(content)
    except ValueError as error:  # Python takes NaN, infinity and halves of characters for JSON
        raise BadRecordError(f"{path}: {error}") from None


def dump(content: Mapping[str, object]) -> bytes:
    """Return the text of a file; ValueError if no file can hold it."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
