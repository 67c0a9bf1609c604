"""Figures of our ops under several versions of Triton, and the only module that knows their format.

`docs/_records/<device>/versions.json` holds a row for each work at each size that `measure.py`
measured. All versions of a row were measured in one run, in rotation, on one GPU.
"""

from typing import Annotated

from msgspec import Meta

from triton_gallery.recipe.data import Data
from triton_gallery.records.rows import Rate, Row, Rows

Name = Annotated[str, Meta(pattern=r"^\d+\.\d+\.\d+[^,]*(, FP fusion off)?\Z")]


class Contender(Data, frozen=True):
    """What came of a row under one version of Triton.

    Attributes:
        rate: None if it failed.
        seconds: how long Triton compiled for this row; None if it failed before.
        kernels: how many kernels it compiled; those that an earlier row left in the cache do not count.
        assembler: the version of `ptxas` that Triton chose for this GPU.
        failed: why there is no rate.
    """

    rate: Rate | None
    seconds: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)] | None
    kernels: Annotated[int, Meta(ge=0)] | None
    assembler: Annotated[str, Meta(pattern=r"^\d+\.\d+\Z")]
    failed: str | None


class VersionRow(Row, frozen=True):
    """One work at one size, under several versions of Triton.

    Attributes:
        contenders: by version, as "3.9.0" or "3.9.0, FP fusion off"; `environment.triton` is the baseline.
    """

    contenders: Annotated[dict[Name, Contender], Meta(min_length=1)]

    @property
    def baseline(self) -> str:
        """The version that the others are compared with."""
        return self.environment.triton

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


class VersionRows(Rows[VersionRow], frozen=True, tag_field="schema", tag=1):
    """What a file holds."""

    file_name = "versions.json"


load_all, merge = VersionRows.load_all, VersionRows.merge
