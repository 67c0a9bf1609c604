"""What all recorded files have in common: pieces of their schemas, refusal of what does not fit, whole writes."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema


def object_of(optional: Sequence[str] = (), **properties: object) -> dict[str, object]:
    """Return the schema of an object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def list_of(items: object) -> dict[str, object]:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


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
    """Return the project's revision: that of the variable COMMIT, else git's, else None."""
    if given := os.environ.get("COMMIT"):
        return given
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def parse(path: Path, text: bytes) -> Any:
    """Return what a file's text says; BadRecordError if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRecordError(f"{path}: not JSON, perhaps cut short: {error}") from None


def validate(path: Path, content: Any, schema: Mapping[str, object]) -> None:
    """Refuse content that does not fit; BadRecordError names the file that has it, or would."""
    try:
        jsonschema.validate(content, schema)
    except jsonschema.ValidationError as error:
        raise BadRecordError(f"{path}: {error.json_path}: {error.message}") from None


def dump(content: Mapping[str, object]) -> bytes:
    """Return the text of a file."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
        partial.write(content)
    Path(partial.name).chmod(0o644)
    Path(partial.name).replace(path)
