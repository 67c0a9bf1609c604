"""The command line: `triton-gallery COMMAND`, run in the folder that holds `conf.py`."""

import argparse
import json
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path
from time import monotonic

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sphinx.cmd.build import main as sphinx_build

from triton_gallery.compiled import store
from triton_gallery.compiled.compile import Compiler, is_current, launched
from triton_gallery.compiled.gpus import GPUS
from triton_gallery.compiled.table import COLUMNS, cells
from triton_gallery.execute.dask.cluster import connect
from triton_gallery.execute.execute import make_tasks, refresh
from triton_gallery.execute.progress import compiling, progress
from triton_gallery.execute.recording import FarmError, ThisMachine, record
from triton_gallery.execute.sanitize import sanitize
from triton_gallery.execute.settings import read
from triton_gallery.figures.compare import compare
from triton_gallery.figures.measurements import Measurement, all_recorded
from triton_gallery.figures.ratios import pooled, tenth
from triton_gallery.libraries import model_rows
from triton_gallery.libraries.library_rows import load_all
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.device import NoEnvironmentError, detect, together
from triton_gallery.recipe.needs import missing, packages
from triton_gallery.recipe.new import create
from triton_gallery.recipe.tables import TORCH_COMPILE, TRITON
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.page_cache import Pages, Run
from triton_gallery.records.record_store import TOOLS, Records
from triton_gallery.versions import matrix
from triton_gallery.versions.trials import TrialError, newest_release, try_pair

GALLERY, PAGES, RECORDS = Path("gallery"), Path("docs/recipes"), Path("docs/_records")
COMPILED, CACHE, LISTINGS = Path("docs/_compiled"), Path("_build/compiled"), Path("_build/listings")
VERSIONS = Path("docs/_versions")
NEWEST, NEXT = "newest", "next"  # the last that is listed, and the last that was released
BEFORE = "HEAD~1"  # the commit that --check compares with
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every locale has all that recipes print
    parser = argparse.ArgumentParser(prog="triton-gallery", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("html", help="execute what changed and build the site")
    command.add_argument("--out", type=Path, default=Path("_build/html"), help="where to (default: %(default)s)")
    command.set_defaults(run=html)

    command = commands.add_parser("record", help="execute recipes on GPUs and record their outputs")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--only-stale", action="store_true", help="those whose record is missing or of older code")
    command.add_argument("--force", action="store_true", help="execute those too that ran here with the present code")
    command.add_argument(
        "--per-gpu-model", action="store_true", help="once on each model of GPU; else all have to be alike"
    )
    command.add_argument("--dask", metavar="ADDRESS", help="on the GPU workers of the Dask scheduler at this address")
    command.add_argument("--insecure", action="store_true", help="allow tcp:// to a scheduler on another machine")
    command.add_argument("--out", type=Path, default=RECORDS, help="the folder of records (default: %(default)s)")
    command.set_defaults(run=record_recipes)

    command = commands.add_parser("new", help="write a recipe and its test, to be made into what they shall be")
    command.add_argument("recipe", help="section/name")
    command.set_defaults(run=new)

    command = commands.add_parser("needs", help="print the packages that recipes declare, for pip install")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=needs)

    command = commands.add_parser("sanitize", help="run the checks of recipes under compute-sanitizer")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=sanitize_recipes)

    command = commands.add_parser("check-records", help="list recipes whose record is missing or stale")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=check_records)

    command = commands.add_parser("compiled", help="print what the kernels compile to for GPUs that need not be here")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=print_compiled)

    command = commands.add_parser(
        "compile", help="compile the kernels for GPUs that need not be here, where they changed"
    )
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--force", action="store_true", help="where nothing changed too")
    command.add_argument("--check", action="store_true", help="keep nothing: compare with what is kept")
    command.set_defaults(run=compile_kernels)

    command = commands.add_parser("listings", help="compile again what is kept, so that pages show the compilers' code")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=make_listings)

    command = commands.add_parser("versions", help="try lessons, ops, kernels and features with several Tritons")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--triton", action="append", help=f"a version, {NEWEST} of those listed, or {NEXT}; else all")
    command.add_argument(
        "--with", dest="others", action="append", default=[], help="another package to install over the pins"
    )
    command.add_argument("--force", action="store_true", help="what passed before with the same code too")
    command.add_argument("--seconds", type=float, help="start nothing with a Triton after so many")
    command.set_defaults(run=try_versions)

    command = commands.add_parser("results", help="print every recorded figure")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=results)

    command = commands.add_parser("compare", help="compare recorded figures with those of another revision")
    command.add_argument("base", help="a git revision")
    command.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    command.set_defaults(run=compare_records)

    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["targets"]:
        print("triton-gallery targets is now triton-gallery compiled", file=sys.stderr)
        return 2
    options = parser.parse_args(given)
    try:
        return int(options.run(options))
    except (UsageError, FarmError, BadRecordError, NoEnvironmentError, TrialError) as error:
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
    status = sphinx_build(["-c", ".", "-j", "auto", "-W", "--keep-going", "-n", "-q", "docs", str(options.out)])
    pages = Pages(PAGES)
    if status:  # Sphinx would not say again what it warned of
        Path(options.out, ".doctrees", "environment.pickle").unlink(missing_ok=True)
    failed = _print_failures([(recipe, run) for recipe in recipes if (run := pages.run(recipe.key))])
    if index.exists():
        console.print(f"Open {index}")
    return status or failed


