"""What only a GPU can show of the ops: the same bits each time, every element written, and the whole of opcheck."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")

M, N = 1031, 2053  # ragged, and more programs than run at a time


@dataclass(frozen=True)
class Op:
    """An op of a recipe, and inputs that fit it.

    Attributes:
        path: the recipe's file.
        name: the op's name there.
        inputs: makes the arguments.
    """

    path: str
    name: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers on the GPU."""
    return torch.randn(shape, device="cuda")


OPS = [
    Op("first_steps/vector_add.py", "add", lambda: (normal(M, N), normal(M, N))),
    Op("first_steps/vector_add.py", "add_op", lambda: (normal(M, N), normal(M, N))),
    Op("first_steps/row_sum.py", "sum_row", lambda: (normal(M, N),)),
    Op("first_steps/strides.py", "transpose", lambda: (normal(M, N),)),
    Op("first_steps/launch.py", "exp_series", lambda: (normal(M * N),)),
    Op("first_steps/benchmarking.py", "add", lambda: (normal(M, N), normal(M, N))),
    Op("first_steps/benchmarking.py", "sum_row", lambda: (normal(M, N),)),
    Op("first_steps/autotune.py", "mv", lambda: (normal(M, N), normal(N))),
    Op("pytorch/torch_compile.py", "add", lambda: (normal(M, N), normal(M, N))),
    Op("pytorch/triton_op.py", "silu_mul", lambda: (normal(M, N), normal(M, N))),
    Op("pytorch/subsystems.py", "linear_relu", lambda: (normal(M, 257), normal(N, 257), normal(N))),
    Op("pytorch/which_api.py", "square", lambda: (normal(M, N),)),
    Op("pytorch/aot_inductor.py", "normalize", lambda: (normal(M, N),)),
    Op("pytorch/cuda_graphs.py", "lerp", lambda: (normal(M, N), normal(M, N), torch.full((1,), 0.3, device="cuda"))),
    Op("xla/pytorch_xla.py", "add", lambda: (normal(M, N), normal(M, N))),
    Op("xla/pytorch_xla.py", "attention", lambda: tuple(normal(3, 2, 3, M, 64).half())),
    Op("fusion/softmax.py", "softmax", lambda: (normal(M, N),)),
    Op("fusion/softmax.py", "softmax_backward", lambda: (normal(M, N), normal(M, N))),
    Op("fusion/rms_norm.py", "rms_norm", lambda: (normal(M, N), normal(N), 1e-6)),
    Op("fusion/rms_norm.py", "rms_norm_backward", lambda: (normal(M, N), normal(M, N), normal(N), 1e-6)),
    Op("fusion/layer_norm.py", "layer_norm", lambda: (normal(M, N), normal(N), normal(N), 1e-5)),
    Op(
        "fusion/layer_norm.py",
        "native_layer_norm_backward",
        lambda: (normal(M, N), normal(M, N), normal(N), normal(2, M)),
    ),
    Op("fusion/swiglu.py", "swiglu", lambda: (normal(M, N), normal(M, N))),
    Op("fusion/swiglu.py", "swiglu_backward", lambda: (normal(M, N), normal(M, N), normal(M, N))),
    Op("fusion/swiglu.py", "swiglu_packed", lambda: (normal(M, 2 * N),)),
    Op("fusion/swiglu.py", "swiglu_packed_backward", lambda: (normal(M, N), normal(M, 2 * N))),
    Op(
        "fusion/rope.py",
        "rope",
        lambda: (normal(2, 8, 517, 64), normal(2, 3, 517, 64), normal(517, 32), normal(517, 32)),
    ),
    Op("fusion/dropout.py", "dropout", lambda: (normal(M, N), 0.3, torch.tensor([5], device="cuda"))),
    Op("fusion/cross_entropy.py", "cross_entropy", lambda: (normal(M, N), torch.arange(M, device="cuda"))),
    Op("fusion/cumsum.py", "cumsum", lambda: (normal(M, N),)),
    Op("fusion/cumsum.py", "cumsum", lambda: (normal(7, M * 303),)),  # a chain
    Op("fusion/cumsum.py", "cumsum_backward", lambda: (normal(M, N),)),
    Op("fusion/cumsum.py", "cumsum_backward", lambda: (normal(7, M * 303),)),
    Op("fusion/topk.py", "topk", lambda: (normal(M, N), 8)),
]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.path}:{op.name}")


@pytest.fixture(scope="module")
def recipe_at(load_recipe: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """Return a function that imports each recipe once: a second one would tune again, and end the first one's ops."""
    return functools.cache(load_recipe)


@pytest.fixture
def function(op: Op, recipe_at: Callable[[str], ModuleType]) -> Callable[..., list[torch.Tensor]]:
    """Return the op itself, as a function that returns a list of tensors."""
    function = getattr(recipe_at(op.path), op.name)

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        out = function(*inputs)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    return call


@pytest.fixture
def poison() -> Iterator[None]:
    """Have PyTorch fill all memory that an op allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@each_op
def test_ten_runs_have_the_same_bits(op: Op, function: Callable[..., list[torch.Tensor]]) -> None:
    inputs = op.inputs()
    first = function(*inputs)
    for _ in range(9):
        for again, before in zip(function(*inputs), first, strict=True):
            assert torch.equal(again.flatten().view(torch.uint8), before.flatten().view(torch.uint8))


BEYOND = 2**31 + 5  # elements; the tests of row_sum, strides, vector_add and autotune have their own


@pytest.mark.parametrize(("path", "name", "arguments"), [("launch", "exp_series", 1), ("benchmarking", "add", 2)])
def test_beyond_int32(recipe_at: Callable[[str], ModuleType], path: str, name: str, arguments: int) -> None:
    recipe = recipe_at(f"first_steps/{path}.py")
    x = torch.zeros(BEYOND, device="cuda")
    x[-1] = 1
    out = getattr(recipe, name)(*[x] * arguments)
    few = torch.stack([x[0], x[-1]])
    assert torch.equal(torch.stack([out[0], out[-1]]), getattr(recipe, name)(*[few] * arguments))
    assert (out[1:-1] == out[0]).all()


def test_rows_beyond_int32(recipe_at: Callable[[str], ModuleType]) -> None:
    matrix = torch.zeros(2**19 + 1, 2**12, device="cuda")
    matrix[-1, -1] = 1
    out = recipe_at("first_steps/benchmarking.py").sum_row(matrix)
    assert out[-1] == 1
    assert not out[:-1].any()


@each_op
def test_every_element_is_written(op: Op, function: Callable[..., list[torch.Tensor]], poison: None) -> None:
    for out in function(*op.inputs()):
        assert not out.isnan().any()


def test_unwritten_element_is_found(poison: None) -> None:
    def leaves_one_out(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1]
        return out

    assert leaves_one_out(normal(N)).isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_registered_op_passes_the_whole_opcheck(recipe_at: Callable[[str], ModuleType], dtype: torch.dtype) -> None:
    op = recipe_at("first_steps/vector_add.py").add_op
    x, y = (torch.randn(7, 5, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2))
    assert set(torch.library.opcheck(op, (x, y)).values()) == {"SUCCESS"}
