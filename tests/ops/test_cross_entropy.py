"""The op of the recipe Cross entropy and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import TRITON, Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

torch_loss = torch.nn.functional.cross_entropy
REDUCTIONS = ["mean", "sum", "none"]
LEADS = st.sampled_from([(), (0,), (1,), (7,), (2, 3)])


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/cross_entropy.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/cross_entropy.py")


@contextmanager
def processors(taken: ModuleType, number: int) -> Iterator[None]:
    """Have the launcher decide as for a GPU of so many multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_cross_entropy_processors", lambda device: number)
        yield


@dataclass(frozen=True)
class Options:
    """What the op takes besides logits and targets, and which targets there are."""

    ignore_index: int
    label_smoothing: float
    reduction: str
    share: float = 0.3  # of the rows to ignore
    seed: int = 0

    def targets(self, shape: tuple[int, ...], N: int) -> torch.Tensor:
        """Return targets, not contiguous."""
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.randint(max(N, 1), (*shape, 2), generator=generator)
        ignored = torch.rand((*shape, 2), generator=generator) < self.share
        return target.masked_fill(ignored, self.ignore_index).to(DEVICE)[..., 1]

    def __iter__(self) -> Iterator[int | float | str]:
        """Iterate over what the op takes."""
        return iter((self.ignore_index, self.label_smoothing, self.reduction))


