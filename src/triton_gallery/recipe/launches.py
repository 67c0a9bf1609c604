"""A launch of a kernel as a compiler sees it: the types of its arguments, its constants and its options."""

from typing import Annotated, Any

from msgspec import Meta

from triton_gallery.recipe.data import Data

ALIGNED = "tt.divisibility"  # by 16
NARROW = ("*bf16", "*fp16", "*fp8")  # types of pointers that models use
DTYPE, FUNCTION, FLOAT, LAYOUT, TUPLE = "dtype", "function", "float", "layout", "tuple"  # constants that JSON has not


class Launch(Data, frozen=True):
    """What identifies what is compiled of a kernel.

    Attributes:
        kernel: its name.
        signature: the type of each argument, as Triton writes it: `*bf16`, `i32`, `constexpr`, `tensordesc<...>`.
        constants: the value of each constant, by its place; a place within a tuple has several numbers.
        aligned: the places of the arguments that are multiples of 16.
        options: those of the launch that differ from Triton's own: `num_warps`, `num_stages`, ...
    """

    kernel: Annotated[str, Meta(pattern=r"^\w+\Z")]
    signature: dict[str, Any]
    constants: list[list[Any]]
    aligned: list[list[Any]]
    options: dict[str, int]

    @property
    def named(self) -> dict[str, Any]:
        """The constants by the names of their arguments; those within tuples are left out."""
        names = list(self.signature)
        return {names[place[0]]: value for place, value in self.constants if len(place) == 1}

    @property
    def functions(self) -> list[str]:
        """The names of the functions among its constants."""
        values = [value for _, value in self.constants if isinstance(value, dict)]
        return [name for value in values for kind, name in value.items() if kind == FUNCTION]

    @property
    def described(self) -> str:
        """The launch in a line."""
        return f"{self.kernel}({self.arguments})"

    @property
    def arguments(self) -> str:
        """The types of its tensors, its constants and its options, in a line."""
        types = dict.fromkeys(str(kind).lstrip("*") for kind in self.signature.values() if str(kind)[0] in "*t")
        values = {**self.named, **self.options}
        facts = [*types, *(f"{name}={_written(value)}" for name, value in values.items())]
        if odd := [name for place, (name, kind) in enumerate(self.signature.items()) if self._is_odd([place], kind)]:
            facts.append(f"not divisible by 16: {' '.join(odd)}")
        return ", ".join(facts)

    def _is_odd(self, place: list[int], kind: Any) -> bool:
        """Whether an argument might be a multiple of 16 and is not."""
        return str(kind).startswith(("*", "i32", "i64")) and place not in self.aligned

    @property
    def _weight(self) -> tuple[bool, int, int]:
        """How much it is like those that a reader will make: of a narrow type, aligned, and with large tiles."""
        tile = 1
        for value in self.named.values():
            tile *= value if type(value) is int and value > 0 else 1
        narrow = any(str(kind).startswith(NARROW) for kind in self.signature.values())
        return narrow, len(self.aligned), tile


def _written(value: Any) -> str:
    """Return a constant as a reader would write it."""
    if not isinstance(value, dict):
        return str(value)
    ((_, content),) = value.items()
    return f"({', '.join(map(_written, content))})" if isinstance(content, list) else str(content)


def typical(launches: list[Launch]) -> list[Launch]:
    """Return of each kernel, in order, the launch that is most like those of a reader.

    Types that models use come before others, aligned arguments before unaligned ones, large tiles before small ones.
    """
    chosen: dict[str, Launch] = {}
    for launch in launches:
        if launch.kernel not in chosen or launch._weight > chosen[launch.kernel]._weight:
            chosen[launch.kernel] = launch
    return list(chosen.values())
