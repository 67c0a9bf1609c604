"""Measures the gallery's ops under several versions of Triton in rotation, on one GPU.

`make measure-versions` runs it. The Triton of this Python is the baseline. Each other one lies in a folder of its own:
`pip install --target FOLDER --no-deps triton==VERSION`. Each has a process, with empty caches. They compile side by
side, and then are timed one after the other, a few calls at a time, so that a drift of the clocks hits all alike.

What is measured is written into `FOLDER/versions.jsonl`, a line as each row ends, with a copy of each script. For
that, msgspec, torch, triton and what recipes import suffice. `--merge` then puts the rows into `docs/_records`, on a
machine that can build the site.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from triton_gallery.libraries.trial import GALLERY, RECORDS, ROOT, band, load_workloads, rates_of
from triton_gallery.libraries.workload import Workload
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import detect
from triton_gallery.records.files import BadRecordError, slug
from triton_gallery.records.git import commit

PROGRAM = Path(__file__).with_name("measuring_process.py")
ROWS = "versions.jsonl"
STEP = 240  # seconds that a step may take, compiling included
BLOCKS, TURNS = 8, 5
LOST = 0.95  # of the baseline's rate; what is below it is listed
WORKLOADS = load_workloads()


class FailedError(Exception):
    """A contender could not do a step; the message says why."""


class Task(NamedTuple):
    """One work, one way, at one size."""

    place: int  # in WORKLOADS
    name: str
    backward: bool
    shape: tuple[int, ...]

    @property
    def work(self) -> Workload:
        """Of what it is."""
        return WORKLOADS[self.place]

    @property
    def seed(self) -> int:
        """The same for all contenders."""
        return zlib.crc32(repr((self.work.recipe, self.name, self.shape)).encode())


class Contender:
    """One Triton with its process; one that fails gets another process for its next row."""

    def __init__(self, path: Path | None, fusion: bool, caches: Path) -> None:
        """Start it.

        Args:
            path: the folder that holds this Triton; None for that of this Python.
            fusion: whether floating-point products and sums are fused by default.
            caches: an empty folder, for what is compiled.
        """
        folders = [str(folder) for folder in (path and path.resolve(), ROOT / "src", ROOT) if folder]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_DEFAULT_FP_FUSION": str(int(fusion)),
        }
        self.process: subprocess.Popen[bytes] | None = None
        version, self.assembler = self.do("about")
        self.name = version if fusion else f"{version}, FP fusion off"

    def ask(self, step: str, *arguments: object) -> None:
        """Have a step begin, which may last until `deadline`."""
        if self.process is None:
            self.connection, child_end = Pipe()
            assert isinstance(child_end, Connection)
            self.process = subprocess.Popen(
                [sys.executable, "-B", PROGRAM, str(child_end.fileno())],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
            )
            child_end.close()
        self.deadline = time.monotonic() + STEP
        with suppress(OSError):  # it died; who waits for the answer is told
            self.connection.send((step, arguments))

    def answer(self) -> Any:
        """Return what the step that began gives; FailedError if it fails, or does not end."""
        assert self.process
        try:
            if not self.connection.poll(max(0, self.deadline - time.monotonic())):
                raise FailedError(f"a step took more than {STEP} s")
            result, error = self.connection.recv()
            if error:
                raise FailedError(error)
        except (EOFError, OSError):
            status = self.process.wait()
            self.stop()
            raise FailedError(f"its process died with exit status {status}") from None
        except FailedError:
            self.stop()  # an error may have broken the GPU's context
            raise
        return result

    def do(self, step: str, *arguments: object) -> Any:
        """Have a step done; FailedError if it fails, or does not end."""
        self.ask(step, *arguments)
        return self.answer()

    def stop(self) -> None:
        """End the process."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.connection.close()
            self.process = None


