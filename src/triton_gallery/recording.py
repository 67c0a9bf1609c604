"""Records what recipes put out on GPUs: which recipes, on which kinds of GPU, and each as soon as it has ended."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

from triton_gallery.device import Environment, detect
from triton_gallery.execute import Report, Submit, execute, here, longest_first
from triton_gallery.formats import BadRecordError, commit
from triton_gallery.pages import Pages, Run
from triton_gallery.recipes import Recipe
from triton_gallery.records import Records
from triton_gallery.sandbox import Task


class FarmError(Exception):
    """GPUs that nothing can be recorded on; the message says why."""


class Farm(Protocol):
    """GPUs to record on."""

    @property
    def environments(self) -> Sequence[Environment]:
        """What executes there: one for each GPU."""

    def on(self, kind: Sequence[Environment]) -> AbstractContextManager[Submit]:
        """Return what carries tasks out on these environments, which are all of one kind."""


class ThisMachine:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        """Look for them; FarmError if there are none."""
        try:
            self.environments = detect()
        except RuntimeError as error:
            raise FarmError(str(error)) from None
        if not self.environments[0].is_gpu:
            raise FarmError("torch sees no GPU here: a record is made on one")

    def on(self, kind: Sequence[Environment]) -> AbstractContextManager[Submit]:
        """Return what carries tasks out on some of them."""
        return here(kind)


def record(
    tasks: Sequence[Task], farm: Farm, pages: Pages, records: Records, report: Report, stale: bool, each_kind: bool
) -> list[tuple[Recipe, Run, Path | None]]:
    """Execute recipes and write the record of each as soon as it has ended.

    Args:
        tasks: the recipes.
        farm: the GPUs.
        pages: where their pages go.
        records: where their records go.
        report: called after each recipe, with the number of those still to come.
        stale: leave those out that have a record of their present code on that kind of GPU.
        each_kind: record a recipe once on each kind of GPU; otherwise all GPUs have to be alike.

    Returns:
        The recipes in the order of their ends, with their runs and, if they were recorded, the files.

    Raises:
        FarmError: if GPUs are unlike that must not be.
        BadRecordError: if a record that is there does not fit.
    """
    revision = commit()
    ended = []

    def keep(recipe: Recipe, run: Run, left: int) -> None:
        path = None
        if run.failure is None and not run.missing:
            try:
                path = records.write(recipe, run, pages.figures(recipe), revision)
            except BadRecordError as error:  # it costs this recipe's record alone
                run = dataclasses.replace(run, failure="could not be recorded", detail=str(error))
        ended.append((recipe, run, path))
        report(recipe, run, left)

    with ExitStack() as stack:
        work: list[tuple[Task, Submit]] = []
        for kind in kinds(farm.environments, each_kind):
            submit = stack.enter_context(farm.on(kind))
            done = {task.recipe for task in tasks if stale and records.is_fresh(task.recipe, kind[0].name)}
            due = [task for task in tasks if task.recipe not in done]
            work += [(task, submit) for task in longest_first(due, records.seconds(kind[0].name))]
        execute(work, pages, keep)
    return ended


def kinds(environments: Sequence[Environment], each_kind: bool) -> list[list[Environment]]:
    """Return the environments by their kinds.

    Raises:
        FarmError: if there are several and not each is asked for, or two of them are of GPUs with the same name.
    """
    by_kind: dict[tuple[object, ...], list[Environment]] = {}
    for environment in environments:
        by_kind.setdefault(tuple(environment.kind.values()), []).append(environment)
    by_name: dict[str, Environment] = {}
    for environment, *_ in by_kind.values():
        other = by_name.setdefault(environment.name, environment)
        differ = [
            f"{field} {other.kind[field]} and {value}"
            for field, value in environment.kind.items()
            if value != other.kind[field]
        ]
        if differ:
            raise FarmError(f"machines with an {environment.name} are unlike: {', '.join(differ)}; make them alike")
    if len(by_kind) > 1 and not each_kind:
        names = ", ".join(by_name)
        raise FarmError(f"unlike GPUs: {names}; choose one kind, or record on each with --each-kind (EACH_KIND=1)")
    return list(by_kind.values())
