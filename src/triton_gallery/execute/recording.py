"""Records what recipes put out on GPUs: which recipes, on which kinds of GPU, and each as soon as it has ended.

What ran here for a page, with the present code, is recorded as it is.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec import structs

from triton_gallery.execute.execute import Report, Say, Submit, execute, here, in_stages, longest_first
from triton_gallery.execute.supervisor import Task
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment, NoEnvironmentError, Slot, detect
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.git import changed, commit
from triton_gallery.records.page_cache import Pages, Run
from triton_gallery.records.record_store import Records


class FarmError(Exception):
    """GPUs that nothing can be recorded on; the message says why."""


class Farm(Protocol):
    """GPUs to record on."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The GPUs, one slot for each."""

    def on(self, kind: Sequence[Slot], tasks: Sequence[Task], say: Say) -> AbstractContextManager[Submit]:
        """Return what carries these tasks out on these slots, whose environments are equal."""


class ThisMachine:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        """Look for them; FarmError if there are none."""
        try:
            self.slots = detect()
        except NoEnvironmentError as error:
            raise FarmError(str(error)) from None
        if not self.slots[0].environment.is_gpu:
            raise FarmError("torch sees no GPU here: a record is made on one")

    def on(self, kind: Sequence[Slot], tasks: Sequence[Task], say: Say) -> AbstractContextManager[Submit]:
        """Return what carries tasks out on some of them, after a warm-up."""
        return here(kind, tasks, say)


@dataclass(frozen=True)
class Recorded:
    """What became of a recipe.

    Attributes:
        recipe: which one.
        run: how it went.
        path: the file of its record; None if it was not recorded.
        before: whether it ran before, for its page, and not again.
    """

    recipe: Recipe
    run: Run
    path: Path | None
    before: bool


def record(
    tasks: Sequence[Task],
    farm: Farm,
    pages: Pages,
    records: Records,
    report: Report,
    say: Say,
    *,
    only_stale: bool,
    per_gpu_model: bool,
    force: bool,
) -> list[Recorded]:
    """Record recipes, each as soon as it has ended; execute those that have not run with their present code.

    Args:
        tasks: the recipes.
        farm: the GPUs.
        pages: where their pages are, with the runs that made them, and where new ones go.
        records: where their records go.
        report: called after each recipe that was executed, with the number of those still to come.
        say: called with a line on what goes on besides.
        only_stale: leave those out that have a record of their present code on that kind of GPU.
        per_gpu_model: record a recipe once on each kind of GPU; otherwise all GPUs have to be alike.
        force: execute those too that ran before.

    Returns:
        The recipes, those first that ran before, then in the order of their ends.

    Raises:
        FarmError: if GPUs are unlike that must not be.
        BadRecordError: if a record that is there does not fit, one cannot be written, or a recipe is not that of the
            commit.
    """
    revision = commit()
    stages = [stage for kind in kinds(farm.slots, per_gpu_model) for stage in in_stages(kind, tasks)]
    due = [
        (kind, [it for it in of_kind if not (only_stale and records.is_fresh(it.recipe, kind[0].environment.name))])
        for kind, of_kind in stages
    ]
    for kind, of_kind in due:
        for task in of_kind:
            records.check(task.recipe, kind[0].environment.name)
    _refuse_changed([task.recipe for _, of_kind in due for task in of_kind], revision)
    ended = []

    def keep(recipe: Recipe, run: Run, before: bool) -> None:
        path = None
        if run.failure is None and not run.missing:
            try:
                path = records.write(recipe, run, pages.figures(recipe), revision)
            except (BadRecordError, OSError) as error:  # it costs this recipe's record alone
                run = structs.replace(run, failure="could not be recorded", detail=str(error))
        ended.append(Recorded(recipe, run, path, before))

    def keep_and_report(recipe: Recipe, run: Run, remaining: int) -> None:
        keep(recipe, run, before=False)
        report(recipe, ended[-1].run, remaining)

    for several in (False, True):  # what wants several GPUs waits until no other has one
        with ExitStack() as stack:
            work: list[tuple[Task, Submit]] = []
            for kind, of_kind in (stage for stage in due if (stage[0][0].environment.gpus > 1) == several):
                runs = {} if force else {it.recipe: run for it in of_kind if (run := _ran(it, kind, pages, records))}
                for recipe, run in runs.items():
                    keep(recipe, run, before=True)
                to_run = [task for task in of_kind if task.recipe not in runs]
                to_run = longest_first(to_run, records.seconds(kind[0].environment.name))
                submit = stack.enter_context(farm.on(kind, to_run, say))
                work += [(task, submit) for task in to_run]
            execute(work, pages, keep_and_report)
    return ended


def _ran(task: Task, kind: Sequence[Slot], pages: Pages, records: Records) -> Run | None:
    """Return the run of a recipe's page, if it is what would be recorded now and no newer one is recorded."""
    run = pages.run(task.recipe.key)
    if run is None or run.missing or not run.passed(task.source_hash, [kind[0].environment]):
        return None
    figures = pages.figures(task.recipe)
    whole = all(name in figures for output in run.outputs for name in output.figures)
    recorded = records.on(task.recipe, kind[0].environment.name)
    newer = recorded and recorded.is_fresh(task.recipe) and recorded.date > run.date
    return run if whole and not newer else None


def _refuse_changed(recipes: Sequence[Recipe], revision: str | None) -> None:
    """Refuse recipes whose files are not those of the commit that their records would name; BadRecordError if any.

    The clock and the ops that a recipe imports are among its files.
    """
    if revision is None:
        return
    files = {recipe: [str(recipe.path.with_suffix(".*")), *map(str, recipe.sources)] for recipe in recipes}
    if names := [recipe.key for recipe in recipes if changed(files[recipe], revision)]:
        raise BadRecordError(f"{', '.join(names)}: not as in the commit {revision}; commit it, then record it")


def kinds(slots: Sequence[Slot], per_gpu_model: bool) -> list[list[Slot]]:
    """Return the slots by their environments.

    Raises:
        FarmError: if there are several and not each is asked for, or two of them are of GPUs with the same name.
    """
    by_kind: dict[Environment, list[Slot]] = {}
    for slot in slots:
        by_kind.setdefault(slot.environment, []).append(slot)
    by_name: dict[str, Environment] = {}
    for environment in by_kind:
        other = by_name.setdefault(environment.name, environment)
        values = structs.asdict(other)
        differ = [
            f"{field} {values[field]} and {value}"
            for field, value in structs.asdict(environment).items()
            if value != values[field]
        ]
        if differ:
            raise FarmError(f"machines with an {environment.name} are unlike: {', '.join(differ)}; make them alike")
    if len(by_kind) > 1 and not per_gpu_model:
        names = ", ".join(by_name)
        raise FarmError(
            f"unlike GPUs: {names}; choose one kind, or record on each with --per-gpu-model (PER_GPU_MODEL=1)"
        )
    return list(by_kind.values())
