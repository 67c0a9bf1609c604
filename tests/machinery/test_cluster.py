"""Recipes on the workers of a Dask cluster, or on GPUs of one machine: what each fault costs."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from fake_gpus import Cluster, GpuProject
from msgspec import structs
from project import HANGS, is_alive, wait_until

from triton_gallery.execute.recording import FarmError, kinds
from triton_gallery.recipe.device import Environment, Slot


@pytest.fixture
def pair(make_cluster: Callable[..., Cluster], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Return a cluster of two workers, which have a package that is not here."""
    package = tmp_path_factory.mktemp("packages") / "only_there.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: only-there\nVersion: 1.0\n")
    cluster = make_cluster(PYTHONPATH=str(package.parent))
    cluster.add("0", "1")
    return cluster


NOTE = """
import json, os, time

begin = time.time()
time.sleep(0.5)
print(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], begin, time.time()]))
"""
FIGURE = "import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.title(open('figure.txt').read())"
BLOCK = '# /// script\n# dependencies = ["{}"]\n# ///\n'


def test_recipes_are_recorded(make_gpu_project: Callable[..., GpuProject], pair: Cluster) -> None:
    """Two at a time, each alone on its GPU; a page's files come back; a recipe's fault is its own."""
    faults = {"segfaults": "import ctypes\n\nctypes.string_at(0)", "there": "print('it is there')", "here": "print()"}
    project = make_gpu_project(figure=FIGURE, **{f"note{n}": NOTE for n in range(3)}, **faults)
    things = project.root / "gallery" / "things"
    (things / "figure.txt").write_text("a companion")
    for name, package in {"there": "only-there", "here": "pytest"}.items():
        text = (things / f"{name}.py").read_text()
        (things / f"{name}.py").write_text(BLOCK.format(package) + text)
    processes = [process.pid for process in pair.processes]
    status, output = project.record("--dask", pair.address)
    assert status == 1
    assert "killed by signal 11 (SIGSEGV)" in output.partition("Recipes that failed")[2]
    records = project.recorded()
    assert set(records) == {"figure", "there", "here", *(f"note{n}" for n in range(3))}, output
    assert records["there"]["packages"] == {"only-there": "1.0"}
    (picture,) = records["figure"]["outputs"][0]["figures"]
    assert (project.root / "docs" / "_records" / "test-gpu" / "things" / picture).stat().st_size > 1000
    assert (project.root / "docs" / "recipes" / "things" / "figure.ipynb").is_file()
    notes = [json.loads(records[f"note{n}"]["outputs"][0]["text"]) for n in range(3)]
    for gpu in "01":
        spans = sorted((begin, end) for where, begin, end in notes if where == gpu)
        assert spans, "a GPU was idle"
        assert all(end < begin for (_, end), (begin, _) in pairwise(spans))
    assert all(is_alive(pid) for pid in processes)
    assert not list(pair.folder.glob("**/conf.py"))


@pytest.mark.parametrize("where", ["here", "cluster"])
def test_longest_begins_first(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], where: str
) -> None:
    """What took long before begins first, here and on a cluster, after what is not known."""
    recipes = {f"takes{seconds}": NOTE.replace("0.5", str(seconds)) for seconds in (0, 4, 2)}
    project = make_gpu_project(**recipes, unknown=NOTE)
    status, output = project.record(
        *(f"things/{name}" for name in recipes), TEST_GPU="Test GPU,Test GPU", CUDA_VISIBLE_DEVICES="0,1"
    )
    assert status == 0, output
    if where == "here":
        status, output = project.record("--force")
    else:
        cluster = make_cluster()
        cluster.add("0")
        status, output = project.record("--force", "--dask", cluster.address)
    assert status == 0, output
    begins = {name: json.loads(record["outputs"][0]["text"])[1] for name, record in project.recorded().items()}
    assert sorted(begins, key=begins.get) == ["unknown", "takes4", "takes2", "takes0"]


