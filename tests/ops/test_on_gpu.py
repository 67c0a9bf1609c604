"""What only a GPU can show of ops that lessons keep: the same bits each time, and every element written.

They stand in the tests of their recipe, as `OPS`, each with a function that makes its inputs. The contract has those
that recipes hand over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from collect_cases import collect, runs_here

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")

M, N = 1031, 2053  # ragged, and more programs than run at a time


@dataclass(frozen=True)
class Op:
    """An op of a recipe, and inputs that fit it.

    Attributes:
        recipe: `section/name`.
        name: the op's name there.
        make: makes the arguments, given what makes random numbers of a shape, and two sizes.
    """

    recipe: str
    name: str
    make: Callable[[Callable[..., torch.Tensor], int, int], tuple[torch.Tensor, ...]]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return arguments for it."""
        return self.make(normal, M, N)


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers on the GPU."""
    return torch.randn(shape, device="cuda")


OPS = [Op(recipe, *entry) for recipe, entry in collect("OPS") if runs_here(recipe)]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.recipe}:{op.name}")


@pytest.fixture
def function(op: Op, recipe_at: Callable[[str], ModuleType]) -> Callable[..., list[torch.Tensor]]:
    """Return the op itself, as a function that returns a list of tensors."""
    function = getattr(recipe_at(f"{op.recipe}.py"), op.name)

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        out = function(*inputs)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    return call


@each_op
def test_ten_runs_have_the_same_bits(op: Op, function: Callable[..., list[torch.Tensor]]) -> None:
    inputs = op.inputs()
    first = function(*inputs)
    for _ in range(9):
        for again, before in zip(function(*inputs), first, strict=True):
            assert torch.equal(again.flatten().view(torch.uint8), before.flatten().view(torch.uint8))


BEYOND = 2**31 + 5  # elements; the tests of row_sum, strides and autotune have their own


@pytest.mark.needs_gpu_memory(20)
@pytest.mark.parametrize(("path", "name", "arguments"), [("launch", "exp_series", 1), ("benchmarking", "add", 2)])
def test_beyond_int32(recipe_at: Callable[[str], ModuleType], path: str, name: str, arguments: int) -> None:
    recipe = recipe_at(f"first_steps/{path}.py")
    x = torch.zeros(BEYOND, device="cuda")
    x[-1] = 1
    out = getattr(recipe, name)(*[x] * arguments)
    few = torch.stack([x[0], x[-1]])
    assert torch.equal(torch.stack([out[0], out[-1]]), getattr(recipe, name)(*[few] * arguments))
    assert (out[1:-1] == out[0]).all()


@pytest.mark.needs_gpu_memory(9)
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
