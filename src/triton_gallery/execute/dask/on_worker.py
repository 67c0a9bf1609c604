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
from base64 import b64decode, b64encode
from dataclasses import asdict
from pathlib import Path

from triton_gallery.execute.supervisor import Result, Task, prepare, run
from triton_gallery.recipe.device import Environment, detect
from triton_gallery.recipe.outputs import from_json
from triton_gallery.records.page_cache import Run

Request = tuple[Task, Environment] | None  # None asks for the environments


def main() -> None:
    """Answer the request in the current folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    request: Request = pickle.loads(Path("request").read_bytes())  # noqa: S301 - the worker trusts its cluster
    if request is None:
        answer: object = [asdict(environment) for environment in detect()]
    else:
        task, environment = request
        prepare(environment, [task.source])
        how, files = run(task, environment)
        answer = [asdict(how), {path: b64encode(content).decode() for path, content in files.items()}]
    Path("answer").write_text(json.dumps(answer), encoding="ascii")


def unpack(answer: bytes, task: Task, environment: Environment) -> Result:
    """Return the result of a task that an answer tells of; ValueError if it tells of none."""
    try:
        how, files = json.loads(answer)
        result = from_json(Run, how)
        if (result.code, result.environment) != (task.code, environment):
            raise ValueError("it is of other code or another GPU")
        texts = from_json(dict[str, str], files)
        return result, {path: b64decode(text, validate=True) for path, text in texts.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"the answer is no result: {error}") from None


def _end_with_the_worker() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, which kills the recipe as it leaves


if __name__ == "__main__":
    main()
