"""What a launch of a kernel did, statement by statement, as data. A recording is kept and drawn in this form."""

from typing import Literal

from msgspec import field

from triton_gallery.recipe.data import Data

Kind = Literal["load", "store", "atomic"]


class Access(Data, frozen=True):
    """What a statement did to a tensor.

    Attributes:
        kind: what it did.
        tensor: the number of the tensor.
        cells: the places of the active lanes, among the cells that are drawn.
        masked: those of lanes that are masked off, as far as they can be drawn.
        outside: those of active lanes past the tensor's end, as far as they can be drawn.
        values: what is there afterwards, for each active lane; none after a load.
    """

    kind: Kind
    tensor: int
    cells: list[int]
    masked: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


class Step(Data, frozen=True):
    """A statement that a program ran.

    Attributes:
        program: the number of the program, in the order in which a GPU starts them.
        lines: its first and its last line, counted from 1 among the lines that are shown.
        sentence: what it did.
        accesses: what it did to tensors.
        values: the registers that it changed, by number: their values.
    """

    program: int
    lines: tuple[int, int]
    sentence: str
    accesses: list[Access] = field(default_factory=list)
    values: dict[int, list[str]] = field(default_factory=dict)


class Tensor(Data, frozen=True):
    """A tensor that a launch was given, as a grid of cells: its last dimension lies along the rows.

    Attributes:
        name: the name of its parameter, without `_ptr`.
        shape: its shape.
        drawn: the rows and columns that are drawn, with room for lanes that are masked off or outside.
        before: what each of the cells shows before the launch; nothing where no program reads the tensor.
        longest: the number of characters of the longest value.
    """

    name: str
    shape: list[int]
    drawn: tuple[int, int]
    before: list[str]
    longest: int


class Register(Data, frozen=True):
    """A value that programs hold: its name in the kernel, its largest shape, the characters of its longest value."""

    name: str
    shape: list[int]
    longest: int


class Trace(Data, frozen=True):
    """A launch.

    Attributes:
        label: what the switch between launches calls it.
        kernel: the name of the kernel.
        lines: its source, without comments that have a line of their own.
        programs: the names of the programs, in the order in which a GPU starts them.
        at_once: how many run at a time.
        is_race: whether programs that run at a time read what was there before any of them wrote.
        start: the program and the step that are shown at first.
        tensors: what the launch was given.
        registers: what is shown of what programs hold.
        steps: what the programs did, one program after the other.
        verdict: how the result compares with what is expected.
        is_wrong: whether it differs.
    """

    label: str
    kernel: str
    lines: list[str]
    programs: list[str]
    at_once: int
    is_race: bool
    start: tuple[int, int]
    tensors: list[Tensor]
    registers: list[Register]
    steps: list[Step]
    verdict: str
    is_wrong: bool


class Figure(Data, frozen=True):
    """A figure: its launches, and how they are shown.

    Attributes:
        caption: what stands below it.
        kernel: the kernel whose definition it follows.
        layout: how tensors are laid out, as the lesson declares it.
        traces: its launches.
    """

    caption: str
    kernel: str
    layout: str
    traces: list[Trace]


class Recording(Data, frozen=True):
    """The figures of a lesson, and the reason why there are none.

    Attributes:
        key: a hash of all that the figures follow from.
        figures: the figures, where all of them could be recorded.
        failure: else the reason.
        seconds: how long it took.
    """

    key: str
    figures: list[Figure] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