def record_recipes(options: argparse.Namespace) -> int:
    """Execute recipes on GPUs and write their records; end with a table of those that failed."""
    chosen = _recipes(options.recipe)
    pages = Pages(PAGES)
    pages.lock(console.print)
    try:
        settings = read(Path.cwd())
    except ValueError as error:
        raise UsageError(str(error)) from None
    tasks = make_tasks(chosen, settings)
    if options.dask:
        console.print(f"asking the GPU workers of {options.dask} what executes there")
    farm = connect(options.dask, options.insecure) if options.dask else nullcontext(ThisMachine())
    with farm as gpus, progress() as (report, say):
        ended = record(
            tasks,
            gpus,
            pages,
            Records(options.out),
            report,
            say,
            only_stale=options.only_stale,
            per_gpu_model=options.per_gpu_model,
            force=options.force,
        )
    if not ended:
        console.print("every record is of the present code")
    for item in ended:
        if item.path:
            console.print(f"{f'kept what ran on {item.run.date}: ' if item.before else ''}wrote {item.path}")
        elif item.run.missing:
            lacks = ", ".join(item.run.missing)
            console.print(Text(f"{item.recipe.key} was not recorded, its environment lacks {lacks}"), style="red")
    failed = _print_failures([(item.recipe, item.run) for item in ended])
    return max(failed, int(any(item.run.missing for item in ended)))


def new(options: argparse.Namespace) -> int:
    """Write a recipe and its test."""
    try:
        written = create(Path.cwd(), options.recipe)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for path in written:
        console.print(f"wrote {path.relative_to(Path.cwd())}")
    console.print(f"Next: make html && make test RECIPE={options.recipe}")
    return 0


def needs(options: argparse.Namespace) -> int:
    """Print the packages that recipes declare, one a line."""
    recipes = _recipes(options.recipe)
    declared = {package for recipe in recipes for package in packages(recipe.path, recipe.text)}
    print("\n".join(sorted(declared)))
    return 0