def measure(contenders: Sequence[Contender], task: Task) -> dict[str, dict[str, Any]]:
    """Return what came of a task under each contender, as a row has it."""
    import torch

    results: dict[str, dict[str, Any]] = {
        side.name: {"rate": None, "seconds": None, "kernels": None, "assembler": side.assembler, "failed": None}
        for side in contenders
    }
    times: dict[str, list[float]] = {side.name: [] for side in contenders}

    def unless_failed(contender: Contender, step: Callable[[], Any]) -> Any:
        if results[contender.name]["failed"] is None:
            try:
                return step()
            except FailedError as error:
                results[contender.name]["failed"] = str(error)
        return None

    for contender in contenders:
        contender.ask("prepare", task.place, task.backward, task.shape, task.seed)
    for contender in contenders:
        if compiled := unless_failed(contender, contender.answer):
            results[contender.name] |= {"seconds": round(compiled[0], 3), "kernels": compiled[1]}
    for contender in contenders:
        unless_failed(contender, lambda contender=contender: contender.do("check"))  # type: ignore[misc]
    for block in range(1 + BLOCKS):
        for contender in contenders:
            block_times = unless_failed(contender, lambda contender=contender: contender.do("time", TURNS))  # type: ignore[misc]
            if block > 0 and block_times:  # the first warms up
                times[contender.name] += block_times
    amount = task.work.amount(task.shape, getattr(torch, task.work.dtype).itemsize, task.backward)
    for name, outcome in results.items():
        if outcome["failed"] is None:
            outcome["rate"] = rates_of(amount, band(times[name]))
    return results