KILLS_ITS_WORKER = """
import os, subprocess
from pathlib import Path

import psutil

child = subprocess.Popen(["sleep", "1000"])
with open({notes!r}, "a") as notes:
    notes.write(f"{{os.getpid()}} {{child.pid}}\\n")
if len(Path({notes!r}).read_text().splitlines()) <= {times}:
    server, worker = psutil.Process().parents()[1:4:2]
    assert "multiprocessing.forkserver" in " ".join(server.cmdline())
    worker.kill()
    time.sleep(1000)
child.kill()
print("done")
"""


def test_dead_worker_costs_a_retry(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Killed once, a recipe is executed elsewhere; killed twice, it alone is lost. No process stays behind."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    project = make_gpu_project(
        once="import time\n" + KILLS_ITS_WORKER.format(notes=str(once), times=1),
        twice="import time\n" + KILLS_ITS_WORKER.format(notes=str(twice), times=9),
        other="import os\n\nprint(*map(os.environ.get, ['MKL_NUM_THREADS', 'TORCHINDUCTOR_COMPILE_THREADS']))",
        another="print('another')",
    )
    cluster = make_cluster()
    cluster.add("0", "1", options="--nanny")
    status, output = project.record("--dask", cluster.address)
    assert status == 1
    table = output.partition("Recipes that failed")[2]
    assert "2 workers died while they executed it" in " ".join(table.split())
    assert "things/twice" in table
    records = project.recorded()
    assert set(records) == {"once", "other", "another"}, output
    # The worker's nanny would bind the recipe's threads; a pool of compilers would run beside what it measures.
    assert records["other"]["outputs"][0]["text"] == "None 1"
    assert len(once.read_text().splitlines()) == len(twice.read_text().splitlines()) == 2
    pids = [int(pid) for pid in f"{once.read_text()} {twice.read_text()}".split()]
    assert len(pids) == 8
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_restarted_worker_is_another_one(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """A worker with a port of its own has the same address again: Dask would have it execute what killed it."""
    notes = tmp_path / "notes"
    project = make_gpu_project(
        kills="import time\n" + KILLS_ITS_WORKER.format(notes=str(notes), times=9), other="print('other')"
    )
    cluster = make_cluster()
    cluster.add("0", options=f"--nanny --worker-port {free_port()}")
    status, output = project.record("--dask", cluster.address)
    assert status == 1
    assert "2 workers died while they executed it" in " ".join(output.split())
    assert set(project.recorded()) == {"other"}, output
    assert len(notes.read_text().splitlines()) == 2


def free_port() -> int:
    """Return a port of this machine that nobody has."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_broken_connection_is_no_death(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """What was sent is dropped on the worker, and sent again as often as that happens."""
    notes, go = tmp_path / "notes", tmp_path / "go"
    project, cluster = make_gpu_project(waits=NOTES_AND_WAITS.format(notes=str(notes), go=str(go))), make_cluster()
    cluster.add("0")
    with Wire(cluster.address) as wire:
        process = project.start("--dask", wire.address)
        for times in 1, 2, 3:
            wait_until(lambda times=times: notes.exists() and len(notes.read_text().split()) == times)
            if times < 3:
                wire.cut()
        go.touch()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert set(project.recorded()) == {"waits"}


NOTES_AND_WAITS = """
import os, time
from pathlib import Path

with open({notes!r}, "a") as notes:
    notes.write(f"{{os.getpid()}}\\n")
while not Path({go!r}).exists():
    time.sleep(0.1)
"""


class Wire:
    """A way to a scheduler that can be cut; then one connects again."""

    def __init__(self, address: str) -> None:
        """Take the scheduler's address."""
        self._far = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Wire":
        """Let through whoever connects."""
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cut it for good."""
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections."""
        while self._ends:
            with suppress(OSError):
                self._ends.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._far)
                self._ends += [near, far]
                for ends in (near, far), (far, near):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                to.sendall(content)
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)


