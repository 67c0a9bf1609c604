"""What git knows of the project: its revision, and files as they were."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from triton_gallery.records.files import BadRecordError


def commit() -> str | None:
    """Return the project's commit: that of the variable COMMIT, else git's, else None.

    Raises:
        BadRecordError: if the variable has something else.
    """
    if given := os.environ.get("COMMIT"):
        if not re.fullmatch("[0-9a-f]{7,40}", given):
            raise BadRecordError(f"COMMIT is {given!r}; a revision has 7 to 40 of the digits 0 to 9 and a to f")
        return given
    return (_git("rev-parse", "HEAD") or b"").decode().strip() or None


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
    return [Path(name) for name in os.fsdecode(differ + unknown).split("\0") if name]


def file_at(revision: str, path: Path) -> bytes | None:
    """Return a file as it was at a git revision; None if there was none, or git cannot tell."""
    return _git("show", f"{revision}:./{path}")


def _git(*arguments: str) -> bytes | None:
    """Return what git prints; None if it fails, or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
