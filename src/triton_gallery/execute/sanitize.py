"""Runs the checks of recipes under NVIDIA's compute-sanitizer.

A recipe is imported, so that its checks run and its benchmark does not; children that it starts are left out. PyTorch's
caching allocator is switched off, because it hides overruns within its blocks. A recipe for several GPUs runs on a
process for each, all of them watched.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT

from triton_gallery.execute.recipe_process import of_rank
from triton_gallery.execute.supervisor import of_ranks

SANITIZER = "compute-sanitizer"
FOUND = 99  # the exit status that the sanitizer is asked for when it finds something
TAIL = 30
AT_ONCE = 4  # processes that share a GPU; nothing is timed here
LIMIT = 580


@dataclass(frozen=True)
class Verdict:
    """What one tool said of one script.

    Attributes:
        script: the file.
        tool: memcheck, racecheck or initcheck.
        outcome: "clean", "found" if the tool found something, or "failed" if the script did not end well by itself.
        report: the last lines of the output.
    """

    script: Path
    tool: str
    outcome: str
    report: str


def sanitize(scripts: Sequence[Path], tools: Sequence[str], ranks: int = 1) -> list[Verdict]:
    """Import each script under each tool, several at a time, on as many processes as `ranks`.

    Raises:
        FileNotFoundError: if compute-sanitizer is not on the PATH.
    """
    if not shutil.which(SANITIZER):
        raise FileNotFoundError(f"{SANITIZER} is not on the PATH; it comes with the CUDA toolkit")
    pairs = [(script, tool) for script in scripts for tool in tools]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda pair: _check(pair[0], pair[1], ranks), pairs))


def _check(script: Path, tool: str, ranks: int) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="triton-gallery-", ignore_cleanup_errors=True) as folder:
        command = [SANITIZER, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
        command += [sys.executable, "-c", f"import {script.stem}"]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(script.parent.resolve())}
        environment["PYTHONPATH"] += f"{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        if ranks > 1:
            environment |= of_ranks(ranks)

        def run(rank: int) -> tuple[int, str]:
            """Return the exit status, -1 if it was stopped, and the last lines of the output."""
            own = environment | (of_rank(rank) if ranks > 1 else {})
            try:
                ended = subprocess.run(
                    command, cwd=folder, env=own, stdout=PIPE, stderr=STDOUT, timeout=LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                return -1, f"stopped after {LIMIT} s"
            return ended.returncode, "\n".join(ended.stdout.decode(errors="replace").strip().splitlines()[-TAIL:])

        with ThreadPoolExecutor(ranks) as pool:
            runs = list(pool.map(run, range(ranks)))
    # What was found counts more than the failure of another rank that waited for this one.
    worst = next((run for run in runs if run[0] == FOUND), next((run for run in runs if run[0] != 0), runs[0]))
    outcome = {0: "clean", FOUND: "found"}.get(worst[0], "failed")
    return Verdict(script, tool, outcome, worst[1])
