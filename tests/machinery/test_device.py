"""What is detected, with and without a GPU."""

from pathlib import Path

import pytest
import torch
from project import ROOT

from triton_gallery.cli import main
from triton_gallery.recipe import device
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.device import (
    INTERPRETER,
    SUPPORTED,
    Environment,
    NoEnvironmentError,
    detect,
    too_new,
    too_old,
)
from triton_gallery.versions.matrix import pairs

RANGE = "the gallery runs on Triton 3.6 to 3.9 and PyTorch 2.11 to 2.15, see docs/versions.md"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "too_old", lambda *_: None)  # a GPU host may have versions that need a GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ((environment, _),) = detect()
    assert environment.name == INTERPRETER
    assert not environment.is_gpu
    assert environment.torch == torch.__version__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU; run on one")
def test_with_gpus() -> None:
    environments = [slot.environment for slot in detect()]
    assert len(environments) == torch.cuda.device_count()
    assert environments[0].name == torch.cuda.get_device_name(0)
    assert environments[0].driver


def test_broken_torch_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeError, match="libcudart is missing"):
        detect()


def test_without_a_driver_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It takes a second, and each command that executes recipes asks first."""
    monkeypatch.setattr(device, "too_old", lambda *_: None)  # a GPU host may have versions that need a GPU
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9+cpu'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ((environment, _),) = detect()
    assert (environment.name, environment.torch) == (INTERPRETER, "9.9+cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "torch" / "version.py").write_text("__version__, hip = '9.9+rocm', '7.0'\n")
    with pytest.raises(RuntimeError, match="torch was imported"):
        detect()


def environment(torch: str = "2.13.0+cpu", triton: str = "3.7.1", gpu: bool = False) -> Environment:
    """Return an environment with these versions."""
    return Environment("a device", *(("9.0", 1) if gpu else (None, None)), None, None, torch, triton, "3.11.9")


@pytest.mark.parametrize(
    ("here", "numpy", "reason"),
    [
        (environment(triton="3.5.1"), "2.4.6", "Triton 3.5.1 is too old: "),
        (environment(torch="2.10.0", gpu=True), "2.4.6", "PyTorch 2.10.0 is too old: "),
        (environment(torch="2.11.0+cu130"), "2.3.5", "PyTorch 2.11.0+cu130 does not run these kernels without a GPU: "),
        (environment(triton="3.6.0"), "2.4.6", "without a GPU, Triton 3.6 needs numpy below 2.4 (here is 2.4.6): "),
        (environment(triton="3.6.0"), "2.3.5", None),
        (environment(torch="2.11.0", triton="3.6.0", gpu=True), "2.4.6", None),
        (environment(torch="2.15.0", triton="3.9.0"), "2.4.6", None),
        (environment(torch="3.0.0", triton="4.0.0"), "2.4.6", None),
    ],
)
def test_versions_too_old(here: Environment, numpy: str, reason: str | None) -> None:
    message = too_old(here, numpy)
    assert message == (reason and reason + RANGE)


def test_versions_too_new() -> None:
    assert too_new(environment(torch="2.15.3", triton="3.9.1")) is None
    assert too_new(environment(triton="3.10.0")) == f"not tried with Triton 3.10.0: {RANGE}"
    assert too_new(environment("2.16.0a0", "3.10.0")) == f"not tried with Triton 3.10.0 and PyTorch 2.16.0a0: {RANGE}"


def test_old_triton_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command ends with the one line, and without a traceback."""
    installed = tmp_path / "triton-3.5.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.5.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(NoEnvironmentError, match=r"^Triton 3\.5\.1 is too old"):
        detect()
    assert main(["sanitize"]) == 2
    assert capfd.readouterr().out == f"Triton 3.5.1 is too old: {RANGE}\n"


def test_range_is_the_same_everywhere() -> None:
    """The recipes declare the oldest versions, the page of versions names both ends, and CI tries the newest Triton."""
    (oldest_triton, newest_triton), (oldest_torch, _) = SUPPORTED["Triton"], SUPPORTED["PyTorch"]
    for recipe in load(ROOT / "gallery"):
        declared = {str(need) for need in declaration(recipe.path, recipe.text).packages}
        assert f"torch>={oldest_torch[0]}.{oldest_torch[1]}" in declared, recipe.key
        assert any(
            need.startswith("triton") and f">={oldest_triton[0]}.{oldest_triton[1]}" in need for need in declared
        )
    page = (ROOT / "docs" / "versions.md").read_text()
    for name, ends in SUPPORTED.items():
        assert f"| {name} | {ends[0][0]}.{ends[0][1]} | {ends[1][0]}.{ends[1][1]} |" in page
    listed = [pair.triton for pair in pairs(ROOT / "docs" / "_versions")]
    assert listed[0].startswith(f"{oldest_triton[0]}.{oldest_triton[1]}.")
    assert listed[-1].startswith(f"{newest_triton[0]}.{newest_triton[1]}.")
    assert f"triton=={listed[1]}" in (ROOT / "requirements.txt").read_text(), "the pinned one is tried, too"
