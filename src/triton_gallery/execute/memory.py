"""How much memory recipes use, and which of them has to end so that the machine keeps some.

One limit holds for all recipes that run on a machine at once, whatever build or cluster's worker executes them: beyond
it, the one that uses most has to end. A batch job or a container counts as a machine.
"""

import os
import re
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from time import monotonic

from triton_gallery.execute.processes import PAGE, below, processes
from triton_gallery.execute.reaper import NAME

POLL = 0.2  # seconds between two looks


@cache
def size() -> int:
    """Return the bytes of memory that this process's machine, container or batch job may use."""
    sizes = [PAGE * os.sysconf("SC_PHYS_PAGES")]
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
    used = {of: sum(_own(pid, held) for pid, held in recipe.items()) for of, recipe in recipes.items()}
    if sum(used.values()) <= limit or max(used, key=lambda of: (used[of], of)) != reaper:
        return None
    if used[reaper] > limit:
        return f"stopped: it used more than {_gb(limit)} of memory"
    return f"stopped: recipes used more than {_gb(limit)} of memory together, this one the most, {_gb(used[reaper])}"


@lru_cache(maxsize=1)
def _recipes(moment: float) -> dict[int, dict[int, int]]:
    """Return the bytes that each process of each recipe holds, by its reaper's number; looked up once a moment."""
    among = processes()
    reapers = [pid for pid, process in among.items() if process.name == NAME and _cgroups(pid) == _cgroups("self")]
    return {reaper: {pid: among[pid].memory for pid in below(reaper, among)} for reaper in reapers}


def _own(pid: int, held: int) -> int:
    """Return the bytes that a process holds, shared ones divided by those who share them."""
    try:
        found = re.search(r"(?m)^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text("ascii"))
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended
    except PermissionError:
        return held
    return int(found[1]) * 1024 if found else 0


def _cgroups(pid: int | str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text("utf-8")
    return ""


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
