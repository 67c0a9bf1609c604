"""Measures the gallery's ops beside other libraries', on this machine's GPU, and records the figures.

`make peers` runs it. With recipes (`section/name`) it measures theirs alone; the other rows of the table stay as they
are. A library that is not installed is left out. Further rows of the table are an entry of `works/<recipe>.py`, a
further library is one of PEERS.
"""

import argparse
import datetime
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from work import Bytes, Function, Product, Work

from triton_gallery.recipes.contents import load
from triton_gallery.recipes.device import detect
from triton_gallery.recipes.hashes import hash_of
from triton_gallery.recipes.tables import ROOF, TRITON
from triton_gallery.records.formats import BadRecordError, Device, commit
from triton_gallery.records.peers import PeerRow, load_all, merge

ROOT = Path(__file__).resolve().parents[1]
GALLERY, RECORDS = ROOT / "gallery", ROOT / "docs" / "_records"
DEVICE = "cuda"
WAIT = 3_000_000  # cycles of the GPU's clock before each call, about 1.5 ms
CACHE = 2**28  # bytes written before each call, more than any L2 cache holds
WARM_UP, TURNS = 3, 40
TOLERANCE = 0.02  # of the length of the difference, in the length of our result; half precision comes to 0.005


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        package: its name for pip.
        module: what has its functions.
    """

    package: str
    module: str


PEERS = {
    "Liger": Peer("liger-kernel", "liger_kernel.transformers.functional"),
    "PyTorch in chunks": Peer("torch", "torch.nn"),  # from 2.13 on
    "cuDNN": Peer("torch", "torch.nn"),  # PyTorch chooses one of these for its attention
    "FlashAttention-2": Peer("torch", "torch.nn"),
    "FLA": Peer("fla-core", "fla.ops.simple_gla"),
    "FLA's gated delta rule": Peer("fla-core", "fla.ops.gated_delta_rule"),
    "flex_attention": Peer("torch", "torch"),
}


def load_works() -> list[Work]:
    """Return the works of all recipes, in the recipes' order."""
    modules = (f"works.{recipe.name}" for recipe in load(GALLERY))
    return [work for name in modules if importlib.util.find_spec(name) for work in importlib.import_module(name).WORKS]


WORKS = load_works()


@cache
def recipe_module(recipe: str) -> ModuleType:
    """Import a recipe by its path, as `import <name>` would in its folder."""
    path = GALLERY / f"{recipe}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed() -> dict[str, str]:
    """Return the versions of the peers that are installed, by name; say which are not."""
    versions = {}
    for name, peer in PEERS.items():
        try:
            versions[name] = version(peer.package)
        except PackageNotFoundError:
            print(f"{name} is left out: it is not installed (pip install {peer.package})")
    return versions


def contestants(work: Work, peers: Sequence[str]) -> dict[str, Function]:
    """Return what is measured, by name: ours first, then PyTorch and the peers that have this work."""
    import torch

    # Ours before all that imports triton: without a GPU, the recipe chooses the interpreter.
    ours, plain = work.ours(recipe_module(work.recipe)), work.torch(torch)
    functions = {"PyTorch": plain}
    if work.compiles:
        functions["torch.compile"] = torch.compile(plain, fullgraph=True, dynamic=False)
    for name in (name for name in peers if name in work.peers):
        functions[name] = work.peers[name](importlib.import_module(PEERS[name].module))
    return {TRITON: ours, **{name: work.called(function) for name, function in functions.items()}}


class Trial:
    """The inputs of one work at one size, and the calls on them.

    Some libraries write over what they are given. Liger's `rms_norm` puts the gradient of `x` where that of `y` was,
    its `swiglu` those of `gate` and `up` in their places. It is their default, so it is measured; but from the second
    call on the data would be no longer random. So before each call all inputs are restored, for all libraries alike.
    """

    def __init__(self, work: Work, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
        """Make random inputs of a size."""
        import torch

        self.work, self.dtype, self.device = work, dtype, device
        self.inputs = work.inputs(partial(torch.randn, dtype=dtype, device=device, requires_grad=True), shape)
        outputs = _tuple(work.torch(torch)(*self.inputs, *work.constants)) if work.backward else ()
        self.grads = [torch.randn_like(output) for output in outputs]
        tensors = [tensor for tensor in (*self.inputs, *self.grads) if isinstance(tensor, torch.Tensor)]
        self.kept = [(tensor.data, tensor.detach().clone()) for tensor in tensors]  # .data: autograd need not know

    def restore(self) -> None:
        """Give the inputs their values back."""
        for tensor, kept in self.kept:
            tensor.copy_(kept)

    def call(self, function: Function, backward: bool) -> Callable[[], tuple[Any, ...]]:
        """Return the function's forward, or its backward on a graph that is there, as a call."""
        import torch

        self.restore()
        if backward:
            outputs = _tuple(function(*self.inputs, *self.work.constants))
            leaves = [tensor for tensor in self.inputs if tensor.requires_grad]
            return partial(torch.autograd.grad, outputs, leaves, self.grads, retain_graph=True)
        return torch.no_grad()(lambda: _tuple(function(*self.inputs, *self.work.constants)))

    def check(self, name: str, got: tuple[Any, ...], ours: tuple[Any, ...]) -> None:
        """Compare results with ours: a call that means something else is not worth a time.

        Elements may cancel, so that each alone may be off by more than half precision rounds; all together are not.
        """
        import torch

        def message(said: str) -> str:
            return f"{self.work.recipe}: {name} has another result than ours: {said}"

        for pair in zip(got, ours, strict=True):
            a, b = (tensor.double() for tensor in self.work.alike(*pair))
            off = (a - b).norm() / b.norm()
            torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=TOLERANCE, msg=message)


