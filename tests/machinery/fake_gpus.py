"""A project that records on GPUs which are not there, here or on the workers of a Dask cluster.

The clusters are real, of scheduler and worker processes on this machine; the GPUs are not. So the project's copy of
`device.py` takes the GPU from a variable of the worker. What else there is of the project on a worker has travelled
there: workers start in an empty folder and do not know the project.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from project import ROOT, Project, wait_until

FAKE_GPU = """
def _probe() -> list[Slot]:
    gpus = zip(*(os.environ[name].split(",") for name in ("TEST_GPU", "CUDA_VISIBLE_DEVICES")))
    rest = "9.0", int(float(os.environ["TEST_MEMORY"])), None, None, "2.11", "3.6", platform.python_version()
    return [Slot(Environment(name, *rest), gpu) for name, gpu in gpus]


if __name__"""
LOOPBACK = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]


class GpuProject(Project):
    """A project that takes its GPUs from variables, has three cores whatever there are, and waits for less long."""

    patience = 60.0

    def fake_gpus(self) -> None:
        """Have a copy of the source, which takes the GPUs from the variables."""
        source = self.root / "src" / "triton_gallery"
        source.unlink()
        shutil.copytree(ROOT / "src" / "triton_gallery", source, ignore=shutil.ignore_patterns("__pycache__"))
        device = source / "recipe" / "device.py"
        device.write_text(device.read_text().replace("\nif __name__", FAKE_GPU))

    @property
    def code(self) -> str:
        """The project's command."""
        seconds = f"cluster.CONNECTING, cluster.PATIENCE = 4, {self.patience}"
        cores = "import os; os.sched_getaffinity = lambda process: range(3)"
        return f"{cores}; from triton_gallery.execute.dask import cluster; {seconds}; {super().code}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it needs."""
        gpu = {"TEST_GPU": "Test GPU", "TEST_MEMORY": "1", "CUDA_VISIBLE_DEVICES": "0"}
        return {**super().environment, "PYTHONPATH": str(self.root / "src"), **gpu}

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        """Begin to record."""
        return subprocess.Popen(
            [sys.executable, "-c", self.code, "record", *arguments],
            cwd=self.root,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def record(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Record; return the exit status and what the terminal showed."""
        return self.run("record", *arguments, **variables)

    def recorded(self, device: str = "test-gpu") -> dict[str, dict]:
        """Return the records by the recipes' names."""
        files = (self.root / "docs" / "_records" / device / "things").glob("*.json")
        return {path.stem: json.loads(path.read_text()) for path in files}


class Cluster:
    """A scheduler and its workers."""

    def __init__(self, folder: Path, protocol: str = "tcp", **variables: str) -> None:
        """Start the scheduler."""
        self.folder = folder
        self.environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TEST_MEMORY": "1", **variables}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("scheduler", "--protocol", protocol, "--port", "0")
        wait_until(lambda: "Scheduler at:" in self.log, lambda: self.log)
        self.address = self.log.split("Scheduler at:")[1].split()[0]

    @property
    def log(self) -> str:
        """What its processes wrote."""
        return (self.folder / "log").read_text()

    def add(self, *gpus: str, name: str = "Test GPU", options: str = "--no-nanny", **variables: str) -> None:
        """Start workers, one for each value of CUDA_VISIBLE_DEVICES, and wait for them."""
        count = self.log.count("Register worker") + len(gpus)
        for gpu in gpus:
            variables |= {"TEST_GPU": name, "CUDA_VISIBLE_DEVICES": gpu}
            self._start("worker", self.address, "--resources", "GPU=1", *options.split(), **variables)
        wait_until(lambda: self.log.count("Register worker") == count, lambda: self.log)

    def end(self) -> None:
        """End all processes, the scheduler last."""
        scheduler, *workers = self.processes
        for process in workers:
            process.terminate()
        for process in [*workers, scheduler]:
            process.terminate()
            process.wait(20)

    def _start(self, *arguments: str, **variables: str) -> None:
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dask", *arguments, *LOOPBACK],
                cwd=self.folder,
                env={**self.environment, **variables},
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
