"""What compilers make of the recipes' kernels for GPUs that need not be here, and the only module that knows its files.

`docs/_compiled/<section>/<recipe>.json` holds the figures. They follow from the code and the versions alone: made
again, they are the same. So are the texts that compilers wrote, which lie in a folder of the build, by the hash of the
figures that they belong to.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from triton_gallery.compiled.gpus import GPUS, KIB, Gpu
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.data import Data, Hash
from triton_gallery.recipe.hashes import hash_of
from triton_gallery.recipe.launches import Launch
from triton_gallery.recipe.op import Op
from triton_gallery.records import files
from triton_gallery.records.files import decode, dump, replace
from triton_gallery.records.git import file_at

THREADS = 1024  # that a program may have, on all these GPUs
FITS, TOO_LARGE, FAILED, UNMEANT = "fits", "does not fit", "does not compile", "not supported"
Number = Annotated[int, Meta(ge=0)]


class Compiled(Data, frozen=True, kw_only=True):
    """What a compiler makes of a launch for a GPU.

    Attributes:
        failure: why it does not compile; the rest is empty then.
        registers: of a thread; on AMD's GPUs vector registers, those for accumulators included.
        spilled: bytes of memory that a thread uses for want of registers.
        shared: bytes of shared memory of a program.
        warps: of a program.
        tensor_memory: columns of tensor memory of a program.
        matrix: how many matrix instructions there are, by name.
        loads: how many loads of global memory there are, by the bytes that a thread moves, or "TMA".
        stores: the same of stores.
    """

    failure: str | None
    registers: Number
    spilled: Number
    shared: Number
    warps: Number
    tensor_memory: Number
    matrix: dict[str, int]
    loads: dict[str, int]
    stores: dict[str, int]

    @classmethod
    def failed(cls, why: str) -> "Compiled":
        """Return what there is if it does not compile."""
        numbers = dict.fromkeys(("registers", "spilled", "shared", "warps", "tensor_memory"), 0)
        return cls(failure=why, **numbers, matrix={}, loads={}, stores={})

    def verdict(self, gpu: Gpu) -> tuple[str, str]:
        """Return what is to be expected of it on a GPU, in a word or two, and why in a line."""
        if self.failure is not None:
            return FAILED, self.failure
        if self.shared > gpu.shared:
            available = f"{gpu.shared / KIB:.0f} KiB are there"
            return TOO_LARGE, f"it takes {self.shared / KIB:.0f} KiB of shared memory for a program, {available}"
        if self.warps * gpu.warp > THREADS:
            return TOO_LARGE, f"{self.warps} warps of {gpu.warp} threads are more than the {THREADS} of a program"
        if self.tensor_memory > gpu.tensor_memory:
            available = f"{gpu.tensor_memory} are there"
            return TOO_LARGE, f"it takes {self.tensor_memory} columns of tensor memory, {available}"
        return FITS, ""

    def occupancy(self, gpu: Gpu) -> tuple[float, str]:
        """Return the part of a multiprocessor's warps that it can hold of it, and what keeps it from more."""
        return gpu.occupancy(self.warps, self.registers, self.shared)


class Kernel(Data, frozen=True):
    """A launch, and what it comes to, by the keys of GPUs; one that it is not meant for is not among them."""

    launch: Launch
    on: dict[str, Compiled]

    def verdict(self, gpu: Gpu) -> tuple[str, str]:
        """Return what is to be expected of it on a GPU, in a word or two, and why in a line."""
        return self.on[gpu.key].verdict(gpu) if gpu.key in self.on else (UNMEANT, "")