def measure(calls: dict[str, Function], restore: Function) -> dict[str, list[float]]:
    """Return the GPU's milliseconds for each call: the median, then the 20th and the 80th percentile.

    The calls take turns, so that a drift of the clocks hits all alike. Before each the inputs are restored and the L2
    cache is emptied. The GPU sleeps meanwhile, so that the CPU gets ahead: a backward through autograd costs it longer
    than some kernels take, and would else be timed.
    """
    import torch

    cache = torch.empty(CACHE, dtype=torch.int8, device=DEVICE)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + TURNS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            restore()
            torch.cuda._sleep(WAIT)  # type: ignore[no-untyped-call]
            cache.zero_()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[name].append(start.elapsed_time(end))
    fifths = {name: statistics.quantiles(found, n=5, method="inclusive") for name, found in times.items()}
    return {name: [statistics.median(found), fifths[name][0], fifths[name][-1]] for name, found in times.items()}


def rates(trial: Trial, amount: Bytes | Product, backward: bool, peers: Sequence[str]) -> dict[str, list[float] | None]:
    """Check and measure one work at one size, one way; return the rates by the name of who was measured."""
    import torch
    import torch._functorch.config

    torch.compiler.reset()  # a function is compiled for eight shapes at the most
    torch._functorch.config.donated_buffer = False  # else torch.compile refuses a backward that is run again
    functions = contestants(trial.work, peers)
    calls: dict[str, Function] = {}
    ours: tuple[Any, ...] = ()
    for name, function in functions.items():
        try:
            call = trial.call(function, backward)
            got = call()
            if name == TRITON:
                ours = tuple(tensor.clone() for tensor in got)
            trial.check(name, got, ours)
        except Exception as error:
            if name not in PEERS:
                raise
            print(f"{name} is left out: {error}")
            continue
        calls[name] = call
    calls[ROOF] = amount.roof(trial.dtype, trial.device)
    found: dict[str, list[float] | None] = dict.fromkeys(functions)
    for name, (median, low, high) in measure(calls, trial.restore).items():
        found[name] = [float(f"{amount.rate(time):.5g}") for time in (median, high, low)]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and record; return the exit status: 0, 1 if a row could not be measured, 2 if none could."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="*", help="section/name; all if none is given")
    chosen = parser.parse_args(arguments).recipe
    works = [work for work in WORKS if not chosen or work.recipe in chosen]
    if unknown := set(chosen) - {work.recipe for work in works}:
        print(f"not measured beside other libraries: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    environment = detect()[0]
    if not environment.is_gpu:
        print("torch sees no GPU here: libraries are measured on one", file=sys.stderr)
        return 2
    try:
        load_all(RECORDS)  # what is there is refused now, not after the GPU has worked
    except BadRecordError as error:
        print(error, file=sys.stderr)
        return 2
    recipes = {recipe.key: recipe for recipe in load(GALLERY)}
    versions = installed()
    device = Device(**environment.kind)  # type: ignore[arg-type]
    date, revision = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commit()
    packages = {PEERS[name].package: version for name, version in versions.items()}
    known = [(work.recipe, name, shape) for work in WORKS for name in work.directions for shape in work.shapes]
    failed = 0
    for work in works:
        made = (hash_of(recipes[work.recipe]), device, date, revision, packages)
        rows = []
        for name, backward in work.directions.items():
            for shape in work.shapes:
                try:
                    figures, unit = measure_size(work, shape, backward, list(versions))
                    row = PeerRow(work.recipe, name, list(shape), unit, *made, figures)
                except Exception as error:
                    print(f"{name:<40} {shape} failed: {type(error).__name__}: {error}", flush=True)
                    failed += 1
                else:
                    show(row)
                    rows.append(row)
        if rows:
            path = merge(RECORDS, rows, known)  # as each work ends, so that no later one can cost its rows
            print(f"wrote {len(rows)} rows of {work.recipe} into {path}", flush=True)
    if failed:
        print(f"{failed} rows were not measured")
    return int(failed > 0)


def measure_size(
    work: Work, shape: tuple[int, ...], backward: bool, peers: Sequence[str]
) -> tuple[dict[str, list[float] | None], str]:
    """Return the rates of a work at a size, one way, and their unit."""
    import torch

    dtype = getattr(torch, work.dtype)
    amount = work.amount(shape, dtype.itemsize, backward)
    return rates(Trial(work, shape, dtype, DEVICE), amount, backward, peers), amount.unit


def show(row: PeerRow) -> None:
    """Print a row."""
    shown = ", ".join(f"{name} {rate[0]:.4g}" if rate else f"{name} -" for name, rate in row.rates.items())
    other, top = row.table.ratio(0), row.table.of_roof(0)
    ratios = f"Triton / best other {other:.3f}{' (tie)' if row.is_tie else ''}, / roof {top:.3f}"
    print(f"{row.work:<40} {row.size:<14} {row.unit}: {shown}; {ratios}", flush=True)


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # no __pycache__ among the recipes
    sys.exit(main())
