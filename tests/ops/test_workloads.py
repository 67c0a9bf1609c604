"""What `make libraries` measures is the same work, on the same inputs, for every library."""

import dataclasses
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from collect_cases import runs_here
from msgspec import structs
from project import ROOT

from benchmarks.dropout import kept_by_both
from triton_gallery import bench
from triton_gallery.libraries import measure
from triton_gallery.libraries.library_rows import LibraryRow, load_all
from triton_gallery.libraries.trial import with_op
from triton_gallery.libraries.workload import drawn_rows
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.device import Environment, Slot

SMALL, WIDE = 24, 64  # rows are as long as any k
ON_GPU = torch.cuda.is_available()


def installed() -> list[str]:
    """Return the libraries that can run here; the interpreter does not run all of their kernels."""
    names = []
    for name, library in measure.LIBRARIES.items():
        try:
            version(library.package)
        except PackageNotFoundError:
            continue
        names.append(name)
    return names if ON_GPU else []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("work", "backward"),
    [pytest.param(work, backward, id=name) for work in measure.WORKLOADS for name, backward in work.directions.items()],
)
def test_all_libraries_do_the_same(
    work: measure.Workload, backward: bool, recipe_at: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "recipe_module", lambda recipe: with_op(recipe_at(f"{recipe}.py")))
    if not runs_here(work.recipe):
        pytest.skip("needs another GPU")
    *sizes, length = work.shapes[-1]
    shape = (*(min(size, SMALL) for size in sizes), min(length, WIDE))
    path = ROOT / f"gallery/{work.recipe}.py"
    taken = declaration(path, path.read_text()).of_op.dtypes
    # Other libraries' kernels take half precision alone, and are there on a GPU alone.
    exact = not ON_GPU and (not taken or "float32" in taken)
    dtype = torch.float32 if exact else getattr(torch, work.dtype)
    trial = measure.Trial(work, shape, dtype, "cuda" if ON_GPU else "cpu")
    functions = measure.contestants(work, installed())
    if not ON_GPU:
        functions.pop("torch.compile", None)
    assert list(functions)[:2] == ["Triton", "PyTorch"]
    ours = tuple(tensor.clone() for tensor in trial.call(functions["Triton"], backward)())
    refused = []
    for name, function in functions.items():
        try:
            results = trial.call(function, backward)()
        except Exception as error:
            if name not in measure.LIBRARIES:
                raise
            refused.append(f"{name}: {error}")
        else:
            trial.check(name, results, ours)
    if refused:
        pytest.skip(f"NOT TESTED: {'; '.join(refused)}")


@pytest.mark.parametrize("seed", range(20))
def test_drawn_rows(seed: int) -> None:
    """A seed has one size, within its bounds, whose length a unit divides."""
    rows, columns = drawn = drawn_rows(seed, (1, 4096), (512, 131072), 2**20, 16)
    assert drawn == drawn_rows(seed, (1, 4096), (512, 131072), 2**20, 16)
    assert 1 <= rows <= 4096
    assert 512 <= columns + 15 <= 131072 + 15
    assert columns % 16 == 0
    assert rows * columns <= 2**20
    assert drawn != drawn_rows(seed + 1, (1, 4096), (512, 131072), 2**20, 16)
    assert drawn_rows(seed, (1, 4096), (512, 131072), 2**20, 16, rest=8)[1] % 16 == 8


def test_masks_may_differ_but_not_what_is_kept() -> None:
    work_trial = measure.Trial(dataclasses.replace(trial().work, alike=kept_by_both), (8,), torch.float32, "cpu")
    ours = torch.tensor([2.0, 0, 4, 6])
    work_trial.check("Liger", (torch.tensor([0.0, 3, 4, 6]),), (ours,))
    for wrong in ([0.0, 3, 2, 3], [0.0, 0, 0, 0]):
        with pytest.raises(AssertionError, match="Liger has another result than ours"):
            work_trial.check("Liger", (torch.tensor(wrong),), (ours,))


class Greedy(torch.autograd.Function):
    """x * y, which writes the gradients over its inputs."""

    @staticmethod
    def forward(ctx, x, y):
        """Multiply."""
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        """Leave nothing as it was."""
        x, y = (tensor.data for tensor in ctx.saved_tensors)
        dx, dy = grad * y, grad * x
        x.copy_(dx)
        y.copy_(dy)
        grad.data.zero_()
        return x, y


