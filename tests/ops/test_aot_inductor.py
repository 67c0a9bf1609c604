"""The recipe Ahead of time: its op, and what it says about packages."""

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes
from torch.nn.functional import normalize

BLOCK = 1024  # a size around which rows are interesting: a power of two


def tolerance(recipe: ModuleType, dtype: torch.dtype) -> float:
    """Return the relative error of a result: that of the arithmetic, and one rounding to the dtype."""
    if dtype == torch.bfloat16 and recipe.DEVICE.type == "cpu":
        return 2**-7  # the interpreter cuts float32 to bfloat16 where a GPU rounds
    if dtype == torch.float64:
        return 1e-12  # 2048 roundings, halved by the root: those of the reference, which may add one by one
    return 1e-6 + torch.finfo(dtype).eps  # the page's bound; a sum of twice as many squares has one rounding more


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(rows=st.lists(st.integers(0, 3), max_size=2), N=sizes(BLOCK, 2 * BLOCK).filter(bool), layout=layouts())
def test_rows(recipe: ModuleType, dtype: torch.dtype, rows: list[int], N: int, layout: Layout) -> None:
    """Any number of rows, in any layout, is right; nothing else is touched."""
    x = layout.make((*rows, N), dtype, recipe.DEVICE)
    out = guarded(recipe.normalize_rows, x)
    assert out.dtype == dtype
    expected = normalize(x.double(), dim=-1)
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # these numbers are a fixed step apart
    torch.testing.assert_close(out.double(), expected, rtol=tolerance(recipe, dtype), atol=subnormal)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)], ids=str)
def test_nothing(recipe: ModuleType, shape: tuple[int, ...]) -> None:
    """Without elements there is nothing to do."""
    assert recipe.normalize(torch.ones(shape, device=recipe.DEVICE)).shape == shape


def test_module_float32(recipe: ModuleType) -> None:
    """The op is the same function, and the module subtracts first."""
    x, mean = (
        Layout("contiguous", seed).make(shape, torch.float32, recipe.DEVICE)
        for seed, shape in ((0, (3, 257)), (1, (257,)))
    )
    assert torch.equal(recipe.normalize(x), recipe.normalize_rows(x))
    assert torch.equal(recipe.Head(mean)(x), recipe.normalize_rows(x - mean))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Squares that are no float16 are no problem, and a sum of many loses nothing."""
    x = torch.full((2, 4 * BLOCK), 300.0, dtype=dtype, device=recipe.DEVICE)
    out = recipe.normalize(x).double()
    torch.testing.assert_close(out, torch.full_like(out, 1 / 64), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values_float32(recipe: ModuleType) -> None:
    """Rows of zeros, rows shorter than eps, and rows with infinities and NaN are as PyTorch has them."""
    x = torch.tensor([[0, 0, 0], [1e-14, 0, 0], [3, 4, 0], [1, torch.inf, 2], [1, torch.nan, 2]], device=recipe.DEVICE)
    torch.testing.assert_close(recipe.normalize(x), normalize(x, dim=-1), equal_nan=True)
    torch.testing.assert_close(recipe.normalize(x, 10.0), normalize(x, dim=-1, eps=10.0), equal_nan=True)


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(recipe: ModuleType) -> None:
    """The last row of a tensor of more than 2**31 elements is right."""
    x = torch.zeros(2**19 + 1, 2**12, dtype=torch.float16, device=recipe.DEVICE)
    x[-1, -1] = 7
    out = recipe.normalize(x)
    assert out[-1, -1] == 1
    out[-1, -1] = 0
    assert not out.any()


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names; it has no backward."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    for wrong in (x.long(), x.to(torch.complex64), x[0, 0], x[:, :1].expand(2, 2**14 + 1)):
        with pytest.raises(
            ValueError, match=f"takes rows of up to .*{wrong.dtype} .*{re.escape(str(tuple(wrong.shape)))}"
        ):
            recipe.normalize(wrong)
    with pytest.raises((RuntimeError, NotImplementedError), match="grad"):
        recipe.normalize(x.clone().requires_grad_()).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_opcheck(recipe: ModuleType, dtype: torch.dtype) -> None:
    """PyTorch finds nothing wrong with the op's registration."""
    x = torch.randn(7, 5, dtype=dtype, device="cuda")
    assert set(torch.library.opcheck(recipe.normalize, (x,)).values()) == {"SUCCESS"}


