"""The ops of the recipe Norms of long rows: values and gradients in any dtype, shape and layout, with every plan."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
each_norm = pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])

EPS = 1e-5
LEADS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])
CACHES = st.sampled_from([2**24, 2**20, 2**14, 0])  # from four programs for each multiprocessor to one


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/norms_long.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/norms_long.py")


@contextmanager
def cached(taken: ModuleType, cache: int, processors: int = 4) -> Iterator[None]:
    """Have the launcher decide as if L2 were of another size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_norms_long_gpu", lambda device: (processors, cache))
        yield


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return a random tensor of each shape."""
    return [Layout("contiguous", k).make(shape, dtype, DEVICE) for k, shape in enumerate(shapes)]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return what PyTorch makes of a row."""
    if bias is None:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def assert_right(
    taken: ModuleType, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dy: torch.Tensor
) -> None:
    """Assert that value and gradients are right, and the ops store nowhere else and leave nothing out."""
    center = bias is not None
    given = (x, weight, bias) if center else (x, weight)
    y, stats = guarded(lambda x, weight, bias=None: taken.norms_long_with_stats(x, weight, bias, EPS), *given)
    dx, vectors = guarded(taken.norms_long_backward, dy, x, weight, stats)
    assert all(out.dtype == x.dtype and out.is_contiguous() for out in (y, dx, vectors))
    assert stats.dtype == torch.promote_types(x.dtype, torch.float32)
    assert vectors.shape == (1 + center, *weight.shape)
    x, weight, dy = (t.double() for t in (x, weight, dy))
    assert y.shape == dx.shape == x.shape
    if x.numel() == 0:
        assert not vectors.any()
        return
    N = x.shape[-1]
    mean = x.mean(-1, keepdim=True) if center else torch.zeros_like(x[..., :1])
    d = x - mean
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + EPS)
    # Where a row is nearly constant, or cancels, what is left of x are the roundings of its mean.
    loss = x.abs().amax(-1, keepdim=True) * r * center
    size = d.abs() * r + loss
    # Sums in trees, which the interpreter may add up term by term
    close = partial(assert_within, roundings=64 + N)
    close(stats[0], r.flatten(), (r * (1 + loss)).flatten())
    if center:
        close(stats[1], mean.flatten(), x.abs().amax(-1).flatten())
    shift = torch.zeros_like(weight) if bias is None else bias.double()
    close(y, d * r * weight + shift, (size * weight).abs() + shift.abs())
    g = dy * weight
    c, most = (d * r * g).mean(-1, keepdim=True), (size * g.abs()).mean(-1, keepdim=True)
    dx_size = (g.abs() + g.abs().mean(-1, keepdim=True) + most * size) * r * (1 + loss)
    close(dx, (g - g.mean(-1, keepdim=True) * center - d * r * c) * r, dx_size)
    close = partial(assert_within, roundings=64 + N + x.numel() // N)
    close(vectors[0], (dy * d * r).reshape(-1, N).sum(0), (dy.abs() * size).reshape(-1, N).sum(0))
    if center:
        close(vectors[1], dy.reshape(-1, N).sum(0), dy.abs().reshape(-1, N).sum(0))


@each_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=10)
@given(lead=LEADS, N=sizes(1024, 4500), of=st.tuples(layouts(), layouts(), layouts(), layouts()), cache=CACHES)
@example(lead=(5,), N=1000, of=tuple(Layout("contiguous", k) for k in range(4)), cache=2**24)
def test_value_and_gradients(
    taken: ModuleType,
    dtype: torch.dtype,
    center: bool,
    lead: tuple[int, ...],
    N: int,
    of: tuple[Layout, ...],
    cache: int,
) -> None:
    """They are right for any length, layout and plan."""
    x, dy = (layout.make((*lead, N), dtype, DEVICE) for layout in of[:2])
    weight, bias = (layout.make((N,), dtype, DEVICE) for layout in of[2:])
    with cached(taken, cache):
        assert_right(taken, x, weight, bias if center else None, dy)


