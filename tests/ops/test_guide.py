"""The examples of the guide's page Take an op run, one after another."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from inputs import DEVICE
from project import ROOT

needs_a_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: make test-gpu")
GUIDE = ROOT / "docs" / "guide" / "take.md"
EXAMPLES = dict(re.findall(r"(?ms)^\*\*(.*?)\*\*.*?^```python\n(.*?)^```$", GUIDE.read_text().split("\n## ")[1]))


def test_examples_are_found() -> None:
    names = ["In PyTorch", "In a CUDA graph.", "In a package of AOTInductor", "In another process"]
    assert list(EXAMPLES) == [*names, "As one file in your package"]


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the first example defines, in a folder that has the file of an op."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    scope: dict[str, Any] = {}
    run("In PyTorch", scope)
    return scope


def run(name: str, scope: dict[str, Any]) -> None:
    """Run an example on the device that there is."""
    exec(EXAMPLES[name].replace('"cuda"', repr(DEVICE.type)), scope)


def expected(scope: dict[str, Any]) -> torch.Tensor:
    """Return PyTorch's norm of x."""
    return torch.nn.functional.rms_norm(scope["x"], (1024,), scope["norm"].weight, 1e-6)


def test_pytorch(scope: dict[str, Any]) -> None:
    torch.testing.assert_close(scope["norm"](scope["x"]), expected(scope))
    assert scope["norm"].weight.grad.abs().sum() > 0


@needs_a_gpu
def test_graph(scope: dict[str, Any]) -> None:
    run("In a CUDA graph.", scope)
    torch.testing.assert_close(scope["y"], expected(scope))


@needs_a_gpu
def test_package(scope: dict[str, Any]) -> None:
    run("In a package of AOTInductor", scope)
    checked = EXAMPLES["In another process"] + "\ntorch.testing.assert_close(y, torch.ones_like(y))"
    subprocess.run([sys.executable, "-c", checked], check=True)


def test_file_of_ones_own(scope: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(ROOT / "src" / "triton_gallery_ops" / "softmax.py", tmp_path / "softmax_op.py")
    run("As one file in your package", scope)
    assert str(scope["my_softmax"].softmax._opoverload) == "mypackage.softmax.default"
    del sys.modules["my_softmax"]
