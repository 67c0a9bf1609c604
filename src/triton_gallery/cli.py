"""The command line: `python -m triton_gallery COMMAND`, run in the folder that holds `conf.py`."""

import argparse
import dataclasses
import json
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from sphinx.cmd.build import main as sphinx_build

from triton_gallery.cluster import connect
from triton_gallery.compare import compare, measure_spread
from triton_gallery.device import detect
from triton_gallery.execute import make_tasks
from triton_gallery.formats import BadRecordError
from triton_gallery.needs import missing, packages
from triton_gallery.pages import Pages, Run
from triton_gallery.peers import load_all
from triton_gallery.progress import progress
from triton_gallery.recipes import Recipe, load
from triton_gallery.recording import FarmError, ThisMachine, record
from triton_gallery.records import TOOLS, Records
from triton_gallery.rows import rows
from triton_gallery.sanitize import sanitize

GALLERY, PAGES, RECORDS = Path("gallery"), Path("docs/recipes"), Path("docs/_records")
PLANTED = {
    Path("tests/planted/out_of_bounds.py"): "memcheck",
    Path("tests/planted/race.py"): "racecheck",
    Path("tests/planted/uninitialised.py"): "initcheck",
}
TRACEBACK_LINES = 6

console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())


class UsageError(Exception):
    """A command that cannot be carried out; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit status: 0, 1 if something is not as it should be, 2 if it could not be run.

    Stopped with Ctrl-C it is 130, as in a shell.
    """
    parser = argparse.ArgumentParser(prog="python -m triton_gallery", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("html", help="execute what changed and build the site")
    command.add_argument("--out", type=Path, default=Path("_build/html"), help="where to (default: %(default)s)")
    command.set_defaults(run=html)

    command = commands.add_parser("record", help="execute recipes on GPUs and record their outputs")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--stale", action="store_true", help="only those whose record is missing or of older code")
    command.add_argument("--each-kind", action="store_true", help="once on each kind of GPU; else all have to be alike")
    command.add_argument("--dask", metavar="ADDRESS", help="on the GPU workers of the Dask scheduler at this address")
    command.add_argument("--insecure", action="store_true", help="allow tcp:// to a scheduler on another machine")
    command.add_argument("--out", type=Path, default=RECORDS, help="the folder of records (default: %(default)s)")
    command.set_defaults(run=record_recipes)

    command = commands.add_parser("needs", help="print the packages that recipes declare, for pip install")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=needs)

    command = commands.add_parser("sanitize", help="run the checks of recipes under compute-sanitizer")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=sanitize_recipes)

    command = commands.add_parser("check-records", help="list recipes whose record is missing or stale")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=check_records)

    command = commands.add_parser("results", help="print every recorded figure")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=results)

    command = commands.add_parser("compare", help="compare recorded figures with those of another revision")
    command.add_argument("base", help="a git revision")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=compare_records)

    command = commands.add_parser("spread", help="keep how far two recorded runs on the same machine differ")
    command.add_argument("first", type=Path, help="the folder with the records of one run")
    command.add_argument("second", type=Path, help="the folder with those of the other")
    command.set_defaults(run=spread)

    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (UsageError, FarmError, BadRecordError) as error:
        console.print(Text(str(error)), style="red")
        return 2
    except KeyboardInterrupt:
        console.print("stopped", style="red")
        return 128 + signal.SIGINT


def html(options: argparse.Namespace) -> int:
    """Build the site; end with a table of the recipes that failed and with what to open."""
    recipes = _recipes([])
    index = options.out / "index.html"
    index.unlink(missing_ok=True)
    status = sphinx_build(["-c", ".", "-W", "--keep-going", "-n", "-q", "docs", str(options.out)])
    pages = Pages(PAGES)
    failed = _print_failures([(recipe, run) for recipe in recipes if (run := pages.run(recipe.key))])
    if index.exists():
        console.print(f"Open {index}")
    return status or failed


def record_recipes(options: argparse.Namespace) -> int:
    """Execute recipes on GPUs and write their records; end with a table of those that failed."""
    chosen = _recipes(options.recipe)
    pages = Pages(PAGES)
    pages.lock()
    limit = runpy.run_path("conf.py")["recipe_time_limit"]
    tasks = make_tasks(chosen, Path.cwd(), limit)
    if options.dask:
        console.print(f"asking the GPU workers of {options.dask} what executes there")
    farm = connect(options.dask, Path.cwd(), options.insecure) if options.dask else nullcontext(ThisMachine())
    with farm as gpus, progress() as report:
        ended = record(tasks, gpus, pages, Records(options.out), report, options.stale, options.each_kind)
    if not ended:
        console.print("every record is of the present code")
    for recipe, run, path in ended:
        if path:
            console.print(f"wrote {path}")
        elif run.missing:
            lacks = ", ".join(run.missing)
            console.print(Text(f"{recipe.key} was not recorded, its environment lacks {lacks}"), style="red")
    failed = _print_failures([(recipe, run) for recipe, run, _ in ended])
    return max(failed, int(any(run.missing for _, run, _ in ended)))


def needs(options: argparse.Namespace) -> int:
    """Print the packages that recipes declare, one a line."""
    recipes = _recipes(options.recipe)
    declared = {package for recipe in recipes for package in packages(recipe.path, recipe.path.read_text("utf-8"))}
    print("\n".join(sorted(declared)))
    return 0


