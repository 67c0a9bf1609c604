"""The op of the recipe Cross entropy in place, with every plan of its launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, ptx, stack
from device_key import at_cuda
from guard import Guard, _between_guards
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

torch_loss = torch.nn.functional.cross_entropy


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/cross_entropy_in_place.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/cross_entropy_in_place.py")


@contextmanager
def processors(taken: ModuleType, number: int) -> Iterator[None]:
    """Have the launcher decide as for a GPU of so many multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_cross_entropy_in_place_processors", lambda device: number)
        yield


@dataclass(frozen=True)
class Options:
    """What the op takes besides logits and targets, and which targets there are."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    share: float = 0.3  # of the rows to ignore
    seed: int = 0

    def targets(self, shape: tuple[int, ...], N: int) -> torch.Tensor:
        """Return targets, not contiguous."""
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.randint(max(N, 1), (*shape, 2), generator=generator)
        ignored = torch.rand((*shape, 2), generator=generator) < self.share
        return target.masked_fill(ignored, self.ignore_index).to(DEVICE)[..., 1]

    def __iter__(self) -> Iterator[float]:
        """Iterate over what the op takes."""
        return iter((self.ignore_index, self.label_smoothing))


OPTIONS = st.builds(
    Options,
    ignore_index=st.sampled_from([-100, 0, 1, 7, 2**40]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)


def reference(logits: torch.Tensor, target: torch.Tensor, options: Options) -> list[torch.Tensor]:
    """Return the loss and its gradient in float64, by their definition, and what their errors are relative to."""
    ignore_index, smoothing = options
    x, used = logits.double(), target != ignore_index
    count = used.sum()
    log_p = torch.log_softmax(x, -1)
    hit = torch.zeros_like(x).scatter_(-1, target.where(used, 0)[..., None], 1 - smoothing) if x.numel() else x
    hit = hit + smoothing / max(x.shape[-1], 1)
    losses = -(hit * log_p).sum(-1)
    losses = (losses if x.shape[-1] else losses.fill_(torch.nan)).where(used, 0)
    largest = x.abs().amax(-1).where(used, 0).sum() / count if x.numel() else losses.sum()
    loss = losses.sum() / count
    d, terms = ((t / count).where(used[..., None], 0) for t in (log_p.exp() - hit, log_p.exp() + hit))
    return [loss, d, loss.abs() + largest, terms]


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
    assert_within(out, expected, magnitude.nan_to_num(0), roundings=96, floor=flushed)


def assert_right(taken: ModuleType, x: torch.Tensor, target: torch.Tensor, options: Options) -> None:
    """Assert that loss and gradient are right; x is written over."""
    loss, d, size, terms = reference(x, target, options)
    out = taken.cross_entropy_in_place_(x, target, *options)
    assert out.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert_close(out, loss, size)
    assert_close(x, d, terms)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(
    rows=st.sampled_from([(), (0,), (1,), (2,), (7,)]),
    N=sizes(1024, 4500),
    gap=st.integers(0, 9),
    options=OPTIONS,
    number=st.sampled_from([0, 4]),
)
@example((5,), 1000, 0, Options(label_smoothing=0.1), 0)
@example((5,), 1000, 3, Options(), 4)
def test_loss_and_gradient(
    taken: ModuleType, dtype: torch.dtype, rows: tuple[int, ...], N: int, gap: int, options: Options, number: int
) -> None:
    """The gradient takes the place of the logits; what lies between rows and around them stays."""
    wide = Layout("contiguous", options.seed).make((*rows, gap + N), dtype, DEVICE)
    target = options.targets(rows, N)
    buffer, wide = _between_guards(wide)
    x, before = wide[..., gap:], wide.clone()
    again = wide.clone()
    loss, exact, size, terms = reference(x, target, options)
    with processors(taken, number):
        with Guard() as guard:
            target = guard.place(target)
            guard.outputs.append(buffer)
            out = taken.cross_entropy_in_place_(x, target, *options)
        assert_close(out, loss, size)
        assert_close(x, exact, terms)
        assert torch.equal(wide[..., :gap], before[..., :gap])
        second = taken.cross_entropy_in_place_(again[..., gap:], target, *options)
    torch.testing.assert_close((second, again), (out, wide), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 37), (1, 2, 1, 37), (3, 0, 37), (2, 3, 0)])
def test_shapes(taken: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Contiguous logits of any shape."""
    x = Layout("contiguous", 0).make(shape, dtype, DEVICE)
    assert_right(taken, x, Options().targets(shape[:-1], shape[-1]), Options())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_edges(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows that begin and end at any distance from a multiple of 16 bytes, with a target at every position."""
    target = -torch.arange(max(N, 8), device=DEVICE) % N
    for stride in (N, N + 3):
        for options in (Options(label_smoothing=0.25), Options()):
            x = Layout("contiguous", N).make((len(target), stride), dtype, DEVICE)[:, stride - N :]
            assert_right(taken, x, target, options)


# Lengths for both numbers of warps, on both sides of where it changes, and for one to several turns of the loops.
LENGTHS = [*(2**k + 3 for k in range(8, 15, 2)), 3000, 20_001, 50_257, 131_073]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, as few and as many."""
    for number in (0, 100):
        with processors(taken, number):
            x = Layout("contiguous", N).make((3, N), dtype, DEVICE)
            assert_right(taken, x, Options(seed=N).targets((3,), N), Options())


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_whole_blocks(taken: ModuleType, dtype: torch.dtype) -> None:
    """Going back from the end of a row, the last block is a full one."""
    with processors(taken, 0):
        block = taken._cross_entropy_in_place_plan(torch.empty(1, 1, dtype=dtype), 3)
        size = block["LINES"] * block["BLOCK_N"]
        for N in (size, 2 * size):
            x = Layout("contiguous", N).make((3, N), dtype, DEVICE)
            assert_right(taken, x, torch.tensor([0, N - 1, N // 2], device=DEVICE), Options())


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("M", [1, 1023, 1024, 1025, 20_001])
def test_counts_many_rows(taken: ModuleType, dtype: torch.dtype, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that are not ignored are counted, however many there are."""
    scales = []

    class Rows:
        """Stands where the kernel of the rows stands: a program for each would take long here."""

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda x, targets, scale, losses, *_, **__: scales.append(scale.item())

    monkeypatch.setattr(taken, "_cross_entropy_in_place_kernel", Rows())
    target = Options(7, seed=M).targets((M,), 5)
    taken._cross_entropy_in_place_launch(torch.ones(M, 5, dtype=dtype, device=DEVICE), target, 7)
    torch.testing.assert_close(scales, [1 / (target != 7).sum().item()])


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
        leaf, over = part.to(wide).clone().requires_grad_(), part.clone()
        expected = torch_loss(leaf, at, label_smoothing=smoothing)
        assert taken.cross_entropy_in_place_(over, at, label_smoothing=smoothing).isnan()
        (exact,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(over.to(wide), exact, equal_nan=True, rtol=1e-2, atol=1e-5)
        for row in range(12):  # apart, as one NaN is enough for the mean
            if not (smoothing and row in (7, 8, 9)):  # PyTorch's sum overflows there
                one = part[row : row + 1], at[row : row + 1]
                expected = torch_loss(one[0].to(wide), one[1], label_smoothing=smoothing)
                out = taken.cross_entropy_in_place_(one[0].clone(), one[1], label_smoothing=smoothing)
                torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ignored_rows(taken: ModuleType, dtype: torch.dtype) -> None:
    """Ignored rows count for nothing, whatever they hold; without others the loss is NaN, and the gradient zero."""
    x = Layout("contiguous", 0).make((4, 1000), dtype, DEVICE)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    target = torch.tensor([5, -1, -1, 7], device=DEVICE)
    for at, rows in ((target, [0, 3]), (torch.full_like(target, -1), [])):
        for smoothing in (0.0, 0.1):
            over = x.clone()
            out = taken.cross_entropy_in_place_(over, at, -1, smoothing)
            expected = torch_loss(x[rows].to(out), at[rows], label_smoothing=smoothing)
            torch.testing.assert_close(out, expected, equal_nan=True)
            assert not over[[row for row in range(4) if row not in rows]].any()
            assert over[rows].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("bad", [-1, 1000, 1003, 2**31, 2**32 + 5, -(2**40)])
def test_targets_out_of_range(taken: ModuleType, dtype: torch.dtype, bad: int) -> None:
    """Such a target makes the loss and its row's gradient NaN, reads nothing outside, and spares the other rows."""
    x = Layout("contiguous", 0).make((3, 1000), dtype, DEVICE)
    assert taken.cross_entropy_in_place_(x, torch.tensor([5, bad, 7], device=DEVICE)).isnan()
    assert x.isnan().all(1).tolist() == [False, True, False]
    assert x[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum_and_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, or none has; and a sum of ones is not where half precision stands still."""
    rising = torch.linspace(-6, 6, 40_001, dtype=torch.float64, device=DEVICE).to(dtype)
    for row in (rising, rising.flip(0), rising.roll(20_000), torch.zeros_like(rising), rising + 1000):
        assert_right(taken, row.clone(), torch.tensor(123, device=DEVICE), Options())


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_large_logits(taken: ModuleType, dtype: torch.dtype) -> None:
    """Near 1e6 the sum's logarithm is less than a rounding of the maximum, and still counts."""
    x = torch.full((1, 4), 1e6, dtype=dtype, device=DEVICE)
    loss = taken.cross_entropy_in_place_(x, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(loss.item(), 1.386294, rtol=1e-6, atol=0)
    torch.testing.assert_close(x.tolist(), [[-0.75, 0.25, 0.25, 0.25]])


def test_autograd_learns_of_the_change(taken: ModuleType) -> None:
    """Whoever saved the logits for a backward is told that they are gone."""
    x = torch.ones(2, 3, device=DEVICE, requires_grad=True)
    saved = (x * 2).exp()
    taken.cross_entropy_in_place_(saved.detach(), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x, target = torch.ones(2, 3, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    op = taken.cross_entropy_in_place_
    name = "^cross_entropy_in_place_ takes "
    for logits, at in ((x.int(), target), (x, target.int()), (x, x)):
        with pytest.raises(TypeError, match=name + r"float logits and int64 targets, not torch\.\w+ and torch\."):
            op(logits, at)
    for logits, at in ((x, target[:1]), (x[None], target), (x[0, 0], target[0]), (x, target[None])):
        with pytest.raises(ValueError, match=name + r"logits \(\.\.\., N\) and targets \(\.\.\.\), not"):
            op(logits, at)
    for smoothing in (-0.1, 1.1, torch.nan):
        with pytest.raises(ValueError, match=name + "label_smoothing from 0 to 1"):
            op(x, target, label_smoothing=smoothing)
    with pytest.raises(ValueError, match=name + r".*up to 2\*\*30 elements"):
        op(x[0, 0].expand(2**30 + 1), target[0])
    with pytest.raises(ValueError, match=name + "logits and targets on one device, not meta and"):
        op(x.to("meta"), target)
    apart = x.new_ones(2, 4, 6)[:, ::2]
    for logits in (x.T[:2], x.new_ones(2, 6)[:, ::2], x[:1].expand(2, 3), apart):
        at = target[:, None].expand(2, 2) if logits.ndim == 3 else target[: len(logits)]
        with pytest.raises(ValueError, match=name + "a contiguous tensor, or a matrix of contiguous rows that share"):
            op(logits, at)
    for logits in (x.clone().requires_grad_(), x.clone().requires_grad_() * 2):
        with pytest.raises(ValueError, match=name + "no logits that require grad"):
            op(logits, target)
        with torch.no_grad(), pytest.raises(ValueError, match=name + "no logits that require grad"):
            op(logits, target)
    assert (x == 1).all()


def test_linear_loss(recipe: ModuleType) -> None:
    """The page's function has the loss and the gradients of a projection and PyTorch's loss."""
    x, weight = (Layout("contiguous", n).make((n, 8), torch.float32, DEVICE).requires_grad_() for n in (5, 40))
    target = torch.tensor([3, -100, 39, 0, 7], device=DEVICE)
    loss, expected = recipe.LinearLoss.apply(x, weight, target), torch_loss(x @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    for got, exact in zip(*(torch.autograd.grad(3 * t, (x, weight)) for t in (loss, expected)), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-6)


def test_linear_loss_of_a_large_factor(recipe: ModuleType) -> None:
    """In float16, too, a loss may be multiplied by the 65536 with which GradScaler begins."""
    x, weight = (Layout("contiguous", n).make((n, 8), torch.float16, DEVICE).requires_grad_() for n in (5, 40))
    target = torch.tensor([3, -100, 39, 0, 7], device=DEVICE)
    grads = torch.autograd.grad(65536 * recipe.LinearLoss.apply(x, weight * 1e-3, target), (x,))
    assert all(grad.isfinite().all() for grad in grads)


def test_launcher_is_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the custom_op in between."""
    first, second = (Layout("contiguous", 0).make((3, 40), torch.float32, DEVICE) for _ in range(2))
    target = torch.tensor([0, -100, 39], device=DEVICE)
    out = at_cuda(taken.cross_entropy_in_place_, first, target, -100, 0.0)
    assert torch.equal(out, taken.cross_entropy_in_place_(second, target))
    assert torch.equal(first, second)


def test_opcheck(taken: ModuleType) -> None:
    """What PyTorch asks of an op, as far as a machine without a GPU shows it."""
    x, target = torch.randn(3, 40, device=DEVICE), torch.tensor([0, -100, 39], device=DEVICE)
    which = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(taken.cross_entropy_in_place_, (x, target, -100, 0.1), test_utils=which)


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: 32 warps for long rows and for few, 8 for others."""
    with processors(taken, 132):
        for M, N, warps in ((4096, 32000, 8), (4096, 57344, 8), (4096, 57345, 32), (132, 100, 32), (133, 100, 8)):
            plan = taken._cross_entropy_in_place_plan(torch.empty(1, N, dtype=torch.bfloat16), M)
            assert plan["num_warps"] == warps
            assert plan["BLOCK_N"] == warps * 256
            assert plan["LINES"] == (4 if warps == 32 else 8)
            assert plan["VEC"] == 8
        wide = torch.empty(1, 32000, dtype=torch.float64)
        assert taken._cross_entropy_in_place_plan(wide, 4096)["num_warps"] == 16


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 3000, 20_001):
        x, target = recipe.random(9, N, torch.float32)
        loss, d = recipe.both(torch_loss, x, target)
        for step in recipe.STEPS.values():
            over = x.clone()
            torch.testing.assert_close(step(over, target), loss)
            torch.testing.assert_close(over, d)
        recipe.with_warps(x, target, 4)
    assert recipe.statements(recipe.both_kernel) == 21


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
    row = x[-1:].clone()
    assert taken.cross_entropy_in_place_(x, target).isfinite()
    torch.testing.assert_close(x[0], x[-1])
    taken.cross_entropy_in_place_(row, target[:1])
    torch.testing.assert_close(x[-1].float() * M, row[0].float(), rtol=1e-2, atol=1e-9)


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [5, 20_001])
def test_whole_opcheck(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """The op passes the whole of opcheck."""
    x = torch.randn(7, N, device=DEVICE).to(dtype)
    target = torch.tensor([0, 1, 2, 3, 4, -100, 0], device=DEVICE)
    results = torch.library.opcheck(taken.cross_entropy_in_place_, (x, target, -100, 0.1))
    assert set(results.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its change in place, and other sizes."""
    torch.compiler.reset()

    def function(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x * 2
        return taken.cross_entropy_in_place_(logits, target), logits

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (3, 20_001)):
        x = torch.randn(shape, device=DEVICE)
        target = torch.arange(shape[0], device=DEVICE)
        loss, d = compiled(x, target)
        leaf = (x * 2).requires_grad_()
        expected = torch_loss(leaf, target)
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(d, torch.autograd.grad(expected, leaf)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    x, target = torch.randn(5, 100, device="cuda:1"), torch.arange(5, device="cuda:1")
    expected = torch_loss(x, target)
    torch.testing.assert_close(taken.cross_entropy_in_place_(x, target), expected)
    assert x.isfinite().all()


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype) -> list[dict[str, object]]:
    """Return what is known at a launch, for few warps and for many."""
    of = NAMES[str(dtype).removeprefix("torch.")]
    wide = "fp64" if dtype == torch.float64 else "fp32"
    types = {"dtype": of, "targets_ptr": "i64", "losses_ptr": wide, "scale_ptr": wide, "SMOOTHING": 0.1}
    with processors(taken, 0):
        rows = [torch.empty(1, N, dtype=dtype, device="meta") for N in (1000, 128_256)]
        return [taken._cross_entropy_in_place_plan(x, 1000) | types for x in rows]


def widths(taken: ModuleType) -> list[set[str]]:
    """Return how wide the loads and stores of tiles are, for rows of any length."""
    return [
        set(re.findall(r"((?:ld|st)\.global)\S*?\.v4\.b32\s", ptx(taken._cross_entropy_in_place_kernel, **known)))
        for known in launches(taken, torch.bfloat16)
    ]


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill."""
    return {
        str(dtype): [stack(taken._cross_entropy_in_place_kernel, **known) for known in launches(taken, dtype)]
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """All lengths are loaded and stored 16 bytes at a time: the compiler is told of no length that 8 divides."""
    wide, spilled = on_h100(gallery / "fusion" / "cross_entropy_in_place.py", widths, spills)
    assert wide == [{"ld.global", "st.global"}] * 2
    assert {name: bytes_ for name, bytes_ in spilled.items() if any(bytes_)} == {}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/cross_entropy_in_place")
    logits, *made, one, two, none, wrong, grad, kept, scaled, in_place = out.splitlines()
    assert logits == "The logits are 4,096,000 bytes."
    assert sum("4,096,000" in line for line in made) == 3
    for error in (one, two):
        assert re.fullmatch(r"error \d\.\de-\d\d, allowed 5\.0e-06", error)
    assert none == "no rows: nan"
    assert wrong == "a wrong target: nan"
    assert grad.startswith("ValueError: cross_entropy_in_place_ takes no logits that require grad: call it in")
    assert kept.endswith("modified by an inplace operation")
    assert " 0.0%" in scaled
    assert " 0.0%" not in in_place


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch. Both call functions
# again with what the op has written over. In rows of one logit the loss stays what it was, 0.
OPS = [
    (
        "cross_entropy_in_place_",
        lambda normal, M, N: (normal(M, 1), torch.zeros(M, dtype=torch.int64, device=DEVICE)),
        torch_loss,
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("an edge stored without a mask", "offs_e, d_e, mask=mask_e)", "offs_e, d_e)"),
    ("edges left out of the row", "    total += tl.sum(_cross_entropy_in_place_exp(x_e - top), axis=0)\n", ""),
    ("a sum that does not follow its maximum", "        s *= _cross_entropy_in_place_exp(m - larger)\n", ""),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("ignored rows in the mean", "((targets != ignore_index) & (offs < M)).to", "(offs < M).to"),
    ("targets counted past the end", "((targets != ignore_index) & (offs < M)).to", "(targets != ignore_index).to"),
    ("wrong targets read", "known = counts & (target >= 0) & (target < N)", "known = counts & (N > 0)"),
    ("ignored rows have gradients", "    scale = tl.where(counts, scale, 0.0)\n", ""),
    ("a loss where no row counts", "tl.where(counts, loss, 0.0) * scale)", "tl.where(counts, loss * scale, 0.0))"),
    ("smoothing left out of the gradient", "b = scale * SMOOTHING * share", "b = scale * 0"),
    ("a target that is not subtracted", " * a - b - hit\n", " * a - b\n"),
    ("a wrong target written", "target, d_t, mask=known)", "target, d_t, mask=counts & (N > 0))"),
    ("a body stored without a mask", "tl.store(x_body + offs, d, mask=mask,", "tl.store(x_body + offs, d,"),
    ("rows taken for adjacent", "N if logits.is_contiguous() else logits.stride(0)", "N"),
    (
        "a last block that is empty",
        "    last = (N - 1) // (LINES * BLOCK_N) * (LINES * BLOCK_N)\n",
        "    last = N // (LINES * BLOCK_N) * (LINES * BLOCK_N)\n",
    ),
]
