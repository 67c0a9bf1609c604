"""What is shown of a recipe's cells: what a run put out, and beside it what a record has beyond that."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from triton_gallery.recipe.outputs import Output
from triton_gallery.records.page_cache import Run
from triton_gallery.records.record_store import Record

NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:e[+-]?\d+)?")
STALE = " · stale: this recipe has changed since"


@dataclass(frozen=True)
class Shown:
    """What is shown of a cell.

    Attributes:
        here: what this machine put out.
        there: what the record has and this machine has not.
        differ: whether this machine put out something else, and not only less; then both say what they are.
        in_numbers: whether all that differs are numbers; then those of the record are shown alone.
    """

    here: Output
    there: Output
    differ: bool
    in_numbers: bool = False


def side_by_side(run: Run, record: Record | None, is_fresh: bool, figures: Mapping[str, bytes]) -> list[Shown]:
    """Return what is shown of each cell.

    An output of a GPU needs no record beside it. Where the record differs in numbers and figures alone, only the
    record's are shown.

    Args:
        run: the one that made the recipe's page.
        record: of the recipe, if there is one.
        is_fresh: whether that is of the present code; else the run's own numbers are shown too.
        figures: those on the recipe's page, by their names.
    """
    recorded = dict(_numbered(record.outputs)) if record else {}
    shown = []
    for number, here in _numbered(run.outputs):
        if record is None or number not in recorded or (here and run.environment.is_gpu):
            shown.append(Shown(here, Output.empty(here.cell_hash), differ=False))
            continue
        recorded_output = recorded[number]
        same = [figures.get(name) for name in here.figures] == list(pictures(record, recorded_output).values())
        more = _beyond(here, recorded_output, same)
        in_numbers = _without_numbers(here) == _without_numbers(recorded_output)
        if more and is_fresh and in_numbers:
            shown.append(Shown(Output.empty(here.cell_hash), recorded_output, differ=False, in_numbers=True))
        else:
            shown.append(Shown(here, more, bool(more) and _differ(here, recorded_output, more)))
    return shown


def pictures(record: Record, output: Output) -> dict[str, bytes]:
    """Return the recorded figures of an output by their names."""
    return {name: (record.path.parent / name).read_bytes() for name in output.figures}


def ran_here(run: Run) -> str:
    """Return what stands above what this machine put out, where a record has something else."""
    return f"Here, without a GPU, Triton {run.environment.triton}"


def recorded_on(record: Record) -> str:
    """Return what stands above what a record has."""
    return f"Recorded on {record.environment.name}, Triton {record.environment.triton}, {record.date[:10]}"


def _numbered(outputs: Iterable[Output]) -> Iterator[tuple[tuple[str, int], Output]]:
    """Name each output by its cell's code, and by how many cells before it have the same."""
    seen: Counter[str] = Counter()
    for output in outputs:
        yield (output.cell_hash, seen[output.cell_hash]), output
        seen[output.cell_hash] += 1


def _beyond(here: Output, recorded: Output, same_figures: bool) -> Output:
    """Return what a record has of a cell that this machine did not put out; of a text that begins alike, the rest."""
    rest = recorded.text.removeprefix(f"{here.text}\n").strip("\n")
    return Output(
        recorded.cell_hash,
        "" if _anywhere(recorded.text) == _anywhere(here.text) else rest,
        [] if same_figures else recorded.figures,
        None if recorded.frame == here.frame else recorded.frame,
        [table for table in recorded.tables if table not in here.tables],
    )


def _without_numbers(output: Output) -> tuple[list[str], list[list[str]], int, list[str]]:
    """Return what is the same of two outputs that differ in numbers alone."""
    frame = output.frame
    rows = [[*frame.columns], *frame.rows] if frame else []
    lines = [" ".join(NUMBER.sub("0", line).split()) for line in _anywhere(output.text).splitlines()]
    cells = [[NUMBER.sub("0", cell) for cell in row] for row in rows]
    return lines, cells, len(output.figures), [table.name for table in output.tables]


def _anywhere(text: str) -> str:
    """Return a text as it is where PyTorch has its tensors on the CPU."""
    for gpu_text, cpu_text in ((", device='cuda:0'", ""), ("type='cuda', index=0", "type='cpu'"), ("cuda:0", "cpu")):
        text = text.replace(gpu_text, cpu_text)
    return text


def _differ(here: Output, recorded: Output, more: Output) -> bool:
    """Whether this machine put out something else, and not only less, than is shown of a record."""
    pairs = [(here.figures, more.figures), (here.frame, more.frame), (here.tables, more.tables)]
    return any(part and extra for part, extra in pairs) or bool(here.text and more.text == recorded.text)
