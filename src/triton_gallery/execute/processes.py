"""The processes of this machine, as `/proc` tells of them."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """One process: its name, the number of its parent, and the bytes of memory that it holds."""

    name: str
    parent: int
    memory: int


def processes() -> dict[int, Process]:
    """Return all processes by their numbers."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            head, _, tail = stat.rpartition(")")
            fields = tail.split()  # from the third field of proc(5) on
            found[int(pid)] = Process(head.partition("(")[2], int(fields[1]), int(fields[21]) * PAGE)
    return found


def below(pid: int, among: dict[int, Process]) -> list[int]:
    """Return the numbers of a process's children, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for child, process in among.items():
        children.setdefault(process.parent, []).append(child)
    found, left = [], [pid]
    while left:
        of_one = children.get(left.pop(), [])
        found += of_one
        left += of_one
    return found
