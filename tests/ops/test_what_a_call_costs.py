"""The recipe What a call costs: its launchers, its ways to make an op, and that rows and clock tell the truth."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import Ask, graphs
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout
from tolerance import assert_within

PATH = "pytorch/what_a_call_costs.py"
KEPT = {"training": "ok", "second_gradient": "refused", "flop_counter": "ok", "tensor_subclass": "ok", "vmap": "ok"}
KEPT |= {"opcheck": "ok", "export": "ok"}
# What becomes of rows without a GPU, where it is not that of KEPT.
OTHERWISE = {
    "define, impl": {"training": "wrong", "second_gradient": "wrong"},
    "define, impl, register_autograd": {"second_gradient": "wrong"},
    "define, impl, own": {"second_gradient": "wrong"},
    "triton_op, impl, Function": {"opcheck": "ValueError"},
}


@pytest.fixture(scope="module")
def made(recipe: ModuleType) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return what each way makes; an op can be defined once."""
    return {way: recipe.make(way) for way in recipe.WAYS}


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@given(M=st.integers(1, 9), N=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_launchers(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, seed: int) -> None:
    """Value and gradient are right for rows of any length, and stored nowhere else."""
    x, g = (Layout("contiguous", seed + k).make((M, N), dtype, recipe.DEVICE) for k in range(2))
    y = guarded(recipe.launch, x)
    expected = torch.softmax(x.double(), -1)
    assert_within(y, expected, expected, roundings=96)
    d = guarded(recipe.launch_backward, g, y)
    g, y = g.double(), y.double()
    terms = y * (g.abs() + (g * y).abs().sum(-1, keepdim=True))
    assert_within(d, y * (g - (g * y).sum(-1, keepdim=True)), terms, roundings=96)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_large_numbers(recipe: ModuleType, dtype: torch.dtype) -> None:
    """The maximum is subtracted, or exp would be infinite."""
    x = torch.tensor([[100.0, 100.0, -torch.inf]], dtype=dtype, device=recipe.DEVICE)
    assert recipe.launch(x).tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_gradient_may_be_expanded(recipe: ModuleType, dtype: torch.dtype) -> None:
    """As that of a sum is, every element of which lies in the same place."""
    x = Layout("contiguous", 0).make((3, 40), dtype, recipe.DEVICE)
    y = recipe.launch(x)
    ones = torch.ones((), dtype=dtype, device=recipe.DEVICE).expand(3, 40)
    torch.testing.assert_close(recipe.launch_backward(ones, y), torch.zeros_like(y))


def test_refuses(recipe: ModuleType) -> None:
    """What the launchers do not take, they name."""
    x = torch.ones(3, 4, device=recipe.DEVICE)
    for bad in (x.double(), x.T):
        with pytest.raises(TypeError, match="launch takes a contiguous float32 tensor"):
            recipe.launch(bad)
    for bad in (x.double(), x[0]):
        with pytest.raises(TypeError, match="launch_backward takes float32 tensors of one shape"):
            recipe.launch_backward(bad, x)


def test_every_way_is_a_softmax(recipe: ModuleType, made: dict[str, Any]) -> None:
    """With the gradient of one, where it has one."""
    x = torch.randn(3, 50, device=recipe.DEVICE, requires_grad=True)
    g = torch.randn_like(x)
    expected = torch.softmax(x, -1)
    (slope,) = torch.autograd.grad(expected, x, g)
    for way, op in made.items():
        y = op(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(op(x.detach()), expected)
        if way not in recipe.NO_GRADIENT:
            torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], slope)
        with torch.no_grad():
            assert not op(x).requires_grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="the recorded run shows it, with the rows for a GPU")
def test_rows(recipe: ModuleType, made: dict[str, Any]) -> None:
    """A PyTorch that behaves differently is noticed, row by row."""
    for way, op in made.items():
        if "launcher" not in way:
            outcomes = {row.__name__: recipe.outcome(row, way, op) for row in recipe.ROWS}
            assert outcomes == KEPT | OTHERWISE.get(way, {}), way


