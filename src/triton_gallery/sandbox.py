"""Executes one recipe in a process of its own, with one GPU and a time limit.

`run` needs nothing but what it is given, so that a task may be carried out on any machine.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from triton_gallery.device import Environment
from triton_gallery.needs import missing, versions
from triton_gallery.outputs import from_json
from triton_gallery.pages import Run
from triton_gallery.recipes import HEADER, Recipe
from triton_gallery.worker import ALIVE, OUTPUT_LIMIT

TAIL = 4_000

Result = tuple[Run, dict[str, bytes]]  # how it went, and the page's files by their paths

_running: set[subprocess.Popen[bytes]] = set()
_stopping = threading.Event()


@dataclass(frozen=True)
class Task:
    """One recipe to execute.

    Attributes:
        recipe: which one.
        source: its text, as it was when the task was made.
        companions: the contents of the files beside it that carry its name.
        code: the hash that goes into its run.
        confdir: the folder of `conf.py`.
        limit: seconds until it is stopped.
    """

    recipe: Recipe
    source: str
    companions: dict[str, bytes]
    code: str
    confdir: Path
    limit: float


def run(task: Task, environment: Environment) -> Result:
    """Execute one recipe in a process of its own; whatever goes wrong is told in the run that is returned.

    Where the recipe needs what this environment has not, its page is laid out without executing it.
    """
    try:
        return _run(task, environment)
    except Exception as error:  # whatever it is, it costs this recipe's page alone
        return failed(task, environment, f"could not be executed: {error!r}", traceback.format_exc())


def failed(task: Task, environment: Environment, what: str, detail: str) -> Result:
    """Return the result of a task that came to nothing."""
    return Run(task.code, environment, datetime.now(UTC).isoformat(timespec="seconds"), 0.0, what, detail), {}


def allow() -> None:
    """Let recipes be executed again after `stop`."""
    _stopping.clear()


def stop() -> None:
    """Kill the recipes that run in this process's children, and let no other begin."""
    _stopping.set()
    for process in list(_running):
        _kill(process)


def _run(task: Task, environment: Environment) -> Result:
    lacks = missing(task.recipe.path, task.source)
    with tempfile.TemporaryDirectory(prefix="triton-gallery-", ignore_cleanup_errors=True) as folder:
        sandbox = Path(folder)
        _furnish(sandbox, task)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        start = monotonic()
        ended = _supervise(sandbox, task, environment, execute=not lacks)
        seconds = round(monotonic() - start, 1)
        outcome = _judge(sandbox, ended)
        files = _collect(sandbox)
        text = len(files.get(f"{task.recipe.key}.rst", b""))
        if text > OUTPUT_LIMIT:
            what = f"printed too much: {text:,} bytes of text for its page, where {OUTPUT_LIMIT:,} are allowed"
            outcome, files = {"failure": outcome.get("failure", what)}, {}
        packages = {} if lacks else versions(task.recipe.path, task.source)
        return Run(task.code, environment, date, seconds, packages=packages, missing=lacks, **outcome), files


def _furnish(sandbox: Path, task: Task) -> None:
    section = sandbox / "gallery" / task.recipe.section
    section.mkdir(parents=True)
    (section / f"{task.recipe.name}.py").write_text(task.source, encoding="utf-8")
    for name, content in task.companions.items():
        (section / name).write_bytes(content)
    for folder in (section.parent, section):
        (folder / HEADER).write_text("Recipes\n=======\n", encoding="utf-8")
    (sandbox / "tmp").mkdir()


def _supervise(sandbox: Path, task: Task, environment: Environment, execute: bool) -> int | str:
    """Return the exit status of the recipe's process, or why it was stopped."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [variables.get("PYTHONPATH")])]
    )
    variables["TMPDIR"] = str(sandbox / "tmp")
    if environment.visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = environment.visible
        # No other process takes time from the CPU that launches what is measured
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    else:
        variables.setdefault("OMP_NUM_THREADS", "1")  # there is a recipe for each core
    ours, alive = os.pipe()
    with open(sandbox / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "triton_gallery.worker", str(sandbox), str(task.confdir), str(execute)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**variables, ALIVE: str(ours)},
            pass_fds=[ours],
            start_new_session=True,
        )
    os.close(ours)
    _running.add(process)
    try:
        return "stopped with the build" if _stopping.is_set() else process.wait(task.limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler then writes where it stood
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return f"stopped after {task.limit:g} s"
    finally:
        _kill(process)
        _running.discard(process)
        os.close(alive)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a recipe's process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(sandbox: Path) -> dict[str, bytes]:
    """Return the page's files, with the sandbox's path taken out of its text."""
    pages = sandbox / "site" / "recipes"
    files = {}
    for path in sorted(pages.glob("*/**/*")):
        if path.is_file() and path.name not in {"index.rst", "sg_execution_times.rst"}:
            content = path.read_bytes()
            if path.suffix == ".rst":
                content = content.replace(f"{sandbox}{os.sep}".encode(), b"")
            files[str(path.relative_to(pages))] = content
    return files


def _judge(sandbox: Path, ended: int | str) -> dict[str, Any]:
    """Return what the run came to, as `Run` has it: the outputs, or the failure and the last lines that tell of it."""
    result = sandbox / "result.json"
    if ended == 0 and result.exists():
        outcome: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        if "outputs" in outcome:
            return {"outputs": [from_json(output) for output in outcome["outputs"]]}
        what, detail = outcome["failure"], outcome["detail"]
    else:
        with open(sandbox / "log.txt", "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            detail = log.read().decode(errors="replace")
        # faulthandler writes the innermost frame first: those below the recipe are sphinx-gallery's
        detail = re.split(r"\n.*/sphinx_gallery/", detail, maxsplit=1)[0]
        if isinstance(ended, str):
            what = ended
        elif ended < 0:
            names = {number.value: f" ({number.name})" for number in signal.Signals}
            what = f"killed by signal {-ended}{names.get(-ended, '')}"
        else:
            what = f"ended with status {ended} before its last cell"
    return {"failure": what, "detail": detail.replace(f"{sandbox}{os.sep}", "").strip()[-TAIL:]}