def test_no_worker_is_left(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    kills = "import time\n" + KILLS_ITS_WORKER.format(notes=str(tmp_path / "notes"), times=9)
    project, cluster = make_gpu_project(kills=kills), make_cluster()
    cluster.add("0")
    project.patience = 2
    status, output = project.record("--dask", cluster.address)
    assert status == 1
    assert "no worker with Test GPU is left" in " ".join(output.split())


SLOW = """
import asyncio


async def dask_setup(worker):
    get_data = worker.handlers["get_data"]

    async def get_data_later(comm, **options):
        await asyncio.sleep(3)
        return await get_data(comm, **options)

    worker.handlers["get_data"] = get_data_later
"""


def test_answer_may_take_long_to_come(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    project, cluster = make_gpu_project(one="print('one')", other="print('other')"), make_cluster()
    cluster.add("0", "1", options=f"--no-nanny --preload {tmp_path / 'slow.py'}")
    status, output = project.record("--dask", cluster.address)
    assert status == 0, output
    assert set(project.recorded()) == {"one", "other"}


@pytest.mark.parametrize(
    ("fault", "patience", "message"),
    [
        (signal.SIGSTOP, 2, "the scheduler does not answer"),
        (signal.SIGKILL, 60, "the connection to the scheduler is lost"),
    ],
)
def test_no_scheduler_is_left(
    make_gpu_project: Callable[..., GpuProject],
    make_cluster: Callable[..., Cluster],
    tmp_path: Path,
    fault: signal.Signals,
    patience: float,
    message: str,
) -> None:
    notes = tmp_path / "notes"
    project, cluster = make_gpu_project(hangs=HANGS.format(notes=str(notes))), make_cluster()
    cluster.add("0")
    project.patience = patience
    process = project.start("--dask", cluster.address)
    wait_until(lambda: notes.exists() and notes.read_text().endswith("\n"), lambda: cluster.log)
    cluster.processes[0].send_signal(fault)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        cluster.processes[0].send_signal(signal.SIGCONT)
    assert process.returncode == 1, output
    assert message in " ".join(output.split())


def test_worker_has_one_gpu(make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster]) -> None:
    project, cluster = make_gpu_project(one="print('one')"), make_cluster()
    cluster.add("0,1", name="Test GPU,Test GPU")
    status, output = project.record("--dask", cluster.address)
    assert status == 2
    assert "sees 2 GPUs; start a worker for each, with CUDA_VISIBLE_DEVICES" in output


@pytest.mark.parametrize(
    ("where", "by"), [("here", signal.SIGKILL), ("cluster", signal.SIGKILL), ("cluster", signal.SIGINT)]
)
def test_ended_command_keeps_what_was_done(
    make_gpu_project: Callable[..., GpuProject], pair: Cluster, tmp_path: Path, where: str, by: signal.Signals
) -> None:
    """Nothing goes on elsewhere, and with --only-stale nothing is executed again."""
    notes = tmp_path / "notes"
    project = make_gpu_project(done="print('done')", hangs=HANGS.format(notes=str(notes)))
    on = ["--dask", pair.address] if where == "cluster" else []
    process = project.start(*on, CUDA_VISIBLE_DEVICES="0,1", TEST_GPU="Test GPU,Test GPU")
    wait_until(lambda: notes.exists() and notes.read_text().endswith("\n") and "done" in project.recorded())
    pids = [int(pid) for pid in notes.read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    process.send_signal(by)
    output, _ = process.communicate(timeout=20)
    if by == signal.SIGINT:
        assert process.returncode == 130
        assert output.rstrip().endswith("stopped")
        assert "Traceback" not in output
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert set(project.recorded()) == {"done"}
    before = project.recorded()["done"]
    project.write(hangs="print('no longer')")
    status, output = project.record(*on, "--only-stale")
    assert status == 0, output
    assert "things/done" not in output
    assert set(project.recorded()) == {"done", "hangs"}
    assert project.recorded()["done"] == before


WAITS = """
import time
from pathlib import Path

Path({began!r}).touch()
while not Path({go!r}).exists():
    time.sleep(0.1)
"""


def test_each_kind_is_recorded(
    make_gpu_project: Callable[..., GpuProject], make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """A kind that joins is not mixed in, then refused, then recorded as well; what is stale is looked up for each."""
    began, go = tmp_path / "began", tmp_path / "go"
    waits = WAITS.format(began=str(began), go=str(go))
    project = make_gpu_project(one=waits, other=waits)
    cluster = make_cluster()
    cluster.add("0")
    process = project.start("--dask", cluster.address)
    wait_until(began.exists, lambda: cluster.log)
    cluster.add("0", name="Other GPU")
    cluster.add("0,1", name="Test GPU,Test GPU")
    time.sleep(3)  # in which a new worker could take the other recipe
    go.touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    for reason in ("has another GPU, driver or version than", "sees 2 GPUs; start a worker for each"):
        (line,) = (line for line in output.splitlines() if reason in line)
        assert line.endswith("; it is not used")
    assert set(project.recorded("test-gpu")) == {"one", "other"}
    assert not project.recorded("other-gpu")
    cluster.processes.pop().terminate()
    wait_until(lambda: "Remove worker" in cluster.log)
    status, output = project.record("--dask", cluster.address)
    assert status == 2
    assert "unlike GPUs: " in output
    assert not project.recorded("other-gpu")
    status, output = project.record("--dask", cluster.address, "--per-gpu-model", "--only-stale", "things/one")
    assert status == 0, output
    assert re.findall(r"things/one +(\w+) GPU .* passed", output) == ["Other"]
    assert set(project.recorded("other-gpu")) == {"one"}


def test_each_kind_here_is_recorded(make_gpu_project: Callable[..., GpuProject]) -> None:
    project = make_gpu_project(one="print('one')")
    gpus = {"TEST_GPU": "Test GPU,Other GPU", "CUDA_VISIBLE_DEVICES": "0,1"}
    status, output = project.record(**gpus)
    assert status == 2
    assert "unlike GPUs: Test GPU, Other GPU" in output
    status, output = project.record("--per-gpu-model", **gpus)
    assert status == 0, output
    assert set(project.recorded("test-gpu")) == set(project.recorded("other-gpu")) == {"one"}


def test_what_is_missing_is_told(make_gpu_project: Callable[..., GpuProject]) -> None:
    project = make_gpu_project(one="print('one')")
    path = project.root / "gallery" / "things" / "one.py"
    path.write_text(BLOCK.format("no-such-package[extra]") + path.read_text())
    status, output = project.record()
    assert status == 1
    assert "was not recorded, its environment lacks no-such-package[extra]" in output


def test_torch_may_be_missing(make_gpu_project: Callable[..., GpuProject]) -> None:
    project = make_gpu_project(one="print('one')")
    device = project.root / "src" / "triton_gallery" / "recipe" / "device.py"
    device.write_text(device.read_text().replace("    gpus = zip", "    import no_torch\n\n    gpus = zip"))
    status, output = project.record()
    assert status == 2
    assert "torch and triton must be importable" in output


def test_drivers_of_a_kind_are_alike() -> None:
    """Records of one folder are of one kind of environment."""
    gpu = Environment("Test GPU", "9.0", 1, "570", "13.0", "2", "3", "3.12")
    alike = [Slot(gpu, "0"), Slot(gpu, "1")]
    assert kinds(alike, per_gpu_model=False) == [alike]
    with pytest.raises(FarmError, match="Test GPU are unlike: driver 570 and 580;"):
        kinds([alike[0], Slot(structs.replace(gpu, driver="580"), "1")], per_gpu_model=True)