def sanitize_recipes(options: argparse.Namespace) -> int:
    """Run planted faults, which must be found, then the recipes' checks; note in their records what was clean."""
    chosen = _recipes(options.recipe)
    (device, *_) = detect()
    if not device.is_gpu:
        raise UsageError("torch sees no GPU here: compute-sanitizer watches one")
    recipes = [recipe for recipe in chosen if not missing(recipe.path, recipe.path.read_text("utf-8"))]
    try:
        proof = [verdict for script, tool in PLANTED.items() for verdict in sanitize([script], [tool])]
        verdicts = sanitize([recipe.path for recipe in recipes], TOOLS)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from None
    table = Table("script", *TOOLS)
    for script in [*PLANTED, *(recipe.path for recipe in recipes)]:
        said = {v.tool: v.outcome for v in [*proof, *verdicts] if v.script == script}
        table.add_row(str(script), *(said.get(tool, "") for tool in TOOLS))
    unclean = [verdict for verdict in verdicts if verdict.outcome != "clean"]
    for verdict in [*unclean, *(verdict for verdict in proof if verdict.outcome != "found")]:
        console.print(Text(f"{verdict.script} under {verdict.tool}:\n{verdict.report}\n"))
    console.print(table)
    if any(verdict.outcome != "found" for verdict in proof):
        raise UsageError("a planted fault was not found: the table says nothing of the recipes")
    for recipe in recipes:
        clean = [verdict.tool for verdict in verdicts if verdict.script == recipe.path and verdict.outcome == "clean"]
        Records(RECORDS).set_sanitized(recipe, device.name, clean)
    for recipe in chosen:
        if recipe not in recipes:
            console.print(f"{recipe.key} was not looked at: its environment lacks something", style="red")
    return int(bool(unclean) or recipes != chosen)


def check_records(options: argparse.Namespace) -> int:
    """List the recipes whose record is missing or stale, and those whose figures beside other libraries are stale."""
    recipes, wanting = _recipes(options.recipe), 0
    stale = {row.recipe for run in load_all(RECORDS) for row in run.stale(recipes)}
    for recipe in recipes:
        found = Records(RECORDS).of(recipe)
        faults = [] if found and found[0].is_fresh(recipe) else ["stale" if found else "missing"]
        faults += ["stale beside other libraries"] if recipe.key in stale else []
        if faults:
            wanting += 1
            console.print(f"{recipe.key:<32} {', '.join(faults)}")
    console.print(f"{wanting} of {len(recipes)} recipes want a new record")
    return int(wanting > 0)


def results(options: argparse.Namespace) -> int:
    """Print every recorded figure."""
    found = rows(Records(RECORDS), _recipes(options.recipe))
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=1))
        return 0
    table = Table("recipe", "table", "x", "series", "value", "unit", "device", "state")
    for row in found:
        x = f"{row.x_name} = {row.x:g}" if isinstance(row.x, float) else f"{row.x_name} = {row.x}"
        cells = [row.recipe, row.table, x, row.series, f"{row.value:.1f}", row.unit, row.device, row.state]
        table.add_row(*map(Text, cells))
    console.print(table)
    return 0


def compare_records(options: argparse.Namespace) -> int:
    """Compare recorded figures with those of another revision; 1 if one is slower beyond the spread."""
    try:
        changes = compare(Records(RECORDS), _recipes(options.recipe), options.base)
    except ValueError as error:
        raise UsageError(str(error)) from None
    table = Table("recipe", "table", "x", "series", "before", "now", "unit", "ratio", "")
    for change in changes:
        x = f"{change.row.x:g}" if isinstance(change.row.x, float) else change.row.x
        cells = [change.row.recipe, change.row.table, x, change.row.series, f"{change.before:.1f}"]
        cells += [f"{change.row.value:.1f}", change.row.unit, f"{change.ratio:.3f}", "slower" if change.slower else ""]
        table.add_row(*map(Text, cells), style="red" if change.slower else "")
    console.print(table)
    slower = sum(change.slower for change in changes)
    console.print(f"{slower} of {len(changes)} figures are slower by more than two runs of the same code differ")
    return int(slower > 0)


def spread(options: argparse.Namespace) -> int:
    """Keep how far two recorded runs differ."""
    try:
        path = measure_spread(Records(options.first), Records(options.second), _recipes([]), Records(RECORDS))
    except ValueError as error:
        raise UsageError(str(error)) from None
    console.print(f"wrote {path}")
    return 0


def _recipes(keys: Sequence[str]) -> list[Recipe]:
    try:
        recipes = load(GALLERY)
    except ValueError as error:
        raise UsageError(f"The gallery is not in order:\n{error}") from None
    unknown = set(keys) - {recipe.key for recipe in recipes}
    if unknown:
        raise UsageError(f"no such recipe: {', '.join(sorted(unknown))}; one is called section/name")
    return [recipe for recipe in recipes if not keys or recipe.key in keys]


def _print_failures(runs: Sequence[tuple[Recipe, Run]]) -> int:
    """Print a table of the runs that failed; return whether there are any."""
    failed = [(recipe, run) for recipe, run in runs if run.failure is not None]
    if failed:
        table = Table("recipe", "what happened", "last lines", title="Recipes that failed", show_lines=True)
        for recipe, run in failed:
            lines = run.detail.strip().splitlines()[-TRACEBACK_LINES:]
            where = f"\n{run.environment.name}" if run.environment.is_gpu else ""
            table.add_row(Text(recipe.key + where), Text(run.failure or ""), Text("\n".join(lines)))
        Console(highlight=False).print(table)
    return int(bool(failed))
