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
OPS = ["bare", "square", "square_opaque"]
PATH = "pytorch/which_api.py"
TABLE = Path(__file__).with_name("which_api.toml")
Outcomes = dict[tuple[str, str], str]


def read_page(recipe: ModuleType, run: Run) -> Outcomes:
    """Return what the run of the recipe's page found for the CPU, from the table, the notes and the claim there."""
    table, claim = [output.frame for output in run.outputs if output.frame][-2:]
    (text,) = [output.text.replace("\n    ", " ") for output in run.outputs if output.text.startswith("[1] ")]
    notes = dict(re.findall(r"(\[\d+\]) (.*)", text))
    marks = {(row, api): mark for row, *marks in table.rows for api, mark in zip(table.columns[1:], marks, strict=True)}
    marks[recipe.CELLS["cpu"][-1]] = claim.rows[0][-1].partition(": ")[2]
    return {cell: notes.get(mark.partition(" ")[2], mark) for cell, mark in marks.items()}


@pytest.fixture(scope="module")
def outcomes_of(recipe: ModuleType, run_of_page: Callable[[str], Run | None]) -> Callable[[str], Outcomes]:
    """Return a function that runs a device's whole table, once; the CPU's is on the page that was built."""
    run_before = run_of_page("pytorch/which_api")
    known: dict[str, Outcomes] = {"cpu": read_page(recipe, run_before)} if run_before else {}

    def run(device: str) -> Outcomes:
        if device not in known:
            known[device] = recipe.run(device, recipe.CELLS[device])
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
        # Its own check would find the change.
        head, _, tail = source.partition("# The check\n")
        (tmp_path / "which_api_broken.py").write_text(head + tail[tail.index("# The rows\n") :])
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
    """What the op does not take, it names; on every device the same."""
    op = getattr(recipe, name)
    for device in {"cpu" if name != "bare" else recipe.DEVICE.type, recipe.DEVICE.type}:
        with pytest.raises(TypeError, match=r"float32 or float64, not torch\.float16"):
            op(torch.ones(3, device=device, dtype=torch.float16))
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
    elif name == "square_opaque":  # the other one's launcher would meet the interpreter
        tests += ["test_faketensor"]
    x = torch.randn(5, 7, device=recipe.DEVICE)
    for tensor in (x.clone().requires_grad_(), x.T):
        results = torch.library.opcheck(getattr(recipe, name), (tensor,), test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}


def kinds(recipe: ModuleType, device: str, outcomes: Outcomes) -> dict[str, dict[str, str]]:
    """Return the kind of each cell, and which of the claims hold that can be tested on a device."""
    table: dict[str, dict[str, str]] = {}
    for (row, column), outcome in outcomes.items():
        table.setdefault(row, {})[column] = outcome.partition(":")[0]
    claims = recipe.claims(outcomes, list(recipe.CLAIMS)[0 if device == "cuda" else -1 :])
    return table | {"claims": claims["holds"].to_dict()}


def versions() -> str:
    """Return what a table is for, besides the device."""
    return ".".join(torch.__version__.split(".")[:2])


