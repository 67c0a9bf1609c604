"""How recorded files are read and written: what does not fit is refused, and a file is written whole or not at all."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

OPS = "ops"  # the folder, of a device's, with rows of ops; all others have records of lessons
Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{7,40}\Z")]

S = TypeVar("S", bound=Struct)


class BadRecordError(ValueError):
    """A record that does not fit; the message names the file and the reason."""


class _Header(Struct):
    schema: int


def slug(device: str) -> str:
    """Return a device's name as its folder is called: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def decode(path: Path, text: bytes, kind: type[S]) -> S:
    """Return what a file holds; BadRecordError if it is not of this kind, or of another version of its schema.

    The version is the tag of the kind, in the field `schema`.
    """
    known = kind.__struct_config__.tag
    try:
        version = msgspec.json.decode(text, type=_Header).schema
        if version == known:
            return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise BadRecordError(f"{path}: {error}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadRecordError(f"{path}: not JSON, perhaps cut short: {error}") from None
    raise BadRecordError(f"{path}: its schema is of version {version}, this project reads version {known}")


def encode(path: Path, content: Struct, first: Sequence[str] = ()) -> bytes:
    """Return the text of a file, given which keys come first; BadRecordError if it could not be read again."""
    try:
        keys = msgspec.to_builtins(content)
        text = dump({key: keys[key] for key in first if key in keys} | keys)
    except ValueError as error:  # NaN, infinity and halves of characters
        raise BadRecordError(f"{path}: {error}") from None
    decode(path, text, type(content))
    return text


def write(path: Path, content: Struct, first: Sequence[str] = ()) -> None:
    """Write a file; BadRecordError if it could not be read again."""
    text = encode(path, content, first)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, text)


def dump(content: object) -> bytes:
    """Return content as the text of a file; ValueError if no file can hold it."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
