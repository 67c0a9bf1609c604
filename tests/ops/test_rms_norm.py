"""The ops of the recipe RMSNorm: value and gradients in any dtype, shape and layout."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes
from tolerance import assert_within

EPS = 1e-5
ROWS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/rms_norm.py")


def assert_close(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert_within(out, expected, magnitude, roundings=64)  # sums in trees


def assert_gradients(recipe: ModuleType, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> None:
    """Assert that value and gradients are those of float64 autograd."""
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.nn.functional.rms_norm(wide[0], x.shape[-1:], wide[1], EPS)
    out = recipe.rms_norm(x, weight, EPS)
    exact = torch.autograd.grad(expected, wide, dy.double())
    got = torch.autograd.grad(out, (x, weight), dy)
    tolerance = 1e-12 if x.dtype == torch.float64 else 2e-5
    rtol = tolerance + 2 * torch.finfo(x.dtype).eps
    for a, b in zip((out, *got), (expected, *exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(rows=ROWS, N=sizes(64, 600), of=st.tuples(layouts(), layouts(), layouts()))
def test_value_and_gradients(
    recipe: ModuleType, dtype: torch.dtype, rows: tuple[int, ...], N: int, of: tuple[Layout, Layout, Layout]
) -> None:
    """All three are right in any layout, and the ops store nowhere else."""
    shape = (*rows, N)
    dy, x = (layout.make(shape, dtype, recipe.DEVICE) for layout in of[:2])
    weight = of[2].make((N,), dtype, recipe.DEVICE)
    y = guarded(partial(recipe.rms_norm, eps=EPS), x, weight)
    dx, dw = guarded(partial(recipe.rms_norm_backward, eps=EPS), dy, x, weight)
    pair = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = recipe.rms_norm(*pair, EPS)
    for a, b in zip((out, *torch.autograd.grad(out, pair, dy)), (y, dx, dw), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
    x, weight, dy = x.double(), weight.double(), dy.double()
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) if N else x
    g = dy * weight
    c = (g * x).mean(-1, keepdim=True) * r * r if N else x
    most = (g * x).abs().mean(-1, keepdim=True) * r * r if N else x
    assert_close(y, x * r * weight, (x * r * weight).abs())
    assert_close(dx, (g - c * x) * r, (g.abs() + most * x.abs()) * r)
    terms = (dy * x * r).reshape(-1, N) if x.numel() else torch.zeros(1, N, device=x.device, dtype=x.dtype)
    assert_close(dw, terms.sum(0), terms.abs().sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_apart(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Several rows for each program, that lie apart, differently in x and in its gradient."""
    rows = 8 * recipe.SMS + 3
    x, weight, dy = (t.detach() for t in recipe.inputs(rows, 1500, dtype=dtype))
    for x_from, dy_from in ((100, 50), (0, 96), (104, 0)):
        wide = torch.cat([x.new_full((rows, x_from), torch.nan), x], 1)[:, x_from:].requires_grad_()
        assert x_from == 0 or not wide.is_contiguous()
        grad = torch.cat([dy, dy.new_full((rows, dy_from), torch.nan)], 1)[:, :1500]
        assert_gradients(recipe, wide, weight.clone().requires_grad_(), grad)


@pytest.mark.parametrize(
    ("dtype", "N"), [(torch.float16, 40_001), (torch.float32, 8_000), (torch.float64, 9_000)], ids=str
)
def test_long_rows(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows that no program holds: forward in a loop, backward loaded again or by columns."""
    x, weight, dy = recipe.inputs(3, N, dtype=dtype)
    assert_gradients(recipe, x, weight, dy)


@settings(max_examples=4)
@given(N=st.integers(1, 9), M=st.integers(1, 3))
def test_gradcheck(recipe: ModuleType, N: int, M: int) -> None:
    """The backward is that of the forward."""
    x, weight, _ = recipe.inputs(M, N)
    assert torch.autograd.gradcheck(lambda x, w: recipe.rms_norm(x, w, 0.1), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16."""
    x = torch.full((2, 100), 300.0, dtype=dtype, device=recipe.DEVICE)
    assert torch.equal(recipe.rms_norm(x, torch.ones_like(x[0]), EPS), torch.ones_like(x))


def test_special_values_stay_in_their_row(recipe: ModuleType) -> None:
    """NaN reaches its own row and no other."""
    x = torch.ones(5, 37, device=recipe.DEVICE)
    x[1, 36] = torch.nan
    assert recipe.rms_norm(x, torch.ones(37, device=recipe.DEVICE), EPS).isnan().any(1).tolist() == [
        row == 1 for row in range(5)
    ]


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(recipe: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(2**19 + 1, 2**12, dtype=torch.float16, device=recipe.DEVICE)
    x[-1] = 2
    ones = torch.ones_like(x[0])
    assert recipe.rms_norm(x, ones, EPS).sub_(1).abs_().max() < 1e-3
    dx, _ = recipe.rms_norm_backward(x, x, ones, EPS)
    assert dx.abs_().max() < 1e-2


def test_opcheck(recipe: ModuleType) -> None:
    """On a GPU, both ops pass the whole of opcheck."""
    if recipe.DEVICE.type == "cpu":
        pytest.skip("opcheck needs a GPU")
    for length in (100, 40_000):
        x, weight, dy = recipe.inputs(3, length, dtype=torch.float32)
        for op, args in ((recipe.rms_norm, (x, weight)), (recipe.rms_norm_backward, (dy, x.detach(), weight.detach()))):
            assert set(torch.library.opcheck(op, (*args, EPS)).values()) == {"SUCCESS"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, weight: recipe.rms_norm(x * 2, weight, EPS), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (3, 16384), (2, 40_000)):
        *leaves, dy = recipe.inputs(*shape, dtype=torch.float32)
        x, weight = leaves
        out, expected = compiled(*leaves), torch.nn.functional.rms_norm(x * 2, x.shape[-1:], weight, EPS)
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(t, leaves, dy) for t in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x, weight = torch.ones(2, 3, device=recipe.DEVICE), torch.ones(3, device=recipe.DEVICE)
    with pytest.raises(TypeError, match="one floating dtype"):
        recipe.rms_norm(x, weight.double(), EPS)
    with pytest.raises(TypeError, match=r"torch\.int32"):
        recipe.rms_norm(x.int(), weight.int(), EPS)
    for bad in (weight[:2], x):
        with pytest.raises(ValueError, match="takes shapes"):
            recipe.rms_norm(x, bad, EPS)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("rms_norm", lambda normal, M, N: (normal(M, N), normal(N), 1e-6)),
    ("rms_norm_backward", lambda normal, M, N: (normal(M, N), normal(M, N), normal(N), 1e-6)),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "a mean over the block",
        "axis=1, keep_dims=True) / N + EPS)\n        tl.store",
        "axis=1, keep_dims=True) / BLOCK_N + EPS)\n        tl.store",
    ),
    (
        "dx stored without a mask",
        "tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)",
        "tl.store(dx_ptr + offs_m * N + offs_n, dx)",
    ),
    ("a weight gradient of the last rows", "            dw += dy * (x * r)\n", "            dw = dy * (x * r)\n"),
    (
        "half an accumulator, normed",
        "torch.float16: tl.float32, torch.bfloat16",
        "torch.float16: tl.float16, torch.bfloat16",
    ),
    ("dy read with the stride of x", "dy_ptr + offs_m * stride_dym", "dy_ptr + offs_m * stride_xm"),
]
