"""The ops of the recipe Cross entropy: loss and gradient, beside the logits and over them."""

# ruff: noqa: N806 - the logits have M rows of N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, ptx
from guard import Guard, _between_guards, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

torch_loss = torch.nn.functional.cross_entropy


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/cross_entropy.py")


@dataclass(frozen=True)
class Options:
    """What the ops take besides logits and targets, and which targets there are."""

    ignore_index: int
    label_smoothing: float
    share: float  # of the rows to ignore
    seed: int

    def targets(self, shape: tuple[int, ...], N: int, device: torch.device) -> torch.Tensor:
        """Return targets, not contiguous."""
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.randint(max(N, 1), (*shape, 2), generator=generator)
        ignored = torch.rand((*shape, 2), generator=generator) < self.share
        return target.masked_fill(ignored, self.ignore_index).to(device)[..., 1]

    def __iter__(self) -> Iterator[float]:
        """Iterate over what the ops take."""
        return iter((self.ignore_index, self.label_smoothing))


OPTIONS = st.builds(
    Options,
    ignore_index=st.sampled_from([-100, 0, 1, 7, 2**40]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
ROWS = st.sampled_from([(), (0,), (1,), (2,), (7,)])


def reference(logits: torch.Tensor, target: torch.Tensor, options: Options) -> list[torch.Tensor]:
    """Return the loss and its gradient in float64, by their definition, and what their errors are relative to."""
    ignore_index, smoothing = options
    x = logits.detach().double()
    used = target != ignore_index
    count = used.sum()
    log_p = torch.log_softmax(x, -1)
    hit = torch.zeros_like(x).scatter_(-1, target.where(used, 0)[..., None], 1 - smoothing) if x.numel() else x
    hit = hit + smoothing / max(x.shape[-1], 1)
    loss = -(hit * log_p).sum(-1).where(used, 0).sum() / (count if x.numel() else 0)
    d = (log_p.exp() - hit).where(used[..., None], 0) / count
    d = d.where(used[..., None], 0)
    most = x.abs().amax(-1).where(used, 0).sum() / count if x.numel() else loss
    terms = ((log_p.exp() + hit) / count).where(used[..., None], 0)
    return [loss, d, loss.abs() + most, terms]


def assert_close(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == recipe.DEVICE.type
    assert out.shape == expected.shape
    # Exponents are less than 16 and are rounded, which is a relative error of 16 roundings in an exponential and in
    # their sum; the sums have a few dozen additions one after another.
    # Results too small for normal numbers of the accumulator may be zero.
    flushed = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).tiny
    both = out.isnan() & expected.isnan()
    out, expected, magnitude = (tensor.masked_fill(both, 0) for tensor in (out, expected, magnitude))
    assert_within(out, expected, magnitude, roundings=96, floor=flushed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(rows=ROWS, N=sizes(1024, 3000), of=layouts(), options=OPTIONS)
def test_loss_and_gradient(
    recipe: ModuleType,
    dtype: torch.dtype,
    rows: tuple[int, ...],
    N: int,
    of: Layout,
    options: Options,
) -> None:
    """Both are right for any logits and targets in any layout, and nothing else is written."""
    x, target = of.make((*rows, N), dtype, recipe.DEVICE), options.targets(rows, N, recipe.DEVICE)
    grad = torch.tensor(-1.5, dtype=dtype, device=recipe.DEVICE)
    out = guarded(lambda *tensors: recipe.cross_entropy(*tensors, *options), x, target)
    stats = recipe.cross_entropy_forward(x, target, *options)[1]
    d = guarded(lambda *tensors: recipe.cross_entropy_backward(*tensors, *options), grad, x, target, stats)
    leaf = x.detach().requires_grad_()
    loss = recipe.cross_entropy(leaf, target, *options)
    (gradient,) = torch.autograd.grad(loss, leaf, grad)
    torch.testing.assert_close(loss, out, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(gradient, d, rtol=0, atol=0, equal_nan=True)
    assert out.dtype == d.dtype == dtype
    assert d.is_contiguous()
    loss, exact, size, terms = reference(x, target, options)
    assert_close(recipe, out, loss, size)
    assert_close(recipe, d, grad.double() * exact, grad.abs() * terms)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(rows=ROWS, N=sizes(1024, 3000), gap=st.integers(0, 9), options=OPTIONS)
def test_in_place(
    recipe: ModuleType, dtype: torch.dtype, rows: tuple[int, ...], N: int, gap: int, options: Options
) -> None:
    """The gradient takes the place of the logits; what lies between rows and around them stays."""
    wide = Layout("contiguous", options.seed).make((*rows, gap + N), dtype, recipe.DEVICE)
    target = options.targets(rows, N, recipe.DEVICE)
    buffer, wide = _between_guards(wide)
    x, before = wide[..., gap:], wide.clone()
    loss, exact, size, terms = reference(x, target, options)
    with Guard() as guard:
        target = guard.place(target)
        guard.outputs.append(buffer)
        out = recipe.cross_entropy_(x, target, *options)
    assert out.dtype == dtype
    assert_close(recipe, out, loss, size)
    assert_close(recipe, x, exact, terms)
    assert torch.equal(wide[..., :gap], before[..., :gap])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_edges(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows that begin and end at any distance from a multiple of 16 bytes, with a target at every position."""
    M = max(N if N < 18 else 0, 8)
    target = -torch.arange(M, device=recipe.DEVICE) % N
    for stride in (N, N + 3):
        x = Layout("contiguous", N).make((M, stride), dtype, recipe.DEVICE)[:, stride - N :]
        loss, exact, size, terms = reference(x, target, Options(-100, 0.25, 0, 0))
        leaf = x.detach().requires_grad_()
        out = recipe.cross_entropy(leaf, target, label_smoothing=0.25)
        assert_close(recipe, out, loss, size)
        assert_close(recipe, torch.autograd.grad(out, leaf)[0], exact, terms)
        assert torch.equal(recipe.cross_entropy_(x, target, label_smoothing=0.25), out)
        assert_close(recipe, x, exact, terms)


# Lengths for every number of warps, on both sides of where it changes, and for one to several turns of the loops.
LENGTHS = [*(2**k + 3 for k in range(8, 15, 2)), 3000, 20_001, 50_257, 131_073]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths."""
    options, M = Options(-100, 0.0, 0.3, N), 3
    x, target = Layout("contiguous", N).make((M, N), dtype, recipe.DEVICE), options.targets((M,), N, recipe.DEVICE)
    loss, exact, size, terms = reference(x, target, options)
    leaf = x.clone().requires_grad_()
    out = recipe.cross_entropy(leaf, target)
    assert_close(recipe, out, loss, size)
    assert_close(recipe, torch.autograd.grad(out, leaf)[0], exact, terms)
    assert_close(recipe, recipe.cross_entropy_(x, target), loss, size)
    assert_close(recipe, x, exact, terms)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: ModuleType, dtype: torch.dtype, smoothing: float) -> None:
    """NaN, infinities and the lowest numbers do what they do in PyTorch, and to no other row."""
    N, large = 3001, torch.finfo(dtype).max
    x = torch.zeros(12, N, dtype=dtype, device=recipe.DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :2000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7], x[8, 1::2], x[9, 0] = -large, -large, large
    x[10, 0] = x[11, N - 1] = torch.nan
    target = torch.zeros(len(x), dtype=torch.int64, device=recipe.DEVICE)
    target[6] = N - 1
    for part in (x, x[:, :5]):
        for rows in range(12):  # apart, as one NaN is enough for the mean
            row, at = part[rows : rows + 1], target[rows : rows + 1].clamp(max=part.shape[1] - 1)
            leaf, own, over = row.clone().requires_grad_(), row.clone().requires_grad_(), row.clone()
            expected = torch_loss(leaf, at, label_smoothing=smoothing)
            out = recipe.cross_entropy(own, at, label_smoothing=smoothing)
            assert torch.equal(recipe.cross_entropy_(over, at, label_smoothing=smoothing).isnan(), out.isnan())
            if not (smoothing and rows in (7, 8, 9)):  # PyTorch's sum overflows there
                torch.testing.assert_close(out, expected, equal_nan=True)
            (exact,), (d,) = torch.autograd.grad(expected, leaf), torch.autograd.grad(out, own)
            torch.testing.assert_close(d, exact, equal_nan=True, rtol=1e-2, atol=1e-5)
            torch.testing.assert_close(over, exact, equal_nan=True, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ignored_rows(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Ignored rows count for nothing, whatever they hold; without others the loss is NaN, and the gradient zero."""
    x = Layout("contiguous", 0).make((4, 1000), dtype, recipe.DEVICE)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    target = torch.tensor([5, -1, -1, 7], device=recipe.DEVICE)
    for at, rows in ((target, [0, 3]), (torch.full_like(target, -1), [])):
        for smoothing in (0.0, 0.1):
            leaf, over = x.clone().requires_grad_(), x.clone()
            out = recipe.cross_entropy(leaf, at, -1, smoothing)
            (d,) = torch.autograd.grad(out, leaf)
            expected = torch_loss(x[rows], at[rows], label_smoothing=smoothing)
            torch.testing.assert_close(out, expected, equal_nan=True)
            torch.testing.assert_close(recipe.cross_entropy_(over, at, -1, smoothing), expected, equal_nan=True)
            rest = [row for row in range(4) if row not in rows]
            assert not d[rest].any()
            assert not over[rest].any()
            assert d[rows].isfinite().all()


@pytest.mark.parametrize("bad", [-1, 1000, 1003, 2**31, 2**32 + 5, -(2**40)])
def test_targets_out_of_range(recipe: ModuleType, bad: int) -> None:
    """Such a target makes the loss and its row's gradient NaN, reads nothing outside, and spares the other rows."""
    x = Layout("contiguous", 0).make((3, 1000), torch.float32, recipe.DEVICE)
    target = torch.tensor([5, bad, 7], device=recipe.DEVICE)
    leaf = x.clone().requires_grad_()
    out = recipe.cross_entropy(leaf, target)
    assert out.isnan()
    (d,) = torch.autograd.grad(out, leaf)
    assert recipe.cross_entropy_(x, target).isnan()
    for gradient in (d, x):
        assert gradient[1].isnan().all()
        assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum_and_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, or none has; and a sum of ones is not where half precision stands still."""
    rising = torch.linspace(-6, 6, 40_001, dtype=torch.float64, device=recipe.DEVICE).to(dtype)
    options = Options(-100, 0.0, 0, 0)
    for row in (rising, rising.flip(0), rising.roll(20_000), torch.zeros_like(rising), rising + 1000):
        target = torch.tensor(123, device=recipe.DEVICE)
        loss, exact, size, terms = reference(row, target, options)
        out = recipe.cross_entropy(leaf := row.clone().requires_grad_(), target)
        assert_close(recipe, out, loss, size)
        assert_close(recipe, torch.autograd.grad(out, leaf)[0], exact, terms)


def test_large_logits(recipe: ModuleType) -> None:
    """Near 1e6 the sum's logarithm is less than a rounding of the maximum, and still counts."""
    x = torch.full((1, 4), 1e6, device=recipe.DEVICE, requires_grad=True)
    target = torch.zeros(1, dtype=torch.int64, device=recipe.DEVICE)
    loss = recipe.cross_entropy(x, target)
    (d,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(loss.item(), 1.386294, rtol=1e-6, atol=0)
    torch.testing.assert_close(d.tolist(), [[-0.75, 0.25, 0.25, 0.25]])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradcheck(recipe: ModuleType, smoothing: float) -> None:
    """Differences of the loss agree with its gradient; the gradient has none."""
    x = Layout("contiguous", 0).make((3, 5), torch.float64, recipe.DEVICE).requires_grad_()
    target = torch.tensor([1, -100, 4], device=recipe.DEVICE)
    assert torch.autograd.gradcheck(lambda x: recipe.cross_entropy(x, target, -100, smoothing), x)
    (d,) = torch.autograd.grad(recipe.cross_entropy(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()
    assert not recipe.cross_entropy_forward(x, target, -100, smoothing)[1].requires_grad


def test_autograd_learns_of_the_change(recipe: ModuleType) -> None:
    """Whoever saved the logits for a backward is told that they are gone."""
    x = torch.ones(2, 3, device=recipe.DEVICE, requires_grad=True)
    logits = x * 2
    saved = logits.exp()
    over, target = saved.detach(), torch.zeros(2, dtype=torch.int64, device=recipe.DEVICE)
    recipe.cross_entropy_(over, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x, target = torch.ones(2, 3, device=recipe.DEVICE), torch.zeros(2, dtype=torch.int64, device=recipe.DEVICE)
    for op in (recipe.cross_entropy, recipe.cross_entropy_):
        for logits, at in ((x.int(), target), (x, target.int()), (x, x)):
            with pytest.raises(TypeError, match=r"takes floating logits and int64 targets, not torch\.\w+ and torch"):
                op(logits, at)
        for logits, at in ((x, target[:1]), (x[None], target[None]), (x[0, 0], target[0]), (x, target[None])):
            with pytest.raises(ValueError, match="takes shapes"):
                op(logits, at)
        for smoothing in (-0.1, 1.1, torch.nan):
            with pytest.raises(ValueError, match="smoothing from 0 to 1"):
                op(x, target, label_smoothing=smoothing)
        with pytest.raises(ValueError, match=r"up to 2\*\*30 elements"):
            op(x[0, 0].expand(2**30 + 1), target[0])
        with pytest.raises(ValueError, match="takes one device"):
            op(x.to("meta"), target)
    for logits in (x.T[:2], torch.ones(2, 6, device=recipe.DEVICE)[:, ::2], x[:1].expand(2, 3)):
        at = target[: len(logits)]
        with pytest.raises(ValueError, match="rows"):
            recipe.cross_entropy_(logits, at)
    for logits in (x.clone().requires_grad_(), x.clone().requires_grad_() * 2):
        with pytest.raises(ValueError, match="require grad"):
            recipe.cross_entropy_(logits, target)
        with torch.no_grad(), pytest.raises(ValueError, match="require grad"):
            recipe.cross_entropy_(logits, target)


def test_linear_cross_entropy(recipe: ModuleType) -> None:
    """The page's function has the loss and the gradients of a projection and PyTorch's loss."""
    x, weight = (Layout("contiguous", n).make((n, 8), torch.float32, recipe.DEVICE).requires_grad_() for n in (5, 40))
    target = torch.tensor([3, -100, 39, 0, 7], device=recipe.DEVICE)
    loss, expected = recipe.LinearCrossEntropy.apply(x, weight, target), torch_loss(x @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    for got, exact in zip(*(torch.autograd.grad(3 * t, (x, weight)) for t in (loss, expected)), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.needs_gpu_memory(10)
@pytest.mark.parametrize(
    ("M", "N"),
    [
        (2**17 + 1, 2**14),
        (2**16 + 3, 2**15 + 1),
        pytest.param(5, 2**29 + 3, marks=pytest.mark.needs_gpu_memory(24)),
    ],
)
def test_beyond_int32(recipe: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, and as the first."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=recipe.DEVICE)
    target = torch.full((M,), N - 1, device=recipe.DEVICE)
    x[0, ::2] = x[-1, ::2] = 2
    row = x[-1:].clone()
    loss, stats = recipe.cross_entropy_forward(x, target, -100, 0.0)
    torch.testing.assert_close(stats[:, 0], stats[:, -1])
    one = recipe.cross_entropy_forward(row, target[:1], -100, 0.0)[1]
    torch.testing.assert_close(stats[:2, -1], one[:2, 0])
    d = recipe.cross_entropy_backward(torch.ones_like(loss), x, target, stats, -100, 0.0)
    assert torch.equal(d[0], d[-1])
    assert torch.equal(recipe.cross_entropy_(x, target), loss)
    assert torch.equal(x[0], x[-1])
    torch.testing.assert_close(x[-1], d[-1])
    del d
    recipe.cross_entropy_(row, target[:1])
    torch.testing.assert_close(x[-1].float() * M, row[0].float(), rtol=1e-2, atol=1e-9)


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [5, 20_001])
def test_opcheck(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """The ops pass the whole of opcheck."""
    x = torch.randn(7, N, device=recipe.DEVICE).to(dtype)
    target = torch.tensor([0, 1, 2, 3, 4, -100, 0], device=recipe.DEVICE)
    loss, stats = recipe.cross_entropy_forward(x, target, -100, 0.1)
    for op, inputs in (
        (recipe.cross_entropy_forward, (x.clone().requires_grad_(), target, -100, 0.1)),
        (recipe.cross_entropy_backward, (torch.ones_like(loss), x, target, stats, -100, 0.1)),
        (recipe.cross_entropy_, (x, target, -100, 0.1)),
    ):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the ops, the gradient, the change in place, and other sizes."""
    torch.compiler.reset()

    def function(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x.detach() * 2
        in_place = recipe.cross_entropy_(logits, target)
        return recipe.cross_entropy(x * 2, target), in_place, logits

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (3, 20_001)):
        x = torch.randn(shape, device=recipe.DEVICE, requires_grad=True)
        target = torch.arange(shape[0], device=recipe.DEVICE)
        loss, in_place, d = compiled(x, target)
        expected = torch_loss(x * 2, target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(in_place, expected)
        (exact,) = torch.autograd.grad(expected, x)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], exact)
        torch.testing.assert_close(d * 2, exact)


def widths(recipe: ModuleType) -> list[list[int]]:
    """Return how often 16 bytes are loaded and stored, for the launches of the page and for one of single elements."""

    def count(num_warps: int, rows: int, loss: bool, gradient: bool, vec: int = 8) -> list[int]:
        known = {"LOSS": loss, "GRADIENT": gradient, "SMOOTHING": 0.1, "LOWEST": -3e38, "ACC": recipe.tl.float32}
        known |= {"ROWS": rows, "BLOCK_N": num_warps * 256, "VEC": vec}
        types = {"x_ptr": "bf16", "d_ptr": "bf16", "target_ptr": "i64"}
        text = ptx(recipe.cross_entropy_kernel, "fp32", num_warps, **types, **known)
        return [len(re.findall(kind + r"\.global\S*\.v4\.b32\s", text)) for kind in ("ld", "st")]

    return [
        count(32, 8, True, True),
        count(4, 8, True, False),
        count(32, 8, False, True),
        count(32, 8, False, True, vec=1),
    ]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """All lengths are loaded and stored 16 bytes at a time: the compiler is told of no length that 8 divides."""
    (found,) = on_h100(gallery / "fusion" / "cross_entropy.py", widths)
    assert found == [[16, 8], [8, 0], [8, 8], [0, 0]]


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("cross_entropy", lambda normal, M, N: (normal(M, N), torch.arange(M, device="cuda"))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("an edge stored without a mask", "exp(x_e - top) * a - b, mask_e)", "exp(x_e - top) * a - b)"),
    (
        "rows that end with their last whole vector",
        'x_e = tl.load(x_ptr + x_row + offs_e, mask_e, float("-inf"))',
        'x_e = tl.load(x_ptr + x_row + offs_e, edge < head, float("-inf"))',
    ),
    ("a sum that does not follow its maximum", "        s *= exp(m - larger)\n", ""),
    ("ignored rows in the mean", "(target != ignore_index).sum(dtype=wide)", "(target == target).sum(dtype=wide)"),
    (
        "smoothing left out of the gradient",
        "a, b = tl.where(used, c / s, 0), c * SMOOTHING / N",
        "a, b = tl.where(used, c / s, 0), c * 0",
    ),
    ("a target that is not subtracted", "exp(x_t - top) * a - b - c * (1 - SMOOTHING)", "exp(x_t - top) * a - b"),
    (
        "a body stored without a mask",
        "tl.store(d_body + offs, d, mask, eviction_policy=DROP)",
        "tl.store(d_body + offs, d, eviction_policy=DROP)",
    ),
]
