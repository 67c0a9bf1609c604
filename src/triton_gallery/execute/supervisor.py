"""Executes one recipe in a process of its own, with one GPU and limits of time and memory.

A recipe for several GPUs gets a process for each, its ranks, and one limit for all. They find each other as those do
which `torchrun` starts.

Processes are forks of multiprocessing's fork server, which has imported what recipes import. `run` needs nothing but
what it is given, so that a task may be carried out on any machine.
"""

import json
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

import msgspec

from triton_gallery.execute import PRELOAD, reaper
from triton_gallery.execute.memory import POLL, excess
from triton_gallery.execute.recipe_process import FAILED, OUTPUT_LIMIT, RESULT, Order
from triton_gallery.recipe.contents import HEADER, Recipe
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.device import Environment, Slot
from triton_gallery.recipe.launches import Launch
from triton_gallery.recipe.needs import missing, versions
from triton_gallery.recipe.outputs import Output
from triton_gallery.records.page_cache import Run

TAIL = 4_000
SOCKET_FOLDER = 60  # characters; the fork server's socket lies deeper, and its path may have 107
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["triton_gallery.execute.preload"])
FOR_ANY = ("matplotlib.pyplot", "sphinx_gallery.gen_gallery", "triton_gallery.execute.reaper")  # what any page needs
OF_RECIPES = ("torch", "triton", "pandas")  # none of them starts a thread that a fork would miss
LAZY = ("torch._dynamo", "torch._inductor.compile_fx")  # what PyTorch imports late; with a GPU, they start CUDA
PAGES = Path("site", "recipes")  # in the work folder

OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # as `torchrun` sets them
# Multicast over NVLink takes resources of the whole host, which not every container may have.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

Result = tuple[Run, dict[str, bytes]]  # how it went, and the page's files by their paths

_stopping = threading.Event()


@dataclass(frozen=True)
class Task:
    """One recipe to execute.

    Attributes:
        recipe: which one.
        source: its text, as it was when the task was made.
        companions: the contents of the files beside it that carry its name.
        source_hash: the hash of its code and of those files that goes into its run.
        page_hash: that of all else that shapes its page.
        gallery: the settings of sphinx-gallery.
        limit: seconds until it is stopped.
        memory: how much of the memory, where it is executed, recipes may use; 1 is all of it.
        before: if it ran before, that run and the pictures on its page; then the page is laid out again, and no more.
    """

    recipe: Recipe
    source: str
    companions: dict[str, bytes]
    source_hash: str
    page_hash: str
    gallery: dict[str, Any]
    limit: float
    memory: float
    before: Result | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs of one host it declares; 1 if that is not in order, as its page will say."""
        try:
            return declaration(self.recipe.path, self.source).of_op.gpus
        except ValueError:
            return 1


def prepare(environment: Environment, sources: Sequence[str]) -> None:
    """Say what the processes of recipes, given by their texts, find imported, and with which environment variables."""
    modules = [name for name in OF_RECIPES if any(_imports(name, text) for text in sources)]
    variables = _variables(environment)
    if not environment.is_gpu:
        variables["TRITON_INTERPRET"] = "1"
        modules += LAZY if "triton" in modules else ()
    os.environ["PYTHONPATH"] = variables["PYTHONPATH"]  # the fork server finds modules by it
    os.environ[PRELOAD] = json.dumps([[*FOR_ANY, *modules], variables])
    if len(tempfile.gettempdir()) > SOCKET_FOLDER and os.access("/tmp", os.W_OK):  # noqa: S108
        with patch.object(tempfile, "tempdir", "/tmp"):  # noqa: S108 - the folder itself has a random name
            multiprocessing.util.get_temp_dir()
    _stopping.clear()


def _imports(module: str, source: str) -> bool:
    return re.search(rf"(?m)^ *import {module}\b", source) is not None


def run(task: Task, slot: Slot, caches: Path | None = None, warm_up: bool = False) -> Result:
    """Execute one recipe in a process of its own; whatever goes wrong is told in the run that is returned.

    Where the recipe needs what this environment has not, its page is laid out without executing it.

    Args:
        task: the recipe.
        slot: what executes it.
        caches: where Inductor has a folder for each recipe; None: among what ends with the recipe.
        warm_up: whether it runs to fill the compilers' caches, beside others on the GPU, and nothing measured is kept.
    """
    try:
        return _run(task, slot, caches, warm_up)
    except Exception as error:  # whatever it is, it costs this recipe's page alone
        return failed(task, slot.environment, f"could not be executed: {error!r}", traceback.format_exc())


def failed(task: Task, environment: Environment, failure: str, detail: str) -> Result:
    """Return the result of a task that came to nothing."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Run(environment, date, 0.0, [], source_hash=task.source_hash, failure=failure, detail=detail), {}