def test_rows_find_what_is_wrong(recipe: ModuleType) -> None:
    """No row says ok of a function that does something else."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.softmax(x, -1)

    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.softmax(x, -1)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return recipe.operators_backward(g.detach(), ctx.saved_tensors[0].detach())

    rows = [recipe.training, recipe.flop_counter, recipe.tensor_subclass, recipe.vmap, recipe.export]
    rows.append(recipe.cpu_fallback)
    assert {recipe.outcome(row, "one", double) for row in rows} == {"wrong"}
    assert recipe.outcome(recipe.training, "one", Forgets.apply) == "ok"
    assert recipe.outcome(recipe.second_gradient, "one", Forgets.apply) == "wrong"
    assert recipe.outcome(recipe.training, "one", lambda x: x.no_such_thing) == "AttributeError"
    assert recipe.outcome(recipe.tensor_subclass, "launcher", double) == "-"


def compiled_graphs(recipe: ModuleType) -> dict[str, list[list[str]]]:
    """Return what torch.compile sees of each way that makes an op, with real launchers."""
    recipe.forward, recipe.backward = recipe.launch, recipe.launch_backward
    x = torch.randn(3, 50, requires_grad=True)
    ways = [way for way in recipe.WAYS if way.startswith(("triton_op", "custom_op"))]
    return {way: graphs(recipe.make(way), x) for way in ways}


def test_compilers_look_into_triton_ops(gallery: Path, on_h100: Ask) -> None:
    """Forward and backward, whatever has been put at a device's key; not into others."""
    (traced_graphs,) = on_h100(gallery / PATH, compiled_graphs)
    for way, both in traced_graphs.items():
        launches = [sum("triton_kernel_wrapper" in name for name in names) for names in both]
        assert launches == ([0, 0] if way.startswith("custom_op") else [1, 1]), way
        named = [any("triton_gallery" in name for name in names) for names in both]
        assert named == ([True, True] if way.startswith("custom_op") else [False, False]), way


def test_clock(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of batches, by turns, without those that warm up."""
    now, order = [0.0], []
    monkeypatch.setattr(recipe.time, "perf_counter", lambda: now[0])

    def call(name: str, seconds: list[float]) -> Callable[[], None]:
        def timed_call() -> None:
            order.append(name)
            now[0] += seconds[order.count(name) - 1]

        return timed_call

    warm = [9.0] * 6
    calls = {"a": call("a", warm + [1e-6, 3e-6] * 5), "b": call("b", warm + [5e-6] * 10)}
    times = recipe.cpu_time(calls, batch=2, turns=5)
    assert times == {"a": pytest.approx(2), "b": pytest.approx(5)}
    assert order == ["a", "a", "b", "b"] * 8


@pytest.mark.parametrize("lines", ["LINES", "LAUNCHES"])
def test_lines_run(recipe: ModuleType, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line that the page measures is one line of Python, and appears with its figure."""
    monkeypatch.setattr(recipe, "cpu_time", lambda calls, batch: dict.fromkeys(calls, 1.5))
    text = getattr(recipe, lines)
    table = recipe.cost_of(text, 500)
    assert [line.rpartition("  ")[0].strip() for line in table.splitlines()] == text.strip().splitlines()


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("stored without a mask", "e / tl.sum(e, axis=0), mask=mask)", "e / tl.sum(e, axis=0))"),
    ("a row padded with zeros", 'mask=mask, other=-float("inf"))', "mask=mask, other=0)"),
    ("a maximum that is left in", "tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)"),
    ("a gradient stored without a mask", "tl.store(d_ptr + row * N + offs, d, mask=mask)", "tl.store(d_ptr + offs, d)"),
    ("half a gradient", "d = y * (g - tl.sum(g * y, axis=0))", "d = y * g"),
    ("a gradient taken for contiguous", "    g = g.contiguous()\n", ""),
]
