"""Has the recipes' kernels compiled for GPUs that need not be here, on all cores; what was compiled before is kept."""

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import msgspec

from triton_gallery.compiled.compiler_process import ENDED, Job, compile_apart, start
from triton_gallery.compiled.gpus import GPUS, Gpu
from triton_gallery.compiled.store import Compiled, Kernel, Targets
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.hashes import cell_hash, hash_of
from triton_gallery.recipe.kernels import module_of
from triton_gallery.recipe.launches import Launch
from triton_gallery.records.page_cache import Run
from triton_gallery.records.record_store import Record, Records

CORES = len(os.sched_getaffinity(0))
SOURCES = ("compiler_process", "machine_code")  # what shapes an answer

Made = tuple[Compiled, dict[str, str]]


class Compiler(ExitStack):
    """Compiles launches; what it made before lies in a folder. Its processes end with the `with` statement."""

    def __init__(self, cache: Path) -> None:
        """Take the folder; it need not exist."""
        super().__init__()
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        sources = (Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
        self._salt = "".join([version("triton"), *map(cell_hash, sources)]).encode()
        pool = ProcessPoolExecutor(CORES, get_context("spawn"), initializer=start)  # processes start when needed
        self._pool = self.enter_context(pool)

    def targets(
        self,
        recipes: Sequence[tuple[Recipe, Sequence[Launch], str]],
        report: Callable[[Recipe, int], None],
    ) -> dict[str, tuple[Targets, dict[str, str]]]:
        """Compile the launches of recipes; return what came of it and the texts, by the recipes' keys.

        Args:
            recipes: each with its launches, and with what executed it when they were noted.
            report: called after each launch for each GPU, with the number of those still to come.
        """
        jobs = [
            (recipe, launch, gpu)
            for recipe, launches, _ in recipes
            for launch in launches
            for gpu in meant(recipe, launch)
        ]
        remaining = len(jobs)
        made: dict[tuple[str, str, str], Made] = {}
        with ThreadPoolExecutor(CORES) as pool:
            for (recipe, launch, gpu), result in zip(jobs, pool.map(lambda job: self.make(*job), jobs), strict=True):
                made[recipe.key, launch.kernel, gpu.key] = result
                remaining -= 1
                report(recipe, remaining)
        return {recipe.key: _together(recipe, launches, by, made) for recipe, launches, by in recipes}

    def make(self, recipe: Recipe, launch: Launch, gpu: Gpu) -> Made:
        """Return what the compiler makes of a launch for a GPU, now or before, and its texts."""
        try:
            module = module_of(recipe.text, launch.kernel, launch.functions)
        except LookupError as error:
            return Compiled.failed(str(error)), {}
        key = json.dumps([module, msgspec.to_builtins(launch), gpu.key]).encode()
        file = self._cache / f"{hashlib.sha256(self._salt + key).hexdigest()[:32]}.json.gz"
        if file.is_file():
            compiled, texts = json.loads(gzip.decompress(file.read_bytes()))
            return msgspec.convert(compiled, Compiled), texts
        compiled, texts = self.compile(Job(module, launch, gpu))
        if (compiled.failure or "").startswith(ENDED):  # it may have been for want of memory or time
            return compiled, texts
        partial = file.with_suffix(f".{os.getpid()}.{gpu.key}.partial")
        partial.write_bytes(gzip.compress(json.dumps([msgspec.to_builtins(compiled), texts]).encode(), 1))
        partial.replace(file)
        return compiled, texts

    def compile(self, job: Job) -> Made:
        """Return what the compiler makes of a job, and its texts."""
        return self._pool.submit(compile_apart, job).result()


def meant(recipe: Recipe, launch: Launch) -> list[Gpu]:
    """Return the GPUs that a launch is meant for, as its recipe declares."""
    declared = declaration(recipe.path, recipe.text)
    without = declared.of_op.not_for.get(launch.kernel, [])
    gpus = [gpu for gpu in GPUS if gpu.key not in without]
    if declared.gpus is None:
        return gpus
    return [gpu for gpu in gpus if gpu.capability and declared.gpus.contains(gpu.capability)]


def launched(recipe: Recipe, run: Run, records: Records) -> tuple[list[Launch], str]:
    """Return the launches of a recipe, and what executed it: a GPU that recorded its present code, else its run."""
    record = recorded(recipe, records)
    return (record.launches, record.environment.name) if record else (run.launches, run.environment.name)


def recorded(recipe: Recipe, records: Records) -> Record | None:
    """Return the record of a recipe's present code that has its launches, if there is one."""
    fresh = [record for record in records.of(recipe) if record.is_fresh(recipe) and record.launches]
    return fresh[0] if fresh else None


def is_current(recipe: Recipe, kept: Targets | None, records: Records) -> bool:
    """Whether what is kept of a recipe is of its code and declaration, the best launches there are, and this Triton."""
    if kept is None or not kept.is_fresh(recipe) or kept.triton != version("triton"):
        return False
    if any([*kernel.on] != [gpu.key for gpu in meant(recipe, kernel.launch)] for kernel in kept.kernels):
        return False
    record = recorded(recipe, records)
    return record is None or record.environment.name == kept.launched_by


def _together(
    recipe: Recipe, launches: Sequence[Launch], by: str, made: Mapping[tuple[str, str, str], Made]
) -> tuple[Targets, dict[str, str]]:
    kernels: list[Kernel] = []
    texts: dict[str, str] = {}
    for launch in launches:
        on = {gpu.key: made[recipe.key, launch.kernel, gpu.key] for gpu in meant(recipe, launch)}
        kernels.append(Kernel(launch, {key: compiled for key, (compiled, _) in on.items()}))
        for key, (_, listings) in on.items():
            texts |= {f"{launch.kernel}/{key}.{stage}": text for stage, text in listings.items()}
    return Targets(hash_of(recipe), by, version("triton"), kernels), texts