def stop() -> None:
    """End the recipes that this process has executed, and let no other begin."""
    _stopping.set()


def _run(task: Task, slot: Slot, caches: Path | None, warm_up: bool) -> Result:
    environment = slot.environment
    lacks = missing(task.recipe.path, task.source, environment.capability, environment.gpus)
    with tempfile.TemporaryDirectory(prefix="triton-gallery-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        _furnish(work, task)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        variables = {**_variables(environment), "TMPDIR": str(work / "tmp")}
        if caches:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(caches / task.recipe.key)
        if slot.visible is not None:
            variables["CUDA_VISIBLE_DEVICES"] = slot.visible
        laid_out = task.before[0].laid_out if task.before else None
        execute = not lacks and laid_out is None
        uses_triton = execute and _imports("triton", task.source)
        ranks = 1
        if execute and task.gpus > 1:
            ranks = environment.gpus if environment.is_gpu else task.gpus
            variables |= of_ranks(ranks)
        interpreted = not environment.is_gpu
        order = Order(work, task.gallery, execute, variables, uses_triton, interpreted, warm_up, laid_out, ranks)
        ended, seconds = _supervise(task, order)
        outcome = _judge(work, ended)
        files = _collect(work)
        text = len(files.get(f"{task.recipe.key}.rst", b""))
        if text > OUTPUT_LIMIT:
            failure = f"printed too much: {text:,} bytes of text for its page, where {OUTPUT_LIMIT:,} are allowed"
            outcome, files = {"outputs": [], "failure": outcome.get("failure", failure)}, {}
        if task.before and outcome.get("failure") is None:
            return msgspec.structs.replace(task.before[0], page_hash=task.page_hash), files
        packages = {} if lacks else versions(task.recipe.path, task.source)
        outcome |= {"packages": packages, "missing": lacks, "page_hash": task.page_hash}
        return Run(environment, date, seconds, source_hash=task.source_hash, **outcome), files


def of_ranks(ranks: int) -> dict[str, str]:
    """Return the environment variables of so many ranks on this host, as `torchrun` sets them."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | NO_MULTICAST


def _furnish(work: Path, task: Task) -> None:
    section = work / "gallery" / task.recipe.section
    section.mkdir(parents=True)
    (section / f"{task.recipe.name}.py").write_text(task.source, encoding="utf-8")
    for name, content in task.companions.items():
        (section / name).write_bytes(content)
    for folder in (section.parent, section):
        (folder / HEADER).write_text("Recipes\n=======\n", encoding="utf-8")
    (work / "tmp").mkdir()
    for name, content in task.before[1].items() if task.before else ():
        path = work / PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _variables(environment: Environment) -> dict[str, str]:
    """Return the environment variables of all recipes that an environment executes."""
    left_out = {"TRITON_INTERPRET", PRELOAD, *OF_RANKS}
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    # Triton 3.9 warns on every page that 3.10 will not fuse a * b + c unless it is asked to.
    variables.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    folder, path = str(Path(__file__).parents[2]), variables.get("PYTHONPATH", "")
    if folder not in path.split(os.pathsep):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, path]))
    if environment.is_gpu:
        # No other process takes time from the CPU that launches what is measured
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    else:
        variables.setdefault("OMP_NUM_THREADS", "1")  # there is a recipe for each core
    return variables


def _supervise(task: Task, order: Order) -> tuple[tuple[int, int] | str, float]:
    """Return which rank ended the recipe and its exit status, or why all were stopped, and the seconds that it took."""
    line, child_end = FORKS.Pipe()
    with child_end:
        process = _fork(order, child_end)
    start = monotonic()
    with line:  # leaving it ends the recipe
        why = _watch(process.pid or 0, line, task)
        try:
            if why:
                line.send(why)
            ended: tuple[int, int] | str = line.recv()
        except (EOFError, ConnectionError):  # the reaper was killed, and the recipe with it
            ended = 0, -signal.SIGKILL
    return why or ended, round(monotonic() - start, 1)


def _fork(order: Order, line: "Connection[Any, Any]") -> "multiprocessing.process.BaseProcess":
    """Start the process around a recipe's, once more if the fork server ends meanwhile."""

    def start() -> "multiprocessing.process.BaseProcess":
        process = FORKS.Process(target=reaper.main, args=(order, line))
        process.start()
        return process

    try:
        return start()
    except (EOFError, OSError):
        if _stopping.is_set():
            raise
        return start()


def _watch(reaper: int, line: "Connection[Any, Any]", task: Task) -> str | None:
    """Wait until a recipe has ended, and return None, or has to, and return why."""
    end = monotonic() + task.limit
    while not _stopping.is_set():
        if line.poll(POLL):
            return None
        if monotonic() > end:
            return f"stopped after {task.limit:g} s"
        if why := excess(reaper, task.memory):
            return why
    return "stopped with the build"


def _collect(work: Path) -> dict[str, bytes]:
    """Return the page's files, with the work folder's path taken out of its text."""
    pages = work / PAGES
    files = {}
    for path in sorted(pages.glob("*/**/*")):
        if path.is_file() and path.name not in {"index.rst", "sg_execution_times.rst"}:
            content = path.read_bytes()
            if path.suffix == ".rst":
                content = content.replace(f"{work}{os.sep}".encode(), b"")
            files[str(path.relative_to(pages))] = content
    return files


def _judge(work: Path, ended: tuple[int, int] | str) -> dict[str, Any]:
    """Return what the run came to, as `Run` has it: the outputs, or the failure and the last lines that tell of it."""
    outcome = _outcome(work, ended)
    if "outputs" in outcome:
        outputs = msgspec.convert(outcome["outputs"], list[Output])
        launches = msgspec.convert(outcome.get("launches", []), list[Launch])
        laid_out = [text.replace(f"{work}{os.sep}", "") for text in outcome.get("laid_out", [])]
        return {"outputs": outputs, "launches": launches, "laid_out": laid_out}
    if outcome:
        failure, detail = outcome["failure"], outcome["detail"]
    else:
        # faulthandler writes the innermost frame first: those below the recipe are the build's
        detail = re.split(r"\n.*/sphinx_gallery/", _tail(work / "log.txt"), maxsplit=1)[0]
        for log in sorted(work.glob("rank-*.txt")):
            of_rank = re.split(r"\n.*<frozen runpy>", _tail(log), maxsplit=1)[0].strip()
            detail += f"\n{log.stem.replace('-', ' ')}:\n{of_rank}" if of_rank else ""
        failure = ended if isinstance(ended, str) else _how_ended(*ended)
    return {"outputs": [], "failure": failure, "detail": detail.replace(f"{work}{os.sep}", "").strip()[-TAIL:]}


def _outcome(work: Path, ended: tuple[int, int] | str) -> dict[str, Any]:
    """Return what the first rank wrote of its run, or another that failed before it; nothing if none lived to."""
    result, failed = work / RESULT, work / FAILED
    raised = failed.exists() and not isinstance(ended, str) and ended[0] > 0 and ended[1] > 0
    if ended != (0, 0) and not raised:
        return {}
    outcome: dict[str, Any] = json.loads(result.read_bytes()) if result.exists() else {}
    if raised and not ("failure" in outcome and result.stat().st_mtime_ns < failed.stat().st_mtime_ns):
        return dict(json.loads(failed.read_bytes()))
    return outcome


def _how_ended(rank: int, status: int) -> str:
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    how = f"killed by signal {-status}{names.get(-status, '')}" if status < 0 else f"ended with status {status}"
    return f"{f'rank {rank} ' if rank else ''}{how}{' before its last cell' if status >= 0 else ''}"


def _tail(path: Path) -> str:
    with open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
        return log.read().decode(errors="replace")