@dataclass(frozen=True)
class Built:
    """A package, and what building it said.

    Attributes:
        folder: where it lies.
        path: its file.
        exported: the code of the exported program.
        compiled: the code of the program that was compiled.
        refusal: what the compiler said to the program as it was exported, without a GPU.
    """

    folder: Path
    path: str
    exported: str
    compiled: str
    refusal: str | None


@pytest.fixture(scope="module")
def built(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the package of the page."""
    folder = tmp_path_factory.mktemp("packages")
    recipe.write_model(folder)
    path = str(folder / "head.pt2")
    (codes, refusal), _ = recipe.elsewhere(folder, recipe.build, path, recipe.DEVICE.type, model=True)
    return Built(folder, path, *codes, refusal)


def test_exported_program_has_the_op(recipe: ModuleType, built: Built) -> None:
    """The op is one node; without a GPU it cannot be compiled, and PyTorch's functions take its place."""
    assert built.exported.count("triton_gallery.normalize.default") == 1
    if recipe.DEVICE.type == "cpu":
        assert "0 active drivers" in (built.refusal or "")
        assert "triton_gallery" not in built.compiled
    else:
        assert built.refusal is None


def test_package_has_the_kernels(recipe: ModuleType, built: Built) -> None:
    """On a GPU the package has our kernel and Inductor's, and calls ours with a grid of the batch's size."""
    files = recipe.unzip(built.path)
    kernels = recipe.kernels(files)
    assert {"head.wrapper.cpp", "head.wrapper.so", "head.wrapper_metadata.json"} <= set(files)
    assert json.loads(files["head.wrapper_metadata.json"])["AOTI_DEVICE_KEY"] == recipe.DEVICE.type
    if recipe.DEVICE.type == "cpu":
        assert kernels == []
    else:
        assert len(kernels) == 2
        assert "normalize_kernel" in kernels
        assert re.search(r"call_normalize_kernel_0\(.*1024, .*, s\d+, 1L, 1L,", files["head.wrapper.cpp"].decode())


@pytest.fixture(scope="module")
def served(recipe: ModuleType, built: Built) -> tuple[list[str], dict[str, bool], str]:
    """Return which modules of ours a server imported, which odd inputs came out right, and what it wrote to stderr."""
    (imported, accepted), errors = recipe.elsewhere(
        built.folder, recipe.serve, built.path, recipe.DEVICE.type, cache="fresh"
    )
    return imported, accepted, errors


def test_fresh_process_serves(recipe: ModuleType, built: Built, served: tuple[list[str], dict[str, bool], str]) -> None:
    """Where neither the model nor Triton can be imported, the package is right, and nothing is compiled."""
    assert served[0] == []
    assert [file for file in (built.folder / "fresh").rglob("*") if file.is_file()] == []
    with pytest.raises(RuntimeError, match="No module named 'model'"):
        recipe.elsewhere(built.folder, recipe.build, built.path, recipe.DEVICE.type)


def test_inputs_are_checked_on_request_only(served: tuple[list[str], dict[str, bool], str]) -> None:
    """What is wrong is accepted, unless the variable is set."""
    _, accepted, errors = served
    assert accepted == {
        "a batch of 1": True,
        "a batch of 2**15 + 1": True,
        "float64": False,
        "the transpose of (1024, 8)": False,
        "rows of 2048": False,
    }
    reasons = re.findall(
        r"^Error: input_handles\[0\]: (.*?) at|^Error: input_handles\[0\]: (.*?),", errors, re.MULTILINE
    )
    assert [a or b for a, b in reasons] == [
        "dim value is too small",
        "dim value is too large",
        "unmatched dtype",
        "unmatched stride value",
        "unmatched dim value",
    ]


def test_foreign_metadata_is_a_warning(recipe: ModuleType, built: Built) -> None:
    """A package that says it was built on another machine is loaded, and serves."""
    forged = built.folder / "forged.pt2"
    with zipfile.ZipFile(built.path) as old, zipfile.ZipFile(forged, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("_metadata.json"):
                data = json.dumps(json.loads(data) | {"AOTI_MACHINE": "abacus"}).encode()
            new.writestr(name.replace("head", "forged", 1), data)
    _, errors = recipe.elsewhere(built.folder, recipe.serve, str(forged), recipe.DEVICE.type)
    assert "Device information mismatch for AOTI_MACHINE" in errors


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("normalize", lambda normal, M, N: (normal(M, N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("rows loaded without a mask", "mask=mask, other=0)  # (BLOCK_N,)", "other=None)  # (BLOCK_N,)"),
    ("rows counted by one axis", "math.prod(x.shape[:-1])", "x.shape[0]"),
]
