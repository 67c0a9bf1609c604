"""What executes recipes on this machine.

Run as a script it prints, as JSON, one `Slot` for each GPU that PyTorch sees, or one for the CPU. `detect` asks in a
process of its own, so that the build itself never imports torch nor holds a GPU. `together` takes several GPUs as one.
"""

import ctypes
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.version import Version

INTERPRETER = "Triton's interpreter on CPU"
MOST = 8  # GPUs of one host that execute a recipe together
SUPPORTED = {"Triton": ((3, 6), (3, 9)), "PyTorch": ((2, 11), (2, 15))}  # the oldest and the newest that is tried


class NoEnvironmentError(RuntimeError):
    """Nothing here executes recipes; the message says why."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device and the software that drives it.

    Attributes:
        name: the GPU's name as its driver gives it, or `INTERPRETER`.
        capability: the compute capability, "9.0" for instance; None without a GPU.
        memory: bytes of GPU memory; None without a GPU.
        driver: the driver's version; None without a GPU, or if nvidia-smi does not tell.
        cuda: the CUDA version that torch was built for; None without a GPU.
        gpus: how many such GPUs of one host execute a recipe together; `name` then tells it, too.
        links: what connects them, as nvidia-smi calls it: "NV18"; None for one, or if it does not tell.
    """

    name: str
    capability: str | None
    memory: int | None
    driver: str | None
    cuda: str | None
    torch: str
    triton: str
    python: str
    gpus: int = 1
    links: str | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU executes here, rather than the interpreter."""
        return self.capability is not None and self.memory is not None


class Slot(NamedTuple):
    """A GPU, or the CPU, which executes recipes.

    Attributes:
        environment: what it is and the software that drives it; equal GPUs have equal environments.
        visible: what `CUDA_VISIBLE_DEVICES` says to choose this GPU; None if that variable is left as it is.
    """

    environment: Environment
    visible: str | None


def detect() -> list[Slot]:
    """Return the slots of this machine: one for each GPU, or one for the CPU.

    Raises:
        NoEnvironmentError: if torch or triton is not here or too old or, where there may be a GPU, torch cannot be
            imported.
    """
    probe = subprocess.run([sys.executable, "-P", __file__], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        raise NoEnvironmentError(
            f"cannot tell what executes here; torch and triton must be importable:\n{probe.stderr}"
        )
    slots = msgspec.json.decode(probe.stdout, type=list[Slot])
    if reason := too_old(slots[0].environment, version("numpy")):
        raise NoEnvironmentError(reason)
    return slots


def together(slots: Sequence[Slot]) -> Slot | None:
    """Return GPUs of this machine as one slot: as many equal ones as a power of two has; None if there are no two."""
    names = [slot.visible for slot in slots if slot.environment == slots[0].environment and slot.visible is not None]
    if len(names) < 2:
        return None
    names = names[: 1 << min(len(names), MOST).bit_length() - 1]
    one = slots[0].environment
    name = f"{len(names)} x {one.name}"
    several = msgspec.structs.replace(one, name=name, gpus=len(names), links=_links(names))
    return Slot(several, ",".join(names))


def _links(names: Sequence[str]) -> str | None:
    """Return what connects GPUs, given what `CUDA_VISIBLE_DEVICES` calls them."""
    try:
        printed = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return links(printed, names)


def links(printed: str, names: Sequence[str]) -> str | None:
    """Return what `nvidia-smi topo -m` printed of GPUs: each kind of connection once; None if it is not understood."""
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", printed).splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 2 and re.fullmatch(r"GPU\d+", line[0])}
    rows = {gpu: row for gpu, row in rows.items() if "X" in row}  # the first line has the names of the columns
    chosen = [f"GPU{name}" for name in names]
    if not {*chosen} <= rows.keys():  # they may be named by identifiers
        chosen = [*rows]
    columns = [*rows]
    found = {rows[a][columns.index(b)] for a in chosen for b in chosen if a != b and len(rows[a]) >= len(columns)}
    return ", ".join(sorted(found)) or None


def too_old(environment: Environment, numpy: str) -> str | None:
    """Say in a line why recipes cannot be executed with these versions; None if they can."""
    here = {"Triton": environment.triton, "PyTorch": environment.torch}
    for name, (oldest, _) in SUPPORTED.items():
        if _release(here[name]) < oldest:
            return f"{name} {here[name]} is too old: {_range()}"
    if environment.is_gpu:
        return None
    if _release(environment.torch) == (2, 11):
        return f"PyTorch {environment.torch} does not run these kernels without a GPU: {_range()}"
    if _release(environment.triton) == (3, 6) and _release(numpy) >= (2, 4):
        return f"without a GPU, Triton 3.6 needs numpy below 2.4 (here is {numpy}): {_range()}"
    return None


def too_new(environment: Environment) -> str | None:
    """Say in a line which version is newer than any that was tried; None if there is none."""
    here = {"Triton": environment.triton, "PyTorch": environment.torch}
    names = [f"{name} {here[name]}" for name, (_, newest) in SUPPORTED.items() if _release(here[name]) > newest]
    return f"not tried with {' and '.join(names)}: {_range()}" if names else None


def _release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return Version(text).release[:2]


def _range() -> str:
    texts = [f"{name} {a[0]}.{a[1]} to {b[0]}.{b[1]}" for name, (a, b) in SUPPORTED.items()]
    return f"the gallery runs on {' and '.join(texts)}, see docs/versions.md"


def _probe() -> list[Slot]:
    torch_version, sees_no_gpu = _torch()
    cpu = Environment(
        name=INTERPRETER,
        capability=None,
        memory=None,
        driver=None,
        cuda=None,
        torch=torch_version,
        triton=version("triton"),
        python=platform.python_version(),
    )
    if sees_no_gpu:
        return [Slot(cpu, None)]
    import torch

    if not torch.cuda.is_available():
        return [Slot(cpu, None)]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else list(map(str, range(torch.cuda.device_count())))
    driver = _driver()
    slots = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        environment = msgspec.structs.replace(
            cpu,
            name=gpu.name,
            capability=f"{gpu.major}.{gpu.minor}",
            memory=gpu.total_memory,
            driver=driver,
            cuda=torch.version.cuda,
        )
        slots.append(Slot(environment, names[index]))
    return slots


def _torch() -> tuple[str, bool]:
    """Return the version of torch and whether it can see no GPU for certain, so that it need not be asked.

    Importing torch takes a second and more; the version stands in a file of its own.
    """
    spec = find_spec("torch")
    file = Path(spec.origin or "").with_name("version.py") if spec else None
    if file is None or not file.is_file():
        import torch

        return str(torch.__version__), False
    variables = runpy.run_path(str(file))
    return str(variables["__version__"]), os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not (
        variables.get("hip") or _has_cuda_driver()
    )


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    print(msgspec.json.encode(_probe()).decode())
