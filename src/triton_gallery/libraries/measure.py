"""Measures the gallery's ops beside other libraries', on this machine's GPU, and records the figures.

`make libraries` runs it. With recipes (`section/name`) it measures theirs alone; the other rows of the table stay as
they are. On several GPUs of one kind, each measures a recipe at a time, in a process of its own. A library
that is not installed is left out. Further rows of the table are an entry of `benchmarks/<recipe>.py`, a further library
is one of LIBRARIES.
"""

import argparse
import datetime
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any
from unittest.mock import patch

from triton_gallery.libraries.library_rows import LibraryRow, load_all, merge
from triton_gallery.libraries.trial import DEVICE, GALLERY, RECORDS, Trial, load_workloads, rates_of, recipe_module
from triton_gallery.libraries.workload import Bytes, Function, Product, Workload
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.device import detect
from triton_gallery.recipe.measured import op_hash
from triton_gallery.recipe.tables import ROOF, TORCH_COMPILE, TRITON
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.git import commit

TURNS = 40
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # name the folders of what is compiled


@dataclass(frozen=True)
class Library:
    """Another library.

    Attributes:
        package: its name for pip.
        module: what has its functions.
    """

    package: str
    module: str


LIBRARIES = {
    "Liger": Library("liger-kernel", "liger_kernel.transformers.functional"),
    "PyTorch in chunks": Library("torch", "torch.nn"),  # from 2.13 on
    "cuDNN": Library("torch", "torch.nn"),  # PyTorch chooses one of these for its attention
    "FlashAttention-2": Library("torch", "torch.nn"),
    "FLA": Library("fla-core", "fla.ops.simple_gla"),
    "FLA's gated delta rule": Library("fla-core", "fla.ops.gated_delta_rule"),
    "flex_attention": Library("torch", "torch"),
}


WORKLOADS = load_workloads()


def installed() -> dict[str, str]:
    """Return the versions of the libraries that are installed, by name; say which are not."""
    versions = {}
    for name, library in LIBRARIES.items():
        try:
            versions[name] = version(library.package)
        except PackageNotFoundError:
            print(f"{name} is left out: it is not installed (pip install {library.package})")
    return versions


def contestants(work: Workload, libraries: Sequence[str]) -> dict[str, Function]:
    """Return what is measured, by name: ours first, then PyTorch and the libraries that have this work."""
    import torch

    # Ours before all that imports triton: without a GPU, the recipe chooses the interpreter.
    ours, plain = work.ours(recipe_module(work.recipe)), work.torch(torch)
    functions = {"PyTorch": plain}
    if work.compiles:
        functions[TORCH_COMPILE] = torch.compile(plain, fullgraph=True, dynamic=False)
    for name in (name for name in libraries if name in work.libraries):
        functions[name] = work.libraries[name](importlib.import_module(LIBRARIES[name].module))
    return {TRITON: ours, **{name: work.called(function) for name, function in functions.items()}}


