"""A recorded launch as data: cells are numbered, values are texts, each step has its sentence."""

import math
from collections.abc import Sequence

import numpy as np

from triton_gallery.recipe.declaration import Launch
from triton_gallery.step_through.cells import Array, Cell, Named
from triton_gallery.step_through.record import Event, Ran, Recorder
from triton_gallery.step_through.sentences import sentence, short
from triton_gallery.step_through.trace import Access, Register, Step, Tensor, Trace

ROWS, COLUMNS = 12, 44  # the most that room is made for, for lanes that are masked off or outside

Program = tuple[int, int, int]


def assemble(launch: Launch, recorder: Recorder, verdict: str, is_wrong: bool) -> Trace:
    """Return a recorded launch as data.

    Args:
        launch: as the lesson declares it.
        recorder: what was recorded.
        verdict: how the result compares with what is expected.
        is_wrong: whether it differs.
    """
    tensors = [_tensor(number, recorder) for number in range(len(recorder.tensors))]
    kept = [number for number, line in enumerate(recorder.lines) if not line.strip().startswith("#")]
    shown = {recorder.first_line + number: place for place, number in enumerate(kept, start=1)}
    order = sorted({ran.program for ran in recorder.ran}, key=lambda program: program[::-1])  # axis 0 is the fastest
    steps = []
    for number, program in enumerate(order):
        mine = [ran for ran in recorder.ran if ran.program == program]
        for ran, following in zip(mine, [*mine[1:], None], strict=True):
            lines = [shown[line] for line in range(ran.statement.first, ran.statement.last + 1) if line in shown]
            accesses = [_access(event, recorder, tensors) for event in ran.events if event.lanes]
            values = {launch.registers.index(name): _texts(array) for name, array in ran.values.items()}
            text = sentence(ran, recorder.tensors, following)
            steps.append(Step(number, (lines[0], lines[-1]), text, accesses, values))
    return Trace(
        label=launch.label,
        kernel=launch.kernel,
        lines=[recorder.lines[number] for number in kept],
        programs=_names(order),
        at_once=min(launch.at_once or len(order), len(order)),
        is_race=launch.race,
        start=_start(launch, steps),
        tensors=tensors,
        registers=[_register(name, recorder.ran) for name in launch.registers],
        steps=steps,
        verdict=verdict,
        is_wrong=is_wrong,
    )


def _names(order: Sequence[Program]) -> list[str]:
    """Return the names of programs: their numbers along the axes that the grid has."""
    axes = max((axis + 1 for axis in range(3) if any(program[axis] for program in order)), default=1)
    texts = [", ".join(map(str, program[:axes])) for program in order]
    return [f"({text})" if axes > 1 else text for text in texts]


def _texts(array: Array) -> list[str]:
    return [short(value) for value in np.ravel(array).tolist()]


def _register(name: str, all_ran: Sequence[Ran]) -> Register:
    arrays = [ran.values[name] for ran in all_ran if name in ran.values]
    shape = max((array.shape for array in arrays), key=math.prod)
    return Register(name, [*shape], max(len(text) for array in arrays for text in _texts(array)))


def _start(launch: Launch, steps: Sequence[Step]) -> tuple[int, int]:
    """Return the program and the step that are shown at first: one of its accesses.

    Raises:
        ValueError: if there is no such access.
    """
    program, access = launch.start or (0, 0)
    mine = [step for step in steps if step.program == program]
    at = [number for number, step in enumerate(mine) if step.accesses]
    if access >= len(at):
        raise ValueError(f"it starts at access {access} of program {program}, which has {len(at)}")
    return program, at[access]


def _events(number: int, recorder: Recorder) -> list[Event]:
    """Return the accesses to a tensor."""
    events = (event for ran in recorder.ran for event in ran.events)
    return [event for event in events if event.lanes and event.lanes.tensor == number]


def _tensor(number: int, recorder: Recorder) -> Tensor:
    """Return a tensor with room for lanes that are masked off or outside, and what it shows before the launch."""
    named, events = recorder.tensors[number], _events(number, recorder)
    rows, columns = drawn_rows, drawn_columns = named.rows, named.shape[-1]
    for event in events:
        assert event.lanes
        for row, column in [*event.lanes.masked, *_outside(named, event.lanes.outside)]:
            if row < max(ROWS, rows) and column < max(COLUMNS, columns):
                drawn_rows, drawn_columns = max(drawn_rows, row + 1), max(drawn_columns, column + 1)
    before = []
    if any(event.kind != "store" for event in events):  # else nothing reads it
        values = named.before.reshape(rows, columns).double().numpy()
        places = ((row, column) for row in range(drawn_rows) for column in range(drawn_columns))
        before = [short(values[row, column]) if row < rows and column < columns else "" for row, column in places]
    stored = [short(value) for event in events if event.kind != "load" for value in event.values]
    longest = max(map(len, [*before, *stored]), default=1)
    return Tensor(named.name, [*named.shape], (drawn_rows, drawn_columns), before, longest)


def _outside(named: Named, offsets: Sequence[int]) -> list[Cell]:
    """Return the cells past a tensor's end that lie so many elements from its first one."""
    indices = (named.index(offset, is_inside=False) for offset in offsets if offset >= 0)
    return [named.cell(index) for index in indices if index]


def _access(event: Event, recorder: Recorder, tensors: Sequence[Tensor]) -> Access:
    lanes = event.lanes
    assert lanes
    assert event.kind != "dot"
    assert event.kind != "reduce"
    named, (rows, columns) = recorder.tensors[lanes.tensor], tensors[lanes.tensor].drawn

    def numbers(cells: Sequence[Cell]) -> list[int]:
        return [row * columns + column for row, column in cells if row < rows and column < columns]

    return Access(
        event.kind,
        lanes.tensor,
        numbers([named.cell(index) for index in lanes.active]),
        numbers(lanes.masked),
        numbers(_outside(named, lanes.outside)),
        [short(value) for value in event.values] if event.kind != "load" else [],
    )
