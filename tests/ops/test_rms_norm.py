"""The ops of the recipe RMSNorm: values and gradients in any dtype, shape and layout, with a residual and without."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

EPS = 1e-5


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the ops take."""
    return 64 * 1024 // max(4, dtype.itemsize)


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> list[Exact]:
    """Return the norm of rows."""
    return [Exact(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)]


def exact_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> list[Exact]:
    """Return the norm of a sum, which is rounded in it and in its mean square, and the sum."""
    h = x + residual
    ((y, *_),) = exact(h, weight, eps)
    return [Exact(y, narrow=2 * y.abs()), Exact(h, x.abs() + residual.abs(), roundings=2)]


def exact_gradients(
    dy: torch.Tensor, dh: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, eps: float
) -> list[Exact]:
    """Return the gradients of rows and weight, and the magnitudes that they add up."""
    N = h.shape[-1]
    more = torch.zeros_like(h) if dh is None else dh
    g, r = dy * weight, torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    c, most = ((t * r * r).mean(-1, keepdim=True) for t in (g * h, (g * h).abs()))
    dx = Exact((g - c * h) * r + more, (g.abs() + most * h.abs()) * r + more.abs())
    terms = (dy * h * r).reshape(h.numel() // max(1, N), N)
    return [dx, Exact(terms.sum(0), terms.abs().sum(0), roundings=64 + len(terms))]


def exact_gradients_residual(
    dy: torch.Tensor, dh: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> list[Exact]:
    """Return the gradients of both terms of a sum, and of the weight."""
    dx, dw = exact_gradients(dy, dh, x + residual, weight, eps)
    return [dx, dx, dw]


def matrices(count: int) -> Callable[..., tuple[Any, ...]]:
    """Return what makes so many tensors of rows, a weight and EPS."""
    return lambda draw, *shape: (*(draw(*shape) for _ in range(count)), draw(shape[-1]), EPS)


def without_dh(draw: Draw, *shape: int) -> tuple[Any, ...]:
    """Make arguments for the backward of the norm alone."""
    return draw(*shape), None, draw(*shape), draw(shape[-1]), EPS


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make rows of one block and two with a NaN and infinities."""
    cases = []
    for N in (37, 5001):
        x = torch.ones(5, N, dtype=draw.dtype, device=DEVICE)
        x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
        cases.append((x, x[0], EPS))
    return cases


def refused(
    name: str, error: type[Exception], text: str, *makes: Callable[[Draw], tuple[Any, ...]]
) -> Iterator[Refused]:
    """Yield calls that raise the same."""
    for make in makes:
        yield Refused(lambda draw, make=make: (*make(draw), EPS), error, rf"{name} takes {text}")


def too_long(*dtypes: torch.dtype) -> Iterator[Refused]:
    """Yield, for each dtype, rows that are too long."""
    for dtype in dtypes:
        most = longest(dtype)
        yield Refused(
            lambda draw, dtype=dtype, most=most: (draw(1, dtype=dtype).expand(most + 1),) * 2 + (EPS,),
            ValueError,
            rf"rms_norm takes rows of up to {most} .*{dtype}, not {most + 1}: norms_long",
        )


LEADS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])
# Lengths of one block and two, even and odd, and more rows than the programs of a backward have tiles.
ROWS = [(17, 5), (5, 1), (17, 5000), (409, 100), (2, 4097), (0, 7), (9, 1000), (2, 8191)]
ROWS += [(4096 // N + 1, N) for N in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 257, 512, 1024)]
ROWS += [(2, N) for N in (2048, 2049, 3000, 4096, 5120, 6145, 8192, 8200, 12288, 12289, 16384)]
ROWS += [(3, 0), (13, 9000)]
# Sums are in trees.
OF_ALL = {
    "sizes": ROWS,
    "small": (2, 5),
    "fits": lambda size, dtype: size[-1] <= longest(dtype),
    "shapes": st.tuples(LEADS, sizes(64, 600)).map(lambda drawn: (*drawn[0], drawn[1])),
    "roundings": 64,
}
CONTRACT = [
    Case(
        "rms_norm",
        matrices(1),
        exact,
        autocast=torch.float32,
        reference=lambda x, weight, eps: exact(x.double(), weight.double(), eps)[0].value.to(x.dtype),
        special=special,
        gradients=lambda dy, x, weight, eps: exact_gradients(dy, None, x, weight, eps),
        with_gradients=2,
        refused=[
            *refused("rms_norm", TypeError, "one float dtype .*float64", lambda draw: (draw(2, 3), draw(3).double())),
            *refused("rms_norm", TypeError, r".*torch\.int32", lambda draw: (draw(2, 3).int(), draw(3).int())),
            *refused(
                "rms_norm", TypeError, r"one float dtype and device, not .*, None\]", lambda draw: (draw(2, 3), None)
            ),
            *refused(
                "rms_norm",
                ValueError,
                r"shapes \(\.\.\., N\) and \(N,\), not \[\(2, 3\)",
                lambda draw: (draw(2, 3), draw(2)),
                lambda draw: (draw(2, 3), draw(2, 3)),
                lambda draw: (draw(2, 3), draw()),
            ),
            *refused("rms_norm", ValueError, "shapes ", lambda draw: (draw(), draw())),
            *too_long(*FLOATS),
        ],
        **OF_ALL,
    ),
    Case(
        "rms_norm_residual",
        matrices(2),
        exact_residual,
        autocast=torch.float32,
        gradients=exact_gradients_residual,
        with_gradients=3,
        refused=[
            *refused(
                "rms_norm_residual",
                TypeError,
                ".*float16",
                lambda draw: (draw(2, 3), draw(2, 3).half(), draw(3)),
            ),
            *refused("rms_norm_residual", ValueError, r".*\(1, 3\)", lambda draw: (draw(2, 3), draw(1, 3), draw(3))),
        ],
        **OF_ALL,
    ),
    Case(
        "rms_norm_backward",
        matrices(3),
        exact_gradients,
        refused=[
            *refused(
                "rms_norm_backward",
                ValueError,
                "shapes ",
                lambda draw: (draw(1, 3), None, draw(2, 3), draw(3)),
                lambda draw: (draw(2, 3), draw(1, 3), draw(2, 3), draw(3)),
            ),
        ],
        **OF_ALL,
    ),
    Case("rms_norm_backward", without_dh, exact_gradients, name="rms_norm_backward without dh", **OF_ALL),
]


def test_gradients_of_one_result(taken: ModuleType) -> None:
    """A result that nobody used adds nothing to a gradient; the norm is that of the sum as it was rounded."""
    x, residual, dy = (Layout("contiguous", k).make((12, 50), torch.bfloat16, DEVICE) for k in range(3))
    weight = Layout("contiguous", 3).make((50,), torch.bfloat16, DEVICE)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    y, h = taken.rms_norm_residual(*leaves, EPS)
    assert torch.equal(y, taken.rms_norm(h, weight, EPS))
    inputs = h.detach(), weight.detach(), EPS
    for used, given in ((y, (dy, None)), (h, (dy * 0, dy))):
        dx, dw = taken.rms_norm_backward(*given, *inputs)
        for grad, expected in zip(torch.autograd.grad(used, leaves, dy, retain_graph=True), (dx, dx, dw), strict=True):
            assert torch.equal(grad, expected)


def test_plans(taken: ModuleType) -> None:
    """As many loads wait in shared memory as fit, and vectors divide a row and its distance to the next."""
    rows = torch.empty(10**6, 12288, dtype=torch.bfloat16, device="meta")
    for dtype, stages in ((torch.bfloat16, 2), (torch.float32, 1)):
        assert taken._rms_norm_plan_backward(rows.to(dtype), EPS, 12288, False)[1]["STAGES"] == stages
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        assert taken._rms_norm_plan(rows[:1, :N], EPS, stride)["VEC"] == vec


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 5000):
        x, residual = (torch.randn(9, N, generator=torch.Generator().manual_seed(k)).to(recipe.DEVICE) for k in (0, 1))
        for name, (step, _) in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            step(x, y, residual)
            if "with" not in name and "backward" not in name:
                h = x + residual if "residual" in name else x
                torch.testing.assert_close(y, torch.nn.functional.rms_norm(h, (N,), h[0], 1e-6))
        torch.testing.assert_close(recipe.norm_rows(x, x[0]), torch.nn.functional.rms_norm(x, (N,), x[0], 1e-6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16."""
    x = torch.full((2, 100), 300.0, dtype=dtype, device=DEVICE)
    assert torch.equal(taken.rms_norm(x, torch.ones_like(x[0]), EPS), torch.ones_like(x))


@pytest.mark.needs_gpu_memory(15)
def test_beyond_int32(taken: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(2**19 + 1, 2**12, dtype=torch.float16, device=DEVICE)
    x[-1] = 2
    ones = torch.ones_like(x[0])
    y, h = taken.rms_norm_residual(x, x, ones, EPS)
    assert y.sub_(1).abs_().max() < 1e-3
    assert (h[-1] == 4).all()
    del y, h
    dx, _ = taken.rms_norm_backward(x, None, x, ones, EPS)
    assert dx.abs_().max() < 1e-2


def test_gpu_that_does_not_tell_its_shared_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's, torch has no such property."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304))
    assert taken._rms_norm_gpu.__wrapped__(torch.device("cuda")) == (304, 64 * 1024)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "a mean over the block",
        "r = tl.rsqrt(squares / N + EPS)\n    weight",
        "r = tl.rsqrt(squares / BLOCK_N + EPS)\n    weight",
    ),
    ("a second block without its squares", "tl.sum(x * x) + tl.sum(x_rest * x_rest)", "tl.sum(x * x)"),
    ("a first of two blocks without its squares", "tl.sum(x * x) + tl.sum(x_rest", "tl.sum(x_rest"),
    ("a second block without its weight", "x_rest * r * last, mask", "x_rest * r, mask"),
    ("norm stored without a mask", "y_rows + offs_n, x * r * weight, mask=mask)", "y_rows + offs_n, x * r * weight)"),
    ("a load without a mask", "tl.load(ptrs, mask=mask, other=0)", "tl.load(ptrs)"),
    ("a residual taken for adjacent", "residual_ptr + offs_m * stride_rm", "residual_ptr + offs_m * N"),
    (
        "rows behind the last",
        "and the same values are stored.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "and the same values are stored.\n",
    ),
    ("vectors across rows", "math.gcd(N, *strides, 16 // x", "math.gcd(*strides, 16 // x"),
    ("dx stored without a mask", "dx_ptr + rows + offs_n, dx, mask=mask)", "dx_ptr + rows + offs_n, dx)"),
    ("a weight gradient of the last rows", "        dw += dy * (h * r)", "        dw = dy * (h * r)"),
    (
        "a weight gradient of the last rest",
        "            dw_rest += dy_rest * (h_rest * r)",
        "            dw_rest = dy_rest * (h_rest * r)",
    ),
    ("a slope without the second block", "            products += tl.sum(", "            tl.sum("),
    (
        "rows counted twice",
        "        mask = None if REST else (offs_m < M) & (offs_n < N)\n",
        "        offs_m = tl.minimum(offs_m, M - 1)\n        mask = None if REST else offs_n < N\n",
    ),
    ("half an accumulator, normed", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("h read with the stride of dy", "h_ptr + offs_m * stride_hm", "h_ptr + offs_m * N"),
    ("no gradient of h", "    if ADD:\n            dx += ", "    if False:\n            dx += "),
    ("twice the gradient of the residual", "    return dx, dx, dw, None\n", "    return dx, 2 * dx, dw, None\n"),
]
