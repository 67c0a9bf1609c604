"""The recipe Kernels in torch.compile: its op, and what it says about graphs, tuners, sizes and writes."""

import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import Layout, layouts, shapes

BLOCK = 1024  # of the recipe
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


@pytest.fixture
def vectors(recipe: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors that share no memory."""
    return torch.randn(5000, device=recipe.DEVICE), torch.randn(5000, device=recipe.DEVICE)


def rewritten(recipe: ModuleType, function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.Graph:
    """Return the one graph of AOTAutograd."""
    _, (graph,) = recipe.capture(function, inputs)
    return graph


def operators(graph: torch.fx.Graph) -> list[str]:
    """Return the names of what a graph calls, in order."""
    return [str(node.target).rpartition("aten.")[2] for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(shape=shapes(BLOCK, 4 * BLOCK), of_x=layouts(), of_y=layouts())
def test_floats(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_x: Layout, of_y: Layout) -> None:
    """The sum is the correctly rounded one, so the tolerance is zero."""
    x, y = of_x.make(shape, dtype, recipe.DEVICE), of_y.make(shape, dtype, recipe.DEVICE)
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


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    for other in (x[0], x.to("meta")):
        with pytest.raises(ValueError, match="one shape on one"):
            recipe.add(x, other)
    with pytest.raises(ValueError, match="one shape on one"):
        recipe.add(x.to("meta"), x.to("meta"))
    with pytest.raises(TypeError, match=r"torch\.float32, torch\.float64"):
        recipe.add(x, x.double())
    with pytest.raises(TypeError, match=r"not torch\.float16"):
        recipe.add(x.half(), x.half())
    with pytest.raises(ValueError, match="no backward"):
        recipe.add(x, x.clone().requires_grad_())
    with torch.no_grad():
        recipe.add(x, x.clone().requires_grad_())


def test_one_graph_with_the_launch_as_a_node(recipe: ModuleType, vectors: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The chain is one graph, the operators stand around the launch, and nothing but the output is written."""
    torch._dynamo.utils.counters.clear()
    (recorded,), (graph,) = recipe.capture(recipe.chain, vectors)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert "triton_kernel_wrapper_mutation" in str(recorded)
    names = operators(graph)
    (wall,) = (i for i, name in enumerate(names) if "triton_kernel" in name)
    assert {"relu.default", "mul.Tensor"} < set(names[:wall])
    assert {"sigmoid.default", "mul.Tensor"} < set(names[wall:])
    (launch,) = recipe.launches(graph)
    assert launch["tensors_to_clone"] == ["out_ptr"]
    assert launch["grid"] == [(5, 1, 1)]


def test_kernel_in_place_is_copied_back(recipe: ModuleType, vectors: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A graph with a write to an input ends with a copy to that input."""
    graph = rewritten(recipe, recipe.chain_, *vectors)
    assert operators(graph)[-1] == "copy_.default"
    copy, first = list(graph.nodes)[-2], next(iter(graph.nodes))
    assert copy.args[0] is first


@pytest.mark.parametrize(
    ("name", "written"), [("assembly", ["x_ptr", "y_ptr"]), ("table", None), ("pair", ["x_ptr", "y_ptr"])]
)
def test_what_is_taken_for_written(recipe: ModuleType, name: str, written: list[str] | None) -> None:
    """Assembly writes everything; a kernel that writes through a table of addresses is removed."""
    x = torch.zeros(1, device=recipe.DEVICE)
    graph = rewritten(recipe, recipe.then_read(recipe.WRITES[name]), x, recipe.address(x))
    assert [launch["tensors_to_clone"] for launch in recipe.launches(graph)] == ([written] if written else [])


@pytest.mark.filterwarnings("ignore:warmup, rep:DeprecationWarning")
def test_answers_to_the_arguments_of_autotune(recipe: ModuleType, vectors: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Pruning is obeyed, hooks and CUDA graphs are refused, the rest is captured."""
    configs = {recipe.PRUNE: 2, recipe.MODEL: 1}
    with recipe.pretend():
        for choice in recipe.CHOICES:
            options = eval(f"dict({choice})", vars(recipe))
            function = recipe.add_with(recipe.tuned(recipe.add_kernel, **options))
            if "hook" in choice or "cuda_graph" in choice:
                with pytest.raises(Exception, match=r"feature: .*support"):
                    recipe.capture(function, vectors)
            else:
                (launch,) = recipe.launches(rewritten(recipe, function, *vectors))
                assert len(launch["grid"]) == configs.get(choice, len(recipe.CONFIGS)), choice


@pytest.mark.parametrize("above", [False, True])
def test_heuristics(recipe: ModuleType, vectors: tuple[torch.Tensor, torch.Tensor], above: bool) -> None:
    """A heuristic's block reaches the grid, whichever side of the tuner it is on."""
    half = recipe.triton.heuristics({"BLOCK": lambda args: 512})
    warps = [recipe.triton.Config({}, num_warps=n) for n in (1, 2)]
    with recipe.pretend():
        kernel = recipe.add_kernel
        kernel = half(recipe.tuned(kernel, warps)) if above else recipe.tuned(half(kernel), warps)
        (launch,) = recipe.launches(rewritten(recipe, recipe.add_with(kernel), *vectors))
    assert launch["grid"] == [(10, 1, 1)] * 2


def test_graphs_for_four_sizes(recipe: ModuleType) -> None:
    """Symbols for sizes save graphs, unless a constexpr is made from a size."""
    counts = {"default": {}, "dynamic=False": {"dynamic": False}, "dynamic=True": {"dynamic": True}}
    counts["mark_dynamic=True"] = {"mark_dynamic": True}
    graph_counts = {name: recipe.count_graphs(recipe.chain, **options) for name, options in counts.items()}
    assert graph_counts == {"default": 2, "dynamic=False": 4, "dynamic=True": 1, "mark_dynamic=True": 1}
    for name in ("dynamic=True", "mark_dynamic=True"):
        assert recipe.count_graphs(recipe.by_size, **counts[name]) == 3


def test_too_many_graphs_are_an_error(recipe: ModuleType) -> None:
    """What `by_size` does with many sizes ends in an error, not in silent eager calls."""
    sizes = [2**k + 1 for k in range(2, 14)]
    calls = [(torch.rand(n, device=recipe.DEVICE), torch.rand(n, device=recipe.DEVICE)) for n in sizes]
    with pytest.raises(Exception, match="fullgraph=True"):
        recipe.capture(recipe.by_size, *calls)


def test_pretending_ends(recipe: ModuleType) -> None:
    """After a capture, and after one that fails, the kernels run as before."""
    before = recipe.add_kernel, torch.utils._triton.has_triton, recipe.triton.runtime.driver._active

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    x = torch.ones(3, device=recipe.DEVICE)
    recipe.capture(recipe.chain, (x, x))
    with pytest.raises(Exception, match=r"graph_break|graph break"):
        recipe.capture(breaks, (x,))
    assert before == (recipe.add_kernel, torch.utils._triton.has_triton, recipe.triton.runtime.driver._active)
    assert recipe.add(x, x).tolist() == [2, 2, 2]


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
    row = recipe.compare(lambda x, table: op(x), backend="aot_eager")
    assert row["eager"] == "returns 101, x is 1"
    assert row["compiled"] == ("returns 101, x is 1" if declared else "returns 100, x is 0")
    inputs = (torch.zeros(1, device=recipe.DEVICE),)
    if declared:
        torch.library.opcheck(op, inputs, test_utils="test_schema")
    else:
        with pytest.raises(Exception, match="not defined as mutable but was mutated"):
            torch.library.opcheck(op, inputs, test_utils="test_schema")


def test_an_address_does_not_follow_a_copy(recipe: ModuleType, declare: Callable[..., Any]) -> None:
    """A declared op that is handed the table is wrong all the same, and `test_schema` does not notice."""

    def bump(x: torch.Tensor, table: torch.Tensor) -> None:
        recipe.table_kernel[(1,)](table)

    op = declare(bump, lambda x, table: None, "x")
    row = recipe.compare(op, backend="aot_eager")
    assert row["eager"] != row["compiled"]
    x = torch.zeros(1, device=recipe.DEVICE)
    torch.library.opcheck(op, (x, recipe.address(x)), test_utils="test_schema")


@needs_gpu
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_compiled_chain(recipe: ModuleType, dynamic: bool | None) -> None:
    """Compiled and eager agree, for sizes on both sides of a block."""
    function = recipe.compiled(recipe.chain, dynamic=dynamic)
    for size in (2, 1023, 1024, 1025, 70_001):
        x, y = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
        torch.testing.assert_close(function(x, y), recipe.chain(x, y))


@needs_gpu
@pytest.mark.parametrize("name", ["table", "pair"])
def test_missed_writes_are_wrong(recipe: ModuleType, name: str) -> None:
    """Should PyTorch learn to see these writes, the recipe has to say so."""
    row = recipe.compare(recipe.WRITES[name])
    assert row["eager"] != row["compiled"]


@pytest.mark.skipif(not (torch.cuda.is_available() or shutil.which("g++")), reason="Inductor needs a GPU or g++")
def test_a_used_result_does_not_save_an_undeclared_write(recipe: ModuleType, declare: Callable[..., Any]) -> None:
    """The second answer: the op runs, and reads behind it are stale."""

    def bump(x: torch.Tensor) -> torch.Tensor:
        recipe.table_kernel[(1,)](recipe.address(x))
        return x.sum()

    op = declare(bump, lambda x: x.new_empty(()))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = x * 2
        total = op(x)
        return total, x * 2 - old

    def run(function: Callable[..., Any]) -> list[float]:
        x = torch.zeros(1, device=recipe.DEVICE)
        total, difference = function(x)
        return [total.item(), difference.item(), x.item()]

    assert run(function) == [1, 2, 1]
    assert run(recipe.compiled(function)) == [1, 0, 1]


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("add", lambda normal, M, N: (normal(M, N), normal(M, N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sum stored without a mask", "tl.store(out_ptr + offs, x + y, mask=mask)", "tl.store(out_ptr + offs, x + y)"),
    ("a grid rounded down", 'triton.cdiv(out.numel(), meta["BLOCK"])', 'out.numel() // meta["BLOCK"]'),
]
