"""Executes recipes apart from each other: a process, a GPU and a time limit for each.

`run` executes one task and needs nothing but what travels in it, so that any executor of `concurrent.futures` can call
it. `refresh` brings all pages of a gallery up to date with the executor of this machine.
"""

import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from triton_gallery.device import Environment, detect
from triton_gallery.needs import missing, versions
from triton_gallery.outputs import from_json
from triton_gallery.pages import Pages, Run
from triton_gallery.recipes import HEADER, Recipe
from triton_gallery.worker import ALIVE, OUTPUT_LIMIT

MACHINERY = ("device", "execute", "needs", "outputs", "recipes", "tables", "worker")
TAIL = 4_000

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
        missing: what it needs and this environment has not; then its page is laid out without executing it.
    """

    recipe: Recipe
    source: str
    companions: dict[str, bytes]
    code: str
    confdir: Path
    limit: float
    missing: list[str]


def refresh(
    recipes: Sequence[Recipe],
    pages: Pages,
    confdir: Path,
    limit: float,
    report: Callable[[Recipe, Run, int], None],
    only: Collection[str] | None = None,
) -> list[tuple[Recipe, Run]]:
    """Execute the recipes whose page is missing, failed, or came of other code or another environment.

    Pages are installed one by one as recipes end, so that what a killed build has done is kept.

    Args:
        recipes: all recipes of the gallery; pages of others are removed.
        pages: where the pages are.
        confdir: the folder of `conf.py`.
        limit: seconds that a recipe may take.
        report: called after each recipe that was executed, with the number of those still to come.
        only: recipes, by `section/name`, to execute whether or not they changed, and no others.

    Returns:
        Every recipe with its run, executed now or before.
    """
    pages.prune(recipes)
    environments = detect()
    machinery = _machinery(confdir)
    tasks = []
    for recipe in recipes:
        source = recipe.path.read_text(encoding="utf-8")
        companions = {path.name: path.read_bytes() for path in recipe.companions}
        code = hashlib.sha256(b"".join([machinery, source.encode(), *companions.values()])).hexdigest()
        lacks = missing(recipe.path, source)
        known = pages.run(recipe.key)
        due = recipe.key in only if only is not None else not _current(known, code, environments, lacks)
        if due:
            tasks.append(Task(recipe, source, companions, code, confdir, limit, lacks))
    with _executor(environments) as submit:
        futures = {submit(task): task.recipe for task in tasks}
        left = set(futures)
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                ran, files = future.result()
                pages.install(futures[future], files, ran)
                report(futures[future], ran, len(left))
    return [(recipe, known) for recipe in recipes if (known := pages.run(recipe.key))]


def run(task: Task, environment: Environment) -> tuple[Run, dict[str, bytes]]:
    """Execute one recipe in a process of its own; return how it went, and its page's files by their paths."""
    with tempfile.TemporaryDirectory(prefix="triton-gallery-", ignore_cleanup_errors=True) as folder:
        sandbox = Path(folder)
        _furnish(sandbox, task)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        start = monotonic()
        ended = _supervise(sandbox, task, environment)
        seconds = round(monotonic() - start, 1)
        outcome = _judge(sandbox, ended)
        files = _collect(sandbox)
        text = len(files.get(f"{task.recipe.key}.rst", b""))
        if text > OUTPUT_LIMIT:
            what = f"printed too much: {text:,} bytes of text for its page, where {OUTPUT_LIMIT:,} are allowed"
            outcome, files = {"failure": outcome.get("failure", what)}, {}
        packages = {} if task.missing else versions(task.recipe.path, task.source)
        return Run(task.code, environment, date, seconds, packages=packages, missing=task.missing, **outcome), files


def _current(run: Run | None, code: str, environments: Sequence[Environment], lacks: list[str]) -> bool:
    return (
        run is not None
        and run.failure is None
        and run.code == code
        and run.missing == lacks
        and any(run.environment.kind == environment.kind for environment in environments)
    )


def _machinery(confdir: Path) -> bytes:
    """Hash what shapes a recipe's execution besides its own source."""
    files = [confdir / "conf.py", *(Path(__file__).with_name(f"{name}.py") for name in MACHINERY)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()


@contextmanager
def _executor(
    environments: Sequence[Environment],
) -> Iterator[Callable[[Task], Future[tuple[Run, dict[str, bytes]]]]]:
    """Run tasks on this machine: each GPU takes one at a time, or each core without a GPU."""
    slots = list(environments) if environments[0].is_gpu else [environments[0]] * len(os.sched_getaffinity(0))
    free: queue.SimpleQueue[Environment] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    def on_free_slot(task: Task) -> tuple[Run, dict[str, bytes]]:
        environment = free.get()
        try:
            return run(task, environment)
        except Exception as error:  # whatever it is, it costs this recipe's page alone
            now = datetime.now(UTC).isoformat(timespec="seconds")
            return Run(
                task.code, environment, now, 0.0, f"could not be executed: {error!r}", traceback.format_exc()
            ), {}
        finally:
            free.put(environment)

    _stopping.clear()
    pool = ThreadPoolExecutor(max_workers=len(slots))
    try:
        yield lambda task: pool.submit(on_free_slot, task)
    except BaseException:
        _stopping.set()
        for process in list(_running):
            _kill(process)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _furnish(sandbox: Path, task: Task) -> None:
    section = sandbox / "gallery" / task.recipe.section
    section.mkdir(parents=True)
    (section / f"{task.recipe.name}.py").write_text(task.source, encoding="utf-8")
    for name, content in task.companions.items():
        (section / name).write_bytes(content)
    for folder in (section.parent, section):
        (folder / HEADER).write_text("Recipes\n=======\n", encoding="utf-8")
    (sandbox / "tmp").mkdir()


def _supervise(sandbox: Path, task: Task, environment: Environment) -> int | str:
    """Return the exit status of the recipe's process, or why it was stopped."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [variables.get("PYTHONPATH")])]
    )
    variables["TMPDIR"] = str(sandbox / "tmp")
    if environment.visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = environment.visible
    else:
        variables.setdefault("OMP_NUM_THREADS", "1")  # there is a recipe for each core
    ours, alive = os.pipe()
    with open(sandbox / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "triton_gallery.worker", str(sandbox), str(task.confdir), str(not task.missing)],
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
