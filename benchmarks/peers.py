"""Measures the gallery's ops beside other libraries', in one run on this machine's GPU, and records the figures.

`make peers` runs it. With recipes (`section/name`) it measures theirs alone, and records nothing. A library that is not
installed is left out. A further row of the table is one entry of WORKS, a further library one of PEERS.
"""

import argparse
import datetime
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from triton_gallery.device import detect
from triton_gallery.formats import commit
from triton_gallery.peers import UNIT, Row, write
from triton_gallery.recipes import hash_of, load
from triton_gallery.tables import ROOF, TRITON

ROOT = Path(__file__).resolve().parents[1]
GALLERY, RECORDS = ROOT / "gallery", ROOT / "docs" / "_records"
DTYPE, DEVICE = "bfloat16", "cuda"
EPS = 1e-6
TOLERANCE = 0.02  # of the length of the difference, in the length of our result; half precision comes to 0.005

Function = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        package: its name for pip.
        module: what has its functions.
    """

    package: str
    module: str


PEERS = {"Liger": Peer("liger-kernel", "liger_kernel.transformers.functional")}


@dataclass(frozen=True)
class Work:
    """One op at several sizes, forward and backward.

    All functions take what `inputs` returns, then `constants`. A tensor of the size `shape` is the unit of traffic: the
    algorithm's, whatever a library really moves.

    Attributes:
        recipe: `section/name` of ours.
        ours: returns our op, given the recipe's module.
        torch: the same in plain PyTorch, given the module `torch`; `torch.compile` gets it too.
        shapes: the sizes.
        inputs: returns the tensors, given what makes random ones of a shape, and one of `shapes`.
        constants: further arguments.
        forward: how many tensors are read and written.
        backward: the same.
        peers: of a name in PEERS, what returns that library's function, given its module.
    """

    recipe: str
    ours: Callable[[ModuleType], Function]
    torch: Callable[[Any], Function]
    shapes: Sequence[tuple[int, ...]]
    inputs: Callable[[Function, tuple[int, ...]], tuple[Any, ...]]
    constants: tuple[Any, ...] = ()
    forward: tuple[int, int] = (1, 1)
    backward: tuple[int, int] = (2, 1)
    peers: dict[str, Callable[[ModuleType], Function]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the rows are called."""
        return self.recipe.rpartition("/")[2]


