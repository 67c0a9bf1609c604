"""The ops of the recipe LayerNorm: values and gradients in any dtype, shape and layout."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

EPS = 1e-5


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the op takes."""
    return 64 * 1024 // max(4, dtype.itemsize)


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return a random tensor of each shape."""
    return [Layout("contiguous", k).make(shape, dtype, DEVICE) for k, shape in enumerate(shapes)]


def statistics(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the mean and 1 / deviation of each row; zeros of rows without elements."""
    rows = x.numel() // max(1, x.shape[-1])
    if x.numel() == 0:
        return x.new_zeros(2, x.shape[:-1].numel())
    x = x.reshape(rows, -1)
    return torch.stack([x.mean(-1), torch.rsqrt(x.var(-1, correction=0) + eps)])


def normed(x: torch.Tensor, stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows less their means, over their deviations; and for each row 1 / deviation."""
    mean, r = stats.reshape(2, *x.shape[:-1], 1)
    return (x - mean) * r, r


def loss(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Return what roundings of a mean are to a row: all that is left of it where it is nearly constant, or cancels."""
    return x.abs().amax(-1, keepdim=True) * r if x.numel() else r


def exact_with_stats(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> list[Exact]:
    """Return the norm of rows and its statistics. Sums are in trees, which the interpreter may add up one by one."""
    stats = statistics(x, eps)
    h, r = normed(x, stats)
    lost, roundings = loss(x, r), 64 + x.shape[-1]
    y = Exact(h * weight + bias, ((h.abs() + lost) * weight).abs() + bias.abs(), roundings=roundings)
    if x.numel() == 0:
        return [y, Exact(stats, dtype=accumulator)]
    terms = torch.stack([x.abs().amax(-1).flatten(), (r * (1 + lost)).flatten()])
    return [y, Exact(stats, terms, roundings=roundings, dtype=accumulator)]


def exact_gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stats: torch.Tensor) -> list[Exact]:
    """Return the gradients of rows, weight and bias, given any statistics, and the magnitudes that they add up."""
    h, r = normed(x, stats)
    return of_normed(dy, h, h.abs(), r, r.abs(), weight)


def of_normed(
    dy: torch.Tensor, h: torch.Tensor, size: torch.Tensor, r: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> list[Exact]:
    """Return the same of normed rows h, which lose roundings of `size`, as their gradient does of `scale`."""
    N = h.shape[-1]
    M = h.numel() // max(1, N)
    g = dy * weight
    c, most = (h * g).mean(-1, keepdim=True), (size * g.abs()).mean(-1, keepdim=True)
    dx = (g - g.mean(-1, keepdim=True) - h * c) * r
    dx_size = (g.abs() + g.abs().mean(-1, keepdim=True) + most * size) * scale
    across = ((dy * h, dy.abs() * size), (dy, dy.abs()))
    return [
        Exact(dx, dx_size, roundings=64 + N),
        *(
            Exact(terms.reshape(M, N).sum(0), sizes.reshape(M, N).sum(0), roundings=64 + N + M)
            for terms, sizes in across
        ),
    ]


def exact_autograd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> list[Exact]:
    """Return the gradients of rows, weight and bias."""
    h, r = normed(x, statistics(x, eps))
    lost = loss(x, r)
    return of_normed(dy, h, h.abs() + lost, r, r * (1 + lost), weight)


def of_forward(draw: Draw, *shape: int) -> tuple[Any, ...]:
    """Make rows, weight, bias and EPS."""
    return draw(*shape), draw(shape[-1]), draw(shape[-1]), EPS


def of_backward(draw: Draw, *shape: int) -> tuple[torch.Tensor, ...]:
    """Make a gradient, rows, a weight and the statistics of the rows."""
    dy, x, weight = draw(*shape), draw(*shape), draw(shape[-1])
    of_x = statistics(x.double(), EPS)
    return dy, x, weight, draw(*of_x.shape, dtype=torch.promote_types(draw.dtype, torch.float32), of=lambda _: of_x)


def exact_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> list[Exact]:
    """Return the norm of a sum that is rounded, the sum, and its statistics."""
    h = x + residual
    y, stats = exact_with_stats(h, weight, bias, eps)
    # What the sum loses, its differences from the mean lose, and the deviation.
    r = torch.rsqrt(h.var(-1, correction=0, keepdim=True) + eps) if h.numel() else h[..., :1]
    _, scale = normed(h, statistics(h, eps)) if h.numel() else (h, h[..., :1])
    size = loss(h, r) * (1 + (h - h.mean(-1, keepdim=True)).abs() * scale) if h.numel() else h
    of_stats = torch.zeros_like(stats.value)
    if h.numel():
        of_stats = torch.stack([h.abs().amax(-1).flatten(), (r * loss(h, r)).flatten()])
    return [y._replace(narrow=2 * size * weight.abs()), Exact(h), stats._replace(narrow=of_stats)]


def exact_residual_autograd(
    dy: torch.Tensor,
    dh: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> list[Exact]:
    """Return the gradients of both that are added, weight and bias."""
    dx, *others = with_dh(exact_autograd(dy, x + residual, weight, bias, eps), dh)
    return [dx, dx, *others]


def with_dh(gradients: list[Exact], dh: torch.Tensor) -> list[Exact]:
    """Return gradients of which the first has another one added."""
    dx, *others = gradients
    assert dx.terms is not None
    return [dx._replace(value=dx.value + dh, terms=dx.terms + dh.abs()), *others]


def of_residual(draw: Draw, *shape: int) -> tuple[Any, ...]:
    """Make rows, a residual, weight, bias and EPS."""
    return draw(*shape), *of_forward(draw, *shape)


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make rows of one block and two with a NaN and infinities."""
    cases = []
    for N in (37, 5000):
        x = torch.ones(5, N, dtype=draw.dtype, device=DEVICE)
        x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
        cases.append((x, x[0], x[0], EPS))
    return cases


def too_long(*dtypes: torch.dtype) -> Iterator[Refused]:
    """Yield, for each dtype, rows that are too long."""
    for dtype in dtypes:
        most = longest(dtype)
        yield Refused(
            lambda draw, dtype=dtype, most=most: (*[draw(1, dtype=dtype).expand(most + 1)] * 3, EPS),
            ValueError,
            rf"layer_norm takes rows of up to {most} .*{dtype}, not {most + 1}: norms_long",
        )


SHAPES_SAID = r"layer_norm takes shapes \(\.\.\., N\) and \(N,\), not \[\(2, 3\)"
REFUSED = [
    Refused(
        lambda draw: (draw(2, 3), draw(3).double(), draw(3), EPS),
        TypeError,
        "layer_norm takes one float dtype .*float64",
    ),
    Refused(lambda draw: (draw(2, 3), draw(3), draw(3).half(), EPS), TypeError, "layer_norm takes .*float16"),
    Refused(
        lambda draw: (draw(2, 3).int(), draw(3).int(), draw(3).int(), EPS),
        TypeError,
        r"layer_norm takes .*torch\.int32",
    ),
    Refused(lambda draw: (draw(2, 3), draw(2), draw(3), EPS), ValueError, SHAPES_SAID),
    Refused(lambda draw: (draw(2, 3), draw(3), draw(2, 3), EPS), ValueError, SHAPES_SAID),
    Refused(lambda draw: (draw(2, 3), draw(3), draw(1), EPS), ValueError, SHAPES_SAID),
    Refused(lambda draw: (draw(2, 3), draw(), draw(3), EPS), ValueError, SHAPES_SAID),
    Refused(lambda draw: (draw(), draw(3), draw(3), EPS), ValueError, "layer_norm takes shapes "),
    *too_long(*FLOATS),
]
# Lengths of one block and two, even and odd, and more rows than the programs of a backward have tiles.
ROWS = [(17, 5), (9, 1), (17, 5000), (409, 100), (2, 4097), (0, 7), (9, 1000), (2, 8191)]
ROWS += [(4096 // N + 1, N) for N in (3, 64, 256, 257, 1024)]
ROWS += [(2, N) for N in (2048, 2049, 6145, 8192, 12289, 16384)]
ROWS += [(3, 0), (13, 9000), (9, 1500), (9, 4097)]
# Rows that have one launch for all gradients, up to 64 of them at a time and more.
FEW = [(5, 17), (1, 1), (2, 5000), (70, 100), (3, 1000), (33, 4), (17, 65), (2, 4096), (409, 100), (2, 16384)]
LEADS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])
OF_ALL = {
    "small": (2, 5),
    "fits": lambda size, dtype: size[-1] <= longest(dtype),
    "shapes": st.tuples(LEADS, sizes(64, 600)).map(lambda drawn: (*drawn[0], drawn[1])),
}
OF_FORWARD = OF_ALL | {"autocast": torch.float32, "sizes": ROWS, "gradients": exact_autograd, "with_gradients": 3}
OF_RESIDUAL = OF_FORWARD | {"gradients": exact_residual_autograd, "with_gradients": 4}
CONTRACT = [
    Case(
        "layer_norm",
        of_forward,
        lambda *arguments: exact_with_stats(*arguments)[:1],
        reference=lambda x, *rest: torch.nn.functional.layer_norm(
            x.double(), x.shape[-1:], *(t.double() for t in rest[:2]), EPS
        ).to(x.dtype),
        special=special,
        plain=True,
        refused=[
            *REFUSED,
            Refused(
                lambda draw: (draw(2, 3), draw(3), None, EPS),
                TypeError,
                "layer_norm takes a weight and a bias: give ones",
            ),
        ],
        **OF_FORWARD,
    ),
    Case("layer_norm_with_stats", of_forward, exact_with_stats, refused=REFUSED, **OF_FORWARD),
    Case(
        "layer_norm_residual",
        of_residual,
        lambda *arguments: exact_residual(*arguments)[:2],
        plain=True,
        refused=[
            Refused(
                lambda draw: (draw(2, 3), draw(1, 3), draw(3), draw(3), EPS),
                ValueError,
                r"layer_norm_residual takes shapes .*\(1, 3\)",
            ),
            Refused(
                lambda draw: (draw(2, 3), draw(2, 3).half(), draw(3), draw(3), EPS),
                TypeError,
                "layer_norm_residual takes one float dtype .*float16",
            ),
        ],
        **OF_RESIDUAL,
    ),
    Case("layer_norm_residual_with_stats", of_residual, exact_residual, **OF_RESIDUAL),
    *(
        Case(
            "layer_norm_backward",
            lambda draw, *shape: (*of_backward(draw, *shape), draw(*shape)),
            lambda *arguments: with_dh(exact_gradients(*arguments[:4]), arguments[4]),
            sizes=sizes,
            settings=settings,
            name=f"layer_norm_backward with a gradient of the sum {name}",
            **OF_ALL,
        )
        for name, sizes, settings in (
            ("", ROWS, {}),
            ("of few rows", FEW, {"_layer_norm_gpu": lambda _: (1000, 2**17)}),
        )
    ),
    Case(
        "layer_norm_backward",
        of_backward,
        exact_gradients,
        sizes=ROWS,
        refused=[
            Refused(
                lambda draw: (draw(1, 3), draw(2, 3), draw(3), draw(2, 2)),
                ValueError,
                "layer_norm_backward takes shapes ",
            ),
            Refused(
                lambda draw: (draw(2, 3), draw(2, 3), draw(3), draw(2, 1)),
                ValueError,
                r"layer_norm_backward takes the stats .*\(2, 1\)",
            ),
            Refused(
                lambda draw: (draw(2, 3).half(), draw(2, 3), draw(3), draw(2, 2)),
                TypeError,
                "layer_norm_backward takes .*float16",
            ),
        ],
        **OF_ALL,
    ),
    Case(
        "layer_norm_backward",
        of_backward,
        exact_gradients,
        sizes=FEW,
        settings={"_layer_norm_gpu": lambda _: (1000, 2**17)},
        name="layer_norm_backward of few rows",
        **OF_ALL,
    ),
]


def test_plans(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers ask for what fits the GPU."""
    rows = torch.empty(10**6, 12288, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(taken, "_layer_norm_gpu", lambda device: (2, 227 * 1024))  # an H100's shared memory
    for N, stages in {128: 1, 512: 1, 768: 3, 4096: 3, 12288: 3, 16384: 1}.items():
        row = torch.empty(1000, N, dtype=torch.bfloat16, device="meta")
        assert taken._layer_norm_plan_backward(row, N)[1]["STAGES"] == stages
    assert taken._layer_norm_plan_backward(rows.float(), 12288)[1]["STAGES"] == 1
    assert taken._layer_norm_plan_backward(rows, 12288)[0] == 2
    assert [taken._layer_norm_plan(rows[:M], 12288)["EARLY"] for M in (1, 2, 3)] == [True, True, False]
    assert taken._layer_norm_plan(rows[:, :4096], 12288)["EARLY"]
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        assert taken._layer_norm_plan(rows[:1, :N], stride)["VEC"] == vec


def test_gpu_that_does_not_tell_its_shared_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's, torch has no such property."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304))
    assert taken._layer_norm_gpu.__wrapped__(torch.device("cuda")) == (304, 64 * 1024)


@pytest.mark.parametrize("early", [True, False], ids="float32-{}".format)
@pytest.mark.parametrize("N", [100, 5000])
def test_weight_early_and_late(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, N: int, early: bool) -> None:
    """The result is the same wherever weight and bias are loaded."""
    plan = taken._layer_norm_plan
    monkeypatch.setattr(taken, "_layer_norm_plan", lambda x, stride: plan(x, stride) | {"EARLY": early})
    x, weight, bias = make((3, N), (N,), (N,))
    expected = torch.nn.functional.layer_norm(x, (N,), weight, bias, EPS)
    torch.testing.assert_close(taken.layer_norm(x, weight, bias, EPS), expected)


@pytest.mark.parametrize("N", [1, 5, 64, 300])
def test_kernels_of_the_lesson(recipe: ModuleType, N: int) -> None:
    """They are right for any length and number of programs, and store nothing past the end."""
    x, dy, weight, bias = (t.to(recipe.DEVICE) for t in make((9, N), (9, N), (N,), (N,)))
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = recipe.layer_norm_in_steps(*leaves)
    out, stats = guarded(recipe.norm_rows, x, weight, bias)
    torch.testing.assert_close(out.double(), y, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(y, leaves, dy.double())
    for programs in (1, 4, 512, 9):
        gradients = partial(recipe.gradients, programs=programs)
        results = guarded(gradients, dy, x, weight, stats)
        for result, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-3 if N == 1 else 1e-5)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]  # autograd takes a program for each of the nine rows
    assert all(map(torch.equal, torch.autograd.grad(recipe.LayerNorm.apply(*leaves), leaves, dy), results))


@pytest.mark.parametrize("shape", [(1, 1), (7, 40), (130, 16)])
def test_sums_over_rows(recipe: ModuleType, shape: tuple[int, int]) -> None:
    """Atomic additions and partial sums are right, with more rows than programs and fewer."""
    terms = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).float().to(recipe.DEVICE)
    M, N = terms.shape
    block = 1 << (N - 1).bit_length()
    stats = torch.zeros(M, 2, device=terms.device)
    ones = torch.ones_like(terms[0])

    def atomic(terms: torch.Tensor) -> torch.Tensor:
        total = terms.new_zeros(N)
        recipe.atomic_kernel[(M,)](terms, total, N, BLOCK=block)
        return total

    for sums in (atomic, lambda terms: recipe.gradients(terms, terms, ones, stats, 16)[2]):
        assert torch.equal(guarded(sums, terms), terms.sum(0))


def test_exercises(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The check accepts the answers, refuses another function, and says that a hole is one."""
    dy = recipe.dy
    for hole, wrong, answer, expected in (
        (recipe.bias_gradient, torch.sum, recipe.answer_1, dy.sum(0)),
        (recipe.column_max, recipe.answer_1, recipe.answer_2, dy.abs().amax(0)),
    ):
        for solution in (hole, wrong, answer):
            recipe.check(solution, dy, expected)
    assert capsys.readouterr().out.splitlines() == ["not solved yet", "wrong", "right"] * 2


@pytest.mark.parametrize(("N", "mean"), [(1000, 1e4), (513, 1e6), (12_000, 1e4)], ids="float32-{}".format)
def test_large_mean(taken: ModuleType, N: int, mean: float) -> None:
    """Of a variance of 1 beside it, E[x * x] has no bit left in float32, and the mean is rounded to a part of it."""
    x = torch.randn(16, N, generator=torch.Generator().manual_seed(0)).to(DEVICE) + mean
    ones, zeros = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)
    out = taken.layer_norm(x, ones, zeros, EPS).double()
    expected = torch.nn.functional.layer_norm(x.double(), (N,), eps=EPS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_statistics_have_no_gradient(taken: ModuleType) -> None:
    """The op's second result is for the backward only."""
    x, weight, bias = make((3, 5), (5,), (5,))
    y, stats = taken.layer_norm_with_stats(x.requires_grad_(), weight, bias, EPS)
    assert y.requires_grad
    assert not stats.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16, and so is the sum of many."""
    x = torch.full((2, 1000), 300.0, dtype=dtype, device=DEVICE)
    x[:, ::2] *= -1
    ones = torch.ones_like(x[0])
    torch.testing.assert_close(taken.layer_norm(x, ones, 0 * ones, EPS), x.sign())
    x = 301 + x.sign()
    x[:, 0] = 0  # The sum of the differences from it is infinite in float16.
    expected = torch.nn.functional.layer_norm(x.double(), ones.shape, eps=EPS).to(dtype)
    torch.testing.assert_close(taken.layer_norm(x, ones, 0 * ones, EPS), expected, rtol=1e-3, atol=1e-3)


def test_constant_rows(taken: ModuleType) -> None:
    """A row without a variance becomes the bias, and its gradient is finite."""
    x = torch.full((3, 50), 7.0, device=DEVICE)
    leaves = x.requires_grad_(), *make((50,), (50,))
    y = taken.layer_norm(*leaves, EPS)
    assert torch.equal(y, leaves[2].expand(3, 50))
    assert torch.autograd.grad(y, x, x)[0].isfinite().all()


@pytest.mark.needs_gpu_memory(14)
def test_beyond_int32(taken: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(2**19 + 1, 2**12, dtype=torch.float16, device=DEVICE)
    x[:, ::2] = -1
    x[-1] *= 2
    ones = torch.ones_like(x[0])
    y, stats = taken.layer_norm_with_stats(x, ones, 0 * ones, EPS)
    assert torch.equal(y[-1].sign(), x[-1].sign())
    assert y.abs_().sub_(1).abs_().max() < 1e-3
    del y
    dx, _, _ = taken.layer_norm_backward(x, x, ones, stats)
    assert dx.abs_().max() < 1e-2


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a gradient of the sum left out", "            dx += _layer_norm_read(dh_ptrs, mask).to(ACC)\n", ""),
    (
        "a gradient of the sum left out of the second block",
        "                dx_rest += _layer_norm_read(dh_ptrs, rest < N).to(ACC)\n",
        "",
    ),
    (
        "a gradient of the sum left out of few rows",
        "            dx += _layer_norm_read(dh_ptr + row * N + offs, mask).to(ACC)\n",
        "",
    ),
    ("a residual left out", "        x += _layer_norm_read(residual_rows + offs, mask).to(ACC)\n", ""),
    ("a residual with the stride of x", "(stride_rm // VEC * VEC)", "stride_xm"),
    (
        "differences behind the end of a row",
        "d = x - mean if REST else tl.where(mask, x - mean, 0)",
        "d = x - mean",
    ),
    (
        "differences behind the end of a second block",
        "d_rest = tl.where(rest < N, x_rest - mean, 0)",
        "d_rest = x_rest - mean",
    ),
    ("a mean without the second block", "        total += tl.sum(x_rest", "        tl.sum(x_rest"),
    ("a variance without the second block", "        var += tl.sum(d_rest", "        tl.sum(d_rest"),
    ("a rounded mean", "first = tl.load(x_rows).to(ACC)", "first = 0 * tl.load(x_rows).to(ACC)"),
    ("elements behind the end of a row", "tl.where(mask, x - first, 0)", "x - first"),
    ("elements behind the end of a second block", "tl.where(rest < N, x_rest - first, 0)", "x_rest - first"),
    (
        "a variance in one pass",
        "var = tl.sum(d * d, axis=1, keep_dims=True) / N",
        "var = tl.sum(x * x, axis=1, keep_dims=True) / N - mean * mean",
    ),
    ("a norm stored without a mask", "tl.store(y_rows + offs_n, y, mask=mask)", "tl.store(y_rows + offs_n, y)"),
    (
        "rows behind the last",
        "and the same values are stored.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "and the same values are stored.\n",
    ),
    ("a load without a mask", "tl.load(ptrs, mask=mask, other=0)", "tl.load(ptrs)"),
    ("vectors across rows", "math.gcd(N, stride, 16 // x", "math.gcd(stride, 16 // x"),
    (
        "x read with the stride of dy",
        "x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)\n        rows",
        "x_ptr + offs_m * N\n        rows",
    ),
    (
        "dx stored without a mask",
        "tl.store(dx_ptr + rows + offs_n, dx, mask=mask)",
        "tl.store(dx_ptr + rows + offs_n, dx)",
    ),
    ("a mean without a gradient", "dx = (dy * weight - sum_g / N - h", "dx = (dy * weight - h"),
    ("a gradient without the second block", "            sum_gh += tl.sum(", "            tl.sum("),
    ("a weight gradient of the last rows", "        dw += dy * h\n", "        dw = dy * h\n"),
    (
        "a weight gradient of the last rest",
        "            dw_rest += dy_rest * h_rest",
        "            dw_rest = dy_rest * h_rest",
    ),
    ("a bias gradient of the last rest", "            db_rest += dy_rest\n", "            db_rest = dy_rest\n"),
    (
        "rows counted twice",
        "        mask = None if REST else (offs_m < M) & (offs_n < N)\n",
        "        offs_m = tl.minimum(offs_m, M - 1)\n        mask = None if REST else offs_n < N\n",
    ),
    ("partial sums over each other", "db_rows = dw_rows + programs.to(tl.int64) * N", "db_rows = dw_rows + N"),
    ("sums in half precision", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("few rows, read with the stride of dy", "(x_ptr + row * stride_xm + offs", "(x_ptr + row * N + offs"),
    ("few rows, columns of the last", "    for start in range(0, M, BLOCK_M):", "    for start in range(0, 1):"),
    ("few rows, a mean without a gradient", "dx = (g - sum_g / N - h * (sum_gh", "dx = (g - h * (sum_gh"),
    ("few rows, columns past the end", "(dw_ptr + offs_n, dw, mask=offs_n < N)", "(dw_ptr + offs_n, dw)"),
]
