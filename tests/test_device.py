"""What is detected, with and without a GPU."""

from pathlib import Path

import pytest
import torch

from triton_gallery.recipes.device import INTERPRETER, detect


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (environment,) = detect()
    assert environment.name == INTERPRETER
    assert not environment.is_gpu
    assert environment.torch == torch.__version__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU; run on one")
def test_with_gpus() -> None:
    environments = detect()
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
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9+cpu'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (environment,) = detect()
    assert (environment.name, environment.torch) == (INTERPRETER, "9.9+cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "torch" / "version.py").write_text("__version__, hip = '9.9+rocm', '7.0'\n")
    with pytest.raises(RuntimeError, match="torch was imported"):
        detect()