def matrices(*lengths: int) -> list[tuple[int, int]]:
    """Return the sizes of matrices of 2**27 elements, given the lengths of their rows."""
    return [(2**27 // length, length) for length in lengths]


WORKS = [
    Work(
        "fusion/softmax",
        ours=attrgetter("softmax"),
        torch=lambda torch: lambda x: torch.softmax(x, -1),
        shapes=matrices(1024, 4096, 16384, 65536),
        inputs=lambda random, shape: (random(shape),),
        peers={"Liger": attrgetter("liger_softmax")},
    ),
    Work(
        "fusion/rms_norm",
        ours=attrgetter("rms_norm"),
        torch=lambda torch: lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps),
        shapes=matrices(1024, 4096, 16384),
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(EPS,),
        peers={"Liger": attrgetter("liger_rms_norm")},
    ),
    Work(
        "fusion/layer_norm",
        ours=attrgetter("layer_norm"),
        torch=lambda torch: lambda x, *args: torch.nn.functional.layer_norm(x, x.shape[-1:], *args),
        shapes=matrices(1024, 4096, 16384),
        inputs=lambda random, shape: (random(shape), random(shape[-1:]), random(shape[-1:])),
        constants=(EPS,),
        peers={"Liger": attrgetter("liger_layer_norm")},
    ),
    Work(
        "fusion/swiglu",
        ours=attrgetter("swiglu"),
        torch=lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up,
        shapes=[(8192, 14336)],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=(2, 1),
        backward=(3, 2),
        peers={"Liger": attrgetter("liger_swiglu")},
    ),
]


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
    functions = {TRITON: work.ours(recipe_module(work.recipe)), "PyTorch": work.torch(torch)}
    functions["torch.compile"] = torch.compile(work.torch(torch), fullgraph=True, dynamic=False)
    for name in (name for name in peers if name in work.peers):
        functions[name] = work.peers[name](importlib.import_module(PEERS[name].module))
    return functions


class Trial:
    """The inputs of one work at one size, and the calls on them.

    Some libraries write over what they are given. Liger's `rms_norm` puts the gradient of `x` where that of `y` was,
    its `swiglu` those of `gate` and `up` in their places. It is their default, so it is measured; but from the second
    call on the data would be no longer random. So before each call all inputs are restored, for all libraries alike.
    """

    def __init__(self, work: Work, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
        """Make random inputs of a size."""
        import torch

        self.work = work
        self.inputs = work.inputs(partial(torch.randn, dtype=dtype, device=device, requires_grad=True), shape)
        outputs = work.torch(torch)(*self.inputs, *work.constants)
        self.grads = [torch.randn_like(output) for output in _tuple(outputs)]
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
            return f"{self.work.name}: {name} has another result than ours: {said}"

        for a, b in zip(got, ours, strict=True):
            off = (a.double() - b.double()).norm() / b.double().norm()
            torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=TOLERANCE, msg=message)


class Restoring:
    """Restores a trial's inputs whenever its gradient is set to None.

    `do_bench` does that before each call that it times, and before it empties the L2 cache.
    """

    def __init__(self, trial: Trial) -> None:
        """Take the trial."""
        self.trial = trial

    @property
    def grad(self) -> None:
        """No gradient."""

    @grad.setter
    def grad(self, _: None) -> None:
        self.trial.restore()


def measure(call: Function, bytes_moved: int, trial: Trial) -> list[float]:
    """Return GB/s: the median, then the 20th and the 80th percentile."""
    from triton.testing import do_bench

    times = do_bench(call, quantiles=[0.5, 0.8, 0.2], grad_to_none=[Restoring(trial)])
    return [round(bytes_moved * 1e-6 / time, 1) for time in times]


def roof(reads: int, writes: int, like: Any) -> Function:
    """Return what moves as many bytes and does nothing else: a copy, or an addition where more is read than written."""
    import torch

    tensors = 3 if reads > writes > 0 else 2
    size = like.numel() * (reads + writes) // tensors
    out, source, other = (torch.randn(size, dtype=like.dtype, device=like.device) for _ in range(3))
    return partial(torch.add, source, other, out=out) if tensors == 3 else partial(out.copy_, source)


def rates(trial: Trial, backward: bool, peers: Sequence[str]) -> dict[str, list[float] | None]:
    """Check and measure one work at one size, one way; return the rates by the name of who was measured."""
    import torch

    reads, writes = trial.work.backward if backward else trial.work.forward
    unit = trial.inputs[0]
    moved = (reads + writes) * unit.numel() * unit.element_size()
    torch.compiler.reset()  # after eight shapes it would fall back to eager
    found: dict[str, list[float] | None] = {}
    ours: tuple[Any, ...] = ()
    for name, function in contestants(trial.work, peers).items():
        try:
            call = trial.call(function, backward)
            got = call()
        except Exception as error:
            if name not in PEERS:
                raise
            print(f"{name} does not do this: {error}")
            found[name] = None
            continue
        if name == TRITON:
            ours = tuple(tensor.clone() for tensor in got)
        trial.check(name, got, ours)
        found[name] = measure(call, moved, trial)
    found[ROOF] = measure(roof(reads, writes, unit), moved, trial)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure; return the exit status: 0, or 2 if it could not be done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="*", help="section/name; all, and recorded, if none is given")
    chosen = parser.parse_args(arguments).recipe
    works = [work for work in WORKS if not chosen or work.recipe in chosen]
    if unknown := set(chosen) - {work.recipe for work in works}:
        print(f"not measured beside other libraries: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    environment = detect()[0]
    if not environment.is_gpu:
        print("torch sees no GPU here: libraries are measured on one", file=sys.stderr)
        return 2
    recipes = {recipe.key: recipe for recipe in load(GALLERY)}
    date, revision = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), commit()
    versions = installed()
    rows = []
    for work in works:
        code = hash_of(recipes[work.recipe])
        for direction in ("forward", "backward"):
            rows += [measure_row(work, shape, direction, code, list(versions)) for shape in work.shapes]
    if chosen:
        print("Nothing was recorded: that takes a run of all.")
        return 0
    packages = {PEERS[name].package: version for name, version in versions.items()}
    print(f"wrote {write(RECORDS, environment, date, revision, packages, rows)}")
    return 0


def measure_row(work: Work, shape: tuple[int, ...], direction: str, code: str, peers: Sequence[str]) -> Row:
    """Return the row of a work at a size, forward or backward, and print it."""
    import torch

    figures = rates(Trial(work, shape, getattr(torch, DTYPE), DEVICE), direction == "backward", peers)
    row = Row(work.recipe, f"{work.name}, {direction}", list(shape), code, figures)
    shown = ", ".join(f"{name} {rate[0]:.0f}" if rate else f"{name} -" for name, rate in figures.items())
    other, top = row.table.ratio(0), row.table.of_roof(0)
    ratios = f"Triton / best other {other:.3f}{' (tie)' if row.is_tie else ''}, / roof {top:.3f}"
    print(f"{row.work:<20} {row.table.xs[0]:<14} {UNIT}: {shown}; {ratios}", flush=True)
    return row


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # no __pycache__ among the recipes
    sys.exit(main())