def sanitize_recipes(options: argparse.Namespace) -> int:
    """Run planted faults, which must be found, then the recipes' checks; note in their records what was clean."""
    chosen = _recipes(options.recipe)
    slots = detect()
    whole = together(slots)
    if not slots[0].environment.is_gpu:
        raise UsageError("torch sees no GPU here: compute-sanitizer watches one")
    # Where each recipe runs: those for several GPUs on all that are alike
    devices = {
        r: (whole if whole and declaration(r.path, r.text).of_op.gpus > 1 else slots[0]).environment for r in chosen
    }
    recipes = [r for r, on in devices.items() if not missing(r.path, r.text, on.capability, on.gpus)]
    try:
        proof = [verdict for script, tool in PLANTED.items() for verdict in sanitize([script], [tool])]
        verdicts = sanitize([recipe.path for recipe in recipes if devices[recipe].gpus == 1], TOOLS)
        for recipe in recipes:
            if devices[recipe].gpus > 1:  # one at a time: it has all GPUs
                verdicts += sanitize([recipe.path], TOOLS, devices[recipe].gpus)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from None
    table = Table("script", *TOOLS)
    for script in [*PLANTED, *(recipe.path for recipe in recipes)]:
        outcomes = {v.tool: v.outcome for v in [*proof, *verdicts] if v.script == script}
        table.add_row(str(script), *(outcomes.get(tool, "") for tool in TOOLS))
    unclean = [verdict for verdict in verdicts if verdict.outcome != "clean"]
    for verdict in [*unclean, *(verdict for verdict in proof if verdict.outcome != "found")]:
        console.print(Text(f"{verdict.script} under {verdict.tool}:\n{verdict.report}\n"))
    console.print(table)
    if any(verdict.outcome != "found" for verdict in proof):
        raise UsageError("a planted fault was not found: the table says nothing of the recipes")
    wanting = dict.fromkeys(chosen, "was not looked at: its environment lacks something")
    for recipe in recipes:
        clean = [verdict.tool for verdict in verdicts if verdict.script == recipe.path and verdict.outcome == "clean"]
        try:
            Records(RECORDS).set_sanitized(recipe, devices[recipe].name, clean)
            del wanting[recipe]
        except BadRecordError as error:
            wanting[recipe] = f"was looked at, but its record could not say so: {error}"
    for recipe, why in wanting.items():
        console.print(Text(f"{recipe.key} {why}"), style="red")
    return int(bool(unclean or wanting))


def check_records(options: argparse.Namespace) -> int:
    """List the recipes whose record is missing or stale, or whose figures beside other libraries are; and models."""
    recipes, wanting = _recipes(options.recipe), 0
    stale = {row.recipe for row in load_all(RECORDS) if not row.is_fresh(recipes)}
    for recipe in recipes:
        records = Records(RECORDS).of(recipe)
        faults = [] if records and records[0].is_fresh(recipe) else ["stale" if records else "missing"]
        faults += ["stale beside other libraries"] if recipe.key in stale else []
        if faults:
            wanting += 1
            console.print(f"{recipe.key:<32} {', '.join(faults)}")
    console.print(f"{wanting} of {len(recipes)} recipes want a new record")
    models = [] if options.recipe else [row.case for row in model_rows.load_all(RECORDS) if not row.is_fresh]
    if models:
        console.print(f"make models was run with older code: {', '.join(map(str, models))}")
    return int(bool(wanting or models))


def print_compiled(options: argparse.Namespace) -> int:
    """Print what is kept of the kernels: a table for each, or all as JSON."""
    recipes = _recipes(options.recipe)
    compiled = {recipe: kept for recipe in recipes if (kept := store.load(COMPILED, recipe))}
    if options.json:
        print(json.dumps({recipe.key: store.as_json(kept) for recipe, kept in compiled.items()}, indent=1))
        return 0
    for recipe, kept in compiled.items():
        older = "" if kept.is_fresh(recipe) else ", of older code"
        for kernel in kept.kernels:
            title = Text(f"{recipe.key}: {kernel.launch.described}; triton {kept.triton}{older}")
            table = Table("GPU", *COLUMNS, title=title, title_justify="left")
            for gpu in GPUS:
                table.add_row(*map(Text, [gpu.name, *cells(kernel, gpu)]))
            console.print(table)
    console.print(
        f"{len(compiled)} of {len(recipes)} recipes were compiled for other GPUs; make compile compiles the rest"
    )
    return 0


