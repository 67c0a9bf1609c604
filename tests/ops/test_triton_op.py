"""The ops of the recipe A kernel as an op, their gradients, and what the page says of ops."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, shapes
from tolerance import assert_within
from torch.autograd.gradcheck import GradcheckError

BLOCK = 1024  # of the recipe
MOST = 8 * BLOCK
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the recorded run shows it")


def reference(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return value, gradients and magnitudes of these in float64, for a gradient and the two arguments."""
    grad, x, y = (t.detach().double() for t in tensors)
    s = torch.sigmoid(x)
    dx, dy = grad * y * s * (1 + x * (1 - s)), grad * x * s
    # What is added up in dx may cancel; the error is that of the terms.
    return [x * s * y, dx, dy, (x * s * y).abs(), (grad * y * s * (1 + x.abs() * (1 - s))).abs(), dy.abs()]


def assert_close(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == recipe.DEVICE.type
    assert out.shape == expected.shape
    # exp's argument is rounded, which is a relative error of 2 |x| < 16 roundings, and there are eight more operations.
    assert_within(out, expected, magnitude, roundings=32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(shape=shapes(BLOCK, MOST), of_x=layouts(), of_y=layouts())
def test_value(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_x: Layout, of_y: Layout) -> None:
    """The value is right in any layout, and its dtype is that of the arguments."""
    x, y = of_x.make(shape, dtype, recipe.DEVICE), of_y.make(shape, dtype, recipe.DEVICE)
    out = guarded(recipe.silu_mul, x, y)
    assert out.dtype == dtype
    assert torch.equal(recipe.silu_mul(x, y), out)
    value, _, _, magnitude, _, _ = reference(x, x, y)
    assert_close(recipe, out, value, magnitude)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(shape=shapes(BLOCK, MOST), layout=st.tuples(layouts(), layouts(), layouts()))
def test_gradients(
    recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], layout: tuple[Layout, Layout, Layout]
) -> None:
    """The gradients are right in any layout, that of the incoming gradient too."""
    grad, x, y = (each.make(shape, dtype, recipe.DEVICE) for each in layout)
    dx, dy = guarded(recipe.silu_mul_backward, grad, x, y)
    assert dx.dtype == dy.dtype == dtype
    pair = x.requires_grad_(), y.requires_grad_()
    for a, b in zip(torch.autograd.grad(recipe.silu_mul(*pair), pair, grad), (dx, dy), strict=True):
        assert torch.equal(a, b)
    _, expected_dx, expected_dy, _, magnitude_dx, magnitude_dy = reference(grad, x, y)
    assert_close(recipe, dx, expected_dx, magnitude_dx)
    assert_close(recipe, dy, expected_dy, magnitude_dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=10)
@given(shape=shapes(16, 40), seed=st.integers(0, 2**31))
def test_second_derivatives(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    """A loss with gradients in it has the gradient that it has in PyTorch."""
    torch.manual_seed(seed)
    weights = torch.randn((3, *shape), dtype=dtype, device=recipe.DEVICE)
    pair = [torch.randn(shape, dtype=dtype, device=recipe.DEVICE).requires_grad_() for _ in range(2)]

    def second(op: Callable[..., torch.Tensor], wide_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        x, y = (t.detach().to(wide_dtype).requires_grad_() for t in pair)
        w, a, b = weights.to(wide_dtype)
        dx, dy = torch.autograd.grad((op(x, y) * w).sum(), (x, y), create_graph=True)
        return torch.autograd.grad((a * dx + b * dy).sum() + (dx * dy).sum(), (x, y))

    out = second(recipe.silu_mul, dtype)
    expected = second(recipe.silu_mul_torch, torch.float64)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_guards_reach_into_the_op(recipe: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(5, device=recipe.DEVICE)
    with Guard() as guard:
        outputs = recipe.silu_mul(x, x), *recipe.silu_mul_backward(x, x, x)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


def test_gradcheck(recipe: ModuleType) -> None:
    """Both ops, and the formula in PyTorch, pass gradcheck and gradgradcheck."""
    tensors = recipe.inputs(2, 3)
    assert torch.autograd.gradcheck(recipe.silu_mul, tensors)
    assert torch.autograd.gradgradcheck(recipe.silu_mul, tensors)
    assert torch.autograd.gradcheck(recipe.silu_mul_backward, (*tensors, tensors[0]))
    recipe.silu_mul.register_autograd(recipe.backward_in_torch, setup_context=recipe.save)
    try:
        assert torch.autograd.gradcheck(recipe.silu_mul, tensors)
        assert torch.autograd.gradgradcheck(recipe.silu_mul, tensors)
    finally:
        recipe.silu_mul.register_autograd(recipe.backward, setup_context=recipe.save)


@given(shape=shapes(BLOCK, 3 * BLOCK), of_y=layouts(), dtype=st.sampled_from(FLOATS))
def test_in_place(recipe: ModuleType, shape: tuple[int, ...], of_y: Layout, dtype: torch.dtype) -> None:
    """The op with an underscore changes its first argument, tells autograd so, and returns nothing."""
    x, y = Layout("offset", 0).make(shape, dtype, recipe.DEVICE), of_y.make(shape, dtype, recipe.DEVICE)
    expected, version = recipe.silu_mul(x, y), x._version
    assert recipe.silu_mul_(x, y) is None
    assert torch.equal(x, expected)
    assert x._version > version


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    for op in (recipe.silu_mul, recipe.silu_mul_, lambda x, y: recipe.silu_mul_backward(x, x, y)):
        with pytest.raises(TypeError, match=r"not torch\.int32"):
            op(x.int(), x.int())
        with pytest.raises(ValueError, match=r"one dtype, shape and device, not .*\(2, 3\).*\(3,\)"):
            op(x, x[0])
        with pytest.raises(ValueError, match=r"torch\.float32.*torch\.float64"):
            op(x, x.double())
        with pytest.raises(ValueError, match="meta"):
            op(x, x.to("meta"))
    for wrong in (x.T, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match="takes a contiguous x, and has no backward"):
            recipe.silu_mul_(wrong, wrong.detach())
    with pytest.raises(ValueError, match="has no backward"):
        recipe.silu_mul_(x.clone(), x.clone().requires_grad_())


def test_autograd_does_not_notice_a_change() -> None:
    """Without its own refusal, an op that changes a tensor which needs a gradient is ignored by autograd."""

    @torch.library.custom_op("triton_gallery_test::double_", mutates_args={"x"})
    def double_(x: torch.Tensor) -> None:
        x.mul_(2)

    x = torch.ones(3, requires_grad=True)
    copy = x.clone()
    double_(copy)
    assert copy.tolist() == [2, 2, 2]
    assert torch.autograd.grad(copy.sum(), x)[0].tolist() == [1, 1, 1]


def test_forward_mode_is_lost_only_without_gradients(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op drops a tangent silently where no input requires a gradient; where one does, it raises."""
    x, y = recipe.inputs(2, 3)
    monkeypatch.setattr(recipe, "x", x, raising=False)
    monkeypatch.setattr(recipe, "y", y, raising=False)
    assert recipe.forward_mode_tangent(recipe.silu_mul) is None
    with pytest.raises(NotImplementedError):
        recipe.forward_mode_tangent(recipe.SiluMul.apply)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        recipe.silu_mul(torch.autograd.forward_ad.make_dual(x, y.detach()), y)


def test_function_is_right_the_first_time(recipe: ModuleType) -> None:
    """The autograd.Function of the page is a fair opponent: its own gradients are right."""
    tensors = recipe.inputs(2, 3)
    assert torch.autograd.gradcheck(recipe.SiluMul.apply, tensors)
    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(recipe.SiluMul.apply, tensors)


FOUND = """
def found(name):
    print(name, len(torch._library.triton.get_triton_kernels_for_op(name)))

def helper(kernel, x, out):
    wrap_triton(kernel)[(1,)](x, out, out, x.numel(), tl.float32, BLOCK)

@triton_op("test::helper", mutates_args={})
def by_helper(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    helper(silu_mul_kernel, x, out)
    return out

@triton_op("test::attribute", mutates_args={})
def by_attribute(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(silu_mul_kernel)[(1,)](x, out, out, x.numel(), tl.float32, BLOCK)
    return out

for name in ("triton_gallery::silu_mul", "triton_gallery::silu_mul_backward", "triton_gallery::silu_mul_",
             "triton_gallery::shown", "test::helper", "test::attribute"):
    found(name)
"""


def test_which_kernels_are_in_the_key(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch finds the kernels of this page's ops, and not those behind a helper or torch.library.wrap_triton."""
    recipe.run(*recipe.PAGE, recipe.silu_mul_._abstract_fn, recipe.versions[6], FOUND)
    assert capsys.readouterr().out.split() == [
        *("triton_gallery::silu_mul", "1", "triton_gallery::silu_mul_backward", "1"),
        *("triton_gallery::silu_mul_", "1", "triton_gallery::shown", "1", "test::helper", "0", "test::attribute", "0"),
    ]


@without_a_gpu
def test_compiler_ignores_register_kernel(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """An op with a kernel for the CPU runs there, but compiled it launches the Triton kernel."""
    recipe.run(
        *(*recipe.PAGE, recipe.inputs, recipe.silu_mul_torch, recipe.outcome),
        'silu_mul.register_kernel("cpu")(silu_mul_torch)',
        "x, y = (t.detach() for t in inputs(2, 3))",
        "print(tuple(silu_mul(x, y).shape))",
        'print(outcome(torch.compile(silu_mul, backend="aot_eager"), x, y))',
    )
    eager, compiled = capsys.readouterr().out.split("\n", 1)
    assert eager == "(2, 3)"
    assert "Error" in compiled


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    text = printed("pytorch/triton_op")
    assert max(map(len, text.splitlines())) <= 80
    joined = re.sub(r"\s+", " ", text)
    for part in (
        "triton_gallery::silu_mul(Tensor x, Tensor y) -> Tensor",
        "RuntimeError: Trying to backward through triton_gallery.silu_mul_backward.default but no autograd formula",
        "('test_schema', 'SUCCESS') ('test_autograd_registration', 'SUCCESS') ('test_faketensor', 'SUCCESS')",
        "triton_kernel_wrapper_functional ['out_ptr']",
        "TypeError: triton_op() missing 1 required keyword-only argument: 'mutates_args'",
        "TypeError: triton_op() missing 1 required positional argument: 'name'",
        "Parameter x must have a type annotation",
        "RuntimeError: Cannot call @triton.jit'd outside of the scope of a kernel",
        "CompilationError: Unsupported ptr type",
        "ValueError: opcheck(op, ...): op must be instance of",
        "gradient_has_gradient, Function: False gradient_has_gradient, triton_op: True",
        "forward_mode_tangent, Function: NotImplementedError",
        "forward_mode_tangent, triton_op: None",
        "triton_gallery::silu_mul_(Tensor(a0!) x, Tensor y) -> ()",
        "RuntimeError: Cannot register autograd formula for non-functional operator",
        "ValueError: silu_mul_ takes a contiguous x, and has no backward",
    ):
        assert part in joined
    assert re.search(r"aten\.empty_like\.default +\[s\d+, s\d+\]", text), "the sizes are not symbols"


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("silu_mul", lambda normal, M, N: (normal(M, N), normal(M, N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a gradient stored without a mask", "grad * x * s, mask=mask)", "grad * x * s)"),
    ("half a gradient", "s * (1 + x * (1 - s)), mask=mask)", "s, mask=mask)"),
    ("half a second gradient", "grad * (a * y * ddh + b * dh)", "grad * a * y * ddh"),
]