@contextmanager
def empty_caches() -> Iterator[None]:
    """Let what is compiled meanwhile find nothing that was compiled before, and leave nothing."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        patch.dict(os.environ, {cache: os.path.join(folder, cache) for cache in CACHES}),
    ):
        yield


def rates(
    trial: Trial, amount: Bytes | Product, backward: bool, libraries: Sequence[str], is_first: bool
) -> tuple[dict[str, list[float] | None], dict[str, float], dict[str, float]]:
    """Check and measure one work at one size, one way.

    Args:
        trial: the work, with inputs of the size.
        amount: how much is done.
        backward: whether its gradients are measured.
        libraries: the names of the other libraries.
        is_first: whether the process has not called the op this way: then the time of the first call is kept.

    Returns:
        By the name of who was measured the rates, the CPU's microseconds for a call, and the seconds of a first call.
    """
    import torch
    import torch._functorch.config

    from triton_gallery.bench import gpu_time

    torch.compiler.reset()  # a function is compiled for eight shapes at the most
    torch._functorch.config.donated_buffer = False  # else torch.compile refuses a backward that is run again
    functions = contestants(trial.work, libraries)
    calls: dict[str, Function] = {}
    ours: tuple[Any, ...] = ()
    first_call_s = {}
    for name, function in functions.items():
        is_kept = is_first and name in {TRITON, TORCH_COMPILE}
        try:
            with empty_caches() if is_kept else nullcontext():
                began = perf_counter()
                call = trial.call(function, backward)
                outputs = call()
                seconds = perf_counter() - began
            if is_kept:
                first_call_s[name] = float(f"{seconds:.3g}")
            if name == TRITON:
                ours = tuple(tensor.clone() for tensor in outputs)
            trial.check(name, outputs, ours)
        except Exception as error:
            if name not in LIBRARIES:
                raise
            print(f"{name} is left out: {error}")
            continue
        calls[name] = call
    calls[ROOF] = amount.roof(trial.dtype, trial.device)
    results: dict[str, list[float] | None] = dict.fromkeys(functions)
    timed = gpu_time(calls, TURNS, prepare=trial.restore)  # type: ignore[no-untyped-call]
    cpu_us = {}
    for name, (*times, cpu, _) in timed.items():
        results[name] = rates_of(amount, times)
        if name != ROOF:
            cpu_us[name] = float(f"{cpu:.4g}")
    return results, cpu_us, first_call_s


def main(arguments: list[str] | None = None) -> int:
    """Measure and record; return the exit status: 0, 1 if a row could not be measured, 2 if none could."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    chosen = parser.parse_args(arguments).recipe
    works = [work for work in WORKLOADS if not chosen or work.recipe in chosen]
    if unknown := set(chosen) - {work.recipe for work in works}:
        print(f"not measured beside other libraries: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    slots = detect()
    environment = slots[0].environment
    if not environment.is_gpu:
        print("torch sees no GPU here: libraries are measured on one", file=sys.stderr)
        return 2
    try:
        load_all(RECORDS)  # what is there is refused now, not after the GPU has worked
    except BadRecordError as error:
        print(error, file=sys.stderr)
        return 2
    keys = list(dict.fromkeys(work.recipe for work in works))
    gpus = [str(slot.visible) for slot in slots if slot.environment == environment]  # rows are of one kind of GPU
    if min(len(gpus), len(keys)) > 1:
        return side_by_side(keys, gpus)
    recipes = {recipe.key: recipe for recipe in load(GALLERY)}
    versions = installed()
    date, revision = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commit()
    packages = {LIBRARIES[name].package: version for name, version in versions.items()}
    known = [(work.recipe, name, shape) for work in WORKLOADS for name in work.directions for shape in work.shapes]
    begin_compiling()
    failed, begun = 0, set[tuple[str, bool]]()
    for work in works:
        made = (op_hash(recipes[work.recipe]), environment, date, revision, packages)
        rows = []
        for name, backward in work.directions.items():
            for shape in work.shapes:
                is_first = (work.recipe, backward) not in begun
                begun.add((work.recipe, backward))
                try:
                    unit, figures, *times = measure_size(work, shape, backward, list(versions), is_first)
                    row = LibraryRow(work.recipe, name, list(shape), unit, *made, figures, work.dtype, *times)
                except Exception as error:
                    print(f"{name:<40} {shape} failed: {type(error).__name__}: {error}", flush=True)
                    failed += 1
                else:
                    show(row)
                    rows.append(row)
        if rows:
            paths = merge(RECORDS, rows, known)  # as each work ends, so that no later one can cost its rows
            print(f"wrote {len(rows)} rows of {work.recipe} into {', '.join(map(str, paths))}", flush=True)
    if failed:
        print(f"{failed} rows were not measured")
    return int(failed > 0)


def begin_compiling() -> None:
    """Compile for the first time in this process: that loads the compilers, whose time is no op's."""
    import torch

    torch.compile(torch.neg)(torch.ones(1, device=DEVICE))


def side_by_side(keys: Sequence[str], gpus: Sequence[str]) -> int:
    """Measure recipes, each in a process that has one of the GPUs to itself; return 1 if one failed, else 0."""
    left = iter(keys)  # of all threads: who has ended one takes the next

    def failed_on(gpu: str) -> int:
        return sum(not measured_apart(key, gpu) for key in left)

    with ThreadPoolExecutor(len(gpus)) as pool:
        return int(sum(pool.map(failed_on, gpus)) > 0)


def measured_apart(key: str, gpu: str) -> bool:
    """Measure a recipe in another process, which sees this GPU alone; return whether all went well."""
    command = [sys.executable, "-m", "triton_gallery.libraries.measure", key]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    return done.returncode == 0


def measure_size(
    work: Workload, shape: tuple[int, ...], backward: bool, libraries: Sequence[str], is_first: bool
) -> tuple[str, dict[str, list[float] | None], dict[str, float], dict[str, float]]:
    """Return the unit of the rates of a work at a size, one way, then what `rates` returns."""
    import torch

    dtype = getattr(torch, work.dtype)
    amount = work.amount(shape, dtype.itemsize, backward)
    return amount.unit, *rates(Trial(work, shape, dtype, DEVICE), amount, backward, libraries, is_first)


def show(row: LibraryRow) -> None:
    """Print a row."""
    shown = ", ".join(f"{name} {rate[0]:.4g}" if rate else f"{name} -" for name, rate in row.rates.items())
    other, top = row.table.ratio(0), row.table.of_roof(0)
    ratios = f"Triton / best other {other:.3f}{' (tie)' if row.is_tie else ''}, / roof {top:.3f}"
    cpu = ", ".join(f"{name} {time:.0f}" for name, time in row.cpu_us.items())
    first = ", ".join(f"{name} {time:.3g}" for name, time in row.first_call_s.items())
    times = f"CPU us {cpu}{f'; first call, s: {first}' if first else ''}"
    print(f"{row.work:<40} {row.size:<14} {row.unit}: {shown}; {ratios}; {times}", flush=True)


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # no __pycache__ among the recipes
    sys.exit(main())
