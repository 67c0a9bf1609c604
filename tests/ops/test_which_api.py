"""The recipe Which API: its ops, its table, and that a cell that changes is noticed.

`which_api.toml`, beside this file, has what became of each cell, by device and PyTorch. To print that table anew:

    python tests/ops/test_which_api.py cpu >> tests/ops/which_api.toml    # or cuda
"""

import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import Layout, layouts, shapes

from triton_gallery.records.page_cache import Run

BLOCK = 1024  # of the recipe
OPS = ["bare", "traced", "opaque"]
PATH = "pytorch/which_api.py"
TABLE = Path(__file__).with_name("which_api.toml")
Outcomes = dict[tuple[str, str], str]


def run_all(recipe: ModuleType, device: str) -> Outcomes:
    """Return what becomes of each cell on a device."""
    return recipe.tried(recipe.attempt, recipe.ROWS, recipe.OPS, device)


def read_page(recipe: ModuleType, run: Run) -> Outcomes:
    """Return what the run of the recipe's page found for the CPU: a word for each cell."""
    (table,) = [output.text for output in run.outputs if "\nCUDA graph " in output.text]
    lines = [line for line in table.splitlines()[1:] if line.startswith(tuple(recipe.ROWS))]
    cells = [line.rsplit(maxsplit=3) for line in lines]
    return {(row, api): word for row, *words in cells for api, word in zip(recipe.OPS, words, strict=True)}


@pytest.fixture(scope="module")
def outcomes_of(recipe: ModuleType, run_of_page: Callable[[str], Run | None]) -> Callable[[str], Outcomes]:
    """Return a function that runs a device's whole table, once; the CPU's is on the page that was built."""
    run_before = run_of_page("pytorch/which_api")
    known: dict[str, Outcomes] = {"cpu": read_page(recipe, run_before)} if run_before else {}

    def run(device: str) -> Outcomes:
        if device not in known:
            known[device] = run_all(recipe, device)
        return known[device]

    return run


@pytest.fixture
def broken(gallery: Path, tmp_path: Path, load_recipe: Callable[[str], ModuleType]) -> Callable[..., ModuleType]:
    """Return a function that loads the recipe with something in it replaced."""

    def load(changes: dict[str, str]) -> ModuleType:
        source = (gallery / PATH).read_text()
        for old, new in changes.items():
            assert source.count(old) == 1
            source = source.replace(old, new)
        (tmp_path / "which_api_broken.py").write_text(source)
        return load_recipe(str(tmp_path / "which_api_broken.py"))

    return load


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPS)
@given(shape=shapes(BLOCK, 40 * BLOCK), layout=layouts())
def test_floats(recipe: ModuleType, name: str, dtype: torch.dtype, shape: tuple[int, ...], layout: Layout) -> None:
    """A product is rounded once, so the tolerance is zero; no wrapping changes that."""
    x = layout.make(shape, dtype, recipe.DEVICE)
    # The guard sees what Python code allocates; what is inside an op it does not.
    out = guarded(recipe.bare, x) if name == "bare" else getattr(recipe, name)(x)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out, (x.double() * x.double()).to(dtype), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("name", OPS)
def test_special_values(recipe: ModuleType, name: str) -> None:
    """Infinities, NaN, signed zeros, a number whose square is not representable."""
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-30], device=recipe.DEVICE)
    torch.testing.assert_close(getattr(recipe, name)(x), x * x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPS)
def test_refuses(recipe: ModuleType, name: str) -> None:
    """With ``finite`` it looks at values, on every device the same."""
    op = getattr(recipe, name)
    for device in {"cpu" if name != "bare" else recipe.DEVICE.type, recipe.DEVICE.type}:
        with pytest.raises(ValueError, match="an infinity or NaN"):
            op(torch.tensor([1, torch.inf], device=device), True)
        assert op(torch.ones(3, device=device), True).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", OPS[1:])
