"""What the code cells of a recipe put out, as data."""

from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Never, TypeVar, get_args, get_origin, get_type_hints

from triton_gallery.recipe.tables import Table

T = TypeVar("T")


@dataclass(frozen=True)
class Frame:
    """A data frame that a cell shows; every cell of it as text."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Output:
    """What one code cell put out.

    Attributes:
        code: the hash of the cell's code.
        text: what it printed, without the benchmark tables.
        figures: file names of its figures.
        frame: the data frame that it ends with.
        tables: the benchmark tables that it made.
    """

    code: str
    text: str = ""
    figures: list[str] = field(default_factory=list)
    frame: Frame | None = None
    tables: list[Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.figures or self.frame or self.tables)


def from_json(kind: type[T], value: Any) -> T:
    """Return a value of a type, a dataclass for instance, that `dataclasses.asdict` took apart for JSON.

    Raises:
        ValueError: if it is not of that type, wherever in it.
    """
    made: T = _made(kind, value)
    return made


def _made(kind: Any, value: Any) -> Any:
    parts = get_args(kind)
    if kind is Any:
        return value
    if get_origin(kind) is UnionType:
        for part in parts:
            with suppress(ValueError):
                return _made(part, value)
    elif get_origin(kind) is list and isinstance(value, list):
        return [_made(parts[0], item) for item in value]
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {_made(parts[0], key): _made(parts[1], item) for key, item in value.items()}
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        kinds = get_type_hints(kind)
        try:
            return kind(**{name: _made(kinds.get(name, Never), item) for name, item in value.items()})
        except TypeError as error:
            raise ValueError(str(error)) from None
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{value!r:.60} is no {getattr(kind, '__name__', kind)}")
