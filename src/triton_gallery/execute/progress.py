"""What the terminal shows while recipes are executed or compiled: a bar, and a line for each that has ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from triton_gallery.execute.execute import Report, Say
from triton_gallery.recipe.contents import Recipe
from triton_gallery.records.page_cache import Run


@contextmanager
def progress() -> Iterator[tuple[Report, Say]]:
    """Show progress while the context lasts; yield what `execute.refresh` reports to, and says lines to."""
    with _bar("executing recipes") as (bar, task):

        def report(recipe: Recipe, run: Run, remaining: int) -> None:
            done = bar.tasks[task].completed + 1
            bar.update(task, completed=done, total=done + remaining)
            outcome = "[green]passed" if run.failure is None else f"[red]{escape(run.failure)}"
            if run.missing and run.failure is None:
                outcome = f"[yellow]not executed, lacks {escape(', '.join(run.missing))}"
            bar.console.print(f"  {recipe.key:<32} {run.environment.name}  {run.seconds:6.1f} s  {outcome}")

        yield report, bar.console.print


@contextmanager
def compiling() -> Iterator[Callable[[Recipe, int], None]]:
    """Show progress while the context lasts; yield what is called after each launch, with the number of those left."""
    with _bar("compiling kernels") as (bar, task):

        def report(recipe: Recipe, remaining: int) -> None:
            done = bar.tasks[task].completed + 1
            bar.update(task, completed=done, total=done + remaining, description=f"compiling kernels: {recipe.key}")

        yield report


@contextmanager
def _bar(description: str) -> Iterator[tuple[Progress, TaskID]]:
    label = TextColumn("{task.description}")
    columns = (SpinnerColumn(), label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(highlight=False), transient=True) as bar:
        yield bar, bar.add_task(description, total=None)
