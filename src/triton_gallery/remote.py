"""The process on a cluster's worker that tells what executes there, or executes one recipe.

`python -m triton_gallery.remote` runs in a folder of its own, with the files that `cluster` sent along and a pickled
`request`; it leaves a pickled `answer`. Its standard input ends when the answer is no longer wanted, or the worker has
died; then it ends too, and leaves nothing running.
"""

import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from triton_gallery.device import Environment, detect
from triton_gallery.sandbox import Result, Task, run

Request = tuple[Task, Environment] | None  # None asks for the environments
Answer = Result | list[Environment]


def main() -> None:
    """Answer the request in the current folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    request: Request = pickle.loads(Path("request").read_bytes())  # noqa: S301 - the worker trusts its cluster
    if request is None:
        answer: Answer = detect()
    else:
        task, environment = request
        answer = run(replace(task, confdir=Path.cwd()), environment)
    Path("answer").write_bytes(pickle.dumps(answer))


def _end_with_the_worker() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, which kills the recipe as it leaves


if __name__ == "__main__":
    main()
