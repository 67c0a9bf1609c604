"""The process on a cluster's worker that tells what executes there, or executes one recipe.

`python -m triton_gallery.execute.dask.on_worker` runs in a folder of its own, with the files that `cluster` sent along
and a pickled `request`; it leaves an `answer` in JSON, so that who gave the command takes data from here and no code.
Its standard input ends when the answer is no longer wanted, or the worker has died; then it ends too, and leaves
nothing running.
"""

import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import msgspec

from triton_gallery.execute.supervisor import Result, Task, prepare, run
from triton_gallery.recipe.device import Environment, Slot, detect

Request = tuple[Task, Environment] | None  # None asks for the environments


def main() -> None:
    """Answer the request in the current folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    request: Request = pickle.loads(Path("request").read_bytes())  # noqa: S301 - the worker trusts its cluster
    if request is None:
        answer: object = [slot.environment for slot in detect()]
    else:
        task, environment = request
        prepare(environment, [task.source])
        answer = run(task, Slot(environment, None))
    Path("answer").write_text(json.dumps(msgspec.to_builtins(answer)), encoding="ascii")


def unpack(answer: bytes, task: Task, environment: Environment) -> Result:
    """Return the result of a task that an answer tells of; ValueError if it tells of none."""
    try:
        run, files = msgspec.convert(json.loads(answer), Result)
        if (run.source_hash, run.environment) != (task.source_hash, environment):
            raise ValueError("it is of other code or another GPU")
        return run, files
    except ValueError as error:
        raise ValueError(f"the answer is no result: {error}") from None


def _end_with_the_worker() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, which kills the recipe as it leaves


if __name__ == "__main__":
    main()
