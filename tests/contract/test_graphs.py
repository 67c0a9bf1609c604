"""torch.compile makes one graph of an op for all lengths of a sequence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Graphs for five lengths, where they are more than one. Launch constants that depend on a length are guards of a graph.
MORE = {
    # The mean of up to 1024 losses is by 4 warps in blocks of 1024, that of more by 32 in blocks of 8192. With either
    # alone there is one graph. On a GPU, the warps of the forward also depend on the number of rows.
    "cross_entropy": 2,
    "cross_entropy of a slice": 2,
    # The length of a row is a constant: the next power of two, the rest past half of it, warps, and how many elements
    # are loaded at once follow from it. Without the constant, each power of two would still have a graph.
    "softmax over the length": 5,
    # Below 2048 rows, blocks are four times as long and have twice the warps. With either alone there is one graph.
    "cumsum": 2,
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
