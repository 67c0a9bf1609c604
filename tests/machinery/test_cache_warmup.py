"""The caches are warmed up before recipes are timed: how, and what that leaves behind.

The GPUs are not there; `fake_gpus.py` says how.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gpus import GpuProject
from msgspec import structs
from project import HANGS, is_alive, wait_until

from triton_gallery.execute.cache_warmup import LASTING, places
from triton_gallery.recipe.device import Environment, Slot

GPU = Environment("Test GPU", "9.0", 80_000_000_000, None, "13.0", "2", "3", "3.12")
NOTES = """
import json, os, time
from pathlib import Path

began, cache = time.time(), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
time.sleep(1)
there = []
if cache:
    folder = Path(cache, "ab")
    there = sorted(path.name for path in folder.glob("*"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.py").touch()
    (folder / "kernel.best_config").touch()
with open({notes!r}, "a") as notes:
    notes.write(json.dumps([began, time.time(), cache, there]) + "\\n")
"""
BEGINS = "from pathlib import Path\n\nwith open({notes!r}, 'a') as notes:\n    notes.write('.')\n"


@pytest.fixture(autouse=True)
def no_lasting_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as a user does: Inductor, in a test before, may have set a variable of its own."""
    for name in LASTING:
        monkeypatch.delenv(name, raising=False)


def read(notes: Path) -> list[list]:
    """Return what the runs of a recipe noted, in their order."""
    return [json.loads(line) for line in notes.read_text().splitlines()]


def most_at_once(spans: list[list]) -> int:
    """Return how many of these runs there were at once."""
    return max(sum(other[0] <= span[0] < other[1] for other in spans) for span in spans)


@pytest.mark.parametrize(
    ("gpus", "memory", "cores", "tasks", "crowd"),
    [
        (1, 80e9, 16, 20, "000000"),
        (1, 80e9, 4, 20, "0000"),
        (1, 80e9, 16, 2, "00"),
        (1, 80e9, 16, 1, ""),
        (1, 80e9, 1, 20, ""),
        (1, 23.9e9, 16, 20, ""),
        (2, 80e9, 5, 20, "01010"),
        (2, 80e9, 16, 3, "010"),
        (2, 80e9, 16, 2, ""),
        (2, 12.9e9, 16, 20, ""),
    ],
)
def test_as_many_at_a_time_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, gpus: int, memory: float, cores: int, tasks: int, crowd: str
) -> None:
    """Of cores, and of GPU memory; if that is no more than what runs timed, there is no warm-up."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    slots = [Slot(structs.replace(GPU, memory=int(memory)), str(number)) for number in range(gpus)]
    assert "".join(place.visible for place in places(slots, tasks)) == crowd


def test_no_warm_up_where_tuning_would_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    assert len(places([Slot(GPU, "0")], 4)) == 4
    assert not places([Slot(structs.replace(GPU, memory=None), None)], 4), "there is no GPU"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_AUTOTUNING"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert not places([Slot(GPU, "0")], 4)


def test_warm_up_ends_before_the_first_timed_run(make_gpu_project: Callable[..., GpuProject], tmp_path: Path) -> None:
    """A recipe finds what it compiled then, and not what it tuned; at the end nothing is left of it."""
    notes = {name: tmp_path / name for name in ("one", "other", "another")}
    project = make_gpu_project(**{name: NOTES.format(notes=str(path)) for name, path in notes.items()})
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    status, output = project.record(TEST_MEMORY="25e9", TMPDIR=str(temporary))
    assert status == 0, output
    assert "warming up the caches with 3 recipes, 2 at a time" in output
    assert "warmed up in " in output
    assert set(project.recorded()) == set(notes)
    warm_up, timed = zip(*(read(path) for path in notes.values()), strict=True)
    assert most_at_once(warm_up) == 2
    assert most_at_once(timed) == 1
    assert max(run[1] for run in warm_up) < min(run[0] for run in timed)
    caches = [run[2] for run in warm_up]
    assert caches == [run[2] for run in timed]
    assert len({*caches}) == 3
    assert all(cache.startswith(str(temporary)) for cache in caches)
    assert [run[3] for run in warm_up] == [[]] * 3
    assert [run[3] for run in timed] == [["kernel.py"]] * 3
    assert not list(temporary.iterdir())


def test_one_recipe_needs_no_warm_up(make_gpu_project: Callable[..., GpuProject], tmp_path: Path) -> None:
    """Nor are those of which a run is kept."""
    notes, built = tmp_path / "one", tmp_path / "built"
    project = make_gpu_project(one=NOTES.format(notes=str(notes)), built=BEGINS.format(notes=str(built)))
    variables = {"TEST_MEMORY": "25e9"}
    status, output = project.record("things/built", **variables)
    assert status == 0, output
    status, output = project.record(**variables)
    assert status == 0, output
    assert set(project.recorded()) == {"one", "built"}
    assert "warm" not in output
    ((_, _, cache, _),) = read(notes)
    assert cache is None
    assert built.read_text() == "."


def test_failure_counts_in_the_timed_run_alone(make_gpu_project: Callable[..., GpuProject], tmp_path: Path) -> None:
    always, once = tmp_path / "always", tmp_path / "once"
    failing = BEGINS + "raise ValueError('run', Path({notes!r}).read_text())\n"
    mended = BEGINS + "if Path({notes!r}).read_text() == '.':\n    raise ValueError\n"
    project = make_gpu_project(always=failing.format(notes=str(always)), once=mended.format(notes=str(once)))
    status, output = project.run("html", TEST_MEMORY="25e9")
    assert status == 1
    assert always.read_text() == once.read_text() == ".."
    lines = [line.split() for line in output.splitlines() if line.startswith("  things/")]
    assert sorted((line[0], " ".join(line[5:])) for line in lines) == [
        ("things/always", "raised ValueError: ('run', '..')"),
        ("things/once", "passed"),
    ]
    assert "('run', '.')" not in output


def test_gpu_sleeps_in_the_timed_run_alone(make_gpu_project: Callable[..., GpuProject], tmp_path: Path) -> None:
    """Beside others, each would wait for the sleep of all."""
    notes = {name: tmp_path / name for name in ("one", "other")}
    tells = "import torch\n\nwith open({notes!r}, 'a') as notes:\n    print(torch.cuda._sleep.__module__, file=notes)\n"
    project = make_gpu_project(**{name: tells.format(notes=str(path)) for name, path in notes.items()})
    status, output = project.record(TEST_MEMORY="25e9")
    assert status == 0, output
    assert {path.read_text() for path in notes.values()} == {"triton_gallery.execute.recipe_process\ntorch.cuda\n"}


def test_stop_ends_a_warm_up(make_gpu_project: Callable[..., GpuProject], tmp_path: Path) -> None:
    """Nothing goes on, nothing begins, and nothing is left."""
    notes, waits = {name: tmp_path / name for name in ("one", "other")}, tmp_path / "waits"
    hangs = {name: HANGS.format(notes=str(path)) for name, path in notes.items()}
    project = make_gpu_project(**hangs, waits=BEGINS.format(notes=str(waits)))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = project.start(TEST_MEMORY="25e9", TMPDIR=str(temporary))
    wait_until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in notes.values()))
    pids = [int(pid) for path in notes.values() for pid in path.read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "warming up the caches with 3 recipes, 2 at a time" in output
    assert "warmed up" not in output
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert not waits.exists()
    assert not project.recorded()
    assert not list(temporary.iterdir())
