"""The process around a recipe's process, which ends all that the recipe started.

It forks the recipe's process, in a session of its own, and tells the build how that ended. Whatever the recipe starts
and leaves behind comes to this process as a child, in whatever session it is, and is killed. A word from the build has
the recipe say where it stands and end; when the build has ended, it is killed at once.
"""

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from triton_gallery.execute import child
from triton_gallery.execute.processes import below, processes

NAME = "triton-recipe"  # by which `memory` knows it
GRACE = 1.0  # seconds to say where it stands
PATIENCE = 10.0  # seconds for all to end; what the kernel holds does not
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h

_libc = ctypes.CDLL(None)


def main(line: int, log: int) -> None:
    """Make a forked process the reaper of the recipe that the build says; the recipe's process returns from here.

    Args:
        line: the file that leads to the build.
        log: the file that takes what both write.
    """
    os.setsid()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    build: Connection[Any, child.Order] = Connection(line)
    order = build.recv()
    recipe = os.fork()
    if recipe == 0:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        build.close()
        os.setsid()
        child.main(order)
    else:
        _guard(recipe, build)
        os._exit(0)


def _guard(recipe: int, build: "Connection[Any, Any]") -> None:
    """Wait until a process has ended, end what it leaves behind, and tell the build its exit status."""
    _libc.prctl(PR_SET_NAME, NAME.encode())
    threading.Thread(target=_obey, args=(build, recipe), daemon=True).start()
    ended = 0
    while ended != recipe:
        ended, status = os.wait()  # for what was left behind, too
    _end_the_rest()
    with suppress(OSError):  # the build has ended
        build.send(os.waitstatus_to_exitcode(status))


def _obey(build: "Connection[Any, Any]", recipe: int) -> None:
    """Do what the build says."""
    with suppress(ProcessLookupError):
        with suppress(EOFError, ConnectionError):
            build.recv()
            os.kill(recipe, signal.SIGABRT)  # faulthandler then writes where it stood
            build.poll(GRACE)
        os.kill(recipe, signal.SIGKILL)


def _end_the_rest() -> None:
    """Kill what the recipe started and did not end; what that leaves behind comes here in turn."""
    end = time.monotonic() + PATIENCE
    with suppress(ChildProcessError):  # there are no more
        while time.monotonic() < end:
            for pid in below(os.getpid(), processes()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)
