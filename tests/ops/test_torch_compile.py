"""The lesson User-defined kernels with torch.compile: its op, and what it says of programs, tuners and writes."""

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import shapes

BLOCK = 1024  # of the recipe
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(shape=shapes(BLOCK, 4 * BLOCK))
def test_floats(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The sum is the correctly rounded one, so the tolerance is zero."""
    x, y = torch.randn((2, *shape), dtype=dtype, device=recipe.DEVICE)
    expected = (x.double() + y.double()).to(dtype)
    out = guarded(recipe.add, x, y)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_aliases(recipe: ModuleType) -> None:
    """The two inputs may be the same tensor; the result is a new one."""
    x = torch.randn(5, 7, device=recipe.DEVICE)
    before = x.clone()
    recipe.add(x, x).zero_()
    assert torch.equal(x, before)


@pytest.mark.needs_gpu_memory(18)
def test_beyond_int32(recipe: ModuleType) -> None:
    """The last elements of a tensor of more than 2**31 elements are right."""
    x = torch.zeros(2**31 + 5, device=recipe.DEVICE)
    x[-1] = 1
    out = recipe.add(x, x)
    assert out[-1] == 2
    assert not out[:-1].any()


@pytest.mark.needs_gpu_memory(30)
@pytest.mark.parametrize(
    "dynamic",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.xfail(
                torch.__version__.startswith("2.11."),
                strict=True,
                reason="Inductor 2.11 hands kernels no constant beyond int32 ('xreplace')",
            ),
        ),
    ],
)
def test_compiled_beyond_int32(recipe: ModuleType, dynamic: bool) -> None:
    """The same for the compiled op."""
    x, y = torch.zeros(2**31 + 5, device="cuda"), torch.ones(2**31 + 5, device="cuda")
    assert (recipe.compiled(recipe.add, dynamic=dynamic)(x, y) == 1).all()


@pytest.fixture
def printed(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[[str], list[str]]:
    """Return a function that calls a function of the lesson and returns the lines that this prints."""

    def call(name: str) -> list[str]:
        getattr(recipe, name)()
        return capsys.readouterr().out.splitlines()

    return call


def test_answers(printed: Callable[[str], list[str]]) -> None:
    """Stages are taken over, pruning is obeyed, hooks, CUDA graphs and two tuners are refused, the rest is taken."""
    text = "\n".join(printed("answers")).replace("\n" + 28 * " ", " ")
    answers = {line[:28].strip(): line[28:] for line in text.splitlines()}
    assert answers.pop("no decorator") == "yes"
    assert answers.pop("launched with num_stages") == "yes, num_stages 4"
    assert answers.pop("autotune, prune_configs_by") == "yes, num_stages 3"
    assert answers.pop("autotune, use_cuda_graph").startswith("no: Only configs, key")
    assert answers.pop("autotune, pre_hook").startswith("no: pre_hook and post_hook are not supported")
    assert answers.pop("autotune twice").startswith("no: Passing multiple @triton.autotune decorators")
    options = ("", ", key", ", restore_value", ", reset_to_zero", ", do_bench")
    assert answers == dict.fromkeys([f"autotune{option}" for option in options], "yes, num_stages 1, 3")


def test_fused(printed: Callable[[str], list[str]]) -> None:
    """The kernel is a launch of its own between two fused ones; in place, no copy is made."""
    lines = printed("fused")
    heads = ["chain: 28 bytes", "chain_torch: 12 bytes", "chain_: 20 bytes"]
    assert [line.partition(" for")[0] for line in lines if ": " in line] == heads
    starts = [line.partition("(")[0] for line in lines if ": " not in line]
    assert starts == [
        *("cpp_fused_mul_relu_0", "add_kernel_0.run", "cpp_fused_mul_sigmoid_1"),
        "cpp_fused_add_mul_relu_sigmoid_0",
        *("add_kernel_0.run", "cpp_fused_mul_0"),
    ]
    assert "add_kernel_0.run(arg0_1, arg1_1, arg0_1, 5000, 5, 1, 1)" in lines


def test_orders_of_heuristics(printed: Callable[[str], list[str]]) -> None:
    """Above the tuner a heuristic cannot read the block; below it cannot depend on a dynamic size."""
    _, *lines, above, below, pruned = printed("orders")
    answers = {(line[:7].strip(), line[7:20].strip()): line[20:].split() for line in lines[:6]}
    for reads in ("N", "N and BLOCK"):
        assert answers["alone", reads] == ["yes", "yes"]
        assert answers["below", reads] == ["yes", "no"]
    assert answers["above", "N"] == ["yes", "yes"]
    assert answers["above", "N and BLOCK"] == ["no", "no"]
    reasons = " ".join(lines[6:])
    assert "above, no: KeyError" in reasons
    assert "below, no: @triton.heuristics must return constant values" in reasons
    assert above.endswith("True")
    assert below.endswith("False")
    assert pruned.startswith("above, pruned")
    assert pruned.endswith("False")


def test_programs_for_four_sizes(printed: Callable[[str], list[str]]) -> None:
    """Symbols for sizes save programs, unless a constexpr is made from a size."""
    *lines, tuned = printed("sizes")
    counts = {"chain": [2, 1], "by_size": [4, 3]}
    ways = ("None", "True")
    assert lines == [
        f"{name}, dynamic={how}: {count} programs"
        for name, row in counts.items()
        for how, count in zip(ways, row, strict=True)
    ]
    assert tuned == "tuned: 1 program; key in it: []"


def test_training_and_export(printed: Callable[[str], list[str]]) -> None:
    """Both passes launch the kernel; a bare kernel is exported by reading Python, not by running it."""
    *passes, default = printed("training_and_export")
    export = next(index for index, line in enumerate(passes) if line.startswith("export, strict=True"))
    passes, strict = passes[:export], " ".join(passes[export:])
    backward = passes.index("backward:")
    assert passes[0] == "forward:"
    for part in (passes[:backward], passes[backward:]):
        assert sum(line.startswith("add_kernel_0.run(") for line in part) == 1
    assert "triton_kernel_wrapper_mutation" in strict
    assert default.startswith("export, strict=False: ")  # an error
    assert "relu" not in default


def test_hidden_writes(printed: Callable[[str], list[str]]) -> None:
    """A kernel that writes through a table of addresses is removed; a tensor under two names is copied."""
    lines = printed("writes")
    table, pair = lines[: lines.index("pair:")], lines[lines.index("pair:") :]
    assert not any("table_kernel" in line for line in table)
    (launch,) = (line for line in pair if "pair_kernel" in line)
    first, second = launch.partition("(")[2].split(", ")[:2]
    assert first != second


def compare(function: Callable[..., torch.Tensor], device: torch.device, compiled: Callable[..., Any]) -> list[Any]:
    """Return the result and the input, a zero before, of an eager call and of a compiled one."""
    rows = []
    for call in (function, compiled):
        x = torch.zeros(1, device=device)
        rows.append((call(x, torch.tensor([x.data_ptr()], device=device)).item(), x.item()))
    return rows


@pytest.fixture(scope="module")
def declare(recipe: ModuleType) -> Callable[..., Any]:
    """Return a function that registers an op under a name of its own."""
    count = iter(range(100))

    def register(function: Callable[..., Any], fake: Callable[..., Any], *mutates: str) -> Any:
        name = f"test_torch_compile::op_{next(count)}"
        op = torch.library.custom_op(name, function, mutates_args=mutates)
        op.register_fake(fake)
        return op

    return register


@pytest.mark.parametrize("declared", [(), ("x",)])
def test_declaration_decides(recipe: ModuleType, declare: Callable[..., Any], declared: tuple[str, ...]) -> None:
    """An op that does not declare its write is removed, and `test_schema` finds it."""

    def bump(x: torch.Tensor) -> None:
        recipe.table_kernel[(1,)](recipe.address(x))

    op = declare(bump, lambda x: None, *declared)

    def function(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        op(x)
        return x + 100

    eager, compiled = compare(function, recipe.DEVICE, recipe.compiled(function, backend="aot_eager"))
    assert eager == (101, 1)
    assert compiled == ((101, 1) if declared else (100, 0))
    inputs = (torch.zeros(1, device=recipe.DEVICE),)
    if declared:
        torch.library.opcheck(op, inputs, test_utils="test_schema")
    else:
        with pytest.raises(Exception, match="not defined as mutable but was mutated"):
            torch.library.opcheck(op, inputs, test_utils="test_schema")


def test_an_address_does_not_follow_a_copy(recipe: ModuleType, declare: Callable[..., Any]) -> None:
    """A declared op that is handed the table is wrong all the same: the table has to be made inside."""

    def bump(x: torch.Tensor, table: torch.Tensor) -> None:
        recipe.table_kernel[(1,)](table)

    op = declare(bump, lambda x, table: None, "x")

    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        op(x, table)
        return x + 100

    eager, compiled = compare(function, recipe.DEVICE, recipe.compiled(function, backend="aot_eager"))
    assert eager != compiled


@needs_gpu
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_compiled_chain(recipe: ModuleType, dynamic: bool | None) -> None:
    """Compiled and eager agree, for sizes on both sides of a block."""
    function = recipe.compiled(recipe.chain, dynamic=dynamic)
    for size in (2, 1023, 1024, 1025, 70_001):
        x, y = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
        torch.testing.assert_close(function(x, y), recipe.chain(x, y))


@needs_gpu
def test_key_is_ignored(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for three sizes is tuned once."""
    kernel = recipe.tuned(recipe.add_kernel, key=["N"])
    function = recipe.compiled(lambda x: recipe.launch(x, x, kernel, EVEN=False), dynamic=True)
    tuner = torch._inductor.runtime.triton_heuristics.CachingAutotuner
    tuned = Mock(side_effect=tuner.benchmark_all_configs)
    monkeypatch.setattr(tuner, "benchmark_all_configs", lambda *arguments, **options: tuned(*arguments, **options))
    with torch._inductor.utils.fresh_cache():
        for size in (5000, 70_000, 9_000_000):
            x = torch.rand(size, device="cuda")
            torch.testing.assert_close(function(x), x + x)
    tuned.assert_called_once()


@needs_gpu
@pytest.mark.parametrize(("order", "right"), [("alone", True), ("above", True), ("below", False)])
def test_restored(recipe: ModuleType, order: str, right: bool) -> None:
    """A tuner with heuristics below it forgets what to restore."""
    function, x = recipe.compiled(recipe.increment(order)), torch.tensor([100], device="cuda")
    with torch._inductor.utils.fresh_cache():
        assert (function(x).tolist() + function(x).tolist() == [101, 102]) == right


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_gpu)])
def test_gradient(recipe: ModuleType, compiled: bool) -> None:
    """The gradient of the sum of squares of 2x is 8x."""
    x = torch.randn(5000, device=recipe.DEVICE, requires_grad=True)
    (recipe.compiled(recipe.loss) if compiled else recipe.loss)(x).backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


@needs_gpu
@pytest.mark.parametrize("name", ["table", "pair"])
def test_missed_writes_are_wrong(recipe: ModuleType, name: str) -> None:
    """Should PyTorch learn to see these writes, the recipe has to say so."""
    function = getattr(recipe, name)
    eager, compiled = compare(function, recipe.DEVICE, recipe.compiled(function))
    assert eager != compiled


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("add", lambda normal, M, N: (normal(M, N), normal(M, N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sum stored without a mask", "tl.store(out_ptr + offs, x + y, mask=mask)", "tl.store(out_ptr + offs, x + y)"),
    ("a grid rounded down", 'triton.cdiv(out.numel(), meta["BLOCK"])', 'out.numel() // meta["BLOCK"]'),
]
