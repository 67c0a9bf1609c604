"""Measures the gallery's ops beside other libraries', in one run on this machine's GPU, and records the figures.

`make peers` runs it. With recipes (`section/name`) it measures theirs alone, and records nothing. A library that is not
installed is left out. A further row of the table is one entry of WORKS, a further library one of PEERS.
"""

import argparse
import datetime
import importlib
import importlib.util
import math
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
DEVICE = "cuda"
EPS = 1e-6
WAIT = 1_500_000  # cycles of the GPU's clock before each call, about 0.8 ms
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
        backward: the same; None where only the forward is measured.
        peers: of a name in PEERS, what returns that library's function, given its module.
        variant: what tells it from the recipe's other rows.
        dtype: of the random tensors.
        called: returns how PyTorch's function, the compiled one and a library's is called, where not as it is.
        alike: returns what of two results, a library's and ours, has to be the same.
    """

    recipe: str
    ours: Callable[[ModuleType], Function]
    torch: Callable[[Any], Function]
    shapes: Sequence[tuple[int, ...]]
    inputs: Callable[[Function, tuple[int, ...]], tuple[Any, ...]]
    constants: tuple[Any, ...] = ()
    forward: tuple[int, int] = (1, 1)
    backward: tuple[int, int] | None = (2, 1)
    peers: dict[str, Callable[[ModuleType], Function]] = field(default_factory=dict)
    variant: str = ""
    dtype: str = "bfloat16"
    called: Callable[[Function], Function] = lambda function: function
    alike: Callable[[Any, Any], tuple[Any, Any]] = lambda got, ours: (got, ours)

    @property
    def name(self) -> str:
        """What the rows are called."""
        return ", ".join(filter(None, [self.recipe.rpartition("/")[2], self.variant]))

    @property
    def directions(self) -> list[str]:
        """Which ways it is measured."""
        return ["forward", "backward"] if self.backward else ["forward"]


def matrices(*lengths: int) -> list[tuple[int, int]]:
    """Return the sizes of matrices of 2**27 elements, given the lengths of their rows."""
    return [(2**27 // length, length) for length in lengths]


def rope_torch(torch: Any) -> Function:
    """Return RoPE of queries and keys, in halves."""

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return lambda q, k, cos, sin: (turned(q, cos, sin), turned(k, cos, sin))


def rope_inputs(random: Function, shape: tuple[int, ...], axis: int = 1, grad: bool = True) -> tuple[Any, ...]:
    """Return queries, keys and tables; the heads lie along `axis` of the shape, and four of five are of queries."""
    heads = random(shape).detach().tensor_split([shape[axis] - shape[axis] // 5], axis)
    q, k = (part.contiguous().transpose(1, axis).requires_grad_(grad) for part in heads)
    angle = random((q.shape[2], q.shape[3] // 2)).detach()
    return q, k, angle.cos(), angle.sin()


def rope_in_place(module: ModuleType) -> Function:
    """Return our op in place, so that it returns what it wrote."""

    def function(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        module.rope_(q, k, cos, sin)
        return q, k

    return function


def liger_rope(module: ModuleType) -> Function:
    """Return Liger's RoPE, which takes tables of half the columns only if it is told how many are turned."""
    return lambda q, k, cos, sin: module.liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def seeded(module: ModuleType) -> Function:
    """Return our dropout with a seed that is on the device already."""
    seed = module.new_seed(1)
    return lambda x, p: module.dropout(x, p, seed)


def kept_by_both(got: Any, ours: Any) -> tuple[Any, Any]:
    """Return two results of dropout, each with its own mask, under both masks."""
    both = (got != 0) & (ours != 0)
    return got[both], ours[both]


def loss_and_gradient(function: Function) -> Function:
    """Return a call for a loss and its gradient, given a function that computes the loss."""

    def call(logits: Any, target: Any) -> Any:
        import torch

        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = function(logits, target)
        return loss, torch.autograd.grad(loss, logits)[0]

    return call