def compile_kernels(options: argparse.Namespace) -> int:
    """Compile what changed, for all GPUs, and keep it, or check it: 1 if a kernel that fitted no longer does.

    It is compared with what was kept and, to check, with what was kept at the commit before, too.
    """
    chosen = _recipes(options.recipe)
    kept = {recipe.key: store.load(COMPILED, recipe) for recipe in chosen}
    pages = Pages(PAGES)
    pages.lock(console.print)
    try:
        settings = read(Path.cwd())
    except ValueError as error:
        raise UsageError(str(error)) from None
    records = Records(RECORDS)
    due = [recipe for recipe in chosen if options.force or not is_current(recipe, kept[recipe.key], records)]
    with progress() as (report, say):
        runs = refresh(due, pages, settings, report, say)
    failed = _print_failures(runs)
    work = [(recipe, *launched(recipe, run, records)) for recipe, run in runs if run.failure is None]
    started = monotonic()
    with compiling() as report_launch, Compiler(CACHE) as compiler:
        made = compiler.targets(work, report_launch)
    errors = 0
    for recipe in chosen:
        now, texts = made.get(recipe.key, (kept[recipe.key], {}))
        before = [kept[recipe.key], store.load_at(BEFORE, COMPILED, recipe) if options.check else None]
        worse = [message for old in before if old and now for message in store.worse(old, now)]
        for is_error, message in dict.fromkeys(worse):
            errors += is_error
            console.print(Text(f"{'error' if is_error else 'warning'}: {recipe.key}: {message}"), style="red")
        if now and recipe.key in made and not options.check:
            console.print(f"wrote {store.write(COMPILED, recipe, now)}")
            store.write_texts(LISTINGS, now, texts)
    launches = sum(len(kernel.on) for now, _ in made.values() for kernel in now.kernels)
    console.print(
        f"compiled {launches} launches of {len(work)} recipes in {monotonic() - started:.1f} s; "
        f"{len(chosen) - len(due)} recipes had not changed"
    )
    return max(failed, int(options.check and errors > 0))


def make_listings(options: argparse.Namespace) -> int:
    """Compile the kept launches again, executing no recipe, and keep the compilers' code for the site."""
    kept = {recipe: targets for recipe in _recipes(options.recipe) if (targets := store.load(COMPILED, recipe))}
    due = {recipe: targets for recipe, targets in kept.items() if not store.listing(LISTINGS, targets).is_file()}
    work = [
        (recipe, [kernel.launch for kernel in targets.kernels], targets.launched_by) for recipe, targets in due.items()
    ]
    with compiling() as report, Compiler(CACHE) as compiler:
        made = compiler.targets(work, report)
    for recipe, targets in due.items():
        now, texts = made[recipe.key]
        if now == targets:
            store.write_texts(LISTINGS, now, texts)
        else:
            made_by = f"Triton {targets.triton}" if targets.triton != now.triton else "other code"
            console.print(
                Text(f"{recipe.key} gets no listings: its figures are of {made_by}; run make compile"), style="red"
            )
    listed = sum(store.listing(LISTINGS, targets).is_file() for targets in kept.values())
    console.print(f"{listed} of {len(kept)} recipes have listings, {len(kept) - len(due)} had them before")
    return 0


def try_versions(options: argparse.Namespace) -> int:
    """Try the gallery with the Tritons that are listed, or named; keep what came of it; 1 if something failed."""
    chosen, listed = _recipes(options.recipe), matrix.pairs(VERSIONS)
    failed = 0
    for name in options.triton or [pair.triton for pair in listed]:
        wanted = newest_release() if name == NEXT else listed[-1].triton if name == NEWEST else name
        if name == NEXT and wanted in {pair.triton for pair in listed}:
            console.print(f"Triton {wanted} is the newest, and listed")
            continue
        others = next((pair.others for pair in listed if pair.triton == wanted), [])
        pair = matrix.Pair(wanted, [*others, *options.others])
        known = {entry.triton: entry for entry in matrix.load(VERSIONS)} if pair in listed else {}
        console.print(f"Triton {' with '.join([wanted, *pair.others])}")
        try:
            keys = [recipe.key for recipe in chosen]
            tried = try_pair(pair, keys, known.get(wanted), options.force, options.seconds)
        except TrialError as error:  # the others are tried all the same
            console.print(Text(f"Triton {wanted}: {error}"), style="red")
            failed += 1
            if error.tried is None:
                continue
            tried = error.tried
        faults = list(matrix.failures(tried, matrix.hashes(chosen)))
        failed += len(faults)
        for kind, item, fault in faults:
            console.print(Text(f"Triton {wanted}: {kind} {item}: {fault}"), style="red")
        if pair in listed:
            console.print(f"wrote {matrix.write(VERSIONS, tried, load(GALLERY))}")
        console.print(f"Triton {wanted}: {f'{len(faults)} failed' if faults else 'nothing failed'}")
    return int(failed > 0)


