"""The process around a recipe's process, which ends all that the recipe started.

It forks the recipe's process, in a session of its own, and tells the build how that ended. A recipe for several GPUs
has a process for each, its ranks; one that fails ends all. Whatever the recipe starts and leaves behind becomes a child
of this process, in whatever session it is, and is killed. A message from the build has the recipe write where it stands
and end; when the build has ended, it is killed at once.
"""

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from triton_gallery.execute import recipe_process

NAME = "triton-recipe"  # by which `memory` finds these processes
GRACE = 1.0  # seconds to write where it stands
PATIENCE = 10.0  # seconds for all to end; what the kernel holds does not
AFTER_FIRST = 10.0  # seconds that other ranks have after the first has ended
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h

_libc = ctypes.CDLL(None)


def main(order: recipe_process.Order, build: "Connection[Any, Any]") -> None:
    """Run a recipe in forks of this process; send the build which one ended it, and with what status, or why."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    log = os.open(order.work / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    ranks: list[int] = []
    for rank in range(order.ranks):
        process = os.fork()
        if process == 0:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            build.close()
            os.setsid()
            recipe_process.main(order, rank)
            return  # to end as multiprocessing has its processes end
        ranks.append(process)
    _libc.prctl(PR_SET_NAME, NAME.encode())
    threading.Thread(target=_obey, args=(build, ranks), daemon=True).start()
    ended = _wait(ranks, order.work)
    _end_the_rest()
    with suppress(OSError):  # the build has ended
        build.send(ended)


def _wait(ranks: Sequence[int], work: Path) -> tuple[int, int] | str:
    """Wait until all ranks have ended, or one has failed; return which and its exit status, or what else happened."""
    statuses: dict[int, int] = {}
    end = math.inf
    while len(statuses) < len(ranks):
        process, status = os.waitpid(-1, os.WNOHANG if 0 in statuses else 0)  # for what was left behind, too
        if process in ranks:
            rank = ranks.index(process)
            statuses[rank] = os.waitstatus_to_exitcode(status)
            if statuses[rank]:
                return _cause(ranks, statuses)
            if rank == 0:
                if not recipe_process.passed(work):
                    break
                end = time.monotonic() + AFTER_FIRST
        elif time.monotonic() > end:
            late = min(range(len(ranks)) - statuses.keys())
            return f"rank {late} had not ended {AFTER_FIRST:g} s after rank 0"
        elif not process:
            time.sleep(0.01)
    return 0, 0


def _cause(ranks: Sequence[int], statuses: dict[int, int]) -> tuple[int, int]:
    """Return which rank failed, given those that have, and its exit status: one that was killed before one that raised.

    The error of that may be that it lost the other.
    """
    if len(ranks) > 1:
        time.sleep(GRACE)
    with suppress(ChildProcessError):  # there are no more
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] in ranks:
                statuses[ranks.index(ended[0])] = os.waitstatus_to_exitcode(ended[1])
    return min(((rank, status) for rank, status in statuses.items() if status), key=lambda failed: failed[1] > 0)


def _obey(build: "Connection[Any, Any]", ranks: Sequence[int]) -> None:
    """End the recipe when the build says so, or has ended."""
    with suppress(EOFError, ConnectionError):
        build.recv()
        for process in ranks:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGABRT)  # faulthandler then writes where it stood
        build.poll(GRACE)
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _end_the_rest() -> None:
    """Kill what the recipe started and did not end; what that leaves behind becomes a child of this process in turn."""
    end = time.monotonic() + PATIENCE
    with suppress(ChildProcessError):  # there are no more
        while time.monotonic() < end:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)