OPTIONS = st.builds(
    Options,
    ignore_index=st.sampled_from([-100, 0, 1, 7, 2**40]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(REDUCTIONS),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)


@dataclass
class Exact:
    """A loss and its gradient in float64, by their definition, and what their errors are relative to."""

    loss: torch.Tensor
    loss_size: torch.Tensor
    d: torch.Tensor
    d_size: torch.Tensor


def reference(logits: torch.Tensor, target: torch.Tensor, options: Options, grad: torch.Tensor | None = None) -> Exact:
    """Return what is exact, given the gradient of the loss."""
    _, smoothing, reduction = options
    x, used = logits.detach().double(), target != options.ignore_index
    log_p = torch.log_softmax(x, -1)
    hit = torch.zeros_like(x).scatter_(-1, target.where(used, 0)[..., None], 1 - smoothing) if x.numel() else x
    hit = hit + smoothing / max(x.shape[-1], 1)
    losses = -(hit * log_p).sum(-1)
    losses = (losses if x.shape[-1] else losses.fill_(torch.nan)).where(used, 0)
    largest = x.abs().amax(-1).where(used, 0) if x.numel() else losses.abs()
    largest = (largest + losses.abs()).nan_to_num(0)
    scale = torch.ones_like(losses)
    loss, size = losses, largest
    if reduction != "none":
        loss, size = losses.sum(), largest.sum()
    if reduction == "mean":
        loss, size, scale = loss / used.sum(), size / used.sum(), scale / used.sum()
    scale = (scale if grad is None else scale * grad.double())[..., None]
    d, terms = ((t * scale).where(used[..., None], 0) for t in (log_p.exp() - hit, log_p.exp() + hit))
    return Exact(loss, size, d, terms.abs())


def assert_close(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == DEVICE.type
    assert out.shape == expected.shape
    # Exponents are less than 16 and are rounded, which is a relative error of 16 roundings in an exponential and in
    # their sum; the sums have a few dozen additions one after another.
    # Results too small for normal numbers of the accumulator may be zero.
    flushed = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).tiny
    both = out.isnan() & expected.isnan()
    out, expected, magnitude = (tensor.masked_fill(both, 0) for tensor in (out, expected, magnitude))
    assert_within(out, expected, magnitude, roundings=96, floor=flushed)


def assert_right(taken: ModuleType, x: torch.Tensor, target: torch.Tensor, options: Options) -> None:
    """Assert that loss and gradient are right."""
    leaf = x.detach().requires_grad_()
    loss = taken.cross_entropy(leaf, target, *options)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(loss.shape, generator=generator).to(loss)
    (d,) = torch.autograd.grad(loss, leaf, grad)
    exact = reference(x, target, options, grad)
    assert loss.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert d.dtype == x.dtype
    assert d.is_contiguous()
    assert_close(loss, exact.loss, exact.loss_size)
    assert_close(d, exact.d, exact.d_size)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(
    lead=LEADS, N=sizes(1024, 4500), of=layouts(), of_grad=layouts(), options=OPTIONS, number=st.sampled_from([0, 1, 4])
)
@example((5,), 1000, Layout("contiguous", 0), Layout("contiguous", 1), Options(-100, 0.1, "none"), 1)
@example((5,), 1000, Layout("contiguous", 0), Layout("contiguous", 1), Options(-100, 0.0, "mean"), 4)
def test_loss_and_gradient(
    taken: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of: Layout,
    of_grad: Layout,
    options: Options,
    number: int,
) -> None:
    """Both are right for any logits and targets in any layout, and nothing else is written."""
    x, target = of.make((*lead, N), dtype, DEVICE), options.targets(lead, N)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad = of_grad.make(lead if options.reduction == "none" else (), wide, DEVICE)
    with processors(taken, number):
        loss = guarded(lambda *tensors: taken.cross_entropy(*tensors, *options), x, target)
        stats = taken.cross_entropy_forward(x, target, *options)[1]
        backward = partial(taken._cross_entropy_backward_launch, ignore_index=options.ignore_index)
        backward = partial(backward, label_smoothing=options.label_smoothing, reduction=options.reduction)
        d = guarded(backward, grad, x, target, stats)
        leaf = x.detach().requires_grad_()
        again = taken.cross_entropy(leaf, target, *options)
        torch.testing.assert_close(again, loss, rtol=0, atol=0, equal_nan=True)
        (gradient,) = torch.autograd.grad(again, leaf, grad)
        torch.testing.assert_close(gradient, d, rtol=0, atol=0, equal_nan=True)
    assert loss.dtype == wide
    assert d.dtype == dtype
    assert d.is_contiguous()
    exact = reference(x, target, options, grad)
    assert_close(loss, exact.loss, exact.loss_size)
    assert_close(d, exact.d, exact.d_size)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_edges(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows that begin and end at any distance from a multiple of 16 bytes, with a target at every position."""
    M = max(N, 8)
    target = -torch.arange(M, device=DEVICE) % N
    for stride in (N, N + 3, N + 16):
        x = Layout("contiguous", N).make((M, stride), dtype, DEVICE)[:, stride - N :]
        assert_right(taken, x, target, Options(-100, 0.25, "none"))
        assert_right(taken, x, target, Options(-100, 0.0, "mean"))


# Lengths on both sides of one to several turns of the loops, with every number of warps.
LENGTHS = [*(2**k + 3 for k in range(8, 15, 2)), 3000, 20_001, 50_257, 131_073]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, as few and as many."""
    x = Layout("contiguous", N).make((3, N), dtype, DEVICE)
    for number in (0, 1, 100):
        with processors(taken, number):
            assert_right(taken, x, Options(-100, 0.0, "mean", seed=N).targets((3,), N), Options(-100, 0.0, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_whole_blocks(taken: ModuleType, dtype: torch.dtype) -> None:
    """A row that ends with its last block, and several programs to each row."""
    for N in (1024, 4096, 8192):
        x = Layout("contiguous", N).make((3, N), dtype, DEVICE)
        target = torch.tensor([0, N - 1, N // 2], device=DEVICE)
        for number in (0, 1, 100):
            with processors(taken, number):
                assert_right(taken, x, target, Options(-100, 0.1, "sum"))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("M", [1, 1023, 1024, 1025, 20_001])
def test_mean_of_many_rows(taken: ModuleType, dtype: torch.dtype, M: int) -> None:
    """The kernel of the mean goes over any number of rows, and counts those that are not ignored."""
    options = Options(7, 0.0, "mean", seed=M)
    target = options.targets((M,), 5).contiguous()
    losses = torch.rand(M, generator=torch.Generator().manual_seed(M), dtype=dtype).to(DEVICE)
    losses = losses.where(target != 7, 0)
    with pytest.MonkeyPatch.context() as patch:
        # The kernel of the rows is left out: a program for each would take long here.
        class Rows:
            def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
                return lambda x, targets, out, *_, **__: out.copy_(losses)

        patch.setattr(taken._cross_entropy_launch, "__defaults__", (Rows(), taken._cross_entropy_mean_kernel))
        loss, stats = taken._cross_entropy_launch(torch.ones(M, 5, device=DEVICE), target, *options)
    used = (target != 7).sum()
    torch.testing.assert_close(loss, (losses.double().sum() / used).to(dtype), equal_nan=True)
    torch.testing.assert_close(stats[-1], (1 / used.double()).to(dtype))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(taken: ModuleType, dtype: torch.dtype, smoothing: float) -> None:
    """NaN, infinities and the lowest numbers do what they do in PyTorch, and to no other row."""
    N, large = 3001, torch.finfo(dtype).max
    x = torch.zeros(12, N, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :2000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7], x[8, 1::2], x[9, 0] = -large, -large, large
    x[10, 0] = x[11, N - 1] = torch.nan
    target = torch.zeros(len(x), dtype=torch.int64, device=DEVICE)
    target[6] = N - 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for part in (x, x[:, :5]):
        at = target.clamp(max=part.shape[1] - 1)
        options = {"label_smoothing": smoothing, "reduction": "none"}
        leaf, own = part.to(wide).clone().requires_grad_(), part.clone().requires_grad_()
        expected, out = torch_loss(leaf, at, **options), taken.cross_entropy(own, at, **options)
        # With smoothing, PyTorch's sum overflows in some rows.
        finite = [row for row in range(12) if not (smoothing and row in (7, 8, 9))]
        torch.testing.assert_close(out[finite], expected[finite], equal_nan=True)
        (exact,), (d,) = torch.autograd.grad(expected.sum(), leaf), torch.autograd.grad(out.sum(), own)
        torch.testing.assert_close(d.to(wide), exact, equal_nan=True, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ignored_rows(taken: ModuleType, dtype: torch.dtype, reduction: str) -> None:
    """Ignored rows count for nothing, whatever they hold; the mean of none is NaN, and the gradient zero."""
    x = Layout("contiguous", 0).make((4, 1000), dtype, DEVICE)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    target = torch.tensor([5, -1, -1, 7], device=DEVICE)
    for at, rows in ((target, [0, 3]), (torch.full_like(target, -1), [])):
        for smoothing in (0.0, 0.1):
            leaf = x.clone().requires_grad_()
            out = taken.cross_entropy(leaf, at, -1, smoothing, reduction)
            (d,) = torch.autograd.grad(out.sum(), leaf)
            expected = torch_loss(x[rows].to(out), at[rows], label_smoothing=smoothing, reduction=reduction)
            rest = [row for row in range(4) if row not in rows]
            if reduction == "none":
                assert not out[rest].any()
                out = out[rows]
            torch.testing.assert_close(out, expected, equal_nan=True)
            assert not d[rest].any()
            assert d[rows].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("bad", [-1, 1000, 1003, 2**31, 2**32 + 5, -(2**40)])
def test_targets_out_of_range(taken: ModuleType, dtype: torch.dtype, bad: int) -> None:
    """Such a target makes the loss and its row's gradient NaN, reads nothing outside, and spares the other rows."""
    x = Layout("contiguous", 0).make((3, 1000), dtype, DEVICE)
    target = torch.tensor([5, bad, 7], device=DEVICE)
    for reduction in REDUCTIONS:
        leaf = x.clone().requires_grad_()
        out = taken.cross_entropy(leaf, target, reduction=reduction)
        assert out.isnan().tolist() == ([False, True, False] if reduction == "none" else True)
        (d,) = torch.autograd.grad(out.sum(), leaf)
        assert d.isnan().all(1).tolist() == [False, True, False]
        assert d[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum_and_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, or none has; and a sum of ones is not where half precision stands still."""
    rising = torch.linspace(-6, 6, 40_001, dtype=torch.float64, device=DEVICE).to(dtype)
    for row in (rising, rising.flip(0), rising.roll(20_000), torch.zeros_like(rising), rising + 1000):
        assert_right(taken, row, torch.tensor(123, device=DEVICE), Options(-100, 0.0, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_large_logits(taken: ModuleType, dtype: torch.dtype) -> None:
    """Near 1e6 the sum's logarithm is less than a rounding of the maximum, and still counts."""
    x = torch.full((1, 4), 1e6, dtype=dtype, device=DEVICE, requires_grad=True)
    target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    loss = taken.cross_entropy(x, target)
    (d,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(loss.item(), 1.386294, rtol=1e-6, atol=0)
    torch.testing.assert_close(d.tolist(), [[-0.75, 0.25, 0.25, 0.25]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradcheck(taken: ModuleType, smoothing: float, reduction: str) -> None:
    """Differences of the loss agree with its gradient; the gradient has none."""
    x = Layout("contiguous", 0).make((3, 5), torch.float64, DEVICE).requires_grad_()
    target = torch.tensor([1, -100, 4], device=DEVICE)
    assert torch.autograd.gradcheck(lambda x: taken.cross_entropy(x, target, -100, smoothing, reduction), x)
    (d,) = torch.autograd.grad(taken.cross_entropy(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()
    assert not taken.cross_entropy_forward(x, target, -100, smoothing, reduction)[1].requires_grad


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x, target = torch.ones(2, 3, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    op = taken.cross_entropy
    for logits, at in ((x.int(), target), (x, target.int()), (x, x)):
        with pytest.raises(TypeError, match=r"^cross_entropy takes float logits and int64 targets, not torch\.\w+ and"):
            op(logits, at)
    for logits, at in ((x, target[:1]), (x[None], target), (x[0, 0], target[0]), (x, target[None])):
        with pytest.raises(ValueError, match=r"^cross_entropy takes logits \(\.\.\., N\) and targets \(\.\.\.\), not"):
            op(logits, at)
    for smoothing in (-0.1, 1.1, torch.nan):
        with pytest.raises(ValueError, match=r"^cross_entropy takes label_smoothing from 0 to 1"):
            op(x, target, label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"^cross_entropy takes a reduction mean, sum or none, not 'max'"):
        op(x, target, reduction="max")
    with pytest.raises(ValueError, match=r"^cross_entropy takes .*up to 2\*\*30 elements"):
        op(x[0, 0].expand(2**30 + 1), target[0])
    with pytest.raises(ValueError, match=r"^cross_entropy takes one device"):
        op(x.to("meta"), target)
    stats = taken.cross_entropy_forward(x, target, -100, 0.0, "none")[1]
    for grad in (x[0, 0].double(), x[0], x[0, 0]):
        with pytest.raises(ValueError, match=r"^cross_entropy_backward takes a gradient like the loss"):
            taken.cross_entropy_backward(grad, x, target, stats, -100, 0.0, "none")


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launchers_are_what_a_call_reaches(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU, without the triton_op in between."""
    x = Layout("contiguous", 0).make((3, 40), dtype, DEVICE)
    target = torch.tensor([0, -100, 39], device=DEVICE)
    out, expected = (
        call(x, target, -100, 0.0, "mean")
        for call in (partial(at_cuda, taken.cross_entropy_forward), taken.cross_entropy_forward)
    )
    assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))
    inputs = expected[0], x, target, expected[1], -100, 0.0, "mean"
    assert torch.equal(at_cuda(taken.cross_entropy_backward, *inputs), taken.cross_entropy_backward(*inputs))


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x, target = torch.ones(2, 5, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with Guard() as guard:
        outputs = taken.cross_entropy_forward(x, target, -100, 0.0, "none")
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: few rows have more warps forward, and more programs backward."""
    for dtype in FLOATS:
        x = torch.empty(1, dtype=dtype)
        with processors(taken, 132):
            for M, warps in ((1, 32), (66, 32), (67, 16), (132, 16), (133, 8), (264, 8), (265, 4), (10**6, 4)):
                plan = taken._cross_entropy_plan(x, M)
                warps = min(warps, 16) if dtype.itemsize == 8 else warps
                assert plan["num_warps"] == warps
                assert plan["BLOCK_N"] * dtype.itemsize == 32 * 16 * warps
                assert plan["LINES"] == (4 if warps == 32 else 8)
                assert plan["VEC"] * dtype.itemsize == 16
            for M, N in ((1, 10), (1, 10**6), (8, 151936), (4096, 32000)):
                grid, plan = taken._cross_entropy_plan_backward(x, M, N, N)
                assert grid[0] == M
                assert grid[1] == 1 or grid[0] * grid[1] <= 8 * 132
                assert grid[1] == 1 or (grid[1] - 1) * plan["BLOCK_N"] < N
                assert plan["VEC"] * dtype.itemsize == 16
    x = torch.empty(1, dtype=torch.bfloat16)
    vectors = [taken._cross_entropy_plan_backward(x, 2, 20_001, s)[1]["VEC"] for s in (20_001, 20_009, 20_002)]
    assert vectors == [8, 8, 1]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 3000, 20_001):
        x, target = recipe.random(9, N, torch.float32)
        expected = torch_loss(x, target)
        torch.testing.assert_close(recipe.first_loss(x, target), expected)
        torch.testing.assert_close(recipe.cross_entropy(x, target), expected)
        recipe.rows_alone(x, target)
        recipe.with_warps(x, target, 8)
        assert recipe.backward(x, target)().shape == x.shape
    assert recipe.statements(recipe.loss_kernel) == 16


@pytest.mark.needs_gpu_memory(10)
@pytest.mark.parametrize(
    ("M", "N"),
    [
        (2**17 + 1, 2**14),
        (2**16 + 3, 2**15 + 1),
        pytest.param(5, 2**29 + 3, marks=pytest.mark.needs_gpu_memory(24)),
    ],
)
def test_beyond_int32(taken: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, and as the first."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=DEVICE)
    target = torch.full((M,), N - 1, device=DEVICE)
    x[0, ::2] = x[-1, ::2] = 2
    losses, stats = taken.cross_entropy_forward(x, target, -100, 0.0, "none")
    torch.testing.assert_close(losses[0], losses[-1])
    one = taken.cross_entropy_forward(x[-1:].clone(), target[:1], -100, 0.0, "none")[0]
    torch.testing.assert_close(losses[-1:], one)
    d = taken.cross_entropy_backward(torch.ones_like(losses), x, target, stats, -100, 0.0, "none")
    torch.testing.assert_close(d[0], d[-1])


@needs_a_gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [5, 20_001])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, N: int, reduction: str) -> None:
    """The ops pass the whole of opcheck."""
    x = torch.randn(7, N, device=DEVICE).to(dtype)
    target = torch.tensor([0, 1, 2, 3, 4, -100, 0], device=DEVICE)
    options = (-100, 0.1, reduction)
    loss, stats = taken.cross_entropy_forward(x, target, *options)
    for op, inputs in (
        (taken.cross_entropy_forward, (x.clone().requires_grad_(), target, *options)),
        (taken.cross_entropy_backward, (torch.ones_like(loss), x, target, stats, *options)),
    ):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: taken.cross_entropy(x * 2, t), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (3, 20_001)):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        target = torch.arange(shape[0], device=DEVICE)
        loss, expected = compiled(x, target), torch_loss(x * 2, target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    x = torch.randn(5, 100, device="cuda:1", requires_grad=True)
    target = torch.arange(5, device="cuda:1")
    loss = taken.cross_entropy(x, target)
    torch.testing.assert_close(loss, torch_loss(x, target))
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype, M: int, stride: int = 50_257) -> list[tuple[object, dict]]:
    """Return the kernels of rows, each with what is known of its arguments at a launch."""
    x, of = torch.empty(1, dtype=dtype), NAMES[str(dtype).removeprefix("torch.")]
    wide = "fp64" if dtype == torch.float64 else "fp32"
    types = {"dtype": of, "targets_ptr": "i64", "losses_ptr": wide, "stats_ptr": wide}
    with processors(taken, 132):
        forward = taken._cross_entropy_plan(x, M) | types | {"SMOOTHING": 0.1}
        backward = taken._cross_entropy_plan_backward(x, M, 50_257, stride)[1]
    backward |= types | {"SMOOTHING": 0.1, "MEAN": True, "grad_ptr": wide}
    backward.pop("losses_ptr")
    return [(taken._cross_entropy_kernel, forward), (taken._cross_entropy_backward_kernel, backward)]


def widths(taken: ModuleType) -> list[list[set[str]]]:
    """Return how wide the loads and stores of tiles are, for odd rows that begin alike, and for others."""
    return [
        [
            set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b32|b16)\s", ptx(kernel, **known)))
            for kernel, known in launches(taken, torch.bfloat16, 4096, stride)
        ]
        for stride in (50_257, 50_264)
    ]


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill, for few rows and for many."""
    return {
        f"{dtype} {M}": [stack(kernel, **known) for kernel, known in launches(taken, dtype, M)]
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for M in (8, 100, 4096)
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Rows of any length are loaded and stored 16 bytes at a time, if they begin alike; no register spills.

    Triton 3.9 spills two, forward in 100 rows of float32, and backward in float64.
    """
    (alike, others), spilled = on_h100(gallery / "fusion" / "cross_entropy.py", widths, spills)
    assert alike == [{"v4.b32", "b16"}] * 2
    assert others == [{"v4.b32", "b16"}, {"b16"}]
    few = {"torch.float32 100": [8, 0]} | {f"torch.float64 {M}": [0, 8] for M in (8, 100, 4096)}
    expected = few if TRITON >= (3, 9) else {}
    assert {name: bytes_ for name, bytes_ in spilled.items() if any(bytes_)} == expected


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of the op, forward and backward."""
    target = torch.zeros(3, dtype=torch.int64)
    return graphs(recipe.cross_entropy, torch.randn(3, 300, requires_grad=True), target)


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way: a store's address must not depend on them."""
    (found,) = on_h100(gallery / "fusion" / "cross_entropy.py", traced)
    counts = [sum(call.startswith("triton_kernel_wrapper") for call in graph) for graph in found]
    assert counts == [2, 1]
    for graph in found:
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/cross_entropy")
    logits, *made, error, one, two, three, four, none, wrong, dtypes, numbers, number = out.splitlines()
    assert logits == "The logits are 4,096,000 bytes."
    assert sum("4,096,000" in line for line in made) == 3
    assert re.fullmatch(r"error \d\.\de-\d\d, allowed 5\.0e-06", error)
    assert [line.split()[0] for line in (one, two, three, four)] == [
        "aten.sum.default",
        "aten.ne.Scalar",
        "aten.sum.default",
        "aten.div.Tensor",
    ]
    assert none == "no rows: nan"
    assert wrong == "a wrong target: nan"
    assert dtypes.startswith("TypeError: cross_entropy takes float logits and int64 targets")
    assert numbers.endswith("[0.25, 0.25, 0.25, 0.25]")
    assert number.endswith("[0.253, 0.253, 0.253, 0.253]")


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [
    ("cross_entropy", lambda normal, M, N: (normal(M, N), torch.arange(M, device=DEVICE)), torch_loss),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "edges left out of the row",
        "    total += tl.sum(_cross_entropy_exp(x_e - top), axis=0)\n",
        "",
    ),
    ("a sum that does not follow its maximum", "        s *= _cross_entropy_exp(m - larger)\n", ""),
    (
        "a row padded with zeros",
        'tl.load(x_body + offs, mask=mask, other=-float("inf"))',
        "tl.load(x_body + offs, mask=mask, other=0)",
    ),
    ("edges padded with zeros", 'mask=read_e, other=-float("inf")', "mask=read_e, other=0"),
    ("rows taken for adjacent", "    x_row = row * stride_xm\n", "    x_row = row * N\n"),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("ignored rows in the mean", "(mask & (targets != ignore_index)).to(tl.int32)", "mask.to(tl.int32)"),
    (
        "rows of the mean past the end",
        "        mask = offs < M\n        total",
        "        mask = offs < M + 1\n        total",
    ),
    ("ignored rows in the loss", "tl.where(counts, loss, 0.0)", "loss"),
    ("wrong targets read", "counts & (target >= 0) & (target < N)", "counts & (N > 0)"),
    ("wrong targets have gradients", '    grad = tl.where(known, grad, float("nan"))\n', ""),
    ("ignored rows have gradients", "    grad = tl.where(counts, grad, 0.0)\n", ""),
    ("smoothing left out of the gradient", "b = grad * SMOOTHING / N", "b = grad * 0"),
    ("smoothing left out of the edges", "tl.where(mask_e, x_e * share, 0)", "tl.where(mask_e, x_e * 0, 0)"),
    ("a target that is not subtracted", "        d = tl.where(offs + head == target, d - hit, d)\n", ""),
    ("a target that is not subtracted in the edges", "    d_e = tl.where(offs_e == target, d_e - hit, d_e)\n", ""),
    ("a target looked for in the body", "offs + head == target", "offs == target"),
    ("an edge stored without a mask", "offs_e, d_e, mask=mask_e)", "offs_e, d_e)"),
    ("a body stored without a mask", "tl.store(d_body + offs, d, mask=mask)", "tl.store(d_body + offs, d)"),
    ("parts that overlap or leave out", "step = tl.num_programs(axis=1) * BLOCK_N", "step = 2 * BLOCK_N"),
    ("a gradient that is not scaled", "        grad *= tl.load(stats_ptr + 2 * M)\n", "        grad *= 1.0\n"),
    ("one gradient for all rows", "1 if each else 0,", "0,"),
    ("one number in place of two", "loss = tl.log(total) + (top - x_t)", "loss = (tl.log(total) + top) - x_t"),
    ("a body where rows do not begin alike", '"VEC": 16 // size if alike else 1', '"VEC": 16 // size'),
    (
        "no launcher for GPUs",
        'CROSS_ENTROPY_LIBRARY.impl("cross_entropy", _cross_entropy_launch, "CUDA")\n',
        "",
    ),
]
