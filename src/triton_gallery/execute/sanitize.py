"""Runs the checks of recipes under NVIDIA's compute-sanitizer.

A recipe is imported, so that its checks run and its benchmark does not; children that it starts are left out. PyTorch's
caching allocator is switched off, because it hides overruns within its blocks.
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


def sanitize(scripts: Sequence[Path], tools: Sequence[str]) -> list[Verdict]:
    """Import each script under each tool, several at a time.

    Raises:
        FileNotFoundError: if compute-sanitizer is not on the PATH.
    """
    if not shutil.which(SANITIZER):
        raise FileNotFoundError(f"{SANITIZER} is not on the PATH; it comes with the CUDA toolkit")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_check, *zip(*((script, tool) for script in scripts for tool in tools), strict=True)))


def _check(script: Path, tool: str) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="triton-gallery-", ignore_cleanup_errors=True) as folder:
        command = [SANITIZER, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
        command += [sys.executable, "-c", f"import {script.stem}"]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(script.parent.resolve())}
        environment["PYTHONPATH"] += f"{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        try:
            run = subprocess.run(
                command, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return Verdict(script, tool, "failed", f"stopped after {LIMIT} s")
        report = run.stdout.decode(errors="replace").strip().splitlines()[-TAIL:]
        outcome = {0: "clean", FOUND: "found"}.get(run.returncode, "failed")
        return Verdict(script, tool, outcome, "\n".join(report))
