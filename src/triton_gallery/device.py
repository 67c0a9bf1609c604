"""What executes recipes on this machine.

Run as a script it prints, as JSON, one `Environment` for each GPU that PyTorch sees, or one for the CPU. `detect` asks
in a process of its own, so that the build itself never imports torch nor holds a GPU.
"""

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version

INTERPRETER = "Triton's interpreter on CPU"


@dataclass(frozen=True)
class Environment:
    """A device and the software that drives it.

    Attributes:
        name: the GPU's name as its driver gives it, or `INTERPRETER`.
        uuid: the GPU's identifier as `CUDA_VISIBLE_DEVICES` takes it; None without a GPU.
        capability: the compute capability, "9.0" for instance; None without a GPU.
        memory: bytes of GPU memory; None without a GPU.
        driver: the driver's version; None without a GPU.
        cuda: the CUDA version that torch was built for; None without a GPU.
    """

    name: str
    uuid: str | None
    capability: str | None
    memory: int | None
    driver: str | None
    cuda: str | None
    torch: str
    triton: str
    python: str

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU executes here, rather than the interpreter."""
        return self.uuid is not None

    @property
    def kind(self) -> dict[str, str | int | None]:
        """All of it but which GPU of several equal ones: two runs of one kind need not be repeated."""
        return {key: value for key, value in asdict(self).items() if key != "uuid"}


def detect() -> list[Environment]:
    """Return the environments of this machine: one for each GPU, or one for the CPU.

    Raises:
        RuntimeError: if torch or triton cannot be imported; with the reason.
    """
    probe = subprocess.run([sys.executable, "-P", __file__], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        raise RuntimeError(f"cannot tell what executes here; torch and triton must be importable:\n{probe.stderr}")
    return [Environment(**entry) for entry in json.loads(probe.stdout)]


def _probe() -> list[Environment]:
    import torch

    cpu = Environment(
        name=INTERPRETER,
        uuid=None,
        capability=None,
        memory=None,
        driver=None,
        cuda=None,
        torch=torch.__version__,
        triton=version("triton"),
        python=platform.python_version(),
    )
    if not torch.cuda.is_available():
        return [cpu]
    environments = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{gpu.uuid}"
        driver = subprocess.run(
            ["nvidia-smi", f"--id={uuid}", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        environments.append(
            replace(
                cpu,
                name=gpu.name,
                uuid=uuid,
                capability=f"{gpu.major}.{gpu.minor}",
                memory=gpu.total_memory,
                driver=driver,
                cuda=torch.version.cuda,
            )
        )
    return environments


if __name__ == "__main__":
    print(json.dumps([asdict(environment) for environment in _probe()]))
