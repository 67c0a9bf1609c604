"""The cases of other projects' tests: the guide lists what no op takes, and a few of them run."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from project import ROOT

PEERS = ROOT / "tests" / "peers"
REASONS = tomllib.loads((PEERS / "not_taken.toml").read_text())


def test_guide_lists_what_is_not_taken() -> None:
    """The first column of its first table is the list of reasons, in its order."""
    table, *_ = (ROOT / "docs" / "guide" / "options.md").read_text().split("\n## ")
    rows = re.findall(r"(?m)^\| (.*?) \|", table)
    assert rows[2:] == list(REASONS.values())


def test_each_reason_is_used() -> None:
    suite = "\n".join(path.read_text() for path in PEERS.glob("test_*.py"))
    names = set(re.findall(r'"(\w+)"', suite))
    assert set(re.findall(r'not_taken\("(\w+)"\)', suite)) <= REASONS.keys() <= names


@pytest.mark.anywhere
def test_a_few_cases() -> None:
    """Of one peer, in a process of its own: the suite sets how many cases run, and counts them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/peers/test_liger_activations.py"]
    environment = {**os.environ, "PEERS_SHARE": "0.01"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    counts = re.search(r"(?m)^liger: (\d+) passed", run.stdout)
    assert counts
    assert int(counts[1]) >= 5
