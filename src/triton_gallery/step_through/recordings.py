"""The recordings of all lessons that declare figures, each made in a process of its own where something has changed."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.declaration import declaration
from triton_gallery.step_through.trace import Recording

SECONDS = 300  # that a lesson's figures may take
MADE_BY = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "execute" / "triton_patches.py"]


def path_of(folder: Path, recipe: Recipe) -> Path:
    """Return the file of a lesson's recording."""
    return folder / f"{recipe.key}.json"


def read(path: Path) -> Recording | None:
    """Return a recording, if there is one that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recording)
    except (OSError, msgspec.DecodeError):
        return None


def refresh(recipes: Sequence[Recipe], folder: Path, say: Callable[[str], object]) -> dict[str, Recording]:
    """Record the figures of the lessons whose code, or what records it, has changed.

    Args:
        recipes: all lessons; those that declare no figure are left out, and their recordings removed.
        folder: where recordings are kept.
        say: called with a line if any are made.

    Returns:
        The recordings by the keys of the recipes.
    """
    declaring = [recipe for recipe in recipes if declaration(recipe.path, recipe.text).of_op.step_through]
    wanted = {path_of(folder, recipe) for recipe in declaring}
    for path in folder.glob("*/*.json"):
        if path not in wanted:
            path.unlink()
    keys = {recipe.key: _key(recipe) for recipe in declaring}
    known = {recipe.key: read(path_of(folder, recipe)) for recipe in declaring}
    due = [recipe for recipe in declaring if not _is_current(known[recipe.key], keys[recipe.key])]
    if due:
        say(f"recording the figures of {len(due)} lessons")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(lambda recipe: _record(recipe, keys[recipe.key], path_of(folder, recipe)), due)
        recorded = dict(zip((recipe.key for recipe in due), made, strict=True))
    return {key: recording for key, recording in (known | recorded).items() if recording}


def _is_current(recording: Recording | None, key: str) -> bool:
    """Whether a recording is of this key; one that failed, for want of time perhaps, is made again."""
    return recording is not None and recording.key == key and not recording.failure


def _key(recipe: Recipe) -> str:
    """Return a hash of all that a lesson's recording follows from."""
    parts = [recipe.text.encode(), *(path.read_bytes() for path in MADE_BY)]
    parts += [f"{name} {version(name)}".encode() for name in ("triton", "torch", "numpy")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _record(recipe: Recipe, key: str, path: Path) -> Recording:
    """Record the figures of a lesson in a file."""
    with TemporaryDirectory(prefix="triton-gallery-") as folder:
        script = Path(folder, recipe.path.name)
        script.write_text(recipe.text, encoding="utf-8")
        command = [sys.executable, "-m", "triton_gallery.step_through.process", str(script), key]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS, check=True)
            recording = msgspec.json.decode(done.stdout, type=Recording)
        except subprocess.TimeoutExpired:
            recording = Recording(key, failure=f"it took longer than {SECONDS} s")
        except (subprocess.CalledProcessError, msgspec.DecodeError) as error:
            output = getattr(error, "stderr", b"").decode(errors="replace").strip()
            recording = Recording(key, failure="\n".join([str(error), *output.splitlines()[-3:]]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(recording))
    return recording