def results(options: argparse.Namespace) -> int:
    """Print every recorded figure: those of the recipes' own benchmarks, then those beside other libraries."""
    recorded = all_recorded(Records(RECORDS), _recipes(options.recipe))
    if options.json:
        print(json.dumps(recorded, indent=1))
        return 0
    columns = ["recipe", "table", "x", "series", "value", "low", "high", "unit", "CPU us", "", "device", "state"]
    table = Table(*columns)
    for row in msgspec.convert(recorded["figures"], list[Measurement]):
        value, low, high, cpu = (_number(figure) for figure in (row.value, row.p20, row.p80, row.cpu_us))
        cells = [row.recipe, row.table, f"{row.x_name} = {_x(row)}", row.series, value, low, high, row.unit, cpu]
        table.add_row(*map(Text, [*cells, "CPU decided" if row.cpu_bound else "", row.device, row.state]))
    console.print(table)
    table = Table("recipe", "work", "shape", "series", "value", "low", "high", "unit", "CPU us", "device", "state")
    of_device = defaultdict[str, list[tuple[float, str, str]]](list)  # CPU time over torch.compile's, and of what
    of_work = defaultdict[tuple[str, str], list[float]](list)  # our rate over the best other's
    first_calls = Table("first call, s", "shape", TRITON, TORCH_COMPILE, "device", "state")
    for beside in recorded["libraries"]:
        cpu_us, size = beside["cpu_us"], " x ".join(map(str, beside["shape"]))
        if beside["state"] == "fresh" and {TRITON, TORCH_COMPILE} <= cpu_us.keys():
            of_device[beside["device"]].append((cpu_us[TRITON] / cpu_us[TORCH_COMPILE], beside["work"], size))
        if beside["state"] == "fresh" and beside["ratio"]:
            of_work[pooled(beside["work"]), beside["device"]].append(beside["ratio"])
        if first := beside["first_call_s"]:
            seconds = (f"{first[name]:.2f}" if name in first else "" for name in (TRITON, TORCH_COMPILE))
            cells = [beside["work"], size, *seconds]
            first_calls.add_row(*map(Text, [*cells, beside["device"], beside["state"]]))
        for series, rate in beside["rates"].items():
            figures = [_number(rate[name] if rate else None) for name in ("value", "low", "high")]
            cells = [beside["recipe"], beside["work"], size, series, *figures, beside["unit"]]
            cells += [_number(cpu_us.get(series)), beside["device"], beside["state"]]
            table.add_row(*map(Text, cells))
    console.print(table)
    table = Table("Triton / best other", "device", "fresh rows", "worst", "tenth", "median", "best")
    for about, found in of_work.items():
        shown = (min(found), tenth(found), statistics.median(found), max(found))
        table.add_row(*map(Text, [*about, str(len(found)), *(f"{ratio:.2f}" for ratio in shown)]))
    console.print(table)
    if first_calls.row_count:
        console.print(first_calls)
    for device, ratios in of_device.items():
        worst, work, size = max(ratios)
        middle = statistics.median(ratio for ratio, *_ in ratios)
        console.print(f"CPU time of a call over that of torch.compile's function, {device}, {len(ratios)} fresh rows:")
        console.print(f"median {middle:.2f}, largest {worst:.2f} ({work}, {size})")
    return 0


def compare_records(options: argparse.Namespace) -> int:
    """Compare recorded figures with those of another revision; 1 if one of ours is slower, or none can be judged."""
    try:
        changes = compare(Records(RECORDS), _recipes(options.recipe), options.base)
    except ValueError as error:
        raise UsageError(str(error)) from None
    table = Table("recipe", "table", "x", "series", "before", "now", "unit", "ratio", "")
    for change in changes:
        now, before = change.now, change.before
        bad = now.is_ours and change.verdict not in {"", "faster"}
        cells = [now.recipe, now.table, _x(now), now.series, f"{before.value:.1f}", f"{now.value:.1f}", now.unit]
        table.add_row(*map(Text, [*cells, f"{change.ratio:.3f}", change.verdict]), style="red" if bad else "")
    if changes:
        console.print(table)
    ours = [change.verdict for change in changes if change.now.is_ours]
    slower, unknown = ours.count("slower"), ours.count("no band") + ours.count("CPU decided")
    console.print(f"{slower} of {len(ours)} figures of ours are slower by more than two runs of the same code differ")
    if unknown:
        console.print(f"{unknown} could not be judged: no band was kept, or the CPU decided them", style="red")
    return int(slower + unknown > 0)


def _x(figure: Measurement) -> str:
    return f"{figure.x:g}" if isinstance(figure.x, float) else figure.x


def _number(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"


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
