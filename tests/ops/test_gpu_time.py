"""What the recipes time with, as it stands in a whole script: `gpu_time` and `rate_table`."""

import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")


@pytest.fixture
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return a recipe that times."""
    return load_recipe("first_steps/vector_add.py")


class Clock:
    """A GPU's clock that is not there: each event is a millisecond later than the one before, in turn with waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
        """Take the milliseconds of each call; where they are negative, the GPU waited for the CPU."""
        self.waits = waits
        self.recorded = 0
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.number, clock.recorded = clock.recorded, clock.recorded + 1

            def query(self) -> bool:
                return clock.waits[self.number // 2] < 0

            def elapsed_time(self, end: "Event") -> float:
                assert end.number == self.number + 1
                return abs(clock.waits[self.number // 2])

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU of its own")
def test_quantiles_and_lateness(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 10
    warm = [1e6] * 5
    late = [-1.0] * 3 + [1.0] * 7
    waits = [[*warm, *range(1, 11)], [*warm, *late]]
    Clock(monkeypatch, [wait for turn in zip(*waits, strict=True) for wait in turn])
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(1))
    calls = {"one": lambda: None, "other": lambda: time.sleep(0.001)}
    times = recipe.gpu_time(calls, turns=turns)
    median, low, high, cpu, waited = times["one"]
    assert (median, low, high, waited) == (6, 3, 9, False)
    assert cpu < 500
    assert times["other"][3] > 1000
    assert times["other"][4], "three of ten turns were late"


def test_rates_of_times(recipe: ModuleType) -> None:
    times = {2: {"Triton": (2.0, 1.0, 4.0, 60.0, False)}, 4: {"Triton": (4.0, 4.0, 4.0, 61.0, True)}}
    frame = recipe.rate_table(times, "N", "GB/s", lambda N: 8 * N)
    assert list(frame.columns) == ["N", "series", "GB/s", "low", "high", "CPU us", "late"]
    assert frame.values.tolist() == [[2, "Triton", 8.0, 4.0, 16.0, 60.0, False], [4, "Triton", 8, 8, 8, 61.0, True]]


@on_gpu
def test_launch_is_hidden(recipe: ModuleType) -> None:
    """What the CPU does before a launch is no part of the GPU's time, unless it outlasts the GPU's sleep."""
    x = torch.rand(2**10, device="cuda")

    def slow(seconds: float) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            return x + x

        return call

    times = recipe.gpu_time({"at once": slow(0), "half a millisecond": slow(5e-4), "four": slow(4e-3)})
    (quick, *_, early), (hidden, *_, cpu, also_early), (_, *_, late) = times.values()
    assert (early, also_early, late) == (False, False, True)
    assert cpu > 500
    assert hidden < 2 * quick < 0.1


@on_gpu
def test_agrees_with_do_bench_where_the_call_is_long(recipe: ModuleType) -> None:
    import triton.testing

    x = torch.rand(2**27, device="cuda")
    out = torch.empty_like(x)
    median = recipe.gpu_time({"copy": lambda: out.copy_(x)})["copy"][0]
    assert median == pytest.approx(triton.testing.do_bench(lambda: out.copy_(x), return_mode="median"), rel=0.03)
