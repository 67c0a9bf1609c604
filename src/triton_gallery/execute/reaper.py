"""The process around a recipe's process, which ends all that the recipe started.

It forks the recipe's process, in a session of its own, and tells the build how that ended. Whatever the recipe starts
and leaves behind becomes a child of this process, in whatever session it is, and is killed. A message from the build
has the recipe write where it stands and end; when the build has ended, it is killed at once.
"""

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from triton_gallery.execute import recipe_process

NAME = "triton-recipe"  # by which `memory` finds these processes
GRACE = 1.0  # seconds to write where it stands
PATIENCE = 10.0  # seconds for all to end; what the kernel holds does not
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h

_libc = ctypes.CDLL(None)


def main(order: recipe_process.Order, build: "Connection[Any, Any]") -> None:
    """Run a recipe in a fork of this process, and send the build its exit status."""
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
    recipe = os.fork()
    if recipe == 0:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        build.close()
        os.setsid()
        recipe_process.main(order)
        return  # to end as multiprocessing has its processes end
    _libc.prctl(PR_SET_NAME, NAME.encode())
    threading.Thread(target=_obey, args=(build, recipe), daemon=True).start()
    ended = 0
    while ended != recipe:
        ended, status = os.wait()  # for what was left behind, too
    _end_the_rest()
    with suppress(OSError):  # the build has ended
        build.send(os.waitstatus_to_exitcode(status))


def _obey(build: "Connection[Any, Any]", recipe: int) -> None:
    """End the recipe when the build says so, or has ended."""
    with suppress(ProcessLookupError):
        with suppress(EOFError, ConnectionError):
            build.recv()
            os.kill(recipe, signal.SIGABRT)  # faulthandler then writes where it stood
            build.poll(GRACE)
        os.kill(recipe, signal.SIGKILL)


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