class Targets(Data, frozen=True, tag_field="schema", tag=1):
    """What compilers make of a recipe.

    Attributes:
        recipe_hash: that of the recipe's code.
        launched_by: what executed the recipe when its launches were noted.
        triton: the version that compiled.
        kernels: those that the recipe launches.
    """

    recipe_hash: Hash = field(name="code")
    launched_by: str
    triton: str
    kernels: list[Kernel]

    def is_fresh(self, recipe: Recipe) -> bool:
        """Whether the recipe still has the code whose launches were compiled."""
        return self.recipe_hash == hash_of(recipe)

    def of(self, op: Op | None) -> list[Kernel]:
        """Return the kernels that are an op's."""
        return [kernel for kernel in self.kernels if op and f"def {kernel.launch.kernel}(" in op.cell]

    def verdict(self, gpu: Gpu, op: Op | None) -> tuple[str, str]:
        """Return the worst that is to be expected of a kernel that is meant for a GPU, and which they are.

        Only the kernels of the op count, if a recipe has an op and launches kernels of it.
        """
        verdicts = [(kernel.verdict(gpu)[0], kernel.launch.kernel) for kernel in self.of(op) or self.kernels]
        meant = [(word, name) for word, name in verdicts if word != UNMEANT]
        for word in (FAILED, TOO_LARGE):
            names = ", ".join(name for verdict, name in meant if verdict == word)
            if names:
                return word, names
        return (FITS if meant else UNMEANT), ""


def load(folder: Path, recipe: Recipe) -> Targets | None:
    """Return what is kept of a recipe; None if nothing is, BadRecordError if it does not fit."""
    path = _path(folder, recipe)
    return decode(path, path.read_bytes(), Targets) if path.is_file() else None


def load_at(revision: str, folder: Path, recipe: Recipe) -> Targets | None:
    """Return what was kept of a recipe at a git revision; None if nothing was, or git cannot tell."""
    path = _path(folder, recipe)
    text = file_at(revision, path)
    return None if text is None else decode(path, text, Targets)


def write(folder: Path, recipe: Recipe, targets: Targets) -> Path:
    """Keep what compilers make of a recipe; return the path."""
    path = _path(folder, recipe)
    files.write(path, targets)
    return path


def listing(folder: Path, targets: Targets) -> Path:
    """Return the file that has the texts which belong to figures, if they were made here."""
    return folder / f"{hashlib.sha256(dump(_builtins(targets))).hexdigest()[:32]}.json.gz"


def write_texts(folder: Path, targets: Targets, texts: Mapping[str, str]) -> None:
    """Keep the texts that belong to figures, by `<kernel>/<gpu>.<stage>`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(listing(folder, targets), gzip.compress(json.dumps(dict(texts)).encode(), mtime=0))


def load_texts(path: Path) -> dict[str, str]:
    """Return the texts of a file that `listing` named."""
    texts: dict[str, str] = json.loads(gzip.decompress(path.read_bytes()))
    return texts


def _path(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.key}.json"


def worse(before: Targets, now: Targets) -> Iterator[tuple[bool, str]]:
    """Yield what is worse than it was, in a line each, and whether it is an error rather than a warning.

    A GPU launches what suits it, and another than the interpreter: where someone else launched, nothing is an error.
    """
    was = {kernel.launch.kernel: kernel for kernel in before.kernels}
    is_alike = before.launched_by == now.launched_by
    launched = "" if is_alike else f" (as {now.launched_by} launched it; before, {before.launched_by} did)"
    for kernel in now.kernels:
        name = kernel.launch.kernel
        for gpu in GPUS:
            old = was[name].on.get(gpu.key) if name in was else None
            new = kernel.on.get(gpu.key)
            if old is None or new is None:
                continue
            word, why = new.verdict(gpu)
            if old.verdict(gpu)[0] == FITS and word != FITS:
                yield is_alike, f"{name} {word} on {gpu.name}, though it fitted before: {why}{launched}"
            elif word == FITS and old.verdict(gpu)[0] == FITS and new.spilled > old.spilled:
                yield False, f"{name} spills {new.spilled} bytes a thread on {gpu.name}, before {old.spilled}{launched}"


def as_json(targets: Targets) -> dict[str, Any]:
    """Return it as JSON has it, with what follows from the figures for each GPU."""
    content = _builtins(targets)
    for kernel, entry in zip(targets.kernels, content["kernels"], strict=True):
        for gpu in GPUS:
            if gpu.key in kernel.on:
                compiled = kernel.on[gpu.key]
                word, why = compiled.verdict(gpu)
                occupancy = compiled.occupancy(gpu)[0] if word == FITS else None
                entry["on"][gpu.key] |= {"verdict": word, "why": why, "occupancy": occupancy}
    return content


def _builtins(targets: Targets) -> dict[str, Any]:
    """Return figures as a file has them, without the version of its schema."""
    content: dict[str, Any] = msgspec.to_builtins(targets)
    del content["schema"]
    return content
