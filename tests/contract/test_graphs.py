"""torch.compile makes one graph of an op for all lengths of a sequence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Graphs for five lengths, where they are more than one
MORE = {
    "cross_entropy": 2,  # few rows are launched in another way
    "cross_entropy of a slice": 2,
    "softmax over the length": 5,  # the length of a row is a constant of the kernel
    "cumsum": 2,  # few rows take longer blocks
}


@pytest.mark.anywhere
def test_one_graph_for_all_lengths() -> None:
    """A launcher that makes a constant of a length, as by int(), would have a graph for each."""
    command = [sys.executable, str(Path(__file__).with_name("graphs.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) > 15
    assert counts == dict.fromkeys(counts, 1) | MORE
