"""What was tried with each Triton, and the only module that knows its files.

`docs/_versions/pairs.txt` lists the Tritons, each with what it needs besides; `docs/_versions/versions.json` says what
came of the lessons, the ops, their kernels and the probes of features with each. What it says belongs to the code that
was tried: its hash stands beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.data import Data, Date, Hash
from triton_gallery.recipe.hashes import cell_hash, hash_of
from triton_gallery.recipe.op import op_of
from triton_gallery.records import files
from triton_gallery.records.files import BadRecordError, decode

PAIRS, RESULTS = "pairs.txt", "versions.json"  # in the folder
LESSON, OP, KERNELS, FEATURE = KINDS = ("lesson", "op", "kernels", "feature")
NonEmpty = Annotated[str, Meta(min_length=1)]


class Pair(NamedTuple):
    """A Triton, and what else it needs besides the pinned packages, as pip takes it."""

    triton: str
    others: list[str]

    @property
    def requirements(self) -> list[str]:
        """All of it, as pip takes it."""
        return [f"triton=={self.triton}", *self.others]


class Outcome(Data, frozen=True, omit_defaults=True):
    """What came of one thing with one Triton.

    Attributes:
        code_hash: that of what was tried.
        date: when.
        failure: what went wrong, in a line; empty if nothing did.
        missing: what the environment lacks; if anything, it was not tried.
    """

    code_hash: Hash = field(name="code")
    date: Date
    failure: NonEmpty = ""
    missing: list[NonEmpty] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether it was tried and nothing went wrong."""
        return not self.failure and not self.missing


class Tried(Struct, forbid_unknown_fields=True):
    """All that was tried with one Triton.

    Attributes:
        outcomes: by kind, then by name: a lesson's or kernels' `section/name`, an op's name, a feature's words.
    """

    triton: str
    torch: str
    numpy: str
    python: str
    outcomes: dict[str, dict[str, Outcome]]

    def __post_init__(self) -> None:
        """Refuse other kinds, or fewer; ValueError."""
        if self.outcomes.keys() != {*KINDS}:
            raise ValueError(f"its outcomes are of the kinds {', '.join(self.outcomes)}, not of {', '.join(KINDS)}")

    @classmethod
    def nothing(cls, triton: str, torch: str, numpy: str, python: str) -> "Tried":
        """Return that nothing was tried with these versions."""
        return cls(triton, torch, numpy, python, {kind: {} for kind in KINDS})


class Results(Data, frozen=True, tag_field="schema", tag=1):
    """What the file holds."""

    tried: list[Tried]


def pairs(folder: Path) -> list[Pair]:
    """Return the Tritons that are listed, the newest last; BadRecordError if a line is not in order."""
    path = folder / PAIRS
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    if bad := [" ".join(words) for words in lines if not words or not words[0][0].isdigit()]:
        raise BadRecordError(f"{path}: a line begins with a version of Triton, not so {bad[0]!r}")
    return [Pair(triton, others) for triton, *others in lines]


def load(folder: Path) -> list[Tried]:
    """Return what was tried with each Triton that is listed, in that order; BadRecordError if a file does not fit."""
    path = folder / RESULTS
    if not path.is_file():
        return []
    by_version = {entry.triton: entry for entry in decode(path, path.read_bytes(), Results).tried}
    return [by_version[pair.triton] for pair in pairs(folder) if pair.triton in by_version]


def write(folder: Path, tried: Tried, recipes: Sequence[Recipe]) -> Path:
    """Keep what was tried with one Triton beside that of the others listed; of what these recipes have not, nothing."""
    path = folder / RESULTS
    kept = {entry.triton: entry for entry in load(folder)} | {tried.triton: tried}
    listed = [kept[pair.triton] for pair in pairs(folder) if pair.triton in kept]
    now = hashes(recipes)
    for entry in listed:
        for kind, outcomes in entry.outcomes.items():
            names = sorted(outcomes.keys() & now.get(kind, outcomes).keys())
            entry.outcomes[kind] = {name: outcomes[name] for name in names}
    files.write(path, Results(listed))
    return path


def hashes(recipes: Sequence[Recipe]) -> dict[str, dict[str, str]]:
    """Return the hash of each lesson, op and recipe's kernels as they are now, by kind and name."""
    ops = {op.name: cell_hash(op.code) for recipe in recipes if (op := op_of(recipe))}
    lessons = {recipe.key: hash_of(recipe) for recipe in recipes}
    return {LESSON: lessons, OP: ops, KERNELS: dict(lessons)}


def failures(tried: Tried, now: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the name and the fault of what failed with the code that is given; features may fail."""
    for kind, named in now.items():
        for name, code_hash in named.items():
            outcome = tried.outcomes[kind].get(name)
            if outcome and outcome.code_hash == code_hash and outcome.failure:
                yield kind, name, outcome.failure
