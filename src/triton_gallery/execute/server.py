"""A process that has imported what recipes import, and forks a process for each.

`python -m triton_gallery.execute.server SOCKET` takes on that socket, recipe by recipe, the names of modules and two
files: the line from the build to the recipe's reaper, and the log. It imports what it has not, forks the reaper's
process, answers with its number, and ends with the build. It touches no GPU, as CUDA would not survive the fork.
"""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from triton_gallery.execute import reaper

MODULES = ("torch", "triton", "pandas")  # of recipes; none of them starts a thread that a fork would miss
LATE = ("torch._dynamo", "torch._inductor.compile_fx")  # what PyTorch imports late; with a GPU, they start CUDA
NEEDED = ("matplotlib.pyplot", "sphinx_gallery.gen_gallery")  # for any page


class Server:
    """The process as the build sees it: started when it is needed first, and again if it has ended."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Keep its environment variables."""
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def fork(self, source: str, log: int) -> "tuple[int, Connection[Any, Any]]":
        """Have the reaper of a recipe forked; return its process's number and the line to it.

        Args:
            source: the recipe's text.
            log: the file that takes what the reaper and the recipe write.
        """
        modules = [name for name in MODULES if re.search(rf"(?m)^ *import {name}\b", source)]
        if "triton" in modules and "TRITON_INTERPRET" in self._variables:
            modules += LATE
        ours, theirs = Pipe()
        with self._lock, theirs:
            if self._process is None or self._process.poll() is not None:
                self._start()
            socket.send_fds(self._socket, [f"{' '.join(modules)}\n".encode()], [theirs.fileno(), log])
            pid = self._socket.recv(32)
        if not pid:
            raise ChildProcessError("the process that was to fork it has ended")
        return int(pid), ours

    def close(self) -> None:
        """End it; what it forked goes on."""
        if self._process:
            self._socket.close()
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "triton_gallery.execute.server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._variables,
                start_new_session=True,
            )


def main(build: socket.socket) -> None:
    """Fork on request until the build has ended. What is forked returns from here too, to end as a process does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the build learns from the reaper how it went
    with build:
        while (request := socket.recv_fds(build, 1024, 2))[0]:
            for module in [*NEEDED, *request[0].decode().split()]:
                with suppress(Exception):  # who needs it will say so
                    import_module(module)
            gc.freeze()  # a collection would write to the memory that all share
            files = request[1]
            pid = os.fork()
            if pid == 0:
                build.close()
                return reaper.main(*files)
            for file in files:
                os.close(file)
            build.send(str(pid).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
