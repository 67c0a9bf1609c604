"""Values that kernels easily get wrong, in every op that may: rows without a variance, very low scores, long sums."""

# ruff: noqa: N806 - sizes have the recipes' names

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from collect_cases import runs_here
from inputs import DEVICE

Load = Callable[[str], ModuleType]
HALVES = [torch.float16, torch.bfloat16]
EPS = 1e-5


def take(load_op: Load, recipe: str) -> ModuleType:
    """Return the op of a recipe, as whoever takes it imports it."""
    if not runs_here(recipe):
        pytest.skip(f"NOT TESTED: {recipe} needs another GPU")
    return load_op(f"{recipe}.py")


NORMS = [("fusion/layer_norm", "layer_norm"), ("fusion/norms_long", "norms_long_layer_norm")]


@pytest.mark.parametrize(
    ("value", "dtype", "weight"),
    [
        *((value, torch.float32, 1.0) for value in (0.1, 100.1, 3333.3, 333333.3, -1e30)),
        *((value, torch.float64, 1e16) for value in (0.1, 3333.3)),
        *((100.1, dtype, 1.0) for dtype in HALVES),
    ],
)
@pytest.mark.parametrize("N", [50, 1003, 5120, 8191])  # of one block, of two, and masked
@pytest.mark.parametrize(("recipe", "name"), NORMS, ids=[name for _, name in NORMS])
def test_constant_rows(
    load_op: Load, recipe: str, name: str, N: int, value: float, dtype: torch.dtype, weight: float
) -> None:
    """LayerNorm of a row of equal numbers is the bias, whatever rounds in the mean, and the gradient is finite."""
    norm = getattr(take(load_op, recipe), name)
    x = torch.full((3, N), value, dtype=dtype, device=DEVICE, requires_grad=True)
    weights, bias = (torch.full((N,), number, dtype=dtype, device=DEVICE) for number in (weight, 0.5))
    y = norm(x, weights, bias, EPS)
    torch.testing.assert_close(y, bias.expand(3, N), rtol=0, atol=1e-6)
    assert torch.autograd.grad(y, x, torch.randn_like(y) / weight)[0].isfinite().all()


def packed(op: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call varlen_attention with one sequence."""
    (LQ, LK), heads = (t.shape[2] for t in (q, k)), (t[0].transpose(0, 1) for t in (q, k, v))
    ends = [torch.tensor([0, L], dtype=torch.int32, device=DEVICE) for L in (LQ, LK)]
    return op(*heads, *ends, LQ, LK, scale=1.0).transpose(0, 1)[None]


def paged(op: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call decode_attention with one page."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    page = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    length = torch.full((1,), k.shape[1], dtype=torch.int32, device=DEVICE)
    return op(q, k, v, page, length, scale=1.0).transpose(1, 2)


def direct(op: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Call an op that takes heads before tokens."""
    return op(*tensors, scale=1.0)


ATTENTION = {
    "flash_attention": direct,
    "flash_attention_forward": direct,
    "attention_variants": direct,
    "hopper_attention": direct,
    "gluon_attention": direct,
    "varlen_attention": packed,
    "decode_attention": paged,
}
HALF_ALONE = {"hopper_attention", "gluon_attention"}


# In these the difference of equal scores is exactly 0, on a GPU too.
ANY_SCORE = {"flash_attention_forward", "decode_attention"}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("score", "dtype"),
    [
        (2.0**27, torch.float32),
        (2.0**27, torch.float16),
        (2.0**27, torch.bfloat16),
        (2.0**56, torch.float64),
        (2.2e38, torch.float32),
        (2.2e38, torch.bfloat16),
        (1e308, torch.float64),
    ],
)
@pytest.mark.parametrize("name", ATTENTION)
def test_large_scores(load_op: Load, name: str, score: float, dtype: torch.dtype, sign: int) -> None:
    """Where all scores are equal, the result is the mean of v, up to the largest score that the docstring names."""
    if name in HALF_ALONE and dtype.itemsize > 2:
        pytest.skip("an op for half precision alone")
    if score > 2**56 and name not in ANY_SCORE:
        pytest.skip("the docstring promises nothing for such scores")
    op = getattr(take(load_op, f"attention/{name}"), name)
    D, keys = 64, 48
    q = torch.zeros(1, 1, 1, D, dtype=dtype, device=DEVICE)
    k, v = torch.zeros(2, 1, 1, keys, D, dtype=dtype, device=DEVICE)
    q[..., 0], k[..., 0] = 2**13, sign * score / 2**13
    v[:] = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(v)
    expected = v.double().mean(2, keepdim=True).expand(q.shape).to(dtype)
    out = ATTENTION[name](op, q, k, v)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


ROWS = 512  # a sum of ones in bfloat16 would end at 256