def as_toml(device: str, table: dict[str, dict[str, str]]) -> str:
    """Return a table in the form of the file."""
    lines = [f'[{device}."{versions()}"]']
    for row, cells in table.items():
        pairs = ", ".join(f'"{column}" = "{kind}"' for column, kind in cells.items())
        lines.append(f"{row} = {{ {pairs} }}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_cell_has_changed(recipe: ModuleType, outcomes_of: Callable[[str], Outcomes], device: str) -> None:
    """A PyTorch that behaves differently is noticed, cell by cell."""
    if device == "cuda" and recipe.DEVICE.type != "cuda":
        pytest.skip("needs a GPU")
    seen = kinds(recipe, device, outcomes_of(device))
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


def test_every_failure_says_why(recipe: ModuleType, outcomes_of: Callable[[str], Outcomes]) -> None:
    """A cell that is not ok has a note, which is no path and no address of this run."""
    for outcome in outcomes_of("cpu").values():
        kind, _, why = outcome.partition(": ")
        assert bool(why) == (kind in ("wrong", "fails")), outcome
        assert "/tmp" not in why
        assert "0x" not in why
    assert len(recipe.notes(outcomes_of("cpu"))) == len(
        {outcome for outcome in outcomes_of("cpu").values() if ":" in outcome}
    )


def test_table_is_complete(recipe: ModuleType, outcomes_of: Callable[[str], Outcomes]) -> None:
    """Each row of the chart is a row of the table, each cell has been run, each mark has its note."""
    table = recipe.table(outcomes_of("cpu"))
    assert set(recipe.CHART) <= set(table.index)
    assert list(table.columns) == recipe.APIS
    marks = {cell.partition(" ")[2] for cell in table.to_numpy().ravel()} - {""}
    assert marks <= {f"[{n}]" for n in range(1, 1 + len(recipe.notes(outcomes_of("cpu"))))}


def test_wrong_numbers_are_seen(broken: Callable[..., ModuleType]) -> None:
    """An API whose numbers are wrong is not ok, although it raises nothing; nor is one whose gradient is wrong."""
    recipe = broken({"return (x * x)": "return (x + x)", "return 2 * ctx": "return ctx"})
    cells = [("inference", "custom_op"), ("training", "triton_op")]
    for outcome in recipe.run("cpu", cells).values():
        assert outcome == "wrong: Mismatched elements: 1000 / 1000 (100.0%)"


def test_wrong_kernel_is_seen(broken: Callable[..., ModuleType]) -> None:
    """On a GPU it's the kernel that may be wrong, for all three."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    recipe = broken({"tl.store(out_ptr + offs, x * x,": "tl.store(out_ptr + offs, x + x,"})
    cells = [("inference", api) for api in recipe.APIS]
    assert all(outcome.startswith("wrong") for outcome in recipe.run("cuda", cells).values())


def test_crash_and_hang_are_seen(broken: Callable[..., ModuleType]) -> None:
    """A cell that ends its process fails, and so does one that never ends; others go on."""
    recipe = broken(
        {
            "signal.alarm(180)": "signal.alarm(5)",
            "    x.requires_grad_()\n": "    os.kill(os.getpid(), signal.SIGSEGV)\n",
            "    with FlopCounterMode(display=False) as counter:\n": "    if signal.pause():\n",
        }
    )
    cells = [("training", "custom_op"), ("flop_counter", "custom_op"), ("inference", "custom_op")]
    expected = ["fails: exit code -11", "fails: exit code -14", "ok"]
    assert recipe.run("cpu", cells) == dict(zip(cells, expected, strict=True))


def test_claims_follow_from_the_cells(recipe: ModuleType) -> None:
    """A claim holds if all its cells are as it says, and only then."""
    ok = dict.fromkeys(recipe.CELLS["cuda"], "ok")
    ok |= {("traced_into", api): "traced" for api in recipe.APIS}

    def holding(outcomes: Outcomes) -> set[str]:
        claims = recipe.claims(outcomes, recipe.CLAIMS)
        return set(claims.index[claims["holds"] == "yes"])

    everything = {claim.partition(": ")[2] for claim in recipe.CLAIMS}
    nothing_refused = holding(ok)
    assert everything - nothing_refused >= {"aot_inductor", "flop_counter", "configs and key only"}
    assert "training" in nothing_refused
    assert "traced_into" not in nothing_refused
    assert "traced_into" in holding(ok | {("traced_into", "custom_op"): "opaque"})
    assert "training" in holding(ok | {("training", "bare kernel"): "wrong: all"})  # the chart says mostly
    assert "training" not in holding(ok | {("training", "triton_op"): "wrong: all"})
    assert "training" not in holding(ok | {("training", "custom_op"): "fails: so"})


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("square", lambda normal, M, N: (normal(M, N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "squares stored without a mask",
        "tl.store(out_ptr + offs, x * x, mask=offs < N)",
        "tl.store(out_ptr + offs, x * x)",
    ),
]


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("which_api", Path(__file__).parents[2] / "gallery" / PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    outcomes = module.run(sys.argv[1], module.CELLS[sys.argv[1]])
    print(as_toml(sys.argv[1], kinds(module, sys.argv[1], outcomes)))