def trial() -> measure.Trial:
    """Return a trial of a product of two vectors."""
    work = measure.Workload(
        "things/one",
        ours=lambda module: torch.mul,
        torch=lambda torch: torch.mul,
        shapes=[(8,)],
        inputs=lambda random, shape: (random(shape), random(shape)),
    )
    return measure.Trial(work, (8,), torch.float32, "cpu")


class Clock:
    """A GPU of which only the time is there: what is called says how many milliseconds it took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of the real one."""
        self.now, self.log = 0.0, []
        for name in ("_sleep", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.log.append(name))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        small = SimpleNamespace(empty=lambda *_, **__: torch.zeros(8), cuda=torch.cuda, int8=torch.int8)
        monkeypatch.setattr(bench, "torch", small)

    def call(self, name: str, times: list[float]) -> Callable[[], None]:
        """Return a call that takes these times in turn, and the last one from then on."""
        remaining = list(times)

        def call() -> None:
            self.log.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call


WARM_UP = 5


@dataclasses.dataclass
class Event:
    """A moment on a clock."""

    clock: Clock
    at: float = 0.0

    def record(self) -> None:
        """Take the time."""
        self.clock.log.append("event")
        self.at = self.clock.now

    def query(self) -> bool:
        """Whether the GPU is past it: here it always is."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds until another event."""
        return end.at - self.at


def test_calls_are_timed_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is timed after the GPU has begun to sleep, and what warms up is not counted."""
    clock = Clock(monkeypatch)
    warm = [1e9] * WARM_UP
    calls = {"ours": clock.call("ours", [*warm, 5, 1, 2, 3, 4]), "other": clock.call("other", [*warm, 7])}
    measured = bench.gpu_time(calls, turns=5, prepare=lambda: clock.log.append("restore"))
    assert {name: times[:3] for name, times in measured.items()} == {"ours": (3, 2, 5), "other": (7, 7, 7)}
    assert all(late for *_, late in measured.values())
    our_turn = [*("restore", "_sleep", "event", "ours", "event", "synchronize")]
    other_turn = ["other" if step == "ours" else step for step in our_turn]
    assert clock.log == (our_turn + other_turn) * (WARM_UP + 5)


def test_inputs_are_restored_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    work_trial = trial()
    expected = work_trial.call(torch.mul, backward=True)()
    call = work_trial.call(Greedy.apply, backward=True)
    results = []
    bench.gpu_time({"Greedy": lambda: results.append([part.clone() for part in call()])}, 6, prepare=work_trial.restore)
    assert len(results) == WARM_UP + 6
    for gradients in results:
        work_trial.check("Greedy", tuple(gradients), expected)


def test_work_of_several_dtypes_is_counted_in_bytes() -> None:
    """An op that scales rows in half precision by factors in single: what moves says so, and all is restored."""
    work = measure.Workload(
        "things/scale",
        ours=lambda module: lambda x, scale: (x * scale).to(x.dtype),
        torch=lambda torch: lambda x, scale: (x * scale).to(x.dtype),
        shapes=[(8, 4)],
        inputs=lambda random, shape: (random(shape), random((shape[0], 1), dtype=torch.float32)),
        forward=lambda shape, itemsize: measure.Bytes(32 * itemsize + 4 * shape[0], 32 * itemsize),
    )
    amount = work.amount((8, 4), itemsize=2, backward=False)
    assert (amount.unit, amount.rate(milliseconds=1e-6)) == ("GB/s", 2 * 32 * 2 + 8 * 4)
    work_trial = measure.Trial(work, (8, 4), torch.bfloat16, "cpu")
    assert [tensor.dtype for tensor in work_trial.inputs] == [torch.bfloat16, torch.float32]
    dx, dscale = work_trial.call(work.torch(torch), backward=True)()
    assert (dx.dtype, dscale.dtype) == (torch.bfloat16, torch.float32)


def test_roof_moves_as_many_bytes() -> None:
    """A copy, or an addition where more is read than written."""
    for read, written, tensors in ((64, 64, 2), (128, 64, 3), (96, 0, 2)):
        amount = measure.Bytes(read, written)
        call = amount.roof(torch.bfloat16, "cpu")
        held = [call.func.__self__] if tensors == 2 else [call.keywords["out"]]
        held += [part for part in call.args if isinstance(part, torch.Tensor)]
        assert len(held) == tensors
        assert sum(part.nbytes for part in held) == read + written
        call()


def test_work_that_computes_is_counted_in_operations() -> None:
    (work,) = (work for work in measure.WORKLOADS if work.recipe == "matmul/linear_gelu")
    amount = work.amount((512, 128, 4096), itemsize=2, backward=False)
    assert (amount.unit, amount.rate(milliseconds=1e-9)) == ("TFLOP/s", 2 * 512 * 4096 * 128)
    product = amount.roof(torch.bfloat16, "cpu")()
    assert (product.shape, product.dtype) == ((512, 4096), torch.bfloat16), "the vendor's product of the same size"


def test_another_result_is_not_timed() -> None:
    work_trial = trial()
    ours = work_trial.call(torch.mul, backward=False)()
    work_trial.check("PyTorch", tuple(tensor.bfloat16() for tensor in ours), ours)
    for wrong in (torch.add, lambda x, y: 1.05 * x * y, lambda x, y: x * y * torch.nan):
        with pytest.raises(AssertionError, match="one: Liger has another result than ours"):
            work_trial.check("Liger", work_trial.call(wrong, backward=False)(), ours)


def recorded(records: Path) -> list[LibraryRow]:
    """Return what is recorded: first that of *Softmax*, then that of *RMSNorm*."""
    return sorted(load_all(records), key=lambda row: row.recipe, reverse=True)


def says(*times: float) -> Callable[..., dict[str, tuple[float, ...]]]:
    """Return a clock by which all calls take the same time: its median, its percentiles, and the CPU time."""
    return lambda calls, turns, prepare: dict.fromkeys(calls, (*times, 7.0, False))


@pytest.fixture
def host(
    recipe_at: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[measure.Workload]]:
    """Return the folder of records and the works of a host of which all but the GPU's times is real."""
    gpu = Environment("Test GPU 9000", "9.0", 1, "1.2", "13.0", "2.99", "3.99", "3.11")
    known = {work.recipe: work for work in reversed(measure.WORKLOADS)}  # the first of each
    softmax, rms_norm = (
        dataclasses.replace(known[recipe], shapes=[(8, SMALL), (2, SMALL)], libraries={}, dtype="float32")
        for recipe in ("fusion/softmax", "fusion/rms_norm")
    )
    works = [dataclasses.replace(softmax, libraries={"Other": lambda module: module.sqrt}), rms_norm]
    monkeypatch.setattr(measure, "LIBRARIES", {"Other": measure.Library("torch", "math")})
    monkeypatch.setattr(measure, "WORKLOADS", works)
    monkeypatch.setattr(measure, "RECORDS", tmp_path)
    monkeypatch.setattr(measure, "DEVICE", "cuda" if ON_GPU else "cpu")
    monkeypatch.setattr(measure, "detect", lambda: [Slot(gpu, "0")])
    monkeypatch.setattr(measure, "recipe_module", lambda recipe: with_op(recipe_at(f"{recipe}.py")))
    monkeypatch.setattr(bench, "gpu_time", says(1e-6, 5e-7, 2e-6))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return tmp_path, works


