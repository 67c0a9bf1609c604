"""The package of ops as a wheel: what is in it, what it needs, and that its ops run where nothing else of ours is."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from project import NOT_OPS, OPS, ROOT, SOURCES

from triton_gallery.site.op_files import BUILD, wheel_name
from triton_gallery.site.op_pages import public

USE = """
import importlib, sys
from pathlib import Path

import torch
import triton_gallery_ops

assert Path(triton_gallery_ops.__file__).is_relative_to(sys.prefix), triton_gallery_ops.__file__
assert "triton" not in sys.modules, "the package itself imports Triton"
for name in sys.argv[1:]:
    importlib.import_module(f"triton_gallery_ops.{name}")
try:
    import triton_gallery
except ImportError:
    pass
else:
    raise AssertionError("the machinery is there too")

from triton_gallery_ops.flash_attention import flash_attention
from triton_gallery_ops.rms_norm import rms_norm
from triton_gallery_ops.softmax import softmax

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(3, 70, device=device, requires_grad=True)
weight = torch.randn(70, device=device)
torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
torch.testing.assert_close(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (70,), weight, 1e-6))
ours, theirs = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (softmax, lambda x: torch.softmax(x, -1)))
torch.testing.assert_close(ours, theirs)
q, k, v = torch.randn(3, 1, 2, 40, 16, device=device)
sdpa = torch.nn.functional.scaled_dot_product_attention
torch.testing.assert_close(flash_attention(q, k, v, causal=True), sdpa(q, k, v, is_causal=True))
print("all right")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel; return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True)
    return folder / wheel_name(ROOT)


def test_wheel_has_the_ops_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {path for path in archive.namelist() if ".dist-info/" not in path}
        (about,) = (path for path in archive.namelist() if path.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    modules = {f"triton_gallery_ops/{op}.py" for op in ("__init__", *NOT_OPS, *OPS)}
    assert names == modules | {"triton_gallery_ops/py.typed", "triton_gallery_ops/README.md"}
    assert metadata["Name"] == "triton-gallery-ops"
    needs = {line.replace('"', "'") for line in metadata.get_all("Requires-Dist")}
    assert needs == {"torch>=2.11", "triton>=3.6; sys_platform == 'linux'"}


def test_ops_of_the_wheel_run_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    """In an environment with it, and with what torch needs of this one."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    install = ["install", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "-q", *install], check=True)
    packages = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("torch", "triton", "numpy")}
    (site / "others.pth").write_text("\n".join(sorted(packages)) + "\n")  # files of that kind in there are not read
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    variables |= {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        variables["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    command = [folder / "bin" / "python", "-c", USE, *OPS]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout == "all right\n", done.stderr


def test_public_functions_say_what_they_take() -> None:
    """Each has a docstring, and types for all arguments and for what it returns."""
    for op in OPS:
        nodes = [part.node for part in public(op, (SOURCES / f"{op}.py").read_text())]
        assert nodes, op
        for node in nodes:
            assert node.body[0].value.value.strip(), f"{op}.{node.name} has no docstring"
            untyped = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs) if not argument.annotation]
            assert (untyped, bool(node.returns)) == ([], True), f"{op}.{node.name}"
