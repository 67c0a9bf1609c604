"""The ops of the recipe LayerNorm: value and gradients in any dtype, shape and layout, and the sum under a lock."""

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
    return load_recipe("fusion/layer_norm.py")


def reference(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return value and gradients as float64 autograd has them."""
    *leaves, dy = (t.detach().double() for t in tensors)
    leaves = [t.requires_grad_() for t in leaves]
    y = torch.nn.functional.layer_norm(leaves[0], leaves[1].shape, *leaves[1:], EPS)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def ours(recipe: ModuleType, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return value and gradients as the op has them."""
    *leaves, dy = tensors
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = recipe.layer_norm(*leaves, EPS)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def assert_right(recipe: ModuleType, *tensors: torch.Tensor) -> None:
    """Assert that value and gradients are those of float64 autograd."""
    dtype = tensors[0].dtype
    # Sums in trees or of few terms, of numbers about 1; then one rounding, which the interpreter cuts.
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    rtol = tolerance + 2 * torch.finfo(dtype).eps
    for got, exact in zip(ours(recipe, *tensors), reference(*tensors), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=tolerance)


def assert_close(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    # Sums in trees, which the interpreter may add up term by term.
    assert_within(out, expected, magnitude, roundings=64 + out.shape[-1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(rows=ROWS, N=sizes(64, 600), of=st.tuples(layouts(), layouts(), layouts(), layouts()))
def test_value_and_gradients(
    recipe: ModuleType, dtype: torch.dtype, rows: tuple[int, ...], N: int, of: tuple[Layout, ...]
) -> None:
    """All are right in any layout, and the ops store nowhere else and leave nothing out."""
    dy, x = (layout.make((*rows, N), dtype, recipe.DEVICE) for layout in of[:2])
    weight, bias = (layout.make((N,), dtype, recipe.DEVICE) for layout in of[2:])
    y, stats = guarded(partial(recipe.native_layer_norm, eps=EPS, save=True), x, weight, bias)
    dx, dw, db = guarded(recipe.native_layer_norm_backward, dy, x, weight, stats)
    for a, b in zip(ours(recipe, x, weight, bias, dy), (y, dx, dw, db), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
    x, weight, bias, dy = (t.double() for t in (x, weight, bias, dy))
    if x.numel() == 0:
        assert y.shape == dx.shape == x.shape
        assert not dw.any()
        assert not db.any()
        return
    d = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + EPS)
    # Where a row is nearly constant, or cancels, what is left of x are the roundings of its mean.
    loss = x.abs().amax(-1, keepdim=True) * r
    size = d.abs() * r + loss
    assert_close(y, d * r * weight + bias, (size * weight).abs() + bias.abs())
    g = dy * weight
    c, most = (d * r * g).mean(-1, keepdim=True), (size * g.abs()).mean(-1, keepdim=True)
    dx_size = (g.abs() + g.abs().mean(-1, keepdim=True) + most * size) * r * (1 + loss)
    assert_close(dx, (g - g.mean(-1, keepdim=True) - d * r * c) * r, dx_size)
    assert_close(dw, (dy * d * r).reshape(-1, N).sum(0), (dy.abs() * size).reshape(-1, N).sum(0))
    assert_close(db, dy.reshape(-1, N).sum(0), dy.abs().reshape(-1, N).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_apart(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Several rows for each program, that lie apart, differently in x and in its gradient."""
    rows = 8 * recipe.SMS + 3
    x, weight, bias, dy = (t.detach() for t in recipe.inputs(rows, 1500, dtype=dtype))
    for x_from, dy_from in ((100, 50), (0, 96), (104, 0)):
        wide = torch.cat([x.new_full((rows, x_from), torch.nan), x], 1)[:, x_from:]
        assert x_from == 0 or not wide.is_contiguous()
        grad = torch.cat([dy, dy.new_full((rows, dy_from), torch.nan)], 1)[:, :1500]
        assert_right(recipe, wide, weight, bias, grad)


LONG = [(torch.float16, 16_384), (torch.float32, 8_200), (torch.float16, 40_001), (torch.float64, 9_000)]


@pytest.mark.parametrize(("dtype", "N"), LONG, ids=str)
def test_long_rows(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows that a program does not hold, or holds only in part."""
    assert_right(recipe, *recipe.inputs(3, N, dtype=dtype))


@pytest.mark.parametrize("N", [1000, 40_000], ids="float32-{}".format)
def test_variance_does_not_cancel(recipe: ModuleType, N: int) -> None:
    """A mean of 10,000 beside a variance of 1: E[x * x] has no bit left for it in float32."""
    x = torch.randn(3, N, device=recipe.DEVICE) + 10_000
    one, zero = torch.ones(2, N, device=recipe.DEVICE) * torch.tensor([[1.0], [0.0]], device=recipe.DEVICE)
    out = recipe.layer_norm(x, one, zero, EPS).double()
    expected, _, _, _ = reference(x, one, zero, x)
    # The sum of 10,000 terms is off by some units in its last place, the mean by 1 / 1000 of that; so is every result.
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-2)
    torch.testing.assert_close(out - out.mean(-1, keepdim=True), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=4)
@given(N=st.integers(1, 9), M=st.integers(1, 3))
def test_gradcheck(recipe: ModuleType, N: int, M: int) -> None:
    """The backward is that of the forward."""
    x, weight, bias, _ = recipe.inputs(M, N)
    assert torch.autograd.gradcheck(lambda *leaves: recipe.layer_norm(*leaves, 0.1), (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16, and so is the sum of many."""
    x = torch.full((2, 1000), 300.0, dtype=dtype, device=recipe.DEVICE)
    x[:, ::2] *= -1
    one = torch.ones_like(x[0])
    torch.testing.assert_close(recipe.layer_norm(x, one, 0 * one, EPS), x.sign())


def test_constant_rows(recipe: ModuleType) -> None:
    """A row without a variance becomes the bias, and its gradient is finite."""
    x = torch.full((3, 50), 7.0, device=recipe.DEVICE)
    weight, bias = torch.randn(2, 50, device=recipe.DEVICE)
    y, dx, _, _ = ours(recipe, x, weight, bias, x)
    assert torch.equal(y, bias.expand(3, 50))
    assert dx.isfinite().all()


@pytest.mark.parametrize("N", [37, 20_000])
def test_special_values_stay_in_their_row(recipe: ModuleType, N: int) -> None:
    """As in PyTorch, NaN and infinity make their own row NaN, and no other."""
    x = torch.ones(5, N, device=recipe.DEVICE)
    x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
    one = torch.ones(N, device=recipe.DEVICE)
    expected = torch.nn.functional.layer_norm(x, (N,), one, one, EPS)
    out = recipe.layer_norm(x, one, one, EPS)
    assert torch.equal(out.isnan(), expected.isnan())
    # Rows without a variance: half a rounding of the mean is divided by the root of EPS.
    torch.testing.assert_close(out[::4], expected[::4], rtol=0, atol=2**-24 / EPS**0.5 * 2)


def test_statistics_are_saved_for_a_gradient_alone(recipe: ModuleType) -> None:
    """The result is the same without them, and a backward that needs them says so."""
    x, weight, bias, _ = recipe.inputs(3, 50)
    expected = recipe.layer_norm(x, weight, bias, EPS)
    with torch.no_grad():
        assert torch.equal(recipe.layer_norm(x, weight, bias, EPS), expected)
    y, stats = recipe.native_layer_norm(x, weight, bias, EPS, False)
    assert torch.equal(y, expected)
    assert stats.numel() == 0
    with pytest.raises(ValueError, match="a forward that saved them"):
        y.sum().backward()


def test_statistics_have_no_gradient(recipe: ModuleType) -> None:
    """The op's second result is for the backward only."""
    x, weight, bias, _ = recipe.inputs(3, 5)
    y, stats = recipe.native_layer_norm(x, weight, bias, EPS, True)
    assert y.requires_grad
    assert not stats.requires_grad


def test_gradients_have_the_same_bits_each_time(recipe: ModuleType) -> None:
    """Rows and programs are added up in a fixed order."""
    x, weight, bias, dy = recipe.inputs(40, 300, dtype=torch.float32)
    first = ours(recipe, x, weight, bias, dy)
    for _ in range(3 if recipe.DEVICE.type == "cpu" else 20):
        assert all(torch.equal(a, b) for a, b in zip(first, ours(recipe, x, weight, bias, dy), strict=True))


@pytest.mark.parametrize(("programs", "N"), [(20, 256), (7, 300)])
def test_sum_under_a_lock(recipe: ModuleType, programs: int, N: int) -> None:
    """With its barrier, the lock loses nothing (only a GPU runs many programs at a time)."""
    programs *= 1 if recipe.DEVICE.type == "cpu" else 50
    partial = torch.randint(-9, 9, (programs, N), device=recipe.DEVICE).float()
    total = guarded(lambda partial: recipe.add_under_lock(partial)[0], partial)
    assert torch.equal(total, partial.sum(0))


@pytest.mark.needs_gpu_memory(14)
def test_beyond_int32(recipe: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    for length in (2**12, 2**17):
        x = torch.ones(2**31 // length + 1, length, dtype=torch.float16, device=recipe.DEVICE)
        x[:, ::2] = -1
        x[-1] *= 2
        one = torch.ones_like(x[0])
        y, stats = recipe.native_layer_norm(x, one, 0 * one, EPS, True)
        assert torch.equal(y[-1].sign(), x[-1].sign())
        assert y.abs_().sub_(1).abs_().max() < 1e-3
        dx, _, _ = recipe.native_layer_norm_backward(x, x, one, stats)
        assert dx.abs_().max() < 1e-2
        del x, y, dx


def test_opcheck(recipe: ModuleType) -> None:
    """On a GPU, both ops pass the whole of opcheck."""
    if recipe.DEVICE.type == "cpu":
        pytest.skip("opcheck needs a GPU")
    for length in (100, 16_000, 40_000):
        x, weight, bias, dy = recipe.inputs(3, length, dtype=torch.float32)
        _, stats = recipe.native_layer_norm(x.detach(), weight.detach(), bias.detach(), EPS, True)
        for op, args in (
            (recipe.native_layer_norm, (x, weight, bias, EPS, True)),
            (recipe.native_layer_norm_backward, (dy, x.detach(), weight.detach(), stats)),
        ):
            assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, weight, bias: recipe.layer_norm(x * 2, weight, bias, EPS), fullgraph=True, dynamic=dynamic
    )
    for shape in ((4, 100), (6, 100), (3, 16384), (2, 40_000)):
        *leaves, dy = recipe.inputs(*shape, dtype=torch.float32)
        x, weight, bias = leaves
        out, expected = compiled(*leaves), torch.nn.functional.layer_norm(x * 2, x.shape[-1:], weight, bias, EPS)
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(t, leaves, dy) for t in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x, one = torch.ones(2, 3, device=recipe.DEVICE), torch.ones(3, device=recipe.DEVICE)
    with pytest.raises(TypeError, match="one floating dtype"):
        recipe.layer_norm(x, one.double(), one, EPS)
    with pytest.raises(TypeError, match=r"torch\.int32"):
        recipe.layer_norm(x.int(), one.int(), one.int(), EPS)
    for bad in ((one[:2], one), (one, x), (one, one[:1])):
        with pytest.raises(ValueError, match="takes shapes"):
            recipe.layer_norm(x, *bad, EPS)
    with pytest.raises(ValueError, match="takes shapes"):
        recipe.layer_norm(x[0, 0], one, one, EPS)
    _, stats = recipe.native_layer_norm(x, one, one, EPS, True)
    with pytest.raises(ValueError, match="shape"):
        recipe.native_layer_norm_backward(x[:1], x, one, stats)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("layer_norm", lambda normal, M, N: (normal(M, N), normal(N), normal(N), 1e-5)),
    ("native_layer_norm_backward", lambda normal, M, N: (normal(M, N), normal(M, N), normal(N), normal(2, M))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("differences behind the end of a row", "d = tl.where(block < N, x - mean[:, None], 0)", "d = x - mean[:, None]"),
    ("Welford's columns merged without their count", "squares + k * d * d", "squares + d * d"),
    ("a mean without a gradient", "dx = g - sum_g[:, None] / N - x", "dx = g - x"),
    ("partial sums over each other", "partial_ptr + 2 * pid.to(tl.int64) * N", "partial_ptr + pid.to(tl.int64) * N"),
    ("the sums of one block for all", "sums.sum(0) if turn == 2", "sums[0] if turn == 2"),
    (
        "a norm stored without a mask",
        "tl.store(y_rows + offs_n, y, mask_m & (offs_n < N))",
        "tl.store(y_rows + offs_n, y, mask_m)",
    ),
    ("squares in half precision", "ACC = {torch.float16: tl.float32", "ACC = {torch.float16: tl.float16"),
]