def test_a_whole_run_is_recorded(host: tuple[Path, list[measure.Workload]]) -> None:
    """All but the timing and the other libraries is what a GPU host does."""
    records, _ = host
    assert measure.main([]) == 0
    rows = recorded(records)
    assert {row.environment.name for row in rows} == {"Test GPU 9000"}
    assert all(row.packages == {"torch": version("torch")} for row in rows)
    assert all(row.is_fresh(load(measure.GALLERY)) for row in rows)
    assert [row.work for row in rows] == [
        *(["softmax, forward"] * 2 + ["softmax, backward"] * 2 + ["rms_norm, forward"] * 2 + ["rms_norm, backward"] * 2)
    ]
    assert list(rows[0].rates) == ["Triton", "PyTorch", "torch.compile", "Other", "Roof"]
    assert rows[0].rates["Other"] is None, "it takes no tensors"
    assert rows[0].cpu_us == dict.fromkeys(["Triton", "PyTorch", "torch.compile"], 7.0)
    kept = [list(row.first_call_s) for row in rows]
    assert kept == [["Triton", "torch.compile"], []] * 4, "the first of each recipe, forward and backward"
    median, low, high = rows[0].rates["Triton"]
    assert (low, median, high) == (median / 2, 2 * 8 * SMALL * 4, 2 * median)
    assert rows[2].rates["Triton"][0] == 3 * 8 * SMALL * 4, "two tensors are read by the backward"


