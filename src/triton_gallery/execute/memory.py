"""How much memory recipes use, and which of them has to end so that the machine keeps some.

One limit holds for all recipes that run on a machine at once, whatever build or cluster's worker executes them: beyond
it, the one that uses most has to end. A batch job or a container counts as a machine.
"""

from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from time import monotonic

import psutil

from triton_gallery.execute.reaper import NAME

POLL = 0.2  # seconds between two looks


@cache
def size() -> int:
    """Return the bytes of memory that this process's machine, container or batch job may use."""
    sizes: list[int] = [psutil.virtual_memory().total]
    for line in _cgroups("self").splitlines():
        _, controllers, path = line.split(":", 2)
        root, name = Path("/sys/fs/cgroup"), "memory.max"
        if controllers:
            root, name = root / "memory", "memory.limit_in_bytes"
        if controllers in {"", "memory"}:
            group = root / path.strip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # "max"
                    sizes.append(int((folder / name).read_text("ascii")))
    return min(sizes)


def excess(reaper: int, share: float) -> str | None:
    """Return why the recipe below a reaper has to end, if it has.

    Args:
        reaper: the number of its process.
        share: how much of the machine's memory all recipes may use.
    """
    limit = share * size()
    recipes = _recipes(monotonic() // POLL)
    if sum(sum(recipe.values()) for recipe in recipes.values()) <= limit:
        return None
    # Pages that processes share were counted for each
    used = {pid: sum(_own(*process) for process in recipe.items()) for pid, recipe in recipes.items()}
    if sum(used.values()) <= limit or max(used, key=lambda pid: (used[pid], pid)) != reaper:
        return None
    if used[reaper] > limit:
        return f"stopped: it used more than {_gb(limit)} of memory"
    return f"stopped: recipes used more than {_gb(limit)} of memory together, this one the most, {_gb(used[reaper])}"


@lru_cache(maxsize=1)
def _recipes(moment: float) -> dict[int, dict[psutil.Process, int]]:
    """Return the bytes that each process of each recipe holds, by its reaper's number; looked up once a moment."""
    recipes = {}
    for reaper in psutil.process_iter(["name"]):
        if reaper.info["name"] == NAME and _cgroups(reaper.pid) == _cgroups("self"):
            with suppress(psutil.NoSuchProcess):
                below = reaper.children(recursive=True)
                recipes[reaper.pid] = {process: _held(process) for process in below}
    return recipes


def _held(process: psutil.Process) -> int:
    """Return the bytes that a process holds, those too that it shares."""
    with suppress(psutil.Error):  # it has ended
        return int(process.memory_info().rss)
    return 0


def _own(process: psutil.Process, held: int) -> int:
    """Return the bytes that a process holds, shared ones divided by those who share them."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:
        return held


def _cgroups(pid: int | str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text("utf-8")
    return ""


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
