"""Executes recipes apart from each other, on this machine or elsewhere.

What carries recipes out is an executor as `concurrent.futures` knows it, for tasks: the GPUs of this machine (`here`),
or those of a cluster (`cluster.Cluster`).
"""

import hashlib
import math
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from triton_gallery import sandbox
from triton_gallery.device import Environment, detect
from triton_gallery.needs import missing
from triton_gallery.pages import Pages, Run
from triton_gallery.recipes import Recipe
from triton_gallery.sandbox import Result, Task

MACHINERY = ("device", "needs", "outputs", "recipes", "sandbox", "tables", "worker")

Submit = Callable[[Task], Future[Result]]
Report = Callable[[Recipe, Run, int], None]


def refresh(
    recipes: Sequence[Recipe],
    pages: Pages,
    confdir: Path,
    limit: float,
    report: Report,
) -> list[tuple[Recipe, Run]]:
    """Execute here the recipes whose page is missing, failed, or came of other code or another environment.

    Args:
        recipes: all recipes of the gallery; pages of others are removed.
        pages: where the pages are.
        confdir: the folder of `conf.py`.
        limit: seconds that a recipe may take.
        report: called after each recipe that was executed, with the number of those still to come.

    Returns:
        Every recipe with its run, executed now or before.
    """
    pages.prune(recipes)
    environments = detect()
    due = [task for task in make_tasks(recipes, confdir, limit) if not _current(pages, task, environments)]
    due = longest_first(due, {recipe.key: run.seconds for recipe in recipes if (run := pages.run(recipe.key))})
    with here(environments) as submit:
        execute([(task, submit) for task in due], pages, report)
    return [(recipe, known) for recipe in recipes if (known := pages.run(recipe.key))]


def make_tasks(recipes: Sequence[Recipe], confdir: Path, limit: float) -> list[Task]:
    """Return a task for each recipe as it is now; `limit` is in seconds."""
    machinery = _machinery(confdir)
    tasks = []
    for recipe in recipes:
        source = recipe.path.read_text(encoding="utf-8")
        companions = {path.name: path.read_bytes() for path in recipe.companions}
        code = hashlib.sha256(b"".join([machinery, source.encode(), *companions.values()])).hexdigest()
        tasks.append(Task(recipe, source, companions, code, confdir, limit))
    return tasks


def longest_first(tasks: Sequence[Task], took: Mapping[str, float]) -> list[Task]:
    """Return tasks in an order in which all end soon: by the seconds that recipes took before, those unknown first."""
    return sorted(tasks, key=lambda task: took.get(task.recipe.key, math.inf), reverse=True)


def execute(work: Sequence[tuple[Task, Submit]], pages: Pages, report: Report) -> None:
    """Have tasks carried out, each by its executor.

    Pages are installed one by one as recipes end, so that what a killed command has done is kept; `report` is called
    after that, with the number of those still to come.
    """
    futures = {submit(task): task.recipe for task, submit in work}
    left = set(futures)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        for future in done:
            run, files = future.result()
            pages.install(futures[future], files, run)
            report(futures[future], run, len(left))


@contextmanager
def here(environments: Sequence[Environment]) -> Iterator[Submit]:
    """Carry tasks out on this machine: each GPU takes one at a time, or each core without a GPU."""
    slots = list(environments) if environments[0].is_gpu else [environments[0]] * len(os.sched_getaffinity(0))
    free: queue.SimpleQueue[Environment] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    def on_free_slot(task: Task) -> Result:
        environment = free.get()
        try:
            return sandbox.run(task, environment)
        finally:
            free.put(environment)

    sandbox.allow()
    pool = ThreadPoolExecutor(max_workers=len(slots))
    try:
        yield lambda task: pool.submit(on_free_slot, task)
    except BaseException:
        sandbox.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _current(pages: Pages, task: Task, environments: Sequence[Environment]) -> bool:
    lacks = missing(task.recipe.path, task.source)
    run = pages.run(task.recipe.key)
    return (
        run is not None
        and run.failure is None
        and run.code == task.code
        and run.missing == lacks
        and any(run.environment.kind == environment.kind for environment in environments)
    )


def _machinery(confdir: Path) -> bytes:
    """Hash what shapes a recipe's execution besides its own source."""
    files = [confdir / "conf.py", *(Path(__file__).with_name(f"{name}.py") for name in MACHINERY)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest()