def test_first_calls_find_empty_caches(
    host: tuple[Path, list[measure.Workload]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others find those that are there, and none is left behind."""
    _, works = host
    seen = {}

    def softmax(x):
        folders = [os.environ[cache] for cache in measure.CACHES]
        seen.setdefault((len(x), torch.is_grad_enabled()), folders)
        return torch.softmax(x, -1)

    for cache in measure.CACHES:
        monkeypatch.setenv(cache, "warm")
    works[:] = [dataclasses.replace(works[0], ours=lambda module: softmax)]
    assert measure.main([]) == 0
    assert all(folders == ["warm"] * 2 for (rows, _), folders in seen.items() if rows == 2)
    cold = [folder for (rows, _), folders in seen.items() if rows == 8 for folder in folders]
    assert len(set(cold)) == 4
    assert not [folder for folder in cold if folder == "warm" or Path(folder).parent.exists()]


def test_library_that_means_something_else_costs_its_figure_alone(
    host: tuple[Path, list[measure.Workload]], capsys: pytest.CaptureFixture[str]
) -> None:
    records, works = host
    works[0] = dataclasses.replace(works[0], libraries={"Other": lambda module: lambda x: 2 * torch.softmax(x, -1)})
    assert measure.main([works[0].recipe]) == 0
    assert all(row.rates["Other"] is None and row.rates["PyTorch"] for row in recorded(records))
    assert "Other is left out: fusion/softmax: Other has another result than ours" in capsys.readouterr().out


def test_work_that_computes_is_recorded(
    host: tuple[Path, list[measure.Workload]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In operations, beside the vendor's product of the same size and dtype."""
    records, works = host
    linear = torch.nn.functional.linear
    seen = []

    def timed(calls, turns, prepare):
        seen.append(calls["Roof"]())
        return says(1e-9, 1e-9, 1e-9)(calls, turns, prepare)

    works[:] = [
        measure.Workload(
            "matmul/linear_gelu",
            ours=lambda module: linear,
            torch=lambda torch: linear,
            shapes=[(2, 3, 4)],
            inputs=lambda random, shape: (random((2, 4)), random((3, 4)), random((3,))),
            forward=lambda shape, itemsize: measure.Product(*shape),
            backward=None,
        )
    ]
    monkeypatch.setattr(bench, "gpu_time", timed)
    assert measure.main([]) == 0
    (row,) = recorded(records)
    assert (row.unit, row.rates["Triton"]) == ("TFLOP/s", [2 * 2 * 3 * 4] * 3)
    assert [(tuple(roof.shape), roof.dtype) for roof in seen] == [((2, 3), torch.bfloat16)]


def test_one_recipe_measures_its_own_rows(
    host: tuple[Path, list[measure.Workload]], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, works = host
    assert measure.main([]) == 0
    before = recorded(records)
    works[1] = dataclasses.replace(works[1], shapes=[(2, SMALL), (3, SMALL)], backward=None)
    works[0] = dataclasses.replace(works[0], shapes=[(2, SMALL), (8, SMALL)])
    monkeypatch.setattr(bench, "gpu_time", says(2e-6, 2e-6, 2e-6))
    assert measure.main(["fusion/rms_norm"]) == 0
    now = recorded(records)
    assert now[:4] == [before[1], before[0], before[3], before[2]], "they are as they were, in the works' order"
    assert [(row.work, row.shape) for row in now[4:]] == [("rms_norm", [2, SMALL]), ("rms_norm", [3, SMALL])]
    assert now[4].rates["Triton"] == [2 * 2 * SMALL * 4 / 2] * 3


def test_one_work_that_fails_costs_its_rows_alone(
    host: tuple[Path, list[measure.Workload]], capsys: pytest.CaptureFixture[str]
) -> None:
    records, works = host
    assert measure.main([]) == 0
    before = recorded(records)
    path = records / "test-gpu-9000" / "ops" / "softmax.json"

    def greedy(x):
        if len(x) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 2 * torch.softmax(x, -1)

    works[0] = dataclasses.replace(works[0], ours=lambda module: greedy)
    path.unlink()
    capsys.readouterr()
    assert measure.main([]) == 1
    now = recorded(records)
    assert [structs.replace(row, first_call_s={}) for row in now] == [
        structs.replace(row, date=now[0].date, first_call_s={}) for row in before[4:]
    ]
    printed = capsys.readouterr().out
    assert printed.count("(8, 24) failed: OutOfMemoryError: CUDA out of memory") == 2
    assert printed.count("(2, 24) failed: AssertionError: fusion/softmax: PyTorch has another result than ours") == 2
    assert printed.endswith("4 rows were not measured\n")


def test_bad_record_is_refused_before_the_gpu_works(
    host: tuple[Path, list[measure.Workload]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records, _ = host
    path = records / "test-gpu-9000" / "ops" / "softmax.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setattr(bench, "gpu_time", lambda *_, **__: pytest.fail("it was measured"))
    assert measure.main([]) == 2
    assert "not JSON" in capsys.readouterr().err
