"""What the code cells of a recipe put out, as data."""

from datetime import datetime

from msgspec import field

from triton_gallery.recipe.data import Data, Date, Hash
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.launches import Launch
from triton_gallery.recipe.tables import Table


class Frame(Data, frozen=True):
    """A data frame that a cell shows; every cell of it as text."""

    columns: list[str]
    rows: list[list[str]]


class Output(Data, frozen=True):
    """What one code cell put out.

    Attributes:
        cell_hash: that of the cell's code.
        text: what it printed, without the benchmark tables.
        figures: file names of its figures.
        frame: the data frame that it ends with.
        tables: the benchmark tables that it made.
    """

    cell_hash: Hash = field(name="code")
    text: str
    figures: list[str]
    frame: Frame | None
    tables: list[Table]

    @classmethod
    def empty(cls, cell_hash: str) -> "Output":
        """Return the output of a cell that put out nothing."""
        return cls(cell_hash, "", [], None, [])

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.figures or self.frame or self.tables)


class Execution(Data, frozen=True):
    """What a recipe came to that was executed.

    Attributes:
        environment: what executed it.
        date: when it began.
        seconds: wall time of the whole script, imports included.
        outputs: what each code cell put out; empty for a run that failed.
        packages: versions of what the recipe declares beyond the packages that any recipe may use.
        launches: what was compiled, or would have been, of each kernel that it launched.
    """

    environment: Environment = field(name="device")
    date: Date
    seconds: float
    outputs: list[Output]
    packages: dict[str, str] = field(default_factory=dict)  # which older files have not
    launches: list[Launch] = field(default_factory=list)  # likewise

    def __post_init__(self) -> None:
        """Refuse what is no date; ValueError."""
        datetime.fromisoformat(self.date)