def test_gradient_and_vmap(recipe: ModuleType, name: str) -> None:
    """The formulas that are registered with the ops are right."""
    op = getattr(recipe, name)
    x = torch.randn(5, 7, dtype=torch.float64, device=recipe.DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(op, x)
    for axis in (0, 1):
        out = torch.vmap(lambda row: op(row, True), in_dims=axis)(x)
        torch.testing.assert_close(out, (x * x).movedim(axis, 0), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPS[1:])
def test_opcheck(recipe: ModuleType, name: str) -> None:
    """The ops are registered as PyTorch wants it; without a GPU, as far as that can be told."""
    tests = ["test_schema", "test_autograd_registration"]
    if recipe.DEVICE.type == "cuda":
        tests += ["test_faketensor", "test_aot_dispatch_dynamic"]
    elif name == "opaque":  # the other one's launcher would meet the interpreter
        tests += ["test_faketensor"]
    x = torch.randn(5, 7, device=recipe.DEVICE)
    for tensor in (x.clone().requires_grad_(), x.T):
        results = torch.library.opcheck(getattr(recipe, name), (tensor,), test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}


def kinds(outcomes: Outcomes) -> dict[str, dict[str, str]]:
    """Return the word for each cell, by row."""
    table: dict[str, dict[str, str]] = {}
    for (row, column), outcome in outcomes.items():
        table.setdefault(row, {})[column] = outcome.partition(":")[0]
    return table


def versions() -> str:
    """Return what a table is for, besides the device."""
    return ".".join(torch.__version__.split(".")[:2])


def as_toml(device: str, table: dict[str, dict[str, str]]) -> str:
    """Return a table in the form of the file."""
    lines = [f'[{device}."{versions()}"]']
    for row, cells in table.items():
        pairs = ", ".join(f'"{column}" = "{kind}"' for column, kind in cells.items())
        lines.append(f'"{row}" = {{ {pairs} }}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_cell_has_changed(recipe: ModuleType, outcomes_of: Callable[[str], Outcomes], device: str) -> None:
    """A PyTorch that behaves differently is noticed, cell by cell."""
    if device == "cuda" and recipe.DEVICE.type != "cuda":
        pytest.skip("needs a GPU")
    seen = kinds(outcomes_of(device))
    here = f"torch {torch.__version__}, triton {recipe.triton.__version__}, {device}"
    how = f"If the new table is right, and the recipe's prose agrees with it, put it into {TABLE.name}:\n\n"
    how += as_toml(device, seen)
    expected = tomllib.loads(TABLE.read_text()).get(device, {}).get(versions())
    if expected is None:
        pytest.fail(f"{here}: no table for this version yet. {how}", pytrace=False)
    changes = []
    for row in expected | seen:
        for column in expected.get(row, {}) | seen.get(row, {}):
            was = expected.get(row, {}).get(column, "missing")
            now = seen.get(row, {}).get(column, "missing")
            if was != now:
                outcome = outcomes_of(device).get((row, column), now)
                changes.append(f"  {row}, {column}: expected {was}, seen {outcome}")
    if changes:
        pytest.fail("\n".join([f"{here}: these cells have changed.", *changes, how]), pytrace=False)


def test_table_is_complete(recipe: ModuleType, gallery: Path) -> None:
    """Each row is tried on a GPU."""
    source = (gallery / PATH).read_text()
    assert source.count("ROWS |= rows\n\n") == source.count('    gpu |= tried(attempt, rows, OPS, "cuda")\n') == 4
    assert len(recipe.ROWS) == 17


def test_chart_of_pytorch() -> None:
    """The chart in its tutorial agrees with the newest table but for the cells that the page names."""
    chart = {
        "a call": ["yes", "yes", "yes"],
        "gradient": ["mostly", "yes", "yes"],
        "compiled": ["yes", "yes", "yes"],
        "compiled, no graph break": ["mostly", "mostly", "yes"],
        "what the compiler does": ["yes", "yes", "no"],  # is it traced?
        "AOTInductor's package": ["yes", "yes", "no"],
        "count of operations": ["no", "yes", "yes"],
        "CPU tensor": ["no", "yes", "yes"],
        "tensor subclass": ["no", "yes", "yes"],
    }
    *_, table = tomllib.loads(TABLE.read_text())["cuda"].values()
    works = {"ok": "yes", "traced": "yes", "opaque": "no", "fails": "no", "wrong": "no"}
    differ = {
        (row, api): (claim, table[row][api])
        for row, claims in chart.items()
        for claim, api in zip(claims, table[row], strict=True)
        if claim != works[table[row][api]]
    }
    assert differ == {
        ("gradient", "bare kernel"): ("mostly", "wrong"),
        ("compiled, no graph break", "bare kernel"): ("mostly", "ok"),
        ("compiled, no graph break", "triton_op"): ("mostly", "ok"),
    }
    values = table["compiled, values looked at"]
    assert [values["bare kernel"], values["triton_op"]] == ["fails", "fails"]


def test_versions(gallery: Path) -> None:
    """What the page lists is there in the installed PyTorch."""
    source = (gallery / PATH).read_text()
    listed = source.partition("# Since which PyTorch\n")[2].partition("The versions are")[0]
    names = re.findall(r"``(\w+)``", listed)
    assert len(names) == 5
    assert [name for name in names if not hasattr(torch.library, name)] == []


def test_calls(recipe: ModuleType) -> None:
    """Each call of an op is timed; a bare kernel has no backward."""
    assert list(recipe.calls(recipe.traced)) == ["op(x)", "op(w)", "backward"]
    assert list(recipe.calls(recipe.bare)) == ["op(x)", "op(w)"]
    for call in recipe.calls(recipe.opaque).values():
        call()


def test_wrong_numbers_are_seen(broken: Callable[..., ModuleType]) -> None:
    """An API whose numbers are wrong is not ok, although it raises nothing; nor is one whose gradient is wrong."""
    recipe = broken({"return (x * x)": "return (x + x)", "return 2 * ctx.saved_tensors[0] * grad, ": "return grad, "})
    cells = [("a call", "custom_op"), ("gradient", "triton_op")]
    for outcome in recipe.outcomes([(recipe.attempt, *cell, "cpu") for cell in cells], "cpu"):
        assert outcome == "wrong: Mismatched elements: 1000 / 1000 (100.0%)"


def test_wrong_kernel_is_seen(broken: Callable[..., ModuleType]) -> None:
    """On a GPU it's the kernel that may be wrong, for all three."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    recipe = broken({"tl.store(y_ptr + offs, x * x,": "tl.store(y_ptr + offs, x + x,"})
    found = recipe.tried(recipe.attempt, ["a call"], recipe.OPS, "cuda")
    assert all(outcome.startswith("wrong") for outcome in found.values())


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("traced", lambda normal, M, N: (normal(M, N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "squares stored without a mask",
        "tl.store(y_ptr + offs, x * x, mask=offs < N)",
        "tl.store(y_ptr + offs, x * x)",
    ),
]


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("which_api", Path(__file__).parents[2] / "gallery" / PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(as_toml(sys.argv[1], kinds(run_all(module, sys.argv[1]))))
