"""Figures of our ops under several versions of Triton, and the only module that knows their format.

`docs/_records/<device>/versions.json` holds a row for each work at each size that `measure.py`
measured. All versions of a row were measured in one run, in rotation, on one GPU.
"""

from dataclasses import dataclass

from triton_gallery.records.rows import RATE, Row, RowFile
from triton_gallery.records.schemas import OPTIONAL_TEXT, TEXT, object_of

_CONTENDER = object_of(
    rate={"anyOf": [{"type": "null"}, RATE]},
    seconds={"type": ["number", "null"], "minimum": 0},
    kernels={"type": ["integer", "null"], "minimum": 0},
    assembler={"type": "string", "pattern": r"^\d+\.\d+$"},
    failed=OPTIONAL_TEXT,
)
_CONTENDERS = {
    "type": "object",
    "propertyNames": {**TEXT, "pattern": r"^\d+\.\d+\.\d+[^,]*(, FP fusion off)?$"},
    "additionalProperties": _CONTENDER,
    "minProperties": 1,
}


@dataclass(frozen=True)
class Contender:
    """What came of a row under one version of Triton.

    Attributes:
        rate: the median and the 20th and 80th percentile of the rate; None if it failed.
        seconds: how long Triton compiled for this row; None if it failed before.
        kernels: how many kernels it compiled; those that an earlier row left in the cache do not count.
        assembler: the version of `ptxas` that Triton chose for this GPU.
        failed: why there is no rate.
    """

    rate: list[float] | None
    seconds: float | None
    kernels: int | None
    assembler: str
    failed: str | None


@dataclass(frozen=True)
class VersionRow(Row):
    """One work at one size, under several versions of Triton.

    Attributes:
        contenders: by version, as "3.9.0" or "3.9.0, FP fusion off"; `device.triton` is the baseline.
    """

    contenders: dict[str, Contender]

    def __post_init__(self) -> None:
        """Take contenders as a file has them too."""
        made = {name: Contender(**of) if isinstance(of, dict) else of for name, of in self.contenders.items()}
        object.__setattr__(self, "contenders", made)

    @property
    def baseline(self) -> str:
        """The version that the others are compared with."""
        return self.device.triton

    @property
    def others(self) -> list[str]:
        """The other contenders."""
        return [name for name in self.contenders if name != self.baseline]

    def rate(self, name: str) -> float | None:
        """Return the median rate of a contender; None if there is none."""
        contender = self.contenders.get(name)
        return contender.rate[0] if contender and contender.rate else None

    def ratio(self, name: str) -> float | None:
        """Return a contender's rate in that of the baseline."""
        rate, base = self.rate(name), self.rate(self.baseline)
        return rate / base if rate and base else None


_FILE = RowFile("versions.json", 1, VersionRow, {"contenders": _CONTENDERS})
load_all, merge = _FILE.load_all, _FILE.merge
