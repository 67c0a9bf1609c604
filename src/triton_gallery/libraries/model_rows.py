"""Figures of models of the transformers library, and the only module that knows their format.

`docs/_records/<device>/models.json` holds a row for each case that `models.py` measured.
"""

from functools import cache
from typing import Annotated

from msgspec import Meta

from triton_gallery.recipe.data import Data, Date, Hash
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.hashes import cell_hash, code_hash
from triton_gallery.recipe.inline import sources
from triton_gallery.records.files import Commit
from triton_gallery.records.rows import Rate, Rows

TRAIN, GENERATE = "train", "generate"
PLAIN, LIGER, OURS = WAYS = ("plain", "Liger", "ours")
PRODUCTS, ATTENTION, NORMS, LOSS, OPTIMIZER, REST = KINDS = (
    *("products", "attention", "norms", "loss", "optimizer", "the rest"),
)

Positive = Annotated[float, Meta(gt=0)]


class Case(Data, frozen=True, order=True):
    """What is measured.

    Attributes:
        work: `TRAIN` or `GENERATE`.
        size: the name of the model's.
        batch: sequences.
        length: their tokens; of those to generate, these are the prompt's.
        way: one of `WAYS`.
        compiled: whether by `torch.compile`.
    """

    work: Annotated[str, Meta(pattern=rf"^({TRAIN}|{GENERATE})\Z")]
    size: Annotated[str, Meta(pattern=r"^[a-z]+\Z")]
    batch: Annotated[int, Meta(ge=1)]
    length: Annotated[int, Meta(ge=1)]
    way: Annotated[str, Meta(pattern=rf"^({'|'.join(WAYS)})\Z")]
    compiled: bool

    def __str__(self) -> str:
        """Return it as it is asked for."""
        number = self.length if self.work == TRAIN else self.batch
        return f"{self.work} {self.size}-{number} {self.way} {'compiled' if self.compiled else 'eager'}"


class Profile(Data, frozen=True):
    """GPU time of a step in milliseconds.

    Attributes:
        wall: of the step, without the profiler.
        kinds: by kind of kernel.
    """

    wall: Positive
    kinds: Annotated[dict[str, Annotated[float, Meta(ge=0)]], Meta(min_length=len(KINDS), max_length=len(KINDS))]

    def __post_init__(self) -> None:
        """Refuse other kinds; ValueError."""
        if {*self.kinds} != {*KINDS}:
            raise ValueError(f"its kinds are not {', '.join(KINDS)}")

    @property
    def idle(self) -> float:
        """The time in which the GPU ran no kernel."""
        return max(0.0, self.wall - sum(self.kinds.values()))


class Training(Data, frozen=True):
    """What a case of training has besides: the most memory that tensors had, the loss of each step, and a profile."""

    gib: Positive
    losses: Annotated[list[float], Meta(min_length=1)]
    profile: Profile


class ModelRow(Data, frozen=True):
    """One case.

    Attributes:
        case: what was measured.
        config: of the model: what differs from the library's default.
        code_hash: that of the ops and of what puts them into a model; None of the other ways.
        environment: what executed it.
        date: when its run began.
        commit: the revision of the project, if it was known.
        packages: the versions of the other libraries.
        ms: milliseconds of a step, or of a call that generates.
        tokens: that a step takes, or that a call generates.
        training: None of a case of generation.
    """

    case: Case
    config: Annotated[dict[str, int], Meta(min_length=1)]
    code_hash: Hash | None
    environment: Environment
    date: Date
    commit: Commit | None
    packages: dict[str, str]
    ms: Rate
    tokens: Annotated[int, Meta(ge=1)]
    training: Training | None

    def __post_init__(self) -> None:
        """Refuse what no GPU executed, and training without its figures; ValueError."""
        if not self.environment.is_gpu:
            raise ValueError("its device is no GPU")
        if (self.case.work == TRAIN) != (self.training is not None):
            raise ValueError("figures of training are those of a case of training")

    @property
    def key(self) -> tuple[str, Case]:
        """What it is the row of; another one of the same takes its place."""
        return "models", self.case

    @property
    def tokens_per_second(self) -> float:
        """The rate."""
        return 1000 * self.tokens / self.ms[0]

    @property
    def is_fresh(self) -> bool:
        """Whether the ops are those that were measured."""
        return self.code_hash in (None, ops_hash())


@cache  # a build asks for it with each row
def ops_hash() -> str:
    """Return the hash of the code that `patch` puts into a model, and of its own."""
    files = sources("from triton_gallery_ops.transformers import patch\n")
    return code_hash(cell_hash(file.read_text(encoding="utf-8")) for file in files)


class ModelRows(Rows[ModelRow], frozen=True, tag_field="schema", tag=1):
    """What a file holds."""

    file_name = "models.json"


load_all, merge = ModelRows.load_all, ModelRows.merge
