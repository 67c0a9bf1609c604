"""How tests share a GPU's memory, on GPUs that are not there."""

import ast
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from memory import EACH, LARGE_TEST, PROCESSES, processes
from project import ROOT

# A plugin: a GPU, and a memory that tests occupy together, one line for each call, in a file.
GPU = """
import ast
import os
import types

import torch

total = float(os.environ["GPU_MEMORY"])
part = 1.0


def log(*said):
    with open(os.environ["LOG"], "a") as file:
        file.write(" ".join(map(str, (os.getpid(), *said))) + "\\n")


def limit(fraction):
    global part
    part = fraction
    log("part", fraction)


torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(total_memory=total)
torch.cuda.empty_cache = lambda: log("empty")
torch.cuda.set_per_process_memory_fraction = limit
"""
TESTS = """
import time

import gpu
import pytest

NAME = "test_{name}"


@pytest.mark.needs_gpu_memory(10)
@pytest.mark.parametrize("gigabytes", [10, pytest.param(30, marks=pytest.mark.needs_gpu_memory(30))])
def test_large(gigabytes):
    assert gigabytes * 1e9 <= gpu.part * gpu.total
    gpu.log("begin", gigabytes, NAME)
    time.sleep(0.1)
    gpu.log("end", gigabytes, NAME)


@pytest.mark.parametrize("index", range(4))
def test_ordinary(index):
    gpu.log("ordinary", gpu.part)
"""


def run(folder: Path, gigabytes: float, *options: str) -> tuple[str, list[list[str]]]:
    """Run three files of tests on such a GPU; return what pytest printed, and the log."""
    tests = folder / "tests"
    (tests / "ops").mkdir(parents=True)
    for path in ("conftest.py", "ops/conftest.py"):
        shutil.copy(ROOT / "tests" / path, tests / path)
    (folder / "gpu.py").write_text(GPU)
    for name in "abc":
        (tests / "ops" / f"test_{name}.py").write_text(TESTS.format(name=name))
    shutil.copy(ROOT / "pyproject.toml", folder)
    places = [folder, ROOT / "src", ROOT / "tests", ROOT / "tests" / "machinery", ROOT / "tests" / "ops"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, places)), "GPU_MEMORY": str(gigabytes * 1e9)}
    environment |= {"LOG": str(folder / "log"), "PYTEST_ADDOPTS": ""}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-p", "gpu", "-p", "no:cacheprovider", *options]
    output = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    assert (folder / "log").exists(), output
    return output, [line.split() for line in (folder / "log").read_text().splitlines()]


def test_large_tests_take_turns(tmp_path: Path) -> None:
    """They have the larger part, each alone; what they leave is given back; the other tests have a small part each."""
    output, log = run(tmp_path, 141, "--numprocesses", "2")
    assert " 18 passed" in output, output
    large = [line for line in log if line[1] in ("begin", "end")]
    assert [line[1] for line in large] == ["begin", "end"] * 6
    assert len({line[0] for line in log if line[1] == "ordinary"}) > 1
    assert {float(line[2]) for line in log if line[1] == "ordinary"} == {PROCESSES / 2}
    assert len({line[0] for line in large}) > 1
    for worker in {line[0] for line in large}:
        events = [line[1] for line in log if line[0] == worker]
        assert events.count("empty") == events.count("end")
        assert all(after == "empty" for before, after in pairwise(events) if before == "end")


def test_too_large_test_is_skipped(tmp_path: Path) -> None:
    """A smaller GPU skips what does not fit beside the other processes, and says why."""
    output, log = run(tmp_path, 24, "--numprocesses", "0")
    assert " 15 passed, 3 skipped" in output, output
    assert re.search(r"SKIPPED \[3\].*: needs 30 GB, and can have 16\.0 of this GPU's 24\.0 GB", output), output
    assert {line[2] for line in log if line[1] == "begin"} == {"10"}


@pytest.mark.parametrize(("gigabytes", "count"), [(8, 1), (12, 1), (24, 2), (48, 4), (80, 6), (141, 8)])
def test_processes_follow_the_memory(gigabytes: float, count: int) -> None:
    total = int(gigabytes * 1e9)
    assert processes(total) == count
    assert count == 1 or PROCESSES * total / count >= EACH
    assert PROCESSES + LARGE_TEST == 1


def test_large_tests_say_what_they_need() -> None:
    """Every test of more than 2**31 elements does, and is found by its name."""
    tests = []
    for file in (ROOT / "tests" / "ops").glob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "beyond_int32" in node.name:
                tests.append(node)
                assert "needs_gpu_memory" in " ".join(map(ast.unparse, node.decorator_list)), (file.name, node.name)
    assert len(tests) > 20
