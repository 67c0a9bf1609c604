"""Executes recipes apart from each other, on this machine or elsewhere.

What carries recipes out is an executor as `concurrent.futures` knows it, for tasks: the GPUs of this machine (`here`),
or those of a cluster (`cluster.Cluster`).
"""

import hashlib
import math
import os
import queue
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from triton_gallery.execute import cache_warmup, supervisor
from triton_gallery.execute.settings import Settings
from triton_gallery.execute.supervisor import Result, Task
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment, Slot, detect, together, too_new
from triton_gallery.recipe.hashes import cell_hash, hash_of
from triton_gallery.recipe.needs import missing
from triton_gallery.records.page_cache import Pages, Run

MACHINERY = (  # what shapes a page; prose, docstrings and comments in it do not count
    "execute/launch_trace",
    "execute/recipe_process",
    "execute/scraper",
    "execute/supervisor",
    "execute/triton_patches",
    "recipe/contents",
    "recipe/data",
    "recipe/declaration",
    "recipe/device",
    "recipe/launches",
    "recipe/needs",
    "recipe/outputs",
    "recipe/tables",
)
TO_GALLERY = re.compile(r"(?m)^# sphinx_gallery_(?!tags).*")  # what sphinx-gallery is told of an execution
PACKAGES = ("sphinx", "sphinx-gallery", "matplotlib", "numpy", "pandas")  # an environment has the others
ELSEWHERE = {  # settings of sphinx-gallery that say where recipes lie and how they are listed
    "examples_dirs",
    "gallery_dirs",
    "subsection_order",
    "within_subsection_order",
}

Submit = Callable[[Task], Future[Result]]
Report = Callable[[Recipe, Run, int], None]
Say = Callable[[str], object]


def refresh(
    recipes: Sequence[Recipe],
    pages: Pages,
    settings: Settings,
    report: Report,
    say: Say,
) -> list[tuple[Recipe, Run]]:
    """Execute here the recipes whose page is missing, failed, or came of other code or another environment.

    Where what else shapes a page has changed, as prose, it is laid out again with what its cells put out before.

    Args:
        recipes: those that are wanted.
        pages: where the pages are.
        settings: what `conf.py` says.
        report: called after each recipe that was executed, with the number of those still to come.
        say: called with a line on what goes on besides.

    Returns:
        Every recipe with its run, executed now or before.
    """
    for slots, tasks in in_stages(detect(), make_tasks(recipes, settings)):
        environments = [slot.environment for slot in slots]
        due, old = [], []
        for task in tasks:
            run = pages.run(task.recipe.key)
            if not run or not _current(run, task, environments):
                due.append(task)
            elif run.page_hash != task.page_hash:
                old.append(replace(task, before=(run, pages.files(task.recipe))))
        due = longest_first(due, {recipe.key: run.seconds for recipe in recipes if (run := pages.run(recipe.key))})
        with here(slots, due, say) as submit:
            execute([(task, submit) for task in due], pages, report)
            if old:
                say(f"pages laid out again, as their code has not changed: {len(old)}")
                execute([(task, submit) for task in old], pages, lambda recipe, run, remaining: None)
    return [(recipe, known) for recipe in recipes if (known := pages.run(recipe.key))]


def make_tasks(recipes: Sequence[Recipe], settings: Settings) -> list[Task]:
    """Return a task for each recipe as it is now."""
    files = (Path(__file__).parents[1] / f"{name}.py" for name in MACHINERY)
    machinery = [*map(version, PACKAGES), *(cell_hash(path.read_text(encoding="utf-8")) for path in files)]
    gallery = {name: value for name, value in settings.gallery.items() if name not in ELSEWHERE}
    tasks = []
    for recipe in recipes:
        source = recipe.text
        companions = {path.name: path.read_bytes() for path in recipe.companions}
        told = [repr(sorted(gallery.items())), *TO_GALLERY.findall(source)]
        source_hash = _digest(*map(str.encode, [_code(recipe), *told]), *companions.values())
        page_hash = _digest(*map(str.encode, [source, *machinery]))
        limits = settings.time_limit, settings.memory_limit
        tasks.append(Task(recipe, source, companions, source_hash, page_hash, gallery, *limits))
    return tasks


