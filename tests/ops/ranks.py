"""Starts a script in several ranks, as `torchrun` does."""

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


def run_ranks(script: Path, ranks: int, *arguments: str, variables: dict[str, str] = WITHOUT_GPUS) -> str:
    """Return what a script printed in all ranks; without GPUs, unless environment variables are given."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command, environment = [*launch, str(script), *arguments], {**os.environ, **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