@pytest.mark.parametrize(
    ("recipe", "name"),
    [*NORMS, ("fusion/rms_norm", "rms_norm"), ("fusion/norms_long", "norms_long_rms_norm")],
    ids=lambda value: value,
)
def test_gradients_of_vectors(load_op: Load, recipe: str, name: str) -> None:
    """A weight's and a bias's gradient are sums over all rows, rounded to half precision at their end alone."""
    norm = getattr(take(load_op, recipe), name)
    x = torch.tensor([1.0, -1.0], dtype=torch.bfloat16, device=DEVICE).repeat(ROWS, 4)
    vectors = [torch.ones(8, dtype=x.dtype, device=DEVICE, requires_grad=True) for _ in range(1 + ("layer" in name))]
    y = norm(x, *vectors, 0.0)
    grads = torch.autograd.grad(y, vectors, torch.ones_like(y))
    for grad, per_row in zip(grads, (x[0], torch.ones_like(x[0])), strict=False):
        assert torch.equal(grad, ROWS * per_row)


def test_gradient_of_a_bias(load_op: Load) -> None:
    op = take(load_op, "matmul/linear_gelu")
    shapes = (ROWS, 16), (16, 16), (16,)
    x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
    bias += 16  # where GELU has a slope of 1
    (grad,) = torch.autograd.grad(op.linear_gelu(x, weight, bias.requires_grad_()), bias, torch.ones_like(x))
    assert torch.equal(grad, torch.full_like(bias, ROWS))


def test_gradient_of_sinks(load_op: Load) -> None:
    """A sink's gradient is summed over all queries."""
    op = take(load_op, "attention/attention_variants")
    q = torch.zeros(2, 1, ROWS, 16, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.zeros(2, 2, 1, 1, 16, dtype=q.dtype, device=DEVICE)
    v[..., 0] = -1
    sinks = torch.zeros(1, dtype=q.dtype, device=DEVICE, requires_grad=True)
    grad = torch.zeros_like(q)
    grad[..., 0] = 1
    (grad_sinks,) = torch.autograd.grad(op.attention_variants(q, k, v, sinks=sinks), sinks, grad)
    # Sink and key have a half each, so each query's output is -1/2, and changes by a half of it.
    assert torch.equal(grad_sinks, torch.full_like(sinks, 2 * ROWS / 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("call", [None, packed], ids=["attention_variants", "varlen_attention"])
def test_rounding_of_the_gradient_of_sinks(
    load_op: Load, call: Callable[..., torch.Tensor] | None, dtype: torch.dtype
) -> None:
    """Its error is that of the result, which the backward reads as it was rounded: it adds none of its own.

    The first queries see few keys, so a sink has much of their weight.
    """
    name = "varlen_attention" if call else "attention_variants"
    op = getattr(take(load_op, f"attention/{name}"), name)
    heads, L, D = 4, 100, 64
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, heads, L, D, generator=generator).to(DEVICE, dtype) for _ in range(4))
    sinks = torch.randn(heads, generator=generator).to(DEVICE).requires_grad_()
    given = partial(op, causal=True, sinks=sinks) if call else partial(op, span="causal", sinks=sinks, scale=1.0)
    out = call(given, q, k, v) if call else given(q, k, v)
    (found,) = torch.autograd.grad(out, sinks, grad)
    s = (q.double() @ k.double().mT).masked_fill(torch.ones(L, L, device=DEVICE).triu(1).bool(), -torch.inf)
    p = torch.softmax(torch.cat([s, sinks.double()[None, :, None, None].expand(1, heads, L, 1)], -1), -1)
    exact, of_rounded = (
        -(p[..., -1] * (result * grad.double()).sum(-1)).sum((0, 2)).detach()
        for result in (p[..., :-1] @ v.double(), out.double())
    )
    off = (exact - of_rounded).abs().max()
    assert off > 1e-4 if dtype == torch.float16 else off < 1e-5
    torch.testing.assert_close(found.double(), of_rounded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [-1.0, -5.0])
@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention"])
def test_gradients_of_gates(load_op: Load, name: str, gate: float) -> None:
    """The gradient of a strong decay is as near as the other gradients: what a token reads of itself cancels."""
    op = getattr(take(load_op, f"attention/{name}"), name)
    B, T, heads, D = 1, 70, 2, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(B, T, heads, D, generator=generator).half().to(DEVICE) for _ in range(4))
    k = torch.nn.functional.normalize(k.float(), dim=-1).half()
    g = torch.full((B, T, heads), gate, device=DEVICE)
    beta = torch.rand(B, T, heads, generator=generator).to(DEVICE)
    delta = name == "gated_delta_rule"
    given = [t.requires_grad_() for t in (q, k, v, g, *([beta] if delta else []))]
    doubles = [t.detach().double().requires_grad_() for t in given]

    def by_tokens(q, k, v, g, beta=None):  # type: ignore[no-untyped-def]
        state, out = q.new_zeros(B, heads, D, D), []
        for t in range(T):
            state = state * g[:, t].exp()[..., None, None]
            x = v[:, t] if beta is None else (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * x[:, :, None]
            out.append((q[:, t, :, None] @ state)[:, :, 0] * D**-0.5)
        return torch.stack(out, 1)

    actual = torch.autograd.grad(op(*given)[0], given, grad)[3]
    right = torch.autograd.grad(by_tokens(*doubles), doubles, grad.double())[3]
    assert (actual - right).norm() <= 2e-3 * right.norm()