def in_stages(slots: Sequence[Slot], tasks: Sequence[Task]) -> list[tuple[list[Slot], list[Task]]]:
    """Return tasks with what executes them, one stage after the other.

    First those for one GPU, a GPU each, or a core. Then those for several, one at a time on all GPUs.
    """
    whole = together(slots) if any(task.gpus > 1 for task in tasks) else None
    of_whole = [task for task in tasks if whole and task.gpus > 1]
    first = list(slots), [task for task in tasks if task not in of_whole]
    return [first, ([whole], of_whole)] if whole else [first]


def longest_first(tasks: Sequence[Task], took: Mapping[str, float]) -> list[Task]:
    """Return tasks in an order in which all end soon: by the seconds that recipes took before, those unknown first."""
    return sorted(tasks, key=lambda task: took.get(task.recipe.key, math.inf), reverse=True)


def execute(work: Sequence[tuple[Task, Submit]], pages: Pages, report: Report) -> None:
    """Have tasks carried out, each by its executor.

    Pages are installed one by one as recipes end, so that what a killed command has done is kept; `report` is called
    after that, with the number of those still to come.
    """
    futures = {submit(task): task.recipe for task, submit in work}
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            run, files = future.result()
            run = pages.install(futures[future], files, run)
            report(futures[future], run, len(pending))


@contextmanager
def here(slots: Sequence[Slot], tasks: Sequence[Task], say: Say) -> Iterator[Submit]:
    """Carry tasks out on this machine: each GPU takes one at a time, or each core without a GPU.

    Args:
        slots: the GPUs, which are alike, several as one, or the CPU.
        tasks: what will be carried out; caches are warmed up with it first where that is quicker.
        say: called with a line on the warm-up, or on a version that was not tried.
    """
    environment = slots[0].environment
    alone = list(slots) if environment.is_gpu else [slots[0]] * len(os.sched_getaffinity(0))
    crowd = cache_warmup.places(slots, len(tasks)) if environment.gpus == 1 else []
    if notice := too_new(environment):
        say(notice)
    supervisor.prepare(environment, [task.source for task in tasks])
    with TemporaryDirectory(prefix="triton-gallery-", ignore_cleanup_errors=True) as name:
        caches = Path(name) if crowd else None
        if caches:
            say(f"warming up the caches with {len(tasks)} recipes, {len(crowd)} at a time")
            start = monotonic()
            with _on(crowd, caches, warm_up=True) as submit:
                wait([submit(task) for task in tasks])  # what fails will fail again, alone
            cache_warmup.forget_tuning(caches)
            say(f"warmed up in {monotonic() - start:.1f} s")
        with _on(alone, caches) as submit:
            yield submit


@contextmanager
def _on(slots: Sequence[Slot], caches: Path | None, warm_up: bool = False) -> Iterator[Submit]:
    """Carry tasks out, each slot one at a time; all have ended when the context is left."""
    free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    def on_free_slot(task: Task) -> Result:
        slot = free.get()
        try:
            return supervisor.run(task, slot, caches, warm_up)
        finally:
            free.put(slot)

    pool = ThreadPoolExecutor(max_workers=len(slots))
    try:
        yield lambda task: pool.submit(on_free_slot, task)
    except BaseException:
        supervisor.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _current(run: Run, task: Task, environments: Sequence[Environment]) -> bool:
    """Whether a run would be the same again."""
    return run.passed(task.source_hash, environments) and run.missing == missing(
        task.recipe.path, task.source, run.environment.capability, run.environment.gpus
    )


def _code(recipe: Recipe) -> str:
    try:
        return hash_of(recipe)
    except SyntaxError:  # its page says so
        return recipe.text


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
