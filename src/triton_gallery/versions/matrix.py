"""What was tried with each Triton, and the only module that knows its files.

`docs/_versions/pairs.txt` lists the Tritons, each with what it needs besides; `docs/_versions/versions.json` says what
came of the lessons, the ops, their kernels and the probes of features with each. What it says belongs to the code that
was tried: its hash stands beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.hashes import cell_hash, hash_of
from triton_gallery.recipe.op import op_of
from triton_gallery.records.schemas import (
    DATE,
    HASH,
    TEXT,
    BadRecordError,
    dump,
    list_of,
    object_of,
    parse,
    replace,
    validate,
)

PAIRS, RESULTS = "pairs.txt", "versions.json"  # in the folder
LESSON, OP, KERNELS, FEATURE = KINDS = ("lesson", "op", "kernels", "feature")

_TOLD = {"type": "string", "minLength": 1}
_OUTCOME = object_of(("failure", "missing"), code=HASH, date=DATE, failure=_TOLD, missing=list_of(_TOLD))
_OUTCOMES = {"type": "object", "additionalProperties": _OUTCOME}
_OF_KINDS = object_of((), lesson=_OUTCOMES, op=_OUTCOMES, kernels=_OUTCOMES, feature=_OUTCOMES)
_TRIED = object_of(triton=TEXT, torch=TEXT, numpy=TEXT, python=TEXT, outcomes=_OF_KINDS)
_SCHEMA = object_of(schema={"const": 1}, tried=list_of(_TRIED))


class Pair(NamedTuple):
    """A Triton, and what else it needs besides the pinned packages, as pip takes it."""

    triton: str
    others: list[str]

    @property
    def requirements(self) -> list[str]:
        """All of it, as pip takes it."""
        return [f"triton=={self.triton}", *self.others]


@dataclass(frozen=True)
class Outcome:
    """What came of one thing with one Triton.

    Attributes:
        code: the hash of what was tried.
        date: when.
        failure: what went wrong, in a line; None if nothing did.
        missing: what the environment lacks; if anything, it was not tried.
    """

    code: str
    date: str
    failure: str | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether it was tried and nothing went wrong."""
        return self.failure is None and not self.missing


@dataclass
class Tried:
    """All that was tried with one Triton.

    Attributes:
        outcomes: by kind, then by name: a lesson's or kernels' `section/name`, an op's name, a feature's words.
    """

    triton: str
    torch: str
    numpy: str
    python: str
    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=lambda: {kind: {} for kind in KINDS})

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Tried":
        """Return what a file says."""
        made = {kind: {name: Outcome(**of) for name, of in by.items()} for kind, by in content["outcomes"].items()}
        return cls(**{**content, "outcomes": made})


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
    found = {entry["triton"]: Tried.of(entry) for entry in _parsed(path, path.read_bytes())}
    return [found[pair.triton] for pair in pairs(folder) if pair.triton in found]


@cache  # a build asks for it with each page
def _parsed(path: Path, text: bytes) -> list[dict[str, Any]]:
    content = parse(path, text)
    validate(path, content, _SCHEMA)
    return list(content["tried"])


def write(folder: Path, tried: Tried, recipes: Sequence[Recipe]) -> Path:
    """Keep what was tried with one Triton beside that of the others listed; of what these recipes have not, nothing."""
    path = folder / RESULTS
    kept = {one.triton: one for one in load(folder)} | {tried.triton: tried}
    listed = [kept[pair.triton] for pair in pairs(folder) if pair.triton in kept]
    for kind, names in codes(recipes).items():
        for one in listed:
            one.outcomes[kind] = {name: of for name, of in one.outcomes[kind].items() if name in names}
    content = {"schema": 1, "tried": [_sorted(one) for one in listed]}
    validate(path, content, _SCHEMA)
    replace(path, dump(content))
    return path


def codes(recipes: Sequence[Recipe]) -> dict[str, dict[str, str]]:
    """Return the hash of each lesson, op and recipe's kernels as they are now, by kind and name."""
    ops = {op.name: cell_hash(op.code) for recipe in recipes if (op := op_of(recipe))}
    lessons = {recipe.key: hash_of(recipe) for recipe in recipes}
    return {LESSON: lessons, OP: ops, KERNELS: dict(lessons)}


def failures(tried: Tried, now: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the name and the fault of what failed with the code that is given; features may fail."""
    for kind, named in now.items():
        for name, code in named.items():
            outcome = tried.outcomes[kind].get(name)
            if outcome and outcome.code == code and outcome.failure is not None:
                yield kind, name, outcome.failure


def _sorted(tried: Tried) -> dict[str, Any]:
    outcomes = {
        kind: {
            name: {key: value for key, value in asdict(of).items() if value not in (None, [])}
            for name, of in sorted(by.items())
        }
        for kind, by in tried.outcomes.items()
    }
    return {**asdict(tried), "outcomes": outcomes}
