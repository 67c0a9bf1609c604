"""The ops of the recipe Norms of long rows: values and gradients in any dtype, shape and layout, with every plan."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator
from compiled import Ask, graphs, ptx
from hypothesis import given
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
each_norm = pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])

EPS = 1e-5


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


def statistics(x: torch.Tensor, center: bool, eps: float) -> torch.Tensor:
    """Return, for each row, 1 over its root mean square, or 1 over its deviation and its mean."""
    mean = x.mean(-1, keepdim=True) * center
    r = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    return torch.stack([r.flatten(), mean.flatten()][: 1 + center])


def of_rows(x: torch.Tensor, stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a row's differences from its mean are multiplied with, and the mean, for each element of a row."""
    r, mean = stats if len(stats) == 2 else (stats[0], torch.zeros_like(stats[0]))
    return r.view(*x.shape[:-1], 1), mean.view(*x.shape[:-1], 1)


def factors(like: torch.Tensor, weight: torch.Tensor | None, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a normalised row is multiplied with, and the magnitudes that this adds up."""
    if weight is None:
        return (torch.ones_like(like[..., :1]),) * 2
    return offset + weight, abs(offset) + weight.abs()


def exact(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> list[Exact]:
    """Return the norm of rows, and their statistics."""
    center = bias is not None
    if x.numel() == 0:
        return [
            Exact(x),
            Exact(x.new_zeros(1 + center, math.prod(x.shape[:-1])), dtype=accumulator),
        ]
    stats = statistics(x, center, eps)
    r, mean = of_rows(x, stats)
    # Where a row is nearly constant, or cancels, what is left of x are the roundings of its mean.
    loss = x.abs().amax(-1, keepdim=True) * center
    factor, most = factors(x, weight, offset)
    shift = torch.zeros_like(x[..., :1]) if bias is None else bias
    terms = ((x - mean).abs() + loss) * r * most + shift.abs()
    of_stats = torch.stack([(r * (1 + loss * r)).flatten(), loss.flatten()][: 1 + center])
    y = (x - mean) * r * factor
    narrow = y.abs() if casting_mode == "llama" else None
    return [Exact(y + shift, terms, narrow=narrow), Exact(stats, of_stats, dtype=accumulator)]


def exact_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    offset: float = 0.0,
    loss: float | torch.Tensor = 0.0,
) -> list[Exact]:
    """Return the gradients of x and of the vectors, given statistics; the loss is what roundings of the mean may be."""
    N, center = x.shape[-1], len(stats) == 2
    if x.numel() == 0:
        return [Exact(x), Exact(x.new_empty(0) if weight is None else x.new_zeros(len(stats), N))]
    r, mean = of_rows(x, stats)
    factor, most = factors(x, weight, offset)
    g, of_g, d = dy * factor, dy.abs() * most, x - mean
    size = d.abs() + loss
    c, of_c = ((part).mean(-1, keepdim=True) * r * r for part in (g * d, of_g * size))
    terms = (of_g + of_g.mean(-1, keepdim=True) + size * of_c) * r * (1 + loss * r)
    sums = [dy * d * r, dy][: len(stats)]
    of_sums = [dy.abs() * size * r, dy.abs()][: len(stats)]
    vectors = (torch.stack([part.reshape(-1, N).sum(0) for part in parts]) for parts in (sums, of_sums))
    return [
        Exact((g - g.mean(-1, keepdim=True) * center - d * c) * r, terms),
        Exact(*((x.new_empty(0),) if weight is None else vectors), made_by_torch=True),
    ]


def exact_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "gemma",
) -> list[Exact]:
    """Return the gradients of x and of each vector."""
    center = bias is not None
    loss = x.abs().amax(-1, keepdim=True) * center if x.numel() else 0.0
    dx, vectors = exact_backward(dy, x, weight, statistics(x, center, eps), offset, loss)
    if weight is None:
        return [dx]
    each = vectors.terms if vectors.terms is not None else vectors.value
    return [dx, *(Exact(*pair) for pair in zip(vectors.value, each, strict=True))]


def rows_and_vectors(draw: Draw, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Make rows, a weight and a bias."""
    return draw(*shape), draw(shape[-1]), draw(shape[-1]), EPS


def rows_and_weight(draw: Draw, *shape: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Make rows and a weight."""
    return draw(*shape), draw(shape[-1]), EPS


def backward(draw: Draw, center: int, *shape: int) -> tuple[torch.Tensor, ...]:
    """Make a gradient, rows, a weight, and the statistics of LayerNorm or of RMSNorm."""
    dy, x, weight = draw(*shape), draw(*shape), draw(shape[-1])
    stats = statistics(x.double(), bool(center), EPS)
    return dy, x, weight, stats.to(torch.promote_types(x.dtype, torch.float32))


def with_options(
    name: str, *options: Any, weight: bool = True, wide: bool = False, center: bool = False
) -> Iterator[Case]:
    """Yield the cases of a norm with options, or of vectors that are float32 at least, and those of its backward."""
    norm = "norms_long_layer_norm" if center else "norms_long_rms_norm"

    def vector(draw: Draw, N: int) -> torch.Tensor | None:
        return draw(N, dtype=accumulator(draw.dtype) if wide else None) if weight else None

    def arguments(draw: Draw, *shape: int) -> tuple[Any, ...]:
        return draw(*shape), *(vector(draw, shape[-1]) for _ in range(1 + center)), EPS, *options

    def of_backward(draw: Draw, *shape: int) -> tuple[Any, ...]:
        dy, x, _, stats = backward(draw, center, *shape)
        return dy, x, vector(draw, shape[-1]), stats, *options[:1]

    def full(*given: Any) -> tuple[Any, ...]:
        return given if center else (*given[:2], None, *given[2:])

    def exact_wide(*given: Any) -> list[Exact]:
        dx, vectors = exact_backward(*given)
        return [dx, vectors._replace(dtype=accumulator if wide else None)]

    yield Case(
        norm,
        arguments,
        lambda *given: exact(*full(*given))[:1],
        name=f"{norm} {name}",
        gradients=lambda dy, *given: exact_gradients(dy, *full(*given)),
        with_gradients=1 + weight + center,
        **OF_NORM,
    )
    yield Case(
        "norms_long_backward",
        of_backward,
        exact_wide,
        name=f"norms_long_backward {name}",
        **OF_STATS | {"sizes": SIZES[:8]},
    )


def special(draw: Draw) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Make short and long rows with NaN and infinities, beside others, and a vector of ones."""
    for N in (37, 20_001):
        x = torch.ones(5, N, dtype=draw.dtype, device=DEVICE)
        x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
        yield x, torch.ones_like(x[0])


def on_cpu(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return PyTorch's norm on a CPU: on a GPU, RMSNorm is NaN in a whole row where one element is infinite."""
    return lambda x, *vectors_and_eps: norm(
        x.cpu(), x.shape[-1:], *(v.cpu() if isinstance(v, torch.Tensor) else v for v in vectors_and_eps)
    ).to(x.device)


def layer_norms_refused() -> list[Refused]:
    """Return the calls of LayerNorm that raise."""

    def call(vectors: Callable[[Draw], tuple[torch.Tensor | None, ...]], error: type[Exception], text: str) -> Refused:
        return Refused(lambda draw: (draw(2, 3), *vectors(draw), EPS), error, f"norms_long_layer_norm takes {text}")

    shapes = r"shapes \(\.\.\., N\) and \(N,\), not \[\(2"
    return [
        call(lambda draw: (draw(3).double(), draw(3)), TypeError, "rows of one float dtype .*float64"),
        call(lambda draw: (draw(3), draw(3).half()), TypeError, ".*float16"),
        call(lambda draw: (draw(3), None), TypeError, "a bias, not None"),
        call(lambda draw: (None, draw(3)), TypeError, r"rows of one float dtype and device, .*None, \("),
        call(lambda draw: (draw(3), draw(3).to("meta")), TypeError, r".*meta"),
        call(lambda draw: (draw(2), draw(3)), ValueError, shapes),
        call(lambda draw: (draw(3), draw(2, 3)), ValueError, shapes),
        call(lambda draw: (draw(3), draw(1)), ValueError, shapes),
        call(lambda draw: (draw(), draw(3)), ValueError, shapes),
    ]


def rms_norms_refused() -> list[Refused]:
    """Return the calls of RMSNorm that raise."""

    def call(two: Callable[[Draw], tuple[torch.Tensor | None, ...]], error: type[Exception], text: str) -> Refused:
        return Refused(lambda draw: (*two(draw), EPS), error, f"norms_long_rms_norm takes {text}")

    return [
        call(lambda draw: (draw(2, 3).int(), draw(3).int()), TypeError, r".*torch\.int32"),
        call(lambda draw: (draw(2, 3).int(), None), TypeError, r".*torch\.int32"),
        call(lambda draw: (draw(2, 3), draw(3).int()), TypeError, r".*torch\.int32"),
        call(lambda draw: (draw(2, 3), draw(3).to("meta")), TypeError, ".*meta"),
        call(lambda draw: (draw(2, 3), draw(2)), ValueError, "shapes "),
        Refused(
            lambda draw: (draw(2, 3), None, EPS, 1.0),
            ValueError,
            r"norms_long_rms_norm takes an offset of a weight, not 1\.0 without a weight",
        ),
        Refused(
            lambda draw: (draw(2, 3), draw(3), EPS, 0.0, "none"),
            ValueError,
            "norms_long_rms_norm takes casting_mode='gemma' or 'llama', not 'none'",
        ),
        call(lambda draw: (draw(), draw(3)), ValueError, "shapes "),
        call(
            lambda draw: (draw(1).expand(2**30 + 1),) * 2, ValueError, r"rows of up to 2\*\*30 elements, not 1073741825"
        ),
    ]


def backward_refused() -> list[Refused]:
    """Return the calls of the backward that raise."""

    def call(change: Callable[..., tuple[torch.Tensor, ...]], error: type[Exception], text: str) -> Refused:
        return Refused(lambda draw: change(*backward(draw, 1, 2, 3)), error, f"norms_long_backward takes {text}")

    return [
        call(lambda dy, x, weight, stats: (dy[:1], x, weight, stats), ValueError, "shapes "),
        call(lambda dy, x, weight, stats: (dy.half(), x, weight, stats), TypeError, ".*float16"),
        call(lambda dy, x, weight, stats: (dy, x, None, stats), TypeError, ".*None"),
        call(lambda dy, x, weight, stats: (dy, x, weight, stats[:, :1]), ValueError, "the stats "),
        call(lambda dy, x, weight, stats: (dy, x, weight, stats[0]), ValueError, "the stats "),
        call(lambda dy, x, weight, stats: (dy, x, weight, stats[:0]), ValueError, "the stats "),
        call(lambda dy, x, weight, stats: (dy, x, weight, torch.cat([stats] * 2)), ValueError, "the stats "),
    ]


# Rows of an odd length, several tiles for a program, long rows, blocks that a row does not fill; then the lengths of
# small blocks, those beside them, and rows for every plan.
SIZES = [(5, 1001), (45, 1500), (3, 20_001), (2, 8200), (3, 1), (0, 7), (9, 257), (5, 0), (7,), (2, 0, 3), (2, 3, 100)]
SIZES += [(5, N) for N in (2, 3, 8, 1024, 1025, 4096, 8192)]
SIZES += [(2, N) for N in (16_384, 20_000, 32_768, 50_176)]
LEADS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])
SHAPES = st.tuples(LEADS, sizes(1024, 4500)).map(lambda drawn: (*drawn[0], drawn[1]))
FEW = st.tuples(LEADS, sizes(64, 300)).map(lambda drawn: (*drawn[0], drawn[1]))
ROUNDINGS = 96  # of sums over the blocks of a row, over a block, and over the rows
OF_STATS = {"sizes": SIZES, "small": (2, 5), "many": (20, 102_650), "shapes": SHAPES, "roundings": ROUNDINGS}
OF_NORM = OF_STATS | {"sizes": SIZES[:2], "shapes": FEW, "plain": True, "autocast": torch.float32}
CONTRACT = [
    Case(
        "norms_long_with_stats",
        rows_and_vectors,
        exact,
        **OF_STATS,
        autocast=torch.float32,
        gradients=exact_gradients,
        with_gradients=3,
    ),
    Case(
        "norms_long_with_stats",
        lambda draw, *shape: (draw(*shape), draw(shape[-1]), None, EPS),
        exact,
        name="norms_long_with_stats of RMSNorm",
        **OF_STATS,
        autocast=torch.float32,
        gradients=lambda dy, *given: exact_gradients(dy, *given),
        with_gradients=2,
    ),
    Case(
        "norms_long_backward",
        backward,
        exact_backward,
        sizes=[(i % 2, *size) for i, size in enumerate(SIZES, 1)]
        + [(i % 2, *size) for i, size in enumerate(SIZES) if i < 8 or size[-1] > 10_000],
        small=(1, 2, 5),
        many=(1, 1031, 6159),
        shapes=st.tuples(st.integers(0, 1), SHAPES).map(lambda drawn: (drawn[0], *drawn[1])),
        roundings=ROUNDINGS,
        refused=backward_refused(),
    ),
    Case(
        "norms_long_layer_norm",
        rows_and_vectors,
        lambda *given: exact(*given)[:1],
        **OF_NORM,
        reference=on_cpu(torch.nn.functional.layer_norm),
        special=lambda draw: [(x, ones, ones, EPS) for x, ones in special(draw)],
        gradients=exact_gradients,
        with_gradients=3,
        refused=layer_norms_refused(),
    ),
    Case(
        "norms_long_rms_norm",
        rows_and_weight,
        lambda x, weight, eps: exact(x, weight, None, eps)[:1],
        **OF_NORM,
        reference=on_cpu(torch.nn.functional.rms_norm),
        special=lambda draw: [(x, ones, EPS) for x, ones in special(draw)],
        gradients=lambda dy, x, weight, eps: exact_gradients(dy, x, weight, None, eps),
        with_gradients=2,
        refused=rms_norms_refused(),
    ),
    *with_options("without weight", weight=False),
    *with_options("of Gemma", 1.0),
    *with_options("of two dtypes", -0.5, "llama", wide=True),
    *with_options("of two dtypes and a bias", wide=True, center=True),
]


@each_norm
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_special_values_stay_in_their_row(taken: ModuleType, dtype: torch.dtype, center: bool) -> None:
    """NaN and infinity in a row leave the gradients of another finite."""
    for x, ones in special(Draw(dtype)):
        _, stats = taken.norms_long_with_stats(x, ones, ones if center else None, EPS)
        dx, _ = taken.norms_long_backward(torch.ones_like(x), x, ones, stats)
        assert dx[::4].isfinite().all()


def test_plans(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of odd lengths are loaded in smaller pieces, by fewer warps; and AMD's programs have no more than 16."""
    x, rows = (torch.empty(2, N, dtype=torch.bfloat16, device="meta") for N in (10**6, 1001))
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        with cached(taken, 2**10):
            plan = taken._norms_long_plan(rows[:, :N], stride, False)
        assert (plan["VEC"], plan["num_warps"]) == (vec, 32 if vec == 8 else 16)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert taken._norms_long_plan(x, 10**6, False)["num_warps"] == 16


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
    ones, zeros = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)
    out = taken.norms_long_layer_norm(x, ones, zeros, EPS).double()
    expected = torch.nn.functional.layer_norm(x.double(), (N,), eps=EPS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_means_of_columns_differ(taken: ModuleType) -> None:
    """A row that repeats itself each block: all of its variance lies between the columns (float32)."""
    plan, N = taken._norms_long_plan(torch.empty(2, 20_000, device="meta"), 20_000, False), 20_000
    column = torch.arange(N, device=DEVICE) % plan["BLOCK_N"]
    x = column.float().expand(2, N)
    ones, zeros = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)
    expected = torch.nn.functional.layer_norm(x.double(), (N,), eps=EPS).float()
    torch.testing.assert_close(taken.norms_long_layer_norm(x, ones, zeros, EPS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_casting_modes(taken: ModuleType, offset: float, dtype: torch.dtype) -> None:
    """Gemma rounds once; Llama rounds before the product too. Nearly all numbers are those of transformers."""
    x, weight = make((9, 700), dtype=torch.float16)[0], make((700,), dtype=dtype)[0]
    wide, factor = exact(x.float(), None, None, EPS)[0].value, offset + weight.float()
    expected = {"gemma": wide * factor, "llama": wide.half().float() * factor}
    for mode in expected:
        y = taken.norms_long_rms_norm(x, weight, EPS, offset, mode)
        same = {name: (y == value.half()).double().mean().item() for name, value in expected.items()}
        assert same.pop(mode) > 0.99
        assert max(same.values()) < 0.9


@pytest.mark.parametrize(("dtype", "other"), list(itertools.permutations(FLOATS, 2)), ids=str)
def test_dtypes_of_vectors(taken: ModuleType, dtype: torch.dtype, other: torch.dtype) -> None:
    """Results have x's dtype, as those of PyTorch, and each gradient that of its argument."""
    if (dtype, other) == (torch.float64, torch.bfloat16) and DEVICE.type == "cpu":
        pytest.skip("the interpreter makes NaN of some float64 that it casts to bfloat16")
    x, (weight, bias) = make((4, 50), dtype=dtype)[0], make((50,), (50,), dtype=other)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    for bias in (leaves[2], None):
        y = taken.norms_long_with_stats(*leaves[:2], bias, EPS)[0]
        assert y.dtype == dtype
        torch.testing.assert_close(y, reference(*(t if t is None else t.double() for t in (x, weight, bias))).to(dtype))
        given = leaves[: 2 + (bias is not None)]
        grads = torch.autograd.grad(y, given, torch.ones_like(y))
        assert [grad.dtype for grad in grads] == [t.dtype for t in given]


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
    ones = torch.ones_like(x[0])
    torch.testing.assert_close(taken.norms_long_layer_norm(x, ones, 0 * ones, EPS), x.sign())
    torch.testing.assert_close(taken.norms_long_rms_norm(x, ones, EPS), x.sign())
    x = 301 + x.sign()
    x[:, 0] = 0  # The sum of the differences from it is infinite in float16.
    expected = torch.nn.functional.layer_norm(x.double(), ones.shape, eps=EPS).to(dtype)
    torch.testing.assert_close(taken.norms_long_layer_norm(x, ones, 0 * ones, EPS), expected, rtol=1e-3, atol=1e-3)


def test_constant_rows(taken: ModuleType) -> None:
    """A row without a variance becomes the bias, and its gradient is finite."""
    x = torch.full((3, 20_001), 7.0, device=DEVICE)
    leaves = x.requires_grad_(), *make((20_001,), (20_001,))
    y = taken.norms_long_layer_norm(*leaves, EPS)
    assert torch.equal(y, leaves[2].expand_as(y))
    assert torch.autograd.grad(y, x, x)[0].isfinite().all()


@pytest.mark.needs_gpu_memory(14)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (33, 2**26)])
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(rows, N, dtype=torch.float16, device=DEVICE)
    x[:, ::2] = -1
    x[-1] *= 2
    ones = torch.ones_like(x[0])
    y, stats = taken.norms_long_with_stats(x, ones, 0 * ones, EPS)
    assert torch.equal(y[-1].sign(), x[-1].sign())
    assert y.abs_().sub_(1).abs_().max() < 1e-3
    del y
    dx, _ = taken.norms_long_backward(x, x, ones, stats)
    assert dx.abs_().max() < 1e-2


@given(M=st.integers(1, 3000), N=st.integers(1, 300_000), size=st.sampled_from([2, 4, 8]))
def test_plan_of_the_backward(taken: ModuleType, M: int, N: int, size: int) -> None:
    """Few rows are shared and many are not, strips cover a row, and both kernels fill the GPU if there is that much."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size]
    x = torch.empty(1, dtype=dtype, device="meta").expand(M, N)
    with cached(taken, 2**20, processors=132):
        (rows, parts), sums, (strips, programs), tile = taken._norms_long_plan_backward(x, N)
    assert rows == M
    assert (strips - 1) * tile["BLOCK_N"] < N <= strips * tile["BLOCK_N"]
    blocks, tiles = -(-N // sums["BLOCK_N"]), -(-M // tile["BLOCK_M"])
    wanted = taken.NORMS_LONG_EACH * 132
    assert parts == blocks or M * (parts - 1) < wanted <= M * parts
    assert parts == 1 or wanted > M
    assert programs in (1, tiles) or strips * programs <= wanted < strips * (programs + 1)
    assert programs == 1 or strips * programs <= wanted


NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype, N: int, center: bool) -> list[tuple[object, dict[str, object]]]:
    """Return all three kernels, each with what is known of its arguments at a launch."""
    x = torch.empty(10**4, N, dtype=dtype, device="meta")
    acc_type = "fp64" if dtype == torch.float64 else "fp32"
    known = {"dtype": NAMES[dtype], "stats_ptr": acc_type, "CENTER": center}
    forward, (_, sums, _, tile) = taken._norms_long_plan(x, N, center), taken._norms_long_plan_backward(x, N)
    return [
        (taken._norms_long_kernel, {**known, **forward, "EPS": EPS}),
        (taken._norms_long_sums_kernel, {**known, **sums, "rows_ptr": acc_type}),
        (taken._norms_long_gradients_kernel, {**known, **tile, "rows_ptr": acc_type, "sums_ptr": acc_type}),
    ]


def widths(taken: ModuleType) -> list[set[str]]:
    """Return how wide all kernels load and store rows in bfloat16."""
    known = launches(taken, torch.bfloat16, 100_000, True)
    return [set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b32|b16)\s", ptx(kernel, **plan))) for kernel, plan in known]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Rows are loaded and stored 16 bytes at a time; the forward also loads a row's first element."""
    (results,) = on_h100(gallery / "fusion" / "norms_long.py", widths)
    assert results == [{"v4.b32", "b16"}, {"v4.b32"}, {"v4.b32"}]


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
    (traced_graphs,) = on_h100(gallery / "fusion" / "norms_long.py", traced)
    for forward, backward in traced_graphs:
        for graph, count in ((forward, 1), (backward, 2)):
            kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
            assert kernels == ["triton_kernel_wrapper_functional"] * count
            assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
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
    ("dx stored without a mask", "(g - d * c) * r,\n            mask=mask,\n", "(g - d * c) * r,\n"),
    ("no offset", "        if OFFSET != 0:\n            factor += OFFSET\n        x *= factor", "        x *= factor"),
    ("no offset in tiles", "            factor += OFFSET\n    # A thread", "            factor += 0.0\n    # A thread"),
    ("x rounded where it is Gemma's", "        if LLAMA:\n", "        if True:\n"),
    ("x not rounded", "y = y.to(x.dtype).to(ACC)", "y = y.to(ACC)"),
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
    ("a mean without a gradient", "            g -= tl.load(", "            g -= 0 * tl.load("),
    ("a gradient of the last block", "        sum_gd += g *", "        sum_gd = g *"),
    ("a shift of the last block", "        sum_g += g\n", "        sum_g = g\n"),
    ("a weight gradient of the last rows", "        dw += tl.sum(", "        dw = tl.sum("),
    ("a bias gradient of the last rows", "            db += tl.sum(", "            db = tl.sum("),
    ("rows past the last", "inside = offs_m < M", "inside = offs_m >= 0"),
    ("partial sums over each other", "sums_ptrs += programs.to(tl.int64) * N", "sums_ptrs += N"),
    ("a weight gradient of one row of tiles", "dw += tl.sum(dy * (d * r)", "dw += tl.max(dy * (d * r)"),
    ("vectors across rows", "vec = math.gcd(N, stride", "vec = math.gcd(stride"),
    ("vectors across rows, backward", '"VEC": math.gcd(N, stride', '"VEC": math.gcd(stride'),
    ("parts over each other", "end = tl.minimum((part + 1) * span, N)", "end = N"),
    ("sums of the largest part", "rows.sum(-1) if", "rows.amax(-1) if"),
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
