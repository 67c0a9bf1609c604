"""How the processes that test on a GPU share its memory, so that none starves another.

A third of it is theirs in equal parts. The rest belongs to the tests that say how much they need, which run one at a
time: `@pytest.mark.needs_gpu_memory(gigabytes)`.
"""

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

PROCESSES = 1 / 3  # of the GPU's memory
LARGE_TEST = 1 - PROCESSES
EACH = 4e9  # bytes with which a process runs every test that does not say how much it needs, its CUDA context included


def processes(total: int) -> int:
    """Return how many processes a GPU with so many bytes has room for."""
    return max(1, min(8, int(PROCESSES * total / EACH)))


def require(gigabytes: float) -> None:
    """Skip the test if it cannot have as much."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: make test-gpu")
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e9
    if gigabytes > LARGE_TEST * total:
        pytest.skip(f"needs {gigabytes} GB, and can have {LARGE_TEST * total:.1f} of this GPU's {total:.1f} GB")


@contextmanager
def limit(large: bool) -> Iterator[None]:
    """Limit this process to its part; for a large test, wait for the others' and give back what it took."""
    if not torch.cuda.is_available():
        yield
    elif not large:
        torch.cuda.set_per_process_memory_fraction(PROCESSES / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
        yield
    else:
        with open(Path(tempfile.gettempdir(), f"triton-gallery-{os.getuid()}.lock"), "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            torch.cuda.set_per_process_memory_fraction(LARGE_TEST)
            yield
            gc.collect()  # a graph of autograd may hold itself, and its tensors
            torch.cuda.empty_cache()