@each_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_autograd(taken: ModuleType, dtype: torch.dtype, center: bool) -> None:
    """Autograd hands each input the gradient that the backward op has."""
    x, dy, weight, bias = make((3, 4, 50), (3, 4, 50), (50,), (50,), dtype=dtype)
    given = (x, weight, bias) if center else (x, weight)
    _, stats = taken.norms_long_with_stats(x, weight, bias if center else None, EPS)
    dx, vectors = taken.norms_long_backward(dy, x, weight, stats)
    leaves = [t.requires_grad_() for t in given]
    norm = taken.norms_long_layer_norm if center else taken.norms_long_rms_norm
    y = norm(*leaves, EPS)
    torch.testing.assert_close(y, reference(*leaves, *[None] * (not center)), rtol=1e-2, atol=1e-2)
    got = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(*pair) for pair in zip(got, (dx, *vectors), strict=True))


# Lengths of every small block, those beside them, whole blocks of the plans, and long rows of all kinds.
LENGTHS = [1, 2, 3, 8, 100, 257, 1024, 1025, 4096, 8192, 8200, 16_384, 20_001, 32_768, 50_176]


@each_norm
@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int, center: bool) -> None:
    """Rows of all lengths, more of them than a tile has, with a gap between them."""
    rows = 2 if N > 10_000 else 5
    # Rows of an odd length begin, too, at addresses that 16 divides.
    width = -(-N // 8) * 8
    x, dy, weight, bias = make((rows, width + 8), (rows, width + 8), (N,), (N,), dtype=dtype)
    assert_right(taken, x[:, 8 : N + 8], weight, bias if center else None, dy[:, 8 : N + 8])


@each_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_blocks_of_a_row_differ(taken: ModuleType, dtype: torch.dtype, center: bool) -> None:
    """A gradient that is not 0 in the first half of a row alone: every sum is of all its blocks."""
    x, dy, weight, bias = make((2, 20_000), (2, 20_000), (20_000,), (20_000,), dtype=dtype)
    dy[:, :10_000] = 1 + weight[:10_000]
    dy[:, 10_000:] = 0
    assert_right(taken, x, weight, bias if center else None, dy)


@each_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_apart(taken: ModuleType, dtype: torch.dtype, center: bool) -> None:
    """Rows that lie apart, differently in x and in its gradient, and NaN between them."""
    rows = 9
    x, dy, weight, bias = make((rows, 1500), (rows, 1500), (1500,), (1500,), dtype=dtype)
    for x_from, dy_from in ((100, 50), (0, 96), (104, 0)):
        wide = torch.cat([x.new_full((rows, x_from), torch.nan), x], 1)[:, x_from:]
        assert x_from == 0 or not wide.is_contiguous()
        grad = torch.cat([dy, dy.new_full((rows, dy_from), torch.nan)], 1)[:, :1500]
        assert_right(taken, wide, weight, bias if center else None, grad)


@each_norm
@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_many_tiles_for_each_program(taken: ModuleType, dtype: torch.dtype, center: bool) -> None:
    """Programs go on to further tiles, and sum their gradients with the same bits each time."""
    with cached(taken, 2**14, processors=2):
        x, dy, weight, bias = make((45, 1500), (45, 1500), (1500,), (1500,), dtype=dtype)
        grid, tile = taken._norms_long_plan_weight(x)
        assert (*grid, tile["BLOCK_M"]) == (3, 3, 4)
        assert_right(taken, x, weight, bias if center else None, dy)
        _, stats = taken.norms_long_with_stats(x, weight, bias if center else None, EPS)
        first, *others = (
            taken.norms_long_backward(dy, x, weight, stats) for _ in range(20 if DEVICE.type == "cuda" else 3)
        )
    assert all(torch.equal(*pair) for again in others for pair in zip(first, again, strict=True))


def test_plans(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers ask for what the page says, by the part of the cache that a row on each multiprocessor takes."""
    for dtype in FLOATS:
        with cached(taken, 50 * 2**20, processors=132):
            for N in (20_000, 32_768, 50_176, 10**6):
                for tensors, center in itertools.product((1, 2), (True, False)):
                    x = torch.empty(10**6, N, dtype=dtype, device="meta")
                    plan = taken._norms_long_plan(x, N, tensors, center)
                    part = tensors * N * dtype.itemsize * 132 / (50 * 2**20)
                    few = center and tensors == 2
                    assert plan["num_warps"] == (16 if few or part <= 0.15 else 32)
                    bytes_ = 2**13 if part <= 0.15 or (few and part <= 0.3) else 2**14 if part <= 0.3 else 2**15
                    assert plan["BLOCK_N"] == bytes_ // dtype.itemsize
            groups = -(-20_000 // (2048 // dtype.itemsize))
            assert taken._norms_long_plan_weight(x[:, :20_000])[0] == (groups, -(-4 * 132 // groups))
            assert taken._norms_long_plan_weight(x[:9, :20_000])[0] == (groups, 3)
            assert taken._norms_long_plan_weight(x)[0][1] == 1
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert taken._norms_long_plan(x, 10**6, 1, False)["num_warps"] == 16
    rows = torch.empty(2, 1001, dtype=torch.bfloat16, device="meta")
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        with cached(taken, 2**10):
            plan = taken._norms_long_plan(rows[:, :N], stride, 1, False)
        assert (plan["VEC"], plan["num_warps"]) == (vec, 32 if vec == 8 else 16)


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 3000, 20_001):
        x, w, b = (t.to(recipe.DEVICE) for t in make((3, N), (N,), (N,)))
        for name, step in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            if "backward" in name:
                step(x, w, b, torch.ones_like(x))
                continue
            step(x, w, b, y)
            expected = reference(x, w, None if "RMSNorm" in name else b)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y = torch.full_like(x, torch.nan)
    recipe.forward(x, w, b, y, num_warps=8, BLOCK_N=512)
    torch.testing.assert_close(y, reference(x, w, b), rtol=1e-5, atol=1e-5)
    assert recipe.statements(recipe.blocks_kernel) <= 25
    normed, read = recipe.layer_norm_blocks(x, 4096)
    torch.testing.assert_close(normed, reference(x, 0 * w + 1, 0 * b), rtol=1e-5, atol=1e-5)
    assert read == 2 * x.nbytes


@pytest.mark.parametrize("N", [1000, 20_000, 200_000], ids="float32-{}".format)
def test_variance_does_not_cancel(taken: ModuleType, N: int) -> None:
    """A mean of 10,000 beside a variance of 1: E[x * x] has no bit left for it in float32, a mean too few."""
    x = torch.randn(3, N, generator=torch.Generator().manual_seed(0)).to(DEVICE) + 10_000
    one, zero = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)
    out = taken.norms_long_layer_norm(x, one, zero, EPS).double()
    expected = torch.nn.functional.layer_norm(x.double(), (N,), eps=EPS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_means_of_columns_differ(taken: ModuleType) -> None:
    """A row that repeats itself each block: all of its variance lies between the columns (float32)."""
    plan, N = taken._norms_long_plan(torch.empty(2, 20_000, device="meta"), 20_000, 1, False), 20_000
    column = torch.arange(N, device=DEVICE) % plan["BLOCK_N"]
    x = column.float().expand(2, N)
    one, zero = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)
    expected = torch.nn.functional.layer_norm(x.double(), (N,), eps=EPS).float()
    torch.testing.assert_close(taken.norms_long_layer_norm(x, one, zero, EPS), expected, rtol=1e-5, atol=1e-5)


@each_norm
@settings(max_examples=4)
@given(N=st.integers(1, 9), M=st.integers(1, 3))
def test_gradcheck(taken: ModuleType, center: bool, N: int, M: int) -> None:
    """Differences agree with the gradients."""
    leaves = [t.requires_grad_() for t in make((M, N), *[(N,)] * (1 + center), dtype=torch.float64)]
    norm = taken.norms_long_layer_norm if center else taken.norms_long_rms_norm
    assert torch.autograd.gradcheck(lambda *leaves: norm(*leaves, 0.1), leaves)


@each_norm
def test_gradient_has_no_gradient(taken: ModuleType, center: bool) -> None:
    """A second derivative is refused, not zero."""
    x, *vectors = make((3, 7), *[(7,)] * (1 + center), dtype=torch.float64)
    norm = taken.norms_long_layer_norm if center else taken.norms_long_rms_norm
    y = norm(x.requires_grad_(), *vectors, EPS)
    (d,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


def test_statistics_have_no_gradient(taken: ModuleType) -> None:
    """The op's second result is for the backward only."""
    x, weight, bias = make((3, 5), (5,), (5,))
    y, stats = taken.norms_long_with_stats(x.requires_grad_(), weight, bias, EPS)
    assert y.requires_grad
    assert not stats.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16, and so is the sum of many."""
    x = torch.full((2, 20_000), 300.0, dtype=dtype, device=DEVICE)
    x[:, ::2] *= -1
    one = torch.ones_like(x[0])
    torch.testing.assert_close(taken.norms_long_layer_norm(x, one, 0 * one, EPS), x.sign())
    torch.testing.assert_close(taken.norms_long_rms_norm(x, one, EPS), x.sign())
    x = 301 + x.sign()
    x[:, 0] = 0  # The sum of the differences from it is infinite in float16.
    expected = torch.nn.functional.layer_norm(x.double(), one.shape, eps=EPS).to(dtype)
    torch.testing.assert_close(taken.norms_long_layer_norm(x, one, 0 * one, EPS), expected, rtol=1e-3, atol=1e-3)


def test_constant_rows(taken: ModuleType) -> None:
    """A row without a variance becomes the bias, and its gradient is finite."""
    x = torch.full((3, 20_001), 7.0, device=DEVICE)
    leaves = x.requires_grad_(), *make((20_001,), (20_001,))
    y = taken.norms_long_layer_norm(*leaves, EPS)
    assert torch.equal(y, leaves[2].expand_as(y))
    assert torch.autograd.grad(y, x, x)[0].isfinite().all()


@each_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [37, 20_001])
def test_special_values_stay_in_their_row(taken: ModuleType, N: int, dtype: torch.dtype, center: bool) -> None:
    """NaN and infinity do to their own row what they do in PyTorch, and nothing to another."""
    x = torch.ones(5, N, dtype=dtype, device=DEVICE)
    x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
    one = torch.ones(N, dtype=dtype, device=DEVICE)
    bias = one if center else None
    # On a CPU: PyTorch's own kernel for a GPU makes a whole row of RMSNorm NaN where one element is infinite.
    expected = reference(x.cpu(), one.cpu(), bias if bias is None else bias.cpu()).to(DEVICE)
    out, stats = taken.norms_long_with_stats(x, one, bias, EPS)
    assert torch.equal(out.isnan(), expected.isnan())
    # Rows without a variance: roundings of the mean are divided by the root of EPS.
    torch.testing.assert_close(out[::4], expected[::4], rtol=1e-2, atol=2**-24 / EPS**0.5 * 8)
    dx, _ = taken.norms_long_backward(torch.ones_like(x), x, one, stats)
    assert dx[::4].isfinite().all()


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x, one = torch.ones(2, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    layer_norm, rms_norm = taken.norms_long_layer_norm, taken.norms_long_rms_norm
    with pytest.raises(TypeError, match=r"^norms_long_layer_norm takes one float dtype .*float64"):
        layer_norm(x, one.double(), one, EPS)
    with pytest.raises(TypeError, match=r"^norms_long_layer_norm takes .*float16"):
        layer_norm(x, one, one.half(), EPS)
    with pytest.raises(TypeError, match=r"^norms_long_layer_norm takes a bias, not None"):
        layer_norm(x, one, None, EPS)
    with pytest.raises(TypeError, match=r"^norms_long_rms_norm takes .*torch\.int32"):
        rms_norm(x.int(), one.int(), EPS)
    with pytest.raises(TypeError, match=r"^norms_long_rms_norm takes one float dtype and device, not .*, None\]"):
        rms_norm(x, None, EPS)
    with pytest.raises(TypeError, match=r"^norms_long_layer_norm takes one float dtype and device, not .*None, \("):
        layer_norm(x, None, one, EPS)
    for bad in ((one[:2], one), (one, x), (one, one[:1]), (one[0], one)):
        with pytest.raises(
            ValueError, match=r"^norms_long_layer_norm takes shapes \(\.\.\., N\) and \(N,\), not \[\(2"
        ):
            layer_norm(x, *bad, EPS)
    with pytest.raises(ValueError, match=r"^norms_long_rms_norm takes shapes "):
        rms_norm(x, one[:2], EPS)
    with pytest.raises(ValueError, match=r"^norms_long_rms_norm takes shapes "):
        rms_norm(x[0, 0], one, EPS)
    _, stats = taken.norms_long_with_stats(x, one, one, EPS)
    with pytest.raises(ValueError, match=r"^norms_long_backward takes shapes "):
        taken.norms_long_backward(x[:1], x, one, stats)
    for bad in (stats[:, :1], stats[0], stats[:0], torch.cat([stats, stats])):
        with pytest.raises(ValueError, match=r"^norms_long_backward takes the stats .*"):
            taken.norms_long_backward(x, x, one, bad)
    with pytest.raises(TypeError, match=r"^norms_long_backward takes .*float16"):
        taken.norms_long_backward(x.half(), x, one, stats)
    row = one[0].expand(2**30 + 1)
    with pytest.raises(ValueError, match=r"^norms_long_rms_norm takes rows of up to 2\*\*30 elements, not 1073741825"):
        rms_norm(row, row, EPS)


@each_norm
@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launchers_are_what_a_call_reaches(taken: ModuleType, dtype: torch.dtype, center: bool) -> None:
    """On a GPU, without the triton_op in between."""
    x, dy, stats = make((3, 40), (3, 40), (1 + center, 3), dtype=dtype)
    for op, inputs in (
        (taken.norms_long_with_stats, (x, x[0], x[1] if center else None, EPS)),
        (taken.norms_long_backward, (dy, x, x[0], stats)),
    ):
        out, expected = at_cuda(op, *inputs), op(*inputs)
        assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(2, 5, device=DEVICE)
    with Guard() as guard:
        y, stats = taken.norms_long_with_stats(x, x[0], x[0], EPS)
        dx, _ = taken.norms_long_backward(x, x, x[0], stats)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in (y, stats, dx)} <= guards


@pytest.mark.needs_gpu_memory(14)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (33, 2**26)])
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(rows, N, dtype=torch.float16, device=DEVICE)
    x[:, ::2] = -1
    x[-1] *= 2
    one = torch.ones_like(x[0])
    y, stats = taken.norms_long_with_stats(x, one, 0 * one, EPS)
    assert torch.equal(y[-1].sign(), x[-1].sign())
    assert y.abs_().sub_(1).abs_().max() < 1e-3
    del y
    dx, _ = taken.norms_long_backward(x, x, one, stats)
    assert dx.abs_().max() < 1e-2


@needs_a_gpu
@each_norm
@pytest.mark.parametrize("N", [100, 20_000])
def test_opcheck(taken: ModuleType, N: int, center: bool) -> None:
    """Both ops pass the whole of opcheck."""
    x, dy, weight, bias = make((3, N), (3, N), (N,), (N,))
    _, stats = taken.norms_long_with_stats(x, weight, bias if center else None, EPS)
    x_leaf, weight_leaf, bias_leaf = (t.clone().requires_grad_() for t in (x, weight, bias))
    for op, inputs in (
        (taken.norms_long_with_stats, (x_leaf, weight_leaf, bias_leaf if center else None, EPS)),
        (taken.norms_long_backward, (dy, x, weight, stats)),
    ):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@each_norm
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool, center: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    norm = taken.norms_long_layer_norm if center else taken.norms_long_rms_norm
    compiled = torch.compile(lambda x, *vectors: norm(x * 2, *vectors, EPS), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 20_000), (6, 20_000), (2, 50_001)):
        *leaves, dy = make(shape, *[shape[-1:]] * (1 + center), shape)
        leaves = [t.requires_grad_() for t in leaves]
        x, *vectors = leaves
        out, expected = compiled(*leaves), reference(x * 2, *vectors, *[None] * (not center))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        for a, b in zip(*(torch.autograd.grad(t, leaves, dy) for t in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    x, weight, bias = (t.to("cuda:1") for t in make((5, 100), (100,), (100,)))
    y = taken.norms_long_layer_norm(x.requires_grad_(), weight, bias, EPS)
    torch.testing.assert_close(y, reference(x, weight, bias))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype, N: int, center: bool) -> list[tuple[object, dict[str, object]]]:
    """Return all three kernels, each with what is known of its arguments at a launch."""
    x = torch.empty(10**4, N, dtype=dtype, device="meta")
    wide = "fp64" if dtype == torch.float64 else "fp32"
    known = {"dtype": NAMES[dtype], "stats_ptr": wide, "CENTER": center}
    forward, backward = (taken._norms_long_plan(x, N, tensors, center) for tensors in (1, 2))
    tile = taken._norms_long_plan_weight(x)[1]
    return [
        (taken._norms_long_kernel, {**known, **forward, "EPS": EPS}),
        (taken._norms_long_backward_kernel, {**known, **backward}),
        (taken._norms_long_weight_kernel, {**known, **backward, **tile, "sums_ptr": wide}),
    ]


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill, with every plan."""
    found = {}
    for dtype in FLOATS:
        for center in (True, False):
            for part in (0.07, 0.14, 0.29, 0.31):  # the backward's part is twice that
                for N in (100_000, 100_001):
                    with cached(taken, int(4 * N * dtype.itemsize / part)):
                        known = launches(taken, dtype, N, center)
                    name = f"{dtype} {center} {part} {known[0][1]['VEC']}"
                    found[name] = [stack(kernel, **options) for kernel, options in known]
    return found


def widths(taken: ModuleType) -> list[set[str]]:
    """Return how wide all kernels load and store rows in bfloat16."""
    known = launches(taken, torch.bfloat16, 100_000, True)
    return [set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b32|b16)\s", ptx(kernel, **one))) for kernel, one in known]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Rows are loaded and stored 16 bytes at a time; the forward also loads a row's first element."""
    (found,) = on_h100(gallery / "fusion" / "norms_long.py", widths)
    assert found == [{"v4.b32", "b16"}, {"v4.b32"}, {"v4.b32"}]


def traced(recipe: ModuleType) -> list[list[list[str]]]:
    """Return the graphs of both norms."""
    x = torch.randn(3, 20_001, requires_grad=True)
    w = torch.randn(20_001, requires_grad=True)
    return [
        graphs(lambda x, w: recipe.norms_long_layer_norm(x, w, w, 1e-5), x, w),
        graphs(lambda x, w: recipe.norms_long_rms_norm(x, w, 1e-5), x, w),
    ]


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way."""
    (found,) = on_h100(gallery / "fusion" / "norms_long.py", traced)
    for forward, backward in found:
        for graph, count in ((forward, 1), (backward, 2)):
            kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
            assert kernels == ["triton_kernel_wrapper_functional"] * count
            assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """At most two registers for rows that begin at multiples of 16 bytes, in two plans; for others, some backward."""
    (found,) = on_h100(gallery / "fusion" / "norms_long.py", spills)
    assert len(found) == 4 * 2 * 4 * 2
    aligned = {name: bytes_ for name, bytes_ in found.items() if not name.endswith(" 1")}
    # LayerNorm's: the forward of half precision with 32 warps, the backward of float64 with 64 bytes a thread
    known = {f"{dtype} True 0.29 8": [8, 0, 0] for dtype in (torch.float16, torch.bfloat16)}
    known |= {f"torch.float64 True {part} 2": [0, 8, 0] for part in (0.29, 0.31)}
    assert {name: bytes_ for name, bytes_ in aligned.items() if any(bytes_)} == known
    others = {name: bytes_ for name, bytes_ in found.items() if name not in aligned}
    assert {name: bytes_ for name, bytes_ in others.items() if max(bytes_) > 112 or bytes_[0] or bytes_[2]} == {}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/norms_long")
    twice, error, integers, shapes, *means = out.splitlines()
    assert twice == "x is read 2 times, y is written once"
    assert re.fullmatch(r"largest error \d\.\de-0[67], allowed 1\.0e-05", error)
    assert integers.startswith("TypeError: norms_long_rms_norm takes one float dtype")
    assert shapes.endswith("not [(3, 5), (4,)]")
    assert len(means) == 4
    found = [[float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in means]
    assert all(abs(ours - exact) < 1e-3 for ours, exact, _ in found)
    assert abs(found[0][2] - found[0][1]) < 1e-3
    assert not abs(found[-1][2] - found[-1][1]) < 0.1


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    (
        "norms_long_layer_norm",
        lambda normal, M, N: (normal(M // 50, 50 * N), normal(50 * N), normal(50 * N), 1e-5),
        _layer_norm,
    ),
    ("norms_long_rms_norm", lambda normal, M, N: (normal(M // 50, 50 * N), normal(50 * N), 1e-5), _rms_norm),
    (
        "norms_long_backward",
        lambda normal, M, N: (normal(M, 3 * N), normal(M, 3 * N), normal(3 * N), normal(2, M)),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "differences behind the end of a row",
        "            d = tl.where(offs < N, x - mean, 0)  # (BLOCK_N,)\n            mean",
        "            d = x - mean\n            mean",
    ),
    (
        "a mean that is not updated by its count",
        "            mean += d * (1 / n)\n",
        "            mean += d * 0.5\n",
    ),
    ("a rounded mean", "first = tl.load(x_row).to(ACC) if CENTER else 0.0", "first = 0.0"),
    ("squares of one difference", "            s += d * (x - mean)\n", "            s += d * d\n"),
    (
        "a variance without what lies between columns",
        "        s += count * (mean - total) * (mean - total)\n",
        "",
    ),
    (
        "columns of one count",
        "count = tl.cdiv(tl.maximum(N - columns, 0), BLOCK_N).to(ACC)",
        "count = (tl.cdiv(N, BLOCK_N) + 0 * columns).to(ACC)",
    ),
    (
        "a sum of squares",
        "            d = tl.where(offs < N, x - mean, 0)  # (BLOCK_N,)\n"
        "            mean += d * (1 / n)\n            s += d * (x - mean)\n        else",
        "            mean += tl.where(offs < N, x - mean, 0) * (1 / n)\n            s += x * x\n        else",
    ),
    ("RMSNorm of the last block", "        else:\n            s += x * x\n", "        else:\n            s = x * x\n"),
    (
        "a second pass from behind the last block",
        "        offs = last - step + columns  # (BLOCK_N,)\n        mask = offs < N\n        # Nobody",
        "        offs = N // BLOCK_N * BLOCK_N - step + columns\n        mask = offs < N\n        # Nobody",
    ),
    ("a norm stored without a mask", "row * N + offs, y, mask=mask, ev", "row * N + offs, y, ev"),
    ("dx stored without a mask", "            dx,\n            mask=mask,\n", "            dx,\n"),
    (
        "a norm without a bias",
        "            y += tl.load(\n                bias_ptr",
        "            y += 0 * tl.load(\n                bias_ptr",
    ),
    (
        "rows of x taken for adjacent",
        "    x_row = x_ptr + row * stride_xm\n    # The sums",
        "    x_row = x_ptr + row * N\n    # The sums",
    ),
    (
        "rows of x taken for adjacent, backward",
        "    x_row = x_ptr + row * stride_xm\n    dy_row",
        "    x_row = x_ptr + row * N\n    dy_row",
    ),
    ("rows of x taken for adjacent in tiles", "x_ptr + offs_m * stride_xm", "x_ptr + offs_m * N"),
    ("a mean without a gradient", "dx = (g - shift - (x", "dx = (g - (x"),
    ("a gradient of the last block", "        sum_gd += g *", "        sum_gd = g *"),
    ("a shift of the last block", "        sum_g += g\n", "        sum_g = g\n"),
    ("a weight gradient of the last rows", "        dw += dy * (h", "        dw = dy * (h"),
    ("a bias gradient of the last rows", "            db += dy\n", "            db = dy\n"),
    ("rows past the last", "mask = (offs_m < M) & (offs_n < N)  #", "mask = (offs_n < N) & (offs_m >= 0)  #"),
    ("partial sums over each other", "sums_ptrs += programs.to(tl.int64) * N", "sums_ptrs += N"),
    ("a weight gradient of one row of tiles", "(sums_ptrs, tl.sum(dw, axis=0", "(sums_ptrs, tl.max(dw, axis=0"),
    ("vectors across rows", "math.gcd(N, stride, 16 // size)", "math.gcd(stride, 16 // size)"),
    ("sums in half precision", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    (
        "no launcher for GPUs",
        'NORMS_LONG_LIBRARY.impl("norms_long", _norms_long_launch, "CUDA")\n',
        "",
    ),
    (
        "no launcher of the gradient for GPUs",
        'NORMS_LONG_LIBRARY.impl(\n    "norms_long_backward", _norms_long_backward_launch, "CUDA"\n)\n',
        "",
    ),
]