def logits_and_targets(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return logits, and for each row the class that they hold least likely."""
    logits = random(shape)
    return logits, logits.detach().argmin(-1)


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
    Work(
        "fusion/rope",
        ours=attrgetter("rope"),
        torch=rope_torch,
        shapes=[(8, 40, 4096, 128)],
        inputs=rope_inputs,
        backward=(1, 1),
        peers={"Liger": liger_rope},
    ),
    Work(
        "fusion/rope",
        variant="in place",
        ours=rope_in_place,
        torch=rope_torch,
        shapes=[(8, 40, 4096, 128)],
        inputs=partial(rope_inputs, grad=False),
        backward=None,
        peers={"Liger": liger_rope},
    ),
    Work(
        "fusion/rope",
        variant="in place, heads inside",
        ours=rope_in_place,
        torch=rope_torch,
        shapes=[(8, 4096, 40, 128)],
        inputs=partial(rope_inputs, axis=2, grad=False),
        backward=None,
        peers={"Liger": liger_rope},
    ),
    Work(
        "fusion/dropout",
        ours=seeded,
        torch=lambda torch: torch.nn.functional.dropout,
        shapes=[(8192, 14336)],
        inputs=lambda random, shape: (random(shape),),
        constants=(0.1,),
        backward=(1, 1),
        alike=kept_by_both,
    ),
    Work(
        "fusion/cross_entropy",
        ours=attrgetter("cross_entropy"),
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=[(4096, 128256)],
        inputs=logits_and_targets,
        forward=(1, 0),
        backward=(1, 1),
    ),
    Work(
        "fusion/cross_entropy",
        variant="loss and gradient",
        ours=lambda module: lambda logits, target: (module.cross_entropy_(logits, target), logits),
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=[(4096, 128256)],
        inputs=lambda random, shape: tuple(tensor.detach() for tensor in logits_and_targets(random, shape)),
        backward=None,
        peers={"Liger": attrgetter("liger_cross_entropy")},
        called=loss_and_gradient,
    ),
    Work(
        "fusion/cumsum",
        variant="float32",
        ours=attrgetter("cumsum"),
        torch=lambda torch: lambda x: torch.cumsum(x, -1),
        shapes=[(16384, 16384)],
        inputs=lambda random, shape: (random(shape),),
        backward=(1, 1),
        dtype="float32",
    ),
    Work(
        "fusion/topk",
        variant="float32, k = 8",
        ours=attrgetter("topk"),
        torch=attrgetter("topk"),
        shapes=[(16384, 4096)],
        inputs=lambda random, shape: (random(shape),),
        constants=(8,),
        forward=(1, 0),
        backward=None,
        dtype="float32",
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
    ours, plain = work.ours(recipe_module(work.recipe)), work.torch(torch)
    functions = {"PyTorch": plain, "torch.compile": torch.compile(plain, fullgraph=True, dynamic=False)}
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

        self.work = work
        self.elements = math.prod(shape)
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
            return f"{self.work.name}: {name} has another result than ours: {said}"

        for pair in zip(got, ours, strict=True):
            a, b = (tensor.double() for tensor in self.work.alike(*pair))
            off = (a - b).norm() / b.norm()
            torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=TOLERANCE, msg=message)


class Restoring:
    """Restores a trial's inputs whenever its gradient is set to None, and lets the GPU wait.

    `do_bench` does that before each call that it times, and before it empties the L2 cache. While the GPU waits, the
    CPU gets ahead: a backward through autograd costs it longer than some kernels take, and would else be timed.
    """

    def __init__(self, trial: Trial) -> None:
        """Take the trial."""
        self.trial = trial

    @property
    def grad(self) -> None:
        """No gradient."""

    @grad.setter
    def grad(self, _: None) -> None:
        import torch

        self.trial.restore()
        if torch.cuda.is_available():
            torch.cuda._sleep(WAIT)  # type: ignore[no-untyped-call]


def measure(call: Function, bytes_moved: int, trial: Trial) -> list[float]:
    """Return GB/s: the median, then the 20th and the 80th percentile."""
    from triton.testing import do_bench

    times = do_bench(call, rep=50, quantiles=[0.5, 0.8, 0.2], grad_to_none=[Restoring(trial)])
    return [round(bytes_moved * 1e-6 / time, 1) for time in times]


def roof(reads: int, writes: int, elements: int, like: Any) -> Function:
    """Return what moves as many bytes and does nothing else: a copy, or an addition where more is read than written."""
    import torch

    tensors = 3 if reads > writes > 0 else 2
    size = elements * (reads + writes) // tensors
    out, source, other = (torch.randn(size, dtype=like.dtype, device=like.device) for _ in range(3))
    return partial(torch.add, source, other, out=out) if tensors == 3 else partial(out.copy_, source)


def rates(trial: Trial, backward: bool, peers: Sequence[str]) -> dict[str, list[float] | None]:
    """Check and measure one work at one size, one way; return the rates by the name of who was measured."""
    import torch

    reads, writes = trial.work.backward if backward and trial.work.backward else trial.work.forward
    like = trial.inputs[0]
    moved = (reads + writes) * trial.elements * like.element_size()
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
    found[ROOF] = measure(roof(reads, writes, trial.elements, like), moved, trial)
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
        for direction in work.directions:
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

    figures = rates(Trial(work, shape, getattr(torch, work.dtype), DEVICE), direction == "backward", peers)
    name = f"{work.name}, {direction}" if work.backward else work.name
    row = Row(work.recipe, name, list(shape), code, figures)
    shown = ", ".join(f"{name} {rate[0]:.0f}" if rate else f"{name} -" for name, rate in figures.items())
    other, top = row.table.ratio(0), row.table.of_roof(0)
    ratios = f"Triton / best other {other:.3f}{' (tie)' if row.is_tie else ''}, / roof {top:.3f}"
    print(f"{row.work:<40} {row.table.xs[0]:<14} {UNIT}: {shown}; {ratios}", flush=True)
    return row


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # no __pycache__ among the recipes
    sys.exit(main())