def three(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the smallest, the middle and the largest of sizes."""
    ordered = sorted(shapes, key=math.prod)
    return [ordered[index] for index in sorted({0, len(ordered) // 2, len(ordered) - 1})]


def tasks(chosen: Sequence[str], shard: tuple[int, int]) -> list[Task]:
    """Return what is measured of these recipes, or of all if there are none: every N-th recipe from the I-th on."""
    recipes = [*dict.fromkeys(work.recipe for work in WORKLOADS if not chosen or work.recipe in chosen)]
    in_shard = recipes[shard[0] :: shard[1]]
    return [
        Task(place, name, backward, shape)
        for place, work in enumerate(WORKLOADS)
        if work.recipe in in_shard
        for name, backward in work.directions.items()
        for shape in three(work.shapes)
    ]


def write(folder: Path, row: dict[str, Any]) -> None:
    """Add a row, and a copy of the script that was measured: the hash of its code is made when rows are merged."""
    script = (GALLERY / f"{row['recipe']}.py").read_bytes()
    row["script"] = hashlib.sha256(script).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row['script']}.py").write_bytes(script)
    with open(folder / ROWS, "a", encoding="utf-8") as rows:
        rows.write(f"{json.dumps(row)}\n")


def merge_all(folders: Sequence[Path]) -> int:
    """Put the rows of these folders into the records; return the exit status."""
    # Here, because a machine that only measures need not have what these import.
    from triton_gallery.recipe.measured import op_hash
    from triton_gallery.versions.rates import VersionRow, merge

    known = [(work.recipe, name, shape) for work in WORKLOADS for name in work.directions for shape in work.shapes]
    try:
        rows = []
        for path in (folder / ROWS for folder in folders):
            lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            for line in lines:
                try:
                    row = msgspec.json.decode(line)
                    script = path.parent / f"{row.pop('script')}.py"
                    section, _, name = row["recipe"].partition("/")
                    code = op_hash(Recipe(section, name, script))
                    rows.append(msgspec.convert({**row, "code": code}, VersionRow))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise BadRecordError(f"{path}: not a row of make measure-versions: {error}") from None
        rows.sort(key=lambda row: (slug(row.environment.name), row.date))
        for _, of_device in groupby(rows, key=lambda row: slug(row.environment.name)):
            device_rows = list(of_device)
            print(f"wrote {len(device_rows)} rows into {', '.join(map(str, merge(RECORDS, device_rows, known)))}")
    except (BadRecordError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def ratios(row: dict[str, Any], baseline: str) -> dict[str, float]:
    """Return the rates of a row in that of the baseline, by contender, where both have one."""
    rates = {name: outcome["rate"][0] for name, outcome in row["contenders"].items() if outcome["rate"]}
    base = rates.pop(baseline, None)
    return {name: rate / base for name, rate in rates.items()} if base else {}


def summary(rows: Sequence[dict[str, Any]], baseline: str) -> list[str]:
    """Return the lines of a table: the ratios of each work, the smallest size first; then what lost."""
    lines, lost = [], []
    for work, of_work in groupby(rows, key=lambda row: row["work"]):
        work_rows = list(of_work)
        for name in (name for name in work_rows[0]["contenders"] if name != baseline):
            row_ratios = [ratios(row, baseline).get(name) for row in work_rows]
            shown = "  ".join("    -" if ratio is None else f"{ratio:5.3f}" for ratio in row_ratios)
            lines.append(f"{work:<40} {name} / {baseline}: {shown}")
            if any(ratio is not None and ratio < LOST for ratio in row_ratios):
                lost.append(f"{work} with {name}: {shown}")
    return [*lines, f"lost more than {1 - LOST:.0%} at a size: {len(lost)}", *(f"  {line}" for line in lost)]


def main(arguments: list[str] | None = None) -> int:
    """Measure, or merge; return the exit status: 0, 1 if a contender failed in a row, 2 if nothing could be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, action="append", default=[], help="a folder that holds another Triton")
    parser.add_argument("--no-fusion", action="store_true", help="measure the last Triton without FP fusion too")
    parser.add_argument("--recipes", nargs="+", default=[], metavar="RECIPE", help="section/name; all if none is given")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th recipe, from the I-th on (0 to N-1)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="then begin no further row")
    parser.add_argument("--records", type=Path, default=ROOT / "_build" / "versions", help="where the rows go")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FOLDER", help="put rows of folders into the records")
    options = parser.parse_args(arguments)
    if options.merge:
        return merge_all(options.merge)
    try:
        place, count = map(int, options.shard.split("/"))
    except ValueError:
        parser.error(f"--shard takes I/N, not {options.shard}")
    if not 0 <= place < count:
        parser.error(f"--shard {options.shard}: I is from 0 to N - 1")
    if unknown := set(options.recipes) - {work.recipe for work in WORKLOADS}:
        print(f"not measured: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    for path in options.triton:
        if not (path / "triton" / "__init__.py").is_file():
            print(f"no Triton in {path}", file=sys.stderr)
            return 2
    try:
        date, revision = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commit()
    except BadRecordError as error:
        print(error, file=sys.stderr)
        return 2
    environment = detect()[0].environment
    if not environment.is_gpu:
        print("torch sees no GPU here: versions are measured on one", file=sys.stderr)
        return 2
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory() as caches:
        try:
            for path, fusion in sides(options.triton, options.no_fusion):
                contenders.append(Contender(path, fusion, Path(caches, str(len(contenders)))))
            names = [contender.name for contender in contenders]
            if len(set(names)) < len(names):
                raise FailedError(f"a version stands twice: {'; '.join(names)}")
            due = tasks(options.recipes, (place, count))
            made = {"device": {**structs.asdict(environment), "triton": names[0]}, "date": date, "commit": revision}
            return run(contenders, due, options.records, options.limit, made)
        except FailedError as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            for contender in contenders:
                contender.stop()


def sides(paths: Sequence[Path], no_fusion: bool) -> list[tuple[Path | None, bool]]:
    """Return where the Triton of each contender lies, and whether it fuses; the baseline is the first."""
    pairs: list[tuple[Path | None, bool]] = [(path, True) for path in (None, *paths)]
    return [*pairs, (pairs[-1][0], False)] if no_fusion else pairs


def run(contenders: Sequence[Contender], due: Sequence[Task], folder: Path, limit: float, made: dict[str, Any]) -> int:
    """Measure tasks, write their rows, each with what `made` says of all, print a table; return the exit status."""
    began = time.monotonic()
    baseline = contenders[0].name
    print("; ".join(f"Triton {side.name} with ptxas {side.assembler}" for side in contenders), flush=True)
    rows: list[dict[str, Any]] = []
    failed = 0
    for task in due:
        if time.monotonic() - began > limit:
            break
        results = measure(contenders, task)
        row = {
            "recipe": task.work.recipe,
            "work": task.name,
            "shape": [*task.shape],
            "unit": task.work.amount(task.shape, 1, task.backward).unit,
            **made,
            "contenders": results,
        }
        rows.append(row)
        reasons = [f"{name} failed: {outcome['failed']}" for name, outcome in results.items() if outcome["failed"]]
        failed += len(reasons)
        if len(reasons) < len(results):  # else there is nothing to keep
            write(folder, row)
        shown = ", ".join(f"{name} {outcome['rate'][0]:.4g}" for name, outcome in results.items() if outcome["rate"])
        print(f"{task.name:<40} {task.shape} {row['unit']}: {shown}", *reasons, sep="\n    ", flush=True)
    print(*summary(rows, baseline), sep="\n")
    for task in due[len(rows) :]:
        print(f"left out for want of time: {task.name} {task.shape}")
    if failed:
        print(f"failed: {failed}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # no __pycache__ among the recipes
    sys.exit(main())
